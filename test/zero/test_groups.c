/* SPDX-License-Identifier: Apache-2.0 */
/* test_groups.c: what cfg.hybrid and cfg.shard_group come to: on any hosts, in a plan, and when a hybrid
 * gives way. */
#include "comm/topology.h"
#include "zero/config.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

struct lines {
    char text[2048];
};

static void keep_line(void *arg, const char *line)
{
    struct lines *l = arg;
    size_t used = strlen(l->text);
    snprintf(l->text + used, sizeof l->text - used, "%s\n", line);
}

struct asked {
    int hybrid, shard_group, world, local_size; /* local_size: ranks of each host but the last */
    bool has_hosts;
    /* expected; stage 0 and no hybrid: an error */
    int stage;
    enum zr_hybrid runs_as;
    int inner;
    const char *says; /* in the error, or the log; NULL: nothing is said */
};

static void try_groups(const struct asked *a)
{
    struct lines log = {""};
    struct zero_config cfg = ZERO_CONFIG_INIT;
    struct zr_topology t;
    struct zr_config c;
    cfg.stage = 3;
    cfg.hybrid = a->hybrid;
    cfg.shard_group = a->shard_group;
    cfg.debug.log = keep_line;
    cfg.debug.log_arg = &log;
    assert_int_equal(zr_config_resolve(&cfg, &c), 0);
    assert_int_equal(zr_topology_assume(a->world, a->local_size, &t), 0);
    int err = zr_config_groups(&c, &t, t.world, a->has_hosts);
    const char *said = err ? zr_error_text() : log.text;
    if (err != (a->inner ? 0 : ZR_ERR_ARG) || (a->says ? !strstr(said, a->says) : *said))
        fail_msg("hybrid %d, groups of %d in %d: %d \"%s\", expected \"%s\"", a->hybrid, a->shard_group,
                 a->world, err, said, a->says ? a->says : "");
    if (!err) {
        assert_int_equal(zr_config_inner(&c, a->world), a->inner);
        assert_int_equal(c.options.stage, a->stage);
        assert_int_equal(c.options.hybrid, a->runs_as);
    }
    zr_topology_free(&t);
    zr_config_release(&c);
}

