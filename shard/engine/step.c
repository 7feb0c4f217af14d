/* SPDX-License-Identifier: Apache-2.0 */
/* step.c: the step on the model's thread, and what may come before it: zero_norm or zero_drop. */
#include "shard/engine/internal.h"
#include "shard/engine/issue.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

int zr_engine_wait(struct zr_engine *e, struct zr_event *event)
{
    const struct zr_device_ops *d = e->dev->ops;
    const struct timespec nap = {.tv_nsec = 20000};
    int done = d->host_memory;
    for (int n = 0; !done; n++) {
        done = d->event_query(event);
        if (done < 0)
            return zr_engine_fail(e, done, zr_error_text());
        int err = done ? 0 : zr_engine_status(e);
        if (err)
            return err;
        if (!done && n > 1000)
            nanosleep(&nap, NULL);
    }
    int err = d->event_sync(event);
    return err ? zr_engine_fail(e, err, zr_error_text()) : zr_engine_status(e);
}

/* Makes the communicator find the first calls that differ, if it can, within a time limit. */
static int compare_calls(struct zr_engine *e, const char *text)
{
    const struct timespec nap = {.tv_nsec = 20000};
    struct zr_comm *all = zr_widest_comm(e);
    if (!all->ops->compare)
        return zr_engine_fail(e, ZERO_ERR_MISMATCH, text);
    all->ops->compare(all, ZERO_ERR_MISMATCH, text);
    while (!zr_engine_status(e))
        nanosleep(&nap, NULL);
    return ZERO_ERR_MISMATCH;
}

/* Reports that ranks gave different values, which all ranks have found. The device left the weights alone on
 * every rank. */
static int disagreement(struct zr_engine *e, const struct zr_agreed *a)
{
    uint32_t step = zr_last_step_number(e) + e->m.norming;
    char text[256];
    if (a->differs & ZR_AGREE_INCOMPLETE) { /* usually the reason that ended the collective is found first */
        snprintf(text, sizeof text, "step %u: the ranks could not compare their results", step);
        return zr_engine_fail(e, ZERO_ERR_FAILED, text);
    }
    if (a->differs == UINT32_C(1) << ZR_AGREE_LR) {
        snprintf(text, sizeof text,
                 "step %u: lr is %.9g on rank %d and %.9g on rank %d; every rank must give the same", step,
                 (double)a->lr[0].lr, a->lr[0].rank, (double)a->lr[1].lr, a->lr[1].rank);
        return zr_engine_fail(e, ZERO_ERR_MISMATCH, text);
    }
    snprintf(
        text, sizeof text,
        "step %u: not all ranks made the same calls (zero_begin, zero_end, zero_norm, zero_tune ...) since "
        "zero_wrap",
        step);
    return compare_calls(e, text);
}

/* Waits for the last norm that was issued, and reads what all ranks agreed on. */
static int look_at_result(struct zr_engine *e)
{
    zr_model_await(e, e->m.norm_job);
    ZR_TRY(zr_engine_wait(e, e->ev.step_norm));
    struct zr_access seen = {e->agreed, sizeof *e->agreed, false};
    zr_declare(e->dev, NULL, &seen, 1);
    if (!e->agreed->differs)
        return zr_observe_step(e, ZR_STEP_AGREED, NULL);
    disagreement(e, e->agreed);
    return zr_engine_check(e);
}

/* Returns the number, among the data-parallel ranks of this rank's part, of the one in the same copy of the
 * model as `rank`. Returns e->world if there is none. */
static int32_t place_like(const struct zr_engine *e, int32_t rank)
{
    const struct zr_comm *control = e->role[ZR_ROLE_CONTROL].comm;
    int32_t like = rank - rank % e->tp + e->tp_rank, place = 0;
    while (place < e->world && zr_comm_rank(control, place) != like)
        place++;
    return place;
}

/* Returns the tensor whose reduced gradient `rank` has at that float of the arena, which has the same layout
 * on all ranks. NULL: it belongs to another pipeline stage. */
static const char *tensor_at(const struct zr_engine *e, int32_t rank, int64_t at)
{
    const struct zr_layout *l = e->layout;
    int32_t place = place_like(e, rank);
    if (place == e->world)
        return NULL;
    const struct zr_where where = zr_where_of(&e->plan->place, place);
    for (int32_t i = 0; i < l->n_flats; i++) {
        const struct zr_flat *f = &l->flats[i];
        struct zr_span own = zr_flat_span(f, where, ZR_LEVEL_FINE);
        int64_t k = f->trainable ? at - zr_plan_sum(e->plan, f, where, 0) / (int64_t)sizeof(float) : -1;
        for (int32_t p = f->first_piece; k >= 0 && k < own.n && p < f->first_piece + f->n_pieces; p++)
            if (own.first + k >= l->pieces[p].first && own.first + k < l->pieces[p].first + l->pieces[p].n)
                return l->tensors[l->pieces[p].tensor].name;
    }
    return NULL;
}

