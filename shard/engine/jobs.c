/* SPDX-License-Identifier: Apache-2.0 */
/* jobs.c: queues jobs, and knows which job last touched what. They are usually carried out by the loop's
 * thread. Without a loop, the model's thread carries them out at once. */
#include "comm/flight.h"
#include "shard/engine/internal.h"

struct zr_jobs {
    /* jobs were pushed, and the loop was not woken yet */
    bool asleep;
    /* jobs are numbered from 1; the number of the latest, and of the latest NORM */
    uint64_t n, norm;
    /* (n_units) number of the last job that writes the unit's parameters */
    uint64_t *writing_params;
    /* (gradients, by zr_grad_index) number of the last job after which the gradient may be written again */
    uint64_t *using_grad;
};

int zr_jobs_open(struct zr_engine *e)
{
    ZR_TABLE(e, e->m.jobs, 1);
    ZR_TABLE(e, e->m.jobs->writing_params, e->layout->n_units);
    ZR_TABLE(e, e->m.jobs->using_grad, e->layout->n_units + e->plan->n_grad_slots);
    return 0;
}

uint64_t zr_job_writing_params(const struct zr_engine *e, int32_t unit)
{
    return e->m.jobs->writing_params[unit];
}

uint64_t zr_job_using_grad(const struct zr_engine *e, int32_t index)
{
    return e->m.jobs->using_grad[index];
}

uint64_t zr_last_norm_job(const struct zr_engine *e)
{
    return e->m.jobs->norm;
}

uint64_t zr_last_job(const struct zr_engine *e)
{
    return e->m.jobs->n;
}

/* A gradient that is summed in place is in use until its update, or until it is dropped. */
static void note_grads(struct zr_engine *e, const struct zr_action *a)
{
    struct zr_jobs *jobs = e->m.jobs;
    const bool *sum_in_place = e->plan->sum_in_place;
    for (int32_t u = 0; a->kind == ZR_ACT_DROP_SUMS && u < e->layout->n_units; u++)
        if (sum_in_place[u])
            jobs->using_grad[zr_grad_index(e->plan, u, -1)] = jobs->n;
    if (a->unit >= 0 && a->kind == (sum_in_place[a->unit] ? ZR_ACT_UPDATE : ZR_ACT_REDUCE))
        jobs->using_grad[zr_grad_index(e->plan, a->unit, a->slot)] = jobs->n;
}

/* Returns the next unit that this call of the model updates, after action a of e->m.actions. -1: none. */
static int32_t next_update(const struct zr_engine *e, const struct zr_action *a)
{
    const struct zr_action *end = e->m.actions + e->m.n_actions;
    do
        a++;
    while (a < end && a->kind != ZR_ACT_UPDATE);
    return a < end ? a->unit : -1;
}

void zr_jobs_push(struct zr_engine *e, const struct zr_action *a)
{
    struct zr_jobs *jobs = e->m.jobs;
    struct zr_job job = {.action = *a,
                         .call_hash = zr_core_hash(e->m.core),
                         .world_hash = zr_world_hash(e),
                         .step = zr_step_number(e),
                         .from = zr_flight_queue(e->flight)};
    jobs->n++;
    if (a->kind == ZR_ACT_GATHER || a->kind == ZR_ACT_UPDATE)
        jobs->writing_params[a->unit] = jobs->n;
    if (a->kind == ZR_ACT_NORM)
        jobs->norm = jobs->n;
    job.next = a->kind == ZR_ACT_NORM || a->kind == ZR_ACT_UPDATE ? next_update(e, a) : -1;
    note_grads(e, a);
    zr_steps_fill_job(e, &job, jobs->n);
    if (!e->loop) {
        zr_engine_issue(e, &job);
        return;
    }
    zr_observe_push(e, &job);
    zr_loop_push(e->loop, &job);
    jobs->asleep = true;
}

void zr_jobs_kick(struct zr_engine *e)
{
    if (e->m.jobs->asleep)
        zr_loop_kick(e->loop);
    e->m.jobs->asleep = false;
}

/* Events of a job are not recorded before it was issued, so a wait for them would return at once. A failed
 * engine issues no jobs. */
int zr_jobs_await(struct zr_engine *e, uint64_t job)
{
    if (!job)
        return 0;
    if (e->loop) {
        zr_jobs_kick(e);
        zr_loop_await(e->loop, job);
    }
    return zr_engine_has_failed(e) ? zr_engine_status(e) : 0;
}

int zr_jobs_take_turn(struct zr_engine *e)
{
    if (!e->loop || zr_loop_is_inside(e->loop))
        return 0;
    zr_loop_drain(e->loop);
    return zr_engine_has_failed(e) ? zr_engine_status(e) : 0;
}

void zr_engine_await_jobs(struct zr_engine *e)
{
    zr_jobs_await(e, e->m.jobs->n);
}
