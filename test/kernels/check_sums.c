/* SPDX-License-Identifier: Apache-2.0 */
/* check_sums.c: checks and times sum_tree and sum_squares. */
#include "test/kernels/check.h"
#include "test/kernels/exact_merge.h"

static struct random_source rng;

/* --- sum_tree --- */

static float source_value(const void *src, enum zero_dtype dtype, int64_t i)
{
    return dtype == ZERO_F32 ? ((const float *)src)[i] : bf16_to_float(((const uint16_t *)src)[i]);
}

/* The tree by its definition. */
static float tree_sum(const void *const *src, enum zero_dtype dtype, int lo, int n, int64_t i)
{
    if (n == 1)
        return source_value(src[lo], dtype, i);
    int half = 1;
    while (half * 2 < n)
        half *= 2;
    return tree_sum(src, dtype, lo, half, i) + tree_sum(src, dtype, lo + half, n - half, i);
}

static void check_tree_one(const struct zr_host_kernels *k, int n_src, enum zero_dtype dtype, int64_t n,
                           int64_t shift, bool accumulate, bool tame)
{
    int64_t bytes = zr_dtype_bytes(dtype);
    struct guarded src[ZR_MAX_SOURCES], dst = guarded_open(4 * n, 4 * shift);
    const void *p[ZR_MAX_SOURCES];
    float *was = malloc((size_t)(4 * n) + 1), *out = dst.p;
    for (int s = 0; s < n_src; s++) {
        src[s] = guarded_open(bytes * n, bytes * ((shift + s) % 16));
        p[s] = src[s].p;
        for (int64_t i = 0; i < n; i++) {
            float x = tame ? random_normal(&rng) : check_value(&rng);
            zr_host_kernels(ZR_ISA_PORTABLE)->cast((char *)src[s].p + bytes * i, dtype, &x, ZERO_F32, 1);
        }
    }
    if (accumulate)
        for (int64_t i = 0; i < n; i++)
            out[i] = random_normal(&rng);
    memcpy(was, out, (size_t)(4 * n));

    k->sum_tree(out, p, n_src, dtype, n, accumulate);

    for (int64_t i = 0; i < n; i++) {
        float want = tree_sum(p, dtype, 0, n_src, i);
        double exact = accumulate ? was[i] : 0, size = fabs(exact);
        for (int s = 0; s < n_src; s++) {
            exact += source_value(p[s], dtype, i);
            size += fabs(source_value(p[s], dtype, i));
        }
        if (accumulate)
            want = was[i] + want;
        if (!same_float(out[i], want))
            fail_msg("%s: %d sources of %s: [%lld] of %lld is %a, not %a", k->name, n_src,
                     zr_dtype_name(dtype), (long long)i, (long long)n, (double)out[i], (double)want);
        if (tame) /* at most eight roundings between a leaf and the root */
            assert_true(fabs(out[i] - exact) <= 8 * 0x1p-24 * size);
    }
    for (int s = 0; s < n_src; s++)
        guarded_close(&src[s]);
    guarded_close(&dst);
    free(was);
}

static void check_tree(void **state)
{
    for (int n_src = 1; n_src <= ZR_MAX_SOURCES; n_src++)
        for (int dtype = ZERO_F32; dtype <= ZERO_BF16; dtype++)
            for (int accumulate = 0; accumulate < 2; accumulate++)
                FOR_EACH(int64_t, n, check_sizes)
                {
                    if (*n > 1000 && n_src > 9) /* saves time */
                        continue;
                    check_tree_one(*state, n_src, (enum zero_dtype)dtype, *n, check_shifts[(n_src + *n) % 5],
                                   accumulate, n_src % 2);
                }
}

/* dst may be one of the sources. */
static void check_tree_in_place(void **state)
{
    const struct zr_host_kernels *k = *state;
    enum { N = 1500, MOST = 13 };
    float x[MOST][N], want[N];
    for (int n_src = 1; n_src <= MOST; n_src++)
        for (int at = 0; at < n_src; at++) {
            const void *p[MOST];
            for (int s = 0; s < n_src; s++) {
                p[s] = x[s];
                for (int i = 0; i < N; i++)
                    x[s][i] = random_normal(&rng);
            }
            for (int i = 0; i < N; i++)
                want[i] = tree_sum(p, ZERO_F32, 0, n_src, i);
            k->sum_tree(x[at], p, n_src, ZERO_F32, N, false);
            assert_same_floats(k->name, x[at], want, N);
        }
}

/* --- sum_squares --- */

