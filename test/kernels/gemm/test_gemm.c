/* SPDX-License-Identifier: Apache-2.0 */
/* test_gemm.c: tests matrix products against an fp64 reference: transposes, types, beta, bias, epilogues,
 * batches and strides. Their bits must be the same from run to run and for any number of threads. --bench
 * measures their speed. With GEMM_TEST_CUDA they run through cuBLASLt, on a GPU or over a stand-in,
 * otherwise through oneDNN.
 *
 * Inputs are rounded to their type before the reference sees them, so only the product's own error is
 * measured. It is at most k+2 fp32 roundings of each |a||b|, and one rounding to the output type. */
#include "kernels/gemm/gemm.h"
#include "test/cmocka.h"
#include "test/kernels/random.h"
#include "test/stand_in/half.h"

#include <math.h>

static struct random_source rng;
static struct zr_device *dev;
static struct zr_stream *stream;

static void open_device(void)
{
#ifdef GEMM_TEST_CUDA
    assert_int_equal(zr_cuda_device_open(0, &dev), 0);
    assert_int_equal(dev->ops->stream_open(dev, ZR_STREAM_QUEUE, "products", NULL, &stream), 0);
#else
    assert_int_equal(zr_host_device_open(&dev), 0);
    assert_int_equal(dev->ops->stream_open(dev, ZR_STREAM_CALLER, "products", NULL, &stream), 0);
#endif
}

static void close_device(void)
{
    dev->ops->stream_close(stream);
    dev->ops->close(dev);
}

static struct zr_gemm *open_gemm(void)
{
    struct zr_gemm *g;
#ifdef GEMM_TEST_CUDA
    assert_int_equal(zr_gemm_open_cuda(dev, stream, 0, false, &g), 0);
#else
    assert_int_equal(zr_gemm_open(1, &g), 0);
#endif
    return g;
}

/* ROUNDS_BETWEEN: some algorithms of cuBLASLt round the product to C's type before they add C to it, or a
 * bias before a GELU. */
#ifdef GEMM_TEST_CUDA
enum { HAS_F16 = 1, HAS_EPILOGUES = 1, HAS_ANY_BIAS = 0, MOVED_BYTES = 16, ROUNDS_BETWEEN = 1 };
#else
enum { HAS_F16 = 0, HAS_EPILOGUES = 0, HAS_ANY_BIAS = 1, MOVED_BYTES = 4, ROUNDS_BETWEEN = 0 };
#endif

static void copy(void *dst, const void *src, int64_t bytes)
{
    assert_int_equal(dev->ops->copy(stream, dst, src, bytes), 0);
    assert_int_equal(dev->ops->stream_sync(stream), 0);
}

/* A batch of stored matrices (rows x ld) with one dtype, and their exact values. */
struct matrix {
    enum zero_dtype dtype;
    int64_t n;   /* elements in total */
    void *block; /* device memory */
    void *data;  /* (n) inside block */
    double *value;
};

static double round_to(enum zero_dtype t, double x)
{
    float f = (float)x;
    return t == ZERO_F32    ? (double)f
           : t == ZERO_BF16 ? (double)bf16_to_float(bf16_from_float(f))
                            : (double)f16_to_float(f16_from_float(f));
}

static void put_element(void *data, enum zero_dtype t, int64_t i, double x)
{
    if (t == ZERO_F32)
        ((float *)data)[i] = (float)x;
    else
        ((uint16_t *)data)[i] = t == ZERO_BF16 ? bf16_from_float((float)x) : f16_from_float((float)x);
}

static double get_element(const void *data, enum zero_dtype t, int64_t i)
{
    if (t == ZERO_F32)
        return (double)((const float *)data)[i];
    uint16_t h = ((const uint16_t *)data)[i];
    return (double)(t == ZERO_BF16 ? bf16_to_float(h) : f16_to_float(h));
}

