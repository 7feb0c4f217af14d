/* SPDX-License-Identifier: Apache-2.0 */
/* stages.h: a planned model in pipeline stages: the tensors of each, and the activations that the
 * model keeps. */
#ifndef ZERO_BENCH_PLAN_STAGES_H
#define ZERO_BENCH_PLAN_STAGES_H

#include "bench/plan/model.h"
#include "bench/schedule/pipeline_stages.h"
#include "bench/train/pipeline.h"

/* What a rank of a pipeline has of the model. */
struct plan_rank {
    /* in units as zero-bench train has them; what a model of --params has besides is one more, on the last */
    struct zero_tensor tensors[PIPE_MOST_OWN * PLAN_N_TENSORS];
    int32_t n;
    /* (n_stages) */
    struct train_stage stages[PIPE_MOST_OWN];
    int32_t n_stages;
};

/* Fills in what rank pp_at of pp has, with so many stages. tensors (n) are the whole model's, as plan_model
 * describes them: of a GPT, and what else there may be. */
void plan_rank_of(struct plan_rank *out, const struct zero_tensor *tensors, int32_t n, int64_t layers,
                  int64_t pp, int64_t per_rank, int64_t pp_at);

/* Elements that a rank's model keeps of a token from forward to backward, as bench/gpt2/gpt2.h lists them,
 * without attention's matrices, statistics and scratch; without what the library keeps for it, which is the
 * input of every stage but the first. With one stage of all: of the whole model. */
int64_t plan_kept_elems(const struct gpt2_config *c, int64_t layers, int64_t n_stages, int64_t stage);

/* Parameters of all tensors; of stacked ones, all layers. */
int64_t plan_n_params(const struct zero_tensor *tensors, int32_t n);

#endif
