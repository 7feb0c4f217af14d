/* SPDX-License-Identifier: Apache-2.0 */
/* open_names.c: the list of this process's contexts that meet other ranks. One lock protects all of it, and
 * is held only briefly. */
#include "comm/meet/open_names.h"
#include "comm/timed_call.h"
#include "kernels/alloc.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct zr_open_name {
    struct zr_open_name *prev, *next;
    char name[ZR_NAME_CHARS + 1], where[sizeof((struct zr_world *)0)->file];
    int rank, world;
    bool opens, listens;
    /* Set for a rank 0 that awaits connections, otherwise NULL. */
    uv_async_t *async;
    struct zr_handed *handed;
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t ended;
static struct zr_open_name *all;

static void lock_names(void)
{
    pthread_mutex_lock(&lock);
}

static void unlock_names(void)
{
    pthread_mutex_unlock(&lock);
}

/* Empties the list in a forked child: the parent's contexts are not the child's. Makes only calls that are
 * safe in a signal handler. */
static void empty_names(void)
{
    for (struct zr_open_name *e = all; e; e = e->next)
        for (struct zr_handed *h = e->handed; h; h = h->next)
            close(h->fd);
    all = NULL;
    zr_cond_init(&ended); /* no thread waits in the child */
    pthread_mutex_unlock(&lock);
}

static void watch_names(void)
{
    zr_cond_init(&ended);
    pthread_atfork(lock_names, unlock_names, empty_names);
}

static void say_where(const struct zr_world *w, const char *where, char text[sizeof w->file])
{
    if (where || w->file[0])
        snprintf(text, sizeof w->file, "%s", where ? where : w->file);
    else
        snprintf(text, sizeof w->file, strchr(w->host, ':') ? "[%s]:%d" : "%s:%d", w->host, w->port);
}

static bool is_same(const struct zr_open_name *a, const struct zr_open_name *b)
{
    return a->rank == b->rank && a->world == b->world && !strcmp(a->name, b->name) &&
           !strcmp(a->where, b->where);
}

static struct zr_open_name *find_same(const struct zr_open_name *mine)
{
    struct zr_open_name *e = all;
    while (e && !is_same(e, mine))
        e = e->next;
    return e;
}

static void put_name(struct zr_open_name *e)
{
    e->next = all;
    if (all)
        all->prev = e;
    all = e;
}

int zr_open_name_take(const struct zr_world *w, const char *where, struct zr_open_name **out)
{
    struct zr_open_name *e;
    *out = NULL;
    ZR_TRY(ZR_ZALLOC(e, 1, "the name of a context"));
    snprintf(e->name, sizeof e->name, "%s", w->name);
    say_where(w, where, e->where);
    e->rank = w->rank;
    e->world = w->world;
    pthread_once(&once, watch_names);
    pthread_mutex_lock(&lock);
    bool taken = find_same(e);
    if (!taken)
        put_name(e);
    pthread_mutex_unlock(&lock);
    if (taken) {
        int err =
            zr_fail(ZERO_ERR_ARG,
                    "another context with cfg.launch.name \"%s\" of rank %d of %d, which meets at %.200s, is "
                    "open or being wrapped in this process: give each context that is open at the same time "
                    "a cfg.launch.name, the same on all ranks, or call zero_unwrap first",
                    e->name, e->rank, e->world, e->where);
        free(e);
        return err;
    }
    *out = e;
    return 0;
}

static void drop_handed(struct zr_open_name *e)
{
    while (e->handed) {
        struct zr_handed *h = e->handed;
        e->handed = h->next;
        close(h->fd);
        free(h);
    }
}

void zr_open_name_drop(struct zr_open_name *e)
{
    if (!e)
        return;
    pthread_mutex_lock(&lock);
    if (e->prev)
        e->prev->next = e->next;
    else
        all = e->next;
    if (e->next)
        e->next->prev = e->prev;
    drop_handed(e);
    pthread_cond_broadcast(&ended);
    pthread_mutex_unlock(&lock);
    free(e);
}

static bool another_opens(const struct zr_open_name *mine)
{
    for (const struct zr_open_name *e = all; e; e = e->next)
        if (e != mine && e->opens && e->rank == mine->rank)
            return true;
    return false;
}

bool zr_open_name_begin(struct zr_open_name *e, int64_t ms)
{
    if (!e)
        return true;
    struct timespec until = zr_in_ns(ms * 1000000);
    pthread_mutex_lock(&lock);
    while (another_opens(e) && pthread_cond_timedwait(&ended, &lock, &until) != ETIMEDOUT)
        ;
    e->opens = !another_opens(e);
    bool begun = e->opens;
    pthread_mutex_unlock(&lock);
    return begun;
}

void zr_open_name_end(struct zr_open_name *e)
{
    if (!e)
        return;
    pthread_mutex_lock(&lock);
    e->opens = false;
    pthread_cond_broadcast(&ended);
    pthread_mutex_unlock(&lock);
}

/* --- rank 0 --- */

bool zr_open_name_may_listen(struct zr_open_name *mine)
{
    if (!mine)
        return true;
    pthread_mutex_lock(&lock);
    const struct zr_open_name *e = all;
    while (e && (e == mine || !e->listens || strcmp(e->where, mine->where)))
        e = e->next;
    mine->listens = !e;
    pthread_mutex_unlock(&lock);
    return !e;
}

void zr_open_name_listened(struct zr_open_name *e)
{
    if (!e)
        return;
    pthread_mutex_lock(&lock);
    e->listens = false;
    pthread_mutex_unlock(&lock);
}

void zr_open_name_await(struct zr_open_name *e, uv_async_t *async)
{
    if (!e)
        return;
    pthread_mutex_lock(&lock);
    e->async = async;
    if (!async)
        drop_handed(e);
    pthread_mutex_unlock(&lock);
}

struct zr_handed *zr_open_name_next(struct zr_open_name *e)
{
    if (!e)
        return NULL;
    pthread_mutex_lock(&lock);
    struct zr_handed *h = e->handed;
    if (h)
        e->handed = h->next;
    pthread_mutex_unlock(&lock);
    return h;
}

/* Called with the lock held. */
static struct zr_open_name *find_awaiting(const struct zr_open_name *mine, const char *name)
{
    struct zr_open_name *e = all;
    while (e && (e == mine || !e->async || strcmp(e->where, mine->where) || strcmp(e->name, name)))
        e = e->next;
    return e;
}

bool zr_open_name_hand(struct zr_open_name *mine, int fd, const struct zr_shake *s, const struct zr_frame *f,
                       const struct zr_hello *hello)
{
    struct zr_handed *h = mine ? calloc(1, sizeof *h) : NULL;
    if (!h)
        return false;
    memcpy(h->nonce_0, s->nonce_0, sizeof h->nonce_0);
    h->frame = *f;
    h->hello = *hello;
    pthread_mutex_lock(&lock);
    struct zr_open_name *e = find_awaiting(mine, s->name);
    h->fd = e ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1;
    bool handed = h->fd >= 0;
    if (handed) {
        h->next = e->handed;
        e->handed = h;
        uv_async_send(e->async);
    }
    pthread_mutex_unlock(&lock);
    if (!handed)
        free(h);
    return handed;
}
