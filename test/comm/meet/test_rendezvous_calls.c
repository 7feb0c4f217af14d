/* SPDX-License-Identifier: Apache-2.0 */
/* test_rendezvous_calls.c: tests how ranks that share no memory compare the calls of their programs. Every
 * rank hears of one failure, the same on all. It names the first calls that differ; if none differ, it
 * names a rank that is behind or does not answer. */
#include "test/cmocka.h"
#include "test/comm/meet/meeting.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N = 4, EVERYONE = -1, NOBODY = -2 };

struct asking {
    const char *what;
    int who;        /* the rank that asks, or EVERYONE */
    int code;       /* the code it asks with */
    int n_calls[N]; /* of each rank's program */
    int odd, at;    /* the rank whose at-th call differs, or NOBODY */
    int silent;     /* its loop stands still until all others have heard; or NOBODY */
    int fails;      /* has failed before, for another cause; or NOBODY */
    int heard;      /* the code that all ranks hear */
    const char *says[2];
    int n_unknown; /* the last ranks, whose calls are not known */
    bool in_pairs; /* only ranks 0 and 1, and ranks 2 and 3, must make the calls; all make one more */
};

static const struct asking cases[] = {
    {"other calls",
     1,
     ZERO_ERR_MISMATCH,
     {20, 20, 20, 20},
     2,
     10,
     NOBODY,
     NOBODY,
     ZERO_ERR_MISMATCH,
     {"rank 2 called zero_read(tensor 3) in step 1; rank 0 called zero_begin(unit 3, forward) in step 1; "
      "every rank must make the same calls, in the same order",
      "(rank 1: what was met)"}},
    {"other calls of rank 0",
     3,
     ZERO_ERR_TIMEOUT,
     {20, 20, 15, 20},
     0,
     12,
     NOBODY,
     NOBODY,
     ZERO_ERR_MISMATCH,
     {"rank 1 called zero_begin(unit 5, forward) in step 1; rank 0 called zero_read(tensor 5) in step 1",
      "(rank 3: what was met)"}},
    {"other calls long ago",
     0,
     ZERO_ERR_MISMATCH,
     {3000, 3010, 3000, 3000},
     3,
     1000,
     NOBODY,
     NOBODY,
     ZERO_ERR_MISMATCH,
     {"rank 3 called zero_read(tensor 6) in step 21; rank 1 called zero_begin(unit 6", ""}},
    {"other calls too long ago",
     EVERYONE,
     ZERO_ERR_MISMATCH,
     {3000, 3000, 3000, 3000},
     3,
     900,
     NOBODY,
     NOBODY,
     ZERO_ERR_MISMATCH,
     {"what was met; the latest 2048 calls of the programs do not differ", " (found by rank "}},
    {"other calls, and rank 0 is behind",
     2,
     ZERO_ERR_TIMEOUT,
     {5, 20, 18, 20},
     2,
     15,
     NOBODY,
     NOBODY,
     ZERO_ERR_MISMATCH,
     {"rank 2 called zero_read(tensor 1) in step 1; rank 1 called zero_begin(unit 1, forward) in step 1",
      ""}},
    {"a rank is behind",
     0,
     ZERO_ERR_TIMEOUT,
     {60, 60, 12, 60},
     NOBODY,
     0,
     NOBODY,
     NOBODY,
     ZERO_ERR_TIMEOUT,
     {"what was met; rank 2 did not come: its program has made 12 calls, the last zero_begin(unit 5, "
      "forward) "
      "in step 1; that of rank 0 60 calls, the last zero_begin(unit 4, forward) in step 2",
      " (found by rank 0)"}},
    {"a rank has not begun",
     EVERYONE,
     ZERO_ERR_TIMEOUT,
     {3, 0, 3, 3},
     NOBODY,
     0,
     NOBODY,
     NOBODY,
     ZERO_ERR_TIMEOUT,
     {"rank 1 did not come: its program has made no call; that of rank 0 3 calls", ""}},
    {"nobody has begun",
     1,
     ZERO_ERR_TIMEOUT,
     {0, 0, 0, 0},
     NOBODY,
     0,
     NOBODY,
     NOBODY,
     ZERO_ERR_TIMEOUT,
     {"what was met; no program has made a call (found by rank 1)", ""}},
    {"all are equal",
     2,
     ZERO_ERR_TIMEOUT,
     {9, 9, 9, 9},
     NOBODY,
     0,
     NOBODY,
     NOBODY,
     ZERO_ERR_TIMEOUT,
     {"what was met; the programs have made the same 9 calls, the last", " (found by rank 2)"}},
    {"another cause",
     2,
     ZERO_ERR_SYSTEM,
     {9, 8, 7, 9},
     NOBODY,
     0,
     NOBODY,
     NOBODY,
     ZERO_ERR_SYSTEM,
     {"what was met (found by rank 2)", ""}},
    {"a rank is silent",
     1,
     ZERO_ERR_TIMEOUT,
     {9, 9, 9, 9},
     NOBODY,
     0,
     3,
     NOBODY,
     ZERO_ERR_TIMEOUT,
     {"what was met; the programs have made the same 9 calls, the last", "; no answer came from rank 3"}},
    {"a rank failed before",
     2,
     ZERO_ERR_PEER,
     {9, 9, 9, 9},
     1,
     3,
     NOBODY,
     3,
     ZERO_ERR_NOMEM,
     {"no apples", ""}},
    {"rank 0 failed before",
     2,
     ZERO_ERR_PEER,
     {9, 9, 9, 9},
     1,
     3,
     NOBODY,
     0,
     ZERO_ERR_NOMEM,
     {"no apples", ""}},
    {"other calls of ranks that share them",
     1,
     ZERO_ERR_TIMEOUT,
     {20, 21, 20, 15},
     3,
     10,
     NOBODY,
     NOBODY,
     ZERO_ERR_MISMATCH,
     {"rank 3 called zero_read(tensor 3) in step 1; rank 2 called zero_begin(unit 3, forward) in step 1",
      "(rank 1: what was met)"},
     .in_pairs = true},
    {"a rank is behind one that shares its calls",
     1,
     ZERO_ERR_TIMEOUT,
     {20, 20, 30, 29},
     NOBODY,
     0,
     NOBODY,
     NOBODY,
     ZERO_ERR_TIMEOUT,
     {"what was met; rank 3 did not come: its program has made 29 calls, ", "; that of rank 2 30 calls, "},
     .in_pairs = true},
    {"no difference among ranks that share calls",
     1,
     ZERO_ERR_MISMATCH,
     {20, 20, 30, 30},
     NOBODY,
     0,
     NOBODY,
     NOBODY,
     ZERO_ERR_MISMATCH,
     {"what was met; the latest 2048 calls of the programs do not differ (found by rank 1)", ""},
     .in_pairs = true},
    {"calls that nobody knows",
     1,
     ZERO_ERR_MISMATCH,
     {20, 20, 20, 20},
     2,
     10,
     NOBODY,
     NOBODY,
     ZERO_ERR_MISMATCH,
     {"what was met; the calls of the programs could not be compared (found by rank 1)", ""},
     .n_unknown = N},
    {"progress that nobody knows",
     1,
     ZERO_ERR_TIMEOUT,
     {20, 20, 20, 20},
     NOBODY,
     0,
     NOBODY,
     NOBODY,
     ZERO_ERR_TIMEOUT,
     {"what was met; the calls of the programs could not be compared (found by rank 1)", ""},
     .n_unknown = N},
    {"calls that one rank alone knows",
     2,
     ZERO_ERR_MISMATCH,
     {20, 20, 20, 20},
     2,
     10,
     NOBODY,
     NOBODY,
     ZERO_ERR_MISMATCH,
     {"what was met; the calls of the programs could not be compared (found by rank 2)", ""},
     .n_unknown = N - 1},
    {"calls of one rank that are not known",
     2,
     ZERO_ERR_MISMATCH,
     {20, 20, 20, 20},
     1,
     10,
     NOBODY,
     NOBODY,
     ZERO_ERR_MISMATCH,
     {"rank 1 called zero_read(tensor 3) in step 1; rank 0 called zero_begin(unit 3, forward) in step 1", ""},
     .n_unknown = 1},
    {"calls of which none are kept on both",
     2,
     ZERO_ERR_MISMATCH,
     {1, 3000, 3000, 1},
     NOBODY,
     0,
     NOBODY,
     NOBODY,
     ZERO_ERR_MISMATCH,
     {"what was met; the calls of the programs could not be compared", ""},
     .n_unknown = 2},
};

