/* SPDX-License-Identifier: Apache-2.0 */
/* exact_sum.h: sums of doubles without rounding, so that the order of additions does not matter.
 *
 * The method is Kulisch's long accumulator ("Computer Arithmetic and Validity", 2nd ed., section 8). Its
 * limbs have 32 bits and are held in 64, so carries can wait for 2^30 additions (Neal, "Fast exact summation
 * using small and large superaccumulators", arXiv:1505.05571). It spans the whole range of a double,
 * subnormals included, and 96 bits more at the top. No sum of fewer than 2^63 doubles overflows it.
 *
 * Equal sums may have different limbs until carries are propagated. zr_exact_value gives one answer for all
 * of them.
 *
 * Thread-safety: a sum is plain data, used by one thread at a time. Nothing here allocates or fails. */
#ifndef ZR_KERNELS_EXACT_SUM_H
#define ZR_KERNELS_EXACT_SUM_H

#include "kernels/device.h"
#include "kernels/host_device_code.h"

#include <math.h>
#include <string.h>

/* A carried limb is below 2^32, and an addition changes a limb by less than 2^32. So an int64 holds 2^31 - 2
 * additions. */
#define ZR_EXACT_MAX_ADDED (1u << 30)
#define ZR_EXACT_TOP       (ZR_EXACT_LIMBS - 1)

/* Makes the sum zero. */
void zr_exact_reset(struct zr_exact_sum *a);

/* Records in *largest->word the block of ZR_NORM_BLOCK elements of x with the largest sum of squares, unless
 * an earlier call recorded a larger one. The message of a skipped step names the tensor in which that block
 * lies. acc has the sum of squares, of x and of what was added before. x is read only if acc shows that a
 * block may reach largest->from. Propagates the carries of acc. */
void zr_largest_record(const struct zr_largest *largest, struct zr_exact_sum *acc, const void *x,
                       enum zero_dtype dtype, int64_t n);

/* Propagates carries: all limbs except the last become 0 to 2^32-1. The value does not change. */
ZR_HOST_DEVICE void zr_exact_carry(struct zr_exact_sum *a)
{
    int64_t carry = 0;
    for (int i = 0; i < ZR_EXACT_TOP; i++) {
        int64_t v = a->limb[i] + carry;
        a->limb[i] = v & UINT32_MAX;
        carry = v >> 32; /* floor, so what stays is never negative */
    }
    a->limb[ZR_EXACT_TOP] += carry;
    a->n_added = 0;
}

/* Returns the sum rounded once, to nearest, ties to even. It is NaN if anything not finite was added, an
 * infinity if the exact sum is beyond the doubles, and +0 if the sum is zero. */
ZR_HOST_DEVICE double zr_exact_value(const struct zr_exact_sum *sum)
{
    if (sum->nonfinite)
        return NAN;
    struct zr_exact_sum a = *sum;
    zr_exact_carry(&a);
    bool negative = a.limb[ZR_EXACT_TOP] < 0;
    if (negative) {
        for (int i = 0; i < ZR_EXACT_LIMBS; i++)
            a.limb[i] = -a.limb[i];
        zr_exact_carry(&a);
    }
    int top = ZR_EXACT_TOP;
    while (top >= 0 && a.limb[top] == 0)
        top--;
    if (top < 0)
        return 0;
    if (top == ZR_EXACT_TOP) /* at least 2^1120 */
        return negative ? -INFINITY : INFINITY;

    /* The top three limbs hold at least 65 bits: the 53 that are kept, the rounding bit and more. Limbs below
     * them can only break a tie. Limbs below the first count as zero. */
    unsigned __int128 u = 0;
    for (int i = top; i > top - 3; i--)
        u = u << 32 | (i >= 0 ? (uint64_t)a.limb[i] : 0);
    bool sticky = false;
    for (int i = 0; i <= top - 3; i++)
        sticky |= a.limb[i] != 0;
    int unit = 32 * (top - 2) - 1088; /* u counts in units of 2^unit */
    int bits = 64;
    for (uint64_t high = (uint64_t)(u >> 64); high; high >>= 1) /* the top limb, not zero */
        bits++;
    /* Subnormals need no clamp: the sum is a multiple of 2^-1074, so the bits below are zero. */
    int drop = bits - 53; /* 12..43 */
    uint64_t kept = (uint64_t)(u >> drop);
    unsigned __int128 rest = u & (((unsigned __int128)1 << drop) - 1),
                      half = (unsigned __int128)1 << (drop - 1);
    if (rest > half || (rest == half && (sticky || (kept & 1))))
        kept++;
    double value = ldexp((double)kept, unit + drop); /* exact, or beyond the doubles */
    return negative ? -value : value;
}

/* Splits a finite double into m * 2^(place - 1088). place is 14 to 2059; m has the sign and is below 2^53.
 * Returns false if x is not finite. */
