/* star.c: a rendezvous' life on its loop (see star.h). Runs on the thread that runs the loop. */
#include "comm/star.h"

#include <arpa/inet.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    HELLO_BYTES = 1024,      /* the most a stranger may send at once */
    PAYLOAD_BYTES = 1 << 30, /* the most a rank may */
    MOST_STRANGERS = 128,    /* connections that have not said who they are */
    RETRY_MS = 20,
    BIND_MS = 2000,  /* a port just released by another program may still be held for a moment */
    LINGER_MS = 300, /* for the other ends to hear a goodbye */
};

static const struct zr_link_calls link_calls;

static int64_t now_ms(struct zr_rendezvous *r)
{
    uv_update_time(r->loop);
    return (int64_t)uv_now(r->loop);
}

int zr_star_send(struct zr_rendezvous *r, int rank, enum zr_frame_type type, int32_t about,
                 const void *payload, size_t n)
{
    struct zr_frame f = {
        .type = (uint16_t)type, .rank = r->w.rank, .world = r->w.world, .about = about, .job = r->job};
    struct zr_link *l = r->seats[rank].link;
    return l ? zr_link_send(l, f, payload, n) : 0;
}

int zr_star_fail(struct zr_rendezvous *r, int code, const char *fmt, ...)
{
    if (r->code)
        return r->code;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(r->text, sizeof r->text, fmt, ap);
    va_end(ap);
    r->code = code;
    for (int i = 1; r->w.rank == 0 && !r->detached && i < r->w.world; i++)
        if (r->seats[i].state == ZR_SEAT_HERE)
            (void)zr_star_send(r, i, ZR_FRAME_FAIL, code, r->text, strlen(r->text));
    return code;
}

/* --- ranks that go --- */

static const char *doing(const struct zr_rendezvous *r)
{
    return r->phase == ZR_PHASE_MEET   ? "while ranks met"
           : r->phase == ZR_PHASE_IDLE ? "before an exchange"
                                       : "during an exchange";
}

int zr_star_check(struct zr_rendezvous *r)
{
    for (int i = 0; i < r->w.world; i++) {
        const struct zr_seat *seat = &r->seats[i];
        if (seat->state == ZR_SEAT_LEFT)
            zr_star_fail(r, ZR_ERR_PEER, "rank %d left %s", i, doing(r));
        if (seat->state == ZR_SEAT_LOST)
            zr_star_fail(r, ZR_ERR_PEER, "rank %d was lost %s: %s", i, doing(r),
                         seat->untold ? seat->untold : "");
    }
    return r->code;
}

static void tell(struct zr_rendezvous *r, int rank, const char *why)
{
    for (int i = 1; r->w.rank == 0 && i < r->w.world; i++)
        if (r->seats[i].state == ZR_SEAT_HERE)
            (void)zr_star_send(r, i, ZR_FRAME_LOST, rank, why, strlen(why));
    if (r->on_lost && !r->closing)
        r->on_lost(r->on_lost_arg, rank, why);
}

void zr_star_tell_lost(struct zr_rendezvous *r)
{
    for (int i = 0; i < r->w.world && !r->closing; i++) {
        char *why = r->seats[i].untold;
        r->seats[i].untold = NULL;
        if (why)
            tell(r, i, why);
        free(why);
    }
}

/* A rank went without a goodbye. */
static void lose(struct zr_rendezvous *r, int rank, const char *why)
{
    struct zr_seat *seat = &r->seats[rank];
    if (seat->state == ZR_SEAT_LOST || seat->state == ZR_SEAT_LEFT)
        return;
    seat->state = ZR_SEAT_LOST;
    if (r->detached) {
        tell(r, rank, why);
        return;
    }
    seat->untold = strdup(why); /* with no memory for it, only the exchange that misses it tells */
    if (r->phase != ZR_PHASE_IDLE)
        zr_star_check(r);
}

/* A rank said goodbye. */
static void leave(struct zr_rendezvous *r, int rank)
{
    struct zr_seat *seat = &r->seats[rank];
    seat->state = ZR_SEAT_LEFT;
    if (seat->link)
        zr_link_finish(seat->link);
    if (!r->detached && r->phase != ZR_PHASE_IDLE)
        zr_star_check(r);
}

/* --- rank 0: strangers and ranks --- */

static void refuse(struct zr_rendezvous *r, struct zr_link *l, int code, const char *text)
{
    struct zr_frame f = {
        .type = ZR_FRAME_REFUSE, .rank = 0, .world = r->w.world, .about = code, .job = r->job};
    snprintf(r->trouble, sizeof r->trouble, "refused %s: %s", l->peer, text);
    (void)zr_link_send(l, f, text, strlen(text));
    zr_link_finish(l);
}

/* Of the same job, yet wrong: no rank can go on, and each is told why. */
static void refuse_all(struct zr_rendezvous *r, struct zr_link *l, const char *text)
{
    refuse(r, l, ZR_ERR_MISMATCH, text);
    zr_star_fail(r, ZR_ERR_MISMATCH, "%s", text);
}

