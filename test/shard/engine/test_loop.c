/* SPDX-License-Identifier: Apache-2.0 */
/* test_loop.c: tests the loop's queue: every job pushed is carried out once and in order, however the two
 * threads sleep and wake.
 *
 * A lost wake-up shows as a hang, which an alarm ends. What a job writes is read without locks after
 * zr_loop_await and zr_loop_close, so that a thread sanitizer checks whether that is safe. */
#include "shard/engine/loop.h"
#include "test/shard/failing_memory.h"
#include "test/shard/random_model.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

/* Written by the thread that carries out jobs, one at a time. */
struct sink {
    struct random_source r;
    int pause_percent;
    int64_t n;       /* jobs carried out */
    int64_t n_wrong; /* jobs out of order or damaged */
    int n_stops;
    int64_t n_at_stop;
    pthread_t thread, stop_thread;
    sigset_t mask;
};

static void pause_briefly(struct random_source *r)
{
    switch (random_below(r, 4)) {
    case 0:
        sched_yield();
        break;
    case 1:
        nanosleep(&(struct timespec){.tv_nsec = random_below(r, 100000)}, NULL);
        break;
    default:
        for (int64_t until = zr_now_ns() + random_below(r, 20000); zr_now_ns() < until;)
            ;
    }
}

static struct zr_job job_of(int64_t i)
{
    return (struct zr_job){.action = {.kind = ZR_ACT_GATHER, .unit = (int32_t)i, .slot = -1},
                           .call_hash = (uint64_t)i * 7,
                           .step = 5,
                           .lr = 0.5f,
                           .t = i};
}

static void issue(void *arg, const struct zr_job *job)
{
    struct sink *s = arg;
    if (s->n == 0)
        pthread_sigmask(SIG_BLOCK, NULL, &s->mask);
    s->thread = pthread_self();
    s->n++;
    s->n_wrong += job->t != s->n || job->action.unit != s->n || job->call_hash != (uint64_t)s->n * 7 ||
                  job->step != 5 || job->action.kind != ZR_ACT_GATHER || job->action.slot != -1;
    if (chance(&s->r, s->pause_percent))
        pause_briefly(&s->r);
}

static void on_stop(void *arg)
{
    struct sink *s = arg;
    s->n_stops++;
    s->n_at_stop = s->n;
    s->stop_thread = pthread_self();
}

/* Job 2 waits for an event that a handle of the loop delivers. */
static atomic_bool came;

static void on_timer(uv_timer_t *t)
{
    atomic_store(&came, true);
    uv_close((uv_handle_t *)t, NULL);
}

static bool is_ready(void *arg, const struct zr_job *job, bool is_loop)
{
    (void)arg, (void)is_loop;
    return job->t != 2 || atomic_load(&came);
}

static int deadline(void **state)
{
    alarm(120);
    return 0;
}

/* Pushes, pauses, kicks, waits and carries out jobs at random. In the end every job was issued. */
static void everything_in_order(void **state)
{
    FOR_CASES(r, 60)
    {
        static const int32_t sizes[] = {1, 2, 3, 16, 1000};
        static const int64_t spins[] = {0, 1000, 50000};
        struct sink s = {.r = {r.state ^ 1}, .pause_percent = (int)random_below(&r, 3) * 10};
        struct zr_loop *l;
        int pauses = (int)random_below(&r, 3) * 10, waits = (int)random_below(&r, 3) * 5,
            kicks = chance(&r, 50) ? 100 : 30, drains = (int)random_below(&r, 3) * 25;
        assert_int_equal(zr_loop_open(sizes[random_below(&r, 5)], issue, &s, &l), 0);
        assert_int_equal(zr_loop_start(l, spins[random_below(&r, 3)], NULL, NULL), 0);
        int64_t n = random_below(&r, 500);
        for (int64_t i = 1; i <= n; i++) {
            struct zr_job job = job_of(i);
            CHECK(zr_loop_push(l, &job) == (uint64_t)i, "job %lld", (long long)i);
            if (chance(&r, kicks))
                zr_loop_kick(l);
            if (chance(&r, pauses))
                pause_briefly(&r);
            if (chance(&r, waits)) {
                zr_loop_kick(l);
                zr_loop_await(l, (uint64_t)i);
                CHECK(s.n == i, "job %lld was waited for, %lld are issued", (long long)i, (long long)s.n);
            } else if (chance(&r, waits)) {
                zr_loop_kick(l);
                zr_loop_await(l, (uint64_t)(1 + random_below(&r, i)));
            } else if (chance(&r, drains)) {
                CHECK(zr_loop_drain(l) && s.n == i, "job %lld was the last, %lld are issued", (long long)i,
                      (long long)s.n);
            }
        }
        zr_loop_close(l, on_stop, &s);
        CHECK(s.n == n && s.n_wrong == 0, "%lld of %lld issued, %lld wrong", (long long)s.n, (long long)n,
              (long long)s.n_wrong);
        CHECK(s.n_stops == 1 && s.n_at_stop == n, "stopped %d times, after %lld", s.n_stops,
              (long long)s.n_at_stop);
    }
}

