/* SPDX-License-Identifier: Apache-2.0 */
/* observers.h: the observers that find misuse by the model. Each finds one kind and is one file. */
#ifndef ZR_SHARD_CHECK_OBSERVERS_H
#define ZR_SHARD_CHECK_OBSERVERS_H

#include "shard/engine/observer.h"

/* Installs all observers; some only in check mode (cfg.debug.check). For open_observers of struct
 * zr_engine_parts. */
int zr_check_open_observers(struct zr_engine *e, const struct zr_engine_parts *parts);

/* Install one observer, if there is something for it to watch. */
int zr_changed_gradients_open(struct zr_engine *e);
int zr_unwritten_open(struct zr_engine *e);
int zr_stored_open(struct zr_engine *e, const struct zr_engine_parts *parts);
int zr_model_check_open(struct zr_engine *e, const struct zr_engine_parts *parts);
int zr_lost_gradients_open(struct zr_engine *e);
int zr_slots_open(struct zr_engine *e, const struct zr_engine_parts *parts);
int zr_replicas_open(struct zr_engine *e);

/* Calls fn for each piece of the unit's trainable flats, until one fails. full, for fn: the flat's gradient
 * in that slot. */
typedef int (*zr_grad_piece_fn)(struct zr_observer *o, const struct zr_flat *f, const struct zr_piece *p,
                                char *full);
int zr_for_grad_pieces(struct zr_observer *o, int32_t unit, int32_t slot, zr_grad_piece_fn fn);

/* Returns the piece's gradient. full: the flat's gradient. */
static inline char *zr_grad_of_piece(const struct zr_flat *f, const struct zr_piece *p, char *full)
{
    return full + p->first * zr_dtype_bytes(f->dtype);
}

#endif
