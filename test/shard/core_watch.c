/* SPDX-License-Identifier: Apache-2.0 */
/* core_watch.c: predicts refusals and carries out actions for core_watch.h, and draws random steps. */
#include "test/shard/core_watch.h"

#include "shard/core_inside.h"

void watch_open(struct watch *w, const struct zr_core_spec *s)
{
    enum { CANARIES = 8 };
    memset(w, 0, sizeof *w);
    w->spec = *s;
    w->last_reduced = w->last_in_place = -1;
    w->bytes = zr_core_bytes(s);
    void *mem = aligned_alloc(16, w->bytes), *copy = aligned_alloc(16, w->bytes);
    w->before = malloc(w->bytes);
    assert_true(mem && copy && w->before && w->bytes % 16 == 0);
    memset(mem, 0x5a, w->bytes);
    memset(copy, 0xa5, w->bytes);
    w->core = zr_core_init(mem, s);
    w->copy = zr_core_init(copy, s);
    size_t n = (size_t)zr_core_max_actions(s) + CANARIES;
    w->out = malloc(n * sizeof *w->out);
    w->copy_out = malloc(n * sizeof *w->out);
    w->unit = calloc((size_t)s->n_units, sizeof *w->unit);
    w->pslot = calloc((size_t)s->n_param_slots + 1, sizeof *w->pslot);
    w->gslot = calloc((size_t)s->n_grad_slots + 1, sizeof *w->gslot);
    assert_true(w->out && w->copy_out && w->unit && w->pslot && w->gslot);
    memset(w->out, 0xee, n * sizeof *w->out);
    for (int32_t i = 0; i < s->n_param_slots; i++)
        w->pslot[i].unit = -1;
    for (int32_t i = 0; i < s->n_grad_slots; i++)
        w->gslot[i].unit = -1;
    assert_true(s->n_group_slots <= 4);
    for (int i = 0; i < 4; i++)
        w->group_slot[i].unit = -1;
    for (int32_t u = 0; u < s->n_units; u++) {
        w->unit[u].home_ready = w->unit[u].whole = true;
        w->unit[u].sum = calloc((size_t)s->n_sums, SUM_TEXT);
        strcpy(w->unit[u].grad, "z"); /* arenas start as zeros */
        assert_non_null(w->unit[u].sum);
    }
}

void watch_close(struct watch *w)
{
    CHECK(!memcmp(w->core, w->copy, w->bytes), "the same calls gave another core");
    for (int32_t u = 0; u < w->spec.n_units; u++)
        free(w->unit[u].sum);
    free(w->core);
    free(w->copy);
    free(w->before);
    free(w->out);
    free(w->copy_out);
    free(w->unit);
    free(w->pslot);
    free(w->gslot);
}

/* ---- sums as text ---- */

static void add_text(char *to, const char *more)
{
    char sum[2 * SUM_TEXT];
    if (!strcmp(to, "") || !strcmp(to, "z")) {
        strcpy(sum, more);
    } else if (!strcmp(more, "z")) {
        return;
    } else {
        int n = snprintf(sum, sizeof sum, "(%s+%s)", to, more);
        CHECK(n < SUM_TEXT, "sums are too long for this test");
    }
    memcpy(to, sum, strlen(sum) + 1);
}

void tree_text(char *text, int32_t lo, int32_t n)
{
    if (n == 1) {
        sprintf(text, "%d", lo);
        return;
    }
    int32_t half = 1;
    while (half * 2 < n)
        half *= 2;
    strcpy(text, "(");
    tree_text(text + 1, lo, half);
    strcat(text, "+");
    tree_text(text + strlen(text), lo + half, n - half);
    strcat(text, ")");
}

int32_t sums_for(int32_t n)
{
    int32_t most = 1;
    for (int32_t i = 0; i < n; i++) {
        /* Before contribution i the counter holds one sum for each set bit of i. An odd i adds to the last
         * of them. */
        int32_t depth = i % 2 ? 0 : 1;
        for (int32_t bits = i; bits; bits &= bits - 1)
            depth++;
        most = depth > most ? depth : most;
    }
    return most;
}

/* Returns whether sum has each contribution from 0 to n-1 once, and nothing else. */
static bool holds_all(const char *sum, int32_t n)
{
    bool seen[SUM_TEXT] = {false};
    int32_t count = 0;
    if (n == 0)
        return !strcmp(sum, "z");
    for (const char *p = sum; *p;) {
        if (strchr("()+", *p)) {
            p++;
            continue;
        }
        char *end;
        long id = strtol(p, &end, 10);
        if (end == p || id < 0 || id >= n || seen[id])
            return false;
        seen[id] = true;
        count++;
        p = end;
    }
    return count == n;
}

/* ---- calls that must be refused ---- */

static bool needs_slot(const struct watch *w, int32_t u)
{
    return !w->spec.units[u].resident;
}

static bool holds_param(const struct watch *w, int32_t u)
{
    return w->unit[u].open[ZERO_FORWARD] || w->unit[u].open[ZERO_BACKWARD] ||
           w->unit[u].open[ZERO_BACKWARD_INPUT];
}

static bool is_open(const struct watch *w, int32_t u)
{
    return holds_param(w, u) || w->unit[u].open[ZERO_BACKWARD_WEIGHT];
}

static bool param_fits(const struct watch *w, int32_t u)
{
    for (int32_t i = 0; i < w->spec.n_param_slots; i++) {
        const struct watch_slot *s = &w->pslot[i];
        if (s->unit == u && s->fresh)
            return true;
        if (!s->n_uses && w->spec.param_slot_bytes[i] >= w->spec.units[u].param_bytes)
            return true;
    }
    return false;
}

