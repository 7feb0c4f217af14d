/* star_meet.c: how the ranks of a rendezvous come together: rank 0 listens and asks who is there, the others
 * find it.
 *
 * A stranger must not stop a job: who is not of this job, or says nothing, or nonsense, is refused or
 * dropped. A rank of this very job that is wrong, by its number or its world, fails all of them. */
#include "comm/star.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>

enum {
    HELLO_BYTES = 1024,      /* the most a stranger may send at once */
    PAYLOAD_BYTES = 1 << 30, /* the most a rank may */
    MOST_STRANGERS = 128,    /* connections that have not said who they are */
    RETRY_MS = 20,
    BIND_MS = 2000, /* a port just released by another program may still be held for a moment */
};

static int64_t now_ms(struct zr_rendezvous *r)
{
    uv_update_time(r->loop);
    return (int64_t)uv_now(r->loop);
}

/* --- rank 0: strangers and ranks --- */

static void refuse(struct zr_rendezvous *r, struct zr_link *l, int code, const char *text)
{
    struct zr_frame f = {
        .type = ZR_FRAME_REFUSE, .rank = 0, .world = r->w.world, .about = code, .job = r->job};
    zr_star_note(r, ZR_TROUBLE_STRANGE, "refused %s: %s", l->peer, text);
    (void)zr_link_send(l, f, text, strlen(text));
    zr_link_finish(l);
}

/* Of the same job, yet wrong: no rank can go on, and each is told why. */
static void refuse_all(struct zr_rendezvous *r, struct zr_link *l, const char *text)
{
    refuse(r, l, ZR_ERR_MISMATCH, text);
    zr_star_fail(r, ZR_ERR_MISMATCH, "%s", text);
}

void zr_star_hello(struct zr_rendezvous *r, struct zr_link *l, const struct zr_frame *f, const char *token)
{
    char text[sizeof r->text + 64];
    int n = (int)f->n_bytes;
    if (f->version != ZR_FRAME_VERSION) {
        snprintf(text, sizeof text, "rank %d speaks version %u of the protocol, rank 0 version %d", f->rank,
                 f->version, ZR_FRAME_VERSION);
        refuse(r, l, ZR_ERR_MISMATCH, text);
    } else if (f->type != ZR_FRAME_HELLO) {
        zr_link_drop(l);
    } else if (f->job != r->job) {
        snprintf(text, sizeof text, "rank %d at %s belongs to job \"%.*s\", rank 0 to job \"%s\"", f->rank,
                 l->peer, n < 128 ? n : 128, token ? token : "", r->w.job);
        refuse(r, l, ZR_ERR_MISMATCH, text);
    } else if (f->world != r->w.world) {
        snprintf(text, sizeof text, "rank %d at %s has world %d, rank 0 has world %d", f->rank, l->peer,
                 f->world, r->w.world);
        refuse_all(r, l, text);
    } else if (f->rank <= 0 || f->rank >= r->w.world) {
        snprintf(text, sizeof text, "rank %d at %s: ranks 1 to %d may join rank 0", f->rank, l->peer,
                 r->w.world - 1);
        refuse_all(r, l, text);
    } else if (r->code) {
        snprintf(text, sizeof text, "rank %d came when the others had given up: %s", f->rank, r->text);
        if (r->seats[f->rank].state == ZR_SEAT_EMPTY)
            r->seats[f->rank].state = ZR_SEAT_LEFT;
        refuse(r, l, r->code, text);
    } else if (r->seats[f->rank].state != ZR_SEAT_EMPTY) {
        const struct zr_link *first = r->seats[f->rank].link;
        snprintf(text, sizeof text, "rank %d is there twice: at %s and at %s", f->rank,
                 first ? first->peer : "?", l->peer);
        refuse_all(r, l, text);
    } else {
        l->rank = f->rank;
        l->most_bytes = PAYLOAD_BYTES;
        r->n_strangers--;
        r->seats[f->rank].link = l;
        r->seats[f->rank].state = ZR_SEAT_HERE;
        r->n_here++;
        (void)zr_star_send(r, f->rank, ZR_FRAME_ACCEPT, NULL, 0);
    }
}

/* NULL: no memory. */
static struct zr_link *add_link(struct zr_rendezvous *r, uint32_t most_bytes)
{
    struct zr_link *l = zr_link_new(r->loop, &zr_star_calls, r, most_bytes);
    if (!l)
        return NULL;
    l->next = r->links;
    if (r->links)
        r->links->prev = l;
    r->links = l;
    return l;
}

static void on_connection(uv_stream_t *server, int status)
{
    struct zr_rendezvous *r = server->data;
    if (status < 0 || r->closing)
        return;
    struct zr_link *l = add_link(r, HELLO_BYTES);
    if (!l) {
        /* libuv offers nobody else until this one is taken. */
        zr_star_fail(r, ZR_ERR_NOMEM, "rank 0: rendezvous: no memory for a connection");
        zr_star_stop_listening(r);
        return;
    }
    r->n_strangers++;
    if (zr_link_accept(l, server) < 0) {
        zr_link_drop(l);
        return;
    }
    /* Someone who connects and says nothing costs a descriptor; the one who has waited longest goes. */
    struct zr_link *oldest = NULL;
    for (struct zr_link *s = r->links; r->n_strangers > MOST_STRANGERS && s; s = s->next)
        if (s->rank < 0 && !uv_is_closing((uv_handle_t *)&s->tcp))
            oldest = s;
    if (oldest)
        zr_link_drop(oldest);
}

static void listen_again(uv_timer_t *t);

