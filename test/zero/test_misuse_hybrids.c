/* SPDX-License-Identifier: Apache-2.0 */
/* test_misuse_hybrids.c: ways to use the library wrongly (misuse.h): groups of ranks, each with a copy of the
 * parameters. What one rank, or one whole group, does otherwise than the others is an error on all of them,
 * in the program's words. */
#include "test/zero/misuse.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

/* ---- what is wrapped ---- */

static void other_hybrid(struct program *p)
{
    if (p->odd)
        p->cfg.hybrid = p->cfg.hybrid == ZERO_HSDP ? ZERO_HFSDP : ZERO_HSDP;
}

static void hybrid_and_none(struct program *p)
{
    if (p->odd_group)
        p->cfg.mesh.dp_replicate = 1;
}

/* Of one host all ranks are a group. */
static void auto_in_one_group(struct program *p)
{
    if (p->odd_group)
        p->cfg.mesh.dp_replicate = ZERO_AUTO;
}

static void auto_is_what_the_others_say(struct program *p)
{
    p->cfg.mesh.dp_replicate = p->odd ? 1 : ZERO_AUTO;
}

static void checked_on_one(struct program *p)
{
    p->cfg.debug.check = p->odd;
}

static void other_timeout(struct program *p)
{
    p->cfg.launch.timeout_ms = p->odd_group ? 60000 : 90000;
}

static void granules_in_one_group(struct program *p)
{
    p->model.table[0].granule = p->odd_group ? 48 : 0;
}

static void uses_in_one_group(struct program *p)
{
    p->model.table[0].uses = p->odd_group ? 2 : 0;
}

static void order_of_one_group(struct program *p)
{
    static const struct zero_call order[] = {{0, ZERO_FORWARD, 0}, {0, ZERO_FORWARD, 1}};
    if (p->odd_group) {
        p->cfg.memory.order = order;
        p->cfg.memory.n_order = 2;
    }
}

static void awaits_on_one(struct program *p)
{
    p->cfg.init_from = p->odd ? ZERO_INIT_LATER : ZERO_INIT_MODEL;
}

static int init_that_fails(void *arg, int32_t tensor, int64_t first, int64_t n, void *dst)
{
    struct program *p = arg;
    (void)first;
    memset(dst, 0, (size_t)n * (p->model.table[tensor].dtype == ZERO_F32 ? 4 : 2));
    return p->rank->rank == 2 ? 5 : 0;
}

static void init_fails_on_one(struct program *p)
{
    p->cfg.init_from = ZERO_INIT_CALL;
    p->cfg.init = init_that_fails;
    p->cfg.init_arg = p;
}

/* ---- other calls ---- */

static int forward_of(struct program *p, int unit)
{
    int err = zero_begin(p->z, unit, ZERO_FORWARD);
    return err ? err : zero_end(p->z, unit, ZERO_FORWARD);
}

static int rank_begins_other(struct program *p)
{
    int err = forward_of(p, p->odd ? 2 : 1);
    return err ? err : train(p);
}

static int group_begins_other(struct program *p)
{
    int err = forward_of(p, p->odd_group ? 2 : 1);
    return err ? err : train(p);
}

/* With one micro-batch more, of an evaluation, in one group. */
static int group_evaluates(struct program *p)
{
    int err = micro_batch(p, 0, 0);
    if (!err)
        err = zero_step(p->z, 1e-2f, NULL);
    if (!err && p->odd_group)
        err = toy_forward(&p->model, p->z, true);
    return err ? err : train(p);
}

static int rank_reads(struct program *p)
{
    float x[8];
    int err = p->odd ? zero_read(p->z, 0, ZERO_VALUE_PARAM, 0, 8, x) : 0;
    return err ? err : train(p);
}

static int group_reads(struct program *p)
{
    float x[8];
    int err = p->odd_group ? zero_read(p->z, 0, ZERO_VALUE_PARAM, 0, 8, x) : 0;
    return err ? err : train(p);
}

static int group_writes(struct program *p)
{
    float x[8] = {0};
    int err = p->odd_group ? zero_write(p->z, 0, ZERO_VALUE_PARAM, 0, 8, x) : 0;
    return err ? err : train(p);
}

static int group_gathers_all(struct program *p)
{
    int err = p->odd_group ? zero_gather_all(p->z, 0) : 0;
    if (!err && p->odd_group)
        err = zero_release_all(p->z);
    return err ? err : train(p);
}

