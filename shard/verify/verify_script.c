/* SPDX-License-Identifier: Apache-2.0 */
/* verify_script.c: writes the script of a case: the sequence of calls that the model makes on one pipeline
 * stage. All ranks of the pipeline stage execute the same script. Draws that pipeline stages must share come
 * from the state w->common. */
#include "shard/verify/verify_writing.h"

#include <stdlib.h>

void zr_write(struct zr_script *s, struct zr_script_op op)
{
    if (s->n == s->cap) {
        s->cap = s->cap ? s->cap * 2 : 256;
        s->ops = realloc(s->ops, (size_t)s->cap * sizeof *s->ops);
        if (!s->ops)
            abort();
    }
    s->ops[s->n++] = op;
}

enum { DROPPED_STEP = 100 }; /* added to the numbers of dropped steps; cases have fewer steps */

void zr_write_call(struct zr_writing *w, enum zr_script_op_kind kind)
{
    zr_write(w->s, (struct zr_script_op){.kind = (uint8_t)kind, .index = -1, .step = w->step});
}

static bool bracketed(const struct zr_writing *w, int32_t u, bool backward)
{
    return !(backward ? w->no_backward : w->no_forward)[u];
}

/* An operation on unit u; backward is that of the current action. */
static struct zr_script_op op_of(const struct zr_writing *w, enum zr_script_op_kind kind, int32_t u,
                                 bool backward)
{
    return (struct zr_script_op){.kind = (uint8_t)kind,
                                 .phase = backward ? (uint8_t)w->phase : ZERO_FORWARD,
                                 .index = u,
                                 .step = w->step};
}

static void begin(struct zr_writing *w, int32_t u, bool backward)
{
    if (bracketed(w, u, backward))
        zr_write(w->s, op_of(w, ZR_DO_BEGIN, u, backward));
}

static void end(struct zr_writing *w, int32_t u, bool backward)
{
    if (bracketed(w, u, backward))
        zr_write(w->s, op_of(w, ZR_DO_END, u, backward));
}

static void use_as(struct zr_writing *w, int32_t u, bool backward, bool again)
{
    struct zr_script_op op = op_of(w, ZR_DO_USE, u, backward);
    op.step += w->dropped ? DROPPED_STEP : 0;
    op.again = again;
    zr_write(w->s, op);
    zr_write_moves(w);
    if (zr_phase_has_grads(op.phase) && !w->dropped)
        w->s->n_contrib[w->step * w->n_units + u]++;
}

static void use(struct zr_writing *w, int32_t u, bool backward)
{
    use_as(w, u, backward, false);
}

static void whole_as(struct zr_writing *w, int32_t u, bool backward, bool again)
{
    begin(w, u, backward);
    use_as(w, u, backward, again);
    end(w, u, backward);
}

static void whole(struct zr_writing *w, int32_t u, bool backward)
{
    whole_as(w, u, backward, false);
}

void zr_write_forward(struct zr_writing *w, const int32_t *list, int32_t n)
{
    enum zr_verify_pattern p = w->c->pattern;
    bool nested = p == ZR_USE_NESTED && n > 1;
    if (nested) {
        begin(w, list[0], false);
        use(w, list[0], false);
    }
    for (int32_t i = nested; i < n; i++) {
        if (p != ZR_USE_OVERLAP) {
            whole(w, list[i], false);
            continue;
        }
        begin(w, list[i], false);
        if (i > 0)
            end(w, list[i - 1], false);
        use(w, list[i], false);
    }
    if (p == ZR_USE_OVERLAP)
        end(w, list[n - 1], false);
    if (nested) {
        use(w, list[0], false);
        end(w, list[0], false);
    }
    if (p == ZR_USE_TIED && n > 1)
        whole_as(w, list[0], false, true);
    if (p == ZR_USE_TWICE && w->n_units > 1)
        whole_as(w, w->twice, false, true);
}

/* Whether the unit gets a second backward bracket. The declared order has two of each unit; later steps
 * sometimes have the second. */
