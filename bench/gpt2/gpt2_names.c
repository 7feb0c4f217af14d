/* SPDX-License-Identifier: Apache-2.0 */
/* gpt2_names.c: the published names of the model's tensors, in the order of train_describe's table. */
#include "bench/gpt2/gpt2_names.h"

#include <stdbool.h>
#include <stdio.h>

static const struct {
    const char *name;
    bool stacked, transposed;
} names[] = {
    {"wte.weight", false, false},
    {"wpe.weight", false, false},
    {"h.%d.ln_1.weight", true, false},
    {"h.%d.ln_1.bias", true, false},
    {"h.%d.attn.c_attn.weight", true, true},
    {"h.%d.attn.c_attn.bias", true, false},
    {"h.%d.attn.c_proj.weight", true, true},
    {"h.%d.attn.c_proj.bias", true, false},
    {"h.%d.ln_2.weight", true, false},
    {"h.%d.ln_2.bias", true, false},
    {"h.%d.mlp.c_fc.weight", true, true},
    {"h.%d.mlp.c_fc.bias", true, false},
    {"h.%d.mlp.c_proj.weight", true, true},
    {"h.%d.mlp.c_proj.bias", true, false},
    {"ln_f.weight", false, false},
    {"ln_f.bias", false, false},
};

/* Names one tensor. layer is its number in the table; in the whole model it is first_layer + layer. */
static struct zero_weight name_one(char text[40], int32_t tensor, int32_t number, int32_t first_layer,
                                   int32_t layer)
{
    bool stacked = names[number].stacked;
    if (stacked)
        snprintf(text, 40, "h.%d%s", first_layer + layer, names[number].name + 4); /* the name after "h.%d" */
    else
        snprintf(text, 40, "%s", names[number].name);
    return (struct zero_weight){text, tensor, stacked ? ZERO_SLICE(layer) : 0, names[number].transposed};
}

int32_t gpt2_names(struct zero_weight *map, char (*text)[40], const int32_t *number, int32_t n_tensors,
                   int32_t first_layer, int32_t layers)
{
    int32_t n = 0, end;
    for (int32_t i = 0; i < n_tensors; i = end) {
        bool stacked = names[number[i]].stacked;
        for (end = i + 1; end < n_tensors && names[number[end]].stacked == stacked; end++)
            ;
        for (int32_t l = 0; l < (stacked ? layers : 1); l++)
            for (int32_t t = i; t < end; t++, n++)
                map[n] = name_one(text[n], t, number[t], first_layer, l);
    }
    return n;
}