/* Pushes one job at a time, at every delay relative to when the loop falls asleep. */
static void no_kick_is_lost(void **state)
{
    struct random_source r = random_open();
    for (int spin = 0; spin < 2; spin++) {
        struct sink s = {.r = {r.state ^ 1}};
        struct zr_loop *l;
        assert_int_equal(zr_loop_open(8, issue, &s, &l), 0);
        assert_int_equal(zr_loop_start(l, spin * 3000, NULL, NULL), 0);
        for (int64_t i = 1; i <= 4000; i++) {
            struct zr_job job = job_of(i);
            zr_loop_push(l, &job);
            zr_loop_kick(l);
            for (int64_t until = zr_now_ns() + random_below(&r, 10000); zr_now_ns() < until;)
                ;
            if (chance(&r, 50)) {
                zr_loop_await(l, (uint64_t)i);
                assert_int_equal(s.n, i);
            }
        }
        zr_loop_await(l, 4000);
        assert_int_equal(s.n, 4000);
        assert_int_equal(s.n_wrong, 0);
        zr_loop_close(l, NULL, NULL);
    }
}

/* A full queue makes push wait for room, and wakes the loop without a kick. */
static void a_full_queue_waits(void **state)
{
    struct random_source r = random_open();
    struct sink s = {.r = r, .pause_percent = 100};
    struct zr_loop *l;
    assert_int_equal(zr_loop_open(2, issue, &s, &l), 0);
    assert_int_equal(zr_loop_start(l, 0, NULL, NULL), 0);
    for (int64_t i = 1; i <= 300; i++) {
        struct zr_job job = job_of(i);
        zr_loop_push(l, &job); /* without a kick */
    }
    zr_loop_close(l, on_stop, &s);
    assert_int_equal(s.n, 300);
    assert_int_equal(s.n_wrong, 0);
}

static void close_carries_out_what_is_queued(void **state)
{
    struct random_source r = random_open();
    for (int i = 0; i < 50; i++) {
        struct sink s = {.r = {r.state ^ 1}, .pause_percent = 20};
        struct zr_loop *l;
        assert_int_equal(zr_loop_open(64, issue, &s, &l), 0);
        assert_int_equal(zr_loop_start(l, 0, NULL, NULL), 0);
        int64_t n = random_below(&r, 65);
        for (int64_t k = 1; k <= n; k++) {
            struct zr_job job = job_of(k);
            zr_loop_push(l, &job);
        }
        if (chance(&r, 50))
            zr_loop_kick(l);
        if (chance(&r, 50))
            pause_briefly(&r);
        zr_loop_close(l, on_stop, &s);
        assert_int_equal(s.n, n);
        assert_int_equal(s.n_wrong, 0);
        assert_int_equal(s.n_stops, 1);
        assert_int_equal(s.n_at_stop, n);
        assert_false(pthread_equal(s.stop_thread, pthread_self()));
        assert_true(n == 0 || pthread_equal(s.stop_thread, s.thread));
    }
}

