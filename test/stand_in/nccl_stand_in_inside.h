/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_stand_in_inside.h: what the files of the NCCL stand-in share. One lock over all of it, also of ranks
 * that are processes. */
#ifndef ZR_TEST_NCCL_STAND_IN_INSIDE_H
#define ZR_TEST_NCCL_STAND_IN_INSIDE_H

#include "test/stand_in/nccl_stand_in.h"
#include "test/stand_in/stand_in.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

enum { NSI_RANKS = 16, NSI_POLLS = 3 };

enum nsi_kind {
    NSI_ALL_GATHER = 1,
    NSI_REDUCE_SCATTER,
    NSI_REDUCE,
    NSI_BROADCAST,
    NSI_ALL_REDUCE,
    NSI_SEND,
    NSI_RECV
};

/* What ranks have in common of one collective, or two ranks of one message. */
struct nsi_meeting {
    enum nsi_kind kind;
    ncclDataType_t type;
    ncclRedOp_t op;
    size_t count;
    /* root: of a broadcast or the like; from, to: of a message */
    int root, from, to;
    /* counted among the collectives of its communicator, or the messages of its two ranks */
    uint64_t number;
    /* [a][b], of each rank a that came: which of its collectives with rank b this is, on any
     * communicator. */
    uint64_t issue[NSI_RANKS][NSI_RANKS];
    /* in its window, of the buffer that must lie alike on all ranks; -1: it is in no window */
    int64_t offset;
    char *given[NSI_RANKS];
    bool here[NSI_RANKS], left[NSI_RANKS], different;
    struct nsi_meeting *next;
};

/* One ncclCommSplit of all ranks of a communicator. */
struct nsi_split {
    /* counted among the splits of its communicator, from 1 */
    uint64_t number;
    int n_here;
    int color[NSI_RANKS], key[NSI_RANKS];
};

/* Ranks that work together. */
struct nsi_team {
    /* the first of ids */
    char id[NCCL_UNIQUE_ID_BYTES];
    /* by which it is made, where they are several */
    int n_ids;
    ncclUniqueId ids[NSI_RANKS];
    int n_ranks, n_here;
    /* who they are; -1: not here yet */
    int slot[NSI_RANKS];
    /* who has destroyed its communicator, and may end: the others need nothing more of it */
    bool left[NSI_RANKS];
    /* registrations so far, of all ranks */
    uint64_t n_windows;
    /* of the first rank that came, for the even and the odd registration under way */
    size_t window_bytes[2];
    int64_t window_offset[2];
    /* the even and the odd split under way */
    struct nsi_split splits[2];
    struct nsi_meeting *meetings;
    struct nsi_team *next;
};

struct ncclWindow_vidmem {
    struct ncclComm *comm;
    char *at;
    size_t bytes;
    bool alive;
    struct ncclWindow_vidmem *next;
};

struct ncclComm {
    struct nsi_team *team;
    /* slot: who this rank is, in struct nsi_shared */
    int rank, device, slot;
    bool alive, aborted, no_ctas;
    /* memory of the device that it takes */
    int64_t bytes;
    /* it is a blocking one; else what is called returns before it is done */
    bool waits;
    /* calls of ncclCommGetAsyncError that are left until it is done */
    int n_polls;
    /* then *to is set to of */
    ncclComm_t *to, of;
    ncclResult_t async;
    /* batches on streams: those not run yet, those that run */
    int n_queued, n_running;
    uint64_t n_collectives, n_splits, n_windows, n_sent[NSI_RANKS], n_received[NSI_RANKS];
    struct ncclComm *next;
};

/* One call of a group, as it travels on its stream. */
struct nsi_call {
    enum nsi_kind kind;
    struct ncclComm *comm;
    cudaStream_t stream;
    const char *send;
    char *recv;
    size_t count;
    ncclDataType_t type;
    ncclRedOp_t op;
    /* the root, or the peer of a message */
    int root;
    bool has_run;
    /* as in struct nsi_meeting */
    uint64_t number, issue[NSI_RANKS];
    int64_t offset;
    struct nsi_call *next;
};

