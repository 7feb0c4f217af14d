/* SPDX-License-Identifier: Apache-2.0 */
/* stacked_mlp.h: a small language model in the manner of train_gpt2.c: all parameters in one buffer, those of
 * the layers stacked, so that layer l of a tensor is base + l*stride.
 *
 * The next token is predicted from the last T ones: a log-bilinear embedding (Mnih and Hinton, "Three new
 * graphical models for statistical language modelling", 2007, with diagonal context matrices), L residual
 * feed-forward blocks, a final norm, and the embedding once more as output matrix. */
#ifndef TEST_STACKED_MLP_H
#define TEST_STACKED_MLP_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

struct mlp_config {
    /* V: different tokens */
    int vocab;
    /* T: tokens looked back at */
    int context;
    /* C: numbers of an embedding */
    int channels;
    /* L: feed-forward blocks */
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

/* What forward leaves for backward, with B rows:
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

    /* of AdamW; allocated by the first update */
    float *m_memory, *v_memory;

    struct mlp_acts acts;
    float *acts_memory;
    struct mlp_acts grads_acts;
    float *grads_acts_memory;
    size_t n_acts;

    /* Which layers run, in which order; layers 0..L-1 unless changed (layer drop, arXiv:1909.11556). */
    int *path;
    int n_path;

    /* an update leaves out the layers that are not in path */
    int leaves_out;
    /* updates of each layer, counted if leaves_out is set */
    int *updates;

    /* backward stores headb's gradient instead of adding to it */
    int store_headb;

    /* of the last forward, (B, T) and (B) */
    const int *tokens, *targets;
    float mean_loss;
};

/* Random weights from a seed. B rows at most are given to a forward. Returns NULL without memory. */
struct mlp *mlp_new(struct mlp_config config, int batch, uint64_t seed);
void mlp_free(struct mlp *m);

/* targets NULL: no loss. */
void mlp_forward(struct mlp *m, const int *tokens, const int *targets);
/* Adds to grads. */
void mlp_backward(struct mlp *m);
void mlp_zero_grad(struct mlp *m);
/* Clips the gradient to max_norm, unless that is 0; returns the norm that it had. */
double mlp_clip(struct mlp *m, float max_norm);

struct mlp_adamw {
    float lr, beta1, beta2, eps, decay;
    /* 1-based */
    int t;
};
void mlp_update(struct mlp *m, struct mlp_adamw a);
/* The same for n weights w with gradients g and moments m and v. */
void mlp_adamw(size_t n, float *w, const float *g, float *m, float *v, struct mlp_adamw a);
/* Whether weights of this tensor decay, as matrices do. */
int mlp_decays(int tensor);

/* The pieces of a forward and a backward. prev: the layer run before l, or -1. */
void mlp_encode(struct mlp *m, const int *tokens);
void mlp_block_forward(struct mlp *m, int l, int prev);
void mlp_head_forward(struct mlp *m, int last, const int *targets);
void mlp_zero_grads_acts(struct mlp *m);
void mlp_head_backward(struct mlp *m, int last);
void mlp_block_backward(struct mlp *m, int l, int prev);
void mlp_encode_backward(struct mlp *m);

/* The whole buffer in a file of its own format. Return 0 or -1. */
int mlp_save(const struct mlp *m, FILE *f);
int mlp_load(struct mlp *m, FILE *f);

/* Continues a text of T tokens by n more, drawn with the given seed. */
void mlp_sample(struct mlp *m, const int *prompt, int *out, int n, uint64_t seed);

#endif
