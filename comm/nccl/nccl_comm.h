/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_comm.h: internals of the NCCL communicators.
 *
 * Operations. Each communicator has one arena attached. NCCL allocates it, and registers it as a symmetric
 * window if NCCL and the machine have windows. Nothing is registered later.
 *
 *   all_gather      ncclAllGather, in place if the shard is a slice of the flat.
 *   reduce_scatter  fast: ncclReduceScatter with ncclSum in the gradient's dtype. An fp32 gradient that is
 *                   not accumulated goes straight to the fp32 shard. Otherwise the sum lands in this rank's
 *                   slice of the gradient, and is cast or added to the shard. ncclAvg would rule out the best
 *                   kernels.
 *                   deterministic: every rank sends each owner its slice (grouped ncclSend and ncclRecv into
 *                   scratch memory, piece by piece). The owner adds them in the fixed binary tree in fp32.
 *                   The bits are those of shm and self.
 *   broadcast       ncclBroadcast in place. In a role of pairs, ncclSend and ncclRecv.
 *   exchange        ncclAllGather in place. A second one in the same group gathers the ledgers (below).
 *   agree           ncclAllReduce in place of the sums, the maxima, and the ledgers, in one group.
 *   all_to_all      ncclSend and ncclRecv in one group, for every pair of ranks. The own part is copied.
 *   shift           The same for one other rank.
 *   arrays          ncclAllReduce, ncclReduceScatter with ncclSum, ncclAllGather, or those messages, at the
 *                   program's own addresses. bf16 sums are rounded at every hop.
 *
 * All segments of a unit are one group, which NCCL fuses. Large segments travel without a copy. Small ones,
 * and those with short last slices, are packed into one (nccl_pack.h).
 *
 * No fences. comm.h promises that when a reduce_scatter, broadcast or exchange completes, no peer reads this
 * rank's memory. NCCL promises more for every call: once it is complete in the order of a rank's stream, that
 * rank may reuse both buffers. Kernels with symmetric windows begin and end with barriers for that reason.
 *
 * Ledgers. If ranks issue different operations, NCCL hangs, or moves wrong bytes if sizes happen to agree. So
 * the communicators of a context share a ledger, which data-parallel ranks must have in common: the number of
 * operations on any of them, and a hash of their roles, kinds, order, tags and sizes. Sizes between groups
 * are left out, as they differ between parts of the model, and so are tp and cp. An exchange on the
 * control communicator gathers all ranks' ledgers, 32 bytes per rank at the end of its arena. An agreement
 * reduces each word and its complement to the maximum, 32 bytes in all. That shows that ledgers differ, but
 * not which. The result is copied to the host and compared when the copy is done; nothing waits for it.
 * Without a control communicator the reduce communicator does this.
 *
 * With tp, cp or pipeline stages the world's communicator makes the step's agreement. Ranks of
 * different stages issue different operations. But each communicator also has a hash of its operations, which
 * is the same on all its ranks. The agreement sums one word over the world, which is 0 if they are
 * (part_of_sum).
 *
 * One issuing thread. NCCL needs the calls of a process in the same order on all ranks, over all
 * communicators. So one thread at a time issues, in the order of the program: the caller's while a context
 * opens and closes, otherwise the loop's or the model's. A communicator that the program lends is split. Its
 * owner's traffic may deadlock with ours unless ours is drained first (zero.h, nccl_comm). NCCL allows three
 * calls from any thread: ncclCommGetAsyncError, ncclCommRevoke and ncclCommAbort.
 *
 * Doubts. The programs may have made different calls. Then the watching thread finds a different ledger, an
 * operation that never ends, or an error because a peer has left. This is only a doubt at first. The ranks
 * compare their calls over the rendezvous, and the result becomes the failure of all ranks. Until then, or
 * until DOUBT_NS are over, nothing is aborted.
 *
 * Deadlines. The watching thread (nccl_watch.c) looks for completions, NCCL's asynchronous errors, ledgers
 * that differ, and operations that take too long. Calls without a deadline (opening, registering, aborting,
 * destroying) run on a helper thread, which is left behind if they do not return (zr_nccl_timed_call). All
 * communicators but the program's are blocking in NCCL's sense, as others would need a poll for every group.
 * The program's may be non-blocking (zr_nccl_await).
 *
 *   nccl_backend.c  the row in the table of backends (comm/backend.h)
 *   nccl.c          what an operation puts on the stream, the ledger, and the table of functions
 *   nccl_gather.c   gathers
 *   nccl_parts.c    all-to-all and shift
 *   nccl_reduce.c   both ways to reduce
 *   nccl_pack.c     small and short segments, packed into one (nccl_pack.h)
 *   nccl_open.c     opening, closing
 *   nccl_user_comm.c     the program's own communicator
 *   nccl_agree.c    what ranks exchange while they open
 *   nccl_arena.c    arenas, windows
 *   nccl_watch.c    the watching thread, failing, calls under a deadline
 *   nccl_versions.c what depends on the release: features, known faults
 *   nccl_library.c  finding libnccl at run time
 *
 * Several ranks on one GPU, for tests. NCCL refuses two ranks of one host on one device. So each process must
 * pose as a separate host before its first NCCL call, and traffic goes over sockets: NCCL_HOSTID (different
 * for each rank), NCCL_SOCKET_IFNAME=lo NCCL_NET=Socket NCCL_IB_DISABLE=1 NCCL_MNNVL_ENABLE=0
 * NCCL_NET_PLUGIN=none NCCL_MAX_CTAS=2. There are no windows and no copy engine then. */
