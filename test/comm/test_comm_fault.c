/* SPDX-License-Identifier: Apache-2.0 */
/* test_comm_fault.c: tests that failures among ranks are errors on every rank, with cause and place. No
 * rank hangs and nothing is left behind. */
#include "comm/shm/shm.h"
#include "test/cmocka.h"
#include "test/comm/comm_fixture.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

enum { LONG_MS = 60000, SHORT_MS = 1500, ARENA_BYTES = 1 << 16 };

/* --- operations that differ --- */

enum difference {
    OTHER_OP,
    OTHER_UNIT,
    OTHER_STEP,
    OTHER_HASH,
    OTHER_BYTES,
    OTHER_SHARD,
    OTHER_PLACES,
    OTHER_COUNT,
    OTHER_ROOT,
    OTHER_PART,
    OTHER_DISTANCE,
    AGREE_OTHER_UNIT,
    AGREE_OTHER_SIZE,
    AGREE_OTHER_SPLIT,
    N_DIFFERENCES
};

static const char *const said[N_DIFFERENCES][2] = {
    {"reduce_scatter seq 3 unit 14", "all_gather seq 3 unit 14"},
    {"reduce_scatter seq 3 unit 14", "reduce_scatter seq 3 unit 13"},
    {"of step 8", "of step 7"},
    {"other calls of the program", "reduce_scatter seq 3 unit 14"},
    {"with 1024 bytes", "with 512 bytes"},
    {"other segments", "reduce_scatter seq 3 unit 14"},
    {"other segments", "reduce_scatter seq 3 unit 14"},
    {"with 2 segments, rank", "with 1 segments, rank 3 with 2"},
    {"with root 0", "with root 1"},
    {"with 96 bytes", "with 64 bytes"},
    {"other segments", "shift seq 3 unit 14"},
    {"rank 3 is at agree seq 3 unit 13", "agree seq 3 unit 13: "},
    {"with 24 bytes, rank", "with 16 bytes, rank 3 with 24"},
    {"with other segments", "with other segments"},
};

