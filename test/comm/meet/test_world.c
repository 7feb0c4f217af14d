/* SPDX-License-Identifier: Apache-2.0 */
/* test_world.c: tests how each launcher's variables give rank and world, and which combinations are
 * refused. */
#include "comm/meet/net_address.h"
#include "comm/meet/rendezvous.h"
#include "test/cmocka.h"
#include "test/comm/meet/environment.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void expect(int rank, int world, int local_rank, const char *host, int port, const char *source)
{
    struct zr_world w;
    memset(&w, 0xff, sizeof w);
    if (zr_world_find(0, 0, NULL, &w) != 0)
        fail_msg("%s", zr_error_text());
    assert_int_equal(w.rank, rank);
    assert_int_equal(w.world, world);
    assert_int_equal(w.local_rank, local_rank);
    assert_string_equal(w.host, host);
    if (port >= 0)
        assert_int_equal(w.port, port);
    assert_string_equal(w.source, source);
}

/* Expects a refusal whose message has each of the texts, up to NULL, and that leaves *w unchanged. */
static void refuse_with(int want_rank, int want_world, const char *url, ...)
{
    struct zr_world w, before;
    va_list ap;
    memset(&w, 0x5a, sizeof w);
    before = w;
    int err = zr_world_find(want_rank, want_world, url, &w);
    if (err != ZERO_ERR_ARG)
        fail_msg("code %d: \"%s\"", err, zr_error_text());
    assert_memory_equal(&w, &before, sizeof w);
    va_start(ap, url);
    for (const char *text; (text = va_arg(ap, const char *));)
        if (!strstr(zr_error_text(), text))
            fail_msg("\"%s\" does not say \"%s\"", zr_error_text(), text);
    va_end(ap);
}

#define refuse(...) refuse_with(0, 0, NULL, __VA_ARGS__, (const char *)NULL)

static void test_alone(void **state)
{
    environment(NULL);
    expect(0, 1, 0, "", 0, "alone");
    /* An address alone makes no world. */
    environment("MASTER_ADDR", "node1", "MASTER_PORT", "29500", NULL);
    expect(0, 1, 0, "", 0, "alone");
}

