/* SPDX-License-Identifier: Apache-2.0 */
/* issue.c: carries out jobs, on the loop's thread or the model's. A job becomes waits, collectives and
 * kernels on a stream: the gather or the reduce stream, or with groups one of the two that move data between
 * groups. The stream does the work later. Nothing here waits for it. */
#include "shard/engine/issue.h"
#include "comm/flight.h"

/* ---- gather ---- */

/* Returns the event after which this rank's inner slice of the unit has its new values. Usually the optimizer
 * writes all of it. With HFSDP (outer_gathers) it writes the fine slice, and the gather between groups
 * completes the inner slice. Frozen units have no such gather. */
static struct zr_event *shard_written(const struct zr_engine *e, int32_t unit)
{
    bool gathered_between_groups = e->plan->spec.outer_gathers && e->layout->units[unit].trainable;
    return gathered_between_groups ? e->ev.whole[unit] : e->ev.updated[unit];
}

/* Describes the gather of a flat inside the group. The shards of a resident unit are slices of its whole
 * memory, so each rank's slice is there already. Other units are gathered from their shards, which have the
 * same offset on all ranks, to a slot. */
static struct zr_gather_seg inner_gather_seg(const struct zr_engine *e, const struct zr_flat *f, int32_t slot)
{
    const struct zr_where any_rank = {0, 0};
    bool resident = e->plan->resident[f->unit];
    int64_t whole = zr_plan_param_full(e->plan, f, slot);
    return (struct zr_gather_seg){.src = resident ? whole : zr_plan_param_own(e->plan, f, any_rank),
                                  .dst = whole,
                                  .in_place = resident,
                                  .cut = f->inner};
}

static int issue_gather(struct zr_engine *e, const struct zr_job *job)
{
    const struct zr_device_ops *d = e->dev->ops;
    struct zr_stream *s = e->gather_stream;
    int32_t unit = job->action.unit, slot = job->action.slot, n, n_segs = 0;
    const struct zr_flat *f = zr_unit_flats(e, unit, &n);
    for (int32_t i = 0; i < n; i++)
        if (zr_plan_gathers(e->plan, &f[i]))
            e->i.gather_segs[n_segs++] = inner_gather_seg(e, &f[i], slot);
    struct zr_tag tag = zr_job_tag(job);
    /* A resident unit (-1) is gathered only behind its UPDATE. That is behind the NORM, which has waited for
     * step_compute, so nobody reads the old values any more. */
    if (slot >= 0)
        ZR_TRY(d->stream_wait(s, e->ev.param_free[slot]));
    ZR_TRY(d->stream_wait(s, shard_written(e, unit)));
    ZR_TRY(zr_mark_job(e, s, ZR_TRACK_GATHER, ZR_SPAN_GATHER, job, false));
    ZR_TRY(zr_role_gather(e, ZR_ROLE_GATHER, e->i.gather_segs, n_segs, &tag));
    ZR_TRY(zr_mark_job(e, s, ZR_TRACK_GATHER, ZR_SPAN_GATHER, job, true));
    e->i.n_gather++;
    return d->event_record(e->ev.ready[unit], s);
}

/* Completes this rank's inner slice of the unit with the fine slices of the other groups. Frozen flats never
 * change, so they are not gathered. Peers in the group read the inner slice only in the unit's next GATHER,
 * which waits for whole[unit]. */
static int issue_gather_outer(struct zr_engine *e, const struct zr_job *job)
{
    const struct zr_device_ops *d = e->dev->ops;
    struct zr_stream *s = e->gather_outer_stream;
    int32_t unit = job->action.unit, n, n_segs = 0;
    const struct zr_flat *f = zr_unit_flats(e, unit, &n);
    for (int32_t i = 0; i < n; i++)
        if (f[i].trainable)
            e->i.gather_segs[n_segs++] = zr_outer_gather_seg(e, &f[i]);
    struct zr_tag tag = zr_job_tag(job);
    ZR_TRY(d->stream_wait(s, e->ev.updated[unit]));
    ZR_TRY(zr_mark_job(e, s, ZR_TRACK_GATHER_OUTER, ZR_SPAN_GATHER_OUTER, job, false));
    ZR_TRY(zr_role_gather(e, ZR_ROLE_GATHER_OUTER, e->i.gather_segs, n_segs, &tag));
    ZR_TRY(zr_mark_job(e, s, ZR_TRACK_GATHER_OUTER, ZR_SPAN_GATHER_OUTER, job, true));
    e->i.n_outer_gather++;
    return d->event_record(e->ev.whole[unit], s);
}

