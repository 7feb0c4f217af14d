/* SPDX-License-Identifier: Apache-2.0 */
/* test_nccl_stand_in.c: tests that the stand-in's ncclCommSplit makes NCCL's communicators: colours apart,
 * keys in order. Also tests which orders of communicators are reported. */
#include "test/cmocka.h"
#include "test/kernels/random.h"
#include "test/stand_in/nccl_stand_in_inside.h"
#include "test/stand_in/stand_in.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { RANKS = 8, ROUNDS = 12 };

/* What each rank asks for in each round, and what it got; -1: no communicator. */
static int colors[ROUNDS][RANKS], keys[ROUNDS][RANKS];
static struct found {
    int n, place, gathered[RANKS];
} found[ROUNDS][RANKS];
static ncclUniqueId id;

/* Returns who has which place in a colour's communicator, by the description of keys in nccl.h. */
static int expected_members(int round, int color, int members[RANKS])
{
    int n = 0;
    for (int r = 0; r < RANKS; r++)
        if (colors[round][r] == color)
            members[n++] = r;
    for (int i = 1; i < n; i++) /* keeps the order of ranks with equal keys */
        for (int k = i; k > 0 && keys[round][members[k - 1]] > keys[round][members[k]]; k--) {
            int m = members[k];
            members[k] = members[k - 1], members[k - 1] = m;
        }
    return n;
}

static void gather_ranks(ncclComm_t comm, int rank, struct found *f)
{
    cudaStream_t s;
    char *at;
    assert_int_equal(cudaStreamCreate(&s), 0);
    assert_int_equal(cudaMalloc((void **)&at, sizeof f->gathered), 0);
    assert_int_equal(ncclCommCount(comm, &f->n), 0);
    assert_int_equal(ncclCommUserRank(comm, &f->place), 0);
    assert_int_equal(
        cudaMemcpyAsync(at + f->place * (int)sizeof rank, &rank, sizeof rank, cudaMemcpyDefault, s), 0);
    assert_int_equal(ncclAllGather(at + f->place * (int)sizeof rank, at, 1, ncclFloat32, comm, s), 0);
    assert_int_equal(cudaMemcpyAsync(f->gathered, at, (size_t)f->n * sizeof rank, cudaMemcpyDefault, s), 0);
    assert_int_equal(cudaStreamSynchronize(s), 0);
    assert_int_equal(cudaStreamDestroy(s), 0);
    assert_int_equal(cudaFree(at), 0);
}

static void *run_rank(void *arg)
{
    int rank = (int)(intptr_t)arg;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t all, part;
    config.blocking = 1;
    assert_int_equal(cudaSetDevice(rank), 0);
    assert_int_equal(ncclCommInitRankConfig(&all, RANKS, id, rank, &config), 0);
    for (int i = 0; i < ROUNDS; i++) {
        struct found *f = &found[i][rank];
        part = all;
        assert_int_equal(ncclCommSplit(all, colors[i][rank], keys[i][rank], &part, &config), 0);
        *f = (struct found){.place = -1};
        if (part)
            gather_ranks(part, rank, f);
        if (part)
            assert_int_equal(ncclCommDestroy(part), 0);
    }
    assert_int_equal(ncclCommDestroy(all), 0);
    return NULL;
}

static void run_ranks(void *(*fn)(void *arg), int n)
{
    pthread_t threads[RANKS];
    assert_int_equal(ncclGetUniqueId(&id), 0);
    for (int r = 0; r < n; r++)
        assert_int_equal(pthread_create(&threads[r], NULL, fn, (void *)(intptr_t)r), 0);
    for (int r = 0; r < n; r++)
        pthread_join(threads[r], NULL);
}

static void test_split(void **state)
{
    struct random_source rng = random_open();
    for (int i = 0; i < ROUNDS; i++)
        for (int r = 0; r < RANKS; r++) {
            colors[i][r] = (int)random_below(&rng, 1 + i % 4) - (i % 3 == 2); /* some are NOCOLOR */
            keys[i][r] = (int)random_below(&rng, 5) - 2;
        }
    run_ranks(run_rank, RANKS);
    for (int i = 0; i < ROUNDS; i++)
        for (int r = 0; r < RANKS; r++) {
            const struct found *f = &found[i][r];
            int members[RANKS], n = expected_members(i, colors[i][r], members);
            if (colors[i][r] == NCCL_SPLIT_NOCOLOR) {
                assert_int_equal(f->place, -1);
                continue;
            }
            assert_int_equal(f->n, n);
            assert_int_equal(members[f->place], r);
            assert_memory_equal(f->gathered, members, (size_t)n * sizeof *members);
        }
}

