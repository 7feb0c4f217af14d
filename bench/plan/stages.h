/* SPDX-License-Identifier: Apache-2.0 */
/* stages.h: a planned model in pipeline stages: the tensors of each, and the activations that it keeps. */
#ifndef ZERO_BENCH_PLAN_STAGES_H
#define ZERO_BENCH_PLAN_STAGES_H

#include "bench/plan/model.h"
#include "bench/schedule/pipeline_stages.h"
#include "bench/train/pipeline.h"

/* The part of the model on one rank of a pipeline, or the whole model. */
struct plan_rank {
    /* in units as in zero-bench train; with --params the rest of the parameters is one more unit, on the
     * last rank */
    struct zero_tensor tensors[PIPE_MAX_OWN * PLAN_N_TENSORS];
    int32_t n;
    /* (n_stages) */
    struct train_stage stages[PIPE_MAX_OWN];
    int32_t n_stages;
    /* (n_order) the calls of a micro-batch; the caller frees it */
    struct zero_call *order;
    int32_t n_order;
    /* its number in the pipeline */
    int64_t pp_at;
};

/* Fills in what rank pp_at of a pipeline of pp ranks has: per_rank stages. sizes are those of plan_sizes, and
 * tensors (n) are the whole model's, from plan_model. Only with pp 1 do layers include the rest of --params.
 * Returns false if there is no memory. */
bool plan_rank_of(struct plan_rank *out, const struct model_config *sizes, const struct zero_tensor *tensors,
                  int32_t n, int64_t layers, int64_t pp, int64_t per_rank, int64_t pp_at);

/* Parameters of all tensors, in all layers. */
int64_t plan_n_params(const struct zero_tensor *tensors, int32_t n);
/* Units of all tensors. Each layer of a stacked tensor is one. */
int32_t plan_n_units(const struct zero_tensor *tensors, int32_t n);

#endif
