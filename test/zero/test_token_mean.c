/* SPDX-License-Identifier: Apache-2.0 */
/* test_token_mean.c: a step trains on the mean over its tokens, however they are divided over ranks,
 * micro-batches, pipeline stages and tensor-parallel ranks. Micro-batches have different numbers of tokens,
 * some none. Gradients, norm and loss must be close to those of one rank in double, computed from the weights
 * that the library shows. */
#include "test/cmocka.h"
#include "test/zero/sample.h"
#include "test/zero/toy_net.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Layers are y = x + w2 tanh(w1 x) + b. Tensor parallelism cuts w1 by rows and w2 by columns. A token's loss
 * is half of |y - target|^2. Layers go to the pipeline stages evenly, and the first ones get the
 * remainder. */
enum { LAYERS = 6, C = 6, H = 8, MAX_TOKENS = 29, MICRO = 12, STEPS = 2, MAX_WORLD = 8, MAX_STAGES = 8 };

struct layer {
    float w1[H][C], w2[C][H], b[C];
};

struct setup {
    int pp, dp, tp, per_rank, stage, schedule, prefetch, tokens;
    bool hybrid, sum, check;
    double grad_scale;
    uint32_t seed;
};

/* The whole model as read by the ranks: weights before each step, then gradients, norm and mean loss. */
struct seen {
    struct layer weights[LAYERS], grads[LAYERS];
    double norm, loss;
};
static struct seen seen[STEPS];

/* One pipeline stage of a rank, with its part of each layer. */
struct stage {
    int first, n_layers, first_unit;
    float *w1[LAYERS], *w2[LAYERS], *b[LAYERS], *dw1[LAYERS], *dw2[LAYERS], *db[LAYERS];
    float x[MICRO][LAYERS + 1][MAX_TOKENS][C], h[MICRO][LAYERS][MAX_TOKENS][H];
};

struct model {
    int32_t pp, dp, n_dp, tp;
    /* hidden: channels between the products on this tensor-parallel rank */
    int hidden, n_tensors;
    struct stage stage[3];
    struct zero_tensor table[3 * LAYERS];
    char name[3 * LAYERS][8];
    struct layer own[LAYERS];
};

/* Returns a number in -1..1, equal on every rank. */
static double draw(uint32_t *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return (*seed >> 8) / (double)(1 << 23) - 1;
}

/* Makes a token, which is the same on any rank that has it. */
static void make_token(const struct setup *s, int step, int token, float x[C], float target[C])
{
    uint32_t seed = s->seed + 7919u * (uint32_t)step + 104729u * (uint32_t)token;
    for (int i = 0; i < 3; i++)
        draw(&seed);
    for (int i = 0; i < C; i++) {
        x[i] = (float)draw(&seed);
        target[i] = (float)draw(&seed);
    }
}

/* Cuts the step's tokens into parts. Part p is micro-batch p / n_dp of data-parallel rank p % n_dp, and has
 * tokens at[p] to at[p + 1] - 1. */
static void cut_tokens(const struct setup *s, int step, int parts, int at[MICRO + 1])
{
    uint32_t seed = s->seed * 31u + (uint32_t)step;
    at[0] = 0;
    for (int p = 1; p < parts; p++) {
        int k = p, cut = (int)((draw(&seed) + 1) / 2 * s->tokens);
        for (; k > 1 && at[k - 1] > cut; k--)
            at[k] = at[k - 1];
        at[k] = cut;
    }
    at[parts] = s->tokens;
}

/* ---- the reference ---- */

static void forward_in_double(const struct layer *m, int layer, const double x[C], double h[H], double y[C])
{
    for (int j = 0; j < H; j++) {
        double sum = 0;
        for (int i = 0; i < C; i++)
            sum += (double)m[layer].w1[j][i] * x[i];
        h[j] = tanh(sum);
    }
    for (int i = 0; i < C; i++) {
        y[i] = x[i] + (double)m[layer].b[i];
        for (int j = 0; j < H; j++)
            y[i] += (double)m[layer].w2[i][j] * h[j];
    }
}

