/* SPDX-License-Identifier: Apache-2.0 */
/* link.c: cuts a stream of bytes into frames, and sends and receives frames over one TCP connection. */
#include "comm/meet/link.h"
#include "comm/meet/frame.h"
#include "kernels/alloc.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* --- frames --- */

_Static_assert(sizeof(struct zr_frame) == 24,
               "the head is what travels: no padding, no change without a new version");

char *zr_frame_room(struct zr_frame_reader *r, size_t *n)
{
    const size_t head = sizeof r->head;
    if (r->n_in < head) {
        *n = head - r->n_in;
        return (char *)&r->head + r->n_in;
    }
    *n = r->head.n_bytes - (r->n_in - head);
    return r->payload + (r->n_in - head);
}

enum zr_frame_state zr_frame_took(struct zr_frame_reader *r, size_t n)
{
    const size_t head = sizeof r->head;
    r->n_in += n;
    /* An unidentified connection may have sent no more than its first bytes. */
    if (r->n_in >= sizeof r->head.magic && r->head.magic != ZR_FRAME_MAGIC)
        return ZR_FRAME_STRANGE;
    if (r->n_in < head)
        return ZR_FRAME_UNFINISHED;
    if (r->head.n_bytes > r->most_bytes)
        return ZR_FRAME_LARGE;
    if (r->head.n_bytes && !r->payload) {
        /* One more byte, for the zero that ends a text. */
        r->payload = malloc((size_t)r->head.n_bytes + 1);
        if (!r->payload)
            return ZR_FRAME_NO_MEMORY;
        r->payload[r->head.n_bytes] = 0;
    }
    return r->n_in == head + r->head.n_bytes ? ZR_FRAME_WHOLE : ZR_FRAME_UNFINISHED;
}

void zr_frame_next(struct zr_frame_reader *r)
{
    free(r->payload);
    r->payload = NULL;
    r->n_in = 0;
}

/* --- SIGPIPE --- */

void zr_sigpipe_hold(struct zr_sigpipe_hold *h)
{
    sigset_t pipe, pending;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    sigpending(&pending);
    h->was_pending = sigismember(&pending, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe, &h->before);
}

void zr_sigpipe_release(const struct zr_sigpipe_hold *h)
{
    sigset_t pipe;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    if (!h->was_pending) {
        const struct timespec none = {0};
        while (sigtimedwait(&pipe, NULL, &none) < 0 && errno == EINTR)
            ;
    }
    pthread_sigmask(SIG_SETMASK, &h->before, NULL);
}

/* --- links --- */

static void closed(uv_handle_t *h)
{
    struct zr_link *l = h->data;
    l->calls->on_closed(l);
    free(l->in.payload);
    free(l);
}

void zr_link_drop(struct zr_link *l)
{
    if (uv_is_closing((uv_handle_t *)&l->tcp))
        return;
    zr_fork_forget(&l->kept);
    uv_close((uv_handle_t *)&l->tcp, closed);
}

static void end_link(struct zr_link *l, int code, const char *why)
{
    bool report = !l->finishing && !uv_is_closing((uv_handle_t *)&l->tcp);
    if (report)
        l->calls->on_end(l, code, why);
    if (!report || !l->finishing)
        zr_link_drop(l);
}

static void on_alloc(uv_handle_t *h, size_t suggested, uv_buf_t *buf)
{
    struct zr_link *l = h->data;
    (void)suggested;
    if (l->finishing)
        *buf = uv_buf_init(l->sink, sizeof l->sink);
    else
        buf->base = zr_frame_room(&l->in, &buf->len);
}

/* Ends the link, as the frame is too large. The owner may still wait for this link, and gets its end. */
static void refuse_large(struct zr_link *l)
{
    char why[128];
    snprintf(why, sizeof why, "it sent a frame of %u bytes where at most %u are allowed", l->in.head.n_bytes,
             l->in.most_bytes);
    end_link(l, ZERO_ERR_MISMATCH, why);
}

