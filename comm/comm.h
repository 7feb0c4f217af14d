/* SPDX-License-Identifier: Apache-2.0 */
/* comm.h: communicators, which move data between the ranks of a group.
 *
 * An arena is memory with the same layout on all ranks. So byte offsets describe a collective, and peers read
 * each other's arenas directly. An arena is attached to each communicator that moves its data. Roles have
 * separate communicators, so that none waits for another. Two roles whose operations run on one stream may
 * share one: without groups and pipeline stages, the roles of reductions and of control.
 *
 * Operations are put on a stream and run in its order; the calls never wait for peers. All ranks must put the
 * same operations on a communicator in the same order. Each operation carries a tag. Ranks compare tags
 * before data moves, and a difference is an error that names both operations.
 *
 * A failure is a lost peer, a tag that differs, a timeout, or a call of zr_comm_ops.abort. After a failure
 * every operation, queued or running, ends at once without moving data, and its stream goes on.
 * zr_comm_status returns the first cause.
 *
 * comm.c is the front end of all backends. It checks arguments, numbers operations, and counts them when they
 * are done. A backend opens communicators, makes arenas, and runs operations.
 *
 * Thread-safety: one thread at a time issues the operations of all of a rank's communicators. Any thread may
 * call abort and zr_comm_status. */
#ifndef ZR_COMM_COMM_H
#define ZR_COMM_COMM_H

#include "comm/meet/call_log.h"
#include "kernels/device.h"
#include "kernels/first_failure.h"

#include <stdatomic.h>

struct zr_comm;
struct zr_flight;

/* An ordered set of ranks that work together, and not only a group of HSDP or HFSDP. A communicator is opened
 * on a group. A rank's place in it selects the slice that the rank owns. A fixed tree adds in the order of
 * places, so two groups of the same ranks in another order give different bits. Users see a rank's number in
 * the world.
 *
 * Plain data. The members belong to the group's maker, and outlive what was opened on it. */
struct zr_group {
    /* Number of ranks in the group, and this rank's place among them, from 0. */
    int32_t size, rank;
    /* (size) ranks of the world, by place. NULL: ranks 0 to size - 1 in their order. */
    const int32_t *members;
    /* Number of members on this rank's host, and this rank's place among these members. 0, 0: unknown. */
    int32_t local_size, local_rank;
};

/* The rank of the world at a place. */
static inline int32_t zr_group_member(const struct zr_group *g, int32_t place)
{
    return g->members ? g->members[place] : place;
}

/* All ranks of a world, in their order. */
static inline struct zr_group zr_group_of_all(int32_t rank, int32_t world)
{
    return (struct zr_group){.size = world, .rank = rank};
}

/* One rank's memory, made by a communicator's backend. It lives until all its holders have dropped it: its
 * maker, and each communicator that it is attached to. */
struct zr_arena {
    /* Frees the memory and this struct. */
    void (*free)(struct zr_arena *a);
    char *base;
    int64_t bytes;
    /* Bytes at the end that communicators reserve for themselves. */
    int64_t taken;
    /* Number of holders. */
    _Atomic int32_t n_held;
};
/* Drops one hold; the last one frees the arena. NULL is allowed. Any thread. */
void zr_arena_drop(struct zr_arena *a);

/* The purpose of a communicator. */
enum zr_role {
    /* All-gathers and reduce-scatters of units in a shard group (mesh.h). */
    ZR_ROLE_GATHER,
    ZR_ROLE_REDUCE,
    /* The same between shard groups, in a replicate group: HSDP and HFSDP. */
    ZR_ROLE_GATHER_OUTER,
    ZR_ROLE_REDUCE_OUTER,
    /* Small values and agreements of all data-parallel ranks. */
    ZR_ROLE_CONTROL,
    /* Activations, among the ranks that hold one copy of the model together (tensor parallelism). */
    ZR_ROLE_TP,
    /* Activations, among the ranks that share the rows of one sequence (context parallelism). */
    ZR_ROLE_CP,
    /* The step's agreement of all ranks, if activations move over tp or cp, or the control group has only the
     * ranks of one part of the model. */
    ZR_ROLE_WORLD,
    /* Activations between two neighbours of a pipeline. Even: an even rank and the next one. Odd: an odd rank
     * and the next one. Closing: the last rank and the first, if a rank has several pipeline stages. The
     * closing pair is a separate role because a ring may have an odd number of ranks. */
    ZR_ROLE_EVEN_PAIR,
    ZR_ROLE_ODD_PAIR,
    ZR_ROLE_CLOSING_PAIR,
    /* Tensors that the first and the last pipeline stage both have. */
    ZR_ROLE_TIED,
    ZR_ROLES
};
/* Number of pair roles, from ZR_ROLE_EVEN_PAIR on. */
#define ZR_PAIR_ROLES 3
/* "gather", "reduce", "gather outer", "reduce outer", "control", "tp", "cp", "world", "even pair", "odd
 * pair", "closing pair", "tied" */
