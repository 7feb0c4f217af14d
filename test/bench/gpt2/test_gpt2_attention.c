/* SPDX-License-Identifier: Apache-2.0 */
/* test_gpt2_attention.c: tests attention on the host, on a GPU or on the stand-in for one, against a
 * reference in double precision on the same rounded inputs. Queries are those of a whole sequence or of a
 * context-parallel rank. Keys come at once or in parts. Compiled once per dtype. All outputs are poisoned
 * first. */
#include "bench/model/layers.h"
#include "test/bench/gpt2/attention_reference.h"
#include "test/bench/gpt2/device_arrays.h"

/* Relative to a row's norm and to the mean row's norm: in bf16, weights are rounded before they are
 * multiplied. */
#ifdef MODEL_BF16
#define TOLERANCE 0x1p-6
#else
#define TOLERANCE 4e-6
#endif

/* The stand-in for a GPU is slow. There some tests have fewer ranks or repetitions of each shape. */
#ifdef MODEL_TEST_STAND_IN
#define STAND_IN true
#else
#define STAND_IN false
#endif

struct shape {
    int64_t B, T, NH, HS;
    float spread;      /* of the scores: a large spread leaves a single weight above 0 */
    int64_t documents; /* mean length; 0: one document */
    int64_t n_kv;      /* heads of keys; 0: as many as heads of queries */
};

/* Inputs, and the expected results. */
struct problem {
    struct shape s;
    int64_t C, row;              /* channels of q and y; elements of a row of qkv */
    struct array qkv, dy, start; /* (B, T, row), (B, T, C), (B, T) */
    struct attention_reference want;
};

static int64_t n_heads(const struct problem *p, int what)
{
    return what == Q ? p->s.NH : p->s.n_kv;
}

static int64_t width(const struct problem *p, int what)
{
    return n_heads(p, what) * p->s.HS;
}

/* The first column of q, k or v in a row of qkv. */
static int64_t column(const struct problem *p, int what)
{
    return what == Q ? 0 : p->C + (what - K) * width(p, K);
}

static int64_t first_key(const struct problem *p, int64_t b, int64_t t)
{
    return p->s.documents ? ((int32_t *)p->start.at)[b * p->s.T + t] : 0;
}

/* Documents of random lengths, some of one token. */
static void draw_documents(struct problem *p)
{
    int32_t *start = p->start.at;
    for (int64_t i = 0; i < p->s.B * p->s.T; i++)
        start[i] = i % p->s.T == 0                                             ? 0
                   : p->s.documents && random_below(&rng, p->s.documents) == 0 ? (int32_t)(i % p->s.T)
                                                                               : start[i - 1];
    send(&p->start);
}

static struct problem draw(struct shape s)
{
    s.n_kv = s.n_kv ? s.n_kv : s.NH;
    int64_t C = s.NH * s.HS, BT = s.B * s.T, row = C + 2 * s.n_kv * s.HS;
    struct problem p = {.s = s, .C = C, .row = row};
    p.qkv = reals(BT * row);
    p.dy = reals(BT * C);
    p.start = hold(BT * 4);
    for (int64_t i = 0; i < BT * row; i++)
        ((real *)p.qkv.at)[i] = from_float(random_normal(&rng) * (i % row < column(&p, V) ? s.spread : 1.0f));
    for (int64_t i = 0; i < BT * C; i++)
        ((real *)p.dy.at)[i] = from_float(random_normal(&rng));
    send(&p.qkv);
    send(&p.dy);
    draw_documents(&p);
    return p;
}

static void solve(struct problem *p)
{
    p->want = (struct attention_reference){.B = p->s.B,
                                           .T = p->s.T,
                                           .NH = p->s.NH,
                                           .n_kv = p->s.n_kv,
                                           .HS = p->s.HS,
                                           .qkv = p->qkv.at,
                                           .dy = p->dy.at,
                                           .first = p->s.documents ? p->start.at : NULL};
    reference_open(&p->want);
}

static void close_problem(struct problem *p)
{
    reference_close(&p->want);
    let_go(0);
}

/* ---- calls ---- */