static bool repeats(struct zr_writing *w, int32_t unit)
{
    bool may = w->c->repeats && w->c->declared && w->c->pattern == ZR_USE_PLAIN;
    bool first = w->step == 0 && !w->dropped;
    w->repeated[unit] |= may && w->declaring;
    return w->repeated[unit] && (first || zr_verify_chance(w->random, w->c->repeats));
}

void zr_write_backward(struct zr_writing *w, const int32_t *list, int32_t n)
{
    enum zr_verify_pattern p = w->c->pattern;
    bool held = (p == ZR_USE_NESTED || p == ZR_USE_TIED) && n > 1;
    if (held) {
        begin(w, list[0], true);
        if (p == ZR_USE_TIED)
            use_as(w, list[0], true, true);
    }
    if (p == ZR_USE_TWICE && w->n_units > 1)
        whole_as(w, w->twice, true, true);
    for (int32_t i = n - 1; i >= held; i--) {
        if (p == ZR_USE_RECOMPUTE) {
            begin(w, list[i], true);
            whole(w, list[i], false);
            use(w, list[i], true);
            end(w, list[i], true);
        } else if (p == ZR_USE_OVERLAP) {
            begin(w, list[i], true);
            if (i < n - 1)
                end(w, list[i + 1], true);
            use(w, list[i], true);
        } else {
            whole(w, list[i], true);
            if (repeats(w, list[i]))
                whole(w, list[i], true);
        }
    }
    if (p == ZR_USE_OVERLAP)
        end(w, list[0], true);
    if (held) {
        use(w, list[0], true);
        end(w, list[0], true);
    }
}

static void snapshot(struct zr_writing *w, int32_t step)
{
    if (zr_verify_chance(w->common, w->c->snapshots))
        zr_write(w->s, (struct zr_script_op){.kind = ZR_DO_SNAPSHOT, .index = -1, .step = step});
}

/* Gathers all parameters, then uses units both without and inside brackets. */
static void all_at_once(struct zr_writing *w)
{
    if (!zr_verify_chance(w->common, w->c->alls))
        return;
    zr_write_call(w, ZR_DO_GATHER_ALL);
    for (int32_t i = 0; i < w->n_units; i++)
        use(w, w->all[i], false);
    if (!zr_in_stages(w->c)) /* with pipeline stages, brackets belong to actions */
        zr_write_forward(w, w->all, w->n_units);
    zr_write_call(w, ZR_DO_RELEASE_ALL);
}

/* With grad_in_place, zeroing is allowed only before the first micro-batch. */
void zr_write_zero(struct zr_writing *w, int where, int micro)
{
    if ((w->c->zeroes & where) && !(w->c->grad_in_place && micro > 0))
        zr_write_call(w, ZR_DO_ZERO);
}

static void values(struct zr_writing *w, int32_t step)
{
    static const uint8_t kinds[] = {ZR_DO_READ, ZR_DO_WRITE, ZR_DO_MEAN};
    int32_t t = (int32_t)zr_verify_below(w->common, 1 << 20);
    for (int k = 0; w->c->values && k < 3; k++)
        if (zr_verify_chance(w->common, 50))
            zr_write(w->s, (struct zr_script_op){.kind = kinds[k], .index = t, .step = step});
    if (w->c->values && w->c->tied && zr_in_stages(w->c) && zr_verify_chance(w->common, 50))
        zr_write(w->s, (struct zr_script_op){.kind = ZR_DO_WRITE_TIED, .index = -1, .step = step});
}

/* cut: stop in the middle of backward. */
static void micro_batch(struct zr_writing *w, int micro, bool cut)
{
    int32_t n = 0, *list = w->list;
    /* The first unit is never left out, since the largest number of backward passes gives the number of
     * micro-batches. A unit without backward brackets cannot be left out either, because its gradient is
     * reduced in any case. */
    for (int32_t i = 0; i < w->n_units; i++) {
        bool used_twice = w->c->pattern == ZR_USE_TWICE && w->all[i] == w->twice;
        if (i == 0 || !zr_verify_chance(w->random, w->c->skipped) || used_twice)
            list[n++] = w->all[i];
    }
    zr_write_zero(w, 1, micro);
    zr_write_forward(w, list, n);
    if (micro == 0 && !w->dropped)
        snapshot(w, w->step);
    zr_write_zero(w, 2, micro);
    int32_t from = cut ? (int32_t)zr_verify_below(w->random, n) : 0;
    zr_write_backward(w, list + from, n - from);
}

