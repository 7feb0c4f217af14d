/* SPDX-License-Identifier: Apache-2.0 */
/* test_misuse_steps.c: ways to use the library wrongly (misuse.h):
 * steps, norms, steps that are given up, numbers that change between steps. */
#include "test/zero/misuse.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

/* ---- the step's numbers ---- */

static int carries_nine(struct program *p)
{
    double x[9] = {0};
    return zero_carry(p->z, x, 9);
}

static int odd_one_carries(struct program *p)
{
    double x = 1;
    int err = p->odd ? zero_carry(p->z, &x, 1) : 0;
    return err ? err : train(p);
}

static int odd_one_asks_for_a_scale(struct program *p)
{
    double scale;
    int err = p->odd ? zero_loss_scale(p->z, 1, &scale) : 0;
    return err ? err : train(p);
}

static int odd_one_has_no_number(struct program *p)
{
    double scale;
    return zero_loss_scale(p->z, p->odd ? NAN : 1, &scale);
}

static int scales_in_a_step(struct program *p)
{
    double scale;
    int err = micro_batch(p, 0, 0);
    return err ? err : zero_loss_scale(p->z, 1, &scale);
}

static int scales_one_step_alone(struct program *p)
{
    double scale;
    int err = zero_loss_scale(p->z, 1, &scale);
    return err ? err : train(p);
}

static int looks_back_at_nothing(struct program *p)
{
    struct zero_step_info info;
    return zero_last_step(p->z, &info);
}

static int tunes_the_learning_rate(struct program *p)
{
    return zero_tune(p->z, 0, "lr", 1e-3);
}

static int tunes_to_no_number(struct program *p)
{
    return zero_tune(p->z, 0, "weight_decay", NAN);
}

static int tunes_in_a_step(struct program *p)
{
    int err = micro_batch(p, 0, 0);
    return err ? err : zero_tune(p->z, ZERO_ALL, "clip", 1);
}

static void plain_sgd(struct program *p)
{
    p->cfg.optim.optimizer = ZERO_SGD;
}

static int begins_a_momentum(struct program *p)
{
    return zero_tune(p->z, 0, "beta1", 0.9);
}

static int odd_one_tunes(struct program *p)
{
    int err = zero_tune(p->z, ZERO_ALL, "clip", p->odd ? 2 : 1);
    return err ? err : train(p);
}

static int reads_a_gradient_early(struct program *p)
{
    float x[8];
    int err = train(p);
    return err ? err : zero_read(p->z, 0, ZERO_VALUE_GRAD, 0, 8, x);
}

static int reads_a_gradient_of_frozen(struct program *p)
{
    float x[8];
    int err = micro_batch(p, 0, 0);
    return err ? err : zero_read(p->z, TOY_FROZEN, ZERO_VALUE_GRAD, 0, 8, x);
}

static int writes_a_gradient(struct program *p)
{
    float x[8] = {0};
    int err = micro_batch(p, 0, 0);
    return err ? err : zero_write(p->z, 0, ZERO_VALUE_GRAD, 0, 8, x);
}

static int accumulates_after_reading(struct program *p)
{
    float x[8];
    int err = micro_batch(p, 0, 0);
    if (!err)
        err = zero_read(p->z, 0, ZERO_VALUE_GRAD, 0, 8, x);
    return err ? err : micro_batch(p, 0, 1);
}

static int goes_below_the_first_step(struct program *p)
{
    return zero_set_step(p->z, -1);
}

static int odd_one_sets_the_step(struct program *p)
{
    int err = p->odd ? zero_set_step(p->z, 7) : 0;
    return err ? err : train(p);
}

static void budget_for_all(struct program *p)
{
    p->cfg.memory.param_budget_bytes = 1 << 20;
}

/* ---- norms, and steps that are given up ---- */

static int three_of_four_and_norm(struct program *p)
{
    int err = 0;
    for (int k = 0; !err && k < 3; k++)
        err = micro_batch(p, 0, k);
    return err ? err : norm(p);
}

static int norms_every_step(struct program *p)
{
    int err = 0;
    for (int step = 0; !err && step < STEPS; step++) {
        err = micro_batch(p, step, 0);
        for (int k = 0; !err && k < 2; k++) {
            err = norm(p);
            if (!err)
                err = toy_forward(&p->model, p->z, true);
        }
        if (!err)
            err = zero_step(p->z, 1e-2f, NULL);
    }
    return err;
}

