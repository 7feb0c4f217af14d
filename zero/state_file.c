/* SPDX-License-Identifier: Apache-2.0 */
/* state_file.c: makes the file of masters and states. Several threads transfer its bytes in blocks. */
#include "zero/state_file.h"
#include "kernels/alloc.h"
#include "zero/checkpoint/parallel.h"
#include "zero/context.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK_BYTES (4 << 20)
#define N_THREADS   4

/* ---- transfers ---- */

struct transfer {
    struct zr_state_file *f;
    char *buf;
    int64_t n, at;
    bool writes;
};

static int move_block(void *arg, int64_t i, char *unused)
{
    const struct transfer *t = arg;
    int64_t done = i * BLOCK_BYTES, n = zr_min(t->n - done, BLOCK_BYTES);
    struct zr_block_file *file = &t->f->file;
    (void)unused;
    if ((uintptr_t)t->buf % ZR_DIRECT_ALIGN == 0)
        return t->writes ? zr_block_write(file, t->buf + done, n, t->at + done)
                         : zr_block_read(file, t->buf + done, n, t->at + done);
    return t->writes ? zr_file_write(file->fs, file->fd, file->path, t->buf + done, n, t->at + done)
                     : zr_file_read(file->fs, file->fd, file->path, t->buf + done, n, t->at + done);
}

static int move(struct zr_state_file *f, char *buf, int64_t n, int64_t at, bool writes)
{
    struct transfer t = {f, buf, n, at, writes};
    return zr_in_parallel((n + BLOCK_BYTES - 1) / BLOCK_BYTES, N_THREADS, 0, move_block, &t);
}

int zr_state_file_read(struct zr_state_file *f, void *buf, int64_t n, int64_t at)
{
    return move(f, buf, n, at, false);
}

int zr_state_file_write(struct zr_state_file *f, const void *buf, int64_t n, int64_t at)
{
    return move(f, (char *)(uintptr_t)buf, n, at, true);
}

/* ---- opening ---- */

static int write_zeros(void *arg, int64_t i, char *buffer)
{
    struct zr_state_file *f = arg;
    int64_t done = i * BLOCK_BYTES, n = zr_min(f->bytes - done, BLOCK_BYTES);
    memset(buffer, 0, (size_t)n);
    return zr_block_write(&f->file, buffer, n, done);
}

/* Writes zeros if the file is too short, because then the file system could not reserve its space. */
static int reserve(struct zr_state_file *f)
{
    int64_t length;
    ZR_TRY(zr_file_size(f->file.fs, f->file.fd, f->path, &length));
    if (length >= f->bytes)
        return 0;
    return zr_in_parallel((f->bytes + BLOCK_BYTES - 1) / BLOCK_BYTES, N_THREADS, BLOCK_BYTES, write_zeros, f);
}

int zr_state_file_open(const struct zr_files *fs, const char *folder, int rank, int64_t bytes,
                       struct zr_state_file *f)
{
    char name[64];
    *f = (struct zr_state_file){.file = {.fs = fs, .fd = -1, .direct = -1}, .bytes = bytes, .rank = rank};
    /* A process number would not be unique, because containers may share the folder. */
    snprintf(name, sizeof name, ".zero-states-%d-%lld", rank, (long long)zr_now_ns());
    int err = zr_path_absolute(fs, folder, f->folder);
    if (!err)
        err = zr_path_join(f->path, f->folder, name);
    if (!err)
        err = zr_block_file_create_unnamed(fs, f->path, bytes, &f->file);
    if (!err)
        err = reserve(f);
    return err ? zr_fail_more(err, "states_dir %s: a file of %lld bytes", folder, (long long)bytes) : 0;
}

int zr_state_file_open_like(const struct zr_state_file *model, int64_t bytes, struct zr_state_file *f)
{
    return zr_state_file_open(model->file.fs, model->folder, model->rank, bytes, f);
}

int zr_state_file_map(struct zr_state_file *f)
{
    const struct zr_files *fs = f->file.fs;
    void *at = NULL;
    int err = fs->map ? fs->map(fs->arg, f->file.fd, f->bytes, &at) : -ENOTSUP;
    if (err < 0)
        return zr_fail(ZERO_ERR_IO, "%s: the file of %lld bytes cannot be mapped: %s", f->path,
                       (long long)f->bytes, strerror(-err));
    f->map = at;
    return 0;
}

int zr_state_file_unmap(struct zr_state_file *f)
{
    const struct zr_files *fs = f->file.fs;
    if (!f->map)
        return 0;
    fs->unmap(fs->arg, f->map, f->bytes);
    f->map = NULL;
    return zr_file_sync(fs, f->file.fd, f->path);
}

void zr_state_file_close(struct zr_state_file *f)
{
    if (f->map)
        f->file.fs->unmap(f->file.fs->arg, f->map, f->bytes);
    if (f->file.fs)
        zr_block_file_close(&f->file); /* nobody needs its contents any more */
    *f = (struct zr_state_file){0};
}

/* ---- the file of a context ---- */

/* Look at z->states in each call, because a load replaces it. */
static int read_states(void *arg, void *buf, int64_t n, int64_t at)
{
    return zr_state_file_read(((struct zero_ctx *)arg)->states, buf, n, at);
}

static int write_states(void *arg, const void *buf, int64_t n, int64_t at)
{
    return zr_state_file_write(((struct zero_ctx *)arg)->states, buf, n, at);
}

struct zr_state_io zr_states_io(struct zero_ctx *z)
{
    return (struct zr_state_io){read_states, write_states, z};
}

int zr_states_open(struct zero_ctx *z)
{
    const char *variable = getenv("ZERO_STATES_DIR"),
               *dir = variable && *variable ? variable : z->config.user.memory.states_dir;
    if (!z->plan->file_bytes)
        return 0;
    if (!dir || !*dir)
        return zr_fail(ZERO_ERR_ARG,
                       "states is file, but states_dir is NULL or empty; allowed: a folder on a local disk, "
                       "also from ZERO_STATES_DIR");
    ZR_TRY(ZR_ZALLOC(z->states, 1, "the file of states"));
    return zr_state_file_open(z->files, dir, z->world.rank, z->plan->file_bytes, z->states);
}

void zr_states_close(struct zr_state_file *states)
{
    if (states)
        zr_state_file_close(states);
    free(states);
}
