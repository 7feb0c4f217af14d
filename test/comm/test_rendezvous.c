/* test_rendezvous.c: ranks meet, exchange and part; strangers, wrong ranks and deaths at every stage. */
#include "comm/link.h"
#include "test/comm/meeting.h"
#include "test/held_port.h"

#include <netdb.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

enum { LONG_MS = 30000, SHORT_MS = 1500 };

/* --- everyone comes --- */

static void meet_and_exchange(struct rank *me)
{
    struct meeting m;
    if (me->w.rank % 3 == 0)
        sleep_ms(40); /* rank 0 is not the first */
    RANK_CHECK(me, meet(&m, &me->w, LONG_MS) == 0, "%s", zr_error_text());
    RANK_CHECK(me, zr_rendezvous_rank(m.r) == me->w.rank && zr_rendezvous_world(m.r) == me->w.world,
               "other numbers");
    /* From one byte to more than the sockets hold. */
    const size_t sizes[] = {1, 7, 4096, me->w.world == 5 ? 2000000 : 50000, 64};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        size_t n = sizes[k];
        unsigned char *mine = malloc(n), *all = malloc(n * (size_t)me->w.world);
        for (size_t i = 0; i < n; i++)
            mine[i] = (unsigned char)(i * 7 + (size_t)me->w.rank * 31 + k);
        memset(all, 0xff, n * (size_t)me->w.world);
        int err = zr_rendezvous_exchange(m.r, mine, n, all);
        size_t bad = 0;
        for (int p = 0; p < me->w.world; p++)
            for (size_t i = 0; i < n; i++)
                bad += all[(size_t)p * n + i] != (unsigned char)(i * 7 + (size_t)p * 31 + k);
        free(mine);
        free(all);
        RANK_CHECK(me, err == 0, "%s", zr_error_text());
        RANK_CHECK(me, bad == 0, "%zu bytes of %zu differ", bad, n);
        if (me->w.rank == 0 && k == 3)
            sleep_ms(50); /* its loop does not run now; the others must have their results all the same */
    }
    char c = 0, all[MOST_RANKS];
    RANK_CHECK(me, zr_rendezvous_exchange(m.r, &c, 0, all) == ZR_ERR_ARG, "0 bytes");
    RANK_CHECK(me, part(&m), "handles are left");
}

static void test_meet(void **state)
{
    (void)state;
    static const int worlds[] = {1, 2, 3, 5, 8};
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++) {
        run_ranks(false, worlds[i], meet_and_exchange, NULL, NULL);
        run_ranks(true, worlds[i], meet_and_exchange, NULL, NULL);
    }
}

static void by_name(struct rank *r)
{
    strcpy(r->w.host, "localhost");
}

static void test_meet_by_name(void **state)
{
    (void)state;
    struct addrinfo *found = NULL;
    if (getaddrinfo("localhost", NULL, NULL, &found)) {
        print_message("this host does not know the name localhost\n");
        skip();
    }
    freeaddrinfo(found);
    run_ranks(false, 3, meet_and_exchange, NULL, by_name);
}

static void test_world_one_needs_no_socket(void **state)
{
    (void)state;
    struct meeting m;
    struct zr_world w = {.world = 1};
    int mine = 5, all = 0;
    assert_int_equal(meet(&m, &w, 1), 0);
    assert_int_equal(uv_loop_alive(&m.loop), 0);
    assert_int_equal(zr_rendezvous_exchange(m.r, &mine, sizeof mine, &all), 0);
    assert_int_equal(all, 5);
    zr_rendezvous_detach(m.r, NULL, NULL);
    assert_int_equal(zr_rendezvous_exchange(m.r, &mine, sizeof mine, &all), ZR_ERR_ORDER);
    assert_true(part(&m));
    zr_rendezvous_free(NULL);
}

static void refuse_to_meet(const struct zr_world *w, int64_t timeout_ms, const char *text)
{
    struct meeting m;
    assert_int_equal(meet(&m, w, timeout_ms), ZR_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), text));
    assert_null(m.r);
    assert_int_equal(uv_loop_close(&m.loop), 0);
}

