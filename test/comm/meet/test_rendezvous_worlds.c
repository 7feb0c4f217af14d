/* SPDX-License-Identifier: Apache-2.0 */
/* test_rendezvous_worlds.c: what ranks do together gives the same in worlds of any size, up to 1024 ranks.
 * N_WORLDS in the environment: how many worlds are drawn. N_RANKS=512: only a world of so many, with its
 * times. */
#include "comm/meet/hub.h"
#include "kernels/limits.h"
#include "kernels/log.h"
#include "test/comm/meet/meeting.h"
#include "test/kernels/random.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

enum { ROUNDS = 6, NEVER = 100000 };

/* What a run of ranks does; set before they start. */
static struct {
    uint64_t seed;
    /* the rank that the run is about, and the round in which it does it */
    int x, round;
    int64_t timeout_ms;
} run;

static int n_worlds(void)
{
    const char *text = getenv("N_WORLDS");
    return text ? atoi(text) : 4;
}

/* A world, and the rank it is about. */
static int draw_world(uint64_t *seed, int most)
{
    int world = (int)random_in(seed, 4, most);
    run.x = (int)random_in(seed, 0, world - 1);
    run.seed = random_next(seed);
    run.round = (int)random_in(seed, 0, ROUNDS - 1);
    run.timeout_ms = LONG_MS;
    print_message("world %d, rank %d, round %d\n", world, run.x, run.round);
    return world;
}

static void expect_all_but_x(const struct rank *r, int world, int code, const char *text)
{
    for (int i = 0; i < world; i++)
        if (i != run.x)
            expect_rank(&r[i], code, text);
}

/* --- what rounds do --- */

static uint64_t bits_of(int rank, int round)
{
    uint64_t s = run.seed ^ ((uint64_t)rank << 20) ^ (uint64_t)round;
    return random_next(&s);
}

static void fill_of(unsigned char *bytes, size_t n, int rank, int round)
{
    uint64_t s = bits_of(rank, round);
    for (size_t i = 0; i < n; i++)
        bytes[i] = (unsigned char)random_next(&s);
}

/* Of every rank what it gave, in the place of its number. */
static bool exchange_and_look(struct rank *me, struct meeting *m, size_t n, int round)
{
    unsigned char *mine = malloc(n), *want = malloc(n), *all = malloc(n * (size_t)me->w.world);
    fill_of(mine, n, me->w.rank, round);
    int err = zr_rendezvous_exchange(m->r, mine, n, all);
    note_error(me, err);
    for (int i = 0; i < me->w.world && !err && !me->wrong[0]; i++) {
        fill_of(want, n, i, round);
        if (memcmp(want, all + (size_t)i * n, n) != 0)
            rank_says(me, __FILE__, __LINE__, "exchange", "what rank %d gave in round %d", i, round);
    }
    free(mine);
    free(want);
    free(all);
    return !err && !me->wrong[0];
}

/* The lowest rank that failed; -1: none did. */
static int speaker_of(int world, int round)
{
    for (int i = 0; i < world; i++)
        if (bits_of(i, round) % 16 == 1)
            return i;
    return -1;
}

static bool agree_and_look(struct rank *me, struct meeting *m, int round)
{
    char want[96];
    bool fails = bits_of(me->w.rank, round) % 16 == 1;
    int speaker = speaker_of(me->w.world, round);
    int err = zr_rendezvous_agree(m->r, fails ? zr_fail(ZR_ERR_IO, "rank %d's disk", me->w.rank) : 0);
    snprintf(want, sizeof want, speaker == me->w.rank ? "rank %d's disk" : "rank %d: rank %d's disk", speaker,
             speaker);
    if (err != (speaker < 0 ? 0 : ZR_ERR_IO) || (err && strcmp(zr_error_text(), want) != 0))
        rank_says(me, __FILE__, __LINE__, "agree", "code %d: \"%s\", expected \"%s\"", err,
                  err ? zr_error_text() : "", want);
    return !me->wrong[0];
}