static void check_squares(void **state)
{
    const struct zr_host_kernels *k = *state;
    FOR_EACH(int64_t, n, check_sizes)
    FOR_EACH(int64_t, shift, check_shifts)
    {
        struct guarded g = guarded_open(4 * *n, 4 * *shift);
        struct zr_exact_sum got, want;
        float *x = g.p;
        long double plain = 0;
        zr_exact_reset(&got);
        zr_exact_reset(&want);
        for (int64_t i = 0; i < *n; i++) {
            x[i] = check_value(&rng);
            plain += (long double)x[i] * x[i];
        }
        for (int64_t block = 0; block < *n; block += 32) {
            double a[8];
            for (int j = 0; j < 8; j++) {
                a[j] = 0;
                for (int64_t i = block + j; i < block + 32; i += 8) {
                    double e = i < *n ? x[i] : 0;
                    a[j] = a[j] + e * e;
                }
            }
            zr_exact_add(&want, ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7])));
        }
        k->sum_squares(&got, x, ZERO_F32, *n);
        assert_true(zr_exact_value(&got) == zr_exact_value(&want));
        zr_exact_carry(&got); /* before its carries a value has several forms, afterwards one */
        zr_exact_carry(&want);
        assert_memory_equal(got.limb, want.limb, sizeof got.limb);
        assert_true(fabsl(zr_exact_value(&got) - plain) <= 1e-14L * plain);
        guarded_close(&g);
    }
}

/* The sum of bf16 elements has the bits of the sum of their values in fp32. */
static void check_squares_bf16(void **state)
{
    const struct zr_host_kernels *k = *state;
    FOR_EACH(int64_t, n, check_sizes)
    FOR_EACH(int64_t, shift, check_shifts)
    {
        struct guarded g = guarded_open(2 * *n, 2 * *shift);
        float *wide = malloc((size_t)(4 * *n) + 1);
        struct zr_exact_sum got, want;
        zr_exact_reset(&got);
        zr_exact_reset(&want);
        for (int64_t i = 0; i < *n; i++) {
            ((uint16_t *)g.p)[i] = bf16_from_float(check_value(&rng));
            wide[i] = bf16_to_float(((uint16_t *)g.p)[i]);
        }
        k->sum_squares(&got, g.p, ZERO_BF16, *n);
        k->sum_squares(&want, wide, ZERO_F32, *n);
        zr_exact_carry(&got);
        zr_exact_carry(&want);
        assert_memory_equal(got.limb, want.limb, sizeof got.limb);
        guarded_close(&g);
        free(wide);
    }
}

/* The sum has the same bits however it is cut at block boundaries, and in any order. */
static void check_squares_pieces(void **state)
{
    const struct zr_host_kernels *k = *state;
    enum { N = 8100 };
    float *x = malloc(N * sizeof *x);
    struct zr_exact_sum whole, pieces[3];
    zr_exact_reset(&whole);
    for (int i = 0; i < N; i++)
        x[i] = check_value(&rng);
    k->sum_squares(&whole, x, ZERO_F32, N);
    for (int i = 0; i < 3; i++)
        zr_exact_reset(&pieces[i]);
    for (int64_t at = 0, step; at < N; at += step) {
        step = 32 * (1 + random_below(&rng, 9));
        step = step < N - at ? step : N - at;
        k->sum_squares(&pieces[random_below(&rng, 3)], x + at, ZERO_F32, step);
    }
    exact_merge(&pieces[2], &pieces[0]);
    exact_merge(&pieces[2], &pieces[1]);
    assert_true(zr_exact_value(&pieces[2]) == zr_exact_value(&whole));
    free(x);
}

/* An accumulator near its limits can take more: carries are propagated in time, and lose nothing. The sum
 * is large, so that every part of the kernel runs more than once. */
static void check_squares_carry(void **state)
{
    const struct zr_host_kernels *k = *state;
    enum { N = 300000, MAX_ADDED = ZR_EXACT_MAX_ADDED - 1 };
    static const uint32_t added[] = {0, ZR_EXACT_MAX_ADDED / 4 - 1, ZR_EXACT_MAX_ADDED / 2 - 3, MAX_ADDED};
    float *x = malloc(N * sizeof *x);
    struct zr_exact_sum whole;
    zr_exact_reset(&whole);
    for (int i = 0; i < N; i++)
        x[i] = check_value(&rng);
    zr_host_kernels(ZR_ISA_PORTABLE)->sum_squares(&whole, x, ZERO_F32, N);
    FOR_EACH(uint32_t, n, added)
    {
        struct zr_exact_sum acc, want;
        zr_exact_reset(&acc);
        for (int i = 0; i < ZR_EXACT_TOP; i++) /* the most that this many additions can leave */
            acc.limb[i] = (random_below(&rng, 2) ? 1 : -1) * (int64_t)(*n * UINT64_C(0xffffffff));
        want = acc;
        exact_merge(&want, &whole);
        acc.n_added = *n;
        k->sum_squares(&acc, x, ZERO_F32, N);
        assert_true(acc.n_added < ZR_EXACT_MAX_ADDED);
        zr_exact_carry(&acc);
        assert_memory_equal(acc.limb, want.limb, sizeof acc.limb);
    }
    free(x);
}

