/* SPDX-License-Identifier: Apache-2.0 */
/* test_misuse_check.c: what check mode finds in a model that uses memory outside its brackets (misuse.h). */
#include "test/zero/misuse.h"

static int writes_after_end(struct program *p)
{
    float *kept = NULL;
    int err = FIRST_ERROR(forward(p), begin(p, 0, ZERO_BACKWARD));
    if (!err) {
        kept = p->model.grad[0];
        toy_add_gradient(&p->model, 0, 0, 0);
        err = end(p, 0, ZERO_BACKWARD);
    }
    if (!err)
        kept[3] = 1;
    return FIRST_ERROR(err, step(p));
}

static int reads_before_begin(struct program *p)
{
    volatile float seen = ((const float *)p->model.param[0])[7];
    (void)seen;
    return train(p);
}

static int writes_a_parameter(struct program *p)
{
    int err = begin(p, 0, ZERO_FORWARD);
    if (!err)
        ((float *)p->model.param[0])[7] = 1;
    return FIRST_ERROR(err, end(p, 0, ZERO_FORWARD));
}

/* Computes the gradient from the parameters that the model had before zero_wrap. */
static void add_gradient_of_a_copy(struct program *p, int unit)
{
    struct toy copy = p->model;
    memcpy(copy.param, copy.own, sizeof copy.param);
    toy_add_gradient(&copy, unit, 0, p->rank->rank);
}

/* Leaves the last element of a ZERO_GRAD_OVERWRITE gradient unwritten. */
static int leaves_one_unwritten(struct program *p)
{
    int err = FIRST_ERROR(forward(p), begin(p, 3, ZERO_BACKWARD));
    for (int64_t i = 0; !err && i + 1 < toy_elems(4); i++)
        ((uint16_t *)p->model.grad[4])[i] = 0x3f80;
    return FIRST_ERROR(err, end(p, 3, ZERO_BACKWARD));
}

/* Opens all units. Without check mode this works if the slots are as large as the model. */
static int four_units_open(struct program *p)
{
    int err = 0;
    for (int u = 0; !err && u < TOY_UNITS; u++)
        err = begin(p, u, ZERO_FORWARD);
    for (int u = TOY_UNITS; !err && u-- > 0;)
        err = end(p, u, ZERO_FORWARD);
    return FIRST_ERROR(err, train(p));
}

static void add_to_unit_0_early(struct program *p, int unit)
{
    add_gradient(p, unit);
    if (unit == 1)
        ((float *)p->model.grad[0])[3] += 1;
}

/* Micro-batch 1 adds to the gradient of unit 0 outside its bracket: before it, or before zero_step. */
static int adds_outside(struct program *p, bool before)
{
    int err = FIRST_ERROR(micro_batch(p, 0, 0), forward(p),
                          backward_with(p, before ? add_to_unit_0_early : add_gradient));
    if (!err && !before)
        ((float *)p->model.grad[0])[3] += 1;
    return FIRST_ERROR(err, step(p));
}

/* ---- rows ---- */

#define CHECKED(...) MISUSE(__VA_ARGS__, .variable = "ZERO_CHECK", .value = "1")

MISUSE("holds four units open", S2 | S3, W2, p->table[TOY_STACKED].flags |= ZERO_POINTER_PER_BEGIN,
       four_units_open(p), TRAINS)
CHECKED("holds four units open, checked", S3, W2, p->table[TOY_STACKED].flags |= ZERO_POINTER_PER_BEGIN,
        four_units_open(p),
        FAILS(BUDGET, "zero_begin: no parameter slot is free for unit 3", "flag ZERO_RESIDENT",
              "raise prefetch"))
CHECKED("writes a gradient after its bracket", SHARDED, BOTH, NOTHING, writes_after_end(p),
        FAILS(ORDER, "the model's fault", "writes the gradient of tensor embedding", "element 3"))
CHECKED("writes a gradient before its bracket", IN_PLACE, BOTH, p->cfg.grad_accum_steps = 2,
        adds_outside(p, true),
        FAILS(ORDER, "the model's fault", "in step 1 it wrote into the gradient of tensor embedding",
              "brackets of unit 0"))
