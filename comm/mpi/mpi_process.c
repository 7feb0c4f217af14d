/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_process.c: begins and ends MPI, lets one thread inside at a time, and polls. */
#include "comm/mpi/mpi_process.h"
#include "comm/timed_call.h"
#include "kernels/alloc.h"
#include "kernels/error.h"
#include "kernels/thread.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* BUSY_NS: the thread polls often for this long after a user has polled. STOP_NS: time limit for it to stop.
 * END_MS: time limit of MPI_Finalize at the end of the process. TURN_NS: time that a context waits for a turn
 * before its ranks ask each other. LAST_LOOKS: number of polls, OFTEN_NS apart, for bytes that MPI has
 * accepted, when the last user leaves and before MPI_Finalize. */
enum {
    OFTEN_NS = 1000 * 1000,
    TURN_NS = 100 * 1000 * 1000,
    SELDOM_NS = 20 * 1000 * 1000,
    END_MS = 10000,
    LAST_LOOKS = 100
};
static const int64_t BUSY_NS = 1000 * 1000 * 1000, STOP_NS = 1000 * 1000 * 1000;

/* STUCK: a thread was left behind in MPI_Init_thread. */
enum state { WORKING, FINALIZED, ENDING, BROKEN, STUCK };

struct zr_mpi_process {
    struct zr_mpi_process *next;
    const struct zr_mpi_shim *shim;
    struct zr_mpi_world *world;
    pid_t pid;
    /* libzero began it; something was left pending that MPI_Finalize might wait for. */
    bool is_ours, is_disturbed;
    /* Number of users. Protected by the list's lock. */
    int n_open;
    /* Log of the latest user that is still there, or NULL. */
    struct zr_log *log;

    pthread_mutex_t lock;
    pthread_cond_t moved;
    /* Time at which the context began that has the turn to make communicators. 0: none has it. */
    int64_t turn_ns;
    /* A thread is inside; the polling thread must stop; it has stopped. n_waiting: threads that want to be
     * inside. */
    bool inside, stop, has_stopped;
    int n_waiting;
    /* Time of the last poll by a waiting user. */
    int64_t used_ns;
    _Atomic int state;
    int broken_class;
    _Atomic bool half_made;

    bool has_thread;
    struct zr_thread thread;
    /* Used inside MPI: the batch of each slot's request. */
    struct zr_mpi_batch *of[ZR_MPI_SLOTS];
    struct zr_mpi_done done[ZR_MPI_SLOTS];
};

/* Never freed, as MPI belongs to the process. */
static struct zr_mpi_process *processes;
static pthread_mutex_t processes_lock = PTHREAD_MUTEX_INITIALIZER;

const struct zr_mpi_shim *zr_mpi_shim_of(const struct zr_mpi_process *p)
{
    return p->shim;
}

struct zr_mpi_world *zr_mpi_world_of(const struct zr_mpi_process *p)
{
    return p->world;
}

/* ---- one thread inside ---- */

int zr_mpi_ended(struct zr_mpi_process *p)
{
    char text[128];
    switch ((enum state)atomic_load(&p->state)) {
    case WORKING:
        break;
    case FINALIZED:
        return zr_fail(ZERO_ERR_ORDER,
                       "the program called MPI_Finalize before zero_unwrap; call it afterwards");
    case ENDING:
        return zr_fail(ZERO_ERR_ORDER, "the process ends");
    case BROKEN:
        p->shim->error(p->world, p->broken_class, text, sizeof text);
        return zr_fail(ZERO_ERR_FAILED, "%s: MPI_Testsome: %s", p->shim->name, text);
    case STUCK:
        return zr_fail(ZERO_ERR_TIMEOUT,
                       "MPI_Init_thread of an earlier zero_wrap has not returned: the process should end");
    }
    return 0;
}

/* Waits until no thread is inside, and marks this one as inside. Returns false if that takes longer than ms.
 * Called with the lock held. */
static bool go_inside(struct zr_mpi_process *p, int64_t ms)
{
    struct timespec until = zr_in_ns(ms * 1000000);
    p->n_waiting++;
    while (p->inside && pthread_cond_timedwait(&p->moved, &p->lock, &until) != ETIMEDOUT)
        ;
    p->n_waiting--;
    bool was_free = !p->inside;
    p->inside = true;
    return was_free;
}

