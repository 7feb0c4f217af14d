/* SPDX-License-Identifier: Apache-2.0 */
/* layout.c: builds the layout. It groups tensors into units and flats, gives each layer of a tensor its
 * offset, and cuts each flat into the ranks' slices. */
#include "shard/layout.h"
#include "kernels/alloc.h"
#include "kernels/asserts.h"

#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

void zr_tensors_free(struct zr_tensor *t, int32_t n)
{
    for (int32_t i = 0; t && i < n; i++)
        free(t[i].name);
    free(t);
}

void zr_layout_free(struct zr_layout *l)
{
    if (!l)
        return;
    zr_tensors_free(l->tensors, l->n_tensors);
    for (int32_t i = 0; l->flats && i < l->n_flats; i++)
        free((void *)l->flats[i].fine.at);
    free(l->units);
    free(l->flats);
    free(l->pieces);
    free(l->piece_of);
    free(l->layer_base);
    free(l);
}

/* Returns slice k of a cut, in elements. */
static struct zr_span span_of(const struct zr_flat *f, const struct zr_cut *cut, int32_t k)
{
    int64_t size = zr_dtype_bytes(f->dtype);
    return (struct zr_span){.first = zr_cut_at(cut, k) / size, .n = zr_cut_bytes(cut, k) / size};
}

int64_t zr_flat_owned(const struct zr_flat *f, int k, int64_t *first)
{
    struct zr_span own = span_of(f, &f->fine, k);
    *first = own.first;
    return own.n;
}

struct zr_span zr_flat_span(const struct zr_flat *f, struct zr_where at, enum zr_level level)
{
    switch (level) {
    case ZR_LEVEL_FINE:
        return span_of(f, &f->fine, at.inner * f->outer + at.outer);
    case ZR_LEVEL_INNER:
        return span_of(f, &f->inner, at.inner);
    case ZR_LEVEL_ALL:
        break;
    }
    return (struct zr_span){.first = 0, .n = f->fine.total / zr_dtype_bytes(f->dtype)};
}

int64_t zr_buffer_room(const struct zr_tensor *t)
{
    return zr_round_up(t->n_elems * zr_dtype_bytes(t->dtype), ZR_PIECE_ALIGN);
}

static int64_t layer_elems(const struct zr_tensor *t)
{
    return t->n_elems / t->n_layers;
}

static int no_tensor(const struct zr_layout *l, int64_t unit, int64_t n)
{
    if (n == 0)
        return zr_fail(ZERO_ERR_ARG, "all %d tensors are buffers; a model has at least one parameter",
                       l->n_tensors);
    return zr_fail(ZERO_ERR_ARG, "unit %lld has no tensor; units must be 0..%lld without gaps%s",
                   (long long)unit, (long long)n - 1,
                   l->n_buffers ? " (a buffer belongs to no unit, whatever its entry says)" : "");
}

/* Counts the units, and checks that they are 0..n-1, each with at least one tensor. */
static int count_units(const struct zr_layout *l, int32_t *n_units)
{
    int64_t n = 0;
    for (int32_t i = 0; i < l->n_tensors; i++)
        if (!l->tensors[i].buffer)
            n = zr_max(n, l->tensors[i].unit + l->tensors[i].n_layers);
    /* n_layers layers fill at most n_layers units. So if any unit is empty, one of the first n_layers + 1 is,
     * however high the numbers go. */
    int64_t n_looked_at = zr_min(n, l->layer_base[l->n_tensors] + (int64_t)1), gap = 0;
    unsigned char *seen;
    ZR_TRY(ZR_ZALLOC(seen, n_looked_at, "a table of %lld units", (long long)n_looked_at));
    for (int32_t i = 0; i < l->n_tensors; i++) {
        const struct zr_tensor *t = &l->tensors[i];
        if (!t->buffer && t->unit < n_looked_at)
            memset(seen + t->unit, 1, (size_t)zr_min(t->n_layers, n_looked_at - t->unit));
    }
    while (gap < n_looked_at && seen[gap])
        gap++;
    free(seen);
    if (n == 0 || gap < n_looked_at)
        return no_tensor(l, gap, n);
    *n_units = (int32_t)n;
    return 0;
}

