/* SPDX-License-Identifier: Apache-2.0 */
/* test_plan.c: tests plans of random models: bytes add up, places do not overlap, and the traffic is that
 * of a run. */
#include "comm/segment.h"
#include "shard/core_inside.h"
#include "shard/plan_slots.h"
#include "test/shard/core_watch.h"
#include "test/shard/failing_memory.h"

/* ---- plans to test ---- */

enum { MAX_UNITS = 12, MAX_CALLS = 8 * MAX_UNITS + 16 };

struct planned {
    struct zr_layout *layout;
    struct zr_plan *plan;
    struct zr_options opt;
    struct zero_call order[MAX_CALLS];
};

/* Bytes that a communicator keeps at the end of each arena. */
enum { GATHER_SCRATCH = 768, REDUCE_SCRATCH = 1280 };

static struct zr_options default_options(int stage)
{
    return (struct zr_options){.stage = stage,
                               .grad_accum_steps = 1,
                               .prefetch = 2,
                               .param_budget_bytes = -1,
                               .deterministic = true,
                               .gather_scratch_bytes = GATHER_SCRATCH,
                               .reduce_scratch_bytes = REDUCE_SCRATCH};
}

static void lay_out(struct planned *p, struct zr_tensor *t, int32_t n, int world)
{
    struct zr_placement place;
    p->plan = NULL;
    assert_int_equal(zr_placement_in(&p->opt, world, &place), 0);
    assert_int_equal(zr_layout_make(t, n, place.size[ZR_INNER], place.size[ZR_OUTER], place.model_holds,
                                    false, &p->layout),
                     0);
}

/* Plans again with other options for the same layout. */
static int plan_again(struct planned *p)
{
    zr_plan_free(p->plan);
    p->plan = NULL;
    return zr_plan_make(p->layout, &p->opt, &p->plan);
}

static void release(struct planned *p)
{
    zr_plan_free(p->plan);
    zr_layout_free(p->layout);
}

/* Plans layers of n_elems each, one per unit. */
static void plan_layers(struct planned *p, int32_t n_layers, int64_t n_elems, int world)
{
    struct zr_tensor *t = calloc((size_t)n_layers, sizeof *t);
    for (int32_t i = 0; i < n_layers; i++)
        t[i] = make_tensor("layer", n_elems, i);
    lay_out(p, t, n_layers, world);
    assert_int_equal(plan_again(p), 0);
}

static int64_t largest_unit(const struct zr_layout *l)
{
    int64_t n = 0;
    for (int32_t u = 0; u < l->n_units; u++)
        n = zr_max(n, l->units[u].asked_resident ? 0 : l->units[u].param_bytes);
    return n;
}

/* Returns the bytes that keeping every unit whole takes beyond the shards. */
static int64_t rest_of_units(const struct zr_layout *l)
{
    int64_t n = 0;
    for (int32_t u = 0; u < l->n_units; u++)
        n += l->units[u].asked_resident ? 0 : l->units[u].param_bytes - l->units[u].shard_bytes;
    return n;
}

static bool shows_backward(const struct planned *p)
{
    bool any = p->opt.n_order == 0;
    for (int32_t u = 0; u < p->layout->n_units; u++)
        any |= p->opt.n_order == 0 && !p->layout->units[u].trainable;
    for (int i = 0; i < p->opt.n_order; i++)
        any |= zr_phase_has_grads(p->order[i].phase) && p->layout->units[p->order[i].unit].trainable;
    return any;
}

/* Returns whether the unit has a backward bracket in each step. Without one it is not updated, and needs
 * no new gather. */
static bool has_backward(const struct planned *p, int32_t unit)
{
    bool any = p->opt.n_order == 0;
    for (int i = 0; i < p->opt.n_order; i++)
        any |= zr_phase_has_grads(p->order[i].phase) && p->order[i].unit == unit;
    return any;
}

static bool all_have_backward(const struct planned *p)
{
    bool all = true;
    for (int32_t u = 0; u < p->layout->n_units; u++)
        all &= has_backward(p, u);
    return all;
}

static bool leaves_out(const struct planned *p)
{
    bool used[MAX_UNITS] = {false}, all = true;
    for (int i = 0; i < p->opt.n_order; i++)
        used[p->order[i].unit] = true;
    for (int32_t u = 0; u < p->layout->n_units; u++)
        all &= used[u];
    return p->opt.n_order && !all;
}

static void random_planned(struct random_source *r, struct planned *p, int stage)
{
    int32_t n;
    p->opt = default_options(stage);
    struct zr_tensor *t = random_tensors(r, MAX_UNITS, &n);
    int world = chance(r, 20) ? 1 : 1 + (int)random_below(r, 16);
    if (stage == 3 && chance(r, 50)) {
        p->opt.hybrid = chance(r, 50) ? ZR_HSDP : ZR_HFSDP;
        p->opt.dp_shard = 1 + (int)random_below(r, 4);
        world = p->opt.dp_shard * (1 + (int)random_below(r, 4));
    }
    for (int32_t i = 0; n % 2 == 0 && i < n; i++) /* drawn from the model itself */
        t[i].sum_dtype = t[i].dtype;
    lay_out(p, t, n, world);
    p->opt.grad_accum_steps = chance(r, 50) ? 1 : 1 + (int)random_below(r, 9);
    p->opt.prefetch = chance(r, 10) ? 100 : (int)random_below(r, 5);
    p->opt.deterministic = chance(r, 50);
    p->opt.states = (enum zero_states)random_below(r, 3);
    p->opt.part_elems = chance(r, 50) ? 0 : 64 * (int64_t)(1 + random_below(r, 100));
    p->opt.grad_in_place = !p->opt.deterministic && chance(r, 50);
    p->opt.wire_dtype = chance(r, 50) ? 0 : chance(r, 50) ? ZERO_F32 : ZERO_BF16;
    if (chance(r, 50)) {
        p->opt.n_order = random_calls(r, p->layout->n_units, p->order);
        p->opt.order = p->order;
    }
}

/* ---- places ---- */

struct interval {
    int64_t from, to;
};

struct intervals {
    struct interval at[4096];
    int n;
};

static void put(struct intervals *x, int64_t from, int64_t bytes)
{
    CHECK(bytes >= 0 && from >= 0, "%lld bytes at %lld", (long long)bytes, (long long)from);
    if (bytes > 0 && x->n < (int)(sizeof x->at / sizeof *x->at))
        x->at[x->n++] = (struct interval){from, from + bytes};
}

static int by_start(const void *a, const void *b)
{
    int64_t x = ((const struct interval *)a)->from, y = ((const struct interval *)b)->from;
    return (x > y) - (x < y);
}

/* Checks that all intervals lie in an arena of that size, and none overlaps another. */
static void check_intervals(struct intervals *x, int64_t arena_bytes)
{
    int64_t end = 0;
    qsort(x->at, (size_t)x->n, sizeof *x->at, by_start);
    for (int i = 0; i < x->n; i++) {
        CHECK(x->at[i].from >= end, "%lld..%lld begins before %lld", (long long)x->at[i].from,
              (long long)x->at[i].to, (long long)end);
        end = x->at[i].to;
    }
    CHECK(end <= arena_bytes, "the last place ends at %lld of %lld", (long long)end, (long long)arena_bytes);
    x->n = 0;
}

static void check_gather_arena(const struct zr_plan *p)
{
    static struct intervals x;
    const struct zr_layout *l = p->layout;
    x.n = 0;
    CHECK(p->gather_bytes % 4096 == GATHER_SCRATCH && p->reduce_bytes % 4096 == REDUCE_SCRATCH,
          "arenas are whole pages, and behind them the communicators' part");
    for (int32_t i = 0; i < l->n_flats; i++) {
        const struct zr_flat *f = &l->flats[i];
        if (p->resident[f->unit]) {
            put(&x, zr_plan_param_full(p, f, -1), f->fine.total);
            for (int r = 0; r < l->world; r++)
                CHECK(zr_plan_param_own(p, f, zr_where_of(&p->placement, r)) ==
                          zr_plan_param_full(p, f, -1) + zr_cut_at(&f->inner, r % l->inner),
                      "rank %d", r);
        } else {
            for (int r = 0; r < l->world; r++) /* every rank computes one and the same place */
                CHECK(zr_plan_param_own(p, f, zr_where_of(&p->placement, r)) ==
                          zr_plan_param_own(p, f, zr_where_of(&p->placement, 0)),
                      "rank %d", r);
            put(&x, zr_plan_param_own(p, f, zr_where_of(&p->placement, 0)),
                f->inner_elems * zr_dtype_bytes(f->dtype));
        }
        CHECK(f->in_place || zr_plan_param_own(p, f, zr_where_of(&p->placement, 0)) % ZR_PIECE_ALIGN == 0,
              "flat %d", i);
    }
    for (int32_t s = 0; s < p->n_param_slots; s++) {
        put(&x, p->param_slots[s].at, p->param_slots[s].bytes);
        CHECK(p->param_slots[s].at % ZR_PIECE_ALIGN == 0, "slot %d", s);
    }
    check_intervals(&x, p->gather_bytes - GATHER_SCRATCH);
}

/* Returns how many ranks' fine slices of optimizer state one rank keeps. */
static int64_t copies_of(const struct zr_options *o, const struct zr_layout *l)
{
    if (o->hybrid == ZR_HSDP)
        return l->world / o->dp_shard;
    return o->stage == 0 ? l->world : 1;
}

static bool sums_in_group(const struct zr_plan *p)
{
    return p->layout->outer > 1 && !p->outer_each;
}

/* Bytes of the fp32 sums over a group: of one unit, and the most of any unit. */
static int64_t most_inner_sums(const struct zr_layout *l)
{
    int64_t most = 0;
    for (int32_t u = 0; u < l->n_units; u++) {
        int64_t n = 0;
        for (int32_t i = 0; i < l->units[u].n_flats; i++) {
            const struct zr_flat *f = &l->flats[l->units[u].first_flat + i];
            n += f->trainable ? f->inner_elems * 4 : 0;
        }
        most = zr_max(most, n);
    }
    return most;
}

/* Bytes of the gathered sums of one unit: the most of any unit whose sums are not in its gradients. */
static int64_t most_gathered(const struct zr_plan *p, bool of_group)
{
    const struct zr_layout *l = p->layout;
    int64_t most = 0, n = 0;
    for (int32_t i = 0; i < l->n_flats; i++) {
        const struct zr_flat *f = &l->flats[i];
        n = i == l->units[f->unit].first_flat ? 0 : n;
        if (f->trainable && !p->sum_in_place[f->unit])
            n += (of_group ? f->inner_elems : f->elems) * zr_sum_size(f);
        most = zr_max(most, n);
    }
    return most;
}