/* Returns whether the unit's gradient has its own memory. */
static bool has_home(const struct watch *w, int32_t u)
{
    return w->spec.model_holds || w->spec.units[u].sum_in_place || w->spec.units[u].grad_home;
}

static bool grad_fits(const struct watch *w, int32_t u)
{
    for (int32_t i = 0; i < w->spec.n_grad_slots; i++)
        if (w->gslot[i].unit < 0 && w->spec.grad_slot_bytes[i] >= w->spec.units[u].grad_bytes)
            return true;
    return false;
}

/* Declared backward brackets of a unit in a micro-batch. */
static int32_t declared_uses(const struct watch *w, int32_t unit)
{
    int32_t uses = 0;
    for (int32_t i = 0; i < w->spec.n_order; i++)
        uses += w->spec.order[i].unit == unit && zr_phase_has_grads(w->spec.order[i].phase) &&
                !w->spec.order[i].is_end;
    if (w->spec.order_of_step)
        uses = (uses + w->spec.grad_accum_steps - 1) / w->spec.grad_accum_steps;
    return uses ? uses : 1;
}

/* Declared backward brackets of a unit in a step. */
static int32_t declared_passes(const struct watch *w, int32_t unit)
{
    return declared_uses(w, unit) * w->spec.grad_accum_steps;
}

/* The number of micro-batches that the backward brackets prove. A unit that is declared once counts them. */
static int32_t shown_micro_batches(const struct watch *w)
{
    int32_t most[2] = {0, 0}, n_once = 0;
    for (int32_t u = 0; u < w->spec.n_units; u++) {
        int32_t n = w->unit[u].n_bwd, uses = declared_uses(w, u), fewest = (n + uses - 1) / uses;
        n_once += uses == 1 && n > 0;
        most[0] = n > most[0] ? n : most[0];
        most[1] = fewest > most[1] ? fewest : most[1];
    }
    return most[n_once > 0];
}

/* Returns whether a backward bracket has ended since the step. */
static bool has_backward(const struct watch *w)
{
    if (w->inputs || w->frozen_backward)
        return true;
    for (int32_t i = 0; i < w->spec.n_units; i++)
        if (w->unit[i].n_bwd)
            return true;
    return false;
}

/* Returns whether the model has its gradients at all times, and no backward bracket has ended. */
static bool is_unbracketed(const struct watch *w)
{
    return w->spec.model_holds && !has_backward(w) && !w->spec.in_stages;
}

/* Returns whether a step with backward brackets has none for the unit. */
static bool leaves_out(const struct watch *w, int32_t unit)
{
    return w->spec.units[unit].trainable && (has_backward(w) || w->spec.in_stages) && !w->unit[unit].n_bwd;
}

static int expected_of_step(const struct watch *w)
{
    int32_t shown = shown_micro_batches(w), n_trainable = 0;
    if (w->n_open)
        return ZERO_ERR_ORDER;
    for (int32_t u = 0; u < w->spec.n_units; u++)
        n_trainable += w->spec.units[u].trainable;
    if (shown > 0 && shown < w->spec.grad_accum_steps)
        return ZERO_ERR_ORDER;
    if (has_backward(w) && w->unbracketed)
        return ZERO_ERR_ORDER;
    if (has_backward(w) || w->spec.in_stages || n_trainable == 0)
        return 0;
    if (!w->spec.model_holds)
        return ZERO_ERR_ORDER;
    /* A model without brackets calls zero_micro. It need not if nothing is reduced between micro-batches. */
    if (w->n_micro + 1 == w->spec.grad_accum_steps || (w->n_micro == 0 && !w->spec.reduce_each))
        return 0;
    return ZERO_ERR_ORDER;
}

/* Returns whether the calls show that no gradient exists yet. */
static bool nothing_to_drop(const struct watch *w)
{
    bool written = w->complete || w->n_micro || has_backward(w) || w->spec.in_stages, unseen = false,
         trainable = false;
    for (int32_t u = 0; u < w->spec.n_units; u++) {
        const struct watch_unit *x = &w->unit[u];
        written |= x->used[1];
        trainable |= w->spec.units[u].trainable;
        unseen |= w->spec.units[u].trainable && !x->has_begun_backward;
    }
    return trainable && !written && !(w->spec.model_holds && unseen);
}

static bool has_open_grad(const struct watch *w, int32_t unit)
{
    return w->unit[unit].open[ZERO_BACKWARD] || w->unit[unit].open[ZERO_BACKWARD_WEIGHT];
}

