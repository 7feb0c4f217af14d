/* SPDX-License-Identifier: Apache-2.0 */
/* data.c: opens what zero-bench train learns from, and gives each rank its rows of each micro-batch. */
#include "bench/train/run.h"
#include "bench/train/text_tokens.h"
#include "kernels/alloc.h"

/* The last part of the text is held out. */
static int load_text(struct run *r)
{
    const struct train_options *o = r->o;
    int64_t needed = o->batch * o->model.config.context + 1, n_held;
    if (o->model.config.vocab < 256)
        return zr_fail(ZERO_ERR_ARG, "--vocab: %lld ids are too few for bytes, which need 256",
                       (long long)o->model.config.vocab);
    TRY(bytes_data_open(&r->data, o->data.paths, o->data.n));
    n_held = (int64_t)((double)r->data.n_bytes * o->held_out);
    r->data.n_bytes -= n_held;
    if (r->data.n_bytes < needed) {
        return zr_fail(
            ZERO_ERR_ARG,
            "--data: %lld bytes of text in %lld files, but one batch takes %lld, by --batch and --context",
            (long long)r->data.n_bytes, (long long)r->data.n_files, (long long)needed);
    }
    if (!(o->held_out > 0))
        return 0;
    int err = token_data_open_text(&r->held_out, r->data.bytes + r->data.n_bytes, 1, n_held, -1);
    r->eval = &r->held_out;
    r->n_eval = r->held_out.n_rows;
    return err ? zr_fail_more(err, "--held-out %g", o->held_out) : 0;
}

static int open_tokens(const struct run *r, struct token_data *d, const struct train_files *files,
                       const struct train_files *masks)
{
    TRY(token_data_open(d, files->paths, files->n, r->o->token_bytes));
    return masks->n ? token_data_open_masks(d, masks->paths, masks->n) : 0;
}

/* Text becomes tokens by the tokenizer of the model's folder. */
static int encode_text(struct run *r)
{
    const struct train_options *o = r->o;
    struct tokenizer *t;
    int64_t end_token = text_end_token(o->model.config.hf), n_files = 0;
    TRY(tokenizer_open(&t, o->model.dir));
    int err = text_tokens(t, o->data.paths, o->data.n, end_token, text_tokens_take, &r->ids, &n_files);
    tokenizer_close(t);
    TRY(err);
    return token_data_open_text(&r->tokens, r->ids.ids, (int)sizeof *r->ids.ids, r->ids.n, end_token);
}

/* The last rows are held out, at least one. */
static int load_tokens(struct run *r)
{
    const struct train_options *o = r->o;
    TRY(o->tokens.n ? open_tokens(r, &r->tokens, &o->tokens, &o->masks) : encode_text(r));
    r->n_rows = r->tokens.n_rows;
    if (o->eval_tokens.n) {
        TRY(open_tokens(r, &r->held_out, &o->eval_tokens, &o->eval_masks));
        r->eval = &r->held_out;
        r->n_eval = r->held_out.n_rows;
    } else if (o->held_out > 0) {
        int64_t n = (int64_t)((double)r->n_rows * o->held_out);
        r->eval = &r->tokens;
        r->n_eval = n ? n : 1;
        r->eval_first = r->n_rows -= r->n_eval;
    }
    if (!r->n_rows)
        return zr_fail(ZERO_ERR_ARG, "--held-out %g: no row is left to train on", o->held_out);
    if (!token_data_counts(&r->tokens, 0, r->n_rows))
        return zr_fail(ZERO_ERR_ARG, "--mask: no token of the %lld rows to train on counts in the loss",
                       (long long)r->n_rows);
    if (r->n_eval && !token_data_counts(r->eval, r->eval_first, r->n_eval))
        return zr_fail(ZERO_ERR_ARG, "--%s: no token of the %lld rows to evaluate counts in the loss",
                       o->eval_tokens.n ? "eval-mask" : "mask", (long long)r->n_eval);
    return 0;
}

int train_load_data(struct run *r)
{
    const struct train_options *o = r->o;
    const struct model_config *c = &o->model.config;
    r->tokens = (struct token_data){
        .context = c->context, .vocab = c->vocab, .documents = c->documents, .end_token = o->end_token};
    r->held_out = r->tokens;
    TRY(o->tokens.n || o->encodes ? load_tokens(r) : load_text(r));
    return train_open_rows(r);
}

int train_open_rows(struct run *r)
{
    const int64_t n = r->o->batch * r->o->model.config.context;
    TRY(ZR_ZALLOC(r->whole.tokens, 3 * n, "rows of text"));
    r->whole.targets = r->whole.tokens + n;
    r->whole.document_start = r->whole.targets + n;
    return 0;
}

_Static_assert((int)TOKEN_LEFT_OUT == (int)MODEL_LEFT_OUT, "the model takes targets as they are read");

/* Copies this rank's part of each of the batch's whole rows to m. */
static void take_own_rows(const struct run *r, struct model *m)
{
    const int64_t context = m->config.context;
    const struct model_rows own = model_rows_of(m, m->cp.part);
    for (int64_t b = 0, to = 0; b < r->o->batch; b++)
        for (int i = 0; i < 2; i++)
            for (int64_t t = own.first[i]; t < own.first[i] + own.n[i]; t++, to++) {
                int64_t at = b * context + t;
                m->tokens[to] = r->whole.tokens[at];
                m->targets[to] = r->whole.targets[at];
                m->positions[to] = (int32_t)t - r->whole.document_start[at];
            }
    if (m->config.documents)
        memcpy(m->document_start, r->whole.document_start,
               (size_t)(r->o->batch * context) * sizeof *m->document_start);
}

