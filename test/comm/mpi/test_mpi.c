/* SPDX-License-Identifier: Apache-2.0 */
/* test_mpi.c: tests MPI communicators over the stand-in. It runs the suite of comm_suite.h, worlds wider
 * than a block of the reduction tree, the program's communicators, failures while opening,
 * and MPI's start and end. */
#include "comm/mpi/mpi_comm.h"
#include "kernels/error.h"
#include "test/cmocka.h"
#include "test/comm/comm_suite.h"
#include "test/comm/mpi/mpi_fixture.h"
#include "test/stand_in/mpi_stand_in.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { TIMEOUT_MS = 60000, ARENA_BYTES = 1 << 16 };

/* --- the suite --- */

static void test_conform(void **state)
{
    static const int worlds[] = {1, 2, 3, 4, 5, 8, 9, 13};
    struct comm_plan p = {.kind = &fixture_mpi, .seed = fresh_seed("mpi"), .n_ops = 30};
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++) {
        mpi_stand_in_the_machine()->short_bytes = i % 2 ? 0 : 4096;
        mpi_run_ranks(worlds[i], comm_suite_conform, &p);
    }
}

static void test_groups(void **state)
{
    struct fixture_groups g = {3, {2, 0, 1, 4, 3}};
    struct comm_plan p = {.kind = &fixture_mpi, .seed = fresh_seed("mpi, groups"), .n_ops = 30, .groups = &g};
    for (int world = 5; world <= 7; world++) {
        mpi_run_ranks(world, comm_suite_conform, &p);
        mpi_run_ranks(world, comm_suite_mixed, &p);
        mpi_run_ranks(world, comm_suite_shared, &p);
        comm_suite_deal(&g, p.seed + (uint64_t)world, world + 1);
    }
}

static void test_mixed(void **state)
{
    struct comm_plan p = {.kind = &fixture_mpi, .seed = fresh_seed("mpi, mixed")};
    for (int world = 2; world <= 5; world++)
        mpi_run_ranks(world, comm_suite_mixed, &p);
}

/* --- hosts with several ranks --- */

struct layout {
    int world;
    int32_t host_of[MAX_RANKS];
    /* sums over all ranks are made host by host; gathers use shared memory */
    bool by_host, shared;
};

static void expect_tiers(struct rank *me)
{
    const struct layout *l = me->arg;
    struct fixture o;
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_mpi, 2, TIMEOUT_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    for (int i = 0; i < 2; i++) {
        const struct zr_mpi *m = (struct zr_mpi *)o.comm[i];
        RANK_CHECK(me, m->sums_by_host == l->by_host && (m->spread.size > 0) == l->shared,
                   "by host %d, shared %d", m->sums_by_host, m->spread.size > 0);
        for (int k = 0; k < me->w.world && l->shared; k++)
            RANK_CHECK(me, (m->peer[k] != NULL) == (l->host_of[k] == l->host_of[me->w.rank]),
                       "rank %d's arena is %p", k, (void *)m->peer[k]);
    }
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

/* The sum of all ranks' sources has the bits of one tree, however ranks lie on hosts. 9 hosts are more
 * than a block of it. */
static void test_hosts(void **state)
{
    static const struct layout layouts[] = {
        {4, {0, 0, 1, 1}, true, true},
        {4, {0, 1, 0, 1}, false, true},
        {4, {0, 1, 2, 3}, false, false},
        {4, {0, 0, 0, 0}, true, true},
        {3, {0, 0, 0}, true, true},
        {5, {0, 0, 1, 1, 2}, false, true},
        {6, {0, 0, 1, 1, 2, 2}, true, true},
        {6, {0, 0, 0, 1, 1, 1}, false, true},
        {8, {0, 0, 0, 0, 1, 1, 1, 1}, true, true},
        {12, {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2}, true, true},
        {18, {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8}, true, true},
    };
    struct comm_plan p = {.kind = &fixture_mpi, .seed = fresh_seed("mpi, hosts"), .n_ops = 20};
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        struct layout l = layouts[i];
        mpi_fixture_hosts(l.world, l.host_of);
        mpi_run_ranks(l.world, expect_tiers, &l);
        mpi_stand_in_the_machine()->short_bytes = i % 2 ? 0 : 4096;
        mpi_run_ranks(l.world, comm_suite_conform, &p);
    }
    mpi_fixture_hosts(0, NULL);
}

