/* engine_issue.c: the loop's hand: actions -> collectives and kernels on the gather and the reduce stream. */
#include "kernels/check/guard.h"
#include "shard/engine/engine_inside.h"

#include <math.h>
#include <stdio.h>

/* A device or communicator call; the first failure ends the job. */
#define TRY(call)                                                                                            \
    do {                                                                                                     \
        int try_err = (call);                                                                                \
        if (try_err)                                                                                         \
            return try_err;                                                                                  \
    } while (0)

static struct zr_tag tag_of(const struct zr_job *job)
{
    return (struct zr_tag){.unit = job->action.unit, .step = job->step, .call_hash = job->call_hash};
}

static const struct zr_flat *flats_of(const struct zr_engine *e, int32_t unit, int32_t *n)
{
    const struct zr_unit *u = &e->layout->units[unit];
    *n = u->n_flats;
    return &e->layout->flats[u->first_flat];
}

/* ---- gather ---- */

static int gather(struct zr_engine *e, const struct zr_job *job)
{
    const struct zr_device_ops *d = e->dev->ops;
    int32_t unit = job->action.unit, slot = job->action.slot, n, n_segs = 0;
    const struct zr_flat *f = flats_of(e, unit, &n);
    for (int32_t i = 0; i < n; i++) {
        if (!zr_plan_gathers(e->plan, &f[i]))
            continue;
        bool home = e->plan->resident[unit]; /* the shard is a slice of the full region */
        int64_t full = zr_plan_param_full(e->plan, &f[i], slot);
        e->i.gather_segs[n_segs++] =
            (struct zr_gather_seg){.src = home ? full : zr_plan_param_own(e->plan, &f[i], 0),
                                   .dst = full,
                                   .in_place = home,
                                   .cut = {f[i].shard_bytes, f[i].total_bytes}};
    }
    struct zr_tag tag = tag_of(job);
    if (slot >= 0)
        TRY(d->stream_wait(e->gather_stream, e->ev.param_free[slot]));
    TRY(d->stream_wait(e->gather_stream, e->ev.updated[unit]));
    TRY(zr_timeline_mark(e->timeline, e->gather_stream, ZR_TRACK_GATHER, ZR_SPAN_GATHER, unit, job->step,
                         false));
    TRY(e->gather->ops->all_gather(e->gather, e->gather_stream, e->i.gather_segs, n_segs, &tag));
    TRY(zr_timeline_mark(e->timeline, e->gather_stream, ZR_TRACK_GATHER, ZR_SPAN_GATHER, unit, job->step,
                         true));
    e->i.n_gather++;
    return d->event_record(e->ev.ready[unit], e->gather_stream);
}

/* ---- reduce ---- */

static float *sum_at(const struct zr_engine *e, const struct zr_flat *f, int k)
{
    return (float *)(e->reduce_base + zr_plan_sum(e->plan, f, e->rank, k));
}

/* sums[sum-1] += sums[sum], n times downwards. */
static int fold(struct zr_engine *e, int32_t unit, int sum, int n_folds)
{
    int32_t n;
    const struct zr_flat *f = flats_of(e, unit, &n);
    for (; n_folds > 0; n_folds--, sum--)
        for (int32_t i = 0; i < n; i++)
            if (f[i].trainable)
                TRY(e->dev->ops->add(e->reduce_stream, sum_at(e, &f[i], sum - 1), sum_at(e, &f[i], sum),
                                     ZR_F32, f[i].shard_elems));
    return 0;
}

/* The second half of an all-reduce: every rank's sum to all, as fp32; to the gradients that they
 * lie in, or else end to end to full_grad_at. */
static int gather_grad(struct zr_engine *e, const struct zr_job *job)
{
    int32_t n, n_segs = 0;
    const struct zr_flat *f = flats_of(e, job->action.unit, &n);
    bool in_place = e->plan->sum_in_place[job->action.unit];
    int64_t at = e->plan->full_grad_at;
    for (int32_t i = 0; i < n; i++) {
        if (!f[i].trainable)
            continue;
        int64_t shard = f[i].shard_elems * (int64_t)sizeof(float), home = zr_plan_sum(e->plan, &f[i], 0, 0);
        e->i.gather_segs[n_segs++] = (struct zr_gather_seg){
            .src = home,
            .dst = in_place ? home : at,
            .in_place = in_place,
            .cut = {shard, f[i].total_bytes / zr_dtype_bytes(f[i].dtype) * (int64_t)sizeof(float)}};
        at += shard * e->world;
    }
    struct zr_tag tag = tag_of(job);
    return e->reduce->ops->all_gather(e->reduce, e->reduce_stream, e->i.gather_segs, n_segs, &tag);
}

