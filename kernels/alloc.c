/* SPDX-License-Identifier: Apache-2.0 */
/* alloc.c: malloc, calloc and realloc with checks for overflow and an error message. */
#include "kernels/alloc.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Returns 0 if n elements are more than the address space has. An allocation has at least one byte, because
 * malloc(0) may return NULL. */
static size_t bytes_of(int64_t n, size_t size)
{
    size_t bytes;
    return n < 0 || __builtin_mul_overflow((uint64_t)n, size, &bytes) ? 0 : bytes ? bytes : 1;
}

static void fail(const char *what, va_list ap)
{
    char text[ZR_ERROR_BYTES / 2];
    vsnprintf(text, sizeof text, what, ap);
    zr_fail(ZERO_ERR_NOMEM, "no memory for %s", text);
}

void *zr_alloc(int64_t n, size_t size, bool zero, const char *what, ...)
{
    size_t bytes = bytes_of(n, size);
    void *p = !bytes ? NULL : zero ? calloc(1, bytes) : malloc(bytes);
    if (!p) {
        va_list ap;
        va_start(ap, what);
        fail(what, ap);
        va_end(ap);
    }
    return p;
}

int zr_grow(void *pointer, int64_t n, size_t size, const char *what, ...)
{
    size_t bytes = bytes_of(n, size);
    void *p;
    memcpy(&p, pointer, sizeof p);
    p = bytes ? realloc(p, bytes) : NULL;
    if (!p) {
        va_list ap;
        va_start(ap, what);
        fail(what, ap);
        va_end(ap);
        return ZERO_ERR_NOMEM;
    }
    memcpy(pointer, &p, sizeof p);
    return 0;
}
