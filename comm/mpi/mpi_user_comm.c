/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_user_comm.c: reads the ranks of the program's communicator, or of MPI_COMM_WORLD, and exchanges bytes
 * over it by which they meet. libzero's communicators are made from it later (mpi_open.c). */
#include "comm/meet/user_comm.h"
#include "comm/mpi/mpi_comm.h"

/* Opens MPI, which must have begun: otherwise there could be no communicator. The caller drops it. */
static int open_user_comm(int64_t ms, struct zr_log *log, struct zr_mpi_process **out)
{
    struct zr_mpi_library lib;
    int err = zr_mpi_load(NULL, &lib);
    *out = NULL;
    if (!err && !lib.shim->is_initialized(lib.world))
        err = zr_fail(ZERO_ERR_ORDER, "mpi_comm is set, but MPI has not begun: MPI_Init_thread comes first");
    return err ? err : zr_mpi_process_open(&lib, ms, NULL, log, out);
}

static int ask_user_comm(struct zr_mpi_process *p, void *user_comm, int64_t ms, int *rank, int *world)
{
    int err = zr_mpi_rank_of(p, user_comm, ms, rank, world);
    if (err)
        return err;
    return *rank >= 0 ? 0 : zr_fail(ZERO_ERR_ARG, "mpi_comm points to MPI_COMM_NULL on this rank");
}

int zr_mpi_user_comm_world(void *user_comm, int64_t timeout_ms, int *rank, int *world)
{
    struct zr_mpi_process *p;
    int err = open_user_comm(timeout_ms, NULL, &p);
    if (err)
        return err;
    err = ask_user_comm(p, user_comm, timeout_ms, rank, world);
    zr_mpi_process_drop(p, NULL, true);
    return err;
}

int zr_mpi_job_world(int64_t timeout_ms, int *rank, int *world)
{
    return zr_mpi_user_comm_world(NULL, timeout_ms, rank, world);
}

/* --- an exchange of bytes --- */

/* Opens MPI for ranks that a launcher of MPI has started, and checks that this rank's number is the one in
 * the launcher's variables. Nothing is logged about the MPI here, as that happens when communicators are
 * opened. */
static int open_world(const struct zr_user_comm *c, struct zr_mpi_process **out)
{
    struct zr_mpi_library lib;
    int rank, size, err = zr_mpi_check_launcher();
    err = err ? err : zr_mpi_load(NULL, &lib);
    err = err ? err : zr_mpi_check_launched(&lib);
    err = err ? err : zr_mpi_process_open(&lib, c->timeout_ms, NULL, c->log, out);
    if (err)
        return err;
    err = zr_mpi_rank_of(*out, NULL, c->timeout_ms, &rank, &size);
    err = err ? err : zr_mpi_check_rank(c->w->rank, c->w->world, c->w->size_from, rank, size);
    if (err)
        zr_mpi_process_drop(*out, c->log, true);
    return err;
}

int zr_mpi_exchange(struct zr_user_comm *c, const void *mine, void *all, size_t bytes)
{
    struct zr_mpi_process *p;
    int err = c->comm ? open_user_comm(c->timeout_ms, c->log, &p) : open_world(c, &p);
    return err ? err : zr_mpi_exchange_over(p, c, mine, all, bytes);
}