static void rounds(struct rank *me)
{
    struct meeting m;
    RANK_CHECK(me, meet(&m, &me->w, LONG_MS) == 0, "%s", zr_error_text());
    uint64_t s = run.seed;
    for (int k = 0; k < ROUNDS; k++) {
        size_t n = (size_t)random_in(&s, 1, me->w.world > 40 ? 500 : k % 2 ? 40000 : 300);
        RANK_CHECK(me, exchange_and_look(me, &m, n, k), "round %d: %s %s", k, me->note, me->wrong);
        if (!agree_and_look(me, &m, k))
            return;
    }
    RANK_CHECK(me, part(&m), "handles are left");
}

/* Every rank gets what all gave, and hears the lowest that failed. */
static void test_exchange(void **state)
{
    (void)state;
    static const int large[] = {65, 66, 130, 200};
    uint64_t seed = fresh_seed("exchange");
    for (int k = 0; k < n_worlds(); k++) {
        int world = draw_world(&seed, 30);
        run_ranks(k % 2, world, rounds, NULL, NULL);
    }
    for (size_t i = 0; i < sizeof large / sizeof *large; i++)
        run_ranks(false, large[i], rounds, NULL, NULL);
}

/* --- a rank that is lost --- */

static void *die_soon(void *arg)
{
    (void)arg;
    usleep((useconds_t)(run.seed % 20000));
    kill(getpid(), SIGKILL);
    return NULL;
}

/* Without a word: all its connections are closed. */
static void vanish(struct meeting *m)
{
    for (struct zr_link *l = m->r->links; l; l = l->next)
        zr_link_drop(l);
}

static void exchange_until_lost(struct rank *me)
{
    struct meeting m;
    pthread_t id;
    RANK_CHECK(me, meet(&m, &me->w, LONG_MS) == 0, "%s", zr_error_text());
    if (me->dies)
        RANK_CHECK(me, pthread_create(&id, NULL, die_soon, NULL) == 0, "no thread");
    for (int k = 0; k < NEVER; k++) {
        if (!me->forked && me->w.rank == run.x && k == run.round) {
            vanish(&m);
            break;
        }
        if (!exchange_and_look(me, &m, 100, k))
            break;
    }
    RANK_CHECK(me, part(&m), "handles are left");
}

static void x_dies(struct rank *r)
{
    r->dies = r->w.rank == run.x;
}

/* A rank that dies is named on every other rank. */
static void test_death_in_exchange(void **state)
{
    (void)state;
    char text[64];
    uint64_t seed = fresh_seed("death in exchange");
    for (int k = 0; k < n_worlds(); k++) {
        int world = draw_world(&seed, 24);
        snprintf(text, sizeof text, "rank %d was lost", run.x);
        expect_all_but_x(run_ranks(true, world, exchange_until_lost, NULL, x_dies), world, ZR_ERR_PEER, text);
    }
    for (int k = 0; k < n_worlds(); k++) {
        int world = draw_world(&seed, 24);
        snprintf(text, sizeof text, "rank %d was lost", run.x);
        expect_all_but_x(run_ranks(false, world, exchange_until_lost, NULL, NULL), world, ZR_ERR_PEER, text);
    }
    static const int large[] = {66, 130, 200};
    for (size_t i = 0; i < sizeof large / sizeof *large; i++) {
        run.x = (int)random_in(&seed, 1, large[i] - 1);
        run.round = (int)random_in(&seed, 0, ROUNDS);
        snprintf(text, sizeof text, "rank %d was lost", run.x);
        expect_all_but_x(run_ranks(false, large[i], exchange_until_lost, NULL, NULL), large[i], ZR_ERR_PEER,
                         text);
    }
}

/* --- after the detach --- */

/* What a rank hears first. */
struct watch {
    struct rank *me;
    struct meeting m;
    uv_timer_t tick;
    bool over;
    int64_t until_ms;
    int n_got;
};

static void tick_closed(uv_handle_t *h)
{
    (void)h;
}

static void end_watch(struct watch *w)
{
    w->over = true;
    zr_rendezvous_close(w->m.r);
    if (!uv_is_closing((uv_handle_t *)&w->tick))
        uv_close((uv_handle_t *)&w->tick, tick_closed);
}

