/* SPDX-License-Identifier: Apache-2.0 */
/* issue_step.c: the jobs of a step: the norm, on which all ranks agree, and the optimizer. */
#include "kernels/check/guard.h"
#include "shard/engine/issue.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

double zr_unclipped_scale(const struct zr_engine *e, const struct zr_tuned *tuned)
{
    double scale = tuned->grad_scale;
    return e->opt.grad_sum ? scale : scale / ((double)e->dp * tuned->grad_accum_steps);
}

/* Elements whose squares are still to be summed. */
struct squares {
    struct zr_engine *e;
    const struct zr_tuned *tuned;
    const char *x;
    enum zero_dtype dtype;
    int64_t n;
};

/* Puts the sum of squares on the stream. Blocks from 2^-20 of the greatest allowed norm on are recorded. All
 * ranks together have fewer than 2^40 blocks, so if the norm is too large, some block is recorded. Positions
 * count from the start of the arena, which has the same layout on all ranks. So every rank can find the
 * tensor (tensor_at of step.c). */
static int put_squares(struct squares *q)
{
    struct zr_engine *e = q->e;
    struct zr_own_squares *own = zr_engine_norm_at(e);
    double from = ldexp(ZR_MAX_NORM_TO_SQUARE / fabs(zr_unclipped_scale(e, q->tuned)), -20);
    const struct zr_largest largest = {
        .word = &own->largest, .at = (q->x - e->reduce_base) / 2, .from = from * from};
    return q->n ? e->dev->ops->sum_squares(e->reduce_stream, &own->sum, q->x, q->dtype, q->n, &largest) : 0;
}

/* Joins ranges that lie end to end into one operation, which is one kernel launch on a GPU. Ranges may only
 * be joined at the end of a canonical block, so that the blocks stay the same. */
static int norm_range(void *arg, const struct zr_flat *f, const struct zr_piece *p, int64_t first, int64_t n)
{
    struct squares *q = arg;
    const int64_t size = zr_sum_size(f);
    const char *x = zr_sum_at(q->e, f, 0) + (first - zr_engine_fine(q->e, f).first) * size;
    (void)p;
    if (q->n == 0 || q->dtype != f->sum_dtype || q->x + q->n * size != x || q->n % ZR_NORM_BLOCK) {
        ZR_TRY(put_squares(q));
        q->x = x;
        q->dtype = f->sum_dtype;
        q->n = 0;
    }
    q->n += n;
    return 0;
}

/* Sums the squares of this rank's fine slices of the gradients that the step has. For tensors that are not
 * cut, one tp rank counts them. */
static int sum_own_squares(struct zr_engine *e, const struct zr_tuned *tuned)
{
    struct zr_own_squares *norm = zr_engine_norm_at(e);
    struct squares q = {.e = e, .tuned = tuned};
    ZR_TRY(e->dev->ops->zero(e->reduce_stream, norm, sizeof *norm));
    for (int32_t i = 0; i < e->layout->n_flats; i++) {
        const struct zr_flat *flat = &e->layout->flats[i];
        struct zr_span own = zr_engine_fine(e, flat);
        if (flat->trainable && !e->i.left_out[flat->unit] && (flat->cut || e->tp_rank == 0))
            ZR_TRY(zr_flat_ranges(e->layout, flat, own.first, own.first + own.n, norm_range, &q));
    }
    return put_squares(&q);
}

/* Whether an optimizer of this rank's tensors keeps squares of the gradient. It is not known what
 * optim.update keeps; that is up to the program. */
static bool keeps_squares(const struct zr_engine *e)
{
    bool keeps = false;
    for (int32_t i = 0; i < e->layout->n_flats; i++) {
        const struct zr_flat *f = &e->layout->flats[i];
        keeps |= f->optimizer && zr_optimizer_kind(f->optimizer)->squares >= 0;
    }
    return keeps;
}

static int begin_agreement(struct zr_engine *e, const struct zr_job *job)
{
    struct zr_agree_begin b = {.own = zr_engine_norm_at(e),
                               .rank = e->rank,
                               .out = zr_engine_agreement(e),
                               .words = {[ZR_AGREE_CALLS] = job->world_hash,
                                         [ZR_AGREE_LR] = zr_agree_lr_word(job->lr, e->rank),
                                         [ZR_AGREE_LEAST] = atomic_load(&e->s.reported_least),
                                         [ZR_AGREE_SQUARES] = keeps_squares(e)},
                               .n_carried = job->carried->n};
    if (e->pp_at == e->pp - 1) /* it has the loss; values of other stages count as 0 */
        memcpy(b.carried, job->carried->value, sizeof b.carried);
    return e->dev->ops->agree_begin(e->reduce_stream, &b);
}

