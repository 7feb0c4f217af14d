/* SPDX-License-Identifier: Apache-2.0 */
/* model.h: the tensors of a model that is planned for, without one. */
#ifndef ZERO_BENCH_PLAN_MODEL_H
#define ZERO_BENCH_PLAN_MODEL_H

#include "bench/train/train.h"

#define PLAN_N_TENSORS (TRAIN_N_TENSORS + 1)

/* Describes a GPT-2 of the sizes given or, where params is above 0, one of exactly that many parameters;
 * dtype is an enum zero_dtype. Returns how many tensors; *layers: units beside unit 0. */
int32_t plan_model(struct zero_tensor out[PLAN_N_TENSORS], int32_t *layers, const struct gpt2_config *model,
                   int64_t params, int dtype);

/* The sizes of that GPT; of one of params parameters channels 0 where it is too small for any. */
struct gpt2_config plan_sizes(const struct gpt2_config *model, int64_t params);

#endif
