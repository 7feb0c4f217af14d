/* SPDX-License-Identifier: Apache-2.0 */
/* save.c: zero_save: who does what when, over all ranks.
 *
 * 1. All ranks agree that it may begin; rank 0 makes the folder, under a name that is no checkpoint's, and
 *    all look whether they see it (same_folder.h).
 * 2. On each, a thread of its own writes the rank's file (save_shard.c) from memory that nobody writes (the
 *    model's thread waits, or, asynchronous, the snapshot is read), and reads the file's head back.
 * 3. All learn that every file is written and synced: by exchanges while they wait, or from the agreement of
 *    a step.
 * 4. Rank 0's thread checks the others' tables, writes the manifest, reads it back, gives the folder its name
 *    and removes old ones.
 * 5. All learn that, or of the failure, by exchanges in zero_save_wait, the next zero_save, zero_load or
 *    zero_unwrap.
 *
 * While ranks wait for each other's disks they keep exchanging, so that a slow disk is not a lost peer. */
#include "comm/verdict.h"
#include "zero/checkpoint/same_folder.h"
#include "zero/checkpoint/save_inside.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- beginning ---- */

/* Both fit: see open_save. */
static void name_folder(struct zr_save *s)
{
    char hidden[ZR_CHECKPOINT_NAME_BYTES + 1];
    snprintf(hidden, sizeof hidden, ".%s", s->name);
    zr_path_join(s->folder, s->root, hidden);
}

/* All that can be found out before anything is written. */
static int open_save(struct zero_ctx *z, const char *dir, const struct zero_save_options *options,
                     struct zr_save **out)
{
    int32_t kept = options ? options->kept : 0;
    if (kept != 0 && kept != 1)
        return zr_fail(ZR_ERR_ARG, "options->kept is %d; allowed: 0 and 1", kept);
    struct zr_save *s = calloc(1, sizeof *s);
    if (!s)
        return zr_fail(ZR_ERR_NOMEM, "no memory for a save");
    if (uv_mutex_init(&s->lock)) {
        free(s);
        return zr_fail(ZR_ERR_SYSTEM, "a mutex could not be made");
    }
    if (uv_cond_init(&s->changed)) {
        uv_mutex_destroy(&s->lock);
        free(s);
        return zr_fail(ZR_ERR_SYSTEM, "a condition could not be made");
    }
    s->z = z;
    s->kept = kept == 1;
    s->commit_reported = z->world.world == 1;
    int longest = ZR_PATH_BYTES - 3 * ZR_CHECKPOINT_NAME_BYTES;
    /* The program may change its working directory while the file is written. */
    int err = zr_path_absolute(z->files, dir, s->root);
    if (!err && strlen(s->root) > (size_t)longest)
        err = zr_fail(ZR_ERR_ARG, "dir has %zu characters from the root on; allowed: %d", strlen(s->root),
                      longest);
    if (!err)
        err = zr_buffers_check(z);
    if (!err)
        err = zr_extents_of(z, zr_engine_snapshot(z->engine),
                            zr_buffers_are_saved_here(z) ? z->plan->snapshot_buffers_at : -1, &s->extents);
    for (int kind = 0; kind < ZR_N_DATA; kind++) {
        const struct zr_data *d = s->data[kind] = zr_data_keep(z->data[kind]);
        if (d) {
            s->extents.data[kind].at = d->content;
            s->extents.data[kind].bytes = d->bytes;
        }
    }
    if (!err)
        err = zr_shard_check(z->whole.tensors, &s->extents);
    if (!err && z->world.rank == 0)
        err = zr_save_fill_manifest(z, &s->manifest);
    if (err) {
        zr_save_free(s);
        return err;
    }
    *out = s;
    return 0;
}

struct begun {
    char name[ZR_CHECKPOINT_NAME_BYTES];
    unsigned char mark[ZR_FOLDER_MARK_BYTES];
    ZR_VERDICT(ZR_EXCHANGE_BYTES - sizeof(int32_t) - ZR_CHECKPOINT_NAME_BYTES - ZR_FOLDER_MARK_BYTES);
};

/* What each rank was asked for, before anything is written. */
struct wanted {
    /* bytes of the program's data, by enum zr_data_kind */
    int64_t data[ZR_N_DATA];
    int32_t kept;
    uint32_t numbers; /* of zero_tune and zero_set_step, hashed */
};

/* Warns, once for each kind, if the loaded checkpoint has data of the program, and the program has given none
 * for the next save. */
