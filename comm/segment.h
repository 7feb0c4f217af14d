/* segment.h: which bytes of a segment belong to which place, and the checks that every communicator makes of
 * its arguments. */
#ifndef ZR_COMM_SEGMENT_H
#define ZR_COMM_SEGMENT_H

#include "comm/comm.h"

/* Where the slice of a place begins in its region. */
static inline int64_t zr_cut_at(const struct zr_cut *c, int place)
{
    int64_t at = place * c->each;
    return at < c->total ? at : c->total;
}

static inline int64_t zr_cut_bytes(const struct zr_cut *c, int place)
{
    return zr_cut_at(c, place + 1) - zr_cut_at(c, place);
}

/* Of the largest slice among size places. */
static inline int64_t zr_cut_most(const struct zr_cut *c, int size)
{
    (void)size;
    return zr_cut_bytes(c, 0);
}

/* Where this rank's slice of what is gathered lies before. */
static inline int64_t zr_gather_own(const struct zr_gather_seg *g, int place)
{
    return g->in_place ? g->dst + zr_cut_at(&g->cut, place) : g->src;
}

/* Which of n words of an agreement a place puts together: [zr_agree_part(p), zr_agree_part(p + 1)). */
static inline int64_t zr_agree_part(int size, int place, int64_t n)
{
    return n * place / size;
}

/* Bytes that a rank takes of the others' for an agreement: its part from everyone, the other parts once. */
static inline int64_t zr_agree_wire(int size, int place, int32_t n_sum, int32_t n_max)
{
    int64_t n = (int64_t)n_sum + n_max,
            part = zr_agree_part(size, place + 1, n) - zr_agree_part(size, place, n);
    return (part * (size - 1) + n - part) * (int64_t)sizeof(uint64_t);
}

/* 0, or ZR_ERR_ARG with a message naming the segment, the field, its value and what is allowed. who: "shm
 * all_gather". */
int zr_gather_check(const char *who, int size, int64_t arena_bytes, const struct zr_gather_seg *seg,
                    int n_seg);
int zr_reduce_check(const char *who, int size, int64_t arena_bytes, const struct zr_reduce_seg *seg,
                    int n_seg);
/* The same for bytes at off, n times after each other. */
int zr_range_check(const char *who, int64_t arena_bytes, int64_t off, int64_t bytes, int64_t n);
/* The same for an agreement. */
int zr_agree_check(const char *who, int64_t arena_bytes, int64_t off, int32_t n_sum, int32_t n_max);

#endif
