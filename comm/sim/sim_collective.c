/* SPDX-License-Identifier: Apache-2.0 */
/* sim_collective.c: which bytes a collective reads and writes on one rank, in its arena and its peers', and
 * how long it takes. */
#include "comm/sim/sim_inside.h"

#include <string.h>

static int64_t direct_ns(const struct zr_sim_options *o, const struct zr_sim_tiers *t, int64_t bytes_each)
{
    double near_s = (double)t->near * (double)bytes_each / o->near_bytes_per_s;
    double far_s = t->far ? (double)t->far * (double)bytes_each / o->far_bytes_per_s : 0;
    return (int64_t)((near_s > far_s ? near_s : far_s) * 1e9) + (t->far ? o->far_ns : o->near_ns);
}

/* Time of a ring, which is that of its slowest kind of link, as ranks send while they receive. Each link
 * carries all slices but one. */
static int64_t ring_ns(const struct zr_sim_options *o, const struct zr_sim_tiers *t, int64_t bytes_each)
{
    double passed = (double)(t->near + t->far) * (double)bytes_each;
    double near_s = t->near ? passed / o->near_bytes_per_s : 0;
    double far_s = t->far ? passed / ((t->near + 1) * o->far_bytes_per_s) : 0;
    int n_far = t->hosts - 1, n_near = t->near + t->far - n_far;
    return (int64_t)((near_s > far_s ? near_s : far_s) * 1e9) + n_near * o->near_ns + n_far * o->far_ns;
}

int64_t zr_sim_wire_ns(const struct zr_sim_comm_world *d, int64_t bytes_each, int me)
{
    const struct zr_sim_options *o = zr_sim_config(d->w);
    const struct zr_sim_tiers *t = &zr_sim_comm_at(d, me)->tiers;
    if (d->size == 1 || o->near_bytes_per_s <= 0)
        return 0;
    return o->links == ZR_SIM_LINKS_RING ? ring_ns(o, t, bytes_each) : direct_ns(o, t, bytes_each);
}

void zr_sim_gather_body(struct zr_sim_comm_world *d, struct zr_sim_meeting *m, int me)
{
    struct zr_line *l = zr_sim_line_of(m->part[me].stream);
    const struct zr_comm_op *mine = &m->part[me].op;
    int64_t each = 0;
    zr_sim_begin(d->w, l, "all_gather", mine->post.unit, mine->post.step);
    for (int i = 0; i < (int)mine->post.n_seg; i++) {
        const struct zr_gather_seg *g = &mine->gather[i];
        each += zr_cut_most(&g->cut, d->n);
        for (int p = 0; p < d->n; p++) {
            int64_t n = zr_cut_bytes(&g->cut, p);
            const char *from = zr_sim_comm_at(d, p)->base.arena + zr_gather_own(&m->part[p].op.gather[i], p);
            char *to = zr_sim_comm_at(d, me)->base.arena + g->dst + zr_cut_at(&g->cut, p);
            if (n == 0 || from == to)
                continue;
            zr_shadow_move(d->rec, l, to, from, n);
        }
    }
    zr_comm_done(d->ranks[me], mine);
    zr_sim_spend(d->w, l, zr_sim_wire_ns(d, each, me));
}

void zr_sim_reduce_body(struct zr_sim_comm_world *d, struct zr_sim_meeting *m, int me)
{
    struct zr_line *l = zr_sim_line_of(m->part[me].stream);
    const struct zr_comm_op *mine = &m->part[me].op;
    int64_t each = 0;
    zr_sim_begin(d->w, l, "reduce_scatter", mine->post.unit, mine->post.step);
    for (int i = 0; i < (int)mine->post.n_seg; i++) {
        const struct zr_reduce_seg *g = &mine->reduce[i];
        int64_t first = zr_cut_at(&g->cut, me), n = zr_cut_bytes(&g->cut, me);
        int size = (int)zr_dtype_bytes(g->dtype);
        char *to = zr_sim_comm_at(d, me)->base.arena + g->dst;
        int64_t out = n / size * (int64_t)sizeof(float);
        each += zr_cut_most(&g->cut, d->n);
        for (int p = 0; p < d->n; p++)
            zr_shadow_read(d->rec, l, zr_sim_comm_at(d, p)->base.arena + g->src + first, n);
        if (g->accumulate)
            zr_shadow_read(d->rec, l, to, out);
        zr_shadow_write(d->rec, l, to, out);
        for (int k = 0; k < d->n; k++) { /* starts with this rank's slice, as dst may lie there */
            int p = (me + k) % d->n;
            const char *from = zr_sim_comm_at(d, p)->base.arena + g->src + first;
            if (k == 0 && !g->accumulate && from == to)
                continue;
            if (k == 0 && !g->accumulate)
                zr_shadow_copy(d->rec, to, (int)sizeof(float), from, size, n / size);
            else
                zr_shadow_sum(d->rec, to, (int)sizeof(float), from, size, n / size);
        }
    }
    zr_comm_done(d->ranks[me], mine);
    zr_sim_spend(d->w, l, zr_sim_wire_ns(d, each, me));
}

