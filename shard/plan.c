/* SPDX-License-Identifier: Apache-2.0 */
/* plan.c: makes the plan: offsets and bytes of everything that a rank allocates. plan_slots.c chooses the
 * slots. */
#include "shard/plan.h"
#include "kernels/alloc.h"
#include "kernels/asserts.h"
#include "kernels/op_check.h"
#include "shard/plan_slots.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

const char *zr_mem_name(enum zr_mem m)
{
    static const char *const name[ZR_MEM_COUNT] = {[ZR_MEM_PARAM_SHARDS] = "parameter shards",
                                                   [ZR_MEM_PARAM_SLOTS] = "parameter slots",
                                                   [ZR_MEM_GRAD_SHARDS] = "gradient shards",
                                                   [ZR_MEM_GRAD_SLOTS] = "gradient slots",
                                                   [ZR_MEM_GRAD_SUMS] = "gradient sums",
                                                   [ZR_MEM_GRAD_GATHERED] = "gathered gradients",
                                                   [ZR_MEM_MASTER] = "master weights",
                                                   [ZR_MEM_MOMENTS] = "optimizer moments",
                                                   [ZR_MEM_STATE_BUFFERS] = "state buffers",
                                                   [ZR_MEM_SNAPSHOT] = "snapshot",
                                                   [ZR_MEM_COMM] = "communicators",
                                                   [ZR_MEM_EXCHANGE] = "exchange"};
    return name[m];
}

void zr_plan_free(struct zr_plan *p)
{
    if (!p)
        return;
    free(p->param_at);
    free(p->resident);
    free(p->param_slots);
    free(p->grad_at);
    free(p->grad_slots);
    free(p->master_at);
    free(p->state_at);
    free(p->file_at);
    free(p->sum_in_place);
    free(p->sum_at);
    free(p->in_reduce_slot);
    free(p->in_group_slot);
    free((void *)p->spec.units);
    free((void *)p->spec.param_slot_bytes);
    free((void *)p->spec.grad_slot_bytes);
    free((void *)p->spec.order);
    free(p);
}

/* ---- where things are ---- */

int64_t zr_plan_param_full(const struct zr_plan *p, const struct zr_flat *f, int32_t slot)
{
    if (slot >= 0)
        return p->param_slots[slot].at + f->param_at;
    return (f->in_place ? p->in_place_param_at : p->param_at[f->unit]) + f->param_at;
}

int64_t zr_plan_param_own(const struct zr_plan *p, const struct zr_flat *f, struct zr_where at)
{
    if (p->resident[f->unit])
        return zr_plan_param_full(p, f, -1) + zr_cut_at(&f->inner, at.inner);
    return p->param_at[f->unit] + f->shard_at;
}

int64_t zr_plan_grad_full(const struct zr_plan *p, const struct zr_flat *f, int32_t slot)
{
    if (slot >= 0)
        return p->grad_slots[slot].at + f->grad_at;
    return (f->in_place ? p->in_place_grad_at : p->grad_at[f->unit]) + f->grad_at;
}

bool zr_plan_grad_home(const struct zr_plan *p, int32_t unit)
{
    return p->spec.units[unit].grad_home;
}

static int64_t sum_at(const struct zr_plan *p, const struct zr_flat *f, int k)
{
    return p->sums_at + k * p->sum_bytes + p->sum_at[f - p->layout->flats];
}

/* Whether the sums are of inner slices. */
static bool sums_are_inner(const struct zr_plan *p)
{
    return p->hop[ZR_OUTER].size > 1 && !p->outer_each;
}

int64_t zr_plan_sum(const struct zr_plan *p, const struct zr_flat *f, struct zr_where at, int k)
{
    if (p->sum_in_place[f->unit])
        return zr_plan_grad_full(p, f, -1) + zr_cut_at(&f->fine, zr_layout_fine(p->layout, at));
    int64_t before = zr_flat_span(f, at, ZR_LEVEL_FINE).first - zr_flat_span(f, at, ZR_LEVEL_INNER).first;
    return sum_at(p, f, k) + (sums_are_inner(p) ? before * zr_sum_size(f) : 0);
}

int64_t zr_plan_reduced(const struct zr_plan *p, const struct zr_flat *f, struct zr_where at, int k)
{
    int64_t in_slot = p->in_reduce_slot[f - p->layout->flats];
    return in_slot >= 0 ? p->reduce_slot_at + in_slot : zr_plan_sum(p, f, at, k);
}

