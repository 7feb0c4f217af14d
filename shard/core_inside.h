/* SPDX-License-Identifier: Apache-2.0 */
/* core_inside.h: the core's state, and the functions that its files call of each other: core.c (the calls),
 * core_order.c (which call comes next), core_slots.c (which unit lies in which slot) and core_step.c
 * (gradients, and the end of a step). No other file includes it, but for tests. */
#ifndef ZR_SHARD_CORE_INSIDE_H
#define ZR_SHARD_CORE_INSIDE_H

#include "shard/core.h"
#include "shard/layout.h"

#define NEVER INT64_MAX

/* Blocks follow the header in one allocation; offsets, not pointers, so that the whole is plain data. */
struct zr_core {
    int32_t n_units, n_pslots, n_gslots, prefetch, accum, n_sums;
    /* units that need slots */
    int32_t n_sharded;

    bool model_holds, gathers_updated, reduce_each;
    bool outer, outer_each, outer_gathers;
    int32_t n_partial_slots, next_partial;
    /* bytes of the one largest parameter slot when it is kept for units that need it, else 0 */
    int64_t reserved;
    /* bytes of the largest slot but that one */
    int64_t second;

    /* open brackets */
    int32_t n_open;
    /* open brackets of backward */
    int32_t n_open_bwd;
    /* resident gradients are being reduced since they were last returned, this unit's last; -1: none are */
    int32_t last_reduced;
    /* zero_micro calls since the step */
    int32_t n_micro;
    /* one of them reduced gradients that had no bracket */
    bool unbracketed;
    /* a backward bracket ended since the step */
    bool any_backward;
    /* the step's gradients are reduced, and its norm was asked for */
    bool complete;
    /* every parameter is gathered elsewhere; brackets need nothing */
    bool all;

    int32_t n_trainable;
    /* counts grants and releases of gradient slots: the oldest release is reused first */
    uint64_t clock;

    uint64_t hash;
    struct zr_core_counts counts;

    /* The order being followed: `period` calls (a micro-batch, where micro-batches are alike) again and
     * again, n_order in all. pos: the call expected next, base: where its period starts. */
    int64_t n_order, pos, base;
    int32_t period;
    /* begins of sharded units in a period; the first of them at or after pos */
    int32_t n_begins, ahead;
    /* this step's calls left the order; the order's backward passes are not as many for every micro-batch */
    bool strayed, uneven;
    /* as in the spec */
    bool order_of_step, in_stages;

    /* calls of this step; the first `cap` of them are recorded */
    int64_t n_rec;
    /* room for calls, in the order and in the recording */
    int32_t cap;
    /* brackets of the order take slots of the sizes in places; no_room: some found none, so there are none */
    bool sized, no_room;

    /* of the tree over slots; slots that are not the reserved one */
    int32_t n_leaves, n_small;

    uint32_t units_at, pslots_at, gslots_at, order_at, rec_at, next_at, begins_at, by_size_at, keys_at,
        places_at, taken_at, total;
};

struct unit {
    int64_t param_bytes, grad_bytes;
    /* parameter slot that holds it; -1: none does, or it is resident */
    int32_t pslot;
    /* gradient slot of its backward bracket, open or last; -1: it needs none */
    int32_t gslot;
    /* contributions reduced this step */
    int32_t n_contrib;
    /* backward brackets ended this step */
    int32_t n_bwd;
    /* backward brackets in a micro-batch, as declared; at least 1 */
    int32_t uses;
    /* position in the period of its first begin; -1: it has none */
    int32_t first_use;
    /* sharded units: position in the order of its next begin; NEVER: it has none */
    int64_t next_use;
    /* the first slot, in order of size, that can hold it */
    int32_t fits;
    /* of zr_core_place_brackets alone: its open brackets, and the size of the slot that they are in */
    int32_t n_placed, placed;
    /* backward passes in each micro-batch of the order */
    int32_t n_each;
    /* backward passes in the order so far; of mark_micro_batches alone */
    int32_t n_passed;
    /* sums in use */
    uint8_t depth;
    bool resident, trainable, sum_in_place, grad_home;
    /* its open brackets; apart: of a backward's inputs alone, and of its weights alone */
    bool open_fwd, open_bwd, open_inputs, open_weights;
    /* it has been gathered once, so it is gathered after each update */
    bool gathered;
    /* the model has bracketed it once: it brackets every use, or none */
    bool used_fwd, used_bwd;
    /* its resident gradient holds something not yet reduced */
    bool pending;
    /* its resident gradient was reduced and must be zeroed before it is added to */
    bool dirty;
};

struct pslot {
    int64_t bytes;
    /* -1: the slot is empty */
    int32_t unit;
    int32_t pins;
    /* place in the order of size; equal ones by index */
    int32_t rank;
};

struct gslot {
    int64_t bytes;
    /* -1: the slot is free */
    int32_t unit;
    uint64_t released;
};

/* Position i of the period begins unit u: next[i] is the next begin of u in it, or -1. It ends a bracket:
 * next[i] is 1 if that ends a micro-batch, else 0. */

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

static inline struct zr_call *order(const struct zr_core *c)
{
    return (struct zr_call *)((char *)c + c->order_at);
}

static inline struct zr_call *recorded(const struct zr_core *c)
{
    return (struct zr_call *)((char *)c + c->rec_at);
}

static inline int32_t *next_begin(const struct zr_core *c)
{
    return (int32_t *)((char *)c + c->next_at);
}

/* In-period positions of the begins of sharded units. */
static inline int32_t *begins(const struct zr_core *c)
{
    return (int32_t *)((char *)c + c->begins_at);
}