#ifndef ZR_COMM_NCCL_COMM_H
#define ZR_COMM_NCCL_COMM_H

#include "comm/first_error.h"
#include "comm/nccl/nccl_options.h"
#include "comm/post.h"
#include "comm/segment.h"
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

/* The functions of NCCL that libzero calls. An older library may lack those of the second list. */
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
#define ZR_NCCL_OPTIONAL(X)                                                                                  \
    X(CommSplit) X(CommCuDevice) X(MemAlloc) X(MemFree) X(CommWindowRegister) X(CommWindowDeregister)
#else
#define ZR_NCCL_OPTIONAL(X) X(CommSplit) X(CommCuDevice) X(MemAlloc) X(MemFree)
#endif

/* Optional functions that older headers do not declare. The declarations follow NVIDIA's user guide (NCCL
 * API, "Communicator Creation and Management Functions"). */
typedef ncclResult_t zr_ncclCommInitRankScalable(ncclComm_t *newcomm, int nranks, int myrank, int nId,
                                                 ncclUniqueId *commIds, ncclConfig_t *config);
/* In NCCL, stat is an enum whose last value is ncclStatGpuMemTotal. */
typedef ncclResult_t zr_ncclCommMemStats(ncclComm_t comm, int stat, uint64_t *value);
enum { ZR_NCCL_STAT_GPU_MEM_TOTAL = 3 };
/* From 2.28.7 on. flags is 0. */
typedef ncclResult_t zr_ncclCommRevoke(ncclComm_t comm, int flags);
#define ZR_NCCL_BY_NAME(X) X(CommInitRankScalable) X(CommMemStats) X(CommRevoke)

/* ncclConfig_t as in NCCL 2.32. It is declared here because the header may be older than the library. NCCL
 * only ever adds fields at the end, and a library reads no more of the struct than it knows. */
struct zr_nccl_config {
    size_t size;
    unsigned int magic, version;
    int blocking, cgaClusterSize, minCTAs, maxCTAs;
    const char *netName;
    int splitShare, trafficClass;
    const char *commName;
    int collnetEnable, CTAPolicy, shrinkShare, nvlsCTAs, nChannelsPerNetPeer, nvlinkCentricSched;
    int graphUsageMode, numRmaCtx, maxP2pPeers, graphStreamOrdering, launchOrderImplicit, numRmaSig;
};
/* The first releases that order the kernels of several communicators: by a variable in the environment, and
 * by launchOrderImplicit. */
enum { ZR_NCCL_HAS_ORDER_VARIABLE = 22600, ZR_NCCL_HAS_LAUNCH_ORDER = 23200 };
/* The value of CTAPolicy that chooses copy engines. */
enum { ZR_NCCL_CTA_POLICY_ZERO = 2 };

struct zr_nccl_api {
#define X(name) __typeof__(nccl##name) *name;
    ZR_NCCL_NEEDED(X)
    ZR_NCCL_OPTIONAL(X)
#undef X
#define X(name) zr_nccl##name *name;
    ZR_NCCL_BY_NAME(X)
#undef X
    /* Version of the library, in the format of NCCL_VERSION. */
    int version;
    /* File of the library. */
    char path[256];
};

