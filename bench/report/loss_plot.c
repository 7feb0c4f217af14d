/* SPDX-License-Identifier: Apache-2.0 */
/* loss_plot.c: see loss_plot.h. */
#include "bench/report/loss_plot.h"
#include "bench/report/plot.h"

#include <math.h>

#define MOST_POINTS 400

/* From wide and light to narrow and dark. */
static const struct {
    double width;
    const char *colour;
} lines[] = {{11, "#c6dbef"}, {7.5, "#6baed6"}, {4, "#fd8d3c"}, {1.3, "#252525"}};
#define N_LINES ((int)(sizeof lines / sizeof lines[0]))

/* Steps that one point stands for. */
static int64_t steps_of_point(const struct loss_curve *curves, int n)
{
    int64_t most = 1;
    for (int i = 0; i < n; i++)
        most = curves[i].n > most ? curves[i].n : most;
    return (most + MOST_POINTS - 1) / MOST_POINTS;
}

/* A step whose loss is no number is left out of its point. */
static void put_curve(FILE *f, const struct loss_curve *c, int which, int64_t each)
{
    fprintf(f, "$curve%d << END\n", which);
    for (int64_t i = 0; i < c->n; i += each) {
        double sum = 0;
        int64_t n = 0, end = i + each < c->n ? i + each : c->n;
        for (int64_t k = i; k < end; k++) {
            if (isfinite(c->loss[k])) {
                sum += c->loss[k];
                n++;
            }
        }
        if (n)
            fprintf(f, "%.1f %.9g\n", (double)(c->first + i) + (double)(end - i - 1) / 2, sum / (double)n);
    }
    fputs("END\n", f);
}

static void put_plot(FILE *f, const struct loss_curve *curves, int n)
{
    for (int i = 0; i < n; i++) {
        int line = n == 1 ? N_LINES - 1 : i % N_LINES;
        fprintf(f, "%s$curve%d using 1:2 with lines lw %g lc rgb '%s' ", i ? ", " : "plot ", i,
                n == 1 ? 2 : lines[line].width, n == 1 ? "#2171b5" : lines[line].colour);
        if (curves[i].name[0]) {
            fputs("title ", f);
            plot_quoted(f, curves[i].name);
        } else {
            fputs("notitle", f);
        }
    }
    fputc('\n', f);
}

int loss_plot(const char *path, const char *title, const char *who, const struct loss_curve *curves, int n)
{
    struct child gnuplot;
    if (plot_open(&gnuplot, path, who))
        return 1;
    FILE *f = gnuplot.pipe;
    int64_t each = steps_of_point(curves, n);
    for (int i = 0; i < n; i++)
        put_curve(f, &curves[i], i, each);
    fputs("set title ", f);
    plot_quoted(f, title);
    fputs(" noenhanced\n"
          "set ylabel 'loss, nats per byte'\n"
          "set grid lc rgb '#dddddd'\n"
          "set border 3\n"
          "set tics nomirror\n"
          "set key right top Left reverse noenhanced\n",
          f);
    if (each > 1)
        fprintf(f, "set xlabel 'step (a point is the mean of %lld)'\n", (long long)each);
    else
        fputs("set xlabel 'step'\n", f);
    put_plot(f, curves, n);
    return plot_close(&gnuplot, path, who);
}
