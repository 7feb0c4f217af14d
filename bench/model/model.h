/* SPDX-License-Identifier: Apache-2.0 */
/* model.h: a transformer as an ordinary C program would write it: structs of pointers into flat buffers. Each
 * kind of weight is one tensor, stacked over the layers.
 *
 * struct model has what all models share: batches, activations between layers, kept micro-batches, the loss,
 * and the collectives of tensor and context parallelism. Each kind of model, such as bench/gpt2, adds a
 * struct for its tensors and for the activations inside its layers. struct model_ops and struct model_passes
 * are its tables of functions.
 *
 * This code does not use libzero. train.c calls it layer by layer, between brackets if the model is wrapped.
 * It is compiled once per dtype (model_real.h). The same source runs on the host and on a GPU. All memory is
 * that of the device in struct compute, and all work is queued on its stream. On the host, the work is done
 * when a call returns. A call waits for a GPU only if its comment says so.
 *
 * The letters in the shapes are:
 *
 *     B, T    rows of a micro-batch, and tokens of each row that this rank has
 *     C, L    channels, layers
 *     NH, HS  attention heads, channels of a head
 *     A, K    channels of all queries (A = NH*HS), and of all keys. Attention's output has A channels, and
 *             values have K. A may be smaller or larger than C.
 *     F       channels inside the MLP
 *     V, U    token ids, and those that this rank has
 *     R       rows of C channels that this rank has between products
 *
 * A row of qkv has A + 2*K elements: the queries, keys and values of all heads. The whole length of a row is
 * config.context. With context parallelism (config.cp), each rank has T = context / cp tokens of every row,
 * and only attention needs those of other ranks (context.h). Without it, T is context.
 *
 * With tensor parallelism (config.tp), a rank has some of the heads. A, K, F and U are then this rank's
 * shares of the channels and of the token ids. Norms and the biases of projections are replicated. sum() adds
 * up the ranks' results of projections and embeddings.
 *
 * With sequence parallelism (config.sequence), a rank has only R = B*T / config.tp rows of embeddings,
 * residuals and norms. Before a product, gather() collects the rows of all ranks. After it, scatter() sums
 * the ranks' results and distributes the rows. Without sequence parallelism, R is B*T. */
#ifndef ZERO_BENCH_MODEL_H
#define ZERO_BENCH_MODEL_H

#include "bench/model/context.h"
#include "bench/model/layers.h"
#include "bench/model/model_config.h"
#include "bench/train/profile.h"

/* Activations that every model has. Forward keeps these for backward:
 *
 *     embedded             (R, C)
 *     residual             (L, R, C), the output of each layer
 *     dlogits              (B, T, U), rows padded: the gradient of the loss, computed in forward
 *
 * These are buffers of backward:
 *
 *     dresidual            (R, C)
 *     dbtc                 (B, T, C) or (B, T, A)
 *     dbias                (the largest of 4*C, A + 2*K and F)
 *     all                  (B, T, C) if R is not B*T: the rows of all ranks, also used in forward
 *     shared               buffers of attention, with config.cp (model_cp_room)
 *
 * If config.two_parts is set, a backward pass comes in two parts (enum model_computes). Each micro-batch then
 * also has
 *
 *     kept_grads           (4*L + 2, R, C) gradients that the first part of backward keeps for the second.
 *                          Numbers 4*l to 4*l + 3 belong to layer l, 4*L to the head and 4*L + 1 to the
 *                          embedding.
 *
 * The arrays of kept_grads, and the activations inside layers, begin model_apart(n) elements apart, where n
 * is their size. So each is aligned like a separately allocated array: the alignment may decide in which
 * order a GPU adds up.
 *
 * With config.recompute, each micro-batch keeps only embedded and residual. The activations inside a layer
 * exist once, and backward computes them again (model_layer_backward). If a backward pass comes in two parts,
 * the second part has no parameters to compute them with. So between the two parts, a micro-batch has a block
 * of memory for the activations inside all layers and for kept_grads (model_kept.between). */
