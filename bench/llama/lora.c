/* SPDX-License-Identifier: Apache-2.0 */
/* lora.c: the products of adapters. Both h and dh contain the factor s, so that no other product needs it. */
#include "bench/llama/llama.h"
#include "bench/model/passes.h"

/* x (B*T, LR) *= s. */
static void scale(struct model *m, real *x)
{
    const struct model_config *c = &m->config;
    RUN(m,
        llama_of(m)->layers->scale(m->compute, x, (float)lora_scale(c), model_own_tokens(m) * c->lora_rank));
}

void lora_hidden(struct model *m, const struct lora *x, const real *inp, int64_t C)
{
    if (!x->h)
        return;
    model_linear_forward(m, x->h, inp, x->a, NULL, C, m->config.lora_rank, /* add */ false);
    scale(m, x->h);
}

void lora_forward(struct model *m, const struct lora *x, real *out, int64_t ld, const real *inp, int64_t C,
                  int64_t OC)
{
    const int64_t LR = m->config.lora_rank;
    if (!x->h)
        return;
    lora_hidden(m, x, inp, C);
    struct zr_gemm_args args = model_linear_args(m, out, x->h, x->b, NULL, LR, OC);
    args.ldc = ld;
    args.beta = 1.0f;
    model_multiply(m, &args);
}

void lora_backward_input(struct model *m, const struct lora *x, real *dinp, const real *dout, int64_t ld,
                         int64_t C, int64_t OC)
{
    const int64_t LR = m->config.lora_rank;
    if (!x->h || m->computes == MODEL_WEIGHTS)
        return;
    model_linear_backward_input(m, x->dh, dout, ld, x->b, LR, OC);
    scale(m, x->dh);
    struct zr_gemm_args args = model_linear_input_args(m, dinp, x->dh, LR, x->a, C, LR);
    args.beta = 1.0f;
    model_multiply(m, &args);
}

void lora_backward_weight(struct model *m, const struct lora *x, const real *dout, int64_t ld,
                          const real *inp, int64_t C, int64_t OC)
{
    const int64_t LR = m->config.lora_rank;
    if (!x->h)
        return;
    model_linear_backward_weight(m, x->da, NULL, x->dh, LR, inp, C, LR);
    model_linear_backward_weight(m, x->db, NULL, dout, ld, x->h, LR, OC);
}
