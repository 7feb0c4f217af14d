/* SPDX-License-Identifier: Apache-2.0 */
/* bars.c: see bars.h. */
#include "bench/comm/bars.h"
#include "bench/failed.h"
#include "bench/report/report.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Of a limit; and how many times as fast as a sum of Open MPI's own, or of MPICH's. */
static const double OF_LIMIT = 0.90, OF_OPEN_MPI = 4, OF_MPICH = 2.5;

/* sorted: (rounds). */
static struct comm_bar bar_of(const struct comm_rounds *b, const struct comm_row *row,
                              const struct comm_row *than, double asked, double *sorted)
{
    int64_t n = b->asked.rounds;
    struct comm_bar bar = {.row = row, .than = than, .asked = asked};
    for (int64_t i = 0; i < n; i++)
        sorted[i] = than->ns[i] / row->ns[i];
    bar.median = report_median(sorted, n); /* and sorted */
    bar.low = sorted[n / 4];
    bar.high = sorted[n - 1 - n / 4];
    bar.met = !(bar.median < asked);
    return bar;
}

static double asked_of_mpi(const struct comm_row *row)
{
    const char mpich[] = "MPICH";
    if (row->op != COMM_REDUCE_SCATTER)
        return NAN;
    return strncmp(row->of->path, mpich, strlen(mpich)) ? OF_OPEN_MPI : OF_MPICH;
}

/* Against each of MPI's own; asked of the one that is hardest to beat, which all ranks find alike. */
static int bars_of_mpi(const struct comm_rounds *b, const struct comm_row *row, struct comm_bar *bar,
                       double *sorted)
{
    int n = 0, hardest = 0;
    for (int k = 0; k < b->n_rows; k++)
        if (b->row[k].op == row->op && b->row[k].of == row->of && b->row[k].own != COMM_NOT_OWN) {
            bar[n] = bar_of(b, row, &b->row[k], NAN, sorted);
            hardest = bar[n].median < bar[hardest].median ? n : hardest;
            n++;
        }
    if (n) {
        bar[hardest].asked = asked_of_mpi(row);
        bar[hardest].met = !(bar[hardest].median < bar[hardest].asked);
    }
    return n;
}

int comm_bars(const struct comm_rounds *b, struct comm_bar *bar)
{
    double *sorted = calloc((size_t)b->asked.rounds, sizeof *sorted);
    int n = 0;
    if (!sorted)
        return failed(ZR_ERR_NOMEM, "no memory for %lld ratios", (long long)b->asked.rounds);
    for (int k = 0; k < b->n_rows; k++) {
        const struct comm_row *row = &b->row[k];
        if (!row->of || row->own != COMM_NOT_OWN)
            continue;
        if (comm_backend_is_mpi(row->of))
            n += bars_of_mpi(b, row, bar + n, sorted);
        else if (row->limit)
            bar[n++] = bar_of(b, row, row->limit, OF_LIMIT, sorted);
    }
    free(sorted);
    return n;
}

void comm_bar_report(const struct comm_bar *bar, bool json)
{
    const char *op = comm_op_names[bar->row->op], *name = comm_row_name(bar->row);
    const char *than = comm_row_name(bar->than);
    char asked[64] = "";
    if (json) {
        report_line(json_pack("{s:s, s:s, s:s, s:s, s:o, s:o, s:o, s:o, s:b}", "event", "bar", "op", op,
                              "backend", name, "than", than, "median", report_number(bar->median), "low",
                              report_number(bar->low), "high", report_number(bar->high), "asked",
                              report_number(bar->asked), "met", bar->met));
        return;
    }
    if (isfinite(bar->asked))
        snprintf(asked, sizeof asked, "; %.2f is asked: %s", bar->asked, bar->met ? "met" : "not met");
    printf("# %s, %s: %.2f times as fast as %s, half of the rounds %.2f to %.2f%s\n", op, name, bar->median,
           than, bar->low, bar->high, asked);
}
