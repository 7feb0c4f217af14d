/* SPDX-License-Identifier: Apache-2.0 */
/* backend_asks.c: what a backend is asked to move, role by role, and what it therefore wants of the plan. */
#include "zero/context.h"

#include <string.h>

/* What a backend is asked to move. */
struct asking {
    const struct zr_backend *backend;
    const struct zr_layout *layout;
    const struct zr_options *options;
};

/* A flat's slices on the wire of one axis: of the largest, bytes at least and at most; whether they are
 * packed although no others are; and whether any travel. */
struct slices {
    int64_t least, most;
    bool must_pack, travel;
};

/* The last ones may be short. Those of a list of places are packed where they are small, at each width by
 * itself. */
static struct slices packed_alone(struct slices s, const struct zr_cut *c, bool is_short, int64_t small_bytes)
{
    s.must_pack = c->at ? s.least <= small_bytes : is_short;
    s.most = c->at ? zr_min(s.most, small_bytes) : s.most;
    return s;
}

/* Where every rank has all of the sums those are gathered too, in fp32. */
static int64_t largest_inner(const struct asking *a, const struct zr_flat *f)
{
    bool sums = a->layout->outer == 1 && zr_placement_asked(a->options).all_reduces && f->trainable;
    return f->inner_elems * (sums ? (int64_t)sizeof(float) : zr_dtype_bytes(f->dtype));
}

/* Gradients may be narrowed for it. */
static struct slices inner_slices(const struct asking *a, const struct zr_flat *f)
{
    const struct zr_options *o = a->options;
    int64_t own = f->inner_elems * zr_dtype_bytes(f->dtype);
    const struct slices s = {
        .least = o->wire_dtype ? zr_min(own, f->inner_elems * zr_dtype_bytes(o->wire_dtype)) : own,
        .most = largest_inner(a, f),
        .travel = f->trainable || zr_placement_asked(o).shards_params};
    return packed_alone(s, &f->inner, f->inner.total < own * a->layout->inner, a->backend->small_bytes);
}

/* The largest slice of the part whose is the smallest: each part has groups that move it. */
static int64_t least_of_groups(const struct zr_layout *l, const struct zr_flat *f)
{
    int64_t least = f->fine_elems * zr_dtype_bytes(f->dtype);
    for (int32_t k = 0; f->fine.at && k < l->inner; k++) {
        const struct zr_cut groups = zr_flat_groups_cut(f, k);
        least = groups.total > 0 ? zr_min(least, zr_cut_most(&groups, l->outer)) : least;
    }
    return least;
}

/* Between groups: parameters, and sums in fp32. */
static struct slices outer_slices(const struct asking *a, const struct zr_flat *f)
{
    const struct slices s = {.least = least_of_groups(a->layout, f),
                             .most = f->fine_elems * (int64_t)sizeof(float),
                             .travel = true};
    return packed_alone(s, &f->fine, f->fine.total < s.least * a->layout->world, a->backend->small_bytes);
}

typedef struct slices slices_of(const struct asking *a, const struct zr_flat *f);

/* Of one rank, in one unit: slices that a backend packs, because they are small or not equal. */
static int64_t packed_bytes(const struct asking *a, slices_of *of)
{
    const struct zr_layout *l = a->layout;
    int64_t most = 0;
    for (int32_t u = 0; u < l->n_units; u++) {
        int64_t bytes = 0;
        int n = 0;
        bool any_alone = false;
        for (int32_t i = 0; i < l->units[u].n_flats; i++) {
            const struct slices s = of(a, &l->flats[l->units[u].first_flat + i]);
            if (!s.travel || (!s.must_pack && s.least > a->backend->small_bytes))
                continue;
            bytes += s.most;
            any_alone |= s.must_pack;
            n++;
        }
        if (any_alone || n > 1)
            most = zr_max(most, bytes);
    }
    return most;
}

void zr_backend_ask_roles(const struct zr_backend *b, const struct zr_layout *l, const struct zr_options *o,
                          struct zr_role_ask ask[ZR_ROLES])
{
    const struct asking a = {b, l, o};
    int64_t inner = 0, outer = 0;
    memset(ask, 0, ZR_ROLES * sizeof *ask);
    for (int32_t i = 0; i < l->n_flats; i++) {
        const struct zr_flat *f = &l->flats[i];
        inner = f->trainable ? zr_max(inner, f->inner_elems * zr_dtype_bytes(f->dtype)) : inner;
        outer = f->trainable ? zr_max(outer, f->fine_elems * (int64_t)sizeof(float)) : outer;
    }
    ask[ZR_ROLE_REDUCE].largest_bytes = inner;
    ask[ZR_ROLE_REDUCE_OUTER].largest_bytes = outer;
    ask[ZR_ROLE_GATHER].packed_bytes = ask[ZR_ROLE_REDUCE].packed_bytes = packed_bytes(&a, inner_slices);
    ask[ZR_ROLE_GATHER_OUTER].packed_bytes = ask[ZR_ROLE_REDUCE_OUTER].packed_bytes =
        packed_bytes(&a, outer_slices);
}

bool zr_backend_is_ragged(const struct zr_backend *b, const struct zr_layout *l, const struct zr_options *o)
{
    const struct asking a = {b, l, o};
    bool ragged = false;
    for (int32_t i = 0; i < l->n_flats; i++) {
        const struct zr_flat *f = &l->flats[i];
        bool large = largest_inner(&a, f) > b->small_bytes;
        ragged |= f->inner.at && large && inner_slices(&a, f).travel;
    }
    return ragged;
}

void zr_backend_reserve(struct zr_config *config, const struct zr_backend *b, const struct zr_layout *layout)
{
    struct zr_options *o = &config->options;
    struct zr_role_ask ask[ZR_ROLES];
    int64_t bytes[ZR_ROLES] = {0};
    const struct zr_group sizes[] = {
        {.size = layout->inner}, {.size = layout->outer}, {.size = layout->world}};
    if (!b->reserve)
        return;
    zr_backend_ask_roles(b, layout, o, ask);
    for (int r = 0; r < (layout->outer > 1 ? ZR_ROLE_MODEL : ZR_ROLE_GATHER_OUTER); r++) {
        ask[r].group = &sizes[r / 2]; /* roles come in pairs of one group */
        bytes[r] = b->reserve((enum zr_role)r, &ask[r], o->deterministic);
    }
    o->gather_scratch_bytes = bytes[ZR_ROLE_GATHER] + bytes[ZR_ROLE_GATHER_OUTER];
    o->reduce_scratch_bytes = bytes[ZR_ROLE_REDUCE] + bytes[ZR_ROLE_REDUCE_OUTER];
    o->control_scratch_bytes = bytes[ZR_ROLE_CONTROL];
    o->gather_packs_up_to = b->small_bytes;
    o->reduce_packs_up_to = o->deterministic ? 0 : b->small_bytes; /* the fixed tree packs none */
}
