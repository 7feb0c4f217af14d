/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_comm.h: the inside of the NCCL communicator.
 *
 * How a unit travels. Each communicator has one arena attached, allocated by NCCL and registered as a
 * symmetric window where NCCL and the machine have them; nothing is registered later.
 *
 *   all_gather      ncclAllGather, in place where the shard is a slice of the flat.
 *   reduce_scatter  fast: ncclReduceScatter with ncclSum in the gradient's dtype, straight to the fp32
 *                   shard when the gradient is fp32 and nothing is to be added, else in place, into this
 *                   rank's slice of the gradient, and from there cast or added to the shard. Always
 *                   ncclSum: ncclAvg would rule out the best kernels.
 *                   deterministic: every rank sends each owner its slice (grouped ncclSend and ncclRecv,
 *                   into scratch, piece by piece), and the owner adds them in the fixed binary tree in
 *                   fp32: the bits of shm and self, whatever NCCL would have chosen.
 *   broadcast       ncclBroadcast in place.
 *   exchange        ncclAllGather in place, and in the same group the ranks' ledgers (below).
 *   agree           ncclAllReduce in place, of sums and of maxima, and in the same group of the ledgers.
 *
 * All segments of a unit are one group, which NCCL fuses. Large ones travel as they lie, without a copy; the
 * small ones of a unit, and those whose last slices are short, are packed into one (nccl_pack.h), so that
 * their number and the group's size do not count.
 *
 * When it completes, nobody reads mine. comm.h promises this for reduce_scatter, broadcast and exchange. NCCL
 * promises more for every call: once it is complete in the order of a rank's stream, that rank may reuse both
 * buffers. A kernel that lets peers read its memory (symmetric windows) ends with a barrier for that reason,
 * and one that writes into theirs begins with one. So no operation needs a fence of ours.
 *
 * Ranks that do different things. NCCL cannot tell: it hangs, or, when sizes happen to agree, moves the wrong
 * bytes. The communicators of a context, one for each role, therefore keep a ledger together: how many
 * operations were issued on any, and a hash over their roles, kinds, order, tags and sizes. Sizes between
 * groups are left out: they are not the same for all parts of a copy. An exchange on the control communicator
 * gathers all ranks' ledgers, in 32 bytes per rank at the end of its arena; an agreement makes of them the
 * largest of each word and of its complement, 32 bytes in all, and so shows that they differ, not whose. They
 * are copied to the host behind it and compared when that copy is done. Nobody waits for it. Where nobody has
 * a communicator for control, all others are of one group, and this is done on the reduce communicator.
 *
 * One issuing thread. NCCL wants the calls of a process in the same order on all ranks over all
 * communicators, so one thread at a time issues: while a context opens and closes the caller's, in between
 * the loop's. A communicator lent to us is split; other traffic of its owner, on any communicator, may
 * deadlock with ours unless ours is drained first (zero.h, nccl_comm). Two NCCL calls are excepted, which
 * NCCL allows from anywhere: ncclCommGetAsyncError and ncclCommAbort.
 *
 * Ranks that call different things. What the watching thread finds may come of calls of the programs that
 * differ: another ledger, an operation that never ends, an error that NCCL reports because a peer has left.
 * It is a doubt then, not yet a failure: the ranks' calls are compared over the rendezvous, and what comes of
 * that is the failure of all ranks. Until it is there, or DOUBT_NS are over, nothing is aborted.
 *
 * Nothing hangs. A thread of theirs (nccl_watch.c) looks after what was issued: completions, NCCL's
 * asynchronous errors, ledgers, and the deadline of whatever the stream has begun. Calls that have no
 * deadline of their own (opening, registering, aborting, destroying) are made by a helper thread that is left
 * behind when it does not come back (zr_nccl_within). Communicators are blocking ones in NCCL's sense:
 * non-blocking ones would need a thread and a poll for every group. One that is lent may be non-blocking
 * (zr_nccl_await).
 *
 *   nccl_backend.c  what a context asks of a backend (comm/backend.h)
 *   nccl.c          the vtable: checks, the ledger, what is put on the stream
 *   nccl_gather.c   gathers
 *   nccl_reduce.c   both ways to reduce
 *   nccl_pack.c     small and short segments, packed into one (nccl_pack.h)
 *   nccl_open.c     opening, closing
 *   nccl_lent.c     what a communicator that is lent is asked for
 *   nccl_agree.c    what ranks tell each other while that goes on
 *   nccl_arena.c    arenas, windows
 *   nccl_watch.c    the watching thread, failing, calls under a deadline
 *   nccl_versions.c what depends on the release: features, known faults
 *   nccl_library.c  finding libnccl at run time
 *
 * Several ranks on one GPU, for tests: NCCL refuses two ranks of one host on one device, so each process has
 * to pose as a host of its own before its first NCCL call, and traffic goes over sockets: NCCL_HOSTID
 * (another for each rank), NCCL_SOCKET_IFNAME=lo NCCL_NET=Socket NCCL_IB_DISABLE=1 NCCL_MNNVL_ENABLE=0
 * NCCL_NET_PLUGIN=none NCCL_MAX_CTAS=2. No windows and no copy engine on that path. */
