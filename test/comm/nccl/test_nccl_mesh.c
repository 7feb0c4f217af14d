/* SPDX-License-Identifier: Apache-2.0 */
/* test_nccl_mesh.c: tests NCCL communicators of a mesh with tensor parallelism and pipeline stages: how they
 * are made, what each moves, and that ranks which issue different operations find out. Runs over the
 * stand-ins for CUDA and NCCL. */
#include "comm/mesh.h"
#include "test/cmocka.h"
#include "test/comm/nccl/nccl_custom.h"
#include "test/stand_in/nccl_stand_in.h"

#include <string.h>

enum {
    PP = 2,
    TP = 2,
    CP = 2,
    WORLD = 8,
    DP = WORLD / PP / TP,
    BYTES = 1 << 16,
    SLICE = 128,
    SUMS_AT = 8192
};

struct part {
    uv_loop_t loop;
    struct zr_rendezvous *rdv;
    struct zr_device *dev;
    struct zr_topology topology;
    struct zr_mesh mesh;
    struct zr_comm *comm[ZR_ROLES];
    struct zr_stream *stream;
    char *base[ZR_ROLES];
};

static void ask_roles(const struct part *p, struct zr_role_ask ask[ZR_ROLES])
{
    const struct zr_group *group[ZR_ROLES] = {
        [ZR_ROLE_GATHER] = &p->mesh.dp_group,   [ZR_ROLE_REDUCE] = &p->mesh.dp_group,
        [ZR_ROLE_CONTROL] = &p->mesh.dp_group,  [ZR_ROLE_TP] = &p->mesh.tp_group,
        [ZR_ROLE_WORLD] = &p->mesh.world,       [ZR_ROLE_CP] = &p->mesh.cp_group,
        [ZR_ROLE_EVEN_PAIR] = &p->mesh.pair[0], [ZR_ROLE_TIED] = &p->mesh.ends};
    for (int r = 0; r < ZR_ROLES; r++)
        ask[r] = (struct zr_role_ask){group[r], NCCL_SLICE_BYTES, NCCL_PACKED_BYTES};
}

/* Each role has a separate arena. */
static int open_arenas(struct part *p, const struct zr_role_ask *ask)
{
    int err = 0;
    for (int r = 0; r < ZR_ROLES && !err; r++) {
        struct zr_arena *a = NULL;
        if (!p->comm[r])
            continue;
        const int64_t own = zr_nccl_role_bytes((enum zr_role)r, &ask[r], custom.deterministic);
        err = zr_comm_arena(p->comm[r], BYTES + own, &a);
        if (!err)
            err = zr_comm_attach(p->comm[r], a);
        p->base[r] = a ? a->base : NULL;
        zr_arena_drop(a);
    }
    return err;
}

static int open_part(struct part *p, const struct zr_world *w)
{
    struct zr_nccl_options opt = nccl_fixture_options(custom.deterministic, custom.timeout_ms);
    struct zr_role_ask ask[ZR_ROLES];
    if (custom.change)
        custom.change(&opt, w->rank);
    memset(p, 0, sizeof *p);
    uv_loop_init(&p->loop);
    int err = zr_topology_assume(WORLD, 0, &p->topology);
    p->topology.rank = w->rank;
    if (!err)
        err = zr_mesh_make(&p->topology, &(struct zr_mesh_sizes){PP, TP, CP, DP}, &p->mesh);
    if (!err)
        err = zr_rendezvous_open(&p->loop, w, 30000, &p->rdv);
    if (!err)
        err = zr_cuda_device_open(w->local_rank, &p->dev);
    ask_roles(p, ask);
    if (!err)
        err = zr_nccl_open(p->rdv, p->dev, &opt, ask, p->comm);
    if (!err)
        err = p->dev->ops->stream_open(p->dev, ZR_STREAM_QUEUE, "mesh", NULL, &p->stream);
    return err ? err : open_arenas(p, ask);
}

static bool close_part(struct part *p)
{
    if (p->stream)
        p->dev->ops->stream_close(p->stream);
    for (int r = 0; r < ZR_ROLES; r++)
        if (p->comm[r])
            zr_comm_close(p->comm[r]);
    if (p->dev)
        p->dev->ops->close(p->dev);
    zr_rendezvous_free(p->rdv);
    zr_mesh_free(&p->mesh);
    zr_topology_free(&p->topology);
    return uv_loop_close(&p->loop) == 0;
}

/* Copy, and wait for the copy. */
static int copy(struct part *p, void *dst, const void *src, int64_t bytes)
{
    int err = p->dev->ops->copy(p->stream, dst, src, bytes);
    return err ? err : p->dev->ops->stream_sync(p->stream);
}

