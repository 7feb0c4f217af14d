/* SPDX-License-Identifier: Apache-2.0 */
/* test_scale.c: tests that a few simulated ranks can stand for a symmetric world. Step time, memory and
 * traffic of rank 0 must equal those of a world in which all ranks are simulated, to the nanosecond and
 * the byte. */
#include "comm/sim/symmetry.h"
#include "shard/options.h"
#include "shard/verify/verify.h"
#include "test/cmocka.h"
#include "test/kernels/random.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_UNITS = 4 };

/* Sizes that no world divides: the last slices are shorter or empty. */
static const struct zr_verify_unit units[N_UNITS] = {
    {700001, 2e9, 4e9}, {100003, 3e8, 6e8}, {4099, 1e6, 2e6}, {300007, 9e8, 27e8}};

static struct zr_verify_case a_case(int world, int stage)
{
    return (struct zr_verify_case){.seed = 1,
                                   .stage = stage,
                                   .world = world,
                                   .n_units = N_UNITS,
                                   .prefetch = 2,
                                   .accum = 1,
                                   .n_steps = 3,
                                   .bf16 = true,
                                   .declared = true,
                                   .wait_result = true,
                                   .poison = -1,
                                   .dead = -1};
}

/* Links are about as slow as compute, so that some of the traffic is exposed. */
static struct zr_verify_speed a_speed(int per_node, bool rings)
{
    return (struct zr_verify_speed){.flops_per_s = 1e12,
                                    .memory_bytes_per_s = 1e10,
                                    .near_bytes_per_s = 3e9,
                                    .far_bytes_per_s = 7e8,
                                    .launch_ns = 4000,
                                    .near_ns = 1900,
                                    .far_ns = 4100,
                                    .ranks_per_node = per_node,
                                    .rings = rings,
                                    .units = units};
}

static struct zr_verify_time by_symmetry(const struct zr_verify_case *c, const struct zr_verify_speed *s)
{
    struct zr_verify_time t = {0};
    struct zr_verify_result r;
    if (zr_verify_scale(c, s, &t, &r))
        fail_msg("world %d: %s", c->world, zr_error_text());
    if (r.n_reports || r.refused)
        fail_msg("world %d, group %d: %s", c->world, c->group, r.text);
    assert_int_equal(t.peak_bytes, t.plan_bytes);
    return t;
}

static struct zr_verify_time in_full(const struct zr_verify_case *c, const struct zr_verify_speed *s)
{
    struct zr_verify_time t = {0};
    struct zr_verify_result r;
    if (zr_verify_time(c, s, NULL, &t, &r))
        fail_msg("world %d: %s", c->world, zr_error_text());
    if (r.n_reports || r.refused)
        fail_msg("world %d: %s", c->world, r.text);
    assert_int_equal(t.n_simulated, c->world);
    return t;
}

static void same(const struct zr_verify_case *c, const struct zr_verify_speed *s)
{
    struct zr_verify_time a = by_symmetry(c, s), b = in_full(c, s);
    if (a.step_ns != b.step_ns || a.compute_ns != b.compute_ns || a.exposed_ns != b.exposed_ns ||
        a.received_bytes != b.received_bytes || a.peak_bytes != b.peak_bytes ||
        a.plan_bytes != b.plan_bytes || a.step_wire_bytes != b.step_wire_bytes ||
        a.step_outer_bytes != b.step_outer_bytes)
        fail_msg(
            "world %d, stage %d, hybrid %d, group %d, hosts of %d, rings %d: step %lld ns and %lld, compute "
            "%lld and %lld, received %lld and %lld, memory %lld and %lld, received in a step %lld and %lld",
            c->world, c->stage, c->hybrid, c->group, s->ranks_per_node, s->rings, (long long)a.step_ns,
            (long long)b.step_ns, (long long)a.compute_ns, (long long)b.compute_ns,
            (long long)a.received_bytes, (long long)b.received_bytes, (long long)a.peak_bytes,
            (long long)b.peak_bytes, (long long)a.step_wire_bytes, (long long)b.step_wire_bytes);
}

