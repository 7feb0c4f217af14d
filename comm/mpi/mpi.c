/* SPDX-License-Identifier: Apache-2.0 */
/* mpi.c: the MPI communicator's vtable: checks, numbering, and what is put on the stream (see mpi_comm.h for
 * how it all works). */
#include "comm/meet/rendezvous.h"
#include "comm/mpi/mpi_comm.h"

#include <stdio.h>
#include <time.h>

/* How long operations may take to end after a failure. */
static const int64_t STUCK_NS = INT64_C(2) * 1000 * 1000 * 1000;

_Static_assert(sizeof(struct zr_mpi_op) <= ZR_CALL_BYTES, "an operation travels in a call");

/* --- putting operations on the stream --- */

/* Numbers the operation and puts it on the stream. */
static int mpi_issue(struct zr_mpi *m, struct zr_stream *s, struct zr_mpi_op *op, const struct zr_tag *tag)
{
    op->m = m;
    op->post.seq = m->next_seq + 1;
    op->post.unit = tag->unit;
    op->post.step = tag->step;
    op->post.call_hash = tag->call_hash;
    op->mark = tag->mark;
    uint64_t put = zr_seg_ring_take(&m->ring, op->post.n_seg ? op->segs.end : m->ring.put);
    m->next_seq++;
    int err = m->set->dev->ops->call(s, zr_mpi_run, op, sizeof *op);
    if (err) {
        m->next_seq--;
        zr_seg_ring_take(&m->ring, put);
    }
    return err;
}

static int mpi_check_ready(struct zr_mpi *m, enum zr_op op, int n_seg)
{
    if (!m->held)
        return zr_fail(ZR_ERR_ORDER, "%s %s: there is no arena yet", m->name, zr_op_name(op));
    if (n_seg < 0 || n_seg > ZR_RING_SEGS)
        return zr_fail(ZR_ERR_ARG, "%s %s: %d segments: 0 to %d are allowed", m->name, zr_op_name(op), n_seg,
                       ZR_RING_SEGS);
    return 0;
}

static int mpi_all_gather(struct zr_comm *c, struct zr_stream *s, const struct zr_gather_seg *seg, int n_seg,
                          const struct zr_tag *tag)
{
    struct zr_mpi *m = zr_mpi_of(c);
    struct zr_mpi_op op = {.post = {.op = ZR_OP_ALL_GATHER, .root = -1, .n_seg = (uint32_t)n_seg}};
    int err = mpi_check_ready(m, ZR_OP_ALL_GATHER, n_seg);
    if (!err)
        err = zr_gather_check("mpi all_gather", c->group.size, m->usable, seg, n_seg);
    if (err || zr_first_code(&m->set->failure))
        return err;
    zr_post_gathers(&op.post, c->group.size, seg, n_seg);
    for (int i = 0; i < n_seg && m->spread.n_hosts > 1; i++) /* what others have fetched is read there */
        zr_post_numbers(&op.post, &seg[i].dst, 1);
    if (n_seg)
        err = zr_seg_ring_keep(&m->ring, m->name, c->group.size, ZR_OP_ALL_GATHER, seg, n_seg, &op.segs);
    return err ? err : mpi_issue(m, s, &op, tag);
}

static int mpi_reduce_scatter(struct zr_comm *c, struct zr_stream *s, const struct zr_reduce_seg *seg,
                              int n_seg, const struct zr_tag *tag)
{
    struct zr_mpi *m = zr_mpi_of(c);
    struct zr_mpi_op op = {.post = {.op = ZR_OP_REDUCE_SCATTER, .root = -1, .n_seg = (uint32_t)n_seg}};
    int err = mpi_check_ready(m, ZR_OP_REDUCE_SCATTER, n_seg);
    if (!err)
        err = zr_reduce_check("mpi reduce_scatter", c->group.size, c->group.rank, m->usable, seg, n_seg);
    if (err || zr_first_code(&m->set->failure))
        return err;
    zr_post_reduces(&op.post, c->group.size, seg, n_seg);
    if (n_seg)
        err = zr_seg_ring_keep(&m->ring, m->name, c->group.size, ZR_OP_REDUCE_SCATTER, seg, n_seg, &op.segs);
    return err ? err : mpi_issue(m, s, &op, tag);
}

/* Broadcast and exchange: a range instead of segments. */
static int mpi_issue_range(struct zr_mpi *m, struct zr_stream *s, enum zr_op which, int64_t off,
                           int64_t bytes, int n, int root, const struct zr_tag *tag)
{
    struct zr_mpi_op op = {.post = {.op = (int32_t)which, .root = root, .bytes = bytes}, .off = off};
    int err = mpi_check_ready(m, which, 0);
    if (!err)
        err = zr_range_check(which == ZR_OP_EXCHANGE ? "mpi exchange" : "mpi broadcast", m->usable, off,
                             bytes, n);
    if (err || zr_first_code(&m->set->failure))
        return err;
    zr_post_numbers(&op.post, &off, 1);
    return mpi_issue(m, s, &op, tag);
}