struct model_activations {
    real *embedded, *residual, *dlogits;
    real *dresidual, *dbtc, *dbias, *all, *shared, *kept_grads;
};
#define MODEL_N_ACTIVATIONS 9

/* Statistics and buffers in fp32, whatever the dtype. NH counts the rank's own heads. */
struct model_statistics {
    /* logsum (L, B, NH, T) and dots (B, NH, T): see attention.h. attention: a buffer of
     * model_attention_scratch() floats. */
    float *logsum, *dots, *attention;
    /* (T, U) The logits of one row of the batch, padded. */
    float *logits;
    /* (3, T) For one row of the batch: values that the tensor-parallel ranks exchange (vocab.h). */
    float *rows;
    /* The buffer of the layer table, of model_layers.n_scratch() floats. */
    float *scratch;
    /* Buffers of attention, with config.cp (model_cp_room). */
    float *shared;
};
#define MODEL_N_STATISTICS 7

/* The most activations, and the most statistics, that a kind of model may add. */
#define MODEL_MAX_ARRAYS 24

struct model_block {
    void *p;
    int64_t bytes;
};

/* How many arrays of each sort a block of memory has. A kind of model needs this for the sizes of the arrays
 * that it adds. */
struct model_counts {
    /* The number of layers whose activations and statistics the block holds. first_part is the same number
     * for arrays that only the first part of backward reads, the part for gradients of inputs. Each layer's
     * activations begin model_apart(n) elements after those of the previous layer. */
    int64_t layers, first_part;
    /* 1: the block holds the activations and statistics of the head. */
    int64_t head;
    /* The number of layers whose inner gradients the block holds. These are buffers of backward. */
    int64_t gradients;
    /* 1: the block holds the buffers that all micro-batches share. */
    int64_t once;
};

/* The results of one micro-batch's forward, and pointers to the buffers that micro-batches share. */
struct model_kept {
    /* The pointers of struct model_activations or model_statistics, and those that the kind of model adds. */
    void *acts[MODEL_N_ACTIVATIONS + MODEL_MAX_ARRAYS], *stats[MODEL_N_STATISTICS + MODEL_MAX_ARRAYS];
    struct model_block acts_memory, stats_memory;
    /* With config.recompute and config.two_parts. In an element of model.kept: the number of the block of
     * model.between that the micro-batch holds between the two parts of its backward pass, counted from 1, or
     * 0 for none. In an element of model.between: 1 if a micro-batch holds this block. */
    int64_t between;
};

/* What a backward pass computes. MODEL_ALL is the whole pass. With config.two_parts it may come in two parts:
 * MODEL_INPUTS computes the gradients of inputs, for which the parameters are needed. Later, for the same
 * micro-batch, MODEL_WEIGHTS computes the gradients of weights, for which no parameters are needed. */
enum model_computes { MODEL_ALL, MODEL_INPUTS, MODEL_WEIGHTS };

struct model;

/* The functions of a kind of model, for one dtype. After the first failure they do nothing (model.err). */
struct model_passes {
    /* The size of the struct in model.own, and the offsets of four structs in it, which consist of pointers
     * only. Parameters and gradients are in the order of the numbers that ops->describe gives, activations
     * and statistics in the order of sizes(). */
    size_t own_bytes, params_at, grads_at, acts_at, stats_at;
    /* The number of activations and of statistics. */
    int32_t n_acts, n_stats;
    /* Writes the number of elements of each activation and each statistic in a block of memory that `n`
     * describes. An array with 0 elements uses the memory of another block. */
    void (*sizes)(const struct model *m, const struct model_counts *n, int64_t *acts, int64_t *stats);
    /* Called by model_open when the memory is allocated, unless NULL. Returns 0 or a zero_err. */
    int (*open)(struct model *m);
    /* The passes; model_embed_forward and the functions after it explain them. */
    void (*embed_forward)(struct model *m), (*embed_backward)(struct model *m);
    void (*layer_forward)(struct model *m, int64_t l), (*layer_backward)(struct model *m, int64_t l);
    void (*head_forward)(struct model *m), (*head_backward)(struct model *m);
};

