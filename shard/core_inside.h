/* SPDX-License-Identifier: Apache-2.0 */
/* core_inside.h: the core's state, and the functions that its files share: core.c (the calls), core_order.c
 * (which call comes next), core_slots.c (which unit lies in which slot), core_step.c (gradients, and the end
 * of a step) and core_valid.c (checks). Only these files and tests include it. */
#ifndef ZR_SHARD_CORE_INSIDE_H
#define ZR_SHARD_CORE_INSIDE_H

#include "shard/core.h"
#include "shard/layout.h"

#define NEVER INT64_MAX

/* The tables follow this header in one allocation. They are found by offsets, not pointers, so that the whole
 * is plain data. */
struct zr_core {
    /* as in struct zr_core_spec; accum: micro-batches of a step */
    int32_t n_units, n_pslots, n_gslots, prefetch, accum, n_sums;
    /* units that need slots */
    int32_t n_sharded;

    bool model_holds, gathers_updated, reduce_each;
    bool outer, outer_each, outer_gathers;
    int32_t n_group_slots, next_group_slot;
    /* bytes of the largest parameter slot if it is kept for units that need it, else 0 */
    int64_t reserved;
    /* bytes of the second largest */
    int64_t second;

    /* open brackets */
    int32_t n_open;
    /* of these, backward brackets that have the gradient */
    int32_t n_open_bwd;
    /* model_holds: the last unit whose gradient is being reduced since gradients were last returned; -1:
     * none */
    int32_t last_reduced;
    /* zero_micro calls since the step */
    int32_t n_micro;
    /* one of them reduced gradients without brackets */
    bool unbracketed;
    /* a backward bracket ended since the step */
    bool any_backward;
    /* the norm was asked for, so the step's gradients are reduced */
    bool complete;
    /* all parameters are gathered elsewhere, so brackets need nothing */
    bool all;

    int32_t n_trainable;
    /* counts releases of gradient slots: the slot that has been free for longest is used first */
    uint64_t clock;

    /* of all calls so far */
    uint64_t hash;
    struct zr_core_counts counts;

    /* The order has n_order calls: `period` calls again and again. A period is a micro-batch, or the whole
     * step. pos is the position of the next call, base that of the first call in its period. */
    int64_t n_order, pos, base;
    int32_t period;
    /* begins of sharded units in a period; number of the first of them at or after pos */
    int32_t n_begins, ahead;
    /* this step has left the order; the order's micro-batches differ in their backward brackets */
    bool strayed, uneven;
    /* as in the spec */
    bool order_of_step, in_stages;

    /* calls of this step; the first `cap` of them are recorded */
    int64_t n_rec;
    /* room for calls, in the order and in the recording */
    int32_t cap;
    /* brackets of the order take slots of the sizes in bracket_sizes; no_room: a bracket found no size */
    bool sized, no_room;

    /* leaves of the tree over slots; slots without the reserved one */
    int32_t n_leaves, n_small;

    uint32_t units_at, pslots_at, gslots_at, order_at, rec_at, next_at, begins_at, by_size_at, keys_at,
        bracket_sizes_at, taken_at, total;
};

/* A unit of the model. */
struct unit {
    int64_t param_bytes, grad_bytes;
    /* the parameter slot that it is in; -1: none, or it is resident */
    int32_t pslot;
    /* the gradient slot of its open or last backward bracket; -1: it needs none */
    int32_t gslot;
    /* contributions reduced this step */
    int32_t n_contrib;
    /* backward brackets ended this step */
    int32_t n_bwd;
    /* backward brackets in a micro-batch, as declared; at least 1 */
    int32_t uses;
    /* position of its first begin in the period; -1: it has none */
    int32_t first_use;
    /* sharded units: position of its next begin in the order; NEVER: it has none */
    int64_t next_use;
    /* the first slot, in order of size, that can hold it */
    int32_t fits;
    /* for zr_core_place_brackets: its open brackets, and the size of their slot */
    int32_t n_placed, placed;
    /* for core_order.c: backward brackets in a micro-batch */
    int32_t n_each;
    /* for mark_micro_batches: backward brackets in the order so far */
    int32_t n_passed;
    /* sums in use */
    uint8_t depth;
    bool resident, trainable, sum_in_place, grad_home;
    /* its open brackets, by enum zero_phase */
    bool open[ZERO_BACKWARD_WEIGHT + 1];
    /* it has been gathered once; a resident unit is then gathered after each update */
    bool gathered;
    /* the model has bracketed its forward, its backward: a model brackets all uses or none */
    bool used_fwd, used_bwd;
    /* its gradient has contributions that are not reduced yet */
    bool pending;
    /* grad_home: the gradient was reduced, and must be zeroed before it is added to */
    bool dirty;
};

