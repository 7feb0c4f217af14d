/* SPDX-License-Identifier: Apache-2.0 */
/* verify_case.c: draws a configuration from a seed, checks that it can be run, reads and writes it as text,
 * and makes a failing one smaller. The order of the draws decides what a seed means. */
#include "shard/verify/verify_world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct zr_options options_of(const struct zr_verify_case *c)
{
    return (struct zr_options){.stage = c->stage,
                               .hybrid = (enum zr_hybrid)c->hybrid,
                               .dp_shard = c->group,
                               .grad_in_place = c->grad_in_place};
}

bool zr_verify_model_holds(const struct zr_verify_case *c)
{
    const struct zr_options o = options_of(c);
    return zr_placement_asked(&o).model_holds;
}

int zr_verify_layout(const struct zr_verify_case *c, int32_t at, const struct zr_verify_speed *speed,
                     struct zr_layout **out)
{
    const struct zr_options o = options_of(c);
    struct zr_placement place;
    struct zr_tensor *tensors;
    int32_t n;
    int err = zr_placement_in(&o, zr_verify_dp(c), &place);
    if (!err)
        err = zr_script_tensors(c, at, speed, &tensors, &n);
    return err ? err
               : zr_layout_make(tensors, n, place.size[ZR_INNER], place.size[ZR_OUTER], place.model_holds,
                                false, out);
}

/* Whether the plan may have too few slots for the model's calls, so that zero_begin refuses. This happens if
 * the plan was made for another order than the model's. */
static bool may_lack_room(const struct zr_verify_case *c)
{
    return c->budget || (c->pattern != ZR_USE_PLAIN && c->pattern != ZR_USE_RECOMPUTE);
}

/* With several pipeline stages, excludes calls that pipeline stages refuse, and everything that makes one of
 * them stop while the others continue. */
static bool stages_possible(const struct zr_verify_case *c)
{
    bool calls =
        !c->skipped && !c->repeats && !c->late_evals && !c->unbracketed && c->pattern != ZR_USE_TWICE;
    bool room = !may_lack_room(c) || (c->declared && !c->changes);
    bool ties = !c->tied || (!c->stacked && (!c->grad_in_place || c->accum == 1));
    return !zr_in_stages(c) || (calls && room && ties);
}

static bool schedule_possible(const struct zr_verify_case *c)
{
    int pp = zr_case_pp(c), rounds = c->accum / pp;
    bool divides = rounds < 2 || c->accum % rounds == 0;
    return c->per_rank >= 0 && c->per_rank <= ZR_VERIFY_PER_RANK && c->schedule >= 0 &&
           c->schedule < ZR_RUN_SCHEDULES && (zr_in_stages(c) || !c->schedule) &&
           ((c->schedule != ZR_RUN_1F1B && c->schedule != ZR_RUN_ZERO_BUBBLE) || zr_case_per_rank(c) == 1) &&
           (c->schedule != ZR_RUN_INTERLEAVED || divides);
}

static bool mesh_possible(const struct zr_verify_case *c)
{
    int pp = c->pp > 1 ? c->pp : 1, tp = c->tp > 1 ? c->tp : 1;
    bool divides = c->pp >= 0 && c->tp >= 0 && pp <= 64 && tp <= ZR_AXIS_RANKS && c->world % (pp * tp) == 0;
    bool has_cp = c->cp > 1 && c->cp <= ZR_AXIS_RANKS;
    return divides && (has_cp ? zr_verify_dp(c) % c->cp == 0 : !c->moves && (c->cp == 0 || c->cp == 1)) &&
           schedule_possible(c) && (pp > 1 || !c->tied) && (tp > 1 || (!c->partial && !c->sums)) &&
           stages_possible(c);
}

static bool precision_possible(const struct zr_verify_case *c)
{
    bool fp32 = !c->masters && !c->moments && !c->sums_bf16;
    return c->masters >= 0 && c->masters <= ZERO_MASTERS_NONE && c->moments >= 0 &&
           c->moments <= ZERO_MOMENTS_Q8 && c->states >= 0 && c->states <= ZERO_STATES_FILE &&
           (c->states != ZERO_STATES_FILE || !c->snapshots) && (!c->user_update || fp32);
}

