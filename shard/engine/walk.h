/* SPDX-License-Identifier: Apache-2.0 */
/* walk.h: a rank's row of a pipeline schedule, action by action. Messages between computations move as
 * the row comes to them; a computation is given the slots that it reads and writes once they may be read and
 * written, and gives them back at its end.
 *
 * With one stage in all a row has no list of actions: it is forward and backward of each micro-batch in turn,
 * and nothing moves. Of the model's thread alone. Functions return 0 or a zr_err, with zr_error_text(). */
#ifndef ZR_SHARD_ENGINE_WALK_H
#define ZR_SHARD_ENGINE_WALK_H

#include "shard/pipeline/pipeline.h"

#include <stdbool.h>
#include <stdint.h>

struct zr_engine;

/* What this rank does. */
struct zr_walk_row {
    /* (n); NULL: there is one stage */
    struct zr_pipe_action *actions;
    int64_t n;
};

struct zr_walk {
    /* stages of a rank, of which the nth is stage n * pp + pp_at of the whole model */
    int32_t per_rank;
    int32_t pp, pp_at, n_micro;
    /* in a step, and in an evaluation, which is under way */
    struct zr_walk_row step, evaluation;
    bool evaluates;
    /* the next action of the row; it is under way: zr_walk_next has given it */
    int64_t at;
    bool open;
};

/* A computation that is under way, and its slots; NULL: it has none. */
struct zr_walk_given {
    struct zr_pipe_action action;
    void *in, *out;
    /* backward, of inputs and of weights: what its forward was given */
    void *kept;
};

/* Stages of the whole model. */
int32_t zr_walk_stages(const struct zr_walk *w);
const struct zr_walk_row *zr_walk_row(const struct zr_walk *w);
struct zr_pipe_action zr_walk_action(const struct zr_walk *w, int64_t i);
/* All actions of the step, or of the evaluation, are over. */
bool zr_walk_is_over(const struct zr_walk *w);

/* No action is under way. *more: there is one, which is now under way; else all are over. */
int zr_walk_next(struct zr_engine *e, struct zr_walk *w, struct zr_walk_given *out, bool *more);
/* Ends the action that is under way: what it has written may move, what it has read may be written again. */
int zr_walk_finish(struct zr_engine *e, struct zr_walk *w);
/* The row's messages up to its next computation, or its end. zr_walk_next begins with it. */
int zr_walk_move(struct zr_engine *e, struct zr_walk *w);

#endif
