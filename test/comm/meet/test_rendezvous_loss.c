/* SPDX-License-Identifier: Apache-2.0 */
/* test_rendezvous_loss.c: tests ranks that die, leave, fail or stay away, at every stage from meeting on. */
#include "comm/topology.h"
#include "test/cmocka.h"
#include "test/comm/meet/meeting.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* --- ranks that go --- */

/* The last rank dies while the others meet. It says hello by hand; rank 1 never comes. */
static void die_while_meeting(struct rank *me)
{
    if (me->w.rank == 0) {
        open_and_note(me);
    } else if (me->w.rank == 2) {
        struct zr_frame f;
        char proof[64];
        RANK_CHECK(me, read_frame(greet(me, 2, 4), &f, proof, sizeof proof) && f.type == ZR_FRAME_ACCEPT,
                   "it was not let in");
        kill(getpid(), SIGKILL);
    }
}

static void rank_2_dies(struct rank *r)
{
    r->dies = r->w.rank == 2;
}

static void test_death_while_meeting(void **state)
{
    struct rank *r = run_ranks(true, 4, die_while_meeting, NULL, rank_2_dies);
    expect_rank(&r[0], ZERO_ERR_PEER, "rank 2 was lost while ranks met");
}

static void die_in_exchange(struct rank *me)
{
    struct meeting m;
    RANK_CHECK(me, meet(&m, &me->w, LONG_MS) == 0, "%s", zr_error_text());
    RANK_CHECK(me, exchange_ranks(&m) == 0, "%s", zr_error_text());
    if (me->dies) {
        sleep_ms(50);
        kill(getpid(), SIGKILL);
    }
    note_error(me, exchange_ranks(&m));
    RANK_CHECK(me, exchange_ranks(&m) == me->code, "another code the second time");
    RANK_CHECK(me, part(&m), "handles are left");
}

static void rank_0_dies(struct rank *r)
{
    r->dies = r->w.rank == 0;
}

static void test_death_in_exchange(void **state)
{
    struct rank *r = run_ranks(true, 4, die_in_exchange, NULL, rank_2_dies);
    for (int i = 0; i < 4; i++)
        if (i != 2)
            expect_rank(&r[i], ZERO_ERR_PEER, "rank 2 was lost");
    r = run_ranks(true, 4, die_in_exchange, NULL, rank_0_dies);
    for (int i = 1; i < 4; i++)
        expect_rank(&r[i], ZERO_ERR_PEER, "rank 0 was lost");
}

/* Rank 1 says hello and is gone before rank 0 reads it. The others learn of it at once or in the first
 * exchange. */
static void die_after_hello(struct rank *me)
{
    if (me->w.rank == 1) {
        close(greet(me, 1, 3));
        return;
    }
    struct meeting m;
    int64_t timeout_ms = me->w.rank == 0 ? LONG_MS : 2000; /* rank 2 may come when nobody is left */
    note_error(me, meet(&m, &me->w, timeout_ms));
    if (!me->code)
        note_error(me, exchange_ranks(&m));
    RANK_CHECK(me, part(&m), "handles are left");
}

static void test_death_after_hello(void **state)
{
    struct rank *r = run_ranks(true, 3, die_after_hello, NULL, NULL);
    expect_rank(&r[0], ZERO_ERR_PEER, "rank 1 was lost");
    assert_int_not_equal(r[2].code, 0);
}

/* Writing to a closed connection must not end the process, and must leave its signal handlers as they
 * were. */
static void on_connect(struct zr_link *l, int status)
{
    *(int *)l->owner = status;
}

static void on_frame(struct zr_link *l, const struct zr_frame *f, const char *payload)
{
}

static bool on_large(struct zr_link *l, const struct zr_frame *f)
{
    return false;
}

static void on_end(struct zr_link *l, int code, const char *why)
{
}

static void on_closed(struct zr_link *l)
{
}

