/* SPDX-License-Identifier: Apache-2.0 */
/* model_check.c: checks what a model does with its memory (cfg.debug.check).
 *
 * The recorder (kernels/check/check_device.h) gets what the model may read and write, as operations of the
 * model. At stages 2 and 3 on the host, the model gets copies of its parameters and gradients in guarded
 * memory (kernels/check/guard.h), in each bracket at another address. That memory is closed outside brackets.
 * So a touch outside, a write to a parameter and a pointer kept from an earlier bracket are found. On a GPU,
 * whose memory cannot be closed, the copies are filled with NaN instead (bracket_copies.h). At stages 0 and 1
 * the model has its memory without brackets too, so nothing is guarded there.
 *
 * A fault ends the context with ZERO_ERR_ORDER and a message that names unit and tensor. The next call of the
 * program finds it. */
#include "kernels/alloc.h"
#include "kernels/check/check_device.h"
#include "kernels/check/guard.h"
#include "shard/engine/check/bracket_copies.h"
#include "shard/engine/check/observers.h"
#include "shard/engine/internal.h"
#include "shard/engine/issue.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The guard has this many regions for each piece (one layer of a tensor), which its brackets take in turn.
 * The number is a prime. A model that keeps a pointer uses it again after two brackets (forward, backward) or
 * three, and not after as many as this. */
enum { TURNS = 7 };

/* What a region of the guard is for: a bracket's copy of one piece, or a whole tensor, which is closed
 * outside brackets. */
struct region {
    int32_t tensor, layer; /* layer -1: all layers */
    bool grad;
};

struct zr_model_check {
    struct zr_observer o;
    struct zr_check *check;
    const struct zr_layout *layout;
    struct zr_guard *guard; /* NULL: nothing is guarded */
    struct zr_bracket_copies
        *copies; /* the same on a GPU: copies that are filled with NaN outside brackets */
    /* by region: tensors, their gradients, TURNS for each piece's parameters, TURNS for each piece's
     * gradient */
    struct region *regions;
    bool *reported; /* (n_units) the model was given the parameters in this step */
    bool said_stopped;
    _Atomic bool said_fault;
    /* Also read by reports on the guard's thread, while the model's thread may go on. */
    pthread_mutex_t lock;
    uint8_t *turn[2]; /* (n_pieces) parameters, gradients: which of the TURNS is in use, or was used last */
    bool *open[2];    /* (n_pieces) the piece's unit has an open bracket */
    const char *call, *phase;
    int32_t unit;
    uint32_t step;              /* step of the last call */
    char touch[ZR_ERROR_BYTES]; /* message about the guard's first fault; "": none yet */
    struct zr_log *log;
};

static void say(const struct zr_model_check *w, const char *text)
{
    zr_warn(w->log, "check: %s", text);
}

/* ---- opening ---- */

static void report_touch(void *arg);

/* Returns the region of a piece that is in use, or was used last. */
static int32_t region_of(const struct zr_model_check *w, int32_t piece, bool grad)
{
    const struct zr_layout *l = w->layout;
    return 2 * l->n_tensors + (grad * l->n_pieces + piece) * TURNS + w->turn[grad][piece];
}

/* Slices of a stacked tensor lie as in the model's memory, aligned no better than their stride. The next
 * layer begins right after, and must be found closed. */
static struct zr_guard_region region_for(const struct zr_tensor *x, int64_t n_layers, bool grad)
{
    if (x->buffer) /* it is the model's own memory */
        return (struct zr_guard_region){.align = 64};
    int64_t stride = x->n_elems / x->n_layers * zr_dtype_bytes(x->dtype);
    return (struct zr_guard_region){.bytes = grad && !x->grad ? 0 : n_layers * stride,
                                    .align = x->stacked && stride ? zr_min(stride & -stride, 64) : 64};
}

