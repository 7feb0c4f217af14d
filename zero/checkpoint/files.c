/* files.c: see files.h. */
#include "zero/checkpoint/files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <uv.h>

/* ---- the operating system's ---- */

static int or_errno(int result)
{
    return result < 0 ? -errno : result;
}

static int posix_open(void *arg, const char *path, int flags, unsigned mode)
{
    (void)arg;
    return or_errno(open(path, flags | O_CLOEXEC, (mode_t)mode));
}

static int64_t posix_pread(void *arg, int fd, void *buf, size_t n, int64_t at)
{
    (void)arg;
    ssize_t got = pread(fd, buf, n, (off_t)at);
    return got < 0 ? -errno : got;
}

static int64_t posix_pwrite(void *arg, int fd, const void *buf, size_t n, int64_t at)
{
    (void)arg;
    ssize_t put = pwrite(fd, buf, n, (off_t)at);
    return put < 0 ? -errno : put;
}

static int posix_fsync(void *arg, int fd)
{
    (void)arg;
    return or_errno(fsync(fd));
}

static void posix_start_sync(void *arg, int fd, int64_t at, int64_t n)
{
    (void)arg;
#ifdef SYNC_FILE_RANGE_WRITE
    sync_file_range(fd, (off_t)at, (off_t)n, SYNC_FILE_RANGE_WRITE);
#else
    (void)fd, (void)at, (void)n;
#endif
}

static int posix_allocate(void *arg, int fd, int64_t bytes)
{
    (void)arg;
#ifdef __linux__
    /* Not posix_fallocate, which writes zeros where the file system cannot do it. */
    if (fallocate(fd, 0, 0, (off_t)bytes))
        return errno == EOPNOTSUPP || errno == ENOSYS ? 0 : -errno;
#else
    (void)fd, (void)bytes;
#endif
    return 0;
}

static bool posix_is_cached(void *arg, int fd, int64_t bytes)
{
    int64_t page = sysconf(_SC_PAGESIZE), window = page * 4096, n_pages = 0, n_there = 0;
    unsigned char there[4096];
    (void)arg;
    for (int64_t at = 0; at < bytes; at += window) {
        int64_t n = bytes - at < window ? bytes - at : window, pages = (n + page - 1) / page;
        void *map = mmap(NULL, (size_t)n, PROT_READ, MAP_SHARED, fd, (off_t)at);
        if (map == MAP_FAILED)
            return false;
        bool known = !mincore(map, (size_t)n, there);
        munmap(map, (size_t)n);
        if (!known)
            return false;
        n_pages += pages;
        for (int64_t i = 0; i < pages; i++)
            n_there += there[i] & 1;
    }
    return 2 * n_there > n_pages;
}

static int posix_close(void *arg, int fd)
{
    (void)arg;
    return or_errno(close(fd));
}

static int64_t posix_size(void *arg, int fd)
{
    struct stat st;
    (void)arg;
    if (fstat(fd, &st))
        return -errno;
    return S_ISREG(st.st_mode) ? st.st_size : -EISDIR;
}

static int posix_rename(void *arg, const char *from, const char *to)
{
    (void)arg;
    return or_errno(rename(from, to));
}

static int posix_mkdir(void *arg, const char *path, unsigned mode)
{
    (void)arg;
    return or_errno(mkdir(path, (mode_t)mode));
}

static int posix_unlink(void *arg, const char *path)
{
    (void)arg;
    return or_errno(unlink(path));
}

static int posix_rmdir(void *arg, const char *path)
{
    (void)arg;
    return or_errno(rmdir(path));
}

static int posix_opendir(void *arg, const char *path, void **out)
{
    (void)arg;
    *out = opendir(path);
    return *out ? 0 : -errno;
}

static int posix_readdir(void *arg, void *dir, char *name, size_t name_bytes)
{
    (void)arg;
    errno = 0;
    const struct dirent *e = readdir(dir);
    if (!e)
        return -errno;
    if (strlen(e->d_name) >= name_bytes)
        return -ENAMETOOLONG;
    memcpy(name, e->d_name, strlen(e->d_name) + 1);
    return 1;
}

static int posix_closedir(void *arg, void *dir)
{
    (void)arg;
    return or_errno(closedir(dir));
}

