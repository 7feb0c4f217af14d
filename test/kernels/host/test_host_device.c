/* SPDX-License-Identifier: Apache-2.0 */
/* test_host_device.c: runs the device suite on the host, and tests what only the host promises:
 * allocations that fail on demand, poison, and instruction sets by name. --bench times streams and events. */
#include "kernels/host/host_device.h"
#include "test/cmocka.h"
#include "test/kernels/device_suite.h"
#include "test/kernels/random.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Counts the device's allocations and refuses the one numbered fail_at. */
struct allocations {
    int n, fail_at;
};

static bool refuse(void *arg, int64_t bytes)
{
    struct allocations *a = arg;
    return ++a->n == a->fail_at;
}

/* Opens a device and all that it can hold. Returns 0, or the error of the first step that failed, with
 * everything closed. */
static int use_everything(struct allocations *a)
{
    struct zr_host_options options = {.refuse = refuse, .refuse_arg = a};
    struct zr_device *dev;
    struct zr_stream *queue = NULL, *caller = NULL;
    struct zr_event *e = NULL;
    void *p = NULL;
    int err = zr_host_device_open_with(&options, &dev);
    if (err) {
        assert_null(dev);
        return err;
    }
    err = dev->ops->stream_open(dev, ZR_STREAM_QUEUE, "one", NULL, &queue);
    if (!err)
        err = dev->ops->stream_open(dev, ZR_STREAM_CALLER, "two", NULL, &caller);
    if (!err)
        err = dev->ops->event_open(dev, &e);
    if (!err)
        err = dev->ops->alloc(dev, 12345, &p);
    if (p)
        dev->ops->free(dev, p, 12345);
    dev->ops->event_close(e);
    dev->ops->stream_close(caller);
    dev->ops->stream_close(queue);
    dev->ops->close(dev);
    return err;
}

static void test_every_allocation_can_fail(void **state)
{
    struct allocations a = {0, 0};
    assert_int_equal(use_everything(&a), 0);
    int n = a.n;
    assert_true(n >= 5);
    for (int k = 1; k <= n; k++) {
        a = (struct allocations){0, k};
        int err = use_everything(&a);
        assert_true(err == ZERO_ERR_NOMEM ||
                    err == ZERO_ERR_SYSTEM); /* the system refuses to start a thread */
        assert_int_equal(a.n, k);
        assert_true(strlen(zr_error_text()) > 10);
        if (k == n)
            assert_non_null(strstr(zr_error_text(), "12345"));
    }
    /* The same with the caller's allocator. */
    for (int k = 1; k <= n + 1; k++) {
        char text[16];
        snprintf(text, sizeof text, "%d", k);
        setenv("ZERO_FAIL_ALLOC", text, 1);
        a = (struct allocations){0, 0};
        assert_int_equal(use_everything(&a) != 0, k <= n);
    }
    setenv("ZERO_FAIL_ALLOC", "two", 1);
    assert_int_equal(use_everything(&a), ZERO_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), "two"));
    unsetenv("ZERO_FAIL_ALLOC");
}

/* After a stream's thread failed to start, the device is still usable. */
static void test_stream_fails_and_works_again(void **state)
{
    struct allocations a = {0, 4};
    struct zr_host_options options = {.refuse = refuse, .refuse_arg = &a};
    struct zr_device *dev;
    struct zr_stream *s;
    assert_int_equal(zr_host_device_open_with(&options, &dev), 0);
    assert_int_equal(dev->ops->stream_open(dev, ZR_STREAM_QUEUE, "one", NULL, &s), ZERO_ERR_SYSTEM);
    assert_null(s);
    assert_int_equal(dev->ops->stream_open(dev, ZR_STREAM_QUEUE, "one", NULL, &s), 0);
    assert_int_equal(dev->ops->stream_sync(s), 0);
    dev->ops->stream_close(s);
    assert_int_equal(dev->ops->stream_open(dev, ZR_STREAM_QUEUE, "one", &a, &s), ZERO_ERR_ARG);
    assert_int_equal(dev->ops->stream_open(dev, (enum zr_stream_kind)7, "one", NULL, &s), ZERO_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), "7"));
    dev->ops->close(dev);
}

static void wait_for_word(void *arg)
{
    while (!atomic_load(*(atomic_bool **)arg))
        zr_relax();
}

static void do_nothing(void *arg)
{
}

/* Returns how many operations a stream takes before it reports that one more would wait. */
static int64_t fill(struct zr_device *dev, struct zr_stream *s, atomic_bool *word)
{
    int64_t n = 1;
    assert_int_equal(dev->ops->call(s, wait_for_word, &word, sizeof word), 0);
    for (; dev->ops->stream_has_room(s, 1); n++)
        assert_int_equal(dev->ops->call(s, do_nothing, NULL, 0), 0);
    return n;
}

