/* SPDX-License-Identifier: Apache-2.0 */
/* hf_config.c: the fields of config.json. Tables say which values are allowed and which fields are harmless,
 * so that a field is either read, refused, known to be harmless, or reported as ignored. */
#include "bench/llama/hf_config.h"
#include "kernels/error.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#define MAX_FILE   (1 << 20)  /* bytes; a real one has about a thousand */
#define MAX_NUMBER 1000000000 /* of any size, so that products of two fit into 64 bits */

/* A class of transformers, and what it assumes if a field is missing. */
struct architecture {
    const char *name, *model_type;
    /* 0: as many as heads */
    int64_t kv_heads;
    /* 0: channels / heads */
    int64_t head_size;
    bool qkv_bias, qk_norm;
    /* sliding_window has effect without use_sliding_window */
    bool window_always;
};

static const struct architecture architectures[] = {
    {"LlamaForCausalLM", "llama", 0, 0, .qkv_bias = false},
    {"MistralForCausalLM", "mistral", 8, 0, .window_always = true},
    {"Qwen2ForCausalLM", "qwen2", 32, 0, .qkv_bias = true},
    {"Qwen3ForCausalLM", "qwen3", 32, 128, .qk_norm = true},
};
#define ALLOWED_ARCHITECTURES "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"

/* Fields that may have one value only, which is also the default. Without `allowed` they may only be null. */
static const struct {
    const char *name, *allowed;
} fixed[] = {
    {"add_cross_attention", "false"}, {"attention_bias", "false"}, {"attention_dropout", "0"},
    {"compression_config", NULL},     {"hidden_act", "\"silu\""},  {"is_causal", "true"},
    {"is_encoder_decoder", "false"},  {"mlp_bias", "false"},       {"original_max_position_embeddings", NULL},
    {"partial_rotary_factor", "1"},   {"pretraining_tp", "1"},     {"quantization_config", NULL},
    {"rope_interleaved", "false"},    {"use_mrope", "false"},
};

/* Fields that do not change what the model computes, and those that other functions read. */
static const char *const harmless[] = {
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "head_dim",
    "hidden_size",
    "id2label",
    "initializer_range",
    "intermediate_size",
    "is_decoder",
    "is_llama_config",
    "label2id",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "tokenizer_class",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
    "use_sliding_window",
    "vocab_size",
};

/* A JSON object that is read. prefix: its own name for messages, with a dot; "" for the whole file. */
struct object {
    const char *file, *prefix;
    const json_t *json;
};

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ---- single fields ---- */

/* Returns a field. NULL: it is missing or null. */
static const json_t *find(const struct object *o, const char *name)
{
    const json_t *value = json_object_get(o->json, name);
    return json_is_null(value) ? NULL : value;
}

/* Fails with a message that names the field and its value. */
static int refuse(int code, const struct object *o, const char *name, const json_t *value,
                  const char *allowed)
{
    char *text = value ? json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
    int err = zr_fail(code, "%s: %s%s is %.100s; allowed: %s", o->file, o->prefix, name,
                      text    ? text
                      : value ? "not printable"
                              : "missing",
                      allowed);
    free(text);
    return err;
}

/* Reads a whole number from 0 or 1 to MAX_NUMBER. fallback: for a missing field; -1: it must be there. */
static int read_int(const struct object *o, const char *name, int64_t least, int64_t fallback, int64_t *out)
{
    const json_t *value = find(o, name);
    char allowed[60];
    *out = value ? json_integer_value(value) : fallback;
    if (value ? json_is_integer(value) && *out >= least && *out <= MAX_NUMBER : fallback >= 0)
        return 0;
    snprintf(allowed, sizeof allowed, "a whole number from %lld to %d", (long long)least, MAX_NUMBER);
    return refuse(ZERO_ERR_ARG, o, name, value, allowed);
}

/* Reads a number above 0. fallback as in read_int. */
static int read_real(const struct object *o, const char *name, double fallback, double *out)
{
    const json_t *value = find(o, name);
    *out = value ? json_number_value(value) : fallback;
    return *out > 0 ? 0 : refuse(ZERO_ERR_ARG, o, name, value, "a number above 0");
}

static int read_bool(const struct object *o, const char *name, bool *out)
{
    const json_t *value = find(o, name);
    *out = json_is_true(value);
    return !value || json_is_boolean(value) ? 0 : refuse(ZERO_ERR_ARG, o, name, value, "true, false");
}

static bool same_value(const json_t *a, const json_t *b)
{
    if (json_is_number(a) && json_is_number(b))
        return json_number_value(a) == json_number_value(b);
    return json_equal(a, b);
}

