/* SPDX-License-Identifier: Apache-2.0 */
/* test_misuse_table.c: ways to use the library wrongly (misuse.h):
 * the table of tensors, and structs of other versions. */
#include "test/zero/misuse.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

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

static const struct zero_optim plain_group = ZERO_OPTIM_INIT;

/* A second group, for the program to change, and the tensor that is in it. */
static struct zero_optim *second_group(struct program *p, int tensor)
{
    p->group = plain_group;
    p->cfg.optim_groups = &p->group;
    p->cfg.n_optim_groups = 1;
    p->model.table[tensor].group = 1;
    return &p->group;
}

static void unknown_optimizer(struct program *p)
{
    second_group(p, 1)->optimizer = 99;
}

static void group_of_zeros(struct program *p)
{
    memset(second_group(p, 1), 0, sizeof plain_group);
}

static void group_there_is_not(struct program *p)
{
    second_group(p, 1);
    p->model.table[1].group = 2;
}

static void group_of_a_frozen_tensor_there_is_not(struct program *p)
{
    p->model.table[TOY_FROZEN].group = -1;
}

static void number_of_groups_alone(struct program *p)
{
    p->cfg.n_optim_groups = 1;
}

static void too_many_groups(struct program *p)
{
    second_group(p, 1);
    p->cfg.n_optim_groups = 256;
}

static void negative_rate(struct program *p)
{
    second_group(p, 2)->lr_scale = -0.5f;
}

static void rate_that_is_no_number(struct program *p)
{
    p->cfg.optim.lr_scale = NAN;
}

static void infinite_decay(struct program *p)
{
    second_group(p, 0)->weight_decay = INFINITY;
}

static void own_update_beside_optimizer(struct program *p)
{
    struct zero_optim *g = second_group(p, 1);
    g->update = refuses;
    g->optimizer = ZERO_SGD;
}

static void own_update_beside_decay(struct program *p)
{
    struct zero_optim *g = second_group(p, 1);
    g->update = refuses;
    g->weight_decay = 2;
}

static void other_optimizer(struct program *p)
{
    if (p->odd)
        second_group(p, 1)->optimizer = ZERO_SGD;
    else
        second_group(p, 1);
}

static void other_rate(struct program *p)
{
    second_group(p, 4)->lr_scale = p->odd ? 0.5f : 1;
}

static void other_number_of_groups(struct program *p)
{
    if (p->odd)
        second_group(p, 4);
}

static void other_group(struct program *p)
{
    second_group(p, p->odd ? 4 : 2);
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
    second_group(p, 4)->lr_scale = 1e30f;
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

static void one_by_nesterov(struct program *p)
{
    second_group(p, 1)->optimizer = ZERO_NESTEROV;
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
     {"optim_groups[0]: optimizer is 99; allowed: adamw"}},
    {"leaves a group zero",
     ALL,
     BOTH,
     group_of_zeros,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"optim_groups[0]: optimizer is 0: a struct zero_optim starts from ZERO_OPTIM_INIT; allowed: adamw"}},
    {"names a group that there is not",
     ALL,
     BOTH,
     group_there_is_not,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"tensors[1] (layers): group is 2; allowed: 0..1 (see n_optim_groups)"}},
    {"names a group below 0 for a frozen tensor",
     ALL,
     W1,
     group_of_a_frozen_tensor_there_is_not,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"tensors[3] (frozen): group is -1; allowed: 0..0"}},
    {"gives a number of groups alone",
     ALL,
     W1,
     number_of_groups_alone,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"optim_groups is NULL but n_optim_groups is 1"}},
    {"gives too many groups",
     ALL,
     W1,
     too_many_groups,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"n_optim_groups is 256; allowed: 0 to 255"}},
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
     {"optim_groups[0]: lr_scale is -0.5; allowed: a finite number, 0 or more"}},
    {"scales the learning rate by NaN",
     ALL,
     W1,
     rate_that_is_no_number,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"lr_scale is nan; allowed: a finite number"}},
    {"has an infinite decay",
     ALL,
     W1,
     infinite_decay,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"optim_groups[0]: weight_decay is inf"}},
    {"names an optimizer beside its own update",
     ALL,
     W1,
     own_update_beside_optimizer,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"optim_groups[0]: optimizer is sgd but update is set as well"}},
    {"has a decay beside its own update",
     ALL,
     W1,
     own_update_beside_decay,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"optim_groups[0]: beta1 is -1, beta2 -1, eps -1 and weight_decay 2, but update is set"}},
    {"names another optimizer on one rank",
     ALL,
     W2,
     other_optimizer,
     NULL,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"optim_groups[0]: optimizer is sgd on rank 1 and adamw on rank 0; all ranks must have the same"}},
    {"scales the learning rate otherwise on one rank",
     ALL,
     W2,
     other_rate,
     NULL,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"optim_groups[0]: lr_scale is 0.5 on rank 1 and 1 on rank 0"}},
    {"has more groups on one rank",
     ALL,
     W2,
     other_number_of_groups,
     NULL,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"n_optim_groups is 1 on rank 1 and 0 on rank 0"}},
    {"has a tensor in another group on one rank",
     ALL,
     W2,
     other_group,
     NULL,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"tensors[2] (bias", "rank 1 and rank 0 differ", "group"}},
    {"steps by a rate that its scale makes infinite",
     ALL,
     BOTH,
     large_rate,
     large_lr,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_step: lr 1e+30", "lr_scale 1e+30 of group 1"}},
    {"reads a state that the tensor's optimizer has not",
     ALL,
     BOTH,
     one_by_nesterov,
     reads_a_state_too_many,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_read: value is 3; allowed: 0..2",
      "optimizer of tensor layers: nesterov, 1 state per weight: momentum"}},
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
