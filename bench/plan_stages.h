/* plan_stages.h: a planned model in pipeline stages: the tensors of each, the calls of a micro-batch, and the
 * activations that the model keeps. */
#ifndef ZERO_BENCH_PLAN_STAGES_H
#define ZERO_BENCH_PLAN_STAGES_H

#include "bench/plan_model.h"

/* One stage's part of the model. */
struct plan_stage {
    /* in units of its own: the embedding, and what it is tied to on the last stage, the positions, each
     * layer, the final norm, what a model of --params has besides */
    struct zero_tensor tensors[PLAN_N_TENSORS];
    int32_t n, n_units;
    int64_t layers;
};

/* Fills in the part of a stage of pp. tensors (n) are the whole model's, as plan_model describes them; the
 * embedding of the first stage is the last one's head (ZERO_TIED). */
void plan_stage_of(struct plan_stage *out, const struct zero_tensor *tensors, int32_t n, int64_t layers,
                   int64_t pp, int64_t stage);

/* The calls of one micro-batch: forward through all units, and back. out has room for 4 * n_units. */
void plan_stage_order(struct zero_call *out, int32_t n_units);

/* Elements that a rank's model keeps of a token from forward to backward, as bench/gpt2/gpt2.h lists them,
 * without attention's matrices, statistics and scratch; without what the library keeps for it, which is the
 * input of every stage but the first. With pp 1: of the whole model. */
int64_t plan_kept_elems(const struct gpt2_config *c, int64_t layers, int64_t pp, int64_t stage);

/* Parameters of all tensors; of stacked ones, all layers. */
int64_t plan_n_params(const struct zero_tensor *tensors, int32_t n);

#endif
