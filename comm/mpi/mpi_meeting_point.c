/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_meeting_point.c: where ranks meet, as they tell each other over MPI: over a communicator that the
 * program lends (mpi_lent.c), or over MPI_COMM_WORLD, where the launcher of an MPI has started them and
 * nothing else says it. One all-gather has all of it (comm/meet/lent.h). */
#include "comm/meet/lent.h"
#include "comm/mpi/mpi_comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* Behind those of the roles. */
enum { MEETING_TAG = ZR_ROLES };

/* Left behind where MPI does not give it back. */
struct gathering {
    struct zr_mpi_batch batch;
    struct zr_lent_card mine, all[];
};

/* Over what. */
struct over {
    struct zr_mpi_process *process;
    /* NULL: MPI_COMM_WORLD */
    void *lent;
    const char *name;
    int64_t ms;
    /* with which the process was opened */
    struct zr_log *log;
};

static int say_gather(const struct over *o, int class)
{
    char call[64];
    snprintf(call, sizeof call, "MPI_Iallgather over %s", o->name);
    return zr_mpi_say(o->process, class, call);
}

static int await_points(const struct over *o, struct gathering *g, int64_t until_ns)
{
    while (atomic_load(&g->batch.n_left)) {
        int err = zr_mpi_ended(o->process);
        if (err)
            return err;
        if (zr_now_ns() > until_ns)
            return zr_fail(ZR_ERR_TIMEOUT,
                           "not all ranks of %s came to zero_wrap in %lld ms (start_timeout_ms)", o->name,
                           (long long)o->ms);
        if (!zr_mpi_poll(o->process))
            nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    }
    int class = atomic_load(&g->batch.error);
    return class ? say_gather(o, class) : 0;
}

static int gather_points(const struct over *o, int32_t comm, struct gathering *g)
{
    struct zr_mpi_process *p = o->process;
    int64_t until_ns = zr_now_ns() + o->ms * 1000000;
    int32_t slot = -1;
    int class = 0, err = 0;
    while (!err && !class && slot < 0) { /* other contexts of the process may take all the room */
        err = zr_mpi_enter(p, o->ms);
        if (err)
            break;
        class = zr_mpi_shim_of(p)->all_gather(zr_mpi_world_of(p), comm, &g->mine, g->all, sizeof g->mine,
                                              sizeof g->mine, &slot);
        if (!class && slot >= 0)
            zr_mpi_begun(p, slot, &g->batch);
        zr_mpi_leave(p);
        if (slot < 0 && !class && !zr_mpi_poll(p) && zr_now_ns() > until_ns)
            err = zr_fail(ZR_ERR_TIMEOUT,
                          "%s: MPI has had no room for a request for %lld ms (start_timeout_ms)", o->name,
                          (long long)o->ms);
    }
    if (class)
        return say_gather(o, class);
    return err ? err : await_points(o, g, until_ns);
}

static int32_t *all_of(int n)
{
    int32_t *member = malloc((size_t)n * sizeof *member);
    for (int i = 0; member && i < n; i++)
        member[i] = i;
    return member;
}

/* The cards of all ranks, over a communicator of ours. */
static int exchange_points(const struct over *o, int n, struct gathering *g, bool *stuck)
{
    char what[128];
    snprintf(what, sizeof what, "MPI_Comm_create_group over %s: not all of its ranks came to zero_wrap: it",
             o->name);
    const struct zr_mpi_make ask = {.what = what, .lent = o->lent, .n = n, .tag = MEETING_TAG, .ms = o->ms};
    int32_t comm = -1, *member = all_of(n);
    if (!member)
        return zr_fail(ZR_ERR_NOMEM, "%s: no memory to meet over it", o->name);
    int err = zr_mpi_make(o->process, &ask, member, &comm, stuck);
    if (!err)
        err = gather_points(o, comm, g);
    struct zr_kept kept;
    zr_keep(&kept, err);
    if (!*stuck && !atomic_load(&g->batch.n_left))
        *stuck = !zr_mpi_unmake(o->process, comm);
    return zr_say_again(&kept);
}

/* Drops the process. */
static int find_point(const struct over *o, struct zr_world *w, int *held)
{
    struct gathering *g = calloc(1, sizeof *g + (size_t)w->world * sizeof *g->all);
    bool stuck = false;
    int err = g ? 0 : zr_fail(ZR_ERR_NOMEM, "%s: no memory to meet over it", o->name);
    if (!err) {
        zr_verdict_put(&g->mine, zr_lent_fill(w, held, &g->mine));
        err = exchange_points(o, w->world, g, &stuck);
    }
    if (!err)
        err = zr_lent_choose(g->all, o->name, w);
    if (err && *held >= 0) {
        close(*held);
        *held = -1;
    }
    struct zr_kept kept;
    zr_keep(&kept, err);
    bool rests = !stuck && (!g || !atomic_load(&g->batch.n_left));
    if (err || !rests)
        zr_mpi_process_drop(o->process, o->log, rests);
    else
        zr_mpi_process_leave_looking(o->process, o->log);
    if (rests)
        free(g);
    return zr_say_again(&kept);
}

int zr_mpi_find_meeting_point(struct zr_mpi_process *p, void *lent, const char *name, int64_t timeout_ms,
                              struct zr_world *w, int *held)
{
    const struct over o = {.process = p, .lent = lent, .name = name, .ms = timeout_ms};
    return find_point(&o, w, held);
}

/* --- MPI_COMM_WORLD --- */

/* It knows this rank by the number that the launcher's variables say. */
static int check_number(struct zr_mpi_process *p, int64_t ms, const struct zr_world *w)
{
    int rank, size, err = zr_mpi_rank_of(p, NULL, ms, &rank, &size);
    return err ? err : zr_mpi_check_rank(w->rank, w->world, w->size_from, rank, size);
}

/* The log is told which MPI it is when communicators are opened. */
int zr_mpi_world_meet(const struct zr_backend_config *config, struct zr_world *w, int *held)
{
    int64_t ms = config->start_timeout_ms ? config->start_timeout_ms : config->timeout_ms;
    struct zr_mpi_library lib;
    struct zr_mpi_process *p;
    *held = -1;
    int err = zr_mpi_check_launcher();
    err = err ? err : zr_mpi_load((enum zr_mpi_kind)config->mpi, NULL, &lib);
    err = err ? err : zr_mpi_check_launched(&lib);
    err = err ? err : zr_mpi_process_open(&lib, ms, NULL, config->log, &p);
    if (err)
        return err;
    err = check_number(p, ms, w);
    const struct over o = {.process = p, .name = "MPI_COMM_WORLD", .ms = ms, .log = config->log};
    if (!err)
        return find_point(&o, w, held);
    zr_mpi_process_drop(p, config->log, true);
    return err;
}
