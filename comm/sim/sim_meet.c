/* SPDX-License-Identifier: Apache-2.0 */
/* sim_meet.c: ranks of the simulated communicator meet in collectives. The k-th collective of one rank
 * meets the k-th of the others. */
#include "comm/post.h"
#include "comm/sim/sim_inside.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- failing ---- */

void zr_sim_part_free(struct zr_sim_meeting *m, int place)
{
    struct zr_sim_part *p = &m->part[place];
    zr_vclock_drop(p->entry);
    if (p->op.post.n_seg)
        free((void *)(uintptr_t)p->op.seg);
    *p = (struct zr_sim_part){.stream = p->stream};
}

/* Lets all ranks that wait in a meeting go on, with nothing done. A rank waits in at most one meeting. It may
 * end meetings when it goes on. */
static void release_all(struct zr_sim_comm_world *d)
{
    struct zr_stream *standing[ZR_SIM_MAX_RANKS] = {NULL};
    for (uint64_t k = 0; k < d->n_ring; k++) {
        struct zr_sim_meeting *m = d->ring[(d->first + k) % d->cap];
        for (int r = 0; r < d->n && !m->over; r++)
            if (m->part[r].here)
                standing[r] = m->part[r].stream;
        m->over = true;
    }
    for (int r = 0; r < d->n; r++)
        if (standing[r])
            zr_sim_resume(standing[r]);
}

void zr_sim_comm_fail(struct zr_sim_comm_world *d, int code, const char *why)
{
    if (!zr_first_keep(&d->failure, code, why))
        return;
    atomic_store(&d->alarm, 1);
    d->rec->forgiving = true;
    release_all(d);
}

void zr_sim_comm_lose(struct zr_comm *any, int rank)
{
    char why[64];
    snprintf(why, sizeof why, "rank %d was lost", rank);
    zr_sim_comm_fail(zr_sim_comm_of(any)->world, ZERO_ERR_PEER, why);
}

void zr_sim_comm_waits(const struct zr_comm *any, char *text, size_t n)
{
    const struct zr_sim_comm_world *d = ((const struct zr_sim_comm *)any)->world;
    size_t at = 0;
    *text = 0;
    for (uint64_t k = 0; k < d->n_ring; k++) {
        const struct zr_sim_meeting *m = d->ring[(d->first + k) % d->cap];
        if (m->over || !m->n_here)
            continue;
        for (int r = 0; r < d->n && at < n; r++)
            if (m->part[r].here)
                at += (size_t)snprintf(text + at, n - at, "rank %d waits in %s %s of unit %d, step %u; ",
                                       d->members[r], d->name, zr_op_name((enum zr_op)m->part[r].op.post.op),
                                       m->part[r].op.post.unit, m->part[r].op.post.step);
        for (int r = 0; r < d->n && at < n; r++)
            if (!m->part[r].here)
                at += (size_t)snprintf(text + at, n - at, "rank %d is not there; ", d->members[r]);
        return;
    }
}

/* ---- meeting ---- */

/* Compares representatives, which may belong to several groups. What depends on places may differ. */
static bool alike(const struct zr_post *a, const struct zr_post *b)
{
    return a->op == b->op && a->unit == b->unit && a->step == b->step && a->call_hash == b->call_hash &&
           a->n_seg == b->n_seg && (a->n_seg || a->bytes == b->bytes);
}

static bool parts_agree(struct zr_sim_comm_world *d, const struct zr_sim_meeting *m)
{
    for (int r = 1; r < d->n; r++) {
        const struct zr_post *a = &m->part[0].op.post, *b = &m->part[r].op.post;
        if (d->symmetric ? alike(a, b) : zr_post_same(a, b))
            continue;
        char why[512];
        snprintf(why, sizeof why,
                 "%s: ranks disagree on collective %llu: rank %d calls %s of unit %d, step %u (calls %llx), "
                 "rank %d %s of unit %d, step "
                 "%u (calls %llx)",
                 d->name, (unsigned long long)m->number, d->members[0], zr_op_name((enum zr_op)a->op),
                 a->unit, a->step, (unsigned long long)a->call_hash, d->members[r],
                 zr_op_name((enum zr_op)b->op), b->unit, b->step, (unsigned long long)b->call_hash);
        zr_report(d->rec, "%s", why);
        zr_sim_comm_fail(d, ZERO_ERR_MISMATCH, why);
        return false;
    }
    return true;
}

