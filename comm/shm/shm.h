/* SPDX-License-Identifier: Apache-2.0 */
/* shm.h: internals of the shared-memory communicator.
 *
 * Every rank has one shared segment for each communicator, a header that all its ranks read and write, and
 * one for each arena, which the others only read. An operation runs on the stream's thread in these steps:
 *
 *    1. The rank writes a description of it into its header ("posts" it).
 *    2. It raises its word "entered" to the operation's number, and waits until every peer's word is there.
 *    3. It compares what the peers posted with its own post.
 *    4. It moves data straight out of the peers' arenas.
 *    5. If peers must finish reading before memory is used again, it raises "done", and waits for theirs.
 *
 * An agreement has one more wait in step 4. Each rank combines its part of the words from all records, raises
 * "middle", and copies the other parts when their owners have raised theirs.
 *
 *    shm.c        opening, closing, and the table of functions
 *    shm_run.c    what an operation does when its turn comes
 *    shm_wait.c   waiting for peers, and failing with them
 *    shm_arena.c  making, finding and mapping the segments */
#ifndef ZR_COMM_SHM_H
#define ZR_COMM_SHM_H

#include "comm/op_queue.h"
#include "comm/post.h"

#include <pthread.h>
#include <stdatomic.h>

enum {
    /* Most ranks of a group. Not more than sum_tree has sources, and a mask has bits. */
    ZR_SHM_SIZE = 64,
    /* Posts kept in a header. A peer is at most one operation ahead, as it waits for this rank in the next
     * one. */
    ZR_SHM_POSTS = 64,
    ZR_SHM_TEXT = 1024,
    ZR_SHM_HEAD_BYTES = 16384,
};

/* A rank's header, in shared memory. Its words are numbers of operations, cut to the 32 bits of a futex. They
 * are compared by difference. */
struct zr_shm_head {
    /* Identify this segment, because numbers of processes and descriptors are used again. */
    uint64_t magic, nonce;
    _Alignas(64) _Atomic uint32_t entered;
    _Alignas(64) _Atomic uint32_t done;
    /* In an agreement: this rank has combined its part. */
    _Alignas(64) _Atomic uint32_t middle;
    /* Number of the last finished operation, for messages. No rank waits for it. */
    _Atomic uint32_t finished;
    /* Number of peers that sleep on one of these words. While it is 0, raising a word needs no system
     * call. */
    _Alignas(64) _Atomic uint32_t waiters;
    /* Written after abort_rank and abort_text. 0: no failure. */
    _Alignas(64) _Atomic int32_t abort_code;
    /* The rank that found the failure. */
    int32_t abort_rank;
    char abort_text[ZR_SHM_TEXT];
    /* Raised by any rank once some header has an abort_code. */
    _Alignas(64) _Atomic uint32_t alarm;
    _Atomic uint32_t closed;
    /* For messages. By role: 1 + the rank of the world that this rank waits for in that communicator. 0:
     * none. Written in the header of the rank's communicator with the most ranks. */
    _Atomic int32_t waits_for[ZR_ROLES];
    struct zr_post post[ZR_SHM_POSTS];
};

/* A rank of the group. */
struct zr_shm_peer {
    struct zr_shm_head *head;
    /* Mapped for reading. This rank's own is the arena itself. */
    char *arena;
    /* pidfd is -1 for a rank of this process, and on kernels without pidfds. */
    int pid, pidfd;
};

struct zr_shm {
    /* Must be first: callers hold its address. */
    struct zr_comm base;
    /* Name of the role. */
    const char *name;
    struct zr_rendezvous *rdv;
    /* By role: the communicators that this one is linked with, including itself. */
    struct zr_shm *sibling[ZR_ROLES];
    const struct zr_host_kernels *kernels;
    int64_t timeout_ns, spin_ns;
    /* Ranks of the world on this host, and on this machine. */
    int32_t n_host, n_machine;
    /* (group.size) By place, including this rank. */
    struct zr_shm_peer peer[ZR_SHM_SIZE];

    struct zr_first failure;
    /* Protects found_by and the report to peers. */
    pthread_mutex_t lock;
    /* The rank of the world that found the failure. Written before the failure is kept. */
    int found_by;
    /* The alarm before headers are mapped. */
    _Atomic uint32_t alarm;
    /* The headers are mapped, so a failure can be reported to peers. */
    atomic_bool mapped;

    struct zr_op_queue queue;

    /* Time at which the stream's thread saw that a peer's process had ended. */
    int64_t ended_ns;
};

/* This rank's number in the world. */
static inline int32_t zr_shm_self(const struct zr_shm *m)
{
    return zr_comm_rank(&m->base, m->base.group.rank);
}

enum zr_shm_word { ZR_SHM_ENTERED, ZR_SHM_MIDDLE, ZR_SHM_DONE };

/* shm_arena.c. Both are collective over the world. */
int zr_shm_arena(struct zr_comm *c, int64_t bytes, struct zr_arena **out);
int zr_shm_map(struct zr_shm *m, struct zr_arena *a);
void zr_shm_unmap(struct zr_shm *m);

/* shm_wait.c */
/* Returns the place of a rank in a communicator. -1: it is no member, or there are no headers yet. Any
 * thread. */
int zr_shm_place_of(const struct zr_shm *k, int32_t rank);
/* Gives the operation that a peer came to last; seq is 0 if there is none. Returns whether it is still in it.
 * Any thread. */
bool zr_shm_last(struct zr_shm *m, int place, struct zr_post *last);
/* Keeps the first failure and reports it to every peer. found_by is the rank that found it. Returns the kept
 * code. Any thread. */
int zr_shm_fail(struct zr_shm *m, int code, int found_by, const char *text);
/* Takes over a failure that a peer has published. Returns this rank's failure, or 0. Any thread. */
int zr_shm_adopt(struct zr_shm *m);
/* Wakes every rank that sleeps on a word, so that it looks for failures. */
void zr_shm_wake_all(struct zr_shm *m);
/* Raises this rank's word to the operation's number. */
void zr_shm_raise(struct zr_shm *m, enum zr_shm_word word, uint64_t seq);
/* Waits until every peer's word has reached the operation's number. For ENTERED it also compares what they
 * posted. Returns 0 or the failure. */
int zr_shm_wait(struct zr_shm *m, const struct zr_post *mine, enum zr_shm_word word);

/* shm_run.c: moves the data of an operation (op_queue.h). */
int zr_shm_move(struct zr_comm *c, const struct zr_comm_op *op);

#endif