/* Whether a reduction of the flat's gradient has to be rounded to get to its sum. */
static bool is_rounded(const struct zr_plan *p, const struct zr_flat *f)
{
    bool is_the_sum = p->world == 1 && p->sum_in_place[f->unit];
    return f->trainable && f->sum_dtype == ZERO_BF16 && !is_the_sum;
}

/* Bytes of the fp32 sums on their way to bf16 sums: the most of any unit. */
static int64_t most_reduced(const struct zr_plan *p)
{
    const struct zr_layout *l = p->layout;
    int64_t most = 0, n = 0;
    for (int32_t i = 0; i < l->n_flats; i++) {
        const struct zr_flat *f = &l->flats[i];
        n = i == l->units[f->unit].first_flat ? 0 : n;
        if (is_rounded(p, f))
            n += f->fine_elems * 4;
        most = zr_max(most, n);
    }
    return most;
}

/* Elements of a rank's inner slice before its fine slice. */
static int64_t before_in_group(const struct zr_plan *p, const struct zr_flat *f, int32_t r)
{
    struct zr_where at = zr_where_of(&p->placement, r);
    return zr_flat_span(f, at, ZR_LEVEL_FINE).first - zr_flat_span(f, at, ZR_LEVEL_INNER).first;
}

static void check_reduce_arena(const struct zr_plan *p)
{
    static struct intervals x;
    const struct zr_layout *l = p->layout;
    x.n = 0;
    for (int32_t i = 0; i < l->n_flats; i++) {
        const struct zr_flat *f = &l->flats[i];
        if (!f->trainable)
            continue;
        if (zr_plan_grad_home(p, f->unit))
            put(&x, zr_plan_grad_full(p, f, -1), f->fine.total);
        for (int r = 0, end = 0; p->sum_in_place[f->unit] && r < l->world; r++) {
            int64_t first = zr_flat_span(f, zr_where_of(&p->placement, r), ZR_LEVEL_FINE).first,
                    size = zr_dtype_bytes(f->dtype);
            int64_t from = zr_plan_sum(p, f, zr_where_of(&p->placement, r), 0) - zr_plan_grad_full(p, f, -1);
            CHECK(size == zr_sum_size(f) && from == first * size && from >= end,
                  "flat %d, rank %d: its sum is at %lld of its gradient", i, r, (long long)from);
        }
        for (int k = 0; !p->sum_in_place[f->unit] && k < p->n_sums; k++) {
            put(&x, zr_plan_sum(p, f, zr_where_of(&p->placement, 0), k),
                (sums_in_group(p) ? f->inner_elems : f->fine_elems) * zr_sum_size(f));
            CHECK(zr_plan_sum(p, f, zr_where_of(&p->placement, 0), k) % 128 == 0, "flat %d", i);
            for (int r = 0; r < l->world; r++)
                CHECK(zr_plan_sum(p, f, zr_where_of(&p->placement, r), k) ==
                          zr_plan_sum(p, f, zr_where_of(&p->placement, 0), k) +
                              (sums_in_group(p) ? before_in_group(p, f, r) * zr_sum_size(f) : 0),
                      "flat %d", i);
        }
    }
    for (int32_t s = 0; s < p->n_grad_slots; s++) {
        put(&x, p->grad_slots[s].at, p->grad_slots[s].bytes);
        CHECK(p->grad_slots[s].at % ZR_PIECE_ALIGN == 0, "slot %d", s);
    }
    CHECK(p->exchange_at % 64 == 0 && p->control_at % 64 == 0 && p->values_at % 64 == 0, "alignment");
    put(&x, p->norm_at, sizeof(struct zr_own_squares));
    put(&x, p->control_at, ZR_CONTROL_BYTES);
    put(&x, p->group_slots_at, p->n_group_slots * p->group_slot_bytes);
    put(&x, p->reduce_slot_at, p->reduce_slot_bytes);
    CHECK(p->reduce_slot_bytes == most_reduced(p), "%lld", (long long)p->reduce_slot_bytes);
    CHECK(p->n_group_slots == (p->outer_each ? 2 : 0), "%d", p->n_group_slots);
    CHECK(p->group_slot_bytes == (p->outer_each ? most_inner_sums(l) : 0), "%lld",
          (long long)p->group_slot_bytes);
    /* What all ranks exchange lies here or, with groups, in a separate arena. */
    if (p->control_bytes) {
        struct intervals control = {.n = 0};
        CHECK(l->outer > 1, "%lld bytes apart", (long long)p->control_bytes);
        put(&control, p->exchange_at, (int64_t)l->world * ZR_EXCHANGE_BYTES);
        put(&control, p->agreement_at, sizeof(struct zr_agreement));
        put(&control, p->values_at, p->values_bytes);
        check_intervals(&control, p->control_bytes);
    } else {
        put(&x, p->exchange_at, (int64_t)l->world * ZR_EXCHANGE_BYTES);
        put(&x, p->agreement_at, sizeof(struct zr_agreement));
        put(&x, p->values_at, p->values_bytes);
    }
    CHECK(p->values_bytes >= 4 && p->values_bytes <= ZR_VALUE_BYTES, "%lld", (long long)p->values_bytes);
    put(&x, p->full_grad_at, p->hop[ZR_INNER].sums_whole ? most_gathered(p, false) : p->full_grad_bytes);
    check_intervals(&x, p->reduce_bytes - REDUCE_SCRATCH);
    /* Units take turns in the reduce slot, too. */
    for (int32_t u = 0; u < l->n_units; u++) {
        for (int32_t i = 0; i < l->units[u].n_flats; i++) {
            const struct zr_flat *f = &l->flats[l->units[u].first_flat + i];
            const struct zr_where first = zr_where_of(&p->placement, 0);
            int64_t at = f->trainable ? zr_plan_reduced(p, f, first, 0) : 0;
            if (is_rounded(p, f))
                put(&x, at - p->reduce_slot_at, f->fine_elems * 4);
            else
                CHECK(!f->trainable || at == zr_plan_sum(p, f, first, 0), "flat %d of unit %d", i, u);
        }
        check_intervals(&x, p->reduce_slot_bytes);
    }
    /* Units take turns in a group slot. The flats of a unit lie side by side in it. */
    for (int32_t u = 0; u < l->n_units && p->outer_each; u++) {
        for (int32_t i = 0; i < l->units[u].n_flats; i++) {
            const struct zr_flat *f = &l->flats[l->units[u].first_flat + i];
            if (f->trainable)
                put(&x, zr_plan_inner_sum(p, f, zr_where_of(&p->placement, 0), 0) - p->group_slots_at,
                    f->inner_elems * 4);
        }
        check_intervals(&x, p->group_slot_bytes);
    }
}

/* Flats lie side by side inside their slot. */
static void check_slots(const struct zr_plan *p)
{
    static struct intervals x;
    const struct zr_layout *l = p->layout;
    x.n = 0;
    for (int32_t u = 0; u < l->n_units; u++) {
        bool any_param = p->resident[u], any_grad = zr_plan_grad_home(p, u) || !l->units[u].trainable;
        for (int32_t s = 0; s < p->n_param_slots && !p->resident[u]; s++) {
            if (p->param_slots[s].bytes < l->units[u].param_bytes)
                continue;
            any_param = true;
            for (int32_t i = 0; i < l->units[u].n_flats; i++) {
                const struct zr_flat *f = &l->flats[l->units[u].first_flat + i];
                put(&x, zr_plan_param_full(p, f, s) - p->param_slots[s].at, f->fine.total);
            }
            check_intervals(&x, p->param_slots[s].bytes);
        }
        for (int32_t s = 0; s < p->n_grad_slots; s++) {
            if (p->grad_slots[s].bytes < l->units[u].grad_bytes)
                continue;
            any_grad = true;
            for (int32_t i = 0; i < l->units[u].n_flats; i++) {
                const struct zr_flat *f = &l->flats[l->units[u].first_flat + i];
                if (f->trainable)
                    put(&x, zr_plan_grad_full(p, f, s) - p->grad_slots[s].at, f->fine.total);
            }
            check_intervals(&x, p->grad_slots[s].bytes);
        }
        CHECK(any_param && any_grad, "unit %d fits no slot", u);
    }
}

/* ---- bytes ---- */

/* Elements for which a rank keeps states, if it keeps those of so many ranks' slices. */
static int64_t kept_elems(const struct zr_layout *l, const struct zr_flat *f, int64_t copies)
{
    return copies == 1 ? f->fine_elems : copies == l->world ? f->elems : f->inner_elems;
}

/* Bytes of a block of 32 elements: of masters beside the weights, and of one state. */
static int64_t master_bytes(const struct zr_flat *f)
{
    static const int64_t bytes[] = {
        [ZERO_MASTERS_F32] = 128, [ZERO_MASTERS_REMAINDER] = 64, [ZERO_MASTERS_NONE] = 0};
    return f->trainable && f->dtype != ZERO_F32 ? bytes[f->masters] : 0;
}

static int64_t state_bytes(const struct zr_flat *f)
{
    static const int64_t bytes[] = {
        [ZERO_MOMENTS_F32] = 128, [ZERO_MOMENTS_BF16] = 64, [ZERO_MOMENTS_Q8] = 32 + 2};
    return bytes[f->moments];
}

/* Each flat has a place in the arrays of its optimizer's states, end to end, and in no other. */
static void check_states(const struct zr_plan *p, int64_t copies)
{
    const struct zr_layout *l = p->layout;
    CHECK(p->n_states <= ZR_MAX_STATES, "%d states", p->n_states);
    for (int s = 0; s < ZR_MAX_STATES; s++) {
        int64_t end = 0;
        for (int32_t i = 0; i < l->n_flats; i++) {
            const struct zr_flat *f = &l->flats[i];
            bool has = f->trainable && s < f->n_states;
            CHECK(s >= p->n_states ? !has : p->state_at[s * l->n_flats + i] == (has ? end : -1),
                  "flat %d, state %d", i, s);
            CHECK(!has || f->moments != ZERO_MOMENTS_Q8 ||
                      zr_plan_scales_at(p, f, s) == end + kept_elems(l, f, copies),
                  "scales of flat %d", i);
            end += has ? zr_round_up(kept_elems(l, f, copies) / 32 * state_bytes(f), ZR_PIECE_ALIGN) : 0;
        }
        int64_t in_memory = p->states == ZERO_STATES_FILE ? 0 : end;
        CHECK(in_memory == p->state_bytes[s] && (end > 0) == (s < p->n_states), "%lld bytes of state %d",
              (long long)end, s);
    }
}

