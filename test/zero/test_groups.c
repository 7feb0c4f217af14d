/* SPDX-License-Identifier: Apache-2.0 */
/* test_groups.c: groups that follow from cfg.mesh and cfg.hybrid, for any hosts and in a plan, and when a
 * hybrid has no effect. */
#include "comm/topology.h"
#include "test/cmocka.h"
#include "test/first_error.h"
#include "zero/config.h"

#include <stdio.h>
#include <string.h>

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
    int hybrid, dp_replicate, world, pp, tp, local_size; /* local_size: ranks of each host but the last */
    bool has_hosts;
    /* expected results; inner 0: an error */
    int stage;
    enum zr_hybrid runs_as;
    int inner;
    const char *says; /* part of the error or the log; NULL: both are empty */
    int asked_stage;
    bool by_turns; /* ranks go to the hosts round-robin */
};

static void try_groups(const struct asked *a)
{
    struct lines log = {""};
    struct zero_config cfg = ZERO_CONFIG_INIT;
    struct zr_topology t;
    struct zr_config c;
    cfg.stage = a->asked_stage;
    cfg.hybrid = a->hybrid;
    cfg.mesh.pp = a->pp;
    cfg.mesh.dp_replicate = a->dp_replicate;
    cfg.mesh.tp = a->tp;
    cfg.debug.log = keep_line;
    cfg.debug.log_arg = &log;
    assert_int_equal(zr_config_resolve(&cfg, &c), 0);
    assert_int_equal(zr_topology_assume(a->world, a->local_size, &t), 0);
    for (int32_t r = 0; r < t.world && a->by_turns; r++)
        t.host_of[r] = r % t.n_hosts;
    int err = FIRST_ERROR(zr_config_mesh(&c, 0, a->world), zr_config_groups(&c, a->has_hosts ? &t : NULL));
    const char *said = err ? zr_error_text() : log.text;
    if (err != (a->inner ? 0 : ZERO_ERR_ARG) || (a->says ? !strstr(said, a->says) : *said))
        fail_msg("hybrid %d, %d replicas in %d: %d \"%s\", expected \"%s\"", a->hybrid, a->dp_replicate,
                 a->world, err, said, a->says ? a->says : "");
    if (!err) {
        const struct zero_place *p = &c.place;
        assert_int_equal(c.options.dp_shard, a->inner);
        assert_int_equal(c.options.stage, a->stage);
        assert_int_equal(c.options.hybrid, a->runs_as);
        assert_int_equal(p->n_dp_replicate * p->n_dp_shard, p->n_data);
        assert_true(p->dp_replicate == 0 && p->dp_shard == 0);
        if (a->dp_replicate > 0)
            assert_int_equal(p->n_dp_replicate, a->dp_replicate);
    }
    zr_topology_free(&t);
    zr_config_release(&c);
}