static struct model_rows all_rows(int64_t T)
{
    return (struct model_rows){.n = {T}};
}

/* The rows of rank c of cp: a chunk, or two of them so that all ranks have as much work. */
static struct model_rows rows_of_rank(int64_t T, int64_t cp, int64_t c, bool zigzag)
{
    int64_t n = zigzag ? 2 * cp : cp, other = 2 * cp - 1 - c;
    struct model_rows r = {{c * T / n, 0}, {(c + 1) * T / n - c * T / n, 0}};
    if (zigzag) {
        r.first[1] = other * T / n;
        r.n[1] = (other + 1) * T / n - r.first[1];
    }
    return r;
}

static int64_t position_of(const struct model_rows *r, int64_t row)
{
    return row < r->n[0] ? r->first[0] + row : r->first[1] + row - r->n[0];
}

/* Copies width elements of these rows of x (B, T, row), from column `from` on, to a new array (B, rows,
 * stride). */
static struct array take(const struct problem *p, const real *x, int64_t row, int64_t from,
                         struct model_rows rows, int64_t width, int64_t stride)
{
    int64_t n = model_n_rows(&rows);
    struct array a = reals(p->s.B * n * stride);
    for (int64_t i = 0; i < p->s.B * n; i++)
        memcpy((real *)a.at + i * stride, x + (i / n * p->s.T + position_of(&rows, i % n)) * row + from,
               (size_t)width * sizeof *x);
    if (a.bytes)
        send(&a);
    return a;
}

/* One call of forward and one of backward, and their results. */
struct call {
    struct model_attention_args args;
    struct array y, y32, logsum, dots, grads[N_OF_QKV], grads32[N_OF_QKV];
};

static struct call open_call(const struct problem *p, struct model_rows queries, struct model_rows keys)
{
    int64_t C = p->C, of_keys = width(p, K);
    struct array q = take(p, p->qkv.at, p->row, 0, queries, C, C + 16);
    struct array kv = take(p, p->qkv.at, p->row, C, keys, 2 * of_keys, 2 * of_keys);
    struct call c = {.args = {.B = p->s.B,
                              .T = p->s.T,
                              .NH = p->s.NH,
                              .HS = p->s.HS,
                              .n_kv = p->s.n_kv,
                              .queries = queries,
                              .keys = keys,
                              .q = q.there,
                              .k = kv.there,
                              .v = (real *)kv.there + of_keys,
                              .q_row = C + 16,
                              .kv_row = 2 * of_keys,
                              .document_start = p->s.documents ? p->start.there : NULL}};
    c.args.scratch = floats(model_attention_scratch(&on, &c.args)).there;
    c.logsum = floats(p->s.B * p->s.NH * model_n_rows(&queries));
    return c;
}

/* As the model calls it: q, k and v lie in one array. */
static struct call open_whole(const struct problem *p)
{
    const struct model_rows all = all_rows(p->s.T);
    struct call c = open_call(p, all, all);
    c.args.q = p->qkv.there;
    c.args.k = c.args.q + column(p, K);
    c.args.v = c.args.q + column(p, V);
    c.args.q_row = c.args.kv_row = p->row;
    return c;
}

static int64_t n_elements(const struct call *c, int what)
{
    const struct model_attention_args *a = &c->args;
    return a->B * model_n_rows(what == Q ? &a->queries : &a->keys) * (what == Q ? a->NH : a->n_kv) * a->HS;
}

static void forward(struct call *c, bool in_fp32)
{
    c->y = reals(n_elements(c, Q));
    if (in_fp32)
        c->y32 = floats(n_elements(c, Q));
    assert_int_equal(model_attention_forward(&on, &c->args, c->y.there, c->y32.there, c->logsum.there), 0);
    fetch(&c->y);
    fetch(&c->logsum);
    if (in_fp32)
        fetch(&c->y32);
}

