/* SPDX-License-Identifier: Apache-2.0 */
/* places.h: where a model that is checked (cfg.debug.check) sees its units on a GPU, whose memory
 * cannot be closed to it as the host's can (kernels/check/guard.h).
 *
 * Each bracket copies its unit to one of several places, taken in turn, and a gradient back when it ends;
 * then the place is filled with NaN. All in the order of the model's stream. So a pointer that the model kept
 * reads NaN, not another unit's values, and what it writes by one is found: before a place is used again, and
 * at each step, the host looks whether it is NaN throughout. For that it waits for the GPU.
 *
 * Besides the plan's memory there are PLACES places of the largest unit's parameters, as many of the largest
 * gradient, one NaN to fill them from, and page-locked host memory to look at one. More brackets open at once
 * take more places. */
#ifndef ZR_SHARD_CHECK_PLACES_H
#define ZR_SHARD_CHECK_PLACES_H

#include "shard/layout.h"

struct zr_engine;
struct zr_places;

/* After the engine's streams and layout are there; on failure nothing is left. */
int zr_places_open(struct zr_engine *e, struct zr_places **out);
/* Gives the memory back: when the streams are done, and not at all where they never will be. NULL is allowed.
 */
void zr_places_give_back(struct zr_places *p);
/* Frees the rest. NULL is allowed. */
void zr_places_close(struct zr_places *p);

/* Bytes of the device's that opening takes. */
int64_t zr_places_need(const struct zr_layout *l);

/* Where a piece of an open unit lies. */
char *zr_places_at(const struct zr_places *p, const struct zr_piece *piece, bool grad);

/* A bracket of the unit begins, or ends; slot as in struct zr_action. ZR_ERR_ORDER with a message when the
 * model wrote to a place that was closed. */
int zr_places_begin(struct zr_places *p, int32_t unit, int32_t slot, bool grad);
int zr_places_end(struct zr_places *p, int32_t unit, int32_t slot, bool grad);
/* Looks at all that are closed: as above. */
int zr_places_look(struct zr_places *p);

#endif