ZR_HOST_DEVICE bool zr_exact_split(double x, int64_t *m, uint32_t *place)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint64_t exponent = (bits >> 52) & 0x7ff, fraction = bits & ((UINT64_C(1) << 52) - 1);
    if (__builtin_expect(exponent == 0x7ff, 0))
        return false;
    /* |x| = m * 2^(exponent - 1075). A subnormal has exponent 1 and no hidden bit. */
    uint64_t normal = exponent != 0;
    int64_t sign = -(int64_t)(bits >> 63); /* 0 or -1: (v ^ sign) - sign is v or -v */
    *m = ((int64_t)(fraction | normal << 52) ^ sign) - sign;
    *place = (uint32_t)(exponent + !normal) + (1088 - 1075);
    return true;
}

/* ---- the largest block of a sum of squares (struct zr_largest) ---- */

#define ZR_LARGEST_AT_BITS   37
#define ZR_LARGEST_RANK_BITS 16

/* Packs a block's sum of squares and its position into a word. A larger exponent of the sum gives a greater
 * word; among equals, a lower position does. A sum that is not finite has the largest exponent. The lowest
 * bits are 0, for a rank. */
ZR_HOST_DEVICE uint64_t zr_largest_of(double squares, int64_t at)
{
    uint64_t bits, most = (UINT64_C(1) << ZR_LARGEST_AT_BITS) - 1;
    memcpy(&bits, &squares, sizeof bits);
    return (bits >> 52 & 0x7ff) << (ZR_LARGEST_AT_BITS + ZR_LARGEST_RANK_BITS) |
           ((most - (uint64_t)at) & most) << ZR_LARGEST_RANK_BITS;
}

/* Returns whether the block is recorded. A NaN is. */
ZR_HOST_DEVICE bool zr_is_large(double squares, double from)
{
    return !(squares < from);
}

/* Adds the rank to the word. A lower rank gives a greater word. 0 stays 0. */
ZR_HOST_DEVICE uint64_t zr_largest_with_rank(uint64_t word, int32_t rank)
{
    return word ? word | (UINT64_C(0xffff) - (uint64_t)rank) : 0;
}

/* Return the position and the rank of a word that is not 0. */
ZR_HOST_DEVICE int64_t zr_largest_at(uint64_t word)
{
    uint64_t most = (UINT64_C(1) << ZR_LARGEST_AT_BITS) - 1;
    return (int64_t)(most - (word >> ZR_LARGEST_RANK_BITS & most));
}

ZR_HOST_DEVICE int32_t zr_largest_rank(uint64_t word)
{
    return (int32_t)(UINT64_C(0xffff) - (word & 0xffff));
}

/* Adds a number of less than 128 bits to four limbs. Each limb changes by less than 2^32. */
ZR_HOST_DEVICE void zr_exact_add_wide(struct zr_exact_sum *a, uint32_t limb, __int128 sum)
{
    a->limb[limb] += (int64_t)(uint32_t)sum;
    a->limb[limb + 1] += (int64_t)(uint32_t)(sum >> 32);
    a->limb[limb + 2] += (int64_t)(uint32_t)(sum >> 64);
    a->limb[limb + 3] += (int64_t)(sum >> 96);
    if (__builtin_expect(++a->n_added >= ZR_EXACT_MAX_ADDED, 0))
        zr_exact_carry(a);
}

/* Adds x, of any sign. */
ZR_HOST_DEVICE void zr_exact_add(struct zr_exact_sum *a, double x)
{
    int64_t m;
    uint32_t place;
    if (zr_exact_split(x, &m, &place))
        zr_exact_add_wide(a, place / 32, (__int128)((unsigned __int128)(__int128)m << place % 32));
    else
        a->nonfinite = 1;
}

/* Many additions in a row, at most 2^40. Numbers of similar size meet the same limbs, so they are summed in a
 * 128-bit number until the limb changes. Each addend has at most 84 bits.
 *
 *     struct zr_exact_run run = {.to = acc};
 *     for (...) zr_exact_run_add(&run, x);
 *     zr_exact_run_end(&run); */
struct zr_exact_run {
    struct zr_exact_sum *to;
    /* sum of the run, in units of the first bit of limb */
    __int128 sum;
    uint32_t limb;
};

ZR_HOST_DEVICE void zr_exact_run_end(struct zr_exact_run *r)
{
    zr_exact_add_wide(r->to, r->limb, r->sum);
    r->sum = 0;
}

ZR_HOST_DEVICE void zr_exact_run_add(struct zr_exact_run *r, double x)
{
    int64_t m;
    uint32_t place;
    if (!zr_exact_split(x, &m, &place)) {
        r->to->nonfinite = 1;
        return;
    }
    if (__builtin_expect(place / 32 != r->limb, 0)) {
        zr_exact_run_end(r);
        r->limb = place / 32;
    }
    r->sum += (__int128)((unsigned __int128)(__int128)m << place % 32);
}

#endif