/* shift: elements by which the data are off the alignment of device memory. */
static struct matrix matrix_shifted(enum zero_dtype dtype, int64_t n, int64_t shift)
{
    int64_t size = zr_dtype_bytes(dtype);
    struct matrix x = {dtype, n, NULL, NULL, malloc((size_t)n * sizeof(double))};
    void *host = malloc((size_t)(n * size));
    assert_int_equal(dev->ops->alloc(dev, (n + shift) * size, &x.block), 0);
    x.data = (char *)x.block + shift * size;
    for (int64_t i = 0; i < n; i++) {
        x.value[i] = round_to(dtype, (double)random_normal(&rng));
        put_element(host, dtype, i, x.value[i]);
    }
    copy(x.data, host, n * size);
    free(host);
    return x;
}

static struct matrix matrix_make(enum zero_dtype dtype, int64_t n)
{
    return matrix_shifted(dtype, n, 0);
}

static void matrix_free(struct matrix *x)
{
    dev->ops->free(dev, x->block,
                   (int64_t)((char *)x->data - (char *)x->block) + x->n * zr_dtype_bytes(x->dtype));
    free(x->value);
}

/* Returns a copy of the current contents, which the caller frees. */
static double *matrix_read(const struct matrix *x)
{
    int64_t bytes = x->n * zr_dtype_bytes(x->dtype);
    void *host = malloc((size_t)bytes);
    double *out = malloc((size_t)x->n * sizeof *out);
    copy(host, x->data, bytes);
    for (int64_t i = 0; i < x->n; i++)
        out[i] = get_element(host, x->dtype, i);
    free(host);
    return out;
}

/* Fills columns 0 to n-1 of rows of ld with NaN: a product must write them all, and must not read them. */
static void matrix_poison(struct matrix *x, int64_t n, int64_t ld)
{
    int64_t size = zr_dtype_bytes(x->dtype);
    char *host = malloc((size_t)(x->n * size));
    copy(host, x->data, x->n * size);
    for (int64_t i = 0; i < x->n; i++)
        if (i % ld < n)
            memset(host + i * size, 0xff, (size_t)size);
    copy(x->data, host, x->n * size);
    free(host);
}

/* The worst error of a test, in units of the bound, and the number of errors above it. */
static struct {
    double most;
    int n_above;
    char where[256];
} worst;

static bool is_worst(double error, double bound)
{
    bool above = !(error <= bound);
    double part = above && isnan(error) ? INFINITY : error > 0 ? error / bound : 0;
    worst.n_above += above;
    if (part <= worst.most)
        return false;
    worst.most = part;
    return true;
}

static void begin_errors(void)
{
    memset(&worst, 0, sizeof worst);
}

static void end_errors(void)
{
    print_message("           errors are up to %.2f of what is allowed: %s\n", worst.most, worst.where);
    if (worst.n_above)
        fail_msg("%d elements are further off, the worst: %s", worst.n_above, worst.where);
}

/* The largest error of rounding x to t once. */
static double rounding(enum zero_dtype t, double x)
{
    return t == ZERO_F32 ? 0 : t == ZERO_BF16 ? fabs(x) * 0x1p-8 : fabs(x) * 0x1p-11 + 0x1p-25;
}

struct shape {
    int64_t m, n, k, n_batch, pad; /* pad: extra elements in each row */
    int64_t shift;                 /* elements off the alignment of device memory */
};

/* A product of random matrices, C (m, n) = op(A) (m, k) op(B) (k, n), and its parameters. */
struct product {
    struct shape s;
    bool ta, tb;
    struct matrix a, b, c;
    struct zr_gemm_args args;
};

static struct product product_make(struct shape s, bool ta, bool tb, enum zero_dtype ab, enum zero_dtype ct)
{
    int64_t rows_a = ta ? s.k : s.m, lda = (ta ? s.m : s.k) + s.pad;
    int64_t rows_b = tb ? s.n : s.k, ldb = (tb ? s.k : s.n) + s.pad, ldc = s.n + s.pad;
    struct product p = {.s = s,
                        .ta = ta,
                        .tb = tb,
                        .a = matrix_shifted(ab, s.n_batch * rows_a * lda, s.shift),
                        .b = matrix_shifted(ab, s.n_batch * rows_b * ldb, s.shift),
                        .c = matrix_shifted(ct, s.n_batch * s.m * ldc, s.shift)};
    p.args = (struct zr_gemm_args){.trans_a = ta,
                                   .trans_b = tb,
                                   .m = s.m,
                                   .n = s.n,
                                   .k = s.k,
                                   .ab_dtype = ab,
                                   .c_dtype = ct,
                                   .a = p.a.data,
                                   .b = p.b.data,
                                   .c = p.c.data,
                                   .lda = lda,
                                   .ldb = ldb,
                                   .ldc = ldc,
                                   .n_batch = s.n_batch,
                                   .stride_a = rows_a * lda,
                                   .stride_b = rows_b * ldb,
                                   .stride_c = s.m * ldc};
    return p;
}