/* A pipeline stage drops a step only after all its actions. Otherwise other pipeline stages would wait for
 * its messages. */
static void drop_actions(struct zr_writing *w)
{
    w->dropped = true;
    zr_write_actions(w, &w->stage->walk.step, false);
    if (zr_verify_chance(w->common, w->c->norms))
        zr_write_call(w, ZR_DO_NORM);
    zr_write_call(w, ZR_DO_DROP);
    w->dropped = false;
}

/* Whether a backward pass may stop early. With several open units, a partial pass may contain calls that were
 * not declared. */
static bool may_be_cut(const struct zr_verify_case *c)
{
    return !c->declared || c->pattern == ZR_USE_PLAIN || c->pattern == ZR_USE_RECOMPUTE;
}

/* Writes a dropped step: a part of it, or all of it, with or without a call of zero_norm. */
static void drop_step(struct zr_writing *w)
{
    if (zr_in_stages(w->c)) {
        drop_actions(w);
        return;
    }
    int n = 1 + (int)zr_verify_below(w->random, w->c->accum);
    bool cut = zr_verify_chance(w->random, 50) && may_be_cut(w->c);
    w->dropped = true;
    for (int a = 0; a < n; a++) {
        micro_batch(w, a, cut && a + 1 == n);
        if (w->needs_micro && a + 1 < n)
            zr_write_call(w, ZR_DO_MICRO);
    }
    bool uneven = w->c->skipped || w->c->repeats ||
                  w->c->pattern == ZR_USE_TWICE; /* the norm may be refused, which ends the run */
    if (n == w->c->accum && !cut && !uneven && zr_verify_chance(w->common, w->c->norms))
        zr_write_call(w, ZR_DO_NORM);
    zr_write_call(w, ZR_DO_DROP);
    w->dropped = false;
}

static void change_order(struct zr_writing *w)
{
    int32_t n = w->n_units, *all = w->all;
    if (n < 2 || !zr_verify_chance(w->random, w->c->changes))
        return;
    int64_t i = zr_verify_below(w->random, n), j = zr_verify_below(w->random, n);
    int32_t swap = all[i];
    all[i] = all[j];
    all[j] = swap;
    w->s->reordered |= i != j && w->step > 0;
}

static void evaluate(struct zr_writing *w)
{
    for (int e = 0; e < w->c->n_evals; e++) {
        if (zr_in_stages(w->c))
            zr_write_actions(w, &w->stage->walk.evaluation, true);
        else
            zr_write_forward(w, w->all, w->n_units);
        values(w, w->step);
        snapshot(w, w->step);
    }
}

/* Declares the calls from `at` on, which are those of a micro-batch or of a pipeline step. With several
 * pipeline stages per rank, the last call of each backward action is marked. */
static void declare(struct zr_script *s, int32_t at, int32_t per_rank)
{
    s->order = calloc((size_t)(s->n - at) + 1, sizeof *s->order);
    if (!s->order)
        abort();
    for (; at < s->n; at++) {
        const struct zr_script_op *op = &s->ops[at];
        if (op->kind == ZR_DO_BEGIN || op->kind == ZR_DO_END)
            s->order[s->n_order++] =
                (struct zero_call){.unit = op->index, .phase = op->phase, .is_end = op->kind == ZR_DO_END};
        if (op->kind == ZR_DO_FINISH && zr_phase_has_grads(op->phase) && per_rank > 1)
            s->order[s->n_order - 1].is_end = ZR_ENDS_ACTION;
    }
}

static void train_actions(struct zr_writing *w)
{
    int32_t at = w->s->n;
    zr_write_actions(w, &w->stage->walk.step, false);
    if (w->step == 0 && w->c->declared)
        declare(w->s, at, zr_case_per_rank(w->c));
}

