/* SPDX-License-Identifier: Apache-2.0 */
/* test_hf_config.c: which config.json files are read, with which sizes, and which field a refusal names. */
#include "bench/llama/hf_config.h"
#include "kernels/error.h"
#include "test/cmocka.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

/* Values of "architectures". */
#define LLAMA   "LlamaForCausalLM"
#define MISTRAL "MistralForCausalLM"
#define QWEN2   "Qwen2ForCausalLM"
#define QWEN3   "Qwen3ForCausalLM"

/* The folder of this file's references, from the command line. */
static const char *references;

static const char *folder_of(const char *name)
{
    static char path[1024];
    snprintf(path, sizeof path, "%s/%s", references, name);
    return path;
}

/* ---- files that are read ---- */

static struct hf_config read_reference(const char *name)
{
    struct hf_config c;
    int err = hf_config_read(&c, folder_of(name));
    if (err)
        print_error("%s\n", zr_error_text());
    assert_int_equal(err, 0);
    assert_string_equal(c.ignored, "");
    assert_int_equal(c.channels, 32);
    assert_int_equal(c.heads, 4);
    assert_int_equal(c.context, 64);
    assert_int_equal(c.vocab, 67);
    return c;
}

static void llama_is_read_with_old_names(void **state)
{
    struct hf_config c = read_reference("llama");
    assert_string_equal(c.architecture, "LlamaForCausalLM");
    assert_int_equal(c.layers, 2);
    assert_int_equal(c.kv_heads, 2);
    assert_int_equal(c.head_size, 16);
    assert_int_equal(c.hidden, 48);
    assert_true(c.rms_eps == 1e-5);
    assert_false(c.tied || c.qkv_bias || c.qk_norm);
    assert_int_equal(c.dtype, ZERO_F32);
    assert_int_equal(c.bos, 1);
    assert_int_equal(c.n_eos, 2);
    assert_int_equal(c.eos[0], 2);
    assert_int_equal(c.eos[1], 3);
    assert_int_equal(c.rope.kind, HF_ROPE_LLAMA3);
    assert_true(c.rope.theta == 500 && c.rope.factor == 4);
    assert_true(c.rope.low_freq_factor == 1 && c.rope.high_freq_factor == 3);
    assert_int_equal(c.rope.original_context, 24);
}

static void mistral_is_read_with_linear_scaling(void **state)
{
    struct hf_config c = read_reference("mistral");
    assert_string_equal(c.architecture, "MistralForCausalLM");
    assert_int_equal(c.kv_heads, 4);
    assert_int_equal(c.head_size, 8);
    assert_int_equal(c.hidden, 56);
    assert_false(c.tied || c.qkv_bias || c.qk_norm);
    assert_int_equal(c.dtype, ZERO_BF16);
    assert_int_equal(c.rope.kind, HF_ROPE_LINEAR);
    assert_true(c.rope.theta == 10000 && c.rope.factor == 2.5);
}

static void qwen2_is_read_with_biases(void **state)
{
    struct hf_config c = read_reference("qwen2");
    assert_string_equal(c.architecture, "Qwen2ForCausalLM");
    assert_int_equal(c.layers, 3);
    assert_int_equal(c.kv_heads, 2);
    assert_int_equal(c.head_size, 8); /* channels / heads, for the file has no head_dim */
    assert_true(c.tied && c.qkv_bias && !c.qk_norm);
    assert_int_equal(c.bos, -1);
    assert_int_equal(c.n_eos, 1);
    assert_int_equal(c.rope.kind, HF_ROPE_PLAIN);
    assert_true(c.rope.theta == 1e6);
}

static void qwen3_is_read_with_norms_of_heads(void **state)
{
    struct hf_config c = read_reference("qwen3");
    assert_string_equal(c.architecture, "Qwen3ForCausalLM");
    assert_int_equal(c.head_size, 16);
    assert_true(c.tied && !c.qkv_bias && c.qk_norm);
    assert_true(c.rms_eps == 1e-6);
    assert_int_equal(c.dtype, ZERO_F32);
}

/* ---- a file with one change ---- */

static const char base_text[] =
    "{\"architectures\": [\"%s\"], \"hidden_size\": 64, \"intermediate_size\": 48, \"num_hidden_layers\": 2, "
    "\"num_attention_heads\": 8, \"max_position_embeddings\": 64, \"vocab_size\": 100}";