static void listener_closed(uv_handle_t *h)
{
    struct zr_rendezvous *r = h->data;
    r->n_handles--;
    r->listening = false;
    if (!r->ready && !r->code && !r->closing)
        uv_timer_start(&r->retry, listen_again, RETRY_MS, 0);
}

/* On the address that was given, where that is surely ours; a name may stand for loopback here and for the
 * network card elsewhere, so with a name rank 0 listens on all addresses. */
static void start_listening(struct zr_rendezvous *r)
{
    struct sockaddr_in a, any;
    uv_ip4_addr("0.0.0.0", r->w.port, &any);
    if (strcmp(r->w.host, "localhost") == 0)
        uv_ip4_addr("127.0.0.1", r->w.port, &a);
    else if (uv_ip4_addr(r->w.host, r->w.port, &a) < 0)
        a = any;
    int err = uv_tcp_init(r->loop, &r->listener);
    if (err == 0) {
        r->listener.data = r;
        r->n_handles++;
        r->listening = true;
        err = uv_tcp_bind(&r->listener, (struct sockaddr *)&a, 0);
        if (err == UV_EADDRNOTAVAIL)
            err = uv_tcp_bind(&r->listener, (struct sockaddr *)&any, 0);
        if (err == 0)
            err = uv_listen((uv_stream_t *)&r->listener, 1024, on_connection);
    }
    if (err == 0)
        return;
    int64_t patience = r->timeout_ms / 2 < BIND_MS ? r->timeout_ms / 2 : BIND_MS;
    if (err != UV_EADDRINUSE || now_ms(r) - r->started_ms > patience)
        zr_star_fail(r, ZR_ERR_SYSTEM, "rank 0 cannot listen at %s:%d: %s", r->w.host, r->w.port,
                     uv_strerror(err));
    if (r->listening)
        uv_close((uv_handle_t *)&r->listener, listener_closed);
}

static void listen_again(uv_timer_t *t)
{
    start_listening(t->data);
}

void zr_star_stop_listening(struct zr_rendezvous *r)
{
    if (r->listening && !uv_is_closing((uv_handle_t *)&r->listener))
        uv_close((uv_handle_t *)&r->listener, listener_closed);
}

void zr_star_seal(struct zr_rendezvous *r)
{
    r->ready = true;
    zr_star_stop_listening(r);
    for (struct zr_link *l = r->links; l; l = l->next)
        if (l->rank < 0 && !l->finishing) /* the refused may still read why */
            zr_link_drop(l);
}

/* --- the others: reaching rank 0 --- */

static void connect_again(uv_timer_t *t);

void zr_star_retry(struct zr_rendezvous *r)
{
    if (!r->code && !r->closing)
        uv_timer_start(&r->retry, connect_again, RETRY_MS, 0);
}

static void start_connecting(struct zr_rendezvous *r)
{
    struct zr_link *l = add_link(r, PAYLOAD_BYTES);
    if (!l) {
        zr_star_fail(r, ZR_ERR_NOMEM, "rendezvous: no memory for a connection");
        return;
    }
    int err = zr_link_connect(l, &r->address);
    if (err) {
        zr_star_note(r, ZR_TROUBLE_NOBODY, "%s", uv_strerror(err));
        zr_link_drop(l);
        zr_star_retry(r);
    }
}

static void on_resolved(uv_getaddrinfo_t *req, int status, struct addrinfo *found)
{
    struct zr_rendezvous *r = req->data;
    r->resolving = false;
    if (status == 0) {
        memcpy(&r->address, found->ai_addr, sizeof r->address);
        r->address.sin_port = htons((uint16_t)r->w.port);
    } else {
        zr_star_note(r, ZR_TROUBLE_NOBODY, "no address for \"%.200s\": %s", r->w.host, uv_strerror(status));
    }
    uv_freeaddrinfo(found);
    if (r->closing)
        return;
    /* Names of hosts that are still starting may appear later. */
    if (status == 0)
        start_connecting(r);
    else
        zr_star_retry(r);
}

static void find_and_connect(struct zr_rendezvous *r)
{
    if (uv_ip4_addr(r->w.host, r->w.port, &r->address) == 0) {
        start_connecting(r);
        return;
    }
    const struct addrinfo hints = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM};
    int err = uv_getaddrinfo(r->loop, &r->resolve, on_resolved, r->w.host, NULL, &hints);
    if (err)
        zr_star_fail(r, ZR_ERR_SYSTEM, "rendezvous: cannot look up \"%.200s\": %s", r->w.host,
                     uv_strerror(err));
    else
        r->resolving = true;
}

static void connect_again(uv_timer_t *t)
{
    find_and_connect(t->data);
}

void zr_star_on_connect(struct zr_link *l, int status)
{
    struct zr_rendezvous *r = l->owner;
    if (status < 0) {
        zr_star_note(r, ZR_TROUBLE_NOBODY, "%s%s", uv_strerror(status),
                     status == UV_ECONNREFUSED ? ": rank 0 has not started, or has given up and left" : "");
        zr_link_drop(l);
        zr_star_retry(r);
        return;
    }
    zr_star_note(r, ZR_TROUBLE_SILENT, "it took the connection but does not answer");
    l->rank = 0;
    r->seats[0].link = l;
    (void)zr_star_send(r, 0, ZR_FRAME_HELLO, r->w.job, strlen(r->w.job));
}

void zr_star_start(struct zr_rendezvous *r)
{
    r->started_ms = now_ms(r);
    if (r->w.rank == 0) {
        r->seats[0].state = ZR_SEAT_HERE;
        r->n_here = 1;
        start_listening(r);
    } else {
        find_and_connect(r);
    }
}
