/* segment.h: which bytes of a segment belong to which rank, and the checks that every communicator makes of
 * its arguments. */
#ifndef ZR_COMM_SEGMENT_H
#define ZR_COMM_SEGMENT_H

#include "comm/comm.h"

/* Bytes of rank's slice of a region of total_bytes cut into shards of shard_bytes: whole, ragged or none. */
static inline int64_t zr_slice_bytes(int64_t shard_bytes, int64_t total_bytes, int rank)
{
    int64_t left = total_bytes - rank * shard_bytes;
    return left <= 0 ? 0 : left < shard_bytes ? left : shard_bytes;
}

/* 0, or ZR_ERR_ARG with a message naming the segment, the field, its value and what is allowed. who: "shm
 * all_gather". */
int zr_gather_check(const char *who, int world, int64_t arena_bytes, const struct zr_gather_seg *seg,
                    int n_seg);
int zr_reduce_check(const char *who, int world, int64_t arena_bytes, const struct zr_reduce_seg *seg,
                    int n_seg);
/* The same for bytes at off, n times after each other. */
int zr_range_check(const char *who, int64_t arena_bytes, int64_t off, int64_t bytes, int64_t n);

#endif