static int open_guard(struct zr_model_check *w)
{
    const struct zr_layout *l = w->layout;
    int32_t n = 2 * l->n_tensors + 2 * l->n_pieces * TURNS, at = 0;
    struct zr_guard_region *want = calloc((size_t)n, sizeof *want);
    w->regions = calloc((size_t)n, sizeof *w->regions);
    w->turn[0] = calloc((size_t)l->n_pieces + 1, 1);
    w->turn[1] = calloc((size_t)l->n_pieces + 1, 1);
    w->open[0] = calloc((size_t)l->n_pieces + 1, sizeof *w->open[0]);
    w->open[1] = calloc((size_t)l->n_pieces + 1, sizeof *w->open[1]);
    int err = 0;
    if (!want || !w->regions || !w->turn[0] || !w->turn[1] || !w->open[0] || !w->open[1])
        err = zr_fail(ZERO_ERR_NOMEM, "check: no memory for %d guarded places", n);
    for (int grad = 0; !err && grad < 2; grad++)
        for (int32_t t = 0; t < l->n_tensors; t++, at++) {
            const struct zr_tensor *x = &l->tensors[t];
            w->regions[at] = (struct region){t, -1, grad};
            want[at] = region_for(x, x->n_layers, grad);
        }
    for (int grad = 0; !err && grad < 2; grad++)
        for (int32_t p = 0; p < l->n_pieces; p++)
            for (int k = 0; k < TURNS; k++, at++) {
                const struct zr_tensor *x = &l->tensors[l->pieces[p].tensor];
                w->regions[at] = (struct region){l->pieces[p].tensor, l->pieces[p].layer, grad};
                want[at] = region_for(x, 1, grad);
            }
    if (!err)
        err = zr_guard_open(want, n, report_touch, w, &w->guard);
    free(want);
    return err;
}

static struct zr_model_check *check_of(struct zr_observer *o)
{
    return (struct zr_model_check *)o;
}

/* ---- the current call and job ---- */

static void model_check_call(struct zr_observer *o, const char *name, int32_t unit, const char *phase,
                             uint32_t step)
{
    struct zr_model_check *w = check_of(o);
    pthread_mutex_lock(&w->lock);
    w->call = name;
    w->unit = unit;
    w->phase = phase;
    w->step = step;
    pthread_mutex_unlock(&w->lock);
    zr_check_doing(w->check, name, unit, step);
}

/* The job takes the vector clock of the model's thread along. */
static void model_check_push(struct zr_observer *o, struct zr_job *job)
{
    job->note = zr_check_hand(check_of(o)->check);
}

static void model_check_job(struct zr_observer *o, const struct zr_job *job)
{
    if (o->e->loop)
        zr_check_job(check_of(o)->check, job->note);
    zr_check_doing(check_of(o)->check, zr_action_name((enum zr_action_kind)job->action.kind),
                   job->action.unit, job->step);
}

static void model_check_job_done(struct zr_observer *o)
{
    zr_check_job_done(check_of(o)->check);
}

static void model_check_snapshot(struct zr_observer *o, enum zr_snapshot_moment at)
{
    const struct zr_engine *e = o->e;
    if (at == ZR_SNAPSHOT_READ)
        zr_check_reader_done(check_of(o)->check);
    else
        zr_check_reader(check_of(o)->check, e->reduce_stream, e->snapshot, e->plan->snapshot_bytes);
}

/* ---- the model's memory ---- */

static int32_t index_of(const struct zr_model_check *w, const struct zr_piece *p)
{
    return (int32_t)(p - w->layout->pieces);
}

static char *model_check_piece_at(const struct zr_observer *o, const struct zr_piece *p, bool grad)
{
    const struct zr_model_check *w = (const struct zr_model_check *)o;
    if (w->copies)
        return zr_bracket_copies_at(w->copies, p, grad);
    return w->guard ? zr_guard_at(w->guard, region_of(w, index_of(w, p), grad)) : NULL;
}

static char *model_check_closed_at(const struct zr_observer *o, int32_t tensor, bool grad)
{
    const struct zr_model_check *w = (const struct zr_model_check *)o;
    return w->guard ? zr_guard_at(w->guard, grad * w->layout->n_tensors + tensor) : NULL;
}

/* Returns where the whole flat is, in a slot or in memory of its own. */
static char *full_at(const struct zr_engine *e, const struct zr_flat *f, int32_t slot, bool grad)
{
    return grad ? e->reduce_base + zr_plan_grad_full(e->plan, f, slot)
                : e->gather_base + zr_plan_param_full(e->plan, f, slot);
}

/* Declares what the model may do with a unit while its bracket is open, as an operation of the model. */
static void declare(struct zr_model_check *w, int32_t unit, int32_t slot, bool grad)
{
    const struct zr_engine *e = w->o.e;
    const struct zr_unit *u = &e->layout->units[unit];
    for (int32_t i = 0; i < u->n_flats; i++) {
        const struct zr_flat *f = &e->layout->flats[u->first_flat + i];
        struct zr_access a = {full_at(e, f, slot, grad), f->inner.total, grad};
        if (!grad || f->trainable)
            zr_check_compute(w->check, e->compute, grad ? "the model's writes" : "the model's reads", &a);
    }
}

