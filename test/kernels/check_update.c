/* SPDX-License-Identifier: Apache-2.0 */
/* check_update.c: checks and times the optimizers' update against two references: the definition in plain
 * float, bit for bit, and the same formulas in fp64, within rounding. */
#include "test/kernels/check.h"
#include "test/kernels/optimizer_references.h"

static struct random_source rng;

enum { OUT_NONE, OUT_MASTER, OUT_F32, OUT_BF16, OUT_COUNT };

static struct zr_update make_update(const struct variant *v)
{
    struct zr_update u = {.kind = v->kind,
                          .grad_dtype = ZERO_F32,
                          .lr = 1e-3f,
                          .beta1 = v->beta1,
                          .beta2 = 0.99f,
                          .eps = 1e-8f,
                          .decay = 0.1f,
                          .c1 = 1,
                          .c2 = 1,
                          .t = v->t};
    if (zr_optimizer_kind(v->kind)->bias_correction) {
        u.c1 = (float)(1 - pow(u.beta1, (double)v->t));
        u.c2 = (float)(1 - pow(u.beta2, (double)v->t));
    }
    return u;
}

static void check_one(const struct zr_host_kernels *k, const struct variant *v, int out, int64_t n,
                      int64_t shift, bool skip, bool tame)
{
    struct zr_step_scalars scalars = {.grad_scale = 0.37f, .skip = skip};
    struct zr_update u = make_update(v);
    int64_t param_bytes = out == OUT_BF16 ? 2 : 4;
    struct guarded master = guarded_open(4 * n, 4 * shift), grad = guarded_open(4 * n, 4 * (shift + 1)),
                   s0 = guarded_open(4 * n, 4 * (shift + 2)), s1 = guarded_open(4 * n, 4 * shift),
                   param = guarded_open(param_bytes * n, param_bytes * (shift + 1));
    float *w = master.p, *g = grad.p, *a = s0.p, *b = s1.p;
    for (int64_t i = 0; i < n; i++) {
        w[i] = tame ? random_normal(&rng) : check_value(&rng);
        g[i] = tame ? random_normal(&rng) : check_value(&rng);
        a[i] = tame ? random_normal(&rng) : check_value(&rng);
        b[i] = fabsf(tame ? random_normal(&rng) : check_value(&rng));
        if (v->squares)
            a[i] = fabsf(a[i]);
        if (!tame && random_below(&rng, 50) == 0)
            g[i] = random_below(&rng, 2) ? NAN : INFINITY;
    }
    size_t bytes = (size_t)(4 * n);
    float *w0 = malloc(bytes + 1), *g0 = malloc(bytes + 1), *a0 = malloc(bytes + 1), *b0 = malloc(bytes + 1);
    memcpy(w0, w, bytes), memcpy(g0, g, bytes), memcpy(a0, a, bytes), memcpy(b0, b, bytes);
    void *p0 = malloc((size_t)(param_bytes * n) + 1);
    memcpy(p0, param.p, (size_t)(param_bytes * n));

    u.n = n;
    u.master = w;
    u.grad = g;
    u.state[0] = v->n_states > 0 ? a : NULL;
    u.state[1] = v->n_states > 1 ? b : NULL;
    u.scalars = &scalars;
    u.param_dtype = out == OUT_BF16 ? ZERO_BF16 : ZERO_F32;
    u.param = out == OUT_NONE ? NULL : out == OUT_MASTER ? (void *)w : param.p;
    k->update(&u);

    assert_memory_equal(g, g0, bytes);
    if (skip) {
        assert_memory_equal(w, w0, bytes);
        assert_memory_equal(a, a0, bytes);
        assert_memory_equal(b, b0, bytes);
        assert_memory_equal(param.p, p0, (size_t)(param_bytes * n));
    }
    for (int64_t i = 0; i < n && !skip; i++) {
        float wf = w0[i], af = a0[i], bf = b0[i];
        double wd = wf, ad = af, bd = bf;
        element_f32(&u, scalars.grad_scale, g0[i], &wf, &af, &bf);
        element_f64(&u, scalars.grad_scale, g0[i], &wd, &ad, &bd);
        if (!same_float(w[i], wf) || !same_float(a[i], af) || !same_float(b[i], bf))
            fail_msg("%s %s: [%lld] of %lld is %a, not %a (states %a %a, not %a %a)", k->name, v->name,
                     (long long)i, (long long)n, (double)w[i], (double)wf, (double)a[i], (double)b[i],
                     (double)af, (double)bf);
        if (tame) {
            struct errors e = rounding_of(&u, scalars.grad_scale, g0[i], w0[i], a0[i], b0[i], wd, ad, bd);
            assert_true(fabs(w[i] - wd) <= e.w);
            assert_true(fabs(a[i] - ad) <= e.s0);
            assert_true(fabs(b[i] - bd) <= e.s1);
        }
        if (out == OUT_F32)
            assert_true(same_float(((float *)param.p)[i], w[i]));
        if (out == OUT_BF16) {
            uint16_t got;
            memcpy(&got, (char *)param.p + 2 * i, 2);
            assert_int_equal(got, zr_round_away(w[i])); /* checked in check_states.c */
        }
    }
    if (out == OUT_NONE || out == OUT_MASTER)
        assert_memory_equal(param.p, p0, (size_t)(param_bytes * n));
    guarded_close(&master), guarded_close(&grad), guarded_close(&s0), guarded_close(&s1),
        guarded_close(&param);
    free(w0), free(g0), free(a0), free(b0), free(p0);
}

