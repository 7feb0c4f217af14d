/* core.c: the schedule core; see core.h. */
#include "shard/core.h"
#include "shard/layout.h"

#include <stdio.h>
#include <string.h>

#define NEVER INT64_MAX

/* Blocks follow the header in one allocation; offsets, not pointers, so that the whole is plain data. */
struct zr_core {
    int32_t n_units, n_pslots, n_gslots, stage, world, prefetch, accum, n_sums;
    int32_t n_sharded; /* units that need slots */
    bool grad_resident, reduce_each;
    int64_t
        reserved; /* bytes of the one largest parameter slot when it is kept for units that need it, else 0 */
    int64_t second; /* bytes of the largest slot but that one */

    int32_t n_open;       /* brackets */
    int32_t n_open_bwd;   /* of them in backward */
    int32_t last_reduced; /* resident gradients are being reduced since they were last returned, this unit's
                             last; -1: none are */
    int32_t n_micro;      /* zero_micro calls since the step */
    bool any_backward;    /* a backward bracket ended since the step */
    bool complete;        /* the step's gradients are reduced, and its norm was asked for */
    bool all;             /* every parameter is gathered elsewhere; brackets need nothing */
    int32_t n_trainable;
    int32_t n_used;    /* trainable units whose backward bracket has ended since the step */
    int32_t n_overrun; /* those of them that had at least twice the passes that a step has */
    uint64_t clock;    /* counts grants and releases of gradient slots: the oldest release is reused first */
    uint64_t hash;
    struct zr_core_counts counts;

    /* The order being followed: `period` calls (a micro-batch, where micro-batches are alike) again and
     * again, n_order in all. pos: the call expected next, base: where its period starts. */
    int64_t n_order, pos, base;
    int32_t period;
    int32_t n_begins, ahead; /* begins of sharded units in a period; the first of them at or after pos */
    bool strayed, uneven; /* this step's calls left the order; the order's backward passes are not as many for
                             every micro-batch */

    /* The calls of this step, n_rec: the first n_kept of them again and again. */
    int64_t n_rec;
    int32_t n_kept, rec_at_call; /* rec_at_call: n_rec modulo n_kept, where calls repeat */
    int32_t cap;                 /* room for calls, in the order and in the recording */
    bool restarted, rec_full;    /* restarted: the model went back to its first call before any backward */

    int32_t n_leaves, n_small; /* of the tree over slots; slots that are not the reserved one */

    uint32_t units_at, pslots_at, gslots_at, order_at, rec_at, next_at, begins_at, borders_at, by_size_at,
        keys_at, total;
};

struct unit {
    int64_t param_bytes, grad_bytes;
    int32_t pslot;     /* slot that holds it, -1 none (or resident) */
    int32_t gslot;     /* gradient slot of its backward bracket, open or last; -1: it needs none */
    int32_t n_contrib; /* contributions reduced this step */
    int32_t n_bwd;     /* backward brackets ended this step */
    int32_t uses;      /* backward brackets in a micro-batch, as declared; at least 1 */
    int32_t first_use; /* position in the period of its first begin, -1: none */
    int64_t next_use;  /* position in the order of its next begin, NEVER: none; sharded units only */
    int32_t fits;      /* slots by size: the first that can hold it */
    int32_t n_each;    /* backward passes in each micro-batch of the order */
    int32_t n_passed;  /* in the order so far; of mark_micro_batches */
    uint8_t depth;     /* sums in use */
    bool resident, trainable, sum_in_place;
    bool open_fwd, open_bwd;
    bool used_fwd, used_bwd; /* the model brackets it, as it has once: around every use or around none */
    bool pending;            /* its resident gradient holds something not yet reduced */
    bool dirty;              /* its resident gradient was reduced and must be zeroed before it is added to */
};

struct pslot {
    int64_t bytes;
    int32_t unit; /* -1: empty */
    int32_t pins;
    int32_t rank; /* by size; among equals by index */
};

struct gslot {
    int64_t bytes;
    int32_t unit; /* -1: free */
    uint64_t released;
};

/* Position i of the period begins unit u: next[i] is the next begin of u in it, or -1. It ends a bracket:
 * next[i] is 1 if that ends a micro-batch, else 0. */

static struct unit *units(const struct zr_core *c)
{
    return (struct unit *)((char *)c + c->units_at);
}

static struct pslot *pslots(const struct zr_core *c)
{
    return (struct pslot *)((char *)c + c->pslots_at);
}

static struct gslot *gslots(const struct zr_core *c)
{
    return (struct gslot *)((char *)c + c->gslots_at);
}

static struct zr_call *order(const struct zr_core *c)
{
    return (struct zr_call *)((char *)c + c->order_at);
}

static struct zr_call *recorded(const struct zr_core *c)
{
    return (struct zr_call *)((char *)c + c->rec_at);
}

static int32_t *next_begin(const struct zr_core *c)
{
    return (int32_t *)((char *)c + c->next_at);
}

/* In-period positions of the begins of sharded units. */
static int32_t *begins(const struct zr_core *c)
{
    return (int32_t *)((char *)c + c->begins_at);
}

static int32_t *borders(const struct zr_core *c)
{
    return (int32_t *)((char *)c + c->borders_at);
}

/* The slot of a rank by size. */
static int32_t *by_size(const struct zr_core *c)
{
    return (int32_t *)((char *)c + c->by_size_at);
}

/* A binary tree over the slots by size, node 1 its root, leaves from n_leaves on: how good the best slot
 * below a node is to be filled anew. Node 0 is none. */
static uint64_t *keys(const struct zr_core *c)
{
    return (uint64_t *)((char *)c + c->keys_at);
}

/* Room for the order and the recording: four times the declared step, and never tight for small models. Of
 * steps of very many calls only such are learned whose calls repeat. */
static int32_t capacity(const struct zr_core_spec *s)
{
    int64_t step = (int64_t)s->n_order * s->grad_accum_steps * 4 + 256, micro = (int64_t)s->n_order * 4 + 256;
    int64_t n = zr_min(step, zr_max(micro, 1 << 17));
    return (int32_t)zr_min(n, 1 << 24);
}

static int32_t leaves(int32_t n_slots)
{
    int32_t n = 1;
    while (n < n_slots)
        n *= 2;
    return n;
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
    PLACE(borders_at, int32_t, c->cap);
    PLACE(by_size_at, int32_t, s->n_param_slots);
    PLACE(keys_at, uint64_t, 2 * leaves(s->n_param_slots));
#undef PLACE
    c->total = (at + 15) & ~15u;
}

size_t zr_core_bytes(const struct zr_core_spec *s)
{
    struct zr_core c;
    place(&c, s);
    return c.total;
}

