/* SPDX-License-Identifier: Apache-2.0 */
/* gpt2.c: forward and backward of the model in gpt2.h. The architecture is that of Radford et al. 2019:
 * pre-norm blocks, learned positions, and a head that shares the embedding's weights. */
#include "bench/gpt2/gpt2.h"
#include "bench/gpt2/gpt2_vocab.h"

/* After the first failure all work is skipped, and the caller finds m->err at the end of the pass. */
#define RUN(m, call)                                                                                         \
    do {                                                                                                     \
        if (!(m)->err) {                                                                                     \
            (m)->err = (call);                                                                               \
        }                                                                                                    \
    } while (0)

/* Calls a function of the layer table on m's device. */
#define LAYER(m, name, ...) RUN(m, (m)->layers->name((m)->compute, __VA_ARGS__))

static void multiply(struct gpt2 *m, const struct zr_gemm_args *args)
{
    enum profile_part before = PROFILE_COMPUTE;
    if (m->profile) {
        before = m->profile->part;
        profile_enter_product(m->profile, 2.0 * (double)args->m * (double)args->n * (double)args->k *
                                              (double)args->n_batch);
    }
    RUN(m, zr_gemm_run(m->compute->gemm, args));
    profile_enter(m->profile, before);
}

static void copy(struct gpt2 *m, real *dst, const real *src, int64_t n)
{
    RUN(m, m->compute->dev->ops->copy(m->compute->stream, dst, src, n * (int64_t)sizeof(real)));
}

static struct zr_gemm_args linear(const struct gpt2 *m, real *out, const real *inp, const real *weight,
                                  const real *bias, int64_t C, int64_t OC)
{
    struct zr_gemm_args args =
        product_of(GPT2_GEMM_DTYPE, gpt2_own_tokens(m), OC, C, inp, C, weight, C, out, OC);
    args.trans_b = true;
    args.bias = bias;
    args.bias_dtype = GPT2_GEMM_DTYPE;
    return args;
}

/* out (B*T, OC) = inp (B*T, C) * weight (OC, C)^T + bias (OC). If `add`, it is added to out. */
static void linear_forward(struct gpt2 *m, real *out, const real *inp, const real *weight, const real *bias,
                           int64_t C, int64_t OC, bool add)
{
    struct zr_gemm_args args = linear(m, out, inp, weight, bias, C, OC);
    args.beta = add ? 1.0f : 0.0f;
    multiply(m, &args);
}

/* Sums x over the tensor-parallel ranks, if there are several. */
static void sum_parts(struct gpt2 *m, real *x)
{
    if (m->config.tp > 1)
        RUN(m, m->sum(m->sum_arg, x, gpt2_own_tokens(m) * m->config.channels));
}

/* Collects the rows x (R, C) of all ranks. The result is valid until the next call. */
static const real *all_rows(struct gpt2 *m, const real *x)
{
    if (!m->config.sequence)
        return x;
    RUN(m, m->gather(m->sum_arg, m->acts.all, x, gpt2_own_rows(m) * m->config.channels));
    return m->acts.all;
}

/* The same for an input of the gradients of weights, if they are computed now. */
static const real *all_rows_for_weights(struct gpt2 *m, const real *x)
{
    return m->computes == GPT2_INPUTS ? NULL : all_rows(m, x);
}

/* Returns a gradient x (R, C) that both parts of a backward pass use. The first part keeps it as number k,
 * and the second returns what was kept. */
static const real *kept_gradient(struct gpt2 *m, int64_t k, const real *x)
{
    const int64_t n = gpt2_own_rows(m) * m->config.channels;
    real *kept = m->config.two_parts ? m->acts.kept_grads + k * gpt2_apart(n) : NULL;
    if (m->computes == GPT2_INPUTS)
        copy(m, kept, x, n);
    return m->computes == GPT2_WEIGHTS ? kept : x;
}

/* Sums x (B*T, C) over the ranks in place, and returns this rank's rows (R, C) of the sum, which is kept as
 * number k. */
