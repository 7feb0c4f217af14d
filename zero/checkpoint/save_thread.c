/* SPDX-License-Identifier: Apache-2.0 */
/* save_thread.c: the thread of a save. It writes the file of the rank, and on rank 0 commits the checkpoint.
 */
#include "zero/checkpoint/same_folder.h"
#include "zero/checkpoint/save_inside.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

void zr_save_set_state(struct zr_save *s, enum zr_save_state state, int err)
{
    uv_mutex_lock(&s->lock);
    s->state = err ? ZR_SAVE_FAILED : state;
    zr_error_save(&s->failure, err);
    uv_cond_broadcast(&s->changed);
    uv_mutex_unlock(&s->lock);
}

/* Waits for a flag under the lock. Returns false if the save is cancelled first. */
static bool await(struct zr_save *s, const bool *flag)
{
    uv_mutex_lock(&s->lock);
    while (!*flag && !s->cancelled)
        uv_cond_wait(&s->changed, &s->lock);
    bool got = *flag;
    uv_mutex_unlock(&s->lock);
    return got;
}

void zr_save_raise(struct zr_save *s, bool *flag)
{
    uv_mutex_lock(&s->lock);
    *flag = true;
    uv_cond_broadcast(&s->changed);
    uv_mutex_unlock(&s->lock);
}

void zr_save_on_snapshot(void *arg)
{
    struct zr_save *s = arg;
    zr_save_raise(s, &s->readable);
}

/* Collects for the manifest the size of each rank's file, and the checksum of its table of block checksums,
 * which lies in a file of its own until then. */
static int collect_files(struct zr_save *s)
{
    const struct zr_files *fs = s->z->files;
    struct zr_manifest *m = &s->manifest;
    int err = 0;
    for (int r = 0; !err && r < m->n_files; r++) {
        struct zr_manifest_file *f = &m->files[r];
        char path[ZR_PATH_BYTES], blocks_path[ZR_PATH_BYTES + 8], *table = NULL;
        bool missing;
        int64_t n;
        int fd;
        err = zr_path_join(path, s->folder, f->name);
        if (!err)
            err = zr_file_find(fs, path, &missing, &fd);
        if (err)
            return err;
        err = zr_file_size(fs, fd, path, &f->bytes);
        zr_file_close(fs, fd, path);
        snprintf(blocks_path, sizeof blocks_path, "%s%s", path, ZR_BLOCKS_SUFFIX);
        if (!err)
            err = zr_file_load(fs, blocks_path, INT32_MAX, &missing, &table, &n);
        struct zr_checksum *sums = NULL;
        if (!err)
            err = zr_blocks_parse(blocks_path, (unsigned char *)table, n, f->bytes, &sums);
        if (!err)
            f->blocks = zr_checksum_of(table, n);
        free(sums);
        free(table);
    }
    return err;
}

/* Reads the checkpoint back as zero_load does. */
static int read_back(struct zr_save *s)
{
    struct zr_manifest m;
    bool broken;
    int err = zr_checkpoint_open(s->z->files, s->folder, &broken, &m);
    if (err)
        return zr_fail_more(err, "read back");
    zr_manifest_free(&m);
    return 0;
}

/* Writes the manifest, checks the checkpoint, and makes it the newest one. */
static int commit(struct zr_save *s)
{
    const struct zr_files *fs = s->z->files;
    ZR_TRY(collect_files(s));
    if (s->z->world.world > 1)
        ZR_TRY(zr_folder_unmark(fs, s->folder));
    ZR_TRY(zr_checkpoint_seal(fs, s->folder, &s->manifest));
    ZR_TRY(read_back(s));
    return zr_checkpoint_publish(fs, s->root, s->name);
}

/* Lowers the priority of this thread and of those that it starts, so that training goes first. A failure does
 * no harm. */
static void lower_priority(void)
{
#ifdef __linux__ /* elsewhere this changes the whole process */
    setpriority(PRIO_PROCESS, 0, 10);
#endif
}

/* The thread. dev is the device that the values are read from; NULL: they are in host memory. */
void zr_save_run(void *arg)
{
    struct zr_save *s = arg;
    struct zero_ctx *z = s->z;
    struct zr_device *dev = zr_engine_device(z->engine);
    char name[64];
    if (zr_engine_snapshot(z->engine))
        lower_priority();
    if (zr_engine_snapshot(z->engine) || dev->ops->host_memory)
        dev = NULL;
    zr_shard_name(z->world.rank, z->world.world, name);
    int err = await(s, &s->readable) ? 0 : zr_fail(ZERO_ERR_FAILED, "%s: given up", s->folder);
    if (!err)
        err = zr_shard_write(z->files, s->folder, name, z->whole.tensors, &s->extents, dev, &s->cancelled);
    zr_save_set_state(s, ZR_SAVE_WRITTEN, err);
    if (err)
        return;
    zr_engine_report_least(z->engine, s->number);
    if (z->world.rank != 0 || !await(s, &s->commit_reported))
        return;
    err = commit(s);
    if (!err) {
        zr_info(z->config.options.log, "saved %s/%s", s->root, s->name);
        zr_checkpoint_prune(z->files, s->root, s->name, z->config.options.save_keep, z->config.options.log);
    }
    zr_save_set_state(s, ZR_SAVE_COMMITTED, err);
}
