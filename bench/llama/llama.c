/* SPDX-License-Identifier: Apache-2.0 */
/* llama.c: forward and backward of a Llama, made of the parts in bench/model/passes.h and in llama_layers.h.
 * A model has biases of q, k and v or norms of their heads, never both (hf_config.h). Adapters (lora.h) add
 * to the products of seven matrices. */
#include "bench/llama/llama.h"
#include "bench/llama/llama_rotary.h"
#include "bench/model/passes.h"
#include "kernels/alloc.h"

#include <stddef.h>
#include <stdlib.h>

/* Calls a function of the table of llama_layers.h on m's device. */
#define LLAMA(m, name, ...) RUN(m, llama_of(m)->layers->name((m)->compute, __VA_ARGS__))

/* ---- parts of a layer ---- */

/* A matrix, or some of its columns, with ld elements between rows. */
struct columns {
    real *p;
    int64_t ld;
};

/* The heads of q and of k in rows of ld elements. */
static struct llama_vectors heads_in(const struct model *m, int64_t n, int64_t ld)
{
    return (struct llama_vectors){model_own_tokens(m), n, model_head_size(&m->config), ld};
}

/* out (B*T, OC) = inp (B*T, C) * weight (OC, C)^T + bias (OC). */
static void product(struct model *m, struct columns out, const real *inp, const real *weight,
                    const real *bias, const struct lora *lora, int64_t OC)
{
    struct zr_gemm_args args = model_linear_args(m, out.p, inp, weight, bias, m->config.channels, OC);
    args.ldc = out.ld;
    model_multiply(m, &args);
    lora_forward(m, lora, out.p, out.ld, inp, m->config.channels, OC);
}

/* dbtc (B*T, C) = dout (B*T, OC) * weight (OC, C). If `add`, the product is added to it. */
static void product_backward_input(struct model *m, struct columns dout, const real *weight,
                                   const struct lora *lora, int64_t OC, bool add)
{
    if (m->computes == MODEL_WEIGHTS)
        return;
    struct zr_gemm_args args =
        model_linear_input_args(m, m->acts.dbtc, dout.p, dout.ld, weight, m->config.channels, OC);
    args.beta = add ? 1.0f : 0.0f;
    model_multiply(m, &args);
    lora_backward_input(m, lora, m->acts.dbtc, dout.p, dout.ld, m->config.channels, OC);
}

static void product_backward_weight(struct model *m, real *dweight, const struct lora *lora,
                                    struct columns dout, const real *inp, int64_t OC)
{
    model_linear_backward_weight(m, dweight, NULL, dout.p, dout.ld, inp, m->config.channels, OC);
    lora_backward_weight(m, lora, dout.p, dout.ld, inp, m->config.channels, OC);
}

/* out (R, C) = x (R, C) + inp (B*T, K) * weight (C, K)^T. K is the rank's share. */
static void project(struct model *m, real *out, const real *x, const real *inp, const real *weight,
                    const struct lora *lora, int64_t K)
{
    real *part = model_project_part(m, out, x, inp, weight, NULL, K);
    lora_forward(m, lora, part, m->config.channels, inp, K, m->config.channels);
    model_project_sum(m, out, x);
}

/* dinp (B*T, K) = dout (B*T, C) * weight (C, K). */
static void project_backward_input(struct model *m, real *dinp, const real *dout, const real *weight,
                                   const struct lora *lora, int64_t K)
{
    const int64_t C = m->config.channels;
    model_linear_backward_input(m, dinp, dout, C, weight, K, C);
    lora_backward_input(m, lora, dinp, dout, C, K, C);
}

static void project_backward_weight(struct model *m, real *dweight, const struct lora *lora, const real *dout,
                                    const real *inp, int64_t K)
{
    const int64_t C = m->config.channels;
    model_linear_backward_weight(m, dweight, NULL, dout, C, inp, K, C);
    lora_backward_weight(m, lora, dout, C, inp, K, C);
}

