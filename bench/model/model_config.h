/* SPDX-License-Identifier: Apache-2.0 */
/* model_config.h: the sizes of a model, the functions that a kind of model provides about them (struct
 * model_ops), and the command-line options that choose a model. */
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
    /* Fields that only a Llama-like model has. Borrowed. NULL: the model is not like a Llama. */
    const struct hf_config *hf;
    /* L in shapes. */
    int64_t layers;
    /* NH, attention heads. */
    int64_t heads;
    /* Key and value heads, a divisor of NH. 0: NH. */
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
    /* Tensor-parallel size, a divisor of heads, kv_heads and hidden. 0 and 1: none. */
    int64_t tp;
    /* Share of a target's probability that is spread over all V tokens, 0 to 1. */
    double label_smoothing;
    /* Sequence parallelism, with tp above 1: the rows between products are split over the ranks. tp divides
     * B*T. */
    bool sequence;
    /* Context-parallel size: each rank has some tokens of every row. 0 and 1: none. */
    int64_t cp;
    /* enum model_cp_form and enum model_cp_order. 0: MODEL_CP_GATHER and MODEL_CP_ZIGZAG. */
    int cp_form, cp_order;
    /* With MODEL_CP_GATHER: query heads whose keys and values are gathered at a time. It is a divisor of a
     * rank's heads, and a multiple of the number that share a key head. 0: all heads. */
    int64_t cp_heads;
    /* A row consists of documents. Tokens attend only to their own document. */
    bool documents;
    /* On a pipeline stage: the number of its first layer, and whether embedding and head are missing. */
    int64_t first_layer;
    bool no_embedding, no_head;
    /* A backward pass may come in two parts (model.h). The second part reads what the first keeps, which
     * takes memory. */
    bool two_parts;
    /* Forward keeps only the inputs of layers. Backward computes a layer's other activations again. */
    bool recompute;
    /* Adapters (bench/llama/lora.h): their rank, their alpha, and the matrices that have one, as bits 1 <<
     * enum lora_target. With adapters, only these are trained. Rank 0: there are none, and all weights are
     * trained. */
    int64_t lora_rank;
    double lora_alpha;
    uint32_t lora_targets;
};

static inline int64_t model_larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

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

/* A rank's query heads, and A, the number of their channels. Over all ranks these add up to NH and NH*HS. */
static inline int64_t model_part_heads(const struct model_config *c)
{
    return model_part(c, c->heads);
}
static inline int64_t model_part_channels(const struct model_config *c)
{
    return model_part_heads(c) * model_head_size(c);
}

/* A rank's key heads, and K, the number of their channels. A rank has as many value heads. */
static inline int64_t model_part_kv_heads(const struct model_config *c)
{
    return model_part(c, c->kv_heads ? c->kv_heads : c->heads);
}
static inline int64_t model_part_kv_channels(const struct model_config *c)
{
    return model_part_kv_heads(c) * model_head_size(c);
}

/* The number of query heads that share a key head. */
static inline int64_t model_sharing_heads(const struct model_config *c)
{
    return c->kv_heads ? c->heads / c->kv_heads : 1;
}

/* Elements in a row of qkv: queries, keys and values. */
static inline int64_t model_part_qkv(const struct model_config *c)
{
    return model_part_channels(c) + 2 * model_part_kv_channels(c);
}

/* F, a rank's channels of the MLP. */
static inline int64_t model_part_hidden(const struct model_config *c)
{
    return model_part(c, c->hidden ? c->hidden : 4 * c->channels);
}

/* The distance in elements between consecutive arrays of n elements. It is n rounded up so that every array
 * is aligned to 256 bytes if the first one is. */
static inline int64_t model_apart(int64_t n)
{
    return (n + 127) / 128 * 128;
}

/* Checks tp. Returns true if it is not possible, and writes a message to text, which begins with the option's
 * name. */
bool model_tp_fault(const struct model_config *c, char *text, size_t n);

/* The sizes of attention's buffers for context parallelism and a micro-batch of B rows: elements of the
 * model's dtype, and floats. Without context parallelism both are 0. */
struct model_cp_room {
    int64_t reals, floats;
};
struct model_cp_room model_cp_room(const struct model_config *c, int64_t B, int64_t element_bytes);

/* Checks cp as model_tp_fault checks tp. Call model_tp_fault first. */
bool model_cp_fault(const struct model_config *c, char *text, size_t n);

/* Bytes that a rank receives from the other ranks of its context-parallel group for the attention of one
 * layer, in forward and backward together, for a micro-batch of B rows. */
int64_t model_cp_bytes(const struct model_config *c, int64_t B, int64_t element_bytes);

/* Elements that a pipeline stage keeps for each token of a micro-batch until its backward pass. This is
 * ops->kept_elems, or less with recompute. */
int64_t model_kept_elems(const struct model_config *stage);
/* Elements for each token that exist once for all micro-batches. With recompute these are the activations
 * inside one layer; without it, there are none. */
int64_t model_layer_elems(const struct model_config *stage);
/* The same as ops->most_bytes, but it also takes recompute into account. */
int64_t model_most_bytes(const struct model_config *c, int64_t B, int64_t element_bytes);

/* The names of enum model_cp_form and enum model_cp_order on command lines. */
extern const struct option_word model_cp_forms[], model_cp_orders[];

