/* SPDX-License-Identifier: Apache-2.0 */
/* values.c: pseudo-random values for collectives, and their sums. */
#include "bench/comm/values.h"
#include "bench/random_bits.h"

#include <math.h>
#include <string.h>

static uint64_t bits_of(struct comm_source s, int64_t i)
{
    return random_bits(random_bits(s.seed + (uint64_t)(uint32_t)s.rank) + (uint64_t)i);
}

/* A float with as many significant bits as dtype has: 24 or 8, sign included. */
static float value_of(struct comm_source s, int64_t i, enum zero_dtype dtype)
{
    int digits = dtype == ZERO_BF16 ? 8 : 24;
    uint64_t bits = bits_of(s, i);
    int32_t x = (int32_t)(bits >> (64 - digits)) - (1 << (digits - 1));
    return ldexpf((float)x, 1 - digits - (int)(bits & 31) % 21);
}

/* The value's bits in memory. */
static uint32_t stored(float x, enum zero_dtype dtype)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return dtype == ZERO_BF16 ? bits >> 16 : bits; /* the lower half is zero */
}

void comm_values_fill(void *at, enum zero_dtype dtype, struct comm_source s, int64_t first, int64_t n)
{
    int64_t size = zr_dtype_bytes(dtype);
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = stored(value_of(s, first + i, dtype), dtype);
        memcpy((char *)at + i * size, &bits, (size_t)size);
    }
}

int64_t comm_values_differ(const void *at, enum zero_dtype dtype, struct comm_source s, int64_t first,
                           int64_t n)
{
    int64_t size = zr_dtype_bytes(dtype), wrong = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = 0;
        memcpy(&bits, (const char *)at + i * size, (size_t)size);
        wrong += bits != stored(value_of(s, first + i, dtype), dtype);
    }
    return wrong;
}

/* The fixed tree of struct zr_host_kernels, written independently of the kernels. */
static float tree(const float *x, int n)
{
    int half = 1;
    if (n == 1)
        return x[0];
    while (2 * half < n)
        half *= 2;
    return tree(x, half) + tree(x + half, n - half);
}

static bool is_sum(float got, const struct comm_sum *sum, int64_t i)
{
    float x[ZR_MAX_SOURCES];
    double whole = 0, size = 0;
    for (int k = 0; k < sum->n_sources; k++) {
        float v = value_of(sum->source[k], i, sum->dtype);
        if (sum->exact)
            x[k] = v;
        whole += (double)v;
        size += fabs((double)v);
    }
    return sum->exact ? stored(got, ZERO_F32) == stored(tree(x, sum->n_sources), ZERO_F32)
                      : fabs((double)got - whole) <= sum->n_sources * 0x1p-23 * size;
}

int64_t comm_values_sum_differs(const float *at, const struct comm_sum *sum, int64_t first, int64_t n)
{
    int64_t wrong = 0;
    for (int64_t i = 0; i < n; i++)
        wrong += !is_sum(at[i], sum, first + i);
    return wrong;
}

void comm_words_fill(uint64_t *at, struct comm_source s, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        at[i] = bits_of(s, i);
}

int64_t comm_words_differ(const uint64_t *at, const struct comm_source *source, int n_sources, int64_t n_sum,
                          int64_t n_max)
{
    int64_t wrong = 0;
    for (int64_t i = 0; i < n_sum + n_max; i++) {
        uint64_t want = 0;
        for (int k = 0; k < n_sources; k++) {
            uint64_t x = bits_of(source[k], i);
            want = i < n_sum ? want + x : want > x ? want : x;
        }
        wrong += at[i] != want;
    }
    return wrong;
}
