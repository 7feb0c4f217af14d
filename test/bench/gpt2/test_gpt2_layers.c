/* SPDX-License-Identifier: Apache-2.0 */
/* test_gpt2_layers.c: tests each layer of the model that is no matrix product on a GPU, or the stand-in
 * for one, against the host's layer, which test_gpt2.c checks. Compiled once per dtype.
 *
 * Both get the same random input, and their outputs are poisoned first. */
#include "bench/model/layers.h"
#include "test/cmocka.h"
#include "test/kernels/random.h"

#include <math.h>

/* Relative to a result, and to the largest of its tensor: sums are added in another order. */
#ifdef MODEL_BF16
#define TOLERANCE  0x1p-7
#define OF_LARGEST 1e-4
#else
#define TOLERANCE  3e-5
#define OF_LARGEST 1e-5
#endif

static struct random_source rng;
static struct compute host, gpu;

/* The same memory on the host and on the device. */
struct both {
    void *host, *gpu;
    int64_t bytes;
};

#define MOST 64
static struct both held[MOST];
static int n_held;

static void move(const struct compute *on, void *dst, const void *src, int64_t bytes)
{
    assert_int_equal(on->dev->ops->copy(on->stream, dst, src, bytes), 0);
    assert_int_equal(on->dev->ops->stream_sync(on->stream), 0);
}

static struct both hold(int64_t bytes)
{
    struct both b = {NULL, NULL, bytes};
    assert_true(n_held < MOST);
    assert_int_equal(host.dev->ops->alloc(host.dev, bytes, &b.host), 0);
    assert_int_equal(gpu.dev->ops->alloc(gpu.dev, bytes, &b.gpu), 0);
    memset(b.host, 0xff, (size_t)bytes);
    move(&gpu, b.gpu, b.host, bytes);
    held[n_held++] = b;
    return b;
}

static void let_go(void)
{
    while (n_held) {
        struct both *b = &held[--n_held];
        host.dev->ops->free(host.dev, b->host, b->bytes);
        gpu.dev->ops->free(gpu.dev, b->gpu, b->bytes);
    }
}

static struct both poisoned(int64_t n)
{
    return hold(n * (int64_t)sizeof(real));
}

static struct both random_reals(int64_t n)
{
    struct both b = poisoned(n);
    for (int64_t i = 0; i < n; i++)
        ((real *)b.host)[i] = from_float(random_normal(&rng));
    move(&gpu, b.gpu, b.host, b.bytes);
    return b;
}

static struct both random_floats(int64_t n)
{
    struct both b = hold(n * (int64_t)sizeof(float));
    for (int64_t i = 0; i < n; i++)
        ((float *)b.host)[i] = random_normal(&rng);
    move(&gpu, b.gpu, b.host, b.bytes);
    return b;
}

static struct both ints(const int32_t *x, int64_t n)
{
    struct both b = hold(n * (int64_t)sizeof *x);
    memcpy(b.host, x, (size_t)b.bytes);
    move(&gpu, b.gpu, b.host, b.bytes);
    return b;
}

static void compare(const char *what, const double *want, const double *got, int64_t n, double tolerance,
                    double of_largest)
{
    double largest = 0;
    for (int64_t i = 0; i < n; i++)
        largest = isinf(want[i]) ? largest : fmax(largest, fabs(want[i]));
    for (int64_t i = 0; i < n; i++) {
        if (want[i] != got[i] &&
            !(fabs(want[i] - got[i]) <= tolerance * fabs(want[i]) + of_largest * largest)) {
            fail_msg("%s: [%lld] of %lld is %.9g, the host has %.9g", what, (long long)i, (long long)n,
                     got[i], want[i]);
        }
    }
}

/* Compares n elements in rows of ld, where the first `used` of a row count. */
static void same(const char *what, struct both b, size_t element, int64_t used, int64_t ld)
{
    int64_t n = b.bytes / (int64_t)element, k = 0;
    char *from_gpu = malloc((size_t)b.bytes);
    double *want = malloc((size_t)n * sizeof *want), *got = malloc((size_t)n * sizeof *got);
    move(&gpu, from_gpu, b.gpu, b.bytes);
    for (int64_t i = 0; i < n; i++) {
        if (i % ld >= used)
            continue;
        const void *x = (char *)b.host + i * (int64_t)element, *y = from_gpu + i * (int64_t)element;
        want[k] = element == 8              ? *(const double *)x
                  : element == sizeof(real) ? (double)to_float(*(const real *)x)
                                            : (double)*(const float *)x;
        got[k++] = element == 8              ? *(const double *)y
                   : element == sizeof(real) ? (double)to_float(*(const real *)y)
                                             : (double)*(const float *)y;
    }
    if (element == sizeof(real))
        compare(what, want, got, k, TOLERANCE, OF_LARGEST);
    else
        compare(what, want, got, k, 3e-5, 1e-5);
    free(from_gpu);
    free(want);
    free(got);
}

