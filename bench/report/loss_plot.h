/* SPDX-License-Identifier: Apache-2.0 */
/* loss_plot.h: losses of one run or several, as a picture. */
#ifndef ZERO_BENCH_LOSS_PLOT_H
#define ZERO_BENCH_LOSS_PLOT_H

#include <stdint.h>

struct loss_curve {
    /* for the key; "": the only one, which needs none */
    char name[24];
    /* (n) of steps 1, 2, ... from the first */
    const double *loss;
    int64_t n, first;
};

/* Draws the curves into path, of which plot_can_draw() says that it can be. Curves that lie on top of each
 * other stay visible: each is narrower than the one before. Of a long run every point is the mean of several
 * steps, which the picture says. who as in plot.h. Returns 0, or 1 after one line on stderr. */
int loss_plot(const char *path, const char *title, const char *who, const struct loss_curve *curves, int n);

#endif
