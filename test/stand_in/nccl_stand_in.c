/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_stand_in.c: the stand-in's communicators, windows and groups. The part that runs on streams is in
 * nccl_stand_in_run.c. */
#include "test/stand_in/nccl_stand_in_inside.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define AS_IT_COMES                                                                                          \
    {                                                                                                        \
        .version = 22809, .windows = true, .destroy_ms = 60000, .n_ctas = 132                                \
    }

struct nsi_state nsi = {.machine = AS_IT_COMES};

static _Thread_local struct {
    int depth;
    ncclResult_t error;
    struct nsi_call *first, *last;
} group;

/* --- controls for tests --- */

struct nccl_stand_in_machine *nccl_stand_in_the_machine(void)
{
    return &nsi.machine;
}

static void set_fault(const char *call, int device, int k, ncclResult_t res, bool hangs)
{
    nsi_lock();
    snprintf(nsi.fail_call, sizeof nsi.fail_call, "%s", call);
    nsi.fail_device = device;
    nsi.fail_k = k;
    nsi.fail_res = res;
    nsi.fail_hangs = hangs;
    nsi_unlock();
}

void nccl_stand_in_fail(const char *call, int device, int k, ncclResult_t res)
{
    set_fault(call, device, k, res, false);
}

void nccl_stand_in_hang(const char *call, int device, int k)
{
    set_fault(call, device, k, ncclInternalError, true);
}

void nccl_stand_in_async(int device, ncclResult_t res)
{
    nsi_lock();
    for (struct ncclComm *c = nsi.comms; c; c = c->next)
        if (c->device == device)
            c->async = res;
    nsi_unlock();
}

void nccl_stand_in_counts(struct nccl_stand_in_counts *out)
{
    nsi_lock();
    *out = nsi.counts;
    for (struct ncclComm *c = nsi.comms; c; c = c->next)
        out->n_comms += c->alive;
    for (struct ncclWindow_vidmem *w = nsi.windows; w; w = w->next)
        out->n_registered += w->alive;
    nsi_unlock();
}

static bool something_runs(void)
{
    if (nsi.n_inside || nsi.n_batches)
        return true;
    for (struct ncclComm *c = nsi.comms; c; c = c->next)
        if (c->n_queued || c->n_running)
            return true;
    return false;
}

bool nccl_stand_in_end(void)
{
    nsi_lock();
    nsi.hung |= nsi.n_inside > 0;
    nsi.ending = true;
    nsi_wake();
    while (something_runs())
        nsi_wait();
    if (nsi.n_open_groups)
        stand_in_misuse("ncclGroupStart: %d groups were not ended", nsi.n_open_groups);
    for (struct ncclWindow_vidmem *w = nsi.windows, *next; w; w = next) {
        if (w->alive && w->comm->alive && !nsi.hung)
            stand_in_misuse("ncclCommWindowRegister: a window of rank %d is still registered", w->comm->rank);
        next = w->next;
        free(w);
    }
    for (struct ncclComm *c = nsi.comms, *next; c; c = next) {
        if (c->alive && !nsi.hung)
            stand_in_misuse("ncclCommInitRankConfig: a communicator of rank %d is still there", c->rank);
        next = c->next;
        free(c);
    }
    for (struct nsi_team *k = nsi_shared->owner ? NULL : nsi_shared->teams, *next; k; k = next) {
        nsi_forget(k);
        next = k->next;
        free(k);
    }
    nsi.windows = NULL;
    nsi.comms = NULL;
    if (!nsi_shared->owner)
        nsi_shared->teams = NULL;
    nsi.n_open_groups = 0;
    bool hung = nsi.hung;
    nsi.ending = nsi.hung = false;
    nsi.fail_call[0] = 0;
    nsi.counts = (struct nccl_stand_in_counts){0};
    nsi.machine = (struct nccl_stand_in_machine)AS_IT_COMES;
    nsi_unlock();
    nsi_end_sharing();
    return hung;
}

/* --- calls --- */

static int device_now(void)
{
    int device = 0;
    cudaGetDevice(&device);
    return device;
}

/* Call with the lock held. */
static ncclResult_t fault(const char *call, int device, struct ncclComm *comm)
{
    if (strcmp(nsi.fail_call, call) || nsi.fail_device != device || --nsi.fail_k != 0)
        return ncclSuccess;
    nsi.fail_call[0] = 0;
    if (nsi.fail_hangs) {
        bool was = nsi.hung;
        nsi.hung = true;
        nsi.n_inside_device[device]--; /* left behind: no longer one of the rank's calls */
        if (comm)
            comm->n_hung++;
        while (!nsi.ending && !(comm && comm->aborted))
            nsi_wait();
        if (comm)
            comm->n_hung--;
        nsi.n_inside_device[device]++;
        nsi.hung = nsi.ending || was;
    }
    return nsi.fail_res;
}

static _Thread_local int inside_device;