int32_t zr_core_max_actions(const struct zr_core_spec *s)
{
    /* A step: per unit at most hide, reduce or no-grad, fold, update, gather, use, use-grad; and the norm. */
    return 8 * s->n_units + 16;
}

/* ---- the order ---- */

/* Marks the calls of the order that end a micro-batch: no backward bracket is open any more, and every unit
 * has had the same part of its backward passes of the step. */
static void mark_micro_batches(struct zr_core *c)
{
    int32_t n_all = 0, n_done = 0,
            n_open = 0; /* units with gradients; micro-batches; open backward brackets */
    int64_t repeats = c->period ? c->n_order / c->period : 0;
    for (int32_t u = 0; u < c->n_units; u++)
        units(c)[u].n_each = units(c)[u].n_passed = 0;
    for (int32_t i = 0; i < c->period; i++)
        units(c)[order(c)[i].unit].n_each += order(c)[i].backward && order(c)[i].is_end;
    c->uneven = repeats * c->period != c->n_order;
    for (int32_t u = 0; u < c->n_units; u++) {
        struct unit *x = &units(c)[u];
        int64_t n_step = x->trainable ? x->n_each * repeats : 0;
        c->uneven |= n_step % c->accum != 0;
        x->n_each = (int32_t)(n_step / c->accum);
        n_all += x->n_each > 0;
    }
    int32_t n_behind = n_all; /* units that lack passes of the micro-batch at hand */
    for (int32_t i = 0; i < c->period; i++) {
        const struct zr_call *call = &order(c)[i];
        struct unit *x = &units(c)[call->unit];
        if (call->backward)
            n_open += call->is_end ? -1 : 1;
        if (!call->is_end)
            continue;
        if (call->backward && x->n_each > 0) {
            int64_t due = (int64_t)x->n_each * (n_done + 1);
            n_behind -= ++x->n_passed == due;
            c->uneven |= x->n_passed > due;
        }
        next_begin(c)[i] = n_behind == 0 && n_open == 0;
        if (next_begin(c)[i]) {
            n_behind = n_all;
            n_done++;
        }
    }
    c->uneven |=
        n_all > 0 && n_done * repeats != c->accum; /* the period is no whole number of micro-batches */
}

/* A slot's key has changed: an open bracket holds it (0), a unit that is used then is in it, or none is. */
static void touch_slot(struct zr_core *c, int32_t slot)
{
    const struct pslot *s = &pslots(c)[slot];
    uint64_t *k = keys(c), key = 0;
    if (!s->pins)
        key = s->unit < 0 ? UINT64_MAX : (uint64_t)units(c)[s->unit].next_use + 1;
    int32_t i = c->n_leaves + s->rank;
    for (k[i] = key; i > 1; i /= 2) {
        uint64_t best = k[i] > k[i ^ 1] ? k[i] : k[i ^ 1];
        if (k[i / 2] == best)
            break;
        k[i / 2] = best;
    }
}

static void set_next_use(struct zr_core *c, struct unit *u, int64_t next)
{
    u->next_use = next;
    if (u->pslot >= 0)
        touch_slot(c, u->pslot);
}

/* The call expected next is the first of the period that starts at base. */
static void start_period(struct zr_core *c, int64_t base)
{
    c->pos = c->base = base;
    c->ahead = 0;
    for (int32_t i = 0; c->n_sharded && i < c->n_units; i++) {
        struct unit *u = &units(c)[i];
        if (!u->resident)
            set_next_use(c, u, u->first_use >= 0 && base < c->n_order ? base + u->first_use : NEVER);
    }
}

/* Goes on to the call after pos. */
static void pass_call(struct zr_core *c)
{
    int32_t i = (int32_t)(c->pos - c->base);
    const struct zr_call *call = &order(c)[i];
    struct unit *u = &units(c)[call->unit];
    if (!call->is_end && !u->resident) {
        int32_t next = next_begin(c)[i];
        int64_t at = next >= 0 ? c->base + next : c->base + c->period + u->first_use;
        set_next_use(c, u, at < c->n_order ? at : NEVER);
        c->ahead++;
    }
    if (++c->pos - c->base == c->period) {
        c->base = c->pos;
        c->ahead = 0;
    }
}

static void go_to(struct zr_core *c, int64_t pos)
{
    if (pos < c->pos)
        start_period(c, 0);
    while (c->pos < pos)
        pass_call(c);
}

/* Derives next_begin, first_use and begins from the order, and starts it. */
static void index_order(struct zr_core *c)
{
    mark_micro_batches(c);
    for (int32_t u = 0; u < c->n_units; u++)
        units(c)[u].first_use = -1;
    for (int32_t i = c->period; i-- > 0;) {
        const struct zr_call *call = &order(c)[i];
        if (call->is_end)
            continue;
        next_begin(c)[i] = units(c)[call->unit].first_use;
        units(c)[call->unit].first_use = i;
    }
    c->n_begins = 0;
    for (int32_t i = 0; i < c->period; i++)
        if (!order(c)[i].is_end && !units(c)[order(c)[i].unit].resident)
            begins(c)[c->n_begins++] = i;
    start_period(c, 0);
}

/* ---- opening ---- */

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

/* By heap: qsort may allocate. */
static void sort_slots(struct zr_core *c)
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
        touch_slot(c, rank[i]);
    }
}

/* Of the slots by size, the first of at least so many bytes. */
static int32_t first_that_fits(const struct zr_core *c, int64_t bytes)
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

