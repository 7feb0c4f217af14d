/* SPDX-License-Identifier: Apache-2.0 */
/* lent.h: where ranks meet whose program lends a communicator.
 *
 * The ranks of a communicator have found each other already. Rank 0 takes a free port, and tells all ranks
 * by one all-gather over the communicator where that is, with a new key for the job that keeps others out.
 * On several hosts nobody can say by which of rank 0's addresses the others reach it. So it gives those
 * that lead beyond its host, or those of the interface that was asked for, and the others try them. From
 * then on the rendezvous is the usual one, because it also notices a lost rank. */
#ifndef ZR_COMM_MEET_LENT_H
#define ZR_COMM_MEET_LENT_H

#include "comm/meet/net_address.h"
#include "comm/meet/rendezvous.h"
#include "comm/verdict.h"

/* A rank says this of itself over the communicator. Cards are gathered as bytes. */
struct zr_lent_card {
    /* equal for ranks with the same loopback: one machine, and one network that its processes see */
    uint64_t loopback;
    /* rank 0's port, 0: it listens nowhere; whether the user gave the address */
    int32_t port, is_given;
    /* the user names a file by which ranks meet */
    int32_t by_file;
    /* Rank 0's host, as MASTER_ADDR or the user says; "": nobody does. Then `at` lists the addresses by which
     * other hosts may reach it: those of its interface, or all; "": it has none. */
    char address[256], at[ZR_ADDRESS_LIST_CHARS];
    char name[sizeof((struct zr_world *)0)->name];
    /* rank 0's */
    struct zr_job_key key;
    ZR_VERDICT(256);
};

/* Fills this rank's card. w comes from zr_world_lent, with its interface. *held is -1 before; rank 0 gets a
 * socket that keeps its port until the rendezvous listens there, and is closed then. The result is to be put
 * into the card (zr_verdict_put). Local. */
int zr_lent_fill(const struct zr_world *w, int *held, struct zr_lent_card *c);

/* Completes w from the cards of all ranks (w->world): where rank 0 is, port and key. Ranks with the same
 * loopback meet there. All ranks have the same cards and come to the same result. name: the communicator's,
 * "nccl_comm". */
int zr_lent_choose(const struct zr_lent_card *all, const char *name, struct zr_world *w);
/* Its two halves: the first for one rank that has all cards, the second for each rank, which has rank 0's.
 * *same_loopback: all ranks have the same loopback. */
int zr_lent_check(const struct zr_lent_card *all, const char *name, const struct zr_world *w,
                  bool *same_loopback);
int zr_lent_take(const struct zr_lent_card *zero, bool same_loopback, const char *name, struct zr_world *w);

#endif
