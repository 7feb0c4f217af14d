/* SPDX-License-Identifier: Apache-2.0 */
/* host_stream.c: streams and events of the host device. host_device.h explains them. */
#include "kernels/host/host_device.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { TICKET_BITS = 48, ASK_MS = 100 };
#define TICKET_MASK ((UINT64_C(1) << TICKET_BITS) - 1)

/* --- gates --- */

static void gate_init(struct zr_host_gate *g)
{
    atomic_init(&g->value, 0);
    atomic_init(&g->wake_at, UINT64_MAX);
    pthread_condattr_t attr;
    pthread_mutex_init(&g->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&g->cond, &attr);
    pthread_condattr_destroy(&attr);
}

static void gate_destroy(struct zr_host_gate *g)
{
    pthread_mutex_destroy(&g->lock);
    pthread_cond_destroy(&g->cond);
}

static bool gate_passed(struct zr_host_gate *g, uint64_t ticket)
{
    return atomic_load_explicit(&g->value, memory_order_acquire) >= ticket;
}

static void gate_wake(struct zr_host_gate *g)
{
    pthread_mutex_lock(&g->lock);
    atomic_store(&g->wake_at, UINT64_MAX); /* sleepers not served yet set it again */
    pthread_cond_broadcast(&g->cond);
    pthread_mutex_unlock(&g->lock);
}

/* Only one thread advances a gate. Each side writes its word, then reads the other's, all sequentially
 * consistent. So either the sleeper sees the new value, or it is seen and woken. */
static void gate_advance(struct zr_host_gate *g, uint64_t value)
{
    atomic_store(&g->value, value);
    if (atomic_load(&g->wake_at) <= value)
        gate_wake(g);
}

/* Returns false if the gate does not pass the ticket within spin_ns. */
static bool gate_spin(struct zr_host_gate *g, uint64_t ticket, int spin_ns)
{
    if (gate_passed(g, ticket))
        return true;
    if (spin_ns <= 0)
        return false;
    int64_t until = zr_now_ns() + spin_ns;
    do {
        for (int i = 0; i < 32; i++) {
            if (gate_passed(g, ticket))
                return true;
            zr_relax();
        }
    } while (zr_now_ns() < until);
    return false;
}

/* Sleeps until the gate passes the ticket, or until that time. until NULL: as long as it takes. */
static bool gate_sleep(struct zr_host_gate *g, uint64_t ticket, const struct timespec *until)
{
    bool passed = false, late = false;
    pthread_mutex_lock(&g->lock);
    for (;;) {
        if (ticket < atomic_load(&g->wake_at))
            atomic_store(&g->wake_at, ticket);
        passed = atomic_load(&g->value) >= ticket;
        if (passed || late)
            break; /* a wake_at left behind costs one needless wake */
        late = until ? pthread_cond_timedwait(&g->cond, &g->lock, until) == ETIMEDOUT
                     : pthread_cond_wait(&g->cond, &g->lock) != 0;
    }
    pthread_mutex_unlock(&g->lock);
    return passed;
}

/* Called by a stream's thread, and by a thread that puts work on a stream. */
static void gate_wait(struct zr_host_gate *g, uint64_t ticket, int spin_ns)
{
    if (!gate_spin(g, ticket, spin_ns))
        gate_sleep(g, ticket, NULL);
}

/* Called by a thread outside the device. It calls dev->ask while it waits. */
static int gate_wait_asking(struct zr_host_device *dev, struct zr_host_gate *g, uint64_t ticket)
{
    if (gate_spin(g, ticket, dev->spin_ns))
        return 0;
    struct timespec until;
    int err = 0;
    while (!err) {
        int64_t ns = zr_now_ns() + INT64_C(1000000) * ASK_MS;
        until.tv_sec = (time_t)(ns / 1000000000);
        until.tv_nsec = (long)(ns % 1000000000);
        if (gate_sleep(g, ticket, dev->ask ? &until : NULL))
            break;
        err = dev->ask(dev->ask_arg);
    }
    return err;
}

void zr_host_ask_while_waiting(struct zr_device *base, int (*ask)(void *arg), void *arg)
{
    struct zr_host_device *dev = (struct zr_host_device *)base;
    dev->ask = ask;
    dev->ask_arg = arg;
}

/* --- the stream's thread --- */

static void stop_thread(void *arg)
{
    struct zr_stream *s = *(struct zr_stream **)arg;
    atomic_store(&s->stop, true);
}

/* The stream may have been left. Each side writes its word, then reads the other's, all sequentially
 * consistent. So either the operation does not begin, or the thread that leaves sees it and waits for its
 * end. */
static bool may_begin(struct zr_stream *s, const struct zr_host_op *op)
{
    if (!op->waits)
        atomic_store(&s->works, true);
    if (!atomic_load(&s->stop))
        return true;
    atomic_store(&s->works, false);
    return false;
}

