/* SPDX-License-Identifier: Apache-2.0 */
/* save.c: zero_save and zero_save_wait, over all ranks.
 *
 * 1. All ranks agree to begin. Rank 0 makes the folder, under a name that no checkpoint has, and all ranks
 * check that they see it (same_folder.h).
 * 2. On each rank a thread writes the file of the rank (save_shard.c) and reads its head back. It reads
 * memory that does not change: the thread of the model waits, or the snapshot is read.
 * 3. All ranks learn that every file is written and synced: by exchanges while they wait, or from the
 * agreement that ends a step.
 * 4. The thread of rank 0 checks the tables of the other ranks, writes the manifest, reads it back, renames
 * the folder and removes old ones.
 * 5. All ranks learn of this, or of a failure, by exchanges in zero_save_wait, the next zero_save, zero_load
 * or zero_unwrap.
 *
 * While ranks wait for the disks of others they keep exchanging, so that a slow disk does not look like a
 * lost rank. */
#include "comm/first_error.h"
#include "kernels/alloc.h"
#include "zero/checkpoint/same_folder.h"
#include "zero/checkpoint/save_inside.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

/* Hashes the settings that change what is computed, but not stage, world and the like. Precisions count if
 * they are not fp32. A remainder computes the same as fp32 masters. */
static uint64_t config_hash(const struct zr_options *o)
{
    double v[] = {
        (double)o->clip,      o->grad_scale, o->grad_sum, o->deterministic, (double)o->grad_accum_steps,
        (double)o->wire_dtype};
    XXH64_state_t state;
    XXH64_reset(&state, 0);
    for (int32_t i = 0; i < o->n_optims; i++)
        XXH64_update(&state, &o->optim[i], offsetof(struct zr_optim, masters));
    uint64_t hash = XXH64(v, sizeof v, XXH64_digest(&state));
    for (int32_t i = 0; i < o->n_optims; i++) {
        const int32_t kept[] = {i, o->optim[i].masters == ZERO_MASTERS_NONE, (int32_t)o->optim[i].moments};
        if (kept[1] || kept[2])
            hash = XXH64(kept, sizeof kept, hash);
    }
    return o->grad_sum_dtype == ZERO_BF16 ? XXH64("bf16 sums", 9, hash) : hash;
}

bool zr_rounds_at_random(const struct zero_ctx *z)
{
    bool rounds = false;
    for (int32_t i = 0; i < z->whole.n; i++) {
        const struct zr_tensor *t = &z->whole.tensors[i];
        bool states = t->moments != ZERO_MOMENTS_F32 && t->n_states;
        bool sums = z->config.options.grad_sum_dtype == ZERO_BF16 && t->dtype == ZERO_BF16;
        rounds |= t->grad && (t->masters == ZERO_MASTERS_NONE || states || sums);
    }
    return rounds;
}

/* Fills in how a cut tensor is cut, and the shape of the whole. */
static void fill_cut(const struct zero_ctx *z, const struct zr_tensor *from, struct zr_manifest_tensor *t)
{
    const struct zr_tp_cut cut = zr_tp_of_tensor(from, z->mesh.tp);
    if (cut.parts == 1)
        return;
    t->parts = cut.parts;
    t->dim = from->cut_dim;
    t->blocks = (int32_t)cut.blocks;
    t->rows = cut.each;
    t->shape[t->dim] = cut.rows;
}

/* Fills in how many states the tensor has, and how they and masters are saved. */
static void fill_precision(const struct zr_tensor *from, struct zr_manifest_tensor *t)
{
    t->n_states = from->n_states;
    if (from->masters == ZERO_MASTERS_NONE)
        t->masters = ZERO_MASTERS_NONE;
    if (from->n_states)
        t->moments = from->moments;
    t->stacked = t->moments == ZERO_MOMENTS_Q8 && from->stacked;
}

/* Fills in what the manifest says of the model before anything is written. On failure the caller frees what
 * there is of it. */
