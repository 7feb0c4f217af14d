/* SPDX-License-Identifier: Apache-2.0 */
/* test_misuse_table.c: ways to use the library wrongly (misuse.h):
 * the table of tensors, and structs of other versions. */
#include "test/zero/misuse.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static void size_of_nothing(struct program *p)
{
    p->cfg.size = 0;
}

static void two_of_a_name(struct program *p)
{
    p->model.table[2].name = p->model.table[0].name;
}

static void gap_in_units(struct program *p)
{
    p->model.table[4].unit = 5;
}

static void pointer_of_nothing(struct program *p)
{
    p->model.table[2].param = NULL;
}

static void values_of_nothing(struct program *p)
{
    p->model.param[2] = NULL;
}

static void unknown_optimizer(struct program *p)
{
    p->model.table[1].optimizer = 99;
}

static void negative_rate(struct program *p)
{
    p->model.table[2].lr_scale = -0.5f;
}

static void rate_that_is_no_number(struct program *p)
{
    p->model.table[TOY_FROZEN].lr_scale = NAN;
}

static void infinite_decay(struct program *p)
{
    p->model.table[0].decay_scale = INFINITY;
}

static void decay_and_none(struct program *p)
{
    p->model.table[2].decay_scale = 0.5f;
}

static void own_update_beside_optimizer(struct program *p)
{
    p->cfg.update = refuses;
    p->model.table[1].optimizer = ZERO_SGD;
}

static void own_update_beside_decay(struct program *p)
{
    p->cfg.update = refuses;
    p->model.table[1].decay_scale = 2;
}

static void other_optimizer(struct program *p)
{
    if (p->odd)
        p->model.table[1].optimizer = ZERO_SGD;
}

static void other_rate(struct program *p)
{
    if (p->odd)
        p->model.table[4].lr_scale = 0.5f;
}

static void negative_granule(struct program *p)
{
    p->model.table[2].granule = -1;
}

static void granule_of_more_than_there_is(struct program *p)
{
    p->model.table[0].granule = toy_elems(0) + 1;
}

static void granule_of_more_than_a_layer(struct program *p)
{
    p->model.table[TOY_STACKED].granule = toy_elems(TOY_STACKED) / p->model.table[TOY_STACKED].shape[0] + 1;
}

static void other_granule(struct program *p)
{
    p->model.table[0].granule = p->odd ? 48 : 64;
}

/* Of small ones, equal slices are the same. */
static void other_small_granule(struct program *p)
{
    p->model.table[0].granule = p->odd ? 16 : 0;
}

static void large_rate(struct program *p)
{
    p->model.table[4].lr_scale = 1e30f;
}

static int large_lr(struct program *p)
{
    int err = micro_batch(p, 0, 0);
    return err ? err : zero_step(p->z, 1e30f, NULL);
}

static int reads_a_state_too_many(struct program *p)
{
    float x;
    return zero_read(p->z, 1, ZERO_VALUE_STATE + 1, 0, 1, &x);
}

/* That of one kind named and of the same by default is one. */
static void names_what_it_has(struct program *p)
{
    p->model.table[0].optimizer = p->odd ? ZERO_ADAMW : 0;
    p->model.table[0].lr_scale = p->odd ? 1.0f : 0;
}

static void one_by_nesterov(struct program *p)
{
    p->model.table[1].optimizer = ZERO_NESTEROV;
}

/* ---- the rows ---- */

