/* SPDX-License-Identifier: Apache-2.0 */
/* spread.h: how the ranks of a group lie on hosts, for communicators that move bytes inside a host by one way
 * and between hosts by another.
 *
 * Where every host has as many ranks, and they are neighbours in the group's order, the group is a table of
 * hosts and columns: of L ranks on each, place p is column p mod L of host p / L. Where L is a power of two
 * the fixed tree over all places (sum_tree of kernels/device.h) is, besides, the tree over hosts of the trees
 * inside them, so that each host can add its own first: of the places [hL, (h + 1)L) of a host none is split
 * off before all other hosts are, since the tree splits at the largest power of two below its size, a
 * multiple of L as long as that is larger than L.
 *
 * Pure: nobody is asked, and equal on all ranks but for host and local. */
#ifndef ZR_COMM_SPREAD_H
#define ZR_COMM_SPREAD_H

#include "comm/comm.h"
#include "comm/topology.h"

struct zr_spread {
    /* of the group: its hosts, in the order of their first places; this rank's */
    int32_t size, n_hosts, host;
    /* ranks of the group on a host: the most, the fewest */
    int32_t most_local, least_local;
    /* Every host's members are neighbours in the group's order. */
    bool runs;
    /* And all hosts have as many. */
    bool columns;
    /* And that is a power of two, or there is one host: sums can be cut into those of hosts. */
    bool cut;
    /* (size) by place: its host; which it is there, by place too */
    int32_t *host_of, *local_of;
    /* (n_hosts) how many members a host has */
    int32_t *n_local;
    /* (size) the places host by host: those of host h from at[first[h]] on */
    int32_t *at;
    /* (n_hosts) */
    int32_t *first;
};

/* ZR_ERR_NOMEM; then *out holds nothing. Neither the topology nor the group is needed afterwards. */
int zr_spread_make(const struct zr_topology *t, const struct zr_group *g, struct zr_spread *out);
/* NULL and a zeroed struct are allowed. */
void zr_spread_free(struct zr_spread *s);

/* The place of which this rank's host, or another, has its local-th member. */
static inline int32_t zr_spread_place(const struct zr_spread *s, int32_t host, int32_t local)
{
    return s->at[s->first[host] + local];
}

/* Which member of a host fetches, for all that are there, what a place of another host has: with columns, the
 * one of its column. */
static inline int32_t zr_spread_fetcher(const struct zr_spread *s, int32_t place, int32_t host)
{
    return s->local_of[place] % s->n_local[host];
}

/* Of all groups of a role, alike on all ranks. */
struct zr_spread_worst {
    /* hosts of one; ranks of other hosts that one rank has in its group */
    int32_t most_hosts, most_remote;
    /* every group's sums can be cut; every group is on one host */
    bool all_cut, all_one_host;
};

/* inner: ranks of an inner group (comm/mesh.h), the world's where there are no groups. A role that nobody has
 * then is that of groups of one rank. ZR_ERR_NOMEM. */
int zr_spread_worst(const struct zr_topology *t, int32_t inner, enum zr_role role,
                    struct zr_spread_worst *out);

#endif
