/* SPDX-License-Identifier: Apache-2.0 */
/* body_codes.h: masters, states and sums in fewer bytes than fp32 (state_codes.h), written once for every
 * instruction set.
 *
 * host_portable.c, host_avx2.c and host_avx512.c include it after their vec_*.h. Loops are over elements, and
 * the compiler vectorizes them. */
#include "kernels/state_codes.h"

/* --- bf16 --- */

static void decode_bf16(float *x, const uint16_t *from, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = zr_bf16_value(from[i]);
}

/* Returns the noise of elements from index at on, which are adjacent. *first is the lower half of
 * the first one's number. */
static struct zr_noise noise_from(const struct zr_rounding *r, enum zr_noise_kind kind, int64_t at,
                                  uint32_t *first)
{
    const int64_t element = zr_rounding_element(r, at);
    *first = (uint32_t)element;
    return zr_noise_of(r, kind, element);
}

/* Rounds n adjacent elements at random. */
static void encode_bf16(uint16_t *to, const float *x, int64_t n, const struct zr_rounding *r,
                        enum zr_noise_kind kind, int64_t at)
{
    uint32_t first;
    const struct zr_noise noise = noise_from(r, kind, at, &first);
    for (uint32_t i = 0; i < (uint32_t)n; i++)
        to[i] = zr_round_random(x[i], zr_noise_bits(noise, first + i));
}

static void host_add_rounded(uint16_t *dst, const float *src, int64_t n, const struct zr_rounding *r)
{
    enum { MOST = 1 << 30 };
    for (int64_t at = 0, adjacent; at < n; at += adjacent) {
        uint32_t first;
        const struct zr_noise noise = noise_from(r, ZR_NOISE_SUM, at, &first);
        adjacent = zr_rounding_adjacent(r, at) < MOST ? zr_rounding_adjacent(r, at) : MOST;
        adjacent = adjacent < n - at ? adjacent : n - at;
        for (uint32_t i = 0; i < (uint32_t)adjacent; i++)
            dst[at + i] =
                zr_round_random(zr_bf16_value(dst[at + i]) + src[at + i], zr_noise_bits(noise, first + i));
    }
}

/* --- masters --- */

static void decode_masters(float *w, const uint16_t *weight, const uint16_t *remainder, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        w[i] = zr_join_master(weight[i], remainder[i]);
}

static void encode_weights(uint16_t *weight, const float *w, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        weight[i] = zr_round_away(w[i]);
}

static void encode_masters(uint16_t *weight, uint16_t *remainder, const float *w, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        weight[i] = zr_round_away(w[i]);
        remainder[i] = zr_remainder_of(w[i]);
    }
}

/* --- states in 8 bits ---
 *
 * Each loop works on a constant number of elements of 4 bytes. So the compiler takes whole vectors. */

ALWAYS_INLINE void decode_block(float *x, const uint8_t *code, float scale, bool squares)
{
    for (int i = 0; i < ZR_Q8_BLOCK; i += VEC_LANES)
        vec_store(x + i, squares ? vec_load_u8(code + i) : vec_load_i8(code + i));
    for (int i = 0; i < ZR_Q8_BLOCK; i++)
        x[i] = zr_q8_value_of(x[i], scale, squares);
}

ALWAYS_INLINE uint16_t scale_of_block(const float *x, bool squares)
{
    uint32_t largest = 0;
    for (int i = 0; i < ZR_Q8_BLOCK; i++) {
        const uint32_t size = zr_q8_size(x[i], squares);
        largest = size > largest ? size : largest;
    }
    return zr_q8_scale(largest);
}

/* noise NULL: rounds to nearest. */
ALWAYS_INLINE void encode_block(uint8_t *code, const float *x, float scale, bool squares,
                                const struct zr_noise *noise, uint32_t first)
{
    int32_t wide[ZR_Q8_BLOCK];
    for (int i = 0; i < ZR_Q8_BLOCK; i++)
        wide[i] = zr_q8_code(x[i], scale, squares,
                             noise ? zr_noise_bits(*noise, first + (uint32_t)i) : ZR_NOISE_NEAREST);
    for (int i = 0; i < ZR_Q8_BLOCK; i += VEC_LANES)
        vec_store_low_bytes(code + i, wide + i);
}

