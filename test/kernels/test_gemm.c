/* test_gemm.c: matrix products against an fp64 reference: transposes, types, beta, bias, batches, strides;
 * their bits from run to run and from team to team; and, with --bench, their speed.
 *
 * Inputs are rounded to their type before the reference sees them, so what is measured is the product's own
 * error: at most k+2 roundings of fp32 for each |a||b|, and one of the output type. */
#include "kernels/gemm.h"
#include "test/kernels/random.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum { CANARY = 0xc5 };

static struct random_source rng;

/* A batch of stored matrices, rows x ld, of a dtype, with its exact values beside it. */
struct matrix {
    enum zr_dtype dtype;
    int64_t n; /* elements over all */
    void *data;
    double *value;
};

static struct matrix matrix_make(enum zr_dtype dtype, int64_t n)
{
    const struct zr_host_kernels *k = zr_host_kernels(ZR_ISA_PORTABLE);
    struct matrix x = {dtype, n, malloc((size_t)n * 4), malloc((size_t)n * sizeof(double))};
    float *f = x.data;
    for (int64_t i = 0; i < n; i++)
        f[i] = random_normal(&rng);
    k->cast(x.data, dtype, x.data, ZR_F32, n);
    for (int64_t i = 0; i < n; i++) {
        uint16_t half = 0;
        if (dtype == ZR_BF16)
            memcpy(&half, (char *)x.data + 2 * i, 2);
        x.value[i] = dtype == ZR_F32 ? f[i] : float_of_bf16(half);
    }
    return x;
}

static void matrix_free(struct matrix *x)
{
    free(x->data);
    free(x->value);
}

static double element(const struct matrix *x, int64_t i)
{
    if (x->dtype == ZR_F32)
        return ((float *)x->data)[i];
    uint16_t half;
    memcpy(&half, (char *)x->data + 2 * i, 2);
    return float_of_bf16(half);
}

struct shape {
    int64_t m, n, k, n_batch, pad; /* pad: extra elements in each row */
};

static void check_one(struct zr_gemm *g, struct shape s, bool ta, bool tb, enum zr_dtype ab, enum zr_dtype ct,
                      enum zr_dtype bias_dtype, float beta)
{
    int64_t rows_a = ta ? s.k : s.m, lda = (ta ? s.m : s.k) + s.pad;
    int64_t rows_b = tb ? s.n : s.k, ldb = (tb ? s.k : s.n) + s.pad, ldc = s.n + s.pad;
    struct matrix a = matrix_make(ab, s.n_batch * rows_a * lda),
                  b = matrix_make(ab, s.n_batch * rows_b * ldb), c = matrix_make(ct, s.n_batch * s.m * ldc),
                  bias = matrix_make(bias_dtype ? bias_dtype : ZR_F32, s.n);
    struct zr_gemm_args args = {.trans_a = ta,
                                .trans_b = tb,
                                .m = s.m,
                                .n = s.n,
                                .k = s.k,
                                .ab_dtype = ab,
                                .c_dtype = ct,
                                .bias_dtype = bias_dtype,
                                .a = a.data,
                                .b = b.data,
                                .bias = bias_dtype ? bias.data : NULL,
                                .c = c.data,
                                .lda = lda,
                                .ldb = ldb,
                                .ldc = ldc,
                                .beta = beta,
                                .n_batch = s.n_batch,
                                .stride_a = rows_a * lda,
                                .stride_b = rows_b * ldb,
                                .stride_c = s.m * ldc};
    if (beta == 0) /* what C held must not matter, NaN included */
        for (int64_t i = 0; i < c.n; i++)
            if (i % ldc < s.n)
                memset((char *)c.data + i * zr_dtype_bytes(ct), 0xff, (size_t)zr_dtype_bytes(ct));
    int err = zr_gemm_run(g, &args);
    if (err)
        fail_msg("%s", zr_error_text());

