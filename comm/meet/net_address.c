/* SPDX-License-Identifier: Apache-2.0 */
/* net_address.c: addresses, interfaces and look-ups. All but the look-up query the kernel and keep
 * nothing. */
#include "comm/meet/net_address.h"
#include "kernels/alloc.h"
#include "kernels/limits.h"
#include "kernels/thread.h"

#include <arpa/inet.h>
#include <errno.h>
#include <net/if.h>
#include <netdb.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <uv.h>

/* --- one address --- */

/* Converts an IPv6 address that stands for an IPv4 one into that. */
static union zr_address plain(const union zr_address *a)
{
    union zr_address out = *a;
    if (a->any.sa_family == AF_INET6 && IN6_IS_ADDR_V4MAPPED(&a->v6.sin6_addr)) {
        memset(&out, 0, sizeof out);
        out.v4.sin_family = AF_INET;
        out.v4.sin_port = a->v6.sin6_port;
        memcpy(&out.v4.sin_addr, &a->v6.sin6_addr.s6_addr[12], sizeof out.v4.sin_addr);
    }
    return out;
}

bool zr_address_parse(const char *number, int port, union zr_address *out)
{
    memset(out, 0, sizeof *out);
    if (uv_ip4_addr(number, port, &out->v4) == 0)
        return true;
    /* libuv ignores a zone that does not exist. */
    bool is_v6 = uv_ip6_addr(number, port, &out->v6) == 0 && (!strchr(number, '%') || out->v6.sin6_scope_id);
    if (is_v6)
        *out = plain(out);
    return is_v6;
}

void zr_address_print_host(const union zr_address *a, char text[ZR_ADDRESS_CHARS])
{
    const union zr_address p = plain(a);
    char zone[UV_IF_NAMESIZE] = "";
    size_t n = sizeof zone;
    char number[INET6_ADDRSTRLEN];
    if (uv_ip_name(&p.any, number, sizeof number))
        snprintf(number, sizeof number, "?");
    if (p.any.sa_family != AF_INET6 || !p.v6.sin6_scope_id || uv_if_indextoname(p.v6.sin6_scope_id, zone, &n))
        zone[0] = 0;
    snprintf(text, ZR_ADDRESS_CHARS, "%s%s%s", number, zone[0] ? "%" : "", zone);
}

void zr_address_print(const union zr_address *a, char text[ZR_ADDRESS_CHARS])
{
    char host[ZR_ADDRESS_CHARS];
    zr_address_print_host(a, host);
    snprintf(text, ZR_ADDRESS_CHARS, strchr(host, ':') ? "[%.80s]:%d" : "%.80s:%d", host, zr_address_port(a));
}

int zr_address_port(const union zr_address *a)
{
    return ntohs(a->any.sa_family == AF_INET6 ? a->v6.sin6_port : a->v4.sin_port);
}

void zr_address_set_port(union zr_address *a, int port)
{
    if (a->any.sa_family == AF_INET6)
        a->v6.sin6_port = htons((uint16_t)port);
    else
        a->v4.sin_port = htons((uint16_t)port);
}

bool zr_address_is_any(const union zr_address *a)
{
    return a->any.sa_family == AF_INET6 ? IN6_IS_ADDR_UNSPECIFIED(&a->v6.sin6_addr)
                                        : a->v4.sin_addr.s_addr == htonl(INADDR_ANY);
}

bool zr_address_is_loopback(const union zr_address *a)
{
    const union zr_address p = plain(a);
    return p.any.sa_family == AF_INET6 ? IN6_IS_ADDR_LOOPBACK(&p.v6.sin6_addr)
                                       : ntohl(p.v4.sin_addr.s_addr) >> 24 == 127;
}

