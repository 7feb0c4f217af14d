/* SPDX-License-Identifier: Apache-2.0 */
/* schedule.c: pipeline schedules, and the calls that follow them: zero_evaluate, zero_next, zero_finish.
 *
 * A schedule is made, or read from cfg.pipeline.schedule_file, and checked before anything runs
 * (shard/pipeline/). Each rank takes its row: the forward and backward actions that zero_next gives to the
 * program, and the messages between them, which the library sends. A rank has one pipeline stage or several.
 * Without a pipeline a row is forward and backward of each micro-batch in turn, and nothing is sent. */
#include "kernels/alloc.h"
#include "kernels/asserts.h"
#include "shard/engine/walk.h"
#include "shard/pipeline/pipeline.h"
#include "zero/context.h"

#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

struct zr_schedule {
    /* this rank's rows of a step and of an evaluation, and its position */
    struct zr_walk walk;
    /* hash of the rows of all ranks in cfg.pipeline.schedule_file; 0: there is no file */
    uint64_t file_hash;
    struct zr_pipe_room room;
    /* (n_order) the calls of a step */
    struct zero_call *order;
    int32_t n_order;
    /* (n_units) which of this rank's stages each unit belongs to */
    int32_t *stage_of;
    int32_t n_units;
};

/* The most calls of a step whose order is known from the first step on. */
#define MAX_CALLS (1 << 20)

/* ---- made with the plan ---- */

void zr_schedule_free(struct zr_schedule *s)
{
    if (!s)
        return;
    free(s->walk.step.actions);
    free(s->walk.evaluation.actions);
    free(s->order);
    free(s->stage_of);
    free(s);
}

static enum zr_pipeline_kind kind_of(const struct zr_config *c)
{
    static const enum zr_pipeline_kind kind[] = {[ZERO_SCHEDULE_1F1B] = ZR_1F1B,
                                                 [ZERO_SCHEDULE_GPIPE] = ZR_GPIPE,
                                                 [ZERO_SCHEDULE_INTERLEAVED] = ZR_INTERLEAVED,
                                                 [ZERO_SCHEDULE_ZERO_BUBBLE] = ZR_ZERO_BUBBLE};
    return kind[c->user.pipeline.schedule];
}

/* Returns the kind of schedule for evaluations, which a schedule file does not have. The interleaved schedule
 * cannot take any number of micro-batches that a file may have. GPipe can. */
static enum zr_pipeline_kind kind_of_evaluation(const struct zr_config *c, const struct zr_walk *w)
{
    if (!c->user.pipeline.schedule_file || w->per_rank == 1)
        return kind_of(c);
    return w->n_micro > w->pp && w->n_micro % (w->n_micro / w->pp) ? ZR_GPIPE : ZR_INTERLEAVED;
}

/* Returns which of this rank's stages the action belongs to. */
static int32_t stage_here(const struct zr_walk *w, const struct zr_pipe_action *a)
{
    return a->stage / w->pp;
}

/* Finds the stage of each unit from its tensors, which must agree. */
static int find_stages(struct zr_schedule *s, const struct zr_layout *l)
{
    s->n_units = l->n_units;
    ZR_TRY(ZR_ALLOC(s->stage_of, l->n_units, "the stages of %d units", l->n_units));
    for (int32_t u = 0; u < l->n_units; u++)
        s->stage_of[u] = -1;
    for (int32_t t = 0; t < l->n_tensors; t++) {
        const struct zr_tensor *x = &l->tensors[t];
        for (int64_t u = x->unit; u < x->unit + x->n_layers; u++) {
            if (s->stage_of[u] >= 0 && s->stage_of[u] != x->pp_stage)
                return zr_fail(ZERO_ERR_ARG,
                               "tensors[%d] (%s): its unit %lld is on stage %d, but another tensor of the "
                               "unit is on stage %d; allowed: one stage for all tensors of a unit",
                               t, x->name, (long long)u, x->pp_stage, s->stage_of[u]);
            s->stage_of[u] = x->pp_stage;
        }
    }
    return 0;
}