static void test_room_on_a_stream(void **state)
{
    enum { MORE = 1000 };
    struct allocations a = {0, 0};
    struct zr_host_options options = {.refuse = refuse, .refuse_arg = &a};
    struct zr_device *dev;
    struct zr_stream *s, *caller;
    assert_int_equal(zr_host_device_open_with(&options, &dev), 0);
    assert_int_equal(dev->ops->stream_open(dev, ZR_STREAM_CALLER, "caller", NULL, &caller), 0);
    assert_int_equal(dev->ops->stream_open(dev, ZR_STREAM_QUEUE, "queue", NULL, &s), 0);
    for (int more = 0; more <= MORE; more += MORE) {
        atomic_bool word = false;
        a.fail_at = more ? a.n + 1 : 0;
        assert_int_equal(dev->ops->stream_reserve(s, more), more ? ZERO_ERR_NOMEM : 0);
        assert_int_equal(dev->ops->stream_reserve(s, more), 0);
        assert_true(dev->ops->stream_has_room(s, ZR_HOST_RING + more + 1)); /* it is empty */
        assert_int_equal(fill(dev, s, &word), ZR_HOST_RING + more);
        atomic_store(&word, true);
        assert_int_equal(dev->ops->stream_sync(s), 0);
        assert_true(dev->ops->stream_has_room(s, ZR_HOST_RING + more));
    }
    assert_int_equal(dev->ops->stream_reserve(caller, MORE), 0);
    assert_true(dev->ops->stream_has_room(caller, MORE));
    dev->ops->stream_close(s);
    dev->ops->stream_close(caller);
    dev->ops->close(dev);
}

static void note_word(void *arg)
{
    atomic_store(*(atomic_bool **)arg, true);
}

static int give_up_at_third(void *arg)
{
    int *n = arg;
    return ++*n % 3 ? 0 : zr_fail(ZERO_ERR_TIMEOUT, "asked %d times", *n);
}

/* Waits for work that never ends, of each kind, return the code of the check that they call. A stream that
 * was told to leave begins nothing more. */
static void test_waits_that_ask(void **state)
{
    atomic_bool go = false, ran = false, *at[] = {&go, &ran};
    int n_asked = 0;
    struct zr_device *dev;
    struct zr_stream *s, *caller;
    struct zr_event *e;
    assert_int_equal(zr_host_device_open_with(NULL, &dev), 0);
    assert_int_equal(dev->ops->stream_open(dev, ZR_STREAM_QUEUE, NULL, NULL, &s), 0);
    assert_int_equal(dev->ops->stream_open(dev, ZR_STREAM_CALLER, NULL, NULL, &caller), 0);
    assert_int_equal(dev->ops->event_open(dev, &e), 0);
    dev->ops->ask_while_waiting(dev, give_up_at_third, &n_asked);
    assert_int_equal(dev->ops->call(s, wait_for_word, &at[0], sizeof at[0]), 0);
    assert_int_equal(dev->ops->event_record(e, s), 0);
    assert_int_equal(dev->ops->event_sync(e), ZERO_ERR_TIMEOUT);
    assert_string_equal(zr_error_text(), "asked 3 times");
    assert_int_equal(dev->ops->stream_sync(s), ZERO_ERR_TIMEOUT);
    assert_int_equal(dev->ops->stream_wait(caller, e), ZERO_ERR_TIMEOUT);
    assert_int_equal(n_asked, 9);
    assert_int_equal(dev->ops->call(s, note_word, &at[1], sizeof at[1]), 0);
    dev->ops->stream_leave(s);
    atomic_store(&go, true);
    assert_int_equal(dev->ops->event_sync(e), 0);
    zr_thread_join(&s->thread);
    assert_false(atomic_load(&ran));
    dev->ops->event_close(e);
    dev->ops->stream_close(caller);
    dev->ops->close(dev);
}

/* A stream may be left at any moment. The operation in progress is waited for, and those behind it do not
 * begin. */
