/* hub_meet.c: how the ranks of a rendezvous come together: rank 0 listens, asks everybody who comes for a
 * proof that he is of this job, and lets ranks in; the others reach it (hub_reach.c).
 *
 * An unidentified connection must not stop a job, nor learn of it more than that it is there. Who does not
 * prove that he has the job's key is sent away without a word of why; who says nothing for seconds is
 * dropped; and there are never more than MOST_UNIDENTIFIED of them, the others wait in the kernel's queue. A
 * rank of this very job that is wrong, by its number or its world, fails all of them. */
#include "comm/meet/hub.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>

enum {
    MOST_UNIDENTIFIED = 128, /* connections that have not proved to be a rank's */
    FAIR_MS = 100,           /* that each of them has to answer before another may take its place */
    UNIDENTIFIED_MS = 5000,  /* that it has where no other wants its place */
    SWEEP_MS = 500,
    RETRY_MS = 20,
    BIND_MS = 2000, /* a port just released by another program may still be held for a moment */
};

int64_t zr_hub_now_ms(struct zr_rendezvous *r)
{
    uv_update_time(r->loop);
    return (int64_t)uv_now(r->loop);
}

bool zr_hub_may_use(struct zr_rendezvous *r, const struct sockaddr_in *to)
{
    if (r->w.key.n_bytes || ntohl(to->sin_addr.s_addr) >> 24 == 127)
        return true;
    char ip[32] = "?";
    uv_ip4_name(to, ip, sizeof ip);
    zr_hub_fail(r, ZR_ERR_ARG,
                "rank %d: rank 0's address %s (%s) can be reached by other hosts, and this job has no key to "
                "know its ranks by: set ZERO_JOB_KEY to the same 32 random hex digits on all ranks (openssl "
                "rand -hex 16), or ZERO_JOB_KEY_FILE to a file with them, or, on one host, meet at 127.0.0.1",
                r->w.rank, r->w.host, ip);
    return false;
}

struct zr_link *zr_hub_add_link(struct zr_rendezvous *r)
{
    struct zr_link *l = zr_link_new(r->loop, &zr_hub_calls, r, ZR_FRAME_SHAKE_BYTES);
    if (!l)
        return NULL;
    l->next = r->links;
    if (r->links)
        r->links->prev = l;
    r->links = l;
    return l;
}

/* --- rank 0: unidentified connections and ranks --- */

/* An unidentified connection is told nothing, not even why. */
static void send_away(struct zr_rendezvous *r, struct zr_link *l, const char *why)
{
    struct zr_frame f = {.type = ZR_FRAME_REFUSE, .about = ZR_ERR_MISMATCH};
    zr_hub_note(r, ZR_TROUBLE_STRANGE, "refused %s: %s", l->peer, why);
    (void)zr_link_send(l, f, NULL, 0);
    zr_link_finish(l);
}

/* A rank that has proved what it is. */
static void refuse(struct zr_rendezvous *r, struct zr_link *l, int code, const char *text)
{
    struct zr_frame f = {.type = ZR_FRAME_REFUSE, .rank = 0, .world = r->w.world, .about = code};
    char proof_and_text[ZR_PROOF_BYTES + ZR_FRAME_TEXT_BYTES];
    char *said = proof_and_text + ZR_PROOF_BYTES;
    snprintf(said, ZR_FRAME_TEXT_BYTES, "%s", text);
    zr_shake_prove(&r->w, &l->shake, ZR_FRAME_REFUSE, code, said, (uint8_t *)proof_and_text);
    zr_hub_note(r, ZR_TROUBLE_STRANGE, "refused %s: %s", l->peer, text);
    (void)zr_link_send(l, f, proof_and_text, ZR_PROOF_BYTES + strlen(said));
    zr_link_finish(l);
}

/* A rank of this job that cannot be right: no rank can go on, and each is told why. */
static void refuse_all(struct zr_rendezvous *r, struct zr_link *l, const char *text)
{
    refuse(r, l, ZR_ERR_MISMATCH, text);
    zr_hub_fail(r, ZR_ERR_MISMATCH, "%s", text);
}

static void let_in(struct zr_rendezvous *r, struct zr_link *l)
{
    uint8_t proof[ZR_PROOF_BYTES];
    int rank = l->shake.rank;
    zr_shake_prove(&r->w, &l->shake, ZR_FRAME_ACCEPT, 0, "", proof);
    l->rank = rank;
    zr_link_allow(l, ZR_FRAME_SMALL_BYTES);
    zr_hub_keep(r, l);
    r->n_unidentified--;
    r->members[rank].link = l;
    r->members[rank].state = ZR_MEMBER_HERE;
    r->n_here++;
    (void)zr_hub_send(r, rank, ZR_FRAME_ACCEPT, proof, sizeof proof);
}