static void product_free(struct product *p)
{
    matrix_free(&p->a), matrix_free(&p->b), matrix_free(&p->c);
}

/* Element (i, l) of op(A), and (l, j) of op(B), in one matrix of the batch. */
static double element_a(const struct product *p, int64_t batch, int64_t i, int64_t l)
{
    const struct zr_gemm_args *g = &p->args;
    return p->a.value[batch * g->stride_a + (p->ta ? l * g->lda + i : i * g->lda + l)];
}

static double element_b(const struct product *p, int64_t batch, int64_t l, int64_t j)
{
    const struct zr_gemm_args *g = &p->args;
    return p->b.value[batch * g->stride_b + (p->tb ? j * g->ldb + l : l * g->ldb + j)];
}

/* Returns the exact value of C[i][j], and the sum of its terms' magnitudes. */
static double exact_sum(const struct product *p, int64_t batch, int64_t i, int64_t j, double *size)
{
    double sum = 0;
    *size = 0;
    for (int64_t l = 0; l < p->s.k; l++) {
        double x = element_a(p, batch, i, l) * element_b(p, batch, l, j);
        sum += x, *size += fabs(x);
    }
    return sum;
}

static void run_product(struct zr_gemm *g, const struct product *p)
{
    if (zr_gemm_run(g, &p->args))
        fail_msg("%s", zr_error_text());
}

static void check_one(struct zr_gemm *g, struct shape s, bool ta, bool tb, enum zero_dtype ab,
                      enum zero_dtype ct, enum zero_dtype bias_dtype, float beta)
{
    struct product p = product_make(s, ta, tb, ab, ct);
    struct matrix bias = matrix_shifted(bias_dtype ? bias_dtype : ZERO_F32, s.n, s.shift);
    int64_t ldc = p.args.ldc;
    p.args.bias_dtype = bias_dtype;
    p.args.bias = bias_dtype ? bias.data : NULL;
    p.args.beta = beta;
    if (beta == 0)
        matrix_poison(&p.c, s.n, ldc);
    run_product(g, &p);
    double *got_c = matrix_read(&p.c);

    for (int64_t z = 0; z < s.n_batch; z++) {
        for (int64_t i = 0; i < s.m; i++) {
            for (int64_t j = 0; j < ldc; j++) {
                int64_t at = z * s.m * ldc + i * ldc + j;
                double got = got_c[at], size;
                if (j >= s.n) { /* nothing may be written between the rows */
                    assert_true(got == p.c.value[at]);
                    continue;
                }
                double want = exact_sum(&p, z, i, j, &size);
                if (bias_dtype)
                    want += bias.value[j], size += fabs(bias.value[j]);
                if (beta != 0)
                    want += p.c.value[at], size += fabs(p.c.value[at]);
                double bound = size * (double)(s.k + 2) * 0x1p-24 + rounding(ct, want);
                if (ROUNDS_BETWEEN && beta != 0)
                    bound += rounding(ct, size);
                if (is_worst(fabs(got - want), bound))
                    snprintf(worst.where, sizeof worst.where,
                             "%c%c %s->%s bias %s beta %g, %ldx%ldx%ld batch %ld: C[%ld][%ld][%ld] = %.9g, "
                             "not %.9g +- %g",
                             ta ? 'T' : 'N', tb ? 'T' : 'N', zr_dtype_name(ab), zr_dtype_name(ct),
                             bias_dtype ? zr_dtype_name(bias_dtype) : "none", (double)beta, (long)s.m,
                             (long)s.n, (long)s.k, (long)s.n_batch, (long)z, (long)i, (long)j, got, want,
                             bound);
            }
        }
    }
    free(got_c);
    product_free(&p), matrix_free(&bias);
}

