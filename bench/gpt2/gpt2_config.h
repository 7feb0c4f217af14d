/* SPDX-License-Identifier: Apache-2.0 */
/* gpt2_config.h: the sizes of a GPT-2, its presets, and the options that choose them. */
#ifndef ZERO_BENCH_GPT2_CONFIG_H
#define ZERO_BENCH_GPT2_CONFIG_H

#include "bench/arguments.h"

#include <stdbool.h>

struct gpt2_config {
    /* L in comments on shapes */
    int64_t layers;
    /* NH, heads of attention */
    int64_t heads;
    /* C, a multiple of NH */
    int64_t channels;
    /* T, tokens in a row */
    int64_t context;
    /* V, size of the vocabulary */
    int64_t vocab;
    /* parts of each layer, one on each rank of tp; 0 and 1: whole layers. Must divide heads */
    int64_t tp;
    /* the share of a target's probability that is spread over all V tokens, 0 to 1 */
    double label_smoothing;
    /* sequence parallelism, with tp above 1: rows between products are cut over the parts. tp must divide
     * B*T */
    bool sequence;
    /* for one pipeline stage of a model: the number of its first layer, and whether it lacks the embedding
     * and the head */
    int64_t first_layer;
    bool no_embedding, no_head;
};

/* U, the token ids of a part. In the last part, the last ones may be unused. */
static inline int64_t gpt2_part_vocab(const struct gpt2_config *c)
{
    return c->tp > 1 ? (c->vocab + c->tp - 1) / c->tp : c->vocab;
}

/* A part's heads, A (their channels), and F (channels of its MLP). The whole model has NH, C and 4*C. */
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

/* The number of parameters: every weight, bias and norm. The head is tied to the embedding. */
int64_t gpt2_n_params(const struct gpt2_config *c);

/* Floating-point operations per token, forward and backward: 6 for each weight that a token is multiplied
 * by (all but the position embedding), and 12 * L * C * T for attention as if it were not causal
 * (Chowdhery et al., arXiv:2204.02311, appendix B). */
double gpt2_flop_per_token(const struct gpt2_config *c);

/* The values of --model, --layers, --heads, --channels, --context and --vocab. */
struct model_options {
    struct gpt2_config config;
    /* the preset's name, for any context, or "custom" */
    const char *name;
    /* a learning rate that suits the preset */
    double default_lr;

    /* as read, like the sizes in own (0: the preset's); the fields above follow from both */
    int preset;
    /* tp and sequence belong to the command */
    struct gpt2_config own;
};

/* Options that fill a struct model_options. The default is the preset gpt2-nano. At the end sizes are
 * checked against each other. */
extern const struct option_table gpt2_config_options;

/* Replaces the model by gpt2-nano and keeps its context. */
void gpt2_take_nano(struct model_options *m);

/* For the option table of a command whose struct S has a struct model_options in a field. */
#define OPTIONS_WITH_MODEL(S, field)                                                                         \
    .shared = &gpt2_config_options, .shared_at = OPTION_AT(S, field, struct model_options : 0)

#endif
