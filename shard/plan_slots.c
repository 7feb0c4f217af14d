/* plan_slots.c: chooses the slots; see plan_slots.h.
 *
 * At any moment some units are live: those whose brackets are open and those being gathered ahead (for
 * gradients: being reduced). Slot j must hold the j-th largest live unit at every moment of the order; that
 * is the least memory in which the prefetch depth can be kept. Where slots would take as much as keeping
 * every unit whole (few units, or a budget for all), all units are resident.
 *
 * A budget is spent along one chain: slots without prefetch, then for deeper and deeper prefetch, then one
 * slot after another, the smallest first, in which units stay from forward to backward. A link that would
 * raise the traffic is left out, and the budget only decides how far along the chain to go: more of it never
 * costs traffic. */
#include "shard/plan_slots.h"

#include <stdlib.h>
#include <string.h>

/* Where each unit's copy is after a step: with the order, all that the gathers of the next depend on. */
static bool note_places(const struct zr_core *core, int32_t n_units, int32_t *places)
{
    bool same = true;
    for (int32_t u = 0, slot; u < n_units; u++) {
        zr_core_present(core, u, &slot);
        same &= places[u] == slot;
        places[u] = slot;
    }
    return same;
}

int zr_core_rehearse(const struct zr_core_spec *spec, int64_t *gathers, int64_t *reduces)
{
    enum {
        MOST_STEPS = 8
    }; /* copies of frozen units outlive a step: they take a few to settle, or take turns for ever */
    void *mem = malloc(zr_core_bytes(spec));
    struct zr_action *actions = malloc((size_t)zr_core_max_actions(spec) * sizeof *actions);
    int32_t *places = calloc((size_t)spec->n_units, sizeof *places);
    int err = 0;
    if (!mem || !actions || !places) {
        err = zr_fail(ZR_ERR_NOMEM, "no memory to rehearse a plan");
        goto out;
    }
    struct zr_core *core = zr_core_init(mem, spec);
    note_places(core, spec->n_units, places);
    memset(gathers, 0, (size_t)spec->n_units * sizeof *gathers);
    int64_t n_calls = (int64_t)spec->n_order * spec->grad_accum_steps;
    bool steady = false,
         same = false; /* same: the step left the places as it found them, so the next one is steady */
    for (int s = 0; !steady; s++) {
        memset(reduces, 0, (size_t)spec->n_units * sizeof *reduces);
        for (int64_t i = 0; i <= n_calls; i++) {
            struct zr_core_event ev = {.kind = ZR_EV_STEP};
            if (i < n_calls) {
                const struct zr_call *c = &spec->order[i % spec->n_order];
                ev = (struct zr_core_event){c->is_end ? ZR_EV_END : ZR_EV_BEGIN, c->unit, c->backward};
            }
            int32_t n;
            err = zr_core_step(core, &ev, actions, &n);
            /* An order without backward passes has no step to take: it is gone through again, as evaluation
             * is. */
            if (err == ZR_ERR_ORDER && ev.kind == ZR_EV_STEP)
                err = 0;
            if (err)
                goto out;
            /* What the end of a step gathers is the next step's. */
            if (i == n_calls) {
                steady = (s > 0 && same) || s == MOST_STEPS - 1;
                same = note_places(core, spec->n_units, places);
                if (!steady)
                    memset(gathers, 0, (size_t)spec->n_units * sizeof *gathers);
            }
            for (int32_t a = 0; a < n; a++) {
                if (actions[a].kind == ZR_ACT_GATHER)
                    gathers[actions[a].unit] += !(steady && i == n_calls);
                if (actions[a].kind == ZR_ACT_REDUCE)
                    reduces[actions[a].unit]++;
            }
        }
    }
out:
    free(mem);
    free(actions);
    free(places);
    return err;
}

/* The live units at one moment, largest first, as sizes; and the largest seen at each place over all moments.
 */
struct window {
    int64_t *live, *need;
    int32_t n_live, n_need;
};

static void add_live(struct window *w, int64_t bytes)
{
    int32_t i = w->n_live++;
    for (; i > 0 && w->live[i - 1] < bytes; i--)
        w->live[i] = w->live[i - 1];
    w->live[i] = bytes;
}