/* Checks that a field has its only allowed value, or is missing. allowed NULL: it must be missing. */
static int check_fixed(const struct object *o, const char *name, const char *allowed)
{
    const json_t *value = find(o, name);
    if (!value)
        return 0;
    json_t *only = allowed ? json_loads(allowed, JSON_DECODE_ANY, NULL) : NULL;
    bool same = same_value(value, only);
    json_decref(only);
    return same ? 0 : refuse(ZERO_ERR_NOTSUP, o, name, value, allowed ? allowed : "null");
}

/* ---- groups of fields ---- */

static int read_architecture(const struct object *o, const struct architecture **out)
{
    const json_t *all = find(o, "architectures"), *type = find(o, "model_type");
    const char *name = json_array_size(all) == 1 ? json_string_value(json_array_get(all, 0)) : NULL;
    *out = NULL;
    for (size_t i = 0; name && i < COUNT(architectures); i++)
        if (!strcmp(architectures[i].name, name))
            *out = &architectures[i];
    if (!*out)
        return refuse(ZERO_ERR_NOTSUP, o, "architectures", all, "one of " ALLOWED_ARCHITECTURES);
    if (type && (!json_is_string(type) || strcmp(json_string_value(type), (*out)->model_type) != 0)) {
        char allowed[100];
        snprintf(allowed, sizeof allowed, "\"%s\" with architectures %s", (*out)->model_type, (*out)->name);
        return refuse(ZERO_ERR_NOTSUP, o, "model_type", type, allowed);
    }
    return 0;
}

static int read_sizes(const struct object *o, const struct architecture *a, struct hf_config *c)
{
    ZR_TRY(read_int(o, "num_hidden_layers", 1, -1, &c->layers));
    ZR_TRY(read_int(o, "num_attention_heads", 1, -1, &c->heads));
    ZR_TRY(read_int(o, "hidden_size", 1, -1, &c->channels));
    ZR_TRY(read_int(o, "intermediate_size", 1, -1, &c->hidden));
    ZR_TRY(read_int(o, "max_position_embeddings", 1, -1, &c->context));
    ZR_TRY(read_int(o, "vocab_size", 1, -1, &c->vocab));
    /* null has another meaning than a missing field: as many as heads */
    bool given_null = json_is_null(json_object_get(o->json, "num_key_value_heads"));
    ZR_TRY(read_int(o, "num_key_value_heads", 1, a->kv_heads && !given_null ? a->kv_heads : c->heads,
                    &c->kv_heads));
    if (c->heads % c->kv_heads)
        return zr_fail(ZERO_ERR_ARG, "%s: num_key_value_heads is %lld; allowed: a divisor of the %lld heads",
                       o->file, (long long)c->kv_heads, (long long)c->heads);
    ZR_TRY(read_int(o, "head_dim", 1, a->head_size, &c->head_size));
    if (!c->head_size && c->channels % c->heads)
        return zr_fail(ZERO_ERR_ARG,
                       "%s: hidden_size is %lld; allowed without head_dim: a multiple of the %lld heads",
                       o->file, (long long)c->channels, (long long)c->heads);
    c->head_size = c->head_size ? c->head_size : c->channels / c->heads;
    if (c->head_size % 2)
        return zr_fail(ZERO_ERR_NOTSUP, "%s: head_dim is %lld; allowed: an even number, for the rotation",
                       o->file, (long long)c->head_size);
    return read_real(o, "rms_norm_eps", 1e-6, &c->rms_eps);
}

/* Attention over a window of tokens is not implemented. */
static int check_windows(const struct object *o, const struct architecture *a, const struct hf_config *c)
{
    const json_t *window = find(o, "sliding_window"), *types = find(o, "layer_types"), *type;
    bool uses = false, is_null = json_is_null(json_object_get(o->json, "sliding_window"));
    int64_t first_layer;
    size_t i;
    if (a->window_always && !is_null) /* if the field is missing, it is 4096 */
        return refuse(ZERO_ERR_NOTSUP, o, "sliding_window", window, "null");
    ZR_TRY(read_bool(o, "use_sliding_window", &uses));
    ZR_TRY(read_int(o, "max_window_layers", 0, 28, &first_layer));
    if (uses && !is_null && first_layer < c->layers)
        return refuse(ZERO_ERR_NOTSUP, o, "use_sliding_window", find(o, "use_sliding_window"), "false");
    json_array_foreach((json_t *)(uintptr_t)types, i, type)
    {
        char name[40];
        snprintf(name, sizeof name, "layer_types[%zu]", i);
        if (!json_is_string(type) || strcmp(json_string_value(type), "full_attention") != 0)
            return refuse(ZERO_ERR_NOTSUP, o, name, type, "\"full_attention\"");
    }
    return 0;
}

