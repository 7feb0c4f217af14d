/* SPDX-License-Identifier: Apache-2.0 */
/* loop.c: the loop's thread, and the queue of jobs. */
#include "shard/engine/loop.h"
#include "kernels/alloc.h"
#include "kernels/limits.h"
#include "kernels/thread.h"
#include "shard/layout.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

enum {
    SLICE_MS = 50,       /* how often a wait looks whether the loop has moved */
    DRAIN_TRIES = 200,   /* of zr_loop_drain, before it waits for the loop's thread */
    CLOSE_MS = 5000,     /* least time for the thread to end */
    LOOP_DESCRIPTORS = 6 /* of the first loop of a process: poll, signals and wake-up */
};

/* The loop whose job this thread is carrying out. */
static _Thread_local const struct zr_loop *inside;

struct zr_loop {
    uv_loop_t uv;
    uv_async_t wake;
    struct zr_thread thread;
    bool started;
    int64_t spin_ns;

    void (*issue)(void *arg, const struct zr_job *job);
    bool (*ready)(void *arg, const struct zr_job *job, bool is_loop); /* NULL: every job is ready */
    void *arg;

    uv_mutex_t issuing; /* held by the thread that carries out jobs */
    uint64_t mask;
    struct zr_job *ring; /* (mask + 1) */
    _Atomic uint64_t n_pushed, n_issued;
    _Atomic bool asleep; /* the loop will not look at the queue again by itself */
    _Atomic bool stop;

    /* Only for the model's thread when it has to wait for the loop. */
    uv_mutex_t lock;
    uv_cond_t issued; /* also signalled when the thread has ended */
    _Atomic bool waited_for;
    bool ended;
    _Atomic uint64_t turns; /* counts every job and every look at the queue */

    /* For the model's thread. */
    int64_t limit_ms; /* 0: no limit */
    void (*stuck)(void *arg, int64_t ms);
    void *stuck_arg;
    bool is_stuck;

    void (*on_start)(void *arg), (*on_stop)(void *arg);
    void *start_arg, *stop_arg;

    bool driven;
    struct zr_loop_driver driver;
};

void zr_loop_ask(struct zr_loop *l, bool (*ready)(void *arg, const struct zr_job *job, bool is_loop))
{
    l->ready = ready;
}

void zr_loop_limit(struct zr_loop *l, int64_t limit_ms, void (*stuck)(void *arg, int64_t ms), void *arg)
{
    l->limit_ms = limit_ms;
    l->stuck = stuck;
    l->stuck_arg = arg;
}

uv_loop_t *zr_loop_uv(struct zr_loop *l)
{
    return &l->uv;
}

/* Counts a move of the loop, or a job of either thread. */
static void turn(struct zr_loop *l)
{
    atomic_fetch_add_explicit(&l->turns, 1, memory_order_relaxed);
}

static void issue_one(struct zr_loop *l, const struct zr_job *job)
{
    const struct zr_loop *outer = inside;
    inside = l;
    l->issue(l->arg, job);
    inside = outer;
}

bool zr_loop_is_inside(const struct zr_loop *l)
{
    return inside == l;
}

/* Carries out jobs up to the first that is not ready. The calling thread holds the lock. Returns whether such
 * a job is left. */
static bool issue_ready(struct zr_loop *l, bool is_loop)
{
    uint64_t done = atomic_load_explicit(&l->n_issued, memory_order_relaxed);
    uint64_t pushed = atomic_load_explicit(&l->n_pushed, memory_order_acquire);
    for (; done < pushed; done++) {
        if (l->ready && !l->ready(l->arg, &l->ring[done & l->mask], is_loop))
            return true;
        issue_one(l, &l->ring[done & l->mask]);
        turn(l);
        /* Sequentially consistent against waited_for: either the waiter sees the count or we see the waiter.
         */
        atomic_store(&l->n_issued, done + 1);
        if (atomic_load(&l->waited_for)) {
            uv_mutex_lock(&l->lock);
            uv_cond_broadcast(&l->issued);
            uv_mutex_unlock(&l->lock);
        }
    }
    return false;
}

