/* link.h: frames over one TCP connection of a libuv loop, the rendezvous' only way to talk.
 *
 * A link belongs to its loop's thread. It frees itself once its handle is closed; the owner hears of that
 * through on_closed and must drop its pointer there. After on_end, zr_link_finish and zr_link_drop no more
 * frames are delivered. */
#ifndef ZR_COMM_LINK_H
#define ZR_COMM_LINK_H

#include "kernels/error.h"

#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

enum { ZR_FRAME_MAGIC = 0x6f72657a, ZR_FRAME_VERSION = 2 }; /* "zero" in little-endian bytes */

enum zr_frame_type {
    ZR_FRAME_HELLO = 1, /* rank -> 0: here I am; payload: the job's token */
    ZR_FRAME_ACCEPT,    /* 0 -> rank: you are one of us */
    ZR_FRAME_READY,     /* 0 -> rank: everyone is here */
    ZR_FRAME_REFUSE,    /* 0 -> rank: you are not; about: the code, payload: the message */
    ZR_FRAME_GIVE,      /* rank -> 0: my blob of an exchange */
    ZR_FRAME_ALL,       /* 0 -> rank: everyone's, in rank order */
    ZR_FRAME_FAIL,      /* what we were doing failed; about: the code, payload: the message */
    ZR_FRAME_LOST,      /* 0 -> rank: about: the rank that was lost, payload: how */
    ZR_FRAME_GOODBYE    /* the sender leaves on purpose */
};

/* Before every payload, in the sender's byte order: a rank of the other order is told by its magic. */
struct zr_frame {
    uint32_t magic;
    uint16_t version, type;
    uint32_t n_bytes; /* of the payload after it */
    int32_t rank, world;
    int32_t about;
    uint64_t job; /* hash of the job's token */
};

struct zr_link;

struct zr_link_calls {
    void (*on_connect)(struct zr_link *l,
                       int status); /* status: 0 or a libuv error; then the owner drops the link */
    /* payload: f->n_bytes bytes, valid during the call unless zr_link_take_payload takes it over. */
    void (*on_frame)(struct zr_link *l, const struct zr_frame *f, const void *payload);
    /* The link ends, which the owner may make a finish. code: ZR_ERR_PEER, the other end closed or broke;
     * ZR_ERR_MISMATCH, it talks nonsense; ZR_ERR_NOMEM, there is no room for what it says. Not called after a
     * finish or drop. */
    void (*on_end)(struct zr_link *l, int code, const char *why);
    void (*on_closed)(struct zr_link *l); /* freed after this */
};

struct zr_link {
    uv_tcp_t tcp;
    uv_connect_t connect;
    uv_shutdown_t shutdown;
    const struct zr_link_calls *calls;
    void *owner;
    struct zr_link *prev, *next; /* in the owner's list */
    int rank;                    /* of the other end, -1: not known yet */
    uint32_t most_bytes;         /* a payload may have */
    bool finishing;              /* our last frame is on its way, what comes in is ignored */
    struct zr_frame in;
    char *payload;
    size_t n_in;    /* bytes of frame and payload received so far */
    char peer[64];  /* its address, for messages */
    char sink[512]; /* what comes in while finishing */
};

/* A link without a connection yet. NULL when there is no memory. */
struct zr_link *zr_link_new(uv_loop_t *loop, const struct zr_link_calls *calls, void *owner,
                            uint32_t most_bytes);
/* Starts connecting; on_connect tells. Returns a libuv error if it could not start. */
int zr_link_connect(struct zr_link *l, const struct sockaddr_in *to);
/* Takes the connection that waits on server. Returns a libuv error. */
int zr_link_accept(struct zr_link *l, uv_stream_t *server);

/* Sends a copy of f and n bytes after it. 0, ZR_ERR_NOMEM or ZR_ERR_IO with a message; a connection that is
 * found broken later is told by on_end. */
int zr_link_send(struct zr_link *l, struct zr_frame f, const void *payload, size_t n);
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
