/* SPDX-License-Identifier: Apache-2.0 */
/* parallel.h: processes the blocks of a file on several threads. While one block is on its way to or from the
 * disk, another is filled or checked. */
#ifndef ZR_ZERO_PARALLEL_H
#define ZR_ZERO_PARALLEL_H

#include "zero/checkpoint/files.h"

/* Calls fn(arg, i, buffer) once for each i in [0, n). The calling thread and up to n_threads - 1 temporary
 * threads make the calls. Each thread has a buffer of buffer_bytes, aligned to ZR_DIRECT_ALIGN. Works with
 * fewer threads if further threads or their buffers cannot be allocated. After the first failure fn is called
 * for no further i. Blocks. Returns the first failure with its message, or ZERO_ERR_NOMEM if the calling
 * thread has no buffer. */
int zr_in_parallel(int64_t n, int n_threads, int64_t buffer_bytes,
                   int (*fn)(void *arg, int64_t i, char *buffer), void *arg);

#endif
