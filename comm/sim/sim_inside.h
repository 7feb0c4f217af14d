/* SPDX-License-Identifier: Apache-2.0 */
/* sim_inside.h: internals of the simulated communicator.
 *
 *    sim.c             the communicator: arenas, opening, closing
 *    sim_meet.c        ranks meet in a collective, or fail
 *    sim_collective.c  which bytes a collective touches on one rank, and how long it takes
 *    sim_symmetric.c   the same in a world where a few ranks represent all
 *    sim_order.c       checks the order of collectives over all communicators, and on one */
#ifndef ZR_COMM_SIM_INSIDE_H
#define ZR_COMM_SIM_INSIDE_H

#include "comm/segment.h"
#include "comm/sim/sim.h"

enum { ZR_SIM_MAX_RANKS = 1024 };

/* One rank's part in a collective. */
struct zr_sim_part {
    bool here;
    struct zr_stream *stream;
    /* Vector clock of the stream when it arrived. */
    struct zr_vclock *entry;
    /* The operation, whose segments are a copy that this struct owns. */
    struct zr_comm_op op;
};

/* The k-th collective. */
struct zr_sim_meeting {
    struct zr_sim_comm_world *world;
    uint64_t number;
    int n_here, n_over;
    bool over;
    struct zr_sim_part part[];
};

/* State that the groups of a role share. */
struct zr_sim_role {
    /* Groups that are not closed. */
    int n_groups;
    /* Arenas that all ranks together have made so far. */
    int n_arenas;
    bool arena_failed;
};

/* Counts over a rank's group: other ranks on its host, ranks on other hosts, and hosts. */
struct zr_sim_tiers {
    int near, far, hosts;
};

/* State that the ranks of one group share. Parts and handles are by place. If only representatives of a group
 * take part, these have a separate order. */
struct zr_sim_comm_world {
    struct zr_sim *w;
    struct zr_sim_order *order;
    /* Ranks whose next collective, in the order of all ranks, is one of this communicator (sim_order.c). */
    int n_first;
    /* The recorder of w. */
    struct zr_recorder *rec;
    enum zr_role role;
    /* Name of the role. */
    const char *name;
    /* (n) Rank of the world of each part. */
    int32_t *members;
    /* (simulated ranks) Part of each rank. */
    int32_t *place_of;
    /* Number of parts; ranks of the group, which are more if parts are representatives; handles that are
     * open. */
    int n, size, n_open;
    /* Whether parts are representatives (sim_symmetric.c). weight has (n) how many ranks of the group each
     * represents. */
    bool symmetric;
    int32_t *weight;
    struct zr_sim_role *all;
    struct zr_comm **ranks;
    /* Open meetings, by number. */
    struct zr_sim_meeting **ring;
    uint64_t first, n_ring, cap;
    struct zr_first failure;
    _Atomic uint32_t alarm;
};

struct zr_sim_comm {
    struct zr_comm base;
    struct zr_sim_comm_world *world;
    /* Number of its part, and its number in the simulated world. */
    int part, sim_rank;
    struct zr_sim_tiers tiers;
    /* Members of a representative's group. NULL: those of the world. */
    int32_t *own_members;
    int n_made;
    /* The arena that this rank is making, while it waits for the others. */
    struct zr_arena *making;
    uint64_t n_put;
};

static inline struct zr_sim_comm *zr_sim_comm_of(struct zr_comm *c)
{
    return (struct zr_sim_comm *)c;
}

static inline struct zr_sim_comm *zr_sim_comm_at(const struct zr_sim_comm_world *d, int place)
{
    return (struct zr_sim_comm *)d->ranks[place];
}

static inline bool zr_sim_comm_flawed(const struct zr_sim_comm_world *d, enum zr_sim_comm_flaw flaw)
{
    const struct zr_sim_options *o = zr_sim_config(d->w);
    return (o->comm_flaws & flaw) && (!o->flawed_roles || o->flawed_roles >> d->role & 1);
}

/* Arguments for opening a communicator of n parts. */
struct zr_sim_opening {
    struct zr_sim *w;
    enum zr_role role;
    struct zr_sim_order *order;
    struct zr_sim_role *all;
    int n;
    /* (n) The group and place of each part, and its number in the simulated world. sim_ranks NULL: numbers
     * are ranks of the world. */
    const struct zr_group **groups;
    const int32_t *sim_ranks;
    /* (n) See zr_sim_comm_world; owned by the callee. NULL: each part is one rank of the group. */
    int32_t *weight;
};

/* sim.c: opens one communicator. out is indexed by the number in the simulated world. */
int zr_sim_comm_open_one(const struct zr_sim_opening *o, struct zr_comm **out);
/* Ends the opening of a role. If err is not 0, closes what is open of it. Returns err. */
int zr_sim_comm_opened(struct zr_sim *w, struct zr_sim_role *all, int err, struct zr_comm **out);
struct zr_sim_role *zr_sim_role_new(void);

/* sim_symmetric.c: the work of a representative when all parts of its group have come. */
void zr_sim_symmetric_body(struct zr_sim_comm_world *d, struct zr_sim_meeting *m, int me);
void zr_sim_symmetric_agree(struct zr_sim_comm_world *d, struct zr_sim_meeting *m, int me, bool second);

/* sim_collective.c: time for moving `bytes_each` from each of the other members to this one. */
int64_t zr_sim_wire_ns(const struct zr_sim_comm_world *d, int64_t bytes_each, int me);

/* sim_meet.c: puts a rank's operation on its stream, with a copy of its segments. */
int zr_sim_meeting_join(struct zr_comm *c, struct zr_stream *s, const struct zr_comm_op *op);
void zr_sim_part_free(struct zr_sim_meeting *m, int place);
/* Keeps the first failure of all ranks, and lets every waiting rank go on. why may be NULL. */
void zr_sim_comm_fail(struct zr_sim_comm_world *d, int code, const char *why);

/* sim_collective.c: the work of the rank at a place when all ranks have come. */
void zr_sim_gather_body(struct zr_sim_comm_world *d, struct zr_sim_meeting *m, int me);
void zr_sim_reduce_body(struct zr_sim_comm_world *d, struct zr_sim_meeting *m, int me);
void zr_sim_exchange_body(struct zr_sim_comm_world *d, struct zr_sim_meeting *m, int me);
/* An agreement has two halves, between which all ranks meet. First each rank combines its part of the words,
 * then it takes the other parts. */
void zr_sim_agree_half(struct zr_sim_comm_world *d, struct zr_sim_meeting *m, int me, bool second);
/* An all-to-all or a shift. */
void zr_sim_pass_body(struct zr_sim_comm_world *d, struct zr_sim_meeting *m, int me);
void zr_sim_broadcast_body(struct zr_sim_comm_world *d, struct zr_sim_meeting *m, int me);

/* sim_order.c: notes that rank (of the world) issues p, its k-th collective over all communicators. Reports
 * it if the k-th collective of other ranks of its class differs, or if nothing orders the threads that issued
 * the rank's last two. */
void zr_sim_order_keep(struct zr_sim_comm_world *d, int rank, const struct zr_post *p);
/* Notes that a stream has come to p. Reports a race if nothing orders the rank's previous collective on this
 * communicator before it. */
void zr_sim_order_start(struct zr_sim_comm_world *d, struct zr_line *l, const struct zr_post *p);

#endif
