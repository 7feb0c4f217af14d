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
    int vocab;    /* V */
    int context;  /* T: tokens looked back at */
    int channels; /* C */
    int layers;   /* L */
};

#define MLP_N_TENSORS 11
struct mlp_tensors {
    float *wte;   /* (V, C) */
    float *wpe;   /* (T, C) */
    float *ln1w;  /* (L, C) */
    float *ln1b;  /* (L, C) */
    float *fcw;   /* (L, 4*C, C) */
    float *fcb;   /* (L, 4*C) */
    float *projw; /* (L, C, 4*C) */
    float *projb; /* (L, C) */
    float *lnfw;  /* (C) */
    float *lnfb;  /* (C) */
    float *headb; /* (V) */
};

struct mlp_acts {
    float *encoded;  /* (B, C) */
    float *ln1;      /* (L, B, C) */
    float *mean1;    /* (L, B) */
    float *rstd1;    /* (L, B) */
    float *fch;      /* (L, B, 4*C) */
    float *gelu;     /* (L, B, 4*C) */
    float *residual; /* (L, B, C) */
    float *lnf;      /* (B, C) */
    float *meanf;    /* (B) */
    float *rstdf;    /* (B) */
    float *logits;   /* (B, V) */
    float *probs;    /* (B, V) */
    float *losses;   /* (B) */
};

struct mlp {
    struct mlp_config config;
    int batch; /* B: rows of a forward */

    struct mlp_tensors params;
    size_t sizes[MLP_N_TENSORS]; /* elements of each, in the order of the struct */
    float *params_memory;
    size_t n_params;

    struct mlp_tensors grads;
    float *grads_memory;

    float *m_memory, *v_memory; /* of AdamW; allocated by the first update */

    struct mlp_acts acts;
    float *acts_memory;
    struct mlp_acts grads_acts;
    float *grads_acts_memory;
    size_t n_acts;

    /* Which layers run, in which order; layers 0..L-1 unless changed (layer drop, arXiv:1909.11556). */
    int *path;
    int n_path;

    int store_headb; /* backward stores headb's gradient instead of adding to it */

    const int *tokens, *targets; /* of the last forward, (B, T) and (B) */
    float mean_loss;
};

/* Random weights from a seed. B rows at most are given to a forward. Returns NULL without memory. */
struct mlp *mlp_new(struct mlp_config config, int batch, uint64_t seed);
void mlp_free(struct mlp *m);

/* targets NULL: no loss. */
void mlp_forward(struct mlp *m, const int *tokens, const int *targets);
void mlp_backward(struct mlp *m); /* adds to grads */
void mlp_zero_grad(struct mlp *m);
double mlp_clip(struct mlp *m, float max_norm); /* returns the norm before; max_norm 0: only that */

struct mlp_adamw {
    float lr, beta1, beta2, eps, decay;
    int t; /* 1-based */
};
void mlp_update(struct mlp *m, struct mlp_adamw a);
/* The same for n weights w with gradients g and moments m and v. */
void mlp_adamw(size_t n, float *w, const float *g, float *m, float *v, struct mlp_adamw a);
int mlp_decays(int tensor); /* matrices do */

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