/* dy has the rows of the queries. If sums are given, gradients are added to these. */
static void backward(struct call *c, const struct array *dy, const struct array sums[N_OF_QKV])
{
    struct model_attention_grads g = {.dq_row = c->args.q_row, .dkv_row = c->args.kv_row};
    c->dots = floats(c->args.B * c->args.NH * model_n_rows(&c->args.queries));
    for (int i = 0; i < N_OF_QKV && !sums; i++)
        c->grads[i] = reals(c->args.B * (i == Q ? model_n_rows(&c->args.queries) * g.dq_row
                                                : model_n_rows(&c->args.keys) * g.dkv_row));
    g.dq = c->grads[Q].there;
    g.dk = c->grads[K].there;
    g.dv = c->grads[V].there;
    if (sums) {
        g.dq32 = sums[Q].there;
        g.dk32 = sums[K].there;
        g.dv32 = sums[V].there;
    }
    assert_int_equal(
        model_attention_backward(&on, &c->args, dy->there, c->y.there, c->logsum.there, c->dots.there, &g),
        0);
    for (int i = 0; i < N_OF_QKV; i++)
        fetch(sums ? &sums[i] : &c->grads[i]);
}

/* ---- comparisons ---- */

/* Compares the heads of these rows, `stride` elements between rows, with want (B, T, heads, HS). y has the
 * heads of Q. */
static void compare(const struct problem *p, const char *what, int of, const double *want, const real *got,
                    const float *got32, struct model_rows rows, int64_t stride, double tolerance)
{
    int64_t HS = p->s.HS, NH = n_heads(p, of), n = model_n_rows(&rows), all = p->s.B * p->s.T * NH * HS;
    double square = 0;
    for (int64_t i = 0; i < all; i++)
        square += want[i] * want[i] / (double)(all / HS);
    for (int64_t v = 0; v < p->s.B * n * NH; v++) {
        int64_t row = v / NH, h = v % NH, t = position_of(&rows, row % n);
        double error = 0, size = 0;
        for (int64_t i = 0; i < HS; i++) {
            int64_t at = row * stride + h * HS + i;
            double x = want[((row / n * p->s.T + t) * NH + h) * HS + i];
            double d = (got32 ? (double)got32[at] : (double)to_float(got[at])) - x;
            error += d * d;
            size += x * x;
        }
        /* Where a query sees one key, dq is a difference of two equal sums of HS terms of order 1. Rounding
         * their additions leaves some of it, so rows near 0 have the tolerance of a row of length 1. */
        if (!(sqrt(error) <= tolerance * (sqrt(size) + sqrt(square) + 1)))
            fail_msg(
                "B %lld, T %lld, NH %lld, n_kv %lld, HS %lld: %s: row %lld, position %lld, head %lld is off "
                "by %g, its length is %g",
                (long long)p->s.B, (long long)p->s.T, (long long)p->s.NH, (long long)p->s.n_kv, (long long)HS,
                what, (long long)row, (long long)t, (long long)h, sqrt(error), sqrt(size));
    }
}

static void compare_logsum(const struct problem *p, const struct array *a, struct model_rows rows)
{
    int64_t n = model_n_rows(&rows);
    for (int64_t i = 0; i < p->s.B * p->s.NH * n; i++) {
        double got = (double)((float *)a->at)[i],
               want = p->want.logsum[i / n * p->s.T + position_of(&rows, i % n)];
        /* scores are sums of terms of both signs, of the order spread^2 */
        if (!(fabs(got - want) <= 1e-5 * (1 + (double)(p->s.spread * p->s.spread) + fabs(want))))
            fail_msg("T %lld: logsum %lld is %g, should be %g", (long long)p->s.T, (long long)i, got, want);
    }
}

/* A score is a sum of the order spread^2. Rounding it changes a weight by as much, relatively. In bf16,
 * rounding the weight itself changes it more. */
static double y_tolerance(const struct problem *p)
{
    double spread = (double)p->s.spread;
    return TOLERANCE * (sizeof(real) == 4 ? 1 + spread * spread / 4 : 1);
}

/* Keys and queries increase the effect that rounding y and the weights has on their gradients. Rounding
 * scores changes gradients less than y. */
static double grad_tolerance(const struct problem *p)
{
    double spread = (double)p->s.spread;
    return 4 * TOLERANCE * spread * (sizeof(real) == 4 ? 1 + spread * spread / 30 : 1);
}

