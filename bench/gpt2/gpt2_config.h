/* SPDX-License-Identifier: Apache-2.0 */
/* gpt2_config.h: the sizes of a GPT-2, its presets, and the options that choose them. */
#ifndef ZERO_BENCH_GPT2_CONFIG_H
#define ZERO_BENCH_GPT2_CONFIG_H

#include "bench/arguments.h"

#include <stdbool.h>

/* How the ranks of a context-parallel group share attention (gpt2_context.h). */
enum gpt2_cp_form { GPT2_CP_GATHER = 1, GPT2_CP_EXCHANGE, GPT2_CP_RING };
/* How a row's tokens are divided over ranks. The values are those of enum zero_cp_order. */
enum gpt2_cp_order { GPT2_CP_CONTIGUOUS = 1, GPT2_CP_ZIGZAG };

struct gpt2_config {
    /* L in shapes. */
    int64_t layers;
    /* NH, attention heads. */
    int64_t heads;
    /* C, a multiple of NH. */
    int64_t channels;
    /* Tokens in a row. */
    int64_t context;
    /* V, number of different tokens. */
    int64_t vocab;
    /* Tensor-parallel size, a divisor of the heads. 0 and 1: none. */
    int64_t tp;
    /* Share of a target's probability that is spread over all V tokens, 0 to 1. */
    double label_smoothing;
    /* Sequence parallelism: with tp above 1, rows between products are split. tp divides B*T. */
    bool sequence;
    /* Context-parallel size: each rank has some tokens of every row. 0 and 1: none. */
    int64_t cp;
    /* enum gpt2_cp_form, 0: GPT2_CP_GATHER; and enum gpt2_cp_order, 0: GPT2_CP_ZIGZAG. */
    int cp_form, cp_order;
    /* With GPT2_CP_GATHER, heads whose keys and values are gathered at a time. 0: all of them. */
    int64_t cp_heads;
    /* A row consists of documents, which do not see each other. */
    bool documents;
    /* On a pipeline stage: the number of its first layer, and whether embedding and head are missing. */
    int64_t first_layer;
    bool no_embedding, no_head;
    /* A backward pass may come in two parts, which takes memory for what the first leaves for the second. */
    bool two_parts;
};

/* T, the tokens of a row that a rank has. */
static inline int64_t gpt2_own_context(const struct gpt2_config *c)
{
    return c->cp > 1 ? c->context / c->cp : c->context;
}

/* U, the token ids of a tensor-parallel rank. The last rank may have unused ids at the end. */
static inline int64_t gpt2_part_vocab(const struct gpt2_config *c)
{
    return c->tp > 1 ? (c->vocab + c->tp - 1) / c->tp : c->vocab;
}

/* A rank's heads, their channels (A), and its channels of the MLP (F). Their sums over the ranks are NH, C
 * and 4*C. */
static inline int64_t gpt2_part_heads(const struct gpt2_config *c)
{
    return c->tp > 1 ? c->heads / c->tp : c->heads;
}
static inline int64_t gpt2_part_channels(const struct gpt2_config *c)
{
    return c->tp > 1 ? c->channels / c->tp : c->channels;
}
static inline int64_t gpt2_part_hidden(const struct gpt2_config *c)
{
    return 4 * gpt2_part_channels(c);
}

/* The number of parameters: all weights, biases and norms. The head shares the embedding's weights. */
int64_t gpt2_n_params(const struct gpt2_config *c);

/* The distance in elements between arrays of n elements that lie one after the other. It is n rounded up, so
 * that all of them are aligned to 256 bytes if the first is. */
static inline int64_t gpt2_apart(int64_t n)
{
    return (n + 127) / 128 * 128;
}

/* The buffers of attention that context parallelism needs for a micro-batch of B rows, in elements of the
 * dtype and in floats. Both are 0 without it. */
struct gpt2_cp_room {
    int64_t reals, floats;
};
struct gpt2_cp_room gpt2_cp_room(const struct gpt2_config *c, int64_t B, int64_t element_bytes);

/* Says what is wrong with cp, or returns false. Text holds the message, which begins with the option's
 * name. */
bool gpt2_cp_fault(const struct gpt2_config *c, char *text, size_t n);

/* Bytes that a rank receives for attention between the ranks of cp, forward and backward, in a layer of a
 * micro-batch of B rows. */
int64_t gpt2_cp_bytes(const struct gpt2_config *c, int64_t B, int64_t element_bytes);

/* The names of enum gpt2_cp_form and enum gpt2_cp_order on command lines. */
extern const struct option_word gpt2_cp_forms[], gpt2_cp_orders[];

/* The options of cp. `in` is the field, with a dot, that has the struct model_options in OPTION_STRUCT. */
#define GPT2_CP_ROWS(in)                                                                                     \
    {"cp", "N",                                                                                              \
     "Cut each row over N ranks, which share attention; divides ranks and the tokens of a row, in zigzag "   \
     "order twice (1)",                                                                                      \
     OPTION_INT(in own.cp, 1, 1024)},                                                                        \
        {"cp-form", "gather|exchange|ring",                                                                  \
         "With --cp: ranks gather keys and values, exchange tokens for heads, or pass keys and values "      \
         "around (gather)",                                                                                  \
         OPTION_WORD(in own.cp_form, gpt2_cp_forms)},                                                        \
        {"cp-order", "zigzag|contiguous",                                                                    \
         "With --cp: a rank has two parts of a row, so that all have as much work, or one part (zigzag)",    \
         OPTION_WORD(in own.cp_order, gpt2_cp_orders)},                                                      \
    {                                                                                                        \
        "cp-heads", "N", "With --cp-form gather: heads that are gathered at a time (all)",                   \
            OPTION_INT(in own.cp_heads, 1, 10000)                                                            \
    }

/* Floating-point operations per token of forward and backward (Chowdhery et al., arXiv:2204.02311, appendix
 * B). It is 6 for each weight in a product, so not for the position embedding, plus 12 * L * C * T for
 * attention without regard to causality. */
double gpt2_flop_per_token(const struct gpt2_config *c);

/* The model that a command line asks for. Options write preset and own, which are what the user gave. When
 * all options have been read, the other fields are made from these two. Commands read config. */
struct model_options {
    /* The sizes of the model. */
    struct gpt2_config config;
    /* The name of the preset, whatever its context, or "custom". */
    const char *name;
    /* A suitable learning rate for the preset. */
    double default_lr;

    /* The preset that --model names. */
    int preset;
    /* The sizes that --layers, --heads, --channels, --context and --vocab give. 0: the preset's. Commands add
     * tp, sequence, cp, documents and label_smoothing by their own options. */
    struct gpt2_config own;
};

/* Options that fill a struct model_options. The default preset is gpt2-nano; sizes replace those of the
 * preset. At the end the sizes are checked for consistency. */
extern const struct option_table gpt2_config_options;

/* Selects gpt2-nano, with the context as it is. Drops every other size and all that is no size. */
void gpt2_take_nano(struct model_options *m);

/* For the option table of a command whose struct S has a struct model_options in a field. */
#define OPTIONS_WITH_MODEL(S, field)                                                                         \
    .shared = &gpt2_config_options, .shared_at = OPTION_AT(S, field, struct model_options : 0)

#endif