static void test_explicit(void **state)
{
    struct zr_world w;
    environment("RANK", "7", "WORLD_SIZE", "junk", "ZERO_RANK", "-1", NULL); /* not even read */
    assert_int_equal(zr_world_find(2, 4, "tcp://node1:29501", &w), 0);
    assert_true(w.rank == 2 && w.world == 4 && w.local_rank == 2 && w.port == 29501);
    assert_string_equal(w.host, "node1");
    assert_string_equal(w.source, "config");
    assert_int_equal(zr_world_find(0, 1, NULL, &w), 0);
    assert_true(w.world == 1 && w.host[0] == 0);
    refuse_with(0, 2, NULL, "ZERO_RENDEZVOUS", "MASTER_ADDR", "rank 0 of 2", NULL);
    setenv("ZERO_RENDEZVOUS", "tcp://10.0.0.1:700", 1);
    assert_int_equal(zr_world_find(0, 2, NULL, &w), 0);
    assert_string_equal(w.host, "10.0.0.1");
    refuse_with(3, 3, NULL, "rank is 3", "0 to 2", "world is 3", NULL);
    refuse_with(-1, 3, NULL, "rank is -1", "0 to 2", NULL);
    refuse_with(0, -2, NULL, "world is -2", NULL);
    static const char *const bad[] = {"node1:5", "tcp://node1", "tcp://:5", "tcp://a:b:5", "tcp://node1/x:5",
                                      "",        "udp://a:1"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        refuse_with(0, 2, bad[i], "rendezvous is \"", bad[i], "tcp://host:port", NULL);
    refuse_with(0, 2, "tcp://a:0", "the port in rendezvous is \"0\"", "1 to 65535", NULL);
    refuse_with(0, 2, "tcp://a:65536", "65536", NULL);
    refuse_with(0, 2, "tcp://a:80x", "80x", NULL);
}

static void test_zero(void **state)
{
    environment("ZERO_RANK", "1", "ZERO_WORLD_SIZE", "3", "ZERO_LOCAL_RANK", "0", "ZERO_RENDEZVOUS",
                "tcp://h:99", "RANK", "0", "WORLD_SIZE", "9", NULL);
    expect(1, 3, 0, "h", 99, "ZERO_RANK");
    struct zr_world w;
    environment("ZERO_RANK", "1", "ZERO_WORLD_SIZE", "3", "ZERO_LOCAL_RANK", "0", "ZERO_RENDEZVOUS",
                "tcp://h:99", "ZERO_JOB", "j7", NULL);
    expect(1, 3, 0, "h", 99, "zero-run");
    assert_int_equal(zr_world_find(0, 0, "tcp://other:98", &w), 0);
    assert_string_equal(w.host, "other"); /* an URL in the configuration replaces the one found */
    assert_string_equal(w.job, "j7");
    assert_int_equal(w.rank, 1);
    unsetenv("ZERO_LOCAL_RANK");
    expect(1, 3, 1, "h", 99, "zero-run");
    unsetenv("ZERO_WORLD_SIZE");
    refuse("ZERO_WORLD_SIZE is not set", "ZERO_RANK is \"1\"");
}

static void test_torchrun(void **state)
{
    environment("RANK", "5", "WORLD_SIZE", "8", "LOCAL_RANK", "1", "MASTER_ADDR", "127.0.0.1", "MASTER_PORT",
                "29500", "TORCHELASTIC_RUN_ID", "r1", NULL);
    expect(5, 8, 1, "127.0.0.1", 29500, "torchrun");
    setenv("TORCHELASTIC_USE_AGENT_STORE", "False", 1);
    expect(5, 8, 1, "127.0.0.1", 29500, "torchrun");
    setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
    expect(5, 8, 1, "127.0.0.1", 29501, "torchrun");
    setenv("MASTER_PORT", "65535", 1);
    expect(5, 8, 1, "127.0.0.1", 65534, "torchrun");
    unsetenv("MASTER_PORT");
    refuse("MASTER_PORT is not set", "MASTER_ADDR");
    unsetenv("MASTER_ADDR");
    refuse("rank 5 of 8", "torchrun", "MASTER_ADDR");
    setenv("WORLD_SIZE", "1", 1);
    setenv("RANK", "0", 1);
    setenv("LOCAL_RANK", "0", 1);
    expect(0, 1, 0, "", 0, "torchrun"); /* one rank needs no address */
}

static void test_bad_text(void **state)
{
    static const char *const bad[] = {
        "abc", "", "-1", "4x", " 4", "+4", "0x4", "4.0", "99999999999999999999", "0", "65537"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        environment("RANK", "0", "WORLD_SIZE", bad[i], "MASTER_ADDR", "h", "MASTER_PORT", "1", NULL);
        char text[64];
        snprintf(text, sizeof text, "WORLD_SIZE is \"%s\"", bad[i]);
        refuse(text, "1 to 65536");
    }
    environment("RANK", "3", "WORLD_SIZE", "3", "MASTER_ADDR", "h", "MASTER_PORT", "1", NULL);
    refuse("RANK is \"3\"", "0 to 2");
    setenv("RANK", "-1", 1);
    refuse("RANK is \"-1\"", "0 to 2");
    setenv("RANK", "2", 1);
    setenv("LOCAL_RANK", "x", 1);
    refuse("LOCAL_RANK is \"x\"");
    setenv("LOCAL_RANK", "3", 1);
    refuse("LOCAL_RANK is \"3\"", "0 to 2");
    unsetenv("LOCAL_RANK");
    setenv("MASTER_PORT", "http", 1);
    refuse("MASTER_PORT is \"http\"", "1 to 65535");
    setenv("MASTER_PORT", "1", 1);
    setenv("MASTER_ADDR", "", 1);
    refuse("MASTER_ADDR is \"\"");
    environment("WORLD_SIZE", "2", NULL);
    refuse("RANK is not set", "WORLD_SIZE is \"2\"");
    environment("RANK", "1", NULL);
    refuse("WORLD_SIZE is not set", "RANK is \"1\"");
    environment("SLURM_PROCID", "9", "SLURM_NTASKS", "4", NULL);
    refuse("SLURM_PROCID is \"9\"", "0 to 3");
    environment("PMI_RANK", "0", NULL);
    refuse("PMI_SIZE is not set");
    environment("ZERO_RANK", "0", "ZERO_WORLD_SIZE", "2", "ZERO_RENDEZVOUS", "here", NULL);
    refuse("ZERO_RENDEZVOUS is \"here\"");
}

/* Half of srun's variables do not mean a world of 1: every task would then train alone. */
static void test_half_of_slurm(void **state)
{
    environment("SLURM_PROCID", "1", "SLURM_NTASKS", "1", NULL);
    refuse("SLURM_NTASKS is 1: SLURM_PROCID is \"1\"", "0 to 0");
    environment("SLURM_PROCID", "1", NULL);
    refuse("SLURM_NTASKS is not set though SLURM_PROCID is \"1\"");
    environment("SLURM_PROCID", "0", "SLURM_STEP_NUM_TASKS", "4", NULL);
    refuse("SLURM_NTASKS is not set though SLURM_PROCID is \"0\"");
    environment("SLURM_NTASKS", "4", "SLURM_STEP_ID", "0", NULL);
    refuse("SLURM_PROCID is not set though SLURM_NTASKS is \"4\"");
    environment("SLURM_PROCID", "0", "SLURM_NTASKS", "1", "SLURM_STEP_NUM_TASKS", "4", "SLURM_STEP_ID", "0",
                NULL);
    refuse("SLURM_NTASKS is 1, but SLURM_STEP_NUM_TASKS is 4", "start the ranks with srun");
    setenv("SLURM_NTASKS", "4", 1);
    setenv("SLURM_STEP_NUM_TASKS", "1", 1);
    refuse("SLURM_NTASKS is 4, but SLURM_STEP_NUM_TASKS is 1");
    setenv("SLURM_STEP_NUM_TASKS", "4x", 1);
    refuse("SLURM_STEP_NUM_TASKS is \"4x\"");
    setenv("SLURM_STEP_NUM_TASKS", "4", 1);
    setenv("SLURM_JOB_ID", "7", 1);
    expect(0, 4, 0, "127.0.0.1", -1, "Slurm");
    /* A batch script without -n, and one that starts ranks by RANK and WORLD_SIZE. */
    environment("SLURM_PROCID", "0", NULL);
    expect(0, 1, 0, "", 0, "alone");
    environment("SLURM_PROCID", "0", "SLURM_NTASKS", "1", "SLURM_STEP_NUM_TASKS", "1", "SLURM_STEP_ID", "0",
                NULL);
    expect(0, 1, 0, "", 0, "alone");
}

/* The numbers of torchrun's agents are read as strictly as its ranks. */
static void test_agents(void **state)
{
    static const char *const names[] = {"GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"};
    static const char *const bad[] = {"2x", "", "0", "65537", "-1"};
    for (size_t i = 0; i < 10; i++) {
        char text[64];
        environment("RANK", "5", "WORLD_SIZE", "8", "MASTER_ADDR", "h", "MASTER_PORT", "1",
                    "TORCHELASTIC_RUN_ID", "r1", names[i % 2], bad[i / 2], NULL);
        snprintf(text, sizeof text, "%s is \"%s\"", names[i % 2], bad[i / 2]);
        refuse(text, i % 2 ? "1 to 8" : "1 to 65536");
    }
    setenv("LOCAL_WORLD_SIZE", "4", 1);
    setenv("GROUP_WORLD_SIZE", "2", 1);
    expect(5, 8, 5, "h", 1, "torchrun");
}

/* Two torchrun jobs share a folder, and both have the default name "none". */
static void test_jobs_of_torchrun(void **state)
{
    struct zr_world a, b;
    environment("RANK", "1", "WORLD_SIZE", "2", "LOCAL_WORLD_SIZE", "2", "MASTER_ADDR", "h", "MASTER_PORT",
                "29500", "TORCHELASTIC_RUN_ID", "none", "ZERO_RENDEZVOUS", "file:///shared", NULL);
    assert_int_equal(zr_world_find(0, 0, NULL, &a), 0);
    setenv("RANK", "0", 1);
    assert_int_equal(zr_world_find(0, 0, NULL, &b), 0);
    assert_string_equal(a.job, b.job);
    setenv("MASTER_PORT", "29501", 1);
    assert_int_equal(zr_world_find(0, 0, NULL, &b), 0);
    assert_string_not_equal(a.job, b.job);
    unsetenv("TORCHELASTIC_RUN_ID");
    assert_int_equal(zr_world_find(0, 0, NULL, &a), 0);
    assert_string_equal(a.job, b.job);
    setenv("TORCHELASTIC_RUN_ID", "mine", 1);
    assert_int_equal(zr_world_find(0, 0, NULL, &b), 0);
    assert_string_equal(b.job, "mine");
    setenv("TORCHELASTIC_RUN_ID", "none", 1);
    setenv("ZERO_JOB", "none", 1);
    assert_int_equal(zr_world_find(0, 0, NULL, &b), 0);
    assert_string_equal(b.job, "none");
}

/* The configuration's ranks are some of the ranks of a launcher's job. */
static void test_part_of_a_job(void **state)
{
    struct zr_world w;
    environment("ZERO_RANK", "3", "ZERO_WORLD_SIZE", "4", "ZERO_JOB", "j", "MASTER_ADDR", "127.0.0.1",
                "MASTER_PORT", "29500", NULL);
    refuse_with(1, 2, NULL, "rank 1 of 2", "belongs to zero-run's job as rank 3 of 4",
                "set cfg.launch.rendezvous", NULL);
    assert_int_equal(zr_world_find(1, 2, "tcp://127.0.0.1:29501", &w), 0);
    assert_int_equal(zr_world_find(0, 1, NULL, &w), 0); /* it meets nobody */
    assert_int_equal(zr_world_find(0, 4, NULL, &w), 0); /* in another order */
    setenv("ZERO_RENDEZVOUS", "file:///shared", 1);     /* all processes of the job have it */
    refuse_with(1, 2, NULL, "belongs to zero-run's job", NULL);
    environment("RANK", "3", "WORLD_SIZE", "4", "TORCHELASTIC_RUN_ID", "r", "MASTER_ADDR", "127.0.0.1",
                "MASTER_PORT", "29500", NULL);
    refuse_with(1, 2, NULL, "belongs to torchrun's job", NULL);
    unsetenv("TORCHELASTIC_RUN_ID"); /* leftover variables are found when ranks meet */
    assert_int_equal(zr_world_find(1, 2, NULL, &w), 0);
    assert_true(w.start.rank == 3 && w.start.world == 4);
    assert_int_equal(zr_world_find(1, 2, "tcp://127.0.0.1:29501", &w), 0);
    assert_true(w.start.world == 0);
    char own[16];
    snprintf(own, sizeof own, "%ld", (long)getpid());
    environment("SLURM_PROCID", "3", "SLURM_NTASKS", "4", "SLURM_STEP_ID", "0", "SLURM_TASK_PID", own,
                "MASTER_ADDR", "h", "MASTER_PORT", "1", NULL);
    refuse_with(1, 2, NULL, "belongs to Slurm's job", NULL);
    setenv("SLURM_TASK_PID", "1", 1); /* a process started by the task */
    assert_int_equal(zr_world_find(1, 2, NULL, &w), 0);
    assert_true(w.start.rank == 3 && w.start.world == 4);
}

static void expect_start(const char *job, const char *started_by)
{
    struct zr_world w;
    if (zr_world_find(0, 0, NULL, &w))
        fail_msg("%s", zr_error_text());
    assert_string_equal(w.job, job);
    assert_string_equal(w.start.job, started_by);
    assert_int_equal(w.is_port_of_own_job, getenv("ZERO_JOB") && !getenv("MASTER_PORT"));
}

/* Two jobs of a launcher share one ZERO_JOB. The launcher's own names tell them apart. */
static void test_exported_job(void **state)
{
    environment("OMPI_COMM_WORLD_RANK", "1", "OMPI_COMM_WORLD_SIZE", "2", "PMIX_NAMESPACE", "1234.1", NULL);
    expect_start("1234.1", "");
    setenv("ZERO_JOB", "j", 1);
    expect_start("j", "Open MPI's job 1234.1");
    environment("SLURM_PROCID", "1", "SLURM_NTASKS", "2", "SLURM_JOB_ID", "77", "SLURM_STEP_ID", "3",
                "ZERO_JOB", "j", NULL);
    expect_start("j", "Slurm's job 77.3");
    setenv("SLURM_HET_SIZE", "2", 1); /* each component has an id */
    expect_start("j", "");
    environment("RANK", "1", "WORLD_SIZE", "2", "TORCHELASTIC_RUN_ID", "r", "MASTER_ADDR", "h", "MASTER_PORT",
                "1", "ZERO_JOB", "j", NULL);
    expect_start("j", "torchrun's job r");
}

/* An IPv4 address written as an IPv6 one. */
static void test_mapped(void **state)
{
    struct zr_world w;
    union zr_address a;
    environment("RANK", "0", "WORLD_SIZE", "2", "MASTER_ADDR", "::ffff:127.0.0.1", "MASTER_PORT", "1", NULL);
    assert_int_equal(zr_world_find(0, 0, NULL, &w), 0);
    assert_true(zr_address_parse(w.host, w.port, &a) && a.any.sa_family == AF_INET);
    assert_true(zr_world_is_on_loopback(&w));
}

/* Launchers that give no address: ranks meet on loopback, at a port that all ranks of a job derive equally
 * and ranks of other jobs do not. */
static void test_mpi_and_slurm(void **state)
{
    environment("OMPI_COMM_WORLD_RANK", "1", "OMPI_COMM_WORLD_SIZE", "2", "OMPI_COMM_WORLD_LOCAL_RANK", "1",
                "PMIX_NAMESPACE", "1234.1", NULL);
    expect(1, 2, 1, "127.0.0.1", -1, "Open MPI");
    struct zr_world a, b;
    assert_int_equal(zr_world_find(0, 0, NULL, &a), 0);
    assert_true(a.port >= 20000 && a.port < 32000);
    setenv("OMPI_COMM_WORLD_RANK", "0", 1);
    assert_int_equal(zr_world_find(0, 0, NULL, &b), 0);
    assert_int_equal(a.port, b.port);
    assert_string_equal(a.job, b.job);
    setenv("PMIX_NAMESPACE", "1235.1", 1);
    assert_int_equal(zr_world_find(0, 0, NULL, &b), 0);
    assert_int_not_equal(a.port, b.port);
    assert_string_not_equal(a.job, b.job);
    setenv("MASTER_ADDR", "node1", 1);
    setenv("MASTER_PORT", "4000", 1);
    expect(0, 2, 1, "node1", 4000, "Open MPI"); /* an address that is present is used */

    environment("PMI_RANK", "2", "PMI_SIZE", "4", "MPI_LOCALRANKID", "2", NULL);
    expect(2, 4, 2, "127.0.0.1", -1, "MPICH");
    assert_int_equal(zr_world_find(0, 0, NULL, &a), 0);
    assert_string_not_equal(a.job, ""); /* of the launcher's process */

    environment("SLURM_PROCID", "3", "SLURM_NTASKS", "4", "SLURM_LOCALID", "1", "SLURM_JOB_ID", "77",
                "SLURM_STEP_ID", "0", NULL);
    expect(3, 4, 1, "127.0.0.1", -1, "Slurm");
    assert_int_equal(zr_world_find(0, 0, NULL, &a), 0);
    assert_string_equal(a.job, "77.0");
    setenv("SLURM_STEP_ID", "1", 1);
    assert_int_equal(zr_world_find(0, 0, NULL, &b), 0);
    assert_int_not_equal(a.port, b.port);
    /* a single task, and the shell of an allocation, are alone */
    setenv("SLURM_NTASKS", "1", 1);
    setenv("SLURM_PROCID", "0", 1);
    expect(0, 1, 0, "", 0, "alone");
    environment("SLURM_NTASKS", "4", NULL);
    expect(0, 1, 0, "", 0, "alone");
}

static void expect_user_comm(int rank, int world, const char *url, int local_rank, const char *host, int port)
{
    static const struct zr_user_comm_ranks comm = {.name = "nccl_comm", .rank = 1, .world = 3};
    struct zr_world w;
    if (zr_world_of_user_comm(&comm, rank, world, url, &w))
        fail_msg("%s", zr_error_text());
    if (w.rank != 1 || w.world != 3 || w.local_rank != local_rank || strcmp(w.host, host) || w.port != port ||
        strcmp(w.source, "nccl_comm"))
        fail_msg("rank %d of %d, local %d, at \"%s\" port %d, from %s", w.rank, w.world, w.local_rank, w.host,
                 w.port, w.source);
}

static void refuse_user_comm(int rank, int world, const char *text)
{
    static const struct zr_user_comm_ranks comm = {.name = "nccl_comm", .rank = 1, .world = 3};
    struct zr_world w;
    assert_int_equal(zr_world_of_user_comm(&comm, rank, world, NULL, &w), ZERO_ERR_ARG);
    if (!strstr(zr_error_text(), text))
        fail_msg("\"%s\" lacks \"%s\"", zr_error_text(), text);
}

/* The program's communicator in which this process is rank 1 of 3. */
static void test_user_comm(void **state)
{
    environment(NULL);
    expect_user_comm(0, 0, NULL, 1, "", 0);
    expect_user_comm(1, 3, NULL, 1, "", 0);
    expect_user_comm(0, 0, "tcp://node1:5000", 1, "node1", 5000);
    expect_user_comm(0, 0, "file:///shared", 1, "", 0);
    refuse_user_comm(0, 3,
                     "nccl_comm is rank 1 of 3, but rank and world of the configuration say: rank 0 of 3");
    environment("ZERO_RENDEZVOUS", "tcp://node2:6000", NULL);
    expect_user_comm(0, 0, NULL, 1, "node2", 6000);
    environment("RANK", "1", "WORLD_SIZE", "3", "LOCAL_RANK", "0", "MASTER_ADDR", "node1", "MASTER_PORT",
                "1000", NULL);
    expect_user_comm(0, 0, NULL, 0, "node1", 0);
    setenv("MASTER_ADDR", "[::1]", 1);
    expect_user_comm(0, 0, NULL, 0, "::1", 0);
    setenv("MASTER_ADDR", "node1", 1);
    setenv("WORLD_SIZE", "6", 1);
    refuse_user_comm(0, 0,
                     "nccl_comm is rank 1 of 3, but RANK is 1 and WORLD_SIZE is 6; they must be the same");
    expect_user_comm(1, 3, NULL, 1, "node1", 0); /* the configuration takes precedence */
    unsetenv("RANK");
    refuse_user_comm(0, 0, "RANK is not set though WORLD_SIZE is");
    environment(NULL);
}

/* The program's MPI communicator has some of the job's ranks; the launcher describes the whole job. */
static void test_user_comm_part(void **state)
{
    static const struct zr_user_comm_ranks comm = {
        .name = "mpi_comm", .rank = 1, .world = 3, .job_rank = 4, .job_world = 6};
    struct zr_world w;
    environment("OMPI_COMM_WORLD_RANK", "4", "OMPI_COMM_WORLD_SIZE", "6", "OMPI_COMM_WORLD_LOCAL_RANK", "2",
                NULL);
    assert_int_equal(zr_world_of_user_comm(&comm, 0, 0, NULL, &w), 0);
    assert_true(w.rank == 1 && w.world == 3 && w.local_rank == 2 && w.has_local_rank);
    assert_string_equal(w.source, "mpi_comm");
    assert_string_equal(w.size_from, "mpi_comm has 3 ranks");
    assert_int_equal(zr_world_of_user_comm(&comm, 1, 3, NULL, &w), 0);
    assert_int_equal(zr_world_of_user_comm(&comm, 4, 6, NULL, &w),
                     ZERO_ERR_ARG); /* differs from the communicator's */
    assert_non_null(strstr(zr_error_text(), "rank and world of the configuration say: rank 4 of 6"));
    setenv("OMPI_COMM_WORLD_SIZE", "7", 1);
    assert_int_equal(zr_world_of_user_comm(&comm, 0, 0, NULL, &w), ZERO_ERR_ARG);
    assert_non_null(strstr(zr_error_text(),
                           "mpi_comm is rank 1 of 3 (and rank 4 of 6 of MPI_COMM_WORLD), but "
                           "OMPI_COMM_WORLD_RANK is 4 and OMPI_COMM_WORLD_SIZE is 7"));
    environment("ZERO_RANK", "0", "ZERO_WORLD_SIZE", "2", "ZERO_JOB", "j", NULL);
    assert_int_equal(zr_world_of_user_comm(&comm, 0, 0, NULL, &w), ZERO_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), "zero-run starts no MPI"));
    environment(NULL);
}