static void compare_grads(const struct problem *p, const struct call *c, struct model_rows queries,
                          struct model_rows keys)
{
    for (int i = 0; i < N_OF_QKV; i++)
        compare(p,
                i == Q   ? "dq"
                : i == K ? "dk"
                         : "dv",
                i, p->want.grads[i], c->grads[i].at, NULL, i == Q ? queries : keys,
                i == Q ? c->args.q_row : c->args.kv_row, grad_tolerance(p));
}

/* ---- tests ---- */

/* Tiles are 128 tokens, and those of products on a GPU 256. The kernel fetches 64 or 32 of the other side at
 * once, and multiplies 32 or 16. For heads of more than 64 channels its tiles are 64 tokens, and it fetches
 * 32 or 16. The shapes have less than each of these, whole ones, and partial ones. The kernel works on 1024
 * tiles at once; one shape has more. Products take at most 1024 keys. */
#define MANY_TILES                                                                                           \
    {                                                                                                        \
        STAND_IN ? 114 : 57, STAND_IN ? 9 : 129, 9, 16, 1, STAND_IN ? 4 : 40                                 \
    }
static const struct shape shapes[] = {
    {2, 1, 1, 16, 1, 0},       {1, 2, 3, 32, 1, 0},
    {2, 15, 2, 64, 1, 4},      {1, 63, 2, 16, 1, 0},
    {2, 64, 1, 32, 1, 9},      {1, 65, 2, 64, 1, 0},
    {1, 130, 2, 16, 1, 0},     {1, 150, 1, 32, 1, 40},
    {1, 193, 1, 64, 1, 0},     {1, 257, 2, 64, 1, 0},
    {1, 384, 1, 32, 1, 0},     {1, 300, 1, 64, 1, 70},
    {1, 80, 2, 64, 4, 0},      MANY_TILES,
    {1, 96, 1, 16, 30, 0},     {3, 70, 2, 11, 1, 0},
    {2, 200, 3, 24, 1, 50},    {1, 1100, 1, 16, 1, 0},
    {2, 1300, 1, 16, 1, 300},  {1, 2, 2, 128, 1, 0, 1},
    {1, 193, 2, 80, 1, 0},     {1, 130, 1, 96, 1, 30},
    {1, 193, 1, 128, 1, 0},    {1, 80, 1, 128, 4, 0},
    {2, 70, 6, 16, 1, 0, 2},   {1, 257, 4, 64, 1, 0, 1},
    {2, 70, 4, 128, 1, 40, 2}, {1, 100, 4, 80, 1, 0, 2},
    {1, 70, 6, 96, 1, 0, 2},   {2, 200, 4, 24, 1, 50, 2},
    {1, 1100, 2, 16, 1, 0, 1},
};
#define N_SHAPES (sizeof shapes / sizeof *shapes)

static void test_against_reference(void **state)
{
    for (size_t i = 0; i < N_SHAPES; i++) {
        struct problem p = draw(shapes[i]);
        solve(&p);
        struct call c = open_whole(&p);
        const struct model_rows all = all_rows(p.s.T);
        forward(&c, false);
        compare(&p, "y", Q, p.want.y, c.y.at, NULL, all, p.C, y_tolerance(&p));
        compare_logsum(&p, &c.logsum, all);
        backward(&c, &p.dy, NULL);
        compare_grads(&p, &c, all, all);
        close_problem(&p);
    }
}

/* Compares the bits of some rows of y and logsum with those of the whole sequence. */
static void same_rows(const struct problem *p, const struct call *whole, const struct call *part,
                      struct model_rows rows, const char *what)
{
    int64_t n = model_n_rows(&rows), T = p->s.T, C = p->C;
    for (int64_t i = 0; i < p->s.B * n; i++) {
        int64_t t = position_of(&rows, i % n);
        if (memcmp((real *)part->y.at + i * C, (real *)whole->y.at + (i / n * T + t) * C,
                   (size_t)C * sizeof(real)))
            fail_msg("T %lld, HS %lld, %s: y at position %lld has other bits", (long long)T,
                     (long long)p->s.HS, what, (long long)t);
    }
    for (int64_t i = 0; i < p->s.B * p->s.NH * n; i++)
        assert_memory_equal((float *)part->logsum.at + i,
                            (float *)whole->logsum.at + i / n * T + position_of(&rows, i % n), sizeof(float));
}

