/* SPDX-License-Identifier: Apache-2.0 */
/* core.h: the schedule core decides what to gather, reduce, update and wait for, and when.
 *
 * It is a pure function of the calls that the model makes: zr_core_take(core, call) -> actions. The core is
 * one block of plain data without pointers, so it can be copied, compared and hashed by bytes. It has no
 * clock, no thread and no allocation. Its decisions depend only on the sequence of calls, never on timing. So
 * all ranks that make the same calls issue the same collectives in the same order.
 *
 * Parameters. A *resident* unit has separate memory: always at stages 0 to 2 and on one rank, and where the
 * budget allows. Any other unit is *sharded*: it is gathered into one of a few slots when it is needed, ahead
 * of time where the order of calls is known. A slot is taken from the unit whose next use is farthest away
 * (Belady, 1966: optimal if the order is known). An open bracket pins its slot. Small units in large slots
 * could leave a large unit without one. If the order holds that many brackets open, each bracket takes a slot
 * of a fixed size in every step (zr_core_place_brackets).
 *
 * Gradients. A gradient has separate memory (grad_home) or a slot. It has separate memory at stages 0 and 1,
 * with grad_in_place, if it is itself the sum, and in units that ask to be resident. At stage 2 the gradients
 * of other units use slots, although their parameters are resident. A gradient is reduced into a shard of
 * sums. The contributions of a step are added like a binary counter, as far as `n_sums` allows. So the sum
 * over global micro-batch numbers is one fixed binary tree at every power-of-two world. At stages 0 and 1 the
 * gradient is the model's own buffer, which the model may zero between micro-batches. Therefore it is
 * returned at the end of its micro-batch, once no reduction reads it any more. A gradient that is summed in
 * place is itself the sum. It is returned when the step has used it, and takes one contribution a step.
 *
 * Brackets. The order declares how many backward brackets a unit has in a micro-batch: as many as it shows,
 * and one if it shows none. A step may have fewer for each of its micro-batches, and no more. A step updates
 * every trainable unit that had a backward bracket in it, and leaves out the others. At stages 0 and 1 a step
 * may have no backward bracket at all. Then it reduces the gradients of all units as they are, and updates
 * all units. After each step gradients are zero again, so a write outside brackets is noticed.
 *
 * Order. The order is that of one micro-batch, and repeats. Until the model's own order is known, it is the
 * declared one. Each step is recorded. A step that leaves the order, or ends before it, makes its own calls
 * the next order. A step too long to record is known by its first micro-batch. A pass of forward brackets
 * alone is an evaluation: before a step's first backward bracket, the order's first call may come again and
 * begins the order anew. A step that is dropped teaches nothing. In a pipeline the order is that of a whole
 * step, in which micro-batches interleave. */
#ifndef ZR_SHARD_CORE_H
#define ZR_SHARD_CORE_H

#include "shard/options.h"

/* A unit, as the core sees it. */
struct zr_core_unit_spec {
    /* bytes that a slot must hold; param_bytes is unused if resident, grad_bytes if grad_home */
    int64_t param_bytes, grad_bytes;

    bool resident, trainable;
    /* its gradient is reduced where backward wrote it, which is the only copy until the UPDATE */
    bool sum_in_place;

    /* its gradient has separate memory and needs no slot; without reduce_each it stays there until it is
     * reduced, as reduce_each says */
    bool grad_home;
};

