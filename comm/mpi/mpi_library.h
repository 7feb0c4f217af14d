/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_library.h: which MPI this process has or is to have, and libzero's library for it (mpi_shim.h).
 *
 * What the process has loaded decides; else the launcher that started it; else the configuration, which
 * contradicts neither. libzero is linked with no MPI, so where the process has none yet, it is loaded with
 * ours: what started the ranks must be the same MPI's, or each would be alone, and nothing would say so. */
#ifndef ZR_COMM_MPI_LIBRARY_H
#define ZR_COMM_MPI_LIBRARY_H

#include "comm/mpi/mpi_shim.h"
#include "kernels/log.h"

/* cfg.launch.mpi's. */
enum zr_mpi_kind { ZR_MPI_AUTO, ZR_MPI_OMPI, ZR_MPI_MPICH };

enum { ZR_MPI_VERSION_BYTES = 96 };

struct zr_mpi_library {
    const struct zr_mpi_shim *shim;
    struct zr_mpi_world *world;
    enum zr_mpi_kind kind;
    /* the program has it, so it may begin and use MPI itself */
    bool is_programs;
    /* a launcher of that MPI started this rank, or the program has begun it: else it sees 1 rank */
    bool is_launched;
    /* "Open MPI v4.1.4", "MPICH 4.0.2" */
    char version[ZR_MPI_VERSION_BYTES];
};

/* wanted: cfg.launch.mpi. The library is never closed. ZR_ERR_ARG: what the caller said contradicts what is
 * there; ZR_ERR_NOTSUP: there is none, or none that can be used. MPI has not begun by this. Any thread. */
int zr_mpi_load(enum zr_mpi_kind wanted, struct zr_log *log, struct zr_mpi_library *out);

/* An MPI is in this process, whoever has loaded it. */
bool zr_mpi_is_loaded(void);
/* ZR_ERR_NOTSUP: there is no MPI, and no launcher of one; loads nothing. */
int zr_mpi_check_launcher(void);
/* Fails with ZR_ERR_NOTSUP and what backend mpi needs. */
int zr_mpi_say_not_launched(void);

#endif
