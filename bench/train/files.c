/* SPDX-License-Identifier: Apache-2.0 */
/* files.c: what zero-bench train reads and writes: data, checkpoints and weights. A checkpoint contains
 * struct train_position, from which the choice of data follows. */
#include "bench/gpt2/gpt2_names.h"
#include "bench/train/run.h"
#include "kernels/alloc.h"

#include <dirent.h>
#include <stdio.h>

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
    TRY(ZR_ALLOC(r->whole.tokens, 3 * n, "rows of text"));
    r->whole.targets = r->whole.tokens + n;
    r->whole.document_start = r->whole.targets + n;
    return 0;
}

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
static void sample_text(struct run *r, int64_t n_before)
{
    const struct train_options *o = r->o;
    int64_t number = (r->n_samples + o->batch - 1) / o->batch + n_before;
    bytes_data_sample(&r->data, &r->whole, o->batch, o->model.config.context, o->documents, o->seed,
                      number / r->per_step, number % r->per_step);
}

/* Reads rows [first, first + batch) of the run, which takes all rows of the data in each epoch. They depend
 * on neither the ranks nor the size of a step. */
static int read_rows(struct run *r, int64_t first)
{
    const struct token_data *d = &r->tokens;
    for (int64_t b = 0; b < r->o->batch; b++) {
        const struct token_rows row = {r->whole.tokens + b * d->context, r->whole.targets + b * d->context,
                                       r->whole.document_start + b * d->context};
        int64_t i = first + b;
        TRY(token_data_row(d, token_data_shuffled(i % d->n_rows, d->n_rows, r->o->seed, i / d->n_rows),
                           &row));
    }
    return 0;
}

int train_next_rows(struct run *r, struct gpt2 *m, int64_t micro_batch)
{
    const struct train_options *o = r->o;
    int64_t n_before = micro_batch * r->at.n_dp + r->at.dp; /* micro-batches of this step */
    profile_enter(o->profile, PROFILE_REST);
    TRY(gpt2_next_batch(m));
    if (r->tokens.n_files)
        TRY(read_rows(r, r->n_samples + n_before * o->batch));
    else
        sample_text(r, n_before);
    TRY(expect_whole_rows(r, m));
    take_own_rows(r, m);
    gpt2_send_batch(m);
    profile_enter(o->profile, r->z ? PROFILE_LIBRARY : PROFILE_REST); /* until the model computes */
    return 0;
}

/* The size of the data, by which a checkpoint knows them. */
static int64_t data_size(const struct run *r)
{
    return r->tokens.n_files ? r->tokens.n_tokens : r->data.n_bytes;
}

/* Saves a checkpoint, with the position in the data as the job's data. */
static int save(struct run *r, int64_t step)
{
    const struct train_options *o = r->o;
    char text[256];
    int n = snprintf(text, sizeof text, "seed %llu step %lld samples %lld text_bytes %lld per_step %lld",
                     (unsigned long long)o->seed, (long long)step, (long long)r->n_samples,
                     (long long)data_size(r), (long long)r->per_step);
    TRY_ZERO(zero_set_data(r->z, ZERO_DATA_JOB, text, n));
    return take_libzero_error(zero_save(r->z, o->save, NULL));
}

int train_save(struct run *r, int64_t steps_done, bool stop)
{
    const struct train_options *o = r->o;
    bool due = o->save && (stop || (o->save_every && steps_done % o->save_every == 0));
    return due ? save(r, steps_done) : 0;
}

/* Whether a checkpoint was ever begun in dir. If so, zero_load finds the latest valid one or says why not;
 * else --load latest starts from the beginning. */
static bool has_checkpoint(const char *dir)
{
    DIR *d = opendir(dir);
    bool found = false;
    for (const struct dirent *e; d && !found && (e = readdir(d));)
        found = !strncmp(e->d_name, "save-", 5);
    if (d)
        closedir(d);
    return found;
}

int train_load(struct run *r, int64_t *step)
{
    const struct train_options *o = r->o;
    bool latest = !strcmp(o->load, "latest");
    /* its mean over ranks is below 1 if the first data-parallel rank finds none */
    double found[1] = {r->at.dp == 0 && latest && !has_checkpoint(o->save) ? 0.0 : 1.0};
    TRY_ZERO(zero_mean(r->z, found, 1));
    if (found[0] < 1.0) {
        report_text(&r->report, "nothing saved in %s yet: from the start\n", o->save);
        return 0;
    }
    TRY_ZERO(zero_load(r->z, latest ? o->save : o->load));
    struct zero_data_info info;
    struct train_position p;
    char text[256] = "";
    TRY_ZERO(zero_read_data(r->z, ZERO_DATA_JOB, 0, 0, NULL, &info));
    if (info.bytes < (int64_t)sizeof text)
        TRY_ZERO(zero_read_data(r->z, ZERO_DATA_JOB, 0, info.bytes, text, NULL));
    if (!train_read_position(text, &p))
        return zr_fail(ZERO_ERR_ARG, "--load: this checkpoint was not saved by zero-bench train");
    if (p.seed != o->seed || p.text_bytes != data_size(r)) {
        return zr_fail(ZERO_ERR_ARG, "--load: saved with --seed %llu and %lld %s; here it is %llu and %lld",
                       (unsigned long long)p.seed, (long long)p.text_bytes,
                       r->tokens.n_files ? "tokens" : "bytes of text", (unsigned long long)o->seed,
                       (long long)data_size(r));
    }
    *step = p.step;
    r->per_step = p.per_step;
    r->n_samples = p.samples;
    report_text(&r->report, "going on from step %lld\n", (long long)p.step);
    return 0;
}

/* Names the tensors of all of this rank's stages. */
static int32_t name_weights(const struct run *r, struct zero_weight *map, char (*text)[40])
{
    int32_t n = 0;
    for (int32_t k = 0; k < r->n_own; k++) {
        const struct train_stage *s = &r->stage[k];
        int32_t before = n;
        n += gpt2_names(map + n, text + n, r->number + s->first, s->n, (int32_t)s->config.first_layer,
                        (int32_t)s->config.layers);
        for (int32_t i = before; i < n; i++)
            map[i].tensor += s->first;
    }
    return n;
}

/* Exports or imports the weights under Hugging Face's names. */
static int move_weights(struct run *r, bool export)
{
    const struct train_options *o = r->o;
    int32_t n = 0;
    for (int32_t k = 0; k < r->n_own; k++)
        n += GPT2_N_NAMES((int32_t)r->stage[k].config.layers);
    struct zero_weight *map = malloc((size_t)n * sizeof *map);
    char(*text)[40] = malloc((size_t)n * sizeof *text);
    int err = map && text ? 0 : zr_fail(ZERO_ERR_NOMEM, "no memory for %d names", n);
    if (!err) {
        n = name_weights(r, map, text);
        err = take_libzero_error(export ? zero_export(r->z, o->export_to, map, n, o->export_max)
                                        : zero_import(r->z, o->import_from, map, n));
    }
    free(map);
    free(text);
    return err;
}

int train_import(struct run *r)
{
    return r->o->import_from ? move_weights(r, /* export */ false) : 0;
}

int train_export(struct run *r)
{
    return r->o->export_to ? move_weights(r, /* export */ true) : 0;
}