/* Reads the kind, whose name older files spell "type". */
static int read_rope_kind(const struct object *o, enum hf_rope_kind *out)
{
    const char *field = find(o, "rope_type") ? "rope_type" : "type";
    const json_t *value = find(o, field);
    const char *name = value ? json_string_value(value) : "default";
    if (name && !strcmp(name, "default"))
        *out = HF_ROPE_PLAIN;
    else if (name && !strcmp(name, "linear"))
        *out = HF_ROPE_LINEAR;
    else if (name && !strcmp(name, "llama3"))
        *out = HF_ROPE_LLAMA3;
    else
        return refuse(ZERO_ERR_NOTSUP, o, field, value, "default, linear, llama3");
    return 0;
}

/* Refuses fields of kinds that are not implemented, such as mrope_section. */
static int check_rope_fields(const struct object *o)
{
    static const char *const known[] = {
        "factor",
        "high_freq_factor",
        "low_freq_factor",
        "original_max_position_embeddings",
        "rope_type",
        "rope_theta",
        "type",
        "partial_rotary_factor",
    };
    const char *name;
    json_t *value;
    ZR_TRY(check_fixed(o, "partial_rotary_factor", "1"));
    json_object_foreach((json_t *)(uintptr_t)o->json, name, value)
    {
        bool is_known = json_is_null(value);
        for (size_t i = 0; i < COUNT(known); i++)
            is_known |= !strcmp(name, known[i]);
        if (!is_known)
            return refuse(ZERO_ERR_NOTSUP, o, name, value, "null");
    }
    return 0;
}

/* Reads the numbers of the kind. */
static int read_rope_numbers(const struct object *o, int64_t context, struct hf_rope *r)
{
    ZR_TRY(read_real(o, "rope_theta", r->theta, &r->theta));
    if (r->kind != HF_ROPE_PLAIN)
        ZR_TRY(read_real(o, "factor", -1, &r->factor));
    if (r->kind != HF_ROPE_LLAMA3)
        return 0;
    ZR_TRY(read_real(o, "low_freq_factor", -1, &r->low_freq_factor));
    ZR_TRY(read_real(o, "high_freq_factor", -1, &r->high_freq_factor));
    ZR_TRY(read_int(o, "original_max_position_embeddings", 1, context, &r->original_context));
    if (r->low_freq_factor < r->high_freq_factor)
        return 0;
    return refuse(ZERO_ERR_ARG, o, "high_freq_factor", find(o, "high_freq_factor"),
                  "a number above low_freq_factor");
}

/* transformers 5 has all fields in rope_parameters. Before, rope_theta was beside rope_scaling. */
static int read_rope(const struct object *o, struct hf_config *c)
{
    const json_t *scaling = find(o, "rope_scaling"), *parameters = find(o, "rope_parameters");
    const char *name = parameters ? "rope_parameters" : "rope_scaling";
    struct object in = {o->file, parameters ? "rope_parameters." : "rope_scaling.",
                        parameters ? parameters : scaling};
    if (parameters && scaling && !json_equal(parameters, scaling))
        return refuse(ZERO_ERR_ARG, o, "rope_scaling", scaling, "null beside rope_parameters");
    ZR_TRY(read_real(o, "rope_theta", 10000, &c->rope.theta));
    if (!in.json)
        return 0;
    if (!json_is_object(in.json))
        return refuse(ZERO_ERR_ARG, o, name, in.json, "an object, null");
    ZR_TRY(read_rope_kind(&in, &c->rope.kind));
    ZR_TRY(check_rope_fields(&in));
    return read_rope_numbers(&in, c->context, &c->rope);
}

/* torch_dtype was renamed to dtype in transformers 5. */
static int read_dtype(const struct object *o, struct hf_config *c)
{
    static const struct {
        const char *name;
        enum zero_dtype dtype;
    } dtypes[] = {{"float32", ZERO_F32}, {"bfloat16", ZERO_BF16}, {"float16", ZERO_F16}};
    const char *field = find(o, "dtype") ? "dtype" : "torch_dtype";
    const json_t *value = find(o, field);
    for (size_t i = 0; json_is_string(value) && i < COUNT(dtypes); i++)
        if (!strcmp(json_string_value(value), dtypes[i].name))
            c->dtype = dtypes[i].dtype;
    return !value || c->dtype ? 0 : refuse(ZERO_ERR_NOTSUP, o, field, value, "float32, bfloat16, float16");
}

static int read_token(const struct object *o, const char *name, const json_t *value, int64_t vocab,
                      int64_t *out)
{
    *out = json_integer_value(value);
    return json_is_integer(value) && *out >= 0 && *out < vocab
               ? 0
               : refuse(ZERO_ERR_ARG, o, name, value, "a number below vocab_size, null");
}