ncclResult_t nsi_enter(const char *call, struct ncclComm *comm)
{
    int driver = 0;
    cudaDriverGetVersion(&driver);
    nsi_lock();
    inside_device = comm ? comm->device : device_now();
    if (nsi.n_inside_device[inside_device] > 0)
        stand_in_misuse("%s: another thread is inside NCCL for device %d", call, inside_device);
    nsi.n_inside++;
    nsi.n_inside_device[inside_device]++;
    ncclResult_t res = fault(call, inside_device, comm);
    if (!res && driver == 0)
        res = ncclUnhandledCudaError;
    if (!res && comm && (!comm->alive || comm->aborted)) {
        if (!comm->alive)
            stand_in_misuse("%s: the communicator of rank %d is gone", call, comm->rank);
        res = ncclInvalidArgument;
    }
    if (!res && comm && comm->n_polls > 0) {
        stand_in_misuse("%s: the communicator of rank %d is in progress: ask ncclCommGetAsyncError first",
                        call, comm->rank);
        res = ncclInvalidArgument;
    }
    return res ? nsi_leave(res) : res;
}

ncclResult_t nsi_leave(ncclResult_t res)
{
    nsi.n_inside--;
    nsi.n_inside_device[inside_device]--;
    nsi_wake();
    nsi_unlock();
    return res;
}

ncclResult_t ncclGetVersion(int *version)
{
    *version = nsi.machine.version;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *uniqueId)
{
    NSI_BEGIN("ncclGetUniqueId", NULL);
    memset(uniqueId, 0, sizeof *uniqueId);
    snprintf(uniqueId->internal, sizeof uniqueId->internal, "rank %d, team %llu", nsi_slot(inside_device),
             (unsigned long long)++nsi_shared->n_ids);
    return nsi_leave(ncclSuccess);
}

const char *ncclGetErrorString(ncclResult_t result)
{
    static const char *const texts[] = {"no error",
                                        "unhandled cuda error",
                                        "unhandled system error",
                                        "internal error",
                                        "invalid argument",
                                        "invalid usage",
                                        "remote process exited or there was a network error",
                                        "in progress"};
    return (unsigned)result < sizeof texts / sizeof *texts ? texts[result] : "unknown result code";
}

const char *ncclGetLastError(ncclComm_t comm)
{
    (void)comm;
    return "the stand-in says so";
}

/* --- communicators --- */

static struct nsi_team *team_of(const char *id, int n_ranks)
{
    for (struct nsi_team *k = nsi_shared->teams; k; k = k->next)
        if (memcmp(k->id, id, sizeof k->id) == 0)
            return k;
    struct nsi_team *k = nsi_new(sizeof *k);
    memcpy(k->id, id, sizeof k->id);
    k->n_ranks = n_ranks;
    for (int i = 0; i < NSI_RANKS; i++)
        k->slot[i] = -1;
    k->next = nsi_shared->teams;
    nsi_shared->teams = k;
    return k;
}

ncclResult_t nsi_later(struct ncclComm *comm, ncclResult_t res)
{
    if (res || comm->waits)
        return res;
    comm->n_polls = NSI_POLLS;
    return ncclInProgress;
}

/* Nothing is known of a number of CTAs that was not given. */
static bool can_hold(const ncclConfig_t *config)
{
    bool given = config->minCTAs != NCCL_CONFIG_UNDEF_INT && config->maxCTAs != NCCL_CONFIG_UNDEF_INT;
    if (!given || config->minCTAs <= config->maxCTAs)
        return true;
    stand_in_misuse("ncclConfig_t: minCTAs is %d, maxCTAs %d", config->minCTAs, config->maxCTAs);
    return false;
}

/* NVIDIA's user guide states the rule ("Creating a communicator using multiple ncclUniqueIds"). */
static bool has_root(int rank, int n_ranks, int n_ids)
{
    int more = n_ranks % n_ids, each = n_ranks / n_ids, limit = more * (each + 1);
    return rank < limit ? rank % (each + 1) == 0 : (rank - limit) % each == 0;
}

/* All ranks are here, so whoever has to make an id has made it. */
static void check_roots(const struct nsi_team *k, int rank)
{
    int nth = -1, slot = -1;
    if (k->n_ids < 2 || !has_root(rank, k->n_ranks, k->n_ids))
        return;
    for (int r = 0; r <= rank; r++)
        nth += has_root(r, k->n_ranks, k->n_ids);
    sscanf(k->ids[nth].internal, "rank %d,", &slot);
    if (slot != k->slot[rank])
        stand_in_misuse(
            "ncclCommInitRankScalable: id %d of %d was made on GPU %d of the job: rank %d is to make it", nth,
            k->n_ids, slot, rank);
}