static void write_to_the_dead(struct rank *me)
{
    static const struct zr_link_calls calls = {on_connect, on_frame, on_large, on_end, on_closed};
    union zr_address a = loopback(me->w.port);
    int server = listen_at(me->w.port), connected = 1;
    RANK_CHECK(me, server >= 0, "no server");
    uv_loop_t loop;
    uv_loop_init(&loop);
    struct zr_link *l = zr_link_new(&loop, &calls, &connected, 64);
    RANK_CHECK(me, l && zr_link_connect(l, NULL, &a) == 0, "no connection");
    while (connected == 1)
        uv_run(&loop, UV_RUN_ONCE);
    close(accept(server, NULL, NULL));
    close(server);
    for (int i = 0; i < 4; i++) {
        (void)zr_link_send(l, (struct zr_frame){.type = ZR_FRAME_GOODBYE}, NULL, 0);
        sleep_ms(20);
    }
    sigset_t pending, blocked;
    sigpending(&pending);
    pthread_sigmask(SIG_SETMASK, NULL, &blocked);
    RANK_CHECK(me, connected == 0, "status %d", connected);
    RANK_CHECK(me, !sigismember(&pending, SIGPIPE) && !sigismember(&blocked, SIGPIPE), "SIGPIPE is left");
    zr_link_drop(l);
    uv_run(&loop, UV_RUN_DEFAULT);
    RANK_CHECK(me, uv_loop_close(&loop) == 0, "handles are left");
}

static void test_write_to_the_dead(void **state)
{
    run_ranks(true, 1, write_to_the_dead, NULL, NULL);
}

/* One rank leaves in good order while the others exchange. */
static void leave_early(struct rank *me)
{
    struct meeting m;
    RANK_CHECK(me, meet(&m, &me->w, LONG_MS) == 0, "%s", zr_error_text());
    if (me->w.rank != *(int *)me->arg)
        note_error(me, exchange_ranks(&m));
    RANK_CHECK(me, part(&m), "handles are left");
}

static void test_leaving_early(void **state)
{
    for (int victim = 0; victim < 3; victim++) {
        char text[32];
        snprintf(text, sizeof text, "rank %d left", victim);
        struct rank *r = run_ranks(false, 3, leave_early, &victim, NULL);
        for (int i = 0; i < 3; i++)
            if (i != victim)
                expect_rank(&r[i], ZERO_ERR_PEER, text);
    }
}

/* One rank cannot go on. The others learn why, whether they are in an exchange already or not. */
static void fail_instead(struct rank *me)
{
    struct meeting m;
    RANK_CHECK(me, meet(&m, &me->w, LONG_MS) == 0, "%s", zr_error_text());
    RANK_CHECK(me, exchange_ranks(&m) == 0, "%s", zr_error_text());
    if (me->w.rank == *(int *)me->arg) {
        zr_fail(ZERO_ERR_NOMEM, "no memory for %d apples", 7);
        RANK_CHECK(me, zr_rendezvous_fail(m.r, ZERO_ERR_NOMEM) == ZERO_ERR_NOMEM, "another code");
        RANK_CHECK(me, strcmp(zr_error_text(), "no memory for 7 apples") == 0, "%s", zr_error_text());
    } else if (me->w.rank == 2) {
        sleep_ms(30);
    }
    note_error(me, exchange_ranks(&m));
    RANK_CHECK(me, part(&m), "handles are left");
}

static void test_failing_rank(void **state)
{
    for (int victim = 0; victim < 3; victim++) {
        char text[64];
        snprintf(text, sizeof text, "rank %d: no memory for 7 apples", victim);
        struct rank *r = run_ranks(false, 4, fail_instead, &victim, NULL);
        for (int i = 0; i < 4; i++)
            expect_rank(&r[i], ZERO_ERR_NOMEM, text);
    }
}

/* --- ranks that wait for something else, and poll the rendezvous --- */

enum end { DIES, FAILS, LEAVES };

/* Rank 0 polls while rank 1 exchanges; rank 1 is not lost by that. Then both poll until they hear of rank
 * 2. */