/* A loop that was never started is closed by its owner's thread, which carries out the queued jobs. */
static void close_without_start(void **state)
{
    for (int64_t n = 0; n <= 8; n += 4) {
        struct sink s = {.n = 0};
        struct zr_loop *l;
        assert_int_equal(zr_loop_open(8, issue, &s, &l), 0);
        for (int64_t i = 1; i <= n; i++) {
            struct zr_job job = job_of(i);
            assert_int_equal(zr_loop_push(l, &job), i);
        }
        assert_int_equal(s.n, 0);
        zr_loop_close(l, on_stop, &s);
        assert_int_equal(s.n, n);
        assert_int_equal(s.n_wrong, 0);
        assert_int_equal(s.n_stops, 1);
        assert_true(pthread_equal(s.stop_thread, pthread_self()));
    }
    zr_loop_close(NULL, NULL, NULL);
}

/* ---- handles of other code ---- */

struct ticker {
    uv_timer_t timer;
    int64_t n_ticks, n_closed;
};

static void on_tick(uv_timer_t *t)
{
    ((struct ticker *)t->data)->n_ticks++;
}

static void on_closed(uv_handle_t *h)
{
    ((struct ticker *)h->data)->n_closed++;
}

static void stop_ticker(void *arg)
{
    uv_close((uv_handle_t *)&((struct ticker *)arg)->timer, on_closed);
}

/* Handles of other code run on the loop between jobs, and are closed on its thread at the end. */
static void handles_of_others(void **state)
{
    for (int started = 0; started < 2; started++) {
        struct sink s = {.n = 0};
        struct ticker t = {.n_ticks = 0};
        struct zr_loop *l;
        assert_int_equal(zr_loop_open(8, issue, &s, &l), 0);
        /* The loop itself has no active handle, so that a rendezvous can run it until the rendezvous is
         * done. */
        assert_int_equal(uv_run(zr_loop_uv(l), UV_RUN_DEFAULT), 0);
        uv_timer_init(zr_loop_uv(l), &t.timer);
        t.timer.data = &t;
        uv_timer_start(&t.timer, on_tick, 0, 1);
        if (started)
            assert_int_equal(zr_loop_start(l, 0, NULL, NULL), 0);
        for (int64_t i = 1; i <= (started ? 20 : 8); i++) {
            struct zr_job job = job_of(i);
            zr_loop_push(l, &job);
            zr_loop_kick(l);
            if (started)
                usleep(500);
        }
        zr_loop_close(l, stop_ticker, &t);
        assert_int_equal(s.n, started ? 20 : 8);
        assert_int_equal(t.n_closed, 1);
        assert_true(!started || t.n_ticks > 0);
    }
}

/* The program's signals go to its own threads, but the loop's thread still receives its own faults. */
/* A loop that waited inside the job would never run the timer. */
static void a_job_that_is_not_ready(void **state)
{
    for (int spin = 0; spin < 2; spin++) {
        struct sink s = {0};
        struct zr_loop *l;
        uv_timer_t timer;
        atomic_store(&came, false);
        assert_int_equal(zr_loop_open(8, issue, &s, &l), 0);
        zr_loop_ask(l, is_ready);
        uv_timer_init(zr_loop_uv(l), &timer);
        uv_timer_start(&timer, on_timer, 30, 0);
        for (int64_t i = 1; i <= 3; i++) {
            struct zr_job job = job_of(i);
            zr_loop_push(l, &job);
        }
        assert_int_equal(zr_loop_start(l, spin * 50000, NULL, NULL), 0);
        zr_loop_kick(l);
        zr_loop_await(l, 1);
        zr_loop_await(l, 2);
        assert_true(atomic_load(&came));
        zr_loop_await(l, 3);
        zr_loop_close(l, on_stop, &s);
        assert_int_equal(s.n, 3);
        assert_int_equal(s.n_wrong, 0);
    }
}

struct issuers {
    struct zr_loop *l;
    pthread_t of[4];
    bool inside[4];
};

static void issue_by(void *arg, const struct zr_job *job)
{
    struct issuers *s = arg;
    s->of[job->t] = pthread_self();
    s->inside[job->t] = zr_loop_is_inside(s->l);
}

