/* SPDX-License-Identifier: Apache-2.0 */
/* failed.h: why something failed, for the programs of this folder: libzero's failures, those of the model's
 * device and kernels, and their own are one message of the thread's. */
#ifndef ZERO_BENCH_FAILED_H
#define ZERO_BENCH_FAILED_H

/* Sets the message and returns code, an enum zero_err. */
int failed(int code, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* What a call of zero/zero.h returned: where it failed, its message is the thread's now. Returns err. */
int reported(int err);
/* The message; "" if nothing failed yet. */
const char *failed_text(void);

#endif