static int expected_error(const struct watch *w, enum zr_core_event_kind kind, int32_t unit,
                          enum zero_phase phase)
{
    bool backward = zr_phase_has_grads(phase);
    bool has_unit = kind == ZR_EV_BEGIN || kind == ZR_EV_END || kind == ZR_EV_REWRITE;
    if (has_unit && (unit < 0 || unit >= w->spec.n_units))
        return ZERO_ERR_ARG;
    switch (kind) {
    case ZR_EV_BEGIN:
        if (w->unit[unit].open[phase] || (backward && has_open_grad(w, unit)))
            return ZERO_ERR_ORDER;
        if (w->all)
            return zr_phase_is_backward(phase) ? ZERO_ERR_ORDER : 0;
        if (zr_phase_is_backward(phase) && w->complete)
            return ZERO_ERR_ORDER;
        if (backward && w->spec.units[unit].trainable && w->unit[unit].n_bwd == declared_passes(w, unit))
            return ZERO_ERR_ORDER;
        if (phase != ZERO_BACKWARD_WEIGHT && needs_slot(w, unit) && !param_fits(w, unit))
            return ZERO_ERR_BUDGET;
        if (backward && w->spec.units[unit].trainable && !has_home(w, unit) && !grad_fits(w, unit))
            return ZERO_ERR_BUDGET;
        return 0;
    case ZR_EV_END:
        return w->unit[unit].open[phase] ? 0 : ZERO_ERR_ORDER;
    case ZR_EV_MICRO:
        return w->n_open || w->all || w->complete || w->n_micro + 1 >= w->spec.grad_accum_steps
                   ? ZERO_ERR_ORDER
                   : 0;
    case ZR_EV_STEP:
    case ZR_EV_NORM:
        return w->all ? ZERO_ERR_ORDER : w->complete && !w->n_open ? 0 : expected_of_step(w);
    case ZR_EV_DROP:
        return w->n_open || w->all || nothing_to_drop(w) ? ZERO_ERR_ORDER : 0;
    case ZR_EV_GATHER_ALL:
        if (w->n_open || w->all)
            return ZERO_ERR_ORDER;
        for (int32_t i = 0; i < w->spec.n_units; i++)
            if (needs_slot(w, i) && !param_fits(w, i))
                return ZERO_ERR_BUDGET;
        return 0;
    case ZR_EV_RELEASE_ALL:
        return w->n_open || !w->all ? ZERO_ERR_ORDER : 0;
    case ZR_EV_EVALUATED:
        return w->n_open || w->all || w->complete || has_backward(w) ? ZERO_ERR_ORDER : 0;
    case ZR_EV_REWRITE:
        return is_open(w, unit) || w->all ? ZERO_ERR_ORDER : 0;
    case ZR_EV_SNAPSHOT: {
        bool begun = w->n_open || w->n_micro || w->complete || w->inputs;
        for (int32_t i = 0; i < w->spec.n_units; i++)
            begun |= w->unit[i].used[1];
        return begun ? ZERO_ERR_ORDER : 0;
    }
    }
    return ZERO_ERR_ARG;
}

/* ---- actions ---- */

static const char *action_name(int kind)
{
    return kind >= ZR_ACT_USE_PARAM && kind <= ZR_ACT_SNAPSHOT ? zr_action_name((enum zr_action_kind)kind)
                                                               : "?";
}

/* CHECK with a message about action a. */
#define EXPECT(condition)                                                                                    \
    CHECK(condition, "%s of unit %d, slot %d, call %lld", action_name(a->kind), a->unit, a->slot,            \
          (long long)w->n_calls)

static void gather(struct watch *w, const struct zr_action *a)
{
    struct watch_unit *u = &w->unit[a->unit];
    w->n_gathers++;
    u->gathered = true;
    EXPECT(u->whole);
    if (a->slot < 0) {
        EXPECT(!needs_slot(w, a->unit) && w->spec.gathers_updated);
        EXPECT(w->stepping && u->updated && !u->home_ready);
        u->home_ready = true;
        return;
    }
    EXPECT(needs_slot(w, a->unit) && a->slot < w->spec.n_param_slots);
    EXPECT(w->spec.param_slot_bytes[a->slot] >= w->spec.units[a->unit].param_bytes);
    EXPECT(w->pslot[a->slot].n_uses == 0);
    EXPECT(!w->stepping || !w->spec.units[a->unit].trainable || u->updated || leaves_out(w, a->unit));
    for (int32_t i = 0; i < w->spec.n_param_slots; i++) {
        struct watch_slot *s = &w->pslot[i];
        if (s->unit != a->unit || !s->fresh)
            continue;
        /* It is there already, but in a slot of a size that its next bracket does not take, or in the slot
         * that is reserved for larger units. */
        EXPECT(s->n_uses == 0 &&
               (w->core->reserved
                    ? w->spec.param_slot_bytes[i] > w->spec.param_slot_bytes[a->slot]
                    : w->core->sized && w->spec.param_slot_bytes[i] != w->spec.param_slot_bytes[a->slot]));
        s->fresh = false;
    }
    w->pslot[a->slot] = (struct watch_slot){.unit = a->unit, .fresh = true};
}

static bool readable(const struct watch *w, const struct zr_action *a)
{
    if (!needs_slot(w, a->unit))
        return a->slot == -1 && w->unit[a->unit].home_ready;
    return a->slot >= 0 && a->slot < w->spec.n_param_slots && w->pslot[a->slot].unit == a->unit &&
           w->pslot[a->slot].fresh;
}

static void use_param(struct watch *w, const struct zr_action *a)
{
    EXPECT(readable(w, a) && a->gathered == w->unit[a->unit].gathered);
    if (a->slot >= 0)
        w->pslot[a->slot].n_uses++;
}

static void hide_param(struct watch *w, const struct zr_action *a)
{
    EXPECT(a->slot == -1 ? !needs_slot(w, a->unit)
                         : w->pslot[a->slot].unit == a->unit && w->pslot[a->slot].n_uses > 0);
    if (a->slot >= 0)
        w->pslot[a->slot].n_uses = 0;
}

static void use_grad(struct watch *w, const struct zr_action *a)
{
    struct watch_unit *u = &w->unit[a->unit];
    EXPECT(w->spec.units[a->unit].trainable);
    EXPECT(a->bracket == !w->collective);
    if (has_home(w, a->unit)) {
        EXPECT(a->slot == -1);
        u->in_flight &= !a->bracket; /* a bracket or RETURN_GRADS returns the model's pointer */
        EXPECT(a->keeps_overwritten == (a->bracket || !is_unbracketed(w)));
        EXPECT(!u->held);
        /* Reduced gradients must be dropped, and others must stay. */
        EXPECT(a->fill ? u->grad_reduced || !strcmp(u->grad, "z") : !u->grad_reduced);
        if (a->fill) {
            strcpy(u->grad, "z");
            u->grad_reduced = false;
        }
        return;
    }
    EXPECT(a->slot >= 0 && a->slot < w->spec.n_grad_slots && a->fill);
    EXPECT(w->gslot[a->slot].unit == -1);
    EXPECT(w->spec.grad_slot_bytes[a->slot] >= w->spec.units[a->unit].grad_bytes);
    w->gslot[a->slot] = (struct watch_slot){.unit = a->unit};
}

