/* SPDX-License-Identifier: Apache-2.0 */
/* files.c: whole transfers, retries and messages, above the table of file system calls (files_posix.c). */
#include "zero/checkpoint/files.h"
#include "kernels/alloc.h"
#include "kernels/limits.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <uv.h>

bool zr_is_link(int64_t code)
{
    return code == -ELOOP || code == -ZR_LINK_TO_ITSELF || code == -ZR_LINK_TO_NOTHING;
}

static int fail_io(const char *path, const char *call, int64_t code)
{
    char why[ZR_SYSTEM_WORDS];
    if (code == -ELOOP)
        return zr_fail(ZERO_ERR_IO,
                       "%s: %s: it is a symbolic link, or lies behind one, and links inside a folder of "
                       "checkpoints or exports are not followed; allowed: the file or folder itself",
                       path, call);
    if (code == -ZR_LINK_TO_ITSELF)
        return zr_fail(ZERO_ERR_IO,
                       "%s: %s: it is a symbolic link that leads back to itself, or lies behind one; "
                       "allowed: the file or folder itself",
                       path, call);
    if (code == -ZR_LINK_TO_NOTHING)
        return zr_fail(ZERO_ERR_IO,
                       "%s: %s: it is a symbolic link to something that does not exist, or lies behind one; "
                       "allowed: the file or folder itself",
                       path, call);
    if (code == -ENXIO)
        return zr_fail(ZERO_ERR_IO, "%s: %s: it is a FIFO, a socket or a device; allowed: a regular file",
                       path, call);
    if (code == -EFBIG || code == -EMFILE) /* a message about a limit has its value */
        zr_system_words((int)-code, why);
    else
        uv_strerror_r((int)code, why, sizeof why);
    return zr_fail(ZERO_ERR_IO, "%s: %s: %s", path, call, why);
}

/* Repeats a call that a signal interrupts. There is no limit, because any number of signals may come in a
 * row. */
#define RETRY(result, call)                                                                                  \
    do {                                                                                                     \
        result = (call);                                                                                     \
    } while (result == -EINTR)

int zr_path_join(char path[ZR_PATH_BYTES], const char *folder, const char *name)
{
    int n = snprintf(path, ZR_PATH_BYTES, "%s/%s", folder, name);
    if (n < 0 || n >= ZR_PATH_BYTES)
        return zr_fail(ZERO_ERR_ARG, "%.200s.../%.100s: the path has %d characters; allowed: %d", folder,
                       name, n, ZR_PATH_BYTES - 1);
    return 0;
}

int zr_file_open(const struct zr_files *fs, const char *path, int flags, int *fd)
{
    int got;
    RETRY(got, fs->open(fs->arg, path, flags | O_NOFOLLOW, 0666));
    if (got < 0)
        return fail_io(path, flags & O_CREAT ? "create" : "open", got);
    *fd = got;
    return 0;
}

int zr_file_open_or_make(const struct zr_files *fs, const char *path, bool *is_new, int *fd)
{
    int got;
    *fd = -1;
    RETRY(got, fs->open(fs->arg, path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW, 0666));
    *is_new = got >= 0;
    if (got == -EEXIST) {
        RETRY(got, fs->open(fs->arg, path, O_RDWR | O_NOFOLLOW, 0));
        if (got == -ENOENT)
            return 0;
    }
    if (got < 0)
        return fail_io(path, "create", got);
    *fd = got;
    return 0;
}

static int find(const struct zr_files *fs, const char *path, int flags, bool *missing, int *fd)
{
    int got;
    RETRY(got, fs->open(fs->arg, path, O_RDONLY | flags, 0));
    /* Other programs that follow links report a dangling one as a missing file. */
    *missing = got == -ENOENT || got == -ENOTDIR || (got == -ZR_LINK_TO_NOTHING && !(flags & O_NOFOLLOW));
    if (got < 0)
        return fail_io(path, "open", got);
    *fd = got;
    return 0;
}

int zr_file_find(const struct zr_files *fs, const char *path, bool *missing, int *fd)
{
    return find(fs, path, O_NOFOLLOW, missing, fd);
}

int zr_file_find_linked(const struct zr_files *fs, const char *path, bool *missing, int *fd)
{
    return find(fs, path, 0, missing, fd);
}

int zr_file_read(const struct zr_files *fs, int fd, const char *path, void *buf, int64_t n, int64_t at)
{
    for (char *p = buf; n > 0;) {
        int64_t got;
        RETRY(got, fs->pread(fs->arg, fd, p, (size_t)n, at));
        if (got < 0)
            return fail_io(path, "read", got);
        if (got == 0)
            return zr_fail(ZERO_ERR_IO, "%s: ends at byte %lld, %lld bytes before it should", path,
                           (long long)at, (long long)n);
        p += got;
        at += got;
        n -= got;
    }
    return 0;
}

