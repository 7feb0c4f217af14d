/* SPDX-License-Identifier: Apache-2.0 */
/* test_misuse_first_values.c: ways to use the library wrongly (misuse.h):
 * first values, and models that have none yet. */
#include "test/zero/misuse.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static void has_no_values(struct program *p)
{
    for (int t = 0; t < p->n_tensors; t++)
        p->model.param[t] = NULL;
}

static void nobodys_values(struct program *p)
{
    p->cfg.init_from = ZERO_INIT_RANK0;
    has_no_values(p);
}

static void values_later(struct program *p)
{
    p->cfg.init_from = ZERO_INIT_LATER;
    has_no_values(p);
}

static void no_such_source(struct program *p)
{
    p->cfg.init_from = 4;
}

static void other_source(struct program *p)
{
    p->cfg.init_from = p->odd ? ZERO_INIT_LATER : ZERO_INIT_MODEL;
}

static int refuses_to_init(void *arg, int32_t tensor, int64_t first, int64_t n, void *dst)
{
    struct program *p = arg;
    memset(dst, 0, (size_t)(n * (p->model.table[tensor].dtype == ZERO_F32 ? 4 : 2)));
    (void)first;
    return p->odd && tensor == 4 ? -3 : 0;
}

static int inits_nothing(void *arg, int32_t tensor, int64_t first, int64_t n, void *dst)
{
    (void)arg, (void)tensor, (void)first, (void)n, (void)dst;
    return 0;
}

static void calls_nobody(struct program *p)
{
    p->cfg.init_from = ZERO_INIT_CALL;
}

static void callback_nobody_asks(struct program *p)
{
    p->cfg.init = inits_nothing;
}

static void callback_that_fails(struct program *p)
{
    p->cfg.init_from = ZERO_INIT_CALL;
    p->cfg.init = refuses_to_init;
    p->cfg.init_arg = p;
    has_no_values(p);
}

static void callback_that_writes_nothing(struct program *p)
{
    p->cfg.init_from = ZERO_INIT_CALL;
    p->cfg.init = inits_nothing;
    has_no_values(p);
}

static int computes_too_early(struct program *p)
{
    return zero_begin(p->z, 0, ZERO_FORWARD);
}

static int accumulates_too_early(struct program *p)
{
    return zero_micro(p->z);
}

static int norms_too_early(struct program *p)
{
    double norm;
    return zero_norm(p->z, &norm);
}

static int saves_too_early(struct program *p)
{
    return zero_save(p->z, "/tmp/there-is-no-such-folder/ckpt", NULL);
}

static int exports_too_early(struct program *p)
{
    return zero_export(p->z, "/tmp/there-is-no-such-folder", NULL, 0, 0);
}

static int gathers_too_early(struct program *p)
{
    return zero_gather_all(p->z, 0);
}

static int reads_too_early(struct program *p)
{
    float x[8];
    return zero_read(p->z, 0, ZERO_VALUE_PARAM, 0, 8, x);
}

static int write_values(struct program *p, int tensor, int64_t first, int64_t n)
{
    int64_t size = p->model.table[tensor].dtype == ZERO_F32 ? 4 : 2;
    return zero_write(p->z, tensor, ZERO_VALUE_PARAM, first, n,
                      (const char *)p->model.own[tensor] + first * size);
}

static int forgets_an_element(struct program *p)
{
    int err = 0;
    for (int t = 0; !err && t < p->n_tensors; t++)
        err = write_values(p, t, 0, toy_elems(t) - (t == 2));
    return err ? err : zero_begin(p->z, 0, ZERO_FORWARD);
}

static int writes_states_alone(struct program *p)
{
    int err = zero_write(p->z, 0, ZERO_VALUE_STATE, 0, toy_elems(0), p->spare[0]);
    return err ? err : zero_begin(p->z, 0, ZERO_FORWARD);
}

static int writes_other_ranges(struct program *p)
{
    int err = write_values(p, 0, p->odd ? 8 : 0, 8);
    return err ? err : zero_begin(p->z, 0, ZERO_FORWARD);
}

