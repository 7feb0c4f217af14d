/* SPDX-License-Identifier: Apache-2.0 */
/* observers.h: the functions that open each observer. *out stays NULL if there is nothing for it to watch. */
#ifndef ZR_SHARD_CHECK_OBSERVERS_H
#define ZR_SHARD_CHECK_OBSERVERS_H

#include "shard/engine/observer.h"

typedef int (*zr_observer_open)(struct zr_engine *e, const struct zr_engine_parts *parts,
                                struct zr_observer **out);

int zr_in_place_open(struct zr_engine *e, const struct zr_engine_parts *parts, struct zr_observer **out);
int zr_unwritten_open(struct zr_engine *e, const struct zr_engine_parts *parts, struct zr_observer **out);
int zr_stored_open(struct zr_engine *e, const struct zr_engine_parts *parts, struct zr_observer **out);
int zr_model_check_open(struct zr_engine *e, const struct zr_engine_parts *parts, struct zr_observer **out);
int zr_lost_gradients_open(struct zr_engine *e, const struct zr_engine_parts *parts,
                           struct zr_observer **out);
int zr_slots_open(struct zr_engine *e, const struct zr_engine_parts *parts, struct zr_observer **out);

/* For opening: allocates `bytes`, which begin with a struct zr_observer, and then n elements of size bytes,
 * all zero. They are freed when the observer is closed. */
int zr_observer_new(struct zr_engine *e, const struct zr_observer_ops *ops, size_t bytes, int64_t n,
                    size_t size, struct zr_observer **out);

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
