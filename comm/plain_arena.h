/* SPDX-License-Identifier: Apache-2.0 */
/* plain_arena.h: an arena that no other rank reads: memory of the device's. */
#ifndef ZR_COMM_PLAIN_ARENA_H
#define ZR_COMM_PLAIN_ARENA_H

#include "comm/comm.h"

/* Not collective. The device must outlive it. who: the backend, for messages. ZR_ERR_ARG, ZR_ERR_NOMEM, and
 * what the device says. */
int zr_plain_arena(struct zr_device *dev, const char *who, int64_t bytes, struct zr_arena **out);

/* Zeroes memory of the device's, blocking. */
int zr_plain_zero(struct zr_device *dev, void *at, int64_t bytes);

#endif
