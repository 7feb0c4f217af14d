/* SPDX-License-Identifier: Apache-2.0 */
/* group.h: an ordered set of ranks that work together. A communicator is opened on a group. This is any such
 * set, and not only a group of HSDP or HFSDP.
 *
 * Users see a rank's number in the world. Its place in the group selects the slice that it owns. A fixed tree
 * adds in the order of places, so two groups of the same ranks in another order give different bits. */
#ifndef ZR_COMM_GROUP_H
#define ZR_COMM_GROUP_H

#include <stddef.h>
#include <stdint.h>

/* Plain data. The members belong to the group's maker, and outlive what was opened on it. */
struct zr_group {
    /* Number of ranks in the group, and this rank's place among them, from 0. */
    int32_t size, rank;
    /* (size) ranks of the world, by place. NULL: ranks 0 to size - 1 in their order. */
    const int32_t *members;
    /* Number of members on this rank's host, and this rank's place among these members. 0, 0: unknown. */
    int32_t local_size, local_rank;
};

/* The rank of the world at a place. */
static inline int32_t zr_group_member(const struct zr_group *g, int32_t place)
{
    return g->members ? g->members[place] : place;
}

/* All ranks of a world, in their order. */
static inline struct zr_group zr_group_of_all(int32_t rank, int32_t world)
{
    return (struct zr_group){.size = world, .rank = rank};
}

#endif
