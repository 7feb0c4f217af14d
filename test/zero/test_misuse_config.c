/* SPDX-License-Identifier: Apache-2.0 */
/* test_misuse_config.c: ways to use the library wrongly (misuse.h): the configuration. */
#include "test/zero/misuse.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static void forgets_init(struct program *p)
{
    int32_t stage = p->cfg.stage;
    memset(&p->cfg, 0, sizeof p->cfg);
    p->cfg.stage = stage;
}

static void never_begins(struct program *p)
{
    memset(&p->cfg, 0xcd, sizeof p->cfg);
}

/* A struct of the time when it began with its size and the stage. */
static void of_an_old_header(struct program *p)
{
    p->cfg.size = 208;
    p->cfg.version = (uint32_t)p->cfg.stage;
}

static void of_a_later_header(struct program *p)
{
    p->cfg.size += 1024;
}

static void tensors_of_a_later_header(struct program *p)
{
    p->cfg.tensor_size += 1024;
}

static void without_tensor_size(struct program *p)
{
    struct zero_config begun;
    zero_config_init(&begun, sizeof begun);
    p->cfg.tensor_size = begun.tensor_size;
}

static void without_stats_size(struct program *p)
{
    p->cfg.stats_size = 0;
}

static int asks_for_stats(struct program *p)
{
    struct zero_stats stats;
    return zero_get_stats(p->z, &stats);
}

static void without_step_info_size(struct program *p)
{
    p->cfg.step_info_size = 0;
}

static int asks_for_step_info(struct program *p)
{
    struct zero_step_info info;
    int err = micro_batch(p, 0, 0);
    return err ? err : zero_step(p->z, 1e-2f, &info);
}

static void without_weight_size(struct program *p)
{
    p->cfg.weight_size = 0;
}

static int exports_a_map(struct program *p)
{
    const struct zero_weight map = {.name = "w"};
    return zero_export(p->z, "/tmp/there-is-no-such-folder/weights", &map, 1, 0);
}

static void without_call_size(struct program *p)
{
    static const struct zero_call order[] = {{0, ZERO_FORWARD, 0}, {0, ZERO_FORWARD, 1}};
    p->cfg.call_size = 0;
    p->cfg.memory.order = order;
    p->cfg.memory.n_order = 2;
}

#define SETS(group, field, value)                                                                            \
    static void sets_##field(struct program *p)                                                              \
    {                                                                                                        \
        p->cfg.group field = value;                                                                          \
    }
SETS(launch., timeout_ms, 0)
SETS(, grad_accum_steps, 0)
SETS(, grad_scale, 0)
SETS(memory., prefetch, -1)
SETS(, beta1, NAN)
SETS(, beta2, 1)
SETS(, eps, -1e-8f)
SETS(, weight_decay, INFINITY)
SETS(, clip, -1)
SETS(memory., param_budget_bytes, 0)
#undef SETS

static void no_eps(struct program *p)
{
    p->cfg.optimizer = ZERO_RMSPROP;
    p->cfg.eps = 0;
}

/* ---- the rows ---- */

#define REFUSED(name, worlds, configure, ...)                                                                \
    {                                                                                                        \
        name, ALL, worlds, configure, NULL, ERROR, ZERO_ERR_ARG,                                             \
        {                                                                                                    \
            __VA_ARGS__                                                                                      \
        }                                                                                                    \
    }

static void hybrid_of_any_stage(struct program *p)
{
    p->cfg.hybrid = ZERO_HYBRID_HFSDP;
}

static void hybrid_of_two(struct program *p)
{
    p->cfg.hybrid = ZERO_HYBRID_HSDP;
    p->cfg.shard_group = 2;
}

static void hybrid_of_three(struct program *p)
{
    p->cfg.hybrid = ZERO_HYBRID_HSDP;
    p->cfg.shard_group = 3;
}

static void hybrid_of_one(struct program *p)
{
    p->cfg.hybrid = ZERO_HYBRID_HSDP;
    p->cfg.shard_group = 1;
}

static void hybrid_with_cut_states_of_one(struct program *p)
{
    p->cfg.hybrid = ZERO_HYBRID_HFSDP;
    p->cfg.shard_group = 1;
}

static void group_of_nothing(struct program *p)
{
    p->cfg.shard_group = 0;
}

static void group_without_hybrid(struct program *p)
{
    p->cfg.shard_group = 2;
}

static void other_groups(struct program *p)
{
    p->cfg.hybrid = ZERO_HYBRID_HSDP;
    p->cfg.shard_group = p->odd ? 1 : 2;
}

static void one_without_hybrid(struct program *p)
{
    if (!p->odd)
        hybrid_of_two(p);
}