static void train(struct zr_writing *w)
{
    for (int a = 0; a < w->c->accum; a++) {
        int32_t at = w->s->n;
        w->declaring = w->step == 0 && a == 0 && w->c->declared;
        micro_batch(w, a, false);
        if (w->declaring)
            declare(w->s, at, 1);
        w->declaring = false;
        if (a + 1 < w->c->accum && (w->needs_micro || zr_verify_chance(w->random, 30)))
            zr_write_call(w, ZR_DO_MICRO);
    }
}

static void before_step(struct zr_writing *w)
{
    /* A gradient that was not handed out is empty, so the model may zero it until the step. */
    if (w->c->accum == 1 && !w->c->unbracketed)
        zr_write_zero(w, 8, 0);
    if (w->c->late_evals)
        zr_write_forward(w, w->all, w->n_units);
    all_at_once(w);
    if (!zr_verify_chance(w->common, w->c->norms))
        return;
    zr_write_call(w, ZR_DO_NORM);
    if (w->c->values) /* a mean uses the memory in which norms are exchanged */
        zr_write(w->s, (struct zr_script_op){.kind = ZR_DO_MEAN, .index = 0, .step = w->step});
    if (w->c->late_evals)
        zr_write_forward(w, w->all, w->n_units);
}

static void after_step(struct zr_writing *w)
{
    zr_write_zero(w, 4, 0);
    w->step++;
    all_at_once(w);
    w->step--;
    values(w, w->step + 1);
    snapshot(w, w->step + 1);
}

/* Chooses which units the model brackets, and their order. */
static void choose_units(struct zr_writing *w)
{
    const struct zr_verify_case *c = w->c;
    w->s->no_backward_brackets = zr_verify_model_holds(c) && zr_verify_chance(w->random, c->unbracketed);
    w->needs_micro = w->s->no_backward_brackets;
    w->twice = zr_verify_used_twice(c, w->n_units);
    for (int32_t u = 0; u < w->n_units; u++) {
        w->all[u] = c->reversed ? w->n_units - 1 - u : u;
        w->no_forward[u] = zr_verify_model_holds(c) && zr_verify_chance(w->random, c->unbracketed);
        w->no_backward[u] = w->s->no_backward_brackets;
    }
}

static void open_writing(struct zr_writing *w)
{
    size_t n_units = (size_t)w->n_units;
    w->all = malloc(n_units * sizeof *w->all);
    w->list = malloc(n_units * sizeof *w->list);
    w->no_forward = calloc(n_units, 1);
    w->no_backward = calloc(n_units, 1);
    w->repeated = calloc(n_units, 1);
    w->s->n_contrib = calloc((size_t)w->c->n_steps * n_units, sizeof *w->s->n_contrib);
    if (!w->all || !w->list || !w->no_forward || !w->no_backward || !w->repeated || !w->s->n_contrib)
        abort();
}

static void close_writing(struct zr_writing *w)
{
    free(w->all);
    free(w->list);
    free(w->no_forward);
    free(w->no_backward);
    free(w->repeated);
}

int zr_script_make(const struct zr_verify_case *c, const struct zr_verify_stage *stage, struct zr_script *out)
{
    uint64_t common = c->seed ^ 0x5c41, own = common ^ (uint64_t)(stage->at + 1) << 40;
    struct zr_script script = {0};
    struct zr_writing w = {.c = c,
                           .phase = ZERO_BACKWARD,
                           .stage = stage,
                           .s = &script,
                           .n_units = stage->layout->n_units,
                           .common = &common,
                           .random = zr_in_stages(c) ? &own : &common};
    open_writing(&w);
    choose_units(&w);
    for (w.step = 0; w.step < c->n_steps; w.step++) {
        change_order(&w);
        evaluate(&w);
        if (zr_verify_chance(w.common, c->drops))
            drop_step(&w);
        if (zr_in_stages(c))
            train_actions(&w);
        else
            train(&w);
        before_step(&w);
        zr_write_call(&w, ZR_DO_STEP);
        after_step(&w);
    }
    zr_write_shift_ends(&w);
    close_writing(&w);
    *out = script;
    return 0;
}

void zr_script_free(struct zr_script *s)
{
    free(s->ops);
    free(s->order);
    free(s->n_contrib);
}