/* Sums rank + 1 over the ranks of tp. One of the world's ranks may give another tag. */
static int sum_over_tp(struct part *p, int rank, int odd_rank, float *sum)
{
    struct zr_comm *c = p->comm[ZR_ROLE_TP];
    const struct zr_tag tag = {.unit = 3, .call_hash = rank == odd_rank};
    const struct zr_reduce_seg seg = {.dst = SUMS_AT, .cut = {SLICE, SLICE * TP}, .dtype = ZERO_F32};
    float mine[SLICE / sizeof(float)];
    int err = 0;
    for (size_t i = 0; i < sizeof mine / sizeof *mine; i++)
        mine[i] = (float)(rank + 1);
    for (int k = 0; k < TP && !err; k++)
        err = copy(p, p->base[ZR_ROLE_TP] + k * SLICE, mine, SLICE);
    if (!err)
        err = zr_comm_reduce_scatter(c, p->stream, &seg, 1, &tag);
    return err ? err : copy(p, sum, p->base[ZR_ROLE_TP] + SUMS_AT, sizeof *sum);
}

/* Sends a word from each place of a pair to the other. */
static void exchange_words(struct rank *me, struct part *p, enum zr_role role)
{
    struct zr_comm *c = p->comm[role];
    const struct zr_tag tag = {.unit = -1};
    for (int root = 0; root < 2; root++) {
        int64_t word = c->group.rank == root ? me->w.rank : -1;
        RANK_CHECK(me, copy(p, p->base[role], &word, sizeof word) == 0, "%s", zr_error_text());
        RANK_CHECK(me, zr_comm_broadcast(c, p->stream, 0, sizeof word, root, &tag) == 0, "%s",
                   zr_error_text());
        RANK_CHECK(me, copy(p, &word, p->base[role], sizeof word) == 0, "%s", zr_error_text());
        RANK_CHECK(me, word == zr_comm_rank(c, root), "%s: %lld", zr_role_name(role), (long long)word);
    }
}

static void agree(struct rank *me, struct part *p)
{
    int64_t word = me->w.rank;
    const struct zr_tag tag = {.unit = -1};
    RANK_CHECK(me, copy(p, p->base[ZR_ROLE_WORLD], &word, sizeof word) == 0, "%s", zr_error_text());
    RANK_CHECK(me, zr_comm_agree(p->comm[ZR_ROLE_WORLD], p->stream, 0, 1, 0, &tag) == 0, "%s",
               zr_error_text());
    RANK_CHECK(me, copy(p, &word, p->base[ZR_ROLE_WORLD], sizeof word) == 0, "%s", zr_error_text());
    RANK_CHECK(me, word == WORLD * (WORLD - 1) / 2, "%lld", (long long)word);
}

/* Ranks of the second stage make one more sum, as stages may differ. */
static void every_role(struct rank *me)
{
    struct part p;
    char why[512];
    float sum = 0;
    int first = me->w.rank / TP * TP;
    RANK_CHECK(me, open_part(&p, &me->w) == 0, "%s", zr_error_text());
    for (int i = 0; i <= p.mesh.pp_rank; i++)
        RANK_CHECK(me, sum_over_tp(&p, me->w.rank, -1, &sum) == 0 && sum == (float)(2 * first + 3),
                   "the sum is %g", (double)sum);
    exchange_words(me, &p, ZR_ROLE_EVEN_PAIR);
    exchange_words(me, &p, ZR_ROLE_TIED);
    agree(me, &p);
    agree(me, &p);
    for (int r = 0; r < ZR_ROLES; r++)
        RANK_CHECK(me, !p.comm[r] || zr_comm_status(p.comm[r], why, sizeof why) == 0, "%s", why);
    RANK_CHECK(me, close_part(&p), "handles are left");
}

/* The world's communicator is made first, and the others are split off it. Two roles have one CTA. */
static void test_every_role(void **state)
{
    enum { N_ROLES = 8, N_SMALL = 2 };
    static const int versions[] = {22809, 21705 /* cannot split */};
    for (int k = 0; k < 4; k++) {
        struct nccl_stand_in_counts c;
        nccl_stand_in_the_machine()->version = versions[k / 2];
        customize(k % 2, LONG_MS);
        run_ranks(false, WORLD, every_role, NULL, NULL);
        nccl_stand_in_counts(&c);
        assert_int_equal(c.n_made, k / 2 == 0 ? WORLD : WORLD * N_ROLES);
        assert_int_equal(c.n_split, k / 2 == 0 ? WORLD * (N_ROLES - 1) : 0);
        assert_int_equal(c.n_one_cta, WORLD * N_SMALL);
        assert_int_equal(c.n_comms, 0);
        nccl_stand_in_end();
    }
}

