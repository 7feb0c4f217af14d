/* SPDX-License-Identifier: Apache-2.0 */
/* test_rendezvous.c: tests that ranks meet or fail together: unidentified connections, ranks of other
 * jobs, and impostors. */
#include "kernels/device.h"
#include "kernels/log.h"
#include "test/cmocka.h"
#include "test/comm/meet/meeting.h"
#include "test/held_port.h"

#include <netdb.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* --- everyone comes --- */

static void meet_and_exchange(struct rank *me)
{
    struct meeting m;
    if (me->w.rank % 3 == 0)
        sleep_ms(40); /* rank 0 is not the first */
    RANK_CHECK(me, meet(&m, &me->w, LONG_MS) == 0, "%s", zr_error_text());
    RANK_CHECK(me, zr_rendezvous_rank(m.r) == me->w.rank && zr_rendezvous_world(m.r) == me->w.world,
               "different numbers");
    /* From one byte to more than the sockets' buffers hold. */
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
            sleep_ms(50); /* this rank's loop stands still; the others must get their results anyway */
    }
    char c = 0, all[MAX_RANKS];
    RANK_CHECK(me, zr_rendezvous_exchange(m.r, &c, 0, all) == ZERO_ERR_ARG, "0 bytes");
    RANK_CHECK(me, part(&m), "handles are left");
}

static void test_meet(void **state)
{
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
    struct meeting m;
    struct zr_world w = {.world = 1};
    int mine = 5, all = 0;
    assert_int_equal(meet(&m, &w, 1), 0);
    assert_int_equal(uv_loop_alive(&m.loop), 0);
    assert_int_equal(zr_rendezvous_exchange(m.r, &mine, sizeof mine, &all), 0);
    assert_int_equal(all, 5);
    zr_rendezvous_detach(m.r, NULL, NULL, NULL);
    assert_int_equal(zr_rendezvous_exchange(m.r, &mine, sizeof mine, &all), ZERO_ERR_ORDER);
    assert_true(part(&m));
    zr_rendezvous_free(NULL);
}

static void refuse_to_meet(const struct zr_world *w, int64_t timeout_ms, const char *text)
{
    struct meeting m;
    assert_int_equal(meet(&m, w, timeout_ms), ZERO_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), text));
    assert_null(m.r);
    assert_int_equal(uv_loop_close(&m.loop), 0);
}

static void test_bad_arguments(void **state)
{
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
    struct zr_world w = {.rank = 0, .world = 2, .port = held_port()};
    strcpy(w.host, meeting_host());
    int fd = listen_at(w.port);
    assert_true(fd >= 0);
    struct meeting m;
    assert_int_equal(meet(&m, &w, SHORT_MS), ZERO_ERR_SYSTEM);
    char port[64];
    snprintf(port, sizeof port, ":%d (lo): address already in use", w.port);
    assert_non_null(strstr(zr_error_text(), port));
    assert_int_equal(uv_loop_close(&m.loop), 0);
    close(fd);
}

/* --- a rank does not come --- */

/* They have little time, so they start together. */
static void all_but_last(struct rank *me)
{
    RANK_CHECK(me, all_at(me, 1), "a rank has not started");
    if (me->w.rank < me->w.world - 1)
        open_and_note(me);
}

static void test_missing_rank(void **state)
{
    int64_t timeout_ms = SHORT_MS;
    struct rank *r = run_ranks(true, 4, all_but_last, &timeout_ms, NULL);
    for (int i = 0; i < 3; i++)
        expect_rank(&r[i], ZERO_ERR_TIMEOUT, "1 of 4 ranks did not come");
    for (int i = 0; i < 3; i++)
        expect_rank(&r[i], ZERO_ERR_TIMEOUT, "rank 3");
}

/* All ranks that wait are stopped when their time ends, as on a machine that stands still. Rank 0 goes on
 * last. The others must still wait for what it knows. The rank that does not come stops them. */
