/* SPDX-License-Identifier: Apache-2.0 */
/* device_suite_work.c: tests memory, and each kind of work that a stream takes. */
#include "kernels/agreement.h"
#include "kernels/exact_sum.h"
#include "test/cmocka.h"
#include "test/kernels/device_suite_parts.h"

#include <math.h>

/* --- memory --- */

static void test_memory(void **state)
{
    struct zr_device *dev = *state;
    static const int64_t sizes[] = {1, 4096, 4097, 1000000};
    void *p[4];
    for (int i = 0; i < 4; i++) {
        assert_int_equal(dev->ops->alloc(dev, sizes[i], &p[i]), 0);
        assert_int_equal((uintptr_t)p[i] % 4096, 0);
    }
    struct zr_stream *s = suite_stream(dev, ZR_STREAM_QUEUE);
    for (int i = 0; i < 4; i++)
        assert_int_equal(dev->ops->zero(s, p[i], sizes[i]), 0);
    for (int i = 0; i < 4; i++) {
        unsigned char *host = malloc((size_t)sizes[i]);
        assert_int_equal(dev->ops->copy(s, host, p[i], sizes[i]), 0);
        assert_int_equal(dev->ops->stream_sync(s), 0);
        for (int64_t j = 0; j < sizes[i]; j++)
            assert_int_equal(host[j], 0);
        free(host);
        dev->ops->free(dev, p[i], sizes[i]);
    }
    void *bad = &suite_rng;
    assert_int_equal(dev->ops->alloc(dev, 0, &bad), ZERO_ERR_ARG);
    assert_int_equal(dev->ops->alloc(dev, -1, &bad), ZERO_ERR_ARG);
    assert_int_equal(dev->ops->alloc(dev, INT64_MAX - 8192, &bad), ZERO_ERR_NOMEM);
    assert_null(bad);
    assert_non_null(strstr(zr_error_text(), "9223372036854767615"));
    dev->ops->stream_close(s);
}

/* --- calls and kernels --- */

static void sum_bytes_call(void *arg)
{
    unsigned char *a = arg;
    uint64_t *out, sum = 0;
    memcpy(&out, a, sizeof(uint64_t *));
    for (int i = sizeof(uint64_t *); i < ZR_CALL_BYTES; i++)
        sum += a[i];
    *out = sum;
}

static void test_call_copies_its_argument(void **state)
{
    struct zr_device *dev = *state;
    struct zr_stream *s = suite_stream(dev, ZR_STREAM_QUEUE);
    unsigned char arg[ZR_CALL_BYTES];
    uint64_t got = 0, *out = &got;
    memset(arg, 3, sizeof arg);
    memcpy(arg, &out, sizeof(uint64_t *));
    assert_int_equal(dev->ops->call(s, sum_bytes_call, arg, sizeof arg), 0);
    memset(arg, 0xee, sizeof arg);
    assert_int_equal(dev->ops->stream_sync(s), 0);
    assert_int_equal(got, 3 * (ZR_CALL_BYTES - sizeof(uint64_t *)));
    assert_int_equal(dev->ops->call(s, sum_bytes_call, arg, ZR_CALL_BYTES + 1), ZERO_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), "193"));
    dev->ops->stream_close(s);
}

enum { N = 1000 };

static void *device_memory(struct zr_device *dev, int64_t bytes)
{
    void *p;
    assert_int_equal(dev->ops->alloc(dev, bytes, &p), 0);
    return p;
}