/* Groups in any order over hosts, one arena of two groups, and many operations at once. */
static void test_hosts_groups(void **state)
{
    static const int32_t host_of[] = {0, 0, 1, 1, 1, 1, 2, 2};
    struct fixture_groups g;
    struct comm_plan p = {
        .kind = &fixture_mpi, .seed = fresh_seed("mpi, groups on hosts"), .n_ops = 20, .groups = &g};
    for (int world = 5; world <= 8; world++) {
        comm_suite_deal(&g, p.seed + (uint64_t)world, world);
        mpi_fixture_hosts(world, host_of);
        mpi_run_ranks(world, comm_suite_conform, &p);
        mpi_run_ranks(world, comm_suite_mixed, &p);
        mpi_run_ranks(world, comm_suite_shared, &p);
    }
    mpi_fixture_hosts(0, NULL);
}

/* --- MPI's start and end --- */

/* How each rank's program starts MPI, and the error expected then. */
struct beginning {
    bool by_program;
    enum zr_mpi_level level;
    bool finalizes_early;
    int n_in_mpi;
};

static int open_rank(struct rank *me, struct fixture *o, struct zr_mpi_options *opt)
{
    struct zr_role_ask ask[ZR_ROLES];
    int err = fixture_open(o, &me->w, &fixture_self, 0, TIMEOUT_MS, 0);
    mpi_stand_in_be(me->w.rank);
    if (err)
        return err;
    struct zr_mpi_library lib = mpi_fixture_library();
    opt->library = opt->library ? opt->library : &lib;
    opt->timeout_ms = TIMEOUT_MS;
    opt->start_timeout_ms = opt->start_timeout_ms ? opt->start_timeout_ms : TIMEOUT_MS;
    o->group = zr_group_of_all(me->w.rank, me->w.world);
    mpi_fixture_ask(o, ask);
    return mpi_fixture_open(o, opt, ask);
}

static void begin_and_end(struct rank *me)
{
    const struct beginning *b = me->arg;
    struct zr_mpi_options opt = {.timeout_ms = 0};
    struct fixture o;
    if (b->by_program)
        mpi_stand_in_program_init(me->w.rank, b->level);
    for (int round = 0; round < 2; round++) {
        note_error(me, open_rank(me, &o, &opt));
        opt.library = NULL;
        RANK_CHECK(me, fixture_close(&o), "handles are left");
        if (me->code)
            break;
    }
    RANK_CHECK(me, all_at(me, 1), "a rank is missing");
    if (b->by_program)
        mpi_stand_in_program_finalize(me->w.rank);
}

static void expect_all(struct rank *r, int n, int code, const char *text)
{
    for (int i = 0; i < n; i++)
        expect_rank(&r[i], code, text);
}

static void test_levels(void **state)
{
    struct beginning b = {.by_program = true, .level = ZR_MPI_MULTIPLE};
    expect_all(mpi_run_ranks(3, begin_and_end, &b), 3, 0, "");
    b.level = ZR_MPI_SERIALIZED;
    expect_all(mpi_run_ranks(3, begin_and_end, &b), 3, ZERO_ERR_NOTSUP,
               "with MPI_THREAD_SERIALIZED, but MPI_THREAD_MULTIPLE is needed");
    b.by_program = false;
    mpi_stand_in_the_machine()->level = ZR_MPI_SERIALIZED;
    expect_all(mpi_run_ranks(3, begin_and_end, &b), 3, 0, "");
    mpi_stand_in_the_machine()->level = ZR_MPI_FUNNELED_OR_LESS;
    expect_all(mpi_run_ranks(3, begin_and_end, &b), 3, ZERO_ERR_NOTSUP,
               "supports only MPI_THREAD_FUNNELED or less");
}

