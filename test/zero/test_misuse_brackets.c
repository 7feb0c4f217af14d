/* SPDX-License-Identifier: Apache-2.0 */
/* test_misuse_brackets.c: ways to use the library wrongly (misuse.h):
 * brackets, micro-batches, gradients that the model zeroes itself. */
#include "test/zero/misuse.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

/* ---- brackets ---- */

static int begin_twice(struct program *p)
{
    int err = zero_begin(p->z, 1, ZERO_FORWARD);
    return err ? err : zero_begin(p->z, 1, ZERO_FORWARD);
}

static int end_without_begin(struct program *p)
{
    return zero_end(p->z, 1, ZERO_BACKWARD);
}

static int end_in_other_phase(struct program *p)
{
    int err = zero_begin(p->z, 1, ZERO_FORWARD);
    return err ? err : zero_end(p->z, 1, ZERO_BACKWARD);
}

static int step_with_open_bracket(struct program *p)
{
    int err = micro_batch(p, 0, 0);
    if (!err)
        err = zero_begin(p->z, 2, ZERO_FORWARD);
    return err ? err : zero_step(p->z, 1e-2f, NULL);
}

static int micro_with_open_bracket(struct program *p)
{
    int err = zero_begin(p->z, 2, ZERO_FORWARD);
    return err ? err : zero_micro(p->z);
}

static int no_such_unit(struct program *p)
{
    return zero_begin(p->z, TOY_UNITS, ZERO_FORWARD);
}

static int no_such_phase(struct program *p)
{
    return zero_begin(p->z, 0, (enum zero_phase)5);
}

static int forward_only(struct program *p)
{
    int err = toy_forward(&p->model, p->z, true);
    return err ? err : zero_step(p->z, 1e-2f, NULL);
}

static int evaluates_between(struct program *p)
{
    int err = toy_forward(&p->model, p->z, true);
    for (int step = 0; !err && step < STEPS; step++) {
        err = micro_batch(p, step, 0);
        if (!err)
            err = zero_step(p->z, 1e-2f, NULL);
        if (!err)
            err = toy_forward(&p->model, p->z, true);
    }
    return err;
}

/* Backward of one layer after another, inside the first n_outer units of outer[], which stay open. */
static int backward_inside(struct program *p, const int *outer, int n_outer, int step, int k)
{
    int err = 0, micro = p->rank->rank + k * p->rank->world;
    bool is_outer[TOY_UNITS] = {false};
    for (int i = 0; !err && i < n_outer; i++) {
        is_outer[outer[i]] = true;
        err = zero_begin(p->z, outer[i], ZERO_BACKWARD);
    }
    for (int u = TOY_UNITS; !err && u-- > 0;) {
        if (!is_outer[u])
            err = zero_begin(p->z, u, ZERO_BACKWARD);
        if (!err)
            toy_add_gradient(&p->model, u, step, micro);
        if (!err && !is_outer[u])
            err = zero_end(p->z, u, ZERO_BACKWARD);
    }
    for (int i = n_outer; !err && i-- > 0;)
        err = zero_end(p->z, outer[i], ZERO_BACKWARD);
    return err;
}

static int train_inside(struct program *p, int n_outer)
{
    static const int outer[] = {0, 3, 2};
    int err = 0;
    for (int step = 0; !err && step < STEPS; step++) {
        for (int k = 0; !err && k < p->cfg.grad_accum_steps; k++) {
            err = toy_forward(&p->model, p->z, true);
            if (!err)
                err = backward_inside(p, outer, n_outer, step, k);
        }
        if (!err)
            err = zero_step(p->z, 1e-2f, NULL);
    }
    return err;
}

static int two_outer_units(struct program *p)
{
    return train_inside(p, 2);
}

static int three_outer_units(struct program *p)
{
    return train_inside(p, 3);
}

static void open_several_layers(struct program *p)
{
    p->table[TOY_STACKED].flags |= ZERO_POINTER_PER_BEGIN;
    p->cfg.grad_accum_steps = 2;
}

static void flag_embedding(struct program *p)
{
    open_several_layers(p);
    p->table[0].flags |= ZERO_RESIDENT;
}

static void tie_embedding(struct program *p)
{
    open_several_layers(p);
    p->table[0].flags |= ZERO_TIED;
}

