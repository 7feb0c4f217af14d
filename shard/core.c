/* SPDX-License-Identifier: Apache-2.0 */
/* core.c: the schedule core: making it, the calls that it takes, and questions about its state
 * (core_inside.h). */
#include "kernels/asserts.h"
#include "shard/core_inside.h"

#include <stdio.h>
#include <string.h>

/* ---- making a core ---- */

/* Room for the order and the recording: four times the declared step, and never tight for small models. A
 * step of more calls is recorded by its first micro-batch. */
static int32_t capacity(const struct zr_core_spec *s)
{
    int64_t repeats = s->order_of_step ? 1 : zr_max(s->grad_accum_steps, s->max_grad_accum_steps);
    int64_t step = s->n_order * repeats * 4 + 256, micro = (int64_t)s->n_order * 4 + 256;
    int64_t n = zr_min(step, zr_max(micro, 1 << 17));
    return (int32_t)zr_min(n, 1 << 24);
}

static void place(struct zr_core *c, const struct zr_core_spec *s)
{
    uint32_t at = (uint32_t)sizeof *c;
    c->cap = capacity(s);
#define PLACE(field, type, n)                                                                                \
    (c->field = (at + 15) & ~15u, at = c->field + (uint32_t)sizeof(type) * (uint32_t)(n))
    PLACE(units_at, struct unit, s->n_units);
    PLACE(pslots_at, struct pslot, s->n_param_slots);
    PLACE(gslots_at, struct gslot, s->n_grad_slots);
    PLACE(order_at, struct zero_call, c->cap);
    PLACE(rec_at, struct zero_call, c->cap);
    PLACE(next_at, int32_t, c->cap);
    PLACE(begins_at, int32_t, c->cap);
    PLACE(by_size_at, int32_t, s->n_param_slots);
    PLACE(keys_at, uint64_t, 2 * zr_core_leaves(s->n_param_slots));
    PLACE(bracket_sizes_at, int32_t, c->cap);
    PLACE(taken_at, int32_t, s->n_param_slots);
#undef PLACE
    c->total = (at + 15) & ~15u;
}

size_t zr_core_bytes(const struct zr_core_spec *s)
{
    struct zr_core c;
    place(&c, s);
    return c.total;
}

/* The end of a step gives most actions: the norm, and for a unit at most hide, reduce, reduce-outer, fold or
 * leave-out, update, gather-outer, gather, gather ahead, wait and use-grad. */
int32_t zr_core_most_actions(int32_t n_units)
{
    return 10 * n_units + 16;
}

int32_t zr_core_max_actions(const struct zr_core_spec *s)
{
    return zr_core_most_actions(s->n_units);
}

static void copy_units(struct zr_core *c, const struct zr_core_spec *s)
{
    for (int32_t u = 0; u < c->n_units; u++) {
        const struct zr_core_unit_spec *from = &s->units[u];
        struct unit *to = &units(c)[u];
        to->param_bytes = from->param_bytes;
        to->grad_bytes = from->grad_bytes;
        to->resident = from->resident;
        to->trainable = from->trainable;
        to->sum_in_place = from->sum_in_place;
        to->grad_home = from->grad_home || from->sum_in_place || s->model_holds;
        to->pslot = to->gslot = to->first_use = -1;
        to->next_use = NEVER;
        c->n_sharded += !from->resident;
        c->n_trainable += from->trainable;
    }
    for (int32_t i = 0; i < s->n_order; i++)
        units(c)[s->order[i].unit].uses += zr_phase_has_grads(s->order[i].phase) && !s->order[i].is_end;
    for (int32_t u = 0; u < c->n_units; u++) {
        if (s->order_of_step)
            units(c)[u].uses = (units(c)[u].uses + c->accum - 1) / c->accum;
        units(c)[u].uses += units(c)[u].uses == 0;
    }
}

