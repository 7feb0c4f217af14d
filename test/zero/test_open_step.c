/* SPDX-License-Identifier: Apache-2.0 */
/* test_open_step.c: zero_norm before the update, steps that zero_drop drops, and values that a step carries.
 *
 * A toy model trains with and without these calls, at every stage, on one to three ranks that are threads,
 * with and without brackets. Weights, masters and moments must have the same bits, and zero_norm must agree
 * with zero_step. */
#include "test/cmocka.h"
#include "test/zero/toy_net.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STEPS = 3, WORLDS = 3 };

/* Calls that a run makes besides training. */
enum { NORMS = 1, DROPS = 2 };

struct setup {
    int stage, accum, world, extras;
    bool brackets, in_place;
    double norm[STEPS]; /* on rank 0 */
};

static int micro_batches(struct toy_rank *r, struct toy *m, zero_ctx *z, int step, int n)
{
    const struct setup *s = r->arg;
    int err = 0;
    for (int k = 0; k < n; k++) {
        if (k && !s->brackets && !s->in_place)
            TOY_TRY(zero_micro(z));
        TOY_TRY(toy_forward(m, z, s->brackets));
        TOY_TRY(toy_backward(m, z, s->brackets, step, k * r->world + r->rank));
    }
    return err;
}

/* Drops three steps: in the middle, at the end, and after the norm. */
static int dropped_steps(struct toy_rank *r, struct toy *m, zero_ctx *z, int step)
{
    const struct setup *s = r->arg;
    int err = 0;
    for (int way = 0; way < 3; way++) {
        TOY_TRY(micro_batches(r, m, z, 100 + step * 3 + way, way ? s->accum : (s->accum + 1) / 2));
        double norm = -1;
        if (way == 2)
            TOY_TRY(zero_norm(z, &norm));
        if (!err && way == 2 && !(norm > 0))
            toy_wrong(r, "the norm of a step to drop is %g", norm);
        TOY_TRY(zero_drop(z));
    }
    return err;
}