static void stopped_at_the_end(struct rank *me)
{
    int missing = me->w.world - 1;
    if (me->w.rank < missing) {
        atomic_store(&me->stage, (int)getpid());
        RANK_CHECK(me, wait_stage(&me->all[missing], 1), "the last rank has not started");
        open_and_note(me);
        return;
    }
    for (int i = 0; i < missing; i++)
        RANK_CHECK(me, wait_stage(&me->all[i], 1), "rank %d has not started", i);
    int64_t from_ns = zr_now_ns();
    atomic_store(&me->stage, 1);
    sleep_ms(SHORT_MS / 2);
    if ((zr_now_ns() - from_ns) / 1000000 > SHORT_MS * 3 / 4)
        return; /* the machine itself stood still, and their time may be over */
    for (int i = 0; i < missing; i++)
        kill((pid_t)atomic_load(&me->all[i].stage), SIGSTOP);
    sleep_ms(SHORT_MS);
    for (int i = missing - 1; i > 0; i--)
        kill((pid_t)atomic_load(&me->all[i].stage), SIGCONT);
    sleep_ms(50);
    kill((pid_t)atomic_load(&me->all[0].stage), SIGCONT);
}

static void test_stopped_at_the_end(void **state)
{
    int64_t timeout_ms = SHORT_MS;
    struct rank *r = run_ranks(true, 4, stopped_at_the_end, &timeout_ms, NULL);
    for (int i = 0; i < 3; i++)
        expect_rank(&r[i], ZERO_ERR_TIMEOUT, "1 of 4 ranks did not come");
}

/* --- messages about a wait --- */

static void count_reminders(void *arg, const char *line)
{
    char *last = arg;
    if (strstr(line, "zero_wrap still waits: "))
        snprintf(last, sizeof((struct rank *)0)->note, "%s", line);
}

/* How rank 1 has ended: not yet, before zero_wrap or in it. */
enum ending { NOT_ENDED, ENDED_BEFORE, ENDED_INSIDE };

static bool has_rank_1_ended(void *arg, int rank, bool *has_begun, char *how, size_t n_how)
{
    const enum ending *e = arg;
    *has_begun = *e == ENDED_INSIDE;
    snprintf(how, n_how, "its program returned 7");
    return *e != NOT_ENDED && rank == 1;
}

/* Rank 1 never comes. */
static void wait_with_a_log(struct rank *me)
{
    struct meeting m;
    char last[sizeof me->note] = "";
    struct zr_log *log;
    enum ending ended = *(enum ending *)me->arg;
    if (me->w.rank == 1)
        return;
    RANK_CHECK(me, zr_log_open(count_reminders, last, NULL, &log) == 0, "%s", zr_error_text());
    const struct zr_waiting waiting = {
        .log = log, .remind_ms = 100, .has_ended = has_rank_1_ended, .arg = &ended};
    me->w.waiting = &waiting;
    note_error(me, meet(&m, &me->w, ended ? LONG_MS : SHORT_MS));
    RANK_CHECK(me, part(&m), "handles are left");
    zr_log_close(log);
    if (me->w.rank == 0 && !ended) {
        RANK_CHECK(me, strstr(last, "1 of 3 ranks did not come to ") && strstr(last, " ms: rank 1"), "\"%s\"",
                   last);
        RANK_CHECK(me, strstr(last, "; it gives up after 1500 ms (start_timeout_ms)"), "\"%s\"", last);
    }
}

static void test_waiting(void **state)
{
    enum ending ended = NOT_ENDED;
    struct rank *r = run_ranks(true, 3, wait_with_a_log, &ended, NULL);
    for (int i = 0; i < 3; i += 2)
        expect_rank(&r[i], ZERO_ERR_TIMEOUT, " in 1500 ms (start_timeout_ms): rank 1");
    for (ended = ENDED_BEFORE; ended <= ENDED_INSIDE; ended++) {
        r = run_ranks(true, 3, wait_with_a_log, &ended, NULL);
        for (int i = 0; i < 3; i += 2)
            expect_rank(&r[i], ZERO_ERR_PEER,
                        ended == ENDED_BEFORE
                            ? "rank 1 ended before it came to zero_wrap: its program returned 7"
                            : "rank 1 ended in zero_wrap: its program returned 7");
    }
}

static void all_but_first(struct rank *me)
{
    if (me->w.rank > 0)
        open_and_note(me);
}

static void port_of_own_job(struct rank *r)
{
    r->w.is_port_of_own_job = r->w.rank == 1;
}

