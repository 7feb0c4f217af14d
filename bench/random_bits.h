/* SPDX-License-Identifier: Apache-2.0 */
/* random_bits.h: random bits that depend only on their place, so that ranks and runs agree without a
 * shared state. */
#ifndef ZERO_BENCH_RANDOM_BITS_H
#define ZERO_BENCH_RANDOM_BITS_H

#include <stdint.h>

/* The output function of splitmix64 (Steele, Lea and Flood 2014): a bijection that looks random. */
static inline uint64_t random_bits(uint64_t x)
{
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

#endif