static void join_all(struct zr_sim_comm_world *d, struct zr_sim_meeting *m, bool entries)
{
    struct zr_vclock *all = zr_vclock_new(d->rec);
    for (int r = 0; r < d->n; r++)
        zr_vclock_join(d->rec, all, entries ? m->part[r].entry : zr_sim_line_of(m->part[r].stream)->clock);
    for (int r = 0; r < d->n; r++)
        zr_line_join(d->rec, zr_sim_line_of(m->part[r].stream), all);
    zr_vclock_drop(all);
}

/* Orders the ranks of a shift: each one starts after the place that it takes from has come, or leaves after
 * the place that takes from it has done so. */
static void join_shifted(struct zr_sim_comm_world *d, struct zr_sim_meeting *m, bool entries)
{
    struct zr_vclock *clock[ZR_SIM_MAX_RANKS];
    for (int r = 0; r < d->n; r++)
        clock[r] = zr_vclock_hold(zr_sim_line_of(m->part[r].stream));
    for (int r = 0; r < d->n; r++) {
        int from = zr_shift_from(&d->ranks[r]->group, m->part[r].op.by);
        int first = entries ? from : r, then = entries ? r : from;
        zr_line_join(d->rec, zr_sim_line_of(m->part[then].stream), clock[first]);
    }
    for (int r = 0; r < d->n; r++)
        zr_vclock_drop(clock[r]);
}

/* Orders the ranks before or after they have moved data. Representatives do not know who is before them. */
static void join_parts(struct zr_sim_comm_world *d, struct zr_sim_meeting *m, bool entries)
{
    bool shifts = m->part[0].op.post.op == ZR_OP_SHIFT && !d->symmetric;
    (shifts ? join_shifted : join_all)(d, m, entries);
}

/* Does the collective, when all ranks have come. */
static void meet_all(struct zr_sim_comm_world *d, struct zr_sim_meeting *m)
{
    enum zr_op op = (enum zr_op)m->part[0].op.post.op;
    int root = m->part[0].op.post.root;
    bool passes = op == ZR_OP_ALL_TO_ALL || op == ZR_OP_SHIFT;
    bool start_alone = op == ZR_OP_ALL_GATHER       ? zr_sim_comm_flawed(d, ZR_SIM_GATHER_STARTS_ALONE)
                       : op == ZR_OP_REDUCE_SCATTER ? zr_sim_comm_flawed(d, ZR_SIM_REDUCE_STARTS_ALONE)
                       : op == ZR_OP_EXCHANGE       ? zr_sim_comm_flawed(d, ZR_SIM_EXCHANGE_STARTS_ALONE)
                       : op == ZR_OP_AGREE          ? zr_sim_comm_flawed(d, ZR_SIM_AGREE_STARTS_ALONE)
                       : passes                     ? zr_sim_comm_flawed(d, ZR_SIM_PARTS_START_ALONE)
                                                    : true;
    bool leave_alone = op == ZR_OP_REDUCE_SCATTER ? zr_sim_comm_flawed(d, ZR_SIM_REDUCE_LEAVES_ALONE)
                       : op == ZR_OP_EXCHANGE     ? zr_sim_comm_flawed(d, ZR_SIM_EXCHANGE_LEAVES_ALONE)
                       : op == ZR_OP_AGREE        ? zr_sim_comm_flawed(d, ZR_SIM_AGREE_LEAVES_ALONE)
                       : passes                   ? zr_sim_comm_flawed(d, ZR_SIM_PARTS_LEAVE_ALONE)
                                                  : true;
    if (!start_alone)
        join_parts(d, m, true);
    for (int r = 0; r < d->n; r++) {
        if (op == ZR_OP_BROADCAST && r != root && !zr_sim_comm_flawed(d, ZR_SIM_BROADCAST_STARTS_ALONE))
            zr_line_join(d->rec, zr_sim_line_of(m->part[r].stream), m->part[root].entry);
        if (d->symmetric) {
            zr_sim_symmetric_body(d, m, r);
            continue;
        }
        switch (op) {
        case ZR_OP_ALL_GATHER:
            zr_sim_gather_body(d, m, r);
            break;
        case ZR_OP_REDUCE_SCATTER:
            zr_sim_reduce_body(d, m, r);
            break;
        case ZR_OP_BROADCAST:
            zr_sim_broadcast_body(d, m, r);
            break;
        case ZR_OP_EXCHANGE:
            zr_sim_exchange_body(d, m, r);
            break;
        case ZR_OP_AGREE:
            zr_sim_agree_half(d, m, r, false);
            break;
        case ZR_OP_ALL_TO_ALL:
        case ZR_OP_SHIFT:
            zr_sim_pass_body(d, m, r);
            break;
        case ZR_OP_ALL_REDUCE: /* only of arrays, which the simulator does not have */
            break;
        }
    }
    if (op == ZR_OP_AGREE) {
        join_all(d, m, false);
        for (int r = 0; r < d->n; r++)
            (d->symmetric ? zr_sim_symmetric_agree : zr_sim_agree_half)(d, m, r, true);
    }
    if (!leave_alone)
        join_parts(d, m, false);
    for (int r = 0; op == ZR_OP_BROADCAST && r < d->n; r++)
        if (r != root && !zr_sim_comm_flawed(d, ZR_SIM_BROADCAST_LEAVES_ALONE))
            zr_line_join(d->rec, zr_sim_line_of(m->part[root].stream),
                         zr_sim_line_of(m->part[r].stream)->clock);
}

