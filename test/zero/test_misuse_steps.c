/* SPDX-License-Identifier: Apache-2.0 */
/* test_misuse_steps.c: wrong uses (misuse.h) of steps, norms, dropped steps, and numbers that change between
 * steps. */
#include "test/zero/misuse.h"

/* Asks for the norm twice in each step, and runs an evaluation after each. */
static int norms_every_step(struct program *p)
{
    int err = 0;
    for (int i = 0; !err && i < STEPS; i++)
        err = FIRST_ERROR(micro_batch(p, i, 0), norm(p), forward(p), norm(p), forward(p), step(p));
    return err;
}

static int assign_parameter(struct program *p)
{
    p->model.param[2] = p->spare[2];
    return 0;
}

static int read_gradient(struct program *p)
{
    return zero_read(p->z, 0, ZERO_VALUE_GRAD, 0, 8, (float[8]){0});
}

/* A refused call changes nothing: once the pointer is put back, training goes on. */
static int refuses_and_goes_on(struct program *p)
{
    void *kept = p->model.param[2];
    int err = FIRST_ERROR(micro_batch(p, 0, 0), assign_parameter(p));
    if (!err && (!norm(p) || !zero_drop(p->z)))
        err = -1;
    p->model.param[2] = kept;
    for (int i = 0; !err && i < STEPS; i++)
        err = FIRST_ERROR(i ? micro_batch(p, i, 0) : 0, step(p));
    return err;
}

static void make_resident(struct program *p)
{
    for (int t = 0; t < TOY_TENSORS; t++)
        p->table[t].flags |= ZERO_RESIDENT;
}

/* ---- rows ---- */

/* After the first step the last rank of two or three differs. Every rank's error contains text and names the
 * last rank, as `two` or `three` gives it. */
#define APART(name, most, run, text, two, three)                                                             \
    MISUSE(name, ALL, W2, p->cfg.max_grad_accum_steps = most,                                                \
           FIRST_ERROR(micro_batch(p, 0, 0), step(p), run, train(p)), FAILS(MISMATCH, text, two))            \
    MISUSE(name " of three", ALL, W3, p->cfg.max_grad_accum_steps = most,                                    \
           FIRST_ERROR(micro_batch(p, 0, 0), step(p), run, train(p)), FAILS(MISMATCH, text, three))
#define TUNES_APART(name, most, run, text) APART(name, most, run, text, "rank 1 called", "rank 2 called")

MISUSE("carries nine values", ALL, BOTH, NOTHING, zero_carry(p->z, (double[9]){0}, 9),
       FAILS(ARG, "zero_carry: n is 9"))
MISUSE("carries a value on one rank", ALL, W2, NOTHING,
       FIRST_ERROR(p->odd ? zero_carry(p->z, &(double){1}, 1) : 0, train(p)),
       FAILS(MISMATCH, "zero_carry", "rank 1 called"))
MISUSE("asks for a loss scale on one rank", ALL, W2, NOTHING,
       FIRST_ERROR(p->odd ? zero_loss_scale(p->z, 1, &(double){0}) : 0, train(p)),
       FAILS(MISMATCH, "zero_loss_scale", "rank 1 called"))
MISUSE("counts no number of tokens on one rank", ALL, W2, NOTHING,
       zero_loss_scale(p->z, p->odd ? NAN : 1, &(double){0}),
       FAILS(ARG, "zero_loss_scale: count is nan on rank 1"))
MISUSE("asks for a loss scale in a step", ALL, BOTH, NOTHING,
       FIRST_ERROR(micro_batch(p, 0, 0), zero_loss_scale(p->z, 1, &(double){0})),
       FAILS(ORDER, "zero_loss_scale: a step has begun"))
MISUSE("asks for a loss scale of the first step alone", ALL, W1, NOTHING,
       FIRST_ERROR(zero_loss_scale(p->z, 1, &(double){0}), train(p)),
       LOGS("zero_loss_scale was called for the previous step"))
MISUSE("looks back at nothing", ALL, BOTH, NOTHING, zero_last_step(p->z, &(struct zero_step_info){0}),
       FAILS(ORDER, "zero_last_step: there was no zero_step yet"))
MISUSE("tunes the learning rate", ALL, BOTH, NOTHING, zero_tune(p->z, 0, "lr", 1e-3),
       FAILS(ARG, "zero_tune: key is \"lr\"", "allowed: clip"))
MISUSE("tunes to no number", ALL, BOTH, NOTHING, zero_tune(p->z, 0, "weight_decay", NAN),
       FAILS(ARG, "zero_tune: weight_decay is nan"))
MISUSE("tunes in a step", ALL, BOTH, NOTHING,
       FIRST_ERROR(micro_batch(p, 0, 0), zero_tune(p->z, ZERO_ALL, "clip", 1)),
       FAILS(ORDER, "zero_tune: a step has begun"))