/* The model has written one contribution to its resident gradient. */
static void contribute(struct watch *w, int32_t unit)
{
    struct watch_unit *u = &w->unit[unit];
    char id[16];
    CHECK(!u->grad_reduced, "unit %d adds to a gradient that was reduced already", unit);
    snprintf(id, sizeof id, "%d", u->n_contrib++);
    add_text(u->grad, id);
}

static void hide_grad(struct watch *w, const struct zr_action *a)
{
    EXPECT(w->spec.units[a->unit].trainable && a->bracket == !w->collective);
    if (has_home(w, a->unit)) {
        EXPECT(a->slot == -1);
        EXPECT(a->in_flight == (w->spec.model_holds && a->bracket && a + 1 < w->out + w->n_out &&
                                a[1].kind == ZR_ACT_REDUCE));
        w->unit[a->unit].in_flight = a->in_flight;
        return;
    }
    EXPECT(!a->in_flight);
    EXPECT(a->slot >= 0 && w->gslot[a->slot].unit == a->unit && !w->gslot[a->slot].hidden);
    w->gslot[a->slot].hidden = true;
}

/* Returns every gradient that is being reduced to the model, which must not happen in the middle of
 * backward. Gradients summed in place return only after all of them were used. */
static void return_grads(struct watch *w, const struct zr_action *a)
{
    bool in_place = w->spec.units[a->unit].sum_in_place;
    EXPECT(w->spec.model_holds && w->n_open_bwd == 0);
    if (in_place)
        EXPECT(w->stepping
                   ? a->unit == w->last_in_place
                   : w->unit[a->unit].in_flight || (w->complete && w->unit[a->unit].has_ended_backward));
    else
        EXPECT(a->unit == w->last_reduced);
    for (int32_t i = 0; i < w->spec.n_units; i++) {
        w->unit[i].in_flight &= w->spec.units[i].sum_in_place && !in_place;
        EXPECT(!in_place || !w->unit[i].held);
    }
    w->last_reduced = -1;
    if (in_place)
        w->last_in_place = -1;
}

static void drop_sums(struct watch *w, const struct zr_action *a)
{
    bool any = false;
    for (int32_t i = 0; i < w->spec.n_units; i++) {
        any |= w->unit[i].held || w->unit[i].spread;
        w->unit[i].held = w->unit[i].spread = false;
    }
    EXPECT(any);
}

static void fold(struct watch *w, const struct zr_action *a)
{
    struct watch_unit *u = &w->unit[a->unit];
    int sum = a->sum;
    for (int k = 0; k < a->n_folds; k++, sum--) {
        EXPECT(sum > 0 && sum < w->spec.n_sums && *u->sum[sum] && *u->sum[sum - 1]);
        add_text(u->sum[sum - 1], u->sum[sum]);
        *u->sum[sum] = 0;
    }
}

static void add_to_sum(struct watch *w, const struct zr_action *a, const char *what)
{
    struct watch_unit *u = &w->unit[a->unit];
    EXPECT(a->contribution == u->n_added);
    u->n_added++;
    EXPECT(a->accumulate ? *u->sum[a->sum] : !*u->sum[a->sum]);
    EXPECT(a->accumulate || a->sum == 0 || *u->sum[a->sum - 1]); /* sums are a stack */
    add_text(u->sum[a->sum], what);
    fold(w, a);
}

static void reduce(struct watch *w, const struct zr_action *a)
{
    struct watch_unit *u = &w->unit[a->unit];
    char what[SUM_TEXT];
    w->n_reduces++;
    EXPECT(w->spec.units[a->unit].trainable && !w->normed && a->sum < w->spec.n_sums);
    bool in_place = w->spec.units[a->unit].sum_in_place;
    if (has_home(w, a->unit)) {
        EXPECT(a->slot == -1 && !u->grad_reduced);
        strcpy(what, u->grad);
        u->grad_reduced = true;
        if (u->used[1] && w->spec.model_holds && !in_place) /* without brackets it is returned at once */
            w->last_reduced = a->unit;
    } else {
        EXPECT(a->slot >= 0 && w->gslot[a->slot].unit == a->unit && w->gslot[a->slot].hidden);
        w->gslot[a->slot].unit = -1;
        snprintf(what, sizeof what, "%d", u->n_contrib - 1);
    }
    if (in_place) {
        EXPECT(a->sum == 0 && !*u->sum[0] && a->n_folds == 0 && !a->accumulate);
        strcpy(u->sum[0], what);
        u->held = true;
        return;
    }
    if (w->spec.outer_each) {
        struct watch_group_slot *p = &w->group_slot[a->group_slot];
        EXPECT(a->group_slot >= 0 && a->group_slot < w->spec.n_group_slots && p->unit == -1 &&
               !a->accumulate && a->n_folds == 0);
        p->unit = a->unit;
        strcpy(p->text, what);
        return;
    }
    EXPECT(a->group_slot == -1);
    if (w->spec.outer) {
        EXPECT(!u->outer_done && a->accumulate == (*u->inner != 0) && a->sum == 0 && a->n_folds == 0);
        add_text(u->inner, what);
        /* Sums go over the groups when the declared contributions are complete. */
        bool ends = w->collective || u->n_bwd == declared_passes(w, a->unit);
        EXPECT((a + 1 < w->out + w->n_out && a[1].kind == ZR_ACT_REDUCE_OUTER) == ends);
        return;
    }
    add_to_sum(w, a, what);
}

