/* SPDX-License-Identifier: Apache-2.0 */
/* model_config.c: presets, option parsing and checks for model_config.h. The sizes are those of GPT-2's
 * published checkpoints (Radford et al. 2019). gpt2-nano is small enough to learn something in a minute on
 * two CPU cores. */
#include "bench/model/model_config.h"
#include "bench/gpt2/gpt2_ops.h"

#include <stdio.h>

enum { NANO, M124, M355, M774, B1_5 };

#define SIZES(L, NH, C, T, V)                                                                                \
    {                                                                                                        \
        .ops = &gpt2_ops, .layers = L, .heads = NH, .channels = C, .context = T, .vocab = V                  \
    }
static const struct {
    struct model_config config;
    double lr;
} presets[] = {
    [NANO] = {SIZES(6, 6, 96, 64, 256), 2e-3},         [M124] = {SIZES(12, 12, 768, 1024, 50257), 6e-4},
    [M355] = {SIZES(24, 16, 1024, 1024, 50257), 3e-4}, [M774] = {SIZES(36, 20, 1280, 1024, 50257), 2.5e-4},
    [B1_5] = {SIZES(48, 25, 1600, 1024, 50257), 2e-4},
};
static const struct option_word preset_names[] = {
    {"gpt2-nano", NANO}, {"gpt2-124M", M124}, {"gpt2-355M", M355},
    {"gpt2-774M", M774}, {"gpt2-1.5B", B1_5}, {0},
};

const struct option_word model_cp_forms[] = {
    {"gather", MODEL_CP_GATHER}, {"exchange", MODEL_CP_EXCHANGE}, {"ring", MODEL_CP_RING}, {0}};
const struct option_word model_cp_orders[] = {
    {"zigzag", MODEL_CP_ZIGZAG}, {"contiguous", MODEL_CP_CONTIGUOUS}, {0}};

int32_t model_describe(struct zero_tensor table[MODEL_MAX_TENSORS], int32_t *number,
                       const struct model_config *stage, enum zero_dtype dtype)
{
    static void *nowhere[2][MODEL_MAX_TENSORS]; /* pointers that nobody follows */
    const struct model_pointers pointers = {.params = nowhere[0], .grads = nowhere[1], .dtype = dtype};
    int32_t unused[MODEL_MAX_TENSORS];
    return stage->ops->describe(table, number ? number : unused, stage, &pointers);
}

/* C, divided over the ranks whose rows between products are split. */
static int64_t own_channels(const struct model_config *c)
{
    return c->sequence ? model_part(c, c->channels) : c->channels;
}

/* What a stage would keep with another number of layers. */
static int64_t kept_with(const struct model_config *stage, int64_t layers)
{
    struct model_config c = *stage;
    c.layers = layers;
    return c.ops->kept_elems(&c);
}

int64_t model_layer_elems(const struct model_config *stage)
{
    return stage->recompute ? kept_with(stage, 1) - kept_with(stage, 0) - own_channels(stage) : 0;
}

int64_t model_kept_elems(const struct model_config *stage)
{
    return kept_with(stage, stage->layers) - stage->layers * model_layer_elems(stage);
}

int64_t model_most_bytes(const struct model_config *c, int64_t B, int64_t element_bytes)
{
    struct model_config full = *c;
    full.layers = c->recompute ? 1 : c->layers;
    return c->ops->most_bytes(&full, B, element_bytes) +
           (c->layers - full.layers) * B * c->context * c->channels * element_bytes;
}

struct model_cp_room model_cp_room(const struct model_config *c, int64_t B, int64_t element_bytes)
{
    int64_t tokens = B * model_own_context(c), heads = model_part_heads(c), HS = c->channels / c->heads;
    int64_t n = c->cp_heads ? c->cp_heads : heads, some = tokens * n * HS, all = tokens * heads * HS;
    int64_t message = model_apart(2 * all * element_bytes / (int64_t)sizeof(float) + 2 * all);
    if (c->cp <= 1)
        return (struct model_cp_room){0};
    switch (c->cp_form) {
    case MODEL_CP_EXCHANGE:
        return (struct model_cp_room){.reals = 2 * model_apart(3 * all)};
    case MODEL_CP_RING:
        return (struct model_cp_room){.floats = 2 * message + model_apart(2 * all) + model_apart(all) +
                                                model_apart(tokens * heads)};
    default:
        return (struct model_cp_room){.reals = 2 * model_apart(2 * c->cp * some) +
                                               (n < heads ? 2 * model_apart(some) : 0),
                                      .floats = 2 * model_apart(2 * c->cp * some) + model_apart(some)};
    }
}

/* In planes of a rank's tokens, n bytes each. Gradients of keys and values are fp32. A ring passes keys and
 * values on cp - 1 times, and their gradients cp times. */
