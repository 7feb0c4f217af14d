/* memory_plot.h: the table of zero-bench memory as a picture. */
#ifndef ZERO_BENCH_MEMORY_PLOT_H
#define ZERO_BENCH_MEMORY_PLOT_H

#include "bench/stage_table.h"

struct memory_stage {
    /* of one rank */
    struct zero_bytes planned, allocated;
    int64_t peak_resident;
};

/* Draws n columns (N_STAGES or N_COLUMNS) into path, of which plot_can_draw() says that it can be. Returns 0,
 * or 1 after one line on stderr. */
int memory_plot(const char *path, const char *model, int ranks, const struct memory_stage *stages, int n);

#endif
