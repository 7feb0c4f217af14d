/* SPDX-License-Identifier: Apache-2.0 */
/* topology.h: which ranks are on one host, asked once per context, and the only answer to that question.
 *
 * Two ranks are on one host where each can map the other's memory: the same boot of the same machine, the
 * same process namespace, and a segment of the one that the other could open (topology.c). Names of hosts
 * count for nothing; ZERO_HOST_ID may make several hosts of one, and never one of several. Shared memory
 * opens among the ranks of one host; NCCL uses copy engines there; and places number them one after the
 * other. What a machine has (memory, cores) is divided among the ranks of the machine, which may be several
 * hosts: containers.
 *
 * The place of a rank: ranks are put in order host by host, hosts by their lowest rank, the ranks of a host
 * by number. So place 0 is rank 0, and places are ranks on one host, and wherever the ranks of each host are
 * consecutive. Whatever has an order over ranks that decides bits (the tree that gradients are summed in, who
 * owns which slice) follows places. Where the bits must not depend on hosts, zr_topology_order_by_rank makes
 * places ranks everywhere.
 *
 * Thread-safety: plain data once it is made. */
#ifndef ZR_COMM_TOPOLOGY_H
#define ZR_COMM_TOPOLOGY_H

#include "comm/identity.h"

#include <stdbool.h>
#include <stddef.h>

struct zr_rendezvous;

struct zr_host {
    int32_t lowest_rank, n_ranks;
    /* its lowest rank's host name, for messages */
    char name[64];
    /* as struct zr_identity has it */
    char machine[48];
    /* as struct zr_identity has it */
    uint64_t pid_namespace;
    /* as struct zr_identity has it */
    char part[48];
    /* Why it is not one with an earlier host of the same machine: "rank 1 cannot open the memory of rank 0:
     * Permission denied"; "": it is the first. Equal on all ranks. */
    char why[192];
};

struct zr_topology {
    int32_t world, rank;
    /* how many there are; this rank's */
    int32_t n_hosts, host;
    /* ranks of this host; this rank's number among them */
    int32_t local_size, local_rank;
    /* (world) host of each rank */
    int32_t *host_of;
    /* (world) place of each rank */
    int32_t *place_of;
    /* (world) rank at each place */
    int32_t *rank_at;
    /* zr_topology_order_by_rank was called */
    bool by_rank;
    /* (n_hosts) in the order of their lowest ranks */
    struct zr_host *hosts;
    /* the first "why" of hosts that is not ""; "": ranks of one machine are on one host */
    const char *why;
};

/* Collective and blocking over rdv, before zr_rendezvous_detach; NULL: world 1. id: of this rank; NULL: what
 * zr_identity_read says. err, with this thread's message, is what this rank met before: then, and where a
 * rank is lost or has no memory, all ranks fail, each with the first such rank's code and message ("rank 2:
 * ..."), a rank that has failed itself with its own. A rank that cannot share memory is no failure: it is a
 * host of its own. On success free *out with zr_topology_free; on failure it holds nothing. */
int zr_topology_probe(struct zr_rendezvous *rdv, const struct zr_identity *id, int err,
                      struct zr_topology *out);

/* Without asking anybody, as rank 0, for a plan: hosts of local_size ranks each, the last with what is left;
 * local_size 0: one host. ZR_ERR_ARG, ZR_ERR_NOMEM. */
int zr_topology_assume(int32_t world, int32_t local_size, struct zr_topology *out);

/* Makes the place of each rank its number. Returns whether any place changes: the ranks of some host are not
 * consecutive. */
bool zr_topology_order_by_rank(struct zr_topology *t);

/* NULL and a zeroed struct are allowed. */
void zr_topology_free(struct zr_topology *t);

/* 0 where n ranks (members) are all on one host; else ZR_ERR_NOTSUP, naming two that are not, their hosts,
 * and why. */
int zr_topology_one_host(const struct zr_topology *t, const int32_t *members, int32_t n);

/* Ranks on this rank's machine, itself included, whether or not they share memory; whether rank is one. */
int32_t zr_topology_on_machine(const struct zr_topology *t);
bool zr_topology_same_machine(const struct zr_topology *t, int32_t rank);

/* Whether there are n cores for each rank. The ranks of a host share the cores that this one may use.
 * Containers of one machine may share cores or have their own, so that the ranks of the machine must fit its
 * cores, too. */
bool zr_topology_has_cores(int32_t on_host, int32_t on_machine, int32_t n);

/* The ranks of a host, "0 to 3", or "4, 5, 7", cut where there is no more room. */
void zr_topology_list_ranks(const struct zr_topology *t, int32_t host, char *text, size_t n_text);
/* "host 0 has 4 ranks (0 to 3), host 1 has 3 (4, 5, 7)", cut where there is no more room. */
void zr_topology_list_hosts(const struct zr_topology *t, char *text, size_t n_text);

#endif
