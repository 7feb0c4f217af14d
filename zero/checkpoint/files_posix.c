/* SPDX-License-Identifier: Apache-2.0 */
/* files_posix.c: the operating system's file calls, behind the table of files.h. This is the one place that
 * opens files of checkpoints and exports. Everything below an absolute path is reached without following a
 * symbolic link, and only regular files and folders are opened. */
#include "kernels/limits.h"
#include "kernels/standard_fds.h"
#include "zero/checkpoint/files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#ifndef O_PATH /* only Linux has it */
#define O_PATH (O_RDONLY | O_NONBLOCK)
#endif

static int or_errno(int result)
{
    return result < 0 ? -errno : result;
}

/* Returns the code for a link that is not followed. Following it shows whether it leads anywhere. */
static int kind_of_link(int folder, const char *name)
{
    struct stat st;
    if (!fstatat(folder, name, &st, 0))
        return -ELOOP;
    return errno == ELOOP ? -ZR_LINK_TO_ITSELF : errno == ENOENT ? -ZR_LINK_TO_NOTHING : -ELOOP;
}

/* Returns the code for a path that led to no file although its links were followed. */
static int kind_of_missing(const char *path, int err)
{
    char start[PATH_MAX];
    struct stat st;
    if (err == -ELOOP)
        return -ZR_LINK_TO_ITSELF;
    for (size_t n = 1; err == -ENOENT && n <= strlen(path) && n < sizeof start; n++) {
        if (path[n] && path[n] != '/')
            continue;
        snprintf(start, sizeof start, "%.*s", (int)n, path);
        if (!lstat(start, &st) && S_ISLNK(st.st_mode) && stat(start, &st) && errno == ENOENT)
            return -ZR_LINK_TO_NOTHING;
    }
    return err;
}

/* Opens the folder that holds path, component by component, without following a link. name: the last
 * component. Returns a descriptor for the calls that end in "at", or what zr_files.open returns. */
static int open_parent(const char *path, char name[NAME_MAX + 1])
{
    int folder = or_errno(open(*path == '/' ? "/" : ".", O_PATH | O_DIRECTORY | O_CLOEXEC));
    path += strspn(path, "/");
    strcpy(name, ".");
    while (folder >= 0 && *path) {
        struct stat st = {0};
        size_t n = strcspn(path, "/");
        if (n > NAME_MAX) {
            close(folder);
            return -ENAMETOOLONG;
        }
        memcpy(name, path, n);
        name[n] = 0;
        path += n;
        path += strspn(path, "/");
        if (!*path)
            break;
        int next = or_errno(openat(folder, name, O_PATH | O_NOFOLLOW | O_CLOEXEC));
        if (next >= 0 && (fstat(next, &st) || !S_ISDIR(st.st_mode))) {
            close(next);
            next = S_ISLNK(st.st_mode) ? kind_of_link(folder, name) : -ENOTDIR;
        }
        close(folder);
        folder = next;
    }
    return folder;
}

static int check_kind(mode_t mode, int flags)
{
    if (S_ISLNK(mode))
        return -ELOOP;
    if (flags & O_DIRECTORY)
        return S_ISDIR(mode) ? 0 : -ENOTDIR;
    return S_ISREG(mode) ? 0 : S_ISDIR(mode) ? -EISDIR : -ENXIO;
}

/* Checks the kind of a file before the open, which may have effects on a device. Checks it again after the
 * open, because the name may be another file's by then. With O_NONBLOCK, a FIFO that came in between does not
 * block. */
static int open_kind(int folder, const char *name, int flags, unsigned mode)
{
    struct stat st;
    int err = 0;
    if (!fstatat(folder, name, &st, flags & O_NOFOLLOW ? AT_SYMLINK_NOFOLLOW : 0))
        err = check_kind(st.st_mode, flags);
    if (err)
        return err == -ELOOP ? kind_of_link(folder, name) : err;
    int fd = or_errno(zr_above_standard(openat(folder, name, flags | O_NONBLOCK | O_CLOEXEC, (mode_t)mode)));
    if (fd < 0)
        return fd;
    err = fstat(fd, &st) ? -errno : check_kind(st.st_mode, flags);
    if (err)
        close(fd);
    return err ? err : fd;
}

static int posix_open(void *arg, const char *path, int flags, unsigned mode)
{
    char name[NAME_MAX + 1];
    (void)arg;
    if (!(flags & O_NOFOLLOW)) {
        int fd = open_kind(AT_FDCWD, path, flags, mode);
        return fd < 0 ? kind_of_missing(path, fd) : fd;
    }
    int folder = open_parent(path, name);
    if (folder < 0)
        return folder;
    int fd = open_kind(folder, name, flags, mode);
    close(folder);
    return fd;
}