static const real *own_sum(struct gpt2 *m, int64_t k, real *x)
{
    const int64_t n = gpt2_own_rows(m) * m->config.channels;
    real *own = m->config.sequence ? x + m->part * n : x;
    if (m->computes == GPT2_WEIGHTS)
        return kept_gradient(m, k, NULL);
    if (m->config.sequence)
        RUN(m, m->scatter(m->sum_arg, own, x, n));
    else
        sum_parts(m, x);
    return kept_gradient(m, k, own);
}

/* Like project, but out and x have this rank's rows only: each rank adds its own rows of x. */
static void project_rows(struct gpt2 *m, real *out, const real *x, const real *inp, const real *weight,
                         const real *bias, int64_t K)
{
    int64_t C = m->config.channels;
    linear_forward(m, m->acts.all, inp, weight, m->part == 0 ? bias : NULL, K, C, false);
    RUN(m, m->scatter(m->sum_arg, out, m->acts.all, gpt2_own_rows(m) * C));
    LAYER(m, add, out, x, gpt2_own_rows(m) * C);
}

/* out (R, C) = x (R, C) + inp (B*T, K) * weight (C, K)^T + bias (C). K is the rank's share, and the first
 * rank adds x and bias. */
static void project(struct gpt2 *m, real *out, const real *x, const real *inp, const real *weight,
                    const real *bias, int64_t K)
{
    int64_t C = m->config.channels;
    bool first = m->part == 0;
    if (m->config.sequence) {
        project_rows(m, out, x, inp, weight, bias, K);
        return;
    }
    if (first)
        copy(m, out, x, gpt2_own_tokens(m) * C);
    linear_forward(m, out, inp, weight, first ? bias : NULL, K, C, first);
    sum_parts(m, out);
}

/* before (B*T, OC) = inp (B*T, C) * weight (OC, C)^T + bias (OC), and out = gelu(before). */
static void linear_gelu_forward(struct gpt2 *m, real *out, real *before, const real *inp, const real *weight,
                                const real *bias, int64_t C, int64_t OC)
{
    struct zr_gemm_args args = linear(m, out, inp, weight, bias, C, OC);
    args.epilogue = ZR_GEMM_GELU;
    args.aux = before;
    args.ldaux = OC;
    if (zr_gemm_can(m->compute->gemm, &args)) {
        multiply(m, &args);
    } else {
        linear_forward(m, before, inp, weight, bias, C, OC, false);
        LAYER(m, gelu_forward, out, before, args.m * OC);
    }
}

/* dinp (B*T, C) = dout (B*T, OC) * weight (OC, C). If inp is gelu(before), dinp becomes the gradient of
 * before. */
static void linear_backward_input(struct gpt2 *m, real *dinp, const real *dout, int64_t ld_dout,
                                  const real *weight, const real *before, int64_t C, int64_t OC)
{
    if (m->computes == GPT2_WEIGHTS)
        return;
    struct zr_gemm_args args =
        product_of(GPT2_GEMM_DTYPE, gpt2_own_tokens(m), C, OC, dout, ld_dout, weight, C, dinp, C);
    struct zr_gemm_args fused = args;
    fused.epilogue = ZR_GEMM_DGELU;
    fused.aux = (void *)(uintptr_t)before; /* this epilogue only reads it */
    fused.ldaux = C;
    if (before && zr_gemm_can(m->compute->gemm, &fused)) {
        multiply(m, &fused);
        return;
    }
    multiply(m, &args);
    if (before)
        LAYER(m, gelu_backward, dinp, before, args.m * C);
}

/* dweight (OC, C) += dout^T * inp, or = if the model stores it. dbias (OC) += sum of dout's rows, if there is
 * a bias. */
static void linear_backward_weight(struct gpt2 *m, real *dweight, real *dbias, const real *dout,
                                   int64_t ld_dout, const real *inp, int64_t C, int64_t OC)
{
    if (m->computes == GPT2_INPUTS)
        return;
    int64_t BT = gpt2_own_tokens(m);
    struct zr_gemm_args args = product_of(GPT2_GEMM_DTYPE, OC, C, BT, dout, ld_dout, inp, C, dweight, C);
    args.trans_a = true;
    args.beta = m->stores ? 0.0f : 1.0f;
    struct zr_gemm_args fused = args;
    fused.epilogue = ZR_GEMM_SUM_A;
    fused.sum = m->acts.dbias;
    if (dbias && zr_gemm_can(m->compute->gemm, &fused)) {
        multiply(m, &fused);
        LAYER(m, add, dbias, m->acts.dbias, OC);
        return;
    }
    multiply(m, &args);
    if (dbias)
        LAYER(m, bias_backward, dbias, dout, m->stats.scratch, BT, OC);
}