static int fill_manifest(struct zero_ctx *z, struct zr_manifest *m)
{
    const struct zr_whole *l = &z->whole;
    const struct zr_options *o = &z->config.options;
    struct zr_engine_facts facts;
    zr_engine_facts(z->engine, &facts);
    *m = (struct zr_manifest){.t = facts.t,
                              .n_skipped = facts.n_skipped,
                              .n_micro = z->n_micro,
                              .seeded = zr_rounds_at_random(z),
                              .seed = zr_rounds_at_random(z) ? o->seed : 0,
                              .world = z->world.world,
                              .stage = o->stage,
                              .config_hash = config_hash(o),
                              .layout_hash = l->hash};
    snprintf(m->version, sizeof m->version, "%s", zero_version());
    m->tensors = calloc((size_t)l->n, sizeof *m->tensors);
    m->files = calloc((size_t)m->world, sizeof *m->files);
    bool ok = m->tensors && m->files;
    for (int32_t i = 0; ok && i < l->n; i++, m->n_tensors++) {
        struct zr_manifest_tensor *t = &m->tensors[i];
        t->name = strdup(l->tensors[i].name);
        snprintf(t->dtype, sizeof t->dtype, "%s", zr_st_dtype_of(l->tensors[i].dtype));
        t->n_dims = zr_tensor_dims(&l->tensors[i]);
        memcpy(t->shape, l->tensors[i].shape, sizeof t->shape);
        t->trainable = l->tensors[i].grad != NULL;
        if (t->trainable) {
            snprintf(t->optimizer, sizeof t->optimizer, "%s", zr_optimizer_name(l->tensors[i].optimizer));
            fill_precision(&l->tensors[i], t);
        }
        t->buffer = l->tensors[i].buffer;
        fill_cut(z, &l->tensors[i], t);
        ok = t->name != NULL;
    }
    for (int32_t r = 0; ok && r < m->world; r++, m->n_files++)
        zr_shard_name(r, m->world, m->files[r].name);
    return ok ? 0 : zr_fail(ZERO_ERR_NOMEM, "no memory for a manifest of %d tensors", l->n);
}

/* ---- beginning ---- */

static void free_save(struct zr_save *s)
{
    free(s->extents.list);
    if (s->z->states)
        zr_state_file_unmap(s->z->states); /* a save changes nothing */
    for (int kind = 0; kind < ZR_N_DATA; kind++)
        zr_data_drop(s->data[kind]);
    zr_manifest_free(&s->manifest);
    uv_mutex_destroy(&s->lock);
    uv_cond_destroy(&s->changed);
    free(s);
}

/* Sets the path of the folder. It fits, as open_save has checked. */
static void name_folder(struct zr_save *s)
{
    char hidden[ZR_CHECKPOINT_NAME_BYTES + 1];
    snprintf(hidden, sizeof hidden, ".%s", s->name);
    zr_path_join(s->folder, s->root, hidden);
}

/* Checks all that can be checked before anything is written. */
static int open_save(struct zero_ctx *z, const char *dir, const struct zero_save_options *options,
                     struct zr_save **out)
{
    int32_t kept = options ? options->kept : 0;
    if (kept != 0 && kept != 1)
        return zr_fail(ZERO_ERR_ARG, "options->kept is %d; allowed: 0 and 1", kept);
    struct zr_save *s;
    ZR_TRY(ZR_ZALLOC(s, 1, "a save"));
    if (uv_mutex_init(&s->lock)) {
        free(s);
        return zr_fail(ZERO_ERR_SYSTEM, "a mutex could not be made");
    }
    if (uv_cond_init(&s->changed)) {
        uv_mutex_destroy(&s->lock);
        free(s);
        return zr_fail(ZERO_ERR_SYSTEM, "a condition could not be made");
    }
    s->z = z;
    s->kept = kept == 1;
    s->commit_reported = z->world.world == 1;
    int longest = ZR_PATH_BYTES - 3 * ZR_CHECKPOINT_NAME_BYTES;
    /* The program may change its working directory while the file is written. */
    int err = zr_path_absolute(z->files, dir, s->root);
    if (!err && strlen(s->root) > (size_t)longest)
        err = zr_fail(ZERO_ERR_ARG, "dir has %zu characters from the root on; allowed: %d", strlen(s->root),
                      longest);
    if (!err)
        err = zr_buffers_check(z);
    z->mapped = z->states;
    if (!err && z->states)
        err = zr_state_file_map(z->states);
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
        err = fill_manifest(z, &s->manifest);
    if (err) {
        free_save(s);
        return err;
    }
    *out = s;
    return 0;
}

struct begun {
    char name[ZR_CHECKPOINT_NAME_BYTES];
    unsigned char mark[ZR_FOLDER_MARK_BYTES];
    ZR_FIRST_ERROR(ZR_EXCHANGE_BYTES - sizeof(int32_t) - ZR_CHECKPOINT_NAME_BYTES - ZR_FOLDER_MARK_BYTES);
};

/* The arguments of each rank, which are compared before anything is written. */
struct wanted {
    /* bytes of the program's data, by enum zr_data_kind */
    int64_t data[ZR_N_DATA];
    int32_t kept;
    uint32_t numbers; /* hash of the numbers set by zero_tune and zero_set_step */
};

