/* engine_model.c: the model's hand: calls -> core -> the model's pointers, the compute stream, and jobs for
 * the loop. The step is engine_step.c's. */
#include "shard/engine/engine.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

/* ---- pointers ---- */

static int64_t slice_bytes(const struct zr_tensor *t)
{
    return t->n_elems / t->n_slices * zr_dtype_bytes(t->dtype);
}

/* Where the model's pointer for this piece must stand so that base + slice*stride is the piece. Biased
 * pointers may lie outside any object, so the arithmetic is on integers. */
static void *biased(const struct zr_tensor *t, const struct zr_piece *p, const char *at)
{
    return (void *)((uintptr_t)at - (uintptr_t)(p->slice * slice_bytes(t)));
}

static void *param_pointer(const struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p,
                           int32_t slot)
{
    const char *guarded = e->watch ? zr_model_check_param(e->watch, p) : NULL;
    const char *at =
        e->gather_base + zr_plan_param_full(e->plan, f, slot) + p->first * zr_dtype_bytes(f->dtype);
    at = guarded ? guarded : at;
    return biased(&e->layout->tensors[p->tensor], p, at);
}

static void *grad_pointer(const struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p,
                          int32_t slot)
{
    const char *guarded = e->watch ? zr_model_check_grad(e->watch, p) : NULL;
    const char *at =
        e->reduce_base + zr_plan_grad_full(e->plan, f, slot) + p->first * zr_dtype_bytes(f->dtype);
    at = guarded ? guarded : at;
    return biased(&e->layout->tensors[p->tensor], p, at);
}

typedef void (*piece_fn)(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p,
                         int32_t slot);

static void for_pieces(struct zr_engine *e, int32_t unit, int32_t slot, piece_fn fn)
{
    const struct zr_unit *u = &e->layout->units[unit];
    for (int32_t i = 0; i < u->n_flats; i++) {
        const struct zr_flat *f = &e->layout->flats[u->first_flat + i];
        for (int32_t k = 0; k < f->n_pieces; k++)
            fn(e, f, &e->layout->pieces[f->first_piece + k], slot);
    }
}

static void show_param(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p, int32_t slot)
{
    e->n_shown_param[p->tensor] += !e->param_shown[f->unit];
    zr_point_param(e, p->tensor, param_pointer(e, f, p, slot));
}

static void show_grad(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p, int32_t slot)
{
    if (!f->trainable)
        return;
    e->n_shown_grad[p->tensor] += !e->grad_shown[f->unit];
    zr_point_grad(e, p->tensor, grad_pointer(e, f, p, slot));
}

/* A stacked tensor's pointer goes back to a slice of it that is still open (brackets nest), else to NULL. */
static int32_t other_slice(const struct zr_engine *e, int32_t tensor, const bool *shown, int32_t n_shown)
{
    const struct zr_tensor *t = &e->layout->tensors[tensor];
    for (int32_t s = 0; n_shown && s < t->n_slices; s++)
        if (shown[t->unit + s])
            return s;
    return -1;
}

static void hide_param(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p, int32_t slot)
{
    (void)f;
    (void)slot;
    int32_t other = other_slice(e, p->tensor, e->param_shown, --e->n_shown_param[p->tensor]);
    void *pointer = zr_model_check_closed(e->watch, p->tensor, false);
    if (other >= 0) {
        int32_t id = e->layout->piece_of[e->layout->slice_base[p->tensor] + other];
        const struct zr_flat *g = zr_piece_flat(e->layout, id);
        pointer = param_pointer(e, g, &e->layout->pieces[id], e->param_slot[g->unit]);
    }
    zr_point_param(e, p->tensor, pointer);
}

static void hide_grad(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p, int32_t slot)
{
    (void)slot;
    if (!f->trainable)
        return;
    int32_t other = other_slice(e, p->tensor, e->grad_shown, --e->n_shown_grad[p->tensor]);
    void *pointer = zr_model_check_closed(e->watch, p->tensor, true);
    if (other >= 0) {
        int32_t id = e->layout->piece_of[e->layout->slice_base[p->tensor] + other];
        const struct zr_flat *g = zr_piece_flat(e->layout, id);
        pointer = grad_pointer(e, g, &e->layout->pieces[id], e->grad_slot[g->unit]);
    }
    zr_point_grad(e, p->tensor, pointer);
}