static void on_hello(struct zr_rendezvous *r, struct zr_link *l, const struct zr_frame *f, const char *token)
{
    char text[480];
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
        if (zr_star_send(r, f->rank, ZR_FRAME_ACCEPT, 0, NULL, 0) < 0)
            zr_star_fail(r, ZR_ERR_IO, "%s", zr_error_text());
    }
}

static void on_connection(uv_stream_t *server, int status)
{
    struct zr_rendezvous *r = server->data;
    if (status < 0 || r->closing)
        return;
    struct zr_link *l = zr_link_new(r->loop, &link_calls, r, HELLO_BYTES);
    if (!l) {
        /* libuv offers nobody else until this one is taken. */
        zr_star_fail(r, ZR_ERR_NOMEM, "rendezvous: no memory for a connection");
        return;
    }
    l->next = r->links;
    if (r->links)
        r->links->prev = l;
    r->links = l;
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

void zr_star_seal(struct zr_rendezvous *r)
{
    r->ready = true;
    uv_close((uv_handle_t *)&r->listener, listener_closed);
    for (struct zr_link *l = r->links; l; l = l->next)
        if (l->rank < 0 && !l->finishing) /* the refused may still read why */
            zr_link_drop(l);
}

/* --- the others: reaching rank 0 --- */

static void connect_again(uv_timer_t *t);

static void retry_soon(struct zr_rendezvous *r)
{
    if (!r->code && !r->closing)
        uv_timer_start(&r->retry, connect_again, RETRY_MS, 0);
}

static void start_connecting(struct zr_rendezvous *r)
{
    struct zr_link *l = zr_link_new(r->loop, &link_calls, r, PAYLOAD_BYTES);
    if (!l) {
        zr_star_fail(r, ZR_ERR_NOMEM, "rendezvous: no memory for a connection");
        return;
    }
    l->next = r->links;
    if (r->links)
        r->links->prev = l;
    r->links = l;
    int err = zr_link_connect(l, &r->address);
    if (err) {
        snprintf(r->trouble, sizeof r->trouble, "%s", uv_strerror(err));
        zr_link_drop(l);
        retry_soon(r);
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
        snprintf(r->trouble, sizeof r->trouble, "no address for \"%.200s\": %s", r->w.host,
                 uv_strerror(status));
    }
    uv_freeaddrinfo(found);
    if (r->closing)
        return;
    /* Names of hosts that are still starting may appear later. */
    if (status == 0)
        start_connecting(r);
    else
        retry_soon(r);
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

static void on_connect(struct zr_link *l, int status)
{
    struct zr_rendezvous *r = l->owner;
    if (status < 0) {
        snprintf(r->trouble, sizeof r->trouble, "%s", uv_strerror(status));
        zr_link_drop(l);
        retry_soon(r);
        return;
    }
    snprintf(r->trouble, sizeof r->trouble, "it took the connection but does not answer");
    l->rank = 0;
    r->seats[0].link = l;
    if (zr_star_send(r, 0, ZR_FRAME_HELLO, 0, r->w.job, strlen(r->w.job)) < 0)
        zr_star_fail(r, ZR_ERR_IO, "%s", zr_error_text());
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

/* --- frames and ends of links --- */

/* From a rank that is here. */
static void on_rank_frame(struct zr_rendezvous *r, struct zr_link *l, const struct zr_frame *f)
{
    struct zr_seat *seat = &r->seats[l->rank];
    bool ours =
        f->job == r->job && f->world == r->w.world && f->rank == l->rank && f->version == ZR_FRAME_VERSION;
    if (ours && f->type == ZR_FRAME_GOODBYE) {
        leave(r, l->rank);
    } else if (ours && f->type == ZR_FRAME_GIVE && !seat->gave) {
        seat->gave = true;
        seat->given = zr_link_take_payload(l);
        seat->n_given = f->n_bytes;
    } else {
        zr_link_drop(l);
        lose(r, l->rank, "it sent a frame that makes no sense here");
    }
}

/* From rank 0. */
static void on_star_frame(struct zr_rendezvous *r, struct zr_link *l, const struct zr_frame *f,
                          const char *payload)
{
    int n = (int)f->n_bytes;
    const char *text = payload ? payload : "";
    bool ours = f->job == r->job && f->world == r->w.world && f->rank == 0 && f->version == ZR_FRAME_VERSION;
    if (f->type == ZR_FRAME_REFUSE) {
        zr_link_finish(l);
        zr_star_fail(r, f->about < 0 ? f->about : ZR_ERR_MISMATCH, "rank 0 refused: %.*s", n, text);
    } else if (ours && f->type == ZR_FRAME_ACCEPT && !r->accepted) {
        r->accepted = true;
        r->seats[0].state = ZR_SEAT_HERE;
        snprintf(r->trouble, sizeof r->trouble, "it waits for other ranks");
    } else if (ours && f->type == ZR_FRAME_READY && r->accepted) {
        r->ready = true;
        r->phase = ZR_PHASE_IDLE; /* already: rank 0 may leave in the same breath */
        for (int i = 0; i < r->w.world; i++)
            if (r->seats[i].state == ZR_SEAT_EMPTY)
                r->seats[i].state = ZR_SEAT_HERE;
    } else if (ours && f->type == ZR_FRAME_ALL && r->phase == ZR_PHASE_EXCHANGE && !r->all) {
        r->all = zr_link_take_payload(l);
        r->n_all = f->n_bytes;
        r->phase = ZR_PHASE_IDLE;
    } else if (ours && f->type == ZR_FRAME_FAIL) {
        if (r->detached)
            lose(r, 0, text);
        else
            zr_star_fail(r, f->about < 0 ? f->about : ZR_ERR_FAILED, "%.*s", n, text);
    } else if (ours && f->type == ZR_FRAME_LOST && f->about > 0 && f->about < r->w.world &&
               f->about != r->w.rank) {
        char why[256];
        snprintf(why, sizeof why, "%.*s", n, text);
        lose(r, f->about, why);
    } else if (ours && f->type == ZR_FRAME_GOODBYE) {
        leave(r, 0);
    } else {
        zr_link_drop(l);
        lose(r, 0, "it sent a frame that makes no sense here");
    }
}

static void on_frame(struct zr_link *l, const struct zr_frame *f, const void *payload)
{
    struct zr_rendezvous *r = l->owner;
    if (r->closing)
        return;
    if (r->w.rank != 0)
        on_star_frame(r, l, f, payload);
    else if (l->rank > 0)
        on_rank_frame(r, l, f);
    else
        on_hello(r, l, f, payload);
}

static void on_end(struct zr_link *l, const char *why)
{
    struct zr_rendezvous *r = l->owner;
    if (r->closing)
        return;
    if (r->w.rank == 0) {
        if (l->rank > 0)
            lose(r, l->rank, why);
        return;
    }
    if (r->accepted) {
        lose(r, 0, why);
    } else {
        /* Whoever listens there now is not, or not yet, our rank 0. */
        snprintf(r->trouble, sizeof r->trouble, "%s", why);
        r->seats[0].link = NULL;
        retry_soon(r);
    }
}

static void check_links(struct zr_rendezvous *r);

static void on_closed(struct zr_link *l)
{
    struct zr_rendezvous *r = l->owner;
    if (l->prev)
        l->prev->next = l->next;
    else
        r->links = l->next;
    if (l->next)
        l->next->prev = l->prev;
    if (r->w.rank == 0 && l->rank < 0)
        r->n_strangers--;
    if (l->rank >= 0 && r->seats[l->rank].link == l)
        r->seats[l->rank].link = NULL;
    check_links(r);
}

static const struct zr_link_calls link_calls = {
    .on_connect = on_connect,
    .on_frame = on_frame,
    .on_end = on_end,
    .on_closed = on_closed,
};

/* --- closing --- */

static void handle_closed(uv_handle_t *h)
{
    struct zr_rendezvous *r = h->data;
    r->n_handles--;
}

/* The deadline's timer guards the goodbyes and goes last. */
static void check_links(struct zr_rendezvous *r)
{
    if (r->closing && !r->links && !uv_is_closing((uv_handle_t *)&r->deadline))
        uv_close((uv_handle_t *)&r->deadline, handle_closed);
}

static void lingered(uv_timer_t *t)
{
    struct zr_rendezvous *r = t->data;
    for (struct zr_link *l = r->links; l; l = l->next)
        zr_link_drop(l);
}

void zr_star_close(struct zr_rendezvous *r)
{
    if (r->closing || r->w.world == 1)
        return;
    for (struct zr_link *l = r->links; l; l = l->next) {
        if (l->finishing)
            continue;
        if (l->rank >= 0 && r->seats[l->rank].link == l && r->seats[l->rank].state == ZR_SEAT_HERE) {
            (void)zr_star_send(r, l->rank, ZR_FRAME_GOODBYE, 0, NULL, 0);
            zr_link_finish(l);
        } else {
            zr_link_drop(l);
        }
    }
    r->closing = true;
    if (r->listening && !uv_is_closing((uv_handle_t *)&r->listener))
        uv_close((uv_handle_t *)&r->listener, listener_closed);
    if (r->resolving)
        uv_cancel((uv_req_t *)&r->resolve);
    uv_close((uv_handle_t *)&r->retry, handle_closed);
    uv_timer_start(&r->deadline, lingered, LINGER_MS, 0);
    check_links(r);
}

bool zr_star_closed(const struct zr_rendezvous *r)
{
    return r->w.world == 1 || (r->closing && !r->links && r->n_handles == 0 && !r->resolving);
}
