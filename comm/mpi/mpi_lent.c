/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_lent.c: reads the ranks of a communicator that the program lends, or of MPI_COMM_WORLD, and lets them
 * agree on where they meet. libzero's communicators are made from it later (mpi_open.c). */
#include "comm/meet/rendezvous.h"
#include "comm/mpi/mpi_comm.h"

/* Opens MPI, which must have begun: otherwise there could be no communicator. The caller drops it. */
static int open_lent(int64_t ms, struct zr_mpi_process **out)
{
    struct zr_mpi_library lib;
    int err = zr_mpi_load(NULL, &lib);
    *out = NULL;
    if (!err && !lib.shim->is_initialized(lib.world))
        err = zr_fail(ZERO_ERR_ORDER, "mpi_comm is set, but MPI has not begun: MPI_Init_thread comes first");
    return err ? err : zr_mpi_process_open(&lib, ms, NULL, NULL, out);
}

static int ask_lent(struct zr_mpi_process *p, void *lent, int64_t ms, int *rank, int *world)
{
    int err = zr_mpi_rank_of(p, lent, ms, rank, world);
    if (err)
        return err;
    return *rank >= 0 ? 0 : zr_fail(ZERO_ERR_ARG, "mpi_comm points to MPI_COMM_NULL on this rank");
}

int zr_mpi_lent_world(void *lent, int64_t timeout_ms, int *rank, int *world)
{
    struct zr_mpi_process *p;
    int err = open_lent(timeout_ms, &p);
    if (err)
        return err;
    err = ask_lent(p, lent, timeout_ms, rank, world);
    zr_mpi_process_drop(p, NULL, true);
    return err;
}

int zr_mpi_job_world(int64_t timeout_ms, int *rank, int *world)
{
    struct zr_mpi_process *p;
    int err = open_lent(timeout_ms, &p);
    if (err)
        return err;
    err = zr_mpi_rank_of(p, NULL, timeout_ms, rank, world);
    zr_mpi_process_drop(p, NULL, true);
    return err;
}

int zr_mpi_lent_meet(struct zr_device *dev, void *lent, int64_t timeout_ms, struct zr_world *w, int *held,
                     bool *left)
{
    struct zr_mpi_process *p;
    (void)dev;
    *held = -1;
    *left = false; /* the device is not used */
    int err = open_lent(timeout_ms, &p);
    return err ? err : zr_mpi_find_meeting_point(p, lent, "mpi_comm", timeout_ms, NULL, w, held);
}

/* --- MPI_COMM_WORLD --- */

/* Checks that this rank's number is the one in the launcher's variables. */
static int check_number(struct zr_mpi_process *p, int64_t ms, const struct zr_world *w)
{
    int rank, size, err = zr_mpi_rank_of(p, NULL, ms, &rank, &size);
    return err ? err : zr_mpi_check_rank(w->rank, w->world, w->size_from, rank, size);
}

/* Nothing is logged about the MPI here, as that happens when communicators are opened. */
int zr_mpi_world_meet(const struct zr_backend_config *config, struct zr_world *w, int *held)
{
    int64_t ms = config->start_timeout_ms ? config->start_timeout_ms : config->timeout_ms;
    struct zr_mpi_library lib;
    struct zr_mpi_process *p;
    *held = -1;
    int err = zr_mpi_check_launcher();
    err = err ? err : zr_mpi_load(NULL, &lib);
    err = err ? err : zr_mpi_check_launched(&lib);
    err = err ? err : zr_mpi_process_open(&lib, ms, NULL, config->log, &p);
    if (err)
        return err;
    err = check_number(p, ms, w);
    if (!err)
        return zr_mpi_find_meeting_point(p, NULL, "MPI_COMM_WORLD", ms, config->log, w, held);
    zr_mpi_process_drop(p, config->log, true);
    return err;
}
