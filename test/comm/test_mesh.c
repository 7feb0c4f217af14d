/* SPDX-License-Identifier: Apache-2.0 */
/* test_mesh.c: tests the mesh's inner and outer groups over the places of any topology, against their
 * definitions. */
#include "comm/mesh.h"
#include "kernels/error.h"
#include "test/cmocka.h"
#include "test/comm/ranks.h"

#include <stdlib.h>
#include <string.h>

enum { MOST = 24 };

/* The topology that the probe returns to rank in a world whose ranks are on these hosts. */
static struct zr_topology topology_of(int32_t world, int32_t rank, const int *host)
{
    static struct zr_topology t;
    int32_t place = 0;
    zr_topology_free(&t);
    assert_int_equal(zr_topology_assume(world, 0, &t), 0);
    t.rank = rank;
    for (int32_t r = 0; r < world; r++) {
        t.host_of[r] = -1;
        for (int32_t s = 0; s < r; s++)
            if (host[s] == host[r])
                t.host_of[r] = t.host_of[s];
        if (t.host_of[r] < 0)
            t.host_of[r] = r ? t.n_hosts++ : 0;
    }
    for (int32_t h = 0; h < t.n_hosts; h++)
        for (int32_t r = 0; r < world; r++)
            if (t.host_of[r] == h) {
                t.place_of[r] = place;
                t.rank_at[place++] = r;
            }
    t.host = t.host_of[rank];
    return t;
}

/* Checks that g has exactly the ranks whose places belong to it, in their order. */
static void check_group(const struct zr_topology *t, const struct zr_group *g, int32_t inner,
                        bool (*belongs)(int32_t mine, int32_t other, int32_t inner))
{
    int32_t n = 0, local_size = 0, local_rank = 0, mine = t->place_of[t->rank];
    for (int32_t p = 0; p < t->world; p++) {
        int32_t r = t->rank_at[p];
        if (!belongs(mine, p, inner))
            continue;
        assert_true(n < g->size);
        assert_int_equal(zr_group_member(g, n), r);
        if (r == t->rank) {
            assert_int_equal(g->rank, n);
            local_rank = local_size;
        }
        local_size += t->host_of[r] == t->host;
        n++;
    }
    assert_int_equal(n, g->size);
    assert_int_equal(g->local_size, local_size);
    assert_int_equal(g->local_rank, local_rank);
}

static bool everybody(int32_t mine, int32_t other, int32_t inner)
{
    return true;
}

static bool same_inner(int32_t mine, int32_t other, int32_t inner)
{
    return mine / inner == other / inner;
}

static bool same_outer(int32_t mine, int32_t other, int32_t inner)
{
    return mine % inner == other % inner;
}

static bool spans(const struct zr_topology *t, int32_t inner,
                  bool (*belongs)(int32_t mine, int32_t other, int32_t inner))
{
    for (int32_t p = 0; p < t->world; p++)
        for (int32_t q = 0; q < t->world; q++)
            if (belongs(p, q, inner) && t->host_of[t->rank_at[p]] != t->host_of[t->rank_at[q]])
                return true;
    return false;
}

static void check_mesh(int32_t world, const int *host)
{
    for (int32_t inner = 1; inner <= world; inner++) {
        if (world % inner)
            continue;
        for (int32_t rank = 0; rank < world; rank++) {
            struct zr_topology t = topology_of(world, rank, host);
            struct zr_mesh m;
            memset(&m, 0x55, sizeof m);
            assert_int_equal(zr_mesh_make(&t, &(struct zr_mesh_sizes){1, 1, 1, inner}, &m), 0);
            assert_true(m.dp_shard == inner && m.dp_replicate == world / inner);
            check_group(&t, &m.dp_group, inner, everybody);
            check_group(&t, &m.shard_group, inner, same_inner);
            check_group(&t, &m.replicate_group, inner, same_outer);
            assert_true(m.shard_group.size == inner && m.replicate_group.size == m.dp_replicate &&
                        m.dp_group.size == world);
            assert_int_equal(zr_group_member(&m.dp_group, 0), 0); /* roots are rank 0 */
            assert_int_equal(m.shard_group.rank + m.replicate_group.rank * inner, t.place_of[rank]);
            assert_true(m.replicas_span_hosts == spans(&t, inner, same_outer));
            zr_mesh_free(&m);
            zr_mesh_free(&m);
        }
    }
}

/* Checks the pair of an odd pipeline stage and the next one, or of an even one and the next: the ranks at
 * the same position within their stages. */