    for (int64_t z = 0; z < s.n_batch; z++) {
        for (int64_t i = 0; i < s.m; i++) {
            for (int64_t j = 0; j < ldc; j++) {
                int64_t at = z * s.m * ldc + i * ldc + j;
                double got = element(&c, at), want = 0, size = 0;
                if (j >= s.n) { /* between the rows nothing may be written */
                    assert_true(got == c.value[at]);
                    continue;
                }
                for (int64_t l = 0; l < s.k; l++) {
                    double p = a.value[z * rows_a * lda + (ta ? l * lda + i : i * lda + l)] *
                               b.value[z * rows_b * ldb + (tb ? j * ldb + l : l * ldb + j)];
                    want += p;
                    size += fabs(p);
                }
                if (bias_dtype)
                    want += bias.value[j], size += fabs(bias.value[j]);
                if (beta != 0)
                    want += c.value[at], size += fabs(c.value[at]);
                double bound = size * (double)(s.k + 2) * 0x1p-24 + (ct == ZR_BF16 ? fabs(want) * 0x1p-8 : 0);
                if (!(fabs(got - want) <= bound))
                    fail_msg("%c%c %s->%s bias %s beta %g, %ldx%ldx%ld batch %ld: C[%ld][%ld][%ld] = %.9g, "
                             "not %.9g +- %g",
                             ta ? 'T' : 'N', tb ? 'T' : 'N', zr_dtype_name(ab), zr_dtype_name(ct),
                             bias_dtype ? zr_dtype_name(bias_dtype) : "none", (double)beta, (long)s.m,
                             (long)s.n, (long)s.k, (long)s.n_batch, (long)z, (long)i, (long)j, got, want,
                             bound);
            }
        }
    }
    matrix_free(&a), matrix_free(&b), matrix_free(&c), matrix_free(&bias);
}

static void test_products(void **state)
{
    (void)state;
    static const struct shape shapes[] = {{1, 1, 1, 1, 0},    {7, 5, 3, 1, 2},   {64, 48, 32, 1, 0},
                                          {33, 65, 17, 1, 5}, {16, 16, 8, 6, 0}, {9, 31, 20, 4, 3},
                                          {1, 40, 64, 1, 0},  {40, 1, 64, 1, 0}};
    static const struct {
        enum zr_dtype ab, c;
    } types[] = {{ZR_F32, ZR_F32}, {ZR_BF16, ZR_F32}, {ZR_BF16, ZR_BF16}};
    static const enum zr_dtype biases[] = {0, ZR_F32, ZR_BF16};
    struct zr_gemm *g;
    assert_int_equal(zr_gemm_open(1, &g), 0);
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int t = 0; t < 3; t++)
            for (int transposes = 0; transposes < 4; transposes++)
                for (int b = 0; b < 3; b++)
                    for (int beta = 0; beta < 2; beta++)
                        check_one(g, shapes[s], transposes & 1, transposes & 2, types[t].ab, types[t].c,
                                  biases[b], (float)beta);
    zr_gemm_close(g);
}

/* Attention's layout: heads lie beside each other in a row of 3*C, so a batch's rows interleave. */
static void test_interleaved_batch(void **state)
{
    (void)state;
    enum { T = 24, HEADS = 3, SIZE = 16, ROW = 3 * HEADS * SIZE };
    struct matrix qkv = matrix_make(ZR_F32, T * ROW);
    float *out = malloc(sizeof(float) * HEADS * T * T);
    memset(out, 0xff, sizeof(float) * HEADS * T * T);
    struct zr_gemm *g;
    assert_int_equal(zr_gemm_open(1, &g), 0);
    struct zr_gemm_args args = {.trans_b = true,
                                .m = T,
                                .n = T,
                                .k = SIZE,
                                .ab_dtype = ZR_F32,
                                .c_dtype = ZR_F32,
                                .a = qkv.data,
                                .b = (float *)qkv.data + HEADS * SIZE,
                                .c = out,
                                .lda = ROW,
                                .ldb = ROW,
                                .ldc = T,
                                .n_batch = HEADS,
                                .stride_a = SIZE,
                                .stride_b = SIZE,
                                .stride_c = T * T};
    assert_int_equal(zr_gemm_run(g, &args), 0);
    for (int h = 0; h < HEADS; h++)
        for (int i = 0; i < T; i++)
            for (int j = 0; j < T; j++) {
                double want = 0;
                for (int l = 0; l < SIZE; l++)
                    want += qkv.value[i * ROW + h * SIZE + l] * qkv.value[j * ROW + (HEADS + h) * SIZE + l];
                assert_true(fabs(out[(h * T + i) * T + j] - want) < 1e-4);
            }
    zr_gemm_close(g);
    free(out);
    matrix_free(&qkv);
}

