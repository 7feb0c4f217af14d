/* SPDX-License-Identifier: Apache-2.0 */
/* limits.c: blocks SIGXFSZ around writes, and names the limit that a call has met. */
#include "kernels/limits.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

static sigset_t only_xfsz(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGXFSZ);
    return set;
}

void zr_large_write_begin(struct zr_large_write *w)
{
    struct rlimit most;
    sigset_t xfsz = only_xfsz();
    w->blocks = !getrlimit(RLIMIT_FSIZE, &most) && most.rlim_cur != RLIM_INFINITY &&
                !pthread_sigmask(SIG_BLOCK, &xfsz, &w->before);
}

void zr_large_write_end(const struct zr_large_write *w)
{
    const struct timespec no_time = {0};
    sigset_t xfsz = only_xfsz();
    int error = errno;
    if (!w->blocks)
        return;
    /* If the program blocks the signal itself, it may be waiting for one that came before. So none is
     * discarded. */
    if (!sigismember(&w->before, SIGXFSZ))
        while (sigtimedwait(&xfsz, NULL, &no_time) == SIGXFSZ)
            ;
    pthread_sigmask(SIG_SETMASK, &w->before, NULL);
    errno = error;
}

#define GUARDED(type, call)                                                                                  \
    struct zr_large_write w;                                                                                 \
    zr_large_write_begin(&w);                                                                                \
    type result = (call);                                                                                    \
    zr_large_write_end(&w);                                                                                  \
    return result

ssize_t zr_limited_write(int fd, const void *data, size_t n)
{
    GUARDED(ssize_t, write(fd, data, n));
}

ssize_t zr_limited_pwrite(int fd, const void *data, size_t n, off_t at)
{
    GUARDED(ssize_t, pwrite(fd, data, n, at));
}

int zr_limited_ftruncate(int fd, off_t bytes)
{
    GUARDED(int, ftruncate(fd, bytes));
}

int zr_limited_fallocate(int fd, int mode, off_t at, off_t bytes)
{
    GUARDED(int, fallocate(fd, mode, at, bytes));
}

const char *zr_limit_words(int error, const char *words, char text[ZR_SYSTEM_WORDS])
{
    struct rlimit most;
    if (error == EFBIG && !getrlimit(RLIMIT_FSIZE, &most) && most.rlim_cur != RLIM_INFINITY)
        snprintf(text, ZR_SYSTEM_WORDS,
                 "%s: this process may make files of at most %llu bytes (RLIMIT_FSIZE, ulimit -f)", words,
                 (unsigned long long)most.rlim_cur);
    else if (error == EMFILE && !getrlimit(RLIMIT_NOFILE, &most))
        snprintf(text, ZR_SYSTEM_WORDS,
                 "%s: this process may have at most %llu open (RLIMIT_NOFILE, ulimit -n)", words,
                 (unsigned long long)most.rlim_cur);
    else if (error == ENFILE)
        snprintf(text, ZR_SYSTEM_WORDS,
                 "%s: all processes of this host together have too many open (sysctl fs.file-max)", words);
    else
        snprintf(text, ZR_SYSTEM_WORDS, "%s", words);
    return text;
}

const char *zr_system_words(int error, char text[ZR_SYSTEM_WORDS])
{
    return zr_limit_words(error, strerror(error), text);
}

bool zr_is_descriptor_limit(int error)
{
    return error == EMFILE || error == ENFILE;
}

int zr_no_descriptors(int n)
{
    int fd[ZR_MAX_PROBED], n_open = 0, error = 0;
    while (n_open < n && n_open < ZR_MAX_PROBED && (fd[n_open] = eventfd(0, EFD_CLOEXEC)) >= 0)
        n_open++;
    if (n_open < n && zr_is_descriptor_limit(errno))
        error = errno;
    while (n_open)
        close(fd[--n_open]);
    return error;
}

int zr_count_descriptors(void)
{
    DIR *dir = opendir("/proc/self/fd");
    int n = 0;
    while (dir && readdir(dir))
        n++;
    if (dir)
        closedir(dir);
    return n > 3 ? n - 3 : 0; /* without ".", ".." and the folder itself */
}

unsigned long long zr_descriptor_limit(void)
{
    struct rlimit most = {0};
    getrlimit(RLIMIT_NOFILE, &most);
    return most.rlim_cur;
}

unsigned long long zr_raise_descriptor_limit(unsigned long long n)
{
    struct rlimit most;
    if (!getrlimit(RLIMIT_NOFILE, &most) && most.rlim_cur < n) {
        most.rlim_cur = most.rlim_max < n ? most.rlim_max : (rlim_t)n;
        setrlimit(RLIMIT_NOFILE, &most);
    }
    return zr_descriptor_limit();
}
