/* SPDX-License-Identifier: Apache-2.0 */
/* link.h: frames over one TCP connection of a libuv loop, the rendezvous' only way to talk.
 *
 * A link belongs to its loop's thread. It frees itself once its handle is closed; the owner hears of that
 * through on_closed and must drop its pointer there. After on_end, zr_link_finish and zr_link_drop no more
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
    /* status: 0, or a libuv error, after which the owner drops the link */
    void (*on_connect)(struct zr_link *l, int status);
    /* payload: f->n_bytes bytes and a 0 after them (NULL: none), valid during the call unless
     * zr_link_take_payload takes it over. */
    void (*on_frame)(struct zr_link *l, const struct zr_frame *f, const char *payload);
    /* A frame has more payload than the link allows. True: it stays where it is, nothing more is read, until
     * zr_link_allow; false: the link ends. */
    bool (*on_large)(struct zr_link *l, const struct zr_frame *f);
    /* The link ends, which the owner may make a finish. code: ZR_ERR_PEER, the other end closed or broke;
     * ZR_ERR_MISMATCH, it talks nonsense; ZR_ERR_NOMEM, there is no room for what it says. Not called after a
     * finish or drop. */
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
/* Starts connecting, from an address of this host, whose port is 0, or NULL, any; on_connect tells. Returns a
 * libuv error if it could not start. */
int zr_link_connect(struct zr_link *l, const union zr_address *from, const union zr_address *to);
/* Takes the connection that waits on server. Returns a libuv error. */
int zr_link_accept(struct zr_link *l, uv_stream_t *server);

/* Takes fd, a connection, over. Returns a libuv error; fd is then closed, or with the link. */
int zr_link_adopt(struct zr_link *l, int fd);

/* Sends a copy of f and n bytes after it. 0, ZR_ERR_NOMEM or ZR_ERR_IO with a message; a connection that is
 * found broken later is told by on_end. */
int zr_link_send(struct zr_link *l, struct zr_frame f, const void *payload, size_t n);
/* The same of bytes that go to several: each of them is sent as it is, and freed when nobody needs it. */
struct zr_shared_bytes {
    /* who needs it: whoever made it, and each frame that is on its way */
    int n_users;
    size_t n;
    char bytes[];
};
/* A copy of n bytes, for the caller to leave. NULL: no memory. */
struct zr_shared_bytes *zr_shared_bytes_new(const void *bytes, size_t n);
void zr_shared_bytes_leave(struct zr_shared_bytes *s);
int zr_link_send_shared(struct zr_link *l, struct zr_frame f, struct zr_shared_bytes *s);
/* Payloads of up to most_bytes from now on; one that waited is read. */
void zr_link_allow(struct zr_link *l, uint32_t most_bytes);
/* Sends what is queued, then closes when the other end does. Nothing more is delivered. */
void zr_link_finish(struct zr_link *l);
/* Closes at once; what is queued may be lost. */
void zr_link_drop(struct zr_link *l);
/* Inside on_frame: the payload is the caller's now, to free(). */
char *zr_link_take_payload(struct zr_link *l);

/* Writing to a connection whose other end is gone raises SIGPIPE, whose default ends the process, and a
 * library may not change how signals are handled. So it is held back on the thread that writes, and taken off
 * again if this call raised it. */
struct zr_sigpipe_hold {
    sigset_t before;
    bool was_pending;
};
void zr_sigpipe_hold(struct zr_sigpipe_hold *h);
void zr_sigpipe_release(const struct zr_sigpipe_hold *h);

#endif