static bool same_host(const union zr_address *a, const union zr_address *b)
{
    const union zr_address p = plain(a), q = plain(b);
    if (p.any.sa_family != q.any.sa_family)
        return false;
    if (p.any.sa_family == AF_INET)
        return p.v4.sin_addr.s_addr == q.v4.sin_addr.s_addr;
    return memcmp(&p.v6.sin6_addr, &q.v6.sin6_addr, sizeof p.v6.sin6_addr) == 0 &&
           (p.v6.sin6_scope_id == q.v6.sin6_scope_id || !p.v6.sin6_scope_id || !q.v6.sin6_scope_id);
}

bool zr_address_same(const union zr_address *a, const union zr_address *b)
{
    return same_host(a, b) && zr_address_port(a) == zr_address_port(b);
}

static bool is_link_local(const union zr_address *a)
{
    return a->any.sa_family == AF_INET6 ? IN6_IS_ADDR_LINKLOCAL(&a->v6.sin6_addr)
                                        : ntohl(a->v4.sin_addr.s_addr) >> 16 == 0xa9fe;
}

bool zr_address_reaches_far(const union zr_address *a)
{
    return !zr_address_is_loopback(a) && !is_link_local(a);
}

/* --- interfaces --- */

static union zr_address address_of(const uv_interface_address_t *i)
{
    union zr_address a = {.v4 = {.sin_family = AF_UNSPEC}};
    if (i->address.address4.sin_family == AF_INET6)
        a.v6 = i->address.address6;
    else
        a.v4 = i->address.address4;
    return a;
}

static void add_interface(struct zr_interfaces *c, const uv_interface_address_t *i)
{
    if (c->n == (int)(sizeof c->of / sizeof *c->of))
        return;
    struct zr_interface *to = &c->of[c->n++];
    memset(to, 0, sizeof *to);
    snprintf(to->name, sizeof to->name, "%.47s", i->name);
    to->address = address_of(i);
    zr_address_set_port(&to->address, 0);
}

static bool is_wanted(const uv_interface_address_t *i, const char *want)
{
    union zr_address number;
    const union zr_address own = address_of(i);
    if (!*want || !strcmp(i->name, want))
        return true;
    return zr_address_parse(want, 0, &number) && same_host(&own, &number);
}

/* Orders addresses: global before link-local, loopback last; IPv4 before IPv6 within each. */
static int turn_of(const union zr_address *a)
{
    return (zr_address_is_loopback(a) ? 4 : is_link_local(a) ? 2 : 0) + (a->any.sa_family == AF_INET6);
}

static void sort_interfaces(struct zr_interfaces *c)
{
    for (int i = 1; i < c->n; i++)
        for (int k = i; k > 0 && turn_of(&c->of[k].address) < turn_of(&c->of[k - 1].address); k--) {
            const struct zr_interface later = c->of[k - 1];
            c->of[k - 1] = c->of[k];
            c->of[k] = later;
        }
}

/* Drops the link-local addresses of an interface that has better ones. */
static void drop_link_local(struct zr_interfaces *c)
{
    int n = 0;
    for (int i = 0; i < c->n; i++) {
        bool has_better = false;
        for (int k = 0; k < c->n; k++)
            has_better |= !strcmp(c->of[k].name, c->of[i].name) && !is_link_local(&c->of[k].address);
        if (!is_link_local(&c->of[i].address) || !has_better)
            c->of[n++] = c->of[i];
    }
    c->n = n;
}

/* Lists the addresses of the interface or address that want names. "": all. */
static int find(const char *want, struct zr_interfaces *out)
{
    uv_interface_address_t *all;
    char why[ZR_SYSTEM_WORDS];
    int n, err = uv_interface_addresses(&all, &n);
    *out = (struct zr_interfaces){.n = 0};
    if (err)
        return zr_fail(ZERO_ERR_SYSTEM, "this host's network interfaces: %s",
                       zr_limit_words(-err, uv_strerror(err), why));
    for (int i = 0; i < n; i++)
        if (is_wanted(&all[i], want))
            add_interface(out, &all[i]);
    uv_free_interface_addresses(all, n);
    union zr_address number;
    if (!zr_address_parse(want, 0, &number)) /* otherwise it is the address that is wanted */
        drop_link_local(out);
    sort_interfaces(out);
    return 0;
}

