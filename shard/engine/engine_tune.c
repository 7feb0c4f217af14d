/* SPDX-License-Identifier: Apache-2.0 */
/* engine_tune.c: what a step updates with, changed between steps; and the number of the step.
 *
 * The loop reads these numbers when it carries out a step's norm and updates, which may be long after the
 * model's thread has gone on. So there are two of them: while one is in use by steps that were begun, the
 * other is changed, and each job says which is its own. */
#include "shard/engine/engine_inside.h"

#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

void zr_tuned_open(struct zr_engine *e)
{
    memcpy(e->m.tuned[0].hyper, e->opt.hyper, sizeof e->opt.hyper);
    e->m.tuned[0].clip = e->opt.clip;
}

struct zr_tuned *zr_engine_tune(struct zr_engine *e)
{
    const struct zr_tuned *now = &e->m.tuned[e->m.tuned_now];
    if (!now->last_job) /* no step was begun with it */
        return &e->m.tuned[e->m.tuned_now];
    e->m.tuned_now ^= 1;
    struct zr_tuned *next = &e->m.tuned[e->m.tuned_now];
    zr_model_await(e, next->last_job); /* of a step before the last */
    *next = *now;
    next->last_job = 0;
    return next;
}

int zr_engine_set_step(struct zr_engine *e, int64_t t)
{
    int err = zr_engine_settle(e); /* the last step's own outcome counts first */
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
    const struct zr_tuned *now = &e->m.tuned[e->m.tuned_now];
    struct {
        struct zr_hyper hyper[ZR_OPTIMIZER_COUNT];
        float clip;
        int32_t n_carried;
        int64_t t;
    } all = {.clip = now->clip, .n_carried = n_carried, .t = e->m.t}; /* states may be of one stage alone */
    memcpy(all.hyper, now->hyper, sizeof all.hyper);
    return (uint32_t)XXH3_64bits(&all, sizeof all);
}
