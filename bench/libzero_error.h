/* SPDX-License-Identifier: Apache-2.0 */
/* libzero_error.h: takes over the error message of a libzero call. The symbols of libzero.so are hidden, and
 * it has its own copy of kernels/error.c. zero-bench links a second copy, and reports failures from that
 * one. */
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

/* This thread's message. bench/train/train.c uses this instead of zr_error_text, because it shows what a
 * user's program looks like and calls no inside function of libzero (test/lint/folder_law.py). */
static inline const char *error_text(void)
{
    return zr_error_text();
}

#endif
