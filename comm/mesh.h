/* SPDX-License-Identifier: Apache-2.0 */
/* mesh.h: the groups of the world's ranks along the axes of cfg.mesh.
 *
 *     pp            pipeline stages
 *     tp            tensor parallelism: ranks that share one pipeline stage
 *     cp            context parallelism: data-parallel ranks that share the rows of a sequence
 *     dp_shard      data-parallel ranks that share one copy of what is cut
 *     dp_replicate  data-parallel ranks that have the same slice of each copy
 *
 * Each pipeline stage has N = world / pp ranks. Rank r has pipeline stage r / N and number r % tp along tp.
 * It is number r % N / tp of the data-parallel ranks that have both in common. Their places are host by host
 * as in the topology, or by number (zr_topology_order_by_rank).
 *
 * Ranks along cp are data-parallel ranks, too: they hold and reduce shards like all others. The cp group of a
 * rank is cp data-parallel ranks with consecutive numbers.
 *
 * Place p of them is number p % dp_shard of the shard group p / dp_shard, whose places are neighbours. Its
 * replicate group is places p % dp_shard, p % dp_shard + dp_shard, and so on. Without replicas each replicate
 * group is a single rank. */
#ifndef ZR_COMM_MESH_H
#define ZR_COMM_MESH_H

#include "comm/comm.h"
#include "comm/topology.h"

struct zr_mesh {
    /* Sizes of the axes. Their product is the world's size. */
    int32_t pp, tp, dp_shard, dp_replicate;
    /* Ranks along cp, a divisor of the data-parallel ranks. */
    int32_t cp;
    /* This rank's pipeline stage, and its numbers along tp and cp. */
    int32_t pp_rank, tp_rank, cp_rank;
    /* The ranks with this rank's pipeline stage and number along tp, by places, and this rank's groups among
     * them. The first of dp_group is the one with the lowest number. */
    struct zr_group dp_group, shard_group, replicate_group;
    /* The ranks along tp with this rank's pipeline stage, by number. The whole world, by places. */
    struct zr_group tp_group, world;
    /* The ranks along cp, by number. */
    struct zr_group cp_group;
    /* Pairs of ranks of neighbouring stages, by number: an even stage and the next, an odd stage and the
     * next. A single rank if this rank has no such neighbour. */
    struct zr_group pair[2];
    /* The ranks of the first and the last stage that correspond to this one. A single rank in other
     * stages. */
    struct zr_group ends;
    /* Members of all groups. Owned by the mesh. */
    int32_t *members;
    /* Some replicate group has ranks on two hosts. Equal on all ranks. */
    bool replicas_span_hosts;
};

/* Sizes of axes. */
struct zr_mesh_sizes {
    int32_t pp, tp, cp, dp_shard;
};

/* Makes the groups for these sizes; dp_replicate follows from the world. Local. Returns ZERO_ERR_ARG if they
 * do not divide the world, or ZERO_ERR_NOMEM; *out then holds nothing. The topology is not needed
 * afterwards. */
int zr_mesh_make(const struct zr_topology *t, const struct zr_mesh_sizes *sizes, struct zr_mesh *out);

/* NULL and a zeroed struct are allowed. */
void zr_mesh_free(struct zr_mesh *mesh);

#endif