int zr_file_write(const struct zr_files *fs, int fd, const char *path, const void *buf, int64_t n, int64_t at)
{
    for (const char *p = buf; n > 0;) {
        int64_t put;
        RETRY(put, fs->pwrite(fs->arg, fd, p, (size_t)n, at));
        if (put < 0)
            return fail_io(path, "write", put);
        if (put == 0)
            return zr_fail(ZERO_ERR_IO, "%s: write: nothing was written at byte %lld", path, (long long)at);
        p += put;
        at += put;
        n -= put;
    }
    return 0;
}

int zr_file_sync(const struct zr_files *fs, int fd, const char *path)
{
    int err;
    RETRY(err, fs->fsync(fs->arg, fd));
    return err < 0 ? fail_io(path, "sync", err) : 0;
}

int zr_file_allocate(const struct zr_files *fs, int fd, const char *path, int64_t bytes)
{
    int err = 0;
    if (fs->allocate && bytes > 0)
        RETRY(err, fs->allocate(fs->arg, fd, bytes));
    return err < 0 ? fail_io(path, "allocate", err) : 0;
}

int zr_file_size(const struct zr_files *fs, int fd, const char *path, int64_t *bytes)
{
    RETRY(*bytes, fs->size(fs->arg, fd));
    return *bytes < 0 ? fail_io(path, "size", *bytes) : 0;
}

int zr_file_close(const struct zr_files *fs, int fd, const char *path)
{
    /* On Linux close releases the descriptor even if it is interrupted. Repeating it could close another
     * thread's descriptor. */
    int err = fs->close(fs->arg, fd);
    return err < 0 && err != -EINTR ? fail_io(path, "close", err) : 0;
}

int zr_folder_sync(const struct zr_files *fs, const char *path)
{
    int fd = -1, err = zr_file_open(fs, path, O_RDONLY | O_DIRECTORY, &fd);
    if (err)
        return err;
    err = zr_file_sync(fs, fd, path);
    int closed = zr_file_close(fs, fd, path);
    return err ? err : closed;
}

int zr_folder_sync_parent(const struct zr_files *fs, const char *path)
{
    char parent[ZR_PATH_BYTES];
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/')
        n--;
    while (n > 0 && path[n - 1] != '/')
        n--;
    while (n > 1 && path[n - 1] == '/')
        n--;
    snprintf(parent, sizeof parent, "%.*s", n ? (int)n : 1, n ? path : ".");
    return zr_folder_sync(fs, parent);
}

int zr_file_rename(const struct zr_files *fs, const char *from, const char *to)
{
    int err;
    RETRY(err, fs->rename(fs->arg, from, to));
    return err < 0 ? fail_io(from, "rename", err) : 0;
}

int zr_file_lock(const struct zr_files *fs, int fd, const char *path, enum zr_lock_outcome *outcome)
{
    int err;
    RETRY(err, fs->lock(fs->arg, fd));
    *outcome = err == -EAGAIN ? ZR_LOCK_BUSY : err == -ENOLCK ? ZR_LOCK_UNSUPPORTED : ZR_LOCK_TAKEN;
    return err < 0 && *outcome == ZR_LOCK_TAKEN ? fail_io(path, "lock", err) : 0;
}

int zr_file_is_at(const struct zr_files *fs, int fd, const char *path, bool *is_there)
{
    int err;
    RETRY(err, fs->is_at(fs->arg, fd, path));
    *is_there = err == 1;
    return err < 0 ? fail_io(path, "status", err) : 0;
}

int zr_path_absolute(const struct zr_files *fs, const char *path, char out[ZR_PATH_BYTES])
{
    int err;
    RETRY(err, fs->absolute(fs->arg, path, out, ZR_PATH_BYTES));
    if (err == -ENAMETOOLONG)
        return zr_fail(ZERO_ERR_ARG, "%.200s...: the path is too long; allowed: %d characters from the root",
                       path, ZR_PATH_BYTES - 1);
    return err < 0 ? fail_io(path, "absolute path", err) : 0;
}

int zr_folder_make(const struct zr_files *fs, const char *path, bool *exists)
{
    int err;
    RETRY(err, fs->mkdir(fs->arg, path, 0777));
    if (exists)
        *exists = err == -EEXIST;
    return err < 0 ? fail_io(path, "make folder", err) : 0;
}

int zr_folder_walk(const struct zr_files *fs, const char *path, bool *missing,
                   int (*fn)(void *, const char *), void *arg)
{
    void *dir;
    char name[256];
    int got, err = 0;
    RETRY(got, fs->opendir(fs->arg, path, &dir));
    if (missing)
        *missing = got == -ENOENT || got == -ENOTDIR || zr_is_link(got);
    if (got < 0)
        return fail_io(path, "open folder", got);
    for (;;) {
        RETRY(got, fs->readdir(fs->arg, dir, name, sizeof name));
        if (got <= 0)
            break;
        if (!strcmp(name, ".") || !strcmp(name, ".."))
            continue;
        err = fn(arg, name);
        if (err)
            break;
    }
    if (got < 0)
        err = fail_io(path, "list folder", got);
    fs->closedir(fs->arg, dir); /* nothing was written through it */
    return err;
}

