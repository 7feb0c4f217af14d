/* SPDX-License-Identifier: Apache-2.0 */
/* progress.c: writes how far this rank is into a file that zero-run maps. progress.h has the protocol. */
#include "zero/progress.h"
#include "kernels/log.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* Parses "PATH:NUMBER". */
static bool split(const char *text, char path[64], int64_t *number)
{
    const char *colon = strrchr(text, ':');
    char *end;
    if (!colon || colon == text || colon - text >= 64 || colon[1] < '0' || colon[1] > '9')
        return false;
    memcpy(path, text, (size_t)(colon - text));
    path[colon - text] = 0;
    *number = strtol(colon + 1, &end, 10);
    return !*end && *number < 65536;
}

/* Maps the file. On failure returns false with the reason in why. */
static bool map(struct zr_progress_map *m, const char *path, int64_t number, char *why, size_t n_why)
{
    const int64_t one = (int64_t)sizeof(struct zr_progress);
    struct stat st;
    const char *failed = NULL;
    void *all = MAP_FAILED;
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (fd < 0)
        failed = "be opened";
    else if (fstat(fd, &st))
        failed = "be looked at";
    else if (!S_ISREG(st.st_mode) || st.st_size < (number + 1) * one)
        snprintf(why, n_why, "the file has no room for this rank");
    else if ((all = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)) == MAP_FAILED)
        failed = "be mapped into memory";
    if (failed)
        snprintf(why, n_why, "the file cannot %s (%s)", failed, strerror(errno));
    if (fd >= 0)
        close(fd);
    if (all == MAP_FAILED)
        return false;
    *m = (struct zr_progress_map){
        .own = (struct zr_progress *)all + number, .all = all, .n_bytes = st.st_size};
    if (m->own->magic == ZR_PROGRESS_MAGIC)
        return true;
    snprintf(why, n_why, "the file is not zero-run's");
    return false;
}

/* Whether this context reports. A process reports for one context at a time: the first one, and the next one
 * after that is closed. */
static bool claim(struct zr_progress *p)
{
    int32_t nobody = 0;
    return atomic_compare_exchange_strong(&p->pid, &nobody, (int32_t)getpid());
}

static void unmap(struct zr_progress_map *m)
{
    if (m->all)
        munmap(m->all, (size_t)m->n_bytes);
    *m = (struct zr_progress_map){0};
}

void zr_progress_open(struct zr_progress_map *m, struct zr_log *log)
{
    const char *text = getenv("ZERO_PROGRESS");
    char path[64], why[160] = "it is not PATH:NUMBER";
    int64_t number;
    if (!text || (split(text, path, &number) && map(m, path, number, why, sizeof why)))
        return;
    zr_warn(log, "ZERO_PROGRESS is \"%.80s\": %s: zero-run cannot follow this rank's progress", text, why);
    unmap(m);
}

static bool is_number(const char *variable, int32_t number)
{
    const char *text = getenv(variable);
    char own[16];
    snprintf(own, sizeof own, "%d", number);
    return text && !strcmp(text, own);
}

void zr_progress_meet(struct zr_progress_map *m, int32_t rank, int32_t world)
{
    if (!m->own || !is_number("RANK", rank) || !is_number("WORLD_SIZE", world))
        return;
    m->rank = rank;
    m->n_wraps = atomic_fetch_add(&m->own->n_wraps, 1) + 1;
}

bool zr_progress_has_ended(void *arg, int rank, bool *has_begun, char *how, size_t n_how)
{
    const struct zr_progress_map *m = arg;
    int64_t at = m->own - m->all + rank - m->rank;
    if (!m->n_wraps || at < 0 || at >= m->n_bytes / (int64_t)sizeof *m->all)
        return false;
    int32_t ended = atomic_load(&m->all[at].ended);
    if (!ended)
        return false;
    *has_begun = atomic_load(&m->all[at].n_wraps) >= m->n_wraps;
    if (ended > 0)
        snprintf(how, n_how, "its program returned %d", ended - 1);
    else
        snprintf(how, n_how, "its program was killed by signal %d (%s)", -ended, strsignal(-ended));
    return true;
}

void zr_progress_begin(struct zr_progress_map *m, int32_t accum)
{
    m->claimed = m->own && claim(m->own);
    if (!m->claimed)
        return;
    atomic_store(&m->own->accum, accum);
    if (atomic_load(&m->own->t) < 0)
        atomic_store(&m->own->t, 0);
}

void zr_progress_step(struct zr_progress_map *m, int64_t t)
{
    if (m->claimed && t > atomic_load_explicit(&m->own->t, memory_order_relaxed))
        atomic_store_explicit(&m->own->t, t, memory_order_relaxed);
}

void zr_progress_close(struct zr_progress_map *m)
{
    if (m->claimed)
        atomic_store(&m->own->pid, 0);
    unmap(m);
}