static void take(struct zr_link *l, size_t n)
{
    char why[128];
    switch (zr_frame_took(&l->in, n)) {
    case ZR_FRAME_UNFINISHED:
        break;
    case ZR_FRAME_WHOLE:
        l->calls->on_frame(l, &l->in.head, l->in.payload);
        zr_frame_next(&l->in);
        break;
    case ZR_FRAME_STRANGE:
        snprintf(why, sizeof why, "it does not speak this protocol: magic 0x%08x where 0x%08x is expected",
                 l->in.head.magic, ZR_FRAME_MAGIC);
        end_link(l, ZERO_ERR_MISMATCH, why);
        break;
    case ZR_FRAME_LARGE:
        l->held = l->calls->on_large(l, &l->in.head);
        if (l->held)
            uv_read_stop((uv_stream_t *)&l->tcp);
        else
            refuse_large(l);
        break;
    case ZR_FRAME_NO_MEMORY:
        snprintf(why, sizeof why, "no memory for a frame of %u bytes", l->in.head.n_bytes);
        end_link(l, ZERO_ERR_NOMEM, why);
        break;
    }
}

static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *buf)
{
    struct zr_link *l = stream->data;
    (void)buf;
    if (n < 0) {
        const char *why = n != UV_EOF ? uv_strerror((int)n)
                          : l->in.n_in
                              ? "its connection closed in the middle of a message"
                              : "its connection closed unexpectedly, as when a process crashes or is killed";
        end_link(l, ZERO_ERR_PEER, why);
        return;
    }
    l->heard_ms = (int64_t)uv_now(stream->loop);
    if (l->finishing || n == 0)
        return;
    take(l, (size_t)n);
}

void zr_link_allow(struct zr_link *l, uint32_t most_bytes)
{
    l->in.most_bytes = most_bytes;
    if (!l->held || l->finishing || uv_is_closing((uv_handle_t *)&l->tcp))
        return;
    l->held = false;
    int err = uv_read_start((uv_stream_t *)&l->tcp, on_alloc, on_read);
    if (err)
        end_link(l, ZERO_ERR_PEER, uv_strerror(err));
    else
        take(l, 0);
}

struct zr_link *zr_link_new(uv_loop_t *loop, const struct zr_link_calls *calls, void *owner,
                            uint32_t most_bytes)
{
    struct zr_link *l = calloc(1, sizeof *l);
    if (!l)
        return NULL;
    if (uv_tcp_init(loop, &l->tcp) < 0) {
        free(l);
        return NULL;
    }
    l->tcp.data = l->connect.data = l->shutdown.data = l;
    l->calls = calls;
    l->owner = owner;
    l->rank = -1;
    l->in.most_bytes = most_bytes;
    return l;
}

static void name_peer(struct zr_link *l)
{
    union zr_address there;
    int n = sizeof there;
    strcpy(l->peer, "?");
    if (uv_tcp_getpeername(&l->tcp, &there.any, &n) == 0)
        zr_address_print(&there, l->peer);
}

static int start_link(struct zr_link *l)
{
    uv_os_fd_t fd;
    name_peer(l);
    if (uv_fileno((uv_handle_t *)&l->tcp, &fd) == 0)
        zr_fork_keep(&l->kept, fd);
    uv_tcp_nodelay(&l->tcp, 1);
    uv_tcp_keepalive(&l->tcp, 1, 5); /* a host that vanishes sends no FIN */
    return uv_read_start((uv_stream_t *)&l->tcp, on_alloc, on_read);
}

/* Returns whether the socket is connected to itself. Retrying a port of the ephemeral range can do that
 * (TCP's simultaneous open). Such a link would answer its own hello and keep rank 0 from binding. */
static bool is_own_mirror(struct zr_link *l)
{
    union zr_address here, there;
    int n_here = sizeof here, n_there = sizeof there;
    return uv_tcp_getsockname(&l->tcp, &here.any, &n_here) == 0 &&
           uv_tcp_getpeername(&l->tcp, &there.any, &n_there) == 0 && zr_address_same(&here, &there);
}

static void connected(uv_connect_t *req, int status)
{
    struct zr_link *l = req->data;
    if (uv_is_closing((uv_handle_t *)&l->tcp))
        return;
    if (status == 0 && is_own_mirror(l))
        status = UV_ECONNREFUSED;
    if (status == 0)
        status = start_link(l);
    l->calls->on_connect(l, status);
}

