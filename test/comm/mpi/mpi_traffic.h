/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_traffic.h: makes every call of a shim's table, for any MPI, and checks the values. */
#ifndef ZR_TEST_COMM_MPI_TRAFFIC_H
#define ZR_TEST_COMM_MPI_TRAFFIC_H

#include "comm/mpi/mpi_shim.h"

/* Makes communicators, messages and collectives between the ranks of user_comm, the program's communicator
 * (NULL: MPI_COMM_WORLD). All of its ranks must call, each on the thread that calls MPI there, after MPI
 * has begun. Leaves no request and no communicator behind. Returns false with a text in wrong[n] on
 * failure. */
bool mpi_traffic(const struct zr_mpi_shim *shim, struct zr_mpi_world *w, void *user_comm, char *wrong,
                 size_t n);

#endif