int64_t zr_plan_inner_sum(const struct zr_plan *p, const struct zr_flat *f, struct zr_where at,
                          int32_t group_slot)
{
    if (group_slot >= 0)
        return p->group_slots_at + group_slot * p->group_slot_bytes + p->in_group_slot[f - p->layout->flats];
    return p->sum_in_place[f->unit] ? zr_plan_grad_full(p, f, -1) + zr_cut_at(&f->inner, at.inner)
                                    : sum_at(p, f, 0);
}

bool zr_plan_gathers(const struct zr_plan *p, const struct zr_flat *f)
{
    return f->trainable || !p->resident[f->unit];
}

int64_t zr_plan_kept_elems(const struct zr_plan *p, const struct zr_flat *f)
{
    switch (zr_level_of(p->placement.state)) {
    case ZR_LEVEL_FINE:
        return f->fine_elems;
    case ZR_LEVEL_INNER:
        return f->inner_elems;
    case ZR_LEVEL_ALL:
        break;
    }
    return f->elems;
}

int64_t zr_plan_master_size(const struct zr_flat *f)
{
    if (!f->trainable || f->dtype == ZERO_F32 || f->masters == ZERO_MASTERS_NONE)
        return 0;
    return f->masters == ZERO_MASTERS_REMAINDER ? (int64_t)sizeof(uint16_t) : (int64_t)sizeof(float);
}

int64_t zr_plan_state_size(const struct zr_flat *f)
{
    return zr_moments_bytes(f->moments);
}

int64_t zr_plan_state_bytes(const struct zr_flat *f, int64_t n)
{
    const int64_t scales = f->moments == ZERO_MOMENTS_Q8 ? zr_q8_blocks(n) : 0;
    return n * zr_plan_state_size(f) + scales * (int64_t)sizeof(uint16_t);
}

int64_t zr_plan_scales_at(const struct zr_plan *p, const struct zr_flat *f, int state)
{
    return p->state_at[state * p->layout->n_flats + (f - p->layout->flats)] + zr_plan_kept_elems(p, f);
}

bool zr_plan_saves(const struct zr_flat *f, int kind)
{
    if (kind == -2)
        return !f->trainable || f->dtype != ZERO_F32;
    if (kind == -1)
        return f->trainable && (f->dtype == ZERO_F32 || zr_plan_master_size(f));
    return f->trainable && kind % ZR_MAX_STATES < f->n_states &&
           (kind < ZR_SCALE(0) || f->moments == ZERO_MOMENTS_Q8);
}

int64_t zr_plan_saved_size(const struct zr_flat *f, int kind)
{
    if (kind == -1 && zr_plan_master_size(f))
        return zr_plan_master_size(f);
    if (kind < 0)
        return zr_dtype_bytes(f->dtype);
    return kind < ZR_SCALE(0) ? zr_plan_state_size(f) : (int64_t)sizeof(uint16_t);
}

int64_t zr_plan_snapshot_bytes(const struct zr_flat *f, int kind, int64_t elems)
{
    int64_t n = kind < ZR_SCALE(0) ? elems : elems / ZR_Q8_BLOCK;
    return zr_round_up(n * zr_plan_saved_size(f, kind), (int64_t)sizeof(float));
}

/* ---- placing ---- */

/* Returns the buffers that a binary counter needs for n contributions. The stack is deepest just after an
 * even-numbered one. */
static int32_t counter_depth(int32_t n)
{
    int32_t most = 1;
    for (int32_t i = 2; i < n; i += 2)
        most = (int32_t)zr_max(most, __builtin_popcount((unsigned)i) + 1);
    return most;
}

static int64_t take(int64_t *end, int64_t bytes)
{
    int64_t at = *end;
    *end = zr_round_up(at + bytes, ZR_PIECE_ALIGN);
    return at;
}