/* A layer's slice of a stacked tensor, with n elements for each layer. The tensor is NULL where a part of
 * backward does not use it. */
static real *of_layer(real *tensor, int64_t l, int64_t n)
{
    return tensor ? tensor + l * n : NULL;
}

/* Adds to dresidual and to the gradients of a norm's weights, or to one of them in a part of backward. */
static void norm_backward(struct gpt2 *m, real *dweight, real *dbias, const real *dout, const real *inp,
                          const real *weight, const float *mean, const float *rstd)
{
    bool inputs = m->computes != GPT2_WEIGHTS, weights = m->computes != GPT2_INPUTS;
    LAYER(m, layernorm_backward, inputs ? m->acts.dresidual : NULL, weights ? dweight : NULL,
          weights ? dbias : NULL, dout, inp, weight, mean, rstd, m->stats.scratch, gpt2_own_rows(m),
          m->config.channels);
}

static void attention_forward(struct gpt2 *m, int64_t l, real *atty, real *qkv)
{
    enum profile_part before = profile_enter(m->profile, PROFILE_ATTENTION);
    RUN(m, gpt2_context_forward(m, l, atty, qkv));
    profile_enter(m->profile, before);
}

static void attention_backward(struct gpt2 *m, int64_t l, real *dqkv, const real *datty, const real *atty,
                               const real *qkv)
{
    if (m->computes == GPT2_WEIGHTS)
        return;
    enum profile_part before = profile_enter(m->profile, PROFILE_ATTENTION);
    RUN(m, gpt2_context_backward(m, l, dqkv, datty, atty, qkv));
    profile_enter(m->profile, before);
}

/* Groups rows by number, below n_numbers, in ascending order with a counting sort. A row whose number is
 * negative is left out: its token belongs to another rank. */
static void sort_rows(struct gpt2_groups *g, const int32_t *number, int64_t n_rows, int64_t n_numbers,
                      int32_t *next)
{
    int32_t n = 0, at = 0; /* next[v]: position of the next row of v */
    memset(next, 0, (size_t)n_numbers * sizeof *next);
    for (int64_t row = 0; row < n_rows; row++)
        if (number[row] >= 0)
            next[number[row]]++;
    for (int32_t v = 0; v < n_numbers; v++) {
        if (next[v]) {
            g->distinct[n] = v;
            g->first[n++] = at;
        }
        int32_t rows = next[v];
        next[v] = at;
        at += rows;
    }
    g->first[n] = at;
    g->n_distinct = n;
    for (int32_t row = 0; row < n_rows; row++)
        if (number[row] >= 0)
            g->order[next[number[row]]++] = row;
}

/* The first token id of this rank. */
static int64_t first_id(const struct gpt2 *m)
{
    return m->part * gpt2_part_vocab(&m->config);
}

static int64_t n_ids(const struct gpt2 *m)
{
    int64_t U = gpt2_part_vocab(&m->config), left = m->config.vocab - first_id(m);
    return left < U ? left : U;
}

void gpt2_send_batch(struct gpt2 *m)
{
    const struct zr_device_ops *dev = m->compute->dev->ops;
    struct gpt2_batch *staged = &m->staged[m->slot];
    int64_t BT = gpt2_own_tokens(m);
    if (m->config.tp > 1) {
        gpt2_vocab_localize(staged->tokens, BT, first_id(m), n_ids(m));
        gpt2_vocab_localize(staged->targets, BT, first_id(m), n_ids(m));
    }
    sort_rows(&staged->by_token, staged->tokens, BT, m->config.vocab, m->count);
    sort_rows(&staged->by_position, staged->positions, BT, m->config.context, m->count);
    m->batch.by_token.n_distinct = staged->by_token.n_distinct;
    m->batch.by_position.n_distinct = staged->by_position.n_distinct;
    RUN(m, dev->copy(m->compute->stream, m->batch.tokens, staged->tokens, m->batch_memory.bytes));
    RUN(m, dev->event_record(m->sent[m->slot], m->compute->stream));
}

