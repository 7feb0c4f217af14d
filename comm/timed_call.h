/* SPDX-License-Identifier: Apache-2.0 */
/* timed_call.h: runs a call that may never return on another thread, with a deadline. It is for libraries
 * whose calls have no time limit. A caller that waits in vain leaves the thread behind in the call.
 *
 * Thread-safety: any thread may start a task; one thread awaits it. */
#ifndef ZR_COMM_TIMED_CALL_H
#define ZR_COMM_TIMED_CALL_H

#include "kernels/device.h"

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

struct zr_rendezvous;
struct zr_task;

/* The call to make. */
struct zr_task_call {
    /* The call's name for messages: "ncclCommAbort". */
    const char *what;
    /* Name of the thread. */
    const char *thread;
    /* Device to make current on the thread, or NULL. It must live until the call is over, or is left behind
     * before it has begun. */
    struct zr_device *dev;
    int (*fn)(void *arg);
    /* Result if the device cannot be made current; fn is not called then. */
    int unbegun;
    /* For zr_timed_call, before zr_rendezvous_detach: a failure of another rank ends the wait. NULL: it does
     * not. */
    struct zr_rendezvous *look;
    /* For zr_timed_call: called with watch_arg now and then while it waits. A failure ends the wait. NULL:
     * none is called. */
    int (*watch)(void *watch_arg);
    void *watch_arg;
    /* What limits the wait of zr_timed_call, for its message: " (start_timeout_ms)". NULL: no field does. */
    const char *limit;
};

/* Calls fn with a copy of arg on a new thread. arg has this many bytes and may be freed when this returns.
 * After 0, call zr_task_await once. Otherwise returns ZERO_ERR_NOMEM or ZERO_ERR_SYSTEM with a message. */
int zr_task_start(const struct zr_task_call *call, const void *arg, size_t bytes, struct zr_task **out);

/* Waits for a task. Returns true if the call returned within ms: *res is its result, and arg gets the content
 * of the copy. Otherwise returns false; the thread is left behind, and cleans up when the call returns. */
bool zr_task_await(struct zr_task *t, int64_t ms, void *arg, int *res);

/* Starts a call and awaits it. Returns 0 with *res and arg set. Otherwise returns why the call could not be
 * started, or, with *left set, why it was left behind: ZERO_ERR_TIMEOUT, or the failure of look or watch. */
int zr_timed_call(const struct zr_task_call *call, int64_t ms, void *arg, size_t bytes, int *res, bool *left);

/* Initializes a condition whose timed waits use the clock of zr_in_ns. */
void zr_cond_init(pthread_cond_t *c);
/* The time ns from now. */
struct timespec zr_in_ns(int64_t ns);

#endif