void zr_hub_hello(struct zr_rendezvous *r, struct zr_link *l, const struct zr_frame *f, const char *payload)
{
    char text[sizeof r->text + 64];
    if (f->type != ZR_FRAME_HELLO) {
        zr_link_drop(l);
        return;
    }
    if (f->version != ZR_FRAME_VERSION) {
        snprintf(text, sizeof text, "it speaks version %u of the protocol, rank 0 version %d", f->version,
                 ZR_FRAME_VERSION);
        send_away(r, l, text);
        return;
    }
    if (!zr_shake_hello(&r->w, &l->shake, f, payload)) {
        send_away(r, l,
                  r->w.key.n_bytes ? "it is of another job, or has another ZERO_JOB_KEY or none"
                                   : "it is of another job, or has a ZERO_JOB_KEY, which rank 0 has not");
        return;
    }
    const struct zr_shake *s = &l->shake;
    if (s->attempt != r->w.attempt) {
        snprintf(text, sizeof text, "rank %d at %s is of attempt %d of this job, rank 0 of attempt %d",
                 s->rank, l->peer, s->attempt, r->w.attempt);
        refuse(r, l, ZR_ERR_MISMATCH, text);
    } else if (s->world != r->w.world) {
        snprintf(text, sizeof text, "rank %d at %s has world %d, rank 0 has world %d", s->rank, l->peer,
                 s->world, r->w.world);
        refuse_all(r, l, text);
    } else if (s->rank <= 0 || s->rank >= r->w.world) {
        snprintf(text, sizeof text, "rank %d at %s: ranks 1 to %d may join rank 0", s->rank, l->peer,
                 r->w.world - 1);
        refuse_all(r, l, text);
    } else if (r->code) {
        snprintf(text, sizeof text, "rank %d came when the others had given up: %s", s->rank, r->text);
        if (r->members[s->rank].state == ZR_MEMBER_EMPTY)
            r->members[s->rank].state = ZR_MEMBER_LEFT;
        refuse(r, l, r->code, text);
    } else if (r->members[s->rank].state != ZR_MEMBER_EMPTY) {
        const struct zr_link *first = r->members[s->rank].link;
        snprintf(text, sizeof text, "rank %d is there twice: at %s and at %s", s->rank,
                 first ? first->peer : "?", l->peer);
        refuse_all(r, l, text);
    } else {
        let_in(r, l);
    }
}

static struct zr_link *oldest_unidentified(struct zr_rendezvous *r)
{
    struct zr_link *oldest = NULL;
    for (struct zr_link *s = r->links; s; s = s->next)
        if (s->rank < 0 && !uv_is_closing((uv_handle_t *)&s->tcp))
            oldest = s; /* new ones are put in front */
    return oldest;
}

void zr_hub_drop_slow(struct zr_rendezvous *r)
{
    int64_t now = zr_hub_now_ms(r);
    for (struct zr_link *s = r->links; s; s = s->next)
        if (s->rank < 0 && now - s->since_ms >= UNIDENTIFIED_MS)
            zr_link_drop(s);
}

static void admit(struct zr_rendezvous *r);

static void admit_later(uv_timer_t *t)
{
    admit(t->data);
}

/* Takes the one that waits, now or when the oldest of too many unidentified connections has had its time. */
static void admit(struct zr_rendezvous *r)
{
    if (r->closing || !r->listening || uv_is_closing((uv_handle_t *)&r->listener))
        return;
    int64_t now = zr_hub_now_ms(r);
    struct zr_link *oldest = r->n_unidentified >= MOST_UNIDENTIFIED ? oldest_unidentified(r) : NULL;
    int64_t left = oldest ? oldest->since_ms + FAIR_MS - now : 0;
    if (r->n_unidentified >= MOST_UNIDENTIFIED && left <= 0 && oldest) {
        zr_link_drop(oldest);
        left = 1; /* it is gone after this round of the loop */
    }
    if (r->n_unidentified >= MOST_UNIDENTIFIED) {
        uv_timer_start(&r->admit, admit_later, left > 0 ? (uint64_t)left : 1, 0);
        return;
    }
    struct zr_link *l = zr_hub_add_link(r);
    if (!l) {
        /* libuv offers nobody else until this one is taken. */
        zr_hub_fail(r, ZR_ERR_NOMEM, "rank 0: rendezvous: no memory for a connection");
        zr_hub_stop_listening(r);
        return;
    }
    struct zr_frame f = {.type = ZR_FRAME_CHALLENGE};
    l->since_ms = now;
    r->n_unidentified++;
    if (zr_link_accept(l, (uv_stream_t *)&r->listener) < 0 ||
        zr_shake_random(l->shake.nonce_0, sizeof l->shake.nonce_0) ||
        zr_link_send(l, f, l->shake.nonce_0, sizeof l->shake.nonce_0))
        zr_link_drop(l);
}

