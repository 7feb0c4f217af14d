/* SPDX-License-Identifier: Apache-2.0 */
/* gpt2_config.h: the sizes of a GPT-2, its presets, and the options that choose them. */
#ifndef ZERO_BENCH_GPT2_CONFIG_H
#define ZERO_BENCH_GPT2_CONFIG_H

#include "bench/arguments.h"

#include <stdbool.h>

struct gpt2_config {
    /* L in shapes. */
    int64_t layers;
    /* NH, attention heads. */
    int64_t heads;
    /* C, a multiple of NH. */
    int64_t channels;
    /* T, tokens in a row. */
    int64_t context;
    /* V, number of different tokens. */
    int64_t vocab;
    /* Tensor-parallel size, a divisor of the heads. 0 and 1: none. */
    int64_t tp;
    /* Share of a target's probability that is spread over all V tokens, 0 to 1. */
    double label_smoothing;
    /* Sequence parallelism: with tp above 1, rows between products are split. tp divides B*T. */
    bool sequence;
    /* On a pipeline stage: the number of its first layer, and whether embedding and head are missing. */
    int64_t first_layer;
    bool no_embedding, no_head;
    /* A backward pass may come in two parts, which takes memory for what the first leaves for the second. */
    bool two_parts;
};

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
     * tp, sequence and label_smoothing by their own options. */
    struct gpt2_config own;
};

/* Options that fill a struct model_options. The default preset is gpt2-nano; sizes replace those of the
 * preset. At the end the sizes are checked for consistency. */
extern const struct option_table gpt2_config_options;

/* Selects gpt2-nano, with the context as it is. Drops every other size, tp, sequence and label_smoothing. */
void gpt2_take_nano(struct model_options *m);

/* For the option table of a command whose struct S has a struct model_options in a field. */
#define OPTIONS_WITH_MODEL(S, field)                                                                         \
    .shared = &gpt2_config_options, .shared_at = OPTION_AT(S, field, struct model_options : 0)

#endif
