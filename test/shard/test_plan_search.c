/* SPDX-License-Identifier: Apache-2.0 */
/* test_plan_search.c: compares the plan's search for slots with a slow search, which tries slots one at a
 * time and rehearses every micro-batch of every step. With the plan's slots a step never receives more bytes
 * than with those of the slow search. The plan's search makes few calls of the core. */
#include "shard/plan_slots.h"
#include "test/shard/core_watch.h"

enum { MAX_UNITS = 12, MAX_CALLS = 8 * MAX_UNITS + 16 };

/* ---- calls of the core are counted ---- */

/* calls of zr_core_take */
static int64_t n_takes;

int __real_zr_core_take(struct zr_core *c, const struct zr_core_event *ev, struct zr_action *out,
                        int32_t *n_out);
int __wrap_zr_core_take(struct zr_core *c, const struct zr_core_event *ev, struct zr_action *out,
                        int32_t *n_out);

int __wrap_zr_core_take(struct zr_core *c, const struct zr_core_event *ev, struct zr_action *out,
                        int32_t *n_out)
{
    n_takes++;
    return __real_zr_core_take(c, ev, out, n_out);
}

/* ---- the slow search ---- */

struct reference {
    const struct zr_layout *layout;
    struct zr_core_spec spec;
};

/* Bytes that rank 0 receives to gather a unit that needs a slot. */
static int64_t gather_wire(const struct zr_layout *l, int32_t unit)
{
    int64_t bytes = 0;
    for (int32_t i = 0; i < l->units[unit].n_flats; i++) {
        const struct zr_flat *f = &l->flats[l->units[unit].first_flat + i];
        int64_t first;
        /* fine.total is in bytes */
        bytes += f->fine.total - zr_flat_owned(f, 0, &first) * zr_dtype_bytes(f->dtype);
    }
    return bytes;
}

/* Notes the slot of each unit after a step. Together with the order, this determines all gathers of the next
 * step. Returns whether no slot has changed. */
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

/* Counts the gathers and the reductions of each unit in a step that repeats, by running every micro-batch.
 * Gathered copies of frozen units outlive a step, so units may be in other slots after every step. Then no
 * step repeats, and those of step MAX_STEPS are counted. */