static void point_for_good(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p,
                           int32_t slot)
{
    if (p->slice)
        return; /* slice 0 gives the base of all */
    zr_point_param(e, p->tensor, param_pointer(e, f, p, slot));
    if (f->trainable)
        zr_point_grad(e, p->tensor, grad_pointer(e, f, p, slot));
}

void zr_engine_point(struct zr_engine *e, bool values)
{
    for (int32_t t = 0; t < e->layout->n_tensors; t++) {
        if (e->layout->tensors[t].buffer)
            continue;
        zr_point_param(e, t, zr_model_check_closed(e->watch, t, false));
        if (e->layout->tensors[t].grad)
            zr_point_grad(e, t, zr_model_check_closed(e->watch, t, true));
    }
    for (int32_t u = 0; values && e->plan->place.model_holds && u < e->layout->n_units; u++)
        for_pieces(e, u, -1, point_for_good);
    for (int32_t t = 0; t < e->layout->n_tensors; t++)
        e->lending[t].n_unbracketed = (int32_t)e->layout->tensors[t].n_slices;
}

/* ---- jobs ---- */

/* The job after which the gradient place may be written again: of one that is summed in place, when it is
 * used. */
static bool uses_grad(const struct zr_engine *e, const struct zr_action *a)
{
    if (a->unit < 0)
        return false;
    return e->plan->sum_in_place[a->unit] ? a->kind == ZR_ACT_UPDATE || a->kind == ZR_ACT_SET_ASIDE
                                          : a->kind == ZR_ACT_REDUCE;
}

static void push(struct zr_engine *e, const struct zr_action *a)
{
    struct zr_job job = {.action = *a,
                         .call_hash = zr_core_hash(e->core),
                         .step = e->step + e->norming,
                         .lr = e->lr,
                         .t = e->t + 1};
    e->n_jobs++;
    if (a->kind == ZR_ACT_NORM || a->kind == ZR_ACT_UPDATE) {
        job.tuned = &e->tuned[e->tuned_now];
        e->tuned[e->tuned_now].last_job = e->n_jobs;
    }
    if (a->kind == ZR_ACT_GATHER || a->kind == ZR_ACT_UPDATE)
        e->unit_job[a->unit] = e->n_jobs;
    if (a->kind == ZR_ACT_NORM)
        e->norm_job = e->n_jobs;
    if (uses_grad(e, a))
        e->grad_job[zr_grad_place(e->plan, a->unit, a->slot)] = e->n_jobs;
    if (!e->loop) {
        zr_engine_issue(e, &job);
        return;
    }
    if (e->watch)
        job.known = zr_model_check_hand(e->watch);
    zr_loop_push(e->loop, &job);
    e->unkicked = true;
}

static void kick(struct zr_engine *e)
{
    if (e->unkicked)
        zr_loop_kick(e->loop);
    e->unkicked = false;
}

/* Until the job was issued its events are not recorded, and waiting for them would not wait. */
void zr_model_await(struct zr_engine *e, uint64_t job)
{
    if (!e->loop || !job)
        return;
    kick(e);
    zr_loop_await(e->loop, job);
}

/* ---- gradients in place, at stages 0 and 1 ---- */

/* The pointer follows what was counted. */
static void lend(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p)
{
    const struct zr_lending *l = &e->lending[p->tensor];
    bool away = l->n_in_flight && !l->n_open && !l->n_unbracketed;
    zr_point_grad(e, p->tensor,
                  away ? zr_model_check_closed(e->watch, p->tensor, true) : grad_pointer(e, f, p, -1));
}

static void lend_open(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p, int32_t slot)
{
    (void)slot;
    if (!f->trainable)
        return;
    struct zr_lending *l = &e->lending[p->tensor];
    l->n_open++;
    l->n_in_flight -= e->in_flight[f->unit];
    l->n_unbracketed -= !e->bracketed[f->unit];
    lend(e, f, p);
}

