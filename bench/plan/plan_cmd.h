/* SPDX-License-Identifier: Apache-2.0 */
/* plan_cmd.h: what the files of zero-bench plan share. */
#ifndef ZERO_BENCH_PLAN_CMD_H
#define ZERO_BENCH_PLAN_CMD_H

#include "bench/plan/model.h"
#include "bench/report/report.h"
#include "bench/report/stage_table.h"

struct plan_options {
    struct model_options model;
    /* 0: the model's own */
    int64_t params;
    int64_t world, accum, prefetch, budget;
    /* 0: no hybrids */
    int64_t dp_shard;
    int64_t pp, stages_per_rank;
    /* as given; 0: not */
    int64_t micro_batches;
    /* rows of a micro-batch; 0: activations are not asked for */
    int64_t batch;
    int dtype, optimizer, wire_dtype, deterministic;
    /* enum zero_schedule; -1: not given */
    int schedule;
    bool json;
};

/* What is planned: a table of tensors, the calls of a micro-batch, and which rank of a pipeline has them, 0
 * with pp 1. */
struct plan_table {
    const struct zero_tensor *tensors;
    int32_t n;
    struct zero_call *order;
    int32_t n_order;
    int64_t pp_at;
};

/* Plans one column (bench/report/stage_table.h) for a rank with that table. ns: the time that it took.
 * Returns 0, or the exit code of the program after one line on the standard error. */
int plan_column(const struct plan_options *o, int column, const struct plan_table *table,
                struct zero_plan_info *info, int64_t *ns);

/* Bytes of what the model gives from one layer to the next, of a micro-batch. */
int64_t plan_move_bytes(const struct plan_options *o);

/* Bytes of the activations that the model keeps of a micro-batch, of a stage with so many layers: of all
 * stages of all ranks, which. */
int64_t plan_kept_bytes(const struct plan_options *o, int64_t layers, int64_t stage);

/* Plans all pipeline stages, with pp above 1, and prints what they take; tensors are the whole model's.
 * Returns the exit code of the program. */
int plan_pipeline(const struct plan_options *o, const struct zero_tensor *tensors, int32_t n);

/* A line of --json, about the rank that it is of; the caller may add to it, and prints it. */
json_t *plan_line(int column, const struct zero_plan_info *info, int64_t ns);

#endif