/* A rank's GPU: number device of that process, which poses as the host. */
struct nsi_slot {
    pid_t pid;
    int device;
    char host[64];
};

/* Of all ranks; those that are processes have it, and what it points to, in memory that they share. */
struct nsi_shared {
    pthread_mutex_t lock;
    /* counts what others may wait for: a futex */
    _Atomic uint32_t moved;
    struct nsi_team *teams;
    uint64_t n_ids;
    /* who forks the ranks; 0: they are threads, each device's slot has its number, the rest is not used */
    pid_t owner;
    struct nsi_slot slot[NSI_RANKS];
    int n_slots;
    /* bytes given out, from the struct on; and what came back, by the power of two that it has room for */
    size_t used;
    void *freed[64];
};

/* Of one process. */
struct nsi_state {
    struct nccl_stand_in_machine machine;
    struct ncclComm *comms;
    struct ncclWindow_vidmem *windows;
    int n_open_groups;
    /* [a][b]: collectives that slot a, of this process, has issued on communicators in which slot b is too */
    uint64_t n_issued[NSI_RANKS][NSI_RANKS];
    /* calls under way */
    int n_inside;
    /* batches put on streams and not dropped, which know their communicator */
    int n_batches;
    int n_inside_device[STAND_IN_MOST_DEVICES];
    bool ending, hung;
    char fail_call[48];
    int fail_device, fail_k;
    ncclResult_t fail_res;
    bool fail_hangs;
    struct nccl_stand_in_counts counts;
};

extern struct nsi_state nsi;
extern struct nsi_shared *nsi_shared;

/* ---- nccl_stand_in_share.c; all but nsi_lock with the lock held ---- */
void nsi_lock(void);
void nsi_unlock(void);
/* Lets go of the lock until another thread calls nsi_wake, and a while at most where ranks may die. */
void nsi_wait(void);
void nsi_wake(void);
/* Zeroed memory that all ranks have. */
void *nsi_new(size_t bytes);
void nsi_drop(void *at);
/* Where this process was given the memory it stays; where it made it, that is gone. */
void nsi_end_sharing(void);
/* Who the calling process is with that device. */
int nsi_slot(int device);
bool nsi_same_host(int a, int b);
/* Two processes of one host have it. */
bool nsi_same_gpu(int a, int b);
/* Of the team, of which whoever left is not counted: what rank notices of a death while communicators are
 * made, and in a collective. */
bool nsi_ring_is_broken(const struct nsi_team *k, int rank);
bool nsi_network_is_broken(const struct nsi_team *k, int rank);
bool nsi_any_is_dead(const struct nsi_team *k);
bool nsi_on_one_host(const struct nsi_team *k);

/* Begins a call that one thread of a rank may make at a time (comm NULL: none yet); the lock is held when it
 * returns ncclSuccess. */
ncclResult_t nsi_enter(const char *call, struct ncclComm *comm);
ncclResult_t nsi_leave(ncclResult_t res);
/* Returns from the function where the call may not begin. */
#define NSI_BEGIN(call, comm)                                                                                \
    do {                                                                                                     \
        ncclResult_t begun = nsi_enter(call, comm);                                                          \
        if (begun)                                                                                           \
            return begun;                                                                                    \
    } while (0)
/* After a call that has been put in hand, with its result: what it returns where the communicator does not
 * block. Lock held. */
ncclResult_t nsi_later(struct ncclComm *comm, ncclResult_t res);
size_t nsi_size(ncclDataType_t type);
/* The symmetric window of comm that holds [at, at + bytes); NULL: none. Lock held. */
struct ncclWindow_vidmem *nsi_window(const struct ncclComm *comm, const void *at, size_t bytes);
/* Puts calls of one communicator and stream on it. Frees them. Lock held; it is let go meanwhile. */
ncclResult_t nsi_run(struct nsi_call *calls);
/* Forgets what has been given. Lock held. */
void nsi_forget(struct nsi_team *team);

#endif
