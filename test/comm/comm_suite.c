/* SPDX-License-Identifier: Apache-2.0 */
/* comm_suite.c: the checks that comm_suite.h declares. */
#include "test/comm/comm_suite.h"
#include "comm/flight_view.h"
#include "comm/segment.h"
#include "test/kernels/random.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ARENA_BYTES = 1 << 19, TIMEOUT_MS = 60000, MAX_SEGS = 5, POISON = 0xff };

/* --- input values --- */

static uint64_t mix(uint64_t seed, uint64_t a, uint64_t b, uint64_t c)
{
    uint64_t s = seed ^ (a * 0x9e3779b97f4a7c15) ^ (b * 0xc2b2ae3d27d4eb4f) ^ (c * 0x165667b19e3779f9);
    return random_next(&s);
}

/* Element i of the input that rank writes at off for operation op. Signs are mixed, magnitudes range from
 * 2^-8 to 2^8, and some elements are zero. */
static float value(uint64_t seed, int op, int rank, int64_t off, int64_t i)
{
    uint64_t x = mix(seed, (uint64_t)op, (uint64_t)rank, (uint64_t)(off + i));
    if (x % 37 == 0)
        return x & 64 ? 0.0f : -0.0f;
    float mantissa = 1.0f + (float)(x >> 41) * 0x1p-23f;
    return ldexpf(x & 128 ? mantissa : -mantissa, (int)((x >> 8) % 17) - 8);
}

static uint16_t bf16_cut(float x)
{
    return (uint16_t)(zr_float_bits(x) >> 16); /* truncates; any bf16 value will do */
}

static float element(uint64_t seed, enum zero_dtype t, int op, int rank, int64_t off, int64_t i)
{
    /* The condition chooses the mask. GCC 12 drops it in `condition ? masked : x`, at -O1 and -O2. */
    const uint32_t kept = t == ZERO_BF16 ? 0xffff0000u : 0xffffffffu; /* as bf16_cut */
    return zr_bits_float(zr_float_bits(value(seed, op, rank, off, i)) & kept);
}

static void put_elements(char *to, uint64_t seed, enum zero_dtype t, int op, int rank, int64_t off, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float x = value(seed, op, rank, off, i);
        uint16_t h = bf16_cut(x);
        memcpy(to + i * zr_dtype_bytes(t), t == ZERO_F32 ? (void *)&x : (void *)&h,
               (size_t)zr_dtype_bytes(t));
    }
}

static void put_bytes(char *to, uint64_t seed, int op, int rank, int64_t off, int64_t from, int64_t n)
{
    uint64_t word = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t at = from + i;
        if (i == 0 || at % 8 == 0)
            word = mix(seed, (uint64_t)op, (uint64_t)rank, (uint64_t)(off + at / 8));
        to[i] = (char)(word >> (at % 8 * 8));
    }
}

/* The reference sum: sum(lo, h) + sum(lo + h, n - h), where h is the largest power of two below n. */
static float tree(const float *x, int n)
{
    if (n == 1)
        return x[0];
    int h = 1;
    while (h * 2 < n)
        h *= 2;
    return tree(x, h) + tree(x + h, n - h);
}

/* --- one operation: draw it, prepare its input, compute the expected result --- */

enum { MAX_PLACES = 2 * MAX_RANKS + 1 };

struct drawn {
    enum zr_op op;
    int n_seg, root;
    struct zr_gather_seg gather[MAX_SEGS];
    struct zr_reduce_seg reduce[MAX_SEGS];
    int64_t begin[MAX_SEGS][MAX_RANKS + 1]; /* expected start of each place's slice, in bytes */
    int64_t list[MAX_SEGS][MAX_PLACES];     /* the places of a ragged cut */
    int64_t off, to, bytes;
    int32_t by, n_sum, n_max;
    struct zr_tag tag;
    int64_t wire; /* bytes that this rank receives */
};

static int64_t begin_of(const struct drawn *d, int seg, int place)
{
    return d->begin[seg][place];
}

static int64_t bytes_of(const struct drawn *d, int seg, int place)
{
    return d->begin[seg][place + 1] - d->begin[seg][place];
}

static int64_t longest(const struct drawn *d, int seg, int size)
{
    int64_t most = 0;
    for (int p = 0; p < size; p++)
        most = bytes_of(d, seg, p) > most ? bytes_of(d, seg, p) : most;
    return most;
}

/* Draws equal slices. The last ones may be short or empty. */
static struct zr_cut draw_equal(uint64_t *rng, int size, int64_t elem, int64_t *begin)
{
    int64_t each = 128 * random_in(rng, 0, random_in(rng, 0, 3) ? 8 : 100);
    int64_t total = random_in(rng, 0, 2) == 0 ? each * size : random_in(rng, 0, each * size);
    total -= total % elem;
    for (int p = 0; p <= size; p++)
        begin[p] = each * p < total ? each * p : total;
    return (struct zr_cut){.each = each, .total = total};
}

/* Draws slices of any size; some are empty. The list counts in bytes or elements, starts at any value, and
 * may hold unused numbers between those that count. */
