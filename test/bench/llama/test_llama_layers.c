/* SPDX-License-Identifier: Apache-2.0 */
/* test_llama_layers.c: tests the layers of llama_layers.h on the host, on a GPU or on the stand-in for one,
 * against references in double precision on the same rounded inputs. Compiled once per dtype. All outputs are
 * poisoned first. Matrices have columns that the functions must leave alone. */
#include "bench/llama/llama_layers.h"
#include "bench/llama/llama_rotary.h"
#include "test/bench/gpt2/device_arrays.h"

#include <math.h>

#define ROUNDING  (sizeof(real) == 2 ? 0x1p-8 : 0.0) /* relative to a result */
#define TOLERANCE 4e-6 /* relative to the magnitude of the terms that it consists of */

static const struct llama_layers *layers;

/* Rows of `wide` elements. The test's vectors begin at column `first` of each. */
struct matrix {
    struct array a;
    struct llama_vectors is;
    int64_t first;
};

static struct matrix open_matrix(int64_t N, int64_t n, int64_t width, int64_t first, int64_t behind)
{
    int64_t row = first + n * width + behind;
    return (struct matrix){reals(N * row), {N, n, width, row}, first};
}

static void draw(const struct array *a, float spread)
{
    for (int64_t i = 0; i < a->bytes / (int64_t)sizeof(real); i++)
        ((real *)a->at)[i] = from_float(spread * random_normal(&rng));
    send(a);
}

static struct matrix draw_matrix(int64_t N, int64_t n, int64_t width, int64_t first, int64_t behind)
{
    struct matrix m = open_matrix(N, n, width, first, behind);
    draw(&m.a, 1);
    return m;
}

static real *there(const struct matrix *m)
{
    return (real *)m->a.there + m->first;
}

/* Element i of vector v. */
static double at(const struct matrix *m, const void *values, int64_t v, int64_t i)
{
    return (double)to_float(
        ((const real *)values)[m->first + v / m->is.n * m->is.row + v % m->is.n * m->is.width + i]);
}

static void *copy_of(const struct array *a)
{
    return memcpy(malloc((size_t)a->bytes + 1), a->at, (size_t)a->bytes);
}

/* The columns around the vectors are as they were. */
static void check_around(const struct matrix *m, const void *before)
{
    int64_t n = m->is.n * m->is.width;
    for (int64_t i = 0; i < m->is.N * m->is.row; i++) {
        bool inside = i % m->is.row >= m->first && i % m->is.row < m->first + n;
        if (!inside && memcmp((real *)m->a.at + i, (const real *)before + i, sizeof(real)))
            fail_msg("element %lld of a row was written", (long long)(i % m->is.row));
    }
}

static void near(const char *what, double got, double want, double magnitude, int64_t i)
{
    if (!(fabs(got - want) <= ROUNDING * fabs(want) + TOLERANCE * magnitude + 1e-30))
        fail_msg("%s: [%lld] is %.9g, should be %.9g", what, (long long)i, got, want);
}

/* ---- RMSNorm ---- */

static const struct {
    int64_t N, n, width, first, behind;
} shapes[] = {{1, 1, 8, 0, 0},    {5, 1, 22, 0, 0}, {70, 1, 64, 0, 0},   {129, 1, 264, 0, 0},
              {3, 1, 1600, 0, 0}, {7, 3, 16, 5, 2}, {40, 4, 64, 0, 256}, {9, 2, 128, 256, 8},
              {600, 2, 40, 8, 0}, {1, 5, 24, 0, 1}, {33, 1, 1, 0, 3},    {65, 7, 80, 16, 16}};
#define N_SHAPES (sizeof shapes / sizeof *shapes)
#define SHAPE(i) shapes[i].N, shapes[i].n, shapes[i].width, shapes[i].first, shapes[i].behind

struct norm {
    struct matrix inp, out;
    struct array weight, rstd, scratch;
    float eps;
};

static struct norm draw_norm(size_t shape)
{
    struct norm t = {.inp = draw_matrix(SHAPE(shape)), .weight = reals(shapes[shape].width)};
    int64_t n = shapes[shape].N * shapes[shape].n, width = shapes[shape].width;
    t.out = open_matrix(shapes[shape].N, shapes[shape].n, width, shape % 2 ? 8 : 0, shape % 3);
    t.eps = shape % 2 ? 0.05f : 1e-6f;
    t.rstd = floats(n);
    t.scratch = floats(layers->n_scratch(&on, width));
    draw(&t.weight, 1);
    return t;
}