/* grads: w1, w2 and b of each layer, as in struct layer. dx: in: the gradient of y; out: that of x */
static void backward_in_double(const struct layer *m, int layer, const double x[C], const double h[H],
                               double dx[C], double *grads)
{
    double *dw1 = grads + (ptrdiff_t)layer * (2 * C * H + C), *dw2 = dw1 + C * H, *db = dw2 + C * H, da[H];
    for (int j = 0; j < H; j++) {
        da[j] = 0;
        for (int i = 0; i < C; i++) {
            da[j] += (double)m[layer].w2[i][j] * dx[i];
            dw2[i * H + j] += dx[i] * h[j];
        }
        da[j] *= 1 - h[j] * h[j];
    }
    for (int i = 0; i < C; i++)
        db[i] += dx[i];
    for (int j = 0; j < H; j++)
        for (int i = 0; i < C; i++) {
            dw1[j * C + i] += da[j] * x[i];
            dx[i] += da[j] * (double)m[layer].w1[j][i];
        }
}

enum { ELEMS = LAYERS * (2 * C * H + C) };

/* Returns the mean loss over all tokens, and computes its gradient times grad_scale. */
static double reference(const struct setup *s, int step, const struct layer *m, double grads[ELEMS])
{
    double loss = 0;
    memset(grads, 0, ELEMS * sizeof *grads);
    for (int token = 0; token < s->tokens; token++) {
        double x[LAYERS + 1][C], h[LAYERS][H], dx[C];
        float first[C], target[C];
        make_token(s, step, token, first, target);
        for (int i = 0; i < C; i++)
            x[0][i] = (double)first[i];
        for (int l = 0; l < LAYERS; l++)
            forward_in_double(m, l, x[l], h[l], x[l + 1]);
        for (int i = 0; i < C; i++) {
            dx[i] = x[LAYERS][i] - (double)target[i];
            loss += dx[i] * dx[i] / 2;
        }
        for (int l = LAYERS; l-- > 0;)
            backward_in_double(m, l, x[l], h[l], dx, grads);
    }
    for (int i = 0; i < ELEMS; i++)
        grads[i] *= s->grad_scale / s->tokens;
    return loss / s->tokens;
}

static void compare(const struct setup *s, int step, const char *what)
{
    double want[ELEMS], loss = reference(s, step, seen[step].weights, want), apart = 0, most = 0, squares = 0;
    float got[ELEMS];
    _Static_assert(sizeof got == sizeof seen->grads, "layers have no gaps");
    memcpy(got, seen[step].grads, sizeof got);
    for (int i = 0; i < ELEMS; i++) {
        most = fmax(most, fabs(want[i]));
        squares += want[i] * want[i];
        if (!(fabs((double)got[i] - want[i]) <= apart)) /* also true for NaN */
            apart = fabs((double)got[i] - want[i]);
    }
    if (!(apart <= 2e-6 * most) || most == 0)
        fail_msg("%s: step %d: gradients of up to %g are %g apart from the mean over tokens", what, step,
                 most, apart);
    if (!(fabs(seen[step].norm - sqrt(squares)) <= 2e-6 * sqrt(squares)))
        fail_msg("%s: step %d: norm %.9g instead of %.9g", what, step, seen[step].norm, sqrt(squares));
    if (!(fabs(seen[step].loss - loss) <= 2e-6 * loss))
        fail_msg("%s: step %d: loss %.9g instead of %.9g", what, step, seen[step].loss, loss);
}

/* ---- one rank ---- */

static int layers_before(int n_stages, int stage)
{
    return LAYERS / n_stages * stage + (stage < LAYERS % n_stages ? stage : LAYERS % n_stages);
}

/* Returns the row of the whole w1, and column of the whole w2, for row or column k of this rank. */
static int whole_of(const struct model *m, int k)
{
    return m->tp * m->hidden + k;
}

static void add_tensor(struct model *m, char kind, int layer, float **param, float **grad, int64_t rows,
                       int64_t columns, int cut)
{
    struct zero_tensor *x = &m->table[m->n_tensors];
    char *name = m->name[m->n_tensors++];
    snprintf(name, sizeof *m->name, "%c%d", kind, layer);
    *x = (struct zero_tensor){.name = name,
                              .param = (void **)param,
                              .grad = (void **)grad,
                              .shape = {rows, columns},
                              .dtype = ZERO_F32,
                              .tp_cut = cut};
}

