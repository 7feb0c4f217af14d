/* SPDX-License-Identifier: Apache-2.0 */
/* stacked_mlp_wrap.h: trains stacked_mlp.h plain and wrapped by libzero. */
#ifndef TEST_STACKED_MLP_WRAP_H
#define TEST_STACKED_MLP_WRAP_H

#include "test/models/model_ranks.h"
#include "test/models/stacked_mlp.h"

/* How the wrapped model brackets its embedding, which is used at both ends (tied weights). */
enum mlp_tie {
    MLP_TIE_NESTED,  /* open around the layers: one gradient contribution */
    MLP_TIE_SEPARATE /* one bracket per use: two gradient contributions */
};

/* Activations that the wrapped run computes again in backward instead of keeping them. */
enum mlp_recompute {
    MLP_KEEP,
    MLP_RECOMPUTE_LAYER,  /* those of a layer, inside its backward bracket */
    MLP_RECOMPUTE_SEGMENT /* those of two layers, forward, before the backward of both */
};

/* Actions of a run besides training; the plain run does the same. */
struct mlp_options {
    int steps;
    /* the norm is clipped to this; 0: no clipping */
    float clip;
    /* for the wrapped run */
    enum mlp_tie tie;
    bool frozen_wpe;
    /* for the wrapped run */
    enum mlp_recompute recompute;
    /* a forward on other rows after every other step */
    bool evaluate;
    /* a forward on other rows before the one for training, in the same micro-batch */
    bool twice;
    /* wrapped: calls at every step that must be refused and change nothing */
    bool misuse;
    /* each step skips one layer */
    bool drop;
    /* the plain run does not update that layer, as in a wrapped run with brackets */
    bool leaves_out;
    /* from step 3 on the layers run in reverse */
    bool reorder;
    /* tells libzero that headb's gradient is stored, not added to */
    bool overwrite;
    /* after step 2, zero_write sets a row of wte */
    bool edit;
    /* wrapped: the model's own AdamW through optim.update */
    bool own_update;
    /* wrapped: each layer's bracket is also opened and closed before, inside its neighbour's */
    bool early;
    /* embeddings stay gathered at stage 3 */
    bool resident;
};

#define MLP_ROWS 72 /* per step; a multiple of every world times accum in use */
extern const struct mlp_config mlp_test_config;
extern const struct run_model mlp_run_model;

/* Token rows of a step: the global rows [first, first + n), tokens (n, T), targets (n). */
void mlp_data(uint64_t seed, int step, int first, int n, int *tokens, int *targets);

/* Fills the table that a wrapped model passes to zero_wrap. Returns MLP_N_TENSORS. */
int mlp_zero_tensors(struct mlp *m, const struct mlp_options *o, struct zero_tensor *t);

/* Collective: reads the model's parameters as one buffer in the model's own order; dst (n_params), or NULL
 * on ranks that do not want it. */
int mlp_zero_read_all(zero_ctx *z, const struct mlp *m, int32_t value, float *dst);
int mlp_zero_write_all(zero_ctx *z, const struct mlp *m, const float *src);

/* Runs one forward and backward with all brackets. Returns the first error. */
int mlp_zero_micro_batch(zero_ctx *z, struct mlp *m, const struct mlp_options *o, const int *tokens,
                         const int *targets);

#endif