/* The units, slots and order that a core is made for. */
struct zr_core_spec {
    int32_t n_units;
    const struct zr_core_unit_spec *units;
    int32_t n_param_slots, n_grad_slots;
    const int64_t *param_slot_bytes, *grad_slot_bytes;
    int32_t prefetch, grad_accum_steps;
    /* the most that zr_core_set_accum may be given; 0: grad_accum_steps */
    int32_t max_grad_accum_steps;
    /* stages 0 and 1: the model has its gradients all the time */
    bool model_holds;
    /* HSDP and HFSDP: gradients have a second reduction, between shard groups */
    bool outer;
    /* that reduction follows every contribution, through a group slot; else once a step, in place */
    bool outer_each;
    /* HFSDP: a rank updates its fine slice, so a gather between groups follows */
    bool outer_gathers;
    /* outer_each: group slots, which hold a group's sums on their way; >= 1 */
    int32_t n_group_slots;
    /* stages 1 and 2: a rank updates its slice of a resident unit, so a gather follows */
    bool gathers_updated;
    /* Reduce every contribution when it ends. Otherwise all gradients have separate memory, and a unit's
     * gradient is reduced after each grad_accum_steps of its backward brackets. With one bracket per
     * micro-batch that is once a step; with several, as often as there are brackets in a micro-batch. The end
     * of the step reduces the rest. */
    bool reduce_each;
    /* gradient shards per unit, >= 1; if more than 1, as many as a binary counter has digits */
    int32_t n_sums;
    /* the order was not declared: a single largest parameter slot is left to units that fit no other, so that
     * any two units can be open at once */
    bool reserve_largest;
    /* calls of one micro-batch, or of a step (order_of_step): balanced, with units in range */
    const struct zero_call *order;

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
    /* the step's gradients are complete: reduces the rest, and finds the norm */
    ZR_EV_NORM,
    /* gives the step up, with its gradients */
    ZR_EV_DROP,
    /* gathers all parameters, to be read until they are released */
    ZR_EV_GATHER_ALL,
    ZR_EV_RELEASE_ALL,
    /* a pipeline's evaluation is over: the step's order begins at its first call */
    ZR_EV_EVALUATED
};

struct zr_core_event {
    enum zr_core_event_kind kind;
    /* BEGIN, END, REWRITE: the unit (REWRITE: its parameters were written from outside). GATHER_ALL, NORM,
     * STEP: a number that must be equal on all ranks, for the hash of calls. */
    int32_t unit;
    /* BEGIN, END; otherwise 0 */
    enum zero_phase phase;
};

/* Kinds of actions. They are taken in the order in which the core gives them. The model's thread takes the
 * first group, on the compute stream. It also sums partial gradients over tp before a REDUCE. The loop's
 * thread takes the others: GATHER, GATHER_OUTER and REDUCE_OUTER on a stream each, the rest on the reduce
 * stream. What follows a REDUCE_OUTER with its sum is on its stream. */
enum zr_action_kind {
    /* compute waits until the parameters of unit are in slot; point the model there */
    ZR_ACT_USE_PARAM = 1,
    /* the outermost bracket has closed: record that compute is done with slot */
    ZR_ACT_HIDE_PARAM,
    /* compute waits for the parameters of unit; the model's pointers do not change */
    ZR_ACT_WAIT_PARAM,
    /* compute waits until the gradient's memory may be written; zero it if fill; point the model there */
    ZR_ACT_USE_GRAD,
    /* the contribution is complete: record it on the compute stream */
    ZR_ACT_HIDE_GRAD,
    /* compute waits until the last reduction issued, which is unit's, has read its gradient: then every
     * gradient that is not summed in place is the model's again. If unit is summed in place, compute waits
     * for its UPDATE, which is the last of such a unit: then all gradients are the model's again */
    ZR_ACT_RETURN_GRADS,
    /* compute waits for the parameters of unit in slot and copies them to where all are gathered; record that
     * it is done with the slot */
    ZR_ACT_KEEP_PARAM,
    /* from here on: jobs */
    ZR_ACT_FIRST_ISSUED,
    ZR_ACT_GATHER = ZR_ACT_FIRST_ISSUED,
    /* gathers unit's inner slice from the fine slices of the groups */
    ZR_ACT_GATHER_OUTER,
    /* the step is dropped: sums in place are not used, and their gradients are free as after an UPDATE */
    ZR_ACT_DROP_SUMS,
    /* reduces the gradient to sums[sum], adding if accumulate; then n_folds times: sums[sum-1] += sums[sum],
     * sum--. A unit that is summed in place stays where it is */
    ZR_ACT_REDUCE,
    /* reduces unit's sum over a group, in the group slot, to sums[sum] as above; without a group slot, in
     * place. The REDUCE before it only makes the group's sum */
    ZR_ACT_REDUCE_OUTER,
    /* only the folds, from sums[sum] */
    ZR_ACT_FOLD,
    /* the step leaves unit out: the next NORM does not count its gradient, and it has no UPDATE */
    ZR_ACT_LEAVE_OUT,
    /* all gradients are reduced: norm, clip factor, agreement over ranks */
    ZR_ACT_NORM,
    /* the optimizer on unit's shard (stage 0: on the whole unit) */
    ZR_ACT_UPDATE,
    /* copies this rank's shards and states as the last UPDATE left them */
    ZR_ACT_SNAPSHOT
};

