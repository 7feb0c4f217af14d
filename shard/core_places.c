/* SPDX-License-Identifier: Apache-2.0 */
/* core_places.c: the sizes of slots that nested brackets take; see core.h.
 *
 * A small unit that lies in a large slot while its bracket is open can leave a large one without a slot.
 * Where an order could come to that, its brackets are given sizes: one pass over the order, brackets alone,
 * in which each takes the smallest slot that fits and is free. As brackets then are in the sizes of that
 * pass, each finds one there, whatever was evaluated, dropped, written or gathered before and wherever that
 * left units.
 *
 * Not where the largest slot is reserved: that is so where no order was declared, and gives a slot to each of
 * any two that are open at once, in another order than the learned one, too. */
#include "shard/core_inside.h"

/* The first slot by size that is larger than slot `first` by size, which is the first of its size. */
static int32_t end_of_size(const struct zr_core *c, int32_t first)
{
    return zr_core_first_fit(c, pslots(c)[by_size(c)[first]].bytes + 1);
}

/* Open brackets could hold every slot that a bracket of the order fits. */
static bool can_run_out(struct zr_core *c)
{
    int32_t n_open = 0;
    bool can = false;
    for (int32_t u = 0; u < c->n_units; u++)
        units(c)[u].n_placed = 0;
    for (int32_t i = 0; i < c->period; i++) {
        const struct zr_call *call = &order(c)[i];
        struct unit *u = &units(c)[call->unit];
        if (u->resident || !zr_call_needs_param(call))
            continue;
        if (call->is_end) {
            n_open -= --u->n_placed == 0;
        } else {
            n_open += u->n_placed++ == 0;
            can |= n_open > c->n_pslots - u->fits;
        }
    }
    return can;
}

/* The smallest size of which a slot is free and holds u, as its first slot by size; -1: there is none. */
static int32_t free_size(const struct zr_core *c, const struct unit *u)
{
    for (int32_t first = u->fits; first < c->n_pslots; first = end_of_size(c, first))
        if (taken(c)[first] < end_of_size(c, first) - first)
            return first;
    return -1;
}

/* False: a bracket finds no slot. */
static bool place_brackets(struct zr_core *c)
{
    for (int32_t i = 0; i < c->n_pslots; i++)
        taken(c)[i] = 0;
    for (int32_t i = 0; i < c->period; i++) {
        const struct zr_call *call = &order(c)[i];
        struct unit *u = &units(c)[call->unit];
        if (u->resident || !zr_call_needs_param(call))
            continue;
        if (call->is_end) {
            if (--u->n_placed == 0)
                taken(c)[u->placed]--;
            continue;
        }
        if (u->n_placed++ == 0) {
            u->placed = free_size(c, u);
            if (u->placed < 0)
                return false;
            taken(c)[u->placed]++;
        }
        places(c)[i] = u->placed;
    }
    return true;
}

void zr_core_place_brackets(struct zr_core *c)
{
    c->sized = !c->reserved && can_run_out(c);
    c->no_room = c->sized && !place_brackets(c);
    c->sized &= !c->no_room;
}

bool zr_core_has_room(const struct zr_core *c)
{
    return !c->no_room;
}

struct zr_slot_range zr_core_slots_at(const struct zr_core *c, int64_t at, const struct unit *u)
{
    bool is_small = c->reserved && u->param_bytes <= c->second;
    if (!c->sized || at < 0)
        return (struct zr_slot_range){u->fits, is_small ? c->n_small : c->n_pslots};
    int32_t first = places(c)[at % c->period];
    return (struct zr_slot_range){first, end_of_size(c, first)};
}

bool zr_core_in_range(const struct zr_core *c, struct zr_slot_range r, int32_t slot)
{
    return slot >= 0 && pslots(c)[slot].rank >= r.first && pslots(c)[slot].rank < r.end;
}
