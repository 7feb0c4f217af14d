/* SPDX-License-Identifier: Apache-2.0 */
/* model_pointers.c: sets the model's pointers, and checks them.
 *
 * At stages 2 and 3 the pointers of a unit are set in its brackets, and are NULL outside them. Stage 2 keeps
 * whole weights all the time, but their pointers follow the same rule as at stage 3. A unit is shown while
 * its pointers are set. Brackets of one unit nest: it is shown from the first begin to the last end.
 *
 * At stages 0 and 1 the pointers are always set, except that a gradient's pointer is NULL while the gradient
 * is being reduced.
 *
 * A model might assign a pointer, by a lazy allocation after zero_wrap or by copying a struct over it. The
 * model would then compute in memory that nobody reduces. So calls first check that the pointers are as the
 * library stored them: a bracket those of its unit, most other calls all of them.
 *
 * In check mode an observer (observer.h) chooses where pointers point. zr_observed_piece returns its address
 * for a piece that is open, and zr_observed_closed its address for a tensor that is not. Both return NULL if
 * no observer wants one: then pointers have the library's address, or NULL. */
#include "shard/engine/internal.h"

/* Numbers of layers of a tensor: those whose gradients are being reduced, and those with an open backward
 * bracket. */
struct grad_layers {
    int32_t n_reducing, n_open;
};

/* The state of this file. The engine's member m, which has it, belongs to the model's thread. ZR_TABLE
 * allocates its tables. It returns from the calling function if that fails. */
struct zr_pointers {
    /* (n_tensors) values last stored in the model's pointers */
    void **stored_param, **stored_grad;
    /* (n_tensors) layers of the tensor that are shown */
    int32_t *n_shown_param, *n_shown_grad;
    /* (n_units) the slot where the unit is shown, -1 for resident memory, or ZR_NOT_SHOWN */
    int32_t *param_slot, *grad_slot;
    /* Stages 0 and 1. (n_tensors) The model has one pointer for all layers. It is NULL while the gradient of
     * a layer is being reduced, unless a layer is open. So a model that zeroes its gradients meanwhile fails
     * at once, instead of changing what is being reduced. */
    struct grad_layers *layers;
    /* stages 0 and 1: (n_units) the gradient is being reduced; (n_reducing) the list of these units */
    bool *is_reducing;
    int32_t *reducing, n_reducing;
};

int zr_pointers_open(struct zr_engine *e)
{
    const int32_t units = e->layout->n_units, tensors = e->layout->n_tensors;
    ZR_TABLE(e, e->m.pointers, 1);
    struct zr_pointers *p = e->m.pointers;
    ZR_TABLE(e, p->stored_param, tensors);
    ZR_TABLE(e, p->stored_grad, tensors);
    ZR_TABLE(e, p->n_shown_param, tensors);
    ZR_TABLE(e, p->n_shown_grad, tensors);
    ZR_TABLE(e, p->param_slot, units);
    ZR_TABLE(e, p->grad_slot, units);
    ZR_TABLE(e, p->layers, tensors);
    ZR_TABLE(e, p->is_reducing, units);
    ZR_TABLE(e, p->reducing, units);
    for (int32_t u = 0; u < units; u++)
        p->param_slot[u] = p->grad_slot[u] = ZR_NOT_SHOWN;
    return 0;
}

int32_t zr_shown_slot(const struct zr_engine *e, int32_t unit, bool grad)
{
    return grad ? e->m.pointers->grad_slot[unit] : e->m.pointers->param_slot[unit];
}

void zr_point_param(struct zr_engine *e, int32_t tensor, void *to)
{
    *e->layout->tensors[tensor].param = e->m.pointers->stored_param[tensor] = to;
}

void zr_point_grad(struct zr_engine *e, int32_t tensor, void *to)
{
    *e->layout->tensors[tensor].grad = e->m.pointers->stored_grad[tensor] = to;
}

void zr_engine_unpoint(struct zr_engine *e)
{
    for (int32_t i = 0; i < e->layout->n_tensors; i++) {
        const struct zr_tensor *t = &e->layout->tensors[i];
        if (t->buffer)
            continue;
        if (*t->param == e->m.pointers->stored_param[i])
            *t->param = NULL;
        if (t->grad && *t->grad == e->m.pointers->stored_grad[i])
            *t->grad = NULL;
    }
}