struct zr_core *zr_core_init(void *mem, const struct zr_core_spec *s)
{
    struct zr_core *c = mem;
    /* Zero, then field by field: so padding is zero, and the core comparable by bytes. */
    memset(mem, 0, zr_core_bytes(s));
    place(c, s);
    c->n_units = s->n_units;
    c->n_pslots = s->n_param_slots;
    c->n_gslots = s->n_grad_slots;
    c->stage = s->stage;
    c->world = s->world;
    c->prefetch = s->prefetch;
    c->accum = s->grad_accum_steps;
    c->n_sums = s->n_sums;
    c->grad_resident = s->grad_resident;
    c->reduce_each = s->reduce_each;
    c->last_reduced = -1;
    for (int32_t u = 0; u < c->n_units; u++) {
        const struct zr_core_unit_spec *from = &s->units[u];
        struct unit *to = &units(c)[u];
        to->param_bytes = from->param_bytes;
        to->grad_bytes = from->grad_bytes;
        to->resident = from->resident;
        to->trainable = from->trainable;
        to->sum_in_place = from->sum_in_place;
        to->pslot = to->gslot = to->first_use = -1;
        to->next_use = NEVER;
        c->n_sharded += !from->resident;
        c->n_trainable += from->trainable;
    }
    for (int32_t i = 0; i < s->n_order; i++)
        units(c)[s->order[i].unit].uses += s->order[i].backward && !s->order[i].is_end;
    for (int32_t u = 0; u < c->n_units; u++)
        units(c)[u].uses += units(c)[u].uses == 0;
    for (int32_t i = 0; i < c->n_pslots; i++) {
        int64_t bytes = s->param_slot_bytes[i];
        pslots(c)[i].bytes = bytes;
        pslots(c)[i].unit = -1;
        c->second = bytes > c->reserved ? c->reserved : bytes > c->second ? bytes : c->second;
        c->reserved = bytes > c->reserved ? bytes : c->reserved;
    }
    if (!s->reserve_largest || c->reserved == c->second)
        c->reserved = 0;
    c->n_leaves = leaves(c->n_pslots);
    sort_slots(c);
    c->n_small = c->reserved ? first_that_fits(c, c->second + 1) : c->n_pslots;
    for (int32_t u = 0; u < c->n_units; u++)
        units(c)[u].fits = first_that_fits(c, units(c)[u].param_bytes);
    for (int32_t i = 0; i < c->n_gslots; i++) {
        gslots(c)[i].bytes = s->grad_slot_bytes[i];
        gslots(c)[i].unit = -1;
    }
    if (s->n_order && s->n_order <= c->cap) {
        memcpy(order(c), s->order, (size_t)s->n_order * sizeof *s->order);
        c->period = s->n_order;
        c->n_order = (int64_t)s->n_order * c->accum;
    }
    index_order(c);
    return c;
}

/* ---- following the order ---- */

static bool same_call(const struct zr_call *a, const struct zr_call *b)
{
    return a->unit == b->unit && a->backward == b->backward && a->is_end == b->is_end;
}

static bool is_expected(const struct zr_core *c, const struct zr_call *call)
{
    return c->pos < c->n_order && same_call(call, &order(c)[c->pos - c->base]);
}

/* The words that the hash takes in: a call, or one of these, which are no call. */
#define MICRO_WORD    (UINT64_C(1) << 40)
#define STEP_WORD     (UINT64_C(2) << 40)
#define SNAPSHOT_WORD (UINT64_C(3) << 40)
#define NORM_WORD     (UINT64_C(4) << 40)
#define DROP_WORD     (UINT64_C(5) << 40)
#define ALL_WORD      (UINT64_C(6) << 40)
#define RELEASE_WORD  (UINT64_C(7) << 40)

/* FNV-1a's step: cheap, and any difference stays. */
static void note(struct zr_core *c, uint64_t word)
{
    c->hash = (c->hash ^ (word + 1)) * 0x100000001b3u;
}

/* What was recorded is one forward pass, twice: an evaluation and the pass itself. One is enough. */
static void drop_repeat(struct zr_core *c)
{
    int32_t half = c->n_kept / 2;
    if (c->n_rec % 2 || c->n_kept < c->n_rec || c->rec_full)
        return;
    for (int32_t i = 0; i < half; i++)
        if (!same_call(&recorded(c)[i], &recorded(c)[half + i]))
            return;
    c->n_rec = c->n_kept = half;
}

/* The fewest of the kept calls that all of them repeat; at most all. border[i]: the longest beginning of the
 * first i + 1 calls that they end with too (Knuth, Morris and Pratt). */
static int32_t find_period(const struct zr_core *c)
{
    const struct zr_call *rec = recorded(c);
    int32_t *border = borders(c), n = c->n_kept, same = 0;
    border[0] = 0;
    for (int32_t i = 1; i < n; i++) {
        while (same > 0 && !same_call(&rec[same], &rec[i]))
            same = border[same - 1];
        same += same_call(&rec[same], &rec[i]);
        border[i] = same;
    }
    return n - same;
}

static void record(struct zr_core *c, const struct zr_call *call)
{
    if (c->rec_full)
        return;
    bool room = c->n_rec < c->cap;
    if (c->n_kept == c->n_rec && !room) {
        c->n_kept = find_period(c);
        c->rec_at_call = c->cap % c->n_kept;
    }
    if (c->n_kept == c->n_rec && room)
        recorded(c)[c->n_kept++] = *call;
    else if (same_call(call, &recorded(c)[c->rec_at_call]))
        c->rec_at_call = c->rec_at_call + 1 == c->n_kept ? 0 : c->rec_at_call + 1;
    else
        c->rec_full = true;
    c->n_rec += !c->rec_full;
}

/* A model that makes its first call again, unexpectedly and with nothing open and nothing reduced, either
 * begins a pass anew (it has been evaluating) or uses its first unit once more (a head tied to the
 * embedding). What it does until its first backward tells which. */
static void notice_evaluation(struct zr_core *c, const struct zr_call *call)
{
    if (c->n_open || c->any_backward || c->n_rec == 0)
        return;
    bool again = same_call(call, &recorded(c)[0]);
    if (again && !is_expected(c, call)) {
        c->restarted = true;
        go_to(c, 0);
    }
    if (c->restarted && (again || call->backward))
        drop_repeat(c);
}

static uint64_t call_word(const struct zr_call *call)
{
    return (uint64_t)(uint32_t)call->unit << 2 | (uint64_t)call->backward << 1 | call->is_end;
}

static void follow(struct zr_core *c, const struct zr_call *call)
{
    c->counts.n_calls++;
    note(c, call_word(call));
    notice_evaluation(c, call);
    record(c, call);
    if (is_expected(c, call)) {
        pass_call(c);
        return;
    }
    c->counts.n_strays++;
    c->strayed = true;
    /* A call further on means that some were left out; one before, that the model went back. What is not in
     * one period is in none. */
    int64_t ahead = zr_min(c->n_order, c->pos + c->period), behind = zr_min(c->pos, c->period);
    for (int64_t i = c->pos; i < ahead; i++) {
        if (same_call(call, &order(c)[(i - c->base) % c->period])) {
            go_to(c, i + 1);
            return;
        }
    }
    for (int64_t i = 0; i < behind; i++) {
        if (same_call(call, &order(c)[i])) {
            go_to(c, i + 1);
            return;
        }
    }
}

/* ---- parameter slots ---- */

/* Of the slots by size, from first to last but one, the one with the largest key, and of such the smallest;
 * -1: open brackets hold them all. */
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

/* A slot that can hold u, of the smallest n_slots: an empty one, the smallest that does; else the one whose
 * unit is used last, and for a prefetch (wanted < NEVER) only if that is later than the prefetched unit is
 * wanted. -1: none. */
