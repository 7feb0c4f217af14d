/* SPDX-License-Identifier: Apache-2.0 */
/* gpt2.c: forward and backward of a GPT-2, made of the parts in passes.h. */
#include "bench/gpt2/gpt2.h"
#include "bench/model/passes.h"

#include <stddef.h>

/* before (B*T, OC) = inp (B*T, C) * weight (OC, C)^T + bias (OC), and out = gelu(before). */
static void linear_gelu_forward(struct model *m, real *out, real *before, const real *inp, const real *weight,
                                const real *bias, int64_t C, int64_t OC)
{
    struct zr_gemm_args args = model_linear_args(m, out, inp, weight, bias, C, OC);
    args.epilogue = ZR_GEMM_GELU;
    args.aux = before;
    args.ldaux = OC;
    if (zr_gemm_can(m->compute->gemm, &args)) {
        model_multiply(m, &args);
    } else {
        model_linear_forward(m, before, inp, weight, bias, C, OC, false);
        LAYER(m, gelu_forward, out, before, args.m * OC);
    }
}

/* The input of the product was gelu(before): dinp (B*T, C) becomes the gradient of before, from dout (B*T,
 * OC) and weight (OC, C). */
static void linear_gelu_backward(struct model *m, real *dinp, const real *dout, int64_t ld_dout,
                                 const real *weight, const real *before, int64_t C, int64_t OC)
{
    if (m->computes == MODEL_WEIGHTS)
        return;
    struct zr_gemm_args args = model_linear_input_args(m, dinp, dout, ld_dout, weight, C, OC);
    struct zr_gemm_args fused = args;
    fused.epilogue = ZR_GEMM_DGELU;
    fused.aux = (void *)(uintptr_t)before; /* this epilogue only reads it */
    fused.ldaux = C;
    if (zr_gemm_can(m->compute->gemm, &fused)) {
        model_multiply(m, &fused);
        return;
    }
    model_multiply(m, &args);
    LAYER(m, gelu_backward, dinp, before, args.m * C);
}

/* Adds to dresidual and to the gradients of a norm's weights, or to one of them in a part of backward. */
static void norm_backward(struct model *m, real *dweight, real *dbias, const real *dout, const real *inp,
                          const real *weight, const float *mean, const float *rstd)
{
    bool inputs = m->computes != MODEL_WEIGHTS, weights = m->computes != MODEL_INPUTS;
    LAYER(m, layernorm_backward, inputs ? m->acts.dresidual : NULL, weights ? dweight : NULL,
          weights ? dbias : NULL, dout, inp, weight, mean, rstd, m->stats.scratch, model_own_rows(m),
          m->config.channels);
}

static void embed_forward(struct model *m)
{
    enum profile_part before = profile_enter(m->profile, PROFILE_COMPUTE);
    model_embed(m, gpt2_of(m)->params.wte, gpt2_of(m)->params.wpe);
    profile_enter(m->profile, before);
}

static void layer_forward(struct model *m, int64_t l)
{
    enum profile_part before = profile_enter(m->profile, PROFILE_COMPUTE);
    int64_t C = m->config.channels, BT = model_own_tokens(m), R = model_own_rows(m);
    int64_t A = model_part_channels(&m->config), F = model_part_hidden(&m->config);
    int64_t i = model_slice(m, l), j = model_first_part_slice(m, l);
    const struct gpt2_params *p = &gpt2_of(m)->params;
    const struct gpt2_activations *a = &gpt2_of(m)->acts;
    const struct gpt2_statistics *s = &gpt2_of(m)->stats;
    const real *x = model_residual_before(m, l);
    real *ln1 = model_slice_of(a->ln1, i, R * C), *qkv = model_slice_of(a->qkv, j, BT * 3 * A);
    real *atty = model_slice_of(a->atty, i, BT * A), *residual2 = model_slice_of(a->residual2, i, R * C),
         *ln2 = model_slice_of(a->ln2, i, R * C);
    real *fch = model_slice_of(a->fch, j, BT * F), *fch_gelu = model_slice_of(a->fch_gelu, i, BT * F);
    real *residual3 = m->acts.residual + l * R * C;

    LAYER(m, layernorm_forward, ln1, s->ln1_mean + i * R, s->ln1_rstd + i * R, x, p->ln1w + l * C,
          p->ln1b + l * C, m->stats.scratch, R, C);
    model_linear_forward(m, qkv, model_all_rows(m, ln1), p->qkvw + l * 3 * A * C, p->qkvb + l * 3 * A, C,
                         3 * A, false);
    model_attend(m, l, atty, qkv);
    model_project(m, residual2, x, atty, p->attprojw + l * C * A, p->attprojb + l * C, A);
    LAYER(m, layernorm_forward, ln2, s->ln2_mean + i * R, s->ln2_rstd + i * R, residual2, p->ln2w + l * C,
          p->ln2b + l * C, m->stats.scratch, R, C);
    linear_gelu_forward(m, fch_gelu, fch, model_all_rows(m, ln2), p->fcw + l * F * C, p->fcb + l * F, C, F);
    if (!m->recomputes)
        model_project(m, residual3, residual2, fch_gelu, p->fcprojw + l * C * F, p->fcprojb + l * C, F);
    profile_enter(m->profile, before);
}