static void heard_lost(void *arg, int rank, const char *why)
{
    struct watch *w = arg;
    if (!w->over)
        snprintf(w->me->note, sizeof w->me->note, "rank %d was lost: %s", rank, why);
    w->me->code = w->over ? w->me->code : ZR_ERR_PEER;
    end_watch(w);
}

static void heard_failed(void *arg, int code, const char *text)
{
    struct watch *w = arg;
    if (!w->over) {
        snprintf(w->me->note, sizeof w->me->note, "%s", text);
        w->me->code = code;
    }
    end_watch(w);
}

static void on_tick(uv_timer_t *t)
{
    struct watch *w = t->data;
    if ((int64_t)uv_now(t->loop) > w->until_ms)
        end_watch(w);
}

static int exchange_ranks_of(struct meeting *m, int world)
{
    int mine = 0, *all = malloc((size_t)world * sizeof *all);
    int err = zr_rendezvous_exchange(m->r, &mine, sizeof mine, all);
    free(all);
    return err;
}

static bool begin_watch(struct rank *me, struct watch *w)
{
    *w = (struct watch){.me = me};
    if (meet(&w->m, &me->w, LONG_MS) || exchange_ranks_of(&w->m, me->w.world)) {
        rank_says(me, __FILE__, __LINE__, "meet", "%s", zr_error_text());
        return false;
    }
    uv_timer_init(&w->m.loop, &w->tick);
    w->tick.data = w;
    w->until_ms = (int64_t)uv_now(&w->m.loop) + LONG_MS;
    uv_timer_start(&w->tick, on_tick, 1, 20);
    return true;
}

static void run_watch(struct watch *w)
{
    struct zr_sigpipe_hold hold;
    zr_sigpipe_hold(&hold);
    while (!w->over)
        uv_run(&w->m.loop, UV_RUN_ONCE);
    zr_sigpipe_release(&hold);
    RANK_CHECK(w->me, part(&w->m), "handles are left");
}

static void watch_for_death(struct rank *me)
{
    struct watch w;
    if (!begin_watch(me, &w))
        return;
    zr_rendezvous_detach(w.m.r, heard_lost, heard_failed, &w);
    if (me->w.rank == run.x) {
        sleep_ms((int)(run.seed % 30));
        if (me->forked)
            kill(getpid(), SIGKILL);
        vanish(&w.m);
        end_watch(&w);
    }
    run_watch(&w);
}

static void test_death_after_detach(void **state)
{
    (void)state;
    char text[64];
    uint64_t seed = fresh_seed("death after the detach");
    for (int k = 0; k < n_worlds(); k++) {
        int world = draw_world(&seed, 24);
        bool forked = k % 2;
        snprintf(text, sizeof text, "rank %d was lost: ", run.x);
        expect_all_but_x(run_ranks(forked, world, watch_for_death, NULL, forked ? x_dies : NULL), world,
                         ZR_ERR_PEER, text);
    }
    run.x = 1;
    expect_all_but_x(run_ranks(false, 130, watch_for_death, NULL, NULL), 130, ZR_ERR_PEER,
                     "rank 1 was lost: ");
}

static void report_or_wait(struct rank *me)
{
    struct watch w;
    if (!begin_watch(me, &w))
        return;
    zr_rendezvous_detach(w.m.r, heard_lost, heard_failed, &w);
    if (me->w.rank == run.x) {
        zr_rendezvous_report(w.m.r, ZR_ERR_IO, "rank x's disk is full");
        for (int i = 0; i < 20; i++) {
            uv_run(&w.m.loop, UV_RUN_NOWAIT);
            sleep_ms(1);
        }
        end_watch(&w);
    }
    run_watch(&w);
}

/* What a rank reports reaches all, and comes before its leaving. */
static void test_failure_after_detach(void **state)
{
    (void)state;
    uint64_t seed = fresh_seed("failure after the detach");
    for (int k = 0; k < n_worlds(); k++) {
        int world = draw_world(&seed, 24);
        expect_all_but_x(run_ranks(false, world, report_or_wait, NULL, NULL), world, ZR_ERR_IO,
                         "rank x's disk is full");
    }
}

/* --- calls that differ --- */

