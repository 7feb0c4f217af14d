/* SPDX-License-Identifier: Apache-2.0 */
/* plot.h: draws curves of bus bandwidth over size from the rows of zero-bench comm. */
#ifndef ZERO_BENCH_COMM_PLOT_H
#define ZERO_BENCH_COMM_PLOT_H

#include "bench/comm/rounds.h"

/* A row of zero-bench comm. */
struct comm_point {
    enum comm_op op;
    /* name of a backend, of one of MPI's own calls, or of a limit */
    const char *row_name;
    /* A limit is the same copies or sums inside one rank's memory (limits.h). */
    bool is_limit;
    /* bytes of the slices of all ranks */
    int64_t bytes;
    /* bus bandwidth in GB/s */
    double busbw;
};

/* Draws a curve for each operation and row name, dashed for a limit. Returns as plot_curves
 * (bench/report/plot.h) does. */
int comm_plot(const char *path, const char *title, const struct comm_point *point, int n);

#endif
