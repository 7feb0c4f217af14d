/* SPDX-License-Identifier: Apache-2.0 */
/* gpt2.h: a GPT-2 model as a C program would write it: structs of pointers into flat buffers, with one tensor
 * per kind that is stacked over the layers. Layer l of qkvw is at params.qkvw + l*3*C*C.
 *
 * This code does not use libzero. train.c calls it layer by layer, between brackets if the model is wrapped.
 * It is compiled once per dtype (gpt2_real.h). The same source runs on the host and on a GPU. Memory belongs
 * to the memory of struct compute's device, and work goes to its stream. On the host, work is done when a
 * call returns. Calls wait for a GPU only where their comment says so.
 *
 * Sizes: B rows, T tokens each, C channels, NH heads, L layers, V token ids. The row's whole length is
 * config.context. With context parallelism (config.cp) each rank has T = context / cp tokens of every row,
 * and only attention needs those of other ranks (gpt2_context.h). Without it, T is context.
 *
 * With tensor parallelism (config.tp), a rank has some of the heads. It has A of the C channels between qkv
 * and the projection, F of the 4*C of the MLP, and U of the V token ids. Position embeddings, norms and the
 * biases of projections are replicated. sum() adds the ranks' results of projections and embeddings.
 *
 * With config.sequence (sequence parallelism), a rank has only R = B*T / config.tp rows of embeddings, sums
 * and norms. Before a product, gather() collects all rows. After it, scatter() sums and distributes them.
 * Without it, R is B*T. */
#ifndef ZERO_BENCH_GPT2_H
#define ZERO_BENCH_GPT2_H

#include "bench/gpt2/gpt2_config.h"
#include "bench/gpt2/gpt2_context.h"
#include "bench/gpt2/gpt2_layers.h"
#include "bench/train/profile.h"

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
struct params {
    real *wte, *wpe;
    real *ln1w, *ln1b, *qkvw, *qkvb, *attprojw, *attprojb;
    real *ln2w, *ln2b, *fcw, *fcb, *fcprojw, *fcprojb;
    real *lnfw, *lnfb;
};
#define GPT2_N_TENSORS 16

/* Activations that forward keeps for backward:
 *
 *     embedded             (R, C)
 *     ln1                  (L, R, C)
 *     qkv                  (L, B, T, 3*A)
 *     atty                 (L, B, T, A)
 *     residual2, ln2       (L, R, C)
 *     fch, fch_gelu        (L, B, T, F)
 *     residual3            (L, R, C)
 *     lnf                  (R, C)
 *     dlogits              (B, T, U), rows padded: the gradient of the loss, computed in forward
 *
 * and buffers of backward:
 *
 *     dresidual            (R, C)
 *     dbtc                 (B, T, C)
 *     dqkv                 (B, T, 3*A)
 *     dfch                 (B, T, F)
 *     dbias                (4*C)
 *     all                  (B, T, C) if R is not B*T: the rows of all ranks, also in forward
 *     shared               buffers of attention, with config.cp (gpt2_cp_room)
 *
 * If config.two_parts is set, a backward pass comes in two parts (enum gpt2_computes). Each micro-batch then
 * has its own dqkv and dfch, with L such arrays in each, and
 *
 *     kept_grads           (4*L + 2, R, C) gradients that the first part of backward leaves for the second:
 *                          four of each layer, one of the head and one of the embedding
 *
 * Arrays of these three begin gpt2_apart(n) elements apart. So each is aligned as a single array is, because
 * the alignment may decide how a GPU adds up.
 *
 * NH counts the rank's own heads. */
struct activations {
    real *embedded;
    real *ln1, *qkv, *atty, *residual2;
    real *ln2, *fch, *fch_gelu, *residual3;
    real *lnf, *dlogits;
    real *dresidual, *dbtc, *dqkv, *dfch, *dbias, *all, *shared, *kept_grads;
};
#define GPT2_N_ACTIVATIONS 19

