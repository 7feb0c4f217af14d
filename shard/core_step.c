/* SPDX-License-Identifier: Apache-2.0 */
/* core_step.c: what the core does with gradients, from the end of a contribution to the step that uses
 * them. */
#include "shard/core_inside.h"

/* ---- contributions ---- */

/* Adds one more contribution, as a binary counter counts up: sums of equal numbers of contributions are added
 * to each other. */
static void count_contribution(struct zr_core *c, struct unit *x, struct zr_action *a)
{
    bool odd = x->n_contrib & 1;
    a->contribution = x->n_contrib;
    if (!odd && x->depth < c->n_sums) { /* the first always does */
        a->sum = x->depth++;
        return;
    }
    a->accumulate = true;
    a->sum = (uint8_t)(x->depth - 1);
    for (int32_t k = x->n_contrib >> 1; (k & 1) && x->depth > 1; k >>= 1) {
        a->n_folds++;
        x->depth--;
    }
}

/* Reduces a contribution inside the group to a group slot, and then between groups, where it is counted. */
static void reduce_twice(struct zr_core *c, int32_t u, int32_t slot, struct zr_action *out, int32_t *n)
{
    int32_t group_slot = c->next_group_slot;
    c->next_group_slot = group_slot + 1 == c->n_group_slots ? 0 : group_slot + 1;
    zr_core_emit(out, n, ZR_ACT_REDUCE, u, slot)->group_slot = group_slot;
    struct zr_action *a = zr_core_emit(out, n, ZR_ACT_REDUCE_OUTER, u, -1);
    a->group_slot = group_slot;
    count_contribution(c, &units(c)[u], a);
}

/* Reduces the sum of the group's contributions between groups, in place. */
static void reduce_outer(int32_t u, struct zr_action *out, int32_t *n)
{
    zr_core_emit(out, n, ZR_ACT_REDUCE_OUTER, u, -1);
}

/* Adds up in the group until the unit has had all its brackets of the step. If it has fewer, the step
 * reduces the sum between groups. */
static void reduce_in_group(struct zr_core *c, int32_t u, int32_t slot, struct zr_action *out, int32_t *n)
{
    struct unit *x = &units(c)[u];
    zr_core_emit(out, n, ZR_ACT_REDUCE, u, slot)->accumulate = x->n_contrib > 0;
    if (x->n_bwd == zr_core_most_brackets(c, x))
        reduce_outer(u, out, n);
}

void zr_core_reduce(struct zr_core *c, int32_t u, int32_t slot, struct zr_action *out, int32_t *n)
{
    struct unit *x = &units(c)[u];
    if (c->outer_each) {
        reduce_twice(c, u, slot, out, n);
    } else if (c->outer) {
        reduce_in_group(c, u, slot, out, n);
    } else {
        struct zr_action *a = zr_core_emit(out, n, ZR_ACT_REDUCE, u, slot);
        if (!x->sum_in_place)
            count_contribution(c, x, a);
    }
    x->n_contrib++;
    x->pending = false;
}

/* Stages 0 and 1: gives the model its gradients back after they are reduced. Gradients that are summed in
 * place come back after the step has used them. */
void zr_core_return_grads(struct zr_core *c, struct zr_action *out, int32_t *n)
{
    if (c->last_reduced < 0)
        return;
    out[(*n)++] = (struct zr_action){.kind = ZR_ACT_RETURN_GRADS, .unit = c->last_reduced, .slot = -1};
    c->last_reduced = -1;
}

/* Reduces all gradients, in a step without backward brackets. */
static void reduce_unbracketed(struct zr_core *c, struct zr_action *out, int32_t *n)
{
    for (int32_t i = 0; i < c->n_units; i++) {
        if (!units(c)[i].trainable)
            continue;
        zr_core_emit(out, n, ZR_ACT_HIDE_GRAD, i, -1);
        zr_core_reduce(c, i, -1, out, n);
    }
}

/* Zeroes the gradients once they were used: those that had a bracket in the step, or all in a step without
 * brackets. */
static void clear_grads(struct zr_core *c, struct zr_action *out, int32_t *n)
{
    bool bracketed = is_bracketed(c);
    for (int32_t i = 0; i < c->n_units; i++) {
        struct unit *u = &units(c)[i];
        if (!u->trainable || (bracketed && !u->dirty))
            continue;
        struct zr_action *a = zr_core_emit(out, n, ZR_ACT_USE_GRAD, i, -1);
        a->fill = true;
        a->keeps_overwritten = bracketed;
        u->dirty = false;
    }
}