/* Opens the next region of a piece, and copies the values there that the model is to see. */
static int open_piece(struct zr_model_check *w, int32_t piece, bool grad, const char *from, int64_t bytes)
{
    pthread_mutex_lock(&w->lock);
    w->turn[grad][piece] = (uint8_t)((w->turn[grad][piece] + 1) % TURNS);
    w->open[grad][piece] = true;
    pthread_mutex_unlock(&w->lock);
    int32_t region = region_of(w, piece, grad);
    ZR_TRY(zr_guard_set(w->guard, region, ZR_GUARD_OPEN));
    memcpy(zr_guard_at(w->guard, region), from, (size_t)bytes);
    return grad ? 0 : zr_guard_set(w->guard, region, ZR_GUARD_READ);
}

/* Closes the region of a piece, and takes the gradient from it. */
static int close_piece(struct zr_model_check *w, int32_t piece, bool grad, char *to, int64_t bytes)
{
    int32_t region = region_of(w, piece, grad);
    if (grad)
        memcpy(to, zr_guard_at(w->guard, region), (size_t)bytes);
    pthread_mutex_lock(&w->lock);
    w->open[grad][piece] = false;
    pthread_mutex_unlock(&w->lock);
    return zr_guard_set(w->guard, region, ZR_GUARD_CLOSED);
}

/* Opens or closes all pieces of a unit. */
static int for_pieces(struct zr_model_check *w, int32_t unit, int32_t slot, bool grad, bool open)
{
    const struct zr_layout *l = w->layout;
    const struct zr_unit *u = &l->units[unit];
    int err = 0;
    for (int32_t i = 0; i < u->n_flats; i++) {
        const struct zr_flat *f = &l->flats[u->first_flat + i];
        char *full = full_at(w->o.e, f, slot, grad);
        for (int32_t k = 0; !err && (!grad || f->trainable) && k < f->n_pieces; k++) {
            const struct zr_piece *p = &l->pieces[f->first_piece + k];
            int64_t size = zr_dtype_bytes(f->dtype);
            char *at = full + p->first * size;
            err = open ? open_piece(w, f->first_piece + k, grad, at, p->n * size)
                       : close_piece(w, f->first_piece + k, grad, at, p->n * size);
        }
    }
    return err;
}

/* Called when the model gets a unit's parameters or gradient. A unit whose pointers are set already
 * (zr_shown_slot) needs no other copy. */
static int open_unit(struct zr_model_check *w, int32_t unit, int32_t slot, bool grad)
{
    declare(w, unit, slot, grad);
    w->reported[unit] |= !grad;
    bool shown = zr_shown_slot(w->o.e, unit, grad) != ZR_NOT_SHOWN;
    if (w->copies && !shown)
        return zr_bracket_copies_begin(w->copies, unit, slot, grad);
    return w->guard && !shown ? for_pieces(w, unit, slot, grad, true) : 0;
}

/* Called when the model gives a unit's parameters or gradient back. */
static int close_unit(struct zr_model_check *w, int32_t unit, int32_t slot, bool grad)
{
    declare(w, unit, slot, grad);
    if (w->copies)
        return zr_bracket_copies_end(w->copies, unit, slot, grad);
    return w->guard ? for_pieces(w, unit, slot, grad, false) : 0;
}

/* Sets the guard of all whole tensors. */
static int guard_all(struct zr_model_check *w, enum zr_guard_mode mode)
{
    int err = 0;
    for (int32_t t = 0; !err && w->guard && t < w->layout->n_tensors; t++)
        err = zr_guard_set(w->guard, t, mode);
    return err;
}

static int check_model_step(struct zr_model_check *w)
{
    for (int32_t u = 0; u < w->layout->n_units; u++) {
        if (w->reported[u] && w->o.e->plan->placement.model_holds)
            declare(w, u, -1, false);
        w->reported[u] = false;
    }
    return zr_engine_note(w->o.e, w->copies ? zr_bracket_copies_look(w->copies) : 0);
}

static void report_skipped_step(const struct zr_model_check *w)
{
    if (w->copies)
        zr_warn(
            w->log,
            "check: step %u was skipped, its gradient is not finite: on a GPU a pointer that the model kept "
            "from an earlier bracket reads NaN",
            zr_last_step_number(w->o.e));
}

/* ---- faults ---- */

