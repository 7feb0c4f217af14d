/* SPDX-License-Identifier: Apache-2.0 */
/* engine_aside.c: a further contribution, in one step, to a gradient that is summed in place, or whose sum
 * over a group is.
 *
 * The plan keeps no sum beside such a gradient, for by the order that it was made for a step reduces it once,
 * behind the last backward bracket of its unit. A model that turns out to have more brackets is followed all
 * the same: what was reduced goes to memory of its own before its place is written again, and is added to
 * what comes next. That memory is not in the plan, which a warning says. */
#include "shard/engine/engine_issue.h"

/* One rank's slices of all of them. */
static int64_t aside_bytes(const struct zr_engine *e, int32_t unit)
{
    int64_t elems = 0;
    int32_t n;
    const struct zr_flat *f = zr_unit_flats(e, unit, &n);
    for (int32_t i = 0; i < n; i++)
        elems += f[i].trainable ? f[i].fine_elems : 0;
    return elems * (int64_t)sizeof(float);
}

int zr_aside_make(struct zr_engine *e, int32_t unit)
{
    int64_t bytes = aside_bytes(e, unit);
    void *at;
    if (e->aside[unit])
        return 0;
    int err = e->dev->ops->alloc(e->dev, bytes, &at);
    if (err)
        return zr_fail_more(err,
                            "%s: unit %d has more backward brackets in a step than cfg.memory.order declares",
                            zr_model_call_name(e->m.call), unit);
    e->aside[unit] = at;
    e->m.allocated[ZR_MEM_GRAD_SUMS] += bytes;
    zr_warn(e->opt.log,
            "unit %d has more backward brackets in a step than cfg.memory.order declares (without it, one in "
            "each "
            "micro-batch): %lld bytes more than planned. Declare all of them, or hold the bracket open until "
            "the last use",
            unit, (long long)bytes);
    return 0;
}

/* This rank's part of the sum, and of what was set aside. */
static int64_t aside_part(const struct zr_engine *e, const struct zr_flat *f, float **sum)
{
    *sum = zr_sum_at(e, f, 0);
    return zr_engine_own(e, f).n;
}

int zr_aside_issue(struct zr_engine *e, int32_t unit, const struct zr_tag *tag)
{
    const struct zr_device_ops *d = e->dev->ops;
    int32_t n;
    const struct zr_flat *f = zr_unit_flats(e, unit, &n);
    const struct zr_hop_run last = zr_last_hop(e);
    float *aside = e->aside[unit], *sum;
    /* A peer may still be gathering this rank's part. */
    int err = zr_hop_barrier(e, &last, tag);
    for (int32_t i = 0; !err && i < n; i++) {
        if (!f[i].trainable)
            continue;
        int64_t n_elems = aside_part(e, &f[i], &sum);
        err = d->copy(last.stream, aside, sum, n_elems * (int64_t)sizeof(float));
        aside += f[i].fine_elems;
    }
    if (!err && e->plan->spec.outer)
        err = d->event_record(e->ev.partial_free[unit], last.stream);
    if (err || !e->plan->sum_in_place[unit])
        return err;
    return d->event_record(e->ev.grad_free[zr_grad_place(e->plan, unit, -1)], last.stream);
}

int zr_aside_add(struct zr_engine *e, int32_t unit)
{
    int32_t n;
    int err = 0;
    const struct zr_flat *f = zr_unit_flats(e, unit, &n);
    const struct zr_hop_run last = zr_last_hop(e);
    float *aside = e->aside[unit], *sum;
    for (int32_t i = 0; aside && !err && i < n; i++) {
        if (!f[i].trainable)
            continue;
        int64_t n_elems = aside_part(e, &f[i], &sum);
        err = e->dev->ops->add(last.stream, sum, aside, ZR_F32, n_elems);
        aside += f[i].fine_elems;
    }
    return err;
}

void zr_aside_close(struct zr_engine *e)
{
    for (int32_t u = 0; e->aside && u < e->layout->n_units; u++)
        if (e->aside[u])
            e->dev->ops->free(e->dev, e->aside[u], aside_bytes(e, u));
}
