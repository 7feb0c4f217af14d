/* SPDX-License-Identifier: Apache-2.0 */
/* llama.h: the pointers of a Llama, beside those that every model has (bench/model/model.h), whose letters of
 * shapes it uses. LR is the rank of adapters. */
#ifndef ZERO_BENCH_LLAMA_H
#define ZERO_BENCH_LLAMA_H

#include "bench/llama/llama_layers.h"
#include "bench/llama/llama_ops.h"
#include "bench/llama/lora.h"
#include "bench/model/model.h"

/* Parameters or their gradients, in the order of enum llama_tensor, which has the shapes. Biases, norms of
 * heads, head and adapters are NULL in models without them, and so are gradients of frozen parameters. */
struct llama_params {
    real *embed, *norm1, *q, *k, *v, *q_bias, *k_bias, *v_bias, *q_norm, *k_norm, *o;
    real *norm2, *gate, *up, *down, *norm, *head;
    real *lora_a[LORA_N_TARGETS], *lora_b[LORA_N_TARGETS];
};

/* Activations that forward keeps for backward:
 *
 *     norm1              (L, R, C)
 *     qk                 (L, B, T, A + K), q and k before the norms of heads, if there are any
 *     qkv                (L, B, T, A + 2*K)
 *     atty               (L, B, T, A)
 *     residual2, norm2   (L, R, C)
 *     gate_up            (L, B, T, 2*F); backward writes its gradient over it
 *     act                (L, B, T, F)
 *     norm               (R, C)
 *     lora_h             (L, adapters of a layer, B, T, LR)
 *
 * and buffers of backward are:
 *
 *     dqkv               (B, T, A + 2*K)
 *     dqk                (B, T, A + K), as qk
 *     dact               (B, T, F)
 *     lora_dh            (adapters of a layer, B, T, LR)
 *
 * With config.two_parts each micro-batch has its own dqkv, dqk and lora_dh, with L such arrays in each. With
 * config.recompute there is one layer instead of L (passes.h). Layers begin model_apart(n) elements apart,
 * and so do all arrays (B, T, LR). */
struct llama_activations {
    real *norm1, *qk, *qkv, *atty, *residual2, *norm2, *gate_up, *act;
    real *norm, *lora_h, *dqkv, *dqk, *dact, *lora_dh;
};
#define LLAMA_N_ACTIVATIONS 14

/* Reciprocal roots of mean squares: (L, R) of two norms, (L, B, T, heads) of q's and of k's, (R) of the last
 * norm. rotary (context, HS) is the table of llama_rotary_table, and scratch is a buffer. */
struct llama_statistics {
    float *norm1_rstd, *q_rstd, *k_rstd, *norm2_rstd, *norm_rstd, *rotary, *scratch;
};
#define LLAMA_N_STATISTICS 7

/* What model.own points at. */
struct llama {
    struct llama_params params, grads;
    struct llama_activations acts;
    struct llama_statistics stats;
    const struct llama_layers *layers;
};

static inline struct llama *llama_of(const struct model *m)
{
    return m->own;
}

#endif
