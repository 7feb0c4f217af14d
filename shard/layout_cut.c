/* SPDX-License-Identifier: Apache-2.0 */
/* layout_cut.c: cuts flats at places that tear no granule; see layout.h.
 *
 * Between two ranks a flat may be cut at the first element of a piece, at multiples of its granule that are
 * multiples of 32 elements too, and at the flat's end. Of these the nearest to an equal cut is taken, the
 * lower of two. So places ascend, and a granule larger than a rank's equal share leaves some rank nothing. */
#include "shard/layout_cut.h"

#include <stdlib.h>

bool zr_flat_needs_places(const struct zr_layout *l, const struct zr_flat *f)
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

/* Elements between two places of a piece; the piece's, where none lies inside it. */
static int64_t step_of(const struct zr_layout *l, const struct zr_piece *p)
{
    int64_t granule = zr_max(l->tensors[p->tensor].granule, 1), step;
    if (__builtin_mul_overflow(granule / common_divisor(granule, ZR_NORM_BLOCK), (int64_t)ZR_NORM_BLOCK,
                               &step))
        return p->n;
    return zr_min(step, p->n);
}

/* The piece that element t of the flat lies in, or whose padding it is. */
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

/* The place nearest to element t, of n. */
static int64_t nearest_place(const struct zr_layout *l, const struct zr_flat *f, int64_t t, int64_t n)
{
    const struct zr_piece *p = piece_at(l, f, t), *end = &l->pieces[f->first_piece] + f->n_pieces;
    int64_t step = step_of(l, p), last = (p->n - 1) / step * step, next = p + 1 < end ? p[1].first : n;
    int64_t below = zr_min((t - p->first) / step * step, last);
    int64_t above = below < last ? p->first + below + step : next;
    below += p->first;
    return t - below <= above - t ? below : above;
}

/* What a rank reserves: of the largest of n slices. */
static int64_t most_elems(const struct zr_cut *c, int32_t n, int64_t size)
{
    return zr_round_up(zr_cut_most(c, n), ZR_SHARD_ALIGN) / size;
}

/* Bytes of the largest slices; groups has room for one number for each inner slice. */
static void know_most(const struct zr_layout *l, struct zr_flat *f, int64_t *groups)
{
    for (int32_t k = 0; k < l->inner; k++) {
        const struct zr_cut part = zr_cut_part(&f->fine, k * l->outer, l->outer);
        groups[k] = zr_cut_most(&part, l->outer);
    }
    f->groups_most = groups;
    f->fine.most = zr_cut_most(&f->fine, l->world);
    f->inner.most = zr_cut_most(&f->inner, l->inner);
}

int zr_flat_cut_at_places(const struct zr_layout *l, struct zr_flat *f)
{
    int64_t size = zr_dtype_bytes(f->dtype), total = f->fine.total;
    int64_t *at = malloc(((size_t)l->world + 1 + (size_t)l->inner) * sizeof *at);
    if (!at)
        return zr_fail(ZR_ERR_NOMEM, "no memory for %d places to cut unit %d at", l->world, f->unit);
    if (!f->in_place)
        total = zr_round_up(total, ZR_PIECE_ALIGN);
    int64_t n = total / size;
    for (int32_t k = 0; k <= l->world; k++)
        at[k] = k < l->world ? nearest_place(l, f, n / l->world * k + n % l->world * k / l->world, n) : n;
    f->fine = (struct zr_cut){.total = total, .at = at, .at_bytes = (int32_t)size};
    f->inner = zr_cut_merged(&f->fine, l->outer);
    know_most(l, f, at + l->world + 1);
    f->fine_elems = most_elems(&f->fine, l->world, size);
    f->inner_elems = most_elems(&f->inner, l->inner, size);
    f->elems = zr_round_up(total, ZR_SHARD_ALIGN) / size;
    return 0;
}
