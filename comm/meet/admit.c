/* SPDX-License-Identifier: Apache-2.0 */
/* admit.c: rank 0 listens, asks every new connection for a proof that it belongs to this job, and lets ranks
 * in.
 *
 * An unidentified connection must not stop a job, nor learn more than that the job exists. A connection
 * without proof of the job's key is refused without a reason. One that is silent for seconds is dropped.
 * There are at most MAX_UNIDENTIFIED of them; others wait in the kernel's queue. If a rank of this job has a
 * wrong number or world, all ranks fail.
 *
 * A rank may come with another name than rank 0's. If another context of rank 0's process waits with that
 * name, it takes the connection over. Otherwise the rank has come too early, and has to try again. */
#include "comm/meet/hub.h"
#include "kernels/limits.h"
#include "kernels/log.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    MAX_UNIDENTIFIED = 128, /* connections that have not proved to be a rank's */
    FAIR_MS = 100,          /* time that each has to answer before another may take its place */
    UNIDENTIFIED_MS = 5000, /* time that each has if no other wants its place */
    SWEEP_MS = 500,
    LISTEN_AGAIN_MS = 20,
    BIND_MS = 2000, /* a port that another program has just released may still be held for a moment */
    BACKLOG = 1024,
    LARGE_WORLD = 64, /* smaller ones are not why descriptors run out */
    SPARE_DESCRIPTORS = 1024
};

/* --- names with which ranks wait --- */

/* Forgets the other name of a rank, which has now come with this rank's name. */
static void drop_other_name(struct zr_rendezvous *r, int rank)
{
    free(r->members[rank].waits_as);
    r->members[rank].waits_as = NULL;
}

static const char *waiting_name(const struct zr_rendezvous *r, int rank)
{
    const struct zr_member *m = &r->members[rank];
    return m->waits_as ? m->waits_as : m->state == ZR_MEMBER_HERE ? r->w.name : NULL;
}

/* Appends the ranks that wait with the name of rank `first`, which is the lowest of them. */
static size_t say_name(const struct zr_rendezvous *r, int first, bool is_first, char *text, size_t n_text)
{
    const char *name = waiting_name(r, first);
    int n = 0;
    size_t used =
        (size_t)snprintf(text, n_text, "%s \"%s\" on", is_first ? "cfg.launch.name is" : " and", name);
    for (int i = first; i < r->w.world && used < n_text && n <= 4; i++) {
        const char *waiting = waiting_name(r, i);
        if (!waiting || strcmp(waiting, name))
            continue;
        used += (size_t)snprintf(text + used, n_text - used,
                                 n == 4 ? ", ..."
                                 : n    ? ", rank %d"
                                        : " rank %d",
                                 i);
        n++;
    }
    return used < n_text ? used : n_text - 1;
}

static bool is_said_before(const struct zr_rendezvous *r, int rank)
{
    for (int i = 0; i < rank; i++)
        if (waiting_name(r, i) && !strcmp(waiting_name(r, i), waiting_name(r, rank)))
            return true;
    return false;
}

void zr_hub_say_names(const struct zr_rendezvous *r, char text[ZR_NAMES_CHARS])
{
    size_t used = 0;
    int n_names = 0;
    text[0] = 0;
    for (int i = 0; i < r->w.world; i++)
        if (waiting_name(r, i) && !is_said_before(r, i))
            used += say_name(r, i, n_names++ == 0, text + used, ZR_NAMES_CHARS - used);
    if (n_names < 2)
        text[0] = 0;
}

/* --- sockets --- */

static void listener_closed(uv_handle_t *h)
{
    struct zr_rendezvous *r = h->data;
    for (int i = 0; i < 2; i++)
        r->listener[i].is_open &= (uv_handle_t *)&r->listener[i].tcp != h;
    r->n_handles--;
    r->n_listening--;
}

void zr_hub_stop_listening(struct zr_rendezvous *r)
{
    zr_hub_remove_file(r);
    for (int i = 0; i < 2; i++) {
        struct zr_listener *s = &r->listener[i];
        if (!s->is_open || uv_is_closing((uv_handle_t *)&s->tcp))
            continue;
        zr_fork_forget(&s->kept);
        uv_close((uv_handle_t *)&s->tcp, listener_closed);
    }
    zr_open_name_listened(r->w.open_name);
}

/* --- unidentified connections and ranks --- */

