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

static void of_another_header(struct program *p)
{
    p->cfg.size += 1024;
}

static void of_another_version(struct program *p)
{
    p->cfg.version++;
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
SETS(optim., beta1, NAN)
SETS(optim., beta2, 1)
SETS(optim., eps, -1e-8f)
SETS(optim., weight_decay, INFINITY)
SETS(, clip, -1)
SETS(memory., param_budget_bytes, 0)
#undef SETS

static void no_eps(struct program *p)
{
    p->cfg.optim.optimizer = ZERO_RMSPROP;
    p->cfg.optim.eps = 0;
}

/* ---- the rows ---- */

#define REFUSED(name, worlds, configure, ...)                                                                \
    {                                                                                                        \
        name, ALL, worlds, configure, NULL, ERROR, ZERO_ERR_ARG,                                             \
        {                                                                                                    \
            __VA_ARGS__                                                                                      \
        }                                                                                                    \
    }

static void hfsdp(struct program *p)
{
    p->cfg.hybrid = ZERO_HFSDP;
}

static void hfsdp_of_hosts(struct program *p)
{
    p->cfg.hybrid = ZERO_HFSDP;
    p->cfg.mesh.dp_replicate = ZERO_AUTO;
}

static void three_replicas(struct program *p)
{
    p->cfg.mesh.dp_replicate = 3;
}

static void replicas_of_one_rank(struct program *p)
{
    p->cfg.mesh.dp_replicate = p->cfg.launch.world;
}

static void hfsdp_of_one_rank_each(struct program *p)
{
    p->cfg.hybrid = ZERO_HFSDP;
    p->cfg.mesh.dp_replicate = p->cfg.launch.world;
}

static void no_replicas(struct program *p)
{
    p->cfg.mesh.dp_replicate = 0;
}

static void other_groups(struct program *p)
{
    p->cfg.mesh.dp_replicate = p->odd ? 2 : 1;
}

static void hfsdp_on_one(struct program *p)
{
    if (!p->odd)
        hfsdp(p);
}

static const struct misuse rows[] = {
    REFUSED("forgets ZERO_CONFIG_INIT", W1, forgets_init, "was not initialised", "ZERO_CONFIG_INIT"),
    REFUSED("never begins its configuration", W1, never_begins, "did not initialise cfg", "ZERO_CONFIG_INIT"),
    REFUSED("was built with a zero.h of longer structs", W1, of_another_header, "size is", "another zero.h"),
    REFUSED("was built with a zero.h of another version", W1, of_another_version, "version is",
            "another zero.h"),
    REFUSED("timeout_ms 0", BOTH, sets_timeout_ms, "timeout_ms is 0"),
    REFUSED("grad_accum_steps 0", BOTH, sets_grad_accum_steps, "grad_accum_steps is 0"),
    REFUSED("grad_scale 0", BOTH, sets_grad_scale, "grad_scale is 0"),
    REFUSED("prefetch negative", BOTH, sets_prefetch, "prefetch is -1", "0 for none"),
    REFUSED("beta1 NaN", BOTH, sets_beta1, "beta1 is nan"),
    REFUSED("beta2 1", BOTH, sets_beta2, "beta2 is 1"),
    REFUSED("eps negative", BOTH, sets_eps, "eps is -9.99999994e-09"),
    REFUSED("weight_decay infinite", BOTH, sets_weight_decay, "weight_decay is inf"),
    REFUSED("clip negative", BOTH, sets_clip, "clip is -1"),
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
    {"HFSDP below stage 3",
     S0 | S1 | S2,
     W2,
     hfsdp,
     NULL,
     LINE,
     0,
     {"hybrid is hfsdp but stage is", "it has no effect"},
     .only_rank_0 = true},
    GOOD("the same, alone", S0 | S1 | S2, W1, hfsdp, NULL),
    WRONG("replicas that do not divide the world", ALL, BOTH, three_replicas, NULL, ARG, "dp_replicate 3",
          "do not divide the world of"),
    WRONG("no replica", ALL, BOTH, no_replicas, NULL, ARG, "dp_replicate is 0; allowed: 1 and more"),
    {"replicas below stage 3",
     S0 | S1 | S2,
     W2,
     replicas_of_one_rank,
     NULL,
     LINE,
     0,
     {"dp_replicate is 2 but stage is", "all data-parallel ranks are one group"},
     .only_rank_0 = true},
    WRONG("other groups on one rank", S3, W2, other_groups, NULL, MISMATCH,
          "dp_replicate is 2 on rank 1 and 1 on rank 0"),
    WRONG("a hybrid on one rank only", S3, W2, hfsdp_on_one, NULL, MISMATCH,
          "hybrid is hsdp on rank 1 and hfsdp on rank 0"),
    {"HFSDP of hosts, on one host",
     S3,
     W2,
     hfsdp_of_hosts,
     NULL,
     LINE,
     0,
     {"dp_replicate is auto and becomes 1", "this runs as stage 3, and hybrid hfsdp has no effect"},
     .only_rank_0 = true},
    {"HFSDP of one replica",
     S3,
     W2,
     hfsdp,
     NULL,
     LINE,
     0,
     {"hybrid is hfsdp but dp_replicate is 1", "this runs as stage 3"},
     .only_rank_0 = true},
    GOOD("the same, on one rank", S3, W1, hfsdp, NULL),
    GOOD("a group of one rank, on one rank", S3, W1, replicas_of_one_rank, NULL),
    {"HSDP with groups of 1 rank",
     S3,
     W2,
     replicas_of_one_rank,
     NULL,
     LINE,
     0,
     {"dp_replicate is 2 and dp_shard 1", "nothing is sharded: this runs as stage 0"},
     .only_rank_0 = true},
    {"HFSDP with groups of 1 rank",
     S3,
     W2,
     hfsdp_of_one_rank_each,
     NULL,
     LINE,
     0,
     {"dp_replicate is 2 and dp_shard 1", "optimizer's states are sharded: this runs as stage 1"},
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