int64_t model_cp_bytes(const struct model_config *c, int64_t B, int64_t element_bytes)
{
    int64_t elements = B * model_own_context(c) * model_part_channels(c), n = elements * element_bytes,
            n32 = elements * (int64_t)sizeof(float), others = c->cp - 1;
    if (c->cp <= 1)
        return 0;
    switch (c->cp_form) {
    case MODEL_CP_EXCHANGE:
        return (4 + 5) * n * others / c->cp;
    case MODEL_CP_RING:
        return 2 * 2 * n * others + 2 * n32 * c->cp;
    default:
        return 2 * 2 * n * others + 2 * n32 * others;
    }
}

bool model_cp_fault(const struct model_config *c, char *text, size_t n)
{
    long long cp = (long long)c->cp, heads = (long long)model_part_heads(c), context = (long long)c->context;
    long long chunks = c->cp_order == MODEL_CP_CONTIGUOUS ? cp : 2 * cp;
    *text = 0;
    if (cp <= 1 && (c->cp_form || c->cp_order || c->cp_heads))
        snprintf(text, n, "--cp%s: is of the ranks of --cp, of 2 or more",
                 c->cp_form    ? "-form"
                 : c->cp_order ? "-order"
                               : "-heads");
    else if (cp > 1 && context % chunks)
        snprintf(text, n, "--cp: the %s order cuts a row in %lld parts, which do not divide the %lld tokens",
                 chunks == cp ? "contiguous" : "zigzag", chunks, context);
    else if (cp > 1 && c->cp_form == MODEL_CP_EXCHANGE && heads % cp)
        snprintf(text, n, "--cp-form exchange: %lld ranks do not divide the %lld heads of each", cp, heads);
    else if (c->cp_heads && c->cp_form > MODEL_CP_GATHER)
        snprintf(text, n, "--cp-heads: is of --cp-form gather");
    else if (c->cp_heads && heads % c->cp_heads)
        snprintf(text, n, "--cp-heads: %lld do not divide the %lld heads of a rank", (long long)c->cp_heads,
                 heads);
    return *text;
}

#define OPTION_STRUCT struct model_options
static const struct option_row rows[] = {
    {"model", "NAME", "gpt2-nano (default), gpt2-124M, gpt2-355M, gpt2-774M or gpt2-1.5B",
     OPTION_WORD(preset, preset_names)},
    {"layers", "N", "Transformer blocks, instead of the model's own number",
     OPTION_INT(own.layers, 1, 10000)},
    {"heads", "N", "Attention heads", OPTION_INT(own.heads, 1, 10000)},
    {"channels", "N", "Width of the model, a multiple of the heads", OPTION_INT(own.channels, 1, 1000000)},
    {"context", "N", "Tokens in a row", OPTION_INT(own.context, 1, 1000000)},
    {"vocab", "N", "Token ids; training on bytes needs 256", OPTION_INT(own.vocab, 1, 100000000)},
    {0},
};

/* Makes config of the preset and of own. Sizes replace those of the preset, wherever they stand on the
 * command line. Commands may add tp, sequence, cp, documents and label_smoothing to own by options that other
 * tables do not have. */
static error_t finish(struct argp_state *state, void *options)
{
    struct model_options *m = options;
    struct model_config *c = &m->config;
    const struct model_config *own = &m->own;
    bool custom = own->layers || own->heads || own->channels || own->vocab;
    m->name = custom ? "custom" : option_word_of(preset_names, m->preset);
    m->default_lr = presets[m->preset].lr;
    *c = presets[m->preset].config;
    c->layers = own->layers ? own->layers : c->layers;
    c->heads = own->heads ? own->heads : c->heads;
    c->channels = own->channels ? own->channels : c->channels;
    c->context = own->context ? own->context : c->context;
    c->vocab = own->vocab ? own->vocab : c->vocab;
    c->label_smoothing = own->label_smoothing;
    c->tp = own->tp;
    c->sequence = own->sequence;
    c->cp = own->cp;
    c->cp_form = own->cp_form;
    c->cp_order = own->cp_order;
    c->cp_heads = own->cp_heads;
    c->documents = own->documents;
    c->recompute = own->recompute;
    if (c->channels % c->heads)
        return option_fault(state, "--channels: %lld is not a multiple of the %lld heads",
                            (long long)c->channels, (long long)c->heads);
    return 0;
}

/* Keeps the context. The other sizes become those of gpt2-nano, and all other fields of config 0. */
void model_take_nano(struct model_options *m)
{
    int64_t context = m->config.context;
    m->name = option_word_of(preset_names, NANO);
    m->default_lr = presets[NANO].lr;
    m->config = presets[NANO].config;
    m->config.context = context;
}

const struct option_table model_config_options = {.rows = rows, .header = "Model:", .finish = finish};
