/* mpi_lent.c: what a communicator that the program lends is asked for: who the ranks are, and where they can
 * meet. After that ours are made from it (mpi_open.c). Where they meet goes to all ranks by one all-gather
 * (comm/meet/lent.h). */
#include "comm/meet/lent.h"
#include "comm/mpi/mpi_comm.h"

#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* Behind those of the roles. */
enum { MEETING_TAG = ZR_ROLES };

/* MPI has begun, or there could be no communicator. To be dropped. */
static int open_lent(int64_t ms, struct zr_mpi_process **out)
{
    struct zr_mpi_library lib;
    int err = zr_mpi_load(ZR_MPI_AUTO, NULL, &lib);
    *out = NULL;
    if (!err && !lib.shim->is_initialized(lib.world))
        err = zr_fail(ZR_ERR_ORDER, "mpi_comm is set, but MPI has not begun: MPI_Init_thread comes first");
    return err ? err : zr_mpi_process_open(&lib, ms, NULL, NULL, out);
}

static int ask_lent(struct zr_mpi_process *p, void *lent, int64_t ms, int *rank, int *world)
{
    int err = zr_mpi_enter(p, ms);
    if (err)
        return err;
    int class = zr_mpi_shim_of(p)->rank_of(zr_mpi_world_of(p), lent, rank, world);
    zr_mpi_leave(p);
    if (class)
        return zr_mpi_say(p, class, "mpi_comm, which was lent");
    return *rank >= 0 ? 0 : zr_fail(ZR_ERR_ARG, "mpi_comm points to MPI_COMM_NULL on this rank");
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

/* --- meeting --- */

/* Left behind where MPI does not give it back. */
struct gathering {
    struct zr_mpi_batch batch;
    struct zr_lent_card mine, all[];
};

static int await_cards(struct zr_mpi_process *p, struct gathering *g, int64_t until_ns, int64_t ms)
{
    while (atomic_load(&g->batch.n_left)) {
        int err = zr_mpi_ended(p);
        if (err)
            return err;
        if (zr_now_ns() > until_ns)
            return zr_fail(ZR_ERR_TIMEOUT, "not all ranks of mpi_comm came to zero_wrap in %lld ms",
                           (long long)ms);
        if (!zr_mpi_poll(p))
            nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    }
    int class = atomic_load(&g->batch.error);
    return class ? zr_mpi_say(p, class, "MPI_Iallgather over mpi_comm, which was lent") : 0;
}

static int gather_lent(struct zr_mpi_process *p, int32_t comm, struct gathering *g, int64_t ms)
{
    int64_t until_ns = zr_now_ns() + ms * 1000000;
    int32_t slot = -1;
    int class = 0, err = 0;
    while (!err && !class && slot < 0) { /* other contexts of the process may take all the room */
        err = zr_mpi_enter(p, ms);
        if (err)
            break;
        class = zr_mpi_shim_of(p)->all_gather(zr_mpi_world_of(p), comm, &g->mine, g->all, sizeof g->mine,
                                              sizeof g->mine, &slot);
        if (!class && slot >= 0)
            zr_mpi_begun(p, slot, &g->batch);
        zr_mpi_leave(p);
        if (slot < 0 && !class && !zr_mpi_poll(p) && zr_now_ns() > until_ns)
            err = zr_fail(ZR_ERR_TIMEOUT, "mpi_comm: MPI has had no room for a request for %lld ms",
                          (long long)ms);
    }
    if (class)
        return zr_mpi_say(p, class, "MPI_Iallgather over mpi_comm, which was lent");
    return err ? err : await_cards(p, g, until_ns, ms);
}

static int32_t *all_of(int n)
{
    int32_t *member = malloc((size_t)n * sizeof *member);
    for (int i = 0; member && i < n; i++)
        member[i] = i;
    return member;
}

/* The cards of all ranks, over a communicator of ours. */
static int exchange_lent(struct zr_mpi_process *p, void *lent, int n, struct gathering *g, int64_t ms,
                         bool *stuck)
{
    const struct zr_mpi_make ask = {
        .what = "MPI_Comm_create_group over mpi_comm, which was lent: not all of its ranks came to "
                "zero_wrap: it",
        .lent = lent,
        .n = n,
        .tag = MEETING_TAG,
        .ms = ms};
    int32_t comm = -1, *member = all_of(n);
    if (!member)
        return zr_fail(ZR_ERR_NOMEM, "mpi_comm: no memory to meet over it");
    int err = zr_mpi_make(p, &ask, member, &comm, stuck);
    if (!err)
        err = gather_lent(p, comm, g, ms);
    struct zr_kept kept;
    zr_keep(&kept, err);
    if (!*stuck && !atomic_load(&g->batch.n_left))
        *stuck = !zr_mpi_unmake(p, comm);
    return zr_say_again(&kept);
}

int zr_mpi_lent_meet(struct zr_device *dev, void *lent, int64_t timeout_ms, struct zr_world *w, int *held,
                     bool *left)
{
    struct gathering *g = calloc(1, sizeof *g + (size_t)w->world * sizeof *g->all);
    struct zr_mpi_process *p = NULL;
    bool stuck = false;
    (void)dev;
    *held = -1;
    *left = false; /* the device has nothing of it */
    int err = g ? open_lent(timeout_ms, &p) : zr_fail(ZR_ERR_NOMEM, "mpi_comm: no memory to meet over it");
    if (!err) {
        zr_verdict_put(&g->mine, zr_lent_fill(w, held, &g->mine));
        err = exchange_lent(p, lent, w->world, g, timeout_ms, &stuck);
    }
    if (!err)
        err = zr_lent_choose(g->all, "mpi_comm", w);
    if (err && *held >= 0) {
        close(*held);
        *held = -1;
    }
    struct zr_kept kept;
    zr_keep(&kept, err);
    bool rests = !stuck && (!g || !atomic_load(&g->batch.n_left));
    zr_mpi_process_drop(p, NULL, rests);
    if (rests)
        free(g);
    return zr_say_again(&kept);
}
