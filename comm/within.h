/* SPDX-License-Identifier: Apache-2.0 */
/* within.h: a call that may never come back, of a library that has no deadline of its own, made on another
 * thread: whoever wants its result waits so long, and then leaves the thread behind in it.
 *
 * Thread-safety: any thread may start one; one thread awaits it. */
#ifndef ZR_COMM_WITHIN_H
#define ZR_COMM_WITHIN_H

#include "kernels/device.h"

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

struct zr_rendezvous;
struct zr_task;

/* What is to be called. */
struct zr_task_call {
    /* for messages: "ncclCommAbort" */
    const char *what;
    /* of the thread */
    const char *thread;
    /* made current on it; it must live until the call is over, or is left behind before it has begun; NULL:
     * none */
    struct zr_device *dev;
    int (*fn)(void *arg);
    /* what fn would have returned where the device cannot be made current; fn is not called then */
    int unbegun;
    /* for zr_within, before the detach: the failure of another rank ends the wait. NULL: it does not. */
    struct zr_rendezvous *look;
    /* what bounds the wait of zr_within, for its message: " (start_timeout_ms)"; NULL: no field does */
    const char *limit;
};

/* Calls fn(copy of arg). bytes: of arg, which may be freed when this returns. 0, to be followed by
 * zr_task_await once; or ZR_ERR_NOMEM, ZR_ERR_SYSTEM with a message. */
int zr_task_start(const struct zr_task_call *call, const void *arg, size_t bytes, struct zr_task **out);

/* true: it came back within ms, *res is what it returned and arg what the copy became. false: it is left to
 * itself, and cleans up behind it. */
bool zr_task_await(struct zr_task *t, int64_t ms, void *arg, int *res);

/* Both: 0 with *res and arg; or why it could not be started, or, with *left, was left behind: ZR_ERR_TIMEOUT,
 * or the failure of another rank. */
int zr_within(const struct zr_task_call *call, int64_t ms, void *arg, size_t bytes, int *res, bool *left);

/* A condition whose timed waits go by the clock of zr_in_ns. */
void zr_cond_init(pthread_cond_t *c);
/* When it will be, ns from now. */
struct timespec zr_in_ns(int64_t ns);

#endif
