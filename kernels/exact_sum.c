/* exact_sum.c: what of the long accumulator no GPU needs. */
#include "kernels/exact_sum.h"

void zr_exact_reset(struct zr_exact_sum *a)
{
    memset(a, 0, sizeof *a);
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
