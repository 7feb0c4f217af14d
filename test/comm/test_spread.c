/* SPDX-License-Identifier: Apache-2.0 */
/* test_spread.c: tests how groups lie on hosts, against definitions. Covers all ways in which up to eight
 * ranks can lie, and up to twelve ranks numbered host by host. Also tests that the fixed tree can be cut
 * by hosts exactly where the library says so. */
#include "comm/mesh.h"
#include "comm/spread.h"
#include "test/cmocka.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 12, MAX_PLACES = 64 * 64 };

/* --- reference definitions --- */

static int first_place_of(const int32_t *host, int p)
{
    int q = 0;
    while (host[q] != host[p])
        q++;
    return q;
}

static int count(const int32_t *host, int from, int to, int32_t of)
{
    int n = 0;
    for (int q = from; q < to; q++)
        n += host[q] == of;
    return n;
}

static bool are_neighbours(const int32_t *host, int n)
{
    for (int p = 0; p < n; p++)
        for (int q = p + 1; q < n; q++)
            for (int k = p; k < q; k++)
                if (host[p] == host[q] && host[k] != host[p])
                    return false;
    return true;
}

/* host: (n) the host number of each place; the numbers are arbitrary. */
static void check_spread(const struct zr_spread *s, const int32_t *host, int n, int own)
{
    int most = 0, least = n, n_hosts = 0;
    for (int p = 0; p < n; p++) {
        int here = count(host, 0, n, host[p]);
        most = here > most ? here : most;
        least = here < least ? here : least;
        assert_int_equal(s->local_of[p], count(host, 0, p, host[p]));
        if (first_place_of(host, p) == p)
            assert_int_equal(s->host_of[p], n_hosts++);
        assert_int_equal(s->host_of[p], s->host_of[first_place_of(host, p)]);
        assert_int_equal(s->n_local[s->host_of[p]], here);
        assert_int_equal(zr_spread_place(s, s->host_of[p], s->local_of[p]), p);
        for (int q = 0; q < n; q++)
            assert_int_equal(zr_spread_fetcher(s, p, s->host_of[q]),
                             count(host, 0, p, host[p]) % count(host, 0, n, host[q]));
    }
    assert_int_equal(s->size, n);
    assert_int_equal(s->n_hosts, n_hosts);
    assert_int_equal(s->host, s->host_of[own]);
    assert_int_equal(s->most_local, most);
    assert_int_equal(s->least_local, least);
    assert_int_equal(s->runs, are_neighbours(host, n));
    assert_int_equal(s->columns, s->runs && most == least);
}

/* --- the fixed tree --- */

/* Returns whether the tree over places [first, first + n) has a split with ranks of one host on both
 * sides, and other hosts' ranks too. Then a host's sum is no part of the tree. */
static bool splits_hosts(const int32_t *host, int first, int n)
{
    int h = 1;
    if (n == 1 || count(host, first, first + n, host[first]) == n)
        return false;
    while (h * 2 < n)
        h *= 2;
    bool inside = host[first + h - 1] == host[first + h];
    return inside || splits_hosts(host, first, h) || splits_hosts(host, first + h, n - h);
}

static float tree(const float *x, int n)
{
    int h = 1;
    if (n == 1)
        return x[0];
    while (h * 2 < n)
        h *= 2;
    return tree(x, h) + tree(x + h, n - h);
}

/* --- all ways to lie on hosts --- */

static void check_group(const struct zr_topology *t, const int32_t *members, int n)
{
    int32_t host[MOST];
    for (int p = 0; p < n; p++)
        host[p] = t->host_of[members[p]];
    for (int own = 0; own<n; own += n> 1 ? n - 1 : 1) {
        struct zr_spread s;
        struct zr_group g = {.size = n, .rank = own, .members = members};
        assert_int_equal(zr_spread_make(t, &g, &s), 0);
        check_spread(&s, host, n, own);
        if (s.columns)
            assert_int_equal(s.cut, !splits_hosts(host, 0, n));
        else
            assert_false(s.cut);
        zr_spread_free(&s);
    }
}

/* Rank r of n is on host of[r]. */
static void make_topology(const int32_t *of, int n, struct zr_topology *t)
{
    int place = 0;
    assert_int_equal(zr_topology_assume(n, 1, t), 0);
    t->n_hosts = 0;
    for (int r = 0; r < n; r++) {
        t->host_of[r] = of[r];
        t->n_hosts = of[r] >= t->n_hosts ? of[r] + 1 : t->n_hosts;
    }
    for (int h = 0; h < t->n_hosts; h++)
        for (int r = 0; r < n; r++)
            if (of[r] == h) {
                t->place_of[r] = place;
                t->rank_at[place++] = r;
            }
}