static void differ(struct rank *me)
{
    enum difference what = *(enum difference *)me->arg;
    bool odd = me->w.rank == me->w.world - 1;
    struct fixture o;
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_shm, 1, LONG_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    struct zr_comm *c = o.comm[0];
    struct zr_stream *s = o.stream[0];
    struct zr_tag tag = {.unit = 14, .step = 7, .call_hash = 99};
    for (int i = 0; i < 2; i++)
        RANK_CHECK(me, zr_comm_exchange(c, s, 0, 64, &tag) == 0, "%s", zr_error_text());
    o.dev->ops->stream_sync(s);
    RANK_CHECK(me, zr_comm_status(c, NULL, 0) == 0, "failed too early");
    RANK_CHECK(me, all_at(me, 1), "a rank is missing"); /* from here on a failure elsewhere is seen here */
    memset(o.base[0], 0xff, ARENA_BYTES);
    struct zr_gather_seg g = {.src = 0, .dst = 0, .in_place = true, .cut = {128, 512}};
    struct zr_reduce_seg r[2] = {{.src = 0, .dst = 8192, .cut = {128, 512}, .dtype = ZERO_F32},
                                 {.src = 1024, .dst = 16384, .cut = {0, 0}, .dtype = ZERO_F32}};
    int64_t places[] = {0, 128, 128, 384, 512};
    if (what == OTHER_PLACES)
        r[0].cut = (struct zr_cut){.total = 512, .at = places};
    int n = 1, err;
    if (odd) {
        tag.unit -= what == OTHER_UNIT;
        tag.step += what == OTHER_STEP;
        tag.call_hash += what == OTHER_HASH;
        if (what == OTHER_BYTES)
            r[0].cut = (struct zr_cut){256, 1024};
        r[0].cut.each += what == OTHER_SHARD ? 128 : 0;
        places[2] += what == OTHER_PLACES ? 64 : 0;
        n += what == OTHER_COUNT;
    }
    if (what == AGREE_OTHER_UNIT)
        tag.unit -= odd;
    if (what >= AGREE_OTHER_UNIT)
        err = zr_comm_agree(c, s, 0, 1 + (odd && what == AGREE_OTHER_SPLIT),
                            1 + (odd && what == AGREE_OTHER_SIZE) - (odd && what == AGREE_OTHER_SPLIT), &tag);
    else if (what == OTHER_ROOT)
        err = zr_comm_broadcast(c, s, 0, 64, odd ? 0 : 1, &tag);
    else if (what == OTHER_PART)
        err = zr_comm_all_to_all(c, s, 0, 4096, odd ? 96 : 64, &tag);
    else if (what == OTHER_DISTANCE)
        err = zr_comm_shift(c, s, 0, 4096, 64, odd ? 2 : 1, &tag);
    else if (what == OTHER_OP && odd)
        err = zr_comm_all_gather(c, s, &g, 1, &tag);
    else
        err = zr_comm_reduce_scatter(c, s, r, n, &tag);
    RANK_CHECK(me, err == 0, "%s", zr_error_text());
    /* An operation queued behind it ends at once too, and moves nothing. */
    RANK_CHECK(me, zr_comm_exchange(c, s, 0, 64, &tag) == 0, "%s", zr_error_text());
    o.dev->ops->stream_sync(s);
    note_status(me, c);
    RANK_CHECK(me, zr_comm_broadcast(c, s, 0, 64, 0, &tag) == 0, "an operation after the failure is nothing");
    o.dev->ops->stream_sync(s);
    for (int i = 0; i < ARENA_BYTES; i++)
        RANK_CHECK(me, o.base[0][i] == (char)0xff, "byte %d was written", i);
    char again[1024];
    RANK_CHECK(me, zr_comm_status(c, again, sizeof again) == me->code && strcmp(again, me->note) == 0,
               "\"%s\" became \"%s\"", me->note, again);
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_operations_differ(bool forked)
{
    for (int what = 0; what < N_DIFFERENCES; what++) {
        enum difference d = (enum difference)what;
        struct rank *r = run_ranks(forked, 4, differ, &d, NULL);
        for (int i = 0; i < 4; i++) {
            expect_rank(&r[i], ZERO_ERR_MISMATCH, " seq 3 unit 1");
            bool names_odd = strstr(r[i].note, ": rank 3 is at ") != NULL;
            bool by_odd = strstr(r[i].note, "(found by rank 3)") != NULL || i == 3;
            /* no calls of programs were recorded */
            if (!strstr(r[i].note, "; the calls of the programs could not be compared"))
                fail_msg("rank %d: \"%s\" speaks of a comparison", i, r[i].note);
            /* either the odd rank found another, or another rank found the odd one */
            if (!names_odd && !by_odd)
                fail_msg("rank %d: \"%s\" does not name rank 3", i, r[i].note);
            if (!strstr(r[i].note, said[what][0]) && !strstr(r[i].note, said[what][1]))
                fail_msg("rank %d: \"%s\" has neither \"%s\" nor \"%s\"", i, r[i].note, said[what][0],
                         said[what][1]);
            if ((what == OTHER_OP || what == OTHER_UNIT) &&
                (!strstr(r[i].note, said[what][0]) || !strstr(r[i].note, said[what][1])))
                fail_msg("rank %d: \"%s\" names one operation only", i, r[i].note);
        }
    }
}

static void test_operations_differ_processes(void **state)
{
    test_operations_differ(true);
}

static void test_operations_differ_threads(void **state)
{
    test_operations_differ(false);
}

/* --- a rank that does not come --- */

static void stay_away(struct rank *me)
{
    struct fixture o;
    struct zr_tag tag = {.unit = 4};
    bool away = me->w.rank == 2;
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_shm, 1, SHORT_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    struct zr_comm *c = o.comm[0];
    if (*(int *)me->arg)
        RANK_CHECK(me, zr_comm_broadcast(c, o.stream[0], 0, 64, 1, &tag) == 0, "%s", zr_error_text());
    o.dev->ops->stream_sync(o.stream[0]);
    RANK_CHECK(me, zr_comm_status(c, NULL, 0) == 0, "failed too early");
    RANK_CHECK(me, all_at(me, 1), "a rank is missing");
    if (away) {
        for (int i = 0; i < me->w.world; i++)
            RANK_CHECK(me, i == 2 || wait_stage(&me->all[i], 2), "rank %d waits for ever", i);
    } else {
        tag.unit = 3;
        RANK_CHECK(me, zr_comm_exchange(c, o.stream[0], 0, 64, &tag) == 0, "%s", zr_error_text());
        o.dev->ops->stream_sync(o.stream[0]);
    }
    note_status(me, c); /* the rank that stayed away hears of it too */
    /* Wait: a rank that closes early would be another cause for the others' failure. */
    RANK_CHECK(me, all_at(me, 2), "a rank waits for ever");
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

/* The message says how long the rank really waited, which is never less than the timeout. */
static void expect_waited(const struct rank *r, const char *text)
{
    expect_rank(r, ZERO_ERR_TIMEOUT, text);
    const char *waited = strstr(r->note, " waited ");
    assert_non_null(waited);
    assert_true(strtoll(waited + strlen(" waited "), NULL, 10) >= SHORT_MS);
}

static void test_stays_away(void **state)
{
    for (int forked = 1; forked >= 0; forked--) {
        int after_one = 1;
        struct rank *r = run_ranks(forked, 4, stay_away, &after_one, NULL);
        for (int i = 0; i < 4; i++)
            expect_waited(&r[i], " ms (timeout_ms) for rank 2, which is at seq 1 (broadcast unit 4)");
        after_one = 0;
        r = run_ranks(forked, 4, stay_away, &after_one, NULL);
        for (int i = 0; i < 4; i++)
            expect_waited(&r[i], " ms (timeout_ms) for rank 2, which is not at its first operation yet");
    }
}

/* Rank 2 waits on one communicator, the other ranks on the other one. */
static void wait_elsewhere(struct rank *me)
{
    struct fixture o;
    int mine = me->w.rank == 2;
    char last[96];
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_shm, 2, SHORT_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    zr_shm_link(o.comm, 2);
    for (int k = 0; k < 2; k++) {
        struct zr_comm *c = o.comm[k];
        struct zr_tag tag = {.unit = 4};
        RANK_CHECK(me, !c->ops->last(c, last, sizeof last) && !last[0], "\"%s\" at first", last);
        RANK_CHECK(me, zr_comm_exchange(c, o.stream[k], 0, 64, &tag) == 0, "%s", zr_error_text());
        o.dev->ops->stream_sync(o.stream[k]);
        RANK_CHECK(me, zr_comm_status(c, NULL, 0) == 0, "failed too early");
        bool inside = c->ops->last(c, last, sizeof last);
        RANK_CHECK(me, !inside && strcmp(last, "exchange seq 1 unit 4") == 0, "%d \"%s\"", inside, last);
    }
    RANK_CHECK(me, all_at(me, 1), "a rank is missing");
    struct zr_comm *c = o.comm[mine];
    struct zr_tag tag = {.unit = 5 + mine};
    RANK_CHECK(me, zr_comm_broadcast(c, o.stream[mine], 0, 64, 1, &tag) == 0, "%s", zr_error_text());
    o.dev->ops->stream_sync(o.stream[mine]);
    note_status(me, c);
    bool inside = c->ops->last(c, last, sizeof last);
    RANK_CHECK(me, inside && strncmp(last, "broadcast seq 2", 15) == 0, "%d \"%s\"", inside, last);
    RANK_CHECK(me, all_at(me, 2), "a rank waits for ever");
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_waits_elsewhere(void **state)
{
    for (int forked = 1; forked >= 0; forked--) {
        struct rank *r = run_ranks(forked, 4, wait_elsewhere, NULL, NULL);
        for (int i = 0; i < 4; i++)
            expect_rank(&r[i], ZERO_ERR_MISMATCH,
                        "which is at seq 1 (exchange unit 4) here and waits for rank ");
    }
}

/* Opens four communicators with an arena each: rank 0 with 2, rank 0 with 1 twice, and all ranks. The
 * timeout of rank `first` is the shortest. */
static int open_linked(struct rank *me, struct fixture *o, int first, struct zr_comm *comm[4])
{
    static const struct {
        enum zr_role role;
        int32_t other; /* the second rank of the group; a rank outside is alone in its own */
    } roles[] = {{ZR_ROLE_GATHER, 2}, {ZR_ROLE_REDUCE, 1}, {ZR_ROLE_GATHER_OUTER, 1}, {ZR_ROLE_CONTROL, -1}};
    static const int32_t all[] = {0, 1, 2}, pairs[][2] = {{0, 1}, {0, 2}};
    int rank = me->w.rank, err = 0;
    char *base;
    for (int i = 0; i < 4 && !err; i++) {
        struct zr_group g = {.size = 1, .members = &all[rank]};
        if (roles[i].other < 0)
            g = zr_group_of_all(rank, 3);
        else if (rank == 0 || rank == roles[i].other)
            g = (struct zr_group){.size = 2, .rank = rank != 0, .members = pairs[roles[i].other - 1]};
        err = zr_shm_open(o->rdv, o->dev, NULL, &g, roles[i].role, rank == first ? SHORT_MS : LONG_MS,
                          &comm[i]);
        if (!err)
            err = fixture_arena(comm[i], 4096, &base);
    }
    if (!err)
        zr_shm_link(comm, 4);
    return err;
}

/* Ranks 0 and 1 wait for each other in different communicators. Rank 2 waits for rank 0. */
static void wait_around(struct rank *me)
{
    struct fixture o;
    struct zr_comm *comm[4] = {NULL};
    struct zr_stream *s;
    struct zr_tag tag = {.unit = -1};
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_shm, 0, LONG_MS, 0) == 0, "%s", zr_error_text());
    RANK_CHECK(me, open_linked(me, &o, 2, comm) == 0, "%s", zr_error_text());
    RANK_CHECK(me, o.dev->ops->stream_open(o.dev, ZR_STREAM_QUEUE, "waits", NULL, &s) == 0, "%s",
               zr_error_text());
    struct zr_comm *c = comm[me->w.rank == 2 ? 0 : 1 + me->w.rank];
    const struct zr_shm *control = (const struct zr_shm *)comm[3];
    const _Atomic int32_t *of_0 = &control->peer[0].head->waits_for[ZR_ROLE_REDUCE],
                          *of_1 = &control->peer[1].head->waits_for[ZR_ROLE_GATHER_OUTER];
    for (int i = 0; me->w.rank == 2 && i < 30000 && (atomic_load(of_0) != 2 || atomic_load(of_1) != 1); i++)
        sleep_ms(1);
    RANK_CHECK(me, zr_comm_exchange(c, s, 0, 64, &tag) == 0, "%s", zr_error_text());
    o.dev->ops->stream_sync(s);
    note_status(me, c);
    RANK_CHECK(me, all_at(me, 1), "a rank waits for ever");
    o.dev->ops->stream_close(s);
    for (int i = 0; i < 4; i++)
        zr_comm_close(comm[i]);
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_waits_around(void **state)
{
    static const char expected[] = "; rank 0 waits for rank 1; rank 1 waits for rank 0";
    for (int forked = 1; forked >= 0; forked--) {
        const struct rank *r = run_ranks(forked, 3, wait_around, NULL, NULL);
        for (int i = 0; i < 3; i++)
            expect_rank(&r[i], ZERO_ERR_TIMEOUT, expected);
        assert_string_equal(strstr(r[2].note, expected), expected);
        assert_string_equal(strstr(r[0].note, expected) + sizeof expected - 1, " (found by rank 2)");
    }
}

/* Rank 0 waits in one communicator for rank 1, which waits for all ranks in another. In a third, rank 0
 * waits for rank 2, which never comes. Rank 0 makes the same calls as rank 1; it is only held up. */
static void wait_behind(struct rank *me)
{
    struct fixture o;
    struct zr_comm *comm[4] = {NULL};
    struct zr_stream *s[2];
    struct zr_tag tag = {.unit = -1};
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_shm, 0, LONG_MS, 0) == 0, "%s", zr_error_text());
    RANK_CHECK(me, open_linked(me, &o, 1, comm) == 0, "%s", zr_error_text());
    for (int i = 0; i < 2; i++)
        RANK_CHECK(me, o.dev->ops->stream_open(o.dev, ZR_STREAM_QUEUE, "waits", NULL, &s[i]) == 0, "%s",
                   zr_error_text());
    for (int i = 0; me->w.rank == 0 && i < 2; i++)
        RANK_CHECK(me, zr_comm_exchange(comm[i], s[i], 0, 64, &tag) == 0, "%s", zr_error_text());
    const _Atomic int32_t *of_0 = &((const struct zr_shm *)comm[3])->peer[0].head->waits_for[ZR_ROLE_GATHER];
    for (int i = 0; me->w.rank == 1 && i < 30000 && atomic_load(of_0) != 2 + 1; i++)
        sleep_ms(1);
    if (me->w.rank == 1)
        RANK_CHECK(me, zr_comm_exchange(comm[3], s[0], 0, 64, &tag) == 0, "%s", zr_error_text());
    for (int i = 0; i < 2; i++)
        o.dev->ops->stream_sync(s[i]);
    RANK_CHECK(me, me->w.rank != 2 || wait_stage(&me->all[1], 1), "rank 1 waits for ever");
    note_status(me, comm[3]);
    RANK_CHECK(me, all_at(me, 1), "a rank waits for ever");
    for (int i = 0; i < 2; i++)
        o.dev->ops->stream_close(s[i]);
    for (int i = 0; i < 4; i++)
        zr_comm_close(comm[i]);
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_waits_behind(void **state)
{
    for (int forked = 1; forked >= 0; forked--) {
        const struct rank *r = run_ranks(forked, 3, wait_behind, NULL, NULL);
        for (int i = 0; i < 3; i++)
            expect_rank(&r[i], ZERO_ERR_TIMEOUT, "; rank 0 waits for rank 2");
    }
}

/* --- a rank that dies --- */

/* Says what the flight recorder has. */
static void say_last_call(void *arg, int rank, char *text, size_t n_text)
{
    const struct rank *me = arg;
    snprintf(text, n_text, "zero_step in step 100, says rank %d of rank %d", me->w.rank, rank);
}

static void die(struct rank *me)
{
    struct fixture o;
    struct zr_tag tag = {.unit = 7};
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_shm, 2, LONG_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    zr_rendezvous_know(o.rdv, &(struct zr_known_ranks){.last_call = say_last_call, .arg = me});
    struct zr_reduce_seg r = {.src = 0, .dst = 32768, .cut = {4096, 16384}, .dtype = ZERO_BF16};
    for (int i = 0; i < 2000; i++)
        for (int k = 0; k < 2; k++) {
            struct zr_comm *c = o.comm[k];
            tag.step = (uint32_t)i;
            int err = k == 0       ? zr_comm_reduce_scatter(c, o.stream[k], &r, 1, &tag)
                      : i % 2 == 0 ? zr_comm_all_to_all(c, o.stream[k], 0, 32768, 4096, &tag)
                                   : zr_comm_shift(c, o.stream[k], 0, 32768, 16384, 1, &tag);
            RANK_CHECK(me, err == 0, "%s", zr_error_text());
            if (i == 100 && k == 1 && me->dies) {
                sleep_ms(*(int *)me->arg);
                kill(getpid(), SIGKILL);
            }
        }
    for (int k = 0; k < 2; k++)
        o.dev->ops->stream_sync(o.stream[k]);
    note_status(me, o.comm[0]);
    char why[512];
    RANK_CHECK(me, zr_comm_status(o.comm[1], why, sizeof why) == ZERO_ERR_PEER,
               "the other communicator: \"%s\"", why);
    RANK_CHECK(me, strstr(why, "rank 1 was lost"), "the other communicator: \"%s\"", why);
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void rank_1_dies(struct rank *r)
{
    r->dies = r->w.rank == 1;
}

static void test_death(void **state)
{
    for (int ms = 0; ms <= 60; ms += 20) {
        struct rank *r = run_ranks(true, 4, die, &ms, rank_1_dies);
        for (int i = 0; i < 4; i++) {
            if (i == 1)
                continue;
            expect_rank(&r[i], ZERO_ERR_PEER,
                        "rank 1 was lost: its process ended; its last call was zero_step in step 100, says");
            expect_rank(&r[i], ZERO_ERR_PEER, " of rank 1");
            expect_rank(&r[i], ZERO_ERR_PEER, "reduce_scatter seq ");
        }
    }
}

/* --- a rank that closes while others wait for it --- */

static void close_early(struct rank *me)
{
    struct fixture o;
    struct zr_tag tag = {.unit = 7};
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_shm, 1, LONG_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    struct zr_comm *c = o.comm[0];
    if (me->w.rank != 1) {
        RANK_CHECK(me, zr_comm_exchange(c, o.stream[0], 0, 64, &tag) == 0, "%s", zr_error_text());
        o.dev->ops->stream_sync(o.stream[0]);
        note_status(me, c);
    }
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_close_early(void **state)
{
    for (int forked = 1; forked >= 0; forked--) {
        struct rank *r = run_ranks(forked, 3, close_early, NULL, NULL);
        expect_rank(&r[0], ZERO_ERR_PEER, "exchange seq 1 unit 7: rank 1 has closed");
        expect_rank(&r[2], ZERO_ERR_PEER, "rank 1 has closed");
    }
}

/* --- abort --- */

static void abort_while_waiting(struct rank *me)
{
    struct fixture o;
    struct zr_tag tag = {.unit = -1};
    pthread_t id;
    bool away = me->w.rank == 0;
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_shm, 1, LONG_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    struct zr_comm *c = o.comm[0];
    if (me->w.rank == 1)
        pthread_create(&id, NULL, abort_soon, c);
    if (!away)
        RANK_CHECK(me, zr_comm_exchange(c, o.stream[0], 0, 64, &tag) == 0, "%s", zr_error_text());
    else
        wait_failed(c); /* without asking a peer */
    RANK_CHECK(me, !away || atomic_load(c->alarm), "nobody told this rank");
    o.dev->ops->stream_sync(o.stream[0]);
    RANK_CHECK(me, atomic_load(c->alarm), "no alarm");
    if (me->w.rank == 1)
        pthread_join(id, NULL);
    note_status(me, c);
    atomic_store(&me->stage, 1);
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_abort(void **state)
{
    for (int forked = 1; forked >= 0; forked--) {
        struct rank *r = run_ranks(forked, 4, abort_while_waiting, NULL, NULL);
        assert_string_equal(r[1].note, "the model called out of order");
        for (int i = 0; i < 4; i++)
            expect_rank(&r[i], ZERO_ERR_ORDER,
                        i == 1 ? "the model" : "the model called out of order (found by rank 1)");
    }
}

/* An abort before there is an arena takes effect later. */
static void abort_early(struct rank *me)
{
    struct fixture o;
    struct zr_tag tag = {.unit = -1};
    char *base;
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_shm, 1, LONG_MS, 0) == 0, "%s", zr_error_text());
    struct zr_comm *c = o.comm[0];
    RANK_CHECK(me, zr_comm_exchange(c, o.stream[0], 0, 64, &tag) == ZERO_ERR_ORDER, "without an arena");
    if (me->w.rank == 0)
        c->ops->abort(c, ZERO_ERR_IO, NULL);
    RANK_CHECK(me, fixture_arena(c, ARENA_BYTES, &base) == 0, "%s", zr_error_text());
    RANK_CHECK(me, fixture_arena(c, ARENA_BYTES, &base) == ZERO_ERR_ORDER, "a second arena");
    RANK_CHECK(me, zr_comm_exchange(c, o.stream[0], 0, 64, &tag) == 0, "%s", zr_error_text());
    o.dev->ops->stream_sync(o.stream[0]);
    note_status(me, c);
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_abort_early(void **state)
{
    struct rank *r = run_ranks(true, 3, abort_early, NULL, NULL);
    for (int i = 0; i < 3; i++)
        expect_rank(&r[i], ZERO_ERR_IO, "input or output failed");
}

static void test_abort_self(void **state)
{
    struct fixture o;
    struct zr_world w = {.world = 1};
    struct zr_tag tag = {.unit = -1};
    char why[64];
    assert_int_equal(fixture_open(&o, &w, &fixture_self, 1, LONG_MS, 4096), 0);
    struct zr_comm *c = o.comm[0];
    struct zr_reduce_seg r = {.src = 0, .dst = 2048, .cut = {128, 128}, .dtype = ZERO_F32};
    c->ops->abort(c, ZERO_ERR_PEER, "gone");
    c->ops->abort(c, ZERO_ERR_IO, "later");
    o.base[0][0] = 1;
    assert_int_equal(zr_comm_reduce_scatter(c, o.stream[0], &r, 1, &tag), 0);
    o.dev->ops->stream_sync(o.stream[0]);
    assert_int_equal(o.base[0][2048], 0);
    assert_int_equal(zr_comm_status(c, why, sizeof why), ZERO_ERR_PEER);
    assert_string_equal(why, "gone");
    assert_true(fixture_close(&o));
}

/* --- arenas that cannot be made --- */

/* Counts the shared-memory segments mapped into this process. */
static int n_mapped(void)
{
    char line[512];
    int n = 0;
    FILE *f = fopen("/proc/self/maps", "r");
    while (f && fgets(line, sizeof line, f))
        n += strstr(line, "memfd:zero-") != NULL;
    if (f)
        fclose(f);
    return n;
}

static int n_descriptors(void)
{
    int n = 0;
    for (int fd = 0; fd < 256; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

struct request {
    int64_t bytes, bytes_of_rank_1;
    bool no_descriptors, no_addresses; /* of rank 1 */
};

static void ask(struct rank *me)
{
    const struct request *q = me->arg;
    struct fixture o;
    char *base = NULL;
    struct rlimit files, space;
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_shm, 1, LONG_MS, 0) == 0, "%s", zr_error_text());
    struct zr_comm *c = o.comm[0];
    int before = n_descriptors();
    getrlimit(RLIMIT_NOFILE, &files);
    getrlimit(RLIMIT_AS, &space);
    bool odd = me->w.rank == 1;
    if (odd && q->no_descriptors)
        setrlimit(RLIMIT_NOFILE, &(struct rlimit){.rlim_cur = 3, .rlim_max = files.rlim_max});
    if (odd && q->no_addresses)
        setrlimit(RLIMIT_AS, &(struct rlimit){.rlim_cur = 64 << 20, .rlim_max = space.rlim_max});
    int err = fixture_arena(c, odd && q->bytes_of_rank_1 ? q->bytes_of_rank_1 : q->bytes, &base);
    setrlimit(RLIMIT_NOFILE, &files);
    setrlimit(RLIMIT_AS, &space);
    note_error(me, err);
    RANK_CHECK(me, n_mapped() == 0, "%d mappings are left", n_mapped());
    RANK_CHECK(me, n_descriptors() == before, "%d descriptors became %d", before, n_descriptors());
    /* Nothing has changed: a smaller arena can still be made. */
    RANK_CHECK(me, fixture_arena(c, ARENA_BYTES, &base) == 0, "%s", zr_error_text());
    RANK_CHECK(me, n_mapped() > 0, "what is looked for in maps has another name");
    struct zr_tag tag = {.unit = 0};
    RANK_CHECK(me, zr_comm_exchange(c, o.stream[0], 0, 64, &tag) == 0, "%s", zr_error_text());
    o.dev->ops->stream_sync(o.stream[0]);
    RANK_CHECK(me, zr_comm_status(c, NULL, 0) == 0, "failed");
    RANK_CHECK(me, fixture_close(&o), "handles are left");
    RANK_CHECK(me, n_mapped() == 0, "%d mappings are left", n_mapped());
}

/* text is what ranks other than 1 report of rank 1's failure. Rank 1 does not name itself. */
static void expect_all(struct request q, int code, const char *text)
{
    struct rank *r = run_ranks(true, 3, ask, &q, NULL);
    for (int i = 0; i < 3; i++)
        expect_rank(&r[i], code, i == 1 && !strncmp(text, "rank 1: ", 8) ? text + 8 : text);
}

static void test_arena_refused(void **state)
{
    expect_all((struct request){.bytes = INT64_C(1) << 45}, ZERO_ERR_NOMEM,
               "3 ranks need 35184372088832 bytes");
    expect_all((struct request){.bytes = 0}, ZERO_ERR_ARG, "more than 0");
    expect_all((struct request){.bytes = 4096, .bytes_of_rank_1 = 8192}, ZERO_ERR_MISMATCH,
               "the arena has 8192 bytes on rank 1, 4096 on rank 0");
    expect_all((struct request){.bytes = 4096, .bytes_of_rank_1 = -1}, ZERO_ERR_ARG,
               "rank 1: the arena is -1 bytes");
    expect_all((struct request){.bytes = 4096, .no_descriptors = true}, ZERO_ERR_SYSTEM,
               "rank 1: making a shared memory file");
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    expect_all((struct request){.bytes = 64 << 20, .no_addresses = true}, ZERO_ERR_NOMEM, "rank 1: mapping");
#endif
}

/* --- arguments --- */

static void other_name(struct rank *me)
{
    struct fixture o;
    struct zr_comm *c = NULL;
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_shm, 0, LONG_MS, 0) == 0, "%s", zr_error_text());
    RANK_CHECK(me, zr_shm_open(o.rdv, o.dev, NULL, &o.group, ZR_ROLE_GATHER, 0, &c) == ZERO_ERR_ARG,
               "timeout 0");
    int err = zr_shm_open(o.rdv, o.dev, NULL, &o.group, me->w.rank == 1 ? ZR_ROLE_REDUCE : ZR_ROLE_GATHER,
                          LONG_MS, &c);
    RANK_CHECK(me, !err, "%s", zr_error_text());
    char *base = NULL;
    note_error(me, fixture_arena(c, 4096, &base));
    RANK_CHECK(me, !base, "there is an arena");
    zr_comm_close(c);
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

/* Messages name ranks of the world, not places. Rank 0 is at place 1 of the first group. */
static void differs_in_group(struct rank *me)
{
    static const struct fixture_groups groups = {3, {2, 0, 1, 4, 3}};
    struct fixture o;
    RANK_CHECK(me, fixture_open_groups(&o, &me->w, &groups, &fixture_shm, 1, LONG_MS, 4096) == 0, "%s",
               zr_error_text());
    struct zr_tag tag = {.unit = me->w.rank == 0 ? 7 : 5};
    RANK_CHECK(me, zr_comm_exchange(o.comm[0], o.stream[0], 0, 8, &tag) == 0, "%s", zr_error_text());
    o.dev->ops->stream_sync(o.stream[0]);
    note_status(me, o.comm[0]);
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_differs_in_group(void **state)
{
    struct rank *r = run_ranks(true, 5, differs_in_group, NULL, NULL);
    for (int i = 0; i < 3; i++)
        if (!strstr(r[i].note, "rank 0 is at exchange seq 1 unit 7") &&
            !strstr(r[i].note, "exchange seq 1 unit 7: rank "))
            fail_msg("rank %d: %s", i, r[i].note);
    for (int i = 3; i < 5; i++)
        expect_rank(&r[i], 0, "");
}

static void test_other_name(void **state)
{
    struct rank *r = run_ranks(true, 2, other_name, NULL, NULL);
    for (int i = 0; i < 2; i++)
        expect_rank(&r[i], ZERO_ERR_MISMATCH, "rank 0 opens communicator \"gather\", rank 1 \"reduce\"");
}

static void refuse_arguments(struct rank *me)
{
    bool self = *(int *)me->arg;
    struct fixture o;
    struct zr_tag tag = {.unit = 0};
    RANK_CHECK(me, fixture_open(&o, &me->w, self ? &fixture_self : &fixture_shm, 1, LONG_MS, 65536) == 0,
               "%s", zr_error_text());
    struct zr_comm *c = o.comm[0];
    struct zr_stream *s = o.stream[0];
    int64_t w = me->w.world;
    /* lists of three places and of one: a place that is no multiple of 64, and one that ends before it
     * begins */
    const int64_t of_three[] = {10, 138, 138, 394}, of_one[] = {10, 394};
    const int64_t odd_three[] = {0, 100, 128, 200}, odd_one[] = {0, 100};
    const int64_t back_three[] = {0, 64, 0, 384}, back_one[] = {0, -64};
    const int64_t *places = w > 1 ? of_three : of_one, *odd = w > 1 ? odd_three : odd_one,
                  *back = w > 1 ? back_three : back_one;
    const struct {
        struct zr_gather_seg seg;
        const char *text;
    } gathers[] = {
        {{0, 0, false, {100, 100}}, "cut.each is 100"},
        {{0, 0, false, {-128, 0}}, "cut.each is -128"},
        {{0, 0, false, {128, 128 * w + 1}}, "cut.total is"},
        {{0, 0, false, {128, -1}}, "cut.total is -1"},
        {{0, 64, true, {128, 128}}, "in place, but src is 0 and dst 64"},
        {{0, 65536, false, {128, 128}}, "dst is 65536"},
        {{-8, 0, false, {128, 128}}, "src is -8"},
        {{65536 - 127, 0, false, {128, 128}}, "src is 65409"},
        {{0, INT64_MAX - 3, false, {128, 128}}, "dst is"},
        {{0, 0, false, {w > 1 ? INT64_C(1) << 62 : 100, 128}}, "cut.each is"},
        {{0, 0, false, {.each = 128, .total = 384, .at = places}}, "cut.each is 128"},
        {{0, 0, false, {.total = 384, .at = places, .at_bytes = -1}}, "at_bytes -1"},
        {{0, 0, false, {.total = 448, .at = places}},
         "the last, ends at byte 384: cut.total, 448, is allowed"},
        {{0, 0, false, {.total = 320, .at = places}}, "ends at byte 384"},
        {{0, 0, false, {.total = 200, .at = odd}}, w > 1 ? "place 0 ends at byte 100" : "ends at byte 100"},
        {{0, 0, false, {.total = 384, .at = back}}, w > 1 ? "place 1 ends at byte 0" : "ends at byte -64"},
        {{65536 - 64, 0, false, {.total = 384, .at = places}}, "src is 65472"},
    };
    for (size_t i = 0; i < sizeof gathers / sizeof *gathers; i++)
        RANK_CHECK(me,
                   zr_comm_all_gather(c, s, &gathers[i].seg, 1, &tag) == ZERO_ERR_ARG &&
                       strstr(zr_error_text(), gathers[i].text),
                   "gather %zu: \"%s\"", i, zr_error_text());
    const struct {
        struct zr_reduce_seg seg;
        int code;
        const char *text;
    } reduces[] = {
        {{0, 0, {100, 100}, ZERO_F32, false}, ZERO_ERR_ARG, "cut.each is 100"},
        {{0, 0, {128, 126}, ZERO_F32, false}, ZERO_ERR_ARG, "whole aligned elements"},
        {{2, 0, {128, 128}, ZERO_F32, false}, ZERO_ERR_ARG, "src 2"},
        {{0, 2, {128, 128}, ZERO_BF16, false}, ZERO_ERR_ARG, "dst 2"},
        {{0, 0, {128, 128}, ZERO_F16, false}, ZERO_ERR_NOTSUP, "dtype is f16"},
        {{0, 65536 - 128, {128, 128}, ZERO_BF16, false}, ZERO_ERR_ARG, "dst is 65408 with 256 bytes"},
        {{65536 - 64, 0, {128, 128}, ZERO_BF16, false}, ZERO_ERR_ARG, "src is 65472"},
    };
    for (size_t i = 0; i < sizeof reduces / sizeof *reduces; i++)
        RANK_CHECK(me,
                   zr_comm_reduce_scatter(c, s, &reduces[i].seg, 1, &tag) == reduces[i].code &&
                       strstr(zr_error_text(), reduces[i].text),
                   "reduce %zu: \"%s\"", i, zr_error_text());
    RANK_CHECK(
        me, zr_comm_broadcast(c, s, 0, 8, (int)w, &tag) == ZERO_ERR_ARG && strstr(zr_error_text(), "root is"),
        "%s", zr_error_text());
    RANK_CHECK(me, zr_comm_broadcast(c, s, 65530, 8, 0, &tag) == ZERO_ERR_ARG, "%s", zr_error_text());
    RANK_CHECK(me, zr_comm_exchange(c, s, 8, 65536 / w, &tag) == ZERO_ERR_ARG, "%s", zr_error_text());
    RANK_CHECK(me, zr_comm_exchange(c, s, 0, INT64_MAX / 2, &tag) == ZERO_ERR_ARG, "%s", zr_error_text());
    RANK_CHECK(me, zr_comm_agree(c, s, 4, 1, 1, &tag) == ZERO_ERR_ARG, "%s", zr_error_text());
    RANK_CHECK(me, zr_comm_agree(c, s, 0, -1, 1, &tag) == ZERO_ERR_ARG, "%s", zr_error_text());
    RANK_CHECK(me, zr_comm_agree(c, s, 0, INT32_MAX, INT32_MAX, &tag) == ZERO_ERR_ARG, "%s", zr_error_text());
    RANK_CHECK(me, zr_comm_agree(c, s, 65536 - 8, 1, 1, &tag) == ZERO_ERR_ARG, "%s", zr_error_text());
    const struct {
        int64_t src, dst, bytes;
        const char *text;
    } parts[] = {
        {-8, 4096, 64, "offset -8"},
        {0, 65536 - 8, 64, "offset 65528"},
        {4096, INT64_MAX - 8, 64, "offset 9223372036854775799"},
        {0, 4096, -1, "-1 bytes"},
        {0, 4096, INT64_MAX / 2, "4611686018427387903 bytes"},
        {64, 64, 64, "no overlap is allowed"},
        {4096, 4096 + 63, 64, "no overlap is allowed"},
        {4096, 4096 - 63, 64, "no overlap is allowed"},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        RANK_CHECK(me,
                   zr_comm_all_to_all(c, s, parts[i].src, parts[i].dst, parts[i].bytes, &tag) ==
                           ZERO_ERR_ARG &&
                       strstr(zr_error_text(), "all_to_all: ") && strstr(zr_error_text(), parts[i].text),
                   "all_to_all %zu: \"%s\"", i, zr_error_text());
        RANK_CHECK(me,
                   zr_comm_shift(c, s, parts[i].src, parts[i].dst, parts[i].bytes, 1, &tag) == ZERO_ERR_ARG &&
                       strstr(zr_error_text(), "shift: ") && strstr(zr_error_text(), parts[i].text),
                   "shift %zu: \"%s\"", i, zr_error_text());
    }
    RANK_CHECK(me, zr_comm_all_to_all(c, s, 0, 64 * w - (w > 1), 64, &tag) == (w > 1 ? ZERO_ERR_ARG : 0),
               "%s", zr_error_text());
    const struct zr_arrays arrays = {&o, &o, 1, ZERO_F32};
    RANK_CHECK(me,
               zr_comm_arrays(c, s, ZR_OP_ALL_REDUCE, &arrays, &tag) == ZERO_ERR_ARG &&
                   strstr(zr_error_text(), "all_reduce: 1 elements at"),
               "%s", zr_error_text());
    /* A refused operation has no number: the next one is the same on all ranks. */
    if (me->w.rank == 0)
        RANK_CHECK(me, zr_comm_exchange(c, s, -1, 8, &tag) == ZERO_ERR_ARG, "%s", zr_error_text());
    RANK_CHECK(me, zr_comm_exchange(c, s, 0, 8, &tag) == 0, "%s", zr_error_text());
    o.dev->ops->stream_sync(s);
    note_status(me, c);
    RANK_CHECK(me, me->code == 0, "%s", me->note);
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_arguments(void **state)
{
    int self = 0;
    run_ranks(true, 3, refuse_arguments, &self, NULL);
    run_ranks(true, 1, refuse_arguments, &self, NULL);
    self = 1;
    run_ranks(true, 1, refuse_arguments, &self, NULL);
}

int main(void)
{
    /* Tests that fork come before tests that start threads in this process. */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_operations_differ_processes),
        cmocka_unit_test(test_death),
        cmocka_unit_test(test_arena_refused),
        cmocka_unit_test(test_other_name),
        cmocka_unit_test(test_differs_in_group),
        cmocka_unit_test(test_arguments),
        cmocka_unit_test(test_abort_early),
        cmocka_unit_test(test_stays_away),
        cmocka_unit_test(test_waits_elsewhere),
        cmocka_unit_test(test_waits_around),
        cmocka_unit_test(test_waits_behind),
        cmocka_unit_test(test_close_early),
        cmocka_unit_test(test_abort),
        cmocka_unit_test(test_operations_differ_threads),
        cmocka_unit_test(test_abort_self),
    };
    return cmocka_run_group_tests_name("communicators at fault", tests, NULL, NULL);
}