static bool is_open(const struct zr_model_check *w, int32_t tensor, int64_t layer, bool grad)
{
    const struct zr_layout *l = w->layout;
    for (int32_t p = 0; p < l->n_pieces; p++)
        if (l->pieces[p].tensor == tensor && l->pieces[p].layer == layer && w->open[grad][p])
            return true;
    return false;
}

/* Describes a touch of closed memory: how it relates to the brackets of the unit that the model meant. */
static const char *wrong_bracket(const struct zr_model_check *w, const struct region *at, int64_t layer)
{
    bool kept = at->layer == layer;
    if (is_open(w, at->tensor, layer, at->grad))
        return kept ? "inside its bracket, by a pointer that it kept from an earlier one; read it again "
                      "after each zero_begin"
               : at->layer < 0
                   ? "inside its bracket, by a pointer that it took before zero_begin; read it after"
                   : "inside its bracket, by the pointer of another layer";
    if (kept)
        return "outside its bracket, by a pointer that it kept from an earlier one";
    if (at->grad && is_open(w, at->tensor, layer, false))
        return "outside its backward bracket";
    return "outside its bracket";
}

/* Describes the tensor and element that a touch meant, and why it was wrong. Call it with the lock held. */
static void describe(const struct zr_model_check *w, const struct zr_guard_touch *t, char *text, size_t n)
{
    const struct region *at = &w->regions[t->region];
    const struct zr_tensor *x = &w->layout->tensors[at->tensor];
    int64_t size = zr_dtype_bytes(x->dtype), stride = x->n_elems / x->n_layers * size;
    int64_t own = at->layer < 0 ? x->n_layers * stride : stride;
    int64_t byte = (at->layer < 0 ? 0 : at->layer * stride) + t->offset;
    bool beside = byte < 0 || byte >= x->n_elems * size;
    int64_t layer = beside ? 0 : byte / stride;
    const char *does = t->write > 0 ? "writes" : t->write == 0 ? "reads" : "touches";
    char where[96], why[128];
    if (beside)
        snprintf(where, sizeof where, "%lld bytes %s",
                 (long long)(byte < 0 ? -byte : byte - x->n_elems * size),
                 byte < 0 ? "before its start" : "beyond its end");
    else
        snprintf(where, sizeof where, "unit %lld, element %lld", (long long)(x->unit + layer),
                 (long long)(byte / size));
    if (beside)
        snprintf(why, sizeof why, "where no tensor is");
    else if (t->callback)
        snprintf(why, sizeof why, "which it was not given");
    else if (t->mode == ZR_GUARD_READ && t->offset >= 0 && t->offset < own)
        snprintf(why, sizeof why, "which may only be read");
    else
        snprintf(why, sizeof why, "%s", wrong_bracket(w, at, layer));
    char after[96];
    if (t->callback)
        snprintf(after, sizeof after, "in %s", t->callback);
    else if (w->unit < 0)
        snprintf(after, sizeof after, "after %s, step %u", w->call, w->step);
    else
        snprintf(after, sizeof after, "after %s of unit %d in %s, step %u", w->call, w->unit, w->phase,
                 w->step);
    const char *by = t->call ? " by " : "";
    const char *cut_short = t->call ? "; the call fails or does less than it was asked" : "";
    snprintf(text, n, "the model's fault: %s, it %s %stensor %s (%s)%s%s %s%s", after, does,
             at->grad ? "the gradient of " : "", x->name, where, by, t->call ? t->call : "", why, cut_short);
}

static bool found_touch(struct zr_model_check *w, char *text, size_t n)
{
    struct zr_guard_touch t;
    if (!w->guard || !zr_guard_touched(w->guard, &t))
        return false;
    pthread_mutex_lock(&w->lock);
    if (!w->touch[0])
        describe(w, &t, w->touch, sizeof w->touch);
    snprintf(text, n, "%s", w->touch);
    pthread_mutex_unlock(&w->lock);
    return true;
}

static void say_fault(struct zr_model_check *w, const char *text)
{
    if (!atomic_exchange(&w->said_fault, true))
        say(w, text);
}

/* Runs on the guard's thread, while the thread that touched the memory waits. */
static void report_touch(void *arg)
{
    struct zr_model_check *w = arg;
    char text[ZR_ERROR_BYTES];
    if (found_touch(w, text, sizeof text))
        say_fault(w, text);
}