/* Whether two tensors may share a flat. Different optimizers or numbers of states get different flats, so
 * that each flat keeps only the states it needs. Tensors that are not cut are separate, because the norm
 * counts their gradients once. Copies of another pipeline stage's tensors are separate, because snapshots
 * leave them out. */
static bool can_share_flat(const struct zr_tensor *a, const struct zr_tensor *b)
{
    return a->dtype == b->dtype && !a->grad == !b->grad &&
           (!a->grad || (a->optimizer == b->optimizer && a->n_states == b->n_states &&
                         a->masters == b->masters && a->moments == b->moments)) &&
           a->cut == b->cut && (a->tie == ZR_TIE_COPY) == (b->tie == ZR_TIE_COPY);
}

static bool goes_in_place(const struct zr_layout *l, const struct zr_tensor *t)
{
    return l->in_place && t->stacked;
}

static int64_t gap_behind(const struct zr_layout *l, bool trainable)
{
    return l->gaps && trainable ? ZR_GAP_BYTES : 0;
}

/* Appends layer s of tensor t to the flat being built. */
static void add_piece(struct zr_layout *l, struct zr_flat *f, int32_t t, int32_t s)
{
    int64_t n = layer_elems(&l->tensors[t]);
    int64_t size = zr_dtype_bytes(f->dtype);
    int64_t at = zr_round_up(f->fine.total, ZR_PIECE_ALIGN);
    ZR_ASSERT(size > 0 && n > 0 && at % size == 0);
    l->piece_of[l->layer_base[t] + s] = l->n_pieces;
    l->pieces[l->n_pieces++] = (struct zr_piece){.tensor = t, .layer = s, .first = at / size, .n = n};
    f->n_pieces++;
    f->fine.total = at + n * size + (f->in_place ? 0 : gap_behind(l, f->trainable));
}

static struct zr_flat *open_flat(struct zr_layout *l, int32_t unit, const struct zr_tensor *t)
{
    struct zr_flat *f = &l->flats[l->n_flats++];
    *f = (struct zr_flat){.unit = unit,
                          .dtype = t->dtype,
                          .optimizer = t->grad ? t->optimizer : ZR_OPTIMIZER_NONE,
                          .n_states = t->grad ? t->n_states : 0,
                          .masters = t->grad ? t->masters : ZERO_MASTERS_F32,
                          .moments = t->grad ? t->moments : ZERO_MOMENTS_F32,
                          .sum_dtype = t->grad && t->sum_dtype == ZERO_BF16 ? ZERO_BF16 : ZERO_F32,
                          .trainable = t->grad != NULL,
                          .in_place = goes_in_place(l, t),
                          .cut = t->cut,
                          .copy = t->tie == ZR_TIE_COPY,
                          .first_piece = l->n_pieces};
    return f;
}

/* One layer of a tensor. Those of a unit form a list, in the order of the model's table. */
struct member {
    int32_t tensor, layer, next;
};

/* Cuts a flat into equal slices. A packed flat is padded for this. */
static void cut_equally(const struct zr_layout *l, struct zr_flat *f)
{
    int64_t size = zr_dtype_bytes(f->dtype), per_rank = (f->fine.total + l->world - 1) / l->world;
    f->fine.each = zr_round_up(per_rank, ZR_SHARD_ALIGN);
    ZR_ASSERT(f->n_pieces > 0 && f->fine.each * l->world >= f->fine.total);
    if (!f->in_place)
        f->fine.total = f->fine.each * l->world;
    f->inner = zr_cut_merged(&f->fine, l->outer);
    f->fine_elems = f->fine.each / size;
    f->inner_elems = f->inner.each / size;
    f->elems = f->inner_elems * l->inner;
}