static ncclResult_t join_team(const char *id, int n_ranks, int rank, const ncclConfig_t *config,
                              ncclComm_t *out)
{
    if (!config || config->size != sizeof *config || config->magic != 0xcafebeef || n_ranks > NSI_RANKS ||
        rank < 0 || rank >= n_ranks || !can_hold(config))
        return ncclInvalidArgument;
    struct nsi_team *k = team_of(id, n_ranks);
    int device = device_now(), slot = nsi_slot(device);
    bool is_first = true;
    for (struct ncclComm *c = nsi.comms; c; c = c->next)
        is_first &= !c->alive || c->device != device;
    if (is_first)
        memset(nsi.n_issued[slot], 0, sizeof nsi.n_issued[slot]);
    bool twice = k->n_ranks != n_ranks || k->slot[rank] >= 0;
    for (int i = 0; i < NSI_RANKS; i++)
        twice |= k->slot[i] == slot;
    if (twice) {
        stand_in_misuse(
            "ncclCommInitRankConfig: rank %d of %d, device %d: the rank or its device is there already", rank,
            n_ranks, device);
        return ncclInvalidUsage;
    }
    k->slot[rank] = slot;
    k->n_here++;
    nsi_wake();
    while (k->n_here < n_ranks && !nsi.ending && !nsi_ring_is_broken(k, rank))
        nsi_wait();
    if (k->n_here < n_ranks)
        return nsi_ring_is_broken(k, rank) ? ncclRemoteError : ncclSystemError;
    for (int i = 0; i < n_ranks; i++)
        if (nsi_same_gpu(slot, k->slot[i]))
            return ncclInvalidUsage; /* "Duplicate GPU detected", on all ranks with that GPU */
    check_roots(k, rank);
    struct ncclComm *c = calloc(1, sizeof *c);
    c->team = k;
    c->rank = rank;
    c->device = device;
    c->slot = slot;
    c->alive = true;
    c->bytes = nsi.machine.comm_bytes;
    stand_in_use(device, c->bytes);
    c->waits = config->blocking != 0;
#ifdef NCCL_CTA_POLICY_ZERO
    c->no_ctas = config->CTAPolicy == NCCL_CTA_POLICY_ZERO;
#endif
    const char *order = getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
    c->in_order = order && strcmp(order, "1") == 0;
    bool fewer = config->maxCTAs != NCCL_CONFIG_UNDEF_INT && config->maxCTAs < NSI_MAX_CTAS;
    c->n_ctas = fewer ? config->maxCTAs : NSI_MAX_CTAS;
    nsi.counts.n_one_cta += config->maxCTAs == 1;
    nsi.counts.n_ordered +=
        nsi.machine.version >= 23200 && config->version >= 23200 && config->launchOrderImplicit == 1;
    c->next = nsi.comms;
    nsi.comms = c;
    *out = c;
    return nsi_later(c, ncclSuccess);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank,
                                    ncclConfig_t *config)
{
    ncclResult_t res = nsi_enter("ncclCommInitRankConfig", NULL);
    if (res)
        return res;
    nsi.counts.n_made++;
    return nsi_leave(join_team(commId.internal, nranks, rank, config, comm));
}

/* All ranks must have the same ids in the same order. */
static bool check_ids(struct nsi_team *k, int rank, int n_ids, const ncclUniqueId *ids)
{
    size_t bytes = (size_t)n_ids * sizeof *ids;
    if (!k->n_ids) {
        k->n_ids = n_ids;
        memcpy(k->ids, ids, bytes);
    }
    if (k->n_ids == n_ids && memcmp(k->ids, ids, bytes) == 0)
        return true;
    stand_in_misuse("ncclCommInitRankScalable: rank %d has other ids, or another order of them", rank);
    return false;
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *newcomm, int nranks, int myrank, int nId,
                                      ncclUniqueId *commIds, ncclConfig_t *config)
{
    NSI_BEGIN("ncclCommInitRankScalable", NULL);
    if (nId < 1 || nId > nranks || nranks > NSI_RANKS) {
        stand_in_misuse("ncclCommInitRankScalable: %d ids for %d ranks", nId, nranks);
        return nsi_leave(ncclInvalidArgument);
    }
    if (!check_ids(team_of(commIds[0].internal, nranks), myrank, nId, commIds))
        return nsi_leave(ncclInvalidArgument);
    nsi.counts.n_made++;
    nsi.counts.n_scalable += nId > 1;
    return nsi_leave(join_team(commIds[0].internal, nranks, myrank, config, newcomm));
}

/* Waits until all ranks of the communicator have asked for the split. */
static const struct nsi_split *meet_split(struct ncclComm *comm, int color, int key)
{
    struct nsi_team *k = comm->team;
    uint64_t number = ++comm->n_splits;
    struct nsi_split *s = &k->splits[number % 2];
    if (s->number != number) /* the first rank; all ranks have left the split that was here before */
        *s = (struct nsi_split){.number = number};
    s->color[comm->rank] = color;
    s->key[comm->rank] = key;
    s->n_here++;
    nsi_wake();
    while (s->n_here < k->n_ranks && !comm->aborted && !nsi.ending && !nsi_ring_is_broken(k, comm->rank))
        nsi_wait();
    return s->n_here < k->n_ranks ? NULL : s;
}

/* Returns the rank's place among those of its colour, ordered by key and then by rank. */
static int place_after_split(const struct nsi_split *s, int n_ranks, int rank, int *n_of_color)
{
    int place = 0;
    *n_of_color = 0;
    for (int r = 0; r < n_ranks; r++) {
        if (s->color[r] != s->color[rank])
            continue;
        ++*n_of_color;
        place += s->key[r] < s->key[rank] || (s->key[r] == s->key[rank] && r < rank);
    }
    return place;
}