/* Ends an unidentified connection, and sends no reason. */
static void send_away(struct zr_rendezvous *r, struct zr_link *l, const char *why)
{
    struct zr_frame f = {.type = ZR_FRAME_REFUSE, .about = ZERO_ERR_MISMATCH};
    zr_hub_note(r, ZR_TROUBLE_STRANGE, "refused %s: %s", l->peer, why);
    (void)zr_link_send(l, f, NULL, 0);
    zr_link_finish(l);
}

/* Refuses a rank that has proved what it is. */
static void refuse_as(struct zr_rendezvous *r, struct zr_link *l, enum zr_frame_type type, int code,
                      const char *text)
{
    struct zr_frame f = {.type = (uint16_t)type, .rank = r->w.rank, .world = r->w.world, .about = code};
    char proof_and_text[ZR_PROOF_BYTES + ZR_FRAME_TEXT_BYTES];
    char *said = proof_and_text + ZR_PROOF_BYTES;
    snprintf(said, ZR_FRAME_TEXT_BYTES, "%s", text);
    zr_shake_prove(&r->w, &l->shake, type, code, said, (uint8_t *)proof_and_text);
    if (type == ZR_FRAME_REFUSE)
        zr_hub_note(r, ZR_TROUBLE_STRANGE, "refused %s: %s", l->peer, text);
    (void)zr_link_send(l, f, proof_and_text, ZR_PROOF_BYTES + strlen(said));
    zr_link_finish(l);
}

static void refuse(struct zr_rendezvous *r, struct zr_link *l, int code, const char *text)
{
    refuse_as(r, l, ZR_FRAME_REFUSE, code, text);
}

/* Refuses a rank that comes after all ranks have met. The others go on. */
static void refuse_late(struct zr_rendezvous *r, struct zr_link *l)
{
    const int rank = l->shake.rank;
    const bool is_known = rank >= 0 && rank < r->w.world;
    const struct zr_link *first = is_known && rank ? r->members[rank].link : NULL;
    char text[256];
    if (is_known && (rank == 0 || first))
        snprintf(text, sizeof text,
                 "the job runs already, and rank %d is in it%s%s: rank %d was started twice", rank,
                 first ? ", at " : "", first ? first->peer : "", rank);
    else
        snprintf(text, sizeof text, "the job runs already: rank %d came too late, or has left it", rank);
    refuse(r, l, ZERO_ERR_MISMATCH, text);
}

/* Refuses a rank of this job that is wrong, so no rank can go on. All ranks get the reason. */
static void refuse_all(struct zr_rendezvous *r, struct zr_link *l, const char *text)
{
    refuse(r, l, ZERO_ERR_MISMATCH, text);
    zr_hub_fail(r, ZERO_ERR_MISMATCH, "%s", text);
}

/* Handles a rank that waits with another name. Another context takes its connection over, or it must try
 * again. */
static void other_name(struct zr_rendezvous *r, struct zr_link *l, const struct zr_frame *f,
                       const char *payload)
{
    int rank = l->shake.rank;
    struct zr_hello hello;
    uv_os_fd_t fd;
    memcpy(&hello, payload, sizeof hello);
    if (uv_fileno((uv_handle_t *)&l->tcp, &fd) == 0 &&
        zr_open_name_hand(r->w.open_name, fd, &l->shake, f, &hello)) {
        zr_link_drop(l);
        return;
    }
    char names[ZR_NAMES_CHARS];
    bool is_ours = l->shake.world == r->w.world && rank > 0 && rank < r->w.world;
    if (is_ours && r->members[rank].state == ZR_MEMBER_EMPTY) {
        free(r->members[rank].waits_as);
        r->members[rank].waits_as = strdup(l->shake.name);
    }
    zr_hub_say_names(r, names);
    refuse_as(r, l, ZR_FRAME_AGAIN, 0, names);
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
    drop_other_name(r, rank);
    int err = zr_hub_send(r, rank, ZR_FRAME_ACCEPT, 0, proof, sizeof proof);
    if (err)
        zr_hub_fail_all(r, err, zr_error_text());
}

/* Returns whether the two ranks may belong to one part of a job. A part is a run of ranks, or every n-th
 * rank. Equal ranks were inherited from one shell. */
static bool may_be_one_part(const struct zr_rendezvous *r, const struct zr_shake *s)
{
    const struct zr_start *a = &r->w.start, *b = &s->start;
    if (!a->world || a->world != b->world || a->rank == b->rank || s->world != r->w.world)
        return true;
    int first = a->rank - r->w.rank;
    bool is_run = first == b->rank - s->rank && (first % s->world == 0 || a->world % s->world);
    return is_run || (int64_t)(a->rank - b->rank) * s->world == (int64_t)(r->w.rank - s->rank) * a->world;
}