bool zr_verify_possible(const struct zr_verify_case *c)
{
    bool sizes = c->world >= 1 && c->world <= 64 && c->n_units >= 1 && c->n_units <= 1000 && c->accum >= 1 &&
                 c->accum <= 64 && c->n_steps >= 1 && c->n_steps <= 100;
    bool groups = c->hybrid == ZR_HYBRID_NONE ? c->group == 0 && !c->dealt
                                              : c->hybrid > 0 && c->hybrid <= ZR_HFSDP && c->stage == 3 &&
                                                    c->group >= 1 && zr_verify_dp(c) % c->group == 0;
    return sizes && mesh_possible(c) && groups && precision_possible(c) && c->granule >= 0 && c->stage >= 0 &&
           c->stage <= 3 && c->prefetch >= 0 && c->dead < c->world;
}

/* Draws a group size that divides the world. One rank and the whole world are rarer. */
static void draw_groups(uint64_t *s, struct zr_verify_case *c)
{
    int size[64], n = 0;
    for (int k = 1; k <= c->world; k++)
        if (c->world % k == 0)
            size[n++] = k;
    if (c->stage != 3 || n < 3 || !zr_verify_chance(s, 60))
        return;
    c->hybrid = zr_verify_chance(s, 50) ? ZR_HSDP : ZR_HFSDP;
    c->group = size[zr_verify_chance(s, 70) ? 1 + zr_verify_below(s, n - 2) : zr_verify_below(s, n)];
    c->dealt = zr_verify_chance(s, 30);
    if (c->fail_alloc) /* groups allocate more */
        c->fail_alloc = 1 + (int)zr_verify_below(s, (20 + 8 * c->n_units) * c->world);
}

/* zr_verify_case_random calls the following functions in order. */

static void draw_size(uint64_t *s, struct zr_verify_case *c)
{
    c->stage = zr_verify_chance(s, 45) ? 3 : (int)zr_verify_below(s, 4);
    /* Mostly a few ranks: two are enough for most errors. */
    c->world = zr_verify_chance(s, 70)   ? 2 + (int)zr_verify_below(s, 3)
               : zr_verify_chance(s, 80) ? 2 + (int)zr_verify_below(s, 9)
                                         : 2 + (int)zr_verify_below(s, 63);
    if (zr_verify_chance(s, 3))
        c->world = 1;
    c->n_units = 1 + (int)zr_verify_below(s, c->world > 16 ? 4 : 7);
    c->prefetch = (int)zr_verify_below(s, 4);
    c->accum = zr_verify_chance(s, 60) ? 1 : 1 + (int)zr_verify_below(s, 5);
    c->n_steps = 2 + (int)zr_verify_below(s, 2);
}

static void draw_uses(uint64_t *s, struct zr_verify_case *c)
{
    c->pattern =
        zr_verify_chance(s, 40) ? ZR_USE_PLAIN : (enum zr_verify_pattern)zr_verify_below(s, ZR_USE_PATTERNS);
    c->pace = (enum zr_verify_pace)zr_verify_below(s, ZR_PACES);
    c->budget = zr_verify_chance(s, 25) ? 20 + (int)zr_verify_below(s, 90) : 0;
    c->frozen = zr_verify_chance(s, 25) ? 10 + (int)zr_verify_below(s, 80) : 0;
    c->skipped = zr_verify_chance(s, 15) ? (zr_verify_chance(s, 50) ? 20 : 80) : 0;
    c->changes = zr_verify_chance(s, 25) ? 40 : 0;
    c->n_evals = zr_verify_chance(s, 15) ? 1 + (int)zr_verify_below(s, 2) : 0;
    c->late_evals = zr_verify_chance(s, 15);
    c->unbracketed =
        zr_verify_model_holds(c) && zr_verify_chance(s, 50) ? (zr_verify_chance(s, 50) ? 100 : 50) : 0;
}

static void draw_options(uint64_t *s, struct zr_verify_case *c)
{
    c->deterministic = zr_verify_chance(s, 60);
    c->bf16 = zr_verify_chance(s, 50);
    c->wire_bf16 = zr_verify_chance(s, 20);
    c->user_update = zr_verify_chance(s, 10);
    c->stacked = zr_verify_chance(s, 40);
    c->overwrite = zr_verify_chance(s, 20);
    c->resident = zr_verify_chance(s, 10);
    c->declared = zr_verify_chance(s, 50);
    c->reversed = zr_verify_chance(s, 10);
    c->sgd = zr_verify_chance(s, 15);
    c->caller = zr_verify_chance(s, 35);
    c->values = zr_verify_chance(s, 25);
    c->wait_result = zr_verify_chance(s, 40);
    c->event_done = (int)zr_verify_below(s, 3);
}

