/* SPDX-License-Identifier: Apache-2.0 */
/* link.h: frames over one TCP connection of a libuv loop. A rendezvous talks over nothing else.
 *
 * A link belongs to its loop's thread. It frees itself once its handle is closed. It tells the owner by
 * on_closed, who must drop its pointer there. After on_end, zr_link_finish and zr_link_drop no more frames
 * are delivered. */
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
    /* status: 0, or a libuv error, after which the owner drops the link */
    void (*on_connect)(struct zr_link *l, int status);
    /* payload: f->n_bytes bytes and a 0 after them (NULL: none), valid during the call unless
     * zr_link_take_payload takes it over. */
    void (*on_frame)(struct zr_link *l, const struct zr_frame *f, const char *payload);
    /* A frame has more payload than the link allows. Returns true to leave it where it is, and read nothing
     * more until zr_link_allow; false to end the link. */
    bool (*on_large)(struct zr_link *l, const struct zr_frame *f);
    /* The link ends, and is dropped unless the owner calls zr_link_finish. Codes: ZR_ERR_PEER: the other end
     * closed or broke. ZR_ERR_MISMATCH: what it says makes no sense. ZR_ERR_NOMEM: there is no memory for it.
     * Not called after zr_link_finish or zr_link_drop. */
    void (*on_end)(struct zr_link *l, int code, const char *why);
    /* the link is freed after this */
    void (*on_closed)(struct zr_link *l);
};

struct zr_link {
    uv_tcp_t tcp;
    uv_connect_t connect;
    uv_shutdown_t shutdown;
    const struct zr_link_calls *calls;
    void *owner;
    /* in the owner's list */
    struct zr_link *prev, *next;
    /* of the other end; -1: not known yet */
    int rank;
    /* this end has connected, so the other is to be rank 0 */
    bool is_outgoing;
    /* our last frame is on its way, what comes in is ignored */
    bool finishing;
    /* a large frame waits for zr_link_allow; its head is in.head */
    bool held;
    struct zr_frame_reader in;
    /* what both ends know of each other before either proves anything */
    struct zr_shake shake;
    /* the socket, which is closed in forked children */
    struct zr_kept_socket kept;
    /* the owner's: when it began to wait for the other end's proof */
    int64_t since_ms;
    /* the loop's time when bytes last came in */
    int64_t heard_ms;
    /* address of the other end, for messages */
    char peer[ZR_ADDRESS_CHARS];
    /* what comes in while finishing */
    char sink[512];
};

/* A link without a connection yet. NULL when there is no memory. */
struct zr_link *zr_link_new(uv_loop_t *loop, const struct zr_link_calls *calls, void *owner,
                            uint32_t most_bytes);
/* Starts to connect, from an address of this host with port 0, or from any if it is NULL. on_connect tells
 * how it went. Returns a libuv error if it could not start. */
int zr_link_connect(struct zr_link *l, const union zr_address *from, const union zr_address *to);
/* Takes the connection that waits on server. Returns a libuv error. */
int zr_link_accept(struct zr_link *l, uv_stream_t *server);

/* Takes over fd, a connection. Returns a libuv error; fd is then closed, or will be with the link. */
int zr_link_adopt(struct zr_link *l, int fd);

/* Sends a copy of f and n bytes after it. Returns 0, ZR_ERR_NOMEM or ZR_ERR_IO with a message. on_end reports
 * a connection that is found broken later. */
int zr_link_send(struct zr_link *l, struct zr_frame f, const void *payload, size_t n);
/* The same for bytes that go to several links. They are not copied, and freed when nobody needs them. */
struct zr_shared_bytes {
    /* whoever made it, and each frame that is on its way */
    int n_users;
    size_t n;
    char bytes[];
};
/* Makes a copy of n bytes, which the caller must leave. NULL: there is no memory, and it has failed. */
struct zr_shared_bytes *zr_shared_bytes_new(const void *bytes, size_t n);
void zr_shared_bytes_leave(struct zr_shared_bytes *s);
int zr_link_send_shared(struct zr_link *l, struct zr_frame f, struct zr_shared_bytes *s);
/* Allows payloads of up to most_bytes from now on. One that waited is read. */
void zr_link_allow(struct zr_link *l, uint32_t most_bytes);
/* Sends what is queued, then closes when the other end does. Nothing more is delivered. */
void zr_link_finish(struct zr_link *l);
/* Closes at once. What is queued may be lost. */
void zr_link_drop(struct zr_link *l);
/* Inside on_frame: the payload now belongs to the caller, who calls free(). */
char *zr_link_take_payload(struct zr_link *l);

/* A write to a connection whose other end is gone raises SIGPIPE, which ends the process unless it handles
 * the signal. A library may not change that. So the thread that writes blocks the signal, and removes it
 * again if this call raised it. */
struct zr_sigpipe_hold {
    sigset_t before;
    bool was_pending;
};
void zr_sigpipe_hold(struct zr_sigpipe_hold *h);
void zr_sigpipe_release(const struct zr_sigpipe_hold *h);

#endif