/* Carries out jobs, unless the other thread is doing so. Neither thread waits for the other here. Returns
 * whether it was this thread's turn. *held: whether jobs may be left. */
static bool issue_all(struct zr_loop *l, bool is_loop, bool *held)
{
    *held = false;
    if (atomic_load_explicit(&l->n_issued, memory_order_acquire) == atomic_load(&l->n_pushed))
        return false;
    *held = true;
    if (uv_mutex_trylock(&l->issuing))
        return false;
    *held = issue_ready(l, is_loop);
    uv_mutex_unlock(&l->issuing);
    return true;
}

static void on_wake(uv_async_t *a)
{
    struct zr_loop *l = a->data;
    atomic_store(&l->asleep, false);
    int64_t until = 0;
    for (;;) {
        turn(l);
        bool held, issued = issue_all(l, true, &held);
        if (held) { /* sockets are served first, then the job is tried again */
            const struct timespec nap = {.tv_nsec = 20000};
            nanosleep(&nap, NULL);
            uv_async_send(a);
            return;
        }
        if (issued) {
            until = l->spin_ns ? zr_now_ns() + l->spin_ns : 0;
            continue;
        }
        if (until && zr_now_ns() < until && !atomic_load_explicit(&l->stop, memory_order_relaxed))
            continue;
        /* Announce sleep, then look once more: a push after this look sees the announcement and wakes the
         * loop. Both sides store, then load, sequentially consistent, so one of them sees the other. */
        atomic_store(&l->asleep, true);
        if (atomic_load(&l->n_pushed) == atomic_load(&l->n_issued))
            break;
        atomic_store(&l->asleep, false);
    }
    if (atomic_load(&l->stop) && !uv_is_closing((uv_handle_t *)a)) {
        if (l->on_stop)
            l->on_stop(l->stop_arg);
        uv_close((uv_handle_t *)a, NULL);
    }
}

static int open_queue(int32_t n_jobs, void (*issue)(void *, const struct zr_job *), void *arg,
                      struct zr_loop **out)
{
    struct zr_loop *l;
    ZR_TRY(ZR_ZALLOC(l, 1, "the loop"));
    l->issue = issue;
    l->arg = arg;
    l->mask = 1;
    while (l->mask + 1 < (uint64_t)n_jobs)
        l->mask = l->mask << 1 | 1;
    int err = ZR_ZALLOC(l->ring, (int64_t)l->mask + 1, "a queue of %d jobs", n_jobs);
    if (err) {
        free(l);
        return err;
    }
    uv_mutex_init(&l->issuing);
    *out = l;
    return 0;
}

static void close_queue(struct zr_loop *l)
{
    if (inside == l) /* a simulated rank died in a job */
        inside = NULL;
    uv_mutex_destroy(&l->issuing);
    free(l->ring);
    free(l);
}

int zr_loop_open_driven(int32_t n_jobs, void (*issue)(void *, const struct zr_job *), void *arg,
                        const struct zr_loop_driver *driver, struct zr_loop **out)
{
    int err = open_queue(n_jobs, issue, arg, out);
    if (err)
        return err;
    (*out)->driven = true;
    (*out)->driver = *driver;
    return 0;
}

uint64_t zr_loop_issue_next(struct zr_loop *l)
{
    uint64_t done = atomic_load(&l->n_issued);
    if (done == atomic_load(&l->n_pushed))
        return 0;
    issue_one(l, &l->ring[done & l->mask]);
    atomic_store(&l->n_issued, done + 1);
    return done + 1;
}

