/* SPDX-License-Identifier: Apache-2.0 */
/* plot.c: turns the rows of zero-bench comm into the curves of bench/report/plot.h. */
#include "bench/comm/plot.h"
#include "bench/report/plot.h"

#include <string.h>

static bool same_curve(const struct comm_point *a, const struct comm_point *b)
{
    return a->op == b->op && a->is_limit == b->is_limit && !strcmp(a->row_name, b->row_name);
}

/* Returns the index of the first point on the curve of point i. */
static int first_of(const struct comm_point *point, int i)
{
    int k = 0;
    while (!same_curve(&point[k], &point[i]))
        k++;
    return k;
}

/* Returns gnuplot's number of the mark for a row name. Each backend, and each of MPI's own calls, has its
 * mark in the curves of all operations. */
static int mark_of(const struct comm_point *point, int i)
{
    const int first_filled = 5, n_marks = 10;
    int k = 0;
    while (strcmp(point[k].row_name, point[i].row_name))
        k++;
    return first_filled + k % n_marks;
}

/* Sets title and style of the curve that begins with point i: a colour for each operation, a mark for each
 * row name. A limit has a dashed line without marks. */
static void begin_curve(struct plot_curve *c, double (*points)[2], const struct comm_point *point, int i)
{
    *c = (struct plot_curve){.points = points};
    snprintf(c->title, sizeof c->title, "%s, %s", comm_op_names[point[i].op], point[i].row_name);
    if (point[i].is_limit)
        snprintf(c->style, sizeof c->style, "lines dashtype 2 lw 2 lc %d", point[i].op + 1);
    else
        snprintf(c->style, sizeof c->style, "linespoints pt %d lw 2 lc %d", mark_of(point, i),
                 point[i].op + 1);
}

int comm_plot(const char *path, const char *title, const struct comm_point *point, int n)
{
    static const char settings[] = "set logscale x 2\n"
                                   "set logscale y 10\n"
                                   "set format x '%.0b %BB'\n"
                                   "set xlabel 'bytes of all ranks'\n"
                                   "set ylabel 'bus bandwidth, GB/s'\n"
                                   "set key right bottom Left reverse noenhanced\n"
                                   "set grid\n";
    struct plot_curve *curves = calloc((size_t)n, sizeof *curves);
    double(*points)[2] = calloc((size_t)n * (size_t)n, sizeof *points);
    int n_curves = 0, failed = 1;
    for (int i = 0; curves && points && i < n; i++) {
        if (first_of(point, i) != i)
            continue;
        struct plot_curve *c = &curves[n_curves];
        begin_curve(c, points + n_curves++ * n, point, i);
        for (int k = i; k < n; k++) {
            if (same_curve(&point[k], &point[i])) {
                c->points[c->n][0] = (double)point[k].bytes;
                c->points[c->n++][1] = point[k].busbw;
            }
        }
    }
    if (curves && points)
        failed = plot_curves(path, "zero-bench comm", title, settings, curves, n_curves);
    free(curves);
    free(points);
    return failed;
}
