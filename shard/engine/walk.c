/* SPDX-License-Identifier: Apache-2.0 */
/* walk.c: goes through a rank's row of a pipeline schedule, action by action. */
#include "shard/engine/walk.h"
#include "shard/engine/observer.h"

#include "shard/engine/engine.h"

/* ---- reading the row ---- */

int32_t zr_walk_stages(const struct zr_walk *w)
{
    return w->pp * w->per_rank;
}

const struct zr_walk_row *zr_walk_row(const struct zr_walk *w)
{
    return w->evaluates ? &w->evaluation : &w->step;
}

struct zr_pipe_action zr_walk_action(const struct zr_walk *w, int64_t i)
{
    if (zr_walk_row(w)->actions)
        return zr_walk_row(w)->actions[i];
    bool backward = !w->evaluates && i % 2;
    return (struct zr_pipe_action){.kind = backward ? ZR_PIPE_BACKWARD : ZR_PIPE_FORWARD,
                                   .micro_batch = (int32_t)(w->evaluates ? i : i / 2)};
}

bool zr_walk_is_over(const struct zr_walk *w)
{
    return w->at == zr_walk_row(w)->n;
}

/* Messages between the action's pipeline stage and the next one, and between it and the previous one, in both
 * directions. */
static struct zr_pipe_message to_next(const struct zr_pipe_action *a, enum zr_pipe_way way)
{
    return (struct zr_pipe_message){.way = way, .edge = a->stage, .micro_batch = a->micro_batch};
}

static struct zr_pipe_message to_last(const struct zr_pipe_action *a, enum zr_pipe_way way)
{
    return (struct zr_pipe_message){.way = way, .edge = a->stage - 1, .micro_batch = a->micro_batch};
}

static struct zr_pipe_message message_of(const struct zr_pipe_action *a)
{
    bool onward = a->kind == ZR_PIPE_SEND_F || a->kind == ZR_PIPE_RECV_F;
    bool next = a->kind == ZR_PIPE_SEND_F || a->kind == ZR_PIPE_RECV_B;
    enum zr_pipe_way way = onward ? ZR_PIPE_ONWARD : ZR_PIPE_BACK;
    return next ? to_next(a, way) : to_last(a, way);
}

/* Whether the action is a backward of weights in the first or the last pipeline stage, which may have tied
 * tensors. */
static bool ends_ties(const struct zr_walk *w, const struct zr_pipe_action *a)
{
    return zr_pipe_gives_weights(a->kind) && (a->stage == 0 || a->stage == zr_walk_stages(w) - 1);
}

/* ---- one action after the other ---- */

int zr_walk_move(struct zr_engine *e, struct zr_walk *w)
{
    int err = 0;
    for (; !err && !zr_walk_is_over(w); w->at++) {
        struct zr_pipe_action a = zr_walk_action(w, w->at);
        if (zr_pipe_computes(a.kind))
            break;
        struct zr_pipe_message m = message_of(&a);
        if (a.kind == ZR_PIPE_TIE)
            err = zr_engine_tied_move(e, a.micro_batch);
        else if (zr_pipe_sends(a.kind) || zr_pipe_receives(a.kind)) /* others follow from brackets */
            err = zr_engine_pipe_move(e, &m, zr_pipe_sends(a.kind));
    }
    return err;
}

/* Waits until the action may read and write its slots, and fills in their addresses. A backward of weights
 * gets the slots that the backward of inputs before it has read. */
static int give_slots(struct zr_engine *e, const struct zr_walk *w, struct zr_walk_slots *out)
{
    const struct zr_pipe_action *a = &out->action;
    bool backward = a->kind != ZR_PIPE_FORWARD, weights = a->kind == ZR_PIPE_BACKWARD_WEIGHT,
         has_next = a->stage + 1 < zr_walk_stages(w), has_last = a->stage > 0;
    struct zr_pipe_message next = to_next(a, backward ? ZR_PIPE_BACK : ZR_PIPE_ONWARD),
                           last = to_last(a, next.way), kept = to_last(a, ZR_PIPE_ONWARD);
    int err = has_next && !weights ? zr_engine_pipe_await(e, &next) : 0;
    if (!err && has_last && !weights)
        err = zr_engine_pipe_await(e, &last);
    if (!err && ends_ties(w, a))
        err = zr_engine_tied_begin(e, a->micro_batch);
    if (err)
        return err;
    void *at_next = has_next ? zr_engine_pipe_at(e, &next) : NULL,
         *at_last = has_last ? zr_engine_pipe_at(e, &last) : NULL;
    out->in = backward ? at_next : at_last;
    out->out = weights ? NULL : backward ? at_last : at_next;
    out->kept = backward && has_last ? zr_engine_pipe_at(e, &kept) : NULL;
    return 0;
}

int zr_walk_next(struct zr_engine *e, struct zr_walk *w, struct zr_walk_slots *out, bool *more)
{
    int err = zr_walk_move(e, w);
    *more = false;
    if (err || zr_walk_is_over(w))
        return err;
    *out = (struct zr_walk_slots){.action = zr_walk_action(w, w->at)};
    err = give_slots(e, w, out);
    if (!err)
        err = zr_observe_begin(
            e, &(struct zr_grant){
                   .kind = ZR_GRANT_SLOTS, .ready = true, .slots = out, .evaluates = w->evaluates});
    *more = w->open = !err;
    return err;
}

/* Reports the slots that the action has written, or needs no more. The input of a forward is free only if no
 * backward follows. What a backward of inputs has read is free when that of weights is over. */
static int take_slots(struct zr_engine *e, const struct zr_walk *w, const struct zr_pipe_action *a)
{
    bool backward = a->kind != ZR_PIPE_FORWARD, has_last = a->stage > 0,
         over = a->kind != ZR_PIPE_BACKWARD_INPUT, gives = a->kind != ZR_PIPE_BACKWARD_WEIGHT;
    const struct zr_pipe_message next = to_next(a, backward ? ZR_PIPE_BACK : ZR_PIPE_ONWARD),
                                 input = to_last(a, ZR_PIPE_ONWARD), back = to_last(a, ZR_PIPE_BACK);
    int err = ends_ties(w, a) ? zr_engine_tied_end(e) : 0;
    if (!err && a->stage + 1 < zr_walk_stages(w) && over)
        err = zr_engine_pipe_done(e, &next);
    if (!err && has_last && over && (backward || w->evaluates))
        err = zr_engine_pipe_done(e, &input);
    return !err && has_last && backward && gives ? zr_engine_pipe_done(e, &back) : err;
}

int zr_walk_finish(struct zr_engine *e, struct zr_walk *w)
{
    struct zr_pipe_action a = zr_walk_action(w, w->at);
    int err = zr_observe_end(e, &(struct zr_grant){.kind = ZR_GRANT_SLOTS});
    if (!err)
        err = take_slots(e, w, &a);
    if (err)
        return err;
    w->open = false;
    w->at++;
    return 0;
}