static void lend_close(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p, int32_t slot)
{
    (void)slot;
    if (!f->trainable)
        return;
    e->lending[p->tensor].n_open--;
    e->lending[p->tensor].n_in_flight += e->in_flight[f->unit];
    lend(e, f, p);
}

static void lend_again(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p, int32_t slot)
{
    (void)slot;
    if (!f->trainable)
        return;
    e->lending[p->tensor].n_in_flight--;
    lend(e, f, p);
}

/* The unit's backward bracket opens. */
static void lend_unit(struct zr_engine *e, int32_t unit)
{
    for_pieces(e, unit, -1, lend_open);
    for (int32_t i = 0; e->in_flight[unit] && i < e->n_flying; i++)
        if (e->flying[i] == unit)
            e->flying[i] = e->flying[--e->n_flying];
    e->in_flight[unit] = false;
    e->bracketed[unit] = true;
}

/* It closes. */
static void take_unit(struct zr_engine *e, int32_t unit, bool in_flight)
{
    e->in_flight[unit] = in_flight;
    if (in_flight)
        e->flying[e->n_flying++] = unit;
    for_pieces(e, unit, -1, lend_close);
}

/* Waits for the last reduction, or update, which is behind all others on its stream. */
static int return_grads(struct zr_engine *e, int32_t last)
{
    bool all = e->plan->sum_in_place[last];
    zr_model_await(e, e->grad_job[last]);
    int err = e->dev->ops->stream_wait(e->compute, e->grad_free[last]);
    for (int32_t i = e->n_flying; i-- > 0;) {
        int32_t unit = e->flying[i];
        if (!all && e->plan->sum_in_place[unit])
            continue;
        e->flying[i] = e->flying[--e->n_flying];
        for_pieces(e, unit, -1, lend_again);
        e->in_flight[unit] = false;
        if (!err && e->watch)
            err = zr_model_check_hand_out(e, unit, -1, true);
    }
    return err;
}

/* ---- actions of the model's thread ---- */

static int wait_param(struct zr_engine *e, int32_t unit)
{
    const struct zr_device_ops *d = e->dev->ops;
    bool gathered =
        !e->plan->resident[unit] || (e->plan->spec.gathers_updated && e->layout->units[unit].trainable);
    zr_model_await(e, e->unit_job[unit]);
    struct zr_event *ev = gathered ? e->ready[unit] : e->updated[unit];
    if (!d->compute_on_caller)
        return d->stream_wait(e->compute, ev);
    int done = d->event_query(ev);
    if (done)
        return done < 0 ? done : 0;
    int64_t from = zr_now_ns();
    zr_timeline_begin(e->timeline, ZR_TRACK_MODEL, ZR_SPAN_WAIT, unit, e->step);
    int err = d->stream_wait(e->compute, ev);
    zr_timeline_end(e->timeline, ZR_TRACK_MODEL, ZR_SPAN_WAIT, unit);
    e->n_waits++;
    e->wait_ns += zr_now_ns() - from;
    return err;
}

/* bracket: backward is about to store what is overwritten. Without one nobody knows whether it will, and what
 * it does not store would be used a second time. */
static int fill_flat(struct zr_engine *e, const struct zr_flat *f, int32_t slot, bool bracket)
{
    char *at = e->reduce_base + zr_plan_grad_full(e->plan, f, slot);
    int64_t size = zr_dtype_bytes(f->dtype), n_overwrite = 0;
    for (int32_t k = 0; bracket && k < f->n_pieces; k++)
        n_overwrite += e->layout->tensors[e->layout->pieces[f->first_piece + k].tensor].overwrite;
    if (n_overwrite == 0)
        return e->dev->ops->zero(e->compute, at, f->total_bytes);
    for (int32_t k = 0; n_overwrite < f->n_pieces && k < f->n_pieces; k++) {
        const struct zr_piece *p = &e->layout->pieces[f->first_piece + k];
        if (e->layout->tensors[p->tensor].overwrite)
            continue;
        int err = e->dev->ops->zero(e->compute, at + p->first * size, p->n * size);
        if (err)
            return err;
    }
    return 0;
}

