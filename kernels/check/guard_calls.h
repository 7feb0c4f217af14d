/* SPDX-License-Identifier: Apache-2.0 */
/* guard_calls.h: looks at the memory that a program gives to the kernel through write(), fread() and similar
 * calls.
 *
 * A system call that is given closed memory raises no signal. It fails with EFAULT or does less than
 * requested, and few programs check that. So while a guard is open, functions here stand in for these
 * functions of the C library, and look first. They replace the entries in the tables of imported functions
 * (ELF's global offset tables) of every loaded program and library. Closing the last guard restores the
 * entries. This needs no privilege, and does not affect children that the program starts.
 *
 * Some calls are not seen: those of a statically linked program, of libraries loaded later, through pointers
 * taken before or by dlsym, and syscall(), io_uring and aio_write(). */
#ifndef ZR_KERNELS_GUARD_CALLS_H
#define ZR_KERNELS_GUARD_CALLS_H

#include <stdbool.h>
#include <stddef.h>

/* Before each call, look(call, at, n, write) runs on its thread. The kernel will read these n bytes, or write
 * them if write is set. Only one thread at a time may call the two functions. */
void zr_guard_calls_watch(void (*look)(const char *call, const void *at, size_t n, bool write));
void zr_guard_calls_forget(void);

#endif
