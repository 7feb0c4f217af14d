/* SPDX-License-Identifier: Apache-2.0 */
/* guard_calls.h: sees what a program hands to the kernel: the ranges of memory it gives to write(), fread()
 * and their like.
 *
 * A system call that is given closed memory raises no signal: it fails with EFAULT or does less than it was
 * asked, and few programs look. So, while a guard is open, the calls of every loaded program and library to
 * these functions of the C library go through functions here, which look first: their entries in the tables
 * of imported functions (ELF's global offset tables) are exchanged, and put back with the last guard. This
 * needs no privilege, and children that the program starts are not concerned. Not seen: calls of a statically
 * linked program, of libraries loaded later, through pointers taken before or by dlsym, syscall(), io_uring
 * and aio_write(). */
#ifndef ZR_KERNELS_GUARD_CALLS_H
#define ZR_KERNELS_GUARD_CALLS_H

#include <stdbool.h>
#include <stddef.h>

/* look(call, at, n, write) runs before each call, on its thread: n bytes that the kernel will write or read.
 * Both one thread at a time. */
void zr_guard_calls_watch(void (*look)(const char *call, const void *at, size_t n, bool write));
void zr_guard_calls_forget(void);

#endif
