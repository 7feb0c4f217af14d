/* gpt2_config.c: see gpt2_config.h. The sizes are those of Radford et al. 2019 (GPT-2), as in its published
 * checkpoints; gpt2-nano is small enough to learn something in a minute on two CPU cores. */
#include "bench/gpt2_config.h"
#include "bench/arguments.h"

#include <string.h>

static const struct {
    const char *name;
    struct gpt2_config config; /* L, NH, C, T, V */
    double lr;
} presets[] = {
    {"gpt2-nano", {6, 6, 96, 64, 256}, 2e-3},         {"gpt2-124M", {12, 12, 768, 1024, 50257}, 6e-4},
    {"gpt2-355M", {24, 16, 1024, 1024, 50257}, 3e-4}, {"gpt2-774M", {36, 20, 1280, 1024, 50257}, 2.5e-4},
    {"gpt2-1.5B", {48, 25, 1600, 1024, 50257}, 2e-4},
};
#define N_PRESETS (sizeof presets / sizeof presets[0])

int64_t gpt2_n_params(const struct gpt2_config *c)
{
    int64_t C = c->channels;
    int64_t layer =
        12 * C * C + 13 * C; /* four matrices of 3, 1, 4 and 4 C*C; their biases (9 C); two norms (4 C) */
    return (c->vocab + c->context) * C + c->layers * layer + 2 * C;
}

double gpt2_flop_per_token(const struct gpt2_config *c)
{
    double weights = (double)(gpt2_n_params(c) - c->context * c->channels);
    return 6 * weights + 12 * (double)c->layers * (double)c->channels * (double)c->context;
}

enum { KEY_MODEL = 0x200, KEY_LAYERS, KEY_HEADS, KEY_CHANNELS, KEY_CONTEXT, KEY_VOCAB };

static const struct argp_option model_argp_options[] = {
    {"model", KEY_MODEL, "NAME", 0, "gpt2-nano (default), gpt2-124M, gpt2-355M, gpt2-774M or gpt2-1.5B", 1},
    {"layers", KEY_LAYERS, "N", 0, "Transformer blocks, instead of the model's own number", 1},
    {"heads", KEY_HEADS, "N", 0, "Attention heads", 1},
    {"channels", KEY_CHANNELS, "N", 0, "Width of the model, a multiple of the heads", 1},
    {"context", KEY_CONTEXT, "N", 0, "Tokens in a row", 1},
    {"vocab", KEY_VOCAB, "N", 0, "Token ids; training on bytes needs 256", 1},
    {0},
};

static void set_preset(struct argp_state *state, struct model_options *m, const char *name)
{
    for (size_t i = 0; i < N_PRESETS; i++) {
        if (!strcmp(presets[i].name, name)) {
            m->name = presets[i].name;
            m->config = presets[i].config;
            m->default_lr = presets[i].lr;
            return;
        }
    }
    argp_error(state, "--model: '%s' is not gpt2-nano, gpt2-124M, gpt2-355M, gpt2-774M or gpt2-1.5B", name);
}

/* Sizes given one by one win over the preset wherever they stand on the line, so they are kept apart until
 * the end. */
struct overrides {
    int64_t layers, heads, channels, context, vocab;
};

static error_t apply(struct argp_state *state, struct model_options *m, const struct overrides *o)
{
    struct gpt2_config *c = &m->config;
    if (o->layers || o->heads || o->channels || o->context || o->vocab) {
        m->name = "custom";
    }
    c->layers = o->layers ? o->layers : c->layers;
    c->heads = o->heads ? o->heads : c->heads;
    c->channels = o->channels ? o->channels : c->channels;
    c->context = o->context ? o->context : c->context;
    c->vocab = o->vocab ? o->vocab : c->vocab;
    if (c->channels % c->heads) {
        argp_error(state, "--channels: %lld is not a multiple of the %lld heads", (long long)c->channels,
                   (long long)c->heads);
        return EINVAL;
    }
    return 0;
}

static error_t parse_model(int key, char *arg, struct argp_state *state)
{
    struct model_options *m = state->input;
    struct overrides *o = state->hook;
    switch (key) {
    case ARGP_KEY_INIT:
        state->hook = calloc(1, sizeof *o);
        if (!state->hook) {
            return ENOMEM;
        }
        set_preset(state, m, "gpt2-nano");
        return 0;
    case KEY_MODEL:
        set_preset(state, m, arg);
        return strcmp(m->name, arg) ? EINVAL : 0;
    case KEY_LAYERS:
        return option_int(state, "--layers", arg, 1, 10000, &o->layers);
    case KEY_HEADS:
        return option_int(state, "--heads", arg, 1, 10000, &o->heads);
    case KEY_CHANNELS:
        return option_int(state, "--channels", arg, 1, 1000000, &o->channels);
    case KEY_CONTEXT:
        return option_int(state, "--context", arg, 1, 1000000, &o->context);
    case KEY_VOCAB:
        return option_int(state, "--vocab", arg, 1, 100000000, &o->vocab);
    case ARGP_KEY_SUCCESS:
        return apply(state, m, o);
    case ARGP_KEY_FINI:
        free(o);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

const struct argp gpt2_config_argp = {.options = model_argp_options, .parser = parse_model};
