/* SPDX-License-Identifier: Apache-2.0 */
/* values.h: what ranks put into the collectives of zero-bench comm, and whether the right thing came
 * out. Every element depends on its rank and its place alone, so a rank knows what all others have. */
#ifndef ZERO_BENCH_COMM_VALUES_H
#define ZERO_BENCH_COMM_VALUES_H

#include "kernels/device.h"

/* Whose elements: of an operation's input on one rank of the world. */
struct comm_source {
    uint64_t seed;
    int32_t rank;
};

/* Elements [first, first + n) of s to at, in dtype, F32 or BF16. Magnitudes are spread over 2^-20 to 1, so
 * that sums of more than two in another order have other bits. */
void comm_values_fill(void *at, enum zr_dtype dtype, struct comm_source s, int64_t first, int64_t n);

/* How many of those differ from at, in any bit. */
int64_t comm_values_differ(const void *at, enum zr_dtype dtype, struct comm_source s, int64_t first,
                           int64_t n);

/* What at must be the sum of: element by element those of n_sources, by place, in dtype. exact: summed in
 * fp32 in the fixed tree (struct zr_host_kernels, sum_tree), bit for bit; else in any order, within n_sources
 * * 2^-23 of the sum of the absolute values. */
struct comm_sum {
    const struct comm_source *source;
    /* to ZR_MAX_SOURCES where it is exact */
    int n_sources;

    enum zr_dtype dtype;
    bool exact;
};
/* How many of elements [first, first + n) at at are not that. */
int64_t comm_values_sum_differs(const float *at, const struct comm_sum *sum, int64_t first, int64_t n);

/* The words of an agreement, n_sum to be added up and n_max of which the largest is taken. */
void comm_words_fill(uint64_t *at, struct comm_source s, int64_t n);
/* How many of n_sum + n_max are not what the sources' come to. */
int64_t comm_words_differ(const uint64_t *at, const struct comm_source *source, int n_sources, int64_t n_sum,
                          int64_t n_max);

#endif