/* Adds the region of n elements. bytes: of a block of 32 elements. */
static void put_region(struct intervals *x, int64_t at, int64_t n, int64_t bytes)
{
    CHECK(at >= 0 && at % ZR_PIECE_ALIGN == 0, "%lld", (long long)at);
    put(x, at, (n + 31) / 32 * bytes);
}

/* The parts of a flat follow each other in the file, have all elements, and a place for each value. */
static int64_t check_parts_of(const struct zr_plan *p, const struct zr_flat *f, struct zr_span kept,
                              int64_t end)
{
    struct zr_state_part part;
    int64_t elem = kept.first;
    for (int64_t k = 0; zr_plan_part(p, f, kept, k, &part); k++) {
        struct intervals x = {0};
        CHECK(part.flat == f && part.first == elem && part.at == end, "%lld", (long long)part.at);
        CHECK(part.bytes % 4096 == 0 && part.bytes <= p->part_bytes, "%lld", (long long)part.bytes);
        if (master_bytes(f))
            put_region(&x, part.master_at, part.n, master_bytes(f));
        for (int s = 0; s < f->n_states; s++)
            put_region(&x, part.state_at[s], part.n, state_bytes(f));
        check_intervals(&x, part.bytes);
        elem += part.n;
        end += part.bytes;
    }
    bool has = f->trainable && (master_bytes(f) || f->n_states);
    CHECK(elem == kept.first + (has ? kept.n : 0), "%lld elements", (long long)(elem - kept.first));
    return end;
}

static void check_parts(const struct zr_plan *p, int64_t copies)
{
    int64_t end = 0;
    for (int32_t i = 0; p->states == ZERO_STATES_FILE && i < p->layout->n_flats; i++) {
        const struct zr_flat *f = &p->layout->flats[i];
        end = check_parts_of(p, f, (struct zr_span){320, kept_elems(p->layout, f, copies)}, end);
    }
    CHECK(end == p->file_bytes && p->bytes[ZR_MEM_STATE_BUFFERS] == 2 * p->part_bytes, "%lld",
          (long long)end);
}

static void check_bytes(const struct zr_plan *p, const struct zr_options *o)
{
    const struct zr_layout *l = p->layout;
    int stage = o->stage;
    int64_t copies = copies_of(o, l), total = 0, master = 0, slots = 0;
    for (int i = 0; i < ZR_MEM_COUNT; i++) {
        CHECK(p->bytes[i] >= 0, "%s: %lld", zr_mem_name((enum zr_mem)i), (long long)p->bytes[i]);
        total += p->bytes[i];
    }
    CHECK(total == p->total_bytes, "%lld, not %lld", (long long)total, (long long)p->total_bytes);
    int64_t states = 0;
    for (int i = 0; i < ZR_MAX_STATES; i++)
        states += p->state_bytes[i];
    int64_t host = p->host_bytes - (o->states == ZERO_STATES_HOST ? p->master_bytes + states : 0);
    CHECK(host == p->snapshot_bytes + p->words_bytes + p->bytes[ZR_MEM_STATE_BUFFERS], "%lld",
          (long long)p->host_bytes);
    CHECK(total == p->gather_bytes + p->reduce_bytes + p->control_bytes + host + p->master_bytes + states,
          "%lld bytes are not what is allocated", (long long)total);
    CHECK(p->bytes[ZR_MEM_MOMENTS] == states, "%lld of states", (long long)states);
    for (int32_t i = 0; i < l->n_flats; i++) {
        const struct zr_flat *f = &l->flats[i];
        CHECK(p->master_at[i] == (master_bytes(f) ? master : -1), "flat %d", i);
        master += zr_round_up(kept_elems(l, f, copies) / 32 * master_bytes(f), ZR_PIECE_ALIGN);
    }
    CHECK((p->states == ZERO_STATES_FILE ? 0 : master) == p->master_bytes, "%lld", (long long)master);
    check_states(p, copies);
    check_parts(p, copies);
    int64_t sums = 0, homes = 0;
    for (int32_t i = 0; i < l->n_flats; i++)
        if (l->flats[i].trainable && !p->sum_in_place[l->flats[i].unit])
            sums += (sums_in_group(p) ? l->flats[i].inner_elems : l->flats[i].fine_elems) *
                    zr_sum_size(&l->flats[i]);
    CHECK(p->bytes[ZR_MEM_GRAD_SHARDS] == sums, "%lld", (long long)p->bytes[ZR_MEM_GRAD_SHARDS]);
    CHECK(p->bytes[ZR_MEM_GRAD_SUMS] ==
              (p->n_sums - 1) * sums + zr_round_up(p->reduce_slot_bytes, ZR_PIECE_ALIGN) +
                  zr_round_up(p->n_group_slots * p->group_slot_bytes, ZR_PIECE_ALIGN),
          "%lld", (long long)p->bytes[ZR_MEM_GRAD_SUMS]);
    for (int32_t u = 0; u < l->n_units; u++)
        homes += zr_plan_grad_home(p, u) ? l->units[u].grad_bytes : 0;
    int64_t gathered = copies == l->world && l->world > 1      ? most_gathered(p, false)
                       : o->hybrid == ZR_HSDP && p->outer_each ? most_gathered(p, true)
                                                               : 0;
    CHECK(p->bytes[ZR_MEM_GRAD_GATHERED] == gathered, "%lld", (long long)p->bytes[ZR_MEM_GRAD_GATHERED]);
    CHECK(p->bytes[ZR_MEM_SNAPSHOT] == p->snapshot_bytes, "%lld", (long long)p->bytes[ZR_MEM_SNAPSHOT]);
    int64_t small = (int64_t)l->world * 2 * ZR_EXCHANGE_BYTES + ZR_CONTROL_BYTES + ZR_OUTCOME_BYTES +
                    (int64_t)sizeof(struct zr_agreement) + (int64_t)sizeof(struct zr_own_squares);
    CHECK(p->bytes[ZR_MEM_EXCHANGE] <= small + 2 * p->values_bytes + 4 * 4096, "%lld",
          (long long)p->bytes[ZR_MEM_EXCHANGE]);
    for (int32_t s = 0; s < p->n_param_slots; s++)
        slots += p->param_slots[s].bytes;
    CHECK(p->bytes[ZR_MEM_PARAM_SLOTS] == slots, "%lld",
          (long long)slots); /* units are multiples of the alignment */
    slots = 0;
    for (int32_t s = 0; s < p->n_grad_slots; s++)
        slots += p->grad_slots[s].bytes;
    CHECK(p->placement.model_holds || p->bytes[ZR_MEM_GRAD_SLOTS] == slots + homes, "%lld", (long long)slots);
    CHECK(p->n_param_slots == 0 || (stage == 3 && l->world > 1), "slots where nothing is sharded");
    bool all_home = true;
    for (int32_t u = 0; u < l->n_units; u++) {
        all_home &= !l->units[u].trainable || zr_plan_grad_home(p, u);
        CHECK(zr_plan_grad_home(p, u) || !l->units[u].asked_resident || !l->units[u].trainable, "unit %d", u);
    }
    CHECK((p->n_grad_slots == 0) == all_home, "%d gradient slots", p->n_grad_slots);
}

/* Returns how much larger one slice may be than the others, because of what granules keep together. */
static int64_t most_unequal(const struct zr_layout *l, const struct zr_flat *f)
{
    int64_t most = 0;
    for (int32_t k = 0; f->fine.at && k < f->n_pieces; k++) {
        const struct zr_piece *p = &l->pieces[f->first_piece + k];
        most = zr_max(most, zr_min(32 * zr_max(l->tensors[p->tensor].granule, 1), p->n));
    }
    return most;
}

/* Each rank has its share and little more: padding is at most one shard unit per flat, plus what granules
 * keep together. */
static void check_shares(const struct zr_plan *p, const struct zr_options *o)
{
    const struct zr_layout *l = p->layout;
    int64_t trainable = 0, n_trainable = 0, kept_together = 0, most_pad = ZR_SHARD_ALIGN / 2;
    for (int32_t i = 0; i < l->n_flats; i++) {
        const struct zr_flat *f = &l->flats[i];
        if (!f->trainable)
            continue;
        n_trainable++;
        kept_together += most_unequal(l, f);
        for (int32_t k = 0; k < f->n_pieces; k++)
            trainable +=
                zr_round_up(l->pieces[f->first_piece + k].n, ZR_PIECE_ALIGN / zr_dtype_bytes(f->dtype));
    }
    int64_t copies = copies_of(o, l);
    int64_t elems = l->state_elems * copies;
    CHECK(elems * l->world >= trainable * copies - n_trainable * ZR_PIECE_ALIGN * copies, "%lld",
          (long long)elems);
    CHECK(elems <= (trainable / l->world + n_trainable * (most_pad + 1) + kept_together) * copies,
          "%lld of %lld", (long long)elems, (long long)trainable);
}

/* ---- traffic ---- */

/* Runs the plan's own order under the watch. It must succeed, and a steady step must have the planned
 * traffic. */
static void check_run(const struct planned *planned)
{
    enum { STEPS = 12 };
    const struct zr_plan *p = planned->plan;
    struct watch w;
    bool all_updated = true;
    int64_t gathers[STEPS + 1] = {0}, n_equal = 0;
    watch_open(&w, &p->spec);
    for (int32_t u = 0; u < p->spec.n_units; u++)
        all_updated &= p->spec.units[u].trainable && has_backward(planned, u);
    for (int step = 0; step < STEPS; step++) {
        int64_t gathers_before = w.n_gathers, reduces_before = w.n_reduces;
        for (int a = 0; a < p->spec.grad_accum_steps; a++) {
            for (int32_t i = 0; i < p->spec.n_order; i++) {
                const struct zero_call *c = &p->spec.order[i];
                int err = watch_call(&w, c->is_end ? ZR_EV_END : ZR_EV_BEGIN, c->unit, c->phase);
                CHECK(err == 0, "step %d: %s", step, zr_error_text());
            }
        }
        int64_t gathers_then = w.n_gathers;
        CHECK(watch_call(&w, ZR_EV_STEP, 0, 0) == 0, "step %d: %s", step, zr_error_text());
        gathers[step] += gathers_then - gathers_before;
        gathers[step + 1] = w.n_gathers - gathers_then; /* issued by this step for the next */
        CHECK(w.n_reduces - reduces_before == p->traffic.n_reduce, "step %d has %lld reduces", step,
              (long long)(w.n_reduces - reduces_before));
        /* Copies of units that are not updated outlive a step, so steps may alternate between two counts. */
        n_equal += step >= STEPS - 4 && gathers[step] == p->traffic.n_gather;
        CHECK(!all_updated || step == 0 || gathers[step] == p->traffic.n_gather,
              "step %d has %lld gathers, the plan says %lld", step, (long long)gathers[step],
              (long long)p->traffic.n_gather);
    }
    CHECK(n_equal > 0, "no step has the %lld gathers of the plan", (long long)p->traffic.n_gather);
    CHECK(zr_core_counts(w.core).n_strays == 0 && zr_core_counts(w.core).n_replans == 0,
          "the plan's own order is not followed");
    watch_close(&w);
}