void gpt2_turn_to(struct gpt2 *m, int64_t i)
{
    m->acts = m->kept[i].acts;
    m->stats = m->kept[i].stats;
}

void gpt2_embed_forward(struct gpt2 *m)
{
    enum profile_part before = profile_enter(m->profile, PROFILE_COMPUTE);
    if (m->config.tp > 1) {
        real *embedded = m->config.sequence ? m->acts.all : m->acts.embedded;
        LAYER(m, embedding_forward, embedded, m->batch.tokens, m->batch.positions, m->params.wte,
              m->part == 0 ? m->params.wpe : NULL, gpt2_own_tokens(m), m->config.channels);
        if (m->config.sequence)
            RUN(m, m->scatter(m->sum_arg, m->acts.embedded, embedded, gpt2_own_rows(m) * m->config.channels));
        else
            sum_parts(m, embedded);
    } else {
        LAYER(m, embedding_forward, m->acts.embedded, m->batch.tokens, m->batch.positions, m->params.wte,
              m->params.wpe, gpt2_own_tokens(m), m->config.channels);
    }
    profile_enter(m->profile, before);
}

/* The input of layer l. For l = L, the input of the head. */
static real *residual_before(struct gpt2 *m, int64_t l)
{
    int64_t RC = gpt2_own_rows(m) * m->config.channels;
    return l == 0 ? m->acts.embedded : m->acts.residual3 + (l - 1) * RC;
}

void gpt2_copy_residual(struct gpt2 *m, void *dst, const void *src)
{
    copy(m, dst, src, gpt2_own_rows(m) * m->config.channels);
}

real *gpt2_last_residual(struct gpt2 *m)
{
    return residual_before(m, m->config.layers);
}

void gpt2_layer_forward(struct gpt2 *m, int64_t l)
{
    enum profile_part before = profile_enter(m->profile, PROFILE_COMPUTE);
    int64_t C = m->config.channels, BT = gpt2_own_tokens(m), R = gpt2_own_rows(m);
    int64_t A = gpt2_part_channels(&m->config), F = gpt2_part_hidden(&m->config);
    const struct params *p = &m->params;
    const struct activations *a = &m->acts;
    const struct statistics *s = &m->stats;
    const real *x = residual_before(m, l);
    real *ln1 = a->ln1 + l * R * C, *qkv = a->qkv + l * BT * 3 * A;
    real *atty = a->atty + l * BT * A, *residual2 = a->residual2 + l * R * C, *ln2 = a->ln2 + l * R * C;
    real *fch = a->fch + l * BT * F, *fch_gelu = a->fch_gelu + l * BT * F;
    real *residual3 = a->residual3 + l * R * C;

    LAYER(m, layernorm_forward, ln1, s->ln1_mean + l * R, s->ln1_rstd + l * R, x, p->ln1w + l * C,
          p->ln1b + l * C, s->scratch, R, C);
    linear_forward(m, qkv, all_rows(m, ln1), p->qkvw + l * 3 * A * C, p->qkvb + l * 3 * A, C, 3 * A, false);
    attention_forward(m, l, atty, qkv);
    project(m, residual2, x, atty, p->attprojw + l * C * A, p->attprojb + l * C, A);
    LAYER(m, layernorm_forward, ln2, s->ln2_mean + l * R, s->ln2_rstd + l * R, residual2, p->ln2w + l * C,
          p->ln2b + l * C, s->scratch, R, C);
    linear_gelu_forward(m, fch_gelu, fch, all_rows(m, ln2), p->fcw + l * F * C, p->fcb + l * F, C, F);
    project(m, residual3, residual2, fch_gelu, p->fcprojw + l * C * F, p->fcprojb + l * C, F);
    profile_enter(m->profile, before);
}

static struct gpt2_label label_of(const struct gpt2_config *c)
{
    return (struct gpt2_label){.each = (float)(c->label_smoothing / (double)c->vocab),
                               .target = (float)(1 - c->label_smoothing)};
}

static float loss_scale(const struct gpt2 *m)
{
    return m->loss_scale > 0 ? m->loss_scale : 1.0f / (float)gpt2_own_tokens(m);
}

