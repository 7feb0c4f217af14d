/* SPDX-License-Identifier: Apache-2.0 */
/* seg_ring.h: the segments of operations that are queued on a stream and not run yet, and the lists of places
 * that they have, where the stream's thread finds them after the call that gave them has returned. Entries
 * are taken in the order of operations, and free again in the same order.
 *
 * Thread-safety: one thread puts, one other frees. */
#ifndef ZR_COMM_SEG_RING_H
#define ZR_COMM_SEG_RING_H

#include "comm/segment.h"

#include <pthread.h>

enum {
    /* segments of one operation */
    ZR_RING_SEGS = 8192,
    /* of those that are queued and not run yet: two of the largest, and as many again where one would go
     * around the ring's end */
    ZR_RING_ENTRIES = 4 * ZR_RING_SEGS
};

union zr_any_seg {
    struct zr_gather_seg gather;
    struct zr_reduce_seg reduce;
};

struct zr_seg_ring {
    /* (ZR_RING_ENTRIES) */
    union zr_any_seg *entry;
    /* ever put, the putting thread's, and ever free again, under the lock */
    uint64_t put, got;
    pthread_mutex_t lock;
    pthread_cond_t moved;
};

/* What one operation has there. */
struct zr_kept_segs {
    const union zr_any_seg *seg;
    /* entries before this may be used again after it */
    uint64_t end;
};

/* false: there is no memory. */
bool zr_seg_ring_open(struct zr_seg_ring *r);
void zr_seg_ring_close(struct zr_seg_ring *r);

/* Copies an operation's n segments, struct zr_gather_seg or zr_reduce_seg as op says, and the lists that they
 * have, for size places. zr_seg_ring_take follows, before the operation is put on the stream, or nothing.
 * Waits while there is no room. who: for messages. ZR_ERR_ARG where it takes more than ZR_RING_SEGS
 * entries. */
int zr_seg_ring_keep(struct zr_seg_ring *r, const char *who, int size, enum zr_op op, const void *seg, int n,
                     struct zr_kept_segs *out);
/* Entries before end are taken. Returns what was the end, to be given again where the operation could not be
 * put on the stream. */
static inline uint64_t zr_seg_ring_take(struct zr_seg_ring *r, uint64_t end)
{
    uint64_t was = r->put;
    r->put = end;
    return was;
}

/* Whether n_ops more operations of at most n_seg segments each, every one with a list, have room. */
bool zr_seg_ring_has_room(struct zr_seg_ring *r, int size, int n_ops, int n_seg);

/* The stream's thread: the operation has run. */
void zr_seg_ring_free(struct zr_seg_ring *r, uint64_t end);

#endif
