/* SPDX-License-Identifier: Apache-2.0 */
/* parallel.h: the blocks of a file, several at a time: while one is on its way to or from the disk, another
 * is being filled or checked. */
#ifndef ZR_ZERO_PARALLEL_H
#define ZR_ZERO_PARALLEL_H

#include "zero/checkpoint/files.h"

/* Calls fn(arg, i, buffer) once for each i in [0, n), from the calling thread and up to n_threads - 1 others
 * that live as long as the call; each has a buffer of its own of buffer_bytes, aligned to ZR_DIRECT_ALIGN.
 * Threads and buffers that cannot be had are done without, but for the caller's own buffer. The first
 * failure ends it: fn is called for no further i, and its code and message are the caller's. ZR_ERR_NOMEM;
 * what fn returns. Blocking. */
int zr_in_parallel(int64_t n, int n_threads, int64_t buffer_bytes,
                   int (*fn)(void *arg, int64_t i, char *buffer), void *arg);

#endif