static void check_plan(const struct planned *p)
{
    const struct zr_plan *q = p->plan;
    CHECK(q->world == p->layout->world, "world %d", q->world);
    CHECK(q->n_sums == (p->opt.deterministic ? sums_for(p->opt.grad_accum_steps) : 1), "%d sums", q->n_sums);
    check_gather_arena(q);
    check_reduce_arena(q);
    check_slots(q);
    check_bytes(q, &p->opt);
    check_shares(q, &p->opt);
    if (shows_backward(p))
        check_run(p);
}

static int64_t slot_bytes(const struct zr_plan *p)
{
    int64_t n = 0;
    for (int32_t s = 0; s < p->n_param_slots; s++)
        n += p->param_slots[s].bytes;
    return n;
}

static void any_plan(void **state)
{
    FOR_CASES(r, 1500)
    {
        struct planned p;
        random_planned(&r, &p, (int)random_below(&r, 4));
        int err = plan_again(&p);
        CHECK(err == 0, "%s", zr_error_text());
        check_plan(&p);
        /* Without a budget, slots never cost more than keeping all units resident. */
        CHECK(slot_bytes(p.plan) <= rest_of_units(p.layout) || p.opt.stage < 3, "%lld bytes of slots",
              (long long)slot_bytes(p.plan));
        release(&p);
    }
}

/* Returns the most bytes that the order has open at once, and the most units. */
static int64_t open_at_once(const struct planned *p, int64_t *n_units)
{
    const struct zr_core_spec *s = &p->plan->spec;
    int64_t most = 0;
    *n_units = 0;
    int open[MAX_UNITS] = {0};
    for (int32_t i = 0; i < s->n_order; i++) {
        int64_t bytes = 0, n = 0;
        if (zr_phase_has_params(s->order[i].phase))
            open[s->order[i].unit] += s->order[i].is_end ? -1 : 1;
        for (int32_t u = 0; u < s->n_units; u++) {
            if (!open[u] || p->layout->units[u].asked_resident)
                continue;
            bytes += p->layout->units[u].param_bytes;
            n++;
        }
        most = zr_max(most, bytes);
        *n_units = zr_max(*n_units, n);
    }
    return most;
}

/* Every budget is met or refused with a reason, and a larger one never costs traffic. */
static void any_budget(void **state)
{
    FOR_CASES(r, 400)
    {
        struct planned p;
        random_planned(&r, &p, 3);
        CHECK(plan_again(&p) == 0, "%s", zr_error_text());
        int64_t largest = largest_unit(p.layout), rest = rest_of_units(p.layout), n_open, wire = INT64_MAX;
        int64_t needed = open_at_once(&p, &n_open), resident_wire = 0;
        if (p.layout->world == 1 || rest == 0 ||
            p.plan->placement.param[ZR_INNER] == ZR_WHOLE) { /* nothing is sharded */
            release(&p);
            continue;
        }
        p.opt.param_budget_bytes = rest;
        CHECK(plan_again(&p) == 0 && p.plan->n_param_slots == 0, "%s", zr_error_text());
        resident_wire = p.plan->traffic.wire_bytes;
        int64_t n_gathered = 0;
        for (int32_t u = 0; u < p.layout->n_units; u++)
            n_gathered += p.layout->units[u].trainable && has_backward(&p, u);
        CHECK(p.plan->traffic.n_gather == n_gathered, "%lld gathers with everything resident",
              (long long)p.plan->traffic.n_gather);
        check_plan(&p);
        int64_t step = zr_max(1, (rest - largest) / (4 + random_below(&r, 8)));
        for (int64_t budget = largest; budget < rest; budget += step) {
            p.opt.param_budget_bytes = budget;
            int err = plan_again(&p);
            if (err) {
                CHECK(err == ZERO_ERR_BUDGET && strstr(zr_error_text(), "param_budget_bytes"), "%s",
                      zr_error_text());
                CHECK(budget < n_open * largest, "%lld bytes would do for %lld units of %lld: %s",
                      (long long)budget, (long long)n_open, (long long)largest, zr_error_text());
                CHECK(wire == INT64_MAX, "a larger budget was refused: %s", zr_error_text());
                continue;
            }
            CHECK(budget >= needed, "%lld bytes are open at once, the budget is %lld", (long long)needed,
                  (long long)budget);
            CHECK(slot_bytes(p.plan) <= budget, "%lld bytes of slots, budget %lld",
                  (long long)slot_bytes(p.plan), (long long)budget);
            /* If slices differ, slots are chosen by the most that any rank receives per unit. The traffic
             * is that of one rank. */
            CHECK(p.plan->traffic.wire_bytes <= wire || p.layout->has_places,
                  "traffic rose from %lld to %lld at budget %lld", (long long)wire,
                  (long long)p.plan->traffic.wire_bytes, (long long)budget);
            wire = p.plan->traffic.wire_bytes;
            check_plan(&p);
        }
        /* A unit that is never used is gathered after each update if it is resident, and never otherwise. */
        CHECK(leaves_out(&p) || resident_wire <= wire,
              "traffic rose from %lld to %lld when all became resident", (long long)wire,
              (long long)resident_wire);
        release(&p);
    }
}

static void small_budgets_are_refused(void **state)
{
    char expected[128];
    struct planned p = {.opt = default_options(3)};
    struct zr_tensor *t = calloc(3, sizeof *t);
    t[0] = make_tensor("a", 1000, 0);
    t[1] = make_tensor("b", 3000, 1);
    t[2] = make_tensor("c", 2000, 2);
    lay_out(&p, t, 3, 16);
    int64_t need = p.layout->units[1].param_bytes;
    for (int64_t budget = 1; budget < need; budget += need / 3) {
        p.opt.param_budget_bytes = budget;
        assert_int_equal(plan_again(&p), ZERO_ERR_BUDGET);
        assert_null(p.plan);
        snprintf(expected, sizeof expected, "param_budget_bytes is %lld; unit 1 alone needs %lld",
                 (long long)budget, (long long)need);
        assert_string_equal(zr_error_text(), expected);
    }
    p.opt.param_budget_bytes = need;
    assert_int_equal(plan_again(&p), 0);
    assert_int_equal(p.plan->n_param_slots, 1);
    check_plan(&p);
    release(&p);
}

static bool is_use(const struct zero_call *c, int32_t unit)
{
    return !c->is_end && c->unit == unit && zr_phase_has_params(c->phase);
}

/* Returns the fewest gathers with n_slots equal slots: a slot is taken from the unit whose next use is
 * last (Belady), found by looking ahead from each begin. Nothing is left from the step before. */
static int64_t fewest_gathers(const struct zr_core_spec *s, int32_t n_slots)
{
    int32_t in[MAX_UNITS] = {0}, pins[MAX_UNITS] = {0}, n_in = 0;
    int64_t gathers = 0, n = (int64_t)s->n_order * s->grad_accum_steps;
    for (int64_t i = 0; i < n; i++) {
        const struct zero_call *c = &s->order[i % s->n_order];
        if (!zr_phase_has_params(c->phase))
            continue;
        pins[c->unit] += c->is_end ? -1 : 1;
        if (c->is_end || s->units[c->unit].resident || in[c->unit])
            continue;
        gathers++;
        if (n_in == n_slots) {
            int32_t victim = -1;
            int64_t farthest = -1;
            for (int32_t u = 0; u < s->n_units; u++) {
                int64_t use = i + 1;
                if (!in[u] || pins[u])
                    continue;
                while (use < n && !is_use(&s->order[use % s->n_order], u))
                    use++;
                if (use > farthest) {
                    farthest = use;
                    victim = u;
                }
            }
            CHECK(victim >= 0, "no slot is free");
            in[victim] = 0;
            n_in--;
        }
        in[c->unit] = 1;
        n_in++;
    }
    return gathers;
}

static void gathers_are_the_fewest(void **state)
{
    FOR_CASES(r, 500)
    {
        struct planned p = {.opt = default_options(3)};
        int32_t n_units = 1 + (int32_t)random_below(&r, MAX_UNITS);
        p.opt.prefetch = (int)random_below(&r, 4);
        p.opt.grad_accum_steps = 1 + (int)random_below(&r, 3);
        plan_layers(&p, n_units, 1000, 2);
        int64_t unit = p.layout->units[0].param_bytes, budget = -1, fewest;
        do {
            if (chance(&r, 60)) {
                p.opt.n_order = random_calls(&r, n_units, p.order);
                p.opt.order = p.order;
            }
        } while (!all_have_backward(&p));
        for (int tries = 0; tries < 4; tries++) {
            p.opt.param_budget_bytes = budget;
            if (!plan_again(&p) && p.plan->n_param_slots) {
                int64_t got = p.plan->traffic.n_gather;
                fewest = fewest_gathers(&p.plan->spec, p.plan->n_param_slots);
                CHECK(got >= fewest, "%lld gathers, fewer than the %lld possible", (long long)got,
                      (long long)fewest);
                CHECK(got == fewest || p.opt.prefetch, "%lld gathers, %lld would do", (long long)got,
                      (long long)fewest);
                /* One pass up and one down: gathering ahead costs nothing. */
                CHECK(got == fewest || p.opt.n_order, "%lld gathers, %lld would do", (long long)got,
                      (long long)fewest);
                CHECK(p.plan->traffic.n_reduce == n_units * p.opt.grad_accum_steps || p.opt.n_order,
                      "%lld reduces", (long long)p.plan->traffic.n_reduce);
            }
            budget = unit * (1 + random_below(&r, n_units));
        }
        release(&p);
    }
}

