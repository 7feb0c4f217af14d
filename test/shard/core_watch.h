/* SPDX-License-Identifier: Apache-2.0 */
/* core_watch.h: checks the schedule core. It makes the calls, predicts which are refused, and carries out
 * the actions on a model of its memory. The model knows which copy is in which slot, and what each
 * gradient place and sum holds. It fails the test at the first action that reads stale data, overwrites
 * data in use, or loses or doubles a gradient. */
#ifndef ZR_TEST_SHARD_CORE_WATCH_H
#define ZR_TEST_SHARD_CORE_WATCH_H

#include "shard/core.h"
#include "test/shard/random_model.h"

/* The contents of a gradient place or a sum, as text. "" is unwritten memory, "z" is zeros, and
 * "((0+1)+2)" gives the contributions and the shape of their sum. */
#define SUM_TEXT 1024

struct watch_unit {
    /* by enum zero_phase; used: since the step, without the gradient and with it */
    bool open[ZERO_BACKWARD_WEIGHT + 1], used[2];
    /* its resident parameters are up to date */
    bool home_ready;
    /* stages 0 and 1: the model never brackets it */
    bool no_brackets;
    /* a backward bracket of it has begun at any time since watch_open */
    bool has_begun_backward;

    bool updated;
    /* the next norm is without it */
    bool left_out;
    /* it was gathered since its last update */
    bool gathered;
    /* backward brackets ended since the step */
    int32_t n_bwd;
    /* contributions the model made since the step */
    int32_t n_contrib;
    /* its resident gradient is being reduced, and was not returned yet */
    bool in_flight;
    /* the resident gradient has been reduced and not zeroed since */
    bool grad_reduced;
    /* the resident gradient */
    char grad[SUM_TEXT];
    /* for a unit that is summed in place, sum[0] is what its gradient holds after the reduce */
    char (*sum)[SUM_TEXT];
    /* with groups, without group slots: the sum over the group */
    char inner[SUM_TEXT];
    /* sum[0] has the sum over all groups; they gather it in place */
    bool outer_done, spread;
    /* the inner shard of its parameters is up to date */
    bool whole;
    /* reductions between groups since the step */
    int32_t n_outer;
    /* contributions that were added to its sums since the step */
    int32_t n_added;
    /* it is trainable, and a backward bracket of it has ended at any time since watch_open */
    bool has_ended_backward;
    /* its gradient is a sum in place that was not used yet */
    bool held;
    /* sum[0] as the last step had it */
    char last_sum[SUM_TEXT];
};

struct watch_slot {
    /* parameter slot: the unit gathered here last; gradient slot: the unit it was given to; -1: none */
    int32_t unit;
    /* parameter slot: gathered since the unit's last update */
    bool fresh;
    int32_t n_uses;
    /* gradient slot: the contribution is complete */
    bool hidden;
};

struct watch {
    struct zr_core_spec spec;
    /* a copy of the core that gets the same calls */
    struct zr_core *core, *copy;
    void *before;
    size_t bytes;
    struct zr_action *out, *copy_out;
    int32_t n_out, n_open, n_micro;
    /* open backward brackets; the unit reduced last of those being reduced, or -1 */
    int32_t n_open_bwd, last_reduced;
    /* of the units that are summed in place, the one updated last and not yet returned */
    int32_t last_in_place;
    struct watch_unit *unit;
    struct watch_slot *pslot, *gslot;
    struct watch_group_slot {
        /* -1: the slot is empty */
        int32_t unit;
        char text[SUM_TEXT];
    } group_slot[4];
    /* collective: the call is a step, a norm or drop before it, or the end of a micro-batch */
    bool normed, stepping, collective;
    /* the norm was requested */
    bool complete;
    /* all parameters are gathered */
    bool all;
    /* since the step: a backward of inputs has ended; a backward of a frozen unit has ended; zero_micro
     * has ended a micro-batch without brackets */
    bool inputs, frozen_backward, unbracketed;
    /* Counts since watch_open. */
    int64_t n_calls, n_gathers, n_demand_gathers, n_reduces, n_refused;
};

/* Copies spec, but not its arrays, which must outlive the watch. */
void watch_open(struct watch *w, const struct zr_core_spec *spec);
void watch_close(struct watch *w);

/* Makes a call and checks its actions. Returns 0, or the predicted error with the core unchanged. */
int watch_call(struct watch *w, enum zr_core_event_kind kind, int32_t unit, enum zero_phase phase);

/* Parses the next call of a script. Returns false at the end.
 *     "0(" "0)"  begin and end unit 0 in forward
 *     "0[" "0]"  in backward
 *     "0{" "0}"  in backward of inputs
 *     "0<" "0>"  in backward of weights
 *     "S"        a step
 *     "M"        the end of a micro-batch
 *     "N"        the norm
 *     "X"        the step is dropped
 *     "G" "R"    gather all, release all
 *     "W3"       unit 3 is rewritten */
bool watch_parse(const char **script, enum zr_core_event_kind *kind, int32_t *unit, enum zero_phase *phase);
/* Makes the calls of a script, which must all succeed. "!" after a call says that it returns gradients. If
 * a script has any "!", calls without it must not return gradients. */
void watch_run(struct watch *w, const char *script);

/* Draws a random step without its zero_step: forward and backward passes with nesting, overlap,
 * recomputation, unused units and split backwards. Returns the number of calls, at most 8 * n_units + 16. */
int32_t random_calls(struct random_source *r, int32_t n_units, struct zero_call *out);

/* Returns how many sums a binary counter needs for n contributions, by counting. */
int32_t sums_for(int32_t n);
/* sum(lo, n) = sum(lo, h) + sum(lo + h, n - h), where h is the largest power of two below n. */
void tree_text(char *text, int32_t lo, int32_t n);

#endif