/* Each kernel, run through a stream, gives the result of the portable kernel on the same input. */
static void run_kernels(struct zr_device *dev, struct zr_stream *s)
{
    const struct zr_host_kernels *k = zr_host_kernels(ZR_ISA_PORTABLE);
    const struct zr_device_ops *ops = dev->ops;
    float host[4][N], got[N], want[N];
    uint16_t half[N], want_half[N];
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < N; i++)
            host[j][i] = random_normal(&suite_rng);
    float *x = device_memory(dev, sizeof got), *y = device_memory(dev, sizeof got),
          *m = device_memory(dev, sizeof got), *v = device_memory(dev, sizeof got);
    uint16_t *h = device_memory(dev, sizeof half);
    struct zr_exact_sum *acc = device_memory(dev, sizeof *acc), sum, want_sum;
    struct zr_step_scalars *scalars = device_memory(dev, sizeof *scalars), step = {.grad_scale = 0.5f};

    assert_int_equal(ops->copy(s, x, host[0], sizeof got), 0);
    assert_int_equal(ops->copy(s, y, host[1], sizeof got), 0);
    assert_int_equal(ops->copy(s, scalars, &step, sizeof step), 0);
    assert_int_equal(ops->zero(s, acc, sizeof *acc), 0);
    assert_int_equal(ops->sum_squares(s, acc, x, ZERO_F32, N, NULL), 0);
    assert_int_equal(ops->add(s, x, y, ZERO_F32, N), 0);
    assert_int_equal(ops->scale(s, x, N, scalars), 0);
    assert_int_equal(ops->cast(s, h, ZERO_BF16, x, ZERO_F32, N), 0);
    assert_int_equal(ops->copy(s, got, x, sizeof got), 0);
    assert_int_equal(ops->copy(s, half, h, sizeof half), 0);
    assert_int_equal(ops->copy(s, &sum, acc, sizeof sum), 0);
    assert_int_equal(ops->stream_sync(s), 0);
    zr_exact_reset(&want_sum);
    k->sum_squares(&want_sum, host[0], ZERO_F32, N);
    assert_true(zr_exact_value(&sum) == zr_exact_value(&want_sum));
    memcpy(want, host[0], sizeof want);
    k->add(want, host[1], N);
    k->scale(want, N, 0.5f);
    k->cast(want_half, ZERO_BF16, want, ZERO_F32, N);
    assert_memory_equal(got, want, sizeof got);
    assert_memory_equal(half, want_half, sizeof half);

    /* skip leaves everything unchanged. It is read when the work runs, not when it is queued. */
    for (uint32_t skip = 0; skip < 2; skip++) {
        struct zr_update u = {.kind = ZERO_ADAMW,
                              .grad_dtype = ZERO_F32,
                              .param_dtype = ZERO_BF16,
                              .lr = 0.1f,
                              .beta1 = 0.9f,
                              .beta2 = 0.99f,
                              .eps = 1e-8f,
                              .decay = 0.1f,
                              .c1 = 0.1f,
                              .c2 = 0.01f,
                              .t = 1,
                              .n = N,
                              .master = x,
                              .param = h,
                              .grad = y,
                              .state = {m, v},
                              .scalars = scalars};
        float states[2][N];
        step.skip = skip;
        assert_int_equal(ops->copy(s, scalars, &step, sizeof step), 0);
        assert_int_equal(ops->copy(s, x, host[0], sizeof got), 0);
        assert_int_equal(ops->zero(s, m, sizeof got), 0);
        assert_int_equal(ops->zero(s, v, sizeof got), 0);
        assert_int_equal(ops->zero(s, h, sizeof half), 0);
        assert_int_equal(ops->update(s, &u), 0);
        assert_int_equal(ops->scale(s, y, N, scalars), 0);
        assert_int_equal(ops->copy(s, got, x, sizeof got), 0);
        assert_int_equal(ops->copy(s, half, h, sizeof half), 0);
        assert_int_equal(ops->stream_sync(s), 0);
        memcpy(want, host[0], sizeof want);
        memset(want_half, 0, sizeof want_half);
        memset(states, 0, sizeof states);
        u.master = want, u.param = want_half, u.grad = host[1], u.state[0] = states[0],
        u.state[1] = states[1];
        u.scalars = &step;
        k->update(&u);
        assert_memory_equal(got, want, sizeof got);
        assert_memory_equal(half, want_half, sizeof half);
        assert_int_equal(ops->copy(s, got, y, sizeof got), 0);
        assert_int_equal(ops->stream_sync(s), 0);
        k->scale(host[1], N, skip ? 1 : 0.5f);
        assert_memory_equal(got, host[1], sizeof got);
    }
    ops->free(dev, x, sizeof got);
    ops->free(dev, y, sizeof got);
    ops->free(dev, m, sizeof got);
    ops->free(dev, v, sizeof got);
    ops->free(dev, h, sizeof half);
    ops->free(dev, acc, sizeof *acc);
    ops->free(dev, scalars, sizeof *scalars);
}

static void test_kernels(void **state)
{
    struct zr_device *dev = *state;
    struct zr_stream *s = suite_stream(dev, ZR_STREAM_QUEUE), *caller = suite_stream(dev, ZR_STREAM_CALLER);
    run_kernels(dev, s);
    run_kernels(dev, caller);
    dev->ops->stream_close(s);
    dev->ops->stream_close(caller);
}

/* sum_squares records the block with the largest exponent if it is large or not finite, and the first of
 * equal ones. The sum is the same with and without this. */
