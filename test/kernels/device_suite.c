/* device_suite.c: the conformance suite of a device: order on streams, events, memory, and each kernel put on
 * a stream.
 *
 * What a stream did is seen through call(): closures that append to a log, sleep for random times, or wait
 * for the test. Nothing here depends on how long anything takes; delays only make a missing wait likely to
 * show. */
#include "test/kernels/device_suite.h"
#include "kernels/exact_sum.h"
#include "test/kernels/random.h"

#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <time.h>

#include <cmocka.h>

/* Sanitizers end the program at an impossible allocation unless told to return NULL, which the suite asks
 * for. */
const char *__asan_default_options(void);
const char *__tsan_default_options(void);

const char *__asan_default_options(void)
{
    return "allocator_may_return_null=1";
}

const char *__tsan_default_options(void)
{
    return "allocator_may_return_null=1";
}

static struct random_source rng;

/* --- closures --- */

enum { LOG_MOST = 100000 };

struct log {
    _Atomic int n;
    int at[LOG_MOST];
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
    if (i < LOG_MOST)
        a->log->at[i] = a->value;
}

static void put_note(struct zr_stream *s, struct zr_device *dev, struct log *log, int value, int delay_us)
{
    struct note a = {log, value, delay_us};
    assert_int_equal(dev->ops->call(s, note_call, &a, sizeof a), 0);
}

/* A stream held until the test lets it go. */
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

