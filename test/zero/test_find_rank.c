/* SPDX-License-Identifier: Apache-2.0 */
/* test_find_rank.c: zero_find_rank says before zero_wrap what zero_wrap then goes by, and refuses what it
 * refuses, in the same words. */
#include "test/zero/toy_net.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MOST_VARIABLES = 6 };

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
    for (int i = 0; v && i < MOST_VARIABLES && v[i].name; i++)
        setenv(v[i].name, v[i].value, 1);
}

/* ---- what is found ---- */

static const struct found {
    const char *what;
    struct variable v[MOST_VARIABLES];
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
    int32_t rank = -7, world = -7, local_rank = -7;
    if (zero_find_rank(cfg, &rank, &world, &local_rank))
        fail_msg("%s: %s", f->what, zero_last_error());
    if (rank != f->rank || world != f->world || local_rank != f->local_rank)
        fail_msg("%s: rank %d of %d, local %d", f->what, rank, world, local_rank);
}

/* Any of the results may be left out. */
static void check_apart(const struct found *f)
{
    int32_t rank = -7, world = -7, local_rank = -7;
    assert_int_equal(zero_find_rank(NULL, NULL, NULL, NULL), 0);
    assert_int_equal(zero_find_rank(NULL, &rank, NULL, NULL), 0);
    assert_int_equal(zero_find_rank(NULL, NULL, &world, NULL), 0);
    assert_int_equal(zero_find_rank(NULL, NULL, NULL, &local_rank), 0);
    assert_int_equal(rank, f->rank);
    assert_int_equal(world, f->world);
    assert_int_equal(local_rank, f->local_rank);
}

static void test_sources(void **state)
{
    (void)state;
    struct toy_holdings before = toy_holdings(), now;
    for (size_t i = 0; i < sizeof found / sizeof *found; i++) {
        struct zero_config cfg = ZERO_CONFIG_INIT;
        environment(found[i].v);
        check_found(&found[i], NULL);
        check_found(&found[i], &cfg);
        check_apart(&found[i]);
    }
    environment(NULL);
    assert_true(toy_holds_no_more(before, &now)); /* no socket, no thread */
}

/* The configuration's own rank and world count more than a launcher's. */
static void test_configuration(void **state)
{
    (void)state;
    static const struct variable torchrun[MOST_VARIABLES] = {{"RANK", "3"}, {"WORLD_SIZE", "4"}};
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

/* ---- what is refused ---- */

static const struct refused {
    const char *what;
    struct variable v[MOST_VARIABLES];
    int32_t rank, world; /* of the configuration */
    bool no_init;        /* it does not begin with ZERO_CONFIG_INIT */
    const char *says;
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
    {"a rank alone", {{0}}, .rank = 1, .says = "rank is 1 but world is 0"},
    {"a rank outside of the configuration's world", {{0}}, .rank = 2, .world = 2, .says = "rank is 2"},
    {"no ZERO_CONFIG_INIT", {{0}}, .no_init = true, .says = "ZERO_CONFIG_INIT"},
};

/* Both messages begin with the call's name, and go on alike. */
static void check_refused(const struct refused *r)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    int32_t out[3] = {-7, -7, -7};
    char said[1024];
    struct toy m;
    zero_ctx *z;
    cfg.launch.rank = r->rank;
    cfg.launch.world = r->world;
    if (r->no_init)
        memset(&cfg, 0, sizeof cfg);
    environment(r->v);
    toy_make(&m);
    int err = zero_find_rank(&cfg, &out[0], &out[1], &out[2]);
    if (err != ZERO_ERR_ARG || strncmp(zero_last_error(), "zero_find_rank: ", 16) != 0 ||
        !strstr(zero_last_error(), r->says))
        fail_msg("%s: code %d, \"%s\"", r->what, err, err ? zero_last_error() : "");
    if (out[0] != -7 || out[1] != -7 || out[2] != -7)
        fail_msg("%s: a result was written", r->what);
    snprintf(said, sizeof said, "zero_wrap: %s", zero_last_error() + 16);
    assert_int_equal(zero_wrap(&z, m.table, TOY_TENSORS, &cfg), err);
    assert_string_equal(zero_last_error(), said);
    toy_free(&m);
    environment(NULL);
}

static void test_refusals(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        check_refused(&refused[i]);
}

/* ---- before zero_wrap ---- */

static void count_line(void *arg, const char *line)
{
    if (strstr(line, "ZERO_STGE"))
        ++*(int *)arg;
}

/* What zero_wrap warns of is told once, by zero_wrap; and the rank that was found is the context's. */
static void test_before_wrap(void **state)
{
    (void)state;
    static const struct variable misspelt[MOST_VARIABLES] = {{"ZERO_STGE", "3"},
                                                             {"RANK", "0"},
                                                             {"WORLD_SIZE", "1"},
                                                             {"LOCAL_RANK", "0"},
                                                             {"TORCHELASTIC_RESTART_COUNT", "2"}};
    struct zero_config cfg = ZERO_CONFIG_INIT;
    int32_t rank, world, local_rank;
    struct zero_stats stats;
    int n_reported = 0;
    struct toy m;
    zero_ctx *z;
    cfg.debug.log = count_line;
    cfg.debug.log_arg = &n_reported;
    environment(misspelt);
    toy_make(&m);
    assert_int_equal(zero_find_rank(&cfg, &rank, &world, &local_rank), 0);
    assert_int_equal(n_reported, 0);
    assert_int_equal(zero_wrap(&z, m.table, TOY_TENSORS, &cfg), 0);
    assert_int_equal(n_reported, 1);
    assert_int_equal(zero_get_stats(z, &stats), 0);
    assert_true(stats.rank == rank && stats.world == world && stats.local_rank == local_rank);
    assert_int_equal(stats.attempt, 2);
    assert_int_equal(zero_unwrap(&z), 0);
    toy_free(&m);
    environment(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sources),
        cmocka_unit_test(test_configuration),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_before_wrap),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