/* Copies this rank's row of a checked schedule, and counts the message slots that it needs. */
static int take_row(struct zr_schedule *s, struct zr_pipeline *all, struct zr_walk_row *row)
{
    int32_t n_onward, n_back;
    ZR_TRY(zr_pipeline_slots(all, &n_onward, &n_back));
    if (row == &s->walk.step && s->room.tied_bytes)
        ZR_TRY(zr_pipeline_place_ties(all, &s->room.n_tied));
    s->room.n_onward = (int32_t)zr_max(s->room.n_onward, n_onward);
    s->room.n_back = (int32_t)zr_max(s->room.n_back, n_back);
    row->n = all->rows[s->walk.pp_at].n;
    ZR_TRY(ZR_ALLOC(row->actions, row->n, "a schedule of %d micro-batches", s->walk.n_micro));
    memcpy(row->actions, all->rows[s->walk.pp_at].at, (size_t)row->n * sizeof *row->actions);
    return 0;
}

/* Checks a schedule and takes this rank's row. Gradients must be added in the order of micro-batches, so that
 * sums have the bits of a program without a pipeline. */
static int check_row(struct zr_schedule *s, struct zr_pipeline *all, struct zr_walk_row *row)
{
    struct zr_pipe_report report;
    ZR_TRY(zr_pipeline_check(all, zr_pipe_assumed_cost(), &report));
    bool in_order = report.in_order;
    if (row == &s->walk.step)
        s->room.n_tied = zr_pipeline_tied_slots(all, &report);
    zr_pipe_report_close(&report, all);
    if (!in_order)
        return zr_fail(ZERO_ERR_NOTSUP, "a stage's backward passes are not in the order of micro-batches, in "
                                        "which gradients are added up");
    return take_row(s, all, row);
}

/* Builds a schedule with its messages, and takes this rank's row. */
static int make_row(struct zr_schedule *s, enum zr_pipeline_kind kind, bool forward_only,
                    struct zr_walk_row *row)
{
    struct zr_pipeline *computed = NULL, *all = NULL;
    int err = zr_pipeline_build(&computed, kind, s->walk.pp, s->walk.per_rank, s->walk.n_micro, forward_only);
    if (!err)
        err = zr_pipeline_lower(&all, computed, zr_pipe_assumed_cost(), 0);
    if (!err)
        err = check_row(s, all, row);
    zr_pipeline_close(all);
    zr_pipeline_close(computed);
    return err;
}

/* Checks an action of a schedule file. */
static int check_action(const struct zr_pipe_action *a, int32_t rank, int32_t n_ranks)
{
    char text[ZR_PIPE_TEXT];
    if (a->stage % n_ranks != rank)
        return zr_fail(ZERO_ERR_NOTSUP,
                       "rank %d: %s; allowed: actions of stage %d, and with stages_per_rank above 1 of every "
                       "%dth after it",
                       rank, zr_pipe_text(*a, text), rank, n_ranks);
    if (a->with_next)
        return zr_fail(ZERO_ERR_NOTSUP,
                       "rank %d: %s overlaps another action; allowed: F, B, I and W, one after the other",
                       rank, zr_pipe_text(*a, text));
    return 0;
}

static int check_actions(const struct zr_pipeline *p)
{
    int err = 0;
    for (int32_t r = 0; r < p->n_ranks; r++)
        for (int64_t i = 0; i < p->rows[r].n && !err; i++)
            err = check_action(&p->rows[r].at[i], r, p->n_ranks);
    return err;
}