static void call_and_compare(struct rank *me)
{
    struct watch w;
    if (!begin_watch(me, &w))
        return;
    for (int k = 0; k < 20; k++) {
        struct zr_called c = {.name = ZR_CALLED_READ, .subject = k, .step = 1};
        if (me->w.rank == run.x && k == 7 + run.round)
            c.subject = 99;
        zr_rendezvous_called(w.m.r, &c);
    }
    /* Whoever compares does so when all have made them. */
    RANK_CHECK(me, exchange_ranks_of(&w.m, me->w.world) == 0, "%s", zr_error_text());
    zr_rendezvous_detach(w.m.r, heard_lost, heard_failed, &w);
    if (me->w.rank == (run.x + 1) % me->w.world)
        RANK_CHECK(me, zr_rendezvous_compare(w.m.r, ZR_ERR_TIMEOUT, "something is late"), "not compared");
    run_watch(&w);
}

static void test_calls(void **state)
{
    (void)state;
    uint64_t seed = fresh_seed("calls");
    for (int k = 0; k < n_worlds(); k++) {
        int world = draw_world(&seed, 24);
        char text[64];
        snprintf(text, sizeof text, "rank %d called zero_read(tensor 99) in step 1", run.x);
        struct rank *r = run_ranks(false, world, call_and_compare, NULL, NULL);
        for (int i = 0; i < world; i++)
            expect_rank(&r[i], ZR_ERR_MISMATCH, text);
    }
}

/* --- messages --- */

enum { MESSAGES = 20 };

static void on_number(void *arg, int from, const void *data, size_t n)
{
    struct watch *w = arg;
    int want[3] = {from, 0, 0}, got[3] = {-1};
    if (n == sizeof got)
        memcpy(got, data, n);
    want[1] = w->me->w.rank ? w->n_got : got[1];
    if (n != sizeof got || got[0] != want[0] || got[1] != want[1] || (w->me->w.rank && from != 0))
        rank_says(w->me, __FILE__, __LINE__, "message", "%d %d of %d from %d", got[0], got[1], w->n_got,
                  from);
    w->n_got++;
}

static bool all_are_at(struct rank *me, int stage)
{
    bool all = true;
    for (int i = 0; i < me->w.world; i++)
        all &= atomic_load(&me->all[i].stage) >= stage;
    return all;
}

static void talk(struct rank *me)
{
    struct watch w;
    if (!begin_watch(me, &w))
        return;
    zr_rendezvous_on_message(w.m.r, on_number);
    zr_rendezvous_detach(w.m.r, heard_lost, heard_failed, &w);
    int err = 0, to_come = me->w.rank ? 2 * MESSAGES : MESSAGES * (me->w.world - 1);
    for (int k = 0; k < MESSAGES && !err; k++) {
        int number[3] = {me->w.rank, 2 * k, 0};
        for (int to = me->w.rank ? 0 : 1; to < (me->w.rank ? 1 : me->w.world) && !err; to++)
            err = zr_rendezvous_send(w.m.r, to, number, sizeof number);
        number[1]++;
        if (me->w.rank == 0 && !err)
            err = zr_rendezvous_send(w.m.r, -1, number, sizeof number);
    }
    if (err)
        rank_says(me, __FILE__, __LINE__, "send", "%s", zr_error_text());
    while (!w.over && !all_are_at(me, 1)) {
        uv_run(&w.m.loop, UV_RUN_ONCE);
        if (w.n_got == to_come || me->wrong[0])
            atomic_store(&me->stage, 1);
    }
    RANK_CHECK(me, w.n_got == to_come && !me->code, "%d of %d came: %s", w.n_got, to_come, me->note);
    end_watch(&w);
    run_watch(&w);
}

/* Rank 0's to one and to all, and those to rank 0, once and in order. */
static void test_messages(void **state)
{
    (void)state;
    uint64_t seed = fresh_seed("messages");
    for (int k = 0; k < n_worlds(); k++)
        run_ranks(false, draw_world(&seed, 24), talk, NULL, NULL);
}

/* --- ranks that fail, differ, or do not come --- */

