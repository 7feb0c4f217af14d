/* SPDX-License-Identifier: Apache-2.0 */
/* test_rendezvous_agree.c: tests that ranks agree on a result: all go on, or all fail with the message of
 * one. */
#include "test/cmocka.h"
#include "test/comm/meet/meeting.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { N = 4, LONG_TEXT = ZR_ERROR_BYTES - 1 };

/* Each rank's code, and the rank whose message all must report. */
struct row {
    int code[N];
    int speaks;
};

static const struct row rows[] = {
    {{0, 0, 0, 0}, -1},
    {{ZERO_ERR_IO, 0, 0, 0}, 0},
    {{0, 0, 0, ZERO_ERR_IO}, 3},
    {{0, ZERO_ERR_NOMEM, ZERO_ERR_ARG, ZERO_ERR_IO}, 1},
    /* A cause takes precedence over its consequences. */
    {{ZERO_ERR_TIMEOUT, ZERO_ERR_PEER, 0, ZERO_ERR_ARG}, 3},
    {{0, 0, ZERO_ERR_PEER, ZERO_ERR_TIMEOUT}, 2},
    {{ZERO_ERR_TIMEOUT, 0, 0, 0}, 0},
};

/* A long message that differs from rank to rank. */
static void words_of(int rank, char text[LONG_TEXT + 1])
{
    memset(text, 'a' + rank, LONG_TEXT);
    text[LONG_TEXT] = 0;
}

static void expect_words(struct rank *me, int speaker, int err)
{
    char want[LONG_TEXT + 16] = "", words[LONG_TEXT + 1];
    words_of(speaker, words);
    if (speaker != me->w.rank)
        snprintf(want, sizeof want, "rank %d: %.*s", speaker, LONG_TEXT - 8, words);
    else
        snprintf(want, sizeof want, "%s", words);
    RANK_CHECK(me, err && strcmp(zr_error_text(), want) == 0, "code %d: %s", err, zr_error_text());
}

/* A rank's record of an exchange with a result. */
struct record {
    int32_t err, rank;
};

/* Agrees, and exchanges records if me->arg is set. The records come also if a rank has failed. */
static int agree_on(struct rank *me, struct meeting *m, const struct row *row)
{
    struct record mine = {.rank = me->w.rank}, all[N] = {{0}};
    int code = row->code[me->w.rank];
    if (!me->arg)
        return zr_rendezvous_agree(m->r, code);
    int err = zr_rendezvous_agree_and_exchange(m->r, code, &mine.err, sizeof mine, all);
    for (int r = 0; r < N; r++)
        if (all[r].rank != r || all[r].err != row->code[r])
            rank_says(me, __FILE__, __LINE__, "exchange", "rank %d: %d", all[r].rank, all[r].err);
    return err;
}

static void agree(struct rank *me)
{
    struct meeting m;
    char words[LONG_TEXT + 1];
    RANK_CHECK(me, meet(&m, &me->w, LONG_MS) == 0, "%s", zr_error_text());
    for (size_t k = 0; k < 3 * sizeof rows / sizeof *rows; k++) {
        const struct row *row = &rows[k % (sizeof rows / sizeof *rows)];
        words_of(me->w.rank, words);
        zr_fail(ZERO_ERR_FAILED, "%s", words);
        if (me->w.rank == (int)k % N)
            sleep_ms(5);
        int err = agree_on(me, &m, row);
        RANK_CHECK(me, err == (row->speaks < 0 ? 0 : row->code[row->speaks]), "row %zu: %d", k, err);
        if (row->speaks >= 0)
            expect_words(me, row->speaks, err);
        if (me->wrong[0])
            return;
        if (k % 3 == 0) /* in turn */
            RANK_CHECK(me, exchange_ranks(&m) == 0, "%s", zr_error_text());
    }
    zr_rendezvous_detach(m.r, NULL, NULL, NULL);
    RANK_CHECK(me, zr_rendezvous_agree(m.r, 0) == ZERO_ERR_ORDER, "it is detached");
    RANK_CHECK(me, part(&m), "handles are left");
}

