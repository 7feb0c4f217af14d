/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_own.h: MPI's own collectives on the ranks and the stream of a communicator. zero-bench comm compares
 * the mpi backend with them. Nothing else may call them: those that block have no deadline, and do not notice
 * a lost rank. */
#ifndef ZR_COMM_MPI_OWN_H
#define ZR_COMM_MPI_OWN_H

#include "comm/comm.h"

enum zr_mpi_own {
    ZR_MPI_OWN_ALLGATHER,
    ZR_MPI_OWN_REDUCE_SCATTER,
    ZR_MPI_OWN_REDUCE_SCATTER_BLOCK,
    /* Non-blocking. It is polled until it is done, like the backend's requests. */
    ZR_MPI_OWN_IREDUCE_SCATTER_BLOCK,
    ZR_MPI_OWNS
};

/* Returns "MPI_Allgather" and so on. */
const char *zr_mpi_own_name(enum zr_mpi_own call);

/* Puts a collective of floats on the stream. A sum (MPI_SUM) reads (size, n) from `in`, and place p gets the
 * sum of row p in out. A gather fills out (size, n) with n floats of every rank; this rank's are there
 * already. size is more than 1, and size * n at most INT_MAX. Returns 0 or a zero_err; zr_comm_status reports
 * later failures. */
int zr_mpi_own_put(struct zr_comm *c, struct zr_stream *s, enum zr_mpi_own call, const float *in, float *out,
                   int64_t n);

/* Whether this process is inside a blocking collective. Any thread. */
bool zr_mpi_own_blocks(void);

#endif