static int end_agreement(struct zr_engine *e, const struct zr_job *job)
{
    const struct zr_agree_end end = {.all = zr_engine_agreement(e),
                                     .scale = zr_unclipped_scale(e, job->tuned),
                                     .clip = job->tuned->clip,
                                     .n_carried = job->carried->n,
                                     .n_ranks = e->n_all,
                                     .n_averaged = e->dp * e->tp,
                                     .scalars = zr_engine_scalars(e),
                                     .agreed = e->agreed};
    return e->dev->ops->agree_end(e->reduce_stream, &end);
}

/* Makes the reduce stream wait for everything on another stream. */
static int wait_for_tail(struct zr_engine *e, struct zr_stream *s, struct zr_event *tail)
{
    ZR_TRY(e->dev->ops->event_record(tail, s));
    return e->dev->ops->stream_wait(e->reduce_stream, tail);
}

/* Issues the norm and the agreement as one all-reduce. Its size depends neither on the ranks nor on what they
 * carry. */
int zr_issue_norm(struct zr_engine *e, const struct zr_job *job)
{
    const struct zr_device_ops *d = e->dev->ops;
    struct zr_tag tag = zr_job_tag(job);
    tag.call_hash = job->world_hash;
    ZR_TRY(zr_parts_read_ahead(e, job->next));
    ZR_TRY(d->stream_wait(e->reduce_stream, e->ev.step_compute));
    ZR_TRY(wait_for_tail(e, e->gather_stream, e->ev.gather_tail));
    if (e->gather_outer_stream)
        ZR_TRY(wait_for_tail(e, e->gather_outer_stream, e->ev.gather_outer_tail[0]));
    if (e->reduce_outer_stream)
        ZR_TRY(wait_for_tail(e, e->reduce_outer_stream, e->ev.reduce_outer_tail[0]));
    ZR_TRY(
        zr_timeline_mark(e->timeline, e->reduce_stream, ZR_TRACK_REDUCE, ZR_SPAN_NORM, -1, job->step, false));
    ZR_TRY(sum_own_squares(e, job->tuned));
    if (job->compares_tp)
        ZR_TRY(zr_tp_digest_gradients(e));
    memset(e->i.left_out, 0, (size_t)e->layout->n_units * sizeof *e->i.left_out);
    ZR_TRY(begin_agreement(e, job));
    ZR_TRY(zr_world_agree(e, e->plan->agreement_at, ZR_AGREE_SUMS, ZR_AGREE_MAXES, &tag));
    ZR_TRY(end_agreement(e, job));
    ZR_TRY(
        zr_timeline_mark(e->timeline, e->reduce_stream, ZR_TRACK_REDUCE, ZR_SPAN_NORM, -1, job->step, true));
    return d->event_record(e->ev.step_norm, e->reduce_stream);
}

/* ---- update ---- */

struct updating {
    struct zr_engine *e;
    const struct zr_job *job;
    const char *grad;   /* at the flat's first kept element */
    int64_t first_kept; /* first kept element of the flat */
    /* Spans that are still to be updated, in the flat's arrays from the first span's first element on. */
    struct zr_update u;
    int n_spans;
    struct zr_update_span span[ZR_MAX_SPANS];
};

static int put_update(struct updating *up)
{
    int n = up->n_spans;
    up->n_spans = 0;
    return n ? up->e->dev->ops->update_spans(up->e->reduce_stream, &up->u, up->span, n) : 0;
}

struct user_call {
    struct zr_engine *e;
    struct zero_update u;
};

/* Calls optim.update. If a communicator has failed since the agreement, gathered values may be incomplete, so
 * it is not called. */
static void call_user(void *arg)
{
    struct user_call *c = arg;
    if (c->e->agreed->skipped || c->e->agreed->differs || zr_engine_status(c->e))
        return;
    zr_guard_callback("optim.update");
    int err = c->e->opt.update(c->e->opt.update_arg, &c->u);
    zr_guard_callback(NULL);
    if (err) {
        char text[256];
        snprintf(text, sizeof text, "the update callback returned %d for tensor %s, elements %lld..%lld", err,
                 c->u.tensor, (long long)c->u.first, (long long)(c->u.first + c->u.n - 1));
        zr_engine_fail(c->e, ZERO_ERR_FAILED, text);
    }
}
_Static_assert(sizeof(struct user_call) <= ZR_CALL_BYTES, "must travel on a stream");