/* A single non-finite value is noticed at any position. The largest floats are not taken for one. */
static void check_squares_nonfinite(void **state)
{
    const struct zr_host_kernels *k = *state;
    float x[100];
    for (int at = 0; at < 100; at++)
        for (int kind = 0; kind < 3; kind++) {
            struct zr_exact_sum acc;
            zr_exact_reset(&acc);
            for (int i = 0; i < 100; i++)
                x[i] = 3.4e38f;
            k->sum_squares(&acc, x, ZERO_F32, 100);
            assert_int_equal(acc.nonfinite, 0);
            assert_true(isfinite(zr_exact_value(&acc)));
            x[at] = kind == 0 ? NAN : kind == 1 ? INFINITY : -INFINITY;
            k->sum_squares(&acc, x, ZERO_F32, 100);
            assert_int_equal(acc.nonfinite, 1);
            assert_true(isnan(zr_exact_value(&acc)));
        }
}

/* --- timing --- */

struct timed {
    const struct zr_host_kernels *k;
    const void *src[ZR_MAX_SOURCES];
    float *dst;
    int n_src;
    enum zero_dtype dtype;
    int64_t n;
    bool accumulate;
    struct zr_exact_sum acc;
};

static void run_tree(void *arg)
{
    struct timed *a = arg;
    a->k->sum_tree(a->dst, a->src, a->n_src, a->dtype, a->n, a->accumulate);
}

static void run_squares(void *arg)
{
    struct timed *a = arg;
    a->k->sum_squares(&a->acc, a->dst, ZERO_F32, a->n);
}

static void time_sums(const struct zr_host_kernels *k)
{
    static const int counts[] = {1, 2, 3, 4, 5, 8, 16, 64};
    FOR_EACH(struct bench_size, s, bench_sizes)
    {
        static struct timed a;
        char *pool = aligned_alloc(4096, (size_t)s->n * 4);
        a.k = k;
        a.dst = aligned_alloc(4096, (size_t)s->n * 4);
        memset(pool, 0, (size_t)s->n * 4);
        for (int64_t i = 0; i < s->n; i++)
            a.dst[i] = (float)(i % 100);
        zr_exact_reset(&a.acc);
        a.n = s->n;
        bench("sum_squares", k->name, s->where, 4 * s->n, run_squares, &a);
        for (int dtype = ZERO_F32; dtype <= ZERO_BF16; dtype++)
            for (int accumulate = 0; accumulate < 2; accumulate++)
                FOR_EACH(int, count, counts)
                {
                    char name[64];
                    int64_t bytes = zr_dtype_bytes((enum zero_dtype)dtype);
                    if (accumulate && *count > 2)
                        continue;
                    a.n = s->n / *count / 16 * 16; /* together the sources fill the pool */
                    for (int i = 0; i < *count; i++)
                        a.src[i] = pool + i * a.n * bytes;
                    a.n_src = *count, a.dtype = (enum zero_dtype)dtype, a.accumulate = accumulate;
                    snprintf(name, sizeof name, "sum_tree %2d x %s%s", *count, zr_dtype_name(a.dtype),
                             accumulate ? " +=" : "");
                    bench(name, k->name, s->where, a.n * (*count * bytes + (accumulate ? 8 : 4)), run_tree,
                          &a);
                }
        free(pool), free(a.dst);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(check_tree),
                                       cmocka_unit_test(check_tree_in_place),
                                       cmocka_unit_test(check_squares),
                                       cmocka_unit_test(check_squares_bf16),
                                       cmocka_unit_test(check_squares_pieces),
                                       cmocka_unit_test(check_squares_carry),
                                       cmocka_unit_test(check_squares_nonfinite)};
    rng = random_open();
    return check_main(argc, argv, tests, sizeof tests / sizeof *tests, time_sums);
}