static void check_update(void **state)
{
    FOR_EACH(struct variant, v, variants)
    for (int out = 0; out < OUT_COUNT; out++)
        FOR_EACH(int64_t, n, check_sizes)
    FOR_EACH(int64_t, shift, check_shifts)
    check_one(*state, v, out, *n, *shift, false, *n % 2 == 0);
}

/* Bias corrections and moments of all magnitudes. AVX-512 divides by corrections in its own way. */
static void check_bias_corrections(void **state)
{
#ifdef CHECK_GPU
    enum { N = 256, N_CORRECTIONS = 300 }; /* each means ten copies to the GPU and back */
#else
    enum { N = 256, N_CORRECTIONS = 3000 };
#endif
    const struct zr_host_kernels *k = *state, *portable = zr_host_kernels(ZR_ISA_PORTABLE);
    const float fixed[] = {1, 0x1p-24f, 0x1.fffffep-1f, 0x1.fffffep-25f, 0x1p-30f, 2, 0.1f, 0.05f};
    const struct zr_step_scalars scalars = {.grad_scale = 1};
    static float w[2][N], g[N], m[2][N], v[2][N];
    for (int c = 0; c < N_CORRECTIONS; c++) {
        const int widest = c % 3 == 0 ? 140 : c % 3 == 1 ? 110 : 20; /* exponents */
        float one =
            ldexpf(1 + (float)random_below(&rng, 1 << 23) * 0x1p-23f, -1 - (int)random_below(&rng, 24));
        float two =
            ldexpf(1 + (float)random_below(&rng, 1 << 23) * 0x1p-23f, -1 - (int)random_below(&rng, 24));
        for (int i = 0; i < N; i++) {
            float *at[] = {&g[i], &m[0][i], &v[0][i]};
            for (int a = 0; a < 3; a++)
                *at[a] = ldexpf(random_normal(&rng), (int)random_below(&rng, 2 * widest) - widest);
            v[0][i] = fabsf(v[0][i]);
            if (random_below(&rng, 4) == 0)
                g[i] = m[0][i] = random_below(&rng, 2) ? 0.0f : -0.0f;
            if (random_below(&rng, 4) == 0)
                v[0][i] = g[i] = 0.0f;
        }
        memset(w, 0, sizeof w); /* so that the result is the direction only */
        memcpy(m[1], m[0], sizeof m[0]), memcpy(v[1], v[0], sizeof v[0]);
        for (int which = 0; which < 2; which++)
            (which ? portable : k)
                ->update(&(struct zr_update){.kind = ZERO_ADAM,
                                             .grad_dtype = ZERO_F32,
                                             .lr = 1,
                                             .beta1 = 0.9f,
                                             .beta2 = 0.99f,
                                             .c1 = c < 8 ? fixed[c] : one,
                                             .c2 = c < 8 ? fixed[7 - c] : two,
                                             .t = 1,
                                             .n = N,
                                             .master = w[which],
                                             .grad = g,
                                             .state = {m[which], v[which]},
                                             .scalars = &scalars});
        for (int i = 0; i < N; i++)
            if (!same_float(w[0][i], w[1][i]))
                fail_msg("%s: by %a and %a: moments %a and %a give %a, not %a", k->name, (double)one,
                         (double)two, (double)m[0][i], (double)v[0][i], (double)w[0][i], (double)w[1][i]);
    }
}

