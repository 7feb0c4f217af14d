/* plan_stages.c: see plan_stages.h. */
#include "bench/plan_stages.h"
#include "bench/pipe_stages.h"

#include <string.h>

static void add_tensor(struct plan_stage *s, const struct zero_tensor *t, int32_t unit, uint32_t flags)
{
    s->tensors[s->n] = *t;
    s->tensors[s->n].unit = unit;
    s->tensors[s->n++].flags |= flags;
}

/* The tensor called so, or NULL. */
static const struct zero_tensor *find_tensor(const struct zero_tensor *tensors, int32_t n, const char *name)
{
    for (int32_t i = 0; i < n; i++)
        if (!strcmp(tensors[i].name, name))
            return &tensors[i];
    return NULL;
}

/* Those of the list that the model has become one unit. */
static void add_unit(struct plan_stage *s, const struct zero_tensor *tensors, int32_t n,
                     const char *const *names, uint32_t flags)
{
    int32_t before = s->n;
    for (; *names; names++) {
        const struct zero_tensor *t = find_tensor(tensors, n, *names);
        if (t)
            add_tensor(s, t, s->n_units, flags);
    }
    s->n_units += s->n > before;
}

void plan_stage_of(struct plan_stage *out, const struct zero_tensor *tensors, int32_t n, int64_t layers,
                   int64_t pp, int64_t stage)
{
    static const char *const embedding[] = {"wte", NULL}, *const positions[] = {"wpe", NULL},
                             *const norm[] = {"lnfw", "lnfb", NULL}, *const rest[] = {"rest", NULL};
    *out = (struct plan_stage){.layers = pipe_layers_of(layers, pp, stage)};
    if (stage == 0) {
        add_unit(out, tensors, n, embedding, ZERO_TIED);
        add_unit(out, tensors, n, positions, 0);
    }
    for (int32_t i = 0; i < n; i++)
        if (tensors[i].flags & ZERO_STACKED) {
            add_tensor(out, &tensors[i], out->n_units, 0);
            out->tensors[out->n - 1].shape[0] = out->layers;
        }
    out->n_units += (int32_t)out->layers;
    if (stage == pp - 1) {
        add_unit(out, tensors, n, norm, 0);
        add_unit(out, tensors, n, embedding, ZERO_TIED);
        add_unit(out, tensors, n, rest, 0);
    }
}

void plan_stage_order(struct zero_call *out, int32_t n_units)
{
    for (int32_t i = 0; i < 4 * n_units; i++) {
        bool backward = i >= 2 * n_units;
        out[i] = (struct zero_call){.unit = (backward ? 4 * n_units - 1 - i : i) / 2,
                                    .phase = backward ? ZERO_BACKWARD : ZERO_FORWARD,
                                    .is_end = i & 1};
    }
}

int64_t plan_kept_elems(const struct gpt2_config *c, int64_t layers, int64_t pp, int64_t stage)
{
    int64_t C = c->channels, A = gpt2_part_channels(c), F = gpt2_part_hidden(c);
    /* two norms, two sums on the way; q, k, v and what attention gives; the MLP before and after GELU */
    int64_t n = layers * (4 * C + 4 * A + 2 * F) - C;
    n += stage == 0 ? C : 0;                               /* the embedded tokens */
    n += stage == pp - 1 ? 2 * C + gpt2_part_vocab(c) : 0; /* the final norm and its input, logits */
    return n;
}

int64_t plan_n_params(const struct zero_tensor *tensors, int32_t n)
{
    int64_t all = 0;
    for (int32_t i = 0; i < n; i++) {
        int64_t elems = 1;
        for (int d = 0; d < 8 && tensors[i].shape[d]; d++)
            elems *= tensors[i].shape[d];
        all += elems;
    }
    return all;
}