/* The slot of a rank by size. */
static inline int32_t *by_size(const struct zr_core *c)
{
    return (int32_t *)((char *)c + c->by_size_at);
}

/* A binary tree over the slots by size, node 1 its root, leaves from n_leaves on: how good the best slot
 * below a node is to be filled anew. Node 0 is none. */
static inline uint64_t *keys(const struct zr_core *c)
{
    return (uint64_t *)((char *)c + c->keys_at);
}

/* Position i of the period begins a sharded unit: the size of the slot that it takes, as the first slot of
 * that size in the order of size. Where `sized`. */
static inline int32_t *places(const struct zr_core *c)
{
    return (int32_t *)((char *)c + c->places_at);
}

/* Slots of a size that are taken, by the first of them; of zr_core_place_brackets alone. */
static inline int32_t *taken(const struct zr_core *c)
{
    return (int32_t *)((char *)c + c->taken_at);
}

/* Slots in the order of size, from the first to the one before the end. */
struct zr_slot_range {
    int32_t first, end;
};

/* Open brackets of u that hold its parameters: each pins the slot. */
static inline int32_t n_holding(const struct unit *u)
{
    return u->open_fwd + u->open_bwd + u->open_inputs;
}

static inline bool has_open_bracket(const struct unit *u)
{
    return n_holding(u) || u->open_weights;
}

/* The step is one of backward brackets. */
static inline bool is_bracketed(const struct zr_core *c)
{
    return c->any_backward || c->in_stages;
}

/* Appends an action, whose other fields are zero. */
static inline struct zr_action *zr_core_emit(struct zr_action *out, int32_t *n, enum zr_action_kind kind,
                                             int32_t unit, int32_t slot)
{
    struct zr_action *a = &out[(*n)++];
    *a = (struct zr_action){.kind = (uint8_t)kind, .unit = unit, .slot = slot, .partial = -1};
    return a;
}

/* Of an action that waits for the parameters of its unit. */
static inline void zr_core_emit_param(const struct zr_core *c, struct zr_action *out, int32_t *n,
                                      enum zr_action_kind kind, int32_t unit, int32_t slot)
{
    zr_core_emit(out, n, kind, unit, slot)->gathered = units(c)[unit].gathered;
}

/* ---- core.c ---- */

/* The most actions that one call can give. */
int32_t zr_core_most_actions(int32_t n_units);

/* Refuses a call that is made with a bracket open, or while zero_gather_all holds all parameters. */
int zr_core_refuse_open(const struct zr_core *c, const char *call);
int zr_core_refuse_in_all(const char *call);
/* The backward brackets that the unit may have in a step. */
int64_t zr_core_most_brackets(const struct zr_core *c, const struct unit *u);

/* ---- core_valid.c ---- */

/* What holds between two calls: one unit a slot and one slot a unit, pins and open brackets alike, the tree
 * over the slots, the place in the order. For ZR_ASSERT. */
bool zr_core_valid(const struct zr_core *c);

/* ---- core_order.c ---- */

/* The words that the hash takes in: a call, or one of these, which are no call. */
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
/* Where in the order the next call is; -1: nowhere, or it does not matter, as no slots are sized. */
int64_t zr_core_find_call(const struct zr_core *c, const struct zr_call *call);
/* A bracket opens or closes: goes on in the order, and records the call. */
void zr_core_follow(struct zr_core *c, const struct zr_call *call);
/* The call just passed ends a micro-batch of the order. */
bool zr_core_ended_micro_batch(const struct zr_core *c);
/* The calls of this step do not tell where a micro-batch ends. */
bool zr_core_is_lost(const struct zr_core *c);
/* The calls of this step become the order of the next. */
void zr_core_learn(struct zr_core *c);
/* The next step begins: nothing of it is recorded yet, and its first call is the order's. */
void zr_core_start_recording(struct zr_core *c);

/* ---- core_slots.c ---- */

/* Finds out whether open brackets of the order could leave one without a slot, and if so their sizes. */
void zr_core_place_brackets(struct zr_core *c);
/* The slots that the bracket at that position of the order takes (-1: of one that is not in it): all that
 * hold u, unless slots are sized, or one is reserved for larger units. */
struct zr_slot_range zr_core_slots_at(const struct zr_core *c, int64_t at, const struct unit *u);
/* slot may be -1: in none. */
bool zr_core_in_range(const struct zr_core *c, struct zr_slot_range r, int32_t slot);

/* Leaves of a tree over so many slots. */
int32_t zr_core_leaves(int32_t n_slots);
void zr_core_sort_slots(struct zr_core *c);
/* A slot's key has changed: an open bracket holds it, a unit that is used then is in it, or none is. */
void zr_core_touch_slot(struct zr_core *c, int32_t slot);
/* Of the slots by size, the first of at least so many bytes. */
int32_t zr_core_first_fit(const struct zr_core *c, int64_t bytes);
/* One of the slots in r: an empty one, the smallest; else the one whose unit is used last, and for a
 * prefetch, which is wanted at that position of the order (NEVER: now), only if that is later. -1: none. */
int32_t zr_core_pick_param(const struct zr_core *c, struct zr_slot_range r, int64_t wanted);
int32_t zr_core_pick_grad(const struct zr_core *c, int64_t bytes);
/* Opens or closes a bracket on the slot. */
void zr_core_pin(struct zr_core *c, int32_t slot, int by);
/* What is in the slot is no copy of its unit any more. */
void zr_core_empty_slot(struct zr_core *c, int32_t slot);
/* unit to slot, or to its resident place (-1). */
void zr_core_gather(struct zr_core *c, int32_t u, int32_t slot, struct zr_action *out, int32_t *n);
/* Gathers the next units of the order into slots that are wanted later or not at all. */
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
