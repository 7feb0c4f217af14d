/* SPDX-License-Identifier: Apache-2.0 */
/* plan_cmd.h: declarations for the files of zero-bench plan. */
#ifndef ZERO_BENCH_PLAN_CMD_H
#define ZERO_BENCH_PLAN_CMD_H

#include "bench/plan/model.h"
#include "bench/report/report.h"
#include "bench/report/stage_table.h"

struct plan_options {
    struct model_options model;
    /* 0: those of the model */
    int64_t params;
    int64_t world, accum, prefetch, budget;
    /* 0: no hybrids */
    int64_t dp_shard;
    int64_t pp, stages_per_rank;
    /* 0: not given */
    int64_t micro_batches;
    /* rows of a micro-batch; 0: activations are not printed */
    int64_t batch;
    int dtype, optimizer, wire_dtype, deterministic;
    /* enum zero_device */
    int device;
    /* enum zero_schedule; -1: not given */
    int schedule;
    bool json;
};

/* What is planned: a table of tensors, the order of calls in a micro-batch, and the rank of the pipeline
 * that has them (0 without pp). */
struct plan_table {
    const struct zero_tensor *tensors;
    int32_t n;
    struct zero_call *order;
    int32_t n_order;
    int64_t pp_at;
};

/* Plans one column (bench/report/stage_table.h) for a rank with that table. *ns is the time that planning
 * took. Returns 0, or the program's exit code after one line on stderr. */
int plan_column(const struct plan_options *o, int column, const struct plan_table *table,
                struct zero_plan_info *info, int64_t *ns);

/* Bytes of a micro-batch's activations between two layers. */
int64_t plan_move_bytes(const struct plan_options *o);

/* Bytes of activations that a stage with so many layers keeps of a micro-batch. `stage` is its number in
 * the model. */
int64_t plan_kept_bytes(const struct plan_options *o, int64_t layers, int64_t stage);

/* Plans all pipeline stages, if pp is above 1, and prints the result. tensors are those of the whole
 * model. Returns the program's exit code. */
int plan_pipeline(const struct plan_options *o, const struct zero_tensor *tensors, int32_t n);

/* A line of --json about one column. The caller may add fields, and prints it. */
json_t *plan_line(int column, const struct zero_plan_info *info, int64_t ns);

#endif
