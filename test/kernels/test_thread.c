/* SPDX-License-Identifier: Apache-2.0 */
/* test_thread.c: tests the library's threads. They are named, block the program's signals, and receive
 * their own faults. Linked with --wrap=pthread_create. */
#include "kernels/error.h"
#include "kernels/thread.h"
#include "test/cmocka.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <unistd.h>

int __real_pthread_create(pthread_t *id, const pthread_attr_t *attr, void *(*fn)(void *), void *arg);
int __wrap_pthread_create(pthread_t *id, const pthread_attr_t *attr, void *(*fn)(void *), void *arg);

static bool no_threads;

int __wrap_pthread_create(pthread_t *id, const pthread_attr_t *attr, void *(*fn)(void *), void *arg)
{
    return no_threads ? EAGAIN : __real_pthread_create(id, attr, fn, arg);
}

struct seen {
    char name[ZR_THREAD_NAME_BYTES + 1];
    sigset_t mask;
    pthread_t id;
    atomic_int n_runs;
};

static void look(void *arg)
{
    struct seen *s = arg;
    pthread_getname_np(pthread_self(), s->name, sizeof s->name);
    pthread_sigmask(SIG_BLOCK, NULL, &s->mask);
    s->id = pthread_self();
    atomic_fetch_add(&s->n_runs, 1);
}

static void runs_once(void **state)
{
    struct seen s = {.n_runs = 0};
    struct zr_thread t;
    assert_int_equal(zr_thread_start(&t, "zero-test", look, &s), 0);
    zr_thread_join(&t);
    assert_int_equal(atomic_load(&s.n_runs), 1);
    assert_string_equal(s.name, "zero-test");
    assert_false(pthread_equal(s.id, pthread_self()));
}

static void long_names_are_cut(void **state)
{
    struct seen s = {.n_runs = 0};
    struct zr_thread t;
    assert_int_equal(zr_thread_start(&t, "zero-of-a-long-name", look, &s), 0);
    zr_thread_join(&t);
    assert_string_equal(s.name, "zero-of-a-long-");
}

/* The same for any signal mask of the starting thread, which keeps its mask. */
static void signals(void **state)
{
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
    static const int others[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGCHLD, SIGALRM, SIGPIPE, SIGPROF};
    for (int blocks_all = 0; blocks_all < 2; blocks_all++) {
        struct seen s = {.n_runs = 0};
        struct zr_thread t;
        sigset_t all, before, after;
        sigfillset(&all);
        pthread_sigmask(blocks_all ? SIG_SETMASK : SIG_BLOCK, blocks_all ? &all : NULL, &before);
        assert_int_equal(zr_thread_start(&t, "zero-test", look, &s), 0);
        zr_thread_join(&t);
        pthread_sigmask(SIG_SETMASK, &before, &after);
        for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
            assert_int_equal(sigismember(&s.mask, others[i]), 1);
            assert_int_equal(sigismember(&after, others[i]), blocks_all);
        }
        for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
            assert_int_equal(sigismember(&s.mask, faults[i]), 0);
    }
}

/* A thread that is not joined frees its own memory. */
static void left_alone(void **state)
{
    struct seen s = {.n_runs = 0};
    struct zr_thread t;
    assert_int_equal(zr_thread_start(&t, "zero-test", look, &s), 0);
    zr_thread_leave(&t);
    while (!atomic_load(&s.n_runs))
        usleep(1000);
}

/* If no thread can be started, there is an error text and the mask is restored. */
static void none_to_be_had(void **state)
{
    struct seen s = {.n_runs = 0};
    struct zr_thread t;
    sigset_t before, after;
    pthread_sigmask(SIG_BLOCK, NULL, &before);
    no_threads = true;
    int err = zr_thread_start(&t, "zero-test", look, &s);
    no_threads = false;
    pthread_sigmask(SIG_BLOCK, NULL, &after);
    assert_int_equal(err, ZERO_ERR_SYSTEM);
    assert_string_equal(zr_error_text(),
                        "thread zero-test could not be started: Resource temporarily unavailable");
    assert_int_equal(sigismember(&after, SIGTERM), sigismember(&before, SIGTERM));
    assert_int_equal(atomic_load(&s.n_runs), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(runs_once),  cmocka_unit_test(long_names_are_cut), cmocka_unit_test(signals),
        cmocka_unit_test(left_alone), cmocka_unit_test(none_to_be_had),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