static void look_for_it(struct rank *me)
{
    struct meeting m;
    int err = 0;
    RANK_CHECK(me, meet(&m, &me->w, LONG_MS) == 0, "%s", zr_error_text());
    for (int i = 0; i < 10 && me->w.rank == 0; i++, sleep_ms(5))
        RANK_CHECK(me, zr_rendezvous_look(m.r) == 0, "%s", zr_error_text());
    RANK_CHECK(me, exchange_ranks(&m) == 0, "%s", zr_error_text());
    if (me->w.rank == 2) {
        enum end how = *(enum end *)me->arg;
        if (how == DIES)
            kill(getpid(), SIGKILL);
        zr_fail(ZERO_ERR_NOMEM, "no memory for 7 apples");
        if (how == FAILS)
            zr_rendezvous_fail(m.r, ZERO_ERR_NOMEM);
        else
            RANK_CHECK(me, part(&m), "handles are left");
        if (how == LEAVES)
            return;
    }
    for (int i = 0; i < 6000 && !err; i++, sleep_ms(5))
        err = zr_rendezvous_look(m.r);
    note_error(me, err);
    RANK_CHECK(me, zr_rendezvous_look(m.r) == err, "another code the second time");
    RANK_CHECK(me, exchange_ranks(&m) == err, "another code in the exchange");
    zr_rendezvous_detach(m.r, NULL, NULL, NULL);
    RANK_CHECK(me, zr_rendezvous_look(m.r) == 0, "it looks when it is detached");
    RANK_CHECK(me, part(&m), "handles are left");
}

static void expect_seen(enum end how, int code, const char *text)
{
    struct rank *r = run_ranks(true, 3, look_for_it, &how, how == DIES ? rank_2_dies : NULL);
    for (int i = 0; i < (how == FAILS ? 3 : 2); i++)
        expect_rank(&r[i], code, text);
}

static void test_look(void **state)
{
    expect_seen(DIES, ZERO_ERR_PEER, "rank 2 was lost before an exchange");
    expect_seen(FAILS, ZERO_ERR_NOMEM, "rank 2: no memory for 7 apples");
    expect_seen(LEAVES, ZERO_ERR_PEER, "rank 2 left before an exchange");
}

static void differ_in_size(struct rank *me)
{
    struct meeting m;
    char mine[32] = {0}, all[32 * MAX_RANKS];
    RANK_CHECK(me, meet(&m, &me->w, LONG_MS) == 0, "%s", zr_error_text());
    note_error(me, zr_rendezvous_exchange(m.r, mine, me->w.rank == 1 ? 12 : 16, all));
    RANK_CHECK(me, part(&m), "handles are left");
}

static void test_sizes_differ(void **state)
{
    struct rank *r = run_ranks(true, 3, differ_in_size, NULL, NULL);
    for (int i = 0; i < 3; i++)
        expect_rank(&r[i], ZERO_ERR_MISMATCH, "rank 1 gives 12 bytes, rank 0 gives 16");
}

static void skip_exchange(struct rank *me)
{
    struct meeting m;
    RANK_CHECK(me, all_at(me, 1), "a rank has not started"); /* they have little time */
    RANK_CHECK(me, meet(&m, &me->w, LONG_MS) == 0, "%s", zr_error_text());
    zr_rendezvous_limit(m.r, SHORT_MS);
    if (me->w.rank != *(int *)me->arg) {
        note_error(me, exchange_ranks(&m));
        atomic_store(&me->stage, 2);
    } else {
        for (int i = 0; i < me->w.world; i++)
            RANK_CHECK(me, i == me->w.rank || wait_stage(&me->all[i], 2), "rank %d waits for ever", i);
    }
    RANK_CHECK(me, part(&m), "handles are left");
}