static void stream_main(void *arg)
{
    struct zr_stream *s = arg;
    uint64_t done = atomic_load(&s->done.value);
    while (!atomic_load_explicit(&s->stop, memory_order_relaxed)) {
        gate_wait(&s->put, done + 1, s->dev->spin_ns);
        struct zr_host_op *op = &s->ring[done % s->n_ring];
        if (!may_begin(s, op))
            break;
        op->fn(op->arg);
        atomic_store_explicit(&s->works, false, memory_order_release);
        gate_advance(&s->done, ++done);
    }
}

static void put(struct zr_stream *s, void (*fn)(void *arg), const void *arg, size_t bytes, bool waits)
{
    if (!s->is_queue) {
        struct zr_host_op op;
        memcpy(op.arg, arg, bytes);
        fn(op.arg);
        return;
    }
    /* One thread at a time feeds the stream. This thread wrote put last, or has synchronized with the one
     * that did. */
    uint64_t n = atomic_load_explicit(&s->put.value, memory_order_relaxed);
    if (n >= s->n_ring)
        gate_wait(&s->done, n - s->n_ring + 1, s->dev->spin_ns);
    struct zr_host_op *op = &s->ring[n % s->n_ring];
    if (bytes)
        memcpy(op->arg, arg, bytes);
    op->fn = fn;
    op->waits = waits;
    gate_advance(&s->put, n + 1);
}

void zr_host_put(struct zr_stream *s, void (*fn)(void *arg), const void *arg, size_t bytes)
{
    put(s, fn, arg, bytes, false);
}

void zr_host_put_waiting(struct zr_stream *s, void (*fn)(void *arg), const void *arg, size_t bytes)
{
    put(s, fn, arg, bytes, true);
}

/* --- streams --- */

/* Makes a ring, which replaces the old one. */
static int make_ring(struct zr_host_device *dev, struct zr_stream *s, uint64_t n)
{
    struct zr_host_op *ring = zr_host_take(dev, n * sizeof *ring);
    if (!ring)
        return zr_fail(ZERO_ERR_NOMEM, "no memory for %llu operations of a stream", (unsigned long long)n);
    free(s->ring);
    s->ring = ring;
    s->n_ring = n;
    return 0;
}

/* Returns a closed stream to use again, or a new one in the device's list. The lock is held. */
static struct zr_stream *stream_get(struct zr_host_device *dev)
{
    struct zr_stream *s = dev->free;
    if (s) {
        dev->free = s->next_free;
        return s;
    }
    if (dev->n_streams == ZR_HOST_MAX_STREAMS) {
        zr_fail(ZERO_ERR_NOMEM, "stream open: %d streams are open already, the most that are allowed",
                ZR_HOST_MAX_STREAMS);
        return NULL;
    }
    s = zr_host_take(dev, sizeof *s);
    if (!s) {
        zr_fail(ZERO_ERR_NOMEM, "stream open: no memory for %zu bytes", sizeof *s);
        return NULL;
    }
    if (make_ring(dev, s, ZR_HOST_RING)) {
        free(s);
        return NULL;
    }
    s->dev = dev;
    s->is_queue = true;
    gate_init(&s->put);
    gate_init(&s->done);
    s->index = dev->n_streams;
    dev->streams[dev->n_streams++] = s;
    return s;
}

static void stream_put_back(struct zr_stream *s)
{
    pthread_mutex_lock(&s->dev->lock);
    s->next_free = s->dev->free;
    s->dev->free = s;
    pthread_mutex_unlock(&s->dev->lock);
}

int zr_host_stream_open(struct zr_device *base, enum zr_stream_kind kind, const char *name, void *native,
                        struct zr_stream **out)
{
    struct zr_host_device *dev = (struct zr_host_device *)base;
    *out = NULL;
    if (native)
        return zr_fail(ZERO_ERR_ARG, "stream open: the host has no streams of its own, native must be NULL");
    if (kind == ZR_STREAM_CALLER) {
        struct zr_stream *s = zr_host_take(dev, offsetof(struct zr_stream, put));
        if (!s)
            return zr_fail(ZERO_ERR_NOMEM, "stream open: no memory for a caller stream");
        s->dev = dev;
        *out = s;
        return 0;
    }
    if (kind != ZR_STREAM_QUEUE)
        return zr_fail(ZERO_ERR_ARG, "stream open: kind is %d, must be queue (%d) or caller (%d)", (int)kind,
                       (int)ZR_STREAM_QUEUE, (int)ZR_STREAM_CALLER);

