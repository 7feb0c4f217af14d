/* SPDX-License-Identifier: Apache-2.0 */
/* exact_merge.h: two exact sums added up, for tests that have cut one. */
#ifndef ZR_TEST_KERNELS_EXACT_MERGE_H
#define ZR_TEST_KERNELS_EXACT_MERGE_H

#include "kernels/exact_sum.h"

/* Adds all that was added to b; b stays. Both may be as full as they get: each limb is a carried one and at
 * most ZR_EXACT_MAX_ADDED - 1 additions, and two fit. */
static inline void exact_merge(struct zr_exact_sum *a, const struct zr_exact_sum *b)
{
    for (int i = 0; i < ZR_EXACT_LIMBS; i++)
        a->limb[i] += b->limb[i];
    a->nonfinite |= b->nonfinite;
    zr_exact_carry(a);
}

#endif
