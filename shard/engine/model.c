/* SPDX-License-Identifier: Apache-2.0 */
/* model.c: the model's thread: calls -> core -> the model's pointers, the compute stream, and jobs for the
 * loop. step.c has the step. */
#include "comm/flight.h"
#include "comm/fork.h"
#include "kernels/asserts.h"
#include "shard/engine/issue.h"
#include "shard/engine/mesh_axis.h"

#include <stdio.h>
#include <string.h>
#include <time.h>
#include <xxhash.h>

/* ---- actions of the model's thread ---- */

/* Waits until the job is issued, and then for the event that it records. Either wait is a span in the
 * timeline. begins: a wait for ev counts among the begins that had to wait for their unit. */
static int wait_on(struct zr_engine *e, uint64_t job, struct zr_event *ev, int32_t unit, bool begins)
{
    const struct zr_device_ops *d = e->dev->ops;
    bool span = e->timeline && e->loop && !zr_loop_issued(e->loop, job);
    if (span)
        zr_timeline_begin(e->timeline, ZR_TRACK_MODEL, ZR_SPAN_WAIT, unit, zr_step_number(e));
    int err = zr_jobs_await(e, job);
    if (!err)
        err = d->compute_on_caller ? d->event_query(ev) : d->stream_wait(e->compute, ev);
    if (d->compute_on_caller && !err) {
        int64_t from = zr_now_ns();
        if (!span)
            zr_timeline_begin(e->timeline, ZR_TRACK_MODEL, ZR_SPAN_WAIT, unit, zr_step_number(e));
        span = true;
        err = d->stream_wait(e->compute, ev);
        e->m.n_waits += begins;
        e->m.wait_ns += begins ? zr_now_ns() - from : 0;
    }
    if (span)
        zr_timeline_end(e->timeline, ZR_TRACK_MODEL, ZR_SPAN_WAIT, unit);
    return err < 0 ? err : 0;
}

int zr_model_wait_for(struct zr_engine *e, struct zr_event *ev)
{
    return wait_on(e, 0, ev, -1, false);
}

/* Returns the gradients that were being reduced to the model. Waits for the last reduction, or the last
 * update, which is behind all others on its stream. */
static int return_grads(struct zr_engine *e, int32_t last)
{
    bool updated = e->plan->sum_in_place[last];
    int32_t unit;
    int err = wait_on(e, zr_job_using_grad(e, last), e->ev.grad_free[last], last, false);
    while ((unit = zr_return_next_grad(e, updated)) >= 0)
        if (!err)
            err = zr_observe_reduce(e, unit, ZR_REDUCE_RETURNED);
    return err;
}

static int wait_param(struct zr_engine *e, const struct zr_action *a)
{
    int32_t unit = a->unit;
    struct zr_event *ev = a->gathered ? e->ev.ready[unit] : e->ev.updated[unit];
    return wait_on(e, zr_job_writing_params(e, unit), ev, unit, true);
}

/* Whether the tensor's gradient must not be zeroed first: backward stores all of it, or it starts with values
 * that another pipeline stage has sent. */
static bool needs_no_zeros(const struct zr_engine *e, int32_t tensor)
{
    return e->layout->tensors[tensor].overwrite || zr_tied_has_received(e, tensor);
}

/* keeps_overwritten: the next use is in a bracket, whose backward stores all of a gradient with
 * ZERO_GRAD_OVERWRITE. Without a bracket that is not known, and elements that it does not store would be used
 * a second time. */
static int fill_flat(struct zr_engine *e, const struct zr_flat *f, int32_t slot, bool keeps_overwritten)
{
    char *at = e->reduce_base + zr_plan_grad_full(e->plan, f, slot);
    int64_t size = zr_dtype_bytes(f->dtype), n_kept = 0;
    for (int32_t k = 0; keeps_overwritten && k < f->n_pieces; k++)
        n_kept += needs_no_zeros(e, e->layout->pieces[f->first_piece + k].tensor);
    if (n_kept == 0)
        return e->dev->ops->zero(e->compute, at, f->inner.total);
    for (int32_t k = 0; n_kept < f->n_pieces && k < f->n_pieces; k++) {
        const struct zr_piece *p = &e->layout->pieces[f->first_piece + k];
        if (needs_no_zeros(e, p->tensor))
            continue;
        int err = e->dev->ops->zero(e->compute, at + p->first * size, p->n * size);
        if (err)
            return err;
    }
    return 0;
}

