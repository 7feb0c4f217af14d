/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_stand_in_inside.h: declarations that the files of the MPI stand-in share. One lock protects
 * everything. */
#ifndef ZR_TEST_MPI_STAND_IN_INSIDE_H
#define ZR_TEST_MPI_STAND_IN_INSIDE_H

#include "test/stand_in/mpi_stand_in.h"

#include <pthread.h>

enum { MSI_RANKS = MPI_STAND_IN_RANKS };

enum msi_kind {
    MSI_SEND = 1,
    MSI_RECEIVE,
    MSI_ALL_GATHER,
    MSI_BROADCAST,
    MSI_ALL_MAX,
    MSI_ALL_SUM,
    MSI_REDUCE_BLOCK
};

/* One rank's part of a message or a collective. */
struct msi_request {
    bool pending;
    enum msi_kind kind;
    int32_t comm;
    const char *from;
    char *to;
    int64_t bytes, stride;
    /* peer: place in the communicator, or the root */
    int peer, tag;
    /* hash of from[given_bytes] when it began */
    uint64_t hash;
    int64_t given_bytes;
    /* for a message: the other end was found; for a send: its bytes were taken */
    struct msi_message *message;
    struct msi_meeting *meeting;
};

/* A message that is sent, received, or both. */
struct msi_message {
    int from, to, tag;
    int64_t bytes, room;
    bool is_sent, is_received, is_taken, different;
    /* the copy of a short message, or the sender's memory */
    char *copy;
    const char *at;
    /* number of ends that still point here */
    int n_ends;
    struct msi_message *next;
};

/* Data that the ranks of one collective share. */
struct msi_meeting {
    uint64_t number;
    enum msi_kind kind;
    int64_t bytes;
    int root, n_here, n_left;
    bool different;
    char *given[MSI_RANKS];
    bool here[MSI_RANKS];
    struct msi_meeting *next;
};

/* Ranks that share a communicator. */
struct msi_team {
    int n, n_left;
    /* the program's own communicator or MPI_COMM_WORLD, which stays until the end */
    bool is_programs;
    /* by place: the rank in MPI_COMM_WORLD */
    int32_t member[MSI_RANKS];
    /* oldest first */
    struct msi_message *messages;
    struct msi_meeting *meetings;
    struct msi_team *next;
};

struct msi_comm {
    struct msi_team *team;
    int place;
    /* how often it was borrowed; 0: it was made */
    int n_borrowed;
    uint64_t n_collectives;
};

/* Ranks that are making a communicator. */
struct msi_making {
    /* NULL: from the program's communicator or MPI_COMM_WORLD */
    const struct msi_team *parent;
    int n, tag, n_here, n_gone;
    int32_t member[MSI_RANKS];
    bool here[MSI_RANKS];
    struct msi_team *made;
    struct msi_making *next;
};

/* MPI of one rank. */
struct zr_mpi_world {
    int rank;
    bool initialized, finalized, died, hung;
    enum zr_mpi_level level;
    /* calls of the table in progress */
    int n_inside;
    void (*fn)(void *arg);
    void *fn_arg;
    struct msi_comm comm[ZR_MPI_COMMS];
    struct msi_request request[ZR_MPI_SLOTS];
    int high, n_pending;
    uint64_t random;
};

struct msi_state {
    pthread_mutex_t lock;
    pthread_cond_t moved;
    struct mpi_stand_in_machine machine;
    struct zr_mpi_world world[MSI_RANKS];
    struct msi_team *teams;
    struct msi_making *makings;
    /* calls in progress on all ranks */
    int n_inside;
    bool ending;
    char fail_call[32];
    int fail_rank, fail_k, fail_class;
    bool fail_hangs;
    int n_misuses;
    char misuse[512];
    struct mpi_stand_in_counts counts;
};

extern struct msi_state msi;

/* Call with the lock held. */
void msi_misuse(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* Begins a call. Returns 0 with the lock held, or the error that the call must return. */
int msi_enter(struct zr_mpi_world *w, const char *call, bool before_init);
int msi_leave(struct zr_mpi_world *w, int res);
/* Returns the class with which the request that is about to end ends. Call with the lock held. */
int msi_ends_with(struct zr_mpi_world *w);
/* Returns 0, or the class with which this poll fails. Call with the lock held. */
int msi_breaks_with(struct zr_mpi_world *w);
/* Forgets what is in progress in it. Call with the lock held. */
void msi_forget(struct msi_team *team);

int msi_send(struct zr_mpi_world *w, int32_t comm, const void *at, int64_t bytes, int to, int tag,
             int32_t *slot);
int msi_receive(struct zr_mpi_world *w, int32_t comm, void *at, int64_t bytes, int from, int tag,
                int32_t *slot);
int msi_probe(struct zr_mpi_world *w, int32_t comm, int tag, int *from, int64_t *bytes);
int msi_all_gather(struct zr_mpi_world *w, int32_t comm, const void *own, void *to, int64_t bytes,
                   int64_t stride, int32_t *slot);
int msi_broadcast(struct zr_mpi_world *w, int32_t comm, void *at, int64_t bytes, int root, int32_t *slot);
int msi_all_max(struct zr_mpi_world *w, int32_t comm, int64_t *at, int n, int32_t *slot);
int msi_all_sum(struct zr_mpi_world *w, int32_t comm, uint64_t *at, int n, int32_t *slot);
int msi_reduce_block(struct zr_mpi_world *w, int32_t comm, const float *in, float *out, int64_t n,
                     int32_t *slot);
int msi_own(struct zr_mpi_world *w, int32_t comm, enum zr_mpi_own_call which, const float *in, float *out,
            int64_t n);
int msi_poll(struct zr_mpi_world *w, struct zr_mpi_done done[ZR_MPI_SLOTS]);

#endif
