/* SPDX-License-Identifier: Apache-2.0 */
/* plan_rehearse.c: finds what a steady step does by running the schedule core over the declared order. */
#include "shard/plan_slots.h"

#include <stdlib.h>
#include <string.h>

/* Copies of units that are not updated outlive a step. It may take a few steps until they are in the same
 * slots after every step, or this may never happen. */
enum { MAX_STEPS = 8 };

/* One zr_core_rehearse. */
struct rehearsal {
    const struct zr_core_spec *spec;
    struct zr_core *core;
    struct zr_action *actions;
    int64_t *gathers, *reduces;             /* (n_units) in the step so far */
    int64_t *outer_reduces, *outer_gathers; /* NULL: not counted */
    int64_t *then;                          /* (2 * n_units) gathers and reduces when `contents` was taken */
    int64_t *before;         /* (n_units) gathers for this step that the previous step's end made */
    int64_t *per_micro;      /* (n_units) contributions to the gradient in a micro-batch */
    int32_t *slot_of;        /* (n_units) */
    int32_t *contents, *now; /* (n_param_slots + n_grad_slots) */
};

/* Makes one call and counts the actions. */
static int call(struct rehearsal *r, const struct zr_core_event *ev)
{
    int32_t n;
    int err = zr_core_take(r->core, ev, r->actions, &n);
    for (int32_t i = 0; !err && i < n; i++) {
        const struct zr_action *a = &r->actions[i];
        if (a->kind == ZR_ACT_GATHER)
            r->gathers[a->unit]++;
        if (a->kind == ZR_ACT_REDUCE)
            r->reduces[a->unit]++;
        if (a->kind == ZR_ACT_REDUCE_OUTER && r->outer_reduces)
            r->outer_reduces[a->unit]++;
        if (a->kind == ZR_ACT_GATHER_OUTER && r->outer_gathers)
            r->outer_gathers[a->unit]++;
    }
    return err;
}

/* Runs one micro-batch, or all of them if the order is that of a step. */
static int micro_batch(struct rehearsal *r)
{
    int err = 0;
    for (int32_t i = 0; !err && i < r->spec->n_order; i++) {
        const struct zero_call *c = &r->spec->order[i];
        struct zr_core_event ev = {c->is_end ? ZR_EV_END : ZR_EV_BEGIN, c->unit, c->phase};
        err = call(r, &ev);
    }
    return err;
}

/* Micro-batches `first` to `done` have left everything as they found it. So the next ones will do the same,
 * up to the last of the step, in which the core sees the end of the step. Counts and skips them, and returns
 * how many. */
static int32_t repeat(struct rehearsal *r, int32_t first, int32_t done)
{
    int32_t n_units = r->spec->n_units, accum = r->spec->grad_accum_steps, cycle = done - first;
    int64_t times = (accum - 1 - done) / cycle;
    int32_t n = (int32_t)times * cycle;
    for (int32_t u = 0; u < n_units; u++) {
        r->gathers[u] += times * (r->gathers[u] - r->then[u]);
        if (r->spec->reduce_each) /* otherwise one reduction per `accum` backward passes */
            r->reduces[u] += times * (r->reduces[u] - r->then[n_units + u]);
        else
            r->reduces[u] += (done + n) * r->per_micro[u] / accum - done * r->per_micro[u] / accum;
    }
    zr_core_skip(r->core, done, n);
    return n;
}

/* Runs the micro-batches of a step one by one until their states repeat, which Brent's algorithm finds. The
 * rest is counted by multiplication. */
static int micro_batches(struct rehearsal *r)
{
    const struct zr_core_spec *s = r->spec;
    size_t units = (size_t)s->n_units * sizeof *r->then;
    size_t n_contents = (size_t)(s->n_param_slots + s->n_grad_slots);
    int32_t first = 0, look_until = 1;
    if (s->order_of_step)
        return micro_batch(r);
    for (int32_t done = 0; done < s->grad_accum_steps;) {
        int err = micro_batch(r);
        if (err)
            return err;
        if (++done >= s->grad_accum_steps - 1 || look_until == 0)
            continue;
        zr_core_contents(r->core, r->now);
        if (first > 0 && !memcmp(r->now, r->contents, n_contents * sizeof *r->now)) {
            done += repeat(r, first, done);
            look_until = 0;
        } else if (done == look_until) {
            first = done;
            look_until = 2 * done;
            memcpy(r->contents, r->now, n_contents * sizeof *r->now);
            memcpy(r->then, r->gathers, units);
            memcpy(r->then + s->n_units, r->reduces, units);
        }
    }
    return 0;
}

