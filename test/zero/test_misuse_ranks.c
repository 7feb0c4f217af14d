/* SPDX-License-Identifier: Apache-2.0 */
/* test_misuse_ranks.c: ways to use the library wrongly (misuse.h):
 * ranks that differ, or do not know who they are; what only the library can say. */
#include "test/zero/misuse.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

/* ---- ranks that differ ---- */

static int other_lr(struct program *p)
{
    int err = micro_batch(p, 0, 0);
    if (!err)
        err = zero_step(p->z, p->odd ? 2e-2f : 1e-2f, NULL);
    return err ? err : train(p);
}

static int other_unit(struct program *p)
{
    int err = zero_begin(p->z, p->odd ? 2 : 1, ZERO_FORWARD);
    if (!err)
        err = zero_end(p->z, p->odd ? 2 : 1, ZERO_FORWARD);
    return err ? err : train(p);
}

static int odd_one_reads(struct program *p)
{
    float x[8];
    int err = p->odd ? zero_read(p->z, 0, ZERO_VALUE_PARAM, 0, 8, x) : 0;
    return err ? err : train(p);
}

static void other_stage(struct program *p)
{
    p->cfg.stage = p->odd ? (p->cfg.stage + 1) % 4 : p->cfg.stage;
}

static void other_clip(struct program *p)
{
    p->cfg.clip = p->odd ? 1.0f : 2.0f;
}

static void other_shape(struct program *p)
{
    if (p->odd)
        p->model.table[TOY_FROZEN].shape[0] = 10;
}

/* ---- what only the library can say ---- */

static void lends_on_the_host(struct program *p)
{
    p->cfg.launch.nccl_comm = &p->cfg;
}

static int poisoned(struct program *p)
{
    int err = toy_forward(&p->model, p->z, true);
    for (int u = TOY_UNITS; !err && u-- > 0;) {
        err = zero_begin(p->z, u, ZERO_BACKWARD);
        if (!err)
            toy_add_gradient(&p->model, u, 0, p->rank->rank);
        if (!err && u == 0)
            toy_poison_gradient(&p->model, 0, NAN);
        if (!err)
            err = zero_end(p->z, u, ZERO_BACKWARD);
    }
    if (!err)
        err = zero_step(p->z, 1e-2f, NULL);
    return err ? err : train(p);
}

static int four_of_one(struct program *p)
{
    int err = 0;
    for (int k = 0; !err && k < 4; k++)
        err = micro_batch(p, 0, k);
    return err ? err : zero_step(p->z, 1e-2f, NULL);
}

static int steps_twice(struct program *p)
{
    int err = micro_batch(p, 0, 0);
    if (!err)
        err = zero_step(p->z, 1e-2f, NULL);
    return err ? err : zero_step(p->z, 1e-2f, NULL);
}

/* ---- ranks, before the wrap ---- */

static int finds(struct zero_config cfg)
{
    int32_t rank, world, local_rank;
    return zero_find_rank(&cfg, &rank, &world, &local_rank);
}

AFTER(finds_nothing, zero_find_rank(&p->cfg, NULL, NULL, NULL), train(p))
AFTER(finds_without_init, 0, finds((struct zero_config){.stage = 3}))

static int finds_half(struct program *p)
{
    struct zero_config cfg = p->cfg;
    cfg.launch.rank = 1;
    cfg.launch.world = 0;
    return finds(cfg);
}

static int finds_beyond(struct program *p)
{
    struct zero_config cfg = p->cfg;
    cfg.launch.rank = cfg.launch.world;
    return finds(cfg);
}

static int finds_by_a_communicator(struct program *p)
{
    struct zero_config cfg = p->cfg;
    cfg.launch.nccl_comm = p;
    return finds(cfg);
}

/* ---- the rows ---- */

static const struct misuse rows[] = {
    {"gives another lr on one rank", ALL, W2, NULL, other_lr, ERROR, ZERO_ERR_MISMATCH, {"lr is"}},
    {"begins another unit on one rank",
     ALL,
     W2,
     NULL,
     other_unit,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"rank 1 called zero_begin(unit 2, forward) in step 1",
      "rank 0 called zero_begin(unit 1, forward) in step 1"}},
    {"reads on one rank alone",
     ALL,
     W2,
     NULL,
     odd_one_reads,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"rank 1 called zero_read(tensor 0) in step 1", "rank 0 called zero_begin(unit 0, forward) in step 1"}},
    {"wraps at another stage on one rank",
     ALL,
     W2,
     other_stage,
     NULL,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"stage is", "on rank 1"}},
    {"clips otherwise on one rank",
     ALL,
     W2,
     other_clip,
     NULL,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"clip is 1 on rank 1 and 2 on rank 0"}},
    {"has another shape on one rank",
     ALL,
     W2,
     other_shape,
     NULL,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"tensors[3] (frozen", "rank 1 and rank 0 differ"}},
    {"steps on a gradient that is no number", ALL, BOTH, NULL, poisoned, LINE, 0, {"step 1", "skipped"}},
    {"has four micro-batches and says one",
     ALL,
     BOTH,
     NULL,
     four_of_one,
     ERROR,
     ZERO_ERR_ORDER,
     {"grad_accum_steps"}},
    {"lends a communicator on the host",
     ALL,
     BOTH,
     lends_on_the_host,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"nccl_comm"}},
    {"steps twice", ALL, BOTH, NULL, steps_twice, ERROR, ZERO_ERR_ORDER, {"zero_step: "}},
    WRONG("asks for its rank without ZERO_CONFIG_INIT", S0, W1, NULL, finds_without_init, ARG,
          "zero_find_rank: ", "ZERO_CONFIG_INIT"),
    WRONG("asks for its rank with half of a pair", S0, W1, NULL, finds_half, ARG,
          "zero_find_rank: rank is 1 but world is 0"),
    WRONG("asks for a rank beyond the world", S0, BOTH, NULL, finds_beyond, ARG, "zero_find_rank: rank is"),
    WRONG("asks a communicator on the host for its rank", S0, BOTH, NULL, finds_by_a_communicator, ARG,
          "zero_find_rank: ", "nccl_comm"),
    GOOD("asks for its rank, and looks at nothing", ALL, BOTH, NULL, finds_nothing),
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
