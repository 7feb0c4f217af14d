/* SPDX-License-Identifier: Apache-2.0 */
/* model.h: a transformer as a C program would write it: structs of pointers into flat buffers, with one
 * tensor per kind that is stacked over the layers.
 *
 * struct model has what all models share: batches, activations between layers, kept micro-batches, the loss,
 * and the collectives of tensor and context parallelism. Each kind of model, such as bench/gpt2, adds a
 * struct for its tensors and for the activations inside its layers. struct model_ops and struct model_passes
 * are its tables of functions.
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
 * Queries and attention's output have A = NH*HS channels, keys and values K each, and the MLP has F inside. A
 * may be smaller or larger than C. A row of qkv has A + 2*K elements: queries, keys and values of all heads.
 *
 * With tensor parallelism (config.tp), a rank has some of the heads. A, K, F and U are then its shares of
 * these channels and of the V token ids. Norms and the biases of projections are replicated. sum() adds the
 * ranks' results of projections and embeddings.
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

/* Activations that every model has. Forward keeps for backward:
 *
 *     embedded             (R, C)
 *     residual             (L, R, C), the output of each layer
 *     dlogits              (B, T, U), rows padded: the gradient of the loss, computed in forward
 *
 * and buffers of backward are:
 *
 *     dresidual            (R, C)
 *     dbtc                 (B, T, C) or (B, T, A)
 *     dbias                (the largest of 4*C, A + 2*K and F)
 *     all                  (B, T, C) if R is not B*T: the rows of all ranks, also in forward
 *     shared               buffers of attention, with config.cp (model_cp_room)
 *
 * If config.two_parts is set, a backward pass comes in two parts (enum model_computes). Each micro-batch then
 * has
 *
 *     kept_grads           (4*L + 2, R, C) gradients that the first part of backward leaves for the second:
 *                          4*l to 4*l + 3 are of layer l, 4*L of the head and 4*L + 1 of the embedding
 *
 * These begin model_apart(R*C) elements apart. So each is aligned as a single array is, because the alignment
 * may decide how a GPU adds up. So do the activations inside layers.
 *
 * With config.recompute, layers have only embedded and residual for each micro-batch. The activations inside
 * a layer exist once, and backward computes them again (model_layer_backward). If a backward pass comes in
 * two parts, the second part has no parameters to compute them with. So from the first part to the second, a
 * micro-batch has a block of memory for what all layers leave, and for kept_grads (model_kept.between). */
struct model_activations {
    real *embedded, *residual, *dlogits;
    real *dresidual, *dbtc, *dbias, *all, *shared, *kept_grads;
};
#define MODEL_N_ACTIVATIONS 9

