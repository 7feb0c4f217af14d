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

void gpt2_names(struct zero_weight *map, char (*text)[40], int32_t layers)
{
    int32_t n = 0;
    for (int32_t t = 0; t < (int32_t)(sizeof names / sizeof *names); t++) {
        for (int32_t l = 0; l < (names[t].stacked ? layers : 1); l++, n++) {
            const char *layer = names[t].name + 4; /* after "h.%d" */
            if (names[t].stacked)
                snprintf(text[n], sizeof text[n], "h.%d%s", l, layer);
            else
                snprintf(text[n], sizeof text[n], "%s", names[t].name);
            map[n] =
                (struct zero_weight){text[n], t, names[t].stacked ? ZERO_SLICE(l) : 0, names[t].transposed};
        }
    }
}
