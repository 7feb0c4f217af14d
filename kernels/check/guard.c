/* SPDX-License-Identifier: Apache-2.0 */
/* guard.c: guarded memory. All regions of a guard are one reservation of address space. The handler only
 * reads what was there before the first page could be touched. */
#include "kernels/check/guard.h"
#include "kernels/alloc.h"
#include "kernels/check/guard_calls.h"
#include "kernels/check/guard_report.h"
#include "kernels/error.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

enum { MAX_GUARDS = 64 };

struct region {
    char *from, *at; /* from: start of the space before the region */
    int64_t bytes;
    _Atomic int mode;
};

struct zr_guard {
    char *base;
    size_t bytes;
    int64_t page;
    int32_t n;
    _Atomic bool claimed, noted;
    struct zr_reporter *reporter; /* NULL: nothing is reported */
    struct zr_guard_touch first;
    struct region region[];
};

/* This belongs to the process, as the handler does. A handler looks at every guard, also those of other
 * threads, and must not take a lock. So a guard that left the list is freed only when no handler is inside
 * any more. */
static struct {
    pthread_mutex_t lock; /* protects the list and the handler */
    _Atomic(struct zr_guard *) open[MAX_GUARDS];
    int n_open;
    _Atomic bool has_callbacks;
    pthread_key_t callbacks; /* the name of the callback that each thread runs */
    _Atomic int n_inside;    /* handlers that may hold a guard of the list */
    struct sigaction before;
} guards = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* The handler calls this, so the name is not a thread-local variable. Reading such a variable may allocate
 * memory. The model initial-exec avoids that, but dlopen refuses a library that uses it. */
static const char *callback_of_thread(void)
{
    return atomic_load(&guards.has_callbacks) ? pthread_getspecific(guards.callbacks) : NULL;
}

void zr_guard_callback(const char *name)
{
    if (atomic_load(&guards.has_callbacks))
        pthread_setspecific(guards.callbacks, name);
}

/* Makes the key for good, because a thread may use it at any time. The lock is held. */
static int take_key(void)
{
    if (atomic_load(&guards.has_callbacks))
        return 0;
    int err = pthread_key_create(&guards.callbacks, NULL);
    if (err)
        return zr_fail(ZERO_ERR_SYSTEM,
                       "check mode needs a key for thread-specific data, and the system has none: %s",
                       strerror(err));
    atomic_store(&guards.has_callbacks, true);
    return 0;
}

/* Deletes the key, for a process that unloads the library and loads it again. */
__attribute__((destructor)) static void give_key_back(void)
{
    if (atomic_exchange(&guards.has_callbacks, false))
        pthread_key_delete(guards.callbacks);
}

static int64_t up(int64_t n, int64_t to)
{
    return (n + to - 1) / to * to;
}

/* ---- touches ---- */

static int was_write(const ucontext_t *u)
{
#if defined(__x86_64__)
    return (u->uc_mcontext.gregs[REG_ERR] & 2) != 0;
#else
    (void)u;
    return -1;
#endif
}

static int32_t region_of(const struct zr_guard *g, const char *at)
{
    int32_t lo = 0, hi = g->n;
    while (lo < hi) {
        int32_t mid = (lo + hi) / 2;
        if (g->region[mid].from <= at)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo - 1;
}

/* The stores are atomic, because two threads that touched the same closed page both fill it. */
static void fill_with_nan(char *page, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i += (int64_t)sizeof(uint64_t))
        __atomic_store_n((uint64_t *)(void *)(page + i), UINT64_MAX, __ATOMIC_RELAXED);
}

/* Keeps the first touch. Waits until it is reported. */
static void note(struct zr_guard *g, const char *at, int write, const char *call)
{
    int32_t i = region_of(g, at);
    const struct region *r = &g->region[i];
    if (!atomic_exchange(&g->claimed, true)) {
        g->first = (struct zr_guard_touch){
            i, at - r->at, (enum zr_guard_mode)atomic_load(&r->mode), write, callback_of_thread(), call};
        atomic_store(&g->noted, true);
        if (g->reporter)
            zr_report_ask(g->reporter);
    }
    if (g->reporter)
        zr_report_wait(g->reporter);
}

