/* SPDX-License-Identifier: Apache-2.0 */
/* test_misuse_brackets.c: wrong uses (misuse.h) of brackets and micro-batches, and gradients that the model
 * zeroes. */
#include "test/zero/misuse.h"

/* Trains, with an evaluation before each step and after the last. */
static int evaluates_between(struct program *p)
{
    int err = forward(p);
    for (int i = 0; !err && i < STEPS; i++)
        err = FIRST_ERROR(micro_batch(p, i, 0), step(p), forward(p));
    return err;
}

/* Runs backward of one layer after another, while the first n_outer units of outer[] stay open. */
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
    for (int i = 0; !err && i < STEPS; i++) {
        for (int k = 0; !err && k < p->cfg.grad_accum_steps; k++)
            err = FIRST_ERROR(forward(p), backward_inside(p, outer, n_outer, i, k));
        err = FIRST_ERROR(err, step(p));
    }
    return err;
}

static void open_several_layers(struct program *p)
{
    p->table[TOY_STACKED].flags |= ZERO_POINTER_PER_BEGIN;
    p->cfg.grad_accum_steps = 2;
}

/* Leaves no slots for a nested backward, so the units that stay open must be resident. */
static void flag_all_but_a_layer(struct program *p)
{
    open_several_layers(p);
    p->cfg.memory.prefetch = 0;
    for (int t = 0; t < TOY_TENSORS; t++)
        p->table[t].flags |= t == TOY_FROZEN || t == TOY_STACKED ? 0 : ZERO_RESIDENT;
}

static int forgets_micro(struct program *p)
{
    int err = 0;
    for (int k = 0; !err && k < 4; k++)
        err = FIRST_ERROR(toy_forward(&p->model, p->z, false),
                          toy_backward(&p->model, p->z, false, 0, p->rank->rank + k * p->rank->world));
    return FIRST_ERROR(err, step(p));
}

/* Zeroes all gradients with valid pointers, as frameworks with automatic differentiation do. */
static void zeroes_gradients(struct program *p)
{
    for (int t = 0; t < p->n_tensors; t++)
        if (p->model.grad[t])
            memset(p->model.grad[t], 0, (size_t)toy_elems(t) * (p->model.table[t].dtype == ZERO_F32 ? 4 : 2));
}

static void accumulate_without_order(struct program *p)
{
    p->cfg.grad_accum_steps = 4;
    p->cfg.deterministic = 0;
}

/* ---- rows ---- */

MISUSE("begins a unit twice", ALL, BOTH, NOTHING,
       FIRST_ERROR(begin(p, 1, ZERO_FORWARD), begin(p, 1, ZERO_FORWARD)),
       FAILS(ORDER, "zero_begin: unit 1 is already open in forward"))
MISUSE("ends what is not open", ALL, BOTH, NOTHING, end(p, 1, ZERO_BACKWARD),
       FAILS(ORDER, "zero_end: unit 1 is not open in backward"))
MISUSE("ends in the other phase", ALL, BOTH, NOTHING,
       FIRST_ERROR(begin(p, 1, ZERO_FORWARD), end(p, 1, ZERO_BACKWARD)),
       FAILS(ORDER, "zero_end: unit 1 is not open in backward"))
MISUSE("steps with an open bracket", ALL, BOTH, NOTHING,
       FIRST_ERROR(micro_batch(p, 0, 0), begin(p, 2, ZERO_FORWARD), step(p)),
       FAILS(ORDER, "zero_step: unit 2 has an open bracket"))
MISUSE("ends a micro-batch with an open bracket", ALL, BOTH, p->cfg.grad_accum_steps = 4,
       FIRST_ERROR(begin(p, 2, ZERO_FORWARD), zero_micro(p->z)),
       FAILS(ORDER, "zero_micro: unit 2 has an open bracket"))
MISUSE("begins a unit that is not there", ALL, BOTH, NOTHING, begin(p, TOY_UNITS, ZERO_FORWARD),
       FAILS(ARG, "zero_begin: unit is 4; allowed: 0..3"))
MISUSE("begins in no phase", ALL, BOTH, NOTHING, zero_begin(p->z, 0, (enum zero_phase)5),
       FAILS(ARG, "zero_begin: phase is 5"))
MISUSE("steps after forward alone", SHARDED, BOTH, NOTHING, FIRST_ERROR(forward(p), step(p)),
       FAILS(ORDER, "zero_step: no backward bracket has ended"))
MISUSE("has no brackets where they are needed", SHARDED, BOTH, NOTHING, step(p),
       FAILS(ORDER, "zero_step: no backward bracket has ended"))
MISUSE("evaluates between steps", ALL, BOTH, NOTHING, evaluates_between(p), TRAINS)
MISUSE("holds two outer units open in backward", SHARDED, BOTH | W4, open_several_layers(p),
       train_inside(p, 2), TRAINS)
