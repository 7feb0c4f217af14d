/* SPDX-License-Identifier: Apache-2.0 */
/* error.h: how a function fails, and the message of the last failure on this thread.
 *
 * A function that can fail returns 0 or a negative enum zero_err. The code that finds the fault writes the
 * message with zr_fail(). Callers return the code, or add a prefix with zr_fail_more(). The message is in
 * thread-local storage, so it needs no memory and can be read after any failure. */
#ifndef ZR_KERNELS_ERROR_H
#define ZR_KERNELS_ERROR_H

#include "zero/types.h"

#include <stdarg.h>
#include <stddef.h>

/* Makes the call. If it fails, the enclosing function returns its code. Use it only while the function holds
 * nothing that it has to free, close or unlock. */
#define ZR_TRY(call)                                                                                         \
    do {                                                                                                     \
        int try_err = (call);                                                                                \
        if (try_err)                                                                                         \
            return try_err;                                                                                  \
    } while (0)

#define ZR_ERROR_BYTES 2048 /* bytes of a message with its zero byte; a longer one is cut */

/* Sets this thread's message and returns code. Thread-safe; does not allocate. */
int zr_fail(int code, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
int zr_vfail(int code, const char *fmt, va_list ap) __attribute__((format(printf, 2, 0)));

/* Puts "prefix: " before this thread's message and returns code. */
int zr_fail_more(int code, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Returns this thread's message, or "" if nothing failed yet. It is valid until the thread's next failure. */
const char *zr_error_text(void);

/* A failure that is saved while later calls may fail too. */
struct zr_saved_error {
    int code;
    char text[ZR_ERROR_BYTES];
};
/* Saves code and this thread's message. Returns code. */
int zr_error_save(struct zr_saved_error *k, int code);
/* Sets this thread's message to the saved one. Returns the code. */
int zr_error_restore(const struct zr_saved_error *k);

/* The short text of a code ("invalid argument"), or "unknown error". */
const char *zr_err_name(int code);

#endif