/* No slots for backwards that are nested: the units that stay open have to be flagged. */
static void flag_all_but_a_layer(struct program *p)
{
    open_several_layers(p);
    p->cfg.memory.prefetch = 0;
    for (int t = 0; t < TOY_TENSORS; t++)
        p->table[t].flags |= t == TOY_FROZEN || t == TOY_STACKED ? 0 : ZERO_RESIDENT;
}

/* ---- steps and micro-batches ---- */

static int second_bracket(struct program *p)
{
    int err = zero_begin(p->z, 1, ZERO_BACKWARD);
    return err ? err : zero_end(p->z, 1, ZERO_BACKWARD);
}

/* Every step's last contribution to unit 1 is zero. */
static int two_brackets(struct program *p)
{
    int err = 0;
    for (int step = 0; !err && step < STEPS; step++) {
        err = micro_batch(p, step, 0);
        if (!err)
            err = second_bracket(p);
        if (!err)
            err = zero_step(p->z, 1e-2f, NULL);
    }
    return err;
}

static int two_brackets_and_one_more(struct program *p)
{
    int err = micro_batch(p, 0, 0);
    for (int i = 0; !err && i < 2; i++)
        err = second_bracket(p);
    return err;
}

static void says_two_uses(struct program *p)
{
    p->table[2].uses = 2; /* of unit 1 */
}

static int forgets_to_step(struct program *p)
{
    int err = micro_batch(p, 0, 0);
    return err ? err : micro_batch(p, 1, 0);
}

static int three_of_four(struct program *p)
{
    int err = 0;
    for (int k = 0; !err && k < 3; k++)
        err = micro_batch(p, 0, k);
    return err ? err : zero_step(p->z, 1e-2f, NULL);
}

static int micro_too_often(struct program *p)
{
    int err = 0;
    for (int k = 0; !err && k < 4; k++)
        err = zero_micro(p->z);
    return err;
}

static int forgets_micro(struct program *p)
{
    int err = 0;
    for (int k = 0; !err && k < 4; k++) {
        err = toy_forward(&p->model, p->z, false);
        if (!err)
            err = toy_backward(&p->model, p->z, false, 0, p->rank->rank + k * p->rank->world);
    }
    return err ? err : zero_step(p->z, 1e-2f, NULL);
}

static int not_a_number(struct program *p)
{
    return zero_step(p->z, NAN, NULL);
}

/* ---- gradients that the model zeroes itself ---- */

/* As autodiff frameworks do: whatever the pointers reach. */
static void zeroes_gradients(struct program *p)
{
    for (int t = 0; t < p->n_tensors; t++)
        if (p->model.grad[t])
            memset(p->model.grad[t], 0, (size_t)toy_elems(t) * (p->model.table[t].dtype == ZERO_F32 ? 4 : 2));
}

static int zeroes_bracketed(struct program *p)
{
    return train_with(p, zeroes_gradients);
}

static int zeroes_unbracketed(struct program *p)
{
    return train_unbracketed(p, zeroes_gradients);
}

static void accumulate_without_order(struct program *p)
{
    p->cfg.grad_accum_steps = 4;
    p->cfg.deterministic = 0;
}

static void in_place_and_deterministic(struct program *p)
{
    p->cfg.grad_accum_steps = 4;
    p->cfg.deterministic = 1;
    p->cfg.memory.grad_in_place = 1;
}

/* ---- the rows ---- */

