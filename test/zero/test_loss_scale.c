/* SPDX-License-Identifier: Apache-2.0 */
/* test_loss_scale.c: zero_loss_scale, for the mean over all tokens, however they are divided.
 *
 * The tokens of a step are numbered, and cut at random places into the micro-batches of all ranks. Some
 * micro-batches get none. The gradient of the mean loss is computed in double precision from the weights that
 * the library shows. The update must get this gradient, at every stage, world and number of micro-batches. */
#include "test/cmocka.h"
#include "test/zero/toy_net.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Each unit is a matrix w (OUT, IN). A token's loss is half of |w x - target|^2, summed over units. */
enum { UNITS = 4, IN = 37, OUT = 5, N = OUT * IN, STEPS = 3, MAX_PARTS = 16 };

struct setup {
    int stage, accum, tokens;
    bool brackets, in_place, sum, between;
    double grad_scale;
    uint32_t seed;
};

struct net {
    float *w[UNITS], *dw[UNITS];
    float w_own[UNITS][N], dw_own[UNITS][N];
    struct zero_tensor table[UNITS];
};

/* Returns a number in -1..1, equal on every rank. */
static double draw(uint32_t *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return (*seed >> 8) / (double)(1 << 23) - 1;
}

static void make_net(struct net *m, uint32_t seed)
{
    static const char *const name[UNITS] = {"a", "b", "c", "d"};
    memset(m, 0, sizeof *m);
    for (int u = 0; u < UNITS; u++) {
        for (int i = 0; i < N; i++)
            m->w_own[u][i] = (float)draw(&seed);
        m->w[u] = m->w_own[u];
        m->dw[u] = m->dw_own[u];
        m->table[u] = (struct zero_tensor){.name = name[u],
                                           .param = (void **)&m->w[u],
                                           .grad = (void **)&m->dw[u],
                                           .shape = {N},
                                           .dtype = ZERO_F32,
                                           .unit = u};
    }
}

/* Makes a token, which is the same on any rank that has it. */
static void make_token(const struct setup *s, int step, int token, float x[IN], float target[OUT])
{
    uint32_t seed = s->seed + 7919u * (uint32_t)step + 104729u * (uint32_t)token;
    for (int i = 0; i < 3; i++)
        draw(&seed);
    for (int i = 0; i < IN; i++)
        x[i] = (float)draw(&seed);
    for (int i = 0; i < OUT; i++)
        target[i] = (float)draw(&seed);
}

/* Cuts the step's tokens into parts. Part p is micro-batch p / world of rank p % world, and has tokens at[p]
 * to at[p + 1] - 1. */
static void cut_tokens(const struct setup *s, int step, int parts, int at[MAX_PARTS + 1])
{
    uint32_t seed = s->seed * 31u + (uint32_t)step;
    at[0] = 0;
    for (int p = 1; p < parts; p++)
        at[p] = (int)((draw(&seed) + 1) / 2 * s->tokens);
    at[parts] = s->tokens;
    for (int i = 1; i < parts; i++)
        for (int k = i; k > 1 && at[k] < at[k - 1]; k--) {
            int other = at[k];
            at[k] = at[k - 1];
            at[k - 1] = other;
        }
}

/* Computes in fp32, as a model does. */
static void add_gradient(const struct setup *s, struct net *m, int unit, int step, int first, int end,
                         double scale)
{
    for (int token = first; token < end; token++) {
        float x[IN], target[OUT];
        make_token(s, step, token, x, target);
        for (int k = 0; k < OUT; k++) {
            float d = -target[k];
            for (int i = 0; i < IN; i++)
                d += m->w[unit][k * IN + i] * x[i];
            for (int i = 0; i < IN; i++)
                m->dw[unit][k * IN + i] += (float)scale * d * x[i];
        }
    }
}

/* Computes the gradient of the mean over all tokens. */
static void reference(const struct setup *s, const float w[N], int step, double grad[N])
{
    memset(grad, 0, N * sizeof *grad);
    for (int token = 0; token < s->tokens; token++) {
        float x[IN], target[OUT];
        make_token(s, step, token, x, target);
        for (int k = 0; k < OUT; k++) {
            double d = -(double)target[k];
            for (int i = 0; i < IN; i++)
                d += (double)w[k * IN + i] * (double)x[i];
            for (int i = 0; i < IN; i++)
                grad[k * IN + i] += s->grad_scale / s->tokens * d * (double)x[i];
        }
    }
}