static int32_t pick_below(const struct zr_core *c, const struct unit *u, int32_t n_slots, int64_t wanted)
{
    int32_t slot = best_slot(c, u->fits, n_slots);
    if (slot < 0 || pslots(c)[slot].unit < 0 || wanted == NEVER)
        return slot;
    return units(c)[pslots(c)[slot].unit].next_use > wanted ? slot : -1;
}

static int32_t pick_param_slot(const struct zr_core *c, const struct unit *u, int64_t wanted)
{
    if (!c->reserved || u->param_bytes > c->second)
        return pick_below(c, u, c->n_pslots, wanted);
    int32_t slot = pick_below(c, u, c->n_small, wanted);
    return slot < 0 && wanted == NEVER ? pick_below(c, u, c->n_pslots, wanted) : slot;
}

static void emit_gather(struct zr_core *c, int32_t u, int32_t slot, struct zr_action *out, int32_t *n)
{
    if (slot >= 0) {
        struct pslot *s = &pslots(c)[slot];
        if (s->unit >= 0)
            units(c)[s->unit].pslot = -1;
        s->unit = u;
        units(c)[u].pslot = slot;
        touch_slot(c, slot);
    }
    out[(*n)++] = (struct zr_action){.kind = ZR_ACT_GATHER, .unit = u, .slot = slot};
}

/* Gathers the next `prefetch` units of the order into slots that are wanted later or not at all. */
static void prefetch(struct zr_core *c, struct zr_action *out, int32_t *n)
{
    if (c->n_sharded == 0 || c->prefetch == 0)
        return;
    int32_t last[8], n_ahead = 0, k = c->ahead;
    int64_t base = c->base;
    /* In one period every unit comes by. */
    for (int32_t i = 0; i < c->n_begins && n_ahead < c->prefetch; i++, k++) {
        if (k == c->n_begins) {
            k = 0;
            base += c->period;
        }
        int64_t at = base + begins(c)[k];
        if (at >= c->n_order)
            return;
        const struct zr_call *call = &order(c)[begins(c)[k]];
        struct unit *u = &units(c)[call->unit];
        if (u->open_fwd || u->open_bwd)
            continue;
        /* A unit counts once; the last few seen suffice, as uses of one unit lie together. */
        bool again = false;
        for (int32_t j = n_ahead > 8 ? n_ahead - 8 : 0; j < n_ahead; j++)
            again |= last[j % 8] == call->unit;
        if (again)
            continue;
        last[n_ahead++ % 8] = call->unit;
        if (u->pslot >= 0)
            continue;
        int32_t slot = pick_param_slot(c, u, at);
        if (slot < 0)
            return;
        emit_gather(c, call->unit, slot, out, n);
    }
}

/* ---- gradient slots ---- */

/* The smallest slots that fit, and among them the one free for longest. */
static int32_t pick_grad_slot(const struct zr_core *c, int64_t bytes)
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

/* One more contribution of u, in the shape of a binary counter. */
static void emit_reduce(struct zr_core *c, int32_t u, int32_t slot, struct zr_action *out, int32_t *n)
{
    struct unit *x = &units(c)[u];
    struct zr_action a = {.kind = ZR_ACT_REDUCE, .unit = u, .slot = slot};
    bool odd = x->n_contrib & 1;
    if (x->sum_in_place) {
        a.accumulate = x->n_contrib > 0;
    } else if (!odd && x->depth < c->n_sums) { /* the first always does */
        a.sum = x->depth++;
    } else {
        a.accumulate = true;
        a.sum = (uint8_t)(x->depth - 1);
        for (int32_t k = x->n_contrib >> 1; (k & 1) && x->depth > 1; k >>= 1) {
            a.n_folds++;
            x->depth--;
        }
    }
    x->n_contrib++;
    x->pending = false;
    out[(*n)++] = a;
}

/* Resident gradients that are being reduced become the model's again; when the step has used them, those that
 * are summed in place too. */
static void return_grads(struct zr_core *c, struct zr_action *out, int32_t *n)
{
    if (c->last_reduced < 0)
        return;
    out[(*n)++] = (struct zr_action){.kind = ZR_ACT_RETURN_GRADS, .unit = c->last_reduced, .slot = -1};
    c->last_reduced = -1;
}

/* The call just passed ends a micro-batch of the order. */
static bool ended_micro_batch(const struct zr_core *c)
{
    return next_begin(c)[(c->pos > c->base ? c->pos - c->base : c->period) - 1];
}

/* The calls of this step do not tell where a micro-batch ends. */
static bool is_lost(const struct zr_core *c)
{
    return c->strayed || c->uneven;
}

/* ---- the calls ---- */

static const char *phase_name(int backward)
{
    return backward ? "backward" : "forward";
}

/* "3 (backward), 7 (forward), ...": the units with an open bracket. */
static void list_open(const struct zr_core *c, char *text, size_t n)
{
    size_t at = 0;
    int32_t n_listed = 0;
    for (int32_t i = 0; i < c->n_units && at + 1 < n; i++) {
        const struct unit *u = &units(c)[i];
        if (!u->open_fwd && !u->open_bwd)
            continue;
        const char *how = u->open_fwd && u->open_bwd ? "forward and backward" : phase_name(u->open_bwd);
        int k = n_listed++ < 8 ? snprintf(text + at, n - at, "%s%d (%s)", at ? ", " : "", i, how)
                               : snprintf(text + at, n - at, " and more");
        at += k > 0 ? (size_t)k : 0;
        if (n_listed > 8)
            return;
    }
}

/* No slot is left for a bracket; kind: "parameter". */
static int no_slot(const struct zr_core *c, const char *kind, int32_t unit, int64_t bytes)
{
    char open[320] = "none";
    list_open(c, open, sizeof open);
    return zr_fail(ZR_ERR_BUDGET,
                   "zero_begin: no %s slot for unit %d (%lld bytes): those large enough are held by open "
                   "brackets. Open are units: %s. Was a zero_end forgotten? Otherwise declare the nesting in "
                   "cfg.order, or raise prefetch or param_budget_bytes",
                   kind, unit, (long long)bytes, open);
}

/* Twice the backward passes of a step: no unit that is used twice in a pass can account for it when all
 * units have had them. */
static int64_t overrun(const struct zr_core *c, const struct unit *u)
{
    return 2 * (int64_t)u->uses * c->accum;
}

#define OVERRUN_ADVICE                                                                                       \
    "set grad_accum_steps to the micro-batches of a step, or call zero_step oftener; if a pass uses its "    \
    "units more than once, declare that in cfg.order"

static int refuse_in_all(const char *call)
{
    return zr_fail(ZR_ERR_ORDER, "%s: zero_gather_all holds all parameters; call zero_release_all first",
                   call);
}

/* A forward bracket while all parameters are held: its unit is there, and the order of a step is not learned
 * from it. */
