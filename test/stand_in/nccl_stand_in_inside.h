/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_stand_in_inside.h: declarations that the files of the NCCL stand-in share. One lock protects
 * everything, even between ranks that are processes. */
#ifndef ZR_TEST_NCCL_STAND_IN_INSIDE_H
#define ZR_TEST_NCCL_STAND_IN_INSIDE_H

#include "test/stand_in/nccl_stand_in.h"
#include "test/stand_in/stand_in.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

enum { NSI_RANKS = 16, NSI_POLLS = 3, NSI_MAX_CTAS = 32 };

enum nsi_kind {
    NSI_ALL_GATHER = 1,
    NSI_REDUCE_SCATTER,
    NSI_REDUCE,
    NSI_BROADCAST,
    NSI_ALL_REDUCE,
    NSI_SEND,
    NSI_RECV
};

/* Data that the ranks of one collective, or the two ranks of one message, share. */
struct nsi_meeting {
    enum nsi_kind kind;
    ncclDataType_t type;
    ncclRedOp_t op;
    size_t count;
    /* root: of a broadcast or reduce; from, to: of a message */
    int root, from, to;
    /* counted among the collectives of its communicator, or the messages of its two ranks */
    uint64_t number;
    /* [a][b] for each rank a that came: the number of this among its collectives with rank b, on any
     * communicator */
    uint64_t issue[NSI_RANKS][NSI_RANKS];
    /* offset in its window of the buffer that must be at equal offsets on all ranks; -1: in no window */
    int64_t offset;
    char *given[NSI_RANKS];
    bool here[NSI_RANKS], left[NSI_RANKS], different;
    struct nsi_meeting *next;
};

/* One ncclCommSplit by all ranks of a communicator. */
struct nsi_split {
    /* counted among the splits of its communicator, from 1 */
    uint64_t number;
    int n_here;
    int color[NSI_RANKS], key[NSI_RANKS];
};

/* Ranks that share a communicator. */
struct nsi_team {
    /* the first of ids */
    char id[NCCL_UNIQUE_ID_BYTES];
    /* the number of ids that make it, if there are several */
    int n_ids;
    ncclUniqueId ids[NSI_RANKS];
    int n_ranks, n_here;
    /* slot of each rank; -1: not here yet */
    int slot[NSI_RANKS];
    /* the rank has destroyed its communicator and may end: the others need nothing more from it */
    bool left[NSI_RANKS];
    /* the rank has aborted its communicator */
    bool aborted[NSI_RANKS];
    /* ranks that have come to a collective; and to a message with each other rank */
    bool has_come[NSI_RANKS], has_come_to[NSI_RANKS][NSI_RANKS];
    /* registrations so far, over all ranks */
    uint64_t n_windows;
    /* from the first rank that came, for the even and the odd registration in progress */
    size_t window_bytes[2];
    int64_t window_offset[2];
    /* the even and the odd split in progress */
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
    /* slot: this rank's slot in struct nsi_shared */
    int rank, device, slot;
    bool alive, aborted, revoked, no_ctas;
    /* calls that nccl_stand_in_hang keeps inside */
    int n_hung;
    /* it has connected for ncclAllReduce, and for other collectives; for sending to each rank, and for
     * receiving from it */
    bool connected[2], connected_to[2][NSI_RANKS];
    /* CTAs of an operation; operations start in the order of issue */
    int n_ctas;
    bool in_order;
    /* device memory that it takes */
    int64_t bytes;
    /* it is blocking; otherwise a call returns before it is done */
    bool waits;
    /* calls of ncclCommGetAsyncError until it is done */
    int n_polls;
    /* then *to is set to of */
    ncclComm_t *to, of;
    ncclResult_t async;
    /* batches on streams: those that have not started, and those that run */
    int n_queued, n_running;
    uint64_t n_collectives, n_splits, n_windows, n_sent[NSI_RANKS], n_received[NSI_RANKS];
    struct ncclComm *next;
};

/* One call of a group, on its way through its stream. */
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
    /* of the first call of a batch: all batches of this process that have not ended */
    struct nsi_call *next_batch;
    /* the call for which the batch waits; NULL before it has started */
    const struct nsi_call *now;
    /* a part of the GPU that it needs, and its number among those that start in the order of issue */
    int n_ctas;
    uint64_t order;
    bool holds_ctas;
    /* for finding out whether it can go on */
    bool can_go, reported;
};