static void test_groups(void **state)
{
    enum { HSDP = ZERO_HSDP, HFSDP = ZERO_HFSDP, AUTO = ZERO_AUTO };
    static const struct asked cases[] = {
        {HSDP, 1, 8, 1, 1, 4, true, 3, ZR_HYBRID_NONE, 8, NULL, 3},
        {HSDP, 1, 7, 1, 1, 4, true, 3, ZR_HYBRID_NONE, 7, NULL, 3},
        {HSDP, 4, 8, 1, 1, 8, true, 3, ZR_HSDP, 2, NULL, 3},
        {HFSDP, 2, 8, 1, 1, 2, true, 3, ZR_HFSDP, 4, NULL, 3},
        {HSDP, AUTO, 8, 1, 1, 4, true, 3, ZR_HSDP, 4, NULL, 3},
        {HFSDP, AUTO, 6, 1, 1, 2, true, 3, ZR_HFSDP, 2, NULL, 3},
        {HSDP, 3, 8, 1, 1, 8, true, 0, ZR_HYBRID_NONE, 0,
         "the axes of mesh (pp 1, dp_replicate 3, dp_shard 0, cp 1, tp 1) do not divide the world of 8 ranks",
         3},
        {HSDP, 16, 8, 1, 1, 8, true, 0, ZR_HYBRID_NONE, 0, "do not divide the world of 8 ranks", 3},
        {HSDP, AUTO, 7, 1, 1, 4, true, 0, ZR_HYBRID_NONE, 0,
         "dp_replicate is auto, one replica per host, but hosts have unequal numbers of ranks: host 0 has 4 "
         "ranks (0 to 3), host 1 has 3 (4 to 6); allowed: equally many ranks on each host, or a number for "
         "dp_replicate",
         3},
        {HSDP, AUTO, 8, 1, 1, 4, true, 0, ZR_HYBRID_NONE, 0,
         "dp_replicate is auto, one replica per host, but the ranks of a host are not consecutive: host 0 "
         "has 4 "
         "ranks (0, 2, 4, 6)",
         3, true},
        {HSDP, 2, 8, 1, 1, 4, true, 3, ZR_HSDP, 4, NULL, 3, true},
        {HFSDP, 1, 7, 1, 1, 4, true, 3, ZR_HYBRID_NONE, 7,
         "hybrid is hfsdp but dp_replicate is 1: it has no effect, this runs as stage 3", 3},
        {HSDP, AUTO, 8, 1, 1, 8, true, 3, ZR_HYBRID_NONE, 8,
         "dp_replicate is auto and becomes 1, because one host has all ranks of a data-parallel group: this "
         "runs as stage 3\n",
         3},
        {HFSDP, AUTO, 8, 1, 1, 8, true, 3, ZR_HYBRID_NONE, 8,
         "this runs as stage 3, and hybrid hfsdp has no effect", 3},
        {HSDP, 8, 8, 1, 1, 8, true, 0, ZR_HYBRID_NONE, 8,
         "dp_replicate is 8 and dp_shard 1, so nothing is sharded: this runs as stage 0", 3},
        {HFSDP, AUTO, 8, 1, 1, 1, true, 1, ZR_HYBRID_NONE, 8,
         "dp_replicate is 8 and dp_shard 1, so only the optimizer's states are sharded: this runs as stage 1",
         3},
        {HSDP, AUTO, 8, 1, 1, 0, false, 0, ZR_HYBRID_NONE, 0,
         "a plan knows no hosts: give dp_replicate a number", 3},
        {HSDP, AUTO, 1, 1, 1, 0, false, 3, ZR_HYBRID_NONE, 1, NULL, 3},
        {HSDP, 4, 8, 1, 1, 0, false, 3, ZR_HSDP, 2, NULL, 3},
        /* below stage 3 */
        {HSDP, 2, 8, 1, 1, 8, true, 2, ZR_HYBRID_NONE, 8,
         "dp_replicate is 2 but stage is 2, not 3: all data-parallel ranks are one group\n", 2},
        {HSDP, AUTO, 8, 1, 1, 4, true, 0, ZR_HYBRID_NONE, 8, "dp_replicate is 2 but stage is 0, not 3", 0},
        {HFSDP, 2, 8, 1, 1, 8, true, 1, ZR_HYBRID_NONE, 8, "are one group, and hybrid hfsdp has no effect",
         1},
        {HFSDP, 1, 8, 1, 1, 8, true, 1, ZR_HYBRID_NONE, 8,
         "hybrid is hfsdp but stage is 1, not 3: it has no effect", 1},
        /* auto with a model that is cut: a host has several pipeline stages, or a part of one */
        {HSDP, AUTO, 16, 1, 2, 4, true, 3, ZR_HSDP, 2, NULL, 3},
        {HSDP, AUTO, 16, 2, 2, 4, true, 3, ZR_HSDP, 2, NULL, 3},
        {HSDP, AUTO, 16, 4, 1, 8, true, 3, ZR_HYBRID_NONE, 4, "dp_replicate is auto and becomes 1", 3},
        {HSDP, AUTO, 16, 2, 4, 2, true, 0, ZR_HYBRID_NONE, 0,
         "the 2 ranks of a host do not make whole replicas with pp 2, cp 1 and tp 4; give dp_replicate a "
         "number",
         3},
        {HSDP, AUTO, 24, 2, 1, 8, true, 0, ZR_HYBRID_NONE, 0,
         "the 8 ranks of a host do not make whole replicas with pp 2", 3},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        try_groups(&cases[i]);
}

/* deterministic becomes 0 only if it is not set and each micro-batch would cross the network. */
static void test_network(void **state)
{
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
                zr_config_mind_network(&c, spans);
                assert_int_equal(c.options.deterministic, asked != 0 && !gives_way);
                assert_int_equal(strstr(log.text, "deterministic is off: groups of") != NULL, gives_way);
                zr_config_release(&c);
            }
}