void zr_sim_exchange_body(struct zr_sim_comm_world *d, struct zr_sim_meeting *m, int me)
{
    struct zr_line *l = zr_sim_line_of(m->part[me].stream);
    const struct zr_comm_op *mine = &m->part[me].op;
    zr_sim_begin(d->w, l, "exchange", mine->post.unit, mine->post.step);
    for (int p = 0; p < d->n; p++) {
        const char *from = zr_sim_comm_at(d, p)->base.arena + mine->off + p * mine->post.bytes;
        char *to = zr_sim_comm_at(d, me)->base.arena + mine->off + p * mine->post.bytes;
        if (p == me)
            continue;
        zr_shadow_move(d->rec, l, to, from, mine->post.bytes);
        memcpy(to, from, (size_t)mine->post.bytes);
    }
    zr_comm_done(d->ranks[me], mine);
    zr_sim_spend(d->w, l, zr_sim_wire_ns(d, mine->post.bytes, me));
}

void zr_sim_pass_body(struct zr_sim_comm_world *d, struct zr_sim_meeting *m, int me)
{
    struct zr_line *l = zr_sim_line_of(m->part[me].stream);
    const struct zr_comm_op *mine = &m->part[me].op;
    const bool all = mine->post.op == ZR_OP_ALL_TO_ALL;
    const int64_t bytes = mine->post.bytes, stride = all ? bytes : 0;
    const int from = zr_shift_from(&d->ranks[me]->group, mine->by);
    zr_sim_begin(d->w, l, zr_op_name((enum zr_op)mine->post.op), mine->post.unit, mine->post.step);
    for (int p = 0; p < d->n && bytes && !zr_sim_comm_flawed(d, ZR_SIM_PARTS_MOVE_NOTHING); p++)
        if (all || p == from)
            zr_shadow_move(d->rec, l, d->ranks[me]->arena + mine->to + p * stride,
                           d->ranks[p]->arena + mine->off + me * stride, bytes);
    zr_comm_done(d->ranks[me], mine);
    zr_sim_spend(d->w, l, zr_sim_wire_ns(d, all ? bytes : bytes / d->n, me));
}

void zr_sim_arrays_body(struct zr_sim_comm_world *d, struct zr_sim_meeting *m, int me)
{
    struct zr_line *l = zr_sim_line_of(m->part[me].stream);
    const struct zr_comm_op *mine = &m->part[me].op;
    const enum zr_op op = (enum zr_op)mine->post.op;
    const int64_t bytes = mine->post.bytes, size = zr_dtype_bytes(mine->arrays.dtype);
    const int shifted = zr_shift_from(&d->ranks[me]->group, mine->arrays.by);
    zr_sim_begin(d->w, l, zr_op_name(op), mine->post.unit, mine->post.step);
    for (int p = 0; p < d->n && !zr_sim_comm_flawed(d, ZR_SIM_PARTS_MOVE_NOTHING); p++) {
        const struct zr_arrays *x = &m->part[p].op.arrays;
        const char *from = (const char *)x->src + (op == ZR_OP_ALL_TO_ALL ? me * x->stride * size : 0);
        char *to = (char *)mine->arrays.dst + (op == ZR_OP_SHIFT ? 0 : p * bytes);
        if (from != to && (op != ZR_OP_SHIFT || p == shifted))
            zr_shadow_move(d->rec, l, to, from, bytes);
    }
    zr_comm_done(d->ranks[me], mine);
    zr_sim_spend(d->w, l, zr_sim_wire_ns(d, op == ZR_OP_SHIFT ? bytes / d->n : bytes, me));
}

/* The places that agree with each other: n from first on. A flaw divides them. */
struct agreeing {
    int first, n;
};