static void test_agree(void **state)
{
    bool exchanges = true;
    run_ranks(false, N, agree, NULL, NULL);
    run_ranks(true, N, agree, NULL, NULL);
    run_ranks(false, N, agree, &exchanges, NULL);
}

static void test_alone(void **state)
{
    struct meeting m;
    struct zr_world w = {.world = 1};
    assert_int_equal(meet(&m, &w, 1), 0);
    assert_int_equal(zr_rendezvous_agree(m.r, 0), 0);
    zr_fail(ZERO_ERR_IO, "the disk");
    assert_int_equal(zr_rendezvous_agree(m.r, ZERO_ERR_IO), ZERO_ERR_IO);
    assert_string_equal(zr_error_text(), "the disk");
    assert_true(part(&m));
}

/* One rank exchanges bytes while the others agree. That would be a bug of the library; it must not hang. */
static void do_something_else(struct rank *me)
{
    struct meeting m;
    static _Thread_local char mine[70000], all[N * sizeof mine];
    size_t n = *(int *)me->arg == 0 ? 12 : sizeof mine;
    RANK_CHECK(me, meet(&m, &me->w, LONG_MS) == 0, "%s", zr_error_text());
    bool other = me->w.rank == 2;
    if (*(int *)me->arg == 2) /* now the roles are swapped */
        other = !other, n = 12;
    note_error(me, other ? zr_rendezvous_exchange(m.r, mine, n, all) : zr_rendezvous_agree(m.r, 0));
    RANK_CHECK(me, part(&m), "handles are left");
}

static void test_not_the_same(void **state)
{
    static const char *const says[] = {"rank 2 gives 12 bytes, rank 0 compares how it went",
                                       "rank 2 gives 70000 bytes, rank 0 compares how it went",
                                       "rank 2 compares how it went, rank 0 gives 12 bytes"};
    for (int k = 0; k < 3; k++) {
        struct rank *r = run_ranks(true, N, do_something_else, &k, NULL);
        for (int i = 0; i < N; i++)
            expect_rank(&r[i], ZERO_ERR_MISMATCH, says[k]);
    }
}

/* A rank dies. The rank that has failed itself reports its own failure; the others report the lost rank. */
static void die_before(struct rank *me)
{
    struct meeting m;
    RANK_CHECK(me, meet(&m, &me->w, LONG_MS) == 0, "%s", zr_error_text());
    RANK_CHECK(me, zr_rendezvous_agree(m.r, 0) == 0, "%s", zr_error_text());
    if (me->dies)
        kill(getpid(), SIGKILL);
    zr_fail(ZERO_ERR_IO, "the disk");
    struct record mine = {0}, all[N], none[N] = {{0}};
    int code = me->w.rank == 1 ? ZERO_ERR_IO : 0;
    memset(all, me->arg ? 0xff : 0, sizeof all);
    note_error(me, me->arg ? zr_rendezvous_agree_and_exchange(m.r, code, &mine.err, sizeof mine, all)
                           : zr_rendezvous_agree(m.r, code));
    RANK_CHECK(me, !memcmp(all, none, sizeof all), "records of ranks that could not exchange them");
    RANK_CHECK(me, part(&m), "handles are left");
}

static void rank_2_dies(struct rank *r)
{
    r->dies = r->w.rank == 2;
}

static void test_death(void **state)
{
    bool exchanges = true;
    for (int k = 0; k < 2; k++) {
        struct rank *r = run_ranks(true, N, die_before, k ? &exchanges : NULL, rank_2_dies);
        expect_rank(&r[0], ZERO_ERR_PEER, "rank 2 was lost");
        expect_rank(&r[1], ZERO_ERR_IO, "the disk");
        expect_rank(&r[3], ZERO_ERR_PEER, "rank 2 was lost");
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_agree), cmocka_unit_test(test_alone),
                                       cmocka_unit_test(test_not_the_same), cmocka_unit_test(test_death)};
    return cmocka_run_group_tests_name("rendezvous_agree", tests, NULL, NULL);
}
