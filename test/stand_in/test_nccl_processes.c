/* SPDX-License-Identifier: Apache-2.0 */
/* test_nccl_processes.c: tests that the NCCL stand-in works between processes as between threads, and
 * treats them as the hosts that they pose as. A process that dies is noticed by the ranks that would
 * notice it with NCCL. */
#include "test/cmocka.h"
#include "test/kernels/random.h"
#include "test/stand_in/nccl_stand_in_inside.h"
#include "test/stand_in/stand_in.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 6, COUNT = 1024, HANG_S = 60, ENDED = 100 };

/* State of all processes. */
static struct job {
    int n_ranks, n_hosts;
    /* all ranks have device 0 */
    bool one_device;
    ncclUniqueId id;
    uint64_t seed;
    struct {
        /* the test's own progress, or ENDED; and the misuses of its process */
        _Atomic int stage;
        int res, n_misuses;
        bool wrong, has_window;
    } rank[MOST];
} * job;

static void sleep_ms(int ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

static void await_stage(int rank, int stage)
{
    while (atomic_load(&job->rank[rank].stage) < stage)
        sleep_ms(1);
}

/* ---- processes ---- */

static void one_rank(void (*fn)(int rank), int rank)
{
    char host[32];
    const char *text;
    snprintf(host, sizeof host, "host %d", rank * job->n_hosts / job->n_ranks);
    setenv("NCCL_HOSTID", host, 1);
    alarm(HANG_S);
    cudaSetDevice(job->one_device ? 0 : rank);
    fn(rank);
    nccl_stand_in_end();
    job->rank[rank].n_misuses = stand_in_end(&text);
    _exit(0);
}

/* victim: the rank to be killed; -1: none. */
static void over_processes(int n_ranks, int n_hosts, void (*fn)(int rank), int victim)
{
    pid_t pid[MOST];
    bool one_device = job->one_device;
    uint64_t seed = job->seed;
    memset(job, 0, sizeof *job);
    job->n_ranks = n_ranks;
    job->n_hosts = n_hosts;
    job->one_device = one_device;
    job->seed = seed;
    stand_in_the_machine()->n_devices = MOST;
    nccl_stand_in_share();
    fflush(stdout);
    for (int r = 0; r < n_ranks; r++) {
        pid[r] = fork();
        assert_true(pid[r] >= 0);
        if (pid[r] == 0)
            one_rank(fn, r);
    }
    for (int i = 0; i < n_ranks; i++) {
        int status, r = victim < 0 ? i : (victim + i) % n_ranks;
        assert_int_equal(waitpid(pid[r], &status, 0), pid[r]);
        atomic_store(&job->rank[r].stage, ENDED);
        if (r == victim ? !WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL : status != 0)
            fail_msg("rank %d of %d ended with status 0x%x", r, n_ranks, (unsigned)status);
    }
    nccl_stand_in_end();
}

static void all_well(const char *what)
{
    for (int r = 0; r < job->n_ranks; r++)
        if (job->rank[r].wrong || job->rank[r].res || job->rank[r].n_misuses)
            fail_msg("%s: rank %d of %d on %d hosts: result %d, %d misuses%s", what, r, job->n_ranks,
                     job->n_hosts, job->rank[r].res, job->rank[r].n_misuses,
                     job->rank[r].wrong ? ", wrong values" : "");
}

/* Rank 0 makes the id. */
static void take_id(int rank)
{
    if (rank == 0) {
        ncclGetUniqueId(&job->id);
        atomic_store(&job->rank[0].stage, 1);
    }
    await_stage(0, 1);
}

static int join(int rank, ncclComm_t *all)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 1;
    take_id(rank);
    return ncclCommInitRankConfig(all, job->n_ranks, job->id, rank, &config);
}

/* ---- data ---- */

static float value(int rank, int round, int i)
{
    return (float)((rank + 1) * 1000 + round * 100 + i % 97);
}