/* A model of equal layers in the default order has the traffic of the formulas in zero.h and the design. */
static void traffic_by_stage(void **state)
{
    enum { LAYERS = 8, ELEMS = 64 * 1024 };
    for (int stage = 0; stage <= 3; stage++) {
        for (int world = 1; world <= 4; world *= 2) {
            for (int accum = 1; accum <= 4; accum += 3) {
                for (int each = 0; each < 2; each++) {
                    struct planned p = {.opt = default_options(stage)};
                    p.opt.grad_accum_steps = accum;
                    p.opt.grad_in_place = !each;
                    plan_layers(&p, LAYERS, ELEMS, world);
                    const struct zr_traffic *t = &p.plan->traffic;
                    int64_t model = LAYERS * ELEMS * 4, part = model / world * (world - 1),
                            kept = p.plan->n_param_slots;
                    int64_t passes = each ? accum : 1;
                    int64_t gathers = stage == 0 || world == 1 ? 0
                                      : stage < 3              ? LAYERS
                                                               : 2 * LAYERS * accum - kept * (2 * accum - 1);
                    CHECK(t->n_reduce == LAYERS * passes, "stage %d world %d: %lld", stage, world,
                          (long long)t->n_reduce);
                    CHECK(t->n_gather == gathers, "stage %d world %d: %lld", stage, world,
                          (long long)t->n_gather);
                    int64_t wire = passes * part + gathers * (part / LAYERS) + (stage == 0 ? part : 0);
                    int64_t agreement = zr_agree_wire(world, 0, ZR_AGREE_SUMS, ZR_AGREE_MAXES);
                    CHECK(t->agreement_bytes == agreement &&
                              agreement <= 2 * (int64_t)sizeof(struct zr_agreement),
                          "world %d: %lld", world, (long long)t->agreement_bytes);
                    CHECK(t->wire_bytes == wire + agreement, "stage %d world %d: %lld", stage, world,
                          (long long)t->wire_bytes);
                    release(&p);
                }
            }
        }
    }
}

/* Frozen tensors travel only if they are sharded. A narrower wire dtype applies to gradients only. */
static void traffic_by_tensor(void **state)
{
    enum { N = 4096 };
    const int64_t agreement = zr_agree_wire(2, 0, ZR_AGREE_SUMS, ZR_AGREE_MAXES);
    for (int wire = 0; wire <= ZERO_BF16; wire++) {
        for (int stage = 1; stage <= 3; stage++) {
            struct planned p = {.opt = default_options(stage)};
            struct zr_tensor *t = calloc(3, sizeof *t);
            t[0] = make_tensor("trainable", N, 0);
            t[1] = make_tensor("frozen", 2 * N, 0);
            t[1].grad = NULL;
            t[2] = make_tensor("half", 4 * N, 0);
            t[2].dtype = ZERO_BF16;
            p.opt.wire_dtype = (enum zero_dtype)wire;
            lay_out(&p, t, 3, 2);
            /* The flag makes it resident at stage 3, so that the three stages are equal here. */
            p.layout->units[0].asked_resident = true;
            assert_int_equal(plan_again(&p), 0);
            int64_t gather = (4 * N + 2 * 4 * N) / 2,
                    reduce = ((wire == ZERO_BF16 ? 2 : 4) * N + 2 * 4 * N) / 2;
            assert_int_equal(p.plan->traffic.wire_bytes, gather + reduce + agreement);
            p.layout->units[0].asked_resident = false;
            p.opt.order = p.order;
            p.opt.n_order = 4;
            for (int i = 0; i < 4; i++)
                p.order[i] =
                    (struct zero_call){.phase = i > 1 ? ZERO_BACKWARD : ZERO_FORWARD, .is_end = i & 1};
            assert_int_equal(plan_again(&p), 0);
            assert_int_equal(zr_plan_gather_wire(p.plan, 0, zr_where_of(&p.plan->placement, 0)),
                             gather + (p.plan->resident[0] ? 0 : 4 * 2 * N / 2));
            assert_int_equal(
                zr_plan_reduce_wire(p.plan, 0, zr_where_of(&p.plan->placement, 1), (enum zero_dtype)wire),
                reduce);
            release(&p);
        }
    }
}

/* Slices differ and travel packed, among so many ranks that a loop over all pairs would be too slow. Every
 * rank receives rows as long as the largest slice; the agreement's bytes differ between ranks. */
static void traffic_of_many_ranks(void **state)
{
    enum { N = 1 << 21, N_UNITS = 100, WORLD = 1 << 14, LARGEST = 192 };
    const int64_t rows = (WORLD - 1) * LARGEST * (int64_t)sizeof(float);
    struct planned p = {.opt = default_options(3)};
    struct zr_tensor *t = calloc(N_UNITS, sizeof *t);
    int64_t agreement = 0;
    for (int32_t i = 0; i < N_UNITS; i++) {
        t[i] = make_tensor("t", N, i);
        t[i].granule = 48;
    }
    p.opt.gather_packs_up_to = p.opt.reduce_packs_up_to = 32 << 10;
    lay_out(&p, t, N_UNITS, WORLD);
    assert_int_equal(plan_again(&p), 0);
    for (int place = 0; place < WORLD; place++)
        agreement = zr_max(agreement, zr_agree_wire(WORLD, place, ZR_AGREE_SUMS, ZR_AGREE_MAXES));
    assert_int_equal(p.plan->traffic.n_reduce, N_UNITS);
    assert_int_equal(p.plan->traffic.wire_bytes, (p.plan->traffic.n_gather + N_UNITS) * rows + agreement);
    release(&p);
}

static void script_order(struct planned *p, const char *script)
{
    enum zr_core_event_kind kind;
    int32_t unit;
    enum zero_phase phase;
    p->opt.order = p->order;
    p->opt.n_order = 0;
    while (watch_parse(&script, &kind, &unit, &phase))
        p->order[p->opt.n_order++] =
            (struct zero_call){.unit = unit, .phase = (uint8_t)phase, .is_end = kind == ZR_EV_END};
}

/* Plans units of so many blocks of 256 bytes. */
static void plan_sizes(struct planned *p, const int *blocks, int32_t n, int world)
{
    struct zr_tensor *t = calloc((size_t)n, sizeof *t);
    for (int32_t i = 0; i < n; i++)
        t[i] = make_tensor("t", 64 * world * blocks[i], i);
    lay_out(p, t, n, world);
}

/* A declared order gets one gradient slot more than are open, for the previous reduce, unless nothing
 * overlaps. */
static void declared_orders_get_what_they_need(void **state)
{
    for (int prefetch = 0; prefetch <= 2; prefetch++) {
        struct planned p = {.opt = default_options(3)};
        int64_t unit = 1000 * 256 * 8;
        p.opt.prefetch = prefetch;
        plan_sizes(&p, (int[]){1000, 1000, 1000, 1000, 1000, 1000}, 6, 8);
        script_order(&p, "0(0) 1(1) 2(2) 3(3) 4(4) 5(5) 5[5] 4[4] 3[3] 2[2] 1[1] 0[0]");
        assert_int_equal(plan_again(&p), 0);
        assert_int_equal(p.plan->bytes[ZR_MEM_GRAD_SLOTS], (prefetch ? 2 : 1) * unit);
        assert_int_equal(p.plan->bytes[ZR_MEM_PARAM_SLOTS], (1 + prefetch) * unit);
        script_order(&p, "0( 1(1) 2(2) 3(3) 4(4) 5(5) 0) 0[ 5[5] 4[4] 3[3] 2[2] 1[1] 0]");
        assert_int_equal(plan_again(&p), 0);
        assert_int_equal(p.plan->bytes[ZR_MEM_GRAD_SLOTS], (prefetch ? 3 : 2) * unit);
        assert_int_equal(p.plan->bytes[ZR_MEM_PARAM_SLOTS], (2 + prefetch) * unit);
        release(&p);
    }
}

/* Without a declared order, an embedding and an output norm may stay open around each layer. So the three
 * largest gradients have slots, even if the assumed order opens fewer. */
static void undeclared_orders_get_three_gradients(void **state)
{
    static const int blocks[] = {900, 3, 3, 40, 3, 700};
    for (int stage = 2; stage <= 3; stage++)
        for (int32_t n = 1; n <= 6; n++) {
            struct planned p = {.opt = default_options(stage)};
            int64_t sorted[] = {blocks[0],
                                n == 1   ? 0
                                : n < 4  ? 3
                                : n == 6 ? 700
                                         : 40,
                                n < 3    ? 0
                                : n == 6 ? 40
                                         : 3};
            plan_sizes(&p, blocks, n, 8);
            assert_int_equal(plan_again(&p), 0);
            assert_int_equal(p.plan->bytes[ZR_MEM_GRAD_SLOTS], (sorted[0] + sorted[1] + sorted[2]) * 256 * 8);
            check_plan(&p);
            p.opt.order_assumed = true;
            script_order(&p, "0(0) 0[0]");
            assert_int_equal(plan_again(&p), 0);
            assert_int_equal(p.plan->bytes[ZR_MEM_GRAD_SLOTS], (sorted[0] + sorted[1] + sorted[2]) * 256 * 8);
            p.opt.order_assumed = false;
            assert_int_equal(plan_again(&p), 0);
            assert_int_equal(p.plan->bytes[ZR_MEM_GRAD_SLOTS], sorted[0] * 256 * 8);
            release(&p);
        }
}

/* A unit that stays gathered has its own gradient memory, at stage 2 too. No slot grows for it. */
static void resident_units_have_gradients_of_their_own(void **state)
{
    static const int blocks[] = {900, 10, 20, 30, 40, 700};
    for (int stage = 2; stage <= 3; stage++)
        for (int accum = 1; accum <= 3; accum++) {
            struct planned p = {.opt = default_options(stage)};
            struct zr_tensor *t = calloc(6, sizeof *t);
            p.opt.grad_accum_steps = accum;
            for (int32_t i = 0; i < 6; i++) {
                t[i] = make_tensor("t", 64 * 8 * blocks[i], i);
                t[i].resident = i == 0 || i == 5;
            }
            lay_out(&p, t, 6, 8);
            assert_int_equal(plan_again(&p), 0);
            assert_int_equal(p.plan->n_grad_slots, 3);
            assert_int_equal(p.plan->bytes[ZR_MEM_GRAD_SLOTS], (900 + 700 + 40 + 30 + 20) * 256 * 8);
            for (int32_t u = 0; u < 6; u++)
                assert_int_equal(zr_plan_grad_home(p.plan, u), u == 0 || u == 5);
            check_plan(&p);
            release(&p);
        }
}

