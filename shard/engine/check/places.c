/* SPDX-License-Identifier: Apache-2.0 */
/* places.c: copies of units for a model that is checked on a GPU. They are opened, filled with NaN when they
 * are closed, and checked. */
#include "shard/engine/check/places.h"
#include "kernels/alloc.h"
#include "shard/engine/internal.h"
#include "shard/engine/issue.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Places of each kind, at first. A place that was a bracket's is used again after five more brackets of the
 * kind at the earliest. */
enum { PLACES = 7 };

struct place {
    char *at;
    int32_t unit; /* unit of its current or last bracket; -1: none yet */
    uint32_t step;
    bool open, suspect; /* suspect: closed, and not checked since */
};

/* The places for parameters, or for gradients. */
struct role {
    int64_t bytes; /* bytes of a place; 0: no unit needs one */
    struct place *places;
    int32_t n, next;
    int32_t *of_unit;     /* (n_units) the unit's open place, or its last; -1: none yet */
    int32_t *before_last; /* (n_units) the unit's place before that */
};

struct zr_places {
    struct zr_engine *e;
    struct role role[2];
    char *nan, *seen; /* device memory; host memory */
    int64_t bytes;    /* of each of the two */
    struct zr_event *copied;
};

/* ---- opening ---- */

static int add_place(struct zr_places *p, struct role *r)
{
    const struct zr_device_ops *d = p->e->dev->ops;
    void *at;
    ZR_TRY(ZR_GROW(r->places, r->n + 1, "the check of %d places", r->n + 1));
    ZR_TRY(d->alloc(p->e->dev, r->bytes, &at));
    r->places[r->n++] = (struct place){.at = at, .unit = -1};
    return d->copy(p->e->compute, at, p->nan, r->bytes);
}

static int open_nan(struct zr_places *p)
{
    const struct zr_device_ops *d = p->e->dev->ops;
    void *at;
    int err = d->alloc(p->e->dev, p->bytes, &at);
    if (err)
        return err;
    p->nan = at;
    err = d->host_alloc(p->e->dev, p->bytes, &at);
    if (err)
        return err;
    p->seen = at;
    memset(p->seen, 0xff, (size_t)p->bytes); /* NaN in every dtype */
    err = d->event_open(p->e->dev, &p->copied);
    if (!err)
        err = d->copy(p->e->compute, p->nan, p->seen, p->bytes);
    return err ? err : d->stream_sync(p->e->compute);
}

static int64_t place_bytes(const struct zr_layout *l, bool grad)
{
    int64_t bytes = 0;
    for (int32_t u = 0; u < l->n_units; u++)
        bytes = zr_max(bytes, grad ? l->units[u].grad_bytes : l->units[u].param_bytes);
    return bytes;
}

int64_t zr_places_need(const struct zr_layout *l)
{
    int64_t param = place_bytes(l, false), grad = place_bytes(l, true);
    return PLACES * (param + grad) + zr_max(param, grad);
}

int zr_places_open(struct zr_engine *e, struct zr_places **out)
{
    const struct zr_layout *l = e->layout;
    struct zr_places *p;
    *out = NULL;
    ZR_TRY(ZR_ZALLOC(p, 1, "the check of places"));
    p->e = e;
    int err = 0;
    for (int grad = 0; grad < 2; grad++) {
        struct role *r = &p->role[grad];
        r->bytes = place_bytes(l, grad);
        p->bytes = zr_max(p->bytes, r->bytes);
        r->of_unit = malloc((size_t)l->n_units * sizeof *r->of_unit);
        r->before_last = malloc((size_t)l->n_units * sizeof *r->before_last);
        for (int32_t u = 0; r->of_unit && r->before_last && u < l->n_units; u++)
            r->of_unit[u] = r->before_last[u] = -1;
        if (!r->of_unit || !r->before_last)
            err = zr_fail(ZERO_ERR_NOMEM, "check: no memory for the places of %d units", l->n_units);
    }
    if (!err)
        err = open_nan(p);
    for (int i = 0; i < 2 * PLACES; i++)
        if (!err && p->role[i % 2].bytes)
            err = add_place(p, &p->role[i % 2]);
    if (err) {
        zr_places_give_back(p);
        zr_places_close(p);
        return err;
    }
    *out = p;
    return 0;
}

void zr_places_give_back(struct zr_places *p)
{
    if (!p)
        return;
    const struct zr_device_ops *d = p->e->dev->ops;
    for (int grad = 0; grad < 2; grad++)
        for (struct role *r = &p->role[grad]; r->n;)
            d->free(p->e->dev, r->places[--r->n].at, r->bytes);
    if (p->nan)
        d->free(p->e->dev, p->nan, p->bytes);
    if (p->seen)
        d->host_free(p->e->dev, p->seen, p->bytes);
    d->event_close(p->copied);
    p->nan = p->seen = NULL;
    p->copied = NULL;
}

void zr_places_close(struct zr_places *p)
{
    if (!p)
        return;
    for (int grad = 0; grad < 2; grad++) {
        free(p->role[grad].places);
        free(p->role[grad].of_unit);
        free(p->role[grad].before_last);
    }
    free(p);
}

/* ---- addresses ---- */

static int64_t flat_at(const struct zr_flat *f, bool grad)
{
    return grad ? f->grad_at : f->param_at;
}

