/* SPDX-License-Identifier: Apache-2.0 */
/* model.h: describes the tensors of a model that is planned for, without opening one. */
#ifndef ZERO_BENCH_PLAN_MODEL_H
#define ZERO_BENCH_PLAN_MODEL_H

#include "bench/train/train.h"

#define PLAN_N_TENSORS (MODEL_MAX_TENSORS + 1)

/* Describes a model of the sizes in model; if params is above 0, a GPT with exactly that many parameters.
 * dtype is an enum zero_dtype. Returns the number of tensors; *layers is the number of layers, each
 * a unit; unit 0 has everything else, such as the embeddings. */
int32_t plan_model(struct zero_tensor out[PLAN_N_TENSORS], int32_t *layers, const struct model_config *model,
                   int64_t params, int dtype);

/* The sizes of that GPT. Channels are 0 if params is too small for any GPT. */
struct model_config plan_sizes(const struct model_config *model, int64_t params);

#endif
