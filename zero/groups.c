/* SPDX-License-Identifier: Apache-2.0 */
/* groups.c: what cfg.hybrid and cfg.shard_group come to in a world: how many ranks share one copy of the
 * parameters. */
#include "comm/topology.h"
#include "zero/config.h"

static const char *name_of(const struct zr_config *c)
{
    return c->user.hybrid == ZERO_HYBRID_HSDP ? "hsdp" : "hfsdp";
}

/* The ranks of a host, of which all must have as many. */
static int ranks_of_a_host(const struct zr_topology *t, bool has_hosts, int32_t *group)
{
    char hosts[512];
    *group = t->hosts[0].n_ranks;
    if (!has_hosts && t->world > 1)
        return zr_fail(ZR_ERR_ARG,
                       "shard_group is auto, the ranks of a host, but a plan knows no hosts: give "
                       "shard_group a number");
    for (int32_t host = 1; host < t->n_hosts; host++)
        if (t->hosts[host].n_ranks != *group) {
            zr_topology_list_hosts(t, hosts, sizeof hosts);
            return zr_fail(
                ZR_ERR_ARG,
                "shard_group is auto, the ranks of a host, but hosts have unequal numbers of them: "
                "%s; allowed: as many ranks on each host, or a number that divides %d",
                hosts, t->world);
        }
    return 0;
}

/* What is left of a hybrid with one group, or with groups of one rank. */
static void run_as(struct zr_config *c, const struct zr_topology *t, int stage)
{
    static const char *const what[] = {"groups of 1 rank, in which nothing is cut",
                                       "groups of 1 rank, in which only the optimizer's states are cut", "",
                                       "one group of all ranks"};
    if (t->rank == 0 && t->world > 1)
        zr_warn(c->log, "hybrid is %s with %s: this runs as stage %d", name_of(c), what[stage], stage);
    c->options.stage = stage;
    c->options.hybrid = ZR_HYBRID_NONE;
}

/* No error, for ZERO_HYBRID=none is to compare a hybrid's program with the stage itself. */
static void warn_without_hybrid(struct zr_config *c, const struct zr_topology *t)
{
    if (t->rank == 0)
        zr_warn(c->log,
                "shard_group is %d but hybrid is none: it has no effect, stage %d runs in one group of all "
                "ranks",
                c->user.shard_group, c->options.stage);
}

int zr_config_groups(struct zr_config *c, const struct zr_topology *t, int32_t world, bool has_hosts)
{
    if (!c->user.hybrid && c->user.shard_group != ZERO_AUTO)
        warn_without_hybrid(c, t);
    int32_t group = c->user.hybrid ? c->user.shard_group : world;
    int err = group == ZERO_AUTO ? ranks_of_a_host(t, has_hosts, &group) : 0;
    if (err)
        return err;
    if (world % group)
        return zr_fail(ZR_ERR_ARG, "shard_group is %d, world is %d; allowed: a number that divides the world",
                       group, world);
    c->options.shard_group = group;
    if (c->user.hybrid && group == world)
        run_as(c, t, 3);
    else if (c->user.hybrid && group == 1)
        run_as(c, t, c->user.hybrid == ZERO_HYBRID_HSDP ? 0 : 1);
    return 0;
}

int32_t zr_config_inner(const struct zr_config *c, int32_t world)
{
    return c->options.hybrid ? c->options.shard_group : world;
}

void zr_config_mind_network(struct zr_config *c, bool outer_spans_hosts, int32_t rank)
{
    struct zr_options *o = &c->options;
    if (!outer_spans_hosts || o->grad_accum_steps == 1 || !o->deterministic ||
        c->user.deterministic != ZERO_AUTO)
        return;
    o->deterministic = false;
    if (rank == 0)
        zr_info(c->log,
                "deterministic is off: groups (of %d ranks) lie on several hosts and a step has %d "
                "micro-batches, "
                "each of which would be reduced over the network between them; set deterministic = 1 for the "
                "bits of stage 3",
                o->shard_group, o->grad_accum_steps);
}
