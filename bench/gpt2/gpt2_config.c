/* SPDX-License-Identifier: Apache-2.0 */
/* gpt2_config.c: presets, option parsing and checks for gpt2_config.h. The sizes are those of GPT-2's
 * published checkpoints (Radford et al. 2019). gpt2-nano is small enough to learn something in a minute on
 * two CPU cores. */
#include "bench/gpt2/gpt2_config.h"

enum { NANO, M124, M355, M774, B1_5 };

static const struct {
    struct gpt2_config config; /* L, NH, C, T, V */
    double lr;
} presets[] = {
    [NANO] = {{6, 6, 96, 64, 256}, 2e-3},         [M124] = {{12, 12, 768, 1024, 50257}, 6e-4},
    [M355] = {{24, 16, 1024, 1024, 50257}, 3e-4}, [M774] = {{36, 20, 1280, 1024, 50257}, 2.5e-4},
    [B1_5] = {{48, 25, 1600, 1024, 50257}, 2e-4},
};
static const struct option_word preset_names[] = {
    {"gpt2-nano", NANO}, {"gpt2-124M", M124}, {"gpt2-355M", M355},
    {"gpt2-774M", M774}, {"gpt2-1.5B", B1_5}, {0},
};

int64_t gpt2_n_params(const struct gpt2_config *c)
{
    int64_t C = c->channels;
    int64_t layer =
        12 * C * C + 13 * C; /* matrices with 3, 1, 4 and 4 C*C, their biases (9 C), two norms (4 C) */
    return (c->vocab + c->context) * C + c->layers * layer + 2 * C;
}

double gpt2_flop_per_token(const struct gpt2_config *c)
{
    double weights = (double)(gpt2_n_params(c) - c->context * c->channels);
    return 6 * weights + 12 * (double)c->layers * (double)c->channels * (double)c->context;
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
 * command line. Commands may add tp, sequence and label_smoothing to own by options that other tables do not
 * have. */
static error_t finish(struct argp_state *state, void *options)
{
    struct model_options *m = options;
    struct gpt2_config *c = &m->config;
    const struct gpt2_config *own = &m->own;
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
    if (c->channels % c->heads)
        return option_fault(state, "--channels: %lld is not a multiple of the %lld heads",
                            (long long)c->channels, (long long)c->heads);
    return 0;
}

/* Keeps the context. The other sizes become those of gpt2-nano, and all other fields of config 0. */
void gpt2_take_nano(struct model_options *m)
{
    int64_t context = m->config.context;
    m->name = option_word_of(preset_names, NANO);
    m->default_lr = presets[NANO].lr;
    m->config = presets[NANO].config;
    m->config.context = context;
}

const struct option_table gpt2_config_options = {.rows = rows, .header = "Model:", .finish = finish};
