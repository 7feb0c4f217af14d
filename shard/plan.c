/* plan.c: places everything; see plan.h. The slots are chosen in plan_slots.c. */
#include "shard/plan.h"
#include "kernels/asserts.h"
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
    free(p->sum_in_place);
    free(p->sum_at);
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

int64_t zr_plan_param_own(const struct zr_plan *p, const struct zr_flat *f, int rank)
{
    if (p->resident[f->unit])
        return zr_plan_param_full(p, f, -1) + rank * f->shard_bytes;
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

int64_t zr_plan_sum(const struct zr_plan *p, const struct zr_flat *f, int rank, int k)
{
    if (p->sum_in_place[f->unit])
        return zr_plan_grad_full(p, f, -1) + zr_min(rank * f->shard_bytes, f->total_bytes);
    return p->sums_at + (k * p->sum_elems + p->sum_at[f - p->layout->flats]) * (int64_t)sizeof(float);
}

bool zr_plan_gathers(const struct zr_plan *p, const struct zr_flat *f)
{
    return f->trainable || !p->resident[f->unit];
}

int zr_plan_states(const struct zr_plan *p, const struct zr_flat *f)
{
    return f->trainable ? p->states_of[f->optimizer] : 0;
}

bool zr_plan_saves(const struct zr_plan *p, const struct zr_flat *f, int kind)
{
    if (kind == -2)
        return !f->trainable || f->dtype != ZR_F32;
    return f->trainable && kind < zr_plan_states(p, f);
}

int64_t zr_plan_snapshot_bytes(const struct zr_flat *f, int kind)
{
    return kind == -2 ? f->shard_bytes : f->shard_elems * (int64_t)sizeof(float);
}

/* ---- what moves ---- */

static int64_t owned_bytes(const struct zr_flat *f, int rank)
{
    int64_t first;
    return zr_flat_owned(f, rank, &first) * zr_dtype_bytes(f->dtype);
}

int64_t zr_plan_gather_wire(const struct zr_plan *p, int32_t unit, int rank)
{
    const struct zr_unit *u = &p->layout->units[unit];
    int64_t n = 0;
    for (int32_t i = 0; i < u->n_flats; i++) {
        const struct zr_flat *f = &p->layout->flats[u->first_flat + i];
        if (zr_plan_gathers(p, f))
            n += f->total_bytes - owned_bytes(f, rank);
    }
    return n;
}

int64_t zr_plan_reduce_wire(const struct zr_plan *p, int32_t unit, int rank, enum zr_dtype wire)
{
    const struct zr_unit *u = &p->layout->units[unit];
    int64_t n = 0;
    for (int32_t i = 0; i < u->n_flats; i++) {
        const struct zr_flat *f = &p->layout->flats[u->first_flat + i];
        if (!f->trainable)
            continue;
        int64_t bytes = owned_bytes(f, rank);
        /* Peers' arenas are read as they are, so a wider wire than the tensor's own changes nothing. */
        if (wire && zr_dtype_bytes(wire) < zr_dtype_bytes(f->dtype))
            bytes = bytes / zr_dtype_bytes(f->dtype) * zr_dtype_bytes(wire);
        n += bytes * (p->world - 1);
    }
    return n;
}

int64_t zr_plan_grad_gather_wire(const struct zr_plan *p, int32_t unit, int rank)
{
    const struct zr_unit *u = &p->layout->units[unit];
    int64_t n = 0;
    for (int32_t i = 0; i < u->n_flats; i++) {
        const struct zr_flat *f = &p->layout->flats[u->first_flat + i];
        if (f->trainable)
            n += (f->total_bytes - owned_bytes(f, rank)) / zr_dtype_bytes(f->dtype) * (int64_t)sizeof(float);
    }
    return n;
}

/* Runs the core over the declared order and counts what a steady step does. */
static int measure(struct zr_plan *p, const struct zr_options *opt)
{
    int64_t *gathers = calloc((size_t)p->layout->n_units * 2, sizeof *gathers);
    if (!gathers)
        return zr_fail(ZR_ERR_NOMEM, "no memory to measure the plan");
    int64_t *reduces = gathers + p->layout->n_units;
    int err = zr_core_rehearse(&p->spec, gathers, reduces);
    for (int32_t u = 0; !err && u < p->layout->n_units; u++) {
        p->traffic.n_gather += gathers[u];
        p->traffic.n_reduce += reduces[u];
        p->traffic.wire_bytes += gathers[u] * zr_plan_gather_wire(p, u, 0);
        p->traffic.wire_bytes += reduces[u] * zr_plan_reduce_wire(p, u, 0, opt->wire_dtype);
        /* What is reduced in place is made whole by that; else the optimizer has it gathered. */
        int64_t n_whole = p->sum_in_place[u] ? reduces[u] : p->layout->units[u].trainable;
        if (p->hop[ZR_INNER].sums_whole)
            p->traffic.wire_bytes += n_whole * zr_plan_grad_gather_wire(p, u, 0);
    }
    p->traffic.wire_bytes += (p->world - 1) * ZR_EXCHANGE_BYTES;
    free(gathers);
    return err;
}

/* ---- placing ---- */

/* Buffers of a binary counter that takes n contributions: the stack is deepest just after an even-numbered
 * one. */
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

static void place_grads(struct zr_plan *p, int64_t scratch_bytes)
{
    const struct zr_layout *l = p->layout;
    int64_t end = 0;
    for (int32_t u = 0; u < l->n_units; u++)
        if (zr_plan_grad_home(p, u))
            p->grad_at[u] = take(&end, l->units[u].grad_bytes);
    p->in_place_grad_at = take(&end, p->place.model_holds ? l->in_place_grad_bytes : 0);
    for (int32_t i = 0; i < p->n_grad_slots; i++)
        p->grad_slots[i].at = take(&end, p->grad_slots[i].bytes);
    p->bytes[ZR_MEM_GRAD_SLOTS] = end;
    for (int32_t i = 0; i < l->n_flats; i++) {
        const struct zr_flat *f = &l->flats[i];
        bool has = f->trainable && !p->sum_in_place[f->unit];
        p->sum_at[i] = has ? p->sum_elems : -1;
        p->sum_elems += has ? f->shard_elems : 0;
    }
    p->sums_at = take(&end, p->n_sums * p->sum_elems * (int64_t)sizeof(float));
    p->bytes[ZR_MEM_GRAD_SUMS] = (p->n_sums - 1) * p->sum_elems * (int64_t)sizeof(float);
    p->bytes[ZR_MEM_GRAD_SHARDS] = end - p->sums_at - p->bytes[ZR_MEM_GRAD_SUMS];
    int64_t sums_end = end;
    p->exchange_at = take(&end, (int64_t)p->world * ZR_EXCHANGE_BYTES);
    p->control_at = take(&end, ZR_CONTROL_BYTES);
    int64_t largest = 0, widest = 0;
    for (int32_t u = 0; u < l->n_units; u++)
        widest = zr_max(widest, p->sum_in_place[u] ? 0 : l->units[u].elems);
    for (int32_t t = 0; t < l->n_tensors; t++)
        largest = zr_max(largest, l->tensors[t].n_elems * zr_max(4, zr_dtype_bytes(l->tensors[t].dtype)));
    p->full_grad_bytes = p->hop[ZR_INNER].sums_whole ? widest * (int64_t)sizeof(float) : 0;
    p->full_grad_at = take(&end, p->full_grad_bytes);
    p->bytes[ZR_MEM_GRAD_GATHERED] = end - p->full_grad_at;
    p->values_bytes = zr_min(zr_round_up(largest, ZR_PIECE_ALIGN), ZR_VALUE_BYTES);
    if (l->n_buffers) /* room for a piece of each rank, for their mean */
        p->values_bytes = zr_max(p->values_bytes, (int64_t)p->world * ZR_PIECE_ALIGN);
    p->values_at = take(&end, p->values_bytes);
    p->reduce_bytes = zr_round_up(end, 4096) + scratch_bytes;
    p->bytes[ZR_MEM_COMM] += scratch_bytes;
    p->bytes[ZR_MEM_EXCHANGE] += p->reduce_bytes - scratch_bytes - sums_end - p->bytes[ZR_MEM_GRAD_GATHERED];
}

/* How many states each kind in use keeps. */
static void count_states(struct zr_plan *p, const struct zr_options *opt)
{
    for (int kind = 0; kind < ZR_OPTIMIZER_COUNT; kind++)
        p->states_of[kind] = zr_states_of(opt, (enum zr_optimizer)kind);
    for (int32_t i = 0; i < p->layout->n_flats; i++)
        p->n_states = (int32_t)zr_max(p->n_states, zr_plan_states(p, &p->layout->flats[i]));
}

static void place_state(struct zr_plan *p, const struct zr_options *opt)
{
    const struct zr_layout *l = p->layout;
    int64_t copies = zr_level_of(p->place.state) == ZR_LEVEL_ALL ? p->world : 1;
    for (int32_t i = 0; i < l->n_flats; i++) {
        const struct zr_flat *f = &l->flats[i];
        p->master_at[i] = -1;
        if (f->trainable && f->dtype != ZR_F32) {
            p->master_at[i] = p->master_elems;
            p->master_elems += f->shard_elems * copies;
        }
        for (int s = 0; s < p->n_states; s++) {
            bool has = s < zr_plan_states(p, f);
            p->state_at[s * l->n_flats + i] = has ? p->state_elems[s] : -1;
            p->state_elems[s] += has ? f->shard_elems * copies : 0;
        }
    }
    for (int32_t i = 0; opt->save_async && i < l->n_flats; i++)
        for (int kind = -2; kind < p->n_states; kind++)
            if (zr_plan_saves(p, &l->flats[i], kind))
                p->snapshot_bytes += zr_plan_snapshot_bytes(&l->flats[i], kind);
    p->snapshot_buffers_at = p->snapshot_bytes;
    p->snapshot_bytes += opt->save_async ? l->buffer_bytes : 0;
    p->words_bytes = ZR_OUTCOME_BYTES + (int64_t)p->world * ZR_EXCHANGE_BYTES;
    p->words_bytes += l->n_buffers ? p->values_bytes : 0;
    p->host_bytes = p->snapshot_bytes + p->words_bytes;
    p->bytes[ZR_MEM_SNAPSHOT] = p->snapshot_bytes;
    p->bytes[ZR_MEM_EXCHANGE] += p->words_bytes;
    p->bytes[ZR_MEM_MASTER] = p->master_elems * (int64_t)sizeof(float);
    for (int s = 0; s < p->n_states; s++)
        p->bytes[ZR_MEM_MOMENTS] += p->state_elems[s] * (int64_t)sizeof(float);
}

/* A sum can lie in its gradient if that is f32, this rank keeps all of it, and a step adds nothing more to
 * it, as far as the order tells. Over a narrower wire the gradient is narrowed where it lies. */
static void choose_sums(struct zr_plan *p, const struct zr_options *opt, struct zr_core_unit_spec *units)
{
    const struct zr_core_spec *s = &p->spec;
    bool whole = zr_level_of(p->place.state) == ZR_LEVEL_ALL;
    bool narrowed = p->world > 1 && opt->wire_dtype && opt->wire_dtype != ZR_F32;
    bool once = opt->grad_accum_steps == 1 || !s->reduce_each;
    for (int32_t u = 0; u < s->n_units; u++)
        p->sum_in_place[u] = whole && once && !narrowed && units[u].trainable;
    for (int32_t i = 0; i < p->layout->n_flats; i++) {
        const struct zr_flat *f = &p->layout->flats[i];
        p->sum_in_place[f->unit] &= !f->trainable || f->dtype == ZR_F32;
    }
    for (int32_t i = 0; i < s->n_order; i++) {
        const struct zr_call *c = &s->order[i];
        bool use = c->backward && !c->is_end, again = use && units[c->unit].sum_in_place;
        p->sum_in_place[c->unit] &= !again;
        units[c->unit].sum_in_place |= use; /* for now: it was used */
    }
    for (int32_t u = 0; u < s->n_units; u++)
        units[u].sum_in_place = p->sum_in_place[u];
}

static int fill_spec(struct zr_plan *p, const struct zr_options *opt)
{
    const struct zr_layout *l = p->layout;
    struct zr_core_spec *s = &p->spec;
    struct zr_core_unit_spec *units = calloc((size_t)l->n_units, sizeof *units);
    int32_t n_order = opt->n_order ? opt->n_order : l->n_units * 4;
    struct zr_call *order = malloc((size_t)n_order * sizeof *order);
    s->units = units;
    s->order = order;
    if (!units || !order)
        return zr_fail(ZR_ERR_NOMEM, "no memory for a plan of %d units", l->n_units);
    for (int32_t u = 0; u < l->n_units; u++) {
        units[u] = (struct zr_core_unit_spec){.param_bytes = l->units[u].param_bytes,
                                              .grad_bytes = l->units[u].grad_bytes,
                                              .resident = p->place.param[ZR_INNER] == ZR_WHOLE ||
                                                          l->units[u].resident,
                                              .trainable = l->units[u].trainable};
    }
    if (opt->n_order)
        memcpy(order, opt->order, (size_t)n_order * sizeof *order);
    for (int32_t i = 0; i < n_order; i++) {
        if (!opt->n_order) {
            bool backward = i >= l->n_units * 2;
            int32_t u = (backward ? n_order - 1 - i : i) / 2;
            order[i] = (struct zr_call){.unit = u, .backward = backward, .is_end = i & 1};
        } else if (order[i].unit >= l->n_units) {
            return zr_fail(ZR_ERR_ARG, "order[%d].unit is %d; allowed: 0..%d", i, order[i].unit,
                           l->n_units - 1);
        }
    }
    s->n_units = l->n_units;
    s->n_order = n_order;
    s->prefetch = opt->prefetch;
    s->grad_accum_steps = opt->grad_accum_steps;
    s->model_holds = p->place.model_holds;
    s->gathers_updated = p->place.state[ZR_INNER] == ZR_CUT;
    /* Only the model knows whether it zeroes its gradients between the micro-batches of a step. */
    s->reduce_each = !opt->grad_in_place || opt->grad_accum_steps == 1;
    /* A gradient that backward stores would replace the micro-batch before, so that one has to be reduced
     * first. */
    for (int32_t t = 0; t < l->n_tensors; t++)
        s->reduce_each |= l->tensors[t].overwrite && l->tensors[t].grad;
    s->n_sums = p->n_sums =
        opt->deterministic && opt->grad_accum_steps > 1 ? counter_depth(opt->grad_accum_steps) : 1;
    choose_sums(p, opt, units);
    for (int32_t u = 0; u < l->n_units; u++)
        units[u].grad_home =
            p->place.model_holds || (units[u].trainable && (units[u].sum_in_place || !s->reduce_each));
    return 0;
}

static uint64_t hash_plan(const struct zr_plan *p)
{
    const struct zr_core_spec *s = &p->spec;
    int64_t head[] = {p->world,         p->place.model_holds, p->n_states,       p->n_sums,
                      s->prefetch,      s->grad_accum_steps,  s->reduce_each,    s->reserve_largest,
                      s->n_param_slots, s->n_grad_slots,      s->gathers_updated};
    uint64_t h = XXH64(head, sizeof head, p->layout->hash);
    h = XXH64(p->place.param, sizeof p->place.param, h);
    h = XXH64(p->place.grad, sizeof p->place.grad, h);
    h = XXH64(p->place.state, sizeof p->place.state, h);
    h = XXH64(p->bytes, sizeof p->bytes, h);
    h = XXH64(p->states_of, sizeof p->states_of, h);
    h = XXH64(s->param_slot_bytes, (size_t)s->n_param_slots * sizeof *s->param_slot_bytes, h);
    h = XXH64(s->grad_slot_bytes, (size_t)s->n_grad_slots * sizeof *s->grad_slot_bytes, h);
    for (int32_t i = 0; i < p->spec.n_order; i++) {
        const struct zr_call *c = &p->spec.order[i];
        uint64_t word = (uint64_t)(uint32_t)c->unit << 2 | (uint64_t)c->backward << 1 | c->is_end;
        h = XXH64(&word, sizeof word, h);
    }
    return h;
}

static int set_placement(struct zr_plan *p, const struct zr_layout *l, const struct zr_options *opt)
{
    const int32_t size[ZR_AXES] = {[ZR_INNER] = l->world, [ZR_OUTER] = 1};
    int err = zr_placement_make(opt->stage, opt->hybrid, opt->grad_in_place, size[ZR_INNER], size[ZR_OUTER],
                                &p->place);
    for (int a = 0; a < ZR_AXES; a++)
        p->hop[a] =
            (struct zr_hop){.size = size[a], .sums_whole = size[a] > 1 && p->place.state[a] == ZR_WHOLE};
    return err;
}

/* Every part has room, and what lies in slots of an arena lies inside it. */
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
    struct zr_plan *p = calloc(1, sizeof *p);
    if (!p)
        return zr_fail(ZR_ERR_NOMEM, "no memory for a plan");
    int err = set_placement(p, l, opt);
    if (err) {
        free(p);
        return err;
    }
    err = ZR_ERR_NOMEM;
    p->layout = l;
    p->world = l->world;
    p->param_at = calloc((size_t)l->n_units, sizeof *p->param_at);
    p->grad_at = calloc((size_t)l->n_units, sizeof *p->grad_at);
    p->resident = calloc((size_t)l->n_units, sizeof *p->resident);
    p->master_at = calloc((size_t)l->n_flats, sizeof *p->master_at);
    count_states(p, opt);
    p->state_at = calloc((size_t)(p->n_states * (int64_t)l->n_flats + 1), sizeof *p->state_at);
    p->sum_in_place = calloc((size_t)l->n_units, sizeof *p->sum_in_place);
    p->sum_at = calloc((size_t)l->n_flats, sizeof *p->sum_at);
    if (!p->param_at || !p->grad_at || !p->resident || !p->master_at || !p->state_at || !p->sum_in_place ||
        !p->sum_at) {
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
    place_grads(p, opt->reduce_scratch_bytes);
    place_state(p, opt);
    for (int i = 0; i < ZR_MEM_COUNT; i++)
        p->total_bytes += p->bytes[i];
    err = measure(p, opt);
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