/* ---- reduce ---- */

/* Combines the sums of the unit: adds sums[sum] to sums[sum-1], then that to sums[sum-2], n_folds times.
 * Only `deterministic` keeps several sums, so that contributions are added in a fixed tree. Each sum is of
 * this rank's fine slice. */
static int issue_folds(struct zr_engine *e, const struct zr_job *job)
{
    int32_t n;
    const struct zr_flat *f = zr_unit_flats(e, job->action.unit, &n);
    struct zr_stream *s = zr_last_reduction(e).stream;
    int sum = job->action.sum;
    for (int left = job->action.n_folds; left > 0; left--, sum--)
        for (int32_t i = 0; i < n; i++) {
            if (zr_has_reduce_slot(e, &f[i]))
                ZR_TRY(zr_fold_rounded(e, s, &f[i], job, sum));
            else if (f[i].trainable)
                ZR_TRY(e->dev->ops->add(s, (float *)zr_sum_at(e, &f[i], sum - 1), zr_sum_at(e, &f[i], sum),
                                        ZERO_F32, f[i].fine_elems));
        }
    return 0;
}

/* Reduces a gradient inside the group, or over all ranks if there are no groups.
 *
 * The model may write the gradient again once its sum is elsewhere. If the gradient's memory is itself the
 * sum (sum_in_place), the model may write it only after the optimizer has read it, so UPDATE records
 * grad_free. At stage 0 peers gather that sum, too. They have done so before any rank's UPDATE, because a
 * rank joins the norm's agreement only after its gathers. */
static int issue_reduce(struct zr_engine *e, const struct zr_job *job)
{
    const struct zr_device_ops *d = e->dev->ops;
    const struct zr_action *a = &job->action;
    const struct zr_axis_reduction inner = zr_inner_reduction(e);
    struct zr_stream *s = inner.stream;
    int32_t index = zr_grad_index(e->plan, a->unit, a->slot);
    bool has_groups = e->plan->spec.outer;
    ZR_TRY(d->stream_wait(s, e->ev.grad_done[index]));
    if (has_groups)
        ZR_TRY(d->stream_wait(s, e->ev.group_sum_free[zr_group_sum_index(a)]));
    ZR_TRY(zr_mark_job(e, s, ZR_TRACK_REDUCE, ZR_SPAN_REDUCE, job, false));
    ZR_TRY(zr_reduce_over_axis(e, &inner, job));
    if (e->plan->sum_in_place[a->unit])
        ZR_TRY(zr_gather_sums(e, &inner, s, job));
    else
        ZR_TRY(d->event_record(e->ev.grad_free[index], s));
    if (has_groups)
        ZR_TRY(d->event_record(e->ev.group_sum_done[zr_group_sum_index(a)], s));
    e->i.n_reduce++;
    ZR_TRY(issue_folds(e, job));
    return zr_mark_job(e, s, ZR_TRACK_REDUCE, ZR_SPAN_REDUCE, job, true);
}

/* Reduces groups' sums to the sum over all data-parallel ranks. It runs on a separate stream, so that groups
 * can reduce other units meanwhile. */
static int issue_reduce_outer(struct zr_engine *e, const struct zr_job *job)
{
    const struct zr_device_ops *d = e->dev->ops;
    const struct zr_action *a = &job->action;
    const struct zr_axis_reduction outer = zr_outer_reduction(e);
    struct zr_stream *s = outer.stream;
    bool once_a_step = a->group_slot < 0;
    ZR_TRY(d->stream_wait(s, e->ev.group_sum_done[zr_group_sum_index(a)]));
    ZR_TRY(zr_mark_job(e, s, ZR_TRACK_REDUCE_OUTER, ZR_SPAN_REDUCE_OUTER, job, false));
    ZR_TRY(zr_reduce_over_axis(e, &outer, job));
    /* HSDP needs the whole sum. If contributions are reduced one by one, UPDATE gathers it instead. */
    if (once_a_step)
        ZR_TRY(zr_gather_sums(e, &outer, s, job));
    ZR_TRY(d->event_record(e->ev.group_sum_free[zr_group_sum_index(a)], s));
    e->i.n_outer_reduce++;
    ZR_TRY(issue_folds(e, job));
    return zr_mark_job(e, s, ZR_TRACK_REDUCE_OUTER, ZR_SPAN_REDUCE_OUTER, job, true);
}