/* Fills a layer with initial values, which depend only on the element of the whole model. */
static void fill_layer(const struct model *m, int layer, struct layer *own)
{
    for (int k = 0; k < m->hidden; k++)
        for (int i = 0; i < C; i++) {
            uint32_t seed = 17u + 40503u * (uint32_t)((layer * H + whole_of(m, k)) * C + i);
            draw(&seed), draw(&seed);
            (&own->w1[0][0])[k * C + i] = (float)(0.4 * draw(&seed));
            (&own->w2[0][0])[i * m->hidden + k] = (float)(0.4 * draw(&seed));
        }
    for (int i = 0; i < C; i++)
        own->b[i] = (float)(layer + i) / 100;
}

static struct model *make_model(const struct setup *s, const struct zero_place *p)
{
    struct model *m = calloc(1, sizeof *m);
    int units = 0;
    m->pp = p->pp;
    m->dp = p->data;
    m->n_dp = p->n_data;
    m->tp = p->tp;
    m->hidden = H / s->tp;
    for (int k = 0; k < s->per_rank; k++) {
        struct stage *g = &m->stage[k];
        int stage = k * s->pp + m->pp, n_stages = s->pp * s->per_rank;
        g->first = layers_before(n_stages, stage);
        g->n_layers = layers_before(n_stages, stage + 1) - g->first;
        g->first_unit = units;
        for (int l = 0; l < g->n_layers; l++, units++) {
            struct layer *own = &m->own[units];
            int before = m->n_tensors;
            fill_layer(m, g->first + l, own);
            g->w1[l] = &own->w1[0][0];
            g->w2[l] = &own->w2[0][0];
            g->b[l] = own->b;
            add_tensor(m, 'u', g->first + l, &g->w1[l], &g->dw1[l], m->hidden, C, ZERO_TP_CUT(0));
            add_tensor(m, 'v', g->first + l, &g->w2[l], &g->dw2[l], C, m->hidden, ZERO_TP_CUT(1));
            add_tensor(m, 'b', g->first + l, &g->b[l], &g->db[l], C, 0, 0);
            for (int t = before; t < m->n_tensors; t++) {
                m->table[t].unit = units;
                m->table[t].pp_stage = k;
            }
        }
    }
    return m;
}

static int forward(const struct model *m, struct stage *g, zero_ctx *z, int micro, int n)
{
    for (int l = 0; l < g->n_layers; l++) {
        float(*x)[C] = g->x[micro][l], (*y)[C] = g->x[micro][l + 1], (*h)[H] = g->h[micro][l];
        OR_RETURN(zero_begin(z, g->first_unit + l, ZERO_FORWARD));
        OR_RETURN(zero_expect_equal(z, ZERO_AXIS_TP, x, (int64_t)n * C, ZERO_F32));
        for (int t = 0; t < n; t++) {
            for (int j = 0; j < m->hidden; j++) {
                float sum = 0;
                for (int i = 0; i < C; i++)
                    sum += g->w1[l][j * C + i] * x[t][i];
                h[t][j] = tanhf(sum);
            }
            for (int i = 0; i < C; i++) {
                y[t][i] = 0;
                for (int j = 0; j < m->hidden; j++)
                    y[t][i] += g->w2[l][i * m->hidden + j] * h[t][j];
            }
        }
        OR_RETURN(zero_all_reduce(z, ZERO_AXIS_TP, y, y, (int64_t)n * C, ZERO_F32, ZERO_SUM));
        for (int t = 0; t < n; t++)
            for (int i = 0; i < C; i++)
                y[t][i] += x[t][i] + g->b[l][i];
        OR_RETURN(zero_end(z, g->first_unit + l, ZERO_FORWARD));
    }
    return 0;
}

static int backward(const struct model *m, const struct stage *g, zero_ctx *z, int micro, int n,
                    float dx[][C])
{
    for (int l = g->n_layers; l-- > 0;) {
        const float(*x)[C] = g->x[micro][l], (*h)[H] = g->h[micro][l];
        float du[MAX_TOKENS][C];
        OR_RETURN(zero_begin(z, g->first_unit + l, ZERO_BACKWARD));
        OR_RETURN(zero_expect_equal(z, ZERO_AXIS_TP, dx, (int64_t)n * C, ZERO_F32));
        for (int t = 0; t < n; t++) {
            float da[H];
            for (int i = 0; i < C; i++)
                g->db[l][i] += dx[t][i];
            for (int j = 0; j < m->hidden; j++) {
                da[j] = 0;
                for (int i = 0; i < C; i++) {
                    da[j] += g->w2[l][i * m->hidden + j] * dx[t][i];
                    g->dw2[l][i * m->hidden + j] += dx[t][i] * h[t][j];
                }
                da[j] *= 1 - h[t][j] * h[t][j];
            }
            for (int i = 0; i < C; i++) {
                du[t][i] = 0;
                for (int j = 0; j < m->hidden; j++) {
                    du[t][i] += g->w1[l][j * C + i] * da[j];
                    g->dw1[l][j * C + i] += da[j] * x[t][i];
                }
            }
        }
        OR_RETURN(zero_all_reduce(z, ZERO_AXIS_TP, du, du, (int64_t)n * C, ZERO_F32, ZERO_SUM));
        for (int t = 0; t < n; t++)
            for (int i = 0; i < C; i++)
                dx[t][i] += du[t][i];
        OR_RETURN(zero_end(z, g->first_unit + l, ZERO_BACKWARD));
    }
    return 0;
}

