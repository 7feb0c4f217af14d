/* SPDX-License-Identifier: Apache-2.0 */
/* test_gpt2.c: tests the model's forward and backward against a reference in double precision, with
 * gradients by finite differences. Compiled once per dtype, as the model is. */
#include "bench/gpt2/gpt2.h"
#include "bench/gpt2/gpt2_vocab.h"
#include "bench/random_bits.h"
#include "test/bench/gpt2/gpt2_reference.h"
#include "test/cmocka.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#ifdef GPT2_BF16 /* 8 bits of fraction in every activation */
#define LOSS_TOLERANCE 0.02
#define GRAD_TOLERANCE 0.06
#else
#define LOSS_TOLERANCE 2e-5
#define GRAD_TOLERANCE 2e-4
#endif

#ifdef GPT2_TEST_STAND_IN
#include "test/stand_in/cublaslt_stand_in.h"
#endif

#ifdef GPT2_TEST_CUDA
#define CUDA true
#else
#define CUDA false
#endif

#define N_CHECKED 24 /* elements of each tensor whose gradient is checked */

static uint64_t seed;

/* Sizes that are no multiple of a vector, and all different. */
static const struct gpt2_config shapes[] = {
    {.layers = 2, .heads = 2, .channels = 22, .context = 9, .vocab = 37},
    {.layers = 1, .heads = 1, .channels = 16, .context = 1, .vocab = 5, .label_smoothing = 0.3},
    {.layers = 3, .heads = 4, .channels = 32, .context = 19, .vocab = 50, .label_smoothing = 0.1},
    {.layers = 2,
     .heads = 2,
     .channels = 32,
     .context = 67,
     .vocab = 41}, /* attention in one piece on a GPU */
};
static const int64_t rows[] = {3, 1, 2, 2};

struct fixture {
    struct compute compute;
    struct gpt2 m;
    int64_t sizes[GPT2_N_TENSORS];
    double *exact[GPT2_N_TENSORS]; /* the same parameters */
    int32_t *tokens, *targets;     /* (B, T) */
};

static double uniform(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (double)(seed >> 11) * 0x1p-53;
}

/* Copies to and from the model's memory, which may be a GPU's. */
static void move(struct fixture *f, void *dst, const void *src, int64_t n)
{
    assert_int_equal(f->compute.dev->ops->copy(f->compute.stream, dst, src, n * (int64_t)sizeof(real)), 0);
    assert_int_equal(f->compute.dev->ops->stream_sync(f->compute.stream), 0);
}

static real *param(struct fixture *f, int t)
{
    return ((real **)&f->m.params)[t];
}

/* Returns a copy of gradient t, which the caller frees. */
static real *gradient(struct fixture *f, int t)
{
    real *x = malloc((size_t)f->sizes[t] * sizeof *x);
    move(f, x, ((real **)&f->m.grads)[t], f->sizes[t]);
    return x;
}

/* Makes a model in which every parameter matters: norms and biases differ from their initial values, and
 * no gradient is tiny. */
static void open_fixture(struct fixture *f, const struct gpt2_config *c, int64_t B)
{
    assert_int_equal(compute_open(&f->compute, CUDA, 0, 1), 0);
    assert_int_equal(gpt2_open(&f->m, c, B, &f->compute), 0);
    assert_int_equal(gpt2_open_params(&f->m, 7), 0);
    assert_int_equal(gpt2_open_grads(&f->m), 0);
    int64_t L = c->layers, C = c->channels, V = c->vocab, T = c->context;
    const int64_t sizes[GPT2_N_TENSORS] = {V * C,         T * C, L * C, L * C, L * 3 * C * C, L * 3 * C,
                                           L * C * C,     L * C, L * C, L * C, L * 4 * C * C, L * 4 * C,
                                           L * C * 4 * C, L * C, C,     C};
    memcpy(f->sizes, sizes, sizeof sizes);
    for (int t = 0; t < GPT2_N_TENSORS; t++) {
        f->exact[t] = malloc((size_t)sizes[t] * sizeof(double));
        real *x = malloc((size_t)sizes[t] * sizeof *x);
        move(f, x, param(f, t), sizes[t]);
        for (int64_t i = 0; i < sizes[t]; i++) {
            x[i] = from_float(to_float(x[i]) + (float)(0.4 * uniform() - 0.2));
            f->exact[t][i] = (double)to_float(x[i]);
        }
        move(f, param(f, t), x, sizes[t]);
        free(x);
    }
    f->tokens = malloc((size_t)(B * T) * sizeof *f->tokens);
    f->targets = malloc((size_t)(B * T) * sizeof *f->targets);
    for (int64_t i = 0; i < B * T; i++) {
        f->tokens[i] = (int32_t)(uniform() * (double)V);
        f->targets[i] = (int32_t)(uniform() * (double)V);
    }
}

