/* SPDX-License-Identifier: Apache-2.0 */
/* huge_pages.h: huge pages for large memory of the host. They cause fewer faults when the memory is first
 * touched, and fewer TLB misses. */
#ifndef ZR_KERNELS_HUGE_PAGES_H
#define ZR_KERNELS_HUGE_PAGES_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/mman.h>

/* The size of a huge page on x86-64. */
#define ZR_HUGE_PAGE_BYTES ((int64_t)2 << 20)

/* MADV_COLLAPSE came with Linux 6.1. The C library may be older than the kernel. */
#if defined MADV_HUGEPAGE && !defined MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

/* Asks for huge pages where whole ones fit into [at, at + bytes), so that no more memory is taken than
 * without. This is advice: a kernel without huge pages, or one that is set to give none, ignores it. */
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

/* Makes huge pages now, where whole ones fit into [at, at + bytes) and a page is there already. Shared memory
 * gets huge pages in no other way if the kernel's setting for it is "never", the default. Returns false if
 * some could not be made: the kernel cannot, may not, or has no memory for them. Their memory stays as it
 * was. */
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