#ifndef ZR_COMM_NCCL_COMM_H
#define ZR_COMM_NCCL_COMM_H

#include "comm/nccl/nccl_options.h"
#include "comm/post.h"
#include "comm/segment.h"
#include "comm/verdict.h"
#include "kernels/thread.h"

#include <nccl.h>
#include <pthread.h>
#include <stdatomic.h>

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
#define ZR_NCCL_WINDOWS 1
typedef ncclWindow_t zr_nccl_window;
#else
#define ZR_NCCL_WINDOWS 0
typedef void *zr_nccl_window;
#endif

/* What is used of NCCL. An older library may lack the second list. */
#define ZR_NCCL_NEEDED(X)                                                                                    \
    X(GetVersion)                                                                                            \
    X(GetUniqueId)                                                                                           \
    X(GetErrorString)                                                                                        \
    X(GetLastError)                                                                                          \
    X(CommInitRankConfig)                                                                                    \
    X(CommDestroy)                                                                                           \
    X(CommAbort)                                                                                             \
    X(CommGetAsyncError)                                                                                     \
    X(CommCount)                                                                                             \
    X(CommUserRank)                                                                                          \
    X(GroupStart)                                                                                            \
    X(GroupEnd)                                                                                              \
    X(AllGather)                                                                                             \
    X(ReduceScatter)                                                                                         \
    X(Reduce)                                                                                                \
    X(Broadcast)                                                                                             \
    X(AllReduce)                                                                                             \
    X(Send)                                                                                                  \
    X(Recv)
#if ZR_NCCL_WINDOWS
#define ZR_NCCL_OPTIONAL(X) X(CommSplit) X(MemAlloc) X(MemFree) X(CommWindowRegister) X(CommWindowDeregister)
#else
#define ZR_NCCL_OPTIONAL(X) X(CommSplit) X(MemAlloc) X(MemFree)
#endif

/* What older headers do not have, as NVIDIA's user guide declares it (NCCL API, "Communicator Creation and
 * Management Functions"). The second list of above, too. */
typedef ncclResult_t zr_ncclCommInitRankScalable(ncclComm_t *newcomm, int nranks, int myrank, int nId,
                                                 ncclUniqueId *commIds, ncclConfig_t *config);
/* stat: an enum there, of which the last is ncclStatGpuMemTotal. */
typedef ncclResult_t zr_ncclCommMemStats(ncclComm_t comm, int stat, uint64_t *value);
enum { ZR_NCCL_STAT_GPU_MEM_TOTAL = 3 };
#define ZR_NCCL_BY_NAME(X) X(CommInitRankScalable) X(CommMemStats)

