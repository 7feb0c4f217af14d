/* SPDX-License-Identifier: Apache-2.0 */
/* plot.h: the table of zero-bench comm as a picture. */
#ifndef ZERO_BENCH_COMM_PLOT_H
#define ZERO_BENCH_COMM_PLOT_H

#include "bench/comm/rounds.h"

/* A row of the table. */
struct comm_point {
    enum comm_op op;
    /* or of a limit */
    const char *backend;
    bool is_limit;
    int64_t bytes;
    /* GB/s */
    double busbw;
};

/* Draws a curve for each backend's operation and each limit, the limits dashed, into path, of which
 * plot_can_draw() says that it can be. Returns 0, or 1 after one line on stderr. */
int comm_plot(const char *path, const char *title, const struct comm_point *point, int n);

#endif
