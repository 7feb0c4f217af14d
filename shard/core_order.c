/* SPDX-License-Identifier: Apache-2.0 */
/* core_order.c: which call comes next. It follows the order, records the model's own calls, and makes them
 * the order at the end of a step that left it. */
#include "kernels/asserts.h"
#include "shard/core_inside.h"

#include <string.h>

/* ---- the position in the order ---- */

/* Counts how many backward brackets each unit has in a micro-batch. Returns how many units have any. */
static int32_t spread_passes(struct zr_core *c, int64_t repeats)
{
    int32_t n_all = 0;
    for (int32_t u = 0; u < c->n_units; u++)
        units(c)[u].n_each = units(c)[u].n_passed = 0;
    for (int32_t i = 0; i < c->period; i++)
        units(c)[order(c)[i].unit].n_each += zr_phase_has_grads(order(c)[i].phase) && order(c)[i].is_end;
    for (int32_t u = 0; u < c->n_units; u++) {
        struct unit *x = &units(c)[u];
        int64_t n_step = x->trainable ? x->n_each * repeats : 0;
        c->uneven |= n_step % c->accum != 0;
        x->n_each = (int32_t)(n_step / c->accum);
        n_all += x->n_each > 0;
    }
    return n_all;
}

/* Marks the calls of the order that end a micro-batch. After such a call no backward bracket is open, and
 * each unit has had as many backward brackets as it has in the micro-batches so far. */
static void mark_micro_batches(struct zr_core *c)
{
    int64_t repeats = c->period ? c->n_order / c->period : 0;
    c->uneven = repeats * c->period != c->n_order;
    int32_t n_all = spread_passes(c, repeats);
    /* micro-batches; open backward brackets; units that lack brackets of this micro-batch */
    int32_t n_done = 0, n_open = 0, n_behind = n_all;
    for (int32_t i = 0; i < c->period; i++) {
        const struct zero_call *call = &order(c)[i];
        struct unit *x = &units(c)[call->unit];
        if (zr_phase_has_grads(call->phase))
            n_open += call->is_end ? -1 : 1;
        if (!call->is_end)
            continue;
        if (zr_phase_has_grads(call->phase) && x->n_each > 0) {
            int64_t due = (int64_t)x->n_each * (n_done + 1);
            n_behind -= ++x->n_passed == due;
            c->uneven |= x->n_passed > due;
        }
        next_begin(c)[i] = n_behind == 0 && n_open == 0;
        if (next_begin(c)[i]) {
            n_behind = n_all;
            n_done++;
        }
    }
}

/* If a rank has several pipeline stages, they take turns. The micro-batch of a stage then ends with its
 * backward action, which a declared order marks. A learned order does not. */
static void mark_actions(struct zr_core *c)
{
    bool any = false;
    for (int32_t i = 0; i < c->period; i++)
        any |= order(c)[i].is_end == ZR_ENDS_ACTION;
    if (!any)
        return;
    for (int32_t i = 0; i < c->period; i++)
        if (order(c)[i].is_end)
            next_begin(c)[i] = order(c)[i].is_end == ZR_ENDS_ACTION;
    c->uneven = false;
}

static void set_next_use(struct zr_core *c, struct unit *u, int64_t next)
{
    u->next_use = next;
    if (u->pslot >= 0)
        zr_core_touch_slot(c, u->pslot);
}

/* The next call is the first of the period that starts at base. */
static void start_period(struct zr_core *c, int64_t base)
{
    c->pos = c->base = base;
    c->ahead = 0;
    for (int32_t i = 0; c->n_sharded && i < c->n_units; i++) {
        struct unit *u = &units(c)[i];
        if (!u->resident)
            set_next_use(c, u, u->first_use >= 0 && base < c->n_order ? base + u->first_use : NEVER);
    }
}

