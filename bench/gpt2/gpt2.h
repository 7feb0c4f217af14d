/* gpt2.h: a GPT-2 model as C programs write it: a struct of pointers into one flat buffer, stacked per layer.
 *
 * Layer l of a stacked tensor is params.qkvw + l*3*C*C. Nothing here knows of libzero: train.c calls these
 * functions layer by layer, between brackets when it is wrapped. Compiled once per dtype (gpt2_real.h).
 *
 * The same text runs on the host and on a GPU: memory is its place's, and work is put on its place's stream
 * (on the host it is done when a call returns). No call waits for a GPU but those that say so.
 *
 * B rows, T tokens each, C channels, NH heads, L layers, V token ids. */
#ifndef ZERO_BENCH_GPT2_H
#define ZERO_BENCH_GPT2_H

#include "bench/gpt2/gpt2_config.h"
#include "bench/gpt2/gpt2_layers.h"

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
    real *att;       /* (L, B, NH, T, T) after the softmax; none where attention is one piece */
    real *atty;      /* (L, B, T, C) */
    real *residual2; /* (L, B, T, C) */
    real *ln2;       /* (L, B, T, C) */
    real *fch;       /* (L, B, T, 4*C) */
    real *fch_gelu;  /* (L, B, T, 4*C) */
    real *residual3; /* (L, B, T, C) */
    real *lnf;       /* (B, T, C) */
    real *dlogits;   /* (B, T, V), rows padded: the gradient of the loss, made in forward */
    real *dresidual; /* (B, T, C) from here on: scratch of backward */
    real *dbtc;      /* (B, T, C) */
    real *dqkv;      /* (B, T, 3*C) */
    real *dfch;      /* (B, T, 4*C) */
    real *dscores;   /* (NH, T, T) of one row; none where attention is one piece */
    real *dbias;     /* (4*C) */
};
#define GPT2_N_ACTIVATIONS 18

/* fp32 whatever the dtype: statistics, and scratch. */
struct statistics {
    float *ln1_mean, *ln1_rstd; /* (L, B, T) each */
    float *ln2_mean, *ln2_rstd; /* (L, B, T) each */
    float *lnf_mean, *lnf_rstd; /* (B, T) each */
    float *scores;              /* (NH, T, T) of one row; none where attention is one piece */
    float *logsum, *dots;       /* (L, B, NH, T), (B, NH, T) where it is */
    float *logits;              /* (T, V) of one row, its rows padded */
    float *scratch;             /* of layers */
};
#define GPT2_N_STATISTICS 11

struct gpt2_block {
    void *p;
    int64_t bytes;
};

struct gpt2 {
    struct gpt2_config config;
    int64_t B, ld_logits;      /* elements between rows of logits */
    const struct place *place; /* borrowed */
    const struct gpt2_layers *layers;
    const struct gpt2_attention *attention; /* in one piece; NULL: not for these heads */
    struct params params, grads;
    struct activations acts;
    struct statistics stats;
    double *losses, *loss; /* (B, T); their mean, summed over micro-batches */

    /* What the caller fills in before forward, (B, T) each, after gpt2_next_batch. */
    int32_t *tokens, *targets;
    /* Of the host, so that one is filled while the other is on its way, and the device's. */
    struct gpt2_batch staged[2], batch;
    int slot;                   /* of staged */
    struct zr_event *sent[2];   /* staged[i] may be written again */
    int32_t *count;             /* (V + 1) scratch of sorting a batch, on the host */
    double *loss_out;           /* on the host */
    struct zr_event *loss_sent; /* loss_out is there */

    struct gpt2_block params_memory, grads_memory, acts_memory, stats_memory, losses_memory, batch_memory;
    struct gpt2_block staged_memory; /* host_alloc */
    int err;                         /* the first failure; kept until looked at */
};

/* Takes memory for the parameters, activations and tokens, and draws the parameters from seed (GPT-2's
 * initialisation: normal 0.02, residual projections by 1/sqrt(2L) smaller). Waits. Returns 0 or a zr_err; on
 * failure nothing is held. */
int gpt2_open(struct gpt2 *m, const struct gpt2_config *config, int64_t B, uint64_t seed,
              const struct place *place);
/* Takes memory for the gradients too, zeroed: not needed when libzero hands them out. */
int gpt2_open_grads(struct gpt2 *m);
/* Gives back the parameters' own memory; m->params is left alone, for it may point elsewhere by now. */
void gpt2_free_params(struct gpt2 *m);
void gpt2_close(struct gpt2 *m);

/* Points m->tokens and m->targets at memory that may be filled in. To be called before each micro-batch;
 * waits until the batch before the last has been copied. Returns 0 or a zr_err. */
int gpt2_next_batch(struct gpt2 *m);

/* One micro-batch: embed, each layer in turn, head. The head adds the mean loss over B*T tokens (to a
 * multiple of 2^-36) to those of the micro-batches before. */
void gpt2_embed_forward(struct gpt2 *m);
void gpt2_layer_forward(struct gpt2 *m, int64_t l);
void gpt2_head_forward(struct gpt2 *m);
/* And back: head, layers reversed, embed. Gradients are added to m->grads. */
void gpt2_head_backward(struct gpt2 *m);
void gpt2_layer_backward(struct gpt2 *m, int64_t l);
void gpt2_embed_backward(struct gpt2 *m);

/* Sends the sum of the losses to the host, and begins a new one. */
int gpt2_send_loss(struct gpt2 *m);
/* *loss: the sum sent last. Waits for it. */
int gpt2_take_loss(struct gpt2 *m, double *loss);

#endif
