/* vec_avx512.h: the vector words of the kernel bodies for AVX-512 (F, BW, DQ, VL): sixteen floats.
 *
 * No fused multiply-add: see device.h. Nor AVX512_BF16's conversion, which flushes subnormals to zero. */
#ifndef ZR_KERNELS_VEC_AVX512_H
#define ZR_KERNELS_VEC_AVX512_H

#include "kernels/device.h"

#include <immintrin.h>
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

static inline vec vec_load_any(const void *p)
{
    return _mm512_castsi512_ps(_mm512_loadu_si512(p));
}

static inline void vec_store_any(void *p, vec v)
{
    _mm512_storeu_si512(p, _mm512_castps_si512(v));
}

static inline vec vec_load_bf16(const void *p)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16));
}

static inline void vec_store_bf16(void *p, vec v)
{
    __m512i bits = _mm512_castps_si512(v), high = _mm512_srli_epi32(bits, 16);
    __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    __m512i rounded =
        _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    __m512i half = _mm512_mask_or_epi32(rounded, is_nan, high, _mm512_set1_epi32(0x40));
    _mm256_storeu_si256(p, _mm512_cvtepi32_epi16(half));
}

static inline __m512d vec_squares_of_8(const float *x)
{
    __m512d d = _mm512_cvtps_pd(_mm256_loadu_ps(x));
    return _mm512_mul_pd(d, d);
}

static inline double vec_block_squares(const float *x)
{
    __m512d a = vec_squares_of_8(x);
    for (int row = 8; row < 32; row += 8)
        a = _mm512_add_pd(a, vec_squares_of_8(x + row));
    __m256d four = _mm256_add_pd(_mm512_castpd512_pd256(a), _mm512_extractf64x4_pd(a, 1));
    __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

/* Past the caches for large copies, which saves reading what is overwritten. Small ones stay for who reads
 * them next. */
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
        _mm_sfence(); /* streamed stores are seen before what follows */
        to += i, from += i, bytes -= i;
    }
    memcpy(to, from, (size_t)bytes);
}

#endif
