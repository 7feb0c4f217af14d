/* SPDX-License-Identifier: Apache-2.0 */
/* engine_pointers.c: the model's own pointers: what was stored in them is still there, and fits every layer
 * that is open.
 *
 * A model that assigns one of them (a lazy allocation after zero_wrap, a struct copied over it) computes in
 * memory that nobody reduces, and a stacked tensor's base fits one layer at stages 2 and 3. Both are told at
 * the next call, before it changes anything. */
#include "shard/engine/engine_inside.h"

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

static const char *call_of(const struct zr_core_event *ev)
{
    return ev->kind == ZR_EV_BEGIN         ? "zero_begin"
           : ev->kind == ZR_EV_END         ? "zero_end"
           : ev->kind == ZR_EV_STEP        ? "zero_step"
           : ev->kind == ZR_EV_NORM        ? "zero_norm"
           : ev->kind == ZR_EV_DROP        ? "zero_drop"
           : ev->kind == ZR_EV_GATHER_ALL  ? "zero_gather_all"
           : ev->kind == ZR_EV_RELEASE_ALL ? "zero_release_all"
           : ev->kind == ZR_EV_EVALUATED   ? "zero_next"
                                           : "zero_micro";
}

static int moved(const struct zr_core_event *ev, const struct zr_tensor *t, const char *which, const void *is,
                 const void *reported)
{
    return zr_fail(ZR_ERR_ORDER,
                   "%s: *%s of tensor %s (unit %d) is %p; the library stored %p there. The model must not "
                   "assign it after zero_wrap: allocate before, read the pointer again after each "
                   "zero_begin, and restore the library's pointer",
                   call_of(ev), which, t->name, t->unit, is, reported);
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

/* Another layer of the tensor is open, and the model may still reckon with the base that fits it. */
static int check_layer(const struct zr_engine *e, int32_t unit, int32_t i)
{
    const struct zr_tensor *t = &e->layout->tensors[i];
    if (t->pointer_per_begin || e->m.n_shown_param[i] == e->m.param_shown[unit])
        return 0;
    int32_t other = t->unit;
    while (other == unit || !e->m.param_shown[other])
        other++;
    return zr_fail(ZR_ERR_ORDER,
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
