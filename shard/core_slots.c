/* SPDX-License-Identifier: Apache-2.0 */
/* core_slots.c: which unit lies in which slot. A parameter slot is chosen by its size and by the next use of
 * the unit in it. A gradient slot is chosen by its size and by how long it has been free. */
#include "shard/core_inside.h"

/* ---- slots by size, and how good each is to be filled anew ---- */

int32_t zr_core_leaves(int32_t n_slots)
{
    int32_t n = 1;
    while (n < n_slots)
        n *= 2;
    return n;
}

/* How good the slot is to be filled anew: 0 if it has a unit with an open bracket, most if it is empty. */
static uint64_t key_of(const struct zr_core *c, const struct pslot *s)
{
    if (s->pins)
        return 0;
    return s->unit < 0 ? UINT64_MAX : (uint64_t)units(c)[s->unit].next_use + 1;
}

void zr_core_touch_slot(struct zr_core *c, int32_t slot)
{
    uint64_t *k = keys(c);
    int32_t i = c->n_leaves + pslots(c)[slot].rank;
    for (k[i] = key_of(c, &pslots(c)[slot]); i > 1; i /= 2) {
        uint64_t best = k[i] > k[i ^ 1] ? k[i] : k[i ^ 1];
        if (k[i / 2] == best)
            break;
        k[i / 2] = best;
    }
}

static bool smaller_slot(const struct zr_core *c, int32_t a, int32_t b)
{
    int64_t x = pslots(c)[a].bytes, y = pslots(c)[b].bytes;
    return x < y || (x == y && a < b);
}

