/* SPDX-License-Identifier: Apache-2.0 */
/* bracket_copies.c: copies of units for a model that is checked on a GPU. A bracket has one while it is open.
 * When it ends, the copy is filled with NaN, and checked later. */
#include "shard/engine/check/bracket_copies.h"
#include "kernels/alloc.h"
#include "shard/engine/internal.h"
#include "shard/engine/issue.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Copies of each kind, at first. The copy of a bracket is used again after five more brackets of the kind at
 * the earliest. */
enum { N_COPIES = 7 };

struct copy {
    char *at;     /* address in device memory */
    int32_t unit; /* unit of its current or last bracket; -1: none yet */
    uint32_t step;
    bool open, unchecked; /* unchecked: its bracket has ended, and it was not checked since */
};

/* The copies for parameters, or for gradients. */
struct copy_set {
    int64_t bytes; /* of a copy; 0: no unit needs one */
    struct copy *copies;
    int32_t n, next;
    int32_t *of_unit;  /* (n_units) the unit's open copy, or its last; -1: none yet */
    int32_t *previous; /* (n_units) the unit's copy before that */
};

struct zr_bracket_copies {
    struct zr_engine *e;
    struct copy_set set[2];
    char *nan, *seen; /* bytes of NaN in device memory; host memory to look at a copy in */
    int64_t bytes;    /* of each of the two */
    struct zr_event *copied;
};

/* ---- opening ---- */

static int add_copy(struct zr_bracket_copies *p, struct copy_set *r)
{
    const struct zr_device_ops *d = p->e->dev->ops;
    void *at;
    ZR_TRY(ZR_GROW(r->copies, r->n + 1, "the check of %d places", r->n + 1));
    ZR_TRY(d->alloc(p->e->dev, r->bytes, &at));
    r->copies[r->n++] = (struct copy){.at = at, .unit = -1};
    return d->copy(p->e->compute, at, p->nan, r->bytes);
}

static int open_nan(struct zr_bracket_copies *p)
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

static int64_t copy_bytes(const struct zr_layout *l, bool grad)
{
    int64_t bytes = 0;
    for (int32_t u = 0; u < l->n_units; u++)
        bytes = zr_max(bytes, grad ? l->units[u].grad_bytes : l->units[u].param_bytes);
    return bytes;
}

int64_t zr_bracket_copies_need(const struct zr_layout *l)
{
    int64_t param = copy_bytes(l, false), grad = copy_bytes(l, true);
    return N_COPIES * (param + grad) + zr_max(param, grad);
}

int zr_bracket_copies_open(struct zr_engine *e, struct zr_bracket_copies **out)
{
    const struct zr_layout *l = e->layout;
    struct zr_bracket_copies *p;
    *out = NULL;
    ZR_TRY(ZR_ZALLOC(p, 1, "the check of places"));
    p->e = e;
    int err = 0;
    for (int grad = 0; grad < 2; grad++) {
        struct copy_set *r = &p->set[grad];
        r->bytes = copy_bytes(l, grad);
        p->bytes = zr_max(p->bytes, r->bytes);
        r->of_unit = malloc((size_t)l->n_units * sizeof *r->of_unit);
        r->previous = malloc((size_t)l->n_units * sizeof *r->previous);
        for (int32_t u = 0; r->of_unit && r->previous && u < l->n_units; u++)
            r->of_unit[u] = r->previous[u] = -1;
        if (!r->of_unit || !r->previous)
            err = zr_fail(ZERO_ERR_NOMEM, "check: no memory for the places of %d units", l->n_units);
    }
    if (!err)
        err = open_nan(p);
    for (int i = 0; i < 2 * N_COPIES; i++)
        if (!err && p->set[i % 2].bytes)
            err = add_copy(p, &p->set[i % 2]);
    if (err) {
        zr_bracket_copies_give_back(p);
        zr_bracket_copies_close(p);
        return err;
    }
    *out = p;
    return 0;
}

void zr_bracket_copies_give_back(struct zr_bracket_copies *p)
{
    if (!p)
        return;
    const struct zr_device_ops *d = p->e->dev->ops;
    for (int grad = 0; grad < 2; grad++)
        for (struct copy_set *r = &p->set[grad]; r->n;)
            d->free(p->e->dev, r->copies[--r->n].at, r->bytes);
    if (p->nan)
        d->free(p->e->dev, p->nan, p->bytes);
    if (p->seen)
        d->host_free(p->e->dev, p->seen, p->bytes);
    d->event_close(p->copied);
    p->nan = p->seen = NULL;
    p->copied = NULL;
}

void zr_bracket_copies_close(struct zr_bracket_copies *p)
{
    if (!p)
        return;
    for (int grad = 0; grad < 2; grad++) {
        free(p->set[grad].copies);
        free(p->set[grad].of_unit);
        free(p->set[grad].previous);
    }
    free(p);
}

/* ---- addresses ---- */