static void test_products(void **state)
{
    static const struct shape shapes[] = {{1, 1, 1, 1, 0, 0},    {7, 5, 3, 1, 2, 1},   {64, 48, 32, 1, 0, 0},
                                          {33, 65, 17, 1, 5, 3}, {16, 16, 8, 6, 0, 0}, {9, 31, 20, 4, 3, 0},
                                          {1, 40, 64, 1, 0, 0},  {40, 1, 64, 1, 0, 0}};
    static const struct {
        enum zero_dtype ab, c;
    } types[] = {{ZERO_F32, ZERO_F32},
                 {ZERO_BF16, ZERO_F32},
                 {ZERO_BF16, ZERO_BF16},
                 {ZERO_F16, ZERO_F32},
                 {ZERO_F16, ZERO_F16}};
    static const enum zero_dtype biases[] = {0, ZERO_F32, ZERO_BF16, ZERO_F16};
    struct zr_gemm *g = open_gemm();
    begin_errors();
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int t = 0; t < (HAS_F16 ? 5 : 3); t++)
            for (int transposes = 0; transposes < 4; transposes++)
                for (int b = 0; b < (HAS_F16 ? 4 : 3); b++)
                    for (int beta = 0; beta < 2; beta++)
                        if (HAS_ANY_BIAS || !biases[b] || biases[b] == types[t].c)
                            check_one(g, shapes[s], transposes & 1, transposes & 2, types[t].ab, types[t].c,
                                      biases[b], (float)beta);
    zr_gemm_close(g);
    end_errors();
}

/* --- epilogues --- */

static const double gelu_factor = 0.79788456080286536; /* sqrt(2 / pi) */

static double gelu(double x)
{
    return 0.5 * x * (1 + tanh(gelu_factor * (x + 0.044715 * x * x * x)));
}

