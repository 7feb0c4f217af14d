/* SPDX-License-Identifier: Apache-2.0 */
/* model_pointers.c: sets the model's pointers, and checks them. At stages 2 and 3 they point at what is open.
 * At stages 0 and 1 they stay, but a gradient's pointer is NULL while it is being reduced.
 *
 * A model might assign one of them, by a lazy allocation after zero_wrap or by copying a struct over it. It
 * would then compute in memory that nobody reduces. So each call first checks that the pointers are as the
 * library stored them. */
#include "shard/engine/internal.h"

void zr_point_param(struct zr_engine *e, int32_t tensor, void *to)
{
    *e->layout->tensors[tensor].param = e->m.reported_param[tensor] = to;
}

void zr_point_grad(struct zr_engine *e, int32_t tensor, void *to)
{
    *e->layout->tensors[tensor].grad = e->m.reported_grad[tensor] = to;
}

void zr_engine_unpoint(struct zr_engine *e)
{
    for (int32_t i = 0; i < e->layout->n_tensors; i++) {
        const struct zr_tensor *t = &e->layout->tensors[i];
        if (t->buffer)
            continue;
        if (*t->param == e->m.reported_param[i])
            *t->param = NULL;
        if (t->grad && *t->grad == e->m.reported_grad[i])
            *t->grad = NULL;
    }
}

static int64_t slice_bytes(const struct zr_tensor *t)
{
    return t->n_elems / t->n_slices * zr_dtype_bytes(t->dtype);
}

/* Returns the pointer for which base + slice*stride is the piece. It may lie outside any object, so the
 * arithmetic is on integers. */
static void *biased(const struct zr_tensor *t, const struct zr_piece *p, const char *at)
{
    return (void *)((uintptr_t)at - (uintptr_t)(p->slice * slice_bytes(t)));
}

static void *param_pointer(const struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p,
                           int32_t slot)
{
    const char *guarded = zr_model_check_param(e->watch, p);
    const char *at =
        e->gather_base + zr_plan_param_full(e->plan, f, slot) + p->first * zr_dtype_bytes(f->dtype);
    at = guarded ? guarded : at;
    return biased(&e->layout->tensors[p->tensor], p, at);
}

static void *grad_pointer(const struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p,
                          int32_t slot)
{
    const char *guarded = zr_model_check_grad(e->watch, p);
    const char *at =
        e->reduce_base + zr_plan_grad_full(e->plan, f, slot) + p->first * zr_dtype_bytes(f->dtype);
    at = guarded ? guarded : at;
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
    e->m.n_shown_param[p->tensor] += !e->m.param_shown[f->unit];
    zr_point_param(e, p->tensor, param_pointer(e, f, p, slot));
}

static void show_grad(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p, int32_t slot)
{
    if (!f->trainable)
        return;
    e->m.n_shown_grad[p->tensor] += !e->m.grad_shown[f->unit];
    zr_point_grad(e, p->tensor, grad_pointer(e, f, p, slot));
}

/* Returns a slice of a stacked tensor that is still open (brackets nest), to which the pointer goes back. -1:
 * none. */
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
    int32_t other = other_slice(e, p->tensor, e->m.param_shown, --e->m.n_shown_param[p->tensor]);
    void *pointer = zr_model_check_closed(e->watch, p->tensor, false);
    if (other >= 0) {
        int32_t id = e->layout->piece_of[e->layout->slice_base[p->tensor] + other];
        const struct zr_flat *g = zr_piece_flat(e->layout, id);
        pointer = param_pointer(e, g, &e->layout->pieces[id], e->m.param_slot[g->unit]);
    }
    zr_point_param(e, p->tensor, pointer);
}

static void hide_grad(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p, int32_t slot)
{
    (void)slot;
    if (!f->trainable)
        return;
    int32_t other = other_slice(e, p->tensor, e->m.grad_shown, --e->m.n_shown_grad[p->tensor]);
    void *pointer = zr_model_check_closed(e->watch, p->tensor, true);
    if (other >= 0) {
        int32_t id = e->layout->piece_of[e->layout->slice_base[p->tensor] + other];
        const struct zr_flat *g = zr_piece_flat(e->layout, id);
        pointer = grad_pointer(e, g, &e->layout->pieces[id], e->m.grad_slot[g->unit]);
    }
    zr_point_grad(e, p->tensor, pointer);
}

void zr_show_params(struct zr_engine *e, int32_t unit, int32_t slot)
{
    for_pieces_of_unit(e, unit, slot, show_param);
    e->m.param_shown[unit] = true;
    e->m.param_slot[unit] = slot;
}