/* Returns whether a launcher started the rank for another job, or for another part of this one. */
static bool is_started_otherwise(const struct zr_rendezvous *r, const struct zr_link *l, char *text, size_t n)
{
    const struct zr_shake *s = &l->shake;
    const struct zr_start *a = &r->w.start, *b = &s->start;
    if (a->job[0] && b->job[0] && strcmp(a->job, b->job))
        snprintf(text, n,
                 "rank %d at %s was started by %s, rank %d by %s: if these are two jobs, give each its own "
                 "ZERO_JOB",
                 s->rank, l->peer, b->job, r->w.rank, a->job);
    else if (!may_be_one_part(r, s))
        snprintf(text, n,
                 "rank %d at %s was started as rank %d of %d, rank %d as rank %d of %d: they belong to two "
                 "parts of a job: give each part its own meeting point, by cfg.launch.rendezvous",
                 s->rank, l->peer, b->rank, b->world, r->w.rank, a->rank, a->world);
    else
        return false;
    return true;
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
                  r->w.key.n_bytes ? "it belongs to another job, or has another ZERO_JOB_KEY or none"
                                   : "it belongs to another job, or has a ZERO_JOB_KEY, but rank 0 has none");
        return;
    }
    const struct zr_shake *s = &l->shake;
    if (is_started_otherwise(r, l, text, sizeof text)) {
        refuse(r, l, ZERO_ERR_MISMATCH, text);
    } else if (r->ready) {
        refuse_late(r, l);
    } else if (s->attempt != r->w.attempt) {
        snprintf(text, sizeof text, "rank %d at %s is of attempt %d of this job, rank 0 of attempt %d",
                 s->rank, l->peer, s->attempt, r->w.attempt);
        refuse(r, l, ZERO_ERR_MISMATCH, text);
    } else if (strcmp(s->name, r->w.name)) {
        other_name(r, l, f, payload);
    } else if (s->world != r->w.world) {
        snprintf(text, sizeof text, "rank %d at %s has world %d, rank 0 has world %d%s%s%s", s->rank, l->peer,
                 s->world, r->w.world, r->w.size_from[0] ? " (" : "", r->w.size_from,
                 r->w.size_from[0] ? ")" : "");
        refuse_all(r, l, text);
    } else if (s->rank == 0) {
        refuse(r, l, ZERO_ERR_MISMATCH, "rank 0 is there twice");
        zr_hub_fail(r, ZERO_ERR_MISMATCH, "rank 0 is there twice: here and at %s: %s", l->peer,
                    ZR_HUB_TWO_JOBS);
    } else if (s->rank <= 0 || s->rank >= r->w.world) {
        snprintf(text, sizeof text, "rank %d at %s: ranks 1 to %d may join rank 0", s->rank, l->peer,
                 r->w.world - 1);
        refuse_all(r, l, text);
    } else if (r->code) {
        snprintf(text, sizeof text, "rank %d came after the others had given up: %s", s->rank, r->text);
        if (r->members[s->rank].state == ZR_MEMBER_EMPTY)
            r->members[s->rank].state = ZR_MEMBER_LEFT;
        refuse(r, l, r->code, text);
    } else if (r->members[s->rank].state != ZR_MEMBER_EMPTY) {
        const struct zr_link *first = r->members[s->rank].link;
        snprintf(
            text, sizeof text,
            "rank %d is there twice: at %s and at %s: it was started twice, or two jobs meet at one place",
            s->rank, first ? first->peer : "?", l->peer);
        refuse_all(r, l, text);
    } else {
        let_in(r, l);
    }
}

/* --- accepting connections --- */

static struct zr_link *oldest_unidentified(struct zr_rendezvous *r)
{
    struct zr_link *oldest = NULL;
    for (struct zr_link *s = r->links; s; s = s->next)
        if (s->rank < 0 && !s->is_outgoing && !uv_is_closing((uv_handle_t *)&s->tcp))
            oldest = s; /* new links are put in front */
    return oldest;
}

/* Drops incoming links that have taken too long to prove what they are. */
static void drop_slow(struct zr_rendezvous *r)
{
    int64_t now = zr_hub_now_ms(r);
    for (struct zr_link *s = r->links; s; s = s->next)
        if (s->rank < 0 && !s->is_outgoing && now - s->since_ms >= UNIDENTIFIED_MS)
            zr_link_drop(s);
}

