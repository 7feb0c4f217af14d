/* SPDX-License-Identifier: Apache-2.0 */
/* op_queue.h: queues operations on a stream and runs them on the stream's thread, for communicators that move
 * data themselves (shm, mpi).
 *
 * Segments and their lists of places are kept in a ring until their operation has run. Entries are taken in
 * the order of operations, and freed in the same order.
 *
 * Thread-safety: one thread at a time puts operations, and one other thread runs them. */
#ifndef ZR_COMM_OP_QUEUE_H
#define ZR_COMM_OP_QUEUE_H

#include "comm/segment.h"

#include <pthread.h>

enum {
    /* Most segments of one operation. */
    ZR_RING_SEGS = 8192,
    /* Entries for segments of operations that have not run yet. There is room for two of the largest
     * operations, and as much again because an operation may skip the ring's end. */
    ZR_RING_ENTRIES = 4 * ZR_RING_SEGS
};

union zr_any_seg {
    struct zr_gather_seg gather;
    struct zr_reduce_seg reduce;
};

struct zr_op_queue {
    struct zr_comm *comm;
    struct zr_device *dev;
    /* Moves the data of an operation. Returns 0, or the communicator's failure. */
    int (*move)(struct zr_comm *c, const struct zr_comm_op *op);
    /* Keeps a failure of the communicator. */
    void (*fail)(struct zr_comm *c, int code, const char *text);
    /* Number of the last operation that has begun. Written by the stream's thread. */
    _Atomic uint64_t run_seq;
    /* Number of the last operation that is over, whether or not it failed. */
    _Atomic uint64_t over_seq;

    /* (ZR_RING_ENTRIES) */
    union zr_any_seg *entry;
    /* Entries put so far, by the putting thread, and freed so far, under the lock. */
    uint64_t put, got;
    pthread_mutex_t lock;
    pthread_cond_t moved;
};

/* Opens the queue of c. The caller sets move and fail. Returns false if there is no memory. */
bool zr_op_queue_open(struct zr_op_queue *q, struct zr_comm *c, struct zr_device *dev);
void zr_op_queue_close(struct zr_op_queue *q);

/* Puts an operation on the stream; see zr_comm_ops.run. Waits while there is no room. Returns ZERO_ERR_ARG if
 * its segments and their lists take more than ZR_RING_SEGS entries. */
int zr_op_queue_put(struct zr_op_queue *q, struct zr_stream *s, const struct zr_comm_op *op);

/* Whether there is room for n_ops more operations of at most n_seg segments each, all with lists. */
bool zr_op_queue_has_room(struct zr_op_queue *q, int n_ops, int n_seg);

/* All operations that were put are over. */
static inline bool zr_op_queue_is_idle(const struct zr_op_queue *q)
{
    return atomic_load(&q->over_seq) == q->comm->n_issued;
}

#endif