static void test_refused(void **state)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t all, part;
    config.blocking = 1;
    assert_int_equal(ncclGetUniqueId(&id), 0);
    assert_int_equal(ncclCommInitRankConfig(&all, 1, id, 0, &config), 0);
    assert_int_equal(ncclCommSplit(all, -2, 0, &part, &config), ncclInvalidArgument);
    assert_int_equal(ncclCommDestroy(all), 0);
}

/* Two communicators of the same two ranks, which one of them uses in another order if wrong_order. Ranks may
 * have other communicators, too: the third rank shares one with the second. */
static int wrong_order;

static void *run_order(void *arg)
{
    int rank = (int)(intptr_t)arg;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t all, part[3];
    struct found ignored;
    config.blocking = 1;
    assert_int_equal(cudaSetDevice(rank), 0);
    assert_int_equal(ncclCommInitRankConfig(&all, 3, id, rank, &config), 0);
    for (int i = 0; i < 2; i++)
        assert_int_equal(ncclCommSplit(all, rank < 2 ? 0 : 1, rank, &part[i], &config), 0);
    assert_int_equal(ncclCommSplit(all, rank ? 0 : 1, rank, &part[2], &config), 0);
    if (rank < 2) {
        cudaStream_t s[2];
        char *at;
        assert_int_equal(cudaStreamCreate(&s[0]) || cudaStreamCreate(&s[1]) || cudaMalloc((void **)&at, 64),
                         0);
        for (int i = 0; i < 2; i++) /* connects */
            assert_int_equal(
                ncclAllGather(at + 32 * i + 4 * rank, at + 32 * i, 1, ncclFloat32, part[i], s[i]), 0);
        for (int k = 0; k < 2; k++) {
            int i = wrong_order && rank ? 1 - k : k; /* on two streams, so nothing waits here */
            assert_int_equal(
                ncclAllGather(at + 32 * i + 4 * rank, at + 32 * i, 1, ncclFloat32, part[i], s[i]), 0);
        }
        assert_int_equal(cudaStreamSynchronize(s[0]) || cudaStreamSynchronize(s[1]), 0);
        assert_int_equal(cudaStreamDestroy(s[0]) || cudaStreamDestroy(s[1]) || cudaFree(at), 0);
    }
    if (rank)
        gather_ranks(part[2], rank, &ignored);
    for (int i = 0; i < 3; i++)
        assert_int_equal(ncclCommDestroy(part[i]), 0);
    assert_int_equal(ncclCommDestroy(all), 0);
    return NULL;
}

static void test_order(void **state)
{
    wrong_order = *state != NULL; /* the test that expects misuses, see main */
    run_ranks(run_order, 3);
}

/* What a rank passes to ncclCommInitRankScalable: which rank made each id, and the number of ids. */
enum { SCALABLE = 7 };
static struct {
    int n, maker[SCALABLE];
    ncclUniqueId id[SCALABLE];
    ncclResult_t res[SCALABLE];
} ids;

static void *run_scalable(void *arg)
{
    int rank = (int)(intptr_t)arg;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    struct found ignored;
    ncclComm_t all;
    config.blocking = 1;
    assert_int_equal(cudaSetDevice(rank), 0);
    ids.res[rank] = ncclCommInitRankScalable(&all, SCALABLE, rank, ids.n, ids.id, &config);
    if (ids.res[rank])
        return NULL;
    gather_ranks(all, rank, &ignored);
    assert_int_equal(ncclCommDestroy(all), 0);
    return NULL;
}

static void make_scalable(void)
{
    pthread_t threads[SCALABLE];
    for (int i = 0; i < ids.n; i++) {
        assert_int_equal(cudaSetDevice(ids.maker[i]), 0);
        assert_int_equal(ncclGetUniqueId(&ids.id[i]), 0);
    }
    for (int r = 0; r < SCALABLE; r++)
        assert_int_equal(pthread_create(&threads[r], NULL, run_scalable, (void *)(intptr_t)r), 0);
    for (int r = 0; r < SCALABLE; r++)
        pthread_join(threads[r], NULL);
}

