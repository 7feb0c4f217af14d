/* SPDX-License-Identifier: Apache-2.0 */
/* test_gpt2.c: tests the model's forward and backward against a reference in double precision, with
 * gradients by finite differences. Compiled once per dtype, as the model is. */
#include "bench/gpt2/gpt2.h"
#include "bench/model/vocab.h"
#include "bench/random_bits.h"
#include "test/bench/gpt2/gpt2_reference.h"
#include "test/cmocka.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#ifdef MODEL_BF16 /* 8 bits of fraction in every activation */
#define LOSS_TOLERANCE 0.02
#define GRAD_TOLERANCE 0.06
#else
#define LOSS_TOLERANCE 2e-5
#define GRAD_TOLERANCE 2e-4
#endif

#ifdef MODEL_TEST_STAND_IN
#include "test/stand_in/cublaslt_stand_in.h"
#endif

#ifdef MODEL_TEST_CUDA
#define CUDA true
#else
#define CUDA false
#endif

#define N_CHECKED 24 /* elements of each tensor whose gradient is checked */

static uint64_t seed;

/* Sizes that are no multiple of a vector, and all different. */
static const struct model_config shapes[] = {
    {.ops = &gpt2_ops, .layers = 2, .heads = 2, .channels = 22, .context = 9, .vocab = 37},
    {.ops = &gpt2_ops,
     .layers = 1,
     .heads = 1,
     .channels = 16,
     .context = 1,
     .vocab = 5,
     .label_smoothing = 0.3},
    {.ops = &gpt2_ops,
     .layers = 3,
     .heads = 4,
     .channels = 32,
     .context = 19,
     .vocab = 50,
     .label_smoothing = 0.1},
    {.ops = &gpt2_ops,
     .layers = 2,
     .heads = 2,
     .channels = 32,
     .context = 67,
     .vocab = 41}, /* attention in one piece on a GPU */
};
static const int64_t rows[] = {3, 1, 2, 2};

struct fixture {
    struct compute compute;
    struct model m;
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
    return ((real **)&gpt2_of(&f->m)->params)[t];
}

/* Returns a copy of gradient t, which the caller frees. */
static real *gradient(struct fixture *f, int t)
{
    real *x = malloc((size_t)f->sizes[t] * sizeof *x);
    move(f, x, ((real **)&gpt2_of(&f->m)->grads)[t], f->sizes[t]);
    return x;
}

/* Makes a model in which every parameter matters: norms and biases differ from their initial values, and
 * no gradient is tiny. */
static void open_fixture(struct fixture *f, const struct model_config *c, int64_t B)
{
    assert_int_equal(compute_open(&f->compute, CUDA, 0, 1), 0);
    assert_int_equal(model_open(&f->m, c, B, &f->compute), 0);
    assert_int_equal(model_open_params(&f->m, 7), 0);
    assert_int_equal(model_open_grads(&f->m), 0);
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
        f->targets[i] = i % 6 == 4 ? MODEL_LEFT_OUT : f->targets[i];
    }
}

static void close_fixture(struct fixture *f)
{
    for (int t = 0; t < GPT2_N_TENSORS; t++)
        free(f->exact[t]);
    free(f->tokens);
    free(f->targets);
    model_close(&f->m);
    compute_close(&f->compute);
}

/* Fills everything that forward and backward write with NaN, so that reading it too early shows. */
static void poison(struct fixture *f)
{
    struct model_block blocks[] = {f->m.kept[0].acts_memory, f->m.kept[0].stats_memory};
    for (int i = 0; i < 2; i++) {
        void *nans = malloc((size_t)blocks[i].bytes);
        memset(nans, 0xFF, (size_t)blocks[i].bytes);
        move(f, blocks[i].p, nans, blocks[i].bytes / (int64_t)sizeof(real));
        free(nans);
    }
}

/* The model's forward and backward of a batch. A failure is in m->err. */
static void send_rows(struct model *m, const int32_t *tokens, const int32_t *targets)
{
    size_t bytes = (size_t)(m->B * m->config.context) * sizeof *m->tokens;
    m->err = m->err ? m->err : model_next_batch(m);
    memcpy(m->tokens, tokens, bytes);
    memcpy(m->targets, targets, bytes);
    model_send_batch(m);
}

static void pass_forward(struct model *m, const int32_t *tokens, const int32_t *targets)
{
    send_rows(m, tokens, targets);
    model_embed_forward(m);
    for (int64_t l = 0; l < m->config.layers; l++)
        model_layer_forward(m, l);
    model_head_forward(m);
}

static void pass_backward(struct model *m)
{
    model_head_backward(m);
    for (int64_t l = m->config.layers; l-- > 0;)
        model_layer_backward(m, l);
    model_embed_backward(m);
}

static double forward(struct fixture *f)
{
    struct model *m = &f->m;
    double loss = 0;
    pass_forward(m, f->tokens, f->targets);
    assert_int_equal(m->err, 0);
    assert_int_equal(model_send_loss(m), 0);
    assert_int_equal(model_take_loss(m, &loss), 0);
    return loss;
}