static int posix_lock(void *arg, int fd)
{
    (void)arg;
#ifdef F_OFD_SETLK
    /* Not a lock of the process, which its other contexts would share and any close of the file would end. */
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    if (!fcntl(fd, F_OFD_SETLK, &whole))
        return 0;
    if (errno == EAGAIN || errno == EACCES)
        return -EAGAIN;
    return errno == ENOSYS || errno == EOPNOTSUPP || errno == EINVAL ? -ENOLCK : -errno;
#else
    (void)fd;
    return -ENOLCK;
#endif
}

static int posix_is_at(void *arg, int fd, const char *path)
{
    struct stat open_file, named;
    (void)arg;
    if (fstat(fd, &open_file))
        return -errno;
    if (stat(path, &named))
        return errno == ENOENT ? 0 : -errno;
    return open_file.st_dev == named.st_dev && open_file.st_ino == named.st_ino;
}

/* The path of a folder that does not exist yet is made of its parent's; where that does not exist either, of
 * the text. */
static int posix_absolute(void *arg, const char *path, char *out, size_t out_bytes)
{
    char real[PATH_MAX], parent[PATH_MAX];
    size_t n = strlen(path);
    int printed;
    (void)arg;
    while (n > 1 && path[n - 1] == '/')
        n--;
    size_t name = n;
    while (name > 0 && path[name - 1] != '/')
        name--;
    if (n >= sizeof parent)
        return -ENAMETOOLONG;
    snprintf(parent, sizeof parent, "%.*s", name ? (int)name : 1, name ? path : ".");
    if (realpath(path, real))
        printed = snprintf(out, out_bytes, "%s", real);
    else if (realpath(parent, real))
        printed =
            snprintf(out, out_bytes, "%s/%.*s", strcmp(real, "/") ? real : "", (int)(n - name), path + name);
    else if (*path == '/')
        printed = snprintf(out, out_bytes, "%.*s", (int)n, path);
    else if (getcwd(real, sizeof real))
        printed = snprintf(out, out_bytes, "%s/%.*s", real, (int)n, path);
    else
        return -errno;
    return printed < 0 || (size_t)printed >= out_bytes ? -ENAMETOOLONG : 0;
}

const struct zr_files zr_files_posix = {.open = posix_open,
                                        .pread = posix_pread,
                                        .pwrite = posix_pwrite,
                                        .fsync = posix_fsync,
                                        .start_sync = posix_start_sync,
                                        .allocate = posix_allocate,
                                        .is_cached = posix_is_cached,
                                        .close = posix_close,
                                        .size = posix_size,
                                        .rename = posix_rename,
                                        .mkdir = posix_mkdir,
                                        .unlink = posix_unlink,
                                        .rmdir = posix_rmdir,
                                        .opendir = posix_opendir,
                                        .readdir = posix_readdir,
                                        .closedir = posix_closedir,
                                        .lock = posix_lock,
                                        .is_at = posix_is_at,
                                        .absolute = posix_absolute};

/* ---- above the table ---- */

static int fail_io(const char *path, const char *call, int64_t code)
{
    char why[128];
    uv_strerror_r((int)code, why, sizeof why);
    return zr_fail(ZR_ERR_IO, "%s: %s: %s", path, call, why);
}

/* A signal may interrupt any of them; how often in a row has no bound, so there is none here. */
#define RETRY(result, call)                                                                                  \
    do {                                                                                                     \
        result = (call);                                                                                     \
    } while (result == -EINTR)

int zr_path_join(char path[ZR_PATH_BYTES], const char *folder, const char *name)
{
    int n = snprintf(path, ZR_PATH_BYTES, "%s/%s", folder, name);
    if (n < 0 || n >= ZR_PATH_BYTES)
        return zr_fail(ZR_ERR_ARG, "%.200s.../%.100s: the path has %d characters; allowed: %d", folder, name,
                       n, ZR_PATH_BYTES - 1);
    return 0;
}

int zr_file_open(const struct zr_files *fs, const char *path, int flags, int *fd)
{
    int got;
    RETRY(got, fs->open(fs->arg, path, flags, 0666));
    if (got < 0)
        return fail_io(path, flags & O_CREAT ? "create" : "open", got);
    *fd = got;
    return 0;
}

int zr_file_find(const struct zr_files *fs, const char *path, bool *missing, int *fd)
{
    int got;
    RETRY(got, fs->open(fs->arg, path, O_RDONLY, 0));
    *missing = got == -ENOENT || got == -ENOTDIR;
    if (got < 0)
        return fail_io(path, "open", got);
    *fd = got;
    return 0;
}