/* Waits until the gradient's memory may be written again. Zeroes it if the action says so. */
static int wait_grad(struct zr_engine *e, const struct zr_action *a)
{
    int32_t index = zr_grad_index(e->plan, a->unit, a->slot);
    int err = wait_on(e, zr_job_using_grad(e, index), e->ev.grad_free[index], a->unit, false);
    const struct zr_unit *u = &e->layout->units[a->unit];
    for (int32_t i = 0; !err && a->fill && i < u->n_flats; i++) {
        const struct zr_flat *f = &e->layout->flats[u->first_flat + i];
        if (f->trainable)
            err = fill_flat(e, f, a->slot, a->keeps_overwritten);
    }
    return err;
}

static struct zr_grant grant_of(const struct zr_action *a, enum zr_grant_kind kind)
{
    return (struct zr_grant){.kind = kind,
                             .ready = true,
                             .unit = a->unit,
                             .slot = a->slot,
                             .bracket = a->bracket,
                             .fill = a->fill,
                             .in_flight = a->in_flight};
}

static int wait_again(struct zr_engine *e, const struct zr_action *a)
{
    const struct zr_grant g = grant_of(a, ZR_GRANT_PARAM);
    int err = wait_param(e, a);
    return err ? err : zr_observe_begin(e, &g);
}

static int use_param(struct zr_engine *e, const struct zr_action *a)
{
    int err = wait_again(e, a);
    if (!e->plan->placement.model_holds)
        zr_show_params(e, a->unit, a->slot);
    return err;
}

static int keep_param(struct zr_engine *e, const struct zr_action *a)
{
    const struct zr_grant g = grant_of(a, ZR_GRANT_PARAM);
    int err = wait_param(e, a);
    if (!err)
        err = zr_all_keep(e, a->unit, a->slot);
    if (!err && e->plan->placement.model_holds)
        err = zr_observe_begin(e, &g);
    return err || a->slot < 0 ? err : e->dev->ops->event_record(e->ev.param_free[a->slot], e->compute);
}

static int end_param(struct zr_engine *e, const struct zr_action *a)
{
    const struct zr_grant g = grant_of(a, ZR_GRANT_PARAM);
    ZR_TRY(zr_observe_end(e, &g));
    if (!e->plan->placement.model_holds)
        zr_hide_params(e, a->unit);
    return a->slot >= 0 ? e->dev->ops->event_record(e->ev.param_free[a->slot], e->compute) : 0;
}

/* Makes the gradient ready for the model. */
static int prepare_grad(struct zr_engine *e, const struct zr_action *a)
{
    struct zr_grant g = grant_of(a, ZR_GRANT_GRAD);
    g.ready = false;
    ZR_TRY(zr_observe_begin(e, &g));
    ZR_TRY(wait_grad(e, a));
    if (a->bracket)
        ZR_TRY(zr_tied_fill(e, a->unit, a->slot));
    g.ready = true;
    return zr_observe_begin(e, &g);
}

static int begin_grad(struct zr_engine *e, const struct zr_action *a)
{
    int err = prepare_grad(e, a);
    if (!e->plan->placement.model_holds)
        zr_show_grads(e, a->unit, a->slot);
    else if (a->bracket)
        zr_open_grads(e, a->unit);
    return err;
}

static int end_grad(struct zr_engine *e, const struct zr_action *a)
{
    const struct zr_grant g = grant_of(a, ZR_GRANT_GRAD);
    ZR_TRY(zr_observe_end(e, &g));
    if (!e->plan->placement.model_holds)
        zr_hide_grads(e, a->unit);
    else if (a->bracket)
        zr_close_grads(e, a->unit, a->in_flight);
    return e->dev->ops->event_record(e->ev.grad_done[zr_grad_index(e->plan, a->unit, a->slot)], e->compute);
}

/* Sums the unit's partial gradients over tp, and then queues the reduction over the data-parallel ranks. This
 * place comes before every REDUCE, whatever has completed the gradient: a bracket, a micro-batch or the
 * step. */
