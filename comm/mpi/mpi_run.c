/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_run.c: what an operation of MPI's communicators does when its stream comes to it. */
#include "comm/flight.h"
#include "comm/mpi/mpi_comm.h"

#include <stdlib.h>
#include <string.h>

static char *at_of(const struct zr_mpi *m, int64_t off)
{
    return m->arena + off;
}

/* Slices of any size: to the place ahead, from the one behind, all ranks at the same distance one after the
 * other, so that what is under way on one rank is on its peers too. */
static int gather_places(struct zr_mpi *m, char *region, const struct zr_cut *cut)
{
    int size = m->base.group.size, me = m->base.group.rank, err = 0;
    int64_t mine = zr_cut_bytes(cut, me);
    for (int k = 1; k < size && !err; k++) {
        int to = (me + k) % size, from = (me - k + size) % size;
        int64_t theirs = zr_cut_bytes(cut, from), most = mine > theirs ? mine : theirs;
        for (int64_t at = 0; at < most && !err; at += ZR_MPI_MESSAGE) {
            int64_t in = theirs - at < ZR_MPI_MESSAGE ? theirs - at : ZR_MPI_MESSAGE;
            int64_t out = mine - at < ZR_MPI_MESSAGE ? mine - at : ZR_MPI_MESSAGE;
            err = zr_mpi_await(m, &m->data[0], ZR_MPI_WINDOW - 2);
            if (!err && in > 0)
                err = zr_mpi_receive(m, region + zr_cut_at(cut, from) + at, in, from, ZR_MPI_TAG_DATA,
                                     &m->data[0]);
            if (!err && out > 0)
                err = zr_mpi_send(m, region + zr_cut_at(cut, me) + at, out, to, ZR_MPI_TAG_DATA, &m->data[0]);
        }
    }
    return err ? err : zr_mpi_await(m, &m->data[0], 0);
}

static int mpi_run_gather(struct zr_mpi *m, const struct zr_gather_seg *g)
{
    int size = m->base.group.size, me = m->base.group.rank;
    char *region = at_of(m, g->dst), *own = at_of(m, zr_gather_own(g, me)),
         *there = region + zr_cut_at(&g->cut, me);
    int64_t mine = zr_cut_bytes(&g->cut, me);
    bool equal = !g->cut.at && g->cut.total == g->cut.each * size;
    if (g->cut.total == 0)
        return 0;
    if (equal && size > 1)
        return zr_mpi_all_gather(m, own == there ? NULL : own, region, g->cut.each, g->cut.each);
    if (own != there && mine)
        m->set->kernels->copy(there, own, mine);
    return size > 1 ? gather_places(m, region, &g->cut) : 0;
}

static int mpi_run_gathers(struct zr_mpi *m, const struct zr_mpi_op *op, int64_t *taken)
{
    int err = 0;
    for (uint32_t i = 0; i < op->post.n_seg; i++) {
        const struct zr_cut *cut = &op->segs.seg[i].gather.cut;
        *taken += cut->total - zr_cut_bytes(cut, m->base.group.rank);
    }
    if (m->spread.size)
        return zr_mpi_gather_by_host(m, op->segs.seg, op->post.n_seg);
    for (uint32_t i = 0; i < op->post.n_seg && !err; i++)
        err = mpi_run_gather(m, &op->segs.seg[i].gather);
    return err;
}

/* What is taken is each member's part of a sum, also where a host has put its members' together. */
static int mpi_run_reduces(struct zr_mpi *m, const struct zr_mpi_op *op, int64_t *taken)
{
    int err = 0;
    for (uint32_t i = 0; i < op->post.n_seg; i++)
        *taken += zr_cut_bytes(&op->segs.seg[i].reduce.cut, m->base.group.rank) * (m->base.group.size - 1);
    if (m->sums_by_host)
        return zr_mpi_reduce_by_host(m, op->segs.seg, op->post.n_seg);
    for (uint32_t i = 0; i < op->post.n_seg && !err; i++)
        err = zr_mpi_reduce(m, &op->segs.seg[i].reduce);
    return err;
}