static void test_largest_block(void **state)
{
    enum { BLOCKS = 40, LENGTH = BLOCKS * ZR_NORM_BLOCK - 5 };
    struct zr_device *dev = *state;
    const struct zr_device_ops *ops = dev->ops;
    struct zr_stream *s = suite_stream(dev, ZR_STREAM_QUEUE);
    char *x = device_memory(dev, LENGTH * sizeof(float));
    float host[LENGTH];
    uint16_t half[LENGTH];
    struct zr_own_squares *own = device_memory(dev, sizeof *own), got;
    struct zr_exact_sum want;
    for (int round = 0; round < 60; round++) {
        static const float large[] = {1e15f, 0, 3e25f, NAN, INFINITY, -3e38f};
        const enum zero_dtype dtype = round % 2 ? ZERO_BF16 : ZERO_F32;
        const int size = (int)zr_dtype_bytes(dtype);
        int at[2], first = ZR_NORM_BLOCK * (int)random_below(&suite_rng, BLOCKS);
        float value[2];
        for (int i = 0; i < LENGTH; i++)
            host[i] = 1e9f * random_normal(&suite_rng);
        for (int k = 0; k < 2; k++) {
            at[k] = (int)random_below(&suite_rng, LENGTH);
            value[k] = large[random_below(&suite_rng, 6)];
            host[at[k]] = value[k];
        }
        for (int i = 0; i < LENGTH; i++) {
            half[i] = bf16_from_float(host[i]);
            host[i] = dtype == ZERO_BF16 ? bf16_to_float(half[i]) : host[i];
        }
        uint64_t word = 0;
        for (int b = 0; b < BLOCKS; b++) {
            double squares = 0;
            for (int i = b * ZR_NORM_BLOCK; i < LENGTH && i < (b + 1) * ZR_NORM_BLOCK; i++)
                squares += (double)host[i] * host[i];
            uint64_t of = zr_largest_of(squares, 1000 + size / 2 * b * ZR_NORM_BLOCK);
            if (!(squares < 1e26) && of > word)
                word = of;
        }
        assert_int_equal(ops->copy(s, x, dtype == ZERO_F32 ? (void *)host : half, LENGTH * size), 0);
        assert_int_equal(ops->zero(s, own, sizeof *own), 0);
        const struct zr_largest a = {&own->largest, 1000, 1e26},
                                b = {&own->largest, 1000 + size / 2 * first, 1e26};
        assert_int_equal(ops->sum_squares(s, &own->sum, x, dtype, first, &a), 0);
        assert_int_equal(ops->sum_squares(s, &own->sum, x + first * size, dtype, LENGTH - first, &b), 0);
        assert_int_equal(ops->copy(s, &got, own, sizeof got), 0);
        assert_int_equal(ops->stream_sync(s), 0);
        assert_true(got.largest == word);
        zr_exact_reset(&want);
        zr_host_kernels(ZR_ISA_PORTABLE)->sum_squares(&want, host, ZERO_F32, LENGTH);
        double sum = zr_exact_value(&got.sum), wanted = zr_exact_value(&want);
        assert_true(sum == wanted || (isnan(sum) && isnan(wanted)));
    }
    ops->free(dev, x, LENGTH * sizeof(float));
    ops->free(dev, own, sizeof *own);
    ops->stream_close(s);
}

/* Sums of several sources of both dtypes, written and added, equal the portable kernel's. */
static void run_sums(struct zr_device *dev, struct zr_stream *s)
{
    const struct zr_host_kernels *k = zr_host_kernels(ZR_ISA_PORTABLE);
    const struct zr_device_ops *ops = dev->ops;
    for (int round = 0; round < 40; round++) {
        enum zero_dtype dtype = round % 2 ? ZERO_BF16 : ZERO_F32;
        int n_src = round < 4 ? ZR_MAX_SOURCES : 1 + (int)(random_bits(&suite_rng) % 9);
        int64_t n = 1 + (int64_t)(random_bits(&suite_rng) % N), bytes = n * zr_dtype_bytes(dtype);
        bool accumulate = round & 2;
        float wide[N], start[N], got[N], want[N];
        char given[ZR_MAX_SOURCES][N * sizeof(float)];
        const void *host[ZR_MAX_SOURCES], *src[ZR_MAX_SOURCES];
        for (int j = 0; j < n_src; j++) {
            for (int64_t i = 0; i < n; i++)
                wide[i] = random_normal(&suite_rng);
            k->cast(given[j], dtype, wide, ZERO_F32, n);
            host[j] = given[j];
            void *p = device_memory(dev, bytes);
            assert_int_equal(ops->copy(s, p, given[j], bytes), 0);
            src[j] = p;
        }
        for (int64_t i = 0; i < n; i++)
            start[i] = random_normal(&suite_rng);
        float *dst = device_memory(dev, n * (int64_t)sizeof *dst);
        int64_t out_bytes = n * (int64_t)sizeof *dst;
        assert_int_equal(ops->copy(s, dst, start, out_bytes), 0);
        assert_int_equal(ops->sum_tree(s, dst, src, n_src, dtype, n, accumulate), 0);
        assert_int_equal(ops->add(s, dst, src[0], dtype, n), 0);
        const void *freed[ZR_MAX_SOURCES];
        memcpy(freed, src, sizeof freed);
        memset(src, 0, sizeof src); /* the array was copied */
        assert_int_equal(ops->copy(s, got, dst, out_bytes), 0);
        assert_int_equal(ops->stream_sync(s), 0);
        memcpy(want, start, (size_t)out_bytes);
        k->sum_tree(want, host, n_src, dtype, n, accumulate);
        k->cast(wide, ZERO_F32, given[0], dtype, n);
        k->add(want, wide, n);
        assert_memory_equal(got, want, (size_t)out_bytes);
        ops->free(dev, dst, out_bytes);
        for (int j = 0; j < n_src; j++)
            ops->free(dev, (void *)(uintptr_t)freed[j], bytes);
    }
}

static void test_sums(void **state)
{
    struct zr_device *dev = *state;
    struct zr_stream *s = suite_stream(dev, ZR_STREAM_QUEUE);
    run_sums(dev, s);
    dev->ops->stream_close(s);
}