static void norm_forward(struct model *m, real *out, float *rstd, const real *inp, const real *weight)
{
    const int64_t C = m->config.channels;
    LLAMA(m, rmsnorm_forward, out, C, rstd, inp, (struct llama_vectors){model_own_rows(m), 1, C, C}, weight,
          (float)m->config.hf->rms_eps, llama_of(m)->stats.scratch);
}

/* Adds to dresidual and to the gradient of the norm's weight, or to one of them in a part of backward. */
static void norm_backward(struct model *m, real *dweight, const real *dout, const real *inp,
                          const real *weight, const float *rstd)
{
    const int64_t C = m->config.channels;
    LLAMA(m, rmsnorm_backward, m->computes != MODEL_WEIGHTS ? m->acts.dresidual : NULL, /* adds */ true,
          m->computes != MODEL_INPUTS ? dweight : NULL, dout, C, inp,
          (struct llama_vectors){model_own_rows(m), 1, C, C}, weight, rstd, llama_of(m)->stats.scratch);
}

/* A layer's part of the pointers that are used in both directions. */
struct layer {
    struct llama_params p, g;
    struct llama_activations a;
    struct llama_statistics s;
    struct lora lora[LORA_N_TARGETS];
};

/* Fills in the layer's adapters. */
static void find_adapters(const struct model *m, struct layer *x, int64_t l)
{
    const struct model_config *c = &m->config;
    int64_t C = c->channels, A = model_part_channels(c), K = model_part_kv_channels(c),
            F = model_part_hidden(c), LR = c->lora_rank;
    const int64_t inputs[] = {C, C, C, A, C, C, F}, outputs[] = {A, K, K, C, F, F, C};
    int64_t n = lora_n(c), h = model_slice(m, l) * n, dh = model_gradient_slice(m, l) * n,
            elems = model_own_tokens(m) * LR;
    for (int t = 0; t < LORA_N_TARGETS; t++)
        if (lora_has(c, t)) {
            int64_t a = LR * inputs[t], b = outputs[t] * LR;
            x->lora[t] = (struct lora){
                model_of_layer(x->p.lora_a[t], l, a),    model_of_layer(x->p.lora_b[t], l, b),
                model_of_layer(x->g.lora_a[t], l, a),    model_of_layer(x->g.lora_b[t], l, b),
                model_slice_of(x->a.lora_h, h++, elems), model_slice_of(x->a.lora_dh, dh++, elems)};
        }
}

static struct layer layer_of(const struct model *m, int64_t l)
{
    const struct model_config *c = &m->config;
    const struct llama *own = llama_of(m);
    int64_t C = c->channels, BT = model_own_tokens(m), R = model_own_rows(m), HS = model_head_size(c);
    int64_t A = model_part_channels(c), K = model_part_kv_channels(c), F = model_part_hidden(c);
    int64_t i = model_slice(m, l), j = model_first_part_slice(m, l), k = model_gradient_slice(m, l);
    struct layer x = {.p = own->params, .g = own->grads, .a = own->acts, .s = own->stats};
    struct llama_params *params[] = {&x.p, &x.g};
    for (int which = 0; which < 2; which++) {
        struct llama_params *p = params[which];
        p->norm1 = model_of_layer(p->norm1, l, C);
        p->q = model_of_layer(p->q, l, A * C);
        p->k = model_of_layer(p->k, l, K * C);
        p->v = model_of_layer(p->v, l, K * C);
        p->q_bias = model_of_layer(p->q_bias, l, A);
        p->k_bias = model_of_layer(p->k_bias, l, K);
        p->v_bias = model_of_layer(p->v_bias, l, K);
        p->q_norm = model_of_layer(p->q_norm, l, HS);
        p->k_norm = model_of_layer(p->k_norm, l, HS);
        p->o = model_of_layer(p->o, l, C * A);
        p->norm2 = model_of_layer(p->norm2, l, C);
        p->gate = model_of_layer(p->gate, l, F * C);
        p->up = model_of_layer(p->up, l, F * C);
        p->down = model_of_layer(p->down, l, C * F);
    }
    x.a.norm1 = model_slice_of(x.a.norm1, i, R * C);
    x.a.qkv = model_slice_of(x.a.qkv, j, BT * (A + 2 * K));
    x.a.atty = model_slice_of(x.a.atty, i, BT * A);
    x.a.residual2 = model_slice_of(x.a.residual2, i, R * C);
    x.a.norm2 = model_slice_of(x.a.norm2, i, R * C);
    x.a.gate_up = model_slice_of(x.a.gate_up, i, BT * 2 * F);
    x.a.act = model_slice_of(x.a.act, i, BT * F);
    x.a.dqkv = model_slice_of(x.a.dqkv, k, BT * (A + 2 * K));
    x.s.norm1_rstd += i * R;
    x.s.norm2_rstd += i * R;
    if (c->hf->qk_norm) {
        x.a.qk = model_slice_of(x.a.qk, i, BT * (A + K));
        x.a.dqk = model_slice_of(x.a.dqk, k, BT * (A + K));
        x.s.q_rstd += i * BT * model_part_heads(c);
        x.s.k_rstd += i * BT * model_part_kv_heads(c);
    }
    find_adapters(m, &x, l);
    return x;
}