/* The same product again, on a fresh context, and of matrices that lie elsewhere gives the same bits. */
static void test_repeats_to_the_bit(void **state)
{
    (void)state;
    static const struct shape shapes[] = {{128, 96, 200, 1, 0}, {64, 65, 257, 1, 0}, {32, 32, 16, 8, 0}};
    for (int dtype = ZR_F32; dtype <= ZR_BF16; dtype++) {
        for (int i = 0; i < 3; i++) {
            struct shape s = shapes[i];
            struct matrix a = matrix_make((enum zr_dtype)dtype, s.n_batch * s.m * s.k),
                          b = matrix_make((enum zr_dtype)dtype, s.n_batch * s.k * s.n);
            size_t bytes = (size_t)(s.n_batch * s.m * s.n) * 4;
            void *first = malloc(bytes), *again = malloc(bytes);
            struct zr_gemm_args args = {.m = s.m,
                                        .n = s.n,
                                        .k = s.k,
                                        .ab_dtype = (enum zr_dtype)dtype,
                                        .c_dtype = ZR_F32,
                                        .a = a.data,
                                        .b = b.data,
                                        .c = first,
                                        .lda = s.k,
                                        .ldb = s.n,
                                        .ldc = s.n,
                                        .n_batch = s.n_batch,
                                        .stride_a = s.m * s.k,
                                        .stride_b = s.k * s.n,
                                        .stride_c = s.m * s.n};
            struct zr_gemm *g, *h;
            assert_int_equal(zr_gemm_open(1, &g), 0);
            assert_int_equal(zr_gemm_open(1, &h), 0);
            assert_int_equal(zr_gemm_run(g, &args), 0);
            args.c = again;
            size_t shift = 4, bytes_a = (size_t)(a.n * zr_dtype_bytes(a.dtype));
            char *moved = malloc(bytes_a + shift);
            memcpy(moved + shift, a.data, bytes_a);
            for (int run = 0; run < 8; run++) {
                memset(again, 0xff, bytes);
                args.a = run & 2 ? (void *)(moved + shift) : a.data;
                assert_int_equal(zr_gemm_run(run & 1 ? h : g, &args), 0);
                assert_memory_equal(first, again, bytes);
            }
            free(moved);
            zr_gemm_close(g), zr_gemm_close(h);
            free(first), free(again);
            matrix_free(&a), matrix_free(&b);
        }
    }
}

static void test_bad_arguments(void **state)
{
    (void)state;
    float x[16] = {0};
    struct zr_gemm *g;
    assert_int_equal(zr_gemm_open(0, &g), ZR_ERR_ARG);
    assert_null(g);
    assert_int_equal(zr_gemm_open(1, &g), 0);
    const struct zr_gemm_args good = {.m = 2,
                                      .n = 2,
                                      .k = 2,
                                      .ab_dtype = ZR_F32,
                                      .c_dtype = ZR_F32,
                                      .a = x,
                                      .b = x + 4,
                                      .c = x + 8,
                                      .lda = 2,
                                      .ldb = 2,
                                      .ldc = 2,
                                      .n_batch = 1};
    struct zr_gemm_args a = good;
    a.k = 0;
    assert_int_equal(zr_gemm_run(g, &a), ZR_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), "at least 1"));
    a = good, a.lda = 1;
    assert_int_equal(zr_gemm_run(g, &a), ZR_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), "lda"));
    a = good, a.beta = 0.5f;
    assert_int_equal(zr_gemm_run(g, &a), ZR_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), "beta"));
    a = good, a.ab_dtype = a.c_dtype = ZR_F16;
    assert_int_equal(zr_gemm_run(g, &a), ZR_ERR_NOTSUP);
    assert_non_null(strstr(zr_error_text(), "f16"));
    a = good, a.c_dtype = ZR_BF16;
    assert_int_equal(zr_gemm_run(g, &a), ZR_ERR_NOTSUP);
    assert_int_equal(zr_gemm_run(g, &good), 0);
    zr_gemm_close(g);
    zr_gemm_close(NULL);
}