static void fail_or_exchange(struct rank *me)
{
    struct meeting m;
    RANK_CHECK(me, meet(&m, &me->w, LONG_MS) == 0, "%s", zr_error_text());
    for (int k = 0; k < NEVER; k++) {
        if (me->w.rank == run.x && k == run.round) {
            zr_fail(ZR_ERR_NOMEM, "too little memory");
            zr_rendezvous_fail(m.r, ZR_ERR_NOMEM);
            break;
        }
        if (!exchange_and_look(me, &m, 30, k))
            break;
    }
    RANK_CHECK(me, part(&m), "handles are left");
}

static void test_failing_rank(void **state)
{
    (void)state;
    uint64_t seed = fresh_seed("a rank that fails");
    for (int k = 0; k < n_worlds(); k++) {
        char text[64];
        int world = draw_world(&seed, 24);
        snprintf(text, sizeof text, "rank %d: too little memory", run.x);
        expect_all_but_x(run_ranks(false, world, fail_or_exchange, NULL, NULL), world, ZR_ERR_NOMEM, text);
    }
}

static void give_another_size(struct rank *me)
{
    struct meeting m;
    RANK_CHECK(me, meet(&m, &me->w, LONG_MS) == 0, "%s", zr_error_text());
    exchange_and_look(me, &m, me->w.rank == run.x ? (run.round % 2 ? 12 : 90000) : 40, 0);
    RANK_CHECK(me, part(&m), "handles are left");
}

static void test_sizes_differ(void **state)
{
    (void)state;
    uint64_t seed = fresh_seed("sizes differ");
    for (int k = 0; k < n_worlds(); k++) {
        char text[64];
        int world = draw_world(&seed, 24);
        struct rank *r = run_ranks(false, world, give_another_size, NULL, NULL);
        snprintf(text, sizeof text, "rank %d gives %d", run.x, run.round % 2 ? 12 : 90000);
        for (int i = 0; i < world; i++)
            expect_rank(&r[i], ZR_ERR_MISMATCH, text);
    }
}

/* Of ranks that wait run.timeout_ms none is wrong. On a slow machine others than x may be late too: then they
 * wait longer. */
static void expect_in_time(int world, void (*fn)(struct rank *me),
                           int (*first_wrong)(const struct rank *r, int world))
{
    int wrong = 0;
    for (run.timeout_ms = SHORT_MS; wrong >= 0 && run.timeout_ms <= LONG_MS; run.timeout_ms *= 4) {
        struct rank *r = run_ranks(false, world, fn, NULL, NULL);
        wrong = first_wrong(r, world);
        if (wrong >= 0)
            print_message("after %lld ms: rank %d: code %d \"%s\"\n", (long long)run.timeout_ms, wrong,
                          r[wrong].code, r[wrong].note);
    }
    assert_int_equal(wrong, -1);
}

/* x is there, and does not come to the exchange. */
static void stay_away(struct rank *me)
{
    struct meeting m;
    RANK_CHECK(me, meet(&m, &me->w, LONG_MS) == 0, "%s", zr_error_text());
    zr_rendezvous_limit(m.r, run.timeout_ms);
    if (me->w.rank == run.x) {
        for (int i = 0; i < me->w.world; i++)
            RANK_CHECK(me, i == run.x || wait_stage(&me->all[i], 1), "rank %d waits on", i);
    } else {
        exchange_and_look(me, &m, 40, 0);
    }
    atomic_store(&me->stage, 1);
    RANK_CHECK(me, part(&m), "handles are left");
}

/* The first rank that does not say that x is late; -1: all do. */
static int first_wrong_of_late(const struct rank *r, int world)
{
    char text[96], waited[64];
    snprintf(text, sizeof text, "exchange: 1 of %d ranks did not come in %lld ms: rank %d", world,
             (long long)run.timeout_ms, run.x);
    snprintf(waited, sizeof waited, "waited %lld ms for rank %d", (long long)run.timeout_ms, run.x);
    for (int i = 0; i < world; i++) {
        bool says = strstr(r[i].note, text) || strstr(r[i].note, waited);
        if (i != run.x && (r[i].code != ZR_ERR_TIMEOUT || !says))
            return i;
    }
    return -1;
}