/* A small model is kept whole, except in check mode, where its brackets must fail as with more ranks. A
 * budget that holds the model asks for it to be kept. */
static void check_mode_keeps_no_unit_for_its_size(void **state)
{
    for (int32_t n = 1; n <= 6; n++)
        for (int world = 2; world <= 4; world++) {
            struct planned p = {.opt = default_options(3)};
            p.opt.prefetch = 1;
            plan_layers(&p, n, 64 * 12, world);
            int64_t unit = p.layout->units[0].param_bytes;
            for (int check = 0; check < 2; check++) {
                p.opt.check = check;
                assert_int_equal(plan_again(&p), 0);
                bool small = 2 * unit >= rest_of_units(p.layout);
                assert_int_equal(p.plan->resident[0], !check && small);
                assert_int_equal(p.plan->n_param_slots, !check && small ? 0 : zr_min(n, 2));
                check_plan(&p);
            }
            p.opt.param_budget_bytes = rest_of_units(p.layout);
            assert_int_equal(plan_again(&p), 0);
            assert_int_equal(p.plan->n_param_slots, 0);
            release(&p);
        }
}

/* A slot in which nothing could stay is not allocated, however large the budget. */
static void useless_slots_are_not_bought(void **state)
{
    struct planned p = {.opt = default_options(3)};
    plan_sizes(&p, (int[]){10, 10, 10, 10, 10, 10}, 6, 8);
    p.opt.prefetch = 1;
    p.opt.param_budget_bytes = 5 * p.layout->units[0].param_bytes;
    script_order(&p, "0(0) 0[0] 1(1) 1[1] 2(2) 2[2] 3(3) 3[3] 4(4) 4[4] 5(5) 5[5]");
    assert_int_equal(plan_again(&p), 0);
    assert_int_equal(p.plan->n_param_slots, 2);
    assert_int_equal(p.plan->traffic.n_gather, 6);
    check_plan(&p);
    release(&p);
}

/* At most 60 and 30 blocks are open at once. But when 30 and then 20 begin, the 20 get the slot that 60
 * will need, so both slots have to hold 60. This does not affect the parameters. */
static void gradient_slots_do_not_spend_the_budget(void **state)
{
    struct planned p = {.opt = default_options(3)};
    plan_sizes(&p, (int[]){30, 20, 60, 60, 60}, 5, 8);
    p.opt.prefetch = 0;
    script_order(&p, "0(0) 1(1) 2(2) 3(3) 4(4) 4[4] 3[3] 2[ 0[0] 2] 0[ 1[ 0] 2[2] 1]");
    for (int n = 2; n <= 3; n++) {
        p.opt.param_budget_bytes = n * p.layout->units[2].param_bytes;
        CHECK(plan_again(&p) == 0, "%s", zr_error_text());
        assert_int_equal(p.plan->bytes[ZR_MEM_GRAD_SLOTS], 2 * p.layout->units[2].grad_bytes);
        check_plan(&p);
    }
    release(&p);
}

/* Copies of frozen units outlive a step. This model takes three steps until they are where they stay. */
static void rehearsal_reaches_a_steady_step(void **state)
{
    struct planned p = {.opt = default_options(3)};
    static const int64_t units[9] = {14336, 7168, 7168, 7168, 43008, 3584, 17920, 3584, 3584},
                         slots[6] = {43008, 17920, 14336, 7168, 7168, 3584};
    struct zr_core_unit_spec spec_units[9];
    int64_t gathers[9], reduces[9], n_gathers = 0;
    for (int i = 0; i < 9; i++)
        spec_units[i] = (struct zr_core_unit_spec){
            .param_bytes = units[i], .grad_bytes = 1, .trainable = i == 4 || i == 6};
    script_order(&p, "0( 1(1) 2(2) 6(6) 0) 7( 8(8) 7) 8[8] 7[7] 6[6] 4[4] 3[3] 2[2] 1[1]");
    struct zr_core_spec spec = {.n_units = 9,
                                .units = spec_units,
                                .n_param_slots = 6,
                                .n_grad_slots = 1,
                                .param_slot_bytes = slots,
                                .grad_slot_bytes = (int64_t[]){1},
                                .gathers_updated = true,
                                .prefetch = 4,
                                .grad_accum_steps = 1,
                                .reduce_each = true,
                                .n_sums = 1,
                                .order = p.order,
                                .n_order = p.opt.n_order};
    assert_int_equal(zr_core_rehearse(&spec, &(struct zr_core_work){gathers, reduces}), 0);
    for (int i = 0; i < 9; i++)
        n_gathers += gathers[i];
    assert_int_equal(n_gathers, 4);
}

/* Groups by formulas: a model of equal layers whose slices need no padding. */
static void memory_and_traffic_of_groups(void **state)
{
    enum { LAYERS = 12, ELEMS = 96 * 1024, P = LAYERS * ELEMS };
    for (int way = 0; way < 2 * 2 * 2 * 2 * 3 * 2; way++) {
        enum zr_hybrid hybrid = way & 1 ? ZR_HSDP : ZR_HFSDP;
        bool tree = way & 2, bf16 = way & 4;
        int accum = way & 8 ? 4 : 1, inner = 2 << way / 16 % 3, outer = way / 48 ? 2 : 3;
        struct planned p = {.opt = default_options(3)};
        struct zr_tensor *t = calloc(LAYERS, sizeof *t);
        p.opt.hybrid = hybrid;
        p.opt.dp_shard = inner;
        p.opt.prefetch = 0;
        p.opt.grad_accum_steps = accum;
        p.opt.deterministic = tree;
        for (int32_t i = 0; i < LAYERS; i++) {
            t[i] = make_tensor("layer", ELEMS, i);
            t[i].dtype = bf16 ? ZERO_BF16 : ZERO_F32;
        }
        lay_out(&p, t, LAYERS, inner * outer);
        assert_int_equal(plan_again(&p), 0);
        const struct zr_plan *q = p.plan;
        bool each = tree && accum > 1, hsdp = hybrid == ZR_HSDP;
        int64_t b = bf16 ? 2 : 4, k = bf16 ? 3 : 2, n_sums = each ? sums_for(accum) : 1; /* AdamW's states */
        CHECK(q->outer_each == each && q->n_sums == n_sums, "way %d", way);
        CHECK(q->bytes[ZR_MEM_PARAM_SHARDS] == P * b / inner, "way %d: %lld", way,
              (long long)q->bytes[ZR_MEM_PARAM_SHARDS]);
        int64_t sums = q->bytes[ZR_MEM_GRAD_SHARDS] + q->bytes[ZR_MEM_GRAD_SUMS];
        CHECK(sums == (each ? 4 * n_sums * P / (inner * outer) + 2 * 4 * ELEMS / inner : 4 * P / inner),
              "way %d: %lld", way, (long long)sums);
        CHECK(q->bytes[ZR_MEM_GRAD_GATHERED] == (each && hsdp ? 4 * ELEMS / inner : 0), "way %d: %lld", way,
              (long long)q->bytes[ZR_MEM_GRAD_GATHERED]);
        int64_t kept = q->bytes[ZR_MEM_MASTER] + q->bytes[ZR_MEM_MOMENTS];
        CHECK(kept == 4 * k * P / (inner * (hsdp ? 1 : outer)), "way %d: %lld", way, (long long)kept);
        const struct zr_traffic *m = &q->traffic;
        CHECK(m->n_reduce == LAYERS * accum && m->n_outer_reduce == LAYERS * (each ? accum : 1) &&
                  m->n_outer_gather == (hsdp ? 0 : LAYERS),
              "way %d: %lld, %lld, %lld", way, (long long)m->n_reduce, (long long)m->n_outer_reduce,
              (long long)m->n_outer_gather);
        int64_t part =
            (int64_t)P / inner / outer * (outer - 1); /* the part of an inner slice that other groups own */
        int64_t far = (each ? accum : 1) * 4 * part + (hsdp ? 4 : b) * part +
                      zr_agree_wire(inner * outer, 0, ZR_AGREE_SUMS, ZR_AGREE_MAXES);
        int64_t near = (m->n_gather * ELEMS + (int64_t)accum * P) / inner * (inner - 1) * b;
        CHECK(m->outer_bytes == far && m->wire_bytes == near + far, "way %d: %lld, %lld of %lld", way,
              (long long)far, (long long)m->outer_bytes, (long long)m->wire_bytes);
        release(&p);
    }
}

/* A group of one rank is no group, and a group of all ranks is no hybrid. */
static void groups_of_one_and_of_all(void **state)
{
    static const struct {
        enum zr_hybrid hybrid;
        int group, stage;
    } same[] = {{ZR_HSDP, 1, 0}, {ZR_HFSDP, 1, 1}, {ZR_HSDP, 4, 3}, {ZR_HFSDP, 4, 3}};
    for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
        struct planned p = {.opt = default_options(3)}, flat = {.opt = default_options(same[i].stage)};
        p.opt.hybrid = same[i].hybrid;
        p.opt.dp_shard = same[i].group;
        plan_layers(&p, 5, 3000, 4);
        plan_layers(&flat, 5, 3000, 4);
        assert_int_equal(p.layout->hash == flat.layout->hash, p.layout->in_place == flat.layout->in_place);
        assert_int_equal(p.plan->bytes[ZR_MEM_PARAM_SHARDS], flat.plan->bytes[ZR_MEM_PARAM_SHARDS]);
        assert_int_equal(p.plan->bytes[ZR_MEM_MOMENTS], flat.plan->bytes[ZR_MEM_MOMENTS]);
        assert_int_equal(p.plan->traffic.wire_bytes, flat.plan->traffic.wire_bytes);
        assert_int_equal(p.plan->traffic.outer_bytes, 0);
        release(&p);
        release(&flat);
    }
    struct planned p = {.opt = default_options(3)};
    struct zr_placement place;
    p.opt.hybrid = ZR_HSDP;
    p.opt.dp_shard = 3;
    assert_int_equal(zr_placement_in(&p.opt, 8, &place), ZERO_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), "dp_shard is 3, world is 8"));
    assert_int_equal(zr_placement_make(2, ZR_HFSDP, false, 2, 2, &place), ZERO_ERR_ARG);
}