MISUSE("begins a momentum", ALL, BOTH, p->cfg.optim.optimizer = ZERO_SGD, zero_tune(p->z, 0, "beta1", 0.9),
       FAILS(ARG, "beta1 of group 0 (sgd) is", "was 0 at zero_wrap"))
MISUSE("tunes on one rank", ALL, W2, NOTHING,
       FIRST_ERROR(zero_tune(p->z, ZERO_ALL, "clip", p->odd ? 2 : 1), train(p)),
       FAILS(MISMATCH, "zero_tune(clip)", "rank 1 called"))
MISUSE("reads a gradient before backward", ALL, BOTH, NOTHING,
       FIRST_ERROR(train(p), zero_read(p->z, 0, ZERO_VALUE_GRAD, 0, 8, (float[8]){0})),
       FAILS(ORDER, "zero_read: no backward bracket has ended"))
MISUSE("reads a gradient of a frozen tensor", ALL, BOTH, NOTHING,
       FIRST_ERROR(micro_batch(p, 0, 0), zero_read(p->z, TOY_FROZEN, ZERO_VALUE_GRAD, 0, 8, (float[8]){0})),
       FAILS(ARG, "is frozen", "gradient"))
MISUSE("writes a gradient", ALL, BOTH, NOTHING,
       FIRST_ERROR(micro_batch(p, 0, 0), zero_write(p->z, 0, ZERO_VALUE_GRAD, 0, 8, (float[8]){0})),
       FAILS(ARG, "zero_write: value is ZERO_VALUE_GRAD", "which can only be read"))
MISUSE("goes on with backward after reading a gradient", ALL, BOTH, NOTHING,
       FIRST_ERROR(micro_batch(p, 0, 0), zero_read(p->z, 0, ZERO_VALUE_GRAD, 0, 8, (float[8]){0}),
                   micro_batch(p, 0, 1)),
       FAILS(ORDER, "after zero_norm"))
MISUSE("goes below the first step", ALL, BOTH, NOTHING, zero_set_step(p->z, -1),
       FAILS(ARG, "zero_set_step: t is -1"))
MISUSE("sets the step on one rank", ALL, W2, NOTHING,
       FIRST_ERROR(p->odd ? zero_set_step(p->z, 7) : 0, train(p)),
       FAILS(MISMATCH, "zero_set_step", "rank 1 called"))
MISUSE(
    "shards nothing", S3, W2, p->cfg.memory.param_budget_bytes = 1 << 20, train(p),
    LOGS("stage 3 shards no parameters: all 4 units are resident because param_budget_bytes holds them all; "
         "lower it, or use stage 2"),
    .only_rank_0 = true)
MISUSE("shards nothing, with one unit declared", S3, W2,
       (p->cfg.memory.param_budget_bytes = 1 << 20, p->table[0].flags |= ZERO_RESIDENT), train(p),
       LOGS("all 4 units are resident, 1 of them by ZERO_RESIDENT or ZERO_TIED, the others because"),
       .only_rank_0 = true)
MISUSE("shards nothing, with all units declared", S3, W2, make_resident(p), train(p),
       LOGS("all 4 units are resident, 4 of them by ZERO_RESIDENT or ZERO_TIED; use stage 2"),
       .only_rank_0 = true)
MISUSE("asks no context for the norm", S0, W1, NOTHING, zero_norm(NULL, &(double){0}),
       FAILS(ARG, "zero_norm: z is NULL"))
MISUSE("has no place for the norm", ALL, BOTH, NOTHING,
       FIRST_ERROR(micro_batch(p, 0, 0), zero_norm(p->z, NULL)), FAILS(ARG, "zero_norm: norm is NULL"))
MISUSE("asks for the norm in a bracket", ALL, BOTH, NOTHING, FIRST_ERROR(begin(p, 1, ZERO_FORWARD), norm(p)),
       FAILS(ORDER, "zero_norm: unit 1 has an open bracket"))
MISUSE("asks for the norm before backward", ALL, BOTH, NOTHING, FIRST_ERROR(train(p), forward(p), norm(p)),
       FAILS(ORDER, "zero_norm: no backward bracket has ended"))
MISUSE("asks for the norm after three of four", ALL, BOTH, p->cfg.grad_accum_steps = 4,
       FIRST_ERROR(micro_batches(p, 3), norm(p)), FAILS(ORDER, "zero_norm: ", "3", "grad_accum_steps"))
MISUSE("goes on with backward after the norm", ALL, BOTH, NOTHING,
       FIRST_ERROR(micro_batch(p, 0, 0), norm(p), begin(p, 2, ZERO_BACKWARD)),
       FAILS(ORDER, "zero_begin: ", "after zero_norm"))