static void place_params(struct zr_plan *p, int64_t scratch_bytes)
{
    const struct zr_layout *l = p->layout;
    int64_t end = 0;
    for (int32_t u = 0; u < l->n_units; u++)
        p->param_at[u] = take(&end, p->resident[u] ? l->units[u].param_bytes : l->units[u].shard_bytes);
    p->in_place_param_at = take(&end, l->in_place_param_bytes);
    p->bytes[ZR_MEM_PARAM_SHARDS] = end;
    for (int32_t i = 0; i < p->n_param_slots; i++)
        p->param_slots[i].at = take(&end, p->param_slots[i].bytes);
    p->bytes[ZR_MEM_PARAM_SLOTS] = end - p->bytes[ZR_MEM_PARAM_SHARDS];
    p->gather_bytes = zr_round_up(zr_max(end, 1), 4096) + scratch_bytes;
    p->bytes[ZR_MEM_COMM] += scratch_bytes;
    p->bytes[ZR_MEM_EXCHANGE] += p->gather_bytes - scratch_bytes - end;
}

/* Whether the flat's gradient is reduced to the reduce slot. A gradient of one rank that is itself the sum
 * stays where it is. */
static bool takes_reduce_slot(const struct zr_plan *p, const struct zr_flat *f)
{
    return f->trainable && f->sum_dtype != ZERO_F32 && !(p->world == 1 && p->sum_in_place[f->unit]);
}

/* Places the sums of a step's contributions, the slot that holds the sums of ranks, and the group slots that
 * hold the sums of a group. */
static void place_sums(struct zr_plan *p, int64_t *end)
{
    const struct zr_layout *l = p->layout;
    int64_t at = 0, reduced = 0;
    for (int32_t i = 0; i < l->n_flats; i++) {
        const struct zr_flat *f = &l->flats[i];
        bool has = f->trainable && !p->sum_in_place[f->unit];
        p->sum_at[i] = has ? p->sum_bytes : -1;
        p->sum_bytes += has ? (sums_are_inner(p) ? f->inner_elems : f->fine_elems) * zr_sum_size(f) : 0;
        if (i == l->units[f->unit].first_flat)
            at = reduced = 0;
        p->in_reduce_slot[i] = takes_reduce_slot(p, f) ? reduced : -1;
        reduced += takes_reduce_slot(p, f) ? f->fine_elems * (int64_t)sizeof(float) : 0;
        p->reduce_slot_bytes = zr_max(p->reduce_slot_bytes, reduced);
        p->in_group_slot[i] = p->outer_each && f->trainable ? at : -1;
        at += p->outer_each && f->trainable ? f->inner_elems * (int64_t)sizeof(float) : 0;
        p->group_slot_bytes = zr_max(p->group_slot_bytes, at);
    }
    int64_t from = *end;
    p->sums_at = take(end, p->n_sums * p->sum_bytes);
    p->bytes[ZR_MEM_GRAD_SUMS] = (p->n_sums - 1) * p->sum_bytes;
    p->bytes[ZR_MEM_GRAD_SHARDS] = *end - from - p->bytes[ZR_MEM_GRAD_SUMS];
    from = *end;
    p->reduce_slot_at = take(end, p->reduce_slot_bytes);
    p->group_slots_at = take(end, p->n_group_slots * p->group_slot_bytes);
    p->bytes[ZR_MEM_GRAD_SUMS] += *end - from;
}

/* Places one unit's gathered gradient, for units whose sums cannot be gathered in place. It is whole, or with
 * HSDP the inner slice. */
static void place_gathered(struct zr_plan *p, int64_t *end)
{
    const struct zr_layout *l = p->layout;
    int64_t bytes = 0;
    for (int32_t i = 0; i < l->n_flats; i++) {
        const struct zr_flat *f = &l->flats[i];
        int64_t elems = p->hop[ZR_INNER].sums_whole                    ? f->elems
                        : p->hop[ZR_OUTER].sums_whole && p->outer_each ? f->inner_elems
                                                                       : 0;
        bytes = i == l->units[f->unit].first_flat ? 0 : bytes;
        bytes += f->trainable && !p->sum_in_place[f->unit] ? elems * zr_sum_size(f) : 0;
        p->full_grad_bytes = zr_max(p->full_grad_bytes, bytes);
    }
    p->full_grad_at = take(end, p->full_grad_bytes);
    p->bytes[ZR_MEM_GRAD_GATHERED] = *end - p->full_grad_at;
}

/* Returns the bytes for values on their way between ranks. With buffers there is a piece for each rank, for
 * their mean. */
