/* SPDX-License-Identifier: Apache-2.0 */
/* parallel.c: threads that process the blocks of a file together. */
#include "zero/checkpoint/parallel.h"
#include "kernels/first_failure.h"
#include "kernels/thread.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#define MAX_THREADS 8

/* One zr_in_parallel, for its threads. */
struct work {
    int64_t n, buffer_bytes;
    int (*fn)(void *arg, int64_t i, char *buffer);
    void *arg;
    /* the next block that a thread may take */
    _Atomic int64_t next;
    struct zr_first failure;
};

static void fail(struct work *w, int err)
{
    zr_first_keep(&w->failure, err, zr_error_text());
}

/* Processes blocks until none is left. Returns false if there is no memory for a buffer. */
static bool process_blocks(struct work *w)
{
    char *memory = malloc((size_t)w->buffer_bytes + ZR_DIRECT_ALIGN);
    if (!memory)
        return false;
    char *buffer = memory + (ZR_DIRECT_ALIGN - (uintptr_t)memory % ZR_DIRECT_ALIGN) % ZR_DIRECT_ALIGN;
    while (!zr_first_code(&w->failure)) {
        int64_t i = atomic_fetch_add(&w->next, 1);
        if (i >= w->n)
            break;
        int err = w->fn(w->arg, i, buffer);
        if (err)
            fail(w, err);
    }
    free(memory);
    return true;
}

static void helper(void *arg)
{
    process_blocks(arg);
}

int zr_in_parallel(int64_t n, int n_threads, int64_t buffer_bytes,
                   int (*fn)(void *arg, int64_t i, char *buffer), void *arg)
{
    struct work w = {.n = n, .buffer_bytes = buffer_bytes, .fn = fn, .arg = arg};
    struct zr_thread thread[MAX_THREADS];
    int n_helpers = 0;
    while (n_helpers + 1 < n_threads && n_helpers + 1 < n && n_helpers < MAX_THREADS &&
           !zr_thread_start(&thread[n_helpers], "zero-file", helper, &w))
        n_helpers++;
    if (!process_blocks(&w))
        fail(&w, zr_fail(ZERO_ERR_NOMEM, "no memory for a buffer of %lld bytes", (long long)buffer_bytes));
    for (int i = 0; i < n_helpers; i++)
        zr_thread_join(&thread[i]);
    int err = zr_first_code(&w.failure);
    return err ? zr_fail(err, "%s", w.failure.text) : 0;
}