/* The user guide's example: of 3 ids for 7 ranks the first serves ranks 0 to 2, and the others two ranks
 * each. */
static void test_scalable(void **state)
{
    ids.n = 3;
    ids.maker[0] = 0, ids.maker[1] = 3, ids.maker[2] = 5;
    make_scalable();
    for (int r = 0; r < SCALABLE; r++)
        assert_int_equal(ids.res[r], 0);
}

/* An id made by another rank, and one too many. */
static void test_scalable_refused(void **state)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t all;
    ids.n = 3;
    ids.maker[0] = 0, ids.maker[1] = 4, ids.maker[2] = 5;
    make_scalable();
    assert_int_equal(ncclCommInitRankScalable(&all, 2, 0, 3, ids.id, &config), ncclInvalidArgument);
    assert_int_equal(ncclCommInitRankScalable(&all, 2, 0, 0, ids.id, &config), ncclInvalidArgument);
}

static void *run_first(void *arg)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t all;
    assert_int_equal(cudaSetDevice(0), 0);
    ids.res[0] = ncclCommInitRankScalable(&all, 3, 0, 3, ids.id, &config);
    return NULL;
}

/* The same ids in another order. The rank that has them gets the error; the others wait. */
static void test_scalable_differs(void **state)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t all;
    pthread_t first;
    for (int i = 0; i < 3; i++)
        assert_int_equal(ncclGetUniqueId(&ids.id[i]), 0);
    assert_int_equal(pthread_create(&first, NULL, run_first, NULL), 0);
    struct nccl_stand_in_counts c = {0};
    while (c.n_scalable == 0)
        nccl_stand_in_counts(&c);
    ncclUniqueId other[3] = {ids.id[0], ids.id[2], ids.id[1]};
    assert_int_equal(cudaSetDevice(1), 0);
    assert_int_equal(ncclCommInitRankScalable(&all, 3, 1, 3, other, &config), ncclInvalidArgument);
    nccl_stand_in_end();
    pthread_join(first, NULL);
    assert_int_equal(ids.res[0], ncclSystemError);
}

/* Rank r has NaN in element r, and all have it in the last element. */
static void *run_max(void *arg)
{
    enum { N = RANKS + 1 };
    int rank = (int)(intptr_t)arg;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t all;
    cudaStream_t s;
    float x[N], *at;
    config.blocking = 1;
    assert_int_equal(cudaSetDevice(rank), 0);
    assert_int_equal(ncclCommInitRankConfig(&all, RANKS, id, rank, &config), 0);
    assert_int_equal(cudaStreamCreate(&s) || cudaMalloc((void **)&at, sizeof x), 0);
    for (int i = 0; i < N; i++)
        x[i] = i == rank || i == RANKS ? NAN : (float)(rank * 10 + i);
    assert_int_equal(cudaMemcpy(at, x, sizeof x, cudaMemcpyDefault), 0);
    assert_int_equal(ncclAllReduce(at, at, N, ncclFloat32, ncclMax, all, s), 0);
    assert_int_equal(cudaStreamSynchronize(s) || cudaMemcpy(x, at, sizeof x, cudaMemcpyDefault), 0);
    for (int i = 0; i < RANKS; i++)
        assert_true(x[i] == (float)((i == RANKS - 1 ? RANKS - 2 : RANKS - 1) * 10 + i));
    assert_true(isnan(x[RANKS]));
    assert_int_equal(ncclCommDestroy(all), 0);
    assert_int_equal(cudaStreamDestroy(s) || cudaFree(at), 0);
    return NULL;
}

static void test_max_drops_nan(void **state)
{
    run_ranks(run_max, RANKS);
}

static void sleep_ms(int ms)
{
    usleep((useconds_t)ms * 1000);
}

/* How a rank that comes late makes the other wait. */
static struct {
    void (*call)(int rank, ncclComm_t all, ncclComm_t part[2], char *at, cudaStream_t s[2]);
    atomic_int comes, n_back;
    int late_ms;
} late;

