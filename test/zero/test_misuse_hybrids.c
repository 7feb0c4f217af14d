/* SPDX-License-Identifier: Apache-2.0 */
/* test_misuse_hybrids.c: wrong uses (misuse.h) with groups of ranks, each with a copy of the parameters. If
 * one rank or one group differs from the others, all ranks get an error that names the call or field. */
#include "test/zero/misuse.h"

static void order_of_one_group(struct program *p)
{
    static const struct zero_call order[] = {{0, ZERO_FORWARD, 0}, {0, ZERO_FORWARD, 1}};
    if (p->odd_group) {
        p->cfg.memory.order = order;
        p->cfg.memory.n_order = 2;
    }
}

static int init_that_fails(void *arg, int32_t tensor, int64_t first, int64_t n, void *dst)
{
    struct program *p = arg;
    (void)first;
    memset(dst, 0, (size_t)n * (p->model.table[tensor].dtype == ZERO_F32 ? 4 : 2));
    return p->rank->rank == 2 ? 5 : 0;
}

static int forward_of(struct program *p, int unit)
{
    return FIRST_ERROR(begin(p, unit, ZERO_FORWARD), end(p, unit, ZERO_FORWARD));
}

static int group_has_two_micro_batches(struct program *p)
{
    int err = FIRST_ERROR(micro_batch(p, 0, 0), p->odd_group ? forward(p) : 0);
    for (int u = TOY_UNITS; !err && p->odd_group && u-- > 1;)
        err = FIRST_ERROR(begin(p, u, ZERO_BACKWARD), end(p, u, ZERO_BACKWARD));
    return FIRST_ERROR(err, step(p), train(p));
}

static void poison_gradient(struct program *p, int unit)
{
    add_gradient(p, unit);
    if (unit == 0)
        toy_poison_gradient(&p->model, 0, NAN);
}

/* Writes NaN to the gradient if `mine` is set. The step must be skipped on all ranks. */
static int poisons(struct program *p, bool mine)
{
    struct zero_step_info info = {.t = -1};
    double norm = 0;
    int err = FIRST_ERROR(forward(p), backward_with(p, mine ? poison_gradient : add_gradient),
                          zero_norm(p->z, &norm));
    if (!err && isfinite(norm))
        toy_wrong(p->rank, "the norm is %g", norm);
    err = FIRST_ERROR(err, zero_step(p->z, 1e-2f, &info));
    if (!err && (!info.skipped || info.t != 0 || isfinite(info.grad_norm)))
        toy_wrong(p->rank, "skipped %d, step %lld, norm %g", info.skipped, (long long)info.t, info.grad_norm);
    return FIRST_ERROR(err, train(p));
}

static int descent(void *arg, const struct zero_update *u)
{
    const struct program *p = arg;
    if (p->rank->rank == 2 && u->t == 2)
        return 3;
    for (int64_t i = 0; i < u->n; i++)
        u->master[i] -= u->lr * u->grad[i];
    return 0;
}

static int rank_writes_outside(struct program *p)
{
    int err = train(p);
    if (!err && p->odd)
        ((volatile float *)p->model.param[0])[0] = 1;
    return err ? err : trains_and_settles(p);
}

static int says_what_it_runs_as(struct program *p, int stage)
{
    struct zero_stats s;
    int err = zero_get_stats(p->z, &s);
    if (!err && (s.stage != stage || s.hybrid != ZERO_HSDP || s.dp_shard != 4))
        toy_wrong(p->rank, "stage %d, hybrid %d, groups of %d", s.stage, s.hybrid, s.dp_shard);
    return err ? err : train(p);
}

/* ---- rows ---- */

#define ON_ALL(name, configure, run, code, ...)                                                              \
    MISUSE(name, HYBRIDS, W4, configure, run, FAILS(code, __VA_ARGS__))
#define DIFFER(name, run, ...)                                                                               \
    ON_ALL(name, NOTHING, run, MISMATCH, __VA_ARGS__, "every rank must make the same calls")

ON_ALL("another hybrid on one rank",
       if (p->odd) p->cfg.hybrid = p->cfg.hybrid == ZERO_HSDP ? ZERO_HFSDP : ZERO_HSDP, train(p), MISMATCH,
       "hybrid is h", "sdp on rank 3 and h")
ON_ALL("no hybrid in what would be a group", if (p->odd_group) p->cfg.mesh.dp_replicate = 1, train(p),
       MISMATCH, "dp_replicate is 1 on rank 2 and 2 on rank 0")