static int64_t values_bytes(const struct zr_plan *p, bool several_stages)
{
    const struct zr_layout *l = p->layout;
    int64_t largest = 0, all = 0;
    for (int32_t t = 0; t < l->n_tensors; t++) {
        int64_t size = l->tensors[t].n_elems * zr_max(4, zr_dtype_bytes(l->tensors[t].dtype));
        largest = zr_max(largest, zr_round_up(size, ZR_PIECE_ALIGN));
        all += zr_round_up(size, ZR_PIECE_ALIGN);
    }
    /* First values are sent in batches of many small tensors. */
    int64_t bytes = zr_min(zr_min(all, zr_max(largest, ZR_SMALL_VALUES_BYTES)), ZR_VALUE_BYTES);
    /* Pipeline stages have different tensors, but need equal arenas. */
    if (several_stages)
        bytes = ZR_VALUE_BYTES;
    return l->n_buffers ? zr_max(bytes, (int64_t)p->world * ZR_PIECE_ALIGN) : bytes;
}

static void place_grads(struct zr_plan *p, const struct zr_options *opt)
{
    const struct zr_layout *l = p->layout;
    int64_t end = 0;
    for (int32_t u = 0; u < l->n_units; u++)
        if (zr_plan_grad_home(p, u))
            p->grad_at[u] = take(&end, l->units[u].grad_bytes);
    p->in_place_grad_at = take(&end, p->placement.model_holds ? l->in_place_grad_bytes : 0);
    for (int32_t i = 0; i < p->n_grad_slots; i++)
        p->grad_slots[i].at = take(&end, p->grad_slots[i].bytes);
    p->bytes[ZR_MEM_GRAD_SLOTS] = end;
    place_sums(p, &end);
    p->control_at = take(&end, ZR_CONTROL_BYTES);
    p->norm_at = take(&end, sizeof(struct zr_own_squares));
    place_gathered(p, &end);
    /* Ranks of other groups or other pipeline stages do not map the gradients. Memory that all of them
     * exchange is then in a separate arena, with equal offsets on all of them. */
    int64_t control = 0, *at = p->hop[ZR_OUTER].size > 1 || opt->pp > 1 ? &control : &end;
    p->exchange_at = take(at, (int64_t)p->world * p->model_ranks * ZR_EXCHANGE_BYTES);
    p->agreement_at = take(at, sizeof(struct zr_agreement));
    p->values_bytes = values_bytes(p, opt->pp > 1);
    p->values_at = take(at, p->values_bytes);
    p->control_bytes = control ? zr_round_up(control, 4096) + opt->control_scratch_bytes : 0;
    p->reduce_bytes = zr_round_up(end, 4096) + opt->reduce_scratch_bytes;
    int64_t scratch = opt->reduce_scratch_bytes + (control ? opt->control_scratch_bytes : 0);
    p->tp_bytes = p->tp > 1 ? ZR_AXIS_BYTES + opt->tp_scratch_bytes : 0;
    p->cp_bytes = opt->cp > 1 ? ZR_AXIS_BYTES + opt->cp_scratch_bytes : 0;
    p->pipe_bytes = opt->pipe_bytes;
    p->tied_bytes = opt->tied_bytes;
    p->bytes[ZR_MEM_COMM] += scratch + p->tp_bytes + p->cp_bytes + p->pipe_bytes + p->tied_bytes;
    p->bytes[ZR_MEM_EXCHANGE] += p->control_bytes + p->reduce_bytes - scratch - p->bytes[ZR_MEM_GRAD_SLOTS] -
                                 p->bytes[ZR_MEM_GRAD_SHARDS] - p->bytes[ZR_MEM_GRAD_SUMS] -
                                 p->bytes[ZR_MEM_GRAD_GATHERED];
}

static void count_states(struct zr_plan *p)
{
    for (int32_t i = 0; i < p->layout->n_flats; i++)
        p->n_states = (int32_t)zr_max(p->n_states, p->layout->flats[i].n_states);
}

