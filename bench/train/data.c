/* SPDX-License-Identifier: Apache-2.0 */
/* data.c: opens what zero-bench train learns from, and gives each rank its rows of each micro-batch. */
#include "bench/train/run.h"
#include "kernels/alloc.h"

static int load_text(struct run *r)
{
    const struct train_options *o = r->o;
    int64_t needed = o->batch * o->model.config.context + 1;
    TRY(bytes_data_open(&r->data, o->data.paths, o->data.n));
    if (r->data.n_bytes < needed) {
        return zr_fail(ZERO_ERR_ARG, "--data: %lld bytes of text in %lld files, but one batch takes %lld",
                       (long long)r->data.n_bytes, (long long)r->data.n_files, (long long)needed);
    }
    return 0;
}

int train_load_data(struct run *r)
{
    const struct train_options *o = r->o;
    const struct gpt2_config *c = &o->model.config;
    int64_t n = o->batch * c->context;
    r->tokens = (struct token_data){
        .context = c->context, .vocab = c->vocab, .documents = c->documents, .end_token = o->end_token};
    TRY(o->tokens.n ? token_data_open(&r->tokens, o->tokens.paths, o->tokens.n, o->token_bytes)
                    : load_text(r));
    if (o->masks.n)
        TRY(token_data_open_masks(&r->tokens, o->masks.paths, o->masks.n));
    TRY(ZR_ALLOC(r->whole.tokens, 3 * n, "rows of text"));
    r->whole.targets = r->whole.tokens + n;
    r->whole.document_start = r->whole.targets + n;
    return 0;
}

_Static_assert((int)TOKEN_LEFT_OUT == (int)GPT2_LEFT_OUT, "the model takes targets as they are read");

/* Copies this rank's part of each of the batch's whole rows to m. */
static void take_own_rows(const struct run *r, struct gpt2 *m)
{
    const int64_t context = m->config.context;
    const struct gpt2_rows own = gpt2_rows_of(m, m->cp.part);
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
static int expect_whole_rows(struct run *r, const struct gpt2 *m)
{
    const struct gpt2_config *c = &m->config;
    const struct gpt2_rows own = gpt2_rows_of(m, m->cp.part);
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
    const int64_t n = r->tokens.n_rows;
    return token_data_shuffled(i % n, n, r->o->seed, i / n);
}

/* The first row of this rank's micro-batch number `micro_batch` of the next step, in the run. */
static int64_t first_row(const struct run *r, int64_t micro_batch)
{
    return r->n_samples + (micro_batch * r->at.n_dp + r->at.dp) * r->o->batch;
}

/* Reads a row into place b of the batch. */
static int read_row(struct run *r, int64_t row, int64_t b)
{
    int64_t at = b * r->tokens.context;
    const struct token_rows to = {r->whole.tokens + at, r->whole.targets + at, r->whole.document_start + at};
    return token_data_row(&r->tokens, row, &to);
}

int train_count_tokens(struct run *r)
{
    const struct gpt2_rows own = gpt2_rows_of(&r->model[0], r->at.cp);
    double scale;
    if (!r->o->masks.n)
        return 0;
    r->counted = 0.0;
    for (int64_t i = 0; i < r->accum * r->o->batch; i++) {
        int64_t row = row_of_run(r, first_row(r, i / r->o->batch) + i % r->o->batch);
        for (int k = 0; k < 2; k++)
            r->counted += (double)token_data_count(&r->tokens, row, own.first[k], own.n[k]);
    }
    if (r->z)
        TRY_ZERO(zero_loss_scale(r->z, r->counted, &scale));
    else
        scale = (double)r->accum / r->counted;
    for (int32_t k = 0; k < r->n_own; k++)
        r->model[k].loss_scale = (float)scale;
    return 0;
}

int train_next_rows(struct run *r, struct gpt2 *m, int64_t micro_batch)
{
    const struct train_options *o = r->o;
    profile_enter(o->profile, PROFILE_REST);
    TRY(gpt2_next_batch(m));
    for (int64_t b = 0; b < o->batch && r->tokens.n_files; b++)
        TRY(read_row(r, row_of_run(r, first_row(r, micro_batch) + b), b));
    if (!r->tokens.n_files)
        sample_text(r, micro_batch);
    TRY(expect_whole_rows(r, m));
    take_own_rows(r, m);
    gpt2_send_batch(m);
    profile_enter(o->profile, r->z ? PROFILE_LIBRARY : PROFILE_REST); /* until the model computes */
    return 0;
}

int64_t train_data_size(const struct run *r)
{
    return r->tokens.n_files ? r->tokens.n_tokens : r->data.n_bytes;
}