struct model {
    struct model_config config;
    /* Rows of a micro-batch, and the distance between rows of logits in elements. */
    int64_t B, ld_logits;
    /* Borrowed. */
    const struct compute *compute;
    const struct model_layers *layers;
    const struct model_passes *passes;
    /* The pointers of this kind of model (passes->own_bytes), such as struct gpt2. */
    void *own;
    /* Backward stores the gradients of matrices, and adds all others to what is there. If false, it adds all
     * of them. Set by the caller before a backward pass. */
    bool stores;
    /* What the backward pass computes (model_begin_backward). */
    enum model_computes computes;
    /* Set while backward calls layer_forward to compute a layer's activations again (config.recompute).
     * layer_forward then leaves out the layer's output, because forward has kept it. */
    bool recomputes;
    /* The weight of a token's loss in gradients; set by the caller before a forward pass. 0: 1 / (B*T). */
    float loss_scale;
    /* Forward computes no loss, but leaves the logits of the last row for model_take_logits. Set by the
     * caller. */
    bool only_logits;
    /* Tensor parallelism. The caller sets these before forward if config.tp is above 1. The functions are
     * collectives on the stream of `compute`, and return 0 or a zero_err.
     *   part     this rank's number in the tensor-parallel group
     *   sum      all-reduce: x (n) becomes the sum over the ranks
     *   reduce   all-reduce: each element of x (n) becomes the sum or, with `largest`, the maximum
     *   gather   all-gather: concatenates every rank's n elements of src in dst (with config.sequence)
     *   scatter  reduce-scatter: writes this rank's n elements of the sum of src to dst (the same)
     * For gather and scatter, the smaller array may lie at its position in the larger one. */
    int32_t part;
    int (*sum)(void *arg, real *x, int64_t n);
    int (*reduce)(void *arg, float *x, int64_t n, bool largest);
    int (*gather)(void *arg, real *dst, const real *src, int64_t n);
    int (*scatter)(void *arg, real *dst, const real *src, int64_t n);
    void *sum_arg;
    /* Set before the first batch if config.cp is above 1. */
    struct model_cp cp;
    /* The arrays of the current micro-batch, kept[current]. If config.no_embedding is set, acts.embedded
     * belongs to the caller. */
    struct model_activations acts;
    struct model_statistics stats;
    struct model_kept *kept;
    int64_t n_kept, current;
    /* With config.recompute and config.two_parts: blocks for micro-batches that are between the two parts of
     * their backward pass. The list grows when no block is free. */
    struct model_kept *between;
    int64_t n_between;
    /* losses (B, T): the loss of each token. loss: the sum, over micro-batches, of the mean of losses. */
    double *losses, *loss;

    /* (B, T) each; document_start is (B, context). After model_next_batch and before forward, the caller
     * fills in tokens and targets. A target may be MODEL_LEFT_OUT. With config.documents, the caller also
     * fills in document_start and positions. Otherwise model_next_batch sets positions, which count from the
     * beginning of the row. */
    int32_t *tokens, *targets, *positions, *document_start;
    /* Two host buffers, so that one is filled while the other is copied, and the device's buffer. */
    struct model_batch staged[2], batch;
    /* The next buffer of staged to fill. */
    int slot;
    /* When sent[i] is complete, staged[i] may be written again. */
    struct zr_event *sent[2];
    /* A count for each token id and each position, to sort a batch on the host. */
    int32_t *count;
    /* The loss, on the host. */
    double *loss_out;
    /* When it is complete, loss_out is valid. */
    struct zr_event *loss_sent;