struct zr_nccl_api {
#define X(name) __typeof__(nccl##name) *name;
    ZR_NCCL_NEEDED(X)
    ZR_NCCL_OPTIONAL(X)
#undef X
#define X(name) zr_nccl##name *name;
    ZR_NCCL_BY_NAME(X)
#undef X
    /* of the library, as NCCL_VERSION counts */
    int version;
    /* file of the library */
    char path[256];
};

/* Fills the table from the library of that name; NULL: from the one that the program has loaded already, else
 * from libnccl.so.2. It stays loaded. lent: it is for a communicator that the program lends, so it must be
 * that one's own, as far as can be seen. ZR_ERR_NOTSUP says what is missing, or names the libraries. */
int zr_nccl_load(const char *library, bool lent, struct zr_nccl_api *api);

enum {
    /* operations watched at a time; more are watched as one */
    ZR_NCCL_PENDING = 256,
    /* comparisons under way; more are left to the next exchange */
    ZR_NCCL_LEDGERS = 8,
    /* pieces of a round of the deterministic reduce */
    ZR_NCCL_PIECES = 64,
    ZR_NCCL_TEXT = 768,
    ZR_NCCL_ALIGN = 256,
    /* how long each call that gives something back may take */
    ZR_NCCL_CLOSE_MS = 10000,
};

/* What ranks compare. Travels through device memory. */
struct zr_nccl_ledger {
    /* of all operations so far, on all communicators, in order */
    uint64_t hash;
    /* how many these are */
    uint64_t n_issued;
    /* number of the exchange that carries it */
    uint64_t exchange;
    /* always 0 */
    uint64_t unused;
};

/* Operations on the stream that are not known to be done. */
struct zr_nccl_pending {
    struct zr_event *begun, *done;
    struct zr_comm_op op;
    /* when it was first seen to have begun; 0: not yet */
    int64_t begun_ns;
    /* index of the ledgers that its completion makes readable; -1: none */
    int32_t ledger;
    /* those ledgers are the largest of each word and of its complement, instead of every rank's */
    bool most;
};

/* The communicators of a context, by role. */
struct zr_nccl_set;

struct zr_nccl {
    /* first: callers hold its address */
    struct zr_comm base;
    struct zr_nccl_set *set;
    /* "gather", "reduce outer" */
    const char *name;
    /* NULL: there is none, as for a group of one, or it was aborted. Changed under set->lock. */
    ncclComm_t comm;
    /* the caller's own: not ours to abort or destroy */
    bool lent;
    /* compares the ledgers of its ranks */
    bool compares;
    /* gathers by copy engines, where it gets a window */
    bool copy_engine;
    /* what struct zr_role_ask said: bytes of the largest slice, and of what travels packed */
    int64_t largest, packed;

    /* NULL: the arena is no symmetric window */
    zr_nccl_window window;
    char path[128];

    /* offsets in the arena */
    int64_t ledgers_at, scratch_at, scratch_bytes;
    /* in the arena too: room for what travels packed */
    int64_t room_at, room_bytes;

    /* Under set->lock. */
    struct zr_nccl_pending pending[ZR_NCCL_PENDING];
    /* ever put there, and ever taken */
    uint64_t n_put, n_got;
    /* the issuing thread is inside NCCL, with the operation of entry n_put */
    bool issuing;
    /* since when */
    int64_t issuing_ns;
    bool abort_wanted, abort_begun, abort_ended;
    bool closed;
    /* written under the lock, with abort_wanted; read by any thread */
    struct zr_first failure;
};

struct zr_nccl_set {
    struct zr_nccl_api api;
    struct zr_device *dev;
    struct zr_rendezvous *rdv;
    struct zr_nccl_options opt;
    /* of all communicators */
    struct zr_comm_ops ops;
    /* of the job, for opening is collective over its world */
    int rank, world;
    int64_t timeout_ns;
    struct zr_nccl of[ZR_ROLES];
    /* those that somebody has, the one whose group is the world first */
    struct zr_nccl *open[ZR_ROLES];
    int n_open;
    struct zr_nccl *comparing;