/* A rank's GPU: device number and process, and the host as which the process poses. */
struct nsi_slot {
    pid_t pid;
    int device;
    char host[64];
    /* the team in whose first operation a call waits, NULL: none; and what it waits for: the missing rank
     * sets *has_come */
    const struct nsi_team *connects;
    const bool *has_come;
    int rank, missing;
    bool reported;
};

/* State of all ranks. If ranks are processes, this and everything it points to is in shared memory. */
struct nsi_shared {
    pthread_mutex_t lock;
    /* a futex, which counts changes that others may wait for */
    _Atomic uint32_t moved;
    struct nsi_team *teams;
    uint64_t n_ids;
    /* the process that forks the ranks; 0: ranks are threads, each device's slot has its number, and the
     * rest is unused */
    pid_t owner;
    struct nsi_slot slot[NSI_RANKS];
    int n_slots;
    /* bytes given out after the struct; and freed pieces, by the power of two that they can hold */
    size_t used;
    void *freed[64];
};

/* State of one process. */
struct nsi_state {
    struct nccl_stand_in_machine machine;
    struct ncclComm *comms;
    struct ncclWindow_vidmem *windows;
    int n_open_groups;
    /* [a][b]: collectives that slot a of this process has issued on communicators that also have slot b */
    uint64_t n_issued[NSI_RANKS][NSI_RANKS];
    /* calls in progress */
    int n_inside;
    /* batches that were put on streams and not dropped; they refer to their communicator */
    int n_batches;
    int n_inside_device[STAND_IN_MAX_DEVICES];
    /* batches that have not ended; CTAs that each device has given to some; batches numbered so far */
    struct nsi_call *batches;
    int n_ctas[STAND_IN_MAX_DEVICES];
    uint64_t n_ordered;
    bool ending, hung;
    /* nsi_shared->moved and n_ordered when look_for_hang was called last */
    uint32_t looked_at_move;
    uint64_t looked_at_order;
    char fail_call[48];
    int fail_device, fail_k;
    ncclResult_t fail_res;
    bool fail_hangs;
    struct nccl_stand_in_counts counts;
};

extern struct nsi_state nsi;
extern struct nsi_shared *nsi_shared;

/* ---- nccl_stand_in_share.c; all but nsi_lock are called with the lock held ---- */
void nsi_lock(void);
void nsi_unlock(void);
/* Releases the lock until another thread calls nsi_wake, or for a short time, since ranks may die and waits
 * may have limits. */
void nsi_wait(void);
void nsi_wake(void);
/* Returns zeroed memory that all ranks share. */
void *nsi_new(size_t bytes);
void nsi_drop(void *at);
/* Ends sharing. A process that inherited the memory keeps it; the process that made it frees it. */
void nsi_end_sharing(void);
/* Returns the slot of the calling process with that device. */
int nsi_slot(int device);
bool nsi_same_host(int a, int b);
/* Returns whether two slots are processes of one host with the same device. */
bool nsi_same_gpu(int a, int b);
/* Whether rank notices the death of a rank of the team: while communicators are made, and in a collective.
 * Ranks that have left do not count. */
bool nsi_ring_is_broken(const struct nsi_team *k, int rank);
bool nsi_network_is_broken(const struct nsi_team *k, int rank);
bool nsi_any_is_dead(const struct nsi_team *k);
bool nsi_on_one_host(const struct nsi_team *k);

/* Begins a call that only one thread of a rank may make at a time (comm NULL: none yet). If it returns
 * ncclSuccess the lock is held. */
ncclResult_t nsi_enter(const char *call, struct ncclComm *comm);
ncclResult_t nsi_leave(ncclResult_t res);
/* Returns from the calling function if the call may not begin. */
#define NSI_BEGIN(call, comm)                                                                                \
    do {                                                                                                     \
        ncclResult_t begun = nsi_enter(call, comm);                                                          \
        if (begun)                                                                                           \
            return begun;                                                                                    \
    } while (0)
/* Returns the result of a call that has been started: for a non-blocking communicator, that it is in
 * progress. Call with the lock held. */
ncclResult_t nsi_later(struct ncclComm *comm, ncclResult_t res);
size_t nsi_size(ncclDataType_t type);
const char *nsi_name(enum nsi_kind kind);
/* Returns comm's symmetric window that holds [at, at + bytes), or NULL. Call with the lock held. */
struct ncclWindow_vidmem *nsi_window(const struct ncclComm *comm, const void *at, size_t bytes);
/* Puts calls of one communicator and stream on the stream, and frees them. Call with the lock held;
 * releases it meanwhile. */
ncclResult_t nsi_run(struct nsi_call *calls);
/* Forgets what was given away. Call with the lock held. */
void nsi_forget(struct nsi_team *team);

#endif
