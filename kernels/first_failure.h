/* SPDX-License-Identifier: Apache-2.0 */
/* first_failure.h: keeps the first of several failures that threads may find at the same time. From then on,
 * its code and message are reported to all. */
#ifndef ZR_KERNELS_FIRST_FAILURE_H
#define ZR_KERNELS_FIRST_FAILURE_H

#include "kernels/error.h"

#include <stdatomic.h>
#include <stdbool.h>

/* A zeroed struct means that nothing has failed. */
struct zr_first {
    /* set by the thread that writes text */
    atomic_bool claimed;
    /* 0 until text is written */
    atomic_int code;
    char text[ZR_ERROR_BYTES];
};

/* Keeps this failure, unless there is one already. Returns true if this was the first. code 0 stands for
 * ZERO_ERR_FAILED, and text NULL for the code's name. After the call zr_first_code is not 0. Callable from
 * any thread, but not from a signal handler. */
bool zr_first_keep(struct zr_first *f, int code, const char *text);

/* Returns the code, or 0 if nothing has failed. A caller that sees the code also sees everything that
 * happened before the failure. */
static inline int zr_first_code(const struct zr_first *f)
{
    return atomic_load_explicit(&f->code, memory_order_acquire);
}

/* Returns the code, and writes its message to text, cut to n_text bytes. The message is "" for code 0. text
 * may be NULL. */
int zr_first_report(const struct zr_first *f, char *text, size_t n_text);

#endif
