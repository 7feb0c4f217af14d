/* SPDX-License-Identifier: Apache-2.0 */
/* loops.h: sums and exponentials that a compiler can vectorise without reordering floating-point operations.
 * Sums are over 16 lanes in a fixed order, and the other loops are element-wise. So every instruction set
 * gives the same bits. The layers on the host use them. */
#ifndef ZERO_BENCH_MODEL_LOOPS_H
#define ZERO_BENCH_MODEL_LOOPS_H

#include "bench/model/model_real.h"

#define LANES 16

static inline float sum_lanes(float s[LANES])
{
    for (int half = LANES / 2; half; half /= 2)
        for (int j = 0; j < half; j++)
            s[j] += s[j + half];
    return s[0];
}

static inline float sum(const float *x, int64_t n)
{
    float s[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++)
            s[j] += x[i + j];
    for (int j = 0; i < n; i++, j++)
        s[j] += x[i];
    return sum_lanes(s);
}

static inline float dot(const float *x, const float *y, int64_t n)
{
    float s[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++)
            s[j] += x[i + j] * y[i + j];
    for (int j = 0; i < n; i++, j++)
        s[j] += x[i] * y[i];
    return sum_lanes(s);
}

/* Returns e^x within 2 units in the last place, for x between `lowest`, at least -87, and `highest`, at most
 * 88. An x outside is replaced by the nearer limit; a NaN stays a NaN. The method is that of Cephes' expf:
 * 2^n times a polynomial on [-ln2/2, ln2/2]. Unlike the function of libm, it can be vectorised. */
static inline float exp_between(float x, float lowest, float highest)
{
    const float to_whole = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer in the low bits */
    x = x < lowest ? lowest : x;
    x = x > highest ? highest : x;
    float shifted = x * 1.44269504f + to_whole;
    float whole = shifted - to_whole;
    float r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    float p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127u) << 23; /* exponent of 2^n; the constant's own low bits are 0 */
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

static inline float fast_exp(float x)
{
    return exp_between(x, -87.0f, 88.0f);
}

/* 1 / (1 + e^-x). The exponent's limit is 80, because the reciprocal of e^80 is not denormal. Some CPUs take
 * a hundred times as long for denormal numbers, and vector code computes the value at the limit for every
 * element. */
static inline float sigmoid(float x)
{
    return 1.0f / (1.0f + exp_between(-x, -87.0f, 80.0f));
}

/* Adds n fp32 sums to a gradient. It rounds once, however many rows were summed. */
static inline void add_columns(real *restrict grad, const float *restrict columns, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        grad[i] = from_float(to_float(grad[i]) + columns[i]);
}

static inline void add_row(float *restrict columns, const real *restrict row, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        columns[i] += to_float(row[i]);
}

#endif
