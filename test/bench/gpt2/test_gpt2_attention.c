/* SPDX-License-Identifier: Apache-2.0 */
/* test_gpt2_attention.c: tests the attention that stores no matrix, on a GPU or the stand-in for one,
 * against a reference in double precision on the same rounded inputs. All outputs are poisoned first. */
#include "bench/gpt2/gpt2_layers.h"
#include "test/cmocka.h"
#include "test/kernels/random.h"

#include <math.h>

/* Relative to a row's norm and to the mean row's norm: weights are rounded to bf16 before they are
 * multiplied. */
#define TOLERANCE 0x1p-6

static struct random_source rng;
static struct compute gpu;

struct shape {
    int64_t B, T, NH, HS;
    float spread; /* of the scores: a large spread leaves a single weight above 0 */
};

/* The same array on the host and on the device. */
struct array {
    void *at, *there;
    int64_t bytes;
};

enum { QKV, ATTY, DATTY, DQKV, LOGSUM, DOTS, N_ARRAYS };

struct fixture {
    struct shape s;
    struct array a[N_ARRAYS];
    double *atty, *logsum, *dqkv; /* expected results */
};

static void move(void *dst, const void *src, int64_t bytes)
{
    assert_int_equal(gpu.dev->ops->copy(gpu.stream, dst, src, bytes), 0);
    assert_int_equal(gpu.dev->ops->stream_sync(gpu.stream), 0);
}

static void close_all(struct fixture *f)
{
    for (int i = 0; i < N_ARRAYS; i++) {
        gpu.dev->ops->free(gpu.dev, f->a[i].there, f->a[i].bytes);
        free(f->a[i].at);
    }
    free(f->atty);
    free(f->logsum);
    free(f->dqkv);
}

/* One head of one row of the batch; the rows of x are 3*C apart. */
static void reference(struct fixture *f, int64_t b, int64_t h)
{
    int64_t T = f->s.T, HS = f->s.HS, C = f->s.NH * HS;
    const real *q = (real *)f->a[QKV].at + b * T * 3 * C + h * HS, *k = q + C, *v = k + C;
    const real *dy = (real *)f->a[DATTY].at + b * T * C + h * HS;
    double *y = f->atty + b * T * C + h * HS, *dq = f->dqkv + b * T * 3 * C + h * HS, *dk = dq + C,
           *dv = dk + C;
    double *p = malloc((size_t)T * sizeof *p), *dp = malloc((size_t)T * sizeof *dp),
           scale = 1 / sqrt((double)HS);
    for (int64_t t = 0; t < T; t++) {
        double top = -INFINITY, total = 0, dot = 0;
        for (int64_t s = 0; s <= t; s++) {
            p[s] = dp[s] = 0;
            for (int64_t i = 0; i < HS; i++) {
                p[s] += (double)to_float(q[t * 3 * C + i]) * (double)to_float(k[s * 3 * C + i]) * scale;
                dp[s] += (double)to_float(dy[t * C + i]) * (double)to_float(v[s * 3 * C + i]);
            }
            top = fmax(top, p[s]);
        }
        for (int64_t s = 0; s <= t; s++)
            total += p[s] = exp(p[s] - top);
        f->logsum[(b * f->s.NH + h) * T + t] = (top + log(total)) / log(2);
        for (int64_t s = 0; s <= t; s++) {
            p[s] /= total;
            dot += p[s] * dp[s];
        }
        for (int64_t s = 0; s <= t; s++) {
            double ds = p[s] * (dp[s] - dot) * scale;
            for (int64_t i = 0; i < HS; i++) {
                y[t * C + i] += p[s] * (double)to_float(v[s * 3 * C + i]);
                dq[t * 3 * C + i] += ds * (double)to_float(k[s * 3 * C + i]);
                dk[s * 3 * C + i] += ds * (double)to_float(q[t * 3 * C + i]);
                dv[s * 3 * C + i] += p[s] * (double)to_float(dy[t * C + i]);
            }
        }
    }
    free(p);
    free(dp);
}

