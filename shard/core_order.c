/* SPDX-License-Identifier: Apache-2.0 */
/* core_order.c: which call comes next: the order being followed, what the model's own calls are, and when
 * they become the order; see core.h. */
#include "kernels/asserts.h"
#include "shard/core_inside.h"

#include <string.h>

/* ---- the place in the order ---- */

/* How many backward passes each unit has in a micro-batch; n_all: units that have any. */
static int32_t spread_passes(struct zr_core *c, int64_t repeats)
{
    int32_t n_all = 0;
    for (int32_t u = 0; u < c->n_units; u++)
        units(c)[u].n_each = units(c)[u].n_passed = 0;
    for (int32_t i = 0; i < c->period; i++)
        units(c)[order(c)[i].unit].n_each += order(c)[i].backward && order(c)[i].is_end;
    for (int32_t u = 0; u < c->n_units; u++) {
        struct unit *x = &units(c)[u];
        int64_t n_step = x->trainable ? x->n_each * repeats : 0;
        c->uneven |= n_step % c->accum != 0;
        x->n_each = (int32_t)(n_step / c->accum);
        n_all += x->n_each > 0;
    }
    return n_all;
}

/* Marks the calls of the order that end a micro-batch: no backward bracket is open any more, and every unit
 * has had the same part of its backward passes of the step. */