/* Runs an action with tokens first to first + n - 1. */
static int run_action(const struct setup *s, struct model *m, zero_ctx *z, const struct zero_action *a,
                      int step, int first, int n, double scale, double *loss)
{
    struct stage *g = &m->stage[a->pp_stage];
    const size_t bytes = (size_t)n * C * sizeof(float);
    float dx[MAX_TOKENS][C], own[C], target[C];
    if (a->phase == ZERO_FORWARD) {
        for (int t = 0; t < n && !a->in; t++)
            make_token(s, step, first + t, g->x[a->micro_batch][0][t], target);
        if (a->in)
            memcpy(g->x[a->micro_batch][0], a->in, bytes);
        OR_RETURN(forward(m, g, z, a->micro_batch, n));
        if (a->out)
            memcpy(a->out, g->x[a->micro_batch][g->n_layers], bytes);
        return 0;
    }
    if (a->in)
        memcpy(dx, a->in, bytes);
    for (int t = 0; t < n && !a->in; t++) {
        make_token(s, step, first + t, own, target);
        for (int i = 0; i < C; i++) {
            float d = g->x[a->micro_batch][g->n_layers][t][i] - target[i];
            *loss += (double)d * (double)d / 2;
            dx[t][i] = (float)scale * d;
        }
    }
    OR_RETURN(backward(m, g, z, a->micro_batch, n, dx));
    if (a->out)
        memcpy(a->out, dx, bytes);
    return 0;
}

/* Copies this rank's part of the values into the whole model. */
static int read_all(const struct model *m, zero_ctx *z, int value, struct layer out[LAYERS])
{
    float got[C * H];
    for (int t = 0; t < m->n_tensors; t++) {
        struct layer *to = &out[atoi(m->name[t] + 1)];
        int64_t n = m->name[t][0] == 'b' ? C : (int64_t)C * m->hidden;
        memset(got, 0xff, sizeof got);
        OR_RETURN(zero_read(z, t, value, 0, n, got));
        for (int k = 0; k < n && m->dp == 0; k++)
            if (m->name[t][0] == 'u')
                to->w1[whole_of(m, k / C)][k % C] = got[k];
            else if (m->name[t][0] == 'v')
                to->w2[k / m->hidden][whole_of(m, k % m->hidden)] = got[k];
            else if (m->tp == 0)
                to->b[k] = got[k];
    }
    return 0;
}

static int one_step(struct toy_rank *r, struct model *m, zero_ctx *z, int step)
{
    const struct setup *s = r->arg;
    const int n_micro = MICRO / m->n_dp;
    bool last = m->pp == s->pp - 1;
    int at[MICRO + 1];
    struct zero_action a;
    struct zero_step_info info;
    double scale = NAN, count = 0, loss = 0, norm = NAN;
    cut_tokens(s, step, MICRO, at);
    for (int p = m->dp; p < MICRO; p += m->n_dp)
        count += at[p + 1] - at[p];
    OR_RETURN(read_all(m, z, ZERO_VALUE_PARAM, seen[step].weights));
    /* only the last pipeline stage's counts matter */
    OR_RETURN(zero_loss_scale(z, last ? count : 1000 + m->pp, &scale));
    for (;;) {
        OR_RETURN(zero_next(z, &a));
        if (a.micro_batch < 0)
            break;
        int part = a.micro_batch * m->n_dp + m->dp;
        OR_RETURN(run_action(s, m, z, &a, step, at[part], at[part + 1] - at[part], scale, &loss));
        OR_RETURN(zero_finish(z));
    }
    loss *= s->sum ? scale * m->n_dp : scale / n_micro;
    OR_RETURN(zero_carry(z, &loss, 1));
    OR_RETURN(zero_norm(z, &norm));
    OR_RETURN(read_all(m, z, ZERO_VALUE_GRAD, seen[step].grads));
    OR_RETURN(zero_step(z, 0.2f, &info));
    if (info.grad_norm != norm)
        toy_wrong(r, "step %d: norm is %.17g and %.17g", step, info.grad_norm, norm);
    if (r->rank == 0) {
        seen[step].norm = norm;
        seen[step].loss = info.carried[0];
    }
    return 0;
}