static void sift_down(struct zr_core *c, int32_t at, int32_t n)
{
    int32_t *heap = by_size(c), moved = heap[at];
    for (int32_t child = 2 * at + 1; child < n; child = 2 * at + 1) {
        child += child + 1 < n && smaller_slot(c, heap[child], heap[child + 1]);
        if (!smaller_slot(c, moved, heap[child]))
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moved;
}

/* Sorts with a heap, because qsort may allocate. */
void zr_core_sort_slots(struct zr_core *c)
{
    int32_t *rank = by_size(c), n = c->n_pslots;
    for (int32_t i = 0; i < n; i++)
        rank[i] = i;
    for (int32_t i = n / 2; i-- > 0;)
        sift_down(c, i, n);
    for (int32_t i = n - 1; i > 0; i--) {
        int32_t largest = rank[0];
        rank[0] = rank[i];
        rank[i] = largest;
        sift_down(c, 0, i);
    }
    for (int32_t i = 0; i < n; i++) {
        pslots(c)[rank[i]].rank = i;
        zr_core_touch_slot(c, rank[i]);
    }
}

int32_t zr_core_first_fit(const struct zr_core *c, int64_t bytes)
{
    int32_t lo = 0, hi = c->n_pslots;
    while (lo < hi) {
        int32_t mid = (lo + hi) / 2;
        if (pslots(c)[by_size(c)[mid]].bytes < bytes)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* ---- parameter slots ---- */

/* Returns the slot with the largest key among [first, last) in the order of size, the smallest of several.
 * -1: all of them have units with open brackets. */
static int32_t best_slot(const struct zr_core *c, int32_t first, int32_t last)
{
    const uint64_t *k = keys(c);
    int32_t left = 0, right = 0; /* the best nodes so far, from either side */
    for (int32_t lo = first + c->n_leaves, hi = last + c->n_leaves; lo < hi; lo /= 2, hi /= 2) {
        if (lo % 2) {
            left = k[lo] > k[left] ? lo : left;
            lo++;
        }
        if (hi % 2) {
            hi--;
            right = k[hi] >= k[right] ? hi : right;
        }
    }
    int32_t best = k[right] > k[left] ? right : left;
    if (k[best] == 0)
        return -1;
    while (best < c->n_leaves)
        best = k[2 * best] == k[best] ? 2 * best : 2 * best + 1;
    return by_size(c)[best - c->n_leaves];
}

int32_t zr_core_pick_param(const struct zr_core *c, struct zr_slot_range r, int64_t position)
{
    int32_t slot = best_slot(c, r.first, r.end);
    if (slot < 0 || pslots(c)[slot].unit < 0 || position == NEVER)
        return slot;
    return units(c)[pslots(c)[slot].unit].next_use > position ? slot : -1;
}

void zr_core_pin(struct zr_core *c, int32_t slot, int by)
{
    if (slot < 0)
        return;
    pslots(c)[slot].pins += by;
    zr_core_touch_slot(c, slot);
}

void zr_core_empty_slot(struct zr_core *c, int32_t slot)
{
    struct pslot *s = &pslots(c)[slot];
    units(c)[s->unit].pslot = -1;
    s->unit = -1;
    zr_core_touch_slot(c, slot);
}

void zr_core_gather(struct zr_core *c, int32_t u, int32_t slot, struct zr_action *out, int32_t *n)
{
    if (slot >= 0) {
        struct pslot *s = &pslots(c)[slot];
        if (units(c)[u].pslot >= 0)
            zr_core_empty_slot(c, units(c)[u].pslot);
        if (s->unit >= 0)
            units(c)[s->unit].pslot = -1;
        s->unit = u;
        units(c)[u].pslot = slot;
        zr_core_touch_slot(c, slot);
    }
    units(c)[u].gathered = true;
    zr_core_emit(out, n, ZR_ACT_GATHER, u, slot);
}

/* ---- sizes of slots for nested brackets ----
 *
 * A small unit that lies in a large slot while its bracket is open can leave a large unit without a slot. If
 * that can happen in the order, each bracket of the order is given a size of slot. One pass over the order,
 * brackets alone, gives each the smallest free slot that fits. In every step a bracket then takes a slot of
 * that size, so it finds one, whatever evaluations, drops, writes and gathers before it have left where.
 *
 * This is not done where the largest slot is reserved: no order was declared then, and any two units can be
 * open at once, in every order. */

/* Returns the first slot, in the order of size, that is larger than slot `first`. */
static int32_t end_of_size(const struct zr_core *c, int32_t first)
{
    return zr_core_first_fit(c, pslots(c)[by_size(c)[first]].bytes + 1);
}

/* Whether units with open brackets could be in every slot that is large enough for a bracket of the order. */
static bool can_run_out(struct zr_core *c)
{
    int32_t n_open = 0;
    bool can = false;
    for (int32_t u = 0; u < c->n_units; u++)
        units(c)[u].n_placed = 0;
    for (int32_t i = 0; i < c->period; i++) {
        const struct zero_call *call = &order(c)[i];
        struct unit *u = &units(c)[call->unit];
        if (u->resident || !zr_phase_has_params(call->phase))
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

/* Returns the smallest size that has a free slot and fits u, as the first slot of that size. -1: none. */
static int32_t free_size(const struct zr_core *c, const struct unit *u)
{
    for (int32_t first = u->fits; first < c->n_pslots; first = end_of_size(c, first))
        if (taken(c)[first] < end_of_size(c, first) - first)
            return first;
    return -1;
}

/* Returns false if a bracket finds no slot. */
static bool place_brackets(struct zr_core *c)
{
    for (int32_t i = 0; i < c->n_pslots; i++)
        taken(c)[i] = 0;
    for (int32_t i = 0; i < c->period; i++) {
        const struct zero_call *call = &order(c)[i];
        struct unit *u = &units(c)[call->unit];
        if (u->resident || !zr_phase_has_params(call->phase))
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
        bracket_sizes(c)[i] = u->placed;
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
    int32_t first = bracket_sizes(c)[at % c->period];
    return (struct zr_slot_range){first, end_of_size(c, first)};
}

bool zr_core_in_range(const struct zr_core *c, struct zr_slot_range r, int32_t slot)
{
    return slot >= 0 && pslots(c)[slot].rank >= r.first && pslots(c)[slot].rank < r.end;
}

/* ---- gathering ahead ---- */

/* The units that a prefetch has counted. The last few suffice, because uses of one unit lie together. */
struct counted {
    int32_t last[8], n;
};

static bool is_counted(const struct counted *k, int32_t unit)
{
    bool again = false;
    for (int32_t j = k->n > 8 ? k->n - 8 : 0; j < k->n; j++)
        again |= k->last[j % 8] == unit;
    return again;
}

/* Gathers the unit that begins at position `at` into a slot of that bracket, unless it is there. Returns
 * false if no slot may be taken. */
static bool gather_ahead(struct zr_core *c, int32_t unit, int64_t at, struct zr_action *out, int32_t *n)
{
    struct unit *u = &units(c)[unit];
    struct zr_slot_range range = zr_core_slots_at(c, at, u);
    if (zr_core_in_range(c, range, u->pslot))
        return true;
    int32_t slot = zr_core_pick_param(c, range, at);
    if (slot < 0)
        return false;
    zr_core_gather(c, unit, slot, out, n);
    return true;
}

/* Looks at one period at most, which has every unit of the order. */
void zr_core_prefetch(struct zr_core *c, struct zr_action *out, int32_t *n)
{
    if (c->n_sharded == 0 || c->prefetch == 0)
        return;
    struct counted counted = {.n = 0};
    int32_t k = c->ahead;
    int64_t base = c->base;
    for (int32_t i = 0; i < c->n_begins && counted.n < c->prefetch; i++, k++) {
        if (k == c->n_begins) {
            k = 0;
            base += c->period;
        }
        int64_t at = base + begins(c)[k];
        if (at >= c->n_order)
            return;
        int32_t unit = order(c)[begins(c)[k]].unit;
        const struct unit *u = &units(c)[unit];
        if (n_holding(u) || is_counted(&counted, unit))
            continue;
        counted.last[counted.n++ % 8] = unit;
        if (!gather_ahead(c, unit, at, out, n))
            return;
    }
}

/* ---- gradient slots ---- */

/* Returns the smallest slot that fits, and of several the one that has been free for longest. */
int32_t zr_core_pick_grad(const struct zr_core *c, int64_t bytes)
{
    int32_t best = -1;
    for (int32_t i = 0; i < c->n_gslots; i++) {
        const struct gslot *s = &gslots(c)[i];
        if (s->unit >= 0 || s->bytes < bytes)
            continue;
        if (best < 0 || s->bytes < gslots(c)[best].bytes ||
            (s->bytes == gslots(c)[best].bytes && s->released < gslots(c)[best].released))
            best = i;
    }
    return best;
}

void zr_core_contents(const struct zr_core *c, int32_t *out)
{
    for (int32_t i = 0; i < c->n_pslots; i++)
        out[i] = pslots(c)[i].unit;
    int32_t *free_for = out + c->n_pslots;
    for (int32_t i = 0; i < c->n_gslots; i++) {
        int32_t at = i;
        for (; at > 0 && gslots(c)[free_for[at - 1]].released > gslots(c)[i].released; at--)
            free_for[at] = free_for[at - 1];
        free_for[at] = i;
    }
}