static int forward(const struct norm *t)
{
    return layers->rmsnorm_forward(&on, there(&t->out), t->out.is.row, t->rstd.there, there(&t->inp),
                                   t->inp.is, t->weight.there, t->eps, t->scratch.there);
}

static int64_t n_vectors(const struct matrix *m)
{
    return m->is.N * m->is.n;
}

static double weight_at(const struct norm *t, int64_t i)
{
    return (double)to_float(((real *)t->weight.at)[i]);
}

static double exact_rstd(const struct norm *t, int64_t v)
{
    double squares = 0;
    for (int64_t i = 0; i < t->inp.is.width; i++)
        squares += at(&t->inp, t->inp.a.at, v, i) * at(&t->inp, t->inp.a.at, v, i);
    return 1 / sqrt(squares / (double)t->inp.is.width + (double)t->eps);
}

static void test_rmsnorm(void **state)
{
    for (size_t s = 0; s < N_SHAPES; s++) {
        struct norm t = draw_norm(s);
        void *poison = copy_of(&t.out.a);
        assert_int_equal(forward(&t), 0);
        fetch(&t.out.a);
        fetch(&t.rstd);
        check_around(&t.out, poison);
        for (int64_t v = 0; v < n_vectors(&t.inp); v++) {
            double rstd = exact_rstd(&t, v);
            double got = (double)((float *)t.rstd.at)[v];
            assert_true(fabs(got - rstd) <= TOLERANCE * rstd);
            for (int64_t i = 0; i < t.inp.is.width; i++) {
                double want = at(&t.inp, t.inp.a.at, v, i) * rstd * weight_at(&t, i);
                near("out", at(&t.out, t.out.a.at, v, i), want, fabs(want), v);
            }
        }
        free(poison);
        let_go(0);
    }
}

/* dinp of one vector, added to what it was. */
static void check_vector(const struct norm *t, const struct matrix *dinp, const void *before, bool adds,
                         const struct matrix *dout, const void *dout_was, int64_t v)
{
    int64_t n = t->inp.is.width;
    double rstd = exact_rstd(t, v), mean = 0, magnitude = 0;
    for (int64_t i = 0; i < n; i++) {
        double term = weight_at(t, i) * at(dout, dout_was, v, i) * at(&t->inp, t->inp.a.at, v, i) * rstd;
        mean += term / (double)n;
        magnitude += fabs(term) / (double)n;
    }
    for (int64_t i = 0; i < n; i++) {
        double norm = at(&t->inp, t->inp.a.at, v, i) * rstd;
        double direct = weight_at(t, i) * at(dout, dout_was, v, i), was = adds ? at(dinp, before, v, i) : 0;
        near("dinp", at(dinp, dinp->a.at, v, i), was + (direct - norm * mean) * rstd,
             fabs(was) + (fabs(direct) + fabs(norm) * magnitude) * rstd, v);
    }
}

static void check_weight(const struct norm *t, const struct array *dweight, const real *before,
                         const struct matrix *dout, const void *dout_was)
{
    for (int64_t i = 0; i < t->inp.is.width; i++) {
        double want = (double)to_float(before[i]), magnitude = fabs(want);
        for (int64_t v = 0; v < n_vectors(&t->inp); v++) {
            double term = at(dout, dout_was, v, i) * at(&t->inp, t->inp.a.at, v, i) * exact_rstd(t, v);
            want += term;
            magnitude += fabs(term);
        }
        near("dweight", (double)to_float(((real *)dweight->at)[i]), want, magnitude, i);
    }
}

enum { ADDS, WRITES, IN_PLACE, N_WAYS };

static void run_backward(size_t s, int way)
{
    struct norm t = draw_norm(s);
    struct matrix dinp = draw_matrix(SHAPE(s)), dout = t.out;
    if (way == IN_PLACE)
        dout = dinp;
    else
        draw(&dout.a, 1);
    struct array dweight = reals(t.inp.is.width);
    draw(&dweight, 1);
    void *dinp_was = copy_of(&dinp.a), *dout_was = copy_of(&dout.a), *dweight_was = copy_of(&dweight);
    struct matrix out = open_matrix(t.inp.is.N, t.inp.is.n, t.inp.is.width, 0, 0);
    t.out = out;
    assert_int_equal(forward(&t), 0);
    assert_int_equal(layers->rmsnorm_backward(&on, there(&dinp), way == ADDS, dweight.there, there(&dout),
                                              dout.is.row, there(&t.inp), t.inp.is, t.weight.there,
                                              t.rstd.there, t.scratch.there),
                     0);
    fetch(&dinp.a);
    fetch(&dweight);
    check_around(&dinp, dinp_was);
    for (int64_t v = 0; v < n_vectors(&t.inp); v++)
        check_vector(&t, &dinp, dinp_was, way == ADDS, &dout, dout_was, v);
    check_weight(&t, &dweight, dweight_was, &dout, dout_was);
    free(dinp_was);
    free(dout_was);
    free(dweight_was);
    let_go(0);
}