/* Warns, once for each kind, if the loaded checkpoint has data of the program, and the program has given none
 * for the next save. */
static void report_no_data(struct zero_ctx *z, int kind, int64_t bytes)
{
    int64_t before = zr_loaded_checkpoint_bytes(z->loaded, kind);
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
            return zr_fail(ZERO_ERR_MISMATCH,
                           "options->kept is %d on rank %d and %d on rank 0; it must be equal on all ranks",
                           all[r].kept, r, all[0].kept);
        if (all[r].numbers != all[0].numbers)
            return zr_fail(ZERO_ERR_MISMATCH,
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

/* The part of make_folder on rank 0. */
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

/* Rank 0 makes the folder and sends its name. All ranks check that they see it. */
static int make_folder(struct zero_ctx *z, struct zr_save *s)
{
    struct begun mine = {0}, *all = z->from_all;
    int err = 0;
    if (z->world.rank == 0)
        zr_first_error_put(&mine, begin_folder(z, s, &mine));
    if (z->world.world == 1)
        all[0] = mine;
    else
        err = zr_engine_exchange(z->engine, &mine, sizeof mine, all);
    err = zr_first_error(err, &mine, all, z->world.world, z->world.rank);
    if (err)
        return err;
    snprintf(s->name, sizeof s->name, "%.*s", ZR_CHECKPOINT_NAME_BYTES - 1, all[0].name);
    name_folder(s);
    if (z->world.world == 1)
        return 0;
    memcpy(mine.mark, all[0].mark, sizeof mine.mark);
    return zr_agree_in_run(z, z->world.rank ? zr_folder_same(z->files, s->folder, mine.mark) : 0);
}

/* ---- the end of a save ---- */

struct status {
    int32_t state;
    ZR_FIRST_ERROR(ZR_EXCHANGE_BYTES - 2 * sizeof(int32_t));
};

static enum zr_save_state look(struct zr_save *s, int64_t wait_ns)
{
    int64_t until = zr_now_ns() + wait_ns;
    uv_mutex_lock(&s->lock);
    bool rank0 = s->z->world.rank == 0;
    for (;;) {
        int64_t left = until - zr_now_ns();
        bool busy = s->state == ZR_SAVE_WRITING ||
                    (rank0 && s->commit_reported && s->state == ZR_SAVE_WRITTEN && !s->cancelled);
        if (!busy || left <= 0)
            break;
        uv_cond_timedwait(&s->changed, &s->lock, (uint64_t)left);
    }
    enum zr_save_state state = s->state;
    uv_mutex_unlock(&s->lock);
    return state;
}

/* How often a waiting rank reports its state to the others. */
static uint64_t tick_ns(const struct zero_ctx *z)
{
    return (uint64_t)zr_min(z->config.options.timeout_ms / 4, 1000) * 1000000;
}

static int await_own_end(struct zero_ctx *z, struct zr_save *s)
{
    while (look(s, (int64_t)tick_ns(z)) < ZR_SAVE_COMMITTED) {
        int err = zr_engine_check(z->engine); /* The snapshot may never come. */
        if (err)
            return err;
    }
    return 0;
}

static void fill_status(struct zr_save *s, enum zr_save_state state, struct status *mine)
{
    *mine = (struct status){.state = (int32_t)state};
    if (state == ZR_SAVE_FAILED)
        zr_first_error_put(mine, zr_error_restore(&s->failure));
}

/* Acts on the states of all ranks. Returns whether all are done, or one has failed. */
static bool follow(struct zr_save *s, const struct status *all)
{
    int world = s->z->world.world, n_writing = 0, failed = zr_first_error_of(all, world, s->z->world.rank);
    for (int r = 0; r < world; r++)
        n_writing += all[r].state == ZR_SAVE_WRITING;
    if (failed) {
        atomic_store(&s->cancelled, true);
        if (n_writing)
            return false;
        zr_error_save(&s->failure, failed);
        return true;
    }
    if (all[0].state == ZR_SAVE_COMMITTED)
        return true;
    if (!n_writing && !s->commit_reported)
        zr_save_raise(s, &s->commit_reported);
    return false;
}

/* Exchanges states until all ranks are done or have failed. */
static int meet(struct zero_ctx *z, struct zr_save *s)
{
    struct status mine, *all = z->from_all;
    if (z->world.world == 1)
        return await_own_end(z, s);
    for (;;) {
        fill_status(s, look(s, (int64_t)tick_ns(z)), &mine);
        int err = zr_engine_exchange(z->engine, &mine, sizeof mine, all);
        if (err || follow(s, all))
            return err;
    }
}

/* Waits until the snapshot is complete, even if the save was given up, because its memory will be reused.
 * Ends if the context fails. */
static int await_copies(struct zero_ctx *z, struct zr_save *s)
{
    int err = 0;
    bool complete = !s->copying;
    while (!complete && !err) {
        uv_mutex_lock(&s->lock);
        if (!s->readable)
            uv_cond_timedwait(&s->changed, &s->lock, tick_ns(z));
        complete = s->readable;
        uv_mutex_unlock(&s->lock);
        if (!complete)
            err = zr_engine_check(z->engine);
    }
    return err;
}

int zr_save_end(struct zero_ctx *z)
{
    struct zr_save *s = z->save;
    struct zr_saved_error kept;
    if (!s)
        return 0;
    z->save = NULL;
    zr_engine_await_jobs(z->engine); /* Afterwards the snapshot depends on a stream only. */
    int err = zr_engine_check(z->engine);
    if (!err)
        err = meet(z, s);
    if (!err)
        err = await_copies(z, s);
    zr_engine_forget_snapshot(z->engine); /* After a failure it may still be on the stream. */
    zr_error_save(&kept, err);
    uv_mutex_lock(&s->lock);
    atomic_store(&s->cancelled, true);
    uv_cond_broadcast(&s->changed);
    uv_mutex_unlock(&s->lock);
    if (s->started)
        zr_thread_join(&s->thread);
    zr_engine_snapshot_read(z->engine);
    if (!err && s->failure.code) {
        kept = s->failure;
        err = kept.code;
        if (z->world.rank == 0 && zr_folder_remove(z->files, s->folder, ZR_MANIFEST_NAME))
            zr_warn(z->config.options.log, "the files of a failed save could not be removed: %s",
                    zr_error_text());
    }
    if (!err)
        zr_path_join(z->saved_path, s->root, s->name); /* fits: see open_save */
    free_save(s);
    return err ? zr_error_restore(&kept) : 0;
}

void zr_save_notice(struct zero_ctx *z)
{
    struct zr_save *s = z->save;
    if (s && zr_engine_least(z->engine) >= (uint64_t)s->number && !s->commit_reported)
        zr_save_raise(s, &s->commit_reported);
}

/* ---- the calls ---- */

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

/* Compares buffers. A checkpoint has those of rank 0, or of the first rank of each pipeline stage. */
static int report_unequal_buffers(struct zero_ctx *z)
{
    bool equal, strict = z->config.options.check;
    if (z->world.world == 1 || !zr_buffers_exist(z))
        return 0;
    int err = zr_buffers_compare(z, false, &equal);
    if (err || equal)
        return err;
    if (strict)
        err = zr_fail_more(ZERO_ERR_MISMATCH, "call zero_sync_buffers first");
    else if (z->world.rank == 0 && !z->reported_unequal_buffers)
        zr_warn(z->config.options.log, "zero_save saves %s buffers, but %s; call zero_sync_buffers first",
                z->mesh.pp == 1 ? "rank 0's" : "each pipeline stage's first rank's", zr_error_text());
    z->reported_unequal_buffers = true;
    return zr_agree_in_run(z, err); /* One rank alone may be in check mode. */
}

/* Warns about weights that are not cut over tp, but differ between its ranks. */
static int report_apart(struct zero_ctx *z)
{
    bool apart = false;
    int err = z->reported_tp_drift ? 0 : zr_engine_tp_find_difference(z->engine, &apart);
    if (apart && z->world.rank == 0)
        zr_warn(z->config.options.log, "zero_save saves the weights of one rank of tp, but %s",
                zr_error_text());
    z->reported_tp_drift |= apart;
    return err;
}

static int save(zero_ctx *z, const char *dir, const struct zero_save_options *options)
{
    zr_engine_called(z->engine, 0);
    ZR_TRY(zr_save_end(z));
    ZR_TRY(zr_engine_settle(z->engine));
    struct zr_save *s = NULL;
    int err = zr_agree_in_run(z, open_save(z, dir, options, &s));
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
            free_save(s);
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
    ZR_BEGIN_CALL(z, ZR_CALL_SAVE);
    if (!dir || !*dir)
        return zr_fail(ZERO_ERR_ARG, "zero_save: dir is NULL or empty");
    return save(z, dir, options);
}

int zero_save_wait(zero_ctx *z, const char **path)
{
    ZR_BEGIN_CALL(z, ZR_CALL_SAVE_WAIT);
    zr_engine_called(z->engine, 0);
    int err = zr_save_end(z);
    if (err)
        return zr_fail_more(err, "zero_save_wait");
    if (path)
        *path = *z->saved_path ? z->saved_path : NULL;
    return 0;
}