/* The option --recompute. `in` is as in MODEL_CP_ROWS. */
#define MODEL_RECOMPUTE_ROW(in)                                                                              \
    {                                                                                                        \
        "recompute", NULL,                                                                                   \
            "Keep only the inputs of layers, and compute a layer's activations again in backward",           \
            OPTION_FLAG(in own.recompute)                                                                    \
    }

/* The options of context parallelism. `in` names the field of OPTION_STRUCT that is a struct model_options,
 * followed by a dot. */
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

/* The most tensors that a model may have. */
#define MODEL_MAX_TENSORS 32

/* The model's pointers, to which a table of tensors for libzero refers. */
struct model_pointers {
    /* The pointers to parameters and to gradients, indexed by tensor number. */
    void **params, **grads;
    enum zero_dtype dtype;
    /* Backward stores the gradients of matrices. If false, it adds to them. */
    bool stores;
};

/* The unit numbers of a model or of a pipeline stage: the embedding, the first of the layers, and the head.
 * -1: there is none. The embedding and the head are one unit if they share their weights. n is the number of
 * units. */
struct model_units {
    int32_t embedding, first_layer, head, n;
};

/* The initial values of a tensor: normally distributed with this standard deviation or, if it is 0, all equal
 * to `value`. */
struct model_start {
    double deviation;
    float value;
};

/* Bytes of a tensor's published name, including the final zero. */
#define MODEL_NAME_BYTES 96

struct model_passes;

/* A kind of model, such as bench/gpt2. A parameter called `stage` is a pipeline stage, or a whole model,
 * which is the only stage. */
struct model_ops {
    /* Fills in the table of a stage's tensors for zero_wrap, and each tensor's number in the whole model, in
     * ascending order. Returns how many there are. Frozen tensors have no grad. If the first and the last
     * stage both have the embedding's weights, these are the first tensor of both, with ZERO_TIED. */
    int32_t (*describe)(struct zero_tensor *table, int32_t *number, const struct model_config *stage,
                        const struct model_pointers *pointers);
    struct model_units (*units)(const struct model_config *stage);
    /* Writes the initial values of all tensors of a whole model to out, indexed by tensor number. */
    void (*starts)(const struct model_config *c, struct model_start *out);
    /* Fills in the published names of a stage's tensors for zero_import and zero_export, and returns how many
     * there are, at most n_names(). They are sorted by layer, so the entries of consecutive stages have the
     * order of the whole model. number (n_tensors) is what describe wrote. The names are stored in text,
     * which has as many rows as map. */
    int32_t (*names)(struct zero_weight *map, char (*text)[MODEL_NAME_BYTES], const int32_t *number,
                     int32_t n_tensors, const struct model_config *stage);
    int32_t (*n_names)(const struct model_config *stage);

    /* The number of parameters of a whole model. */
    int64_t (*n_params)(const struct model_config *c);
    /* Floating-point operations per token of forward and backward (Chowdhery et al., arXiv:2204.02311,
     * appendix B): 6 for each weight in a product, or 4 if it is frozen, plus 12 * L * C * T for attention,
     * as if it were not causal. */
    double (*flop_per_token)(const struct model_config *c);
    /* Elements that a stage keeps for each token until its backward pass, without recompute. Each layer has
     * the same number, which includes C for its output. The embedding and the head have more of their own.
     * Attention's matrices, statistics and scratch are not included, and neither is the stage's input, which
     * the library keeps. */
    int64_t (*kept_elems)(const struct model_config *stage);
    /* An upper bound of the bytes that model_open allocates for micro-batches of B rows, without
     * recompute. */
    int64_t (*most_bytes)(const struct model_config *c, int64_t B, int64_t element_bytes);

    /* The layers, and not only the embedding, use the positions of tokens. */
    bool layers_use_positions;
    /* The forward and backward passes, one table for each dtype (model.h). */
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

/* The same as ops->describe, but for a model without memory, as zero_plan needs it. number may be NULL. */
int32_t model_describe(struct zero_tensor table[MODEL_MAX_TENSORS], int32_t *number,
                       const struct model_config *stage, enum zero_dtype dtype);

/* ---- options ---- */

/* The model that a command line asks for. The options write what the user gave to preset, dir and own. When
 * all options have been read, the other fields are computed from these. Commands read config. */
struct model_options {
    /* The sizes of the model. */
    struct model_config config;
    /* The name of the preset, with any context, or the name of the folder, or "custom". */
    const char *name;
    /* A suitable learning rate for the model. */
    double default_lr;

    /* The preset that --model names. Not used if dir is set. */
    int preset;
    /* The Hugging Face folder that --model names. NULL: it names a preset. */
    const char *dir;
    /* The sizes that --layers, --heads, --channels, --context and --vocab give. 0: that of the preset or the
     * folder. Commands have options of their own for tp, sequence, cp, documents, label_smoothing, recompute
     * and adapters. */
    struct model_config own;
};

/* Options that fill in a struct model_options. The default preset is gpt2-nano. Sizes on the command line
 * replace those of the preset. After the last option, the sizes are checked for consistency. */
extern const struct option_table model_config_options;

/* Selects gpt2-nano. The context stays as it is, and every other field of config is reset. */
void model_take_nano(struct model_options *m);

/* For the option table of a command whose struct S has a struct model_options as a field. */
#define OPTIONS_WITH_MODEL(S, field)                                                                         \
    .shared = &model_config_options, .shared_at = OPTION_AT(S, field, struct model_options : 0)

#endif
