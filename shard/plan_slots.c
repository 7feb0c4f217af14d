/* SPDX-License-Identifier: Apache-2.0 */
/* plan_slots.c: chooses how many slots there are, and their sizes.
 *
 * At any moment some units are live: units with an open bracket, and units that are being gathered ahead (for
 * gradients: reduced). Slot j must hold the j-th largest live unit at every moment of the order. This is the
 * least memory that keeps the prefetch depth. If slots would take as much as keeping every unit whole (few
 * units, or a budget for all), all units are resident. With opt->check, only a budget makes them resident.
 *
 * A budget is spent along one chain. It starts with slots without prefetch, and goes on to deeper and deeper
 * prefetch. After that come single slots, the smallest first, in which units stay from forward to backward. A
 * link that would raise the traffic is left out. The budget only decides how far along the chain to go, so a
 * larger one never costs traffic. A rehearsal tries every link; with many units, links are tried by twos,
 * fours and so on. */
#include "shard/plan_slots.h"

#include <stdlib.h>
#include <string.h>

enum { FEW_UNITS = 256 }; /* up to this number of units every link of the chain is tried */

/* Sizes of the live units at one moment, largest first; and the largest size at each index over all
 * moments. */
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

/* Units that may be open at once if no order was declared. Parameters: a layer and one unit around it.
 * Gradients: a layer, and an embedding and an output norm around it. */
enum { OPEN_PARAMS = 2, OPEN_GRADS = 3 };

/* Sizes of the largest units that need a slot, largest first. 0 if there are fewer units. */
struct largest {
    int64_t bytes[OPEN_GRADS];
};

/* Makes the n largest units fit at once. */
static void need_largest(struct window *w, const struct largest *most, int n)
{
    for (int i = 0; i < n && most->bytes[i]; i++) {
        if (i == w->n_need)
            w->need[w->n_need++] = 0;
        w->need[i] = zr_max(w->need[i], most->bytes[i]);
    }
}

static bool needs_param_slot(const struct zr_core_spec *s, const struct zero_call *call)
{
    return zr_phase_has_params(call->phase) && !s->units[call->unit].resident;
}

static bool needs_grad_slot(const struct zr_core_unit_spec *u)
{
    return u->trainable && !u->grad_home;
}

static struct largest largest_units(const struct zr_core_spec *s, bool grads)
{
    struct largest most = {{0}};
    for (int32_t u = 0; u < s->n_units; u++) {
        const struct zr_core_unit_spec *x = &s->units[u];
        if (grads ? !needs_grad_slot(x) : x->resident)
            continue;
        int64_t bytes = grads ? x->grad_bytes : x->param_bytes;
        for (int i = 0; i < OPEN_GRADS; i++) {
            int64_t smaller = zr_min(most.bytes[i], bytes);
            most.bytes[i] = zr_max(most.bytes[i], bytes);
            bytes = smaller;
        }
    }
    return most;
}

/* Units with an open bracket. at[u] is the index of u in the list, plus one; 0: not in it. */
struct open_list {
    int32_t *units, *at, *n_brackets; /* (n_units) each */
    int32_t n;
};

static void note_bracket(struct open_list *o, int32_t unit, int32_t change)
{
    o->n_brackets[unit] += change;
    if (o->n_brackets[unit] > 0 && !o->at[unit]) {
        o->units[o->n++] = unit;
        o->at[unit] = o->n;
    } else if (o->n_brackets[unit] <= 0 && o->at[unit]) {
        int32_t last = o->units[--o->n];
        o->units[o->at[unit] - 1] = last;
        o->at[last] = o->at[unit];
        o->at[unit] = 0;
    }
}

/* Memory of the search, for all units. */
struct work {
    struct open_list open;
    int32_t *seen, *begins;  /* (n_units), (n_order) */
    int64_t *counts, *trial; /* (2 * n_units) for a rehearsal; (n_units) needs of a second window */
    int64_t *wire, *sizes;   /* (n_units) bytes to gather each unit; sizes of the units, ascending */
};