/* Maxima and digests equal the portable kernel's. The digest goes over more threads than run at once. */
static void run_raw_bits(struct zr_device *dev, struct zr_stream *s)
{
    enum { LARGE = 1 << 20 };
    const struct zr_host_kernels *k = zr_host_kernels(ZR_ISA_PORTABLE);
    const struct zr_device_ops *ops = dev->ops;
    uint32_t *host = malloc(3 * LARGE), *got = malloc(LARGE), *want = malloc(LARGE);
    char *x = device_memory(dev, 3 * LARGE), *dst = device_memory(dev, LARGE);
    uint64_t *sum = device_memory(dev, sizeof *sum), start = random_bits(&suite_rng), digest,
             want_digest = start;
    for (int64_t i = 0; i < 3 * LARGE / 4; i++)
        host[i] = (uint32_t)random_bits(&suite_rng);
    for (int round = 0; round < 6; round++) {
        const enum zero_dtype dtype = round % 2 ? ZERO_BF16 : ZERO_F32;
        const int64_t n = round < 2 ? LARGE / 4 : random_below(&suite_rng, N), size = zr_dtype_bytes(dtype);
        const int64_t bytes = 3 * LARGE - random_below(&suite_rng, 9);
        const void *src[3], *from[3];
        for (int i = 0; i < 3; i++) {
            src[i] = x + i * LARGE;
            from[i] = (char *)host + i * LARGE;
        }
        assert_int_equal(ops->copy(s, x, host, 3 * LARGE), 0);
        assert_int_equal(ops->maximum(s, dst, src, 3, dtype, n), 0);
        memset(src, 0, sizeof src); /* the array was copied */
        assert_int_equal(ops->put(s, sum, &start, sizeof start), 0);
        assert_int_equal(ops->digest(s, sum, x, bytes, start), 0);
        assert_int_equal(ops->copy(s, got, dst, n * size), 0);
        assert_int_equal(ops->copy(s, &digest, sum, sizeof digest), 0);
        assert_int_equal(ops->stream_sync(s), 0);
        k->maximum(want, from, 3, dtype, n);
        assert_memory_equal(got, want, (size_t)(n * size));
        want_digest = start;
        k->digest(&want_digest, host, bytes, start);
        assert_true(digest == want_digest);
    }
    const void *one = x;
    assert_int_equal(ops->maximum(s, dst, &one, 0, ZERO_F32, 4), ZERO_ERR_ARG);
    assert_int_equal(ops->maximum(s, dst, &one, 1, ZERO_F16, 4), ZERO_ERR_NOTSUP);
    assert_int_equal(ops->maximum(s, dst, &one, 1, ZERO_F32, -1), ZERO_ERR_ARG);
    ops->free(dev, x, 3 * LARGE);
    ops->free(dev, dst, LARGE);
    ops->free(dev, sum, sizeof *sum);
    free(host), free(got), free(want);
}

static void test_raw_bits(void **state)
{
    struct zr_device *dev = *state;
    struct zr_stream *s = suite_stream(dev, ZR_STREAM_QUEUE);
    run_raw_bits(dev, s);
    dev->ops->stream_close(s);
}

/* --- tables of sums --- */

