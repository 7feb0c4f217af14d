/* SPDX-License-Identifier: Apache-2.0 */
/* test_misuse_config.c: wrong values in the configuration (misuse.h). */
#include "test/zero/misuse.h"

static void forgets_init(struct program *p)
{
    int32_t stage = p->cfg.stage;
    memset(&p->cfg, 0, sizeof p->cfg);
    p->cfg.stage = stage;
}

/* Without momentum, and with weights as masters, nothing is kept. */
static void without_states(struct program *p, enum zero_states where)
{
    p->cfg.memory.states = where;
    p->cfg.memory.states_dir = where == ZERO_STATES_FILE ? "/tmp" : NULL;
    p->cfg.optim.optimizer = ZERO_SGD;
    p->cfg.optim.beta1 = 0;
    p->cfg.optim.masters = ZERO_MASTERS_NONE;
}

static void keep_states_in_file(struct program *p)
{
    p->cfg.memory.states = ZERO_STATES_FILE;
    p->cfg.memory.states_dir = "/tmp";
}

/* Only the first tensor has states, so the file has one part, and two buffers are larger. */
static void keep_few_states_in_file(struct program *p)
{
    keep_states_in_file(p);
    p->group = p->cfg.optim;
    p->group.optimizer = ZERO_SGD;
    p->group.beta1 = 0;
    p->group.masters = ZERO_MASTERS_NONE;
    p->cfg.optim_groups = &p->group;
    p->cfg.n_optim_groups = 1;
    for (int t = 1; t < TOY_TENSORS; t++)
        p->table[t].group = 1;
}

/* ---- rows ---- */

#define REFUSED(name, worlds, configure, ...)                                                                \
    MISUSE(name, ALL, worlds, configure, train(p), FAILS(ARG, __VA_ARGS__))

REFUSED("forgets ZERO_CONFIG_INIT", W1, forgets_init(p), "was not initialised", "ZERO_CONFIG_INIT")
REFUSED("never begins its configuration", W1, memset(&p->cfg, 0xcd, sizeof p->cfg), "did not initialise cfg",
        "ZERO_CONFIG_INIT")
REFUSED("was built with a zero.h of longer structs", W1, p->cfg.size += 1024, "size is", "another zero.h")
REFUSED("was built with a zero.h of another version", W1, p->cfg.version++, "version is", "another zero.h")
REFUSED("timeout_ms 0", BOTH, p->cfg.launch.timeout_ms = 0, "timeout_ms is 0")
REFUSED("grad_accum_steps 0", BOTH, p->cfg.grad_accum_steps = 0, "grad_accum_steps is 0")
REFUSED("grad_scale 0", BOTH, p->cfg.grad_scale = 0, "grad_scale is 0")
REFUSED("prefetch negative", BOTH, p->cfg.memory.prefetch = -1, "prefetch is -1", "0 for none")
REFUSED("beta1 NaN", BOTH, p->cfg.optim.beta1 = NAN, "beta1 is nan")
REFUSED("beta2 1", BOTH, p->cfg.optim.beta2 = 1, "beta2 is 1")
REFUSED("eps negative", BOTH, p->cfg.optim.eps = -1e-8f, "eps is -9.99999994e-09")
REFUSED("weight_decay infinite", BOTH, p->cfg.optim.weight_decay = INFINITY, "weight_decay is inf")
REFUSED("clip negative", BOTH, p->cfg.clip = -1, "clip is -1")
MISUSE("a budget of nothing", S3, W2, p->cfg.memory.param_budget_bytes = 0, train(p),
       FAILS(BUDGET, "param_budget_bytes is 0", "alone needs"))
MISUSE("a budget of nothing, needed by nobody", S0 | S1 | S2, BOTH, p->cfg.memory.param_budget_bytes = 0,
       train(p), TRAINS)
MISUSE("eps 0", ALL, BOTH, (p->cfg.optim.optimizer = ZERO_RMSPROP, p->cfg.optim.eps = 0), train(p),
       LOGS("eps is 0"))
MISUSE("states in a file, with no states", ALL, BOTH, without_states(p, ZERO_STATES_FILE), train(p),
       LOGS("states is file, but rank 0 keeps neither masters nor states"), .only_rank_0 = true)