static struct model_rows random_rows(int64_t T)
{
    struct model_rows r;
    r.first[0] = random_below(&rng, T);
    r.n[0] = 1 + random_below(&rng, T - r.first[0]);
    int64_t end = r.first[0] + r.n[0];
    r.first[1] = end < T ? end + random_below(&rng, T - end) : T;
    r.n[1] = end < T ? random_below(&rng, T - r.first[1] + 1) : 0;
    return r;
}

/* Queries of any rows against all keys: forward has the bits of the whole sequence. */
static void test_slices(void **state)
{
    static const struct shape cut[] = {{2, 96, 2, 16, 1, 0},     {1, 256, 3, 32, 1, 0},
                                       {1, 300, 1, 64, 1, 60},   {2, 417, 2, 24, 1, 0},
                                       {1, 1200, 1, 16, 1, 500}, {1, 100, 2, 128, 1, 40, 1}};
    static const int64_t cps[] = {2, 3, 4, 8};
    for (size_t i = 0; i < sizeof cut / sizeof *cut; i++) {
        struct problem p = draw(cut[i]);
        struct call whole = open_whole(&p);
        const struct model_rows all = all_rows(p.s.T);
        forward(&whole, false);
        int n = n_held;
        for (int64_t k = 0; k < 4 * 2 * 8 + 20; k++, let_go(n)) {
            int64_t cp = cps[k % 4], rank = k / 8;
            bool chosen = k < 64 ? rank == (k % 8 + (int64_t)i) % cp : k < 68;
            if ((k < 64 && rank >= cp) || (STAND_IN && !chosen))
                continue;
            struct model_rows rows = k < 64 ? rows_of_rank(p.s.T, cp, rank, k / 4 % 2) : random_rows(p.s.T);
            struct call part = open_call(&p, rows, all);
            forward(&part, false);
            same_rows(&p, &whole, &part, rows, k < 64 ? "rows of a rank" : "random rows");
        }
        close_problem(&p);
    }
}

/* Adds to arrays that hold 1, and takes it away again. */
static void open_sums(const struct call *c, struct array sums[N_OF_QKV])
{
    for (int i = 0; i < N_OF_QKV; i++) {
        sums[i] = floats(n_elements(c, i));
        for (int64_t j = 0; j < n_elements(c, i); j++)
            ((float *)sums[i].at)[j] = 1;
        send(&sums[i]);
    }
}

static void subtract_one(const struct array *a)
{
    for (int64_t j = 0; j < a->bytes / 4; j++)
        ((float *)a->at)[j] -= 1;
}

/* The gather form: each rank's queries, in turn, against all keys. The gradients of keys are added in
 * fp32. */
static void test_gathered(void **state)
{
    static const struct shape cut[] = {{2, 96, 2, 16, 1, 0},
                                       {1, 300, 1, 64, 1, 60},
                                       {1, 140, 2, 24, 1, 20},
                                       {1, 140, 4, 128, 1, 50, 2},
                                       {1, 140, 6, 24, 1, 20, 2}};
    for (size_t i = 0; i < sizeof cut / sizeof *cut; i++)
        for (int64_t cp = 2; cp <= 3; cp++) {
            if (STAND_IN && cp != 2 + (int64_t)i % 2)
                continue;
            struct problem p = draw(cut[i]);
            const struct model_rows all = all_rows(p.s.T);
            struct array sums[N_OF_QKV];
            solve(&p);
            struct call whole = open_whole(&p);
            open_sums(&whole, sums);
            for (int64_t rank = 0; rank < cp; rank++) {
                struct model_rows rows = rows_of_rank(p.s.T, cp, rank, cp == 3);
                struct call c = open_call(&p, rows, all);
                struct array dy = take(&p, p.dy.at, p.C, 0, rows, p.C, p.C), of_rank[N_OF_QKV];
                open_sums(&c, of_rank);
                of_rank[K] = sums[K];
                of_rank[V] = sums[V];
                forward(&c, false);
                compare(&p, "y", Q, p.want.y, c.y.at, NULL, rows, p.C, y_tolerance(&p));
                backward(&c, &dy, of_rank);
                subtract_one(&of_rank[Q]);
                compare(&p, "dq", Q, p.want.grads[Q], NULL, of_rank[Q].at, rows, p.C, grad_tolerance(&p));
            }
            for (int k = K; k <= V; k++) {
                subtract_one(&sums[k]);
                compare(&p, k == K ? "dk" : "dv", k, p.want.grads[k], NULL, sums[k].at, all, width(&p, k),
                        grad_tolerance(&p));
            }
            close_problem(&p);
        }
}