#define SAME(b)  same(#b, b, sizeof(real), 1, 1)
#define SAME4(b) same(#b, b, sizeof(float), 1, 1)
#define SAME8(b) same(#b, b, sizeof(double), 1, 1)

static const struct {
    int64_t N, C;
} sizes[] = {{1, 8}, {5, 22}, {70, 64}, {600, 40}, {129, 264}, {3, 1600}};
#define N_SIZES (sizeof sizes / sizeof *sizes)

static struct both scratch_for(int64_t N, int64_t C)
{
    int64_t a = model_layers_host.n_scratch(&host, N, C), b = model_layers_cuda.n_scratch(&gpu, N, C);
    return hold((a > b ? a : b) * (int64_t)sizeof(float));
}

static void test_layernorm(void **state)
{
    for (size_t i = 0; i < N_SIZES; i++) {
        int64_t N = sizes[i].N, C = sizes[i].C;
        struct both inp = random_reals(N * C), weight = random_reals(C), bias = random_reals(C);
        struct both out = poisoned(N * C), mean = hold(N * 4), rstd = hold(N * 4),
                    scratch = scratch_for(N, C);
        struct both dout = random_reals(N * C), dinp = random_reals(N * C);
        struct both dweight = random_reals(C), dbias = random_reals(C);
        const struct model_layers *h = &model_layers_host, *g = &model_layers_cuda;
        assert_int_equal(h->layernorm_forward(&host, out.host, mean.host, rstd.host, inp.host, weight.host,
                                              bias.host, scratch.host, N, C),
                         0);
        assert_int_equal(g->layernorm_forward(&gpu, out.gpu, mean.gpu, rstd.gpu, inp.gpu, weight.gpu,
                                              bias.gpu, scratch.gpu, N, C),
                         0);
        SAME(out);
        SAME4(mean);
        SAME4(rstd);
        assert_int_equal(h->layernorm_backward(&host, dinp.host, dweight.host, dbias.host, dout.host,
                                               inp.host, weight.host, mean.host, rstd.host, scratch.host, N,
                                               C),
                         0);
        assert_int_equal(g->layernorm_backward(&gpu, dinp.gpu, dweight.gpu, dbias.gpu, dout.gpu, inp.gpu,
                                               weight.gpu, mean.gpu, rstd.gpu, scratch.gpu, N, C),
                         0);
        SAME(dinp);
        SAME(dweight);
        SAME(dbias);
        let_go();
    }
}

static void test_elements(void **state)
{
    static const int64_t counts[] = {1, 7, 64, 1000, 4104};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        int64_t n = counts[i];
        const struct model_layers *h = &model_layers_host, *g = &model_layers_cuda;
        struct both inp = random_reals(n), gelu = poisoned(n), dout = random_reals(n), sum = random_reals(n);
        assert_int_equal(h->gelu_forward(&host, gelu.host, inp.host, n), 0);
        assert_int_equal(g->gelu_forward(&gpu, gelu.gpu, inp.gpu, n), 0);
        SAME(gelu);
        assert_int_equal(h->gelu_backward(&host, dout.host, inp.host, n), 0);
        assert_int_equal(g->gelu_backward(&gpu, dout.gpu, inp.gpu, n), 0);
        SAME(dout);
        assert_int_equal(h->add(&host, sum.host, inp.host, n), 0);
        assert_int_equal(g->add(&gpu, sum.gpu, inp.gpu, n), 0);
        SAME(sum);
        let_go();
    }
}