static void test_exchange_timeout(void **state)
{
    int victim = 2;
    struct rank *r = run_ranks(false, 3, skip_exchange, &victim, NULL);
    expect_rank(&r[0], ZERO_ERR_TIMEOUT, "1 of 3 ranks did not come");
    expect_rank(&r[1], ZERO_ERR_TIMEOUT, "rank 2");
    victim = 0;
    r = run_ranks(false, 3, skip_exchange, &victim, NULL);
    expect_rank(&r[1], ZERO_ERR_TIMEOUT, "for rank 0");
}

/* --- after the detach --- */

struct watch {
    struct rank *me;
    struct meeting m;
    uv_timer_t stop;
    int n_lost;
};

static void stop_closed(uv_handle_t *h)
{
}

static void stop(struct watch *w)
{
    uv_close((uv_handle_t *)&w->stop, stop_closed);
    zr_rendezvous_close(w->m.r);
}

static void note_lost(void *arg, int rank, const char *why)
{
    struct watch *w = arg;
    w->n_lost++;
    w->me->code = rank;
    snprintf(w->me->note, sizeof w->me->note, "%s", why);
    if (!uv_is_closing((uv_handle_t *)&w->stop))
        stop(w); /* closing inside the callback must be allowed */
}

static void time_over(uv_timer_t *t)
{
    stop(t->data);
}

/* A text longer than most messages, which names the rank that says it. */
static void say_last_call(void *arg, int rank, char *text, size_t n_text)
{
    const struct rank *me = arg;
    snprintf(text, n_text, "%0150d, says rank %d of rank %d", 7, me->w.rank, rank);
}

/* Watches until a loss, or for run_ms. Rank *arg leaves at once: by a signal if it dies, and with a
 * goodbye otherwise. */
static void watch(struct rank *me)
{
    struct watch w = {.me = me};
    bool goes = me->w.rank == *(int *)me->arg;
    bool someone_dies = false;
    for (int i = 0; i < me->w.world; i++)
        someone_dies |= me->all[i].dies;
    RANK_CHECK(me, meet(&w.m, &me->w, LONG_MS) == 0, "%s", zr_error_text());
    RANK_CHECK(me, exchange_ranks(&w.m) == 0, "%s", zr_error_text());
    zr_rendezvous_know(w.m.r, &(struct zr_known_ranks){.last_call = say_last_call, .arg = me});
    me->code = -1;
    if (goes && me->all[0].stage) { /* a child process outlives it */
        pid_t pid = fork();
        if (pid == 0) {
            alarm(120);
            pause();
            _exit(0);
        }
        atomic_store(&me->stage, (int)pid);
    }
    if (goes && me->dies)
        kill(getpid(), SIGKILL);
    sleep_ms(me->w.rank * 10); /* deaths are seen before or after the detach */
    uv_timer_init(&w.m.loop, &w.stop);
    w.stop.data = &w;
    uv_timer_start(&w.stop, time_over, someone_dies ? LONG_MS : goes ? 0 : 200, 0);
    zr_rendezvous_detach(w.m.r, note_lost, NULL, &w);
    uv_run(&w.m.loop, UV_RUN_DEFAULT);
    zr_rendezvous_free(w.m.r);
    RANK_CHECK(me, uv_loop_close(&w.m.loop) == 0, "handles are left");
    RANK_CHECK(me, w.n_lost == (someone_dies ? 1 : 0), "%d losses were told, the last: rank %d, %s", w.n_lost,
               me->code, me->note);
}

static void test_death_after_detach(void **state)
{
    int victim = 2;
    char text[64];
    struct rank *r = run_ranks(true, 4, watch, &victim, rank_2_dies);
    for (int i = 0; i < 4; i++)
        if (i != 2)
            expect_rank(&r[i], 2, "connection");
    for (int i = 0; i < 4; i++) /* the whole text of rank 0, which saw the loss */
        if (i != 2)
            expect_rank(&r[i], 2, "; its last call was 000");
    for (int i = 0; i < 4; i++)
        if (i != 2)
            expect_rank(&r[i], 2, "007, says rank 0 of rank 2");
    victim = 0;
    r = run_ranks(true, 3, watch, &victim, rank_0_dies);
    for (int i = 1; i < 3; i++) {
        snprintf(text, sizeof text, "007, says rank %d of rank 0", i);
        expect_rank(&r[i], 0, "connection");
        expect_rank(&r[i], 0, text);
    }
}