static void close_all(struct work *k, int32_t n_units)
{
    k->open.n = 0;
    memset(k->open.at, 0, (size_t)n_units * sizeof *k->open.at);
    memset(k->open.n_brackets, 0, (size_t)n_units * sizeof *k->open.n_brackets);
}

/* Finds the slots for parameters: at each begin, for all open sharded units and the next `ahead` distinct
 * ones, which may be in the next pass. Units above `most` bytes have a separate slot and are left out. */
static void param_need(const struct zr_core_spec *s, int32_t ahead, int64_t most, struct window *w,
                       struct work *k)
{
    int32_t n_begins = 0, at = 0;
    w->n_need = 0;
    close_all(k, s->n_units);
    memset(k->seen, 0xff, (size_t)s->n_units * sizeof *k->seen);
    for (int32_t i = 0; i < s->n_order; i++)
        if (!s->order[i].is_end && needs_param_slot(s, &s->order[i]))
            k->begins[n_begins++] = i;
    for (int32_t i = 0; i < s->n_order; i++) {
        const struct zero_call *c = &s->order[i];
        if (!needs_param_slot(s, c))
            continue;
        note_bracket(&k->open, c->unit, c->is_end ? -1 : 1);
        if (c->is_end)
            continue;
        w->n_live = 0;
        for (int32_t j = 0; j < k->open.n; j++) {
            int32_t u = k->open.units[j];
            k->seen[u] = i;
            if (s->units[u].param_bytes <= most)
                add_live(w, s->units[u].param_bytes);
        }
        at++; /* the begin after this one */
        for (int32_t j = 0, n = 0; j < n_begins - 1 && n < ahead; j++) {
            int32_t next = s->order[k->begins[(at + j) % n_begins]].unit;
            if (k->seen[next] == i)
                continue;
            k->seen[next] = i;
            n++;
            if (s->units[next].param_bytes <= most)
                add_live(w, s->units[next].param_bytes);
        }
        note_live(w);
    }
}

/* Finds the slots for gradients: at each backward begin, for all units open in backward and, if `behind`, for
 * the one that ended last. */
static void grad_need(const struct zr_core_spec *s, bool behind, struct window *w, struct work *k)
{
    int32_t last = -1;
    w->n_need = 0;
    close_all(k, s->n_units);
    for (int32_t i = 0; i < s->n_order; i++) {
        const struct zero_call *c = &s->order[i];
        if (!zr_phase_has_grads(c->phase) || !needs_grad_slot(&s->units[c->unit]))
            continue;
        note_bracket(&k->open, c->unit, c->is_end ? -1 : 1);
        if (c->is_end) {
            last = c->unit;
            continue;
        }
        w->n_live = 0;
        for (int32_t j = 0; j < k->open.n; j++)
            add_live(w, s->units[k->open.units[j]].grad_bytes);
        if (behind && last >= 0 && !k->open.at[last])
            add_live(w, s->units[last].grad_bytes);
        note_live(w);
    }
}

/* Finds the bytes that a step with these slots takes from other ranks in gathers. */
static int gather_cost(const struct zr_plan *p, const int64_t *slots, int32_t n, struct work *k,
                       int64_t *bytes)
{
    struct zr_core_spec s = p->spec;
    s.param_slot_bytes = slots;
    s.n_param_slots = n;
    /* Gradient slots are chosen later, and gathers do not depend on them. A model that has its gradients at
     * all times needs none. */
    s.model_holds = true;
    int err = zr_core_rehearse(&s, &(struct zr_core_work){k->counts, k->counts + s.n_units});
    *bytes = 0;
    for (int32_t u = 0; !err && u < s.n_units; u++)
        *bytes += k->counts[u] * k->wire[u];
    return err;
}

/* Enlarges slots until every bracket finds one. A window says how many slots are needed and how large, but
 * the core may fill them so that a bracket finds none. Then one more slot is made as large as the largest.
 * Few models need this (overlapping brackets of odd sizes). slots and n_slots: the parameter or the gradient
 * slots of s. */