/* Gives up a step's sums (zero_drop). Only sums that wait for an update or for the other groups are in use.
 * Their events are recorded as if they had been used. A barrier comes first, because a peer may still be
 * gathering this rank's slices of them. */
static int issue_drop_sums(struct zr_engine *e, const struct zr_job *job)
{
    const struct zr_device_ops *d = e->dev->ops;
    const struct zr_axis_reduction last = zr_last_reduction(e);
    struct zr_tag tag = zr_job_tag(job);
    ZR_TRY(zr_sums_barrier(e, &last, &tag));
    for (int32_t u = 0; u < e->layout->n_units; u++) {
        if (e->plan->sum_in_place[u])
            ZR_TRY(d->event_record(e->ev.grad_free[zr_grad_index(e->plan, u, -1)], last.stream));
        if (e->plan->spec.outer)
            ZR_TRY(d->event_record(e->ev.group_sum_free[u], last.stream));
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
        return issue_folds(e, job);
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

/* ---- room on the streams ----
 *
 * A stream of the host holds a bounded number of operations, and adding one to a full stream waits. The
 * loop's thread must not wait, because it also serves sockets. So each stream has room for the largest job,
 * about 200 bytes per operation, and a job is issued once there is room for all of it.
 *
 * Most jobs put a few operations per flat of a unit on a stream. On the reduce stream, the norm and an update
 * put at most some per tensor, and a snapshot some per array of each flat. */

enum {
    /* operations of any job: waits, marks of the timeline, collectives, and those of the norm other than
     * squares */
    OPS_OF_JOB = 16,
    /* per flat: narrow, reduce and gather; a communicator of one rank (comm/self.c) makes one operation per
     * segment */
    OPS_OF_FLAT = 3,
    /* per piece that optim.update updates: scale the gradient, call, round the weights */
    OPS_OF_USER_UPDATE = 3,
    /* most operations of a job on one communicator: a REDUCE, and the gather of its sum */
    MAX_JOB_OPS = 2
};

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
    const int64_t n_folds = e->plan->n_sums - 1,
                  usual = OPS_OF_JOB + (OPS_OF_FLAT + n_folds) * (int64_t)e->most_segs + e->most_roundings;
    if (kind == ZR_ACT_NORM)
        return usual + count_pieces(e, l->flats, l->n_flats, ZR_LEVEL_FINE) + zr_tp_digest_ops(e);
    if (kind == ZR_ACT_SNAPSHOT)
        return usual + (e->plan->n_states - ZR_VALUE_PARAM) * (int64_t)l->n_flats;
    if (kind != ZR_ACT_UPDATE)
        return usual;
    int32_t n;
    const struct zr_flat *f = zr_unit_flats(e, unit, &n);
    /* A part ends inside one piece at most. The stream waits for each part. */
    int64_t n_parts = zr_parts_of(e, unit),
            n_pieces = n_parts + count_pieces(e, f, n, zr_level_of(e->plan->placement.state));
    return usual + n_parts + n_pieces * (e->opt.update ? OPS_OF_USER_UPDATE : 1);
}

/* Lists the streams that jobs use, other than the reduce stream. NULL: there is none. */
enum { N_OTHER_STREAMS = 3 };
static void list_other_streams(const struct zr_engine *e, struct zr_stream *s[N_OTHER_STREAMS])
{
    s[0] = e->gather_stream;
    s[1] = e->gather_outer_stream;
    s[2] = e->reduce_outer_stream;
}

int zr_room_open(struct zr_engine *e)
{
    struct zr_stream *s[N_OTHER_STREAMS];
    int64_t usual = zr_room_of(e, ZR_ACT_REDUCE, 0), most = zr_room_of(e, ZR_ACT_NORM, -1);
    if (e->plan->snapshot_bytes)
        most = zr_max(most, zr_room_of(e, ZR_ACT_SNAPSHOT, -1));
    int64_t most_transfers = 0;
    for (int32_t u = 0; u < e->layout->n_units; u++) {
        most = zr_max(most, zr_room_of(e, ZR_ACT_UPDATE, u));
        most_transfers = zr_max(most_transfers, zr_parts_room(e, u));
    }
    ZR_TRY(zr_stream_reserve(e->dev, e->reduce_stream, most));
    if (e->states_stream)
        ZR_TRY(zr_stream_reserve(e->dev, e->states_stream, most_transfers));
    list_other_streams(e, s);
    for (int i = 0; i < N_OTHER_STREAMS; i++)
        if (s[i])
            ZR_TRY(zr_stream_reserve(e->dev, s[i], usual));
    return 0;
}

bool zr_room_for(const struct zr_engine *e, const struct zr_action *a)
{
    struct zr_stream *s[N_OTHER_STREAMS];
    int64_t usual = zr_room_of(e, ZR_ACT_REDUCE, 0);
    list_other_streams(e, s);
    for (int i = 0; i < N_OTHER_STREAMS; i++)
        if (s[i] && !zr_stream_has_room(e->dev, s[i], usual))
            return false;
    int64_t transfers = !e->states_stream ? 0 : a->kind == ZR_ACT_UPDATE ? zr_parts_room(e, a->unit) : 1;
    if (transfers && !zr_stream_has_room(e->dev, e->states_stream, transfers))
        return false;
    return zr_stream_has_room(e->dev, e->reduce_stream, zr_room_of(e, (enum zr_action_kind)a->kind, a->unit));
}

/* Whether carrying out the job calls optim.update on the calling thread. */
static bool calls_program(const struct zr_engine *e, const struct zr_job *job)
{
    return job->action.kind == ZR_ACT_UPDATE && e->opt.update && !e->dev->ops->host_memory;
}

/* Whether the job is an update by the program that may not be called yet. On a GPU optim.update puts kernels
 * on the stream itself. It is called only when it is known that the step is not skipped. */
static bool awaits_norm(struct zr_engine *e, const struct zr_job *job)
{
    return calls_program(e, job) && e->dev->ops->event_query(e->ev.step_norm) == 0 &&
           zr_engine_status(e) == 0;
}

/* A job that is not ready holds up everything behind it, so it waits only for what comes before it. Room
 * appears when this rank's earlier operations end, and the norm is known when an earlier job is over. Both
 * happen whatever is issued later, because all ranks issue their operations in one order
 * (comm/sim/sim_order.c).
 *
 * Jobs of a failed engine are always ready, because they do nothing. A job that calls the program is left to
 * the loop's thread, because the model's thread notices if that one never returns. */
bool zr_engine_is_ready(void *arg, const struct zr_job *job, bool is_loop)
{
    struct zr_engine *e = arg;
    if (zr_engine_has_failed(e))
        return true;
    if (!is_loop && calls_program(e, job))
        return false;
    return zr_roles_have_room(e, MAX_JOB_OPS) && zr_room_for(e, &job->action) && !awaits_norm(e, job);
}

/* Carries out the job under its name, so that a failure or a hang can be reported with it. */
static void issue_and_report(struct zr_engine *e, const struct zr_job *job)
{
    atomic_store_explicit(&e->i.unit, job->action.unit, memory_order_relaxed);
    atomic_store_explicit(&e->i.kind, job->action.kind, memory_order_relaxed);
    zr_flight_job(e->flight, zr_action_name((enum zr_action_kind)job->action.kind), job->action.unit);
    int err = issue_job(e, job);
    zr_flight_job_done(e->flight);
    atomic_store_explicit(&e->i.kind, 0, memory_order_relaxed);
    if (err)
        zr_engine_fail(e, err, zr_error_text());
}

void zr_engine_issue(void *arg, const struct zr_job *job)
{
    struct zr_engine *e = arg;
    zr_observe_job(e, job);
    if (!zr_engine_has_failed(
            e)) /* else a wait for this job's event ends at once, or with an earlier record */
        issue_and_report(e, job);
    zr_observe_job_done(e);
}
