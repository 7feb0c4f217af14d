/* SPDX-License-Identifier: Apache-2.0 */
/* test_nccl_roles.c: tests NCCL communicators of all roles in groups of ranks: what each moves, arenas
 * that two roles share, a failure of one, and closing. Runs over the stand-ins for CUDA and NCCL. */
#include "comm/segment.h"
#include "test/cmocka.h"
#include "test/comm/nccl/nccl_custom.h"
#include "test/stand_in/nccl_stand_in.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WORLD = 6, INNER = 2, OUTER = WORLD / INNER, BYTES = 1 << 16, N_ROUNDS = 20 };

/* The roles of a hybrid-sharded job. */
enum { N_ROLES = ZR_ROLE_CONTROL + 1 };

/* A rank with the communicators of a hybrid-sharded job, each on its own stream. */
struct hybrid {
    uv_loop_t loop;
    struct zr_rendezvous *rdv;
    struct zr_device *dev;
    int32_t members[INNER + OUTER];
    struct zr_group in, out, all;
    struct zr_comm *comm[ZR_ROLES];
    struct zr_stream *stream[ZR_ROLES];
    char *base[ZR_ROLES];
};

static void find_groups(struct hybrid *h, int rank)
{
    for (int i = 0; i < INNER; i++)
        h->members[i] = rank / INNER * INNER + i;
    for (int g = 0; g < OUTER; g++)
        h->members[INNER + g] = g * INNER + rank % INNER;
    h->in = (struct zr_group){INNER, rank % INNER, h->members, INNER, rank % INNER};
    h->out = (struct zr_group){OUTER, rank / INNER, h->members + INNER, OUTER, rank / INNER};
    h->all = zr_group_of_all(rank, WORLD);
}

static int share_arena(struct hybrid *h, int n, const enum zr_role *role, int64_t bytes)
{
    struct zr_arena *a;
    int err = zr_comm_arena(h->comm[role[0]], bytes, &a);
    if (err)
        return err;
    for (int i = 0; i < n && !err; i++) {
        err = zr_comm_attach(h->comm[role[i]], a);
        h->base[role[i]] = a->base;
    }
    zr_arena_drop(a);
    return err;
}

static int open_arenas(struct hybrid *h, const struct zr_role_ask *ask)
{
    static const enum zr_role two[2][2] = {{ZR_ROLE_GATHER, ZR_ROLE_GATHER_OUTER},
                                           {ZR_ROLE_REDUCE, ZR_ROLE_REDUCE_OUTER}};
    static const enum zr_role control = ZR_ROLE_CONTROL;
    int64_t own[N_ROLES];
    for (int r = 0; r < N_ROLES; r++)
        own[r] = zr_nccl_role_bytes((enum zr_role)r, &ask[r], custom.deterministic);
    int err = share_arena(h, 1, &control, BYTES + own[control]);
    for (int k = 0; k < 2 && !err; k++)
        err = share_arena(h, 2, two[k], BYTES + own[two[k][0]] + own[two[k][1]]);
    return err;
}

static int open_hybrid(struct hybrid *h, const struct zr_world *w)
{
    memset(h, 0, sizeof *h);
    find_groups(h, w->rank);
    uv_loop_init(&h->loop);
    struct zr_nccl_options opt = nccl_fixture_options(custom.deterministic, custom.timeout_ms);
    const struct zr_role_ask ask[ZR_ROLES] = {{&h->in, NCCL_SLICE_BYTES, NCCL_PACKED_BYTES},
                                              {&h->in, NCCL_SLICE_BYTES, NCCL_PACKED_BYTES},
                                              {&h->out, NCCL_SLICE_BYTES, NCCL_PACKED_BYTES},
                                              {&h->out, NCCL_SLICE_BYTES, NCCL_PACKED_BYTES},
                                              {&h->all, 0, 0}};
    opt.log = custom.to_log;
    if (custom.change)
        custom.change(&opt, w->rank);
    int err = zr_rendezvous_open(&h->loop, w, 30000, &h->rdv);
    if (!err)
        err = zr_cuda_device_open(w->local_rank, &h->dev);
    if (!err)
        err = zr_nccl_open(h->rdv, h->dev, &opt, ask, h->comm);
    for (int r = 0; r < N_ROLES && !err; r++)
        err = h->dev->ops->stream_open(h->dev, ZR_STREAM_QUEUE, zr_role_name((enum zr_role)r), NULL,
                                       &h->stream[r]);
    return err ? err : open_arenas(h, ask);
}