static int use_grad(struct zr_engine *e, const struct zr_action *a)
{
    int32_t place = zr_grad_place(e->plan, a->unit, a->slot);
    zr_model_await(e, e->grad_job[place]);
    int err = e->dev->ops->stream_wait(e->compute, e->grad_free[place]);
    const struct zr_unit *u = &e->layout->units[a->unit];
    for (int32_t i = 0; !err && a->fill && i < u->n_flats; i++) {
        const struct zr_flat *f = &e->layout->flats[u->first_flat + i];
        if (f->trainable)
            err = fill_flat(e, f, a->slot, a->bracket);
    }
    return err;
}

static int act(struct zr_engine *e, const struct zr_action *a)
{
    const struct zr_device_ops *d = e->dev->ops;
    bool repoint = !e->plan->place.model_holds;
    int err = 0;
    switch ((enum zr_action_kind)a->kind) {
    case ZR_ACT_USE_PARAM:
        err = wait_param(e, a->unit);
        if (!err && e->watch)
            err = zr_model_check_hand_out(e, a->unit, a->slot, false);
        if (repoint) {
            for_pieces(e, a->unit, a->slot, show_param);
            e->param_shown[a->unit] = true;
            e->param_slot[a->unit] = a->slot;
        }
        return err;
    case ZR_ACT_WAIT_PARAM:
        err = wait_param(e, a->unit);
        return err || !e->watch ? err : zr_model_check_hand_out(e, a->unit, a->slot, false);
    case ZR_ACT_KEEP_PARAM:
        err = wait_param(e, a->unit);
        if (!err)
            err = zr_all_keep(e, a->unit, a->slot);
        if (!err && e->watch && !repoint)
            err = zr_model_check_hand_out(e, a->unit, a->slot, false);
        return err || a->slot < 0 ? err : d->event_record(e->param_free[a->slot], e->compute);
    case ZR_ACT_HIDE_PARAM:
        err = e->watch ? zr_model_check_take_back(e, a->unit, a->slot, false) : 0;
        if (err)
            return err;
        if (repoint) {
            e->param_shown[a->unit] = false;
            for_pieces(e, a->unit, a->slot, hide_param);
        }
        return a->slot >= 0 ? d->event_record(e->param_free[a->slot], e->compute) : 0;
    case ZR_ACT_USE_GRAD:
        err = use_grad(e, a);
        if (!err && a->bracket)
            zr_stored_begin(e, a->unit, a->slot, a->fill);
        if (!err && e->watch)
            err = zr_model_check_hand_out(e, a->unit, a->slot, true);
        if (repoint) {
            for_pieces(e, a->unit, a->slot, show_grad);
            e->grad_shown[a->unit] = true;
            e->grad_slot[a->unit] = a->slot;
        } else if (a->bracket) {
            if (!err)
                err = zr_in_place_begin(e, a->unit, a->fill);
            lend_unit(e, a->unit);
        }
        return err;
    case ZR_ACT_HIDE_GRAD:
        err = e->watch ? zr_model_check_take_back(e, a->unit, a->slot, true) : 0;
        if (!err)
            err = zr_stored_end(e, a->unit, a->slot, a->bracket);
        if (err)
            return err;
        if (e->written)
            for_pieces(e, a->unit, a->slot, zr_written_look);
        if (repoint) {
            e->grad_shown[a->unit] = false;
            for_pieces(e, a->unit, a->slot, hide_grad);
        } else if (a->bracket) {
            take_unit(e, a->unit, a->in_flight);
            zr_in_place_end(e, a->unit, a->in_flight);
        }
        return d->event_record(e->grad_done[zr_grad_place(e->plan, a->unit, a->slot)], e->compute);
    case ZR_ACT_RETURN_GRADS:
        return return_grads(e, a->unit);
    case ZR_ACT_SET_ASIDE:
        err = zr_aside_make(e, a->unit);
        if (!err)
            push(e, a);
        return err;
    case ZR_ACT_DROP_SUMS:
        push(e, a);
        for (int32_t u = 0; u < e->layout->n_units; u++)
            if (e->plan->sum_in_place[u])
                e->grad_job[zr_grad_place(e->plan, u, -1)] = e->n_jobs;
        return 0;
    default:
        push(e, a);
        return 0;
    }
}

