/* test_gpt2.c: the model's forward and backward against a reference in double precision, whose gradients are
 * taken by finite differences. Compiled once per dtype, as the model is. */
#include "bench/gpt2.h"
#include "test/bench/gpt2_reference.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <cmocka.h>

#ifdef GPT2_BF16 /* 8 bits of fraction in every activation */
#define LOSS_TOLERANCE 0.02
#define GRAD_TOLERANCE 0.06
#else
#define LOSS_TOLERANCE 2e-5
#define GRAD_TOLERANCE 2e-4
#endif

#define N_CHECKED 24 /* elements of each tensor whose gradient is checked */

static uint64_t seed;

/* Sizes that are no multiple of a vector, and of which no two are alike. */
static const struct gpt2_config shapes[] = {
    {.layers = 2, .heads = 2, .channels = 22, .context = 9, .vocab = 37},
    {.layers = 1, .heads = 1, .channels = 16, .context = 1, .vocab = 5},
    {.layers = 3, .heads = 4, .channels = 32, .context = 19, .vocab = 50},
};
static const int64_t rows[] = {3, 1, 2};

struct fixture {
    struct zr_gemm *gemm;
    struct gpt2 m;
    int64_t sizes[GPT2_N_TENSORS];
    double *exact[GPT2_N_TENSORS]; /* the same parameters */
};

static double uniform(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (double)(seed >> 11) * 0x1p-53;
}

static real *tensor(struct params *p, int t)
{
    return ((real **)p)[t];
}

/* A model whose every parameter matters: norms and biases are not at their starting values, and no gradient
 * is tiny. */
static void open_fixture(struct fixture *f, const struct gpt2_config *c, int64_t B)
{
    assert_int_equal(zr_gemm_open(1, &f->gemm), 0);
    assert_int_equal(gpt2_open(&f->m, c, B, 7, f->gemm), 0);
    assert_int_equal(gpt2_open_grads(&f->m), 0);
    int64_t L = c->layers, C = c->channels, V = c->vocab, T = c->context;
    const int64_t sizes[GPT2_N_TENSORS] = {V * C,         T * C, L * C, L * C, L * 3 * C * C, L * 3 * C,
                                           L * C * C,     L * C, L * C, L * C, L * 4 * C * C, L * 4 * C,
                                           L * C * 4 * C, L * C, C,     C};
    memcpy(f->sizes, sizes, sizeof sizes);
    for (int t = 0; t < GPT2_N_TENSORS; t++) {
        f->exact[t] = malloc((size_t)sizes[t] * sizeof(double));
        real *x = tensor(&f->m.params, t);
        for (int64_t i = 0; i < sizes[t]; i++) {
            x[i] = from_float(to_float(x[i]) + (float)(0.4 * uniform() - 0.2));
            f->exact[t][i] = (double)to_float(x[i]);
        }
    }
    for (int64_t i = 0; i < B * T; i++) {
        f->m.tokens[i] = (int32_t)(uniform() * (double)V);
        f->m.targets[i] = (int32_t)(uniform() * (double)V);
    }
}

static void close_fixture(struct fixture *f)
{
    for (int t = 0; t < GPT2_N_TENSORS; t++) {
        free(f->exact[t]);
    }
    gpt2_close(&f->m);
    zr_gemm_close(f->gemm);
}

/* Everything that forward and backward are to write starts as NaN, so that nothing can be read before it is
 * written. */
static void poison(struct gpt2 *m)
{
    int64_t L = m->config.layers, C = m->config.channels, T = m->config.context, V = m->config.vocab,
            BT = m->B * T;
    int64_t per_layer = BT * 16 * C + m->B * m->config.heads * T * T;
    memset(m->acts_memory, 0xFF, (size_t)(L * per_layer + BT * (2 * C + V)) * sizeof(real));
    memset(m->stats_memory, 0xFF, (size_t)(L * 4 * BT + 2 * BT) * sizeof(float));
}

static double forward(struct gpt2 *m)
{
    gpt2_embed_forward(m);
    for (int64_t l = 0; l < m->config.layers; l++) {
        gpt2_layer_forward(m, l);
    }
    return gpt2_head_forward(m);
}

static void backward(struct gpt2 *m)
{
    gpt2_head_backward(m);
    for (int64_t l = m->config.layers; l-- > 0;) {
        gpt2_layer_backward(m, l);
    }
    gpt2_embed_backward(m);
}

