/* SPDX-License-Identifier: Apache-2.0 */
/* device_suite_streams.c: tests the order of work on streams, and events.
 *
 * Tests observe a stream through call(): closures that append to a log, sleep for a random time, or wait
 * for the test. At most one may wait at a time, since CUDA runs one at a time. No result depends on how
 * long anything takes; delays only make a missing wait likely to show. */
#include "test/cmocka.h"
#include "test/kernels/device_suite_parts.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

/* --- closures --- */

enum { LOG_MAX = 100000 };

struct log {
    _Atomic int n;
    int at[LOG_MAX];
};

struct note {
    struct log *log;
    int value, delay_us;
};

static void sleep_us(int us)
{
    struct timespec t = {us / 1000000, us % 1000000 * 1000};
    if (us)
        nanosleep(&t, NULL);
}

static void note_call(void *arg)
{
    const struct note *a = arg;
    sleep_us(a->delay_us);
    int i = atomic_fetch_add(&a->log->n, 1);
    if (i < LOG_MAX)
        a->log->at[i] = a->value;
}

static void put_note(struct zr_stream *s, struct zr_device *dev, struct log *log, int value, int delay_us)
{
    struct note a = {log, value, delay_us};
    assert_int_equal(dev->ops->call(s, note_call, &a, sizeof a), 0);
}

/* Holds a stream until the test opens it. */
struct gate {
    pthread_mutex_t lock;
    pthread_cond_t cond;
    bool open;
};
#define GATE_INIT                                                                                            \
    {                                                                                                        \
        PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false                                           \
    }

static void gate_call(void *arg)
{
    struct gate *g = *(struct gate **)arg;
    pthread_mutex_lock(&g->lock);
    while (!g->open)
        pthread_cond_wait(&g->cond, &g->lock);
    pthread_mutex_unlock(&g->lock);
}

static void gate_open(struct gate *g)
{
    pthread_mutex_lock(&g->lock);
    g->open = true;
    pthread_cond_broadcast(&g->cond);
    pthread_mutex_unlock(&g->lock);
}

static void put_gate(struct zr_stream *s, struct zr_device *dev, struct gate *g)
{
    assert_int_equal(dev->ops->call(s, gate_call, &g, sizeof(struct gate *)), 0);
}

static struct zr_event *event(struct zr_device *dev)
{
    struct zr_event *e;
    assert_int_equal(dev->ops->event_open(dev, &e), 0);
    assert_non_null(e);
    return e;
}

static struct log *new_log(void)
{
    struct log *log = calloc(1, sizeof *log);
    assert_non_null(log);
    return log;
}

/* --- order --- */

static void test_order_on_a_stream(void **state)
{
    struct zr_device *dev = *state;
    struct log *log = new_log();
    struct zr_stream *s = suite_stream(dev, ZR_STREAM_QUEUE);
    for (int i = 0; i < 20000; i++) /* far more than any queue holds */
        put_note(s, dev, log, i, 0);
    assert_int_equal(dev->ops->stream_sync(s), 0);
    assert_int_equal(log->n, 20000);
    for (int i = 0; i < 20000; i++)
        assert_int_equal(log->at[i], i);
    dev->ops->stream_close(s);
    free(log);
}

static void test_queue_does_not_run_on_the_caller(void **state)
{
    struct zr_device *dev = *state;
    struct gate gate = GATE_INIT;
    struct zr_stream *s = suite_stream(dev, ZR_STREAM_QUEUE);
    struct zr_event *e = event(dev);
    put_gate(s, dev, &gate); /* blocks until the test opens the gate */
    assert_int_equal(dev->ops->event_record(e, s), 0);
    assert_int_equal(dev->ops->event_query(e), 0);
    gate_open(&gate);
    assert_int_equal(dev->ops->event_sync(e), 0);
    assert_int_equal(dev->ops->event_query(e), 1);
    dev->ops->event_close(e);
    dev->ops->stream_close(s);
}

struct opener {
    struct gate *gate;
    int delay_us;
};

static void *open_later(void *arg)
{
    struct opener *o = arg;
    sleep_us(o->delay_us);
    gate_open(o->gate);
    return NULL;
}

