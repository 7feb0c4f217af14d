/* SPDX-License-Identifier: Apache-2.0 */
/* stacked_mlp_wrap.h: stacked_mlp.h trained plain, and wrapped by libzero. */
#ifndef TEST_STACKED_MLP_WRAP_H
#define TEST_STACKED_MLP_WRAP_H

#include "test/models/model_ranks.h"
#include "test/models/stacked_mlp.h"

/* How the wrapped model brackets its embedding, which is used at both ends (tied weights). */
enum mlp_tie {
    MLP_TIE_NESTED,  /* held open around the layers: one contribution of gradient */
    MLP_TIE_SEPARATE /* a bracket at each use: two contributions */
};

/* Activations that the wrapped run does not keep but computes again in backward. */
enum mlp_recompute {
    MLP_KEEP,
    MLP_RECOMPUTE_LAYER,  /* a layer's inside its backward bracket */
    MLP_RECOMPUTE_SEGMENT /* those of two layers, forward, before the backward of both */
};

/* What a run does beside training; the plain run does the same. */
struct mlp_options {
    int steps;
    /* the norm is clipped to it; 0: it is not */
    float clip;
    /* of the wrapped run */
    enum mlp_tie tie;
    bool frozen_wpe;
    /* of the wrapped run */
    enum mlp_recompute recompute;
    /* a forward on other rows after every other step */
    bool evaluate;
    /* a forward on other rows before the one that is trained on, in the same micro-batch */
    bool twice;
    /* wrapped: calls that must be refused, and change nothing, at every step */
    bool misuse;
    /* each step leaves out one layer */
    bool drop;
    /* the plain run does not update that layer, as a wrapped run with brackets does not */
    bool leaves_out;
    /* from step 3 on the layers run in reverse */
    bool reorder;
    /* libzero is told that headb's gradient is stored, not added to */
    bool overwrite;
    /* after step 2, a row of wte is set anew by zero_write */
    bool edit;
    /* wrapped: the model's own AdamW through optim.update */
    bool own_update;
    /* wrapped: each layer's bracket is opened and closed once before, inside its neighbour's */
    bool early;
    /* embeddings stay gathered at stage 3 */
    bool resident;
};

#define MLP_ROWS 72 /* per step; divides by every world times accum used */
extern const struct mlp_config mlp_test_config;
extern const struct run_model mlp_run_model;

/* Token rows of a step: the global rows [first, first + n), tokens (n, T), targets (n). */
void mlp_data(uint64_t seed, int step, int first, int n, int *tokens, int *targets);

/* The table a wrapped model gives to zero_wrap; returns MLP_N_TENSORS. */
int mlp_zero_tensors(struct mlp *m, const struct mlp_options *o, struct zero_tensor *t);

/* Collective. The model's parameters as one buffer in the model's own order; dst (n_params), NULL where not
 * wanted. */
int mlp_zero_read_all(zero_ctx *z, const struct mlp *m, int32_t value, float *dst);
int mlp_zero_write_all(zero_ctx *z, const struct mlp *m, const float *src);

/* One forward and backward with every bracket; returns the first error. */
int mlp_zero_micro_batch(zero_ctx *z, struct mlp *m, const struct mlp_options *o, const int *tokens,
                         const int *targets);

#endif