MISUSE("fewer states in a file than its buffers", ALL, BOTH, keep_few_states_in_file(p), train(p),
       LOGS("warning: states is file, but its buffers take 8192 bytes of host memory, and the file has only "
            "4096"),
       .only_rank_0 = true)
MISUSE("more states in a file than its buffers", ALL, BOTH, keep_states_in_file(p),
       strstr(p->lines, "its buffers take") ? -1 : train(p),
       LOGS("masters and states are in a file in /tmp: "), .only_rank_0 = true)
MISUSE("states in 8 bits, with no states", ALL, BOTH,
       (without_states(p, ZERO_STATES_HOST), p->cfg.optim.moments = ZERO_MOMENTS_Q8), train(p),
       LOGS("moments is q8, which has no effect: the optimizer has no states"), .only_rank_0 = true)
MISUSE("a folder for states that are in memory", ALL, BOTH, p->cfg.memory.states_dir = "/tmp", train(p),
       LOGS("states_dir is set, but states is device: it has no effect"), .only_rank_0 = true)
MISUSE("a seed without random rounding", ALL, BOTH, p->cfg.memory.seed = 7, train(p),
       LOGS("seed is 7, which has no effect: nothing is rounded at random"), .only_rank_0 = true)
MISUSE("HFSDP below stage 3", S0 | S1 | S2, W2, p->cfg.hybrid = ZERO_HFSDP, train(p),
       LOGS("hybrid is hfsdp but stage is", "it has no effect"), .only_rank_0 = true)
MISUSE("the same, alone", S0 | S1 | S2, W1, p->cfg.hybrid = ZERO_HFSDP, train(p), TRAINS)
MISUSE("replicas that do not divide the world", ALL, BOTH, p->cfg.mesh.dp_replicate = 3, train(p),
       FAILS(ARG, "dp_replicate 3", "do not divide the world of"))
MISUSE("no replica", ALL, BOTH, p->cfg.mesh.dp_replicate = 0, train(p),
       FAILS(ARG, "dp_replicate is 0; allowed: 1 and more"))
MISUSE("replicas below stage 3", S0 | S1 | S2, W2, p->cfg.mesh.dp_replicate = p->cfg.launch.world, train(p),
       LOGS("dp_replicate is 2 but stage is", "all data-parallel ranks are one group"), .only_rank_0 = true)
MISUSE("other groups on one rank", S3, W2, p->cfg.mesh.dp_replicate = p->odd ? 2 : 1, train(p),
       FAILS(MISMATCH, "dp_replicate is 2 on rank 1 and 1 on rank 0"))
MISUSE("a hybrid on one rank only", S3, W2, p->cfg.hybrid = p->odd ? p->cfg.hybrid : ZERO_HFSDP, train(p),
       FAILS(MISMATCH, "hybrid is hsdp on rank 1 and hfsdp on rank 0"))
MISUSE("HFSDP of hosts, on one host", S3, W2,
       (p->cfg.hybrid = ZERO_HFSDP, p->cfg.mesh.dp_replicate = ZERO_AUTO), train(p),
       LOGS("dp_replicate is auto and becomes 1", "this runs as stage 3, and hybrid hfsdp has no effect"),
       .only_rank_0 = true)
MISUSE("HFSDP of one replica", S3, W2, p->cfg.hybrid = ZERO_HFSDP, train(p),
       LOGS("hybrid is hfsdp but dp_replicate is 1", "this runs as stage 3"), .only_rank_0 = true)
MISUSE("the same, on one rank", S3, W1, p->cfg.hybrid = ZERO_HFSDP, train(p), TRAINS)
MISUSE("a group of one rank, on one rank", S3, W1, p->cfg.mesh.dp_replicate = p->cfg.launch.world, train(p),
       TRAINS)
MISUSE("HSDP with groups of 1 rank", S3, W2, p->cfg.mesh.dp_replicate = p->cfg.launch.world, train(p),
       LOGS("dp_replicate is 2 and dp_shard 1", "nothing is sharded: this runs as stage 0"),
       .only_rank_0 = true)
MISUSE("HFSDP with groups of 1 rank", S3, W2,
       (p->cfg.hybrid = ZERO_HFSDP, p->cfg.mesh.dp_replicate = p->cfg.launch.world), train(p),
       LOGS("dp_replicate is 2 and dp_shard 1", "optimizer's states are sharded: this runs as stage 1"),
       .only_rank_0 = true)