static ncclResult_t split(struct ncclComm *comm, int color, int key, ncclComm_t *newcomm,
                          const ncclConfig_t *config)
{
    if (color < 0 && color != NCCL_SPLIT_NOCOLOR) {
        stand_in_misuse(
            "ncclCommSplit: rank %d gives color %d: 0 and more, or NCCL_SPLIT_NOCOLOR, is allowed",
            comm->rank, color);
        return ncclInvalidArgument;
    }
    if (config && config->splitShare == 1) {
        stand_in_misuse("ncclCommSplit: splitShare: what runs on the two would wait for each other");
        return ncclInvalidUsage;
    }
    const struct nsi_split *s = meet_split(comm, color, key);
    if (!s)
        return nsi_ring_is_broken(comm->team, comm->rank) ? ncclRemoteError : ncclSystemError;
    nsi.counts.n_split++;
    *newcomm = NULL;
    if (color == NCCL_SPLIT_NOCOLOR)
        return ncclSuccess;
    char id[NCCL_UNIQUE_ID_BYTES] = "";
    int n, place = place_after_split(s, comm->team->n_ranks, comm->rank, &n);
    snprintf(id, sizeof id, "color %d of split %llu of %.70s", color, (unsigned long long)s->number,
             comm->team->id);
    ncclResult_t res = join_team(id, n, place, config, newcomm);
    if (res || comm->waits)
        return res;
    /* The communicator is made later, so the call reports success before it exists. */
    comm->of = *newcomm;
    comm->to = newcomm;
    *newcomm = NULL;
    nsi_later(comm, ncclSuccess);
    return ncclSuccess;
}

/* Every rank of comm calls it. */
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config)
{
    NSI_BEGIN("ncclCommSplit", comm);
    return nsi_leave(split(comm, color, key, newcomm, config));
}

static void leave_windows(struct ncclComm *comm, const char *call)
{
    for (struct ncclWindow_vidmem *w = nsi.windows; w; w = w->next)
        if (w->comm == comm && w->alive) {
            if (call)
                stand_in_misuse("%s: a window of rank %d is still registered", call, comm->rank);
            w->alive = false;
        }
}

/* Returns a rank of this rank's host that has not destroyed or aborted its communicator; -1: none. */
static int still_there(const struct nsi_team *k, int rank)
{
    for (int i = 0; i < k->n_ranks; i++)
        if (nsi_same_host(k->slot[rank], k->slot[i]) && !k->left[i] && !k->aborted[i])
            return i;
    return -1;
}

/* The ranks of a host destroy their communicators together. */
static ncclResult_t await_host(const struct ncclComm *comm)
{
    struct timespec from, now;
    bool reported = false;
    int other;
    clock_gettime(CLOCK_MONOTONIC, &from);
    while ((other = still_there(comm->team, comm->rank)) >= 0 && !nsi.ending) {
        clock_gettime(CLOCK_MONOTONIC, &now);
        int64_t ms = (now.tv_sec - from.tv_sec) * 1000 + (now.tv_nsec - from.tv_nsec) / 1000000;
        if (!reported && ms >= nsi.machine.destroy_ms) {
            stand_in_misuse(
                "ncclCommDestroy: rank %d has waited %lld ms for rank %d of its host, which did not "
                "call it",
                comm->rank, (long long)ms, other);
            nsi.hung = reported = true;
        }
        nsi_wait();
    }
    return other < 0 ? ncclSuccess : ncclInternalError;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    NSI_BEGIN("ncclCommDestroy", comm);
    if (comm->n_queued || comm->n_running)
        stand_in_misuse("ncclCommDestroy: rank %d has work under way", comm->rank);
    if (nsi_any_is_dead(comm->team)) {
        stand_in_misuse(
            "ncclCommDestroy: a rank of the communicator of rank %d is dead: it is to be aborted, "
            "this does not come back",
            comm->rank);
        nsi.hung = true;
        while (!nsi.ending)
            nsi_wait();
        return nsi_leave(ncclInternalError);
    }
    leave_windows(comm, "ncclCommDestroy");
    comm->alive = false;
    comm->team->left[comm->rank] = true;
    stand_in_use(comm->device, -comm->bytes);
    comm->bytes = 0;
    nsi_wake();
    return nsi_leave(await_host(comm));
}

/* Ends what runs on the communicator, and waits for it; or first sticks until the stand-in ends. */
static void end_running(struct ncclComm *comm, bool sticks)
{
    if (sticks) {
        nsi.hung = true;
        while (!nsi.ending)
            nsi_wait();
    }
    comm->aborted = true;
    nsi_wake();
    while (comm->n_running)
        nsi_wait();
}

/* May be called from any thread, even while another one is inside for this rank. Ends what runs, and makes
 * that thread's call return. */
ncclResult_t ncclCommRevoke(ncclComm_t comm, int revokeFlags)
{
    nsi_lock();
    if (!comm->alive || comm->revoked || revokeFlags)
        stand_in_misuse("ncclCommRevoke: the communicator of rank %d is gone or revoked, or flags are %d",
                        comm->rank, revokeFlags);
    nsi.n_inside++;
    comm->revoked = true;
    end_running(comm, nsi.machine.revoke_sticks);
    nsi.n_inside--;
    nsi_unlock();
    return ncclSuccess;
}

