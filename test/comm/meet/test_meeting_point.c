/* SPDX-License-Identifier: Apache-2.0 */
/* test_meeting_point.c: tests where ranks look for rank 0: each way to find it, and which way takes
 * precedence. */
#include "comm/meet/rendezvous.h"
#include "test/cmocka.h"
#include "test/comm/meet/environment.h"

#include <stdlib.h>
#include <string.h>

static struct zr_world found(const char *want_url)
{
    struct zr_world w;
    memset(&w, 0xff, sizeof w);
    if (zr_world_find(0, 0, want_url, &w))
        fail_msg("%s", zr_error_text());
    return w;
}

/* With port 0 the port follows from the job's name. */
static void expect_at(const char *host, int port, const char *way)
{
    struct zr_world w = found(NULL);
    assert_string_equal(w.host, host);
    assert_string_equal(w.way, way);
    if (port ? w.port != port : w.port < 20000 || w.port >= 32000)
        fail_msg("port %d", w.port);
    assert_false(w.is_host_assumed);
}

/* Expects loopback. assumed: chosen only because nothing better was known. */
static void expect_loopback(bool assumed)
{
    struct zr_world w = found(NULL);
    assert_string_equal(w.host, "127.0.0.1");
    assert_int_equal(w.is_host_assumed, assumed);
    assert_string_equal(w.way, assumed ? "the launcher names no host" : "the launcher's only host");
}

static void refuse_place(const char *text)
{
    struct zr_world w;
    int err = zr_world_find(0, 0, NULL, &w);
    if (err != ZERO_ERR_ARG || !strstr(zr_error_text(), text))
        fail_msg("code %d: \"%s\" lacks \"%s\"", err, err ? zr_error_text() : "", text);
}

/* --- what the user sets --- */

static void test_urls(void **state)
{
    static const struct {
        const char *url, *host;
        int port;
    } good[] = {{"tcp://node1:5", "node1", 5},
                {"tcp://10.0.0.1:65535", "10.0.0.1", 65535},
                {"tcp://[::1]:700", "::1", 700},
                {"tcp://[fd77::1]:29500", "fd77::1", 29500},
                {"tcp://[::ffff:10.0.0.1]:1", "::ffff:10.0.0.1", 1},
                {"tcp://[fe80::1%lo]:5", "fe80::1%lo", 5}};
    environment("ZERO_RANK", "0", "ZERO_WORLD_SIZE", "2", NULL);
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        struct zr_world w = found(good[i].url);
        assert_string_equal(w.host, good[i].host);
        assert_int_equal(w.port, good[i].port);
        assert_string_equal(w.way, "rendezvous");
        setenv("ZERO_RENDEZVOUS", good[i].url, 1);
        expect_at(good[i].host, good[i].port, "ZERO_RENDEZVOUS");
        unsetenv("ZERO_RENDEZVOUS");
    }
}

/* A file replaces host and port. */
static void test_files(void **state)
{
    environment("ZERO_RANK", "0", "ZERO_WORLD_SIZE", "2", "MASTER_ADDR", "node1", "MASTER_PORT", "5",
                "ZERO_RENDEZVOUS", "file:///shared/a folder%20", NULL);
    struct zr_world w = found(NULL);
    assert_string_equal(w.file, "/shared/a folder%20");
    assert_true(w.host[0] == 0 && w.port == 0);
    assert_string_equal(w.way, "ZERO_RENDEZVOUS");
    w = found("file:///x");
    assert_string_equal(w.file, "/x");
    assert_string_equal(w.way, "rendezvous");
    w = found("tcp://node2:6");
    assert_string_equal(w.file, "");
    unsetenv("ZERO_RENDEZVOUS");
    assert_string_equal(found(NULL).file, "");
    char most[7 + sizeof w.file + 1] = "file:///";
    memset(most + 8, 'x', sizeof w.file - 2);
    assert_int_equal(strlen(found(most).file), sizeof w.file - 1);
    setenv("ZERO_WORLD_SIZE", "1", 1);
    assert_string_equal(found("file:///x").file, ""); /* a single rank meets nobody */
    setenv("ZERO_WORLD_SIZE", "2", 1);
    most[8 + sizeof w.file - 2] = 'x';
    const char *const bad[] = {"file://", "file://x", "file://node1/x", "file:x", "file:///a\nb", most};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        setenv("ZERO_RENDEZVOUS", bad[i], 1);
        refuse_place(strncmp(bad[i], "file://", 7) == 0 ? "file:// and the whole path of a folder or file"
                                                        : "or file:///path");
    }
}

