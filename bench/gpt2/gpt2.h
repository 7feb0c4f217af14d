/* SPDX-License-Identifier: Apache-2.0 */
/* gpt2.h: the arrays of a GPT-2 that not every model has: parameters, activations inside layers, and
 * statistics. The letters of shapes are those of bench/model/model.h; F is a rank's part of the MLP's 4*C
 * channels. Tensors are stacked over the layers: layer l of qkvw is at params.qkvw + l*3*A*C. */
#ifndef ZERO_BENCH_GPT2_H
#define ZERO_BENCH_GPT2_H

#include "bench/gpt2/gpt2_ops.h"
#include "bench/model/model.h"

/* Parameters or their gradients, in one buffer in this order:
 *
 *     wte                 (U, C), token embedding, and the head
 *     wpe                 (context, C), position embedding
 *     ln1w, ln1b          (L, C)
 *     qkvw, qkvb          (L, 3*A, C) and (L, 3*A)
 *     attprojw, attprojb  (L, C, A) and (L, C)
 *     ln2w, ln2b          (L, C)
 *     fcw, fcb            (L, F, C) and (L, F)
 *     fcprojw, fcprojb    (L, C, F) and (L, C)
 *     lnfw, lnfb          (C)
 */
struct gpt2_params {
    real *wte, *wpe;
    real *ln1w, *ln1b, *qkvw, *qkvb, *attprojw, *attprojb;
    real *ln2w, *ln2b, *fcw, *fcb, *fcprojw, *fcprojb;
    real *lnfw, *lnfb;
};

/* Forward keeps these activations for backward:
 *
 *     ln1                  (L, R, C)
 *     qkv                  (L, B, T, 3*A)
 *     atty                 (L, B, T, A)
 *     residual2, ln2       (L, R, C)
 *     fch, fch_gelu        (L, B, T, F)
 *     lnf                  (R, C)
 *
 * These are buffers of backward:
 *
 *     dqkv                 (B, T, 3*A)
 *     dfch                 (B, T, F)
 *
 * With config.two_parts each micro-batch has its own dqkv and dfch, with L such arrays in each. With
 * config.recompute there is one layer instead of L (passes.h). Layers begin model_apart(n) elements apart. */
struct gpt2_activations {
    real *ln1, *qkv, *atty, *residual2;
    real *ln2, *fch, *fch_gelu;
    real *lnf, *dqkv, *dfch;
};
#define GPT2_N_ACTIVATIONS 10

/* Means and reciprocal deviations of norms: (L, R), and (R) of the last one. */
struct gpt2_statistics {
    float *ln1_mean, *ln1_rstd, *ln2_mean, *ln2_rstd;
    float *lnf_mean, *lnf_rstd;
};
#define GPT2_N_STATISTICS 6

/* The struct at which model.own points. */
struct gpt2 {
    struct gpt2_params params, grads;
    struct gpt2_activations acts;
    struct gpt2_statistics stats;
};

static inline struct gpt2 *gpt2_of(const struct model *m)
{
    return m->own;
}

#endif
