/* SPDX-License-Identifier: Apache-2.0 */
/* random.h: random inputs for the kernel tests.
 *
 * The seed comes from the clock, or from SEED in the environment to repeat a run. Tests print it. */
#ifndef ZR_TEST_KERNELS_RANDOM_H
#define ZR_TEST_KERNELS_RANDOM_H

#include "kernels/device.h"
#include "test/stand_in/half.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct random_source {
    uint64_t state;
};

/* Splitmix64 (Steele, Lea and Flood, OOPSLA 2014): its mixing function, and the next 64 bits of a state. */
static inline uint64_t random_mix(uint64_t z)
{
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static inline uint64_t random_next(uint64_t *state)
{
    return random_mix(*state += UINT64_C(0x9e3779b97f4a7c15));
}

static inline uint64_t random_bits(struct random_source *r)
{
    return random_next(&r->state);
}

/* A multiple of 2^-20 in [-1, 1). */
static inline float random_unit(uint64_t bits)
{
    return (float)((int64_t)(bits >> 43) - (1 << 20)) / (float)(1 << 20);
}

static inline struct random_source random_open(void)
{
    const char *text = getenv("SEED");
    struct random_source r = {text ? strtoull(text, NULL, 0) : (uint64_t)zr_now_ns()};
    printf("seed %llu\n", (unsigned long long)r.state);
    return r;
}

/* 0..n-1 */
static inline int64_t random_below(struct random_source *r, int64_t n)
{
    return (int64_t)(random_bits(r) % (uint64_t)n);
}

/* Approximately normal with mean 0 and variance 1: the sum of twelve uniform numbers. */
static inline float random_normal(struct random_source *r)
{
    double sum = -6;
    for (int i = 0; i < 12; i++)
        sum += (double)(random_bits(r) >> 11) * 0x1p-53;
    return (float)sum;
}

#endif