static int64_t layer_bytes(const struct zr_tensor *t)
{
    return t->n_elems / t->n_layers * zr_dtype_bytes(t->dtype);
}

/* Returns the base for which base + layer*stride is `at`, the address of the piece. The base may lie outside
 * any object, so the arithmetic is on integers. */
static void *biased(const struct zr_tensor *t, const struct zr_piece *p, const char *at)
{
    return (void *)((uintptr_t)at - (uintptr_t)(p->layer * layer_bytes(t)));
}

/* Returns the pointer for a piece in a slot, or (-1) in resident memory. */
static void *param_pointer(const struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p,
                           int32_t slot)
{
    const char *observed = zr_observed_piece(e, p, false);
    const char *at =
        e->gather_base + zr_plan_param_full(e->plan, f, slot) + p->first * zr_dtype_bytes(f->dtype);
    at = observed ? observed : at;
    return biased(&e->layout->tensors[p->tensor], p, at);
}

static void *grad_pointer(const struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p,
                          int32_t slot)
{
    const char *observed = zr_observed_piece(e, p, true);
    const char *at =
        e->reduce_base + zr_plan_grad_full(e->plan, f, slot) + p->first * zr_dtype_bytes(f->dtype);
    at = observed ? observed : at;
    return biased(&e->layout->tensors[p->tensor], p, at);
}

typedef void (*piece_fn)(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p,
                         int32_t slot);

static void for_pieces_of_unit(struct zr_engine *e, int32_t unit, int32_t slot, piece_fn fn)
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
    e->m.pointers->n_shown_param[p->tensor] += zr_shown_slot(e, f->unit, false) == ZR_NOT_SHOWN;
    zr_point_param(e, p->tensor, param_pointer(e, f, p, slot));
}

static void show_grad(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p, int32_t slot)
{
    if (!f->trainable)
        return;
    e->m.pointers->n_shown_grad[p->tensor] += zr_shown_slot(e, f->unit, true) == ZR_NOT_SHOWN;
    zr_point_grad(e, p->tensor, grad_pointer(e, f, p, slot));
}

/* Returns a layer of a stacked tensor that is still shown, or -1 if there is none. The tensor's pointer then
 * goes back to that layer. slot: where each unit is shown. n_shown: the tensor's number of layers that
 * are. */
static int32_t other_layer(const struct zr_engine *e, int32_t tensor, const int32_t *slot, int32_t n_shown)
{
    const struct zr_tensor *t = &e->layout->tensors[tensor];
    for (int32_t s = 0; n_shown && s < t->n_layers; s++)
        if (slot[t->unit + s] != ZR_NOT_SHOWN)
            return s;
    return -1;
}

static void hide_param(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p, int32_t slot)
{
    (void)f;
    (void)slot;
    int32_t other =
        other_layer(e, p->tensor, e->m.pointers->param_slot, --e->m.pointers->n_shown_param[p->tensor]);
    void *pointer = zr_observed_closed(e, p->tensor, false);
    if (other >= 0) {
        int32_t id = e->layout->piece_of[e->layout->layer_base[p->tensor] + other];
        const struct zr_flat *g = zr_piece_flat(e->layout, id);
        pointer = param_pointer(e, g, &e->layout->pieces[id], zr_shown_slot(e, g->unit, false));
    }
    zr_point_param(e, p->tensor, pointer);
}

static void hide_grad(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p, int32_t slot)
{
    (void)slot;
    if (!f->trainable)
        return;
    int32_t other =
        other_layer(e, p->tensor, e->m.pointers->grad_slot, --e->m.pointers->n_shown_grad[p->tensor]);
    void *pointer = zr_observed_closed(e, p->tensor, true);
    if (other >= 0) {
        int32_t id = e->layout->piece_of[e->layout->layer_base[p->tensor] + other];
        const struct zr_flat *g = zr_piece_flat(e->layout, id);
        pointer = grad_pointer(e, g, &e->layout->pieces[id], zr_shown_slot(e, g->unit, true));
    }
    zr_point_grad(e, p->tensor, pointer);
}