/* Fills the table from the library with this name. NULL: from the library that the program has loaded, or
 * else libnccl.so.2. The library stays loaded. user_comm: the program gives a communicator. Then its library
 * must be used, as far as this can be checked. Returns ZERO_ERR_NOTSUP with what is missing, or with the
 * libraries in conflict. */
int zr_nccl_load(const char *library, bool user_comm, struct zr_nccl_api *api);

enum {
    /* Operations on streams that are watched at a time. */
    ZR_NCCL_PENDING = 256,
    /* Most pending comparisons. Beyond that the next exchange compares. */
    ZR_NCCL_LEDGERS = 8,
    /* Most pieces of a round of the deterministic sum. */
    ZR_NCCL_PIECES = 64,
    ZR_NCCL_TEXT = 768,
    ZR_NCCL_ALIGN = 256,
    /* Time limit of a call that frees something. */
    ZR_NCCL_CLOSE_MS = 10000,
};

/* The ledger that ranks compare. It travels through device memory. */
struct zr_nccl_ledger {
    /* Hash of all operations so far, on all communicators, in order. */
    uint64_t hash;
    /* Number of these operations. */
    uint64_t n_issued;
    /* Number of the exchange that carries it. */
    uint64_t exchange;
    /* Always 0. */
    uint64_t unused;
};

/* An operation on a stream that may not be done yet. */
struct zr_nccl_pending {
    struct zr_event *begun, *done;
    struct zr_comm_op op;
    /* Time at which it was first seen to have begun. 0: not yet. */
    int64_t begun_ns;
    /* Index of the ledgers that can be compared when the operation is done. -1: none. */
    int32_t ledger;
    /* Those ledgers are the maximum of each word and of its complement, and not one ledger per rank. */
    bool most;
};

/* The communicators of a context, by role. */
struct zr_nccl_set;

struct zr_nccl {
    /* Must be first: callers hold its address. */
    struct zr_comm base;
    struct zr_nccl_set *set;
    /* "gather", "reduce outer" */
    const char *name;
    /* NULL: a group of one rank, or aborted. Changed under set->lock. The issuing thread reads it without the
     * lock. */
    _Atomic(ncclComm_t) comm;
    /* comm is the program's own, which libzero must not abort or destroy. */
    bool user_comm;
    /* This communicator compares the ledgers of its ranks. */
    bool compares;
    /* Gathers use copy engines if the arena gets a window. */
    bool copy_engine;
    /* From struct zr_role_ask: bytes of the largest slice, and of what is packed. */
    int64_t largest, packed;
    /* Hash of its operations so far, which all ranks of its group have. It begins with a number that no other
     * communicator of the world has. Used by the issuing thread. */
    uint64_t hash;

    /* NULL: the arena is no symmetric window. */
    zr_nccl_window window;
    char path[128];

    /* Offsets in the arena. */
    int64_t ledgers_at, scratch_at, scratch_bytes;
    /* Part of the arena for packed segments. */
    int64_t room_at, room_bytes;

    /* Protected by set->lock. */
    struct zr_nccl_pending pending[ZR_NCCL_PENDING];
    /* Numbers of entries added, and removed. */
    uint64_t n_put, n_got;
    /* The issuing thread is inside NCCL, with the operation of entry n_put, since issuing_ns. */
    bool issuing;
    /* See issuing. */
    int64_t issuing_ns;
    bool abort_wanted, abort_begun, abort_ended;
    /* Time at which ncclCommRevoke returned, or at which it was given up. 0: it was not called. */
    int64_t revoked_ns;
    bool closed;
    /* Written under the lock, together with abort_wanted. Any thread may read it. */
    struct zr_first failure;
};

struct zr_nccl_set {
    struct zr_nccl_api api;
    struct zr_device *dev;
    struct zr_rendezvous *rdv;
    struct zr_nccl_options opt;
    /* The functions of all communicators. */
    struct zr_comm_ops ops;
    /* This rank and the world's size. */
    int rank, world;
    int64_t timeout_ns;
    struct zr_nccl of[ZR_ROLES];
    /* The communicators that are opened. The first one's group is the world. */
    struct zr_nccl *open[ZR_ROLES];
    int n_open;
    struct zr_nccl *comparing;
    /* The GPU that it counts for (nccl_open.c). -1: none. */
    int gpu;

    /* Used by the issuing thread. */
    struct zr_nccl_ledger ledger;