static void test_bias(void **state)
{
    for (size_t i = 0; i < N_SIZES; i++) {
        int64_t N = sizes[i].N, C = sizes[i].C;
        struct both dout = random_reals(N * C), dbias = random_reals(C), scratch = scratch_for(N, C);
        assert_int_equal(model_layers_host.bias_backward(&host, dbias.host, dout.host, scratch.host, N, C),
                         0);
        assert_int_equal(model_layers_cuda.bias_backward(&gpu, dbias.gpu, dout.gpu, scratch.gpu, N, C), 0);
        SAME(dbias);
        let_go();
    }
}

/* Random sizes of a tile: some of its queries are missing, and documents may begin in it. */
static struct model_tile random_tile(struct both *starts)
{
    struct model_tile t = {.first_head = random_below(&rng, 3),
                           .n_heads = 1 + random_below(&rng, 4),
                           .NH = 1 + random_below(&rng, 3),
                           .query = random_below(&rng, 100),
                           .n_queries = 1 + random_below(&rng, 40),
                           .n_keys = 1 + random_below(&rng, 150),
                           .scale = 0.7f};
    t.T = t.query + t.n_queries;
    t.key = random_below(&rng, t.T);
    t.queries = (struct model_rows){{t.query / 2, t.query + t.n_queries / 2}, {t.query / 4, t.n_queries}};
    int64_t n = ((t.first_head + t.n_heads) / t.NH + 1) * t.T;
    int32_t *start = malloc((size_t)n * sizeof *start);
    for (int64_t i = 0; i < n; i++)
        start[i] = i % t.T == 0 ? 0 : random_below(&rng, 20) == 0 ? (int32_t)(i % t.T) : start[i - 1];
    *starts = ints(start, n);
    free(start);
    return t;
}

/* Poisons the scores that no query sees, which must not be read. */
static void poison_unseen(struct both scores, struct model_tile t)
{
    for (int64_t j = 0; j < t.n_heads * t.n_queries * t.n_keys; j++) {
        int64_t row = j / t.n_keys, key = j % t.n_keys;
        struct model_seen seen = model_seen_keys(&t, t.first_head + row / t.n_queries, row % t.n_queries);
        if (key < seen.from || key >= seen.to)
            ((float *)scores.host)[j] = NAN;
    }
    move(&gpu, scores.gpu, scores.host, scores.bytes);
}

static void test_attention_softmax(void **state)
{
    for (int i = 0; i < 40; i++) {
        struct both starts;
        struct model_tile t = random_tile(&starts), on_gpu = t;
        if (i % 2) {
            t.document_start = starts.host;
            on_gpu.document_start = starts.gpu;
        }
        int64_t rows = t.n_heads * t.n_queries, n = rows * t.n_keys;
        int64_t given = (t.first_head + t.n_heads) * model_n_rows(&t.queries);
        struct both scores = random_floats(n), datt = random_floats(n), again = random_floats(n);
        struct both att = poisoned(n), ds = poisoned(n), logsum = hold(rows * 4);
        struct both logsums = random_floats(given), dots = random_floats(given);
        const struct model_layers *h = &model_layers_host, *g = &model_layers_cuda;
        poison_unseen(scores, t);
        poison_unseen(datt, t);
        poison_unseen(again, t);
        assert_int_equal(h->attention_softmax(&host, att.host, logsum.host, scores.host, t), 0);
        assert_int_equal(g->attention_softmax(&gpu, att.gpu, logsum.gpu, scores.gpu, on_gpu), 0);
        SAME(att);
        SAME4(logsum);
        assert_int_equal(h->attention_softmax_backward(&host, att.host, ds.host, again.host, datt.host,
                                                       logsums.host, dots.host, t),
                         0);
        assert_int_equal(g->attention_softmax_backward(&gpu, att.gpu, ds.gpu, again.gpu, datt.gpu,
                                                       logsums.gpu, dots.gpu, on_gpu),
                         0);
        SAME(att);
        SAME(ds);
        let_go();
    }
}