/* May be called from any thread, too, but frees what a call in progress uses. */
ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    nsi_lock();
    if (!comm->alive)
        stand_in_misuse("ncclCommAbort: the communicator of rank %d is gone", comm->rank);
    if (comm->n_hung && !comm->revoked && nsi.machine.version >= 22807)
        stand_in_misuse("ncclCommAbort: a call with the communicator of rank %d is in progress: revoke it "
                        "first",
                        comm->rank);
    nsi.n_inside++;
    comm->team->aborted[comm->rank] = true;
    end_running(comm, nsi.machine.abort_sticks);
    leave_windows(comm, NULL);
    comm->alive = false;
    stand_in_use(comm->device, -comm->bytes);
    comm->bytes = 0;
    nsi.n_inside--;
    nsi_wake();
    nsi_unlock();
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *asyncError)
{
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, NULL, &blocked);
    nsi_lock();
    if (sigismember(&blocked, SIGSEGV))
        stand_in_misuse("ncclCommGetAsyncError: rank %d's thread blocks SIGSEGV: no handler would hear of a "
                        "crash in NCCL",
                        comm->rank);
    if (!comm->alive)
        stand_in_misuse("ncclCommGetAsyncError: the communicator of rank %d is gone", comm->rank);
    bool ends = comm->n_polls > 0 && --comm->n_polls == 0;
    if (ends && comm->to)
        __atomic_store_n(comm->to, comm->of, __ATOMIC_RELEASE);
    if (ends)
        comm->to = NULL;
    *asyncError = comm->n_polls > 0 ? ncclInProgress : comm->async;
    nsi_unlock();
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *count)
{
    NSI_BEGIN("ncclCommCount", comm);
    *count = comm->team->n_ranks;
    return nsi_leave(ncclSuccess);
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank)
{
    NSI_BEGIN("ncclCommUserRank", comm);
    *rank = comm->rank;
    return nsi_leave(ncclSuccess);
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device)
{
    NSI_BEGIN("ncclCommCuDevice", comm);
    *device = comm->device;
    return nsi_leave(ncclSuccess);
}

/* None of the memory can be freed before the communicator. */
ncclResult_t ncclCommMemStats(ncclComm_t comm, int stat, uint64_t *value)
{
    enum { SUSPEND, SUSPENDED, PERSIST, TOTAL };
    NSI_BEGIN("ncclCommMemStats", comm);
    if (stat < SUSPEND || stat > TOTAL || !value)
        return nsi_leave(ncclInvalidArgument);
    *value = stat < PERSIST ? 0 : (uint64_t)comm->bytes;
    return nsi_leave(ncclSuccess);
}

/* --- memory and windows --- */

static bool overlap(const char *a, size_t n_a, const char *b, size_t n_b)
{
    return n_a && n_b && a < b + n_b && b < a + n_a;
}

ncclResult_t ncclMemAlloc(void **ptr, size_t size)
{
    NSI_BEGIN("ncclMemAlloc", NULL);
    return nsi_leave(stand_in_alloc(ptr, size, 4096, "ncclMemAlloc") ? ncclUnhandledCudaError : ncclSuccess);
}

ncclResult_t ncclMemFree(void *ptr)
{
    NSI_BEGIN("ncclMemFree", NULL);
    for (struct ncclWindow_vidmem *w = nsi.windows; w; w = w->next)
        if (w->alive && w->at == ptr)
            stand_in_misuse("ncclMemFree: the memory is a window of rank %d still", w->comm->rank);
    nsi_leave(ncclSuccess); /* freeing waits for streams, and they wait for the lock */
    return cudaFree(ptr) ? ncclUnhandledCudaError : ncclSuccess;
}

