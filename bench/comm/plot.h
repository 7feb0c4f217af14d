/* SPDX-License-Identifier: Apache-2.0 */
/* plot.h: draws the table of zero-bench comm. */
#ifndef ZERO_BENCH_COMM_PLOT_H
#define ZERO_BENCH_COMM_PLOT_H

#include "bench/comm/rounds.h"

/* A row of the table. */
struct comm_point {
    enum comm_op op;
    /* the backend's name, or the limit's */
    const char *backend;
    bool is_limit;
    int64_t bytes;
    /* GB/s */
    double busbw;
};

/* Draws a curve for each operation of each backend, and a dashed one for each limit. Returns as plot_curves
 * (bench/report/plot.h) does. */
int comm_plot(const char *path, const char *title, const struct comm_point *point, int n);

#endif