static void check_worst(const struct zr_topology *t, int inner, enum zr_role role)
{
    bool across = role == ZR_ROLE_GATHER_OUTER || role == ZR_ROLE_REDUCE_OUTER;
    int most_hosts = 0, most_remote = 0, all_cut = 1, all_one = 1;
    for (int place = 0; place < t->world; place++) { /* the group of every rank */
        struct zr_topology own = *t;
        struct zr_mesh mesh;
        struct zr_spread s;
        own.rank = t->rank_at[place];
        assert_int_equal(zr_mesh_make(&own, &(struct zr_mesh_sizes){1, 1, 1, inner}, &mesh), 0);
        const struct zr_group *g = role == ZR_ROLE_CONTROL ? &mesh.dp_group
                                   : across                ? &mesh.replicate_group
                                                           : &mesh.shard_group;
        assert_int_equal(zr_spread_make(t, g, &s), 0);
        int remote = 0;
        for (int p = 0; p < g->size; p++)
            remote += t->host_of[zr_group_member(g, p)] != t->host_of[own.rank];
        most_hosts = s.n_hosts > most_hosts ? s.n_hosts : most_hosts;
        most_remote = remote > most_remote ? remote : most_remote;
        all_cut &= s.cut;
        all_one &= remote == 0;
        zr_spread_free(&s);
        zr_mesh_free(&mesh);
    }
    struct zr_spread_worst w;
    assert_int_equal(zr_spread_worst(t, inner, role, &w), 0);
    assert_int_equal(w.most_hosts, most_hosts);
    assert_int_equal(w.most_remote, most_remote);
    assert_int_equal(w.all_cut, all_cut);
    assert_int_equal(w.all_one_host, all_one);
}

static void check_topology(const int32_t *of, int n)
{
    struct zr_topology t;
    int32_t backwards[MOST];
    make_topology(of, n, &t);
    check_group(&t, t.rank_at, n);
    for (int p = 0; p < n; p++)
        backwards[p] = n - 1 - p;
    check_group(&t, backwards, n);
    if (n > 2)
        check_group(&t, backwards + 1, n - 1); /* not all ranks */
    for (int inner = 1; inner <= n; inner++)
        for (int role = 0; n % inner == 0 && role <= ZR_ROLE_CONTROL; role++)
            check_worst(&t, inner, (enum zr_role)role);
    zr_topology_free(&t);
}

/* Tries every host for ranks from r on: those used already, and one new. With in_order, only the last two. */
static int check_all(int32_t *of, int r, int n, int n_hosts, bool in_order)
{
    int n_checked = 0;
    if (r == n) {
        check_topology(of, n);
        return 1;
    }
    for (int h = in_order && n_hosts ? n_hosts - 1 : 0; h <= n_hosts; h++) {
        of[r] = h;
        n_checked += check_all(of, r + 1, n, h == n_hosts ? n_hosts + 1 : n_hosts, in_order);
    }
    return n_checked;
}

static void test_every_topology(void **state)
{
    static const int ways[] = {1, 2, 5, 15, 52, 203, 877, 4140};
    int32_t of[MOST];
    for (int n = 1; n <= 8; n++)
        assert_int_equal(check_all(of, 0, n, 0, false), ways[n - 1]);
    for (int n = 9; n <= MOST; n++)
        assert_int_equal(check_all(of, 0, n, 0, true), 1 << (n - 1));
}

/* Up to 64 hosts with up to 64 ranks each. Where the tree can be cut by hosts, adding up the hosts' sums
 * gives the bits of one sum over all. Where it cannot, the bits differ; the values are chosen so that any
 * other order shows. */
static void test_cut(void **state)
{
    static float x[MAX_PLACES], of_host[64];
    uint32_t seed = 1;
    for (int i = 0; i < MAX_PLACES; i++) {
        seed = seed * 1664525 + 1013904223;
        x[i] = (float)(seed >> 8) * 0x1p-20f;
    }
    int n_other = 0;
    for (int n_hosts = 1; n_hosts <= 64; n_hosts++)
        for (int local = 1; local <= 64; local++) {
            struct zr_topology t;
            struct zr_spread s;
            assert_int_equal(zr_topology_assume(n_hosts * local, local, &t), 0);
            struct zr_group all = zr_group_of_all(0, n_hosts * local);
            assert_int_equal(zr_spread_make(&t, &all, &s), 0);
            assert_true(s.columns && s.most_local == local && s.n_hosts == n_hosts);
            for (int h = 0; h < n_hosts; h++)
                of_host[h] = tree(x + h * local, local);
            float whole = tree(x, n_hosts * local), cut = tree(of_host, n_hosts);
            if (s.cut)
                assert_memory_equal(&whole, &cut, sizeof whole);
            n_other += whole != cut;
            assert_int_equal(s.cut, n_hosts == 1 || (local & (local - 1)) == 0);
            zr_spread_free(&s);
            zr_topology_free(&t);
        }
    assert_true(n_other > 1000); /* the values do show it */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_topology),
        cmocka_unit_test(test_cut),
    };
    return cmocka_run_group_tests_name("spread", tests, NULL, NULL);
}
