/* SPDX-License-Identifier: Apache-2.0 */
/* groups.c: turns dp_replicate, dp_shard and hybrid into the number of ranks that share one copy of the
 * parameters. */
#include "comm/topology.h"
#include "shard/placement.h"
#include "zero/config.h"

/* dp_replicate auto makes each host a replica. So the ranks of a host must be consecutive, and all hosts must
 * have equally many. */
static int check_hosts(const struct zr_topology *t)
{
    char hosts[512];
    zr_topology_list_hosts(t, hosts, sizeof hosts);
    for (int32_t host = 1; host < t->n_hosts; host++)
        if (t->hosts[host].n_ranks != t->hosts[0].n_ranks)
            return zr_fail(
                ZERO_ERR_ARG,
                "dp_replicate is auto, one replica per host, but hosts have unequal numbers of ranks: %s; "
                "allowed: equally many ranks on each host, or a number for dp_replicate",
                hosts);
    for (int32_t r = 0; r < t->world; r++)
        if (t->host_of[r] != r / t->hosts[0].n_ranks)
            return zr_fail(
                ZERO_ERR_ARG,
                "dp_replicate is auto, one replica per host, but the ranks of a host are not consecutive: "
                "%s; allowed: consecutive ranks on each host, or a number for dp_replicate",
                hosts);
    return 0;
}

/* Counts the data-parallel ranks of a host, without cp, that share a copy: they have the same part of one
 * pipeline stage. */
static int replicate_hosts(struct zero_place *p, const struct zr_topology *t)
{
    ZR_TRY(t ? check_hosts(t) : 0);
    if (!t && p->n_data > 1)
        return zr_fail(ZERO_ERR_ARG,
                       "dp_replicate is auto, one replica per host, but a plan knows no hosts: give "
                       "dp_replicate a number");
    int32_t of_host = t ? t->hosts[0].n_ranks : p->world, of_stage = p->world / p->n_pp;
    const int32_t of_row = p->n_cp * p->n_tp;
    if (of_host % of_stage && (of_stage % of_host || of_host % of_row))
        return zr_fail(ZERO_ERR_ARG,
                       "dp_replicate is auto, one replica per host, but the %d ranks of a host do not make "
                       "whole replicas with pp %d, cp %d and tp %d; give dp_replicate a number",
                       of_host, p->n_pp, p->n_cp, p->n_tp);
    p->n_dp_shard = of_host % of_stage ? of_host / of_row : p->n_data;
    p->n_dp_replicate = p->n_data / p->n_dp_shard;
    p->dp_replicate = p->data / p->n_dp_shard;
    p->dp_shard = p->data % p->n_dp_shard;
    return 0;
}

/* Logs in one line which settings have no effect, or less than their name says. shards: the stage has
 * replicas. */
static void report(const struct zr_config *c, bool shards)
{
    const struct zero_place *p = &c->place;
    bool hfsdp = c->user.hybrid == ZERO_HFSDP, is_auto = c->user.mesh.dp_replicate == ZERO_AUTO;
    if (p->rank != 0 || zr_place_dp(p) == 1)
        return;
    if (!shards && p->n_dp_replicate > 1)
        zr_warn(c->log, "dp_replicate is %d but stage is %d, not 3: all data-parallel ranks are one group%s",
                p->n_dp_replicate, c->options.stage, hfsdp ? ", and hybrid hfsdp has no effect" : "");
    else if (!shards && hfsdp)
        zr_warn(c->log, "hybrid is hfsdp but stage is %d, not 3: it has no effect", c->options.stage);
    else if (shards && p->n_dp_replicate == 1 && is_auto)
        zr_warn(c->log,
                "dp_replicate is auto and becomes 1, because one host has all ranks of a data-parallel "
                "group: this runs as stage 3%s",
                hfsdp ? ", and hybrid hfsdp has no effect" : "");
    else if (shards && p->n_dp_replicate == 1 && hfsdp)
        zr_warn(c->log, "hybrid is hfsdp but dp_replicate is 1: it has no effect, this runs as stage 3");
    else if (shards && p->n_dp_replicate > 1 && p->n_dp_shard * p->n_cp == 1)
        zr_warn(c->log, "dp_replicate is %d and dp_shard 1, so %s: this runs as stage %d", p->n_dp_replicate,
                hfsdp ? "only the optimizer's states are sharded" : "nothing is sharded", hfsdp ? 1 : 0);
}

int zr_config_groups(struct zr_config *c, const struct zr_topology *t)
{
    struct zr_options *o = &c->options;
    struct zero_place *p = &c->place;
    ZR_TRY(p->n_dp_replicate == ZERO_AUTO ? replicate_hosts(p, t) : 0);
    o->hybrid = ZR_HYBRID_NONE;
    o->dp_shard = p->n_data * p->n_cp;
    bool hfsdp = c->user.hybrid == ZERO_HFSDP, shards = zr_placement_asked(o).shards_params;
    report(c, shards);
    if (shards && p->n_dp_replicate > 1 && p->n_dp_shard * p->n_cp == 1) {
        o->stage = hfsdp ? 1 : 0;
    } else if (shards && p->n_dp_replicate > 1) {
        o->hybrid = hfsdp ? ZR_HFSDP : ZR_HSDP;
        o->dp_shard = p->n_dp_shard * p->n_cp;
    }
    return 0;
}

void zr_config_mind_network(struct zr_config *c, bool outer_spans_hosts)
{
    struct zr_options *o = &c->options;
    if (!outer_spans_hosts || zr_most_micro_batches(o) == 1 || !o->deterministic ||
        c->user.deterministic != ZERO_AUTO)
        return;
    o->deterministic = false;
    if (c->place.rank == 0)
        zr_info(c->log,
                "deterministic is off: groups of %d ranks span several hosts, and each of a step's %d "
                "micro-batches would be reduced over their network; set deterministic = 1 for the same bits "
                "as stage 3",
                o->dp_shard, zr_most_micro_batches(o));
}
