/* SPDX-License-Identifier: Apache-2.0 */
/* model_config.c: presets, option parsing and checks for model_config.h. The presets are GPT-2's published
 * checkpoints (Radford et al. 2019) and gpt2-nano, which is small enough to learn something in a minute on
 * two CPU cores. */
#include "bench/model/model_config.h"
#include "bench/gpt2/gpt2_ops.h"
#include "bench/llama/llama_ops.h"
#include "bench/llama/lora_config.h"
#include "kernels/error.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

enum { NANO, M124, M355, M774, B1_5 };

#define GPT2(L, NH, C, T, V)                                                                                 \
    {                                                                                                        \
        .ops = &gpt2_ops, .layers = L, .heads = NH, .channels = C, .context = T, .vocab = V                  \
    }
static const struct {
    struct model_config config;
    double lr;
} presets[] = {
    [NANO] = {GPT2(6, 6, 96, 64, 256), 2e-3},         [M124] = {GPT2(12, 12, 768, 1024, 50257), 6e-4},
    [M355] = {GPT2(24, 16, 1024, 1024, 50257), 3e-4}, [M774] = {GPT2(36, 20, 1280, 1024, 50257), 2.5e-4},
    [B1_5] = {GPT2(48, 25, 1600, 1024, 50257), 2e-4},
};
#undef GPT2
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
    static void *nowhere[2][MODEL_MAX_TENSORS]; /* the table refers to them, but nobody reads them */
    const struct model_pointers pointers = {.params = nowhere[0], .grads = nowhere[1], .dtype = dtype};
    int32_t unused[MODEL_MAX_TENSORS];
    return stage->ops->describe(table, number ? number : unused, stage, &pointers);
}

/* C, divided over the tensor-parallel ranks with sequence parallelism. */
static int64_t own_channels(const struct model_config *c)
{
    return c->sequence ? model_part(c, c->channels) : c->channels;
}

/* ops->kept_elems of the stage, if it had this number of layers. */
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

/* The sizes follow the layout of the buffers in context.c. */
struct model_cp_room model_cp_room(const struct model_config *c, int64_t B, int64_t element_bytes)
{
    int64_t tokens = B * model_own_context(c), heads = model_part_heads(c), HS = model_head_size(c);
    int64_t n = c->cp_heads ? c->cp_heads : heads, sharing = model_sharing_heads(c);
    int64_t some = tokens * n * HS, some_kv = some / sharing, all = tokens * heads * HS,
            all_kv = all / sharing;
    int64_t message = model_apart(2 * all_kv * element_bytes / (int64_t)sizeof(float) + 2 * all_kv);
    if (c->cp <= 1)
        return (struct model_cp_room){0};
    switch (c->cp_form) {
    case MODEL_CP_EXCHANGE:
        return (struct model_cp_room){.reals = 2 * model_apart(all + model_larger(all, 2 * all_kv))};
    case MODEL_CP_RING:
        return (struct model_cp_room){.floats = 2 * message + model_apart(all) +
                                                model_apart(model_larger(all, 2 * all_kv)) +
                                                model_apart(tokens * heads)};
    default:
        return (struct model_cp_room){
            .reals = model_larger(2 * model_apart(2 * c->cp * some_kv), model_apart(some)) +
                     (n < heads ? 2 * model_apart(some) : 0),
            .floats = 2 * model_apart(2 * c->cp * some_kv) + model_apart(some)};
    }
}

/* The exchange form exchanges queries, keys, values and results in forward. In backward it exchanges the
 * results and the gradients of all four. A ring passes keys and values on cp - 1 times, and their gradients
 * cp times. Gradients of keys and values are fp32, except in the exchange form. */
