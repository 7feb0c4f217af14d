/* SPDX-License-Identifier: Apache-2.0 */
/* plot.c: see plot.h. */
#include "bench/comm/plot.h"
#include "bench/report/plot.h"

#include <string.h>

static const char who[] = "zero-bench comm";

static bool same_curve(const struct comm_point *a, const struct comm_point *b)
{
    return a->op == b->op && a->is_limit == b->is_limit && !strcmp(a->backend, b->backend);
}

/* Whether a curve has begun before. */
static bool is_first(const struct comm_point *point, int i)
{
    int k = 0;
    while (!same_curve(&point[k], &point[i]))
        k++;
    return k == i;
}

static void put_curve(FILE *f, const struct comm_point *point, int n, int which)
{
    fprintf(f, "$curve%d << END\n", which);
    for (int i = which; i < n; i++)
        if (same_curve(&point[i], &point[which]))
            fprintf(f, "%lld %.9g\n", (long long)point[i].bytes, point[i].busbw);
    fputs("END\n", f);
}

/* Alike for all operations of a backend. */
static int mark_of(const struct comm_point *point, int i)
{
    const int first_filled = 5, n_marks = 10;
    int k = 0;
    while (strcmp(point[k].backend, point[i].backend))
        k++;
    return first_filled + k % n_marks;
}

/* A colour for each operation, a mark for each backend. */
static void put_plot(FILE *f, const struct comm_point *point, int n)
{
    const char *join = "plot ";
    for (int i = 0; i < n; i++) {
        char title[64];
        if (!is_first(point, i))
            continue;
        snprintf(title, sizeof title, "%s, %s", comm_op_names[point[i].op], point[i].backend);
        fprintf(f, "%s$curve%d using 1:2 ", join, i);
        if (point[i].is_limit)
            fprintf(f, "with lines dashtype 2 lw 2 lc %d title ", point[i].op + 1);
        else
            fprintf(f, "with linespoints pt %d lw 2 lc %d title ", mark_of(point, i), point[i].op + 1);
        plot_quoted(f, title);
        join = ", ";
    }
    fputc('\n', f);
}

int comm_plot(const char *path, const char *title, const struct comm_point *point, int n)
{
    struct child gnuplot;
    if (plot_open(&gnuplot, path, who))
        return 1;
    FILE *f = gnuplot.pipe;
    for (int i = 0; i < n; i++)
        if (is_first(point, i))
            put_curve(f, point, n, i);
    fputs("set title ", f);
    plot_quoted(f, title);
    fputs(" noenhanced\n"
          "set logscale x 2\n"
          "set logscale y 10\n"
          "set format x '%.0b %BB'\n"
          "set xlabel 'the whole region'\n"
          "set ylabel 'bus bandwidth, GB/s'\n"
          "set key right bottom Left reverse noenhanced\n"
          "set grid\n",
          f);
    put_plot(f, point, n);
    return plot_close(&gnuplot, path, who);
}
