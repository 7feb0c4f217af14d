/* SPDX-License-Identifier: Apache-2.0 */
/* test_misuse_table.c: wrong tables of tensors and optimizer groups, structs of other versions, and
 * environment variables (misuse.h). */
#include "test/zero/misuse.h"

static const struct zero_optim plain_group = ZERO_OPTIM_INIT;

/* Puts the tensor into a second group, and returns the group for the row to change. */
static struct zero_optim *second_group(struct program *p, int tensor)
{
    p->group = plain_group;
    p->cfg.optim_groups = &p->group;
    p->cfg.n_optim_groups = 1;
    p->model.table[tensor].group = 1;
    return &p->group;
}

/* ---- rows ---- */

MISUSE("names an optimizer that there is not", ALL, BOTH, second_group(p, 1)->optimizer = 99, train(p),
       FAILS(ARG, "optim_groups[0]: optimizer is 99; allowed: adamw"))
MISUSE(
    "leaves a group zero", ALL, BOTH, memset(second_group(p, 1), 0, sizeof plain_group), train(p),
    FAILS(ARG,
          "optim_groups[0]: optimizer is 0: a struct zero_optim starts from ZERO_OPTIM_INIT; allowed: adamw"))
MISUSE("names a group that there is not", ALL, BOTH, (second_group(p, 1), p->model.table[1].group = 2),
       train(p), FAILS(ARG, "tensors[1] (layers): group is 2; allowed: 0..1 (see n_optim_groups)"))
MISUSE("names a group below 0 for a frozen tensor", ALL, W1, p->model.table[TOY_FROZEN].group = -1, train(p),
       FAILS(ARG, "tensors[3] (frozen): group is -1; allowed: 0..0"))
MISUSE("gives a number of groups alone", ALL, W1, p->cfg.n_optim_groups = 1, train(p),
       FAILS(ARG, "optim_groups is NULL but n_optim_groups is 1"))
MISUSE("gives too many groups", ALL, W1, (second_group(p, 1), p->cfg.n_optim_groups = 256), train(p),
       FAILS(ARG, "n_optim_groups is 256; allowed: 0 to 255"))
MISUSE("asks for a granule of less than nothing", ALL, BOTH, p->model.table[2].granule = -1, train(p),
       FAILS(ARG, "tensors[2] (bias): granule is -1; allowed: 0..", "the elements of the tensor"))
MISUSE("asks for a granule larger than its tensor", ALL, BOTH, p->model.table[0].granule = toy_elems(0) + 1,
       train(p),
       FAILS(ARG, "tensors[0] (embedding): granule is ", "allowed: 0..", "the elements of the tensor"))
MISUSE("asks for a granule larger than a layer", ALL, BOTH,
       p->model.table[TOY_STACKED].granule = toy_elems(TOY_STACKED) / p->model.table[TOY_STACKED].shape[0] +
                                             1,
       train(p), FAILS(ARG, "tensors[1] (layers): granule is ", "allowed: 0..", "the elements of a layer"))
MISUSE("gives ranks different granules", ALL, W2, p->model.table[0].granule = p->odd ? 48 : 64, train(p),
       FAILS(MISMATCH, "tensors[0] (embedding", "rank 1 and rank 0 differ", "granule"))
MISUSE("gives ranks different granules that no slice would tear", ALL, W2,
       p->model.table[0].granule = p->odd ? 16 : 0, train(p), TRAINS)
MISUSE("scales a learning rate by a negative number", ALL, W1, second_group(p, 2)->lr_scale = -0.5f, train(p),
       FAILS(ARG, "optim_groups[0]: lr_scale is -0.5; allowed: a finite number, 0 or more"))
MISUSE("scales the learning rate by NaN", ALL, W1, p->cfg.optim.lr_scale = NAN, train(p),
       FAILS(ARG, "lr_scale is nan; allowed: a finite number"))
MISUSE("has an infinite decay", ALL, W1, second_group(p, 0)->weight_decay = INFINITY, train(p),
       FAILS(ARG, "optim_groups[0]: weight_decay is inf"))
MISUSE("names an optimizer beside its own update", ALL, W1,
       (second_group(p, 1)->update = refuses, p->group.optimizer = ZERO_SGD), train(p),
       FAILS(ARG, "optim_groups[0]: optimizer is sgd but update is set as well"))