/* Backward computes in memory that the library does not know. */
static int writes_elsewhere(struct program *p)
{
    int err = 0;
    for (int step = 0; !err && step < STEPS; step++) {
        err = toy_forward(&p->model, p->z, true);
        for (int u = TOY_UNITS; !err && u-- > 0;) {
            err = zero_begin(p->z, u, ZERO_BACKWARD);
            if (!err)
                err = zero_end(p->z, u, ZERO_BACKWARD);
        }
        if (!err)
            err = zero_step(p->z, 1e-2f, NULL);
    }
    return err;
}

static int writes_elsewhere_unbracketed(struct program *p)
{
    struct zero_step_info info;
    return zero_step(p->z, 1e-2f, &info);
}

static int forgets_a_unit(struct program *p)
{
    int err = toy_forward(&p->model, p->z, true);
    for (int u = TOY_UNITS; !err && u-- > 0;) {
        err = zero_begin(p->z, u, ZERO_BACKWARD);
        if (!err && u != 2)
            toy_add_gradient(&p->model, u, 0, p->rank->rank);
        if (!err)
            err = zero_end(p->z, u, ZERO_BACKWARD);
    }
    return err ? err : zero_step(p->z, 1e-2f, NULL);
}

static int steps_twice_unbracketed(struct program *p)
{
    struct zero_step_info info;
    int err = toy_backward(&p->model, p->z, false, 0, p->rank->rank);
    if (!err)
        err = zero_step(p->z, 1e-2f, NULL);
    return err ? err : zero_step(p->z, 1e-2f, &info);
}

static void assigns_gradient(struct program *p)
{
    p->model.grad[0] = p->spare[0];
}

static int allocates_gradients_late(struct program *p)
{
    assigns_gradient(p);
    return train(p);
}

static int allocates_late_unbracketed(struct program *p)
{
    assigns_gradient(p);
    return train_unbracketed(p, NULL);
}

static int assigns_a_parameter(struct program *p)
{
    p->model.param[2] = p->spare[2];
    return train(p);
}

static int opens_two_layers(struct program *p)
{
    int err = zero_begin(p->z, 1, ZERO_FORWARD);
    return err ? err : zero_begin(p->z, 2, ZERO_FORWARD);
}

static int opens_and_closes_two_layers(struct program *p)
{
    int err = opens_two_layers(p);
    if (!err)
        err = zero_end(p->z, 2, ZERO_FORWARD);
    if (!err)
        err = zero_end(p->z, 1, ZERO_FORWARD);
    return err ? err : train(p);
}

static int never_steps(struct program *p)
{
    return micro_batch(p, 0, 0);
}

/* ---- the rows ---- */

#define TOO_EARLY(name, run, ...)                                                                            \
    {                                                                                                        \
        name, ALL, BOTH, values_later, run, ERROR, ZERO_ERR_ORDER,                                           \
        {                                                                                                    \
            __VA_ARGS__                                                                                      \
        }                                                                                                    \
    }