/* Waits for the norm. The loop must not wait, but it has already asked whether the norm is known
 * (zr_engine_is_ready). Without a loop this is the model's thread, which may wait. */
static int await_norm(struct zr_engine *e)
{
    if (!e->loop)
        return zr_engine_wait(e, e->ev.step_norm);
    int done = e->dev->ops->event_query(e->ev.step_norm);
    int err = done < 0 ? done : zr_engine_status(e);
    return err || done ? err : zr_fail(ZERO_ERR_FAILED, "optim.update: the step's norm is not known yet");
}

static int update_by_user(struct updating *up, const struct zr_update *k, const struct zr_flat *f,
                          const struct zr_piece *p, int64_t first)
{
    struct zr_engine *e = up->e;
    const struct zr_device_ops *d = e->dev->ops;
    struct user_call c = {e,
                          {.tensor = e->layout->tensors[p->tensor].name,
                           .tensor_index = p->tensor,
                           .first = p->layer * p->n + (first - p->first),
                           .n = k->n,
                           .master = k->master,
                           .grad = (float *)k->grad,
                           .lr = k->lr,
                           .t = k->t}};
    for (int i = 0; i < f->n_states; i++)
        c.u.state[i] = (float *)zr_engine_state_at(e, f, i, first);
    ZR_TRY(d->scale(e->reduce_stream, (float *)k->grad, k->n, k->scalars));
    if (d->host_memory) {
        int64_t bytes = k->n * (int64_t)sizeof(float);
        struct zr_access used[3 + ZR_MAX_STATES] = {
            {e->agreed, sizeof *e->agreed, false}, {k->grad, bytes, false}, {k->master, bytes, true}};
        for (int i = 0; i < f->n_states; i++)
            used[3 + i] = (struct zr_access){c.u.state[i], bytes, true};
        zr_declare(e->dev, e->reduce_stream, used, 3 + f->n_states);
        ZR_TRY(d->call(e->reduce_stream, call_user, &c, sizeof c));
    } else {
        /* It puts kernels on the stream itself, and must not do so if the step is skipped. */
        c.u.stream = d->stream_native(e->reduce_stream);
        ZR_TRY(await_norm(e));
        call_user(&c);
    }
    return k->param == k->master ? 0 : zr_params_from_masters(e, f, first, k->n, k->master);
}

/* Whether two updates agree in everything that is not part of a span. */
static bool has_numbers_of(const struct zr_update *a, const struct zr_update *b)
{
    return a->beta1 == b->beta1 && a->beta2 == b->beta2 && a->eps == b->eps;
}

/* Joins the pieces of a flat whose groups have the same betas and eps into one operation, which is one kernel
 * launch on a GPU. optim.update is called for each piece. */
static int update_range(void *arg, const struct zr_flat *f, const struct zr_piece *p, int64_t first,
                        int64_t n)
{
    struct updating *up = arg;
    struct zr_engine *e = up->e;
    const struct zr_tensor *t = &e->layout->tensors[p->tensor];
    const struct zr_optim *group = &up->job->tuned->optim[t->group];
    const bool wide = f->masters == ZERO_MASTERS_F32;
    char *master = zr_engine_master_at(e, f, first);
    struct zr_update k = {.kind = f->optimizer,
                          .param_dtype = f->dtype,
                          .masters = f->masters,
                          .moments = f->moments,
                          .grad_dtype = f->sum_dtype,
                          .lr = up->job->lr * group->lr_scale,
                          .beta1 = group->beta1,
                          .beta2 = group->beta2,
                          .eps = group->eps,
                          .decay = t->no_decay ? 0 : group->weight_decay,
                          .c1 = 1,
                          .c2 = 1,
                          .t = up->job->t,
                          .n = n,
                          .master = wide ? (float *)master : NULL,
                          .remainder = f->masters == ZERO_MASTERS_REMAINDER ? (uint16_t *)master : NULL,
                          .param = zr_engine_param_at(e, f, first),
                          .grad = up->grad + (first - up->first_kept) * zr_sum_size(f),
                          .scalars = zr_engine_scalars(e)};
    if (!f->optimizer)
        return update_by_user(up, &k, f, p, first);
    for (int i = 0; i < f->n_states; i++) {
        k.state[i] = zr_engine_state_at(e, f, i, first);
        k.scale[i] = zr_engine_scales_at(e, f, i, first);
    }
    if (zr_optimizer_kind(f->optimizer)->bias_correction) {
        /* Computed in float, like the loops of C models. */
        k.c1 = 1.0f - powf(k.beta1, (float)k.t);
        k.c2 = 1.0f - powf(k.beta2, (float)k.t);
    }
    /* Some kinds make their states from the gradient alone in the first step. If there are states, they
     * continue from those instead. */
    if (k.t == 1 && up->job->tuned->has_states)
        k.t = 2;
    if (up->n_spans > 0 && !has_numbers_of(&k, &up->u))
        ZR_TRY(put_update(up));
    if (up->n_spans == 0)
        up->u = k;
    int64_t at = ((const char *)k.grad - (const char *)up->u.grad) / zr_sum_size(f);
    up->span[up->n_spans++] = (struct zr_update_span){
        at, n, k.lr, k.decay, zr_rounding_from(e, p, first - p->first, up->job->begun)};
    up->u.n = at + n;
    return up->n_spans == ZR_MAX_SPANS ? put_update(up) : 0;
}

