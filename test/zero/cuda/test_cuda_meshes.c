/* SPDX-License-Identifier: Apache-2.0 */
/* test_cuda_meshes.c: tensor parallelism and pipelines on GPU stand-ins over NCCL's. With deterministic on, a
 * mesh has the bits of the host. With it off, all ranks of an axis have the same bits, and NCCL combines
 * whole arrays.
 *
 * Some meshes run on threads. Others run on processes, which pose as one host or several: a sample that is
 * drawn from SEED (printed; by default the time). N_MESHES is their number; with N_MESHES=all all of them
 * run, which takes some minutes. */
#include "kernels/state_codes.h"
#include "test/cmocka.h"
#include "test/stand_in/nccl_stand_in.h"
#include "test/stand_in/stand_in.h"
#include "test/zero/cuda/mesh_net.h"
#include "test/zero/where.h"

#include <cuda_runtime_api.h>

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

/* ---- arrays ---- */

enum combines { SUM, SCATTER, GATHER, N_COMBINES };

/* One call: elements of the smaller array, and whether that lies in the larger one. */
struct combined {
    enum combines op;
    int64_t n;
    bool in_place, bf16;
};

static size_t size_of(const struct combined *c)
{
    return c->bf16 ? 2 : 4;
}

/* Small whole numbers, whose sums are exact in bf16, too. */
static float value_of(int rank, int64_t i)
{
    return (float)((i * 7 + rank * 5) % 16);
}

static float sum_of(int ranks, int64_t i)
{
    float sum = 0;
    for (int p = 0; p < ranks; p++)
        sum += value_of(p, i);
    return sum;
}

static void put(const struct combined *c, char *at, int64_t i, float value)
{
    const uint32_t bits = zr_float_bits(value);
    const uint16_t high = (uint16_t)(bits >> 16);
    memcpy(at + i * (int64_t)size_of(c), c->bf16 ? (const void *)&high : (const void *)&bits, size_of(c));
}

/* Memory before and after the call: one element, the larger array, the smaller one, and one element. So
 * addresses are multiples of an element's size only. */
struct image {
    int64_t src, dst, n_src, n_dst, n;
    char *before, *after;
};

static void draw_image(const struct combined *c, int rank, int tp, struct image *m)
{
    const int64_t n = c->n, whole = c->op == SUM ? n : n * tp, part_of_whole = c->op == SUM ? 0 : n * rank,
                  small = c->in_place ? 1 + part_of_whole : 1 + whole;
    *m = (struct image){.src = c->op == GATHER ? small : 1,
                        .dst = c->op == GATHER ? 1 : small,
                        .n_src = c->op == SCATTER ? whole : n,
                        .n_dst = c->op == GATHER ? whole : n,
                        .n = whole + n + 2};
    m->before = malloc((size_t)m->n * size_of(c));
    m->after = malloc((size_t)m->n * size_of(c));
    for (int64_t i = 0; i < m->n; i++)
        put(c, m->before, i, 99);
    for (int64_t i = 0; i < m->n_src; i++)
        put(c, m->before, m->src + i, value_of(rank, i));
    memcpy(m->after, m->before, (size_t)m->n * size_of(c));
    for (int64_t i = 0; i < m->n_dst; i++)
        put(c, m->after, m->dst + i,
            c->op == GATHER ? value_of((int)(i / n), i % n)
                            : sum_of(tp, c->op == SCATTER ? n * rank + i : i));
}

static int call(zero_ctx *z, const struct combined *c, void *dst, const void *src)
{
    const enum zero_dtype dtype = c->bf16 ? ZERO_BF16 : ZERO_F32;
    return c->op == SUM       ? zero_all_reduce(z, ZERO_AXIS_TP, dst, src, c->n, dtype, ZERO_SUM)
           : c->op == SCATTER ? zero_reduce_scatter(z, ZERO_AXIS_TP, dst, src, c->n, dtype)
                              : zero_all_gather(z, ZERO_AXIS_TP, dst, src, c->n, dtype);
}

static int64_t tp_bytes(zero_ctx *z)
{
    struct zero_stats stats;
    return zero_get_stats(z, &stats) ? -1 : stats.tp_bytes;
}

/* Whether the call is one of NCCL's on each rank: any call without deterministic; with it, gathers, and sums
 * of up to 512 KiB. */
static bool is_one_call(const struct combined *c, bool deterministic)
{
    return !deterministic || c->op == GATHER || (c->op == SUM && c->n * (int64_t)size_of(c) <= 512 << 10);
}

/* Bytes that a rank receives in one call. Small deterministic sums gather. */
static int64_t bytes_received(const struct combined *c, bool deterministic, int rank, int tp)
{
    const int64_t own = c->n * (rank + 1) / tp - c->n * rank / tp;
    bool sums = c->op == SUM && !deterministic;
    return (int64_t)size_of(c) * (sums ? own * (tp - 1) + c->n - own : c->n * (tp - 1));
}

