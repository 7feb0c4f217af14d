/* SPDX-License-Identifier: Apache-2.0 */
/* llama.h: the arrays of a Llama that not every model has: parameters, activations inside layers, and
 * statistics. The letters of shapes are those of bench/model/model.h, and LR is the rank of adapters. */
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

/* Forward keeps these activations for backward:
 *
 *     norm1              (L, R, C)
 *     qk                 (L, B, T, A + K), q and k before the norms of heads, if the model has these
 *     qkv                (L, B, T, A + 2*K)
 *     atty               (L, B, T, A)
 *     residual2, norm2   (L, R, C)
 *     gate_up            (L, B, T, 2*F); backward writes its gradient over it
 *     act                (L, B, T, F)
 *     norm               (R, C)
 *     lora_h             (L, adapters of a layer, B, T, LR)
 *
 * These are buffers of backward:
 *
 *     dqkv               (B, T, A + 2*K)
 *     dqk                (B, T, A + K), the gradient of qk
 *     dact               (B, T, F)
 *     lora_dh            (adapters of a layer, B, T, LR)
 *
 * With config.two_parts, each micro-batch has its own dqkv, dqk and lora_dh, with one such array for each
 * layer. With config.recompute there is one layer instead of L (passes.h). The arrays of consecutive layers
 * begin model_apart(n) elements apart. The arrays (B, T, LR) of consecutive adapters do so too. */
struct llama_activations {
    real *norm1, *qk, *qkv, *atty, *residual2, *norm2, *gate_up, *act;
    real *norm, *lora_h, *dqkv, *dqk, *dact, *lora_dh;
};
#define LLAMA_N_ACTIVATIONS 14

/* The rstd of RMSNorm (llama_layers.h): (L, R) for the two norms of a layer, (L, B, T, heads) for the norms
 * of q and of k, and (R) for the last norm. rotary (context, HS) is the table of llama_rotary_table. scratch
 * is a buffer for the functions of llama_layers.h. */
struct llama_statistics {
    float *norm1_rstd, *q_rstd, *k_rstd, *norm2_rstd, *norm_rstd, *rotary, *scratch;
};
#define LLAMA_N_STATISTICS 7

/* The struct at which model.own points. */
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
