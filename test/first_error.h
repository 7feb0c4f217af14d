/* SPDX-License-Identifier: Apache-2.0 */
/* first_error.h: calls that each return 0 or an error, one after the other. */
#ifndef ZR_TEST_FIRST_ERROR_H
#define ZR_TEST_FIRST_ERROR_H

/* Evaluates up to eight calls in order until one returns an error, and gives that error, or else 0. */
#define FIRST_ERROR(...)                            FIRST_ERROR_OF(__VA_ARGS__, 0, 0, 0, 0, 0, 0, 0, 0)
#define FIRST_ERROR_OF(a, b, c, d, e, f, g, h, ...) ((a) ?: (b) ?: (c) ?: (d) ?: (e) ?: (f) ?: (g) ?: (h))

#endif