int zr_mpi_enter(struct zr_mpi_process *p, int64_t ms)
{
    pthread_mutex_lock(&p->lock);
    bool entered = go_inside(p, ms);
    pthread_mutex_unlock(&p->lock);
    if (!entered && atomic_load(&p->half_made))
        return zr_fail(ZERO_ERR_TIMEOUT,
                       "MPI_Comm_create_group of another zero_wrap has not returned, and MPI cannot free a "
                       "half-made communicator: end the process, and start the job again");
    if (!entered)
        return zr_fail(ZERO_ERR_TIMEOUT, "a call of %s has not returned after %lld ms", p->shim->name,
                       (long long)ms);
    int err = zr_mpi_ended(p);
    if (err)
        zr_mpi_leave(p);
    return err;
}

void zr_mpi_process_half_made(struct zr_mpi_process *p)
{
    atomic_store(&p->half_made, true);
}

void zr_mpi_leave(struct zr_mpi_process *p)
{
    pthread_mutex_lock(&p->lock);
    p->inside = false;
    if (p->n_waiting)
        pthread_cond_broadcast(&p->moved);
    pthread_mutex_unlock(&p->lock);
}

bool zr_mpi_turn_take(struct zr_mpi_process *p, int64_t begun_ns)
{
    struct timespec until = zr_in_ns(TURN_NS);
    pthread_mutex_lock(&p->lock);
    while (p->turn_ns > begun_ns && pthread_cond_timedwait(&p->moved, &p->lock, &until) != ETIMEDOUT)
        ;
    bool taken = !p->turn_ns;
    if (taken)
        p->turn_ns = begun_ns;
    pthread_mutex_unlock(&p->lock);
    return taken;
}

void zr_mpi_turn_end(struct zr_mpi_process *p)
{
    pthread_mutex_lock(&p->lock);
    p->turn_ns = 0;
    pthread_cond_broadcast(&p->moved);
    pthread_mutex_unlock(&p->lock);
}

void zr_mpi_begun(struct zr_mpi_process *p, int32_t slot, struct zr_mpi_batch *b)
{
    p->of[slot] = b;
    atomic_fetch_add(&b->n_left, 1);
}

static void end_request(struct zr_mpi_process *p, const struct zr_mpi_done *d)
{
    struct zr_mpi_batch *b = p->of[d->slot];
    int32_t none = 0;
    p->of[d->slot] = NULL;
    if (!b)
        return;
    if (d->error)
        atomic_compare_exchange_strong(&b->error, &none, d->error);
    atomic_fetch_sub(&b->n_left, 1);
}

/* is_use: a user is waiting for a request. */
static bool poll_once(struct zr_mpi_process *p, bool is_use)
{
    pthread_mutex_lock(&p->lock);
    bool may = !p->inside && !p->n_waiting && atomic_load(&p->state) == WORKING;
    p->inside |= may;
    pthread_mutex_unlock(&p->lock);
    if (!may)
        return false;
    int n = p->shim->poll(p->world, p->done);
    for (int i = 0; i < n; i++)
        end_request(p, &p->done[i]);
    if (n < 0) {
        p->broken_class = -n;
        atomic_store(&p->state, BROKEN);
    }
    pthread_mutex_lock(&p->lock);
    p->used_ns = is_use ? zr_now_ns() : p->used_ns;
    p->inside = false;
    if (p->n_waiting)
        pthread_cond_broadcast(&p->moved);
    pthread_mutex_unlock(&p->lock);
    return n > 0;
}

bool zr_mpi_poll(struct zr_mpi_process *p)
{
    return poll_once(p, true);
}

/* ---- the polling thread ---- */

static void look_now_and_then(void *arg)
{
    struct zr_mpi_process *p = arg;
    pthread_mutex_lock(&p->lock);
    while (!p->stop) {
        int64_t unused_ns = zr_now_ns() - p->used_ns;
        if (unused_ns >= OFTEN_NS) {
            pthread_mutex_unlock(&p->lock);
            poll_once(p, false);
            pthread_mutex_lock(&p->lock);
        }
        struct timespec until = zr_in_ns(unused_ns < BUSY_NS ? OFTEN_NS : SELDOM_NS);
        if (!p->stop)
            pthread_cond_timedwait(&p->moved, &p->lock, &until);
    }
    p->has_stopped = true;
    pthread_cond_broadcast(&p->moved);
    pthread_mutex_unlock(&p->lock);
}