static const struct misuse rows[] = {
    REFUSED("forgets ZERO_CONFIG_INIT", W1, forgets_init, "was not begun", "ZERO_CONFIG_INIT"),
    REFUSED("never begins its configuration", W1, never_begins, "was not begun", "ZERO_CONFIG_INIT"),
    REFUSED("was built with an old zero.h", W1, of_an_old_header, "built with a zero.h that is older",
            "build it anew"),
    REFUSED("was built with a later zero.h", W1, of_a_later_header, "size is", "built with a later zero.h"),
    REFUSED("the same, where only a table grew", W1, tensors_of_a_later_header, "tensor_size is",
            "built with a later zero.h"),
    REFUSED("begins without sizes", BOTH, without_tensor_size, "tensor_size is 0; set it to the bytes of"),
    REFUSED("the same, of calls", BOTH, without_call_size, "call_size is 0; set it to the bytes of"),
    REFUSED("timeout_ms 0", BOTH, sets_timeout_ms, "timeout_ms is 0"),
    REFUSED("grad_accum_steps 0", BOTH, sets_grad_accum_steps, "grad_accum_steps is 0"),
    REFUSED("grad_scale 0", BOTH, sets_grad_scale, "grad_scale is 0"),
    REFUSED("prefetch negative", BOTH, sets_prefetch, "prefetch is -1", "0 for none"),
    REFUSED("beta1 NaN", BOTH, sets_beta1, "beta1 is nan"),
    REFUSED("beta2 1", BOTH, sets_beta2, "beta2 is 1"),
    REFUSED("eps negative", BOTH, sets_eps, "eps is -9.99999994e-09"),
    REFUSED("weight_decay infinite", BOTH, sets_weight_decay, "weight_decay is inf"),
    REFUSED("clip negative", BOTH, sets_clip, "clip is -1"),
    {"asks for stats of no size",
     ALL,
     BOTH,
     without_stats_size,
     asks_for_stats,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_get_stats: stats_size is 0"}},
    {"the same, of a step",
     ALL,
     BOTH,
     without_step_info_size,
     asks_for_step_info,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_step: step_info_size is 0"}},
    {"the same, of weights",
     ALL,
     BOTH,
     without_weight_size,
     exports_a_map,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_export: ", "weight_size is 0"}},
    {"a budget of nothing",
     S3,
     W2,
     sets_param_budget_bytes,
     NULL,
     ERROR,
     ZERO_ERR_BUDGET,
     {"param_budget_bytes is 0", "alone needs"}},
    {"a budget of nothing, needed by nobody", S0 | S1 | S2, BOTH, sets_param_budget_bytes, NULL, RIGHT},
    {"eps 0", ALL, BOTH, no_eps, NULL, LINE, 0, {"eps is 0"}},
    WRONG("a hybrid below stage 3", S0 | S1 | S2, BOTH, hybrid_of_any_stage, NULL, ARG,
          "hybrid is hfsdp but stage is", "allowed: stage 3"),
    WRONG("groups that do not divide the world", S3, BOTH, hybrid_of_three, NULL, ARG,
          "shard_group is 3, world is", "a number that divides the world"),
    WRONG("groups of nothing", ALL, BOTH, group_of_nothing, NULL, ARG, "shard_group is 0"),
    {"groups without a hybrid",
     ALL,
     BOTH,
     group_without_hybrid,
     NULL,
     LINE,
     0,
     {"shard_group is 2 but hybrid is none: it has no effect, stage", "in one group of all ranks"},
     .only_rank_0 = true},
    WRONG("other groups on one rank", S3, W2, other_groups, NULL, MISMATCH,
          "shard_group is 1 on rank 1 and 2 on rank 0"),
    WRONG("a hybrid on one rank only", S3, W2, one_without_hybrid, NULL, MISMATCH,
          "hybrid is none on rank 1 and hsdp on rank 0"),
    {"a hybrid with one group of all ranks",
     S3,
     W2,
     hybrid_of_two,
     NULL,
     LINE,
     0,
     {"hybrid is hsdp with one group of all ranks: this runs as stage 3"},
     .only_rank_0 = true},
    {"the same, of a host",
     S3,
     W2,
     hybrid_of_any_stage,
     NULL,
     LINE,
     0,
     {"hybrid is hfsdp", "stage 3"},
     .only_rank_0 = true},
    GOOD("the same, on one rank", S3, W1, hybrid_of_any_stage, NULL),
    GOOD("a group of one rank, on one rank", S3, W1, hybrid_of_one, NULL),
    {"HSDP with groups of 1 rank",
     S3,
     W2,
     hybrid_of_one,
     NULL,
     LINE,
     0,
     {"hybrid is hsdp with groups of 1 rank", "nothing is cut: this runs as stage 0"},
     .only_rank_0 = true},
    {"HFSDP with groups of 1 rank",
     S3,
     W2,
     hybrid_with_cut_states_of_one,
     NULL,
     LINE,
     0,
     {"hybrid is hfsdp with groups of 1 rank", "optimizer's states are cut: this runs as stage 1"},
     .only_rank_0 = true},
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