static void open_slots(struct zr_core *c, const struct zr_core_spec *s)
{
    for (int32_t i = 0; i < c->n_pslots; i++) {
        int64_t bytes = s->param_slot_bytes[i];
        pslots(c)[i].bytes = bytes;
        pslots(c)[i].unit = -1;
        c->second = bytes > c->reserved ? c->reserved : bytes > c->second ? bytes : c->second;
        c->reserved = bytes > c->reserved ? bytes : c->reserved;
    }
    if (!s->reserve_largest || c->reserved == c->second)
        c->reserved = 0;
    c->n_leaves = zr_core_leaves(c->n_pslots);
    zr_core_sort_slots(c);
    c->n_small = c->reserved ? zr_core_first_fit(c, c->second + 1) : c->n_pslots;
    for (int32_t u = 0; u < c->n_units; u++)
        units(c)[u].fits = zr_core_first_fit(c, units(c)[u].param_bytes);
    for (int32_t i = 0; i < c->n_gslots; i++) {
        gslots(c)[i].bytes = s->grad_slot_bytes[i];
        gslots(c)[i].unit = -1;
    }
}

struct zr_core *zr_core_init(void *mem, const struct zr_core_spec *s)
{
    struct zr_core *c = mem;
    /* Padding must be zero, because cores are compared by bytes. */
    memset(mem, 0, zr_core_bytes(s));
    place(c, s);
    c->n_units = s->n_units;
    c->n_pslots = s->n_param_slots;
    c->n_gslots = s->n_grad_slots;
    c->prefetch = s->prefetch;
    c->accum = s->grad_accum_steps;
    c->n_sums = s->n_sums;
    c->model_holds = s->model_holds;
    c->gathers_updated = s->gathers_updated;
    c->outer = s->outer;
    c->outer_each = s->outer_each;
    c->outer_gathers = s->outer_gathers;
    c->n_group_slots = s->n_group_slots;
    c->reduce_each = s->reduce_each;
    c->order_of_step = s->order_of_step;
    c->in_stages = s->in_stages;
    c->last_reduced = -1;
    copy_units(c, s);
    open_slots(c, s);
    if (s->n_order && s->n_order <= c->cap) {
        for (int32_t i = 0; i < s->n_order; i++)
            zr_core_copy_call(&order(c)[i], &s->order[i]);
        c->period = s->n_order;
        c->n_order = s->order_of_step ? s->n_order : (int64_t)s->n_order * c->accum;
    }
    zr_core_index_order(c);
    return c;
}

/* ---- brackets ---- */

/* Writes which brackets of u are open. */
static void name_open(const struct unit *u, char *text, size_t n)
{
    size_t at = 0;
    for (enum zero_phase i = ZERO_FORWARD; i <= ZERO_BACKWARD_WEIGHT; i++) {
        int k = u->open[i] ? snprintf(text + at, n - at, "%s%s", at ? " and " : "", zr_phase_name(i)) : 0;
        at += k > 0 ? (size_t)k : 0;
    }
}

/* Writes the units with an open bracket, as "3 (backward), 7 (forward)". */
static void list_open(const struct zr_core *c, char *text, size_t n)
{
    size_t at = 0;
    int32_t n_listed = 0;
    for (int32_t i = 0; i < c->n_units && at + 1 < n; i++) {
        const struct unit *u = &units(c)[i];
        if (!has_open_bracket(u))
            continue;
        char how[96];
        name_open(u, how, sizeof how);
        int k = n_listed++ < 8 ? snprintf(text + at, n - at, "%s%d (%s)", at ? ", " : "", i, how)
                               : snprintf(text + at, n - at, " and more");
        at += k > 0 ? (size_t)k : 0;
        if (n_listed > 8)
            return;
    }
}

/* The call that opens the bracket. */
static struct zero_call call_of(const struct zr_core_event *ev)
{
    return (struct zero_call){.unit = ev->unit, .phase = (uint8_t)ev->phase};
}

/* Whether the bracket has the unit's parameters. */
static bool holds(const struct zr_core_event *ev)
{
    return zr_phase_has_params(ev->phase);
}