static void flat(int world, int stage)
{
    for (int rings = 0; rings < 2; rings++) {
        struct zr_verify_case c = a_case(world, stage);
        struct zr_verify_speed s = a_speed(8, rings);
        same(&c, &s);
    }
}

/* Includes worlds whose last host is not full. */
static void flat_worlds(void **state)
{
    for (int world = 1; world <= 16; world++)
        for (int stage = 0; stage <= 3; stage++)
            flat(world, stage);
    flat(24, 1);
    flat(31, 3);
    flat(47, 2);
    flat(64, 3);
}

/* Groups that fill hosts, share a host, span several hosts, and lie across hosts. */
static void worlds_of_groups(void **state)
{
    static const int cases[][3] = {{4, 2, 2},  {8, 4, 4},  {8, 2, 4},  {8, 4, 2},  {12, 3, 4},
                                   {12, 4, 3}, {12, 6, 4}, {6, 2, 4},  {6, 3, 2},  {15, 5, 4},
                                   {16, 1, 8}, {16, 8, 8}, {32, 8, 8}, {48, 16, 8}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int hybrid = ZR_HSDP; hybrid <= ZR_HFSDP; hybrid++)
            for (int rings = 0; rings < 2; rings++) {
                struct zr_verify_case c = a_case(cases[i][0], 3);
                c.group = cases[i][1];
                c.hybrid = hybrid;
                struct zr_verify_speed s = a_speed(cases[i][2], rings);
                same(&c, &s);
            }
}

/* Options that change the schedule. */
static void options(void **state)
{
    for (int i = 0; i < 24; i++) {
        static const int worlds[] = {3, 8, 12, 20};
        struct zr_verify_case c = a_case(worlds[i % 4], i % 3 ? 3 : i % 4);
        c.prefetch = i % 5;
        c.accum = 1 + i / 4 % 3;
        c.bf16 = i % 7 != 0;
        c.wire_bf16 = i % 2;
        c.deterministic = i / 2 % 2;
        c.budget = i % 6 == 1 ? 70 : 0;
        if (c.stage == 3 && i % 4) {
            c.group = 4;
            c.hybrid = 1 + i % 2;
        }
        struct zr_verify_speed s = a_speed(4, i % 2);
        same(&c, &s);
    }
}

static void world_on_hosts(int world, int per_node)
{
    struct zr_verify_speed s = a_speed(per_node, world % 2);
    for (int stage = 0; stage <= 3; stage++) {
        struct zr_verify_case c = a_case(world, stage);
        same(&c, &s);
    }
    for (int group = 1; group <= world; group++) {
        struct zr_verify_case c = a_case(world, 3);
        c.group = group;
        c.hybrid = 1 + (world + group + per_node) % 2;
        if (world % group == 0)
            same(&c, &s);
    }
}

/* All groups that divide the world, for some worlds up to 64. N_WORLDS is their number; "all" tests each. */
static void any_worlds(void **state)
{
    static const int per_node[] = {1, 3, 4, 8};
    const char *text = getenv("N_WORLDS");
    struct random_source random = random_open();
    bool all = text && !strcmp(text, "all");
    for (int world = 1; all && world <= 64; world++)
        for (int k = 0; k < 4; k++)
            world_on_hosts(world, per_node[k]);
    for (int i = 0, n = text ? atoi(text) : 2; !all && i < n; i++)
        world_on_hosts(1 + (int)random_below(&random, 64), per_node[random_below(&random, 4)]);
}

/* ---- what must hold of any world ---- */

static void free_links_show_nothing(void **state)
{
    for (int stage = 0; stage <= 3; stage++) {
        struct zr_verify_case c = a_case(4096, stage), alone = a_case(1, stage);
        struct zr_verify_speed s = a_speed(8, true);
        s.near_bytes_per_s = 0; /* transfers take no time */
        s.memory_bytes_per_s = 0;
        struct zr_verify_time t = by_symmetry(&c, &s);
        assert_int_equal(t.step_ns, t.compute_ns);
        assert_int_equal(t.compute_ns, 3201000 + 7302000);
        /* One rank waits for nothing, whatever the links. */
        s.near_bytes_per_s = s.far_bytes_per_s = 1;
        t = by_symmetry(&alone, &s);
        assert_int_equal(t.step_ns, t.compute_ns);
        assert_int_equal(t.step_wire_bytes, 0);
    }
}