/* The producer waits while a queue is full, and no work is lost. */
static void test_full_queue(void **state)
{
    struct zr_device *dev = *state;
    struct log *log = new_log();
    struct gate gate = GATE_INIT;
    struct opener opener = {&gate, 20000};
    struct zr_stream *s = suite_stream(dev, ZR_STREAM_QUEUE);
    pthread_t thread;
    put_gate(s, dev, &gate);
    assert_int_equal(pthread_create(&thread, NULL, open_later, &opener), 0);
    for (int i = 0; i < 5000; i++)
        put_note(s, dev, log, i, 0);
    assert_int_equal(dev->ops->stream_sync(s), 0);
    pthread_join(thread, NULL);
    assert_int_equal(log->n, 5000);
    for (int i = 0; i < 5000; i++)
        assert_int_equal(log->at[i], i);
    dev->ops->stream_close(s);
    free(log);
}

static void test_close_drains(void **state)
{
    struct zr_device *dev = *state;
    struct log *log = new_log();
    struct zr_stream *s = suite_stream(dev, ZR_STREAM_QUEUE);
    put_note(s, dev, log, 0, 20000);
    for (int i = 1; i < 100; i++)
        put_note(s, dev, log, i, 0);
    dev->ops->stream_close(s);
    assert_int_equal(log->n, 100);
    dev->ops->stream_close(NULL);
    free(log);
}

/* --- events --- */

static void test_event_never_recorded(void **state)
{
    struct zr_device *dev = *state;
    struct log *log = new_log();
    struct zr_stream *s = suite_stream(dev, ZR_STREAM_QUEUE), *caller = suite_stream(dev, ZR_STREAM_CALLER);
    struct zr_event *e = event(dev);
    assert_int_equal(dev->ops->event_query(e), 1);
    assert_int_equal(dev->ops->event_sync(e), 0);
    assert_int_equal(dev->ops->stream_wait(s, e), 0);
    assert_int_equal(dev->ops->stream_wait(caller, e), 0);
    put_note(s, dev, log, 1, 0);
    assert_int_equal(dev->ops->stream_sync(s), 0);
    assert_int_equal(log->n, 1);
    /* An event recorded on a stream that never had work is done. */
    struct zr_stream *fresh = suite_stream(dev, ZR_STREAM_QUEUE);
    assert_int_equal(dev->ops->event_record(e, fresh), 0);
    assert_int_equal(dev->ops->event_sync(e), 0);
    assert_int_equal(dev->ops->event_query(e), 1);
    dev->ops->stream_close(fresh);
    dev->ops->event_close(e);
    dev->ops->event_close(NULL);
    dev->ops->stream_close(s);
    dev->ops->stream_close(caller);
    free(log);
}

/* stream_wait refers to the latest record when it is called. A later record of the same event does not
 * delay it. */
static void test_wait_takes_the_record_of_its_time(void **state)
{
    struct zr_device *dev = *state;
    struct log *log = new_log();
    struct gate gate = GATE_INIT;
    struct zr_stream *a = suite_stream(dev, ZR_STREAM_QUEUE), *b = suite_stream(dev, ZR_STREAM_QUEUE);
    struct zr_event *e = event(dev), *done = event(dev);
    int32_t *cell, host[3] = {7, 0, 0};
    assert_int_equal(dev->ops->alloc(dev, sizeof host, (void **)&cell), 0);
    assert_int_equal(dev->ops->copy(b, cell, host, sizeof host), 0);
    assert_int_equal(dev->ops->stream_sync(b), 0);
    put_note(a, dev, log, 1, 10000);
    assert_int_equal(dev->ops->copy(a, &cell[1], &cell[0], sizeof *cell), 0);
    assert_int_equal(dev->ops->event_record(e, a), 0);
    assert_int_equal(dev->ops->stream_wait(b, e), 0);
    put_gate(a, dev, &gate);
    assert_int_equal(dev->ops->event_record(e, a), 0); /* not done before the gate opens */
    assert_int_equal(dev->ops->copy(b, &cell[2], &cell[1], sizeof *cell), 0);
    assert_int_equal(dev->ops->event_record(done, b), 0);
    assert_int_equal(dev->ops->event_sync(done), 0); /* hangs if the wait took the later record */
    assert_int_equal(dev->ops->event_query(e), 0);
    assert_int_equal(log->n, 1);
    gate_open(&gate);
    assert_int_equal(dev->ops->event_sync(e), 0);
    assert_int_equal(dev->ops->copy(b, host, cell, sizeof host), 0);
    assert_int_equal(dev->ops->stream_sync(b), 0);
    assert_int_equal(host[2], 7);
    dev->ops->free(dev, cell, sizeof host);
    dev->ops->stream_close(a);
    dev->ops->stream_close(b);
    dev->ops->event_close(e);
    dev->ops->event_close(done);
    free(log);
}