static int posix_open_unnamed(void *arg, const char *path)
{
    char name[NAME_MAX + 1];
    int folder = open_parent(path, name), fd;
    (void)arg;
    if (folder < 0)
        return folder;
    do
        fd = or_errno(zr_above_standard(openat(folder, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600)));
    while (fd == -EINTR);
    close(folder);
    return fd;
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
    ssize_t put = zr_limited_pwrite(fd, buf, n, (off_t)at);
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
    /* posix_fallocate is not used, because it writes zeros if the file system cannot reserve space. */
    if (zr_limited_fallocate(fd, 0, 0, (off_t)bytes))
        return errno == EOPNOTSUPP || errno == ENOSYS ? 0 : -errno;
#else
    (void)fd, (void)bytes;
#endif
    return 0;
}

static int posix_map(void *arg, int fd, int64_t bytes, void **out)
{
    (void)arg;
    *out = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return *out == MAP_FAILED ? -errno : 0;
}

static int posix_unmap(void *arg, void *at, int64_t bytes)
{
    (void)arg;
    return or_errno(munmap(at, (size_t)bytes));
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

static bool posix_is_in_memory(void *arg, int fd)
{
    struct statfs fs;
    (void)arg;
    return !fstatfs(fd, &fs) && (fs.f_type == TMPFS_MAGIC || fs.f_type == RAMFS_MAGIC);
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
    char old[NAME_MAX + 1], new[NAME_MAX + 1];
    (void)arg;
    int a = open_parent(from, old), b = a < 0 ? a : open_parent(to, new);
    int err = b < 0 ? b : or_errno(renameat(a, old, b, new));
    if (a >= 0)
        close(a);
    if (b >= 0)
        close(b);
    return err;
}

static int posix_mkdir(void *arg, const char *path, unsigned mode)
{
    char name[NAME_MAX + 1];
    (void)arg;
    int folder = open_parent(path, name);
    if (folder < 0)
        return folder;
    int err = or_errno(mkdirat(folder, name, (mode_t)mode));
    close(folder);
    return err;
}

static int remove_name(const char *path, int flags)
{
    char name[NAME_MAX + 1];
    int folder = open_parent(path, name);
    if (folder < 0)
        return folder;
    int err = or_errno(unlinkat(folder, name, flags));
    close(folder);
    return err;
}

static int posix_unlink(void *arg, const char *path)
{
    (void)arg;
    return remove_name(path, 0);
}

static int posix_rmdir(void *arg, const char *path)
{
    (void)arg;
    return remove_name(path, AT_REMOVEDIR);
}

static int posix_opendir(void *arg, const char *path, void **out)
{
    int fd = posix_open(arg, path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW, 0);
    if (fd < 0)
        return fd;
    *out = fdopendir(fd);
    if (*out)
        return 0;
    int err = -errno;
    close(fd);
    return err;
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
    /* This is no lock of the process. The process's other contexts would share that, and any close of the
     * file would end it. */
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
    char name[NAME_MAX + 1];
    (void)arg;
    if (fstat(fd, &open_file))
        return -errno;
    int folder = open_parent(path, name);
    int err = folder < 0 ? folder : or_errno(fstatat(folder, name, &named, AT_SYMLINK_NOFOLLOW));
    if (folder >= 0)
        close(folder);
    if (err)
        return err == -ENOENT || err == -ENOTDIR || zr_is_link(err) ? 0 : err;
    return open_file.st_dev == named.st_dev && open_file.st_ino == named.st_ino;
}

static int posix_path_of(void *arg, int fd, char *out, size_t out_bytes)
{
    (void)arg;
#ifdef __linux__
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, out, out_bytes);
    if (n < 0 || (size_t)n >= out_bytes)
        return n < 0 ? -errno : -ENAMETOOLONG;
    out[n] = 0;
    return 0;
#else
    (void)fd, (void)out, (void)out_bytes;
    return -ENOSYS;
#endif
}

/* The path of a folder that does not exist yet is made from its parent's. If the parent does not exist
 * either, it is made from the text. */
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
                                        .open_unnamed = posix_open_unnamed,
                                        .pread = posix_pread,
                                        .pwrite = posix_pwrite,
                                        .fsync = posix_fsync,
                                        .start_sync = posix_start_sync,
                                        .allocate = posix_allocate,
                                        .map = posix_map,
                                        .unmap = posix_unmap,
                                        .is_cached = posix_is_cached,
                                        .is_in_memory = posix_is_in_memory,
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
                                        .path_of = posix_path_of,
                                        .absolute = posix_absolute};