static void check_pair(const struct zr_mesh *m, int32_t rank, int32_t n_stage, int32_t odd)
{
    bool first = m->pp_rank % 2 == odd;
    int32_t other = first ? rank + n_stage : rank - n_stage;
    bool paired = first ? m->pp_rank + 1 < m->pp : m->pp_rank > 0;
    assert_int_equal(m->pair[odd].size, 1 + paired);
    assert_int_equal(m->pair[odd].rank, paired && !first);
    assert_int_equal(zr_group_member(&m->pair[odd], m->pair[odd].rank), rank);
    if (paired)
        assert_int_equal(zr_group_member(&m->pair[odd], first), other);
}

/* Checks the pair of the first and the last pipeline stage: the ranks at the same position within them. */
static void check_ends(const struct zr_mesh *m, int32_t rank, int32_t n_stage)
{
    bool at_end = m->pp > 1 && (m->pp_rank == 0 || m->pp_rank == m->pp - 1);
    assert_int_equal(m->ends.size, 1 + at_end);
    assert_int_equal(m->ends.rank, at_end && m->pp_rank > 0);
    for (int32_t k = 0; k < m->ends.size; k++)
        assert_int_equal(zr_group_member(&m->ends, k),
                         at_end ? rank % n_stage + k * (m->pp - 1) * n_stage : rank);
}

/* Returns the lowest rank on r's host with the same position on the tp axis and the same pipeline stage as
 * r. */
static int32_t lowest_of_host(const struct zr_topology *t, int32_t r, int32_t parts, int32_t n_stage)
{
    int32_t s = r / n_stage * n_stage + r % parts;
    while (t->host_of[s] != t->host_of[r])
        s += parts;
    return s;
}

/* The data-parallel ranks of each pipeline stage and each tp position are a world of their own. They are
 * ordered host by host, and hosts by their lowest such rank. So the first is the lowest, wherever other
 * ranks lie. */
static void check_division(int32_t world, const int *host, int32_t stages, int32_t parts, int32_t inner)
{
    bool spans_hosts = false;
    struct zr_mesh last = {0};
    int32_t n_stage = world / stages;
    for (int32_t rank = 0; rank < world; rank++) {
        struct zr_topology t = topology_of(world, rank, host);
        struct zr_mesh m;
        int32_t n = 0, place = -1;
        assert_int_equal(zr_mesh_make(&t, &(struct zr_mesh_sizes){stages, parts, 1, inner}, &m), 0);
        assert_true(m.pp == stages && m.pp_rank == rank / n_stage);
        assert_true(m.tp == parts && m.tp_rank == rank % parts && m.dp_replicate == n_stage / parts / inner);
        check_group(&t, &m.world, inner, everybody);
        for (int32_t k = 0; k < m.dp_group.size; k++) {
            int32_t r = zr_group_member(&m.dp_group, k),
                    before = k ? zr_group_member(&m.dp_group, k - 1) : -1;
            int32_t host_first = lowest_of_host(&t, r, parts, n_stage);
            assert_true(r % parts == rank % parts && r / n_stage == rank / n_stage);
            assert_true(k > 0 || r == rank / n_stage * n_stage + rank % parts);
            if (k > 0) {
                int32_t host_before = lowest_of_host(&t, before, parts, n_stage);
                assert_true(host_before < host_first || (host_before == host_first && before < r));
            }
            place = r == rank ? k : place;
            n++;
        }
        assert_true(n == n_stage / parts && place == m.dp_group.rank);
        assert_true(m.shard_group.size == inner && m.replicate_group.size == m.dp_replicate &&
                    m.tp_group.size == parts);
        assert_true(m.shard_group.rank == place % inner && m.replicate_group.rank == place / inner);
        for (int32_t k = 0; k < inner; k++)
            assert_int_equal(m.shard_group.members[k], m.dp_group.members[place / inner * inner + k]);
        for (int32_t k = 0; k < m.dp_replicate; k++) {
            assert_int_equal(m.replicate_group.members[k], m.dp_group.members[place % inner + k * inner]);
            spans_hosts |= t.host_of[m.replicate_group.members[k]] != t.host_of[m.replicate_group.members[0]];
        }
        for (int32_t k = 0; k < parts; k++)
            assert_int_equal(m.tp_group.members[k], rank / parts * parts + k);
        assert_int_equal(m.tp_group.rank, rank % parts);
        check_pair(&m, rank, n_stage, 0);
        check_pair(&m, rank, n_stage, 1);
        check_ends(&m, rank, n_stage);
        assert_true(rank == 0 || m.replicas_span_hosts == last.replicas_span_hosts);
        last.replicas_span_hosts = m.replicas_span_hosts;
        zr_mesh_free(&m);
    }
    assert_true(last.replicas_span_hosts == spans_hosts);
}