/* An event is recorded again on another stream, which finishes first. A wait on the first record still
 * waits. */
static void test_records_on_two_streams(void **state)
{
    struct zr_device *dev = *state;
    struct log *log = new_log();
    struct zr_stream *slow = suite_stream(dev, ZR_STREAM_QUEUE), *fast = suite_stream(dev, ZR_STREAM_QUEUE),
                     *waiter = suite_stream(dev, ZR_STREAM_QUEUE);
    struct zr_event *e = event(dev);
    put_note(slow, dev, log, 1, 30000);
    assert_int_equal(dev->ops->event_record(e, slow), 0);
    assert_int_equal(dev->ops->stream_wait(waiter, e), 0);
    put_note(fast, dev, log, 7, 0);
    assert_int_equal(dev->ops->event_record(e, fast), 0);
    put_note(waiter, dev, log, 2, 0);
    assert_int_equal(dev->ops->event_sync(e), 0); /* the fast stream's record */
    assert_int_equal(dev->ops->stream_sync(waiter), 0);
    int place[8] = {0};
    for (int i = 0; i < 3; i++)
        place[log->at[i]] = i;
    assert_true(place[1] < place[2]);
    dev->ops->stream_close(slow);
    dev->ops->stream_close(fast);
    dev->ops->stream_close(waiter);
    dev->ops->event_close(e);
    free(log);
}

/* An event outlives its stream. It is done, even if other streams are opened and used afterwards. */
static void test_event_after_its_stream_closed(void **state)
{
    struct zr_device *dev = *state;
    struct log *log = new_log();
    struct gate gate = GATE_INIT;
    struct zr_stream *a = suite_stream(dev, ZR_STREAM_QUEUE);
    struct zr_event *e = event(dev), *done = event(dev);
    put_note(a, dev, log, 1, 1000);
    assert_int_equal(dev->ops->event_record(e, a), 0);
    dev->ops->stream_close(a);
    assert_int_equal(dev->ops->event_query(e), 1);
    a = suite_stream(dev, ZR_STREAM_QUEUE);
    put_gate(a, dev, &gate);
    assert_int_equal(dev->ops->event_query(e), 1);
    struct zr_stream *b = suite_stream(dev, ZR_STREAM_QUEUE);
    assert_int_equal(dev->ops->stream_wait(b, e), 0);
    assert_int_equal(dev->ops->event_record(done, b), 0);
    assert_int_equal(dev->ops->event_sync(done), 0); /* hangs if the event belonged to the new stream */
    assert_int_equal(log->n, 1);
    gate_open(&gate);
    dev->ops->stream_close(a);
    dev->ops->stream_close(b);
    dev->ops->event_close(e);
    dev->ops->event_close(done);
    free(log);
}

/* Streams wait for each other in a chain, for several rounds with random delays. Every note comes after
 * all that it waits for. */
static void test_chains(void **state)
{
    struct zr_device *dev = *state;
    enum { STREAMS = 4, ROUNDS = 60 };
    struct zr_stream *s[STREAMS];
    struct zr_event *e[STREAMS];
    struct log *log = new_log();
    for (int i = 0; i < STREAMS; i++) {
        s[i] = suite_stream(dev, ZR_STREAM_QUEUE);
        e[i] = event(dev);
    }
    for (int round = 0; round < ROUNDS; round++)
        for (int i = 0; i < STREAMS; i++) {
            int before = (i + STREAMS - 1) % STREAMS; /* the last stream's record is from the round before */
            assert_int_equal(dev->ops->stream_wait(s[i], e[before]), 0);
            put_note(s[i], dev, log, round * STREAMS + i,
                     random_below(&suite_rng, 3) ? 0 : (int)random_below(&suite_rng, 300));
            assert_int_equal(dev->ops->event_record(e[i], s[i]), 0);
        }
    assert_int_equal(dev->ops->event_sync(e[STREAMS - 1]), 0);
    assert_int_equal(log->n, STREAMS * ROUNDS);
    for (int i = 0; i < STREAMS * ROUNDS; i++)
        assert_int_equal(log->at[i], i);
    for (int i = 0; i < STREAMS; i++) {
        dev->ops->stream_close(s[i]);
        dev->ops->event_close(e[i]);
    }
    free(log);
}