/* Stops the polling thread. If it does not return from MPI it is left there, and p is not used any more. */
static void stop_thread(struct zr_mpi_process *p)
{
    struct timespec until = zr_in_ns(STOP_NS);
    if (!p->has_thread)
        return;
    pthread_mutex_lock(&p->lock);
    p->stop = true;
    pthread_cond_broadcast(&p->moved);
    while (!p->has_stopped && pthread_cond_timedwait(&p->moved, &p->lock, &until) != ETIMEDOUT)
        ;
    bool stopped = p->has_stopped;
    if (stopped)
        p->stop = p->has_stopped = false;
    pthread_mutex_unlock(&p->lock);
    if (stopped)
        zr_thread_join(&p->thread);
    else
        zr_thread_leave(&p->thread);
    p->has_thread = !stopped;
}

/* ---- beginning and ending MPI ---- */

/* Runs when any thread calls MPI_Finalize, before that does anything. The warning comes at once if a context
 * is open: MPICH 4.0 may abort the process if another thread was inside at that moment. */
static void stop_before_finalize(void *arg)
{
    struct zr_mpi_process *p = arg;
    pthread_mutex_lock(&p->lock);
    if (p->log)
        zr_warn(p->log, "the program calls MPI_Finalize before zero_unwrap: what follows will fail");
    bool entered = go_inside(p, END_MS);
    atomic_store(&p->state, FINALIZED);
    if (entered)
        p->inside = false;
    pthread_cond_broadcast(&p->moved);
    pthread_mutex_unlock(&p->lock);
}

static int finalize(void *arg)
{
    struct zr_mpi_process *p = *(struct zr_mpi_process **)arg;
    return p->shim->finalize(p->world);
}

/* Calls MPI_Finalize with a time limit: it may wait for ranks that never call it. */
static void finalize_in_time(struct zr_mpi_process *p)
{
    const struct zr_task_call call = {.what = "MPI_Finalize", .thread = "zero-mpi", .fn = finalize};
    struct zr_task *task;
    int res;
    if (!zr_task_start(&call, &p, sizeof p, &task))
        zr_task_await(task, END_MS, &p, &res);
}

static bool is_there(const struct zr_mpi_process *p)
{
    return p->shim->is_initialized(p->world) && !p->shim->is_finalized(p->world);
}

/* Polls for a while before MPI_Finalize. MPICH 4.0 ends connections there one by one, and stops UCX's
 * progress on a rank once its connections have ended (pmodels/mpich, pull request 6596). A rank that still
 * needs an answer from it then waits for ever. This happens for example over tcp. */
static void look_before_finalize(struct zr_mpi_process *p)
{
    for (int i = 0; i < LAST_LOOKS; i++) {
        zr_mpi_poll(p);
        nanosleep(&(struct timespec){.tv_nsec = OFTEN_NS}, NULL);
    }
}

/* Whether a request has not ended. Called inside MPI. */
static bool has_requests(const struct zr_mpi_process *p)
{
    int slot = 0;
    while (slot < ZR_MPI_SLOTS && !p->of[slot])
        slot++;
    return slot < ZR_MPI_SLOTS;
}

/* Ends MPI with the process. MPI_Finalize is skipped if it might wait for another rank. If a user failed,
 * other ranks may never call it. A pending request may be a message to a rank that died. */
static void end_process(struct zr_mpi_process *p)
{
    if (p->pid != getpid() || zr_mpi_enter(p, 1000))
        return;
    bool ends_here = p->is_ours && !p->is_disturbed && !p->n_open && is_there(p);
    zr_mpi_leave(p);
    if (ends_here)
        look_before_finalize(p);
    if (zr_mpi_enter(p, 1000))
        return;
    ends_here = ends_here && !has_requests(p);
    if (ends_here)
        p->shim->on_finalize(p->world, NULL, NULL);
    atomic_store(&p->state, ENDING);
    zr_mpi_leave(p);
    stop_thread(p);
    if (ends_here)
        finalize_in_time(p);
}