static int drops_a_step(struct program *p)
{
    int err = micro_batch(p, 7, 0);
    if (!err)
        err = norm(p);
    if (!err)
        err = zero_drop(p->z);
    return err ? err : train(p);
}

AFTER(norm_of_nothing, 0, zero_norm(NULL, &(double){0}))
AFTER(norm_to_nothing, micro_batch(p, 0, 0), zero_norm(p->z, NULL))
AFTER(norm_in_bracket, zero_begin(p->z, 1, ZERO_FORWARD), norm(p))
AFTER(norm_before_backward, train(p) || toy_forward(&p->model, p->z, true), norm(p))
AFTER(norm_and_on, micro_batch(p, 0, 0) || norm(p), zero_begin(p->z, 2, ZERO_BACKWARD))
AFTER(norm_and_micro, micro_batch(p, 0, 0) || norm(p), zero_micro(p->z))
AFTER(norm_and_save, micro_batch(p, 0, 0) || norm(p), zero_save(p->z, "/tmp", NULL))
AFTER(norm_after_failure, fails(p), norm(p))
AFTER(drop_of_nothing, 0, zero_drop(NULL))
AFTER(drop_in_bracket, micro_batch(p, 0, 0) || zero_begin(p->z, 1, ZERO_FORWARD), zero_drop(p->z))
AFTER(drop_before_backward, train(p) || toy_forward(&p->model, p->z, true), zero_drop(p->z))
AFTER(drop_twice, micro_batch(p, 0, 0) || zero_drop(p->z), zero_drop(p->z))
AFTER(drop_and_step, micro_batch(p, 0, 0) || zero_drop(p->z), zero_step(p->z, 1e-2f, NULL))
AFTER(drop_after_failure, fails(p), zero_drop(p->z))

static int odd_one_norms(struct program *p)
{
    int err = micro_batch(p, 0, 0);
    if (!err && p->odd)
        err = norm(p);
    if (!err)
        err = zero_step(p->z, 1e-2f, NULL);
    return err ? err : train(p);
}

static int odd_one_drops(struct program *p)
{
    int err = micro_batch(p, 0, 0);
    if (!err)
        err = p->odd ? zero_drop(p->z) : zero_step(p->z, 1e-2f, NULL);
    return err ? err : train(p);
}

/* ---- the rows ---- */

