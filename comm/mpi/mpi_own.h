/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_own.h: MPI's own collectives, on the ranks and the stream of a communicator of the mpi backend, for
 * zero-bench comm, which compares with them what that backend does. Nothing else may call them: those that
 * block know no deadline, and hear of no rank that is lost. */
#ifndef ZR_COMM_MPI_OWN_H
#define ZR_COMM_MPI_OWN_H

#include "comm/comm.h"

enum zr_mpi_own {
    ZR_MPI_OWN_ALLGATHER,
    ZR_MPI_OWN_REDUCE_SCATTER,
    ZR_MPI_OWN_REDUCE_SCATTER_BLOCK,
    /* begun, and polled for until it is done, as the backend's own requests are */
    ZR_MPI_OWN_IREDUCE_SCATTER_BLOCK,
    ZR_MPI_OWNS
};

/* "MPI_Allgather" */
const char *zr_mpi_own_name(enum zr_mpi_own which);

/* Puts it on the stream: of floats, MPI_SUM where it sums. in is (size, n), of which place p gets the sum of
 * row p to out; a gather has every rank's n in out, (size, n), where this rank's own are already. size * n:
 * to INT_MAX; size: more than 1. 0 or a zr_err; what fails later, the communicator's status tells. */
int zr_mpi_own_put(struct zr_comm *c, struct zr_stream *s, enum zr_mpi_own which, const float *in, float *out,
                   int64_t n);

/* Whether this process is inside one that blocks. Any thread. */
bool zr_mpi_own_blocks(void);

#endif
