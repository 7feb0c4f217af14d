/* SPDX-License-Identifier: Apache-2.0 */
/* observers.c: the list of all observers, and the calls that go to each of them. */
#include "shard/engine/check/observers.h"
#include "kernels/alloc.h"
#include "shard/engine/internal.h"
#include "shard/engine/issue.h"

#include <stdlib.h>

/* zr_stored fills a gradient before zr_model_check copies it to guarded memory. At the end the order is
 * reversed, so zr_stored checks what was copied back. */
static const zr_observer_open openers[] = {zr_in_place_open,    zr_unwritten_open,      zr_stored_open,
                                           zr_model_check_open, zr_lost_gradients_open, zr_slots_open};
_Static_assert(sizeof openers / sizeof *openers == ZR_MOST_OBSERVERS, "room for each");

int zr_observers_open(struct zr_engine *e, const struct zr_engine_parts *parts)
{
    for (int i = 0; i < ZR_MOST_OBSERVERS; i++) {
        struct zr_observer *o = NULL;
        int err = openers[i](e, parts, &o);
        if (o)
            e->observers.of[e->observers.n++] = o;
        if (err)
            return err;
    }
    return 0;
}

void zr_observers_give_back(struct zr_engine *e)
{
    for (int i = 0; i < e->observers.n; i++)
        if (e->observers.of[i]->ops->give_back)
            e->observers.of[i]->ops->give_back(e->observers.of[i]);
}

void zr_observers_close(struct zr_engine *e)
{
    while (e->observers.n) {
        struct zr_observer *o = e->observers.of[--e->observers.n];
        if (o->ops->close)
            o->ops->close(o);
        free(o);
    }
}

/* Calls a function of observer i, if it has one. An error ends the calling function. */
#define CALL_OBSERVER(i, function, ...)                                                                      \
    do {                                                                                                     \
        struct zr_observer *o = e->observers.of[i];                                                          \
        if (o->ops->function)                                                                                \
            ZR_TRY(o->ops->function(o, __VA_ARGS__));                                                        \
    } while (0)

int zr_observe_begin(struct zr_engine *e, const struct zr_grant *g)
{
    for (int i = 0; i < e->observers.n; i++)
        CALL_OBSERVER(i, on_begin, g);
    return 0;
}

int zr_observe_end(struct zr_engine *e, const struct zr_grant *g)
{
    for (int i = e->observers.n; i-- > 0;)
        CALL_OBSERVER(i, on_end, g);
    return 0;
}

int zr_observe_reduce(struct zr_engine *e, int32_t unit, enum zr_reduce_moment at)
{
    for (int i = 0; i < e->observers.n; i++)
        CALL_OBSERVER(i, on_reduce, unit, at);
    return 0;
}

int zr_observe_step(struct zr_engine *e, enum zr_step_moment at, const char *call)
{
    for (int i = 0; i < e->observers.n; i++)
        CALL_OBSERVER(i, on_step, at, call);
    return 0;
}

int zr_observer_new(struct zr_engine *e, const struct zr_observer_ops *ops, size_t bytes, int64_t n,
                    size_t size, struct zr_observer **out)
{
    ZR_TRY(ZR_ZALLOC_BYTES(*out, bytes + (size_t)n * size, "an observer of the model"));
    **out = (struct zr_observer){ops, e};
    return 0;
}

int zr_for_grad_pieces(struct zr_observer *o, int32_t unit, int32_t slot, zr_grad_piece_fn fn)
{
    const struct zr_layout *l = o->e->layout;
    const struct zr_unit *u = &l->units[unit];
    for (int32_t i = 0; i < u->n_flats; i++) {
        const struct zr_flat *f = &l->flats[u->first_flat + i];
        char *full = f->trainable ? o->e->reduce_base + zr_plan_grad_full(o->e->plan, f, slot) : NULL;
        for (int32_t k = 0; full && k < f->n_pieces; k++)
            ZR_TRY(fn(o, f, &l->pieces[f->first_piece + k], full));
    }
    return 0;
}
