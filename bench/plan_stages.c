/* plan_stages.c: see plan_stages.h. */
#include "bench/plan_stages.h"

#include <string.h>

void plan_stage_of(struct plan_stage *out, const struct zero_tensor *tensors, int32_t n, int64_t layers,
                   int64_t pp, int64_t stage)
{
    const struct gpt2_config whole = {.layers = layers};
    int32_t number[TRAIN_N_TENSORS];
    *out = (struct plan_stage){.own = train_stage_config(&whole, (int32_t)stage, (int32_t)pp)};
    memcpy(out->tensors, tensors, TRAIN_N_TENSORS * sizeof *tensors);
    for (int32_t t = 0; t < TRAIN_N_TENSORS; t++)
        if (out->tensors[t].flags & ZERO_STACKED)
            out->tensors[t].shape[0] = out->own.layers;
    out->n = train_stage_table(out->tensors, number, &out->own);
    for (int32_t t = TRAIN_N_TENSORS; t < n && !out->own.no_head; t++) {
        out->tensors[out->n] = tensors[t];
        out->tensors[out->n++].unit = (int32_t)(train_first_layer_unit(&out->own) + out->own.layers);
    }
}

int64_t plan_kept_elems(const struct gpt2_config *c, int64_t layers, int64_t pp, int64_t stage)
{
    /* of rows that are cut over tp, this rank's part of each */
    int64_t A = gpt2_part_channels(c), F = gpt2_part_hidden(c), C = c->sequence ? A : c->channels;
    /* two norms, two sums on the way; q, k, v and what attention gives; the MLP before and after GELU */
    int64_t n = layers * (4 * C + 4 * A + 2 * F) - C;
    n += stage == 0 ? C : 0;                               /* the embedded tokens */
    n += stage == pp - 1 ? 2 * C + gpt2_part_vocab(c) : 0; /* the final norm and its input, logits */
    return n;
}

int64_t plan_n_params(const struct zero_tensor *tensors, int32_t n)
{
    int64_t all = 0;
    for (int32_t i = 0; i < n; i++)
        all += tensor_elements(&tensors[i]);
    return all;
}
