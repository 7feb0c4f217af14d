/* SPDX-License-Identifier: Apache-2.0 */
/* plot.h: pictures that gnuplot draws into a file, for the commands with --plot. */
#ifndef ZERO_BENCH_PLOT_H
#define ZERO_BENCH_PLOT_H

#include "bench/arguments.h"
#include "bench/child.h"

/* Reads the option --plot: accepts a path that ends in .svg or .png. An option_reader (arguments.h). */
option_reader plot_read_path;
#define OPTION_PLOT(field) .read = plot_read_path, .at = OPTION_AT(OPTION_STRUCT, field, const char * : 0)

/* A curve in a picture of curves. */
struct plot_curve {
    /* title in the key; "": none */
    char title[80];
    /* how gnuplot draws it, such as "lines lw 2" */
    char style[64];
    /* (n) x and y of each point */
    double (*points)[2];
    int64_t n;
};

/* Draws curves. settings are lines of gnuplot, such as "set grid\n". If this fails, it prints a line on
 * stderr that begins with prefix ("zero-bench comm"). Returns 0, or 1 after that line. */
int plot_curves(const char *path, const char *prefix, const char *title, const char *settings,
                const struct plot_curve *curves, int n);

/* For other pictures. plot_open starts gnuplot with terminal and file set. The caller writes commands to
 * gnuplot->pipe. plot_close returns when gnuplot has carried them out. Both return 0, or 1 after one line on
 * stderr, which begins with prefix. */
int plot_open(struct child *gnuplot, const char *path, const char *prefix);
int plot_close(struct child *gnuplot, const char *path, const char *prefix);
/* Writes a string in gnuplot's quotes. */
void plot_quoted(FILE *f, const char *text);

#endif
