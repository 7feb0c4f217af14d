/* SPDX-License-Identifier: Apache-2.0 */
/* test_rendezvous_calls.c: tests how ranks that share no memory compare the calls of their programs. Every
 * rank hears of one failure, the same on all. It names the first calls that differ; if none differ, it
 * names a rank that is behind or does not answer. */
#include "test/cmocka.h"
#include "test/comm/meet/meeting.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N = 4 };
/* One rank, all, or none. */
enum subject { NOBODY, EVERYONE, RANK_0, RANK_1, RANK_2, RANK_3 };

struct asking {
    const char *what;
    /* The rank that asks, or all of them, and the code of the failure that it asks about. */
    enum subject asks;
    int code;
    /* The calls of each rank's program. */
    int n_calls[N];
    /* The calls that all ranks must make. Then only ranks 0 and 1, and ranks 2 and 3, must make the others.
     * 0: all must make n_calls. */
    int n_of_all[N];
    /* The rank whose at-th call differs. */
    enum subject odd;
    int at;
    /* The rank whose loop stands still until all others have heard. */
    enum subject silent;
    /* The rank that has failed before, for another cause. */
    enum subject fails;
    /* The code that all ranks hear. 0: the code of the asking rank. */
    int heard;
    /* What all ranks hear. NULL: nothing else. */
    const char *says[2];
    /* Number of ranks, the last ones, whose calls are not known. */
    int n_unknown;
};