const char *zr_role_name(enum zr_role r);

/* How a region is cut into slices, one for each place of a group. Place p owns bytes [zr_cut_at(p),
 * zr_cut_at(p + 1)), which may be empty. See comm/segment.h. */
struct zr_cut {
    /* Bytes of a slice, a multiple of 128, if slices are equal. The last slices may be short or empty. 0 if
     * there is a list of places. */
    int64_t each;
    /* Bytes of the region. With equal slices: at most group.size * each. */
    int64_t total;
    /* NULL: equal slices. Otherwise a list of (group.size * at_every + 1) ascending numbers. The slice of
     * place p is [at[p * at_every], at[(p + 1) * at_every]), counted from at[0] in units of at_bytes bytes.
     * It ends at a multiple of 64 bytes or at total; the last slice ends at total. So one list in elements
     * serves every dtype that travels, the world, and each of its groups (zr_cut_in, zr_cut_part and
     * zr_cut_merged of segment.h). Equal on all ranks of the group. Borrowed until the call returns. */
    const int64_t *at;
    /* 0 means 1. */
    int32_t at_every, at_bytes;
    /* Bytes of the largest slice of a list of places. 0: unknown; zr_cut_most then searches the list. */
    int64_t most;
};

/* One flat region that is gathered. Offsets are in the communicator's arena. They are equal on all ranks. */
struct zr_gather_seg {
    /* This rank's slice. In place: src == dst, and the slice already lies at its place in the region. */
    int64_t src;
    /* The full region in every rank's arena, where a peer may read what has arrived. */
    int64_t dst;
    bool in_place;
    struct zr_cut cut;
};

/* One flat region that is summed. */
struct zr_reduce_seg {
    /* The full region in every rank's arena, of dtype. */
    int64_t src;
    /* This rank's slice as fp32, one float per element, in this rank's arena. May differ between ranks. It
     * may be this rank's slice of src if dtype is f32 and accumulate is false. */
    int64_t dst;
    /* Cut and dtype of src. */
    struct zr_cut cut;
    enum zero_dtype dtype;
    /* Add to dst instead of overwriting it. */
    bool accumulate;
};

/* Arrays of the program that an operation combines, in device memory outside arenas. Ranks may have them at
 * different addresses. */
struct zr_arrays {
    void *dst;
    const void *src;
    /* Elements of the smaller of dst and src. The larger one has n for each rank; in an all_reduce and a
     * shift both have n, and in an all_to_all both have n for each rank. */
    int64_t n;
    enum zero_dtype dtype;
    /* all_to_all: elements of src from the part for one rank to the part for the next, n or more. */
    int64_t stride;
    /* shift: src goes to the place this many further. */
    int32_t by;
};

enum zr_op {
    ZR_OP_ALL_GATHER = 1,
    ZR_OP_REDUCE_SCATTER,
    ZR_OP_BROADCAST,
    ZR_OP_EXCHANGE,
    ZR_OP_AGREE,
    /* Only of arrays. */
    ZR_OP_ALL_REDUCE,
    ZR_OP_ALL_TO_ALL,
    ZR_OP_SHIFT
};
#define ZR_OPS (ZR_OP_SHIFT + 1)
const char *zr_op_name(enum zr_op op);

/* Entry of the flight recorder (flight.h) for an operation. All zero: it is not recorded. */
struct zr_flight_mark {
    struct zr_flight *flight;
    uint64_t serial;
};

/* The program's call that an operation comes from, for the flight recorder. */
struct zr_flight_from {
    /* Time at which the call queued it. 0: the program's thread issues it itself. */
    int64_t queued_ns;
    /* The call, packed (meet/call_log.h). */
    uint64_t call;
};

struct zr_tag {
    /* -1: none */
    int32_t unit;

    uint32_t step;
    /* Hash of the model's calls so far. Equal on all ranks that made the same calls. */
    uint64_t call_hash;

    /* These two may differ between ranks. */
    struct zr_flight_from from;
    struct zr_flight_mark mark;
};

