/* SPDX-License-Identifier: Apache-2.0 */
/* lora_config.c: options of adapters and the fields of adapter_config.json. A field that this file does not
 * know may be there if it asks for nothing: null, false, or an empty list, object or text. */
#include "bench/llama/lora_config.h"
#include "bench/llama/hf_folder.h"
#include "kernels/error.h"

#include <stdio.h>
#include <string.h>

#include <jansson.h>

#define ALL_TARGETS ((UINT32_C(1) << LORA_N_TARGETS) - 1)

static const char *const target_names[LORA_N_TARGETS] = {
    [LORA_Q] = "q_proj",       [LORA_K] = "k_proj",   [LORA_V] = "v_proj",       [LORA_O] = "o_proj",
    [LORA_GATE] = "gate_proj", [LORA_UP] = "up_proj", [LORA_DOWN] = "down_proj",
};
#define ALLOWED_TARGETS "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"

/* Fields that other functions read, and those that do not change what a trained adapter computes. */
static const char *const known[] = {
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "corda_config",
    "eva_config",
    "inference_mode",
    "loftq_config",
    "init_lora_weights",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "target_modules",
    "task_type",
};

/* The bit of a target with this name of n characters. 0: there is none. */
static uint32_t target_of(const char *name, size_t n)
{
    for (int t = 0; t < LORA_N_TARGETS; t++)
        if (strlen(target_names[t]) == n && !memcmp(target_names[t], name, n))
            return UINT32_C(1) << t;
    return 0;
}

/* ---- options ---- */

error_t lora_read_targets(struct argp_state *state, const struct option_row *row, char *arg, void *to)
{
    uint32_t *targets = to;
    *targets = 0;
    for (const char *at = arg, *end; at; at = *end ? end + 1 : NULL) {
        end = at + strcspn(at, ",");
        uint32_t bit = target_of(at, (size_t)(end - at));
        if (!bit)
            return option_fault(state, "--%s: '%.*s' is not one of " ALLOWED_TARGETS, row->name,
                                (int)(end - at), at);
        *targets |= bit;
    }
    return 0;
}

error_t lora_take_options(struct argp_state *state, struct model_config *c, const struct model_config *own)
{
    if (!own->lora_rank && (own->lora_alpha > 0 || own->lora_targets))
        return option_fault(state, "--lora-%s: needs --lora", own->lora_targets ? "targets" : "alpha");
    if (own->lora_rank && !c->hf)
        return option_fault(state, "--lora: needs the folder of a model as --model");
    c->lora_rank = own->lora_rank;
    c->lora_alpha = own->lora_alpha > 0 ? own->lora_alpha : 2 * (double)own->lora_rank;
    c->lora_targets = own->lora_targets ? own->lora_targets : ALL_TARGETS;
    return 0;
}

/* ---- adapter_config.json ---- */

static bool asks_for_nothing(const json_t *value)
{
    return json_is_null(value) || json_is_false(value) || (json_is_array(value) && !json_array_size(value)) ||
           (json_is_object(value) && !json_object_size(value)) ||
           (json_is_string(value) && !json_string_length(value));
}

static bool is_known(const char *name)
{
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(known[i], name))
            return true;
    return false;
}

/* Refuses what is not a plain adapter. A weight of PiSSA, OLoRA or CorDA belongs to a base that they
 * changed. */
static int check_kind(const char *path, json_t *root)
{
    const json_t *kind = json_object_get(root, "peft_type"), *bias = json_object_get(root, "bias"),
                 *start = json_object_get(root, "init_lora_weights");
    const char *name;
    json_t *value;
    if (!json_is_string(kind) || strcmp(json_string_value(kind), "LORA") != 0)
        return zr_fail(ZERO_ERR_NOTSUP, "%s: peft_type is not \"LORA\"", path);
    if (bias && !(json_is_string(bias) && !strcmp(json_string_value(bias), "none")))
        return zr_fail(ZERO_ERR_NOTSUP, "%s: bias is not \"none\"", path);
    if (json_is_string(start) && strcmp(json_string_value(start), "gaussian") != 0)
        return zr_fail(ZERO_ERR_NOTSUP,
                       "%s: init_lora_weights is \"%.40s\"; allowed: true, false, \"gaussian\"", path,
                       json_string_value(start));
    json_object_foreach(root, name, value)
    {
        if (!is_known(name) && !asks_for_nothing(value))
            return zr_fail(ZERO_ERR_NOTSUP,
                           "%s: %.60s has a value, but such adapters are not implemented here; allowed: null "
                           "or false",
                           path, name);
    }
    return 0;
}