static void train(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct zero_config cfg = toy_config(r, s->stage);
    struct zero_place place;
    struct model *m = NULL;
    zero_ctx *z = NULL;
    int err = 0;
    cfg.mesh.pp = s->pp;
    cfg.mesh.dp_replicate = s->hybrid ? s->dp / 2 : 1;
    cfg.mesh.tp = s->tp;
    TOY_TRY(zero_find_place(&cfg, &place));
    if (!err)
        m = make_model(s, &place);
    cfg.optim.optimizer = ZERO_SGD;
    cfg.optim.weight_decay = 0;
    cfg.clip = 0;
    cfg.debug.log = toy_forget_line;
    cfg.pipeline.schedule = s->schedule;
    cfg.pipeline.stages_per_rank = s->per_rank;
    cfg.memory.prefetch = s->prefetch;
    cfg.debug.check = s->check;
    cfg.grad_sum = s->sum;
    cfg.grad_scale = s->grad_scale;
    cfg.grad_accum_steps = MICRO / s->dp;
    cfg.pipeline.activation_bytes = sizeof(float[MAX_TOKENS][C]);
    TOY_TRY(zero_wrap(&z, m->table, m->n_tensors, &cfg));
    for (int step = 0; !err && step < STEPS; step++)
        TOY_TRY(one_step(r, m, z, step));
    zero_unwrap(&z);
    free(m);
}

/* ---- the test ---- */

static void run(struct setup *s, int n)
{
    struct toy_rank r[MAX_WORLD];
    char what[160];
    if (!sample_has())
        return;
    bool rounds = s->per_rank > 1 && (MICRO / s->dp < s->pp || MICRO / s->dp % s->pp == 0);
    s->stage = n % 4;
    s->hybrid = s->stage == 3 && s->dp == 4 && n % 8 == 3;
    s->schedule = rounds && n % 3                 ? ZERO_SCHEDULE_INTERLEAVED
                  : s->per_rank > 1 || n % 3 == 0 ? ZERO_SCHEDULE_GPIPE
                                                  : ZERO_SCHEDULE_1F1B;
    s->prefetch = n % 3;
    s->tokens = 5 + n * 7 % (MAX_TOKENS - 4);
    s->sum = n % 4 == 1;
    s->check = n % 6 == 5;
    s->grad_scale = n % 5 == 2 ? -0.25 : 1;
    s->seed = 20261128u + (uint32_t)n;
    snprintf(what, sizeof what,
             "pp %d, dp %d, tp %d, %d stages a rank, stage %d, hybrid %d, schedule %d, %d tokens, sum %d",
             s->pp, s->dp, s->tp, s->per_rank, s->stage, s->hybrid, s->schedule, s->tokens, s->sum);
    memset(seen, 0xff, sizeof seen);
    toy_run(s->pp * s->dp * s->tp, train, s, r, what);
    for (int step = 0; step < STEPS; step++)
        compare(s, step, what);
}

/* ZeRO stages rotate over layouts, so that each stage runs with layouts of each kind. */
static void however_they_are_spread(void **state)
{
    int n = 0;
    for (int shift = 0; shift < 2; shift++)
        for (int pp = 1; pp <= 4; pp++)
            for (int dp = 1; dp <= 4; dp *= 2)
                for (int tp = 1; tp <= 4; tp *= 2)
                    for (int per_rank = 1; per_rank <= 3; per_rank++) {
                        struct setup s = {.pp = pp, .dp = dp, .tp = tp, .per_rank = per_rank};
                        if (pp * dp * tp <= MAX_WORLD && pp * per_rank <= LAYERS)
                            run(&s, n++ + 2 * shift);
                    }
    assert_true(n >= 100);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(however_they_are_spread)};
    return cmocka_run_group_tests_name("token mean", tests, NULL, NULL);
}
