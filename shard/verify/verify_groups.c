/* SPDX-License-Identifier: Apache-2.0 */
/* verify_groups.c: opens the communicators of a case: for each role, one communicator for each group of
 * ranks. comm/mesh.h defines the groups. */
#include "shard/verify/verify_world.h"

#include <stdlib.h>

/* ---- which rank is in which group ---- */

static void *room_for(int64_t n, size_t size)
{
    void *p = calloc((size_t)n, size);
    if (!p)
        abort();
    return p;
}

/* There are as many hosts as groups. Ranks are dealt to the hosts round-robin, or fill one host after the
 * other. */
static void place_ranks(const struct zr_verify_case *c, int32_t outer, struct zr_topology *t)
{
    int32_t inner = c->world / outer;
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

/* (n_ranks) Each rank's view of its groups. */
static int make_meshes(const struct zr_verify_world *v, int32_t inner, struct zr_mesh *mesh)
{
    const struct zr_verify_case *c = v->c;
    struct zr_topology t = {.world = 0};
    int err = 0;
    place_ranks(c, zr_verify_dp(c) / inner, &t);
    for (int id = 0; !err && id < v->n_ranks; id++) {
        t.rank = v->by_symmetry ? v->symmetry.rank[id] : id;
        t.host = t.host_of[t.rank];
        t.local_rank = t.place_of[t.rank] % t.local_size;
        err = zr_mesh_make(
            &t, &(struct zr_mesh_sizes){c->pp > 1 ? c->pp : 1, c->tp > 1 ? c->tp : 1, 1, inner}, &mesh[id]);
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
        return &mesh->shard_group;
    case ZR_ROLE_GATHER_OUTER:
    case ZR_ROLE_REDUCE_OUTER:
        return &mesh->replicate_group;
    case ZR_ROLE_TP:
        return &mesh->tp_group;
    case ZR_ROLE_CP:
        return &mesh->cp_group;
    case ZR_ROLE_WORLD:
        return &mesh->world;
    case ZR_ROLE_EVEN_PAIR:
    case ZR_ROLE_ODD_PAIR:
        return &mesh->pair[role - ZR_ROLE_EVEN_PAIR];
    case ZR_ROLE_CLOSING_PAIR:
    case ZR_ROLE_TIED:
        return &mesh->ends;
    case ZR_ROLE_CONTROL:
    case ZR_ROLES:
        break;
    }
    return &mesh->dp_group;
}

/* The wrong group that a mutant uses, within the rank's pipeline stage. It takes neighbouring ranks instead
 * of ranks with the same index in tensor parallelism; for the tensor-parallel role it takes the latter.
 * members has space for them. */
static struct zr_group other_group(const struct zr_verify_case *c, int id, const struct zr_group *g,
                                   enum zr_role role, int32_t *members)
{
    int32_t of_stage = c->world / (c->pp > 1 ? c->pp : 1), n = g->size, at = id % of_stage;
    bool strided = role == ZR_ROLE_TP;
    for (int32_t k = 0; k < n; k++)
        members[k] = id - at + (strided ? at % (of_stage / n) + k * (of_stage / n) : at / n * n + k);
    return (struct zr_group){.size = n, .rank = strided ? at / (of_stage / n) : at % n, .members = members};
}

/* ---- opening and closing ---- */

/* Opens each group once, as its first rank sees it. By symmetry each representative opens its own group. */
static int open_role(struct zr_verify_world *v, enum zr_role role, const struct zr_mesh *mesh)
{
    int n = 0;
    struct zr_comm **of = room_for(v->n_ranks, sizeof(struct zr_comm *));
    struct zr_group *groups = room_for(v->n_ranks, sizeof *groups);
    int32_t *others = room_for((int64_t)v->n_ranks * v->n_ranks, sizeof *others);
    bool other = v->mutant && v->mutant->what == ZR_OTHER_GROUP && v->mutant->roles >> role & 1;
    for (int r = 0; r < v->n_ranks; r++) {
        struct zr_group g = *group_of(&mesh[r], role);
        if (other)
            g = other_group(v->c, r, &g, role, &others[r * v->n_ranks]);
        if (v->by_symmetry || g.rank == 0)
            groups[n++] = g;
    }
    v->n_acted += other;
    int err = v->by_symmetry ? zr_sim_comm_open_symmetric(v->sim, role, &v->symmetry, groups, v->order, of)
                             : zr_sim_comm_open(v->sim, role, n, groups, v->order, of);
    free(groups);
    free(others);
    if (err)
        free(of);
    else
        v->comm[role] = v->opened[v->n_opened++] = of;
    return err;
}

/* Follows zero_wrap. Without groups there are no roles between groups. Without groups and pipeline stages the
 * REDUCE communicator also serves as CONTROL. */
static bool is_opened(const struct zr_verify_world *v, enum zr_role role)
{
    bool groups = v->stages[0].plan->spec.outer, stages = v->c->pp > 1, has_tp = v->c->tp > 1;
    switch (role) {
    case ZR_ROLE_GATHER_OUTER:
    case ZR_ROLE_REDUCE_OUTER:
        return groups;
    case ZR_ROLE_CONTROL:
        return groups || stages;
    case ZR_ROLE_TP:
        return has_tp;
    case ZR_ROLE_CP:
        return false;
    case ZR_ROLE_WORLD:
        return has_tp || stages;
    case ZR_ROLE_ODD_PAIR:
        return v->c->pp > 2;
    case ZR_ROLE_EVEN_PAIR:
    case ZR_ROLE_TIED:
        return stages;
    case ZR_ROLE_CLOSING_PAIR:
        return stages && zr_case_per_rank(v->c) > 1;
    case ZR_ROLE_GATHER:
    case ZR_ROLE_REDUCE:
    case ZR_ROLES:
        break;
    }
    return true;
}

static int open_roles(struct zr_verify_world *v, const struct zr_mesh *mesh)
{
    int err = 0;
    for (int role = 0; !err && role < ZR_ROLES; role++)
        if (is_opened(v, (enum zr_role)role))
            err = open_role(v, (enum zr_role)role, mesh);
    if (!v->comm[ZR_ROLE_CONTROL])
        v->comm[ZR_ROLE_CONTROL] = v->comm[ZR_ROLE_REDUCE];
    return err;
}

int zr_groups_open(struct zr_verify_world *v)
{
    v->mesh = room_for(v->n_ranks, sizeof *v->mesh);
    int err = make_meshes(v, v->stages[0].plan->hop[ZR_INNER].size, v->mesh);
    return err ? err : open_roles(v, v->mesh);
}

void zr_groups_close(struct zr_verify_world *v)
{
    for (int k = 0; k < v->n_opened; k++) {
        for (int r = 0; r < v->n_ranks; r++)
            zr_comm_close(v->opened[k][r]);
        free(v->opened[k]);
    }
    v->n_opened = 0;
    for (int r = 0; v->mesh && r < v->n_ranks; r++)
        zr_mesh_free(&v->mesh[r]);
    free(v->mesh);
    v->mesh = NULL;
}

void zr_groups_each(const struct zr_verify_world *v, bool (*fn)(void *arg, struct zr_comm *any), void *arg)
{
    for (int k = 0; k < v->n_opened; k++)
        for (int r = 0; r < v->n_ranks; r++)
            if (v->opened[k][r]->group.rank == 0 && !fn(arg, v->opened[k][r]))
                return;
}