/* Returns the smallest unit whose open bracket holds a gradient slot of at least `bytes`. -1: none. */
static int32_t smallest_in_grad_slots(const struct zr_core *c, int64_t bytes)
{
    int32_t best = -1;
    for (int32_t i = 0; i < c->n_gslots; i++) {
        int32_t unit = gslots(c)[i].bytes >= bytes ? gslots(c)[i].unit : -1;
        if (unit >= 0 && (best < 0 || units(c)[unit].grad_bytes < units(c)[best].grad_bytes))
            best = unit;
    }
    return best;
}

/* The same for parameter slots. */
static int32_t smallest_in_param_slots(const struct zr_core *c, int64_t bytes)
{
    int32_t best = -1;
    for (int32_t i = 0; i < c->n_pslots; i++) {
        const struct pslot *s = &pslots(c)[i];
        int32_t unit = s->pins && s->bytes >= bytes ? s->unit : -1;
        if (unit >= 0 && (best < 0 || units(c)[unit].param_bytes < units(c)[best].param_bytes))
            best = unit;
    }
    return best;
}

static int no_slot(const struct zr_core *c, const char *kind, int32_t unit, int64_t bytes, int32_t holder,
                   int64_t holder_bytes, const char *otherwise)
{
    char open[320] = "none";
    list_open(c, open, sizeof open);
    return zr_fail(ZERO_ERR_BUDGET,
                   "zero_begin: no %s slot is free for unit %d (%lld bytes): open brackets hold all that are "
                   "large enough. Open units: %s. Is a zero_end missing? Otherwise give a tensor of unit %d "
                   "the flag ZERO_RESIDENT, which keeps the %lld bytes of its %ss outside the slots, or "
                   "declare the nesting in cfg.memory.order%s",
                   kind, unit, (long long)bytes, open, holder, (long long)holder_bytes, kind, otherwise);
}

static int no_param_slot(const struct zr_core *c, int32_t unit)
{
    int64_t bytes = units(c)[unit].param_bytes;
    int32_t holder = smallest_in_param_slots(c, bytes);
    holder = holder < 0 ? unit : holder;
    return no_slot(c, "parameter", unit, bytes, holder, units(c)[holder].param_bytes,
                   ", or raise prefetch or param_budget_bytes");
}

static int no_grad_slot(const struct zr_core *c, int32_t unit)
{
    int64_t bytes = units(c)[unit].grad_bytes;
    int32_t holder = smallest_in_grad_slots(c, bytes);
    holder = holder < 0 ? unit : holder;
    return no_slot(c, "gradient", unit, bytes, holder, units(c)[holder].grad_bytes, "");
}

int64_t zr_core_most_brackets(const struct zr_core *c, const struct unit *u)
{
    return (int64_t)u->uses * c->accum;
}

int zr_core_refuse_in_all(const char *call)
{
    return zr_fail(ZERO_ERR_ORDER, "%s: zero_gather_all holds all parameters; call zero_release_all first",
                   call);
}

int zr_core_refuse_open(const struct zr_core *c, const char *call)
{
    if (c->n_open)
        return zr_fail(ZERO_ERR_ORDER, "%s: unit %d has an open bracket; end it first", call,
                       zr_core_open_unit(c));
    return c->all ? zr_core_refuse_in_all(call) : 0;
}

/* A forward bracket while all parameters are gathered. It needs nothing, and is not recorded. */
static int bracket_in_all(struct zr_core *c, int32_t unit, bool *open, bool begins)
{
    struct zero_call call = {.unit = unit, .phase = ZERO_FORWARD, .is_end = !begins};
    zr_core_note(c, zr_core_call_word(&call));
    *open = begins;
    c->n_open += begins ? 1 : -1;
    return 0;
}

/* Returns the phase if a bracket of it is open, or the phase of an open bracket that has the unit's gradient
 * as this one would. 0: there is none. */
static enum zero_phase open_already(const struct unit *u, enum zero_phase phase)
{
    enum zero_phase other = phase == ZERO_BACKWARD ? ZERO_BACKWARD_WEIGHT : ZERO_BACKWARD;
    bool excludes = zr_phase_has_grads(phase) && u->open[other];
    return u->open[phase] ? phase : excludes ? other : 0;
}