static void slower_links_take_longer(void **state)
{
    struct zr_verify_case c = a_case(1024, 3);
    int64_t before = 0;
    for (double far = 1e11; far > 1e7; far /= 10) {
        struct zr_verify_speed s = a_speed(8, true);
        s.near_bytes_per_s = 1e12;
        s.far_bytes_per_s = far;
        struct zr_verify_time t = by_symmetry(&c, &s);
        assert_true(t.step_ns > before);
        before = t.step_ns;
    }
}

/* Rings over 2 hosts of 4 ranks. 7/8 of what is gathered enters each host over four links, including what
 * its own members have. There are 6 near steps and 1 far one. One unit without prefetch is gathered once,
 * in forward, and its parameters stay for backward. */
static void ring_costs_what_it_says(void **state)
{
    enum { ELEMS = 1 << 20 };
    static const struct zr_verify_unit one = {ELEMS, 1e9, 2e9};
    struct zr_verify_case c = a_case(8, 3);
    c.n_units = 1;
    struct zr_verify_speed s = a_speed(4, true);
    s.units = &one;
    s.memory_bytes_per_s = 0;
    s.near_bytes_per_s = 1e12;
    s.far_bytes_per_s = 1e8;
    int64_t moved = (int64_t)(7.0 * (2 * ELEMS / 8) / 4e8 * 1e9), latency = 6 * s.near_ns + s.far_ns;
    int64_t agreed = by_symmetry(&c, &s).exposed_ns - 2 * (moved + latency);
    /* Gathered, reduced, and both halves of an agreement, which is small. */
    assert_true(agreed >= 2 * latency && agreed < 2 * latency + 50000);
}

/* ---- kinds of ranks ---- */

static int kinds(int32_t world, int32_t inner, int32_t per_host)
{
    struct zr_symmetry s;
    assert_int_equal(zr_symmetry_make(world, inner, per_host, &s), 0);
    int n = s.n;
    assert_int_equal(s.rank[0], 0);
    zr_symmetry_free(&s);
    return n;
}

static void ranks_are_of_few_kinds(void **state)
{
    assert_int_equal(kinds(16384, 16384, 8), 1);
    assert_int_equal(kinds(16384, 8, 8), 1);
    assert_int_equal(kinds(16384, 32, 8), 1);
    assert_int_equal(kinds(16380, 16380, 8), 2);
    assert_int_equal(kinds(5, 5, 8), 1);
    assert_int_equal(kinds(1, 1, 8), 1);
    /* A group of six has its ranks on one host of four and part of another, or on two hosts in one of two
     * ways. */
    assert_true(kinds(12, 6, 4) > 1);
    struct zr_symmetry s;
    assert_int_equal(zr_symmetry_make(64 * 1009, 1009, 64, &s), ZERO_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), "make groups fill hosts"));
}

static void what_differs_is_refused(void **state)
{
    struct zr_verify_speed s = a_speed(8, true);
    struct zr_verify_case c = a_case(8, 3);
    struct zr_verify_time t;
    struct zr_verify_result r;
    c.granule = 7;
    assert_int_equal(zr_verify_scale(&c, &s, &t, &r), ZERO_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), "granule"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(flat_worlds),
        cmocka_unit_test(worlds_of_groups),
        cmocka_unit_test(options),
        cmocka_unit_test(any_worlds),
        cmocka_unit_test(free_links_show_nothing),
        cmocka_unit_test(slower_links_take_longer),
        cmocka_unit_test(ring_costs_what_it_says),
        cmocka_unit_test(ranks_are_of_few_kinds),
        cmocka_unit_test(what_differs_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
