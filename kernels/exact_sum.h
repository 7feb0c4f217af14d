/* exact_sum.h: sums of doubles without rounding, so that the order of additions cannot matter.
 *
 * The method is the long accumulator of Kulisch ("Computer Arithmetic and Validity", 2nd ed., section 8) with
 * limbs of 32 bits held in 64, so that carries can wait for 2^30 additions (Neal, "Fast exact summation using
 * small and large superaccumulators", arXiv:1505.05571). It spans the whole range of a double, subnormals
 * included, and 96 bits more at the top: no sum of fewer than 2^63 doubles overflows it.
 *
 * Limbs that hold one value may differ before carries are propagated; zr_exact_value gives one answer for all
 * of them.
 *
 * Thread-safety: a sum is plain data, used by one thread at a time. Nothing here allocates or fails. */
#ifndef ZR_KERNELS_EXACT_SUM_H
#define ZR_KERNELS_EXACT_SUM_H

#include "kernels/device.h"

#include <string.h>

/* A carried limb is below 2^32 and an addition changes a limb by less than 2^32, so an int64 bears 2^31 - 2
 * of them. */
#define ZR_EXACT_MAX_ADDED (1u << 30)

/* Makes the sum zero. */
void zr_exact_reset(struct zr_exact_sum *a);

/* Propagates carries: all limbs but the last become 0..2^32-1. The value stays. */
void zr_exact_carry(struct zr_exact_sum *a);

/* Adds all that was added to b; b stays. a and b may be the same. */
void zr_exact_merge(struct zr_exact_sum *a, const struct zr_exact_sum *b);

/* The sum rounded once, to nearest, ties to even. NaN when anything not finite was added, an infinity when
 * the exact sum is beyond the doubles; a sum of zero is +0. */
double zr_exact_value(const struct zr_exact_sum *a);

/* Adds x, of any sign. */
static inline void zr_exact_add(struct zr_exact_sum *a, double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t exponent = (bits >> 52) & 0x7ff;
    if (__builtin_expect(exponent == 0x7ff, 0)) {
        a->nonfinite = 1;
        return;
    }
    /* |x| = m * 2^(exponent - 1075), and a subnormal has exponent 1 without the hidden bit. */
    uint64_t normal = exponent != 0;
    uint64_t m = (bits & ((UINT64_C(1) << 52) - 1)) | normal << 52;
    uint32_t at = exponent + (uint32_t)!normal + (1088 - 1075), i = at / 32, shift = at % 32;
    uint64_t low = (m << shift) & UINT32_MAX, middle = (m >> (32 - shift)) & UINT32_MAX,
             high = (m >> 32) >> (32 - shift);
    int64_t sign = -(int64_t)(bits >> 63); /* 0 or -1: (v ^ sign) - sign is v or -v */
    a->limb[i] += ((int64_t)low ^ sign) - sign;
    a->limb[i + 1] += ((int64_t)middle ^ sign) - sign;
    a->limb[i + 2] += ((int64_t)high ^ sign) - sign;
    if (__builtin_expect(++a->n_added >= ZR_EXACT_MAX_ADDED, 0))
        zr_exact_carry(a);
}

#endif