static void mark_micro_batches(struct zr_core *c)
{
    int64_t repeats = c->period ? c->n_order / c->period : 0;
    c->uneven = repeats * c->period != c->n_order;
    int32_t n_all = spread_passes(c, repeats);
    int32_t n_done = 0, n_open = 0, n_behind = n_all; /* micro-batches; backward brackets; units that lack
                                                         passes of the micro-batch at hand */
    for (int32_t i = 0; i < c->period; i++) {
        const struct zr_call *call = &order(c)[i];
        struct unit *x = &units(c)[call->unit];
        if (call->backward)
            n_open += call->is_end ? -1 : 1;
        if (!call->is_end)
            continue;
        if (call->backward && x->n_each > 0) {
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
    c->uneven |=
        n_all > 0 && n_done * repeats != c->accum; /* the period is no whole number of micro-batches */
}

/* Of several pipeline stages on a rank some go through micro-batches before others do: a stage's micro-batch
 * ends with its action, as the order says unless it was learned. */
static void mark_actions(struct zr_core *c)
{
    bool any = false;
    for (int32_t i = 0; i < c->period; i++)
        any |= order(c)[i].ends_action;
    if (!any)
        return;
    for (int32_t i = 0; i < c->period; i++)
        if (order(c)[i].is_end)
            next_begin(c)[i] = order(c)[i].ends_action;
    c->uneven = false;
}

static void set_next_use(struct zr_core *c, struct unit *u, int64_t next)
{
    u->next_use = next;
    if (u->pslot >= 0)
        zr_core_touch_slot(c, u->pslot);
}

/* The call expected next is the first of the period that starts at base. */
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
    const struct zr_call *call = &order(c)[i];
    struct unit *u = &units(c)[call->unit];
    if (!call->is_end && !u->resident && zr_call_needs_param(call)) {
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
        const struct zr_call *call = &order(c)[i];
        if (call->is_end || !zr_call_needs_param(call))
            continue;
        next_begin(c)[i] = units(c)[call->unit].first_use;
        units(c)[call->unit].first_use = i;
    }
    c->n_begins = 0;
    for (int32_t i = 0; i < c->period; i++)
        if (!order(c)[i].is_end && zr_call_needs_param(&order(c)[i]) && !units(c)[order(c)[i].unit].resident)
            begins(c)[c->n_begins++] = i;
    zr_core_place_brackets(c);
    start_period(c, 0);
}

/* ---- following it ---- */

static bool same_call(const struct zr_call *a, const struct zr_call *b)
{
    return a->unit == b->unit && a->backward == b->backward && a->apart == b->apart && a->is_end == b->is_end;
}

static bool is_expected(const struct zr_core *c, const struct zr_call *call)
{
    return c->pos < c->n_order && same_call(call, &order(c)[c->pos - c->base]);
}

/* FNV-1a's step: cheap, and any difference stays. */
void zr_core_note(struct zr_core *c, uint64_t word)
{
    c->hash = (c->hash ^ (word + 1)) * 0x100000001b3u;
}

/* What was recorded is one forward pass, twice: an evaluation and the pass itself. One is enough. */
static void drop_repeat(struct zr_core *c)
{
    int32_t half = c->n_kept / 2;
    if (c->n_rec % 2 || c->n_kept < c->n_rec || c->rec_full)
        return;
    for (int32_t i = 0; i < half; i++)
        if (!same_call(&recorded(c)[i], &recorded(c)[half + i]))
            return;
    c->n_rec = c->n_kept = half;
}

/* The fewest of the kept calls that all of them repeat; at most all. border[i]: the longest beginning of the
 * first i + 1 calls that they end with too (Knuth, Morris and Pratt). */
static int32_t find_period(const struct zr_core *c)
{
    const struct zr_call *rec = recorded(c);
    int32_t *border = borders(c), n = c->n_kept, same = 0;
    border[0] = 0;
    for (int32_t i = 1; i < n; i++) {
        while (same > 0 && !same_call(&rec[same], &rec[i]))
            same = border[same - 1];
        same += same_call(&rec[same], &rec[i]);
        border[i] = same;
    }
    return n - same;
}

static void record(struct zr_core *c, const struct zr_call *call)
{
    if (c->rec_full)
        return;
    bool room = c->n_rec < c->cap;
    if (c->n_kept == c->n_rec && !room) {
        c->n_kept = find_period(c);
        c->rec_at_call = c->cap % c->n_kept;
    }
    if (c->n_kept == c->n_rec && room)
        recorded(c)[c->n_kept++] = *call;
    else if (same_call(call, &recorded(c)[c->rec_at_call]))
        c->rec_at_call = c->rec_at_call + 1 == c->n_kept ? 0 : c->rec_at_call + 1;
    else
        c->rec_full = true;
    c->n_rec += !c->rec_full;
}

/* Nothing is open or reduced, so a model that makes its first call again may be evaluating. */
static bool may_evaluate(const struct zr_core *c)
{
    return !c->order_of_step && !c->n_open && !c->any_backward && c->n_rec;
}

/* A model that makes its first call again unexpectedly either begins a pass anew (it has been evaluating) or
 * uses its first unit once more (a head tied to the embedding). What it does until its first backward tells
 * which. */
static void notice_evaluation(struct zr_core *c, const struct zr_call *call)
{
    if (!may_evaluate(c))
        return;
    bool again = same_call(call, &recorded(c)[0]);
    if (again && !is_expected(c, call)) {
        c->restarted = true;
        go_to(c, 0);
    }
    if (c->restarted && (again || call->backward || call->apart))
        drop_repeat(c);
}

uint64_t zr_core_call_word(const struct zr_call *call)
{
    return (uint64_t)(uint32_t)call->unit << 3 | (uint64_t)call->apart << 2 | (uint64_t)call->backward << 1 |
           call->is_end;
}

/* Where in the order a call is that is made at pos: further on if some were left out, before if the model
 * went back. What is not in one period is in none: -1. */
static int64_t find_from(const struct zr_core *c, const struct zr_call *call, int64_t pos)
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

int64_t zr_core_find_call(const struct zr_core *c, const struct zr_call *call)
{
    if (!c->sized)
        return -1;
    if (is_expected(c, call))
        return c->pos;
    bool anew = may_evaluate(c) && same_call(call, &recorded(c)[0]);
    return find_from(c, call, anew ? 0 : c->pos);
}

static void stray(struct zr_core *c, const struct zr_call *call)
{
    c->counts.n_strays++;
    c->strayed = true;
    int64_t at = find_from(c, call, c->pos);
    if (at >= 0)
        go_to(c, at + 1);
}

void zr_core_follow(struct zr_core *c, const struct zr_call *call)
{
    c->counts.n_calls++;
    zr_core_note(c, zr_core_call_word(call));
    notice_evaluation(c, call);
    record(c, call);
    if (is_expected(c, call))
        pass_call(c);
    else
        stray(c, call);
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
    c->n_rec = c->n_kept = c->rec_at_call = 0;
    start_period(c, 0);
    c->restarted = c->rec_full = c->strayed = false;
}

static bool learned_anew(const struct zr_core *c)
{
    bool differs = c->n_rec != c->n_order;
    /* Where two that repeat are alike for as long as both periods, they are alike. */
    int64_t n = zr_min(c->n_rec, (int64_t)c->n_kept + c->period);
    for (int64_t i = 0; !differs && i < n; i++)
        differs = !same_call(&recorded(c)[i % c->n_kept], &order(c)[i % c->period]);
    return differs && c->n_rec && !c->rec_full;
}

void zr_core_learn(struct zr_core *c)
{
    if (learned_anew(c)) {
        memcpy(order(c), recorded(c), (size_t)c->n_kept * sizeof(struct zr_call));
        c->period = c->n_kept;
        c->n_order = c->n_rec;
        zr_core_index_order(c);
        c->counts.n_replans++;
    }
    zr_core_start_recording(c);
}

/* The order repeats a micro-batch where it divides into as many as a step had; any other is kept, and a step
 * that differs from it makes a new one. */
void zr_core_set_accum(struct zr_core *c, int32_t n)
{
    ZR_ASSERT(zr_core_between_steps(c) && !c->order_of_step && n > 0);
    zr_core_note(c, ZR_ACCUM_WORD | (uint32_t)n);
    if (c->n_order % c->accum == 0) {
        int64_t micro_batch = c->n_order / c->accum;
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
    c->n_rec += (int64_t)n * c->period;
    c->rec_at_call = c->n_kept ? (int32_t)(c->n_rec % c->n_kept) : 0;
    start_period(c, c->base + (int64_t)n * c->period);
}
