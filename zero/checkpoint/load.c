/* SPDX-License-Identifier: Apache-2.0 */
/* load.c: zero_load. First the ranks compare what they find under the path. Then each reads and checks its
 * part into temporary memory. Values change only after all ranks agree that they could read theirs.
 *
 * Each rank reads the heads of all files, so it knows where every range of every tensor lies. It checks that
 * the ranges cover the model once, and reads those that it keeps. A tensor that was frozen when it was saved
 * may be trained now, or the reverse. A frozen tensor has only weights, in the dtype of the model. A trained
 * one has masters and states as well, which may be kept in another precision than they were saved in. */
#include "comm/first_error.h"
#include "kernels/alloc.h"
#include "zero/checkpoint/load_inside.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Prints how many tensors have changed, and the first one's name; "" if none has. */
static void print_changed(const struct zr_loading *l, bool was_trained, const char *what, char out[300])
{
    const struct zr_whole *whole = &l->z->whole;
    const char *first = NULL;
    int32_t n = 0;
    for (int32_t i = 0; i < whole->n; i++) {
        bool is_trained = whole->tensors[i].grad != NULL;
        if (l->was[i]->trainable != was_trained || is_trained == was_trained)
            continue;
        first = first ? first : whole->tensors[i].name;
        n++;
    }
    *out = 0;
    if (n)
        snprintf(out, 300, " %d of its tensors %s (%.100s%s)", n, what, first, n > 1 ? ", ..." : "");
}

/* Warns once if any tensor was frozen and is trained now, or the reverse. */
static void report_kinds(const struct zr_loading *l)
{
    char thawed[300], frozen[300];
    print_changed(l, false, "were frozen and are trained now, with fresh optimizer state", thawed);
    print_changed(l, true, "were trained and are frozen now, without their optimizer state", frozen);
    if (*thawed || *frozen)
        zr_warn(l->z->config.options.log, "%s:%s%s%s", l->folder, thawed, *thawed && *frozen ? ";" : "",
                frozen);
}

struct choice {
    char name[ZR_CHECKPOINT_NAME_BYTES];
    ZR_FIRST_ERROR(ZR_EXCHANGE_BYTES - sizeof(int32_t) - ZR_CHECKPOINT_NAME_BYTES);
};

/* Rank 0 chooses the checkpoint, and all ranks take the one that it found. */
static int choose(struct zero_ctx *z, const char *path, struct zr_loading *l)
{
    struct choice mine = {0}, *all = z->from_all;
    if (z->world.rank == 0)
        zr_first_error_put(&mine, zr_checkpoint_latest(z->files, path, mine.name, z->config.options.log));
    int err = zr_engine_exchange(z->engine, &mine, sizeof mine, all);
    err = zr_first_error(err, &mine, all, z->world.world, z->world.rank);
    if (!err && !all[0].name[0])
        snprintf(l->folder, sizeof l->folder, "%s", path);
    else if (!err)
        snprintf(l->folder, sizeof l->folder, "%s/%.*s", path, ZR_CHECKPOINT_NAME_BYTES - 1, all[0].name);
    return err;
}

/* Ranks on several hosts may have different file systems under this path. Copies of the same files are
 * enough. */
#define SAME_FILES "all ranks must find the same files there"

struct opened {
    struct zr_checksum manifest;
    ZR_FIRST_ERROR(ZR_EXCHANGE_BYTES - sizeof(int32_t) - sizeof(struct zr_checksum));
};

static int open_chosen(struct zr_loading *l)
{
    bool broken;
    int err = zr_checkpoint_open(l->z->files, l->folder, &broken, &l->manifest);
    return err && broken && l->z->world.rank != 0
               ? zr_fail(err, "%s; rank 0 sees a checkpoint there: " SAME_FILES, zr_error_text())
               : err;
}

/* Checks that all ranks could open the checkpoint and have read the same manifest, before they read more. */
static int compare(struct zero_ctx *z, const struct zr_loading *l, int err)
{
    struct opened mine = {.manifest = l->manifest.sum}, *all = z->from_all;
    zr_first_error_put(&mine, err);
    err = zr_engine_exchange(z->engine, &mine, sizeof mine, all);
    err = zr_first_error(err, &mine, all, z->world.world, z->world.rank);
    for (int r = 1; !err && r < z->world.world; r++)
        if (!zr_checksum_equal(&all[r].manifest, &all[0].manifest))
            err = zr_fail(ZERO_ERR_IO,
                          "%s: rank %d finds a different checkpoint there than rank 0; " SAME_FILES,
                          l->folder, r);
    return err;
}

