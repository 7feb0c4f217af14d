/* SPDX-License-Identifier: Apache-2.0 */
/* asserts.h: what must hold whatever the caller does.
 *
 * A broken one is a fault of the library: what a user can do wrong is an error (error.h). Only builds with
 * -Dasserts=true have them, as the tests' have: the condition and its place are printed, and the process
 * ends by SIGABRT. A release evaluates nothing and holds no such text (test/lint/asserts.py). */
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
