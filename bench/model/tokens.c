/* SPDX-License-Identifier: Apache-2.0 */
/* tokens.c: what a model does with token ids: it sorts and sends a batch, embeds its tokens, and computes the
 * loss of its targets (passes.h). Tensor-parallel ranks have some of the ids each. */
#include "bench/model/passes.h"
#include "bench/model/vocab.h"

int64_t model_first_id(const struct model *m)
{
    return m->part * model_part_vocab(&m->config);
}

int64_t model_n_ids(const struct model *m)
{
    int64_t U = model_part_vocab(&m->config), left = m->config.vocab - model_first_id(m);
    return left < U ? left : U;
}

/* Groups rows by number, below n_numbers, in ascending order with a counting sort. A row whose number is
 * negative is left out: its token belongs to another rank. */
static void sort_rows(struct model_groups *g, const int32_t *number, int64_t n_rows, int64_t n_numbers,
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

void model_send_batch(struct model *m)
{
    const struct zr_device_ops *dev = m->compute->dev->ops;
    struct model_batch *staged = &m->staged[m->slot];
    int64_t BT = model_own_tokens(m);
    if (m->config.tp > 1) {
        model_vocab_localize(staged->tokens, BT, model_first_id(m), model_n_ids(m));
        model_vocab_localize(staged->targets, BT, model_first_id(m), model_n_ids(m));
    }
    sort_rows(&staged->by_token, staged->tokens, BT, m->config.vocab, m->count);
    sort_rows(&staged->by_position, staged->positions, BT, m->config.context, m->count);
    m->batch.by_token.n_distinct = staged->by_token.n_distinct;
    m->batch.by_position.n_distinct = staged->by_position.n_distinct;
    RUN(m, dev->copy(m->compute->stream, m->batch.tokens, staged->tokens, m->batch_memory.bytes));
    RUN(m, dev->event_record(m->sent[m->slot], m->compute->stream));
}

void model_embed(struct model *m, const real *wte, const real *wpe)
{
    int64_t BT = model_own_tokens(m), C = m->config.channels;
    real *embedded = m->config.sequence ? m->acts.all : m->acts.embedded;
    if (m->config.tp > 1 && m->part > 0)
        wpe = NULL; /* one rank adds the positions */
    LAYER(m, embedding_forward, embedded, m->batch.tokens, m->batch.positions, wte, wpe, BT, C);
    if (m->config.sequence)
        RUN(m, m->scatter(m->sum_arg, m->acts.embedded, embedded, model_own_rows(m) * C));
    else if (m->config.tp > 1)
        RUN(m, m->sum(m->sum_arg, embedded, BT * C));
}

void model_embed_gradients(struct model *m, real *dwte, real *dwpe)
{
    const real *dout = model_kept_gradient(m, 4 * m->config.layers + 1, m->acts.dresidual);
    if (m->computes == MODEL_INPUTS || !dwte)
        return;
    dout = model_all_rows(m, dout);
    LAYER(m, tokens_backward, dwte, dout, &m->batch.by_token, m->stats.scratch, m->config.channels);
    if (dwpe)
        LAYER(m, positions_backward, dwpe, dout, &m->batch.by_position, m->stats.scratch, m->config.channels);
}

static struct model_label label_of(const struct model_config *c)
{
    return (struct model_label){.each = (float)(c->label_smoothing / (double)c->vocab),
                                .target = (float)(1 - c->label_smoothing)};
}

static float loss_scale(const struct model *m)
{
    return m->loss_scale > 0 ? m->loss_scale : 1.0f / (float)model_own_tokens(m);
}

/* The loss of one row of the batch if the logits are split over the ranks by token id. */
static void loss_of_parts(struct model *m, int64_t b)
{
    int64_t T = model_own_context(&m->config), U = model_part_vocab(&m->config), ld = m->ld_logits;
    float *top = m->stats.rows, *total = top + T, *wanted = total + T;
    const int32_t *targets = m->batch.targets + b * T;
    const struct model_label label = label_of(&m->config);
    LAYER(m, vocab_top, top, m->stats.logits, T, model_n_ids(m), ld);
    RUN(m, m->reduce(m->sum_arg, top, T, true));
    LAYER(m, vocab_exponentials, m->stats.logits, total, wanted, top, targets, T, model_n_ids(m), ld, label);
    RUN(m, m->reduce(m->sum_arg, total, 2 * T, false));
    LAYER(m, vocab_loss, m->acts.dlogits + b * T * ld, m->losses + b * T, m->stats.logits, total, wanted,
          targets, T, model_n_ids(m), U, ld, label, loss_scale(m));
}

void model_loss_forward(struct model *m, const real *x, const real *weight)
{
    int64_t C = m->config.channels, T = model_own_context(&m->config), U = model_part_vocab(&m->config),
            BT = m->B * T;
    x = model_all_rows(m, x);
    for (int64_t b = 0; b < m->B; b++) { /* row by row, as logits are the largest array */
        /* logits (T, U) = x (T, C) * weight (U, C)^T */
        struct zr_gemm_args args =
            product_of(MODEL_DTYPE, T, U, C, x + b * T * C, C, weight, C, m->stats.logits, m->ld_logits);
        args.trans_b = true;
        args.c_dtype = ZERO_F32;
        model_multiply(m, &args);
        if (m->only_logits)
            continue;
        if (m->config.tp > 1)
            loss_of_parts(m, b);
        else
            LAYER(m, cross_entropy, m->acts.dlogits + b * T * m->ld_logits, m->losses + b * T,
                  m->stats.logits, m->batch.targets + b * T, T, U, m->ld_logits, label_of(&m->config),
                  loss_scale(m));
    }
    if (!m->only_logits)
        LAYER(m, add_loss, m->loss, m->losses, BT);
}

const real *model_loss_backward(struct model *m, const real *x, const real *weight, real *dweight)
{
    int64_t C = m->config.channels, U = model_part_vocab(&m->config);
    const struct model_activations *a = &m->acts;
    model_linear_backward_input(m, a->dbtc, a->dlogits, m->ld_logits, weight, C, U);
    model_linear_backward_weight(m, dweight, NULL, a->dlogits, m->ld_logits,
                                 dweight ? model_all_rows_for_weights(m, x) : NULL, C, U);
    return model_own_sum(m, 4 * m->config.layers, a->dbtc);
}

int model_take_logits(struct model *m, int64_t t, float *out)
{
    const struct zr_device_ops *dev = m->compute->dev->ops;
    const int64_t bytes = model_n_ids(m) * (int64_t)sizeof *out;
    memset(out, 0, (size_t)m->config.vocab * sizeof *out);
    ZR_TRY(dev->copy(m->compute->stream, out + model_first_id(m), m->stats.logits + t * m->ld_logits, bytes));
    return dev->stream_sync(m->compute->stream);
}

int model_send_loss(struct model *m)
{
    const struct zr_device_ops *dev = m->compute->dev->ops;
    int err = dev->copy(m->compute->stream, m->loss_out, m->loss, sizeof *m->loss);
    err = err ? err : dev->zero(m->compute->stream, m->loss, sizeof *m->loss);
    return err ? err : dev->event_record(m->loss_sent, m->compute->stream);
}

int model_take_loss(struct model *m, double *loss)
{
    int err = m->compute->dev->ops->event_sync(m->loss_sent);
    *loss = *m->loss_out;
    return err;
}
