/* SPDX-License-Identifier: Apache-2.0 */
/* plot.h: a picture that gnuplot draws into a file, of zero-bench's commands. */
#ifndef ZERO_BENCH_PLOT_H
#define ZERO_BENCH_PLOT_H

#include "bench/arguments.h"
#include "bench/child.h"

/* Does the name end in a kind of picture that can be drawn? */
bool plot_can_draw(const char *path);
/* For a reader of an option (arguments.h): 0, or EINVAL after a word about such names. */
error_t plot_read_path(struct argp_state *state, const struct option_row *row, const char *path);

/* Starts gnuplot, to write what is to be drawn to gnuplot->pipe; the terminal and the file are set. who
 * ("zero-bench memory") is put before the line on stderr that a failure brings. Returns 0 or 1. */
int plot_open(struct child *gnuplot, const char *path, const char *who);
/* A string in gnuplot's quotes. */
void plot_quoted(FILE *f, const char *text);
/* Returns when it is drawn: 0, or 1 after one line on stderr. */
int plot_close(struct child *gnuplot, const char *path, const char *who);

#endif
