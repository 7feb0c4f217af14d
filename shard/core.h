/* SPDX-License-Identifier: Apache-2.0 */
/* core.h: the schedule: what to gather, reduce, update and wait for, and when.
 *
 * A pure function of the calls the model makes: zr_core_step(core, call) -> actions. The core is one block of
 * plain data without pointers, so it can be copied, compared and hashed by bytes; it has no clock, thread,
 * allocation or view of the outside. Decisions depend only on the sequence of calls, never on timing, so
 * every rank that makes the same calls issues the same collectives in the same order.
 *
 * Parameters. A unit is *resident* (it has a place of its own: always at stages 0 to 2, at world 1, and where
 * the budget allows) or *sharded*: gathered into one of a few slots when it is needed, ahead of time where
 * the order of calls is known. A slot is taken from the unit whose next use is farthest away (Belady, 1966:
 * optimal when the order is known). Open brackets pin their slot; where the order holds so many open
 * that a small unit in a large slot could leave a large one without any, each of its brackets takes a slot of
 * the size that it has in every step, so that it finds one whatever came before.
 *
 * Gradients. They have memory of their own, whole (stages 0 and 1; elsewhere with grad_in_place, and of units
 * that are flagged resident), or slots (stages 2 and 3), and are reduced into an fp32 shard. The
 * contributions of one step are added in the shape of a binary counter when `n_sums` lets them, which makes
 * the sum over global micro-batch ids one fixed binary tree at every power-of-two world.
 * At stages 0 and 1 a gradient is the model's own buffer, which it may zero between micro-batches, brackets
 * or not. So gradients are returned where their micro-batch ends, when no reduction reads them any more.
 * One that is summed in place is itself the sum, and returned when the step has used it. It takes one
 * contribution in a step.
 *
 * The order declares how many backward brackets a unit has in a micro-batch: as many as it shows, and one if
 * it shows none. A step takes no more than these for each of its micro-batches, and may have fewer.
 *
 * A step updates every trainable unit that had a backward bracket in it, and leaves out the others. At stages
 * 0 and 1 a step may have no backward bracket at all. Then the gradients of all units are reduced as they
 * are, and all units are updated. Every step hands out its gradients zeroed there, so that one that is
 * written outside of a bracket is noticed.
 *
 * The order is that of one micro-batch, and repeats. Until the model's own order is known, it is the declared
 * one, and the core follows on demand. Each step is recorded. A step that leaves the order, or ends before
 * it, makes its own calls the next order. A step too long to record is known by its first micro-batch.
 * A pass of forward brackets alone is an evaluation: before a step's first backward bracket, the order's
 * first call may come again and begins the order anew. A step that is dropped teaches nothing. In a pipeline
 * the order is that of a whole step, in which micro-batches interleave. */
#ifndef ZR_SHARD_CORE_H
#define ZR_SHARD_CORE_H

#include "shard/options.h"

/* What the core has to know of a unit and of a slot. */
struct zr_core_unit_spec {
    /* what a slot must hold; unused for resident ones */
    int64_t param_bytes, grad_bytes;

    bool resident, trainable;
    /* its gradient has a place of its own at every stage, and is reduced where backward wrote it: that is the
     * only copy, from the end of its backward to the UPDATE */
    bool sum_in_place;

    /* its gradient has a place of its own and needs no slot: also where the model holds it, or it is summed
     * in place, or its unit is flagged resident. Without reduce_each it stays there until the last
     * micro-batch */
    bool grad_home;
};

struct zr_core_spec {
    int32_t n_units;
    const struct zr_core_unit_spec *units;
    int32_t n_param_slots, n_grad_slots;
    const int64_t *param_slot_bytes, *grad_slot_bytes;
    int32_t prefetch, grad_accum_steps;
    /* the most that zr_core_set_accum may be given; 0: grad_accum_steps */
    int32_t max_grad_accum_steps;
    /* the model has its gradients for good */
    bool model_holds;
    /* Groups of ranks: gradients have a second reduction, between groups. */
    bool outer;
    /* behind every contribution, through a partial slot; else once a step, in place */
    bool outer_each;
    /* an update is followed by a gather between groups: a rank updates its fine slice */
    bool outer_gathers;
    /* outer_each: sums of a group on their way, >= 1 */
    int32_t n_partial_slots;
    /* a resident unit is gathered after its update: a rank updates its slice of it */
    bool gathers_updated;
    /* reduce every contribution as it ends; else (all gradients have a home) once per grad_accum_steps */
    bool reduce_each;
    /* gradient shard buffers per unit, >= 1; more than 1: as many as a binary counter has digits */
    int32_t n_sums;
    /* the order was not declared: the largest parameter slot, if there is but one that large, is left to
     * units that fit no other, so that any two units can be open at once */
    bool reserve_largest;
    /* of one micro-batch, or of a step (order_of_step); balanced, units in range */
    const struct zr_call *order;