MISUSE("ends a micro-batch after the norm", ALL, BOTH, NOTHING,
       FIRST_ERROR(micro_batch(p, 0, 0), norm(p), zero_micro(p->z)),
       FAILS(ORDER, "zero_micro: zero_norm has ended"))
MISUSE("saves after the norm", ALL, BOTH, NOTHING,
       FIRST_ERROR(micro_batch(p, 0, 0), norm(p), zero_save(p->z, "/tmp", NULL)),
       FAILS(ORDER, "zero_save: ", "a step has begun"))
MISUSE("asks for the norm after a failure", ALL, BOTH, update_that_refuses(p), FIRST_ERROR(fails(p), norm(p)),
       FAILS(FAILED, "the update callback returned 3"))
MISUSE("asks for the norm on one rank alone", ALL, W2 | W3, NOTHING,
       FIRST_ERROR(micro_batch(p, 0, 0), p->odd ? norm(p) : 0, step(p), train(p)),
       FAILS(MISMATCH, "zero_norm"))
MISUSE("asks for the norm twice, and evaluates", ALL, BOTH, NOTHING, norms_every_step(p), TRAINS)
MISUSE("drops of no context", S0, W1, NOTHING, zero_drop(NULL), FAILS(ARG, "zero_drop: z is NULL"))
MISUSE("drops in a bracket", ALL, BOTH, NOTHING,
       FIRST_ERROR(micro_batch(p, 0, 0), begin(p, 1, ZERO_FORWARD), zero_drop(p->z)),
       FAILS(ORDER, "zero_drop: unit 1 has an open bracket"))
MISUSE("drops before backward", ALL, BOTH, NOTHING, FIRST_ERROR(train(p), forward(p), zero_drop(p->z)),
       FAILS(ORDER, "zero_drop: ", "there is nothing to drop"))
MISUSE("drops twice", ALL, BOTH, NOTHING, FIRST_ERROR(micro_batch(p, 0, 0), zero_drop(p->z), zero_drop(p->z)),
       FAILS(ORDER, "zero_drop: ", "there is nothing to drop"))
MISUSE("steps after the drop", ALL, BOTH, NOTHING,
       FIRST_ERROR(micro_batch(p, 0, 0), zero_drop(p->z), step(p)),
       FAILS(ORDER, "zero_step: no backward bracket has ended"))
MISUSE("drops after a failure", ALL, BOTH, update_that_refuses(p), FIRST_ERROR(fails(p), zero_drop(p->z)),
       FAILS(FAILED, "the update callback returned 3"))
MISUSE("drops on one rank alone", ALL, W2 | W3, NOTHING,
       FIRST_ERROR(micro_batch(p, 0, 0), p->odd ? zero_drop(p->z) : step(p), train(p)),
       FAILS(MISMATCH, "zero_drop"))
MISUSE("drops a step", ALL, BOTH, NOTHING,
       FIRST_ERROR(micro_batch(p, 7, 0), norm(p), zero_drop(p->z), train(p)), TRAINS)
MISUSE("carries fewer than no values", ALL, BOTH, NOTHING, zero_carry(p->z, &(double){0}, -1),
       FAILS(ARG, "zero_carry: n is -1"))
MISUSE("carries a value that is nowhere", ALL, BOTH, NOTHING, zero_carry(p->z, NULL, 1),
       FAILS(ARG, "zero_carry: n is 1, values is NULL"))
MISUSE("carries in no context", S0, W1, NOTHING, zero_carry(NULL, &(double){0}, 1),
       FAILS(ARG, "zero_carry: z is NULL"))
MISUSE("looks back in no context", S0, W1, NOTHING, zero_last_step(NULL, &(struct zero_step_info){0}),
       FAILS(ARG, "zero_last_step: z is NULL"))
MISUSE("looks back to nowhere", ALL, BOTH, NOTHING, zero_last_step(p->z, NULL),
       FAILS(ARG, "zero_last_step: info is NULL"))
MISUSE("asks for the norm before the first backward", SHARDED, BOTH, NOTHING, norm(p),
       FAILS(ORDER, "zero_norm: no backward bracket has ended"))
MISUSE("drops before the first backward", SHARDED, BOTH, NOTHING, zero_drop(p->z),
       FAILS(ORDER, "there is nothing to drop"))
MISUSE("asks for the norm after the step", ALL, BOTH, NOTHING,
       FIRST_ERROR(micro_batch(p, 0, 0), step(p), norm(p)),
       FAILS(ORDER, "zero_norm: no backward bracket has ended"))
MISUSE("drops after the step", ALL, BOTH, NOTHING,
       FIRST_ERROR(micro_batch(p, 0, 0), step(p), zero_drop(p->z)), FAILS(ORDER, "there is nothing to drop"))
MISUSE("loads after the norm", ALL, BOTH, NOTHING,
       FIRST_ERROR(micro_batch(p, 0, 0), norm(p), zero_load(p->z, "/tmp")), FAILS(ORDER, "a step has begun"))
