/* SPDX-License-Identifier: Apache-2.0 */
/* exact_merge.h: adds two exact sums, for tests that cut one sum into parts. */
#ifndef ZR_TEST_KERNELS_EXACT_MERGE_H
#define ZR_TEST_KERNELS_EXACT_MERGE_H

#include "kernels/exact_sum.h"

/* Adds a to b; a does not change. Both may be full: each limb is a carried one plus at most
 * ZR_EXACT_MAX_ADDED - 1 additions, and the sum of two such limbs fits. */
static inline void exact_merge(struct zr_exact_sum *a, const struct zr_exact_sum *b)
{
    for (int i = 0; i < ZR_EXACT_LIMBS; i++)
        a->limb[i] += b->limb[i];
    a->nonfinite |= b->nonfinite;
    zr_exact_carry(a);
}

#endif