static void note_live(struct window *w)
{
    for (int32_t i = 0; i < w->n_live; i++)
        w->need[i] = i < w->n_need ? zr_max(w->need[i], w->live[i]) : w->live[i];
    w->n_need = (int32_t)zr_max(w->n_need, w->n_live);
}

static int64_t sum(const int64_t *x, int32_t n)
{
    int64_t s = 0;
    for (int32_t i = 0; i < n; i++)
        s += x[i];
    return s;
}

/* An order that was not declared may turn out to hold any two units open at once (an embedding around the
 * layers): the two largest must fit. */
static void need_pair(struct window *w, int64_t first, int64_t second)
{
    while (w->n_need < 2)
        w->need[w->n_need++] = 0;
    w->need[0] = zr_max(w->need[0], first);
    w->need[1] = zr_max(w->need[1], second);
}

/* The two largest of the units that need a slot. */
static void largest_two(const struct zr_core_spec *s, bool grads, int64_t *first, int64_t *second)
{
    *first = *second = 0;
    for (int32_t u = 0; u < s->n_units; u++) {
        const struct zr_core_unit_spec *x = &s->units[u];
        if (grads ? !x->trainable : x->resident)
            continue;
        int64_t bytes = grads ? x->grad_bytes : x->param_bytes;
        *second = zr_max(*second, zr_min(*first, bytes));
        *first = zr_max(*first, bytes);
    }
}

/* Parameters: at each begin, all open sharded units and the next `ahead` distinct ones, across the end of the
 * pass. Units above `most` bytes have a slot of their own and are left out. */
static void param_need(const struct zr_core_spec *s, int32_t ahead, int64_t most, struct window *w,
                       int32_t *open, int32_t *seen)
{
    w->n_need = 0;
    memset(open, 0, (size_t)s->n_units * sizeof *open);
    memset(seen, 0xff, (size_t)s->n_units * sizeof *seen);
    for (int32_t i = 0; i < s->n_order; i++) {
        const struct zr_call *c = &s->order[i];
        open[c->unit] += c->is_end ? -1 : 1;
        if (c->is_end || s->units[c->unit].resident)
            continue;
        w->n_live = 0;
        for (int32_t u = 0; u < s->n_units; u++) {
            if (!open[u] || s->units[u].resident)
                continue;
            seen[u] = i;
            if (s->units[u].param_bytes <= most)
                add_live(w, s->units[u].param_bytes);
        }
        int32_t n = 0;
        for (int32_t j = 1; j < s->n_order && n < ahead; j++) {
            const struct zr_call *next = &s->order[(i + j) % s->n_order];
            if (next->is_end || s->units[next->unit].resident || seen[next->unit] == i)
                continue;
            seen[next->unit] = i;
            n++;
            if (s->units[next->unit].param_bytes <= most)
                add_live(w, s->units[next->unit].param_bytes);
        }
        note_live(w);
    }
}

/* Gradients: at each backward begin, all units open in backward and, if `behind`, the one that ended last. */
static void grad_need(const struct zr_core_spec *s, bool behind, struct window *w, int32_t *open)
{
    int32_t last = -1;
    w->n_need = 0;
    memset(open, 0, (size_t)s->n_units * sizeof *open);
    for (int32_t i = 0; i < s->n_order; i++) {
        const struct zr_call *c = &s->order[i];
        if (!c->backward || !s->units[c->unit].trainable)
            continue;
        open[c->unit] = !c->is_end;
        if (c->is_end) {
            last = c->unit;
            continue;
        }
        w->n_live = 0;
        for (int32_t u = 0; u < s->n_units; u++)
            if (open[u] || (behind && u == last))
                add_live(w, s->units[u].grad_bytes);
        note_live(w);
    }
}

/* Bytes that a step of these slots takes from other ranks to gather. */
static int gather_cost(struct zr_plan *p, const int64_t *slots, int32_t n, int64_t *scratch, int64_t *bytes)
{
    struct zr_core_spec s = p->spec;
    s.param_slot_bytes = slots;
    s.n_param_slots = n;
    s.grad_resident = true; /* gathers do not depend on gradient slots, which are not chosen yet */
    int err = zr_core_rehearse(&s, scratch, scratch + s.n_units);
    *bytes = 0;
    for (int32_t u = 0; !err && u < s.n_units; u++)
        *bytes += scratch[u] * zr_plan_gather_wire(p, u, 0);
    return err;
}

