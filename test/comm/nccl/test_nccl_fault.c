/* SPDX-License-Identifier: Apache-2.0 */
/* test_nccl_fault.c: tests that failures among open NCCL ranks are errors with cause and place. Runs over
 * the stand-ins for CUDA and NCCL. */
#include "test/cmocka.h"
#include "test/comm/nccl/nccl_custom.h"
#include "test/stand_in/nccl_stand_in.h"
#include "test/stand_in/stand_in.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- what goes wrong on the way --- */

static void poison(struct fixture *o, int k)
{
    char *p = malloc(ARENA_BYTES);
    memset(p, 0xff, ARENA_BYTES);
    fixture_store(o, k, p, ARENA_BYTES);
    free(p);
}

static bool is_poison(struct fixture *o, int k)
{
    char *p = malloc(ARENA_BYTES);
    bool is = fixture_fetch(o, k, p, ARENA_BYTES) == 0;
    for (int i = 0; i < ARENA_BYTES; i++)
        is &= p[i] == (char)0xff;
    free(p);
    return is;
}

/* After a failure, operations do nothing and the first cause is kept. */
static bool is_over(struct rank *me, struct fixture *o, int k)
{
    struct zr_comm *c = o->comm[k];
    struct zr_tag tag = {.unit = 3};
    char again[1024];
    if (zr_comm_broadcast(c, o->stream[k], 0, 64, 0, &tag) ||
        zr_comm_exchange(c, o->stream[k], 0, 64, &tag) || o->dev->ops->stream_sync(o->stream[k]))
        return false;
    c->ops->abort(c, ZERO_ERR_IO, "a later cause");
    return zr_comm_status(c, again, sizeof again) == me->code && strcmp(again, me->note) == 0 &&
           is_poison(o, k);
}