/* A parameter slot. */
struct pslot {
    int64_t bytes;
    /* -1: the slot is empty */
    int32_t unit;
    /* open brackets of the unit, which keep it here */
    int32_t pins;
    /* position in the order of size, then of index */
    int32_t rank;
};

/* A gradient slot. */
struct gslot {
    int64_t bytes;
    /* -1: the slot is free */
    int32_t unit;
    /* `clock` when it was freed last */
    uint64_t released;
};

/* If call i of the period begins unit u, next_begin[i] is the position of the next begin of u in the period,
 * or -1. If it ends a bracket, next_begin[i] is 1 if that ends a micro-batch, else 0. */

static inline struct unit *units(const struct zr_core *c)
{
    return (struct unit *)((char *)c + c->units_at);
}

static inline struct pslot *pslots(const struct zr_core *c)
{
    return (struct pslot *)((char *)c + c->pslots_at);
}

static inline struct gslot *gslots(const struct zr_core *c)
{
    return (struct gslot *)((char *)c + c->gslots_at);
}

static inline struct zero_call *order(const struct zr_core *c)
{
    return (struct zero_call *)((char *)c + c->order_at);
}

static inline struct zero_call *recorded(const struct zr_core *c)
{
    return (struct zero_call *)((char *)c + c->rec_at);
}

static inline int32_t *next_begin(const struct zr_core *c)
{
    return (int32_t *)((char *)c + c->next_at);
}

/* Positions in the period of the begins of sharded units. */
static inline int32_t *begins(const struct zr_core *c)
{
    return (int32_t *)((char *)c + c->begins_at);
}

/* Slots in the order of size. */
static inline int32_t *by_size(const struct zr_core *c)
{
    return (int32_t *)((char *)c + c->by_size_at);
}

/* A binary tree over the slots in the order of size: node 1 is the root, the leaves begin at n_leaves. Each
 * node has the key of the best slot to be filled anew below it. Node 0 stands for none. */
static inline uint64_t *keys(const struct zr_core *c)
{
    return (uint64_t *)((char *)c + c->keys_at);
}

/* If `sized`, and call i of the period begins a sharded unit: the size of the slot that it takes. A size is
 * the position, in the order of size, of the first slot that has it. */
static inline int32_t *bracket_sizes(const struct zr_core *c)
{
    return (int32_t *)((char *)c + c->bracket_sizes_at);
}

/* For zr_core_place_brackets: how many slots of a size are taken, by the first slot of the size. */
static inline int32_t *taken(const struct zr_core *c)
{
    return (int32_t *)((char *)c + c->taken_at);
}

/* A range of slots in the order of size; the end is not in it. */
struct zr_slot_range {
    int32_t first, end;
};

/* The open brackets of u that have its parameters. Each pins the slot. */
static inline int32_t n_holding(const struct unit *u)
{
    return u->open[ZERO_FORWARD] + u->open[ZERO_BACKWARD] + u->open[ZERO_BACKWARD_INPUT];
}

static inline bool has_open_bracket(const struct unit *u)
{
    return n_holding(u) || u->open[ZERO_BACKWARD_WEIGHT];
}

/* Whether the step has backward brackets. */
static inline bool is_bracketed(const struct zr_core *c)
{
    return c->any_backward || c->in_stages;
}

/* Appends an action whose other fields are zero. */
static inline struct zr_action *zr_core_emit(struct zr_action *out, int32_t *n, enum zr_action_kind kind,
                                             int32_t unit, int32_t slot)
{
    struct zr_action *a = &out[(*n)++];
    *a = (struct zr_action){.kind = (uint8_t)kind, .unit = unit, .slot = slot, .group_slot = -1};
    return a;
}

/* Appends an action that waits for the parameters of its unit. */
static inline void zr_core_emit_param(const struct zr_core *c, struct zr_action *out, int32_t *n,
                                      enum zr_action_kind kind, int32_t unit, int32_t slot)
{
    zr_core_emit(out, n, kind, unit, slot)->gathered = units(c)[unit].gathered;
}

/* ---- core.c ---- */

/* The most actions that one call can give. */
int32_t zr_core_most_actions(int32_t n_units);

/* Return ZERO_ERR_ORDER if a bracket is open, or while zero_gather_all holds all parameters. */
int zr_core_refuse_open(const struct zr_core *c, const char *call);
int zr_core_refuse_in_all(const char *call);
/* The backward brackets that the unit may have in a step. */
int64_t zr_core_most_brackets(const struct zr_core *c, const struct unit *u);

/* ---- core_valid.c ---- */

/* Whether the state is consistent between two calls. A slot has one unit, a unit has one slot, and pins are
 * open brackets. The tree over slots and the position in the order are right. For ZR_ASSERT. */
bool zr_core_valid(const struct zr_core *c);

/* ---- core_order.c ---- */

