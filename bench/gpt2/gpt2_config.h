/* SPDX-License-Identifier: Apache-2.0 */
/* gpt2_config.h: the sizes of a GPT-2 model, its presets, and the command-line options that choose them. */
#ifndef ZERO_BENCH_GPT2_CONFIG_H
#define ZERO_BENCH_GPT2_CONFIG_H

#include "bench/arguments.h"

#include <stdbool.h>

struct gpt2_config {
    /* L in comments on shapes */
    int64_t layers;
    /* NH, of attention */
    int64_t heads;
    /* C, a multiple of NH */
    int64_t channels;
    /* T, tokens in a row */
    int64_t context;
    /* V, different tokens */
    int64_t vocab;
    /* parts of each layer, on a rank each; 0 and 1: layers are whole. Divides the heads */
    int64_t tp;
    /* the part of a target's probability that all V tokens share, 0 to 1 */
    double label_smoothing;
    /* with tp above 1: what lies between products is cut by rows, B*T of which tp divides */
    bool sequence;
    /* of a model whose other layers are elsewhere (pipeline stages): the number of its first one, and whether
     * embedding and head are there, too */
    int64_t first_layer;
    bool no_embedding, no_head;
};

/* Token ids of a part, U, of which the last ones of the last part may be nobody's. */
static inline int64_t gpt2_part_vocab(const struct gpt2_config *c)
{
    return c->tp > 1 ? (c->vocab + c->tp - 1) / c->tp : c->vocab;
}

/* Of a part: its heads, their channels, A, and those of its MLP, F. Of all parts they are NH, C and 4*C. */
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

/* The model's parameters, counted: every weight, bias and norm; the head is tied to the embedding. */
int64_t gpt2_n_params(const struct gpt2_config *c);

/* Floating-point operations per token of forward and backward: 6 per weight that a token is multiplied by
 * (all but the position embedding) and 12 * L * C * T for attention without regard to causality (Chowdhery et
 * al., arXiv:2204.02311, appendix B). */
double gpt2_flop_per_token(const struct gpt2_config *c);

/* What --model, --layers, --heads, --channels, --context and --vocab gave. */
struct model_options {
    struct gpt2_config config;
    /* of the preset, whatever its context, or "custom" */
    const char *name;
    /* a learning rate that suits the preset */
    double default_lr;

    /* as read: all of the above follows from the preset, */
    int preset;
    /* and from the sizes that were given one by one; 0: the preset's. tp is the command's own */
    struct gpt2_config own;
};

/* Options that fill a struct model_options: the preset gpt2-nano unless told otherwise, with single sizes
 * replaced. At the end they are checked to fit together. */
extern const struct option_table gpt2_config_options;

/* Makes it gpt2-nano, with the context that it has. */
void gpt2_take_nano(struct model_options *m);

/* In the table of a command whose struct has them in a field model. */
#define OPTIONS_WITH_MODEL(S)                                                                                \
    .shared = &gpt2_config_options, .shared_at = OPTION_AT(S, model, struct model_options : 0)

#endif