static void test_bad_arguments(void **state)
{
    (void)state;
    struct zr_world w = {.rank = 3, .world = 3, .host = "127.0.0.1", .port = 1};
    refuse_to_meet(&w, 1000, "rank is 3");
    w.rank = 1;
    w.port = 0;
    refuse_to_meet(&w, 1000, "port 0");
    w.port = 1;
    refuse_to_meet(&w, 0, "timeout_ms is 0");
}

static void test_port_taken(void **state)
{
    (void)state;
    struct zr_world w = {.rank = 0, .world = 2, .host = "127.0.0.1", .port = held_port()};
    int fd = listen_at(w.port);
    assert_true(fd >= 0);
    struct meeting m;
    assert_int_equal(meet(&m, &w, SHORT_MS), ZR_ERR_SYSTEM);
    char port[16];
    snprintf(port, sizeof port, ":%d:", w.port);
    assert_non_null(strstr(zr_error_text(), port));
    assert_int_equal(uv_loop_close(&m.loop), 0);
    close(fd);
}

/* --- not everyone comes --- */

static void open_and_note(struct rank *me)
{
    struct meeting m;
    int64_t timeout_ms = me->arg ? *(int64_t *)me->arg : LONG_MS;
    note_error(me, meet(&m, &me->w, timeout_ms));
    RANK_CHECK(me, !me->code == !!m.r, "code %d with %p", me->code, (void *)m.r);
    RANK_CHECK(me, part(&m), "handles are left");
}

static void all_but_last(struct rank *me)
{
    if (me->w.rank < me->w.world - 1)
        open_and_note(me);
}

static void test_missing_rank(void **state)
{
    (void)state;
    int64_t timeout_ms = SHORT_MS;
    struct rank *r = run_ranks(true, 4, all_but_last, &timeout_ms, NULL);
    for (int i = 0; i < 3; i++)
        expect_rank(&r[i], ZR_ERR_TIMEOUT, "1 of 4 ranks did not come");
    for (int i = 0; i < 3; i++)
        expect_rank(&r[i], ZR_ERR_TIMEOUT, "rank 3");
}

static void all_but_first(struct rank *me)
{
    if (me->w.rank > 0)
        open_and_note(me);
}

static void test_missing_rank_0(void **state)
{
    (void)state;
    int64_t timeout_ms = SHORT_MS;
    struct rank *r = run_ranks(false, 3, all_but_first, &timeout_ms, NULL);
    for (int i = 1; i < 3; i++)
        expect_rank(&r[i], ZR_ERR_TIMEOUT, "connection refused: rank 0 has not started, or has given up");
}

static void no_such_name(struct rank *r)
{
    strcpy(r->w.host, "no-such-host.invalid");
}

static void test_no_such_name(void **state)
{
    (void)state;
    int64_t timeout_ms = SHORT_MS;
    struct rank *r = run_ranks(false, 2, all_but_first, &timeout_ms, no_such_name);
    expect_rank(&r[1], ZR_ERR_TIMEOUT, "no-such-host.invalid");
}

static void twin(struct rank *r)
{
    if (r->w.rank == 2)
        r->w.rank = 1;
}

static void test_duplicate_rank(void **state)
{
    (void)state;
    struct rank *r = run_ranks(true, 3, open_and_note, NULL, twin);
    for (int i = 0; i < 3; i++)
        expect_rank(&r[i], ZR_ERR_MISMATCH, "rank 1 is there twice");
}

/* The last comes when the meeting has already failed, and learns why. */
static void last_comes_late(struct rank *me)
{
    if (me->w.rank == me->w.world - 1)
        RANK_CHECK(me, wait_stage(&me->all[2], 1), "the second rank 1 never ended");
    open_and_note(me);
    atomic_store(&me->stage, 1);
}

static void test_late_rank(void **state)
{
    (void)state;
    struct rank *r = run_ranks(true, 5, last_comes_late, NULL, twin);
    for (int i = 0; i < 5; i++)
        expect_rank(&r[i], ZR_ERR_MISMATCH, "rank 1 is there twice");
    expect_rank(&r[4], ZR_ERR_MISMATCH, "rank 4 came when the others had given up");
}

static void other_world(struct rank *r)
{
    if (r->w.rank == 1)
        r->w.world = 4;
}