static struct zr_cut draw_ragged(uint64_t *rng, int size, int64_t elem, int64_t *begin, int64_t *list)
{
    int64_t most = 64 * random_in(rng, 0, random_in(rng, 0, 3) ? 16 : 200), at = 0,
            origin = random_in(rng, 0, 999);
    int every = (int)random_in(rng, 1, 2), unit = (int)(random_in(rng, 0, 1) ? elem : 1);
    for (int p = 0; p <= size; p++) {
        begin[p] = at;
        at += random_in(rng, 0, 2) ? 64 * random_in(rng, 0, most / 64) : 0;
    }
    /* If total is no multiple of 64, several places may end there. */
    int64_t total = begin[size] - (begin[size] ? random_in(rng, 0, 16) * elem : 0);
    for (int p = 0; p <= size; p++)
        begin[p] = begin[p] < total ? begin[p] : total;
    for (int k = 0; k < MAX_PLACES; k++)
        list[k] = -1 - k;
    for (int p = 0; p <= size; p++)
        list[p * every] = origin + begin[p] / unit;
    return (struct zr_cut){.total = total, .at = list, .at_every = every, .at_bytes = unit};
}

static struct zr_cut draw_cut(uint64_t *rng, int size, int64_t elem, struct drawn *d, int seg)
{
    return random_in(rng, 0, 1) ? draw_ragged(rng, size, elem, d->begin[seg], d->list[seg])
                                : draw_equal(rng, size, elem, d->begin[seg]);
}

/* Returns an aligned place in [*at, end) of the arena, with a gap before it, or -1 if there is no room. */
static int64_t place(uint64_t *rng, int64_t *at, int64_t end, int64_t bytes, int64_t align)
{
    int64_t p = (*at + align * random_in(rng, 0, 3) + align - 1) / align * align;
    if (p + bytes > end)
        return -1;
    *at = p + bytes;
    return p;
}

/* The place whose bytes a shift brings here. */
static int shifted_from(int64_t by, int world, int me)
{
    return (int)(((me - by) % world + world) % world);
}

/* Draws the same operation on every rank of a group, except that each rank places an in-place reduce for
 * itself. */
static void draw(uint64_t *rng, const struct fixture_kind *kind, int world, int me, bool reduces, int64_t at,
                 int64_t end, int number, struct drawn *d)
{
    memset(d, 0, sizeof *d);
    do
        d->op = (enum zr_op)random_in(rng, 1, ZR_OPS - 1);
    while (d->op == ZR_OP_ALL_REDUCE); /* only of arrays */
    if (d->op == ZR_OP_REDUCE_SCATTER && !reduces)
        d->op = ZR_OP_ALL_GATHER;
    d->tag = (struct zr_tag){(int32_t)random_in(rng, -1, 50), (uint32_t)number / 10, random_next(rng)};
    d->root = (int)random_in(rng, 0, world - 1);
    if (d->op == ZR_OP_BROADCAST || d->op == ZR_OP_EXCHANGE) {
        int n = d->op == ZR_OP_EXCHANGE ? world : 1;
        d->bytes = random_in(rng, 0, 5000);
        d->off = place(rng, &at, end, d->bytes * n, random_in(rng, 1, 8));
        if (d->off < 0)
            d->off = d->bytes = 0;
        d->wire = d->op == ZR_OP_EXCHANGE ? d->bytes * (world - 1) : me == d->root ? 0 : d->bytes;
        return;
    }
    if (d->op == ZR_OP_ALL_TO_ALL || d->op == ZR_OP_SHIFT) {
        int n = d->op == ZR_OP_ALL_TO_ALL ? world : 1;
        d->bytes = random_in(rng, 0, 5000);
        d->by = (int32_t)(random_in(rng, 0, 9) ? random_in(rng, -world, world) : INT32_MIN);
        d->off = place(rng, &at, end, d->bytes * n, random_in(rng, 1, 8));
        d->to = place(rng, &at, end, d->bytes * n, random_in(rng, 1, 8));
        if (d->off < 0 || d->to < 0)
            d->off = d->to = d->bytes = 0;
        d->wire = d->op == ZR_OP_ALL_TO_ALL              ? d->bytes * (world - 1)
                  : shifted_from(d->by, world, me) == me ? 0
                                                         : d->bytes;
        return;
    }
    if (d->op == ZR_OP_AGREE) {
        d->n_sum = (int32_t)random_in(rng, 0, 700);
        d->n_max = (int32_t)random_in(rng, 0, 20);
        d->bytes = (d->n_sum + d->n_max) * 8;
        d->off = place(rng, &at, end, d->bytes, 8);
        if (d->off < 0)
            d->off = d->n_sum = d->n_max = 0;
        d->wire = zr_agree_wire(world, me, d->n_sum, d->n_max);
        return;
    }
    int n = (int)random_in(rng, 0, MAX_SEGS);
    for (int i = 0; i < n; i++) {
        enum zero_dtype t = d->op == ZR_OP_REDUCE_SCATTER && random_in(rng, 0, 1) ? ZERO_F32 : ZERO_BF16;
        int64_t elem = d->op == ZR_OP_REDUCE_SCATTER ? zr_dtype_bytes(t) : 1;
        struct zr_cut cut = draw_cut(rng, world, elem, d, i);
        int64_t most = longest(d, i, world), rows = (most + 127) / 128 * 128 * (world - 1);
        if (d->op == ZR_OP_ALL_GATHER) {
            bool in_place = random_in(rng, 0, 1);
            int64_t dst = place(rng, &at, end, cut.total, 8),
                    src = in_place ? dst : place(rng, &at, end, most, 8);
            if (dst < 0 || src < 0)
                break;
            d->gather[i] = (struct zr_gather_seg){src, dst, in_place, cut};
            d->wire += cut.at && most <= kind->gather_packs ? rows : cut.total - bytes_of(d, i, me);
        } else {
            bool in_place = t == ZERO_F32 && random_in(rng, 0, 3) == 0, accumulate = random_in(rng, 0, 1);
            int64_t src = place(rng, &at, end, cut.total, 8);
            int64_t dst = in_place ? src + begin_of(d, i, me) : place(rng, &at, end, most / elem * 4, 4);
            if (src < 0 || dst < 0)
                break;
            d->reduce[i] = (struct zr_reduce_seg){src, dst, cut, t, accumulate && !in_place};
            d->wire += cut.at && most <= kind->reduce_packs ? rows : bytes_of(d, i, me) * (world - 1);
        }
        d->n_seg = i + 1;
    }
}

