/* SPDX-License-Identifier: Apache-2.0 */
/* engine_issue.c: the loop's thread: actions -> collectives and kernels on the gather and the reduce stream,
 * and on those between groups. */
#include "shard/engine/engine_issue.h"
#include "comm/flight.h"

/* ---- gather ---- */

/* What this rank's inner slice of the unit was written by last. */
static struct zr_event *shard_written(const struct zr_engine *e, int32_t unit)
{
    bool groups = e->plan->spec.outer_gathers && e->layout->units[unit].trainable;
    return groups ? e->ev.whole[unit] : e->ev.updated[unit];
}

static int issue_gather(struct zr_engine *e, const struct zr_job *job)
{
    const struct zr_device_ops *d = e->dev->ops;
    int32_t unit = job->action.unit, slot = job->action.slot, n, n_segs = 0;
    const struct zr_flat *f = zr_unit_flats(e, unit, &n);
    for (int32_t i = 0; i < n; i++) {
        if (!zr_plan_gathers(e->plan, &f[i]))
            continue;
        bool home = e->plan->resident[unit]; /* the shard is a slice of the full region */
        int64_t full = zr_plan_param_full(e->plan, &f[i], slot);
        e->i.gather_segs[n_segs++] = (struct zr_gather_seg){
            .src = home ? full : zr_plan_param_own(e->plan, &f[i], (struct zr_where){0, 0}),
            .dst = full,
            .in_place = home,
            .cut = f[i].inner};
    }
    struct zr_tag tag = zr_job_tag(job);
    if (slot >= 0)
        ZR_TRY(d->stream_wait(e->gather_stream, e->ev.param_free[slot]));
    ZR_TRY(d->stream_wait(e->gather_stream, shard_written(e, unit)));
    ZR_TRY(zr_timeline_mark(e->timeline, e->gather_stream, ZR_TRACK_GATHER, ZR_SPAN_GATHER, unit, job->step,
                            false));
    ZR_TRY(zr_role_gather(e, ZR_ROLE_GATHER, e->i.gather_segs, n_segs, &tag));
    ZR_TRY(zr_timeline_mark(e->timeline, e->gather_stream, ZR_TRACK_GATHER, ZR_SPAN_GATHER, unit, job->step,
                            true));
    e->i.n_gather++;
    return d->event_record(e->ev.ready[unit], e->gather_stream);
}

/* What is frozen never changes. No peer of the group reads the slice before it has gathered the unit here,
 * behind this. */
static int issue_gather_outer(struct zr_engine *e, const struct zr_job *job)
{
    const struct zr_device_ops *d = e->dev->ops;
    int32_t unit = job->action.unit, n, n_segs = 0;
    const struct zr_flat *f = zr_unit_flats(e, unit, &n);
    for (int32_t i = 0; i < n; i++)
        if (f[i].trainable)
            e->i.gather_segs[n_segs++] = zr_outer_gather_seg(e, &f[i]);
    struct zr_tag tag = zr_job_tag(job);
    ZR_TRY(d->stream_wait(e->gather_outer_stream, e->ev.updated[unit]));
    ZR_TRY(zr_timeline_mark(e->timeline, e->gather_outer_stream, ZR_TRACK_GATHER_OUTER, ZR_SPAN_GATHER_OUTER,
                            unit, job->step, false));
    ZR_TRY(zr_role_gather(e, ZR_ROLE_GATHER_OUTER, e->i.gather_segs, n_segs, &tag));
    ZR_TRY(zr_timeline_mark(e->timeline, e->gather_outer_stream, ZR_TRACK_GATHER_OUTER, ZR_SPAN_GATHER_OUTER,
                            unit, job->step, true));
    e->i.n_outer_gather++;
    return d->event_record(e->ev.whole[unit], e->gather_outer_stream);
}

/* ---- reduce ---- */

/* sums[sum-1] += sums[sum], n times downwards. */
static int issue_folds(struct zr_engine *e, int32_t unit, int sum, int n_folds)
{
    int32_t n;
    const struct zr_flat *f = zr_unit_flats(e, unit, &n);
    struct zr_stream *s = zr_last_hop(e).stream;
    for (; n_folds > 0; n_folds--, sum--)
        for (int32_t i = 0; i < n; i++)
            if (f[i].trainable)
                ZR_TRY(e->dev->ops->add(s, zr_sum_at(e, &f[i], sum - 1), zr_sum_at(e, &f[i], sum), ZR_F32,
                                        f[i].fine_elems));
    return 0;
}

/* The gradient is free as soon as the sum has a place of its own. What is summed in place is free when the
 * optimizer has read it: peers have by then read what they gather of it here, for they have been in the
 * agreement of the norm. */
static int issue_reduce(struct zr_engine *e, const struct zr_job *job)
{
    const struct zr_device_ops *d = e->dev->ops;
    const struct zr_action *a = &job->action;
    const struct zr_hop_run inner = zr_inner_hop(e);
    int32_t place = zr_grad_place(e->plan, a->unit, a->slot);
    bool in_place = e->plan->sum_in_place[a->unit], outer = e->plan->spec.outer;
    ZR_TRY(d->stream_wait(e->reduce_stream, e->ev.grad_done[place]));
    if (outer)
        ZR_TRY(d->stream_wait(e->reduce_stream, e->ev.partial_free[zr_partial_place(a)]));
    ZR_TRY(zr_timeline_mark(e->timeline, e->reduce_stream, ZR_TRACK_REDUCE, ZR_SPAN_REDUCE, a->unit,
                            job->step, false));
    ZR_TRY(zr_hop_reduce(e, &inner, job));
    if (in_place)
        ZR_TRY(zr_hop_gather_sums(e, &inner, inner.stream, job));
    else
        ZR_TRY(d->event_record(e->ev.grad_free[place], e->reduce_stream));
    if (outer)
        ZR_TRY(d->event_record(e->ev.partial_full[zr_partial_place(a)], e->reduce_stream));
    e->i.n_reduce++;
    ZR_TRY(issue_folds(e, a->unit, a->sum, a->n_folds));
    return zr_timeline_mark(e->timeline, e->reduce_stream, ZR_TRACK_REDUCE, ZR_SPAN_REDUCE, a->unit,
                            job->step, true);
}