static void backward(struct fixture *f)
{
    struct model *m = &f->m;
    pass_backward(m);
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

/* Minus the log of the probability of id at a position, by the definition. */
static double exact_surprise(struct fixture *f, const int32_t *row, int64_t position, int32_t id)
{
    const int64_t T = f->m.config.context;
    for (int64_t t = 0; t < T; t++)
        f->targets[t] = t == position ? id : MODEL_LEFT_OUT;
    return reference_loss(&f->m.config, f->exact, row, f->targets, 1) * (double)T;
}

/* The logits of a row's last token are those of the definition, up to the same constant for all ids, whatever
 * follows it in the row. Returns the likeliest id. */
static int32_t check_logits_after(struct fixture *f, const int32_t *row, int64_t n)
{
    const int64_t V = f->m.config.vocab;
    float *logits = malloc((size_t)V * sizeof *logits);
    double all = 0, lowest = INFINITY;
    int32_t best = 0, exact_best = 0;
    pass_forward(&f->m, row, f->targets);
    assert_int_equal(f->m.err, 0);
    assert_int_equal(model_take_logits(&f->m, n - 1, logits), 0);
    for (int32_t v = 0; v < V; v++) {
        all += exp((double)logits[v]);
        best = logits[v] > logits[best] ? v : best;
    }
    for (int32_t v = 0; v < V; v++) {
        double exact = exact_surprise(f, row, n - 1, v), got = log(all) - (double)logits[v];
        exact_best = exact < lowest ? v : exact_best;
        lowest = fmin(exact, lowest);
        if (!(fabs(got - exact) <= 5 * LOSS_TOLERANCE * exact))
            fail_msg("after %lld tokens, id %d: %.9g, not %.9g", (long long)n, v, got, exact);
    }
    if (best != exact_best && !(exact_surprise(f, row, n - 1, best) <= lowest * (1 + 10 * LOSS_TOLERANCE)))
        fail_msg("after %lld tokens: id %d, not %d", (long long)n, best, exact_best);
    free(logits);
    return best;
}

/* A text that grows by its likeliest token, until the row is full. No loss is computed. */
static void check_logits(void **state)
{
    struct fixture f;
    int32_t row[9];
    double loss;
    open_fixture(&f, &shapes[0], 1);
    poison(&f);
    f.m.only_logits = true;
    for (int64_t n = 2; n <= 9; n++) {
        for (int64_t t = n; t < 9; t++)
            row[t] = (int32_t)(uniform() * 37);
        if (n == 2)
            memcpy(row, f.tokens, 2 * sizeof *row);
        int32_t next = check_logits_after(&f, row, n);
        if (n < 9)
            row[n] = next;
    }
    assert_int_equal(model_send_loss(&f.m), 0);
    assert_int_equal(model_take_loss(&f.m, &loss), 0);
    assert_true(loss == 0.0);
    close_fixture(&f);
}

/* Returns memory of c's device with a copy of x, or poisoned without one. */
static void *send(struct compute *c, const void *x, int64_t bytes)
{
    void *at, *nans = malloc((size_t)bytes);
    memset(nans, 0xFF, (size_t)bytes);
    assert_int_equal(c->dev->ops->alloc(c->dev, bytes, &at), 0);
    assert_int_equal(c->dev->ops->copy(c->stream, at, x ? x : nans, bytes), 0);
    assert_int_equal(c->dev->ops->stream_sync(c->stream), 0);
    free(nans);
    return at;
}

/* Frees what `send` returned. */
static void drop(struct compute *c, void *at, int64_t bytes)
{
    assert_int_equal(c->dev->ops->stream_sync(c->stream), 0);
    c->dev->ops->free(c->dev, at, bytes);
}

/* Copies what `send` returned to x, and frees it. */
static void fetch(struct compute *c, void *x, void *at, int64_t bytes)
{
    assert_int_equal(c->dev->ops->copy(c->stream, x, at, bytes), 0);
    drop(c, at, bytes);
}

/* One loss's logits, of which each of PARTS tensor-parallel ranks has the columns of U ids. */
enum { LOSS_ROWS = 6, PARTS = 3 };
struct split_loss {
    int64_t V, U, ld;
    double smoothing;
    struct model_label label;
    float scale;
    double *exact;        /* (LOSS_ROWS, V) the logits */
    float *logits[PARTS]; /* the device's, (LOSS_ROWS, U), ld elements between rows */
    int32_t target[LOSS_ROWS];
    float top[LOSS_ROWS], total[LOSS_ROWS], wanted[LOSS_ROWS];
};

static int64_t split_ids(const struct split_loss *s, int p)
{
    int64_t left = s->V - p * s->U;
    return left < s->U ? left : s->U;
}

static int64_t logit_bytes(const struct split_loss *s)
{
    return LOSS_ROWS * s->ld * (int64_t)sizeof(float);
}

static void draw_logits(struct compute *c, struct split_loss *s, double range)
{
    float *x = malloc((size_t)logit_bytes(s));
    s->exact = malloc((size_t)(LOSS_ROWS * s->V) * sizeof *s->exact);
    for (int64_t row = 0; row < LOSS_ROWS; row++)
        s->target[row] = row == 1 ? MODEL_LEFT_OUT : (int32_t)(uniform() * (double)s->V);
    for (int p = 0; p < PARTS; p++) {
        memset(x, 0xFF, (size_t)logit_bytes(s));
        for (int64_t row = 0; row < LOSS_ROWS; row++)
            for (int64_t v = 0; v < split_ids(s, p); v++) {
                x[row * s->ld + v] = (float)(range * (2 * uniform() - 1));
                s->exact[row * s->V + p * s->U + v] = (double)x[row * s->ld + v];
            }
        s->logits[p] = send(c, x, logit_bytes(s));
    }
    free(x);
}

/* The targets as rank p sees them, in the device's memory. */
static int32_t *targets_of(struct compute *c, const struct split_loss *s, int p)
{
    int32_t own[LOSS_ROWS];
    memcpy(own, s->target, sizeof own);
    model_vocab_localize(own, LOSS_ROWS, p * s->U, split_ids(s, p));
    return send(c, own, sizeof own);
}

/* The first two steps of each part, and what the ranks reduce. */
static void reduce_parts(struct compute *c, struct split_loss *s)
{
    const struct model_layers *layers = model_layers_for(c);
    float here[LOSS_ROWS], more[LOSS_ROWS];
    for (int64_t row = 0; row < LOSS_ROWS; row++) {
        s->top[row] = -INFINITY;
        s->total[row] = s->wanted[row] = 0;
    }
    for (int p = 0; p < PARTS; p++) {
        float *top = send(c, NULL, sizeof here);
        assert_int_equal(layers->vocab_top(c, top, s->logits[p], LOSS_ROWS, split_ids(s, p), s->ld), 0);
        fetch(c, here, top, sizeof here);
        for (int64_t row = 0; row < LOSS_ROWS; row++)
            s->top[row] = here[row] > s->top[row] || isnan(here[row]) ? here[row] : s->top[row];
    }
    for (int p = 0; p < PARTS; p++) {
        int32_t *targets = targets_of(c, s, p);
        float *top = send(c, s->top, sizeof here), *total = send(c, NULL, sizeof here),
              *wanted = send(c, NULL, sizeof here);
        assert_int_equal(layers->vocab_exponentials(c, s->logits[p], total, wanted, top, targets, LOSS_ROWS,
                                                    split_ids(s, p), s->ld, s->label),
                         0);
        fetch(c, here, total, sizeof here);
        fetch(c, more, wanted, sizeof more);
        for (int64_t row = 0; row < LOSS_ROWS; row++) {
            s->total[row] += here[row];
            s->wanted[row] += more[row];
        }
        drop(c, top, sizeof here);
        drop(c, targets, sizeof s->target);
    }
}

/* The last step of part p. The caller frees *dlogits. */
static void loss_of_part(struct compute *c, struct split_loss *s, int p, double loss[LOSS_ROWS],
                         real **dlogits)
{
    int64_t bytes = LOSS_ROWS * s->ld * (int64_t)sizeof(real);
    int32_t *targets = targets_of(c, s, p);
    float *total = send(c, s->total, sizeof s->total), *wanted = send(c, s->wanted, sizeof s->wanted);
    double *losses = send(c, NULL, LOSS_ROWS * (int64_t)sizeof *loss);
    real *d = send(c, NULL, bytes);
    assert_int_equal(model_layers_for(c)->vocab_loss(c, d, losses, s->logits[p], total, wanted, targets,
                                                     LOSS_ROWS, split_ids(s, p), s->U, s->ld, s->label,
                                                     s->scale),
                     0);
    *dlogits = malloc((size_t)bytes);
    fetch(c, *dlogits, d, bytes);
    fetch(c, loss, losses, LOSS_ROWS * (int64_t)sizeof *loss);
    drop(c, total, sizeof s->total);
    drop(c, wanted, sizeof s->wanted);
    drop(c, targets, sizeof s->target);
}

/* Compares row `row` of part p with the definition. */
static void check_row(const struct split_loss *s, int p, int64_t row, double loss, const real *dlogits)
{
    const double *x = s->exact + row * s->V;
    double sum = 0, want = 0, top = (double)s->top[row];
    for (int64_t v = 0; v < s->V; v++)
        sum += exp(x[v] - top);
    for (int64_t v = 0; v < s->V; v++) {
        double q = s->smoothing / (double)s->V + (v == s->target[row] ? 1 - s->smoothing : 0);
        double log_p = x[v] - top - log(sum), wanted = (double)s->scale * (exp(log_p) - q);
        if (s->target[row] == MODEL_LEFT_OUT)
            wanted = q = 0;
        want -= q * log_p;
        if (v / s->U != p)
            continue;
        double got = (double)to_float(dlogits[row * s->ld + v % s->U]);
        if (!(fabs(got - wanted) <= (sizeof(real) == 2 ? 0.016 : 4e-6) * fabs(wanted) + 1e-7))
            fail_msg("V %lld, row %lld, id %lld: gradient %.9g, not %.9g", (long long)s->V, (long long)row,
                     (long long)v, got, wanted);
    }
    if (!(fabs(loss - want) <= 2e-6 * want + 2e-6))
        fail_msg("V %lld, row %lld: loss %.9g, not %.9g", (long long)s->V, (long long)row, loss, want);
    for (int64_t v = split_ids(s, p); v < s->U; v++) /* belong to no token */
        assert_true(to_float(dlogits[row * s->ld + v]) == 0);
}

/* Divides a loss's tokens into three parts, the last one shorter, and compares with the definition.
 * Smoothed labels share their probability among all V tokens, not those of a rank
 * (https://github.com/NVIDIA/Megatron-LM/issues/737). Logits may differ so much that a probability is 0
 * (https://github.com/NVIDIA/Megatron-LM/issues/7464). */
static void check_loss_of_parts(void **state)
{
    static const struct {
        int64_t V, ld;
        double smoothing, range;
    } cases[] = {{37, 16, 0, 4},     {37, 13, 0.1, 4},     {37, 16, 0.9, 4},      {37, 16, 0.1, 1000},
                 {3001, 1008, 0, 4}, {3001, 1001, 0.1, 4}, {3001, 1008, 0.1, 100}};
    struct compute c;
    assert_int_equal(compute_open(&c, CUDA, 0, 1), 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct split_loss s = {
            .V = cases[i].V, .ld = cases[i].ld, .smoothing = cases[i].smoothing, .scale = 0.25f};
        s.U = (s.V + PARTS - 1) / PARTS;
        s.label = (struct model_label){(float)(s.smoothing / (double)s.V), (float)(1 - s.smoothing)};
        draw_logits(&c, &s, cases[i].range);
        reduce_parts(&c, &s);
        for (int p = 0; p < PARTS; p++) {
            double loss[LOSS_ROWS];
            real *dlogits;
            loss_of_part(&c, &s, p, loss, &dlogits);
            for (int64_t row = 0; row < LOSS_ROWS; row++)
                check_row(&s, p, row, loss[row], dlogits);
            free(dlogits);
            drop(&c, s.logits[p], logit_bytes(&s));
        }
        free(s.exact);
    }
    compute_close(&c);
}

/* A NaN among the logits of one part reaches the loss of every part. */
static void check_nan_of_parts(void **state)
{
    struct compute c;
    assert_int_equal(compute_open(&c, CUDA, 0, 1), 0);
    struct split_loss s = {.V = 37, .U = 13, .ld = 16, .label = {0, 1}, .scale = 1};
    draw_logits(&c, &s, 4);
    float *x = malloc((size_t)logit_bytes(&s));
    fetch(&c, x, s.logits[1], logit_bytes(&s));
    x[2 * s.ld + 5] = NAN;
    s.logits[1] = send(&c, x, logit_bytes(&s));
    reduce_parts(&c, &s);
    for (int p = 0; p < PARTS; p++) {
        double loss[LOSS_ROWS];
        real *dlogits;
        loss_of_part(&c, &s, p, loss, &dlogits);
        for (int64_t row = 0; row < LOSS_ROWS; row++)
            assert_true(isnan(loss[row]) == (row == 2));
        free(dlogits);
        drop(&c, s.logits[p], logit_bytes(&s));
    }
    free(x);
    free(s.exact);
    compute_close(&c);
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
#if defined(MODEL_TEST_CUDA) && !defined(MODEL_TEST_STAND_IN)
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
            move(&f, ((real **)&gpt2_of(&f.m)->grads)[t], before, f.sizes[t]);
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

static void backward_part(struct fixture *f, enum model_computes part)
{
    model_begin_backward(&f->m, part);
    backward(f);
    model_end_backward(&f->m);
}

/* Passes of micro-batch i of two, which have different targets. */
static void forward_of(struct fixture *f, int i)
{
    model_turn_to(&f->m, i);
    pass_forward(&f->m, f->tokens, i ? f->tokens : f->targets);
}

static void backward_of(struct fixture *f, int i, enum model_computes part)
{
    model_turn_to(&f->m, i);
    send_rows(&f->m, f->tokens, i ? f->tokens : f->targets);
    backward_part(f, part);
}

/* Compares all gradients, and closes both. */
static void same_gradients(struct fixture *f, struct fixture *g)
{
    for (int t = 0; t < GPT2_N_TENSORS; t++) {
        real *x = gradient(f, t), *y = gradient(g, t);
        same_gradient(t, x, y, f->sizes[t]);
        free(x);
        free(y);
    }
    close_fixture(f);
    close_fixture(g);
}

/* Recomputation gives the bits of a run without it, for two micro-batches whose passes mix, and with a
 * backward pass in two parts. It takes less memory. */
static void check_recompute(void **state)
{
    for (size_t s = 0; s < 2 * sizeof shapes / sizeof shapes[0]; s++) {
        struct fixture f, g;
        struct model_config c = shapes[s / 2];
        uint64_t start = seed;
        double want, got;
        c.two_parts = s % 2;
        open_fixture(&f, &c, rows[s / 2]);
        seed = start;
        c.recompute = true;
        open_fixture(&g, &c, rows[s / 2]);
        for (struct fixture *x = &f; x; x = x == &f ? &g : NULL) {
            assert_int_equal(model_keep(&x->m, 2), 0);
            poison(x);
            forward_of(x, 0);
            forward_of(x, 1);
            backward_of(x, 0, c.two_parts ? MODEL_INPUTS : MODEL_ALL);
            backward_of(x, 1, c.two_parts ? MODEL_INPUTS : MODEL_ALL);
            struct gpt2_params params = gpt2_of(&x->m)->params;
            if (c.two_parts) {
                gpt2_of(&x->m)->params = (struct gpt2_params){0};
                backward_of(x, 0, MODEL_WEIGHTS);
                backward_of(x, 1, MODEL_WEIGHTS);
                gpt2_of(&x->m)->params = params;
            }
            assert_int_equal(model_send_loss(&x->m) || model_take_loss(&x->m, x == &f ? &want : &got), 0);
        }
        assert_memory_equal(&want, &got, sizeof want);
        assert_int_equal(g.m.n_between, c.two_parts ? 2 : 0);
        if (c.layers > 1 && !c.two_parts)
            assert_true(model_activation_bytes(&g.m) < model_activation_bytes(&f.m));
        same_gradients(&f, &g);
    }
}

/* A tensor-parallel rank whose collectives only count, and fail at call number fails_at. */
struct counter {
    int n, fails_at;
};

static int count_call(struct counter *c)
{
    return ++c->n == c->fails_at ? ZERO_ERR_PEER : 0;
}

static int count_sum(void *arg, real *x, int64_t n)
{
    (void)x, (void)n;
    return count_call(arg);
}

static int count_reduce(void *arg, float *x, int64_t n, bool largest)
{
    (void)x, (void)n, (void)largest;
    return count_call(arg);
}

/* Runs both passes, and returns the error and the number of collectives. */
static int count_calls(struct model_config c, int fails_at, int *n)
{
    struct fixture f = {.tokens = NULL};
    struct counter counter = {.fails_at = fails_at};
    int32_t *zeros = calloc((size_t)c.context, sizeof *zeros);
    assert_int_equal(compute_open(&f.compute, CUDA, 0, 1), 0);
    assert_int_equal(model_open(&f.m, &c, 1, &f.compute), 0);
    assert_int_equal(model_open_params(&f.m, 7), 0);
    assert_int_equal(model_open_grads(&f.m), 0);
    f.m.sum = count_sum;
    f.m.reduce = count_reduce;
    f.m.sum_arg = &counter;
    pass_forward(&f.m, zeros, zeros);
    pass_backward(&f.m);
    *n = counter.n;
    int err = f.m.err;
    close_fixture(&f);
    free(zeros);
    return err;
}

/* Recomputation makes one sum for each layer. Nothing is done after any sum that fails. */
static void check_failures(void **state)
{
    struct model_config c = shapes[0];
    int plain, all, n;
    c.tp = 2;
    assert_int_equal(count_calls(c, 0, &plain), 0);
    c.recompute = true;
    assert_int_equal(count_calls(c, 0, &all), 0);
    assert_int_equal(all, plain + c.layers);
    for (int i = 1; i <= all; i++) {
        assert_int_equal(count_calls(c, i, &n), ZERO_ERR_PEER);
        assert_int_equal(n, i);
    }
}

static int alloc_nothing(struct zr_device *dev, int64_t bytes, void **out)
{
    (void)dev, (void)out;
    return zr_fail(ZERO_ERR_NOMEM, "no memory for %lld bytes", (long long)bytes);
}

/* With recompute, a backward pass in two parts allocates a block for what the second part needs. If there is
 * no memory for it, the pass fails and computes nothing. */
static void check_no_memory(void **state)
{
    struct model_config c = shapes[0];
    struct fixture f;
    c.recompute = c.two_parts = true;
    open_fixture(&f, &c, 2);
    forward(&f);
    const struct zr_device_ops *ops = f.compute.dev->ops;
    struct zr_device_ops failing = *ops;
    failing.alloc = alloc_nothing;
    f.compute.dev->ops = &failing;
    model_begin_backward(&f.m, MODEL_INPUTS);
    pass_backward(&f.m);
    model_end_backward(&f.m);
    assert_int_equal(f.m.err, ZERO_ERR_NOMEM);
    f.m.err = 0;
    f.compute.dev->ops = ops;
    backward_part(&f, MODEL_INPUTS);
    backward_part(&f, MODEL_WEIGHTS);
    close_fixture(&f);
}

/* A backward pass in two parts gives the bits of a whole one. The first part has no gradients and the second
 * no parameters, and in between other passes have used the shared buffers. */
static void check_two_parts(void **state)
{
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
        struct fixture f, g;
        struct model_config c = shapes[s];
        uint64_t start = seed;
        open_fixture(&f, &c, rows[s]);
        forward(&f);
        backward(&f);
        seed = start;
        c.two_parts = true;
        open_fixture(&g, &c, rows[s]);
        poison(&g);
        struct gpt2_params params = gpt2_of(&g.m)->params, grads = gpt2_of(&g.m)->grads;
        int64_t RC = model_own_rows(&g.m) * c.channels;
        forward(&g);
        gpt2_of(&g.m)->grads = (struct gpt2_params){0};
        backward_part(&g, MODEL_INPUTS);
        gpt2_of(&g.m)->params = (struct gpt2_params){0};
        gpt2_of(&g.m)->grads = grads;
        void *nans = malloc((size_t)RC * sizeof(real));
        memset(nans, 0xFF, (size_t)RC * sizeof(real));
        move(&g, g.m.acts.dresidual, nans, RC);
        move(&g, g.m.acts.dbtc, nans, RC);
        free(nans);
        backward_part(&g, MODEL_WEIGHTS);
        gpt2_of(&g.m)->params = params;
        same_gradients(&f, &g);
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
    move(&f, gpt2_of(&f.m)->params.fcw + 3, &bad, 1);
    assert_true(isnan(forward(&f)));
    backward(&f);
    move(&f, &out, gpt2_of(&f.m)->grads.qkvw, 1);
    assert_true(isnan(to_float(out)));
    close_fixture(&f);
}

/* ---- tensor parallelism ---- */

/* The tensor-parallel ranks of a model, as threads of this process. They exchange values through memory of
 * the host. */
enum { MAX_TP = 4 };
struct tp_group {
    int32_t tp;
    pthread_barrier_t met;
    char *said[MAX_TP];        /* what each rank has passed to the current call */
    int32_t *tokens, *targets; /* (B, T) of the whole batch */
    struct model_config whole;
};

struct tp_member {
    struct tp_group *group;
    struct compute compute;
    struct model m;
    double loss;
};

/* Shows this rank's bytes to all. They are valid until `part`. */
static int meet(struct tp_member *r, const void *src, int64_t bytes)
{
    struct tp_group *g = r->group;
    const struct zr_device_ops *dev = r->compute.dev->ops;
    g->said[r->m.part] = malloc((size_t)bytes);
    int err = dev->copy(r->compute.stream, g->said[r->m.part], src, bytes);
    err = err ? err : dev->stream_sync(r->compute.stream);
    pthread_barrier_wait(&g->met);
    return err;
}

/* Copies the call's result to dst, and waits until no rank reads what was said. */
static int part(struct tp_member *r, void *dst, const void *result, int64_t bytes)
{
    const struct zr_device_ops *dev = r->compute.dev->ops;
    int err = dev->copy(r->compute.stream, dst, result, bytes);
    err = err ? err : dev->stream_sync(r->compute.stream);
    pthread_barrier_wait(&r->group->met);
    free(r->group->said[r->m.part]);
    return err;
}

/* Sums elements [first, first + n) of what the ranks said. */
static real *sum_of_said(const struct tp_group *g, int64_t first, int64_t n)
{
    real *sum = malloc((size_t)n * sizeof *sum);
    for (int64_t i = 0; i < n; i++) {
        float x = 0;
        for (int32_t p = 0; p < g->tp; p++)
            x += to_float(((real *)(void *)g->said[p])[first + i]);
        sum[i] = from_float(x);
    }
    return sum;
}

static int tp_sum(void *arg, real *x, int64_t n)
{
    struct tp_member *r = arg;
    int err = meet(r, x, n * (int64_t)sizeof *x);
    real *sum = sum_of_said(r->group, 0, n);
    err = part(r, x, sum, n * (int64_t)sizeof *x) || err;
    free(sum);
    return err;
}

static int tp_reduce(void *arg, float *x, int64_t n, bool largest)
{
    struct tp_member *r = arg;
    int err = meet(r, x, n * (int64_t)sizeof *x);
    float *all = calloc((size_t)n, sizeof *all);
    for (int32_t p = 0; p < r->group->tp; p++)
        for (int64_t i = 0; i < n; i++) {
            float y = ((float *)(void *)r->group->said[p])[i];
            all[i] = largest ? (p == 0 || y > all[i] ? y : all[i]) : all[i] + y;
        }
    err = part(r, x, all, n * (int64_t)sizeof *x) || err;
    free(all);
    return err;
}

static int tp_gather(void *arg, real *dst, const real *src, int64_t n)
{
    struct tp_member *r = arg;
    int64_t bytes = n * (int64_t)sizeof *src;
    int err = meet(r, src, bytes);
    char *all = malloc((size_t)(r->group->tp * bytes));
    for (int32_t p = 0; p < r->group->tp; p++)
        memcpy(all + p * bytes, r->group->said[p], (size_t)bytes);
    err = part(r, dst, all, r->group->tp * bytes) || err;
    free(all);
    return err;
}

static int tp_scatter(void *arg, real *dst, const real *src, int64_t n)
{
    struct tp_member *r = arg;
    int err = meet(r, src, r->group->tp * n * (int64_t)sizeof *src);
    real *sum = sum_of_said(r->group, r->m.part * n, n);
    err = part(r, dst, sum, n * (int64_t)sizeof *src) || err;
    free(sum);
    return err;
}

/* The number in the whole tensor t of element i of part p, or -1 for a row of wte that belongs to no id. A
 * part has `own` of each row of pieces of `inner` elements. */
static int64_t whole_index(const struct model_config *c, int t, int32_t p, int64_t i)
{
    int64_t C = c->channels, A = model_part_channels(c), F = model_part_hidden(c), U = model_part_vocab(c);
    const struct {
        int64_t own, inner;
    } cuts[GPT2_N_TENSORS] = {
        [0] = {U, C}, [4] = {A, C}, [5] = {A, 1}, [6] = {A, 1}, [10] = {F, C}, [11] = {F, 1}, [12] = {F, 1}};
    int64_t own = cuts[t].own, inner = cuts[t].inner;
    if (!own)
        return i;
    int64_t at = i / inner % own, row = i / inner / own;
    if (t == 0 && p * own + at >= c->vocab)
        return -1;
    return (row * own * c->tp + p * own + at) * inner + i % inner;
}

/* The number of elements of a part's tensor t. */
static int64_t part_size(const struct fixture *f, const struct model_config *c, int t)
{
    bool cut = t == 0 || (t >= 4 && t <= 6) || (t >= 10 && t <= 12);
    return t == 0 ? model_part_vocab(c) * c->channels : cut ? f->sizes[t] / c->tp : f->sizes[t];
}

/* Opens part p of f's model, with f's parameters. */
static void open_part(struct tp_member *r, struct tp_group *g, struct fixture *f, int32_t p)
{
    r->group = g;
    assert_int_equal(compute_open(&r->compute, CUDA, 0, 1), 0);
    assert_int_equal(model_open(&r->m, &g->whole, f->m.B, &r->compute), 0);
    assert_int_equal(model_open_params(&r->m, 7), 0);
    assert_int_equal(model_open_grads(&r->m), 0);
    r->m.part = p;
    r->m.sum = tp_sum;
    r->m.reduce = tp_reduce;
    r->m.gather = tp_gather;
    r->m.scatter = tp_scatter;
    r->m.sum_arg = r;
    for (int t = 0; t < GPT2_N_TENSORS; t++) {
        int64_t n = part_size(f, &g->whole, t);
        real *x = malloc((size_t)n * sizeof *x);
        for (int64_t i = 0; i < n; i++) {
            int64_t at = whole_index(&g->whole, t, p, i);
            x[i] = from_float(at < 0 ? 0.0f : (float)f->exact[t][at]);
        }
        move(f, ((real **)&gpt2_of(&r->m)->params)[t], x, n);
        free(x);
    }
    void *nans = malloc((size_t)r->m.kept[0].acts_memory.bytes);
    memset(nans, 0xFF, (size_t)r->m.kept[0].acts_memory.bytes);
    move(f, r->m.kept[0].acts_memory.p, nans, r->m.kept[0].acts_memory.bytes / (int64_t)sizeof(real));
    free(nans);
}

/* A failure ends the program, because the other ranks wait for this one. */
static void *run_part(void *arg)
{
    struct tp_member *r = arg;
    struct model *m = &r->m;
    pass_forward(m, r->group->tokens, r->group->targets);
    pass_backward(m);
    if (m->err || model_send_loss(m) || model_take_loss(m, &r->loss)) {
        fprintf(stderr, "part %d: %s\n", m->part, zr_error_text());
        _exit(1);
    }
    return NULL;
}

/* Compares a gradient of part p, or with `partial` the parts' sum, with the whole model's. */
static void check_part_gradient(struct fixture *f, struct tp_member *r, int32_t p, int t, const real *whole)
{
    const struct model_config *c = &r[p].m.config;
    bool partial = c->sequence && (t == 2 || t == 3 || t == 8 || t == 9 || t >= 14); /* norms */
    int64_t n = part_size(f, c, t);
    real *x = malloc((size_t)n * sizeof *x);
    double *got = calloc((size_t)n, sizeof *got), error = 0, size = 0;
    for (int32_t q = partial ? 0 : p; q < (partial ? (int32_t)c->tp : p + 1); q++) {
        move(f, x, ((real **)&gpt2_of(&r[q].m)->grads)[t], n);
        for (int64_t i = 0; i < n; i++)
            got[i] += (double)to_float(x[i]);
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t at = whole_index(c, t, p, i);
        double want = at < 0 ? 0.0 : (double)to_float(whole[at]);
        error += (got[i] - want) * (got[i] - want);
        size += want * want;
    }
    double gauge = fmax(sqrt(size), typical_size(whole, f->sizes[t], n));
    if (!(sqrt(error) <= GRAD_TOLERANCE * gauge + 1e-7))
        fail_msg("tp %lld%s, part %d, tensor %d: gradients differ by %.3g of their size", (long long)c->tp,
                 c->sequence ? ", sequence" : "", p, t, sqrt(error) / gauge);
    free(x);
    free(got);
}

static void run_group(struct fixture *f, struct tp_group *g)
{
    struct tp_member *r = calloc((size_t)g->tp, sizeof *r);
    pthread_t threads[MAX_TP];
    double exact = exact_loss(f);
    forward(f);
    backward(f);
    assert_int_equal(pthread_barrier_init(&g->met, NULL, (unsigned)g->tp), 0);
    for (int32_t p = 0; p < g->tp; p++)
        open_part(&r[p], g, f, p);
    for (int32_t p = 0; p < g->tp; p++)
        assert_int_equal(pthread_create(&threads[p], NULL, run_part, &r[p]), 0);
    for (int32_t p = 0; p < g->tp; p++)
        pthread_join(threads[p], NULL);
    for (int32_t p = 0; p < g->tp; p++)
        if (!(fabs(r[p].loss - exact) <= LOSS_TOLERANCE * exact))
            fail_msg("tp %d, part %d: loss %.9g, not %.9g", g->tp, p, r[p].loss, exact);
    for (int t = 0; t < GPT2_N_TENSORS; t++) {
        real *whole = gradient(f, t);
        for (int32_t p = 0; p < g->tp; p++)
            check_part_gradient(f, r, p, t, whole);
        free(whole);
    }
    for (int32_t p = 0; p < g->tp; p++) {
        model_close(&r[p].m);
        compute_close(&r[p].compute);
    }
    pthread_barrier_destroy(&g->met);
    free(r);
}

/* A model that is cut over ranks has the loss of the definition and the gradients of the whole model. The
 * last rank may have fewer token ids, and none of the batch's tokens. */
static void check_parts(void **state)
{
    static const struct {
        int shape;
        int32_t tp;
        bool sequence, few;
    } cases[] = {{3, 2, false, false}, {3, 2, true, false}, {2, 4, false, true}, {2, 2, true, true}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct fixture f;
        const struct model_config *c = &shapes[cases[i].shape];
        int64_t B = rows[cases[i].shape];
        open_fixture(&f, c, B);
        struct tp_group g = {.tp = cases[i].tp, .tokens = f.tokens, .targets = f.targets, .whole = *c};
        g.whole.tp = g.tp;
        g.whole.sequence = cases[i].sequence;
        for (int64_t k = 0; k < B * c->context && cases[i].few; k++)
            f.tokens[k] %= 7; /* rank 0's */
        run_group(&f, &g);
        close_fixture(&f);
    }
}

#ifdef MODEL_TEST_STAND_IN
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
    const struct model_config c = {
        .ops = &gpt2_ops, .layers = 2, .heads = 2, .channels = 32, .context = 16, .vocab = N / 32};
    real *whole = malloc(N * sizeof *whole), *part = malloc(N * sizeof *part);
    model_draw(&c, seed, ATTPROJW, 0, 1000, part);
    check_normal(part, 1000, random_bits(random_bits(seed) + 3), 0.01); /* the fourth tensor drawn */
    model_draw(&c, seed, WTE, 0, N, whole);
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
        model_draw(&c, seed, WTE, first, n, part);
        assert_memory_equal(part, whole + first, (size_t)n * sizeof *part);
        for (int64_t i = n; i < N; i++) /* nothing after it is written */
            assert_true(((unsigned char *)&part[i])[0] == 0xff);
    }
    model_draw(&c, seed, LN1W, 5, 3, whole);
    assert_true(to_float(whole[0]) == 1 && to_float(whole[2]) == 1);
    model_draw(&c, seed, LN1B, 5, 3, whole);
    assert_true(to_float(whole[0]) == 0 && to_float(whole[2]) == 0);
    free(whole), free(part);
}

int main(void)
{
#ifdef MODEL_TEST_CUDA
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
        cmocka_unit_test(check_loss_of_parts), cmocka_unit_test(check_nan_of_parts),
        cmocka_unit_test(check_parts),         cmocka_unit_test(check_loss),
        cmocka_unit_test(check_logits),        cmocka_unit_test(check_gradients),
        cmocka_unit_test(check_adds),          cmocka_unit_test(check_stores),
        cmocka_unit_test(check_two_parts),     cmocka_unit_test(check_recompute),
        cmocka_unit_test(check_failures),      cmocka_unit_test(check_no_memory),
        cmocka_unit_test(check_repeats),       cmocka_unit_test(check_nan),
        cmocka_unit_test(check_draw),
#ifdef MODEL_TEST_STAND_IN
        cmocka_unit_test(check_epilogues),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