static void reduce_outer(struct watch *w, const struct zr_action *a)
{
    struct watch_unit *u = &w->unit[a->unit];
    EXPECT(w->spec.outer && w->spec.units[a->unit].trainable && !w->normed && !u->outer_done);
    u->n_outer++;
    if (w->spec.outer_each) {
        struct watch_group_slot *p = &w->group_slot[a->group_slot];
        EXPECT(a->group_slot >= 0 && a->group_slot < w->spec.n_group_slots && p->unit == a->unit);
        p->unit = -1;
        add_to_sum(w, a, p->text);
        return;
    }
    EXPECT(a->group_slot == -1 && *u->inner && !*u->sum[0] && a->sum == 0 && a->n_folds == 0);
    EXPECT(!a->accumulate);
    strcpy(u->sum[0], u->inner);
    u->outer_done = true;
    u->spread = !w->spec.outer_gathers;
}

static void gather_outer(struct watch *w, const struct zr_action *a)
{
    struct watch_unit *u = &w->unit[a->unit];
    EXPECT(w->spec.outer_gathers && w->stepping && u->updated && !u->whole && a->slot == -1);
    u->whole = true;
}

static void norm(struct watch *w, const struct zr_action *a)
{
    EXPECT((w->stepping || !w->complete) && (!w->normed || w->complete));
    w->normed = true;
    for (int32_t i = 0; i < w->spec.n_units; i++) {
        struct watch_unit *u = &w->unit[i];
        if (!w->spec.units[i].trainable)
            continue;
        CHECK(u->left_out == leaves_out(w, i), "unit %d is %sleft out", i, u->left_out ? "" : "not ");
        u->left_out = false;
        if (leaves_out(w, i)) {
            CHECK(!*u->sum[0], "unit %d is left out, but its sum is \"%s\"", i, u->sum[0]);
            continue;
        }
        CHECK(holds_all(u->sum[0], u->n_contrib), "unit %d had %d contributions, its sum is \"%s\"", i,
              u->n_contrib, u->sum[0]);
        for (int32_t k = 1; k < w->spec.n_sums; k++)
            CHECK(!*u->sum[k], "unit %d has \"%s\" left in sum %d", i, u->sum[k], k);
        strcpy(u->last_sum, u->sum[0]);
    }
}

static void update(struct watch *w, const struct zr_action *a)
{
    struct watch_unit *u = &w->unit[a->unit];
    EXPECT(w->normed && w->stepping && !u->updated && w->spec.units[a->unit].trainable);
    EXPECT(!leaves_out(w, a->unit));
    u->updated = true;
    u->gathered = u->held = u->spread = false;
    u->whole = !w->spec.outer_gathers;
    if (w->spec.units[a->unit].sum_in_place && w->spec.model_holds && u->n_bwd)
        w->last_in_place = a->unit;
    /* Without gathers of updated parameters, every rank has all of them. */
    u->home_ready = !w->spec.gathers_updated;
    for (int32_t i = 0; i < w->spec.n_param_slots; i++)
        w->pslot[i].fresh &= w->pslot[i].unit != a->unit;
}

static void act(struct watch *w, const struct zr_action *a, enum zr_core_event_kind kind, int32_t unit)
{
    EXPECT(a->kind >= ZR_ACT_USE_PARAM && a->kind <= ZR_ACT_SNAPSHOT);
    bool of_all = a->kind == ZR_ACT_NORM || a->kind == ZR_ACT_SNAPSHOT || a->kind == ZR_ACT_DROP_SUMS;
    EXPECT(of_all ? a->unit == -1 : a->unit >= 0 && a->unit < w->spec.n_units);
    bool collective = w->collective;
    switch ((enum zr_action_kind)a->kind) {
    case ZR_ACT_USE_PARAM:
        EXPECT(kind == ZR_EV_BEGIN && a->unit == unit);
        use_param(w, a);
        break;
    case ZR_ACT_KEEP_PARAM:
        EXPECT(kind == ZR_EV_GATHER_ALL && readable(w, a) && a->gathered == w->unit[a->unit].gathered);
        break;
    case ZR_ACT_HIDE_PARAM:
        EXPECT(kind == ZR_EV_END && a->unit == unit);
        hide_param(w, a);
        break;
    case ZR_ACT_WAIT_PARAM:
        EXPECT(kind == ZR_EV_STEP && w->spec.model_holds && readable(w, a) &&
               a->gathered == w->unit[a->unit].gathered);
        break;
    case ZR_ACT_USE_GRAD:
        EXPECT(collective ? w->spec.model_holds : kind == ZR_EV_BEGIN && a->unit == unit);
        use_grad(w, a);
        break;
    case ZR_ACT_HIDE_GRAD:
        EXPECT(collective ? w->spec.model_holds : kind == ZR_EV_END && a->unit == unit);
        hide_grad(w, a);
        break;
    case ZR_ACT_RETURN_GRADS:
        return_grads(w, a);
        break;
    case ZR_ACT_GATHER:
        w->n_demand_gathers += kind == ZR_EV_BEGIN && a->unit == unit;
        EXPECT(kind != ZR_EV_MICRO && kind != ZR_EV_REWRITE && kind != ZR_EV_NORM);
        gather(w, a);
        break;
    case ZR_ACT_DROP_SUMS:
        EXPECT(kind == ZR_EV_DROP);
        drop_sums(w, a);
        break;
    case ZR_ACT_REDUCE:
        EXPECT(collective || (kind == ZR_EV_END && a->unit == unit));
        reduce(w, a);
        break;
    case ZR_ACT_REDUCE_OUTER:
        EXPECT(collective || (kind == ZR_EV_END && a->unit == unit));
        reduce_outer(w, a);
        break;
    case ZR_ACT_GATHER_OUTER:
        EXPECT(kind == ZR_EV_STEP);
        gather_outer(w, a);
        break;
    case ZR_ACT_FOLD:
        EXPECT((kind == ZR_EV_STEP || kind == ZR_EV_NORM) && a->n_folds > 0);
        EXPECT(a->contribution == w->unit[a->unit].n_added);
        fold(w, a);
        break;
    case ZR_ACT_LEAVE_OUT:
        EXPECT((kind == ZR_EV_STEP || kind == ZR_EV_NORM) && leaves_out(w, a->unit));
        EXPECT(!w->unit[a->unit].left_out);
        w->unit[a->unit].left_out = true;
        break;
    case ZR_ACT_NORM:
        norm(w, a);
        break;
    case ZR_ACT_UPDATE:
        update(w, a);
        break;
    case ZR_ACT_SNAPSHOT:
        /* It runs on the stream of the updates, so it sees every update of this step and none of the next. */
        EXPECT(kind == ZR_EV_SNAPSHOT && !w->stepping && w->n_open == 0);
        break;
    }
}

