/* SPDX-License-Identifier: Apache-2.0 */
/* plot.h: draws the table of zero-bench memory. */
#ifndef ZERO_BENCH_MEMORY_PLOT_H
#define ZERO_BENCH_MEMORY_PLOT_H

#include "bench/memory/run.h"

/* Draws a bar of resident memory for each of n columns into path, divided into the library's categories and
 * the rest. n is at most N_COLUMNS (bench/report/stage_table.h). The first bar is that of the plain program,
 * unless plain is NULL. Returns 0, or 1 after one line on stderr. */
int memory_plot(const char *path, const char *title, const struct memory_column *columns, int n,
                const struct memory_column *plain);

#endif