struct ncclWindow_vidmem *nsi_window(const struct ncclComm *comm, const void *at, size_t bytes)
{
    for (struct ncclWindow_vidmem *w = nsi.windows; w; w = w->next)
        if (w->alive && w->comm == comm && (const char *)at >= w->at &&
            (const char *)at + bytes <= w->at + w->bytes)
            return w;
    return NULL;
}

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win, int winFlags)
{
    NSI_BEGIN("ncclCommWindowRegister", comm);
    struct stand_in_range range = {0};
    if (!stand_in_find(buff, &range) || strcmp(range.kind, "ncclMemAlloc") ||
        (char *)buff + size > range.at + range.bytes || ((char *)buff - range.at) % 4096 ||
        winFlags != NCCL_WIN_COLL_SYMMETRIC) {
        stand_in_misuse(
            "ncclCommWindowRegister: %zu bytes of %s: a part of what ncclMemAlloc gave is allowed, from a "
            "multiple of 4096, symmetric",
            size, range.kind ? range.kind : "no device");
        return nsi_leave(ncclInvalidArgument);
    }
    for (const struct ncclWindow_vidmem *o = nsi.windows; o; o = o->next)
        if (o->alive && o->comm == comm && overlap(buff, size, o->at, o->bytes))
            stand_in_misuse("ncclCommWindowRegister: the memory is in a window of this communicator already");
    struct nsi_team *k = comm->team;
    uint64_t number = comm->n_windows++;
    int slot = (int)(number % 2);
    if (k->n_windows % (uint64_t)k->n_ranks == 0) {
        k->window_bytes[slot] = size;
        k->window_offset[slot] = (char *)buff - range.at;
    } else if (k->window_bytes[slot] != size || k->window_offset[slot] != (char *)buff - range.at) {
        stand_in_misuse(
            "ncclCommWindowRegister: rank %d registers %zu bytes, another rank %zu, or at another offset",
            comm->rank, size, k->window_bytes[slot]);
    }
    k->n_windows++;
    nsi_wake();
    while (k->n_windows < (number + 1) * (uint64_t)k->n_ranks && !nsi.ending &&
           !nsi_ring_is_broken(k, comm->rank))
        nsi_wait();
    if (k->n_windows < (number + 1) * (uint64_t)k->n_ranks)
        return nsi_leave(nsi_ring_is_broken(k, comm->rank) ? ncclRemoteError : ncclSystemError);
    if (!nsi.machine.windows || !nsi_on_one_host(k))
        return nsi_leave(ncclSuccess);
    struct ncclWindow_vidmem *w = calloc(1, sizeof *w);
    *w = (struct ncclWindow_vidmem){
        .comm = comm, .at = buff, .bytes = size, .alive = true, .next = nsi.windows};
    nsi.windows = w;
    *win = w;
    return nsi_leave(ncclSuccess);
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win)
{
    NSI_BEGIN("ncclCommWindowDeregister", comm);
    if (!win || !win->alive || win->comm != comm) {
        stand_in_misuse("ncclCommWindowDeregister: not a window of this communicator");
        return nsi_leave(ncclInvalidArgument);
    }
    win->alive = false;
    return nsi_leave(ncclSuccess);
}
#endif

/* --- groups and their calls --- */

size_t nsi_size(ncclDataType_t type)
{
    return type == ncclInt8 ? 1 : type == ncclBfloat16 ? 2 : type == ncclInt64 || type == ncclUint64 ? 8 : 4;
}

static void free_calls(struct nsi_call *c)
{
    for (struct nsi_call *next; c; c = next) {
        next = c->next;
        free(c);
    }
}

/* --- the first operations of ranks --- */

/* Connects for the calls of a group. Each pair of ranks connects for the messages of each direction. Call
 * with the lock held; releases it meanwhile. */
static void connect(const struct nsi_call *calls)
{
    bool is_new[3] = {false};
    for (const struct nsi_call *c = calls; c; c = c->next) {
        int way = c->kind == NSI_ALL_REDUCE ? 0 : c->kind < NSI_SEND ? 1 : 2;
        bool *connected =
            way < 2 ? &c->comm->connected[way] : &c->comm->connected_to[c->kind == NSI_RECV][c->root];
        is_new[way] |= !*connected;
        *connected = true;
    }
    int ms = (is_new[0] + is_new[1] + is_new[2]) * nsi.machine.connect_ms;
    if (!ms)
        return;
    nsi_unlock();
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L}, NULL);
    nsi_lock();
}

/* Returns what a rank sets with which this call cannot connect yet, or NULL; *missing is the rank. */
static const bool *not_here(const struct nsi_call *c, int *missing)
{
    const struct nsi_team *k = c->comm->team;
    if (c->kind >= NSI_SEND) {
        *missing = c->root;
        return k->has_come_to[c->root][c->comm->rank] ? NULL : &k->has_come_to[c->root][c->comm->rank];
    }
    for (int r = 0; r < k->n_ranks; r++) {
        *missing = r;
        if (!k->has_come[r])
            return &k->has_come[r];
    }
    return NULL;
}

/* Reports ranks whose first operations wait for each other in a ring. The first of them does it. */
static void look_for_ring(int from)
{
    struct nsi_slot *s = nsi_shared->slot, *at = &s[from];
    char text[400] = "";
    for (int i = 0; i < NSI_RANKS && at->connects && !*at->has_come; i++) {
        size_t n = strlen(text);
        int next = at->connects->slot[at->missing];
        snprintf(text + n, sizeof text - n, "%srank %d waits in its first operation on [%.60s] for rank %d",
                 i ? "; " : "", at->rank, at->connects->id, at->missing);
        if (next < from)
            return;
        at = &s[next];
        if (next == from && !at->reported) {
            at->reported = nsi.hung = true;
            stand_in_misuse("these wait for ever: %s", text);
        }
        if (next == from)
            return;
    }
}

static ncclResult_t connect_ranks(const struct nsi_call *calls)
{
    const char *late = getenv("NCCL_STAND_IN_CONNECT");
    bool waits = late && strcmp(late, "1") == 0;
    ncclResult_t res = ncclSuccess;
    for (const struct nsi_call *c = calls; c; c = c->next) {
        if (c->kind >= NSI_SEND)
            c->comm->team->has_come_to[c->comm->rank][c->root] = true;
        else
            c->comm->team->has_come[c->comm->rank] = true;
    }
    nsi_wake();
    for (const struct nsi_call *c = calls; c && !res && waits; c = c->next) {
        struct ncclComm *m = c->comm;
        struct nsi_slot *slot = &nsi_shared->slot[m->slot];
        while (m->waits && !res && (slot->has_come = not_here(c, &slot->missing))) {
            slot->rank = m->rank;
            slot->connects = m->team;
            look_for_ring(m->slot);
            nsi_wait();
            res = m->aborted                             ? ncclInternalError
                  : nsi.ending                           ? ncclSystemError
                  : nsi_ring_is_broken(m->team, m->rank) ? ncclRemoteError
                                                         : ncclSuccess;
        }
        slot->connects = NULL;
        slot->reported = false;
    }
    return res;
}

