/* SPDX-License-Identifier: Apache-2.0 */
/* mesh.h: the world's ranks in four directions: the pipeline stages of a model, the ranks that have parts of
 * one stage, and among those that have the same part of the same stage, inner groups of ranks that share one
 * copy of what is cut inside, and outer groups of those that have the same slice of each copy.
 *
 * A world of P stages in M parts, N ranks each stage: rank r is of stage r / N, has part r % M, and is number
 * r % N / M of the data-parallel ranks, those of the same stage and part. These are a world W of their own,
 * with places as the topology gives them: host by host, hosts by the lowest of these ranks, or by number
 * (zr_topology_order_by_rank). Of W places in
 * groups of I, place p is the (p % I)-th of inner group p / I, which is places I * (p / I) and on. Its outer
 * group is places p % I, p % I + I, p % I + 2 I, and so on, of which it is the (p / I)-th. One group of all
 * (I = W) is a world that is not divided; then each outer group is a rank by itself. */
#ifndef ZR_COMM_MESH_H
#define ZR_COMM_MESH_H

#include "comm/group.h"
#include "comm/topology.h"

struct zr_mesh {
    /* Sizes; stages * parts * inner * outer is the world's. */
    int32_t stages, parts, inner, outer;
    /* Which stage and which part of it this rank has. */
    int32_t stage, part;
    /* Of this rank: those that have the same part of the same stage, its inner and its outer group among
     * them, by places. The first of all is the one of the lowest number. */
    struct zr_group all, in, out;
    /* The ranks that have the other parts of its stage, by number, and everybody, by places. */
    struct zr_group model, world;
    /* Pairs of ranks of neighbouring stages, by number: of an even stage and the next one, and of an odd
     * stage and the next one. The rank by itself where it has no such neighbour. */
    struct zr_group pair[2];
    /* This rank's like in the first and in the last stage; the rank by itself in the others. */
    struct zr_group ends;
    /* Of all of them; the mesh's own. */
    int32_t *members;
    /* Some outer group, on all ranks the same answer, has members on two hosts. */
    bool outer_spans_hosts;
};

/* stages: of the pipeline; parts: of a stage; 1 and 1: the model is whole on every rank; inner: ranks of a
 * group. Local. ZR_ERR_ARG where they do not divide the world, ZR_ERR_NOMEM; then *out holds nothing. The
 * topology is not needed afterwards. */
int zr_mesh_make(const struct zr_topology *t, int32_t stages, int32_t parts, int32_t inner,
                 struct zr_mesh *out);

/* NULL and a zeroed struct are allowed. */
void zr_mesh_free(struct zr_mesh *mesh);

#endif