static void draw_faults(uint64_t *s, struct zr_verify_case *c)
{
    if (zr_verify_chance(s, 15))
        c->poison = (int)zr_verify_below(s, c->n_steps);
    if (c->world > 1 && zr_verify_chance(s, 10)) {
        c->dead = (int)zr_verify_below(s, c->world);
        c->dead_at = (int)zr_verify_below(s, zr_verify_chance(s, 40) ? 40 : 400);
    }
    if (zr_verify_chance(s, 5))
        c->fail_alloc = 1 + (int)zr_verify_below(s, (12 + 6 * c->n_units) * c->world);
}

/* Draws grad_in_place, either for stages where the model has its gradients at all times or for the others. */
static void draw_grad_in_place(uint64_t *s, struct zr_verify_case *c, bool model_holds, int percent)
{
    if (zr_verify_model_holds(c) != model_holds || c->accum == 1 || !zr_verify_chance(s, percent))
        return;
    c->grad_in_place = true;
    c->deterministic = false; /* the two options exclude each other */
}

/* Draws the calls other than brackets and steps. */
static void draw_calls(uint64_t *s, struct zr_verify_case *c)
{
    if (zr_verify_chance(s, 25))
        c->snapshots = zr_verify_chance(s, 50) ? 100 : 50;
    if (zr_verify_chance(s, 40))
        c->zeroes = (int)zr_verify_below(s, 16);
    draw_grad_in_place(s, c, true, 40);
    if (zr_verify_chance(s, 25))
        c->norms = zr_verify_chance(s, 50) ? 100 : 50;
    if (zr_verify_chance(s, 20))
        c->drops = 60;
    if (zr_verify_chance(s, 25))
        c->alls = 50;
}

/* Draws the size of one axis of the mesh; small sizes are more likely. */
static int draw_axis(uint64_t *s, int most)
{
    return zr_verify_chance(s, 70) ? 1 + (int)zr_verify_below(s, most < 4 ? most : 4)
                                   : 1 + (int)zr_verify_below(s, most < 8 ? most : 8);
}

static void draw_stages(uint64_t *s, struct zr_verify_case *c)
{
    c->schedule = zr_verify_chance(s, 30) ? ZR_RUN_ZERO_BUBBLE : (int)zr_verify_below(s, ZR_RUN_INTERLEAVED);
    c->tied = c->pp > 1 && zr_verify_chance(s, 40);
    if (zr_verify_chance(s, 70)) /* one micro-batch tests little */
        c->accum = 1 + (int)zr_verify_below(s, 8);
    c->skipped = c->repeats = c->unbracketed = 0;
    c->late_evals = false;
    if (c->pattern == ZR_USE_TWICE)
        c->pattern = ZR_USE_PLAIN;
    if (may_lack_room(c)) {
        c->declared = true;
        c->changes = 0;
    }
    if (c->tied) {
        c->stacked = false;
        c->grad_in_place &= c->accum == 1;
    }
}

/* For several pipeline stages per rank. */
static void draw_rounds(uint64_t *s, struct zr_verify_case *c)
{
    int pp = zr_case_pp(c);
    if (c->schedule == ZR_RUN_1F1B || c->schedule == ZR_RUN_ZERO_BUBBLE)
        c->schedule = ZR_RUN_INTERLEAVED;
    if (c->schedule == ZR_RUN_INTERLEAVED && c->accum > pp) /* whole rounds of pp micro-batches */
        c->accum = pp * (1 + (int)zr_verify_below(s, 3));
    if (c->tied)
        c->grad_in_place &= c->accum == 1;
}

/* Multiplies the world, which is so far the data-parallel size, by pp and tp. */
static void draw_mesh(uint64_t *s, struct zr_verify_case *c)
{
    int most = 64 / c->world;
    if (most < 2 || !zr_verify_chance(s, 45))
        return;
    c->pp = draw_axis(s, most);
    c->tp = draw_axis(s, most / c->pp);
    c->world *= c->pp * c->tp;
    if (c->pp == 1 ? zr_verify_chance(s, 15) : zr_verify_chance(s, 40))
        c->per_rank = 2 + (int)zr_verify_below(s, 2);
    if (zr_in_stages(c))
        draw_stages(s, c);
    if (c->per_rank > 1)
        draw_rounds(s, c);
    if (c->tp > 1) {
        c->partial = zr_verify_chance(s, 60) ? 40 : 0;
        c->sums = zr_verify_chance(s, 70) ? 40 : 0;
    }
    if (c->dead >= 0)
        c->dead = (int)zr_verify_below(s, c->world);
    if (c->fail_alloc)
        c->fail_alloc = 1 + (int)zr_verify_below(s, (25 + 8 * c->n_units) * c->world);
}

