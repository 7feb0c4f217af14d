/* SPDX-License-Identifier: Apache-2.0 */
/* test_rendezvous_beat.c: tests peers that fall silent without closing their connection. A relay of the
 * test's own lies between rank 0 and some other ranks; it can hold all traffic, as a cut network does. */
#include "comm/topology.h"
#include "kernels/limits.h"
#include "test/cmocka.h"
#include "test/comm/meet/meeting.h"

#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* --- the relay --- */

enum { MAX_LINKS = 4 };

struct relay {
    pthread_t id;
    int listener, port, to_port;
    /* both ends of each connection; -1: it has ended */
    int fd[MAX_LINKS][2], n_links;
    atomic_bool held, stop;
    atomic_long n_bytes;
};

/* Returns false if this end has closed. */
static bool pass_on(struct relay *y, int from, int to)
{
    char bytes[4096];
    ssize_t n = recv(from, bytes, sizeof bytes, 0);
    if (n <= 0)
        return false;
    atomic_fetch_add(&y->n_bytes, n);
    return send(to, bytes, (size_t)n, MSG_NOSIGNAL) == n;
}

static void end_link(int fd[2])
{
    close(fd[0]);
    close(fd[1]);
    fd[0] = fd[1] = -1;
}

static void *run_relay(void *arg)
{
    struct relay *y = arg;
    while (!atomic_load(&y->stop)) {
        struct pollfd p[1 + 2 * MAX_LINKS] = {{.fd = y->listener, .events = POLLIN}};
        bool held = atomic_load(&y->held);
        for (int i = 0; i < 2 * y->n_links; i++)
            p[1 + i] = (struct pollfd){.fd = y->fd[i / 2][i % 2], .events = POLLIN};
        poll(p, held ? 1 : 1 + 2 * (nfds_t)y->n_links, 5);
        for (int i = 0; i < 2 * y->n_links && !held; i++)
            if (p[1 + i].revents && y->fd[i / 2][0] >= 0 &&
                !pass_on(y, y->fd[i / 2][i % 2], y->fd[i / 2][1 - i % 2]))
                end_link(y->fd[i / 2]);
        if (p[0].revents && y->n_links < MAX_LINKS) {
            y->fd[y->n_links][0] = accept(y->listener, NULL, NULL);
            y->fd[y->n_links++][1] = dial(y->to_port);
        }
    }
    for (int i = 0; i < y->n_links; i++)
        if (y->fd[i][0] >= 0)
            end_link(y->fd[i]);
    close(y->listener);
    return NULL;
}

static void start_relay(struct relay *y)
{
    union zr_address a = loopback(0);
    socklen_t n = sizeof a.v4;
    *y = (struct relay){.listener = socket(AF_INET, SOCK_STREAM, 0)};
    assert_int_equal(bind(y->listener, &a.any, n), 0);
    assert_int_equal(listen(y->listener, 8), 0);
    assert_int_equal(getsockname(y->listener, &a.any, &n), 0);
    y->port = zr_address_port(&a);
}

/* --- ranks that watch each other --- */

enum { FRAME = sizeof(struct zr_frame), FOR_GOOD = -1 };

struct trial {
    int world, ranks_per_host; /* ranks_per_host 0: hosts are not known */
    int first_relayed, n_relayed;
    int64_t timeout_ms, timeout_of_1_ms;
    int held_ms;          /* how long the relay holds traffic; or FOR_GOOD */
    int quiet_ms, stands; /* how long nothing happens; how long rank 0's loop stands still */
    bool beats;           /* heartbeats pass through the relay */
    struct relay relay;
    struct zr_topology hosts;
    atomic_bool over;
};

struct watch {
    struct rank *me;
    struct trial *t;
    struct meeting m;
    uv_timer_t timer;
    int n_lost, part;
    long n_bytes, n_stray;
    uint64_t since;
};

static void timer_closed(uv_handle_t *h)
{
}

