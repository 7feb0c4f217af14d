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

/* A finite double as three limbs from limb "at" on. */
struct zr_exact_parts {
    uint32_t at;
    int64_t low, middle, high;
};

static inline bool zr_exact_split(double x, struct zr_exact_parts *p)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t exponent = (bits >> 52) & 0x7ff;
    if (__builtin_expect(exponent == 0x7ff, 0))
        return false;
    /* |x| = m * 2^(exponent - 1075), and a subnormal has exponent 1 without the hidden bit. */
    uint64_t normal = exponent != 0;
    uint64_t m = (bits & ((UINT64_C(1) << 52) - 1)) | normal << 52;
    uint32_t place = exponent + (uint32_t)!normal + (1088 - 1075), shift = place % 32;
    int64_t sign = -(int64_t)(bits >> 63); /* 0 or -1: (v ^ sign) - sign is v or -v */
    p->at = place / 32;
    p->low = ((int64_t)((m << shift) & UINT32_MAX) ^ sign) - sign;
    p->middle = ((int64_t)((m >> (32 - shift)) & UINT32_MAX) ^ sign) - sign;
    p->high = ((int64_t)((m >> 32) >> (32 - shift)) ^ sign) - sign;
    return true;
}

/* Adds x, of any sign. */
static inline void zr_exact_add(struct zr_exact_sum *a, double x)
{
    struct zr_exact_parts p;
    if (!zr_exact_split(x, &p)) {
        a->nonfinite = 1;
        return;
    }
    a->limb[p.at] += p.low;
    a->limb[p.at + 1] += p.middle;
    a->limb[p.at + 2] += p.high;
    if (__builtin_expect(++a->n_added >= ZR_EXACT_MAX_ADDED, 0))
        zr_exact_carry(a);
}

/* Many additions in a row: numbers of like size meet the same three limbs, which are kept in registers until
 * that changes.
 *
 *     struct zr_exact_run run = {.to = acc};
 *     for (...) zr_exact_run_add(&run, x);
 *     zr_exact_run_end(&run); */
struct zr_exact_run {
    struct zr_exact_sum *to;
    struct zr_exact_parts sum;
    uint32_t n; /* additions in sum */
};

static inline void zr_exact_run_end(struct zr_exact_run *r)
{
    if (r->to->n_added + r->n >= ZR_EXACT_MAX_ADDED)
        zr_exact_carry(r->to);
    r->to->limb[r->sum.at] += r->sum.low;
    r->to->limb[r->sum.at + 1] += r->sum.middle;
    r->to->limb[r->sum.at + 2] += r->sum.high;
    r->to->n_added += r->n;
    r->n = 0;
}

static inline void zr_exact_run_add(struct zr_exact_run *r, double x)
{
    struct zr_exact_parts p;
    if (!zr_exact_split(x, &p)) {
        r->to->nonfinite = 1;
        return;
    }
    if (p.at != r->sum.at || r->n == ZR_EXACT_MAX_ADDED / 2) {
        zr_exact_run_end(r);
        r->sum = p;
    } else {
        r->sum.low += p.low;
        r->sum.middle += p.middle;
        r->sum.high += p.high;
    }
    r->n++;
}

#endif