static void test_bad_urls(void **state)
{
    static const struct {
        const char *url, *text;
    } bad[] = {{"tcp://fd77::1:29500", "put an IPv6 address into brackets, as in tcp://[fd77::1]:29500"},
               {"tcp://::1:5", "as in tcp://[::1]:5"},
               {"tcp://[::1]", "tcp://host:port or tcp://[ipv6]:port is allowed"},
               {"tcp://[::1]5", "is allowed"},
               {"tcp://[]:5", "is allowed"},
               {"tcp://[node1]:5", "is allowed"},
               {"tcp://[10.0.0.1]:5", "is allowed"},
               {"tcp://[::1:5", "is allowed"},
               {"tcp://::1]:5", "is allowed"},
               {"tcp://[[::1]]:5", "is allowed"},
               {"tcp://[fe80::1%nosuch]:5", "is allowed"},
               {"tcp://a:b:5", "is allowed"},
               {"tcp://[::1]:0", "the port in ZERO_RENDEZVOUS is \"0\""},
               {"tcp://[::1]:x", "the port in ZERO_RENDEZVOUS is \"x\""},
               {"[::1]:5", "is allowed"}};
    environment("ZERO_RANK", "0", "ZERO_WORLD_SIZE", "2", NULL);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        setenv("ZERO_RENDEZVOUS", bad[i].url, 1);
        refuse_place(bad[i].text);
    }
}

static void test_master(void **state)
{
    environment("RANK", "0", "WORLD_SIZE", "2", "MASTER_ADDR", "fd77::1", "MASTER_PORT", "5", NULL);
    expect_at("fd77::1", 5, "MASTER_ADDR");
    setenv("MASTER_ADDR", "node1", 1);
    expect_at("node1", 5, "MASTER_ADDR");
    setenv("ZERO_RENDEZVOUS", "tcp://node2:6", 1);
    expect_at("node2", 6, "ZERO_RENDEZVOUS");
    unsetenv("ZERO_RENDEZVOUS");
    setenv("MASTER_ADDR", "[::1]", 1);
    expect_at("::1", 5, "MASTER_ADDR");
    setenv("MASTER_ADDR", "[fd77::1]", 1);
    expect_at("fd77::1", 5, "MASTER_ADDR");
    static const char *const bad[] = {"[::1",        "::1]",        "[]",      "[node1]",
                                      "[127.0.0.1]", "[[::1]]",     "[::1]:5", "::1::2",
                                      "node1:5",     "tcp://node1", ""};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        setenv("MASTER_ADDR", bad[i], 1);
        refuse_place("MASTER_ADDR is \"");
        refuse_place("a name, an address of IPv4 or one of IPv6, as ::1 or [::1]");
    }
}

/* --- what launchers set --- */