static void head_forward(struct model *m)
{
    enum profile_part before = profile_enter(m->profile, PROFILE_COMPUTE);
    const struct gpt2 *g = gpt2_of(m);
    LAYER(m, layernorm_forward, g->acts.lnf, g->stats.lnf_mean, g->stats.lnf_rstd, model_last_residual(m),
          g->params.lnfw, g->params.lnfb, m->stats.scratch, model_own_rows(m), m->config.channels);
    model_loss_forward(m, g->acts.lnf, g->params.wte);
    profile_enter(m->profile, before);
}

static void head_backward(struct model *m)
{
    enum profile_part before = profile_enter(m->profile, PROFILE_COMPUTE);
    const struct gpt2 *g = gpt2_of(m);
    int64_t bytes = model_own_rows(m) * m->config.channels * (int64_t)sizeof(real);
    const real *dlnf = model_loss_backward(m, g->acts.lnf, g->params.wte, g->grads.wte);
    if (m->computes != MODEL_WEIGHTS)
        RUN(m, m->compute->dev->ops->zero(m->compute->stream, m->acts.dresidual, bytes));
    norm_backward(m, g->grads.lnfw, g->grads.lnfb, dlnf, model_last_residual(m), g->params.lnfw,
                  g->stats.lnf_mean, g->stats.lnf_rstd);
    profile_enter(m->profile, before);
}

/* dresidual is the gradient of the layer's output on entry, and of its input on return. dbtc is summed over
 * the ranks before it passes a norm. */