/* The rows of a query that sees none of the call's keys are 0 and -infinity. */
static void check_unseen(const struct problem *p, const struct call *c)
{
    const struct model_rows *queries = &c->args.queries, *keys = &c->args.keys;
    int64_t n = model_n_rows(queries);
    for (int64_t i = 0; i < p->s.B * p->s.NH * n; i++) {
        int64_t b = i / n / p->s.NH, h = i / n % p->s.NH, t = position_of(queries, i % n);
        bool sees = false;
        for (int64_t k = 0; k < model_n_rows(keys); k++)
            sees |= position_of(keys, k) <= t && position_of(keys, k) >= first_key(p, b, t);
        assert_int_equal(((float *)c->logsum.at)[i] > -INFINITY, sees);
        for (int64_t j = 0; j < p->s.HS && !sees; j++)
            assert_true(((float *)c->y32.at)[(b * n + i % n) * p->C + h * p->s.HS + j] == 0);
    }
}

/* Forward of one rank's queries, whose keys come in parts, in any order. The result is in sum. */
static void merge_parts(const struct problem *p, struct call *sum, struct model_rows queries, int64_t cp,
                        const int64_t order[], bool zigzag)
{
    int64_t n = model_n_rows(&queries);
    for (int64_t i = 0; i < cp; i++) {
        struct call c = open_call(p, queries, rows_of_rank(p->s.T, cp, order[i], zigzag));
        forward(&c, true);
        check_unseen(p, &c);
        if (i == 0)
            *sum = c;
        else
            assert_int_equal(model_attention_merge(&on, sum->y32.there, sum->logsum.there, c.y32.there,
                                                   c.logsum.there, p->s.B, n, p->s.NH, p->s.HS),
                             0);
    }
    fetch(&sum->y32);
    fetch(&sum->logsum);
    for (int64_t i = 0; i < n_elements(sum, Q); i++)
        ((real *)sum->y.at)[i] = from_float(((float *)sum->y32.at)[i]);
    send(&sum->y);
}

static void shuffle(int64_t order[], int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        order[i] = i;
    for (int64_t i = n; i-- > 1;) {
        int64_t k = random_below(&rng, i + 1), x = order[i];
        order[i] = order[k];
        order[k] = x;
    }
}

static void run_ring(struct problem *p, int64_t cp, bool zigzag)
{
    struct array sums[8][N_OF_QKV];
    int64_t order[8];
    for (int64_t r = 0; r < cp; r++) {
        struct model_rows own = rows_of_rank(p->s.T, cp, r, zigzag);
        struct call c = open_call(p, own, own);
        open_sums(&c, sums[r]);
    }
    for (int64_t rank = 0; rank < cp; rank++) {
        struct model_rows rows = rows_of_rank(p->s.T, cp, rank, zigzag);
        struct array dy = take(p, p->dy.at, p->C, 0, rows, p->C, p->C);
        struct call sum;
        shuffle(order, cp);
        merge_parts(p, &sum, rows, cp, order, zigzag);
        compare(p, "merged y", Q, p->want.y, NULL, sum.y32.at, rows, p->C, y_tolerance(p));
        compare_logsum(p, &sum.logsum, rows);
        for (int64_t i = 0; i < cp; i++) {
            struct array to[] = {sums[rank][Q], sums[order[i]][K], sums[order[i]][V]};
            struct call c = open_call(p, rows, rows_of_rank(p->s.T, cp, order[i], zigzag));
            c.y = sum.y;
            c.logsum = sum.logsum;
            backward(&c, &dy, to);
        }
    }
    for (int64_t r = 0; r < cp; r++)
        for (int i = 0; i < N_OF_QKV; i++) {
            subtract_one(&sums[r][i]);
            compare(p,
                    i == Q   ? "dq of a ring"
                    : i == K ? "dk of a ring"
                             : "dv of a ring",
                    i, p->want.grads[i], NULL, sums[r][i].at, rows_of_rank(p->s.T, cp, r, zigzag),
                    width(p, i), grad_tolerance(p));
        }
}

