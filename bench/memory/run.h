/* SPDX-License-Identifier: Apache-2.0 */
/* run.h: a run of zero-bench train, by zero-run, and what it took. Each has processes of its own, so
 * that one leaves nothing behind that another could use. */
#ifndef ZERO_BENCH_MEMORY_RUN_H
#define ZERO_BENCH_MEMORY_RUN_H

#include "bench/gpt2/gpt2_config.h"
#include "bench/report/report.h"

/* What all runs of a command have in common. */
struct memory_runs {
    /* tp and sequence, too */
    struct gpt2_config config;
    int64_t ranks, steps, batch, accum;
    enum zero_dtype dtype;
    /* 1: no pipeline; else its ranks, the stages of each, and enum zero_schedule */
    int64_t pp, stages_per_rank;
    int schedule;
    /* 0: no hybrids */
    int64_t dp_shard;
    /* of all runs, so many in a row */
    struct progress progress;
    int n_runs, n_done;
};

/* In place of a column: the program without libzero, one process. */
enum { MEMORY_PLAIN = -1 };

struct memory_stage {
    /* (n_ranks) of each rank of the pipeline; without one of one that stands for all. peak_rss_bytes is all
     * of the process; pages that n ranks map count as 1/n. To be freed. */
    struct report_rank *ranks;
    int32_t n_ranks;
    /* the one that has allocated most, activations counted */
    struct report_rank fullest;
    int32_t which;
    /* of all ranks of the world together */
    int64_t all_resident;
    /* (steps) to be freed, too */
    double *loss;
    char state_sha256[STATE_HASH_CHARS];
};

/* Runs a column (bench/report/stage_table.h), or MEMORY_PLAIN. Returns 0, or the exit code after one line on
 * stderr. */
int memory_run(struct memory_runs *runs, int column, struct memory_stage *out);
void memory_stage_free(struct memory_stage *m);

#endif
