/* SPDX-License-Identifier: Apache-2.0 */
/* engine_lending.c: where the model's pointers stand: at stages 2 and 3 at what is open, at stages 0 and 1
 * for good, but that a gradient is taken away while it is being reduced. */
#include "shard/engine/engine_inside.h"

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

static void for_lent_pieces(struct zr_engine *e, int32_t unit, int32_t slot, piece_fn fn)
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
    for_lent_pieces(e, unit, slot, show_param);
    e->m.param_shown[unit] = true;
    e->m.param_slot[unit] = slot;
}

void zr_hide_params(struct zr_engine *e, int32_t unit)
{
    e->m.param_shown[unit] = false;
    for_lent_pieces(e, unit, -1, hide_param);
}

void zr_show_grads(struct zr_engine *e, int32_t unit, int32_t slot)
{
    for_lent_pieces(e, unit, slot, show_grad);
    e->m.grad_shown[unit] = true;
    e->m.grad_slot[unit] = slot;
}

void zr_hide_grads(struct zr_engine *e, int32_t unit)
{
    e->m.grad_shown[unit] = false;
    for_lent_pieces(e, unit, -1, hide_grad);
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
        for_lent_pieces(e, u, -1, point_for_good);
}

/* ---- gradients in place, at stages 0 and 1 ---- */

/* The pointer follows what was counted. */
static void lend(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p)
{
    const struct zr_lending *l = &e->m.lending[p->tensor];
    bool away = l->n_in_flight && !l->n_open;
    zr_point_grad(e, p->tensor,
                  away ? zr_model_check_closed(e->watch, p->tensor, true) : grad_pointer(e, f, p, -1));
}

static void lend_open(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p, int32_t slot)
{
    (void)slot;
    if (!f->trainable)
        return;
    struct zr_lending *l = &e->m.lending[p->tensor];
    l->n_open++;
    l->n_in_flight -= e->m.in_flight[f->unit];
    lend(e, f, p);
}

static void lend_close(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p, int32_t slot)
{
    (void)slot;
    if (!f->trainable)
        return;
    e->m.lending[p->tensor].n_open--;
    e->m.lending[p->tensor].n_in_flight += e->m.in_flight[f->unit];
    lend(e, f, p);
}

static void lend_again(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p, int32_t slot)
{
    (void)slot;
    if (!f->trainable)
        return;
    e->m.lending[p->tensor].n_in_flight--;
    lend(e, f, p);
}

void zr_lend_unit(struct zr_engine *e, int32_t unit)
{
    for_lent_pieces(e, unit, -1, lend_open);
    for (int32_t i = 0; e->m.in_flight[unit] && i < e->m.n_flying; i++)
        if (e->m.flying[i] == unit)
            e->m.flying[i] = e->m.flying[--e->m.n_flying];
    e->m.in_flight[unit] = false;
    e->m.bracketed[unit] = true;
}

void zr_take_unit(struct zr_engine *e, int32_t unit, bool in_flight)
{
    e->m.in_flight[unit] = in_flight;
    if (in_flight)
        e->m.flying[e->m.n_flying++] = unit;
    for_lent_pieces(e, unit, -1, lend_close);
}

void zr_lend_again(struct zr_engine *e, int32_t unit)
{
    for_lent_pieces(e, unit, -1, lend_again);
    e->m.in_flight[unit] = false;
}