static void *run_late(void *arg)
{
    int rank = (int)(intptr_t)arg;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t all, part[2];
    cudaStream_t s[2];
    char *at;
    config.blocking = 1;
    assert_int_equal(cudaSetDevice(rank), 0);
    assert_int_equal(ncclCommInitRankConfig(&all, 2, id, rank, &config), 0);
    for (int i = 0; i < 2; i++)
        assert_int_equal(ncclCommSplit(all, 0, rank, &part[i], &config), 0);
    assert_int_equal(cudaStreamCreate(&s[0]) || cudaStreamCreate(&s[1]) || cudaMalloc((void **)&at, 64), 0);
    late.call(rank, all, part, at, s);
    for (int i = 0; i < 2; i++)
        assert_int_equal(cudaStreamSynchronize(s[i]) || cudaStreamDestroy(s[i]), 0);
    if (late.late_ms == 0) /* otherwise call has destroyed them, or hangs */
        assert_int_equal(ncclCommDestroy(part[0]) || ncclCommDestroy(part[1]) || ncclCommDestroy(all), 0);
    assert_int_equal(cudaFree(at), 0);
    return NULL;
}

static int gather(int rank, ncclComm_t comm, char *at, cudaStream_t s)
{
    return (int)ncclAllGather(at + 4 * rank, at, 1, ncclFloat32, comm, s);
}

/* Rank 1 sets late.comes just before its call. Rank 0's call, which waits for it, must not return before. */
static void come_late(int rank, int ms)
{
    if (rank == 0)
        return;
    sleep_ms(ms);
    late.comes = 1;
}

static void first_gather(int rank, ncclComm_t all, ncclComm_t part[2], char *at, cudaStream_t s[2])
{
    come_late(rank, 50);
    assert_int_equal(gather(rank, all, at, s[0]), 0);
    assert_int_equal(late.comes, 1);
    if (rank == 1) /* once connected, a call returns without the peer's */
        while (late.n_back == 0)
            sleep_ms(1);
    assert_int_equal(gather(rank, all, at, s[0]), 0);
    late.n_back++;
}

static void first_split(int rank, ncclComm_t all, ncclComm_t part[2], char *at, cudaStream_t s[2])
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t more;
    config.blocking = 1;
    come_late(rank, 50);
    assert_int_equal(ncclCommSplit(all, 0, rank, &more, &config), 0);
    assert_int_equal(late.comes, 1);
    assert_int_equal(ncclCommDestroy(more), 0);
}

static void first_message(int rank, ncclComm_t all, ncclComm_t part[2], char *at, cudaStream_t s[2])
{
    come_late(rank, 50);
    assert_int_equal(
        rank ? ncclRecv(at, 1, ncclFloat32, 0, all, s[0]) : ncclSend(at, 1, ncclFloat32, 1, all, s[0]), 0);
    assert_int_equal(late.comes, 1);
}

static void destroy_all(ncclComm_t all, ncclComm_t part[2])
{
    assert_int_equal(ncclCommDestroy(part[0]) || ncclCommDestroy(part[1]), 0);
    assert_int_equal(ncclCommDestroy(all), 0);
}

static void late_destroy(int rank, ncclComm_t all, ncclComm_t part[2], char *at, cudaStream_t s[2])
{
    come_late(rank, late.late_ms);
    destroy_all(all, part);
    assert_int_equal(late.comes, 1);
}

static void run_late_ranks(void (*call)(int rank, ncclComm_t all, ncclComm_t part[2], char *at,
                                        cudaStream_t s[2]),
                           int late_ms)
{
    late.call = call;
    late.late_ms = late_ms;
    late.comes = late.n_back = 0;
    run_ranks(run_late, 2);
}

static void test_calls_wait(void **state)
{
    run_late_ranks(first_gather, 0);
    run_late_ranks(first_split, 0);
    run_late_ranks(first_message, 0);
    run_late_ranks(late_destroy, 50);
}

/* ncclCommDestroy without the other rank of the host. */
static void test_destroys_alone(void **state)
{
    nccl_stand_in_the_machine()->destroy_ms = 50;
    run_late_ranks(late_destroy, 300);
}

/* Two communicators that connect in another order on each rank, which wait until all ends. */
static void crossed(int rank, ncclComm_t all, ncclComm_t part[2], char *at, cudaStream_t s[2])
{
    assert_int_equal(gather(rank, part[rank], at, s[rank]), ncclSystemError);
}

