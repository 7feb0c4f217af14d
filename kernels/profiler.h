/* SPDX-License-Identifier: Apache-2.0 */
/* profiler.h: ranges that show what the calling thread is doing, in the domain "libzero". They are for a
 * profiler that is attached to the process, such as Nsight Systems, and that supports NVTX 3
 * (github.com/NVIDIA/NVTX).
 *
 * Thread-safety: all functions except open and close may be called from any thread. Nothing blocks or
 * fails. */
#ifndef ZR_KERNELS_PROFILER_H
#define ZR_KERNELS_PROFILER_H

#include <stdint.h>

struct zr_profiler;

/* Returns NULL if no profiler is attached, or if the build found no NVTX header. Then the functions below,
 * except close, must not be called. */
struct zr_profiler *zr_profiler_open(void);
/* p may be NULL. */
void zr_profiler_close(struct zr_profiler *p);

/* Nested ranges of one thread, named "what unit", or "what" if unit is -1. Work that the thread launches
 * meanwhile belongs to them. */
void zr_profiler_push(struct zr_profiler *p, const char *what, int32_t unit);
void zr_profiler_pop(struct zr_profiler *p);

/* Ranges that begin and end in any order. The result identifies the range for zr_profiler_end. */
uint64_t zr_profiler_begin(struct zr_profiler *p, const char *what, int32_t unit);
void zr_profiler_end(struct zr_profiler *p, uint64_t range);

#endif