static int group_drops(struct program *p)
{
    int err = micro_batch(p, 0, 0);
    if (!err)
        err = p->odd_group ? zero_drop(p->z) : zero_step(p->z, 1e-2f, NULL);
    return err ? err : train(p);
}

static int group_asks_for_the_norm(struct program *p)
{
    double x;
    int err = micro_batch(p, 0, 0);
    if (!err && p->odd_group)
        err = zero_norm(p->z, &x);
    if (!err)
        err = zero_step(p->z, 1e-2f, NULL);
    return err ? err : train(p);
}

static int group_means_more(struct program *p)
{
    double x[2] = {1, 2};
    int err = zero_mean(p->z, x, p->odd_group ? 2 : 1);
    return err ? err : train(p);
}

static int group_carries_more(struct program *p)
{
    const double x[2] = {1, 2};
    int err = zero_carry(p->z, x, p->odd_group ? 2 : 1);
    return err ? err : train(p);
}

static int group_tunes(struct program *p)
{
    int err = p->odd_group ? zero_tune(p->z, ZERO_ALL, "clip", 0.5) : 0;
    return err ? err : train(p);
}

static int group_saves(struct program *p)
{
    int err = p->odd_group ? zero_save(p->z, "/tmp/there-is-no-such-folder/checkpoints", NULL) : 0;
    return err ? err : train(p);
}

static int rank_unwraps(struct program *p)
{
    int err = micro_batch(p, 0, 0);
    if (!err)
        err = zero_step(p->z, 1e-2f, NULL);
    if (!err && p->odd)
        return zero_unwrap(&p->z);
    return err ? err : train(p);
}

static int group_unwraps(struct program *p)
{
    int err = micro_batch(p, 0, 0);
    if (!err)
        err = zero_step(p->z, 1e-2f, NULL);
    if (!err && p->odd_group)
        return zero_unwrap(&p->z);
    return err ? err : train(p);
}

static int group_has_other_lr(struct program *p)
{
    int err = micro_batch(p, 0, 0);
    if (!err)
        err = zero_step(p->z, p->odd_group ? 2e-2f : 1e-2f, NULL);
    return err ? err : train(p);
}

/* Declares two for units 1 to 3. */
static void two_uses(struct program *p)
{
    p->model.table[TOY_STACKED].uses = p->model.table[4].uses = 2;
}

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

static int group_has_two_micro_batches(struct program *p)
{
    int err = micro_batch(p, 0, 0);
    if (!err && p->odd_group)
        err = toy_forward(&p->model, p->z, true);
    for (int u = TOY_UNITS; !err && p->odd_group && u-- > 1;) {
        err = zero_begin(p->z, u, ZERO_BACKWARD);
        if (!err)
            err = zero_end(p->z, u, ZERO_BACKWARD);
    }
    if (!err)
        err = zero_step(p->z, 1e-2f, NULL);
    return err ? err : train(p);
}

/* ---- what goes wrong in a group alone ---- */

static int backward_with(struct program *p, float first)
{
    int err = toy_forward(&p->model, p->z, true);
    for (int u = TOY_UNITS; !err && u-- > 0;) {
        err = zero_begin(p->z, u, ZERO_BACKWARD);
        if (!err)
            toy_add_gradient(&p->model, u, 0, p->rank->rank);
        if (!err && u == 0 && !isfinite(first))
            toy_poison_gradient(&p->model, 0, first);
        if (!err)
            err = zero_end(p->z, u, ZERO_BACKWARD);
    }
    return err;
}

static int poisons(struct program *p, bool mine)
{
    struct zero_step_info info = {.t = -1};
    double norm = 0;
    int err = backward_with(p, mine ? NAN : 0);
    if (!err)
        err = zero_norm(p->z, &norm);
    if (!err && isfinite(norm))
        toy_wrong(p->rank, "the norm is %g", norm);
    if (!err)
        err = zero_step(p->z, 1e-2f, &info);
    if (!err && (!info.skipped || info.t != 0 || isfinite(info.grad_norm)))
        toy_wrong(p->rank, "skipped %d, step %lld, norm %g", info.skipped, (long long)info.t, info.grad_norm);
    return err ? err : train(p);
}

static int rank_poisons(struct program *p)
{
    return poisons(p, p->odd);
}