static void end_all(void)
{
    /* Another thread holds it, or held it when this child was forked. */
    if (pthread_mutex_trylock(&processes_lock))
        return;
    for (struct zr_mpi_process *p = processes; p; p = p->next)
        end_process(p);
    pthread_mutex_unlock(&processes_lock);
}

static int refuse_level(const struct zr_mpi_library *lib, bool is_ours, enum zr_mpi_level level)
{
    static const char *const names[] = {"MPI_THREAD_FUNNELED or less", "MPI_THREAD_SERIALIZED",
                                        "MPI_THREAD_MULTIPLE"};
    if (is_ours)
        return zr_fail(ZERO_ERR_NOTSUP, "%s supports only %s, but MPI_THREAD_SERIALIZED is needed",
                       lib->version, names[level]);
    return zr_fail(ZERO_ERR_NOTSUP,
                   "the program began MPI (%s) with %s, but MPI_THREAD_MULTIPLE is needed, because threads "
                   "of libzero call MPI at any time: call MPI_Init_thread(.., MPI_THREAD_MULTIPLE, ..)",
                   lib->version, names[level]);
}

/* Arguments of MPI_Init_thread, for the thread that may be left behind in it. */
struct beginning {
    struct zr_mpi_process *process;
    enum zr_mpi_level want, level;
};

static int init_in_time(void *arg)
{
    struct beginning *k = arg;
    return k->process->shim->init(k->process->world, k->want, &k->level);
}

/* Calls MPI_Init_thread on another thread: it has no time limit, and waits for a rank that died before its
 * call. */
static int init_mpi(struct zr_mpi_process *p, const struct zr_mpi_library *lib, int64_t ms,
                    struct zr_rendezvous *look, enum zr_mpi_level *level, int *class)
{
    struct beginning k = {.process = p,
                          /* A program that has MPI may use it, too, once it has begun. */
                          .want = lib->is_programs ? ZR_MPI_MULTIPLE : ZR_MPI_SERIALIZED,
                          .level = ZR_MPI_FUNNELED_OR_LESS};
    const struct zr_task_call call = {
        .limit = " (start_timeout_ms)",
        .what = "MPI_Init_thread (it waits for every rank that the launcher has started)",
        .thread = "zero-mpi-init",
        .fn = init_in_time,
        .look = look};
    bool left = false;
    int err = zr_timed_call(&call, ms, &k, sizeof k, class, &left);
    if (left)
        atomic_store(&p->state, STUCK);
    *level = k.level;
    return err;
}

/* Begins MPI if it has not begun. */
static int begin_mpi(struct zr_mpi_process *p, const struct zr_mpi_library *lib, int64_t ms,
                     struct zr_rendezvous *look)
{
    const struct zr_mpi_shim *shim = p->shim;
    enum zr_mpi_level level = ZR_MPI_FUNNELED_OR_LESS;
    char text[128];
    int class = 0, err = 0;
    if (shim->is_finalized(p->world))
        return zr_fail(ZERO_ERR_ORDER, "MPI_Finalize was called before zero_wrap: MPI cannot begin again");
    p->is_ours = !shim->is_initialized(p->world);
    if (p->is_ours)
        err = init_mpi(p, lib, ms, look, &level, &class);
    else
        level = shim->thread_level(p->world);
    if (err)
        return err;
    if (!class && level < (p->is_ours ? ZR_MPI_SERIALIZED : ZR_MPI_MULTIPLE))
        return refuse_level(lib, p->is_ours, level);
    if (!class)
        class = shim->on_finalize(p->world, stop_before_finalize, p);
    if (!class)
        return 0;
    shim->error(p->world, class, text, sizeof text);
    return zr_fail(ZERO_ERR_FAILED, "beginning %s: %s", lib->version, text);
}

/* Ends MPI if it was begun here. MPI may still have the address of p. */
static int give_up(struct zr_mpi_process *p, int err)
{
    struct zr_saved_error kept;
    zr_error_save(&kept, err);
    atomic_store(&p->state, ENDING);
    if (p->is_ours && p->shim->is_initialized(p->world))
        finalize_in_time(p);
    return zr_error_restore(&kept);
}