/* Parses the file of a class after a field was replaced by a value, which is JSON. value NULL: removed. A dot
 * in the name leads into an object. */
static int parse_changed(struct hf_config *c, const char *class, const char *field, const char *value)
{
    char text[600];
    snprintf(text, sizeof text, base_text, class);
    json_t *root = json_loads(text, 0, NULL);
    if (!strcmp(class, MISTRAL))
        json_object_set_new(root, "sliding_window", json_null());
    if (value)
        json_object_set_new(root, field, json_loads(value, JSON_DECODE_ANY, NULL));
    else
        json_object_del(root, field);
    char *changed = json_dumps(root, 0);
    int err = hf_config_parse(c, "the file", changed, strlen(changed));
    free(changed);
    json_decref(root);
    return err;
}

static struct hf_config accept(const char *class, const char *field, const char *value)
{
    struct hf_config c;
    int err = parse_changed(&c, class, field, value);
    if (err)
        print_error("%s: %s: %s\n", class, field, zr_error_text());
    assert_int_equal(err, 0);
    return c;
}

static void missing_fields_have_the_defaults_of_transformers(void **state)
{
    struct hf_config c = accept(LLAMA, "use_cache", "true");
    assert_int_equal(c.kv_heads, 8);
    assert_int_equal(c.head_size, 8);
    assert_true(c.rms_eps == 1e-6 && c.rope.theta == 10000 && c.rope.kind == HF_ROPE_PLAIN && !c.tied);
    assert_int_equal(c.dtype, 0);
    assert_int_equal(c.bos, -1);
    assert_int_equal(c.n_eos, 0);
    assert_int_equal(accept(MISTRAL, "use_cache", "true").kv_heads, 8);
    assert_int_equal(accept(QWEN2, "num_attention_heads", "32").kv_heads, 32);
    assert_int_equal(accept(QWEN3, "num_key_value_heads", "null").kv_heads, 8);
    assert_int_equal(accept(QWEN3, "num_attention_heads", "64").head_size, 128);
}

