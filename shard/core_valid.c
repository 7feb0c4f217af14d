/* SPDX-License-Identifier: Apache-2.0 */
/* core_valid.c: checks the core's state between two calls. Compiled only in builds with asserts. */
#include "shard/core_inside.h"

static bool valid_slot(const struct zr_core *c, int32_t i)
{
    const struct pslot *s = &pslots(c)[i];
    const struct unit *u = s->unit >= 0 && s->unit < c->n_units ? &units(c)[s->unit] : NULL;
    int32_t n_open = u && !c->all ? n_holding(u) : 0;
    uint64_t key = s->pins ? 0 : u ? (uint64_t)u->next_use + 1 : UINT64_MAX;
    return (u || s->unit == -1) && s->pins == n_open && s->rank >= 0 && s->rank < c->n_pslots &&
           by_size(c)[s->rank] == i && keys(c)[c->n_leaves + s->rank] == key &&
           (!u || (u->pslot == i && !u->resident && u->param_bytes <= s->bytes));
}

static bool has_open_grad(const struct unit *u)
{
    return u->open[ZERO_BACKWARD] || u->open[ZERO_BACKWARD_WEIGHT];
}

static bool valid_grad_slot(const struct zr_core *c, int32_t i)
{
    const struct gslot *s = &gslots(c)[i];
    if (s->unit == -1)
        return true;
    const struct unit *u = s->unit >= 0 && s->unit < c->n_units ? &units(c)[s->unit] : NULL;
    return u && u->gslot == i && has_open_grad(u) && u->trainable && u->grad_bytes <= s->bytes;
}

static bool needs_grad_slot(const struct unit *u)
{
    return has_open_grad(u) && u->trainable && !u->grad_home;
}

static bool valid_unit(const struct zr_core *c, int32_t i)
{
    const struct unit *u = &units(c)[i];
    bool slot_is_its =
             u->pslot == -1 || (u->pslot >= 0 && u->pslot < c->n_pslots && pslots(c)[u->pslot].unit == i),
         grad_slot_is_its = !needs_grad_slot(u) ||
                            (u->gslot >= 0 && u->gslot < c->n_gslots && gslots(c)[u->gslot].unit == i);
    /* Contributions are added in place, without a counter. */
    bool one_sum = u->sum_in_place || (c->outer && !c->outer_each);
    return slot_is_its && grad_slot_is_its && u->n_contrib >= 0 && u->uses >= 1 && u->n_bwd >= 0 &&
           u->n_bwd <= zr_core_most_brackets(c, u) && (!u->sum_in_place || u->n_contrib <= 1) &&
           u->depth <= c->n_sums && u->depth <= u->n_contrib && (!one_sum || u->depth == 0) &&
           (one_sum || !u->n_contrib || u->depth > 0) && (u->trainable || !u->n_contrib) &&
           (!u->dirty || !c->model_holds || u->n_bwd);
}

/* Each node of the tree over the slots has the larger key of the two below it. */
static bool valid_tree(const struct zr_core *c)
{
    bool valid = true;
    for (int32_t i = 1; valid && i < c->n_leaves; i++)
        valid = keys(c)[i] == (keys(c)[2 * i] > keys(c)[2 * i + 1] ? keys(c)[2 * i] : keys(c)[2 * i + 1]);
    return valid;
}

static bool valid_counts(const struct zr_core *c)
{
    int32_t n_open = 0, n_open_bwd = 0;
    for (int32_t i = 0; i < c->n_units; i++) {
        const struct unit *u = &units(c)[i];
        n_open += n_holding(u) + u->open[ZERO_BACKWARD_WEIGHT];
        n_open_bwd += u->open[ZERO_BACKWARD] + u->open[ZERO_BACKWARD_WEIGHT];
    }
    return n_open == c->n_open && n_open_bwd == c->n_open_bwd && (!c->all || !n_open_bwd) &&
           (!c->complete || !n_open_bwd) && c->n_micro >= 0 && c->n_micro < c->accum &&
           c->last_reduced >= -1 && c->last_reduced < c->n_units;
}

static bool valid_place(const struct zr_core *c)
{
    return c->base >= 0 && c->pos >= c->base && c->pos <= c->n_order && c->ahead >= 0 &&
           c->ahead <= c->n_begins && c->period <= c->cap && c->n_rec >= 0 &&
           (c->period ? c->base % c->period == 0 && c->pos - c->base < c->period : c->n_order == 0);
}

bool zr_core_valid(const struct zr_core *c)
{
    /* With many units it checks only some calls, because a check takes linear time and a call logarithmic
     * time. */
    if (c->counts.n_calls % (1 + c->n_units / 64))
        return true;
    bool valid = valid_counts(c) && valid_place(c) && valid_tree(c);
    for (int32_t i = 0; valid && i < c->n_units; i++)
        valid = valid_unit(c, i);
    for (int32_t i = 0; valid && i < c->n_pslots; i++)
        valid = valid_slot(c, i);
    for (int32_t i = 0; valid && i < c->n_gslots; i++)
        valid = valid_grad_slot(c, i);
    return valid;
}
