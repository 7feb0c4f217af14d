/* SPDX-License-Identifier: Apache-2.0 */
/* test_find_place.c: zero_find_place gives before zero_wrap what zero_wrap finds later. It refuses the same
 * configurations, with the same messages. */
#include "test/cmocka.h"
#include "test/zero/toy_net.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_VARIABLES = 6 };

struct variable {
    const char *name, *value;
};

static const char *const known[] = {
    "ZERO_RANK",
    "ZERO_WORLD_SIZE",
    "ZERO_LOCAL_RANK",
    "ZERO_RENDEZVOUS",
    "ZERO_STAGE",
    "ZERO_STGE",
    "ZERO_TP",
    "ZERO_CP",
    "ZERO_DP_REPLICATE",
    "ZERO_JOB_KEY",
    "ZERO_JOB_KEY_FILE",
    "ZERO_ATTEMPT",
    "ZERO_JOB",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "SLURM_STEP_ID",
    "SLURM_TASK_PID",
    "SLURM_JOB_ID",
    "PMIX_NAMESPACE",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    "SLURM_NNODES",
    "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_NODELIST",
    "SLURM_JOB_NODELIST",
    "SLURMD_NODENAME",
    "SLURM_HET_SIZE",
    "ZERO_LOG",
};

static void environment(const struct variable *v)
{
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        unsetenv(known[i]);
    for (int i = 0; v && i < MAX_VARIABLES && v[i].name; i++)
        setenv(v[i].name, v[i].value, 1);
}

/* ---- where the rank comes from ---- */

static const struct found {
    const char *what;
    struct variable v[MAX_VARIABLES];
    int32_t rank, world, local_rank;
} found[] = {
    {"nothing", {{0}}, 0, 1, 0},
    {"our own",
     {{"ZERO_RANK", "5"},
      {"ZERO_WORLD_SIZE", "8"},
      {"ZERO_LOCAL_RANK", "1"},
      {"ZERO_RENDEZVOUS", "tcp://127.0.0.1:4000"}},
     5,
     8,
     1},
    {"torchrun and zero-run",
     {{"RANK", "3"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "2"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "4000"}},
     3,
     4,
     2},
    {"no local rank",
     {{"RANK", "3"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "4000"}},
     3,
     4,
     3},
    {"Open MPI",
     {{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}},
     1,
     2,
     1},
    {"MPICH", {{"PMI_RANK", "2"}, {"PMI_SIZE", "3"}, {"MPI_LOCALRANKID", "0"}}, 2, 3, 0},
    {"Slurm", {{"SLURM_PROCID", "2"}, {"SLURM_NTASKS", "3"}, {"SLURM_LOCALID", "1"}}, 2, 3, 1},
    {"the shell of an allocation of Slurm's", {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}}, 0, 1, 0},
    {"a local rank alone, which is no launcher", {{"LOCAL_RANK", "3"}}, 0, 1, 0},
};

static void check_found(const struct found *f, const struct zero_config *cfg)
{
    struct zero_place p;
    if (zero_find_place(cfg, &p))
        fail_msg("%s: %s", f->what, zero_last_error());
    if (p.rank != f->rank || p.world != f->world || p.local_rank != f->local_rank)
        fail_msg("%s: rank %d of %d, local %d", f->what, p.rank, p.world, p.local_rank);
    if (p.data != f->rank || p.n_data != f->world)
        fail_msg("%s: data %d of %d", f->what, p.data, p.n_data);
}

static void test_sources(void **state)
{
    struct toy_holdings before = toy_holdings(), now;
    for (size_t i = 0; i < sizeof found / sizeof *found; i++) {
        struct zero_config cfg = ZERO_CONFIG_INIT;
        environment(found[i].v);
        check_found(&found[i], NULL);
        check_found(&found[i], &cfg);
    }
    environment(NULL);
    assert_true(toy_holds_no_more(before, &now)); /* no socket or thread is left */
}

/* Rank and world in cfg take precedence over a launcher's variables. */
static void test_configuration(void **state)
{
    static const struct variable torchrun[MAX_VARIABLES] = {{"RANK", "3"}, {"WORLD_SIZE", "4"}};
    static const struct found own = {.what = "cfg", .rank = 1, .world = 2, .local_rank = 1};
    struct zero_config cfg = ZERO_CONFIG_INIT;
    cfg.launch.rank = 1;
    cfg.launch.world = 2;
    cfg.launch.rendezvous = "tcp://127.0.0.1:4000";
    environment(NULL);
    check_found(&own, &cfg);
    environment(torchrun);
    check_found(&own, &cfg);
    environment(NULL);
}