static int reduce(struct zr_engine *e, const struct zr_job *job)
{
    const struct zr_device_ops *d = e->dev->ops;
    const struct zr_action *a = &job->action;
    int32_t n, n_segs = 0, place = zr_grad_place(e->plan, a->unit, a->slot);
    bool in_place = e->plan->sum_in_place[a->unit];
    const struct zr_flat *f = flats_of(e, a->unit, &n);
    TRY(d->stream_wait(e->reduce_stream, e->ev.grad_done[place]));
    TRY(zr_timeline_mark(e->timeline, e->reduce_stream, ZR_TRACK_REDUCE, ZR_SPAN_REDUCE, a->unit, job->step,
                         false));
    for (int32_t i = 0; i < n; i++) {
        if (!f[i].trainable)
            continue;
        struct zr_reduce_seg seg = {.src = zr_plan_grad_full(e->plan, &f[i], a->slot),
                                    .dst = zr_plan_sum(e->plan, &f[i], e->rank, a->sum),
                                    .cut = {f[i].shard_bytes, f[i].total_bytes},
                                    .dtype = f[i].dtype,
                                    .accumulate = a->accumulate && !in_place};
        enum zr_dtype wire = e->opt.wire_dtype;
        if (wire && e->world > 1 && zr_dtype_bytes(wire) < zr_dtype_bytes(seg.dtype)) {
            /* In place: the gradient is consumed by this reduce anyway. */
            void *grad = e->reduce_base + seg.src;
            int64_t ratio = zr_dtype_bytes(seg.dtype) / zr_dtype_bytes(wire);
            TRY(d->cast(e->reduce_stream, grad, wire, grad, seg.dtype,
                        seg.cut.total / zr_dtype_bytes(seg.dtype)));
            seg.cut.each /= ratio;
            seg.cut.total /= ratio;
            seg.dtype = wire;
        }
        e->i.reduce_segs[n_segs++] = seg;
    }
    struct zr_tag tag = tag_of(job);
    TRY(e->reduce->ops->reduce_scatter(e->reduce, e->reduce_stream, e->i.reduce_segs, n_segs, &tag));
    /* What is summed in place is free when the optimizer has read it. Peers have by then read what they
     * gather of it here: they have been in the exchange of the norm. */
    if (in_place && a->accumulate)
        TRY(zr_aside_add(e, a->unit));
    if (in_place && e->plan->hop[ZR_INNER].sums_whole)
        TRY(gather_grad(e, job));
    if (!in_place)
        TRY(d->event_record(e->ev.grad_free[place], e->reduce_stream));
    e->i.n_reduce++;
    TRY(fold(e, a->unit, a->sum, a->n_folds));
    return zr_timeline_mark(e->timeline, e->reduce_stream, ZR_TRACK_REDUCE, ZR_SPAN_REDUCE, a->unit,
                            job->step, true);
}

static int no_grad(struct zr_engine *e, const struct zr_job *job)
{
    int32_t n;
    const struct zr_flat *f = flats_of(e, job->action.unit, &n);
    if (e->plan->sum_in_place[job->action.unit]) {
        /* The model may have had it until it called zero_step. */
        TRY(e->dev->ops->stream_wait(e->reduce_stream, e->ev.step_compute));
        for (int32_t i = 0; i < n; i++)
            if (f[i].trainable)
                TRY(e->dev->ops->zero(e->reduce_stream,
                                      e->reduce_base + zr_plan_grad_full(e->plan, &f[i], -1),
                                      f[i].total_bytes));
        return 0;
    }
    /* A peer may still be gathering this sum for its update of the step before, and in a step
     * without any gradient no reduce stands in between: everyone has to be past it. */
    struct zr_tag tag = tag_of(job);
    if (e->plan->hop[ZR_INNER].sums_whole)
        TRY(e->reduce->ops->exchange(e->reduce, e->reduce_stream, e->plan->exchange_at, ZR_EXCHANGE_BYTES,
                                     &tag));
    for (int32_t i = 0; i < n; i++)
        if (f[i].trainable)
            TRY(e->dev->ops->zero(e->reduce_stream, sum_at(e, &f[i], 0),
                                  f[i].shard_elems * (int64_t)sizeof(float)));
    return 0;
}

