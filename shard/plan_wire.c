/* plan_wire.c: what moves: the bytes that a rank takes from others for each operation, and in a steady
 * step. */
#include "comm/segment.h"
#include "shard/plan_slots.h"

#include <stdlib.h>

/* A quantity of a flat, summed over those of a unit that are trained. */
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

int64_t zr_plan_gather_wire(const struct zr_plan *p, int32_t unit, struct zr_where at)
{
    const struct zr_unit *u = &p->layout->units[unit];
    int64_t n = 0;
    for (int32_t i = 0; i < u->n_flats; i++) {
        const struct zr_flat *f = &p->layout->flats[u->first_flat + i];
        if (zr_plan_gathers(p, f))
            n += f->inner.total - zr_cut_bytes(&f->inner, at.inner);
    }
    return n;
}

int64_t zr_plan_reduce_wire(const struct zr_plan *p, int32_t unit, struct zr_where at, enum zr_dtype wire)
{
    const struct zr_unit *u = &p->layout->units[unit];
    int64_t n = 0;
    for (int32_t i = 0; i < u->n_flats; i++) {
        const struct zr_flat *f = &p->layout->flats[u->first_flat + i];
        if (!f->trainable)
            continue;
        int64_t bytes = zr_cut_bytes(&f->inner, at.inner);
        /* Peers' arenas are read as they are, so a wider wire than the tensor's own changes nothing. */
        if (wire && zr_dtype_bytes(wire) < zr_dtype_bytes(f->dtype))
            bytes = bytes / zr_dtype_bytes(f->dtype) * zr_dtype_bytes(wire);
        n += bytes * (p->hop[ZR_INNER].size - 1);
    }
    return n;
}

static int64_t others_sums(const struct zr_plan *p, const struct zr_flat *f, struct zr_where at)
{
    (void)p;
    return (f->inner.total - zr_cut_bytes(&f->inner, at.inner)) / zr_dtype_bytes(f->dtype) *
           (int64_t)sizeof(float);
}

int64_t zr_plan_grad_gather_wire(const struct zr_plan *p, int32_t unit, struct zr_where at)
{
    return of_trainable(p, unit, at, others_sums);
}

static int64_t outer_reduce(const struct zr_plan *p, const struct zr_flat *f, struct zr_where at)
{
    return zr_flat_span(f, at, ZR_LEVEL_FINE).n * (p->hop[ZR_OUTER].size - 1) * (int64_t)sizeof(float);
}

int64_t zr_plan_outer_reduce_wire(const struct zr_plan *p, int32_t unit, struct zr_where at)
{
    return of_trainable(p, unit, at, outer_reduce);
}

/* Elements of the inner slice that other groups own. */
static int64_t outer_others(const struct zr_flat *f, struct zr_where at)
{
    return zr_flat_span(f, at, ZR_LEVEL_INNER).n - zr_flat_span(f, at, ZR_LEVEL_FINE).n;
}

static int64_t outer_sum(const struct zr_plan *p, const struct zr_flat *f, struct zr_where at)
{
    (void)p;
    return outer_others(f, at) * (int64_t)sizeof(float);
}

int64_t zr_plan_outer_sum_wire(const struct zr_plan *p, int32_t unit, struct zr_where at)
{
    return of_trainable(p, unit, at, outer_sum);
}

static int64_t outer_gather(const struct zr_plan *p, const struct zr_flat *f, struct zr_where at)
{
    (void)p;
    return outer_others(f, at) * zr_dtype_bytes(f->dtype);
}

int64_t zr_plan_outer_gather_wire(const struct zr_plan *p, int32_t unit, struct zr_where at)
{
    return of_trainable(p, unit, at, outer_gather);
}

/* Of the unit, in a steady step, on rank 0. */
static void add_traffic(struct zr_plan *p, int32_t u, const struct zr_core_work *w, enum zr_dtype wire)
{
    const struct zr_where at = {0, 0};
    struct zr_traffic *t = &p->traffic;
    bool trainable = p->layout->units[u].trainable;
    t->n_gather += w->gathers[u];
    t->n_reduce += w->reduces[u];
    t->n_outer_reduce += w->outer_reduces[u];
    t->n_outer_gather += w->outer_gathers[u];
    t->wire_bytes += w->gathers[u] * zr_plan_gather_wire(p, u, at);
    t->wire_bytes += w->reduces[u] * zr_plan_reduce_wire(p, u, at, wire);
    /* What is reduced in place is made whole by that; else the optimizer has it gathered. */
    if (p->hop[ZR_INNER].sums_whole)
        t->wire_bytes +=
            (p->sum_in_place[u] ? w->reduces[u] : trainable) * zr_plan_grad_gather_wire(p, u, at);
    t->outer_bytes += w->outer_reduces[u] * zr_plan_outer_reduce_wire(p, u, at);
    t->outer_bytes += w->outer_gathers[u] * zr_plan_outer_gather_wire(p, u, at);
    if (p->hop[ZR_OUTER].sums_whole)
        t->outer_bytes +=
            (p->outer_each ? trainable : w->outer_reduces[u]) * zr_plan_outer_sum_wire(p, u, at);
}

/* Runs the core over the declared order and counts what a steady step does. */
int zr_plan_measure(struct zr_plan *p, const struct zr_options *opt)
{
    int32_t n = p->layout->n_units;
    int64_t *counts = calloc((size_t)n * 4, sizeof *counts);
    if (!counts)
        return zr_fail(ZR_ERR_NOMEM, "no memory to measure the plan");
    struct zr_core_work work = {counts, counts + n, counts + 2 * n, counts + 3 * n};
    int err = zr_core_rehearse(&p->spec, &work);
    for (int32_t u = 0; !err && u < n; u++)
        add_traffic(p, u, &work, opt->wire_dtype);
    int64_t agreement = zr_agree_wire(p->world, 0, ZR_AGREE_SUMS, ZR_AGREE_MAXES);
    p->traffic.agreement_bytes = agreement;
    p->traffic.outer_bytes += p->hop[ZR_OUTER].size > 1 ? agreement : 0;
    p->traffic.wire_bytes += p->hop[ZR_OUTER].size > 1 ? p->traffic.outer_bytes : agreement;
    free(counts);
    return err;
}