static int model_check_fault(struct zr_observer *o)
{
    struct zr_model_check *w = check_of(o);
    char text[ZR_ERROR_BYTES];
    int code = 0;
    if (found_touch(w, text, sizeof text)) {
        code = ZERO_ERR_ORDER;
    } else if (zr_check_found(w->check, text, sizeof text)) {
        code = ZERO_ERR_FAILED;
    } else if (zr_check_stopped(w->check) && !w->said_stopped) {
        w->said_stopped = true;
        say(w, "no memory to keep the record: nothing is checked from here on");
    }
    if (!code)
        return 0;
    say_fault(w, text);
    return zr_fail(code, "check: %s", text);
}

/* ---- as an observer ---- */

static int model_check_begin(struct zr_observer *o, const struct zr_grant *g)
{
    if (g->kind == ZR_GRANT_ALL)
        return guard_all(check_of(o), g->ready ? ZR_GUARD_READ : ZR_GUARD_OPEN);
    if (g->kind == ZR_GRANT_SLOTS || !g->ready)
        return 0;
    return open_unit(check_of(o), g->unit, g->slot, g->kind == ZR_GRANT_GRAD);
}

static int model_check_end(struct zr_observer *o, const struct zr_grant *g)
{
    if (g->kind == ZR_GRANT_ALL)
        return guard_all(check_of(o), ZR_GUARD_CLOSED);
    return g->kind == ZR_GRANT_SLOTS ? 0
                                     : close_unit(check_of(o), g->unit, g->slot, g->kind == ZR_GRANT_GRAD);
}

static int model_check_reduced(struct zr_observer *o, int32_t unit, enum zr_reduce_moment at)
{
    return at == ZR_REDUCE_RETURNED ? open_unit(check_of(o), unit, -1, true) : 0;
}

static int model_check_step(struct zr_observer *o, enum zr_step_moment at, const char *call)
{
    (void)call;
    if (at == ZR_STEP_SETTLED && o->e->agreed->skipped && !o->e->agreed->too_large)
        report_skipped_step(check_of(o));
    return at == ZR_STEP_BEGUN ? check_model_step(check_of(o)) : 0;
}

static void model_check_give_back(struct zr_observer *o)
{
    zr_bracket_copies_give_back(check_of(o)->copies);
}

static void close_model_check(struct zr_observer *o)
{
    struct zr_model_check *w = check_of(o);
    zr_info(w->log, "check: %lld operations were checked", (long long)zr_check_n_ops(w->check));
    zr_guard_close(w->guard);
    zr_bracket_copies_close(w->copies);
    free(w->regions);
    free(w->turn[0]);
    free(w->turn[1]);
    free(w->open[0]);
    free(w->open[1]);
    free(w->reported);
    pthread_mutex_destroy(&w->lock);
}

int zr_model_check_open(struct zr_engine *e, const struct zr_engine_parts *parts)
{
    static const struct zr_observer_ops ops = {.on_begin = model_check_begin,
                                               .on_end = model_check_end,
                                               .on_reduce = model_check_reduced,
                                               .on_step = model_check_step,
                                               .on_call = model_check_call,
                                               .on_push = model_check_push,
                                               .on_job = model_check_job,
                                               .on_job_done = model_check_job_done,
                                               .on_snapshot = model_check_snapshot,
                                               .find_fault = model_check_fault,
                                               .piece_at = model_check_piece_at,
                                               .closed_at = model_check_closed_at,
                                               .give_back = model_check_give_back,
                                               .close = close_model_check};
    struct zr_observer *o;
    if (!parts->check)
        return 0;
    ZR_TRY(zr_observer_new(e, &ops, sizeof(struct zr_model_check), 0, 0, &o));
    struct zr_model_check *w = check_of(o);
    w->check = parts->check;
    w->layout = e->layout;
    pthread_mutex_init(&w->lock, NULL);
    w->call = "zero_wrap";
    w->phase = "";
    w->unit = -1;
    w->log = e->opt.log;
    int err = ZR_ZALLOC(w->reported, e->layout->n_units, "the check of %d units", e->layout->n_units);
    if (!err && !e->plan->placement.model_holds && e->dev->ops->compute_on_caller)
        err = open_guard(w);
    if (!err && !e->plan->placement.model_holds && !e->dev->ops->compute_on_caller)
        err = zr_bracket_copies_open(e, &w->copies);
    if (w->copies)
        zr_info(w->log, "check: %lld bytes of the GPU for the model's copies of its units",
                (long long)zr_bracket_copies_need(w->layout));
    return err;
}
