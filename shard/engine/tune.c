/* SPDX-License-Identifier: Apache-2.0 */
/* tune.c: numbers that a step updates with, which may change between steps.
 *
 * The loop reads these numbers when it carries out a step's norm and updates, perhaps long after the model's
 * thread has gone on. So there are two copies. While steps that have begun use one, the other is changed.
 * Each job points to the copy that it uses. */
#include "shard/engine/internal.h"

#include <string.h>

struct zr_tuning {
    struct zr_tuned copies[2];
    /* the copy for the next step */
    int now;
};

int zr_tuning_open(struct zr_engine *e)
{
    ZR_TABLE(e, e->m.tuning, 1);
    struct zr_tuned *first = &e->m.tuning->copies[0];
    memcpy(first->optim, e->opt.optim, sizeof e->opt.optim);
    first->clip = e->opt.clip;
    first->grad_scale = e->opt.grad_scale;
    first->grad_accum_steps = e->opt.grad_accum_steps;
    return 0;
}

const struct zr_tuned *zr_engine_tuned(const struct zr_engine *e)
{
    return &e->m.tuning->copies[e->m.tuning->now];
}

struct zr_tuned *zr_engine_change_tuned(struct zr_engine *e)
{
    const struct zr_tuned *now = zr_engine_tuned(e);
    if (!now->last_job) /* no step has begun with it */
        return &e->m.tuning->copies[e->m.tuning->now];
    e->m.tuning->now ^= 1;
    struct zr_tuned *next = &e->m.tuning->copies[e->m.tuning->now];
    zr_jobs_await(e, next->last_job); /* the last job that reads it is of a step before the last */
    *next = *now;
    next->last_job = 0;
    return next;
}

void zr_engine_set_accum(struct zr_engine *e, int32_t n)
{
    struct zr_tuned *next = zr_engine_change_tuned(e);
    if (next->grad_accum_steps != n)
        zr_core_set_accum(e->m.core, n);
    next->grad_accum_steps = n;
}

const struct zr_tuned *zr_tuned_of_job(struct zr_engine *e, uint64_t job)
{
    struct zr_tuned *now = &e->m.tuning->copies[e->m.tuning->now];
    now->last_job = job;
    return now;
}