static void place_state(struct zr_plan *p, const struct zr_options *opt)
{
    const struct zr_layout *l = p->layout;
    for (int32_t i = 0; i < l->n_flats; i++) {
        const struct zr_flat *f = &l->flats[i];
        const int64_t master_size = zr_plan_master_size(f);
        p->master_at[i] = master_size ? take(&p->master_bytes, zr_plan_kept_elems(p, f) * master_size) : -1;
        for (int s = 0; s < p->n_states; s++)
            p->state_at[s * l->n_flats + i] =
                s < f->n_states ? take(&p->state_bytes[s], zr_plan_state_bytes(f, zr_plan_kept_elems(p, f)))
                                : -1;
    }
    for (int32_t i = 0; opt->save_async && i < l->n_flats; i++)
        for (int kind = -2; kind < ZR_N_KINDS; kind++)
            if (zr_plan_saves(&l->flats[i], kind) && !l->flats[i].copy)
                p->snapshot_bytes += zr_plan_snapshot_bytes(&l->flats[i], kind, l->flats[i].fine_elems);
    p->snapshot_buffers_at = p->snapshot_bytes;
    p->snapshot_bytes += opt->save_async ? l->buffer_bytes : 0;
    /* a snapshot is made by all pipeline stages, even by one that owns nothing */
    if (opt->save_async && !p->snapshot_bytes)
        p->snapshot_bytes = ZR_PIECE_ALIGN;
    p->words_bytes = ZR_OUTCOME_BYTES + (int64_t)p->world * p->model_ranks * ZR_EXCHANGE_BYTES;
    p->words_bytes += l->n_buffers ? p->values_bytes : 0;
    p->shard_digests_at = p->words_bytes = zr_round_up(p->words_bytes, (int64_t)sizeof(uint64_t));
    if (p->tp > 1 && opt->compares_tp)
        p->words_bytes += l->n_tensors * (int64_t)sizeof(struct zr_shard_digest);
    p->bytes[ZR_MEM_SNAPSHOT] = p->snapshot_bytes;
    p->bytes[ZR_MEM_EXCHANGE] += p->words_bytes;
    p->states = opt->states;
    if (p->states == ZERO_STATES_FILE) {
        zr_plan_place_parts(p, opt->part_elems);
        p->master_bytes = 0;
        memset(p->state_bytes, 0, sizeof p->state_bytes);
        p->bytes[ZR_MEM_STATE_BUFFERS] = 2 * p->part_bytes;
    }
    p->bytes[ZR_MEM_MASTER] = p->master_bytes;
    for (int s = 0; s < p->n_states; s++)
        p->bytes[ZR_MEM_MOMENTS] += p->state_bytes[s];
    p->host_bytes = p->snapshot_bytes + p->words_bytes + p->bytes[ZR_MEM_STATE_BUFFERS];
    if (p->states == ZERO_STATES_HOST)
        p->host_bytes += p->bytes[ZR_MEM_MASTER] + p->bytes[ZR_MEM_MOMENTS];
}

/* Most calls of an assumed order. */
#define MAX_ASSUMED (1 << 28)

int zr_plan_assume_order(const struct zr_layout *l, struct zero_call **out, int32_t *n_out)
{
    int64_t all = 0;
    for (int32_t u = 0; u < l->n_units; u++)
        all += 2 + 2 * zr_max(l->units[u].uses, 1);
    if (all > MAX_ASSUMED)
        return zr_fail(ZERO_ERR_ARG,
                       "by zero_tensor.uses the %d units have %lld calls in a micro-batch; allowed: %d",
                       l->n_units, (long long)all, MAX_ASSUMED);
    struct zero_call *order;
    int32_t n = 0;
    ZR_TRY(ZR_ALLOC(order, all, "an order of %lld calls", (long long)all));
    for (int32_t u = 0; u < l->n_units; u++)
        for (int end = 0; end < 2; end++)
            order[n++] = (struct zero_call){.unit = u, .phase = ZERO_FORWARD, .is_end = (uint8_t)end};
    for (int32_t u = l->n_units; u-- > 0;)
        for (int64_t k = 0; k < 2 * zr_max(l->units[u].uses, 1); k++)
            order[n++] = (struct zero_call){.unit = u, .phase = ZERO_BACKWARD, .is_end = k & 1};
    *out = order;
    *n_out = n;
    return 0;
}

/* Checks that a declared order has as many backward brackets of the unit in a micro-batch as its tensors
 * say. */