static const struct asking cases[] = {
    {"other calls", .asks = RANK_1, .code = ZERO_ERR_MISMATCH, .n_calls = {20, 20, 20, 20}, .odd = RANK_2,
     .at = 10,
     .says = {"rank 2 called zero_read(tensor 3) in step 1; rank 0 called zero_begin(unit 3, forward) in "
              "step 1; every rank must make the same calls, in the same order",
              "(rank 1: what was met)"}},
    {"other calls of rank 0", .asks = RANK_3, .code = ZERO_ERR_TIMEOUT, .n_calls = {20, 20, 15, 20},
     .odd = RANK_0, .at = 12, .heard = ZERO_ERR_MISMATCH,
     .says =
         {"rank 1 called zero_begin(unit 5, forward) in step 1; rank 0 called zero_read(tensor 5) in step 1",
          "(rank 3: what was met)"}},
    {"other calls long ago", .asks = RANK_0, .code = ZERO_ERR_MISMATCH, .n_calls = {3000, 3010, 3000, 3000},
     .odd = RANK_3, .at = 1000,
     .says = {"rank 3 called zero_read(tensor 6) in step 21; rank 1 called zero_begin(unit 6"}},
    {"other calls too long ago", .asks = EVERYONE, .code = ZERO_ERR_MISMATCH,
     .n_calls = {3000, 3000, 3000, 3000}, .odd = RANK_3, .at = 900,
     .says = {"what was met; the latest 2048 calls of the programs do not differ", " (found by rank "}},
    {"other calls, and rank 0 is behind", .asks = RANK_2, .code = ZERO_ERR_TIMEOUT,
     .n_calls = {5, 20, 18, 20}, .odd = RANK_2, .at = 15, .heard = ZERO_ERR_MISMATCH,
     .says = {"rank 2 called zero_read(tensor 1) in step 1; rank 1 called zero_begin(unit 1, forward) in "
              "step 1"}},
    {"a rank is behind", .asks = RANK_0, .code = ZERO_ERR_TIMEOUT, .n_calls = {60, 60, 12, 60},
     .says = {"what was met; rank 2 did not come: its program has made 12 calls, the last zero_begin(unit 5, "
              "forward) in step 1; that of rank 0 60 calls, the last zero_begin(unit 4, forward) in step 2",
              " (found by rank 0)"}},
    {"a rank has not begun", .asks = EVERYONE, .code = ZERO_ERR_TIMEOUT, .n_calls = {3, 0, 3, 3},
     .says = {"rank 1 did not come: its program has made no call; that of rank 0 3 calls"}},
    {"nobody has begun", .asks = RANK_1, .code = ZERO_ERR_TIMEOUT, .n_calls = {0, 0, 0, 0},
     .says = {"what was met; no program has made a call (found by rank 1)"}},
    {"all are equal", .asks = RANK_2, .code = ZERO_ERR_TIMEOUT, .n_calls = {9, 9, 9, 9},
     .says = {"what was met; the programs have made the same 9 calls, the last", " (found by rank 2)"}},
    {"another cause", .asks = RANK_2, .code = ZERO_ERR_SYSTEM, .n_calls = {9, 8, 7, 9},
     .says = {"what was met (found by rank 2)"}},
    {"a rank is silent", .asks = RANK_1, .code = ZERO_ERR_TIMEOUT, .n_calls = {9, 9, 9, 9}, .silent = RANK_3,
     .says = {"what was met; the programs have made the same 9 calls, the last",
              "; no answer came from rank 3"}},
    {"a rank failed before", .asks = RANK_2, .code = ZERO_ERR_PEER, .n_calls = {9, 9, 9, 9}, .odd = RANK_1,
     .at = 3, .fails = RANK_3, .heard = ZERO_ERR_NOMEM, .says = {"no apples"}},
    {"rank 0 failed before", .asks = RANK_2, .code = ZERO_ERR_PEER, .n_calls = {9, 9, 9, 9}, .odd = RANK_1,
     .at = 3, .fails = RANK_0, .heard = ZERO_ERR_NOMEM, .says = {"no apples"}},
    {"other calls of ranks that share them", .asks = RANK_1, .code = ZERO_ERR_TIMEOUT,
     .n_calls = {20, 21, 20, 15}, .odd = RANK_3, .at = 10, .heard = ZERO_ERR_MISMATCH,
     .says =
         {"rank 3 called zero_read(tensor 3) in step 1; rank 2 called zero_begin(unit 3, forward) in step 1",
          "(rank 1: what was met)"},
     .n_of_all = {1, 1, 1, 1}},
    {"a rank is behind one that shares its calls", .asks = RANK_1, .code = ZERO_ERR_TIMEOUT,
     .n_calls = {20, 20, 30, 29},
     .says = {"what was met; rank 3 did not come: its program has made 29 calls, ",
              "; that of rank 2 30 calls, "},
     .n_of_all = {1, 1, 1, 1}},
    {"a rank is behind one that others wait for", .asks = RANK_0, .code = ZERO_ERR_TIMEOUT,
     .n_calls = {20, 20, 11, 10}, .n_of_all = {2, 2, 1, 1},
     .says = {"what was met; rank 3 did not come: its program has made 10 calls, ",
              "; that of rank 2 11 calls, "}},
    {"a rank that others wait for waits itself", .asks = RANK_1, .code = ZERO_ERR_TIMEOUT,
     .n_calls = {20, 21, 10, 20}, .n_of_all = {3, 3, 2, 3},
     .says = {"what was met; rank 2 did not come: its program has made 2 calls, ",
              "; that of rank 0 3 calls, "}},
    {"no difference among ranks that share calls", .asks = RANK_1, .code = ZERO_ERR_MISMATCH,
     .n_calls = {20, 20, 30, 30},
     .says = {"what was met; the latest 2048 calls of the programs do not differ (found by rank 1)"},
     .n_of_all = {1, 1, 1, 1}},
    {"calls that nobody knows", .asks = RANK_1, .code = ZERO_ERR_MISMATCH, .n_calls = {20, 20, 20, 20},
     .odd = RANK_2, .at = 10,
     .says = {"what was met; the calls of the programs could not be compared (found by rank 1)"},
     .n_unknown = N},
    {"progress that nobody knows", .asks = RANK_1, .code = ZERO_ERR_TIMEOUT, .n_calls = {20, 20, 20, 20},
     .says = {"what was met; the calls of the programs could not be compared (found by rank 1)"},
     .n_unknown = N},
    {"calls that one rank alone knows", .asks = RANK_2, .code = ZERO_ERR_MISMATCH,
     .n_calls = {20, 20, 20, 20}, .odd = RANK_2, .at = 10,
     .says = {"what was met; the calls of the programs could not be compared (found by rank 2)"},
     .n_unknown = N - 1},
    {"calls of one rank that are not known", .asks = RANK_2, .code = ZERO_ERR_MISMATCH,
     .n_calls = {20, 20, 20, 20}, .odd = RANK_1, .at = 10,
     .says =
         {"rank 1 called zero_read(tensor 3) in step 1; rank 0 called zero_begin(unit 3, forward) in step 1"},
     .n_unknown = 1},
    {"calls of which none are kept on both", .asks = RANK_2, .code = ZERO_ERR_MISMATCH,
     .n_calls = {1, 3000, 3000, 1}, .says = {"what was met; the calls of the programs could not be compared"},
     .n_unknown = 2},
};

struct hearing {
    struct rank *me;
    struct meeting m;
    uv_timer_t stop;
    int n_heard;
    /* n_calls and n_of_all. */
    struct zr_call_log calls, of_all;
};

static bool is(enum subject subject, int rank)
{
    return subject == EVERYONE || (int)subject - RANK_0 == rank;
}