static int read_targets(const char *path, const json_t *list, uint32_t *targets)
{
    const json_t *value;
    size_t i;
    *targets = 0;
    if (json_is_string(list) && !strcmp(json_string_value(list), "all-linear"))
        *targets = ALL_TARGETS;
    else if (!json_is_array(list) || !json_array_size(list))
        return zr_fail(ZERO_ERR_NOTSUP, "%s: target_modules is not a list of some of " ALLOWED_TARGETS, path);
    json_array_foreach(list, i, value)
    {
        const char *name = json_string_value(value);
        uint32_t bit = name ? target_of(name, strlen(name)) : 0;
        if (!bit)
            return zr_fail(ZERO_ERR_NOTSUP, "%s: target_modules has \"%.60s\"; allowed: " ALLOWED_TARGETS,
                           path, name ? name : "");
        *targets |= bit;
    }
    return 0;
}

/* Takes over the adapters of the file, or compares them with those of c. */
static int take(struct model_config *c, const char *path, json_t *root)
{
    int64_t rank = json_integer_value(json_object_get(root, "r"));
    double alpha = json_number_value(json_object_get(root, "lora_alpha")),
           dropout = json_number_value(json_object_get(root, "lora_dropout"));
    uint32_t targets;
    ZR_TRY(check_kind(path, root));
    ZR_TRY(read_targets(path, json_object_get(root, "target_modules"), &targets));
    if (rank < 1 || rank > 65536 || !(alpha > 0))
        return zr_fail(ZERO_ERR_ARG, "%s: %s is missing, or not above 0", path,
                       alpha > 0 ? "r" : "lora_alpha");
    if (dropout > 0)
        fprintf(stderr, "%s: lora_dropout is %g, but there is no dropout here\n", path, dropout);
    if (c->lora_rank && (c->lora_rank != rank || c->lora_alpha != alpha || c->lora_targets != targets))
        return zr_fail(ZERO_ERR_ARG, "%s: the adapters there have other %s", path,
                       c->lora_rank != rank     ? "ranks"
                       : c->lora_alpha != alpha ? "values of alpha"
                                                : "targets");
    c->lora_rank = rank;
    c->lora_alpha = alpha;
    c->lora_targets = targets;
    return 0;
}

int lora_config_read(struct model_config *c, const char *dir)
{
    char path[1024];
    json_error_t why;
    if ((size_t)snprintf(path, sizeof path, "%s/" LORA_CONFIG_FILE, dir) >= sizeof path)
        return zr_fail(ZERO_ERR_ARG, "%.100s...: the path has more than %zu bytes", dir, sizeof path - 1);
    json_t *root = json_load_file(path, JSON_REJECT_DUPLICATES, &why);
    int err = json_is_object(root)
                  ? take(c, path, root)
                  : zr_fail(ZERO_ERR_IO, "%s: %.150s", path, root ? "not a JSON object" : why.text);
    json_decref(root);
    return err;
}

int lora_config_write(const struct model_config *c, const char *dir, const char *base)
{
    json_t *targets = json_array();
    for (int t = 0; t < LORA_N_TARGETS; t++)
        if (lora_has(c, t))
            json_array_append_new(targets, json_string(target_names[t]));
    json_t *root =
        json_pack("{s:s, s:s, s:s, s:I, s:f, s:f, s:s, s:b, s:b, s:b, s:o}", "peft_type", "LORA", "task_type",
                  "CAUSAL_LM", "base_model_name_or_path", base, "r", (json_int_t)c->lora_rank, "lora_alpha",
                  c->lora_alpha, "lora_dropout", 0.0, "bias", "none", "fan_in_fan_out", 0, "inference_mode",
                  1, "init_lora_weights", 1, "target_modules", targets);
    int err = root ? hf_folder_store(dir, LORA_CONFIG_FILE, root)
                   : zr_fail(ZERO_ERR_NOMEM, "no memory for " LORA_CONFIG_FILE);
    json_decref(root);
    return err;
}
