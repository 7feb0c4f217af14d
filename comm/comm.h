/* SPDX-License-Identifier: Apache-2.0 */
/* comm.h: what ranks can do together.
 *
 * An arena is memory laid out alike on all ranks, so that a collective is described by byte offsets and peers
 * read each other's arenas directly. It belongs to the data in it: each communicator that moves them has it
 * attached. There is one communicator for each role, so that none waits for another. Collectives are put on a
 * stream and run in its order; the calls never wait. All ranks must put the same collectives on a
 * communicator in the same order: each carries a tag, tags are compared before data moves, and a difference
 * is an error on every rank that names both.
 *
 * After a failure (a lost peer, a tag that differs, a timeout, abort) every collective, queued or running,
 * ends at once without moving data, its stream goes on, and status() tells the first cause: events still
 * fire, nothing hangs.
 *
 * Thread-safety: collectives of one communicator are issued by one thread; abort() and status() may be called
 * by any. */
#ifndef ZR_COMM_COMM_H
#define ZR_COMM_COMM_H

#include "comm/group.h"
#include "comm/meet/called.h"
#include "kernels/device.h"

#include <stdatomic.h>

struct zr_comm;
struct zr_flight;

/* One rank's memory, of a communicator's backend. Lives until everybody who holds it has dropped it: who made
 * it, and each communicator that it is attached to, until that is closed. */
struct zr_arena {
    /* Gives it all back. */
    void (*free)(struct zr_arena *a);
    char *base;
    int64_t bytes;
    /* How many hold it. */
    _Atomic int32_t n_held;
};
/* NULL is allowed. Any thread. */
void zr_arena_drop(struct zr_arena *a);

/* What a communicator is opened for. */
enum zr_role {
    ZR_ROLE_GATHER,
    ZR_ROLE_REDUCE,
    ZR_ROLE_GATHER_OUTER,
    ZR_ROLE_REDUCE_OUTER,
    ZR_ROLE_CONTROL,
    /* of the ranks that have parts of one copy of the model: its activations */
    ZR_ROLE_MODEL,
    /* of all ranks, where those of control have one part of the model alone: the step's agreement */
    ZR_ROLE_WORLD,
    /* of two ranks of a pipeline: an even one and the next, and an odd one and the next: activations. Where
     * a rank has several stages they are a ring, which the last rank and the first close: a third pair, as in
     * a ring of an odd number of ranks two kinds are not enough to tell a rank's pairs apart */
    ZR_ROLE_EVEN_PAIR,
    ZR_ROLE_ODD_PAIR,
    ZR_ROLE_CLOSING_PAIR,
    /* of two ranks, of the first pipeline stage and the last: tensors that both have */
    ZR_ROLE_TIED,
    ZR_ROLES
};
/* From ZR_ROLE_EVEN_PAIR on. */
#define ZR_PAIR_ROLES 3
/* "gather", "reduce", "gather outer", "reduce outer", "control", "model", "world", "even pair", "odd pair",
 * "closing pair", "tied" */
const char *zr_role_name(enum zr_role r);

/* Where a region is cut for the places of a group: place p owns bytes [zr_cut_at(p), zr_cut_at(p + 1)), which
 * may be none. See comm/segment.h. */
struct zr_cut {
    /* Slices of equal size, a multiple of 128, but for the last ones, which are short or empty; 0 where there
     * are places. */
    int64_t each;
    /* Bytes of the region; of equal slices <= group.size * each. */
    int64_t total;
    /* NULL: equal slices. Else a list of places, ascending, (group.size * at_every + 1): the slice of place p
     * is [at[p * at_every], at[(p + 1) * at_every]), counted from at[0] in steps of at_bytes bytes. It ends
     * at a multiple of 64 bytes or at total; the last one at total. So one list, in elements, says where a
     * flat is cut, whatever the dtype that travels, for the places of the world and for those of each of its
     * groups (zr_cut_in, zr_cut_part, zr_cut_merged of segment.h). Equal on all ranks of the group. Borrowed
     * until the call that it is given to returns. */
    const int64_t *at;
    /* 0 means 1 */
    int32_t at_every, at_bytes;
    /* Of a list of places: bytes of the largest slice of the group, where they are known; 0: they are not,
     * and zr_cut_most looks for it. */
    int64_t most;
};

/* One flat region that is gathered. Offsets are of the communicator's arena, equal on all its ranks but for
 * what only its own rank uses. */
