/* SPDX-License-Identifier: Apache-2.0 */
/* plot.c: draws a bar for each stage, hybrid and the plain program. A bar is as high as the memory that was
 * resident, and its label says how much. It is divided into the library's allocated memory, by category, and
 * above that the rest, such as activations and program text. */
#include "bench/memory/plot.h"
#include "bench/report/plot.h"
#include "bench/report/report.h"

static const char prefix[] = "zero-bench memory";

enum { MAX_BARS = N_COLUMNS + 1 };

struct bar {
    char name[STAGE_TABLE_NAME];
    const struct memory_column *column;
};

struct bars {
    struct bar bar[MAX_BARS];
    int n;
    /* unit of the axis */
    double unit;
    const char *unit_name;
};

/* In the order of ZERO_MEM_MAP: parameters blue, gradients orange, optimizer state green. */
static const char *const colours[] = {"#08519c", "#6baed6", "#d94801", "#fd8d3c", "#fdae6b", "#fdd0a2",
                                      "#006d2c", "#74c476", "#c7e9c0", "#9e9ac8", "#756bb1", "#54278f"};

static int64_t height_of_rest(const struct memory_column *m)
{
    int64_t rest = m->fullest.peak_rss_bytes - m->fullest.allocated.total;
    return rest > 0 ? rest : 0;
}

static int64_t height_of(const struct memory_column *m)
{
    return m->fullest.peak_rss_bytes;
}

/* The height of a category of `bytes`. If less was resident than allocated, it is not known which pages were
 * missing. Then all categories shrink by the same factor. */
static int64_t height_of_part(const struct memory_column *m, int64_t bytes)
{
    int64_t resident = m->fullest.peak_rss_bytes, allocated = m->fullest.allocated.total;
    return resident < allocated ? (int64_t)((double)bytes * (double)resident / (double)allocated) : bytes;
}

static void add_bar(struct bars *b, const char *name, const struct memory_column *column)
{
    struct bar *bar = &b->bar[b->n++];
    snprintf(bar->name, sizeof bar->name, "%s", name);
    bar->column = column;
    if (height_of(column) >= 1000000000) {
        b->unit = 1e9;
        b->unit_name = "GB";
    }
}

/* Writes the data of a category. Returns false, and writes nothing, if no bar has any of it. */
static bool put_category(FILE *f, const struct bars *b, int number, const int64_t *bytes)
{
    int64_t any = 0;
    for (int i = 0; i < b->n; i++)
        any |= bytes[i];
    if (!any)
        return false;
    fprintf(f, "$category%d << END\n", number);
    for (int i = 0; i < b->n; i++)
        fprintf(f, "\"%s\" %.6f\n", b->bar[i].name, (double)bytes[i] / b->unit);
    fputs("END\n", f);
    return true;
}

/* Writes the labels above the bars. */
static void put_totals(FILE *f, const struct bars *b)
{
    fputs("$total << END\n", f);
    for (int i = 0; i < b->n; i++) {
        int64_t bytes = height_of(b->bar[i].column);
        fprintf(f, "%d %.6f \"%s\"\n", i, (double)bytes / b->unit, report_bytes(bytes).text);
    }
    fputs("END\n", f);
}

static void put_plot(FILE *f, const struct bars *b)
{
    int64_t bytes[MAX_BARS];
    const char *join = "";
    char plot[2048] = "plot ";
    size_t at = 5;
    int number = 0;
#define PUT(title, value, colour)                                                                            \
    for (int i = 0; i < b->n; i++)                                                                           \
        bytes[i] = (value);                                                                                  \
    if (put_category(f, b, number, bytes)) {                                                                 \
        at += (size_t)snprintf(plot + at, sizeof plot - at,                                                  \
                               "%s$category%d using 2:xtic(1) title '" title "' lc rgb '%s'", join, number,  \
                               colour);                                                                      \
        join = ", ";                                                                                         \
    }                                                                                                        \
    number++;
#define CATEGORY(name, text)                                                                                 \
    PUT(text, height_of_part(b->bar[i].column, b->bar[i].column->fullest.allocated.name), colours[number])
    ZERO_MEM_MAP(CATEGORY)
    PUT("the rest: activations, text, code", height_of_rest(b->bar[i].column), "#d9d9d9")
#undef CATEGORY
#undef PUT
    put_totals(f, b);
    fprintf(f, "%s, $total using 1:2:3 with labels offset 0,0.8 notitle\n", plot);
}

int memory_plot(const char *path, const char *title, const struct memory_column *columns, int n,
                const struct memory_column *plain)
{
    struct child gnuplot;
    struct bars bars = {.unit = 1e6, .unit_name = "MB"};
    if (plain)
        add_bar(&bars, "not wrapped", plain);
    for (int c = 0; c < n; c++)
        add_bar(&bars, columns[c].name, &columns[c]);
    if (plot_open(&gnuplot, path, prefix))
        return 1;
    FILE *f = gnuplot.pipe;
    fprintf(f, "set title \"%s\" noenhanced\n", title);
    fprintf(f, "set ylabel '%s in physical memory (Pss)'\n", bars.unit_name);
    fputs("set style data histograms\n"
          "set style histogram rowstacked\n"
          "set style fill solid 1 border rgb 'white'\n"
          "set boxwidth 0.7\n"
          "set yrange [0:*]\n"
          "set offsets 0,0,graph 0.08,0\n"
          "set key outside right center Left reverse invert noenhanced samplen 1.5 spacing 1.3\n"
          "set grid ytics lc rgb '#dddddd'\n"
          "set border 3\n"
          "set tics nomirror\n"
          "set xtics scale 0\n",
          f);
    put_plot(f, &bars);
    return plot_close(&gnuplot, path, prefix);
}
