/* SPDX-License-Identifier: Apache-2.0 */
/* shm_run.c: moves the data of an operation of the shared-memory communicator, on the stream's thread. */
#include "comm/shm/shm.h"

#include <string.h>

/* 64 KiB of fp32, so that the sums of a piece stay in the cache between passes over its sources. */
enum { SUM_ELEMENTS = 1 << 14 };

static bool run_failed(struct zr_shm *m)
{
    return zr_first_code(&m->failure) != 0;
}

/* Copies piece by piece, so that a failure ends it soon. Pieces are as small as the copies that bypass the
 * caches can be; the last one takes the rest. */
static void pull(struct zr_shm *m, char *dst, const char *src, int64_t bytes)
{
    for (int64_t at = 0, n; at < bytes && !run_failed(m); at += n) {
        n = bytes - at < 2 * ZR_COPY_STREAM_BYTES ? bytes - at : ZR_COPY_STREAM_BYTES;
        m->kernels->copy(dst + at, src + at, n);
    }
}

static void run_all_gather(struct zr_shm *m, const struct zr_gather_seg *g)
{
    int size = m->base.group.size, me = m->base.group.rank;
    char *dst = m->peer[me].arena + g->dst;
    /* Each rank begins with the place after its own, so that they do not all read the same arena. */
    for (int k = 1; k <= size; k++) {
        int i = (me + k) % size;
        int64_t at = zr_cut_at(&g->cut, i), n = zr_cut_bytes(&g->cut, i);
        const char *src = m->peer[i].arena + zr_gather_own(g, i);
        if (n > 0 && src != dst + at)
            pull(m, dst + at, src, n);
    }
}

static void run_reduce_scatter(struct zr_shm *m, const struct zr_reduce_seg *g)
{
    int size = m->base.group.size, me = m->base.group.rank;
    int64_t first = zr_cut_at(&g->cut, me), bytes = zr_cut_bytes(&g->cut, me),
            each = zr_dtype_bytes(g->dtype);
    float *dst = (float *)(m->peer[me].arena + g->dst);
    const void *src[ZR_SHM_SIZE];
    if (size == 1 && g->src == g->dst && g->dtype == ZERO_F32 && !g->accumulate)
        return; /* the sum is there already, and a peer may be reading it */
    for (int64_t at = 0, n = bytes / each; at < n && !run_failed(m); at += SUM_ELEMENTS) {
        for (int i = 0; i < size; i++)
            src[i] = m->peer[i].arena + g->src + first + at * each;
        m->kernels->sum_tree(dst + at, src, size, g->dtype, n - at < SUM_ELEMENTS ? n - at : SUM_ELEMENTS,
                             g->accumulate);
    }
}

static void run_broadcast(struct zr_shm *m, int64_t off, int64_t bytes, int root)
{
    int me = m->base.group.rank;
    if (me != root)
        pull(m, m->peer[me].arena + off, m->peer[root].arena + off, bytes);
}

static void run_exchange(struct zr_shm *m, int64_t off, int64_t slot_bytes)
{
    int size = m->base.group.size, me = m->base.group.rank;
    for (int k = 1; k < size; k++) {
        int i = (me + k) % size;
        int64_t at = off + i * slot_bytes;
        pull(m, m->peer[me].arena + at, m->peer[i].arena + at, slot_bytes);
    }
}

static void run_all_to_all(struct zr_shm *m, const struct zr_comm_op *op)
{
    int size = m->base.group.size, me = m->base.group.rank;
    int64_t bytes = op->post.bytes;
    for (int k = 1; k <= size; k++) {
        int i = (me + k) % size;
        pull(m, m->peer[me].arena + op->to + i * bytes, m->peer[i].arena + op->off + me * bytes, bytes);
    }
}

static void run_shift(struct zr_shm *m, const struct zr_comm_op *op)
{
    int from = zr_shift_from(&m->base.group, op->by), me = m->base.group.rank;
    pull(m, m->peer[me].arena + op->to, m->peer[from].arena + op->off, op->post.bytes);
}

static uint64_t *words_of(struct zr_shm *m, int place, const struct zr_comm_op *op)
{
    return (uint64_t *)(m->peer[place].arena + op->off);
}