/* Returns the reduced gradient of the flat's first kept element. full: where zr_gather_sums has put the
 * flat's, or NULL. */
static const char *update_grad(const struct zr_engine *e, const struct zr_axis_reduction *last,
                               const struct zr_flat *f, const char *full)
{
    if (full)
        return full;
    if (e->plan->hop[last->axis].sums_whole || e->plan->sum_in_place[f->unit])
        return e->reduce_base + zr_sum_offset(e, last, f);
    return zr_sum_at(e, f, 0);
}

/* Updates some elements of a flat. */
static int update_elems(struct updating *up, const struct zr_flat *f, int64_t first, int64_t n)
{
    ZR_TRY(zr_flat_ranges(up->e->layout, f, first, first + n, update_range, up));
    return put_update(up);
}

/* Updates flat number i of the unit. If its masters and states are in a file, it updates one part after the
 * other, and reads the next one meanwhile. */
static int update_flat(struct updating *up, int32_t i)
{
    struct zr_engine *e = up->e;
    int32_t n, unit = up->job->action.unit, flat = i;
    const struct zr_flat *f = zr_unit_flats(e, unit, &n) + i;
    struct zr_span kept = zr_engine_kept(e, f);
    struct zr_state_part part, next;
    int64_t k = 0;
    if (!e->i.parts || !zr_next_part(e, unit, &flat, &k, &part) || flat != i)
        return update_elems(up, f, kept.first, kept.n);
    for (bool more = true; more; part = next) {
        ZR_TRY(zr_part_begin(e, &part));
        k++;
        more = zr_next_part(e, unit, &flat, &k, &next);
        ZR_TRY(more ? zr_part_read_ahead(e, &next) : zr_parts_read_ahead(e, up->job->next));
        ZR_TRY(update_elems(up, f, part.first, part.n));
        ZR_TRY(zr_part_end(e));
        more &= flat == i;
    }
    return 0;
}

/* If every rank of an axis updates everything, each first gathers the whole reduced gradient of the unit. */
int zr_issue_update(struct zr_engine *e, const struct zr_job *job)
{
    int32_t n, unit = job->action.unit;
    const struct zr_flat *f = zr_unit_flats(e, unit, &n);
    const struct zr_axis_reduction last = zr_last_reduction(e);
    bool in_place = e->plan->sum_in_place[unit];
    bool gathered = !zr_sums_gathered_early(e, &last, unit) && e->plan->hop[last.axis].sums_whole;
    if (gathered) /* a collective, which does not count as time of the update */
        ZR_TRY(zr_gather_sums(e, &last, e->reduce_stream, job));
    ZR_TRY(zr_timeline_mark(e->timeline, e->reduce_stream, ZR_TRACK_REDUCE, ZR_SPAN_UPDATE, unit, job->step,
                            false));
    const char *full = e->reduce_base + e->plan->full_grad_at;
    for (int32_t i = 0; i < n; i++) {
        if (!f[i].trainable)
            continue;
        struct zr_span kept = zr_engine_kept(e, &f[i]);
        struct updating up = {.e = e,
                              .job = job,
                              .first_kept = kept.first,
                              .grad = update_grad(e, &last, &f[i], gathered ? full : NULL)};
        ZR_TRY(update_flat(&up, i));
        full += zr_whole_sum_bytes(&last, &f[i]);
    }
    ZR_TRY(zr_timeline_mark(e->timeline, e->reduce_stream, ZR_TRACK_REDUCE, ZR_SPAN_UPDATE, unit, job->step,
                            true));
    if (in_place)
        ZR_TRY(
            e->dev->ops->event_record(e->ev.grad_free[zr_grad_index(e->plan, unit, -1)], e->reduce_stream));
    return e->dev->ops->event_record(e->ev.updated[unit], e->reduce_stream);
}