enum { BEAT_MS = 200 };

/* Ranks 0 and 1 are on one host, 2 and 3 on another. Says which ranks' last calls a rank can read. */
static void say_call_of_host(void *arg, int rank, char *text, size_t n_text)
{
    const struct rank *me = arg;
    text[0] = 0;
    if (rank / 2 == me->w.rank / 2)
        snprintf(text, n_text, "call of rank %d, says rank %d", rank, me->w.rank);
}

static void die_now(uv_timer_t *t)
{
    kill(getpid(), SIGKILL);
}

/* Rank *arg is killed after it has sent some heartbeats. */
static void watch_from_hosts(struct rank *me)
{
    struct watch w = {.me = me};
    struct zr_topology hosts;
    struct zr_sigpipe_hold hold;
    RANK_CHECK(me, meet(&w.m, &me->w, LONG_MS) == 0, "%s", zr_error_text());
    RANK_CHECK(me, exchange_ranks(&w.m) == 0, "%s", zr_error_text());
    RANK_CHECK(me, zr_topology_assume(me->w.world, 2, &hosts) == 0, "%s", zr_error_text());
    zr_rendezvous_hosts(w.m.r, &hosts);
    zr_rendezvous_limit(w.m.r, BEAT_MS * 16);
    zr_rendezvous_know(w.m.r, &(struct zr_known_ranks){.last_call = say_call_of_host, .arg = me});
    me->code = -1;
    uv_timer_init(&w.m.loop, &w.stop);
    w.stop.data = &w;
    uv_timer_start(&w.stop, me->dies ? die_now : time_over, me->dies ? 4 * BEAT_MS : LONG_MS, 0);
    zr_rendezvous_detach(w.m.r, note_lost, NULL, &w);
    zr_sigpipe_hold(&hold); /* a context's loop thread does the same */
    uv_run(&w.m.loop, UV_RUN_DEFAULT);
    zr_sigpipe_release(&hold);
    zr_rendezvous_free(w.m.r);
    RANK_CHECK(me, uv_loop_close(&w.m.loop) == 0, "handles are left");
    RANK_CHECK(me, w.n_lost == 1, "%d losses were told", w.n_lost);
    zr_topology_free(&hosts);
}

static void it_dies(struct rank *r)
{
    r->dies = r->w.rank == *(int *)r->arg;
}

/* A rank adds the lost rank's last call if it can read it or hears it from rank 0. The others report the
 * loss only. */
static void test_last_call_of_other_hosts(void **state)
{
    static const int reader[3][4] = {{-1, 1, -1, -1}, {0, -1, 0, 0}, {-1, -1, -1, 3}}; /* -1: nobody */
    char expected[96];
    for (int victim = 0; victim < 3; victim++) {
        struct rank *r = run_ranks(true, 4, watch_from_hosts, &victim, it_dies);
        for (int i = 0; i < 4; i++) {
            int by = reader[victim][i];
            if (i == victim)
                continue;
            snprintf(expected, sizeof expected, "; %s call of rank %d, says rank %d",
                     by < 0 ? "last heard:" : "its last call was", victim, by < 0 ? victim : by);
            expect_rank(&r[i], victim, expected);
            assert_string_equal(strstr(r[i].note, "; "), expected); /* once, and nothing after it */
        }
    }
}

static void with_child_2(struct rank *r)
{
    rank_2_dies(r);
    atomic_store(&r->stage, 1);
}

static void with_child_0(struct rank *r)
{
    rank_0_dies(r);
    atomic_store(&r->stage, 1);
}