int zr_loop_open(int32_t n_jobs, void (*issue)(void *, const struct zr_job *), void *arg,
                 struct zr_loop **out)
{
    struct zr_loop *l = NULL;
    int err = open_queue(n_jobs, issue, arg, &l);
    if (err)
        return err;
    atomic_store(&l->asleep, true);
    /* uv_loop_init aborts the process if it cannot open the first of these descriptors. */
    err = -zr_no_descriptors(LOOP_DESCRIPTORS);
    if (!err)
        err = uv_loop_init(&l->uv);
    if (err) {
        char why[ZR_SYSTEM_WORDS];
        close_queue(l);
        return zr_fail(ZERO_ERR_SYSTEM, "uv_loop_init: %s", zr_limit_words(-err, uv_strerror(err), why));
    }
    err = uv_async_init(&l->uv, &l->wake, on_wake);
    if (err) {
        uv_loop_close(&l->uv);
        close_queue(l);
        return zr_fail(ZERO_ERR_SYSTEM, "uv_async_init: %s", uv_strerror(err));
    }
    l->wake.data = l;
    uv_mutex_init(&l->lock);
    uv_cond_init(&l->issued);
    /* The rendezvous before start also runs the loop, and must end although this handle is open. */
    uv_unref((uv_handle_t *)&l->wake);
    *out = l;
    return 0;
}

static void run(void *arg)
{
    struct zr_loop *l = arg;
    if (l->on_start)
        l->on_start(l->start_arg);
    uv_run(&l->uv, UV_RUN_DEFAULT);
    uv_mutex_lock(&l->lock);
    l->ended = true;
    uv_cond_broadcast(&l->issued);
    uv_mutex_unlock(&l->lock);
}

int zr_loop_start(struct zr_loop *l, int64_t spin_ns, void (*on_start)(void *), void *arg)
{
    l->spin_ns = spin_ns;
    l->on_start = on_start;
    l->start_arg = arg;
    uv_ref((uv_handle_t *)&l->wake);
    /* SIGPIPE is blocked too: a write to a rank that died must be an error, not the end of this process. */
    int err = zr_thread_start(&l->thread, "zero-loop", run, l);
    if (err) {
        uv_unref((uv_handle_t *)&l->wake);
        return err;
    }
    l->started = true;
    return 0;
}

uint64_t zr_loop_push(struct zr_loop *l, const struct zr_job *job)
{
    uint64_t n = atomic_load_explicit(&l->n_pushed, memory_order_relaxed);
    if (l->is_stuck)
        return 0;
    if (n - atomic_load_explicit(&l->n_issued, memory_order_acquire) > l->mask) {
        zr_loop_kick(l);
        if (!zr_loop_await(l, n - l->mask))
            return 0;
    }
    l->ring[n & l->mask] = *job;
    atomic_store(&l->n_pushed, n + 1);
    if (l->driven)
        l->driver.pushed(l->driver.arg);
    return n + 1;
}

void zr_loop_kick(struct zr_loop *l)
{
    /* uv_async_send itself begins with a relaxed read of its pending flag: having seen `asleep` here, it
     * cannot see that flag as it was before the loop's last round (libuv issues 349 and 4584). */
    if (l->driven || atomic_load(&l->n_issued) == atomic_load_explicit(&l->n_pushed, memory_order_relaxed))
        return;
    if (atomic_load(&l->asleep))
        uv_async_send(&l->wake);
}

bool zr_loop_issued(const struct zr_loop *l, uint64_t number)
{
    return atomic_load_explicit(&l->n_issued, memory_order_acquire) >= number;
}

/* How long the loop has not moved, as far as the model's thread has watched. */
struct watch {
    uint64_t turns;
    int64_t still_ns;
};

static void watch_begin(struct zr_loop *l, struct watch *w)
{
    *w = (struct watch){.turns = atomic_load_explicit(&l->turns, memory_order_relaxed)};
}

/* With the lock held: waits for a slice, or until something has changed. If it took longer, the process was
 * stopped, or this thread had no core. The same may be true for the loop's thread, so the excess does not
 * count. */
