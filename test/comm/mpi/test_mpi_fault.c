/* SPDX-License-Identifier: Apache-2.0 */
/* test_mpi_fault.c: tests that what goes wrong between ranks over MPI is an error with cause and place,
 * and never a hang, whatever MPI does. */
#include "comm/meet/user_comm.h"
#include "comm/mpi/mpi_comm.h"
#include "kernels/error.h"
#include "kernels/log.h"
#include "test/cmocka.h"
#include "test/comm/mpi/mpi_fixture.h"
#include "test/stand_in/mpi_stand_in.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LONG_MS = 60000, SHORT_MS = 800, ARENA_BYTES = 1 << 16 };

/* --- operations that differ --- */

enum difference {
    OTHER_OP,
    OTHER_UNIT,
    OTHER_STEP,
    OTHER_HASH,
    OTHER_BYTES,
    OTHER_COUNT,
    OTHER_ROOT,
    AGREE_OTHER_SIZE,
    ONE_MORE,
    N_DIFFERENCES
};

static const char *const said[N_DIFFERENCES][2] = {
    {"all_gather seq 3 unit 14", "reduce_scatter seq 3 unit 14"},
    {"reduce_scatter seq 3 unit 14", "reduce_scatter seq 3 unit 13"},
    {"of step 8", "of step 7"},
    {"other calls of the program", "other calls of the program"},
    {"with 1024 bytes", "with 512 bytes"},
    {"with 2 segments", "with 1 segments"},
    {"with root 0", "with root 1"},
    {"with 24 bytes", "with 16 bytes"},
    {"exchange seq 3", "reduce_scatter seq 3"},
};