CHECKED("writes a gradient before the step", IN_PLACE, BOTH, p->cfg.grad_accum_steps = 2,
        adds_outside(p, false),
        FAILS(ORDER, "the model's fault", "in step 1 it wrote into the gradient of tensor embedding",
              "brackets of unit 0"))
CHECKED("reads a parameter before its bracket", SHARDED, BOTH, NOTHING, reads_before_begin(p),
        FAILS(ORDER, "the model's fault", "reads tensor embedding", "element 7"))
CHECKED("writes a parameter", SHARDED, BOTH, NOTHING, writes_a_parameter(p),
        FAILS(ORDER, "the model's fault", "writes tensor embedding", "which may only be read"))
CHECKED("computes with a copy made before zero_wrap", ALL, BOTH, NOTHING,
        FIRST_ERROR(forward(p), backward_with(p, add_gradient_of_a_copy), step(p)),
        LOGS("step 1 was skipped"))
CHECKED("adds to a gradient that it says it overwrites", ALL, BOTH,
        p->model.table[0].flags |= ZERO_GRAD_OVERWRITE, train(p),
        FAILS(ORDER, "the model's fault", "tensor embedding has ZERO_GRAD_OVERWRITE", "unit 0"))
CHECKED("the same in bf16", ALL, BOTH, p->model.table[2].flags |= ZERO_GRAD_OVERWRITE, train(p),
        FAILS(ORDER, "the model's fault", "tensor bias has ZERO_GRAD_OVERWRITE", "unit 1"))
CHECKED("the same in layers, with four micro-batches", ALL, BOTH,
        (p->model.table[TOY_STACKED].flags |= ZERO_GRAD_OVERWRITE, p->cfg.grad_accum_steps = 4), train(p),
        FAILS(ORDER, "the model's fault", "tensor layers has ZERO_GRAD_OVERWRITE", "unit 2"))
CHECKED("leaves an element of such a gradient unwritten", ALL, BOTH, NOTHING, leaves_one_unwritten(p),
        FAILS(ORDER, "the model's fault", "tensor head has ZERO_GRAD_OVERWRITE", "element 256 unwritten"))
CHECKED("has a shape that is too small", IN_PLACE, BOTH, p->model.table[0].shape[0]--, train(p),
        FAILS(ORDER, "the model's fault", "beyond the end of the gradient of tensor embedding (unit 0)"))
CHECKED("has a shape that is too small, without brackets", IN_PLACE, BOTH, p->model.table[0].shape[0]--,
        train_unbracketed(p, NULL),
        FAILS(ORDER, "the model's fault", "beyond the end of the gradient of tensor embedding (unit 0)"))
CHECKED("the same of layers", IN_PLACE, BOTH, p->model.table[TOY_STACKED].shape[1]--, train(p),
        FAILS(ORDER, "the model's fault", "beyond the end of the gradient of tensor layers (unit 2)"))
CHECKED("the same of layers, without brackets", IN_PLACE, BOTH, p->model.table[TOY_STACKED].shape[1]--,
        train_unbracketed(p, NULL),
        FAILS(ORDER, "the model's fault", "beyond the end of the gradient of tensor layers (unit 2)"))
CHECKED("the same of bf16", IN_PLACE, BOTH, p->model.table[4].shape[0] = 128, train(p),
        FAILS(ORDER, "the model's fault", "beyond the end of the gradient of tensor head (unit 3)"))
CHECKED("the same of bf16, without brackets", IN_PLACE, BOTH, p->model.table[4].shape[0] = 128,
        train_unbracketed(p, NULL),
        FAILS(ORDER, "the model's fault", "beyond the end of the gradient of tensor head (unit 3)"))
MISUSE("checks on one rank alone", IN_PLACE, W2, p->cfg.debug.check = p->odd, train(p),
       FAILS(MISMATCH, "check is 1 on rank 1 and 0 on rank 0"))