int zr_core_micro(struct zr_core *c, struct zr_action *out, int32_t *n)
{
    int err = zr_core_refuse_open(c, "zero_micro");
    if (err)
        return err;
    if (c->complete)
        return zr_fail(ZERO_ERR_ORDER, "zero_micro: zero_norm has ended the gradients of this step: call "
                                       "zero_step or zero_drop first");
    if (c->n_micro + 1 >= c->accum)
        return zr_fail(ZERO_ERR_ORDER,
                       "zero_micro: grad_accum_steps is %d, so a step may call it at most %d time%s: "
                       "zero_step ends the last micro-batch",
                       c->accum, c->accum - 1, c->accum == 2 ? "" : "s");
    c->n_micro++;
    zr_core_note(c, ZR_MICRO_WORD);
    zr_core_return_grads(c, out, n);
    if (!c->reduce_each || !c->model_holds || is_bracketed(c))
        return 0; /* nothing to reduce yet, or no gradients without brackets */
    c->unbracketed = true;
    reduce_unbracketed(c, out, n);
    clear_grads(c, out, n);
    return 0;
}

/* ---- the end of a step ---- */

/* Counts the step's micro-batches by the unit that shows most of them. A unit with one bracket in a
 * micro-batch counts exactly. A unit with several may have had all of them in one micro-batch, or one in
 * each. It counts for the fewest, unless no unit with one bracket was used. */
static int32_t count_micro_batches(const struct zr_core *c, int32_t *unit)
{
    int32_t most = 0;
    bool once = false;
    for (int32_t i = 0; i < c->n_units; i++)
        once |= units(c)[i].uses == 1 && units(c)[i].n_bwd > 0;
    for (int32_t i = 0; i < c->n_units; i++) {
        const struct unit *u = &units(c)[i];
        int32_t n = once ? (int32_t)(((int64_t)u->n_bwd + u->uses - 1) / u->uses) : u->n_bwd;
        if (n > most) {
            most = n;
            *unit = i;
        }
    }
    return most;
}

/* Checks that the step has had grad_accum_steps micro-batches. A unit may be left out of some, so the unit
 * that shows most decides. Too many brackets were refused when they began. A model without brackets counts
 * its micro-batches by zero_micro. */
static int check_count(const struct zr_core *c, const char *call)
{
    int32_t unit = -1, most = count_micro_batches(c, &unit);
    if (most > 0 && most < c->accum)
        return zr_fail(ZERO_ERR_ORDER,
                       "%s: micro-batches are missing: unit %d has had %d backward pass%s since the last "
                       "step; zero_tensor.uses is %d and grad_accum_steps is %d",
                       call, unit, units(c)[unit].n_bwd, units(c)[unit].n_bwd == 1 ? "" : "es",
                       units(c)[unit].uses, c->accum);
    if (c->any_backward && c->unbracketed)
        return zr_fail(ZERO_ERR_ORDER,
                       "%s: zero_micro ended a micro-batch before the step's first backward bracket: "
                       "bracket the backward passes of all micro-batches of a step, or of none",
                       call);
    if (is_bracketed(c) || c->n_trainable == 0)
        return 0;
    if (!c->model_holds)
        return zr_fail(ZERO_ERR_ORDER, "%s: no backward bracket has ended since the last step", call);
    if (c->n_micro + 1 != c->accum && (c->reduce_each || c->n_micro))
        return zr_fail(ZERO_ERR_ORDER,
                       "%s: zero_micro ended %d micro-batch%s, but grad_accum_steps is %d: call zero_micro "
                       "after each backward but the last, or bracket backward; or, if the model zeroes its "
                       "gradients once per step and adds to them, set grad_in_place to 1",
                       call, c->n_micro, c->n_micro == 1 ? "" : "es", c->accum);
    return 0;
}

/* Updates every trainable unit that the step has: first those of the order, by their first use, then the
 * rest. */