struct hearing {
    struct rank *me;
    struct meeting m;
    uv_timer_t stop;
    int n_heard;
    /* The calls of the pair of ranks, and of all. Without pairs the second is unused. */
    struct zr_call_log calls, of_all;
};

static void give_calls(void *arg, struct zr_shared_calls out[ZR_SHARED_CALLS])
{
    const struct hearing *h = arg;
    const struct asking *a = h->me->arg;
    if (h->me->w.rank >= N - a->n_unknown)
        return;
    if (a->in_pairs) {
        out[1] = (struct zr_shared_calls){.group = (uint64_t)h->me->w.rank / 2, .size = 2, .log = &h->calls};
        out[2] = (struct zr_shared_calls){.group = 7, .size = N, .log = &h->of_all};
    } else {
        out[0] = (struct zr_shared_calls){.group = 7, .size = N, .log = &h->calls};
    }
}

static void stop_closed(uv_handle_t *h)
{
}

static void stop(struct hearing *h)
{
    if (uv_is_closing((uv_handle_t *)&h->stop))
        return;
    uv_close((uv_handle_t *)&h->stop, stop_closed);
    zr_rendezvous_close(h->m.r);
}

static void time_over(uv_timer_t *t)
{
    stop(t->data);
}

/* Stays open: a failure might be reported a second time, and others may still need an answer. */
static void on_failed(void *arg, int code, const char *text)
{
    struct hearing *h = arg;
    h->n_heard++;
    h->me->code = code;
    snprintf(h->me->note, sizeof h->me->note, "%s", text);
    atomic_store(&h->me->stage, 3);
}