static ncclResult_t put_group(void)
{
    ncclResult_t res = group.error;
    struct nsi_call *c = group.first;
    int n_symmetric = 0, v = nsi.machine.version;
    group.first = group.last = NULL;
    group.error = ncclSuccess;
    for (const struct nsi_call *k = c; k; k = k->next)
        n_symmetric += k->offset >= 0;
    connect(c);
    if (n_symmetric > 1 && v >= 22803 && v < 22807)
        stand_in_misuse("ncclGroupEnd: %d symmetric collectives in a group may corrupt data before 2.28.7",
                        n_symmetric);
    if (!res)
        res = connect_ranks(c);
    while (c && !res) {
        struct nsi_call *last = c;
        while (last->next && last->next->comm == c->comm && last->next->stream == c->stream)
            last = last->next;
        struct nsi_call *rest = last->next;
        last->next = NULL;
        res = nsi_run(c);
        c = rest;
    }
    free_calls(c);
    return res;
}

ncclResult_t ncclGroupStart(void)
{
    nsi_lock();
    nsi.n_open_groups += group.depth++ == 0;
    nsi_unlock();
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    if (group.depth == 0)
        return ncclInvalidUsage;
    nsi_lock();
    nsi.n_open_groups -= group.depth == 1;
    nsi_unlock();
    if (--group.depth > 0)
        return ncclSuccess;
    ncclResult_t res = group.error;
    if (!group.first) {
        group.error = ncclSuccess;
        return res;
    }
    struct ncclComm *comm = group.first->comm;
    res = nsi_enter("ncclGroupEnd", comm);
    if (res) {
        free_calls(group.first);
        group.first = group.last = NULL;
        group.error = ncclSuccess;
        return res;
    }
    return nsi_leave(nsi_later(comm, put_group()));
}

static const char *const names[] = {[NSI_ALL_GATHER] = "ncclAllGather",
                                    [NSI_REDUCE_SCATTER] = "ncclReduceScatter",
                                    [NSI_REDUCE] = "ncclReduce",
                                    [NSI_BROADCAST] = "ncclBroadcast",
                                    [NSI_ALL_REDUCE] = "ncclAllReduce",
                                    [NSI_SEND] = "ncclSend",
                                    [NSI_RECV] = "ncclRecv"};

const char *nsi_name(enum nsi_kind kind)
{
    return names[kind];
}

/* A call's buffers must be in the device's memory. They must not overlap, or must be exactly in place: the
 * smaller buffer is this rank's part of the larger one. */
static void check_buffers(const struct nsi_call *c, size_t n_send, size_t n_recv)
{
    const struct ncclComm *m = c->comm;
    const char *name = names[c->kind], *small = n_send < n_recv ? c->send : c->recv,
               *large = n_send < n_recv ? c->recv : c->send;
    if (n_send)
        stand_in_check_device_range(name, c->send, n_send, m->device);
    if (n_recv)
        stand_in_check_device_range(name, c->recv, n_recv, m->device);
    if ((n_send && (uintptr_t)c->send % nsi_size(c->type)) ||
        (n_recv && (uintptr_t)c->recv % nsi_size(c->type)))
        stand_in_misuse("%s: a buffer is not at a multiple of its type's size", name);
    if (!n_send || !n_recv)
        return;
    bool apart = c->send + n_send <= c->recv || c->recv + n_recv <= c->send;
    if (!apart && small != large + (n_send == n_recv ? 0 : c->count * nsi_size(c->type) * (size_t)m->rank))
        stand_in_misuse("%s: the buffers overlap, but are not in place", name);
}

static size_t bytes_sent(const struct nsi_call *c)
{
    size_t n = c->count * nsi_size(c->type);
    return c->kind == NSI_RECV ? 0 : c->kind == NSI_REDUCE_SCATTER ? n * (size_t)c->comm->team->n_ranks : n;
}

static size_t bytes_received(const struct nsi_call *c)
{
    size_t n = c->count * nsi_size(c->type);
    return c->kind == NSI_SEND ? 0 : c->kind == NSI_ALL_GATHER ? n * (size_t)c->comm->team->n_ranks : n;
}

/* Calls of a group run at the same time, so none may write what another uses. */
static void check_apart(const struct nsi_call *c)
{
    for (const struct nsi_call *o = group.first; o; o = o->next)
        if (overlap(c->recv, bytes_received(c), o->send, bytes_sent(o)) ||
            overlap(c->recv, bytes_received(c), o->recv, bytes_received(o)) ||
            overlap(o->recv, bytes_received(o), c->send, bytes_sent(c)))
            stand_in_misuse("%s and %s in one group: one writes what the other reads or writes",
                            names[o->kind], names[c->kind]);
}