/* Reads cfg.pipeline.schedule_file, and checks that it fits the configuration. */
static int read_file(const struct zr_config *c, struct zr_pipeline **out)
{
    const char *path = c->user.pipeline.schedule_file;
    int32_t pp = c->options.pp, n_micro = c->options.grad_accum_steps;
    int err = zr_pipeline_read(out, path);
    if (err)
        return zr_fail_more(err, "schedule_file");
    const struct zr_pipeline *p = *out;
    if (c->user.pipeline.schedule != ZERO_SCHEDULE_1F1B)
        err = zr_fail(ZERO_ERR_ARG, "schedule is set too; allowed: one of schedule and schedule_file");
    else if (p->n_ranks != pp)
        err = zr_fail(ZERO_ERR_ARG, "%d ranks; allowed: a line for each of pp, which is %d", p->n_ranks, pp);
    else if (p->n_stages != pp * c->user.pipeline.stages_per_rank)
        err = zr_fail(ZERO_ERR_ARG, "%d stages; allowed: %d, as pp is %d and stages_per_rank %d", p->n_stages,
                      pp * c->user.pipeline.stages_per_rank, pp, c->user.pipeline.stages_per_rank);
    else if (p->n_micro_batches != n_micro)
        err = zr_fail(ZERO_ERR_ARG, "%d micro-batches; allowed: grad_accum_steps, which is %d",
                      p->n_micro_batches, n_micro);
    else
        err = check_actions(p);
    return err ? zr_fail_more(err, "schedule_file %s", path) : 0;
}

static uint64_t hash_rows(const struct zr_pipeline *p)
{
    uint64_t hash = 1;
    for (int32_t r = 0; r < p->n_ranks; r++)
        for (int64_t i = 0; i < p->rows[r].n; i++) {
            const struct zr_pipe_action *a = &p->rows[r].at[i];
            const int32_t words[] = {r, (int32_t)a->kind, a->stage, a->micro_batch};
            hash = XXH64(words, sizeof words, hash);
        }
    return hash;
}

/* Takes the row of a step from the program's schedule file, which may have messages or not. */
static int read_row(const struct zr_config *c, struct zr_schedule *s, struct zr_walk_row *row)
{
    struct zr_pipeline *given = NULL, *lowered = NULL;
    int err = read_file(c, &given);
    bool whole = !err && given->has_messages;
    if (!err) {
        s->file_hash = hash_rows(given);
        err = whole ? 0 : zr_pipeline_lower(&lowered, given, zr_pipe_assumed_cost(), 0);
        err = err ? err : check_row(s, whole ? given : lowered, row);
        err = err ? zr_fail_more(err, "schedule_file %s", c->user.pipeline.schedule_file) : 0;
    }
    zr_pipeline_close(lowered);
    zr_pipeline_close(given);
    return err;
}

/* Changes a call to the form that it has in an action of this kind. Returns false if the action does not make
 * the call. If backward is split, a whole backward bracket becomes one of inputs and one of weights. Forward
 * brackets inside it belong to the one of inputs. */
static bool call_in(enum zr_pipe_kind kind, struct zero_call *call)
{
    enum zero_phase phase = zr_pipe_phase(kind);
    if (zr_phase_is_part(phase) && call->phase == ZERO_BACKWARD)
        call->phase = (uint8_t)phase;
    return !zr_phase_is_part(phase) || zr_phase_has_grads(call->phase) == zr_phase_has_grads(phase);
}

/* Appends the calls of one stage's units to the order of the step. */
static void add_calls(struct zr_schedule *s, const struct zero_call *calls, int64_t n, int32_t stage,
                      enum zr_pipe_kind kind)
{
    int32_t before = s->n_order;
    for (int64_t i = 0; i < n; i++) {
        struct zero_call call = calls[i];
        if (s->stage_of[call.unit] == stage && call_in(kind, &call))
            s->order[s->n_order++] = call;
    }
    if (zr_pipe_gives_weights(kind) && s->walk.per_rank > 1 && s->n_order > before)
        s->order[s->n_order - 1].is_end = ZR_ENDS_ACTION;
}