/* The loss of one row of the batch if the logits are split over the ranks by token id. */
static void loss_of_parts(struct gpt2 *m, int64_t b)
{
    int64_t T = gpt2_own_context(&m->config), U = gpt2_part_vocab(&m->config), ld = m->ld_logits;
    float *top = m->stats.rows, *total = top + T, *wanted = total + T;
    const int32_t *targets = m->batch.targets + b * T;
    const struct gpt2_label label = label_of(&m->config);
    LAYER(m, vocab_top, top, m->stats.logits, T, n_ids(m), ld);
    RUN(m, m->reduce(m->sum_arg, top, T, true));
    LAYER(m, vocab_exponentials, m->stats.logits, total, wanted, top, targets, T, n_ids(m), ld, label);
    RUN(m, m->reduce(m->sum_arg, total, 2 * T, false));
    LAYER(m, vocab_loss, m->acts.dlogits + b * T * ld, m->losses + b * T, m->stats.logits, total, wanted,
          targets, T, n_ids(m), U, ld, label, loss_scale(m));
}

void gpt2_head_forward(struct gpt2 *m)
{
    enum profile_part before = profile_enter(m->profile, PROFILE_COMPUTE);
    int64_t C = m->config.channels, T = gpt2_own_context(&m->config), U = gpt2_part_vocab(&m->config),
            BT = m->B * T;
    LAYER(m, layernorm_forward, m->acts.lnf, m->stats.lnf_mean, m->stats.lnf_rstd,
          residual_before(m, m->config.layers), m->params.lnfw, m->params.lnfb, m->stats.scratch,
          gpt2_own_rows(m), C);
    const real *lnf = all_rows(m, m->acts.lnf);
    for (int64_t b = 0; b < m->B; b++) { /* row by row, as logits are the largest array */
        /* logits (T, U) = lnf (T, C) * wte (U, C)^T */
        struct zr_gemm_args args = product_of(GPT2_GEMM_DTYPE, T, U, C, lnf + b * T * C, C, m->params.wte, C,
                                              m->stats.logits, m->ld_logits);
        args.trans_b = true;
        args.c_dtype = ZERO_F32;
        multiply(m, &args);
        if (m->config.tp > 1)
            loss_of_parts(m, b);
        else
            LAYER(m, cross_entropy, m->acts.dlogits + b * T * m->ld_logits, m->losses + b * T,
                  m->stats.logits, m->batch.targets + b * T, T, U, m->ld_logits, label_of(&m->config),
                  loss_scale(m));
    }
    LAYER(m, add_loss, m->loss, m->losses, BT);
    profile_enter(m->profile, before);
}

int gpt2_send_loss(struct gpt2 *m)
{
    const struct zr_device_ops *dev = m->compute->dev->ops;
    int err = dev->copy(m->compute->stream, m->loss_out, m->loss, sizeof *m->loss);
    err = err ? err : dev->zero(m->compute->stream, m->loss, sizeof *m->loss);
    return err ? err : dev->event_record(m->loss_sent, m->compute->stream);
}

int gpt2_take_loss(struct gpt2 *m, double *loss)
{
    int err = m->compute->dev->ops->event_sync(m->loss_sent);
    *loss = *m->loss_out;
    return err;
}

void gpt2_head_backward(struct gpt2 *m)
{
    enum profile_part before = profile_enter(m->profile, PROFILE_COMPUTE);
    int64_t C = m->config.channels, U = gpt2_part_vocab(&m->config), R = gpt2_own_rows(m);
    const struct activations *a = &m->acts;
    linear_backward_input(m, a->dbtc, a->dlogits, m->ld_logits, m->params.wte, NULL, C, U);
    linear_backward_weight(m, m->grads.wte, NULL, a->dlogits, m->ld_logits, all_rows_for_weights(m, a->lnf),
                           C, U);
    const real *dlnf = own_sum(m, 4 * m->config.layers, a->dbtc);
    if (m->computes != GPT2_WEIGHTS)
        RUN(m, m->compute->dev->ops->zero(m->compute->stream, a->dresidual, R * C * (int64_t)sizeof(real)));
    norm_backward(m, m->grads.lnfw, m->grads.lnfb, dlnf, residual_before(m, m->config.layers), m->params.lnfw,
                  m->stats.lnf_mean, m->stats.lnf_rstd);
    profile_enter(m->profile, before);
}