static void check_divisions(int32_t world, const int *host)
{
    for (int32_t stages = 1; stages <= world; stages++)
        for (int32_t parts = 1; world % stages == 0 && parts <= world / stages; parts++)
            for (int32_t inner = 1; world / stages % parts == 0 && inner <= world / stages / parts; inner++)
                if (world / stages / parts % inner == 0 && stages * parts > 1)
                    check_division(world, host, stages, parts, inner);
}

static void test_every_divisor(void **state)
{
    for (int32_t world = 1; world <= MOST; world++)
        for (int32_t each = 1; each <= world; each += 1 + each / 3) {
            int block[MOST], cyclic[MOST];
            for (int r = 0; r < world; r++) {
                block[r] = r / each;
                cyclic[r] = r % each;
            }
            check_mesh(world, block);
            check_mesh(world, cyclic);
            if (world <= 12)
                check_divisions(world, cyclic);
        }
}

static void test_any_hosts(void **state)
{
    uint64_t seed = fresh_seed("any hosts");
    for (int i = 0; i < 300; i++) {
        int32_t world = (int32_t)random_in(&seed, 1, 12), most = (int32_t)random_in(&seed, 0, world);
        int host[MOST];
        for (int r = 0; r < world; r++)
            host[r] = (int)random_in(&seed, 0, most);
        check_mesh(world, host);
        check_divisions(world, host);
    }
}

/* A case that can be checked by eye: ranks 0 to 5 on hosts a b b a a b. */
static void test_one_written_out(void **state)
{
    static const int host[] = {0, 1, 1, 0, 0, 1};
    static const int32_t all[] = {0, 3, 4, 1, 2, 5}, in[] = {4, 1}, out[] = {0, 4, 2};
    struct zr_topology t = topology_of(6, 4, host);
    struct zr_mesh m;
    assert_int_equal(zr_mesh_make(&t, &(struct zr_mesh_sizes){1, 1, 1, 2}, &m), 0);
    assert_memory_equal(m.dp_group.members, all, sizeof all);
    assert_memory_equal(m.shard_group.members, in, sizeof in);
    assert_memory_equal(m.replicate_group.members, out, sizeof out);
    assert_true(m.shard_group.rank == 0 && m.shard_group.local_size == 1 && m.shard_group.local_rank == 0);
    assert_true(m.replicate_group.rank == 1 && m.replicate_group.local_size == 2 &&
                m.replicate_group.local_rank == 1);
    assert_true(m.dp_group.rank == 2 && m.dp_group.local_size == 3 && m.dp_group.local_rank == 2);
    assert_true(m.replicas_span_hosts);
    zr_mesh_free(&m);
    assert_int_equal(zr_mesh_make(&t, &(struct zr_mesh_sizes){1, 1, 1, 3}, &m), 0);
    assert_true(m.replicas_span_hosts);
    zr_mesh_free(&m);
}

static void test_refused(void **state)
{
    static const int host[MOST] = {0}, bad[] = {-1, 0, 3, 5, 7, 9, 16};
    struct zr_topology t = topology_of(8, 0, host);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct zr_mesh m;
        char text[64];
        memset(&m, 0x55, sizeof m);
        assert_int_equal(zr_mesh_make(&t, &(struct zr_mesh_sizes){1, bad[i], 1, 1}, &m), ZERO_ERR_ARG);
        assert_null(m.members);
        snprintf(text, sizeof text, "pp 1 and tp %d in a world of 8", bad[i]);
        assert_non_null(strstr(zr_error_text(), text));
        assert_int_equal(zr_mesh_make(&t, &(struct zr_mesh_sizes){bad[i], 1, 1, 1}, &m), ZERO_ERR_ARG);
        assert_null(m.members);
        snprintf(text, sizeof text, "pp %d and tp 1 in a world of 8", bad[i]);
        assert_non_null(strstr(zr_error_text(), text));
        assert_int_equal(zr_mesh_make(&t, &(struct zr_mesh_sizes){1, 1, 1, bad[i]}, &m), ZERO_ERR_ARG);
        assert_null(m.members);
        snprintf(text, sizeof text, "groups of %d ranks in a world of 8", bad[i]);
        assert_non_null(strstr(zr_error_text(), text));
    }
    zr_mesh_free(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_divisor),
        cmocka_unit_test(test_any_hosts),
        cmocka_unit_test(test_one_written_out),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests_name("mesh", tests, NULL, NULL);
}