static int mend(const struct zr_core_spec *s, int64_t *slots, int32_t n_slots, struct work *k)
{
    for (int32_t i = 1;; i++) {
        int err = zr_core_rehearse(s, &(struct zr_core_work){k->counts, k->counts + s->n_units});
        if (err != ZERO_ERR_BUDGET || i >= n_slots)
            return err;
        slots[i] = slots[0];
    }
}

/* Finds the slots for a prefetch depth. */
static int depth_slots(struct zr_plan *p, const struct zr_options *opt, int32_t ahead, struct window *w,
                       struct work *k)
{
    struct zr_core_spec *s = &p->spec;
    struct largest most = largest_units(s, false);
    int64_t largest = most.bytes[0], second = most.bytes[1];
    bool pairs = !zr_order_declared(opt) && ahead > 0 && second;
    bool reserve = pairs && second < largest;
    param_need(s, ahead, reserve ? second : largest, w, k);
    if (reserve) {
        memmove(w->need + 1, w->need, (size_t)w->n_need++ * sizeof *w->need);
        w->need[0] = largest;
    }
    /* The model may also ask for a unit outside the order. */
    w->need[0] = zr_max(w->n_need ? w->need[0] : 0, largest);
    w->n_need = (int32_t)zr_max(w->n_need, 1);
    if (pairs)
        need_largest(w, &most, OPEN_PARAMS);
    s->reserve_largest = reserve;
    struct zr_core_spec alone = *s;
    alone.model_holds = true; /* without gradient slots, as in gather_cost */
    alone.param_slot_bytes = w->need;
    alone.n_param_slots = w->n_need;
    return mend(&alone, w->need, w->n_need, k);
}

