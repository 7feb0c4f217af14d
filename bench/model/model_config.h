/* SPDX-License-Identifier: Apache-2.0 */
/* model_config.h: the sizes of a model, what its kind says about them (struct model_ops), and the options
 * that choose a preset. */
#ifndef ZERO_BENCH_MODEL_CONFIG_H
#define ZERO_BENCH_MODEL_CONFIG_H

#include "bench/arguments.h"
#include "zero/zero.h"

#include <stdbool.h>

/* How the ranks of a context-parallel group share attention (context.h). */
enum model_cp_form { MODEL_CP_GATHER = 1, MODEL_CP_EXCHANGE, MODEL_CP_RING };
/* How a row's tokens are divided over ranks. The values are those of enum zero_cp_order. */
enum model_cp_order { MODEL_CP_CONTIGUOUS = 1, MODEL_CP_ZIGZAG };

struct hf_config;
struct model_ops;

struct model_config {
    /* The kind of model. */
    const struct model_ops *ops;
    /* Borrowed: what only a Llama-like model has. NULL: it is none. */
    const struct hf_config *hf;
    /* L in shapes. */
    int64_t layers;
    /* NH, attention heads. */
    int64_t heads;
    /* Heads of keys and values, a divisor of NH. 0: NH. */
    int64_t kv_heads;
    /* C. */
    int64_t channels;
    /* HS, channels of a head. 0: C / NH. */
    int64_t head_size;
    /* Channels inside the MLP. 0: 4*C. */
    int64_t hidden;
    /* Tokens in a row. */
    int64_t context;
    /* V, number of different tokens. */
    int64_t vocab;
    /* Tensor-parallel size, a divisor of both kinds of heads and of hidden. 0 and 1: none. */
    int64_t tp;
    /* Share of a target's probability that is spread over all V tokens, 0 to 1. */
    double label_smoothing;
    /* Sequence parallelism: with tp above 1, rows between products are split. tp divides B*T. */
    bool sequence;
    /* Context-parallel size: each rank has some tokens of every row. 0 and 1: none. */
    int64_t cp;
    /* enum model_cp_form, 0: MODEL_CP_GATHER; and enum model_cp_order, 0: MODEL_CP_ZIGZAG. */
    int cp_form, cp_order;
    /* With MODEL_CP_GATHER, heads of queries whose keys and values are gathered at a time: a divisor of a
     * rank's heads, and a multiple of those that share a head of keys. 0: all of them. */
    int64_t cp_heads;
    /* A row consists of documents, which do not see each other. */
    bool documents;
    /* On a pipeline stage: the number of its first layer, and whether embedding and head are missing. */
    int64_t first_layer;
    bool no_embedding, no_head;
    /* A backward pass may come in two parts, which takes memory for what the first leaves for the second. */
    bool two_parts;
    /* Forward keeps only the inputs of layers. Backward computes a layer's other activations again. */
    bool recompute;
    /* Adapters (bench/llama/lora.h): their rank, alpha, and which matrices have one, as a bit 1 << enum
     * lora_target each. Then only adapters are trained. Rank 0: there are none, and all weights are
     * trained. */
    int64_t lora_rank;
    double lora_alpha;
    uint32_t lora_targets;
};

/* T, the tokens of a row that a rank has. */
static inline int64_t model_own_context(const struct model_config *c)
{
    return c->cp > 1 ? c->context / c->cp : c->context;
}

/* U, the token ids of a tensor-parallel rank. The last rank may have unused ids at the end. */
static inline int64_t model_part_vocab(const struct model_config *c)
{
    return c->tp > 1 ? (c->vocab + c->tp - 1) / c->tp : c->vocab;
}

/* n divided over the tensor-parallel ranks. */
static inline int64_t model_part(const struct model_config *c, int64_t n)
{
    return c->tp > 1 ? n / c->tp : n;
}

/* HS. */
static inline int64_t model_head_size(const struct model_config *c)
{
    return c->head_size ? c->head_size : c->channels / c->heads;
}

/* A rank's heads and their channels (A). Their sums over the ranks are NH and NH*HS. */
static inline int64_t model_part_heads(const struct model_config *c)
{
    return model_part(c, c->heads);
}
static inline int64_t model_part_channels(const struct model_config *c)
{
    return model_part_heads(c) * model_head_size(c);
}

/* A rank's heads of keys, and their channels (K). It has as many of values. */
static inline int64_t model_part_kv_heads(const struct model_config *c)
{
    return model_part(c, c->kv_heads ? c->kv_heads : c->heads);
}
static inline int64_t model_part_kv_channels(const struct model_config *c)
{
    return model_part_kv_heads(c) * model_head_size(c);
}

