/* SPDX-License-Identifier: Apache-2.0 */
/* sim.c: arenas, opening and closing of the simulated communicator. */
#include "comm/sim/sim_inside.h"
#include "kernels/alloc.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct sim_arena {
    struct zr_arena base;
    struct zr_device *dev;
};

static void free_sim_arena(struct zr_arena *a)
{
    struct sim_arena *own = (struct sim_arena *)a;
    if (a->base)
        own->dev->ops->free(own->dev, a->base, a->bytes);
    free(own);
}

/* Makes an arena on all ranks of the world, or on none. */
static int sim_arena(struct zr_comm *c, int64_t bytes, struct zr_arena **out)
{
    struct zr_sim_comm *m = zr_sim_comm_of(c);
    struct zr_sim_comm_world *d = m->world;
    const struct zr_sim_options *o = zr_sim_config(d->w);
    int rank = m->sim_rank;
    struct sim_arena *a = calloc(1, sizeof *a);
    void *p = NULL;
    if (!a)
        abort();
    a->dev = zr_sim_device(d->w, rank);
    d->all->arena_failed |= a->dev->ops->alloc(a->dev, bytes, &p) != 0;
    d->all->n_arenas++;
    a->base = (struct zr_arena){.free = free_sim_arena, .base = p, .bytes = bytes, .n_held = 1};
    m->making = &a->base; /* if the rank dies while it waits, closing drops it */
    m->n_made++;
    while (d->all->n_arenas < m->n_made * o->world && !zr_first_code(&d->failure)) {
        o->yield(o->arg, rank);
        zr_sim_host(d->w, rank, ZR_SIM_MODEL);
    }
    m->making = NULL;
    int code = zr_first_code(&d->failure);
    if (d->all->arena_failed || code) {
        zr_arena_drop(&a->base);
        return code ? zr_fail(code, "%s", d->failure.text)
                    : zr_fail(ZERO_ERR_NOMEM, "sim %s: a rank has no memory for the arena", d->name);
    }
    zr_shadow_name(d->rec, p, d->name);
    zr_shadow_set(d->rec, p, bytes, (struct zr_content){.kind = ZR_CONTENT_ZERO});
    *out = &a->base;
    return 0;
}

/* Whether a flaw omits an exchange, or an agreement that sums nothing. */
static bool lacks_barrier(struct zr_comm *c)
{
    const struct zr_sim_comm_world *d = zr_sim_comm_of(c)->world;
    bool of_job = zr_sim_line_number(d->w, zr_sim_speaker(d->w)->id) == ZR_SIM_LOOP;
    return zr_sim_comm_flawed(d, of_job ? ZR_SIM_NO_BARRIER_IN_STEP : ZR_SIM_NO_BARRIER);
}

static int sim_run(struct zr_comm *c, struct zr_stream *s, const struct zr_comm_op *op)
{
    const struct zr_sim_comm_world *d = zr_sim_comm_of(c)->world;
    enum zr_op kind = (enum zr_op)op->post.op;
    if (kind == ZR_OP_BROADCAST && d->symmetric)
        return zr_fail(ZERO_ERR_NOTSUP, "sim: representatives of a world have no broadcast");
    if (kind == ZR_OP_ALL_GATHER && zr_sim_comm_flawed(d, ZR_SIM_NO_GATHER))
        return 0;
    if ((kind == ZR_OP_EXCHANGE || (kind == ZR_OP_AGREE && op->n_sum == 0)) && lacks_barrier(c))
        return 0;
    return zr_sim_meeting_join(c, s, op);
}

static void sim_abort(struct zr_comm *c, int code, const char *why)
{
    zr_sim_comm_fail(zr_sim_comm_of(c)->world, code, why);
}

static void free_world(struct zr_sim_comm_world *d)
{
    if (--d->all->n_groups == 0)
        free(d->all);
    free(d->ring);
    free(d->ranks);
    free(d->members);
    free(d->place_of);
    free(d->weight);
    free(d);
}

static void sim_close(struct zr_comm *c)
{
    struct zr_sim_comm *m = zr_sim_comm_of(c);
    struct zr_sim_comm_world *d = m->world;
    zr_arena_drop(c->held);
    zr_arena_drop(m->making);
    free(m->own_members);
    free(m);
    if (--d->n_open)
        return;
    for (uint64_t k = 0; k < d->n_ring; k++) {
        struct zr_sim_meeting *left = d->ring[(d->first + k) % d->cap];
        for (int r = 0; r < d->n; r++)
            zr_sim_part_free(left, r);
        free(left);
    }
    free_world(d);
}

static const struct zr_comm_ops sim_comm_ops = {
    .name = "sim",
    .deterministic = true,
    .arena = sim_arena,
    .run = sim_run,
    .abort = sim_abort,
    .close = sim_close,
};

static const struct zr_comm_ops sim_array_ops = {
    .name = "sim",
    .deterministic = true,
    .arena = sim_arena,
    .run = sim_run,
    .run_arrays = zr_sim_meeting_join,
    .abort = sim_abort,
    .close = sim_close,
};

/* ---- opening ---- */

static struct zr_sim_tiers tiers_of(const struct zr_sim *w, const struct zr_group *g)
{
    const struct zr_sim_options *o = zr_sim_config(w);
    struct zr_sim_tiers t = {.near = -1};
    int32_t mine = zr_group_member(g, g->rank), last = -1;
    int per = o->ranks_per_node > 0 ? o->ranks_per_node : INT32_MAX;
    for (int p = 0; p < g->size; p++) {
        int32_t host = zr_group_member(g, p) / per;
        t.near += host == mine / per;
        t.hosts += host != last; /* places go host by host */
        last = host;
    }
    t.far = g->size - t.near - 1;
    return t;
}

