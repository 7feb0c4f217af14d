/* SPDX-License-Identifier: Apache-2.0 */
/* gather_all.c: gathers all parameters at once, until they are released (zero_gather_all).
 *
 * At stages 0 and 1 the model has them anyway. At stages 2 and 3 its pointers are NULL outside brackets, and
 * layers of a stacked tensor may lie apart. So every tensor is copied whole into extra memory. The units are
 * gathered into the slots in turn and copied from there. A tensor that is already whole (not stacked, in a
 * resident unit) is not copied. In check mode on a CPU, tensors are in guarded memory, which may then only be
 * read. */
#include "kernels/alloc.h"
#include "shard/engine/internal.h"

#include <stdlib.h>

/* The copies of one zero_gather_all. */
struct zr_all {
    /* memory for copies, and its bytes; NULL: none */
    char *base;
    int64_t bytes;
    /* the device is a GPU, and base is host memory */
    bool on_host;
    /* (n_tensors) offset in it; -1: the tensor lies whole elsewhere */
    int64_t at[];
};

/* Whether check mode has tensors in guarded memory. */
static bool is_guarded(const struct zr_engine *e)
{
    int32_t t = 0;
    while (t < e->layout->n_tensors && e->layout->tensors[t].buffer)
        t++;
    return t < e->layout->n_tensors && zr_observed_closed(e, t, /* grad */ false);
}

/* Whether a tensor needs a copy, because it is not whole at one address. */
static bool is_copied(const struct zr_engine *e, int32_t tensor, bool on_host)
{
    const struct zr_tensor *t = &e->layout->tensors[tensor];
    if (t->buffer) /* is whole already */
        return false;
    if (on_host)
        return true;
    if (e->plan->placement.model_holds)
        return false;
    return t->n_layers > 1 || !e->plan->resident[t->unit];
}

static int64_t tensor_bytes(const struct zr_tensor *t)
{
    return t->n_elems * zr_dtype_bytes(t->dtype);
}

int64_t zr_engine_all_bytes(const struct zr_engine *e, bool on_host)
{
    int64_t bytes = 0;
    for (int32_t t = 0; t < e->layout->n_tensors; t++)
        if (is_copied(e, t, on_host))
            bytes += zr_round_up(tensor_bytes(&e->layout->tensors[t]), ZR_PIECE_ALIGN);
    return bytes;
}

int zr_engine_all_open(struct zr_engine *e, bool on_host)
{
    const struct zr_device_ops *d = e->dev->ops;
    bool guarded = is_guarded(e) && !on_host;
    struct zr_all *all = NULL;
    void *base = NULL;
    int64_t end = 0;
    ZR_TRY(ZR_ZALLOC_ARRAY(all, sizeof *all, e->layout->n_tensors, sizeof *all->at, "%d tensors",
                           e->layout->n_tensors));
    for (int32_t t = 0; t < e->layout->n_tensors; t++) {
        bool copied = !guarded && is_copied(e, t, on_host);
        all->at[t] = copied ? end : -1;
        end += copied ? zr_round_up(tensor_bytes(&e->layout->tensors[t]), ZR_PIECE_ALIGN) : 0;
    }
    int err = 0;
    if (end)
        err = on_host ? d->host_alloc(e->dev, end, &base) : d->alloc(e->dev, end, &base);
    if (err) {
        free(all);
        return err;
    }
    all->base = base;
    all->bytes = end;
    all->on_host = on_host;
    e->m.all = all;
    return 0;
}

void zr_engine_all_close(struct zr_engine *e)
{
    const struct zr_device_ops *d = e->dev->ops;
    struct zr_all *all = e->m.all;
    if (all && all->base && all->on_host)
        d->host_free(e->dev, all->base, all->bytes);
    else if (all && all->base)
        d->free(e->dev, all->base, all->bytes);
    free(all);
    e->m.all = NULL;
}

/* Returns the whole tensor's copy, or guarded memory. NULL: the tensor is whole in its usual memory. */
static char *whole_at(const struct zr_engine *e, int32_t tensor)
{
    if (e->m.all->at[tensor] >= 0)
        return e->m.all->base + e->m.all->at[tensor];
    return zr_observed_closed(e, tensor, /* grad */ false);
}

int zr_all_keep(struct zr_engine *e, int32_t unit, int32_t slot)
{
    const struct zr_unit *u = &e->layout->units[unit];
    int err = 0;
    for (int32_t i = 0; i < u->n_flats; i++) {
        const struct zr_flat *f = &e->layout->flats[u->first_flat + i];
        int64_t size = zr_dtype_bytes(f->dtype);
        const char *full = e->gather_base + zr_plan_param_full(e->plan, f, slot);
        for (int32_t k = 0; !err && k < f->n_pieces; k++) {
            const struct zr_piece *p = &e->layout->pieces[f->first_piece + k];
            char *to = whole_at(e, p->tensor);
            if (to && p->n)
                err = e->dev->ops->copy(e->compute, to + p->layer * p->n * size, full + p->first * size,
                                        p->n * size);
        }
    }
    return err;
}

/* Points the model at whole tensors, or back to what it has outside brackets. */
static void point_model(struct zr_engine *e, bool whole)
{
    for (int32_t t = 0; t < e->layout->n_tensors; t++) {
        const struct zr_tensor *x = &e->layout->tensors[t];
        if (x->buffer)
            continue;
        int32_t id = e->layout->piece_of[e->layout->layer_base[t]];
        const struct zr_flat *f = zr_piece_flat(e->layout, id);
        char *home = NULL; /* usual address of layer 0, which the other layers follow; NULL: none */
        if (e->plan->placement.model_holds || (e->plan->resident[x->unit] && x->n_layers == 1))
            home = e->gather_base + zr_plan_param_full(e->plan, f, -1) +
                   e->layout->pieces[id].first * zr_dtype_bytes(f->dtype);
        char *to = whole ? whole_at(e, t) : zr_observed_closed(e, t, /* grad */ false);
        if (!to && (whole || e->plan->placement.model_holds))
            to = home;
        zr_point_param(e, t, to);
    }
}

int zr_engine_all_gather(struct zr_engine *e, int32_t where)
{
    int err = zr_observe_begin(e, &(struct zr_grant){.kind = ZR_GRANT_ALL});
    if (!err)
        err = zr_engine_call(e, &(struct zr_core_event){.kind = ZR_EV_GATHER_ALL, .unit = where});
    if (!err)
        err = zr_observe_begin(e, &(struct zr_grant){.kind = ZR_GRANT_ALL, .ready = true});
    if (!err)
        err = zr_engine_drain(e);
    if (err)
        return zr_engine_fail(e, err, zr_error_text());
    point_model(e, /* whole */ true);
    return 0;
}

int zr_engine_all_release(struct zr_engine *e)
{
    int err = zr_engine_call(e, &(struct zr_core_event){.kind = ZR_EV_RELEASE_ALL, .unit = -1});
    if (err)
        return err;
    err = zr_engine_drain(e); /* until then, operations on the model's stream may read it */
    if (!err)
        err = zr_observe_end(e, &(struct zr_grant){.kind = ZR_GRANT_ALL});
    if (err)
        return zr_engine_fail(e, err, zr_error_text());
    point_model(e, /* whole */ false);
    zr_engine_all_close(e);
    return 0;
}