/* The last block of a tensor may be short. It is decoded and encoded in a whole one. */
ALWAYS_INLINE void decode_blocks(float *x, const uint8_t *code, const uint16_t *scale, int64_t n,
                                 bool squares)
{
    const int64_t whole = n - n % ZR_Q8_BLOCK;
    for (int64_t i = 0; i < whole; i += ZR_Q8_BLOCK)
        decode_block(x + i, code + i, zr_bf16_value(scale[i / ZR_Q8_BLOCK]), squares);
    if (whole < n) {
        float all_x[ZR_Q8_BLOCK];
        uint8_t all_code[ZR_Q8_BLOCK] = {0};
        memcpy(all_code, code + whole, (size_t)(n - whole));
        decode_block(all_x, all_code, zr_bf16_value(scale[whole / ZR_Q8_BLOCK]), squares);
        memcpy(x + whole, all_x, (size_t)(n - whole) * sizeof *x);
    }
}

/* All scales are computed first. Otherwise, the CPU would wait for each scale before it computes codes. */
ALWAYS_INLINE void encode_blocks(uint8_t *code, uint16_t *scale, const float *x, int64_t n, bool squares,
                                 const struct zr_noise *noise, uint32_t first)
{
    const int64_t whole = n - n % ZR_Q8_BLOCK;
    for (int64_t i = 0; i < whole; i += ZR_Q8_BLOCK)
        scale[i / ZR_Q8_BLOCK] = scale_of_block(x + i, squares);
    for (int64_t i = 0; i < whole; i += ZR_Q8_BLOCK)
        encode_block(code + i, x + i, zr_bf16_value(scale[i / ZR_Q8_BLOCK]), squares, noise,
                     first + (uint32_t)i);
    if (whole < n) {
        float all_x[ZR_Q8_BLOCK] = {0};
        uint8_t all_code[ZR_Q8_BLOCK];
        memcpy(all_x, x + whole, (size_t)(n - whole) * sizeof *x);
        scale[whole / ZR_Q8_BLOCK] = scale_of_block(all_x, squares);
        encode_block(all_code, all_x, zr_bf16_value(scale[whole / ZR_Q8_BLOCK]), squares, noise,
                     first + (uint32_t)whole);
        memcpy(code + whole, all_code, (size_t)(n - whole));
    }
}

static void decode_q8(float *x, const uint8_t *code, const uint16_t *scale, int64_t n, bool squares)
{
    if (squares)
        decode_blocks(x, code, scale, n, true);
    else
        decode_blocks(x, code, scale, n, false);
}

/* Rounds n adjacent elements at random. */
static void encode_q8(uint8_t *code, uint16_t *scale, const float *x, int64_t n, bool squares,
                      const struct zr_noise *noise, uint32_t first)
{
    if (squares)
        encode_blocks(code, scale, x, n, true, noise, first);
    else
        encode_blocks(code, scale, x, n, false, noise, first);
}

/* --- without an update --- */

static void host_encode(const struct zr_coded *to, const float *src, int64_t n)
{
    switch (to->coding) {
    case ZR_CODING_WEIGHT:
        encode_weights(to->at, src, n);
        break;
    case ZR_CODING_REMAINDER:
        encode_masters(to->at, to->beside, src, n);
        break;
    case ZR_CODING_Q8:
        encode_blocks(to->at, to->beside, src, n, false, NULL, 0);
        break;
    case ZR_CODING_Q8_SQUARES:
        encode_blocks(to->at, to->beside, src, n, true, NULL, 0);
        break;
    }
}

static void host_decode(float *dst, const struct zr_coded *from, int64_t n)
{
    switch (from->coding) {
    case ZR_CODING_WEIGHT:
        decode_bf16(dst, from->at, n);
        break;
    case ZR_CODING_REMAINDER:
        decode_masters(dst, from->at, from->beside, n);
        break;
    case ZR_CODING_Q8:
    case ZR_CODING_Q8_SQUARES:
        decode_q8(dst, from->at, from->beside, n, from->coding == ZR_CODING_Q8_SQUARES);
        break;
    }
}
