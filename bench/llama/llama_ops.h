/* SPDX-License-Identifier: Apache-2.0 */
/* llama_ops.h: a Llama as a kind of model, with sizes of a Hugging Face folder (hf_config.h): RMSNorm, rotary
 * positions, attention whose heads may share keys and values, and SwiGLU.
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

/* Its passes for each dtype (llama.c). */
extern const struct model_passes llama_passes_f32, llama_passes_bf16;

/* A tensor's number in the whole model, and its place among the model's pointers. Letters of shapes are those
 * of bench/model/model.h: L layers, C channels, HS channels of a head, and of tensor-parallel ranks their
 * parts A, K, F and U. The adapter of enum lora_target t has the tensors LLAMA_LORA_A + t (L, LR, inputs) and
 * LLAMA_LORA_B + t (L, outputs, LR), where LR is its rank. */
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

/* The sizes of a folder's model, as a model's. c is borrowed by the result. The context is that of c. */
struct model_config llama_sizes(const struct hf_config *c);

#endif