static int check_uses(const struct zr_layout *l, int32_t unit, int32_t brackets)
{
    int32_t t = 0;
    if (!l->units[unit].uses || l->units[unit].uses == zr_max(brackets, 1))
        return 0;
    while (!l->tensors[t].uses || unit < l->tensors[t].unit ||
           unit >= l->tensors[t].unit + l->tensors[t].n_layers)
        t++;
    return zr_fail(
        ZERO_ERR_ARG,
        "tensors[%d] (%s): uses is %d, but cfg.memory.order has %d backward brackets of its unit %d; "
        "allowed: as many as there, or 0",
        t, l->tensors[t].name, l->tensors[t].uses, brackets, unit);
}

/* Whether the flat's gradients have the dtype of its sums, also after a wire of fewer bytes has narrowed them
 * in place. */
static bool has_dtype_of_sums(const struct zr_plan *p, const struct zr_flat *f, enum zero_dtype wire)
{
    bool narrowed = p->world > 1 && wire && zr_dtype_bytes(wire) < zr_dtype_bytes(f->dtype);
    return f->dtype == f->sum_dtype && !narrowed;
}

/* Chooses the units whose sums lie in their gradients. The gradients must have the dtype of sums, this rank
 * must keep all of them, and a step must add only one contribution. *any_again: whether the order has a unit
 * with more than one contribution in a micro-batch. */
static int choose_sums(struct zr_plan *p, const struct zr_options *opt, struct zr_core_unit_spec *units,
                       bool *any_again)
{
    const struct zr_core_spec *s = &p->spec;
    bool whole = zr_level_of(p->placement.state) == ZR_LEVEL_ALL;
    bool once = zr_most_micro_batches(opt) == 1 || !s->reduce_each;
    int err = 0;
    int32_t *uses;
    *any_again = false;
    ZR_TRY(ZR_ZALLOC(uses, s->n_units, "a plan of %d units", s->n_units));
    for (int32_t u = 0; u < s->n_units; u++)
        p->sum_in_place[u] = whole && once && units[u].trainable;
    for (int32_t i = 0; i < p->layout->n_flats; i++) {
        const struct zr_flat *f = &p->layout->flats[i];
        p->sum_in_place[f->unit] &= !f->trainable || has_dtype_of_sums(p, f, opt->wire_dtype);
    }
    int32_t n_micro = opt->order_of_step ? opt->grad_accum_steps : 1;
    for (int32_t i = 0; i < s->n_order; i++) {
        const struct zero_call *c = &s->order[i];
        bool use = zr_phase_has_grads(c->phase) && !c->is_end && units[c->unit].trainable;
        bool again = use && uses[c->unit]++ >= n_micro;
        *any_again |= again;
        p->sum_in_place[c->unit] &= !again;
    }
    for (int32_t u = 0; u < s->n_units; u++)
        units[u].sum_in_place = p->sum_in_place[u];
    for (int32_t u = 0; !err && zr_order_declared(opt) && u < s->n_units; u++)
        err = units[u].trainable ? check_uses(p->layout, u, uses[u] / n_micro) : 0;
    free(uses);
    return err;
}

static bool has_bf16_sums(const struct zr_layout *l)
{
    bool has = false;
    for (int32_t i = 0; i < l->n_flats; i++)
        has |= l->flats[i].trainable && l->flats[i].sum_dtype != ZERO_F32;
    return has;
}

/* Chooses how sums are reduced between groups. again: a unit has more than one contribution in a
 * micro-batch. */
static void choose_hops(struct zr_plan *p, const struct zr_options *opt, bool again)
{
    struct zr_core_spec *s = &p->spec;
    s->outer = p->hop[ZR_OUTER].size > 1;
    p->outer_each = s->outer && ((opt->deterministic && (zr_most_micro_batches(opt) > 1 || again)) ||
                                 has_bf16_sums(p->layout));
    /* A group fills one of them while the other is reduced between groups. */
    p->n_group_slots = p->outer_each ? 2 : 0;
    s->outer_each = p->outer_each;
    s->outer_gathers = s->outer && p->placement.state[ZR_OUTER] == ZR_CUT;
    s->n_group_slots = p->n_group_slots;
}

