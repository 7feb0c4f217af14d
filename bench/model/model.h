/* SPDX-License-Identifier: Apache-2.0 */
/* model.h: a GPT-2 model as a C program would write it: structs of pointers into flat buffers, with one
 * tensor per kind that is stacked over the layers. Layer l of qkvw is at params.qkvw + l*3*C*C.
 *
 * This code does not use libzero. train.c calls it layer by layer, between brackets if the model is wrapped.
 * It is compiled once per dtype (model_real.h). The same source runs on the host and on a GPU. Memory belongs
 * to the memory of struct compute's device, and work goes to its stream. On the host, work is done when a
 * call returns. Calls wait for a GPU only where their comment says so.
 *
 * Sizes: B rows, T tokens each, C channels, NH heads, L layers, V token ids. The row's whole length is
 * config.context. With context parallelism (config.cp) each rank has T = context / cp tokens of every row,
 * and only attention needs those of other ranks (context.h). Without it, T is context.
 *
 * With tensor parallelism (config.tp), a rank has some of the heads. It has A of the C channels between qkv
 * and the projection, F of the 4*C of the MLP, and U of the V token ids. Position embeddings, norms and the
 * biases of projections are replicated. sum() adds the ranks' results of projections and embeddings.
 *
 * With config.sequence (sequence parallelism), a rank has only R = B*T / config.tp rows of embeddings, sums
 * and norms. Before a product, gather() collects all rows. After it, scatter() sums and distributes them.
 * Without it, R is B*T. */
#ifndef ZERO_BENCH_MODEL_H
#define ZERO_BENCH_MODEL_H

#include "bench/model/context.h"
#include "bench/model/layers.h"
#include "bench/model/model_config.h"
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
 *     shared               buffers of attention, with config.cp (model_cp_room)
 *
 * If config.two_parts is set, a backward pass comes in two parts (enum model_computes). Each micro-batch then
 * has its own dqkv and dfch, with L such arrays in each, and
 *
 *     kept_grads           (4*L + 2, R, C) gradients that the first part of backward leaves for the second:
 *                          four of each layer, one of the head and one of the embedding
 *
 * Arrays of these three begin model_apart(n) elements apart. So each is aligned as a single array is, because
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
    /* (L, B, NH, T), (B, NH, T) and model_attention_scratch() floats. */
    float *logsum, *dots, *attention;
    /* (T, U) of one row, its rows padded. */
    float *logits;
    /* (3, T) of one row: values that the tensor-parallel ranks exchange (vocab.h). */
    float *rows;
    /* (model_layers.n_scratch) */
    float *scratch;
    /* Buffers of attention, with config.cp (model_cp_room). */
    float *shared;
};
#define GPT2_N_STATISTICS 13

struct model_block {
    void *p;
    int64_t bytes;
};

/* The results of one micro-batch's forward. All micro-batches share the buffers of backward, but with
 * config.two_parts each has its own dqkv, dfch and kept_grads. */
struct model_kept {
    struct activations acts;
    struct statistics stats;
    struct model_block acts_memory, stats_memory;
};

/* What backward computes: everything; or, with config.two_parts, the gradients of inputs, which need the
 * parameters only, and later of the same micro-batch those of weights, which need no parameters. */
enum model_computes { MODEL_ALL, MODEL_INPUTS, MODEL_WEIGHTS };

struct model {
    struct model_config config;
    /* Rows of a batch; distance between rows of logits in elements. */
    int64_t B, ld_logits;
    /* Borrowed. */
    const struct compute *compute;
    const struct model_layers *layers;
    struct params params, grads;
    /* Backward stores the gradients of matrices (wte, qkvw, attprojw, fcw, fcprojw) and adds all others. If
     * false, it adds all. Set by the caller before a backward pass. */
    bool stores;
    /* Set by the caller before a backward pass. */
    enum model_computes computes;
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
    struct model_cp cp;
    /* The current one of kept[n_kept]. If config.no_embedding is set, embedded is the caller's. */
    struct activations acts;
    struct statistics stats;
    struct model_kept *kept;
    int64_t n_kept;
    /* (B, T) The loss of each token; the sum of their means over micro-batches. */
    double *losses, *loss;

