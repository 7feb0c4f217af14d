/* SPDX-License-Identifier: Apache-2.0 */
/* model.c: sizes and tensors of the models that plan and tune plan for. */
#include "bench/plan/model.h"
#include "bench/gpt2/gpt2_ops.h"

#include <math.h>

/* Sizes of a GPT of at most n parameters, in the proportions of published models: about a hundred channels
 * per layer. Channels are as many as fit, and a multiple of 8 in each of tp parts if there are enough.
 * Channels are 0 if n is too small for any. Each part has one head. */
static struct model_config sizes_for(int64_t n, int64_t tp)
{
    int64_t step = 8 * (tp > 1 ? tp : 1);
    bool large = n >= 100000000;
    struct model_config c = {.ops = &gpt2_ops,
                             .heads = tp > 1 ? tp : 1,
                             .context = large ? 1024 : 64,
                             .vocab = large ? 50257 : 256};
    double layers = round(cbrt((double)n / 120000.0)); /* n = 12 * L * C^2 with C = 100 * L */
    c.layers = layers < 1 ? 1 : (int64_t)layers;
    /* the parameters are a * C^2 + per_channel * C, solved for C */
    double per_channel = (double)(c.vocab + c.context + 13 * c.layers + 2), a = 12.0 * (double)c.layers;
    double channels = (sqrt(per_channel * per_channel + 4 * a * (double)n) - per_channel) / (2 * a);
    c.channels = (int64_t)channels + 1; /* makes up for rounding */
    while (c.channels > 0 && model_n_params(&c) > n)
        c.channels--;
    c.channels -= c.channels > 64 || tp > 1 ? c.channels % step : 0;
    c.tp = tp;
    return c;
}

struct model_config plan_sizes(const struct model_config *model, int64_t params)
{
    struct model_config c = params ? sizes_for(params, model->tp) : *model;
    c.sequence = model->sequence;
    c.recompute = model->recompute;
    c.cp = model->cp;
    c.cp_form = model->cp_form;
    c.cp_order = model->cp_order;
    c.cp_heads = params ? 0 : model->cp_heads;
    return c;
}

/* Parameters that a GPT of these sizes does not have are put into one more unit, so that the total is exact.
 * With tp the total is exact except for the tensors that every rank holds whole. */
int32_t plan_model(struct zero_tensor out[PLAN_N_TENSORS], int32_t *layers, const struct model_config *model,
                   int64_t params, int dtype)
{
    static void *nowhere; /* no memory is needed to plan */
    struct model_config c = plan_sizes(model, params);
    int32_t n = 0;
    *layers = 0;
    if (c.channels) {
        n = model_describe(out, NULL, &c, (enum zero_dtype)dtype);
        *layers = (int32_t)c.layers;
    }
    int64_t rest = params ? params - (c.channels ? model_n_params(&c) : 0) : 0;
    if (rest) {
        *layers += n > 0;
        bool cut = c.tp > 1;
        out[n++] = (struct zero_tensor){.name = "rest",
                                        .param = &nowhere,
                                        .grad = &nowhere,
                                        .shape = {cut ? (rest + c.tp - 1) / c.tp : rest},
                                        .dtype = (enum zero_dtype)dtype,
                                        .unit = *layers,
                                        .tp_cut = cut ? ZERO_TP_CUT(0) : 0};
    }
    return n;
}