/* Makes the order of calls in a step. The calls of a micro-batch before its first backward belong to forward
 * actions, the others to backward actions. But a bracket that opens before and is still open then belongs to
 * backward: forward brackets may be inside backward ones. The row puts the actions in order. */
static int make_order(struct zr_config *c, const struct zr_layout *l, struct zr_schedule *s)
{
    struct zr_options *o = &c->options;
    bool assumed = o->n_order == 0;
    struct zero_call *assumed_calls = NULL;
    int32_t n_assumed = 0;
    ZR_TRY(assumed ? zr_plan_assume_order(l, &assumed_calls, &n_assumed) : 0);
    const struct zero_call *calls = assumed ? assumed_calls : o->order;
    int64_t n = assumed ? n_assumed : o->n_order, forward = 0,
            all = 2 * n * s->walk.n_micro; /* at most, because backward may be split */
    if (all > MAX_CALLS)
        all = 0; /* The order is then that of one micro-batch. */
    for (int32_t i = 0; i < o->n_order; i++)
        if (calls[i].unit >= l->n_units)
            return zr_fail(ZERO_ERR_ARG, "order[%d].unit is %d; allowed: 0..%d", i, calls[i].unit,
                           l->n_units - 1);
    int err = ZR_ALLOC(s->order, all + 1, "the calls of %d micro-batches", s->walk.n_micro);
    if (err) {
        free(assumed_calls);
        return err;
    }
    for (int64_t i = 0, n_open = 0; i < n && !zr_phase_is_backward(calls[i].phase); i++) {
        n_open += calls[i].is_end ? -1 : 1;
        forward = n_open ? forward : i + 1;
    }
    for (int64_t i = 0; all && i < s->walk.step.n; i++) {
        const struct zr_pipe_action *a = &s->walk.step.actions[i];
        bool first = a->kind == ZR_PIPE_FORWARD;
        if (zr_pipe_computes(a->kind))
            add_calls(s, first ? calls : calls + forward, first ? forward : n - forward,
                      stage_here(&s->walk, a), a->kind);
    }
    free(assumed_calls);
    if (s->n_order) {
        o->order = s->order;
        o->n_order = s->n_order;
        o->order_of_step = true;
        o->order_assumed = assumed;
    }
    return 0;
}

static int check_stages(const struct zr_config *c)
{
    if (c->user.pipeline.activation_bytes == 0)
        return zr_fail(ZERO_ERR_ARG,
                       "pp is %d and stages_per_rank %d, but activation_bytes is 0; allowed: the bytes of "
                       "one micro-batch that a stage gives to the next",
                       c->options.pp, c->user.pipeline.stages_per_rank);
    if (c->user.pipeline.schedule == ZERO_SCHEDULE_1F1B && !c->user.pipeline.schedule_file &&
        c->user.pipeline.stages_per_rank > 1)
        return zr_fail(ZERO_ERR_ARG,
                       "stages_per_rank is %d, but schedule is 1f1b, with one stage per rank; allowed: "
                       "schedule interleaved or gpipe, or a schedule_file",
                       c->user.pipeline.stages_per_rank);
    if (c->user.pipeline.schedule == ZERO_SCHEDULE_ZERO_BUBBLE && c->user.pipeline.stages_per_rank > 1)
        return zr_fail(ZERO_ERR_ARG,
                       "stages_per_rank is %d, but schedule is zero-bubble, with one stage per rank; "
                       "allowed: schedule interleaved or gpipe, or a schedule_file",
                       c->user.pipeline.stages_per_rank);
    if (zr_most_micro_batches(&c->options) > c->options.grad_accum_steps)
        return zr_fail(ZERO_ERR_ARG,
                       "max_grad_accum_steps is %d but grad_accum_steps is %d; allowed with several pipeline "
                       "stages: 0, or grad_accum_steps, because their schedule is fixed",
                       zr_most_micro_batches(&c->options), c->options.grad_accum_steps);
    if (c->options.grad_accum_steps > ZR_PIPE_MAX_ALL / c->options.pp)
        return zr_fail(ZERO_ERR_ARG, "grad_accum_steps is %d; allowed with pp %d: 1..%lld",
                       c->options.grad_accum_steps, c->options.pp,
                       (long long)(ZR_PIPE_MAX_ALL / c->options.pp));
    return 0;
}

