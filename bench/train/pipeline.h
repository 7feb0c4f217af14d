/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline.h: what --pp adds to zero-bench train. The layers are divided into consecutive pipeline stages.
 * The first stage also has the embedding, and the last one the head. If their weights are the same tensor,
 * both stages hold it (ZERO_TIED). */
#ifndef ZERO_BENCH_TRAIN_STAGES_H
#define ZERO_BENCH_TRAIN_STAGES_H

#include "bench/compute.h"
#include "bench/model/model_config.h"
#include "bench/train/state_hash.h"
#include "bench/train/train.h"

/* A pipeline stage of this rank: its part of the model, and that part's units. On this rank they are numbered
 * from `unit` on. The rank's table has the stage's n tensors from `first` on. */
struct train_stage {
    struct model_config config;
    struct model_units units;
    int32_t unit, first, n;
};

/* The part of a model that a stage has, divided by pipe_layers_of. */
struct model_config train_stage_config(const struct model_config *whole, int32_t stage, int32_t n_stages);

/* The number of elements of a tensor in the stages before. */
int64_t train_elements_before(const struct zero_tensor *t, const struct model_config *stage);

/* cfg.pipeline.activation_bytes: a micro-batch's activations between two layers, with element_bytes each. */
int64_t train_stage_bytes(const struct model_config *whole, int64_t batch, int64_t element_bytes);

/* A table of n items on the host, to be collected on the last stage. Each rank of the pipeline has made some
 * items, receives the others from the stage before, and sends all to the next one. A micro-batch carries
 * in_message bytes, and evaluations are repeated until all are sent. Messages are in memory of the device of
 * `compute`. Every rank calls, between steps. Returns 0 or an error. */
struct train_items {
    void *items;
    int64_t n, item_bytes, in_message;
    /* (n) whether this rank has made the item */
    const bool *mine;
    const struct compute *compute;
};
int train_stages_gather(zero_ctx *z, const struct train_items *t);

/* As state_hash, on the last stage, over the tensors of all stages in the order of the whole model. Every
 * rank calls, as for train_stages_gather with message_bytes. Returns 0 or an error. */
int train_stages_hash(char out[STATE_HASH_CHARS], bool hash, zero_ctx *z, const struct train_stage *stages,
                      int32_t n_stages, const struct model_config *whole, const struct zero_tensor *tensors,
                      const int32_t *number, int n_states, int64_t message_bytes,
                      const struct compute *compute);

/* The calls of all of a rank's stages: all forward passes, then all backward passes in reverse order.
 * train_n_calls is the room that out needs. */
int64_t train_n_calls(const struct train_stage *stages, int32_t n_stages);
int32_t train_stages_order(struct zero_call *out, const struct train_stage *stages, int32_t n_stages);

#endif