static void stop(struct watch *w)
{
    if (!uv_is_closing((uv_handle_t *)&w->timer))
        uv_close((uv_handle_t *)&w->timer, timer_closed);
    zr_rendezvous_close(w->m.r);
}

static void on_lost(void *arg, int rank, const char *why)
{
    struct watch *w = arg;
    w->n_lost++;
    w->me->code = rank;
    snprintf(w->me->note, sizeof w->me->note, "%s", why);
    stop(w);
}

static void begin_part(struct watch *w, int part)
{
    w->part = part;
    w->n_bytes = atomic_load(&w->t->relay.n_bytes);
    w->since = uv_now(&w->m.loop);
}

/* Rank 0 directs the test: beats arrive, the relay holds them for a while, and then they arrive again. */
static void conduct(struct watch *w)
{
    struct trial *t = w->t;
    bool come = !t->beats || atomic_load(&t->relay.n_bytes) >= w->n_bytes + 4 * FRAME;
    int passed_ms = (int)(uv_now(&w->m.loop) - w->since);
    if (w->part == 0 && come) {
        if (t->stands)
            sleep_ms(t->stands);
        atomic_store(&t->relay.held, t->held_ms != 0);
        begin_part(w, 1);
    } else if (w->part == 1 && t->held_ms != FOR_GOOD && passed_ms >= t->held_ms) {
        atomic_store(&t->relay.held, false);
        begin_part(w, 2);
    } else if (w->part == 2 && come && passed_ms >= t->quiet_ms) {
        if (!t->beats)
            w->n_stray = atomic_load(&t->relay.n_bytes) - w->n_bytes;
        atomic_store(&t->over, true);
    }
}

static void on_timer(uv_timer_t *timer)
{
    struct watch *w = timer->data;
    if (w->me->w.rank == 0)
        conduct(w);
    if (atomic_load(&w->t->over))
        stop(w);
}

static void watch(struct rank *me)
{
    struct trial *t = me->arg;
    struct zr_sigpipe_hold hold; /* a context's loop thread does the same */
    zr_sigpipe_hold(&hold);
    struct watch w = {.me = me, .t = t};
    me->code = -1;
    RANK_CHECK(
        me,
        meet(&w.m, &me->w, me->w.rank == 1 && t->timeout_of_1_ms ? t->timeout_of_1_ms : t->timeout_ms) == 0,
        "%s", zr_error_text());
    RANK_CHECK(me, exchange_ranks(&w.m) == 0, "%s", zr_error_text());
    if (t->ranks_per_host)
        zr_rendezvous_hosts(w.m.r, &t->hosts);
    RANK_CHECK(me, exchange_ranks(&w.m) == 0, "%s", zr_error_text());
    uv_timer_init(&w.m.loop, &w.timer);
    w.timer.data = &w;
    uv_timer_start(&w.timer, on_timer, 10, 10);
    begin_part(&w, 0);
    zr_rendezvous_detach(w.m.r, on_lost, NULL, &w);
    uv_run(&w.m.loop, UV_RUN_DEFAULT);
    zr_rendezvous_free(w.m.r);
    RANK_CHECK(me, uv_loop_close(&w.m.loop) == 0, "handles are left");
    RANK_CHECK(me, w.n_stray == 0, "%ld bytes were sent", w.n_stray);
    RANK_CHECK(me, w.n_lost == (t->held_ms == FOR_GOOD), "%d losses were told, the last: rank %d, %s",
               w.n_lost, me->code, me->note);
}

static struct trial *now; /* for before() */

static void over_relay(struct rank *r)
{
    struct relay *y = &now->relay;
    y->to_port = r->all[0].w.port;
    if (r->w.rank >= now->first_relayed && r->w.rank < now->first_relayed + now->n_relayed)
        r->w.port = y->port;
}

static void start_at_last(struct rank *r)
{
    over_relay(r);
    if (r->w.rank == r->w.world - 1)
        assert_int_equal(pthread_create(&now->relay.id, NULL, run_relay, &now->relay), 0);
}

