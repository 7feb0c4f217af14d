/* SPDX-License-Identifier: Apache-2.0 */
/* places.h: where a checked model (cfg.debug.check) sees its units on a GPU, whose memory cannot be closed
 * like the host's (kernels/check/guard.h).
 *
 * Each bracket copies its unit to one of several places, taken in turn. At its end a gradient is copied back,
 * and the place is filled with NaN. All of this is in the order of the model's stream. So a pointer that the
 * model kept reads NaN, not another unit's values. A write by such a pointer is found too: before a place is
 * used again, and at each step, the host checks that it is NaN throughout. For this the host waits for the
 * GPU.
 *
 * This takes device memory besides the plan's: PLACES places of the largest unit's parameters, as many of the
 * largest gradient, and a block of NaN to fill them from. It also takes page-locked host memory to look at
 * one place. If more brackets are open at once, there are more places. */
#ifndef ZR_SHARD_CHECK_PLACES_H
#define ZR_SHARD_CHECK_PLACES_H

#include "shard/layout.h"

struct zr_engine;
struct zr_places;

/* Opens the places, once the engine has streams and layout. On failure nothing is left. */
int zr_places_open(struct zr_engine *e, struct zr_places **out);
/* Frees the device's memory, when the streams are done. If they never will be, do not call it. p may be
 * NULL. */
void zr_places_give_back(struct zr_places *p);
/* Frees the rest. p may be NULL. */
void zr_places_close(struct zr_places *p);

/* Returns the bytes of device memory that opening takes. */
int64_t zr_places_need(const struct zr_layout *l);

/* Returns the address of a piece of an open unit. */
char *zr_places_at(const struct zr_places *p, const struct zr_piece *piece, bool grad);

/* Begin and end a bracket of the unit; slot as in struct zr_action. Return ZERO_ERR_ORDER with a message if
 * the model wrote to a closed place. */
int zr_places_begin(struct zr_places *p, int32_t unit, int32_t slot, bool grad);
int zr_places_end(struct zr_places *p, int32_t unit, int32_t slot, bool grad);
/* Checks all closed places, with the same error. */
int zr_places_look(struct zr_places *p);

#endif