/* Records that a rank has left, and frees meetings that all ranks have left. */
static void sim_leave(struct zr_sim_meeting *m, int place)
{
    struct zr_sim_comm_world *d = m->world;
    zr_sim_part_free(m, place);
    m->n_over++;
    while (d->n_ring && d->ring[d->first % d->cap]->n_over == d->n) {
        free(d->ring[d->first % d->cap]);
        d->first++;
        d->n_ring--;
    }
}

static bool sim_start(void *arg, struct zr_stream *s)
{
    struct zr_sim_meeting *m = arg;
    struct zr_sim_comm_world *d = m->world;
    struct zr_sim_part *p = &m->part[d->place_of[zr_sim_line_of(s)->rank]];
    p->here = true;
    p->stream = s;
    if (!zr_first_code(&d->failure))
        zr_sim_order_start(d, zr_sim_line_of(s), &p->op.post);
    p->entry = zr_vclock_hold(zr_sim_line_of(s));
    m->n_here++;
    if (zr_first_code(&d->failure))
        return true;
    if (m->n_here < d->n)
        return false;
    if (!parts_agree(d, m)) /* the other ranks were released */
        return true;
    meet_all(d, m);
    m->over = true;
    struct zr_stream *others[ZR_SIM_MAX_RANKS];
    for (int r = 0; r < d->n; r++)
        others[r] = m->part[r].stream;
    for (int r = d->n; r-- > 0;)
        sim_leave(m, r);
    for (int r = 0; r < d->n; r++)
        if (others[r] != s)
            zr_sim_resume(others[r]);
    return true;
}

/* Copies an operation and its segments. */
static struct zr_comm_op copy_of(const struct zr_comm_op *op, int size)
{
    struct zr_comm_op copy = *op;
    size_t segs =
        op->post.n_seg * (op->post.op == ZR_OP_ALL_GATHER ? sizeof *op->gather : sizeof *op->reduce);
    if (!op->post.n_seg)
        return copy;
    char *p = malloc(segs + (size_t)zr_op_lists(op) * (size_t)(size + 1) * sizeof(int64_t));
    if (!p)
        abort();
    zr_op_keep(&copy, size, p, (int64_t *)(p + segs));
    return copy;
}

int zr_sim_meeting_join(struct zr_comm *c, struct zr_stream *s, const struct zr_comm_op *op)
{
    struct zr_sim_comm *me = zr_sim_comm_of(c);
    struct zr_sim_comm_world *d = me->world;
    zr_sim_order_keep(d, me->sim_rank, &op->post);
    uint64_t k = me->n_put++;
    while (k >= d->first + d->n_ring) {
        if (d->n_ring == d->cap) {
            uint64_t cap = d->cap ? d->cap * 2 : 64;
            struct zr_sim_meeting **ring = calloc(cap, sizeof *ring);
            if (!ring)
                abort();
            for (uint64_t i = 0; i < d->n_ring; i++)
                ring[(d->first + i) % cap] = d->ring[(d->first + i) % d->cap];
            free(d->ring);
            d->ring = ring;
            d->cap = cap;
        }
        struct zr_sim_meeting *m = calloc(1, sizeof *m + (size_t)d->n * sizeof m->part[0]);
        if (!m)
            abort();
        m->world = d;
        m->number = d->first + d->n_ring;
        d->ring[m->number % d->cap] = m;
        d->n_ring++;
    }
    struct zr_sim_meeting *m = d->ring[k % d->cap];
    struct zr_sim_part *mine = &m->part[me->part];
    mine->op = copy_of(op, c->group.size);
    mine->op.post.seq = m->number + 1; /* a flaw may have omitted earlier operations */
    return zr_sim_put(s, zr_op_name((enum zr_op)op->post.op), op->post.unit, op->post.step, sim_start, m);
}