static void move(int rank)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t all, part[2];
    cudaStream_t s;
    float *at, *back = malloc(sizeof(float) * COUNT * MOST);
    int n = job->n_ranks;
    config.blocking = 1;
    job->rank[rank].res = join(rank, &all);
    for (int i = 0; i < 2; i++)
        job->rank[rank].res |= ncclCommSplit(all, i ? rank % 2 : 0, rank, &part[i], &config);
    cudaStreamCreate(&s);
    cudaMalloc((void **)&at, sizeof(float) * COUNT * MOST * 2);
    for (int round = 0; round < 20 && !job->rank[rank].res; round++) {
        int count = 1 + (int)((job->seed >> round % 32) % COUNT);
        for (int i = 0; i < count; i++)
            back[i] = value(rank, round, i);
        cudaMemcpyAsync(at, back, sizeof(float) * (size_t)count, cudaMemcpyDefault, s);
        float *gathered = at + COUNT;
        ncclAllGather(at, gathered, (size_t)count, ncclFloat32, part[0], s);
        cudaMemcpyAsync(back, gathered, sizeof(float) * (size_t)(count * n), cudaMemcpyDefault, s);
        ncclBroadcast(at, at, (size_t)count, ncclFloat32, 0, part[1], s); /* of ranks 0 and 1, by parity */
        cudaStreamSynchronize(s);
        for (int k = 0; k < count * n; k++)
            job->rank[rank].wrong |= back[k] != value(k / count, round, k % count);
        cudaMemcpyAsync(back, at, sizeof(float) * (size_t)count, cudaMemcpyDefault, s);
        cudaStreamSynchronize(s);
        for (int k = 0; k < count; k++)
            job->rank[rank].wrong |= back[k] != value(rank % 2, round, k);
    }
    ncclCommDestroy(part[0]);
    ncclCommDestroy(part[1]);
    ncclCommDestroy(all);
    cudaFree(at);
    cudaStreamDestroy(s);
    free(back);
}

static void test_move(void **state)
{
    struct random_source rng = random_open();
    for (int n = 2; n <= MOST; n += 2) {
        job->seed = (uint64_t)random_below(&rng, 1 << 30) << 20 | (uint64_t)random_below(&rng, 1 << 20);
        over_processes(n, 1 + n % 3, move, -1);
        all_well("moved");
    }
}

/* ---- hosts ---- */

static void register_memory(int rank)
{
    ncclComm_t all;
    ncclWindow_t window = NULL;
    void *at;
    job->rank[rank].res = join(rank, &all);
    if (job->rank[rank].res)
        return;
    ncclMemAlloc(&at, 1 << 16);
    job->rank[rank].res = ncclCommWindowRegister(all, at, 1 << 16, &window, NCCL_WIN_COLL_SYMMETRIC);
    job->rank[rank].has_window = window;
    if (window)
        ncclCommWindowDeregister(all, window);
    ncclMemFree(at);
    ncclCommDestroy(all);
}

static void test_hosts(void **state)
{
    for (int n_hosts = 1; n_hosts <= 2; n_hosts++) {
        over_processes(4, n_hosts, register_memory, -1);
        all_well("registered");
        for (int r = 0; r < 4; r++)
            assert_int_equal(job->rank[r].has_window, n_hosts == 1);
    }
    /* Device 0 of each process is its own GPU only if the process is its own host. */
    job->one_device = true;
    over_processes(3, 3, register_memory, -1);
    all_well("hosts of one GPU");
    over_processes(3, 1, register_memory, -1);
    for (int r = 0; r < 3; r++)
        assert_int_equal(job->rank[r].res, ncclInvalidUsage);
    job->one_device = false;
}

/* ---- the order of communicators ---- */

static void in_another_order(int rank)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t all, part[2];
    cudaStream_t s[2];
    char *at;
    config.blocking = 1;
    join(rank, &all);
    for (int i = 0; i < 2; i++)
        ncclCommSplit(all, 0, rank, &part[i], &config);
    cudaStreamCreate(&s[0]);
    cudaStreamCreate(&s[1]);
    cudaMalloc((void **)&at, 256);
    for (int i = 0; i < 2; i++) /* connects */
        ncclAllGather(at + 128 * i + 4 * rank, at + 128 * i, 1, ncclFloat32, part[i], s[i]);
    for (int k = 0; k < 2; k++) {
        int i = rank ? 1 - k : k;
        ncclAllGather(at + 128 * i + 4 * rank, at + 128 * i, 1, ncclFloat32, part[i], s[i]);
    }
    for (int i = 0; i < 2; i++) {
        cudaStreamSynchronize(s[i]);
        cudaStreamDestroy(s[i]);
    }
    for (int i = 0; i < 2; i++)
        ncclCommDestroy(part[i]);
    ncclCommDestroy(all);
    cudaFree(at);
}

