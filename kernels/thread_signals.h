/* thread_signals.h: the signal mask of the library's own threads.
 *
 * The program's signals are for its own threads, so a thread of the library blocks them. Those that a thread
 * raises by what it does stay open: the kernel ends a process at once, past every handler, when a thread
 * faults on a signal that it blocks, and user callbacks (cfg.update) run on threads of the library. */
#ifndef ZR_KERNELS_THREAD_SIGNALS_H
#define ZR_KERNELS_THREAD_SIGNALS_H

#include <signal.h>
#include <stddef.h>

static inline void zr_thread_signals(sigset_t *mask)
{
    static const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
    sigfillset(mask);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        sigdelset(mask, own[i]);
}

#endif
