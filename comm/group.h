/* SPDX-License-Identifier: Apache-2.0 */
/* group.h: an ordered set of ranks that work together: what a communicator is opened on.
 *
 * A rank's number in the world names it to the user, its place in the group says which slice is its own. The
 * order of places is the order in which a fixed tree adds, so two groups of the same ranks in another order
 * have other bits. */
#ifndef ZR_COMM_GROUP_H
#define ZR_COMM_GROUP_H

#include <stddef.h>
#include <stdint.h>

/* Plain data; members belong to whoever made the group, and outlive what was opened on it. */
struct zr_group {
    /* How many ranks it has, and this rank's place among them. */
    int32_t size, rank;
    /* (size) ranks of the world, by place; NULL: ranks 0 to size - 1 in their order. */
    const int32_t *members;
    /* Of the members that share this rank's host: how many, and this rank's place among them; 0, 0: nobody
     * has asked. */
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