/* ---- norm ---- */

static int norm_range(void *arg, const struct zr_flat *f, const struct zr_piece *p, int64_t first, int64_t n)
{
    struct zr_engine *e = arg;
    (void)p;
    int64_t own;
    zr_flat_owned(f, e->rank, &own);
    return e->dev->ops->sum_squares(e->reduce_stream, &zr_engine_record(e, e->rank)->norm,
                                    sum_at(e, f, 0) + (first - own), n);
}

static int norm(struct zr_engine *e, const struct zr_job *job)
{
    const struct zr_device_ops *d = e->dev->ops;
    TRY(d->stream_wait(e->reduce_stream, e->ev.step_compute));
    TRY(d->event_record(e->ev.gather_tail, e->gather_stream));
    TRY(d->stream_wait(e->reduce_stream, e->ev.gather_tail));
    TRY(zr_timeline_mark(e->timeline, e->reduce_stream, ZR_TRACK_REDUCE, ZR_SPAN_NORM, -1, job->step, false));
    struct zr_step_record *own = zr_engine_record(e, e->rank);
    const struct zr_step_words words = {.call_hash = job->call_hash,
                                        .serial = ++e->i.n_norms,
                                        .save_written = atomic_load(&e->s.own_least),
                                        .lr = job->lr};
    TRY(d->zero(e->reduce_stream, &own->norm, sizeof own->norm));
    TRY(d->put(e->reduce_stream, &own->words, &words, sizeof words));
    int64_t carried_bytes = job->given->n * (int64_t)sizeof *job->given->value;
    if (carried_bytes)
        TRY(d->put(e->reduce_stream, own->carried, job->given->value, carried_bytes));
    for (int32_t i = 0; i < e->layout->n_flats; i++) {
        const struct zr_flat *flat = &e->layout->flats[i];
        int64_t first, n = zr_flat_owned(flat, e->rank, &first);
        if (flat->trainable)
            TRY(zr_flat_ranges(e->layout, flat, first, first + n, norm_range, e));
    }
    struct zr_tag tag = tag_of(job);
    TRY(e->reduce->ops->exchange(e->reduce, e->reduce_stream, e->plan->exchange_at, ZR_EXCHANGE_BYTES, &tag));
    for (int r = 0; carried_bytes && r < e->world; r++)
        TRY(d->copy(e->reduce_stream, e->words + r * carried_bytes, zr_engine_record(e, r)->carried,
                    carried_bytes));
    double scale = e->opt.grad_scale;
    if (!e->opt.grad_sum)
        scale /= (double)e->world * e->opt.grad_accum_steps;
    const struct zr_finish f = {.records = zr_engine_record(e, 0),
                                .stride_bytes = ZR_EXCHANGE_BYTES,
                                .n_ranks = e->world,
                                .rank = e->rank,
                                .scale = scale,
                                .clip = job->tuned->clip,
                                .scalars = zr_engine_scalars(e),
                                .outcome = e->outcome};
    TRY(d->finish(e->reduce_stream, &f));
    TRY(zr_timeline_mark(e->timeline, e->reduce_stream, ZR_TRACK_REDUCE, ZR_SPAN_NORM, -1, job->step, true));
    return d->event_record(e->ev.step_norm, e->reduce_stream);
}

/* ---- update ---- */

struct updating {
    struct zr_engine *e;
    const struct zr_job *job;
    const float *grad;  /* of the flat's first kept element */
    int64_t first_kept; /* element of the flat */
};

struct user_call {
    struct zr_engine *e;
    struct zr_user_update u;
};

