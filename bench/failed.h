/* SPDX-License-Identifier: Apache-2.0 */
/* failed.h: error messages of zero-bench. A thread has one message, whether libzero, the model's device or
 * the program itself has failed. */
#ifndef ZERO_BENCH_FAILED_H
#define ZERO_BENCH_FAILED_H

/* Sets the message and returns code, an enum zero_err. */
int failed(int code, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* For the result of a zero/zero.h call: if it is an error, its message becomes the thread's. Returns err. */
int reported(int err);
/* The message, or "" if nothing has failed. */
const char *failed_text(void);

#endif