/* The sum over a group, to one of the world. On a stream of its own: groups are reduced meanwhile. */
static int issue_reduce_outer(struct zr_engine *e, const struct zr_job *job)
{
    const struct zr_device_ops *d = e->dev->ops;
    const struct zr_action *a = &job->action;
    const struct zr_hop_run outer = zr_outer_hop(e);
    ZR_TRY(d->stream_wait(outer.stream, e->ev.partial_full[zr_partial_place(a)]));
    ZR_TRY(zr_timeline_mark(e->timeline, outer.stream, ZR_TRACK_REDUCE_OUTER, ZR_SPAN_REDUCE_OUTER, a->unit,
                            job->step, false));
    ZR_TRY(zr_hop_reduce(e, &outer, job));
    if (a->partial < 0)
        ZR_TRY(zr_hop_gather_sums(e, &outer, outer.stream, job));
    ZR_TRY(d->event_record(e->ev.partial_free[zr_partial_place(a)], outer.stream));
    e->i.n_outer_reduce++;
    ZR_TRY(issue_folds(e, a->unit, a->sum, a->n_folds));
    return zr_timeline_mark(e->timeline, outer.stream, ZR_TRACK_REDUCE_OUTER, ZR_SPAN_REDUCE_OUTER, a->unit,
                            job->step, true);
}

/* As if all sums in place had been used. A peer may still be gathering this rank's parts of them. */
static int issue_drop_sums(struct zr_engine *e, const struct zr_job *job)
{
    const struct zr_device_ops *d = e->dev->ops;
    const struct zr_hop_run last = zr_last_hop(e);
    struct zr_tag tag = zr_job_tag(job);
    ZR_TRY(zr_hop_barrier(e, &last, &tag));
    for (int32_t u = 0; u < e->layout->n_units; u++) {
        if (e->plan->sum_in_place[u])
            ZR_TRY(d->event_record(e->ev.grad_free[zr_grad_place(e->plan, u, -1)], last.stream));
        if (e->plan->spec.outer)
            ZR_TRY(d->event_record(e->ev.partial_free[u], last.stream));
    }
    return 0;
}

static int issue_job(struct zr_engine *e, const struct zr_job *job)
{
    switch ((enum zr_action_kind)job->action.kind) {
    case ZR_ACT_GATHER:
        return issue_gather(e, job);
    case ZR_ACT_GATHER_OUTER:
        return issue_gather_outer(e, job);
    case ZR_ACT_DROP_SUMS:
        return issue_drop_sums(e, job);
    case ZR_ACT_REDUCE:
        return issue_reduce(e, job);
    case ZR_ACT_REDUCE_OUTER:
        return issue_reduce_outer(e, job);
    case ZR_ACT_FOLD:
        return issue_folds(e, job->action.unit, job->action.sum, job->action.n_folds);
    case ZR_ACT_LEAVE_OUT:
        e->i.left_out[job->action.unit] = true;
        return 0;
    case ZR_ACT_NORM:
        return zr_issue_norm(e, job);
    case ZR_ACT_UPDATE:
        return zr_issue_update(e, job);
    case ZR_ACT_SNAPSHOT:
        return zr_engine_issue_snapshot(e);
    default:
        return zr_fail(ZR_ERR_FAILED, "action %d is not the loop's", job->action.kind);
    }
}

/* What a job puts on a communicator at most: REDUCE, and the gather of what it summed. */
enum { MOST_JOB_OPS = 2 };

/* There is room for it; and optim.update on a GPU is called once it is known whether the step is skipped. */
bool zr_engine_is_ready(void *arg, const struct zr_job *job)
{
    struct zr_engine *e = arg;
    bool waits = job->action.kind == ZR_ACT_UPDATE && e->opt.update && !e->dev->ops->host_memory;
    if (zr_engine_has_failed(e))
        return true;
    if (!zr_roles_have_room(e, MOST_JOB_OPS) || !zr_room_for(e, &job->action))
        return false;
    if (!waits)
        return true;
    return e->dev->ops->event_query(e->ev.step_norm) != 0 || zr_engine_status(e) != 0;
}

void zr_engine_issue(void *arg, const struct zr_job *job)
{
    struct zr_engine *e = arg;
    if (e->watch && e->loop)
        zr_model_check_take(e->watch, job->known);
    if (e->watch)
        zr_model_check_job(e->watch, zr_action_name((enum zr_action_kind)job->action.kind), job->action.unit,
                           job->step);
    if (zr_engine_has_failed(e))
        return; /* what waits for this job's events does not wait: they were never recorded */
    atomic_store_explicit(&e->i.unit, job->action.unit, memory_order_relaxed);
    atomic_store_explicit(&e->i.kind, job->action.kind, memory_order_relaxed);
    zr_flight_job(e->flight, zr_action_name((enum zr_action_kind)job->action.kind), job->action.unit);
    int err = issue_job(e, job);
    zr_flight_job_done(e->flight);
    atomic_store_explicit(&e->i.kind, 0, memory_order_relaxed);
    if (err)
        zr_engine_fail(e, err, zr_error_text());
}