static void finalize_early(struct rank *me)
{
    struct zr_mpi_options opt = {.timeout_ms = 0};
    struct fixture o;
    struct zr_tag tag = {.unit = 5};
    mpi_stand_in_program_init(me->w.rank, ZR_MPI_MULTIPLE);
    RANK_CHECK(me, open_rank(me, &o, &opt) == 0, "%s", zr_error_text());
    struct zr_stream *s;
    char *base;
    RANK_CHECK(me, o.dev->ops->stream_open(o.dev, ZR_STREAM_QUEUE, "early", NULL, &s) == 0, "%s",
               zr_error_text());
    RANK_CHECK(me, fixture_arena(o.comm[0], ARENA_BYTES, &base) == 0, "%s", zr_error_text());
    RANK_CHECK(me, zr_comm_exchange(o.comm[0], s, 0, 64, &tag) == 0, "%s", zr_error_text());
    o.dev->ops->stream_sync(s);
    RANK_CHECK(me, zr_comm_status(o.comm[0], NULL, 0) == 0, "failed too early");
    RANK_CHECK(me, all_at(me, 1), "a rank is missing");
    mpi_stand_in_program_finalize(me->w.rank);
    RANK_CHECK(me, zr_comm_exchange(o.comm[0], s, 0, 64, &tag) == 0, "%s", zr_error_text());
    o.dev->ops->stream_sync(s);
    note_status(me, o.comm[0]);
    o.dev->ops->stream_close(s);
    RANK_CHECK(me, fixture_close(&o), "handles are left");
    RANK_CHECK(me, all_at(me, 2), "a rank is missing");
    int err = open_rank(me, &o, &(struct zr_mpi_options){.timeout_ms = 0});
    RANK_CHECK(me, err == ZERO_ERR_ORDER && strstr(zr_error_text(), "MPI_Finalize"), "%d \"%s\"", err,
               zr_error_text());
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_finalized_early(void **state)
{
    expect_all(mpi_run_disturbed(3, finalize_early, NULL), 3, ZERO_ERR_ORDER,
               "exchange seq 2 unit 5: the program called MPI_Finalize before zero_unwrap");
}

/* --- ranks that differ from MPI's --- */

/* Opens over the program's communicator in its own order, in a world larger than MPI's, and in a world that
 * MPI does not know. */
static void lend(struct rank *me)
{
    struct mpi_stand_in_comm *c = me->arg;
    struct zr_mpi_options opt = {.user_comm = c};
    struct fixture o;
    char *base;
    struct zr_stream *s;
    struct zr_tag tag = {.unit = 1};
    mpi_stand_in_program_init(me->w.rank, ZR_MPI_MULTIPLE);
    note_error(me, open_rank(me, &o, &opt));
    if (!me->code) {
        RANK_CHECK(me, o.dev->ops->stream_open(o.dev, ZR_STREAM_QUEUE, "user_comm", NULL, &s) == 0, "%s",
                   zr_error_text());
        RANK_CHECK(me, fixture_arena(o.comm[0], ARENA_BYTES, &base) == 0, "%s", zr_error_text());
        base[me->w.rank] = (char)(me->w.rank + 1);
        RANK_CHECK(me, zr_comm_exchange(o.comm[0], s, 0, 1, &tag) == 0, "%s", zr_error_text());
        o.dev->ops->stream_sync(s);
        for (int i = 0; i < me->w.world; i++)
            RANK_CHECK(me, base[i] == i + 1, "byte %d is %d", i, base[i]);
        o.dev->ops->stream_close(s);
    }
    RANK_CHECK(me, fixture_close(&o), "handles are left");
    RANK_CHECK(me, all_at(me, 1), "a rank is missing");
    mpi_stand_in_program_finalize(me->w.rank);
}

static void test_user_comm(void **state)
{
    struct mpi_stand_in_comm c = {4, {2, 0, 3, 1}};
    expect_all(mpi_run_ranks(4, lend, &c), 4, 0, "");
    c = (struct mpi_stand_in_comm){2, {0, 1}};
    expect_all(mpi_run_ranks(3, lend, &c), 3, ZERO_ERR_ARG, "");
    c = (struct mpi_stand_in_comm){.n = 0};
    expect_all(mpi_run_ranks(2, lend, &c), 2, ZERO_ERR_ARG, "MPI_COMM_NULL");
}

/* --- opening that fails on one rank --- */

static void open_with_fault(struct rank *me)
{
    struct zr_mpi_options opt = {.start_timeout_ms = *(int *)me->arg};
    struct fixture o;
    note_error(me, open_rank(me, &o, &opt));
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

/* The rank whose call does not return says later what went wrong. */
static void make_half(struct rank *me)
{
    struct zr_mpi_process *p;
    open_with_fault(me);
    if (me->w.rank != 1)
        return;
    struct zr_mpi_library lib = mpi_fixture_library();
    RANK_CHECK(me, zr_mpi_process_open(&lib, 1500, NULL, NULL, &p) == 0, "%s", zr_error_text());
    int err = zr_mpi_enter(p, 50);
    RANK_CHECK(me, err == ZERO_ERR_TIMEOUT && strstr(zr_error_text(), "half-made"), "%d \"%s\"", err,
               zr_error_text());
    zr_mpi_process_drop(p, NULL, false);
}

static void test_open_fails(void **state)
{
    int timeout_ms = TIMEOUT_MS;
    mpi_stand_in_fail("init", 1, 1, MPI_STAND_IN_OTHER);
    expect_all(mpi_run_disturbed(3, open_with_fault, &timeout_ms), 3, ZERO_ERR_FAILED,
               "beginning MPI stand-in");
    timeout_ms = 1500;
    mpi_stand_in_hang("make", 1, 2);
    expect_all(mpi_run_disturbed(3, make_half, &timeout_ms), 3, ZERO_ERR_TIMEOUT,
               "MPI_Comm_create_group has not returned after 1500 ms");
}

/* MPI_Init_thread does not return on one rank. The other ranks have begun it and go no further. The stuck
 * rank never calls it again, so no later test can use its MPI. */
static void open_twice(struct rank *me)
{
    struct zr_mpi_options opt = {.start_timeout_ms = 1500};
    struct fixture o;
    note_error(me, open_rank(me, &o, &opt));
    RANK_CHECK(me, fixture_close(&o), "handles are left");
    RANK_CHECK(me, all_at(me, 1), "a rank is missing");
    struct zr_mpi_library lib = mpi_fixture_library();
    struct zr_mpi_process *p;
    int err = zr_mpi_process_open(&lib, 1500, NULL, NULL, &p);
    RANK_CHECK(me, me->w.rank != 1 || (err == ZERO_ERR_TIMEOUT && strstr(zr_error_text(), "of an earlier")),
               "%d \"%s\"", err, zr_error_text());
    if (!err)
        zr_mpi_process_drop(p, NULL, true);
}

static void test_init_hangs(void **state)
{
    mpi_stand_in_hang("init", 1, 1);
    expect_all(mpi_run_disturbed(3, open_twice, NULL), 3, ZERO_ERR_TIMEOUT,
               "MPI_Init_thread (it waits for every rank that the launcher has started) has not returned "
               "after 1500 ms");
}

/* Ranks with another MPI, or another release of it. */
static void open_other(struct rank *me)
{
    struct zr_mpi_options opt = {.timeout_ms = TIMEOUT_MS};
    struct fixture o;
    mpi_stand_in_be(me->w.rank);
    struct zr_mpi_library lib = mpi_fixture_library();
    if (me->w.rank == 1)
        strcpy(lib.version, "MPI stand-in 2.0");
    opt.library = &lib;
    note_error(me, open_rank(me, &o, &opt));
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_other_release(void **state)
{
    expect_all(mpi_run_ranks(2, open_other, NULL), 2, ZERO_ERR_MISMATCH,
               "rank 1 has MPI stand-in 2.0, rank 0 has MPI stand-in 1.0");
}

/* --- arenas --- */

static void arenas_differ(struct rank *me)
{
    struct zr_mpi_options opt = {.timeout_ms = TIMEOUT_MS};
    struct fixture o;
    struct zr_arena *a;
    RANK_CHECK(me, open_rank(me, &o, &opt) == 0, "%s", zr_error_text());
    note_error(me, zr_comm_arena(o.comm[0], me->w.rank == 1 ? 8192 : 4096, &a));
    /* The sums' chunks do not fit. */
    RANK_CHECK(me, zr_comm_arena(o.comm[1], 4096, &a) == 0, "%s", zr_error_text());
    int err = zr_comm_attach(o.comm[1], a);
    RANK_CHECK(me, err == ZERO_ERR_ARG && strstr(zr_error_text(), "the arena is 4096 bytes, but must exceed"),
               "%d \"%s\"", err, zr_error_text());
    zr_arena_drop(a);
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_arenas(void **state)
{
    expect_all(mpi_run_ranks(2, arenas_differ, NULL), 2, ZERO_ERR_MISMATCH,
               "the arena has 8192 bytes on rank 1, 4096 on rank 0");
}

/* --- ranks that differ, and operations that are interrupted --- */

/* The ranks' destinations differ. A member of a host reads what another has fetched at its own offset, so
 * this must be an error. */
static void gather_elsewhere(struct rank *me)
{
    static const struct zr_tag tag = {.unit = 3};
    struct fixture o;
    char why[512] = "";
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_mpi, 2, TIMEOUT_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    const struct zr_gather_seg g = {
        .src = 0, .dst = me->w.rank == 1 ? 8192 : 4096, .cut = {.each = 128, .total = 512}};
    int err = zr_comm_all_gather(o.comm[0], o.stream[0], &g, 1, &tag);
    err = err ? err : o.dev->ops->stream_sync(o.stream[0]);
    RANK_CHECK(me, !err, "%s", zr_error_text());
    me->code = zr_comm_status(o.comm[0], why, sizeof why);
    RANK_CHECK(me, me->code == ZERO_ERR_MISMATCH, "%d \"%s\"", me->code, why);
    fixture_close(&o);
}

static void test_elsewhere(void **state)
{
    static const int32_t host_of[] = {0, 0, 1, 1};
    mpi_fixture_hosts(4, host_of);
    mpi_run_disturbed(4, gather_elsewhere, NULL);
    mpi_fixture_hosts(0, NULL);
}

/* A reduction among ranks of one host, which needs no MPI while it runs. */
static void abort_sum(struct rank *me)
{
    enum {
        N = 4 << 20,
        SUM_AT = 2 * N * (int)sizeof(float),
        BYTES = SUM_AT + N * (int)sizeof(float) + (1 << 20)
    };
    static const struct zr_tag tag = {.unit = 3};
    struct fixture o;
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_mpi, 2, TIMEOUT_MS, BYTES) == 0, "%s", zr_error_text());
    float *sum = (float *)(o.base[1] + SUM_AT);
    const struct zr_reduce_seg g = {
        .dst = SUM_AT, .dtype = ZERO_F32, .cut = {.each = N * (int64_t)sizeof(float), .total = SUM_AT}};
    struct zr_comm *c = o.comm[1];
    for (int i = 0; i < N; i++)
        sum[i] = NAN;
    int err = zr_comm_reduce_scatter(c, o.stream[1], &g, 1, &tag);
    RANK_CHECK(me, !err, "%s", zr_error_text());
    /* Do not look at the sum: it belongs to another thread until its stream is idle. */
    for (int64_t until = zr_now_ns() + *(const int64_t *)me->arg; zr_now_ns() < until;)
        zr_relax();
    c->ops->abort(c, ZERO_ERR_FAILED, "on purpose");
    o.dev->ops->stream_sync(o.stream[1]);
    me->code = isnan(sum[N - 1]) && !isnan(sum[0]);
    fixture_close(&o);
}

/* An aborted reduction stops where it is. It is aborted after various times, until one abort comes before
 * its last piece. */
static void test_sum_ends(void **state)
{
    static const int32_t host_of[] = {0, 0};
    bool ended = false;
    uint64_t state_of = fresh_seed("mpi, sums that end");
    mpi_fixture_hosts(2, host_of);
    for (int i = 0; i < 100 && !ended; i++) {
        int64_t after_ns = random_in(&state_of, 0, 20000000);
        const struct rank *r = mpi_run_disturbed(2, abort_sum, &after_ns);
        ended = r[0].code || r[1].code;
    }
    mpi_fixture_hosts(0, NULL);
    assert_true(ended);
}

/* Checks that a failed creation's message reaches the caller, though another thread wrote it. */
static void make_after_finalize(struct rank *me)
{
    struct fixture o;
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_mpi, 2, TIMEOUT_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    struct zr_mpi_library lib = mpi_fixture_library();
    lib.shim->finalize(lib.world);
    zr_fail(ZERO_ERR_ARG, "what this thread said long before");
    int err = zr_mpi_make((struct zr_mpi *)o.comm[0]);
    RANK_CHECK(me, err && strstr(zr_error_text(), "MPI_Finalize"), "%d \"%s\"", err, zr_error_text());
    fixture_close(&o);
}

static void test_make_after_finalize(void **state)
{
    mpi_run_disturbed(2, make_after_finalize, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_conform),    cmocka_unit_test(test_groups),
        cmocka_unit_test(test_mixed),      cmocka_unit_test(test_levels),
        cmocka_unit_test(test_hosts),      cmocka_unit_test(test_hosts_groups),
        cmocka_unit_test(test_user_comm),  cmocka_unit_test(test_finalized_early),
        cmocka_unit_test(test_open_fails), cmocka_unit_test(test_other_release),
        cmocka_unit_test(test_arenas),     cmocka_unit_test(test_elsewhere),
        cmocka_unit_test(test_sum_ends),   cmocka_unit_test(test_make_after_finalize),
        cmocka_unit_test(test_init_hangs), /* keep this test last */
    };
    return cmocka_run_group_tests_name("mpi", tests, NULL, NULL);
}