static const struct misuse rows[] = {
    {"begins a unit twice",
     ALL,
     BOTH,
     NULL,
     begin_twice,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_begin: unit 1 is already open in forward"}},
    {"ends what is not open",
     ALL,
     BOTH,
     NULL,
     end_without_begin,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_end: unit 1 is not open in backward"}},
    {"ends in the other phase",
     ALL,
     BOTH,
     NULL,
     end_in_other_phase,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_end: unit 1 is not open in backward"}},
    {"steps with an open bracket",
     ALL,
     BOTH,
     NULL,
     step_with_open_bracket,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_step: unit 2 has an open bracket"}},
    {"ends a micro-batch with an open bracket",
     ALL,
     BOTH,
     accumulate_four,
     micro_with_open_bracket,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_micro: unit 2 has an open bracket"}},
    {"begins a unit that is not there",
     ALL,
     BOTH,
     NULL,
     no_such_unit,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_begin: unit is 4; allowed: 0..3"}},
    {"begins in no phase", ALL, BOTH, NULL, no_such_phase, ERROR, ZERO_ERR_ARG, {"zero_begin: phase is 5"}},
    {"steps after forward alone",
     SHARDED,
     BOTH,
     NULL,
     forward_only,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_step: no backward bracket has ended"}},
    {"has no brackets where they are needed",
     SHARDED,
     BOTH,
     NULL,
     no_brackets_at_all,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_step: no backward bracket has ended"}},
    {"evaluates between steps", ALL, BOTH, NULL, evaluates_between, RIGHT},
    {"holds two outer units open in backward", SHARDED, BOTH | W4, open_several_layers, two_outer_units,
     RIGHT},
    {"holds three outer units open in backward",
     SHARDED,
     W2,
     open_several_layers,
     three_outer_units,
     ERROR,
     ZERO_ERR_BUDGET,
     {"zero_begin: no gradient slot is free for unit 1 (1024 bytes)",
      "give a tensor of unit 2 the flag ZERO_RESIDENT, which keeps the 512 bytes of its gradients outside "
      "the slots, or declare the nesting in cfg.memory.order"}},
    {"holds three, one of them flagged", SHARDED, BOTH, flag_embedding, three_outer_units, RIGHT},
    {"holds three, one of them tied", SHARDED, BOTH, tie_embedding, three_outer_units, RIGHT},
    {"holds three, all but one flagged", SHARDED, BOTH | W4, flag_all_but_a_layer, three_outer_units, RIGHT},
    WRONG("has a second backward bracket", ALL, BOTH, NULL, two_brackets, ORDER,
          "zero_begin: unit 1 has had 1 backward bracket", "zero_tensor.uses is 1 and grad_accum_steps is 1",
          "zero_tensor.uses to the unit's"),
    WRONG("has a third, where two are declared", ALL, BOTH, says_two_uses, two_brackets_and_one_more, ORDER,
          "zero_begin: unit 1 has had 2 backward brackets",
          "zero_tensor.uses is 2 and grad_accum_steps is 1"),
    GOOD("has two, where two are declared", ALL, BOTH, says_two_uses, two_brackets),
    GOOD("has one, where two are declared", ALL, BOTH, says_two_uses, NULL),
    WRONG("forgets zero_step", ALL, BOTH, NULL, forgets_to_step, ORDER,
          "zero_begin: unit 3 has had 1 backward bracket since the last zero_step",
          "Is a zero_step missing?"),
    {"steps after three micro-batches of four",
     ALL,
     BOTH,
     accumulate_four,
     three_of_four,
     ERROR,
     ZERO_ERR_ORDER,
     {"3 backward passes", "grad_accum_steps is 4"}},
    {"ends too many micro-batches",
     ALL,
     BOTH,
     accumulate_four,
     micro_too_often,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_micro: grad_accum_steps is 4"}},
    {"does not end micro-batches without brackets",
     IN_PLACE,
     BOTH,
     accumulate_four,
     forgets_micro,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_step: zero_micro ended 0 micro-batches", "grad_in_place"}},
    {"the same, not deterministic",
     IN_PLACE,
     BOTH,
     accumulate_without_order,
     forgets_micro,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_step: zero_micro ended 0 micro-batches", "grad_in_place"}},
    {"gives no number for lr", ALL, BOTH, NULL, not_a_number, ERROR, ZERO_ERR_ARG, {"zero_step: lr is nan"}},
    {"zeroes its gradients each micro-batch", ALL, BOTH, accumulate_four, zeroes_bracketed, RIGHT},
    {"the same, not deterministic", IN_PLACE, BOTH, accumulate_without_order, zeroes_bracketed, RIGHT},
    {"the same, without brackets", IN_PLACE, BOTH, accumulate_four, zeroes_unbracketed, RIGHT},
    {"the same, neither", IN_PLACE, BOTH, accumulate_without_order, zeroes_unbracketed, RIGHT},
    {"zeroes its gradients each step", ALL, BOTH, NULL, zeroes_bracketed, RIGHT},
    {"zeroes its gradients each step, without brackets", IN_PLACE, BOTH, NULL, zeroes_unbracketed, RIGHT},
    {"keeps sums in place and wants one order",
     ALL,
     BOTH,
     in_place_and_deterministic,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"grad_in_place", "deterministic"}},
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
