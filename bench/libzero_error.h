/* SPDX-License-Identifier: Apache-2.0 */
/* libzero_error.h: one error message for the program and for libzero. libzero keeps the message of its last
 * failure to itself, and zero-bench reports failures by kernels/error.h. */
#ifndef ZERO_BENCH_LIBZERO_ERROR_H
#define ZERO_BENCH_LIBZERO_ERROR_H

#include "kernels/error.h"
#include "zero/zero.h"

/* Takes the result of a zero/zero.h call. If it is an error, libzero's message becomes this thread's message
 * in kernels/error.h. Returns err. */
static inline int take_libzero_error(int err)
{
    return err ? zr_fail(err, "%s", zero_last_error()) : 0;
}

/* This thread's message. */
static inline const char *error_text(void)
{
    return zr_error_text();
}

#endif