static int bracket_in_all(struct zr_core *c, int32_t unit, bool *open, bool begins)
{
    note(c, call_word(&(struct zr_call){.unit = unit, .is_end = !begins}));
    *open = begins;
    c->n_open += begins ? 1 : -1;
    return 0;
}

static int begin(struct zr_core *c, const struct zr_core_event *ev, struct zr_action *out, int32_t *n)
{
    struct unit *u = &units(c)[ev->unit];
    bool *open = ev->backward ? &u->open_bwd : &u->open_fwd;
    if (*open)
        return zr_fail(ZR_ERR_ORDER, "zero_begin: unit %d is already open in %s; end it first", ev->unit,
                       phase_name(ev->backward));
    if (c->all && ev->backward)
        return zr_fail(ZR_ERR_ORDER,
                       "zero_begin: unit %d in backward while zero_gather_all holds all parameters; call "
                       "zero_release_all first",
                       ev->unit);
    if (c->all)
        return bracket_in_all(c, ev->unit, open, true);
    if (ev->backward && c->complete)
        return zr_fail(ZR_ERR_ORDER,
                       "zero_begin: unit %d in backward after zero_norm, which ended the gradients of this "
                       "step: call zero_step or zero_drop first",
                       ev->unit);
    bool need_grad = ev->backward && u->trainable;
    if (need_grad && c->n_overrun == c->n_trainable)
        return zr_fail(ZR_ERR_ORDER,
                       "zero_begin: unit %d has had %d backward passes since the last zero_step, and every "
                       "other unit at least twice the %d of grad_accum_steps, too: " OVERRUN_ADVICE,
                       ev->unit, u->n_bwd, c->accum);
    int32_t pslot = u->pslot, gslot = -1;
    if (!u->resident && pslot < 0) {
        pslot = pick_param_slot(c, u, NEVER);
        if (pslot < 0)
            return no_slot(c, "parameter", ev->unit, u->param_bytes);
    }
    if (need_grad && !c->grad_resident && !u->sum_in_place) {
        gslot = pick_grad_slot(c, u->grad_bytes);
        if (gslot < 0)
            return no_slot(c, "gradient", ev->unit, u->grad_bytes);
    }

    follow(c, &(struct zr_call){.unit = ev->unit, .backward = ev->backward});
    if (!ev->backward && !c->n_open_bwd && is_lost(c)) /* the micro-batch before ended early */
        return_grads(c, out, n);
    if (!u->resident && u->pslot < 0)
        emit_gather(c, ev->unit, pslot, out, n);
    if (!u->resident) {
        pslots(c)[pslot].pins++;
        touch_slot(c, pslot);
    }
    *open = true;
    c->n_open++;
    c->n_open_bwd += ev->backward;
    out[(*n)++] = (struct zr_action){.kind = ZR_ACT_USE_PARAM, .unit = ev->unit, .slot = pslot};
    if (ev->backward)
        u->used_bwd = true;
    else
        u->used_fwd = true;
    if (need_grad) {
        bool fill = true;
        if (c->grad_resident || u->sum_in_place) {
            if (u->sum_in_place && u->dirty && u->n_contrib > 0)
                out[(*n)++] = (struct zr_action){.kind = ZR_ACT_SET_ASIDE, .unit = ev->unit, .slot = -1};
            fill = u->dirty;
            u->dirty = false;
        } else {
            gslots(c)[gslot].unit = ev->unit;
            u->gslot = gslot;
        }
        out[(*n)++] = (struct zr_action){
            .kind = ZR_ACT_USE_GRAD, .unit = ev->unit, .slot = gslot, .fill = fill, .bracket = true};
    }
    prefetch(c, out, n);
    return 0;
}

static int end(struct zr_core *c, const struct zr_core_event *ev, struct zr_action *out, int32_t *n)
{
    struct unit *u = &units(c)[ev->unit];
    bool *open = ev->backward ? &u->open_bwd : &u->open_fwd;
    if (!*open)
        return zr_fail(ZR_ERR_ORDER, "zero_end: unit %d is not open in %s", ev->unit,
                       phase_name(ev->backward));
    if (c->all)
        return bracket_in_all(c, ev->unit, open, false);
    follow(c, &(struct zr_call){.unit = ev->unit, .backward = ev->backward, .is_end = 1});
    *open = false;
    c->n_open--;
    c->n_open_bwd -= ev->backward;
    if (!u->resident) {
        pslots(c)[u->pslot].pins--;
        touch_slot(c, u->pslot);
    }
    if (!u->open_fwd && !u->open_bwd)
        out[(*n)++] = (struct zr_action){.kind = ZR_ACT_HIDE_PARAM, .unit = ev->unit, .slot = u->pslot};
    if (ev->backward)
        c->any_backward = true;
    if (ev->backward && u->trainable) {
        int32_t slot = u->gslot;
        u->n_bwd++;
        c->n_used += u->n_bwd == 1;
        c->n_overrun += u->n_bwd == overrun(c, u);
        u->pending = true;
        bool reduce = c->reduce_each || u->n_bwd % c->accum == 0;
        out[(*n)++] = (struct zr_action){.kind = ZR_ACT_HIDE_GRAD,
                                         .unit = ev->unit,
                                         .slot = slot,
                                         .bracket = true,
                                         .in_flight = reduce && c->grad_resident};
        if (reduce) {
            emit_reduce(c, ev->unit, slot, out, n);
            u->dirty = true;
        }
        if (reduce && c->grad_resident && !u->sum_in_place)
            c->last_reduced = ev->unit;
        if (slot >= 0) {
            gslots(c)[slot].unit = -1;
            gslots(c)[slot].released = ++c->clock;
        }
    }
    if (!c->n_open_bwd && (is_lost(c) || ended_micro_batch(c)))
        return_grads(c, out, n);
    prefetch(c, out, n);
    return 0;
}

/* Units whose gradients the model writes without brackets (stages 0 and 1): reduce them all, then give them
 * back zeroed. */
static void reduce_unbracketed(struct zr_core *c, struct zr_action *out, int32_t *n)
{
    for (int32_t i = 0; i < c->n_units; i++) {
        struct unit *u = &units(c)[i];
        if (!u->trainable || u->used_bwd || u->dirty)
            continue;
        out[(*n)++] = (struct zr_action){.kind = ZR_ACT_HIDE_GRAD, .unit = i, .slot = -1};
        emit_reduce(c, i, -1, out, n);
    }
}

static void return_unbracketed(struct zr_core *c, struct zr_action *out, int32_t *n)
{
    for (int32_t i = 0; i < c->n_units; i++) {
        struct unit *u = &units(c)[i];
        if (u->trainable && !u->used_bwd && !u->dirty)
            out[(*n)++] = (struct zr_action){.kind = ZR_ACT_USE_GRAD, .unit = i, .slot = -1, .fill = true};
    }
}

