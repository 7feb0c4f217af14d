/* SPDX-License-Identifier: Apache-2.0 */
/* gpt2.h: a GPT-2 model as C programs write it: a struct of pointers into one flat buffer, stacked per layer.
 *
 * Layer l of a stacked tensor is params.qkvw + l*3*C*C. Nothing here knows of libzero: bench/train/train.c
 * calls these functions layer by layer, between brackets when it is wrapped. Compiled once per dtype
 * (gpt2_real.h).
 *
 * The same text runs on the host and on a GPU: memory is its place's, and work is put on its place's stream
 * (on the host it is done when a call returns). No call waits for a GPU but those that say so.
 *
 * B rows, T tokens each, C channels, NH heads, L layers, V token ids.
 *
 * The model may be cut into parts, on a rank each (config.tp): a part has some of the heads, with A of the
 * C channels between qkv and the projection, F of the 4*C of the MLP, and U of the V token ids. Positions,
 * norms and what biases add to sums are whole, and the same on all ranks. What projections and embeddings
 * of parts give is added up by sum(). With config.sequence a part has R = B*T / config.tp rows of
 * embeddings, sums and norms, else R is B*T: gather() brings the others' rows before a product, scatter()
 * adds up behind one. */
#ifndef ZERO_BENCH_GPT2_H
#define ZERO_BENCH_GPT2_H

#include "bench/gpt2/gpt2_config.h"
#include "bench/gpt2/gpt2_layers.h"
#include "bench/train/profile.h"

/* Parameters, and their gradients, in this order in one buffer:
 *
 *     wte                 (U, C), token embedding, and the head
 *     wpe                 (T, C), position embedding
 *     ln1w, ln1b          (L, C)
 *     qkvw, qkvb          (L, 3*A, C) and (L, 3*A)
 *     attprojw, attprojb  (L, C, A) and (L, C)
 *     ln2w, ln2b          (L, C)
 *     fcw, fcb            (L, F, C) and (L, F)
 *     fcprojw, fcprojb    (L, C, F) and (L, C)
 *     lnfw, lnfb          (C)
 */
struct params {
    real *wte, *wpe;
    real *ln1w, *ln1b, *qkvw, *qkvb, *attprojw, *attprojb;
    real *ln2w, *ln2b, *fcw, *fcb, *fcprojw, *fcprojb;
    real *lnfw, *lnfb;
};
#define GPT2_N_TENSORS 16

/* What forward leaves for backward:
 *
 *     embedded             (R, C)
 *     ln1                  (L, R, C)
 *     qkv                  (L, B, T, 3*A)
 *     att                  (L, B, NH, T, T), after the softmax; none where attention is one piece
 *     atty                 (L, B, T, A)
 *     residual2, ln2       (L, R, C)
 *     fch, fch_gelu        (L, B, T, F)
 *     residual3            (L, R, C)
 *     lnf                  (R, C)
 *     dlogits              (B, T, U), rows padded: the gradient of the loss, made in forward
 *
 * and scratch of backward:
 *
 *     dresidual            (R, C)
 *     dbtc                 (B, T, C)
 *     dqkv                 (B, T, 3*A)
 *     dfch                 (B, T, F)
 *     dscores              (NH, T, T) of one row; none where attention is one piece
 *     dbias                (4*C)
 *     all                  (B, T, C), where R is not B*T: the rows of all parts, also in forward
 *
 * NH being the part's own heads.
 */
struct activations {
    real *embedded;
    real *ln1, *qkv, *att, *atty, *residual2;
    real *ln2, *fch, *fch_gelu, *residual3;
    real *lnf, *dlogits;
    real *dresidual, *dbtc, *dqkv, *dfch, *dscores, *dbias, *all;
};
#define GPT2_N_ACTIVATIONS 19

/* fp32 for either dtype: statistics, and scratch. */
struct statistics {
    /* (L, R) each */
    float *ln1_mean, *ln1_rstd, *ln2_mean, *ln2_rstd;
    /* (R) each */
    float *lnf_mean, *lnf_rstd;
    /* (NH, T, T) for one row; none if attention is one piece */
    float *scores;
    /* (L, B, NH, T) and (B, NH, T), only if attention is one piece */
    float *logsum, *dots;
    /* (T, U) for one row, with padded rows */
    float *logits;
    /* (3, T) for one row: what parts exchange (gpt2_vocab.h) */
    float *rows;
    /* n_scratch elements (gpt2_layers.h) */
    float *scratch;
};
#define GPT2_N_STATISTICS 12

struct gpt2_block {
    void *p;
    int64_t bytes;
};

/* What one micro-batch's forward pass leaves. All share the same scratch. */
struct gpt2_kept {
    struct activations acts;
    struct statistics stats;
    struct gpt2_block acts_memory, stats_memory;
};