static void test_late_in_exchange(void **state)
{
    (void)state;
    uint64_t seed = fresh_seed("late in an exchange");
    for (int k = 0; k < (n_worlds() + 4) / 5; k++)
        expect_in_time(draw_world(&seed, 12), stay_away, first_wrong_of_late);
}

static void do_not_start(struct rank *me)
{
    if (me->w.rank == run.x)
        return;
    struct meeting m;
    note_error(me, meet(&m, &me->w, run.timeout_ms));
    RANK_CHECK(me, part(&m), "handles are left");
}

static int first_wrong_of_missing(const struct rank *r, int world)
{
    char text[64], name[32];
    snprintf(text, sizeof text, "1 of %d ranks did not come to ", world);
    snprintf(name, sizeof name, "rank %d", run.x);
    for (int i = 0; i < world; i++)
        if (i != run.x && (r[i].code != ZR_ERR_TIMEOUT || !strstr(r[i].note, i ? name : text)))
            return i;
    return -1;
}

/* A rank that does not start at all: rank 0 names it, and every other rank hears that, or says for whom it
 * looked. */
static void test_never_started(void **state)
{
    (void)state;
    uint64_t seed = fresh_seed("a rank that does not start");
    for (int k = 0; k < (n_worlds() + 4) / 5; k++)
        expect_in_time(draw_world(&seed, 12), do_not_start, first_wrong_of_missing);
}

/* --- a rank that says anything --- */

/* A rank joins rank 0 by hand and sends frames of any kind. */
static void say_anything(struct rank *me)
{
    struct {
        struct zr_frame frame;
        char payload[64];
    } any;
    struct meeting m;
    char proof[ZR_FRAME_SHAKE_BYTES];
    uint64_t s = run.seed;
    if (me->w.rank != run.x) {
        note_error(me, meet(&m, &me->w, run.timeout_ms));
        if (!me->code) /* all of it may have made sense */
            exchange_and_look(me, &m, 100, 0);
        RANK_CHECK(me, part(&m), "handles are left");
        return;
    }
    int fd = greet(me, run.x, me->w.world);
    RANK_CHECK(me, fd >= 0 && read_frame(fd, &any.frame, proof, sizeof proof), "it was not let in");
    for (int64_t i = random_in(&s, 1, 12); i > 0; i--) {
        any.frame =
            (struct zr_frame){.magic = ZR_FRAME_MAGIC,
                              .version = ZR_FRAME_VERSION,
                              .type = (uint16_t)random_in(&s, ZR_FRAME_CHALLENGE, ZR_FRAME_VERDICT + 1),
                              .n_bytes = (uint32_t)random_in(&s, 0, sizeof any.payload),
                              .rank = random_in(&s, 0, 3) ? run.x : (int)random_in(&s, -1, 9),
                              .world = me->w.world,
                              .about = (int)random_in(&s, -2, 9)};
        for (size_t k = 0; k < sizeof any.payload; k++)
            any.payload[k] = (char)random_next(&s);
        if (send(fd, &any, sizeof any.frame + any.frame.n_bytes, MSG_NOSIGNAL) < 0)
            break;
    }
    sleep_ms(20);
    close(fd);
}

static void test_anything(void **state)
{
    (void)state;
    uint64_t seed = fresh_seed("a rank that says anything");
    for (int k = 0; k < n_worlds() / 2 + 1; k++) {
        run.x = 1;
        run.seed = random_next(&seed);
        run.timeout_ms = 300;
        struct rank *r = run_ranks(false, 6, say_anything, NULL, NULL);
        for (int i = 0; i < 6; i++)
            if (i != run.x && !r[i].code)
                fail_msg("rank %d has exchanged with the others without rank %d", i, run.x);
    }
}

/* --- many --- */

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* They meet, exchange and agree; then rank x vanishes, and all hear it. */
static void be_one_of_many(struct rank *me)
{
    struct watch w = {.me = me};
    double t[3] = {now_s()};
    RANK_CHECK(me, meet(&w.m, &me->w, 3 * LONG_MS) == 0, "%s", zr_error_text());
    t[1] = now_s();
    bool same = exchange_and_look(me, &w.m, 64, 0);
    t[2] = now_s();
    if (me->w.rank == 0)
        printf("%d ranks: met in %.0f ms, one exchange of 64 bytes each %.0f ms\n", me->w.world,
               1e3 * (t[1] - t[0]), 1e3 * (t[2] - t[1]));
    if (same && agree_and_look(me, &w.m, 1)) {
        if (me->w.rank == run.x)
            vanish(&w.m);
        else
            exchange_and_look(me, &w.m, 64, 2);
    }
    RANK_CHECK(me, part(&w.m), "handles are left");
}

