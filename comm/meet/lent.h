/* SPDX-License-Identifier: Apache-2.0 */
/* lent.h: where ranks meet whose program lends a communicator.
 *
 * The ranks of a communicator have found each other already, so nothing else has to tell them how to: rank 0
 * takes a free port, and where that is goes to all by one all-gather over it, with a new key for the job that
 * keeps others out. On several hosts nobody can say by which of rank 0's addresses the others reach it: it
 * gives those that lead beyond its host, or those of the interface that was asked for, and they try them.
 * From then on the rendezvous is as always, for it is also how a lost rank is noticed. */
#ifndef ZR_COMM_MEET_LENT_H
#define ZR_COMM_MEET_LENT_H

#include "comm/meet/net_address.h"
#include "comm/meet/rendezvous.h"
#include "comm/verdict.h"

/* What a rank says of itself over the communicator; to be gathered as bytes. */
struct zr_lent_card {
    /* the same where loopback is the same: one machine, and one network that its processes see */
    uint64_t loopback;
    /* of rank 0: where it listens, 0: nowhere; and whether the address is the user's */
    int32_t port, is_given;
    /* ranks meet by a file that the user names */
    int32_t by_file;
    /* of rank 0, as MASTER_ADDR or the user says; "": nobody does. And a list of its own by which other hosts
     * may reach it where nobody does: of its interface, or all; "": it has none */
    char address[256], at[ZR_ADDRESS_LIST_CHARS];
    char name[sizeof((struct zr_world *)0)->name];
    /* of rank 0 */
    struct zr_job_key key;
    ZR_VERDICT(256);
};

/* w: from zr_world_lent, with its interface. *held: -1 before; of rank 0, a socket that keeps its port until
 * the rendezvous listens there, to be closed then. Local. The result is to be put into the card
 * (zr_verdict_put). */
int zr_lent_fill(const struct zr_world *w, int *held, struct zr_lent_card *c);

/* all: (w->world) cards, by rank. Completes w: where rank 0 is, port and key. Ranks that have one loopback
 * meet there. All ranks have the same cards and come to the same end. name: of the communicator,
 * "nccl_comm". */
int zr_lent_choose(const struct zr_lent_card *all, const char *name, struct zr_world *w);
/* The two halves of it, for one rank that has all cards, and for each, which has rank 0's. *same_loopback:
 * all ranks have one. */
int zr_lent_check(const struct zr_lent_card *all, const char *name, const struct zr_world *w,
                  bool *same_loopback);
int zr_lent_take(const struct zr_lent_card *zero, bool same_loopback, const char *name, struct zr_world *w);

#endif
