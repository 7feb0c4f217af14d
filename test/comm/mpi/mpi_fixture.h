/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_fixture.h: fixtures with MPI's communicators: over the stand-in, each rank a thread with an MPI of its
 * own, and over the MPI that started this process. */
#ifndef ZR_TEST_COMM_MPI_FIXTURE_H
#define ZR_TEST_COMM_MPI_FIXTURE_H

#include "comm/mpi/mpi_options.h"
#include "test/comm/comm_fixture.h"

/* Room for slices of so many bytes: little enough that most are summed in several chunks. */
enum { MPI_SLICE_BYTES = 2048 };

/* Over the stand-in; over whatever MPI this process has. */
extern const struct fixture_kind fixture_mpi, fixture_real_mpi;

/* From now on the ranks of a world lie on hosts so: of each rank the number of its host, which are counted as
 * they come; NULL: nobody says how. Until it is called again. */
void mpi_fixture_hosts(int world, const int32_t *host_of);

/* The library of the calling thread's rank of the stand-in. */
struct zr_mpi_library mpi_fixture_library(void);
void mpi_fixture_ask(const struct fixture *o, struct zr_role_ask ask[ZR_ROLES]);
/* Opens a gather and a reduce communicator of the fixture's group. */
int mpi_fixture_open(struct fixture *o, const struct zr_mpi_options *opt,
                     const struct zr_role_ask ask[ZR_ROLES]);

/* run_ranks as threads over the stand-in, in which nothing may be misused afterwards. */
struct rank *mpi_run_ranks(int n, void (*fn)(struct rank *r), void *arg);
/* The same where a rank is lost, so that things are left. */
struct rank *mpi_run_disturbed(int n, void (*fn)(struct rank *r), void *arg);

#endif
