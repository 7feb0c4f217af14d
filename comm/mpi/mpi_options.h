/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_options.h: MPI's communicators as those see them who open them: for ranks on the host device. */
#ifndef ZR_COMM_MPI_OPTIONS_H
#define ZR_COMM_MPI_OPTIONS_H

#include "comm/backend.h"
#include "comm/mpi/mpi_library.h"

struct zr_rendezvous;

struct zr_mpi_options {
    /* how long an operation waits for peers without anything having moved */
    int64_t timeout_ms;
    /* how long opening waits for MPI's own calls to come back */
    int64_t start_timeout_ms;
    /* inside a host, too, everything goes over MPI */
    bool flat;
    /* NULL, or the program's own MPI_Comm *, of which all ranks of the rendezvous are members */
    void *lent;
    /* as in struct zr_backend_config */
    const char *found_by;
    /* Of the world; it outlives the communicators. NULL: all ranks share a host, as far as their cores are
     * concerned. */
    const struct zr_topology *topology;
    /* NULL: the module */
    const struct zr_mpi_library *library;
    /* may be NULL */
    struct zr_log *log;
};

/* Collective over all ranks of rdv, each with the groups that it belongs to, and blocking; rdv, dev and the
 * groups' members must outlive the communicators. Opens one for each role that anybody has: close each. MPI
 * begins, if the program has not begun it. Contexts of one process are opened and closed one after the other,
 * in one order on all ranks. */
int zr_mpi_open(struct zr_rendezvous *rdv, struct zr_device *dev, const struct zr_mpi_options *opt,
                const struct zr_role_ask ask[ZR_ROLES], struct zr_comm *comm[ZR_ROLES]);

/* Bytes that a role's communicator uses for itself at the end of its arena; a multiple of 256. */
int64_t zr_mpi_role_bytes(enum zr_role role, const struct zr_role_ask *ask, bool deterministic);

#endif
