/* SPDX-License-Identifier: Apache-2.0 */
/* shm.h: the inside of the shared-memory communicator.
 *
 * Every rank has one segment for each communicator, a header that all its ranks read and write, and one for
 * each arena, which the others only read. An operation runs on the stream's thread like this: the rank
 * describes it in its header ("posts" it), raises its word "entered" to the operation's number, waits until
 * every peer's word is there too, compares what the peers posted with its own, and moves data straight out of
 * their arenas. Where peers must have finished reading before the memory is used again, it raises "done" and
 * waits for theirs. An agreement has a wait more: each rank puts its part of the words together out of all
 * records, in its own, raises "middle", and takes the other parts when their owners have raised it.
 *
 *   shm.c        the vtable: checks, numbering, and putting operations on the stream
 *   shm_run.c    what an operation does when its turn comes
 *   shm_wait.c   waiting for peers, and failing with them
 *   shm_arena.c  making, finding and mapping the segments */
#ifndef ZR_COMM_SHM_H
#define ZR_COMM_SHM_H

#include "comm/op_queue.h"
#include "comm/post.h"

#include <pthread.h>
#include <stdatomic.h>

enum {
    /* of a group; also the sources of sum_tree, and the bits of a mask */
    ZR_SHM_SIZE = 64,
    /* a peer is ahead by one operation at most: it cannot enter the one after before we have entered ours */
    ZR_SHM_POSTS = 64,
    ZR_SHM_TEXT = 1024,
    ZR_SHM_HEAD_BYTES = 65536,
};

/* In shared memory. The words are numbers of operations, cut to the 32 bits a futex has; they are compared by
 * difference. */
struct zr_shm_head {
    /* of this very segment: a number of a process or a file may be used again */
    uint64_t magic, nonce;
    _Alignas(64) _Atomic uint32_t entered;
    _Alignas(64) _Atomic uint32_t done;
    /* in an agreement: my part is put together */
    _Alignas(64) _Atomic uint32_t middle;
    /* for messages: nobody waits for it */
    _Atomic uint32_t finished;
    /* peers asleep on one of my words; while there is none, raising one needs no system call */
    _Alignas(64) _Atomic uint32_t waiters;
    /* published after the rank and the text that follow */
    _Alignas(64) _Atomic int32_t abort_code;
    /* the rank that found the failure */
    int32_t abort_rank;
    char abort_text[ZR_SHM_TEXT];
    /* raised by a peer or by me, where some header has an abort_code */
    _Alignas(64) _Atomic uint32_t alarm;
    _Atomic uint32_t closed;
    /* For messages, of the widest of its rank's communicators (of equally wide ones, each for itself): whom
     * the rank waits for in each of them, by role; 0: nobody, else the rank of the world, and 1. */
    _Atomic int32_t waits_for[ZR_ROLES];
    struct zr_post post[ZR_SHM_POSTS];
    /* What this rank's program called that every rank must call, to be compared; only in the one of linked
     * communicators that is asked to keep it. The flight recorder has no arguments, few calls, and those that
     * were refused, so it cannot stand in for it. */
    struct zr_called_ring called;
};

/* A member of the group, by its place. */
struct zr_shm_peer {
    struct zr_shm_head *head;
    /* others' are mapped for reading; mine is the arena's own mapping */
    char *arena;
    /* pidfd: -1 for a thread of this process, and where the kernel has none */
    int pid, pidfd;
};

struct zr_shm {
    /* first: callers hold its address */
    struct zr_comm base;
    /* of its role */
    const char *name;
    struct zr_rendezvous *rdv;
    /* by role, those that it is linked with, and itself */
    struct zr_shm *sibling[ZR_ROLES];
    const struct zr_host_kernels *kernels;
    int64_t timeout_ns, spin_ns;
    /* ranks of the world that share this host, and this machine */
    int32_t n_host, n_machine;
    /* (group.size), myself included */
    struct zr_shm_peer peer[ZR_SHM_SIZE];

    struct zr_first failure;
    /* of found_by, and of what is reported to peers */
    pthread_mutex_t lock;
    /* the rank of the world that found the failure; written before it is kept */
    int found_by;
    /* while there are no headers */
    _Atomic uint32_t alarm;
    /* the headers are mapped: a failure can be reported to peers */
    atomic_bool mapped;

    struct zr_op_queue queue;

    /* stream's thread: when it saw that a peer's process had ended */
    int64_t ended_ns;
};

/* My rank of the world. */
static inline int32_t zr_shm_self(const struct zr_shm *m)
{
    return zr_comm_rank(&m->base, m->base.group.rank);
}

enum zr_shm_word { ZR_SHM_ENTERED, ZR_SHM_MIDDLE, ZR_SHM_DONE };

/* shm_arena.c. Both collective over the world. */
int zr_shm_arena(struct zr_comm *c, int64_t bytes, struct zr_arena **out);
int zr_shm_map(struct zr_shm *m, struct zr_arena *a);
void zr_shm_unmap(struct zr_shm *m);

/* shm_wait.c */
/* The place of a rank in a communicator; -1: it has none there, or there are no headers yet. Any thread. */
int zr_shm_place_of(const struct zr_shm *k, int32_t rank);
/* The operation that a peer came to last, if any (else its seq is 0); whether it is in it. Any thread. */
bool zr_shm_last(struct zr_shm *m, int place, struct zr_post *last);
/* Keeps the first failure and tells every peer. found_by: zr_shm_self, or the rank that told. Any thread.
 * Returns the kept code. */
int zr_shm_fail(struct zr_shm *m, int code, int found_by, const char *text);
/* A failure that a peer has published becomes ours. Returns ours, or 0. Any thread. */
int zr_shm_adopt(struct zr_shm *m);
/* Wakes every rank that sleeps on a word, to look around. */
void zr_shm_wake_all(struct zr_shm *m);
/* Raises my word to the operation's number. */
void zr_shm_raise(struct zr_shm *m, enum zr_shm_word which, uint64_t seq);
/* Waits until every peer's word has reached the operation's number, and for ENTERED compares what they
 * posted. 0 or the failure. */
int zr_shm_wait(struct zr_shm *m, const struct zr_post *mine, enum zr_shm_word which);

/* shm_run.c: moves the data of an operation (op_queue.h). */
int zr_shm_move(struct zr_comm *c, const struct zr_comm_op *op);

#endif
