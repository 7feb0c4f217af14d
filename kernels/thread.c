/* SPDX-License-Identifier: Apache-2.0 */
/* thread.c: starts threads that block the program's signals. */
#include "kernels/thread.h"
#include "kernels/error.h"

#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

static void signals_to_block(sigset_t *mask)
{
    static const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
    sigfillset(mask);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        sigdelset(mask, own[i]);
}

static void *thread_main(void *arg)
{
    const struct zr_thread *t = arg;
    pthread_setname_np(pthread_self(), t->name);
    t->fn(t->arg);
    return NULL;
}

int zr_thread_start(struct zr_thread *t, const char *name, void (*fn)(void *arg), void *arg)
{
    sigset_t mask, old;
    t->fn = fn;
    t->arg = arg;
    snprintf(t->name, sizeof t->name, "%s", name);
    /* A thread inherits the mask of the thread that starts it, so no signal can reach it before it blocks
     * them. */
    signals_to_block(&mask);
    pthread_sigmask(SIG_SETMASK, &mask, &old);
    int err = pthread_create(&t->id, NULL, thread_main, t);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return err ? zr_fail(ZERO_ERR_SYSTEM, "thread %s could not be started: %s", t->name, strerror(err)) : 0;
}

void zr_thread_join(struct zr_thread *t)
{
    pthread_join(t->id, NULL);
}

void zr_thread_leave(struct zr_thread *t)
{
    pthread_detach(t->id);
}

int zr_thread_cores(void)
{
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}
