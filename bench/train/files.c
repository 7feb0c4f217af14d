/* SPDX-License-Identifier: Apache-2.0 */
/* files.c: what zero-bench train reads and writes: text, checkpoints and weights. A checkpoint contains
 * struct train_position, from which the choice of text follows. */
#include "bench/train/run.h"
#include "kernels/alloc.h"

#include <dirent.h>
#include <stdio.h>

int train_load_text(struct run *r)
{
    const struct train_options *o = r->o;
    int64_t needed = o->batch * o->model.config.context + 1;
    TRY(bytes_data_open(&r->data, o->paths, o->n_paths));
    if (r->data.n_bytes < needed) {
        return zr_fail(ZERO_ERR_ARG, "--data: %lld bytes of text in %lld files, but one batch takes %lld",
                       (long long)r->data.n_bytes, (long long)r->data.n_files, (long long)needed);
    }
    int64_t n = o->batch * o->model.config.context;
    TRY(ZR_ALLOC(r->whole.tokens, 3 * n, "rows of text"));
    r->whole.targets = r->whole.tokens + n;
    r->whole.document_start = r->whole.targets + n;
    return 0;
}

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
 * the size that they had when the run began. So a run can go on with fewer or more ranks. */
int train_next_text(struct run *r, struct model *m, int64_t micro_batch)
{
    const struct train_options *o = r->o;
    int64_t number =
        r->n_micro + micro_batch * r->at.n_dp + r->at.dp; /* of this micro-batch, in the whole run */
    profile_enter(o->profile, PROFILE_REST);
    TRY(model_next_batch(m));
    bytes_data_sample(&r->data, &r->whole, o->batch, o->model.config.context, o->documents, o->seed,
                      number / r->per_step, number % r->per_step);
    TRY(expect_whole_rows(r, m));
    take_own_rows(r, m);
    model_send_batch(m);
    profile_enter(o->profile, r->z ? PROFILE_LIBRARY : PROFILE_REST); /* until the model computes */
    return 0;
}

/* Saves a checkpoint, with the position in the text as the job's data. */
static int save(struct run *r, int64_t step)
{
    const struct train_options *o = r->o;
    char text[256];
    int n = snprintf(text, sizeof text, "seed %llu step %lld samples %lld text_bytes %lld per_step %lld",
                     (unsigned long long)o->seed, (long long)step, (long long)(r->n_micro * o->batch),
                     (long long)r->data.n_bytes, (long long)r->per_step);
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
    if (p.seed != o->seed || p.text_bytes != r->data.n_bytes) {
        return zr_fail(ZERO_ERR_ARG,
                       "--load: saved with --seed %llu and %lld bytes of text; here it is %llu and %lld",
                       (unsigned long long)p.seed, (long long)p.text_bytes, (unsigned long long)o->seed,
                       (long long)r->data.n_bytes);
    }
    *step = p.step;
    r->per_step = p.per_step;
    r->n_micro = (p.samples + o->batch - 1) / o->batch; /* another --batch may leave out some rows */
    report_text(&r->report, "going on from step %lld\n", (long long)p.step);
    return 0;
}

/* Names the tensors of all of this rank's stages. */
static int32_t name_weights(const struct run *r, struct zero_weight *map, char (*text)[MODEL_NAME_BYTES])
{
    int32_t n = 0;
    for (int32_t k = 0; k < r->n_own; k++) {
        const struct train_stage *s = &r->stage[k];
        int32_t before = n;
        n += s->config.ops->names(map + n, text + n, r->number + s->first, s->n, &s->config);
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
        n += r->stage[k].config.ops->n_names(&r->stage[k].config);
    struct zero_weight *map = malloc((size_t)n * sizeof *map);
    char(*text)[MODEL_NAME_BYTES] = malloc((size_t)n * sizeof *text);
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
