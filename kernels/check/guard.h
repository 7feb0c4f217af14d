/* SPDX-License-Identifier: Apache-2.0 */
/* guard.h: memory that notices forbidden touches. It consists of regions of pages that are closed, open for
 * reading, or open. The first touch that was not allowed is noted.
 *
 * A forbidden touch, even a read, is a fault of the processor, which is found where it happens. A handler
 * notes it, and a thread of the guard reports it at once (guard_report.h). The page opens, filled with NaN
 * bytes if it was closed, and the program goes on. Each region ends at a closed page, up to its alignment. On
 * both sides it has closed space of at least its size, so that a touch outside it is known as such.
 *
 * While any guard is open, the process has a handler for SIGSEGV. It passes on what is not a guard's. Closing
 * the last guard restores the handler before it. If the program installs another handler meanwhile, that one
 * gets the signal of a forbidden touch, and the touch is not noted.
 *
 * A system call that is given a closed address raises no signal but fails with EFAULT. Calls through the C
 * library are noted, too (guard_calls.h).
 *
 * Thread-safety: one thread opens, closes and changes a guard. Touches come from any thread. */
#ifndef ZR_KERNELS_GUARD_H
#define ZR_KERNELS_GUARD_H

#include <stdbool.h>
#include <stdint.h>

struct zr_guard;

enum zr_guard_mode { ZR_GUARD_CLOSED, ZR_GUARD_READ, ZR_GUARD_OPEN };

struct zr_guard_touch {
    int32_t region;
    /* offset of the byte in the region; negative or beyond its end: outside the region */
    int64_t offset;
    enum zr_guard_mode mode;
    /* 1: a write. 0: a read. -1: this machine does not say. */
    int write;
    /* program's function in which the thread was (zr_guard_callback); NULL: none */
    const char *callback;
    /* call that was given the address, such as "fwrite"; NULL: the program touched it directly */
    const char *call;
};

struct zr_guard_region {
    /* size, 0 or more */
    int64_t bytes;
    /* A power of two, at most a page. Bytes from the region's end to the next multiple are not closed. */
    int64_t align;
};

/* Opens n regions, all closed. After the first forbidden touch, report(arg) runs on a separate thread, while
 * the thread that touched waits, 2 s at most. report may be NULL. Returns ZERO_ERR_NOMEM if address space or
 * the number of guards in the process (64) runs out. Returns ZERO_ERR_SYSTEM without a handler or a
 * thread. */
int zr_guard_open(const struct zr_guard_region *want, int32_t n, void (*report)(void *arg), void *arg,
                  struct zr_guard **out);
/* NULL is allowed. */
void zr_guard_close(struct zr_guard *g);
char *zr_guard_at(const struct zr_guard *g, int32_t region);
/* Sets the mode of a region. Closing discards what is in it. */
int zr_guard_set(struct zr_guard *g, int32_t region, enum zr_guard_mode mode);
/* Names the program's function that the calling thread runs from here on. name is a literal; NULL: none. */
void zr_guard_callback(const char *name);
/* Returns whether there was a forbidden touch, with the first one. */
bool zr_guard_touched(const struct zr_guard *g, struct zr_guard_touch *out);

#endif
