/* SPDX-License-Identifier: Apache-2.0 */
/* test_gpt2_threads.c: tests that the model's layers on the host and the plain optimizer give the same
 * bits on any number of threads. Each runs once on one block of memory, which is then compared. */
#include "bench/gpt2/gpt2_layers.h"
#include "bench/train/plain_optimizer.h"
#include "test/cmocka.h"
#include "test/kernels/random.h"

#include <stdio.h>
#include <stdlib.h>

enum { MAX_THREADS = 7, B = 3, MAX_BLOCK_BYTES = 1 << 22 };

/* Drawn for each case: rows, channels and other sizes of a layer, some smaller than the number of threads. */
struct shape {
    int64_t T, C, V, NH, n_params[3];
};

/* Hands out parts of a block. */
struct block {
    char *at;
    int64_t used;
};

static void *piece(struct block *b, int64_t bytes)
{
    void *p = b->at + b->used;
    b->used += (bytes + 63) / 64 * 64;
    assert_true(b->used <= MAX_BLOCK_BYTES);
    return p;
}

static real *reals(struct block *b, struct random_source *r, int64_t n)
{
    real *x = piece(b, n * (int64_t)sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = from_float(random_normal(r));
    return x;
}

static float *floats(struct block *b, struct random_source *r, int64_t n)
{
    float *x = piece(b, n * (int64_t)sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = random_normal(r);
    return x;
}

static void rows_and_elements(const struct compute *on, struct block *b, struct random_source *r,
                              const struct shape *s, float *scratch)
{
    const struct gpt2_layers *l = &gpt2_layers_host;
    int64_t N = B * s->T, C = s->C;
    real *inp = reals(b, r, N * C), *out = reals(b, r, N * C), *weight = reals(b, r, C);
    real *bias = reals(b, r, C), *din = reals(b, r, N * C), *dw = reals(b, r, C), *db = reals(b, r, C);
    float *mean = floats(b, r, N), *rstd = floats(b, r, N);
    l->layernorm_forward(on, out, mean, rstd, inp, weight, bias, scratch, N, C);
    l->layernorm_backward(on, din, dw, db, out, inp, weight, mean, rstd, scratch, N, C);
    l->gelu_forward(on, out, inp, N * C);
    l->gelu_backward(on, din, inp, N * C);
    l->bias_backward(on, db, din, scratch, N, C);
    l->add(on, din, out, N * C);
}

/* A tile of all tokens, about half of which are queries, and its way from and to the heads' rows. */
static void attention(const struct compute *on, struct block *b, struct random_source *r,
                      const struct shape *s)
{
    const struct gpt2_layers *l = &gpt2_layers_host;
    int64_t T = s->T, NH = s->NH, HS = s->C, heads = B * NH, n = heads * T * T;
    const struct gpt2_rows rows = {{0, T / 2}, {T / 3, T - T / 2}};
    const struct gpt2_heads in_rows = {0, heads, NH, HS, T * NH * HS, HS, NH * HS};
    const struct gpt2_tile tile = {
        .n_heads = heads, .NH = NH, .T = T, .n_queries = T, .n_keys = T, .queries = rows, .scale = 0.3f};
    real *att = reals(b, r, n), *dscores = reals(b, r, n), *x = reals(b, r, heads * T * HS);
    float *scores = floats(b, r, n), *datt = floats(b, r, n), *sum = floats(b, r, heads * T * HS);
    float *logsum = floats(b, r, heads * T), *dots = floats(b, r, heads * T);
    float *part = floats(b, r, heads * T * HS), *logsum_part = floats(b, r, heads * T);
    l->attention_load(on, reals(b, r, heads * T * HS), x, in_rows, rows, 0, T);
    l->attention_store(on, x, NULL, false, sum, in_rows, rows, 0, T);
    l->attention_dots(on, dots, x, reals(b, r, heads * T * HS), B, T, NH, HS);
    l->attention_softmax(on, att, logsum, scores, tile);
    l->attention_softmax_backward(on, att, dscores, scores, datt, logsum, dots, tile);
    l->attention_merge(on, sum, logsum_part, part, logsum, in_rows, T);
    l->attention_store(on, NULL, part, true, sum, in_rows, rows, 0, T);
}

static void tokens(const struct compute *on, struct block *b, struct random_source *r, const struct shape *s,
                   float *scratch)
{
    const struct gpt2_layers *l = &gpt2_layers_host;
    int64_t N = B * s->T, C = s->C, V = s->V;
    int32_t *token = piece(b, N * 4), *order = piece(b, N * 4), *distinct = piece(b, N * 4);
    int32_t *first = piece(b, (N + 1) * 4), n = 0, at = 0;
    for (int64_t row = 0; row < N; row++)
        token[row] = (int32_t)random_below(r, V);
    for (int32_t v = 0; v < V; v++) {
        first[n] = at;
        for (int32_t row = 0; row < N; row++)
            if (token[row] == v)
                order[at++] = row;
        if (at > first[n])
            distinct[n++] = v;
    }
    first[n] = at;
    const struct gpt2_groups groups = {order, distinct, first, n};
    int32_t *position = piece(b, N * 4);
    for (int64_t row = 0; row < N; row++)
        position[row] = (int32_t)(row % s->T);
    real *wte = reals(b, r, V * C), *wpe = reals(b, r, s->T * C), *out = reals(b, r, N * C);
    l->embedding_forward(on, out, token, position, wte, wpe, N, C);
    l->tokens_backward(on, wte, out, &groups, scratch, C);
    l->positions_backward(on, wte, out, &groups, scratch, C);
    real *dlogits = reals(b, r, N * V);
    double *loss = piece(b, N * 8);
    l->cross_entropy(on, dlogits, loss, floats(b, r, N * V), token, N, V, V, (struct gpt2_label){0.01f, 0.9f},
                     0.1f);
}

static void optimizer(const struct compute *on, struct block *b, struct random_source *r,
                      const struct shape *s)
{
    struct zero_tensor table[3] = {{0}};
    real *param[3], *grad[3];
    for (int t = 0; t < 3; t++) {
        param[t] = reals(b, r, s->n_params[t]);
        grad[t] = reals(b, r, s->n_params[t]);
        table[t] = (struct zero_tensor){.param = (void **)&param[t],
                                        .grad = (void **)&grad[t],
                                        .shape = {s->n_params[t]},
                                        .flags = t == 1 ? ZERO_NO_DECAY : 0};
    }
    struct plain p;
    const struct train_options o = {
        .accum = 2, .beta1 = 0.9, .beta2 = 0.95, .weight_decay = 0.1, .clip = 1.0};
    struct zero_step_info *info = piece(b, 2 * (int64_t)sizeof *info);
    assert_int_equal(plain_open(&p, on, table, 3), 0);
    for (int step = 0; step < 2; step++) {
        assert_int_equal(plain_step(&p, &o, 0.01f, &info[step]), 0);
        assert_true(info[step].grad_norm > 0 || step);
        for (int t = 0; t < 3; t++)
            grad[t][0] = from_float(random_normal(r));
    }
    for (int t = 0; t < 3; t++)
        for (int value = ZERO_VALUE_STATE; value < ZERO_VALUE_STATE + 2; value++)
            assert_int_equal(plain_read(&p, t, value, 0, s->n_params[t], piece(b, s->n_params[t] * 4)), 0);
    plain_close(&p);
}

static struct block run(int n_threads, uint64_t seed)
{
    struct block b = {malloc(MAX_BLOCK_BYTES), 0};
    struct random_source r = {seed};
    struct compute on = {.n_threads = n_threads};
    struct shape s = {.T = 1 + random_below(&r, 24),
                      .C = 2 * (1 + random_below(&r, 40)),
                      .V = 2 + random_below(&r, 200),
                      .NH = 1 + random_below(&r, 4)};
    for (int t = 0; t < 3; t++)
        s.n_params[t] = t ? 1 + random_below(&r, 70000) : 1 + random_below(&r, 8);
    assert_non_null(b.at);
    memset(b.at, 0xff, MAX_BLOCK_BYTES);
    assert_int_equal(zr_host_device_open(&on.dev), 0);
    float *scratch = malloc((size_t)gpt2_layers_host.n_scratch(&on, B * s.T, s.C) * sizeof *scratch);
    assert_non_null(scratch);
    rows_and_elements(&on, &b, &r, &s, scratch);
    attention(&on, &b, &r, &s);
    tokens(&on, &b, &r, &s, scratch);
    optimizer(&on, &b, &r, &s);
    free(scratch);
    on.dev->ops->close(on.dev);
    return b;
}

static void test_same_bits(void **state)
{
    struct random_source r = random_open();
    for (int k = 0; k < 20; k++) {
        uint64_t seed = random_bits(&r);
        struct block one = run(1, seed);
        for (int n = 2; n <= MAX_THREADS; n += 1 + n / 3) {
            struct block more = run(n, seed);
            assert_int_equal(more.used, one.used);
            for (int64_t i = 0; i < one.used; i++)
                if (one.at[i] != more.at[i])
                    fail_msg("case %llu, %d threads: byte %lld of %lld", (unsigned long long)seed, n,
                             (long long)i, (long long)one.used);
            free(more.at);
        }
        free(one.at);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_same_bits)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