/* The windows say how many slots are needed and how large, not that the core's way of filling them finds one
 * for every bracket at once: while one finds none, one more slot is made as large as the largest. Few models
 * need this (brackets of odd sizes that overlap). slots and n_slots are s's own that are meant. */
static int mend(const struct zr_core_spec *s, int64_t *slots, int32_t n_slots, int64_t *scratch)
{
    for (int32_t i = 1;; i++) {
        int err = zr_core_rehearse(s, scratch, scratch + s->n_units);
        if (err != ZR_ERR_BUDGET || i >= n_slots)
            return err;
        slots[i] = slots[0];
    }
}

/* The slots for a prefetch depth. */
static int depth_slots(struct zr_plan *p, const struct zr_options *opt, int32_t ahead, struct window *w,
                       int32_t *a, int32_t *b, int64_t *scratch)
{
    struct zr_core_spec *s = &p->spec;
    int64_t largest, second;
    largest_two(s, false, &largest, &second);
    bool pairs = !opt->n_order && ahead > 0 && second;
    bool reserve = pairs && second < largest;
    param_need(s, ahead, reserve ? second : largest, w, a, b);
    if (reserve) {
        memmove(w->need + 1, w->need, (size_t)w->n_need++ * sizeof *w->need);
        w->need[0] = largest;
    }
    /* A unit outside the order may be asked for too. */
    w->need[0] = zr_max(w->n_need ? w->need[0] : 0, largest);
    w->n_need = (int32_t)zr_max(w->n_need, 1);
    if (pairs)
        need_pair(w, largest, second);
    s->reserve_largest = reserve;
    struct zr_core_spec alone = *s;
    alone.grad_resident = true; /* as in gather_cost */
    alone.param_slot_bytes = w->need;
    alone.n_param_slots = w->n_need;
    return mend(&alone, w->need, w->n_need, scratch);
}

/* The smallest unit above `above` bytes that needs a slot; 0: none. */
static int64_t next_size(const struct zr_core_spec *s, int64_t above)
{
    int64_t best = 0;
    for (int32_t u = 0; u < s->n_units; u++) {
        int64_t bytes = s->units[u].param_bytes;
        if (!s->units[u].resident && bytes > above && (best == 0 || bytes < best))
            best = bytes;
    }
    return best;
}

/* Goes along the chain as far as the budget allows. `trial` is a second window's worth of memory. */
static int spend_budget(struct zr_plan *p, const struct zr_options *opt, struct window *w, int64_t *trial,
                        int32_t *a, int32_t *b, int64_t *scratch)
{
    struct zr_core_spec *s = &p->spec;
    int64_t budget = opt->param_budget_bytes, used = 0, cost = 0, bytes;
    int32_t n = 0;
    bool reserve = false, deep = true;
    struct window next = {.live = w->live, .need = trial};
    for (int32_t ahead = 0; deep && ahead <= s->prefetch; ahead = ahead ? 2 * ahead : 1) {
        int err = depth_slots(p, opt, ahead, &next, a, b, scratch);
        int64_t need = sum(trial, next.n_need);
        if (!err && need > budget && n == 0)
            err = zr_fail(
                ZR_ERR_BUDGET,
                "param_budget_bytes is %lld; the brackets that the order holds open at once need %lld",
                (long long)budget, (long long)need);
        deep = need <= budget;
        if (!err && deep)
            err = gather_cost(p, trial, next.n_need, scratch, &bytes);
        if (err)
            return err;
        if (!deep || (n && bytes > cost))
            continue;
        memcpy(w->need, trial, (size_t)next.n_need * sizeof *trial);
        w->n_need = n = next.n_need;
        used = need;
        cost = bytes;
        reserve = s->reserve_largest;
    }
    s->reserve_largest = reserve;
    for (int64_t size = deep ? next_size(s, 0) : 0; size && used + size <= budget && n < s->n_units;) {
        w->need[n] = size;
        int err = gather_cost(p, w->need, n + 1, scratch, &bytes);
        if (err && err != ZR_ERR_BUDGET)
            return err;
        if (err || bytes >= cost) {
            size = next_size(s, size); /* it keeps nothing, or leaves a bracket without a slot */
            continue;
        }
        w->n_need = ++n;
        used += size;
        cost = bytes;
    }
    return 0;
}