/* Goes on to the call after pos. */
static void pass_call(struct zr_core *c)
{
    int32_t i = (int32_t)(c->pos - c->base);
    const struct zero_call *call = &order(c)[i];
    struct unit *u = &units(c)[call->unit];
    if (!call->is_end && !u->resident && zr_phase_has_params(call->phase)) {
        int32_t next = next_begin(c)[i];
        int64_t at = next >= 0 ? c->base + next : c->base + c->period + u->first_use;
        set_next_use(c, u, at < c->n_order ? at : NEVER);
        c->ahead++;
    }
    if (++c->pos - c->base == c->period) {
        c->base = c->pos;
        c->ahead = 0;
    }
}

static void go_to(struct zr_core *c, int64_t pos)
{
    if (pos < c->pos)
        start_period(c, 0);
    while (c->pos < pos)
        pass_call(c);
}

void zr_core_index_order(struct zr_core *c)
{
    mark_micro_batches(c);
    mark_actions(c);
    for (int32_t u = 0; u < c->n_units; u++)
        units(c)[u].first_use = -1;
    for (int32_t i = c->period; i-- > 0;) {
        const struct zero_call *call = &order(c)[i];
        if (call->is_end || !zr_phase_has_params(call->phase))
            continue;
        next_begin(c)[i] = units(c)[call->unit].first_use;
        units(c)[call->unit].first_use = i;
    }
    c->n_begins = 0;
    for (int32_t i = 0; i < c->period; i++)
        if (!order(c)[i].is_end && zr_phase_has_params(order(c)[i].phase) &&
            !units(c)[order(c)[i].unit].resident)
            begins(c)[c->n_begins++] = i;
    zr_core_place_brackets(c);
    start_period(c, 0);
}

/* ---- following it ---- */

static bool same_call(const struct zero_call *a, const struct zero_call *b)
{
    return a->unit == b->unit && a->phase == b->phase && !a->is_end == !b->is_end;
}

static bool is_expected(const struct zr_core *c, const struct zero_call *call)
{
    return c->pos < c->n_order && same_call(call, &order(c)[c->pos - c->base]);
}

/* One step of FNV-1a, which is cheap. A difference stays. */
void zr_core_note(struct zr_core *c, uint64_t word)
{
    c->hash = (c->hash ^ (word + 1)) * 0x100000001b3u;
}

void zr_core_copy_call(struct zero_call *to, const struct zero_call *call)
{
    to->unit = call->unit;
    to->phase = call->phase;
    to->is_end = call->is_end;
}

/* Calls beyond the room are only counted. */
static void record(struct zr_core *c, const struct zero_call *call)
{
    if (c->n_rec < c->cap)
        zr_core_copy_call(&recorded(c)[c->n_rec], call);
    c->n_rec++;
}

uint64_t zr_core_call_word(const struct zero_call *call)
{
    return (uint64_t)(uint32_t)call->unit << 3 | (uint64_t)(call->phase - ZERO_FORWARD) << 1 | !!call->is_end;
}

/* Finds a call in the order: from pos on, within one period, or else before pos. Returns -1 if the period
 * does not have it. */
static int64_t find_from(const struct zr_core *c, const struct zero_call *call, int64_t pos)
{
    int64_t ahead = zr_min(c->n_order, pos + c->period), behind = zr_min(pos, c->period);
    for (int64_t i = pos; i < ahead; i++)
        if (same_call(call, &order(c)[i % c->period]))
            return i;
    for (int64_t i = 0; i < behind; i++)
        if (same_call(call, &order(c)[i]))
            return i;
    return -1;
}

/* Before a step's first backward bracket the model may start its forward pass again, because the pass before
 * was an evaluation. */
static bool may_start_again(const struct zr_core *c)
{
    return !c->n_open && !c->any_backward;
}

static int64_t find_unexpected(const struct zr_core *c, const struct zero_call *call)
{
    return find_from(c, call, may_start_again(c) ? 0 : c->pos);
}

int64_t zr_core_find_call(const struct zr_core *c, const struct zero_call *call)
{
    if (!c->sized)
        return -1;
    return is_expected(c, call) ? c->pos : find_unexpected(c, call);
}

/* Follows a call that is not the expected one. If the forward pass starts again, it has not left the order.
 * The recording then starts again too if it is half full: long evaluations must leave room for the step. */
