/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_stand_in.h: MPI between threads of one process, with the table of comm/mpi/mpi_shim.h.
 *
 * A thread says which rank of MPI_COMM_WORLD it is, and then gets that rank's MPI as the process's. The
 * stand-in uses every freedom that MPI has:
 * - Data move only in poll. A short message is copied and done when it is sent, a long one is done when
 *   its receiver polls.
 * - A collective is done on a rank as soon as that rank has what it needs. A broadcast's root waits for no
 *   other rank, so a caller that takes one for a barrier fails.
 * - Requests that could end do so in any order, and some of them later. Sums of reduce_block go around a
 *   ring. Memory to be filled is poisoned when its request begins.
 *
 * These are misuse, and the first is kept:
 * - two calls of a rank at once; calls before init or after finalize
 * - a communicator freed, or finalize called, while requests are pending
 * - memory that changes while it is sent
 * - collectives of one communicator that differ between ranks in order, kind, size or root; they never end
 * - a message of another size than its receiver's; pieces and tags that are too large
 * - requests still pending and communicators not freed at the end */
#ifndef ZR_TEST_MPI_STAND_IN_H
#define ZR_TEST_MPI_STAND_IN_H

#include "comm/mpi/mpi_shim.h"

enum { MPI_STAND_IN_RANKS = 18 };

/* Classes of the errors that it returns. */
enum { MPI_STAND_IN_COMM = 5, MPI_STAND_IN_OTHER = 16 };

struct mpi_stand_in_machine {
    /* ranks of MPI_COMM_WORLD; default 1 */
    int n_ranks;
    /* the highest thread level that init gives; default ZR_MPI_MULTIPLE */
    enum zr_mpi_level level;
    /* messages of at most this many bytes are copied when sent; default 4096 */
    int64_t short_bytes;
    /* the text of MPI_Get_library_version */
    const char *library;
};

/* May be changed while no MPI has begun. */
struct mpi_stand_in_machine *mpi_stand_in_the_machine(void);

const struct zr_mpi_shim *mpi_stand_in_shim(void);

/* Makes the calling thread that rank of MPI_COMM_WORLD. */
void mpi_stand_in_be(int rank);

/* A program's own communicator, which a test lends by its address. Its members are ranks of MPI_COMM_WORLD
 * in this order, the same on each rank. With n 0 it is MPI_COMM_NULL. */
struct mpi_stand_in_comm {
    int n;
    int32_t member[MPI_STAND_IN_RANKS];
};

/* Act as a program that calls MPI_Init_thread and MPI_Finalize itself, from any thread. No thread may be
 * inside the shim's calls during finalize. */
void mpi_stand_in_program_init(int rank, enum zr_mpi_level level);
void mpi_stand_in_program_finalize(int rank);

/* From now on the rank's k-th call (1-based) of that name, a field of the table, returns class once. One
 * such call is set at a time; k 0: none. For "poll", the k-th request that ends gets this error. For
 * "progress", the k-th poll returns it. */
void mpi_stand_in_fail(const char *call, int rank, int k, int class);
/* The same, but the call does not return. */
void mpi_stand_in_hang(const char *call, int rank, int k);
/* Lets all hanging calls return. From now on no data move any more. */
void mpi_stand_in_come_back(void);
/* From now on no data move to or from that rank. */
void mpi_stand_in_die(int rank);

struct mpi_stand_in_counts {
    /* begun, over all ranks */
    int64_t n_messages, n_collectives;
    /* bytes of the longest message */
    int64_t most_bytes;
    int64_t n_init, n_finalize;
    /* over all ranks: communicators, pending requests, and hanging calls */
    int64_t n_comms, n_pending, n_hung;
};

void mpi_stand_in_counts(struct mpi_stand_in_counts *out);

/* Releases everything that hangs and waits for calls to return. Reports as misuse what is still alive,
 * unless a rank hung or died. Calls the on_finalize functions of MPIs that were not finalized, and forgets
 * everything. Returns the number of misuses and the first one's text (valid until the next call; "":
 * none). Afterwards a thread has to call mpi_stand_in_be before it calls the shim. */
int mpi_stand_in_end(const char **first);

#endif