static int refuse_begin(struct zr_core *c, const struct zr_core_event *ev)
{
    struct unit *u = &units(c)[ev->unit];
    enum zero_phase open = open_already(u, ev->phase);
    if (open)
        return zr_fail(ZERO_ERR_ORDER, "zero_begin: unit %d is already open in %s; end it first", ev->unit,
                       zr_phase_name(open));
    if (c->all && zr_phase_is_backward(ev->phase))
        return zr_fail(ZERO_ERR_ORDER,
                       "zero_begin: unit %d in %s while zero_gather_all holds all parameters; call "
                       "zero_release_all first",
                       ev->unit, zr_phase_name(ev->phase));
    if (zr_phase_is_backward(ev->phase) && c->complete)
        return zr_fail(ZERO_ERR_ORDER,
                       "zero_begin: unit %d in %s after zero_norm, which ended the gradients of this "
                       "step: call zero_step or zero_drop first",
                       ev->unit, zr_phase_name(ev->phase));
    if (zr_phase_has_grads(ev->phase) && u->trainable && u->n_bwd >= zr_core_most_brackets(c, u))
        return zr_fail(
            ZERO_ERR_ORDER,
            "zero_begin: unit %d has had %d backward bracket%s since the last zero_step, and may have no "
            "more: zero_tensor.uses is %d and grad_accum_steps is %d. Is a zero_step missing? Otherwise set "
            "grad_accum_steps to the micro-batches of a step, or zero_tensor.uses to the unit's backward "
            "brackets in a micro-batch (with cfg.memory.order, declare them there)",
            ev->unit, u->n_bwd, u->n_bwd == 1 ? "" : "s", u->uses, c->accum);
    return 0;
}

/* Returns the slot where the unit is, or where it goes for the call at that position of the order (-1: it is
 * not in the order). Returns -1 if there is none. */
static int32_t find_param_slot(const struct zr_core *c, const struct unit *u, int64_t at)
{
    struct zr_slot_range all = {u->fits, c->n_pslots}, range = zr_core_slots_at(c, at, u);
    if (n_holding(u) || zr_core_in_range(c, range, u->pslot))
        return u->pslot;
    int32_t slot = zr_core_pick_param(c, range, NEVER);
    if (slot < 0)
        slot = u->pslot;
    return slot < 0 ? zr_core_pick_param(c, all, NEVER) : slot;
}

/* Finds the slots of a bracket. -1: it needs none. */
static int find_slots(const struct zr_core *c, const struct zr_core_event *ev, int32_t *pslot, int32_t *gslot)
{
    const struct unit *u = &units(c)[ev->unit];
    *pslot = *gslot = -1;
    if (!u->resident && holds(ev)) {
        struct zero_call call = call_of(ev);
        *pslot = find_param_slot(c, u, zr_core_find_call(c, &call));
        if (*pslot < 0)
            return no_param_slot(c, ev->unit);
    }
    if (zr_phase_has_grads(ev->phase) && u->trainable && !u->grad_home) {
        *gslot = zr_core_pick_grad(c, u->grad_bytes);
        if (*gslot < 0)
            return no_grad_slot(c, ev->unit);
    }
    return 0;
}

/* Gives the model the unit's gradient, for a contribution. */
static void give_grad(struct zr_core *c, int32_t unit, int32_t gslot, struct zr_action *out, int32_t *n)
{
    struct unit *u = &units(c)[unit];
    bool fill = true;
    if (u->grad_home) {
        fill = u->dirty;
        u->dirty = false;
    } else {
        gslots(c)[gslot].unit = unit;
        u->gslot = gslot;
    }
    struct zr_action *a = zr_core_emit(out, n, ZR_ACT_USE_GRAD, unit, gslot);
    a->fill = fill;
    a->bracket = a->keeps_overwritten = true;
}

