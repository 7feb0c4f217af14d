/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_library.h: loads the module for MPI, and checks that it fits this process.
 *
 * The module is compiled against the MPI that the build has found (mpi_shim.h), and libzero is linked with no
 * MPI. An MPI that the process has loaded already, and the launcher that started it, must be the module's:
 * ranks of two MPIs would each be alone, and nothing would say so. */
#ifndef ZR_COMM_MPI_LIBRARY_H
#define ZR_COMM_MPI_LIBRARY_H

#include "comm/mpi/mpi_shim.h"
#include "kernels/log.h"

enum { ZR_MPI_VERSION_BYTES = 96 };

struct zr_mpi_library {
    const struct zr_mpi_shim *shim;
    struct zr_mpi_world *world;
    /* the program has it, so it may begin and use MPI itself */
    bool is_programs;
    /* a launcher of that MPI started this rank, or the program has begun it: else it sees 1 rank */
    bool is_launched;
    /* "Open MPI v4.1.4", "MPICH 4.0.2" */
    char version[ZR_MPI_VERSION_BYTES];
};

/* The module's file, for tests. NULL: libzero-mpi.so beside libzero. */
extern const char *zr_mpi_module_file;

/* Loads the module, which is never closed. Does not begin MPI. Any thread. ZR_ERR_ARG: the launcher belongs
 * to another MPI. ZR_ERR_NOTSUP: there is no module, or the process has loaded another MPI. */
int zr_mpi_load(struct zr_log *log, struct zr_mpi_library *out);

/* An MPI is in this process, whoever has loaded it. */
bool zr_mpi_is_loaded(void);
/* ZR_ERR_NOTSUP: there is no MPI, and no launcher of one; loads nothing. */
int zr_mpi_check_launcher(void);
/* Fails with ZR_ERR_NOTSUP and what backend mpi needs. */
int zr_mpi_say_not_launched(void);

#endif
