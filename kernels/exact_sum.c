/* SPDX-License-Identifier: Apache-2.0 */
/* exact_sum.c: the functions of exact_sum.h that only the host needs. */
#include "kernels/exact_sum.h"

void zr_exact_reset(struct zr_exact_sum *a)
{
    memset(a, 0, sizeof *a);
}

/* Whether the sum may be the threshold or more. Returns false only if it is certainly smaller, because all
 * limbs that a number from the threshold on uses are zero. */
static bool may_reach(struct zr_exact_sum *a, double threshold)
{
    int exponent, limb;
    if (a->nonfinite || isinf(threshold))
        return a->nonfinite;
    frexp(threshold, &exponent);       /* threshold >= 2^(exponent - 1) */
    limb = (exponent - 1 + 1088) / 32; /* limb 0 counts in units of 2^-1088 */
    zr_exact_carry(a);
    while (limb < ZR_EXACT_LIMBS && a->limb[limb] == 0)
        limb++;
    return limb < ZR_EXACT_LIMBS;
}

/* A word orders blocks by the binary exponent of their sums. Among equals, the block at the lower position
 * counts. */
void zr_largest_record(const struct zr_largest *largest, struct zr_exact_sum *acc, const void *x,
                       enum zero_dtype dtype, int64_t n)
{
    if (!may_reach(acc, largest->from))
        return;
    for (int64_t first = 0; first < n; first += ZR_NORM_BLOCK) {
        double squares = 0;
        for (int64_t i = first; i < n && i < first + ZR_NORM_BLOCK; i++) {
            const double v =
                dtype == ZERO_F32 ? ((const float *)x)[i] : zr_bf16_value(((const uint16_t *)x)[i]);
            squares += v * v;
        }
        uint64_t word = zr_largest_of(squares, largest->at + first * (zr_dtype_bytes(dtype) / 2));
        if (zr_is_large(squares, largest->from) && word > *largest->word)
            *largest->word = word;
    }
}