/* Statistics and buffers in fp32, whatever the dtype. */
struct statistics {
    /* (L, R) each. */
    float *ln1_mean, *ln1_rstd, *ln2_mean, *ln2_rstd;
    /* (R) each. */
    float *lnf_mean, *lnf_rstd;
    /* (L, B, NH, T), (B, NH, T) and gpt2_attention_scratch() floats. */
    float *logsum, *dots, *attention;
    /* (T, U) of one row, its rows padded. */
    float *logits;
    /* (3, T) of one row: values that the tensor-parallel ranks exchange (gpt2_vocab.h). */
    float *rows;
    /* (gpt2_layers.n_scratch) */
    float *scratch;
    /* Buffers of attention, with config.cp (gpt2_cp_room). */
    float *shared;
};
#define GPT2_N_STATISTICS 13

struct gpt2_block {
    void *p;
    int64_t bytes;
};

/* The results of one micro-batch's forward. All micro-batches share the buffers of backward, but with
 * config.two_parts each has its own dqkv, dfch and kept_grads. */
struct gpt2_kept {
    struct activations acts;
    struct statistics stats;
    struct gpt2_block acts_memory, stats_memory;
};

/* What backward computes: everything; or, with config.two_parts, the gradients of inputs, which need the
 * parameters only, and later of the same micro-batch those of weights, which need no parameters. */
enum gpt2_computes { GPT2_ALL, GPT2_INPUTS, GPT2_WEIGHTS };

struct gpt2 {
    struct gpt2_config config;
    /* Rows of a batch; distance between rows of logits in elements. */
    int64_t B, ld_logits;
    /* Borrowed. */
    const struct compute *compute;
    const struct gpt2_layers *layers;
    struct params params, grads;
    /* Backward stores the gradients of matrices (wte, qkvw, attprojw, fcw, fcprojw) and adds all others. If
     * false, it adds all. Set by the caller before a backward pass. */
    bool stores;
    /* Set by the caller before a backward pass. */
    enum gpt2_computes computes;
    /* The weight of a token's loss in gradients; set by the caller before a forward pass. 0: 1 / (B*T). */
    float loss_scale;
    /* Tensor parallelism; set before forward if config.tp is above 1. All functions return 0 or a zero_err.
     *   part     this rank's number
     *   sum      adds x (n) over the ranks, in place, on compute's stream
     *   reduce   takes the sum or the maximum of each element of x (n), in place, on compute's stream
     *   gather   concatenates every rank's n elements of src in dst (with config.sequence)
     *   scatter  writes this rank's n elements of the sum of src to dst (with config.sequence)
     * For gather and scatter, the smaller array may lie at its position in the larger one. */
    int32_t part;
    int (*sum)(void *arg, real *x, int64_t n);
    int (*reduce)(void *arg, float *x, int64_t n, bool largest);
    int (*gather)(void *arg, real *dst, const real *src, int64_t n);
    int (*scatter)(void *arg, real *dst, const real *src, int64_t n);
    void *sum_arg;
    /* Set before the first batch if config.cp is above 1. */
    struct gpt2_cp cp;
    /* The current one of kept[n_kept]. If config.no_embedding is set, embedded is the caller's. */
    struct activations acts;
    struct statistics stats;
    struct gpt2_kept *kept;
    int64_t n_kept;
    /* (B, T) The loss of each token; the sum of their means over micro-batches. */
    double *losses, *loss;

    /* (B, T) each. After gpt2_next_batch and before forward the caller fills in tokens and targets. Targets
     * may be GPT2_LEFT_OUT. With config.documents it fills in document_start (B, context), and positions,
     * which else are those of the row. */
    int32_t *tokens, *targets, *positions, *document_start;
    /* Two host buffers, so that one is filled while the other is copied, and the device's buffer. */
    struct gpt2_batch staged[2], batch;
    /* The next buffer of staged to fill. */
    int slot;
    /* When complete, staged[i] may be written again. */
    struct zr_event *sent[2];
    /* A count for each token id and each position, to sort a batch on the host. */
    int32_t *count;
    /* The loss, on the host. */
    double *loss_out;
    /* When complete, loss_out is valid. */
    struct zr_event *loss_sent;