/* Combines this rank's part of the words of all records in its own record. No peer reads that part there. */
static void run_agree_part(struct zr_shm *m, const struct zr_comm_op *op, int64_t n)
{
    int size = m->base.group.size, me = m->base.group.rank;
    uint64_t *to = words_of(m, me, op);
    for (int64_t k = zr_agree_part(size, me, n); k < zr_agree_part(size, me + 1, n); k++)
        for (int i = 0; i < size; i++) {
            uint64_t x = words_of(m, i, op)[k];
            if (i != me)
                to[k] = k < op->n_sum ? to[k] + x : to[k] > x ? to[k] : x;
        }
}

static void run_agree(struct zr_shm *m, const struct zr_comm_op *op)
{
    int size = m->base.group.size, me = m->base.group.rank;
    int64_t n = op->post.bytes / (int64_t)sizeof(uint64_t);
    run_agree_part(m, op, n);
    zr_shm_raise(m, ZR_SHM_MIDDLE, op->post.seq);
    if (zr_shm_wait(m, &op->post, ZR_SHM_MIDDLE)) {
        if (op->n_sum > 0) /* that word may be in this rank's part, which is complete */
            words_of(m, me, op)[op->n_sum - 1] = 0;
        return;
    }
    for (int k = 1; k < size; k++) {
        int i = (me + k) % size;
        int64_t from = zr_agree_part(size, i, n), end = zr_agree_part(size, i + 1, n);
        memcpy(words_of(m, me, op) + from, words_of(m, i, op) + from,
               (size_t)(end - from) * sizeof(uint64_t));
    }
}

static void move(struct zr_shm *m, const struct zr_comm_op *op)
{
    switch ((enum zr_op)op->post.op) {
    case ZR_OP_ALL_GATHER:
        for (uint32_t i = 0; i < op->post.n_seg; i++)
            run_all_gather(m, &op->gather[i]);
        break;
    case ZR_OP_REDUCE_SCATTER:
        for (uint32_t i = 0; i < op->post.n_seg; i++)
            run_reduce_scatter(m, &op->reduce[i]);
        break;
    case ZR_OP_BROADCAST:
        run_broadcast(m, op->off, op->post.bytes, op->post.root);
        break;
    case ZR_OP_EXCHANGE:
        run_exchange(m, op->off, op->post.bytes);
        break;
    case ZR_OP_AGREE:
        run_agree(m, op);
        break;
    case ZR_OP_ALL_TO_ALL:
        run_all_to_all(m, op);
        break;
    case ZR_OP_SHIFT:
        run_shift(m, op);
        break;
    case ZR_OP_ALL_REDUCE: /* only of arrays, which this backend does not have */
        break;
    }
}

/* Advances the words that the operation does not use. Words are compared by difference, which must stay below
 * half of their range. */
static void pass_words(struct zr_shm_head *own, int32_t op, uint64_t seq)
{
    if (op != ZR_OP_AGREE)
        atomic_store(&own->middle, (uint32_t)seq);
    if (op == ZR_OP_ALL_GATHER)
        atomic_store(&own->done, (uint32_t)seq);
}

int zr_shm_move(struct zr_comm *c, const struct zr_comm_op *op)
{
    struct zr_shm *m = (struct zr_shm *)c;
    struct zr_shm_head *own = m->peer[c->group.rank].head;
    uint64_t seq = op->post.seq;
    own->post[seq % ZR_SHM_POSTS] = op->post;
    pass_words(own, op->post.op, seq);
    zr_shm_raise(m, ZR_SHM_ENTERED, seq);
    int err = zr_shm_wait(m, &op->post, ZR_SHM_ENTERED);
    if (err)
        return err;
    move(m, op);
    err = zr_first_code(&m->failure);
    /* After a gather peers may still read this rank's shard. comm.h says when the caller may overwrite it. */
    if (!err && op->post.op != ZR_OP_ALL_GATHER) {
        zr_shm_raise(m, ZR_SHM_DONE, seq);
        err = zr_shm_wait(m, &op->post, ZR_SHM_DONE);
    }
    if (!err)
        atomic_store(&own->finished, (uint32_t)seq);
    return err;
}
