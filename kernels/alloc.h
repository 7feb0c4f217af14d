/* SPDX-License-Identifier: Apache-2.0 */
/* alloc.h: memory from the C library, with one message if there is none.
 *
 *     ZR_TRY(ZR_ALLOC(list, n, "a list of %d ranges", n));
 *
 * returns ZERO_ERR_NOMEM with "no memory for a list of 3 ranges" if malloc fails or n elements do not fit
 * into the address space. The caller frees with free(). */
#ifndef ZR_KERNELS_ALLOC_H
#define ZR_KERNELS_ALLOC_H

#include "kernels/error.h"

#include <stdbool.h>
#include <stdint.h>

/* Points p at n elements of its type: uninitialised, or zeroed. Returns 0, or ZERO_ERR_NOMEM with p NULL. n
 * may be 0, and p is not NULL then. The arguments after n are a format that says what the memory is for. */
#define ZR_ALLOC(p, n, ...)  (((p) = zr_alloc((n), sizeof *(p), false, __VA_ARGS__)) ? 0 : ZERO_ERR_NOMEM)
#define ZR_ZALLOC(p, n, ...) (((p) = zr_alloc((n), sizeof *(p), true, __VA_ARGS__)) ? 0 : ZERO_ERR_NOMEM)

/* Points p at a zeroed struct of head_bytes, which an array of n elements of size bytes follows. */
#define ZR_ZALLOC_ARRAY(p, head_bytes, n, size, ...)                                                         \
    (((p) = zr_alloc(zr_array_bytes((head_bytes), (n), (size)), 1, true, __VA_ARGS__)) ? 0 : ZERO_ERR_NOMEM)

/* Returns the bytes of such a struct. -1: they do not fit into the address space. */
static inline int64_t zr_array_bytes(size_t head_bytes, int64_t n, size_t size)
{
    int64_t bytes;
    bool fits = n >= 0 && !__builtin_mul_overflow(n, size, &bytes) &&
                !__builtin_add_overflow(bytes, head_bytes, &bytes);
    return fits ? bytes : -1;
}

/* Moves what p points at into memory for n elements. p may be NULL. On failure p is unchanged. */
#define ZR_GROW(p, n, ...) zr_grow(&(p), (n), sizeof *(p), __VA_ARGS__)

/* The functions behind the macros. zr_alloc returns NULL on failure. In zr_grow, pointer is the address of
 * the pointer to change. */
void *zr_alloc(int64_t n, size_t size, bool zero, const char *what, ...)
    __attribute__((format(printf, 4, 5)));
int zr_grow(void *pointer, int64_t n, size_t size, const char *what, ...)
    __attribute__((format(printf, 4, 5)));

#endif