static void update_in_order(struct zr_core *c, struct zr_action *out, int32_t *n)
{
    for (int pass = 0; pass < 2; pass++) {
        int32_t count = pass ? c->n_units : c->period;
        for (int32_t i = 0; i < count; i++) {
            int32_t id = pass ? i : order(c)[i].unit;
            struct unit *u = &units(c)[id];
            if (pass ? u->first_use >= 0 : u->first_use != i)
                continue;
            if (!u->trainable || zr_core_leaves_out(c, id))
                continue;
            zr_core_emit(out, n, ZR_ACT_UPDATE, id, -1);
            if (c->outer_gathers)
                zr_core_emit(out, n, ZR_ACT_GATHER_OUTER, id, -1);
            if (u->resident && c->gathers_updated)
                zr_core_gather(c, id, -1, out, n);
        }
    }
}

/* Returns the last updated unit that had a bracket in the step and is summed in place. -1: none. */
static int32_t last_in_place(const struct zr_core *c, const struct zr_action *out, int32_t n)
{
    while (n-- > 0) {
        const struct unit *u = &units(c)[out[n].kind == ZR_ACT_UPDATE ? out[n].unit : 0];
        if (out[n].kind == ZR_ACT_UPDATE && u->sum_in_place && u->n_bwd > 0)
            return out[n].unit;
    }
    return -1;
}

/* Whether the unit's sum of this step has been reduced between groups, where that is done once a step. */
static bool is_reduced_outer(const struct zr_core *c, const struct unit *u)
{
    return c->outer && !c->outer_each && u->n_contrib > 0 &&
           (c->complete || u->n_bwd == zr_core_most_brackets(c, u));
}

/* Reduces what is left of the unit's gradient, into its first sum, if the step has the unit. */
static void complete_grad(struct zr_core *c, int32_t unit, struct zr_action *out, int32_t *n)
{
    struct unit *u = &units(c)[unit];
    if (zr_core_leaves_out(c, unit)) {
        zr_core_emit(out, n, ZR_ACT_LEAVE_OUT, unit, -1);
        return;
    }
    if (u->pending) {
        zr_core_reduce(c, unit, -1, out, n);
        u->dirty = true;
        if (c->model_holds && !u->sum_in_place)
            c->last_reduced = unit;
    }
    if (c->outer && !c->outer_each && !is_reduced_outer(c, u)) {
        reduce_outer(unit, out, n);
    } else if (u->depth > 1) {
        struct zr_action *a = zr_core_emit(out, n, ZR_ACT_FOLD, unit, -1);
        a->sum = a->n_folds = u->depth - 1;
        a->contribution = u->n_contrib;
    }
}

static void complete_grads(struct zr_core *c, struct zr_action *out, int32_t *n)
{
    if (!is_bracketed(c))
        reduce_unbracketed(c, out, n);
    for (int32_t i = 0; i < c->n_units; i++)
        if (units(c)[i].trainable)
            complete_grad(c, i, out, n);
}

/* The norm of zero_step does not count them either. */
static void leave_out_again(struct zr_core *c, struct zr_action *out, int32_t *n)
{
    for (int32_t i = 0; i < c->n_units; i++)
        if (zr_core_leaves_out(c, i))
            zr_core_emit(out, n, ZR_ACT_LEAVE_OUT, i, -1);
}

/* Whether other groups gather the unit's sum as soon as it is reduced between groups. */
static bool is_spread(const struct zr_core *c, const struct unit *u)
{
    return is_reduced_outer(c, u) && !c->outer_gathers;
}

/* Frees what was reduced in place, which will not be used. */
static void drop_sums(struct zr_core *c, struct zr_action *out, int32_t *n)
{
    bool any = false;
    for (int32_t i = 0; i < c->n_units; i++) {
        const struct unit *u = &units(c)[i];
        any |= is_spread(c, u);
        if (!u->sum_in_place || u->n_contrib == 0)
            continue;
        any = true;
        if (u->n_bwd > 0 && c->model_holds)
            c->last_reduced = i;
    }
    if (any)
        zr_core_emit(out, n, ZR_ACT_DROP_SUMS, -1, -1);
}

/* No micro-batch of the next step has begun. */
static void forget_step(struct zr_core *c)
{
    for (int32_t i = 0; i < c->n_units; i++) {
        struct unit *u = &units(c)[i];
        u->n_contrib = u->n_bwd = 0;
        u->depth = 0;
    }
    c->n_micro = 0;
    c->any_backward = c->complete = c->unbracketed = false;
}

/* Gradients without brackets stay where they are until the step, which may still need them. A second
 * zero_norm does nothing. */