/* Statistics and buffers in fp32, whatever the dtype. NH counts the rank's own heads. */
struct model_statistics {
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
#define MODEL_N_STATISTICS 7

/* Most activations, and most statistics, that a kind of model adds. */
#define MODEL_MAX_ARRAYS 24

struct model_block {
    void *p;
    int64_t bytes;
};

/* How many arrays of each sort a block of memory has, for the sizes that a kind of model adds. */
struct model_counts {
    /* Layers whose activations and statistics inside a layer it has; and the same of those that the part of
     * backward for gradients of weights does not read. A layer's activations begin model_apart(n) elements
     * after those of the layer before. */
    int64_t layers, first_part;
    /* 1: it has those of the head. */
    int64_t head;
    /* The same of gradients inside a layer, which are buffers of backward. */
    int64_t gradients;
    /* 1: it has the buffers that all micro-batches share. */
    int64_t once;
};

/* The results of one micro-batch's forward, and pointers to the buffers that micro-batches share. */
struct model_kept {
    /* The pointers of struct model_activations or model_statistics, and those that the kind of model adds. */
    void *acts[MODEL_N_ACTIVATIONS + MODEL_MAX_ARRAYS], *stats[MODEL_N_STATISTICS + MODEL_MAX_ARRAYS];
    struct model_block acts_memory, stats_memory;
    /* With config.recompute: the number of the block of model.between that a micro-batch has between the two
     * parts of its backward pass, counted from 1. 0: none. Of such a block: 1 if a micro-batch has it. */
    int64_t between;
};

/* What backward computes: everything; or, with config.two_parts, the gradients of inputs, which need the
 * parameters only, and later of the same micro-batch those of weights, which need no parameters. */
enum model_computes { MODEL_ALL, MODEL_INPUTS, MODEL_WEIGHTS };

struct model;

/* What a kind of model computes, for one dtype. After the first failure a pass does nothing (model.err). */
struct model_passes {
    /* The struct of pointers in model.own, and where in it are four structs that consist of pointers only:
     * its parameters and their gradients, in the order of the numbers that ops->describe gives, its
     * activations and its statistics, in the order of sizes(). */
    size_t own_bytes, params_at, grads_at, acts_at, stats_at;
    int32_t n_acts, n_stats;
    /* Writes how many elements each of its activations and statistics has in a block with n of them. Arrays
     * of no elements are shared with another block. */
    void (*sizes)(const struct model *m, const struct model_counts *n, int64_t *acts, int64_t *stats);
    /* Called once its memory is there, if not NULL. Returns 0 or a zero_err. */
    int (*open)(struct model *m);
    /* See below. */
    void (*embed_forward)(struct model *m), (*embed_backward)(struct model *m);
    void (*layer_forward)(struct model *m, int64_t l), (*layer_backward)(struct model *m, int64_t l);
    void (*head_forward)(struct model *m), (*head_backward)(struct model *m);
};

struct model {
    struct model_config config;
    /* Rows of a batch; distance between rows of logits in elements. */
    int64_t B, ld_logits;
    /* Borrowed. */
    const struct compute *compute;
    const struct model_layers *layers;
    const struct model_passes *passes;
    /* The pointers of this kind of model (passes->own_bytes), such as struct gpt2. */
    void *own;
    /* Backward stores the gradients of matrices and adds all others. If false, it adds all. Set by the caller
     * before a backward pass. */
    bool stores;
    /* What the backward pass computes (model_begin_backward). */
    enum model_computes computes;
    /* layer_forward runs in backward, to compute the layer's activations again (config.recompute). It must
     * leave out the layer's output, which forward has kept. */
    bool recomputes;
    /* The weight of a token's loss in gradients; set by the caller before a forward pass. 0: 1 / (B*T). */
    float loss_scale;
    /* Forward computes no loss, but leaves the logits of the last row for model_take_logits. Set by the
     * caller. */
    bool only_logits;
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
    struct model_activations acts;
    struct model_statistics stats;
    struct model_kept *kept;
    int64_t n_kept, current;
    /* With config.recompute, activations of all layers for as many micro-batches as were between the two
     * parts of a backward pass at the same time. */
    struct model_kept *between;
    int64_t n_between;
    /* (B, T) The loss of each token; the sum of their means over micro-batches. */
    double *losses, *loss;

    /* (B, T) each. After model_next_batch and before forward the caller fills in tokens and targets. Targets
     * may be MODEL_LEFT_OUT. With config.documents it fills in document_start (B, context), and positions,
     * which else are those of the row. */
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
/* Its pointers to parameters and gradients, for ops->describe. */
struct model_pointers model_pointers_of(const struct model *m);
/* Bytes of all kept micro-batches and the buffers, without statistics but with the buffers of cp. */
int64_t model_activation_bytes(const struct model *m);

/* Writes the initial values of elements [first, first + n) of tensor t to x on the host (model_start). They
 * depend only on seed and on the element's number in the whole model. */
void model_draw(const struct model_config *config, uint64_t seed, int t, int64_t first, int64_t n, real *x);

/* Points m->tokens and the arrays beside it at a buffer to fill in. Call it before each micro-batch. It waits
 * until the batch before the last was copied. Returns 0 or a zero_err. */
int model_next_batch(struct model *m);
/* Copies the filled buffer to the device, for all calls below. */
void model_send_batch(struct model *m);
/* Selects the i-th kept micro-batch for the calls below. */
void model_turn_to(struct model *m, int64_t i);

/* Forward of one micro-batch: embed, each layer in turn, head. The head adds the mean loss over B*T tokens,
 * rounded to a multiple of 2^-36, to the losses of the previous micro-batches. */
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
/* Copies such an output, or its gradient. */
void model_copy_residual(struct model *m, void *dst, const void *src);
/* Surround a backward pass of the current micro-batch, or one part of it. Without config.two_parts they may
 * be left out. A failure to allocate memory is in m->err. */
void model_begin_backward(struct model *m, enum model_computes computes);
void model_end_backward(struct model *m);
/* Backward: head, layers in reverse, embed. Between them, the gradient is at m->acts.dresidual (B, T, C),
 * which the part for weights does not use. Gradients of parameters are added, or stored (m->stores). */
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

/* With only_logits, copies the logits of position t of the last row to out, on the host. out (V) has zeros
 * for the ids of other tensor-parallel ranks. Waits for the model's stream. */
int model_take_logits(struct model *m, int64_t t, float *out);
/* Starts to copy the sum of the losses to the host, and begins a new sum. */
int model_send_loss(struct model *m);
/* Waits for the sum that was sent last, and returns it in *loss. */
int model_take_loss(struct model *m, double *loss);

#endif