static int restore_run(void *arg, const struct zr_run *run)
{
    struct zr_loading *l = arg;
    return zr_engine_restore_run(l->z->engine, run, l->staged + run->snapshot_at);
}

/* From here on only a lost rank can fail, which ends the context. */
static int apply(struct zr_loading *l)
{
    struct zero_ctx *z = l->z;
    struct zr_manifest *m = &l->manifest;
    int err = zr_engine_restore_begin(z->engine);
    if (!err && !l->direct)
        err = zr_engine_runs_to_load(z->engine, restore_run, l);
    if (!err && l->states) {
        zr_states_close(z->states);
        z->states = l->states;
        l->states = NULL;
    }
    if (!err && z->layout->n_buffers)
        err = zr_engine_copy_buffers(z->engine, l->staged + l->buffers_at, true);
    if (!err)
        err = zr_engine_restore_end(z->engine);
    else
        zr_engine_drain(z->engine); /* Copies may still read the staged memory. */
    if (err)
        return err;
    ZR_TRY(zr_engine_set_step(z->engine, m->t));
    zr_unit_steps_load(l);
    zr_engine_renumber(z->engine, m->t);
    ZR_TRY(zr_engine_tied_values(z->engine));
    zr_engine_set_skipped(z->engine, m->n_skipped);
    z->n_micro = m->n_micro;
    zr_loaded_checkpoint_use(z, l->loaded);
    l->loaded = NULL;
    if (z->world.rank == 0)
        zr_info(z->config.options.log, "loaded %s: step %lld, saved at stage %d by %d ranks", l->folder,
                (long long)m->t, m->stage, m->world);
    if (z->world.rank == 0)
        report_kinds(l);
    if (z->world.rank == 0)
        zr_loading_report_precision(l);
    return 0;
}

/* Undoes a failed load into parameters without values. They have none again, and optimizer states are zeroed,
 * because zero_write may give others. */
static void give_up(struct zero_ctx *z)
{
    struct zr_saved_error kept;
    zr_error_save(&kept, 0);
    zr_engine_zero_states(z->engine);
    zr_error_restore(&kept);
}

/* Makes the path absolute, following links. Below it no link is followed. */
static int resolve(const struct zero_ctx *z, const char *given, char path[ZR_PATH_BYTES])
{
    ZR_TRY(zr_path_absolute(z->files, given, path));
    if (strlen(path) + 4 * ZR_CHECKPOINT_NAME_BYTES >= ZR_PATH_BYTES)
        return zr_fail(ZERO_ERR_ARG, "%.200s...: the path from the root has %zu characters; allowed: %d",
                       path, strlen(path), ZR_PATH_BYTES - 4 * ZR_CHECKPOINT_NAME_BYTES - 1);
    return 0;
}

static int load(struct zero_ctx *z, const char *given)
{
    char copy[ZR_PATH_BYTES - 4 * ZR_CHECKPOINT_NAME_BYTES], path[ZR_PATH_BYTES];
    if (strlen(given) + 4 * ZR_CHECKPOINT_NAME_BYTES >= ZR_PATH_BYTES)
        return zr_fail(ZERO_ERR_ARG, "path has %zu characters; allowed: %d", strlen(given),
                       ZR_PATH_BYTES - 4 * ZR_CHECKPOINT_NAME_BYTES - 1);
    snprintf(copy, sizeof copy, "%s", given); /* zero_save_wait's path changes when a save ends */
    ZR_TRY(zr_save_end(z));
    ZR_TRY(zr_engine_settle(z->engine));
    struct zr_loading *l;
    int err = ZR_ZALLOC(l, 1, "loading");
    if (err)
        return zr_agree_in_run(z, err);
    l->z = z;
    err = zr_agree_in_run(z, resolve(z, copy, path));
    if (!err)
        err = choose(z, path, l);
    if (!err)
        err = compare(z, l, open_chosen(l));
    if (!err) {
        err = zr_loaded_checkpoint_prepare(z, l->folder, &l->manifest, &l->loaded);
        if (!err)
            err = zr_loading_read(l);
        err = zr_agree_in_run(z, err);
        if (err && l->direct)
            give_up(z);
    }
    if (!err)
        err = apply(l);
    if (!err)
        zr_init_later_loaded(z);
    zr_loading_free(l);
    free(l);
    return err;
}

int zero_load(zero_ctx *z, const char *path)
{
    ZR_BEGIN_CALL(z, ZR_CALL_LOAD);
    if (!path || !*path)
        return zr_fail(ZERO_ERR_ARG, "zero_load: path is NULL or empty");
    zr_engine_called(z->engine, 0);
    int err = load(z, path);
    return err ? zr_fail_more(err, "zero_load") : 0;
}
