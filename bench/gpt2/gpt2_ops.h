/* SPDX-License-Identifier: Apache-2.0 */
/* gpt2_ops.h: a GPT-2 as a kind of model (Radford et al. 2019): pre-norm blocks, learned positions, and a
 * head that shares the embedding's weights. */
#ifndef ZERO_BENCH_GPT2_OPS_H
#define ZERO_BENCH_GPT2_OPS_H

#include "bench/model/model_config.h"

extern const struct model_ops gpt2_ops;

/* Its passes for each dtype (gpt2.c). */
extern const struct model_passes gpt2_passes_f32, gpt2_passes_bf16;

#define GPT2_N_TENSORS 16

#endif
