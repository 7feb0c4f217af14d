/* SPDX-License-Identifier: Apache-2.0 */
/* asserts.h: ZR_ASSERT checks what must hold whatever the caller does.
 *
 * A failed assertion is a fault of the library; mistakes of a user are errors (error.h). Only builds with
 * -Dasserts=true check them, as the tests' builds do. They print the condition and its place, and end the
 * process with SIGABRT. A release evaluates nothing and contains no such text (test/lint/asserts.py). */
#ifndef ZR_KERNELS_ASSERTS_H
#define ZR_KERNELS_ASSERTS_H

#ifdef ZR_ASSERTS
#ifdef NDEBUG
#error "asserts need NDEBUG not to be defined: -Db_ndebug=false"
#endif
#include <assert.h>
#define ZR_ASSERT(condition) assert(condition)
#else
#define ZR_ASSERT(condition) ((void)(1 || (condition))) /* compiled, never evaluated */
#endif

#endif