/* Sets the length of rows without a pipeline, which need no actions. */
static void set_micro_batches(struct zr_walk *w, int32_t n)
{
    w->n_micro = n;
    w->step.n = 2 * (int64_t)n;
    w->evaluation.n = n;
}

int zr_schedule_make(struct zr_config *c, const struct zr_layout *l, struct zr_schedule **out)
{
    const struct zr_options *o = &c->options;
    struct zr_schedule *s;
    ZR_TRY(ZR_ZALLOC(s, 1, "a schedule"));
    *out = s;
    s->walk.pp = o->pp > 1 ? o->pp : 1;
    s->walk.pp_at = c->place.pp;
    s->walk.per_rank = c->user.pipeline.stages_per_rank;
    set_micro_batches(&s->walk, o->grad_accum_steps);
    if (zr_walk_stages(&s->walk) == 1 && c->user.pipeline.schedule_file)
        zr_warn(o->log, "schedule_file is set, but pp is 1: it has no effect");
    if (zr_walk_stages(&s->walk) == 1)
        return 0;
    s->room.pp = s->walk.pp;
    s->room.per_rank = s->walk.per_rank;
    s->room.tied_bytes = zr_round_up(zr_ties_bytes(l), 4096);
    int err = check_stages(c);
    if (!err)
        err = find_stages(s, l);
    if (!err && c->user.pipeline.schedule_file)
        err = read_row(c, s, &s->walk.step);
    else if (!err)
        err = make_row(s, kind_of(c), false, &s->walk.step);
    if (!err)
        err = make_row(s, kind_of_evaluation(c, &s->walk), true, &s->walk.evaluation);
    if (!err && s->room.n_tied == 0 && s->room.tied_bytes)
        err = zr_fail(ZERO_ERR_ARG, "a tensor is ZERO_TIED, but in this schedule the first stage computes "
                                    "weight gradients of a micro-batch before the last stage can send its "
                                    "part; allowed: a schedule in which the last stage's part comes first");
    if (!err)
        err = make_order(c, l, s);
    if (err)
        return err;
    s->room.activation_bytes = c->user.pipeline.activation_bytes;
    s->room.guard_bytes = o->check ? 4096 : 0;
    s->room.slot_bytes = zr_round_up(c->user.pipeline.activation_bytes, 4096) + s->room.guard_bytes;
    if (!o->deterministic && s->walk.n_micro > 1) {
        s->room.tied_sum_bytes = zr_round_up(zr_ties_sum_bytes(l), 4096);
        s->room.n_summed = s->walk.n_micro;
        s->room.n_tied = 1;
    }
    c->options.pipe_bytes = zr_pipe_room_bytes(&s->room);
    c->options.tied_bytes = s->walk.pp > 1 ? zr_tied_room_bytes(&s->room) : 0;
    return 0;
}

uint64_t zr_schedule_file_hash(const struct zr_schedule *s)
{
    return s->file_hash;
}

const struct zr_pipe_room *zr_schedule_room(const struct zr_schedule *s)
{
    return &s->room;
}

/* ---- taking actions ---- */

/* Ends an evaluation. The next action is the first of a step. */
static int end_evaluation(struct zero_ctx *z)
{
    struct zr_schedule *s = z->schedule;
    struct zr_core_event ev = {.kind = ZR_EV_EVALUATED, .unit = -1};
    s->walk.evaluates = false;
    s->walk.at = 0;
    return zr_walk_stages(&s->walk) > 1 ? zr_engine_call(z->engine, &ev) : 0;
}

