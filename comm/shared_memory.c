/* SPDX-License-Identifier: Apache-2.0 */
/* shared_memory.c: makes, reserves and maps memfd files, with huge pages if the kernel gives them. Makes
 * arenas of such memory, or of memory of the device. */
#include "comm/shared_memory.h"
#include "kernels/alloc.h"
#include "kernels/error.h"
#include "kernels/huge_pages.h"
#include "kernels/limits.h"
#include "kernels/standard_fds.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef F_ADD_SEALS
#include <linux/fcntl.h>
#endif

enum { PAGE_BYTES = 4096 };

static int64_t segment_bytes(int64_t bytes)
{
    return (bytes + PAGE_BYTES - 1) & ~(int64_t)(PAGE_BYTES - 1);
}

static int no_room(int64_t bytes)
{
    char why[ZR_SYSTEM_WORDS];
    bool is_full = errno == ENOSPC || errno == ENOMEM || errno == EFAULT;
    return zr_fail(is_full ? ZERO_ERR_NOMEM : ZERO_ERR_SYSTEM, "reserving %lld bytes of shared memory: %s%s",
                   (long long)bytes, zr_system_words(errno == EFAULT ? ENOMEM : errno, why),
                   is_full ? "; free memory, or raise the limit of the container or job" : "");
}

/* Whether the kernel can populate a mapping, with huge pages if it may. Before Linux 5.14 it can only
 * allocate the file. */
static bool fills_mappings(char *at)
{
#ifdef MADV_POPULATE_WRITE
    return madvise(at, 0, MADV_POPULATE_WRITE) == 0;
#else
    (void)at;
    return false;
#endif
}

/* Makes huge pages for a piece that starts at the boundary of one. One small page of each must exist
 * first. */
static bool fill_with_huge_pages(char *at, int64_t bytes)
{
#ifdef MADV_POPULATE_WRITE
    int64_t whole = bytes / ZR_HUGE_PAGE_BYTES * ZR_HUGE_PAGE_BYTES;
    for (int64_t i = 0; i < whole; i += ZR_HUGE_PAGE_BYTES)
        if (madvise(at + i, PAGE_BYTES, MADV_POPULATE_WRITE))
            return false;
    return zr_make_huge_pages(at, whole);
#else
    (void)at, (void)bytes;
    return false;
#endif
}

/* Allocates all pages now, so that a lack of memory is an error here and no signal later. */
static int reserve(int fd, char *mapped, int64_t bytes)
{
    /* Work in pieces: if a signal interrupts a call, the kernel frees the pages that the call has
     * allocated. */
    const int64_t piece = INT64_C(64) << 20;
    bool fill = fills_mappings(mapped), huge = fill && bytes >= ZR_HUGE_PAGE_BYTES;
    for (int64_t at = 0; at < bytes;) {
        int64_t n = bytes - at < piece ? bytes - at : piece;
        /* Stop asking after the first refusal: the kernel may have searched for long. */
        huge = huge && fill_with_huge_pages(mapped + at, n);
        int failed =
            fill ? madvise(mapped + at, (size_t)n, MADV_POPULATE_WRITE) : zr_limited_fallocate(fd, 0, at, n);
        if (!failed)
            at += n;
        else if (errno != EINTR)
            return no_room(bytes);
    }
    return 0;
}

/* Maps a whole file. A large mapping is aligned to a huge page, which the kernel does not ensure. */
static char *map_file(int fd, int64_t bytes, int protection)
{
    if (bytes < ZR_HUGE_PAGE_BYTES)
        return mmap(NULL, (size_t)bytes, protection, MAP_SHARED, fd, 0);
    const size_t more = (size_t)ZR_HUGE_PAGE_BYTES;
    char *room =
        mmap(NULL, (size_t)bytes + more, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED)
        return MAP_FAILED;
    /* Bytes before the first huge page. */
    size_t before = -(uintptr_t)room & (uintptr_t)(ZR_HUGE_PAGE_BYTES - 1);
    char *p = mmap(room + before, (size_t)bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0);
    if (p == MAP_FAILED) {
        munmap(room, (size_t)bytes + more);
        return MAP_FAILED;
    }
    if (before > 0)
        munmap(room, before);
    munmap(p + bytes, more - before);
    return p;
}