static bool is_ready_there(void *arg, const struct zr_job *job, bool is_loop)
{
    (void)arg;
    return is_loop || job->t != 2;
}

/* The second job is for the loop's thread alone. */
static void jobs_of_either_thread(void **state)
{
    for (int i = 0; i < 50; i++) {
        struct issuers s = {0};
        assert_int_equal(zr_loop_open(8, issue_by, &s, &s.l), 0);
        zr_loop_ask(s.l, is_ready_there);
        assert_int_equal(zr_loop_start(s.l, i % 2 * 50000, NULL, NULL), 0);
        for (int64_t k = 1; k <= 3; k++) {
            struct zr_job job = job_of(k);
            zr_loop_push(s.l, &job);
            if (i % 3 == 0)
                assert_true(zr_loop_drain(s.l));
        }
        assert_true(zr_loop_drain(s.l));
        assert_false(zr_loop_is_inside(s.l));
        assert_true(s.inside[1] && s.inside[2] && s.inside[3]);
        assert_false(pthread_equal(s.of[2], pthread_self()));
        zr_loop_close(s.l, NULL, NULL);
    }
}

/* ---- a job that does not return ---- */

/* Job 2 blocks until the test releases it. */
struct standing {
    _Atomic bool let_go, stopped;
    _Atomic int64_t n;
    int n_stuck;
    int64_t stuck_ms;
    pthread_t stuck_thread;
};

static void issue_standing(void *arg, const struct zr_job *job)
{
    struct standing *s = arg;
    while (job->t == 2 && !atomic_load(&s->let_go))
        usleep(1000);
    atomic_fetch_add(&s->n, 1);
}

static void on_stuck(void *arg, int64_t ms)
{
    struct standing *s = arg;
    s->n_stuck++;
    s->stuck_ms = ms;
    s->stuck_thread = pthread_self();
}

static void on_standing_stop(void *arg)
{
    struct standing *s = arg;
    atomic_store(&s->stopped, true);
}

/* A waiter gets the error once, and nothing waits after that. When the job goes on, no queued job is lost. */
static void a_job_that_stands(void **state)
{
    enum { LIMIT_MS = 200 };
    for (int by_push = 0; by_push < 2; by_push++) {
        struct standing s = {.n_stuck = 0};
        struct zr_loop *l;
        assert_int_equal(zr_loop_open(4, issue_standing, &s, &l), 0);
        zr_loop_limit(l, LIMIT_MS, on_stuck, &s);
        assert_int_equal(zr_loop_start(l, 0, NULL, NULL), 0);
        uint64_t n = 0, n_queued;
        do {
            struct zr_job job = job_of((int64_t)++n);
            n_queued = zr_loop_push(l, &job) ? n : n - 1;
            zr_loop_kick(l);
        } while (n < 3 || (by_push && n_queued == n));
        if (!by_push) {
            assert_true(zr_loop_await(l, 1));
            assert_int_equal(s.n_stuck, 0);
            assert_false(zr_loop_await(l, 2));
        }
        assert_int_equal(s.n_stuck, 1);
        assert_true(s.stuck_ms >= LIMIT_MS);
        assert_true(pthread_equal(s.stuck_thread, pthread_self()));
        struct zr_job job = job_of(99);
        assert_int_equal(zr_loop_push(l, &job), 0);
        assert_false(zr_loop_await(l, n_queued));
        assert_false(zr_loop_await(l, n_queued + 1));
        assert_true(zr_loop_await(l, 1));
        assert_int_equal(s.n_stuck, 1);
        atomic_store(&s.let_go, true);
        assert_true(zr_loop_close(l, on_standing_stop, &s));
        assert_true(atomic_load(&s.stopped));
        assert_int_equal(atomic_load(&s.n), n_queued);
    }
}