int zr_schedule_tune(struct zero_ctx *z, int32_t n)
{
    struct zr_walk *w = &z->schedule->walk;
    if (zr_walk_stages(w) > 1 && n != w->n_micro)
        return zr_fail(
            ZERO_ERR_ARG,
            "zero_tune: grad_accum_steps is %d; allowed with several pipeline stages: %d, as their "
            "schedule has it",
            n, w->n_micro);
    if (w->at > 0 || w->open || w->evaluates)
        return zr_fail(ZERO_ERR_ORDER,
                       "zero_tune: actions of %s have begun; change grad_accum_steps before the first or "
                       "after zero_step",
                       w->evaluates ? "an evaluation" : "the step");
    if (zr_walk_stages(w) == 1)
        set_micro_batches(w, n);
    return 0;
}

int zero_evaluate(zero_ctx *z)
{
    ZR_IN_CALL(z, ZR_CALL_EVALUATE, 0, -1);
    ZR_TRY(zr_need_healthy(z, "zero_evaluate"));
    struct zr_schedule *s = z->schedule;
    if (s->walk.evaluates || s->walk.at > 0 || s->walk.open)
        return zr_fail(ZERO_ERR_ORDER,
                       "zero_evaluate: %s has begun; take its other actions by zero_next first",
                       s->walk.evaluates ? "an evaluation" : "a step");
    ZR_TRY(zr_call_check(z, ZR_CALL_EVALUATE));
    zr_engine_called(z->engine, 0);
    s->walk.evaluates = true;
    return 0;
}

static struct zero_action action_of(const struct zr_walk *w, const struct zr_walk_slots *g)
{
    return (struct zero_action){.pp_stage = stage_here(w, &g->action),
                                .phase = zr_pipe_phase(g->action.kind),
                                .micro_batch = g->action.micro_batch,
                                .in = g->in,
                                .out = g->out,
                                .kept = g->kept};
}

int zero_next(zero_ctx *z, struct zero_action *action)
{
    ZR_BEGIN_CALL(z, ZR_CALL_NEXT);
    if (!action)
        return zr_fail(ZERO_ERR_ARG, "zero_next: action is NULL");
    struct zr_schedule *s = z->schedule;
    struct zero_action out = {.micro_batch = -1};
    struct zr_walk_slots slots;
    bool more;
    if (s->walk.open) {
        struct zr_pipe_action a = zr_walk_action(&s->walk, s->walk.at);
        return zr_fail(ZERO_ERR_ORDER, "zero_next: %s of micro-batch %d is not over; zero_finish ends it",
                       zr_phase_name(zr_pipe_phase(a.kind)), a.micro_batch);
    }
    if (s->walk.at == 0)
        zr_engine_begins_pass(z->engine, s->walk.evaluates);
    ZR_TRY(zr_walk_next(z->engine, &s->walk, &slots, &more));
    if (more)
        out = action_of(&s->walk, &slots);
    else if (s->walk.evaluates)
        ZR_TRY(end_evaluation(z));
    zr_engine_called(z->engine, (uint64_t)(out.micro_batch + 1));
    *action = out;
    return 0;
}

int zero_finish(zero_ctx *z)
{
    ZR_BEGIN_CALL(z, ZR_CALL_FINISH);
    struct zr_schedule *s = z->schedule;
    if (!s->walk.open)
        return zr_fail(ZERO_ERR_ORDER, "zero_finish: no action is under way; zero_next gives one");
    struct zr_pipe_action a = zr_walk_action(&s->walk, s->walk.at);
    ZR_TRY(zr_walk_finish(z->engine, &s->walk));
    zr_engine_called(z->engine, (uint64_t)(a.micro_batch + 1));
    return zr_walk_move(z->engine, &s->walk);
}

/* ---- checks for other calls ---- */

/* Whether an action has such brackets. Forward brackets may be in any action, because backward may recompute.
 * Backward brackets are in backward actions. A whole backward action may have split brackets, too. */
