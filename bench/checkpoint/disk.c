/* SPDX-License-Identifier: Apache-2.0 */
/* disk.c: runs dd, and controls the page cache. */
#include "bench/checkpoint/disk.h"

#include "kernels/device.h"

#include <fcntl.h>
#include <glob.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define PATH 1024

/* The file that process number i writes or reads. */
static void file_of(const struct disk_dd *d, int32_t i, char out[PATH])
{
    snprintf(out, PATH, "%s/dd-%d.tmp", d->dir, i);
}

/* The file in memory that process number i copies to. */
static void memory_of(int32_t i, char out[PATH])
{
    snprintf(out, PATH, "/dev/shm/zero-bench-dd-%ld-%d", (long)getpid(), i);
}

int disk_dd_start(struct disk_dd *d, enum disk_job job)
{
    bool write = job == DISK_WRITE || job == DISK_WRITE_DIRECT;
    for (int32_t i = 0; i < d->n; i++) {
        char file[PATH], target[PATH] = "/dev/null", in[PATH + 8], out[PATH + 8], count[64];
        file_of(d, i, file);
        if (job == DISK_READ_TO_MEMORY)
            memory_of(i, target);
        snprintf(in, sizeof in, "if=%s", write ? "/dev/zero" : file);
        snprintf(out, sizeof out, "of=%s", write ? file : target);
        snprintf(count, sizeof count, "count=%lld", (long long)(d->bytes / d->n + (1 << 20) - 1) >> 20);
        char *const argv[] = {"dd",
                              in,
                              out,
                              "bs=1M",
                              count,
                              "status=none",
                              write ? "conv=fsync" : NULL,
                              job == DISK_WRITE_DIRECT ? "oflag=direct" : NULL,
                              NULL};
        if (child_open(&d->child[i], argv, /* to_child */ false)) {
            while (i-- > 0)
                child_close(&d->child[i]);
            return zr_fail(ZERO_ERR_SYSTEM, "dd could not be started");
        }
    }
    return 0;
}

int disk_dd_wait(struct disk_dd *d)
{
    int failed = 0;
    for (int32_t i = 0; i < d->n; i++)
        failed |= child_close(&d->child[i]);
    return failed ? zr_fail(ZERO_ERR_SYSTEM, "dd failed in %s", d->dir) : 0;
}

bool disk_dd_ended(struct disk_dd *d)
{
    for (int32_t i = 0; i < d->n; i++) {
        siginfo_t info = {0};
        if (!waitid(P_PID, (id_t)d->child[i].pid, &info, WEXITED | WNOHANG | WNOWAIT) && !info.si_pid)
            return false;
    }
    return true;
}

void disk_dd_remove(const struct disk_dd *d)
{
    for (int32_t i = 0; i < d->n; i++) {
        char file[PATH];
        file_of(d, i, file);
        unlink(file);
    }
    disk_dd_forget(d);
}

void disk_dd_forget(const struct disk_dd *d)
{
    for (int32_t i = 0; i < d->n; i++) {
        char file[PATH];
        memory_of(i, file);
        unlink(file);
    }
}

int disk_remove_folder(const char *path)
{
    char *const argv[] = {"rm", "-rf", (char *)(uintptr_t)path, NULL};
    struct child c;
    return child_open(&c, argv, /* to_child */ false) || child_close(&c)
               ? zr_fail(ZERO_ERR_SYSTEM, "%s: not removed", path)
               : 0;
}

/* Calls fn with every path in dir that matches the pattern, and returns the sum of its results. */
static int64_t for_each(const char *dir, const char *pattern, int64_t (*fn)(const char *path))
{
    int64_t sum = 0;
    char all[PATH];
    glob_t found;
    snprintf(all, sizeof all, "%s/%s", dir, pattern);
    if (!glob(all, 0, NULL, &found))
        for (size_t i = 0; i < found.gl_pathc; i++)
            sum += fn(found.gl_pathv[i]);
    globfree(&found);
    return sum;
}

static int64_t count_bytes(const char *path)
{
    struct stat st;
    return stat(path, &st) ? 0 : st.st_size;
}

int64_t disk_count_bytes(const char *dir)
{
    return for_each(dir, "*/*/*.safetensors", count_bytes);
}

/* Drops a file from the page cache. */
static int64_t make_cold(const char *path)
{
    int fd = open(path, O_RDONLY);
    if (fd >= 0) {
        fsync(fd); /* only clean pages can be dropped */
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        close(fd);
    }
    return 0;
}

/* Reads a file into the page cache. */
static int64_t make_warm(const char *path)
{
    static char buffer[1 << 20];
    int fd = open(path, O_RDONLY);
    if (fd >= 0) {
        while (read(fd, buffer, sizeof buffer) > 0) {
        }
        close(fd);
    }
    return 0;
}

void disk_make_cold(const char *dir)
{
    for_each(dir, "*/*/*", make_cold);
    for_each(dir, "*.tmp", make_cold);
}

void disk_make_warm(const char *dir)
{
    for_each(dir, "*/*/*", make_warm);
    for_each(dir, "*.tmp", make_warm);
}
