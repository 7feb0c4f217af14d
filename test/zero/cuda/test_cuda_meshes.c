/* SPDX-License-Identifier: Apache-2.0 */
/* test_cuda_meshes.c: tensor parallelism and pipelines on GPU stand-ins over NCCL's. With deterministic on, a
 * mesh has the bits of the host. With it off, all ranks of an axis have the same bits.
 *
 * Some meshes run on threads. Others run on processes, which pose as one host or several: a sample that is
 * drawn from SEED (printed; by default the time). N_MESHES is their number; with N_MESHES=all all of them
 * run, which takes some minutes. */
#include "test/cmocka.h"
#include "test/stand_in/nccl_stand_in.h"
#include "test/stand_in/stand_in.h"
#include "test/zero/cuda/mesh_net.h"
#include "test/zero/where.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { SAMPLE = 10, MOST_CASES = 2000 };

static struct shared {
    struct toy_rank r[NET_WORLD];
    struct net_found found[NET_WORLD];
} * shared;

static int world_of(const struct net_run *n)
{
    return n->pp * n->dp * n->tp;
}

/* Runs a mesh on threads. */
static void on_threads(struct net_run *n)
{
    char what[160];
    const char *text;
    toy_run(world_of(n), net_rank, n, shared->r, net_text(n, what));
    nccl_stand_in_end();
    if (stand_in_end(&text))
        fail_msg("%s: %s", what, text);
}

static void as_on_the_host(struct net_run n)
{
    uint64_t want[NET_PARTS] = {0};
    n.deterministic = true;
    on_threads(&n);
    const struct net_found of = shared->found[0];
    net_compare(&n, shared->r, want, &of, true);
    n.gpu = true;
    on_threads(&n);
    net_compare(&n, shared->r, want, &of, true);
    n.deterministic = false;
    on_threads(&n);
    net_compare(&n, shared->r, want, &of, false);
}

static void test_pp(void **state)
{
    struct net_run n = {.pp = 2, .dp = 2, .tp = 1};
    for (n.stage = 0; n.stage <= 3; n.stage++)
        as_on_the_host(n);
}

static void test_tp(void **state)
{
    struct net_run n = {.pp = 1, .dp = 2, .tp = 2};
    for (n.stage = 0; n.stage <= 3; n.stage++)
        as_on_the_host(n);
}

/* Check mode finds nothing wrong, and changes no bits. */
static void test_checked(void **state)
{
    struct net_run pp = {.pp = 2, .dp = 2, .tp = 1, .check = true},
                   tp = {.pp = 1, .dp = 2, .tp = 2, .check = true};
    for (pp.stage = tp.stage = 0; pp.stage <= 3; pp.stage++, tp.stage++) {
        as_on_the_host(pp);
        as_on_the_host(tp);
    }
}

/* ---- processes ---- */

static uint32_t seed;

static int draw(int n)
{
    return (int)((pipeline_draw(&seed) + 1) / 2 * n) % n;
}

/* Returns the host that a rank poses on: all on one, consecutive ranks together, neighbours apart, or each
 * alone. */
static int host_of(int way, int rank, int world)
{
    const int host[] = {0, rank / (world > 2 ? world / 2 : 1), rank % 2, rank};
    return host[way];
}

/* Gathers by copy engines, of a release without known faults. */
static void by_copy_engines(struct zero_config *cfg)
{
    cfg->launch.copy_engine = 1;
    nccl_stand_in_the_machine()->version = 23102;
}

static void one_process(struct toy_rank *r, int way)
{
    char misuse[1024];
    where_enter(host_of(way, r->rank, r->world));
    net_rank(r);
    if (!where_leave(misuse, sizeof misuse))
        toy_wrong(r, "%s", misuse);
    _exit(0);
}

static void on_processes(struct net_run *n, int way)
{
    char what[160];
    pid_t pid[NET_WORLD];
    toy_set_ranks(world_of(n), n, shared->r);
    fflush(NULL);
    where_fork();
    nccl_stand_in_the_machine()->sends_wait = draw(2);
    for (int i = 0; i < world_of(n); i++) {
        pid[i] = fork();
        assert_true(pid[i] >= 0);
        if (!pid[i])
            one_process(&shared->r[i], way);
    }
    for (int i = 0; i < world_of(n); i++) {
        int status;
        assert_int_equal(waitpid(pid[i], &status, 0), pid[i]);
        if (status)
            toy_wrong(&shared->r[i], "it ended with status 0x%x", (unsigned)status);
    }
    where_reap();
    toy_assert_well(shared->r, world_of(n), net_text(n, what));
}

/* Lists a mesh at all stages, with all schedules. */
static int list_mesh(struct net_run n, struct net_run *out)
{
    static const int schedules[][2] = {{ZERO_SCHEDULE_1F1B, 1},
                                       {ZERO_SCHEDULE_GPIPE, 1},
                                       {ZERO_SCHEDULE_ZERO_BUBBLE, 1},
                                       {ZERO_SCHEDULE_INTERLEAVED, 2}};
    int k = 0;
    for (n.stage = 0; n.stage < TOY_STAGES; n.stage++)
        for (int i = 0; i < 4; i++) {
            n.schedule = schedules[i][0];
            n.per_rank = schedules[i][1];
            bool is = (i == 0 || n.pp > 1) && n.pp * n.per_rank <= 8 && (n.stage <= 3 || n.dp >= 4);
            for (n.prefetch = 0; is && n.prefetch <= 2; n.prefetch += 2)
                out[k++] = n;
        }
    return k;
}

static int list_all(struct net_run *out)
{
    int k = 0;
    for (int world = 2; world <= NET_WORLD; world *= 2)
        for (int pp = 1; pp <= world; pp *= 2)
            for (int tp = 1; tp <= world / pp; tp *= 2)
                if (pp > 1 || tp > 1)
                    k += list_mesh((struct net_run){.pp = pp, .dp = world / pp / tp, .tp = tp, .gpu = true},
                                   out + k);
    return k;
}

static void test_processes(void **state)
{
    static struct net_run all[MOST_CASES];
    uint64_t want[NET_PARTS + 1][NET_PARTS] = {{0}};
    struct net_found of[NET_PARTS + 1];
    const char *given = getenv("N_MESHES"), *from = getenv("SEED");
    int n_all = list_all(all), n = given && strcmp(given, "all") == 0 ? n_all : given ? atoi(given) : SAMPLE;
    seed = from ? (uint32_t)strtoul(from, NULL, 0) : (uint32_t)time(NULL);
    printf("SEED=%u, %d of %d meshes\n", seed, n, n_all);
    for (int tp = 1; tp <= NET_PARTS; tp *= 2) {
        struct net_run host = {.pp = 1, .dp = 1, .tp = tp, .deterministic = true};
        on_threads(&host);
        of[tp] = shared->found[0];
        net_compare(&host, shared->r, want[tp], &of[tp], true);
    }
    for (int i = 0; i < n; i++) {
        struct net_run run = all[n == n_all ? i : draw(n_all)];
        run.deterministic = draw(4) > 0;
        run.change = draw(4) > 0 ? NULL : by_copy_engines;
        on_processes(&run, draw(4));
        net_compare(&run, shared->r, want[run.tp], &of[run.tp], run.deterministic);
    }
}

int main(void)
{
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        return 1;
    net_found = shared->found;
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_pp), cmocka_unit_test(test_tp),
                                       cmocka_unit_test(test_checked), cmocka_unit_test(test_processes)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