/* A loop that keeps turning is not stuck, however long a job has to wait. */
static void a_job_that_is_held_for_long(void **state)
{
    enum { LIMIT_MS = 2000 };
    struct sink s = {0};
    struct standing reports = {.n_stuck = 0};
    struct zr_loop *l;
    uv_timer_t timer;
    atomic_store(&came, false);
    assert_int_equal(zr_loop_open(8, issue, &s, &l), 0);
    zr_loop_ask(l, is_ready);
    zr_loop_limit(l, LIMIT_MS, on_stuck, &reports);
    uv_timer_init(zr_loop_uv(l), &timer);
    uv_timer_start(&timer, on_timer, LIMIT_MS * 3 / 2, 0);
    for (int64_t i = 1; i <= 2; i++) {
        struct zr_job job = job_of(i);
        zr_loop_push(l, &job);
    }
    assert_int_equal(zr_loop_start(l, 0, NULL, NULL), 0);
    zr_loop_kick(l);
    assert_true(zr_loop_await(l, 2));
    assert_true(atomic_load(&came));
    assert_int_equal(reports.n_stuck, 0);
    assert_true(zr_loop_close(l, NULL, NULL));
}

/* Closing does not wait for ever. The thread ends when its job returns. */
static void a_thread_that_is_left_behind(void **state)
{
    static struct standing s;
    static struct zr_loop *l; /* static, because it stays allocated: a leak checker finds it here */
    assert_int_equal(zr_loop_open(4, issue_standing, &s, &l), 0);
    assert_int_equal(zr_loop_start(l, 0, NULL, NULL), 0);
    for (int64_t i = 1; i <= 3; i++) {
        struct zr_job job = job_of(i);
        zr_loop_push(l, &job);
    }
    zr_loop_kick(l);
    assert_false(zr_loop_close(l, on_standing_stop, &s));
    assert_false(atomic_load(&s.stopped));
    atomic_store(&s.let_go, true);
    while (!atomic_load(&s.stopped)) /* an alarm ends an endless wait */
        usleep(1000);
    assert_int_equal(atomic_load(&s.n), 3);
}

static void signals_are_not_the_loops(void **state)
{
    struct sink s = {.n = 0};
    struct zr_loop *l;
    struct zr_job job = job_of(1);
    assert_int_equal(zr_loop_open(8, issue, &s, &l), 0);
    assert_int_equal(zr_loop_start(l, 0, NULL, NULL), 0);
    zr_loop_push(l, &job);
    zr_loop_close(l, NULL, NULL);
    static const int blocked[] = {SIGINT, SIGTERM, SIGHUP, SIGPIPE, SIGCHLD, SIGUSR1},
                     open[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    for (size_t i = 0; i < sizeof blocked / sizeof *blocked; i++)
        assert_int_equal(sigismember(&s.mask, blocked[i]), 1);
    for (size_t i = 0; i < sizeof open / sizeof *open; i++)
        assert_int_equal(sigismember(&s.mask, open[i]), 0);
}

static void out_of_memory_leaves_nothing(void **state)
{
    struct sink s = {.n = 0};
    int64_t live = n_live;
    for (int64_t k = 0, err = ZERO_ERR_NOMEM; err; k++) {
        struct zr_loop *l = NULL;
        n_allocs = 0;
        fail_at = k;
        err = zr_loop_open(8, issue, &s, &l);
        fail_at = -1;
        assert_true(err == 0 || err == ZERO_ERR_NOMEM);
        assert_true(err == 0 || (!l && strstr(zr_error_text(), "no memory")));
        assert_true(err || k >= 2);
        zr_loop_close(l, NULL, NULL);
        assert_int_equal(n_live, live);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(everything_in_order),          cmocka_unit_test(no_kick_is_lost),
        cmocka_unit_test(a_full_queue_waits),           cmocka_unit_test(close_carries_out_what_is_queued),
        cmocka_unit_test(close_without_start),          cmocka_unit_test(handles_of_others),
        cmocka_unit_test(a_job_that_is_not_ready),      cmocka_unit_test(signals_are_not_the_loops),
        cmocka_unit_test(out_of_memory_leaves_nothing), cmocka_unit_test(a_job_that_stands),
        cmocka_unit_test(jobs_of_either_thread),        cmocka_unit_test(a_job_that_is_held_for_long),
        cmocka_unit_test(a_thread_that_is_left_behind),
    };
    return cmocka_run_group_tests(tests, deadline, NULL);
}