static int group_poisons(struct program *p)
{
    return poisons(p, p->odd_group);
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

static void update_fails_on_one(struct program *p)
{
    p->cfg.optim.update = descent;
    p->cfg.optim.weight_decay = 0;
    p->cfg.optim.update_arg = p;
}

/* The model's own fault on one rank, with everybody watched. */
static void check_all(struct program *p)
{
    p->cfg.debug.check = 1;
}

static int rank_writes_outside(struct program *p)
{
    int err = train(p);
    if (!err && p->odd)
        ((volatile float *)p->model.param[0])[0] = 1;
    return err ? err : trains_and_settles(p);
}

/* Elsewhere hybrids run as a stage, and what was asked of stage 3 holds there. */
static void of_one_rank_each(struct program *p)
{
    p->cfg.mesh.dp_replicate = 4;
}

static void of_all(struct program *p)
{
    p->cfg.mesh.dp_replicate = 1;
}

static int says_what_it_runs_as(struct program *p, int stage)
{
    struct zero_stats s;
    int err = zero_get_stats(p->z, &s);
    if (!err && (s.stage != stage || s.hybrid != ZERO_HSDP || s.dp_shard != 4))
        toy_wrong(p->rank, "stage %d, hybrid %d, groups of %d", s.stage, s.hybrid, s.dp_shard);
    return err ? err : train(p);
}

static int runs_as_0(struct program *p)
{
    return says_what_it_runs_as(p, 0);
}

static int runs_as_1(struct program *p)
{
    return says_what_it_runs_as(p, 1);
}

static int runs_as_3(struct program *p)
{
    return says_what_it_runs_as(p, 3);
}

/* ---- first values ---- */

static void awaits(struct program *p)
{
    p->cfg.init_from = ZERO_INIT_LATER;
}

static int begins_without_values(struct program *p)
{
    return forward_of(p, 0);
}

static int writes_half(struct program *p)
{
    int err = zero_write(p->z, 0, ZERO_VALUE_PARAM, 0, toy_elems(0) - 1, p->spare[0]);
    return err ? err : forward_of(p, 0);
}

/* ---- the rows ---- */

#define ON_ALL(name, configure, run, code, ...) WRONG(name, HYBRIDS, W4, configure, run, code, __VA_ARGS__)
#define DIFFER(name, run, ...)                                                                               \
    WRONG(name, HYBRIDS, W4, NULL, run, MISMATCH, __VA_ARGS__, "every rank must make the same calls")

static const struct misuse rows[] = {
    ON_ALL("another hybrid on one rank", other_hybrid, NULL, MISMATCH, "hybrid is h", "sdp on rank 3 and h"),
    ON_ALL("no hybrid in what would be a group", hybrid_and_none, NULL, MISMATCH,
           "dp_replicate is 1 on rank 2 and 2 on rank 0"),
    ON_ALL("groups of a host in one group", auto_in_one_group, NULL, MISMATCH,
           "dp_replicate is 1 on rank 2 and 2 on rank 0"),
    {"groups of a host, as the others say",
     HYBRIDS,
     W4,
     auto_is_what_the_others_say,
     NULL,
     LINE,
     0,
     {"dp_replicate is auto and becomes 1", "this runs as stage 3"},
     .only_rank_0 = true},
    ON_ALL("granules in one group", granules_in_one_group, NULL, MISMATCH, "tensors[0] (embedding",
           "rank 2 and rank 0 differ", "granule"),
    ON_ALL("uses in one group", uses_in_one_group, NULL, MISMATCH, "tensors[0] (embedding",
           "rank 2 and rank 0 differ", "uses"),
    ON_ALL("another order in one group", order_of_one_group, NULL, MISMATCH, "n_order is 2 on rank 2"),
    ON_ALL("values that one rank awaits", awaits_on_one, NULL, MISMATCH, "init_from is later on rank 3"),
    ON_ALL("an init that fails on one rank", init_fails_on_one, NULL, FAILED, "cfg.init returned 5"),
    WRONG("checks on one rank", HYBRIDS, W4, checked_on_one, NULL, MISMATCH,
          "check is 1 on rank 3 and 0 on rank 0"),
    GOOD("waits for another time in one group", HYBRIDS, W4, other_timeout, NULL),

    {"groups by a variable that do not divide the world",
     HYBRIDS,
     W4,
     NULL,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"dp_replicate 3", "do not divide the world of 4 ranks"},
     "ZERO_DP_REPLICATE",
     "3"},
    DIFFER("begins another unit on one rank", rank_begins_other,
           "rank 3 called zero_begin(unit 2, forward) in step 1",
           "called zero_begin(unit 1, forward) in step 1"),
    DIFFER("begins another unit in one group", group_begins_other,
           "called zero_begin(unit 2, forward) in step 1", "called zero_begin(unit 1, forward) in step 1"),
    DIFFER("evaluates in one group", group_evaluates, "in step 2"),
    DIFFER("reads on one rank", rank_reads, "rank 3 called zero_read(tensor 0) in step 1",
           "called zero_begin(unit 0, forward) in step 1"),
    DIFFER("reads in one group", group_reads, "called zero_read(tensor 0) in step 1",
           "called zero_begin(unit 0, forward) in step 1"),
    DIFFER("writes in one group", group_writes, "called zero_write(tensor 0) in step 1",
           "called zero_begin(unit 0, forward) in step 1"),
    DIFFER("gathers all in one group", group_gathers_all, "called zero_gather_all in step 1",
           "called zero_begin(unit 0, forward) in step 1"),
    DIFFER("drops the step in one group", group_drops, "called zero_drop in step 1",
           "called zero_step in step 1"),
    DIFFER("asks for the norm in one group", group_asks_for_the_norm, "called zero_norm in step 1",
           "called zero_step in step 1"),
    DIFFER("means more numbers in one group", group_means_more, "called zero_mean in step 1",
           "with other arguments"),
    DIFFER("carries more numbers in one group", group_carries_more, "called zero_carry in step 1",
           "with other arguments"),
    DIFFER("tunes in one group", group_tunes, "called zero_tune(clip) in step 1"),
    DIFFER("saves in one group", group_saves, "called zero_save in step 1",
           "called zero_begin(unit 0, forward) in step 1"),
    DIFFER("unwraps on one rank", rank_unwraps, "rank 3 called zero_unwrap in step 2",
           "called zero_begin(unit 0, forward) in step 2"),
    DIFFER("unwraps in one group", group_unwraps, "called zero_unwrap in step 2",
           "called zero_begin(unit 0, forward) in step 2"),
    WRONG("has two micro-batches in one group", HYBRIDS, W4, two_uses, group_has_two_micro_batches, MISMATCH,
          "called zero_begin(unit 0, forward) in step 1", "called zero_step in step 1",
          "every rank must make the same calls"),
    ON_ALL("has a second backward bracket", NULL, two_brackets, ORDER,
           "zero_begin: unit 1 has had 1 backward bracket",
           "zero_tensor.uses is 1 and grad_accum_steps is 1"),
    GOOD("has two backward brackets, as it says", HYBRIDS, W4, two_uses, two_brackets),
    ON_ALL("steps by another lr in one group", NULL, group_has_other_lr, MISMATCH, "lr is"),

    GOOD("has a gradient that is no number on one rank", HYBRIDS, W4, NULL, rank_poisons),
    GOOD("has gradients that are no numbers in one group", HYBRIDS, W4, NULL, group_poisons),
    ON_ALL("has an update that fails on one rank", update_fails_on_one, trains_and_settles, FAILED,
           "the update callback returned 3", "for tensor"),
    WRONG("writes outside a bracket on one rank", HYBRIDS, W4, check_all, rank_writes_outside, ORDER,
          "the model's fault", "tensor embedding"),
    {"HSDP with groups of 1 rank",
     HSDP,
     W4,
     of_one_rank_each,
     runs_as_0,
     LINE,
     0,
     {"this runs as stage 0"},
     .only_rank_0 = true},
    {"HFSDP with groups of 1 rank",
     HFSDP,
     W4,
     of_one_rank_each,
     runs_as_1,
     LINE,
     0,
     {"this runs as stage 1"},
     .only_rank_0 = true},
    {"a hybrid with one group of all",
     HFSDP,
     W4,
     of_all,
     runs_as_3,
     LINE,
     0,
     {"this runs as stage 3"},
     .only_rank_0 = true},
    ON_ALL("begins before there are values", awaits, begins_without_values, ORDER,
           "zero_begin: tensor embedding (unit 0) has values for 0 of its 165 elements"),
    ON_ALL("begins before there are all values", awaits, writes_half, ORDER,
           "has values for 164 of its 165 elements"),
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
