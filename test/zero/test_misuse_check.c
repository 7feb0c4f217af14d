/* SPDX-License-Identifier: Apache-2.0 */
/* test_misuse_check.c: ways to use the library wrongly (misuse.h): what check mode finds of the model. */
#include "test/zero/misuse.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static int writes_after_end(struct program *p)
{
    int err = toy_forward(&p->model, p->z, true);
    float *kept = NULL;
    if (!err)
        err = zero_begin(p->z, 0, ZERO_BACKWARD);
    if (!err) {
        kept = p->model.grad[0];
        toy_add_gradient(&p->model, 0, 0, 0);
        err = zero_end(p->z, 0, ZERO_BACKWARD);
    }
    if (!err)
        kept[3] = 1;
    return err ? err : zero_step(p->z, 1e-2f, NULL);
}

static int reads_before_begin(struct program *p)
{
    volatile float seen = ((const float *)p->model.param[0])[7];
    (void)seen;
    return train(p);
}

static int writes_a_parameter(struct program *p)
{
    int err = zero_begin(p->z, 0, ZERO_FORWARD);
    if (!err)
        ((float *)p->model.param[0])[7] = 1;
    return err ? err : zero_end(p->z, 0, ZERO_FORWARD);
}

/* A copy of the model's structs, made before zero_wrap, is what computes. */
static int computes_with_a_copy(struct program *p)
{
    struct toy copy = p->model;
    int err = toy_forward(&p->model, p->z, true);
    memcpy(copy.param, copy.own, sizeof copy.param);
    for (int u = TOY_UNITS; !err && u-- > 0;) {
        err = zero_begin(p->z, u, ZERO_BACKWARD);
        memcpy(copy.grad, p->model.grad, sizeof copy.grad);
        if (!err)
            toy_add_gradient(&copy, u, 0, p->rank->rank);
        if (!err)
            err = zero_end(p->z, u, ZERO_BACKWARD);
    }
    return err ? err : zero_step(p->z, 1e-2f, NULL);
}

static void overwrites_f32(struct program *p)
{
    p->model.table[0].flags |= ZERO_GRAD_OVERWRITE;
}

static void overwrites_bf16(struct program *p)
{
    p->model.table[2].flags |= ZERO_GRAD_OVERWRITE;
}

static void overwrites_layers(struct program *p)
{
    p->model.table[TOY_STACKED].flags |= ZERO_GRAD_OVERWRITE;
    p->cfg.grad_accum_steps = 4;
}

/* The last element of what it overwrites is left as it was. */
static int leaves_one_unwritten(struct program *p)
{
    int err = toy_forward(&p->model, p->z, true);
    if (!err)
        err = zero_begin(p->z, 3, ZERO_BACKWARD);
    for (int64_t i = 0; !err && i + 1 < toy_elems(4); i++)
        ((uint16_t *)p->model.grad[4])[i] = 0x3f80;
    return err ? err : zero_end(p->z, 3, ZERO_BACKWARD);
}

static void one_row_less(struct program *p)
{
    p->model.table[0].shape[0]--;
}

static void a_little_less_of_each_layer(struct program *p)
{
    p->model.table[TOY_STACKED].shape[1]--;
}

static void much_less(struct program *p)
{
    p->model.table[4].shape[0] = 128; /* as many bytes as a gradient is aligned to */
}

static int train_plainly(struct program *p)
{
    return train_unbracketed(p, NULL);
}

static void one_rank_checks(struct program *p)
{
    p->cfg.debug.check = p->odd;
}

/* ---- the rows ---- */

/* As many as there are: where slots take as much memory as the model does, nothing would notice. */
static int four_units_open(struct program *p)
{
    int err = 0;
    for (int u = 0; !err && u < TOY_UNITS; u++)
        err = zero_begin(p->z, u, ZERO_FORWARD);
    for (int u = TOY_UNITS; !err && u-- > 0;)
        err = zero_end(p->z, u, ZERO_FORWARD);
    return err ? err : train(p);
}

static void open_several_layers(struct program *p)
{
    p->table[TOY_STACKED].flags |= ZERO_POINTER_PER_BEGIN;
}

/* In the second micro-batch, backward of unit 1 adds to the gradient of unit 0, which is not open yet; or
 * somebody adds to it when backward is over. */
static int adds_outside(struct program *p, bool before)
{
    int err = 0;
    for (int k = 0; !err && k < 2; k++) {
        err = toy_forward(&p->model, p->z, true);
        for (int u = TOY_UNITS; !err && u-- > 0;) {
            err = zero_begin(p->z, u, ZERO_BACKWARD);
            if (!err)
                toy_add_gradient(&p->model, u, 0, p->rank->rank + k * p->rank->world);
            if (!err && before && k == 1 && u == 1)
                ((float *)p->model.grad[0])[3] += 1;
            if (!err)
                err = zero_end(p->z, u, ZERO_BACKWARD);
        }
    }
    if (!err && !before)
        ((float *)p->model.grad[0])[3] += 1;
    return err ? err : zero_step(p->z, 1e-2f, NULL);
}

static int adds_before_begin(struct program *p)
{
    return adds_outside(p, true);
}

static int adds_before_step(struct program *p)
{
    return adds_outside(p, false);
}

static void accumulate_two(struct program *p)
{
    p->cfg.grad_accum_steps = 2;
}