static int begin(struct zr_core *c, const struct zr_core_event *ev, struct zr_action *out, int32_t *n)
{
    struct unit *u = &units(c)[ev->unit];
    bool *open = &u->open[ev->phase];
    int32_t pslot, gslot;
    int err = refuse_begin(c, ev);
    if (!err && c->all)
        return bracket_in_all(c, ev->unit, open, true);
    if (!err)
        err = find_slots(c, ev, &pslot, &gslot);
    if (err)
        return err;

    struct zero_call call = call_of(ev);
    zr_core_follow(c, &call);
    /* The previous micro-batch ended early. */
    if (!zr_phase_has_grads(ev->phase) && !c->n_open_bwd && zr_core_is_lost(c))
        zr_core_return_grads(c, out, n);
    if (holds(ev)) {
        if (!u->resident && u->pslot != pslot)
            zr_core_gather(c, ev->unit, pslot, out, n);
        zr_core_pin(c, pslot, 1);
        zr_core_emit_param(c, out, n, ZR_ACT_USE_PARAM, ev->unit, pslot);
    }
    *open = true;
    c->n_open++;
    c->n_open_bwd += zr_phase_has_grads(ev->phase);
    if (zr_phase_has_grads(ev->phase))
        u->used_bwd = true;
    else
        u->used_fwd = true;
    if (zr_phase_has_grads(ev->phase) && u->trainable)
        give_grad(c, ev->unit, gslot, out, n);
    zr_core_prefetch(c, out, n);
    return 0;
}

/* Takes the gradient back: the contribution is complete. */
static void take_grad(struct zr_core *c, int32_t unit, struct zr_action *out, int32_t *n)
{
    struct unit *u = &units(c)[unit];
    int32_t slot = u->gslot;
    u->n_bwd++;
    u->pending = true;
    bool reduce = c->reduce_each || u->n_bwd % c->accum == 0;
    struct zr_action *a = zr_core_emit(out, n, ZR_ACT_HIDE_GRAD, unit, slot);
    a->bracket = true;
    a->in_flight = reduce && c->model_holds;
    if (reduce) {
        zr_core_reduce(c, unit, slot, out, n);
        u->dirty = true;
    }
    if (reduce && c->model_holds && !u->sum_in_place)
        c->last_reduced = unit;
    if (slot >= 0) {
        gslots(c)[slot].unit = -1;
        gslots(c)[slot].released = ++c->clock;
    }
}

static int end(struct zr_core *c, const struct zr_core_event *ev, struct zr_action *out, int32_t *n)
{
    struct unit *u = &units(c)[ev->unit];
    bool *open = &u->open[ev->phase];
    if (!*open)
        return zr_fail(ZERO_ERR_ORDER, "zero_end: unit %d is not open in %s", ev->unit,
                       zr_phase_name(ev->phase));
    if (c->all)
        return bracket_in_all(c, ev->unit, open, false);
    struct zero_call call = call_of(ev);
    call.is_end = 1;
    zr_core_follow(c, &call);
    *open = false;
    c->n_open--;
    c->n_open_bwd -= zr_phase_has_grads(ev->phase);
    if (holds(ev))
        zr_core_pin(c, u->pslot, -1);
    if (holds(ev) && n_holding(u) == 0)
        zr_core_emit(out, n, ZR_ACT_HIDE_PARAM, ev->unit, u->pslot);
    if (zr_phase_is_backward(ev->phase))
        c->any_backward = true;
    if (zr_phase_has_grads(ev->phase) && u->trainable)
        take_grad(c, ev->unit, out, n);
    if (!c->n_open_bwd && (zr_core_is_lost(c) || zr_core_ended_micro_batch(c)))
        zr_core_return_grads(c, out, n);
    zr_core_prefetch(c, out, n);
    return 0;
}

/* ---- other calls ---- */

/* The parameters were written from outside, so a gathered copy is stale. */
static int rewrite(struct zr_core *c, const struct zr_core_event *ev)
{
    struct unit *u = &units(c)[ev->unit];
    if (has_open_bracket(u))
        return zr_fail(ZERO_ERR_ORDER, "zero_write: unit %d has an open bracket; end it first", ev->unit);
    if (c->all)
        return zr_core_refuse_in_all("zero_write");
    if (u->pslot >= 0)
        zr_core_empty_slot(c, u->pslot);
    return 0;
}