/* ---- attention's inputs ---- */

static void normalize_heads(struct model *m, const struct layer *x)
{
    const struct model_config *c = &m->config;
    int64_t A = model_part_channels(c), K = model_part_kv_channels(c), row = model_part_qkv(c);
    float *scratch = x->s.scratch, eps = (float)c->hf->rms_eps;
    LLAMA(m, rmsnorm_forward, x->a.qkv, row, x->s.q_rstd, x->a.qk, heads_in(m, model_part_heads(c), A + K),
          x->p.q_norm, eps, scratch);
    LLAMA(m, rmsnorm_forward, x->a.qkv + A, row, x->s.k_rstd, x->a.qk + A,
          heads_in(m, model_part_kv_heads(c), A + K), x->p.k_norm, eps, scratch);
}

/* Turns q and k of all heads by their positions, or back. */
static void rotate(struct model *m, real *qkv, bool back)
{
    const struct model_config *c = &m->config;
    LLAMA(m, rotate, qkv, heads_in(m, model_part_heads(c) + model_part_kv_heads(c), model_part_qkv(c)),
          m->batch.positions, llama_of(m)->stats.rotary, back);
}

/* qkv of all rows of inp. */
static void make_qkv(struct model *m, const struct layer *x, const real *inp)
{
    const struct model_config *c = &m->config;
    int64_t A = model_part_channels(c), K = model_part_kv_channels(c);
    struct columns qkv = {x->a.qkv, A + 2 * K}, qk = c->hf->qk_norm ? (struct columns){x->a.qk, A + K} : qkv;
    product(m, qk, inp, x->p.q, x->p.q_bias, &x->lora[LORA_Q], A);
    product(m, (struct columns){qk.p + A, qk.ld}, inp, x->p.k, x->p.k_bias, &x->lora[LORA_K], K);
    product(m, (struct columns){qkv.p + A + K, qkv.ld}, inp, x->p.v, x->p.v_bias, &x->lora[LORA_V], K);
    if (c->hf->qk_norm)
        normalize_heads(m, x);
    rotate(m, x->a.qkv, /* back */ false);
}

/* Gradients of the norms of heads. dqkv has those of their outputs, and dqk gets those of their inputs. */
static void normalize_heads_backward(struct model *m, const struct layer *x)
{
    const struct model_config *c = &m->config;
    int64_t A = model_part_channels(c), K = model_part_kv_channels(c), row = model_part_qkv(c);
    bool inputs = m->computes != MODEL_WEIGHTS, weights = m->computes != MODEL_INPUTS;
    LLAMA(m, rmsnorm_backward, inputs ? x->a.dqk : NULL, /* adds */ false, weights ? x->g.q_norm : NULL,
          x->a.dqkv, row, x->a.qk, heads_in(m, model_part_heads(c), A + K), x->p.q_norm, x->s.q_rstd,
          x->s.scratch);
    LLAMA(m, rmsnorm_backward, inputs ? x->a.dqk + A : NULL, /* adds */ false, weights ? x->g.k_norm : NULL,
          x->a.dqkv + A, row, x->a.qk + A, heads_in(m, model_part_kv_heads(c), A + K), x->p.k_norm,
          x->s.k_rstd, x->s.scratch);
}