MISUSE("has a decay beside its own update", ALL, W1,
       (second_group(p, 1)->update = refuses, p->group.weight_decay = 2), train(p),
       FAILS(ARG, "optim_groups[0]: beta1 is -1, beta2 -1, eps -1 and weight_decay 2, but update is set"))
MISUSE("names another optimizer on one rank", ALL, W2,
       second_group(p, 1)->optimizer = p->odd ? ZERO_SGD : plain_group.optimizer, train(p),
       FAILS(MISMATCH,
             "optim_groups[0]: optimizer is sgd on rank 1 and adamw on rank 0; all ranks must have the same"))
MISUSE("scales the learning rate otherwise on one rank", ALL, W2,
       second_group(p, 4)->lr_scale = p->odd ? 0.5f : 1, train(p),
       FAILS(MISMATCH, "optim_groups[0]: lr_scale is 0.5 on rank 1 and 1 on rank 0"))
MISUSE("has more groups on one rank", ALL, W2, if (p->odd) second_group(p, 4), train(p),
       FAILS(MISMATCH, "n_optim_groups is 1 on rank 1 and 0 on rank 0"))
MISUSE("has a tensor in another group on one rank", ALL, W2, second_group(p, p->odd ? 4 : 2), train(p),
       FAILS(MISMATCH, "tensors[2] (bias", "rank 1 and rank 0 differ", "group"))
MISUSE("steps by a rate that its scale makes infinite", ALL, BOTH, second_group(p, 4)->lr_scale = 1e30f,
       FIRST_ERROR(micro_batch(p, 0, 0), zero_step(p->z, 1e30f, NULL)),
       FAILS(ARG, "zero_step: lr 1e+30", "lr_scale 1e+30 of group 1"))
MISUSE("reads a state that the tensor's optimizer has not", ALL, BOTH,
       second_group(p, 1)->optimizer = ZERO_NESTEROV,
       zero_read(p->z, 1, ZERO_VALUE_STATE + 1, 0, 1, &(float){0}),
       FAILS(ARG, "zero_read: value is 3; allowed: 0..2",
             "optimizer of tensor layers: nesterov, 1 state per weight: momentum"))
MISUSE("does not begin with ZERO_CONFIG_INIT", ALL, W1, p->cfg.size = 0, train(p),
       FAILS(ARG, "ZERO_CONFIG_INIT"))
MISUSE("gives two tensors one name", ALL, BOTH, p->model.table[2].name = p->model.table[0].name, train(p),
       FAILS(ARG, "embedding"))
MISUSE("leaves a unit out", ALL, BOTH, p->model.table[4].unit = 5, train(p), FAILS(ARG, "unit"))
MISUSE("gives no address of a pointer", ALL, BOTH, p->model.table[2].param = NULL, train(p),
       FAILS(ARG, "tensors[2]", "param is NULL"))
MISUSE("gives a pointer to nothing", ALL, BOTH, p->model.param[2] = NULL, train(p),
       FAILS(ARG, "tensors[2]", "NULL"))
MISUSE("has an update that refuses", ALL, BOTH, update_that_refuses(p), trains_and_settles(p),
       FAILS(FAILED, "the update callback returned 3", "for tensor"))
MISUSE("misspells a variable", ALL, W1, NOTHING, train(p),
       LOGS("ZERO_STGE is not known", "did you mean ZERO_STAGE"), .variable = "ZERO_STGE", .value = "3")
MISUSE("names a variable that nobody has", ALL, W1, NOTHING, train(p),
       LOGS("ZERO_ALL_THE_MEMORY is not known", "the nearest is"), .variable = "ZERO_ALL_THE_MEMORY",
       .value = "1")
MISUSE("gives a variable no number", ALL, W1, NOTHING, train(p),
       FAILS(ARG, "ZERO_STAGE is \"three\"", "allowed"), .variable = "ZERO_STAGE", .value = "three")
MISUSE("logs to a file that cannot be", ALL, W1, NOTHING, train(p), FAILS(ARG, "ZERO_LOG is", "allowed"),
       .variable = "ZERO_LOG", .value = "/no such folder/log")