    /* The issuing thread. */
    struct zr_nccl_ledger ledger;

    /* its communicators count as one, each arena as one */
    _Atomic int32_t n_users;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    struct zr_thread watcher;
    bool stop, idle;
    /* of all communicators */
    _Atomic uint32_t alarm;
    /* A call did not come back: from then on NCCL is not called, and nothing is freed, for that may wait for
     * the device. */
    bool stuck;
    /* (ZR_NCCL_LEDGERS, size of comparing) in memory of the host, as copied */
    struct zr_nccl_ledger *ledgers;
    int64_t ledgers_bytes;
    /* copied to, not compared yet */
    bool ledger_busy[ZR_NCCL_LEDGERS];

    /* What was found and is being compared over the rendezvous. */
    bool in_doubt;
    int64_t doubt_ends_ns;
    int doubt_code;
    char doubt_text[ZR_NCCL_TEXT];
};

static inline struct zr_nccl *zr_nccl_of(struct zr_comm *c)
{
    return (struct zr_nccl *)c;
}

/* A group of one rank has no communicator of NCCL's: what is to move is copied, the rest is there. */
static inline bool zr_nccl_is_alone(const struct zr_nccl *m)
{
    return m->base.group.size == 1;
}

/* An entry of the pending ones, by number. */
static inline struct zr_nccl_pending *zr_nccl_entry(struct zr_nccl *m, uint64_t i)
{
    return &m->pending[i % ZR_NCCL_PENDING];
}

static inline bool zr_nccl_has_failed(const struct zr_nccl *m)
{
    return zr_first_code(&m->failure) != 0;
}

/* ---- nccl_watch.c ---- */

/* Keeps the communicator's first failure and has it aborted. Any thread, the lock not held. Returns the code
 * kept. */