/* Ranges of sources with a common layout. Lengths are arbitrary, and so are alignments to an element. */
static void run_sum_ranges(struct zr_device *dev, struct zr_stream *s)
{
    const struct zr_host_kernels *k = zr_host_kernels(ZR_ISA_PORTABLE);
    const struct zr_device_ops *ops = dev->ops;
    enum { LENGTH = 20000 };
    float *start = malloc(LENGTH * sizeof *start), *got = malloc(LENGTH * sizeof *got),
          *want = malloc(LENGTH * sizeof *want), *dst = device_memory(dev, LENGTH * sizeof *dst);
    for (int round = 0; round < 24; round++) {
        enum zero_dtype dtype = round % 2 ? ZERO_BF16 : ZERO_F32;
        int n_src = round < 2 ? ZR_MAX_SOURCES : 1 + (int)(random_bits(&suite_rng) % 9), n = 0;
        int64_t size = zr_dtype_bytes(dtype), at = 0, to = 0;
        char *given[ZR_MAX_SOURCES];
        const void *src[ZR_MAX_SOURCES], *part[ZR_MAX_SOURCES], *freed[ZR_MAX_SOURCES];
        struct zr_sum_range table[ZR_MAX_SUMS];
        for (int i = 0; i < LENGTH; i++)
            start[i] = random_normal(&suite_rng);
        for (int j = 0; j < n_src; j++) {
            given[j] = malloc(LENGTH * sizeof(float));
            for (int i = 0; i < LENGTH; i++)
                want[i] = random_normal(&suite_rng);
            k->cast(given[j], dtype, want, ZERO_F32, LENGTH);
            freed[j] = src[j] = device_memory(dev, LENGTH * size);
            assert_int_equal(ops->copy(s, (void *)(uintptr_t)src[j], given[j], LENGTH * size), 0);
            assert_int_equal(ops->stream_sync(s), 0);
        }
        memcpy(want, start, LENGTH * sizeof *want);
        for (int most = (int)(random_bits(&suite_rng) % (ZR_MAX_SUMS + 1)); n < most; n++) {
            bool aligned = random_bits(&suite_rng) % 2, accumulate = random_bits(&suite_rng) % 2;
            int64_t length = (int64_t)(random_bits(&suite_rng) % (n % 9 ? 300 : 3000));
            at += aligned ? -at & 31 : (int64_t)(random_bits(&suite_rng) % 5);
            to += aligned ? -to & 31 : (int64_t)(random_bits(&suite_rng) % 5);
            if (at + length > LENGTH || to + length > LENGTH)
                break;
            table[n] = (struct zr_sum_range){dst + to, at, length, accumulate};
            for (int j = 0; j < n_src; j++)
                part[j] = given[j] + at * size;
            k->sum_tree(want + to, part, n_src, dtype, length, accumulate);
            at += length;
            to += length;
        }
        assert_int_equal(ops->copy(s, dst, start, LENGTH * sizeof *dst), 0);
        assert_int_equal(ops->stream_sync(s), 0);
        assert_int_equal(ops->sum_ranges(s, table, n, src, n_src, dtype), 0);
        memset(table, 0xff, sizeof table); /* they were copied */
        memset(src, 0, sizeof src);
        assert_int_equal(ops->copy(s, got, dst, LENGTH * sizeof *dst), 0);
        assert_int_equal(ops->stream_sync(s), 0);
        assert_memory_equal(got, want, LENGTH * sizeof *got);
        for (int j = 0; j < n_src; j++) {
            ops->free(dev, (void *)(uintptr_t)freed[j], LENGTH * size);
            free(given[j]);
        }
    }
    ops->free(dev, dst, LENGTH * sizeof *dst);
    free(start);
    free(got);
    free(want);
}

static void test_sum_ranges(void **state)
{
    struct zr_device *dev = *state;
    const struct zr_device_ops *ops = dev->ops;
    struct zr_stream *s = suite_stream(dev, ZR_STREAM_QUEUE);
    run_sum_ranges(dev, s);
    float *p = device_memory(dev, 4096);
    const void *src[] = {p};
    const struct zr_sum_range table[] = {
        {p + 100, 0, 10, false}, {p + 109, 20, 1, false}, {p + 200, -1, 4, false}};
    const struct {
        const char *text;
        int first, n, n_src, code;
        enum zero_dtype dtype;
    } cases[] = {{"sums 0 and 1 overlap", 0, 2, 1, ZERO_ERR_ARG, ZERO_F32},
                 {"sum 0: at is -1, n 4", 2, 1, 1, ZERO_ERR_ARG, ZERO_F32},
                 {"65 sums, 0 to 64", 0, 65, 1, ZERO_ERR_ARG, ZERO_F32},
                 {"n_src is 0", 0, 1, 0, ZERO_ERR_ARG, ZERO_F32},
                 {"n_src is 65", 0, 1, 65, ZERO_ERR_ARG, ZERO_F32},
                 {"not for f16", 0, 1, 1, ZERO_ERR_NOTSUP, ZERO_F16}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(
            ops->sum_ranges(s, table + cases[i].first, cases[i].n, src, cases[i].n_src, cases[i].dtype),
            cases[i].code);
        if (!strstr(zr_error_text(), "sum_ranges: ") || !strstr(zr_error_text(), cases[i].text))
            fail_msg("\"%s\" lacks \"%s\"", zr_error_text(), cases[i].text);
    }
    assert_int_equal(ops->sum_ranges(s, table, 0, src, 1, ZERO_F32), 0);
    ops->free(dev, p, 4096);
    ops->stream_close(s);
}

/* --- spans of an update --- */

enum { UPDATED = 6000 };

/* Spans of any length and alignment, with and without weights of another dtype, and without masters, give the
 * portable kernel's result. */
