/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_run.c: what an operation of MPI's communicators does when its stream comes to it. */
#include "comm/mpi/mpi_comm.h"

#include <stdlib.h>
#include <string.h>

static char *at_of(const struct zr_mpi *m, int64_t off)
{
    return m->base.arena + off;
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

static int mpi_run_gathers(struct zr_mpi *m, const struct zr_comm_op *op)
{
    int err = 0;
    if (m->spread.size)
        return zr_mpi_gather_by_host(m, op->gather, op->post.n_seg);
    for (uint32_t i = 0; i < op->post.n_seg && !err; i++)
        err = mpi_run_gather(m, &op->gather[i]);
    return err;
}

static int mpi_run_reduces(struct zr_mpi *m, const struct zr_comm_op *op)
{
    int err = 0;
    if (m->sums_by_host)
        return zr_mpi_reduce_by_host(m, op->reduce, op->post.n_seg);
    for (uint32_t i = 0; i < op->post.n_seg && !err; i++)
        err = zr_mpi_reduce(m, &op->reduce[i]);
    return err;
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

static int mpi_run_agree(struct zr_mpi *m, const struct zr_comm_op *op)
{
    int64_t n = (int64_t)op->n_sum + op->n_max;
    if (n == 0)
        return 0;
    uint64_t *words = words_for(m, n);
    if (!words)
        return zr_mpi_fail_op(m, ZR_ERR_NOMEM, "no memory for the words of an agreement");
    memcpy(words, at_of(m, op->off), (size_t)op->post.bytes);
    int err = zr_mpi_all_reduce(m, words, op->n_sum, op->n_max);
    if (!err)
        memcpy(at_of(m, op->off), words, (size_t)op->post.bytes);
    return err;
}

static int run_op(struct zr_mpi *m, const struct zr_comm_op *op)
{
    bool alone = m->base.group.size == 1;
    switch ((enum zr_op)op->post.op) {
    case ZR_OP_ALL_GATHER:
        return mpi_run_gathers(m, op);
    case ZR_OP_REDUCE_SCATTER:
        return mpi_run_reduces(m, op);
    case ZR_OP_BROADCAST:
        return alone ? 0 : zr_mpi_broadcast(m, at_of(m, op->off), op->post.bytes, op->post.root);
    case ZR_OP_EXCHANGE:
        return alone ? 0 : zr_mpi_all_gather(m, NULL, at_of(m, op->off), op->post.bytes, op->post.bytes);
    case ZR_OP_AGREE:
        return alone ? 0 : mpi_run_agree(m, op);
    }
    return 0;
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

int zr_mpi_move(struct zr_comm *c, const struct zr_comm_op *op)
{
    struct zr_mpi *m = zr_mpi_of(c);
    note_op(m, &op->post);
    int err = zr_mpi_meet(m, &op->post);
    if (!err)
        err = run_op(m, op);
    if (!err)
        note_op(m, NULL);
    return err;
}
