/* SPDX-License-Identifier: Apache-2.0 */
/* test_gradients.c: gradients read after backward and before the step (ZERO_VALUE_GRAD).
 *
 * A toy model trains at every stage on one to three ranks that are threads. A custom optimizer records the
 * gradients that it gets. The gradients read before must be equal to them, bit by bit. */
#include "test/cmocka.h"
#include "test/zero/toy_net.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STEPS = 3, WORLDS = 3, MAX_VALUES = 2048 };

struct setup {
    int stage, accum;
    bool brackets, in_place, reads, asks;
    float clip;
    double grad_scale;
};

/* Gradients that the optimizer of one rank got in the last step. */
struct given {
    float grad[TOY_TENSORS][MAX_VALUES];
    bool is[TOY_TENSORS][MAX_VALUES];
};

static int keep(void *arg, const struct zero_update *u)
{
    struct given *g = arg;
    for (int64_t i = 0; i < u->n; i++) {
        g->grad[u->tensor_index][u->first + i] = u->grad[i];
        g->is[u->tensor_index][u->first + i] = true;
        u->master[i] -= u->lr * u->grad[i];
    }
    return 0;
}

static int micro_batches(struct toy_rank *r, struct toy *m, zero_ctx *z, int step)
{
    const struct setup *s = r->arg;
    int err = 0;
    for (int k = 0; k < s->accum; k++) {
        if (k && !s->brackets && !s->in_place)
            TOY_TRY(zero_micro(z));
        TOY_TRY(toy_forward(m, z, s->brackets));
        TOY_TRY(toy_backward(m, z, s->brackets, step, k * r->world + r->rank));
    }
    return err;
}

/* Reads each gradient in two parts, cut anywhere in blocks of 32 and shards. */
static int read_gradients(zero_ctx *z, int step, float grad[TOY_TENSORS][MAX_VALUES])
{
    int err = 0;
    for (int t = TOY_TENSORS; !err && t-- > 0;) {
        int64_t n = toy_elems(t), cut = t == TOY_FROZEN ? 0 : (step * 37 + t * 13) % (n + 1);
        memset(grad[t], 0xff, sizeof grad[t]);
        if (t == TOY_FROZEN)
            continue;
        err = FIRST_ERROR(zero_read(z, t, ZERO_VALUE_GRAD, cut, n - cut, grad[t] + cut),
                          zero_read(z, t, ZERO_VALUE_GRAD, 0, cut, grad[t]));
    }
    return err;
}