static struct agreeing agreeing_with(const struct zr_sim_comm_world *d, int me)
{
    int half = d->n / 2;
    if (!half || !zr_sim_comm_flawed(d, ZR_SIM_AGREE_APART))
        return (struct agreeing){0, d->n};
    return me < half ? (struct agreeing){0, half} : (struct agreeing){half, d->n - half};
}

/* Place p's part of the words, in the record of a place. *n is its number of words. */
static uint64_t *part_of(const struct zr_sim_comm_world *d, const struct zr_comm_op *mine, int place, int p,
                         int64_t *n)
{
    struct agreeing with = agreeing_with(d, p);
    int64_t words = mine->post.bytes / (int64_t)sizeof(uint64_t);
    int64_t from = zr_agree_part(with.n, p - with.first, words);
    *n = zr_agree_part(with.n, p - with.first + 1, words) - from;
    return (uint64_t *)(zr_sim_comm_at(d, place)->base.arena + mine->off) + from;
}

/* Combines this rank's part of the words of all records in its own record. */
static void put_together(struct zr_sim_comm_world *d, struct zr_line *l, const struct zr_comm_op *mine,
                         int me)
{
    const struct agreeing with = agreeing_with(d, me);
    int64_t n, first = zr_agree_part(with.n, me - with.first, mine->post.bytes / (int64_t)sizeof(uint64_t));
    uint64_t *to = part_of(d, mine, me, me, &n);
    for (int p = with.first; p < with.first + with.n; p++) {
        const uint64_t *from = part_of(d, mine, p, me, &n);
        zr_shadow_read(d->rec, l, from, n * (int64_t)sizeof *from);
        for (int64_t k = 0; k < n && p != me; k++)
            to[k] = first + k < mine->n_sum ? to[k] + from[k] : to[k] > from[k] ? to[k] : from[k];
    }
    zr_shadow_write(d->rec, l, to, n * (int64_t)sizeof *to);
}

void zr_sim_agree_half(struct zr_sim_comm_world *d, struct zr_sim_meeting *m, int me, bool second)
{
    struct zr_line *l = zr_sim_line_of(m->part[me].stream);
    const struct zr_comm_op *mine = &m->part[me].op;
    zr_sim_begin(d->w, l, "agree", mine->post.unit, mine->post.step);
    if (zr_sim_comm_flawed(d, ZR_SIM_AGREE_MOVES_NOTHING) ||
        (second && zr_sim_comm_flawed(d, ZR_SIM_AGREE_MOVES_A_PART)))
        return;
    if (!second) {
        put_together(d, l, mine, me);
        zr_sim_spend(d->w, l, zr_sim_wire_ns(d, mine->post.bytes / d->n, me));
        return;
    }
    const struct agreeing with = agreeing_with(d, me);
    for (int p = with.first; p < with.first + with.n; p++) {
        int64_t n;
        const uint64_t *from = part_of(d, mine, p, p, &n);
        uint64_t *to = part_of(d, mine, me, p, &n);
        if (p == me)
            continue;
        zr_shadow_read(d->rec, l, from, n * (int64_t)sizeof *from);
        zr_shadow_write(d->rec, l, to, n * (int64_t)sizeof *to);
        memcpy(to, from, (size_t)n * sizeof *to);
    }
    zr_comm_done(d->ranks[me], mine);
    zr_sim_spend(d->w, l, zr_sim_wire_ns(d, mine->post.bytes / d->n, me));
}

void zr_sim_broadcast_body(struct zr_sim_comm_world *d, struct zr_sim_meeting *m, int me)
{
    struct zr_line *l = zr_sim_line_of(m->part[me].stream);
    const struct zr_comm_op *mine = &m->part[me].op;
    zr_sim_begin(d->w, l, "broadcast", mine->post.unit, mine->post.step);
    if (me != mine->post.root && !zr_sim_comm_flawed(d, ZR_SIM_BROADCAST_MOVES_NOTHING)) {
        const char *from = zr_sim_comm_at(d, mine->post.root)->base.arena + mine->off;
        char *to = zr_sim_comm_at(d, me)->base.arena + mine->off;
        zr_shadow_move(d->rec, l, to, from, mine->post.bytes);
    }
    zr_comm_done(d->ranks[me], mine);
    zr_sim_spend(d->w, l, zr_sim_wire_ns(d, mine->post.bytes / d->n, me));
}