static void test_groups(void **state)
{
    (void)state;
    enum { NONE = ZERO_HYBRID_NONE, HSDP = ZERO_HYBRID_HSDP, HFSDP = ZERO_HYBRID_HFSDP, AUTO = ZERO_AUTO };
    static const struct asked cases[] = {
        {NONE, AUTO, 8, 4, true, 3, ZR_HYBRID_NONE, 8, NULL},
        {NONE, AUTO, 7, 4, true, 3, ZR_HYBRID_NONE, 7, NULL},
        {HSDP, 2, 8, 8, true, 3, ZR_HSDP, 2, NULL},
        {HFSDP, 4, 8, 2, true, 3, ZR_HFSDP, 4, NULL},
        {HSDP, AUTO, 8, 4, true, 3, ZR_HSDP, 4, NULL},
        {HFSDP, AUTO, 6, 2, true, 3, ZR_HFSDP, 2, NULL},
        {HSDP, 3, 8, 8, true, 0, 0, 0,
         "shard_group is 3, world is 8; allowed: a number that divides the world"},
        {HSDP, 16, 8, 8, true, 0, 0, 0, "shard_group is 16, world is 8"},
        {HSDP, AUTO, 7, 4, true, 0, 0, 0,
         "shard_group is auto, the ranks of a host, but hosts have unequal numbers of them: host 0 has 4 "
         "ranks "
         "(0 to 3), host 1 has 3 (4 to 6); allowed: as many ranks on each host, or a number that divides 7"},
        {HSDP, 7, 7, 4, true, 3, ZR_HYBRID_NONE, 7,
         "hybrid is hsdp with one group of all ranks: this runs as stage 3"},
        {HFSDP, AUTO, 8, 8, true, 3, ZR_HYBRID_NONE, 8,
         "hfsdp with one group of all ranks: this runs as stage 3"},
        {HSDP, 1, 8, 8, true, 0, ZR_HYBRID_NONE, 8,
         "hybrid is hsdp with groups of 1 rank, in which nothing is cut: "
         "this runs as stage 0"},
        {HFSDP, AUTO, 8, 1, true, 1, ZR_HYBRID_NONE, 8,
         "hybrid is hfsdp with groups of 1 rank, in which only the optimizer's states are cut: this runs as "
         "stage 1"},
        {HSDP, AUTO, 8, 0, false, 0, 0, 0, "a plan knows no hosts: give shard_group a number"},
        {HSDP, AUTO, 1, 0, false, 3, ZR_HYBRID_NONE, 1, NULL},
        {HSDP, 2, 8, 0, false, 3, ZR_HSDP, 2, NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        try_groups(&cases[i]);
}

/* deterministic gives way only where nobody asked for it and each micro-batch would go over the network. */
static void test_network(void **state)
{
    (void)state;
    for (int asked = -1; asked <= 1; asked++)
        for (int spans = 0; spans <= 1; spans++)
            for (int micro = 1; micro <= 2; micro++) {
                struct lines log = {""};
                struct zero_config cfg = ZERO_CONFIG_INIT;
                struct zr_config c;
                bool gives_way = asked == ZERO_AUTO && spans && micro > 1;
                cfg.deterministic = asked;
                cfg.grad_accum_steps = micro;
                cfg.debug.log = keep_line;
                cfg.debug.log_arg = &log;
                assert_int_equal(zr_config_resolve(&cfg, &c), 0);
                zr_config_mind_network(&c, spans, 0);
                assert_int_equal(c.options.deterministic, asked != 0 && !gives_way);
                assert_int_equal(strstr(log.text, "deterministic is off: groups (of") != NULL, gives_way);
                zr_config_release(&c);
            }
}

/* --- plans --- */

enum { MODEL_UNITS = 6, MODEL_ELEMS = 512 << 10 };

static int plan_of(int hybrid, int shard_group, int world, int micro, struct zero_plan_info *info)
{
    static char name[MODEL_UNITS][8];
    struct zero_tensor table[MODEL_UNITS];
    static void *param[MODEL_UNITS], *grad[MODEL_UNITS];
    struct zero_config cfg = ZERO_CONFIG_INIT;
    memset(table, 0, sizeof table);
    for (int i = 0; i < MODEL_UNITS; i++) {
        snprintf(name[i], sizeof name[i], "w%d", i);
        table[i] = (struct zero_tensor){.name = name[i],
                                        .param = &param[i],
                                        .grad = &grad[i],
                                        .dtype = ZERO_BF16,
                                        .shape = {MODEL_ELEMS},
                                        .unit = i};
    }
    cfg.stage = 3;
    cfg.launch.world = world;
    cfg.memory.prefetch = 0;
    cfg.hybrid = hybrid;
    cfg.shard_group = shard_group;
    cfg.grad_accum_steps = micro;
    return zero_plan(table, MODEL_UNITS, &cfg, info);
}

/* Bytes per parameter by the formulas of zero/memory.md: AdamW keeps a master and two moments, fp32. */
static void expect_plan(int hybrid, int inner, int world)
{
    struct zero_plan_info info;
    const double n = (double)MODEL_UNITS * MODEL_ELEMS;
    assert_int_equal(plan_of(hybrid, hybrid ? inner : ZERO_AUTO, world, 1, &info), 0);
    double state_shares = hybrid == ZERO_HYBRID_HSDP ? inner : world;
    assert_int_equal(info.world, world);
    assert_int_equal(info.shard_group, inner);
    assert_int_equal(info.hybrid, hybrid);
    assert_int_equal(info.bytes.param_shards, (int64_t)(2 * n / inner));
    assert_int_equal(info.bytes.grad_shards, (int64_t)(4 * n / inner));
    assert_int_equal(info.bytes.master, (int64_t)(4 * n / state_shares));
    assert_int_equal(info.bytes.moments, (int64_t)(8 * n / state_shares));
    /* fp32 sums are reduced between groups; HSDP gathers them there, HFSDP the parameters */
    double outer = world / inner, part = n / inner * (outer - 1) / outer,
           per_element = hybrid == ZERO_HYBRID_HSDP ? 4 + 4 : 4 + 2;
    int64_t agreed = info.traffic.outer_bytes - (int64_t)(part * per_element);
    assert_true(hybrid ? agreed > 0 && agreed < 65536 : info.traffic.outer_bytes == 0);
    assert_int_equal(info.traffic.n_outer, !hybrid                      ? 0
                                           : hybrid == ZERO_HYBRID_HSDP ? MODEL_UNITS
                                                                        : 2 * MODEL_UNITS);
    assert_true(info.traffic.outer_bytes < info.traffic.wire_bytes);
    assert_int_equal(info.paper_bytes,
                     (int64_t)(2 * n / inner + 2 * n / inner + 12 * n / state_shares + 0.5));
}

static void test_plans(void **state)
{
    (void)state;
    struct zero_plan_info info;
    expect_plan(ZERO_HYBRID_NONE, 8, 8);
    for (int inner = 2; inner < 8; inner *= 2) {
        expect_plan(ZERO_HYBRID_HSDP, inner, 8);
        expect_plan(ZERO_HYBRID_HFSDP, inner, 8);
    }
    assert_int_equal(plan_of(ZERO_HYBRID_HSDP, ZERO_AUTO, 8, 1, &info), ZERO_ERR_ARG);
    assert_non_null(strstr(zero_last_error(), "zero_plan: shard_group is auto"));
    assert_int_equal(plan_of(ZERO_HYBRID_HSDP, 3, 8, 1, &info), ZERO_ERR_ARG);
    assert_non_null(strstr(zero_last_error(), "zero_plan: shard_group is 3, world is 8"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_groups),
        cmocka_unit_test(test_network),
        cmocka_unit_test(test_plans),
    };
    return cmocka_run_group_tests_name("groups", tests, NULL, NULL);
}