static void test_other_world(void **state)
{
    (void)state;
    struct rank *r = run_ranks(false, 2, open_and_note, NULL, other_world);
    for (int i = 0; i < 2; i++)
        expect_rank(&r[i], ZR_ERR_MISMATCH, "has world 4, rank 0 has world 2");
}

static void other_job(struct rank *r)
{
    if (r->w.rank == 2) {
        strcpy(r->w.job, "yesterday's");
        r->w.rank = 1;
    }
    r->w.world = 2;
}

static void open_after_refusal(struct rank *me)
{
    /* The right rank 1 comes when the wrong one has gone. */
    if (me == &me->all[1])
        RANK_CHECK(me, wait_stage(&me->all[2], 1), "the wrong rank never ended");
    open_and_note(me);
    atomic_store(&me->stage, 1);
}

/* A rank of another job is refused, and the job goes on without it. */
static void test_other_job(void **state)
{
    (void)state;
    struct rank *r = run_ranks(true, 3, open_after_refusal, NULL, other_job);
    expect_rank(&r[0], 0, "");
    expect_rank(&r[1], 0, "");
    expect_rank(&r[2], ZR_ERR_MISMATCH, "belongs to job \"yesterday's\"");
}

/* --- strangers --- */

/* Rank 1 of 2, after all kinds of others came to its place. */
static void after_strangers(struct rank *me)
{
    if (me->w.rank == 0) {
        meet_and_exchange(me);
        return;
    }
    int fds[200], n = 0;
    /* Says nothing, and more of that kind than rank 0 keeps. */
    for (int i = 0; i < 150; i++)
        fds[n++] = dial(me->w.port);
    /* A web browser; a frame cut in the middle; a hello that claims a gigabyte; one of another job, version,
     * type. */
    struct zr_frame hello = hello_of(me, 1, 2);
    struct zr_frame bad[6];
    for (int i = 0; i < 6; i++)
        bad[i] = hello;
    bad[0].n_bytes = 1 << 30;
    bad[1].job++;
    bad[2].version = 77;
    bad[3].type = ZR_FRAME_GIVE;
    bad[4].type = ZR_FRAME_GOODBYE;
    bad[5].magic ^= 1;
    const char web[] = "GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n";
    bool sent = true;
    fds[n++] = dial(me->w.port);
    sent &= send(fds[n - 1], web, sizeof web, MSG_NOSIGNAL) > 0;
    fds[n++] = dial(me->w.port);
    sent &= send(fds[n - 1], &hello, 11, MSG_NOSIGNAL) == 11;
    for (int i = 0; i < 6; i++) {
        fds[n++] = dial(me->w.port);
        sent &= send(fds[n - 1], &bad[i], sizeof bad[i], MSG_NOSIGNAL) > 0;
    }
    close(fds[0]);
    /* The one of another version and job are told why. */
    struct zr_frame answer[2] = {{0}};
    char text[2][512] = {{0}};
    for (int k = 0; k < 2; k++) {
        int fd = fds[n - 5 + k];
        if (recv(fd, &answer[k], sizeof answer[k], MSG_WAITALL) == (ssize_t)sizeof answer[k] &&
            answer[k].n_bytes < 512)
            recv(fd, text[k], answer[k].n_bytes, MSG_WAITALL);
    }
    RANK_CHECK(me, sent, "a stranger could not speak");
    RANK_CHECK(me, answer[0].type == ZR_FRAME_REFUSE && strstr(text[0], "job"), "type %d \"%s\"",
               answer[0].type, text[0]);
    RANK_CHECK(me, answer[1].type == ZR_FRAME_REFUSE && strstr(text[1], "version 77"), "type %d \"%s\"",
               answer[1].type, text[1]);
    meet_and_exchange(me);
    for (int i = 1; i < n; i++)
        close(fds[i]);
}

static void test_strangers(void **state)
{
    (void)state;
    run_ranks(true, 2, after_strangers, NULL, NULL);
    run_ranks(false, 2, after_strangers, NULL, NULL);
}

/* What listens at rank 0's place speaks something else, and may say it once only. */
struct impostor {
    int fd;
    const char *says;
    bool once;
};