static void admit_later(uv_timer_t *t)
{
    zr_hub_admit(t->data);
}

static struct zr_listener *find_awaited(struct zr_rendezvous *r)
{
    for (int i = 0; i < 2; i++) {
        struct zr_listener *s = &r->listener[i];
        if (s->is_open && s->is_awaited && !uv_is_closing((uv_handle_t *)&s->tcp))
            return s;
    }
    return NULL;
}

/* Accepts the connection that waits. Until then libuv offers no other one at this listener. */
static void take_awaited(struct zr_rendezvous *r, struct zr_listener *s)
{
    struct zr_link *l = zr_hub_add_link(r);
    if (!l) {
        zr_hub_fail(r, ZERO_ERR_NOMEM, "rank 0: rendezvous: no memory for a connection");
        zr_hub_stop_listening(r);
        return;
    }
    struct zr_frame f = {.type = ZR_FRAME_CHALLENGE};
    l->since_ms = zr_hub_now_ms(r);
    r->n_unidentified++;
    s->is_awaited = false;
    if (zr_link_accept(l, (uv_stream_t *)&s->tcp) < 0 ||
        zr_shake_random(l->shake.nonce_0, sizeof l->shake.nonce_0) ||
        zr_link_send(l, f, l->shake.nonce_0, sizeof l->shake.nonce_0))
        zr_link_drop(l);
}

/* Accepts the next connection: now, or when the oldest of too many unidentified ones has had its time. */
void zr_hub_admit(struct zr_rendezvous *r)
{
    struct zr_listener *s = find_awaited(r);
    if (r->closing || !s)
        return;
    struct zr_link *oldest = r->n_unidentified >= MAX_UNIDENTIFIED ? oldest_unidentified(r) : NULL;
    int64_t left = oldest ? oldest->since_ms + FAIR_MS - zr_hub_now_ms(r) : 0;
    if (r->n_unidentified >= MAX_UNIDENTIFIED && left <= 0 && oldest) {
        zr_link_drop(oldest);
        left = 1; /* it is gone after this round of the loop */
    }
    if (r->n_unidentified < MAX_UNIDENTIFIED) {
        take_awaited(r, s);
        left = 1;
    }
    if (find_awaited(r))
        uv_timer_start(&r->admit, admit_later, left > 0 ? (uint64_t)left : 1, 0);
}

void zr_hub_seal(struct zr_rendezvous *r)
{
    r->ready = true;
    /* A rank 0 that got all its connections from another context may not have listened yet. */
    uv_timer_stop(&r->retry);
    if (r->w.tells_late)
        return;
    uv_timer_stop(&r->patience);
    zr_hub_stop_listening(r);
    for (struct zr_link *l = r->links; l; l = l->next)
        if (l->rank < 0 && !l->finishing) /* a refused rank may still read the reason */
            zr_link_drop(l);
}

/* --- other contexts of this process --- */

/* Takes over a connection whose HELLO another context of this process has read. */
static void take_handed(struct zr_rendezvous *r, const struct zr_handed *h)
{
    struct zr_link *l = zr_hub_add_link(r);
    if (!l) {
        close(h->fd); /* the rank will try again */
        return;
    }
    l->since_ms = zr_hub_now_ms(r);
    r->n_unidentified++;
    memcpy(l->shake.nonce_0, h->nonce_0, sizeof l->shake.nonce_0);
    if (zr_link_adopt(l, h->fd) < 0)
        zr_link_drop(l);
    else
        zr_hub_hello(r, l, &h->frame, (const char *)&h->hello);
}

static void on_handed(uv_async_t *a)
{
    struct zr_rendezvous *r = a->data;
    for (struct zr_handed *h; (h = zr_open_name_next(r->w.open_name));) {
        take_handed(r, h);
        free(h);
    }
}

int zr_hub_await_handed(struct zr_rendezvous *r)
{
    if (!r->w.open_name)
        return 0;
    int err = uv_async_init(r->loop, &r->handed, on_handed);
    if (err)
        return zr_fail(ZERO_ERR_SYSTEM, "rendezvous: uv_async_init: %s", uv_strerror(err));
    r->handed.data = r;
    uv_unref((uv_handle_t *)&r->handed);
    r->n_handles++;
    r->awaits_handed = true;
    zr_open_name_await(r->w.open_name, &r->handed);
    return 0;
}