/* Notes the slot of each unit after a step. Apart from the order, the gathers of the next step depend on
 * nothing else. Returns whether nothing has changed. */
static bool note_slots(struct rehearsal *r)
{
    bool same = true;
    for (int32_t u = 0, slot; u < r->spec->n_units; u++) {
        zr_core_present(r->core, u, &slot);
        same &= r->slot_of[u] == slot;
        r->slot_of[u] = slot;
    }
    return same;
}

/* Runs steps until one leaves all units in the slots where it found them. The next step will then gather as
 * much. Gradient slots are used in turns, so if there are any, one more step is run. */
static int steps(struct rehearsal *r)
{
    int32_t n_units = r->spec->n_units, n_same = 0;
    size_t units = (size_t)n_units * sizeof *r->gathers;
    int64_t *in_step = r->then; /* gathers for this step, not for the next */
    note_slots(r);
    for (int s = 1;; s++) {
        memset(r->reduces, 0, units);
        if (r->outer_reduces)
            memset(r->outer_reduces, 0, units);
        if (r->outer_gathers)
            memset(r->outer_gathers, 0, units);
        int err = micro_batches(r);
        if (err)
            return err;
        memcpy(in_step, r->gathers, units);
        struct zr_core_event ev = {.kind = ZR_EV_STEP};
        err = call(r, &ev);
        /* An order without backward passes has no step to take. It is run again, as in an evaluation. */
        if (err && err != ZERO_ERR_ORDER)
            return err;
        n_same += note_slots(r);
        bool settled = n_same > (r->spec->n_grad_slots > 0);
        for (int32_t u = 0; u < n_units; u++) {
            int64_t for_next = r->gathers[u] - in_step[u];
            r->gathers[u] = settled ? r->gathers[u] - r->before[u] : s == MAX_STEPS ? in_step[u] : for_next;
            r->before[u] = for_next;
        }
        if (settled || s == MAX_STEPS)
            return 0;
    }
}

int zr_core_rehearse(const struct zr_core_spec *spec, const struct zr_core_work *work)
{
    size_t n = (size_t)spec->n_units, n_contents = (size_t)(spec->n_param_slots + spec->n_grad_slots) + 1;
    void *mem = malloc(zr_core_bytes(spec));
    int64_t *counts = calloc(4 * n, sizeof *counts);
    int32_t *slots = calloc(n + 2 * n_contents, sizeof *slots);
    struct rehearsal r = {.spec = spec,
                          .actions = malloc((size_t)zr_core_max_actions(spec) * sizeof *r.actions),
                          .gathers = work->gathers,
                          .reduces = work->reduces,
                          .outer_reduces = work->outer_reduces,
                          .outer_gathers = work->outer_gathers,
                          .then = counts};
    int err;
    if (!mem || !r.actions || !counts || !slots) {
        err = zr_fail(ZERO_ERR_NOMEM, "no memory to rehearse a plan");
    } else {
        r.core = zr_core_init(mem, spec);
        r.before = counts + 2 * n;
        r.per_micro = counts + 3 * n;
        r.slot_of = slots;
        r.contents = slots + n;
        r.now = r.contents + n_contents;
        memset(r.gathers, 0, n * sizeof *r.gathers);
        for (int32_t i = 0; i < spec->n_order; i++) {
            const struct zero_call *c = &spec->order[i];
            r.per_micro[c->unit] +=
                zr_phase_has_grads(c->phase) && c->is_end && spec->units[c->unit].trainable;
        }
        /* no message, as the caller tries more slots */
        err = zr_core_has_room(r.core) ? steps(&r) : ZERO_ERR_BUDGET;
        /* One follows each REDUCE, in skipped micro-batches too. */
        for (size_t u = 0; spec->outer_each && r.outer_reduces && u < n; u++)
            r.outer_reduces[u] = r.reduces[u];
    }
    free(mem);
    free(counts);
    free(slots);
    free(r.actions);
    return err;
}
