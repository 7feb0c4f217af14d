/* SPDX-License-Identifier: Apache-2.0 */
/* failing_memory.h: makes a chosen allocation of a program fail, and counts blocks that are not freed.
 * Include it in one source file of a program linked with --wrap for malloc, calloc, realloc,
 * posix_memalign and free. */
#ifndef ZR_TEST_SHARD_FAILING_MEMORY_H
#define ZR_TEST_SHARD_FAILING_MEMORY_H

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>

/* The number of the allocation that fails, counted from 0; -1: none. */
static int64_t fail_at = -1, n_allocs;
/* Blocks not freed yet. Blocks of strdup and similar functions are not counted when made, but are when
 * freed. */
static int64_t n_live;
void *__real_calloc(size_t n, size_t size);
void *__real_malloc(size_t size);
int __real_posix_memalign(void **p, size_t align, size_t size);
void *__real_realloc(void *p, size_t size);
void __real_free(void *p);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_realloc(void *p, size_t size);
int __wrap_posix_memalign(void **p, size_t align, size_t size);
void __wrap_free(void *p);

void *__wrap_calloc(size_t n, size_t size)
{
    void *p = n_allocs++ == fail_at ? NULL : __real_calloc(n, size);
    n_live += p != NULL;
    return p;
}

void *__wrap_malloc(size_t size)
{
    void *p = n_allocs++ == fail_at ? NULL : __real_malloc(size);
    n_live += p != NULL;
    return p;
}

void *__wrap_realloc(void *p, size_t size)
{
    void *at = n_allocs++ == fail_at ? NULL : __real_realloc(p, size);
    n_live += !p && at;
    return at;
}

int __wrap_posix_memalign(void **p, size_t align, size_t size)
{
    int err = n_allocs++ == fail_at ? ENOMEM : __real_posix_memalign(p, align, size);
    n_live += err == 0;
    return err;
}

void __wrap_free(void *p)
{
    n_live -= p != NULL;
    __real_free(p);
}

#endif