static void train(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct toy m;
    zero_ctx *z = NULL;
    struct given *g = calloc(1, sizeof *g);
    float(*grad)[MAX_VALUES] = calloc(TOY_TENSORS, sizeof *grad);
    struct zero_config cfg = toy_config(r, s->stage);
    int err = 0, n_given = 0, n_not_zero = 0;
    cfg.optim.weight_decay = 0;
    cfg.optim.update = keep;
    cfg.optim.update_arg = g;
    cfg.clip = s->clip;
    cfg.grad_scale = s->grad_scale;
    cfg.grad_accum_steps = s->accum;
    cfg.memory.grad_in_place = s->in_place;
    toy_make(&m);
    if (s->in_place)
        m.table[4].flags = 0;
    TOY_TRY(zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
    for (int step = 0; !err && step < STEPS; step++) {
        struct zero_step_info info;
        double norm = -1, nothing = 0;
        TOY_TRY(micro_batches(r, &m, z, step));
        if (s->asks)
            TOY_TRY(zero_norm(z, &norm));
        if (s->reads)
            TOY_TRY(read_gradients(z, step, grad));
        TOY_TRY(zero_step(z, 1e-2f, &info));
        TOY_TRY(zero_mean(z, &nothing, 1)); /* waits until every update has run */
        if (!err && info.clipped != (s->clip > 0))
            toy_wrong(r, "step %d: clipped %d", step, info.clipped);
        for (int t = 0; !err && s->reads && t < TOY_TENSORS; t++)
            for (int64_t i = 0; i < toy_elems(t); i++) {
                n_given += g->is[t][i];
                n_not_zero += g->is[t][i] && grad[t][i] != 0;
                if (g->is[t][i] && memcmp(&g->grad[t][i], &grad[t][i], sizeof(float)))
                    toy_wrong(r, "step %d: element %d of tensor %d: read %.9g, updated with %.9g", step,
                              (int)i, t, (double)grad[t][i], (double)g->grad[t][i]);
                if (t != TOY_FROZEN && !isfinite(grad[t][i]))
                    toy_wrong(r, "step %d: element %d of tensor %d: not read", step, (int)i, t);
            }
        memset(g, 0xff, sizeof *g);
        memset(g->is, 0, sizeof g->is);
    }
    /* The last of several ranks may own padding only. */
    if (!err && s->reads && r->rank == 0 && (n_given == 0 || n_not_zero == 0))
        toy_wrong(r, "%d elements were updated, %d of them not by 0", n_given, n_not_zero);
    TOY_TRY(toy_hash(z, 0, &r->hash));
    zero_unwrap(&z);
    toy_free(&m);
    free(g);
    free(grad);
}

static void as_the_update_has_them(void **state)
{
    for (int world = 1; world <= TOY_HYBRID_WORLD; world++)
        for (int stage = 0; stage < TOY_STAGES; stage++)
            for (int way = 0; way < 4; way++) {
                bool brackets = way & 1, in_place = way & 2;
                if (!toy_has_stage(world, stage) || (stage > 1 && !brackets))
                    continue;
                struct setup s = {.stage = stage,
                                  .accum = in_place || (world + stage) % 2 ? 3 : 1,
                                  .brackets = brackets,
                                  .in_place = in_place,
                                  .asks = (way + stage + world) % 2,
                                  .clip = (stage + way / 2) % 2 ? 0.05f : 0,
                                  .grad_scale = stage == 2 ? -0.25 : 1};
                struct toy_rank a[TOY_HYBRID_WORLD], b[TOY_HYBRID_WORLD];
                char what[96];
                snprintf(what, sizeof what, "stage %d, accum %d, brackets %d, in place %d", stage, s.accum,
                         brackets, in_place);
                toy_run(world, train, &s, a, what);
                s.reads = true;
                toy_run(world, train, &s, b, what);
                for (int k = 0; k < world; k++)
                    if (b[k].hash != a[0].hash)
                        fail_msg("%s: reading gradients changed the weights of rank %d", what, k);
            }
}

/* A model that sums its micro-batches itself gives each rank one contribution, which is reduced once. So each
 * world has one hash, whatever the stage. */
static void in_place_has_one_hash_at_every_stage(void **state)
{
    for (int world = 1; world <= WORLDS; world++) {
        uint64_t expected = 0;
        for (int stage = 0; stage <= 3; stage++) {
            struct setup s = {
                .stage = stage, .accum = 3, .brackets = true, .in_place = true, .grad_scale = 1};
            struct toy_rank r[WORLDS];
            char what[64];
            snprintf(what, sizeof what, "in place, world %d, stage %d", world, stage);
            toy_run(world, train, &s, r, what);
            expected = stage ? expected : r[0].hash;
            for (int k = 0; k < world; k++)
                if (r[k].hash != expected)
                    fail_msg("%s: rank %d ends in other weights than at stage 0", what, k);
        }
    }
}

/* One element of one rank's gradient is not finite. Reading shows which tensor has it, before a step that
 * would be skipped. */
static void find_what_is_not_finite(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct toy m;
    zero_ctx *z;
    struct zero_config cfg = toy_config(r, s->stage);
    float x[MAX_VALUES];
    cfg.clip = 0.5f;
    int err = toy_open(r, &m, &z, &cfg);
    TOY_TRY(toy_forward(&m, z, true));
    for (int u = TOY_UNITS; !err && u-- > 0;) {
        TOY_TRY(zero_begin(z, u, ZERO_BACKWARD));
        if (!err)
            toy_add_gradient(&m, u, 0, r->rank);
        if (!err && u == 0 && r->rank == r->world - 1)
            toy_poison_gradient(&m, 0, INFINITY);
        TOY_TRY(zero_end(z, u, ZERO_BACKWARD));
    }
    for (int t = 0; !err && t < TOY_TENSORS; t++) {
        if (t == TOY_FROZEN)
            continue;
        /* Only rank 0 receives the values. */
        TOY_TRY(zero_read(z, t, ZERO_VALUE_GRAD, 0, toy_elems(t), r->rank == 0 ? x : NULL));
        for (int64_t i = 0; !err && r->rank == 0 && i < toy_elems(t); i++)
            if (isfinite(x[i]) != (t != 0 || i != 0))
                toy_wrong(r, "element %d of tensor %d is %g", (int)i, t, (double)x[i]);
    }
    TOY_TRY(zero_drop(z));
    TOY_TRY(micro_batches(r, &m, z, 1));
    TOY_TRY(zero_step(z, 1e-2f, NULL));
    toy_close(&m, &z);
}

static void finds_what_is_not_finite(void **state)
{
    for (int world = 1; world <= WORLDS; world++)
        for (int stage = 0; stage <= 3; stage++) {
            struct setup s = {.stage = stage, .accum = 1, .brackets = true};
            struct toy_rank r[WORLDS];
            toy_run(world, find_what_is_not_finite, &s, r, "not finite");
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(as_the_update_has_them),
        cmocka_unit_test(in_place_has_one_hash_at_every_stage),
        cmocka_unit_test(finds_what_is_not_finite),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
