/* exact_sum.c: carrying, merging and rounding of the long accumulator. */
#include "kernels/exact_sum.h"

#include <math.h>

enum { TOP = ZR_EXACT_LIMBS - 1 };

void zr_exact_reset(struct zr_exact_sum *a)
{
    memset(a, 0, sizeof *a);
}

void zr_exact_carry(struct zr_exact_sum *a)
{
    int64_t carry = 0;
    for (int i = 0; i < TOP; i++) {
        int64_t v = a->limb[i] + carry;
        a->limb[i] = v & UINT32_MAX;
        carry = v >> 32; /* floor: what stays is never negative */
    }
    a->limb[TOP] += carry;
    a->n_added = 0;
}

void zr_exact_merge(struct zr_exact_sum *a, const struct zr_exact_sum *b)
{
    struct zr_exact_sum other = *b;
    /* Fits: each limb is a carried one and at most MAX - 1 additions. */
    _Static_assert(2 * (uint64_t)ZR_EXACT_MAX_ADDED <= UINT64_C(1) << 31,
                   "two full limbs must fit in an int64");
    for (int i = 0; i < ZR_EXACT_LIMBS; i++)
        a->limb[i] += other.limb[i];
    a->nonfinite |= other.nonfinite;
    zr_exact_carry(a);
}

double zr_exact_value(const struct zr_exact_sum *sum)
{
    if (sum->nonfinite)
        return NAN;
    struct zr_exact_sum a = *sum;
    zr_exact_carry(&a);
    bool negative = a.limb[TOP] < 0;
    if (negative) {
        for (int i = 0; i < ZR_EXACT_LIMBS; i++)
            a.limb[i] = -a.limb[i];
        zr_exact_carry(&a);
    }
    int top = TOP;
    while (top >= 0 && a.limb[top] == 0)
        top--;
    if (top < 0)
        return 0;
    if (top == TOP) /* at least 2^1120 */
        return negative ? -INFINITY : INFINITY;

    /* The top three limbs hold at least 65 bits: the 53 kept, the rounding bit and more; what lies below can
     * only break a tie. Limbs below the first are zero. */
    unsigned __int128 u = 0;
    for (int i = top; i > top - 3; i--)
        u = u << 32 | (i >= 0 ? (uint64_t)a.limb[i] : 0);
    bool sticky = false;
    for (int i = 0; i <= top - 3; i++)
        sticky |= a.limb[i] != 0;
    int unit = 32 * (top - 2) - 1088;                      /* u counts 2^unit */
    int bits = 128 - __builtin_clzll((uint64_t)(u >> 64)); /* the high half is the top limb, not zero */
    /* No clamp for subnormals: the sum is a multiple of 2^-1074, so what would lie below is zero. */
    int drop = bits - 53; /* 12..43 */
    uint64_t kept = (uint64_t)(u >> drop);
    unsigned __int128 rest = u & (((unsigned __int128)1 << drop) - 1),
                      half = (unsigned __int128)1 << (drop - 1);
    if (rest > half || (rest == half && (sticky || (kept & 1))))
        kept++;
    double value = ldexp((double)kept, unit + drop); /* exact, or beyond the doubles */
    return negative ? -value : value;
}