/* Warns with the same text on every rank of a pipeline stage. Ranks of other stages do not know the tensor's
 * name. */
static void report_skipped(const struct zr_engine *e, const struct zr_agreed *a)
{
    int32_t rank = zr_largest_rank(a->largest);
    const char *name = tensor_at(e, rank, zr_largest_at(a->largest));
    char of[128];
    if (name)
        snprintf(of, sizeof of, "tensor %.80s", name);
    else
        snprintf(of, sizeof of, "a tensor of pipeline stage %d", rank / (e->n_all / e->pp));
    if (a->too_large)
        zr_warn(e->opt.log,
                "step %u was skipped: the gradient's norm is %.3g, and above %.3g the update overflows "
                "float; the largest part is the gradient of %s in the shard of rank %d; no rank updated its "
                "weights; see info of zero_step, and zero_get_stats for the count",
                zr_last_step_number(e), a->grad_norm, a->most_norm, of, rank);
    else
        zr_warn(e->opt.log,
                "step %u was skipped: the reduced gradient of %s is not finite in the shard of rank %d; no "
                "rank updated its weights; see info of zero_step, and zero_get_stats for the count",
                zr_last_step_number(e), of, rank);
}

/* Reads the outcome of the previous step, which is known by then. Whether it was skipped decides the number
 * of the next step. */
int zr_engine_settle(struct zr_engine *e)
{
    if (!e->m.result_due)
        return 0;
    int err = look_at_result(e);
    const struct zr_agreed *a = e->agreed;
    e->m.result_due = false;
    if (err)
        return err;
    e->m.result =
        (struct zero_step_info){.grad_norm = a->grad_norm, .clipped = a->clipped, .skipped = a->skipped};
    e->m.result.n_carried = e->m.carried.n;
    _Static_assert(sizeof e->m.result.carried == sizeof a->carried, "as many values");
    memcpy(e->m.result.carried, a->carried, (size_t)e->m.carried.n * sizeof *a->carried);
    if (a->skipped && !e->m.result_wanted && e->m.n_skipped == 0)
        report_skipped(e, a);
    e->m.t += !a->skipped;
    for (int32_t u = 0; u < e->layout->n_units; u++) {
        e->m.unit_t[u] += e->m.updating[u] && !a->skipped;
        e->m.updating[u] = false;
    }
    e->m.n_skipped += a->skipped;
    e->m.result.t = e->m.t;
    e->m.least = a->least;
    err = zr_observe_step(e, ZR_STEP_SETTLED, NULL);
    if (!err)
        return 0;
    zr_engine_fail(e, err, zr_error_text());
    return zr_engine_check(e);
}

int zr_engine_norm(struct zr_engine *e, double *norm)
{
    ZR_TRY(zr_engine_check(e));
    ZR_TRY(zr_engine_settle(e));
    *norm = e->m.norm;
    if (zr_core_complete(e->m.core) && zr_core_open_unit(e->m.core) < 0)
        return 0;
    ZR_TRY(zr_observe_step(e, ZR_STEP_CALLED, "zero_norm"));
    e->m.lr = 0;
    e->m.carried.n = 0;
    ZR_TRY(zr_engine_note(e, e->dev->ops->event_record(e->ev.step_compute, e->compute)));
    e->m.norming = true;
    struct zr_core_event ev = {.kind = ZR_EV_NORM, .unit = (int32_t)zr_tuned_digest(e, 0)};
    int err = zr_engine_call(e, &ev);
    if (!err)
        err = look_at_result(e);
    e->m.norming = false;
    if (err)
        return err;
    *norm = e->m.norm = e->agreed->grad_norm;
    return zr_observe_step(e, ZR_STEP_NORM_KNOWN, NULL);
}

int zr_engine_drop(struct zr_engine *e)
{
    ZR_TRY(zr_engine_check(e));
    ZR_TRY(zr_engine_settle(e));
    ZR_TRY(zr_engine_call(e, &(struct zr_core_event){.kind = ZR_EV_DROP, .unit = -1}));
    ZR_TRY(zr_observe_step(e, ZR_STEP_DROPPED, NULL));
    zr_tied_forget(e);
    e->m.n_dropped++;
    e->m.given.n = 0;
    return 0;
}