static void layer_backward(struct model *m, int64_t l)
{
    enum profile_part before = profile_enter(m->profile, PROFILE_COMPUTE);
    int64_t C = m->config.channels, BT = model_own_tokens(m), R = model_own_rows(m);
    int64_t A = model_part_channels(&m->config), F = model_part_hidden(&m->config);
    int64_t i = model_slice(m, l), j = model_first_part_slice(m, l), k = model_gradient_slice(m, l);
    const struct gpt2_params *p = &gpt2_of(m)->params, *g = &gpt2_of(m)->grads;
    const struct gpt2_activations *a = &gpt2_of(m)->acts;
    const struct gpt2_statistics *s = &gpt2_of(m)->stats;
    const real *x = model_residual_before(m, l);
    real *dresidual = m->acts.dresidual, *dbtc = m->acts.dbtc;
    const real *ln1 = model_slice_of(a->ln1, i, R * C), *qkv = model_slice_of(a->qkv, j, BT * 3 * A);
    const real *atty = model_slice_of(a->atty, i, BT * A),
               *residual2 = model_slice_of(a->residual2, i, R * C), *ln2 = model_slice_of(a->ln2, i, R * C);
    const real *fch = model_slice_of(a->fch, j, BT * F), *fch_gelu = model_slice_of(a->fch_gelu, i, BT * F);
    real *dfch = model_slice_of(a->dfch, k, BT * F), *dqkv = model_slice_of(a->dqkv, k, BT * 3 * A);

    const real *dout = model_all_rows(m, model_kept_gradient(m, 4 * l, dresidual));
    linear_gelu_backward(m, dfch, dout, C, model_of_layer(p->fcprojw, l, C * F), fch, F, C);
    model_linear_backward_weight(m, model_of_layer(g->fcprojw, l, C * F), model_of_layer(g->fcprojb, l, C),
                                 dout, C, fch_gelu, F, C);
    model_linear_backward_input(m, dbtc, dfch, F, model_of_layer(p->fcw, l, F * C), C, F);
    model_linear_backward_weight(m, model_of_layer(g->fcw, l, F * C), model_of_layer(g->fcb, l, F), dfch, F,
                                 model_all_rows_for_weights(m, ln2), C, F);
    const real *dln = model_own_sum(m, 4 * l + 1, dbtc);
    norm_backward(m, model_of_layer(g->ln2w, l, C), model_of_layer(g->ln2b, l, C), dln, residual2,
                  model_of_layer(p->ln2w, l, C), s->ln2_mean + i * R, s->ln2_rstd + i * R);
    dout = model_all_rows(m, model_kept_gradient(m, 4 * l + 2, dresidual));
    model_linear_backward_input(m, dbtc, dout, C, model_of_layer(p->attprojw, l, C * A), A, C);
    model_linear_backward_weight(m, model_of_layer(g->attprojw, l, C * A), model_of_layer(g->attprojb, l, C),
                                 dout, C, atty, A, C);
    model_attend_backward(m, l, dqkv, dbtc, atty, qkv);
    model_linear_backward_input(m, dbtc, dqkv, 3 * A, model_of_layer(p->qkvw, l, 3 * A * C), C, 3 * A);
    model_linear_backward_weight(m, model_of_layer(g->qkvw, l, 3 * A * C), model_of_layer(g->qkvb, l, 3 * A),
                                 dqkv, 3 * A, model_all_rows_for_weights(m, ln1), C, 3 * A);
    dln = model_own_sum(m, 4 * l + 3, dbtc);
    norm_backward(m, model_of_layer(g->ln1w, l, C), model_of_layer(g->ln1b, l, C), dln, x,
                  model_of_layer(p->ln1w, l, C), s->ln1_mean + i * R, s->ln1_rstd + i * R);
    profile_enter(m->profile, before);
}

static void embed_backward(struct model *m)
{
    enum profile_part before = profile_enter(m->profile, PROFILE_COMPUTE);
    model_embed_gradients(m, gpt2_of(m)->grads.wte, gpt2_of(m)->grads.wpe);
    profile_enter(m->profile, before);
}

static void sizes_of(const struct model *m, const struct model_counts *n, int64_t *acts, int64_t *stats)
{
    const struct model_config *c = &m->config;
    int64_t L = n->layers, L_first = n->first_part, C = c->channels, BT = model_own_tokens(m),
            R = model_own_rows(m);
    int64_t A = model_part_channels(c), F = model_part_hidden(c);
    const int64_t a[GPT2_N_ACTIVATIONS] = {
        L * model_apart(R * C),                 /* ln1 */
        L_first * model_apart(BT * 3 * A),      /* qkv */
        L * model_apart(BT * A),                /* atty */
        L * model_apart(R * C),                 /* residual2 */
        L * model_apart(R * C),                 /* ln2 */
        L_first * model_apart(BT * F),          /* fch */
        L * model_apart(BT * F),                /* fch_gelu */
        n->head * R * C,                        /* lnf */
        n->gradients * model_apart(BT * 3 * A), /* dqkv */
        n->gradients * model_apart(BT * F),     /* dfch */
    };
    const int64_t s[GPT2_N_STATISTICS] = {L * R, L * R, L * R, L * R, n->head * R, n->head * R};
    memcpy(acts, a, sizeof a);
    memcpy(stats, s, sizeof s);
}

const struct model_passes gpt2_passes = {
    .own_bytes = sizeof(struct gpt2),
    .params_at = offsetof(struct gpt2, params),
    .grads_at = offsetof(struct gpt2, grads),
    .acts_at = offsetof(struct gpt2, acts),
    .stats_at = offsetof(struct gpt2, stats),
    .n_acts = GPT2_N_ACTIVATIONS,
    .n_stats = GPT2_N_STATISTICS,
    .sizes = sizes_of,
    .embed_forward = embed_forward,
    .embed_backward = embed_backward,
    .layer_forward = layer_forward,
    .layer_backward = layer_backward,
    .head_forward = head_forward,
    .head_backward = head_backward,
};