static void test_left_streams_rest(void **state)
{
    enum { N = 4 << 20, TRIALS = 60 };
    unsigned char *to[2], *seen = malloc(N);
    void *at[2];
    struct zr_device *dev;
    struct random_source random = random_open();
    int n_within = 0;
    assert_non_null(seen);
    assert_int_equal(zr_host_device_open_with(NULL, &dev), 0);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(dev->ops->alloc(dev, N, &at[i]), 0);
        to[i] = at[i];
    }
    for (int i = 0; i < TRIALS; i++) {
        struct zr_stream *s;
        memset(to[0], 1, N);
        memset(to[1], 1, N);
        assert_int_equal(dev->ops->stream_open(dev, ZR_STREAM_QUEUE, NULL, NULL, &s), 0);
        for (int k = 0; k < 2; k++)
            assert_int_equal(dev->ops->zero(s, to[k], N), 0);
        for (int64_t until = zr_now_ns() + (int64_t)random_below(&random, 2000000); zr_now_ns() < until;)
            zr_relax();
        dev->ops->stream_leave(s);
        memcpy(seen, to[0], N);
        n_within += seen[N - 1] != to[1][N - 1];
        dev->ops->stream_leave(s); /* a second time */
        usleep(2000);
        assert_memory_equal(seen, to[0], N);
        assert_true(to[1][0] == to[1][N - 1]);
        zr_host_put(s, NULL, NULL, 0); /* its thread may be asleep */
        zr_thread_join(&s->thread);
    }
    print_message("%d of %d were left between two operations\n", n_within, TRIALS);
    for (int i = 0; i < 2; i++)
        dev->ops->free(dev, at[i], N);
    dev->ops->close(dev);
    free(seen);
}

static void test_poison(void **state)
{
    struct zr_device *dev;
    void *p;
    setenv("ZERO_POISON", "1", 1);
    assert_int_equal(zr_host_device_open(&dev), 0);
    unsetenv("ZERO_POISON");
    assert_int_equal(dev->ops->alloc(dev, 5000, &p), 0);
    for (int i = 0; i < 5000; i++)
        assert_int_equal(((unsigned char *)p)[i], 0xff);
    dev->ops->free(dev, p, 5000);
    dev->ops->close(dev);
}

static void test_isa_by_name(void **state)
{
    struct zr_device *dev;
    setenv("ZERO_ISA", "portable", 1);
    assert_string_equal(zr_host_kernels_best()->name, "portable");
    assert_int_equal(zr_host_device_open(&dev), 0);
    dev->ops->close(dev);
    setenv("ZERO_ISA", "sse9", 1);
    assert_int_equal(zr_host_device_open(&dev), ZERO_ERR_ARG);
    assert_null(dev);
    assert_non_null(strstr(zr_error_text(), "\"sse9\""));
    assert_non_null(strstr(zr_error_text(), "portable"));
    assert_non_null(zr_host_kernels_best());
    unsetenv("ZERO_ISA");
    assert_null(zr_host_kernels(ZR_ISA_COUNT));
}

/* The host refuses what it cannot do when the operation is queued, and queues nothing. */
static void test_refused_operations(void **state)
{
    struct zr_device *dev;
    struct zr_stream *s;
    float x[4] = {1, 2, 3, 4};
    struct zr_step_scalars scalars = {.grad_scale = 1};
    struct zr_update u = {.kind = ZERO_SGD,
                          .grad_dtype = ZERO_F32,
                          .param_dtype = ZERO_F16,
                          .n = 4,
                          .master = x,
                          .param = x + 1,
                          .grad = x,
                          .scalars = &scalars};
    assert_int_equal(zr_host_device_open(&dev), 0);
    assert_int_equal(dev->ops->stream_open(dev, ZR_STREAM_CALLER, "c", NULL, &s), 0);
    assert_int_equal(dev->ops->cast(s, x, ZERO_F16, x, ZERO_F32, 4), ZERO_ERR_NOTSUP);
    assert_int_equal(dev->ops->cast(s, x, ZERO_F32, x, ZERO_F16, 4), ZERO_ERR_NOTSUP);
    assert_int_equal(dev->ops->cast(s, x, ZERO_F32, x, (enum zero_dtype)9, 4), ZERO_ERR_ARG);
    assert_int_equal(dev->ops->update(s, &u), ZERO_ERR_NOTSUP);
    u.param_dtype = ZERO_F32, u.kind = (enum zero_optimizer)9;
    assert_int_equal(dev->ops->update(s, &u), ZERO_ERR_ARG);
    u.kind = ZERO_SGD, u.n = -1;
    assert_int_equal(dev->ops->update(s, &u), ZERO_ERR_ARG);
    u.n = 4, u.beta1 = 0.9f; /* momentum, without memory for it */
    assert_int_equal(dev->ops->update(s, &u), ZERO_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), "state[0] is NULL, and sgd keeps its momentum there"));
    assert_int_equal(dev->ops->zero(s, x, -1), ZERO_ERR_ARG);
    assert_int_equal(dev->ops->copy(s, x, x, -1), ZERO_ERR_ARG);
    assert_int_equal(dev->ops->add(s, x, x, ZERO_F32, -1), ZERO_ERR_ARG);
    assert_int_equal(dev->ops->add(s, x, x, ZERO_F16, 4), ZERO_ERR_NOTSUP);
    const void *sources[1] = {x};
    assert_int_equal(dev->ops->sum_tree(s, x, sources, 0, ZERO_F32, 4, false), ZERO_ERR_ARG);
    assert_int_equal(dev->ops->sum_tree(s, x, sources, ZR_MAX_SOURCES + 1, ZERO_F32, 4, false), ZERO_ERR_ARG);
    assert_int_equal(dev->ops->sum_tree(s, x, sources, 1, ZERO_F16, 4, false), ZERO_ERR_NOTSUP);
    assert_int_equal(dev->ops->put(s, x, x, ZR_PUT_BYTES + 8), ZERO_ERR_ARG);
    assert_int_equal(dev->ops->put(s, x, x, 4), ZERO_ERR_ARG);
    assert_int_equal(dev->ops->scale(s, x, -1, &scalars), ZERO_ERR_ARG);
    assert_int_equal(dev->ops->sum_squares(s, NULL, x, ZERO_F32, -1, NULL), ZERO_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), "-1"));
    for (int i = 0; i < 4; i++)
        assert_true(x[i] == (float)(i + 1));
    dev->ops->stream_close(s);
    dev->ops->close(dev);
}

