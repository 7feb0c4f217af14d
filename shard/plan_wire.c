/* SPDX-License-Identifier: Apache-2.0 */
/* plan_wire.c: counts traffic: the bytes that a rank takes from others in each operation, and in a steady
 * step. */
#include "comm/segment.h"
#include "kernels/alloc.h"
#include "shard/plan_slots.h"

#include <stdlib.h>

/* A quantity of one flat. of_trainable adds it up over the trained flats of a unit. */
typedef int64_t (*flat_fn)(const struct zr_plan *p, const struct zr_flat *f, struct zr_where at);

static int64_t of_trainable(const struct zr_plan *p, int32_t unit, struct zr_where at, flat_fn fn)
{
    const struct zr_unit *u = &p->layout->units[unit];
    int64_t n = 0;
    for (int32_t i = 0; i < u->n_flats; i++) {
        const struct zr_flat *f = &p->layout->flats[u->first_flat + i];
        n += f->trainable ? fn(p, f, at) : 0;
    }
    return n;
}

/* Return the bytes of one gather inside a group, and of one between groups. */
static int64_t inner_gather(const struct zr_plan *p, const struct zr_cut *c, struct zr_where at)
{
    return zr_gather_wire(c, p->hop[ZR_INNER].size, at.inner, p->gather_packs_up_to);
}

static int64_t outer_gather(const struct zr_plan *p, const struct zr_cut *c, struct zr_where at)
{
    return zr_gather_wire(c, p->hop[ZR_OUTER].size, at.outer, p->gather_packs_up_to);
}

int64_t zr_plan_gather_wire(const struct zr_plan *p, int32_t unit, struct zr_where at)
{
    const struct zr_unit *u = &p->layout->units[unit];
    int64_t n = 0;
    for (int32_t i = 0; i < u->n_flats; i++) {
        const struct zr_flat *f = &p->layout->flats[u->first_flat + i];
        n += zr_plan_gathers(p, f) ? inner_gather(p, &f->inner, at) : 0;
    }
    return n;
}

int64_t zr_plan_reduce_wire(const struct zr_plan *p, int32_t unit, struct zr_where at, enum zero_dtype wire)
{
    const struct zr_unit *u = &p->layout->units[unit];
    int64_t n = 0;
    for (int32_t i = 0; i < u->n_flats; i++) {
        const struct zr_flat *f = &p->layout->flats[u->first_flat + i];
        struct zr_cut cut = f->inner;
        if (!f->trainable)
            continue;
        /* Peers' arenas are read as they are, so a wire wider than the tensor's dtype changes nothing. */
        if (wire && zr_dtype_bytes(wire) < zr_dtype_bytes(f->dtype))
            cut = zr_cut_in(&cut, zr_dtype_bytes(f->dtype), zr_dtype_bytes(wire));
        n += zr_reduce_wire(&cut, p->hop[ZR_INNER].size, at.inner, p->reduce_packs_up_to);
    }
    return n;
}

static int64_t inner_sum(const struct zr_plan *p, const struct zr_flat *f, struct zr_where at)
{
    const struct zr_cut sums = zr_flat_sums_cut(f, &f->inner, f->sum_dtype);
    return inner_gather(p, &sums, at);
}

int64_t zr_plan_grad_gather_wire(const struct zr_plan *p, int32_t unit, struct zr_where at)
{
    return of_trainable(p, unit, at, inner_sum);
}

static int64_t outer_reduce(const struct zr_plan *p, const struct zr_flat *f, struct zr_where at)
{
    const struct zr_cut sums = zr_flat_group_sums_cut(f, at.inner, ZERO_F32);
    return zr_reduce_wire(&sums, p->hop[ZR_OUTER].size, at.outer, p->reduce_packs_up_to);
}

int64_t zr_plan_outer_reduce_wire(const struct zr_plan *p, int32_t unit, struct zr_where at)
{
    return of_trainable(p, unit, at, outer_reduce);
}