/* Word k of an agreement that rank contributes. Words to be summed are small enough that their sum fits;
 * words to be compared use all bits. */
static uint64_t word(const struct drawn *d, uint64_t seed, int op, int world, int rank, int k)
{
    uint64_t x = mix(seed, (uint64_t)op, (uint64_t)rank, (uint64_t)d->off + (uint64_t)k);
    const int64_t most = INT64_MAX / world;
    if (k >= d->n_sum)
        return x;
    return (uint64_t)(x % 5 == 0 ? most : x % 5 == 1 ? -most : (int64_t)(x >> 1) % most);
}

static uint64_t agreed(const struct drawn *d, uint64_t seed, int op, int world, int k)
{
    int64_t sum = 0;
    uint64_t most = 0;
    for (int r = 0; r < world; r++) {
        uint64_t x = word(d, seed, op, world, r, k);
        most = x > most ? x : most;
        if (k < d->n_sum)
            sum += (int64_t)x;
    }
    return k < d->n_sum ? (uint64_t)sum : most;
}

/* Writes this rank's input into the arena. */
static void prepare(const struct drawn *d, uint64_t seed, int op, int world, int me, char *arena)
{
    for (int i = 0; i < d->n_seg && d->op == ZR_OP_ALL_GATHER; i++) {
        const struct zr_gather_seg *g = &d->gather[i];
        put_bytes(arena + g->src + (g->in_place ? begin_of(d, i, me) : 0), seed, op, 0, g->dst,
                  begin_of(d, i, me), bytes_of(d, i, me));
    }
    for (int i = 0; i < d->n_seg && d->op == ZR_OP_REDUCE_SCATTER; i++) {
        const struct zr_reduce_seg *g = &d->reduce[i];
        int64_t size = zr_dtype_bytes(g->dtype);
        put_elements(arena + g->src, seed, g->dtype, op, me, g->src, g->cut.total / size);
        if (g->accumulate)
            put_elements(arena + g->dst, seed, ZERO_F32, op, 100 + me, g->dst, bytes_of(d, i, me) / size);
    }
    if (d->op == ZR_OP_BROADCAST && me == d->root)
        put_bytes(arena + d->off, seed, op, me, d->off, 0, d->bytes);
    if (d->op == ZR_OP_EXCHANGE)
        put_bytes(arena + d->off + me * d->bytes, seed, op, 0, d->off, me * d->bytes, d->bytes);
    if (d->op == ZR_OP_ALL_TO_ALL)
        put_bytes(arena + d->off, seed, op, me, d->off, 0, d->bytes * world);
    if (d->op == ZR_OP_SHIFT)
        put_bytes(arena + d->off, seed, op, me, d->off, 0, d->bytes);
    for (int k = 0; d->op == ZR_OP_AGREE && k < d->n_sum + d->n_max; k++) {
        uint64_t x = word(d, seed, op, world, me, k);
        memcpy(arena + d->off + 8 * k, &x, 8);
    }
}

/* Turns expected, a copy of the arena after prepare, into what the arena should be after the operation.
 * Returns the worst error of a sum against fp64, in units of its bound.
 *
 * got is NULL for an exact communicator. Other communicators add in their own order and round to
 * the wire's type at each step. For them got is the arena as it is, and this rank's slice only has to be
 * within the bound. */