void zr_show_params(struct zr_engine *e, int32_t unit, int32_t slot)
{
    for_pieces_of_unit(e, unit, slot, show_param);
    e->m.pointers->param_slot[unit] = slot;
}

void zr_hide_params(struct zr_engine *e, int32_t unit)
{
    e->m.pointers->param_slot[unit] = ZR_NOT_SHOWN;
    for_pieces_of_unit(e, unit, ZR_NOT_SHOWN, hide_param);
}

void zr_show_grads(struct zr_engine *e, int32_t unit, int32_t slot)
{
    for_pieces_of_unit(e, unit, slot, show_grad);
    e->m.pointers->grad_slot[unit] = slot;
}

void zr_hide_grads(struct zr_engine *e, int32_t unit)
{
    e->m.pointers->grad_slot[unit] = ZR_NOT_SHOWN;
    for_pieces_of_unit(e, unit, ZR_NOT_SHOWN, hide_grad);
}

/* Stages 0 and 1: sets the pointers of a piece's tensor, which brackets do not change. */
static void point_for_good(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p,
                           int32_t slot)
{
    if (p->layer)
        return; /* layer 0 gives the base of all layers */
    zr_point_param(e, p->tensor, param_pointer(e, f, p, slot));
    if (f->trainable)
        zr_point_grad(e, p->tensor, grad_pointer(e, f, p, slot));
}

/* values: the parameters have values, so the model may have pointers to them. */
void zr_engine_point(struct zr_engine *e, bool values)
{
    for (int32_t t = 0; t < e->layout->n_tensors; t++) {
        if (e->layout->tensors[t].buffer)
            continue;
        zr_point_param(e, t, zr_observed_closed(e, t, false));
        if (e->layout->tensors[t].grad)
            zr_point_grad(e, t, zr_observed_closed(e, t, true));
    }
    /* model_holds: the model has its parameters and gradients at all times, in resident memory (slot -1) */
    for (int32_t u = 0; values && e->plan->placement.model_holds && u < e->layout->n_units; u++)
        for_pieces_of_unit(e, u, -1, point_for_good);
}

/* ---- gradients that the model has at all times, at stages 0 and 1 ---- */

/* Sets a gradient's pointer from the tensor's counts. All gradients are in resident memory (slot -1). */
static void set_grad_pointer(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p)
{
    const struct grad_layers *l = &e->m.pointers->layers[p->tensor];
    bool hidden = l->n_reducing && !l->n_open;
    zr_point_grad(e, p->tensor, hidden ? zr_observed_closed(e, p->tensor, true) : grad_pointer(e, f, p, -1));
}

/* Adds `opened` and `reducing` (1, 0 or -1) to the counts of the unit's tensors, and then sets their
 * pointers. */
static void count_layers(struct zr_engine *e, int32_t unit, int32_t opened, int32_t reducing)
{
    const struct zr_unit *u = &e->layout->units[unit];
    for (int32_t i = 0; i < u->n_flats; i++) {
        const struct zr_flat *f = &e->layout->flats[u->first_flat + i];
        for (int32_t k = 0; f->trainable && k < f->n_pieces; k++) {
            const struct zr_piece *p = &e->layout->pieces[f->first_piece + k];
            e->m.pointers->layers[p->tensor].n_open += opened;
            e->m.pointers->layers[p->tensor].n_reducing += reducing;
            set_grad_pointer(e, f, p);
        }
    }
}

/* Removes entry i from the list of units whose gradients are being reduced. */
static void end_reducing(struct zr_pointers *p, int32_t i)
{
    p->is_reducing[p->reducing[i]] = false;
    p->reducing[i] = p->reducing[--p->n_reducing];
}

void zr_open_grads(struct zr_engine *e, int32_t unit)
{
    struct zr_pointers *p = e->m.pointers;
    count_layers(e, unit, 1, -p->is_reducing[unit]);
    for (int32_t i = 0; p->is_reducing[unit] && i < p->n_reducing; i++)
        if (p->reducing[i] == unit)
            end_reducing(p, i);
}

void zr_close_grads(struct zr_engine *e, int32_t unit, bool reducing)
{
    struct zr_pointers *p = e->m.pointers;
    p->is_reducing[unit] = reducing;
    if (reducing)
        p->reducing[p->n_reducing++] = unit;
    count_layers(e, unit, -1, reducing);
}