static void touched(struct zr_guard *g, char *at, int write)
{
    const struct region *r = &g->region[region_of(g, at)];
    int mode = atomic_load(&r->mode);
    note(g, at, write, NULL);
    char *page = g->base + (at - g->base) / g->page * g->page;
    bool inside = page + g->page > r->at && page < r->at + r->bytes;
    mprotect(page, (size_t)g->page, PROT_READ | PROT_WRITE);
    if (!inside || mode == ZR_GUARD_CLOSED)
        fill_with_nan(page, g->page);
}

static void on_fault(int number, siginfo_t *info, void *context)
{
    int kept = errno;
    char *at = info->si_addr;
    bool sent = info->si_code <= 0; /* sent by kill() or the like: there is no address */
    bool ours = false;
    atomic_fetch_add(&guards.n_inside, 1);
    for (int i = 0; i < MAX_GUARDS && !ours && !sent; i++) {
        struct zr_guard *g = atomic_load(&guards.open[i]);
        ours = g && at >= g->base && at < g->base + g->bytes;
        if (ours)
            touched(g, at, was_write(context));
    }
    const struct sigaction before = guards.before;
    atomic_fetch_sub(&guards.n_inside, 1);
    errno = kept;
    if (ours)
        return;
    if (before.sa_flags & SA_SIGINFO) {
        before.sa_sigaction(number, info, context);
    } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
        before.sa_handler(number);
    } else if (before.sa_handler == SIG_DFL || !sent) {
        sigaction(number, &before, NULL); /* the same instruction faults again, and that action applies */
        if (sent)
            raise(number); /* blocked in this handler, so delivered on return */
    }
}

/* Returns the first byte of the range that may not be read, or written if write is set. NULL: all may. */
static const char *forbidden(const struct zr_guard *g, const char *at, size_t n, bool write)
{
    const char *end = g->base + g->bytes;
    if (at >= end || (at < g->base && (size_t)(g->base - at) >= n))
        return NULL;
    if (n < (size_t)(end - at))
        end = at + n;
    if (at < g->base)
        return g->base;
    const struct region *r = &g->region[region_of(g, at)];
    int64_t size = up(r->bytes, g->page);
    const char *open = r->from + size + g->page, *open_end = open + size;
    int mode = atomic_load(&r->mode);
    if (at < open || at >= open_end || mode == ZR_GUARD_CLOSED || (mode == ZR_GUARD_READ && write))
        return at;
    return end > open_end ? open_end : NULL;
}

static void on_call(const char *call, const void *at, size_t n, bool write)
{
    atomic_fetch_add(&guards.n_inside, 1);
    for (int i = 0; i < MAX_GUARDS; i++) {
        struct zr_guard *g = atomic_load(&guards.open[i]);
        const char *first = g && !atomic_load(&g->noted) ? forbidden(g, at, n, write) : NULL;
        if (first)
            note(g, first, write, call);
    }
    atomic_fetch_sub(&guards.n_inside, 1);
}

static void wait_for_handlers(void)
{
    while (atomic_load(&guards.n_inside) > 0)
        sched_yield();
}

/* ---- opening ---- */

static int enlist(struct zr_guard *g)
{
    int i = 0;
    pthread_mutex_lock(&guards.lock);
    int err = take_key();
    while (i < MAX_GUARDS && atomic_load(&guards.open[i]))
        i++;
    if (!err && i == MAX_GUARDS) {
        err = zr_fail(ZERO_ERR_NOMEM, "%d contexts with check are open already, the most that are allowed",
                      MAX_GUARDS);
    } else if (!err && guards.n_open == 0) {
        struct sigaction mine = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK};
        sigemptyset(&mine.sa_mask);
        wait_for_handlers();
        /* It is known before the handler is installed, which may run at once. */
        if (sigaction(SIGSEGV, NULL, &guards.before) || sigaction(SIGSEGV, &mine, NULL))
            err =
                zr_fail(ZERO_ERR_SYSTEM, "a handler for SIGSEGV could not be installed: %s", strerror(errno));
    }
    if (!err) {
        atomic_store(&guards.open[i], g);
        if (guards.n_open++ == 0)
            zr_guard_calls_watch(on_call);
    }
    pthread_mutex_unlock(&guards.lock);
    return err;
}

