/* SPDX-License-Identifier: Apache-2.0 */
/* vec_portable.h: the vector functions of the kernel bodies for plain C, and for a GPU: a vector of one
 * float.
 *
 * The compiler vectorizes the loops where it can. Every other vec_*.h must give the same bits. */
#ifndef ZR_KERNELS_VEC_PORTABLE_H
#define ZR_KERNELS_VEC_PORTABLE_H

#include "kernels/host_device_code.h"
#include "kernels/state_codes.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#define VEC_LANES 1
typedef float vec;

ZR_HOST_DEVICE vec vec_load(const float *p)
{
    return *p;
}

ZR_HOST_DEVICE void vec_store(float *p, vec v)
{
    *p = v;
}

ZR_HOST_DEVICE vec vec_set(float x)
{
    return x;
}

ZR_HOST_DEVICE vec vec_add(vec a, vec b)
{
    return a + b;
}

ZR_HOST_DEVICE vec vec_sub(vec a, vec b)
{
    return a - b;
}

ZR_HOST_DEVICE vec vec_mul(vec a, vec b)
{
    return a * b;
}

ZR_HOST_DEVICE vec vec_div(vec a, vec b)
{
    return a / b;
}

ZR_HOST_DEVICE vec vec_sqrt(vec a)
{
    return sqrtf(a);
}

/* A number by which many vectors are divided. */
typedef struct {
    vec by;
} vec_divisor;

ZR_HOST_DEVICE vec_divisor vec_divisor_of(float by)
{
    vec_divisor d = {vec_set(by)};
    return d;
}

/* Returns the bits of vec_div(a, d->by). */
ZR_HOST_DEVICE vec vec_div_by(vec a, const vec_divisor *d)
{
    return vec_div(a, d->by);
}

/* Uses memcpy, because in a cast in place the same bytes are floats and bf16s. */
ZR_HOST_DEVICE vec vec_load_f32_bytes(const void *p)
{
    float x;
    memcpy(&x, p, sizeof x);
    return x;
}

ZR_HOST_DEVICE void vec_store_f32_bytes(void *p, vec v)
{
    memcpy(p, &v, sizeof v);
}

/* A bf16 in memory. A memcpy of two bytes would keep the compiler from vectorizing. */
typedef uint16_t __attribute__((may_alias)) vec_bits16;

ZR_HOST_DEVICE vec vec_load_bf16(const void *p)
{
    return zr_bf16_value(*(const vec_bits16 *)p);
}

ZR_HOST_DEVICE void vec_store_bf16(void *p, vec v)
{
    const uint32_t bits = zr_float_bits(v);
    /* Adds half of the last place, less one unless that place is odd. This carries exactly when rounding to
     * even goes up. */
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    uint32_t quiet = bits >> 16 | 0x40; /* a NaN must not round up to an infinity */
    *(vec_bits16 *)p = (uint16_t)(v != v ? quiet : rounded);
}

/* Ties are rounded away from zero. */
ZR_HOST_DEVICE void vec_store_weight(void *p, vec v)
{
    *(vec_bits16 *)p = zr_round_away(v);
}

/* Returns unsigned or signed bytes as floats. */
ZR_HOST_DEVICE vec vec_load_u8(const void *p)
{
    return (float)*(const uint8_t *)p;
}

ZR_HOST_DEVICE vec vec_load_i8(const void *p)
{
    return (float)*(const int8_t *)p;
}

/* Stores the low byte of each integer. */
ZR_HOST_DEVICE void vec_store_low_bytes(void *p, const int32_t *x)
{
    *(uint8_t *)p = (uint8_t)*x;
}

/* Returns the sum of squares of one block of ZR_NORM_BLOCK elements, in the order that device.h defines. */
ZR_HOST_DEVICE double vec_block_squares(const float *x)
{
    double a[8];
    for (int j = 0; j < 8; j++) {
        double p = x[j], q = x[j + 8], r = x[j + 16], s = x[j + 24];
        a[j] = p * p + q * q + r * r + s * s;
    }
    return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
}

/* bytes is above 0. */
ZR_HOST_DEVICE void vec_copy(void *dst, const void *src, int64_t bytes)
{
    memcpy(dst, src, (size_t)bytes);
}

#endif
