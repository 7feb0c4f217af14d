/* SPDX-License-Identifier: Apache-2.0 */
/* huge_pages.h: large pages for large memory of the host: fewer faults when it is first touched, and fewer
 * misses of the processor's table of pages. */
#ifndef ZR_KERNELS_HUGE_PAGES_H
#define ZR_KERNELS_HUGE_PAGES_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/mman.h>

/* The size of a huge page on x86-64. */
#define ZR_HUGE_PAGE_BYTES ((int64_t)2 << 20)

/* Linux 6.1; the C library may be older than the kernel. */
#if defined MADV_HUGEPAGE && !defined MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

/* Asks for them in the part of [at, at + bytes) that is whole ones, so that no more memory is taken than
 * without. Advice: where the kernel has none, or is told to give none, nothing changes. */
static inline void zr_ask_for_huge_pages(void *at, int64_t bytes)
{
#ifdef MADV_HUGEPAGE
    uintptr_t first = ((uintptr_t)at + ZR_HUGE_PAGE_BYTES - 1) / ZR_HUGE_PAGE_BYTES * ZR_HUGE_PAGE_BYTES;
    uintptr_t end = ((uintptr_t)at + (uintptr_t)bytes) / ZR_HUGE_PAGE_BYTES * ZR_HUGE_PAGE_BYTES;
    if (first < end)
        madvise((void *)first, end - first, MADV_HUGEPAGE);
#else
    (void)at, (void)bytes;
#endif
}

/* Makes them, now, of each whole one in [at, at + bytes) that has a page already. Shared memory gets none
 * otherwise where the kernel's setting for it is "never", as it is by default. False: not all of them, for
 * the kernel cannot, must not, or has no large pages left; what has none is as it was. */
static inline bool zr_make_huge_pages(void *at, int64_t bytes)
{
#ifdef MADV_COLLAPSE
    return madvise(at, (size_t)bytes, MADV_COLLAPSE) == 0;
#else
    (void)at, (void)bytes;
    return false;
#endif
}

#endif