    /* Users of the set: all communicators together, and each arena. */
    _Atomic int32_t n_users;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    struct zr_thread watcher;
    bool stop, idle;
    /* The alarm of all communicators. */
    _Atomic uint32_t alarm;
    /* A call did not return. From then on NCCL is not called and nothing is freed, as that may wait for the
     * device. The exception is ncclCommAbort after an ncclCommRevoke that did not return. */
    bool stuck;
    /* (ZR_NCCL_LEDGERS, size of comparing) Copies in host memory. */
    struct zr_nccl_ledger *ledgers;
    int64_t ledgers_bytes;
    /* Whether the copies with this index are in use. They are until they were compared. */
    bool ledger_busy[ZR_NCCL_LEDGERS];

    /* A doubt that the ranks are comparing calls about. */
    bool in_doubt;
    int64_t doubt_ends_ns;
    int doubt_code;
    char doubt_text[ZR_NCCL_TEXT];
};

static inline struct zr_nccl *zr_nccl_of(struct zr_comm *c)
{
    return (struct zr_nccl *)c;
}

/* The type that NCCL adds up in. */
static inline ncclDataType_t zr_nccl_type(enum zero_dtype t)
{
    return t == ZERO_F32 ? ncclFloat32 : ncclBfloat16;
}

/* Whether the group has one rank. Then there is no NCCL communicator, and data that is not in place is
 * copied. */
static inline bool zr_nccl_is_alone(const struct zr_nccl *m)
{
    return m->base.group.size == 1;
}

/* Host memory of the ledgers with this index. */
static inline struct zr_nccl_ledger *zr_nccl_ledgers(const struct zr_nccl_set *p, int32_t index)
{
    return p->ledgers + index * p->comparing->base.group.size;
}

/* Pending entry number i. */
static inline struct zr_nccl_pending *zr_nccl_entry(struct zr_nccl *m, uint64_t i)
{
    return &m->pending[i % ZR_NCCL_PENDING];
}

static inline bool zr_nccl_has_failed(const struct zr_nccl *m)
{
    return zr_first_code(&m->failure) != 0;
}

/* ---- nccl_watch.c ---- */

/* Keeps the communicator's first failure, and has it aborted. Returns the code that is kept. Any thread; the
 * caller must not hold the lock. */
