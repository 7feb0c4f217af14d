/* SPDX-License-Identifier: Apache-2.0 */
/* timed_call.c: a thread for each call. The caller waits for it on a condition, and the last of the two to
 * leave frees the task. */
#include "comm/timed_call.h"
#include "comm/meet/rendezvous.h"
#include "kernels/alloc.h"
#include "kernels/error.h"
#include "kernels/thread.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { LOOK_NS = 20 * 1000 * 1000 };

struct zr_task {
    struct zr_thread thread;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    bool done, left; /* left: the caller no longer waits, so the thread cleans up */
    int res;
    struct zr_task_call call;
    size_t bytes;
    _Alignas(16) char arg[];
};

void zr_cond_init(pthread_cond_t *c)
{
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(c, &attr);
    pthread_condattr_destroy(&attr);
}

struct timespec zr_in_ns(int64_t ns)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_sec += (ns + t.tv_nsec) / 1000000000;
    t.tv_nsec = (ns + t.tv_nsec) % 1000000000;
    return t;
}

static void free_task(struct zr_task *t)
{
    pthread_cond_destroy(&t->ended);
    pthread_mutex_destroy(&t->lock);
    free(t);
}

static void run_task(void *arg)
{
    struct zr_task *t = arg;
    /* Hold the lock: a caller that leaves the thread behind may close the device. */
    pthread_mutex_lock(&t->lock);
    bool left = t->left;
    int err = 0;
    if (!left)
        err = t->call.dev ? zr_thread_begin(t->call.dev) : 0;
    pthread_mutex_unlock(&t->lock);
    int res = t->call.unbegun;
    if (!left && !err)
        res = t->call.fn(t->arg);
    pthread_mutex_lock(&t->lock);
    t->res = res;
    t->done = true;
    left = t->left;
    pthread_cond_signal(&t->ended);
    pthread_mutex_unlock(&t->lock);
    if (left)
        free_task(t);
}

int zr_task_start(const struct zr_task_call *call, const void *arg, size_t bytes, struct zr_task **out)
{
    struct zr_task *t;
    ZR_TRY(ZR_ZALLOC_ARRAY(t, sizeof *t, (int64_t)bytes, 1, "the thread of %s", call->what));
    pthread_mutex_init(&t->lock, NULL);
    zr_cond_init(&t->ended);
    t->call = *call;
    t->bytes = bytes;
    memcpy(t->arg, arg, bytes);
    int err = zr_thread_start(&t->thread, call->thread, run_task, t);
    if (err) {
        free_task(t);
        return zr_fail_more(err, "%s", call->what);
    }
    zr_thread_leave(&t->thread); /* the task stays until its caller has waited for it */
    *out = t;
    return 0;
}

/* Waits for the end of the call, at most ns. Returns whether it has ended. */
static bool wait_for(struct zr_task *t, int64_t ns)
{
    struct timespec until = zr_in_ns(ns);
    pthread_mutex_lock(&t->lock);
    while (!t->done && pthread_cond_timedwait(&t->ended, &t->lock, &until) != ETIMEDOUT)
        ;
    bool done = t->done;
    pthread_mutex_unlock(&t->lock);
    return done;
}

/* Stops waiting. Returns false if the call has ended by now. */
static bool stop_waiting(struct zr_task *t)
{
    pthread_mutex_lock(&t->lock);
    t->left = !t->done;
    bool left = t->left;
    pthread_mutex_unlock(&t->lock);
    return left;
}

static void take_result(struct zr_task *t, void *arg, int *res)
{
    if (t->bytes)
        memcpy(arg, t->arg, t->bytes);
    *res = t->res;
    free_task(t);
}

bool zr_task_await(struct zr_task *t, int64_t ms, void *arg, int *res)
{
    if (!wait_for(t, ms * 1000000) && stop_waiting(t))
        return false;
    take_result(t, arg, res);
    return true;
}

int zr_timed_call(const struct zr_task_call *call, int64_t ms, void *arg, size_t bytes, int *res, bool *left)
{
    struct zr_task *t;
    int err = zr_task_start(call, arg, bytes, &t);
    *left = false;
    if (err)
        return err;
    int64_t ns = ms * 1000000, until = zr_now_ns() + ns;
    while (!err && ns > 0 && !wait_for(t, (call->look || call->watch) && ns > LOOK_NS ? LOOK_NS : ns)) {
        err = call->look ? zr_rendezvous_look(call->look) : 0;
        err = !err && call->watch ? call->watch(call->watch_arg) : err;
        ns = until - zr_now_ns();
    }
    *left = stop_waiting(t);
    if (!*left) {
        take_result(t, arg, res);
        return 0;
    }
    return err ? zr_fail_more(err, "%s", call->what)
               : zr_fail(ZERO_ERR_TIMEOUT, "%s has not returned after %lld ms%s", call->what, (long long)ms,
                         call->limit ? call->limit : "");
}
