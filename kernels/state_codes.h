/* SPDX-License-Identifier: Apache-2.0 */
/* state_codes.h: masters, moments and gradient sums in fewer bytes than fp32, for the host and a GPU.
 *
 * Numbers are rounded at random with noise that is a function of a key, an element's number in its whole
 * tensor, and a kind. So every layout of shards gives the same bits. All devices compile this text, and all
 * operations are exact or correctly rounded, so all devices give the same bits too. Functions of one element
 * have no branches, so that compilers vectorize loops over them. */
#ifndef ZR_KERNELS_STATE_CODES_H
#define ZR_KERNELS_STATE_CODES_H

#include "kernels/host_device_code.h"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* --- noise --- */

/* Kinds of values that are rounded at random. Each has its own noise. */
enum zr_noise_kind { ZR_NOISE_WEIGHT, ZR_NOISE_STATE_0, ZR_NOISE_STATE_1, ZR_NOISE_SUM };

/* The noise of n elements that lie one after the other in an array. Element i of the array has the number
 *
 *     first + i + (at + i) / run * skip
 *
 * in the whole tensor. A rank has run elements there, the next skip elements belong to others, and so on. at
 * is the position of element 0 in its run. With run 0 the elements are adjacent in the tensor, too. */
struct zr_rounding {
    uint32_t key[2];
    int64_t first, at, run, skip;
};