int zr_interfaces_all(struct zr_interfaces *out)
{
    return find("", out);
}

int zr_interfaces_find(const char *name, const char *want, struct zr_interfaces *out)
{
    struct zr_interfaces there;
    char text[512];
    int err = find(want, out);
    if (err || (out->n && *want))
        return err;
    err = zr_interfaces_all(&there);
    if (err)
        return err;
    zr_interfaces_list(&there, text, sizeof text);
    out->n = 0;
    return zr_fail(ZERO_ERR_ARG, "%s is \"%.60s\"%s: this host has %s", name, want,
                   if_nametoindex(want) ? ", which is down or has no address" : "", text);
}

bool zr_interfaces_reach_far(const struct zr_interfaces *c, int family)
{
    bool any = false;
    for (int i = 0; i < c->n; i++)
        any |= c->of[i].address.any.sa_family == family && zr_address_reaches_far(&c->of[i].address);
    return any;
}

static void __attribute__((format(printf, 3, 4))) append_text(char *text, size_t n_text, const char *fmt, ...)
{
    size_t used = strlen(text);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text + used, n_text - used, fmt, ap);
    va_end(ap);
}

void zr_interfaces_list(const struct zr_interfaces *c, char *text, size_t n_text)
{
    snprintf(text, n_text, "%s", c->n ? "" : "none");
    for (int i = 0; i < c->n; i++) {
        bool listed = false;
        for (int k = 0; k < i; k++)
            listed |= !strcmp(c->of[k].name, c->of[i].name);
        if (listed)
            continue;
        append_text(text, n_text, "%s%s (", i ? ", " : "", c->of[i].name);
        for (int k = i; k < c->n; k++) {
            char host[ZR_ADDRESS_CHARS];
            zr_address_print_host(&c->of[k].address, host);
            if (!strcmp(c->of[k].name, c->of[i].name))
                append_text(text, n_text, "%s%s", k > i ? ", " : "", host);
        }
        append_text(text, n_text, ")");
    }
}

void zr_interface_of(const union zr_address *a, char name[ZR_INTERFACE_CHARS])
{
    struct zr_interfaces all;
    name[0] = 0;
    for (int i = 0; zr_interfaces_all(&all) == 0 && i < all.n; i++)
        if (same_host(&all.of[i].address, a)) {
            memcpy(name, all.of[i].name, ZR_INTERFACE_CHARS);
            return;
        }
}

/* --- sockets --- */

static socklen_t bytes_of(const union zr_address *a)
{
    return a->any.sa_family == AF_INET6 ? sizeof a->v6 : sizeof a->v4;
}

int zr_address_bind(const union zr_address *at)
{
    const bool is_v6 = at->any.sa_family == AF_INET6;
    const int on = 1, alone = !zr_address_is_any(at);
    int fd = socket(at->any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -errno;
    if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) ||
        (is_v6 && setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &alone, sizeof alone)) ||
        bind(fd, &at->any, bytes_of(at))) {
        int err = -errno;
        close(fd);
        return err;
    }
    return fd;
}

int zr_address_bind_all(int port, union zr_address *at)
{
    int fd = -EAFNOSUPPORT;
    for (int i = 0; i < 2 && (fd == -EAFNOSUPPORT || fd == -EADDRNOTAVAIL); i++) {
        zr_address_parse(i ? "0.0.0.0" : "::", port, at);
        fd = zr_address_bind(at);
    }
    return fd;
}