static void differ(struct rank *me)
{
    enum difference what = *(enum difference *)me->arg;
    bool odd = me->w.rank == me->w.world - 1;
    struct fixture o;
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_mpi, 2, LONG_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    struct zr_comm *c = o.comm[1];
    struct zr_stream *s = o.stream[1];
    struct zr_tag tag = {.unit = 14, .step = 7, .call_hash = 99};
    for (int i = 0; i < 2; i++)
        RANK_CHECK(me, zr_comm_exchange(c, s, 0, 64, &tag) == 0, "%s", zr_error_text());
    o.dev->ops->stream_sync(s);
    RANK_CHECK(me, zr_comm_status(c, NULL, 0) == 0, "failed too early");
    memset(o.base[1], 0xff, ARENA_BYTES);
    struct zr_gather_seg g = {.src = 0, .dst = 0, .in_place = true, .cut = {128, 512}};
    struct zr_reduce_seg r[2] = {{.src = 0, .dst = 8192, .cut = {128, 512}, .dtype = ZERO_F32},
                                 {.src = 1024, .dst = 16384, .cut = {0, 0}, .dtype = ZERO_F32}};
    int n = 1 + (odd && what == OTHER_COUNT), err;
    tag.unit -= odd && what == OTHER_UNIT;
    tag.step += odd && what == OTHER_STEP;
    tag.call_hash += odd && what == OTHER_HASH;
    if (odd && what == OTHER_BYTES)
        r[0].cut = (struct zr_cut){256, 1024};
    if (odd && what == ONE_MORE)
        RANK_CHECK(me, zr_comm_exchange(c, s, 0, 64, &tag) == 0, "%s", zr_error_text());
    if (what == AGREE_OTHER_SIZE)
        err = zr_comm_agree(c, s, 0, 1, 1 + odd, &tag);
    else if (what == OTHER_ROOT)
        err = zr_comm_broadcast(c, s, 0, 64, odd ? 0 : 1, &tag);
    else if (what == OTHER_OP && odd)
        err = zr_comm_all_gather(c, s, &g, 1, &tag);
    else
        err = zr_comm_reduce_scatter(c, s, r, n, &tag);
    RANK_CHECK(me, err == 0, "%s", zr_error_text());
    /* An operation queued behind it ends at once too, and moves nothing. */
    RANK_CHECK(me, zr_comm_exchange(c, s, 0, 64, &tag) == 0, "%s", zr_error_text());
    o.dev->ops->stream_sync(s);
    note_status(me, c);
    RANK_CHECK(me, atomic_load(c->alarm), "no alarm");
    RANK_CHECK(me, zr_comm_status(o.comm[0], NULL, 0) == me->code, "the other one goes on");
    for (int i = 0; i < ARENA_BYTES; i++)
        RANK_CHECK(me, o.base[1][i] == (char)0xff, "byte %d was written", i);
    RANK_CHECK(me, !c->ops->stuck(c), "it is stuck");
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_operations_differ(void **state)
{
    for (int what = 0; what < N_DIFFERENCES; what++) {
        enum difference d = (enum difference)what;
        struct rank *r = mpi_run_disturbed(4, differ, &d);
        for (int i = 0; i < 4; i++) {
            expect_rank(&r[i], ZERO_ERR_MISMATCH, i == 3 ? ": rank 2 is at " : ": rank 3 is at ");
            if (!strstr(r[i].note, said[what][0]) && !strstr(r[i].note, said[what][1]))
                fail_msg("difference %d, rank %d: \"%s\" has neither \"%s\" nor \"%s\"", what, i, r[i].note,
                         said[what][0], said[what][1]);
            if (strstr(r[i].note, "calls ago")) /* no rank has compared the calls when this is written */
                fail_msg("difference %d, rank %d: \"%s\"", what, i, r[i].note);
        }
    }
}

/* --- a rank that does not come, and one that dies --- */

static void stay_away(struct rank *me)
{
    struct fixture o;
    struct zr_tag tag = {.unit = 4};
    bool dies = *(bool *)me->arg;
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_mpi, 2, SHORT_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    struct zr_comm *c = o.comm[0];
    RANK_CHECK(me, zr_comm_broadcast(c, o.stream[0], 0, 64, 1, &tag) == 0, "%s", zr_error_text());
    o.dev->ops->stream_sync(o.stream[0]);
    RANK_CHECK(me, zr_comm_status(c, NULL, 0) == 0, "failed too early");
    RANK_CHECK(me, all_at(me, 1), "a rank is missing");
    if (me->w.rank == 2 && dies)
        mpi_stand_in_die(2);
    if (me->w.rank != 2) {
        tag.unit = 3;
        RANK_CHECK(me, zr_comm_exchange(c, o.stream[0], 0, 64, &tag) == 0, "%s", zr_error_text());
        o.dev->ops->stream_sync(o.stream[0]);
    }
    note_status(me, c);
    RANK_CHECK(me, all_at(me, 2), "a rank waits for ever");
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_stays_away(void **state)
{
    for (int dies = 0; dies <= 1; dies++) {
        bool arg = dies;
        struct rank *r = mpi_run_disturbed(4, stay_away, &arg);
        for (int i = 0; i < 4; i++)
            if (i != 2)
                expect_rank(&r[i], ZERO_ERR_TIMEOUT,
                            " ms (timeout_ms) for rank 2, which is at seq 1 (broadcast unit 4)");
    }
}

/* --- MPI calls that fail --- */

struct fault {
    const char *call;
    int k;
    int code;
    const char *text;
};

static void meet_fault(struct rank *me)
{
    const struct fault *f = me->arg;
    struct fixture o;
    struct zr_tag tag = {.unit = 4};
    struct zr_reduce_seg r = {.src = 0, .dst = 32768, .cut = {4096, 12288}, .dtype = ZERO_BF16};
    struct zr_gather_seg g = {.src = 0, .dst = 0, .in_place = true, .cut = {4096, 12288}};
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_mpi, 2, SHORT_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    struct zr_comm *c = o.comm[1];
    struct zr_stream *s = o.stream[1];
    RANK_CHECK(me, all_at(me, 1), "a rank is missing");
    if (me->w.rank == 1)
        mpi_stand_in_fail(f->call, 1, f->k, MPI_STAND_IN_OTHER);
    RANK_CHECK(me, all_at(me, 2), "a rank is missing");
    RANK_CHECK(me, zr_comm_reduce_scatter(c, s, &r, 1, &tag) == 0, "%s", zr_error_text());
    RANK_CHECK(me, zr_comm_all_gather(c, s, &g, 1, &tag) == 0, "%s", zr_error_text());
    RANK_CHECK(me, zr_comm_agree(c, s, 40960, 3, 2, &tag) == 0, "%s", zr_error_text());
    RANK_CHECK(me, zr_comm_broadcast(c, s, 0, 64, 0, &tag) == 0, "%s", zr_error_text());
    RANK_CHECK(me, zr_comm_all_to_all(c, s, 0, 32768, 8192, &tag) == 0, "%s", zr_error_text());
    RANK_CHECK(me, zr_comm_shift(c, s, 0, 32768, 8192, -1, &tag) == 0, "%s", zr_error_text());
    o.dev->ops->stream_sync(s);
    note_status(me, c);
    RANK_CHECK(me, all_at(me, 3), "a rank waits for ever");
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

/* Rank 1 sends its 13th and 14th message in the all-to-all, and its 17th in the shift. The others have met it
 * there, and wait for these bytes. */
static void test_faults(void **state)
{
    static const struct fault faults[] = {
        {"send", 1, ZERO_ERR_FAILED, "reduce_scatter seq 1 unit 4: the MPI stand-in: MPI_Isend: "},
        {"receive", 3, ZERO_ERR_FAILED, "reduce_scatter seq 1 unit 4: the MPI stand-in: MPI_Irecv: "},
        {"all_gather", 1, ZERO_ERR_FAILED, "all_gather seq 2 unit 4: the MPI stand-in: MPI_Iallgather: "},
        {"all_sum", 1, ZERO_ERR_FAILED, "agree seq 3 unit 4: the MPI stand-in: MPI_Iallreduce: "},
        {"broadcast", 1, ZERO_ERR_FAILED, "broadcast seq 4 unit 4: the MPI stand-in: MPI_Ibcast: "},
        {"send", 13, ZERO_ERR_FAILED, "all_to_all seq 5 unit 4: the MPI stand-in: MPI_Isend: "},
        {"receive", 14, ZERO_ERR_FAILED, "all_to_all seq 5 unit 4: the MPI stand-in: MPI_Irecv: "},
        {"send", 17, ZERO_ERR_FAILED, "shift seq 6 unit 4: the MPI stand-in: MPI_Isend: "},
        {"progress", 5, ZERO_ERR_FAILED, "reduce_scatter seq 1 unit 4: the MPI stand-in: MPI_Testsome: "},
        {"poll", 1, ZERO_ERR_PEER, "reduce_scatter seq 1 unit 4: the MPI stand-in: a pending message: error"},
    };
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        struct fault f = faults[i];
        struct rank *r = mpi_run_disturbed(3, meet_fault, &f);
        expect_rank(&r[1], f.code, f.text);
        for (int k = 0; k < 3; k += 2)
            if (r[k].code) /* a broadcast, for example, needs nothing from rank 1 */
                expect_rank(&r[k], ZERO_ERR_TIMEOUT, " ms (timeout_ms) for ");
    }
}

/* --- hosts with several ranks --- */

/* Two hosts have two ranks each. Rank 1 first sends three messages about what it is about to do. Then it
 * sends its host's part of rank 3's sum in four chunks, a part of an all-to-all to each rank of the other
 * host, or the one part of a shift. Its next message would tell rank 0 that it no longer reads rank 0's
 * memory; that send fails. */
static void lose_host_mate(struct rank *me)
{
    enum zr_op op = *(enum zr_op *)me->arg;
    int n_before = op == ZR_OP_REDUCE_SCATTER ? 3 + 4 : op == ZR_OP_ALL_TO_ALL ? 3 + 2 : 3 + 1;
    struct fixture o;
    struct zr_tag tag = {.unit = 4};
    struct zr_reduce_seg r = {.src = 0, .dst = 32768, .cut = {4096, 16384}, .dtype = ZERO_BF16};
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_mpi, 2, SHORT_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    struct zr_comm *c = o.comm[1];
    RANK_CHECK(me, all_at(me, 1), "a rank is missing");
    if (me->w.rank == 1)
        mpi_stand_in_fail("send", 1, n_before + 1, MPI_STAND_IN_OTHER);
    RANK_CHECK(me, all_at(me, 2), "a rank is missing");
    int err = op == ZR_OP_REDUCE_SCATTER ? zr_comm_reduce_scatter(c, o.stream[1], &r, 1, &tag)
              : op == ZR_OP_ALL_TO_ALL   ? zr_comm_all_to_all(c, o.stream[1], 0, 32768, 8192, &tag)
                                         : zr_comm_shift(c, o.stream[1], 0, 32768, 8192, 1, &tag);
    RANK_CHECK(me, err == 0, "%s", zr_error_text());
    o.dev->ops->stream_sync(o.stream[1]);
    note_status(me, c);
    RANK_CHECK(me, all_at(me, 3), "a rank waits for ever");
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_loses_host_mate(void **state)
{
    static const int32_t host_of[] = {0, 0, 1, 1};
    static const enum zr_op ops[] = {ZR_OP_REDUCE_SCATTER, ZR_OP_ALL_TO_ALL, ZR_OP_SHIFT};
    mpi_fixture_hosts(4, host_of);
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++) {
        enum zr_op op = ops[i];
        char failed[96], waited[96];
        struct rank *r = mpi_run_disturbed(4, lose_host_mate, &op);
        snprintf(failed, sizeof failed, "%s seq 1 unit 4: the MPI stand-in: MPI_Isend: ", zr_op_name(op));
        snprintf(waited, sizeof waited, " ms (timeout_ms) for rank 1, which is at seq 1 (%s unit 4)",
                 zr_op_name(op));
        expect_rank(&r[1], ZERO_ERR_FAILED, failed);
        expect_rank(&r[0], ZERO_ERR_TIMEOUT, waited);
        expect_rank(&r[2], 0, "");
        expect_rank(&r[3], 0, "");
    }
    mpi_fixture_hosts(0, NULL);
}

/* --- where ranks meet --- */

static void keep_reminder(void *arg, const char *line)
{
    if (strstr(line, "zero_wrap still waits: "))
        snprintf(arg, sizeof((struct rank *)0)->note, "%s", line);
}

static int exchange_over(struct zr_user_comm *c, const void *mine, void *all, size_t bytes)
{
    return zr_mpi_exchange_over(c->exchange_arg, c, mine, all, bytes);
}

static int meet(struct rank *me, int64_t ms, const struct zr_waiting *waiting)
{
    struct zr_mpi_library lib = mpi_fixture_library();
    struct zr_world w = me->w;
    struct zr_mpi_process *p;
    int held = -1;
    w.waiting = waiting;
    int err = zr_mpi_process_open(&lib, LONG_MS, NULL, NULL, &p);
    struct zr_user_comm c = {
        .name = "MPI_COMM_WORLD", .gather = exchange_over, .exchange_arg = p, .timeout_ms = ms};
    err = err ? err : zr_user_comm_meet(&c, &w, &held);
    if (held >= 0)
        close(held);
    return err;
}

/* Rank 1 gives up while rank 0 waits for rank 2. Then rank 2 comes, and rank 1 tries again. */
static void give_up_once(struct rank *me)
{
    struct zr_mpi_library lib;
    struct zr_mpi_process *p;
    char last[sizeof me->note] = "";
    struct zr_log *log;
    mpi_stand_in_be(me->w.rank);
    lib = mpi_fixture_library();
    RANK_CHECK(me, zr_log_open(keep_reminder, last, NULL, &log) == 0, "%s", zr_error_text());
    RANK_CHECK(me, zr_mpi_process_open(&lib, LONG_MS, NULL, NULL, &p) == 0, "%s", zr_error_text());
    const struct zr_waiting waiting = {.log = log, .remind_ms = 50};
    if (me->w.rank == 1) {
        note_error(me, meet(me, SHORT_MS, &waiting));
        RANK_CHECK(me,
                   strstr(last, ": rank 1 waited ") && strstr(last, " for rank 0 of MPI_COMM_WORLD, which "),
                   "\"%s\"", last);
        atomic_store(&me->stage, 1);
    }
    if (me->w.rank == 2)
        RANK_CHECK(me, wait_stage(&me->all[1], 1), "rank 1 does not give up");
    int err = meet(me, LONG_MS, &waiting);
    RANK_CHECK(me, err == 0, "%s", zr_error_text());
    if (me->w.rank == 0) {
        RANK_CHECK(me,
                   strstr(last, " of 3 ranks did not come to zero_wrap of the context ") &&
                       strstr(last, "; it gives up after 60000 ms (start_timeout_ms)"),
                   "\"%s\"", last);
    }
    zr_mpi_process_drop(p, NULL, true);
    zr_log_close(log);
}

static void test_gives_up(void **state)
{
    struct rank *r = mpi_run_ranks(3, give_up_once, NULL);
    expect_rank(&r[1], ZERO_ERR_TIMEOUT, " for rank 0 of MPI_COMM_WORLD, which ");
}

static void meet_once(struct rank *me)
{
    struct mpi_stand_in_counts counts;
    struct zr_mpi_library lib;
    struct zr_mpi_process *p;
    mpi_stand_in_be(me->w.rank);
    lib = mpi_fixture_library();
    RANK_CHECK(me, zr_mpi_process_open(&lib, LONG_MS, NULL, NULL, &p) == 0, "%s", zr_error_text());
    RANK_CHECK(me, meet(me, LONG_MS, NULL) == 0, "%s", zr_error_text());
    mpi_stand_in_counts(&counts);
    RANK_CHECK(me, counts.most_bytes < 2 * (int64_t)sizeof(struct zr_user_comm_card),
               "a message has %lld bytes, a card %zu", (long long)counts.most_bytes,
               sizeof(struct zr_user_comm_card));
    zr_mpi_process_drop(p, NULL, true);
}

/* Rank 0's answer does not grow with the number of ranks. */
static void test_short_answers(void **state)
{
    struct rank *r = mpi_run_ranks(MPI_STAND_IN_RANKS, meet_once, NULL);
    for (int i = 0; i < MPI_STAND_IN_RANKS; i++)
        expect_rank(&r[i], 0, "");
}

/* --- a rank that dies before the answer has reached it --- */

/* Rank 0 waits for rank 1 alone: rank 2 has come. Then rank 2 dies, and rank 1 may come. */
static void lose_rank_2(void *arg, const char *line)
{
    struct rank *me = arg;
    if (!strstr(line, "1 of 3 ranks did not come") || atomic_load(&me->stage))
        return;
    mpi_stand_in_die(2);
    mpi_stand_in_fail("progress", 2, 1, MPI_STAND_IN_OTHER);
    atomic_store(&me->stage, 1);
}

static void die_before_answer(struct rank *me)
{
    struct zr_log *log;
    mpi_stand_in_be(me->w.rank);
    RANK_CHECK(me, zr_log_open(lose_rank_2, me, NULL, &log) == 0, "%s", zr_error_text());
    const struct zr_waiting waiting = {.log = log, .remind_ms = 20};
    if (me->w.rank == 1)
        RANK_CHECK(me, wait_stage(&me->all[0], 1), "rank 0 does not see rank 2");
    int err = meet(me, LONG_MS, me->w.rank == 0 ? &waiting : NULL);
    RANK_CHECK(me, (err != 0) == (me->w.rank == 2), "%d \"%s\"", err, zr_error_text());
    zr_log_close(log);
}

/* Runs after libzero has ended its MPIs. */
static void report_finalized(void)
{
    struct mpi_stand_in_counts counts;
    mpi_stand_in_counts(&counts);
    _exit(10 + (int)counts.n_finalize);
}

/* Rank 0's answer to rank 2 is still pending when the process ends. MPI_Finalize would wait for it, so rank 0
 * does not call it; rank 1 does. A child process ends, whose first MPI this is: a later one would end after
 * report_finalized. */
static void test_unsent_at_the_end(void **state)
{
    int status;
    pid_t child = fork();
    if (!child) {
        atexit(report_finalized);
        mpi_stand_in_the_machine()->n_ranks = 3;
        mpi_stand_in_the_machine()->short_bytes = 0;
        run_ranks(false, 3, die_before_answer, NULL, NULL);
        exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 10 + 1);
}

/* --- abort --- */

static void abort_while_waiting(struct rank *me)
{
    struct fixture o;
    struct zr_tag tag = {.unit = -1};
    pthread_t id;
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_mpi, 2, LONG_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    struct zr_comm *c = o.comm[0];
    pthread_create(&id, NULL, abort_soon, c);
    if (me->w.rank)
        RANK_CHECK(me, zr_comm_exchange(c, o.stream[0], 0, 64, &tag) == 0, "%s", zr_error_text());
    o.dev->ops->stream_sync(o.stream[0]);
    pthread_join(id, NULL);
    note_status(me, c);
    RANK_CHECK(me, all_at(me, 1), "a rank waits for ever");
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_abort(void **state)
{
    struct rank *r = mpi_run_disturbed(3, abort_while_waiting, NULL);
    for (int i = 0; i < 3; i++)
        expect_rank(&r[i], ZERO_ERR_ORDER, "the model called out of order");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unsent_at_the_end), /* first */
        cmocka_unit_test(test_operations_differ),
        cmocka_unit_test(test_stays_away),
        cmocka_unit_test(test_faults),
        cmocka_unit_test(test_loses_host_mate),
        cmocka_unit_test(test_gives_up),
        cmocka_unit_test(test_short_answers),
        cmocka_unit_test(test_abort),
    };
    return cmocka_run_group_tests_name("mpi fault", tests, NULL, NULL);
}