/* The part of an operation that all ranks of the group must have equal. */
struct zr_post {
    /* Number of the operation on its communicator. Starts at 1. */
    uint64_t seq;
    /* enum zr_op. root is -1 for operations without one. */
    int32_t op, unit, root;
    uint32_t step, n_seg, pad;
    uint64_t call_hash;
    /* Bytes of all segments, of the range, of one slot, of the words, of the smaller array, or of the part
     * for one rank. */
    int64_t bytes;
    /* Hash of the segments, of the range's offset, or of the arrays' dtype. */
    uint64_t seg_hash;
};

/* An operation whose arguments have been checked. */
struct zr_comm_op {
    struct zr_post post;
    /* (post.n_seg) of a gather or a reduce; borrowed until zr_comm_ops.run returns. */
    union {
        const void *seg;
        const struct zr_gather_seg *gather;
        const struct zr_reduce_seg *reduce;
    };
    /* Offset in the arena for broadcast, exchange and agree; that of what is sent for all_to_all and
     * shift. */
    int64_t off;
    /* Offset of what is received, and the distance of a shift. */
    int64_t to;
    int32_t by;
    /* Words of an agreement. */
    int32_t n_sum, n_max;
    /* Used by run_arrays only. */
    struct zr_arrays arrays;
    /* Bytes that this rank takes from other ranks. */
    int64_t wire_bytes;
    struct zr_flight_mark mark;
};

struct zr_comm_stats {
    /* Operations that are complete on this rank. */
    int64_t n_all_gather, n_reduce_scatter, n_broadcast, n_exchange, n_agree, n_all_reduce, n_all_to_all,
        n_shift;
    /* Bytes that this rank took from other ranks. A sum counts each rank's part, even if several
     * ranks of another host sent their sum. */
    int64_t wire_bytes;
    /* Device memory that the backend's library holds for this communicator besides arenas, as the library
     * last reported it. 0: unknown. */
    int64_t library_bytes;
};

/* The functions of a backend. A function may be NULL only if its comment says so. */
struct zr_comm_ops {
    /* "self", "shm", "nccl", ... */
    const char *name;
    /* Sums are made in the fixed binary tree over places, in fp32. */
    bool deterministic;
    /* run is called after a failure, too. Otherwise an operation after a failure ends before run. */
    bool runs_failed;
    /* Segments that one operation may have. 0: any number. */
    int32_t most_segs;

    /* See zr_comm_arena. */
    int (*arena)(struct zr_comm *c, int64_t bytes, struct zr_arena **out);
    /* See zr_comm_attach; c->held is already a. NULL: attaching needs no work, and operations without bytes
     * need no arena. */
    int (*attach)(struct zr_comm *c, struct zr_arena *a);
    /* Puts an operation on the stream. zr_comm_done is called for it when it is complete. */
    int (*run)(struct zr_comm *c, struct zr_stream *s, const struct zr_comm_op *op);
    /* The same for an operation of arrays (zr_comm_arrays). NULL: the backend has none. */
    int (*run_arrays)(struct zr_comm *c, struct zr_stream *s, const struct zr_comm_op *op);

    /* Fails the communicator on this rank and, if they can be reached, on its peers. The first cause is
     * kept. */
    void (*abort)(struct zr_comm *c, int code, const char *why);
    /* See zr_comm_status. NULL: c->failure has the whole answer. */
    int (*status)(struct zr_comm *c, char *why, size_t why_bytes);
    /* Counts operations that have completed since the last call. NULL: each is counted as it completes. */
    void (*catch_up)(struct zr_comm *c);
    /* Writes the last operation that this rank came to, "reduce_scatter seq 812 unit 14", or "" if there is
     * none. Returns true while the rank is in it, or if it failed there. Any thread. NULL: unknown. */
    bool (*last)(struct zr_comm *c, char *text, size_t n_text);
    /* Reports that ranks have made different calls; what describes this. The communicator fails within a
     * bound with the first calls that differ, or with code and what if these cannot be found. Any thread;
     * does not wait. NULL: calls are compared when ranks meet in an operation. */
    void (*compare)(struct zr_comm *c, int code, const char *what);
    /* Whether n_ops more operations of at most n_seg segments each can be put on streams without waiting for
     * earlier ones. Without room an operation waits, or fails the communicator. Called by the issuing thread.
     * NULL: there is always room. */
    bool (*has_room)(struct zr_comm *c, int n_ops, int n_seg);
    /* After a failure: waits, within a bound, for the operations on streams to end. Returns true if they have
     * not ended; the caller must then abandon the streams and the memory that they touch. NULL: they always
     * end. */
    bool (*stuck)(struct zr_comm *c);
    /* See zr_comm_close. */
    void (*close)(struct zr_comm *c);
};

