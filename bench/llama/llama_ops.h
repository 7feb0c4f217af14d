/* SPDX-License-Identifier: Apache-2.0 */
/* llama_ops.h: a Llama as a kind of model, whose sizes come from a Hugging Face folder (hf_config.h). It has
 * RMSNorm, rotary positions, grouped-query attention and SwiGLU.
 *
 * Every published matrix is one tensor, stacked over the layers. q, k and v are not fused, nor are the MLP's
 * gate and up. With grouped-query attention the rows of q, k and v differ in number, and tp would have to
 * divide each separately, but tp_blocks divides a tensor in equal blocks. A fused tensor would also need
 * several names for the rows of one layer, but a zero_weight names a whole layer. */
#ifndef ZERO_BENCH_LLAMA_OPS_H
#define ZERO_BENCH_LLAMA_OPS_H

#include "bench/llama/hf_config.h"
#include "bench/llama/lora_config.h"
#include "bench/model/model_config.h"

extern const struct model_ops llama_ops;

/* The passes of a Llama, for each dtype (llama.c). */
extern const struct model_passes llama_passes_f32, llama_passes_bf16;

/* A tensor's number in the whole model, which is also its index among the model's pointers. The letters of
 * shapes are those of bench/model/model.h. The adapter of enum lora_target t has the tensors LLAMA_LORA_A + t
 * (L, LR, inputs) and LLAMA_LORA_B + t (L, outputs, LR), where LR is the rank of adapters. */
enum llama_tensor {
    LLAMA_EMBED,  /* (U, C), also the head of a tied model */
    LLAMA_NORM1,  /* (L, C), before attention */
    LLAMA_Q,      /* (L, A, C) */
    LLAMA_K,      /* (L, K, C) */
    LLAMA_V,      /* (L, K, C) */
    LLAMA_Q_BIAS, /* (L, A), with qkv_bias */
    LLAMA_K_BIAS, /* (L, K) */
    LLAMA_V_BIAS, /* (L, K) */
    LLAMA_Q_NORM, /* (L, HS), with qk_norm */
    LLAMA_K_NORM, /* (L, HS) */
    LLAMA_O,      /* (L, C, A) */
    LLAMA_NORM2,  /* (L, C), before the MLP */
    LLAMA_GATE,   /* (L, F, C) */
    LLAMA_UP,     /* (L, F, C) */
    LLAMA_DOWN,   /* (L, C, F) */
    LLAMA_NORM,   /* (C), after the last layer */
    LLAMA_HEAD,   /* (U, C), not in a tied model */
    LLAMA_LORA_A,
    LLAMA_LORA_B = LLAMA_LORA_A + LORA_N_TARGETS,
    LLAMA_N_TENSORS = LLAMA_LORA_B + LORA_N_TARGETS
};

/* Converts the sizes of a folder to those of a model. The result refers to c, which must outlive it. */
struct model_config llama_sizes(const struct hf_config *c);

#endif