static void run(struct fixture *f)
{
    const struct shape *s = &f->s;
    struct array *a = f->a;
    for (int i = 0; i < N_ARRAYS; i++) {
        if (i != QKV && i != DATTY)
            memset(a[i].at, 0xff, (size_t)a[i].bytes);
        move(a[i].there, a[i].at, a[i].bytes);
    }
    const struct gpt2_attention *att = gpt2_layers_cuda.attention;
    assert_int_equal(
        att->forward(&gpu, a[ATTY].there, a[LOGSUM].there, a[QKV].there, s->B, s->T, s->NH, s->HS), 0);
    assert_int_equal(att->backward(&gpu, a[DQKV].there, a[DOTS].there, a[DATTY].there, a[ATTY].there,
                                   a[LOGSUM].there, a[QKV].there, s->B, s->T, s->NH, s->HS),
                     0);
    for (int i = 0; i < N_ARRAYS; i++)
        move(a[i].at, a[i].there, a[i].bytes);
}

static void open_all(struct fixture *f, struct shape s)
{
    int64_t C = s.NH * s.HS, BT = s.B * s.T, R = sizeof(real), F = sizeof(float);
    const int64_t bytes[N_ARRAYS] = {
        [QKV] = BT * 3 * C * R,  [ATTY] = BT * C * R,      [DATTY] = BT * C * R,
        [DQKV] = BT * 3 * C * R, [LOGSUM] = BT * s.NH * F, [DOTS] = BT * s.NH * F};
    *f = (struct fixture){.s = s};
    for (int i = 0; i < N_ARRAYS; i++) {
        f->a[i] = (struct array){malloc((size_t)bytes[i]), NULL, bytes[i]};
        assert_int_equal(gpu.dev->ops->alloc(gpu.dev, bytes[i], &f->a[i].there), 0);
    }
    for (int64_t i = 0; i < BT * 3 * C; i++)
        ((real *)f->a[QKV].at)[i] = from_float(random_normal(&rng) * (i % (3 * C) < 2 * C ? s.spread : 1.0f));
    for (int64_t i = 0; i < BT * C; i++)
        ((real *)f->a[DATTY].at)[i] = from_float(random_normal(&rng));
    f->atty = calloc((size_t)(BT * C), sizeof *f->atty);
    f->dqkv = calloc((size_t)(BT * 3 * C), sizeof *f->dqkv);
    f->logsum = calloc((size_t)(BT * s.NH), sizeof *f->logsum);
    for (int64_t b = 0; b < s.B; b++)
        for (int64_t h = 0; h < s.NH; h++)
            reference(f, b, h);
}

/* Compares n rows of HS, one per head and token. */
static void compare(const struct fixture *f, const char *what, const double *want, const real *got, int64_t n,
                    double tolerance)
{
    int64_t HS = f->s.HS;
    double all = 0;
    for (int64_t i = 0; i < n * HS; i++)
        all += want[i] * want[i];
    for (int64_t row = 0; row < n; row++) {
        double error = 0, size = 0;
        for (int64_t i = row * HS; i < (row + 1) * HS; i++) {
            double d = (double)to_float(got[i]) - want[i];
            error += d * d;
            size += want[i] * want[i];
        }
        if (!(sqrt(error) <= tolerance * (sqrt(size) + sqrt(all / (double)n)))) {
            fail_msg("B %lld, T %lld, NH %lld, HS %lld: %s: row %lld is off by %g, its length is %g",
                     (long long)f->s.B, (long long)f->s.T, (long long)f->s.NH, (long long)HS, what,
                     (long long)row, sqrt(error), sqrt(size));
        }
    }
}

/* Tiles are 128 tokens. Of the other side 64 or 32 tokens are fetched at once, and 32 or 16 multiplied.
 * The shapes have less than each of these, whole ones, and partial ones. 1024 tiles are worked on at once;
 * the last shape but one has more. */
