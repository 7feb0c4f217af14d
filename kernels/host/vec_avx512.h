/* SPDX-License-Identifier: Apache-2.0 */
/* vec_avx512.h: the vector functions of the kernel bodies for AVX-512 (F, BW, DQ, VL): sixteen floats.
 *
 * The bits are those of vec_portable.h. So fused multiply-add is used only in vec_div_by, where it gives the
 * correctly rounded quotient. AVX512_BF16's conversion is not used, because it flushes subnormals to zero. */
#ifndef ZR_KERNELS_VEC_AVX512_H
#define ZR_KERNELS_VEC_AVX512_H

#include "kernels/device.h"

#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define VEC_LANES 16
typedef __m512 vec;

static inline vec vec_load(const float *p)
{
    return _mm512_loadu_ps(p);
}

static inline void vec_store(float *p, vec v)
{
    _mm512_storeu_ps(p, v);
}

static inline vec vec_set(float x)
{
    return _mm512_set1_ps(x);
}

static inline vec vec_add(vec a, vec b)
{
    return _mm512_add_ps(a, b);
}

static inline vec vec_sub(vec a, vec b)
{
    return _mm512_sub_ps(a, b);
}

static inline vec vec_mul(vec a, vec b)
{
    return _mm512_mul_ps(a, b);
}

static inline vec vec_div(vec a, vec b)
{
    return _mm512_div_ps(a, b);
}

static inline vec vec_sqrt(vec a)
{
    return _mm512_sqrt_ps(a);
}

/* A number by which many vectors are divided. usable: its inverse can be used; otherwise the CPU divides. */
typedef struct {
    vec by, inverse;
    bool usable;
} vec_divisor;

static inline vec_divisor vec_divisor_of(float by)
{
    return (vec_divisor){vec_set(by), vec_set(1.0f / by), by >= 0x1p-24f && by <= 1.0f};
}

/* Returns the bits of vec_div(a, d->by), in a quarter of the time of AVX-512's division. The rounded inverse
 * gives a quotient that is an ulp or two off. The first remainder gives one that is less than an ulp off.
 * From there the remainder is exact, and gives the correctly rounded quotient (Markstein, "Computation of
 * elementary functions on the IBM RISC System/6000 processor", 1990).
 *
 * This holds if no remainder is subnormal and nothing overflows: for |a| from 2^-100 to 2^100 with usable
 * divisors, and for 0, whose sign is a's. The CPU divides a vector with any other element. */
static inline vec vec_div_by(vec a, const vec_divisor *d)
{
    const __m512i least = _mm512_set1_epi32((127 - 100) << 23), range = _mm512_set1_epi32(200 << 23);
    __m512i size = _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff));
    __mmask16 zero = _mm512_testn_epi32_mask(size, size);
    __mmask16 usual = _mm512_cmple_epu32_mask(_mm512_sub_epi32(size, least), range);
    if (__builtin_expect(!d->usable || (__mmask16)(zero | usual) != 0xffff, 0))
        return _mm512_div_ps(a, d->by);
    vec q = _mm512_mul_ps(a, d->inverse);
    q = _mm512_fmadd_ps(_mm512_fnmadd_ps(q, d->by, a), d->inverse, q);
    q = _mm512_fmadd_ps(_mm512_fnmadd_ps(q, d->by, a), d->inverse, q);
    return _mm512_mask_mov_ps(q, zero, a);
}

static inline vec vec_load_f32_bytes(const void *p)
{
    return _mm512_castsi512_ps(_mm512_loadu_si512(p));
}

static inline void vec_store_f32_bytes(void *p, vec v)
{
    _mm512_storeu_si512(p, _mm512_castps_si512(v));
}

static inline vec vec_load_bf16(const void *p)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16));
}

/* Adds `up` to the bits, and stores the upper halves. */
static inline void vec_store_upper(void *p, vec v, __m512i up)
{
    __m512i bits = _mm512_castps_si512(v), high = _mm512_srli_epi32(bits, 16);
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, up), 16);
    __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    __m512i bf16 = _mm512_mask_or_epi32(rounded, is_nan, high, _mm512_set1_epi32(0x40));
    _mm256_storeu_si256(p, _mm512_cvtepi32_epi16(bf16));
}

static inline void vec_store_bf16(void *p, vec v)
{
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(_mm512_castps_si512(v), 16), _mm512_set1_epi32(1));
    vec_store_upper(p, v, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
}

static inline void vec_store_weight(void *p, vec v)
{
    vec_store_upper(p, v, _mm512_set1_epi32(0x8000));
}

/* Returns unsigned or signed bytes as floats. */
static inline vec vec_load_u8(const void *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(p)));
}

static inline vec vec_load_i8(const void *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p)));
}

/* Stores the low byte of each integer. */
static inline void vec_store_low_bytes(void *p, const int32_t *x)
{
    _mm_storeu_si128(p, _mm512_cvtepi32_epi8(_mm512_loadu_si512(x)));
}

static inline __m512d vec_squares_of_8(const float *x)
{
    __m512d d = _mm512_cvtps_pd(_mm256_loadu_ps(x));
    return _mm512_mul_pd(d, d);
}

static inline double vec_block_squares(const float *x)
{
    __m512d a = vec_squares_of_8(x);
    for (int row = 8; row < ZR_NORM_BLOCK; row += 8)
        a = _mm512_add_pd(a, vec_squares_of_8(x + row));
    __m256d four = _mm256_add_pd(_mm512_castpd512_pd256(a), _mm512_extractf64x4_pd(a, 1));
    __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

/* Large copies bypass the caches, which saves reading what is overwritten. Small ones stay there for the next
 * reader. */
static inline void vec_copy(void *dst, const void *src, int64_t bytes)
{
    char *to = dst;
    const char *from = src;
    if (bytes >= ZR_COPY_STREAM_BYTES) {
        int64_t head = (int64_t)(-(uintptr_t)to & 63), i = 0;
        memcpy(to, from, (size_t)head);
        to += head, from += head, bytes -= head;
        for (; i + 256 <= bytes; i += 256) {
            __m512i a = _mm512_loadu_si512(from + i + 0), b = _mm512_loadu_si512(from + i + 64);
            __m512i c = _mm512_loadu_si512(from + i + 128), d = _mm512_loadu_si512(from + i + 192);
            _mm512_stream_si512((__m512i *)(to + i + 0), a);
            _mm512_stream_si512((__m512i *)(to + i + 64), b);
            _mm512_stream_si512((__m512i *)(to + i + 128), c);
            _mm512_stream_si512((__m512i *)(to + i + 192), d);
        }
        _mm_sfence(); /* makes streamed stores visible before what follows */
        to += i, from += i, bytes -= i;
    }
    memcpy(to, from, (size_t)bytes);
}

#endif
