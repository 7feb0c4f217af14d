/* SPDX-License-Identifier: Apache-2.0 */
/* mpi.c: the MPI communicator's vtable: checks, numbering, and what is put on the stream (see mpi_comm.h for
 * how it all works). */
#include "comm/meet/rendezvous.h"
#include "comm/mpi/mpi_comm.h"

#include <stdio.h>
#include <time.h>

/* How long operations may take to end after a failure. */
static const int64_t STUCK_NS = INT64_C(2) * 1000 * 1000 * 1000;

static int mpi_run(struct zr_comm *c, struct zr_stream *s, const struct zr_comm_op *op)
{
    return zr_op_queue_put(&zr_mpi_of(c)->queue, s, op);
}

static bool mpi_has_room(struct zr_comm *c, int n_ops, int n_seg)
{
    return zr_op_queue_has_room(&zr_mpi_of(c)->queue, n_ops, n_seg);
}

/* Who aborts knows the failure already from the other ranks, or tells them. */
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

static void mpi_called(struct zr_comm *c, const struct zr_called *call)
{
    zr_rendezvous_called(zr_mpi_of(c)->set->rdv, call);
}

/* A call of MPI's that does not come back. */
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
    .called = mpi_called,
    .has_room = mpi_has_room,
    .stuck = mpi_stuck,
    .close = zr_mpi_close,
};