static void close_fixture(struct fixture *f)
{
    for (int t = 0; t < GPT2_N_TENSORS; t++)
        free(f->exact[t]);
    free(f->tokens);
    free(f->targets);
    gpt2_close(&f->m);
    compute_close(&f->compute);
}

/* Fills everything that forward and backward write with NaN, so that reading it too early shows. */
static void poison(struct fixture *f)
{
    struct gpt2_block blocks[] = {f->m.kept[0].acts_memory, f->m.kept[0].stats_memory};
    for (int i = 0; i < 2; i++) {
        void *nans = malloc((size_t)blocks[i].bytes);
        memset(nans, 0xFF, (size_t)blocks[i].bytes);
        move(f, blocks[i].p, nans, blocks[i].bytes / (int64_t)sizeof(real));
        free(nans);
    }
}

static double forward(struct fixture *f)
{
    struct gpt2 *m = &f->m;
    size_t bytes = (size_t)(m->B * m->config.context) * sizeof *m->tokens;
    double loss = 0;
    assert_int_equal(gpt2_next_batch(m), 0);
    memcpy(m->tokens, f->tokens, bytes);
    memcpy(m->targets, f->targets, bytes);
    gpt2_send_batch(m);
    gpt2_embed_forward(m);
    for (int64_t l = 0; l < m->config.layers; l++)
        gpt2_layer_forward(m, l);
    gpt2_head_forward(m);
    assert_int_equal(gpt2_send_loss(m), 0);
    assert_int_equal(gpt2_take_loss(m, &loss), 0);
    return loss;
}

static void backward(struct fixture *f)
{
    struct gpt2 *m = &f->m;
    gpt2_head_backward(m);
    for (int64_t l = m->config.layers; l-- > 0;)
        gpt2_layer_backward(m, l);
    gpt2_embed_backward(m);
    if (m->err)
        fail_msg("%s", zr_error_text());
}

static double exact_loss(struct fixture *f)
{
    return reference_loss(&f->m.config, f->exact, f->tokens, f->targets, f->m.B);
}

static void check_loss(void **state)
{
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
        struct fixture f;
        open_fixture(&f, &shapes[s], rows[s]);
        poison(&f);
        double loss = forward(&f), exact = exact_loss(&f);
        assert_int_equal(f.m.err, 0);
        if (!(fabs(loss - exact) <= LOSS_TOLERANCE * exact))
            fail_msg("shape %zu: loss %.9g, not %.9g", s, loss, exact);
        close_fixture(&f);
    }
}

#ifndef GPT2_TEST_CUDA
/* Divides a loss's tokens into three parts, the last one shorter, and compares with the definition.
 * Smoothed labels share their probability among all V tokens, not those of a rank
 * (https://github.com/NVIDIA/Megatron-LM/issues/737). Logits may differ so much that a probability is 0
 * (https://github.com/NVIDIA/Megatron-LM/issues/7464). */