static void train(struct toy_rank *r)
{
    struct setup *s = r->arg;
    struct toy m;
    zero_ctx *z = NULL;
    struct zero_config cfg = toy_config(r, s->stage);
    cfg.grad_accum_steps = s->accum;
    cfg.memory.grad_in_place = s->in_place;
    cfg.clip = 0.5f;
    toy_make(&m);
    if (s->in_place) /* otherwise every micro-batch would be reduced separately */
        m.table[4].flags = 0;
    int err = 0;
    TOY_TRY(zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
    for (int step = 0; !err && step < STEPS; step++) {
        if (s->extras & DROPS)
            TOY_TRY(dropped_steps(r, &m, z, step));
        TOY_TRY(micro_batches(r, &m, z, step, s->accum));
        double norm = -1, again = -1;
        if (s->extras & NORMS) {
            TOY_TRY(zero_norm(z, &norm));
            TOY_TRY(toy_forward(&m, z, s->brackets)); /* an evaluation is allowed here */
            TOY_TRY(zero_norm(z, &again));
        }
        struct zero_step_info info;
        TOY_TRY(zero_step(z, 1e-2f, &info));
        if (!err && (info.t != step + 1 || info.skipped || !info.clipped || !(info.grad_norm > 0)))
            toy_wrong(r, "step %d: t %d, skipped %d, clipped %d, norm %g", step, (int)info.t, info.skipped,
                      info.clipped, info.grad_norm);
        if (!err && (s->extras & NORMS) &&
            (memcmp(&norm, &info.grad_norm, sizeof norm) || memcmp(&again, &norm, sizeof norm)))
            toy_wrong(r, "step %d: zero_norm said %.17g and %.17g, zero_step %.17g", step, norm, again,
                      info.grad_norm);
        if (r->rank == 0)
            s->norm[step] = info.grad_norm;
    }
    struct zero_stats stats;
    TOY_TRY(zero_get_stats(z, &stats));
    if (!err && (stats.n_dropped != ((s->extras & DROPS) ? 3 * STEPS : 0) || stats.n_steps != STEPS ||
                 stats.n_skipped))
        toy_wrong(r, "%d dropped, %d steps, %d skipped", (int)stats.n_dropped, (int)stats.n_steps,
                  (int)stats.n_skipped);
    TOY_TRY(toy_hash(z, 2, &r->hash));
    zero_unwrap(&z);
    toy_free(&m);
}

/* Norms and drops do not change what is trained. */
static void leaves_no_trace(void **state)
{
    static const int extras[] = {NORMS, NORMS | DROPS};
    for (int world = 1; world <= TOY_HYBRID_WORLD; world++)
        for (int stage = 0; stage < TOY_STAGES; stage++)
            for (int way = 0; way < 4; way++) { /* brackets or not; reduced in place or not */
                bool brackets = way & 1, in_place = way & 2;
                if (!toy_has_stage(world, stage) || (stage > 1 && !brackets) ||
                    (in_place && (stage == 2 || stage == 3)))
                    continue;
                int accum = in_place || (world + stage) % 2 ? 3 : 1;
                struct setup plain = {.stage = stage,
                                      .accum = accum,
                                      .world = world,
                                      .brackets = brackets,
                                      .in_place = in_place};
                struct toy_rank a[TOY_HYBRID_WORLD], b[TOY_HYBRID_WORLD];
                toy_run(world, train, &plain, a, "plain");
                for (size_t i = 0; i < sizeof extras / sizeof *extras; i++) {
                    struct setup s = plain;
                    char what[128];
                    s.extras = extras[i];
                    snprintf(what, sizeof what,
                             "stage %d world %d accum %d brackets %d in place %d extras %d", stage, world,
                             accum, brackets, in_place, s.extras);
                    toy_run(world, train, &s, b, what);
                    for (int k = 0; k < world; k++)
                        if (b[k].hash != a[0].hash)
                            fail_msg("%s: other weights on rank %d", what, k);
                    if (memcmp(s.norm, plain.norm, sizeof s.norm))
                        fail_msg("%s: other norms", what);
                }
            }
}

/* ---- a custom rule for dropping steps ---- */

/* One gradient is not finite on one rank. All ranks see it, drop the step and go on. */
static void drop_what_is_not_finite(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct toy m;
    zero_ctx *z;
    struct zero_config cfg = toy_config(r, s->stage);
    int err = toy_open(r, &m, &z, &cfg), n_dropped = 0;
    for (int step = 0; !err && step < STEPS; step++) {
        for (int tries = 0; !err && tries < 2; tries++) {
            double norm = 0;
            TOY_TRY(toy_forward(&m, z, true));
            for (int u = TOY_UNITS; !err && u-- > 0;) {
                TOY_TRY(zero_begin(z, u, ZERO_BACKWARD));
                if (!err)
                    toy_add_gradient(&m, u, step, r->rank);
                if (!err && u == 0 && step == 1 && tries == 0 && r->rank == r->world - 1)
                    toy_poison_gradient(&m, 0, NAN);
                TOY_TRY(zero_end(z, u, ZERO_BACKWARD));
            }
            TOY_TRY(zero_norm(z, &norm));
            if (!err && isfinite(norm))
                break;
            TOY_TRY(zero_drop(z));
            n_dropped++;
        }
        TOY_TRY(zero_step(z, 1e-2f, NULL));
    }
    if (!err && n_dropped != 1)
        toy_wrong(r, "%d steps were dropped", n_dropped);
    TOY_TRY(toy_hash(z, 2, &r->hash));
    toy_close(&m, &z);
}

static void drops_what_is_not_finite(void **state)
{
    for (int world = 1; world <= WORLDS; world++)
        for (int stage = 0; stage <= 3; stage++) {
            struct setup s = {.stage = stage};
            struct toy_rank r[WORLDS];
            toy_run(world, drop_what_is_not_finite, &s, r, "not finite");
            for (int k = 1; k < world; k++)
                assert_int_equal(r[k].hash, r[0].hash);
        }
}

/* ---- values that a step carries, and its outcome without a wait ---- */

static double loss_of(int rank, int step, int i)
{
    return 1.0 / (3 + rank + 7 * step + 31 * i) * (i % 2 ? -1e9 : 1e-9);
}

static bool same(double a, double b)
{
    return !memcmp(&a, &b, sizeof a);
}

/* The means equal those of zero_mean, bit by bit, and come with the step's outcome, whether the step waits or
 * not. */
static void carry(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct toy m;
    zero_ctx *z;
    struct zero_config cfg = toy_config(r, s->stage);
    struct zero_step_info info, last;
    int err = toy_open(r, &m, &z, &cfg);
    toy_expect(r, zero_last_step(z, &last), ZERO_ERR_ORDER, "there was no zero_step yet");
    for (int step = 0; !err && step < 10; step++) {
        int n = step % 10 == 9 ? 0 : step; /* 0..8, then none */
        double values[8], means[8];
        for (int i = 0; i < n; i++)
            means[i] = values[i] = loss_of(r->rank, step, i);
        TOY_TRY(zero_mean(z, means, n));
        if (step == 5) { /* a dropped step drops its values too */
            TOY_TRY(zero_carry(z, values, 2));
            TOY_TRY(micro_batches(r, &m, z, 50, 1));
            TOY_TRY(zero_drop(z));
        }
        if (step == 6)
            TOY_TRY(zero_carry(z, values, 1)); /* only the last call counts */
        TOY_TRY(zero_carry(z, values, n));
        memset(values, 0xff, sizeof values);
        TOY_TRY(micro_batches(r, &m, z, step, 1));
        double norm;
        if (step % 3 == 0)
            TOY_TRY(zero_norm(z, &norm));
        bool waits = step % 2;
        TOY_TRY(zero_step(z, 1e-2f, waits ? &info : NULL));
        memset(&last, 0xff, sizeof last);
        int code = err ? err : zero_last_step(z, &last);
        if (!err && (code == ZERO_PENDING ? waits || last.t != -1 : code != 0))
            toy_wrong(r, "step %d: %d, t %d", step, code, (int)last.t);
        double nothing = 0;
        TOY_TRY(zero_mean(z, &nothing, 1)); /* waits for all outcomes */
        TOY_TRY(zero_last_step(z, &last));
        if (!err && waits && memcmp(&info, &last, sizeof last))
            toy_wrong(r, "step %d: zero_last_step says something else than zero_step", step);
        if (!err && (last.t != step + 1 || last.skipped || last.n_carried != n || !(last.grad_norm > 0)))
            toy_wrong(r, "step %d: t %d, skipped %d, %d carried, norm %g", step, (int)last.t, last.skipped,
                      last.n_carried, last.grad_norm);
        for (int i = 0; !err && i < n; i++)
            if (!same(last.carried[i], means[i]))
                toy_wrong(r, "step %d: %.17g came back for %.17g", step, last.carried[i], means[i]);
    }
    toy_close(&m, &z);
}

static void carries_values(void **state)
{
    for (int world = 1; world <= WORLDS; world++)
        for (int stage = 0; stage <= 3; stage++) {
            struct setup s = {.stage = stage, .accum = 1, .brackets = true};
            struct toy_rank r[WORLDS];
            toy_run(world, carry, &s, r, "carried values");
        }
}

/* A carried value need not be finite, and also arrives with a skipped step. */
static void carry_through_a_skipped_step(struct toy_rank *r)
{
    struct toy m;
    zero_ctx *z;
    struct zero_config cfg = toy_config(r, 2);
    struct zero_step_info info;
    int err = toy_open(r, &m, &z, &cfg);
    TOY_TRY(toy_forward(&m, z, true));
    for (int u = TOY_UNITS; !err && u-- > 0;) {
        TOY_TRY(zero_begin(z, u, ZERO_BACKWARD));
        if (!err)
            toy_add_gradient(&m, u, 0, r->rank);
        if (!err && u == 0)
            toy_poison_gradient(&m, 0, INFINITY);
        TOY_TRY(zero_end(z, u, ZERO_BACKWARD));
    }
    double values[2] = {r->rank ? 1 : NAN, r->rank + 1};
    TOY_TRY(zero_carry(z, values, 2));
    TOY_TRY(zero_step(z, 1e-2f, &info));
    if (!err && (!info.skipped || info.t != 0 || info.n_carried != 2 || !isnan(info.carried[0]) ||
                 info.carried[1] != 1.5))
        toy_wrong(r, "skipped %d, t %d, %d carried: %g, %g", info.skipped, (int)info.t, info.n_carried,
                  info.carried[0], info.carried[1]);
    toy_close(&m, &z);
}

static void carries_through_a_skipped_step(void **state)
{
    struct toy_rank r[WORLDS];
    toy_run(2, carry_through_a_skipped_step, NULL, r, "skipped");
}

/* ---- gradients that are written late ---- */

/* A model without brackets continues backward after the norm. Its gradients would be lost, so the step is
 * refused. */
static void add_late(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct toy m;
    zero_ctx *z;
    struct zero_config cfg = toy_config(r, s->stage);
    double norm;
    int err = toy_open(r, &m, &z, &cfg);
    TOY_TRY(micro_batches(r, &m, z, 0, 1));
    TOY_TRY(zero_norm(z, &norm));
    TOY_TRY(micro_batches(r, &m, z, 0, 1));
    if (!err)
        toy_expect(r, zero_step(z, 1e-2f, NULL), ZERO_ERR_ORDER, "was written after zero_norm");
    TOY_TRY(zero_drop(z));
    TOY_TRY(micro_batches(r, &m, z, 0, 1));
    TOY_TRY(zero_step(z, 1e-2f, NULL));
    TOY_TRY(toy_hash(z, 2, &r->hash));
    toy_close(&m, &z);
}

static void step_once(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct toy m;
    zero_ctx *z;
    struct zero_config cfg = toy_config(r, s->stage);
    int err = toy_open(r, &m, &z, &cfg);
    TOY_TRY(micro_batches(r, &m, z, 0, 1));
    TOY_TRY(zero_step(z, 1e-2f, NULL));
    TOY_TRY(toy_hash(z, 2, &r->hash));
    toy_close(&m, &z);
}

static void gradients_written_late(void **state)
{
    for (int world = 1; world <= WORLDS; world++)
        for (int stage = 0; stage <= 1; stage++) {
            struct setup s = {.stage = stage};
            struct toy_rank a[WORLDS], b[WORLDS];
            toy_run(world, step_once, &s, a, "once");
            toy_run(world, add_late, &s, b, "late");
            assert_int_equal(a[0].hash, b[0].hash);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(leaves_no_trace),        cmocka_unit_test(drops_what_is_not_finite),
        cmocka_unit_test(carries_values),         cmocka_unit_test(carries_through_a_skipped_step),
        cmocka_unit_test(gradients_written_late),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