static void values_without_effect_are_accepted(void **state)
{
    static const char *const fields[][2] = {
        {"attention_bias", "false"},
        {"attention_dropout", "0"},
        {"attention_dropout", "0.0"},
        {"hidden_act", "\"silu\""},
        {"layer_types", "[\"full_attention\", \"full_attention\"]"},
        {"num_key_value_heads", "null"},
        {"partial_rotary_factor", "1"},
        {"pretraining_tp", "1"},
        {"quantization_config", "null"},
        {"rope_scaling", "null"},
        {"rope_scaling", "{\"type\": \"default\"}"},
        {"rope_scaling", "{\"rope_type\": \"linear\", \"factor\": 2, \"attention_factor\": null}"},
        {"rope_parameters", "{\"rope_type\": \"default\", \"partial_rotary_factor\": 1.0}"},
        {"sliding_window", "4096"},
        {"use_sliding_window", "false"},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        assert_string_equal(accept(LLAMA, fields[i][0], fields[i][1]).ignored, "");
    accept(QWEN2, "num_key_value_heads", "null");
    struct hf_config c = accept(LLAMA, "rope_scaling", "{\"type\": \"linear\", \"factor\": 3}");
    assert_true(c.rope.kind == HF_ROPE_LINEAR && c.rope.factor == 3 && c.rope.theta == 10000);
    c = accept(LLAMA, "rope_parameters", "{\"rope_theta\": 7}");
    assert_true(c.rope.kind == HF_ROPE_PLAIN && c.rope.theta == 7);
}

static void windows_that_no_layer_uses_are_accepted(void **state)
{
    struct hf_config c;
    static const char text[] =
        "{\"architectures\": [\"Qwen2ForCausalLM\"], \"hidden_size\": 32, \"intermediate_size\": 48, "
        "\"num_hidden_layers\": 4, \"num_attention_heads\": 4, \"num_key_value_heads\": 2, "
        "\"max_position_embeddings\": 64, \"vocab_size\": 100, \"use_sliding_window\": true, "
        "\"sliding_window\": 16, \"max_window_layers\": %d, \"attention_bias\": true}";
    for (int layers = 3; layers < 5; layers++) {
        char changed[sizeof text];
        int n = snprintf(changed, sizeof changed, text, layers);
        assert_int_equal(hf_config_parse(&c, "the file", changed, (size_t)n),
                         layers < 4 ? ZERO_ERR_NOTSUP : 0);
    }
}

static void unknown_fields_are_listed(void **state)
{
    struct hf_config c;
    char text[4000];
    int n = snprintf(text, sizeof text, base_text, LLAMA) - 1;
    assert_string_equal(accept(LLAMA, "logit_scale", "3").ignored, "logit_scale");
    for (int i = 0; i < 100; i++)
        n += snprintf(text + n, sizeof text - (size_t)n, ", \"field_number_%02d\": 1", i);
    n += snprintf(text + n, sizeof text - (size_t)n, "}");
    assert_int_equal(hf_config_parse(&c, "the file", text, (size_t)n), 0);
    assert_non_null(strstr(c.ignored, "field_number_00, field_number_01, "));
    assert_non_null(strstr(c.ignored, " more"));
    assert_true(strlen(c.ignored) < sizeof c.ignored);
}

/* ---- refusals ---- */

#define LLAMA3 "\"rope_type\": \"llama3\", \"factor\": 8, \"low_freq_factor\": 1"

/* class, field, its value (NULL: missing), and the message after "the file: " */
static const struct {
    int code;
    const char *class, *field, *value, *says;
} refused[] = {
    {ZERO_ERR_NOTSUP, LLAMA, "architectures", "[\"GemmaForCausalLM\"]",
     "architectures is [\"GemmaForCausalLM\"]; allowed: one of LlamaForCausalLM, MistralForCausalLM, "
     "Qwen2ForCausalLM, Qwen3ForCausalLM"},
    {ZERO_ERR_NOTSUP, LLAMA, "architectures", "[\"LlamaModel\"]", "architectures is [\"LlamaModel\"]"},
    {ZERO_ERR_NOTSUP, LLAMA, "architectures", "[]", "architectures is []"},
    {ZERO_ERR_NOTSUP, LLAMA, "architectures", "\"LlamaForCausalLM\"",
     "architectures is \"LlamaForCausalLM\""},
    {ZERO_ERR_NOTSUP, LLAMA, "architectures", NULL, "architectures is missing"},
    {ZERO_ERR_NOTSUP, LLAMA, "model_type", "\"mistral\"", "model_type is \"mistral\"; allowed: \"llama\""},
    /* what is not implemented */
    {ZERO_ERR_NOTSUP, LLAMA, "attention_bias", "true", "attention_bias is true; allowed: false"},
    {ZERO_ERR_NOTSUP, MISTRAL, "attention_bias", "true", "attention_bias is true; allowed: false"},
    {ZERO_ERR_NOTSUP, LLAMA, "mlp_bias", "true", "mlp_bias is true; allowed: false"},
    {ZERO_ERR_NOTSUP, LLAMA, "hidden_act", "\"gelu\"", "hidden_act is \"gelu\"; allowed: \"silu\""},
    {ZERO_ERR_NOTSUP, LLAMA, "attention_dropout", "0.1", "attention_dropout is 0.1"},
    {ZERO_ERR_NOTSUP, LLAMA, "pretraining_tp", "2", "pretraining_tp is 2; allowed: 1"},
    {ZERO_ERR_NOTSUP, LLAMA, "partial_rotary_factor", "0.5", "partial_rotary_factor is 0.5; allowed: 1"},
    {ZERO_ERR_NOTSUP, LLAMA, "rope_interleaved", "true", "rope_interleaved is true; allowed: false"},
    {ZERO_ERR_NOTSUP, LLAMA, "is_causal", "false", "is_causal is false; allowed: true"},
    {ZERO_ERR_NOTSUP, LLAMA, "is_encoder_decoder", "true", "is_encoder_decoder is true; allowed: false"},
    {ZERO_ERR_NOTSUP, LLAMA, "add_cross_attention", "true", "add_cross_attention is true; allowed: false"},
    {ZERO_ERR_NOTSUP, LLAMA, "use_mrope", "true", "use_mrope is true; allowed: false"},
    {ZERO_ERR_NOTSUP, LLAMA, "original_max_position_embeddings", "8",
     "original_max_position_embeddings is 8; allowed: null"},
    {ZERO_ERR_NOTSUP, LLAMA, "compression_config", "{}", "compression_config is {}; allowed: null"},
    {ZERO_ERR_NOTSUP, LLAMA, "quantization_config", "{\"quant_method\": \"gptq\"}",
     "quantization_config is {\"quant_method\":\"gptq\"}; allowed: null"},
    {ZERO_ERR_NOTSUP, LLAMA, "head_dim", "7", "head_dim is 7; allowed: an even number"},
    {ZERO_ERR_NOTSUP, LLAMA, "hidden_size", "40", "head_dim is 5; allowed: an even number"},
    {ZERO_ERR_NOTSUP, LLAMA, "torch_dtype", "\"float8_e4m3fn\"",
     "torch_dtype is \"float8_e4m3fn\"; allowed: float32, bfloat16, float16"},
    {ZERO_ERR_NOTSUP, LLAMA, "dtype", "16", "dtype is 16; allowed: float32, bfloat16, float16"},
    /* windows */
    {ZERO_ERR_NOTSUP, MISTRAL, "sliding_window", "4096", "sliding_window is 4096; allowed: null"},
    {ZERO_ERR_NOTSUP, MISTRAL, "sliding_window", NULL, "sliding_window is missing; allowed: null"},
    {ZERO_ERR_NOTSUP, LLAMA, "layer_types", "[\"full_attention\", \"sliding_attention\"]",
     "layer_types[1] is \"sliding_attention\"; allowed: \"full_attention\""},
    {ZERO_ERR_NOTSUP, LLAMA, "layer_types", "[1]", "layer_types[0] is 1; allowed: \"full_attention\""},
    /* rope */
    {ZERO_ERR_NOTSUP, LLAMA, "rope_scaling", "{\"type\": \"dynamic\", \"factor\": 2}",
     "rope_scaling.type is \"dynamic\"; allowed: default, linear, llama3"},
    {ZERO_ERR_NOTSUP, LLAMA, "rope_scaling", "{\"rope_type\": \"yarn\", \"factor\": 4}",
     "rope_scaling.rope_type is \"yarn\"; allowed: default, linear, llama3"},
    {ZERO_ERR_NOTSUP, LLAMA, "rope_parameters", "{\"rope_type\": \"longrope\"}",
     "rope_parameters.rope_type is \"longrope\"; allowed: default, linear, llama3"},
    {ZERO_ERR_NOTSUP, LLAMA, "rope_parameters", "{\"rope_type\": 1}", "rope_parameters.rope_type is 1"},
    {ZERO_ERR_NOTSUP, LLAMA, "rope_parameters", "{\"full_attention\": {}}",
     "rope_parameters.full_attention is {}; allowed: null"},
    {ZERO_ERR_NOTSUP, LLAMA, "rope_scaling", "{\"type\": \"default\", \"mrope_section\": [16, 24]}",
     "rope_scaling.mrope_section is [16,24]; allowed: null"},
    {ZERO_ERR_NOTSUP, LLAMA, "rope_parameters", "{\"partial_rotary_factor\": 0.25}",
     "rope_parameters.partial_rotary_factor is 0.25; allowed: 1"},
    {ZERO_ERR_ARG, LLAMA, "rope_scaling", "\"linear\"",
     "rope_scaling is \"linear\"; allowed: an object, null"},
    {ZERO_ERR_ARG, LLAMA, "rope_scaling", "{\"type\": \"linear\"}",
     "rope_scaling.factor is missing; allowed: a number above 0"},
    {ZERO_ERR_ARG, LLAMA, "rope_scaling", "{\"type\": \"linear\", \"factor\": 0}",
     "rope_scaling.factor is 0; allowed: a number above 0"},
    {ZERO_ERR_ARG, LLAMA, "rope_scaling", "{\"rope_type\": \"llama3\", \"factor\": 8}",
     "rope_scaling.low_freq_factor is missing"},
    {ZERO_ERR_ARG, LLAMA, "rope_scaling", "{" LLAMA3 "}", "rope_scaling.high_freq_factor is missing"},
    {ZERO_ERR_ARG, LLAMA, "rope_scaling", "{" LLAMA3 ", \"high_freq_factor\": 1}",
     "rope_scaling.high_freq_factor is 1; allowed: a number above low_freq_factor"},
    {ZERO_ERR_ARG, LLAMA, "rope_scaling",
     "{" LLAMA3 ", \"high_freq_factor\": 4, \"original_max_position_embeddings\": 0.5}",
     "rope_scaling.original_max_position_embeddings is 0.5; allowed: a whole number from 1"},
    {ZERO_ERR_ARG, LLAMA, "rope_theta", "-1", "rope_theta is -1; allowed: a number above 0"},
    /* values of the wrong kind */
    {ZERO_ERR_ARG, LLAMA, "num_hidden_layers", NULL, "num_hidden_layers is missing; allowed: a whole number"},
    {ZERO_ERR_ARG, LLAMA, "num_attention_heads", "0", "num_attention_heads is 0; allowed: a whole number"},
    {ZERO_ERR_ARG, LLAMA, "hidden_size", "\"32\"", "hidden_size is \"32\"; allowed: a whole number"},
    {ZERO_ERR_ARG, LLAMA, "intermediate_size", "48.5", "intermediate_size is 48.5"},
    {ZERO_ERR_ARG, LLAMA, "max_position_embeddings", "-64", "max_position_embeddings is -64"},
    {ZERO_ERR_ARG, LLAMA, "vocab_size", "1000000001", "vocab_size is 1000000001"},
    {ZERO_ERR_ARG, LLAMA, "num_key_value_heads", "3",
     "num_key_value_heads is 3; allowed: a divisor of the 8 heads"},
    {ZERO_ERR_ARG, LLAMA, "hidden_size", "36", "hidden_size is 36; allowed without head_dim: a multiple of"},
    {ZERO_ERR_ARG, LLAMA, "head_dim", "0", "head_dim is 0; allowed: a whole number from 1"},
    {ZERO_ERR_ARG, LLAMA, "rms_norm_eps", "0", "rms_norm_eps is 0; allowed: a number above 0"},
    {ZERO_ERR_ARG, LLAMA, "tie_word_embeddings", "1", "tie_word_embeddings is 1; allowed: true, false"},
    {ZERO_ERR_ARG, LLAMA, "bos_token_id", "100", "bos_token_id is 100; allowed: a number below vocab_size"},
    {ZERO_ERR_ARG, LLAMA, "eos_token_id", "[1, \"2\"]", "eos_token_id is \"2\""},
    {ZERO_ERR_NOTSUP, LLAMA, "eos_token_id", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]",
     "eos_token_id has 17 numbers; allowed: at most 16"},
};