static void stay_away(struct rank *me)
{
    struct fixture o;
    struct zr_tag tag = {.unit = 4};
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_custom, 2, LONG_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    struct zr_comm *c = o.comm[1];
    RANK_CHECK(me, zr_comm_broadcast(c, o.stream[1], 0, 64, 1, &tag) == 0, "%s", zr_error_text());
    o.dev->ops->stream_sync(o.stream[1]);
    poison(&o, 1);
    RANK_CHECK(me, all_at(me, 1), "a rank is missing");
    tag.unit = 3;
    if (me->w.rank != 2) {
        RANK_CHECK(me, zr_comm_exchange(c, o.stream[1], 0, 64, &tag) == 0, "%s", zr_error_text());
        o.dev->ops->stream_sync(o.stream[1]); /* the abort ends it */
        note_status(me, c);
        RANK_CHECK(me, is_over(me, &o, 1), "it is not over");
    }
    RANK_CHECK(me, all_at(me, 2), "a rank waits for ever");
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_stays_away(void **state)
{
    for (int fixed = 0; fixed < 2; fixed++) {
        customize(fixed, SHORT_MS);
        struct rank *r = run_ranks(false, 4, stay_away, NULL, NULL);
        for (int i = 0; i < 4; i++)
            if (i != 2)
                expect_rank(&r[i], ZERO_ERR_TIMEOUT,
                            "exchange seq 2 unit 3: waited 800 ms (timeout_ms) for the other ranks");
    }
}

/* --- inside an all-to-all or a shift --- */

/* What befalls rank 2: it does not come, or its k-th ncclSend fails. */
struct trouble {
    enum zr_op op;
    bool of_arrays;
    int k;
};

static int put_parts(struct fixture *o, const struct trouble *t, const struct zr_tag *tag)
{
    enum { FROM = 0, TO = 16384, PART = 2048, DISTANCE = 1 };
    struct zr_comm *c = o->comm[1];
    const struct zr_arrays a = {o->base[1] + TO, o->base[1] + FROM, PART / 4, ZERO_F32, PART / 4, DISTANCE};
    if (t->of_arrays)
        return zr_comm_arrays(c, o->stream[1], t->op, &a, tag);
    return t->op == ZR_OP_SHIFT ? zr_comm_shift(c, o->stream[1], FROM, TO, PART, DISTANCE, tag)
                                : zr_comm_all_to_all(c, o->stream[1], FROM, TO, PART, tag);
}

static void lose_parts(struct rank *me)
{
    const struct trouble *t = me->arg;
    struct fixture o;
    const struct zr_tag tag = {.unit = 3};
    bool odd = me->w.rank == 2;
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_custom, 2, LONG_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    poison(&o, 1);
    RANK_CHECK(me, all_at(me, 1), "a rank is missing");
    if (odd && t->k)
        nccl_stand_in_fail("ncclSend", 2, t->k, ncclInternalError);
    RANK_CHECK(me, all_at(me, 2), "a rank is missing");
    if (!odd || t->k) {
        int err = put_parts(&o, t, &tag);
        RANK_CHECK(me, err == (odd ? ZERO_ERR_SYSTEM : 0), "%d: %s", err, zr_error_text());
        o.dev->ops->stream_sync(o.stream[1]); /* the abort ends it */
        note_status(me, o.comm[1]);
        RANK_CHECK(me, !me->code || is_over(me, &o, 1), "it is not over");
    }
    RANK_CHECK(me, all_at(me, 3), "a rank waits for ever");
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

/* Every rank's operation ends. In a shift, only the neighbours of rank 2 need it: rank 3 takes from it, and
 * rank 1's message waits for it. */
static void test_loses_parts(void **state)
{
    for (int i = 0; i < 8; i++) {
        struct trouble t = {i & 1 ? ZR_OP_SHIFT : ZR_OP_ALL_TO_ALL, i & 2, i & 4 ? (i & 1 ? 1 : 2) : 0};
        char failed[96], waited[96];
        customize(i & 1, SHORT_MS);
        nccl_stand_in_the_machine()->sends_wait = true;
        struct rank *r = run_ranks(false, 4, lose_parts, &t, NULL);
        snprintf(failed, sizeof failed, "%s seq 1 unit 3: internal error: the stand-in", zr_op_name(t.op));
        snprintf(waited, sizeof waited, "%s seq 1 unit 3: waited 800 ms (timeout_ms)", zr_op_name(t.op));
        if (t.k)
            expect_rank(&r[2], ZERO_ERR_SYSTEM, failed);
        expect_rank(&r[1], ZERO_ERR_TIMEOUT, waited);
        expect_rank(&r[3], ZERO_ERR_TIMEOUT, waited);
        expect_rank(&r[0], t.op == ZR_OP_SHIFT ? 0 : ZERO_ERR_TIMEOUT, t.op == ZR_OP_SHIFT ? "" : waited);
        nccl_stand_in_end();
    }
}

static void nap(void *arg)
{
    sleep_ms(*(int *)arg);
}

/* Work that the stream has to do first does not count towards the timeout. */
static void slow_compute(struct rank *me)
{
    struct fixture o;
    struct zr_tag tag = {.unit = 4};
    int ms = 2 * SHORT_MS;
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_custom, 2, LONG_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    for (int k = 0; k < 2; k++) {
        RANK_CHECK(me, o.dev->ops->call(o.stream[k], nap, &ms, sizeof ms) == 0, "%s", zr_error_text());
        RANK_CHECK(me, zr_comm_exchange(o.comm[k], o.stream[k], 0, 64, &tag) == 0, "%s", zr_error_text());
        /* one after the other: two naps take turns, and each rank might begin with another */
        o.dev->ops->stream_sync(o.stream[k]);
        note_status(me, o.comm[k]);
        RANK_CHECK(me, me->code == 0, "%s", me->note);
    }
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_slow_compute(void **state)
{
    customize(false, SHORT_MS);
    run_ranks(false, 2, slow_compute, NULL, NULL);
}

/* Connecting takes longer than an operation may. It is over when the arenas are attached, and leaves them
 * zero. */
static void slow_to_connect(struct rank *me)
{
    struct fixture o;
    struct zr_tag tag = {.unit = 4};
    static const char zeros[ARENA_BYTES];
    char seen[ARENA_BYTES];
    const struct zr_gather_seg gather = {.in_place = true, .cut = {256, 256 * me->w.world}};
    const struct zr_reduce_seg reduce = {.dst = 8192, .cut = {128, 128 * me->w.world}, .dtype = ZERO_F32};
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_custom, 2, LONG_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    for (int k = 0; k < 2; k++)
        RANK_CHECK(me, !fixture_fetch(&o, k, seen, ARENA_BYTES) && !memcmp(seen, zeros, ARENA_BYTES),
                   "arena %d is not zero", k);
    RANK_CHECK(me, zr_comm_all_gather(o.comm[0], o.stream[0], &gather, 1, &tag) == 0, "%s", zr_error_text());
    RANK_CHECK(me, zr_comm_reduce_scatter(o.comm[1], o.stream[1], &reduce, 1, &tag) == 0, "%s",
               zr_error_text());
    RANK_CHECK(me, zr_comm_exchange(o.comm[1], o.stream[1], 0, 64, &tag) == 0, "%s", zr_error_text());
    RANK_CHECK(me, zr_comm_agree(o.comm[1], o.stream[1], 0, 3, 2, &tag) == 0, "%s", zr_error_text());
    for (int k = 0; k < 2; k++) {
        o.dev->ops->stream_sync(o.stream[k]);
        note_status(me, o.comm[k]);
        RANK_CHECK(me, me->code == 0, "%s", me->note);
    }
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_slow_to_connect(void **state)
{
    for (int fixed = 0; fixed < 2; fixed++) {
        customize(fixed, SHORT_MS);
        custom.change = wait_long_to_start;
        nccl_stand_in_the_machine()->connect_ms = 2 * SHORT_MS;
        run_ranks(false, 3, slow_to_connect, NULL, NULL);
        nccl_stand_in_end();
    }
}

/* Calls that are left behind end after some time, but ThreadSanitizer does not know that. With it, what
 * they use is neither closed nor used again. */
#ifdef __SANITIZE_THREAD__
enum { CLOSES_LEFT = false };
#else
enum { CLOSES_LEFT = true };
#endif

/* Devices of ranks whose calls into NCCL are left behind. These use them later. */
static struct zr_device *left[STAND_IN_MAX_DEVICES];

static void close_left(int n)
{
    for (int i = 0; i < n && CLOSES_LEFT; i++)
        left[i]->ops->close(left[i]);
}

/* Opens the fixture, which fails while calls into NCCL are under way, and closes the communicators. */
static void fail_to_open(struct rank *me)
{
    struct fixture o;
    int64_t from = zr_now_ns();
    note_error(me, fixture_open(&o, &me->w, &fixture_custom, 2, LONG_MS, ARENA_BYTES));
    RANK_CHECK(me, zr_now_ns() - from < LONG_MS / 2 * INT64_C(1000000), "it took long");
    left[me->w.rank] = o.dev;
    for (int k = 0; k < 2; k++) {
        o.dev->ops->stream_close(o.stream[k]);
        o.stream[k] = NULL;
    }
    RANK_CHECK(me, all_at(me, 1), "a rank waits for ever");
    o.dev = NULL;
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void start_in_less(struct zr_nccl_options *opt, int rank)
{
    (void)rank;
    opt->start_timeout_ms = SHORT_MS;
}

/* Connecting takes longer than the ranks may take to start. The threads that connect go on when the
 * communicator has no arena any more. */
static void test_too_slow_to_connect(void **state)
{
    for (int fixed = 0; fixed < 1 + CLOSES_LEFT; fixed++) {
        customize(fixed, LONG_MS);
        custom.change = start_in_less;
        nccl_stand_in_the_machine()->connect_ms = 2 * SHORT_MS;
        struct rank *r = run_ranks(false, 3, fail_to_open, NULL, NULL);
        sleep_ms(6 * SHORT_MS); /* until all have connected */
        close_left(3);
        for (int i = 0; i < 3; i++)
            assert_int_equal(r[i].code, ZERO_ERR_TIMEOUT);
        assert_non_null(strstr(r[0].note, "the first operations of NCCL's gather communicator"));
    }
    expected_misuse = -1; /* the memory of what was left behind */
}

/* NCCL fails on one rank, while the others wait for it inside their first operation. */
static void test_fails_to_connect(void **state)
{
    customize(false, LONG_MS);
    setenv("NCCL_STAND_IN_CONNECT", "1", 1);
    nccl_stand_in_fail("ncclAllGather", 1, 1, ncclInternalError);
    struct rank *r = run_ranks(false, 3, fail_to_open, NULL, NULL);
    nccl_stand_in_end(); /* the calls of the other ranks return */
    unsetenv("NCCL_STAND_IN_CONNECT");
    sleep_ms(SHORT_MS);
    close_left(3);
    expect_rank(&r[1], ZERO_ERR_SYSTEM,
                "the first operations of NCCL's gather communicator: internal error: the stand-in says so");
    expect_rank(&r[0], ZERO_ERR_SYSTEM, "rank 1: the first operations of NCCL's gather communicator");
    expect_rank(&r[2], ZERO_ERR_SYSTEM, "rank 1: the first operations of NCCL's gather communicator");
    expected_misuse = -1; /* the memory of what was left behind */
}

enum difference {
    OTHER_UNIT,
    OTHER_STEP,
    OTHER_HASH,
    OTHER_ACCUMULATE,
    OTHER_ORDER,
    ONE_LESS,
    N_DIFFERENCES
};

struct case_of_difference {
    enum difference what;
    bool by_agree;
};

/* NCCL cannot notice these differences. The bytes move, and the next exchange or agreement reports them. */
static void differ(struct rank *me)
{
    const struct case_of_difference *now = me->arg;
    enum difference what = now->what;
    bool odd = me->w.rank == 2;
    struct fixture o;
    struct zr_tag tag = {.unit = 14, .step = 7, .call_hash = 99};
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_custom, 2, LONG_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    struct zr_comm *c = o.comm[1];
    for (int i = 0; i < 20; i++) /* more than are compared at a time */
        RANK_CHECK(me, zr_comm_exchange(c, o.stream[1], 0, 64, &tag) == 0, "%s", zr_error_text());
    o.dev->ops->stream_sync(o.stream[1]);
    RANK_CHECK(me, zr_comm_status(c, me->note, sizeof me->note) == 0, "%s", me->note);
    RANK_CHECK(me, all_at(me, 1), "a rank is missing");
    struct zr_reduce_seg r = {.src = 0, .dst = 8192, .cut = {128, 384}, .dtype = ZERO_F32};
    if (odd) {
        tag.unit -= what == OTHER_UNIT;
        tag.step += what == OTHER_STEP;
        tag.call_hash += what == OTHER_HASH;
        r.accumulate = what == OTHER_ACCUMULATE;
    }
    if (what == OTHER_ORDER)
        r.cut = (struct zr_cut){0}, tag.unit = odd;
    if (what != ONE_LESS || !odd) /* of nothing: NCCL is not called, so nobody hangs */
        RANK_CHECK(me, zr_comm_reduce_scatter(c, o.stream[1], &r, what == ONE_LESS ? 0 : 1, &tag) == 0, "%s",
                   zr_error_text());
    if (what == OTHER_ORDER) {
        tag.unit = !odd;
        RANK_CHECK(me, zr_comm_reduce_scatter(c, o.stream[1], &r, 1, &tag) == 0, "%s", zr_error_text());
    }
    tag = (struct zr_tag){.unit = -1, .step = 8};
    int err = now->by_agree ? zr_comm_agree(c, o.stream[1], 0, 3, 2, &tag)
                            : zr_comm_exchange(c, o.stream[1], 0, 64, &tag);
    RANK_CHECK(me, err == 0, "%s", zr_error_text());
    o.dev->ops->stream_sync(o.stream[1]);
    wait_failed(c);
    note_status(me, c);
    RANK_CHECK(me, zr_comm_status(o.comm[0], NULL, 0) == ZERO_ERR_MISMATCH, "the other communicator");
    RANK_CHECK(me, all_at(me, 2), "a rank waits for ever");
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_differ(void **state)
{
    static const char *const said[2][2] = {
        {"rank 2 issued different collectives from rank 0 up to exchange 21",
         "rank 2 issued 21 collectives up to its exchange 21, rank 0 22 up to its exchange 21"},
        {"ranks issued different collectives up to a comparison (all 2",
         "one rank issued 22 collectives up to a comparison, another 21"}};
    for (int k = 0; k < 2 * N_DIFFERENCES; k++) {
        struct case_of_difference d = {(enum difference)(k / 2), k % 2};
        customize(k / 2 % 2, LONG_MS);
        struct rank *r = run_ranks(false, 3, differ, &d, NULL);
        for (int i = 0; i < 3; i++)
            expect_rank(&r[i], ZERO_ERR_MISMATCH, said[d.by_agree][d.what == ONE_LESS]);
    }
}

/* Sizes differ so that NCCL hangs. */
static void hang(struct rank *me)
{
    struct fixture o;
    struct zr_tag tag = {.unit = 14};
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_custom, 2, LONG_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    struct zr_comm *c = o.comm[0];
    int64_t n = me->w.rank == 1 ? 128 : 256;
    struct zr_gather_seg g = {.in_place = true, .cut = {n, n * me->w.world}};
    RANK_CHECK(me, zr_comm_all_gather(c, o.stream[0], &g, 1, &tag) == 0, "%s", zr_error_text());
    o.dev->ops->stream_sync(o.stream[0]);
    note_status(me, c);
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_hang(void **state)
{
    customize(false, SHORT_MS);
    struct rank *r = run_ranks(false, 2, hang, NULL, NULL);
    for (int i = 0; i < 2; i++)
        expect_rank(&r[i], ZERO_ERR_TIMEOUT, "all_gather seq 1 unit 14: waited 800 ms (timeout_ms)");
    expected_misuse = 1;
}

/* An NCCL call returns an error in the middle; later, NCCL reports an asynchronous error. */
static void nccl_fails(struct rank *me)
{
    struct fixture o;
    struct zr_tag tag = {.unit = 5};
    bool later = *(bool *)me->arg, mine = me->w.rank == 1;
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_custom, 2, LONG_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    struct zr_comm *c = o.comm[1];
    poison(&o, 1);
    RANK_CHECK(me, all_at(me, 1), "a rank is missing");
    if (mine && !later)
        nccl_stand_in_fail("ncclAllGather", 1, 2, ncclInternalError); /* in the comparison */
    if (!mine || !later) {
        int err = zr_comm_exchange(c, o.stream[1], 0, 64, &tag);
        RANK_CHECK(me, err == (mine ? ZERO_ERR_SYSTEM : 0), "%d: %s", err, zr_error_text());
    }
    RANK_CHECK(me, all_at(me, 2), "a rank is missing");
    if (mine && later)
        nccl_stand_in_async(0, ncclRemoteError);
    o.dev->ops->stream_sync(o.stream[1]);
    note_status(me, c);
    RANK_CHECK(me, (mine && later) || is_over(me, &o, 1), "it is not over");
    RANK_CHECK(me, all_at(me, 3), "a rank waits for ever");
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_nccl_fails(void **state)
{
    bool later = false;
    customize(false, SHORT_MS);
    struct rank *r = run_ranks(false, 2, nccl_fails, &later, NULL);
    expect_rank(&r[1], ZERO_ERR_SYSTEM, "exchange seq 1 unit 5: internal error: the stand-in says so");
    expect_rank(&r[0], ZERO_ERR_TIMEOUT, "exchange seq 1 unit 5: waited 800 ms (timeout_ms)");
    later = true;
    customize(false, LONG_MS);
    r = run_ranks(false, 2, nccl_fails, &later, NULL);
    expect_rank(&r[0], ZERO_ERR_PEER, "NCCL's reduce communicator: remote process exited");
}

/* A failure of one communicator also ends what waits on the other. The program may be blocked in its own
 * wait for that one, and not poll. */
static void query_fails(struct rank *me)
{
    struct fixture o;
    struct zr_tag tag = {.unit = 5};
    int first = *(const int *)me->arg;
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_custom, 2, LONG_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    for (int i = 0; i < 2 && me->w.rank == 1; i++) {
        int k = i ^ first;
        if (i == 1)
            stand_in_fail("cudaEventQuery", 1, cudaErrorLaunchFailure, false);
        RANK_CHECK(me, zr_comm_exchange(o.comm[k], o.stream[k], 0, 64, &tag) == 0, "%s", zr_error_text());
    }
    for (int k = 0; k < 2 && me->w.rank == 1; k++) {
        o.dev->ops->stream_sync(o.stream[k]); /* the abort ends it */
        note_status(me, o.comm[k]);
        RANK_CHECK(me, me->code == ZERO_ERR_SYSTEM, "communicator %d: %d \"%s\"", k, me->code, me->note);
    }
    RANK_CHECK(me, all_at(me, 1), "a rank waits for ever");
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_query_fails(void **state)
{
    for (int first = 0; first < 2; first++) {
        customize(false, LONG_MS);
        struct rank *r = run_ranks(false, 2, query_fails, &first, NULL);
        expect_rank(&r[1], ZERO_ERR_SYSTEM,
                    "exchange seq 1 unit 5: GPU 1: cudaEventQuery: cudaErrorLaunchFailure");
    }
}

/* --- abort --- */

static void abort_while_waiting(struct rank *me)
{
    struct fixture o;
    struct zr_tag tag = {.unit = -1};
    pthread_t id;
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_custom, 2, LONG_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    poison(&o, 0);
    for (int k = 0; k < 2 && me->w.rank == 1; k++) {
        struct zr_comm *c = o.comm[k];
        pthread_create(&id, NULL, abort_soon, c);
        int err = zr_comm_exchange(c, o.stream[k], 0, 64, &tag);
        RANK_CHECK(me, err == 0, "%s", zr_error_text());
        o.dev->ops->stream_sync(o.stream[k]);
        pthread_join(id, NULL);
        note_status(me, c);
    }
    RANK_CHECK(me, me->w.rank != 1 || is_over(me, &o, 0), "it is not over");
    RANK_CHECK(me, all_at(me, 1), "a rank waits for ever");
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_abort(void **state)
{
    customize(false, LONG_MS);
    struct rank *r = run_ranks(false, 2, abort_while_waiting, NULL, NULL);
    expect_rank(&r[1], ZERO_ERR_ORDER, "the model called out of order");
}

/* The issuing thread hangs in a call into NCCL. ncclCommAbort would free what that call uses, so the
 * communicator is revoked first, and aborted when the call has returned. */
static void hang_inside(struct rank *me)
{
    struct fixture o;
    struct zr_tag tag = {.unit = 6};
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_custom, 2, LONG_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    poison(&o, 1);
    RANK_CHECK(me, all_at(me, 1), "a rank is missing");
    if (me->w.rank == 1) {
        nccl_stand_in_hang("ncclGroupEnd", 1, 1);
        RANK_CHECK(me, zr_comm_exchange(o.comm[1], o.stream[1], 0, 64, &tag) == 0, "%s", zr_error_text());
        note_status(me, o.comm[1]);
        RANK_CHECK(me, is_over(me, &o, 1), "it is not over");
    }
    RANK_CHECK(me, all_at(me, 2), "a rank waits for ever");
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_hang_inside(void **state)
{
    customize(false, SHORT_MS);
    struct rank *r = run_ranks(false, 2, hang_inside, NULL, NULL);
    expect_rank(&r[1], ZERO_ERR_TIMEOUT, "exchange seq 1 unit 6: NCCL has not accepted it after 800 ms");
    struct nccl_stand_in_counts c;
    nccl_stand_in_counts(&c);
    assert_int_equal(c.n_comms, 0);
}

/* The same, but revoking does not return. The communicator is aborted all the same. */
static void test_revoke_sticks(void **state)
{
    customize(false, SHORT_MS);
    nccl_stand_in_the_machine()->revoke_sticks = true;
    struct rank *r = run_ranks(false, 2, hang_inside, NULL, NULL);
    expect_rank(&r[1], ZERO_ERR_TIMEOUT, "exchange seq 1 unit 6: NCCL has not accepted it after 800 ms");
    struct nccl_stand_in_counts c;
    nccl_stand_in_counts(&c);
    assert_int_equal(c.n_comms, 0);
    assert_null(strstr(custom.log, "could not be aborted"));
    expected_misuse = 3; /* rank 1's memory: both arenas and the comparison buffers on the host */
}

/* NCCL cannot end some kernels. Then libzero no longer touches NCCL's objects, and closing does not wait
 * for them. */
static void abort_sticks(struct rank *me)
{
    struct fixture o;
    struct zr_tag tag = {.unit = 2};
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_custom, 2, LONG_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    struct zr_comm *c = o.comm[1];
    if (me->w.rank == 0)
        RANK_CHECK(me, zr_comm_exchange(c, o.stream[1], 0, 64, &tag) == 0, "%s", zr_error_text());
    if (me->w.rank == 0)
        wait_failed(c);
    note_status(me, c);
    zr_comm_close(c);
    o.comm[1] = NULL;
    RANK_CHECK(me, all_at(me, 1), "a rank waits for ever");
    if (me->w.rank == 0) {
        zr_comm_close(o.comm[0]);
        o.comm[0] = NULL;
        RANK_CHECK(me, wait_stage(&me->all[1], 2), "rank 1 waits for ever");
        nccl_stand_in_end(); /* ends the kernel, so that the stream can end */
        RANK_CHECK(me, fixture_close(&o), "handles are left");
        return;
    }
    o.dev->ops->stream_sync(o.stream[1]);
    RANK_CHECK(me, fixture_close(&o), "handles are left");
    atomic_store(&me->stage, 2);
}

static void test_abort_sticks(void **state)
{
    customize(false, SHORT_MS);
    nccl_stand_in_the_machine()->abort_sticks = true;
    struct rank *r = run_ranks(false, 2, abort_sticks, NULL, NULL);
    expect_rank(&r[0], ZERO_ERR_TIMEOUT, "exchange seq 1 unit 2: waited 800 ms (timeout_ms)");
    expect_rank(&r[1], 0, "");
    assert_non_null(
        strstr(custom.log, "NCCL's reduce communicator could not be aborted: its memory is not freed"));
    assert_non_null(strstr(custom.log, "nccl reduce: a call into NCCL has not returned"));
    expected_misuse = 3; /* rank 0's memory: both arenas and the comparison buffers on the host */
}

/* --- more operations ahead than are kept --- */

enum { KEPT = 256 };

/* Rank 1 begins only when rank 0, which checks for room before each operation, finds none. */
static void deep_queue(struct rank *me)
{
    enum { N_OPS = 700 };
    struct fixture o;
    struct zr_comm_stats s;
    struct zr_tag tag = {.unit = 1};
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_custom, 2, LONG_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    struct zr_comm *c = o.comm[1];
    RANK_CHECK(me, me->w.rank == 0 || wait_stage(&me->all[0], 1), "rank 0 finds room for ever");
    for (int i = 0; i < N_OPS; i++) {
        RANK_CHECK(me, i > KEPT || me->w.rank == 1 || c->ops->has_room(c, 1, 0) == (i < KEPT),
                   "room behind %d operations", i);
        if (i == KEPT)
            atomic_store(&me->stage, 1);
        while (!c->ops->has_room(c, 1, 0))
            sleep_ms(1);
        RANK_CHECK(me, zr_comm_exchange(c, o.stream[1], 64 * (i % 100), 32, &tag) == 0, "%s",
                   zr_error_text());
    }
    o.dev->ops->stream_sync(o.stream[1]);
    zr_comm_stats(c, &s);
    RANK_CHECK(me, s.n_exchange == N_OPS && s.wire_bytes == N_OPS * 32, "%lld, %lld bytes",
               (long long)s.n_exchange, (long long)s.wire_bytes);
    RANK_CHECK(me, zr_comm_status(c, me->note, sizeof me->note) == 0, "%s", me->note);
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_deep_queue(void **state)
{
    customize(false, LONG_MS);
    run_ranks(false, 2, deep_queue, NULL, NULL);
}

/* An operation never waits for room: without room it fails the communicator. */
static void never_asks(struct rank *me)
{
    struct fixture o;
    struct zr_tag tag = {.unit = 1};
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_custom, 2, LONG_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    struct zr_comm *c = o.comm[1];
    for (int i = 0; i < KEPT && me->w.rank == 0; i++)
        RANK_CHECK(me, zr_comm_exchange(c, o.stream[1], 0, 32, &tag) == 0, "%s", zr_error_text());
    if (me->w.rank == 0) {
        note_error(me, zr_comm_exchange(c, o.stream[1], 0, 32, &tag));
        RANK_CHECK(me, zr_comm_status(c, NULL, 0) == me->code, "it goes on");
        RANK_CHECK(me, zr_comm_exchange(c, o.stream[1], 0, 32, &tag) == 0, "%s", zr_error_text());
        o.dev->ops->stream_sync(o.stream[1]); /* the abort ends them */
    }
    RANK_CHECK(me, all_at(me, 1), "a rank waits for ever");
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_never_asks(void **state)
{
    customize(false, LONG_MS);
    struct rank *r = run_ranks(false, 2, never_asks, NULL, NULL);
    expect_rank(&r[0], ZERO_ERR_ORDER,
                "exchange seq 257 unit 1: 256 operations are pending, and has_room was not called");
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, nccl_test_start, nccl_test_finish)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_stays_away),
        TEST(test_loses_parts),
        TEST(test_slow_compute),
        TEST(test_slow_to_connect),
        TEST(test_too_slow_to_connect),
        TEST(test_fails_to_connect),
        TEST(test_differ),
        TEST(test_hang),
        TEST(test_nccl_fails),
        TEST(test_query_fails),
        TEST(test_hang_inside),
        TEST(test_abort),
        TEST(test_abort_sticks),
        TEST(test_revoke_sticks),
        TEST(test_deep_queue),
        TEST(test_never_asks),
    };
    return cmocka_run_group_tests_name("nccl at fault", tests, NULL, NULL);
}