static void check_loss_of_parts(void **state)
{
    enum { N = 6, V = 37, U = 13, LD = 16, PARTS = 3 };
    static const double smoothings[] = {0, 0.1, 0.9, 0.1}, ranges[] = {4, 4, 4, 1000};
    struct compute host;
    assert_int_equal(compute_open(&host, false, 0, 1), 0);
    for (size_t s = 0; s < sizeof smoothings / sizeof *smoothings; s++) {
        const struct gpt2_label label = {(float)(smoothings[s] / V), (float)(1 - smoothings[s])};
        const float scale = 0.25f;
        float logits[PARTS][N * LD], top[N], total[PARTS][N], wanted[PARTS][N];
        double exact[N][V], loss[PARTS][N];
        real dlogits[PARTS][N * LD];
        int32_t target[N], targets[PARTS][N];
        memset(logits, 0xFF, sizeof logits);
        memset(dlogits, 0xFF, sizeof dlogits);
        memset(loss, 0xFF, sizeof loss);
        for (int64_t row = 0; row < N; row++) {
            target[row] = (int32_t)(uniform() * V);
            for (int64_t v = 0; v < V; v++) {
                float x = (float)(ranges[s] * (2 * uniform() - 1));
                logits[v / U][row * LD + v % U] = x;
                exact[row][v] = (double)x;
            }
        }
        for (int64_t row = 0; row < N; row++)
            top[row] = -INFINITY;
        for (int p = 0; p < PARTS; p++) {
            float here[N];
            assert_int_equal(gpt2_vocab_top(&host, here, logits[p], N, p < 2 ? U : V - 2 * U, LD), 0);
            for (int64_t row = 0; row < N; row++)
                top[row] = fmaxf(top[row], here[row]);
        }
        for (int p = 0; p < PARTS; p++) {
            int64_t n = p < 2 ? U : V - 2 * U;
            memcpy(targets[p], target, sizeof target);
            gpt2_vocab_localize(targets[p], N, p * U, n);
            gpt2_vocab_exponentials(&host, logits[p], total[p], wanted[p], top, targets[p], N, n, LD, label);
        }
        for (int64_t row = 0; row < N; row++) {
            total[0][row] += total[1][row] + total[2][row];
            wanted[0][row] += wanted[1][row] + wanted[2][row];
        }
        for (int p = 0; p < PARTS; p++)
            gpt2_vocab_loss(&host, dlogits[p], loss[p], logits[p], total[0], wanted[0], targets[p], N,
                            p < 2 ? U : V - 2 * U, U, LD, label, scale);
        for (int64_t row = 0; row < N; row++) {
            double sum = 0, want = 0;
            for (int64_t v = 0; v < V; v++)
                sum += exp(exact[row][v] - (double)top[row]);
            for (int64_t v = 0; v < V; v++) {
                double q = smoothings[s] / V + (v == target[row] ? 1 - smoothings[s] : 0);
                double log_p = exact[row][v] - (double)top[row] - log(sum), p = exp(log_p);
                want -= q * log_p;
                assert_true(
                    fabs((double)to_float(dlogits[v / U][row * LD + v % U]) - (double)scale * (p - q)) <=
                    (sizeof(real) == 2 ? 0.004 : 1e-6) * fabs(p - q) + 1e-7);
            }
            for (int p = 0; p < PARTS; p++)
                assert_true(fabs(loss[p][row] - want) <= 2e-6 * want + 2e-6);
            for (int64_t v = V; v < (int64_t)PARTS * U; v++) /* belong to no token */
                assert_true(to_float(dlogits[v / U][row * LD + v % U]) == 0);
        }
    }
    compute_close(&host);
}
#endif

static double exact_gradient(struct fixture *f, int t, int64_t i)
{
    double *x = &f->exact[t][i], at = *x, h = 1e-4;
    *x = at + h;
    double above = exact_loss(f);
    *x = at - h;
    double below = exact_loss(f);
    *x = at;
    return (above - below) / (2 * h);
}

/* The norm of n elements of a tensor whose magnitude is the tensor's average. */
static double typical_size(const real *x, int64_t n_all, int64_t n)
{
    double squares = 0;
    for (int64_t i = 0; i < n_all; i++)
        squares += (double)to_float(x[i]) * (double)to_float(x[i]);
    return sqrt(squares / (double)n_all * (double)n);
}

/* The checked elements may all be among a tensor's smallest: gradients of the keys' biases are 0 except
 * for rounding. The rounding error depends on the size of the summands, and is therefore compared with the
 * tensor's size. */
static void check_gradients(void **state)
{
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
        struct fixture f;
        open_fixture(&f, &shapes[s], rows[s]);
        poison(&f);
        forward(&f);
        backward(&f);
        assert_int_equal(f.m.err, 0);
        for (int t = 0; t < GPT2_N_TENSORS; t++) {
            double error = 0, size = 0; /* sums of squares over the checked elements */
            real *grad = gradient(&f, t);
            for (int k = 0; k < N_CHECKED; k++) {
                int64_t i = (int64_t)(uniform() * (double)f.sizes[t]);
                double exact = exact_gradient(&f, t, i), got = (double)to_float(grad[i]);
                error += (got - exact) * (got - exact);
                size += exact * exact;
            }
            double gauge = fmax(sqrt(size), typical_size(grad, f.sizes[t], N_CHECKED));
            if (!(sqrt(error) <= GRAD_TOLERANCE * gauge + 1e-7))
                fail_msg("shape %zu, tensor %d: gradients differ by %.3g of their size", s, t,
                         sqrt(error) / gauge);
            free(grad);
        }
        close_fixture(&f);
    }
}