static bool close_hybrid(struct hybrid *h)
{
    for (int r = 0; r < N_ROLES; r++)
        if (h->stream[r])
            h->dev->ops->stream_close(h->stream[r]);
    for (int r = 0; r < N_ROLES; r++)
        if (h->comm[r])
            zr_comm_close(h->comm[r]);
    if (h->dev)
        h->dev->ops->close(h->dev);
    zr_rendezvous_free(h->rdv);
    return uv_loop_close(&h->loop) == 0;
}

/* ---- what each role moves ---- */

/* Copies, and waits for the copy. */
static int store(struct hybrid *h, struct zr_stream *s, char *dst, const void *src, int64_t bytes)
{
    int err = h->dev->ops->copy(s, dst, src, bytes);
    return err ? err : h->dev->ops->stream_sync(s);
}

enum { SLICE = 128, N_SEGS = 3, SEG_APART = 4096 };

/* Small ragged slices, which therefore travel packed, in a region per role. */
static int64_t region(enum zr_role r, int i)
{
    return (r >= ZR_ROLE_GATHER_OUTER ? BYTES / 2 : 0) + i * SEG_APART;
}

static struct zr_cut cut_of(const struct zr_group *g)
{
    return (struct zr_cut){.each = SLICE, .total = SLICE * g->size - 64};
}

static int fill(struct hybrid *h, enum zr_role r, int round)
{
    char mine[SLICE];
    const struct zr_cut cut = cut_of(&h->comm[r]->group);
    int err = 0, place = h->comm[r]->group.rank;
    for (int i = 0; i < N_SEGS && !err; i++) {
        memset(mine, zr_comm_rank(h->comm[r], place) + 10 * i + round, sizeof mine);
        err = store(h, h->stream[r], h->base[r] + region(r, i) + zr_cut_at(&cut, place), mine,
                    zr_cut_bytes(&cut, place));
    }
    return err;
}

static int gather(struct hybrid *h, enum zr_role r, int round)
{
    struct zr_gather_seg seg[N_SEGS];
    const struct zr_tag tag = {.unit = round};
    for (int i = 0; i < N_SEGS; i++)
        seg[i] = (struct zr_gather_seg){region(r, i), region(r, i), true, cut_of(&h->comm[r]->group)};
    return zr_comm_all_gather(h->comm[r], h->stream[r], seg, N_SEGS, &tag);
}

static bool has_gathered(struct hybrid *h, enum zr_role r, int round)
{
    char got[SLICE * WORLD];
    const struct zr_cut cut = cut_of(&h->comm[r]->group);
    bool right = true;
    for (int i = 0; i < N_SEGS; i++) {
        right &= h->dev->ops->copy(h->stream[r], got, h->base[r] + region(r, i), cut.total) == 0 &&
                 h->dev->ops->stream_sync(h->stream[r]) == 0;
        for (int64_t k = 0; k < cut.total; k++)
            right &= got[k] == (char)(zr_comm_rank(h->comm[r], (int)(k / SLICE)) + 10 * i + round);
    }
    return right;
}

/* Gathers within groups and between groups at the same time, from one arena. Each has its own buffer. */
static void gather_both(struct rank *me, struct hybrid *h)
{
    for (int round = 0; round < N_ROUNDS; round++) {
        for (int r = ZR_ROLE_GATHER; r <= ZR_ROLE_GATHER_OUTER; r += 2)
            RANK_CHECK(me, fill(h, (enum zr_role)r, round) == 0, "%s", zr_error_text());
        for (int r = ZR_ROLE_GATHER; r <= ZR_ROLE_GATHER_OUTER; r += 2)
            RANK_CHECK(me, gather(h, (enum zr_role)r, round) == 0, "%s", zr_error_text());
        for (int r = ZR_ROLE_GATHER; r <= ZR_ROLE_GATHER_OUTER; r += 2)
            RANK_CHECK(me, has_gathered(h, (enum zr_role)r, round), "role %d, round %d", r, round);
    }
}

/* Each rank's gradient is its rank plus 1. It is summed within groups and then between groups, where the
 * first place has the whole slice. */