static void refusals_name_the_field_and_what_is_allowed(void **state)
{
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        struct hf_config c;
        char says[400];
        int err = parse_changed(&c, refused[i].class, refused[i].field, refused[i].value);
        snprintf(says, sizeof says, "the file: %s", refused[i].says);
        if (err != refused[i].code || strncmp(zr_error_text(), says, strlen(says)) != 0)
            fail_msg("%s = %s: code %d, message \"%s\", but expected %d, \"%s\"", refused[i].field,
                     refused[i].value ? refused[i].value : "missing", err, err ? zr_error_text() : "",
                     refused[i].code, says);
    }
}

static void both_places_of_rope_are_refused_if_they_differ(void **state)
{
    struct hf_config c;
    char text[800];
    for (int factor = 2; factor < 4; factor++) {
        int n = snprintf(text, sizeof text, base_text, LLAMA) - 1;
        n += snprintf(text + n, sizeof text - (size_t)n,
                      ", \"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 2}, "
                      "\"rope_parameters\": {\"rope_type\": \"linear\", \"factor\": %d}}",
                      factor);
        assert_int_equal(hf_config_parse(&c, "the file", text, (size_t)n), factor == 2 ? 0 : ZERO_ERR_ARG);
    }
    assert_non_null(strstr(zr_error_text(), "rope_scaling is {"));
    assert_non_null(strstr(zr_error_text(), "allowed: null beside rope_parameters"));
}

