/* SPDX-License-Identifier: Apache-2.0 */
/* core_watch.h: a witness of the schedule core. It makes the calls, predicts which are refused, carries the
 * actions out on a model of its own (which copy is in which slot, what each gradient place and sum holds) and
 * fails the test at the first action that would read what is stale, overwrite what is in use, or lose or
 * double a gradient. */
#ifndef ZR_TEST_SHARD_CORE_WATCH_H
#define ZR_TEST_SHARD_CORE_WATCH_H

#include "shard/core.h"
#include "test/shard/random_model.h"

/* What a gradient place or a sum holds, as text: "" nothing was written, "z" zeros, "((0+1)+2)" contributions
 * and the shape of their sum. */
#define SUM_TEXT 1024

/* What a bracket is of. Of a backward whose parts are apart: inputs, weights. */
enum watch_phase { WATCH_FORWARD, WATCH_BACKWARD, WATCH_INPUTS, WATCH_WEIGHTS, WATCH_APART = 2 };

struct watch_unit {
    /* by watch_phase; used: since the step, with parameters and with the gradient */
    bool open[4], used[2];
    /* its resident parameters are the newest */
    bool home_ready;
    /* stages 0 and 1: the model never brackets it */
    bool no_brackets;
    /* it was in a backward bracket once */
    bool ever_backward;

    bool updated;
    /* of the norm to come */
    bool left_out;
    /* it was gathered since its last update */
    bool gathered;
    /* backward brackets ended since the step */
    int32_t n_bwd;
    /* contributions the model made since the step */
    int32_t n_contrib;
    /* its resident gradient is being reduced, and was not returned since */
    bool in_flight;
    /* the resident gradient has been reduced and not zeroed since */
    bool grad_reduced;
    /* the resident gradient */
    char grad[SUM_TEXT];
    /* of a unit that is summed in place: sum[0] is what its gradient holds once reduced */
    char (*sum)[SUM_TEXT];
    /* with groups, without partial slots: the sum over the group */
    char inner[SUM_TEXT];
    /* it is in sum[0], over all groups; which gather it in place */
    bool outer_done, spread;
    /* the inner shard of its parameters is up to date */
    bool whole;
    /* reductions between groups since the step */
    int32_t n_outer;
    /* it has been bracketed in backward */
    bool ever_bwd;
    /* its gradient is a sum in place that was not used yet */
    bool held;
    /* sums[0] as the last step had it */
    char last_sum[SUM_TEXT];
};

struct watch_slot {
    /* param: gathered here last; grad: handed out to; -1: none */
    int32_t unit;
    /* param: gathered since the unit's last update */
    bool fresh;
    int32_t n_uses;
    /* grad: the contribution is complete */
    bool hidden;
};

struct watch {
    struct zr_core_spec spec;
    /* the twin gets the same calls */
    struct zr_core *core, *twin;
    void *before;
    size_t bytes;
    struct zr_action *out, *twin_out;
    int32_t n_out, n_open, n_micro;
    /* open backward brackets; the unit reduced last of those in flight, -1: none is */
    int32_t n_open_bwd, last_reduced;
    /* of the units that are summed in place, the one updated last and not returned */
    int32_t last_in_place;
    struct watch_unit *unit;
    struct watch_slot *pslot, *gslot;
    struct watch_partial {
        /* -1: the slot is empty */
        int32_t unit;
        char text[SUM_TEXT];
    } partial[4];
    /* collective: the call is a step, one that comes before it, or a micro-batch's end */
    bool normed, stepping, collective;
    /* the norm was asked for */
    bool complete;
    /* all parameters are gathered */
    bool all;
    /* a backward of inputs has ended since the step; one of a frozen unit; zero_micro has ended a micro-batch
     * without brackets */
    bool inputs, frozen_backward, unbracketed;
    /* Since watch_open. */
    int64_t n_calls, n_gathers, n_demand_gathers, n_reduces, n_refused;
};

/* Nothing is kept of spec but a copy; its arrays must outlive the watch. */
void watch_open(struct watch *w, const struct zr_core_spec *spec);
void watch_close(struct watch *w);

/* Makes a call and checks what follows; 0 or the error, which must be the one predicted, with the core
 * unchanged. */
int watch_call(struct watch *w, enum zr_core_event_kind kind, int32_t unit, int phase);

/* Parses calls: "0(" begins unit 0 in forward and "0)" ends it, "0[" and "0]" in backward, "0{" and
 * "0}" in backward of inputs, "0<" and "0>" of weights, "S" steps, "M"
 * ends a micro-batch, "N" asks for the norm, "X" drops the step, "G" gathers all, "R" releases them, "W3"
 * rewrites unit 3. False at the end. */
bool watch_parse(const char **script, enum zr_core_event_kind *kind, int32_t *unit, int *phase);
/* Makes the calls of a script; all must succeed. "!" behind a call: it must return gradients, and without it
 * must not, if the script has any "!" at all. */
void watch_run(struct watch *w, const char *script);

/* A random step without its zero_step: forward and backward passes with nesting, overlap, recomputation,
 * units left out and backwards apart. Returns the number of calls, at most 8 * n_units + 16. */
int32_t random_calls(struct random_source *r, int32_t n_units, struct zr_call *out);

/* The sums a binary counter needs for n contributions, found by counting. */
int32_t sums_for(int32_t n);
/* sum(lo, n) = sum(lo, h) + sum(lo + h, n - h) with h the largest power of two below n. */
void tree_text(char *text, int32_t lo, int32_t n);

#endif
