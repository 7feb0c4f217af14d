/* SPDX-License-Identifier: Apache-2.0 */
/* states.c: translates the options for bytes per parameter to the configuration and to texts. */
#include "bench/states.h"

#include <stdio.h>
#include <string.h>

const struct option_word option_masters[] = {
    {"f32", ZERO_MASTERS_F32}, {"remainder", ZERO_MASTERS_REMAINDER}, {"none", ZERO_MASTERS_NONE}, {0}};

const struct option_word option_moments[] = {
    {"f32", ZERO_MOMENTS_F32}, {"bf16", ZERO_MOMENTS_BF16}, {"q8", ZERO_MOMENTS_Q8}, {0}};

const struct option_word option_states[] = {
    {"device", ZERO_STATES_DEVICE}, {"host", ZERO_STATES_HOST}, {"file", ZERO_STATES_FILE}, {0}};

const char *states_fault(const struct states_options *s, int dtype)
{
    if (dtype == ZERO_F32 && s->masters)
        return "--masters: needs a bf16 model (--dtype bf16); f32 weights are their own masters";
    if (dtype == ZERO_F32 && s->grad_sum == ZERO_BF16)
        return "--grad-sum-dtype: needs a bf16 model (--dtype bf16); f32 gradients are added up in f32";
    return NULL;
}

const char *states_dir_fault(const struct states_options *s)
{
    const char *variable = getenv("ZERO_STATES_DIR"), *states = getenv("ZERO_STATES");
    if (s->dir && s->states != ZERO_STATES_FILE && (!states || !*states))
        return "--states-dir: needs --states file";
    if (s->states == ZERO_STATES_FILE && !s->dir && (!variable || !*variable))
        return "--states file: needs --states-dir or ZERO_STATES_DIR";
    return NULL;
}

bool states_given(const struct states_options *s)
{
    return s->grad_sum == ZERO_BF16 || s->masters || s->moments || s->states || s->seed;
}

void states_to_config(const struct states_options *s, struct zero_config *cfg)
{
    cfg->memory.grad_sum_dtype = s->grad_sum;
    cfg->optim.masters = s->masters;
    cfg->optim.moments = s->moments;
    cfg->memory.states = s->states;
    cfg->memory.states_dir = s->dir;
    cfg->memory.seed = s->seed;
}

struct states_options states_of_run(const struct zero_stats *stats, int dtype)
{
    struct states_options s = {.moments = stats->moments, .states = stats->states};
    if (dtype == ZERO_BF16) {
        s.grad_sum = stats->grad_sum_dtype;
        s.masters = stats->masters;
    }
    return s;
}

void states_add_json(const struct states_options *s, json_t *line)
{
    int grad_sum = s->grad_sum ? s->grad_sum : ZERO_F32;
    json_object_set_new(line, "grad_sum_dtype", json_string(option_word_of(option_dtypes, grad_sum)));
    json_object_set_new(line, "masters", json_string(option_word_of(option_masters, s->masters)));
    json_object_set_new(line, "moments", json_string(option_word_of(option_moments, s->moments)));
    json_object_set_new(line, "states", json_string(option_word_of(option_states, s->states)));
}

const char *states_text(const struct states_options *s, char text[STATES_TEXT])
{
    const struct {
        bool given;
        const char *name, *word;
    } part[] = {
        {s->grad_sum == ZERO_BF16, "gradient sums", "bf16"},
        {s->masters, "masters", option_word_of(option_masters, s->masters)},
        {s->moments, "moments", option_word_of(option_moments, s->moments)},
        {s->states, "states", option_word_of(option_states, s->states)},
    };
    size_t used = 0;
    text[0] = 0;
    for (size_t i = 0; i < sizeof part / sizeof *part; i++)
        if (part[i].given)
            used += (size_t)snprintf(text + used, STATES_TEXT - used, "%s%s %s", used ? ", " : "",
                                     part[i].name, part[i].word);
    return text;
}