static void test_ring(void **state)
{
    static const struct shape cut[] = {{2, 96, 2, 16, 1, 0},
                                       {1, 300, 1, 64, 1, 60},
                                       {1, 144, 2, 24, 1, 10},
                                       {1, 90, 4, 96, 1, 40, 2},
                                       {2, 100, 6, 24, 1, 30, 3}};
    for (size_t i = 0; i < sizeof cut / sizeof *cut; i++)
        for (int64_t cp = 2; cp <= 4; cp++) {
            if (STAND_IN && cp != 2 + (int64_t)i % 3)
                continue;
            struct problem p = draw(cut[i]);
            solve(&p);
            run_ring(&p, cp, (cp + (int64_t)i) % 2);
            close_problem(&p);
        }
}

/* A result that no key reaches, merged with another, in both orders. */
static void test_merge_of_nothing(void **state)
{
    static const float values[][2] = {
        {1, 2}, {-INFINITY, 2}, {1, -INFINITY}, {-INFINITY, -INFINITY}, {-90, 90}};
    enum { N = 5, HS = 3 };
    struct array y = floats(N * HS), part = floats(N * HS), logsum = floats(N), logsum_part = floats(N);
    for (int i = 0; i < N; i++) {
        float a = ((float *)logsum.at)[i] = values[i][0], b = ((float *)logsum_part.at)[i] = values[i][1];
        for (int j = 0; j < HS; j++) {
            ((float *)y.at)[i * HS + j] = a > -INFINITY ? 5 : 0;
            ((float *)part.at)[i * HS + j] = b > -INFINITY ? 7 : 0;
        }
    }
    send(&y), send(&part), send(&logsum), send(&logsum_part);
    assert_int_equal(
        model_attention_merge(&on, y.there, logsum.there, part.there, logsum_part.there, 1, N, 1, HS), 0);
    fetch(&y), fetch(&logsum);
    double both = log(exp(1.0) + exp(2.0)), share = exp(2.0 - both);
    const double want[N] = {5 + 2 * share, 7, 5, 0, 7}, sums[N] = {both, 2, 1, -INFINITY, 90};
    for (int i = 0; i < N * HS; i++) {
        double l = (double)((float *)logsum.at)[i / HS];
        assert_true(fabs((double)((float *)y.at)[i] - want[i / HS]) < 1e-5);
        assert_true(l == sums[i / HS] || fabs(l - sums[i / HS]) < 1e-5);
    }
    let_go(0);
}

/* Results of rows of other documents than that of (b, t) have the same bits as before. They are what of q, k
 * or v, with `stride` elements between rows. */
static void same_elsewhere(const struct problem *p, int of, const struct array *before,
                           const struct array *after, int64_t stride, int64_t b, int64_t t)
{
    for (int64_t i = 0; i < p->s.B * p->s.T; i++) {
        bool own = i / p->s.T == b && first_key(p, b, i % p->s.T) == first_key(p, b, t);
        if (!own && memcmp((real *)before->at + i * stride, (real *)after->at + i * stride,
                           (size_t)width(p, of) * sizeof(real)))
            fail_msg("a change at (%lld, %lld) reaches another document's row %lld", (long long)b,
                     (long long)t, (long long)i);
    }
}

