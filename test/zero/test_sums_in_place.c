/* SPDX-License-Identifier: Apache-2.0 */
/* test_sums_in_place.c: gradients that are summed where backward writes them. This holds if one rank keeps
 * all of an f32 gradient (stage 0, or one rank). Tests the memory, that bits do not change, and when the
 * model may touch the gradient.
 *
 * The model trains by plain gradient descent in a custom optimizer, so that a plain program gives the exact
 * weights. */
#include "test/cmocka.h"
#include "test/kernels/random.h"
#include "test/zero/gpt2_table.h"
#include "test/zero/sample.h"
#include "test/zero/toy_net.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- plans of GPT-2 124M ---- */

static struct zero_plan_info plan_gpt2(int stage, int world, int accum, int in_place, enum zero_dtype dtype)
{
    struct zero_tensor t[N_GPT];
    struct zero_plan_info info;
    struct zero_config cfg = ZERO_CONFIG_INIT;
    cfg.stage = stage;
    cfg.launch.world = world;
    cfg.grad_accum_steps = accum;
    cfg.memory.grad_in_place = in_place;
    int32_t n = gpt2_describe(t);
    for (int32_t i = 0; i < n; i++)
        t[i].dtype = dtype;
    assert_int_equal(zero_plan(t, n, &cfg, &info), 0);
    assert_int_equal(info.n_params, 124439808);
    return info;
}