/* Rows of heads go to a tile and back, and results are merged. */
static void test_attention_rows(void **state)
{
    for (int i = 0; i < 40; i++) {
        int64_t B = 1 + random_below(&rng, 3), NH = 1 + random_below(&rng, 3),
                HS = 1 + random_below(&rng, 40);
        struct model_rows rows = {{random_below(&rng, 20), 30 + random_below(&rng, 20)},
                                  {random_below(&rng, 10), random_below(&rng, 10)}};
        int64_t all = model_n_rows(&rows), first = random_below(&rng, 30), n = 1 + random_below(&rng, 60);
        int64_t head = random_below(&rng, B * NH), n_heads = 1 + random_below(&rng, B * NH - head);
        struct model_heads heads = {head, n_heads, NH, HS, all * NH * HS, HS, NH * HS};
        struct both x = random_reals(B * all * NH * HS + 1), tile = poisoned(n_heads * n * HS);
        struct both sum = random_floats(n_heads * n * HS), out = random_reals(B * all * NH * HS + 1);
        struct both out32 = random_floats(B * all * NH * HS + 1), dots = random_floats(B * NH * all + 1);
        struct both logsum = random_floats(n_heads * all + 1), part32 = random_floats(B * all * NH * HS + 1);
        struct both logsum_part = random_floats(n_heads * all + 1);
        const struct model_layers *h = &model_layers_host, *g = &model_layers_cuda;
        assert_int_equal(h->attention_load(&host, tile.host, x.host, heads, rows, first, n), 0);
        assert_int_equal(g->attention_load(&gpu, tile.gpu, x.gpu, heads, rows, first, n), 0);
        SAME(tile);
        assert_int_equal(h->attention_store(&host, out.host, NULL, true, sum.host, heads, rows, first, n), 0);
        assert_int_equal(g->attention_store(&gpu, out.gpu, NULL, true, sum.gpu, heads, rows, first, n), 0);
        SAME(out);
        for (int adds = 0; adds < 2; adds++) {
            assert_int_equal(
                h->attention_store(&host, NULL, out32.host, adds, sum.host, heads, rows, first, n), 0);
            assert_int_equal(g->attention_store(&gpu, NULL, out32.gpu, adds, sum.gpu, heads, rows, first, n),
                             0);
            SAME4(out32);
        }
        if (all) {
            assert_int_equal(h->attention_dots(&host, dots.host, x.host, out.host, B, all, NH, HS), 0);
            assert_int_equal(g->attention_dots(&gpu, dots.gpu, x.gpu, out.gpu, B, all, NH, HS), 0);
            SAME4(dots);
            assert_int_equal(
                h->attention_merge(&host, out32.host, logsum.host, part32.host, logsum_part.host, heads, all),
                0);
            assert_int_equal(
                g->attention_merge(&gpu, out32.gpu, logsum.gpu, part32.gpu, logsum_part.gpu, heads, all), 0);
            SAME4(out32);
            SAME4(logsum);
        }
        let_go();
    }
}

static void test_loss(void **state)
{
    static const struct {
        int64_t N, V, ld;
    } shapes[] = {{4, 5, 64}, {9, 37, 37}, {300, 256, 256}, {2, 9001, 9024}, {2, 9001, 9001}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        int64_t N = shapes[i].N, V = shapes[i].V, ld = shapes[i].ld;
        int32_t *target = malloc((size_t)N * sizeof *target);
        for (int64_t row = 0; row < N; row++)
            target[row] = row % 4 == 3 ? MODEL_LEFT_OUT : (int32_t)random_below(&rng, V);
        struct both logits = random_floats(N * ld), dlogits = poisoned(N * ld), targets = ints(target, N);
        struct both loss = hold(N * 8), total = hold(8);
        const struct model_layers *h = &model_layers_host, *g = &model_layers_cuda;
        double zero = 0, sum;
        move(&host, total.host, &zero, 8);
        move(&gpu, total.gpu, &zero, 8);
        for (int again = 0; again < 2; again++) {
            struct both used = hold(logits.bytes); /* the call overwrites logits */
            move(&host, used.host, logits.host, logits.bytes);
            move(&gpu, used.gpu, logits.host, logits.bytes);
            struct model_label label = {again ? 0.1f / (float)V : 0, again ? 0.9f : 1};
            assert_int_equal(h->cross_entropy(&host, dlogits.host, loss.host, used.host, targets.host, N, V,
                                              ld, label, 0.01f),
                             0);
            assert_int_equal(
                g->cross_entropy(&gpu, dlogits.gpu, loss.gpu, used.gpu, targets.gpu, N, V, ld, label, 0.01f),
                0);
            same("dlogits", dlogits, sizeof(real), V, ld);
            SAME8(loss);
            assert_int_equal(h->add_loss(&host, total.host, loss.host, N), 0);
            assert_int_equal(g->add_loss(&gpu, total.gpu, loss.gpu, N), 0);
            SAME8(total);
        }
        move(&gpu, &sum, total.gpu, 8);
        assert_true(sum == ldexp(rint(ldexp(sum, 36)), -36)); /* a multiple of its unit */
        free(target);
        let_go();
    }
}