static bool same_action(const struct zr_action *a, const struct zr_action *b)
{
    return a->kind == b->kind && a->fill == b->fill && a->accumulate == b->accumulate && a->sum == b->sum &&
           a->n_folds == b->n_folds && a->bracket == b->bracket && a->in_flight == b->in_flight &&
           a->gathered == b->gathered && a->group_slot == b->group_slot && a->unit == b->unit &&
           a->slot == b->slot;
}

/* Returns the number of actions of this kind for the unit. */
static int32_t count(const struct watch *w, enum zr_action_kind kind, int32_t unit)
{
    int32_t n = 0;
    for (int32_t i = 0; i < w->n_out; i++)
        n += w->out[i].kind == kind && w->out[i].unit == unit;
    return n;
}

/* ---- calls ---- */

/* Applies what the model does before the call and with the call itself. */
static void before_actions(struct watch *w, enum zr_core_event_kind kind, int32_t unit, enum zero_phase phase)
{
    bool backward = zr_phase_has_grads(phase);
    struct watch_unit *u =
        &w->unit[kind == ZR_EV_BEGIN || kind == ZR_EV_END || kind == ZR_EV_REWRITE ? unit : 0];
    switch (kind) {
    case ZR_EV_BEGIN:
        u->open[phase] = u->used[backward] = true;
        u->has_begun_backward |= backward;
        w->n_open++;
        w->n_open_bwd += backward;
        break;
    case ZR_EV_END:
        u->open[phase] = false;
        w->inputs |= phase == ZERO_BACKWARD_INPUT;
        w->frozen_backward |= backward && !w->spec.units[unit].trainable;
        w->n_open--;
        w->n_open_bwd -= backward;
        if (backward && w->spec.units[unit].trainable) {
            u->n_bwd++;
            u->has_ended_backward = true;
            if (has_home(w, unit))
                contribute(w, unit);
            else
                u->n_contrib++;
        }
        break;
    case ZR_EV_MICRO:
        w->n_micro++;
        /* fall through */
    case ZR_EV_STEP:
    case ZR_EV_NORM:
    case ZR_EV_DROP:
        w->unbracketed |= kind == ZR_EV_MICRO && is_unbracketed(w) && w->spec.reduce_each;
        /* Where the model adds up gradients itself, its micro-batches are one contribution. */
        for (int32_t i = 0; !w->complete && is_unbracketed(w) && i < w->spec.n_units; i++)
            if (w->spec.units[i].trainable && (kind != ZR_EV_MICRO || w->spec.reduce_each))
                contribute(w, i);
        w->stepping = kind == ZR_EV_STEP;
        /* Dropped gradients must be zeroed like reduced ones. */
        for (int32_t i = 0; kind == ZR_EV_DROP && i < w->spec.n_units; i++)
            w->unit[i].grad_reduced |= strcmp(w->unit[i].grad, "z") != 0;
        break;
    case ZR_EV_REWRITE:
        for (int32_t i = 0; i < w->spec.n_param_slots; i++)
            w->pslot[i].fresh &= w->pslot[i].unit != unit;
        break;
    case ZR_EV_SNAPSHOT:
    case ZR_EV_GATHER_ALL:
    case ZR_EV_RELEASE_ALL:
    case ZR_EV_EVALUATED:
        break;
    }
}

static void after_step(struct watch *w, bool dropped)
{
    CHECK(w->normed || dropped, "a step without a norm");
    for (int32_t i = 0; i < w->spec.n_units; i++) {
        struct watch_unit *u = &w->unit[i];
        if (u->no_brackets && dropped)
            CHECK(!u->grad_reduced, "the gradient of unit %d is still that of the dropped step", i);
        CHECK(dropped || u->updated == (w->spec.units[i].trainable && !leaves_out(w, i)),
              "unit %d was %supdated", i, u->updated ? "" : "not ");
        CHECK(!w->spec.model_holds || !u->grad_reduced, "the gradient of unit %d is not zeroed", i);
    }
    for (int32_t i = 0; i < w->spec.n_units; i++) {
        struct watch_unit *u = &w->unit[i];
        if (u->no_brackets && !dropped) {
            CHECK(!u->updated || count(w, ZR_ACT_WAIT_PARAM, i) == 1, "unit %d is read without a wait", i);
            CHECK(u->home_ready && !u->grad_reduced, "unit %d cannot be used without brackets", i);
        }
        u->updated = u->used[0] = u->used[1] = false;
        u->n_bwd = u->n_contrib = 0;
        CHECK(!u->held && !u->spread, "the sum of unit %d was neither used nor released", i);
        CHECK(u->whole, "unit %d was not gathered between groups", i);
        *u->inner = 0;
        u->outer_done = false;
        u->n_outer = u->n_added = 0;
        for (int32_t k = 0; k < w->spec.n_sums; k++)
            *u->sum[k] = 0;
    }
    w->n_micro = 0;
    w->normed = w->stepping = w->complete = w->inputs = w->frozen_backward = w->unbracketed = false;
}

