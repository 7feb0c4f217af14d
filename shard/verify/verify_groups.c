/* verify_groups.c: the communicators of a case: one for each role, and of it one for each group of ranks that
 * has the role together. The groups are those of comm/mesh.h. */
#include "comm/mesh.h"
#include "shard/verify/verify_world.h"

#include <stdlib.h>

/* ---- who is where ---- */

static void *room_for(int64_t n, size_t size)
{
    void *p = calloc((size_t)n, size);
    if (!p)
        abort();
    return p;
}

/* Hosts of `inner` ranks each. Ranks go around the hosts, or fill one after the other. */
static void place_ranks(const struct zr_verify_case *c, int32_t inner, struct zr_topology *t)
{
    int32_t outer = c->world / inner;
    t->world = c->world;
    t->n_hosts = outer;
    t->local_size = inner;
    t->host_of = room_for(c->world, sizeof *t->host_of);
    t->place_of = room_for(c->world, sizeof *t->place_of);
    t->rank_at = room_for(c->world, sizeof *t->rank_at);
    for (int32_t r = 0; r < c->world; r++) {
        int32_t host = c->dealt ? r % outer : r / inner, local = c->dealt ? r / outer : r % inner;
        t->host_of[r] = host;
        t->place_of[r] = host * inner + local;
        t->rank_at[t->place_of[r]] = r;
    }
}

/* (n_ranks) what each rank finds its groups to be. */
static int make_meshes(const struct zr_verify_world *v, int32_t inner, struct zr_mesh *mesh)
{
    struct zr_topology t = {.world = 0};
    int err = 0;
    place_ranks(v->c, inner, &t);
    for (int id = 0; !err && id < v->n_ranks; id++) {
        t.rank = v->by_symmetry ? v->symmetry.rank[id] : id;
        t.host = t.host_of[t.rank];
        t.local_rank = t.place_of[t.rank] % inner;
        err = zr_mesh_make(&t, 1, 1, inner, &mesh[id]);
    }
    free(t.host_of);
    free(t.place_of);
    free(t.rank_at);
    return err;
}

static const struct zr_group *group_of(const struct zr_mesh *mesh, enum zr_role role)
{
    switch (role) {
    case ZR_ROLE_GATHER:
    case ZR_ROLE_REDUCE:
        return &mesh->in;
    case ZR_ROLE_GATHER_OUTER:
    case ZR_ROLE_REDUCE_OUTER:
        return &mesh->out;
    default:
        return &mesh->all;
    }
}

/* ---- opening and closing ---- */

/* Each group as its first rank has it; by symmetry as each representative has its own. */
static int open_role(struct zr_verify_world *v, enum zr_role role, const struct zr_mesh *mesh)
{
    int n = 0;
    struct zr_comm **of = room_for(v->n_ranks, sizeof(struct zr_comm *));
    struct zr_group *groups = room_for(v->n_ranks, sizeof *groups);
    for (int r = 0; r < v->n_ranks; r++)
        if (v->by_symmetry || group_of(&mesh[r], role)->rank == 0)
            groups[n++] = *group_of(&mesh[r], role);
    int err = v->by_symmetry ? zr_sim_comm_open_symmetric(v->sim, role, &v->symmetry, groups, v->order, of)
                             : zr_sim_comm_open(v->sim, role, n, groups, v->order, of);
    free(groups);
    if (err)
        free(of);
    else
        v->comm[role] = v->opened[v->n_opened++] = of;
    return err;
}

/* Where all ranks are one group, the one that reduces is also that of control, and nobody has a role between
 * groups. */
static int open_roles(struct zr_verify_world *v, const struct zr_mesh *mesh)
{
    static const enum zr_role inside[] = {ZR_ROLE_GATHER, ZR_ROLE_REDUCE},
                              between[] = {ZR_ROLE_GATHER_OUTER, ZR_ROLE_REDUCE_OUTER, ZR_ROLE_CONTROL};
    bool groups = v->plan->spec.outer;
    int err = 0;
    for (int i = 0; !err && i < 2; i++)
        err = open_role(v, inside[i], mesh);
    for (int i = 0; !err && groups && i < 3; i++)
        err = open_role(v, between[i], mesh);
    if (!groups)
        v->comm[ZR_ROLE_CONTROL] = v->comm[ZR_ROLE_REDUCE];
    return err;
}

int zr_groups_open(struct zr_verify_world *v)
{
    struct zr_mesh *mesh = room_for(v->n_ranks, sizeof *mesh);
    int err = make_meshes(v, v->plan->hop[ZR_INNER].size, mesh);
    if (!err)
        err = open_roles(v, mesh);
    for (int r = 0; r < v->n_ranks; r++)
        zr_mesh_free(&mesh[r]);
    free(mesh);
    return err;
}

void zr_groups_close(struct zr_verify_world *v)
{
    for (int k = 0; k < v->n_opened; k++) {
        for (int r = 0; r < v->n_ranks; r++)
            v->opened[k][r]->ops->close(v->opened[k][r]);
        free(v->opened[k]);
    }
    v->n_opened = 0;
}

void zr_groups_each(const struct zr_verify_world *v, bool (*fn)(void *arg, struct zr_comm *any), void *arg)
{
    for (int k = 0; k < v->n_opened; k++)
        for (int r = 0; r < v->n_ranks; r++)
            if (v->opened[k][r]->group.rank == 0 && !fn(arg, v->opened[k][r]))
                return;
}
