/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_pack.c: chooses the segments to pack, divides them into rounds, and collects the copies. */
#include "comm/nccl/nccl_pack.h"

enum { PLACE_BYTES = 128 }; /* all slices but the last are multiples of it */

/* ---- which segments are packed ---- */

static bool is_short(const struct zr_nccl *m, const struct zr_nccl_shape *x)
{
    return x->cut.total < m->base.group.size * x->cut.each;
}

static int64_t longest_slice(const struct zr_nccl *m, const struct zr_nccl_shape *x)
{
    return zr_cut_most(&x->cut, m->base.group.size);
}

/* Unpacked, such a segment would take a call for each place. */
static bool has_small_places(const struct zr_nccl *m, const struct zr_nccl_shape *x)
{
    return x->cut.at && longest_slice(m, x) <= m->set->opt.small_bytes;
}

/* Whether an NCCL collective cannot take the segment, or not in one call. */
static bool must_pack(const struct zr_nccl *m, const struct zr_nccl_shape *x)
{
    return x->cut.at ? has_small_places(m, x) : is_short(m, x);
}

static bool is_ours(const struct zr_nccl_pack *p, const struct zr_nccl_shape *x)
{
    return x->cut.total > 0 && (!p->dtype || x->dtype == p->dtype);
}

void zr_nccl_pack_open(struct zr_nccl_pack *p, const struct zr_nccl *m, zr_nccl_shape_of *of, const void *seg,
                       int n_seg, int dtype, bool takes_uneven)
{
    *p = (struct zr_nccl_pack){.m = m,
                               .of = of,
                               .seg = seg,
                               .n_seg = m->base.group.size > 1 ? n_seg : 0,
                               .dtype = dtype,
                               .takes_uneven = takes_uneven};
    int n_small = 0, n_forced = 0;
    for (int i = 0; i < p->n_seg; i++) {
        const struct zr_nccl_shape x = of(seg, i);
        if (!is_ours(p, &x))
            continue;
        bool forced = takes_uneven && must_pack(m, &x);
        n_forced += forced;
        n_small += !forced && !x.cut.at && x.cut.each <= m->set->opt.small_bytes;
    }
    p->small_bytes = n_forced + n_small > 1 ? m->set->opt.small_bytes : 0;
}

static bool packs(const struct zr_nccl_pack *p, const struct zr_nccl_shape *x)
{
    if (!is_ours(p, x))
        return false;
    return (p->takes_uneven && must_pack(p->m, x)) || (!x->cut.at && x->cut.each <= p->small_bytes);
}

bool zr_nccl_packs(const struct zr_nccl_pack *p, int i)
{
    const struct zr_nccl_shape x = p->of(p->seg, i);
    return i < p->n_seg && packs(p, &x);
}

/* ---- rounds ---- */

static int64_t round_up(int64_t n, int64_t to)
{
    return (n + to - 1) / to * to;
}

bool zr_nccl_pack_next(struct zr_nccl_pack *p, int64_t *used, int64_t most_bytes)
{
    const struct zr_nccl *m = p->m;
    int size = m->base.group.size;
    int64_t fits = (m->room_bytes - *used) / size;
    fits = (fits < most_bytes ? fits : most_bytes) / PLACE_BYTES * PLACE_BYTES;
    p->n = 0;
    p->row = 0;
    p->room = m->base.arena + m->room_at + *used;
    while (p->next < p->n_seg && p->n < ZR_NCCL_PARTS) {
        const struct zr_nccl_shape x = p->of(p->seg, p->next);
        int64_t left = packs(p, &x) ? longest_slice(m, &x) - p->at : 0;
        if (left <= 0) {
            p->next++, p->at = 0;
            continue;
        }
        int64_t n = left < fits - p->row ? left : fits - p->row;
        if (n <= 0)
            break;
        p->part[p->n++] = (struct zr_nccl_part){p->next, p->at, n, p->row};
        p->row += round_up(n, PLACE_BYTES);
        p->at += n;
    }
    *used = round_up(*used + size * p->row, ZR_NCCL_ALIGN);
    return p->n > 0;
}

/* ---- copies ---- */

/* Bytes of the part in places [0, end) together, with equal slices. Only the last place that has any bytes
 * may have fewer than n. */
static int64_t bytes_before(const struct zr_nccl_shape *x, const struct zr_nccl_part *part, int end)
{
    int64_t full = x->cut.total / x->cut.each;
    if (end <= full)
        return end * part->n;
    int64_t rest = x->cut.total - full * x->cut.each - part->at;
    return full * part->n + (rest <= 0 ? 0 : rest < part->n ? rest : part->n);
}

int64_t zr_nccl_part_bytes(const struct zr_nccl_pack *p, const struct zr_nccl_part *part, int place)
{
    const struct zr_nccl_shape x = p->of(p->seg, part->seg);
    int64_t left = zr_cut_bytes(&x.cut, place) - part->at;
    return left <= 0 ? 0 : left < part->n ? left : part->n;
}

int zr_nccl_copy(const struct zr_nccl *m, struct zr_stream *s, struct zr_nccl_copies *t,
                 const struct zr_copy_rows *c)
{
    if (c->bytes <= 0)
        return 0;
    t->c[t->n++] = *c;
    return t->n == ZR_MAX_COPIES ? zr_nccl_copy_end(m, s, t) : 0;
}

int zr_nccl_copy_end(const struct zr_nccl *m, struct zr_stream *s, struct zr_nccl_copies *t)
{
    int n = t->n;
    t->n = 0;
    return n ? m->set->dev->ops->copy_rows(s, t->c, n) : 0;
}

/* Copies slices of any size, one place after the other. */
static int copy_places(const struct zr_nccl_pack *p, const struct zr_nccl_shape *x,
                       const struct zr_nccl_part *part, int first, int end, bool into_room,
                       struct zr_stream *s, struct zr_nccl_copies *t)
{
    int err = 0;
    for (int place = first; place < end && !err; place++) {
        char *flat = p->m->base.arena + x->flat + zr_cut_at(&x->cut, place) + part->at,
             *room = zr_nccl_part_at(p, part, place);
        int64_t n = zr_nccl_part_bytes(p, part, place);
        struct zr_copy_rows c = {
            .row_bytes = n, .bytes = n, .dst = into_room ? room : flat, .src = into_room ? flat : room};
        err = zr_nccl_copy(p->m, s, t, &c);
    }
    return err;
}

int zr_nccl_copy_part(const struct zr_nccl_pack *p, const struct zr_nccl_part *part, int first, int end,
                      bool into_room, struct zr_stream *s, struct zr_nccl_copies *t)
{
    const struct zr_nccl_shape x = p->of(p->seg, part->seg);
    if (x.cut.at)
        return copy_places(p, &x, part, first, end, into_room, s, t);
    char *flat = p->m->base.arena + x.flat + first * x.cut.each + part->at,
         *room = zr_nccl_part_at(p, part, first);
    struct zr_copy_rows c = {.row_bytes = part->n,
                             .bytes = bytes_before(&x, part, end) - bytes_before(&x, part, first),
                             .dst = into_room ? room : flat,
                             .src = into_room ? flat : room,
                             .dst_stride = into_room ? p->row : x.cut.each,
                             .src_stride = into_room ? x.cut.each : p->row};
    return zr_nccl_copy(p->m, s, t, &c);
}