void zr_hide_params(struct zr_engine *e, int32_t unit)
{
    e->m.param_shown[unit] = false;
    for_pieces_of_unit(e, unit, -1, hide_param);
}

void zr_show_grads(struct zr_engine *e, int32_t unit, int32_t slot)
{
    for_pieces_of_unit(e, unit, slot, show_grad);
    e->m.grad_shown[unit] = true;
    e->m.grad_slot[unit] = slot;
}

void zr_hide_grads(struct zr_engine *e, int32_t unit)
{
    e->m.grad_shown[unit] = false;
    for_pieces_of_unit(e, unit, -1, hide_grad);
}

static void point_for_good(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p,
                           int32_t slot)
{
    if (p->slice)
        return; /* slice 0 gives the base of all slices */
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
        for_pieces_of_unit(e, u, -1, point_for_good);
}

/* ---- gradients in place, at stages 0 and 1 ---- */

/* Sets the pointer by the counts of layers in flight and open. */
static void set_grad_pointer(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p)
{
    const struct zr_grad_pointer *l = &e->m.grad_pointer[p->tensor];
    bool away = l->n_in_flight && !l->n_open;
    zr_point_grad(e, p->tensor,
                  away ? zr_model_check_closed(e->watch, p->tensor, true) : grad_pointer(e, f, p, -1));
}

static void count_opened(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p, int32_t slot)
{
    (void)slot;
    if (!f->trainable)
        return;
    struct zr_grad_pointer *l = &e->m.grad_pointer[p->tensor];
    l->n_open++;
    l->n_in_flight -= e->m.in_flight[f->unit];
    set_grad_pointer(e, f, p);
}

static void count_closed(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p, int32_t slot)
{
    (void)slot;
    if (!f->trainable)
        return;
    e->m.grad_pointer[p->tensor].n_open--;
    e->m.grad_pointer[p->tensor].n_in_flight += e->m.in_flight[f->unit];
    set_grad_pointer(e, f, p);
}

static void count_returned(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p,
                           int32_t slot)
{
    (void)slot;
    if (!f->trainable)
        return;
    e->m.grad_pointer[p->tensor].n_in_flight--;
    set_grad_pointer(e, f, p);
}

void zr_open_grads(struct zr_engine *e, int32_t unit)
{
    for_pieces_of_unit(e, unit, -1, count_opened);
    for (int32_t i = 0; e->m.in_flight[unit] && i < e->m.n_flying; i++)
        if (e->m.flying[i] == unit)
            e->m.flying[i] = e->m.flying[--e->m.n_flying];
    e->m.in_flight[unit] = false;
}

void zr_close_grads(struct zr_engine *e, int32_t unit, bool in_flight)
{
    e->m.in_flight[unit] = in_flight;
    if (in_flight)
        e->m.flying[e->m.n_flying++] = unit;
    for_pieces_of_unit(e, unit, -1, count_closed);
}

void zr_return_grads(struct zr_engine *e, int32_t unit)
{
    for_pieces_of_unit(e, unit, -1, count_returned);
    e->m.in_flight[unit] = false;
}

/* ---- checking them ---- */

static int moved(const struct zr_core_event *ev, const struct zr_tensor *t, const char *which, const void *is,
                 const void *reported)
{
    return zr_fail(ZERO_ERR_ORDER,
                   "%s: *%s of tensor %s (unit %d) is %p; the library stored %p there. The model must not "
                   "assign it after zero_wrap: allocate before, read the pointer again after each "
                   "zero_begin, and restore the library's pointer",
                   zr_model_call_name(ev->kind), which, t->name, t->unit, is, reported);
}

static int check_tensor(const struct zr_engine *e, const struct zr_core_event *ev, int32_t i)
{
    const struct zr_tensor *t = &e->layout->tensors[i];
    if (t->buffer)
        return 0;
    if (*t->param != e->m.reported_param[i])
        return moved(ev, t, "param", *t->param, e->m.reported_param[i]);
    if (t->grad && *t->grad != e->m.reported_grad[i])
        return moved(ev, t, "grad", *t->grad, e->m.reported_grad[i]);
    return 0;
}

/* Refuses to open a layer while another layer of the tensor is open, because the model may still use the base
 * for that one. */
static int check_layer(const struct zr_engine *e, int32_t unit, int32_t i)
{
    const struct zr_tensor *t = &e->layout->tensors[i];
    if (t->pointer_per_begin || e->m.n_shown_param[i] == e->m.param_shown[unit])
        return 0;
    int32_t other = t->unit;
    while (other == unit || !e->m.param_shown[other])
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