void zr_hub_ignore_handed(struct zr_rendezvous *r)
{
    if (!r->awaits_handed)
        return;
    r->awaits_handed = false;
    zr_open_name_await(r->w.open_name, NULL);
    uv_close((uv_handle_t *)&r->handed, zr_hub_handle_closed);
}

/* --- listening --- */

static void on_connection(uv_stream_t *server, int status)
{
    struct zr_rendezvous *r = server->data;
    for (int i = 0; status == 0 && i < 2; i++)
        r->listener[i].is_awaited |= (uv_stream_t *)&r->listener[i].tcp == server;
    if (status == 0)
        zr_hub_admit(r);
}

/* Gives a socket to the loop. It listens already, so its address is valid. */
static int hand_over(struct zr_rendezvous *r, struct zr_listener *s, int fd)
{
    int err = uv_tcp_init(r->loop, &s->tcp);
    if (!err) {
        s->tcp.data = r;
        s->is_open = true;
        s->is_awaited = false;
        r->n_handles++;
        r->n_listening++;
        err = uv_tcp_open(&s->tcp, fd);
    }
    if (err)
        close(fd);
    else
        err = uv_listen((uv_stream_t *)&s->tcp, BACKLOG, on_connection);
    if (!err)
        zr_fork_keep(&s->kept, fd);
    return err;
}

/* Listens on fd, which is bound, or a negative errno. Returns fd, or the error. */
static int begin_to_listen(int fd)
{
    if (fd >= 0 && listen(fd, BACKLOG)) {
        int err = -errno;
        close(fd);
        return err;
    }
    return fd;
}

static bool is_absent(int err)
{
    return err == -EADDRNOTAVAIL || err == -EAFNOSUPPORT;
}

/* Opens all of these addresses or none. An address that this host does not have may be missing if another
 * one is there. fd gets the sockets, -1 for those that are missing. Returns 0, or an error and *failed. */
static int open_sockets(const union zr_address *at, int n, int fd[2], const union zr_address **failed)
{
    int n_open = 0, err = 0;
    for (int i = 0; i < 2; i++) {
        fd[i] = i < n && (!err || is_absent(err)) ? begin_to_listen(zr_address_bind(&at[i])) : -1;
        n_open += fd[i] >= 0;
        if (i < n && fd[i] < 0 && (!err || is_absent(err))) {
            err = fd[i];
            *failed = &at[i];
        }
    }
    if (!err || (is_absent(err) && n_open))
        return 0;
    for (int i = 0; i < 2; i++)
        if (fd[i] >= 0)
            close(fd[i]);
    return err;
}

/* Listens on all addresses, because the given one does not belong to this host. It may be the address of a
 * gateway, or of a container's host. Without IPv6 it listens on all IPv4 addresses. */
static int open_anywhere(struct zr_rendezvous *r, int fd[2], const union zr_address **failed)
{
    const bool was_given = !zr_address_is_any(&r->to[0]);
    const int family = r->to[0].any.sa_family;
    char given[ZR_ADDRESS_CHARS];
    zr_address_print_host(&r->to[0], given);
    fd[0] = begin_to_listen(zr_address_bind_all(r->w.port, &r->to[0]));
    fd[1] = -1;
    r->n_to = 1;
    *failed = &r->to[0];
    int err = fd[0] < 0 ? fd[0] : 0;
    if (!err && was_given)
        zr_hub_note(r, ZR_TROUBLE_NOBODY,
                    "%s is not an address of this host%s, so rank 0 listens at all of its addresses", given,
                    zr_hub_has_family(r, family) ? ""
                    : family == AF_INET6         ? ", which has no IPv6 address"
                                                 : ", which has no IPv4 address");
    return err;
}

static void listen_again(uv_timer_t *t)
{
    zr_hub_listen(t->data);
}

static void say_cannot_listen(struct zr_rendezvous *r, const union zr_address *at, int err)
{
    char place[ZR_ADDRESS_CHARS], name[ZR_INTERFACE_CHARS], there[512], why[ZR_SYSTEM_WORDS];
    struct zr_interfaces all;
    zr_address_print(at, place);
    zr_interface_of(at, name);
    if (is_absent(err) && zr_interfaces_all(&all) == 0) {
        zr_interfaces_list(&all, there, sizeof there);
        zr_hub_fail(r, ZERO_ERR_SYSTEM,
                    "rank 0 cannot listen at %s: no interface of this host has that address: it has %s",
                    place, there);
    } else {
        zr_hub_fail(r, ZERO_ERR_SYSTEM, "rank 0 cannot listen at %s%s%s%s: %s%s", place, name[0] ? " (" : "",
                    name, name[0] ? ")" : "", zr_limit_words(-err, uv_strerror(err), why),
                    err == UV_EADDRINUSE ? "; choose another port" : "");
    }
}