/* Copies the program's order, or the assumed one, into the spec. */
static int take_order(struct zr_plan *p, const struct zr_options *opt)
{
    struct zr_core_spec *s = &p->spec;
    struct zero_call *order;
    int32_t n_units = p->layout->n_units;
    if (!opt->n_order) {
        int err = zr_plan_assume_order(p->layout, &order, &s->n_order);
        if (!err)
            s->order = order;
        return err;
    }
    for (int32_t i = 0; i < opt->n_order; i++)
        if (opt->order[i].unit >= n_units)
            return zr_fail(ZERO_ERR_ARG, "order[%d].unit is %d; allowed: 0..%d", i, opt->order[i].unit,
                           n_units - 1);
    ZR_TRY(ZR_ALLOC(order, opt->n_order, "an order of %d calls", opt->n_order));
    s->order = order;
    memcpy(order, opt->order, (size_t)opt->n_order * sizeof *order);
    s->n_order = opt->n_order;
    return 0;
}

static int fill_spec(struct zr_plan *p, const struct zr_options *opt)
{
    const struct zr_layout *l = p->layout;
    struct zr_core_spec *s = &p->spec;
    struct zr_core_unit_spec *units;
    ZR_TRY(ZR_ZALLOC(units, l->n_units, "a plan of %d units", l->n_units));
    s->units = units;
    ZR_TRY(take_order(p, opt));
    for (int32_t u = 0; u < l->n_units; u++) {
        units[u] = (struct zr_core_unit_spec){.param_bytes = l->units[u].param_bytes,
                                              .grad_bytes = l->units[u].grad_bytes,
                                              .resident = p->placement.param[ZR_INNER] == ZR_WHOLE ||
                                                          l->units[u].asked_resident,
                                              .trainable = l->units[u].trainable};
    }
    s->n_units = l->n_units;
    s->order_of_step = opt->order_of_step;
    s->in_stages = opt->pipe_bytes > 0;
    s->prefetch = opt->prefetch;
    s->grad_accum_steps = opt->grad_accum_steps;
    s->max_grad_accum_steps = zr_most_micro_batches(opt);
    s->model_holds = p->placement.model_holds;
    s->gathers_updated = p->placement.state[ZR_INNER] == ZR_CUT;
    /* Only the model knows whether it zeroes its gradients between the micro-batches of a step. */
    s->reduce_each = !opt->grad_in_place || zr_most_micro_batches(opt) == 1;
    /* A backward that stores its gradient replaces that of the micro-batch before, which must be reduced
     * first. */
    for (int32_t t = 0; t < l->n_tensors; t++)
        s->reduce_each |= l->tensors[t].overwrite && l->tensors[t].grad;
    s->n_sums = p->n_sums = opt->deterministic ? counter_depth(zr_most_micro_batches(opt)) : 1;
    bool again;
    ZR_TRY(choose_sums(p, opt, units, &again));
    choose_hops(p, opt, again);
    for (int32_t u = 0; u < l->n_units; u++)
        units[u].grad_home =
            p->placement.model_holds ||
            (units[u].trainable && (units[u].sum_in_place || !s->reduce_each || l->units[u].asked_resident));
    return 0;
}

static uint64_t hash_plan(const struct zr_plan *p)
{
    const struct zr_core_spec *s = &p->spec;
    int64_t head[] = {
        p->world,         p->placement.model_holds, p->n_states,        p->n_sums,
        s->prefetch,      s->grad_accum_steps,      s->reduce_each,     s->reserve_largest,
        s->n_param_slots, s->n_grad_slots,          s->gathers_updated, p->placement.size[ZR_INNER],
        p->outer_each};
    uint64_t h = XXH64(head, sizeof head, p->layout->hash);
    h = XXH64(p->placement.param, sizeof p->placement.param, h);
    h = XXH64(p->placement.grad, sizeof p->placement.grad, h);
    h = XXH64(p->placement.state, sizeof p->placement.state, h);
    h = XXH64(p->bytes, sizeof p->bytes, h);
    h = XXH64(s->param_slot_bytes, (size_t)s->n_param_slots * sizeof *s->param_slot_bytes, h);
    h = XXH64(s->grad_slot_bytes, (size_t)s->n_grad_slots * sizeof *s->grad_slot_bytes, h);
    for (int32_t i = 0; i < p->spec.n_order; i++) {
        uint64_t word = zr_core_call_word(&p->spec.order[i]);
        h = XXH64(&word, sizeof word, h);
    }
    return h;
}

