/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_stand_in.h: MPI between threads of one process, as the table of comm/mpi/mpi_shim.h.
 *
 * A thread says which rank of MPI_COMM_WORLD it is, and gets that one's MPI where it asks for the process's.
 * Nothing moves but in poll, as MPI may have it. A short message is copied when it is sent, and is done at
 * once; a long one when its receiver polls. A collective is done on a rank as soon as that has what it needs,
 * so a broadcast's root waits for nobody, and a caller that takes one for a barrier is found out. Requests
 * that could end do so in any order, some of them later. Sums of reduce_block go around a ring. Memory that
 * is to be filled is poisoned when its request begins.
 *
 * What may not be is misuse, and the first is kept: two calls of a rank at once; calls before
 * init or after finalize; a communicator freed or finalize called with requests pending; memory that is sent
 * and changes meanwhile; collectives of one communicator that differ between ranks in order, kind, size or
 * root, which then never end; a message of another size than its receiver's; pieces and tags that are too
 * large; what is still pending or not freed at the end. */
#ifndef ZR_TEST_MPI_STAND_IN_H
#define ZR_TEST_MPI_STAND_IN_H

#include "comm/mpi/mpi_shim.h"

enum { MPI_STAND_IN_RANKS = 18 };

/* Classes of errors that it returns. */
enum { MPI_STAND_IN_COMM = 5, MPI_STAND_IN_OTHER = 16 };

struct mpi_stand_in_machine {
    /* of MPI_COMM_WORLD; 1 */
    int n_ranks;
    /* of threads, the most that init gives; ZR_MPI_MULTIPLE */
    enum zr_mpi_level level;
    /* a message of at most as many bytes is copied when it is sent; 4096 */
    int64_t short_bytes;
    /* its MPI_Get_library_version */
    const char *library;
};

/* Writable while no MPI has begun. */
struct mpi_stand_in_machine *mpi_stand_in_the_machine(void);

const struct zr_mpi_shim *mpi_stand_in_shim(void);

/* The calling thread is that rank of MPI_COMM_WORLD from now on. */
void mpi_stand_in_be(int rank);

/* A program's own communicator, which a test lends by its address: ranks of MPI_COMM_WORLD in that order, the
 * same on each of them; n 0: MPI_COMM_NULL. */
struct mpi_stand_in_comm {
    int n;
    int32_t member[MPI_STAND_IN_RANKS];
};

/* What a program does by itself: MPI_Init_thread, MPI_Finalize, from any thread. Nothing may be inside
 * the shim's calls while it finalizes. */
void mpi_stand_in_program_init(int rank, enum zr_mpi_level level);
void mpi_stand_in_program_finalize(int rank);

/* The rank's k-th call of that name (of the table's fields) from now on (1-based) returns class, once; one at
 * a time; k 0: none. "poll": the k-th request that ends, ends with it; "progress": the k-th poll returns
 * it. */
void mpi_stand_in_fail(const char *call, int rank, int k, int class);
/* That call does not come back instead. */
void mpi_stand_in_hang(const char *call, int rank, int k);
/* Calls that hang come back, all, and from now on nothing moves any more. */
void mpi_stand_in_come_back(void);
/* From now on nothing moves to or from that rank any more. */
void mpi_stand_in_die(int rank);

struct mpi_stand_in_counts {
    /* begun, over all ranks */
    int64_t n_messages, n_collectives;
    int64_t n_init, n_finalize;
    /* of all ranks: communicators, requests that are pending, calls that hang */
    int64_t n_comms, n_pending, n_hung;
};

void mpi_stand_in_counts(struct mpi_stand_in_counts *out);

/* Lets everything go that hangs, waits for calls to come back, tells what is still alive as misuse, unless a
 * rank hung or died, tells who asked where MPI is finalized, and forgets all. Returns how many misuses there
 * were, and the first's text (valid until the next call; "": none). No thread may call the shim from then on
 * without mpi_stand_in_be. */
int mpi_stand_in_end(const char **first);

#endif