int64_t model_cp_bytes(const struct model_config *c, int64_t B, int64_t element_bytes)
{
    int64_t tokens = B * model_own_context(c), q = tokens * model_part_channels(c) * element_bytes;
    int64_t kv = 2 * tokens * model_part_kv_channels(c), kv_bytes = kv * element_bytes,
            kv32_bytes = kv * (int64_t)sizeof(float), others = c->cp - 1;
    if (c->cp <= 1)
        return 0;
    switch (c->cp_form) {
    case MODEL_CP_EXCHANGE:
        return (5 * q + 2 * kv_bytes) * others / c->cp;
    case MODEL_CP_RING:
        return 2 * kv_bytes * others + kv32_bytes * c->cp;
    default:
        return 2 * kv_bytes * others + kv32_bytes * others;
    }
}

bool model_tp_fault(const struct model_config *c, char *text, size_t n)
{
    const struct {
        int64_t n;
        const char *what;
    } cut[] = {
        {c->heads, "heads"}, {c->kv_heads, "heads of keys and values"}, {c->hidden, "channels of the MLP"}};
    *text = 0;
    for (size_t i = 0; i < sizeof cut / sizeof *cut && !*text && c->tp > 1; i++)
        if (cut[i].n % c->tp)
            snprintf(text, n, "--tp: %lld parts do not divide the %lld %s", (long long)c->tp,
                     (long long)cut[i].n, cut[i].what);
    return *text;
}

bool model_cp_fault(const struct model_config *c, char *text, size_t n)
{
    long long cp = (long long)c->cp, heads = (long long)model_part_heads(c), context = (long long)c->context;
    long long kv_heads = (long long)model_part_kv_heads(c), sharing = (long long)model_sharing_heads(c);
    long long chunks = c->cp_order == MODEL_CP_CONTIGUOUS ? cp : 2 * cp;
    *text = 0;
    if (cp <= 1 && (c->cp_form || c->cp_order || c->cp_heads))
        snprintf(text, n, "--cp%s: needs --cp of 2 or more",
                 c->cp_form    ? "-form"
                 : c->cp_order ? "-order"
                               : "-heads");
    else if (cp > 1 && context % chunks)
        snprintf(text, n, "--cp: the %s order cuts a row in %lld parts, which do not divide the %lld tokens",
                 chunks == cp ? "contiguous" : "zigzag", chunks, context);
    else if (cp > 1 && c->cp_form == MODEL_CP_EXCHANGE && heads % cp)
        snprintf(text, n, "--cp-form exchange: %lld ranks do not divide the %lld heads of each", cp, heads);
    else if (cp > 1 && c->cp_form == MODEL_CP_EXCHANGE && kv_heads % cp)
        snprintf(text, n, "--cp-form exchange: %lld ranks do not divide the %lld heads of keys of each", cp,
                 kv_heads);
    else if (c->cp_heads && c->cp_form > MODEL_CP_GATHER)
        snprintf(text, n, "--cp-heads: needs --cp-form gather");
    else if (c->cp_heads && heads % c->cp_heads)
        snprintf(text, n, "--cp-heads: %lld do not divide the %lld heads of a rank", (long long)c->cp_heads,
                 heads);
    else if (c->cp_heads % sharing)
        snprintf(text, n, "--cp-heads: %lld are not a multiple of the %lld heads that share one of keys",
                 (long long)c->cp_heads, sharing);
    return *text;
}

/* The config.json of the folder that --model names. One variable suffices, because a command has one
 * model. */
static struct hf_config folder_sizes;

/* Reads the value of --model: the name of a preset, or a folder. */
static error_t read_model(struct argp_state *state, const struct option_row *row, char *arg, void *to)
{
    struct model_options *m = to;
    char names[256] = "";
    struct stat file;
    m->dir = NULL;
    for (const struct option_word *p = preset_names; p->word; p++) {
        if (strcmp(p->word, arg) != 0)
            continue;
        m->preset = p->value;
        return 0;
    }
    if (strchr(arg, '/') || (!stat(arg, &file) && S_ISDIR(file.st_mode))) {
        m->dir = arg;
        return 0;
    }
    for (const struct option_word *p = preset_names; p->word; p++)
        option_list(names, sizeof names, p->word, !p[1].word);
    return option_fault(state, "--%s: '%s' is not %s, nor a folder", row->name, arg, names);
}

