/* SPDX-License-Identifier: Apache-2.0 */
/* loss_plot.h: draws the losses of one run or of several. */
#ifndef ZERO_BENCH_LOSS_PLOT_H
#define ZERO_BENCH_LOSS_PLOT_H

#include <stdint.h>

struct loss_curve {
    /* name in the key; "" if there is one curve */
    char name[24];
    /* (n) losses of consecutive steps. first: number of the first step. */
    const double *loss;
    int64_t n, first;
};

/* Draws the curves into path, as plot_curves (plot.h) does. In a long run a point is the mean of several
 * steps, and the picture says so. */
int loss_plot(const char *path, const char *title, const char *prefix, const struct loss_curve *curves,
              int n);

#endif