struct zr_action {
    uint8_t kind;
    bool fill, accumulate;
    uint8_t sum, n_folds;
    /* USE_GRAD, HIDE_GRAD: for a bracket, and not for all units at once */
    bool bracket;
    /* USE_GRAD with fill: do not zero what backward overwrites, as the next use is in a bracket */
    bool keeps_overwritten;
    /* HIDE_GRAD of a bracket: a reduction follows, which reads the gradient until the unit's next USE_GRAD or
     * until RETURN_GRADS */
    bool in_flight;
    /* USE_PARAM, WAIT_PARAM, KEEP_PARAM: the parameters were written last by a gather, else by the unit's
     * update */
    bool gathered;

    int32_t unit;
    /* -1: the unit's own memory */
    int32_t slot;

    /* REDUCE, REDUCE_OUTER: the group slot; -1: in place, or there are no groups */
    int32_t group_slot;

    /* for the action that adds a contribution to sums: how many of the unit this step added before. FOLD: how
     * many it added in all */
    int32_t contribution;
};

/* The action's name for messages, such as "gather". */
const char *zr_action_name(enum zr_action_kind kind);

struct zr_core_counts {
    /* begins and ends */
    int64_t n_calls;
    /* calls that left the order */
    int64_t n_strays;
    /* steps that made their own calls the order */
    int64_t n_replans;
};

struct zr_core;

/* Returns the bytes of a core. */
size_t zr_core_bytes(const struct zr_core_spec *spec);
/* Makes a core in mem, which has zr_core_bytes and is aligned to 16 bytes. spec may be freed afterwards. */
struct zr_core *zr_core_init(void *mem, const struct zr_core_spec *spec);

/* The most actions that one call can give. */
int32_t zr_core_max_actions(const struct zr_core_spec *spec);

/* Takes one call, and writes *n_out actions to out. On failure returns ZERO_ERR_ORDER, ZERO_ERR_ARG or
 * ZERO_ERR_BUDGET with a message, and the core is unchanged. */
int zr_core_take(struct zr_core *c, const struct zr_core_event *ev, struct zr_action *out, int32_t *n_out);

/* The next steps have n micro-batches, each in the known order. Between steps only. */
void zr_core_set_accum(struct zr_core *c, int32_t n);

/* Whether a backward bracket of the unit has ended since the step; whether the step, as it is now, leaves the
 * unit out. */
bool zr_core_has_bracket(const struct zr_core *c, int32_t unit);
bool zr_core_leaves_out(const struct zr_core *c, int32_t unit);

/* A hash of all calls so far, equal on ranks that made the same calls. */
uint64_t zr_core_hash(const struct zr_core *c);
struct zr_core_counts zr_core_counts(const struct zr_core *c);
/* Returns a unit with an open bracket, or -1. */
int32_t zr_core_open_unit(const struct zr_core *c);
/* Whether no micro-batch of a step has begun, as far as calls show. */
bool zr_core_between_steps(const struct zr_core *c);
/* Whether there are no gradients: the model brackets the backward pass of every trainable unit, and no such
 * bracket has ended since the step. */
bool zr_core_wrote_nothing(const struct zr_core *c);
/* Whether the norm was asked for since the step, which completes its gradients. */
bool zr_core_complete(const struct zr_core *c);
/* A call as a word for hashes. Different calls have different words. */
uint64_t zr_core_call_word(const struct zero_call *call);
/* Whether each bracket of the order finds a parameter slot. */
bool zr_core_has_room(const struct zr_core *c);
/* Whether all parameters are gathered, and not released. */
bool zr_core_holds_all(const struct zr_core *c);
/* Whether the parameters of unit are gathered, or being gathered, in *slot (-1: resident). */
bool zr_core_present(const struct zr_core *c, int32_t unit, int32_t *slot);

/* For plan_rehearse.c, between two micro-batches of a declared order, with no bracket open. */

/* Writes what the next decisions depend on, besides the order. First comes the unit in each parameter slot
 * (-1: none), then the gradient slots, the one free for longest first. out has n_param_slots + n_grad_slots
 * numbers. */
void zr_core_contents(const struct zr_core *c, int32_t *out);
/* Skips n micro-batches, as if they had been made and had left everything where it is. n_done were made since
 * the step, each by the order. */
void zr_core_skip(struct zr_core *c, int32_t n_done, int32_t n);

#endif
