/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_traffic.h: every call of a shim's table, with checked values, over whatever MPI it is of. */
#ifndef ZR_TEST_COMM_MPI_TRAFFIC_H
#define ZR_TEST_COMM_MPI_TRAFFIC_H

#include "comm/mpi/mpi_shim.h"

/* Communicators, messages and collectives between the ranks of lent (the program's; NULL: MPI_COMM_WORLD),
 * all of which call, on the thread that calls MPI there. MPI has begun, and is left without requests and
 * communicators. False: wrong[n] says what. */
bool mpi_traffic(const struct zr_mpi_shim *shim, struct zr_mpi_world *w, void *lent, char *wrong, size_t n);

#endif