int zr_file_read(const struct zr_files *fs, int fd, const char *path, void *buf, int64_t n, int64_t at)
{
    for (char *p = buf; n > 0;) {
        int64_t got;
        RETRY(got, fs->pread(fs->arg, fd, p, (size_t)n, at));
        if (got < 0)
            return fail_io(path, "read", got);
        if (got == 0)
            return zr_fail(ZR_ERR_IO, "%s: ends at byte %lld, %lld bytes before it should", path,
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
            return zr_fail(ZR_ERR_IO, "%s: write: nothing was written at byte %lld", path, (long long)at);
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
    /* On Linux the descriptor is released even when close is interrupted: to repeat it could close another
     * thread's. */
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
    *outcome = err == -EAGAIN ? ZR_LOCK_HELD : err == -ENOLCK ? ZR_NO_LOCKS : ZR_LOCKED;
    return err < 0 && *outcome == ZR_LOCKED ? fail_io(path, "lock", err) : 0;
}

int zr_file_is_at(const struct zr_files *fs, int fd, const char *path, bool *is)
{
    int err;
    RETRY(err, fs->is_at(fs->arg, fd, path));
    *is = err == 1;
    return err < 0 ? fail_io(path, "status", err) : 0;
}

int zr_path_absolute(const struct zr_files *fs, const char *path, char out[ZR_PATH_BYTES])
{
    int err;
    RETRY(err, fs->absolute(fs->arg, path, out, ZR_PATH_BYTES));
    if (err == -ENAMETOOLONG)
        return zr_fail(ZR_ERR_ARG, "%.200s...: the path is too long; allowed: %d characters from the root",
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
        *missing = got == -ENOENT;
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
    char **more = realloc(l->name, (l->n + 1) * sizeof *more), *copy = more ? strdup(name) : NULL;
    if (more)
        l->name = more;
    if (!copy)
        return zr_fail(ZR_ERR_NOMEM, "no memory for the names in a folder");
    l->name[l->n++] = copy;
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
    int err = zr_folder_walk(fs, path, missing, add_name, l);
    if (!err && l->n)
        qsort(l->name, l->n, sizeof *l->name, by_text);
    return err;
}

int zr_file_remove(const struct zr_files *fs, const char *path)
{
    int err;
    RETRY(err, fs->unlink(fs->arg, path));
    return err < 0 && err != -ENOENT ? fail_io(path, "remove", err) : 0;
}

static int remove_file(const struct zr_files *fs, const char *folder, const char *name)
{
    char path[ZR_PATH_BYTES];
    int err = zr_path_join(path, folder, name);
    return err ? err : zr_file_remove(fs, path);
}

/* Names are listed first: what a walk shows while entries go is not defined. */
int zr_folder_remove(const struct zr_files *fs, const char *path, const char *first)
{
    struct zr_names l;
    bool missing;
    int err = zr_folder_list(fs, path, &missing, &l);
    if (!err && first)
        err = remove_file(fs, path, first);
    for (size_t i = 0; !err && i < l.n; i++)
        err = remove_file(fs, path, l.name[i]);
    zr_names_free(&l);
    if (missing)
        return 0;
    if (err)
        return err;
    RETRY(err, fs->rmdir(fs->arg, path));
    return err < 0 && err != -ENOENT ? fail_io(path, "remove folder", err) : 0;
}

int zr_file_load(const struct zr_files *fs, const char *path, int64_t max, bool *missing, char **out,
                 int64_t *n)
{
    int fd = -1, err = zr_file_find(fs, path, missing, &fd);
    char *data = NULL;
    if (err)
        return err;
    err = zr_file_size(fs, fd, path, n);
    if (!err && *n > max)
        err = zr_fail(ZR_ERR_IO, "%s: has %lld bytes; allowed: %lld", path, (long long)*n, (long long)max);
    if (!err) {
        data = malloc((size_t)*n + 1);
        err = data ? zr_file_read(fs, fd, path, data, *n, 0)
                   : zr_fail(ZR_ERR_NOMEM, "no memory to read %s", path);
    }
    zr_file_close(fs, fd, path);
    if (err) {
        free(data);
        return err;
    }
    data[*n] = 0;
    *out = data;
    return 0;
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