/* A job name that does not fit is cut, in the same way on all ranks. */
static void test_long_job(void **state)
{
    char text[400];
    struct zr_world w;
    memset(text, 'j', sizeof text - 1);
    text[sizeof text - 1] = 0;
    environment("SLURM_PROCID", "0", "SLURM_NTASKS", "2", "SLURM_CLUSTER_NAME", text, "SLURM_JOB_ID", text,
                NULL);
    assert_int_equal(zr_world_find(0, 0, NULL, &w), 0);
    assert_int_equal(strlen(w.job), sizeof w.job - 1);
}

/* The key of a job: where it is found, and that no message shows it. */
static void test_key(void **state)
{
    static const char hex[] = "00112233445566778899aAbBcCdDeEfF";
    struct zr_world w;
    environment("RANK", "0", "WORLD_SIZE", "2", "MASTER_ADDR", "h", "MASTER_PORT", "1", NULL);
    assert_int_equal(zr_world_find(0, 0, NULL, &w), 0);
    assert_int_equal(w.key.n_bytes, 0);
    setenv("ZERO_JOB_KEY", hex, 1);
    assert_int_equal(zr_world_find(0, 0, NULL, &w), 0);
    assert_int_equal(w.key.n_bytes, 16);
    for (int i = 0; i < 16; i++)
        assert_int_equal(w.key.bytes[i], i * 17);
    static const char *const bad[] = {"",
                                      "secret",
                                      "00112233445566778899aabbccddeef",
                                      "00112233445566778899aabbccddeefg",
                                      "0x112233445566778899aabbccddeeff",
                                      " 0112233445566778899aabbccddeeff"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        setenv("ZERO_JOB_KEY", bad[i], 1);
        refuse("ZERO_JOB_KEY has", "32 to 128 hex digits");
        assert_true(!bad[i][0] || !strstr(zr_error_text(), bad[i]));
    }
    /* The key is in a file of the user's. */
    char path[] = "zero-test-key-XXXXXX", text[64];
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    setenv("ZERO_JOB_KEY_FILE", path, 1);
    setenv("ZERO_JOB_KEY", hex, 1);
    refuse("ZERO_JOB_KEY and ZERO_JOB_KEY_FILE are both set");
    unsetenv("ZERO_JOB_KEY");
    refuse("ZERO_JOB_KEY_FILE", path, "has 0 characters");
    snprintf(text, sizeof text, "%s\n", hex);
    assert_int_equal(write(fd, text, strlen(text)), (int)strlen(text));
    assert_int_equal(zr_world_find(0, 0, NULL, &w), 0);
    assert_true(w.key.n_bytes == 16 && w.key.bytes[15] == 0xff);
    assert_int_equal(fchmod(fd, 0400), 0);
    assert_int_equal(zr_world_find(0, 0, NULL, &w), 0);
    static const mode_t open_to_others[] = {0640, 0604, 0620, 0644, 0700};
    for (size_t i = 0; i < sizeof open_to_others / sizeof *open_to_others; i++) {
        assert_int_equal(fchmod(fd, open_to_others[i]), 0);
        snprintf(text, sizeof text, "mode %04o", (unsigned)open_to_others[i]);
        refuse("ZERO_JOB_KEY_FILE", path, text, "chmod 600");
    }
    close(fd);
    unlink(path);
    refuse("ZERO_JOB_KEY_FILE", path, "No such file");
    setenv("ZERO_JOB_KEY_FILE", "/", 1);
    refuse("ZERO_JOB_KEY_FILE", "/ is not a file");
    /* One rank needs no key. */
    setenv("WORLD_SIZE", "1", 1);
    assert_int_equal(zr_world_find(0, 0, NULL, &w), 0);
    /* Two generated keys differ. */
    struct zr_job_key a, b;
    assert_int_equal(zr_job_key_make(&a), 0);
    assert_int_equal(zr_job_key_make(&b), 0);
    assert_true(a.n_bytes == 16 && memcmp(a.bytes, b.bytes, 16) != 0);
}

