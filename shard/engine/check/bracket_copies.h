/* SPDX-License-Identifier: Apache-2.0 */
/* bracket_copies.h: where a checked model (cfg.debug.check) sees its units on a GPU, whose memory cannot be
 * closed like the host's (kernels/check/guard.h).
 *
 * Each bracket gets a copy of its unit in one of several blocks of memory, taken in turn. At its end a
 * gradient is copied back, and the copy is filled with NaN. All of this is in the order of the model's
 * stream. So a pointer that the model kept reads NaN, not another unit's values. A write by such a pointer is
 * found too: before a copy is used again, and at each step, the host checks that it is NaN throughout. For
 * this the host waits for the GPU.
 *
 * This takes device memory besides the plan's: N_COPIES copies of the largest unit's parameters, as many of
 * the largest gradient, and a block of NaN to fill them from. It also takes page-locked host memory to look
 * at one copy. If more brackets are open at once, there are more copies. */
#ifndef ZR_SHARD_CHECK_BRACKET_COPIES_H
#define ZR_SHARD_CHECK_BRACKET_COPIES_H

#include "shard/layout.h"

struct zr_engine;
struct zr_bracket_copies;

/* Opens the copies, once the engine has streams and layout. On failure nothing is left. */
int zr_bracket_copies_open(struct zr_engine *e, struct zr_bracket_copies **out);
/* Frees the device's memory, when the streams are done. If they never will be, do not call it. p may be
 * NULL. */
void zr_bracket_copies_give_back(struct zr_bracket_copies *p);
/* Frees the rest. p may be NULL. */
void zr_bracket_copies_close(struct zr_bracket_copies *p);

/* Returns the bytes of device memory that opening takes. */
int64_t zr_bracket_copies_need(const struct zr_layout *l);

/* Returns the address of a piece of an open unit. */
char *zr_bracket_copies_at(const struct zr_bracket_copies *p, const struct zr_piece *piece, bool grad);

/* Begin and end a bracket of the unit; slot as in struct zr_action. Return ZERO_ERR_ORDER with a message if
 * the model wrote to a copy that no bracket has. */
int zr_bracket_copies_begin(struct zr_bracket_copies *p, int32_t unit, int32_t slot, bool grad);
int zr_bracket_copies_end(struct zr_bracket_copies *p, int32_t unit, int32_t slot, bool grad);
/* Checks all copies that no bracket has, with the same error. */
int zr_bracket_copies_look(struct zr_bracket_copies *p);

#endif
