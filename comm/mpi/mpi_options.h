/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_options.h: how to open communicators over MPI, for ranks on the host device. */
#ifndef ZR_COMM_MPI_OPTIONS_H
#define ZR_COMM_MPI_OPTIONS_H

#include "comm/backend.h"
#include "comm/mpi/mpi_library.h"

struct zr_rendezvous;

struct zr_mpi_options {
    /* Time that an operation waits for peers while no request ends, in ms. */
    int64_t timeout_ms;
    /* Time that opening waits for a call into MPI to return, in ms. */
    int64_t start_timeout_ms;
    /* Do not use shared memory inside a host. */
    bool flat;
    /* The program's own MPI_Comm *, which has all ranks of the rendezvous, or NULL. */
    void *user_comm;
    /* See struct zr_backend_config. */
    const char *found_by;
    /* The world's topology. Outlives the communicators. NULL: all ranks share the cores of one host. */
    const struct zr_topology *topology;
    /* NULL: libzero's module. */
    const struct zr_mpi_library *library;
    /* May be NULL. */
    struct zr_log *log;
};

/* Opens a communicator for each role that any rank has. The caller closes each. Initializes MPI if the
 * program has not. Contexts of a process that open at the same time take turns. rdv, dev and the groups'
 * members must outlive the communicators.
 *
 * Collective over all ranks of rdv, each with its own groups; blocks. */
int zr_mpi_open(struct zr_rendezvous *rdv, struct zr_device *dev, const struct zr_mpi_options *opt,
                const struct zr_role_ask ask[ZR_ROLES], struct zr_comm *comm[ZR_ROLES]);

/* Bytes that a role's communicator reserves at the end of its arena, a multiple of 256. */
int64_t zr_mpi_role_bytes(enum zr_role role, const struct zr_role_ask *ask, bool deterministic);

#endif
