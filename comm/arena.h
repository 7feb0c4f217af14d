/* SPDX-License-Identifier: Apache-2.0 */
/* arena.h: the two kinds of arenas that several backends use: memory of the device, which no other rank
 * reads, and memory that ranks of the same host map. */
#ifndef ZR_COMM_ARENA_H
#define ZR_COMM_ARENA_H

#include "comm/comm.h"

/* Both make a zeroed arena, and neither is collective. who is the backend's name, for messages. Errors are
 * ZERO_ERR_NOMEM, ZERO_ERR_SYSTEM, and those of the device. */

/* The device must outlive the arena. Also returns ZERO_ERR_ARG if bytes is not more than 0. */
int zr_plain_arena(struct zr_device *dev, const char *who, int64_t bytes, struct zr_arena **out);
/* name is the file's name in /proc (shared_memory.h). */
int zr_shared_arena(const char *who, const char *name, int64_t bytes, struct zr_arena **out);

/* The file that other ranks map. -1 for a plain arena. */
int zr_arena_fd(const struct zr_arena *a);

/* Zeroes memory of the device. Blocks. */
int zr_plain_zero(struct zr_device *dev, void *at, int64_t bytes);

#endif