static void *impostor(void *arg)
{
    const struct impostor *p = arg;
    int kept[1000], n_kept = 0;
    for (bool first = true;; first = false) {
        int c = accept(p->fd, NULL, NULL);
        if (c < 0)
            break;
        if (first || !p->once) {
            (void)!send(c, p->says, strlen(p->says), MSG_NOSIGNAL);
            close(c);
        } else if (n_kept < 1000) {
            kept[n_kept++] = c;
        } else {
            close(c);
        }
    }
    while (n_kept > 0)
        close(kept[--n_kept]);
    return NULL;
}

static void meet_impostor(const char *says, bool once)
{
    struct zr_world w = {.rank = 1, .world = 2, .host = "127.0.0.1", .port = held_port()};
    int fd = listen_at(w.port);
    assert_true(fd >= 0);
    pthread_t id;
    struct impostor p = {fd, says, once};
    pthread_create(&id, NULL, impostor, &p);
    struct meeting m;
    assert_int_equal(meet(&m, &w, SHORT_MS), ZR_ERR_TIMEOUT);
    if (!strstr(zr_error_text(), "does not speak this protocol"))
        fail_msg("\"%s\"%s: %s", says, once ? " once" : "", zr_error_text());
    assert_int_equal(uv_loop_close(&m.loop), 0);
    shutdown(fd, SHUT_RDWR);
    pthread_join(id, NULL);
    close(fd);
}

static void test_impostor(void **state)
{
    (void)state;
    meet_impostor("SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n", false);
    meet_impostor("220 ready\r\n", false); /* less than a frame */
    meet_impostor("220 ready\r\n", true);  /* silence later does not hide what was heard */
}

/* --- ranks that go --- */

/* The last rank dies while the others meet: it says hello by hand, rank 1 never comes. */
static void die_while_meeting(struct rank *me)
{
    if (me->w.rank == 0) {
        open_and_note(me);
    } else if (me->w.rank == 2) {
        struct zr_frame hello = hello_of(me, 2, 4);
        int fd = dial(me->w.port);
        (void)!send(fd, &hello, sizeof hello, MSG_NOSIGNAL);
        (void)!recv(fd, &hello, sizeof hello, MSG_WAITALL);
        kill(getpid(), SIGKILL);
    }
}

static void rank_2_dies(struct rank *r)
{
    r->dies = r->w.rank == 2;
}

static void test_death_while_meeting(void **state)
{
    (void)state;
    struct rank *r = run_ranks(true, 4, die_while_meeting, NULL, rank_2_dies);
    expect_rank(&r[0], ZR_ERR_PEER, "rank 2 was lost while ranks met");
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
    (void)state;
    struct rank *r = run_ranks(true, 4, die_in_exchange, NULL, rank_2_dies);
    for (int i = 0; i < 4; i++)
        if (i != 2)
            expect_rank(&r[i], ZR_ERR_PEER, "rank 2 was lost");
    r = run_ranks(true, 4, die_in_exchange, NULL, rank_0_dies);
    for (int i = 1; i < 4; i++)
        expect_rank(&r[i], ZR_ERR_PEER, "rank 0 was lost");
}

/* Rank 1 says hello and is gone before rank 0 has read it: the others learn of it, at once or in the first
 * exchange. */
static void die_after_hello(struct rank *me)
{
    if (me->w.rank == 1) {
        struct zr_frame hello = hello_of(me, 1, 3);
        int fd = dial(me->w.port);
        (void)!send(fd, &hello, sizeof hello, MSG_NOSIGNAL);
        close(fd);
        return;
    }
    struct meeting m;
    int64_t timeout_ms = me->w.rank == 0 ? LONG_MS : 2000; /* rank 2 may find nobody any more */
    note_error(me, meet(&m, &me->w, timeout_ms));
    if (!me->code)
        note_error(me, exchange_ranks(&m));
    RANK_CHECK(me, part(&m), "handles are left");
}

static void test_death_after_hello(void **state)
{
    (void)state;
    struct rank *r = run_ranks(true, 3, die_after_hello, NULL, NULL);
    expect_rank(&r[0], ZR_ERR_PEER, "rank 1 was lost");
    assert_int_not_equal(r[2].code, 0);
}

/* Writing to a connection whose other end is gone must not end the process, and must leave its signals as
 * they were. */
static void on_connect(struct zr_link *l, int status)
{
    *(int *)l->owner = status;
}