/* A random graph of waits: each piece of work checks that all its predecessors are done. */
struct work {
    _Atomic bool *done;
    int index, n_before, before[8], delay_us;
    _Atomic int *n_wrong;
};
_Static_assert(sizeof(struct work) <= ZR_CALL_BYTES, "fits into a closure");

static void work_call(void *arg)
{
    const struct work *w = arg;
    sleep_us(w->delay_us);
    for (int i = 0; i < w->n_before; i++)
        if (!atomic_load_explicit(&w->done[w->before[i]], memory_order_relaxed))
            atomic_fetch_add(w->n_wrong, 1);
    atomic_store_explicit(&w->done[w->index], true, memory_order_relaxed);
}

static void test_random_graph(void **state)
{
    struct zr_device *dev = *state;
    enum { STREAMS = 5, WORK = 3000, EVENTS = 16 };
    struct zr_stream *s[STREAMS];
    struct zr_event *e[EVENTS];
    int recorded[EVENTS], last_on[STREAMS];
    _Atomic bool *done = calloc(WORK, sizeof *done);
    _Atomic int n_wrong = 0;
    for (int i = 0; i < STREAMS; i++)
        s[i] = suite_stream(dev, ZR_STREAM_QUEUE), last_on[i] = -1;
    for (int i = 0; i < EVENTS; i++)
        e[i] = event(dev), recorded[i] = -1;
    for (int i = 0; i < WORK; i++) {
        int on = (int)random_below(&suite_rng, STREAMS);
        struct work w = {.done = done, .index = i, .n_wrong = &n_wrong};
        w.delay_us = random_below(&suite_rng, 50) ? 0 : (int)random_below(&suite_rng, 200);
        if (last_on[on] >= 0)
            w.before[w.n_before++] = last_on[on];
        for (int waits = (int)random_below(&suite_rng, 4); waits > 0; waits--) {
            int k = (int)random_below(&suite_rng, EVENTS);
            assert_int_equal(dev->ops->stream_wait(s[on], e[k]), 0);
            if (recorded[k] >= 0)
                w.before[w.n_before++] = recorded[k];
        }
        assert_int_equal(dev->ops->call(s[on], work_call, &w, sizeof w), 0);
        last_on[on] = i;
        int k = (int)random_below(&suite_rng, EVENTS);
        assert_int_equal(dev->ops->event_record(e[k], s[on]), 0);
        recorded[k] = i;
    }
    for (int i = 0; i < EVENTS; i++) {
        assert_int_equal(dev->ops->event_sync(e[i]), 0);
        assert_int_equal(dev->ops->event_query(e[i]), 1);
        assert_true(recorded[i] < 0 || atomic_load(&done[recorded[i]]));
    }
    for (int i = 0; i < STREAMS; i++)
        dev->ops->stream_close(s[i]);
    for (int i = 0; i < WORK; i++)
        assert_true(atomic_load(&done[i]));
    assert_int_equal(n_wrong, 0);
    for (int i = 0; i < EVENTS; i++)
        dev->ops->event_close(e[i]);
    free(done);
}

/* Work seen through an event is seen completely: one stream writes plain memory, another reads it. */
static void fill_call(void *arg)
{
    int *p = *(int **)arg;
    for (int i = 0; i < 1000; i++)
        p[i]++;
}

static void test_memory_is_seen_through_events(void **state)
{
    struct zr_device *dev = *state;
    struct zr_stream *a = suite_stream(dev, ZR_STREAM_QUEUE), *b = suite_stream(dev, ZR_STREAM_QUEUE);
    struct zr_event *e = event(dev);
    int *p = calloc(1000, sizeof *p);
    for (int i = 0; i < 400; i++) {
        struct zr_stream *s = i % 2 ? a : b;
        assert_int_equal(dev->ops->stream_wait(s, e), 0);
        assert_int_equal(dev->ops->call(s, fill_call, &p, sizeof(int *)), 0);
        assert_int_equal(dev->ops->event_record(e, s), 0);
    }
    assert_int_equal(dev->ops->event_sync(e), 0);
    for (int i = 0; i < 1000; i++)
        assert_int_equal(p[i], 400);
    free(p);
    dev->ops->event_close(e);
    dev->ops->stream_close(a);
    dev->ops->stream_close(b);
}