static void report_no_data(struct zero_ctx *z, int kind, int64_t bytes)
{
    int64_t before = zr_loaded_bytes(z->loaded, kind);
    if (bytes || !before || z->data_set[kind] || z->reported_no_data[kind] || z->world.rank)
        return;
    z->reported_no_data[kind] = true;
    zr_warn(z->config.options.log,
            "the loaded checkpoint has %lld bytes of %s data, but this save has none: call zero_set_data "
            "after zero_load",
            (long long)before, kind == ZR_DATA_JOB ? "the job's" : "its ranks' own");
}

static int compare_wanted(const struct zero_ctx *z, const struct wanted *all)
{
    for (int r = 1; r < z->world.world; r++) {
        if (all[r].kept != all[0].kept)
            return zr_fail(ZR_ERR_MISMATCH,
                           "options->kept is %d on rank %d and %d on rank 0; it must be equal on all ranks",
                           all[r].kept, r, all[0].kept);
        if (all[r].numbers != all[0].numbers)
            return zr_fail(ZR_ERR_MISMATCH,
                           "zero_tune or zero_set_step gave rank %d other numbers than rank 0; every rank "
                           "must make the same calls",
                           r);
    }
    return 0;
}

static int agree_on_contents(struct zero_ctx *z, struct zr_save *s)
{
    struct wanted mine = {.kept = s->kept, .numbers = zr_tuned_digest(z->engine, 0)}, *all = z->from_all;
    int64_t bytes[ZR_N_DATA] = {0};
    int err = 0;
    for (int kind = 0; kind < ZR_N_DATA; kind++)
        mine.data[kind] = s->extents.data[kind].bytes;
    if (z->world.world == 1)
        all[0] = mine;
    else
        err = zr_engine_exchange(z->engine, &mine, sizeof mine, all);
    if (!err)
        err = compare_wanted(z, all);
    for (int r = 0; !err && r < z->world.world; r++) {
        for (int kind = 0; kind < ZR_N_DATA; kind++) {
            bytes[kind] += all[r].data[kind];
            if (z->world.rank == 0)
                s->manifest.files[r].data[kind] = all[r].data[kind];
        }
    }
    if (!err)
        err = zr_unit_steps_save(z, &s->manifest);
    for (int kind = 0; !err && kind < ZR_N_DATA; kind++)
        report_no_data(z, kind, bytes[kind]);
    return err;
}

/* Rank 0's part of make_folder. */
static int begin_folder(struct zero_ctx *z, struct zr_save *s, struct begun *mine)
{
    struct zr_engine_facts facts;
    zr_engine_facts(z->engine, &facts);
    int err = zr_checkpoint_begin(z->files, &z->locks, z->config.options.log, s->root, facts.t, s->kept,
                                  mine->name);
    memcpy(s->name, mine->name, sizeof s->name);
    name_folder(s);
    return err || z->world.world == 1 ? err : zr_folder_mark(z->files, s->folder, mine->mark);
}

/* Rank 0 makes the folder, and tells all its name; all see it. */
static int make_folder(struct zero_ctx *z, struct zr_save *s)
{
    struct begun mine = {0}, *all = z->from_all;
    int err = 0;
    if (z->world.rank == 0)
        zr_verdict_put(&mine, begin_folder(z, s, &mine));
    if (z->world.world == 1)
        all[0] = mine;
    else
        err = zr_engine_exchange(z->engine, &mine, sizeof mine, all);
    err = zr_verdict(err, &mine, all, z->world.world, z->world.rank);
    if (err)
        return err;
    snprintf(s->name, sizeof s->name, "%.*s", ZR_CHECKPOINT_NAME_BYTES - 1, all[0].name);
    name_folder(s);
    if (z->world.world == 1)
        return 0;
    memcpy(mine.mark, all[0].mark, sizeof mine.mark);
    return zr_agree_in_run(z, z->world.rank ? zr_folder_same(z->files, s->folder, mine.mark) : 0);
}

/* ---- the calls ---- */

static int check_call(struct zero_ctx *z)
{
    static const char call[] = "zero_save";
    int err = zr_refuse_in_bracket(z, call);
    if (!err)
        err = zr_refuse_in_actions(z, call);
    if (err)
        return err;
    if (!zr_engine_between_steps(z->engine))
        return zr_fail(ZR_ERR_ORDER,
                       "%s: a step has begun; call it before the first backward or after zero_step", call);
    return zr_engine_check(z->engine);
}