static void delist(struct zr_guard *g)
{
    pthread_mutex_lock(&guards.lock);
    for (int i = 0; i < MAX_GUARDS; i++) {
        if (atomic_load(&guards.open[i]) != g)
            continue;
        atomic_store(&guards.open[i], NULL);
        if (--guards.n_open > 0)
            continue;
        zr_guard_calls_forget();
        struct sigaction now;
        /* A handler that somebody installed later stays. */
        if (!sigaction(SIGSEGV, NULL, &now) && now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_fault)
            sigaction(SIGSEGV, &guards.before, NULL);
    }
    wait_for_handlers();
    pthread_mutex_unlock(&guards.lock);
}

int zr_guard_open(const struct zr_guard_region *want, int32_t n, void (*report)(void *arg), void *arg,
                  struct zr_guard **out)
{
    *out = NULL;
    struct zr_guard *g;
    ZR_TRY(ZR_ZALLOC_ARRAY(g, sizeof *g, n, sizeof g->region[0], "a guard of %d regions", n));
    g->page = sysconf(_SC_PAGESIZE);
    g->n = n;
    int64_t total = 0;
    for (int32_t i = 0; i < n; i++)
        total += 3 * up(want[i].bytes, g->page) + 2 * g->page;
    g->bytes = (size_t)total + (size_t)g->page;
    g->base = mmap(NULL, g->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (g->base == MAP_FAILED) {
        free(g);
        return zr_fail(ZERO_ERR_NOMEM, "no address space for a guard of %lld bytes", (long long)total);
    }
    char *at = g->base;
    for (int32_t i = 0; i < n; i++) {
        int64_t size = up(want[i].bytes, g->page);
        struct region *r = &g->region[i];
        r->from = at;
        r->bytes = want[i].bytes;
        r->at = at + size + g->page + size - up(want[i].bytes, want[i].align);
        at += 3 * size + 2 * g->page;
    }
    int err = report ? zr_reporter_open(report, arg, &g->reporter) : 0;
    if (!err)
        err = enlist(g);
    if (err) {
        zr_reporter_close(g->reporter);
        munmap(g->base, g->bytes);
        free(g);
        return err;
    }
    *out = g;
    return 0;
}

void zr_guard_close(struct zr_guard *g)
{
    if (!g)
        return;
    delist(g);
    zr_reporter_close(g->reporter);
    munmap(g->base, g->bytes);
    free(g);
}

char *zr_guard_at(const struct zr_guard *g, int32_t region)
{
    return g->region[region].at;
}

int zr_guard_set(struct zr_guard *g, int32_t region, enum zr_guard_mode mode)
{
    static const int protection[] = {
        [ZR_GUARD_CLOSED] = PROT_NONE, [ZR_GUARD_READ] = PROT_READ, [ZR_GUARD_OPEN] = PROT_READ | PROT_WRITE};
    struct region *r = &g->region[region];
    size_t size = (size_t)up(r->bytes, g->page);
    char *page = r->from + size + g->page;
    atomic_store(&r->mode, (int)mode);
    if (size == 0)
        return 0;
    if ((mode == ZR_GUARD_CLOSED && madvise(page, size, MADV_DONTNEED)) ||
        mprotect(page, size, protection[mode]))
        return zr_fail(ZERO_ERR_SYSTEM, "%zu bytes could not be protected: %s", size, strerror(errno));
    return 0;
}

bool zr_guard_touched(const struct zr_guard *g, struct zr_guard_touch *out)
{
    if (!atomic_load(&g->noted))
        return false;
    *out = g->first;
    return true;
}