/* Makes the handle of part p. Returns false if there is no memory. */
static bool open_part(struct zr_sim_comm_world *d, const struct zr_sim_opening *o, int p)
{
    const struct zr_group *g = o->groups[p];
    struct zr_sim_comm *m = calloc(1, sizeof *m);
    if (!m)
        return false;
    d->members[p] = zr_group_member(g, g->rank);
    m->part = p;
    m->sim_rank = o->sim_ranks ? o->sim_ranks[p] : d->members[p];
    m->world = d;
    m->tiers = tiers_of(o->w, g);
    m->base = (struct zr_comm){.ops = zr_sim_config(o->w)->moves_arrays ? &sim_array_ops : &sim_comm_ops,
                               .group = {.size = g->size, .rank = g->rank, .members = d->members},
                               .role = o->role,
                               .alarm = &d->alarm,
                               .failure = &d->failure};
    d->place_of[m->sim_rank] = p;
    d->ranks[p] = &m->base;
    if (!d->symmetric)
        return true;
    m->own_members = calloc((size_t)g->size, sizeof *m->own_members);
    for (int k = 0; m->own_members && k < g->size; k++)
        m->own_members[k] = zr_group_member(g, k);
    m->base.group.members = m->own_members;
    return m->own_members != NULL;
}

static void close_parts(struct zr_sim_comm_world *d)
{
    for (int p = 0; d->ranks && p < d->n; p++) {
        if (d->ranks[p])
            free(zr_sim_comm_at(d, p)->own_members);
        free(d->ranks[p]);
    }
    free_world(d);
}

int zr_sim_comm_open_one(const struct zr_sim_opening *o, struct zr_comm **out)
{
    int n = o->n, world = zr_sim_config(o->w)->world;
    struct zr_sim_comm_world *d;
    if (ZR_ZALLOC(d, 1, "a simulated communicator of %d ranks", n)) {
        free(o->weight);
        return ZERO_ERR_NOMEM;
    }
    *d = (struct zr_sim_comm_world){.w = o->w,
                                    .order = o->order,
                                    .rec = zr_sim_recorder(o->w),
                                    .role = o->role,
                                    .name = zr_role_name(o->role),
                                    .n = n,
                                    .n_open = n,
                                    .size = o->groups[0]->size,
                                    .symmetric = o->weight != NULL,
                                    .weight = o->weight,
                                    .all = o->all,
                                    .members = calloc((size_t)n, sizeof *d->members),
                                    .place_of = calloc((size_t)world, sizeof *d->place_of),
                                    .ranks = calloc((size_t)n, sizeof *d->ranks)};
    bool ok = d->members && d->place_of && d->ranks;
    o->all->n_groups++;
    for (int p = 0; ok && p < n; p++)
        ok = open_part(d, o, p);
    if (!ok) {
        close_parts(d);
        return zr_fail(ZERO_ERR_NOMEM, "sim: no memory for a communicator of %d ranks", n);
    }
    for (int p = 0; p < n; p++)
        out[zr_sim_comm_at(d, p)->sim_rank] = d->ranks[p];
    return 0;
}

/* Opens all ranks of one group. */
static int open_group(struct zr_sim_opening *o, const struct zr_group *g, struct zr_comm **out)
{
    struct zr_group *each = calloc((size_t)g->size, sizeof *each);
    const struct zr_group **groups = calloc((size_t)g->size, sizeof *groups);
    int err = each && groups ? 0 : zr_fail(ZERO_ERR_NOMEM, "sim: no memory for a group of %d ranks", g->size);
    for (int p = 0; !err && p < g->size; p++) {
        each[p] = *g;
        each[p].rank = p;
        groups[p] = &each[p];
    }
    o->n = g->size;
    o->groups = groups;
    if (!err)
        err = zr_sim_comm_open_one(o, out);
    free(groups);
    free(each);
    return err;
}

struct zr_sim_role *zr_sim_role_new(void)
{
    struct zr_sim_role *all = calloc(1, sizeof *all);
    if (all)
        all->n_groups = 1; /* holds the role while it is opened */
    return all;
}

int zr_sim_comm_opened(struct zr_sim *w, struct zr_sim_role *all, int err, struct zr_comm **out)
{
    for (int r = 0; err && r < zr_sim_config(w)->world; r++) {
        zr_comm_close(out[r]);
        out[r] = NULL;
    }
    if (--all->n_groups == 0)
        free(all);
    return err;
}

int zr_sim_comm_open(struct zr_sim *w, enum zr_role role, int n_groups, const struct zr_group *groups,
                     struct zr_sim_order *order, struct zr_comm **out)
{
    int world = zr_sim_config(w)->world, err = 0;
    const struct zr_group all = zr_group_of_all(0, world);
    if (world > ZR_SIM_MAX_RANKS)
        return zr_fail(ZERO_ERR_ARG, "sim: world is %d; allowed: 1..%d", world, ZR_SIM_MAX_RANKS);
    for (int r = 0; r < world; r++)
        out[r] = NULL;
    struct zr_sim_opening o = {.w = w, .role = role, .order = order, .all = zr_sim_role_new()};
    if (!o.all)
        return zr_fail(ZERO_ERR_NOMEM, "sim: no memory for a communicator of %d ranks", world);
    for (int k = 0; k < (n_groups ? n_groups : 1) && !err; k++)
        err = open_group(&o, n_groups ? &groups[k] : &all, out);
    return zr_sim_comm_opened(w, o.all, err, out);
}
