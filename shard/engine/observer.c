/* SPDX-License-Identifier: Apache-2.0 */
/* observer.c: installs observers, and passes on the calls that go to each of them. */
#include "shard/engine/observer.h"
#include "kernels/alloc.h"
#include "kernels/asserts.h"
#include "shard/engine/internal.h"

#include <stdlib.h>

int zr_observer_new(struct zr_engine *e, const struct zr_observer_ops *ops, size_t bytes, int64_t n,
                    size_t size, struct zr_observer **out)
{
    ZR_ASSERT(e->observers.n < ZR_MAX_OBSERVERS);
    ZR_TRY(ZR_ZALLOC_ARRAY(*out, bytes, n, size, "an observer of the model"));
    **out = (struct zr_observer){ops, e};
    e->observers.of[e->observers.n++] = *out;
    return 0;
}

void zr_observers_close(struct zr_engine *e)
{
    while (e->observers.n) {
        struct zr_observer *o = e->observers.of[--e->observers.n];
        if (o->ops->close)
            o->ops->close(o);
        free(o);
    }
}

/* Runs the statement for each observer o that has the function. */
#define FOR_OBSERVERS(function, statement)                                                                   \
    for (int i = 0; i < e->observers.n; i++) {                                                               \
        struct zr_observer *o = e->observers.of[i];                                                          \
        if (o->ops->function)                                                                                \
            statement;                                                                                       \
    }

void zr_observers_give_back(struct zr_engine *e)
{
    FOR_OBSERVERS(give_back, o->ops->give_back(o));
}

int zr_observe_begin(struct zr_engine *e, const struct zr_grant *g)
{
    FOR_OBSERVERS(on_begin, ZR_TRY(o->ops->on_begin(o, g)));
    return 0;
}

int zr_observe_end(struct zr_engine *e, const struct zr_grant *g)
{
    for (int i = e->observers.n; i-- > 0;) {
        struct zr_observer *o = e->observers.of[i];
        if (o->ops->on_end)
            ZR_TRY(o->ops->on_end(o, g));
    }
    return 0;
}

int zr_observe_reduce(struct zr_engine *e, int32_t unit, enum zr_reduce_moment at)
{
    FOR_OBSERVERS(on_reduce, ZR_TRY(o->ops->on_reduce(o, unit, at)));
    return 0;
}

int zr_observe_step(struct zr_engine *e, enum zr_step_moment at, const char *call)
{
    FOR_OBSERVERS(on_step, ZR_TRY(o->ops->on_step(o, at, call)));
    return 0;
}

void zr_observe_call(struct zr_engine *e, const char *name, int32_t unit, const char *phase, uint32_t step)
{
    FOR_OBSERVERS(on_call, o->ops->on_call(o, name, unit, phase, step));
}

void zr_observe_push(struct zr_engine *e, struct zr_job *job)
{
    FOR_OBSERVERS(on_push, o->ops->on_push(o, job));
}

void zr_observe_job(struct zr_engine *e, const struct zr_job *job)
{
    FOR_OBSERVERS(on_job, o->ops->on_job(o, job));
}

void zr_observe_job_done(struct zr_engine *e)
{
    FOR_OBSERVERS(on_job_done, o->ops->on_job_done(o));
}

void zr_observe_snapshot(struct zr_engine *e, enum zr_snapshot_moment at)
{
    FOR_OBSERVERS(on_snapshot, o->ops->on_snapshot(o, at));
}

int zr_observe_fault(struct zr_engine *e)
{
    FOR_OBSERVERS(find_fault, ZR_TRY(o->ops->find_fault(o)));
    return 0;
}

char *zr_observed_piece(const struct zr_engine *e, const struct zr_piece *p, bool grad)
{
    char *at = NULL;
    FOR_OBSERVERS(piece_at, at = at ? at : o->ops->piece_at(o, p, grad));
    return at;
}

char *zr_observed_closed(const struct zr_engine *e, int32_t tensor, bool grad)
{
    char *at = NULL;
    FOR_OBSERVERS(closed_at, at = at ? at : o->ops->closed_at(o, tensor, grad));
    return at;
}
