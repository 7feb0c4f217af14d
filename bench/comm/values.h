/* SPDX-License-Identifier: Apache-2.0 */
/* values.h: the inputs of zero-bench comm's collectives, and checks of the results. Each element depends
 * only on its rank and its place, so a rank knows what all others have. */
#ifndef ZERO_BENCH_COMM_VALUES_H
#define ZERO_BENCH_COMM_VALUES_H

#include "kernels/device.h"

/* Identifies the input of an operation on one rank of the world. */
struct comm_source {
    uint64_t seed;
    int32_t rank;
};

/* Writes elements [first, first + n) of s to at, in dtype F32 or BF16. Magnitudes are spread from 2^-20 to
 * 1, so that sums of more than two elements in another order have other bits. */
void comm_values_fill(void *at, enum zero_dtype dtype, struct comm_source s, int64_t first, int64_t n);

/* Returns how many of these elements differ from those at `at` in any bit. */
int64_t comm_values_differ(const void *at, enum zero_dtype dtype, struct comm_source s, int64_t first,
                           int64_t n);

/* A sum over n_sources, by place, in dtype. exact: added in fp32 in the fixed tree (struct
 * zr_host_kernels, sum_tree), and compared bit for bit. Otherwise in any order, within n_sources * 2^-23
 * of the sum of absolute values. */
struct comm_sum {
    const struct comm_source *source;
    /* at most ZR_MAX_SOURCES if exact */
    int n_sources;

    enum zero_dtype dtype;
    bool exact;
};
/* The number of elements [first, first + n) that are wrong. */
int64_t comm_values_sum_differs(const float *at, const struct comm_sum *sum, int64_t first, int64_t n);

/* Fills the words of an agreement. */
void comm_words_fill(uint64_t *at, struct comm_source s, int64_t n);
/* The number of wrong words after an agreement that adds up n_sum words and takes the largest of n_max
 * others. */
int64_t comm_words_differ(const uint64_t *at, const struct comm_source *source, int n_sources, int64_t n_sum,
                          int64_t n_max);

#endif
