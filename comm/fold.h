/* SPDX-License-Identifier: Apache-2.0 */
/* fold.h: the fixed tree over more sources than are there at once.
 *
 * sum_tree of kernels/device.h takes all sources together. Where they come one after the other, from ranks on
 * other hosts, they are summed here in blocks of neighbouring ones, in whatever order these come: the tree
 * over n sources splits at the largest power of two below n, so a block of 8 that begins at a multiple of 8
 * is a part of it with nothing else inside. A part's sum is kept until the part beside it is there too. So
 * the bits are those of one sum_tree over all, for any number of sources.
 *
 * Thread-safety: none; it touches only the memory that it is given. */
#ifndef ZR_COMM_FOLD_H
#define ZR_COMM_FOLD_H

#include "kernels/device.h"

enum {
    /* sources of a block; the last one may have fewer */
    ZR_FOLD_BLOCK = 8,
    /* of all blocks */
    ZR_FOLD_SOURCES = 1 << 16,
    /* partial sums that are kept at the same time, at most, where blocks come in their order from any one on
     * and around */
    ZR_FOLD_PARTS = 27
};

struct zr_fold_part {
    /* blocks [first, first + n); n 0: its memory is free */
    int32_t first, n;
};

struct zr_fold {
    const struct zr_host_kernels *kernels;
    /* of the sources, and of their blocks */
    int32_t n, n_blocks;
    float *dst;
    bool accumulate;
    int64_t n_elems;
    /* (zr_fold_parts(n), room) the partial sums */
    float *sums;
    int64_t room;
    struct zr_fold_part part[ZR_FOLD_PARTS];
};

/* How many partial sums have to have memory: 0 where all sources are one block. 1 <= n <= ZR_FOLD_SOURCES. */
int32_t zr_fold_parts(int32_t n);

static inline int32_t zr_fold_blocks(int32_t n)
{
    return (n + ZR_FOLD_BLOCK - 1) / ZR_FOLD_BLOCK;
}

/* n sources of n_elems elements each are to be summed into dst (accumulate: added to it). sums: memory of
 * zr_fold_parts(n) times room floats, room >= n_elems; NULL where that is 0. Both are the caller's, until the
 * last block was added. */
void zr_fold_begin(struct zr_fold *f, const struct zr_host_kernels *kernels, int32_t n, float *dst,
                   bool accumulate, int64_t n_elems, float *sums, int64_t room);

/* Adds the sources of a block: (ZR_FOLD_BLOCK, or what is left for the last block) of them, which may be
 * written again when it returns. Each block once; in their order, beginning with any one and going around.
 * true: it was the last one, and dst is there. */
bool zr_fold_add(struct zr_fold *f, int32_t block, const void *const *src, enum zr_dtype dtype);

#endif