static void check_adds(void **state)
{
    struct fixture f;
    open_fixture(&f, &shapes[0], rows[0]);
    forward(&f);
    backward(&f);
    real *once[GPT2_N_TENSORS];
    for (int t = 0; t < GPT2_N_TENSORS; t++)
        once[t] = gradient(&f, t);
    forward(&f);
    backward(&f);
    for (int t = 0; t < GPT2_N_TENSORS; t++) {
        double error = 0, size = 0;
        real *both = gradient(&f, t);
        for (int64_t i = 0; i < f.sizes[t]; i++) {
            double g = (double)to_float(once[t][i]), twice = (double)to_float(both[i]);
            error += (twice - 2 * g) * (twice - 2 * g);
            size += g * g;
        }
        if (!(sqrt(error) <= (sizeof(real) == 2 ? 0.01 : 1e-6) * sqrt(size) + 1e-7))
            fail_msg("tensor %d: after two backward passes the gradient is not doubled", t);
        free(once[t]);
        free(both);
    }
    close_fixture(&f);
}

/* Difference between stored and added gradients, relative to a tensor's largest. On a GPU the library
 * chooses how to compute them. */
#if defined(GPT2_TEST_CUDA) && !defined(GPT2_TEST_STAND_IN)
#define STORED_TOLERANCE (sizeof(real) == 2 ? 0.01 : 1e-5)
#else
#define STORED_TOLERANCE 0.0
#endif

static bool is_matrix(int t)
{
    return t == 0 || t == 4 || t == 6 || t == 10 || t == 12; /* wte, qkvw, attprojw, fcw, fcprojw */
}

static void same_gradient(int t, const real *want, const real *got, int64_t n)
{
    double largest = 0;
    for (int64_t i = 0; i < n; i++)
        largest = fmax(largest, fabs((double)to_float(want[i])));
    for (int64_t i = 0; i < n; i++) {
        double x = (double)to_float(want[i]), y = (double)to_float(got[i]);
        if (!(fabs(x - y) <= STORED_TOLERANCE * largest))
            fail_msg("tensor %d, element %lld: %.9g, not %.9g", t, (long long)i, y, x);
    }
}

/* Gradients of matrices that are stored equal those added to zeros, whatever was there before. All others
 * are added to. */
static void check_stores(void **state)
{
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
        struct fixture f;
        open_fixture(&f, &shapes[s], rows[s]);
        forward(&f);
        backward(&f);
        real *once[GPT2_N_TENSORS];
        for (int t = 0; t < GPT2_N_TENSORS; t++) {
            once[t] = gradient(&f, t);
            real *before = malloc((size_t)f.sizes[t] * sizeof *before);
            memset(before, is_matrix(t) ? 0xFF : 0, (size_t)f.sizes[t] * sizeof *before);
            move(&f, ((real **)&f.m.grads)[t], before, f.sizes[t]);
            free(before);
        }
        f.m.stores = true;
        forward(&f);
        backward(&f);
        for (int t = 0; t < GPT2_N_TENSORS; t++) {
            real *again = gradient(&f, t);
            same_gradient(t, once[t], again, f.sizes[t]);
            free(once[t]);
            free(again);
        }
        close_fixture(&f);
    }
}

static void check_repeats(void **state)
{
    struct fixture f, g;
    uint64_t start = seed;
    open_fixture(&f, &shapes[2], rows[2]);
    seed = start;
    open_fixture(&g, &shapes[2], rows[2]);
    poison(&f);
    double a = forward(&f), b = forward(&g);
    backward(&f);
    backward(&g);
    assert_memory_equal(&a, &b, sizeof a);
    for (int t = 0; t < GPT2_N_TENSORS; t++) {
        real *x = gradient(&f, t), *y = gradient(&g, t);
        assert_memory_equal(x, y, (size_t)f.sizes[t] * sizeof(real));
        free(x);
        free(y);
    }
    close_fixture(&f);
    close_fixture(&g);
}

/* A NaN in a weight gives a NaN, not a number. */
static void check_nan(void **state)
{
    struct fixture f;
    open_fixture(&f, &shapes[0], rows[0]);
    real bad = from_float(NAN), out;
    move(&f, f.m.params.fcw + 3, &bad, 1);
    assert_true(isnan(forward(&f)));
    backward(&f);
    move(&f, &out, f.m.grads.qkvw, 1);
    assert_true(isnan(to_float(out)));
    close_fixture(&f);
}