static const struct misuse rows[] = {
    {"never steps", ALL, BOTH, NULL, never_steps, LINE, 0, {"zero_step"}},
    {"leaves a step unfinished",
     ALL,
     BOTH,
     accumulate_four,
     never_steps,
     LINE,
     0,
     {"zero_unwrap: zero_step was never called"}},
    {"shards alone", S3, W1, NULL, NULL, LINE, 0, {"stage 3 shards nothing", "world 1, found in: config"}},
    {"shards alone", S2, W1, NULL, NULL, LINE, 0, {"stage 2 shards nothing", "world 1, found in: config"}},
    {"shards alone", S1, W1, NULL, NULL, LINE, 0, {"stage 1 shards nothing", "world 1, found in: config"}},
    {"writes its gradients elsewhere",
     ALL,
     BOTH,
     NULL,
     writes_elsewhere,
     ERROR,
     ZERO_ERR_ORDER,
     {"step 1: every gradient is zero, on every rank"}},
    {"the same, without brackets",
     IN_PLACE,
     BOTH,
     NULL,
     writes_elsewhere_unbracketed,
     ERROR,
     ZERO_ERR_ORDER,
     {"step 1: every gradient is zero, on every rank"}},
    {"forgets a layer's gradient",
     ALL,
     BOTH,
     NULL,
     forgets_a_unit,
     LINE,
     0,
     {"in the first step no gradient was written to layers[1]: all its elements are zero"}},
    {"steps twice, without brackets",
     IN_PLACE,
     BOTH,
     NULL,
     steps_twice_unbracketed,
     LINE,
     0,
     {"every gradient of a step was zero, on every rank: zero_step was called twice"}},
    {"allocates gradients after the wrap",
     ALL,
     BOTH,
     NULL,
     allocates_gradients_late,
     ERROR,
     ZERO_ERR_ORDER,
     {"*grad of tensor embedding (unit 0)", "after zero_wrap"}},
    {"the same, without brackets",
     IN_PLACE,
     BOTH,
     NULL,
     allocates_late_unbracketed,
     ERROR,
     ZERO_ERR_ORDER,
     {"*grad of tensor embedding (unit 0)", "after zero_wrap"}},
    {"assigns a parameter",
     ALL,
     BOTH,
     NULL,
     assigns_a_parameter,
     ERROR,
     ZERO_ERR_ORDER,
     {"*param of tensor bias (unit 1)", "after zero_wrap"}},
    {"opens two layers of one buffer",
     SHARDED,
     BOTH,
     NULL,
     opens_two_layers,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_begin: unit 2 of stacked tensor layers", "while unit 1 is"}},
    {"the same, where they lie side by side", IN_PLACE, BOTH, NULL, opens_and_closes_two_layers, RIGHT},
    {"has no values, and does not say so",
     ALL,
     BOTH,
     has_no_values,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"tensors[0] (embedding): *param is NULL", "cfg.init_from must say where their values come from"}},
    {"has no values on rank 0, whose count",
     ALL,
     BOTH,
     nobodys_values,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"tensors[0] (embedding): *param is NULL on rank 0", "ZERO_INIT_RANK0"}},
    {"has values of a source that is none",
     ALL,
     BOTH,
     no_such_source,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"init_from is 4; allowed: model (0), rank0 (1), later (2), call (3)"}},
    {"has values of different sources",
     ALL,
     W2,
     other_source,
     NULL,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"init_from is later on rank 1 and model on rank 0"}},
    {"asks a callback that it does not have",
     ALL,
     BOTH,
     calls_nobody,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"init is NULL but init_from is ZERO_INIT_CALL"}},
    {"has a callback that nobody asks",
     ALL,
     BOTH,
     callback_nobody_asks,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"init is set but init_from is not ZERO_INIT_CALL"}},
    {"has a callback that fails, on one rank",
     ALL,
     BOTH,
     callback_that_fails,
     NULL,
     ERROR,
     ZERO_ERR_FAILED,
     {"cfg.init returned -3 for tensor head, elements"}},
    {"has a callback that writes nothing",
     ALL,
     BOTH,
     callback_that_writes_nothing,
     NULL,
     ERROR,
     ZERO_ERR_FAILED,
     {"cfg.init did not write element", "of tensor embedding, asked for"}},
    TOO_EARLY("computes before there are values", computes_too_early,
              "zero_begin: tensor embedding (unit 0) has values for 0 of its 165 elements",
              "init_from is ZERO_INIT_LATER", "zero_load, or zero_import and zero_write for all tensors"),
    TOO_EARLY("begins a micro-batch before that", accumulates_too_early, "zero_micro: tensor embedding"),
    TOO_EARLY("steps before that", no_brackets_at_all, "zero_step: tensor embedding"),
    TOO_EARLY("asks for the norm before that", norms_too_early, "zero_norm: tensor embedding"),
    TOO_EARLY("saves before that", saves_too_early, "zero_save: tensor embedding"),
    TOO_EARLY("exports before that", exports_too_early, "zero_export: tensor embedding"),
    TOO_EARLY("gathers all before that", gathers_too_early, "zero_gather_all: tensor embedding"),
    TOO_EARLY("reads before that", reads_too_early, "zero_read: tensor embedding"),
    TOO_EARLY("forgets one element", forgets_an_element, "zero_begin: tensor bias (unit 1) has values for",
              "ZERO_INIT_LATER"),
    TOO_EARLY("writes states and no weights", writes_states_alone,
              "zero_begin: tensor embedding (unit 0) has values for 0 of its 165 elements"),
    {"writes other values on other ranks",
     ALL,
     W2,
     values_later,
     writes_other_ranges,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"zero_write"}},
};

static void test_misuse(void **state)
{
    (void)state;
    misuse_try(rows, (int)(sizeof rows / sizeof *rows));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_misuse)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
