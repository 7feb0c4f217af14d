/* SPDX-License-Identifier: Apache-2.0 */
/* half.h: converts 16-bit floats to and from numbers, for stand-ins and tests that compute with them.
 * Rounds to nearest, ties to even, if the name does not say otherwise. */
#ifndef ZR_TEST_STAND_IN_HALF_H
#define ZR_TEST_STAND_IN_HALF_H

#include "kernels/state_codes.h"

#include <math.h>
#include <stdint.h>

static inline float bf16_to_float(uint16_t h)
{
    return zr_bits_float((uint32_t)h << 16);
}

static inline uint16_t bf16_from_float(float f)
{
    const uint32_t bits = zr_float_bits(f);
    return (uint16_t)(f != f ? (bits >> 16 | 0x40) : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Ties are rounded away from zero, as masters are to weights. */
static inline uint16_t bf16_ties_away(float f)
{
    const uint32_t bits = zr_float_bits(f);
    return (uint16_t)(f != f ? (bits >> 16 | 0x40) : (bits + 0x8000) >> 16);
}

/* 1 sign bit, 5 exponent bits, 10 fraction bits. Exponent 31 is infinity or NaN; exponent 0 is a multiple
 * of 2^-24. */
static inline float f16_to_float(uint16_t h)
{
    int exponent = h >> 10 & 31, fraction = h & 1023;
    float f = exponent == 31 ? (fraction ? NAN : INFINITY)
              : exponent     ? ldexpf((float)(1024 + fraction), exponent - 25)
                             : ldexpf((float)fraction, -24);
    return h & 0x8000 ? -f : f;
}

static inline uint16_t f16_from_float(float f)
{
    uint16_t sign = signbit(f) ? 0x8000 : 0;
    float size = fabsf(f);
    if (isnan(f))
        return (uint16_t)(sign | 0x7e00);
    if (size >= 65520.0f) /* halfway between the largest number and the next */
        return (uint16_t)(sign | 0x7c00);
    int exponent;
    frexpf(size, &exponent);
    int unit = size < 0x1p-14f ? -24 : exponent - 11; /* of the last bit, as a power of two */
    /* From 1024 steps on, the first bit belongs to the exponent. Rounding up to 2048 carries into it
     * correctly. */
    int steps = (int)rintf(ldexpf(size, -unit));
    return (uint16_t)(sign | (((unit + 24) << 10) + steps));
}

#endif