static double exact_loss(struct fixture *f)
{
    return reference_loss(&f->m.config, f->exact, f->m.tokens, f->m.targets, f->m.B);
}

static void check_loss(void **state)
{
    (void)state;
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
        struct fixture f;
        open_fixture(&f, &shapes[s], rows[s]);
        poison(&f.m);
        double loss = forward(&f.m), exact = exact_loss(&f);
        assert_int_equal(f.m.err, 0);
        if (!(fabs(loss - exact) <= LOSS_TOLERANCE * exact)) {
            fail_msg("shape %zu: loss %.9g, not %.9g", s, loss, exact);
        }
        close_fixture(&f);
    }
}

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

static void check_gradients(void **state)
{
    (void)state;
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
        struct fixture f;
        open_fixture(&f, &shapes[s], rows[s]);
        poison(&f.m);
        forward(&f.m);
        backward(&f.m);
        assert_int_equal(f.m.err, 0);
        for (int t = 0; t < GPT2_N_TENSORS; t++) {
            double error = 0, size = 0; /* sums of squares over the elements looked at */
            for (int k = 0; k < N_CHECKED; k++) {
                int64_t i = (int64_t)(uniform() * (double)f.sizes[t]);
                double exact = exact_gradient(&f, t, i), got = (double)to_float(tensor(&f.m.grads, t)[i]);
                error += (got - exact) * (got - exact);
                size += exact * exact;
            }
            if (!(sqrt(error) <= GRAD_TOLERANCE * sqrt(size) + 1e-7)) {
                fail_msg("shape %zu, tensor %d: gradients differ by %.3g of their size", s, t,
                         sqrt(error / size));
            }
        }
        close_fixture(&f);
    }
}

static void check_adds(void **state)
{
    (void)state;
    struct fixture f;
    open_fixture(&f, &shapes[0], rows[0]);
    forward(&f.m);
    backward(&f.m);
    real *once[GPT2_N_TENSORS];
    for (int t = 0; t < GPT2_N_TENSORS; t++) {
        once[t] = malloc((size_t)f.sizes[t] * sizeof(real));
        memcpy(once[t], tensor(&f.m.grads, t), (size_t)f.sizes[t] * sizeof(real));
    }
    forward(&f.m);
    backward(&f.m);
    for (int t = 0; t < GPT2_N_TENSORS; t++) {
        double error = 0, size = 0;
        for (int64_t i = 0; i < f.sizes[t]; i++) {
            double g = (double)to_float(once[t][i]), twice = (double)to_float(tensor(&f.m.grads, t)[i]);
            error += (twice - 2 * g) * (twice - 2 * g);
            size += g * g;
        }
        if (!(sqrt(error) <= (sizeof(real) == 2 ? 0.01 : 1e-6) * sqrt(size) + 1e-7)) {
            fail_msg("tensor %d: after two backward passes the gradient is not doubled", t);
        }
        free(once[t]);
    }
    close_fixture(&f);
}

static void check_repeats(void **state)
{
    (void)state;
    struct fixture f, g;
    uint64_t start = seed;
    open_fixture(&f, &shapes[2], rows[2]);
    seed = start;
    open_fixture(&g, &shapes[2], rows[2]);
    poison(&f.m);
    double a = forward(&f.m), b = forward(&g.m);
    backward(&f.m);
    backward(&g.m);
    assert_memory_equal(&a, &b, sizeof a);
    for (int t = 0; t < GPT2_N_TENSORS; t++) {
        assert_memory_equal(tensor(&f.m.grads, t), tensor(&g.m.grads, t), (size_t)f.sizes[t] * sizeof(real));
    }
    close_fixture(&f);
    close_fixture(&g);
}

/* A NaN in a weight comes out as a NaN, not as a number. */
static void check_nan(void **state)
{
    (void)state;
    struct fixture f;
    open_fixture(&f, &shapes[0], rows[0]);
    f.m.params.fcw[3] = from_float(NAN);
    assert_true(isnan(forward(&f.m)));
    backward(&f.m);
    assert_true(isnan(to_float(f.m.grads.qkvw[0])));
    close_fixture(&f);
}

int main(void)
{
    seed = (uint64_t)time(NULL) * 2654435761u;
    printf("seed %llu\n", (unsigned long long)seed);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(check_loss),    cmocka_unit_test(check_gradients), cmocka_unit_test(check_adds),
        cmocka_unit_test(check_repeats), cmocka_unit_test(check_nan),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