static void test_rmsnorm_backward(void **state)
{
    for (size_t s = 0; s < N_SHAPES; s++)
        for (int way = 0; way < N_WAYS; way++)
            run_backward(s, way);
}

/* Each gradient alone has the bits that it has with the other. */
static void test_rmsnorm_parts(void **state)
{
    struct norm t = draw_norm(6);
    struct matrix dout = draw_matrix(SHAPE(6)), dinp[2] = {open_matrix(SHAPE(6)), open_matrix(SHAPE(6))};
    struct array dweight[2] = {reals(t.inp.is.width), reals(t.inp.is.width)};
    for (int i = 0; i < 2; i++) {
        memset(dweight[i].at, 0, (size_t)dweight[i].bytes);
        send(&dweight[i]);
    }
    assert_int_equal(forward(&t), 0);
    for (int call = 0; call < 3; call++)
        assert_int_equal(layers->rmsnorm_backward(&on, call == 2 ? NULL : there(&dinp[call]), false,
                                                  call == 1   ? NULL
                                                  : call == 0 ? dweight[0].there
                                                              : dweight[1].there,
                                                  there(&dout), dout.is.row, there(&t.inp), t.inp.is,
                                                  t.weight.there, t.rstd.there, t.scratch.there),
                         0);
    for (int i = 0; i < 2; i++) {
        fetch(&dinp[i].a);
        fetch(&dweight[i]);
    }
    assert_memory_equal(dinp[0].a.at, dinp[1].a.at, (size_t)dinp[0].a.bytes);
    assert_memory_equal(dweight[0].at, dweight[1].at, (size_t)dweight[0].bytes);
    let_go(0);
}

/* ---- rotary positions ---- */

/* The frequency of a pair as Hugging Face's code computes it, branch by branch. */
static double frequency(const struct hf_rope *r, int64_t i, int64_t HS)
{
    double context = (double)r->original_context, plain = 1 / pow(r->theta, (double)(2 * i) / (double)HS),
           wavelength = 2 * acos(-1) / plain;
    if (r->kind == HF_ROPE_LINEAR)
        return plain / r->factor;
    if (r->kind == HF_ROPE_PLAIN || wavelength < context / r->high_freq_factor)
        return plain;
    if (wavelength > context / r->low_freq_factor)
        return plain / r->factor;
    double smooth = (context / wavelength - r->low_freq_factor) / (r->high_freq_factor - r->low_freq_factor);
    return (1 - smooth) * plain / r->factor + smooth * plain;
}

static const struct hf_rope ropes[] = {
    {.theta = 10000},
    {.theta = 1e6, .kind = HF_ROPE_LINEAR, .factor = 4},
    {HF_ROPE_LLAMA3, 500000, 32, 1, 4, 8192},
    {HF_ROPE_LLAMA3, 10000, 8, 1, 4, 64},
};
#define N_ROPES (sizeof ropes / sizeof *ropes)

static void test_rotary_table(void **state)
{
    enum { N = 3000, HS = 64 };
    float *table = malloc(N * HS * sizeof *table);
    for (size_t r = 0; r < N_ROPES; r++) {
        int64_t low = 0, high = 0;
        llama_rotary_table(table, N, HS, &ropes[r]);
        for (int64_t i = 0; i < HS / 2; i++) {
            double f = frequency(&ropes[r], i, HS), plain = pow(ropes[r].theta, -(double)i * 2 / HS);
            high += fabs(f - plain) < 1e-12 * f;
            low += fabs(f * ropes[r].factor - plain) < 1e-12 * plain;
            for (int64_t p = 0; p < N; p++) {
                assert_true(fabs((double)table[p * HS + i] - cos((double)p * f)) < 1e-7);
                assert_true(fabs((double)table[p * HS + HS / 2 + i] - sin((double)p * f)) < 1e-7);
            }
        }
        if (ropes[r].kind == HF_ROPE_LLAMA3) /* all three branches occur */
            assert_true(low > 0 && high > 0 && low + high < HS / 2);
    }
    free(table);
}

