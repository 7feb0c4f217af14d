/* SPDX-License-Identifier: Apache-2.0 */
/* agreement.c: agree_begin and agree_end on the host, one sum after the other. */
#include "kernels/agreement.h"

void zr_agree_write(const struct zr_agree_begin *b)
{
    for (int k = 0; k <= ZR_MAX_CARRIED; k++)
        zr_agree_write_sum(b, k);
    for (int w = 0; w < ZR_AGREE_WORDS; w++)
        zr_agree_write_word(b, w);
}

void zr_agree_read(const struct zr_agree_end *e)
{
    double sums[1 + ZR_MAX_CARRIED] = {0};
    for (int k = 0; k <= e->n_carried; k++)
        sums[k] = zr_agree_sum(e->all, k);
    zr_agree_conclude(e, sums);
}