int zr_model_act(struct zr_engine *e, int32_t n)
{
    int err = 0;
    for (int32_t i = 0; i < n; i++) {
        int one = act(e, &e->actions[i]);
        if (one && !err)
            err = zr_engine_fail(e, one, zr_error_text());
    }
    kick(e);
    return err ? err : zr_engine_check(e);
}

static const char *call_name(enum zr_core_event_kind kind)
{
    static const char *const name[] = {[ZR_EV_BEGIN] = "zero_begin",
                                       [ZR_EV_END] = "zero_end",
                                       [ZR_EV_MICRO] = "zero_micro",
                                       [ZR_EV_STEP] = "zero_step",
                                       [ZR_EV_REWRITE] = "zero_write",
                                       [ZR_EV_SNAPSHOT] = "zero_save",
                                       [ZR_EV_NORM] = "zero_norm",
                                       [ZR_EV_DROP] = "zero_drop",
                                       [ZR_EV_GATHER_ALL] = "zero_gather_all",
                                       [ZR_EV_RELEASE_ALL] = "zero_release_all"};
    return name[kind];
}

static void report_called(struct zr_engine *e, const struct zr_called *call)
{
    if (e->reduce->ops->called)
        e->reduce->ops->called(e->reduce, call);
}

void zr_engine_called(struct zr_engine *e, enum zr_called_name name, int32_t subject, uint64_t args)
{
    report_called(e,
                  &(struct zr_called){.name = name, .subject = subject, .step = e->step + 1, .args = args});
}

/* zero_write and zero_save say so themselves. */
void zr_model_called(struct zr_engine *e, const struct zr_core_event *ev)
{
    static const enum zr_called_name name[] = {[ZR_EV_BEGIN] = ZR_CALLED_BEGIN,
                                               [ZR_EV_END] = ZR_CALLED_END,
                                               [ZR_EV_MICRO] = ZR_CALLED_MICRO,
                                               [ZR_EV_STEP] = ZR_CALLED_STEP,
                                               [ZR_EV_NORM] = ZR_CALLED_NORM,
                                               [ZR_EV_DROP] = ZR_CALLED_DROP,
                                               [ZR_EV_RELEASE_ALL] = ZR_CALLED_RELEASE_ALL};
    bool bracket = ev->kind <= ZR_EV_END;
    if (ev->kind < sizeof name / sizeof *name && name[ev->kind])
        report_called(e, &(struct zr_called){.name = name[ev->kind],
                                             .backward = bracket && ev->backward,
                                             .subject = bracket ? ev->unit : -1,
                                             .step = e->step + 1});
}

int zr_engine_call(struct zr_engine *e, const struct zr_core_event *ev)
{
    int32_t n, err = zr_engine_check(e);
    if (err)
        return err;
    err = zr_pointers_check(e, ev);
    if (!err)
        err = zr_core_step(e->core, ev, e->actions, &n);
    if (err)
        return err;
    zr_model_called(e, ev);
    if (e->watch)
        zr_model_check_call(e->watch, call_name(ev->kind), ev->kind <= ZR_EV_END ? ev->unit : -1,
                            ev->backward ? "backward" : "forward", e->step);
    enum zr_span_kind span = ev->backward ? ZR_SPAN_BACKWARD : ZR_SPAN_FORWARD;
    if (ev->kind == ZR_EV_END)
        zr_timeline_end(e->timeline, ZR_TRACK_MODEL, span, ev->unit);
    err = zr_model_act(e, n);
    if (ev->kind == ZR_EV_BEGIN)
        zr_timeline_begin(e->timeline, ZR_TRACK_MODEL, span, ev->unit, e->step);
    return err;
}