static void test_against_reference(void **state)
{
    static const struct shape shapes[] = {
        {2, 1, 1, 16, 1},   {1, 2, 3, 32, 1},   {2, 15, 2, 64, 1},  {1, 63, 2, 16, 1},   {2, 64, 1, 32, 1},
        {1, 65, 2, 64, 1},  {1, 130, 2, 16, 1}, {1, 150, 1, 32, 1}, {1, 193, 1, 64, 1},  {1, 257, 2, 64, 1},
        {1, 384, 1, 32, 1}, {1, 300, 1, 64, 1}, {1, 80, 2, 64, 4},  {57, 129, 9, 16, 1}, {1, 96, 1, 16, 30}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        struct fixture f;
        open_all(&f, shapes[i]);
        int64_t rows = f.s.B * f.s.T * f.s.NH;
        run(&f);
        for (int64_t r = 0; r < rows; r++) {
            double got = (double)((float *)f.a[LOGSUM].at)[r], want = f.logsum[r];
            if (!(fabs(got - want) <= 1e-5 * (1 + fabs(want))))
                fail_msg("shape %zu: logsum of row %lld is %g, should be %g", i, (long long)r, got, want);
        }
        compare(&f, "atty", f.atty, f.a[ATTY].at, rows, TOLERANCE);
        /* These increase the effect that rounding atty has on the gradients of q and k. */
        compare(&f, "gradients of q, k and v", f.dqkv, f.a[DQKV].at, 3 * rows,
                4 * TOLERANCE * (double)f.s.spread);
        close_all(&f);
    }
}

static void test_same_bits(void **state)
{
    struct fixture f;
    open_all(&f, (struct shape){1, 100, 2, 32, 1});
    run(&f);
    void *atty = malloc((size_t)f.a[ATTY].bytes), *dqkv = malloc((size_t)f.a[DQKV].bytes);
    memcpy(atty, f.a[ATTY].at, (size_t)f.a[ATTY].bytes);
    memcpy(dqkv, f.a[DQKV].at, (size_t)f.a[DQKV].bytes);
    run(&f);
    assert_memory_equal(atty, f.a[ATTY].at, (size_t)f.a[ATTY].bytes);
    assert_memory_equal(dqkv, f.a[DQKV].at, (size_t)f.a[DQKV].bytes);
    free(atty);
    free(dqkv);
    close_all(&f);
}

/* A NaN in a query makes its own row NaN, and no other. Of the gradients, it affects its own and those of
 * the values it sees. */
static void test_nan(void **state)
{
    struct fixture f;
    int64_t HS = 16, T = 70, bad = 66;
    open_all(&f, (struct shape){1, T, 1, HS, 1});
    for (int64_t i = 0; i < HS; i++)
        ((real *)f.a[QKV].at)[bad * 3 * HS + i] = from_float(NAN);
    run(&f);
    for (int64_t i = 0; i < T * HS; i++) {
        float y = to_float(((real *)f.a[ATTY].at)[i]);
        assert_int_equal(y != y, i / HS == bad);
        for (int64_t what = 0; what < 3; what += 2) {
            float d = to_float(((real *)f.a[DQKV].at)[i / HS * 3 * HS + what * HS + i % HS]);
            assert_int_equal(d != d, what == 0 ? i / HS == bad : i / HS <= bad);
        }
    }
    close_all(&f);
}

static void test_fits(void **state)
{
    for (int64_t HS = 0; HS < 300; HS++)
        assert_int_equal(gpt2_layers_cuda.attention->fits(HS), HS == 16 || HS == 32 || HS == 64);
}

int main(void)
{
    rng = random_open();
    if (compute_open(&gpu, true, 0, 1)) {
        printf("%s\n", zr_error_text());
        return 77; /* skipped */
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_reference),
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_nan),
        cmocka_unit_test(test_fits),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    compute_close(&gpu);
    return failed;
}