/* Stops soon after all other ranks that can hear have heard. */
static void look_around(uv_timer_t *t)
{
    struct hearing *h = t->data;
    const struct asking *a = h->me->arg;
    bool all = true;
    for (int i = 0; i < h->me->w.world; i++)
        all &= i == a->silent || i == a->fails || h->me->all[i].stage >= 3;
    if (all)
        uv_timer_start(t, time_over, 50, 0);
}

static void make_calls(struct hearing *h, const struct asking *a)
{
    int rank = h->me->w.rank;
    for (int k = 1; k <= a->n_calls[rank]; k++) {
        struct zr_logged_call c = {.name = ZR_CALL_BEGIN, .subject = k % 7, .step = (uint32_t)(1 + k / 50)};
        if (rank == a->odd && k == a->at)
            c.name = ZR_CALL_READ;
        zr_call_log_put(&h->calls, &c);
    }
    zr_call_log_put(&h->of_all, &(struct zr_logged_call){.name = ZR_CALL_STEP, .subject = -1, .step = 1});
}

static void ask_or_learn(struct rank *me)
{
    const struct asking *a = me->arg;
    struct hearing h = {.me = me};
    int rank = me->w.rank;
    RANK_CHECK(me, meet(&h.m, &me->w, LONG_MS) == 0, "%s", zr_error_text());
    RANK_CHECK(me, exchange_ranks(&h.m) == 0, "%s", zr_error_text());
    RANK_CHECK(me, !zr_rendezvous_compare(h.m.r, ZERO_ERR_TIMEOUT, "too early"), "before the detach");
    make_calls(&h, a);
    zr_rendezvous_know(h.m.r, &(struct zr_known_ranks){.shared_calls = give_calls, .arg = &h});
    uv_timer_init(&h.m.loop, &h.stop);
    h.stop.data = &h;
    uv_timer_start(&h.stop, look_around, 1, 1);
    zr_rendezvous_detach(h.m.r, NULL, on_failed, &h);
    RANK_CHECK(me, all_at(me, 1), "a rank is missing");
    if (rank == a->fails)
        zr_rendezvous_report(h.m.r, ZERO_ERR_NOMEM, "no apples");
    RANK_CHECK(me, all_at(me, 2), "a rank is missing");
    if (rank == a->who || a->who == EVERYONE)
        RANK_CHECK(me, zr_rendezvous_compare(h.m.r, a->code, "what was met"), "nothing will come");
    for (int i = 0; rank == a->silent && i < me->w.world; i++)
        RANK_CHECK(me, i == rank || wait_stage(&me->all[i], 3), "rank %d has not heard", i);
    uv_run(&h.m.loop, UV_RUN_DEFAULT);
    RANK_CHECK(me, !zr_rendezvous_compare(h.m.r, ZERO_ERR_TIMEOUT, "too late"), "after the close");
    zr_rendezvous_free(h.m.r);
    RANK_CHECK(me, uv_loop_close(&h.m.loop) == 0, "handles are left");
    RANK_CHECK(me, h.n_heard == (rank != a->fails) || rank == a->silent, "%d failures were heard", h.n_heard);
}