static void watch_slice(struct zr_loop *l, struct watch *w)
{
    const int64_t slice_ns = SLICE_MS * INT64_C(1000000);
    int64_t from = zr_now_ns();
    uv_cond_timedwait(&l->issued, &l->lock, (uint64_t)slice_ns);
    w->still_ns += zr_min(zr_now_ns() - from, 2 * slice_ns);
    uint64_t turns = atomic_load_explicit(&l->turns, memory_order_relaxed);
    if (turns != w->turns)
        *w = (struct watch){.turns = turns};
}

/* Call it with the lock held. */
static bool await_issued(struct zr_loop *l, uint64_t number, struct watch *w)
{
    watch_begin(l, w);
    while (atomic_load(&l->n_issued) < number) {
        if (l->limit_ms && w->still_ns >= l->limit_ms * 1000000)
            return false;
        watch_slice(l, w);
    }
    return true;
}

bool zr_loop_await(struct zr_loop *l, uint64_t number)
{
    /* Usually the job was carried out long ago, or is being carried out now. */
    for (int i = 0; i < 100; i++) {
        if (atomic_load_explicit(&l->n_issued, memory_order_acquire) >= number)
            return true;
    }
    if (l->driven) {
        l->driver.awaited(l->driver.arg, number);
        return true;
    }
    if (l->is_stuck)
        return false;
    struct watch w;
    uv_mutex_lock(&l->lock);
    atomic_store(&l->waited_for, true);
    bool issued = await_issued(l, number, &w);
    atomic_store(&l->waited_for, false);
    uv_mutex_unlock(&l->lock);
    l->is_stuck = !issued;
    if (!issued)
        l->stuck(l->stuck_arg, w.still_ns / 1000000);
    return issued;
}

bool zr_loop_drain(struct zr_loop *l)
{
    uint64_t number = atomic_load_explicit(&l->n_pushed, memory_order_relaxed);
    bool held;
    if (l->driven) {
        l->driver.awaited(l->driver.arg, number);
        return true;
    }
    /* If the loop's thread carries out a job just now, it usually takes no longer than this. */
    for (int i = 0; i < DRAIN_TRIES && !l->is_stuck; i++) {
        bool had_turn = issue_all(l, false, &held);
        if (zr_loop_issued(l, number))
            return true;
        if (had_turn && held)
            break;
    }
    zr_loop_kick(l);
    return zr_loop_await(l, number);
}

/* Waits for the thread of a loop that is stopping. Returns false if it does not end. */
static bool has_ended(struct zr_loop *l)
{
    int64_t limit_ms = l->is_stuck ? CLOSE_MS : zr_max(CLOSE_MS, l->limit_ms);
    struct watch w;
    uv_mutex_lock(&l->lock);
    watch_begin(l, &w);
    while (!l->ended && w.still_ns < limit_ms * 1000000)
        watch_slice(l, &w);
    bool ended = l->ended;
    uv_mutex_unlock(&l->lock);
    return ended;
}

bool zr_loop_close(struct zr_loop *l, void (*on_stop)(void *), void *arg)
{
    if (!l)
        return true;
    if (l->driven) {
        close_queue(l);
        return true;
    }
    l->on_stop = on_stop;
    l->stop_arg = arg;
    atomic_store(&l->stop, true);
    if (!l->started)
        uv_ref((uv_handle_t *)&l->wake);
    uv_async_send(&l->wake);
    if (l->started && !has_ended(l)) {
        zr_thread_leave(&l->thread);
        return false;
    }
    if (l->started)
        zr_thread_join(&l->thread);
    else
        uv_run(&l->uv, UV_RUN_DEFAULT);
    uv_loop_close(&l->uv);
    uv_mutex_destroy(&l->lock);
    uv_cond_destroy(&l->issued);
    close_queue(l);
    return true;
}