static struct rank *try(struct trial *t)
{
    now = t;
    start_relay(&t->relay);
    assert_int_equal(zr_topology_assume(t->world, t->ranks_per_host, &t->hosts), 0);
    for (int i = 0; i < t->hosts.n_hosts; i++)
        snprintf(t->hosts.hosts[i].name, sizeof t->hosts.hosts[i].name, "node%d", i);
    struct rank *r = run_ranks(false, t->world, watch, t, start_at_last);
    atomic_store(&t->relay.stop, true);
    pthread_join(t->relay.id, NULL);
    zr_topology_free(&t->hosts);
    return r;
}

static void test_silent_for_a_while(void **state)
{
    struct trial alone = {
        .world = 3, .first_relayed = 1, .n_relayed = 2, .timeout_ms = 4000, .held_ms = 400, .beats = true};
    try(&alone);
    struct trial hosts = alone;
    hosts.ranks_per_host = 1;
    try(&hosts);
}

static void test_silent_host(void **state)
{
    struct trial t = {.world = 4,
                      .ranks_per_host = 2,
                      .first_relayed = 2,
                      .n_relayed = 2,
                      .timeout_ms = 2000,
                      .held_ms = FOR_GOOD,
                      .beats = true};
    struct rank *r = try(&t);
    int first = r[0].code == 3 ? 3 : 2; /* both fall silent, and either may be noticed first */
    char text[96];
    snprintf(text, sizeof text, "host 1 (\"node1\", ranks 2, 3) is silent: no heartbeat from rank %d", first);
    for (int i = 0; i < 2; i++)
        expect_rank(&r[i], first, text);
    for (int i = 2; i < 4; i++)
        expect_rank(&r[i], 0, "host 0 (\"node0\", ranks 0, 1) is silent: no heartbeat from rank 0");
    for (int i = 0; i < 4; i++)
        expect_rank(&r[i], r[i].code, "one is due every 125 ms: its network is cut, or it is stopped");
    assert_string_equal(r[0].note, r[1].note);
}

static void test_silent_rank(void **state)
{
    struct trial t = {.world = 4,
                      .ranks_per_host = 2,
                      .first_relayed = 2,
                      .n_relayed = 1,
                      .timeout_ms = 2000,
                      .held_ms = FOR_GOOD,
                      .beats = true};
    struct rank *r = try(&t);
    expect_rank(&r[0], 2, "it is silent, unlike other ranks of host 1 (\"node1\", ranks 2, 3): no heartbeat");
    expect_rank(&r[1], 2, "it is silent, unlike other ranks of host 1");
    expect_rank(&r[2], 0, "host 0 (\"node0\", ranks 0, 1) is silent: no heartbeat from rank 0");
    expect_rank(&r[3], 2, "it is silent, unlike other ranks of host 1");
}

static void test_silent_of_unknown_host(void **state)
{
    struct trial t = {.world = 2,
                      .first_relayed = 1,
                      .n_relayed = 1,
                      .timeout_ms = 2000,
                      .held_ms = FOR_GOOD,
                      .beats = true};
    struct rank *r = try(&t);
    expect_rank(&r[0], 1, "it is silent: no heartbeat (127.0.0.1");
    expect_rank(&r[1], 0, "it is silent: no heartbeat (127.0.0.1");
}

/* Ranks of one host send no heartbeats to each other, and do not miss them. */
static void test_one_host(void **state)
{
    struct trial t = {.world = 3,
                      .ranks_per_host = 3,
                      .first_relayed = 1,
                      .n_relayed = 2,
                      .timeout_ms = 2000,
                      .held_ms = 2500,
                      .quiet_ms = 300};
    try(&t);
}

/* A loop that stood still, and therefore heard nobody, does not take the others for lost. */
static void test_own_loop_stands(void **state)
{
    struct trial t = {.world = 2,
                      .first_relayed = 1,
                      .n_relayed = 1,
                      .timeout_ms = 3000,
                      .timeout_of_1_ms = 10000,
                      .stands = 2600,
                      .quiet_ms = 300,
                      .beats = true};
    try(&t);
}