/* ---- damage ---- */

static char *load(const char *path, size_t *n)
{
    char *text = malloc(1 << 16);
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    *n = fread(text, 1, 1 << 16, f);
    fclose(f);
    return text;
}

static void a_file_cut_short_is_not_json(void **state)
{
    char path[1100];
    size_t n;
    struct hf_config c;
    snprintf(path, sizeof path, "%s/config.json", folder_of("llama"));
    char *text = load(path, &n);
    while (n && text[n - 1] != '}')
        n--;
    for (size_t cut = 0; cut < n; cut++) {
        assert_int_equal(hf_config_parse(&c, "the file", text, cut), ZERO_ERR_IO);
        assert_non_null(strstr(zr_error_text(), "the file: line "));
        assert_non_null(strstr(zr_error_text(), ": not JSON: "));
    }
    free(text);
}

/* Whatever a byte becomes, the file is read, or the message names it. */
static void changed_bytes_are_read_or_refused(void **state)
{
    static const char values[] = {0, '"', '{', '}', '[', ',', '9', '-', 'e', '\\', (char)0x80, (char)0xff};
    static const char *const names[] = {"llama", "mistral", "qwen2", "qwen3"};
    for (size_t k = 0; k < sizeof names / sizeof *names; k++) {
        char path[1100];
        size_t n;
        snprintf(path, sizeof path, "%s/config.json", folder_of(names[k]));
        char *text = load(path, &n);
        for (size_t i = 0; i < n; i++)
            for (size_t v = 0; v < sizeof values; v++) {
                struct hf_config c;
                char before = text[i];
                text[i] = values[v];
                if (hf_config_parse(&c, "the file", text, n))
                    assert_ptr_equal(strstr(zr_error_text(), "the file: "), zr_error_text());
                else
                    assert_true(c.head_size % 2 == 0 && c.heads % c.kv_heads == 0 && c.rope.theta > 0);
                text[i] = before;
            }
        free(text);
    }
}

