/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_fixture.h: fixtures with MPI communicators. They run over the stand-in, where each rank is a thread
 * with its own MPI, or over the MPI that started this process. */
#ifndef ZR_TEST_COMM_MPI_FIXTURE_H
#define ZR_TEST_COMM_MPI_FIXTURE_H

#include "comm/mpi/mpi_comm.h"
#include "test/comm/comm_fixture.h"

/* Size of the buffers for slices: small enough that most reduces take several chunks. */
enum { MPI_SLICE_BYTES = 2048 };

/* Over the stand-in; over this process's real MPI. */
extern const struct fixture_kind fixture_mpi, fixture_real_mpi;

/* Sets the host number of each rank for all later runs; hosts are renumbered in order of appearance. With
 * NULL nothing is set. Holds until the next call. */
void mpi_fixture_hosts(int world, const int32_t *host_of);

/* The stand-in's library for the calling thread's rank. */
struct zr_mpi_library mpi_fixture_library(void);
void mpi_fixture_ask(const struct fixture *o, struct zr_role_ask ask[ZR_ROLES]);
/* Opens a gather and a reduce communicator of the fixture's group. */
int mpi_fixture_open(struct fixture *o, const struct zr_mpi_options *opt,
                     const struct zr_role_ask ask[ZR_ROLES]);

/* Calls run_ranks with threads over the stand-in, and checks that nothing was misused. */
struct rank *mpi_run_ranks(int n, void (*fn)(struct rank *r), void *arg);
/* Does the same where a rank is lost, so that objects may be left behind. */
struct rank *mpi_run_disturbed(int n, void (*fn)(struct rank *r), void *arg);

#endif