static void run_update_spans(struct zr_device *dev, struct zr_stream *s)
{
    const struct zr_host_kernels *k = zr_host_kernels(ZR_ISA_PORTABLE);
    const struct zr_device_ops *ops = dev->ops;
    enum { MASTER, GRAD, FIRST, SECOND, PARAM, N_ARRAYS };
    const int64_t bytes = UPDATED * (int64_t)sizeof(float);
    const struct zr_step_scalars step = {.grad_scale = 0.5f};
    struct zr_step_scalars *scalars = device_memory(dev, sizeof *scalars);
    float *there[N_ARRAYS], *want[N_ARRAYS], *got = malloc((size_t)bytes);
    assert_int_equal(ops->copy(s, scalars, &step, sizeof step), 0);
    for (int j = 0; j < N_ARRAYS; j++) {
        there[j] = device_memory(dev, bytes);
        want[j] = malloc((size_t)bytes);
    }
    for (int round = 0; round < 24; round++) {
        struct zr_update_span span[ZR_MAX_SPANS];
        const bool coded = round % 3 == 2, half = coded || round % 2, param = coded || round % 4;
        int n = 0, most = (int)(random_bits(&suite_rng) % (ZR_MAX_SPANS + 1)),
            off = (int)(random_bits(&suite_rng) % 8) % 4;
        struct zr_update u = {.kind = 1 + (int)(random_bits(&suite_rng) % (ZR_OPTIMIZER_COUNT - 1)),
                              .grad_dtype = ZERO_F32,
                              .param_dtype = half ? ZERO_BF16 : ZERO_F32,
                              .masters = coded ? ZERO_MASTERS_NONE : ZERO_MASTERS_F32,
                              .lr = NAN,
                              .beta1 = 0.9f,
                              .beta2 = 0.99f,
                              .eps = 1e-8f,
                              .decay = NAN,
                              .c1 = 0.1f,
                              .c2 = 0.01f,
                              .t = 1 + round % 3,
                              .master = coded ? NULL : there[MASTER] + off,
                              .param = param ? (char *)there[PARAM] + off * (half ? 2 : 4) : NULL,
                              .grad = there[GRAD] + off,
                              .state = {there[FIRST] + off, there[SECOND] + off},
                              .scalars = scalars};
        for (int j = 0; j < N_ARRAYS; j++) {
            for (int i = 0; i < UPDATED; i++)
                want[j][i] = j == FIRST || j == SECOND
                                 ? fabsf(random_normal(&suite_rng)) /* avoids roots of negative numbers */
                                 : random_normal(&suite_rng);
            for (int i = 0; coded && j == PARAM && i < 2 * UPDATED; i++)
                ((uint16_t *)want[j])[i] = bf16_from_float(random_normal(&suite_rng));
            assert_int_equal(ops->copy(s, there[j], want[j], bytes), 0);
        }
        assert_int_equal(ops->stream_sync(s), 0);
        for (; n < most; n++) {
            bool aligned = random_bits(&suite_rng) % 2;
            int64_t length = (int64_t)(random_bits(&suite_rng) % (n % 9 ? 100 : 2000));
            int64_t first = u.n + (aligned ? -u.n & 31 : (int64_t)(random_bits(&suite_rng) % 5));
            if (off + first + length > UPDATED)
                break;
            span[n] = (struct zr_update_span){first, length, 0.01f * (float)(n + 1), 0.1f * (float)(n % 3)};
            span[n].rounding.first = (int64_t)(random_bits(&suite_rng) >> 20);
            zr_rounding_key(span[n].rounding.key, 1, (uint64_t)round, (uint64_t)n);
            u.n = first + length;
            struct zr_update one = u;
            one.n = length;
            one.lr = span[n].lr;
            one.decay = span[n].decay;
            one.rounding = span[n].rounding;
            one.master = coded ? NULL : want[MASTER] + off + first;
            one.param = !u.param ? NULL
                        : half   ? (void *)((uint16_t *)want[PARAM] + off + first)
                                 : (void *)(want[PARAM] + off + first);
            one.grad = want[GRAD] + off + first;
            one.state[0] = want[FIRST] + off + first;
            one.state[1] = want[SECOND] + off + first;
            one.scalars = &step;
            k->update(&one);
        }
        assert_int_equal(ops->update_spans(s, &u, span, n), 0);
        memset(span, 0xff, sizeof span); /* they were copied */
        for (int j = 0; j < N_ARRAYS; j++) {
            assert_int_equal(ops->copy(s, got, there[j], bytes), 0);
            assert_int_equal(ops->stream_sync(s), 0);
            assert_memory_equal(got, want[j], (size_t)bytes);
        }
    }
    for (int j = 0; j < N_ARRAYS; j++) {
        ops->free(dev, there[j], bytes);
        free(want[j]);
    }
    ops->free(dev, scalars, sizeof *scalars);
    free(got);
}

static void test_update_spans(void **state)
{
    struct zr_device *dev = *state;
    const struct zr_device_ops *ops = dev->ops;
    struct zr_stream *s = suite_stream(dev, ZR_STREAM_QUEUE);
    run_update_spans(dev, s);
    float *p = device_memory(dev, 4096);
    const struct zr_update u = {.kind = ZERO_SGD,
                                .grad_dtype = ZERO_F32,
                                .n = 100,
                                .master = p,
                                .grad = p + 100,
                                .state = {p + 200},
                                .scalars = (void *)p};
    const struct zr_update_span spans[] = {{0, 11, 1, 0}, {10, 5, 1, 0}, {90, 11, 1, 0}, {-1, 1, 1, 0}};
    const struct {
        const char *text;
        int first, n;
    } cases[] = {{"spans 0 and 1 overlap", 0, 2},
                 {"span 0 has 11 elements from element 90 on, but there are 100", 2, 1},
                 {"span 0 has 1 elements from element -1 on, but there are 100", 3, 1},
                 {"65 spans, 0 to 64", 0, 65}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(ops->update_spans(s, &u, spans + cases[i].first, cases[i].n), ZERO_ERR_ARG);
        if (!strstr(zr_error_text(), cases[i].text))
            fail_msg("\"%s\" lacks \"%s\"", zr_error_text(), cases[i].text);
    }
    assert_int_equal(ops->update_spans(s, &u, spans, 0), 0);
    ops->free(dev, p, 4096);
    ops->stream_close(s);
}