static void other_json_is_refused(void **state)
{
    struct hf_config c;
    static const char twice[] = "{\"a\": 1, \"a\": 2}";
    assert_int_equal(hf_config_parse(&c, "the file", "[1]", 3), ZERO_ERR_IO);
    assert_string_equal(zr_error_text(), "the file: not a JSON object");
    assert_int_equal(hf_config_parse(&c, "the file", twice, sizeof twice - 1), ZERO_ERR_IO);
    assert_non_null(strstr(zr_error_text(), "duplicate"));
}

static void files_that_cannot_be_read_are_named(void **state)
{
    struct hf_config c;
    char folder[] = "/tmp/hf-config-XXXXXX", path[64], longest[1200];
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/config.json", folder);
    assert_int_equal(hf_config_read(&c, folder), ZERO_ERR_IO);
    assert_non_null(strstr(zr_error_text(), path));
    assert_non_null(strstr(zr_error_text(), "No such file"));
    assert_int_equal(mkdir(path, 0700), 0);
    assert_int_equal(hf_config_read(&c, folder), ZERO_ERR_IO);
    assert_non_null(strstr(zr_error_text(), path));
    rmdir(path);
    rmdir(folder);
    memset(longest, 'x', sizeof longest);
    longest[sizeof longest - 1] = 0;
    assert_int_equal(hf_config_read(&c, longest), ZERO_ERR_ARG);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(llama_is_read_with_old_names),
        cmocka_unit_test(mistral_is_read_with_linear_scaling),
        cmocka_unit_test(qwen2_is_read_with_biases),
        cmocka_unit_test(qwen3_is_read_with_norms_of_heads),
        cmocka_unit_test(missing_fields_have_the_defaults_of_transformers),
        cmocka_unit_test(values_without_effect_are_accepted),
        cmocka_unit_test(windows_that_no_layer_uses_are_accepted),
        cmocka_unit_test(unknown_fields_are_listed),
        cmocka_unit_test(refusals_name_the_field_and_what_is_allowed),
        cmocka_unit_test(both_places_of_rope_are_refused_if_they_differ),
        cmocka_unit_test(a_file_cut_short_is_not_json),
        cmocka_unit_test(changed_bytes_are_read_or_refused),
        cmocka_unit_test(other_json_is_refused),
        cmocka_unit_test(files_that_cannot_be_read_are_named),
    };
    references = argc > 1 ? argv[1] : "references";
    return cmocka_run_group_tests(tests, NULL, NULL);
}
