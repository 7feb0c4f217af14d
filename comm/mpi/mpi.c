/* SPDX-License-Identifier: Apache-2.0 */
/* mpi.c: runs an operation when its stream comes to it, and has the table of the communicator's functions.
 * mpi_comm.h describes how it works. */
#include "comm/meet/rendezvous.h"
#include "comm/mpi/mpi_comm.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Time that operations may take to end after a failure. */
static const int64_t STUCK_NS = INT64_C(2) * 1000 * 1000 * 1000;

/* ---- on the stream's thread ---- */

/* Returns room for the words of an agreement. It is left behind with the communicator if MPI never ends the
 * request. */
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
        return zr_mpi_fail_op(m, ZERO_ERR_NOMEM, "no memory for the words of an agreement");
    memcpy(words, m->base.arena + op->off, (size_t)op->post.bytes);
    int err = zr_mpi_all_reduce(m, words, op->n_sum, op->n_max);
    if (!err)
        memcpy(m->base.arena + op->off, words, (size_t)op->post.bytes);
    return err;
}

static int run_op(struct zr_mpi *m, const struct zr_comm_op *op)
{
    bool alone = m->base.group.size == 1;
    char *at = m->base.arena + op->off;
    switch ((enum zr_op)op->post.op) {
    case ZR_OP_ALL_GATHER:
        return zr_mpi_gather(m, op->gather, op->post.n_seg);
    case ZR_OP_REDUCE_SCATTER:
        return zr_mpi_reduce(m, op->reduce, op->post.n_seg);
    case ZR_OP_BROADCAST:
        return alone ? 0 : zr_mpi_broadcast(m, at, op->post.bytes, op->post.root);
    case ZR_OP_EXCHANGE:
        return alone ? 0 : zr_mpi_all_gather(m, NULL, at, op->post.bytes, op->post.bytes);
    case ZR_OP_AGREE:
        return alone ? 0 : mpi_run_agree(m, op);
    case ZR_OP_ALL_TO_ALL:
    case ZR_OP_SHIFT:
        return zr_mpi_pass(m, op);
    case ZR_OP_ALL_REDUCE: /* only of arrays, which this backend does not have */
        break;
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

/* ---- the communicator ---- */

static int mpi_run(struct zr_comm *c, struct zr_stream *s, const struct zr_comm_op *op)
{
    return zr_op_queue_put(&zr_mpi_of(c)->queue, s, op);
}

static bool mpi_has_room(struct zr_comm *c, int n_ops, int n_seg)
{
    return zr_op_queue_has_room(&zr_mpi_of(c)->queue, n_ops, n_seg);
}

/* The caller knows the failure from the other ranks, or reports it to them. */
static void mpi_abort(struct zr_comm *c, int code, const char *why)
{
    struct zr_mpi_set *p = zr_mpi_of(c)->set;
    zr_first_keep(&p->failure, code, why);
    atomic_store(&p->alarm, 1);
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

/* The operations do not end if a call into MPI does not return. */
static bool mpi_stuck(struct zr_comm *c)
{
    struct zr_mpi *m = zr_mpi_of(c);
    int64_t until = zr_now_ns() + STUCK_NS;
    while (!zr_op_queue_is_idle(&m->queue) && zr_now_ns() < until)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    return !zr_op_queue_is_idle(&m->queue);
}

const struct zr_comm_ops zr_mpi_ops = {
    .name = "mpi",
    .deterministic = true,
    .most_segs = ZR_RING_SEGS,
    .arena = zr_mpi_arena,
    .attach = zr_mpi_attach,
    .run = mpi_run,
    .abort = mpi_abort,
    .last = mpi_last,
    .has_room = mpi_has_room,
    .stuck = mpi_stuck,
    .close = zr_mpi_close,
};