static double finish(const struct drawn *d, uint64_t seed, int op, int world, int me, char *arena,
                     const char *got)
{
    double worst = 0;
    for (int i = 0; i < d->n_seg && d->op == ZR_OP_REDUCE_SCATTER && got; i++) {
        const struct zr_reduce_seg *g = &d->reduce[i];
        int64_t own = g->src + begin_of(d, i, me);
        memcpy(arena + own, got + own, (size_t)bytes_of(d, i, me));
    }
    for (int i = 0; i < d->n_seg && d->op == ZR_OP_ALL_GATHER; i++)
        put_bytes(arena + d->gather[i].dst, seed, op, 0, d->gather[i].dst, 0, d->gather[i].cut.total);
    for (int i = 0; i < d->n_seg && d->op == ZR_OP_REDUCE_SCATTER; i++) {
        const struct zr_reduce_seg *g = &d->reduce[i];
        int64_t size = zr_dtype_bytes(g->dtype), n = bytes_of(d, i, me) / size;
        for (int64_t k = 0; k < n; k++) {
            float x[MAX_RANKS], old, sum;
            double exact = 0, magnitude = 0;
            for (int r = 0; r < world; r++) {
                x[r] = element(seed, g->dtype, op, r, g->src, begin_of(d, i, me) / size + k);
                exact += x[r];
                magnitude += fabs((double)x[r]);
            }
            sum = tree(x, world);
            if (g->accumulate) {
                old = value(seed, op, 100 + me, g->dst, k);
                sum = old + sum;
                exact += old;
                magnitude += fabs((double)old);
            }
            /* Each element passes through at most log2(world) + 1 additions. */
            double bound = 0x1p-24 * (ceil(log2(world)) + 1) * magnitude * 1.01;
            if (got) {
                memcpy(&sum, got + g->dst + 4 * k, 4);
                bound = (g->dtype == ZERO_BF16 ? 0x1p-8 : 0x1p-24) * (world + 1) * magnitude;
            }
            memcpy(arena + g->dst + 4 * k, &sum, 4);
            double e = fabs((double)sum - exact);
            if (e > worst * bound)
                worst = e / bound;
        }
    }
    if (d->op == ZR_OP_BROADCAST)
        put_bytes(arena + d->off, seed, op, d->root, d->off, 0, d->bytes);
    if (d->op == ZR_OP_EXCHANGE)
        put_bytes(arena + d->off, seed, op, 0, d->off, 0, d->bytes * world);
    for (int r = 0; d->op == ZR_OP_ALL_TO_ALL && r < world; r++)
        put_bytes(arena + d->to + r * d->bytes, seed, op, r, d->off, me * d->bytes, d->bytes);
    if (d->op == ZR_OP_SHIFT)
        put_bytes(arena + d->to, seed, op, shifted_from(d->by, world, me), d->off, 0, d->bytes);
    for (int k = 0; d->op == ZR_OP_AGREE && k < d->n_sum + d->n_max; k++) {
        uint64_t x = agreed(d, seed, op, world, k);
        memcpy(arena + d->off + 8 * k, &x, 8);
    }
    return worst;
}

/* Starts the operation with lists of places that are overwritten after the call. */
static int put_segments(struct zr_comm *c, struct zr_stream *s, const struct drawn *d)
{
    static const int64_t used_again = 0x5555555555555555;
    struct drawn lent = *d;
    for (int i = 0; i < d->n_seg; i++) {
        struct zr_cut *cut = d->op == ZR_OP_ALL_GATHER ? &lent.gather[i].cut : &lent.reduce[i].cut;
        cut->at = cut->at ? lent.list[i] : NULL;
    }
    int err = d->op == ZR_OP_ALL_GATHER ? zr_comm_all_gather(c, s, lent.gather, d->n_seg, &d->tag)
                                        : zr_comm_reduce_scatter(c, s, lent.reduce, d->n_seg, &d->tag);
    for (int i = 0; i < MAX_SEGS; i++)
        for (int k = 0; k < MAX_PLACES; k++)
            *(volatile int64_t *)&lent.list[i][k] = used_again;
    return err;
}

static int put_on(struct zr_comm *c, struct zr_stream *s, const struct drawn *d)
{
    switch (d->op) {
    case ZR_OP_ALL_GATHER:
    case ZR_OP_REDUCE_SCATTER:
        return put_segments(c, s, d);
    case ZR_OP_BROADCAST:
        return zr_comm_broadcast(c, s, d->off, d->bytes, d->root, &d->tag);
    case ZR_OP_EXCHANGE:
        return zr_comm_exchange(c, s, d->off, d->bytes, &d->tag);
    case ZR_OP_AGREE:
        return zr_comm_agree(c, s, d->off, d->n_sum, d->n_max, &d->tag);
    case ZR_OP_ALL_TO_ALL:
        return zr_comm_all_to_all(c, s, d->off, d->to, d->bytes, &d->tag);
    case ZR_OP_SHIFT:
        return zr_comm_shift(c, s, d->off, d->to, d->bytes, d->by, &d->tag);
    case ZR_OP_ALL_REDUCE: /* is not drawn */
        break;
    }
    return -1;
}

static int64_t first_difference(const char *a, const char *b, int64_t n)
{
    if (memcmp(a, b, (size_t)n) == 0) /* comparing byte by byte is slow under a sanitizer */
        return -1;
    int64_t i = 0;
    while (a[i] == b[i])
        i++;
    return i;
}

