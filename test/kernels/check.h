/* SPDX-License-Identifier: Apache-2.0 */
/* check.h: the frame that the programs check_*.c share. Each holds references for a few kernels, checks
 * every instruction set against them, and times them with --bench.
 *
 * Buffers lie between canaries, at a chosen misalignment. They are filled with 0xff (NaN), so that
 * elements a kernel leaves unwritten show. */
#ifndef ZR_TEST_KERNELS_CHECK_H
#define ZR_TEST_KERNELS_CHECK_H

#include "kernels/device.h"
#include "kernels/exact_sum.h"
#include "test/cmocka.h"
#ifdef CHECK_GPU
#include "test/kernels/cuda/check_gpu.h"
#endif
#include "test/kernels/random.h"

#include <math.h>

enum { CANARY_BYTES = 64, CANARY = 0xc5 };

static const int64_t check_sizes[] = {0, 1, 15, 31, 32, 33, 1000, 8100};
/* Offsets of a buffer's start from a 64-byte boundary, in elements. */
static const int64_t check_shifts[] = {0, 1, 3, 7, 13};

#define FOR_EACH(type, x, array)                                                                             \
    for (const type *x = (array); x < (array) + sizeof(array) / sizeof *(array); x++)

struct guarded {
    unsigned char *block;
    int64_t bytes, shift_bytes;
    void *p;
};

static inline struct guarded guarded_open(int64_t bytes, int64_t shift_bytes)
{
    struct guarded g = {NULL, bytes, shift_bytes, NULL};
    int64_t all = (2 * CANARY_BYTES + shift_bytes + bytes + 63) / 64 * 64;
    g.block = aligned_alloc(64, (size_t)all);
    assert_non_null(g.block);
    memset(g.block, CANARY, (size_t)all);
    g.p = g.block + CANARY_BYTES + shift_bytes;
    memset(g.p, 0xff, (size_t)bytes);
    return g;
}

/* Fails the test if anything outside the buffer was written, and frees it. */
static inline void guarded_close(struct guarded *g)
{
    const unsigned char *end = (unsigned char *)g->p + g->bytes;
    for (const unsigned char *c = g->block; c < (unsigned char *)g->p; c++)
        assert_int_equal(*c, CANARY);
    for (const unsigned char *c = end; c < end + CANARY_BYTES; c++)
        assert_int_equal(*c, CANARY);
    free(g->block);
    g->block = NULL;
}

/* Mostly normal numbers, and sometimes zeros, subnormals, huge and tiny ones. */
static inline float check_value(struct random_source *r)
{
    switch (random_below(r, 40)) {
    case 0:
        return 0;
    case 1:
        return -0.0f;
    case 2:
        return zr_bits_float((uint32_t)random_below(r, 0x800000)); /* subnormal */
    case 3:
        return random_normal(r) * 1e30f;
    case 4:
        return random_normal(r) * 1e-30f;
    default:
        return random_normal(r);
    }
}

/* Returns whether the bits are equal or both are NaN. Which of two NaNs survives an operation is not
 * defined. */
static inline bool same_float(float a, float b)
{
    return zr_float_bits(a) == zr_float_bits(b) || (isnan(a) && isnan(b));
}

static inline void assert_same_floats(const char *what, const float *got, const float *want, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (!same_float(got[i], want[i]))
            fail_msg("%s: [%lld] of %lld is %a, not %a", what, (long long)i, (long long)n, (double)got[i],
                     (double)want[i]);
}

/* Calls run(arg) for 60 ms and prints the best rate, from the bytes moved per call. */
static inline void bench(const char *kernel, const char *isa, const char *where, int64_t bytes_moved,
                         void (*run)(void *arg), void *arg)
{
    int64_t best = INT64_MAX, start = zr_now_ns();
    int64_t repeat = bytes_moved < 4000000 ? 4000000 / bytes_moved + 1 : 1;
    run(arg);
    do {
        int64_t t = zr_now_ns();
        for (int64_t i = 0; i < repeat; i++)
            run(arg);
        t = zr_now_ns() - t;
        if (t < best)
            best = t;
    } while (zr_now_ns() - start < 60000000);
    printf("%-28s %-9s %-6s %8.1f GB/s\n", kernel, isa, where, (double)(bytes_moved * repeat) / (double)best);
}

struct timed_update {
    const struct zr_host_kernels *k;
    struct zr_update u;
};

/* An update for bench. */
static inline void run_update(void *arg)
{
    const struct timed_update *a = arg;
    a->k->update(&a->u);
}

/* The two sizes of a bench, in elements: one fits in the second-level cache, the other is far beyond the
 * last. */
struct bench_size {
    const char *where;
    int64_t n;
};
static const struct bench_size bench_sizes[] = {{"cache", 16384}, {"memory", 1 << 24}};

/* Runs the checks of one kernel table, or times it with --bench. Returns the number that failed. */
static inline int check_table(int argc, char **argv, const struct CMUnitTest *tests, size_t n_tests,
                              void (*time_it)(const struct zr_host_kernels *k),
                              const struct zr_host_kernels *k)
{
    struct CMUnitTest with_state[16];
    if (n_tests > 16)
        abort();
    if (argc > 1 && strcmp(argv[1], "--bench") == 0) {
        time_it(k);
        return 0;
    }
    for (size_t i = 0; i < n_tests; i++) {
        with_state[i] = tests[i];
        with_state[i].initial_state = (void *)(uintptr_t)k;
    }
    printf("%s\n", k->name);
    return _cmocka_run_group_tests(k->name, with_state, n_tests, NULL, NULL);
}

/* The main function of a program: runs once per available instruction set. Built with CHECK_GPU, it runs
 * once for GPU 0, and is skipped without one. */
static inline int check_main(int argc, char **argv, const struct CMUnitTest *tests, size_t n_tests,
                             void (*time_it)(const struct zr_host_kernels *k))
{
    int failed = 0;
#ifdef CHECK_GPU
    const struct zr_host_kernels *gpu = zr_check_gpu_open();
    if (!gpu) {
        printf("%s\n", zr_error_text());
        return 77; /* Meson's code for a skipped test */
    }
    failed = check_table(argc, argv, tests, n_tests, time_it, gpu);
    zr_check_gpu_close();
#else
    for (int isa = 0; isa < ZR_ISA_COUNT; isa++)
        if (zr_host_kernels((enum zr_isa)isa))
            failed += check_table(argc, argv, tests, n_tests, time_it, zr_host_kernels((enum zr_isa)isa));
#endif
    return failed;
}

#endif