static void test_attempt(void **state)
{
    struct zr_world w;
    environment("RANK", "0", "WORLD_SIZE", "2", "MASTER_ADDR", "h", "MASTER_PORT", "1", NULL);
    assert_int_equal(zr_world_find(0, 0, NULL, &w), 0);
    assert_int_equal(w.attempt, 0);
    setenv("TORCHELASTIC_RESTART_COUNT", "3", 1);
    assert_int_equal(zr_world_find(0, 0, NULL, &w), 0);
    assert_int_equal(w.attempt, 3);
    setenv("TORCHELASTIC_RESTART_COUNT", "x", 1);
    refuse("TORCHELASTIC_RESTART_COUNT is \"x\"");
    /* zero-run's variable takes precedence, whichever launcher gives the rank. */
    setenv("ZERO_ATTEMPT", "5", 1);
    assert_int_equal(zr_world_find(0, 0, NULL, &w), 0);
    assert_int_equal(w.attempt, 5);
    assert_int_equal(zr_world_find(1, 2, "tcp://h:1", &w), 0);
    assert_int_equal(w.attempt, 5);
    setenv("ZERO_ATTEMPT", "-1", 1);
    refuse("ZERO_ATTEMPT is \"-1\": a whole number from 0 to");
}

static void refuse_interface(const char *want, struct zr_world *w, const char *says)
{
    struct zr_world was = *w;
    assert_int_equal(zr_world_interface(want, w), ZERO_ERR_ARG);
    if (!strstr(zr_error_text(), says))
        fail_msg("\"%s\" lacks \"%s\"", zr_error_text(), says);
    assert_memory_equal(w, &was, sizeof was);
}