static void on_frame(struct zr_link *l, const struct zr_frame *f, const void *payload)
{
    (void)l, (void)f, (void)payload;
}

static void on_end(struct zr_link *l, int code, const char *why)
{
    (void)l, (void)code, (void)why;
}

static void on_closed(struct zr_link *l)
{
    (void)l;
}

static void write_to_the_dead(struct rank *me)
{
    static const struct zr_link_calls calls = {on_connect, on_frame, on_end, on_closed};
    struct sockaddr_in a = loopback(me->w.port);
    int server = listen_at(me->w.port), connected = 1;
    RANK_CHECK(me, server >= 0, "no server");
    uv_loop_t loop;
    uv_loop_init(&loop);
    struct zr_link *l = zr_link_new(&loop, &calls, &connected, 64);
    RANK_CHECK(me, l && zr_link_connect(l, &a) == 0, "no connection");
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
    (void)state;
    run_ranks(true, 1, write_to_the_dead, NULL, NULL);
}

/* One rank gives up and leaves in good order while the others exchange. */
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
    (void)state;
    for (int who = 0; who < 3; who++) {
        char text[32];
        snprintf(text, sizeof text, "rank %d left", who);
        struct rank *r = run_ranks(false, 3, leave_early, &who, NULL);
        for (int i = 0; i < 3; i++)
            if (i != who)
                expect_rank(&r[i], ZR_ERR_PEER, text);
    }
}

/* One rank cannot go on: the others, on their way to an exchange or in it, learn why. */
static void fail_instead(struct rank *me)
{
    struct meeting m;
    RANK_CHECK(me, meet(&m, &me->w, LONG_MS) == 0, "%s", zr_error_text());
    RANK_CHECK(me, exchange_ranks(&m) == 0, "%s", zr_error_text());
    if (me->w.rank == *(int *)me->arg) {
        zr_fail(ZR_ERR_NOMEM, "no memory for %d apples", 7);
        RANK_CHECK(me, zr_rendezvous_fail(m.r, ZR_ERR_NOMEM) == ZR_ERR_NOMEM, "another code");
        RANK_CHECK(me, strcmp(zr_error_text(), "no memory for 7 apples") == 0, "%s", zr_error_text());
    } else if (me->w.rank == 2) {
        sleep_ms(30);
    }
    note_error(me, exchange_ranks(&m));
    RANK_CHECK(me, part(&m), "handles are left");
}

static void test_failing_rank(void **state)
{
    (void)state;
    for (int who = 0; who < 3; who++) {
        char text[64];
        snprintf(text, sizeof text, "rank %d: no memory for 7 apples", who);
        struct rank *r = run_ranks(false, 4, fail_instead, &who, NULL);
        for (int i = 0; i < 4; i++)
            expect_rank(&r[i], ZR_ERR_NOMEM, text);
    }
}

static void differ_in_size(struct rank *me)
{
    struct meeting m;
    char mine[32] = {0}, all[32 * MOST_RANKS];
    RANK_CHECK(me, meet(&m, &me->w, LONG_MS) == 0, "%s", zr_error_text());
    note_error(me, zr_rendezvous_exchange(m.r, mine, me->w.rank == 1 ? 12 : 16, all));
    RANK_CHECK(me, part(&m), "handles are left");
}

static void test_sizes_differ(void **state)
{
    (void)state;
    struct rank *r = run_ranks(true, 3, differ_in_size, NULL, NULL);
    for (int i = 0; i < 3; i++)
        expect_rank(&r[i], ZR_ERR_MISMATCH, "rank 1 gives 12 bytes, rank 0 gives 16");
}

static void skip_exchange(struct rank *me)
{
    struct meeting m;
    RANK_CHECK(me, meet(&m, &me->w, SHORT_MS) == 0, "%s", zr_error_text());
    if (me->w.rank != *(int *)me->arg) {
        note_error(me, exchange_ranks(&m));
        atomic_store(&me->stage, 1);
    } else {
        for (int i = 0; i < me->w.world; i++)
            RANK_CHECK(me, i == me->w.rank || wait_stage(&me->all[i], 1), "rank %d waits for ever", i);
    }
    RANK_CHECK(me, part(&m), "handles are left");
}

