/* SPDX-License-Identifier: Apache-2.0 */
/* tune.c: numbers that a step updates with, which may change between steps; and the number of the step.
 *
 * The loop reads these numbers when it carries out a step's norm and updates, perhaps long after the model's
 * thread has gone on. So there are two copies. While steps that have begun use one, the other is changed.
 * Each job points to the copy that it uses. */
#include "shard/engine/internal.h"

#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

void zr_tuned_open(struct zr_engine *e)
{
    memcpy(e->m.tuned[0].optim, e->opt.optim, sizeof e->opt.optim);
    e->m.tuned[0].clip = e->opt.clip;
    e->m.tuned[0].grad_scale = e->opt.grad_scale;
    e->m.tuned[0].grad_accum_steps = e->opt.grad_accum_steps;
}

const struct zr_tuned *zr_engine_tuned(const struct zr_engine *e)
{
    return &e->m.tuned[e->m.tuned_now];
}

struct zr_tuned *zr_engine_tune(struct zr_engine *e)
{
    const struct zr_tuned *now = zr_engine_tuned(e);
    if (!now->last_job) /* no step has begun with it */
        return &e->m.tuned[e->m.tuned_now];
    e->m.tuned_now ^= 1;
    struct zr_tuned *next = &e->m.tuned[e->m.tuned_now];
    zr_model_await(e, next->last_job); /* the last job that reads it is of a step before the last */
    *next = *now;
    next->last_job = 0;
    return next;
}

void zr_engine_set_accum(struct zr_engine *e, int32_t n)
{
    struct zr_tuned *next = zr_engine_tune(e);
    if (next->grad_accum_steps != n)
        zr_core_set_accum(e->m.core, n);
    next->grad_accum_steps = n;
}

int zr_engine_set_step(struct zr_engine *e, int64_t t)
{
    int err = zr_engine_settle(e); /* the last step's outcome counts first */
    if (err)
        return err;
    e->m.t = t;
    for (int32_t u = 0; u < e->layout->n_units; u++)
        e->m.unit_t[u] = t;
    e->m.renumber = true;
    zr_engine_tune(e)->has_states = true;
    return 0;
}

int64_t zr_engine_unit_step(const struct zr_engine *e, int32_t unit)
{
    return e->m.unit_t[unit];
}

void zr_engine_set_unit_step(struct zr_engine *e, int32_t unit, int64_t t)
{
    e->m.unit_t[unit] = t;
}

void zr_engine_renumber(struct zr_engine *e, int64_t last)
{
    e->m.step_offset = last - (int64_t)e->m.step;
    e->m.renumber = false;
}

uint32_t zr_tuned_digest(const struct zr_engine *e, int32_t n_carried)
{
    const struct zr_tuned *now = zr_engine_tuned(e);
    const struct {
        double grad_scale;
        float clip;
        int32_t n_carried;
        int64_t grad_accum_steps;
        int64_t t; /* pipeline stages differ in it if only some of them have loaded states */
    } all = {now->grad_scale, now->clip, n_carried, now->grad_accum_steps, e->m.t};
    uint64_t groups = XXH3_64bits(now->optim, (size_t)e->opt.n_optims * sizeof *now->optim);
    return (uint32_t)XXH3_64bits_withSeed(&all, sizeof all, groups);
}