/* ---- places in the mesh ---- */

static void expect_place(const struct zero_config *cfg, struct zero_place want)
{
    struct zero_place p;
    if (zero_find_place(cfg, &p))
        fail_msg("%s", zero_last_error());
    assert_memory_equal(&p, &want, sizeof p);
}

/* Axes are outermost first, so the ranks along tp are neighbours. */
static void test_places(void **state)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    cfg.launch.world = 24;
    cfg.launch.rank = 17;
    cfg.launch.rendezvous = "tcp://127.0.0.1:4000";
    environment(NULL);
    cfg.mesh.pp = 2;
    cfg.mesh.dp_replicate = 3;
    cfg.mesh.tp = 2;
    struct zero_place want = {.rank = 17, .world = 24, .local_rank = 17, .data = 2, .n_data = 6};
    want.pp = 1;
    want.dp_replicate = 1;
    want.tp = 1;
    want.n_pp = want.n_dp_shard = want.n_tp = 2;
    want.n_dp_replicate = 3;
    want.n_cp = 1;
    expect_place(&cfg, want);
    cfg.mesh.dp_shard = 2;
    expect_place(&cfg, want);

    /* With dp_replicate auto, only the hosts give the number of replicas. The data a rank reads is known
     * without it. */
    cfg.mesh.dp_replicate = ZERO_AUTO;
    cfg.mesh.dp_shard = 0;
    want.dp_replicate = want.dp_shard = want.n_dp_replicate = want.n_dp_shard = -1;
    expect_place(&cfg, want);

    bool seen[24] = {false};
    for (cfg.launch.rank = 0; cfg.launch.rank < cfg.launch.world; cfg.launch.rank++) {
        struct zero_place p;
        cfg.mesh = (struct zero_mesh){2, 3, 2, 1, 2};
        assert_int_equal(zero_find_place(&cfg, &p), 0);
        assert_int_equal(p.data, p.dp_replicate * p.n_dp_shard + p.dp_shard);
        int32_t r = ((p.pp * 3 + p.dp_replicate) * 2 + p.dp_shard) * 2 + p.tp;
        assert_true(r == cfg.launch.rank && p.cp == 0 && !seen[r]);
        seen[r] = true;
    }
}

/* ---- what is refused ---- */

static const struct refused {
    const char *what;
    struct variable v[MAX_VARIABLES];
    int32_t rank, world; /* values of the configuration */
    bool no_init;        /* the configuration does not begin with ZERO_CONFIG_INIT */
    const char *says;
    int code; /* 0: ZERO_ERR_ARG */
} refused[] = {
    {"half of a pair", {{"RANK", "0"}}, .says = "WORLD_SIZE is not set though RANK is \"0\""},
    {"the other half", {{"WORLD_SIZE", "2"}}, .says = "RANK is not set though WORLD_SIZE is \"2\""},
    {"no number", {{"RANK", "0"}, {"WORLD_SIZE", "two"}}, .says = "WORLD_SIZE is \"two\""},
    {"a rank outside", {{"RANK", "2"}, {"WORLD_SIZE", "2"}}, .says = "RANK is \"2\""},
    {"a local rank outside",
     {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "2"}},
     .says = "LOCAL_RANK is \"2\""},
    {"no address", {{"RANK", "1"}, {"WORLD_SIZE", "2"}}, .says = "does not know where rank 0 is"},
    {"no port",
     {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}},
     .says = "MASTER_PORT is not set though MASTER_ADDR is \"h\""},
    {"two keys",
     {{"ZERO_JOB_KEY", "00112233445566778899aabbccddeeff"},
      {"ZERO_JOB_KEY_FILE", "/k"},
      {"RANK", "1"},
      {"WORLD_SIZE", "2"},
      {"ZERO_RENDEZVOUS", "tcp://127.0.0.1:4000"}},
     .says = "are both set"},
    {"a stage that there is not", {{"ZERO_STAGE", "7"}}, .says = "ZERO_STAGE is \"7\""},
    {"a mesh that is not the world", {{"ZERO_TP", "2"}}, .says = "tp 2) do not divide the world of 1 ranks"},
    {"rows for more ranks than there are", {{"ZERO_CP", "2"}}, .says = "cp 2, tp 1) do not divide the world"},
    {"no number of replicas", {{"ZERO_DP_REPLICATE", "two"}}, .says = "ZERO_DP_REPLICATE is \"two\""},
    {"a rank alone", {{0}}, .rank = 1, .says = "rank is 1 but world is 0"},
    {"a rank outside of the configuration's world", {{0}}, .rank = 2, .world = 2, .says = "rank is 2"},
    {"no ZERO_CONFIG_INIT", {{0}}, .no_init = true, .says = "ZERO_CONFIG_INIT"},
};