/* Ranks of cp read the same rows, and have each token of them once. Check mode compares these. On a GPU it
 * compares only arrays of the GPU. */
static int expect_whole_rows(struct run *r, const struct model *m)
{
    const struct model_config *c = &m->config;
    const struct model_rows own = model_rows_of(m, m->cp.part);
    if (c->cp <= 1)
        return 0;
    TRY_ZERO(zero_expect_rows(r->z, c->context, own.first, own.n));
    if (!r->compute.cuda)
        TRY_ZERO(zero_expect_equal(r->z, ZERO_AXIS_CP, r->whole.tokens, r->o->batch * c->context, ZERO_I32));
    return 0;
}

/* The text follows from the number of micro-batches that all ranks have trained on, counted in steps of
 * the size that they had when the run began. So a run can go on with fewer or more ranks. Another --batch
 * may leave out some rows. */
static void sample_text(struct run *r, int64_t micro_batch)
{
    const struct train_options *o = r->o;
    int64_t number = (r->n_samples + o->batch - 1) / o->batch + micro_batch * r->at.n_dp + r->at.dp;
    bytes_data_sample(&r->data, &r->whole, o->batch, o->model.config.context, o->documents, o->seed,
                      number / r->per_step, number % r->per_step);
}

/* The row of the data that is row i of the run, which takes all rows in each epoch. It depends on neither
 * the ranks nor the size of a step. */
static int64_t row_of_run(const struct run *r, int64_t i)
{
    const int64_t n = r->n_rows;
    return token_data_shuffled(i % n, n, r->o->seed, i / n);
}

/* The first row of this rank's micro-batch number `micro_batch` of the next step, in the run. */
static int64_t first_row(const struct run *r, int64_t micro_batch)
{
    return r->n_samples + (micro_batch * r->at.n_dp + r->at.dp) * r->o->batch;
}

/* Place b of the batch. */
static struct token_rows place_of(const struct run *r, int64_t b)
{
    int64_t at = b * r->o->model.config.context;
    return (struct token_rows){r->whole.tokens + at, r->whole.targets + at, r->whole.document_start + at};
}

static int read_row(const struct run *r, const struct token_data *d, int64_t row, int64_t b)
{
    const struct token_rows to = place_of(r, b);
    return token_data_row(d, row, &to);
}

int train_count_tokens(struct run *r, bool *none)
{
    const struct model_rows own = model_rows_of(&r->model[0], r->at.cp);
    double scale;
    *none = false;
    if (!r->o->masks.n)
        return 0;
    r->counted = 0.0;
    for (int64_t i = 0; i < r->accum * r->o->batch; i++) {
        int64_t row = row_of_run(r, first_row(r, i / r->o->batch) + i % r->o->batch);
        for (int k = 0; k < 2; k++)
            r->counted += (double)token_data_count(&r->tokens, row, own.first[k], own.n[k]);
    }
    double mean = r->counted; /* over all ranks, which so agree on whether it is 0 */
    if (r->z)
        TRY_ZERO(zero_mean(r->z, &mean, 1));
    *none = mean == 0.0;
    if (*none)
        return 0;
    if (r->z)
        TRY_ZERO(zero_loss_scale(r->z, r->counted, &scale));
    else
        scale = (double)r->accum / r->counted;
    for (int32_t k = 0; k < r->n_own; k++)
        r->model[k].loss_scale = (float)scale;
    return 0;
}

int train_next_rows(struct run *r, struct model *m, int64_t micro_batch)
{
    const struct train_options *o = r->o;
    profile_enter(o->profile, PROFILE_REST);
    TRY(model_next_batch(m));
    for (int64_t b = 0; b < o->batch && r->tokens.n_files; b++)
        TRY(read_row(r, &r->tokens, row_of_run(r, first_row(r, micro_batch) + b), b));
    if (!r->tokens.n_files)
        sample_text(r, micro_batch);
    TRY(expect_whole_rows(r, m));
    take_own_rows(r, m);
    model_send_batch(m);
    profile_enter(o->profile, r->z ? PROFILE_LIBRARY : PROFILE_REST); /* until the model computes */
    return 0;
}

int train_next_held_out(struct run *r, struct model *m, int64_t i)
{
    const int64_t B = r->o->batch, first = (i * r->at.n_dp + r->at.dp) * B;
    TRY(model_next_batch(m));
    for (int64_t b = 0; b < B; b++) {
        bool exists = first + b < r->n_eval;
        TRY(read_row(r, r->eval, r->eval_first + (exists ? first + b : 0), b));
        for (int64_t t = 0; !exists && t < m->config.context; t++)
            place_of(r, b).targets[t] = TOKEN_LEFT_OUT;
    }
    TRY(expect_whole_rows(r, m));
    take_own_rows(r, m);
    for (int64_t t = 0; t < model_own_tokens(m) && !m->config.no_head; t++)
        r->eval_counted += m->targets[t] != MODEL_LEFT_OUT;
    model_send_batch(m);
    return 0;
}

int train_next_whole(struct run *r, struct model *m, int64_t i)
{
    (void)i;
    TRY(model_next_batch(m));
    take_own_rows(r, m);
    model_send_batch(m);
    return 0;
}

int64_t train_data_size(const struct run *r)
{
    return r->tokens.n_files ? r->tokens.n_tokens : r->data.n_bytes;
}