/* The loopback interface is the one that every host has. */
static void test_interface(void **state)
{
    struct zr_world w;
    environment(NULL);
    assert_int_equal(zr_world_find(1, 2, "tcp://node0:29500", &w), 0);
    assert_int_equal(zr_world_interface(NULL, &w), 0);
    assert_int_equal(zr_world_interface("", &w), 0);
    assert_string_equal(w.interface, "");
    assert_int_equal(zr_world_interface("lo", &w), 0);
    assert_string_equal(w.interface, "lo");
    assert_int_equal(zr_world_interface("127.0.0.1", &w), 0);
    assert_string_equal(w.interface, "127.0.0.1");
    refuse_interface("eth99", &w, "interface is \"eth99\": this host has ");
    setenv("ZERO_INTERFACE", "203.0.113.9", 1);
    refuse_interface("lo", &w, "ZERO_INTERFACE is \"203.0.113.9\": this host has ");
    setenv("ZERO_INTERFACE", "lo", 1);
    assert_int_equal(zr_world_interface("eth99", &w), 0);
    assert_string_equal(w.interface, "lo");
    setenv("ZERO_INTERFACE", "", 1);
    refuse_interface("eth99", &w, "interface is \"eth99\"");
    /* There is nobody to meet. */
    assert_int_equal(zr_world_find(0, 1, NULL, &w), 0);
    assert_int_equal(zr_world_interface("eth99", &w), 0);
    unsetenv("ZERO_INTERFACE");
}