static int combine(struct toy_rank *r, zero_ctx *z, const struct zero_config *cfg, const struct combined *c)
{
    struct image m;
    void *at;
    draw_image(c, r->rank, cfg->mesh.tp, &m);
    const size_t size = size_of(c), bytes = (size_t)m.n * size;
    if (cudaMalloc(&at, bytes) || cudaMemcpy(at, m.before, bytes, cudaMemcpyHostToDevice))
        return ZERO_ERR_SYSTEM;
    int64_t received = -tp_bytes(z);
    int err = call(z, c, (char *)at + m.dst * (int64_t)size, (char *)at + m.src * (int64_t)size);
    if (cudaStreamSynchronize(cfg->stream) || cudaMemcpy(m.before, at, bytes, cudaMemcpyDeviceToHost) ||
        cudaFree(at))
        return ZERO_ERR_SYSTEM;
    received += tp_bytes(z);
    if (!err && memcmp(m.before, m.after, bytes))
        toy_wrong(r, "call %d of %lld elements, in place %d, bf16 %d: wrong values. ", c->op, (long long)c->n,
                  c->in_place, c->bf16);
    if (!err && is_one_call(c, cfg->deterministic) &&
        received != bytes_received(c, cfg->deterministic, r->rank, cfg->mesh.tp))
        toy_wrong(r, "call %d of %lld elements, bf16 %d: %lld bytes received. ", c->op, (long long)c->n,
                  c->bf16, (long long)received);
    free(m.before);
    free(m.after);
    return err;
}

/* The fourth has 512 KiB in f32. The last is more than a piece of the arena. */
static const int64_t array_sizes[] = {0, 1, 1027, 131072, 262145};
enum { N_SIZES = sizeof array_sizes / sizeof *array_sizes, N_COMBINED = N_COMBINES * N_SIZES * 4 };

static struct combined combined_at(int i)
{
    return (struct combined){.op = (enum combines)(i % N_COMBINES),
                             .n = array_sizes[i / N_COMBINES % N_SIZES],
                             .in_place = i / (N_COMBINES * N_SIZES) % 2,
                             .bf16 = i / (N_COMBINES * N_SIZES) / 2};
}

static int combine_by_one_call(struct toy_rank *r, zero_ctx *z, const struct zero_config *cfg)
{
    char *odd = (char *)1;
    toy_expect(r, zero_all_reduce(z, ZERO_AXIS_TP, odd, odd, 1, ZERO_BF16, ZERO_SUM), ZERO_ERR_ARG,
               "allowed: multiples of 2, the size of an element");
    for (int i = 0; i < N_COMBINED; i++) {
        const struct combined c = combined_at(i);
        if (is_one_call(&c, cfg->deterministic))
            OR_RETURN(combine(r, z, cfg, &c));
    }
    return 0;
}

/* Large and small sums take turns in the same memory of the library. */
static int combine_all(struct toy_rank *r, zero_ctx *z, const struct zero_config *cfg)
{
    for (int i = 0; i < N_COMBINED; i++) {
        const struct combined c = combined_at(i);
        OR_RETURN(combine(r, z, cfg, &c));
    }
    return 0;
}

/* Trains, then calls more. Returns the number of NCCL's calls, over all ranks. */
static int64_t calls_with(struct net_run n,
                          int (*more)(struct toy_rank *, zero_ctx *, const struct zero_config *))
{
    struct nccl_stand_in_counts counts;
    char what[160];
    const char *text;
    n.more = more;
    toy_run(world_of(&n), net_rank, &n, shared->r, net_text(&n, what));
    nccl_stand_in_counts(&counts);
    nccl_stand_in_end();
    if (stand_in_end(&text))
        fail_msg("%s: %s", what, text);
    return counts.n_calls;
}

static void test_arrays(void **state)
{
    for (int i = 0; i < 4; i++) {
        struct net_run n = {.pp = 1, .dp = 1, .tp = 2 + i % 2, .gpu = true, .deterministic = i / 2};
        int64_t want = 0, base = calls_with(n, NULL), calls = calls_with(n, combine_by_one_call) - base;
        for (int k = 0; k < N_COMBINED; k++) {
            const struct combined c = combined_at(k);
            want += c.n && is_one_call(&c, n.deterministic) ? n.tp : 0;
        }
        if (calls != want)
            fail_msg("tp %d, deterministic %d: %lld calls of NCCL instead of %lld", n.tp, n.deterministic,
                     (long long)calls, (long long)want);
        n.check = n.tp == 2;
        if (n.deterministic || n.check)
            calls_with(n, combine_all);
    }
}

static void short_timeout(struct zero_config *cfg)
{
    cfg->launch.timeout_ms = 3000;
}

/* Rank 1 sums one element more. */
static int sum_more(struct toy_rank *r, zero_ctx *z, const struct zero_config *cfg)
{
    const int64_t n = 600000 + r->rank;
    double none = 0;
    void *at;
    if (cudaMalloc(&at, (size_t)n * sizeof(float)))
        return ZERO_ERR_SYSTEM;
    int err = zero_all_reduce(z, ZERO_AXIS_TP, at, at, n, ZERO_F32, ZERO_SUM);
    toy_expect(r, err ? err : zero_mean(z, &none, 1), ZERO_ERR_MISMATCH,
               "called zero_all_reduce(sum) in step 4 with other arguments");
    cudaFree(at);
    return 0;
}

static void test_other_sizes(void **state)
{
    for (int deterministic = 0; deterministic < 2; deterministic++) {
        struct net_run n = {.pp = 1,
                            .dp = 1,
                            .tp = 2,
                            .gpu = true,
                            .deterministic = deterministic,
                            .change = short_timeout,
                            .more = sum_more};
        toy_ranks(2, net_rank, &n, shared->r);
        nccl_stand_in_end();
        stand_in_end(NULL); /* the collectives differ on purpose */
        for (int i = 0; i < 2; i++)
            if (shared->r[i].wrong[0])
                fail_msg("deterministic %d, rank %d: %s", deterministic, i, shared->r[i].wrong);
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
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_pp),          cmocka_unit_test(test_tp),
                                       cmocka_unit_test(test_checked),     cmocka_unit_test(test_arrays),
                                       cmocka_unit_test(test_other_sizes), cmocka_unit_test(test_processes)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
