/* SPDX-License-Identifier: Apache-2.0 */
/* progress_bar.h: one line of a terminal that is written over as work goes on. */
#ifndef ZERO_BENCH_PROGRESS_BAR_H
#define ZERO_BENCH_PROGRESS_BAR_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

struct progress {
    /* a terminal; NULL: nothing is shown */
    FILE *file;
    bool shown;
    int64_t last_ns;
};

/* Shows something only if file is a terminal that a person looks at. */
struct progress progress_on(FILE *file);
/* Writes a bar of which share (0 to 1) is full, and the text behind it, cut where the terminal ends; ten
 * times a second at most. */
void progress_show(struct progress *p, double share, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* Takes the line away, before something else is written there. */
void progress_clear(struct progress *p);

#endif