static void test_missing_rank_0(void **state)
{
    int64_t timeout_ms = SHORT_MS;
    struct rank *r = run_ranks(false, 3, all_but_first, &timeout_ms, port_of_own_job);
    for (int i = 1; i < 3; i++)
        expect_rank(&r[i], ZERO_ERR_TIMEOUT, "connection refused: rank 0 has not started, or has given up");
    expect_rank(&r[1], ZERO_ERR_TIMEOUT,
                " (a port derived from ZERO_JOB: set it on all ranks or on none); last");
}

static void no_such_name(struct rank *r)
{
    strcpy(r->w.host, "no-such-host.invalid");
}

static void test_no_such_name(void **state)
{
    int64_t timeout_ms = SHORT_MS;
    struct rank *r = run_ranks(false, 2, all_but_first, &timeout_ms, no_such_name);
    expect_rank(&r[1], ZERO_ERR_TIMEOUT, "no-such-host.invalid");
}

static void twin(struct rank *r)
{
    if (r->w.rank == 2)
        r->w.rank = 1;
}

static void test_duplicate_rank(void **state)
{
    struct rank *r = run_ranks(true, 3, open_and_note, NULL, twin);
    for (int i = 0; i < 3; i++)
        expect_rank(&r[i], ZERO_ERR_MISMATCH, ": it was started twice, or two jobs meet at one place");
}

/* The last rank comes after the meeting has failed, and learns why. */
static void last_comes_late(struct rank *me)
{
    if (me->w.rank == me->w.world - 1)
        RANK_CHECK(me, wait_stage(&me->all[2], 1), "the second rank 1 never ended");
    open_and_note(me);
    atomic_store(&me->stage, 1);
}

static void test_late_rank(void **state)
{
    struct rank *r = run_ranks(true, 5, last_comes_late, NULL, twin);
    for (int i = 0; i < 5; i++)
        expect_rank(&r[i], ZERO_ERR_MISMATCH, "rank 1 is there twice");
    expect_rank(&r[4], ZERO_ERR_MISMATCH, "rank 4 came after the others had given up");
}

static void other_world(struct rank *r)
{
    if (r->w.rank == 1)
        r->w.world = 4;
}

static void test_other_world(void **state)
{
    struct rank *r = run_ranks(false, 2, open_and_note, NULL, other_world);
    for (int i = 0; i < 2; i++)
        expect_rank(&r[i], ZERO_ERR_MISMATCH, "has world 4, rank 0 has world 2");
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
    /* The right rank 1 comes after the wrong one has gone. */
    if (me == &me->all[1])
        RANK_CHECK(me, wait_stage(&me->all[2], 1), "the wrong rank never ended");
    open_and_note(me);
    atomic_store(&me->stage, 1);
}

/* A rank of another job is refused, and the job goes on without it. */
static void test_other_job(void **state)
{
    struct rank *r = run_ranks(true, 3, open_after_refusal, NULL, other_job);
    expect_rank(&r[0], 0, "");
    expect_rank(&r[1], 0, "");
    expect_rank(&r[2], ZERO_ERR_MISMATCH,
                "it refused this rank as a rank of another job, or one with another key");
}

static void other_key(struct rank *r)
{
    other_job(r);
    strcpy(r->w.job, "j");
    if (r == &r->all[2])
        r->w.key.bytes[r->w.key.n_bytes - 1]++;
}

static void no_key(struct rank *r)
{
    other_key(r);
    if (r == &r->all[2])
        r->w.key.n_bytes = 0;
}

/* The last rank gives the right job name, but has another key or none. */
static void test_other_key(void **state)
{
    struct rank *r = run_ranks(true, 3, open_after_refusal, NULL, other_key);
    expect_rank(&r[0], 0, "");
    expect_rank(&r[1], 0, "");
    expect_rank(&r[2], ZERO_ERR_MISMATCH, "ZERO_JOB_KEY and the job's name");
    r = run_ranks(true, 3, open_after_refusal, NULL, no_key);
    expect_rank(&r[1], 0, "");
    expect_rank(&r[2], ZERO_ERR_MISMATCH, "ZERO_JOB_KEY, which this rank does not have");
}

static void other_attempt(struct rank *r)
{
    other_key(r);
    r->w.key = r->all[0].w.key;
    r->w.attempt = r == &r->all[2] ? 1 : 2;
}