    int32_t n_order;
    /* A pipeline schedule says in which order micro-batches of a step go forward and backward. An evaluation
     * ends with ZR_EV_EVALUATED. */
    bool order_of_step;
    /* The model is in pipeline stages. Another rank may bracket a backward pass when this one does not. */
    bool in_stages;
};

enum zr_core_event_kind {
    ZR_EV_BEGIN = 1,
    ZR_EV_END,
    ZR_EV_MICRO,
    ZR_EV_STEP,
    ZR_EV_REWRITE,
    ZR_EV_SNAPSHOT,
    /* the step's gradients are complete: what is left of them is reduced, and the norm found */
    ZR_EV_NORM,
    /* the step is given up, with its gradients */
    ZR_EV_DROP,
    /* all parameters, to be read at any time until they are released */
    ZR_EV_GATHER_ALL,
    ZR_EV_RELEASE_ALL,
    /* a pipeline's evaluation is over: the step's order begins at its first call */
    ZR_EV_EVALUATED
};

struct zr_core_event {
    enum zr_core_event_kind kind;
    /* BEGIN, END, REWRITE (its parameters were written from outside); of GATHER_ALL, NORM and STEP what all
     * ranks must give alike, besides the call */
    int32_t unit;
    /* BEGIN, END; as of a zr_call */
    uint8_t backward, apart;
};

/* An action, in the order it has to be taken. Those of the first group are taken by the model's thread on the
 * compute stream; the others by the loop: GATHER, GATHER_OUTER and REDUCE_OUTER on a stream each, the rest on
 * the reduce stream, but for what becomes of sums between groups, which is on REDUCE_OUTER's. */
enum zr_action_kind {
    /* compute waits until the parameters of unit are in slot; point the model there */
    ZR_ACT_USE_PARAM = 1,
    /* the outermost bracket closed: compute is done with slot (record it) */
    ZR_ACT_HIDE_PARAM,
    /* compute waits for the parameters of unit; the model's pointers stay */
    ZR_ACT_WAIT_PARAM,
    /* compute waits until the gradient place may be written; if fill, zero it; point the model there */
    ZR_ACT_USE_GRAD,
    /* the contribution is complete: record it on the compute stream */
    ZR_ACT_HIDE_GRAD,
    /* compute waits until the reduction of unit, the last one issued, and with it all before it, have read
     * their gradients: every gradient that is not summed in place is the model's again. If that of unit is:
     * until it was used by its UPDATE, the last one of such a unit, and every gradient is */
    ZR_ACT_RETURN_GRADS,
    /* compute waits for the parameters of unit in slot and copies them to where all are; it is done with the
     * slot then (record it) */
    ZR_ACT_KEEP_PARAM,
    /* kinds from here on are carried out by the loop */
    ZR_ACT_FIRST_ISSUED,
    ZR_ACT_GATHER = ZR_ACT_FIRST_ISSUED,
    /* unit's inner shard is brought up to date from the fine slices of the other groups */
    ZR_ACT_GATHER_OUTER,
    /* the step is dropped: no sum in place is used, and each of those gradients is as free as after its
     * UPDATE */
    ZR_ACT_DROP_SUMS,
    /* gradient place -> sums[sum], adding if accumulate; then n_folds times: sums[sum-1] += sums[sum], sum--.
     * Of a unit that is summed in place: where it is */
    ZR_ACT_REDUCE,
    /* the sum of unit over a group (a->partial) -> sums[sum], adding if accumulate, then n_folds times as
     * above; without a partial slot in place. REDUCE before it only puts that sum there */
    ZR_ACT_REDUCE_OUTER,
    /* only the folds, from sums[sum] */
    ZR_ACT_FOLD,
    /* The unit is left out of the step: the next NORM does not count its gradient, and it has no UPDATE. */
    ZR_ACT_LEAVE_OUT,
    /* all gradients are reduced: norm, clip factor, agreement over ranks */
    ZR_ACT_NORM,
    /* optimizer on unit's shard (stage 0: on all of it) */
    ZR_ACT_UPDATE,
    /* copies this rank's shards and states, as the last UPDATE left them */
    ZR_ACT_SNAPSHOT
};