static void reduce_both(struct rank *me, struct hybrid *h)
{
    enum { PARTIAL = 8192, SUM = 16384 };
    float grad[SLICE / 4], sum = 0;
    const struct zr_tag tag = {.unit = 1};
    struct zr_comm *in = h->comm[ZR_ROLE_REDUCE], *out = h->comm[ZR_ROLE_REDUCE_OUTER];
    struct zr_stream *s = h->stream[ZR_ROLE_REDUCE];
    char *base = h->base[ZR_ROLE_REDUCE];
    for (int i = 0; i < SLICE / 4; i++)
        grad[i] = (float)(me->w.rank + 1);
    for (int k = 0; k < INNER; k++)
        RANK_CHECK(me, store(h, s, base + SLICE * k, grad, SLICE) == 0, "%s", zr_error_text());
    struct zr_reduce_seg seg = {.dst = PARTIAL, .cut = {SLICE, SLICE * INNER}, .dtype = ZERO_F32};
    RANK_CHECK(me, zr_comm_reduce_scatter(in, s, &seg, 1, &tag) == 0, "%s", zr_error_text());
    seg = (struct zr_reduce_seg){.src = PARTIAL, .dst = SUM, .cut = {SLICE, SLICE}, .dtype = ZERO_F32};
    RANK_CHECK(me, zr_comm_reduce_scatter(out, s, &seg, 1, &tag) == 0, "%s", zr_error_text());
    RANK_CHECK(me, h->dev->ops->copy(s, &sum, base + SUM, sizeof sum) == 0, "%s", zr_error_text());
    h->dev->ops->stream_sync(s);
    RANK_CHECK(me, sum == (out->group.rank == 0 ? (float)(WORLD * (WORLD + 1) / 2) : 0), "the sum is %g",
               (double)sum);
    out = h->comm[ZR_ROLE_GATHER_OUTER];
    RANK_CHECK(me, zr_comm_reduce_scatter(out, s, &seg, 1, &tag) == ZERO_ERR_ARG, "a gather reduces");
}

static void control_all(struct rank *me, struct hybrid *h)
{
    struct zr_comm *c = h->comm[ZR_ROLE_CONTROL];
    struct zr_stream *s = h->stream[ZR_ROLE_CONTROL];
    const struct zr_tag tag = {.unit = -1};
    const int64_t mine = me->w.rank + 1;
    int64_t sum = 0;
    RANK_CHECK(me, store(h, s, h->base[ZR_ROLE_CONTROL] + 4096, &mine, sizeof mine) == 0, "%s",
               zr_error_text());
    RANK_CHECK(me, zr_comm_exchange(c, s, 0, 64, &tag) == 0, "%s", zr_error_text());
    RANK_CHECK(me, zr_comm_agree(c, s, 4096, 1, 0, &tag) == 0, "%s", zr_error_text());
    RANK_CHECK(me, h->dev->ops->copy(s, &sum, h->base[ZR_ROLE_CONTROL] + 4096, sizeof sum) == 0, "%s",
               zr_error_text());
    h->dev->ops->stream_sync(s);
    RANK_CHECK(me, sum == WORLD * (WORLD + 1) / 2, "%lld", (long long)sum);
}

static void every_role(struct rank *me)
{
    struct hybrid h;
    char why[512];
    RANK_CHECK(me, open_hybrid(&h, &me->w) == 0, "%s", zr_error_text());
    gather_both(me, &h);
    reduce_both(me, &h);
    control_all(me, &h); /* the comparison of sizes per group finds no difference */
    for (int r = 0; r < N_ROLES; r++)
        RANK_CHECK(me, zr_comm_status(h.comm[r], why, sizeof why) == 0, "%s", why);
    RANK_CHECK(me, close_hybrid(&h), "handles are left");
}

static void expect_nothing_open(void)
{
    struct nccl_stand_in_counts after;
    nccl_stand_in_counts(&after);
    assert_int_equal(after.n_comms, 0);
    assert_int_equal(after.n_registered, 0);
}

/* The world is made by several NCCL ids, whatever the number of ranks per id, and by one where NCCL takes
 * no more. */
static int ranks_per_id;

static void by_several_ids(struct zr_nccl_options *opt, int rank)
{
    opt->ranks_per_id = ranks_per_id;
}

static void test_several_ids(void **state)
{
    static const int versions[] = {22809, 22205};
    for (int v = 0; v < 2; v++)
        for (ranks_per_id = 1; ranks_per_id <= WORLD; ranks_per_id++) {
            struct nccl_stand_in_counts c;
            nccl_stand_in_the_machine()->version = versions[v];
            customize(false, LONG_MS);
            custom.change = by_several_ids;
            run_ranks(false, WORLD, every_role, NULL, NULL);
            nccl_stand_in_counts(&c);
            assert_int_equal(c.n_made, WORLD);
            assert_int_equal(c.n_scalable, v == 0 && ranks_per_id < WORLD ? WORLD : 0);
            nccl_stand_in_end();
        }
}

