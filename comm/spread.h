/* SPDX-License-Identifier: Apache-2.0 */
/* spread.h: how the ranks of a group are distributed over hosts, for communicators that move data one way
 * inside a host and another way between hosts.
 *
 * Suppose that every host has L ranks of the group, and that they are neighbours in the group's order. Then
 * the group is a table: place p is column p mod L of host p / L. If L is also a power of two, the fixed tree
 * over all places (sum_tree of kernels/device.h) consists of the trees inside hosts, and a tree over hosts on
 * top. Then each host can add its places first. The reason: the tree splits at the largest power of two below
 * its size, which is a multiple of L while the size is larger than L. So it never splits inside a host before
 * all hosts are separate.
 *
 * Nothing here communicates. Results are equal on all ranks, except for host. */
#ifndef ZR_COMM_SPREAD_H
#define ZR_COMM_SPREAD_H

#include "comm/comm.h"
#include "comm/topology.h"

struct zr_spread {
    /* Number of ranks and hosts of the group, and this rank's host. Hosts are numbered by their first
     * places. */
    int32_t size, n_hosts, host;
    /* Most and fewest ranks of the group on a host. */
    int32_t most_local, least_local;
    /* The ranks of every host are neighbours in the group's order. */
    bool runs;
    /* In addition, all hosts have the same number of ranks. */
    bool columns;
    /* In addition, that number is a power of two, or there is one host. So sums can be made host by host. */
    bool cut;
    /* (size) By place: its host, and its number among the ranks there. */
    int32_t *host_of, *local_of;
    /* (n_hosts) Ranks of each host. */
    int32_t *n_local;
    /* (size) Places host by host. Those of host h begin at at[first[h]]. */
    int32_t *at;
    /* (n_hosts) See at. */
    int32_t *first;
};

/* Returns ZERO_ERR_NOMEM; *out then holds nothing. Neither the topology nor the group is needed
 * afterwards. */
int zr_spread_make(const struct zr_topology *t, const struct zr_group *g, struct zr_spread *out);
/* NULL and a zeroed struct are allowed. */
void zr_spread_free(struct zr_spread *s);

/* The place of rank number `local` of a host. */
static inline int32_t zr_spread_place(const struct zr_spread *s, int32_t host, int32_t local)
{
    return s->at[s->first[host] + local];
}

/* The rank of a host, by its number there, that fetches the data of a place on another host for all ranks of
 * the host. With columns it is the rank in the column of that place. */
static inline int32_t zr_spread_fetcher(const struct zr_spread *s, int32_t place, int32_t host)
{
    return s->local_of[place] % s->n_local[host];
}

/* The worst case over all groups of a role. Equal on all ranks. */
struct zr_spread_worst {
    /* Most hosts of a group. Most ranks on other hosts that a rank has in its group. */
    int32_t most_hosts, most_remote;
    /* Sums of every group can be made host by host; every group is on one host. */
    bool all_cut, all_one_host;
};

/* Finds the worst case. dp_shard is the size of a shard group (comm/mesh.h), or the world's size if there are
 * no groups. A role without a communicator counts as one with groups of one rank. Returns ZERO_ERR_NOMEM. */
int zr_spread_worst(const struct zr_topology *t, int32_t dp_shard, enum zr_role role,
                    struct zr_spread_worst *out);

#endif