/* Connecting a datagram socket sends nothing, and chooses the address from which it would send. */
int zr_address_source(const union zr_address *to, union zr_address *from)
{
    socklen_t n = sizeof *from;
    union zr_address there = *to;
    int err = 0, fd = socket(to->any.sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    memset(from, 0, sizeof *from);
    if (!zr_address_port(&there))
        zr_address_set_port(&there, 9);
    if (fd < 0)
        return errno;
    if (connect(fd, &there.any, bytes_of(&there)) || getsockname(fd, &from->any, &n))
        err = errno;
    close(fd);
    zr_address_set_port(from, 0);
    return err;
}

/* --- as text, with ports --- */

/* Reads a decimal number without leading zeros, from 1 to 65535. 0: it is none. */
static int read_port(const char *text)
{
    int port = 0;
    size_t n = strlen(text);
    if (n < 1 || n > 5 || strspn(text, "0123456789") != n || text[0] == '0')
        return 0;
    for (size_t i = 0; i < n; i++)
        port = port * 10 + (text[i] - '0');
    return port <= 65535 ? port : 0;
}

bool zr_address_read(const char *text, size_t n, union zr_address *out)
{
    char copy[ZR_ADDRESS_CHARS], *host = copy;
    if (n >= sizeof copy || memchr(text, 0, n))
        return false;
    memcpy(copy, text, n);
    copy[n] = 0;
    char *colon = strrchr(copy, ':');
    int port = colon ? read_port(colon + 1) : 0;
    if (!port || colon == copy || strchr(copy, '%'))
        return false;
    bool in_brackets = *copy == '[' && colon[-1] == ']';
    *colon = 0;
    if (in_brackets) {
        host++;
        colon[-1] = 0;
    }
    return zr_address_parse(host, port, out) && (out->any.sa_family == AF_INET6) == in_brackets;
}

void zr_address_list_print(const union zr_address *at, int n, char text[ZR_ADDRESS_LIST_CHARS])
{
    size_t used = 0;
    text[0] = 0;
    for (int i = 0; i < n; i++) {
        char one[ZR_ADDRESS_CHARS];
        zr_address_print(&at[i], one);
        used += (size_t)snprintf(text + used, ZR_ADDRESS_LIST_CHARS - used, "%s%s", i ? " " : "", one);
    }
}

int zr_address_list_read(const char *text, size_t n, union zr_address at[ZR_LOOKUP_MAX])
{
    int found = 0;
    for (size_t from = 0; from < n || (n && from == n);) {
        const char *space = memchr(text + from, ' ', n - from);
        size_t length = space ? (size_t)(space - text) - from : n - from;
        if (found == ZR_LOOKUP_MAX || !zr_address_read(text + from, length, &at[found++]))
            return -1;
        from += length + 1;
    }
    return found;
}

int zr_address_list_reaching(const struct zr_interfaces *mine, const union zr_address *bound, int most,
                             union zr_address *at)
{
    const bool is_v6 = bound->any.sa_family == AF_INET6; /* an IPv6 socket receives IPv4 connections, too */
    int n = 0;
    for (int i = 0; i < mine->n && n < most; i++) {
        const union zr_address *one = &mine->of[i].address;
        if (!zr_address_reaches_far(one) || (!is_v6 && one->any.sa_family != AF_INET))
            continue;
        at[n] = *one;
        zr_address_set_port(&at[n++], zr_address_port(bound));
    }
    return n;
}

/* --- the addresses of a name --- */

struct zr_lookup {
    /* Belongs to the loop. Sent when the thread has ended. */
    uv_async_t ended;
    struct zr_thread thread;
    pthread_mutex_t lock;
    /* Protected by the lock: holders are the loop and the thread. The last one frees the struct. */
    int n_holders;
    /* Protected by the lock: the handle is closed, or will be. */
    bool left;
    /* Protected by the lock: the thread's result. */
    struct zr_looked_up found;
    void (*done)(void *arg, const struct zr_looked_up *found);
    void *arg;
    int port;
    char host[256];
};

/* Drops a hold; the last one frees l. Called with the lock held, which it releases. */
static void drop_hold(struct zr_lookup *l)
{
    bool last = --l->n_holders == 0;
    pthread_mutex_unlock(&l->lock);
    if (!last)
        return;
    pthread_mutex_destroy(&l->lock);
    free(l);
}

static void take_found(struct zr_looked_up *out, const struct addrinfo *all, int port)
{
    for (const struct addrinfo *a = all; a && out->n < ZR_LOOKUP_MAX; a = a->ai_next) {
        if (a->ai_family != AF_INET && a->ai_family != AF_INET6)
            continue;
        memcpy(&out->at[out->n], a->ai_addr, a->ai_addrlen);
        zr_address_set_port(&out->at[out->n++], port);
    }
    if (!out->n)
        strcpy(out->why, "it has none that is an IPv4 or IPv6 address");
}

static void ask_resolver(void *arg)
{
    struct zr_lookup *l = arg;
    /* Not AI_ADDRCONFIG, which hides ::1 if no other interface has IPv6. */
    const struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    struct addrinfo *all = NULL;
    struct zr_looked_up found = {.n = 0};
    int err = getaddrinfo(l->host, NULL, &hints, &all);
    if (err)
        snprintf(found.why, sizeof found.why, "%s", err == EAI_SYSTEM ? strerror(errno) : gai_strerror(err));
    else
        take_found(&found, all, l->port);
    if (!err)
        freeaddrinfo(all);
    pthread_mutex_lock(&l->lock);
    l->found = found;
    if (!l->left)
        uv_async_send(&l->ended);
    drop_hold(l);
}

static void lookup_closed(uv_handle_t *h)
{
    struct zr_lookup *l = h->data;
    struct zr_looked_up found = {.why = "nobody waits for it"};
    pthread_mutex_lock(&l->lock);
    if (!l->left)
        found = l->found;
    void (*done)(void *arg, const struct zr_looked_up *found) = l->done;
    void *owner = l->arg;
    drop_hold(l);
    done(owner, &found);
}

static void on_ended(uv_async_t *a)
{
    struct zr_lookup *l = a->data;
    pthread_mutex_lock(&l->lock); /* the thread no longer uses the handle */
    pthread_mutex_unlock(&l->lock);
    if (!uv_is_closing((uv_handle_t *)a))
        uv_close((uv_handle_t *)a, lookup_closed);
}

int zr_lookup_start(uv_loop_t *loop, const char *host, int port,
                    void (*done)(void *arg, const struct zr_looked_up *found), void *arg,
                    struct zr_lookup **out)
{
    struct zr_lookup *l;
    *out = NULL;
    ZR_TRY(ZR_ZALLOC(l, 1, "the address of \"%.200s\"", host));
    int err = uv_async_init(loop, &l->ended, on_ended);
    if (err) {
        free(l);
        return zr_fail(ZERO_ERR_SYSTEM,
                       "cannot look up \"%.200s\": %s; use a name that this host knows, or an IP address",
                       host, uv_strerror(err));
    }
    pthread_mutex_init(&l->lock, NULL);
    l->ended.data = l;
    l->n_holders = 2;
    l->done = done;
    l->arg = arg;
    l->port = port;
    snprintf(l->host, sizeof l->host, "%s", host);
    *out = l;
    if (zr_thread_start(&l->thread, "zero-lookup", ask_resolver, l) == 0) {
        zr_thread_leave(&l->thread); /* l stays until its handle is closed */
        return 0;
    }
    l->n_holders = 1;
    snprintf(l->found.why, sizeof l->found.why, "%s", zr_error_text());
    uv_close((uv_handle_t *)&l->ended, lookup_closed);
    return 0;
}

void zr_lookup_leave(struct zr_lookup *l)
{
    pthread_mutex_lock(&l->lock);
    l->left = true;
    pthread_mutex_unlock(&l->lock);
    if (!uv_is_closing((uv_handle_t *)&l->ended))
        uv_close((uv_handle_t *)&l->ended, lookup_closed);
}