static void follow_unexpected(struct zr_core *c, const struct zero_call *call)
{
    int64_t at = find_unexpected(c, call);
    bool starts_again = at == 0 && may_start_again(c);
    c->counts.n_strays += !starts_again;
    c->strayed |= !starts_again;
    if (!c->strayed && c->n_rec > c->cap / 2) {
        c->n_rec = 0;
        record(c, call);
    }
    if (at >= 0)
        go_to(c, at + 1);
}

void zr_core_follow(struct zr_core *c, const struct zero_call *call)
{
    c->counts.n_calls++;
    zr_core_note(c, zr_core_call_word(call));
    record(c, call);
    if (is_expected(c, call))
        pass_call(c);
    else
        follow_unexpected(c, call);
}

bool zr_core_ended_micro_batch(const struct zr_core *c)
{
    return next_begin(c)[(c->pos > c->base ? c->pos - c->base : c->period) - 1];
}

bool zr_core_is_lost(const struct zr_core *c)
{
    return c->strayed || c->uneven;
}

/* ---- learning it ---- */

void zr_core_start_recording(struct zr_core *c)
{
    c->n_rec = 0;
    start_period(c, 0);
    c->strayed = false;
}

/* The first n calls of the step have the backward brackets of one of its micro-batches. */
static bool is_micro_batch(struct zr_core *c, int64_t n)
{
    bool is = true;
    for (int32_t u = 0; u < c->n_units; u++)
        units(c)[u].n_each = 0;
    for (int64_t i = 0; i < n; i++)
        units(c)[recorded(c)[i].unit].n_each +=
            zr_phase_has_grads(recorded(c)[i].phase) && recorded(c)[i].is_end;
    for (int32_t u = 0; u < c->n_units; u++)
        is &= !units(c)[u].trainable || (int64_t)units(c)[u].n_each * c->accum == units(c)[u].n_bwd;
    return is;
}

/* How many recorded calls make the next order: all calls of the step, or those of its first micro-batch if
 * the step was too long to record. Returns 0 if the step tells neither. */
static int32_t calls_to_learn(struct zr_core *c)
{
    if (c->n_rec <= c->cap)
        return (int32_t)c->n_rec;
    int64_t n = c->n_rec / c->accum;
    return n <= c->cap && n * c->accum == c->n_rec && is_micro_batch(c, n) ? (int32_t)n : 0;
}

void zr_core_learn(struct zr_core *c)
{
    bool differs = c->strayed || c->pos != c->n_order;
    int32_t n = differs ? calls_to_learn(c) : 0;
    if (n > 0) {
        memcpy(order(c), recorded(c), (size_t)n * sizeof(struct zero_call));
        c->period = n;
        c->n_order = c->n_rec;
        zr_core_index_order(c);
        c->counts.n_replans++;
    }
    zr_core_start_recording(c);
}

/* The order is n calls, repeated. */
static bool repeats_after(const struct zr_core *c, int64_t n)
{
    for (int64_t i = n; i < c->period; i++)
        if (!same_call(&order(c)[i], &order(c)[i % n]))
            return false;
    return true;
}

/* If the order is as many equal micro-batches as a step had, it is repeated for the new number. Any other
 * order is kept, and a step that leaves it makes a new one. */
void zr_core_set_accum(struct zr_core *c, int32_t n)
{
    ZR_ASSERT(zr_core_between_steps(c) && !c->order_of_step && n > 0);
    zr_core_note(c, ZR_ACCUM_WORD | (uint32_t)n);
    int64_t micro_batch = c->n_order / c->accum;
    if (micro_batch * c->accum == c->n_order && repeats_after(c, micro_batch)) {
        c->period = (int32_t)zr_min(c->period, micro_batch);
        c->n_order = micro_batch * n;
    }
    c->accum = n;
    zr_core_index_order(c);
    zr_core_start_recording(c);
}

void zr_core_skip(struct zr_core *c, int32_t n_done, int32_t n)
{
    for (int32_t i = 0; i < c->n_units; i++)
        units(c)[i].n_bwd += units(c)[i].n_bwd / n_done * n;
    start_period(c, c->base + (int64_t)n * c->period);
}