/* A rank left over from the previous attempt is refused with that reason, and the job goes on without it. */
static void test_other_attempt(void **state)
{
    struct rank *r = run_ranks(true, 3, open_after_refusal, NULL, other_attempt);
    expect_rank(&r[0], 0, "");
    expect_rank(&r[1], 0, "");
    expect_rank(&r[2], ZERO_ERR_MISMATCH, "is of attempt 1 of this job, rank 0 of attempt 2");
}

static void without_key(struct rank *r)
{
    r->w.key.n_bytes = 0;
}

static void elsewhere(struct rank *r)
{
    without_key(r);
    strcpy(r->w.host, "192.0.2.1"); /* an address reserved for documentation */
}

static void other_start(struct rank *r)
{
    other_attempt(r);
    r->w.attempt = 0;
    snprintf(r->w.start.job, sizeof r->w.start.job, "Slurm's job 7.%d", r == &r->all[2]);
}

static void other_part(struct rank *r)
{
    other_start(r);
    r->w.start = (struct zr_start){.rank = r == &r->all[2] ? 3 : r->w.rank, .world = 4};
}

/* Two jobs of a launcher have the same name, or two parts of one job the same meeting point. */
static void test_other_start(void **state)
{
    struct rank *r = run_ranks(true, 3, open_after_refusal, NULL, other_start);
    expect_rank(&r[0], 0, "");
    expect_rank(&r[1], 0, "");
    expect_rank(&r[2], ZERO_ERR_MISMATCH,
                "was started by Slurm's job 7.1, rank 0 by Slurm's job 7.0: if these are two jobs");
    r = run_ranks(true, 3, open_after_refusal, NULL, other_part);
    expect_rank(&r[0], 0, "");
    expect_rank(&r[1], 0, "");
    expect_rank(&r[2], ZERO_ERR_MISMATCH,
                "was started as rank 3 of 4, rank 0 as rank 0 of 4: they belong to two parts");
}

/* The launcher's numbers of the processes that are rank 0 and rank 1 here, and whether they can belong to
 * one part. */
static const struct part {
    int world, rank[2];
    bool is_one;
} parts[] = {
    {4, {2, 3}, true}, /* consecutive ranks */
    {4, {1, 3}, true}, /* every second rank */
    {5, {3, 4}, true}, /* consecutive ranks, where parts differ in size */
    {4, {3, 3}, true}, /* variables left over in one shell */
    {4, {2, 1}, false}, {4, {0, 3}, false}, {4, {1, 2}, false},
};

static void take_part(struct rank *r)
{
    const struct part *p = r->arg;
    r->w.start = (struct zr_start){.rank = p->rank[r->w.rank], .world = p->world};
}

static void meet_in_part(struct rank *me)
{
    const struct part *p = me->arg;
    struct meeting m;
    int err = meet(&m, &me->w, p->is_one ? LONG_MS : SHORT_MS / 3);
    RANK_CHECK(me, !err == p->is_one, "code %d: %s", err, zr_error_text());
    RANK_CHECK(me, part(&m), "handles are left");
}

static void test_parts(void **state)
{
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        run_ranks(true, 2, meet_in_part, (void *)&parts[i], take_part);
}

/* Without a key, ranks meet on loopback only. */
static void test_no_key(void **state)
{
    run_ranks(true, 3, meet_and_exchange, NULL, without_key);
    struct rank *r = run_ranks(true, 2, open_and_note, NULL, elsewhere);
    for (int i = 0; i < 2; i++)
        expect_rank(&r[i], ZERO_ERR_ARG, "set ZERO_JOB_KEY to the same 32 random hex digits on all ranks");
}

/* --- unidentified connections --- */