/* More layers take no more memory beyond what grows with the model: shards, sums, and states. */
static void depth_costs_only_shards(void **state)
{
    int64_t slots = 0, grads = 0, exchange = 0;
    for (int32_t layers = 6; layers <= 96; layers *= 2) {
        struct planned p = {.opt = default_options(3)};
        plan_layers(&p, layers, 5000, 4);
        const int64_t *b = p.plan->bytes;
        if (layers > 6) {
            assert_int_equal(b[ZR_MEM_PARAM_SLOTS], slots);
            assert_int_equal(b[ZR_MEM_GRAD_SLOTS], grads);
            assert_true(b[ZR_MEM_EXCHANGE] - exchange < 2 * 4096); /* rounding to pages */
        }
        slots = b[ZR_MEM_PARAM_SLOTS];
        grads = b[ZR_MEM_GRAD_SLOTS];
        exchange = b[ZR_MEM_EXCHANGE];
        assert_int_equal(slots, 3 * p.layout->units[0].param_bytes);
        assert_int_equal(grads, 3 * p.layout->units[0].grad_bytes);
        release(&p);
    }
}

/* If all slots are as large as the largest unit, every gather is issued before it is needed. */
static void steady_steps_gather_ahead(void **state)
{
    for (int prefetch = 1; prefetch <= 3; prefetch++) {
        struct planned p = {.opt = default_options(3)};
        struct watch w;
        p.opt.prefetch = prefetch;
        plan_layers(&p, 8, 1000, 8);
        watch_open(&w, &p.plan->spec);
        for (int step = 0; step < 3; step++) {
            for (int32_t i = 0; i < p.plan->spec.n_order; i++) {
                const struct zero_call *c = &p.plan->spec.order[i];
                assert_int_equal(watch_call(&w, c->is_end ? ZR_EV_END : ZR_EV_BEGIN, c->unit, c->phase), 0);
            }
            assert_int_equal(watch_call(&w, ZR_EV_STEP, 0, 0), 0);
        }
        assert_int_equal(w.n_demand_gathers, 1);
        watch_close(&w);
        release(&p);
    }
}

/* ---- orders ---- */

static bool make_calls(struct watch *w, const struct zero_call *calls, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        const struct zero_call *c = &calls[i];
        int err = watch_call(w, c->is_end ? ZR_EV_END : ZR_EV_BEGIN, c->unit, c->phase);
        CHECK(err == 0, "call %d: %s", i, zr_error_text());
    }
    return n > 0;
}

/* The calls before the first backward call, which an evaluation makes too; 0 if a bracket is open then. */
static int32_t forward_calls(const struct planned *p)
{
    int32_t n = 0, n_open = 0;
    for (; n < p->opt.n_order && !zr_phase_is_backward(p->order[n].phase); n++)
        n_open += p->order[n].is_end ? -1 : 1;
    return n_open ? 0 : n;
}

/* Makes calls that leave units in other slots than a step does, and no bracket open. */
static void disturb(struct random_source *r, struct watch *w)
{
    if (chance(r, 30)) {
        CHECK(watch_call(w, ZR_EV_GATHER_ALL, 0, 0) == 0, "%s", zr_error_text());
        CHECK(watch_call(w, ZR_EV_RELEASE_ALL, 0, 0) == 0, "%s", zr_error_text());
    }
    if (chance(r, 30))
        CHECK(watch_call(w, ZR_EV_REWRITE, random_below(r, w->spec.n_units), 0) == 0, "%s", zr_error_text());
}

/* A step in which everything is gathered, written and dropped in between, after evaluations. */
static void disturbed_step(struct random_source *r, struct watch *w, const struct planned *p)
{
    int32_t n_open = 0;
    for (int e = (int)random_below(r, 3); e > 0 && make_calls(w, p->order, forward_calls(p)); e--)
        disturb(r, w);
    for (int a = 0; a < p->opt.grad_accum_steps; a++) {
        for (int32_t i = 0; i < p->opt.n_order; i++) {
            make_calls(w, &p->order[i], 1);
            n_open += p->order[i].is_end ? -1 : 1;
            if (n_open == 0)
                disturb(r, w);
        }
        if (chance(r, 20) && watch_call(w, ZR_EV_DROP, 0, 0) == 0)
            return;
    }
    CHECK(watch_call(w, ZR_EV_STEP, 0, 0) == 0, "%s", zr_error_text());
}

/* Each bracket of a declared order finds a slot, whatever came before. */
static void declared_brackets_find_slots(void **state)
{
    int32_t n_sized = 0;
    FOR_CASES(r, 400)
    {
        struct planned p;
        random_planned(&r, &p, 3);
        if (!p.opt.n_order) {
            p.opt.n_order = random_calls(&r, p.layout->n_units, p.order);
            p.opt.order = p.order;
        }
        int64_t least = rest_of_units(p.layout);
        if (chance(&r, 30) && least > 0)
            p.opt.param_budget_bytes = random_below(&r, least);
        if (p.opt.n_order && plan_again(&p) == 0 && shows_backward(&p)) {
            struct watch w;
            watch_open(&w, &p.plan->spec);
            n_sized += w.core->sized;
            for (int step = 0; step < 6; step++)
                disturbed_step(&r, &w, &p);
            watch_close(&w);
        }
        release(&p);
    }
    assert_true(n_sized > 0);
}

static void wrong_orders_are_refused(void **state)
{
    struct planned p = {.opt = default_options(3)};
    plan_layers(&p, 3, 100, 2);
    p.order[0] = (struct zero_call){.phase = ZERO_FORWARD};
    p.order[1] = (struct zero_call){.phase = ZERO_FORWARD, .is_end = 1};
    p.order[2] = (struct zero_call){.unit = 3, .phase = ZERO_BACKWARD};
    p.order[3] = (struct zero_call){.unit = 3, .phase = ZERO_BACKWARD, .is_end = 1};
    p.opt.order = p.order;
    p.opt.n_order = 4;
    assert_int_equal(plan_again(&p), ZERO_ERR_ARG);
    assert_string_equal(zr_error_text(), "order[2].unit is 3; allowed: 0..2");
    release(&p);
}

/* The order is a hint. One without any backward, from a model that first evaluates only, is accepted. */
static void an_order_without_backward(void **state)
{
    for (int stage = 0; stage <= 3; stage++) {
        struct planned p = {.opt = default_options(stage)};
        plan_layers(&p, 3, 100, 2);
        for (int i = 0; i < 6; i++)
            p.order[i] = (struct zero_call){.unit = i / 2, .phase = ZERO_FORWARD, .is_end = i & 1};
        p.opt.order = p.order;
        p.opt.n_order = 6;
        CHECK(plan_again(&p) == 0, "stage %d: %s", stage, zr_error_text());
        CHECK(stage <= 1 || p.plan->n_grad_slots >= 1, "no gradient slot");
        check_plan(&p);
        release(&p);
    }
}

static void hash_covers_the_options(void **state)
{
    struct planned p = {.opt = default_options(3)};
    plan_layers(&p, 4, 1000, 4);
    uint64_t h = p.plan->hash;
    assert_int_equal(plan_again(&p), 0);
    assert_int_equal(p.plan->hash, h);
    struct zr_options base = p.opt;
#define DIFFERS(change)                                                                                      \
    p.opt = base;                                                                                            \
    change;                                                                                                  \
    assert_int_equal(plan_again(&p), 0);                                                                     \
    assert_int_not_equal(p.plan->hash, h)
    DIFFERS(p.opt.stage = 2);
    DIFFERS(p.opt.prefetch = 1);
    DIFFERS(p.opt.grad_accum_steps = 2);
    DIFFERS(p.opt.param_budget_bytes = 2 * p.layout->units[0].param_bytes);
    for (int i = 0; i < 16; i++)
        p.order[i] = (struct zero_call){.unit = i < 8 ? i / 2 : 7 - i / 2,
                                        .phase = i < 8 ? ZERO_FORWARD : ZERO_BACKWARD,
                                        .is_end = i & 1};
    p.opt = base;
    p.opt.order = p.order;
    p.opt.n_order = 16;
    assert_int_equal(plan_again(&p), 0);
    uint64_t declared = p.plan->hash;
    struct zero_call swap = p.order[0];
    p.order[0] = p.order[2];
    p.order[2] = swap;
    swap = p.order[1];
    p.order[1] = p.order[3];
    p.order[3] = swap;
    assert_int_equal(plan_again(&p), 0);
    assert_int_not_equal(p.plan->hash, declared);
#undef DIFFERS
    release(&p);
}

/* Backward brackets that a tensor declares take the sums and traffic of as many contributions. An order
 * with another number of them is refused. */
static void declared_uses(void **state)
{
    enum { UNITS = 3, TWICE_OF_1 = 2 * (UNITS + 1) };
    for (int stage = 0; stage <= 4; stage++)
        for (int accum = 1; accum <= 2; accum++)
            for (int by_order = 0; by_order <= 1; by_order++) {
                struct planned p = {.opt = default_options(stage == 4 ? 3 : stage)};
                struct zr_tensor *t = calloc(UNITS, sizeof *t);
                for (int32_t i = 0; i < UNITS; i++)
                    t[i] = make_tensor(i == 1 ? "shared" : "layer", 1000, i);
                t[1].uses = by_order ? 0 : 3;
                p.opt.grad_accum_steps = accum;
                if (stage == 4) {
                    p.opt.hybrid = ZR_HSDP;
                    p.opt.dp_shard = 2;
                }
                lay_out(&p, t, UNITS, 4);
                if (by_order) {
                    struct zero_call *order;
                    p.layout->units[1].uses = 3;
                    assert_int_equal(zr_plan_assume_order(p.layout, &order, &p.opt.n_order), 0);
                    assert_int_equal(p.opt.n_order, 2 * UNITS + 2 * (UNITS + 2));
                    memcpy(p.order, order, (size_t)p.opt.n_order * sizeof *order);
                    p.opt.order = p.order;
                    free(order);
                }
                assert_int_equal(plan_again(&p), 0);
                assert_int_equal(p.plan->traffic.n_reduce, (UNITS + 2) * accum);
                assert_int_equal(p.plan->sum_in_place[0], stage == 0 && accum == 1);
                assert_false(p.plan->sum_in_place[1]);
                assert_int_equal(p.plan->outer_each, stage == 4);
                if (by_order) {
                    for (int u = 0, n = p.opt.n_order = 0; u < UNITS; u++)
                        for (int k = 0; k < (u == 1 ? 4 : 2); k++, p.opt.n_order = ++n)
                            p.order[n] =
                                (struct zero_call){.unit = u, .phase = ZERO_BACKWARD, .is_end = k & 1};
                    assert_int_equal(p.opt.n_order, TWICE_OF_1);
                    p.layout->tensors[1].uses = 3;
                    assert_int_equal(plan_again(&p), ZERO_ERR_ARG);
                    assert_non_null(strstr(zr_error_text(), "tensors[1] (shared): uses is 3, but "
                                                            "cfg.memory.order has 2 backward brackets of "
                                                            "its unit 1"));
                }
                release(&p);
            }
}