static int64_t flat_at(const struct zr_flat *f, bool grad)
{
    return grad ? f->grad_at : f->param_at;
}

char *zr_bracket_copies_at(const struct zr_bracket_copies *p, const struct zr_piece *piece, bool grad)
{
    const struct zr_layout *l = p->e->layout;
    const struct zr_flat *f = zr_piece_flat(l, (int32_t)(piece - l->pieces));
    const struct copy_set *r = &p->set[grad];
    return r->copies[r->of_unit[f->unit]].at + flat_at(f, grad) + piece->first * zr_dtype_bytes(f->dtype);
}

/* ---- checking ---- */

/* Reports that byte `at` of a copy has been written after the bracket that had it. */
static int fault(const struct zr_bracket_copies *p, const struct copy *copy, bool grad, int64_t at)
{
    const struct zr_layout *l = p->e->layout;
    const struct zr_unit *u = &l->units[copy->unit];
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
            copy->unit, grad ? "backward" : "forward or backward", copy->step, where);
    zr_warn(p->e->opt.log, "%s", zr_error_text());
    return ZERO_ERR_ORDER;
}

/* Checks that a copy without a bracket is still NaN. */
static int check_copy(struct zr_bracket_copies *p, struct copy *copy, bool grad)
{
    struct zr_engine *e = p->e;
    const struct zr_device_ops *d = e->dev->ops;
    int64_t n = p->set[grad].bytes;
    if (!copy->unchecked)
        return 0;
    copy->unchecked = false;
    ZR_TRY(d->copy(e->compute, p->seen, copy->at, n));
    ZR_TRY(d->event_record(p->copied, e->compute));
    ZR_TRY(zr_engine_wait(e, p->copied));
    struct zr_access seen = {p->seen, n, false};
    zr_declare(e->dev, NULL, &seen, 1);
    for (int64_t i = 0; i < n; i++)
        if ((unsigned char)p->seen[i] != 0xff)
            return fault(p, copy, grad, i);
    return 0;
}

int zr_bracket_copies_look(struct zr_bracket_copies *p)
{
    int err = 0;
    for (int grad = 0; !err && grad < 2; grad++)
        for (int32_t i = 0; !err && i < p->set[grad].n; i++)
            err = check_copy(p, &p->set[grad].copies[i], grad);
    return err;
}

/* ---- brackets ---- */

/* Copies a unit's values to the bracket's copy, or back. */
static int copy_unit(struct zr_bracket_copies *p, struct copy *copy, int32_t slot, bool grad, bool back)
{
    struct zr_engine *e = p->e;
    const struct zr_unit *u = &e->layout->units[copy->unit];
    int err = 0;
    for (int32_t i = 0; !err && i < u->n_flats; i++) {
        const struct zr_flat *f = &e->layout->flats[u->first_flat + i];
        char *usual = grad ? e->reduce_base + zr_plan_grad_full(e->plan, f, slot)
                           : e->gather_base + zr_plan_param_full(e->plan, f, slot);
        char *bracket = copy->at + flat_at(f, grad);
        if (!grad || f->trainable)
            err =
                e->dev->ops->copy(e->compute, back ? usual : bracket, back ? bracket : usual, f->inner.total);
    }
    return err;
}

/* Returns the next free copy in turn. It is not one that the unit had in its last two brackets, because a
 * pointer kept from there would be right by chance. Returns n if none is free. */
static int32_t next_copy(const struct copy_set *r, int32_t unit)
{
    for (int32_t k = 0; k < r->n; k++) {
        int32_t i = (r->next + k) % r->n;
        if (!r->copies[i].open && i != r->of_unit[unit] && i != r->previous[unit])
            return i;
    }
    return r->n;
}

int zr_bracket_copies_begin(struct zr_bracket_copies *p, int32_t unit, int32_t slot, bool grad)
{
    struct copy_set *r = &p->set[grad];
    if (!r->bytes)
        return 0;
    int32_t i = next_copy(r, unit);
    int err = i < r->n ? check_copy(p, &r->copies[i], grad) : add_copy(p, r);
    if (err)
        return err;
    r->previous[unit] = r->of_unit[unit];
    struct copy *copy = &r->copies[i];
    copy->unit = unit;
    copy->open = true;
    r->of_unit[unit] = i;
    r->next = (i + 1) % r->n;
    return copy_unit(p, copy, slot, grad, false);
}

int zr_bracket_copies_end(struct zr_bracket_copies *p, int32_t unit, int32_t slot, bool grad)
{
    struct copy_set *r = &p->set[grad];
    if (!r->bytes)
        return 0;
    struct copy *copy = &r->copies[r->of_unit[unit]];
    int err = grad ? copy_unit(p, copy, slot, true, true) : 0;
    copy->open = false;
    copy->unchecked = true;
    copy->step = zr_step_number(p->e);
    return err ? err : p->e->dev->ops->copy(p->e->compute, copy->at, p->nan, r->bytes);
}
