/* SPDX-License-Identifier: Apache-2.0 */
/* plot.c: see plot.h. */
#include "bench/report/plot.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *suffix, *terminal;
} kinds[] = {
    {".svg", "svg size 900,560 font 'sans,13' background rgb 'white'"},
    {".png", "pngcairo size 1350,840 fontscale 1.4"},
};

static const char *terminal_for(const char *path)
{
    size_t n = strlen(path);
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        if (n > 4 && !strcmp(path + n - 4, kinds[i].suffix))
            return kinds[i].terminal;
    return NULL;
}

bool plot_can_draw(const char *path)
{
    return terminal_for(path) != NULL;
}

error_t plot_read_path(struct argp_state *state, const struct option_row *row, const char *path)
{
    if (plot_can_draw(path))
        return 0;
    return option_fault(state, "--%s: '%s' does not end in .svg or .png", row->name, path);
}

/* '' stands for one. */
void plot_quoted(FILE *f, const char *text)
{
    fputc('\'', f);
    for (; *text; text++)
        fputs(*text == '\'' ? "''" : (const char[]){*text, 0}, f);
    fputc('\'', f);
}

int plot_open(struct child *gnuplot, const char *path, const char *who)
{
    char *argv[] = {"gnuplot", "-", NULL};
    if (child_open(gnuplot, argv, true)) {
        fprintf(stderr, "%s: --plot needs gnuplot: %s\n", who, strerror(errno));
        return EXIT_FAILURE;
    }
    fprintf(gnuplot->pipe, "set terminal %s\nset output ", terminal_for(path));
    plot_quoted(gnuplot->pipe, path);
    fputc('\n', gnuplot->pipe);
    return 0;
}

int plot_close(struct child *gnuplot, const char *path, const char *who)
{
    int code = child_close(gnuplot);
    if (code)
        fprintf(stderr, "%s: gnuplot ended with code %d and did not draw %s\n", who, code, path);
    return code ? EXIT_FAILURE : 0;
}
