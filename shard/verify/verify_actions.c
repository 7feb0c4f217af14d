/* SPDX-License-Identifier: Apache-2.0 */
/* verify_actions.c: writes and executes the calls of a pipeline stage, action by action. Each activation in
 * the simulation names its pass, micro-batch and rank. So the checker notices an activation that is stale,
 * early or from another rank. */
#include "shard/verify/verify_writing.h"

/* ---- writing ---- */

static void write_action_op(struct zr_writing *w, enum zr_script_op_kind kind, const struct zr_pipe_action *a)
{
    zr_write(w->s, (struct zr_script_op){.kind = (uint8_t)kind,
                                         .phase = a ? (uint8_t)zr_pipe_phase(a->kind) : 0,
                                         .index = -1,
                                         .step = w->step,
                                         .pp_stage = a ? a->stage : -1,
                                         .micro = a ? a->micro_batch : -1,
                                         .pass = w->n_passes});
}

/* Lists the units of the action's pipeline stage in forward order. Returns their number. */
static int32_t list_units(struct zr_writing *w, const struct zr_pipe_action *a)
{
    int32_t own = a->stage / zr_case_pp(w->c), n = 0;
    for (int32_t i = 0; i < w->n_units; i++)
        if (w->all[i] >= w->stage->first_unit[own] && w->all[i] < w->stage->first_unit[own + 1])
            w->list[n++] = w->all[i];
    return n;
}

void zr_write_actions(struct zr_writing *w, const struct zr_walk_row *row, bool evaluates)
{
    int n_before[2] = {0}; /* forward, backward; over all stages, as zeroing covers all units */
    if (evaluates)
        zr_write_call(w, ZR_DO_EVALUATE);
    for (int64_t i = 0; i < row->n; i++) {
        const struct zr_pipe_action *a = &row->actions[i];
        bool backward = zr_pipe_gives_weights(a->kind);
        if (!zr_pipe_computes(a->kind))
            continue;
        int32_t n = list_units(w, a);
        write_action_op(w, ZR_DO_NEXT, a);
        write_action_op(w, ZR_DO_TAKE, a);
        if (!evaluates && a->kind != ZR_PIPE_BACKWARD_INPUT)
            zr_write_zero(w, backward ? 2 : 1, n_before[backward]++);
        w->phase = zr_pipe_phase(a->kind);
        (a->kind == ZR_PIPE_FORWARD ? zr_write_forward : zr_write_backward)(w, w->list, n);
        write_action_op(w, ZR_DO_GIVE, a);
        write_action_op(w, ZR_DO_FINISH, a);
    }
    if (evaluates || zr_verify_chance(w->random, 50)) /* a step may also follow its last action directly */
        write_action_op(w, ZR_DO_NEXT, NULL);
    w->n_passes++;
}

enum { FEW = 3000 };

/* An operation over the axis, with everything but its number of elements. */
static struct zr_script_op op_over(const struct zr_writing *w, enum zr_script_op_kind kind,
                                   enum zero_axis axis)
{
    return (struct zr_script_op){.kind = (uint8_t)kind, .index = -1, .step = w->step, .axis = (uint8_t)axis};
}

static int64_t draw_elems(struct zr_writing *w)
{
    return 1 + zr_verify_below(w->random, zr_verify_chance(w->random, 90) ? FEW : ZR_VERIFY_AXIS_ELEMS);
}

static void write_combination(struct zr_writing *w, enum zero_axis axis, int size)
{
    struct zr_script_op op = op_over(w, ZR_DO_COMBINE, axis);
    op.how = (uint8_t)zr_verify_below(w->random, w->c->caller ? ZR_COMBINATIONS : ZR_COMBINE_MAX);
    int64_t n =
        op.how == ZR_COMBINE_MAX ? 1 + zr_verify_below(w->random, ZR_VERIFY_MAX_OP_ELEMS) : draw_elems(w);
    op.bf16 = op.how != ZR_COMBINE_MAX && zr_verify_chance(w->random, 50);
    op.in_place = zr_verify_chance(w->random, 50);
    op.by = op.how == ZR_COMBINE_BROADCAST ? (int32_t)zr_verify_below(w->random, size) : 0;
    op.n = (int32_t)(n / size * size);
    zr_write(w->s, op);
}

static void write_shift(struct zr_writing *w, enum zero_axis axis, int size)
{
    bool *open = &w->is_shifting[axis == ZERO_AXIS_CP];
    struct zr_script_op op = op_over(w, *open ? ZR_DO_SHIFT_END : ZR_DO_SHIFT_BEGIN, axis);
    if (!*open) {
        op.n = (int32_t)draw_elems(w);
        op.bf16 = zr_verify_chance(w->random, 50);
        /* Mostly to a neighbour, and sometimes around the ring or to this rank itself. */
        op.by = zr_verify_chance(w->random, 70) ? (zr_verify_chance(w->random, 50) ? 1 : -1)
                                                : (int32_t)zr_verify_below(w->random, 4 * size) - 2 * size;
    }
    *open = !*open;
    zr_write(w->s, op);
}

static void write_over(struct zr_writing *w, enum zero_axis axis, int size, int percent)
{
    if (size < 2 || !zr_verify_chance(w->random, percent))
        return;
    (zr_verify_chance(w->random, 50) ? write_shift : write_combination)(w, axis, size);
}

