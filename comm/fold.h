/* SPDX-License-Identifier: Apache-2.0 */
/* fold.h: sums in the fixed tree whose sources arrive one after the other.
 *
 * sum_tree of kernels/device.h needs all sources at once. Here they are summed in blocks of 8 neighbours.
 * The tree over n sources splits at the largest power of two below n, so a block that begins at a multiple
 * of 8 is a subtree. The sum of a subtree is kept until its sibling's sum is there too. So the bits are
 * those of one sum_tree over all sources.
 *
 * Thread-safety: none. It uses only the memory that it is given. */
#ifndef ZR_COMM_FOLD_H
#define ZR_COMM_FOLD_H

#include "kernels/device.h"

enum {
    /* Sources of a block. The last block may have fewer. */
    ZR_FOLD_BLOCK = 8,
    /* Most sources of a sum. */
    ZR_FOLD_SOURCES = 1 << 16,
    /* Most partial sums that are kept at once. Blocks must come in order, from any one on and around. */
    ZR_FOLD_PARTS = 27
};

struct zr_fold_part {
    /* Blocks [first, first + n). n 0: its memory is free. */
    int32_t first, n;
};

struct zr_fold {
    const struct zr_host_kernels *kernels;
    /* Number of sources, and of their blocks. */
    int32_t n, n_blocks;
    float *dst;
    bool accumulate;
    int64_t n_elems;
    /* (zr_fold_parts(n), room) partial sums. */
    float *sums;
    int64_t room;
    struct zr_fold_part part[ZR_FOLD_PARTS];
};

/* Partial sums that need memory. 0 if all sources are in one block. 1 <= n <= ZR_FOLD_SOURCES. */
int32_t zr_fold_parts(int32_t n);

static inline int32_t zr_fold_blocks(int32_t n)
{
    return (n + ZR_FOLD_BLOCK - 1) / ZR_FOLD_BLOCK;
}

/* Begins a sum of n sources of n_elems elements each. The sum is written to dst, or with accumulate added to
 * it. sums has room for zr_fold_parts(n) times room floats, with room >= n_elems; NULL if that is 0. Both
 * memories stay in use until the last block was added. */
void zr_fold_begin(struct zr_fold *f, const struct zr_host_kernels *kernels, int32_t n, float *dst,
                   bool accumulate, int64_t n_elems, float *sums, int64_t room);

/* Adds the sources of a block: ZR_FOLD_BLOCK of them, or the rest in the last block. They may be overwritten
 * when it returns. Add each block once, in order, from any one on and around. Returns true after the last
 * one: dst is complete. */
bool zr_fold_add(struct zr_fold *f, int32_t block, const void *const *src, enum zero_dtype dtype);

#endif
