/* SPDX-License-Identifier: Apache-2.0 */
/* issue.c: carries out jobs on the loop's thread: actions become collectives and kernels on the gather and
 * reduce streams, inside groups and between them. */
#include "shard/engine/issue.h"
#include "comm/flight.h"

/* ---- gather ---- */

/* Returns the event of the last write to this rank's inner slice of the unit. With HFSDP (outer_gathers) that
 * is the gather between groups, which follows the update. Frozen units have no such gather, so whole[unit] is
 * never recorded for them. */
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
            /* A sharded flat's slice has the same offset on all ranks, so any place gives it. */
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

/* Gathers this rank's inner slice from the groups' fine slices. Frozen flats are left out, because they never
 * change. Peers in the group read the slice only in the unit's next GATHER, which waits for whole[unit]. */
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

/* Adds sums[sum] to sums[sum-1], n_folds times, with sum counting down. There are several sums only with
 * `deterministic`, and then each is of the fine slice. */
static int issue_folds(struct zr_engine *e, int32_t unit, int sum, int n_folds)
{
    int32_t n;
    const struct zr_flat *f = zr_unit_flats(e, unit, &n);
    struct zr_stream *s = zr_last_hop(e).stream;
    for (; n_folds > 0; n_folds--, sum--)
        for (int32_t i = 0; i < n; i++)
            if (f[i].trainable)
                ZR_TRY(e->dev->ops->add(s, zr_sum_at(e, &f[i], sum - 1), zr_sum_at(e, &f[i], sum), ZERO_F32,
                                        f[i].fine_elems));
    return 0;
}

/* Reduces a gradient inside the group, or over all ranks if there are no groups. The gradient may be written
 * again as soon as its sum is elsewhere. If it is summed in place, it may be written after the optimizer has
 * read it. At stage 0 peers gather this sum. They have finished by then, because a rank joins the norm's
 * agreement only after its gathers. */
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
    if (in_place) /* does nothing if the hop has one rank, which has the whole sum */
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

/* Reduces groups' sums to the sum over all data-parallel ranks. It runs on a separate stream, so that groups
 * can reduce meanwhile. */
static int issue_reduce_outer(struct zr_engine *e, const struct zr_job *job)
{
    const struct zr_device_ops *d = e->dev->ops;
    const struct zr_action *a = &job->action;
    const struct zr_hop_run outer = zr_outer_hop(e);
    ZR_TRY(d->stream_wait(outer.stream, e->ev.partial_full[zr_partial_place(a)]));
    ZR_TRY(zr_timeline_mark(e->timeline, outer.stream, ZR_TRACK_REDUCE_OUTER, ZR_SPAN_REDUCE_OUTER, a->unit,
                            job->step, false));
    ZR_TRY(zr_hop_reduce(e, &outer, job));
    /* HSDP gathers the sum at once if it is reduced in place, once a step. Otherwise UPDATE gathers it. HFSDP
     * does not gather it. */
    if (a->partial < 0)
        ZR_TRY(zr_hop_gather_sums(e, &outer, outer.stream, job));
    ZR_TRY(d->event_record(e->ev.partial_free[zr_partial_place(a)], outer.stream));
    e->i.n_outer_reduce++;
    ZR_TRY(issue_folds(e, a->unit, a->sum, a->n_folds));
    return zr_timeline_mark(e->timeline, outer.stream, ZR_TRACK_REDUCE_OUTER, ZR_SPAN_REDUCE_OUTER, a->unit,
                            job->step, true);
}

/* Frees all sums in place as if they had been used: gradients that are summed where backward wrote them
 * (sum_in_place), and groups' sums that are reduced between groups in place. A barrier comes first, because a
 * peer may still be gathering this rank's slices of them. */
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
        return zr_fail(ZERO_ERR_FAILED, "action %d is not the loop's", job->action.kind);
    }
}

/* Most operations of a job on one communicator: a REDUCE, and the gather of its sum. */
enum { MOST_JOB_OPS = 2 };

/* ---- room on the streams ----
 *
 * A stream of the host holds a bounded number of operations, and adding more waits. The loop's thread must
 * not wait, because it also serves sockets. So room for the largest job is reserved when the engine opens,
 * about 200 bytes per operation. A job is issued once there is room for all of it. Most jobs put a few
 * operations per flat of a unit. The norm and an update put at most some per tensor, and a snapshot some per
 * array of each flat, on the reduce stream. */

/* Operations of any job: waits, stamps, collectives, and those of the norm other than squares. Per flat:
 * narrow, reduce and gather (the communicator of one rank, self.c, makes one operation per segment), besides
 * folds. Per piece that optim.update updates: scale the gradient, call, round the weights. */