static int reduce_grad(struct zr_engine *e, const struct zr_action *a)
{
    bool any;
    ZR_TRY(zr_tp_sum_grads(e, a->unit, a->slot, &any));
    if (any) {
        ZR_TRY(zr_observe_reduce(e, a->unit, ZR_REDUCE_SUMMED));
        ZR_TRY(
            e->dev->ops->event_record(e->ev.grad_done[zr_grad_index(e->plan, a->unit, a->slot)], e->compute));
    }
    zr_jobs_push(e, a);
    return 0;
}

static int act(struct zr_engine *e, const struct zr_action *a)
{
    switch ((enum zr_action_kind)a->kind) {
    case ZR_ACT_USE_PARAM:
        return use_param(e, a);
    case ZR_ACT_WAIT_PARAM:
        return wait_again(e, a);
    case ZR_ACT_KEEP_PARAM:
        return keep_param(e, a);
    case ZR_ACT_HIDE_PARAM:
        return end_param(e, a);
    case ZR_ACT_USE_GRAD:
        return begin_grad(e, a);
    case ZR_ACT_HIDE_GRAD:
        return end_grad(e, a);
    case ZR_ACT_RETURN_GRADS:
        return return_grads(e, a->unit);
    case ZR_ACT_REDUCE:
        return reduce_grad(e, a);
    default:
        zr_jobs_push(e, a);
        return 0;
    }
}

int zr_model_act(struct zr_engine *e, int32_t n)
{
    int err = 0;
    e->m.n_actions = n;
    for (int32_t i = 0; i < n; i++) {
        int one = act(e, &e->m.actions[i]);
        if (one && !err)
            err = zr_engine_fail(e, one, zr_error_text());
    }
    zr_jobs_kick(e);
    return err ? err : zr_engine_check(e);
}

/* The program's call that gives the core an event of the kind. */
static enum zr_call_name call_of(enum zr_core_event_kind kind)
{
    static const enum zr_call_name call[] = {[ZR_EV_BEGIN] = ZR_CALL_BEGIN,
                                             [ZR_EV_END] = ZR_CALL_END,
                                             [ZR_EV_MICRO] = ZR_CALL_MICRO,
                                             [ZR_EV_STEP] = ZR_CALL_STEP,
                                             [ZR_EV_REWRITE] = ZR_CALL_WRITE,
                                             [ZR_EV_SNAPSHOT] = ZR_CALL_SAVE,
                                             [ZR_EV_NORM] = ZR_CALL_NORM,
                                             [ZR_EV_DROP] = ZR_CALL_DROP,
                                             [ZR_EV_GATHER_ALL] = ZR_CALL_GATHER_ALL,
                                             [ZR_EV_RELEASE_ALL] = ZR_CALL_RELEASE_ALL,
                                             [ZR_EV_EVALUATED] = ZR_CALL_NEXT};
    return call[kind];
}

const char *zr_model_call_name(enum zr_core_event_kind kind)
{
    return zr_call_function(call_of(kind));
}

/* Whether the call is about units, tensors or actions, which differ between pipeline stages. */
static bool is_of_stage(enum zr_call_name name)
{
    return name == ZR_CALL_BEGIN || name == ZR_CALL_END || name == ZR_CALL_READ || name == ZR_CALL_WRITE ||
           name == ZR_CALL_NEXT || name == ZR_CALL_FINISH;
}

/* Records the call for each communicator whose ranks all make it, in the same order. Pipeline stages may make
 * different calls. */
static void report_called(struct zr_engine *e, const struct zr_logged_call *call)
{
    if (e->tp > 1)
        zr_flight_called(e->flight, ZR_ROLE_TP, call);
    if (e->role[ZR_ROLE_CP].comm)
        zr_flight_called(e->flight, ZR_ROLE_CP, call);
    zr_flight_called(e->flight, ZR_ROLE_CONTROL, call);
    if (zr_widest_role(e) == ZR_ROLE_WORLD &&
        (e->pp == 1 || !(is_of_stage(call->name) || zr_call_log_is_for_step(call->name))))
        zr_flight_called(e->flight, ZR_ROLE_WORLD, call);
}