static const struct misuse rows[] = {
    {"names an optimizer that there is not",
     ALL,
     BOTH,
     unknown_optimizer,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"tensors[1] (layers): optimizer is 99", "allowed: adamw", "or 0 for cfg.optimizer"}},
    {"asks for a granule of less than nothing",
     ALL,
     BOTH,
     negative_granule,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"tensors[2] (bias): granule is -1; allowed: 0..", "the elements of the tensor"}},
    {"asks for a granule larger than its tensor",
     ALL,
     BOTH,
     granule_of_more_than_there_is,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"tensors[0] (embedding): granule is ", "allowed: 0..", "the elements of the tensor"}},
    {"asks for a granule larger than a layer",
     ALL,
     BOTH,
     granule_of_more_than_a_layer,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"tensors[1] (layers): granule is ", "allowed: 0..", "the elements of a layer"}},
    {"gives ranks different granules",
     ALL,
     W2,
     other_granule,
     NULL,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"tensors[0] (embedding", "rank 1 and rank 0 differ", "granule"}},
    {"gives ranks different granules that no slice would tear", ALL, W2, other_small_granule, NULL, RIGHT},
    {"scales a learning rate by a negative number",
     ALL,
     W1,
     negative_rate,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"tensors[2] (bias): lr_scale is -0.5", "or 0 for 1"}},
    {"scales the learning rate of a frozen tensor by NaN",
     ALL,
     W1,
     rate_that_is_no_number,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"tensors[3] (frozen): lr_scale is nan", "or 0 for 1"}},
    {"scales the decay by infinity",
     ALL,
     W1,
     infinite_decay,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"tensors[0] (embedding): decay_scale is inf", "or 0 for 1"}},
    {"scales the decay of a tensor that has none",
     ALL,
     W1,
     decay_and_none,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"tensors[2] (bias): decay_scale is 0.5 with ZERO_NO_DECAY"}},
    {"names an optimizer beside its own update",
     ALL,
     W1,
     own_update_beside_optimizer,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"tensors[1] (layers): optimizer is sgd but cfg.update is set"}},
    {"scales the decay beside its own update",
     ALL,
     W1,
     own_update_beside_decay,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"tensors[1] (layers): decay_scale is 2 but cfg.update is set"}},
    {"names another optimizer on one rank",
     ALL,
     W2,
     other_optimizer,
     NULL,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"tensors[1] (layers", "rank 1 and rank 0 differ", "optimizer"}},
    {"scales the learning rate otherwise on one rank",
     ALL,
     W2,
     other_rate,
     NULL,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"tensors[4] (head", "rank 1 and rank 0 differ", "lr_scale"}},
    {"names the optimizer that it has, on one rank", ALL, W2, names_what_it_has, NULL, RIGHT},
    {"steps by a rate that its scale makes infinite",
     ALL,
     BOTH,
     large_rate,
     large_lr,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_step: lr is 1e+30", "lr_scale 1e+30"}},
    {"reads a state that the tensor's optimizer has not",
     ALL,
     BOTH,
     one_by_nesterov,
     reads_a_state_too_many,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_read: value is 3; allowed: 0..2",
      "tensor layers has those of nesterov, 1 state per weight: momentum"}},
    {"does not begin with ZERO_CONFIG_INIT",
     ALL,
     W1,
     size_of_nothing,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"ZERO_CONFIG_INIT"}},
    {"gives two tensors one name", ALL, BOTH, two_of_a_name, NULL, ERROR, ZERO_ERR_ARG, {"embedding"}},
    {"leaves a unit out", ALL, BOTH, gap_in_units, NULL, ERROR, ZERO_ERR_ARG, {"unit"}},
    {"gives no address of a pointer",
     ALL,
     BOTH,
     pointer_of_nothing,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"tensors[2]", "param is NULL"}},
    {"gives a pointer to nothing",
     ALL,
     BOTH,
     values_of_nothing,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"tensors[2]", "NULL"}},
    {"has an update that refuses",
     ALL,
     BOTH,
     update_that_refuses,
     trains_and_settles,
     ERROR,
     ZERO_ERR_FAILED,
     {"the update callback returned 3", "for tensor"}},
    {"misspells a variable",
     ALL,
     W1,
     NULL,
     NULL,
     LINE,
     0,
     {"ZERO_STGE is not known", "did you mean ZERO_STAGE"},
     "ZERO_STGE",
     "3"},
    {"names a variable that nobody has",
     ALL,
     W1,
     NULL,
     NULL,
     LINE,
     0,
     {"ZERO_ALL_THE_MEMORY is not known", "the nearest is"},
     "ZERO_ALL_THE_MEMORY",
     "1"},
    {"gives a variable no number",
     ALL,
     W1,
     NULL,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"ZERO_STAGE is \"three\"", "allowed"},
     "ZERO_STAGE",
     "three"},
    {"logs to a file that cannot be",
     ALL,
     W1,
     NULL,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"ZERO_LOG is", "allowed"},
     "ZERO_LOG",
     "/no such folder/log"},
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