char *zr_places_at(const struct zr_places *p, const struct zr_piece *piece, bool grad)
{
    const struct zr_layout *l = p->e->layout;
    const struct zr_flat *f = zr_piece_flat(l, (int32_t)(piece - l->pieces));
    const struct role *r = &p->role[grad];
    return r->places[r->of_unit[f->unit]].at + flat_at(f, grad) + piece->first * zr_dtype_bytes(f->dtype);
}

/* ---- checking ---- */

/* Reports that byte `at` of a closed place has been written. `was` has the unit that the place was for. */
static int fault(const struct zr_places *p, const struct place *was, bool grad, int64_t at)
{
    const struct zr_layout *l = p->e->layout;
    const struct zr_unit *u = &l->units[was->unit];
    const struct zr_tensor *t = NULL;
    int64_t element = 0;
    for (int32_t i = 0; i < u->n_flats; i++) {
        const struct zr_flat *f = &l->flats[u->first_flat + i];
        int64_t n = (at - flat_at(f, grad)) / zr_dtype_bytes(f->dtype);
        for (int32_t k = 0; (!grad || f->trainable) && at >= flat_at(f, grad) && k < f->n_pieces; k++) {
            const struct zr_piece *q = &l->pieces[f->first_piece + k];
            if (n >= q->first && n < q->first + q->n) {
                t = &l->tensors[q->tensor];
                element = q->layer * q->n + n - q->first;
            }
        }
    }
    char where[128] = "memory beside its tensors";
    if (t)
        snprintf(where, sizeof where, "%stensor %.64s (element %lld)", grad ? "the gradient of " : "",
                 t->name, (long long)element);
    zr_fail(ZERO_ERR_ORDER,
            "check: the model's fault: after zero_end of unit %d in %s, step %u, it wrote %s outside its "
            "bracket, "
            "by a pointer that it kept",
            was->unit, grad ? "backward" : "forward or backward", was->step, where);
    zr_warn(p->e->opt.log, "%s", zr_error_text());
    return ZERO_ERR_ORDER;
}

static int look_at_place(struct zr_places *p, struct place *was, bool grad)
{
    struct zr_engine *e = p->e;
    const struct zr_device_ops *d = e->dev->ops;
    int64_t n = p->role[grad].bytes;
    if (!was->suspect)
        return 0;
    was->suspect = false;
    ZR_TRY(d->copy(e->compute, p->seen, was->at, n));
    ZR_TRY(d->event_record(p->copied, e->compute));
    ZR_TRY(zr_engine_wait(e, p->copied));
    struct zr_access seen = {p->seen, n, false};
    zr_declare(e->dev, NULL, &seen, 1);
    for (int64_t i = 0; i < n; i++)
        if ((unsigned char)p->seen[i] != 0xff)
            return fault(p, was, grad, i);
    return 0;
}

int zr_places_look(struct zr_places *p)
{
    int err = 0;
    for (int grad = 0; !err && grad < 2; grad++)
        for (int32_t i = 0; !err && i < p->role[grad].n; i++)
            err = look_at_place(p, &p->role[grad].places[i], grad);
    return err;
}

/* ---- brackets ---- */

static int copy_unit(struct zr_places *p, struct place *at, int32_t slot, bool grad, bool back)
{
    struct zr_engine *e = p->e;
    const struct zr_unit *u = &e->layout->units[at->unit];
    int err = 0;
    for (int32_t i = 0; !err && i < u->n_flats; i++) {
        const struct zr_flat *f = &e->layout->flats[u->first_flat + i];
        char *own = grad ? e->reduce_base + zr_plan_grad_full(e->plan, f, slot)
                         : e->gather_base + zr_plan_param_full(e->plan, f, slot);
        char *shown = at->at + flat_at(f, grad);
        if (!grad || f->trainable)
            err = e->dev->ops->copy(e->compute, back ? own : shown, back ? shown : own, f->inner.total);
    }
    return err;
}

/* Returns the next free place in turn. It is not where the unit was in its last two brackets, because a
 * pointer kept from there would be right by chance. Returns n if none is free. */
static int32_t next_place(const struct role *r, int32_t unit)
{
    for (int32_t k = 0; k < r->n; k++) {
        int32_t i = (r->next + k) % r->n;
        if (!r->places[i].open && i != r->of_unit[unit] && i != r->before_last[unit])
            return i;
    }
    return r->n;
}

int zr_places_begin(struct zr_places *p, int32_t unit, int32_t slot, bool grad)
{
    struct role *r = &p->role[grad];
    if (!r->bytes)
        return 0;
    int32_t i = next_place(r, unit);
    int err = i < r->n ? look_at_place(p, &r->places[i], grad) : add_place(p, r);
    if (err)
        return err;
    r->before_last[unit] = r->of_unit[unit];
    struct place *at = &r->places[i];
    at->unit = unit;
    at->open = true;
    r->of_unit[unit] = i;
    r->next = (i + 1) % r->n;
    return copy_unit(p, at, slot, grad, false);
}

int zr_places_end(struct zr_places *p, int32_t unit, int32_t slot, bool grad)
{
    struct role *r = &p->role[grad];
    if (!r->bytes)
        return 0;
    struct place *at = &r->places[r->of_unit[unit]];
    int err = grad ? copy_unit(p, at, slot, true, true) : 0;
    at->open = false;
    at->suspect = true;
    at->step = zr_step_number(p->e);
    return err ? err : p->e->dev->ops->copy(p->e->compute, at->at, p->nan, r->bytes);
}
