/* SPDX-License-Identifier: Apache-2.0 */
/* run.h: runs zero-bench train and measures its memory. Each run has its own processes, so that none finds
 * memory that another has left. */
#ifndef ZERO_BENCH_MEMORY_RUN_H
#define ZERO_BENCH_MEMORY_RUN_H

#include "bench/model/model_config.h"
#include "bench/report/report.h"
#include "bench/report/stage_table.h"
#include "bench/states.h"

struct memory_options {
    /* Options write to model.own. The command reads model.config, which is made from it when all options have
     * been read. */
    struct model_options model;
    /* batch: rows in a micro-batch of one rank */
    int64_t ranks, steps, batch;
    /* micro-batches per step; 0: not given */
    int64_t accum;
    /* ranks that share a copy of the parameters in HSDP and HFSDP; 0: the table has no hybrids */
    int64_t dp_shard;
    /* ranks of the pipeline (1: none), and stages on each */
    int64_t pp, stages_per_rank;
    /* enum zero_dtype; enum zero_device; enum zero_schedule, -1: not given */
    int dtype, device, schedule;
    /* Instead of every stage, the table has every precision at one stage. */
    bool precisions;
    /* that stage; -1: not given */
    int64_t stage;
    struct states_options states;
    /* bytes that the model may take: a smaller model is chosen if it needs more. 0: what is free; -1: any
     * size */
    int64_t fit;
    const char *plot, *plot_loss;
    /* plain: also run the program without libzero */
    bool json, plain;
};

/* All runs of zero-bench train that one zero-bench memory makes. */
struct memory_runs {
    const struct memory_options *o;
    struct progress progress;
    /* how many there are, and how many have ended */
    int n_runs, n_done;
};

/* A column of the table: what one run of zero-bench train is given, and what was measured. */
struct memory_column {
    /* title of the column */
    char name[STAGE_TABLE_NAME];
    /* The program without libzero (zero-bench train --plain), in one process. It is no column of the
     * table. */
    bool plain;
    /* hybrid: enum hybrid */
    int stage, hybrid;
    struct states_options states;

    /* (n_ranks) an entry for each rank of the pipeline; without --pp, one for all ranks. Freed by
     * memory_column_free. */
    struct report_rank *ranks;
    int32_t n_ranks;
    /* the entry with the most memory allocated, activations included, and its index in ranks */
    struct report_rank fullest;
    int32_t fullest_rank;
    /* peak_rss_bytes of all ranks of the run together */
    int64_t resident_of_all;
    /* of the reporting rank's GPU, all processes together; 0 on the host */
    int64_t peak_device_bytes;
    /* (steps) freed by memory_column_free */
    double *loss;
    char state_sha256[STATE_HASH_CHARS];
};

/* Makes the run of a column, and fills in what was measured. Returns 0, or the exit code after one line on
 * stderr. */
int memory_run(struct memory_runs *runs, struct memory_column *m);
void memory_column_free(struct memory_column *m);

#endif