struct zr_action {
    uint8_t kind;
    bool fill, accumulate;
    uint8_t sum, n_folds;
    /* USE_GRAD, HIDE_GRAD: of a bracket, not of all units that have none */
    bool bracket;
    /* USE_GRAD with fill: what backward overwrites is not zeroed, for the next use is in a bracket */
    bool keeps_overwritten;
    /* HIDE_GRAD of a bracket: a reduction follows, which reads the gradient until it is given out by the
     * unit's next USE_GRAD, or by RETURN_GRADS */
    bool in_flight;
    /* USE_PARAM, WAIT_PARAM, KEEP_PARAM: what wrote the parameters last was a gather, else the unit's
     * update */
    bool gathered;

    int32_t unit;
    /* -1: the resident place */
    int32_t slot;

    /* REDUCE, REDUCE_OUTER: partial slot of a group's sum; -1: in place, or there are no groups */
    int32_t partial;
};

/* "gather", for messages. */
const char *zr_action_name(enum zr_action_kind kind);

struct zr_core_counts {
    /* begins and ends */
    int64_t n_calls;
    /* calls that were not the next in the order */
    int64_t n_strays;
    /* steps that made their own calls the order */
    int64_t n_replans;
};

struct zr_core;

/* Bytes of the core of this spec. */
size_t zr_core_bytes(const struct zr_core_spec *spec);
/* Makes a core in mem (zr_core_bytes, 16-byte aligned). Nothing is kept of spec. */
struct zr_core *zr_core_init(void *mem, const struct zr_core_spec *spec);

/* The most actions one call can need. */
int32_t zr_core_max_actions(const struct zr_core_spec *spec);

/* Takes one call. 0 with *n_out actions in out, or ZR_ERR_ORDER / ZR_ERR_ARG / ZR_ERR_BUDGET with a message
 * and the core unchanged. */
int zr_core_step(struct zr_core *c, const struct zr_core_event *ev, struct zr_action *out, int32_t *n_out);

/* Between steps: the next ones have n micro-batches, in the order that is known of one. */
void zr_core_set_accum(struct zr_core *c, int32_t n);

/* A backward bracket of the unit has ended since the step; the step so far leaves the unit out. */
bool zr_core_has_bracket(const struct zr_core *c, int32_t unit);
bool zr_core_leaves_out(const struct zr_core *c, int32_t unit);

/* Of all calls so far: equal on ranks that made the same. */
uint64_t zr_core_hash(const struct zr_core *c);
struct zr_core_counts zr_core_counts(const struct zr_core *c);
/* A unit with an open bracket, or -1. */
int32_t zr_core_open_unit(const struct zr_core *c);
/* No micro-batch of a step has begun, as far as calls tell. */
bool zr_core_between_steps(const struct zr_core *c);
/* The model brackets the backward pass of every trainable unit, and none has ended since the step: there are
 * no gradients. */
bool zr_core_wrote_nothing(const struct zr_core *c);
/* A norm was asked for since the step: its gradients are complete. */
bool zr_core_complete(const struct zr_core *c);
/* A call as one word, for hashes: any two differ. */
uint64_t zr_core_call_word(const struct zr_call *call);
/* Going through the order leaves no bracket without a parameter slot. Else they may run out, as where an
 * order was not declared that holds several brackets open. */
bool zr_core_has_room(const struct zr_core *c);
/* All parameters were gathered, and not released. */
bool zr_core_holds_all(const struct zr_core *c);
/* The parameters of unit are gathered (or being gathered) in *slot (-1: resident). */
bool zr_core_present(const struct zr_core *c, int32_t unit, int32_t *slot);

/* For rehearsals of a declared order (plan_rehearse.c), between two micro-batches, with no bracket open. */

/* All that the choices to come depend on, beside the order: the unit in each parameter slot (-1: none), then
 * the gradient slots, the one free for longest first. out: n_param_slots + n_grad_slots numbers. */
void zr_core_contents(const struct zr_core *c, int32_t *out);
/* n_done micro-batches were made since the step, each by the order; goes on as if the n after them had been
 * made, and had left everything where it is now. */
void zr_core_skip(struct zr_core *c, int32_t n_done, int32_t n);

#endif