/* Makes layers of the size of a small GPT's, in bf16, whose gradient sums have that dtype. */
static void plan_bf16(struct planned *p, enum zero_dtype sum_dtype, int world)
{
    enum { LAYERS = 13, ELEMS = 9 * 1024 * 1024 };
    struct zr_tensor *t = calloc(LAYERS, sizeof *t);
    for (int32_t i = 0; i < LAYERS; i++) {
        t[i] = make_tensor("layer", ELEMS, i);
        t[i].dtype = ZERO_BF16;
        t[i].sum_dtype = sum_dtype;
    }
    lay_out(p, t, LAYERS, world);
    assert_int_equal(plan_again(p), 0);
}

/* bf16 sums take half of the memory, and none on one rank that adds up nothing. Reductions on several ranks
 * need fp32 memory for one unit's sums. */
static void bf16_sums_take_less(void **state)
{
    static const struct {
        int stage, world, accum;
        enum zr_hybrid hybrid;
    } ways[] = {{0, 1, 1}, {0, 4, 1}, {1, 4, 1}, {3, 1, 1},          {3, 4, 1},          {0, 1, 4},
                {0, 4, 4}, {2, 4, 4}, {3, 4, 4}, {3, 4, 1, ZR_HSDP}, {3, 4, 1, ZR_HFSDP}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        struct planned wide = {.opt = default_options(ways[i].stage)}, narrow;
        wide.opt.grad_accum_steps = ways[i].accum;
        wide.opt.hybrid = ways[i].hybrid;
        wide.opt.dp_shard = ways[i].hybrid ? 2 : 0;
        narrow = wide;
        plan_bf16(&wide, ZERO_F32, ways[i].world);
        plan_bf16(&narrow, ZERO_BF16, ways[i].world);
        const int64_t n = wide.layout->n_params, per_rank = n / ways[i].world, unit = n / 13;
        const int64_t inner = unit / (ways[i].hybrid ? 2 : 1), fine = unit / ways[i].world;
        const bool in_place = (ways[i].stage == 0 || ways[i].world == 1) && ways[i].accum == 1;
        const int64_t gathered = ways[i].stage == 0 && ways[i].world > 1 ? unit : 0;
        int64_t saved = (in_place ? 1 : wide.plan->n_sums) * per_rank * 4;
        if (!in_place)
            saved -= narrow.plan->n_sums * per_rank * 2;
        if (ways[i].stage == 3 && in_place) /* each gradient is kept, and not only those in slots */
            saved -= (13 - wide.plan->n_grad_slots) * unit * 2;
        if (ways[i].hybrid) /* sums of inner slices become sums of fine slices, and two group slots */
            saved += (unit * 13 / 2 - per_rank) * 4 - 2 * inner * 4;
        if (ways[i].hybrid == ZR_HSDP) /* the sum is gathered apart */
            saved -= inner * 2;
        saved += gathered * (in_place ? 4 : 2);
        saved -= ways[i].world > 1 || !in_place ? fine * 4 : 0;
        CHECK(wide.plan->total_bytes - narrow.plan->total_bytes == saved, "way %d: %lld bytes less, not %lld",
              (int)i, (long long)(wide.plan->total_bytes - narrow.plan->total_bytes), (long long)saved);
        CHECK(narrow.plan->sum_in_place[0] == in_place, "way %d", (int)i);
        release(&wide);
        release(&narrow);
    }
}

/* Plans that sum contributions in different ways have different hashes. */
static void hash_covers_the_sums(void **state)
{
    for (int accum = 2; accum <= 4; accum++) {
        struct planned p = {.opt = default_options(1)};
        p.opt.grad_accum_steps = accum;
        plan_layers(&p, 4, 1000, 4);
        uint64_t h = p.plan->hash;
        p.opt.deterministic = false; /* two are one sum in any tree */
        assert_int_equal(plan_again(&p), 0);
        assert_int_equal(p.plan->hash != h, accum > 2);
        h = p.plan->hash;
        p.opt.grad_in_place = true;
        assert_int_equal(plan_again(&p), 0);
        assert_int_not_equal(p.plan->hash, h);
        release(&p);
    }
}

/* Plans AdamW for 2^20 bf16 weights. Returns the bytes that a rank has for 1024 weights. With several ranks
 * weights and gradients as they are computed do not count. */
static int64_t bytes_of_1024(enum zero_masters masters, enum zero_moments moments, int stage, int world)
{
    struct planned p = {.opt = default_options(stage)};
    struct zr_tensor *t = calloc(1, sizeof *t);
    *t = make_tensor("layer", 1 << 20, 0);
    t->dtype = ZERO_BF16;
    t->optimizer = ZERO_ADAMW;
    t->masters = masters;
    t->moments = moments;
    lay_out(&p, t, 1, world);
    assert_int_equal(plan_again(&p), 0);
    const int64_t *bytes = p.plan->bytes;
    const int64_t whole = bytes[ZR_MEM_PARAM_SHARDS] + bytes[ZR_MEM_GRAD_SLOTS],
                  n = (world == 1 ? whole : 0) + bytes[ZR_MEM_GRAD_SHARDS] + bytes[ZR_MEM_MASTER] +
                      bytes[ZR_MEM_MOMENTS];
    release(&p);
    assert_int_equal(n % 1024, 0);
    return n / 1024;
}

/* 2 bytes for a weight and 2 for its gradient as it is computed, 4 for the gradient's sum, and masters and
 * moments. Only scales of blocks make fractions. */
static void bytes_of_precisions(void **state)
{
    static const struct {
        enum zero_masters masters;
        enum zero_moments moments;
        int64_t bytes;
    } rows[] = {
        {ZERO_MASTERS_F32, ZERO_MOMENTS_F32, 20480},        {ZERO_MASTERS_REMAINDER, ZERO_MOMENTS_F32, 18432},
        {ZERO_MASTERS_REMAINDER, ZERO_MOMENTS_BF16, 14336}, {ZERO_MASTERS_REMAINDER, ZERO_MOMENTS_Q8, 12416},
        {ZERO_MASTERS_NONE, ZERO_MOMENTS_BF16, 12288},      {ZERO_MASTERS_NONE, ZERO_MOMENTS_Q8, 10368}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        assert_int_equal(bytes_of_1024(rows[i].masters, rows[i].moments, 0, 1), rows[i].bytes);
        assert_int_equal(bytes_of_1024(rows[i].masters, rows[i].moments, 3, 4), (rows[i].bytes - 4096) / 4);
    }
    (void)state;
}

static void table_names_everything(void **state)
{
    struct planned p = {.opt = default_options(3)};
    char text[1024], part[1024], number[32];
    plan_layers(&p, 4, 1000, 4);
    zr_plan_table(p.plan, text, sizeof text);
    for (int i = 0; i < ZR_MEM_COUNT; i++) {
        snprintf(number, sizeof number, "%lld bytes", (long long)p.plan->bytes[i]);
        const char *line = strstr(text, zr_mem_name((enum zr_mem)i));
        assert_non_null(line);
        assert_non_null(strstr(line, number));
        assert_true(strstr(line, number) < strchr(line, '\n'));
    }
    snprintf(number, sizeof number, "%lld bytes", (long long)p.plan->total_bytes);
    assert_non_null(strstr(strstr(text, "total per rank"), number));
    for (size_t n = 0; n <= strlen(text) + 1; n++) {
        memset(part, 0x55, sizeof part);
        zr_plan_table(p.plan, part, n);
        assert_int_equal(part[n], 0x55);
        assert_true(n == 0 || (part[n - 1] == 0 || strlen(part) < n));
        assert_true(n == 0 || !strncmp(part, text, n - 1));
    }
    release(&p);
}

static void out_of_memory_leaves_nothing(void **state)
{
    struct planned p = {.opt = default_options(3)};
    plan_layers(&p, 6, 1000, 4);
    p.opt.param_budget_bytes = 5 * p.layout->units[0].param_bytes;
    zr_plan_free(p.plan);
    p.plan = NULL;
    int64_t live = n_live, k = 0;
    for (int err = ZERO_ERR_NOMEM; err; k++) {
        n_allocs = 0;
        fail_at = k;
        err = zr_plan_make(p.layout, &p.opt, &p.plan);
        fail_at = -1;
        assert_true(err == 0 || err == ZERO_ERR_NOMEM);
        if (err) {
            assert_null(p.plan);
            assert_non_null(strstr(zr_error_text(), "no memory"));
            assert_int_equal(n_live, live);
        }
    }
    assert_true(k > 15);
    release(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_plan),
        cmocka_unit_test(any_budget),
        cmocka_unit_test(small_budgets_are_refused),
        cmocka_unit_test(gathers_are_the_fewest),
        cmocka_unit_test(memory_and_traffic_of_groups),
        cmocka_unit_test(bf16_sums_take_less),
        cmocka_unit_test(groups_of_one_and_of_all),
        cmocka_unit_test(traffic_by_stage),
        cmocka_unit_test(traffic_by_tensor),
        cmocka_unit_test(traffic_of_many_ranks),
        cmocka_unit_test(declared_orders_get_what_they_need),
        cmocka_unit_test(undeclared_orders_get_three_gradients),
        cmocka_unit_test(resident_units_have_gradients_of_their_own),
        cmocka_unit_test(check_mode_keeps_no_unit_for_its_size),
        cmocka_unit_test(useless_slots_are_not_bought),
        cmocka_unit_test(gradient_slots_do_not_spend_the_budget),
        cmocka_unit_test(rehearsal_reaches_a_steady_step),
        cmocka_unit_test(depth_costs_only_shards),
        cmocka_unit_test(steady_steps_gather_ahead),
        cmocka_unit_test(declared_brackets_find_slots),
        cmocka_unit_test(wrong_orders_are_refused),
        cmocka_unit_test(declared_uses),
        cmocka_unit_test(an_order_without_backward),
        cmocka_unit_test(hash_covers_the_options),
        cmocka_unit_test(hash_covers_the_sums),
        cmocka_unit_test(bytes_of_precisions),
        cmocka_unit_test(table_names_everything),
        cmocka_unit_test(out_of_memory_leaves_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