/* Sees what a communicator is used for: the check mode (shard/engine/check/check_comm.h). */
struct zr_comm_watch {
    /* The communicator has made an arena. */
    void (*made)(struct zr_comm_watch *w, struct zr_comm *c, const struct zr_arena *a);
    /* An operation is about to be put on s. Returns the stream to put it on. */
    struct zr_stream *(*puts)(struct zr_comm_watch *w, struct zr_comm *c, struct zr_stream *s,
                              const struct zr_comm_op *op);
    /* The communicator is about to be closed. */
    void (*closes)(struct zr_comm_watch *w, struct zr_comm *c);
};

struct zr_comm {
    /* Set by the backend when it opens the communicator. */
    const struct zr_comm_ops *ops;
    /* The communicator's ranks. Place p is rank zr_comm_rank(c, p) of the world. */
    struct zr_group group;
    enum zr_role role;
    /* Not 0 once zr_comm_status may have a failure to report, and from then on. A rank that finds a failure
     * sets it on every rank that it can reach, so that no rank has to ask all the others. attach may replace
     * it. */
    const _Atomic uint32_t *alarm;
    const struct zr_first *failure;
    /* Bytes that the communicator reserves at the end of its arena. */
    int64_t reserve;
    /* Gathers and sums pack slices of up to this many bytes, which changes wire_bytes (segment.h). */
    int64_t packs_gathers, packs_sums;

    /* NULL: none. */
    struct zr_comm_watch *watch;
    /* The attached arena and its memory. NULL before zr_comm_attach. */
    struct zr_arena *held;
    char *arena;
    /* Operations issued so far. Used by the issuing thread only. */
    uint64_t n_issued;
    /* Complete operations by enum zr_op, and the bytes that they took from other ranks. */
    _Atomic int64_t n_done[ZR_OPS], wire_bytes;
    _Atomic int64_t library_bytes;
};

/* ---- use ---- */

/* Makes a zeroed arena of this many bytes on every rank. bytes must be equal on all ranks of a group that the
 * arena is attached for. It can be attached to communicators of the same backend; the caller drops it. If it
 * fails on one rank it fails on all, and nothing stays allocated.
 *
 * Collective over all ranks of the world; blocks. */
int zr_comm_arena(struct zr_comm *c, int64_t bytes, struct zr_arena **out);
/* Attaches an arena. The offsets of all later operations refer to it. Each communicator attaches one arena,
 * once. If it fails, it fails on all ranks, and the communicator has no arena.
 *
 * Collective over all ranks of the world; blocks. */
int zr_comm_attach(struct zr_comm *c, struct zr_arena *a);

/* Gathers the slices of all ranks. When it completes on a rank, that rank's dst is whole. This rank writes no
 * other rank's dst. Peers may still be reading this rank's src. This rank may overwrite src only after a
 * later reduce_scatter, broadcast, exchange or agree that every rank issued after its own gather was done. */
int zr_comm_all_gather(struct zr_comm *c, struct zr_stream *s, const struct zr_gather_seg *seg, int n_seg,
                       const struct zr_tag *tag);
/* Sums over ranks. When it completes, dst is this rank's slice of the sum, and no peer reads this rank's
 * src. */
int zr_comm_reduce_scatter(struct zr_comm *c, struct zr_stream *s, const struct zr_reduce_seg *seg, int n_seg,
                           const struct zr_tag *tag);
/* Copies from off in root's arena to off in every arena. When it completes, no peer reads root's arena. */
int zr_comm_broadcast(struct zr_comm *c, struct zr_stream *s, int64_t off, int64_t bytes, int root,
                      const struct zr_tag *tag);
/* An all-gather in place, of slot_bytes at off + place * slot_bytes. When it completes, no peer reads this
 * rank's slot. */
int zr_comm_exchange(struct zr_comm *c, struct zr_stream *s, int64_t off, int64_t slot_bytes,
                     const struct zr_tag *tag);
/* An all-reduce of integers, in place at off, which is a multiple of 8. The result is exact in any order.
 *
 * n_sum int64 are added up and wrap beyond 64 bits. The n_max uint64 after them are combined to their maximum
 * over the ranks. When it completes, every rank has the same words, and no peer reads this rank's words. No
 * rank receives more than twice the size of the words, whatever the group's size (zr_agree_wire). If it
 * fails, the last sum differs from the sum over all ranks. So a count of ranks in that place shows whether
 * the rest is valid. */
int zr_comm_agree(struct zr_comm *c, struct zr_stream *s, int64_t off, int32_t n_sum, int32_t n_max,
                  const struct zr_tag *tag);
/* Sends part p of the parts at src, `bytes` each, to place p, whose part for this rank arrives as part p of
 * those at dst. A rank's own part is copied. src and dst must not overlap. When it completes, no peer reads
 * this rank's src. */