/* Between steps only. The last UPDATE of every unit has been issued then, on the stream of the copy. */
static int snapshot(struct zr_core *c, struct zr_action *out, int32_t *n)
{
    if (c->n_open)
        return zr_fail(ZERO_ERR_ORDER, "zero_save: unit %d has an open bracket; end it first",
                       zr_core_open_unit(c));
    if (!zr_core_between_steps(c))
        return zr_fail(ZERO_ERR_ORDER,
                       "zero_save: a step has begun; save before its first backward or after zero_step");
    zr_core_note(c, ZR_SNAPSHOT_WORD);
    zr_core_emit(out, n, ZR_ACT_SNAPSHOT, -1, -1);
    return 0;
}

/* Gathers the unit unless it is there. Returns false if open brackets leave it no slot. */
static bool fetch(struct zr_core *c, int32_t id, struct zr_action *out, int32_t *n)
{
    const struct unit *u = &units(c)[id];
    int32_t slot = u->resident || u->pslot >= 0 ? u->pslot : find_param_slot(c, u, -1);
    if (!u->resident && slot < 0)
        return false;
    if (!u->resident && u->pslot < 0)
        zr_core_gather(c, id, slot, out, n);
    return true;
}

/* Gathers one unit after the other through the slots. With two slots, the next unit is gathered while one is
 * copied. */
static int gather_all(struct zr_core *c, const struct zr_core_event *ev, struct zr_action *out, int32_t *n)
{
    int err = zr_core_refuse_open(c, "zero_gather_all");
    if (err)
        return err;
    for (int32_t i = 0; i < c->n_units; i++)
        if (!units(c)[i].resident && units(c)[i].fits == c->n_pslots)
            return zr_fail(ZERO_ERR_BUDGET,
                           "zero_gather_all: no parameter slot is large enough for unit %d (%lld bytes)", i,
                           (long long)units(c)[i].param_bytes);
    zr_core_note(c, ZR_ALL_WORD | (uint32_t)ev->unit);
    for (int32_t i = 0; i < c->n_units; i++) {
        fetch(c, i, out, n);
        int32_t slot = units(c)[i].pslot;
        zr_core_pin(c, slot, 1);
        if (i + 1 < c->n_units)
            fetch(c, i + 1, out, n);
        zr_core_emit_param(c, out, n, ZR_ACT_KEEP_PARAM, i, slot);
        zr_core_pin(c, slot, -1);
    }
    c->all = true;
    return 0;
}

static int release_all(struct zr_core *c, struct zr_action *out, int32_t *n)
{
    if (!c->all)
        return zr_fail(ZERO_ERR_ORDER, "zero_release_all: there was no zero_gather_all");
    if (c->n_open)
        return zr_fail(ZERO_ERR_ORDER, "zero_release_all: unit %d has an open bracket; end it first",
                       zr_core_open_unit(c));
    zr_core_note(c, ZR_RELEASE_WORD);
    c->all = false;
    zr_core_prefetch(c, out, n);
    return 0;
}

static int take(struct zr_core *c, const struct zr_core_event *ev, struct zr_action *out, int32_t *n_out)
{
    bool has_unit = ev->kind == ZR_EV_BEGIN || ev->kind == ZR_EV_END || ev->kind == ZR_EV_REWRITE;
    if (has_unit && (ev->unit < 0 || ev->unit >= c->n_units))
        return zr_fail(ZERO_ERR_ARG, "unit is %d; allowed: 0..%d", ev->unit, c->n_units - 1);
    switch (ev->kind) {
    case ZR_EV_BEGIN:
        return begin(c, ev, out, n_out);
    case ZR_EV_END:
        return end(c, ev, out, n_out);
    case ZR_EV_MICRO:
        return zr_core_micro(c, out, n_out);
    case ZR_EV_STEP:
        return zr_core_end_step(c, ev, out, n_out);
    case ZR_EV_REWRITE:
        return rewrite(c, ev);
    case ZR_EV_SNAPSHOT:
        return snapshot(c, out, n_out);
    case ZR_EV_NORM:
        return zr_core_norm(c, ev, out, n_out);
    case ZR_EV_DROP:
        return zr_core_drop(c, out, n_out);
    case ZR_EV_GATHER_ALL:
        return gather_all(c, ev, out, n_out);
    case ZR_EV_RELEASE_ALL:
        return release_all(c, out, n_out);
    case ZR_EV_EVALUATED:
        return zr_core_evaluated(c, out, n_out);
    }
    return zr_fail(ZERO_ERR_ARG, "unknown event %d", (int)ev->kind);
}

