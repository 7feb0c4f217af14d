/* SPDX-License-Identifier: Apache-2.0 */
/* test_memory_plot.c: what zero-bench memory hands to gnuplot. A program that keeps its input replaces it. */
#include "bench/memory/plot.h"
#include "bench/report/stage_table.h"
#include "test/cmocka.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[] = "/tmp/zero-memory-plot-XXXXXX", script[64], kept[64];

static int put_gnuplot_there(void **state)
{
    if (!mkdtemp(folder))
        return -1;
    snprintf(script, sizeof script, "%s/gnuplot", folder);
    snprintf(kept, sizeof kept, "%s/kept", folder);
    FILE *f = fopen(script, "w");
    if (!f)
        return -1;
    fprintf(f, "#!/bin/sh\nexec /bin/cat >%s\n", kept);
    return fclose(f) || chmod(script, 0700) || setenv("PATH", folder, 1);
}

static int take_gnuplot_away(void **state)
{
    return unlink(script) || unlink(kept) || rmdir(folder);
}

/* Sums what the blocks of data give each bar. The last block has the heights of the labels. */
static void read_bars(double drawn[], double label[], int n)
{
    char line[256], name[64];
    bool labels = false;
    int bar = 0;
    FILE *f = fopen(kept, "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f)) {
        double value;
        int at;
        if (line[0] == '$') {
            labels = !strncmp(line, "$total", 6);
            bar = 0;
        } else if (labels && sscanf(line, "%d %lf", &at, &value) == 2) {
            assert_in_range(at, 0, n - 1);
            label[at] = value;
        } else if (!labels && sscanf(line, "\"%63[^\"]\" %lf", name, &value) == 2) {
            assert_in_range(bar, 0, n - 1);
            drawn[bar++] += value;
        }
    }
    fclose(f);
}

static void test_nothing_beyond_what_was_resident(void **state)
{
    struct memory_column stages[N_STAGES] = {0}, plain = {0};
    double drawn[N_STAGES + 1] = {0}, label[N_STAGES + 1] = {0}, unit = 1e6;
    for (int i = 0; i <= N_STAGES; i++) {
        struct memory_column *m = i ? &stages[i - 1] : &plain;
        snprintf(m->name, sizeof m->name, "column %d", i);
        m->fullest.allocated.param_shards = 100 * 1000 * 1000;
        m->fullest.allocated.moments = 300 * 1000 * 1000;
        m->fullest.allocated.total = 400 * 1000 * 1000;
        m->fullest.peak_rss_bytes = (350 + 40 * i) * 1000 * 1000; /* less than is allocated, and more */
    }
    assert_int_equal(memory_plot("never.svg", "a title", stages, N_STAGES, &plain), 0);
    read_bars(drawn, label, N_STAGES + 1);
    for (int i = 0; i <= N_STAGES; i++) {
        double resident = (double)(i ? &stages[i - 1] : &plain)->fullest.peak_rss_bytes / unit;
        assert_float_equal(drawn[i], resident, 1e-4);
        assert_float_equal(label[i], resident, 1e-4);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_nothing_beyond_what_was_resident)};
    return cmocka_run_group_tests(tests, put_gnuplot_there, take_gnuplot_away);
}