/* Runs what hangs until it is reported, and then ends it. */
static void run_hung(void (*call)(int rank, ncclComm_t all, ncclComm_t part[2], char *at, cudaStream_t s[2]))
{
    pthread_t threads[2];
    bool hung = false;
    late.call = call;
    late.late_ms = 1; /* run_late does not destroy what hangs */
    assert_int_equal(ncclGetUniqueId(&id), 0);
    for (int r = 0; r < 2; r++)
        assert_int_equal(pthread_create(&threads[r], NULL, run_late, (void *)(intptr_t)r), 0);
    while (!hung) {
        nsi_lock();
        hung = nsi.hung;
        nsi_unlock();
        sleep_ms(1);
    }
    nccl_stand_in_end();
    for (int r = 0; r < 2; r++)
        pthread_join(threads[r], NULL);
}

static void test_crossed(void **state)
{
    run_hung(crossed);
}

static void connect_both(int rank, ncclComm_t part[2], char *at, cudaStream_t s[2])
{
    for (int i = 0; i < 2; i++) {
        assert_int_equal(gather(rank, part[i], at + 32 * i, s[i]), 0);
        assert_int_equal(cudaStreamSynchronize(s[i]), 0);
    }
}

static void wait_50_ms(void *arg)
{
    sleep_ms(50);
}

/* The ranks issue in one order, but on rank 1 the first stream is late. */
static void late_stream(int rank, ncclComm_t all, ncclComm_t part[2], char *at, cudaStream_t s[2])
{
    connect_both(rank, part, at, s);
    if (rank)
        assert_int_equal(cudaLaunchHostFunc(s[0], wait_50_ms, NULL), 0);
    assert_int_equal(gather(rank, part[0], at, s[0]), 0);
    if (!rank)
        sleep_ms(20); /* it starts first */
    assert_int_equal(gather(rank, part[1], at + 32, s[1]), 0);
}

/* The device holds one collective at a time, so each rank's waits for the one that the other has not
 * started. */
static void test_no_room(void **state)
{
    nccl_stand_in_the_machine()->n_ctas = 32;
    run_hung(late_stream);
}

static void test_order_of_issue(void **state)
{
    nccl_stand_in_the_machine()->n_ctas = 32;
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1);
    run_late_ranks(late_stream, 0);
    unsetenv("NCCL_LAUNCH_ORDER_IMPLICIT");
}

/* The two streams share a hardware queue, in which the second gather is behind work that waits for the first
 * one. The other rank has them the other way around. */
static void one_queue(int rank, ncclComm_t all, ncclComm_t part[2], char *at, cudaStream_t s[2])
{
    /* There are 8 queues, and a stream gets one that the fewest have: s has the first two, more[6] the
     * first. */
    cudaStream_t more[8], *two[2] = {&s[0], &more[6]};
    connect_both(rank, part, at, s);
    for (int i = 0; i < 8; i++)
        assert_int_equal(cudaStreamCreateWithFlags(&more[i], cudaStreamNonBlocking), 0);
    for (int k = 0; k < 2; k++) {
        int i = rank ? 1 - k : k;
        assert_int_equal(gather(rank, part[i], at + 32 * i, *two[i]), 0);
        sleep_ms(20);
        assert_int_equal(cudaMemsetAsync(at + 32 * i + 16, 0, 4, *two[i]), 0);
    }
    for (int i = 0; i < 8; i++)
        assert_int_equal(cudaStreamSynchronize(more[i]) || cudaStreamDestroy(more[i]), 0);
}

static void test_one_queue(void **state)
{
    run_hung(one_queue);
}

static int message(bool sends, int rank, ncclComm_t all, char *at, cudaStream_t s)
{
    return sends ? (int)ncclSend(at, 1, ncclFloat32, 1 - rank, all, s)
                 : (int)ncclRecv(at + 4, 1, ncclFloat32, 1 - rank, all, s);
}

/* Both ranks connect in one group, and then send before they receive. */
static void both_send(int rank, ncclComm_t all, ncclComm_t part[2], char *at, cudaStream_t s[2])
{
    assert_int_equal(ncclGroupStart(), 0);
    assert_int_equal(message(true, rank, all, at, s[0]) || message(false, rank, all, at, s[0]), 0);
    assert_int_equal(ncclGroupEnd(), 0);
    assert_int_equal(message(true, rank, all, at, s[0]) || message(false, rank, all, at, s[0]), 0);
}

/* Short messages leave at once. Long ones wait for each other. */
static void test_both_send(void **state)
{
    run_late_ranks(both_send, 0);
    nccl_stand_in_the_machine()->sends_wait = true;
    run_hung(both_send);
}