static void test_open_mpi(void **state)
{
    environment("OMPI_COMM_WORLD_RANK", "1", "OMPI_COMM_WORLD_SIZE", "4", "PMIX_NAMESPACE", "7.1", NULL);
    expect_loopback(true); /* set by hand, so nothing is known of the hosts */
    setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "4", 1);
    expect_loopback(false);
    setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2", 1);
    refuse_place(
        "rank 1 of 4 (from Open MPI) does not know where rank 0 is: its ranks are on several hosts, and this "
        "launcher does not list them; on the host device set backend to mpi (ZERO_BACKEND=mpi), and ranks "
        "find each other by MPI; otherwise set ZERO_RENDEZVOUS to tcp://host:port");
    /* mpirun inside a Slurm allocation: srun's variables describe mpirun's own helpers. */
    setenv("SLURM_PROCID", "1", 1);
    setenv("SLURM_NTASKS", "4", 1);
    setenv("SLURM_JOB_NODELIST", "n[1-2]", 1);
    refuse_place("this launcher does not list them");
    setenv("MASTER_ADDR", "n1", 1);
    setenv("MASTER_PORT", "5", 1);
    expect_at("n1", 5, "MASTER_ADDR");
    unsetenv("MASTER_ADDR");
    unsetenv("MASTER_PORT");
    static const char *const bad[] = {"0", "5", "x", ""};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        setenv("OMPI_COMM_WORLD_LOCAL_SIZE", bad[i], 1);
        refuse_place("OMPI_COMM_WORLD_LOCAL_SIZE is \"");
    }
}

static void test_mpich(void **state)
{
    environment("PMI_RANK", "1", "PMI_SIZE", "4", "MPI_LOCALNRANKS", "4", NULL);
    expect_loopback(false);
    setenv("MPI_LOCALNRANKS", "3", 1);
    refuse_place("(from MPICH) does not know where rank 0 is: its ranks are on several hosts");
}

static void expect_by_mpi(bool by_mpi, const char *host, const char *way)
{
    struct zr_world w;
    memset(&w, 0xff, sizeof w);
    if (zr_world_find_by_mpi(0, 0, NULL, &w))
        fail_msg("%s", zr_error_text());
    assert_int_equal(w.by_mpi, by_mpi);
    assert_string_equal(w.host, host);
    assert_string_equal(w.way, way);
    assert_true(w.file[0] == 0 && w.n_at == 0 && (w.port == 0) == by_mpi);
}

/* Ranks that can exchange their address over MPI do so where one MPI launcher has started them, on any
 * number of hosts, unless an address is given. Other ranks do not. */
static void test_by_mpi(void **state)
{
    static const char *const local[] = {NULL, "2", "4"};
    for (size_t i = 0; i < sizeof local / sizeof *local; i++) {
        environment("OMPI_COMM_WORLD_RANK", "1", "OMPI_COMM_WORLD_SIZE", "4", "PMIX_NAMESPACE", "7.1",
                    local[i] ? "OMPI_COMM_WORLD_LOCAL_SIZE" : NULL, local[i], NULL);
        expect_by_mpi(true, "", "MPI");
        environment("PMI_RANK", "1", "PMI_SIZE", "4", local[i] ? "MPI_LOCALNRANKS" : NULL, local[i], NULL);
        expect_by_mpi(true, "", "MPI");
    }
    assert_false(found("tcp://n1:5").by_mpi);
    setenv("ZERO_RENDEZVOUS", "tcp://n2:6", 1);
    expect_by_mpi(false, "n2", "ZERO_RENDEZVOUS");
    unsetenv("ZERO_RENDEZVOUS");
    setenv("MASTER_ADDR", "n1", 1);
    setenv("MASTER_PORT", "5", 1);
    expect_by_mpi(false, "n1", "MASTER_ADDR");
    environment("RANK", "1", "WORLD_SIZE", "2", "MASTER_ADDR", "n1", "MASTER_PORT", "5", NULL);
    expect_by_mpi(false, "n1", "MASTER_ADDR");
}

static void slurm(const char *n_nodes, const char *list)
{
    environment("SLURM_PROCID", "1", "SLURM_NTASKS", "4", "SLURM_JOB_ID", "77", "SLURM_STEP_ID", "0", NULL);
    if (n_nodes)
        setenv("SLURM_NNODES", n_nodes, 1);
    if (list)
        setenv("SLURM_JOB_NODELIST", list, 1);
}