    struct model_block params_memory, grads_memory, losses_memory, batch_memory;
    /* Host memory, from the device's host_alloc. */
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

/* R, the rows that this rank has between products. */
static inline int64_t model_own_rows(const struct model *m)
{
    return model_own_tokens(m) / (m->config.sequence ? m->config.tp : 1);
}

/* Allocates memory for tokens and for the activations of one micro-batch. Returns 0 or a zero_err; on failure
 * everything is freed. */
int model_open(struct model *m, const struct model_config *config, int64_t B, const struct compute *compute);
/* Allocates activations until there are those of n micro-batches. A program calls it if n forward passes run
 * before the first backward pass. Returns 0 or a zero_err. */
int model_keep(struct model *m, int64_t n);
/* Allocate parameters with initial values, and zeroed gradients. They are not needed if libzero provides
 * them. model_open_params waits for the GPU. */
int model_open_params(struct model *m, uint64_t seed);
int model_open_grads(struct model *m);
void model_close(struct model *m);
/* The model's pointers to parameters and gradients, for ops->describe. */
struct model_pointers model_pointers_of(const struct model *m);
/* Bytes of activations of all kept micro-batches, and of the buffers. Of the arrays in fp32, only the buffers
 * of context parallelism are included. */
int64_t model_activation_bytes(const struct model *m);

/* Writes the initial values of elements [first, first + n) of tensor t to x, on the host. struct model_start
 * gives their distribution. They depend only on seed and on the element's number in the whole model. */
void model_draw(const struct model_config *config, uint64_t seed, int t, int64_t first, int64_t n, real *x);

/* Points m->tokens, targets, positions and document_start at a buffer to fill in. Call it before each
 * micro-batch. The two buffers alternate: it waits until this buffer's last batch has been copied. Returns 0
 * or a zero_err. */
int model_next_batch(struct model *m);
/* Copies the filled buffer to the device. The passes below use it. */
void model_send_batch(struct model *m);
/* Selects the i-th kept micro-batch for the calls below. */
void model_turn_to(struct model *m, int64_t i);

/* The forward pass of one micro-batch: embedding, each layer in turn, head. The head adds the mean loss over
 * B*T tokens, rounded to a multiple of 2^-36, to the sum of the previous micro-batches. */
static inline void model_embed_forward(struct model *m)
{
    m->passes->embed_forward(m);
}
static inline void model_layer_forward(struct model *m, int64_t l)
{
    m->passes->layer_forward(m, l);
}
static inline void model_head_forward(struct model *m)
{
    m->passes->head_forward(m);
}
/* The input (R, C) of layer l. For l = L, the input of the head. */
real *model_residual_before(struct model *m, int64_t l);
/* The output of the last layer on this rank. */
real *model_last_residual(struct model *m);
/* Copies R*C elements, such as the output of a layer or its gradient. */
void model_copy_residual(struct model *m, void *dst, const void *src);
/* The caller surrounds a backward pass of the current micro-batch, or one part of it, with these two calls.
 * Without config.two_parts they may be left out. If memory cannot be allocated, the error is in m->err. */
void model_begin_backward(struct model *m, enum model_computes computes);
void model_end_backward(struct model *m);
/* The backward pass: head, layers in reverse, embedding. Between these calls, m->acts.dresidual (R, C) holds
 * the gradient; the part for gradients of weights does not use it. Gradients of parameters are added, or
 * stored (m->stores). */
static inline void model_head_backward(struct model *m)
{
    m->passes->head_backward(m);
}
static inline void model_layer_backward(struct model *m, int64_t l)
{
    if (m->config.recompute && m->computes != MODEL_WEIGHTS) {
        m->recomputes = true;
        m->passes->layer_forward(m, l);
        m->recomputes = false;
    }
    m->passes->layer_backward(m, l);
}
static inline void model_embed_backward(struct model *m)
{
    m->passes->embed_backward(m);
}

/* With only_logits, copies the logits of position t of the last row to out (V), on the host. Logits of ids
 * that other tensor-parallel ranks have become 0. Waits for the model's stream. */
int model_take_logits(struct model *m, int64_t t, float *out);
/* Starts to copy the sum of the losses to the host, and begins a new sum. */
int model_send_loss(struct model *m);
/* Waits for the copy that was started last, and writes the sum to *loss. */
int model_take_loss(struct model *m, double *loss);

#endif