/* Heads of queries that share a head of keys. */
static inline int64_t model_sharing_heads(const struct model_config *c)
{
    return c->kv_heads ? c->heads / c->kv_heads : 1;
}

/* Elements in a row of qkv: those of queries, of keys and of values. */
static inline int64_t model_part_qkv(const struct model_config *c)
{
    return model_part_channels(c) + 2 * model_part_kv_channels(c);
}

/* F, a rank's channels of the MLP. */
static inline int64_t model_part_hidden(const struct model_config *c)
{
    return model_part(c, c->hidden ? c->hidden : 4 * c->channels);
}

/* The distance in elements between arrays of n elements that lie one after the other. It is n rounded up, so
 * that all of them are aligned to 256 bytes if the first is. */
static inline int64_t model_apart(int64_t n)
{
    return (n + 127) / 128 * 128;
}

/* Says what is wrong with tp, or returns false. Text holds the message, which begins with the option's
 * name. */
bool model_tp_fault(const struct model_config *c, char *text, size_t n);

/* The buffers of attention that context parallelism needs for a micro-batch of B rows, in elements of the
 * dtype and in floats. Both are 0 without it. */
struct model_cp_room {
    int64_t reals, floats;
};
struct model_cp_room model_cp_room(const struct model_config *c, int64_t B, int64_t element_bytes);

/* Says what is wrong with cp, like model_tp_fault. tp has no fault. */
bool model_cp_fault(const struct model_config *c, char *text, size_t n);

/* Bytes that a rank receives for attention between the ranks of cp, forward and backward, in a layer of a
 * micro-batch of B rows. */
int64_t model_cp_bytes(const struct model_config *c, int64_t B, int64_t element_bytes);

/* Elements that a stage keeps for each token of a micro-batch until its backward pass, as ops->kept_elems
 * says or, with recompute, fewer. And elements for each token that exist once for all micro-batches: with
 * recompute those inside one layer, else none. */
int64_t model_kept_elems(const struct model_config *stage);
int64_t model_layer_elems(const struct model_config *stage);
/* As ops->most_bytes, with recompute, too. */
int64_t model_most_bytes(const struct model_config *c, int64_t B, int64_t element_bytes);

/* The names of enum model_cp_form and enum model_cp_order on command lines. */
extern const struct option_word model_cp_forms[], model_cp_orders[];

/* The option of recompute. `in` is as in MODEL_CP_ROWS. */
#define MODEL_RECOMPUTE_ROW(in)                                                                              \
    {                                                                                                        \
        "recompute", NULL,                                                                                   \
            "Keep only the inputs of layers, and compute a layer's activations again before its backward",   \
            OPTION_FLAG(in own.recompute)                                                                    \
    }

/* The options of cp. `in` is the field, with a dot, that has the struct model_options in OPTION_STRUCT. */
#define MODEL_CP_ROWS(in)                                                                                    \
    {"cp", "N",                                                                                              \
     "Cut each row over N ranks, which share attention; divides ranks and the tokens of a row, in zigzag "   \
     "order twice (1)",                                                                                      \
     OPTION_INT(in own.cp, 1, 1024)},                                                                        \
        {"cp-form", "gather|exchange|ring",                                                                  \
         "With --cp: ranks gather keys and values, exchange tokens for heads, or pass keys and values "      \
         "around (gather)",                                                                                  \
         OPTION_WORD(in own.cp_form, model_cp_forms)},                                                       \
        {"cp-order", "zigzag|contiguous",                                                                    \
         "With --cp: a rank has two parts of a row, so that all have as much work, or one part (zigzag)",    \
         OPTION_WORD(in own.cp_order, model_cp_orders)},                                                     \
    {                                                                                                        \
        "cp-heads", "N", "With --cp-form gather: heads that are gathered at a time (all)",                   \
            OPTION_INT(in own.cp_heads, 1, 10000)                                                            \
    }

/* ---- kinds of models ---- */

/* Most tensors of a model. */
#define MODEL_MAX_TENSORS 32

/* What a table of tensors refers to. */
struct model_pointers {
    /* (tensors of this kind) each, by number. */
    void **params, **grads;
    enum zero_dtype dtype;
    /* Backward stores the gradients of matrices. If false, it adds to them. */
    bool stores;
};

/* The units of a model or of a pipeline stage: its embedding, one for each layer, and its head. -1: it has
 * none. Embedding and head are the same unit if they have the same weights. n: the number of units. */