static void test_comparison(void **state)
{
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        struct asking a = cases[k];
        struct rank *r = run_ranks(false, N, ask_or_learn, &a, NULL), *first = NULL;
        for (int i = 0; i < N; i++) {
            if (i == a.fails || i == a.silent)
                continue;
            if (r[i].code != a.heard || !strstr(r[i].note, a.says[0]) || !strstr(r[i].note, a.says[1]))
                fail_msg("%s: rank %d heard %d \"%s\"", a.what, i, r[i].code, r[i].note);
            first = first ? first : &r[i];
            assert_string_equal(r[i].note, first->note);
        }
    }
}

/* Any bytes that a rank sends as its calls can be read safely. */
static void test_calls_that_cannot_be(void **state)
{
    struct zr_call_log_copy copy = {.n = UINT64_MAX};
    static struct zr_call_log ring, other;
    struct zr_logged_call a, b;
    memset(copy.at, 0xff, sizeof copy.at);
    zr_call_log_restore(&ring, &copy);
    copy.at[7].what ^= 1;
    zr_call_log_restore(&other, &copy);
    assert_true(zr_call_log_differ(&ring, &other, &a, &b) > 0);
    char text[ZR_CALL_LOG_BOTH_CHARS];
    zr_call_log_report(1, &a, 0, &b, zr_call_log_left_out(&ring, &other, UINT64_MAX), text);
    assert_non_null(strstr(text, "rank 1 called nothing"));
    memset(&copy, 0, sizeof copy);
    zr_call_log_restore(&ring, &copy);
    assert_false(zr_call_log_last(&ring, &a));
    assert_int_equal(zr_call_log_differ(&ring, &other, &a, &b), 0);
}

static void put_calls(struct zr_call_log *ring, const char *calls)
{
    memset(ring, 0, sizeof *ring);
    for (const char *c = calls; *c; c++) /* a letter is a collective of the program, a digit a bracket */
        zr_call_log_put(ring,
                        &(struct zr_logged_call){.name = *c >= 'a' ? ZR_CALL_ALL_REDUCE_SUM : ZR_CALL_BEGIN,
                                                 .subject = *c >= 'a' ? -1 : *c - '0',
                                                 .step = 1 + (uint32_t)(c - calls) / 4,
                                                 .args = *c >= 'a' ? (uint64_t)*c : 0});
}

static void test_left_out(void **state)
{
    static const struct {
        const char *a, *b;
        enum zr_call_log_gap gap;
        const char *says;
    } gaps[] = {
        /* The next call shows which rank left one out. */
        {"1a2", "1ab2", ZR_CALL_LOG_GAP_A, "; rank 105 seems to have left out the call of rank 106"},
        {"1ab2", "1a2", ZR_CALL_LOG_GAP_B, "; rank 106 seems to have left out the call of rank 105"},
        /* The calls before show it. */
        {"1ababaa", "1ababab", ZR_CALL_LOG_GAP_A, "; rank 105 seems to have left out the call of rank 106"},
        {"1ababab", "1ababaa", ZR_CALL_LOG_GAP_B, "; rank 106 seems to have left out the call of rank 105"},
        /* Nothing shows it. */
        {"1aa", "1ab", ZR_CALL_LOG_GAP_NONE,
         " with other arguments, or one of them left out the call before;"},
        {"1ab", "1ba", ZR_CALL_LOG_GAP_NONE,
         " with other arguments, or one of them left out the call before;"},
        /* A bracket is no collective of the program. */
        {"12", "132", ZR_CALL_LOG_GAP_NONE, "in the same order"},
        {"1a", "1a2", ZR_CALL_LOG_GAP_NONE, NULL},
    };
    static struct zr_call_log a, b;
    for (size_t i = 0; i < sizeof gaps / sizeof *gaps; i++) {
        struct zr_logged_call of_a, of_b;
        char text[ZR_CALL_LOG_BOTH_CHARS];
        put_calls(&a, gaps[i].a);
        put_calls(&b, gaps[i].b);
        uint64_t n = zr_call_log_differ(&a, &b, &of_a, &of_b);
        assert_int_equal(n > 0, gaps[i].says != NULL);
        if (!n)
            continue;
        assert_int_equal(zr_call_log_left_out(&a, &b, n), gaps[i].gap);
        zr_call_log_report(105, &of_a, 106, &of_b, gaps[i].gap, text);
        if (!strstr(text, gaps[i].says))
            fail_msg("%s and %s: %s", gaps[i].a, gaps[i].b, text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_comparison),
        cmocka_unit_test(test_calls_that_cannot_be),
        cmocka_unit_test(test_left_out),
    };
    return cmocka_run_group_tests_name("rendezvous, calls of programs", tests, NULL, NULL);
}