/* Draws a number of ranks along cp that divides the data-parallel ranks. */
static void draw_cp(uint64_t *s, struct zr_verify_case *c)
{
    int size[8], n = 0;
    for (int k = 2; k <= 8; k++)
        if (zr_verify_dp(c) % k == 0)
            size[n++] = k;
    if (!n || !zr_verify_chance(s, 40))
        return;
    c->cp = size[zr_verify_below(s, n)];
    c->moves = zr_verify_chance(s, 80) ? 20 + (int)zr_verify_below(s, 60) : 0;
}

/* Draws in how many bytes masters, states and gradient sums are kept. A program that updates the weights
 * needs fp32. */
static void draw_precision(uint64_t *s, struct zr_verify_case *c)
{
    if (c->user_update)
        return;
    if (zr_verify_chance(s, 40))
        c->moments = zr_verify_chance(s, 60) ? ZERO_MOMENTS_Q8 : ZERO_MOMENTS_BF16;
    if (c->bf16 && zr_verify_chance(s, 50))
        c->masters = zr_verify_chance(s, 60) ? ZERO_MASTERS_REMAINDER : ZERO_MASTERS_NONE;
    c->sums_bf16 = c->bf16 && zr_verify_chance(s, 40);
}

void zr_verify_case_random(uint64_t seed, struct zr_verify_case *out)
{
    uint64_t s = seed * UINT64_C(0xd1342543de82ef95) + 1;
    struct zr_verify_case c = {.seed = seed, .poison = -1, .dead = -1};
    draw_size(&s, &c);
    draw_uses(&s, &c);
    draw_options(&s, &c);
    draw_faults(&s, &c);
    draw_calls(&s, &c);
    c.mixed = !c.user_update && zr_verify_chance(&s, 30);
    draw_grad_in_place(&s, &c, false, 30);
    draw_groups(&s, &c);
    if (zr_verify_chance(&s, 25))
        c.granule = 1 + (int)zr_verify_below(&s, zr_verify_chance(&s, 50) ? 100 : 3000);
    if (c.hybrid && c.declared && c.pattern == ZR_USE_PLAIN && zr_verify_chance(&s, 60))
        c.repeats = 50;
    draw_mesh(&s, &c);
    draw_cp(&s, &c);
    c.arrays = (c.tp > 1 || c.cp > 1) && !c.caller && zr_verify_chance(&s, 50);
    c.states = zr_verify_chance(&s, 25) && !c.snapshots ? ZERO_STATES_FILE
               : !c.caller && zr_verify_chance(&s, 20)  ? ZERO_STATES_HOST
                                                        : ZERO_STATES_DEVICE;
    draw_precision(&s, &c);
    *out = c;
}

/* clang-format off */
#define FIELDS(X)                                                                                                      \
    X(stage, int) X(world, int) X(n_units, int) X(prefetch, int) X(accum, int) X(n_steps, int)                         \
    X(pattern, enum zr_verify_pattern) X(pace, enum zr_verify_pace) X(budget, int) X(frozen, int) X(skipped, int)      \
    X(changes, int) X(n_evals, int) X(late_evals, bool) X(unbracketed, int) X(deterministic, bool) X(bf16, bool)       \
    X(wire_bf16, bool) X(user_update, bool) X(stacked, bool) X(overwrite, bool) X(resident, bool) X(declared, bool)    \
    X(reversed, bool) X(sgd, bool) X(caller, bool) X(values, bool) X(wait_result, bool) X(event_done, int)             \
    X(poison, int) X(dead, int) X(dead_at, int) X(fail_alloc, int) X(snapshots, int)                      \
    X(zeroes, int) X(grad_in_place, bool) X(norms, int) X(drops, int) X(alls, int) X(mixed, bool)          \
    X(group, int) X(hybrid, int) X(dealt, bool) X(granule, int) X(repeats, int)                            \
    X(pp, int) X(tp, int) X(per_rank, int) X(schedule, int) X(tied, bool) X(partial, int) X(sums, int)     \
    X(cp, int) X(moves, int) X(arrays, bool) X(states, int)         \
    X(masters, int) X(moments, int) X(sums_bf16, bool)
/* clang-format on */