ON_ALL("groups of a host in one group", if (p->odd_group) p->cfg.mesh.dp_replicate = ZERO_AUTO, train(p),
       MISMATCH, "dp_replicate is 1 on rank 2 and 2 on rank 0")
MISUSE("groups of a host, as the others say", HYBRIDS, W4, p->cfg.mesh.dp_replicate = p->odd ? 1 : ZERO_AUTO,
       train(p), LOGS("dp_replicate is auto and becomes 1", "this runs as stage 3"), .only_rank_0 = true)
ON_ALL("granules in one group", p->model.table[0].granule = p->odd_group ? 48 : 0, train(p), MISMATCH,
       "tensors[0] (embedding", "rank 2 and rank 0 differ", "granule")
ON_ALL("uses in one group", p->model.table[0].uses = p->odd_group ? 2 : 0, train(p), MISMATCH,
       "tensors[0] (embedding", "rank 2 and rank 0 differ", "uses")
ON_ALL("another order in one group", order_of_one_group(p), train(p), MISMATCH, "n_order is 2 on rank 2")
ON_ALL("values that one rank awaits", p->cfg.init_from = p->odd ? ZERO_INIT_LATER : ZERO_INIT_MODEL, train(p),
       MISMATCH, "init_from is later on rank 3")
ON_ALL("an init that fails on one rank",
       (p->cfg.init_from = ZERO_INIT_CALL, p->cfg.init = init_that_fails, p->cfg.init_arg = p), train(p),
       FAILED, "cfg.init returned 5")
MISUSE("checks on one rank", HYBRIDS, W4, p->cfg.debug.check = p->odd, train(p),
       FAILS(MISMATCH, "check is 1 on rank 3 and 0 on rank 0"))
MISUSE("waits for another time in one group", HYBRIDS, W4,
       p->cfg.launch.timeout_ms = p->odd_group ? 60000 : 90000, train(p), TRAINS)
MISUSE("groups by a variable that do not divide the world", HYBRIDS, W4, NOTHING, train(p),
       FAILS(ARG, "dp_replicate 3", "do not divide the world of 4 ranks"), .variable = "ZERO_DP_REPLICATE",
       .value = "3")
DIFFER("begins another unit on one rank", FIRST_ERROR(forward_of(p, p->odd ? 2 : 1), train(p)),
       "rank 3 called zero_begin(unit 2, forward) in step 1", "called zero_begin(unit 1, forward) in step 1")
DIFFER("begins another unit in one group", FIRST_ERROR(forward_of(p, p->odd_group ? 2 : 1), train(p)),
       "called zero_begin(unit 2, forward) in step 1", "called zero_begin(unit 1, forward) in step 1")
DIFFER("evaluates in one group",
       FIRST_ERROR(micro_batch(p, 0, 0), step(p), p->odd_group ? forward(p) : 0, train(p)), "in step 2")
DIFFER("reads on one rank",
       FIRST_ERROR(p->odd ? zero_read(p->z, 0, ZERO_VALUE_PARAM, 0, 8, (float[8]){0}) : 0, train(p)),
       "rank 3 called zero_read(tensor 0) in step 1", "called zero_begin(unit 0, forward) in step 1")
DIFFER("reads in one group",
       FIRST_ERROR(p->odd_group ? zero_read(p->z, 0, ZERO_VALUE_PARAM, 0, 8, (float[8]){0}) : 0, train(p)),
       "called zero_read(tensor 0) in step 1", "called zero_begin(unit 0, forward) in step 1")
DIFFER("writes in one group",
       FIRST_ERROR(p->odd_group ? zero_write(p->z, 0, ZERO_VALUE_PARAM, 0, 8, (float[8]){0}) : 0, train(p)),
       "called zero_write(tensor 0) in step 1", "called zero_begin(unit 0, forward) in step 1")
DIFFER("gathers all in one group",
       FIRST_ERROR(p->odd_group ? zero_gather_all(p->z, 0) : 0, p->odd_group ? zero_release_all(p->z) : 0,
                   train(p)),
       "called zero_gather_all in step 1", "called zero_begin(unit 0, forward) in step 1")
DIFFER("drops the step in one group",
       FIRST_ERROR(micro_batch(p, 0, 0), p->odd_group ? zero_drop(p->z) : step(p), train(p)),
       "called zero_drop in step 1", "called zero_step in step 1")
DIFFER("asks for the norm in one group",
       FIRST_ERROR(micro_batch(p, 0, 0), p->odd_group ? zero_norm(p->z, &(double){0}) : 0, step(p), train(p)),
       "called zero_norm in step 1", "called zero_step in step 1")