/* Rank 1 of 2 comes after many kinds of unidentified peers have connected to rank 0. */
static void after_unidentified(struct rank *me)
{
    if (me->w.rank == 0) {
        meet_and_exchange(me);
        return;
    }
    int fds[300], n = 0;
    /* Connects and sends nothing, more often than rank 0 keeps such connections. */
    for (int i = 0; i < 150; i++)
        fds[n++] = dial(me->w.port);
    /* Sends a web request, a frame cut in the middle, and a hello that claims a gigabyte. Then come hellos
     * with a wrong version, job, key or type, without a proof, and with another's proof. */
    const char web[] = "GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n";
    bool sent = true;
    fds[n++] = dial(me->w.port);
    sent &= send(fds[n - 1], web, sizeof web, MSG_NOSIGNAL) > 0;
    for (int i = 0; i < 9; i++) {
        struct zr_world w = me->w;
        struct zr_shake s;
        int fd = fds[n++] = dial(w.port);
        sent &= read_challenge(fd, &s);
        if (i == 4)
            strcpy(w.job, "yesterday's");
        if (i == 5)
            w.key.bytes[3] ^= 1;
        struct spoken_hello h = hello_of(&w, &s, 1, 2);
        h.frame.n_bytes = i == 1 ? 1u << 30 : h.frame.n_bytes;
        h.frame.version = i == 3 ? 77 : h.frame.version;
        h.frame.type = i == 2 ? ZR_FRAME_GIVE : i == 6 ? ZR_FRAME_GOODBYE : h.frame.type;
        h.frame.magic ^= i == 7;
        h.hello.proof[31] ^= i == 8;
        ssize_t bytes = i == 0 ? 11 : (ssize_t)sizeof h;
        sent &= send(fd, &h, (size_t)bytes, MSG_NOSIGNAL) == bytes;
        /* A peer that speaks the protocol is sent away, and hears nothing else. */
        struct zr_frame f;
        char text[64];
        if (i == 3 || i == 4 || i == 5 || i == 8)
            RANK_CHECK(me, read_frame(fd, &f, text, sizeof text) && f.type == ZR_FRAME_REFUSE && !f.n_bytes,
                       "unidentified connection %d reads type %d with %u bytes", i, f.type, f.n_bytes);
    }
    close(fds[0]);
    RANK_CHECK(me, sent, "an unidentified connection could not send");
    meet_and_exchange(me);
    for (int i = 1; i < n; i++)
        close(fds[i]);
}

static void test_unidentified_connections(void **state)
{
    run_ranks(true, 2, after_unidentified, NULL, NULL);
    run_ranks(false, 2, after_unidentified, NULL, NULL);
}

/* A listener at rank 0's place that speaks another protocol. It may say its greeting once only. */
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
    struct zr_world w = {.rank = 1, .world = 2, .port = held_port()};
    strcpy(w.host, meeting_host());
    int fd = listen_at(w.port);
    assert_true(fd >= 0);
    pthread_t id;
    struct impostor p = {fd, says, once};
    pthread_create(&id, NULL, impostor, &p);
    struct meeting m;
    assert_int_equal(meet(&m, &w, SHORT_MS), ZERO_ERR_TIMEOUT);
    if (!strstr(zr_error_text(), "does not speak this protocol"))
        fail_msg("\"%s\"%s: %s", says, once ? " once" : "", zr_error_text());
    assert_int_equal(uv_loop_close(&m.loop), 0);
    shutdown(fd, SHUT_RDWR);
    pthread_join(id, NULL);
    close(fd);
}

static void test_impostor(void **state)
{
    meet_impostor("SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n", false);
    meet_impostor("220 ready\r\n", false); /* less than a frame */
    meet_impostor("220 ready\r\n", true);  /* reported, though it comes only once */
}

int main(void)
{
    if (!can_meet())
        return 77; /* skipped */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_meet),
        cmocka_unit_test(test_world_one_needs_no_socket),
        cmocka_unit_test(test_bad_arguments),
        cmocka_unit_test(test_port_taken),
        cmocka_unit_test(test_missing_rank),
        cmocka_unit_test(test_stopped_at_the_end),
        cmocka_unit_test(test_waiting),
        cmocka_unit_test(test_missing_rank_0),
        cmocka_unit_test(test_duplicate_rank),
        cmocka_unit_test(test_late_rank),
        cmocka_unit_test(test_other_world),
        cmocka_unit_test(test_other_job),
        cmocka_unit_test(test_other_key),
        cmocka_unit_test(test_other_attempt),
        cmocka_unit_test(test_other_start),
        cmocka_unit_test(test_parts),
        cmocka_unit_test(test_no_key),
        cmocka_unit_test(test_unidentified_connections),
        cmocka_unit_test(test_impostor),
        /* These tests start libuv's resolver threads, so no later test may fork. */
        cmocka_unit_test(test_meet_by_name),
        cmocka_unit_test(test_no_such_name),
    };
    return cmocka_run_group_tests_name("rendezvous", tests, NULL, NULL);
}