static void give_calls(void *arg, struct zr_shared_calls out[ZR_SHARED_CALLS])
{
    const struct hearing *h = arg;
    const struct asking *a = h->me->arg;
    if (h->me->w.rank >= N - a->n_unknown)
        return;
    if (a->n_of_all[0]) {
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
        all &= is(a->silent, i) || is(a->fails, i) || h->me->all[i].stage >= 3;
    if (all)
        uv_timer_start(t, time_over, 50, 0);
}

static void make_calls(struct hearing *h, const struct asking *a)
{
    int rank = h->me->w.rank;
    for (int k = 1; k <= a->n_calls[rank]; k++) {
        struct zr_logged_call c = {.name = ZR_CALL_BEGIN, .subject = k % 7, .step = (uint32_t)(1 + k / 50)};
        if (is(a->odd, rank) && k == a->at)
            c.name = ZR_CALL_READ;
        zr_call_log_put(&h->calls, &c);
    }
    for (int k = 1; k <= a->n_of_all[rank]; k++) {
        struct zr_logged_call c = {.name = ZR_CALL_STEP, .subject = -1, .step = (uint32_t)k};
        zr_call_log_put(&h->of_all, &c);
    }
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
    if (is(a->fails, rank))
        zr_rendezvous_report(h.m.r, ZERO_ERR_NOMEM, "no apples");
    RANK_CHECK(me, all_at(me, 2), "a rank is missing");
    if (is(a->asks, rank))
        RANK_CHECK(me, zr_rendezvous_compare(h.m.r, a->code, "what was met"), "nothing will come");
    for (int i = 0; is(a->silent, rank) && i < me->w.world; i++)
        RANK_CHECK(me, i == rank || wait_stage(&me->all[i], 3), "rank %d has not heard", i);
    uv_run(&h.m.loop, UV_RUN_DEFAULT);
    RANK_CHECK(me, !zr_rendezvous_compare(h.m.r, ZERO_ERR_TIMEOUT, "too late"), "after the close");
    zr_rendezvous_free(h.m.r);
    RANK_CHECK(me, uv_loop_close(&h.m.loop) == 0, "handles are left");
    RANK_CHECK(me, h.n_heard == !is(a->fails, rank) || is(a->silent, rank), "%d failures were heard",
               h.n_heard);
}

static void test_comparison(void **state)
{
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        struct asking a = cases[k];
        struct rank *r = run_ranks(false, N, ask_or_learn, &a, NULL), *first = NULL;
        for (int i = 0; i < N; i++) {
            if (is(a.fails, i) || is(a.silent, i))
                continue;
            if (r[i].code != (a.heard ? a.heard : a.code) || !strstr(r[i].note, a.says[0]) ||
                (a.says[1] && !strstr(r[i].note, a.says[1])))
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

/* The ranks that are furthest ahead and behind are found in a world of any size: comparing all pairs of a
 * million ranks would take hours. */
static void test_furthest_of_many(void **state)
{
    enum { MANY = 1 << 20, GROUPS = 3, REPEATS = 1001 };
    int ahead[GROUPS] = {0, 1, 2}, behind[GROUPS] = {0, 1, 2};
    struct zr_sharing_rank *s = calloc(MANY, sizeof *s);
    assert_non_null(s);
    for (int i = 0; i < MANY; i++)
        s[i] = (struct zr_sharing_rank){
            .group = (uint64_t)i % GROUPS, .n_calls = (uint64_t)i * 7 % REPEATS, .size = MANY, .rank = i};
    for (int i = 0; i < REPEATS * GROUPS; i++) {
        int g = i % GROUPS;
        ahead[g] = s[i].n_calls > s[ahead[g]].n_calls ? i : ahead[g];
        behind[g] = s[i].n_calls < s[behind[g]].n_calls ? i : behind[g];
    }
    s[MANY - 1].size = 1; /* alone */
    zr_call_log_furthest(s, MANY);
    for (int k = 0; k < MANY; k++) {
        int g = s[k].rank % GROUPS;
        bool is_alone = s[k].rank == MANY - 1;
        if (s[k].ahead != (is_alone ? -1 : ahead[g]) || s[k].behind != (is_alone ? -1 : behind[g]))
            fail_msg("rank %d: %d is ahead and %d is behind", s[k].rank, s[k].ahead, s[k].behind);
    }
    free(s);
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
        cmocka_unit_test(test_furthest_of_many),
        cmocka_unit_test(test_left_out),
    };
    return cmocka_run_group_tests_name("rendezvous, calls of programs", tests, NULL, NULL);
}