static void call_user(void *arg)
{
    struct user_call *c = arg;
    if (c->e->outcome->skipped || c->e->outcome->other >= 0 || zr_engine_has_failed(c->e))
        return;
    zr_guard_callback("cfg.update");
    int err = c->e->opt.update(c->e->opt.update_arg, &c->u);
    zr_guard_callback(NULL);
    if (err) {
        char text[256];
        snprintf(text, sizeof text, "the update callback returned %d for tensor %s, elements %lld..%lld", err,
                 c->e->layout->tensors[c->u.tensor].name, (long long)c->u.first,
                 (long long)(c->u.first + c->u.n - 1));
        zr_engine_fail(c->e, ZR_ERR_FAILED, text);
    }
}
_Static_assert(sizeof(struct user_call) <= ZR_CALL_BYTES, "must travel on a stream");

static int update_by_user(struct updating *up, const struct zr_update *k, const struct zr_flat *f,
                          const struct zr_piece *p, int64_t first)
{
    struct zr_engine *e = up->e;
    const struct zr_device_ops *d = e->dev->ops;
    struct user_call c = {e,
                          {.tensor = p->tensor,
                           .first = p->slice * p->n + (first - p->first),
                           .n = k->n,
                           .master = k->master,
                           .grad = k->grad,
                           .lr = k->lr,
                           .t = k->t}};
    for (int i = 0; i < e->opt.n_states; i++)
        c.u.state[i] = zr_engine_state_at(e, f, i, first);
    TRY(d->scale(e->reduce_stream, (float *)k->grad, k->n, k->scalars));
    if (d->host_memory) {
        int64_t bytes = k->n * (int64_t)sizeof(float);
        struct zr_access used[3 + ZR_MAX_STATES] = {
            {e->outcome, sizeof *e->outcome, false}, {k->grad, bytes, false}, {k->master, bytes, true}};
        for (int i = 0; i < e->opt.n_states; i++)
            used[3 + i] = (struct zr_access){c.u.state[i], bytes, true};
        zr_declare(e->dev, e->reduce_stream, used, 3 + e->opt.n_states);
        TRY(d->call(e->reduce_stream, call_user, &c, sizeof c));
    } else {
        /* It puts its own kernels on the stream, and only if the step is not skipped. */
        c.u.native_stream = d->stream_native(e->reduce_stream);
        TRY(zr_engine_wait(e, e->ev.step_norm));
        call_user(&c);
    }
    if (k->param != k->master)
        TRY(d->cast(e->reduce_stream, k->param, k->param_dtype, k->master, ZR_F32, k->n));
    return 0;
}

static int update_range(void *arg, const struct zr_flat *f, const struct zr_piece *p, int64_t first,
                        int64_t n)
{
    struct updating *up = arg;
    struct zr_engine *e = up->e;
    const struct zr_options *o = &e->opt;
    const struct zr_tensor *t = &e->layout->tensors[p->tensor];
    enum zr_optimizer kind = zr_kind_of(o, f->optimizer);
    const struct zr_hyper *hyper = &up->job->tuned->hyper[kind];
    struct zr_update k = {.kind = kind,
                          .param_dtype = f->dtype,
                          .lr = up->job->lr * t->lr_scale,
                          .beta1 = hyper->beta1,
                          .beta2 = hyper->beta2,
                          .eps = hyper->eps,
                          .decay = hyper->weight_decay * t->decay_scale,
                          .c1 = 1,
                          .c2 = 1,
                          .t = up->job->t,
                          .n = n,
                          .master = zr_engine_master_at(e, f, first),
                          .param = zr_engine_param_at(e, f, first),
                          .grad = up->grad + (first - up->first_kept),
                          .scalars = zr_engine_scalars(e)};
    if (!kind)
        return update_by_user(up, &k, f, p, first);
    for (int i = 0; i < zr_plan_states(e->plan, f); i++)
        k.state[i] = zr_engine_state_at(e, f, i, first);
    if (zr_optimizer_kind(kind)->bias_correction) {
        /* In float, as the loops of C models have it. */
        k.c1 = 1.0f - powf(k.beta1, (float)k.t);
        k.c2 = 1.0f - powf(k.beta2, (float)k.t);
    }
    /* A kind whose first step makes its states of the gradient alone goes on from those that there are. */
    if (k.t == 1 && up->job->tuned->has_states)
        k.t = 2;
    return e->dev->ops->update(e->reduce_stream, &k);
}

