/* SPDX-License-Identifier: Apache-2.0 */
/* profiler.h: ranges for a profiler that is attached to the process (Nsight Systems and others that speak
 * NVTX 3, github.com/NVIDIA/NVTX): what the calling thread is doing, in the domain "libzero".
 *
 * Thread-safety: all but open and close may be called from any thread. Nothing blocks or fails. */
#ifndef ZR_KERNELS_PROFILER_H
#define ZR_KERNELS_PROFILER_H

#include <stdint.h>

struct zr_profiler;

/* NULL where no profiler is attached, or the build found no NVTX header: then nothing is to be called. */
struct zr_profiler *zr_profiler_open(void);
/* NULL is allowed. */
void zr_profiler_close(struct zr_profiler *p);

/* Ranges of one thread that nest, named "what unit" (unit -1: "what"): work that the thread launches
 * meanwhile counts as theirs. */
void zr_profiler_push(struct zr_profiler *p, const char *what, int32_t unit);
void zr_profiler_pop(struct zr_profiler *p);

/* Ranges that begin and end in any order; the result names the range to zr_profiler_end. */
uint64_t zr_profiler_begin(struct zr_profiler *p, const char *what, int32_t unit);
void zr_profiler_end(struct zr_profiler *p, uint64_t range);

#endif