static void on_connection(uv_stream_t *server, int status)
{
    if (status == 0)
        admit(server->data);
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
 * network card elsewhere, so with a name rank 0 listens on all addresses, if there is a key. */
void zr_hub_listen(struct zr_rendezvous *r)
{
    struct sockaddr_in any;
    uv_ip4_addr("0.0.0.0", r->w.port, &any);
    int err = uv_tcp_init(r->loop, &r->listener);
    if (err == 0) {
        r->listener.data = r;
        r->n_handles++;
        r->listening = true;
        err = uv_tcp_bind(&r->listener, (struct sockaddr *)&r->address, 0);
        if (err == UV_EADDRNOTAVAIL && r->w.key.n_bytes)
            err = uv_tcp_bind(&r->listener, (struct sockaddr *)&any, 0);
        if (err == 0)
            err = uv_listen((uv_stream_t *)&r->listener, 1024, on_connection);
    }
    uv_os_fd_t fd;
    if (err == 0 && uv_fileno((uv_handle_t *)&r->listener, &fd) == 0)
        zr_fork_keep(&r->kept_listener, fd);
    if (err == 0)
        return;
    int64_t patience = r->timeout_ms / 2 < BIND_MS ? r->timeout_ms / 2 : BIND_MS;
    if (err != UV_EADDRINUSE || zr_hub_now_ms(r) - r->started_ms > patience)
        zr_hub_fail(r, ZR_ERR_SYSTEM, "rank 0 cannot listen at %s:%d: %s", r->w.host, r->w.port,
                    uv_strerror(err));
    if (r->listening)
        uv_close((uv_handle_t *)&r->listener, listener_closed);
}

static void listen_again(uv_timer_t *t)
{
    zr_hub_listen(t->data);
}

void zr_hub_stop_listening(struct zr_rendezvous *r)
{
    if (!r->listening || uv_is_closing((uv_handle_t *)&r->listener))
        return;
    zr_fork_forget(&r->kept_listener);
    uv_close((uv_handle_t *)&r->listener, listener_closed);
}

void zr_hub_seal(struct zr_rendezvous *r)
{
    r->ready = true;
    uv_timer_stop(&r->patience);
    zr_hub_stop_listening(r);
    for (struct zr_link *l = r->links; l; l = l->next)
        if (l->rank < 0 && !l->finishing) /* the refused may still read why */
            zr_link_drop(l);
}

/* --- the beginning --- */

static void go(struct zr_rendezvous *r)
{
    if (!zr_hub_may_use(r, &r->address))
        return;
    if (r->w.rank == 0)
        zr_hub_listen(r);
    else
        zr_hub_connect(r);
}

static void find_again(uv_timer_t *t)
{
    zr_hub_find(t->data);
}

static void on_resolved(uv_getaddrinfo_t *req, int status, struct addrinfo *found)
{
    struct zr_rendezvous *r = req->data;
    r->resolving = false;
    if (status == 0) {
        memcpy(&r->address, found->ai_addr, sizeof r->address);
        r->address.sin_port = htons((uint16_t)r->w.port);
    } else {
        zr_hub_note(r, ZR_TROUBLE_NOBODY, "no address for \"%.200s\": %s", r->w.host, uv_strerror(status));
    }
    uv_freeaddrinfo(found);
    if (r->closing || r->code)
        return;
    /* Names of hosts that are still starting may appear later. */
    if (status == 0)
        go(r);
    else
        uv_timer_start(&r->retry, find_again, RETRY_MS, 0);
}

void zr_hub_find(struct zr_rendezvous *r)
{
    bool listens = r->w.rank == 0;
    const char *host = listens && strcmp(r->w.host, "localhost") == 0 ? "127.0.0.1" : r->w.host;
    bool is_number = uv_ip4_addr(host, r->w.port, &r->address) == 0;
    if (!is_number && listens && r->w.key.n_bytes) {
        uv_ip4_addr("0.0.0.0", r->w.port, &r->address);
        is_number = true;
    }
    if (is_number) {
        go(r);
        return;
    }
    const struct addrinfo hints = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM};
    int err = uv_getaddrinfo(r->loop, &r->resolve, on_resolved, r->w.host, NULL, &hints);
    if (err)
        zr_hub_fail(r, ZR_ERR_SYSTEM, "rendezvous: cannot look up \"%.200s\": %s", r->w.host,
                    uv_strerror(err));
    else
        r->resolving = true;
}

static void on_patience(uv_timer_t *t)
{
    struct zr_rendezvous *r = t->data;
    if (r->w.rank == 0)
        zr_hub_drop_slow(r);
    else
        zr_hub_give_up_slow(r);
}

void zr_hub_start(struct zr_rendezvous *r)
{
    r->started_ms = zr_hub_now_ms(r);
    uv_timer_start(&r->patience, on_patience, SWEEP_MS, SWEEP_MS);
    if (r->w.rank == 0) {
        r->members[0].state = ZR_MEMBER_HERE;
        r->n_here = 1;
    }
    zr_hub_find(r);
}