MISUSE(
    "holds three outer units open in backward", SHARDED, W2, open_several_layers(p), train_inside(p, 3),
    FAILS(
        BUDGET, "zero_begin: no gradient slot is free for unit 1 (1024 bytes)",
        "give a tensor of unit 2 the flag ZERO_RESIDENT, which keeps the 512 bytes of its gradients outside "
        "the slots, or declare the nesting in cfg.memory.order"))
MISUSE("holds three, one of them flagged", SHARDED, BOTH,
       (open_several_layers(p), p->table[0].flags |= ZERO_RESIDENT), train_inside(p, 3), TRAINS)
MISUSE("holds three, one of them tied", SHARDED, BOTH,
       (open_several_layers(p), p->table[0].flags |= ZERO_TIED), train_inside(p, 3), TRAINS)
MISUSE("holds three, all but one flagged", SHARDED, BOTH | W4, flag_all_but_a_layer(p), train_inside(p, 3),
       TRAINS)
MISUSE("has a second backward bracket", ALL, BOTH, NOTHING, train_with_two_brackets(p),
       FAILS(ORDER, "zero_begin: unit 1 has had 1 backward bracket",
             "zero_tensor.uses is 1 and grad_accum_steps is 1", "zero_tensor.uses to the unit's"))
MISUSE("has a third, where two are declared", ALL, BOTH, p->table[2].uses = 2,
       FIRST_ERROR(micro_batch(p, 0, 0), begin(p, 1, ZERO_BACKWARD), end(p, 1, ZERO_BACKWARD),
                   begin(p, 1, ZERO_BACKWARD), end(p, 1, ZERO_BACKWARD)),
       FAILS(ORDER, "zero_begin: unit 1 has had 2 backward brackets",
             "zero_tensor.uses is 2 and grad_accum_steps is 1"))
MISUSE("has two, where two are declared", ALL, BOTH, p->table[2].uses = 2, train_with_two_brackets(p), TRAINS)
MISUSE("has one, where two are declared", ALL, BOTH, p->table[2].uses = 2, train(p), TRAINS)
MISUSE("forgets zero_step", ALL, BOTH, NOTHING, FIRST_ERROR(micro_batch(p, 0, 0), micro_batch(p, 1, 0)),
       FAILS(ORDER, "zero_begin: unit 3 has had 1 backward bracket since the last zero_step",
             "Is a zero_step missing?"))
MISUSE("steps after three micro-batches of four", ALL, BOTH, p->cfg.grad_accum_steps = 4,
       FIRST_ERROR(micro_batches(p, 3), step(p)), FAILS(ORDER, "3 backward passes", "grad_accum_steps is 4"))
MISUSE("ends too many micro-batches", ALL, BOTH, p->cfg.grad_accum_steps = 4,
       FIRST_ERROR(zero_micro(p->z), zero_micro(p->z), zero_micro(p->z), zero_micro(p->z)),
       FAILS(ORDER, "zero_micro: grad_accum_steps is 4"))
MISUSE("does not end micro-batches without brackets", IN_PLACE, BOTH, p->cfg.grad_accum_steps = 4,
       forgets_micro(p), FAILS(ORDER, "zero_step: zero_micro ended 0 micro-batches", "grad_in_place"))
MISUSE("the same, not deterministic", IN_PLACE, BOTH, accumulate_without_order(p), forgets_micro(p),
       FAILS(ORDER, "zero_step: zero_micro ended 0 micro-batches", "grad_in_place"))
MISUSE("gives no number for lr", ALL, BOTH, NOTHING, zero_step(p->z, NAN, NULL),
       FAILS(ARG, "zero_step: lr is nan"))
MISUSE("zeroes its gradients each micro-batch", ALL, BOTH, p->cfg.grad_accum_steps = 4,
       train_with(p, zeroes_gradients), TRAINS)
MISUSE("the same, not deterministic", IN_PLACE, BOTH, accumulate_without_order(p),
       train_with(p, zeroes_gradients), TRAINS)
MISUSE("the same, without brackets", IN_PLACE, BOTH, p->cfg.grad_accum_steps = 4,
       train_unbracketed(p, zeroes_gradients), TRAINS)
MISUSE("the same, neither", IN_PLACE, BOTH, accumulate_without_order(p),
       train_unbracketed(p, zeroes_gradients), TRAINS)
MISUSE("zeroes its gradients each step", ALL, BOTH, NOTHING, train_with(p, zeroes_gradients), TRAINS)
MISUSE("zeroes its gradients each step, without brackets", IN_PLACE, BOTH, NOTHING,
       train_unbracketed(p, zeroes_gradients), TRAINS)
MISUSE("keeps sums in place and wants one order", ALL, BOTH,
       (p->cfg.grad_accum_steps = 4, p->cfg.deterministic = 1, p->cfg.memory.grad_in_place = 1), train(p),
       FAILS(ARG, "grad_in_place", "deterministic"))
