/* SPDX-License-Identifier: Apache-2.0 */
/* plot.h: draws the table of zero-bench memory. */
#ifndef ZERO_BENCH_MEMORY_PLOT_H
#define ZERO_BENCH_MEMORY_PLOT_H

#include "bench/memory/run.h"

/* Draws n columns (N_STAGES or N_COLUMNS) into path, and before them the plain program unless it is NULL.
 * Returns 0, or 1 after one line on stderr. */
int memory_plot(const char *path, const char *title, const struct memory_column *columns, int n,
                const struct memory_column *plain);

#endif