/* Groups N rows by number, below V, on both devices. */
static void group_rows(struct model_groups groups[2], const int32_t *number, int64_t N, int64_t V)
{
    int32_t *order = malloc((size_t)N * 4), *distinct = malloc((size_t)N * 4);
    int32_t *first = malloc((size_t)(N + 1) * 4), n = 0, at = 0;
    for (int32_t v = 0; v < V; v++) {
        first[n] = at;
        for (int32_t row = 0; row < N; row++)
            if (number[row] == v)
                order[at++] = row;
        if (at > first[n])
            distinct[n++] = v;
    }
    first[n] = at;
    struct both rows = ints(order, N), which = ints(distinct, N), starts = ints(first, N + 1);
    groups[0] = (struct model_groups){rows.host, which.host, starts.host, n};
    groups[1] = (struct model_groups){rows.gpu, which.gpu, starts.gpu, n};
    free(order);
    free(distinct);
    free(first);
}

static void test_embedding(void **state)
{
    static const struct {
        int64_t B, T, C, V;
    } shapes[] = {{1, 1, 8, 5}, {3, 9, 22, 37}, {4, 50, 64, 3}, {2, 300, 40, 1000}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        int64_t B = shapes[i].B, T = shapes[i].T, C = shapes[i].C, V = shapes[i].V, BT = B * T;
        int32_t *token = malloc((size_t)BT * 4), *position = malloc((size_t)BT * 4);
        struct model_groups by_token[2], by_position[2];
        for (int64_t row = 0; row < BT; row++) {
            token[row] = (int32_t)random_below(&rng, V);
            position[row] = (int32_t)random_below(&rng, T);
        }
        group_rows(by_token, token, BT, V);
        group_rows(by_position, position, BT, T);
        struct both tokens = ints(token, BT), positions = ints(position, BT), scratch = scratch_for(BT, C);
        struct both wte = random_reals(V * C), wpe = random_reals(T * C), out = poisoned(BT * C);
        struct both dout = random_reals(BT * C), dwte = random_reals(V * C), dwpe = random_reals(T * C);
        const struct model_layers *h = &model_layers_host, *g = &model_layers_cuda;
        assert_int_equal(
            h->embedding_forward(&host, out.host, tokens.host, positions.host, wte.host, wpe.host, BT, C), 0);
        assert_int_equal(
            g->embedding_forward(&gpu, out.gpu, tokens.gpu, positions.gpu, wte.gpu, wpe.gpu, BT, C), 0);
        SAME(out);
        assert_int_equal(h->tokens_backward(&host, dwte.host, dout.host, &by_token[0], scratch.host, C), 0);
        assert_int_equal(g->tokens_backward(&gpu, dwte.gpu, dout.gpu, &by_token[1], scratch.gpu, C), 0);
        SAME(dwte);
        assert_int_equal(h->positions_backward(&host, dwpe.host, dout.host, &by_position[0], scratch.host, C),
                         0);
        assert_int_equal(g->positions_backward(&gpu, dwpe.gpu, dout.gpu, &by_position[1], scratch.gpu, C), 0);
        SAME(dwpe);
        free(token);
        free(position);
        let_go();
    }
}

int main(void)
{
    rng = random_open();
    if (compute_open(&gpu, true, 0, 1)) {
        printf("%s\n", zr_error_text());
        return 77; /* skipped */
    }
    /* Does not use compute_open: the host's matrix products are not needed, and may be missing. */
    assert_int_equal(zr_host_device_open(&host.dev), 0);
    host.n_threads = 3;
    assert_int_equal(host.dev->ops->stream_open(host.dev, ZR_STREAM_CALLER, "model", NULL, &host.stream), 0);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layernorm),      cmocka_unit_test(test_elements),
        cmocka_unit_test(test_bias),           cmocka_unit_test(test_attention_softmax),
        cmocka_unit_test(test_attention_rows), cmocka_unit_test(test_loss),
        cmocka_unit_test(test_embedding),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    compute_close(&gpu);
    compute_close(&host);
    return failed;
}