static int set_placement(struct zr_plan *p, const struct zr_layout *l, const struct zr_options *opt)
{
    int err = zr_placement_in(opt, l->world, &p->placement);
    for (int a = 0; !err && a < ZR_AXES; a++) {
        int32_t size = p->placement.size[a];
        p->hop[a] =
            (struct zr_hop){.size = size, .sums_whole = size > 1 && p->placement.state[a] == ZR_WHOLE};
    }
    return err;
}

/* Whether all sizes add up, and the offsets lie inside their arenas. */
static bool valid_plan(const struct zr_plan *p)
{
    const struct zr_layout *l = p->layout;
    int64_t bytes = 0;
    for (int i = 0; i < ZR_MEM_COUNT; i++) {
        if (p->bytes[i] < 0)
            return false;
        bytes += p->bytes[i];
    }
    for (int32_t u = 0; u < l->n_units; u++)
        if (p->param_at[u] < 0 || p->param_at[u] > p->gather_bytes || p->grad_at[u] > p->reduce_bytes)
            return false;
    return bytes == p->total_bytes && p->exchange_at >= 0 && p->exchange_at <= p->reduce_bytes &&
           p->host_bytes >= 0 && p->host_bytes <= p->total_bytes;
}

int zr_plan_make(const struct zr_layout *l, const struct zr_options *opt, struct zr_plan **out)
{
    struct zr_plan *p;
    ZR_TRY(ZR_ZALLOC(p, 1, "a plan"));
    int err = set_placement(p, l, opt);
    if (err) {
        free(p);
        return err;
    }
    err = ZERO_ERR_NOMEM;
    p->layout = l;
    p->world = l->world;
    p->tp = opt->tp > 1 ? opt->tp : 1;
    p->model_ranks = zr_model_ranks(opt);
    p->gather_packs_up_to = opt->gather_packs_up_to;
    p->reduce_packs_up_to = opt->reduce_packs_up_to;
    p->param_at = calloc((size_t)l->n_units, sizeof *p->param_at);
    p->grad_at = calloc((size_t)l->n_units, sizeof *p->grad_at);
    p->resident = calloc((size_t)l->n_units, sizeof *p->resident);
    p->master_at = calloc((size_t)l->n_flats, sizeof *p->master_at);
    count_states(p);
    p->state_at = calloc((size_t)(p->n_states * (int64_t)l->n_flats + 1), sizeof *p->state_at);
    p->file_at = calloc((size_t)l->n_flats, sizeof *p->file_at);
    p->sum_in_place = calloc((size_t)l->n_units, sizeof *p->sum_in_place);
    p->sum_at = calloc((size_t)l->n_flats, sizeof *p->sum_at);
    p->in_reduce_slot = calloc((size_t)l->n_flats, sizeof *p->in_reduce_slot);
    p->in_group_slot = calloc((size_t)l->n_flats, sizeof *p->in_group_slot);
    if (!p->param_at || !p->grad_at || !p->resident || !p->master_at || !p->state_at || !p->file_at ||
        !p->sum_in_place || !p->sum_at || !p->in_reduce_slot || !p->in_group_slot) {
        zr_fail(err, "no memory for a plan of %d units", l->n_units);
        goto fail;
    }
    err = fill_spec(p, opt);
    if (err)
        goto fail;
    err = zr_plan_choose_slots(p, opt);
    if (err)
        goto fail;
    for (int32_t u = 0; u < l->n_units; u++)
        p->resident[u] = p->spec.units[u].resident;
    place_params(p, opt->gather_scratch_bytes);
    place_grads(p, opt);
    place_state(p, opt);
    for (int i = 0; i < ZR_MEM_COUNT; i++)
        p->total_bytes += p->bytes[i];
    err = zr_plan_measure(p, opt);
    if (err)
        goto fail;
    p->hash = hash_plan(p);
    ZR_ASSERT(valid_plan(p));
    *out = p;
    return 0;

fail:
    zr_plan_free(p);
    return err;
}

void zr_plan_table(const struct zr_plan *p, char *text, size_t n)
{
    size_t at = 0;
    for (int i = 0; i < ZR_MEM_COUNT && at < n; i++) {
        int k = snprintf(text + at, n - at, "  %-18s %16lld bytes\n", zr_mem_name(i), (long long)p->bytes[i]);
        at += k > 0 ? (size_t)k : 0;
    }
    if (at < n)
        snprintf(text + at, n - at, "  %-18s %16lld bytes", "total per rank", (long long)p->total_bytes);
}