void comm_suite_deal(struct fixture_groups *g, uint64_t seed, int world)
{
    for (int i = 0; i < world; i++) {
        int k = (int)random_in(&seed, 0, i);
        g->deal[i] = g->deal[k];
        g->deal[k] = i;
    }
    g->n_first = (int)random_in(&seed, 1, world);
}

/* Opens the plan's communicators. Inputs depend on the place within the group, and each group has its own
 * seed. */
static int open_plan(struct fixture *o, const struct rank *me, int64_t arena_bytes, uint64_t *seed)
{
    const struct comm_plan *p = me->arg;
    int err = fixture_open_groups(o, &me->w, p->groups, p->kind, 2, TIMEOUT_MS, arena_bytes);
    *seed = p->seed + (uint64_t)zr_group_member(&o->group, 0);
    return err;
}

/* --- one operation at a time, with the whole arena checked after each --- */

/* Checks that exactly n operations were recorded as started and finished, in order. Closes the recorder. */
static void expect_finished(struct rank *me, struct zr_flight *f, int n)
{
    struct zr_flight_view *v = malloc(sizeof *v);
    zr_flight_copy(f, v);
    zr_flight_close(f);
    RANK_CHECK(me, v->n_ops == n, "%d operations were recorded, not %d", v->n_ops, n);
    for (int i = 0; i < n; i++) {
        const struct zr_flight_op *o = &v->ops[i];
        RANK_CHECK(me, o->started_ns >= o->issued_ns && o->finished_ns >= o->started_ns,
                   "op %d (%s): issued at %lld, started at %lld, finished at %lld", i,
                   zr_op_name((enum zr_op)o->op), (long long)o->issued_ns, (long long)o->started_ns,
                   (long long)o->finished_ns);
    }
    free(v);
}

static int64_t *count_of(struct zr_comm_stats *s, enum zr_op op)
{
    int64_t *const counts[ZR_OPS] = {NULL,           &s->n_all_gather, &s->n_reduce_scatter, &s->n_broadcast,
                                     &s->n_exchange, &s->n_agree,      &s->n_all_reduce,     &s->n_all_to_all,
                                     &s->n_shift};
    return counts[op];
}

void comm_suite_conform(struct rank *me)
{
    const struct comm_plan *p = me->arg;
    struct fixture o;
    uint64_t seed;
    char why[ZR_FLIGHT_TEXT];
    struct zr_flight *flight;
    RANK_CHECK(me, open_plan(&o, me, ARENA_BYTES, &seed) == 0, "%s", zr_error_text());
    const struct zr_flight_owner owner = {.rank = me->w.rank, .world = me->w.world, .job = ""};
    RANK_CHECK(me, zr_flight_open(&owner, &flight, why) == 0, "%s", zr_error_text());
    int size = o.group.size, own = o.group.rank;
    char *arena = malloc(ARENA_BYTES), *expected = malloc(ARENA_BYTES);
    for (int k = 0; k < 2; k++) {
        struct zr_comm *c = o.comm[k];
        RANK_CHECK(me, c->group.rank == own && c->group.size == size, "place %d of %d", c->group.rank,
                   c->group.size);
        RANK_CHECK(me, zr_comm_rank(c, own) == me->w.rank, "rank %d", zr_comm_rank(c, own));
        RANK_CHECK(me, c->ops->deterministic == p->kind->exact, "deterministic is %d", c->ops->deterministic);
        RANK_CHECK(me, (uintptr_t)o.base[k] % 4096 == 0, "the arena is at %p", (void *)o.base[k]);
        RANK_CHECK(me, fixture_fetch(&o, k, arena, ARENA_BYTES) == 0, "%s", zr_error_text());
        for (int64_t i = 0; i < ARENA_BYTES; i++)
            RANK_CHECK(me, arena[i] == 0, "byte %lld of the new arena is not 0", (long long)i);
    }
    uint64_t rng = seed;
    struct zr_comm_stats want[2] = {{0}}, got;
    for (int i = 0; i < p->n_ops; i++) {
        int k = i % 2;
        struct zr_comm *c = o.comm[k];
        struct drawn d;
        draw(&rng, p->kind, size, own, k == 1 || !p->kind->one_reduces, 0, ARENA_BYTES, i, &d);
        memset(arena, POISON, ARENA_BYTES);
        prepare(&d, seed, i, size, own, arena);
        memcpy(expected, arena, ARENA_BYTES);
        RANK_CHECK(me, fixture_store(&o, k, arena, ARENA_BYTES) == 0, "%s", zr_error_text());
        zr_flight_issue(flight, (enum zr_role)k, d.op, d.wire, &d.tag);
        RANK_CHECK(me, put_on(c, o.stream[k], &d) == 0, "op %d: %s", i, zr_error_text());
        RANK_CHECK(me, fixture_fetch(&o, k, arena, ARENA_BYTES) == 0, "%s", zr_error_text());
        RANK_CHECK(me, zr_comm_status(c, why, sizeof why) == 0, "op %d: %s", i, why);
        double worst = finish(&d, seed, i, size, own, expected, p->kind->exact ? NULL : arena);
        RANK_CHECK(me, worst <= 1, "op %d: off by %.3f bounds", i, worst);
        int64_t bad = first_difference(arena, expected, ARENA_BYTES);
        RANK_CHECK(me, bad < 0, "op %d (%s, %d segments): byte %lld is 0x%02x, not 0x%02x", i,
                   zr_op_name(d.op), d.n_seg, (long long)bad, (unsigned char)arena[bad],
                   (unsigned char)expected[bad]);
        ++*count_of(&want[k], d.op);
        want[k].wire_bytes += d.wire;
        if (d.op == ZR_OP_ALL_GATHER) { /* peers may still read what is overwritten next */
            d.tag.mark = (struct zr_flight_mark){0};
            RANK_CHECK(me, zr_comm_exchange(c, o.stream[k], 0, 0, &d.tag) == 0, "%s", zr_error_text());
            o.dev->ops->stream_sync(o.stream[k]);
            want[k].n_exchange++;
        }
    }
    free(expected);
    free(arena);
    for (int k = 0; k < 2; k++) {
        zr_comm_stats(o.comm[k], &got);
        RANK_CHECK(me, got.wire_bytes == want[k].wire_bytes, "%lld bytes were counted, not %lld",
                   (long long)got.wire_bytes, (long long)want[k].wire_bytes);
        for (enum zr_op op = ZR_OP_ALL_GATHER; op < ZR_OPS; op++)
            RANK_CHECK(me, *count_of(&got, op) == *count_of(&want[k], op),
                       "%lld of %s were counted, not %lld", (long long)*count_of(&got, op), zr_op_name(op),
                       (long long)*count_of(&want[k], op));
    }
    RANK_CHECK(me, fixture_close(&o), "handles are left");
    expect_finished(me, flight, p->n_ops);
}