static int by_bytes(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* A chain of slots so far, and what its gathers take. */
struct chain {
    int64_t *slots; /* (n_units) */
    int32_t n;
    int64_t used, cost; /* bytes of the slots; bytes on the wire */
};

/* Finds the cost with n more slots. Returns ZERO_ERR_BUDGET if a bracket finds no slot. */
static int try_slots(const struct zr_plan *p, struct chain *c, const int64_t *more, int32_t n, struct work *k,
                     int64_t *cost)
{
    memcpy(c->slots + c->n, more, (size_t)n * sizeof *more);
    return gather_cost(p, c->slots, c->n + n, k, cost);
}

static void take_slots(struct chain *c, const int64_t *more, int32_t n, int64_t cost)
{
    memcpy(c->slots + c->n, more, (size_t)n * sizeof *more);
    c->n += n;
    c->used += sum(more, n);
    c->cost = cost;
}

/* Tries every link: slots of one size for as long as each saves traffic, then of the next size. Makes at most
 * n_tries tries. sizes: those of the units that need a slot, ascending. */
static int add_one_by_one(const struct zr_plan *p, struct chain *c, const int64_t *sizes, int32_t n_sizes,
                          int64_t budget, int32_t n_tries, struct work *k)
{
    for (int32_t i = 0;
         n_tries-- > 0 && i < n_sizes && c->n < p->spec.n_units && c->used + sizes[i] <= budget;) {
        int64_t cost;
        int err = try_slots(p, c, &sizes[i], 1, k, &cost);
        if (err && err != ZERO_ERR_BUDGET)
            return err;
        if (!err && cost < c->cost) {
            take_slots(c, &sizes[i], 1, cost);
            continue;
        }
        int64_t size = sizes[i]; /* it saves nothing, or leaves a bracket without a slot */
        while (i < n_sizes && sizes[i] == size)
            i++;
    }
    return 0;
}

/* Finds the fewest of the first *n slots of `more` that cost no more than all of them, which cost `cost`. */
static int fewest(const struct zr_plan *p, struct chain *c, const int64_t *more, int64_t cost, struct work *k,
                  int32_t *n)
{
    int32_t too_few = 0;
    for (int32_t at = *n - 1; at > too_few; at = too_few + (*n - too_few) / 2) {
        int64_t less;
        int err = try_slots(p, c, more, at, k, &less);
        if (err && err != ZERO_ERR_BUDGET)
            return err;
        if (err || less > cost)
            too_few = at;
        else
            *n = at;
    }
    return 0;
}

/* Returns how many of sizes[0..n) to try at once: at most `most`, within `room` bytes. A run of one size that
 * is at least a quarter of `most` ends the link, since the last slots of a run may be of no use. */
static int32_t next_link(const int64_t *sizes, int32_t n, int32_t most, int64_t room)
{
    int32_t i = 0, n_same = 0;
    for (; i < n && i < most && sizes[i] <= room; i++) {
        bool same = i > 0 && sizes[i] == sizes[i - 1];
        if (!same && n_same > 1 && n_same >= most / 4)
            break;
        n_same = same ? n_same + 1 : 1;
        room -= sizes[i];
    }
    return i;
}

/* Tries one slot, then two, four and so on: one of the size of each unit, the smallest first. */
static int add_by_doubling(const struct zr_plan *p, struct chain *c, const int64_t *sizes, int32_t n_sizes,
                           int64_t budget, struct work *k)
{
    for (int32_t i = 0, most = 1; i < n_sizes;) {
        int64_t cost = 0;
        int32_t left = (int32_t)zr_min(n_sizes - i, p->spec.n_units - c->n);
        int32_t n = next_link(sizes + i, left, most, budget - c->used), tried = n;
        if (n == 0)
            break;
        int err = try_slots(p, c, sizes + i, n, k, &cost);
        if (err && err != ZERO_ERR_BUDGET)
            return err;
        if (err && n > 1) {
            most = n / 2;
            continue;
        }
        if (!err && cost < c->cost) {
            err = fewest(p, c, sizes + i, cost, k, &n);
            if (err)
                return err;
            take_slots(c, sizes + i, n, cost);
        }
        i += tried;
        most = tried < n_sizes ? 2 * tried : tried;
    }
    return 0;
}

/* Goes along the chain as far as the budget allows. */
static int spend_budget(struct zr_plan *p, const struct zr_options *opt, struct window *w, struct work *k)
{
    struct zr_core_spec *s = &p->spec;
    int64_t budget = opt->param_budget_bytes, bytes = 0;
    bool reserve = false, fits = true; /* fits: so do the slots of the last depth */
    struct window next = {.live = w->live, .need = k->trial};
    struct chain chain = {.slots = w->need};
    for (int32_t ahead = 0; fits && ahead <= s->prefetch; ahead = ahead ? 2 * ahead : 1) {
        int err = depth_slots(p, opt, ahead, &next, k);
        int64_t need = sum(k->trial, next.n_need);
        if (!err && need > budget && chain.n == 0)
            err = zr_fail(
                ZERO_ERR_BUDGET,
                "param_budget_bytes is %lld; the brackets that the order holds open at once need %lld",
                (long long)budget, (long long)need);
        fits = need <= budget;
        if (!err && fits)
            err = gather_cost(p, k->trial, next.n_need, k, &bytes);
        if (err)
            return err;
        if (!fits || (chain.n && bytes > chain.cost))
            continue;
        memcpy(chain.slots, k->trial, (size_t)next.n_need * sizeof *k->trial);
        chain.n = next.n_need;
        chain.used = need;
        chain.cost = bytes;
        reserve = s->reserve_largest;
    }
    s->reserve_largest = reserve;
    int32_t n_sizes = 0;
    for (int32_t u = 0; fits && u < s->n_units; u++)
        if (!s->units[u].resident)
            k->sizes[n_sizes++] = s->units[u].param_bytes;
    qsort(k->sizes, (size_t)n_sizes, sizeof *k->sizes, by_bytes);
    int32_t err = 0, n_tries = INT32_MAX;
    if (s->n_units > FEW_UNITS) {
        err = add_by_doubling(p, &chain, k->sizes, n_sizes, budget, k);
        n_tries = 8; /* for the rest */
    }
    if (!err)
        err = add_one_by_one(p, &chain, k->sizes, n_sizes, budget, n_tries, k);
    w->n_need = chain.n;
    return err;
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
                              struct work *k)
{
    struct zr_core_spec *s = &p->spec;
    /* rest: bytes of all units without this rank's shards */
    int64_t budget = opt->param_budget_bytes, rest = 0;
    int64_t largest = largest_units(s, false).bytes[0];
    int32_t largest_unit = -1;
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
    bool given = budget >= 0;
    if (given && budget >= rest)
        return keep_all(s, w);
    if (given && budget < largest)
        return zr_fail(ZERO_ERR_BUDGET, "param_budget_bytes is %lld; unit %d alone needs %lld",
                       (long long)budget, largest_unit, (long long)largest);
    int err = given ? spend_budget(p, opt, w, k) : depth_slots(p, opt, s->prefetch, w, k);
    /* Whether slots take that much depends on the number of ranks, which must not hide a fault from check
     * mode. */
    return !err && !opt->check && sum(w->need, w->n_need) >= rest ? keep_all(s, w) : err;
}

static struct zr_slot_region *to_regions(const int64_t *bytes, int32_t n)
{
    struct zr_slot_region *regions = calloc((size_t)n + 1, sizeof *regions);
    for (int32_t i = 0; regions && i < n; i++)
        regions[i].bytes = bytes[i];
    return regions;
}

/* Returns the bytes of the rank that receives most. If slices differ, another rank may own the whole unit. */
static int64_t most_gather_wire(const struct zr_plan *p, int32_t unit)
{
    int64_t most = 0;
    for (int32_t k = 0; k < (p->layout->has_places ? p->hop[ZR_INNER].size : 1); k++)
        most = zr_max(most, zr_plan_gather_wire(p, unit, (struct zr_where){k, 0}));
    return most;
}

int zr_plan_choose_slots(struct zr_plan *p, const struct zr_options *opt)
{
    struct zr_core_spec *s = &p->spec;
    size_t n = (size_t)s->n_units + 1;
    int64_t *params = calloc(n, sizeof *params), *grads = calloc(n, sizeof *grads);
    int64_t *wide = calloc(6 * n, sizeof *wide);
    int32_t *narrow = calloc(4 * n + (size_t)s->n_order, sizeof *narrow);
    int err = ZERO_ERR_NOMEM;
    if (!params || !grads || !wide || !narrow) {
        zr_fail(err, "no memory to choose slots for %d units", s->n_units);
        goto out;
    }
    struct window w = {.live = wide, .need = grads};
    struct work work = {.open = {.units = narrow, .at = narrow + n, .n_brackets = narrow + 2 * n},
                        .seen = narrow + 3 * n,
                        .begins = narrow + 4 * n,
                        .trial = wide + n,
                        .wire = wide + 2 * n,
                        .sizes = wide + 3 * n,
                        .counts = wide + 4 * n};
    for (int32_t u = 0; u < s->n_units; u++)
        work.wire[u] = most_gather_wire(p, u);
    if (!p->placement.model_holds) {
        grad_need(s, opt->prefetch > 0, &w, &work);
        /* There is one slot even if the order has no backward bracket. */
        struct largest most = largest_units(s, true);
        need_largest(&w, &most, !zr_order_declared(opt) && opt->prefetch > 0 ? OPEN_GRADS : 1);
        s->n_grad_slots = w.n_need;
    }
    s->grad_slot_bytes = grads;
    w.need = params;
    err = choose_param_slots(p, opt, &w, &work);
    if (err)
        goto out;
    s->n_param_slots = w.n_need;
    s->param_slot_bytes = params;
    err = mend(s, grads, s->n_grad_slots, &work);
    if (err)
        goto out;
    p->n_param_slots = s->n_param_slots;
    p->n_grad_slots = s->n_grad_slots;
    p->param_slots = to_regions(params, s->n_param_slots);
    p->grad_slots = to_regions(grads, s->n_grad_slots);
    if (!p->param_slots || !p->grad_slots)
        err = zr_fail(ZERO_ERR_NOMEM, "no memory for %d slots", s->n_param_slots + s->n_grad_slots);
out:
    if (err) {
        free(params);
        free(grads);
        s->param_slot_bytes = s->grad_slot_bytes = NULL;
    }
    free(wide);
    free(narrow);
    return err;
}