int zr_names_add(struct zr_names *l, const char *name)
{
    size_t bytes = strlen(name) + 1;
    char *copy;
    ZR_TRY(ZR_GROW(l->name, (int64_t)l->n + 1, "the names in a folder"));
    ZR_TRY(ZR_ALLOC(copy, (int64_t)bytes, "the names in a folder"));
    l->name[l->n++] = memcpy(copy, name, bytes);
    return 0;
}

void zr_names_free(struct zr_names *l)
{
    for (size_t i = 0; i < l->n; i++)
        free(l->name[i]);
    free(l->name);
    *l = (struct zr_names){0};
}

static int add_name(void *arg, const char *name)
{
    return zr_names_add(arg, name);
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

int zr_folder_list(const struct zr_files *fs, const char *path, bool *missing, struct zr_names *l)
{
    *l = (struct zr_names){0};
    ZR_TRY(zr_folder_walk(fs, path, missing, add_name, l));
    if (l->n)
        qsort(l->name, l->n, sizeof *l->name, by_text);
    return 0;
}

int zr_file_remove(const struct zr_files *fs, const char *path)
{
    int err;
    RETRY(err, fs->unlink(fs->arg, path));
    return err < 0 && err != -ENOENT ? fail_io(path, "remove", err) : 0;
}

/* Removes a file. *is_folder: the name is a folder, which stays. */
static int remove_file(const struct zr_files *fs, const char *folder, const char *name, bool *is_folder)
{
    char path[ZR_PATH_BYTES];
    ZR_TRY(zr_path_join(path, folder, name));
    int err;
    RETRY(err, fs->unlink(fs->arg, path));
    *is_folder = err == -EISDIR;
    return err < 0 && err != -ENOENT && !*is_folder ? fail_io(path, "remove", err) : 0;
}

/* The names are listed first, because a walk is undefined while entries are removed. */
int zr_folder_remove(const struct zr_files *fs, const char *path, const char *first)
{
    struct zr_names l;
    bool missing, is_folder;
    size_t n_folders = 0, a_folder = 0;
    int err = zr_folder_list(fs, path, &missing, &l);
    if (!err && first)
        err = remove_file(fs, path, first, &is_folder);
    for (size_t i = 0; !err && i < l.n; i++) {
        err = remove_file(fs, path, l.name[i], &is_folder);
        if (!err && is_folder) {
            n_folders++;
            a_folder = i;
        }
    }
    if (n_folders && n_folders < l.n && !err)
        err = zr_fail(
            ZERO_ERR_IO,
            "%s: its files were removed, but libzero did not make the folder %s in it, so both folders stay",
            path, l.name[a_folder]);
    zr_names_free(&l);
    if (missing || (n_folders && !err))
        return 0;
    if (err)
        return err;
    RETRY(err, fs->rmdir(fs->arg, path));
    return err < 0 && err != -ENOENT ? fail_io(path, "remove folder", err) : 0;
}

/* Reads and closes fd. */
static int load(const struct zr_files *fs, int fd, const char *path, int64_t max, char **out, int64_t *n)
{
    char *data = NULL;
    int err = zr_file_size(fs, fd, path, n);
    if (!err && *n > max)
        err = zr_fail(ZERO_ERR_IO, "%s: has %lld bytes; allowed: %lld", path, (long long)*n, (long long)max);
    if (!err)
        err = ZR_ALLOC(data, *n + 1, "the bytes of %s", path);
    if (!err)
        err = zr_file_read(fs, fd, path, data, *n, 0);
    zr_file_close(fs, fd, path);
    if (err) {
        free(data);
        return err;
    }
    data[*n] = 0;
    *out = data;
    return 0;
}

int zr_file_load(const struct zr_files *fs, const char *path, int64_t max, bool *missing, char **out,
                 int64_t *n)
{
    int fd = -1, err = zr_file_find(fs, path, missing, &fd);
    return err ? err : load(fs, fd, path, max, out, n);
}

int zr_file_load_linked(const struct zr_files *fs, const char *path, int64_t max, bool *missing, char **out,
                        int64_t *n)
{
    int fd = -1, err = zr_file_find_linked(fs, path, missing, &fd);
    return err ? err : load(fs, fd, path, max, out, n);
}

int zr_file_store(const struct zr_files *fs, const char *path, const void *data, int64_t n)
{
    int fd = -1, err = zr_file_open(fs, path, O_WRONLY | O_CREAT | O_TRUNC, &fd);
    if (err)
        return err;
    err = zr_file_write(fs, fd, path, data, n, 0);
    if (!err)
        err = zr_file_sync(fs, fd, path);
    int closed = zr_file_close(fs, fd, path);
    return err ? err : closed;
}