static double gelu_slope(double x)
{
    double t = tanh(gelu_factor * (x + 0.044715 * x * x * x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * gelu_factor * (1 + 3 * 0.044715 * x * x);
}

#define STEEPEST_GELU 1.13 /* an upper bound of its slope */
#define GELU_ERROR    1e-5 /* error of cuBLASLt's GELU, relative to its argument */

static const char *checked; /* what check_near reports on */

static void check_near(const char *what, double got, double want, double bound)
{
    if (is_worst(fabs(got - want), bound))
        snprintf(worst.where, sizeof worst.where, "%s of %s is %.9g, not %.9g +- %g", what, checked, got,
                 want, bound);
}

static void check_epilogue(struct zr_gemm *g, struct shape s, bool ta, bool tb, enum zero_dtype t,
                           enum zr_gemm_epilogue epilogue, bool with_bias, float beta)
{
    int64_t ldaux = (s.n + 7) / 8 * 8;
    bool sums = epilogue == ZR_GEMM_SUM_A, slopes = epilogue == ZR_GEMM_DGELU;
    struct product p = product_make(s, ta, tb, t, t);
    char about[96];
    snprintf(about, sizeof about, "%c%c %s epilogue %d%s, %ldx%ldx%ld", ta ? 'T' : 'N', tb ? 'T' : 'N',
             zr_dtype_name(t), (int)epilogue, with_bias ? " with bias" : "", (long)s.m, (long)s.n, (long)s.k);
    checked = about;
    struct matrix aux = matrix_make(t, s.m * ldaux), bias = matrix_make(t, s.n), sum = matrix_make(t, s.m);
    int64_t ldc = p.args.ldc;
    p.args.bias_dtype = t;
    p.args.bias = with_bias ? bias.data : NULL;
    p.args.beta = beta;
    p.args.epilogue = epilogue;
    p.args.aux = sums ? NULL : aux.data;
    p.args.ldaux = sums ? 0 : ldaux;
    p.args.sum = sums ? sum.data : NULL;
    if (beta == 0)
        matrix_poison(&p.c, s.n, ldc);
    if (!slopes)
        matrix_poison(&aux, s.n, ldaux);
    matrix_poison(&sum, s.m, s.m);
    if (!zr_gemm_can(g, &p.args)) {
        print_message("           not here: %s\n", about);
        /* the layouts that the bench's model uses */
        bool layout = epilogue == ZR_GEMM_GELU ? !ta && tb : slopes ? !ta && !tb : ta && !tb;
        assert_false(t == ZERO_BF16 && layout && s.m % 8 == 0 && s.n % 8 == 0 && s.k % 8 == 0);
        product_free(&p), matrix_free(&aux), matrix_free(&bias), matrix_free(&sum);
        return;
    }
    run_product(g, &p);
    double *got_c = matrix_read(&p.c), *got_aux = matrix_read(&aux), *got_sum = matrix_read(&sum);

    for (int64_t i = 0; i < s.m; i++) {
        double column = 0, column_size = 0;
        for (int64_t l = 0; l < s.k; l++) {
            double x = element_a(&p, 0, i, l);
            column += x, column_size += fabs(x);
        }
        if (sums)
            check_near("sum", got_sum[i], column, column_size * (double)s.k * 0x1p-24 + rounding(t, column));
        for (int64_t j = 0; j < s.n; j++) {
            double size, x = exact_sum(&p, 0, i, j, &size), want, bound;
            x += with_bias ? bias.value[j] : 0, size += with_bias ? fabs(bias.value[j]) : 0;
            bound = size * (double)(s.k + 2) * 0x1p-24;
            if (epilogue == ZR_GEMM_GELU) {
                double between = ROUNDS_BETWEEN ? rounding(t, size) : 0;
                check_near("aux", got_aux[i * ldaux + j], x,
                           bound + (with_bias ? between : 0) + rounding(t, x));
                bound += 2 * between;
                want = gelu(x);
                bound = STEEPEST_GELU * bound + GELU_ERROR * (1 + fabs(x));
            } else if (slopes) {
                want = x * gelu_slope(aux.value[i * ldaux + j]);
                bound += ROUNDS_BETWEEN ? rounding(t, size) : 0;
                bound = STEEPEST_GELU * bound + GELU_ERROR * fabs(x);
            } else {
                double before = beta != 0 ? p.c.value[i * ldc + j] : 0;
                want = x + before;
                bound = (size + fabs(before)) * (double)(s.k + 2) * 0x1p-24;
                bound += ROUNDS_BETWEEN && beta != 0 ? rounding(t, size + fabs(before)) : 0;
            }
            check_near("C", got_c[i * ldc + j], want, bound + rounding(t, want));
        }
        for (int64_t j = s.n; j < ldc; j++)
            assert_true(got_c[i * ldc + j] == p.c.value[i * ldc + j]);
        for (int64_t j = s.n; j < ldaux; j++)
            assert_true(got_aux[i * ldaux + j] == aux.value[i * ldaux + j]);
    }
    free(got_c), free(got_aux), free(got_sum);
    product_free(&p), matrix_free(&aux), matrix_free(&bias), matrix_free(&sum);
}

static void test_epilogues(void **state)
{
    static const struct shape shapes[] = {{64, 48, 32, 1, 0, 0}, {33, 65, 17, 1, 5, 0}, {1, 8, 3, 1, 0, 0}};
    static const enum zero_dtype types[] = {ZERO_F32, ZERO_BF16, ZERO_F16};
    struct zr_gemm *g = open_gemm();
    begin_errors();
    for (int i = 0; i < 3; i++)
        for (int t = 0; HAS_EPILOGUES && t < 3; t++)
            for (int transposes = 0; transposes < 4; transposes++) {
                bool ta = transposes & 1, tb = transposes & 2;
                check_epilogue(g, shapes[i], ta, tb, types[t], ZR_GEMM_GELU, true, 0);
                check_epilogue(g, shapes[i], ta, tb, types[t], ZR_GEMM_GELU, false, 0);
                check_epilogue(g, shapes[i], ta, tb, types[t], ZR_GEMM_DGELU, false, 0);
                check_epilogue(g, shapes[i], ta, tb, types[t], ZR_GEMM_SUM_A, false, 0);
                check_epilogue(g, shapes[i], ta, tb, types[t], ZR_GEMM_SUM_A, false, 1);
            }
    zr_gemm_close(g);
    end_errors();
}

/* Attention's layout: heads lie side by side in a row of 3*C, so the matrices of a batch interleave. */
static void test_interleaved_batch(void **state)
{
    enum { T = 24, HEADS = 3, SIZE = 16, ROW = 3 * HEADS * SIZE };
    struct matrix qkv = matrix_make(ZERO_F32, T * ROW);
    struct matrix out = matrix_make(ZERO_F32, HEADS * T * T);
    matrix_poison(&out, T, T);
    struct zr_gemm *g = open_gemm();
    struct zr_gemm_args args = {.trans_b = true,
                                .m = T,
                                .n = T,
                                .k = SIZE,
                                .ab_dtype = ZERO_F32,
                                .c_dtype = ZERO_F32,
                                .a = qkv.data,
                                .b = (float *)qkv.data + HEADS * SIZE,
                                .c = out.data,
                                .lda = ROW,
                                .ldb = ROW,
                                .ldc = T,
                                .n_batch = HEADS,
                                .stride_a = SIZE,
                                .stride_b = SIZE,
                                .stride_c = T * T};
    assert_int_equal(zr_gemm_run(g, &args), 0);
    double *got = matrix_read(&out);
    for (int h = 0; h < HEADS; h++)
        for (int i = 0; i < T; i++)
            for (int j = 0; j < T; j++) {
                double want = 0;
                for (int l = 0; l < SIZE; l++)
                    want += qkv.value[i * ROW + h * SIZE + l] * qkv.value[j * ROW + (HEADS + h) * SIZE + l];
                assert_true(fabs(got[(h * T + i) * T + j] - want) < 1e-4);
            }
    zr_gemm_close(g);
    free(got);
    matrix_free(&out);
    matrix_free(&qkv);
}

/* The same product has the same bits when repeated, on a new context, and with matrices at other
 * addresses. */
static void test_repeats_to_the_bit(void **state)
{
    static const struct shape shapes[] = {
        {128, 96, 200, 1, 0, 0}, {64, 65, 257, 1, 0, 0}, {32, 32, 16, 8, 0, 0}};
    for (int dtype = ZERO_F32; dtype <= ZERO_BF16; dtype++) {
        for (int i = 0; i < 3; i++) {
            struct shape s = shapes[i];
            enum zero_dtype t = (enum zero_dtype)dtype;
            struct product p = product_make(s, false, false, t, ZERO_F32);
            struct matrix moved = matrix_shifted(t, p.a.n, MOVED_BYTES / zr_dtype_bytes(t));
            struct zr_gemm *g = open_gemm(), *h = open_gemm();
            copy(moved.data, p.a.data, p.a.n * zr_dtype_bytes(t));
            assert_int_equal(zr_gemm_run(g, &p.args), 0);
            double *first = matrix_read(&p.c);
            for (int run = 0; run < 8; run++) {
                matrix_poison(&p.c, s.n, s.n);
                p.args.a = run & 2 ? moved.data : p.a.data;
                assert_int_equal(zr_gemm_run(run & 1 ? h : g, &p.args), 0);
                double *again = matrix_read(&p.c);
                assert_memory_equal(first, again, (size_t)p.c.n * sizeof *again);
                free(again);
            }
            free(first);
            zr_gemm_close(g), zr_gemm_close(h);
            product_free(&p), matrix_free(&moved);
        }
    }
}

static void refuse(struct zr_gemm *g, const struct zr_gemm_args *args, int err, const char *text)
{
    assert_int_equal(zr_gemm_run(g, args), err);
    if (!strstr(zr_error_text(), text))
        fail_msg("\"%s\" does not say \"%s\"", zr_error_text(), text);
    assert_false(zr_gemm_can(g, args));
}

static void test_bad_arguments(void **state)
{
    struct zr_gemm *g;
#ifdef GEMM_TEST_CUDA
    assert_int_equal(zr_gemm_open_cuda(dev, stream, -1, false, &g), ZERO_ERR_ARG);
    assert_null(g);
    struct zr_device *host;
    assert_int_equal(zr_host_device_open(&host), 0);
    assert_int_equal(zr_gemm_open_cuda(host, NULL, 0, false, &g), ZERO_ERR_NOTSUP);
    assert_null(g);
    host->ops->close(host);
#else
    assert_int_equal(zr_gemm_open(0, &g), ZERO_ERR_ARG);
    assert_null(g);
    assert_int_equal(zr_gemm_open_cuda(dev, stream, 0, false, &g), ZERO_ERR_NOTSUP);
    assert_null(g);
#endif
    g = open_gemm();
    struct matrix x = matrix_make(ZERO_F32, 64);
    float *at = x.data;
    const struct zr_gemm_args good = {.m = 2,
                                      .n = 2,
                                      .k = 2,
                                      .ab_dtype = ZERO_F32,
                                      .c_dtype = ZERO_F32,
                                      .a = at,
                                      .b = at + 4,
                                      .c = at + 8,
                                      .lda = 2,
                                      .ldb = 2,
                                      .ldc = 2,
                                      .n_batch = 1};
    struct zr_gemm_args a = good;
    a.k = 0;
    refuse(g, &a, ZERO_ERR_ARG, "at least 1");
    a = good, a.lda = 1;
    refuse(g, &a, ZERO_ERR_ARG, "lda");
    a = good, a.beta = 0.5f;
    refuse(g, &a, ZERO_ERR_ARG, "beta");
    a = good, a.c_dtype = ZERO_BF16;
    refuse(g, &a, ZERO_ERR_NOTSUP, "f32 x f32 -> bf16");
    a = good, a.epilogue = (enum zr_gemm_epilogue)9;
    refuse(g, &a, ZERO_ERR_ARG, "epilogue is 9");
    a = good, a.epilogue = ZR_GEMM_GELU;
    refuse(g, &a, ZERO_ERR_ARG, "needs aux");
    a.aux = at + 16, a.ldaux = 1;
    refuse(g, &a, ZERO_ERR_ARG, "ldaux is 1");
    a.ldaux = 8, a.beta = 1;
    refuse(g, &a, ZERO_ERR_ARG, "takes no beta");
    a.beta = 0, a.n_batch = 2;
    refuse(g, &a, ZERO_ERR_ARG, "n_batch is 2");
    a = good, a.epilogue = ZR_GEMM_SUM_A, a.sum = at + 16, a.bias = at + 20, a.bias_dtype = ZERO_F32;
    refuse(g, &a, ZERO_ERR_ARG, "takes no bias");
#ifdef GEMM_TEST_CUDA
    a = good, a.bias = at + 16, a.bias_dtype = ZERO_BF16;
    refuse(g, &a, ZERO_ERR_NOTSUP, "a bias of bf16");
    a = good, a.epilogue = ZR_GEMM_GELU, a.aux = at + 17, a.ldaux = 8;
    refuse(g, &a, ZERO_ERR_NOTSUP, "16-byte aligned");
    a.aux = at + 16, a.ldaux = 4;
    refuse(g, &a, ZERO_ERR_NOTSUP, "multiple of 8");
    a = good, a.b = (char *)x.data + 17;
    refuse(g, &a, ZERO_ERR_ARG, "aligned");
#else
    a = good, a.ab_dtype = a.c_dtype = ZERO_F16;
    refuse(g, &a, ZERO_ERR_NOTSUP, "f16");
    a = good, a.epilogue = ZR_GEMM_SUM_A, a.sum = at + 16;
    refuse(g, &a, ZERO_ERR_NOTSUP, "host");
#endif
    assert_true(zr_gemm_can(g, &good));
    assert_int_equal(zr_gemm_run(g, &good), 0);
    zr_gemm_close(g);
    zr_gemm_close(NULL);
    matrix_free(&x);
}

/* Long sides that are no multiple of 8. cuBLASLt's backend makes these products from two. */
static void test_long_sides(void **state)
{
    static const enum zero_dtype types[] = {ZERO_F32, ZERO_BF16};
    enum { LONG = 4099 };
    struct zr_gemm *g = open_gemm();
    begin_errors();
    for (int t = 0; t < 2; t++)
        for (int transposes = 0; transposes < 4; transposes++)
            for (int beta = 0; beta < 2; beta++) {
                bool ta = transposes & 1, tb = transposes & 2;
                check_one(g, (struct shape){3, LONG, 5, 1, 5, 0}, ta, tb, types[t], types[t], types[t],
                          (float)beta);
                check_one(g, (struct shape){LONG, 3, 5, 1, 5, 0}, ta, tb, types[t], types[t], 0, (float)beta);
                check_one(g, (struct shape){3, 5, LONG, 1, 5, 0}, ta, tb, types[t], types[t], types[t],
                          (float)beta);
            }
    zr_gemm_close(g);
    end_errors();
}

/* More shapes than the table's first size. */
static void test_many_shapes(void **state)
{
    struct zr_gemm *g = open_gemm();
    begin_errors();
    for (int round = 0; round < 2; round++)
        for (int m = 1; m <= 80; m++)
            check_one(g, (struct shape){m, 3, 4, 1, 0, 0}, false, false, ZERO_F32, ZERO_F32, 0, 0);
    zr_gemm_close(g);
    end_errors();
}

/* --- --bench --- */

static void bench_one(struct zr_gemm *g, const char *what, struct shape s, bool ta, bool tb,
                      enum zero_dtype dtype, enum zero_dtype ct, float beta)
{
    struct product p = product_make(s, ta, tb, dtype, ct);
    p.args.beta = beta;
    int64_t best = INT64_MAX;
    for (int i = 0; i < 7; i++) {
        int64_t t = zr_now_ns();
        if (zr_gemm_run(g, &p.args) || dev->ops->stream_sync(stream))
            printf("%s\n", zr_error_text());
        t = zr_now_ns() - t;
        if (i > 0 && t < best) /* the first call creates the primitive */
            best = t;
    }
    printf("%-12s %4ldx%4ldx%4ld batch %2ld %c%c %4s -> %4s beta %g %8.1f GFLOP/s\n", what, (long)s.m,
           (long)s.n, (long)s.k, (long)s.n_batch, ta ? 'T' : 'N', tb ? 'T' : 'N', zr_dtype_name(dtype),
           zr_dtype_name(ct), (double)beta, 2.0 * (double)(s.m * s.n * s.k * s.n_batch) / (double)best);
    product_free(&p);
}

static int bench(int n_threads)
{
    struct zr_gemm *g;
#ifdef GEMM_TEST_CUDA
    int err = zr_gemm_open_cuda(dev, stream, 0, false, &g);
    (void)n_threads; /* host only */
#else
    int err = zr_gemm_open(n_threads, &g);
#endif
    if (err)
        return 1;
    for (int d = ZERO_F32; d <= ZERO_BF16; d++) {
        enum zero_dtype t = (enum zero_dtype)d;
        bench_one(g, "forward", (struct shape){512, 768, 256, 1, 0, 0}, false, true, t, t, 0);
        bench_one(g, "input grad", (struct shape){512, 256, 768, 1, 0, 0}, false, false, t, t, 0);
        bench_one(g, "weight grad", (struct shape){768, 256, 512, 1, 0, 0}, true, false, t, t, 1);
        bench_one(g, "weight grad", (struct shape){768, 256, 512, 1, 0, 0}, true, false, t, ZERO_F32, 1);
        bench_one(g, "scores", (struct shape){128, 128, 32, 32, 0, 0}, false, true, t, t, 0);
        bench_one(g, "values", (struct shape){128, 32, 128, 32, 0, 0}, false, false, t, t, 0);
        bench_one(g, "transposed", (struct shape){128, 32, 128, 32, 0, 0}, true, false, t, t, 0);
    }
    zr_gemm_close(g);
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_products),          cmocka_unit_test(test_epilogues),
        cmocka_unit_test(test_interleaved_batch), cmocka_unit_test(test_repeats_to_the_bit),
        cmocka_unit_test(test_bad_arguments),     cmocka_unit_test(test_many_shapes),
        cmocka_unit_test(test_long_sides),
    };
    rng = random_open();
#ifdef GEMM_TEST_CUDA
    if (zr_cuda_device_open(0, &dev)) {
        printf("%s\n", zr_error_text());
        return 77; /* skipped */
    }
    dev->ops->close(dev);
#endif
    open_device();
    int failed = argc > 1 && strcmp(argv[1], "--bench") == 0 ? bench(argc > 2 ? atoi(argv[2]) : 1)
                                                             : cmocka_run_group_tests(tests, NULL, NULL);
    close_device();
    return failed;
}