static void after_actions(struct watch *w, enum zr_core_event_kind kind, int32_t unit, enum zero_phase phase)
{
    bool backward = zr_phase_has_grads(phase), held = phase != ZERO_BACKWARD_WEIGHT;
    bool trainable = (kind == ZR_EV_BEGIN || kind == ZR_EV_END) && backward && w->spec.units[unit].trainable;
    switch (kind) {
    case ZR_EV_BEGIN:
        CHECK(w->all ? w->n_out == 0 : count(w, ZR_ACT_USE_PARAM, unit) == held, "begin of unit %d", unit);
        CHECK(count(w, ZR_ACT_USE_GRAD, unit) == trainable, "begin of unit %d", unit);
        break;
    case ZR_EV_END:
        if (w->all) {
            CHECK(w->n_out == 0, "end of unit %d", unit);
            break;
        }
        CHECK(count(w, ZR_ACT_HIDE_PARAM, unit) == (held && !holds_param(w, unit)), "end of unit %d", unit);
        CHECK(count(w, ZR_ACT_HIDE_GRAD, unit) == trainable, "end of unit %d", unit);
        CHECK(count(w, ZR_ACT_REDUCE, unit) == trainable || (trainable && !w->spec.reduce_each),
              "end of unit %d", unit);
        break;
    case ZR_EV_REWRITE:
        break;
    case ZR_EV_NORM:
        CHECK(count(w, ZR_ACT_NORM, -1) == !w->complete && (!w->complete || w->n_out == 0),
              "%d actions of a norm", w->n_out);
        w->complete = true;
        for (int32_t i = 0; i < w->spec.n_units; i++)
            CHECK(!w->unit[i].in_flight || w->spec.units[i].sum_in_place,
                  "the gradient of unit %d is still being reduced", i);
        break;
    case ZR_EV_STEP:
    case ZR_EV_DROP:
        after_step(w, kind == ZR_EV_DROP);
        /* fall through */
    case ZR_EV_MICRO: /* the model may zero its gradients now */
        for (int32_t i = 0; i < w->spec.n_units; i++)
            CHECK(!w->unit[i].in_flight || (kind == ZR_EV_MICRO && w->spec.units[i].sum_in_place),
                  "the gradient of unit %d is still being reduced", i);
        CHECK(w->last_reduced == -1, "the gradient of unit %d is still being reduced", w->last_reduced);
        CHECK(w->last_in_place == -1, "the gradient of unit %d is still being used", w->last_in_place);
        break;
    case ZR_EV_GATHER_ALL:
        for (int32_t i = 0; i < w->spec.n_units; i++)
            CHECK(count(w, ZR_ACT_KEEP_PARAM, i) == 1, "unit %d of all", i);
        w->all = true;
        break;
    case ZR_EV_RELEASE_ALL:
        for (int32_t i = 0; i < w->n_out; i++)
            CHECK(w->out[i].kind == ZR_ACT_GATHER, "a release does more than gather ahead");
        w->all = false;
        break;
    case ZR_EV_EVALUATED:
        for (int32_t i = 0; i < w->n_out; i++)
            CHECK(w->out[i].kind == ZR_ACT_GATHER, "the end of an evaluation does more than gather ahead");
        break;
    case ZR_EV_SNAPSHOT:
        CHECK(w->n_out == 1 && w->out[0].kind == ZR_ACT_SNAPSHOT, "%d actions of a snapshot", w->n_out);
        break;
    }
    for (int32_t u = 0; u < w->spec.n_units; u++) {
        int32_t slot;
        bool present = zr_core_present(w->core, u, &slot);
        if (needs_slot(w, u))
            CHECK(present == (slot >= 0) && (slot < 0 || (w->pslot[slot].unit == u && w->pslot[slot].fresh)),
                  "unit %d", u);
        else
            CHECK(present && slot == -1, "unit %d", u);
    }
    int32_t open = zr_core_open_unit(w->core);
    CHECK(w->n_open ? is_open(w, open) : open == -1, "open unit %d", open);
}

int watch_call(struct watch *w, enum zr_core_event_kind kind, int32_t unit, enum zero_phase phase)
{
    struct zr_core_event ev = {.kind = kind, .unit = unit, .phase = phase};
    int32_t max = zr_core_max_actions(&w->spec), n_copy = -1;
    int expected = expected_error(w, kind, unit, phase);
    w->n_calls++;
    if (expected)
        memcpy(w->before, w->core, w->bytes);
    w->n_out = -1;
    int err = zr_core_take(w->core, &ev, w->out, &w->n_out);
    CHECK(err == expected, "call %lld (kind %d, unit %d, phase %d) gave %d, not %d: %s",
          (long long)w->n_calls, (int)kind, unit, (int)phase, err, expected, err ? zr_error_text() : "");
    if (err) {
        CHECK(w->n_out == 0 && !memcmp(w->before, w->core, w->bytes), "a refused call changed something");
        CHECK(*zr_error_text(), "no message");
        w->n_refused++;
        return err;
    }
    CHECK(w->n_out >= 0 && w->n_out <= max, "%d actions", w->n_out);
    for (const unsigned char *c = (void *)(w->out + max); c < (unsigned char *)(w->out + max + 8); c++)
        CHECK(*c == 0xee, "actions beyond the promised %d", max);
    CHECK(zr_core_take(w->copy, &ev, w->copy_out, &n_copy) == 0 && n_copy == w->n_out, "the copy differs");
    for (int32_t i = 0; i < w->n_out; i++)
        CHECK(same_action(&w->out[i], &w->copy_out[i]), "the copy differs in action %d", i);
    w->collective = kind == ZR_EV_MICRO || kind == ZR_EV_STEP || kind == ZR_EV_NORM || kind == ZR_EV_DROP;
    before_actions(w, kind, unit, phase);
    for (int32_t i = 0; i < w->n_out; i++)
        act(w, &w->out[i], kind, unit);
    after_actions(w, kind, unit, phase);
    return 0;
}