/* The process has all ranks here, and each of them a loop. */
static bool may_open(int n)
{
    return zr_raise_descriptor_limit((unsigned long long)n) >= (unsigned long long)n;
}

static void test_many(void **state)
{
    (void)state;
    const char *text = getenv("N_RANKS");
    char lost[64];
    int world = text ? atoi(text) : 1024;
    uint64_t seed = fresh_seed("many ranks");
    struct rusage used;
    while (!may_open(9 * world + 100))
        world /= 2;
    run.seed = random_next(&seed);
    run.x = (int)random_in(&seed, 1, world - 1);
    snprintf(lost, sizeof lost, "rank %d was lost during an exchange: ", run.x);
    struct rank *r = run_ranks(false, world, be_one_of_many, NULL, NULL);
    expect_all_but_x(r, world, ZR_ERR_PEER, lost);
    getrusage(RUSAGE_SELF, &used);
    printf("at most %ld MiB of memory\n", used.ru_maxrss / 1024);
}

/* --- descriptors --- */

static void keep_line(void *arg, const char *line)
{
    snprintf(arg, sizeof((struct rank *)0)->note, "%s", line);
}

/* Rank 0 may open fewer than there are ranks; how many more it may allow itself, arg says. */
static void meet_with_few_descriptors(struct rank *me)
{
    char line[sizeof me->note] = "";
    struct zr_log *log = NULL;
    struct meeting m;
    struct rlimit few = {.rlim_cur = 60, .rlim_max = (rlim_t) * (int *)me->arg};
    RANK_CHECK(me, zr_log_open(keep_line, line, NULL, &log) == 0, "%s", zr_error_text());
    struct zr_waiting waiting = {.log = log, .remind_ms = NEVER};
    me->w.waiting = &waiting;
    if (me->w.rank == 0)
        RANK_CHECK(me, setrlimit(RLIMIT_NOFILE, &few) == 0, "no limit");
    note_error(me, meet(&m, &me->w, LONG_MS));
    RANK_CHECK(me, part(&m), "handles are left");
    if (!me->code)
        memcpy(me->note, line, sizeof line);
    zr_log_close(log);
}

static void test_descriptors(void **state)
{
    (void)state;
    int most = 1000;
    if (!may_open(most))
        skip();
    struct rank *r = run_ranks(true, 70, meet_with_few_descriptors, &most, NULL);
    expect_rank(&r[0], 0, "raised the limit on descriptors (RLIMIT_NOFILE, ulimit -n) from 60 to ");
    for (int i = 1; i < 70; i++)
        expect_rank(&r[i], 0, "");
    most = 65;
    r = run_ranks(true, 70, meet_with_few_descriptors, &most, NULL);
    for (int i = 0; i < 70; i++)
        expect_rank(&r[i], ZR_ERR_SYSTEM,
                    "may have at most 65 open (RLIMIT_NOFILE, ulimit -n): start it with");
}

int main(void)
{
    zr_raise_descriptor_limit(65536);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exchange),
        cmocka_unit_test(test_death_in_exchange),
        cmocka_unit_test(test_death_after_detach),
        cmocka_unit_test(test_failure_after_detach),
        cmocka_unit_test(test_calls),
        cmocka_unit_test(test_messages),
        cmocka_unit_test(test_failing_rank),
        cmocka_unit_test(test_sizes_differ),
        cmocka_unit_test(test_late_in_exchange),
        cmocka_unit_test(test_never_started),
        cmocka_unit_test(test_anything),
        cmocka_unit_test(test_many),
        cmocka_unit_test(test_descriptors),
    };
    const struct CMUnitTest many[] = {cmocka_unit_test(test_many)};
    if (getenv("N_RANKS"))
        return cmocka_run_group_tests(many, NULL, NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