static const struct misuse rows[] = {
    {"holds four units open", S2 | S3, W2, open_several_layers, four_units_open, RIGHT},
    {"holds four units open, checked",
     S3,
     W2,
     open_several_layers,
     four_units_open,
     ERROR,
     ZERO_ERR_BUDGET,
     {"zero_begin: no parameter slot is free for unit 3", "flag ZERO_RESIDENT", "raise prefetch"},
     "ZERO_CHECK",
     "1"},
    {"writes a gradient after its bracket",
     SHARDED,
     BOTH,
     NULL,
     writes_after_end,
     ERROR,
     ZERO_ERR_ORDER,
     {"the model's fault", "writes the gradient of tensor embedding", "element 3"},
     "ZERO_CHECK",
     "1"},
    {"writes a gradient before its bracket",
     IN_PLACE,
     BOTH,
     accumulate_two,
     adds_before_begin,
     ERROR,
     ZERO_ERR_ORDER,
     {"the model's fault", "in step 1 it wrote into the gradient of tensor embedding", "brackets of unit 0"},
     "ZERO_CHECK",
     "1"},
    {"writes a gradient before the step",
     IN_PLACE,
     BOTH,
     accumulate_two,
     adds_before_step,
     ERROR,
     ZERO_ERR_ORDER,
     {"the model's fault", "in step 1 it wrote into the gradient of tensor embedding", "brackets of unit 0"},
     "ZERO_CHECK",
     "1"},
    {"reads a parameter before its bracket",
     SHARDED,
     BOTH,
     NULL,
     reads_before_begin,
     ERROR,
     ZERO_ERR_ORDER,
     {"the model's fault", "reads tensor embedding", "element 7"},
     "ZERO_CHECK",
     "1"},
    {"writes a parameter",
     SHARDED,
     BOTH,
     NULL,
     writes_a_parameter,
     ERROR,
     ZERO_ERR_ORDER,
     {"the model's fault", "writes tensor embedding", "which may only be read"},
     "ZERO_CHECK",
     "1"},
    {"computes with a copy made before zero_wrap",
     ALL,
     BOTH,
     NULL,
     computes_with_a_copy,
     LINE,
     0,
     {"step 1 was skipped"},
     "ZERO_CHECK",
     "1"},
    {"adds to a gradient that it says it overwrites",
     ALL,
     BOTH,
     overwrites_f32,
     NULL,
     ERROR,
     ZERO_ERR_ORDER,
     {"the model's fault", "tensor embedding has ZERO_GRAD_OVERWRITE", "unit 0"},
     "ZERO_CHECK",
     "1"},
    {"the same in bf16",
     ALL,
     BOTH,
     overwrites_bf16,
     NULL,
     ERROR,
     ZERO_ERR_ORDER,
     {"the model's fault", "tensor bias has ZERO_GRAD_OVERWRITE", "unit 1"},
     "ZERO_CHECK",
     "1"},
    {"the same in layers, with four micro-batches",
     ALL,
     BOTH,
     overwrites_layers,
     NULL,
     ERROR,
     ZERO_ERR_ORDER,
     {"the model's fault", "tensor layers has ZERO_GRAD_OVERWRITE", "unit 2"},
     "ZERO_CHECK",
     "1"},
    {"leaves an element of such a gradient unwritten",
     ALL,
     BOTH,
     NULL,
     leaves_one_unwritten,
     ERROR,
     ZERO_ERR_ORDER,
     {"the model's fault", "tensor head has ZERO_GRAD_OVERWRITE", "element 256 unwritten"},
     "ZERO_CHECK",
     "1"},
    {"has a shape that is too small",
     IN_PLACE,
     BOTH,
     one_row_less,
     NULL,
     ERROR,
     ZERO_ERR_ORDER,
     {"the model's fault", "beyond the end of the gradient of tensor embedding (unit 0)"},
     "ZERO_CHECK",
     "1"},
    {"has a shape that is too small, without brackets",
     IN_PLACE,
     BOTH,
     one_row_less,
     train_plainly,
     ERROR,
     ZERO_ERR_ORDER,
     {"the model's fault", "beyond the end of the gradient of tensor embedding (unit 0)"},
     "ZERO_CHECK",
     "1"},
    {"the same of layers",
     IN_PLACE,
     BOTH,
     a_little_less_of_each_layer,
     NULL,
     ERROR,
     ZERO_ERR_ORDER,
     {"the model's fault", "beyond the end of the gradient of tensor layers (unit 2)"},
     "ZERO_CHECK",
     "1"},
    {"the same of layers, without brackets",
     IN_PLACE,
     BOTH,
     a_little_less_of_each_layer,
     train_plainly,
     ERROR,
     ZERO_ERR_ORDER,
     {"the model's fault", "beyond the end of the gradient of tensor layers (unit 2)"},
     "ZERO_CHECK",
     "1"},
    {"the same of bf16",
     IN_PLACE,
     BOTH,
     much_less,
     NULL,
     ERROR,
     ZERO_ERR_ORDER,
     {"the model's fault", "beyond the end of the gradient of tensor head (unit 3)"},
     "ZERO_CHECK",
     "1"},
    {"the same of bf16, without brackets",
     IN_PLACE,
     BOTH,
     much_less,
     train_plainly,
     ERROR,
     ZERO_ERR_ORDER,
     {"the model's fault", "beyond the end of the gradient of tensor head (unit 3)"},
     "ZERO_CHECK",
     "1"},
    {"checks on one rank alone",
     IN_PLACE,
     W2,
     one_rank_checks,
     NULL,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"check is 1 on rank 1 and 0 on rank 0"}},
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