/* --- plans --- */

enum { MODEL_UNITS = 6, MODEL_ELEMS = 512 << 10 };

static int plan_of(int hybrid, int dp_replicate, int world, int micro, struct zero_plan_info *info)
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
    cfg.hybrid = hybrid == ZR_HFSDP ? ZERO_HFSDP : ZERO_HSDP;
    cfg.mesh.dp_replicate = dp_replicate;
    cfg.grad_accum_steps = micro;
    return zero_plan(table, MODEL_UNITS, &cfg, info);
}

/* Computes bytes per parameter by the formulas of zero/memory.md. AdamW has a master and two moments in
 * fp32. */
static void expect_plan(int hybrid, int inner, int world)
{
    struct zero_plan_info info;
    const double n = (double)MODEL_UNITS * MODEL_ELEMS;
    assert_int_equal(plan_of(hybrid, world / inner, world, 1, &info), 0);
    double state_shares = hybrid == ZR_HSDP ? inner : world;
    assert_int_equal(info.world, world);
    assert_int_equal(info.dp_shard, inner);
    assert_int_equal(info.hybrid, hybrid == ZR_HFSDP ? ZERO_HFSDP : ZERO_HSDP);
    assert_int_equal(info.bytes.param_shards, (int64_t)(2 * n / inner));
    assert_int_equal(info.bytes.grad_shards, (int64_t)(4 * n / inner));
    assert_int_equal(info.bytes.master, (int64_t)(4 * n / state_shares));
    assert_int_equal(info.bytes.moments, (int64_t)(8 * n / state_shares));
    /* both hybrids reduce fp32 sums between groups; then HSDP gathers these sums, and HFSDP the parameters */
    double outer = world / inner, part = n / inner * (outer - 1) / outer,
           per_element = hybrid == ZR_HSDP ? 4 + 4 : 4 + 2;
    int64_t agreed = info.traffic.outer_bytes - (int64_t)(part * per_element);
    assert_true(hybrid ? agreed > 0 && agreed < 65536 : info.traffic.outer_bytes == 0);
    assert_int_equal(info.traffic.n_outer, !hybrid ? 0 : hybrid == ZR_HSDP ? MODEL_UNITS : 2 * MODEL_UNITS);
    assert_true(info.traffic.outer_bytes < info.traffic.wire_bytes);
    assert_int_equal(info.paper_bytes,
                     (int64_t)(2 * n / inner + 2 * n / inner + 12 * n / state_shares + 0.5));
}

static void test_plans(void **state)
{
    struct zero_plan_info info;
    expect_plan(ZR_HYBRID_NONE, 8, 8);
    for (int inner = 2; inner < 8; inner *= 2) {
        expect_plan(ZR_HSDP, inner, 8);
        expect_plan(ZR_HFSDP, inner, 8);
    }
    assert_int_equal(plan_of(ZR_HSDP, ZERO_AUTO, 8, 1, &info), ZERO_ERR_ARG);
    assert_non_null(strstr(zero_last_error(), "zero_plan: dp_replicate is auto"));
    assert_int_equal(plan_of(ZR_HSDP, 3, 8, 1, &info), ZERO_ERR_ARG);
    assert_non_null(strstr(zero_last_error(), "zero_plan: the axes of mesh"));
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