static int micro(struct zr_core *c, struct zr_action *out, int32_t *n)
{
    if (c->n_open)
        return zr_fail(ZR_ERR_ORDER, "zero_micro: unit %d has an open bracket; end it first",
                       zr_core_open_unit(c));
    if (c->all)
        return refuse_in_all("zero_micro");
    if (c->complete)
        return zr_fail(ZR_ERR_ORDER, "zero_micro: zero_norm has ended the gradients of this step: call "
                                     "zero_step or zero_drop first");
    if (c->n_micro + 1 >= c->accum)
        return zr_fail(ZR_ERR_ORDER,
                       "zero_micro: grad_accum_steps is %d, so a step has at most %d calls: zero_step ends "
                       "the last micro-batch",
                       c->accum, c->accum - 1);
    c->n_micro++;
    note(c, MICRO_WORD);
    return_grads(c, out, n);
    if (!c->reduce_each || !c->grad_resident)
        return 0; /* nothing to reduce yet, or no gradients without brackets */
    reduce_unbracketed(c, out, n);
    return_unbracketed(c, out, n);
    return 0;
}

/* Have as many micro-batches passed as were promised? Bracketed models are counted by their backward
 * brackets: a unit used twice per pass counts double, one that was left out counts less, so the largest count
 * decides. But when every unit had a multiple, the model ran more micro-batches than it said. Others are
 * counted by zero_micro. */
static int check_count(const struct zr_core *c, const char *call)
{
    int32_t most = 0, unit = -1;
    for (int32_t i = 0; i < c->n_units; i++) {
        const struct unit *u = &units(c)[i];
        if (u->n_bwd > most) {
            most = u->n_bwd;
            unit = i;
        }
    }
    if (most > 0 && most % c->accum)
        return zr_fail(ZR_ERR_ORDER,
                       "%s: unit %d has had %d backward passes since the last step; grad_accum_steps is %d",
                       call, unit, most, c->accum);
    if (most > 0 && c->n_overrun == c->n_used && (c->n_used > 1 || c->n_trainable == 1))
        return zr_fail(ZR_ERR_ORDER,
                       "%s: unit %d has had %d backward passes since the last step, and every other "
                       "unit that had any at least twice the %d of grad_accum_steps, too: " OVERRUN_ADVICE,
                       call, unit, most, c->accum);
    if (most > 0 || c->n_trainable == 0)
        return 0;
    if (!c->grad_resident)
        return zr_fail(ZR_ERR_ORDER, "%s: no backward bracket has ended since the last step", call);
    if (c->n_micro + 1 != c->accum && (c->reduce_each || c->n_micro))
        return zr_fail(
            ZR_ERR_ORDER,
            "%s: %d micro-batches were ended by zero_micro, grad_accum_steps is %d: call "
            "zero_micro after each "
            "backward but the last, or bracket backward; or, if the model zeroes its gradients once "
            "per step and adds to them, set grad_in_place to 1",
            call, c->n_micro, c->accum);
    return 0;
}

/* The next step begins: nothing of it is recorded yet, and its first call is the order's. */
static void start_recording(struct zr_core *c)
{
    c->n_rec = c->n_kept = c->rec_at_call = 0;
    start_period(c, 0);
    c->restarted = c->rec_full = c->strayed = false;
}

/* The calls of this step become the order of the next. */
static void learn(struct zr_core *c)
{
    bool differs = c->n_rec != c->n_order;
    /* Where two that repeat are alike for as long as both periods, they are alike. */
    int64_t n = zr_min(c->n_rec, (int64_t)c->n_kept + c->period);
    for (int64_t i = 0; !differs && i < n; i++)
        differs = !same_call(&recorded(c)[i % c->n_kept], &order(c)[i % c->period]);
    if (differs && c->n_rec && !c->rec_full) {
        memcpy(order(c), recorded(c), (size_t)c->n_kept * sizeof(struct zr_call));
        c->period = c->n_kept;
        c->n_order = c->n_rec;
        index_order(c);
        c->counts.n_replans++;
    }
    start_recording(c);
}

/* Calls fn for every unit, those of the order first, by their first use. */
static void update_in_order(struct zr_core *c, struct zr_action *out, int32_t *n)
{
    bool gather = c->world > 1 && c->stage > 0;
    for (int pass = 0; pass < 2; pass++) {
        int32_t count = pass ? c->n_units : c->period;
        for (int32_t i = 0; i < count; i++) {
            int32_t id = pass ? i : order(c)[i].unit;
            struct unit *u = &units(c)[id];
            if (pass ? u->first_use >= 0 : u->first_use != i)
                continue;
            if (!u->trainable)
                continue;
            out[(*n)++] = (struct zr_action){.kind = ZR_ACT_UPDATE, .unit = id, .slot = -1};
            if (u->resident && gather)
                emit_gather(c, id, -1, out, n);
        }
    }
}

/* The last unit updated that the model brackets and that is summed in place; -1: none. */
static int32_t last_in_place(const struct zr_core *c, const struct zr_action *out, int32_t n)
{
    while (n-- > 0) {
        const struct unit *u = &units(c)[out[n].kind == ZR_ACT_UPDATE ? out[n].unit : 0];
        if (out[n].kind == ZR_ACT_UPDATE && u->sum_in_place && u->used_bwd)
            return out[n].unit;
    }
    return -1;
}

/* Reduces what is left of the step's gradients, into the first sum of every unit. */
static void complete_grads(struct zr_core *c, struct zr_action *out, int32_t *n)
{
    if (c->grad_resident)
        reduce_unbracketed(c, out, n);
    for (int32_t i = 0; i < c->n_units; i++) {
        struct unit *u = &units(c)[i];
        if (!u->trainable)
            continue;
        if (u->pending) {
            emit_reduce(c, i, -1, out, n);
            u->dirty = true;
            if (!u->sum_in_place)
                c->last_reduced = i;
        }
        if (u->n_contrib == 0) {
            out[(*n)++] = (struct zr_action){.kind = ZR_ACT_NO_GRAD, .unit = i, .slot = -1};
        } else if (u->depth > 1) {
            out[(*n)++] = (struct zr_action){
                .kind = ZR_ACT_FOLD, .unit = i, .slot = -1, .sum = u->depth - 1, .n_folds = u->depth - 1};
        }
    }
}