static int start(struct zero_ctx *z, struct zr_save *s)
{
    int err = 0;
    if (zr_engine_snapshot(z->engine)) {
        /* The model may write its buffers as soon as this call returns. */
        if (zr_buffers_are_saved_here(z) && z->layout->n_buffers)
            err = zr_engine_copy_buffers(z->engine,
                                         zr_engine_snapshot(z->engine) + z->plan->snapshot_buffers_at, false);
        if (err)
            return err;
        err = zr_engine_take_snapshot(z->engine, zr_save_on_snapshot, s);
        s->copying = !err;
    } else {
        s->readable = true;
        err = zr_engine_drain(z->engine);
    }
    int thread = err ? 0 : zr_thread_start(&s->thread, "zero-save", zr_save_run, s);
    if (thread)
        zr_save_set_state(s, ZR_SAVE_FAILED, thread);
    s->started = !err && !thread;
    return err;
}

/* What is saved is rank 0's, or of pipeline stages, the first rank's of each. */
static int report_unequal_buffers(struct zero_ctx *z)
{
    bool equal, strict = z->config.options.check;
    if (z->world.world == 1 || !zr_buffers_exist(z))
        return 0;
    int err = zr_buffers_compare(z, false, &equal);
    if (err || equal)
        return err;
    if (strict)
        err = zr_fail_more(ZR_ERR_MISMATCH, "call zero_sync_buffers first");
    else if (z->world.rank == 0 && !z->reported_unequal_buffers)
        zr_warn(z->config.options.log, "zero_save saves %s buffers, but %s; call zero_sync_buffers first",
                z->mesh.stages == 1 ? "rank 0's" : "each pipeline stage's first rank's", zr_error_text());
    z->reported_unequal_buffers = true;
    return zr_agree_in_run(z, err); /* a rank may check alone */
}

/* Weights that are not cut, and that ranks of tp have changed each by itself. */
static int report_apart(struct zero_ctx *z)
{
    bool apart = false;
    int err = z->reported_apart ? 0 : zr_engine_tp_find_difference(z->engine, &apart);
    if (apart && z->world.rank == 0)
        zr_warn(z->config.options.log, "zero_save saves the weights of one rank of tp, but %s",
                zr_error_text());
    z->reported_apart |= apart;
    return err;
}

static int save(zero_ctx *z, const char *dir, const struct zero_save_options *options)
{
    int err = check_call(z);
    if (!err)
        err = zr_awaited_refuse_all(z, "zero_save");
    if (!err) {
        zr_engine_called(z->engine, ZR_CALLED_SAVE, -1, 0);
        err = zr_save_end(z);
    }
    if (!err)
        err = zr_engine_settle(z->engine);
    if (err)
        return err;
    struct zr_save *s = NULL;
    err = zr_agree_in_run(z, open_save(z, dir, options, &s));
    if (!err)
        err = agree_on_contents(z, s);
    if (!err)
        err = report_unequal_buffers(z);
    if (!err)
        err = report_apart(z);
    if (!err)
        err = make_folder(z, s);
    if (err) {
        if (s)
            zr_save_free(s);
        return zr_fail_more(err, "zero_save");
    }
    s->number = ++z->n_saves;
    z->save = s;
    err = start(z, s);
    if (err || !zr_engine_snapshot(z->engine)) {
        int ended = zr_save_end(z);
        err = err ? err : ended;
    }
    return err ? zr_fail_more(err, "zero_save") : 0;
}

int zero_save(zero_ctx *z, const char *dir, const struct zero_save_options *options)
{
    ZR_IN_CALL(z, ZR_CALLED_SAVE, false, -1);
    if (!z || !dir || !*dir)
        return zr_fail(ZR_ERR_ARG, "zero_save: %s", !z ? "z is NULL" : "dir is NULL or empty");
    return save(z, dir, options);
}

int zero_save_wait(zero_ctx *z, const char **path)
{
    ZR_IN_CALL(z, ZR_CALLED_SAVE_WAIT, false, -1);
    if (!z)
        return zr_fail(ZR_ERR_ARG, "zero_save_wait: z is NULL");
    int err = zr_engine_check(z->engine);
    if (!err)
        err = zr_refuse_in_actions(z, "zero_save_wait");
    if (!err) {
        zr_engine_called(z->engine, ZR_CALLED_SAVE_WAIT, -1, 0);
        err = zr_save_end(z);
    }
    if (err)
        return zr_fail_more(err, "zero_save_wait");
    if (path)
        *path = *z->saved_path ? z->saved_path : NULL;
    return 0;
}
