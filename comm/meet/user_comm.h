/* SPDX-License-Identifier: Apache-2.0 */
/* user_comm.h: how ranks meet if they can exchange bytes already: by cfg.launch.exchange, over the program's
 * MPI_Comm or ncclComm_t, or over MPI_COMM_WORLD.
 *
 * Every rank fills a card, a record for the other ranks. Rank 0 takes a free port. One all-gather of the
 * cards sends rank 0's address to all ranks, with a new key for the job that keeps others out. With several
 * hosts it is unknown which of rank 0's addresses the others can reach. So rank 0 sends those that lead
 * beyond its host, or those of the requested interface, and the others try them. After that they use the
 * usual rendezvous, because it also notices a lost rank. */
#ifndef ZR_COMM_MEET_USER_COMM_H
#define ZR_COMM_MEET_USER_COMM_H

#include "comm/first_error.h"
#include "comm/meet/net_address.h"
#include "comm/meet/rendezvous.h"

struct zr_device;

/* A way to exchange bytes before ranks have met. */
struct zr_user_comm {
    /* "exchange", "mpi_comm", "nccl_comm" or "MPI_COMM_WORLD", for messages. */
    const char *name;
    /* Gathers the cards of all ranks, of `bytes` each, into all, in rank order. mine, the card of this rank,
     * is not inside all. If only rank 0 gets all cards, rank 0 calls zr_user_comm_check, and the others get
     * its card alone. Collective; blocks up to timeout_ms. */
    int (*gather)(struct zr_user_comm *c, const void *mine, void *all, size_t bytes);
    /* The program's MPI_Comm * or ncclComm_t. NULL: cfg.launch.exchange, or MPI_COMM_WORLD. */
    void *comm;
    /* cfg.launch.exchange and its argument. */
    int (*exchange)(void *arg, const void *mine, void *all, size_t bytes);
    void *exchange_arg;
    /* Contexts of a process must gather one after the other, in the same order on all ranks. */
    bool in_turn;

    /* --- set for the meeting --- */

    /* start_timeout_ms */
    int64_t timeout_ms;
    const struct zr_world *w;
    /* The device that gather uses, or that is current while it calls exchange. NULL: none. */
    struct zr_device *dev;
    struct zr_log *log;
    /* A call of gather has not returned, and may still use dev. */
    bool is_left;
};

/* zr_user_comm.gather for cfg.launch.exchange. Calls it on another thread, because it may never return. */
int zr_user_comm_call(struct zr_user_comm *c, const void *mine, void *all, size_t bytes);

/* Completes w: rank 0's address, port and key. Ranks with the same loopback meet there. w comes from
 * zr_world_of_user_comm or zr_world_find_by_mpi, with its interface, and has several ranks. On rank 0 *held
 * may be a socket that reserves the port; close it once the rendezvous listens there. Otherwise it is -1.
 * Collective. Blocks up to c->timeout_ms. */
int zr_user_comm_meet(struct zr_user_comm *c, struct zr_world *w, int *held);

/* ---- the two halves, for tests ---- */

/* A card: a rank's data for the others, which is gathered as bytes. */
struct zr_user_comm_card {
    /* Hash of the rest. */
    uint64_t sum;
    int32_t rank, world;
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
    /* Rank 0 has checked all cards: the error is the first of any rank, and has_one_loopback is set. */
    int32_t is_checked, has_one_loopback;
    ZR_FIRST_ERROR(320);
};

/* For gather, on rank 0: checks the cards of all ranks (w->world), and writes the result to the first. name
 * is that of struct zr_user_comm. */
void zr_user_comm_check(struct zr_user_comm_card *all, const char *name, const struct zr_world *w);

/* Fills this rank's card. Its own failure is in the card, too. Local. */
int zr_user_comm_fill(const struct zr_world *w, int *held, struct zr_user_comm_card *c);
/* Completes w from the cards of all ranks (w->world), or from the first if it is checked. All ranks have the
 * same cards and find the same result. name is that of struct zr_user_comm. */
int zr_user_comm_choose(const struct zr_user_comm_card *all, const char *name, struct zr_world *w);

#endif