/* After a norm, gradients in place that had no contribution may have been the model's again. */
static void zero_unused(struct zr_core *c, struct zr_action *out, int32_t *n)
{
    for (int32_t i = 0; i < c->n_units; i++)
        if (units(c)[i].sum_in_place && units(c)[i].n_contrib == 0)
            out[(*n)++] = (struct zr_action){.kind = ZR_ACT_NO_GRAD, .unit = i, .slot = -1};
}

/* What was reduced in place will not be used. */
static void drop_sums(struct zr_core *c, struct zr_action *out, int32_t *n)
{
    bool any = false;
    for (int32_t i = 0; i < c->n_units; i++) {
        const struct unit *u = &units(c)[i];
        if (!u->sum_in_place || u->n_contrib == 0 || u->pending) /* pending: set aside, and added to since */
            continue;
        any = true;
        if (u->used_bwd && c->grad_resident)
            c->last_reduced = i;
    }
    if (any)
        out[(*n)++] = (struct zr_action){.kind = ZR_ACT_DROP_SUMS, .unit = -1, .slot = -1};
}

static void emit_norm(struct zr_action *out, int32_t *n)
{
    out[(*n)++] = (struct zr_action){.kind = ZR_ACT_NORM, .unit = -1, .slot = -1};
}

/* No micro-batch of the next step has begun. */
static void forget_step(struct zr_core *c)
{
    for (int32_t i = 0; i < c->n_units; i++) {
        struct unit *u = &units(c)[i];
        u->n_contrib = u->n_bwd = 0;
        u->depth = 0;
    }
    c->n_micro = 0;
    c->n_used = c->n_overrun = 0;
    c->any_backward = c->complete = false;
}

/* Gradients that have no bracket stay where they are until the step, which may still need them there. Asked
 * again, nothing is done. */
static int norm(struct zr_core *c, const struct zr_core_event *ev, struct zr_action *out, int32_t *n)
{
    if (c->n_open)
        return zr_fail(ZR_ERR_ORDER, "zero_norm: unit %d has an open bracket; end it first",
                       zr_core_open_unit(c));
    if (c->all)
        return refuse_in_all("zero_norm");
    int err = c->complete ? 0 : check_count(c, "zero_norm");
    if (err || c->complete)
        return err;
    note(c, NORM_WORD | (uint32_t)ev->unit);
    complete_grads(c, out, n);
    emit_norm(out, n);
    return_grads(c, out, n);
    c->complete = true;
    return 0;
}

/* Resident gradients are zeroed: those without brackets now, others when they are next added to. Those in
 * shards are overwritten by the next contribution. */
static int drop(struct zr_core *c, struct zr_action *out, int32_t *n)
{
    if (c->n_open)
        return zr_fail(ZR_ERR_ORDER, "zero_drop: unit %d has an open bracket; end it first",
                       zr_core_open_unit(c));
    if (c->all)
        return refuse_in_all("zero_drop");
    bool unseen = c->grad_resident && !zr_core_wrote_nothing(c); /* written without brackets, perhaps */
    if (!c->complete && !c->any_backward && !c->n_micro && !unseen)
        return zr_fail(ZR_ERR_ORDER, "zero_drop: no backward bracket has ended since the last step: there is "
                                     "nothing to drop");
    note(c, DROP_WORD);
    drop_sums(c, out, n);
    for (int32_t i = 0; i < c->n_units; i++) {
        struct unit *u = &units(c)[i];
        u->dirty |= u->pending;
        u->pending = false;
    }
    if (c->grad_resident)
        return_unbracketed(c, out, n);
    return_grads(c, out, n);
    forget_step(c);
    start_recording(c);
    prefetch(c, out, n);
    return 0;
}

static int step(struct zr_core *c, const struct zr_core_event *ev, struct zr_action *out, int32_t *n)
{
    if (c->n_open)
        return zr_fail(ZR_ERR_ORDER, "zero_step: unit %d has an open bracket; end it first",
                       zr_core_open_unit(c));
    if (c->all)
        return refuse_in_all("zero_step");
    int err = c->complete ? 0 : check_count(c, "zero_step");
    if (err)
        return err;
    note(c, STEP_WORD | (uint32_t)ev->unit);

    if (c->complete)
        zero_unused(c, out, n);
    else
        complete_grads(c, out, n);
    emit_norm(out, n);
    learn(c);
    update_in_order(c, out, n);
    int32_t last = c->grad_resident ? last_in_place(c, out, *n) : -1;
    if (last >= 0) /* its UPDATE is behind every reduction */
        c->last_reduced = last;

    /* Gathered copies of what was just updated are stale; those of frozen units stay good. */
    for (int32_t i = 0; i < c->n_pslots; i++) {
        struct pslot *s = &pslots(c)[i];
        if (s->unit >= 0 && units(c)[s->unit].trainable) {
            units(c)[s->unit].pslot = -1;
            s->unit = -1;
            touch_slot(c, i);
        }
    }
    prefetch(c, out, n);

    /* What has no bracket cannot wait later. */
    for (int32_t i = 0; c->grad_resident && i < c->n_units; i++) {
        if (units(c)[i].trainable && !units(c)[i].used_fwd)
            out[(*n)++] = (struct zr_action){.kind = ZR_ACT_WAIT_PARAM, .unit = i, .slot = -1};
    }
    if (c->grad_resident)
        return_unbracketed(c, out, n);
    return_grads(c, out, n);
    forget_step(c);
    return 0;
}

/* Written from outside: a gathered copy is stale. */
static int rewrite(struct zr_core *c, const struct zr_core_event *ev)
{
    struct unit *u = &units(c)[ev->unit];
    if (u->open_fwd || u->open_bwd)
        return zr_fail(ZR_ERR_ORDER, "zero_write: unit %d has an open bracket; end it first", ev->unit);
    if (c->all)
        return refuse_in_all("zero_write");
    if (u->pslot >= 0) {
        pslots(c)[u->pslot].unit = -1;
        touch_slot(c, u->pslot);
        u->pslot = -1;
    }
    return 0;
}

/* Between steps only: then the last UPDATE of every unit has been issued, on the stream that the copy goes to
 * as well. */
static int snapshot(struct zr_core *c, struct zr_action *out, int32_t *n)
{
    if (c->n_open)
        return zr_fail(ZR_ERR_ORDER, "zero_save: unit %d has an open bracket; end it first",
                       zr_core_open_unit(c));
    if (!zr_core_between_steps(c))
        return zr_fail(ZR_ERR_ORDER,
                       "zero_save: a step has begun; save before its first backward or after zero_step");
    note(c, SNAPSHOT_WORD);
    out[(*n)++] = (struct zr_action){.kind = ZR_ACT_SNAPSHOT, .unit = -1, .slot = -1};
    return 0;
}