static const struct misuse rows[] = {
    {"carries nine values", ALL, BOTH, NULL, carries_nine, ERROR, ZERO_ERR_ARG, {"zero_carry: n is 9"}},
    {"carries a value on one rank",
     ALL,
     W2,
     NULL,
     odd_one_carries,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"zero_carry", "rank 1 called"}},
    {"asks for a loss scale on one rank",
     ALL,
     W2,
     NULL,
     odd_one_asks_for_a_scale,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"zero_loss_scale", "rank 1 called"}},
    {"counts no number of tokens on one rank",
     ALL,
     W2,
     NULL,
     odd_one_has_no_number,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_loss_scale: count is nan on rank 1"}},
    {"asks for a loss scale in a step",
     ALL,
     BOTH,
     NULL,
     scales_in_a_step,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_loss_scale: a step has begun"}},
    {"asks for a loss scale of the first step alone",
     ALL,
     W1,
     NULL,
     scales_one_step_alone,
     LINE,
     0,
     {"zero_loss_scale was called for the previous step"}},
    {"looks back at nothing",
     ALL,
     BOTH,
     NULL,
     looks_back_at_nothing,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_last_step: there was no zero_step yet"}},
    {"tunes the learning rate",
     ALL,
     BOTH,
     NULL,
     tunes_the_learning_rate,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_tune: key is \"lr\"", "allowed: clip"}},
    {"tunes to no number",
     ALL,
     BOTH,
     NULL,
     tunes_to_no_number,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_tune: weight_decay is nan"}},
    {"tunes in a step",
     ALL,
     BOTH,
     NULL,
     tunes_in_a_step,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_tune: a step has begun"}},
    {"begins a momentum",
     ALL,
     BOTH,
     plain_sgd,
     begins_a_momentum,
     ERROR,
     ZERO_ERR_ARG,
     {"beta1 of group 0 (sgd) is", "was 0 at zero_wrap"}},
    {"tunes on one rank",
     ALL,
     W2,
     NULL,
     odd_one_tunes,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"zero_tune(clip)", "rank 1 called"}},
    {"reads a gradient before backward",
     ALL,
     BOTH,
     NULL,
     reads_a_gradient_early,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_read: no backward bracket has ended"}},
    {"reads a gradient of a frozen tensor",
     ALL,
     BOTH,
     NULL,
     reads_a_gradient_of_frozen,
     ERROR,
     ZERO_ERR_ARG,
     {"is frozen", "gradient"}},
    {"writes a gradient",
     ALL,
     BOTH,
     NULL,
     writes_a_gradient,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_write: value is ZERO_VALUE_GRAD"}},
    {"goes on with backward after reading a gradient",
     ALL,
     BOTH,
     NULL,
     accumulates_after_reading,
     ERROR,
     ZERO_ERR_ORDER,
     {"after zero_norm"}},
    {"goes below the first step",
     ALL,
     BOTH,
     NULL,
     goes_below_the_first_step,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_set_step: t is -1"}},
    {"sets the step on one rank",
     ALL,
     W2,
     NULL,
     odd_one_sets_the_step,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"zero_set_step", "rank 1 called"}},
    {"shards nothing",
     S3,
     W2,
     budget_for_all,
     NULL,
     LINE,
     0,
     {"stage 3 shards nothing: all 4 units are resident", "param_budget_bytes holds them all"},
     .only_rank_0 = true},
    WRONG("asks no context for the norm", S0, W1, NULL, norm_of_nothing, ARG, "zero_norm: z is NULL"),
    WRONG("has no place for the norm", ALL, BOTH, NULL, norm_to_nothing, ARG, "zero_norm: norm is NULL"),
    WRONG("asks for the norm in a bracket", ALL, BOTH, NULL, norm_in_bracket, ORDER,
          "zero_norm: unit 1 has an open bracket"),
    WRONG("asks for the norm before backward", ALL, BOTH, NULL, norm_before_backward, ORDER,
          "zero_norm: no backward bracket has ended"),
    WRONG("asks for the norm after three of four", ALL, BOTH, accumulate_four, three_of_four_and_norm, ORDER,
          "zero_norm: ", "3", "grad_accum_steps"),
    WRONG("goes on with backward after the norm", ALL, BOTH, NULL, norm_and_on, ORDER,
          "zero_begin: ", "after zero_norm"),
    WRONG("ends a micro-batch after the norm", ALL, BOTH, NULL, norm_and_micro, ORDER,
          "zero_micro: zero_norm has ended"),
    WRONG("saves after the norm", ALL, BOTH, NULL, norm_and_save, ORDER, "zero_save: ", "a step has begun"),
    WRONG("asks for the norm after a failure", ALL, BOTH, update_that_refuses, norm_after_failure, FAILED,
          "the update callback returned 3"),
    WRONG("asks for the norm on one rank alone", ALL, W2, NULL, odd_one_norms, MISMATCH, "zero_norm"),
    GOOD("asks for the norm twice, and evaluates", ALL, BOTH, NULL, norms_every_step),
    WRONG("drops of no context", S0, W1, NULL, drop_of_nothing, ARG, "zero_drop: z is NULL"),
    WRONG("drops in a bracket", ALL, BOTH, NULL, drop_in_bracket, ORDER,
          "zero_drop: unit 1 has an open bracket"),
    WRONG("drops before backward", ALL, BOTH, NULL, drop_before_backward, ORDER,
          "zero_drop: ", "there is nothing to drop"),
    WRONG("drops twice", ALL, BOTH, NULL, drop_twice, ORDER, "zero_drop: ", "there is nothing to drop"),
    WRONG("steps after the drop", ALL, BOTH, NULL, drop_and_step, ORDER,
          "zero_step: no backward bracket has ended"),
    WRONG("drops after a failure", ALL, BOTH, update_that_refuses, drop_after_failure, FAILED,
          "the update callback returned 3"),
    WRONG("drops on one rank alone", ALL, W2, NULL, odd_one_drops, MISMATCH, "zero_drop"),
    GOOD("drops a step", ALL, BOTH, NULL, drops_a_step),
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
