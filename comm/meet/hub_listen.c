/* SPDX-License-Identifier: Apache-2.0 */
/* hub_listen.c: the sockets at which rank 0 waits for the others (see hub.h). */
#include "comm/meet/hub.h"
#include "kernels/limits.h"
#include "kernels/log.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    LISTEN_AGAIN_MS = 20,
    BIND_MS = 2000, /* a port just released by another program may still be held for a moment */
    BACKLOG = 1024,
    LARGE_WORLD = 64, /* smaller ones are not why descriptors run out */
};

static void on_connection(uv_stream_t *server, int status)
{
    struct zr_rendezvous *r = server->data;
    for (int i = 0; status == 0 && i < 2; i++)
        r->listener[i].is_awaited |= (uv_stream_t *)&r->listener[i].tcp == server;
    if (status == 0)
        zr_hub_admit(r);
}

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

/* fd listens already: whatever can go wrong with an address has gone well. */
int zr_hub_hand_over(struct zr_rendezvous *r, struct zr_listener *s, int fd)
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

static int open_at(const union zr_address *at)
{
    int fd = zr_address_bind(at);
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

/* All of these or none, but those that this host has not, if it has one; fd: those that are open, else -1.
 * Returns 0, or what is wrong with *failed. */
static int open_sockets(const union zr_address *at, int n, int fd[2], const union zr_address **failed)
{
    int n_open = 0, err = 0;
    for (int i = 0; i < 2; i++) {
        fd[i] = i < n && (!err || is_absent(err)) ? open_at(&at[i]) : -1;
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

/* On all addresses, where what was given is none of this host, as that of a gateway or of a container's host
 * is not; without IPv6 on all of IPv4. */
static int open_anywhere(struct zr_rendezvous *r, int fd[2], const union zr_address **failed)
{
    const bool was_given = !zr_address_is_any(&r->to[0]);
    const int family = r->to[0].any.sa_family;
    char given[ZR_ADDRESS_CHARS];
    zr_address_print_host(&r->to[0], given);
    int err = -EADDRNOTAVAIL;
    for (int i = 0; i < 2 && is_absent(err); i++) {
        zr_address_parse(i ? "0.0.0.0" : "::", r->w.port, &r->to[0]);
        r->n_to = 1;
        err = open_sockets(r->to, 1, fd, failed);
    }
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
        zr_hub_fail(r, ZR_ERR_SYSTEM,
                    "rank 0 cannot listen at %s: no interface of this host has that address: it has %s",
                    place, there);
    } else {
        zr_hub_fail(r, ZR_ERR_SYSTEM, "rank 0 cannot listen at %s%s%s%s: %s%s", place, name[0] ? " (" : "",
                    name, name[0] ? ")" : "", zr_limit_words(-err, uv_strerror(err), why),
                    err == UV_EADDRINUSE ? "; choose another port" : "");
    }
}

/* Rank 0 has a descriptor for each other rank. Where a large world leaves less than as many for the rest of
 * the program, the process gets a higher limit. */
static void make_room_for_ranks(struct zr_rendezvous *r)
{
    const unsigned long long n = (unsigned long long)r->w.world;
    const unsigned long long used = (unsigned long long)zr_count_descriptors();
    const unsigned long long before = zr_descriptor_limit();
    if (n < LARGE_WORLD || before >= used + 2 * n)
        return;
    const unsigned long long limit = zr_raise_descriptor_limit(used + 2 * n);
    if (limit < used + n)
        zr_hub_fail(
            r, ZR_ERR_SYSTEM,
            "rank 0 needs %llu descriptors, for it has a connection to each of %d ranks, and may have at "
            "most %llu open (RLIMIT_NOFILE, ulimit -n): start it with ulimit -n %llu or more",
            used + n, r->w.world, limit, used + 2 * n);
    else if (limit > before && r->w.waiting)
        zr_info(r->w.waiting->log,
                "raised the limit on descriptors (RLIMIT_NOFILE, ulimit -n) from %llu to %llu: rank 0 has a "
                "connection to each of %d ranks",
                before, limit, r->w.world);
}

void zr_hub_listen(struct zr_rendezvous *r)
{
    if (!zr_open_name_may_listen(r->w.open_name)) { /* that one hands over who comes for this one */
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
                err = zr_hub_hand_over(r, &r->listener[i], fd[i]);
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