MISUSE("asks for the norm with another pointer", ALL, BOTH, NOTHING,
       FIRST_ERROR(micro_batch(p, 0, 0), assign_parameter(p), norm(p)),
       FAILS(ORDER, "zero_norm: *param of tensor bias"))
MISUSE("drops with another pointer", ALL, BOTH, NOTHING,
       FIRST_ERROR(micro_batch(p, 0, 0), assign_parameter(p), zero_drop(p->z)),
       FAILS(ORDER, "zero_drop: *param of tensor bias"))
MISUSE("refuses and goes on", ALL, BOTH, NOTHING, refuses_and_goes_on(p), TRAINS)
MISUSE("reads a gradient before the first backward", SHARDED, BOTH, NOTHING, read_gradient(p),
       FAILS(ORDER, "no backward bracket has ended"))
MISUSE("reads no such value", ALL, BOTH, NOTHING,
       FIRST_ERROR(micro_batch(p, 0, 0), zero_read(p->z, 0, -2, 0, 8, (float[8]){0})),
       FAILS(ARG, "zero_read: value is -2"))
MISUSE("reads a gradient past its end", ALL, BOTH, NOTHING,
       FIRST_ERROR(micro_batch(p, 0, 0),
                   zero_read(p->z, 0, ZERO_VALUE_GRAD, toy_elems(0) - 7, 8, (float[8]){0})),
       FAILS(ARG, "zero_read: first is"))
MISUSE("reads a gradient in a bracket", ALL, BOTH, NOTHING,
       FIRST_ERROR(micro_batch(p, 0, 0), begin(p, 1, ZERO_FORWARD), read_gradient(p)),
       FAILS(ORDER, "unit 1 has an open bracket"))
MISUSE("reads a gradient after the step", ALL, BOTH, NOTHING,
       FIRST_ERROR(micro_batch(p, 0, 0), step(p), read_gradient(p)),
       FAILS(ORDER, "no backward bracket has ended"))
MISUSE("reads a gradient on one rank", ALL, W2 | W3, NOTHING,
       FIRST_ERROR(micro_batch(p, 0, 0), p->odd ? read_gradient(p) : 0, step(p), train(p)),
       FAILS(MISMATCH, "called zero_norm in step 1"))
TUNES_APART("tunes to another number on one rank", 0, zero_tune(p->z, 0, "beta2", p->odd ? 0.5 : 0.25),
            "called zero_tune(beta2) in step 2 with other arguments")
TUNES_APART("tunes a group on one rank", 0, p->odd ? zero_tune(p->z, 0, "eps", 1e-6) : 0,
            "called zero_tune(eps)")
TUNES_APART("sets another step on one rank", 0, zero_set_step(p->z, p->odd ? 5 : 4),
            "called zero_set_step in step 2 with other arguments")
TUNES_APART("does not tune on one rank", 0, p->odd ? 0 : zero_tune(p->z, ZERO_ALL, "clip", 1e-6),
            "zero_tune(clip)")
TUNES_APART("does not tune on one rank, and reads a gradient", 0,
            FIRST_ERROR(p->odd ? 0 : zero_tune(p->z, ZERO_ALL, "clip", 1e-6), micro_batch(p, 1, 0),
                        read_gradient(p)),
            "zero_tune(clip)")
APART("sets another step on one rank, and saves", 0,
      FIRST_ERROR(zero_set_step(p->z, p->odd ? 5 : 4), zero_save(p->z, "/tmp/zero-tune-none", NULL)),
      "zero_tune or zero_set_step gave rank", "gave rank 1 other", "gave rank 2 other")
TUNES_APART("tunes to more micro-batches on one rank", 2,
            FIRST_ERROR(zero_tune(p->z, ZERO_ALL, "grad_accum_steps", p->odd ? 1 : 2), micro_batch(p, 1, 0),
                        p->odd ? 0 : micro_batch(p, 1, 1)),
            "zero_tune(grad_accum_steps) in step 2 with other arguments")
MISUSE("carries a value on one rank of three", ALL, W3, NOTHING,
       FIRST_ERROR(p->odd ? zero_carry(p->z, &(double){1}, 1) : 0, train(p)),
       FAILS(MISMATCH, "rank 2 called zero_carry"))
MISUSE("tunes after a failure", ALL, BOTH, update_that_refuses(p),
       FIRST_ERROR(fails(p), zero_tune(p->z, ZERO_ALL, "clip", 1)),
       FAILS(FAILED, "the update callback returned 3"))
MISUSE("sets the step after a failure", ALL, BOTH, update_that_refuses(p),
       FIRST_ERROR(fails(p), zero_set_step(p->z, 1)), FAILS(FAILED, "the update callback returned 3"))