/* If a gradient is also the only copy of its sum (sum_in_place), the model gets it back after the update has
 * used the sum. Without sums_too such units are skipped. */
int32_t zr_return_next_grad(struct zr_engine *e, bool sums_too)
{
    struct zr_pointers *p = e->m.pointers;
    int32_t i = p->n_reducing - 1;
    while (i >= 0 && !sums_too && e->plan->sum_in_place[p->reducing[i]])
        i--;
    if (i < 0)
        return -1;
    int32_t unit = p->reducing[i];
    end_reducing(p, i);
    count_layers(e, unit, 0, -1);
    return unit;
}

/* ---- checking the pointers ---- */

/* Returns the error for a pointer that the model has assigned. name: "param" or "grad". */
static int moved(const struct zr_core_event *ev, const struct zr_tensor *t, const char *name, const void *now,
                 const void *stored)
{
    return zr_fail(ZERO_ERR_ORDER,
                   "%s: *%s of tensor %s (unit %d) is %p; the library stored %p there. The model must not "
                   "assign it after zero_wrap: allocate before, read the pointer again after each "
                   "zero_begin, and restore the library's pointer",
                   zr_model_call_name(ev->kind), name, t->name, t->unit, now, stored);
}

static int check_tensor(const struct zr_engine *e, const struct zr_core_event *ev, int32_t i)
{
    const struct zr_tensor *t = &e->layout->tensors[i];
    if (t->buffer)
        return 0;
    if (*t->param != e->m.pointers->stored_param[i])
        return moved(ev, t, "param", *t->param, e->m.pointers->stored_param[i]);
    if (t->grad && *t->grad != e->m.pointers->stored_grad[i])
        return moved(ev, t, "grad", *t->grad, e->m.pointers->stored_grad[i]);
    return 0;
}

/* Refuses to open a layer of a stacked tensor while another one is open. The tensor has one base, and the
 * model may still use it for the other layer. */
static int check_layer(const struct zr_engine *e, int32_t unit, int32_t i)
{
    const struct zr_tensor *t = &e->layout->tensors[i];
    if (t->pointer_per_begin ||
        e->m.pointers->n_shown_param[i] == (zr_shown_slot(e, unit, false) != ZR_NOT_SHOWN))
        return 0;
    int32_t other = t->unit;
    while (other == unit || zr_shown_slot(e, other, false) == ZR_NOT_SHOWN)
        other++;
    return zr_fail(ZERO_ERR_ORDER,
                   "zero_begin: unit %d of stacked tensor %s cannot be opened while unit %d is: at stages 2 "
                   "and 3 its base fits one layer. End unit %d first; or flag the tensor "
                   "ZERO_POINTER_PER_BEGIN and take its pointers after each zero_begin; or give it its own "
                   "unit, not stacked, that stays open (ZERO_RESIDENT, if small)",
                   unit, t->name, other, other);
}

int zr_pointers_check(const struct zr_engine *e, const struct zr_core_event *ev)
{
    int err = 0;
    bool bracket = ev->kind == ZR_EV_BEGIN || ev->kind == ZR_EV_END;
    /* Writing parameters (REWRITE) and saving (SNAPSHOT) use the library's own memory, not these pointers. */
    if (!bracket && ev->kind != ZR_EV_REWRITE && ev->kind != ZR_EV_SNAPSHOT)
        for (int32_t i = 0; !err && i < e->layout->n_tensors; i++)
            err = check_tensor(e, ev, i);
    const struct zr_unit *u = bracket ? &e->layout->units[ev->unit] : NULL;
    for (int32_t i = 0; u && i < u->n_flats; i++) {
        const struct zr_flat *f = &e->layout->flats[u->first_flat + i];
        for (int32_t k = 0; !err && k < f->n_pieces; k++) {
            int32_t tensor = e->layout->pieces[f->first_piece + k].tensor;
            err = check_tensor(e, ev, tensor);
            if (!err && ev->kind == ZR_EV_BEGIN)
                err = check_layer(e, ev->unit, tensor);
        }
    }
    return err;
}