/* The rank that dies has a child process. Without precautions the child would hold copies of its sockets. */
static void test_death_of_a_parent(void **state)
{
    for (int victim = 0; victim <= 2; victim += 2) {
        struct rank *r = run_ranks(true, 3, watch, &victim, victim ? with_child_2 : with_child_0);
        assert_int_equal(kill(r[victim].stage, SIGKILL), 0); /* the child was still alive */
        for (int i = 0; i < 3; i++)
            if (i != victim)
                expect_rank(&r[i], victim, "connection");
    }
}

static void test_goodbye_is_no_death(void **state)
{
    for (int victim = 0; victim < 3; victim++)
        run_ranks(false, 3, watch, &victim, NULL);
}

/* Rank `victim` fails: another thread reports the failure, twice, and the rank closes a moment later. */
struct failure {
    int victim, code, close_ms;
    size_t n_text;
};

struct hearing {
    struct watch w;
    const struct failure *f;
    int n_heard, code;
    char text[2048];
};

static void report(void *arg)
{
    struct hearing *h = arg;
    char text[2048];
    memset(text, 'x', sizeof text);
    text[h->f->n_text] = 0;
    zr_rendezvous_report(h->w.m.r, h->f->code, text);
    zr_rendezvous_report(h->w.m.r, ZERO_ERR_IO, "what came after it");
}

static void note_failure(void *arg, int code, const char *text)
{
    struct hearing *h = arg;
    h->n_heard++;
    h->code = code;
    snprintf(h->text, sizeof h->text, "%s", text);
    stop(&h->w);
}

static void no_loss(void *arg, int rank, const char *why)
{
    struct hearing *h = arg;
    rank_says(h->w.me, __FILE__, __LINE__, "no loss", "rank %d was lost: %s", rank, why);
}

static void report_or_learn(struct rank *me)
{
    struct hearing h = {.w.me = me, .f = me->arg};
    bool fails = me->w.rank == h.f->victim;
    uv_thread_t reporter;
    RANK_CHECK(me, meet(&h.w.m, &me->w, LONG_MS) == 0, "%s", zr_error_text());
    RANK_CHECK(me, exchange_ranks(&h.w.m) == 0, "%s", zr_error_text());
    if (!fails)
        sleep_ms(me->w.rank * 10); /* the failure comes before or after the detach */
    uv_timer_init(&h.w.m.loop, &h.w.stop);
    h.w.stop.data = &h.w;
    uv_timer_start(&h.w.stop, time_over, fails ? (uint64_t)h.f->close_ms : LONG_MS, 0);
    zr_rendezvous_detach(h.w.m.r, no_loss, note_failure, &h);
    if (fails)
        uv_thread_create(&reporter, report, &h);
    if (fails && h.f->close_ms == 0)
        uv_thread_join(&reporter);
    uv_run(&h.w.m.loop, UV_RUN_DEFAULT);
    if (fails && h.f->close_ms)
        uv_thread_join(&reporter);
    zr_rendezvous_report(h.w.m.r, ZERO_ERR_IO, "too late");
    zr_rendezvous_free(h.w.m.r);
    RANK_CHECK(me, uv_loop_close(&h.w.m.loop) == 0, "handles are left");
    RANK_CHECK(me, h.n_heard == !fails, "%d failures were heard", h.n_heard);
    size_t most = ZR_FRAME_TEXT_BYTES - 1, n = h.f->n_text < most ? h.f->n_text : most;
    RANK_CHECK(me, fails || (h.code == h.f->code && strspn(h.text, "x") == n && !h.text[n]),
               "code %d, %zu bytes: \"%s\"", h.code, strlen(h.text), h.text);
}

static void test_failure_after_detach(void **state)
{
    for (int k = 0; k < 24; k++) {
        struct failure f = {.victim = k % 3,
                            .code = k & 4 ? ZERO_ERR_PEER : ZERO_ERR_NOMEM,
                            .close_ms = k & 8 ? 100 : 0,
                            .n_text = k & 1 ? 2000 : 20};
        run_ranks(k & 2, 4, report_or_learn, &f, NULL);
    }
}