    pthread_mutex_lock(&dev->lock);
    struct zr_stream *s = stream_get(dev);
    pthread_mutex_unlock(&dev->lock);
    if (!s)
        return ZERO_ERR_NOMEM;
    atomic_store(&s->stop, false);
    if (!name)
        name = "zero-stream";
    int err = zr_host_refuses(dev, 0) ? zr_fail(ZERO_ERR_SYSTEM, "thread %s is refused", name)
                                      : zr_thread_start(&s->thread, name, stream_main, s);
    if (err) {
        stream_put_back(s);
        return zr_fail_more(err, "stream open");
    }
    *out = s;
    return 0;
}

void zr_host_stream_close(struct zr_stream *s)
{
    if (!s)
        return;
    if (!s->is_queue) {
        free(s);
        return;
    }
    zr_host_put(s, stop_thread, &s, sizeof(struct zr_stream *));
    zr_thread_join(&s->thread);
    stream_put_back(s);
}

void zr_host_stream_leave(struct zr_stream *s)
{
    if (!s || !s->is_queue)
        return;
    atomic_store(&s->stop, true);
    while (atomic_load(&s->works))
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
}

void zr_host_stream_free(struct zr_stream *s)
{
    gate_destroy(&s->put);
    gate_destroy(&s->done);
    free(s->ring);
    free(s);
}

/* The stream's thread reads the ring only after a put, so it sees the new one. */
int zr_host_stream_reserve(struct zr_stream *s, int64_t n_ops)
{
    uint64_t n = ZR_HOST_RING + (uint64_t)n_ops;
    return s->is_queue && n > s->n_ring ? make_ring(s->dev, s, n) : 0;
}

bool zr_host_stream_has_room(struct zr_stream *s, int64_t n_ops)
{
    if (!s->is_queue)
        return true;
    uint64_t put = atomic_load_explicit(&s->put.value, memory_order_relaxed);
    uint64_t done = atomic_load_explicit(&s->done.value, memory_order_acquire);
    return put == done || put - done + (uint64_t)n_ops <= s->n_ring;
}

int zr_host_stream_sync(struct zr_stream *s)
{
    return s->is_queue ? gate_wait_asking(s->dev, &s->done, atomic_load(&s->put.value)) : 0;
}

/* --- events --- */

int zr_host_event_open(struct zr_device *base, struct zr_event **out)
{
    struct zr_host_device *dev = (struct zr_host_device *)base;
    struct zr_event *e = zr_host_take(dev, sizeof *e);
    *out = NULL;
    if (!e)
        return zr_fail(ZERO_ERR_NOMEM, "event open: no memory for %zu bytes", sizeof *e);
    e->dev = dev;
    atomic_init(&e->record, 0);
    *out = e;
    return 0;
}

void zr_host_event_close(struct zr_event *e)
{
    free(e);
}

int zr_host_event_record(struct zr_event *e, struct zr_stream *s)
{
    uint64_t record = 0;
    if (s->is_queue) {
        uint64_t put = atomic_load(&s->put.value);
        if (put)
            record = (uint64_t)(s->index + 1) << TICKET_BITS | (put & TICKET_MASK);
    }
    /* Release: a thread that waits for work done at once on a caller stream sees that work. */
    atomic_store(&e->record, record);
    return 0;
}

/* Gets the gate and ticket of the most recent record. Returns false if there is nothing to wait for. */
static bool event_target(struct zr_event *e, struct zr_host_gate **gate, uint64_t *ticket)
{
    uint64_t record = atomic_load(&e->record);
    if (!record)
        return false;
    *gate = &e->dev->streams[(record >> TICKET_BITS) - 1]->done;
    *ticket = record & TICKET_MASK;
    return !gate_passed(*gate, *ticket);
}

struct wait_args {
    struct zr_host_gate *gate;
    uint64_t ticket;
    int spin_ns;
};

static void wait_op(void *arg)
{
    const struct wait_args *a = arg;
    gate_wait(a->gate, a->ticket, a->spin_ns);
}

int zr_host_stream_wait(struct zr_stream *s, struct zr_event *e)
{
    struct wait_args a = {.spin_ns = s->dev->spin_ns};
    if (!event_target(e, &a.gate, &a.ticket))
        return 0;
    if (!s->is_queue)
        return gate_wait_asking(s->dev, a.gate, a.ticket);
    if (a.gate == &s->done)
        return 0; /* the stream's earlier work */
    zr_host_put_waiting(s, wait_op, &a, sizeof a);
    return 0;
}

int zr_host_event_sync(struct zr_event *e)
{
    struct zr_host_gate *gate;
    uint64_t ticket;
    return event_target(e, &gate, &ticket) ? gate_wait_asking(e->dev, gate, ticket) : 0;
}

int zr_host_event_query(struct zr_event *e)
{
    struct zr_host_gate *gate;
    uint64_t ticket;
    return !event_target(e, &gate, &ticket);
}
