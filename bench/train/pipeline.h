/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline.h: what pipeline parallelism adds to zero-bench train: --pp N divides the layers into stages,
 * one after another. The first one has the embedding, too, the last one the head, whose weights are the same:
 * both have them (ZERO_TIED). */
#ifndef ZERO_BENCH_TRAIN_STAGES_H
#define ZERO_BENCH_TRAIN_STAGES_H

#include "bench/gpt2/gpt2_config.h"
#include "bench/train/state_hash.h"
#include "bench/train/train.h"

/* A stage of this rank: what it has of the model, its first unit in the rank's table, and its n tensors
 * there, from the first on. */
struct train_stage {
    struct gpt2_config own;
    int32_t unit, first, n;
};

/* What a stage has of a whole model, as pipe_layers_of divides its layers. */
struct gpt2_config train_stage_config(const struct gpt2_config *whole, int32_t stage, int32_t n_stages);

/* Keeps of the table that train_describe made for a stage what is the stage's. Unit 0 is what its embedding
 * and head use, where it has one of them, and its layers follow. number (TRAIN_N_TENSORS) gets which of the
 * whole model's tensors each one is. Returns how many are left. */
int32_t train_stage_table(struct zero_tensor *tensors, int32_t *number, const struct gpt2_config *own);

/* The unit of a stage's first layer. */
int64_t train_first_layer_unit(const struct gpt2_config *own);

/* Elements of a tensor of the whole model that are before a pipeline stage's. */
int64_t train_elements_before(const struct zero_tensor *t, const struct gpt2_config *own);

/* Bytes of cfg.pipeline.activation_bytes: of what one layer gives to the next, of a micro-batch, each of
 * element_bytes. */
int64_t train_stage_bytes(const struct gpt2_config *whole, int64_t batch, int64_t element_bytes);

/* A table of n items, of which each rank of the pipeline makes some, so that the last one has all: what a
 * rank has not made comes from the stage before, and all goes to the next, in_message bytes with each
 * micro-batch of as many evaluations as it takes. Every rank calls, between steps. Returns 0 or what a call
 * returned. */
struct train_items {
    void *items;
    int64_t n, item_bytes, in_message;
    /* (n) this rank has made them */
    const bool *mine;
};
int train_stages_gather(zero_ctx *z, const struct train_items *t);

/* state_hash of all stages' tensors as one table, on the last stage. Every rank calls, as above, with so many
 * message_bytes. hash: as for state_hash. Returns 0 or what a call returned. */
int train_stages_hash(char out[STATE_HASH_CHARS], bool hash, zero_ctx *z, const struct train_stage *stages,
                      int32_t n_stages, int64_t whole_layers, const struct zero_tensor *tensors,
                      const int32_t *number, int n_states, int64_t message_bytes);

/* train_call_order of all of a rank's stages, forward and then back. n_calls: those that out has room for. */
int64_t train_n_calls(const struct train_stage *stages, int32_t n_stages);
int32_t train_stages_order(struct zero_call *out, const struct train_stage *stages, int32_t n_stages);

#endif