/* One communicator is made of all ranks and the others are split off it, if NCCL can split. The small one
 * has one CTA. */
static void expect_made(bool can_split, int world, int n_roles)
{
    struct nccl_stand_in_counts c;
    nccl_stand_in_counts(&c);
    assert_int_equal(c.n_made, can_split ? world : world * n_roles);
    assert_int_equal(c.n_split, can_split ? world * (n_roles - 1) : 0);
    assert_int_equal(c.n_one_cta, n_roles == N_ROLES ? world : 0);
    expect_nothing_open();
    nccl_stand_in_end();
}

static void test_every_role(void **state)
{
    static const int versions[] = {22809, 21705 /* cannot split, so each group gets a new id */};
    for (int k = 0; k < 4; k++) {
        nccl_stand_in_the_machine()->version = versions[k / 2];
        customize(k % 2, LONG_MS);
        run_ranks(false, WORLD, every_role, NULL, NULL);
        expect_made(k / 2 == 0, WORLD, N_ROLES);
    }
}

/* NCCL is asked to start the kernels of all communicators in the order of the calls. Before 2.32 a variable
 * asks for that, and the log says so unless it is 1. */
static void test_order(void **state)
{
    static const struct {
        int version;
        const char *variable, *said;
    } cases[] = {{23200, NULL, NULL},
                 {22809, NULL, "set NCCL_LAUNCH_ORDER_IMPLICIT=1 for every rank"},
                 {22807, "0", "set NCCL_LAUNCH_ORDER_IMPLICIT=1 for every rank"},
                 {22809, "1", NULL},
                 {22205, NULL, "use 2.26 or newer"}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        struct nccl_stand_in_counts c;
        nccl_stand_in_the_machine()->version = cases[k].version;
        if (cases[k].variable)
            setenv("NCCL_LAUNCH_ORDER_IMPLICIT", cases[k].variable, 1);
        else
            unsetenv("NCCL_LAUNCH_ORDER_IMPLICIT");
        customize(false, LONG_MS);
        run_ranks(false, WORLD, every_role, NULL, NULL);
        nccl_stand_in_counts(&c);
        assert_int_equal(c.n_ordered, k == 0 ? WORLD * N_ROLES : 0);
        const char *order = strstr(custom.log, "order several communicators");
        assert_true(!cases[k].said == !order);
        assert_true(!cases[k].said || strstr(custom.log, cases[k].said));
        assert_true(!order || !strstr(order + 1, "order several communicators")); /* rank 0 alone says it */
        nccl_stand_in_end();
    }
}