/* --- tables of copies --- */

enum { TABLE_BYTES = 1 << 17, POISON = 0xa5 };

/* Draws up to ZR_MAX_COPIES copies between two areas of TABLE_BYTES. Each copy takes the next part of both
 * areas, at any alignment, as rows with gaps. The last row may be short. */
static int draw_table(char *to, const char *from, struct zr_copy_rows *table)
{
    int n = 0, most = (int)(random_bits(&suite_rng) % (ZR_MAX_COPIES + 1));
    int64_t dst = 0, src = 0;
    while (n < most) {
        /* whole vectors, elements, or bytes */
        int64_t grain = (int64_t[]){1, 2, 4, 16}[random_bits(&suite_rng) % 4];
        int64_t row = grain * (1 + (int64_t)(random_bits(&suite_rng) % (n % 8 ? 40 : 700)));
        int64_t rows = 1 + (int64_t)(random_bits(&suite_rng) % 4);
        int64_t d = row + grain * (int64_t)(random_bits(&suite_rng) % 3),
                s = row + grain * (int64_t)(random_bits(&suite_rng) % 3);
        int64_t bytes = rows * row - (int64_t)(random_bits(&suite_rng) % (uint64_t)row);
        dst = (dst + grain - 1) / grain * grain;
        src = (src + grain - 1) / grain * grain;
        if (dst + rows * d > TABLE_BYTES || src + rows * s > TABLE_BYTES)
            break;
        table[n] = (struct zr_copy_rows){to + dst, from + src, row, bytes, d, s};
        if (random_bits(&suite_rng) % 8 == 0)
            table[n].bytes = 0;
        dst += rows * d;
        src += rows * s;
        n++;
    }
    return n;
}

static void copy_table(const struct zr_copy_rows *table, int n, char *want, const char *given, char *to,
                       const char *from)
{
    for (int i = 0; i < n; i++)
        for (int64_t at = 0; at < table[i].bytes; at++) {
            int64_t row = at / table[i].row_bytes, col = at % table[i].row_bytes;
            want[(char *)table[i].dst - to + row * table[i].dst_stride + col] =
                given[(const char *)table[i].src - from + row * table[i].src_stride + col];
        }
}

static void test_copy_rows(void **state)
{
    struct zr_device *dev = *state;
    const struct zr_device_ops *ops = dev->ops;
    struct zr_stream *s = suite_stream(dev, ZR_STREAM_QUEUE);
    char *from = device_memory(dev, TABLE_BYTES), *to = device_memory(dev, TABLE_BYTES);
    char *given = malloc(TABLE_BYTES), *want = malloc(TABLE_BYTES), *got = malloc(TABLE_BYTES);
    struct zr_copy_rows table[ZR_MAX_COPIES];
    for (int i = 0; i < TABLE_BYTES; i++)
        given[i] = (char)random_bits(&suite_rng);
    assert_int_equal(ops->copy(s, from, given, TABLE_BYTES), 0);
    for (int round = 0; round < 30; round++) {
        memset(want, POISON, TABLE_BYTES);
        assert_int_equal(ops->copy(s, to, want, TABLE_BYTES), 0);
        assert_int_equal(ops->stream_sync(s), 0);
        int n = draw_table(to, from, table);
        copy_table(table, n, want, given, to, from);
        assert_int_equal(ops->copy_rows(s, table, n), 0);
        memset(table, 0xff, sizeof table); /* it was copied */
        assert_int_equal(ops->copy(s, got, to, TABLE_BYTES), 0);
        assert_int_equal(ops->stream_sync(s), 0);
        assert_memory_equal(got, want, TABLE_BYTES);
    }
    ops->free(dev, from, TABLE_BYTES);
    ops->free(dev, to, TABLE_BYTES);
    free(given);
    free(want);
    free(got);
    ops->stream_close(s);
}

