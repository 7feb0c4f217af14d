/* SPDX-License-Identifier: Apache-2.0 */
/* test_rendezvous_worlds.c: ranks meet, exchange, agree and lose a rank in worlds of random size, and in
 * one of 1024 ranks. In the environment, N_WORLDS says how many random worlds, and N_RANKS=512 runs only
 * one world of that size, with its times. */
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

enum { ROUNDS = 6, NEVER = 100000, ANYTHING_MS = 300, ENOUGH = 1000 };

/* The course of a run. Set before the ranks start. */
static struct {
    uint64_t seed;
    /* the rank that behaves differently, and the round in which it does */
    int x, round;
} run;

static int n_worlds(void)
{
    const char *text = getenv("N_WORLDS");
    return text ? atoi(text) : 4;
}

/* Draws a run. Returns its world. */
static int draw_world(uint64_t *seed, int most)
{
    int world = (int)random_in(seed, 4, most);
    run.x = (int)random_in(seed, 0, world - 1);
    run.seed = random_next(seed);
    run.round = (int)random_in(seed, 0, ROUNDS - 1);
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

/* Exchanges n bytes, and checks that the result has those of each rank in rank order. */
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

/* Returns the lowest rank that fails in a round; -1: none does. */
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
    int err = zr_rendezvous_agree(m->r, fails ? zr_fail(ZERO_ERR_IO, "rank %d's disk", me->w.rank) : 0);
    snprintf(want, sizeof want, speaker == me->w.rank ? "rank %d's disk" : "rank %d: rank %d's disk", speaker,
             speaker);
    if (err != (speaker < 0 ? 0 : ZERO_ERR_IO) || (err && strcmp(zr_error_text(), want) != 0))
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

/* Every rank gets what all ranks gave, and the failure of the lowest that failed. */
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

/* Closes all connections without a goodbye. */
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

/* Every other rank names the rank that died. */
static void test_death_in_exchange(void **state)
{
    (void)state;
    char text[64];
    uint64_t seed = fresh_seed("death in exchange");
    for (int k = 0; k < n_worlds(); k++) {
        int world = draw_world(&seed, 24);
        snprintf(text, sizeof text, "rank %d was lost", run.x);
        expect_all_but_x(run_ranks(true, world, exchange_until_lost, NULL, x_dies), world, ZERO_ERR_PEER,
                         text);
    }
    for (int k = 0; k < n_worlds(); k++) {
        int world = draw_world(&seed, 24);
        snprintf(text, sizeof text, "rank %d was lost", run.x);
        expect_all_but_x(run_ranks(false, world, exchange_until_lost, NULL, NULL), world, ZERO_ERR_PEER,
                         text);
    }
    static const int large[] = {66, 130, 200};
    for (size_t i = 0; i < sizeof large / sizeof *large; i++) {
        run.x = (int)random_in(&seed, 1, large[i] - 1);
        run.round = (int)random_in(&seed, 0, ROUNDS);
        snprintf(text, sizeof text, "rank %d was lost", run.x);
        expect_all_but_x(run_ranks(false, large[i], exchange_until_lost, NULL, NULL), large[i], ZERO_ERR_PEER,
                         text);
    }
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
        note_error(me, meet(&m, &me->w, ANYTHING_MS));
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
                              .type = (uint16_t)random_in(&s, ZR_FRAME_CHALLENGE, ZR_FRAME_RESULT + 1),
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

/* Ranks meet, exchange and agree. Then rank x vanishes, and all others name it. */
static void be_one_of_many(struct rank *me)
{
    struct meeting m;
    double t[3] = {now_s()};
    RANK_CHECK(me, meet(&m, &me->w, 3 * LONG_MS) == 0, "%s", zr_error_text());
    t[1] = now_s();
    bool same = exchange_and_look(me, &m, 64, 0);
    t[2] = now_s();
    if (me->w.rank == 0)
        printf("%d ranks: met in %.0f ms, one exchange of 64 bytes each %.0f ms\n", me->w.world,
               1e3 * (t[1] - t[0]), 1e3 * (t[2] - t[1]));
    if (same && agree_and_look(me, &m, 1)) {
        if (me->w.rank == run.x)
            vanish(&m);
        else
            exchange_and_look(me, &m, 64, 2);
    }
    RANK_CHECK(me, part(&m), "handles are left");
}

/* Returns whether this process may open n descriptors. It has all ranks, each with a loop. */
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
    expect_all_but_x(r, world, ZERO_ERR_PEER, lost);
    getrusage(RUSAGE_SELF, &used);
    printf("at most %ld MiB of memory\n", used.ru_maxrss / 1024);
}

/* --- descriptors --- */

static void keep_line(void *arg, const char *line)
{
    snprintf(arg, sizeof((struct rank *)0)->note, "%s", line);
}

/* Rank 0 may open fewer descriptors than there are ranks. Its hard limit is arg. */
static void meet_with_few_descriptors(struct rank *me)
{
    char line[sizeof me->note] = "";
    struct zr_log *log = NULL;
    struct meeting m;
    struct rlimit few = {.rlim_cur = 60, .rlim_max = (rlim_t) * (int *)me->arg};
    RANK_CHECK(me, zr_log_open(keep_line, line, NULL, &log) == 0, "%s", zr_error_text());
    struct zr_waiting waiting = {.log = log, .remind_ms = NEVER};
    me->w.waiting = &waiting;
    RANK_CHECK(me, all_at(me, 1), "a rank does not start"); /* rank 0 stays for a moment after its failure */
    if (me->w.rank == 0)
        RANK_CHECK(me, setrlimit(RLIMIT_NOFILE, &few) == 0, "no limit");
    note_error(me, meet(&m, &me->w, few.rlim_max < ENOUGH ? 2 * SHORT_MS : LONG_MS));
    RANK_CHECK(me, part(&m), "handles are left");
    if (!me->code)
        memcpy(me->note, line, sizeof line);
    zr_log_close(log);
}

static void test_descriptors(void **state)
{
    (void)state;
    int most = ENOUGH;
    if (!may_open(most))
        skip();
    struct rank *r = run_ranks(true, 70, meet_with_few_descriptors, &most, NULL);
    expect_rank(&r[0], 0, "raised the limit on descriptors (RLIMIT_NOFILE, ulimit -n) from 60 to ");
    for (int i = 1; i < 70; i++)
        expect_rank(&r[i], 0, "");
    most = 65;
    r = run_ranks(true, 70, meet_with_few_descriptors, &most, NULL);
    for (int i = 0; i < 70; i++)
        if (i == 0 || r[i].code != ZERO_ERR_TIMEOUT) /* a slow rank may come when rank 0 has left */
            expect_rank(&r[i], ZERO_ERR_SYSTEM,
                        "may have at most 65 open (RLIMIT_NOFILE, ulimit -n): start it");
}

int main(void)
{
    zr_raise_descriptor_limit(65536);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exchange),    cmocka_unit_test(test_death_in_exchange),
        cmocka_unit_test(test_anything),    cmocka_unit_test(test_many),
        cmocka_unit_test(test_descriptors),
    };
    const struct CMUnitTest many[] = {cmocka_unit_test(test_many)};
    if (getenv("N_RANKS"))
        return cmocka_run_group_tests(many, NULL, NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
