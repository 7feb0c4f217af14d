/* SPDX-License-Identifier: Apache-2.0 */
/* mesh.h: the groups of the world's ranks along four axes.
 *
 *     pipeline  ranks with different pipeline stages
 *     parts     tensor parallelism: ranks that share one pipeline stage
 *     inner     data-parallel ranks that share one copy of what is cut
 *     outer     data-parallel ranks that have the same slice of each copy
 *
 * Take a world of P pipeline stages and M parts, with N ranks for each stage. Rank r has stage r / N and part
 * r % M. It is number r % N / M of the W data-parallel ranks with that stage and part. Their places are host
 * by host as in the topology, or by number (zr_topology_order_by_rank).
 *
 * With inner groups of I places, place p is number p % I of inner group p / I. The places of an inner group
 * are neighbours. Its outer group is places p % I, p % I + I, p % I + 2 I, and so on. Without groups I is W,
 * and each outer group is a single rank. */
#ifndef ZR_COMM_MESH_H
#define ZR_COMM_MESH_H

#include "comm/group.h"
#include "comm/topology.h"

struct zr_mesh {
    /* Sizes of the axes. Their product is the world's size. */
    int32_t stages, parts, inner, outer;
    /* The pipeline stage and the part of this rank. */
    int32_t stage, part;
    /* The ranks with this rank's stage and part, and this rank's inner and outer group among them, by places.
     * The first of all is the one with the lowest number. */
    struct zr_group all, in, out;
    /* The ranks with all parts of this rank's stage, by number. The whole world, by places. */
    struct zr_group model, world;
    /* Pairs of ranks of neighbouring stages, by number: an even stage and the next, an odd stage and the
     * next. A single rank if this rank has no such neighbour. */
    struct zr_group pair[2];
    /* The ranks of the first and the last stage that correspond to this one. A single rank in other
     * stages. */
    struct zr_group ends;
    /* Members of all groups. Owned by the mesh. */
    int32_t *members;
    /* Some outer group has ranks on two hosts. Equal on all ranks. */
    bool outer_spans_hosts;
};

/* Makes the groups for the given numbers of pipeline stages, parts of a stage, and ranks of an inner group.
 * Local. Returns ZERO_ERR_ARG if they do not divide the world, or ZERO_ERR_NOMEM; *out then holds nothing.
 * The topology is not needed afterwards. */
int zr_mesh_make(const struct zr_topology *t, int32_t stages, int32_t parts, int32_t inner,
                 struct zr_mesh *out);

/* NULL and a zeroed struct are allowed. */
void zr_mesh_free(struct zr_mesh *mesh);

#endif