static void open_two(struct rank *me)
{
    struct fixture o, more;
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_custom, 2, LONG_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    if (*(const bool *)me->arg) {
        RANK_CHECK(me, fixture_open_more(&more, &o, &me->w, NULL, &fixture_custom, LONG_MS) == 0, "%s",
                   zr_error_text());
        fixture_close_more(&more);
    }
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

/* A second context on a GPU is opened with a warning. */
static void test_two_contexts(void **state)
{
    for (int i = 0; i < 3; i++) {
        bool two = i == 1;
        customize(false, LONG_MS);
        run_ranks(false, 2, open_two, &two, NULL);
        for (int gpu = 0; gpu < 2; gpu++) {
            char text[80];
            snprintf(text, sizeof text, "another context of this process has NCCL communicators on GPU %d",
                     gpu);
            assert_int_equal(strstr(custom.log, text) != NULL, two);
        }
    }
}

static void open_flat(struct rank *me)
{
    struct fixture o;
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_custom, 2, LONG_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_without_groups(void **state)
{
    static const int versions[] = {22809, 21705};
    for (int k = 0; k < 2; k++) {
        nccl_stand_in_the_machine()->version = versions[k];
        customize(true, LONG_MS);
        run_ranks(false, 3, open_flat, NULL, NULL);
        expect_made(k == 0, 3, 2);
    }
}

static ncclComm_t user_comm[WORLD];
static ncclUniqueId user_comm_id;

static void lend(struct zr_nccl_options *opt, int rank)
{
    opt->user_comm = user_comm[rank];
}

/* All are split off the communicator that the program lends, which the program can use afterwards. */
static void with_user_comm(struct rank *me)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    cudaSetDevice(me->w.rank);
    RANK_CHECK(me,
               ncclCommInitRankConfig(&user_comm[me->w.rank], WORLD, user_comm_id, me->w.rank, &config) == 0,
               "no communicator to lend");
    every_role(me);
    ncclCommDestroy(user_comm[me->w.rank]);
}

static void test_user_comm(void **state)
{
    customize(true, LONG_MS);
    custom.change = lend;
    ncclGetUniqueId(&user_comm_id);
    run_ranks(false, WORLD, with_user_comm, NULL, NULL);
    expect_nothing_open();
}

/* ---- one communicator fails ---- */

/* Rank 5 stays away from the communicators between groups and of all ranks. The others report whichever is
 * late first, and all operations under way end. */
static void stay_away_outside(struct rank *me)
{
    struct hybrid h;
    const struct zr_tag tag = {.unit = 7};
    const struct zr_reduce_seg seg = {.dst = 8192, .cut = {128, 128 * OUTER}, .dtype = ZERO_F32};
    RANK_CHECK(me, open_hybrid(&h, &me->w) == 0, "%s", zr_error_text());
    struct zr_comm *c = h.comm[ZR_ROLE_REDUCE_OUTER], *all = h.comm[ZR_ROLE_CONTROL];
    bool in_it = me->w.rank % INNER == 1, away = me->w.rank == 5;
    if (!away)
        RANK_CHECK(me, zr_comm_reduce_scatter(c, h.stream[ZR_ROLE_REDUCE_OUTER], &seg, 1, &tag) == 0, "%s",
                   zr_error_text());
    if (!away)
        RANK_CHECK(me, zr_comm_exchange(all, h.stream[ZR_ROLE_CONTROL], 0, 64, &tag) == 0, "%s",
                   zr_error_text());
    for (int r = 0; r < N_ROLES && away; r++)
        h.comm[r]->ops->abort(h.comm[r], ZERO_ERR_FAILED, "away");
    if (!away)
        wait_failed(c);
    for (int r = 0; r < N_ROLES; r++)
        h.dev->ops->stream_sync(h.stream[r]); /* each was aborted by the thread that found the failure */
    note_status(me, in_it ? c : all);
    RANK_CHECK(me, close_hybrid(&h), "handles are left");
}

static void test_one_fails(void **state)
{
    for (int fixed = 0; fixed < 2; fixed++) {
        customize(fixed, SHORT_MS);
        custom.change = wait_long_to_start; /* a busy machine needs longer to open everything */
        struct rank *r = run_ranks(false, WORLD, stay_away_outside, NULL, NULL);
        for (int i = 0; i < WORLD; i++)
            expect_rank(&r[i], i == 5 ? ZERO_ERR_FAILED : ZERO_ERR_TIMEOUT,
                        i == 5 ? "away" : " seq 1 unit 7: waited 800 ms (timeout_ms) for the other ranks");
        expect_nothing_open();
    }
}

/* Opening a group's communicator fails on one rank. Then it fails on all, with that rank's message, and
 * nothing is left. */
static void note_open_hybrid(struct rank *me)
{
    struct hybrid h;
    note_error(me, open_hybrid(&h, &me->w));
    RANK_CHECK(me, close_hybrid(&h), "handles are left");
}

static void test_split_fails(void **state)
{
    customize(false, SHORT_MS);
    for (int k = 1; k <= 4; k += 3) {
        nccl_stand_in_fail("ncclCommSplit", 3, k, ncclSystemError);
        struct rank *r = run_ranks(false, WORLD, note_open_hybrid, NULL, NULL);
        for (int i = 0; i < WORLD; i++)
            expect_rank(&r[i], ZERO_ERR_SYSTEM,
                        k == 1 ? "ncclCommSplit of the gather communicator: unhandled system error"
                               : "ncclCommSplit of the reduce outer communicator: unhandled system error");
        nccl_stand_in_end();
    }
    expected_misuse = -1; /* calls that waited for rank 3 were left behind with their memory */
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, nccl_test_start, nccl_test_finish)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_every_role),   TEST(test_several_ids), TEST(test_without_groups), TEST(test_order),
        TEST(test_two_contexts), TEST(test_user_comm),   TEST(test_one_fails),      TEST(test_split_fails)};
    return cmocka_run_group_tests_name("nccl's roles", tests, NULL, NULL);
}
