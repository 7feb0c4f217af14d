/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_library.h: loads the module for MPI, and checks that it fits this process.
 *
 * The module is compiled against the MPI that the build has found (mpi_shim.h); libzero is not linked with
 * any MPI. If the process has loaded an MPI already, it must be the module's. The launcher that started the
 * process must belong to the same MPI, too. Otherwise each rank would run as a world of one, without any
 * error. */
#ifndef ZR_COMM_MPI_LIBRARY_H
#define ZR_COMM_MPI_LIBRARY_H

#include "comm/mpi/mpi_shim.h"
#include "kernels/log.h"

enum { ZR_MPI_VERSION_BYTES = 96 };

struct zr_mpi_library {
    const struct zr_mpi_shim *shim;
    struct zr_mpi_world *world;
    /* The program brought this MPI, so it may begin and use MPI itself. */
    bool is_programs;
    /* A launcher of that MPI started this rank, or the program has begun MPI. Otherwise MPI sees 1 rank. */
    bool is_launched;
    /* "Open MPI v4.1.4", "MPICH 4.0.2" */
    char version[ZR_MPI_VERSION_BYTES];
};

/* The module's file, for tests. NULL: libzero-mpi.so in libzero's folder. */
extern const char *zr_mpi_module_file;

/* Loads the module, which is never closed. Does not begin MPI. Any thread. Returns ZERO_ERR_ARG if the
 * launcher belongs to another MPI. Returns ZERO_ERR_NOTSUP if there is no module, or if the process has
 * loaded another MPI. */
int zr_mpi_load(struct zr_log *log, struct zr_mpi_library *out);

/* Whether this process has loaded an MPI, for the program or for libzero. */
bool zr_mpi_is_loaded(void);
/* Returns ZERO_ERR_NOTSUP if there is neither an MPI nor a launcher of one. Loads nothing. */
int zr_mpi_check_launcher(void);
/* Fails with ZERO_ERR_NOTSUP and a message that says what backend mpi needs. */
int zr_mpi_say_not_launched(void);

#endif