/* Words that the hash takes in for events that are not calls of the order. */
#define ZR_MICRO_WORD    (UINT64_C(1) << 40)
#define ZR_STEP_WORD     (UINT64_C(2) << 40)
#define ZR_SNAPSHOT_WORD (UINT64_C(3) << 40)
#define ZR_NORM_WORD     (UINT64_C(4) << 40)
#define ZR_DROP_WORD     (UINT64_C(5) << 40)
#define ZR_ALL_WORD      (UINT64_C(6) << 40)
#define ZR_RELEASE_WORD  (UINT64_C(7) << 40)
#define ZR_EVAL_WORD     (UINT64_C(8) << 40)
#define ZR_ACCUM_WORD    (UINT64_C(9) << 40)

void zr_core_note(struct zr_core *c, uint64_t word);
/* Derives next_begin, first_use and begins from the order, and starts it. */
void zr_core_index_order(struct zr_core *c);
/* Returns the position of the call in the order. -1: it is not there, or slots are not sized, so that it does
 * not matter. */
int64_t zr_core_find_call(const struct zr_core *c, const struct zero_call *call);
/* Copies a call without its padding, which stays zero in a core, because cores are compared by bytes. */
void zr_core_copy_call(struct zero_call *to, const struct zero_call *call);
/* Follows a bracket that opens or closes: advances in the order, and records the call. */
void zr_core_follow(struct zr_core *c, const struct zero_call *call);
/* Whether the call just passed ends a micro-batch of the order. */
bool zr_core_ended_micro_batch(const struct zr_core *c);
/* Whether the calls of this step do not show where a micro-batch ends. */
bool zr_core_is_lost(const struct zr_core *c);
/* Makes the calls of this step the order of the next. */
void zr_core_learn(struct zr_core *c);
/* Starts the next step: nothing is recorded yet, and the position is the order's first call. */
void zr_core_start_recording(struct zr_core *c);

/* ---- core_slots.c ---- */

/* Finds out whether open brackets of the order could leave one without a slot, and if so their sizes. */
void zr_core_place_brackets(struct zr_core *c);
/* Returns the slots that a bracket at that position of the order may take (-1: not in the order). These are
 * all that hold u, unless slots are sized, or one is reserved for larger units. */
struct zr_slot_range zr_core_slots_at(const struct zr_core *c, int64_t at, const struct unit *u);
/* Whether the slot is in the range. Slot -1 is in none. */
bool zr_core_in_range(const struct zr_core *c, struct zr_slot_range r, int32_t slot);

/* Returns the leaves of a tree over n_slots slots. */
int32_t zr_core_leaves(int32_t n_slots);
void zr_core_sort_slots(struct zr_core *c);
/* Updates the tree after a slot's key has changed: a bracket opened or closed, its unit changed, or the
 * unit's next use did. */
void zr_core_touch_slot(struct zr_core *c, int32_t slot);
/* Returns the first slot, in the order of size, that has at least `bytes`. */
int32_t zr_core_first_fit(const struct zr_core *c, int64_t bytes);
/* Picks a slot in r: the smallest empty one, or else the one whose unit is used last. A prefetch gives the
 * position `position` at which its unit is used, and takes only a slot whose unit is used later. A bracket
 * gives NEVER. Returns -1 if there is none. */
int32_t zr_core_pick_param(const struct zr_core *c, struct zr_slot_range r, int64_t position);
int32_t zr_core_pick_grad(const struct zr_core *c, int64_t bytes);
/* Opens (1) or closes (-1) a bracket on the slot. */
void zr_core_pin(struct zr_core *c, int32_t slot, int by);
/* Empties the slot. It is no valid copy of its unit any more. */
void zr_core_empty_slot(struct zr_core *c, int32_t slot);
/* Gathers a unit into a slot, or into its resident memory (-1). */
void zr_core_gather(struct zr_core *c, int32_t u, int32_t slot, struct zr_action *out, int32_t *n);
/* Gathers the next units of the order into slots that are used later or not at all. */
void zr_core_prefetch(struct zr_core *c, struct zr_action *out, int32_t *n);

/* ---- core_step.c ---- */

void zr_core_reduce(struct zr_core *c, int32_t u, int32_t slot, struct zr_action *out, int32_t *n);
void zr_core_return_grads(struct zr_core *c, struct zr_action *out, int32_t *n);
int zr_core_micro(struct zr_core *c, struct zr_action *out, int32_t *n);
int zr_core_norm(struct zr_core *c, const struct zr_core_event *ev, struct zr_action *out, int32_t *n);
int zr_core_drop(struct zr_core *c, struct zr_action *out, int32_t *n);
int zr_core_evaluated(struct zr_core *c, struct zr_action *out, int32_t *n);
int zr_core_end_step(struct zr_core *c, const struct zr_core_event *ev, struct zr_action *out, int32_t *n);

#endif