/* Data-parallel ranks may have activations of different sizes, so only the axis's ranks record the call. */
void zr_engine_axis_called(struct zr_engine *e, enum zero_axis axis, uint64_t args)
{
    struct zr_mesh_axis *a = zr_axis_of(e, axis);
    struct zr_logged_call call = zr_flight_entered(e->flight);
    call.args = args;
    a->calls = XXH3_64bits_withSeed(&args, sizeof args, a->calls);
    zr_flight_called(e->flight, a->role, &call);
}

void zr_engine_called(struct zr_engine *e, uint64_t args)
{
    struct zr_logged_call call = zr_flight_entered(e->flight);
    ZR_ASSERT(!e->flight || call.name);
    call.args = args;
    report_called(e, &call);
}

/* Only the first action of a pass is reported, because pipeline stages differ in the later ones. */
void zr_engine_begins_pass(struct zr_engine *e, bool evaluates)
{
    const int64_t words[] = {ZR_CALL_NEXT, evaluates};
    if (e->pp == 1)
        return;
    e->m.world_calls = XXH3_64bits_withSeed(words, sizeof words, e->m.world_calls);
    zr_flight_called(
        e->flight, zr_widest_role(e),
        &(struct zr_logged_call){.name = ZR_CALL_NEXT, .subject = -1, .step = zr_step_number(e)});
}

/* A forked child shares the recorder, but must not use the engine. */
void zr_engine_enter(struct zr_engine *e, enum zr_call_name name, enum zero_phase phase, int32_t subject)
{
    if (e->flight && e->forks == zr_fork_depth())
        zr_flight_enter(e->flight,
                        &(struct zr_logged_call){
                            .name = name, .phase = phase, .subject = subject, .step = zr_step_number(e)});
}

void zr_engine_leave(struct zr_engine *e)
{
    if (!e->flight || e->forks != zr_fork_depth())
        return;
    /* save it before the program can exit; the current call is the one that failed */
    if (zr_engine_has_failed(e))
        zr_engine_save_flight(e);
    zr_flight_leave(e->flight);
}

void zr_model_called(struct zr_engine *e, const struct zr_core_event *ev)
{
    bool bracket = ev->kind <= ZR_EV_END;
    const int64_t words[] = {ev->kind, ev->unit};
    uint64_t args = ev->kind == ZR_EV_STEP ? (uint32_t)ev->unit : 0; /* zr_tuned_digest */
    if (!bracket && ev->kind != ZR_EV_REWRITE) /* other pipeline stages do not have these units and tensors */
        e->m.world_calls = XXH3_64bits_withSeed(words, sizeof words, e->m.world_calls);
    bool reports_itself = ev->kind == ZR_EV_REWRITE || ev->kind == ZR_EV_SNAPSHOT ||
                          ev->kind == ZR_EV_GATHER_ALL || ev->kind == ZR_EV_EVALUATED;
    if (!reports_itself)
        report_called(e, &(struct zr_logged_call){.name = call_of(ev->kind),
                                                  .phase = ev->phase,
                                                  .subject = bracket ? ev->unit : -1,
                                                  .step = zr_step_number(e),
                                                  .args = args});
}

int zr_engine_call(struct zr_engine *e, const struct zr_core_event *ev)
{
    int32_t n, err = zr_engine_check(e);
    if (err)
        return err;
    err = zr_pointers_check(e, ev);
    if (!err)
        err = zr_core_take(e->m.core, ev, e->m.actions, &n);
    if (err)
        return err;
    zr_model_called(e, ev);
    if (ev->kind == ZR_EV_END && zr_phase_has_grads(ev->phase))
        zr_tied_bracketed(e, ev->unit);
    zr_observe_call(e, zr_model_call_name(ev->kind), ev->kind <= ZR_EV_END ? ev->unit : -1,
                    zr_phase_name(ev->phase), zr_step_number(e));
    enum zr_span_kind span = zr_phase_is_backward(ev->phase) ? ZR_SPAN_BACKWARD : ZR_SPAN_FORWARD;
    if (ev->kind == ZR_EV_END)
        zr_timeline_end(e->timeline, ZR_TRACK_MODEL, span, ev->unit);
    err = zr_model_act(e, n);
    if (ev->kind == ZR_EV_BEGIN)
        zr_timeline_begin(e->timeline, ZR_TRACK_MODEL, span, ev->unit, zr_step_number(e));
    return err;
}
