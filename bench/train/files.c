/* SPDX-License-Identifier: Apache-2.0 */
/* files.c: the checkpoints and weights that zero-bench train reads and writes. A checkpoint contains struct
 * train_position, from which the choice of data follows. */
#include "bench/llama/hf_folder.h"
#include "bench/train/run.h"

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>

/* Saves a checkpoint, with the position in the data as the job's data. */
static int save(struct run *r, int64_t step, bool kept)
{
    const struct train_options *o = r->o;
    char text[512];
    int n =
        snprintf(text, sizeof text,
                 "seed %llu step %lld samples %lld text_bytes %lld per_step %lld rows %lld best %.17g "
                 "best_step %lld best_rows %lld best_tokens %lld data %llu lora_alpha %.17g",
                 (unsigned long long)o->seed, (long long)step, (long long)r->n_samples,
                 (long long)train_data_size(r), (long long)r->per_step, (long long)r->n_rows, r->best_loss,
                 (long long)r->best_step, (long long)r->best_rows, (long long)r->best_tokens,
                 (unsigned long long)(r->tokens.n_files ? token_data_hash(&r->tokens) : 0),
                 o->model.config.lora_alpha);
    TRY_ZERO(zero_set_data(r->z, ZERO_DATA_JOB, text, n));
    return take_libzero_error(zero_save(r->z, o->save, &(struct zero_save_options){.kept = kept}));
}

/* Whether this is exactly the name that zero_save gives to a checkpoint that is kept. */
static bool is_kept(const char *name)
{
    long long serial, step;
    char again[80];
    if (sscanf(name, "save-%18lld-step-%18lld", &serial, &step) != 2)
        return false;
    snprintf(again, sizeof again, "save-%08lld-step-%08lld-kept", serial, step);
    return !strcmp(again, name);
}

static bool has_kept(const char *dir)
{
    DIR *d = opendir(dir);
    bool found = false;
    for (const struct dirent *e; d && !found && (e = readdir(d));)
        found = is_kept(e->d_name);
    if (d)
        closedir(d);
    return found;
}

/* Makes an ordinary checkpoint of each that is kept in dir, except for the one at path. A failure is only a
 * warning: the best checkpoint is saved, and the other ranks do not know of the failure. */
static void keep_only(const char *dir, const char *path)
{
    const char *slash = strrchr(path, '/'), *best = slash ? slash + 1 : path;
    DIR *d = opendir(dir);
    int err = d ? 0 : errno;
    for (const struct dirent *e; !err && (e = readdir(d));) {
        size_t n = strlen(e->d_name);
        char plain[sizeof e->d_name];
        if (!is_kept(e->d_name) || !strcmp(e->d_name, best))
            continue;
        snprintf(plain, sizeof plain, "%.*s", (int)n - 5, e->d_name);
        err = renameat(dirfd(d), e->d_name, dirfd(d), plain) ? errno : 0;
    }
    if (d)
        closedir(d);
    if (err)
        fprintf(
            stderr,
            "zero-bench train: warning: --keep-best: cannot rename the former best checkpoint in %s: %s\n",
            dir, strerror(err));
}

int train_save_best(struct run *r)
{
    const char *path = NULL;
    TRY(save(r, r->best_step, /* kept */ true));
    TRY_ZERO(zero_save_wait(r->z, &path));
    if (r->rank == 0)
        keep_only(r->o->save, path);
    return 0;
}