/* Messages of one group between two ranks meet in the order of the calls, however sends and receives mix. */
static void several_messages(int rank, ncclComm_t all, ncclComm_t part[2], char *at, cudaStream_t s[2])
{
    enum { N = 3 };
    static const int order[2][2 * N] = {{0, 1, 2, -1, -2, -3}, {-1, 0, -2, 1, 2, -3}};
    int32_t sent[N], got[N];
    for (int i = 0; i < N; i++)
        sent[i] = 100 * (rank + 1) + i;
    assert_int_equal(cudaMemcpyAsync(at, sent, sizeof sent, cudaMemcpyDefault, s[0]), 0);
    assert_int_equal(ncclGroupStart(), 0);
    for (int k = 0; k < 2 * N; k++) {
        const int i = order[rank][k];
        int err = i >= 0 ? (int)ncclSend(at + 4 * i, 4, ncclInt8, 1 - rank, all, s[0])
                         : (int)ncclRecv(at + 32 + 4 * (-1 - i), 4, ncclInt8, 1 - rank, all, s[0]);
        assert_int_equal(err, 0);
    }
    assert_int_equal(ncclGroupEnd(), 0);
    assert_int_equal(cudaMemcpyAsync(got, at + 32, sizeof got, cudaMemcpyDefault, s[0]), 0);
    assert_int_equal(cudaStreamSynchronize(s[0]), 0);
    for (int i = 0; i < N; i++)
        assert_int_equal(got[i], 100 * (2 - rank) + i);
}

static void test_several_messages(void **state)
{
    for (int waits = 0; waits < 2; waits++) {
        nccl_stand_in_the_machine()->sends_wait = waits;
        run_late_ranks(several_messages, 0);
    }
}

static int start(void **state)
{
    stand_in_the_machine()->n_devices = RANKS;
    return 0;
}

/* *state: the expected misuses: their number, and a part of the text. */
struct misuses {
    int n;
    const char *says;
};

static int finish(void **state)
{
    const char *text;
    struct misuses none = {0, ""}, *expected = *state ? *state : &none;
    nccl_stand_in_end();
    int n = stand_in_end(&text);
    if (n == expected->n && strstr(text, expected->says))
        return 0;
    print_error("%d misuses, expected are %d with \"%s\":\n%s\n", n, expected->n, expected->says, text);
    return 1;
}

int main(void)
{
    /* A hang has a line of its own, and one for each of both ranks' two operations: 5. */
    static struct misuses one = {1, ""}, two = {2, "communicators are used in another order"},
                          three = {3, ""}, alone = {1, "rank 0 has waited"},
                          room = {5, "has not started: it needs 32 CTAs, and 32 of 32 are taken"},
                          queue = {5, "has not started, behind ncclAllGather 1 of"},
                          sends = {5, "has not started, behind ncclSend 1 of"},
                          ring = {1, "rank 0 waits in its first operation on [color 0 of split 1 of"};
    setenv("NCCL_STAND_IN_CONNECT", "1", 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_split, start, finish),
        cmocka_unit_test_prestate_setup_teardown(test_refused, start, finish, &one),
        cmocka_unit_test_setup_teardown(test_order, start, finish),
        cmocka_unit_test_setup_teardown(test_max_drops_nan, start, finish),
        cmocka_unit_test_setup_teardown(test_calls_wait, start, finish),
        cmocka_unit_test_prestate_setup_teardown(test_destroys_alone, start, finish, &alone),
        cmocka_unit_test_prestate_setup_teardown(test_crossed, start, finish, &ring),
        cmocka_unit_test_prestate_setup_teardown(test_no_room, start, finish, &room),
        cmocka_unit_test_setup_teardown(test_order_of_issue, start, finish),
        cmocka_unit_test_prestate_setup_teardown(test_one_queue, start, finish, &queue),
        cmocka_unit_test_prestate_setup_teardown(test_both_send, start, finish, &sends),
        cmocka_unit_test_setup_teardown(test_several_messages, start, finish),
        cmocka_unit_test_setup_teardown(test_scalable, start, finish),
        cmocka_unit_test_prestate_setup_teardown(test_scalable_refused, start, finish, &three),
        cmocka_unit_test_prestate_setup_teardown(test_scalable_differs, start, finish, &one),
        cmocka_unit_test_prestate_setup_teardown(test_order, start, finish, &two),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
