/* mesh.h: the world's ranks in three directions: the ranks that have parts of one copy of the model, and
 * among those that have the same part, inner groups of ranks that share one copy of what is cut inside, and
 * outer groups of those that have the same slice of each copy.
 *
 * A world of M parts: rank r has part r % M, and is one of the data-parallel ranks r % M, r % M + M and on,
 * of which it is number r / M. By places of the topology they are a world W of their own. Of W places in
 * groups of I, place p is the (p % I)-th of inner group p / I, which is places I * (p / I) and on. Its outer
 * group is places p % I, p % I + I, p % I + 2 I, and so on, of which it is the (p / I)-th. One group of all
 * (I = W) is a world that is not divided; then each outer group is a rank by itself. */
#ifndef ZR_COMM_MESH_H
#define ZR_COMM_MESH_H

#include "comm/group.h"
#include "comm/topology.h"

struct zr_mesh {
    /* Sizes; parts * inner * outer is the world's. */
    int32_t parts, inner, outer;
    /* Which part this rank has. */
    int32_t part;
    /* Of this rank: those that have the same part, its inner and its outer group among them, by places. The
     * first of all is the one of the lowest number. */
    struct zr_group all, in, out;
    /* The ranks that have the other parts of its copy, by number, and everybody, by places. */
    struct zr_group model, world;
    /* Of all five; the mesh's own. */
    int32_t *members;
    /* Some outer group, on all ranks the same answer, has members on two hosts. */
    bool outer_spans_hosts;
};

/* parts: of the model, 1: it is whole on every rank; inner: ranks of a group. Local. ZR_ERR_ARG where they do
 * not divide the world, ZR_ERR_NOMEM; then *out holds nothing. The topology is not needed afterwards. */
int zr_mesh_make(const struct zr_topology *t, int32_t parts, int32_t inner, struct zr_mesh *out);

/* NULL and a zeroed struct are allowed. */
void zr_mesh_free(struct zr_mesh *mesh);

#endif
