/* SPDX-License-Identifier: Apache-2.0 */
/* sim_symmetric.c: communicators whose ranks represent others (symmetry.h). */
#include "comm/sim/sim_inside.h"
#include "comm/sim/symmetry.h"

#include <stdlib.h>
#include <string.h>

/* ---- collectives ---- */

static void gather_alike(struct zr_sim_comm_world *d, struct zr_line *l, const struct zr_comm_op *p,
                         struct zr_sim_comm *me, int64_t *each)
{
    for (int i = 0; i < (int)p->post.n_seg; i++) {
        const struct zr_gather_seg *g = &p->gather[i];
        int place = me->base.group.rank;
        *each += zr_cut_most(&g->cut, d->size);
        zr_shadow_read(d->rec, l, me->base.arena + zr_gather_own(g, place), zr_cut_bytes(&g->cut, place));
        zr_shadow_write(d->rec, l, me->base.arena + g->dst, g->cut.total);
    }
}

static void reduce_alike(struct zr_sim_comm_world *d, struct zr_line *l, const struct zr_comm_op *p,
                         struct zr_sim_comm *me, int64_t *each)
{
    for (int i = 0; i < (int)p->post.n_seg; i++) {
        const struct zr_reduce_seg *g = &p->reduce[i];
        int place = me->base.group.rank;
        int64_t out = zr_cut_bytes(&g->cut, place) / zr_dtype_bytes(g->dtype) * (int64_t)sizeof(float);
        *each += zr_cut_most(&g->cut, d->size);
        zr_shadow_read(d->rec, l, me->base.arena + g->src, g->cut.total);
        if (g->accumulate)
            zr_shadow_read(d->rec, l, me->base.arena + g->dst, out);
        zr_shadow_write(d->rec, l, me->base.arena + g->dst, out);
    }
}

/* Sends and receives the parts of an all-to-all, or the one of a shift. */
static void pass_alike(struct zr_sim_comm_world *d, struct zr_line *l, const struct zr_comm_op *p,
                       struct zr_sim_comm *me, int64_t *each)
{
    const bool all = p->post.op == ZR_OP_ALL_TO_ALL;
    const int64_t bytes = p->post.bytes * (all ? d->size : 1);
    *each = all ? p->post.bytes : p->post.bytes / d->size;
    zr_shadow_read(d->rec, l, me->base.arena + p->off, bytes);
    zr_shadow_write(d->rec, l, me->base.arena + p->to, bytes);
}

/* Exchanges records, assuming that those of the other ranks equal this one's. */
static void exchange_alike(struct zr_sim_comm_world *d, struct zr_line *l, const struct zr_comm_op *p,
                           struct zr_sim_comm *me)
{
    int64_t all = d->size * p->post.bytes;
    zr_shadow_read(d->rec, l, me->base.arena + p->off, all);
    zr_shadow_write(d->rec, l, me->base.arena + p->off, all);
    for (int k = 0; k < d->size; k++) {
        char *to = me->base.arena + p->off + k * p->post.bytes;
        const char *mine = me->base.arena + p->off + me->base.group.rank * p->post.bytes;
        if (to != mine)
            memcpy(to, mine, (size_t)p->post.bytes);
    }
}

void zr_sim_symmetric_body(struct zr_sim_comm_world *d, struct zr_sim_meeting *m, int me)
{
    struct zr_sim_comm *c = zr_sim_comm_at(d, me);
    const struct zr_comm_op *p = &m->part[me].op;
    struct zr_line *l = zr_sim_line_of(m->part[me].stream);
    int64_t each = 0;
    if (p->post.op == ZR_OP_AGREE) {
        zr_sim_symmetric_agree(d, m, me, false);
        return;
    }
    zr_sim_begin(d->w, l, zr_op_name((enum zr_op)p->post.op), p->post.unit, p->post.step);
    if (p->post.op == ZR_OP_ALL_GATHER)
        gather_alike(d, l, p, c, &each);
    if (p->post.op == ZR_OP_REDUCE_SCATTER)
        reduce_alike(d, l, p, c, &each);
    if (p->post.op == ZR_OP_ALL_TO_ALL || p->post.op == ZR_OP_SHIFT)
        pass_alike(d, l, p, c, &each);
    if (p->post.op == ZR_OP_EXCHANGE) {
        exchange_alike(d, l, p, c);
        each = p->post.bytes;
    }
    zr_comm_done(&c->base, p);
    zr_sim_spend(d->w, l, zr_sim_wire_ns(d, each, me));
}