/* Pairs of a row at position p, turned by sign times its angles. */
static void check_turned(const struct matrix *x, const void *before, const int32_t *positions,
                         const struct hf_rope *r, double sign)
{
    int64_t half = x->is.width / 2;
    for (int64_t v = 0; v < n_vectors(x); v++)
        for (int64_t i = 0; i < half; i++) {
            double angle = sign * frequency(r, i, x->is.width) * (double)positions[v / x->is.n];
            double a = at(x, before, v, i), b = at(x, before, v, i + half), size = fabs(a) + fabs(b);
            near("first of a pair", at(x, x->a.at, v, i), a * cos(angle) - b * sin(angle), size, v);
            near("second of a pair", at(x, x->a.at, v, i + half), b * cos(angle) + a * sin(angle), size, v);
        }
}

static void test_rotate(void **state)
{
    enum { N_POSITIONS = 500 };
    for (size_t s = 0; s < N_SHAPES; s++) {
        const struct hf_rope *r = &ropes[s % N_ROPES];
        struct matrix x = draw_matrix(SHAPE(s));
        if (x.is.width % 2)
            continue;
        struct array positions = hold(x.is.N * 4), table = floats(N_POSITIONS * x.is.width);
        for (int64_t i = 0; i < x.is.N; i++)
            ((int32_t *)positions.at)[i] = i ? (int32_t)random_below(&rng, N_POSITIONS) : N_POSITIONS - 1;
        llama_rotary_table(table.at, N_POSITIONS, x.is.width, r);
        send(&positions);
        send(&table);
        for (int back = 0; back < 2; back++) {
            void *before = copy_of(&x.a);
            assert_int_equal(layers->rotate(&on, there(&x), x.is, positions.there, table.there, back), 0);
            fetch(&x.a);
            check_around(&x, before);
            check_turned(&x, before, positions.at, r, back ? -1 : 1);
            free(before);
        }
        let_go(0);
    }
}

/* ---- SwiGLU ---- */

static void test_swiglu(void **state)
{
    static const int64_t sizes[][2] = {{1, 1}, {3, 7}, {5, 64}, {70, 24}, {2, 2816}, {130, 40}};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        int64_t N = sizes[s][0], F = sizes[s][1];
        struct array gate_up = reals(N * 2 * F), out = reals(N * F), dout = reals(N * F);
        draw(&gate_up, s % 2 ? 30 : 2);
        draw(&dout, 1);
        real *before = copy_of(&gate_up);
        assert_int_equal(layers->swiglu_forward(&on, out.there, gate_up.there, N, F), 0);
        assert_int_equal(layers->swiglu_backward(&on, gate_up.there, dout.there, N, F), 0);
        fetch(&out);
        fetch(&gate_up);
        for (int64_t i = 0; i < N * F; i++) {
            int64_t gate = i / F * 2 * F + i % F;
            double x = (double)to_float(before[gate]), u = (double)to_float(before[gate + F]);
            double d = (double)to_float(((real *)dout.at)[i]), share = 1 / (1 + exp(-x));
            double slope = share * (1 + x * (1 - share)), terms = share * (1 + fabs(x) * (1 - share));
            near("out", (double)to_float(((real *)out.at)[i]), x * share * u, fabs(x * share * u), i);
            near("dgate", (double)to_float(((real *)gate_up.at)[gate]), d * u * slope, fabs(d * u) * terms,
                 i);
            near("dup", (double)to_float(((real *)gate_up.at)[gate + F]), d * x * share, fabs(d * x * share),
                 i);
        }
        free(before);
        let_go(0);
    }
}

/* Gates far from 0 saturate. A NaN affects its own element only. */
static void test_swiglu_limits(void **state)
{
    static const float gates[] = {0, 100, -100, 1e20f, -1e20f, NAN};
    enum { F = 6 };
    struct array gate_up = reals(2 * F), out = reals(F), dout = reals(F);
    for (int i = 0; i < F; i++) {
        ((real *)gate_up.at)[i] = from_float(gates[i]);
        ((real *)gate_up.at)[F + i] = ((real *)dout.at)[i] = from_float(1);
    }
    send(&gate_up);
    send(&dout);
    assert_int_equal(layers->swiglu_forward(&on, out.there, gate_up.there, 1, F), 0);
    assert_int_equal(layers->swiglu_backward(&on, gate_up.there, dout.there, 1, F), 0);
    fetch(&out);
    fetch(&gate_up);
    for (int i = 0; i < F; i++) {
        double y = (double)to_float(((real *)out.at)[i]), d = (double)to_float(((real *)gate_up.at)[i]);
        double want = gates[i] > 0 ? (double)to_float(from_float(gates[i])) : 0;
        assert_true(gates[i] != gates[i] ? y != y && d != d : fabs(y - want) <= 1e-5 + 1e-6 * want);
        assert_true(gates[i] != gates[i] || fabs(d - (gates[i] > 0 ? 1 : gates[i] < 0 ? 0 : 0.5)) < 1e-5);
    }
    let_go(0);
}

