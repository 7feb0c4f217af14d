/* memory_plot.c: see memory_plot.h. A bar per stage: what is allocated, by category, and on top of it the
 * rest of what was resident. */
#include "bench/memory_plot.h"
#include "bench/child.h"

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

bool memory_plot_can_draw(const char *path)
{
    return terminal_for(path) != NULL;
}

/* A string in gnuplot's single quotes, where '' stands for one. */
static void put_quoted(FILE *f, const char *text)
{
    fputc('\'', f);
    for (; *text; text++)
        fputs(*text == '\'' ? "''" : (const char[]){*text, 0}, f);
    fputc('\'', f);
}

static void put_data(FILE *f, const struct memory_stage *stages, int n)
{
    fputs("$memory << END\nstage", f);
#define NAME(name, text) fputs(" \"" text "\"", f);
    ZERO_MEM_MAP(NAME)
#undef NAME
    fputs(" \"the rest: activations, text, code\"\n", f);
    for (int s = 0; s < n; s++) {
        char name[STAGE_TABLE_NAME];
        int64_t rest = stages[s].peak_resident - stages[s].allocated.total;
        fprintf(f, "\"%s\"", column_name(s, name));
#define VALUE(name, text) fprintf(f, " %.6f", (double)stages[s].allocated.name * 1e-6);
        ZERO_MEM_MAP(VALUE)
#undef VALUE
        fprintf(f, " %.6f\n", (double)(rest > 0 ? rest : 0) * 1e-6);
    }
    fputs("END\n", f);
}

int memory_plot(const char *path, const char *model, int ranks, const struct memory_stage *stages, int n)
{
    struct child gnuplot;
    char *argv[] = {"gnuplot", "-", NULL};
    if (child_open(&gnuplot, argv, true)) {
        fprintf(stderr, "zero-bench memory: --plot needs gnuplot: %s\n", strerror(errno));
        return EXIT_FAILURE;
    }
    FILE *f = gnuplot.pipe;
    int n_categories = 0;
#define COUNT(name, text) n_categories++;
    ZERO_MEM_MAP(COUNT)
#undef COUNT
    put_data(f, stages, n);
    fprintf(f, "set terminal %s\nset output ", terminal_for(path));
    put_quoted(f, path);
    fprintf(f, "\nset title \"%s, memory per rank on %d ranks\"\n", model, ranks);
    fputs("set style data histograms\n"
          "set style histogram rowstacked\n"
          "set style fill solid 0.9 noborder\n"
          "set boxwidth 0.6\n"
          "set ylabel 'MB resident'\n"
          "set yrange [0:*]\n"
          "set key outside right top Left reverse invert noenhanced\n"
          "set grid ytics\n"
          "set border 3\n"
          "set tics nomirror\n",
          f);
    int rest = n_categories + 2; /* its column */
    fprintf(f, "plot for [i=2:%d] $memory using i:xtic(1) title columnheader(i), ", rest - 1);
    fprintf(f, "$memory using %d title columnheader(%d) lc rgb '#cccccc'\n", rest, rest);
    int code = child_close(&gnuplot);
    if (code) {
        fprintf(stderr, "zero-bench memory: gnuplot ended with code %d and did not draw %s\n", code, path);
        return EXIT_FAILURE;
    }
    return 0;
}
