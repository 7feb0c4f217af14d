/* SPDX-License-Identifier: Apache-2.0 */
/* arena.h: the two kinds of arenas that several backends use: memory of the device, which no other rank
 * reads, and memory that ranks of the same host map. */
#ifndef ZR_COMM_ARENA_H
#define ZR_COMM_ARENA_H

#include "comm/comm.h"

/* Both are zero, and not collective. who: the backend, for messages. ZR_ERR_NOMEM, ZR_ERR_SYSTEM, and what
 * the device says. */

/* The device must outlive it. ZR_ERR_ARG too, if bytes is not more than 0. */
int zr_plain_arena(struct zr_device *dev, const char *who, int64_t bytes, struct zr_arena **out);
/* name: of the file, for /proc (shared_memory.h). */
int zr_shared_arena(const char *who, const char *name, int64_t bytes, struct zr_arena **out);

/* The file that other ranks map. -1: it is a plain arena. */
int zr_arena_fd(const struct zr_arena *a);

/* Zeroes memory of the device. Blocks. */
int zr_plain_zero(struct zr_device *dev, void *at, int64_t bytes);

#endif
