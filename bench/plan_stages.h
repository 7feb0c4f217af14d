/* plan_stages.h: a planned model in pipeline stages: the tensors of each, and the activations that the
 * model keeps. */
#ifndef ZERO_BENCH_PLAN_STAGES_H
#define ZERO_BENCH_PLAN_STAGES_H

#include "bench/plan_model.h"
#include "bench/train_stages.h"

/* One stage's part of the model. */
struct plan_stage {
    /* in units as zero-bench train has them; what a model of --params has besides is one more, on the last */
    struct zero_tensor tensors[PLAN_N_TENSORS];
    int32_t n;
    /* its layers, and whether it has embedding and head */
    struct gpt2_config own;
};

/* Fills in the part of a stage of pp. tensors (n) are the whole model's, as plan_model describes them: of a
 * GPT, and what else there may be. */
void plan_stage_of(struct plan_stage *out, const struct zero_tensor *tensors, int32_t n, int64_t layers,
                   int64_t pp, int64_t stage);

/* Elements that a rank's model keeps of a token from forward to backward, as bench/gpt2/gpt2.h lists them,
 * without attention's matrices, statistics and scratch; without what the library keeps for it, which is the
 * input of every stage but the first. With pp 1: of the whole model. */
int64_t plan_kept_elems(const struct gpt2_config *c, int64_t layers, int64_t pp, int64_t stage);

/* Parameters of all tensors; of stacked ones, all layers. */
int64_t plan_n_params(const struct zero_tensor *tensors, int32_t n);

#endif
