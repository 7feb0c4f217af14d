/* memory_plot.h: the table of zero-bench memory as a picture. */
#ifndef ZERO_BENCH_MEMORY_PLOT_H
#define ZERO_BENCH_MEMORY_PLOT_H

#include "bench/stage_table.h"

#include <stdbool.h>

struct memory_stage {
    /* of one rank */
    struct zero_bytes planned, allocated;
    int64_t peak_resident;
};

/* Does the name end in a kind of picture that can be drawn? */
bool memory_plot_can_draw(const char *path);
/* Draws n columns (N_STAGES or N_COLUMNS) through gnuplot. Returns 0, or 1 after one line on stderr. */
int memory_plot(const char *path, const char *model, int ranks, const struct memory_stage *stages, int n);

#endif