static int mpi_broadcast(struct zr_comm *c, struct zr_stream *s, int64_t off, int64_t bytes, int root,
                         const struct zr_tag *tag)
{
    if (root < 0 || root >= c->group.size)
        return zr_fail(ZR_ERR_ARG, "mpi broadcast: root is %d: 0 to %d are allowed", root, c->group.size - 1);
    return mpi_issue_range(zr_mpi_of(c), s, ZR_OP_BROADCAST, off, bytes, 1, root, tag);
}

static int mpi_exchange(struct zr_comm *c, struct zr_stream *s, int64_t off, int64_t slot_bytes,
                        const struct zr_tag *tag)
{
    return mpi_issue_range(zr_mpi_of(c), s, ZR_OP_EXCHANGE, off, slot_bytes, c->group.size, -1, tag);
}

static int mpi_agree(struct zr_comm *c, struct zr_stream *s, int64_t off, int32_t n_sum, int32_t n_max,
                     const struct zr_tag *tag)
{
    struct zr_mpi *m = zr_mpi_of(c);
    struct zr_mpi_op op = {.post = {.op = ZR_OP_AGREE, .root = -1}, .off = off, .n_sum = n_sum};
    int err = mpi_check_ready(m, ZR_OP_AGREE, 0);
    if (!err)
        err = zr_agree_check("mpi agree", m->usable, off, n_sum, n_max);
    if (err || zr_first_code(&m->set->failure))
        return err;
    const int64_t v[] = {off, n_sum, n_max};
    op.post.bytes = ((int64_t)n_sum + n_max) * (int64_t)sizeof(uint64_t);
    zr_post_numbers(&op.post, v, sizeof v / sizeof *v);
    return mpi_issue(m, s, &op, tag);
}

static bool mpi_has_room(struct zr_comm *c, int n_ops, int n_seg)
{
    return zr_seg_ring_has_room(&zr_mpi_of(c)->ring, c->group.size, n_ops, n_seg);
}

/* --- the rest --- */

/* Who aborts knows the failure already from the other ranks, or tells them. */
static void mpi_abort(struct zr_comm *c, int code, const char *why)
{
    struct zr_mpi_set *p = zr_mpi_of(c)->set;
    zr_first_keep(&p->failure, code, why);
    atomic_store(&p->alarm, 1);
}

static int mpi_status(struct zr_comm *c, char *why, size_t why_bytes)
{
    return zr_first_report(&zr_mpi_of(c)->set->failure, why, why_bytes);
}

static void mpi_stats(struct zr_comm *c, struct zr_comm_stats *out)
{
    struct zr_mpi *m = zr_mpi_of(c);
    *out = (struct zr_comm_stats){.n_all_gather = m->n_done[ZR_OP_ALL_GATHER],
                                  .n_reduce_scatter = m->n_done[ZR_OP_REDUCE_SCATTER],
                                  .n_broadcast = m->n_done[ZR_OP_BROADCAST],
                                  .n_exchange = m->n_done[ZR_OP_EXCHANGE],
                                  .n_agree = m->n_done[ZR_OP_AGREE],
                                  .wire_bytes = m->wire_bytes};
}

static bool mpi_last(struct zr_comm *c, char *text, size_t n_text)
{
    struct zr_mpi *m = zr_mpi_of(c);
    pthread_mutex_lock(&m->lock);
    bool inside = m->is_in_last;
    text[0] = 0;
    if (m->last.seq)
        zr_post_describe(&m->last, text, n_text);
    pthread_mutex_unlock(&m->lock);
    return inside;
}

static void mpi_called(struct zr_comm *c, const struct zr_called *call)
{
    zr_rendezvous_called(zr_mpi_of(c)->set->rdv, call);
}

/* A call of MPI's that does not come back. */
static bool mpi_stuck(struct zr_comm *c)
{
    struct zr_mpi *m = zr_mpi_of(c);
    int64_t until = zr_now_ns() + STUCK_NS;
    while (atomic_load(&m->over_seq) != m->next_seq && zr_now_ns() < until)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    return atomic_load(&m->over_seq) != m->next_seq;
}

const struct zr_comm_ops zr_mpi_ops = {
    .name = "mpi",
    .deterministic = true,
    .arena = zr_mpi_arena,
    .attach = zr_mpi_attach,
    .all_gather = mpi_all_gather,
    .reduce_scatter = mpi_reduce_scatter,
    .broadcast = mpi_broadcast,
    .exchange = mpi_exchange,
    .agree = mpi_agree,
    .abort = mpi_abort,
    .status = mpi_status,
    .stats = mpi_stats,
    .last = mpi_last,
    .called = mpi_called,
    .has_room = mpi_has_room,
    .stuck = mpi_stuck,
    .close = zr_mpi_close,
};
