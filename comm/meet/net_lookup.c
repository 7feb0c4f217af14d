/* SPDX-License-Identifier: Apache-2.0 */
/* net_lookup.c: see net_lookup.h. */
#include "comm/meet/net_lookup.h"
#include "kernels/thread.h"

#include <errno.h>
#include <netdb.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct zr_lookup {
    /* of the loop: the thread has ended */
    uv_async_t ended;
    struct zr_thread thread;
    pthread_mutex_t lock;
    /* with the lock: the loop and the thread; who is last frees it */
    int n_holders;
    /* with the lock: the handle is closed, or will be */
    bool left;
    /* with the lock: of the thread, when it ends */
    struct zr_looked_up found;
    void (*done)(void *arg, const struct zr_looked_up *found);
    void *arg;
    int port;
    char host[256];
};

/* With the lock, which is released. */
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
    for (const struct addrinfo *a = all; a && out->n < ZR_LOOKUP_MOST; a = a->ai_next) {
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
    /* Not AI_ADDRCONFIG, which hides ::1 where no other interface has IPv6. */
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
    pthread_mutex_lock(&l->lock); /* the thread is done with the handle */
    pthread_mutex_unlock(&l->lock);
    if (!uv_is_closing((uv_handle_t *)a))
        uv_close((uv_handle_t *)a, lookup_closed);
}

int zr_lookup_start(uv_loop_t *loop, const char *host, int port,
                    void (*done)(void *arg, const struct zr_looked_up *found), void *arg,
                    struct zr_lookup **out)
{
    struct zr_lookup *l = calloc(1, sizeof *l);
    *out = NULL;
    if (!l)
        return zr_fail(ZR_ERR_NOMEM, "no memory to look up \"%.200s\"", host);
    int err = uv_async_init(loop, &l->ended, on_ended);
    if (err) {
        free(l);
        return zr_fail(ZR_ERR_SYSTEM,
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
        zr_thread_leave(&l->thread); /* l is here until its handle is closed */
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