/* --- many ranks --- */

enum { MANY = 100, MAX_AT_A_TIME = 34, ROUNDS = 4 };

/* Rank 0's heartbeats: how many since the last tick, and the most of a tick; how many ticks; and which ranks
 * they went to. */
static struct {
    int n_now, n_most, n_ticks, n_sent;
    int to[(ROUNDS + 1) * MANY];
    atomic_bool over;
} sent;

int __real_zr_link_send(struct zr_link *l, struct zr_frame f, const void *payload, size_t n);
int __wrap_zr_link_send(struct zr_link *l, struct zr_frame f, const void *payload, size_t n);

int __wrap_zr_link_send(struct zr_link *l, struct zr_frame f, const void *payload, size_t n)
{
    if (f.type == ZR_FRAME_BEAT && f.rank == 0 && sent.n_sent < (int)(sizeof sent.to / sizeof *sent.to)) {
        sent.to[sent.n_sent++] = l->rank;
        sent.n_now++;
    }
    return __real_zr_link_send(l, f, payload, n);
}

/* Rank 0 is asked for its last call when a tick begins. */
static void note_tick(void *arg, int rank, char *text, size_t n_text)
{
    (void)arg, (void)rank, (void)n_text;
    text[0] = 0;
    sent.n_most = sent.n_now > sent.n_most ? sent.n_now : sent.n_most;
    sent.n_now = 0;
    sent.n_ticks++;
}

static void on_timer_of_many(uv_timer_t *timer)
{
    struct watch *w = timer->data;
    if (w->me->w.rank == 0 && sent.n_sent >= ROUNDS * (MANY - 1))
        atomic_store(&sent.over, true);
    if (atomic_load(&sent.over))
        stop(w);
}

static void watch_many(struct rank *me)
{
    struct watch w = {.me = me};
    struct zr_sigpipe_hold hold;
    zr_sigpipe_hold(&hold);
    RANK_CHECK(me, meet(&w.m, &me->w, LONG_MS) == 0, "%s", zr_error_text());
    zr_rendezvous_silence(w.m.r, 3000);
    if (me->w.rank == 0)
        zr_rendezvous_know(w.m.r, &(struct zr_known_ranks){.last_call = note_tick});
    uv_timer_init(&w.m.loop, &w.timer);
    w.timer.data = &w;
    uv_timer_start(&w.timer, on_timer_of_many, 10, 10);
    zr_rendezvous_detach(w.m.r, NULL, NULL, NULL);
    uv_run(&w.m.loop, UV_RUN_DEFAULT);
    zr_rendezvous_free(w.m.r);
    RANK_CHECK(me, uv_loop_close(&w.m.loop) == 0, "handles are left");
}

/* Rank 0 sends few heartbeats at a time. In each interval every rank gets one. */
static void test_many(void **state)
{
    int n = MANY - 1;
    memset(&sent, 0, sizeof sent);
    run_ranks(false, MANY, watch_many, NULL, NULL);
    print_message("%d heartbeats in %d ticks, at most %d at a time\n", sent.n_sent, sent.n_ticks,
                  sent.n_most);
    assert_in_range(sent.n_most, 1, MAX_AT_A_TIME);
    for (int round = 0; round < ROUNDS; round++) {
        bool got[MANY] = {false};
        for (int i = 0; i < n; i++) {
            int to = sent.to[round * n + i];
            assert_false(got[to]);
            got[to] = true;
        }
    }
}

int main(void)
{
    zr_raise_descriptor_limit(4096);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_silent_for_a_while),
        cmocka_unit_test(test_silent_host),
        cmocka_unit_test(test_silent_rank),
        cmocka_unit_test(test_silent_of_unknown_host),
        cmocka_unit_test(test_one_host),
        cmocka_unit_test(test_own_loop_stands),
        cmocka_unit_test(test_many),
    };
    return cmocka_run_group_tests_name("rendezvous_beat", tests, NULL, NULL);
}
