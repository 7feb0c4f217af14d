/* SPDX-License-Identifier: Apache-2.0 */
/* topology.h: which ranks are on one host. It is found once per context, and all code relies on this answer.
 *
 * Two ranks are on one host if each can map the other's memory. They need the same boot of the same machine,
 * the same process namespace, and a test segment that could be opened (topology.c). Host names do not matter.
 * ZERO_HOST_ID may split one host into several, and never joins several. Shared memory works among the ranks
 * of one host; NCCL uses copy engines there; and their places are consecutive. What a machine has (memory,
 * cores) is divided among the ranks of the machine. A machine may be several hosts, such as containers.
 *
 * Ranks get places host by host: hosts in the order of their lowest ranks, the ranks of a host by number. So
 * place 0 is rank 0, and places equal ranks if the ranks of each host are consecutive. Every order over ranks
 * that decides bits follows places: the tree that sums gradients, and who owns which slice. If the bits must
 * not depend on hosts, zr_topology_order_by_rank makes places equal to ranks.
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
    /* Host name of its lowest rank, for messages. */
    char name[64];
    /* What its ranks have in common, as in struct zr_identity. */
    char machine[48];
    uint64_t pid_namespace;
    char host_id[48];
    /* Why it is separate from an earlier host of the same machine: "rank 1 cannot open the memory of rank 0:
     * Permission denied". "" for a machine's first host. Equal on all ranks. */
    char why[192];
};

struct zr_topology {
    int32_t world, rank;
    /* Number of hosts, and this rank's host. */
    int32_t n_hosts, host;
    /* Ranks of this host, and this rank's number among them. */
    int32_t local_size, local_rank;
    /* (world) Host of each rank. */
    int32_t *host_of;
    /* (world) Place of each rank. */
    int32_t *place_of;
    /* (world) Rank at each place. */
    int32_t *rank_at;
    /* zr_topology_order_by_rank was called. */
    bool by_rank;
    /* (n_hosts) In the order of their lowest ranks. */
    struct zr_host *hosts;
    /* The first "why" of hosts that is not "". "" if the ranks of each machine are on one host. */
    const char *why;
};

/* Finds out which ranks share a host, over rdv, before zr_rendezvous_detach.
 *
 * rdv is NULL in a world of 1. id describes this rank; NULL: zr_identity_read. err is an earlier failure of
 * this rank, with this thread's message, or 0. If a rank has such a failure, is lost, or has no memory, all
 * ranks fail with the code and message of the first such rank ("rank 2: ..."). A rank that cannot share
 * memory is no failure: it becomes a separate host. On success free *out with zr_topology_free; on failure it
 * holds nothing.
 *
 * Collective; blocks. */
int zr_topology_probe(struct zr_rendezvous *rdv, const struct zr_identity *id, int err,
                      struct zr_topology *out);

/* Makes a topology as rank 0 without communication, for a plan. Each host has local_size ranks, the last one
 * what is left; local_size 0: one host. Returns ZERO_ERR_ARG or ZERO_ERR_NOMEM. */
int zr_topology_assume(int32_t world, int32_t local_size, struct zr_topology *out);

/* Makes the place of each rank its number. Returns whether any place changes, which is so if the ranks of
 * some host are not consecutive. */
bool zr_topology_order_by_rank(struct zr_topology *t);

/* NULL and a zeroed struct are allowed. */
void zr_topology_free(struct zr_topology *t);

/* Returns 0 if the n members are all on one host. Otherwise ZERO_ERR_NOTSUP, naming two that are not, their
 * hosts, and why. */
int zr_topology_one_host(const struct zr_topology *t, const int32_t *members, int32_t n);

/* Number of ranks on this rank's machine, including itself, whether or not they share memory; and whether
 * rank is one of them. */
int32_t zr_topology_on_machine(const struct zr_topology *t);
bool zr_topology_same_machine(const struct zr_topology *t, int32_t rank);

/* Whether there are n cores for each rank. The ranks of a host share the cores that this one may use.
 * Containers of one machine may share cores or have separate ones, so the ranks of the machine must fit its
 * cores, too. */
bool zr_topology_has_cores(int32_t on_host, int32_t on_machine, int32_t n);

/* Writes the ranks of a host, "0 to 3", or "4, 5, 7", cut to n_text bytes. */
void zr_topology_list_ranks(const struct zr_topology *t, int32_t host, char *text, size_t n_text);
/* Writes "host 0 has 4 ranks (0 to 3), host 1 has 3 (4, 5, 7)", cut to n_text bytes. */
void zr_topology_list_hosts(const struct zr_topology *t, char *text, size_t n_text);

#endif
