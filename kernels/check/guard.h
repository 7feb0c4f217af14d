/* SPDX-License-Identifier: Apache-2.0 */
/* guard.h: memory that tells who touches it: regions of pages that are closed to everyone, open for reading,
 * or open, and a note of the first touch that was not allowed.
 *
 * A forbidden touch is a fault of the processor, so it is found where it happens, reads included. The fault
 * is noted, a thread of the guard's tells the owner at once (guard_report.h), the page is opened with NaN
 * bytes in it, and the program goes on. Each region ends at a closed page, but for its alignment, and has
 * closed space of its own size, at least, on both sides, so that a touch beside it is known as such.
 *
 * While any guard is open the process has a handler for SIGSEGV that passes on what is not a guard's; the one
 * before it is put back with the last. A program that installs a handler of its own meanwhile is not stopped
 * by a forbidden touch's being noted: it gets the signal. System calls that are handed a closed address raise
 * no signal but fail with EFAULT; those that go through the C library are noted too (guard_calls.h).
 *
 * Thread-safety: a guard is opened, closed and changed by one thread; touches come from any. */
#ifndef ZR_KERNELS_GUARD_H
#define ZR_KERNELS_GUARD_H

#include <stdbool.h>
#include <stdint.h>

struct zr_guard;

enum zr_guard_mode { ZR_GUARD_CLOSED, ZR_GUARD_READ, ZR_GUARD_OPEN };

struct zr_guard_touch {
    int32_t region;
    /* of the byte in the region; negative or beyond its end: beside it */
    int64_t offset;
    enum zr_guard_mode mode;
    /* 1: it was a write, 0: a read, -1: this machine does not tell */
    int write;
    /* the program's function that the thread was in, as it said by zr_guard_callback; NULL: none */
    const char *callback;
    /* the call that was handed the address, as "fwrite"; NULL: the program touched it itself */
    const char *call;
};

struct zr_guard_region {
    /* 0 and more */
    int64_t bytes;
    /* a power of two, at most a page. The rest of its multiple after the end is not closed */
    int64_t align;
};

/* n regions, all closed. report(arg), unless NULL, runs on a thread of its own after the first forbidden
 * touch, while the thread that touched waits, 2 s at most. ZR_ERR_NOMEM where address space or the number of
 * guards in the process (64) runs out, ZR_ERR_SYSTEM without a handler or a thread. */
int zr_guard_open(const struct zr_guard_region *want, int32_t n, void (*report)(void *arg), void *arg,
                  struct zr_guard **out);
/* NULL is allowed. */
void zr_guard_close(struct zr_guard *g);
char *zr_guard_at(const struct zr_guard *g, int32_t region);
/* Closing forgets what is in the region. */
int zr_guard_set(struct zr_guard *g, int32_t region, enum zr_guard_mode mode);
/* The calling thread runs a function of the program's from here on: its name, a literal; NULL: no more. */
void zr_guard_callback(const char *name);
/* The first forbidden touch so far; false: none. */
bool zr_guard_touched(const struct zr_guard *g, struct zr_guard_touch *out);

#endif