/* --- arrays of the program, which lie anywhere in device memory --- */

struct drawn_arrays {
    enum zr_op op;
    int64_t src, dst, bytes; /* offsets in the arena; bytes of the smaller array */
    struct zr_arrays a;
    int64_t wire;
};

/* Draws the same operation on every rank, except for what may differ: the addresses, and the gaps between the
 * parts of an all-to-all. */
static void draw_arrays(uint64_t *rng, uint64_t *mine, int world, int me, struct drawn_arrays *d)
{
    static const enum zr_op ops[] = {ZR_OP_ALL_GATHER, ZR_OP_ALL_TO_ALL, ZR_OP_SHIFT};
    const enum zero_dtype t = random_in(rng, 0, 1) ? ZERO_F32 : ZERO_BF16;
    const int64_t size = zr_dtype_bytes(t);
    int64_t at = 0;
    d->op = ops[random_in(rng, 0, 2)];
    d->a = (struct zr_arrays){.n = random_in(rng, 1, 900), .dtype = t};
    d->a.by = (int32_t)random_in(rng, -world, world);
    d->a.stride = d->a.n + random_in(mine, 0, 50);
    d->bytes = d->a.n * size;
    d->src = place(mine, &at, ARENA_BYTES, d->a.stride * size * world, size);
    d->dst = place(mine, &at, ARENA_BYTES, d->bytes * world, size);
    const int from = shifted_from(d->a.by, world, me);
    d->wire = d->op != ZR_OP_SHIFT ? d->bytes * (world - 1) : from == me ? 0 : d->bytes;
}

static void prepare_arrays(const struct drawn_arrays *d, uint64_t seed, int op, int world, int me,
                           char *arena)
{
    const int n = d->op == ZR_OP_ALL_TO_ALL ? world : 1;
    for (int p = 0; p < n; p++)
        put_bytes(arena + d->src + p * d->a.stride * zr_dtype_bytes(d->a.dtype), seed, op, me, 0,
                  p * d->bytes, d->bytes);
}

static void finish_arrays(const struct drawn_arrays *d, uint64_t seed, int op, int world, int me, char *arena)
{
    if (d->op == ZR_OP_SHIFT) {
        put_bytes(arena + d->dst, seed, op, shifted_from(d->a.by, world, me), 0, 0, d->bytes);
        return;
    }
    for (int r = 0; r < world; r++)
        put_bytes(arena + d->dst + r * d->bytes, seed, op, r, 0,
                  d->op == ZR_OP_ALL_TO_ALL ? me * d->bytes : 0, d->bytes);
}

