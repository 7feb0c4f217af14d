/* SPDX-License-Identifier: Apache-2.0 */
/* save_end.c: how a save ends: ranks meet until all are done or one has failed. */
#include "comm/verdict.h"
#include "zero/checkpoint/save_inside.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void zr_save_free(struct zr_save *s)
{
    free(s->extents.list);
    for (int kind = 0; kind < ZR_N_DATA; kind++)
        zr_data_drop(s->data[kind]);
    zr_manifest_free(&s->manifest);
    uv_mutex_destroy(&s->lock);
    uv_cond_destroy(&s->changed);
    free(s);
}

struct status {
    int32_t state;
    ZR_VERDICT(ZR_EXCHANGE_BYTES - 2 * sizeof(int32_t));
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

/* How often a rank that waits tells the others how far it is. */
static uint64_t tick_ns(const struct zero_ctx *z)
{
    return (uint64_t)zr_min(z->config.options.timeout_ms / 4, 1000) * 1000000;
}

static int await_own_end(struct zero_ctx *z, struct zr_save *s)
{
    while (look(s, (int64_t)tick_ns(z)) < ZR_SAVE_COMMITTED) {
        int err = zr_engine_check(z->engine); /* its snapshot may never come */
        if (err)
            return err;
    }
    return 0;
}

static void fill_status(struct zr_save *s, enum zr_save_state state, struct status *mine)
{
    *mine = (struct status){.state = (int32_t)state};
    if (state == ZR_SAVE_FAILED)
        zr_verdict_put(mine, zr_say_again(&s->failure));
}

/* What follows from where all ranks are. Returns whether all are done, one way or the other. */
static bool follow(struct zr_save *s, const struct status *all)
{
    int world = s->z->world.world, n_writing = 0, failed = zr_verdict_first(all, world, s->z->world.rank);
    for (int r = 0; r < world; r++)
        n_writing += all[r].state == ZR_SAVE_WRITING;
    if (failed) {
        atomic_store(&s->cancelled, true);
        if (n_writing)
            return false;
        zr_keep(&s->failure, failed);
        return true;
    }
    if (all[0].state == ZR_SAVE_COMMITTED)
        return true;
    if (!n_writing && !s->commit_reported)
        zr_save_raise(s, &s->commit_reported);
    return false;
}

/* Until every rank is done, one way or the other. */
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

/* Waits until the snapshot is complete, which it need not be where a save was given up: its memory will be
 * used again. Ends when the context fails. */
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
    struct zr_kept kept;
    if (!s)
        return 0;
    z->save = NULL;
    zr_engine_await_jobs(
        z->engine); /* the snapshot's among them: whether it is made is then up to a stream */
    int err = zr_engine_check(z->engine);
    if (!err)
        err = meet(z, s);
    if (!err)
        err = await_copies(z, s);
    zr_engine_forget_snapshot(z->engine); /* after a failure it may still be on the stream */
    zr_keep(&kept, err);
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
    zr_save_free(s);
    return err ? zr_say_again(&kept) : 0;
}

void zr_save_notice(struct zero_ctx *z)
{
    struct zr_save *s = z->save;
    if (s && zr_engine_least(z->engine) >= (uint64_t)s->number && !s->commit_reported)
        zr_save_raise(s, &s->commit_reported);
}
