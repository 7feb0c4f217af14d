/* SPDX-License-Identifier: Apache-2.0 */
/* progress_bar.h: shows progress on one line of a terminal. */
#ifndef ZERO_BENCH_PROGRESS_BAR_H
#define ZERO_BENCH_PROGRESS_BAR_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

struct progress {
    /* the terminal; NULL: nothing is shown */
    FILE *file;
    bool shown;
    int64_t last_ns;
};

/* Shows something only if file is a terminal in front of a person. */
struct progress progress_on(FILE *file);
/* Writes a bar that is filled by share (0 to 1), and text after it, cut at the terminal's width. It does
 * so at most ten times a second. */
void progress_show(struct progress *p, double share, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* Erases the line, before something else is printed. */
void progress_clear(struct progress *p);

#endif
