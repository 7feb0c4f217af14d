/* SPDX-License-Identifier: Apache-2.0 */
/* vec_avx2.h: the vector functions of the kernel bodies for AVX2: eight floats. There is no fused
 * multiply-add, so the bits are those of vec_portable.h. */
#ifndef ZR_KERNELS_VEC_AVX2_H
#define ZR_KERNELS_VEC_AVX2_H

#include "kernels/device.h"

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define VEC_LANES 8
typedef __m256 vec;

static inline vec vec_load(const float *p)
{
    return _mm256_loadu_ps(p);
}

static inline void vec_store(float *p, vec v)
{
    _mm256_storeu_ps(p, v);
}

static inline vec vec_set(float x)
{
    return _mm256_set1_ps(x);
}

static inline vec vec_add(vec a, vec b)
{
    return _mm256_add_ps(a, b);
}

static inline vec vec_sub(vec a, vec b)
{
    return _mm256_sub_ps(a, b);
}

static inline vec vec_mul(vec a, vec b)
{
    return _mm256_mul_ps(a, b);
}

static inline vec vec_div(vec a, vec b)
{
    return _mm256_div_ps(a, b);
}

static inline vec vec_sqrt(vec a)
{
    return _mm256_sqrt_ps(a);
}

/* A number by which many vectors are divided. */
typedef struct {
    vec by;
} vec_divisor;

static inline vec_divisor vec_divisor_of(float by)
{
    vec_divisor d = {vec_set(by)};
    return d;
}

/* Returns the bits of vec_div(a, d->by). */
static inline vec vec_div_by(vec a, const vec_divisor *d)
{
    return vec_div(a, d->by);
}

static inline vec vec_load_f32_bytes(const void *p)
{
    return _mm256_castsi256_ps(_mm256_loadu_si256(p));
}

static inline void vec_store_f32_bytes(void *p, vec v)
{
    _mm256_storeu_si256(p, _mm256_castps_si256(v));
}

static inline vec vec_load_bf16(const void *p)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
}

/* Adds `up` to the bits, and stores the upper halves. */
static inline void vec_store_upper(void *p, vec v, __m256i up)
{
    __m256i bits = _mm256_castps_si256(v), high = _mm256_srli_epi32(bits, 16);
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, up), 16);
    __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    __m256i bf16 = _mm256_blendv_epi8(rounded, quiet, is_nan);
    _mm_storeu_si128(p, _mm_packus_epi32(_mm256_castsi256_si128(bf16), _mm256_extracti128_si256(bf16, 1)));
}

static inline void vec_store_bf16(void *p, vec v)
{
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(v), 16), _mm256_set1_epi32(1));
    vec_store_upper(p, v, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
}

static inline void vec_store_weight(void *p, vec v)
{
    vec_store_upper(p, v, _mm256_set1_epi32(0x8000));
}

/* Returns unsigned or signed bytes as floats. */
static inline vec vec_load_u8(const void *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p)));
}

static inline vec vec_load_i8(const void *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p)));
}

/* Stores the low byte of each integer. */
static inline void vec_store_low_bytes(void *p, const int32_t *x)
{
    const __m256i low = _mm256_setr_epi32(0x0c080400, -1, -1, -1, -1, 0x0c080400, -1, -1);
    __m256i bytes = _mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i *)x), low);
    _mm_storel_epi64(p, _mm_or_si128(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
}

static inline __m256d vec_squares_of_4(const float *x)
{
    __m256d d = _mm256_cvtps_pd(_mm_loadu_ps(x));
    return _mm256_mul_pd(d, d);
}

static inline double vec_block_squares(const float *x)
{
    __m256d low = vec_squares_of_4(x), high = vec_squares_of_4(x + 4); /* a0..a3, a4..a7 */
    for (int row = 8; row < ZR_NORM_BLOCK; row += 8) {
        low = _mm256_add_pd(low, vec_squares_of_4(x + row));
        high = _mm256_add_pd(high, vec_squares_of_4(x + row + 4));
    }
    __m256d four = _mm256_add_pd(low, high);
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
        for (; i + 128 <= bytes; i += 128) {
            __m256i a = _mm256_loadu_si256((const __m256i *)(from + i + 0)),
                    b = _mm256_loadu_si256((const __m256i *)(from + i + 32));
            __m256i c = _mm256_loadu_si256((const __m256i *)(from + i + 64)),
                    d = _mm256_loadu_si256((const __m256i *)(from + i + 96));
            _mm256_stream_si256((__m256i *)(to + i + 0), a);
            _mm256_stream_si256((__m256i *)(to + i + 32), b);
            _mm256_stream_si256((__m256i *)(to + i + 64), c);
            _mm256_stream_si256((__m256i *)(to + i + 96), d);
        }
        _mm_sfence(); /* makes streamed stores visible before what follows */
        to += i, from += i, bytes -= i;
    }
    memcpy(to, from, (size_t)bytes);
}

#endif