/* More shapes than the table starts with. */
static void test_many_shapes(void **state)
{
    (void)state;
    struct zr_gemm *g;
    assert_int_equal(zr_gemm_open(1, &g), 0);
    for (int round = 0; round < 2; round++)
        for (int m = 1; m <= 80; m++)
            check_one(g, (struct shape){m, 3, 4, 1, 0}, false, false, ZR_F32, ZR_F32, 0, 0);
    zr_gemm_close(g);
}

/* --- --bench --- */

static void bench_one(struct zr_gemm *g, const char *what, struct shape s, bool ta, bool tb,
                      enum zr_dtype dtype, enum zr_dtype ct, float beta)
{
    struct matrix a = matrix_make(dtype, s.n_batch * s.m * s.k),
                  b = matrix_make(dtype, s.n_batch * s.k * s.n), c = matrix_make(ct, s.n_batch * s.m * s.n);
    struct zr_gemm_args args = {.trans_a = ta,
                                .trans_b = tb,
                                .m = s.m,
                                .n = s.n,
                                .k = s.k,
                                .ab_dtype = dtype,
                                .c_dtype = ct,
                                .a = a.data,
                                .b = b.data,
                                .c = c.data,
                                .lda = ta ? s.m : s.k,
                                .ldb = tb ? s.k : s.n,
                                .ldc = s.n,
                                .beta = beta,
                                .n_batch = s.n_batch,
                                .stride_a = s.m * s.k,
                                .stride_b = s.k * s.n,
                                .stride_c = s.m * s.n};
    int64_t best = INT64_MAX;
    for (int i = 0; i < 7; i++) {
        int64_t t = zr_now_ns();
        if (zr_gemm_run(g, &args))
            printf("%s\n", zr_error_text());
        t = zr_now_ns() - t;
        if (i > 0 && t < best) /* the first makes the primitive */
            best = t;
    }
    printf("%-12s %4ldx%4ldx%4ld batch %2ld %c%c %4s -> %4s beta %g %8.1f GFLOP/s\n", what, (long)s.m,
           (long)s.n, (long)s.k, (long)s.n_batch, ta ? 'T' : 'N', tb ? 'T' : 'N', zr_dtype_name(dtype),
           zr_dtype_name(ct), (double)beta, 2.0 * (double)(s.m * s.n * s.k * s.n_batch) / (double)best);
    matrix_free(&a), matrix_free(&b), matrix_free(&c);
}

static int bench(int n_threads)
{
    struct zr_gemm *g;
    if (zr_gemm_open(n_threads, &g))
        return 1;
    for (int d = ZR_F32; d <= ZR_BF16; d++) {
        enum zr_dtype t = (enum zr_dtype)d;
        bench_one(g, "forward", (struct shape){512, 768, 256, 1, 0}, false, true, t, t, 0);
        bench_one(g, "input grad", (struct shape){512, 256, 768, 1, 0}, false, false, t, t, 0);
        bench_one(g, "weight grad", (struct shape){768, 256, 512, 1, 0}, true, false, t, t, 1);
        bench_one(g, "weight grad", (struct shape){768, 256, 512, 1, 0}, true, false, t, ZR_F32, 1);
        bench_one(g, "scores", (struct shape){128, 128, 32, 32, 0}, false, true, t, t, 0);
        bench_one(g, "values", (struct shape){128, 32, 128, 32, 0}, false, false, t, t, 0);
        bench_one(g, "transposed", (struct shape){128, 32, 128, 32, 0}, true, false, t, t, 0);
    }
    zr_gemm_close(g);
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_products),           cmocka_unit_test(test_interleaved_batch),
        cmocka_unit_test(test_repeats_to_the_bit), cmocka_unit_test(test_bad_arguments),
        cmocka_unit_test(test_many_shapes),
    };
    rng = random_open();
    if (argc > 1 && strcmp(argv[1], "--bench") == 0)
        return bench(argc > 2 ? atoi(argv[2]) : 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