static int rehearse_fully(const struct zr_core_spec *spec, int64_t *gathers, int64_t *reduces)
{
    enum { MAX_STEPS = 8 };
    void *mem = malloc(zr_core_bytes(spec));
    struct zr_action *actions = malloc((size_t)zr_core_max_actions(spec) * sizeof *actions);
    int32_t *places = calloc((size_t)spec->n_units, sizeof *places);
    int err = 0;
    if (!mem || !actions || !places) {
        err = ZERO_ERR_NOMEM;
        goto out;
    }
    struct zr_core *core = zr_core_init(mem, spec);
    /* Evaluations and writes between steps may leave units in other slots than a step does. The core must
     * have a slot for each bracket then, too. If it has not, the slots are too few, even if the steps below,
     * which follow each other directly, would find enough. */
    if (!zr_core_has_room(core)) {
        err = ZERO_ERR_BUDGET;
        goto out;
    }
    note_places(core, spec->n_units, places);
    memset(gathers, 0, (size_t)spec->n_units * sizeof *gathers);
    int64_t n_calls = (int64_t)spec->n_order * spec->grad_accum_steps;
    /* same: the step left all units in the slots where it found them, so the next step is steady */
    bool steady = false, same = false;
    for (int s = 0; !steady; s++) {
        memset(reduces, 0, (size_t)spec->n_units * sizeof *reduces);
        for (int64_t i = 0; i <= n_calls; i++) {
            struct zr_core_event ev = {.kind = ZR_EV_STEP};
            if (i < n_calls) {
                const struct zero_call *c = &spec->order[i % spec->n_order];
                ev = (struct zr_core_event){c->is_end ? ZR_EV_END : ZR_EV_BEGIN, c->unit, c->phase};
            }
            int32_t n;
            err = zr_core_take(core, &ev, actions, &n);
            /* An order without backward passes has no step. Its calls are made again, as in an evaluation. */
            if (err == ZERO_ERR_ORDER && ev.kind == ZR_EV_STEP)
                err = 0;
            if (err)
                goto out;
            /* Gathers at the end of a step belong to the next step. */
            if (i == n_calls) {
                steady = (s > 0 && same) || s == MAX_STEPS - 1;
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

/* Sizes of the live units at one moment, largest first, and the largest size at each index over all
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

/* An order that was not declared may open any two units at once, such as an embedding around the layers.
 * The two largest must fit. */
static void need_pair(struct window *w, int64_t first, int64_t second)
{
    while (w->n_need < 2)
        w->need[w->n_need++] = 0;
    w->need[0] = zr_max(w->need[0], first);
    w->need[1] = zr_max(w->need[1], second);
}

/* Returns the two largest units that need a slot. */
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

/* Parameters needed at each begin: all open sharded units and the next `ahead` distinct ones, across the
 * end of the pass. Units above `most` bytes have a slot of their own and are not counted. */
static void param_need(const struct zr_core_spec *s, int32_t ahead, int64_t most, struct window *w,
                       int32_t *open, int32_t *seen)
{
    w->n_need = 0;
    memset(open, 0, (size_t)s->n_units * sizeof *open);
    memset(seen, 0xff, (size_t)s->n_units * sizeof *seen);
    for (int32_t i = 0; i < s->n_order; i++) {
        const struct zero_call *c = &s->order[i];
        if (!zr_phase_has_params(c->phase))
            continue;
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
            const struct zero_call *next = &s->order[(i + j) % s->n_order];
            if (next->is_end || !zr_phase_has_params(next->phase) || s->units[next->unit].resident ||
                seen[next->unit] == i)
                continue;
            seen[next->unit] = i;
            n++;
            if (s->units[next->unit].param_bytes <= most)
                add_live(w, s->units[next->unit].param_bytes);
        }
        note_live(w);
    }
}

/* Finds the bytes that a step with these slots receives for gathers. scratch: (2 * n_units). */
static int gather_cost(const struct reference *p, const int64_t *slots, int32_t n, int64_t *scratch,
                       int64_t *bytes)
{
    struct zr_core_spec s = p->spec;
    s.param_slot_bytes = slots;
    s.n_param_slots = n;
    /* Gradient slots are not chosen yet, and gathers do not depend on them. So the rehearsal is of a model
     * that has its gradients at all times (stages 0 and 1), which needs no gradient slots. */
    s.model_holds = true;
    int err = rehearse_fully(&s, scratch, scratch + s.n_units);
    *bytes = 0;
    for (int32_t u = 0; !err && u < s.n_units; u++)
        *bytes += scratch[u] * gather_wire(p->layout, u);
    return err;
}

/* Enlarges slots until every bracket finds one. A window says how many slots are needed and how large, but
 * the core may fill them so that a bracket finds none. Each attempt then makes one more slot as large as the
 * largest. Few models need this: those with overlapping brackets of odd sizes. slots are the parameter slots
 * of s. */
static int mend(const struct zr_core_spec *s, int64_t *slots, int32_t n_slots, int64_t *scratch)
{
    for (int32_t i = 1;; i++) {
        int err = rehearse_fully(s, scratch, scratch + s->n_units);
        if (err != ZERO_ERR_BUDGET || i >= n_slots)
            return err;
        slots[i] = slots[0];
    }
}

/* Chooses the slots for a prefetch depth. open, seen: (n_units) each, for param_need. */
static int depth_slots(struct reference *p, const struct zr_options *opt, int32_t ahead, struct window *w,
                       int32_t *open, int32_t *seen, int64_t *scratch)
{
    struct zr_core_spec *s = &p->spec;
    int64_t largest, second;
    largest_two(s, false, &largest, &second);
    /* No order was declared, so any two units may be open at once. With ahead = 0, the slots are those of the
     * smallest budget. They fit the order that the plan assumes, which opens one unit at a time. */
    bool pairs = !opt->n_order && ahead > 0 && second;
    /* a single slot is as large as the largest unit, and is left to units that fit no other */
    bool reserve = pairs && second < largest;
    param_need(s, ahead, reserve ? second : largest, w, open, seen);
    if (reserve) {
        memmove(w->need + 1, w->need, (size_t)w->n_need++ * sizeof *w->need);
        w->need[0] = largest;
    }
    /* A unit outside the order may be used too. */
    w->need[0] = zr_max(w->n_need ? w->need[0] : 0, largest);
    w->n_need = (int32_t)zr_max(w->n_need, 1);
    if (pairs)
        need_pair(w, largest, second);
    s->reserve_largest = reserve;
    struct zr_core_spec alone = *s;
    alone.model_holds = true; /* without gradient slots, as in gather_cost */
    alone.param_slot_bytes = w->need;
    alone.n_param_slots = w->n_need;
    return mend(&alone, w->need, w->n_need, scratch);
}

/* Returns the smallest unit above `above` bytes that needs a slot; 0: none. */
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

/* Finds the slots for the budget, and puts them into the window w. It tries prefetch depths from 0 up to the
 * first whose slots are larger than the budget, and takes the deepest that does not raise the traffic. If the
 * slots of all depths fit, it also adds single slots that save traffic, the smallest first.
 *
 * The array need (n_units) is memory for slots that are tried. The last three parameters are those of
 * depth_slots. */
static int spend_budget(struct reference *p, const struct zr_options *opt, struct window *w, int64_t *need,
                        int32_t *open, int32_t *seen, int64_t *scratch)
{
    struct zr_core_spec *s = &p->spec;
    int64_t budget = opt->param_budget_bytes, used = 0, cost = 0, bytes;
    int32_t n = 0;
    bool reserve = false, fits = true; /* fits: so do the slots of the last depth */
    struct window trial = {.live = w->live, .need = need};
    for (int32_t ahead = 0; fits && ahead <= s->prefetch; ahead = ahead ? 2 * ahead : 1) {
        int err = depth_slots(p, opt, ahead, &trial, open, seen, scratch);
        int64_t needed = sum(need, trial.n_need);
        if (!err && needed > budget && n == 0)
            err = ZERO_ERR_BUDGET;
        fits = needed <= budget;
        if (!err && fits)
            err = gather_cost(p, need, trial.n_need, scratch, &bytes);
        if (err)
            return err;
        if (!fits || (n && bytes > cost))
            continue;
        memcpy(w->need, need, (size_t)trial.n_need * sizeof *need);
        w->n_need = n = trial.n_need;
        used = needed;
        cost = bytes;
        reserve = s->reserve_largest;
    }
    s->reserve_largest = reserve;
    for (int64_t size = fits ? next_size(s, 0) : 0; size && used + size <= budget && n < s->n_units;) {
        w->need[n] = size;
        int err = gather_cost(p, w->need, n + 1, scratch, &bytes);
        if (err && err != ZERO_ERR_BUDGET)
            return err;
        if (err || bytes >= cost) {
            /* this slot saves no traffic, or with it a bracket finds no slot: tries the next size */
            size = next_size(s, size);
            continue;
        }
        w->n_need = ++n;
        used += size;
        cost = bytes;
    }
    return 0;
}

/* Returns the bytes that a step's gathers take with the slow search's slots, or -1 if the budget is too
 * small. The units are those of the plan's spec before any was made resident. */
static int64_t reference_cost(const struct zr_plan *plan, const struct zr_options *opt)
{
    const struct zr_layout *l = plan->layout;
    size_t n = (size_t)l->n_units + 1;
    struct reference r = {.layout = l, .spec = plan->spec};
    struct zr_core_unit_spec *units = calloc(n, sizeof *units);
    int64_t *wide = calloc(5 * n, sizeof *wide), cost = 0;
    int32_t *narrow = calloc(2 * n, sizeof *narrow);
    struct window w = {.live = wide, .need = wide + n};
    assert_true(units && wide && narrow);
    memcpy(units, plan->spec.units, (size_t)l->n_units * sizeof *units);
    for (int32_t u = 0; u < l->n_units; u++)
        units[u].resident = l->units[u].asked_resident;
    r.spec.units = units;
    int err = spend_budget(&r, opt, &w, wide + 2 * n, narrow, narrow + n, wide + 3 * n);
    assert_true(err == 0 || err == ZERO_ERR_BUDGET);
    if (!err)
        assert_int_equal(gather_cost(&r, w.need, w.n_need, wide + 3 * n, &cost), 0);
    free(units);
    free(wide);
    free(narrow);
    return err ? -1 : cost;
}

/* Returns the bytes that a step's gathers take with the plan's own slots. */
static int64_t cost_of(const struct zr_plan *plan)
{
    struct reference r = {.layout = plan->layout, .spec = plan->spec};
    size_t n = (size_t)plan->spec.n_units;
    int64_t *scratch = calloc(2 * n, sizeof *scratch), bytes;
    assert_non_null(scratch);
    assert_int_equal(gather_cost(&r, plan->spec.param_slot_bytes, plan->spec.n_param_slots, scratch, &bytes),
                     0);
    free(scratch);
    return bytes;
}

/* ---- models ---- */

struct planned {
    struct zr_layout *layout;
    struct zr_plan *plan;
    struct zr_options opt;
    struct zero_call order[MAX_CALLS];
};

static void lay_out(struct planned *p, struct zr_tensor *t, int32_t n, int world)
{
    p->plan = NULL;
    assert_int_equal(
        zr_layout_make(t, n, world, 1, zr_placement_asked(&p->opt).model_holds, false, &p->layout), 0);
}

static void release(struct planned *p)
{
    zr_plan_free(p->plan);
    zr_layout_free(p->layout);
}

static struct zr_options options(int stage)
{
    return (struct zr_options){.stage = stage,
                               .grad_accum_steps = 1,
                               .prefetch = 2,
                               .param_budget_bytes = -1,
                               .deterministic = true};
}

static void random_planned(struct random_source *r, struct planned *p, int stage)
{
    int32_t n;
    p->opt = options(stage);
    struct zr_tensor *t = random_tensors(r, MAX_UNITS, &n);
    lay_out(p, t, n, 2 + (int)random_below(r, 7));
    p->opt.grad_accum_steps = chance(r, 30) ? 1 : 1 + (int)random_below(r, 30);
    p->opt.prefetch = chance(r, 10) ? 100 : (int)random_below(r, 5);
    p->opt.deterministic = chance(r, 50);
    if (chance(r, 50)) {
        p->opt.n_order = random_calls(r, p->layout->n_units, p->order);
        p->opt.order = p->order;
    }
}

/* Lays out n units for 8 ranks. Unit u has elems(u) elements. The model uses the units one after the
 * other. */
static void lay_out_units(struct planned *p, int32_t n, int64_t (*elems)(int32_t u))
{
    struct zr_tensor *t = calloc((size_t)n, sizeof *t);
    assert_non_null(t);
    for (int32_t u = 0; u < n; u++)
        t[u] = make_tensor("t", elems(u), u);
    lay_out(p, t, n, 8);
}

static int64_t sharded_bytes(const struct zr_layout *l)
{
    int64_t n = 0;
    for (int32_t u = 0; u < l->n_units; u++)
        n += l->units[u].asked_resident ? 0 : l->units[u].param_bytes;
    return n;
}

/* ---- tests ---- */

/* zr_core_rehearse runs micro-batches until they repeat, and counts the rest by multiplication. The counts
 * equal those of rehearse_fully, which runs every micro-batch of every step. */
static void a_rehearsal_is_exact(void **state)
{
    int64_t n_rehearsed = 0;
    FOR_CASES(r, 1000)
    {
        struct planned p;
        random_planned(&r, &p, (int)random_below(&r, 4));
        if (p.opt.stage == 3 && chance(&r, 60))
            p.opt.param_budget_bytes = 1 + random_below(&r, sharded_bytes(p.layout) + 1);
        int err = zr_plan_make(p.layout, &p.opt, &p.plan);
        CHECK(err == 0 || err == ZERO_ERR_BUDGET, "%s", zr_error_text());
        if (!err) {
            size_t n = (size_t)p.layout->n_units;
            int64_t *fast = calloc(4 * n, sizeof *fast), *slow = fast + 2 * n;
            assert_non_null(fast);
            assert_int_equal(zr_core_rehearse(&p.plan->spec, &(struct zr_core_work){fast, fast + n}), 0);
            n_takes = 0;
            assert_int_equal(rehearse_fully(&p.plan->spec, slow, slow + n), 0);
            n_rehearsed++;
            for (size_t u = 0; u < n; u++)
                CHECK(fast[u] == slow[u] && fast[n + u] == slow[n + u],
                      "unit %zu: %lld gathers, not %lld; %lld reduces, not %lld", u, (long long)fast[u],
                      (long long)slow[u], (long long)fast[n + u], (long long)slow[n + u]);
            free(fast);
        }
        release(&p);
    }
    assert_true(n_rehearsed > 500);
}

static void compare(struct planned *p, int64_t *n_compared)
{
    int err = zr_plan_make(p->layout, &p->opt, &p->plan);
    CHECK(err == 0 || err == ZERO_ERR_BUDGET, "%s", zr_error_text());
    if (err || p->plan->n_param_slots == 0)
        return;
    int64_t least = reference_cost(p->plan, &p->opt), cost = cost_of(p->plan), used = 0;
    for (int32_t i = 0; i < p->plan->n_param_slots; i++)
        used += p->plan->spec.param_slot_bytes[i];
    CHECK(used <= p->opt.param_budget_bytes, "%lld bytes of slots, the budget is %lld", (long long)used,
          (long long)p->opt.param_budget_bytes);
    CHECK(least >= 0 && cost <= least, "%lld bytes on the wire, the slow search finds %lld", (long long)cost,
          (long long)least);
    ++*n_compared;
}

/* Compares the two searches on 1000 random models with a budget. */
static void no_more_traffic(void **state)
{
    int64_t n_compared = 0;
    struct random_source r = random_open();
    case_seed = r.state;
    for (; n_compared < 1000; r.state = ++case_seed) {
        struct planned p;
        random_planned(&r, &p, 3);
        p.opt.grad_accum_steps = 1 + (int)random_below(&r, 4);
        p.opt.param_budget_bytes = 1 + random_below(&r, sharded_bytes(p.layout) + 1);
        compare(&p, &n_compared);
        release(&p);
    }
}

static int64_t alike(int32_t u)
{
    (void)u;
    return 4096;
}

static int64_t three_sizes(int32_t u)
{
    return 4096 * (1 + u % 3);
}

/* The same with more than 256 units (FEW_UNITS in plan_slots.c). The plan's search then tries several slots
 * at once. */
static void no_more_traffic_of_many_units(void **state)
{
    for (int k = 0; k < 4; k++) {
        struct planned p = {.opt = options(3)};
        int64_t n_compared = 0;
        lay_out_units(&p, 300, k % 2 ? three_sizes : alike);
        p.opt.param_budget_bytes = sharded_bytes(p.layout) * (k < 2 ? 1 : 6) / 10;
        compare(&p, &n_compared);
        assert_int_equal(n_compared, 1);
        release(&p);
    }
}

static int64_t many_sizes(int32_t u)
{
    return 1024 * (1 + (int64_t)u * 7919 % 5003);
}

/* The plan's search makes less than 4 million calls of the core. With 2000 units, a rehearsal for every slot
 * would make more than 10 million. With 1024 micro-batches, running each of them would make several hundred
 * times as many as running the few until they repeat. */
static void a_plan_takes_few_calls(void **state)
{
    static const struct {
        int32_t n_units, accum;
        int64_t (*elems)(int32_t u);
    } cases[] = {{2000, 1, alike}, {2000, 1, many_sizes}, {1000, 1024, alike}, {100, 1024, many_sizes}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        struct planned p = {.opt = options(3)};
        lay_out_units(&p, cases[k].n_units, cases[k].elems);
        p.opt.grad_accum_steps = cases[k].accum;
        p.opt.param_budget_bytes = sharded_bytes(p.layout) / 2;
        n_takes = 0;
        CHECK(zr_plan_make(p.layout, &p.opt, &p.plan) == 0, "%s", zr_error_text());
        CHECK(n_takes < 4000000, "%lld calls for %d units", (long long)n_takes, cases[k].n_units);
        assert_true(p.plan->n_param_slots > cases[k].n_units / 4);
        release(&p);
    }
}

/* The core stores the order of one micro-batch, however many micro-batches a step has. */
static void many_micro_batches_take_no_memory(void **state)
{
    struct planned p = {.opt = options(3)};
    lay_out_units(&p, 1000, alike);
    p.opt.grad_accum_steps = 1024;
    assert_int_equal(zr_plan_make(p.layout, &p.opt, &p.plan), 0);
    size_t bytes = zr_core_bytes(&p.plan->spec);
    CHECK(bytes < 5 << 20, "%zu bytes", bytes);
    release(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_rehearsal_is_exact),
        cmocka_unit_test(no_more_traffic),
        cmocka_unit_test(no_more_traffic_of_many_units),
        cmocka_unit_test(a_plan_takes_few_calls),
        cmocka_unit_test(many_micro_batches_take_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
