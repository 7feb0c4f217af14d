/* SPDX-License-Identifier: Apache-2.0 */
/* stages.c: divides the tensors of a planned model over pipeline stages. */
#include "bench/plan/stages.h"

#include <string.h>

/* Appends the tensors of the rank's stage number k to the table. tensors (n) are those of the whole model.
 * The ones from TRAIN_N_TENSORS on are the rest of --params, which goes to the stage with the head, as one
 * more unit. Returns the first unit after the layers of the stage. */
static int32_t add_stage(struct plan_rank *out, int32_t k, const struct zero_tensor *tensors, int32_t n)
{
    struct train_stage *s = &out->stages[k];
    struct zero_tensor *table = out->tensors + out->n; /* this stage's part of it */
    int32_t number[TRAIN_N_TENSORS],                   /* not used here */
        unit_after = s->unit + (int32_t)(train_first_layer_unit(&s->config) + s->config.layers);
    memcpy(table, tensors, TRAIN_N_TENSORS * sizeof *tensors);
    for (int32_t t = 0; t < TRAIN_N_TENSORS; t++)
        if (table[t].flags & ZERO_STACKED)
            table[t].shape[0] = s->config.layers;
    s->first = out->n;
    s->n = train_stage_table(table, number, &s->config);
    for (int32_t t = 0; t < s->n; t++)
        table[t].unit += s->unit;
    for (int32_t t = TRAIN_N_TENSORS; t < n && !s->config.no_head; t++) {
        table[s->n] = tensors[t];
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

bool plan_rank_of(struct plan_rank *out, const struct zero_tensor *tensors, int32_t n, int64_t layers,
                  int64_t pp, int64_t per_rank, int64_t pp_at)
{
    const struct model_config whole = {.layers = layers};
    int32_t unit = 0;
    out->n = 0;
    out->n_stages = (int32_t)per_rank;
    out->pp_at = pp_at;
    for (int32_t k = 0; k < per_rank; k++) {
        out->stages[k] = (struct train_stage){
            .config = train_stage_config(&whole, (int32_t)(k * pp + pp_at), (int32_t)(per_rank * pp)),
            .unit = unit};
        if (pp > 1)
            unit = add_stage(out, k, tensors, n);
        else
            add_model(out, tensors, n);
    }
    out->order = malloc((size_t)train_n_calls(out->stages, out->n_stages) * sizeof *out->order);
    if (out->order)
        out->n_order = train_stages_order(out->order, out->stages, out->n_stages);
    return out->order;
}

int64_t plan_kept_elems(const struct model_config *c, int64_t layers, int64_t n_stages, int64_t stage)
{
    /* A and F are this tp rank's part of the attention's channels and of the MLP's hidden ones. With sequence
     * parallelism each rank keeps its part of the tokens between products, which comes to C = A per token. */
    int64_t A = model_part_channels(c), F = model_part_hidden(c), C = c->sequence ? A : c->channels;
    /* per layer: two norms, two sums; q, k, v and the attention's output; the MLP before and after GELU */
    int64_t n = layers * (4 * C + 4 * A + 2 * F) - C;
    n += stage == 0 ? C : 0; /* the embedded tokens */
    /* the last norm and its input, and the logits */
    n += stage == n_stages - 1 ? 2 * C + model_part_vocab(c) : 0;
    return n;
}

int64_t plan_n_params(const struct zero_tensor *tensors, int32_t n)
{
    int64_t all = 0;
    for (int32_t i = 0; i < n; i++)
        all += tensor_elements(&tensors[i]);
    return all;
}