/* eos_token_id is a number or an array of numbers. */
static int read_special_tokens(const struct object *o, struct hf_config *c)
{
    const json_t *bos = find(o, "bos_token_id"), *eos = find(o, "eos_token_id");
    size_t n = json_is_array(eos) ? json_array_size(eos) : eos ? 1 : 0;
    c->bos = -1;
    if (bos)
        ZR_TRY(read_token(o, "bos_token_id", bos, c->vocab, &c->bos));
    if (n > HF_MAX_EOS)
        return zr_fail(ZERO_ERR_NOTSUP, "%s: eos_token_id has %zu numbers; allowed: at most %d", o->file, n,
                       HF_MAX_EOS);
    for (size_t i = 0; i < n; i++)
        ZR_TRY(read_token(o, "eos_token_id", json_is_array(eos) ? json_array_get(eos, i) : eos, c->vocab,
                          &c->eos[i]));
    c->n_eos = (int32_t)n;
    return 0;
}

/* Qwen2 ignores attention_bias: its biases are always there. */
static int check_fixed_fields(const struct object *o, const struct architecture *a)
{
    for (size_t i = 0; i < COUNT(fixed); i++)
        if (!a->qkv_bias || strcmp(fixed[i].name, "attention_bias") != 0)
            ZR_TRY(check_fixed(o, fixed[i].name, fixed[i].allowed));
    return 0;
}

static bool is_known(const char *name)
{
    bool known = false;
    for (size_t i = 0; i < COUNT(fixed); i++)
        known |= !strcmp(name, fixed[i].name);
    for (size_t i = 0; i < COUNT(harmless); i++)
        known |= !strcmp(name, harmless[i]);
    return known;
}

/* Lists fields that no table has. Those that do not fit are counted. */
static void list_ignored(const struct object *o, char *text, size_t size)
{
    const char *name;
    json_t *value;
    size_t used = 0, more = 0, room = size - sizeof " and 999999 more";
    *text = 0;
    json_object_foreach((json_t *)(uintptr_t)o->json, name, value)
    {
        size_t n = strlen(name) + 2;
        if (is_known(name))
            continue;
        if (used + n < room)
            used += (size_t)snprintf(text + used, size - used, "%s%s", used ? ", " : "", name);
        else
            more++;
    }
    if (more)
        snprintf(text + used, size - used, " and %zu more", more);
}

static int read_all(const struct object *o, struct hf_config *c)
{
    const struct architecture *a;
    ZR_TRY(read_architecture(o, &a));
    c->architecture = a->name;
    c->qkv_bias = a->qkv_bias;
    c->qk_norm = a->qk_norm;
    ZR_TRY(read_sizes(o, a, c));
    ZR_TRY(check_fixed_fields(o, a));
    ZR_TRY(check_windows(o, a, c));
    ZR_TRY(read_rope(o, c));
    ZR_TRY(read_bool(o, "tie_word_embeddings", &c->tied));
    ZR_TRY(read_dtype(o, c));
    ZR_TRY(read_special_tokens(o, c));
    list_ignored(o, c->ignored, sizeof c->ignored);
    return 0;
}

/* ---- the file ---- */

int hf_config_parse(struct hf_config *out, const char *file, const char *text, size_t n)
{
    json_error_t why;
    *out = (struct hf_config){0};
    json_t *root = json_loadb(text, n, JSON_REJECT_DUPLICATES, &why);
    struct object o = {file, "", root};
    int err;
    if (!root)
        err = zr_fail(ZERO_ERR_IO, "%s: line %d: not JSON: %.150s", file, why.line, why.text);
    else if (!json_is_object(root))
        err = zr_fail(ZERO_ERR_IO, "%s: not a JSON object", file);
    else
        err = read_all(&o, out);
    json_decref(root);
    return err;
}

int hf_config_read(struct hf_config *out, const char *dir)
{
    char path[1024];
    FILE *f = NULL;
    char *text = malloc(MAX_FILE);
    int err = 0;
    *out = (struct hf_config){0};
    if (!text)
        err = zr_fail(ZERO_ERR_NOMEM, "no memory to read %s/" HF_CONFIG_FILE, dir);
    else if ((size_t)snprintf(path, sizeof path, "%s/" HF_CONFIG_FILE, dir) >= sizeof path)
        err = zr_fail(ZERO_ERR_ARG, "%.100s...: the path has more than %zu bytes", dir, sizeof path - 1);
    else if (!(f = fopen(path, "rb")))
        err = zr_fail(ZERO_ERR_IO, "%s: cannot be opened: %s", path, strerror(errno));
    size_t n = f ? fread(text, 1, MAX_FILE, f) : 0;
    if (f && ferror(f))
        err = zr_fail(ZERO_ERR_IO, "%s: cannot be read: %s", path, strerror(errno));
    else if (n == MAX_FILE)
        err = zr_fail(ZERO_ERR_IO, "%s: has %d bytes or more", path, MAX_FILE);
    if (f)
        fclose(f);
    if (!err)
        err = hf_config_parse(out, path, text, n);
    free(text);
    return err;
}