void zr_engine_give(struct zr_engine *e, const double *values, int32_t n)
{
    if (n)
        memcpy(e->m.given.value, values, (size_t)n * sizeof *values);
    e->m.given.n = n;
}

int zr_engine_last(struct zr_engine *e, bool *known, struct zero_step_info *result)
{
    int err = 0;
    *known = !e->m.result_due;
    if (e->m.result_due && (!e->loop || zr_loop_issued(e->loop, e->m.norm_job))) {
        int done = e->dev->ops->event_query(e->ev.step_norm);
        *known = done > 0;
        err = done < 0 ? zr_engine_fail(e, done, zr_error_text()) : 0;
    }
    e->m.result_wanted |= *known;
    if (!err && *known)
        err = zr_engine_settle(e);
    if (!err && *known)
        *result = e->m.result;
    return err;
}

static int make_step(struct zr_engine *e, float lr, struct zero_step_info *result)
{
    int32_t n;
    ZR_TRY(zr_engine_check(e));
    ZR_TRY(zr_engine_settle(e));
    struct zr_core_event ev = {.kind = ZR_EV_STEP, .unit = (int32_t)zr_tuned_digest(e, e->m.given.n)};
    ZR_TRY(zr_pointers_check(e, &ev));
    ZR_TRY(zr_observe_step(e, ZR_STEP_CALLED, "zero_step"));
    ZR_TRY(zr_core_step(e->m.core, &ev, e->m.actions, &n));
    zr_model_called(e, &ev);
    e->m.step++;
    e->m.stepping = true;
    if (e->m.renumber)
        zr_engine_renumber(e, e->m.t + 1);
    e->m.left_out = -1;
    e->m.lr = lr;
    e->m.carried = e->m.given;
    e->m.given.n = 0;
    zr_model_check_call(e->watch, "zero_step", -1, "", zr_step_number(e));
    ZR_TRY(zr_observe_step(e, ZR_STEP_BEGUN, NULL));
    zr_timeline_begin(e->timeline, ZR_TRACK_MODEL, ZR_SPAN_STEP, -1, zr_step_number(e));
    ZR_TRY(zr_engine_note(e, e->dev->ops->event_record(e->ev.step_compute, e->compute)));
    e->m.call = ev.kind;
    int err = zr_model_act(e, n);
    int reported = zr_observe_step(e, ZR_STEP_ISSUED, NULL);
    err = err ? err : reported;
    e->m.result_due = true;
    e->m.result_wanted = result != NULL;
    if (!err && result) {
        err = zr_engine_settle(e);
        *result = e->m.result;
    }
    zr_timeline_end(e->timeline, ZR_TRACK_MODEL, ZR_SPAN_STEP, -1);
    return err;
}

int zr_engine_step(struct zr_engine *e, float lr, struct zero_step_info *result)
{
    int err = make_step(e, lr, result);
    e->m.stepping = false;
    return err;
}

/* s may be NULL. */
static int drain_stream(struct zr_engine *e, struct zr_stream *s)
{
    const struct zr_device_ops *d = e->dev->ops;
    if (!s)
        return 0;
    if (d->host_memory)
        return zr_engine_note(e, d->stream_sync(s));
    ZR_TRY(zr_engine_note(e, d->event_record(e->ev.drained, s)));
    return zr_engine_wait(e, e->ev.drained);
}

void zr_engine_await_jobs(struct zr_engine *e)
{
    zr_model_await(e, e->m.n_jobs);
}

int zr_engine_drain(struct zr_engine *e)
{
    zr_engine_await_jobs(e);
    ZR_TRY(drain_stream(e, e->gather_stream));
    ZR_TRY(drain_stream(e, e->gather_outer_stream));
    ZR_TRY(drain_stream(e, e->reduce_outer_stream));
    ZR_TRY(drain_stream(e, e->reduce_stream));
    for (int pair = 0; pair < ZR_PAIR_ROLES; pair++)
        ZR_TRY(drain_stream(e, e->pair_stream[pair]));
    ZR_TRY(drain_stream(e, e->tied_stream));
    ZR_TRY(drain_stream(e, e->compute));
    /* A step that ranks did not agree on is found here at the latest. */
    ZR_TRY(zr_engine_check(e));
    return zr_engine_settle(e);
}