static struct zr_stream *stream(struct zr_device *dev, enum zr_stream_kind kind)
{
    struct zr_stream *s;
    assert_int_equal(dev->ops->stream_open(dev, kind, "suite", NULL, &s), 0);
    assert_non_null(s);
    return s;
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

/* --- memory --- */

static void test_memory(void **state)
{
    struct zr_device *dev = *state;
    static const int64_t sizes[] = {1, 4096, 4097, 1000000};
    void *p[4];
    for (int i = 0; i < 4; i++) {
        assert_int_equal(dev->ops->alloc(dev, sizes[i], &p[i]), 0);
        assert_int_equal((uintptr_t)p[i] % 4096, 0);
    }
    struct zr_stream *s = stream(dev, ZR_STREAM_QUEUE);
    for (int i = 0; i < 4; i++)
        assert_int_equal(dev->ops->zero(s, p[i], sizes[i]), 0);
    for (int i = 0; i < 4; i++) {
        unsigned char *host = malloc((size_t)sizes[i]);
        assert_int_equal(dev->ops->copy(s, host, p[i], sizes[i]), 0);
        assert_int_equal(dev->ops->stream_sync(s), 0);
        for (int64_t j = 0; j < sizes[i]; j++)
            assert_int_equal(host[j], 0);
        free(host);
        dev->ops->free(dev, p[i], sizes[i]);
    }
    void *bad = &rng;
    assert_int_equal(dev->ops->alloc(dev, 0, &bad), ZR_ERR_ARG);
    assert_int_equal(dev->ops->alloc(dev, -1, &bad), ZR_ERR_ARG);
    assert_int_equal(dev->ops->alloc(dev, INT64_MAX - 8192, &bad), ZR_ERR_NOMEM);
    assert_null(bad);
    assert_non_null(strstr(zr_error_text(), "9223372036854767615"));
    dev->ops->stream_close(s);
}

/* --- order --- */

static void test_order_on_a_stream(void **state)
{
    struct zr_device *dev = *state;
    struct log *log = new_log();
    struct zr_stream *s = stream(dev, ZR_STREAM_QUEUE);
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
    struct zr_stream *s = stream(dev, ZR_STREAM_QUEUE);
    struct zr_event *e = event(dev);
    put_gate(s, dev, &gate); /* would never return */
    assert_int_equal(dev->ops->event_record(e, s), 0);
    assert_false(dev->ops->event_done(e));
    gate_open(&gate);
    assert_int_equal(dev->ops->event_sync(e), 0);
    assert_true(dev->ops->event_done(e));
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

/* The producer waits while a queue is full, and nothing is lost. */
static void test_full_queue(void **state)
{
    struct zr_device *dev = *state;
    struct log *log = new_log();
    struct gate gate = GATE_INIT;
    struct opener opener = {&gate, 20000};
    struct zr_stream *s = stream(dev, ZR_STREAM_QUEUE);
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
    struct zr_stream *s = stream(dev, ZR_STREAM_QUEUE);
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
    struct zr_stream *s = stream(dev, ZR_STREAM_QUEUE), *caller = stream(dev, ZR_STREAM_CALLER);
    struct zr_event *e = event(dev);
    assert_true(dev->ops->event_done(e));
    assert_int_equal(dev->ops->event_sync(e), 0);
    assert_int_equal(dev->ops->stream_wait(s, e), 0);
    assert_int_equal(dev->ops->stream_wait(caller, e), 0);
    put_note(s, dev, log, 1, 0);
    assert_int_equal(dev->ops->stream_sync(s), 0);
    assert_int_equal(log->n, 1);
    /* An event of a stream that never had work is done. */
    struct zr_stream *fresh = stream(dev, ZR_STREAM_QUEUE);
    assert_int_equal(dev->ops->event_record(e, fresh), 0);
    assert_int_equal(dev->ops->event_sync(e), 0);
    assert_true(dev->ops->event_done(e));
    dev->ops->stream_close(fresh);
    dev->ops->event_close(e);
    dev->ops->event_close(NULL);
    dev->ops->stream_close(s);
    dev->ops->stream_close(caller);
    free(log);
}

/* stream_wait takes the most recent record at the time of the call: a later record of the same event does not
 * delay it. */
static void test_wait_takes_the_record_of_its_time(void **state)
{
    struct zr_device *dev = *state;
    struct log *log = new_log();
    struct gate gate = GATE_INIT;
    struct zr_stream *a = stream(dev, ZR_STREAM_QUEUE), *b = stream(dev, ZR_STREAM_QUEUE);
    struct zr_event *e = event(dev), *done = event(dev);
    put_note(a, dev, log, 1, 10000);
    assert_int_equal(dev->ops->event_record(e, a), 0);
    assert_int_equal(dev->ops->stream_wait(b, e), 0);
    put_gate(a, dev, &gate);
    assert_int_equal(dev->ops->event_record(e, a), 0); /* not done before the gate opens */
    put_note(b, dev, log, 2, 0);
    assert_int_equal(dev->ops->event_record(done, b), 0);
    assert_int_equal(dev->ops->event_sync(done), 0); /* else: this test hangs */
    assert_false(dev->ops->event_done(e));
    assert_int_equal(log->at[0], 1);
    assert_int_equal(log->at[1], 2);
    gate_open(&gate);
    assert_int_equal(dev->ops->event_sync(e), 0);
    dev->ops->stream_close(a);
    dev->ops->stream_close(b);
    dev->ops->event_close(e);
    dev->ops->event_close(done);
    free(log);
}

/* An event recorded again on another stream, which finishes first: a wait on the first record still waits. */
static void test_records_on_two_streams(void **state)
{
    struct zr_device *dev = *state;
    struct log *log = new_log();
    struct zr_stream *slow = stream(dev, ZR_STREAM_QUEUE), *fast = stream(dev, ZR_STREAM_QUEUE),
                     *waiter = stream(dev, ZR_STREAM_QUEUE);
    struct zr_event *e = event(dev);
    put_note(slow, dev, log, 1, 30000);
    assert_int_equal(dev->ops->event_record(e, slow), 0);
    assert_int_equal(dev->ops->stream_wait(waiter, e), 0);
    put_note(fast, dev, log, 7, 0);
    assert_int_equal(dev->ops->event_record(e, fast), 0);
    put_note(waiter, dev, log, 2, 0);
    assert_int_equal(dev->ops->event_sync(e), 0); /* the fast one's */
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

/* An event outlives its stream: it is done, also when other streams are opened and used since. */
static void test_event_after_its_stream_closed(void **state)
{
    struct zr_device *dev = *state;
    struct log *log = new_log();
    struct gate gate = GATE_INIT;
    struct zr_stream *a = stream(dev, ZR_STREAM_QUEUE);
    struct zr_event *e = event(dev);
    put_note(a, dev, log, 1, 1000);
    assert_int_equal(dev->ops->event_record(e, a), 0);
    dev->ops->stream_close(a);
    assert_true(dev->ops->event_done(e));
    a = stream(dev, ZR_STREAM_QUEUE);
    put_gate(a, dev, &gate);
    assert_true(dev->ops->event_done(e));
    struct zr_stream *b = stream(dev, ZR_STREAM_QUEUE);
    assert_int_equal(dev->ops->stream_wait(b, e), 0);
    put_note(b, dev, log, 2, 0);
    assert_int_equal(dev->ops->stream_sync(b), 0);
    assert_int_equal(log->n, 2);
    gate_open(&gate);
    dev->ops->stream_close(a);
    dev->ops->stream_close(b);
    dev->ops->event_close(e);
    free(log);
}

/* Streams that each wait for the one before, in rounds, with random delays: every note stands after all it
 * waits for. */
static void test_chains(void **state)
{
    struct zr_device *dev = *state;
    enum { STREAMS = 4, ROUNDS = 60 };
    struct zr_stream *s[STREAMS];
    struct zr_event *e[STREAMS];
    struct log *log = new_log();
    for (int i = 0; i < STREAMS; i++) {
        s[i] = stream(dev, ZR_STREAM_QUEUE);
        e[i] = event(dev);
    }
    for (int round = 0; round < ROUNDS; round++)
        for (int i = 0; i < STREAMS; i++) {
            int before = (i + STREAMS - 1) % STREAMS; /* the last one's record is of the round before */
            assert_int_equal(dev->ops->stream_wait(s[i], e[before]), 0);
            put_note(s[i], dev, log, round * STREAMS + i,
                     random_below(&rng, 3) ? 0 : (int)random_below(&rng, 300));
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

/* A random graph of waits: each piece of work checks that all it waits for is done. */
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
        s[i] = stream(dev, ZR_STREAM_QUEUE), last_on[i] = -1;
    for (int i = 0; i < EVENTS; i++)
        e[i] = event(dev), recorded[i] = -1;
    for (int i = 0; i < WORK; i++) {
        int on = (int)random_below(&rng, STREAMS);
        struct work w = {.done = done, .index = i, .n_wrong = &n_wrong};
        w.delay_us = random_below(&rng, 50) ? 0 : (int)random_below(&rng, 200);
        if (last_on[on] >= 0)
            w.before[w.n_before++] = last_on[on];
        for (int waits = (int)random_below(&rng, 4); waits > 0; waits--) {
            int k = (int)random_below(&rng, EVENTS);
            assert_int_equal(dev->ops->stream_wait(s[on], e[k]), 0);
            if (recorded[k] >= 0)
                w.before[w.n_before++] = recorded[k];
        }
        assert_int_equal(dev->ops->call(s[on], work_call, &w, sizeof w), 0);
        last_on[on] = i;
        int k = (int)random_below(&rng, EVENTS);
        assert_int_equal(dev->ops->event_record(e[k], s[on]), 0);
        recorded[k] = i;
    }
    for (int i = 0; i < EVENTS; i++) {
        assert_int_equal(dev->ops->event_sync(e[i]), 0);
        assert_true(dev->ops->event_done(e[i]));
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

/* Work seen through an event is seen whole: plain memory written on one stream and read on another. */
static void fill_call(void *arg)
{
    int *p = *(int **)arg;
    for (int i = 0; i < 1000; i++)
        p[i]++;
}

static void test_memory_is_seen_through_events(void **state)
{
    struct zr_device *dev = *state;
    struct zr_stream *a = stream(dev, ZR_STREAM_QUEUE), *b = stream(dev, ZR_STREAM_QUEUE);
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
    struct zr_stream *caller = stream(dev, ZR_STREAM_CALLER), *s = stream(dev, ZR_STREAM_QUEUE);
    struct zr_event *e = event(dev);
    put_note(caller, dev, log, 1, 0);
    if (dev->ops->compute_on_caller) {
        assert_int_equal(log->n, 1); /* at once */
        assert_int_equal(dev->ops->event_record(e, caller), 0);
        assert_true(dev->ops->event_done(e));
    }
    assert_int_equal(dev->ops->stream_sync(caller), 0);
    assert_int_equal(log->n, 1);

    /* The caller waits for a queue... */
    put_note(s, dev, log, 2, 20000);
    assert_int_equal(dev->ops->event_record(e, s), 0);
    assert_int_equal(dev->ops->stream_wait(caller, e), 0);
    if (dev->ops->compute_on_caller)
        assert_int_equal(log->n, 2);
    put_note(caller, dev, log, 3, 0);
    /* ... and a queue for the caller. */
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
    if (a->dev->ops->event_sync(a->e) == 0 && a->dev->ops->event_done(a->e))
        atomic_fetch_add(a->n_seen, 1);
    return NULL;
}

/* Several threads may wait for one event, and for different places of one stream. */
static void test_many_waiters(void **state)
{
    struct zr_device *dev = *state;
    enum { WAITERS = 6 };
    struct zr_stream *s = stream(dev, ZR_STREAM_QUEUE);
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

/* --- calls and kernels --- */

static void sum_bytes_call(void *arg)
{
    unsigned char *a = arg;
    uint64_t *out, sum = 0;
    memcpy(&out, a, sizeof(uint64_t *));
    for (int i = sizeof(uint64_t *); i < ZR_CALL_BYTES; i++)
        sum += a[i];
    *out = sum;
}

static void test_call_copies_its_argument(void **state)
{
    struct zr_device *dev = *state;
    struct zr_stream *s = stream(dev, ZR_STREAM_QUEUE);
    unsigned char arg[ZR_CALL_BYTES];
    uint64_t got = 0, *out = &got;
    memset(arg, 3, sizeof arg);
    memcpy(arg, &out, sizeof(uint64_t *));
    assert_int_equal(dev->ops->call(s, sum_bytes_call, arg, sizeof arg), 0);
    memset(arg, 0xee, sizeof arg);
    assert_int_equal(dev->ops->stream_sync(s), 0);
    assert_int_equal(got, 3 * (ZR_CALL_BYTES - sizeof(uint64_t *)));
    assert_int_equal(dev->ops->call(s, sum_bytes_call, arg, ZR_CALL_BYTES + 1), ZR_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), "193"));
    dev->ops->stream_close(s);
}

enum { N = 1000 };

static void *device_memory(struct zr_device *dev, int64_t bytes)
{
    void *p;
    assert_int_equal(dev->ops->alloc(dev, bytes, &p), 0);
    return p;
}

/* Each kernel, through a stream, gives what the portable one gives on the same input. */
static void run_kernels(struct zr_device *dev, struct zr_stream *s)
{
    const struct zr_host_kernels *k = zr_host_kernels(ZR_ISA_PORTABLE);
    const struct zr_device_ops *ops = dev->ops;
    float host[4][N], got[N], want[N];
    uint16_t half[N], want_half[N];
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < N; i++)
            host[j][i] = random_normal(&rng);
    float *x = device_memory(dev, sizeof got), *y = device_memory(dev, sizeof got),
          *m = device_memory(dev, sizeof got), *v = device_memory(dev, sizeof got);
    uint16_t *h = device_memory(dev, sizeof half);
    struct zr_exact_sum *acc = device_memory(dev, sizeof *acc), sum, want_sum;
    struct zr_step_scalars *scalars = device_memory(dev, sizeof *scalars), step = {.grad_scale = 0.5f};

    assert_int_equal(ops->copy(s, x, host[0], sizeof got), 0);
    assert_int_equal(ops->copy(s, y, host[1], sizeof got), 0);
    assert_int_equal(ops->copy(s, scalars, &step, sizeof step), 0);
    assert_int_equal(ops->zero(s, acc, sizeof *acc), 0);
    assert_int_equal(ops->sum_squares(s, acc, x, N), 0);
    assert_int_equal(ops->add(s, x, y, ZR_F32, N), 0);
    assert_int_equal(ops->scale(s, x, N, scalars), 0);
    assert_int_equal(ops->cast(s, h, ZR_BF16, x, ZR_F32, N), 0);
    assert_int_equal(ops->copy(s, got, x, sizeof got), 0);
    assert_int_equal(ops->copy(s, half, h, sizeof half), 0);
    assert_int_equal(ops->copy(s, &sum, acc, sizeof sum), 0);
    assert_int_equal(ops->stream_sync(s), 0);
    zr_exact_reset(&want_sum);
    k->sum_squares(&want_sum, host[0], N);
    assert_true(zr_exact_value(&sum) == zr_exact_value(&want_sum));
    memcpy(want, host[0], sizeof want);
    k->add(want, host[1], N);
    k->scale(want, N, 0.5f);
    k->cast(want_half, ZR_BF16, want, ZR_F32, N);
    assert_memory_equal(got, want, sizeof got);
    assert_memory_equal(half, want_half, sizeof half);

    /* skip leaves everything, and is read when the work runs, not when it is put. */
    for (uint32_t skip = 0; skip < 2; skip++) {
        struct zr_update u = {.kind = ZR_ADAMW,
                              .param_dtype = ZR_BF16,
                              .lr = 0.1f,
                              .beta1 = 0.9f,
                              .beta2 = 0.99f,
                              .eps = 1e-8f,
                              .decay = 0.1f,
                              .c1 = 0.1f,
                              .c2 = 0.01f,
                              .t = 1,
                              .n = N,
                              .master = x,
                              .param = h,
                              .grad = y,
                              .state = {m, v},
                              .scalars = scalars};
        float states[2][N];
        step.skip = skip;
        assert_int_equal(ops->copy(s, scalars, &step, sizeof step), 0);
        assert_int_equal(ops->copy(s, x, host[0], sizeof got), 0);
        assert_int_equal(ops->zero(s, m, sizeof got), 0);
        assert_int_equal(ops->zero(s, v, sizeof got), 0);
        assert_int_equal(ops->zero(s, h, sizeof half), 0);
        assert_int_equal(ops->update(s, &u), 0);
        assert_int_equal(ops->scale(s, y, N, scalars), 0);
        assert_int_equal(ops->copy(s, got, x, sizeof got), 0);
        assert_int_equal(ops->copy(s, half, h, sizeof half), 0);
        assert_int_equal(ops->stream_sync(s), 0);
        memcpy(want, host[0], sizeof want);
        memset(want_half, 0, sizeof want_half);
        memset(states, 0, sizeof states);
        u.master = want, u.param = want_half, u.grad = host[1], u.state[0] = states[0],
        u.state[1] = states[1];
        u.scalars = &step;
        k->update(&u);
        assert_memory_equal(got, want, sizeof got);
        assert_memory_equal(half, want_half, sizeof half);
        assert_int_equal(ops->copy(s, got, y, sizeof got), 0);
        assert_int_equal(ops->stream_sync(s), 0);
        k->scale(host[1], N, skip ? 1 : 0.5f);
        assert_memory_equal(got, host[1], sizeof got);
    }
    ops->free(dev, x, sizeof got);
    ops->free(dev, y, sizeof got);
    ops->free(dev, m, sizeof got);
    ops->free(dev, v, sizeof got);
    ops->free(dev, h, sizeof half);
    ops->free(dev, acc, sizeof *acc);
    ops->free(dev, scalars, sizeof *scalars);
}

static void test_kernels(void **state)
{
    struct zr_device *dev = *state;
    struct zr_stream *s = stream(dev, ZR_STREAM_QUEUE), *caller = stream(dev, ZR_STREAM_CALLER);
    run_kernels(dev, s);
    run_kernels(dev, caller);
    dev->ops->stream_close(s);
    dev->ops->stream_close(caller);
}

/* Sums of several sources, of both dtypes, written and added, as the portable kernel's. */
static void run_sums(struct zr_device *dev, struct zr_stream *s)
{
    const struct zr_host_kernels *k = zr_host_kernels(ZR_ISA_PORTABLE);
    const struct zr_device_ops *ops = dev->ops;
    for (int round = 0; round < 40; round++) {
        enum zr_dtype dtype = round % 2 ? ZR_BF16 : ZR_F32;
        int n_src = round < 4 ? ZR_MAX_SOURCES : 1 + (int)(random_bits(&rng) % 9);
        int64_t n = 1 + (int64_t)(random_bits(&rng) % N), bytes = n * zr_dtype_bytes(dtype);
        bool accumulate = round & 2;
        float wide[N], start[N], got[N], want[N];
        char given[ZR_MAX_SOURCES][N * sizeof(float)];
        const void *host[ZR_MAX_SOURCES], *src[ZR_MAX_SOURCES];
        for (int j = 0; j < n_src; j++) {
            for (int64_t i = 0; i < n; i++)
                wide[i] = random_normal(&rng);
            k->cast(given[j], dtype, wide, ZR_F32, n);
            host[j] = given[j];
            void *p = device_memory(dev, bytes);
            assert_int_equal(ops->copy(s, p, given[j], bytes), 0);
            src[j] = p;
        }
        for (int64_t i = 0; i < n; i++)
            start[i] = random_normal(&rng);
        float *dst = device_memory(dev, n * (int64_t)sizeof *dst);
        int64_t out_bytes = n * (int64_t)sizeof *dst;
        assert_int_equal(ops->copy(s, dst, start, out_bytes), 0);
        assert_int_equal(ops->sum_tree(s, dst, src, n_src, dtype, n, accumulate), 0);
        assert_int_equal(ops->add(s, dst, src[0], dtype, n), 0);
        const void *freed[ZR_MAX_SOURCES];
        memcpy(freed, src, sizeof freed);
        memset(src, 0, sizeof src); /* the array was copied */
        assert_int_equal(ops->copy(s, got, dst, out_bytes), 0);
        assert_int_equal(ops->stream_sync(s), 0);
        memcpy(want, start, (size_t)out_bytes);
        k->sum_tree(want, host, n_src, dtype, n, accumulate);
        k->cast(wide, ZR_F32, given[0], dtype, n);
        k->add(want, wide, n);
        assert_memory_equal(got, want, (size_t)out_bytes);
        ops->free(dev, dst, out_bytes);
        for (int j = 0; j < n_src; j++)
            ops->free(dev, (void *)(uintptr_t)freed[j], bytes);
    }
}

static void test_sums(void **state)
{
    struct zr_device *dev = *state;
    struct zr_stream *s = stream(dev, ZR_STREAM_QUEUE);
    run_sums(dev, s);
    dev->ops->stream_close(s);
}

/* A value given by the caller, who changes it at once. */
static void test_put(void **state)
{
    struct zr_device *dev = *state;
    struct zr_stream *s = stream(dev, ZR_STREAM_QUEUE);
    uint64_t value[ZR_PUT_BYTES / 8], want[3][ZR_PUT_BYTES / 8], got[3][ZR_PUT_BYTES / 8];
    memset(want, 0, sizeof want);
    void *p = device_memory(dev, sizeof got);
    assert_int_equal(dev->ops->zero(s, p, sizeof got), 0);
    for (int i = 0; i < 3; i++) {
        int64_t bytes = ZR_PUT_BYTES >> i;
        for (size_t j = 0; j < sizeof value / sizeof *value; j++)
            value[j] = random_bits(&rng);
        memcpy(want[i], value, (size_t)bytes);
        assert_int_equal(dev->ops->put(s, (char *)p + i * ZR_PUT_BYTES, value, bytes), 0);
        memset(value, 0, sizeof value);
    }
    assert_int_equal(dev->ops->copy(s, got, p, sizeof got), 0);
    assert_int_equal(dev->ops->stream_sync(s), 0);
    assert_memory_equal(got, want, sizeof got);
    dev->ops->free(dev, p, sizeof got);
    dev->ops->stream_close(s);
}

/* Memory of the host: zeroed, aligned, reached by streams. Stamps are in order, on the host's clock. */
static void test_host_memory_and_stamps(void **state)
{
    struct zr_device *dev = *state;
    struct zr_stream *s = stream(dev, ZR_STREAM_QUEUE);
    void *p, *host;
    assert_int_equal(dev->ops->host_alloc(dev, 0, &host), ZR_ERR_ARG);
    assert_int_equal(dev->ops->host_alloc(dev, 100, &host), 0);
    assert_int_equal((uintptr_t)host % 4096, 0);
    for (int i = 0; i < 100; i++)
        assert_int_equal(((char *)host)[i], 0);
    p = device_memory(dev, 100);
    memset(host, 7, 50);
    assert_int_equal(dev->ops->copy(s, p, host, 50), 0);
    assert_int_equal(dev->ops->copy(s, (char *)host + 50, p, 50), 0);
    assert_int_equal(dev->ops->stream_sync(s), 0);
    for (int i = 0; i < 100; i++)
        assert_int_equal(((char *)host)[i], 7);
    dev->ops->free(dev, p, 100);
    dev->ops->host_free(dev, host, 100);

    int64_t *at;
    assert_int_equal(dev->ops->host_alloc(dev, 3 * sizeof *at, &host), 0);
    at = host;
    for (int i = 0; i < 3; i++)
        assert_int_equal(dev->ops->stamp(s, &at[i]), 0);
    assert_int_equal(dev->ops->stream_sync(s), 0);
    assert_true(at[0] > 0 && at[0] <= at[1] && at[1] <= at[2]);
    dev->ops->host_free(dev, host, 3 * sizeof *at);
    dev->ops->stream_close(s);
}

/* What the ranks' records say together, against plain arithmetic. */
struct finishing {
    int n_ranks, rank;
    double scale;
    float clip;
    struct zr_step_record rec[5];
};

static struct zr_step_outcome finish(struct zr_device *dev, const struct finishing *f,
                                     struct zr_step_scalars *scalars)
{
    const struct zr_device_ops *ops = dev->ops;
    struct zr_stream *s = stream(dev, ZR_STREAM_QUEUE);
    enum { STRIDE = 640 };
    char *records = device_memory(dev, f->n_ranks * STRIDE);
    struct zr_step_scalars *on_device = device_memory(dev, sizeof *on_device);
    void *outcome;
    assert_int_equal(ops->host_alloc(dev, sizeof(struct zr_step_outcome), &outcome), 0);
    memset(outcome, 0xff, sizeof(struct zr_step_outcome));
    for (int r = 0; r < f->n_ranks; r++)
        assert_int_equal(ops->copy(s, records + r * STRIDE, &f->rec[r], sizeof f->rec[r]), 0);
    struct zr_finish args = {.records = records,
                             .stride_bytes = STRIDE,
                             .n_ranks = f->n_ranks,
                             .rank = f->rank,
                             .scale = f->scale,
                             .clip = f->clip,
                             .scalars = on_device,
                             .outcome = outcome};
    assert_int_equal(ops->finish(s, &args), 0);
    memset(&args, 0xff, sizeof args); /* it was copied */
    assert_int_equal(ops->copy(s, scalars, on_device, sizeof *scalars), 0);
    assert_int_equal(ops->stream_sync(s), 0);
    struct zr_step_outcome out = *(struct zr_step_outcome *)outcome;
    ops->host_free(dev, outcome, sizeof(struct zr_step_outcome));
    ops->free(dev, on_device, sizeof *on_device);
    ops->free(dev, records, f->n_ranks * STRIDE);
    ops->stream_close(s);
    return out;
}

static struct finishing some_records(int n_ranks, struct zr_exact_sum *all)
{
    struct finishing f = {.n_ranks = n_ranks, .rank = n_ranks / 2, .scale = -0.125};
    zr_exact_reset(all);
    for (int r = 0; r < n_ranks; r++) {
        f.rec[r].words =
            (struct zr_step_words){.call_hash = 77, .serial = 12, .save_written = 9 - r, .lr = 0.1f};
        for (int i = 0; i < 50; i++) {
            double x = exp(20 * (double)random_normal(&rng));
            zr_exact_add(&f.rec[r].norm, x);
            zr_exact_add(all, x);
        }
    }
    return f;
}

static void test_finish(void **state)
{
    struct zr_device *dev = *state;
    struct zr_exact_sum all;
    struct zr_step_scalars scalars;
    for (int n = 1; n <= 5; n++) {
        struct finishing f = some_records(n, &all);
        double norm = sqrt(zr_exact_value(&all)) * 0.125;
        struct zr_step_outcome o = finish(dev, &f, &scalars);
        assert_true(o.grad_norm == norm && !o.clipped && !o.skipped && o.other == -1);
        assert_int_equal(o.save_written, 9 - (n - 1));
        assert_true(scalars.grad_scale == -0.125f && scalars.skip == 0);
        f.clip = (float)(norm / 3);
        o = finish(dev, &f, &scalars);
        assert_true(o.grad_norm == norm && o.clipped && !o.skipped);
        assert_true(scalars.grad_scale == (float)(-0.125 * ((double)f.clip / norm)) && scalars.skip == 0);
        zr_exact_add(&f.rec[n - 1].norm, (double)INFINITY);
        o = finish(dev, &f, &scalars);
        assert_true(isnan(o.grad_norm) && !o.clipped && o.skipped && scalars.skip == 1);
    }
    for (int what = 0; what < 3; what++) {
        struct finishing f = some_records(4, &all); /* this one is rank 2 */
        struct zr_step_words *w = &f.rec[3].words;
        w->call_hash += what == 0;
        w->serial -= what == 1;
        w->lr = what == 2 ? 0.2f : w->lr;
        struct zr_step_outcome o = finish(dev, &f, &scalars);
        assert_int_equal(o.other, 3);
        assert_true(o.other_called == (what == 0) && o.other_is_late == (what == 1) && o.other_lr == w->lr);
        assert_true(scalars.skip == 1 && !o.skipped);
    }
}

int zr_device_suite(struct zr_device *dev)
{
    struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory),
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
        cmocka_unit_test(test_call_copies_its_argument),
        cmocka_unit_test(test_kernels),
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_put),
        cmocka_unit_test(test_host_memory_and_stamps),
        cmocka_unit_test(test_finish),
    };
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++)
        tests[i].initial_state = dev;
    rng = random_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