struct zr_gather_seg {
    /* This rank's slice; in place: src == dst, and the slice lies in the region, where it belongs. */
    int64_t src;
    /* The full region in every rank's arena; equal on all ranks, for a peer may read what has come there. */
    int64_t dst;
    bool in_place;
    struct zr_cut cut;
};

/* One flat region that is summed. */
struct zr_reduce_seg {
    /* The full region in every rank's arena, of dtype. */
    int64_t src;
    /* This rank's slice as fp32, one float per element, in its own arena; of f32 it may be its slice of src,
     * if accumulate is not set. */
    int64_t dst;
    /* Of src. */
    struct zr_cut cut;
    enum zr_dtype dtype;
    /* Add to dst instead of overwriting it. */
    bool accumulate;
};

/* What an operation is, for matching across ranks and for messages. */
enum zr_op { ZR_OP_ALL_GATHER = 1, ZR_OP_REDUCE_SCATTER, ZR_OP_BROADCAST, ZR_OP_EXCHANGE, ZR_OP_AGREE };
const char *zr_op_name(enum zr_op op);

/* Where an operation is recorded (flight.h): a communicator adds when it has started and finished. Zero: it
 * is not. */
struct zr_flight_mark {
    struct zr_flight *flight;
    uint64_t serial;
};

/* The call of the program that an operation comes from, for the record: when it was queued, 0: it was not;
 * and the call, packed (called.h). */
struct zr_flight_from {
    int64_t queued_ns;
    uint64_t call;
};

struct zr_tag {
    /* -1: none */
    int32_t unit;

    uint32_t step;
    /* of the model's calls so far; equal on all ranks when they do the same */
    uint64_t call_hash;

    /* of this rank alone */
    struct zr_flight_from from;
    struct zr_flight_mark mark;
};

struct zr_comm_stats {
    /* completed on this rank */
    int64_t n_all_gather, n_reduce_scatter, n_broadcast, n_exchange, n_agree;
    /* bytes this rank took from other ranks' arenas; of a sum each rank's part, also where several of another
     * host came as their sum */
    int64_t wire_bytes;
    /* that its library holds on the device for it besides arenas, by the library's own count when it was last
     * asked; 0: nobody counts */
    int64_t library_bytes;
};

struct zr_comm_ops {
    /* "self", "shm", "nccl", ... */
    const char *name;
    /* reduces in the fixed binary tree over places, fp32 */
    bool deterministic;

    /* Collective over all ranks of the world, blocking. Makes an arena of bytes on every rank (equal
     * everywhere; its content zero), to be attached to communicators of this backend and dropped. If it fails
     * on one rank it fails on all, and nothing is left allocated. */
    int (*arena)(struct zr_comm *c, int64_t bytes, struct zr_arena **out);
    /* Collective over all ranks of the world, blocking, once: offsets of all operations are of this arena. On
     * failure, which is of all ranks, the communicator has none. */
    int (*attach)(struct zr_comm *c, struct zr_arena *a);

    /* A segment array is copied. dst of other ranks is untouched by this rank. all_gather: when it completes
     * on a rank, that rank's dst is whole. Peers may still be reading this rank's src then: it may be
     * overwritten only after a later reduce_scatter, broadcast, exchange or agree that every rank issued
     * after its own gather was done. reduce_scatter: when it completes, dst is this rank's slice of the sum
     * over ranks, and no peer reads this rank's src any more. broadcast: bytes at off of root's arena to off
     * of everyone's; when it completes, no peer reads root's any more. exchange: all_gather of slot_bytes at
     * off + place*slot_bytes, in place; when it completes, no peer reads mine any more. */
    int (*all_gather)(struct zr_comm *c, struct zr_stream *s, const struct zr_gather_seg *seg, int n_seg,
                      const struct zr_tag *tag);
    int (*reduce_scatter)(struct zr_comm *c, struct zr_stream *s, const struct zr_reduce_seg *seg, int n_seg,
                          const struct zr_tag *tag);
    int (*broadcast)(struct zr_comm *c, struct zr_stream *s, int64_t off, int64_t bytes, int root,
                     const struct zr_tag *tag);
    int (*exchange)(struct zr_comm *c, struct zr_stream *s, int64_t off, int64_t slot_bytes,
                    const struct zr_tag *tag);
    /* An all-reduce of whole numbers, in place at off, a multiple of 8, and exact in any order: n_sum int64
     * are added up (beyond 64 bits they wrap), of each of the n_max uint64 behind them the largest is taken.
     * When it completes, every rank has the same, and no peer reads mine any more. No rank receives more than
     * twice its size, whatever the group's (zr_agree_wire). Where it fails, the last of the sums is not that
     * of all ranks: a count of ranks there tells whether to believe the rest. */
    int (*agree)(struct zr_comm *c, struct zr_stream *s, int64_t off, int32_t n_sum, int32_t n_max,
                 const struct zr_tag *tag);