/* ---- cuts that keep granules whole ----
 *
 * Between two ranks a flat may be cut at its end or at the first element of a piece. Inside a piece it may be
 * cut at multiples of the granule that are multiples of 32 elements too. The cut nearest to an equal one is
 * taken, and the lower of two. So cuts ascend, and a granule larger than an equal share leaves some rank
 * nothing. */

/* Whether equal slices could cut a granule of the flat. */
static bool needs_places(const struct zr_layout *l, const struct zr_flat *f)
{
    bool needs = false;
    for (int32_t i = 0; i < f->n_pieces; i++)
        needs |= !zr_granule_fits(l->tensors[l->pieces[f->first_piece + i].tensor].granule);
    return needs && l->world > 1;
}

static int64_t common_divisor(int64_t a, int64_t b)
{
    while (b) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* Returns the elements between two possible cuts inside a piece, or the whole piece if there is none
 * inside. */
static int64_t cut_step(const struct zr_layout *l, const struct zr_piece *p)
{
    int64_t granule = zr_max(l->tensors[p->tensor].granule, 1), step;
    if (__builtin_mul_overflow(granule / common_divisor(granule, ZR_NORM_BLOCK), (int64_t)ZR_NORM_BLOCK,
                               &step))
        return p->n;
    return zr_min(step, p->n);
}

/* Returns the piece that element t of the flat lies in, or in whose padding it lies. */
static const struct zr_piece *piece_at(const struct zr_layout *l, const struct zr_flat *f, int64_t t)
{
    const struct zr_piece *p = &l->pieces[f->first_piece];
    int32_t lo = 0, hi = f->n_pieces - 1;
    while (lo < hi) {
        int32_t mid = (lo + hi + 1) / 2;
        if (p[mid].first <= t)
            lo = mid;
        else
            hi = mid - 1;
    }
    return p + lo;
}

/* Returns the possible cut nearest to element t. n: elements of the flat. */
static int64_t nearest_place(const struct zr_layout *l, const struct zr_flat *f, int64_t t, int64_t n)
{
    const struct zr_piece *p = piece_at(l, f, t), *end = &l->pieces[f->first_piece] + f->n_pieces;
    int64_t step = cut_step(l, p), last = (p->n - 1) / step * step, next = p + 1 < end ? p[1].first : n;
    int64_t below = zr_min((t - p->first) / step * step, last);
    int64_t above = below < last ? p->first + below + step : next;
    below += p->first;
    return t - below <= above - t ? below : above;
}

/* Returns the elements that a rank reserves: those of the largest of n slices, rounded up. */
static int64_t most_elems(const struct zr_cut *c, int32_t n, int64_t size)
{
    return zr_round_up(zr_cut_most(c, n), ZR_SHARD_ALIGN) / size;
}

/* Notes the bytes of the largest slices. groups has room for one number per inner slice. */
static void note_largest(const struct zr_layout *l, struct zr_flat *f, int64_t *groups)
{
    for (int32_t k = 0; k < l->inner; k++) {
        const struct zr_cut part = zr_cut_part(&f->fine, k * l->outer, l->outer);
        groups[k] = zr_cut_most(&part, l->outer);
    }
    f->groups_most = groups;
    f->fine.most = zr_cut_most(&f->fine, l->world);
    f->inner.most = zr_cut_most(&f->inner, l->inner);
}

static int cut_at_places(const struct zr_layout *l, struct zr_flat *f)
{
    int64_t size = zr_dtype_bytes(f->dtype), total = f->fine.total;
    int64_t *at;
    ZR_TRY(ZR_ALLOC(at, (int64_t)l->world + 1 + l->inner, "%d places to cut unit %d at", l->world, f->unit));
    if (!f->in_place)
        total = zr_round_up(total, ZR_PIECE_ALIGN);
    int64_t n = total / size;
    for (int32_t k = 0; k <= l->world; k++)
        at[k] = k < l->world ? nearest_place(l, f, n / l->world * k + n % l->world * k / l->world, n) : n;
    f->fine = (struct zr_cut){.total = total, .at = at, .at_bytes = (int32_t)size};
    f->inner = zr_cut_merged(&f->fine, l->outer);
    note_largest(l, f, at + l->world + 1);
    f->fine_elems = most_elems(&f->fine, l->world, size);
    f->inner_elems = most_elems(&f->inner, l->inner, size);
    f->elems = zr_round_up(total, ZR_SHARD_ALIGN) / size;
    return 0;
}

static int cut_flat(struct zr_layout *l, struct zr_flat *f)
{
    f->outer = l->outer;
    if (!needs_places(l, f)) {
        cut_equally(l, f);
        return 0;
    }
    l->has_places = true;
    return cut_at_places(l, f);
}

/* Gives a packed flat its offsets in the unit. */
static void place_packed(struct zr_unit *unit, struct zr_flat *f)
{
    f->param_at = unit->param_bytes;
    unit->param_bytes = zr_round_up(f->param_at + f->fine.total, ZR_PIECE_ALIGN);
    f->shard_at = unit->shard_bytes;
    unit->shard_bytes = zr_round_up(f->shard_at + f->inner_elems * zr_dtype_bytes(f->dtype), ZR_PIECE_ALIGN);
    if (!f->trainable)
        return;
    f->grad_at = unit->grad_bytes;
    unit->grad_bytes = zr_round_up(f->grad_at + f->fine.total, ZR_PIECE_ALIGN);
}

/* Makes the flats of a unit. head: its first member. done: (all members) whether a member is in a flat. */
static int build_unit(struct zr_layout *l, int32_t u, const struct member *m, int32_t head,
                      unsigned char *done)
{
    struct zr_unit *unit = &l->units[u];
    unit->first_flat = l->n_flats;
    for (int32_t i = head; i >= 0; i = m[i].next) {
        const struct zr_tensor *t = &l->tensors[m[i].tensor];
        unit->asked_resident |= t->resident;
        unit->trainable |= t->grad != NULL;
        if (done[i])
            continue;
        struct zr_flat *f = open_flat(l, u, t);
        for (int32_t j = i; j >= 0; j = m[j].next) {
            const struct zr_tensor *other = &l->tensors[m[j].tensor];
            bool joins =
                f->in_place ? j == i : !done[j] && !goes_in_place(l, other) && can_share_flat(t, other);
            if (!joins)
                continue;
            add_piece(l, f, m[j].tensor, m[j].layer);
            done[j] = 1;
        }
        int err = cut_flat(l, f);
        if (err)
            return err;
        if (!f->in_place)
            place_packed(unit, f);
        l->state_elems += f->trainable ? f->fine_elems : 0;
    }
    unit->n_flats = l->n_flats - unit->first_flat;
    return 0;
}

/* Checks that all tensors of a unit that give uses agree. */
static int set_uses(struct zr_layout *l)
{
    for (int32_t i = 0; i < l->n_tensors; i++) {
        const struct zr_tensor *t = &l->tensors[i];
        for (int64_t u = t->unit; t->uses && u < t->unit + t->n_layers; u++) {
            int32_t *uses = &l->units[u].uses;
            if (*uses && *uses != t->uses)
                return zr_fail(ZERO_ERR_ARG,
                               "tensors[%d] (%s): uses is %d, but another tensor of its unit %lld has %d; "
                               "allowed: one number for all tensors of a unit, or 0",
                               i, t->name, t->uses, (long long)u, *uses);
            *uses = t->uses;
        }
    }
    return 0;
}

/* Gives each stacked tensor that must be contiguous a region, in which its layers follow each other. */
static void place_in_place(struct zr_layout *l)
{
    for (int32_t t = 0; t < l->n_tensors; t++) {
        const struct zr_tensor *x = &l->tensors[t];
        if (!goes_in_place(l, x))
            continue;
        int64_t bytes = x->n_elems * zr_dtype_bytes(x->dtype);
        for (int32_t s = 0; s < x->n_layers; s++) {
            struct zr_flat *f = (struct zr_flat *)zr_piece_flat(l, l->piece_of[l->layer_base[t] + s]);
            f->param_at = l->in_place_param_bytes + s * (bytes / x->n_layers);
            f->grad_at = l->in_place_grad_bytes + s * (bytes / x->n_layers);
        }
        l->in_place_param_bytes += zr_round_up(bytes, ZR_PIECE_ALIGN);
        if (x->grad)
            l->in_place_grad_bytes += zr_round_up(bytes, ZR_PIECE_ALIGN) + gap_behind(l, true);
    }
}

const struct zr_flat *zr_piece_flat(const struct zr_layout *l, int32_t piece)
{
    int32_t lo = 0, hi = l->n_flats - 1; /* the last flat that starts at or before the piece */
    while (lo < hi) {
        int32_t mid = (lo + hi + 1) / 2;
        if (l->flats[mid].first_piece <= piece)
            lo = mid;
        else
            hi = mid - 1;
    }
    return &l->flats[lo];
}

uint64_t zr_tensor_hash(const struct zr_tensor *t, uint64_t seed)
{
    int64_t v[] = {t->dtype,     t->n_elems,  t->n_layers,          t->unit,      t->grad != NULL, t->stacked,
                   t->overwrite, t->resident, t->pointer_per_begin, t->optimizer, t->n_states,     t->group,
                   t->no_decay,  t->buffer};
    const int64_t cut[] = {t->cut_dim, t->cut_blocks, t->cut_size, -1};
    /* The hash does not tell remainders from fp32 masters, because results and checkpoints are the same.
     * Ranks compare the choice by itself. */
    const bool no_masters = t->masters == ZERO_MASTERS_NONE;
    const int64_t precision[] = {no_masters ? ZERO_MASTERS_NONE : ZERO_MASTERS_F32, t->moments, t->sum_dtype};
    const int64_t tie[] = {t->tie, t->tied_grad != NULL};
    if (!zr_granule_fits(t->granule)) /* otherwise it changes nothing */
        seed = XXH64(&t->granule, sizeof t->granule, seed);
    if (t->cut)
        seed = XXH64(cut, sizeof cut, seed);
    if (t->partial)
        seed = XXH64("partial", 7, seed);
    if (t->given_whole)
        seed = XXH64("given whole", 11, seed);
    if (no_masters || t->moments || t->sum_dtype == ZERO_BF16)
        seed = XXH64(precision, sizeof precision, seed);
    if (t->uses)
        seed = XXH64(&t->uses, sizeof t->uses, seed);
    if (t->pp_stage)
        seed = XXH64(&t->pp_stage, sizeof t->pp_stage, seed);
    if (t->tie != ZR_TIE_NONE)
        seed = XXH64(tie, sizeof tie, seed);
    return XXH64(t->name, strlen(t->name), XXH64(t->shape, sizeof t->shape, XXH64(v, sizeof v, seed)));
}

static uint64_t hash_layout(const struct zr_layout *l)
{
    int64_t head[] = {l->world, l->in_place, l->gaps, l->n_tensors, l->n_units};
    /* Without groups the seed is 0. Only ranks of one job compare this hash; checkpoints do not depend on
     * it. */
    uint64_t h = XXH64(head, sizeof head, l->outer > 1 ? (uint64_t)l->outer : 0);
    for (int32_t i = 0; i < l->n_tensors; i++)
        h ^= zr_tensor_hash(&l->tensors[i], (uint64_t)i + 1) * 0x9e3779b97f4a7c15u;
    for (int32_t i = 0; i < l->n_flats; i++)
        if (l->flats[i].fine.at)
            h = XXH64(l->flats[i].fine.at, ((size_t)l->world + 1) * sizeof *l->flats[i].fine.at, h);
    return h;
}

static int no_memory(const struct zr_layout *l)
{
    return zr_fail(ZERO_ERR_NOMEM, "no memory for the layout of %d tensors", l->n_tensors);
}

/* Counts the layers before each tensor, the parameters and the buffers. */
static int count_tensors(struct zr_layout *l)
{
    l->layer_base = calloc((size_t)l->n_tensors + 1, sizeof *l->layer_base);
    if (!l->layer_base)
        return no_memory(l);
    for (int32_t i = 0; i < l->n_tensors; i++) {
        const struct zr_tensor *t = &l->tensors[i];
        l->layer_base[i + 1] = l->layer_base[i] + (int32_t)t->n_layers;
        if (t->buffer) {
            l->n_buffers++;
            l->buffer_bytes += zr_buffer_room(t);
            continue;
        }
        l->n_params += t->n_elems;
    }
    return 0;
}

/* Lists the members of each unit. Returns the first member of each list, -1 for an empty one. NULL: no
 * memory. */
static int32_t *list_members(const struct zr_layout *l, struct member *members)
{
    int32_t *head = malloc((size_t)l->n_units * sizeof *head),
            *tail = malloc((size_t)l->n_units * sizeof *tail);
    for (int32_t u = 0; head && u < l->n_units; u++)
        head[u] = -1;
    int32_t k = 0;
    for (int32_t t = 0; head && tail && t < l->n_tensors; t++) {
        for (int32_t s = 0; s < l->tensors[t].n_layers; s++, k++) {
            int32_t u = l->tensors[t].unit + s;
            members[k] = (struct member){.tensor = t, .layer = s, .next = -1};
            if (head[u] < 0)
                head[u] = k;
            else
                members[tail[u]].next = k;
            tail[u] = k;
        }
    }
    if (!tail) {
        free(head);
        head = NULL;
    }
    free(tail);
    return head;
}

static int build_units(struct zr_layout *l)
{
    size_t n = (size_t)l->layer_base[l->n_tensors];
    l->units = calloc((size_t)l->n_units, sizeof *l->units);
    l->flats = calloc(n, sizeof *l->flats);
    l->pieces = calloc(n, sizeof *l->pieces);
    l->piece_of = calloc(n, sizeof *l->piece_of);
    struct member *members = calloc(n, sizeof *members);
    unsigned char *done = calloc(n, 1);
    int32_t *head = members ? list_members(l, members) : NULL;
    int err = 0;
    if (!l->units || !l->flats || !l->pieces || !l->piece_of || !done || !head)
        err = no_memory(l);
    for (int32_t u = 0; !err && u < l->n_units; u++)
        err = build_unit(l, u, members, head[u], done);
    free(members);
    free(done);
    free(head);
    return err;
}

int zr_layout_make(struct zr_tensor *tensors, int32_t n_tensors, int32_t inner, int32_t outer, bool in_place,
                   bool gaps, struct zr_layout **out)
{
    struct zr_layout *l;
    if (ZR_ZALLOC(l, 1, "the layout")) {
        zr_tensors_free(tensors, n_tensors);
        return ZERO_ERR_NOMEM;
    }
    *l = (struct zr_layout){.inner = inner,
                            .outer = outer,
                            .world = inner * outer,
                            .in_place = in_place,
                            .gaps = gaps,
                            .tensors = tensors,
                            .n_tensors = n_tensors};
    int err = count_tensors(l);
    if (!err)
        err = count_units(l, &l->n_units);
    if (!err)
        err = build_units(l);
    if (!err)
        err = set_uses(l);
    if (err) {
        zr_layout_free(l);
        return err;
    }
    place_in_place(l);
    l->hash = hash_layout(l);
    *out = l;
    return 0;
}