int zr_shared_make(const char *name, int64_t bytes, int *fd, char **at)
{
    int64_t whole = segment_bytes(bytes);
    char why[ZR_SYSTEM_WORDS];
    *fd = zr_above_standard(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (*fd < 0)
        return zr_fail(ZERO_ERR_SYSTEM, "making a shared memory file: %s", zr_system_words(errno, why));
    if (zr_limited_ftruncate(*fd, whole))
        return no_room(whole);
    /* No process may shrink the file while it is mapped. */
    fcntl(*fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    char *p = map_file(*fd, whole, PROT_READ | PROT_WRITE);
    if (p == MAP_FAILED)
        return zr_fail(ZERO_ERR_NOMEM, "mapping %lld bytes of shared memory: %s", (long long)whole,
                       strerror(errno));
    zr_ask_for_huge_pages(p, whole);
    int err = reserve(*fd, p, whole);
    if (err) {
        munmap(p, (size_t)whole);
        return err;
    }
    *at = p;
    return 0;
}

int zr_shared_inode(int fd, uint64_t *inode)
{
    struct stat st;
    if (fstat(fd, &st) < 0)
        return zr_fail(ZERO_ERR_SYSTEM, "a shared memory file: %s", strerror(errno));
    *inode = (uint64_t)st.st_ino;
    return 0;
}

int zr_shared_map(const struct zr_shared_at *where, int64_t bytes, int protection, char **at)
{
    char path[64], why[ZR_SYSTEM_WORDS];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", where->pid, where->fd);
    int fd = zr_above_standard(open(path, O_RDWR | O_CLOEXEC));
    struct stat st;
    if (fd < 0 || fstat(fd, &st) < 0) {
        int err = zr_fail(ZERO_ERR_SYSTEM, "opening the shared memory of rank %d at %s: %s", where->rank,
                          path, zr_system_words(errno, why));
        if (fd >= 0)
            close(fd);
        return err;
    }
    if (st.st_size != segment_bytes(bytes) || (where->inode && (uint64_t)st.st_ino != where->inode)) {
        close(fd);
        return zr_fail(ZERO_ERR_SYSTEM, "%s has %lld bytes and is not the shared memory of rank %d", path,
                       (long long)st.st_size, where->rank);
    }
    char *p = map_file(fd, segment_bytes(bytes), protection);
    close(fd);
    if (p == MAP_FAILED)
        return zr_fail(ZERO_ERR_NOMEM, "mapping the %lld bytes of rank %d: %s",
                       (long long)segment_bytes(bytes), where->rank, strerror(errno));
    zr_ask_for_huge_pages(p, segment_bytes(bytes));
    *at = p;
    return 0;
}

void zr_shared_unmap(void *at, int64_t bytes)
{
    if (at)
        munmap(at, (size_t)segment_bytes(bytes));
}

/* ---- arenas ---- */

struct arena {
    struct zr_arena base;
    /* NULL: the arena is shared. */
    struct zr_device *dev;
    /* -1: the arena is plain. */
    int fd;
};

static void free_arena(struct zr_arena *a)
{
    struct arena *own = (struct arena *)a;
    if (own->dev && a->base)
        own->dev->ops->free(own->dev, a->base, a->bytes);
    else if (!own->dev)
        zr_shared_unmap(a->base, a->bytes);
    if (own->fd >= 0)
        close(own->fd);
    free(own);
}

int zr_plain_zero(struct zr_device *dev, void *at, int64_t bytes)
{
    struct zr_stream *s = NULL;
    int err = dev->ops->stream_open(dev, ZR_STREAM_QUEUE, "arena", NULL, &s);
    if (!err)
        err = dev->ops->zero(s, at, bytes);
    if (!err)
        err = dev->ops->stream_sync(s);
    dev->ops->stream_close(s);
    return err;
}

static int new_arena(struct zr_device *dev, const char *backend, int64_t bytes, struct arena **out)
{
    ZR_TRY(ZR_ZALLOC(*out, 1, "%s's arena of %lld bytes", backend, (long long)bytes));
    struct arena *a = *out;
    a->base = (struct zr_arena){.free = free_arena, .bytes = bytes, .n_held = 1};
    a->dev = dev;
    a->fd = -1;
    return 0;
}

static int give(struct arena *a, int err, struct zr_arena **out)
{
    if (err)
        zr_arena_drop(&a->base);
    else
        *out = &a->base;
    return err;
}

int zr_plain_arena(struct zr_device *dev, const char *backend, int64_t bytes, struct zr_arena **out)
{
    struct arena *a;
    void *at = NULL;
    if (bytes <= 0)
        return zr_fail(ZERO_ERR_ARG, "%s: the arena is %lld bytes: more than 0 are allowed", backend,
                       (long long)bytes);
    int err = new_arena(dev, backend, bytes, &a);
    if (err)
        return err;
    err = dev->ops->alloc(dev, bytes, &at);
    a->base.base = err ? NULL : at;
    return give(a, err ? err : zr_plain_zero(dev, at, bytes), out);
}

int zr_shared_arena(const char *backend, const char *name, int64_t bytes, struct zr_arena **out)
{
    struct arena *a;
    int err = new_arena(NULL, backend, bytes, &a);
    return err ? err : give(a, zr_shared_make(name, bytes, &a->fd, &a->base.base), out);
}

int zr_arena_fd(const struct zr_arena *a)
{
    return ((const struct arena *)a)->fd;
}