/* --- --bench --- */

static void nothing(void *arg)
{
}

static int bench(struct zr_device *dev)
{
    enum { CALLS = 1000000, HOPS = 50000 };
    const struct zr_device_ops *ops = dev->ops;
    struct zr_stream *a, *b, *caller;
    struct zr_event *e;
    if (ops->stream_open(dev, ZR_STREAM_QUEUE, "a", NULL, &a) ||
        ops->stream_open(dev, ZR_STREAM_QUEUE, "b", NULL, &b) ||
        ops->stream_open(dev, ZR_STREAM_CALLER, "c", NULL, &caller) || ops->event_open(dev, &e))
        return 1;
    int64_t t = zr_now_ns();
    for (int i = 0; i < CALLS; i++)
        ops->call(a, nothing, NULL, 0);
    ops->stream_sync(a);
    printf("call on a queue              %8.1f ns\n", (double)(zr_now_ns() - t) / CALLS);
    t = zr_now_ns();
    for (int i = 0; i < CALLS; i++)
        ops->call(caller, nothing, NULL, 0);
    printf("call on the caller           %8.1f ns\n", (double)(zr_now_ns() - t) / CALLS);
    t = zr_now_ns();
    for (int i = 0; i < CALLS; i++) {
        ops->event_record(e, a);
        ops->stream_wait(b, e);
    }
    printf("record + wait, done already  %8.1f ns\n", (double)(zr_now_ns() - t) / CALLS);
    t = zr_now_ns();
    for (int i = 0; i < HOPS; i++) {
        ops->call(a, nothing, NULL, 0);
        ops->event_record(e, a);
        ops->stream_wait(caller, e);
    }
    printf("caller to queue and back     %8.1f ns\n", (double)(zr_now_ns() - t) / HOPS);
    t = zr_now_ns();
    for (int i = 0; i < HOPS; i++) {
        struct zr_stream *from = i % 2 ? a : b, *to = i % 2 ? b : a;
        ops->call(from, nothing, NULL, 0);
        ops->event_record(e, from);
        ops->stream_wait(to, e);
    }
    ops->stream_sync(a);
    ops->stream_sync(b);
    printf("queue to queue by an event   %8.1f ns\n", (double)(zr_now_ns() - t) / HOPS);
    ops->event_close(e);
    ops->stream_close(a);
    ops->stream_close(b);
    ops->stream_close(caller);
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_allocation_can_fail),
        cmocka_unit_test(test_stream_fails_and_works_again),
        cmocka_unit_test(test_room_on_a_stream),
        cmocka_unit_test(test_waits_that_ask),
        cmocka_unit_test(test_left_streams_rest),
        cmocka_unit_test(test_poison),
        cmocka_unit_test(test_isa_by_name),
        cmocka_unit_test(test_refused_operations),
    };
    /* Tests both ways of waiting on any number of cores: sleeping at once, and spinning first. */
    static const struct zr_host_options options[] = {{.spin_ns = -1}, {.spin_ns = 50000}};
    int failed = 0;
    for (int i = 0; i < 2; i++) {
        struct zr_device *dev;
        if (zr_host_device_open_with(&options[i], &dev)) {
            fprintf(stderr, "%s\n", zr_error_text());
            return 1;
        }
        printf("%s\n", options[i].spin_ns > 0 ? "spinning" : "sleeping");
        failed += argc > 1 && strcmp(argv[1], "--bench") == 0 ? bench(dev) : zr_device_suite(dev);
        dev->ops->close(dev);
    }
    return argc > 1 ? failed : failed + cmocka_run_group_tests(tests, NULL, NULL);
}