DIFFER("means more numbers in one group",
       FIRST_ERROR(zero_mean(p->z, (double[2]){1, 2}, p->odd_group ? 2 : 1), train(p)),
       "called zero_mean in step 1", "with other arguments")
DIFFER("carries more numbers in one group",
       FIRST_ERROR(zero_carry(p->z, (double[2]){1, 2}, p->odd_group ? 2 : 1), train(p)),
       "called zero_carry in step 1", "with other arguments")
DIFFER("tunes in one group", FIRST_ERROR(p->odd_group ? zero_tune(p->z, ZERO_ALL, "clip", 0.5) : 0, train(p)),
       "called zero_tune(clip) in step 1")
DIFFER("saves in one group",
       FIRST_ERROR(p->odd_group ? zero_save(p->z, "/tmp/there-is-no-such-folder/checkpoints", NULL) : 0,
                   train(p)),
       "called zero_save in step 1", "called zero_begin(unit 0, forward) in step 1")
DIFFER("unwraps on one rank",
       FIRST_ERROR(micro_batch(p, 0, 0), step(p), p->odd ? zero_unwrap(&p->z) : train(p)),
       "rank 3 called zero_unwrap in step 2", "called zero_begin(unit 0, forward) in step 2")
DIFFER("unwraps in one group",
       FIRST_ERROR(micro_batch(p, 0, 0), step(p), p->odd_group ? zero_unwrap(&p->z) : train(p)),
       "called zero_unwrap in step 2", "called zero_begin(unit 0, forward) in step 2")
MISUSE("has two micro-batches in one group", HYBRIDS, W4,
       p->model.table[TOY_STACKED].uses = p->model.table[4].uses = 2, group_has_two_micro_batches(p),
       FAILS(MISMATCH, "called zero_begin(unit 0, forward) in step 1", "called zero_step in step 1",
             "every rank must make the same calls"))
ON_ALL("has a second backward bracket", NOTHING, train_with_two_brackets(p), ORDER,
       "zero_begin: unit 1 has had 1 backward bracket", "zero_tensor.uses is 1 and grad_accum_steps is 1")
MISUSE("has two backward brackets, as it says", HYBRIDS, W4,
       p->model.table[TOY_STACKED].uses = p->model.table[4].uses = 2, train_with_two_brackets(p), TRAINS)
ON_ALL("steps by another lr in one group", NOTHING,
       FIRST_ERROR(micro_batch(p, 0, 0), zero_step(p->z, p->odd_group ? 2e-2f : 1e-2f, NULL), train(p)),
       MISMATCH, "lr is")
MISUSE("has a gradient that is no number on one rank", HYBRIDS, W4, NOTHING, poisons(p, p->odd), TRAINS)
MISUSE("has gradients that are no numbers in one group", HYBRIDS, W4, NOTHING, poisons(p, p->odd_group),
       TRAINS)
ON_ALL("has an update that fails on one rank",
       (p->cfg.optim.update = descent, p->cfg.optim.weight_decay = 0, p->cfg.optim.update_arg = p),
       trains_and_settles(p), FAILED, "the update callback returned 3", "for tensor")
MISUSE("writes outside a bracket on one rank", HYBRIDS, W4, p->cfg.debug.check = 1, rank_writes_outside(p),
       FAILS(ORDER, "the model's fault", "tensor embedding"))
MISUSE("HSDP with groups of 1 rank", HSDP, W4, p->cfg.mesh.dp_replicate = 4, says_what_it_runs_as(p, 0),
       LOGS("this runs as stage 0"), .only_rank_0 = true)
MISUSE("HFSDP with groups of 1 rank", HFSDP, W4, p->cfg.mesh.dp_replicate = 4, says_what_it_runs_as(p, 1),
       LOGS("this runs as stage 1"), .only_rank_0 = true)
MISUSE("a hybrid with one group of all", HFSDP, W4, p->cfg.mesh.dp_replicate = 1, says_what_it_runs_as(p, 3),
       LOGS("this runs as stage 3"), .only_rank_0 = true)
ON_ALL("begins before there are values", p->cfg.init_from = ZERO_INIT_LATER, forward_of(p, 0), ORDER,
       "zero_begin: tensor embedding (unit 0) has values for 0 of its 165 elements")
ON_ALL("begins before there are all values", p->cfg.init_from = ZERO_INIT_LATER,
       FIRST_ERROR(zero_write(p->z, 0, ZERO_VALUE_PARAM, 0, toy_elems(0) - 1, p->spare[0]), forward_of(p, 0)),
       ORDER, "has values for 164 of its 165 elements")