/* dresidual is the gradient of the layer's output on entry, and of its input on return. dbtc is summed over
 * the ranks before it passes a norm. */
void gpt2_layer_backward(struct gpt2 *m, int64_t l)
{
    enum profile_part before = profile_enter(m->profile, PROFILE_COMPUTE);
    int64_t C = m->config.channels, BT = gpt2_own_tokens(m), R = gpt2_own_rows(m);
    int64_t A = gpt2_part_channels(&m->config), F = gpt2_part_hidden(&m->config);
    const struct params *p = &m->params, *g = &m->grads;
    const struct activations *a = &m->acts;
    const struct statistics *s = &m->stats;
    const real *x = residual_before(m, l);
    const real *ln1 = a->ln1 + l * R * C, *qkv = a->qkv + l * BT * 3 * A;
    const real *atty = a->atty + l * BT * A, *residual2 = a->residual2 + l * R * C, *ln2 = a->ln2 + l * R * C;
    const real *fch = a->fch + l * BT * F, *fch_gelu = a->fch_gelu + l * BT * F;
    int64_t own = m->config.two_parts ? l : 0;
    real *dfch = a->dfch + own * gpt2_apart(BT * F), *dqkv = a->dqkv + own * gpt2_apart(BT * 3 * A);

    const real *dout = all_rows(m, kept_gradient(m, 4 * l, a->dresidual));
    linear_backward_input(m, dfch, dout, C, of_layer(p->fcprojw, l, C * F), fch, F, C);
    linear_backward_weight(m, of_layer(g->fcprojw, l, C * F), of_layer(g->fcprojb, l, C), dout, C, fch_gelu,
                           F, C);
    linear_backward_input(m, a->dbtc, dfch, F, of_layer(p->fcw, l, F * C), NULL, C, F);
    linear_backward_weight(m, of_layer(g->fcw, l, F * C), of_layer(g->fcb, l, F), dfch, F,
                           all_rows_for_weights(m, ln2), C, F);
    const real *dln = own_sum(m, 4 * l + 1, a->dbtc);
    norm_backward(m, of_layer(g->ln2w, l, C), of_layer(g->ln2b, l, C), dln, residual2,
                  of_layer(p->ln2w, l, C), s->ln2_mean + l * R, s->ln2_rstd + l * R);
    dout = all_rows(m, kept_gradient(m, 4 * l + 2, a->dresidual));
    linear_backward_input(m, a->dbtc, dout, C, of_layer(p->attprojw, l, C * A), NULL, A, C);
    linear_backward_weight(m, of_layer(g->attprojw, l, C * A), of_layer(g->attprojb, l, C), dout, C, atty, A,
                           C);
    attention_backward(m, l, dqkv, a->dbtc, atty, qkv);
    linear_backward_input(m, a->dbtc, dqkv, 3 * A, of_layer(p->qkvw, l, 3 * A * C), NULL, C, 3 * A);
    linear_backward_weight(m, of_layer(g->qkvw, l, 3 * A * C), of_layer(g->qkvb, l, 3 * A), dqkv, 3 * A,
                           all_rows_for_weights(m, ln1), C, 3 * A);
    dln = own_sum(m, 4 * l + 3, a->dbtc);
    norm_backward(m, of_layer(g->ln1w, l, C), of_layer(g->ln1b, l, C), dln, x, of_layer(p->ln1w, l, C),
                  s->ln1_mean + l * R, s->ln1_rstd + l * R);
    profile_enter(m->profile, before);
}

void gpt2_embed_backward(struct gpt2 *m)
{
    enum profile_part before = profile_enter(m->profile, PROFILE_COMPUTE);
    const real *dout = kept_gradient(m, 4 * m->config.layers + 1, m->acts.dresidual);
    if (m->computes != GPT2_INPUTS) {
        dout = all_rows(m, dout);
        LAYER(m, tokens_backward, m->grads.wte, dout, &m->batch.by_token, m->stats.scratch,
              m->config.channels);
        LAYER(m, positions_backward, m->grads.wpe, dout, &m->batch.by_position, m->stats.scratch,
              m->config.channels);
    }
    profile_enter(m->profile, before);
}