void comm_suite_arrays(struct rank *me)
{
    const struct comm_plan *p = me->arg;
    struct fixture o;
    uint64_t seed;
    char why[512];
    RANK_CHECK(me, open_plan(&o, me, ARENA_BYTES, &seed) == 0, "%s", zr_error_text());
    const int size = o.group.size, own = o.group.rank;
    char *arena = malloc(ARENA_BYTES), *expected = malloc(ARENA_BYTES);
    uint64_t rng = seed, mine = seed + 1 + (uint64_t)own;
    int64_t wire[2] = {0, 0};
    for (int i = 0; i < p->n_ops; i++) {
        const int k = i % 2;
        struct drawn_arrays d;
        draw_arrays(&rng, &mine, size, own, &d);
        const struct zr_tag tag = {.unit = i};
        memset(arena, POISON, ARENA_BYTES);
        prepare_arrays(&d, seed, i, size, own, arena);
        memcpy(expected, arena, ARENA_BYTES);
        RANK_CHECK(me, fixture_store(&o, k, arena, ARENA_BYTES) == 0, "%s", zr_error_text());
        d.a.src = o.base[k] + d.src;
        d.a.dst = o.base[k] + d.dst;
        RANK_CHECK(me, zr_comm_arrays(o.comm[k], o.stream[k], d.op, &d.a, &tag) == 0, "%s", zr_error_text());
        RANK_CHECK(me, fixture_fetch(&o, k, arena, ARENA_BYTES) == 0, "%s", zr_error_text());
        RANK_CHECK(me, zr_comm_status(o.comm[k], why, sizeof why) == 0, "op %d: %s", i, why);
        finish_arrays(&d, seed, i, size, own, expected);
        int64_t bad = first_difference(arena, expected, ARENA_BYTES);
        RANK_CHECK(me, bad < 0, "op %d (%s): byte %lld is 0x%02x, not 0x%02x", i, zr_op_name(d.op),
                   (long long)bad, (unsigned char)arena[bad], (unsigned char)expected[bad]);
        wire[k] += d.wire;
        d.a.stride = d.a.n - 1;
        RANK_CHECK(me,
                   zr_comm_arrays(o.comm[k], o.stream[k], ZR_OP_ALL_TO_ALL, &d.a, &tag) == ZERO_ERR_ARG &&
                       strstr(zr_error_text(), "all_to_all: "),
                   "parts that overlap: \"%s\"", zr_error_text());
    }
    for (int k = 0; k < 2; k++) {
        struct zr_comm_stats got;
        zr_comm_stats(o.comm[k], &got);
        RANK_CHECK(me, got.wire_bytes == wire[k], "%lld bytes were counted, not %lld",
                   (long long)got.wire_bytes, (long long)wire[k]);
        RANK_CHECK(me, got.n_all_gather + got.n_all_to_all + got.n_shift == (p->n_ops + 1 - k) / 2,
                   "operations were counted wrongly");
    }
    free(expected);
    free(arena);
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

/* --- one arena shared by two communicators --- */

enum {
    SHARED_BYTES = 1 << 16,
    SHARED_SLOT = 256,
    OF_ALL = 0,
    OF_GROUP = 16384,
    AGREED = 32768,
    GATHERED = 40960
};

/* The exchange at off among the members of g: writes this rank's slot to mine, and every member's slot to
 * whole. */
static void expect_slots(char *mine, char *whole, const struct zr_group *g, int64_t off, char mark)
{
    for (int p = 0; p < g->size; p++)
        memset(whole + off + p * SHARED_SLOT, mark + (char)zr_group_member(g, p), SHARED_SLOT);
    memcpy(mine + off + g->rank * SHARED_SLOT, whole + off + g->rank * SHARED_SLOT, SHARED_SLOT);
}

void comm_suite_shared(struct rank *me)
{
    const struct comm_plan *p = me->arg;
    struct fixture o, more;
    struct zr_arena *a;
    struct zr_tag tag = {.unit = 3};
    char why[512];
    int64_t reserve = p->kind->reserve_bytes ? p->kind->reserve_bytes(me->w.world, 0) : 0;
    int64_t bytes = SHARED_BYTES + 2 * reserve; /* each communicator has its own reserve */
    RANK_CHECK(me, fixture_open(&o, &me->w, p->kind, 2, TIMEOUT_MS, 0) == 0, "%s", zr_error_text());
    RANK_CHECK(me, fixture_open_more(&more, &o, &me->w, p->groups, p->kind, TIMEOUT_MS) == 0, "%s",
               zr_error_text());
    struct zr_comm *all = o.comm[0], *few = more.comm[0];
    RANK_CHECK(me, zr_comm_arena(all, bytes, &a) == 0, "%s", zr_error_text());
    RANK_CHECK(me, zr_comm_attach(all, a) == 0, "%s", zr_error_text());
    RANK_CHECK(me, zr_comm_attach(few, a) == 0, "%s", zr_error_text());
    RANK_CHECK(me, zr_comm_attach(few, a) == ZERO_ERR_ORDER, "twice");
    o.base[0] = a->base;
    zr_arena_drop(a);
    char *mine = malloc(SHARED_BYTES), *whole = malloc(SHARED_BYTES);
    memset(mine, POISON, SHARED_BYTES);
    memset(whole, POISON, SHARED_BYTES);
    expect_slots(mine, whole, &all->group, OF_ALL, 1);
    expect_slots(mine, whole, &few->group, OF_GROUP, 50);
    expect_slots(mine, whole, &few->group, GATHERED, 90);
    const int64_t one = me->w.rank + 1;
    int64_t sum = 0;
    for (int i = 0; i < few->group.size; i++)
        sum += zr_comm_rank(few, i) + 1;
    memcpy(mine + AGREED, &one, sizeof one);
    memcpy(whole + AGREED, &sum, sizeof sum);
    RANK_CHECK(me, fixture_store(&o, 0, mine, SHARED_BYTES) == 0, "%s", zr_error_text());
    struct zr_gather_seg g = {GATHERED, GATHERED, true, {SHARED_SLOT, SHARED_SLOT * few->group.size}};
    struct zr_stream *s = o.stream[0];
    RANK_CHECK(me, zr_comm_exchange(few, s, OF_GROUP, SHARED_SLOT, &tag) == 0, "%s", zr_error_text());
    RANK_CHECK(me, zr_comm_exchange(all, s, OF_ALL, SHARED_SLOT, &tag) == 0, "%s", zr_error_text());
    RANK_CHECK(me, zr_comm_all_gather(few, s, &g, 1, &tag) == 0, "%s", zr_error_text());
    RANK_CHECK(me, zr_comm_agree(few, s, AGREED, 1, 0, &tag) == 0, "%s", zr_error_text());
    RANK_CHECK(me, fixture_fetch(&o, 0, mine, SHARED_BYTES) == 0, "%s", zr_error_text());
    RANK_CHECK(me, zr_comm_status(all, why, sizeof why) == 0, "%s", why);
    RANK_CHECK(me, zr_comm_status(few, why, sizeof why) == 0, "%s", why);
    int64_t bad = first_difference(mine, whole, SHARED_BYTES);
    RANK_CHECK(me, bad < 0, "byte %lld is 0x%02x, not 0x%02x", (long long)bad, (unsigned char)mine[bad],
               (unsigned char)whole[bad]);
    free(mine);
    free(whole);
    fixture_close_more(&more);
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

/* --- many operations at once on two communicators and two streams, with delays --- */

enum { N_MIXED = 60, SLOT_BYTES = 1 << 16 };

static void nap(void *arg)
{
    int us = *(int *)arg;
    if (us)
        nanosleep(&(struct timespec){.tv_nsec = us * 1000}, NULL);
}

void comm_suite_mixed(struct rank *me)
{
    const struct comm_plan *p = me->arg;
    struct fixture o;
    uint64_t seed;
    char why[512];
    const int64_t bytes = (int64_t)N_MIXED * SLOT_BYTES;
    RANK_CHECK(me, open_plan(&o, me, bytes, &seed) == 0, "%s", zr_error_text());
    int size = o.group.size, own = o.group.rank;
    struct drawn *d = calloc(2 * N_MIXED, sizeof *d);
    char *expected[2], *arena = malloc((size_t)bytes);
    uint64_t rng = seed, mine = p->seed + 1 + (uint64_t)me->w.rank,
             order = p->kind->same_order ? p->seed + 1 : mine;
    for (int k = 0; k < 2; k++) {
        expected[k] = malloc((size_t)bytes);
        memset(expected[k], POISON, (size_t)bytes);
        for (int i = 0; i < N_MIXED; i++) {
            struct drawn *e = &d[k * N_MIXED + i];
            draw(&rng, p->kind, size, own, k == 1 || !p->kind->one_reduces, (int64_t)i * SLOT_BYTES,
                 (int64_t)(i + 1) * SLOT_BYTES, i, e);
            prepare(e, seed, i, size, own, expected[k]);
        }
        RANK_CHECK(me, fixture_store(&o, k, expected[k], bytes) == 0, "%s", zr_error_text());
    }
    /* Each communicator has a fixed order of operations. How the two orders mix may differ between ranks. */
    int next[2] = {0, 0};
    while (next[0] < N_MIXED || next[1] < N_MIXED) {
        int k = (int)random_in(&order, 0, 1);
        if (next[k] == N_MIXED)
            continue;
        int us = random_in(&mine, 0, 2) ? 0 : (int)random_in(&mine, 1, 400);
        nap(&us);
        us = random_in(&mine, 0, 2) ? 0 : (int)random_in(&mine, 1, 800);
        o.dev->ops->call(o.stream[k], nap, &us, sizeof us);
        RANK_CHECK(me, put_on(o.comm[k], o.stream[k], &d[k * N_MIXED + next[k]]) == 0, "%s", zr_error_text());
        next[k]++;
    }
    for (int k = 0; k < 2; k++) {
        RANK_CHECK(me, fixture_fetch(&o, k, arena, bytes) == 0, "%s", zr_error_text());
        RANK_CHECK(me, zr_comm_status(o.comm[k], why, sizeof why) == 0, "%s", why);
        double worst = 0;
        for (int i = 0; i < N_MIXED; i++) {
            double one =
                finish(&d[k * N_MIXED + i], seed, i, size, own, expected[k], p->kind->exact ? NULL : arena);
            worst = one > worst ? one : worst;
        }
        RANK_CHECK(me, worst <= 1, "communicator %d: off by %.3f bounds", k, worst);
        int64_t bad = first_difference(arena, expected[k], bytes);
        int i = (int)(bad / SLOT_BYTES);
        RANK_CHECK(me, bad < 0, "communicator %d, op %d (%s): byte %lld differs", k, i,
                   zr_op_name(d[k * N_MIXED + i].op), (long long)bad % SLOT_BYTES);
        free(expected[k]);
    }
    free(arena);
    free(d);
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}