/* --- the caller's stream --- */

static void test_caller_stream(void **state)
{
    struct zr_device *dev = *state;
    struct log *log = new_log();
    struct zr_stream *caller = suite_stream(dev, ZR_STREAM_CALLER), *s = suite_stream(dev, ZR_STREAM_QUEUE);
    struct zr_event *e = event(dev);
    put_note(caller, dev, log, 1, 0);
    if (dev->ops->compute_on_caller) {
        assert_int_equal(log->n, 1); /* runs at once */
        assert_int_equal(dev->ops->event_record(e, caller), 0);
        assert_int_equal(dev->ops->event_query(e), 1);
    }
    assert_int_equal(dev->ops->stream_sync(caller), 0);
    assert_int_equal(log->n, 1);

    /* The caller waits for a queue. */
    put_note(s, dev, log, 2, 20000);
    assert_int_equal(dev->ops->event_record(e, s), 0);
    assert_int_equal(dev->ops->stream_wait(caller, e), 0);
    if (dev->ops->compute_on_caller)
        assert_int_equal(log->n, 2);
    put_note(caller, dev, log, 3, 0);
    /* A queue waits for the caller. */
    assert_int_equal(dev->ops->event_record(e, caller), 0);
    assert_int_equal(dev->ops->stream_wait(s, e), 0);
    put_note(s, dev, log, 4, 0);
    assert_int_equal(dev->ops->stream_sync(s), 0);
    assert_int_equal(log->n, 4);
    for (int i = 0; i < 4; i++)
        assert_int_equal(log->at[i], i + 1);
    dev->ops->event_close(e);
    dev->ops->stream_close(s);
    dev->ops->stream_close(caller);
    free(log);
}

struct several {
    struct zr_device *dev;
    struct zr_event *e;
    _Atomic int *n_seen;
};

static void *wait_for_event(void *arg)
{
    struct several *a = arg;
    if (a->dev->ops->event_sync(a->e) == 0 && a->dev->ops->event_query(a->e) == 1)
        atomic_fetch_add(a->n_seen, 1);
    return NULL;
}

/* Several threads may wait for one event, and for different positions of one stream. */
static void test_many_waiters(void **state)
{
    struct zr_device *dev = *state;
    enum { WAITERS = 6 };
    struct zr_stream *s = suite_stream(dev, ZR_STREAM_QUEUE);
    struct zr_event *e[WAITERS];
    struct several a[WAITERS];
    struct log *log = new_log();
    struct gate gate = GATE_INIT;
    pthread_t thread[WAITERS];
    _Atomic int n_seen = 0;
    put_gate(s, dev, &gate);
    for (int i = 0; i < WAITERS; i++) {
        e[i] = event(dev);
        put_note(s, dev, log, i, 1000);
        assert_int_equal(dev->ops->event_record(e[i], s), 0);
    }
    for (int i = 0; i < WAITERS; i++) {
        a[i] = (struct several){dev, e[i / 2 * 2], &n_seen};
        assert_int_equal(pthread_create(&thread[i], NULL, wait_for_event, &a[i]), 0);
    }
    gate_open(&gate);
    for (int i = 0; i < WAITERS; i++)
        pthread_join(thread[i], NULL);
    assert_int_equal(n_seen, WAITERS);
    for (int i = 0; i < WAITERS; i++)
        dev->ops->event_close(e[i]);
    dev->ops->stream_close(s);
    free(log);
}

int suite_of_streams(struct zr_device *dev)
{
    struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order_on_a_stream),
        cmocka_unit_test(test_queue_does_not_run_on_the_caller),
        cmocka_unit_test(test_full_queue),
        cmocka_unit_test(test_close_drains),
        cmocka_unit_test(test_event_never_recorded),
        cmocka_unit_test(test_wait_takes_the_record_of_its_time),
        cmocka_unit_test(test_records_on_two_streams),
        cmocka_unit_test(test_event_after_its_stream_closed),
        cmocka_unit_test(test_chains),
        cmocka_unit_test(test_random_graph),
        cmocka_unit_test(test_memory_is_seen_through_events),
        cmocka_unit_test(test_caller_stream),
        cmocka_unit_test(test_many_waiters),
    };
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++)
        tests[i].initial_state = dev;
    return cmocka_run_group_tests_name("streams", tests, NULL, NULL);
}