int zr_core_norm(struct zr_core *c, const struct zr_core_event *ev, struct zr_action *out, int32_t *n)
{
    int err = zr_core_refuse_open(c, "zero_norm");
    if (err || c->complete)
        return err;
    err = check_count(c, "zero_norm");
    if (err)
        return err;
    zr_core_note(c, ZR_NORM_WORD | (uint32_t)ev->unit);
    complete_grads(c, out, n);
    zr_core_emit(out, n, ZR_ACT_NORM, -1, -1);
    zr_core_return_grads(c, out, n);
    c->complete = true;
    return 0;
}

/* Whether a step has begun, as far as is known. Gradients without brackets may have been written unseen. */
static bool is_begun(const struct zr_core *c)
{
    bool unseen = c->model_holds && !zr_core_wrote_nothing(c);
    return c->complete || is_bracketed(c) || c->n_micro || unseen;
}

/* Drops the step. Zeroes gradients that the model has at all times (stages 0 and 1). Sums in shards need no
 * zeroing, because the next contribution overwrites them. */
int zr_core_drop(struct zr_core *c, struct zr_action *out, int32_t *n)
{
    int err = zr_core_refuse_open(c, "zero_drop");
    if (err)
        return err;
    /* A frozen pipeline stage drops what others have begun. */
    if (c->n_trainable && !is_begun(c))
        return zr_fail(ZERO_ERR_ORDER,
                       "zero_drop: no backward bracket has ended since the last step: there is "
                       "nothing to drop");
    zr_core_note(c, ZR_DROP_WORD);
    drop_sums(c, out, n);
    for (int32_t i = 0; i < c->n_units; i++) {
        struct unit *u = &units(c)[i];
        u->dirty |= u->pending || (c->model_holds && u->trainable);
        u->pending = false;
    }
    zr_core_return_grads(c, out, n);
    if (c->model_holds)
        clear_grads(c, out, n);
    forget_step(c);
    zr_core_start_recording(c);
    zr_core_prefetch(c, out, n);
    return 0;
}

int zr_core_evaluated(struct zr_core *c, struct zr_action *out, int32_t *n)
{
    int err = zr_core_refuse_open(c, "zero_next");
    if (err)
        return err;
    if (c->any_backward || c->complete)
        return zr_fail(ZERO_ERR_ORDER, "zero_next: a step has begun, so this is not an evaluation");
    zr_core_note(c, ZR_EVAL_WORD);
    zr_core_start_recording(c);
    zr_core_prefetch(c, out, n);
    return 0;
}

/* Empties the slots of units that were just updated. Gathered copies of other units stay good. */
static void empty_stale_slots(struct zr_core *c)
{
    for (int32_t i = 0; i < c->n_pslots; i++) {
        const struct pslot *s = &pslots(c)[i];
        if (s->unit >= 0 && units(c)[s->unit].trainable && !zr_core_leaves_out(c, s->unit))
            zr_core_empty_slot(c, i);
    }
}

/* Waits for units without forward brackets, which cannot wait later. */
static void wait_unbracketed(struct zr_core *c, struct zr_action *out, int32_t *n)
{
    for (int32_t i = 0; i < c->n_units; i++)
        if (units(c)[i].trainable && !units(c)[i].used_fwd)
            zr_core_emit_param(c, out, n, ZR_ACT_WAIT_PARAM, i, -1);
}

int zr_core_end_step(struct zr_core *c, const struct zr_core_event *ev, struct zr_action *out, int32_t *n)
{
    int err = zr_core_refuse_open(c, "zero_step");
    if (!err && !c->complete)
        err = check_count(c, "zero_step");
    if (err)
        return err;
    zr_core_note(c, ZR_STEP_WORD | (uint32_t)ev->unit);

    if (c->complete)
        leave_out_again(c, out, n);
    else
        complete_grads(c, out, n);
    zr_core_emit(out, n, ZR_ACT_NORM, -1, -1);
    zr_core_learn(c);
    update_in_order(c, out, n);
    int32_t last = c->model_holds ? last_in_place(c, out, *n) : -1;
    if (last >= 0) /* its UPDATE is behind every reduction */
        c->last_reduced = last;
    empty_stale_slots(c);
    zr_core_prefetch(c, out, n);
    if (c->model_holds)
        wait_unbracketed(c, out, n);
    zr_core_return_grads(c, out, n);
    if (c->model_holds)
        clear_grads(c, out, n);
    forget_step(c);
    return 0;
}
