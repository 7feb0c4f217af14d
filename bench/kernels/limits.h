/* SPDX-License-Identifier: Apache-2.0 */
/* limits.h: the bandwidth limit of a host kernel, as in McCalpin's STREAM. It is measured with a loop of
 * plain C that reads and writes the same bytes and computes almost nothing. bench/comm/limits.h has the
 * limits of collectives, which are measured with the kernels copy and sum_tree. */
#ifndef ZERO_BENCH_KERNEL_LIMITS_H
#define ZERO_BENCH_KERNEL_LIMITS_H

#include <stdint.h>

enum { LIMIT_MAX_READ = 4, LIMIT_MAX_UPDATED = 3 };

/* A mix is the number of arrays of each type that a loop reads and writes. It stands for the kernels with the
 * same memory traffic.
 *
 * X(name, f32 arrays that are read, bf16 ones, f32 arrays that are read and written, whether an f32 array
 * is written, whether a bf16 one is), in the order of enum stream_mix. */
#define STREAM_MIX_MAP(X)                                                                                    \
    X(COPY, 1, 0, 0, 1, 0)                                                                                   \
    X(TO_BF16, 1, 0, 0, 0, 1)                                                                                \
    X(TO_F32, 0, 1, 0, 1, 0)                                                                                 \
    X(READ, 1, 0, 0, 0, 0)                                                                                   \
    X(SCALE, 0, 0, 1, 0, 0)                                                                                  \
    X(ADD, 1, 0, 1, 0, 0)                                                                                    \
    X(SUM_4_F32, 4, 0, 0, 1, 0)                                                                              \
    X(SUM_4_BF16, 0, 4, 0, 1, 0)                                                                             \
    X(UPDATE_1, 1, 0, 2, 0, 0)                                                                               \
    X(UPDATE_1_BF16, 1, 0, 2, 0, 1)                                                                          \
    X(UPDATE_2, 1, 0, 3, 0, 0)                                                                               \
    X(UPDATE_2_BF16, 1, 0, 3, 0, 1)

enum stream_mix {
#define STREAM_ENUM(NAME, r32, r16, updated, w32, w16) STREAM_##NAME,
    STREAM_MIX_MAP(STREAM_ENUM)
#undef STREAM_ENUM
        STREAM_N_MIXES
};

/* (n) elements each, without overlap. Those that a mix needs are not NULL. */
struct stream_arrays {
    const float *read_f32[LIMIT_MAX_READ];
    const uint16_t *read_bf16[LIMIT_MAX_READ];
    float *updated[LIMIT_MAX_UPDATED];
    float *written_f32;
    uint16_t *written_bf16;
};

/* Bytes read and written for each element. An array that is read and written counts twice. Cache lines
 * that are read only because they are written do not count. */
int64_t stream_bytes(enum stream_mix mix);
/* Returns the arrays without their first `first` elements. No array of *a may be NULL. */
struct stream_arrays stream_from(const struct stream_arrays *a, int64_t first);
/* Goes over n elements once. n should be a multiple of 64, because the last n % 64 elements are left out.
 *
 * The loop adds x * 2^-60 to each element of an array that is read and written, so that it hardly changes. x
 * is an element of another array. The mix SCALE has no other array, so it adds 0. */
void stream_pass(enum stream_mix mix, const struct stream_arrays *a, int64_t n);

#endif
