/* SPDX-License-Identifier: Apache-2.0 */
/* float_values.c: converts floating-point values and finds NaN and infinity. Values go through float, which
 * holds every BF16 and F16 exactly. */
#include "zero/checkpoint/float_values.h"
#include "kernels/state_codes.h"

#include <math.h>
#include <string.h>

static uint32_t widen_f16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
    if (exponent == 31) /* infinity, NaN */
        return sign | UINT32_C(0x7f800000) | fraction << 13;
    if (exponent)
        return sign | (exponent + 112) << 23 | fraction << 13;
    return sign | zr_float_bits((float)fraction * 0x1p-24f);
}

/* Rounds as the kernels do: a NaN keeps its sign and upper payload, and becomes quiet. */
static uint16_t round_to_bf16(uint32_t bits)
{
    if ((bits & UINT32_C(0x7fffffff)) > UINT32_C(0x7f800000))
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

bool zr_floats_convert(const char *from, enum zero_dtype to)
{
    return (to == ZERO_F32 || to == ZERO_BF16) &&
           (!strcmp(from, "F32") || !strcmp(from, "BF16") || !strcmp(from, "F16"));
}

/* Returns the bits of element i as a float. from is safetensors' name of its dtype. */
static uint32_t load(const void *src, const char *from, int64_t i)
{
    uint32_t wide;
    uint16_t narrow;
    if (!strcmp(from, "F32")) {
        memcpy(&wide, (const char *)src + 4 * i, 4);
        return wide;
    }
    memcpy(&narrow, (const char *)src + 2 * i, 2);
    return !strcmp(from, "F16") ? widen_f16(narrow) : (uint32_t)narrow << 16;
}

void zr_floats_copy(void *dst, enum zero_dtype to, const void *src, const char *from, int64_t n)
{
    bool same = !strcmp(from, to == ZERO_F32 ? "F32" : "BF16");
    if (same && dst == src)
        return;
    for (int64_t i = 0; i < n; i++) {
        uint32_t wide = load(src, from, i);
        uint16_t narrow;
        if (to == ZERO_F32) {
            memcpy((char *)dst + 4 * i, &wide, 4);
            continue;
        }
        narrow = same ? (uint16_t)(wide >> 16) : round_to_bf16(wide);
        memcpy((char *)dst + 2 * i, &narrow, 2);
    }
}

int64_t zr_find_non_finite(const void *values, enum zero_dtype dtype, enum zero_dtype held, int64_t n,
                           float *value)
{
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = load(values, dtype == ZERO_F32 ? "F32" : "BF16", i);
        float x = zr_bits_float(held == ZERO_F32 ? bits : (uint32_t)round_to_bf16(bits) << 16);
        if (isfinite(x))
            continue;
        if (value)
            *value = x;
        return i;
    }
    return -1;
}