/* Adds a process to the list. */
static void add_process(struct zr_mpi_process *p)
{
    if (!processes)
        atexit(end_all);
    p->next = processes;
    processes = p;
}

static int make_process(const struct zr_mpi_library *lib, int64_t ms, struct zr_rendezvous *look,
                        struct zr_mpi_process **out)
{
    struct zr_mpi_process *p;
    ZR_TRY(ZR_ZALLOC(p, 1, "MPI's requests"));
    p->shim = lib->shim;
    p->world = lib->world;
    p->pid = getpid();
    pthread_mutex_init(&p->lock, NULL);
    zr_cond_init(&p->moved);
    int err = begin_mpi(p, lib, ms, look);
    if (atomic_load(&p->state) != STUCK && err)
        return give_up(p, err);
    add_process(p); /* also if it is stuck, so that MPI is not begun again */
    *out = p;
    return err;
}

/* Whether p belongs to the current MPI, and not to an earlier one, as happens in tests. */
static bool is_current(const struct zr_mpi_process *p)
{
    int state = atomic_load(&p->state);
    return state == STUCK || (state == FINALIZED ? p->shim->is_finalized(p->world) : is_there(p));
}

static struct zr_mpi_process *find_process(const struct zr_mpi_world *world)
{
    struct zr_mpi_process *p = processes;
    while (p && (p->world != world || p->pid != getpid() || !is_current(p)))
        p = p->next;
    return p;
}

/* Refuses a forked child: its connections and pending requests in MPI are its parent's. */
static int check_not_forked(const struct zr_mpi_world *world)
{
    const struct zr_mpi_process *p = processes;
    while (p && (p->world != world || p->pid == getpid() || !is_there(p)))
        p = p->next;
    return p ? zr_fail(
                   ZERO_ERR_NOTSUP,
                   "MPI does not work in a forked child: it began in process %ld, from which this one was "
                   "forked: call zero_wrap there, or have mpirun or mpiexec start a process for each rank",
                   (long)p->pid)
             : 0;
}

/* Changes the log under the lock, as MPI_Finalize may read it at any time. */
static void set_log(struct zr_mpi_process *p, const struct zr_log *from, struct zr_log *to)
{
    pthread_mutex_lock(&p->lock);
    if (p->log == from)
        p->log = to;
    pthread_mutex_unlock(&p->lock);
}

int zr_mpi_process_open(const struct zr_mpi_library *lib, int64_t ms, struct zr_rendezvous *look,
                        struct zr_log *log, struct zr_mpi_process **out)
{
    pthread_mutex_lock(&processes_lock);
    struct zr_mpi_process *p = find_process(lib->world);
    bool is_new = !p;
    int err = p ? zr_mpi_ended(p) : check_not_forked(lib->world);
    if (is_new && !err)
        err = make_process(lib, ms, look, &p);
    if (!err && !p->has_thread) {
        err = zr_thread_start(&p->thread, "zero-mpi", look_now_and_then, p);
        p->has_thread = !err;
    }
    if (!err) {
        p->n_open++;
        if (log)
            set_log(p, p->log, log);
    }
    pthread_mutex_unlock(&processes_lock);
    if (!err && is_new)
        zr_info(log, "mpi: %s",
                p->is_ours ? "begun here, and ends with the process" : "the program began it");
    *out = err ? NULL : p;
    return err;
}

static void drop(struct zr_mpi_process *p, struct zr_log *log, bool in_order, bool looks_on)
{
    for (int i = 0; i < LAST_LOOKS; i++)
        zr_mpi_poll(p);
    pthread_mutex_lock(&processes_lock);
    set_log(p, log, NULL);
    p->is_disturbed |= !in_order;
    if (--p->n_open == 0 && !looks_on)
        stop_thread(p);
    pthread_mutex_unlock(&processes_lock);
}

void zr_mpi_process_drop(struct zr_mpi_process *p, struct zr_log *log, bool in_order)
{
    if (p)
        drop(p, log, in_order, false);
}

void zr_mpi_process_leave_looking(struct zr_mpi_process *p, struct zr_log *log)
{
    drop(p, log, true, true);
}
