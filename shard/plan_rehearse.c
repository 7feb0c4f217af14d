/* SPDX-License-Identifier: Apache-2.0 */
/* plan_rehearse.c: what a steady step does, found by running the core; see plan_slots.h. */
#include "shard/plan_slots.h"

#include <stdlib.h>
#include <string.h>

/* Copies of units that are not updated outlive a step. They may take a few steps to settle, or alternate for
 * ever. */
enum { MOST_STEPS = 8 };

struct rehearsal {
    const struct zr_core_spec *spec;
    struct zr_core *core;
    struct zr_action *actions;
    int64_t *gathers, *reduces;             /* (n_units) of the step so far */
    int64_t *outer_reduces, *outer_gathers; /* NULL: not counted */
    int64_t *then;                          /* (2 * n_units) both, when `contents` was taken */
    int64_t *before;         /* (n_units) what the end of the step before gathered for this one */
    int64_t *per_micro;      /* (n_units) contributions to the gradient in a micro-batch */
    int32_t *places;         /* (n_units) */
    int32_t *contents, *now; /* (n_param_slots + n_grad_slots) */
};

/* Makes one call and counts what follows. */
static int call(struct rehearsal *r, const struct zr_core_event *ev)
{
    int32_t n;
    int err = zr_core_step(r->core, ev, r->actions, &n);
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

/* Or all of them, where the order is that of a step. */
static int micro_batch(struct rehearsal *r)
{
    int err = 0;
    for (int32_t i = 0; !err && i < r->spec->n_order; i++) {
        const struct zr_call *c = &r->spec->order[i];
        struct zr_core_event ev = {c->is_end ? ZR_EV_END : ZR_EV_BEGIN, c->unit, c->backward, c->apart};
        err = call(r, &ev);
    }
    return err;
}

/* Micro-batches `first` to `done` have left everything where the ones before had: so will the next as many,
 * again and again, up to the last of the step, in which the core sees the step's end. Returns how many of
 * them are counted and left out. */
static int32_t repeat(struct rehearsal *r, int32_t first, int32_t done)
{
    int32_t n_units = r->spec->n_units, accum = r->spec->grad_accum_steps, cycle = done - first;
    int64_t times = (accum - 1 - done) / cycle;
    int32_t n = (int32_t)times * cycle;
    for (int32_t u = 0; u < n_units; u++) {
        r->gathers[u] += times * (r->gathers[u] - r->then[u]);
        if (r->spec->reduce_each) /* else once when so many backward passes have ended as there are
                                     micro-batches */
            r->reduces[u] += times * (r->reduces[u] - r->then[n_units + u]);
        else
            r->reduces[u] += (done + n) * r->per_micro[u] / accum - done * r->per_micro[u] / accum;
    }
    zr_core_skip(r->core, done, n);
    return n;
}

/* The micro-batches of a step: one by one until their ends are alike, found as Brent finds a cycle; the rest
 * is multiplied. */
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

/* Where each unit's copy is after a step: with the order, all that the gathers of the next depend on. */
static bool note_places(struct rehearsal *r)
{
    bool same = true;
    for (int32_t u = 0, slot; u < r->spec->n_units; u++) {
        zr_core_present(r->core, u, &slot);
        same &= r->places[u] == slot;
        r->places[u] = slot;
    }
    return same;
}

/* Steps until one leaves the places as it found them: so will the next, and gathers as much. Gradient slots
 * are taken by turns, so where there are any one more step is tried. */
static int steps(struct rehearsal *r)
{
    int32_t n_units = r->spec->n_units, n_same = 0;
    size_t units = (size_t)n_units * sizeof *r->gathers;
    int64_t *own = r->then; /* gathered for this step, not the next */
    note_places(r);
    for (int s = 1;; s++) {
        memset(r->reduces, 0, units);
        if (r->outer_reduces)
            memset(r->outer_reduces, 0, units);
        if (r->outer_gathers)
            memset(r->outer_gathers, 0, units);
        int err = micro_batches(r);
        if (err)
            return err;
        memcpy(own, r->gathers, units);
        struct zr_core_event ev = {.kind = ZR_EV_STEP};
        err = call(r, &ev);
        /* An order without backward passes has no step to take: it is gone through again, as evaluation is.
         */
        if (err && err != ZR_ERR_ORDER)
            return err;
        n_same += note_places(r);
        bool settled = n_same > (r->spec->n_grad_slots > 0);
        for (int32_t u = 0; u < n_units; u++) {
            int64_t for_next = r->gathers[u] - own[u];
            r->gathers[u] = settled ? r->gathers[u] - r->before[u] : s == MOST_STEPS ? own[u] : for_next;
            r->before[u] = for_next;
        }
        if (settled || s == MOST_STEPS)
            return 0;
    }
}

int zr_core_rehearse(const struct zr_core_spec *spec, const struct zr_core_work *work)
{
    size_t n = (size_t)spec->n_units, n_contents = (size_t)(spec->n_param_slots + spec->n_grad_slots) + 1;
    void *mem = malloc(zr_core_bytes(spec));
    int64_t *counts = calloc(4 * n, sizeof *counts);
    int32_t *where = calloc(n + 2 * n_contents, sizeof *where);
    struct rehearsal r = {.spec = spec,
                          .actions = malloc((size_t)zr_core_max_actions(spec) * sizeof *r.actions),
                          .gathers = work->gathers,
                          .reduces = work->reduces,
                          .outer_reduces = work->outer_reduces,
                          .outer_gathers = work->outer_gathers,
                          .then = counts};
    int err;
    if (!mem || !r.actions || !counts || !where) {
        err = zr_fail(ZR_ERR_NOMEM, "no memory to rehearse a plan");
    } else {
        r.core = zr_core_init(mem, spec);
        r.before = counts + 2 * n;
        r.per_micro = counts + 3 * n;
        r.places = where;
        r.contents = where + n;
        r.now = r.contents + n_contents;
        memset(r.gathers, 0, n * sizeof *r.gathers);
        for (int32_t i = 0; i < spec->n_order; i++) {
            const struct zr_call *c = &spec->order[i];
            r.per_micro[c->unit] += c->backward && c->is_end && spec->units[c->unit].trainable;
        }
        err = zr_core_has_room(r.core) ? steps(&r) : ZR_ERR_BUDGET; /* untold: more slots are tried */
        /* One behind each; of micro-batches that were not run, too. */
        for (size_t u = 0; spec->outer_each && r.outer_reduces && u < n; u++)
            r.outer_reduces[u] = r.reduces[u];
    }
    free(mem);
    free(counts);
    free(where);
    free(r.actions);
    return err;
}