/* A refused table queues nothing. */
static void test_copy_rows_refused(void **state)
{
    struct zr_device *dev = *state;
    struct zr_stream *s = suite_stream(dev, ZR_STREAM_QUEUE);
    char *p = device_memory(dev, 4096);
    const struct zr_copy_rows good = {p, p + 1024, 64, 200, 128, 64};
    struct {
        const char *text;
        struct zr_copy_rows c;
    } cases[] = {{"copy 1: bytes is -1", {p + 512, p + 2048, 64, -1, 64, 64}},
                 {"row_bytes 0", {p + 512, p + 2048, 0, 64, 64, 64}},
                 {"rows of 64 bytes are 63 apart in dst, 64 in src", {p + 512, p + 2048, 64, 65, 63, 64}},
                 {"64 apart in dst, 0 in src", {p + 512, p + 2048, 64, 65, 64, 0}},
                 {"apart", {p + 512, p + 2048, 64, INT64_MAX, 128, 128}},
                 {"copy 1 writes where copy 0 reads", {p + 1024 + 199, p + 2048, 64, 1, 0, 0}},
                 {"copy 0 writes where copy 1 reads", {p + 2048, p + 391, 64, 1, 0, 0}},
                 {"copy 1 writes where copy 1 reads", {p + 2048, p + 2112, 64, 128, 64, 64}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct zr_copy_rows table[2] = {good, cases[i].c};
        assert_int_equal(dev->ops->copy_rows(s, table, 2), ZERO_ERR_ARG);
        if (!strstr(zr_error_text(), cases[i].text))
            fail_msg("\"%s\" lacks \"%s\"", zr_error_text(), cases[i].text);
    }
    assert_int_equal(dev->ops->copy_rows(s, &good, ZR_MAX_COPIES + 1), ZERO_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), "65 copies, 0 to 64"));
    assert_int_equal(dev->ops->copy_rows(s, NULL, -1), ZERO_ERR_ARG);
    assert_int_equal(dev->ops->copy_rows(s, NULL, 0), 0);
    dev->ops->free(dev, p, 4096);
    dev->ops->stream_close(s);
}

/* The caller may change the value at once. */
static void test_put(void **state)
{
    struct zr_device *dev = *state;
    struct zr_stream *s = suite_stream(dev, ZR_STREAM_QUEUE);
    uint64_t value[ZR_PUT_BYTES / 8], want[3][ZR_PUT_BYTES / 8], got[3][ZR_PUT_BYTES / 8];
    memset(want, 0, sizeof want);
    void *p = device_memory(dev, sizeof got);
    assert_int_equal(dev->ops->zero(s, p, sizeof got), 0);
    for (int i = 0; i < 3; i++) {
        int64_t bytes = ZR_PUT_BYTES >> i;
        for (size_t j = 0; j < sizeof value / sizeof *value; j++)
            value[j] = random_bits(&suite_rng);
        memcpy(want[i], value, (size_t)bytes);
        assert_int_equal(dev->ops->put(s, (char *)p + i * ZR_PUT_BYTES, value, bytes), 0);
        memset(value, 0, sizeof value);
    }
    assert_int_equal(dev->ops->copy(s, got, p, sizeof got), 0);
    assert_int_equal(dev->ops->stream_sync(s), 0);
    assert_memory_equal(got, want, sizeof got);
    dev->ops->free(dev, p, sizeof got);
    dev->ops->stream_close(s);
}

/* Host memory is zeroed, aligned, and accessible to streams. Time stamps are in order, and on the host's
 * clock. */
static void test_host_memory_and_stamps(void **state)
{
    struct zr_device *dev = *state;
    struct zr_stream *s = suite_stream(dev, ZR_STREAM_QUEUE);
    void *p, *host;
    assert_int_equal(dev->ops->host_alloc(dev, 0, &host), ZERO_ERR_ARG);
    assert_int_equal(dev->ops->host_alloc(dev, 100, &host), 0);
    assert_int_equal((uintptr_t)host % 4096, 0);
    for (int i = 0; i < 100; i++)
        assert_int_equal(((char *)host)[i], 0);
    p = device_memory(dev, 100);
    memset(host, 7, 50);
    assert_int_equal(dev->ops->copy(s, p, host, 50), 0);
    assert_int_equal(dev->ops->copy(s, (char *)host + 50, p, 50), 0);
    assert_int_equal(dev->ops->stream_sync(s), 0);
    for (int i = 0; i < 100; i++)
        assert_int_equal(((char *)host)[i], 7);
    dev->ops->free(dev, p, 100);
    dev->ops->host_free(dev, host, 100);

    int64_t *at;
    assert_int_equal(dev->ops->host_alloc(dev, 3 * sizeof *at, &host), 0);
    at = host;
    for (int i = 0; i < 3; i++)
        assert_int_equal(dev->ops->stamp(s, &at[i]), 0);
    assert_int_equal(dev->ops->stream_sync(s), 0);
    assert_true(at[0] > 0 && at[0] <= at[1] && at[1] <= at[2]);
    dev->ops->host_free(dev, host, 3 * sizeof *at);
    dev->ops->stream_close(s);
}

int suite_of_work(struct zr_device *dev)
{
    struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory),        cmocka_unit_test(test_call_copies_its_argument),
        cmocka_unit_test(test_kernels),       cmocka_unit_test(test_sums),
        cmocka_unit_test(test_put),           cmocka_unit_test(test_host_memory_and_stamps),
        cmocka_unit_test(test_copy_rows),     cmocka_unit_test(test_copy_rows_refused),
        cmocka_unit_test(test_sum_ranges),    cmocka_unit_test(test_update_spans),
        cmocka_unit_test(test_largest_block), cmocka_unit_test(test_raw_bits),
    };
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++)
        tests[i].initial_state = dev;
    return cmocka_run_group_tests_name("work", tests, NULL, NULL);
}
