/* SPDX-License-Identifier: Apache-2.0 */
/* thread.h: the library's own threads. Each has a name, which debuggers and profilers show. It blocks the
 * program's signals, which are for the program's threads. Signals that a thread raises itself, such as
 * SIGSEGV, stay open. If a thread faults on a blocked signal, the kernel ends the process without calling a
 * handler. User callbacks such as optim.update run on these threads. */
#ifndef ZR_KERNELS_THREAD_H
#define ZR_KERNELS_THREAD_H

#include <pthread.h>

#define ZR_THREAD_NAME_BYTES 16 /* the kernel's limit; a longer name is cut */

/* A thread, in the caller's memory. The struct must stay in place until fn has begun or the thread was
 * joined. */
struct zr_thread {
    pthread_t id;
    void (*fn)(void *arg);
    void *arg;
    char name[ZR_THREAD_NAME_BYTES];
};

/* Runs fn(arg) on a new thread. After success, zr_thread_join or zr_thread_leave must follow. Returns
 * ZERO_ERR_SYSTEM with the system's reason if the thread cannot be started. */
int zr_thread_start(struct zr_thread *t, const char *name, void (*fn)(void *arg), void *arg);

/* Waits until fn has returned. */
void zr_thread_join(struct zr_thread *t);

/* Declares that nobody will join the thread. Call it before t is freed or used again. */
void zr_thread_leave(struct zr_thread *t);

/* Returns the number of cores that this process may use, at least 1. */
int zr_thread_cores(void);

#endif