/* The optimizer table is correct, and every kind in it is checked here. */
static void check_kinds(void **state)
{
    for (int kind = 1; kind < ZR_OPTIMIZER_COUNT; kind++) {
        const struct zr_optimizer_kind *row = zr_optimizer_kind((enum zero_optimizer)kind);
        bool usual = false;
        assert_non_null(row);
        assert_true(*row->name && *row->source);
        assert_true(row->granule > 0 && 32 % row->granule == 0); /* shards are cut at multiples of 32 */
        assert_true(row->beta1 >= 0 && row->beta1 < 1 && row->beta2 >= 0 && row->beta2 < 1 && row->eps >= 0);
        for (int i = 0; i < ZR_OPTIMIZER_STATES; i++)
            assert_true((i < row->n_states) == (row->state[i] != NULL));
        FOR_EACH(struct variant, v, variants)
        if (v->kind == (enum zero_optimizer)kind) {
            usual |= v->t > 1 && v->n_states == row->n_states;
            assert_int_equal(zr_optimizer_states(v->kind, v->beta1), v->n_states);
        }
        if (!usual)
            fail_msg("optimizer %s has no reference here", row->name);
    }
    assert_null(zr_optimizer_kind(ZR_OPTIMIZER_NONE));
    assert_null(zr_optimizer_kind((enum zero_optimizer)ZR_OPTIMIZER_COUNT));
    assert_null(zr_optimizer_kind((enum zero_optimizer) - 1));
}

static void check_skip(void **state)
{
    FOR_EACH(struct variant, v, variants)
    for (int out = 0; out < OUT_COUNT; out++)
        check_one(*state, v, out, 100, 1, true, true);
}

/* A range updated in pieces has the bits of one update: shards may be cut anywhere. */
static void check_pieces(void **state)
{
    const struct zr_host_kernels *k = *state;
    enum { N = 1000 };
    FOR_EACH(struct variant, v, variants)
    {
        float whole[4][N], cut[4][N];
        struct zr_step_scalars scalars = {.grad_scale = 2};
        struct zr_update u = make_update(v);
        for (int i = 0; i < N; i++)
            for (int j = 0; j < 4; j++)
                whole[j][i] = cut[j][i] = fabsf(random_normal(&rng));
        u.scalars = &scalars;
        u.param_dtype = ZERO_F32;
        u.master = whole[0], u.grad = whole[1], u.n = N;
        u.state[0] = v->n_states > 0 ? whole[2] : NULL, u.state[1] = v->n_states > 1 ? whole[3] : NULL;
        k->update(&u);
        for (int at = 0, step; at < N; at += step) {
            step = 1 + (int)random_below(&rng, 70);
            step = step < N - at ? step : N - at;
            u.master = cut[0] + at, u.grad = cut[1] + at, u.n = step;
            for (int j = 0; j < v->n_states; j++)
                u.state[j] = cut[2 + j] + at;
            k->update(&u);
        }
        assert_memory_equal(whole, cut, sizeof whole);
    }
}

static void time_update(const struct zr_host_kernels *k)
{
    FOR_EACH(struct bench_size, s, bench_sizes)
    {
        float *x[5];
        for (int j = 0; j < 5; j++)
            x[j] = aligned_alloc(4096, (size_t)s->n * 4);
        FOR_EACH(struct variant, v, variants)
        for (int out = OUT_NONE; out < OUT_COUNT; out++) {
            if (v->t == 1 || out == OUT_MASTER || out == OUT_F32)
                continue;
            struct zr_step_scalars scalars = {.grad_scale = 1};
            struct timed_update a = {k, make_update(v)};
            char name[64];
            a.u.n = s->n;
            a.u.master = x[0], a.u.grad = x[1];
            for (int j = 0; j < v->n_states; j++)
                a.u.state[j] = x[2 + j];
            a.u.scalars = &scalars;
            a.u.param_dtype = out == OUT_BF16 ? ZERO_BF16 : ZERO_F32;
            a.u.param = out == OUT_NONE ? NULL : (void *)x[4];
            snprintf(name, sizeof name, "%s%s", v->name, out == OUT_BF16 ? " -> bf16" : "");
            bench(name, k->name, s->where, s->n * (12 + 8 * v->n_states + (out == OUT_BF16 ? 2 : 0)),
                  run_update, &a);
        }
        for (int j = 0; j < 5; j++)
            free(x[j]);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(check_kinds), cmocka_unit_test(check_update),
                                       cmocka_unit_test(check_skip), cmocka_unit_test(check_pieces),
                                       cmocka_unit_test(check_bias_corrections)};
    rng = random_open();
    return check_main(argc, argv, tests, sizeof tests / sizeof *tests, time_update);
}
