/* mesh.h: the world's ranks in two directions: inner groups of ranks that share one copy of what is cut
 * inside, and outer groups of those that have the same part of each copy.
 *
 * Of W places in groups of I, place p is the (p % I)-th of inner group p / I, which is places I * (p / I) and
 * on. Its outer group is places p % I, p % I + I, p % I + 2 I, and so on, of which it is the (p / I)-th. One
 * group of all (I = W) is a world that is not divided; then each outer group is a rank by itself. */
#ifndef ZR_COMM_MESH_H
#define ZR_COMM_MESH_H

#include "comm/group.h"
#include "comm/topology.h"

struct zr_mesh {
    /* Sizes; inner * outer is the world's. */
    int32_t inner, outer;
    /* Of this rank: everybody, its inner and its outer group, by places. The first of a group of all is rank
     * 0. */
    struct zr_group all, in, out;
    /* Of all three; the mesh's own. */
    int32_t *members;
    /* Some outer group, on all ranks the same answer, has members on two hosts. */
    bool outer_spans_hosts;
};

/* inner: ranks of a group. Local. ZR_ERR_ARG where it does not divide the world, ZR_ERR_NOMEM; then *out
 * holds nothing. The topology is not needed afterwards. */
int zr_mesh_make(const struct zr_topology *t, int32_t inner, struct zr_mesh *out);

/* NULL and a zeroed struct are allowed. */
void zr_mesh_free(struct zr_mesh *mesh);

#endif