#define OPTION_STRUCT struct model_options
static const struct option_row rows[] = {
    {"model", "NAME|DIR",
     "gpt2-nano (default), gpt2-124M, gpt2-355M, gpt2-774M or gpt2-1.5B; or a Hugging Face folder of a "
     "Llama, Mistral, Qwen2 or Qwen3",
     OPTION_BY(read_model)},
    {"layers", "N", "Transformer blocks, instead of the model's own number",
     OPTION_INT(own.layers, 1, 10000)},
    {"heads", "N", "Attention heads", OPTION_INT(own.heads, 1, 10000)},
    {"channels", "N", "Width of the model, a multiple of the heads", OPTION_INT(own.channels, 1, 1000000)},
    {"context", "N", "Tokens in a row (the model's own number; at most 1024 for a folder)",
     OPTION_INT(own.context, 1, 1000000)},
    {"vocab", "N", "Token ids; training on bytes needs 256", OPTION_INT(own.vocab, 1, 100000000)},
    {0},
};

static error_t take_preset(struct argp_state *state, struct model_options *m)
{
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
    if (c->channels % c->heads)
        return option_fault(state, "--channels: %lld is not a multiple of the %lld heads",
                            (long long)c->channels, (long long)c->heads);
    return 0;
}

/* Takes the sizes from the folder. The user may ask for a shorter row and for fewer layers. */
static error_t take_folder(struct argp_state *state, struct model_options *m)
{
    struct model_config *c = &m->config;
    const struct model_config *own = &m->own;
    const char *slash = strrchr(m->dir, '/');
    if (hf_config_read(&folder_sizes, m->dir))
        return option_fault(state, "--model: %s", zr_error_text());
    if (own->heads || own->channels || own->vocab)
        return option_fault(state, "--%s: not with a folder as --model",
                            own->heads      ? "heads"
                            : own->channels ? "channels"
                                            : "vocab");
    *c = llama_sizes(&folder_sizes);
    if (own->context > c->context || own->layers > c->layers)
        return option_fault(state, "--%s: the model of %s has %lld at most",
                            own->context > c->context ? "context" : "layers", m->dir,
                            (long long)(own->context > c->context ? c->context : c->layers));
    c->context = own->context ? own->context : c->context < 1024 ? c->context : 1024;
    c->layers = own->layers ? own->layers : c->layers;
    m->name = slash && slash[1] ? slash + 1 : m->dir;
    m->default_lr = 2e-5;
    if (*folder_sizes.ignored)
        fprintf(stderr, "%s/" HF_CONFIG_FILE ": unknown fields, which are ignored: %s\n", m->dir,
                folder_sizes.ignored);
    return 0;
}

/* Computes config from the preset or the folder, and from own. Sizes replace those of the preset wherever
 * they are on the command line. */
static error_t finish(struct argp_state *state, void *options)
{
    struct model_options *m = options;
    struct model_config *c = &m->config;
    const struct model_config *own = &m->own;
    error_t err = m->dir ? take_folder(state, m) : take_preset(state, m);
    if (err)
        return err;
    c->label_smoothing = own->label_smoothing;
    c->tp = own->tp;
    c->sequence = own->sequence;
    c->cp = own->cp;
    c->cp_form = own->cp_form;
    c->cp_order = own->cp_order;
    c->cp_heads = own->cp_heads;
    c->documents = own->documents;
    c->recompute = own->recompute;
    return lora_take_options(state, c, own);
}

void model_take_nano(struct model_options *m)
{
    int64_t context = m->config.context;
    m->name = option_word_of(preset_names, NANO);
    m->default_lr = presets[NANO].lr;
    m->config = presets[NANO].config;
    m->config.context = context;
}

const struct option_table model_config_options = {.rows = rows, .header = "Model:", .finish = finish};