enum { OPS_OF_JOB = 16, OPS_OF_FLAT = 3, OPS_OF_USER_UPDATE = 3 };

static int count_piece(void *arg, const struct zr_flat *f, const struct zr_piece *p, int64_t first, int64_t n)
{
    (void)f, (void)p, (void)first, (void)n;
    ++*(int64_t *)arg;
    return 0;
}

/* Counts the pieces of n trainable flats in which this rank has elements at that level. */
static int64_t count_pieces(const struct zr_engine *e, const struct zr_flat *f, int32_t n,
                            enum zr_level level)
{
    int64_t count = 0;
    for (int32_t i = 0; i < n; i++) {
        struct zr_span span = zr_flat_span(&f[i], e->at, level);
        if (f[i].trainable)
            zr_flat_ranges(e->layout, &f[i], span.first, span.first + span.n, count_piece, &count);
    }
    return count;
}

int64_t zr_room_of(const struct zr_engine *e, enum zr_action_kind kind, int32_t unit)
{
    const struct zr_layout *l = e->layout;
    int64_t any = OPS_OF_JOB + (OPS_OF_FLAT + e->plan->n_sums - 1) * (int64_t)e->most_segs;
    if (kind == ZR_ACT_NORM)
        return any + count_pieces(e, l->flats, l->n_flats, ZR_LEVEL_FINE);
    if (kind == ZR_ACT_SNAPSHOT)
        return any + (e->plan->n_states - ZR_VALUE_PARAM) * (int64_t)l->n_flats;
    if (kind != ZR_ACT_UPDATE)
        return any;
    int32_t n;
    const struct zr_flat *f = zr_unit_flats(e, unit, &n);
    int64_t n_pieces = count_pieces(e, f, n, zr_level_of(e->plan->place.state));
    return any + n_pieces * (e->opt.update ? OPS_OF_USER_UPDATE : 1);
}

/* Lists the streams that jobs use, other than the reduce stream. NULL: there is none. */
enum { N_OTHERS = 3 };
static void list_others(const struct zr_engine *e, struct zr_stream *s[N_OTHERS])
{
    s[0] = e->gather_stream;
    s[1] = e->gather_outer_stream;
    s[2] = e->reduce_outer_stream;
}

int zr_room_open(struct zr_engine *e)
{
    struct zr_stream *s[N_OTHERS];
    int64_t any = zr_room_of(e, ZR_ACT_REDUCE, 0), most = zr_room_of(e, ZR_ACT_NORM, -1);
    if (e->plan->snapshot_bytes)
        most = zr_max(most, zr_room_of(e, ZR_ACT_SNAPSHOT, -1));
    for (int32_t u = 0; u < e->layout->n_units; u++)
        most = zr_max(most, zr_room_of(e, ZR_ACT_UPDATE, u));
    ZR_TRY(zr_stream_reserve(e->dev, e->reduce_stream, most));
    list_others(e, s);
    for (int i = 0; i < N_OTHERS; i++)
        if (s[i])
            ZR_TRY(zr_stream_reserve(e->dev, s[i], any));
    return 0;
}

bool zr_room_for(const struct zr_engine *e, const struct zr_action *a)
{
    struct zr_stream *s[N_OTHERS];
    int64_t any = zr_room_of(e, ZR_ACT_REDUCE, 0);
    list_others(e, s);
    for (int i = 0; i < N_OTHERS; i++)
        if (s[i] && !zr_stream_has_room(e->dev, s[i], any))
            return false;
    return zr_stream_has_room(e->dev, e->reduce_stream, zr_room_of(e, (enum zr_action_kind)a->kind, a->unit));
}

/* Whether the job can be issued without a wait: there is room for it. waits: an UPDATE by optim.update on a
 * GPU, which is not called before it is known whether the step is skipped. */
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
    if (e->loop)
        zr_model_check_take(e->watch, job->known); /* check mode: joins the model thread's vector clock */
    zr_model_check_job(e->watch, zr_action_name((enum zr_action_kind)job->action.kind), job->action.unit,
                       job->step);
    if (zr_engine_has_failed(e))
        return; /* a wait for this job's event finds an earlier job's record, if any, and never hangs */
    atomic_store_explicit(&e->i.unit, job->action.unit, memory_order_relaxed);
    atomic_store_explicit(&e->i.kind, job->action.kind, memory_order_relaxed);
    zr_flight_job(e->flight, zr_action_name((enum zr_action_kind)job->action.kind), job->action.unit);
    int err = issue_job(e, job);
    zr_flight_job_done(e->flight);
    atomic_store_explicit(&e->i.kind, 0, memory_order_relaxed);
    if (err)
        zr_engine_fail(e, err, zr_error_text());
}