static int64_t outer_sum(const struct zr_plan *p, const struct zr_flat *f, struct zr_where at)
{
    const struct zr_cut sums = zr_flat_group_sums_cut(f, at.inner, f->sum_dtype);
    return outer_gather(p, &sums, at);
}

int64_t zr_plan_outer_sum_wire(const struct zr_plan *p, int32_t unit, struct zr_where at)
{
    return of_trainable(p, unit, at, outer_sum);
}

static int64_t outer_params(const struct zr_plan *p, const struct zr_flat *f, struct zr_where at)
{
    const struct zr_cut groups = zr_flat_groups_cut(f, at.inner);
    return outer_gather(p, &groups, at);
}

int64_t zr_plan_outer_gather_wire(const struct zr_plan *p, int32_t unit, struct zr_where at)
{
    return of_trainable(p, unit, at, outer_params);
}

/* Adds the traffic of one unit in a steady step. */
static void add_traffic(const struct zr_plan *p, int32_t u, const struct zr_core_work *w,
                        enum zero_dtype wire, struct zr_where at, struct zr_traffic *t)
{
    bool trainable = p->layout->units[u].trainable;
    t->n_gather += w->gathers[u];
    t->n_reduce += w->reduces[u];
    t->n_outer_reduce += w->outer_reduces[u];
    t->n_outer_gather += w->outer_gathers[u];
    t->wire_bytes += w->gathers[u] * zr_plan_gather_wire(p, u, at);
    t->wire_bytes += w->reduces[u] * zr_plan_reduce_wire(p, u, at, wire);
    /* Sums in place are gathered after each reduction. Others are gathered once, for the optimizer. */
    if (p->hop[ZR_INNER].sums_whole)
        t->wire_bytes +=
            (p->sum_in_place[u] ? w->reduces[u] : trainable) * zr_plan_grad_gather_wire(p, u, at);
    t->outer_bytes += w->outer_reduces[u] * zr_plan_outer_reduce_wire(p, u, at);
    t->outer_bytes += w->outer_gathers[u] * zr_plan_outer_gather_wire(p, u, at);
    if (p->hop[ZR_OUTER].sums_whole)
        t->outer_bytes +=
            (p->outer_each ? trainable : w->outer_reduces[u]) * zr_plan_outer_sum_wire(p, u, at);
}

/* Returns the traffic of all units, for the rank at a place. */
static struct zr_traffic traffic_of(const struct zr_plan *p, const struct zr_core_work *w,
                                    enum zero_dtype wire, int32_t place)
{
    const struct zr_where at = zr_where_of(&p->placement, place);
    bool groups = p->spec.outer;
    struct zr_traffic t = {.agreement_bytes = zr_agree_wire(p->world * p->model_ranks, place * p->tp,
                                                            ZR_AGREE_SUMS, ZR_AGREE_MAXES)};
    for (int32_t u = 0; u < p->layout->n_units; u++)
        add_traffic(p, u, w, wire, at, &t);
    t.outer_bytes += groups ? t.agreement_bytes : 0;
    t.wire_bytes += groups ? t.outer_bytes : t.agreement_bytes;
    return t;
}

/* Runs the core over the declared order and counts what a steady step does. If slices differ in size, any
 * rank may have the most traffic, so each is counted. */
int zr_plan_measure(struct zr_plan *p, const struct zr_options *opt)
{
    int32_t n = p->layout->n_units;
    int64_t *counts;
    ZR_TRY(ZR_ZALLOC(counts, 4 * (int64_t)n, "what the plan sends"));
    struct zr_core_work work = {counts, counts + n, counts + 2 * n, counts + 3 * n};
    int err = zr_core_rehearse(&p->spec, &work);
    for (int32_t place = 0; !err && place < (p->layout->has_places ? p->world : 1); place++) {
        struct zr_traffic t = traffic_of(p, &work, opt->wire_dtype, place);
        if (t.wire_bytes > p->traffic.wire_bytes || place == 0)
            p->traffic = t;
    }
    free(counts);
    return err;
}