static int backward(struct toy_rank *r, struct net *m, zero_ctx *z, int step, const int at[], double scale)
{
    const struct setup *s = r->arg;
    int err = 0;
    for (int k = 0; k < s->accum; k++) {
        int part = k * r->world + r->rank;
        if (k && !s->brackets && !s->in_place)
            TOY_TRY(zero_micro(z));
        for (int u = UNITS; !err && u-- > 0;) {
            if (s->brackets)
                TOY_TRY(zero_begin(z, u, ZERO_BACKWARD));
            if (!err)
                add_gradient(s, m, u, step, at[part], at[part + 1], scale);
            if (s->brackets)
                TOY_TRY(zero_end(z, u, ZERO_BACKWARD));
        }
    }
    return err;
}

static int forward(struct toy_rank *r, zero_ctx *z)
{
    const struct setup *s = r->arg;
    int err = 0;
    for (int u = 0; s->brackets && u < UNITS; u++) {
        TOY_TRY(zero_begin(z, u, ZERO_FORWARD));
        TOY_TRY(zero_end(z, u, ZERO_FORWARD));
    }
    return err;
}

static int compare(struct toy_rank *r, zero_ctx *z, int step, float w[UNITS][N])
{
    const struct setup *s = r->arg;
    double want[N], most = 0, apart = 0;
    float grad[N];
    int err = 0;
    for (int u = 0; u < UNITS; u++) {
        memset(grad, 0xff, sizeof grad);
        TOY_TRY(zero_read(z, u, ZERO_VALUE_GRAD, 0, N, grad));
        if (err)
            return err;
        reference(s, w[u], step, want);
        for (int i = 0; i < N; i++) {
            most = fmax(most, fabs(want[i]));
            if (!(fabs((double)grad[i] - want[i]) <= apart)) /* also true for NaN */
                apart = fabs((double)grad[i] - want[i]);
        }
    }
    if (!(apart <= 3e-6 * most) || most == 0)
        toy_wrong(r, "step %d: gradients of up to %g are %g apart from the mean over tokens", step, most,
                  apart);
    return 0;
}

static void train(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct net m;
    zero_ctx *z = NULL;
    struct zero_config cfg = toy_config(r, s->stage);
    float w[UNITS][N];
    int err = 0, at[MAX_PARTS + 1];
    cfg.optim.optimizer = ZERO_SGD;
    cfg.optim.weight_decay = 0;
    cfg.grad_scale = s->grad_scale;
    cfg.grad_accum_steps = s->accum;
    cfg.memory.grad_in_place = s->in_place;
    cfg.grad_sum = s->sum;
    cfg.memory.prefetch = 0; /* at stage 3 units are gathered for each use */
    cfg.debug.log = toy_forget_line;
    make_net(&m, s->seed);
    TOY_TRY(zero_wrap(&z, m.table, UNITS, &cfg));
    for (int step = 0; !err && step < STEPS; step++) {
        double scale = NAN, count = 0, again;
        cut_tokens(s, step, s->accum * r->world, at);
        for (int p = r->rank; p < s->accum * r->world; p += r->world)
            count += at[p + 1] - at[p];
        for (int u = 0; u < UNITS; u++)
            TOY_TRY(zero_read(z, u, ZERO_VALUE_PARAM, 0, N, w[u]));
        if (s->between)
            TOY_TRY(forward(r, z));
        TOY_TRY(zero_loss_scale(z, 1 + r->rank, &again)); /* only the last call counts */
        TOY_TRY(zero_loss_scale(z, count, &scale));
        if (!s->between)
            TOY_TRY(forward(r, z));
        double want = (s->sum ? 1.0 : (double)r->world * s->accum) / s->tokens;
        if (!err && memcmp(&scale, &want, sizeof want))
            toy_wrong(r, "scale is %.17g instead of %.17g", scale, want);
        TOY_TRY(backward(r, &m, z, step, at, scale));
        if (!err)
            err = compare(r, z, step, w);
        TOY_TRY(zero_step(z, 0.1f, NULL));
    }
    zero_unwrap(&z);
}

static void however_they_are_spread(void **state)
{
    uint32_t seed = 20261126;
    int n = 0;
    for (int world = 1; world <= TOY_HYBRID_WORLD; world++)
        for (int stage = 0; stage < TOY_STAGES; stage++)
            for (int way = 0; way < 6; way++) {
                bool brackets = way != 1 && way != 3, in_place = way >= 4;
                if (!toy_has_stage(world, stage) || (stage > 1 && !brackets))
                    continue;
                struct setup s = {.stage = stage,
                                  .accum = in_place || way == 3 ? 2 + n % 2 : 1 + n % 3,
                                  .tokens = 1 + n * 5 % 29,
                                  .brackets = brackets,
                                  .in_place = in_place,
                                  .sum = n % 4 == 1,
                                  .between = n % 2,
                                  .grad_scale = n % 5 == 2 ? -0.25 : 1,
                                  .seed = seed++};
                struct toy_rank r[TOY_HYBRID_WORLD];
                char what[128];
                snprintf(what, sizeof what, "world %d, stage %d, way %d, accum %d, %d tokens, sum %d", world,
                         stage, way, s.accum, s.tokens, s.sum);
                toy_run(world, train, &s, r, what);
                n++;
            }
    assert_true(n > 50);
}