/* ---- scripts ---- */

bool watch_parse(const char **script, enum zr_core_event_kind *kind, int32_t *unit, enum zero_phase *phase)
{
    static const char opens[] = "([{<", closes[] = ")]}>";
    const char *p = *script + strspn(*script, " ");
    if (!*p)
        return false;
    *unit = 0;
    *phase = 0;
    static const char calls[] = "SMNXGRE";
    static const enum zr_core_event_kind kinds[] = {ZR_EV_STEP,     ZR_EV_MICRO,      ZR_EV_NORM,
                                                    ZR_EV_DROP,     ZR_EV_GATHER_ALL, ZR_EV_RELEASE_ALL,
                                                    ZR_EV_EVALUATED};
    const char *call = strchr(calls, *p);
    if (call) {
        *kind = kinds[call - calls];
        p++;
    } else if (*p == 'W') {
        char *end;
        *kind = ZR_EV_REWRITE;
        *unit = (int32_t)strtol(p + 1, &end, 10);
        p = end;
    } else {
        char *end;
        *unit = (int32_t)strtol(p, &end, 10);
        const char *begins = strchr(opens, *end), *of = begins ? begins : strchr(closes, *end);
        assert_true(end > p && *end && of);
        *kind = begins ? ZR_EV_BEGIN : ZR_EV_END;
        *phase = (enum zero_phase)(ZERO_FORWARD + (of - (begins ? opens : closes)));
        p = end + 1;
    }
    *script = p;
    return true;
}

void watch_run(struct watch *w, const char *script)
{
    enum zr_core_event_kind kind;
    int32_t unit;
    enum zero_phase phase;
    bool reported = strchr(script, '!');
    while (watch_parse(&script, &kind, &unit, &phase)) {
        CHECK(watch_call(w, kind, unit, phase) == 0, "before \"%s\": %s", script, zr_error_text());
        int32_t n = 0;
        for (int32_t i = 0; i < w->n_out; i++)
            n += w->out[i].kind == ZR_ACT_RETURN_GRADS;
        CHECK(!reported || n == (*script == '!'), "%d returns of gradients before \"%s\"", n, script);
        script += *script == '!';
    }
}

/* ---- random steps ---- */

struct walk {
    struct random_source *r;
    struct zero_call *out;
    int32_t n, n_units;
    /* by unit: a forward bracket is open, and a backward one */
    bool open[64][2];
};

static void walk_call(struct walk *k, int32_t unit, bool backward, bool is_end)
{
    k->out[k->n++] =
        (struct zero_call){.unit = unit, .phase = backward ? ZERO_BACKWARD : ZERO_FORWARD, .is_end = is_end};
    k->open[unit][backward] = !is_end;
}

static void walk_pass(struct walk *k, bool backward, bool in_order)
{
    for (int32_t i = 0; i < k->n_units; i++) {
        int32_t u = backward ? k->n_units - 1 - i : i;
        if (!in_order)
            u = (int32_t)random_below(k->r, k->n_units);
        if (chance(k->r, 8))
            continue;
        if (k->open[u][backward])
            walk_call(k, u, backward, true);
        bool recompute = backward && !k->open[u][0] && chance(k->r, 15), inside = chance(k->r, 50);
        if (recompute)
            walk_call(k, u, false, false);
        if (recompute && !inside)
            walk_call(k, u, false, true);
        walk_call(k, u, backward, false);
        if (recompute && inside)
            walk_call(k, u, false, true);
        if (chance(k->r, 75))
            walk_call(k, u, backward, true);
        int32_t other = (int32_t)random_below(k->r, k->n_units);
        if (k->open[other][backward])
            walk_call(k, other, backward, true);
    }
    for (int32_t u = 0; u < k->n_units; u++) /* some forward brackets stay open through backward */
        if (k->open[u][backward] && (backward || chance(k->r, 90)))
            walk_call(k, u, backward, true);
}

/* Splits the backward of some units into one for inputs, and a later one for weights. */
static void take_apart(struct walk *k)
{
    bool apart[64];
    for (int32_t u = 0; u < k->n_units; u++)
        apart[u] = chance(k->r, 70);
    for (int32_t i = 0, n = k->n; i < n; i++) {
        struct zero_call *c = &k->out[i];
        if (c->phase != ZERO_BACKWARD || !apart[c->unit])
            continue;
        c->phase = ZERO_BACKWARD_INPUT;
        if (!c->is_end)
            continue;
        for (int end = 0; end < 2; end++)
            k->out[k->n++] =
                (struct zero_call){.unit = c->unit, .phase = ZERO_BACKWARD_WEIGHT, .is_end = (uint8_t)end};
    }
}

int32_t random_calls(struct random_source *r, int32_t n_units, struct zero_call *out)
{
    struct walk k = {.r = r, .out = out, .n_units = n_units};
    assert_true(n_units <= 64);
    bool in_order = chance(r, 80);
    walk_pass(&k, false, in_order);
    walk_pass(&k, true, in_order);
    for (int32_t u = 0; u < n_units; u++)
        if (k.open[u][0])
            walk_call(&k, u, false, true);
    if (chance(r, 25))
        take_apart(&k);
    return k.n;
}
