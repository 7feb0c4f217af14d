/* SPDX-License-Identifier: Apache-2.0 */
/* link.h: frames over one TCP connection of a libuv loop. A rendezvous uses nothing else.
 *
 * A link belongs to its loop's thread. It frees itself once its handle is closed. Before that it calls
 * on_closed, in which the owner must drop its pointer. After on_end, zr_link_finish and zr_link_drop no more
 * frames are delivered. */
#ifndef ZR_COMM_LINK_H
#define ZR_COMM_LINK_H

#include "comm/fork.h"
#include "comm/meet/frame.h"
#include "comm/meet/handshake.h"
#include "comm/meet/net_address.h"
#include "kernels/error.h"

#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

struct zr_link;

struct zr_link_calls {
    /* status is 0, or a libuv error, after which the owner drops the link. */
    void (*on_connect)(struct zr_link *l, int status);
    /* payload: f->n_bytes bytes and a 0 after them (NULL: none), valid during the call unless
     * zr_link_take_payload takes it over. */
    void (*on_frame)(struct zr_link *l, const struct zr_frame *f, const char *payload);
    /* A frame's payload is larger than the link allows. Return true to leave it there, and read nothing more
     * until zr_link_allow; return false to end the link. */
    bool (*on_large)(struct zr_link *l, const struct zr_frame *f);
    /* The link ends, and is dropped unless the owner calls zr_link_finish. Codes: ZERO_ERR_PEER: the other
     * end closed or broke. ZERO_ERR_MISMATCH: it sent something invalid. ZERO_ERR_NOMEM: there is no memory
     * for it. Not called after zr_link_finish or zr_link_drop. */
    void (*on_end)(struct zr_link *l, int code, const char *why);
    /* The link is freed after this call. */
    void (*on_closed)(struct zr_link *l);
};

struct zr_link {
    uv_tcp_t tcp;
    uv_connect_t connect;
    uv_shutdown_t shutdown;
    const struct zr_link_calls *calls;
    void *owner;
    /* Neighbours in the owner's list. */
    struct zr_link *prev, *next;
    /* Rank of the other end. -1: not known yet. */
    int rank;
    /* This end has connected, so the other end must be rank 0. */
    bool is_outgoing;
    /* The last frame is being sent; what comes in is ignored. */
    bool finishing;
    /* A large frame waits for zr_link_allow. Its head is in.head. */
    bool held;
    struct zr_frame_reader in;
    /* The contents of the handshake so far. */
    struct zr_shake shake;
    /* The socket, which is closed in forked children. */
    struct zr_kept_socket kept;
    /* For the owner: when it began to wait for the other end's proof. */
    int64_t since_ms;
    /* The loop's time when bytes last came in. */
    int64_t heard_ms;
    /* Address of the other end, for messages. */
    char peer[ZR_ADDRESS_CHARS];
    /* Receives what comes in while finishing. */
    char sink[512];
};

/* Makes a link without a connection. Returns NULL if there is no memory. */
struct zr_link *zr_link_new(uv_loop_t *loop, const struct zr_link_calls *calls, void *owner,
                            uint32_t most_bytes);
/* Starts to connect, from a local address with port 0, or from any if it is NULL. on_connect gets the result.
 * Returns a libuv error if it could not start. */
int zr_link_connect(struct zr_link *l, const union zr_address *from, const union zr_address *to);
/* Accepts the connection that waits on server. Returns a libuv error. */
int zr_link_accept(struct zr_link *l, uv_stream_t *server);

/* Takes over the connection fd. Returns a libuv error; fd is then closed, or will be with the link. */
int zr_link_adopt(struct zr_link *l, int fd);

/* Sends a copy of f and n bytes after it. Returns 0, ZERO_ERR_NOMEM or ZERO_ERR_IO with a message. on_end
 * reports a connection that is found broken later. */
int zr_link_send(struct zr_link *l, struct zr_frame f, const void *payload, size_t n);
/* Bytes that are sent on several links. They are not copied, and are freed after their last use. */
struct zr_shared_bytes {
    /* Number of users: the maker, and each frame that is being sent. */
    int n_users;
    size_t n;
    char bytes[];
};
/* Makes a copy of n bytes, which the caller must leave. Returns NULL, with a message, if there is no
 * memory. */
struct zr_shared_bytes *zr_shared_bytes_new(const void *bytes, size_t n);
void zr_shared_bytes_leave(struct zr_shared_bytes *s);
int zr_link_send_shared(struct zr_link *l, struct zr_frame f, struct zr_shared_bytes *s);
/* Allows payloads of up to most_bytes from now on. A frame that waited is read. */
void zr_link_allow(struct zr_link *l, uint32_t most_bytes);
/* Sends what is queued, then closes when the other end does. Nothing more is delivered. */
void zr_link_finish(struct zr_link *l);
/* Closes at once. What is queued may be lost. */
void zr_link_drop(struct zr_link *l);
/* Inside on_frame: the payload now belongs to the caller, who calls free(). */
char *zr_link_take_payload(struct zr_link *l);

/* Blocks SIGPIPE in this thread, and removes the signal if this thread's writes raised it. A write to a
 * connection whose other end is gone raises SIGPIPE. It ends the process unless the program handles it, and a
 * library may not change that. */
struct zr_sigpipe_hold {
    sigset_t before;
    bool was_pending;
};
void zr_sigpipe_hold(struct zr_sigpipe_hold *h);
void zr_sigpipe_release(const struct zr_sigpipe_hold *h);

#endif