/* Where every rank updates everything, it needs the whole reduced gradient of the unit. */
static int update(struct zr_engine *e, const struct zr_job *job)
{
    int32_t n, unit = job->action.unit;
    const struct zr_flat *f = flats_of(e, unit, &n);
    bool in_place = e->plan->sum_in_place[unit], gathered = !in_place && e->plan->hop[ZR_INNER].sums_whole;
    TRY(zr_timeline_mark(e->timeline, e->reduce_stream, ZR_TRACK_REDUCE, ZR_SPAN_UPDATE, unit, job->step,
                         false));
    if (gathered)
        TRY(gather_grad(e, job));
    float *full = (float *)(e->reduce_base + e->plan->full_grad_at);
    for (int32_t i = 0; i < n; i++) {
        if (!f[i].trainable)
            continue;
        struct updating up = {.e = e, .job = job, .grad = gathered ? full : sum_at(e, &f[i], 0)};
        if (in_place)
            up.grad = (const float *)(e->reduce_base + zr_plan_grad_full(e->plan, &f[i], -1));
        int64_t kept = zr_engine_kept(e, &f[i], &up.first_kept);
        TRY(zr_flat_ranges(e->layout, &f[i], up.first_kept, up.first_kept + kept, update_range, &up));
        full += f[i].shard_elems * e->world;
    }
    TRY(zr_timeline_mark(e->timeline, e->reduce_stream, ZR_TRACK_REDUCE, ZR_SPAN_UPDATE, unit, job->step,
                         true));
    if (in_place)
        TRY(e->dev->ops->event_record(e->ev.grad_free[zr_grad_place(e->plan, unit, -1)], e->reduce_stream));
    return e->dev->ops->event_record(e->ev.updated[unit], e->reduce_stream);
}

/* As if all sums in place had been used. A peer may still be gathering this rank's parts of them. */
static int drop_sums(struct zr_engine *e, const struct zr_job *job)
{
    struct zr_tag tag = tag_of(job);
    if (e->world > 1)
        TRY(e->reduce->ops->exchange(e->reduce, e->reduce_stream, e->plan->exchange_at, ZR_EXCHANGE_BYTES,
                                     &tag));
    for (int32_t u = 0; u < e->layout->n_units; u++)
        if (e->plan->sum_in_place[u])
            TRY(e->dev->ops->event_record(e->ev.grad_free[zr_grad_place(e->plan, u, -1)], e->reduce_stream));
    return 0;
}

static int carry(struct zr_engine *e, const struct zr_job *job)
{
    switch ((enum zr_action_kind)job->action.kind) {
    case ZR_ACT_GATHER:
        return gather(e, job);
    case ZR_ACT_SET_ASIDE: {
        struct zr_tag tag = tag_of(job);
        return zr_aside_issue(e, job->action.unit, &tag);
    }
    case ZR_ACT_DROP_SUMS:
        return drop_sums(e, job);
    case ZR_ACT_REDUCE:
        return reduce(e, job);
    case ZR_ACT_FOLD:
        return fold(e, job->action.unit, job->action.sum, job->action.n_folds);
    case ZR_ACT_NO_GRAD:
        return no_grad(e, job);
    case ZR_ACT_NORM:
        return norm(e, job);
    case ZR_ACT_UPDATE:
        return update(e, job);
    case ZR_ACT_SNAPSHOT:
        return zr_engine_issue_snapshot(e);
    default:
        return zr_fail(ZR_ERR_FAILED, "action %d is not the loop's", job->action.kind);
    }
}

static bool has_room(struct zr_comm *c)
{
    return !c->ops->has_room || c->ops->has_room(c);
}

/* A job puts at most one operation on each communicator. cfg.update on a GPU is called once it is known
 * whether the step is skipped. */
bool zr_engine_is_ready(void *arg, const struct zr_job *job)
{
    struct zr_engine *e = arg;
    bool waits = job->action.kind == ZR_ACT_UPDATE && e->opt.update && !e->dev->ops->host_memory;
    if (zr_engine_has_failed(e))
        return true;
    if (!has_room(e->gather) || !has_room(e->reduce))
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
    int err = carry(e, job);
    if (err)
        zr_engine_fail(e, err, zr_error_text());
}