/* A token that changes in one document changes no result of another. */
static void test_documents(void **state)
{
    static const struct shape cut[] = {
        {2, 96, 2, 16, 1, 9}, {1, 300, 2, 64, 1, 60}, {2, 1200, 1, 24, 1, 200}, {2, 70, 4, 128, 1, 20, 2}};
    for (size_t i = 0; i < sizeof cut / sizeof *cut; i++)
        for (int k = 0; k < (STAND_IN ? 1 : 4); k++) {
            struct problem p = draw(cut[i]);
            struct call before = open_whole(&p), after = open_whole(&p);
            forward(&before, false);
            backward(&before, &p.dy, NULL);
            int64_t b = random_below(&rng, p.s.B), t = random_below(&rng, p.s.T), at = b * p.s.T + t;
            for (int64_t j = 0; j < p.row; j++)
                ((real *)p.qkv.at)[at * p.row + j] = from_float(random_normal(&rng) * 3);
            for (int64_t j = 0; j < p.C; j++)
                ((real *)p.dy.at)[at * p.C + j] = from_float(random_normal(&rng) * 3);
            send(&p.qkv);
            send(&p.dy);
            forward(&after, false);
            backward(&after, &p.dy, NULL);
            same_elsewhere(&p, Q, &before.y, &after.y, p.C, b, t);
            for (int what = 0; what < N_OF_QKV; what++)
                same_elsewhere(&p, what, &before.grads[what], &after.grads[what], p.row, b, t);
            close_problem(&p);
        }
}

static void test_same_bits(void **state)
{
    struct problem p = draw((struct shape){1, 100, 4, 32, 1, 0, 2});
    struct call c = open_whole(&p), again = open_whole(&p);
    forward(&c, false);
    backward(&c, &p.dy, NULL);
    forward(&again, false);
    backward(&again, &p.dy, NULL);
    assert_memory_equal(c.y.at, again.y.at, (size_t)c.y.bytes);
    for (int i = 0; i < N_OF_QKV; i++)
        for (int64_t row = 0; row < p.s.T; row++)
            assert_memory_equal((real *)c.grads[i].at + row * p.row, (real *)again.grads[i].at + row * p.row,
                                (size_t)width(&p, i) * sizeof(real));
    close_problem(&p);
}

/* A NaN in a query makes its own row NaN, and no other. Of the gradients, it affects its own and those of
 * the values it sees. */
static void test_nan(void **state)
{
    int64_t HS = 16, T = 70, bad = 66;
    struct problem p = draw((struct shape){1, T, 1, HS, 1, 0});
    for (int64_t i = 0; i < HS; i++)
        ((real *)p.qkv.at)[bad * 3 * HS + i] = from_float(NAN);
    send(&p.qkv);
    struct call c = open_whole(&p);
    forward(&c, false);
    backward(&c, &p.dy, NULL);
    for (int64_t i = 0; i < T * HS; i++) {
        float y = to_float(((real *)c.y.at)[i]);
        assert_int_equal(y != y, i / HS == bad);
        for (int what = Q; what <= V; what += 2) {
            float d = to_float(((real *)c.grads[what].at)[i / HS * 3 * HS + i % HS]);
            assert_int_equal(d != d, what == Q ? i / HS == bad : i / HS <= bad);
        }
    }
    close_problem(&p);
}

/* The heads that the kernel takes which needs no products. */
static void test_fits(void **state)
{
    const struct model_attention *fused = model_layers_for(&on)->attention;
    assert_int_equal(fused != NULL, CUDA && sizeof(real) == 2);
    for (int64_t HS = 0; HS < 300 && fused; HS++)
        assert_int_equal(fused->fits(HS),
                         HS == 16 || HS == 32 || HS == 64 || HS == 80 || HS == 96 || HS == 128);
}

int main(void)
{
    rng = random_open();
    if (compute_open(&on, CUDA, 0, 1)) {
        printf("%s\n", zr_error_text());
        return 77; /* skipped */
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_reference),
        cmocka_unit_test(test_slices),
        cmocka_unit_test(test_gathered),
        cmocka_unit_test(test_ring),
        cmocka_unit_test(test_merge_of_nothing),
        cmocka_unit_test(test_documents),
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_nan),
        cmocka_unit_test(test_fits),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    compute_close(&on);
    return failed;
}