int zr_nccl_fail(struct zr_nccl *m, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
/* The same with the result of an NCCL call. what: "ncclGroupEnd of reduce_scatter seq 812 unit 14". */
int zr_nccl_fail_call(struct zr_nccl *m, ncclResult_t res, const char *what);
/* Sets this thread's message to "ncclX: unhandled system error (NCCL's last error)", and returns the matching
 * code. */
int zr_nccl_say(const struct zr_nccl_set *p, ncclComm_t comm, ncclResult_t res, const char *what);
int zr_nccl_code(ncclResult_t res);

/* Begins a doubt: the ranks compare their calls, and all communicators fail with the result. If the calls
 * cannot be compared in time, they fail with code and text. Any thread; the caller holds the lock. */
void zr_nccl_doubt(struct zr_nccl *m, int code, const char *text);

/* Start and stop the watching thread. */
int zr_nccl_watch(struct zr_nccl_set *p);
void zr_nccl_unwatch(struct zr_nccl_set *p);
/* Counts operations that are complete. Any thread; the caller must not hold the lock. */
void zr_nccl_reap(struct zr_nccl *m);
/* After a failure: waits until the abort has returned or was given up. Returns false if it is stuck. */
bool zr_nccl_settle(struct zr_nccl *m);

/* Calls fn with a copy of arg on another thread with the device current, and waits at most ms for it
 * (comm/timed_call.h). fn returns an ncclResult_t. If it returns in time, *res is its result, and arg is
 * copied back. Otherwise returns ZERO_ERR_TIMEOUT with a message, *res is ncclInProgress, and the thread is
 * left behind. what: "ncclCommAbort". */
int zr_nccl_timed_call(struct zr_nccl_set *p, const char *what, int64_t ms, int (*fn)(void *arg), void *arg,
                       size_t bytes, ncclResult_t *res);
/* The same for a call that all ranks make while they open communicators, within start_timeout_ms. The wait
 * ends early if a rank is lost or fails. */
int zr_nccl_together(struct zr_nccl_set *p, const char *what, int (*fn)(void *arg), void *arg, size_t bytes,
                     ncclResult_t *res);

/* ---- nccl_user_comm.c ---- */
/* Waits for a call on a communicator that may be non-blocking, after the call has returned res. Returns
 * ncclInProgress if it is not done by until_ns. out is where the call writes its result, or NULL; NCCL may
 * write it later, from another thread. */
ncclResult_t zr_nccl_await(const struct zr_nccl_api *api, ncclComm_t comm, ncclResult_t res, ncclComm_t *out,
                           int64_t until_ns);

/* ---- nccl_open.c ---- */
/* Whether m is split off the program's communicator, or off the communicator of all ranks. */
bool zr_nccl_splits(const struct zr_nccl *m);
/* Number of ids that m is made with; may be 0. Each id serves neighbouring places of the group, and is made
 * at the first of them (zr_nccl_id_place). The numbers of places differ by at most one. */
int zr_nccl_n_ids(const struct zr_nccl *m);
int zr_nccl_id_place(const struct zr_nccl *m, int id);
/* See zr_comm_close. ncclCommDestroy waits for the ranks of this host, at most ZR_NCCL_CLOSE_MS. */
void zr_nccl_close(struct zr_comm *c);
/* Whether a call into NCCL has not returned. */
bool zr_nccl_is_stuck(struct zr_nccl_set *p);
/* Gives up one use of the set. The last one frees it. */
void zr_nccl_set_drop(struct zr_nccl_set *p);
/* Writes "2.28.9". */
void zr_nccl_version_text(int v, char *text, size_t n_text);

/* ---- nccl_arena.c ---- */
int zr_nccl_arena(struct zr_comm *c, int64_t bytes, struct zr_arena **out);
int zr_nccl_attach(struct zr_comm *c, struct zr_arena *a);
/* Leaks the arena, as a call into NCCL that has not returned may still use it. NULL is allowed. */
void zr_nccl_leave_arena(struct zr_arena *a);
/* Deregisters the window, if there is one, of m's communicator comm. Returns 0, or an error if the call did
 * not return. */
int zr_nccl_close_window(struct zr_nccl *m, ncclComm_t comm);

/* ---- nccl_agree.c: all ranks call these functions, and wait for each other. ---- */

/* A rank's settings and error, which it sends to the others before there is a communicator. */
struct zr_nccl_card {
    int32_t err;
    int32_t version, deterministic, copy_engine, user_comm;
    int64_t small_bytes, ranks_per_id, largest[ZR_ROLES], packed[ZR_ROLES];
    /* The first rank of this rank's group in the role. */
    int32_t first[ZR_ROLES];
    /* Whether this rank makes an id for the role. */
    bool makes_id[ZR_ROLES];
};

/* Summary of the numbers that the ranks of a group sent with their errors. */
struct zr_nccl_tally {
    int64_t sum;
    /* Number of the group's first rank. */
    int64_t first;
    /* A rank whose number differs from that. -1: none. */
    int odd;
    int64_t odd_number;
};

/* Compares all ranks' cards. err is this rank's error, with its message. ids[role] gets zr_nccl_n_ids ids, if
 * that is not 0. The caller frees each, also after a failure. */
int zr_nccl_meet(struct zr_nccl_set *p, int err, ncclUniqueId *ids[ZR_ROLES]);
/* Exchanges errors and numbers. err is this rank's error, with its message. Returns the first rank's error,
 * or 0. After 0, t has the tally of the numbers over m's group, unless it is NULL. */
int zr_nccl_agree(struct zr_nccl_set *p, int err, int64_t number, const struct zr_nccl *m,
                  struct zr_nccl_tally *t);

/* ---- nccl_gather.c, nccl_parts.c, nccl_reduce.c: put one operation's work on the stream. They return 0 or
 * an error of the device; *res has an error of NCCL. ---- */
int zr_nccl_gather(struct zr_nccl *m, struct zr_stream *s, const struct zr_gather_seg *seg, int n_seg,
                   ncclResult_t *res);
/* An all-to-all or a shift. */
int zr_nccl_pass(struct zr_nccl *m, struct zr_stream *s, const struct zr_comm_op *op, ncclResult_t *res);
int zr_nccl_reduce_fast(struct zr_nccl *m, struct zr_stream *s, const struct zr_reduce_seg *seg, int n_seg,
                        ncclResult_t *res);
int zr_nccl_reduce_fixed(struct zr_nccl *m, struct zr_stream *s, const struct zr_reduce_seg *seg, int n_seg,
                         ncclResult_t *res);

/* ---- nccl.c ---- */
/* Opening a set of communicators copies this table and sets deterministic. */
extern const struct zr_comm_ops zr_nccl_ops;

#endif