/* Combines the records of all ranks that the parts represent, in all parts. */
static void add_up_alike(struct zr_sim_comm_world *d, const struct zr_sim_meeting *m)
{
    int64_t words = m->part[0].op.post.bytes / (int64_t)sizeof(uint64_t);
    uint64_t *to = (uint64_t *)(zr_sim_comm_at(d, 0)->base.arena + m->part[0].op.off);
    for (int64_t k = 0; k < words; k++) {
        bool sums = k < m->part[0].op.n_sum;
        uint64_t all = sums ? to[k] * (uint64_t)d->weight[0] : to[k];
        for (int p = 1; p < d->n; p++) {
            uint64_t x = ((uint64_t *)(zr_sim_comm_at(d, p)->base.arena + m->part[p].op.off))[k];
            all = sums ? all + x * (uint64_t)d->weight[p] : x > all ? x : all;
        }
        to[k] = all;
    }
    for (int p = 1; p < d->n; p++)
        memcpy(zr_sim_comm_at(d, p)->base.arena + m->part[p].op.off, to, (size_t)m->part[0].op.post.bytes);
}

void zr_sim_symmetric_agree(struct zr_sim_comm_world *d, struct zr_sim_meeting *m, int me, bool second)
{
    struct zr_sim_comm *c = zr_sim_comm_at(d, me);
    const struct zr_comm_op *p = &m->part[me].op;
    struct zr_line *l = zr_sim_line_of(m->part[me].stream);
    zr_sim_begin(d->w, l, "agree", p->post.unit, p->post.step);
    zr_shadow_read(d->rec, l, c->base.arena + p->off, p->post.bytes);
    zr_shadow_write(d->rec, l, c->base.arena + p->off, p->post.bytes);
    if (second && me == 0)
        add_up_alike(d, m);
    if (second)
        zr_comm_done(&c->base, p);
    zr_sim_spend(d->w, l, zr_sim_wire_ns(d, p->post.bytes / d->size, me));
}

/* ---- opening ---- */

/* Counts the ranks of each class in the group. count has room for n. */
static void count_classes(const struct zr_symmetry *s, const struct zr_group *g, int32_t *count)
{
    memset(count, 0, (size_t)s->n * sizeof *count);
    for (int p = 0; p < g->size; p++)
        count[s->class_of[zr_group_member(g, p)]]++;
}

/* Representatives that meet, with their groups and numbers. */
struct meeting_ones {
    const struct zr_group **groups;
    int32_t *number;
    int n;
};

/* The representatives whose groups have as many ranks of each class as k's group. */
static struct meeting_ones those_with(const struct zr_symmetry *s, const struct zr_group *groups,
                                      const int32_t *count, int32_t k)
{
    struct meeting_ones t = {calloc((size_t)s->n, sizeof *t.groups), calloc((size_t)s->n, sizeof *t.number),
                             0};
    for (int32_t i = k; t.groups && t.number && i < s->n; i++) {
        if (memcmp(count + (int64_t)i * s->n, count + (int64_t)k * s->n, (size_t)s->n * sizeof *count))
            continue;
        t.groups[t.n] = &groups[i];
        t.number[t.n++] = i;
    }
    return t;
}

static int open_those(struct zr_sim_opening *o, const struct zr_symmetry *s, const struct meeting_ones *t,
                      const int32_t *count, struct zr_comm **out)
{
    o->weight = t->n ? malloc((size_t)t->n * sizeof *o->weight) : NULL;
    if (!o->weight)
        return zr_fail(ZERO_ERR_NOMEM, "sim: no memory for a communicator of %d ranks", s->n);
    o->n = t->n;
    o->groups = t->groups;
    o->sim_ranks = t->number;
    for (int p = 0; p < t->n; p++)
        o->weight[p] = count[t->number[p]];
    return zr_sim_comm_open_one(o, out);
}

int zr_sim_comm_open_symmetric(struct zr_sim *w, enum zr_role role, const struct zr_symmetry *s,
                               const struct zr_group *groups, struct zr_sim_order *order,
                               struct zr_comm **out)
{
    struct zr_sim_opening o = {.w = w, .role = role, .order = order, .all = zr_sim_role_new()};
    int32_t *count = malloc((size_t)s->n * (size_t)s->n * sizeof *count);
    int err = count && o.all ? 0 : zr_fail(ZERO_ERR_NOMEM, "sim: no memory for %d kinds of ranks", s->n);
    for (int32_t k = 0; !err && k < s->n; k++) {
        out[k] = NULL;
        count_classes(s, &groups[k], count + (int64_t)k * s->n);
    }
    for (int32_t k = 0; !err && k < s->n; k++) {
        if (out[k])
            continue;
        struct meeting_ones t = those_with(s, groups, count, k);
        err = open_those(&o, s, &t, count + (int64_t)k * s->n, out);
        free(t.groups);
        free(t.number);
    }
    free(count);
    return o.all ? zr_sim_comm_opened(w, o.all, err, out) : err;
}