    /* Fails the communicator here and, where peers can be told, there. The first cause is kept. */
    void (*abort)(struct zr_comm *c, int code, const char *why);
    /* 0, or the code of the first failure with its message copied to why (which may be NULL). */
    int (*status)(struct zr_comm *c, char *why, size_t why_bytes);
    void (*stats)(struct zr_comm *c, struct zr_comm_stats *out);
    /* What this rank came to last: "reduce_scatter seq 812 unit 14", or "" if nothing; returns whether it is
     * in it, or it failed there, rather than behind it. Any thread. NULL: it cannot tell. */
    bool (*last)(struct zr_comm *c, char *text, size_t n_text);
    /* The program makes a call that every rank must make: kept, so that an error can name the first calls
     * that were not the same. One thread per communicator. NULL: it names collectives only. */
    void (*called)(struct zr_comm *c, const struct zr_called *call);
    /* It is known that ranks have made other calls, as what says: the communicator fails, within a bound,
     * with the first calls that were not the same, or where they cannot be found, with code and what. Any
     * thread, does not wait. NULL: calls are compared as collectives meet. */
    void (*compare)(struct zr_comm *c, int code, const char *what);
    /* n_ops more operations, of at most n_seg segments each, can be put on streams without waiting for those
     * before. Asked before them: without room an operation waits for some, or fails the communicator. The
     * issuing thread. NULL: they always can. */
    bool (*has_room)(struct zr_comm *c, int n_ops, int n_seg);
    /* After a failure: waits, within a bound, for what was put on streams to end. true: it does not, and the
     * streams, and memory that they touch, can only be left behind. NULL: that does not happen. */
    bool (*stuck)(struct zr_comm *c);
    /* The streams it was used on must be idle, or it is stuck. Not collective: peers may close at other
     * times. NULL is allowed. */
    void (*close)(struct zr_comm *c);
};

struct zr_comm {
    const struct zr_comm_ops *ops;
    /* whose ranks it joins: place p of everything here is rank zr_comm_rank(c, p) of the world */
    struct zr_group group;

    enum zr_role role;
    /* Not 0 once status() may have a failure to tell, and from then on. Whoever finds one raises it on every
     * rank that it can tell, so that nobody has to ask all the others. May be another word after attach(). */
    const _Atomic uint32_t *alarm;
};

/* The rank of the world at a place: for messages. */
static inline int32_t zr_comm_rank(const struct zr_comm *c, int32_t place)
{
    return zr_group_member(&c->group, place);
}

struct zr_rendezvous;
struct zr_topology;

/* World 1: nothing to say to anyone. A gather in place is nothing at all, a reduce is one pass from src to
 * dst. */
int zr_self_open(struct zr_device *dev, enum zr_role role, struct zr_comm **out);

/* One host: every rank of a group maps every other's arena. Collective over all ranks of rdv, each with the
 * group that it belongs to, and blocking, as making the arena is; rdv, and the group's members, must outlive
 * the communicator. t: of the world, for who shares this host's memory and cores; NULL: all do. timeout_ms:
 * how long an operation waits for peers before it fails. */
int zr_shm_open(struct zr_rendezvous *rdv, struct zr_device *dev, const struct zr_topology *t,
                const struct zr_group *group, enum zr_role role, int64_t timeout_ms, struct zr_comm **out);

/* The communicators of one context, n from zr_shm_open, of different roles. A failure of one is one of all,
 * at once, so that a rank is not held up by each in turn. And each one's messages know what the others do:
 * what the program called, and where ranks wait for each other, one here and one there. Whether a wait looks
 * for a while before it sleeps goes by the streams of all. When one is closed, the streams of all must be
 * idle. */
void zr_shm_link(struct zr_comm *const comm[], int n);

#endif