/* The peer must be a rank of the communicator, and not this rank itself where two ranks work together. */
static bool check_root(const struct nsi_call *c)
{
    const struct ncclComm *m = c->comm;
    if (c->root >= 0 && c->root < m->team->n_ranks && (c->kind < NSI_SEND || c->root != m->rank))
        return true;
    stand_in_misuse("%s: rank %d of %d", names[c->kind], c->root, m->team->n_ranks);
    return false;
}

/* A collective with both buffers in windows is symmetric, and may use copy engines. */
static void note_windows(struct nsi_call *c, size_t n_send, size_t n_recv)
{
    const struct ncclWindow_vidmem *s = nsi_window(c->comm, c->send, n_send),
                                   *r = nsi_window(c->comm, c->recv, n_recv);
    c->offset = -1;
    if (c->kind >= NSI_SEND || !s || !r)
        return;
    bool recv_lies_alike = c->kind == NSI_ALL_GATHER || c->kind == NSI_BROADCAST;
    c->offset = (recv_lies_alike ? c->recv : c->send) - s->at;
    nsi.counts.n_symmetric++;
    bool engine = c->comm->no_ctas && c->kind == NSI_ALL_GATHER;
    nsi.counts.n_copy_engine += engine;
    if (engine && !c->stream)
        stand_in_misuse("%s: copy engines need a stream that is not the NULL stream", names[c->kind]);
    int v = nsi.machine.version;
    if (engine && c->comm->team->n_ranks == 2 && v >= 22907 && v < 23102)
        stand_in_misuse("%s: copy engines of 2 ranks with NVLS may hang before 2.31.2", names[c->kind]);
}

static ncclResult_t take(struct nsi_call c)
{
    ncclResult_t res = nsi_enter(names[c.kind], c.comm);
    if (res) {
        if (group.depth)
            group.error = res;
        return res;
    }
    struct ncclComm *m = c.comm;
    size_t n_send = bytes_sent(&c), n_recv = bytes_received(&c);
    check_buffers(&c, n_send, n_recv);
    check_apart(&c);
    if (!check_root(&c))
        return nsi_leave(ncclInvalidArgument);
    c.number = c.kind == NSI_SEND   ? m->n_sent[c.root]++
               : c.kind == NSI_RECV ? m->n_received[c.root]++
                                    : m->n_collectives++;
    for (int r = 0; c.kind < NSI_SEND && r < m->team->n_ranks; r++)
        c.issue[r] = nsi.n_issued[m->slot][m->team->slot[r]]++;
    note_windows(&c, n_send, n_recv);
    nsi.counts.n_calls++;
    if (c.kind == NSI_ALL_GATHER && (int64_t)n_send > nsi.counts.most_gathered)
        nsi.counts.most_gathered = (int64_t)n_send;
    struct nsi_call *kept = malloc(sizeof *kept);
    *kept = c;
    if (group.last)
        group.last->next = kept;
    else
        group.first = kept;
    group.last = kept;
    return nsi_leave(group.depth ? ncclSuccess : nsi_later(m, put_group()));
}

/* Builds a call from the parameters that all of NCCL's functions have, and those of this one. */
#define TAKE(k, ...)                                                                                         \
    take((struct nsi_call){.kind = k, .type = datatype, .comm = comm, .stream = stream, __VA_ARGS__})

ncclResult_t ncclAllGather(const void *sendbuff, void *recvbuff, size_t sendcount, ncclDataType_t datatype,
                           ncclComm_t comm, cudaStream_t stream)
{
    return TAKE(NSI_ALL_GATHER, .send = sendbuff, .recv = recvbuff, .count = sendcount);
}

ncclResult_t ncclReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount,
                               ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
    return TAKE(NSI_REDUCE_SCATTER, .send = sendbuff, .recv = recvbuff, .count = recvcount, .op = op);
}

ncclResult_t ncclReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream)
{
    return TAKE(NSI_REDUCE, .send = sendbuff, .recv = recvbuff, .count = count, .op = op, .root = root);
}

ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
    bool floats = datatype == ncclFloat32 || datatype == ncclBfloat16,
         has_it = op == ncclSum ? floats || datatype == ncclInt64
                                : op == ncclMax && (floats || datatype == ncclUint64);
    if (!has_it) {
        stand_in_misuse(
            "ncclAllReduce: type %d, operation %d: sums of ncclInt64, maxima of ncclUint64, and both of "
            "ncclFloat32 and ncclBfloat16 are what the stand-in has",
            datatype, op);
        return ncclInvalidArgument;
    }
    return TAKE(NSI_ALL_REDUCE, .send = sendbuff, .recv = recvbuff, .count = count, .op = op);
}

ncclResult_t ncclBroadcast(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
                           int root, ncclComm_t comm, cudaStream_t stream)
{
    return TAKE(NSI_BROADCAST, .send = sendbuff, .recv = recvbuff, .count = count, .root = root);
}

ncclResult_t ncclSend(const void *sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    return TAKE(NSI_SEND, .send = sendbuff, .count = count, .root = peer);
}

ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    return TAKE(NSI_RECV, .recv = recvbuff, .count = count, .root = peer);
}