    struct gpt2_block params_memory, grads_memory, losses_memory, batch_memory;
    /* Memory of host_alloc. */
    struct gpt2_block staged_memory;
    /* The first failure, kept until the caller reads it. */
    int err;
    /* Borrowed; NULL: no profile. */
    struct profile *profile;
};

/* B*T, the tokens of a micro-batch that this rank has. */
static inline int64_t gpt2_own_tokens(const struct gpt2 *m)
{
    return m->B * gpt2_own_context(&m->config);
}

/* R, the rows between products. */
static inline int64_t gpt2_own_rows(const struct gpt2 *m)
{
    return gpt2_own_tokens(m) / (m->config.sequence ? m->config.tp : 1);
}

/* Allocates memory for tokens and for the activations of one micro-batch. Returns 0 or a zero_err; on failure
 * nothing is held. */
int gpt2_open(struct gpt2 *m, const struct gpt2_config *config, int64_t B, const struct compute *compute);
/* Allocates activations for n micro-batches in all, if n forwards run before the first backward. Returns 0 or
 * a zero_err. */
int gpt2_keep(struct gpt2 *m, int64_t n);
/* Allocate parameters with initial values, and zeroed gradients. They are not needed if libzero provides
 * them. gpt2_open_params waits for the GPU. */
int gpt2_open_params(struct gpt2 *m, uint64_t seed);
int gpt2_open_grads(struct gpt2 *m);
void gpt2_close(struct gpt2 *m);
/* Bytes of all kept micro-batches and the buffers, without statistics but with the buffers of cp. */
int64_t gpt2_activation_bytes(const struct gpt2 *m);

/* Writes GPT-2's initial values of elements [first, first + n) of tensor t to x on the host. Tensors are
 * numbered as in struct params. Weights are normal with deviation 0.02, in residual projections smaller by
 * 1/sqrt(2L); norms are 1 and biases 0. The values depend only on seed and on the element's number in the
 * whole model. */
void gpt2_draw(const struct gpt2_config *config, uint64_t seed, int t, int64_t first, int64_t n, real *x);

/* Points m->tokens and the arrays beside it at a buffer to fill in. Call it before each micro-batch. It waits
 * until the batch before the last was copied. Returns 0 or a zero_err. */
int gpt2_next_batch(struct gpt2 *m);
/* Copies the filled buffer to the device, for all calls below. */
void gpt2_send_batch(struct gpt2 *m);
/* Selects the i-th kept micro-batch for the calls below. */
void gpt2_turn_to(struct gpt2 *m, int64_t i);

/* Forward of one micro-batch: embed, each layer in turn, head. The head adds the mean loss over B*T tokens,
 * rounded to a multiple of 2^-36, to the losses of the previous micro-batches. */
void gpt2_embed_forward(struct gpt2 *m);
void gpt2_layer_forward(struct gpt2 *m, int64_t l);
void gpt2_head_forward(struct gpt2 *m);
/* The output (B, T, C) of the last layer on this rank. */
real *gpt2_last_residual(struct gpt2 *m);
/* Copies such an output, or its gradient. */
void gpt2_copy_residual(struct gpt2 *m, void *dst, const void *src);
/* Backward: head, layers in reverse, embed. Between them, the gradient is at m->acts.dresidual (B, T, C),
 * which the part for weights does not use. Gradients of parameters are added to m->grads, or stored
 * (m->stores). */
void gpt2_head_backward(struct gpt2 *m);
void gpt2_layer_backward(struct gpt2 *m, int64_t l);
void gpt2_embed_backward(struct gpt2 *m);

/* Starts to copy the sum of the losses to the host, and begins a new sum. */
int gpt2_send_loss(struct gpt2 *m);
/* Waits for the sum that was sent last, and returns it in *loss. */
int gpt2_take_loss(struct gpt2 *m, double *loss);

#endif