/* One rank gives its sum over tp another tag, which NCCL does not see. All ranks hear of it at the next
 * agreement. */
static void differ(struct rank *me)
{
    struct part p;
    float sum;
    RANK_CHECK(me, open_part(&p, &me->w) == 0, "%s", zr_error_text());
    RANK_CHECK(me, sum_over_tp(&p, me->w.rank, *(const int *)me->arg, &sum) == 0, "%s", zr_error_text());
    agree(me, &p);
    wait_failed(p.comm[ZR_ROLE_WORLD]);
    note_status(me, p.comm[ZR_ROLE_WORLD]);
    RANK_CHECK(me, zr_comm_status(p.comm[ZR_ROLE_GATHER], NULL, 0) == ZERO_ERR_MISMATCH, "the others go on");
    RANK_CHECK(me, close_part(&p), "handles are left");
}

static void test_differ(void **state)
{
    for (int odd = 0; odd < WORLD; odd += 3) {
        customize(odd % 2, LONG_MS);
        struct rank *r = run_ranks(false, WORLD, differ, &odd, NULL);
        for (int i = 0; i < WORLD; i++)
            expect_rank(&r[i], ZERO_ERR_MISMATCH,
                        "the ranks of a communicator issued different operations up to a comparison");
    }
}

/* More operations than are watched at a time: the issuing thread waits for room. */
static void fill(struct rank *me)
{
    enum { MANY = 600 };
    struct part p;
    const struct zr_tag tag = {.unit = -1};
    RANK_CHECK(me, open_part(&p, &me->w) == 0, "%s", zr_error_text());
    struct zr_comm *c = p.comm[ZR_ROLE_EVEN_PAIR];
    for (int i = 0; i < MANY; i++)
        RANK_CHECK(me, zr_comm_broadcast(c, p.stream, 0, 64, i % 2, &tag) == 0, "%s", zr_error_text());
    p.dev->ops->stream_sync(p.stream);
    RANK_CHECK(me, zr_comm_status(c, NULL, 0) == 0, "failed");
    RANK_CHECK(me, close_part(&p), "handles are left");
}

static void test_many(void **state)
{
    customize(false, LONG_MS);
    nccl_stand_in_the_machine()->slow_us = 200;
    run_ranks(false, WORLD, fill, NULL, NULL);
}

/* ---- slow connections ---- */

/* Combines arrays over tp or cp, which have two ranks each. */
static void combine_arrays(struct rank *me, struct part *p, enum zr_role role)
{
    static const enum zr_op ops[] = {ZR_OP_ALL_REDUCE, ZR_OP_REDUCE_SCATTER, ZR_OP_ALL_GATHER,
                                     ZR_OP_ALL_TO_ALL, ZR_OP_SHIFT};
    struct zr_comm *c = p->comm[role];
    char why[512] = "";
    const struct zr_tag tag = {.unit = -1};
    const struct zr_arrays a = {p->base[role] + BYTES / 2, p->base[role], 1024, ZERO_F32, 1024, 1};
    for (size_t i = custom.deterministic ? 2 : 0; i < sizeof ops / sizeof *ops; i++)
        RANK_CHECK(me, zr_comm_arrays(c, p->stream, ops[i], &a, &tag) == 0, "%s", zr_error_text());
    p->dev->ops->stream_sync(p->stream);
    RANK_CHECK(me, zr_comm_status(c, why, sizeof why) == 0, "%s", why);
}

/* Operations over tp and cp, also those of whole arrays and the messages between all ranks, are connected
 * when the arenas are attached. */
static void connect_first(struct rank *me)
{
    struct part p;
    RANK_CHECK(me, open_part(&p, &me->w) == 0, "%s", zr_error_text());
    combine_arrays(me, &p, ZR_ROLE_TP);
    combine_arrays(me, &p, ZR_ROLE_CP);
    RANK_CHECK(me, close_part(&p), "handles are left");
}

static void test_slow_to_connect(void **state)
{
    for (int fixed = 0; fixed < 2; fixed++) {
        customize(fixed, SHORT_MS);
        custom.change = wait_long_to_start;
        nccl_stand_in_the_machine()->connect_ms = 2 * SHORT_MS;
        run_ranks(false, WORLD, connect_first, NULL, NULL);
        nccl_stand_in_end();
    }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, nccl_test_start, nccl_test_finish)

int main(void)
{
    const struct CMUnitTest tests[] = {TEST(test_every_role), TEST(test_differ), TEST(test_many),
                                       TEST(test_slow_to_connect)};
    return cmocka_run_group_tests_name("nccl's roles in a mesh", tests, NULL, NULL);
}