/* Gradients of the biases. The sums of dqkv's columns go to dbias first. */
static void biases_backward(struct model *m, const struct layer *x)
{
    const struct model_config *c = &m->config;
    int64_t A = model_part_channels(c), K = model_part_kv_channels(c), n = A + 2 * K;
    real *sums = m->acts.dbias;
    if (m->computes == MODEL_INPUTS || !x->g.q_bias)
        return;
    RUN(m, m->compute->dev->ops->zero(m->compute->stream, sums, n * (int64_t)sizeof(real)));
    LAYER(m, bias_backward, sums, x->a.dqkv, m->stats.scratch, model_own_tokens(m), n);
    LAYER(m, add, x->g.q_bias, sums, A);
    LAYER(m, add, x->g.k_bias, sums + A, K);
    LAYER(m, add, x->g.v_bias, sums + A + K, K);
}

/* From dqkv: dbtc becomes the gradient of the input, and gradients of weights are added. */
static void make_qkv_backward(struct model *m, const struct layer *x)
{
    const struct model_config *c = &m->config;
    int64_t A = model_part_channels(c), K = model_part_kv_channels(c);
    struct columns qkv = {x->a.dqkv, A + 2 * K},
                   qk = c->hf->qk_norm ? (struct columns){x->a.dqk, A + K} : qkv;
    struct columns k = {qk.p + A, qk.ld}, v = {qkv.p + A + K, qkv.ld};
    if (m->computes != MODEL_WEIGHTS)
        rotate(m, x->a.dqkv, /* back */ true);
    if (c->hf->qk_norm)
        normalize_heads_backward(m, x);
    if (c->hf->qkv_bias)
        biases_backward(m, x);
    product_backward_input(m, qk, x->p.q, &x->lora[LORA_Q], A, /* add */ false);
    product_backward_input(m, k, x->p.k, &x->lora[LORA_K], K, /* add */ true);
    product_backward_input(m, v, x->p.v, &x->lora[LORA_V], K, /* add */ true);
    const real *inp = model_all_rows_for_weights(m, x->a.norm1);
    product_backward_weight(m, x->g.q, &x->lora[LORA_Q], qk, inp, A);
    product_backward_weight(m, x->g.k, &x->lora[LORA_K], k, inp, K);
    product_backward_weight(m, x->g.v, &x->lora[LORA_V], v, inp, K);
}

/* ---- passes ---- */

static void embed_forward(struct model *m)
{
    enum profile_part before = profile_enter(m->profile, PROFILE_COMPUTE);
    model_embed(m, llama_of(m)->params.embed, NULL);
    profile_enter(m->profile, before);
}

static void layer_forward(struct model *m, int64_t l)
{
    enum profile_part before = profile_enter(m->profile, PROFILE_COMPUTE);
    const struct layer x = layer_of(m, l);
    int64_t F = model_part_hidden(&m->config), A = model_part_channels(&m->config);
    const real *inp = model_residual_before(m, l);
    norm_forward(m, x.a.norm1, x.s.norm1_rstd, inp, x.p.norm1);
    make_qkv(m, &x, model_all_rows(m, x.a.norm1));
    model_attend(m, l, x.a.atty, x.a.qkv);
    project(m, x.a.residual2, inp, x.a.atty, x.p.o, &x.lora[LORA_O], A);
    norm_forward(m, x.a.norm2, x.s.norm2_rstd, x.a.residual2, x.p.norm2);
    const real *rows = model_all_rows(m, x.a.norm2);
    product(m, (struct columns){x.a.gate_up, 2 * F}, rows, x.p.gate, NULL, &x.lora[LORA_GATE], F);
    product(m, (struct columns){x.a.gate_up + F, 2 * F}, rows, x.p.up, NULL, &x.lora[LORA_UP], F);
    LLAMA(m, swiglu_forward, x.a.act, x.a.gate_up, model_own_tokens(m), F);
    if (m->recomputes)
        lora_hidden(m, &x.lora[LORA_DOWN], x.a.act, F);
    else
        project(m, model_residual_before(m, l + 1), x.a.residual2, x.a.act, x.p.down, &x.lora[LORA_DOWN], F);
    profile_enter(m->profile, before);
}