/* The unit is, or will be, in its place; false: open brackets and pins leave it no slot. */
static bool fetch(struct zr_core *c, int32_t id, struct zr_action *out, int32_t *n)
{
    const struct unit *u = &units(c)[id];
    int32_t slot = u->resident || u->pslot >= 0 ? u->pslot : pick_param_slot(c, u, NEVER);
    if (!u->resident && slot < 0)
        return false;
    if (!u->resident && u->pslot < 0)
        emit_gather(c, id, slot, out, n);
    return true;
}

static void pin(struct zr_core *c, int32_t slot, int by)
{
    if (slot < 0)
        return;
    pslots(c)[slot].pins += by;
    touch_slot(c, slot);
}

/* One unit after the other through the slots, the next being gathered while one is copied, where there are
 * two. */
static int gather_all(struct zr_core *c, const struct zr_core_event *ev, struct zr_action *out, int32_t *n)
{
    if (c->n_open)
        return zr_fail(ZR_ERR_ORDER, "zero_gather_all: unit %d has an open bracket; end it first",
                       zr_core_open_unit(c));
    if (c->all)
        return refuse_in_all("zero_gather_all");
    for (int32_t i = 0; i < c->n_units; i++)
        if (!units(c)[i].resident && units(c)[i].fits == c->n_pslots)
            return zr_fail(ZR_ERR_BUDGET, "zero_gather_all: no parameter slot holds unit %d (%lld bytes)", i,
                           (long long)units(c)[i].param_bytes);
    note(c, ALL_WORD | (uint32_t)ev->unit);
    for (int32_t i = 0; i < c->n_units; i++) {
        fetch(c, i, out, n);
        int32_t slot = units(c)[i].pslot;
        pin(c, slot, 1);
        if (i + 1 < c->n_units)
            fetch(c, i + 1, out, n);
        out[(*n)++] = (struct zr_action){.kind = ZR_ACT_KEEP_PARAM, .unit = i, .slot = slot};
        pin(c, slot, -1);
    }
    c->all = true;
    return 0;
}

static int release_all(struct zr_core *c, struct zr_action *out, int32_t *n)
{
    if (!c->all)
        return zr_fail(ZR_ERR_ORDER, "zero_release_all: there was no zero_gather_all");
    if (c->n_open)
        return zr_fail(ZR_ERR_ORDER, "zero_release_all: unit %d has an open bracket; end it first",
                       zr_core_open_unit(c));
    note(c, RELEASE_WORD);
    c->all = false;
    prefetch(c, out, n);
    return 0;
}

const char *zr_action_name(enum zr_action_kind kind)
{
    static const char *const name[] = {
        [ZR_ACT_USE_PARAM] = "use_param",   [ZR_ACT_HIDE_PARAM] = "hide_param",
        [ZR_ACT_WAIT_PARAM] = "wait_param", [ZR_ACT_USE_GRAD] = "use_grad",
        [ZR_ACT_HIDE_GRAD] = "hide_grad",   [ZR_ACT_RETURN_GRADS] = "return_grads",
        [ZR_ACT_KEEP_PARAM] = "keep_param", [ZR_ACT_GATHER] = "gather",
        [ZR_ACT_SET_ASIDE] = "set_aside",   [ZR_ACT_DROP_SUMS] = "drop_sums",
        [ZR_ACT_REDUCE] = "reduce",         [ZR_ACT_FOLD] = "fold",
        [ZR_ACT_NO_GRAD] = "no_grad",       [ZR_ACT_NORM] = "norm",
        [ZR_ACT_UPDATE] = "update",         [ZR_ACT_SNAPSHOT] = "snapshot"};
    return name[kind];
}

int zr_core_step(struct zr_core *c, const struct zr_core_event *ev, struct zr_action *out, int32_t *n_out)
{
    *n_out = 0;
    bool has_unit = ev->kind == ZR_EV_BEGIN || ev->kind == ZR_EV_END || ev->kind == ZR_EV_REWRITE;
    if (has_unit && (ev->unit < 0 || ev->unit >= c->n_units))
        return zr_fail(ZR_ERR_ARG, "unit is %d; allowed: 0..%d", ev->unit, c->n_units - 1);
    switch (ev->kind) {
    case ZR_EV_BEGIN:
        return begin(c, ev, out, n_out);
    case ZR_EV_END:
        return end(c, ev, out, n_out);
    case ZR_EV_MICRO:
        return micro(c, out, n_out);
    case ZR_EV_STEP:
        return step(c, ev, out, n_out);
    case ZR_EV_REWRITE:
        return rewrite(c, ev);
    case ZR_EV_SNAPSHOT:
        return snapshot(c, out, n_out);
    case ZR_EV_NORM:
        return norm(c, ev, out, n_out);
    case ZR_EV_DROP:
        return drop(c, out, n_out);
    case ZR_EV_GATHER_ALL:
        return gather_all(c, ev, out, n_out);
    case ZR_EV_RELEASE_ALL:
        return release_all(c, out, n_out);
    }
    return zr_fail(ZR_ERR_ARG, "unknown event %d", (int)ev->kind);
}

uint64_t zr_core_hash(const struct zr_core *c)
{
    return c->hash;
}

struct zr_core_counts zr_core_counts(const struct zr_core *c)
{
    return c->counts;
}

int32_t zr_core_open_unit(const struct zr_core *c)
{
    for (int32_t i = 0; c->n_open && i < c->n_units; i++)
        if (units(c)[i].open_fwd || units(c)[i].open_bwd)
            return i;
    return -1;
}

bool zr_core_wrote_nothing(const struct zr_core *c)
{
    for (int32_t i = 0; i < c->n_units; i++) {
        const struct unit *u = &units(c)[i];
        if (u->trainable && (!u->used_bwd || u->n_bwd))
            return false;
    }
    return c->n_trainable > 0;
}

bool zr_core_between_steps(const struct zr_core *c)
{
    return !c->n_micro && !c->any_backward && !c->complete;
}

bool zr_core_holds_all(const struct zr_core *c)
{
    return c->all;
}

bool zr_core_complete(const struct zr_core *c)
{
    return c->complete;
}

bool zr_core_present(const struct zr_core *c, int32_t unit, int32_t *slot)
{
    *slot = units(c)[unit].pslot;
    return units(c)[unit].resident || *slot >= 0;
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

void zr_core_skip(struct zr_core *c, int32_t n_done, int32_t n)
{
    for (int32_t i = 0; i < c->n_units; i++)
        units(c)[i].n_bwd += units(c)[i].n_bwd / n_done * n;
    c->n_rec += (int64_t)n * c->period;
    c->rec_at_call = c->n_kept ? (int32_t)(c->n_rec % c->n_kept) : 0;
    start_period(c, c->base + (int64_t)n * c->period);
}
