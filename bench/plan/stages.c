/* SPDX-License-Identifier: Apache-2.0 */
/* stages.c: divides the tensors of a planned model over pipeline stages. */
#include "bench/plan/stages.h"

#include <string.h>

/* Appends the tensors of the rank's stage number k to the table. rest (n_rest) has the parameters of --params
 * that are in no layer. They are one more unit of the stage with the head. Returns the first unit after those
 * of the stage. */
static int32_t add_stage(struct plan_rank *out, int32_t k, enum zero_dtype dtype,
                         const struct zero_tensor *rest, int32_t n_rest)
{
    struct train_stage *s = &out->stages[k];
    struct zero_tensor *table = out->tensors + out->n; /* this stage's part of it */
    int32_t unit_after = s->unit + s->units.n;
    s->first = out->n;
    s->n = model_describe(table, NULL, &s->config, dtype);
    for (int32_t t = 0; t < s->n; t++)
        table[t].unit += s->unit;
    for (int32_t t = 0; t < n_rest && !s->config.no_head; t++) {
        table[s->n] = rest[t];
        table[s->n++].unit = unit_after;
    }
    for (int32_t t = 0; t < s->n; t++)
        table[t].pp_stage = k;
    out->n += s->n;
    return unit_after;
}

/* Takes all tensors of the model as they are. */
static void add_model(struct plan_rank *out, const struct zero_tensor *tensors, int32_t n)
{
    memcpy(out->tensors, tensors, (size_t)n * sizeof *tensors);
    out->n = n;
}

bool plan_rank_of(struct plan_rank *out, const struct model_config *sizes, const struct zero_tensor *tensors,
                  int32_t n, int64_t layers, int64_t pp, int64_t per_rank, int64_t pp_at)
{
    struct zero_tensor whole_table[MODEL_MAX_TENSORS];
    struct model_config whole = *sizes;
    int32_t unit = 0, n_model = model_describe(whole_table, NULL, sizes, ZERO_F32);
    whole.layers = layers;
    out->n = 0;
    out->n_stages = (int32_t)per_rank;
    out->pp_at = pp_at;
    for (int32_t k = 0; k < per_rank; k++) {
        struct train_stage *s = &out->stages[k];
        *s = (struct train_stage){.unit = unit};
        s->config = train_stage_config(&whole, (int32_t)(k * pp + pp_at), (int32_t)(per_rank * pp));
        s->units = whole.ops->units(&s->config);
        if (pp > 1)
            unit = add_stage(out, k, (enum zero_dtype)tensors->dtype, tensors + n_model, n - n_model);
        else
            add_model(out, tensors, n);
    }
    out->order = malloc((size_t)train_n_calls(out->stages, out->n_stages) * sizeof *out->order);
    if (out->order)
        out->n_order = train_stages_order(out->order, out->stages, out->n_stages);
    return out->order;
}

int64_t plan_n_params(const struct zero_tensor *tensors, int32_t n)
{
    int64_t all = 0;
    for (int32_t i = 0; i < n; i++)
        all += tensor_elements(&tensors[i]);
    return all;
}

int32_t plan_n_units(const struct zero_tensor *tensors, int32_t n)
{
    int32_t most = 0;
    for (int32_t i = 0; i < n; i++) {
        const struct zero_tensor *t = &tensors[i];
        int32_t end = t->unit + (t->flags & ZERO_STACKED ? (int32_t)t->shape[0] : 1);
        most = end > most ? end : most;
    }
    return most;
}