static void test_slurm(void **state)
{
    slurm(NULL, NULL);
    expect_loopback(true);
    slurm("1", "n1");
    expect_loopback(false);
    slurm(NULL, "n1");
    expect_loopback(false);
    slurm("2", "n[01-02]");
    expect_at("n01", 0, "SLURM_JOB_NODELIST");
    slurm(NULL, "n[01-02]");
    expect_at("n01", 0, "SLURM_JOB_NODELIST");
    /* A job step may have fewer hosts than its job, or others. */
    slurm("2", "n[01-02]");
    setenv("SLURM_STEP_NODELIST", "n[02-03]", 1);
    setenv("SLURM_STEP_NUM_NODES", "2", 1);
    expect_at("n02", 0, "SLURM_STEP_NODELIST");
    setenv("SLURM_STEP_NODELIST", "n02", 1);
    setenv("SLURM_STEP_NUM_NODES", "1", 1);
    expect_loopback(false);
    /* All ranks derive one port, and ranks of another step derive another. */
    slurm("2", "n[01-02]");
    struct zr_world a = found(NULL), b;
    setenv("SLURM_PROCID", "3", 1);
    b = found(NULL);
    assert_int_equal(a.port, b.port);
    setenv("SLURM_STEP_ID", "1", 1);
    b = found(NULL);
    assert_int_not_equal(a.port, b.port);
    setenv("ZERO_RENDEZVOUS", "tcp://n02:5", 1);
    expect_at("n02", 5, "ZERO_RENDEZVOUS");
}

static void test_bad_slurm(void **state)
{
    slurm("2", NULL);
    refuse_place("rank 1 of 4 (from Slurm) does not know where rank 0 is: its ranks are on several hosts, "
                 "and Slurm gave no list of all hosts");
    slurm("2", "n[3-1]");
    refuse_place("SLURM_JOB_NODELIST is \"n[3-1]\": a range that goes down at character 6");
    slurm("two", "n[1-2]");
    refuse_place("SLURM_NNODES is \"two\"");
    /* The list covers one component of several. */
    slurm("2", "n[1-2]");
    setenv("SLURM_HET_SIZE", "2", 1);
    refuse_place("Slurm gave no list of all hosts");
    /* Tasks are distributed in another order: rank 0 is not on the first host, and only rank 0 knows it. */
    slurm("2", "n[01-02]");
    setenv("SLURMD_NODENAME", "n02", 1);
    expect_at("n01", 0, "SLURM_JOB_NODELIST");
    setenv("SLURM_PROCID", "0", 1);
    refuse_place("rank 0 runs on \"n02\", but Slurm's node list n[01-02] begins with \"n01\": set "
                 "ZERO_RENDEZVOUS to tcp://n02:PORT");
    setenv("SLURMD_NODENAME", "n01", 1);
    expect_at("n01", 0, "SLURM_JOB_NODELIST");
}

/* srun --mpi=pmi2 sets MPICH's variables too. */
static void test_mpich_by_srun(void **state)
{
    slurm("2", "n[1-2]");
    setenv("PMI_RANK", "1", 1);
    setenv("PMI_SIZE", "4", 1);
    expect_at("n1", 0, "SLURM_JOB_NODELIST");
    struct zr_world a = found(NULL);
    assert_string_equal(a.source, "MPICH");
    assert_string_equal(a.job, "77.0"); /* the same on both hosts */
    expect_by_mpi(true, "", "MPI");
    /* mpiexec inside an allocation: srun's variables describe mpiexec's own helpers. */
    setenv("SLURM_PROCID", "0", 1);
    setenv("MPI_LOCALNRANKS", "2", 1);
    refuse_place("this launcher does not list them");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_urls),   cmocka_unit_test(test_bad_urls),  cmocka_unit_test(test_files),
        cmocka_unit_test(test_master), cmocka_unit_test(test_open_mpi),  cmocka_unit_test(test_mpich),
        cmocka_unit_test(test_slurm),  cmocka_unit_test(test_bad_slurm), cmocka_unit_test(test_mpich_by_srun),
        cmocka_unit_test(test_by_mpi),
    };
    return cmocka_run_group_tests_name("meeting_point", tests, NULL, NULL);
}
