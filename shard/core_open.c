/* SPDX-License-Identifier: Apache-2.0 */
/* core_open.c: a core is made: what lies where in its block, and what it starts with; see core.h. */
#include "shard/core_inside.h"

#include <string.h>

/* Room for the order and the recording: four times the declared step, and never tight for small models. A step
 * of more calls is recorded by its first micro-batch. */
static int32_t capacity(const struct zr_core_spec *s)
{
    int64_t repeats = s->order_of_step ? 1 : zr_max(s->grad_accum_steps, s->max_grad_accum_steps);
    int64_t step = s->n_order * repeats * 4 + 256, micro = (int64_t)s->n_order * 4 + 256;
    int64_t n = zr_min(step, zr_max(micro, 1 << 17));
    return (int32_t)zr_min(n, 1 << 24);
}

static void place(struct zr_core *c, const struct zr_core_spec *s)
{
    uint32_t at = (uint32_t)sizeof *c;
    c->cap = capacity(s);
#define PLACE(field, type, n)                                                                                \
    (c->field = (at + 15) & ~15u, at = c->field + (uint32_t)sizeof(type) * (uint32_t)(n))
    PLACE(units_at, struct unit, s->n_units);
    PLACE(pslots_at, struct pslot, s->n_param_slots);
    PLACE(gslots_at, struct gslot, s->n_grad_slots);
    PLACE(order_at, struct zr_call, c->cap);
    PLACE(rec_at, struct zr_call, c->cap);
    PLACE(next_at, int32_t, c->cap);
    PLACE(begins_at, int32_t, c->cap);
    PLACE(by_size_at, int32_t, s->n_param_slots);
    PLACE(keys_at, uint64_t, 2 * zr_core_leaves(s->n_param_slots));
    PLACE(places_at, int32_t, c->cap);
    PLACE(taken_at, int32_t, s->n_param_slots);
#undef PLACE
    c->total = (at + 15) & ~15u;
}

size_t zr_core_bytes(const struct zr_core_spec *s)
{
    struct zr_core c;
    place(&c, s);
    return c.total;
}

/* A step: per unit at most hide, reduce, reduce-outer, fold or leave-out, update, gather-outer, gather,
 * gather ahead, wait, use-grad; and the norm. */
int32_t zr_core_most_actions(int32_t n_units)
{
    return 10 * n_units + 16;
}

int32_t zr_core_max_actions(const struct zr_core_spec *s)
{
    return zr_core_most_actions(s->n_units);
}

static void copy_units(struct zr_core *c, const struct zr_core_spec *s)
{
    for (int32_t u = 0; u < c->n_units; u++) {
        const struct zr_core_unit_spec *from = &s->units[u];
        struct unit *to = &units(c)[u];
        to->param_bytes = from->param_bytes;
        to->grad_bytes = from->grad_bytes;
        to->resident = from->resident;
        to->trainable = from->trainable;
        to->sum_in_place = from->sum_in_place;
        to->grad_home = from->grad_home || from->sum_in_place || s->model_holds;
        to->pslot = to->gslot = to->first_use = -1;
        to->next_use = NEVER;
        c->n_sharded += !from->resident;
        c->n_trainable += from->trainable;
    }
    for (int32_t i = 0; i < s->n_order; i++)
        units(c)[s->order[i].unit].uses += s->order[i].backward && !s->order[i].is_end;
    for (int32_t u = 0; u < c->n_units; u++) {
        if (s->order_of_step)
            units(c)[u].uses = (units(c)[u].uses + c->accum - 1) / c->accum;
        units(c)[u].uses += units(c)[u].uses == 0;
    }
}

static void open_slots(struct zr_core *c, const struct zr_core_spec *s)
{
    for (int32_t i = 0; i < c->n_pslots; i++) {
        int64_t bytes = s->param_slot_bytes[i];
        pslots(c)[i].bytes = bytes;
        pslots(c)[i].unit = -1;
        c->second = bytes > c->reserved ? c->reserved : bytes > c->second ? bytes : c->second;
        c->reserved = bytes > c->reserved ? bytes : c->reserved;
    }
    if (!s->reserve_largest || c->reserved == c->second)
        c->reserved = 0;
    c->n_leaves = zr_core_leaves(c->n_pslots);
    zr_core_sort_slots(c);
    c->n_small = c->reserved ? zr_core_first_fit(c, c->second + 1) : c->n_pslots;
    for (int32_t u = 0; u < c->n_units; u++)
        units(c)[u].fits = zr_core_first_fit(c, units(c)[u].param_bytes);
    for (int32_t i = 0; i < c->n_gslots; i++) {
        gslots(c)[i].bytes = s->grad_slot_bytes[i];
        gslots(c)[i].unit = -1;
    }
}

struct zr_core *zr_core_init(void *mem, const struct zr_core_spec *s)
{
    struct zr_core *c = mem;
    /* Zero, then field by field: so padding is zero, and the core comparable by bytes. */
    memset(mem, 0, zr_core_bytes(s));
    place(c, s);
    c->n_units = s->n_units;
    c->n_pslots = s->n_param_slots;
    c->n_gslots = s->n_grad_slots;
    c->prefetch = s->prefetch;
    c->accum = s->grad_accum_steps;
    c->n_sums = s->n_sums;
    c->model_holds = s->model_holds;
    c->gathers_updated = s->gathers_updated;
    c->outer = s->outer;
    c->outer_each = s->outer_each;
    c->outer_gathers = s->outer_gathers;
    c->n_partial_slots = s->n_partial_slots;
    c->reduce_each = s->reduce_each;
    c->order_of_step = s->order_of_step;
    c->in_stages = s->in_stages;
    c->last_reduced = -1;
    copy_units(c, s);
    open_slots(c, s);
    if (s->n_order && s->n_order <= c->cap) {
        memcpy(order(c), s->order, (size_t)s->n_order * sizeof *s->order);
        c->period = s->n_order;
        c->n_order = s->order_of_step ? s->n_order : (int64_t)s->n_order * c->accum;
    }
    zr_core_index_order(c);
    return c;
}