void zr_write_moves(struct zr_writing *w)
{
    write_over(w, ZERO_AXIS_TP, w->c->tp, w->c->sums);
    write_over(w, ZERO_AXIS_CP, w->c->cp, w->c->moves);
}

void zr_write_shift_ends(struct zr_writing *w)
{
    for (enum zero_axis axis = ZERO_AXIS_TP; axis <= ZERO_AXIS_CP; axis++)
        if (w->is_shifting[axis == ZERO_AXIS_CP] && zr_verify_chance(w->random, 50))
            write_shift(w, axis, 0);
}

/* ---- executing ---- */

static void expect_given(struct zr_verify_rank *r, const struct zr_script_op *op,
                         const struct zr_walk_slots *g, bool more)
{
    const struct zr_pipe_action *a = &g->action;
    int32_t pp_stage = more ? a->stage : -1, micro = more ? a->micro_batch : -1;
    enum zero_phase phase = more ? zr_pipe_phase(a->kind) : 0;
    if (pp_stage != op->pp_stage || micro != op->micro || phase != op->phase)
        zr_report(zr_sim_recorder(r->v->sim),
                  "rank %d: zero_next gave %s of micro-batch %d of stage %d, and not %s of micro-batch %d of "
                  "stage %d",
                  r->id, zr_phase_name(phase), micro, pp_stage, zr_phase_name(op->phase), op->micro,
                  op->pp_stage);
}

static int end_evaluation(struct zr_verify_rank *r)
{
    const struct zr_core_event ev = {.kind = ZR_EV_EVALUATED, .unit = -1};
    r->walk.evaluates = false;
    r->walk.at = 0;
    return zr_engine_call(&r->engine, &ev);
}

int zr_actions_next(struct zr_verify_rank *r, const struct zr_script_op *op)
{
    bool more;
    int err = zr_walk_next(&r->engine, &r->walk, &r->slots, &more);
    if (err)
        return err;
    expect_given(r, op, &r->slots, more);
    return !more && r->walk.evaluates ? end_evaluation(r) : 0;
}

int zr_actions_finish(struct zr_verify_rank *r)
{
    int err = zr_walk_finish(&r->engine, &r->walk);
    return err ? err : zr_walk_move(&r->engine, &r->walk);
}

/* Sender and receiver have the same position within their pipeline stage. The last two digits of the value
 * are this position. */
static struct zr_content activation(const struct zr_verify_rank *r, const struct zr_script_op *op,
                                    enum zr_pipe_way way, int32_t edge)
{
    int64_t value =
        ((int64_t)op->pass * 100 + op->micro) * 100 + r->id % (r->v->c->world / zr_case_pp(r->v->c));
    return (struct zr_content){
        .kind = ZR_CONTENT_ACTIVATION, .size = 1, .flat = 2 * edge + (int32_t)way, .value = (uint64_t)value};
}

/* The touched bytes are fewer than a slot has, as for most activations. */
static struct zr_sim_touch touch_slot(const struct zr_verify_rank *r, void *at, enum zr_sim_how how,
                                      struct zr_content content)
{
    return (struct zr_sim_touch){at, r->of_stage->room.slot_bytes - 96, how, content};
}

static void expect_slot(struct zr_verify_rank *r, const void *at, bool there, const char *what)
{
    if ((at != NULL) != there)
        zr_report(zr_sim_recorder(r->v->sim), "rank %d, stage %d: zero_next gave %s for %s", r->id,
                  r->slots.action.stage, at ? "a slot" : "none", what);
}

int zr_actions_move(struct zr_verify_rank *r, const struct zr_script_op *op)
{
    const struct zr_walk_slots *g = &r->slots;
    int32_t at = op->pp_stage, before = at - 1;
    bool has_next = at + 1 < zr_case_stages(r->v->c), has_last = at > 0, gives = op->kind == ZR_DO_GIVE;
    bool backward = zr_phase_is_backward(op->phase), weights = op->phase == ZERO_BACKWARD_WEIGHT;
    struct zr_sim_touch touch[3];
    int n = 0;
    expect_slot(r, g->in, backward ? has_next : has_last, "what it reads");
    expect_slot(r, g->out, !weights && (backward ? has_last : has_next), "what it writes");
    expect_slot(r, g->kept, backward && has_last, "what its forward was given");
    /* The action may read its inputs until it ends, so both TAKE and GIVE read them. */
    if (g->in && backward)
        touch[n++] = touch_slot(r, g->in, ZR_SIM_READ, activation(r, op, ZR_PIPE_BACK, at));
    else if (g->in)
        touch[n++] = touch_slot(r, g->in, ZR_SIM_READ, activation(r, op, ZR_PIPE_ONWARD, before));
    if (g->kept)
        touch[n++] = touch_slot(r, g->kept, ZR_SIM_READ, activation(r, op, ZR_PIPE_ONWARD, before));
    if (gives && g->out && backward)
        touch[n++] = touch_slot(r, g->out, ZR_SIM_SET, activation(r, op, ZR_PIPE_BACK, before));
    else if (gives && g->out)
        touch[n++] = touch_slot(r, g->out, ZR_SIM_SET, activation(r, op, ZR_PIPE_ONWARD, at));
    return zr_sim_compute(r->engine.compute,
                          gives ? "activations that it gives" : "activations that it takes", touch, n, 0);
}
