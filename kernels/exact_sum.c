/* exact_sum.c: what of the long accumulator no GPU needs. */
#include "kernels/exact_sum.h"

void zr_exact_reset(struct zr_exact_sum *a)
{
    memset(a, 0, sizeof *a);
}