/* Both messages begin with the name of their call and continue equally. */
static void check_refused(const struct refused *r)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    struct zero_place out = {.rank = -7}, was = out;
    char said[1024];
    struct toy m;
    zero_ctx *z;
    cfg.launch.rank = r->rank;
    cfg.launch.world = r->world;
    if (r->no_init)
        memset(&cfg, 0, sizeof cfg);
    environment(r->v);
    toy_make(&m);
    int err = zero_find_place(&cfg, &out), want = r->code ? r->code : ZERO_ERR_ARG;
    if (err != want || strncmp(zero_last_error(), "zero_find_place: ", 17) != 0 ||
        !strstr(zero_last_error(), r->says))
        fail_msg("%s: code %d, \"%s\"", r->what, err, err ? zero_last_error() : "");
    if (memcmp(&out, &was, sizeof out))
        fail_msg("%s: a result was written", r->what);
    snprintf(said, sizeof said, "zero_wrap: %s", zero_last_error() + 17);
    assert_int_equal(zero_wrap(&z, m.table, TOY_TENSORS, &cfg), err);
    assert_string_equal(zero_last_error(), said);
    toy_free(&m);
    environment(NULL);
}

static void test_refusals(void **state)
{
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        check_refused(&refused[i]);
}

/* ---- before and after zero_wrap ---- */

static void count_line(void *arg, const char *line)
{
    if (strstr(line, "ZERO_STGE"))
        ++*(int *)arg;
}

/* After zero_wrap the hosts are known. */
static void wrap_replicas(struct toy_rank *r)
{
    struct zero_config cfg = toy_config(r, 3);
    struct zero_place before;
    struct zero_stats stats;
    struct toy m;
    zero_ctx *z = NULL;
    int err = 0;
    cfg.mesh.dp_replicate = ZERO_AUTO;
    cfg.debug.log = toy_forget_line;
    toy_make(&m);
    TOY_TRY(zero_find_place(&cfg, &before));
    TOY_TRY(zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
    TOY_TRY(zero_get_stats(z, &stats));
    if (!err && (before.dp_shard != -1 || before.n_dp_replicate != -1 || before.data != r->rank))
        toy_wrong(r, "before the wrap: dp_shard %d, %d replicas, data %d", before.dp_shard,
                  before.n_dp_replicate, before.data);
    const struct zero_place *p = &stats.place;
    if (!err && (p->n_dp_replicate != 1 || p->dp_replicate || p->n_dp_shard != r->world ||
                 p->dp_shard != r->rank || p->data != r->rank || p->n_data != r->world))
        toy_wrong(r, "%d of %d replicas, %d of %d in one", p->dp_replicate, p->n_dp_replicate, p->dp_shard,
                  p->n_dp_shard);
    zero_unwrap(&z);
    toy_free(&m);
}

static void test_after_wrap(void **state)
{
    struct toy_rank r[2];
    environment(NULL);
    toy_run(2, wrap_replicas, NULL, r, "replicas of hosts");
}

/* zero_find_place logs no warning, and zero_wrap logs it once. The context has the rank that zero_find_place
 * found. */
static void test_before_wrap(void **state)
{
    static const struct variable misspelt[MAX_VARIABLES] = {{"ZERO_STGE", "3"},
                                                            {"RANK", "0"},
                                                            {"WORLD_SIZE", "1"},
                                                            {"LOCAL_RANK", "0"},
                                                            {"TORCHELASTIC_RESTART_COUNT", "2"}};
    struct zero_config cfg = ZERO_CONFIG_INIT;
    struct zero_place place;
    struct zero_stats stats;
    int n_reported = 0;
    struct toy m;
    zero_ctx *z;
    cfg.debug.log = count_line;
    cfg.debug.log_arg = &n_reported;
    environment(misspelt);
    toy_make(&m);
    assert_int_equal(zero_find_place(&cfg, &place), 0);
    assert_int_equal(n_reported, 0);
    assert_int_equal(zero_wrap(&z, m.table, TOY_TENSORS, &cfg), 0);
    assert_int_equal(n_reported, 1);
    assert_int_equal(zero_get_stats(z, &stats), 0);
    assert_memory_equal(&stats.place, &place, sizeof place);
    assert_int_equal(stats.attempt, 2);
    assert_int_equal(zero_unwrap(&z), 0);
    toy_free(&m);
    environment(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sources),     cmocka_unit_test(test_configuration),
        cmocka_unit_test(test_places),      cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_before_wrap), cmocka_unit_test(test_after_wrap),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