static void test_exchange_timeout(void **state)
{
    (void)state;
    int who = 2;
    struct rank *r = run_ranks(false, 3, skip_exchange, &who, NULL);
    expect_rank(&r[0], ZR_ERR_TIMEOUT, "1 of 3 ranks did not come");
    expect_rank(&r[1], ZR_ERR_TIMEOUT, "rank 2");
    who = 0;
    r = run_ranks(false, 3, skip_exchange, &who, NULL);
    expect_rank(&r[1], ZR_ERR_TIMEOUT, "for rank 0");
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
    (void)h;
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
        stop(w); /* closing inside the callback must be fine */
}

static void time_over(uv_timer_t *t)
{
    stop(t->data);
}

/* Watches until a loss or for run_ms; rank *arg leaves at once: by a signal if it dies, else with a goodbye.
 */
static void watch(struct rank *me)
{
    struct watch w = {.me = me};
    bool goes = me->w.rank == *(int *)me->arg;
    bool someone_dies = false;
    for (int i = 0; i < me->w.world; i++)
        someone_dies |= me->all[i].dies;
    RANK_CHECK(me, meet(&w.m, &me->w, LONG_MS) == 0, "%s", zr_error_text());
    RANK_CHECK(me, exchange_ranks(&w.m) == 0, "%s", zr_error_text());
    me->code = -1;
    if (goes && me->dies)
        kill(getpid(), SIGKILL);
    sleep_ms(me->w.rank * 10); /* deaths are seen before or after the detach */
    uv_timer_init(&w.m.loop, &w.stop);
    w.stop.data = &w;
    uv_timer_start(&w.stop, time_over, someone_dies ? LONG_MS : goes ? 0 : 200, 0);
    zr_rendezvous_detach(w.m.r, note_lost, &w);
    uv_run(&w.m.loop, UV_RUN_DEFAULT);
    zr_rendezvous_free(w.m.r);
    RANK_CHECK(me, uv_loop_close(&w.m.loop) == 0, "handles are left");
    RANK_CHECK(me, w.n_lost == (someone_dies ? 1 : 0), "%d losses were told, the last: rank %d, %s", w.n_lost,
               me->code, me->note);
}

static void test_death_after_detach(void **state)
{
    (void)state;
    int who = 2;
    struct rank *r = run_ranks(true, 4, watch, &who, rank_2_dies);
    for (int i = 0; i < 4; i++)
        if (i != 2)
            expect_rank(&r[i], 2, "connection");
    who = 0;
    r = run_ranks(true, 3, watch, &who, rank_0_dies);
    for (int i = 1; i < 3; i++)
        expect_rank(&r[i], 0, "connection");
}

static void test_goodbye_is_no_death(void **state)
{
    (void)state;
    for (int who = 0; who < 3; who++)
        run_ranks(false, 3, watch, &who, NULL);
}

/* Everyone closes at once, with messages still under way: nothing is lost and nothing leaks. */
static void close_at_once(struct rank *me)
{
    struct meeting m;
    RANK_CHECK(me, meet(&m, &me->w, LONG_MS) == 0, "%s", zr_error_text());
    zr_rendezvous_free(m.r); /* closes by itself */
    RANK_CHECK(me, uv_loop_close(&m.loop) == 0, "handles are left");
}

static void test_close_at_once(void **state)
{
    (void)state;
    for (int i = 0; i < 5; i++)
        run_ranks(false, 5, close_at_once, NULL, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_meet),
        cmocka_unit_test(test_world_one_needs_no_socket),
        cmocka_unit_test(test_bad_arguments),
        cmocka_unit_test(test_port_taken),
        cmocka_unit_test(test_missing_rank),
        cmocka_unit_test(test_missing_rank_0),
        cmocka_unit_test(test_duplicate_rank),
        cmocka_unit_test(test_late_rank),
        cmocka_unit_test(test_other_world),
        cmocka_unit_test(test_other_job),
        cmocka_unit_test(test_strangers),
        cmocka_unit_test(test_impostor),
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
        cmocka_unit_test(test_close_at_once),
        /* libuv's threads look names up: nothing is forked after these */
        cmocka_unit_test(test_meet_by_name),
        cmocka_unit_test(test_no_such_name),
    };
    return cmocka_run_group_tests_name("rendezvous", tests, NULL, NULL);
}