struct model_units {
    int32_t embedding, first_layer, head, n;
};

/* Initial values of a tensor: normal with this deviation or, if it is 0, all `value`. */
struct model_start {
    double deviation;
    float value;
};

/* Bytes of a tensor's published name, with its end. */
#define MODEL_NAME_BYTES 96

struct model_passes;

/* A kind of model, such as bench/gpt2. Where a stage is asked for, a whole model is one that has
 * everything. */
struct model_ops {
    /* Fills in the table of a stage's tensors for zero_wrap, with each tensor's number in the whole model, in
     * ascending order, and returns how many there are. Frozen tensors have no grad. If first and last stage
     * both have the embedding's weights, they are the first tensor of both, with ZERO_TIED. */
    int32_t (*describe)(struct zero_tensor *table, int32_t *number, const struct model_config *stage,
                        const struct model_pointers *pointers);
    struct model_units (*units)(const struct model_config *stage);
    /* Writes how the tensors of a whole model begin, by number. */
    void (*starts)(const struct model_config *c, struct model_start *out);
    /* Fills in the published names of a stage's tensors for zero_import and zero_export, layer by layer, and
     * returns their number, at most n_names(). So the entries of consecutive stages have the order of the
     * whole model. number (n_tensors) is as in describe. Names are stored in text, which has as many rows as
     * map. */
    int32_t (*names)(struct zero_weight *map, char (*text)[MODEL_NAME_BYTES], const int32_t *number,
                     int32_t n_tensors, const struct model_config *stage);
    int32_t (*n_names)(const struct model_config *stage);

    /* The number of parameters of a whole model. */
    int64_t (*n_params)(const struct model_config *c);
    /* Floating-point operations per token of forward and backward (Chowdhery et al., arXiv:2204.02311,
     * appendix B): 6 for each weight in a product, or 4 if it is frozen, plus 12 * L * C * T for attention
     * without regard to causality. */
    double (*flop_per_token)(const struct model_config *c);
    /* Elements that a stage without recompute keeps for each token until its backward pass: so many for each
     * layer, one C of which is the layer's output, and those of its ends. They do not include attention's
     * matrices, statistics and scratch, and the stage's input, which the library keeps. */
    int64_t (*kept_elems)(const struct model_config *stage);
    /* Bytes that model_open takes for micro-batches of B rows without recompute, rounded up. */
    int64_t (*most_bytes)(const struct model_config *c, int64_t B, int64_t element_bytes);

    /* Layers use the positions of their tokens, not only the embedding. */
    bool layers_use_positions;
    /* Its forward and backward passes, one for each dtype (model.h). */
    const struct model_passes *passes_f32, *passes_bf16;
};

static inline int64_t model_n_params(const struct model_config *c)
{
    return c->ops->n_params(c);
}

static inline double model_flop_per_token(const struct model_config *c)
{
    return c->ops->flop_per_token(c);
}

/* As ops->describe, without pointers, as zero_plan needs it. number may be NULL. */
int32_t model_describe(struct zero_tensor table[MODEL_MAX_TENSORS], int32_t *number,
                       const struct model_config *stage, enum zero_dtype dtype);

/* ---- options ---- */

/* The model that a command line asks for. Options write preset and own, which are what the user gave. When
 * all options have been read, the other fields are made from these two. Commands read config. */
struct model_options {
    /* The sizes of the model. */
    struct model_config config;
    /* The name of the preset, whatever its context, or of the folder, or "custom". */
    const char *name;
    /* A suitable learning rate for the preset. */
    double default_lr;

    /* The preset that --model names. */
    int preset;
    /* Or the folder of a Hugging Face model. NULL: none. */
    const char *dir;
    /* The sizes that --layers, --heads, --channels, --context and --vocab give. 0: the preset's. Commands add
     * tp, sequence, cp, documents and label_smoothing by their own options. */
    struct model_config own;
};

/* Options that fill a struct model_options. The default preset is gpt2-nano; sizes replace those of the
 * preset. At the end the sizes are checked for consistency. */
extern const struct option_table model_config_options;

/* Selects gpt2-nano, with the context as it is. Drops every other size and all that is no size. */
void model_take_nano(struct model_options *m);

/* For the option table of a command whose struct S has a struct model_options in a field. */
#define OPTIONS_WITH_MODEL(S, field)                                                                         \
    .shared = &model_config_options, .shared_at = OPTION_AT(S, field, struct model_options : 0)

#endif
