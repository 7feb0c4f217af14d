/* SPDX-License-Identifier: Apache-2.0 */
/* run.h: runs zero-bench train and measures its memory. Each run has its own processes, so that none finds
 * memory that another has left. */
#ifndef ZERO_BENCH_MEMORY_RUN_H
#define ZERO_BENCH_MEMORY_RUN_H

#include "bench/gpt2/gpt2_config.h"
#include "bench/report/report.h"

struct memory_options {
    struct model_options model;
    int64_t ranks, steps, batch;
    /* 0: not given */
    int64_t accum;
    /* 0: no hybrids */
    int64_t dp_shard;
    /* ranks of the pipeline (1: none), and stages on each */
    int64_t pp, stages_per_rank;
    /* enum zero_dtype; enum zero_device; enum zero_schedule, -1: not given */
    int dtype, device, schedule;
    /* -1: keep the model; 0: what is free; else bytes */
    int64_t fit;
    const char *plot, *plot_loss;
    bool json, plain;
};

/* All runs of a command. */
struct memory_runs {
    const struct memory_options *o;
    struct progress progress;
    int n_runs, n_done;
};

/* A column's number for the program without libzero. */
enum { MEMORY_PLAIN = -1 };

/* What a run measured: a column of the table, or the plain program. */
struct memory_stage {
    /* (n_ranks) each rank of the pipeline, or one entry that stands for all ranks. In peak_rss_bytes, a
     * page that n processes map counts as 1/n. Freed by memory_stage_free. */
    struct report_rank *ranks;
    int32_t n_ranks;
    /* the entry with the most memory allocated, activations included, and its index in ranks */
    struct report_rank fullest;
    int32_t which;
    /* peak_rss_bytes of all ranks of the run together */
    int64_t all_resident;
    /* of the reporting rank's GPU, all processes together; 0 on the host */
    int64_t peak_device_bytes;
    /* (steps) freed by memory_stage_free */
    double *loss;
    char state_sha256[STATE_HASH_CHARS];
};

/* Runs a column (bench/report/stage_table.h), or MEMORY_PLAIN. Returns 0, or the exit code after one line
 * on stderr. */
int memory_run(struct memory_runs *runs, int column, struct memory_stage *out);
void memory_stage_free(struct memory_stage *m);

#endif