struct gpt2 {
    struct gpt2_config config;
    /* rows of a batch; distance between rows of logits */
    int64_t B, ld_logits;
    /* borrowed */
    const struct place *place;
    const struct gpt2_layers *layers;
    /* attention in one piece; NULL: not for these heads */
    const struct gpt2_attention *attention;
    struct params params, grads;
    /* The backward pass overwrites the gradients of matrices (wte, qkvw, attprojw, fcw, fcprojw) and adds
     * to all others. If false, it adds to all. Set before a backward pass. */
    bool stores;
    /* For config.tp above 1, set before the forward pass: the number of this part; sum, which adds up x
     * (n) over the parts in place, on the place's stream; and reduce, which takes the sum or the largest
     * of each of x (n), on the host. For config.sequence also gather, which puts every part's n elements
     * of src into dst in order, and scatter, which gives dst this part's n elements of the sum of src. dst
     * or src may lie at its place in the other. All return 0 or a zr_err. */
    int32_t part;
    int (*sum)(void *arg, real *x, int64_t n);
    int (*reduce)(void *arg, float *x, int64_t n, bool largest);
    int (*gather)(void *arg, real *dst, const real *src, int64_t n);
    int (*scatter)(void *arg, real *dst, const real *src, int64_t n);
    void *sum_arg;
    /* the current one of n_kept; with config.no_embedding the caller sets `embedded` */
    struct activations acts;
    struct statistics stats;
    struct gpt2_kept *kept;
    int64_t n_kept;
    /* (B, T) loss of each token; and their mean, summed over micro-batches */
    double *losses, *loss;

    /* (B, T) each: the caller fills these before the forward pass, after gpt2_next_batch */
    int32_t *tokens, *targets;
    /* two batches in host memory, so that one is filled while the other is copied; and the device's */
    struct gpt2_batch staged[2], batch;
    /* the one of staged that is filled next */
    int slot;
    /* recorded when staged[i] may be written again */
    struct zr_event *sent[2];
    /* (V + 1) scratch on the host, for sorting a batch */
    int32_t *count;
    /* the loss in host memory */
    double *loss_out;
    /* recorded when loss_out is written */
    struct zr_event *loss_sent;

    struct gpt2_block params_memory, grads_memory, losses_memory, batch_memory;
    /* memory from host_alloc */
    struct gpt2_block staged_memory;
    /* the first failure, kept until the caller reads it */
    int err;
    /* borrowed; NULL: no profile is taken */
    struct profile *profile;
};

/* R, the number of rows between products. */
static inline int64_t gpt2_own_rows(const struct gpt2 *m)
{
    return m->B * m->config.context / (m->config.sequence ? m->config.tp : 1);
}

/* Takes memory for tokens and for the activations of one micro-batch. Returns 0 or a zr_err, and then
 * holds nothing. */
int gpt2_open(struct gpt2 *m, const struct gpt2_config *config, int64_t B, const struct place *place);
/* Takes memory for the activations of n micro-batches in all, whose forward passes come before the first
 * one's backward pass. Returns 0 or a zr_err. */
int gpt2_keep(struct gpt2 *m, int64_t n);
/* Takes memory for parameters, drawn as gpt2_draw does, and for zeroed gradients. Neither is needed if
 * libzero hands them out. The first one blocks. */
int gpt2_open_params(struct gpt2 *m, uint64_t seed);
int gpt2_open_grads(struct gpt2 *m);
void gpt2_close(struct gpt2 *m);
/* Bytes of the activations of all micro-batches that are kept, with scratch and without statistics. */
int64_t gpt2_activation_bytes(const struct gpt2 *m);

/* Draws GPT-2's first values of elements [first, first + n) of tensor t, in the order of struct params, to
 * x in host memory: normal with deviation 0.02, residual projections smaller by 1/sqrt(2L), norms 1,
 * biases 0. A value depends only on seed and on the element's number in the whole model. */
void gpt2_draw(const struct gpt2_config *config, uint64_t seed, int t, int64_t first, int64_t n, real *x);

/* Points m->tokens and m->targets at memory to fill in. Called before each micro-batch. Waits until the
 * batch before the last one has been copied. Returns 0 or a zr_err. */
int gpt2_next_batch(struct gpt2 *m);
/* Copies the batch to the place, for the calls below. */
void gpt2_send_batch(struct gpt2 *m);
/* Selects micro-batch i (from 0) of those that are kept. */
void gpt2_turn_to(struct gpt2 *m, int64_t i);

/* The forward pass of a micro-batch: embedding, each layer in turn, head. The head adds the mean loss over
 * B*T tokens, rounded to a multiple of 2^-36, to those of the micro-batches before. */
void gpt2_embed_forward(struct gpt2 *m);
void gpt2_layer_forward(struct gpt2 *m, int64_t l);
void gpt2_head_forward(struct gpt2 *m);
/* The output of the last layer that is here, (R, C). */
real *gpt2_last_residual(struct gpt2 *m);
/* Copies such an output, or its gradient. */
void gpt2_copy_residual(struct gpt2 *m, void *dst, const void *src);
/* The backward pass: head, layers in reverse order, embedding. The gradient between them is in
 * m->acts.dresidual (R, C). Gradients of parameters are added to m->grads, or stored (m->stores). */
void gpt2_head_backward(struct gpt2 *m);
void gpt2_layer_backward(struct gpt2 *m, int64_t l);
void gpt2_embed_backward(struct gpt2 *m);

/* Sends the sum of the losses to the host, and starts a new sum. */
int gpt2_send_loss(struct gpt2 *m);
/* Waits for the sum that was sent last. */
int gpt2_take_loss(struct gpt2 *m, double *loss);

#endif
