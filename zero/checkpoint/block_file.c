/* SPDX-License-Identifier: Apache-2.0 */
/* block_file.c: reads and writes blocks of a large file, past the page cache if that works, and otherwise
 * through it. */
#include "zero/checkpoint/block_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>

#ifndef O_DIRECT
#define O_DIRECT 0
#endif

/* Below this a second descriptor costs more than it saves. */
#define LEAST_DIRECT (1 << 20) /* bytes */

/* Opens a second descriptor that bypasses the page cache. A failure is no error, because transfers are then
 * only slower. */
static void open_direct(struct zr_block_file *f, const char *path, int flags)
{
    do
        f->direct = f->fs->open(f->fs->arg, path, flags | O_DIRECT, 0);
    while (f->direct == -EINTR);
}

int zr_block_file_create(const struct zr_files *fs, const char *path, int64_t bytes, struct zr_block_file *f)
{
    *f = (struct zr_block_file){.fs = fs, .path = path, .fd = -1, .direct = -1};
    ZR_TRY(zr_file_open(fs, path, O_WRONLY | O_CREAT | O_EXCL, &f->fd));
    ZR_TRY(zr_file_allocate(fs, f->fd, path, bytes));
    if (O_DIRECT != 0 && bytes >= LEAST_DIRECT)
        open_direct(f, path, O_WRONLY | O_NOFOLLOW);
    return 0;
}

int zr_block_file_open(const struct zr_files *fs, const char *path, int64_t bytes, struct zr_block_file *f)
{
    bool missing;
    *f = (struct zr_block_file){.fs = fs, .path = path, .fd = -1, .direct = -1};
    ZR_TRY(zr_file_find(fs, path, &missing, &f->fd));
    if (O_DIRECT != 0 && bytes >= LEAST_DIRECT && !(fs->is_cached && fs->is_cached(fs->arg, f->fd, bytes)))
        open_direct(f, path, O_RDONLY | O_NOFOLLOW);
    return 0;
}

int zr_block_file_create_unnamed(const struct zr_files *fs, const char *path, int64_t bytes,
                                 struct zr_block_file *f)
{
    *f = (struct zr_block_file){.fs = fs, .path = path, .fd = -1, .direct = -1};
    const bool wants_direct = O_DIRECT != 0 && bytes >= LEAST_DIRECT;
    f->fd = fs->open_unnamed ? fs->open_unnamed(fs->arg, path) : -1;
    if (f->fd >= 0) {
        char opened[32];
        snprintf(opened, sizeof opened, "/proc/self/fd/%d", f->fd);
        if (wants_direct)
            open_direct(f, opened, O_RDWR);
    } else {
        ZR_TRY(zr_file_open(fs, path, O_RDWR | O_CREAT | O_EXCL, &f->fd));
        if (wants_direct)
            open_direct(f, path, O_RDWR | O_NOFOLLOW);
        ZR_TRY(zr_file_remove(fs, path));
    }
    return zr_file_allocate(fs, f->fd, path, bytes);
}

/* Transfers the first whole pages without the page cache. Returns their bytes. It reports no failure, because
 * the call that transfers the rest does. */
static int64_t move_direct(struct zr_block_file *f, char *buf, int64_t n, int64_t at, bool write)
{
    const struct zr_files *fs = f->fs;
    int64_t done = 0;
    if (f->direct < 0 || f->refused || at % ZR_DIRECT_ALIGN)
        return 0;
    while (n - done >= ZR_DIRECT_ALIGN && done % ZR_DIRECT_ALIGN == 0) {
        int64_t part = (n - done) / ZR_DIRECT_ALIGN * ZR_DIRECT_ALIGN,
                got = write ? fs->pwrite(fs->arg, f->direct, buf + done, (size_t)part, at + done)
                            : fs->pread(fs->arg, f->direct, buf + done, (size_t)part, at + done);
        if (got == -EINTR)
            continue;
        f->refused |= got == -EINVAL;
        if (got <= 0)
            break;
        done += got;
    }
    return done;
}

int zr_block_write(struct zr_block_file *f, const char *buf, int64_t n, int64_t at)
{
    int64_t done = move_direct(f, (char *)(uintptr_t)buf, n, at, true);
    ZR_TRY(zr_file_write(f->fs, f->fd, f->path, buf + done, n - done, at + done));
    /* The disk begins to write now, and not only at the sync. */
    if (done < n && f->fs->start_sync)
        f->fs->start_sync(f->fs->arg, f->fd, at + done, n - done);
    return 0;
}

int zr_block_read(struct zr_block_file *f, char *buf, int64_t n, int64_t at)
{
    int64_t done = move_direct(f, buf, n, at, false);
    return zr_file_read(f->fs, f->fd, f->path, buf + done, n - done, at + done);
}

int zr_block_file_close(struct zr_block_file *f)
{
    int err = 0, closed = 0;
    if (f->fd >= 0)
        err = zr_file_close(f->fs, f->fd, f->path);
    if (f->direct >= 0)
        closed = zr_file_close(f->fs, f->direct, f->path);
    f->fd = f->direct = -1;
    return err ? err : closed;
}
