/* gpt2.h: a GPT-2 model as C programs write it: a struct of pointers into one flat buffer, stacked per layer.
 *
 * Layer l of a stacked tensor is params.qkvw + l*3*C*C. Nothing here knows of libzero: train.c calls these
 * functions layer by layer, between brackets when it is wrapped. Compiled once per dtype (gpt2_real.h).
 *
 * B rows, T tokens each, C channels, NH heads, L layers, V token ids. */
#ifndef ZERO_BENCH_GPT2_H
#define ZERO_BENCH_GPT2_H

#include "bench/gpt2_config.h"
#include "bench/gpt2_real.h"
#include "kernels/gemm.h"

struct params {
    real *wte;      /* (V, C) token embedding, and the head */
    real *wpe;      /* (T, C) position embedding */
    real *ln1w;     /* (L, C) */
    real *ln1b;     /* (L, C) */
    real *qkvw;     /* (L, 3*C, C) */
    real *qkvb;     /* (L, 3*C) */
    real *attprojw; /* (L, C, C) */
    real *attprojb; /* (L, C) */
    real *ln2w;     /* (L, C) */
    real *ln2b;     /* (L, C) */
    real *fcw;      /* (L, 4*C, C) */
    real *fcb;      /* (L, 4*C) */
    real *fcprojw;  /* (L, C, 4*C) */
    real *fcprojb;  /* (L, C) */
    real *lnfw;     /* (C) */
    real *lnfb;     /* (C) */
};
#define GPT2_N_TENSORS 16

/* What forward leaves for backward. */
struct activations {
    real *embedded;  /* (B, T, C) */
    real *ln1;       /* (L, B, T, C) */
    real *qkv;       /* (L, B, T, 3*C) */
    real *att;       /* (L, B, NH, T, T) after the softmax */
    real *atty;      /* (L, B, T, C) */
    real *residual2; /* (L, B, T, C) */
    real *ln2;       /* (L, B, T, C) */
    real *fch;       /* (L, B, T, 4*C) */
    real *fch_gelu;  /* (L, B, T, 4*C) */
    real *residual3; /* (L, B, T, C) */
    real *lnf;       /* (B, T, C) */
    real *dlogits;   /* (B, T, V) the loss's gradient, made in forward while the logits are at hand */
    real *dresidual; /* (B, T, C) from here on: scratch of backward */
    real *dbtc;      /* (B, T, C) */
    real *dqkv;      /* (B, T, 3*C) */
    real *dfch;      /* (B, T, 4*C) */
    real *dscores;   /* (NH, T, T) of one row */
};
#define GPT2_N_ACTIVATIONS 17

/* fp32 whatever the dtype: statistics, and scratch. */
struct statistics {
    float *ln1_mean, *ln1_rstd; /* (L, B, T) each */
    float *ln2_mean, *ln2_rstd; /* (L, B, T) each */
    float *lnf_mean, *lnf_rstd; /* (B, T) each */
    float *scores;              /* (NH, T, T) of one row */
    float *logits;              /* (T, V) of one row */
    float *columns;             /* (4*C) */
};
#define GPT2_N_STATISTICS 9

struct gpt2 {
    struct gpt2_config config;
    int64_t B;
    struct params params, grads;
    struct activations acts;
    struct statistics stats;
    int32_t *tokens, *targets; /* (B, T) each, filled in by the caller before forward */

    real *params_memory, *grads_memory, *acts_memory; /* the flat buffers */
    float *stats_memory;
    int64_t *order;       /* (B*T + V + 1) scratch of the embedding's backward */
    struct zr_gemm *gemm; /* borrowed */
    int err;              /* the first failure of a matrix product; kept until looked at */
};

/* Takes memory for the parameters, activations and tokens, and draws the parameters from seed (GPT-2's
 * initialisation: normal 0.02, residual projections by 1/sqrt(2L) smaller). Returns 0 or a zr_err; on failure
 * nothing is held. */
int gpt2_open(struct gpt2 *m, const struct gpt2_config *config, int64_t B, uint64_t seed,
              struct zr_gemm *gemm);
/* Takes memory for the gradients too, zeroed: not needed when libzero hands them out. */
int gpt2_open_grads(struct gpt2 *m);
/* Gives back the parameters' own memory; m->params is left alone, for it may point elsewhere by now. */
void gpt2_free_params(struct gpt2 *m);
void gpt2_close(struct gpt2 *m);

/* One micro-batch: embed, each layer in turn, head. The head returns the mean loss over B*T tokens. */
void gpt2_embed_forward(struct gpt2 *m);
void gpt2_layer_forward(struct gpt2 *m, int64_t l);
double gpt2_head_forward(struct gpt2 *m);
/* And back: head, layers reversed, embed. Gradients are added to m->grads. */
void gpt2_head_backward(struct gpt2 *m);
void gpt2_layer_backward(struct gpt2 *m, int64_t l);
void gpt2_embed_backward(struct gpt2 *m);

#endif