/* Each rank is on its own host, so no other rank can read what rank *arg recorded. That rank has failed,
 * and its program exits with the context open, before the loop has reported the failure. */
static void exit_after_a_failure(struct rank *me)
{
    static struct hearing h; /* static, because it is open when the process exits; no leak */
    const int victim = *(int *)me->arg;
    struct zr_topology hosts;
    h.w.me = me;
    RANK_CHECK(me, meet(&h.w.m, &me->w, LONG_MS) == 0, "%s", zr_error_text());
    RANK_CHECK(me, exchange_ranks(&h.w.m) == 0, "%s", zr_error_text());
    RANK_CHECK(me, zr_topology_assume(me->w.world, 1, &hosts) == 0, "%s", zr_error_text());
    zr_rendezvous_hosts(h.w.m.r, &hosts);
    zr_rendezvous_detach(h.w.m.r, no_loss, note_failure, &h);
    atomic_store(&me->stage, 1);
    if (me->w.rank == victim) {
        for (int i = 0; i < me->w.world; i++)
            RANK_CHECK(me, wait_stage(&me->all[i], 1), "rank %d did not detach", i);
        zr_rendezvous_report(h.w.m.r, ZERO_ERR_NOMEM, "no memory for 7 apples");
        zr_topology_free(&hosts);
        return;
    }
    uv_timer_init(&h.w.m.loop, &h.w.stop);
    h.w.stop.data = &h.w;
    uv_timer_start(&h.w.stop, time_over, LONG_MS, 0);
    uv_run(&h.w.m.loop, UV_RUN_DEFAULT);
    zr_rendezvous_free(h.w.m.r);
    RANK_CHECK(me, uv_loop_close(&h.w.m.loop) == 0, "handles are left");
    zr_topology_free(&hosts);
    RANK_CHECK(me, h.n_heard == 1 && h.code == ZERO_ERR_NOMEM && !strcmp(h.text, "no memory for 7 apples"),
               "%d failures were heard, code %d: \"%s\"", h.n_heard, h.code, h.text);
}

static void test_exit_after_a_failure(void **state)
{
    for (int victim = 0; victim < 3; victim++)
        run_ranks(true, 3, exit_after_a_failure, &victim, NULL);
}

/* All ranks close at once while messages are under way. No message is lost and nothing leaks. */
static void close_at_once(struct rank *me)
{
    struct meeting m;
    RANK_CHECK(me, meet(&m, &me->w, LONG_MS) == 0, "%s", zr_error_text());
    zr_rendezvous_free(m.r); /* closes the rendezvous too */
    RANK_CHECK(me, uv_loop_close(&m.loop) == 0, "handles are left");
}

static void test_close_at_once(void **state)
{
    for (int i = 0; i < 5; i++)
        run_ranks(false, 5, close_at_once, NULL, NULL);
}

int main(void)
{
    if (!can_meet())
        return 77; /* skipped */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_death_while_meeting),
        cmocka_unit_test(test_death_in_exchange),
        cmocka_unit_test(test_death_after_hello),
        cmocka_unit_test(test_write_to_the_dead),
        cmocka_unit_test(test_leaving_early),
        cmocka_unit_test(test_failing_rank),
        cmocka_unit_test(test_sizes_differ),
        cmocka_unit_test(test_exchange_timeout),
        cmocka_unit_test(test_death_after_detach),
        cmocka_unit_test(test_goodbye_is_no_death),
        cmocka_unit_test(test_death_of_a_parent),
        cmocka_unit_test(test_close_at_once),
        cmocka_unit_test(test_failure_after_detach),
        cmocka_unit_test(test_exit_after_a_failure),
        cmocka_unit_test(test_look),
        cmocka_unit_test(test_last_call_of_other_hosts),
    };
    return cmocka_run_group_tests_name("rendezvous, ranks that are lost", tests, NULL, NULL);
}