    /* (B, T) each. After model_next_batch and before forward the caller fills in tokens and targets. With
     * config.documents it fills in document_start (B, context), and positions, which else are those of the
     * row. */
    int32_t *tokens, *targets, *positions, *document_start;
    /* Two host buffers, so that one is filled while the other is copied, and the device's buffer. */
    struct model_batch staged[2], batch;
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

    struct model_block params_memory, grads_memory, losses_memory, batch_memory;
    /* Memory of host_alloc. */
    struct model_block staged_memory;
    /* The first failure, kept until the caller reads it. */
    int err;
    /* Borrowed; NULL: no profile. */
    struct profile *profile;
};

/* B*T, the tokens of a micro-batch that this rank has. */
static inline int64_t model_own_tokens(const struct model *m)
{
    return m->B * model_own_context(&m->config);
}

/* R, the rows between products. */
static inline int64_t model_own_rows(const struct model *m)
{
    return model_own_tokens(m) / (m->config.sequence ? m->config.tp : 1);
}

/* Allocates memory for tokens and for the activations of one micro-batch. Returns 0 or a zero_err; on failure
 * nothing is held. */
int model_open(struct model *m, const struct model_config *config, int64_t B, const struct compute *compute);
/* Allocates activations for n micro-batches in all, if n forwards run before the first backward. Returns 0 or
 * a zero_err. */
int model_keep(struct model *m, int64_t n);
/* Allocate parameters with initial values, and zeroed gradients. They are not needed if libzero provides
 * them. model_open_params waits for the GPU. */
int model_open_params(struct model *m, uint64_t seed);
int model_open_grads(struct model *m);
void model_close(struct model *m);
/* Bytes of all kept micro-batches and the buffers, without statistics but with the buffers of cp. */
int64_t model_activation_bytes(const struct model *m);

/* Writes GPT-2's initial values of elements [first, first + n) of tensor t to x on the host. Tensors are
 * numbered as in struct params. Weights are normal with deviation 0.02, in residual projections smaller by
 * 1/sqrt(2L); norms are 1 and biases 0. The values depend only on seed and on the element's number in the
 * whole model. */
void gpt2_draw(const struct model_config *config, uint64_t seed, int t, int64_t first, int64_t n, real *x);

/* Points m->tokens and the arrays beside it at a buffer to fill in. Call it before each micro-batch. It waits
 * until the batch before the last was copied. Returns 0 or a zero_err. */
int model_next_batch(struct model *m);
/* Copies the filled buffer to the device, for all calls below. */
void model_send_batch(struct model *m);
/* Selects the i-th kept micro-batch for the calls below. */
void model_turn_to(struct model *m, int64_t i);

/* Forward of one micro-batch: embed, each layer in turn, head. The head adds the mean loss over B*T tokens,
 * rounded to a multiple of 2^-36, to the losses of the previous micro-batches. */
void gpt2_embed_forward(struct model *m);
void gpt2_layer_forward(struct model *m, int64_t l);
void gpt2_head_forward(struct model *m);
/* The output (B, T, C) of the last layer on this rank. */
real *model_last_residual(struct model *m);
/* Copies such an output, or its gradient. */
void model_copy_residual(struct model *m, void *dst, const void *src);
/* Backward: head, layers in reverse, embed. Between them, the gradient is at m->acts.dresidual (B, T, C),
 * which the part for weights does not use. Gradients of parameters are added to m->grads, or stored
 * (m->stores). */
void gpt2_head_backward(struct model *m);
void gpt2_layer_backward(struct model *m, int64_t l);
void gpt2_embed_backward(struct model *m);

/* Starts to copy the sum of the losses to the host, and begins a new sum. */
int model_send_loss(struct model *m);
/* Waits for the sum that was sent last, and returns it in *loss. */
int model_take_loss(struct model *m, double *loss);

#endif
