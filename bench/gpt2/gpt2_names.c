/* gpt2_names.c: see gpt2_names.h. In the order of train_describe's table. */
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

int32_t gpt2_names(struct zero_weight *map, char (*text)[40], const int32_t *number, int32_t n_tensors,
                   int32_t first_layer, int32_t layers)
{
    int32_t n = 0;
    for (int32_t i = 0; i < n_tensors; i++) {
        int32_t t = number[i];
        for (int32_t l = 0; l < (names[t].stacked ? layers : 1); l++, n++) {
            const char *layer = names[t].name + 4; /* after "h.%d" */
            if (names[t].stacked)
                snprintf(text[n], sizeof text[n], "h.%d%s", first_layer + l, layer);
            else
                snprintf(text[n], sizeof text[n], "%s", names[t].name);
            map[n] =
                (struct zero_weight){text[n], i, names[t].stacked ? ZERO_SLICE(l) : 0, names[t].transposed};
        }
    }
    return n;
}