#ifdef GPT2_TEST_STAND_IN
/* With and without cuBLASLt's epilogues for GELU, its gradient and the sums of biases. */
static void check_epilogues(void **state)
{
    int64_t before = cublaslt_stand_in_n_epilogues();
    cublaslt_stand_in_refuse(CUBLASLT_STAND_IN_EPILOGUES);
    check_gradients(state);
    assert_int_equal(cublaslt_stand_in_n_epilogues(), before);
    cublaslt_stand_in_refuse(0);
    check_gradients(state);
    assert_true(cublaslt_stand_in_n_epilogues() > before);
    assert_int_equal(cublaslt_stand_in_n_open(), 0);
}
#endif

/* --- initial weights --- */

/* The normal number by Box and Muller with the C library's functions, from the same bits. */
static double normal_of(uint64_t stream, int64_t i)
{
    uint64_t at = stream + (uint64_t)(i & ~(int64_t)1);
    double u = 1.0 - (double)(random_bits(at) >> 12) * 0x1p-52,
           v = (double)(random_bits(at + 1) >> 12) * 0x1p-52;
    double r = sqrt(-2.0 * log(u)), turn = 6.283185307179586 * v;
    return r * (i & 1 ? sin(turn) : cos(turn));
}

static void check_normal(const real *x, int64_t n, uint64_t stream, double deviation)
{
    double fraction = sizeof(real) == 4 ? 0x1p-23 : 0x1p-8; /* relative to the value */
    for (int64_t i = 0; i < n; i++) {
        double want = deviation * normal_of(stream, i);
        assert_true(fabs((double)to_float(x[i]) - want) <= fraction * fabs(want) + 1e-11 * deviation);
    }
}

/* Any range, wherever it begins, equals that range of the whole, and is normal. */
static void check_draw(void **state)
{
    enum { WTE = 0, LN1W = 2, LN1B = 3, ATTPROJW = 6, N = 100000, TRIALS = 60 };
    const struct gpt2_config c = {.layers = 2, .heads = 2, .channels = 32, .context = 16, .vocab = N / 32};
    real *whole = malloc(N * sizeof *whole), *part = malloc(N * sizeof *part);
    gpt2_draw(&c, seed, ATTPROJW, 0, 1000, part);
    check_normal(part, 1000, random_bits(random_bits(seed) + 3), 0.01); /* the fourth tensor drawn */
    gpt2_draw(&c, seed, WTE, 0, N, whole);
    check_normal(whole, N, random_bits(random_bits(seed)), 0.02);
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < N; i++) {
        double x = (double)to_float(whole[i]) / 0.02;
        sum += x, squares += x * x;
    }
    assert_true(fabs(sum / N) < 0.03 && fabs(squares / N - 1) < 0.03); /* fails for one seed in 10^10 */
    for (int trial = 0; trial < TRIALS; trial++) {
        int64_t first = (int64_t)(random_bits(seed + (uint64_t)trial) % N);
        int64_t n = 1 + (int64_t)(random_bits(~seed + (uint64_t)trial) % (uint64_t)(N - first));
        memset(part, 0xff, N * sizeof *part);
        gpt2_draw(&c, seed, WTE, first, n, part);
        assert_memory_equal(part, whole + first, (size_t)n * sizeof *part);
        for (int64_t i = n; i < N; i++) /* nothing after it is written */
            assert_true(((unsigned char *)&part[i])[0] == 0xff);
    }
    gpt2_draw(&c, seed, LN1W, 5, 3, whole);
    assert_true(to_float(whole[0]) == 1 && to_float(whole[2]) == 1);
    gpt2_draw(&c, seed, LN1B, 5, 3, whole);
    assert_true(to_float(whole[0]) == 0 && to_float(whole[2]) == 0);
    free(whole), free(part);
}

int main(void)
{
#ifdef GPT2_TEST_CUDA
    struct compute here;
    if (compute_open(&here, true, 0, 1)) {
        printf("%s\n", zr_error_text());
        return 77; /* skipped */
    }
    compute_close(&here);
#endif
    const char *given = getenv("SEED");
    seed = given ? strtoull(given, NULL, 10) : (uint64_t)time(NULL) * 2654435761u;
    printf("seed %llu\n", (unsigned long long)seed);
    const struct CMUnitTest tests[] = {
#ifndef GPT2_TEST_CUDA
        cmocka_unit_test(check_loss_of_parts),
#endif
        cmocka_unit_test(check_loss),          cmocka_unit_test(check_gradients),
        cmocka_unit_test(check_adds),          cmocka_unit_test(check_stores),
        cmocka_unit_test(check_repeats),       cmocka_unit_test(check_nan),
        cmocka_unit_test(check_draw),
#ifdef GPT2_TEST_STAND_IN
        cmocka_unit_test(check_epilogues),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
