/* SPDX-License-Identifier: Apache-2.0 */
/* stacked_mlp.h: a small language model like train_gpt2.c. All parameters are in one buffer. Those of the
 * layers are stacked, so that layer l of a tensor is at base + l*stride.
 *
 * The next token is predicted from the last T ones. The model has a log-bilinear embedding (Mnih and
 * Hinton, "Three new graphical models for statistical language modelling", 2007, with diagonal context
 * matrices), L residual feed-forward blocks, and a final norm. The embedding is also the output matrix. */
#ifndef TEST_STACKED_MLP_H
#define TEST_STACKED_MLP_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

struct mlp_config {
    /* V: number of different tokens */
    int vocab;
    /* T: number of previous tokens used */
    int context;
    /* C: elements of an embedding */
    int channels;
    /* L: number of feed-forward blocks */
    int layers;
};

#define MLP_N_TENSORS 11
/* Parameters, and their gradients, in this order in one buffer:
 *
 *     wte           (V, C)
 *     wpe           (T, C)
 *     ln1w, ln1b    (L, C)
 *     fcw, fcb      (L, 4*C, C) and (L, 4*C)
 *     projw, projb  (L, C, 4*C) and (L, C)
 *     lnfw, lnfb    (C)
 *     headb         (V)
 */
struct mlp_tensors {
    float *wte, *wpe;
    float *ln1w, *ln1b, *fcw, *fcb, *projw, *projb;
    float *lnfw, *lnfb, *headb;
};

/* Activations that forward keeps for backward, with B rows:
 *
 *     encoded        (B, C)
 *     ln1            (L, B, C)
 *     mean1, rstd1   (L, B)
 *     fch, gelu      (L, B, 4*C)
 *     residual       (L, B, C)
 *     lnf            (B, C)
 *     meanf, rstdf   (B)
 *     logits, probs  (B, V)
 *     losses         (B)
 */
struct mlp_acts {
    float *encoded;
    float *ln1, *mean1, *rstd1, *fch, *gelu, *residual;
    float *lnf, *meanf, *rstdf, *logits, *probs, *losses;
};

struct mlp {
    struct mlp_config config;
    /* B: rows of a forward */
    int batch;

    struct mlp_tensors params;
    /* elements of each tensor, in the order of the struct */
    size_t sizes[MLP_N_TENSORS];
    float *params_memory;
    size_t n_params;

    struct mlp_tensors grads;
    float *grads_memory;

    /* AdamW's states; allocated by the first update */
    float *m_memory, *v_memory;

    struct mlp_acts acts;
    float *acts_memory;
    struct mlp_acts grads_acts;
    float *grads_acts_memory;
    size_t n_acts;

    /* The layers that run, in order: 0..L-1 unless changed (layer drop, arXiv:1909.11556). */
    int *path;
    int n_path;

    /* an update skips the layers that are not in path */
    int leaves_out;
    /* updates of each layer, counted if leaves_out is set */
    int *updates;

    /* backward stores headb's gradient instead of adding to it */
    int store_headb;

    /* of the last forward, (B, T) and (B) */
    const int *tokens, *targets;
    float mean_loss;
};

/* Makes a model with random weights from a seed, for forwards of at most B rows. Returns NULL without
 * memory. */
struct mlp *mlp_new(struct mlp_config config, int batch, uint64_t seed);
void mlp_free(struct mlp *m);

/* targets NULL: no loss. */
void mlp_forward(struct mlp *m, const int *tokens, const int *targets);
/* Adds to grads. */
void mlp_backward(struct mlp *m);
void mlp_zero_grad(struct mlp *m);
/* Clips the gradient to max_norm, unless that is 0. Returns the norm before clipping. */
double mlp_clip(struct mlp *m, float max_norm);

struct mlp_adamw {
    float lr, beta1, beta2, eps, decay;
    /* counted from 1 */
    int t;
};
void mlp_update(struct mlp *m, struct mlp_adamw a);
/* Does the same for n weights w with gradients g and moments m and v. */
void mlp_adamw(size_t n, float *w, const float *g, float *m, float *v, struct mlp_adamw a);
/* Returns whether weight decay applies to this tensor, as to matrices. */
int mlp_decays(int tensor);

/* The parts of a forward and a backward. prev is the layer that ran before l, or -1. */
void mlp_encode(struct mlp *m, const int *tokens);
void mlp_block_forward(struct mlp *m, int l, int prev);
void mlp_head_forward(struct mlp *m, int last, const int *targets);
void mlp_zero_grads_acts(struct mlp *m);
void mlp_head_backward(struct mlp *m, int last);
void mlp_block_backward(struct mlp *m, int l, int prev);
void mlp_encode_backward(struct mlp *m);

/* Write and read the whole buffer in the model's own file format. Return 0 or -1. */
int mlp_save(const struct mlp *m, FILE *f);
int mlp_load(struct mlp *m, FILE *f);

/* Continues a text of T tokens by n more, drawn with the given seed. */
void mlp_sample(struct mlp *m, const int *prompt, int *out, int n, uint64_t seed);

#endif
