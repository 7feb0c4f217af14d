/* SPDX-License-Identifier: Apache-2.0 */
/* device_arrays.h: arrays that a test has on the host and on the device that it tests: a GPU or the stand-in
 * for one with MODEL_TEST_CUDA, otherwise the host. */
#ifndef ZERO_TEST_DEVICE_ARRAYS_H
#define ZERO_TEST_DEVICE_ARRAYS_H

#include "bench/compute.h"
#include "bench/model/model_real.h"
#include "test/cmocka.h"
#include "test/kernels/random.h"

#ifdef MODEL_TEST_CUDA
#define CUDA true
#else
#define CUDA false
#endif

static struct random_source rng;
static struct compute on;

/* The same array on the host and on the device. */
struct array {
    void *at, *there;
    int64_t bytes;
};

enum { MOST_ARRAYS = 400 };
static struct array held[MOST_ARRAYS];
static int n_held;

static void move(void *dst, const void *src, int64_t bytes)
{
    assert_int_equal(on.dev->ops->copy(on.stream, dst, src, bytes), 0);
    assert_int_equal(on.dev->ops->stream_sync(on.stream), 0);
}

static void send(const struct array *a)
{
    move(a->there, a->at, a->bytes);
}

static void fetch(const struct array *a)
{
    move(a->at, a->there, a->bytes);
}

/* Returns poisoned memory, which let_go frees. */
static struct array hold(int64_t bytes)
{
    struct array a = {malloc((size_t)bytes + 1), NULL, bytes};
    assert_true(n_held < MOST_ARRAYS);
    assert_int_equal(on.dev->ops->alloc(on.dev, bytes ? bytes : 1, &a.there), 0);
    memset(a.at, 0xff, (size_t)bytes);
    if (bytes)
        send(&a);
    return held[n_held++] = a;
}

static struct array reals(int64_t n)
{
    return hold(n * (int64_t)sizeof(real));
}

static struct array floats(int64_t n)
{
    return hold(n * (int64_t)sizeof(float));
}

/* Frees all arrays but the first n. */
static void let_go(int n)
{
    while (n_held > n) {
        struct array *a = &held[--n_held];
        on.dev->ops->free(on.dev, a->there, a->bytes ? a->bytes : 1);
        free(a->at);
    }
}

#endif
