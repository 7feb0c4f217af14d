/* SPDX-License-Identifier: Apache-2.0 */
/* thread.h: the library's own threads. Each has a name, which debuggers and profilers show, and blocks the
 * program's signals, which are for the program's threads. Those that a thread raises by what it does stay
 * open: the kernel ends a process at once, past every handler, when a thread faults on a signal that it
 * blocks, and user callbacks (optim.update) run on threads of the library. */
#ifndef ZR_KERNELS_THREAD_H
#define ZR_KERNELS_THREAD_H

#include <pthread.h>

#define ZR_THREAD_NAME_BYTES 16 /* the kernel's; a longer name is cut */

/* The caller's memory; it stays where it is until fn has begun, or the thread was joined. */
struct zr_thread {
    pthread_t id;
    void (*fn)(void *arg);
    void *arg;
    char name[ZR_THREAD_NAME_BYTES];
};

/* Runs fn(arg) on a new thread. 0, to be followed by zr_thread_join or zr_thread_leave; or ZR_ERR_SYSTEM,
 * with the system's words for why there is none. */
int zr_thread_start(struct zr_thread *t, const char *name, void (*fn)(void *arg), void *arg);

/* Waits until fn has returned. */
void zr_thread_join(struct zr_thread *t);

/* Nobody will wait for it. Before the memory of t may go. */
void zr_thread_leave(struct zr_thread *t);

/* Cores that this process may use; at least 1. */
int zr_thread_cores(void);

#endif
