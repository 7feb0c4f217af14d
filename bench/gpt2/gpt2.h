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

/* fp32 whatever the dtype: statistics, and scratch. */
struct statistics {
    /* (L, R) each */
    float *ln1_mean, *ln1_rstd, *ln2_mean, *ln2_rstd;
    /* (R) each */
    float *lnf_mean, *lnf_rstd;
    /* (NH, T, T) of one row; none where attention is one piece */
    float *scores;
    /* (L, B, NH, T) and (B, NH, T), where it is one piece */
    float *logsum, *dots;
    /* (T, U) of one row, its rows padded */
    float *logits;
    /* (3, T) of one row: what parts tell each other of it (gpt2_vocab.h) */
    float *rows;
    /* of gpt2_layers.n_scratch elements */
    float *scratch;
};
#define GPT2_N_STATISTICS 12

struct gpt2_block {
    void *p;
    int64_t bytes;
};

/* What one micro-batch's forward left. Scratch is the same in all. */
struct gpt2_kept {
    struct activations acts;
    struct statistics stats;
    struct gpt2_block acts_memory, stats_memory;
};

struct gpt2 {
    struct gpt2_config config;
    /* rows of a batch; elements between rows of logits */
    int64_t B, ld_logits;
    /* borrowed */
    const struct place *place;
    const struct gpt2_layers *layers;
    /* attention in one piece; NULL: there is none for these heads */
    const struct gpt2_attention *attention;
    struct params params, grads;
    /* Backward stores the gradients of matrices (wte, qkvw, attprojw, fcw, fcprojw), whatever they held, and
     * adds to all others; else it adds to these, too. Set by the caller before a backward pass. */
    bool stores;
    /* With config.tp above 1, set before forward: which part this is; what adds x (n) up over the parts,
     * in place, on the place's stream; and what takes the sum, or the largest, of each of x (n), on the
     * host. And with config.sequence what makes dst of every part's n elements of src, in their order, and
     * what gives dst this part's n elements of the sum of src; dst or src may lie in the other, where it
     * belongs. 0 or a zr_err. */
    int32_t part;
    int (*sum)(void *arg, real *x, int64_t n);
    int (*reduce)(void *arg, float *x, int64_t n, bool largest);
    int (*gather)(void *arg, real *dst, const real *src, int64_t n);
    int (*scatter)(void *arg, real *dst, const real *src, int64_t n);
    void *sum_arg;
    /* one of kept, which are n_kept; embedded is the caller's where config.no_embedding is set */
    struct activations acts;
    struct statistics stats;
    struct gpt2_kept *kept;
    int64_t n_kept;
    /* (B, T), of each token; their mean, summed over micro-batches */
    double *losses, *loss;

    /* What the caller fills in before forward, (B, T) each, after gpt2_next_batch. */
    int32_t *tokens, *targets;
    /* Of the host, so that one is filled while the other is on its way, and the device's. */
    struct gpt2_batch staged[2], batch;
    /* the one of staged that is filled next */
    int slot;
    /* staged[i] may be written again */
    struct zr_event *sent[2];
    /* (V + 1) scratch of sorting a batch, on the host */
    int32_t *count;
    /* loss, on the host */
    double *loss_out;
    /* loss_out is there */
    struct zr_event *loss_sent;

    struct gpt2_block params_memory, grads_memory, losses_memory, batch_memory;
    /* memory of host_alloc */
    struct gpt2_block staged_memory;
    /* the first failure, kept until it is asked for */
    int err;
    /* borrowed; NULL: nobody asks where the time goes */
    struct profile *profile;
};

/* R: of what lies between products. */
static inline int64_t gpt2_own_rows(const struct gpt2 *m)
{
    return m->B * m->config.context / (m->config.sequence ? m->config.tp : 1);
}

/* Takes memory for tokens, and for the activations of a micro-batch. Returns 0 or a zr_err; on failure
 * nothing is held. */
int gpt2_open(struct gpt2 *m, const struct gpt2_config *config, int64_t B, const struct place *place);
/* Takes memory for the activations of n micro-batches in all, whose forwards are done before the first one's
 * backward is. Returns 0 or a zr_err. */
int gpt2_keep(struct gpt2 *m, int64_t n);
/* Takes memory for the parameters too, drawn as below, and for the gradients, zeroed: not needed where
 * libzero hands them out. The first waits. */
int gpt2_open_params(struct gpt2 *m, uint64_t seed);
int gpt2_open_grads(struct gpt2 *m);
void gpt2_close(struct gpt2 *m);
/* Of all micro-batches that are kept, and their scratch; without statistics. */
int64_t gpt2_activation_bytes(const struct gpt2 *m);

/* GPT-2's first values of elements [first, first + n) of tensor t, as struct gpt2_params counts, to x of the
 * host: normal 0.02, residual projections by 1/sqrt(2L) smaller, norms 1, biases 0. They follow from seed and
 * from the element's number in the whole model alone. */
void gpt2_draw(const struct gpt2_config *config, uint64_t seed, int t, int64_t first, int64_t n, real *x);

/* Points m->tokens and m->targets at memory that may be filled in. To be called before each micro-batch;
 * waits until the batch before the last has been copied. Returns 0 or a zr_err. */
int gpt2_next_batch(struct gpt2 *m);
/* Sends what was filled in to the place, for all of the calls below. */
void gpt2_send_batch(struct gpt2 *m);
/* What follows is of the i-th (from 0) of the micro-batches that are kept at a time. */
void gpt2_turn_to(struct gpt2 *m, int64_t i);

/* One micro-batch: embed, each layer in turn, head. The head adds the mean loss over B*T tokens (to a
 * multiple of 2^-36) to those of the micro-batches before. */
void gpt2_embed_forward(struct gpt2 *m);
void gpt2_layer_forward(struct gpt2 *m, int64_t l);
void gpt2_head_forward(struct gpt2 *m);
/* The output of the last layer here, (B, T, C). */
real *gpt2_last_residual(struct gpt2 *m);
/* One such, or its gradient. */
void gpt2_copy_residual(struct gpt2 *m, void *dst, const void *src);
/* And back: head, layers reversed, embed. The gradient of what is between them is at m->acts.dresidual (B, T,
 * C). Those of parameters are added to m->grads, or stored (m->stores). */
void gpt2_head_backward(struct gpt2 *m);
void gpt2_layer_backward(struct gpt2 *m, int64_t l);
void gpt2_embed_backward(struct gpt2 *m);

/* Sends the sum of the losses to the host, and begins a new one. */
int gpt2_send_loss(struct gpt2 *m);
/* *loss: the sum sent last. Waits for it. */
int gpt2_take_loss(struct gpt2 *m, double *loss);

#endif