/* The plan must not exceed parameters, gradients and two moments of four bytes each. */
static void gpt2_costs_no_more_than_plain(void **state)
{
    const struct {
        int stage, world, accum, in_place;
    } cases[] = {{0, 1, 1, 0}, {1, 1, 1, 0}, {2, 1, 1, 0}, {3, 1, 1, 0},
                 {0, 2, 1, 0}, {0, 1, 8, 1}, {1, 1, 8, 1}, {0, 8, 1, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct zero_plan_info p =
            plan_gpt2(cases[i].stage, cases[i].world, cases[i].accum, cases[i].in_place, ZERO_F32);
        int64_t plain = 16 * p.n_params;
        if (p.bytes.total < plain || p.bytes.total > plain + 1000000)
            fail_msg("stage %d, world %d: %lld bytes, %lld more than plain", cases[i].stage, cases[i].world,
                     (long long)p.bytes.total, (long long)(p.bytes.total - plain));
        assert_int_equal(p.bytes.grad_shards, 0);
        assert_int_equal(p.bytes.param_slots, 0);
    }
}

/* If sums cannot be in place, the plan has a line for them. */
static void others_have_sums(void **state)
{
    int64_t all = 4 * INT64_C(124439808);
    assert_true(plan_gpt2(0, 1, 4, 0, ZERO_F32).bytes.grad_shards >= all); /* each micro-batch is reduced */
    assert_true(plan_gpt2(0, 1, 1, 0, ZERO_BF16).bytes.grad_shards >= all);
    assert_true(plan_gpt2(1, 2, 1, 0, ZERO_F32).bytes.grad_shards >= all / 2);
}

/* ---- a model ---- */

enum { N = 6, UNITS = 5, STEPS = 4, BIG = 200000 };

/* One unit has two tensors of odd sizes, and two layers are one stacked tensor. */
static const struct zero_tensor net[N] = {
    {.name = "first", .shape = {BIG, 2}, .dtype = ZERO_F32, .unit = 0},
    {.name = "layers", .shape = {2, 331, 7}, .dtype = ZERO_F32, .unit = 1, .flags = ZERO_STACKED},
    {.name = "bias", .shape = {333}, .dtype = ZERO_F32, .unit = 3},
    {.name = "weight", .shape = {127, 3}, .dtype = ZERO_F32, .unit = 3},
    {.name = "frozen", .shape = {1000}, .dtype = ZERO_F32, .unit = 4},
    {.name = "scale", .shape = {77}, .dtype = ZERO_F32, .unit = 4},
};
enum { FROZEN = 4 };

static int64_t net_elems(int t)
{
    int64_t n = 1;
    for (int d = 0; net[t].shape[d]; d++)
        n *= net[t].shape[d];
    return n;
}

static float start(int t, int64_t i)
{
    return random_unit(random_mix(random_mix((uint64_t)t + 5) + (uint64_t)i));
}

/* Returns the gradient in global micro-batch micro, in the unit's use number use. */
static float gradient(int t, int64_t i, float w, int step, int micro, int use)
{
    uint64_t seed = (uint64_t)(((step * 64 + micro) * 8 + use) * 8 + t);
    return 0.25f * w + random_unit(random_mix(random_mix(seed) + (uint64_t)i));
}

struct model {
    float *param[N], *grad[N], *own[N];
    struct zero_tensor table[N];
};

static void make(struct model *m)
{
    memset(m, 0, sizeof *m);
    for (int t = 0; t < N; t++) {
        m->own[t] = m->param[t] = malloc((size_t)net_elems(t) * sizeof(float));
        assert_non_null(m->own[t]);
        for (int64_t i = 0; i < net_elems(t); i++)
            m->own[t][i] = start(t, i);
        m->table[t] = net[t];
        m->table[t].param = (void **)&m->param[t];
        m->table[t].grad = t == FROZEN ? NULL : (void **)&m->grad[t];
    }
}

static void unmake(struct model *m)
{
    for (int t = 0; t < N; t++)
        free(m->own[t]);
}

/* ---- the plain program ---- */

/* uses: uses of unit 3 in a step; other units have one */
static void train_plain(struct model *m, int world, int uses)
{
    for (int step = 0; step < STEPS; step++)
        for (int t = 0; t < N; t++)
            for (int64_t i = 0; t != FROZEN && i < net_elems(t); i++) {
                float sum = 0, w = m->param[t][i];
                for (int use = 0; use < (net[t].unit == 3 ? uses : 1); use++) {
                    float all = gradient(t, i, w, step, 0, use);
                    for (int r = 1; r < world; r++)
                        all += gradient(t, i, w, step, r, use);
                    sum = use ? sum + all : all;
                }
                m->param[t][i] = w - 0.5f * (sum * (float)(1.0 / world));
            }
}

/* ---- the wrapped program ---- */

enum declares { DECLARES_NOTHING, DECLARES_ORDER, DECLARES_USES };

struct how {
    int stage, world;
    bool brackets, check;
    int uses; /* uses of unit 3 in a step */
    enum declares declares;
    /* the step in which the model writes to a gradient before zero_step, by a kept pointer; 0: none */
    int touch;
};

static int descend(void *arg, const struct zero_update *u)
{
    for (int64_t i = 0; i < u->n; i++)
        u->master[i] -= u->lr * u->grad[i];
    return 0;
}

static int32_t calls(struct zero_call *out, int uses)
{
    int32_t n = 0;
    for (int u = 0; u < UNITS; u++)
        for (int end = 0; end < 2; end++)
            out[n++] = (struct zero_call){.unit = u, .phase = ZERO_FORWARD, .is_end = end};
    for (int u = UNITS; u-- > 0;)
        for (int k = 0; k < 2 * (u == 3 ? uses : 1); k++)
            out[n++] = (struct zero_call){.unit = u, .phase = ZERO_BACKWARD, .is_end = k % 2};
    return n;
}

static void backward(struct model *m, int unit, int step, int micro, int use)
{
    for (int t = 0; t < N; t++) {
        int64_t slices = net[t].flags & ZERO_STACKED ? net[t].shape[0] : 1, n = net_elems(t) / slices,
                slice = unit - net[t].unit;
        for (int64_t i = slice * n; t != FROZEN && slice >= 0 && slice < slices && i < (slice + 1) * n; i++)
            m->grad[t][i] += gradient(t, i, m->param[t][i], step, micro, use);
    }
}

static int unit_backward(struct model *m, zero_ctx *z, const struct how *h, int unit, int step, int rank)
{
    int err = 0;
    for (int use = 0; !err && use < (unit == 3 ? h->uses : 1); use++) {
        if (h->brackets)
            err = zero_begin(z, unit, ZERO_BACKWARD);
        if (!err)
            backward(m, unit, step, rank, use);
        if (!err && h->brackets)
            err = zero_end(z, unit, ZERO_BACKWARD);
    }
    return err;
}

/* Whether the gradient holds its sum. With several uses, the sum is elsewhere. */
static bool has_its_sum(const struct how *h, int t)
{
    return (h->stage == 0 || h->world == 1) && (net[t].unit != 3 || h->uses == 1);
}

static int one_step(struct toy_rank *r, struct model *m, zero_ctx *z, int step)
{
    const struct how *h = r->arg;
    float *kept = m->grad[2];
    bool closed = h->check && h->stage >= 2; /* in check mode the pointers are never NULL */
    int err = 0;
    for (int u = 0; !err && h->brackets && u < UNITS; u++) {
        err = FIRST_ERROR(zero_begin(z, u, ZERO_FORWARD), zero_end(z, u, ZERO_FORWARD));
    }
    for (int u = UNITS; !err && u-- > 0;)
        err = unit_backward(m, z, h, u, step, r->rank);
    if (err)
        return err;
    /* With brackets, a gradient that holds its sum belongs to the library from zero_end to zero_step. Without
     * brackets it belongs to the model. */
    for (int t = 0; !closed && t < N; t++)
        if (t != FROZEN && !m->grad[t] != (h->brackets && (h->stage >= 2 || has_its_sum(h, t))))
            toy_wrong(r, "step %d: the gradient of %s is %s before zero_step", step, net[t].name,
                      m->grad[t] ? "there" : "away");
    if (h->touch == step + 1)
        kept[5] += 1;
    err = zero_step(z, 0.5f, NULL);
    for (int t = 0; !err && !closed && t < N; t++) {
        if (t == FROZEN)
            continue;
        if (!m->grad[t] != (h->stage >= 2))
            toy_wrong(r, "step %d: the gradient of %s is %s after zero_step", step, net[t].name,
                      m->grad[t] ? "there" : "away");
        /* The model may zero it here, as many programs do. */
        if (m->grad[t])
            memset(m->grad[t], 0, (size_t)net_elems(t) * sizeof(float));
    }
    return err;
}

static void keep_line(void *arg, const char *line)
{
    char *lines = arg;
    if (strstr(line, "brackets"))
        strncat(lines, line, 4000 - strlen(lines));
}

static bool as_planned(const struct zero_stats *s)
{
    return !memcmp(&s->allocated, &s->planned, sizeof s->planned);
}

static void look_at_memory(struct toy_rank *r, zero_ctx *z, const char *lines)
{
    const struct how *h = r->arg;
    struct zero_stats s;
    if (zero_get_stats(z, &s))
        toy_wrong(r, "no stats: %s", zero_last_error());
    if (!as_planned(&s) || *lines)
        toy_wrong(r, "%lld bytes beyond the plan, \"%s\"", (long long)(s.allocated.total - s.planned.total),
                  lines);
    int64_t plain = 0;
    for (int t = 0; t < N; t++)
        plain += net_elems(t) * (t == FROZEN ? 4 : 8);
    if ((h->world == 1 || h->stage == 0) && s.planned.total > plain + 1000000)
        toy_wrong(r, "planned are %lld bytes, of the plain program's %lld", (long long)s.planned.total,
                  (long long)plain);
}

static void run_rank(struct toy_rank *r)
{
    const struct how *h = r->arg;
    struct model m;
    zero_ctx *z = NULL;
    struct zero_call order[4 * UNITS + 4];
    char lines[4096] = "";
    make(&m);
    struct zero_config cfg = toy_config(r, h->stage);
    cfg.optim.update = descend;
    cfg.optim.weight_decay = 0;
    cfg.debug.log = keep_line;
    cfg.debug.log_arg = lines;
    cfg.debug.check = h->check;
    if (h->declares == DECLARES_ORDER) {
        cfg.memory.n_order = calls(order, h->uses);
        cfg.memory.order = order;
    }
    if (h->declares == DECLARES_USES)
        m.table[2].uses = h->uses; /* a tensor of unit 3 */
    int err = zero_wrap(&z, m.table, N, &cfg);
    for (int step = 0; !err && step < STEPS; step++)
        err = one_step(r, &m, z, step);
    if (!err)
        look_at_memory(r, z, lines);
    struct model plain;
    make(&plain);
    train_plain(&plain, r->world, h->uses);
    float *seen = malloc((size_t)net_elems(0) * sizeof(float));
    for (int t = 0; !err && seen && t < N; t++) {
        err = zero_read(z, t, ZERO_VALUE_PARAM, 0, net_elems(t), seen);
        if (!err && memcmp(seen, plain.param[t], (size_t)net_elems(t) * sizeof(float)) != 0)
            toy_wrong(r, "%s is not what the plain program has", net[t].name);
    }
    toy_note(r, err);
    free(seen);
    unmake(&plain);
    zero_unwrap(&z);
    unmake(&m);
}

static void run(struct how h, int code, const char *says)
{
    struct toy_rank ranks[MAX_TOY_RANKS];
    if (!code && !sample_has())
        return;
    toy_ranks(h.world, run_rank, &h, ranks);
    for (int i = 0; i < h.world; i++)
        if (ranks[i].err != code || *ranks[i].wrong || !strstr(ranks[i].text, says))
            fail_msg("stage %d, world %d, %d uses%s%s%s: rank %d: %d %s; %s", h.stage, h.world, h.uses,
                     h.declares ? ", declared" : "", h.brackets ? ", bracketed" : "",
                     h.check ? ", checked" : "", i, ranks[i].err, ranks[i].text, ranks[i].wrong);
}

static void the_plain_bits_in_the_plain_memory(void **state)
{
    for (int world = 1; world <= 3; world++)
        for (int stage = 0; stage <= (world == 1 ? 3 : 0); stage++)
            for (int brackets = stage >= 2; brackets <= 1; brackets++)
                for (int check = 0; check <= 1; check++)
                    run((struct how){.stage = stage,
                                     .world = world,
                                     .brackets = brackets,
                                     .uses = 1,
                                     .declares = (enum declares)((world + stage) % 3),
                                     .check = check},
                        0, "");
}

/* Several declared backward brackets of a unit add up, at every stage. If they are not declared, the second
 * one is refused. */
static void a_second_bracket(void **state)
{
    for (int uses = 2; uses <= 3; uses++)
        for (int world = 1; world <= 3; world++)
            for (int stage = 0; stage <= 3; stage++)
                for (int declares = DECLARES_NOTHING; declares <= DECLARES_USES; declares++) {
                    struct how h = {.stage = stage,
                                    .world = world,
                                    .brackets = true,
                                    .uses = uses,
                                    .declares = (enum declares)declares,
                                    .check = (stage + world + uses + declares) % 2};
                    bool refused = declares == DECLARES_NOTHING;
                    run(h, refused ? ZERO_ERR_ORDER : 0,
                        refused ? "zero_begin: unit 3 has had 1 backward bracket" : "");
                }
}

/* At stages 0 and 1 a kept pointer stays valid. Check mode finds the write through it. */
static void a_write_before_the_step_is_found(void **state)
{
    for (int stage = 0; stage <= 1; stage++)
        for (int touch = 1; touch <= 2; touch++)
            run(
                (struct how){
                    .stage = stage, .world = 1, .brackets = true, .uses = 1, .check = true, .touch = touch},
                ZERO_ERR_ORDER, "it changed the gradient of tensor bias (unit 3) between its zero_end");
}

/* ---- more brackets than declared, at any stage ---- */

enum { OFTEN_STEPS = 2, USED_OFTEN = 2 };

struct often {
    int stage, accum, deterministic, uses; /* uses: uses of unit USED_OFTEN in a micro-batch */
};

static int use_often(zero_ctx *z, int uses)
{
    int err = 0;
    for (int i = 1; !err && i < uses; i++) {
        err = FIRST_ERROR(zero_begin(z, USED_OFTEN, ZERO_BACKWARD), zero_end(z, USED_OFTEN, ZERO_BACKWARD));
    }
    return err;
}

/* One bracket too many is refused, changes nothing and takes no memory. */
static void run_often(struct toy_rank *r)
{
    struct often *o = r->arg;
    struct toy m;
    zero_ctx *z = NULL;
    char says[160];
    struct zero_stats s;
    struct zero_config cfg = toy_config(r, o->stage);
    cfg.grad_accum_steps = o->accum;
    cfg.deterministic = o->deterministic;
    cfg.debug.log = toy_forget_line;
    toy_make(&m);
    m.table[TOY_STACKED].uses = o->uses == 1 ? 0 : o->uses;
    int err = zero_wrap(&z, m.table, TOY_TENSORS, &cfg);
    toy_note(r, err);
    snprintf(says, sizeof says, "unit %d has had %d backward bracket%s since the last zero_step", USED_OFTEN,
             o->uses * o->accum, o->uses * o->accum == 1 ? "" : "s");
    for (int step = 0; step < OFTEN_STEPS; step++) {
        for (int micro = 0; micro < o->accum; micro++) {
            TOY_TRY(toy_forward(&m, z, true));
            TOY_TRY(toy_backward(&m, z, true, step, micro * r->world + r->rank));
            TOY_TRY(use_often(z, o->uses));
        }
        if (!err)
            toy_expect(r, zero_begin(z, USED_OFTEN, ZERO_BACKWARD), ZERO_ERR_ORDER, says);
        TOY_TRY(zero_step(z, 1e-2f, NULL));
    }
    if (!err && (zero_get_stats(z, &s) || !as_planned(&s)))
        toy_wrong(r, "%lld bytes of %lld planned", (long long)s.allocated.total, (long long)s.planned.total);
    TOY_TRY(toy_hash(z, 2, &r->hash));
    zero_unwrap(&z);
    toy_free(&m);
}

static void more_than_declared_is_refused(void **state)
{
    for (int stage = 0; stage < TOY_STAGES; stage++)
        for (int world = 1; world <= TOY_HYBRID_WORLD; world++) {
            uint64_t once = 0;
            for (int uses = 1; toy_has_stage(world, stage) && uses <= 3; uses++) {
                struct toy_rank r[MAX_TOY_RANKS];
                struct often o = {
                    .stage = stage, .accum = 1 + world % 2, .deterministic = stage != 2, .uses = uses};
                char what[64];
                snprintf(what, sizeof what, "stage %d, world %d, %d uses", stage, world, uses);
                toy_run(world, run_often, &o, r, what);
                once = uses == 1 ? r[0].hash : once;
                for (int i = 0; i < world; i++) /* the further brackets add zeros */
                    if (r[i].hash != once)
                        fail_msg("%s: rank %d has other weights than with one bracket", what, i);
            }
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gpt2_costs_no_more_than_plain),      cmocka_unit_test(others_have_sums),
        cmocka_unit_test(the_plain_bits_in_the_plain_memory), cmocka_unit_test(a_second_bracket),
        cmocka_unit_test(a_write_before_the_step_is_found),   cmocka_unit_test(more_than_declared_is_refused),
    };
    return cmocka_run_group_tests_name("sums_in_place", tests, NULL, NULL);
}