int zr_nccl_fail(struct zr_nccl *m, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
/* The same for what an NCCL call returned; what: "ncclGroupEnd of reduce_scatter seq 812 unit 14". */
int zr_nccl_fail_call(struct zr_nccl *m, ncclResult_t res, const char *what);
/* Writes "ncclX: unhandled system error (the library's own words)" as this thread's message. Returns a code
 * that fits. */
int zr_nccl_say(const struct zr_nccl_set *p, ncclComm_t comm, ncclResult_t res, const char *what);
int zr_nccl_code(ncclResult_t res);

/* What was found, on any communicator, may come of calls that differ: it has the ranks compare them, and
 * fails all when nothing has come of that in time, or at once where they cannot be compared. Any thread, the
 * lock held. */
void zr_nccl_doubt(struct zr_nccl *m, int code, const char *text);

/* Starts and stops the watching thread. */
int zr_nccl_watch(struct zr_nccl_set *p);
void zr_nccl_unwatch(struct zr_nccl_set *p);
/* Counts what is complete. Any thread, the lock not held. */
void zr_nccl_reap(struct zr_nccl *m);
/* Waits, where there was a failure, until the abort has come back or was given up. false: it is stuck. */
bool zr_nccl_settle(struct zr_nccl *m);

/* Calls fn(copy of arg), which returns an ncclResult_t, on a thread of its own, on which the device is
 * current, and waits at most ms for it (comm/within.h): then *res is what it returned and arg is copied back.
 * Otherwise ZR_ERR_TIMEOUT with a message and *res ncclInProgress, and the thread is left to itself. what:
 * "ncclCommAbort". */
int zr_nccl_within(struct zr_nccl_set *p, const char *what, int64_t ms, int (*fn)(void *arg), void *arg,
                   size_t bytes, ncclResult_t *res);
/* The same of a call that all ranks make while they open communicators, within start_timeout_ms: a rank that
 * is lost meanwhile, or has failed, ends the wait with what it was. */
int zr_nccl_together(struct zr_nccl_set *p, const char *what, int (*fn)(void *arg), void *arg, size_t bytes,
                     ncclResult_t *res);

/* ---- nccl_lent.c ---- */
/* After a call with a communicator that may be non-blocking returned res: waits until it is done or until_ns
 * is over (ncclInProgress). *out: what the call makes, or NULL where it makes nothing; NCCL may write it
 * later, from a thread of its own. */
ncclResult_t zr_nccl_await(const struct zr_nccl_api *api, ncclComm_t comm, ncclResult_t res, ncclComm_t *out,
                           int64_t until_ns);

/* ---- nccl_open.c ---- */
/* Whether m is split off another communicator: what was lent, or that of all ranks. */
bool zr_nccl_splits(const struct zr_nccl *m);
/* By how many ids m is made; 0: by none. Each is of as many neighbouring places of its group as the next, or
 * of one more, and is made at the first of them. */
int zr_nccl_n_ids(const struct zr_nccl *m);
int zr_nccl_id_place(const struct zr_nccl *m, int id);
void zr_nccl_close(struct zr_comm *c);
/* Gives up one use of the set; with the last it is freed. */
void zr_nccl_set_drop(struct zr_nccl_set *p);
/* "2.28.9" */
void zr_nccl_version_text(int v, char *text, size_t n_text);

/* ---- nccl_arena.c ---- */
int zr_nccl_arena(struct zr_comm *c, int64_t bytes, struct zr_arena **out);
int zr_nccl_attach(struct zr_comm *c, struct zr_arena *a);
/* Keeps it for good, as a call into NCCL that has not come back may still use it. NULL is allowed. */
void zr_nccl_leave_arena(struct zr_arena *a);
/* Gives back what is there, of comm, which is the communicator's. 0, or the call did not come back. */
int zr_nccl_close_window(struct zr_nccl *m, ncclComm_t comm);

/* ---- nccl_agree.c: all ranks call, and wait for each other. ---- */

/* What a rank tells the others before there is a communicator. */
struct zr_nccl_card {
    int32_t version, deterministic, copy_engine, lent;
    int64_t small_bytes, ranks_per_id, largest[ZR_ROLES], packed[ZR_ROLES];
    /* of ranks that make one */
    ncclUniqueId id[ZR_ROLES];
    ZR_VERDICT(400);
};

/* What ranks said beside their error. */
struct zr_nccl_tally {
    /* over the ranks of a group */
    int64_t sum;
    /* of rank 0 of the world */
    int64_t first;
    /* the first rank of the world that has another number than rank 0; -1: none */
    int odd;
    int64_t odd_number;
};

/* Compares all ranks' cards. err: of this rank, with its message. ids[role]: zr_nccl_n_ids of the role's
 * group, where that is not 0: free each, also after a failure. */
int zr_nccl_meet(struct zr_nccl_set *p, int err, ncclUniqueId *ids[ZR_ROLES]);
/* err: of this rank, with its message. Returns the first rank's error, or 0 with the tally of the ranks'
 * numbers, where it is wanted, over m's group (both may be NULL). */
int zr_nccl_agree(struct zr_nccl_set *p, int err, int64_t number, const struct zr_nccl *m,
                  struct zr_nccl_tally *t);

/* ---- nccl_gather.c, nccl_reduce.c: put one operation's work on the stream. Return 0, an error of the
 * device's, or, with *res set, an error of NCCL's (ZR_ERR_SYSTEM). ---- */
int zr_nccl_gather(struct zr_nccl *m, struct zr_stream *s, const struct zr_gather_seg *seg, int n_seg,
                   ncclResult_t *res);
int zr_nccl_reduce_fast(struct zr_nccl *m, struct zr_stream *s, const struct zr_reduce_seg *seg, int n_seg,
                        ncclResult_t *res);
int zr_nccl_reduce_fixed(struct zr_nccl *m, struct zr_stream *s, const struct zr_reduce_seg *seg, int n_seg,
                         ncclResult_t *res);

/* ---- nccl.c ---- */
/* Whether reducing is deterministic is filled in where a communicator is opened. */
extern const struct zr_comm_ops zr_nccl_ops;

#endif