/* ---- errors, equal on all ranks, and log lines ---- */

static char lines[8][512];
static int n_lines;

static void keep_line(void *arg, const char *line)
{
    if (strstr(line, "zero_loss_scale was called") && n_lines < 8)
        snprintf(lines[n_lines++], sizeof *lines, "%s", line);
}

static int step_of(struct toy *m, zero_ctx *z, int step)
{
    return FIRST_ERROR(toy_forward(m, z, true), toy_backward(m, z, true, step, 0), zero_step(z, 1e-3f, NULL));
}

static void refuse(struct toy_rank *r)
{
    static const double bad[] = {-1, NAN, INFINITY, -INFINITY, -1e-300};
    struct toy m;
    zero_ctx *z = NULL;
    struct zero_config cfg = toy_config(r, *(int *)r->arg);
    double scale = 42;
    int err = 0;
    cfg.debug.log = r->rank == 0 ? keep_line : toy_forget_line;
    toy_make(&m);
    toy_expect(r, zero_loss_scale(NULL, 1, &scale), ZERO_ERR_ARG, "zero_loss_scale: z is NULL");
    TOY_TRY(zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
    toy_expect(r, zero_loss_scale(z, 1, NULL), ZERO_ERR_ARG, "zero_loss_scale: scale is NULL");
    for (size_t i = 0; !err && i < sizeof bad / sizeof *bad; i++) {
        char says[64];
        snprintf(says, sizeof says, "count is %g on rank %d", bad[i], r->world - 1);
        toy_expect(r, zero_loss_scale(z, r->rank == r->world - 1 ? bad[i] : 5, &scale), ZERO_ERR_ARG, says);
    }
    toy_expect(r, zero_loss_scale(z, 0, &scale), ZERO_ERR_ARG, "count is 0 on all ranks");
    toy_expect(r, zero_loss_scale(z, 1e-320, &scale), ZERO_ERR_ARG, "which gives no finite scale");
    toy_expect(r, zero_loss_scale(z, 1.7e308, &scale), r->world == 1 ? 0 : ZERO_ERR_ARG,
               r->world == 1 ? "" : "add up to inf");
    if (r->world > 1 && scale != 42)
        toy_wrong(r, "a refused call left %g", scale);
    /* A count may also be a sum of weights. */
    TOY_TRY(zero_loss_scale(z, 0.25, &scale));
    if (!err && scale != 4)
        toy_wrong(r, "scale is %g", scale);
    TOY_TRY(toy_forward(&m, z, true));
    TOY_TRY(zero_begin(z, 0, ZERO_FORWARD));
    toy_expect(r, zero_loss_scale(z, 1, &scale), ZERO_ERR_ORDER, "zero_loss_scale: unit 0 has an open");
    TOY_TRY(zero_end(z, 0, ZERO_FORWARD));
    TOY_TRY(toy_backward(&m, z, true, 0, 0));
    toy_expect(r, zero_loss_scale(z, 1, &scale), ZERO_ERR_ORDER, "zero_loss_scale: a step has begun");
    TOY_TRY(zero_drop(z));
    TOY_TRY(zero_loss_scale(z, 1, &scale));
    for (int step = 0; step < 2; step++) { /* the second step has no call; it is logged once */
        TOY_TRY(step_of(&m, z, 2 * step));
        TOY_TRY(step_of(&m, z, 2 * step + 1));
        TOY_TRY(zero_loss_scale(z, 1, &scale));
    }
    TOY_TRY(zero_unwrap(&z));
    toy_free(&m);
}

static void refused_and_reported(void **state)
{
    for (int world = 1; world <= 3; world++)
        for (int stage = 0; stage <= 3; stage++) {
            struct toy_rank r[3];
            n_lines = 0;
            toy_run(world, refuse, &stage, r, "refused");
            if (n_lines != 1 || !strstr(lines[0], "but not for this"))
                fail_msg("world %d, stage %d: %d lines, first: %s", world, stage, n_lines, lines[0]);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(however_they_are_spread),
        cmocka_unit_test(refused_and_reported),
    };
    return cmocka_run_group_tests_name("loss scale", tests, NULL, NULL);
}