static void test_order(void **state)
{
    over_processes(2, 2, in_another_order, -1);
    assert_int_equal(job->rank[0].n_misuses + job->rank[1].n_misuses, 2); /* reported by the second one */
}

/* ---- deaths ---- */

/* Kills this process when it waits for the others in ncclCommInitRankConfig. */
static void *dies_waiting(void *arg)
{
    struct nccl_stand_in_counts c = {0};
    while (c.n_made == 0)
        nccl_stand_in_counts(&c);
    kill(getpid(), SIGKILL);
    return NULL;
}

/* Rank 1 comes and dies before rank 3 has come. */
static void dies_in_init(int rank)
{
    ncclComm_t all;
    pthread_t id;
    take_id(rank);
    if (rank == 1)
        pthread_create(&id, NULL, dies_waiting, NULL);
    for (int r = 0; r < 3 && rank == 3; r += 2)
        await_stage(r, 2);
    job->rank[rank].res = rank == 3 ? 0 : join(rank, &all);
    atomic_store(&job->rank[rank].stage, 2);
}

static void test_dies_in_init(void **state)
{
    over_processes(4, 1, dies_in_init, 1);
    assert_int_equal(job->rank[0].res, ncclRemoteError);
    assert_int_equal(job->rank[2].res, ncclRemoteError);
}

/* Rank 1 does not come to a gather. Tests whether NCCL reports it, and that an abort ends the gather. */
static void dies_before_gather(int rank)
{
    ncclComm_t all;
    cudaStream_t s;
    char *at;
    ncclResult_t reported = ncclSuccess;
    join(rank, &all);
    cudaStreamCreate(&s);
    cudaMalloc((void **)&at, 256);
    ncclAllGather(at + 4 * rank, at, 1, ncclFloat32, all, s);
    cudaStreamSynchronize(s);
    atomic_store(&job->rank[rank].stage, 2);
    for (int r = 0; r < job->n_ranks; r++)
        await_stage(r, 2);
    if (rank == 1)
        raise(SIGKILL);
    ncclAllGather(at + 4 * rank, at, 1, ncclFloat32, all, s);
    for (int i = 0; i < (job->n_hosts > 1 ? HANG_S * 100 : 50) && !reported; i++) {
        ncclCommGetAsyncError(all, &reported);
        sleep_ms(10);
    }
    job->rank[rank].res = reported;
    ncclCommAbort(all);
    cudaStreamSynchronize(s);
    cudaStreamDestroy(s);
    cudaFree(at);
}

static void test_dies_before_gather(void **state)
{
    over_processes(3, 3, dies_before_gather, 1);
    assert_int_equal(job->rank[0].res, ncclRemoteError);
    assert_int_equal(job->rank[2].res, ncclRemoteError);
    over_processes(3, 1, dies_before_gather, 1);
    assert_int_equal(job->rank[0].res, ncclSuccess);
    assert_int_equal(job->rank[2].res, ncclSuccess);
    for (int r = 0; r < 3; r += 2)
        assert_int_equal(job->rank[r].n_misuses, 0);
}

static void *destroys(void *arg)
{
    ncclCommDestroy(arg);
    return NULL;
}

/* With a dead rank this does not return, and reports that. */
static void destroys_after_death(int rank)
{
    ncclComm_t all;
    pthread_t id;
    join(rank, &all);
    atomic_store(&job->rank[rank].stage, 2);
    for (int r = 0; r < job->n_ranks; r++)
        await_stage(r, 2);
    if (rank == 1)
        raise(SIGKILL);
    await_stage(1, ENDED);
    pthread_create(&id, NULL, destroys, all);
    for (bool inside = false; !inside; sleep_ms(1)) {
        nsi_lock();
        inside = nsi.hung;
        nsi_unlock();
    }
    nccl_stand_in_end();
    pthread_join(id, NULL);
}

static void test_destroys_after_death(void **state)
{
    over_processes(2, 1, destroys_after_death, 1);
    assert_int_equal(job->rank[0].n_misuses, 1);
}

int main(void)
{
    setenv("NCCL_STAND_IN_CONNECT", "1", 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_move),
        cmocka_unit_test(test_hosts),
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_dies_in_init),
        cmocka_unit_test(test_dies_before_gather),
        cmocka_unit_test(test_destroys_after_death),
    };
    job = mmap(NULL, sizeof *job, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return job == MAP_FAILED ? 1 : cmocka_run_group_tests(tests, NULL, NULL);
}
