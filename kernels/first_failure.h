/* SPDX-License-Identifier: Apache-2.0 */
/* first_failure.h: keeps the first of several failures that threads may find at the same time. Its code and
 * message are reported to all from then on. */
#ifndef ZR_KERNELS_FIRST_FAILURE_H
#define ZR_KERNELS_FIRST_FAILURE_H

#include "kernels/error.h"

#include <stdatomic.h>
#include <stdbool.h>

/* Zeroed: nothing has failed. */
struct zr_first {
    /* set by who writes text */
    atomic_bool claimed;
    /* 0 until text is written */
    atomic_int code;
    char text[ZR_ERROR_BYTES];
};

/* Keeps it (code 0: ZR_ERR_FAILED; text NULL: the code's own), unless there is one already. True: this was
 * the first. When it returns, zr_first_code is not 0, whoever was first. From any thread; not from a
 * signal handler. */
bool zr_first_keep(struct zr_first *f, int code, const char *text);

/* 0: nothing has failed. What happened before the failure is seen by whoever sees its code. */
static inline int zr_first_code(const struct zr_first *f)
{
    return atomic_load_explicit(&f->code, memory_order_acquire);
}

/* The code, and its message ("" for 0) to text[n_text], cut if it is longer. text NULL: the code alone. */
int zr_first_report(const struct zr_first *f, char *text, size_t n_text);

#endif