static real *head_of(const struct model *m, const struct llama_params *p)
{
    return m->config.hf->tied ? p->embed : p->head;
}

static void head_forward(struct model *m)
{
    enum profile_part before = profile_enter(m->profile, PROFILE_COMPUTE);
    const struct llama *own = llama_of(m);
    norm_forward(m, own->acts.norm, own->stats.norm_rstd, model_last_residual(m), own->params.norm);
    model_loss_forward(m, own->acts.norm, head_of(m, &own->params));
    profile_enter(m->profile, before);
}

static void head_backward(struct model *m)
{
    enum profile_part before = profile_enter(m->profile, PROFILE_COMPUTE);
    const struct llama *own = llama_of(m);
    int64_t bytes = model_own_rows(m) * m->config.channels * (int64_t)sizeof(real);
    const real *dnorm =
        model_loss_backward(m, own->acts.norm, head_of(m, &own->params), head_of(m, &own->grads));
    if (m->computes != MODEL_WEIGHTS)
        RUN(m, m->compute->dev->ops->zero(m->compute->stream, m->acts.dresidual, bytes));
    norm_backward(m, own->grads.norm, dnorm, model_last_residual(m), own->params.norm, own->stats.norm_rstd);
    profile_enter(m->profile, before);
}

/* dresidual is the gradient of the layer's output on entry, and of its input on return. dbtc is summed over
 * the ranks before it passes a norm. */
static void layer_backward(struct model *m, int64_t l)
{
    enum profile_part before = profile_enter(m->profile, PROFILE_COMPUTE);
    const struct layer x = layer_of(m, l);
    int64_t F = model_part_hidden(&m->config), A = model_part_channels(&m->config);
    const struct columns gate = {x.a.gate_up, 2 * F}, up = {x.a.gate_up + F, 2 * F};
    const real *inp = model_residual_before(m, l), *rows;

    const real *dout = model_all_rows(m, model_kept_gradient(m, 4 * l, m->acts.dresidual));
    project_backward_input(m, x.a.dact, dout, x.p.down, &x.lora[LORA_DOWN], F);
    project_backward_weight(m, x.g.down, &x.lora[LORA_DOWN], dout, x.a.act, F);
    if (m->computes != MODEL_WEIGHTS)
        LLAMA(m, swiglu_backward, x.a.gate_up, x.a.dact, model_own_tokens(m), F);
    product_backward_input(m, gate, x.p.gate, &x.lora[LORA_GATE], F, /* add */ false);
    product_backward_input(m, up, x.p.up, &x.lora[LORA_UP], F, /* add */ true);
    rows = model_all_rows_for_weights(m, x.a.norm2);
    product_backward_weight(m, x.g.gate, &x.lora[LORA_GATE], gate, rows, F);
    product_backward_weight(m, x.g.up, &x.lora[LORA_UP], up, rows, F);
    const real *dnorm = model_own_sum(m, 4 * l + 1, m->acts.dbtc);
    norm_backward(m, x.g.norm2, dnorm, x.a.residual2, x.p.norm2, x.s.norm2_rstd);

    dout = model_all_rows(m, model_kept_gradient(m, 4 * l + 2, m->acts.dresidual));
    project_backward_input(m, m->acts.dbtc, dout, x.p.o, &x.lora[LORA_O], A);
    project_backward_weight(m, x.g.o, &x.lora[LORA_O], dout, x.a.atty, A);
    model_attend_backward(m, l, x.a.dqkv, m->acts.dbtc, x.a.atty, x.a.qkv);
    make_qkv_backward(m, &x);
    dnorm = model_own_sum(m, 4 * l + 3, m->acts.dbtc);
    norm_backward(m, x.g.norm1, dnorm, inp, x.p.norm1, x.s.norm1_rstd);
    profile_enter(m->profile, before);
}