static void test_loopback(void **state)
{
    static const struct {
        const char *host;
        bool is;
    } rows[] = {{"127.0.0.1", true}, {"::1", true},       {"localhost", true}, {"127.3.2.1", true},
                {"node0", false},    {"10.0.0.1", false}, {"fd77::1", false},  {"", false}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct zr_world w = {.world = 2, .port = 1};
        snprintf(w.host, sizeof w.host, "%s", rows[i].host);
        assert_int_equal(zr_world_is_on_loopback(&w), rows[i].is);
    }
}

/* A shell stands in for MPICH's launcher and runs inside a rank of another job. Each rank is the child of
 * a wrapper. */
static void expect_one_job(const char *launcher, const char *outer_fd, const char *own)
{
    static const char script[] =
        "for rank in 0 1; do"
        " PMI_RANK=$rank PMI_SIZE=2 PMI_FD=1$rank sh -c '\"$PROGRAM\" job; exit $?'; "
        "done";
    char program[4096], job[2][256] = {"", ""};
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    assert_true(n > 0);
    program[n] = 0;
    environment("PROGRAM", program, "LAUNCHER", launcher, "SCRIPT", script, "PMI_RANK", "0", "PMI_SIZE", "2",
                "PMI_FD", outer_fd, own ? "ZERO_JOB" : NULL, own, NULL);
    FILE *f = popen("exec \"$LAUNCHER\" -c \"$SCRIPT\"", "r");
    assert_non_null(f);
    for (int i = 0; i < 2; i++)
        assert_non_null(fgets(job[i], sizeof job[i], f));
    assert_int_equal(pclose(f), 0);
    assert_string_equal(job[0], job[1]);
    assert_non_null(strstr(job[0], own ? "j, MPICH of process " : "MPICH of process "));
}