void zr_verify_describe(const struct zr_verify_case *c, char *text, size_t n)
{
    size_t at = (size_t)snprintf(text, n, "seed=%llu", (unsigned long long)c->seed);
#define X(field, type)                                                                                       \
    if (at < n)                                                                                              \
        at += (size_t)snprintf(text + at, n - at, " " #field "=%d", (int)c->field);
    FIELDS(X)
#undef X
}

int zr_verify_parse(const char *text, struct zr_verify_case *out)
{
    struct zr_verify_case c = {0};
    const char *p = text;
    char key[32];
    long long value;
    int used;
    while (sscanf(p, " %31[a-z0-9_]=%lld%n", key, &value, &used) == 2) {
        bool known = false;
        if (!strcmp(key, "seed")) {
            c.seed = (uint64_t)value;
            known = true;
        }
#define X(field, type)                                                                                       \
    if (!strcmp(key, #field)) {                                                                              \
        c.field = (type)value;                                                                               \
        known = true;                                                                                        \
    }
        FIELDS(X)
#undef X
        if (!known)
            return zr_fail(ZERO_ERR_ARG, "a configuration has no field %s", key);
        p += used;
    }
    while (*p == ' ')
        p++;
    if (*p)
        return zr_fail(ZERO_ERR_ARG, "\"%s\" is not FIELD=NUMBER", p);
    if (!zr_verify_possible(&c))
        return zr_fail(ZERO_ERR_ARG,
                       "stage is %d (0..3), world %d (1..64), n_units %d (1..1000), accum %d (1..64), "
                       "n_steps %d (1..100), hybrid %d (0; 1, 2 at stage 3), group %d (0; of a hybrid a "
                       "number that divides the ranks of a part of a stage), pp %d, tp %d (their product "
                       "divides the world), cp %d (divides the ranks of a part of a stage), per_rank %d "
                       "(0..%d), schedule %d (0..%d), states %d, masters %d, moments %d; what goes together "
                       "is said in shard/verify/verify.h",
                       c.stage, c.world, c.n_units, c.accum, c.n_steps, c.hybrid, c.group, c.pp, c.tp, c.cp,
                       c.per_rank, ZR_VERIFY_PER_RANK, c.schedule, ZR_RUN_SCHEDULES - 1, c.states, c.masters,
                       c.moments);
    *out = c;
    return 0;
}

static bool still_fails(const struct zr_verify_case *c, const struct zr_mutant *mutant,
                        struct zr_verify_result *out)
{
    struct zr_verify_result r;
    if (zr_verify_run(c, mutant, &r) || !r.n_reports)
        return false;
    *out = r;
    return true;
}

/* The simplest value of a field. */
static int least_of(const struct zr_verify_case *c, const char *field)
{
    if (!strcmp(field, "poison") || !strcmp(field, "dead"))
        return -1;
    if (!strcmp(field, "n_units") || !strcmp(field, "accum") || !strcmp(field, "n_steps"))
        return 1;
    if (!strcmp(field, "world"))
        return c->world > 1 ? 2 : 1;
    return !strcmp(field, "group") && c->hybrid ? 1 : 0;
}

/* The amount by which to reduce a field: the world by whole groups, large numbers by more than one. */
static int step_of(const struct zr_verify_case *c, const char *field, int now)
{
    if (!strcmp(field, "granule"))
        return now / 8 + 1;
    int dp = 1;
    while ((c->group && dp % c->group) || (c->cp > 1 && dp % c->cp))
        dp++;
    return !strcmp(field, "world") ? dp * zr_case_pp(c) * (c->tp > 1 ? c->tp : 1) : 1;
}

/* Resets fields that have no meaning without a hybrid, pipeline stages, or tensor or context parallelism. */
static void settle_groups(struct zr_verify_case *c)
{
    if (!c->hybrid) {
        c->group = 0;
        c->dealt = false;
    }
    if (!zr_in_stages(c))
        c->schedule = 0;
    if (c->pp < 2)
        c->tied = false;
    if (c->tp < 2)
        c->partial = c->sums = 0;
    if (c->cp < 2)
        c->moves = 0;
}

void zr_verify_shrink(struct zr_verify_case *c, const struct zr_mutant *mutant, struct zr_verify_result *out)
{
    /* Reduce each field as far as possible, and repeat until no field can be reduced. */
    for (bool smaller = true; smaller;) {
        smaller = false;
#define X(field, type)                                                                                       \
    {                                                                                                        \
        int low = least_of(c, #field), now = (int)c->field;                                                  \
        int step = step_of(c, #field, now);                                                                  \
        int tries[] = {low, now / 2 > low ? now / 2 : low, now - step > low ? now - step : low};             \
        for (int i = 0; i < 3 && strcmp(#field, "stage") && now > low; i++) {                                \
            struct zr_verify_case t = *c;                                                                    \
            t.field = (type)tries[i];                                                                        \
            settle_groups(&t);                                                                               \
            if (zr_verify_possible(&t) && still_fails(&t, mutant, out)) {                                    \
                *c = t;                                                                                      \
                smaller = true;                                                                              \
                break;                                                                                       \
            }                                                                                                \
        }                                                                                                    \
    }
        FIELDS(X)
#undef X
    }
}
