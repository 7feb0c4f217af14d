/* SPDX-License-Identifier: Apache-2.0 */
/* log.c: writes log lines to the callback of the program, to stderr or to the file of ZERO_LOG. */
#include "kernels/log.h"
#include "kernels/alloc.h"
#include "kernels/error.h"
#include "kernels/limits.h"
#include "kernels/standard_fds.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Number of latest warnings that are remembered. A new one replaces the oldest. */
enum { REMEMBERED = 64 };

struct zr_log {
    void (*fn)(void *arg, const char *line);
    void *fn_arg;
    _Atomic bool let_go;
    int fd;      /* file of ZERO_LOG, or -1 */
    bool is_off; /* ZERO_LOG=off */
    int rank;    /* -1: not known yet */
    char name[64];
    pthread_mutex_t lock;
    uint64_t given[REMEMBERED];
    unsigned n_given;
};

int zr_log_open(void (*fn)(void *arg, const char *line), void *fn_arg, const char *where, struct zr_log **out)
{
    struct zr_log *log;
    *out = NULL;
    ZR_TRY(ZR_ZALLOC(log, 1, "a log"));
    *log = (struct zr_log){.fn = fn, .fn_arg = fn_arg, .fd = -1, .rank = -1};
    where = where ? where : "";
    if (!strcmp(where, "off"))
        log->is_off = true;
    else if (!strcmp(where, "stderr"))
        log->fd = STDERR_FILENO;
    else if (*where && (log->fd = zr_above_standard(
                            open(where, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666))) < 0) {
        char why[ZR_SYSTEM_WORDS];
        int err = zr_fail(ZERO_ERR_ARG,
                          "ZERO_LOG is \"%s\", and this file cannot be opened: %s; allowed: off, stderr, or "
                          "a file that can be written",
                          where, zr_system_words(errno, why));
        free(log);
        return err;
    }
    if (pthread_mutex_init(&log->lock, NULL)) {
        zr_log_close(log);
        return zr_fail(ZERO_ERR_SYSTEM, "a mutex could not be made");
    }
    *out = log;
    return 0;
}

void zr_log_close(struct zr_log *log)
{
    if (!log)
        return;
    if (log->fd > STDERR_FILENO)
        close(log->fd);
    pthread_mutex_destroy(&log->lock);
    free(log);
}

void zr_log_set_rank(struct zr_log *log, int rank, const char *name)
{
    if (!log)
        return;
    log->rank = rank;
    snprintf(log->name, sizeof log->name, "%s", name);
}

void zr_log_let_go(struct zr_log *log)
{
    atomic_store(&log->let_go, true);
}

/* Writes a line with one call, so that lines of several ranks in one file stay whole. */
static void write_line(const struct zr_log *log, int fd, const char *line)
{
    char text[ZR_LOG_BYTES + 128], rank[96] = "";
    const char *name = log->name;
    if (log->rank >= 0)
        snprintf(rank, sizeof rank, "rank %d%s%s%s: ", log->rank, *name ? " of \"" : "", name,
                 *name ? "\"" : "");
    int n = snprintf(text, sizeof text, "libzero: %s%s\n", rank, line);
    for (ssize_t at = 0, done; at < n; at += done) {
        done = zr_limited_write(fd, text + at, (size_t)(n - at));
        if (done < 0 && errno == EINTR)
            done = 0;
        else if (done <= 0)
            return;
    }
}

static void give_out(const struct zr_log *log, bool is_warning, const char *line)
{
    if (log->fn && !atomic_load(&log->let_go))
        log->fn(log->fn_arg, line);
    if (log->fd >= 0)
        write_line(log, log->fd, line);
    else if (is_warning && !log->fn && !log->is_off)
        write_line(log, STDERR_FILENO, line);
}

void zr_info(struct zr_log *log, const char *fmt, ...)
{
    char line[ZR_LOG_BYTES];
    va_list ap;
    if (!log || (!log->fn && log->fd < 0))
        return;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    give_out(log, false, line);
}

/* The FNV-1a hash. */
static uint64_t hash_of(const char *text)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (; *text; text++)
        h = (h ^ (unsigned char)*text) * 0x100000001b3u;
    return h;
}

static bool is_new(struct zr_log *log, const char *line)
{
    uint64_t hash = hash_of(line);
    bool found = false;
    pthread_mutex_lock(&log->lock);
    for (unsigned i = 0; i < REMEMBERED && i < log->n_given; i++)
        found |= log->given[i] == hash;
    if (!found)
        log->given[log->n_given++ % REMEMBERED] = hash;
    pthread_mutex_unlock(&log->lock);
    return !found;
}

void zr_warn(struct zr_log *log, const char *fmt, ...)
{
    static const char before[] = "warning: ";
    char line[ZR_LOG_BYTES];
    va_list ap;
    if (!log)
        return;
    memcpy(line, before, sizeof before);
    va_start(ap, fmt);
    vsnprintf(line + sizeof before - 1, sizeof line - (sizeof before - 1), fmt, ap);
    va_end(ap);
    if (is_new(log, line))
        give_out(log, true, line);
}