static void embed_backward(struct model *m)
{
    enum profile_part before = profile_enter(m->profile, PROFILE_COMPUTE);
    model_embed_gradients(m, llama_of(m)->grads.embed, NULL);
    profile_enter(m->profile, before);
}

/* ---- memory ---- */

static void sizes_of(const struct model *m, const struct model_counts *n, int64_t *acts, int64_t *stats)
{
    const struct model_config *c = &m->config;
    int64_t L = n->layers, C = c->channels, BT = model_own_tokens(m), R = model_own_rows(m);
    int64_t A = model_part_channels(c), K = model_part_kv_channels(c), F = model_part_hidden(c);
    int64_t L_normed = c->hf->qk_norm ? L : 0, gradients_normed = c->hf->qk_norm ? n->gradients : 0;
    int64_t widest = C > model_head_size(c) ? C : model_head_size(c);
    int64_t adapters = lora_n(c) * model_apart(BT * c->lora_rank);
    const int64_t a[LLAMA_N_ACTIVATIONS] = {
        L * model_apart(R * C),                        /* norm1 */
        L_normed * model_apart(BT * (A + K)),          /* qk */
        n->first_part * model_apart(BT * (A + 2 * K)), /* qkv */
        L * model_apart(BT * A),                       /* atty */
        L * model_apart(R * C),                        /* residual2 */
        L * model_apart(R * C),                        /* norm2 */
        L * model_apart(BT * 2 * F),                   /* gate_up */
        L * model_apart(BT * F),                       /* act */
        n->head * R * C,                               /* norm */
        L * adapters,                                  /* lora_h */
        n->gradients * model_apart(BT * (A + 2 * K)),  /* dqkv */
        gradients_normed * model_apart(BT * (A + K)),  /* dqk */
        n->once * BT * F,                              /* dact */
        n->gradients * adapters,                       /* lora_dh */
    };
    const int64_t s[LLAMA_N_STATISTICS] = {
        L * R,                                                                 /* norm1_rstd */
        L_normed * BT * model_part_heads(c),                                   /* q_rstd */
        L_normed * BT * model_part_kv_heads(c),                                /* k_rstd */
        L * R,                                                                 /* norm2_rstd */
        n->head * R,                                                           /* norm_rstd */
        n->once * c->context * model_head_size(c),                             /* rotary */
        n->once * llama_layers_for(m->compute)->n_scratch(m->compute, widest), /* scratch */
    };
    memcpy(acts, a, sizeof a);
    memcpy(stats, s, sizeof s);
}

/* Makes the table of rotary positions and copies it to the device. */
static int open_own(struct model *m)
{
    const int64_t T = m->config.context, HS = model_head_size(&m->config);
    const struct zr_device_ops *dev = m->compute->dev->ops;
    float *table;
    llama_of(m)->layers = llama_layers_for(m->compute);
    ZR_TRY(ZR_ALLOC(table, T * HS, "a table of %lld positions", (long long)T));
    llama_rotary_table(table, T, HS, &m->config.hf->rope);
    int err =
        dev->copy(m->compute->stream, llama_of(m)->stats.rotary, table, T * HS * (int64_t)sizeof *table);
    err = err ? err : dev->stream_sync(m->compute->stream);
    free(table);
    return err;
}

const struct model_passes llama_passes = {
    .own_bytes = sizeof(struct llama),
    .params_at = offsetof(struct llama, params),
    .grads_at = offsetof(struct llama, grads),
    .acts_at = offsetof(struct llama, acts),
    .stats_at = offsetof(struct llama, stats),
    .n_acts = LLAMA_N_ACTIVATIONS,
    .n_stats = LLAMA_N_STATISTICS,
    .sizes = sizes_of,
    .open = open_own,
    .embed_forward = embed_forward,
    .embed_backward = embed_backward,
    .layer_forward = layer_forward,
    .layer_backward = layer_backward,
    .head_forward = head_forward,
    .head_backward = head_backward,
};