int train_save(struct run *r, int64_t steps_done, bool stop)
{
    const struct train_options *o = r->o;
    bool due = o->save && (stop || (o->save_every && steps_done % o->save_every == 0));
    return due ? save(r, steps_done, /* kept */ false) : 0;
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

/* Tells all ranks whether a folder that the first data-parallel rank has looked into lacks something. */
static int share_lack(struct run *r, bool lacks, bool *out)
{
    double mean = r->at.dp == 0 && lacks ? 1.0 : 0.0;
    TRY_ZERO(zero_mean(r->z, &mean, 1));
    float any = mean > 0.0;
    TRY(train_reduce_tp(&r->model[0], &any, 1, true)); /* each rank of a tp group has its own mean */
    *out = any > 0.0f;
    return 0;
}

/* zero_mean takes the values of the last pipeline stage, so rank 0's goes there first. */
int train_agree(struct run *r, int err)
{
    const struct compute *on = &r->compute;
    float bad = err != 0, *there = r->model[0].stats.rows;
    bool failed;
    if (r->at.n_stages > 1) {
        TRY(on->dev->ops->copy(on->stream, there, &bad, sizeof bad));
        TRY_ZERO(zero_broadcast(r->z, ZERO_AXIS_PP, 0, there, sizeof bad));
        TRY(on->dev->ops->copy(on->stream, &bad, there, sizeof bad));
        TRY(on->dev->ops->stream_sync(on->stream));
    }
    TRY(share_lack(r, bad > 0.0f, &failed));
    return failed && !err ? zr_fail(ZERO_ERR_IO, "rank 0 could not write all files") : err;
}

/* Takes over the lowest loss so far. It is dropped if it was measured on other rows. With --keep-best it is
 * also dropped if its checkpoint is not in the folder, because otherwise none might ever be kept there. */
static int take_best(struct run *r, const struct train_position *p)
{
    const struct train_options *o = r->o;
    bool lost = false;
    if (p->best_loss == INFINITY)
        return 0;
    if (o->keep_best)
        TRY(share_lack(r, !has_kept(o->save), &lost));
    lost = lost || (r->n_eval && (p->best_rows != r->n_eval || p->best_tokens != r->eval->n_tokens));
    if (lost) {
        report_text(&r->report, "the lowest loss so far is of other rows or not kept: from here on anew\n");
        return 0;
    }
    r->best_loss = p->best_loss;
    r->best_step = p->best_step;
    r->best_rows = p->best_rows;
    r->best_tokens = p->best_tokens;
    return 0;
}

/* Loads a checkpoint, and reads the position in it. The adapters must have the alpha that they were trained
 * with, which no tensor has. */
static int load(struct run *r, const char *dir, struct train_position *out)
{
    double alpha = r->o->model.config.lora_alpha;
    struct zero_data_info info;
    char text[512] = "";
    TRY_ZERO(zero_load(r->z, dir));
    TRY_ZERO(zero_read_data(r->z, ZERO_DATA_JOB, 0, 0, NULL, &info));
    if (info.bytes < (int64_t)sizeof text)
        TRY_ZERO(zero_read_data(r->z, ZERO_DATA_JOB, 0, info.bytes, text, NULL));
    if (!train_read_position(text, out))
        return zr_fail(ZERO_ERR_ARG, "--load: this checkpoint was not saved by zero-bench train");
    if (out->lora_alpha > 0 && out->lora_alpha != alpha)
        return zr_fail(ZERO_ERR_ARG, "--load: saved with --lora-alpha %g; here it is %g", out->lora_alpha,
                       alpha);
    return 0;
}

int train_load_weights(struct run *r)
{
    struct train_position p;
    return r->o->model.config.lora_rank ? load(r, r->o->load, &p)
                                        : take_libzero_error(zero_load(r->z, r->o->load));
}

int train_load(struct run *r, int64_t *step)
{
    const struct train_options *o = r->o;
    bool latest = !strcmp(o->load, "latest");
    bool none;
    TRY(share_lack(r, latest && !has_checkpoint(o->save), &none));
    if (none) {
        report_text(&r->report, "nothing saved in %s yet: from the start\n", o->save);
        return 0;
    }
    struct train_position p;
    TRY(load(r, latest ? o->save : o->load, &p));
    if (p.seed != o->seed || p.text_bytes != train_data_size(r)) {
        return zr_fail(ZERO_ERR_ARG, "--load: saved with --seed %llu and %lld %s; here it is %llu and %lld",
                       (unsigned long long)p.seed, (long long)p.text_bytes,
                       r->tokens.n_files ? "tokens" : "bytes of text", (unsigned long long)o->seed,
                       (long long)train_data_size(r));
    }
    if (p.rows >= 0 && p.rows != r->n_rows)
        return zr_fail(ZERO_ERR_ARG,
                       "--load: saved with %lld rows to train on; here, by --context and --held-out, it is "
                       "%lld",
                       (long long)p.rows, (long long)r->n_rows);
    if (p.data_hash && r->tokens.n_files && p.data_hash != token_data_hash(&r->tokens))
        return zr_fail(ZERO_ERR_ARG, "--load: saved with other data: --tokens, --mask, --documents or "
                                     "--end-token differ");
    *step = p.step;
    TRY(take_best(r, &p));
    r->per_step = p.per_step;
    r->n_samples = p.samples;
    report_text(&r->report, "going on from step %lld\n", (long long)p.step);
    return 0;
}

/* Names the tensors of all of this rank's stages: the adapters, or all others. */
static int32_t name_weights(const struct run *r, bool adapters, struct zero_weight *map,
                            char (*text)[MODEL_NAME_BYTES])
{
    bool has_adapters = r->o->model.config.lora_rank;
    int32_t n = 0;
    for (int32_t k = 0; k < r->n_own; k++) {
        const struct train_stage *s = &r->stage[k];
        int32_t n_names = s->config.ops->names(map + n, text, r->number + s->first, s->n, &s->config);
        for (int32_t i = n, end = n + n_names; i < end; i++) {
            map[i].tensor += s->first;
            if (adapters == (has_adapters && r->tensors[map[i].tensor].grad))
                map[n++] = map[i];
        }
        text += n_names;
    }
    return n;
}

int train_move_weights(struct run *r, const char *dir, bool export, bool adapters)
{
    int32_t n = 0;
    for (int32_t k = 0; k < r->n_own; k++)
        n += r->stage[k].config.ops->n_names(&r->stage[k].config);
    struct zero_weight *map = malloc((size_t)n * sizeof *map);
    char(*text)[MODEL_NAME_BYTES] = malloc((size_t)n * sizeof *text);
    int err = map && text ? 0 : zr_fail(ZERO_ERR_NOMEM, "no memory for %d names", n);
    if (!err) {
        n = name_weights(r, adapters, map, text);
        err = take_libzero_error(export
                                     ? zero_export(r->z, dir, map, n, adapters ? INT64_MAX : r->o->export_max)
                                     : zero_import(r->z, dir, map, n));
    }
    free(map);
    free(text);
    return err;
}

int train_import(struct run *r)
{
    const struct train_options *o = r->o;
    if (o->import_from)
        TRY(train_move_weights(r, o->import_from, /* export */ false, /* adapters */ false));
    return o->adapter ? train_import_adapters(r, o->adapter) : 0;
}

int train_export(struct run *r)
{
    const struct train_options *o = r->o;
    if (o->export_to && o->model.config.lora_rank)
        TRY(train_export_adapters(r, o->export_to));
    else if (o->export_to)
        TRY(train_move_weights(r, o->export_to, /* export */ true, /* adapters */ false));
    if (o->export_merged)
        return train_export_merged(r, o->export_merged);
    bool copies = o->export_to && o->model.dir && !o->model.config.lora_rank;
    return copies ? train_agree(r, r->rank == 0 ? hf_folder_copy(o->model.dir, o->export_to, o->dtype) : 0)
                  : 0;
}
