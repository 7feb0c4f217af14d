/* SPDX-License-Identifier: Apache-2.0 */
/* lent.h: how ranks meet if their program lends a communicator.
 *
 * The ranks of a communicator have found each other already. Rank 0 takes a free port. One all-gather over
 * the communicator sends its address to all ranks, with a new key for the job that keeps others out. With
 * several hosts it is unknown which of rank 0's addresses the others can reach. So rank 0 sends those that
 * lead beyond its host, or those of the requested interface, and the others try them. After that they use the
 * usual rendezvous, because it also notices a lost rank. */
#ifndef ZR_COMM_MEET_LENT_H
#define ZR_COMM_MEET_LENT_H

#include "comm/first_error.h"
#include "comm/meet/net_address.h"
#include "comm/meet/rendezvous.h"

/* A rank's data for the others, which is gathered as bytes. */
struct zr_lent_card {
    /* Equal for ranks with the same loopback: one machine, and one network namespace. */
    uint64_t loopback;
    /* Rank 0's port (0: it does not listen), and whether the user gave the address. */
    int32_t port, is_given;
    /* The user gave a file by which ranks meet. */
    int32_t by_file;
    /* Rank 0's host from MASTER_ADDR or the user. If it is "", `at` lists the addresses by which other hosts
     * may reach rank 0: those of its interface, or all. "" if it has none. */
    char address[256], at[ZR_ADDRESS_LIST_CHARS];
    char name[sizeof((struct zr_world *)0)->name];
    /* Rank 0's key. */
    struct zr_job_key key;
    ZR_FIRST_ERROR(256);
};

/* Fills this rank's card. w comes from zr_world_lent, with its interface. *held is -1 before. Rank 0 gets a
 * socket that reserves its port; close it once the rendezvous listens there. Put the result into the card
 * (zr_first_error_put). Local. */
int zr_lent_fill(const struct zr_world *w, int *held, struct zr_lent_card *c);

/* Completes w from the cards of all ranks (w->world): rank 0's address, port and key. Ranks with the same
 * loopback meet there. All ranks have the same cards and find the same result. name is the communicator's,
 * "nccl_comm". */
int zr_lent_choose(const struct zr_lent_card *all, const char *name, struct zr_world *w);
/* The two halves of zr_lent_choose. The first is for a rank that has all cards, the second for each rank,
 * which has rank 0's. *same_loopback: all ranks have the same loopback. */
int zr_lent_check(const struct zr_lent_card *all, const char *name, const struct zr_world *w,
                  bool *same_loopback);
int zr_lent_take(const struct zr_lent_card *zero, bool same_loopback, const char *name, struct zr_world *w);

#endif