int zr_comm_all_to_all(struct zr_comm *c, struct zr_stream *s, int64_t src, int64_t dst, int64_t bytes,
                       const struct zr_tag *tag);
/* Sends the bytes at src to the place that is `by` further, around a ring, and receives at dst those of the
 * place that is `by` before. Any `by` is allowed; 0 copies. src and dst must not overlap. When it completes,
 * no peer reads this rank's src. */
int zr_comm_shift(struct zr_comm *c, struct zr_stream *s, int64_t src, int64_t dst, int64_t bytes, int32_t by,
                  const struct zr_tag *tag);
/* The place that a shift takes from. */
static inline int32_t zr_shift_from(const struct zr_group *g, int32_t by)
{
    const int32_t from = (g->rank - by % g->size) % g->size;
    return from < 0 ? from + g->size : from;
}
/* Combines arrays of any size over ranks, by ZR_OP_ALL_GATHER, ZR_OP_REDUCE_SCATTER, ZR_OP_ALL_REDUCE,
 * ZR_OP_ALL_TO_ALL or ZR_OP_SHIFT. Sums are of f32 or bf16, whose addresses are multiples of the element's
 * size. dst may be src in an all_reduce. In an all_gather or reduce_scatter the smaller array may lie at this
 * rank's place in the larger one. When it completes, no peer reads this rank's src.
 *
 * The backend's library chooses the order of additions, and may round each partial sum to the dtype. So a
 * deterministic communicator does not add. */
int zr_comm_arrays(struct zr_comm *c, struct zr_stream *s, enum zr_op op, const struct zr_arrays *arrays,
                   const struct zr_tag *tag);
/* Whether the communicator can do that. */
static inline bool zr_comm_has_arrays(const struct zr_comm *c, enum zr_op op)
{
    const bool adds = op == ZR_OP_REDUCE_SCATTER || op == ZR_OP_ALL_REDUCE;
    return c->ops->run_arrays && !(adds && c->ops->deterministic);
}

/* Returns 0, or the code of the first failure, with its message copied to why (which may be NULL). Any
 * thread. */
int zr_comm_status(struct zr_comm *c, char *why, size_t why_bytes);
void zr_comm_stats(struct zr_comm *c, struct zr_comm_stats *out);
/* Closes a communicator. The streams that it was used on must be idle, unless it is stuck. NULL is allowed. A
 * backend may wait, within a bound, until the ranks of this host close theirs (NCCL does). So all ranks close
 * their communicators in one order. */
void zr_comm_close(struct zr_comm *c);

/* ---- for backends ---- */

/* Counts the operation and records it as finished: it is complete on this rank. Any thread. */
void zr_comm_done(struct zr_comm *c, const struct zr_comm_op *op);
/* Bytes of the arena that operations may use. What communicators reserve for themselves follows them. */
static inline int64_t zr_comm_usable(const struct zr_comm *c)
{
    return c->held ? c->held->bytes - c->held->taken : 0;
}
/* Checks that an arena has room for what its communicators reserve, including c. */
int zr_comm_check_reserve(const struct zr_comm *c, const struct zr_arena *a);

/* The rank of the world at a place, for messages. */
static inline int32_t zr_comm_rank(const struct zr_comm *c, int32_t place)
{
    return zr_group_member(&c->group, place);
}

struct zr_rendezvous;
struct zr_topology;

/* Opens a communicator of one rank. A gather in place does nothing, and a sum is one pass from src to dst. */
int zr_self_open(struct zr_device *dev, enum zr_role role, struct zr_comm **out);

/* Opens a communicator on one host: every rank of a group maps every other's arena.
 *
 * Each rank passes its own group. rdv and the group's members must outlive the communicator. t says which
 * ranks share this host's memory and cores; NULL: all. An operation waits timeout_ms for peers before it
 * fails.
 *
 * Collective over all ranks of rdv; blocks. */
int zr_shm_open(struct zr_rendezvous *rdv, struct zr_device *dev, const struct zr_topology *t,
                const struct zr_group *group, enum zr_role role, int64_t timeout_ms, struct zr_comm **out);

/* Links the n communicators of one context, which zr_shm_open opened for different roles.
 *
 * A failure of one fails all at once, so that a rank does not wait in each of them in turn. Messages of one
 * can report on the others: what the program called, and which ranks wait for each other in two of them. The
 * number of streams of all decides whether a wait spins before it sleeps. When one is closed, the streams of
 * all must be idle. */
void zr_shm_link(struct zr_comm *const comm[], int n);

#endif