static bool has_bracket(enum zr_pipe_kind kind, enum zero_phase phase)
{
    return phase == ZERO_FORWARD || kind == ZR_PIPE_BACKWARD || phase == zr_pipe_phase(kind);
}

int zr_schedule_bracket(const struct zero_ctx *z, const char *call, const struct zr_core_event *ev)
{
    const struct zr_schedule *s = z->schedule;
    int32_t unit = ev->unit;
    if (zr_walk_stages(&s->walk) == 1 && !s->walk.open)
        return 0;
    if (!s->walk.open)
        return zr_fail(ZERO_ERR_ORDER,
                       "%s: unit %d is used outside an action; in a pipeline, call zero_next first", call,
                       unit);
    struct zr_pipe_action a = zr_walk_action(&s->walk, s->walk.at);
    int32_t stage = stage_here(&s->walk, &a);
    if (s->stage_of && unit >= 0 && unit < s->n_units && s->stage_of[unit] != stage)
        return zr_fail(ZERO_ERR_ORDER,
                       "%s: unit %d is on stage %d of this rank, but the action is for stage %d", call, unit,
                       s->stage_of[unit], stage);
    if (has_bracket(a.kind, ev->phase))
        return 0;
    return zr_fail(ZERO_ERR_ORDER, "%s: unit %d in %s, but the action is %s of micro-batch %d", call, unit,
                   zr_phase_name(ev->phase), zr_phase_name(zr_pipe_phase(a.kind)), a.micro_batch);
}

/* The call would wait for all ranks, but between two actions another pipeline stage may wait for this one. */
int zr_refuse_in_actions(const struct zero_ctx *z, const char *call)
{
    const struct zr_schedule *s = z->schedule;
    if (zr_walk_stages(&s->walk) == 1 ||
        (!s->walk.open && !s->walk.evaluates && (s->walk.at == 0 || zr_walk_is_over(&s->walk))))
        return 0;
    return zr_fail(ZERO_ERR_ORDER, "%s: %s has begun; call it before the first action or after the last",
                   call, s->walk.evaluates ? "an evaluation" : "the step");
}

static int64_t count_computations(const struct zr_schedule *s, int64_t until)
{
    int64_t n = 0;
    for (int64_t i = 0; i < until; i++)
        n += zr_pipe_computes(zr_walk_action(&s->walk, i).kind);
    return n;
}

int zr_schedule_over(const struct zero_ctx *z, const char *call)
{
    const struct zr_schedule *s = z->schedule;
    if (!s->walk.evaluates &&
        (zr_walk_is_over(&s->walk) || (zr_walk_stages(&s->walk) == 1 && !s->walk.open && s->walk.at == 0)))
        return 0;
    return zr_fail(ZERO_ERR_ORDER, "%s: %lld of the %s's %lld actions are over; zero_next gives the next",
                   call, (long long)count_computations(s, s->walk.at),
                   s->walk.evaluates ? "evaluation" : "step",
                   (long long)count_computations(s, zr_walk_row(&s->walk)->n));
}

int zr_schedule_drop(const struct zero_ctx *z)
{
    const struct zr_schedule *s = z->schedule;
    bool several = zr_walk_stages(&s->walk) > 1,
         messages = several && s->walk.at > 0 && !zr_walk_is_over(&s->walk);
    /* This holds for all pipeline stages, even frozen ones. */
    if (several && s->walk.at == 0 && !s->walk.open && !s->walk.evaluates)
        return zr_fail(ZERO_ERR_ORDER,
                       "zero_drop: no action of the step has begun, so there is nothing to drop");
    return messages || s->walk.open || s->walk.evaluates ? zr_schedule_over(z, "zero_drop") : 0;
}

void zr_schedule_step(struct zero_ctx *z)
{
    z->schedule->walk.at = 0;
    z->schedule->walk.open = false;
}