static int keep_all(struct zr_core_spec *s, struct window *w)
{
    for (int32_t u = 0; u < s->n_units; u++)
        ((struct zr_core_unit_spec *)s->units)[u].resident = true;
    w->n_need = 0;
    s->reserve_largest = false;
    return 0;
}

static int choose_param_slots(struct zr_plan *p, const struct zr_options *opt, struct window *w,
                              int64_t *trial, int32_t *a, int32_t *b, int64_t *scratch)
{
    struct zr_core_spec *s = &p->spec;
    int64_t budget = opt->param_budget_bytes, rest = 0, largest,
            second; /* rest: of all units, but for this rank's shards */
    int32_t largest_unit = -1;
    largest_two(s, false, &largest, &second);
    for (int32_t u = 0; u < s->n_units; u++) {
        if (s->units[u].resident)
            continue;
        rest += s->units[u].param_bytes - p->layout->units[u].shard_bytes;
        if (s->units[u].param_bytes == largest)
            largest_unit = u;
    }
    w->n_need = 0;
    if (largest_unit < 0)
        return 0;
    if (budget && budget >= rest)
        return keep_all(s, w);
    if (budget && budget < largest)
        return zr_fail(ZR_ERR_BUDGET, "param_budget_bytes is %lld; unit %d alone needs %lld",
                       (long long)budget, largest_unit, (long long)largest);
    int err = budget ? spend_budget(p, opt, w, trial, a, b, scratch)
                     : depth_slots(p, opt, s->prefetch, w, a, b, scratch);
    return !err && sum(w->need, w->n_need) >= rest ? keep_all(s, w) : err;
}

static struct zr_slot_place *to_places(const int64_t *bytes, int32_t n)
{
    struct zr_slot_place *places = calloc((size_t)n + 1, sizeof *places);
    for (int32_t i = 0; places && i < n; i++)
        places[i].bytes = bytes[i];
    return places;
}

int zr_plan_choose_slots(struct zr_plan *p, const struct zr_options *opt)
{
    struct zr_core_spec *s = &p->spec;
    size_t n = (size_t)s->n_units + 1;
    int64_t *params = calloc(n, sizeof *params), *grads = calloc(n, sizeof *grads);
    int64_t *live = calloc(n, sizeof *live), *trial = calloc(n, sizeof *trial),
            *scratch = calloc(2 * n, sizeof *scratch);
    int32_t *a = calloc(n, sizeof *a), *b = calloc(n, sizeof *b);
    struct window w = {.live = live, .need = grads};
    int err = ZR_ERR_NOMEM;
    if (!params || !grads || !live || !trial || !scratch || !a || !b) {
        zr_fail(err, "no memory to choose slots for %d units", s->n_units);
        goto out;
    }
    if (!p->grad_resident) {
        grad_need(s, opt->prefetch > 0, &w, a);
        /* An order that shows no backward at all still has to be survived. */
        int64_t largest, second;
        largest_two(s, true, &largest, &second);
        if (w.n_need == 0 && largest)
            w.need[w.n_need++] = largest;
        w.need[0] = zr_max(w.need[0], largest);
        if (!opt->n_order && opt->prefetch > 0 && second)
            need_pair(&w, largest, second);
        s->n_grad_slots = w.n_need;
    }
    s->grad_slot_bytes = grads;
    w.need = params;
    err = choose_param_slots(p, opt, &w, trial, a, b, scratch);
    if (err)
        goto out;
    s->n_param_slots = w.n_need;
    s->param_slot_bytes = params;
    err = mend(s, grads, s->n_grad_slots, scratch);
    if (err)
        goto out;
    p->n_param_slots = s->n_param_slots;
    p->n_grad_slots = s->n_grad_slots;
    p->param_slots = to_places(params, s->n_param_slots);
    p->grad_slots = to_places(grads, s->n_grad_slots);
    if (!p->param_slots || !p->grad_slots)
        err = zr_fail(ZR_ERR_NOMEM, "no memory for %d slots", s->n_param_slots + s->n_grad_slots);
out:
    if (err) {
        free(params);
        free(grads);
        s->param_slot_bytes = s->grad_slot_bytes = NULL;
    }
    free(live);
    free(trial);
    free(scratch);
    free(a);
    free(b);
    return err;
}