/* A one-to-one function of 64-bit numbers (splitmix64; Steele, Lea and Flood, OOPSLA 2014). */
ZR_HOST_DEVICE uint64_t zr_mix_64(uint64_t x)
{
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

/* Writes the key of a tensor in a step. tensor is a hash of the tensor's name. */
ZR_HOST_DEVICE void zr_rounding_key(uint32_t key[2], uint64_t seed, uint64_t step, uint64_t tensor)
{
    uint64_t x = zr_mix_64(seed + UINT64_C(0x9e3779b97f4a7c15));
    x = zr_mix_64(zr_mix_64(x ^ step) ^ tensor);
    key[0] = (uint32_t)x;
    key[1] = (uint32_t)(x >> 32);
}

ZR_HOST_DEVICE int64_t zr_rounding_element(const struct zr_rounding *r, int64_t i)
{
    return r->first + i + (r->run ? (r->at + i) / r->run * r->skip : 0);
}

/* Returns how many elements from i on are adjacent in the tensor and share a zr_noise. */
ZR_HOST_DEVICE int64_t zr_rounding_adjacent(const struct zr_rounding *r, int64_t i)
{
    const int64_t same = (INT64_C(1) << 32) - (int64_t)(uint32_t)zr_rounding_element(r, i);
    const int64_t left = r->run ? r->run - (r->at + i) % r->run : same;
    return left < same ? left : same;
}

/* The noise of one kind for elements whose numbers have equal upper halves. */
struct zr_noise {
    uint32_t before, between;
};

ZR_HOST_DEVICE struct zr_noise zr_noise_of(const struct zr_rounding *r, enum zr_noise_kind kind,
                                           int64_t element)
{
    const uint32_t part = (uint32_t)(element >> 32) * 4 + (uint32_t)kind;
    struct zr_noise n;
    n.before = r->key[0] + part * 0x9e3779b9u;
    n.between = r->key[1] + part * 0x85ebca6bu;
    return n;
}

/* Returns 32 random bits for the element whose number has this lower half. The mixing function is lowbias32
 * (Wellons, "Prospecting for Hash Functions", 2018), with the second half of the key added between its two
 * multiplications. So the numbers of two keys are not the same ones in another order. */
ZR_HOST_DEVICE uint32_t zr_noise_bits(struct zr_noise n, uint32_t element)
{
    uint32_t x = element + n.before;
    x = (x ^ x >> 16) * 0x7feb352du + n.between;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

#define ZR_NOISE_NEAREST 0x80000000u /* zr_q8_code rounds to nearest with it */

/* --- bf16 --- */

ZR_HOST_DEVICE uint32_t zr_float_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

ZR_HOST_DEVICE float zr_bits_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

ZR_HOST_DEVICE float zr_bf16_value(uint16_t half)
{
    return zr_bits_float((uint32_t)half << 16);
}

ZR_HOST_DEVICE bool zr_bits_are_nan(uint32_t bits)
{
    return (bits & 0x7fffffffu) > 0x7f800000u;
}

/* Rounds to nearest, ties away from zero. A NaN becomes quiet, and keeps its sign and upper payload. */
ZR_HOST_DEVICE uint16_t zr_round_away(float x)
{
    const uint32_t bits = zr_float_bits(x);
    return (uint16_t)(zr_bits_are_nan(bits) ? bits >> 16 | 0x40 : (bits + 0x8000) >> 16);
}

/* Rounds up or down at random, so that the mean is x. Only an infinity gives an infinity: numbers above the
 * largest bf16 give that one. A NaN becomes quiet, and keeps its sign and upper payload. */
ZR_HOST_DEVICE uint16_t zr_round_random(float x, uint32_t noise)
{
    const uint32_t bits = zr_float_bits(x), size = bits & 0x7fffffffu, rounded = size + (noise >> 16);
    const uint32_t kept = rounded < 0x7f800000u ? rounded : size;
    return (uint16_t)((kept | (bits ^ size)) >> 16 | (zr_bits_are_nan(bits) ? 0x40 : 0));
}

/* --- masters as a bf16 weight and 16 more bits ---
 *
 * The weight is zr_round_away(master), and the remainder is the lower half of the master. A remainder of
 * 0x8000 or more shows that the weight was rounded up. So both give the master; a signaling NaN becomes
 * quiet. */

ZR_HOST_DEVICE uint16_t zr_remainder_of(float master)
{
    return (uint16_t)zr_float_bits(master);
}

ZR_HOST_DEVICE float zr_join_master(uint16_t weight, uint16_t remainder)
{
    const uint32_t wide = (uint32_t)weight << 16;
    const uint32_t upper = zr_bits_are_nan(wide) || remainder < 0x8000 ? wide : wide - 0x10000u;
    return zr_bits_float(upper | remainder);
}

/* --- states in 8 bits ---
 *
 * A block of ZR_Q8_BLOCK elements has a bf16 scale, which is its largest magnitude, rounded up. The code c of
 * an element stands for scale * c * c / (levels * levels), with the sign of c. A state of squares has codes 0
 * to 255, and another one has codes -127 to 127. A number between two codes is rounded at random, so that
 * the mean is the number. Only 0 has the code 0. Any other element whose magnitude is below
 * scale / levels^2 gets that magnitude.
 *
 * If the block has a NaN, an infinity or, in a state of squares, a negative number, the scale is NaN. */

#define ZR_Q8_BLOCK 32

/* Returns how many blocks n elements are, with a shorter one at the end. */
ZR_HOST_DEVICE int64_t zr_q8_blocks(int64_t n)
{
    return (n + ZR_Q8_BLOCK - 1) / ZR_Q8_BLOCK;
}

ZR_HOST_DEVICE int zr_q8_levels(bool squares)
{
    return squares ? 255 : 127;
}

/* Returns an integer that grows with the element's magnitude. The largest one of a block gives its scale. */
ZR_HOST_DEVICE uint32_t zr_q8_size(float x, bool squares)
{
    return squares ? zr_float_bits(x + 0.0f) : zr_float_bits(x) & 0x7fffffffu; /* -0 is no negative number */
}

/* Returns the scale of a block. It is 0 or NaN, or its inverse is finite. */
ZR_HOST_DEVICE uint16_t zr_q8_scale(uint32_t largest_size)
{
    const uint32_t rounded = (largest_size + 0xffff) >> 16;
    const uint32_t up =
        rounded == 0 || rounded > 0x0080 ? rounded : 0x0080; /* 2^-126, the least normal number */
    return (uint16_t)(largest_size >= 0x7f800000u ? 0x7fc0 : up < 0x7f7f ? up : 0x7f7f);
}

/* Returns the code of x, in the low byte. */
ZR_HOST_DEVICE int32_t zr_q8_code(float x, float scale, bool squares, uint32_t noise)
{
    const bool usable = scale > 0; /* neither 0 nor NaN */
    const uint32_t sign = zr_float_bits(x) >> 31;
    const float size = zr_bits_float(zr_float_bits(x) & (usable ? 0x7fffffffu : 0));
    const int32_t levels = zr_q8_levels(squares);
    const float at = size * (1.0f / (usable ? scale : 1.0f)) * (float)(levels * levels);
    const int32_t root = (int32_t)sqrtf(at);
    const float below = (float)root;
    const float random = (float)(int32_t)(noise >> 8) * 0x1p-24f;
    const int32_t least = size > 0 ? 1 : 0;
    int32_t code = root + (at - below * below > random * (2 * below + 1) ? 1 : 0);
    code = code < levels ? code : levels;
    code = code > least ? code : least;
    return squares ? code : (code ^ -(int32_t)sign) + (int32_t)sign;
}

/* Returns the value of a code that is given as a float. */
ZR_HOST_DEVICE float zr_q8_value_of(float code, float scale, bool squares)
{
    const float levels = (float)zr_q8_levels(squares);
    const float size = code * code * (1.0f / (levels * levels)) * scale;
    return zr_bits_float(zr_float_bits(size) | (zr_float_bits(code) & 0x80000000u));
}

ZR_HOST_DEVICE float zr_q8_value(uint8_t code, float scale, bool squares)
{
    return zr_q8_value_of(squares ? (float)code : (float)(int8_t)code, scale, squares);
}

#endif