/* ---- adapters ---- */

static void test_scale(void **state)
{
    static const int64_t sizes[] = {1, 7, 256, 1001};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        struct array x = reals(sizes[s]);
        draw(&x, 2);
        real *before = copy_of(&x);
        assert_int_equal(layers->scale(&on, x.there, 0.3f, sizes[s]), 0);
        fetch(&x);
        for (int64_t i = 0; i < sizes[s]; i++)
            assert_true(to_float(((real *)x.at)[i]) == to_float(from_float(to_float(before[i]) * 0.3f)));
        free(before);
        let_go(0);
    }
}

/* ---- bits ---- */

/* All functions on the same input, with some number of threads. Returns the results of all, one after the
 * other. */
static char *run_all(const struct norm *t, const struct matrix *x, const struct array *arrays, int n_threads,
                     int64_t *bytes)
{
    enum { POSITIONS, TABLE, DOUT, N_GIVEN };
    struct compute with = on;
    with.n_threads = n_threads;
    struct array scratch = floats(layers->n_scratch(&with, x->is.width)), dweight = reals(x->is.width);
    struct array turned = reals(x->is.N * x->is.row), gate_up = reals(x->is.N * x->is.row);
    memset(dweight.at, 0, (size_t)dweight.bytes);
    memcpy(turned.at, x->a.at, (size_t)turned.bytes);
    memcpy(gate_up.at, x->a.at, (size_t)gate_up.bytes);
    send(&dweight);
    send(&turned);
    send(&gate_up);
    int64_t F = x->is.row / 2;
    struct array out = reals(x->is.N * F), dinp = reals(x->is.N * x->is.row);
    int err = layers->rmsnorm_forward(&with, there(&t->out), t->out.is.row, t->rstd.there, there(&t->inp),
                                      t->inp.is, t->weight.there, t->eps, scratch.there);
    err = err ? err
              : layers->rmsnorm_backward(&with, dinp.there, false, dweight.there, arrays[DOUT].there,
                                         x->is.row, there(&t->inp), t->inp.is, t->weight.there, t->rstd.there,
                                         scratch.there);
    err = err ? err
              : layers->rotate(&with, turned.there, x->is, arrays[POSITIONS].there, arrays[TABLE].there, 0);
    err = err ? err : layers->swiglu_forward(&with, out.there, gate_up.there, x->is.N, F);
    err = err ? err : layers->swiglu_backward(&with, gate_up.there, out.there, x->is.N, F);
    assert_int_equal(err, 0);
    const struct array all[] = {t->out.a, t->rstd, dinp, dweight, turned, out, gate_up};
    char *results = malloc(1 << 22);
    *bytes = 0;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        fetch(&all[i]);
        memcpy(results + *bytes, all[i].at, (size_t)all[i].bytes);
        *bytes += all[i].bytes;
    }
    return results;
}

/* The bits do not depend on the number of threads. On a GPU they are the same each time. */
static void test_bits(void **state)
{
    struct norm t = draw_norm(7);
    struct matrix x = draw_matrix(SHAPE(7));
    struct array given[] = {hold(x.is.N * 4), floats(50 * x.is.width), x.a};
    for (int64_t i = 0; i < x.is.N; i++)
        ((int32_t *)given[0].at)[i] = (int32_t)random_below(&rng, 50);
    llama_rotary_table(given[1].at, 50, x.is.width, &ropes[0]);
    send(&given[0]);
    send(&given[1]);
    int64_t bytes, again_bytes;
    char *first = run_all(&t, &x, given, 1, &bytes);
    for (int n_threads = 1; n_threads < 8; n_threads += 3) {
        char *again = run_all(&t, &x, given, CUDA ? 1 : n_threads, &again_bytes);
        assert_int_equal(again_bytes, bytes);
        assert_memory_equal(first, again, (size_t)bytes);
        free(again);
    }
    free(first);
    let_go(0);
}

int main(void)
{
    rng = random_open();
    if (compute_open(&on, CUDA, 0, CUDA ? 1 : 2)) {
        printf("%s\n", zr_error_text());
        return 77; /* skipped */
    }
    layers = llama_layers_for(&on);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rmsnorm),       cmocka_unit_test(test_rmsnorm_backward),
        cmocka_unit_test(test_rmsnorm_parts), cmocka_unit_test(test_rotary_table),
        cmocka_unit_test(test_rotate),        cmocka_unit_test(test_swiglu),
        cmocka_unit_test(test_swiglu_limits), cmocka_unit_test(test_scale),
        cmocka_unit_test(test_bits),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    compute_close(&on);
    return failed;
}