static void test_wrapped(void **state)
{
    char folder[] = "/tmp/zero-world-XXXXXX", launcher[64];
    expect_one_job("/bin/sh", "7", NULL);
    expect_one_job("/bin/sh", "7", "j");
    /* The outer rank has the same variables as the inner rank 0, so only the launcher's name tells them
     * apart. */
    assert_non_null(mkdtemp(folder));
    snprintf(launcher, sizeof launcher, "%s/hydra_pmi_proxy", folder);
    assert_int_equal(symlink("/bin/sh", launcher), 0);
    expect_one_job(launcher, "10", NULL);
    assert_int_equal(unlink(launcher), 0);
    assert_int_equal(rmdir(folder), 0);
    environment(NULL);
}

static int print_job(void)
{
    struct zr_world w;
    if (zr_world_find(0, 0, NULL, &w))
        return 1;
    printf("%s, %s\n", w.job, w.start.job);
    return 0;
}

int main(int n_args, char **args)
{
    if (n_args == 2 && strcmp(args[1], "job") == 0)
        return print_job();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_alone),
        cmocka_unit_test(test_explicit),
        cmocka_unit_test(test_zero),
        cmocka_unit_test(test_torchrun),
        cmocka_unit_test(test_bad_text),
        cmocka_unit_test(test_mpi_and_slurm),
        cmocka_unit_test(test_user_comm),
        cmocka_unit_test(test_long_job),
        cmocka_unit_test(test_key),
        cmocka_unit_test(test_attempt),
        cmocka_unit_test(test_interface),
        cmocka_unit_test(test_loopback),
        cmocka_unit_test(test_user_comm_part),
        cmocka_unit_test(test_half_of_slurm),
        cmocka_unit_test(test_agents),
        cmocka_unit_test(test_jobs_of_torchrun),
        cmocka_unit_test(test_mapped),
        cmocka_unit_test(test_part_of_a_job),
        cmocka_unit_test(test_wrapped),
        cmocka_unit_test(test_exported_job),
    };
    return cmocka_run_group_tests_name("world", tests, NULL, NULL);
}
