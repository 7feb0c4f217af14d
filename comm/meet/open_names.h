/* SPDX-License-Identifier: Apache-2.0 */
/* open_names.h: the contexts of this process that meet other ranks, each with its name and meeting point.
 *
 * Several contexts of one process may meet the same ranks at the same point at the same time, if their names
 * differ. Only one of them can listen there, so the rank 0s of one process take turns. The one that listens
 * passes a connection to the context whose name it asks for. Two contexts with one name could be mixed up
 * between ranks, so the second is refused.
 *
 * The list belongs to the process. A forked child begins with an empty one. All functions are safe on any
 * thread. */
#ifndef ZR_COMM_OPEN_NAMES_H
#define ZR_COMM_OPEN_NAMES_H

#include "comm/meet/handshake.h"
#include "comm/meet/rendezvous.h"

/* One context, from before it meets the others until it is closed. */
struct zr_open_name;

/* Adds the context of w. where is its meeting point. NULL: w's host and port, or its file. Returns
 * ZERO_ERR_ARG if another context has the same name, rank, world and meeting point, or ZERO_ERR_NOMEM. */
int zr_open_name_take(const struct zr_world *w, const char *where, struct zr_open_name **out);
/* NULL is allowed. */
void zr_open_name_drop(struct zr_open_name *e);

/* Waits up to ms until no other context of this process with the same rank is opening communicators, between
 * begin and end. Returns false if that takes longer. NULL does nothing. */
bool zr_open_name_begin(struct zr_open_name *e, int64_t ms);
void zr_open_name_end(struct zr_open_name *e);

/* Rank 0: whether it may listen at its meeting point now, because no other context of this process does. It
 * counts as listening until zr_open_name_listened. NULL may always listen. */
bool zr_open_name_may_listen(struct zr_open_name *e);
void zr_open_name_listened(struct zr_open_name *e);

/* A connection that another context accepted, and the HELLO that came on it. */
struct zr_handed {
    struct zr_handed *next;
    int fd;
    uint8_t nonce_0[ZR_NONCE_BYTES];
    struct zr_frame frame;
    struct zr_hello hello;
};

/* Rank 0 awaits connections: async is sent for each that is passed to it. NULL ends that, and async may be
 * closed afterwards. */
void zr_open_name_await(struct zr_open_name *e, uv_async_t *async);
/* Returns the next connection that was passed on; release it with free. NULL: there is none. */
struct zr_handed *zr_open_name_next(struct zr_open_name *e);
/* Passes a copy of fd to the context at the same meeting point that has the name in hello. Returns false if
 * no such context awaits it. */
bool zr_open_name_hand(struct zr_open_name *e, int fd, const struct zr_shake *s, const struct zr_frame *f,
                       const struct zr_hello *hello);

#endif