static int mpi_run_broadcast(struct zr_mpi *m, const struct zr_mpi_op *op, int64_t *taken)
{
    *taken = m->base.group.rank == op->post.root ? 0 : op->post.bytes;
    return m->base.group.size > 1 ? zr_mpi_broadcast(m, at_of(m, op->off), op->post.bytes, op->post.root) : 0;
}

static int mpi_run_exchange(struct zr_mpi *m, const struct zr_mpi_op *op, int64_t *taken)
{
    int64_t slot = op->post.bytes;
    *taken = slot * (m->base.group.size - 1);
    return m->base.group.size > 1 ? zr_mpi_all_gather(m, NULL, at_of(m, op->off), slot, slot) : 0;
}

/* In memory that is left behind with the communicator if MPI does not give it back. */
static uint64_t *words_for(struct zr_mpi *m, int64_t n)
{
    if (n > m->n_words) {
        free(m->words);
        m->words = malloc((size_t)n * sizeof *m->words);
        m->n_words = m->words ? n : 0;
    }
    return m->words;
}

static int mpi_run_agree(struct zr_mpi *m, const struct zr_mpi_op *op, int64_t *taken)
{
    int64_t n = op->post.bytes / (int64_t)sizeof(uint64_t);
    int32_t n_max = (int32_t)(n - op->n_sum);
    *taken = zr_agree_wire(m->base.group.size, m->base.group.rank, op->n_sum, n_max);
    if (m->base.group.size == 1 || n == 0)
        return 0;
    uint64_t *words = words_for(m, n);
    if (!words)
        return zr_mpi_fail_op(m, ZR_ERR_NOMEM, "no memory for the words of an agreement");
    memcpy(words, at_of(m, op->off), (size_t)op->post.bytes);
    int err = zr_mpi_all_reduce(m, words, op->n_sum, n_max);
    if (!err)
        memcpy(at_of(m, op->off), words, (size_t)op->post.bytes);
    return err;
}

static int mpi_move(struct zr_mpi *m, const struct zr_mpi_op *op, int64_t *taken)
{
    int err = 0;
    switch ((enum zr_op)op->post.op) {
    case ZR_OP_ALL_GATHER:
        err = mpi_run_gathers(m, op, taken);
        break;
    case ZR_OP_REDUCE_SCATTER:
        err = mpi_run_reduces(m, op, taken);
        break;
    case ZR_OP_BROADCAST:
        err = mpi_run_broadcast(m, op, taken);
        break;
    case ZR_OP_EXCHANGE:
        err = mpi_run_exchange(m, op, taken);
        break;
    case ZR_OP_AGREE:
        err = mpi_run_agree(m, op, taken);
        break;
    }
    return err;
}

static void note_op(struct zr_mpi *m, const struct zr_post *now)
{
    pthread_mutex_lock(&m->lock);
    if (now) {
        m->before = m->last;
        m->last = *now;
    }
    m->is_in_last = now != NULL;
    pthread_mutex_unlock(&m->lock);
}

static void mpi_run_op(struct zr_mpi *m, const struct zr_mpi_op *op)
{
    int64_t taken = 0;
    if (m->run_seq + 1 != op->post.seq) {
        zr_mpi_fail(m->set, ZR_ERR_ORDER,
                    "operations of one communicator were put on streams that ran them out of order");
        return;
    }
    m->run_seq = op->post.seq;
    zr_flight_start(&op->mark);
    note_op(m, &op->post);
    if (zr_mpi_meet(m, &op->post) || mpi_move(m, op, &taken))
        return;
    note_op(m, NULL);
    zr_flight_finish(&op->mark);
    m->wire_bytes += taken;
    m->n_done[op->post.op]++;
}

void zr_mpi_run(void *arg)
{
    const struct zr_mpi_op *op = arg;
    struct zr_mpi *m = op->m;
    if (!zr_first_code(&m->set->failure))
        mpi_run_op(m, op);
    if (op->post.n_seg)
        zr_seg_ring_free(&m->ring, op->segs.end);
    atomic_store(&m->over_seq, op->post.seq);
}