int zr_link_connect(struct zr_link *l, const union zr_address *from, const union zr_address *to)
{
    int err = from ? uv_tcp_bind(&l->tcp, &from->any, 0) : 0;
    return err ? err : uv_tcp_connect(&l->connect, &l->tcp, &to->any, connected);
}

int zr_link_accept(struct zr_link *l, uv_stream_t *server)
{
    int err = uv_accept(server, (uv_stream_t *)&l->tcp);
    return err ? err : start_link(l);
}

int zr_link_adopt(struct zr_link *l, int fd)
{
    int err = uv_tcp_open(&l->tcp, fd);
    if (err)
        close(fd);
    return err ? err : start_link(l);
}

/* A frame that is being sent. It is freed when it is written or given up. */
struct sending {
    uv_write_t req;
    struct zr_frame frame;
    struct zr_shared_bytes *payload;
};

struct zr_shared_bytes *zr_shared_bytes_new(const void *bytes, size_t n)
{
    struct zr_shared_bytes *s;
    if (ZR_ZALLOC_ARRAY(s, sizeof *s, (int64_t)n, 1, "a frame of %zu bytes of the rendezvous", n))
        return NULL;
    s->n_users = 1;
    s->n = n;
    if (n)
        memcpy(s->bytes, bytes, n);
    return s;
}

void zr_shared_bytes_leave(struct zr_shared_bytes *s)
{
    if (s && --s->n_users == 0)
        free(s);
}

static void free_sending(struct sending *s)
{
    zr_shared_bytes_leave(s->payload);
    free(s);
}

static void sent(uv_write_t *req, int status)
{
    (void)status; /* a broken connection is reported by the reading side */
    free_sending(req->data);
}

int zr_link_send_shared(struct zr_link *l, struct zr_frame f, struct zr_shared_bytes *payload)
{
    struct sending *s;
    ZR_TRY(ZR_ALLOC(s, 1, "a frame of %zu bytes of the rendezvous", payload->n));
    f.magic = ZR_FRAME_MAGIC;
    f.version = ZR_FRAME_VERSION;
    f.n_bytes = (uint32_t)payload->n;
    s->frame = f;
    s->payload = payload;
    payload->n_users++;
    s->req.data = s;
    uv_buf_t bufs[2] = {uv_buf_init((char *)&s->frame, (unsigned)sizeof s->frame),
                        uv_buf_init(payload->bytes, (unsigned)payload->n)};
    struct zr_sigpipe_hold hold;
    zr_sigpipe_hold(&hold);
    int err = uv_write(&s->req, (uv_stream_t *)&l->tcp, bufs, payload->n ? 2 : 1, sent);
    zr_sigpipe_release(&hold);
    if (!err)
        return 0;
    free_sending(s);
    return zr_fail(ZERO_ERR_IO, "rendezvous: could not send to %s: %s", l->peer, uv_strerror(err));
}

int zr_link_send(struct zr_link *l, struct zr_frame f, const void *payload, size_t n)
{
    struct zr_shared_bytes *copy = zr_shared_bytes_new(payload, n);
    if (!copy)
        return ZERO_ERR_NOMEM;
    int err = zr_link_send_shared(l, f, copy);
    zr_shared_bytes_leave(copy);
    return err;
}

static void shut(uv_shutdown_t *req, int status)
{
    if (status < 0 && status != UV_ECANCELED)
        zr_link_drop(req->data);
}

void zr_link_finish(struct zr_link *l)
{
    if (l->finishing || uv_is_closing((uv_handle_t *)&l->tcp))
        return;
    l->finishing = true;
    zr_fork_last_word(&l->kept, NULL, NULL);
    if (l->held) /* so that its end is noticed */
        uv_read_start((uv_stream_t *)&l->tcp, on_alloc, on_read);
    if (uv_shutdown(&l->shutdown, (uv_stream_t *)&l->tcp, shut) < 0)
        zr_link_drop(l);
}

char *zr_link_take_payload(struct zr_link *l)
{
    char *p = l->in.payload;
    l->in.payload = NULL;
    return p;
}
