/* memory_plot.c: see memory_plot.h. A bar per stage: what is allocated, by category, and on top of it the
 * rest of what was resident. */
#include "bench/memory_plot.h"
#include "bench/plot.h"

static const char who[] = "zero-bench memory";

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
    if (plot_open(&gnuplot, path, who))
        return 1;
    FILE *f = gnuplot.pipe;
    int n_categories = 0;
#define COUNT(name, text) n_categories++;
    ZERO_MEM_MAP(COUNT)
#undef COUNT
    put_data(f, stages, n);
    fprintf(f, "set title \"%s, memory per rank on %d ranks\"\n", model, ranks);
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
    return plot_close(&gnuplot, path, who);
}
