/* SPDX-License-Identifier: Apache-2.0 */
/* walk.h: goes through a rank's row of a pipeline schedule, action by action. Messages between computations
 * move when the row comes to them. A computation gets the slots that it reads and writes once these may be
 * used, and returns them at its end.
 *
 * With one pipeline stage the row has no list of actions. It is forward and backward of each micro-batch in
 * turn, and nothing moves. For the model's thread only. Functions return 0 or a zero_err, with
 * zr_error_text(). */
#ifndef ZR_SHARD_ENGINE_WALK_H
#define ZR_SHARD_ENGINE_WALK_H

#include "shard/pipeline/pipeline.h"

#include <stdbool.h>
#include <stdint.h>

struct zr_engine;

/* The actions of this rank. */
struct zr_walk_row {
    /* (n) NULL: there is one pipeline stage */
    struct zr_pipe_action *actions;
    int64_t n;
};

struct zr_walk {
    /* pipeline stages of a rank; the nth is stage n * pp + pp_at of the whole model */
    int32_t per_rank;
    int32_t pp, pp_at, n_micro;
    /* the actions of a step and of an evaluation; which one is under way */
    struct zr_walk_row step, evaluation;
    bool evaluates;
    /* the next action of the row; whether zr_walk_next has given it, so that it is under way */
    int64_t at;
    bool open;
};

/* The computation that is under way, and its slots. NULL: no such slot. */
struct zr_walk_slots {
    struct zr_pipe_action action;
    void *in, *out;
    /* backward, or one of its parts: the slot that its forward read */
    void *kept;
};

/* Returns the pipeline stages of the whole model. */
int32_t zr_walk_stages(const struct zr_walk *w);
const struct zr_walk_row *zr_walk_row(const struct zr_walk *w);
struct zr_pipe_action zr_walk_action(const struct zr_walk *w, int64_t i);
/* Whether all actions of the step, or of the evaluation, are over. */
bool zr_walk_is_over(const struct zr_walk *w);

/* Starts the next action; none may be under way. *more: whether there was one. If not, all are over. */
int zr_walk_next(struct zr_engine *e, struct zr_walk *w, struct zr_walk_slots *out, bool *more);
/* Ends the action that is under way. Slots that it has written may be sent, and those that it has read may be
 * written again. */
int zr_walk_finish(struct zr_engine *e, struct zr_walk *w);
/* Moves the row's messages up to its next computation, or to its end. zr_walk_next begins with this. */
int zr_walk_move(struct zr_engine *e, struct zr_walk *w);

#endif