int zr_core_take(struct zr_core *c, const struct zr_core_event *ev, struct zr_action *out, int32_t *n_out)
{
    *n_out = 0;
    int err = take(c, ev, out, n_out);
    ZR_ASSERT(*n_out <= zr_core_most_actions(c->n_units));
    ZR_ASSERT(!err || *n_out == 0);
    ZR_ASSERT(zr_core_valid(c));
    return err;
}

/* ---- questions ---- */

const char *zr_action_name(enum zr_action_kind kind)
{
    static const char *const name[] = {[ZR_ACT_USE_PARAM] = "use_param",
                                       [ZR_ACT_HIDE_PARAM] = "hide_param",
                                       [ZR_ACT_WAIT_PARAM] = "wait_param",
                                       [ZR_ACT_USE_GRAD] = "use_grad",
                                       [ZR_ACT_HIDE_GRAD] = "hide_grad",
                                       [ZR_ACT_RETURN_GRADS] = "return_grads",
                                       [ZR_ACT_KEEP_PARAM] = "keep_param",
                                       [ZR_ACT_GATHER] = "gather",
                                       [ZR_ACT_GATHER_OUTER] = "gather_outer",
                                       [ZR_ACT_REDUCE_OUTER] = "reduce_outer",
                                       [ZR_ACT_DROP_SUMS] = "drop_sums",
                                       [ZR_ACT_REDUCE] = "reduce",
                                       [ZR_ACT_FOLD] = "fold",
                                       [ZR_ACT_LEAVE_OUT] = "leave_out",
                                       [ZR_ACT_NORM] = "norm",
                                       [ZR_ACT_UPDATE] = "update",
                                       [ZR_ACT_SNAPSHOT] = "snapshot"};
    return name[kind];
}

uint64_t zr_core_hash(const struct zr_core *c)
{
    return c->hash;
}

struct zr_core_counts zr_core_counts(const struct zr_core *c)
{
    return c->counts;
}

int32_t zr_core_open_unit(const struct zr_core *c)
{
    for (int32_t i = 0; c->n_open && i < c->n_units; i++)
        if (has_open_bracket(&units(c)[i]))
            return i;
    return -1;
}

bool zr_core_has_bracket(const struct zr_core *c, int32_t unit)
{
    return units(c)[unit].n_bwd > 0;
}

bool zr_core_leaves_out(const struct zr_core *c, int32_t unit)
{
    return units(c)[unit].trainable && is_bracketed(c) && !zr_core_has_bracket(c, unit);
}

bool zr_core_wrote_nothing(const struct zr_core *c)
{
    if (is_bracketed(c))
        return false;
    for (int32_t i = 0; i < c->n_units; i++) {
        const struct unit *u = &units(c)[i];
        if (u->trainable && (!u->used_bwd || u->n_bwd))
            return false;
    }
    return c->n_trainable > 0;
}

bool zr_core_between_steps(const struct zr_core *c)
{
    return !c->n_micro && !c->any_backward && !c->complete;
}

bool zr_core_holds_all(const struct zr_core *c)
{
    return c->all;
}

bool zr_core_complete(const struct zr_core *c)
{
    return c->complete;
}

bool zr_core_present(const struct zr_core *c, int32_t unit, int32_t *slot)
{
    *slot = units(c)[unit].pslot;
    return units(c)[unit].resident || *slot >= 0;
}