/* Rank 0 has a descriptor for each other rank. If a large world leaves few for CUDA, NCCL, other contexts and
 * the program, the process gets a higher limit. */
static void make_room_for_ranks(struct zr_rendezvous *r)
{
    const unsigned long long n = (unsigned long long)r->w.world;
    const unsigned long long used = (unsigned long long)zr_count_descriptors();
    const unsigned long long before = zr_descriptor_limit();
    const unsigned long long wanted = used + n + SPARE_DESCRIPTORS;
    if (n < LARGE_WORLD || before >= wanted)
        return;
    const unsigned long long limit =
        zr_raise_descriptor_limit(wanted > ZR_MANY_DESCRIPTORS ? wanted : ZR_MANY_DESCRIPTORS);
    if (limit < used + n)
        zr_hub_fail(
            r, ZERO_ERR_SYSTEM,
            "rank 0 needs %llu descriptors, for it has a connection to each of %d ranks, and may have at "
            "most %llu open (RLIMIT_NOFILE, ulimit -n): start it with ulimit -n %llu or more",
            used + n, r->w.world, limit, wanted);
    else if (limit > before && r->w.waiting)
        zr_info(r->w.waiting->log,
                "raised the limit on descriptors (RLIMIT_NOFILE, ulimit -n) from %llu to %llu: rank 0 has a "
                "connection to each of %d ranks",
                before, limit, r->w.world);
}

void zr_hub_listen(struct zr_rendezvous *r)
{
    /* The context that listens passes on the connections for this one. */
    if (!zr_open_name_may_listen(r->w.open_name)) {
        uv_timer_start(&r->retry, listen_again, LISTEN_AGAIN_MS, 0);
        return;
    }
    if (!r->listen_ms)
        r->listen_ms = zr_hub_now_ms(r);
    const union zr_address *failed = &r->to[0];
    int fd[2], err = open_sockets(r->to, r->n_to, fd, &failed);
    if (is_absent(err) && !zr_address_is_loopback(&r->to[0]) && !r->w.interface[0])
        err = open_anywhere(r, fd, &failed);
    if (!err) {
        for (int i = 0; i < 2; i++)
            if (fd[i] >= 0 && !err)
                err = hand_over(r, &r->listener[i], fd[i]);
            else if (fd[i] >= 0)
                close(fd[i]);
        if (err)
            zr_hub_stop_listening(r);
        else if (r->w.file[0])
            zr_hub_write_file(r);
        if (!err)
            make_room_for_ranks(r);
    }
    int64_t patience = r->timeout_ms / 2 < BIND_MS ? r->timeout_ms / 2 : BIND_MS;
    if (err == UV_EADDRINUSE && zr_hub_now_ms(r) - r->listen_ms <= patience)
        uv_timer_start(&r->retry, listen_again, LISTEN_AGAIN_MS, 0);
    else if (err)
        say_cannot_listen(r, failed, err);
}

/* --- starting --- */

bool zr_hub_all_came(const struct zr_rendezvous *r)
{
    for (int i = 1; i < r->w.world; i++)
        if (r->members[i].state == ZR_MEMBER_EMPTY)
            return false;
    return true;
}

/* Checks whether a descriptor is left. Without one, libuv accepts connections and closes them again, and
 * reports nothing. The check is skipped while connections that will soon be dropped may free a descriptor. */
static void check_descriptors(struct zr_rendezvous *r)
{
    int error = zr_no_descriptors(1);
    if (error)
        zr_hub_no_descriptor(r, error, "for the connections of other ranks");
}

static void on_patience(uv_timer_t *t)
{
    struct zr_rendezvous *r = t->data;
    drop_slow(r);
    zr_hub_give_up_slow(r);
    if (r->n_listening && !r->n_unidentified && !r->ready && !r->code && !zr_hub_all_came(r))
        check_descriptors(r);
}

void zr_hub_start(struct zr_rendezvous *r)
{
    r->started_ms = zr_hub_now_ms(r);
    uv_timer_start(&r->patience, on_patience, SWEEP_MS, SWEEP_MS);
    if (r->w.rank == 0)
        r->members[0].state = ZR_MEMBER_HERE;
    r->n_here = 1;
    zr_hub_find(r);
}
