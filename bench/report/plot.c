/* SPDX-License-Identifier: Apache-2.0 */
/* plot.c: starts gnuplot and writes to it what plot.h draws. */
#include "bench/report/plot.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *suffix, *terminal;
} formats[] = {
    {".svg", "svg size 900,560 font 'sans,13' background rgb 'white'"},
    {".png", "pngcairo size 1350,840 fontscale 1.4"},
};

/* gnuplot's terminal for a path, or NULL if the path has another suffix. */
static const char *terminal_for(const char *path)
{
    size_t n = strlen(path);
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++)
        if (n > 4 && !strcmp(path + n - 4, formats[i].suffix))
            return formats[i].terminal;
    return NULL;
}

error_t plot_read_path(struct argp_state *state, const struct option_row *row, char *path, void *to)
{
    *(const char **)to = path;
    return terminal_for(path)
               ? 0
               : option_fault(state, "--%s: '%s' does not end in .svg or .png", row->name, path);
}

/* gnuplot reads two single quotes inside a string as one. */
void plot_quoted(FILE *f, const char *text)
{
    fputc('\'', f);
    for (; *text; text++)
        fputs(*text == '\'' ? "''" : (const char[]){*text, 0}, f);
    fputc('\'', f);
}

int plot_open(struct child *gnuplot, const char *path, const char *prefix)
{
    char *argv[] = {"gnuplot", "-", NULL};
    if (child_open(gnuplot, argv, /* to_child */ true)) {
        fprintf(stderr, "%s: --plot needs gnuplot: %s\n", prefix, strerror(errno));
        return EXIT_FAILURE;
    }
    fprintf(gnuplot->pipe, "set terminal %s\nset output ", terminal_for(path));
    plot_quoted(gnuplot->pipe, path);
    fputc('\n', gnuplot->pipe);
    return 0;
}

int plot_close(struct child *gnuplot, const char *path, const char *prefix)
{
    int code = child_close(gnuplot);
    if (code)
        fprintf(stderr, "%s: gnuplot ended with code %d and did not draw %s\n", prefix, code, path);
    return code ? EXIT_FAILURE : 0;
}

/* Writes the points as gnuplot's data block $curveN. */
static void put_points(FILE *f, const struct plot_curve *c, int number)
{
    fprintf(f, "$curve%d << END\n", number);
    for (int64_t i = 0; i < c->n; i++)
        fprintf(f, "%.15g %.9g\n", c->points[i][0], c->points[i][1]);
    fputs("END\n", f);
}

int plot_curves(const char *path, const char *prefix, const char *title, const char *settings,
                const struct plot_curve *curves, int n)
{
    struct child gnuplot;
    if (plot_open(&gnuplot, path, prefix))
        return EXIT_FAILURE;
    FILE *f = gnuplot.pipe;
    for (int i = 0; i < n; i++)
        put_points(f, &curves[i], i);
    fputs("set title ", f);
    plot_quoted(f, title);
    fprintf(f, " noenhanced\n%s", settings);
    for (int i = 0; i < n; i++) {
        fprintf(f, "%s$curve%d using 1:2 with %s title ", i ? ", " : "plot ", i, curves[i].style);
        plot_quoted(f, curves[i].title);
    }
    fputc('\n', f);
    return plot_close(&gnuplot, path, prefix);
}
