/* SPDX-License-Identifier: Apache-2.0 */
/* observers.c: the list of all observers, and the gradients that several of them go through. */
#include "shard/engine/check/observers.h"
#include "shard/engine/internal.h"

int zr_check_open_observers(struct zr_engine *e, const struct zr_engine_parts *parts)
{
    /* zr_stored fills a gradient before zr_model_check copies it to guarded memory. At the end the order is
     * reversed, so zr_stored checks what was copied back. */
    ZR_TRY(zr_changed_gradients_open(e));
    ZR_TRY(zr_unwritten_open(e));
    ZR_TRY(zr_stored_open(e, parts));
    ZR_TRY(zr_model_check_open(e, parts));
    ZR_TRY(zr_lost_gradients_open(e));
    ZR_TRY(zr_slots_open(e, parts));
    return zr_replicas_open(e);
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
