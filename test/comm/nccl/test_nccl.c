/* SPDX-License-Identifier: Apache-2.0 */
/* test_nccl.c: tests NCCL communicators over the stand-ins for CUDA and NCCL. It runs the suite of
 * comm_suite.h on every path, failures while opening, and the program's communicators. */
#include "comm/meet/user_comm.h"
#include "kernels/thread.h"
#include "test/cmocka.h"
#include "test/comm/comm_suite.h"
#include "test/comm/nccl/nccl_custom.h"
#include "test/stand_in/nccl_stand_in.h"
#include "test/stand_in/stand_in.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define HEADER_HAS_WINDOWS (NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0))

/* --- the suite --- */

static void test_conform(void **state)
{
    static const int worlds[] = {1, 2, 3, 4, 5, 8};
    struct comm_plan p = {.kind = &fixture_nccl, .seed = fresh_seed("nccl"), .n_ops = 40};
    for (size_t i = 0; i < 2 * sizeof worlds / sizeof *worlds; i++) {
        p.kind = i % 2 ? &fixture_nccl_fixed : &fixture_nccl;
        run_ranks(false, worlds[i / 2], comm_suite_conform, &p, NULL);
    }
}

static void test_arrays(void **state)
{
    static const int worlds[] = {1, 2, 3, 5, 8};
    struct comm_plan p = {.seed = fresh_seed("nccl, arrays"), .n_ops = 40};
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++) {
        p.kind = i % 2 ? &fixture_nccl_fixed : &fixture_nccl;
        run_ranks(false, worlds[i], comm_suite_arrays, &p, NULL);
    }
}

/* A world of one rank calls NCCL for memory only. */
static void test_alone(void **state)
{
    struct comm_plan p = {.seed = fresh_seed("nccl alone"), .n_ops = 40};
    for (int fixed = 0; fixed < 2; fixed++) {
        struct nccl_stand_in_counts c;
        p.kind = fixed ? &fixture_nccl_fixed : &fixture_nccl;
        run_ranks(false, 1, comm_suite_conform, &p, NULL);
        run_ranks(false, 1, comm_suite_arrays, &p, NULL);
        nccl_stand_in_counts(&c);
        assert_int_equal(c.n_made + c.n_split + c.n_calls + c.n_groups, 0);
    }
}

/* Two groups at once, each with some ranks in any order. Each moves its own bytes only. */
static void test_groups(void **state)
{
    struct fixture_groups g = {3, {2, 0, 1, 4, 3}};
    struct comm_plan p = {.seed = fresh_seed("nccl, groups"), .n_ops = 40, .groups = &g};
    for (int world = 5; world <= 8; world++) {
        p.kind = world % 2 ? &fixture_nccl_fixed : &fixture_nccl;
        run_ranks(false, world, comm_suite_conform, &p, NULL);
        p.kind = world % 2 ? &fixture_nccl : &fixture_nccl_fixed;
        run_ranks(false, world, comm_suite_mixed, &p, NULL);
        run_ranks(false, world, comm_suite_shared, &p, NULL);
        comm_suite_deal(&g, p.seed + (uint64_t)world, world + 1);
    }
}

static void test_mixed(void **state)
{
    struct comm_plan p = {.kind = &fixture_nccl, .seed = fresh_seed("nccl, mixed")};
    run_ranks(false, 3, comm_suite_mixed, &p, NULL);
    run_ranks(false, 4, comm_suite_mixed, &p, NULL);
    p.kind = &fixture_nccl_fixed;
    run_ranks(false, 2, comm_suite_mixed, &p, NULL);
    run_ranks(false, 5, comm_suite_mixed, &p, NULL);
}

/* A rank alone: its communicator, a stream, and memory for its collectives. */
struct lone {
    ncclComm_t comm;
    cudaStream_t stream;
    char *at;
};

static void lone_open(struct lone *l, size_t n_bytes)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId id;
    assert_int_equal(ncclGetUniqueId(&id), 0);
    assert_int_equal(ncclCommInitRankConfig(&l->comm, 1, id, 0, &config), 0);
    assert_int_equal(cudaStreamCreate(&l->stream) || cudaMalloc((void **)&l->at, n_bytes), 0);
}

static void lone_close(struct lone *l)
{
    cudaStreamSynchronize(l->stream);
    cudaStreamDestroy(l->stream);
    cudaFree(l->at);
    ncclCommDestroy(l->comm);
}

/* The stand-in tells buffers that overlap from buffers that are in place. */
static void test_buffers_overlap(void **state)
{
    struct lone lone;
    lone_open(&lone, 128);
    for (int apart = 0; apart <= 64; apart += 16) {
        char *to = lone.at + apart;
        assert_int_equal(ncclAllGather(lone.at, to, 64, ncclInt8, lone.comm, lone.stream), 0);
        assert_int_equal(ncclReduceScatter(lone.at, to, 16, ncclFloat32, ncclSum, lone.comm, lone.stream), 0);
        assert_int_equal(ncclReduce(lone.at, to, 16, ncclFloat32, ncclSum, 0, lone.comm, lone.stream), 0);
        assert_int_equal(ncclBroadcast(lone.at, to, 64, ncclInt8, 0, lone.comm, lone.stream), 0);
    }
    lone_close(&lone);
    expected_misuse = 3 * 4;
}

/* The stand-in reports a group of calls in which one writes what another reads or writes. */
static void test_group_apart(void **state)
{
    struct lone lone;
    lone_open(&lone, 1024);
    for (int apart = 0; apart <= 256; apart += 64) {
        char *a = lone.at, *b = a + apart;
        assert_int_equal(ncclGroupStart(), 0);
        assert_int_equal(ncclAllGather(a, a + 512, 128, ncclInt8, lone.comm, lone.stream), 0);
        assert_int_equal(ncclAllGather(b + 256, b, 64, ncclInt8, lone.comm, lone.stream), 0);
        assert_int_equal(ncclGroupEnd(), 0);
    }
    lone_close(&lone);
    /* b is written where a is read at 0 and 64; b is read at 512 where a + 512 is written, at 256. */
    expected_misuse = 3;
}

#if HEADER_HAS_WINDOWS
/* The stand-in refuses a window over memory that already has one in the same communicator. */
static void test_window_twice(void **state)
{
    struct lone lone;
    ncclWindow_t window[3];
    char *at;
    lone_open(&lone, 128);
    assert_int_equal(ncclMemAlloc((void **)&at, 16384), 0);
    for (int i = 0; i < 3; i++) /* the second half of the memory, all of it, the first half */
        assert_int_equal(ncclCommWindowRegister(lone.comm, at + (i ? 0 : 8192), i == 1 ? 16384 : 8192,
                                                &window[i], NCCL_WIN_COLL_SYMMETRIC),
                         0);
    for (int i = 0; i < 3; i++)
        assert_int_equal(ncclCommWindowDeregister(lone.comm, window[i]), 0);
    ncclMemFree(at);
    lone_close(&lone);
    expected_misuse = 2;
}
#endif

/* --- choice of the path --- */

static void note_path(struct rank *me)
{
    struct fixture o;
    struct zr_tag tag = {.unit = 1};
    struct zr_gather_seg g = {.in_place = true, .cut = {128, 128 * me->w.world}};
    int err = fixture_open(&o, &me->w, &fixture_custom, 2, LONG_MS, ARENA_BYTES);
    note_error(me, err);
    for (int k = 0; k < 2 && !err; k++) {
        size_t n = strlen(me->note);
        snprintf(me->note + n, sizeof me->note - n, "%s; ", zr_nccl_path(o.comm[k]));
    }
    if (!err)
        RANK_CHECK(me, zr_comm_all_gather(o.comm[0], o.stream[0], &g, 1, &tag) == 0, "%s", zr_error_text());
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

/* A gather communicator's first operations are two gathers on each of the two ranks. A reduce communicator
 * that sums by NCCL has two sums, and a gather and a maximum of the comparison. */
enum { FIRST_GATHERS = 4, FIRST_SUMS = 8 };

static void try_path(const char *text, int64_t n_symmetric, int64_t n_copy_engine)
{
    struct nccl_stand_in_counts before, after;
    nccl_stand_in_counts(&before);
    struct rank *r = run_ranks(false, 2, note_path, NULL, NULL);
    nccl_stand_in_counts(&after);
    for (int i = 0; i < 2; i++)
        expect_rank(&r[i], 0, text);
    /* the options that NCCL was given equal those that are reported */
    assert_int_equal(after.n_symmetric - before.n_symmetric, n_symmetric);
    assert_int_equal(after.n_copy_engine - before.n_copy_engine, n_copy_engine);
    assert_int_equal(after.n_comms, 0);
    assert_int_equal(after.n_registered, 0);
}

static void test_paths(void **state)
{
    struct nccl_stand_in_machine *m = nccl_stand_in_the_machine();
    customize(false, LONG_MS);
    try_path("NCCL 2.28.9, plain: copy_engine is off; NCCL 2.28.9, plain: copy_engine is off; ", 0, 0);
    m->version = NCCL_SOUND; /* here too the default is off */
    try_path("NCCL 2.31.2, plain: copy_engine is off; NCCL 2.31.2, plain: copy_engine is off; ", 0, 0);
    if (HEADER_HAS_WINDOWS) {
        custom.copy_engine = true;
        try_path("NCCL 2.31.2, symmetric windows, copy engine; NCCL 2.31.2, symmetric windows; ",
                 FIRST_GATHERS + FIRST_SUMS + 2, FIRST_GATHERS + 2);
        custom.deterministic = true;
        try_path("copy engine; NCCL 2.31.2, plain, sums in the fixed tree; ", FIRST_GATHERS + 2,
                 FIRST_GATHERS + 2);
        custom.deterministic = false;
        m->windows = false;
        try_path("NCCL 2.31.2, plain: no symmetric windows on this machine; ", 0, 0);
        custom.copy_engine = false;
    }
    m->version = 21805; /* this release also lacks ncclMemAlloc */
    try_path("NCCL 2.18.5, plain", 0, 0);
}

/* A feature with a known fault in this release is not used. One that may hang is used, with a warning. */
static void test_known_faults(void **state)
{
    static const struct {
        int version;
        bool used;
        const char *path, *log;
    } cases[] = {
        {22803, false, "plain: this version's symmetric windows are faulty",
         "no symmetric windows with NCCL 2.28.3: symmetric kernels that share a group may corrupt data"},
        {22809, false, "plain: this version's symmetric windows are faulty",
         "no symmetric windows with NCCL 2.28.9: symmetric kernels may start before"},
        {22907, false, "plain: this version's symmetric windows are faulty",
         "no symmetric windows with NCCL 2.29.7: symmetric kernels may start before"},
        {23006, false, "plain: this version's symmetric windows are faulty",
         "no symmetric windows with NCCL 2.30.6: symmetric kernels may start before"},
        {23007, true, "symmetric windows, copy engine; ", "warning: copy_engine is on with NCCL 2.30.7: "},
        {NCCL_SOUND, true, "symmetric windows, copy engine; ", ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases && HEADER_HAS_WINDOWS; i++) {
        nccl_stand_in_the_machine()->version = cases[i].version;
        customize(false, LONG_MS);
        custom.copy_engine = true;
        try_path(cases[i].path, cases[i].used ? FIRST_GATHERS + FIRST_SUMS + 2 : 0,
                 cases[i].used ? FIRST_GATHERS + 2 : 0);
        bool reported = strstr(custom.log, "(NCCL issue") || strstr(custom.log, "release notes of 2.28.7");
        /* A warning is given once. */
        bool lacks = i == 0 && !strstr(custom.log, "no copy engine without symmetric windows");
        if (!strstr(custom.log, cases[i].log) || reported != (cases[i].log[0] != 0) || lacks)
            fail_msg("%d: \"%s\" lacks or has more than \"%s\"", cases[i].version, custom.log, cases[i].log);
    }
    /* The stand-in counts the operations that may hang. */
    expected_misuse = HEADER_HAS_WINDOWS ? FIRST_GATHERS + 2 : 0;
    if (!HEADER_HAS_WINDOWS)
        return;
    /* Three ranks do not hang. */
    nccl_stand_in_the_machine()->version = 23007;
    customize(false, LONG_MS);
    custom.copy_engine = true;
    struct rank *r = run_ranks(false, 3, note_path, NULL, NULL);
    expect_rank(&r[0], 0, "symmetric windows, copy engine; ");
    assert_null(strstr(custom.log, "warning"));
}

/* Every kind of operation through symmetric windows and by copy engines. */
static void test_conform_windows(void **state)
{
    struct comm_plan p = {.kind = &fixture_custom, .seed = fresh_seed("nccl, windows"), .n_ops = 30};
    nccl_stand_in_the_machine()->version = NCCL_SOUND;
    customize(false, LONG_MS);
    custom.copy_engine = HEADER_HAS_WINDOWS;
    run_ranks(false, 3, comm_suite_conform, &p, NULL);
}

/* Every kind of operation on the fallback paths of old releases. */
static void test_conform_old(void **state)
{
    struct comm_plan p = {.kind = &fixture_nccl, .seed = fresh_seed("nccl, old"), .n_ops = 30};
    nccl_stand_in_the_machine()->version = 21705;
    run_ranks(false, 3, comm_suite_conform, &p, NULL);
    p.kind = &fixture_nccl_fixed;
    run_ranks(false, 3, comm_suite_conform, &p, NULL);
}

/* One rank's memory was not allocated by NCCL: no rank registers memory. */
static void test_one_without_memory(void **state)
{
    struct comm_plan p = {.kind = &fixture_nccl, .seed = fresh_seed("nccl, memory"), .n_ops = 20};
    nccl_stand_in_fail("ncclMemAlloc", 1, 1, ncclUnhandledCudaError);
    run_ranks(false, 3, comm_suite_conform, &p, NULL);
    nccl_stand_in_the_machine()->version = NCCL_SOUND;
    customize(false, LONG_MS);
    custom.copy_engine = HEADER_HAS_WINDOWS;
    nccl_stand_in_fail("ncclMemAlloc", 1, 1, ncclUnhandledCudaError);
    try_path(HEADER_HAS_WINDOWS ? "plain: ncclMemAlloc gave no memory; NCCL 2.31.2, symmetric" : "plain",
             HEADER_HAS_WINDOWS ? FIRST_SUMS : 0, 0);
}

/* --- what travels packed --- */

enum {
    MAX_SMALL = 8,
    SMALL_BYTES = 256,
    LARGE_BYTES = 2 * NCCL_SMALL_BYTES,
    SMALL_APART = 2048,
    LARGE_AT = 20480,
    SUMS_AT = 40960
};

/* A layer's tensors: n small ones, most of them ragged and one even, and a large one that divides evenly. */
struct layer_kind {
    int n;
    enum zero_dtype dtype; /* dtype of the gradients */
    bool accumulate;
};

struct layer {
    int n, world;
    struct zr_gather_seg g[MAX_SMALL + 1];
    struct zr_reduce_seg r[MAX_SMALL + 1];
};

static void make_layer(struct layer *l, const struct layer_kind *k, int world)
{
    *l = (struct layer){.n = k->n + 1, .world = world};
    for (int i = 0; i < l->n; i++) {
        int64_t at = i < k->n ? SMALL_APART * i : LARGE_AT, shard = i < k->n ? SMALL_BYTES : LARGE_BYTES;
        int64_t total = shard * world - (i > 0 && i < k->n ? 128 + 4 * i : 0);
        l->g[i] = (struct zr_gather_seg){at, at, true, {shard, total}};
        l->r[i] = (struct zr_reduce_seg){at, SUMS_AT + 1024 * i, {shard, total}, k->dtype, k->accumulate};
    }
}

/* Returns the layer's segment that holds byte at of the arena, or -1 if none does. */
static int segment_at(const struct layer *l, int64_t at)
{
    for (int i = 0; i < l->n; i++)
        if (at >= l->g[i].dst && at < l->g[i].dst + l->g[i].cut.total)
            return i;
    return -1;
}

/* Element i of rank's arena. Sums of these are exact in bf16 too. */
static float put_in(int64_t i, int rank)
{
    return (float)(i % 16 + rank);
}

/* Fills an arena with floats, or with bf16 where the gradients are. */
static void fill(char *x, int rank, enum zero_dtype dtype)
{
    const struct zr_host_kernels *k = zr_host_kernels(ZR_ISA_PORTABLE);
    for (int64_t i = 0; i < ARENA_BYTES / 4; i++)
        ((float *)x)[i] = put_in(i, rank);
    for (int64_t i = 0; dtype == ZERO_BF16 && i < SUMS_AT / 2; i++) {
        float v = put_in(i, rank);
        k->cast((uint16_t *)x + i, ZERO_BF16, &v, ZERO_F32, 1);
    }
}

static void check_gathered(struct rank *me, const struct layer *l, const float *x)
{
    for (int64_t i = 0; i < ARENA_BYTES / 4; i++) {
        int k = segment_at(l, i * 4);
        float want = put_in(i, k < 0 ? me->w.rank : (int)((i * 4 - l->g[k].dst) / l->g[k].cut.each));
        RANK_CHECK(me, x[i] == want, "element %d is %g, not %g", (int)i, (double)x[i], (double)want);
    }
}

static void check_reduced(struct rank *me, const struct layer *l, const float *x)
{
    int world = me->w.world, rank = me->w.rank;
    for (int64_t i = SUMS_AT / 4; i < ARENA_BYTES / 4; i++) {
        int64_t k = (i * 4 - SUMS_AT) / 1024;
        const struct zr_reduce_seg *r = &l->r[k < l->n ? k : l->n - 1];
        int64_t e = i - r->dst / 4, size = zr_dtype_bytes(r->dtype);
        bool is_sum = e >= 0 && e * size < r->cut.each && rank * r->cut.each + e * size < r->cut.total;
        float want = is_sum && !r->accumulate ? 0 : put_in(i, rank);
        for (int p = 0; p < world && is_sum; p++)
            want += put_in((r->src + rank * r->cut.each) / size + e, p);
        RANK_CHECK(me, x[i] == want, "element %d is %g, not %g", (int)i, (double)x[i], (double)want);
    }
}

/* Gathers and reduces the layer. Bytes around its tensors must not change. */
static void move_layer(struct rank *me)
{
    const struct layer_kind *kind = me->arg;
    struct fixture o;
    struct zr_tag tag = {.unit = 1};
    struct layer l;
    int err = 0;
    make_layer(&l, kind, me->w.world);
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_custom, 2, LONG_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    char *x = malloc(ARENA_BYTES);
    fill(x, me->w.rank, ZERO_F32);
    err = fixture_store(&o, 0, x, ARENA_BYTES);
    fill(x, me->w.rank, kind->dtype);
    if (!err)
        err = fixture_store(&o, 1, x, ARENA_BYTES);
    if (!err)
        err = zr_comm_all_gather(o.comm[0], o.stream[0], l.g, l.n, &tag);
    if (!err)
        err = zr_comm_reduce_scatter(o.comm[1], o.stream[1], l.r, l.n, &tag);
    if (!err)
        err = fixture_fetch(&o, 0, x, ARENA_BYTES);
    check_gathered(me, &l, (float *)x);
    if (!err)
        err = fixture_fetch(&o, 1, x, ARENA_BYTES);
    check_reduced(me, &l, (float *)x);
    free(x);
    note_error(me, err);
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

struct moved {
    struct nccl_stand_in_counts nccl;
    int64_t kernels, copies; /* including those of opening and closing */
};

static void open_only(struct rank *me)
{
    struct fixture o;
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_custom, 2, LONG_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

/* Counts the NCCL calls of a layer, without the first operations of each communicator. */
static struct moved count_layer(int world, int n, enum zero_dtype dtype, bool accumulate)
{
    struct layer_kind kind = {n, dtype, accumulate};
    struct nccl_stand_in_counts start, open;
    nccl_stand_in_counts(&start);
    run_ranks(false, world, open_only, NULL, NULL);
    nccl_stand_in_counts(&open);
    struct moved m = {.kernels = -stand_in_calls("cudaLaunchKernel"),
                      .copies = -stand_in_calls("cudaMemcpyAsync")};
    struct rank *r = run_ranks(false, world, move_layer, &kind, NULL);
    nccl_stand_in_counts(&m.nccl);
    for (int i = 0; i < world; i++)
        expect_rank(&r[i], 0, "");
    m.nccl.n_calls -= 2 * open.n_calls - start.n_calls;
    m.nccl.n_groups -= 2 * open.n_groups - start.n_groups;
    m.nccl.n_symmetric -= 2 * open.n_symmetric - start.n_symmetric;
    m.nccl.n_copy_engine -= 2 * open.n_copy_engine - start.n_copy_engine;
    m.kernels += stand_in_calls("cudaLaunchKernel");
    m.copies += stand_in_calls("cudaMemcpyAsync");
    return m;
}

/* A layer takes one group of two collectives, one packed and one for the large tensor, and two kernels
 * around them. That holds for any number of small tensors, any world and dtype, and with accumulation. */
static void test_packed(void **state)
{
    for (int world = 2; world <= 8; world += 3)
        for (int kind = 0; kind < 3; kind++) {
            enum zero_dtype dtype = kind ? ZERO_BF16 : ZERO_F32;
            bool accumulate = kind == 2;
            customize(false, LONG_MS);
            custom.copy_engine = HEADER_HAS_WINDOWS;
            nccl_stand_in_the_machine()->version = NCCL_SOUND;
            struct moved one = count_layer(world, 0, dtype, accumulate);
            for (int n = 2; n <= MAX_SMALL - 1; n += 5) {
                struct moved m = count_layer(world, n, dtype, accumulate);
                assert_int_equal(m.nccl.n_calls, world * 2 * 2);
                assert_int_equal(m.nccl.n_groups, world * 2);
                assert_int_equal(m.nccl.n_symmetric, HEADER_HAS_WINDOWS ? m.nccl.n_calls : 0);
                assert_int_equal(m.nccl.n_copy_engine, HEADER_HAS_WINDOWS ? world * 2 : 0);
                assert_int_equal(m.kernels - one.kernels, 2 * world * 2);
                assert_int_equal(m.copies, one.copies);
            }
            /* The large tensor travels from its own place. */
            assert_int_equal(one.nccl.n_calls, world * 2);
        }
}

/* With the fixed tree, packed tensors take one message to and from each peer, and the same kernels. */
static void test_packed_fixed(void **state)
{
    for (int world = 2; world <= 5; world += 3)
        for (int kind = 0; kind < 3; kind++) {
            enum zero_dtype dtype = kind ? ZERO_BF16 : ZERO_F32;
            bool accumulate = kind == 2;
            customize(true, LONG_MS);
            struct moved one = count_layer(world, 0, dtype, accumulate);
            assert_int_equal(one.nccl.n_calls, world + world * (world - 1) * 2);
            for (int n = 2; n <= MAX_SMALL - 1; n += 5) {
                struct moved m = count_layer(world, n, dtype, accumulate);
                assert_int_equal(m.nccl.n_calls, world * 2 + world * (world - 1) * 2 * 2);
                assert_int_equal(m.nccl.n_groups, world * 2);
                assert_int_equal(m.kernels - one.kernels, 2 * world * 2);
                assert_int_equal(m.copies, one.copies);
            }
        }
}

/* A single small tensor that divides evenly is not packed, as there is nothing to pack it with. */
static void test_packed_alone(void **state)
{
    customize(false, LONG_MS);
    struct moved none = count_layer(3, 0, ZERO_F32, false), even = count_layer(3, 1, ZERO_F32, false);
    assert_int_equal(even.nccl.n_calls, 3 * 2 * 2);
    assert_int_equal(even.kernels, none.kernels);
}

/* Three places; the second one is empty: a large segment and a small one. The suite checks their bits. */
static void move_places(struct rank *me)
{
    const bool moves = *(bool *)me->arg;
    static const int64_t large[] = {0, 2048, 2048, 8192}, small[] = {0, 64, 64, 256};
    const struct zr_gather_seg g[] = {{0, 0, true, {.total = 8192, .at = large}},
                                      {8192, 8192, true, {.total = 256, .at = small}}};
    const struct zr_reduce_seg r[] = {{0, 16384, {.total = 8192, .at = large}, ZERO_F32, false},
                                      {8192, 24576, {.total = 256, .at = small}, ZERO_F32, true}};
    struct zr_tag tag = {.unit = 1};
    struct zr_comm_stats got[2];
    struct fixture o;
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_custom, 2, LONG_MS, ARENA_BYTES) == 0, "%s",
               zr_error_text());
    int err = moves ? zr_comm_all_gather(o.comm[0], o.stream[0], g, 2, &tag) : 0;
    if (!err && moves)
        err = zr_comm_reduce_scatter(o.comm[1], o.stream[1], r, 2, &tag);
    note_error(me, err);
    for (int k = 0; k < 2; k++)
        o.dev->ops->stream_sync(o.stream[k]);
    for (int k = 0; k < 2; k++)
        zr_comm_stats(o.comm[k], &got[k]);
    int64_t own = large[me->w.rank + 1] - large[me->w.rank], rows = 2 * 256;
    RANK_CHECK(me, !moves || got[0].wire_bytes == 8192 - own + rows, "%lld bytes",
               (long long)got[0].wire_bytes);
    RANK_CHECK(me, !moves || got[1].wire_bytes == 2 * own + rows, "%lld bytes", (long long)got[1].wire_bytes);
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

/* A large segment takes a call per non-empty place, and a small one a row. All calls are one group. */
static void test_places(void **state)
{
    struct nccl_stand_in_counts n[3];
    customize(false, LONG_MS);
    for (int moves = 0; moves < 2; moves++) {
        bool arg = moves;
        nccl_stand_in_counts(&n[moves]);
        struct rank *r = run_ranks(false, 3, move_places, &arg, NULL);
        for (int i = 0; i < 3; i++)
            expect_rank(&r[i], 0, "");
    }
    nccl_stand_in_counts(&n[2]);
    assert_int_equal(n[2].n_calls - n[1].n_calls - (n[1].n_calls - n[0].n_calls), 3 * 2 * (2 + 1));
    assert_int_equal(n[2].n_groups - n[1].n_groups - (n[1].n_groups - n[0].n_groups), 3 * 2);
}

/* --- opening that fails --- */

static void note_open(struct rank *me)
{
    struct fixture o;
    note_error(me, fixture_open(&o, &me->w, &fixture_custom, 2, LONG_MS, ARENA_BYTES));
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void try_open(int world, int code, const char *text)
{
    struct nccl_stand_in_counts after;
    struct rank *r = run_ranks(false, world, note_open, NULL, NULL);
    for (int i = 0; i < world; i++)
        expect_rank(&r[i], code, text);
    nccl_stand_in_counts(&after);
    assert_int_equal(after.n_comms, 0);
}

static void other_small(struct zr_nccl_options *opt, int rank)
{
    opt->small_bytes += rank == 1 ? 256 : 0;
}

static void no_time(struct zr_nccl_options *opt, int rank)
{
    opt->timeout_ms = rank == 1 ? 0 : opt->timeout_ms;
}

static void no_library(struct zr_nccl_options *opt, int rank)
{
    opt->library = rank == 2 ? "/nowhere/libnccl.so.2" : NULL;
}

static void test_refused(void **state)
{
    struct nccl_stand_in_machine *m = nccl_stand_in_the_machine();
    customize(true, LONG_MS);
    custom.odd_rank = 2;
    try_open(3, ZERO_ERR_MISMATCH, "the largest slice (reduce) is 3072 on rank 2 and 4096 on rank 0");
    custom.odd_rank = -1;
    custom.change = other_small;
    try_open(3, ZERO_ERR_MISMATCH, "small_bytes is 1280 on rank 1 and 1024 on rank 0");
    custom.change = no_time;
    try_open(2, ZERO_ERR_ARG, "nccl: timeout_ms is 0");
    custom.change = no_library;
    try_open(3, ZERO_ERR_NOTSUP, "there is no NCCL: /nowhere/libnccl.so.2");
    customize(false, LONG_MS);
    m->version = 21305;
    try_open(2, ZERO_ERR_NOTSUP, "NCCL is 2.13.5: 2.14 or newer is needed");
    m->version = 22705;
    custom.copy_engine = true;
    try_open(2, ZERO_ERR_NOTSUP, "copy_engine is on: NCCL is 2.27.5");
}

static _Thread_local bool no_watcher;
/* the rendezvous that this rank leaves instead of making its first collective NCCL call */
static _Thread_local struct zr_rendezvous *to_leave;
/* delay in ms before that call; 0: none */
static _Thread_local int late_ms;
static int without_watcher; /* one bit per rank */

int __real_zr_thread_start(struct zr_thread *t, const char *name, void (*fn)(void *arg), void *arg);
int __wrap_zr_thread_start(struct zr_thread *t, const char *name, void (*fn)(void *arg), void *arg);

int __wrap_zr_thread_start(struct zr_thread *t, const char *name, void (*fn)(void *arg), void *arg)
{
    if (to_leave && strcmp(name, "zero-nccl-call") == 0) {
        zr_rendezvous_close(to_leave);
        to_leave = NULL;
        return zr_fail(ZERO_ERR_SYSTEM, "this rank leaves");
    }
    if (late_ms && strcmp(name, "zero-nccl-call") == 0) {
        sleep_ms(late_ms);
        late_ms = 0;
    }
    return no_watcher && strcmp(name, "zero-nccl") == 0
               ? zr_fail(ZERO_ERR_SYSTEM, "thread %s could not be started: the test has none", name)
               : __real_zr_thread_start(t, name, fn, arg);
}

static void no_watcher_here(struct zr_nccl_options *opt, int rank)
{
    no_watcher = without_watcher >> rank & 1;
}

/* The other ranks wait by then to compare their options. They hear the cause, and release what they have
 * opened. */
static void test_no_watcher(void **state)
{
    const char *why = "NCCL's communicators: thread zero-nccl could not be started: the test has none";
    customize(false, LONG_MS);
    custom.change = no_watcher_here;
    for (int world = 1; world <= 3; world++)
        for (without_watcher = 1; without_watcher < 1 << world; without_watcher++)
            try_open(world, ZERO_ERR_SYSTEM, why);
    without_watcher = 0;
    try_open(3, 0, "");
}

/* Every call of opening fails once, on one rank. If the call is collective, the others wait until their
 * time is over. No rank waits longer. */
static void test_open_fails(void **state)
{
    static const struct {
        const char *call;
        int k;
        bool waits;
    } cases[] = {{"ncclGetUniqueId", 1, false},
                 {"ncclCommInitRankConfig", 1, true},
                 {"ncclCommSplit", 1, true},
                 {"ncclCommWindowRegister", 1, true},
                 {"ncclCommWindowRegister", 2, true}};
    customize(false, SHORT_MS);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        bool is_window = strcmp(cases[i].call, "ncclCommWindowRegister") == 0;
        int bad = i == 0 ? 0 : 1;
        if (is_window && !HEADER_HAS_WINDOWS)
            continue;
        custom.copy_engine = is_window;
        nccl_stand_in_the_machine()->version = is_window ? NCCL_SOUND : 22809;
        nccl_stand_in_fail(cases[i].call, bad, cases[i].k, ncclSystemError);
        struct rank *r = run_ranks(false, 3, note_open, NULL, NULL);
        expect_rank(&r[bad], ZERO_ERR_SYSTEM, "unhandled system error: the stand-in says so");
        expect_rank(&r[bad], ZERO_ERR_SYSTEM, cases[i].call);
        for (int k = 0; k < 3; k++)
            if (k != bad && cases[i].waits)
                expect_rank(&r[k], ZERO_ERR_SYSTEM, "rank 1: "); /* the cause */
            else if (k != bad)
                expect_rank(&r[k], ZERO_ERR_SYSTEM, "rank 0: ncclGetUniqueId");
        nccl_stand_in_end();
    }
    custom.copy_engine = false;
    /* A call does not return at all. */
    nccl_stand_in_hang("ncclCommInitRankConfig", 2, 1);
    struct rank *r = run_ranks(false, 3, note_open, NULL, NULL);
    for (int k = 0; k < 3; k++)
        expect_rank(&r[k], ZERO_ERR_TIMEOUT,
                    "ncclCommInitRankConfig of the gather communicator has not returned");
    nccl_stand_in_end();
    expected_misuse = -1; /* the call that hung was left behind with its memory */
}

static void opens_late(struct zr_nccl_options *opt, int rank)
{
    opt->start_timeout_ms = LONG_MS;
    late_ms = rank == 1 ? 2 * SHORT_MS : 0;
}

static void starts_soon(struct zr_nccl_options *opt, int rank)
{
    opt->start_timeout_ms = SHORT_MS;
}

/* Starting may take longer than an operation may, or less if so configured. */
static void test_start_limit(void **state)
{
    customize(false, SHORT_MS);
    custom.change = opens_late;
    try_open(3, 0, "");
    nccl_stand_in_end();
    customize(false, LONG_MS);
    custom.change = starts_soon;
    nccl_stand_in_hang("ncclCommSplit", 2, 1);
    struct rank *r = run_ranks(false, 3, note_open, NULL, NULL);
    for (int k = 0; k < 3; k++)
        expect_rank(&r[k], ZERO_ERR_TIMEOUT, "communicator has not returned after 800 ms");
    nccl_stand_in_end();
    expected_misuse = -1; /* the call that hung was left behind with its memory */
}

static int open_and_leave(struct fixture *o, int n, int64_t timeout_ms)
{
    to_leave = zr_rendezvous_rank(o->rdv) == 1 ? o->rdv : NULL;
    return fixture_custom.open_comms(o, n, timeout_ms);
}

static void note_open_leaving(struct rank *me)
{
    struct fixture_kind kind = fixture_custom;
    struct fixture o;
    kind.open_comms = open_and_leave;
    note_error(me, fixture_open(&o, &me->w, &kind, 2, LONG_MS, ARENA_BYTES));
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

/* A rank leaves while NCCL makes a communicator of all ranks. NCCL would wait for it for ever. The other
 * ranks hear of it and stop before their time is over. */
static void test_leaves_in_opening(void **state)
{
    customize(false, LONG_MS);
    struct rank *r = run_ranks(false, 3, note_open_leaving, NULL, NULL);
    for (int k = 0; k < 3; k += 2)
        expect_rank(&r[k], ZERO_ERR_PEER, "rank 1 left before an exchange");
    expected_misuse = -1; /* the call that waited was left behind with its memory */
}

static void other_size(struct rank *me)
{
    struct fixture o;
    struct zr_tag tag = {.unit = 1};
    char *base;
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_custom, 2, LONG_MS, 0) == 0, "%s", zr_error_text());
    struct zr_comm *c = o.comm[0];
    RANK_CHECK(me, zr_comm_exchange(c, o.stream[0], 0, 64, &tag) == ZERO_ERR_ORDER, "without an arena");
    int64_t bytes = custom_reserve(2, 0) + 4096;
    note_error(me, fixture_arena(c, me->w.rank == 1 ? 2 * bytes : bytes, &base));
    RANK_CHECK(me, fixture_arena(c, custom_reserve(2, 0), &base) == ZERO_ERR_ARG, "nothing but the room");
    RANK_CHECK(me, fixture_arena(c, bytes, &base) == 0, "%s", zr_error_text());
    RANK_CHECK(me, fixture_arena(c, bytes, &base) == ZERO_ERR_ORDER, "twice");
    RANK_CHECK(me, zr_comm_exchange(c, o.stream[0], 0, 2049, &tag) == ZERO_ERR_ARG, "into the room");
    RANK_CHECK(me, zr_comm_broadcast(c, o.stream[0], 0, 64, 2, &tag) == ZERO_ERR_ARG, "no such root");
    struct zr_reduce_seg seg = {.dtype = ZERO_F32};
    RANK_CHECK(me, zr_comm_reduce_scatter(c, o.stream[0], &seg, 1, &tag) == ZERO_ERR_ARG,
               "gather does not reduce");
    c = o.comm[1];
    RANK_CHECK(me, fixture_arena(c, custom_reserve(2, 1), &base) == ZERO_ERR_ARG, "nothing but the reserve");
    RANK_CHECK(me, fixture_arena(c, custom_reserve(2, 1) + 512, &base) == 0, "%s", zr_error_text());
    RANK_CHECK(me, zr_comm_exchange(c, o.stream[1], 0, 256, &tag) == 0, "%s", zr_error_text());
    RANK_CHECK(me, zr_comm_exchange(c, o.stream[1], 0, 257, &tag) == ZERO_ERR_ARG, "into the reserve");
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_arena(void **state)
{
    customize(false, LONG_MS);
    struct rank *r = run_ranks(false, 2, other_size, NULL, NULL);
    for (int i = 0; i < 2; i++)
        expect_rank(&r[i], ZERO_ERR_MISMATCH, "the arena is 16384 bytes on rank 1 and 8192 on rank 0");
}

static void test_reserve_bytes(void **state)
{
    assert_int_equal(zr_nccl_reserve_bytes(1, true, 1 << 30, 1 << 20), 256);
    assert_int_equal(zr_nccl_reserve_bytes(8, false, 1 << 30, 0), 256 + 8 * 256);
    assert_int_equal(zr_nccl_reserve_bytes(9, false, 0, 1024), 512 + 9 * 1024);
    assert_int_equal(zr_nccl_reserve_bytes(4, true, 0, 0), 256 + 4 * 256 + 3 * 256);
    assert_int_equal(zr_nccl_reserve_bytes(4, true, 1000, 0), 256 + 4 * 256 + 3 * 1024);
    assert_int_equal(zr_nccl_reserve_bytes(4, true, 1000, 2048), 256 + 4 * 2048 + 3 * 2048);
    assert_int_equal(zr_nccl_reserve_bytes(4, true, 1 << 30, 0), 256 + 4 * 256 + 3 * (4 << 20));
    assert_true(zr_nccl_reserve_bytes(64, true, 1 << 30, 0) <= 2048 + 64 * 256 + (64 << 20) + 63 * 256);
    assert_int_equal(zr_nccl_room_bytes(3, 128), 768);
    assert_int_equal(zr_nccl_room_bytes(3, 384), 1280);
    assert_int_equal(zr_nccl_room_bytes(3, INT64_MAX), 64 << 20);
}

/* --- the program's communicator --- */

static ncclComm_t user_comm[MAX_RANKS];
static int lend_from; /* ranks below this one lend none */

static void lend(struct zr_nccl_options *opt, int rank)
{
    opt->user_comm = rank >= lend_from ? user_comm[rank] : NULL;
}

static void make_user_comm(struct rank *me, const ncclUniqueId *id)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    cudaSetDevice(me->w.rank);
    int world = *(int *)me->arg, rank = me->w.rank;
    me->code = ncclCommInitRankConfig(&user_comm[rank], world, *id, rank, &config);
}

static ncclUniqueId user_comm_id;

/* Each rank's the program's communicator works before and after, and libzero does not close it. */
static void with_user_comm(struct rank *me)
{
    struct fixture o;
    struct zr_tag tag = {.unit = 1};
    void *p;
    cudaStream_t s;
    int rank = me->w.rank;
    make_user_comm(me, &user_comm_id);
    RANK_CHECK(me, me->code == 0, "code %d", me->code);
    int err = fixture_open(&o, &me->w, &fixture_custom, 2, LONG_MS, ARENA_BYTES);
    note_error(me, err);
    for (int k = 0; k < 2 && !err; k++) {
        char bytes[3] = {0}, got[3];
        bytes[rank] = (char)(rank + 1);
        RANK_CHECK(me, o.dev->ops->copy(o.stream[k], o.base[k], bytes, 3) == 0, "%s", zr_error_text());
        RANK_CHECK(me, zr_comm_exchange(o.comm[k], o.stream[k], 0, 1, &tag) == 0, "%s", zr_error_text());
        RANK_CHECK(me, o.dev->ops->copy(o.stream[k], got, o.base[k], 3) == 0, "%s", zr_error_text());
        o.dev->ops->stream_sync(o.stream[k]);
        for (int i = 0; i < me->w.world; i++)
            RANK_CHECK(me, got[i] == i + 1, "byte %d is %d", i, got[i]);
    }
    RANK_CHECK(me, fixture_close(&o), "handles are left");
    RANK_CHECK(me, cudaMalloc(&p, 64) == 0 && cudaStreamCreate(&s) == 0, "no memory");
    RANK_CHECK(me, ncclAllGather((char *)p + rank, p, 1, ncclInt8, user_comm[rank], s) == 0, "it was closed");
    cudaStreamSynchronize(s);
    cudaStreamDestroy(s);
    cudaFree(p);
    ncclCommDestroy(user_comm[rank]);
}

static void test_user_comm(void **state)
{
    static const int versions[] = {22809, 21705 /* cannot split */};
    int world = 3;
    for (size_t i = 0; i < 2; i++) {
        nccl_stand_in_the_machine()->version = versions[i];
        customize(i == 1, LONG_MS);
        custom.change = lend;
        lend_from = 0;
        ncclGetUniqueId(&user_comm_id);
        struct rank *r = run_ranks(false, world, with_user_comm, &world, NULL);
        for (int k = 0; k < world; k++)
            expect_rank(&r[k], 0, "");
    }
    nccl_stand_in_the_machine()->version = 22809;
    lend_from = 1;
    ncclGetUniqueId(&user_comm_id);
    struct rank *r = run_ranks(false, world, with_user_comm, &world, NULL);
    for (int k = 0; k < world; k++)
        expect_rank(&r[k], ZERO_ERR_MISMATCH, "the use of nccl_comm is 1 on rank 1 and 0 on rank 0");
}

/* Groups are split off the program's communicator. If that is impossible, an error says so. */
static void user_comm_groups(struct rank *me)
{
    struct comm_plan p = {.kind = &fixture_custom,
                          .seed = 7,
                          .n_ops = 10,
                          .groups = &(struct fixture_groups){3, {2, 0, 1, 4, 3}}};
    struct fixture o;
    make_user_comm(me, &user_comm_id);
    RANK_CHECK(me, me->code == 0, "code %d", me->code);
    if (nccl_stand_in_the_machine()->version == 22809) {
        me->arg = &p;
        comm_suite_conform(me);
    } else {
        note_error(me, fixture_open_groups(&o, &me->w, p.groups, p.kind, 2, LONG_MS, 0));
        RANK_CHECK(me, fixture_close(&o), "handles are left");
    }
    ncclCommDestroy(user_comm[me->w.rank]);
}

static void test_user_comm_groups(void **state)
{
    static const int versions[] = {22809, 21705 /* cannot split */};
    int world = 5;
    for (size_t i = 0; i < 2; i++) {
        nccl_stand_in_the_machine()->version = versions[i];
        customize(false, LONG_MS);
        custom.change = lend;
        lend_from = 0;
        ncclGetUniqueId(&user_comm_id);
        struct rank *r = run_ranks(false, world, user_comm_groups, &world, NULL);
        for (int k = 0; k < world && i == 1; k++)
            expect_rank(&r[k], ZERO_ERR_NOTSUP, "this NCCL cannot split it (2.18 or newer can)");
    }
}

/* Ranks of the program's communicator meet by a file if all of them say so. */
static void user_comm_by_file(struct rank *me)
{
    struct zr_device *dev;
    struct zr_rendezvous *rdv;
    uv_loop_t loop;
    struct zr_user_comm c = {.name = "nccl_comm", .gather = zr_nccl_exchange, .timeout_ms = LONG_MS};
    int held;
    bool has_file = me->w.rank >= lend_from;
    me->w.host[0] = me->w.key.n_bytes = 0;
    me->w.port = 0;
    if (has_file && !getcwd(me->w.file, sizeof me->w.file))
        me->w.file[0] = 0;
    make_user_comm(me, &user_comm_id);
    RANK_CHECK(me, me->code == 0, "code %d", me->code);
    RANK_CHECK(me, zr_cuda_device_open(ZR_CUDA_CURRENT, &dev) == 0, "%s", zr_error_text());
    c.dev = dev;
    c.comm = user_comm[me->w.rank];
    note_error(me, zr_user_comm_meet(&c, &me->w, &held));
    dev->ops->close(dev);
    RANK_CHECK(me, held < 0 && !c.is_left, "a port is held");
    if (!me->code) {
        RANK_CHECK(me, me->w.key.n_bytes > 0 && me->w.file[0], "no key, or no file");
        uv_loop_init(&loop);
        RANK_CHECK(me, zr_rendezvous_open(&loop, &me->w, LONG_MS, &rdv) == 0, "%s", zr_error_text());
        zr_rendezvous_free(rdv);
        RANK_CHECK(me, uv_loop_close(&loop) == 0, "handles are left");
    }
    ncclCommDestroy(user_comm[me->w.rank]);
}

static void test_user_comm_by_file(void **state)
{
    int world = 3;
    for (lend_from = 0; lend_from < 2; lend_from++) {
        ncclGetUniqueId(&user_comm_id);
        struct rank *r = run_ranks(false, world, user_comm_by_file, &world, NULL);
        for (int k = 0; k < world; k++)
            expect_rank(&r[k], lend_from ? ZERO_ERR_ARG : 0,
                        lend_from ? "rank 1 meets by a file:// and rank 0 does not" : "");
    }
}

static ncclComm_t swapped(int rank)
{
    return user_comm[1 - rank];
}

static void lend_swapped(struct zr_nccl_options *opt, int rank)
{
    opt->user_comm = swapped(rank);
}

static void with_wrong(struct rank *me)
{
    make_user_comm(me, &user_comm_id);
    RANK_CHECK(me, all_at(me, 1), "a rank is missing");
    struct fixture o;
    note_error(me, fixture_open(&o, &me->w, &fixture_custom, 2, LONG_MS, ARENA_BYTES));
    RANK_CHECK(me, fixture_close(&o), "handles are left");
    ncclCommDestroy(user_comm[me->w.rank]);
}

static void test_user_comm_wrong(void **state)
{
    int world = 2;
    customize(false, LONG_MS);
    custom.change = lend_swapped;
    ncclGetUniqueId(&user_comm_id);
    struct rank *r = run_ranks(false, world, with_wrong, &world, NULL);
    expect_rank(&r[0], ZERO_ERR_ARG, "nccl_comm is rank 1 of 2, but this is rank 0 of 2");
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, nccl_test_start, nccl_test_finish)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_conform),
        TEST(test_mixed),
        TEST(test_arrays),
        TEST(test_alone),
        TEST(test_groups),
        TEST(test_user_comm_groups),
        TEST(test_user_comm_by_file),
        TEST(test_buffers_overlap),
        TEST(test_paths),
        TEST(test_known_faults),
        TEST(test_conform_windows),
        TEST(test_conform_old),
        TEST(test_one_without_memory),
        TEST(test_refused),
        TEST(test_no_watcher),
        TEST(test_open_fails),
        TEST(test_start_limit),
        TEST(test_leaves_in_opening),
        TEST(test_arena),
        TEST(test_packed),
        TEST(test_packed_fixed),
        TEST(test_packed_alone),
        TEST(test_places),
        TEST(test_group_apart),
#if HEADER_HAS_WINDOWS
        TEST(test_window_twice),
#endif
        TEST(test_reserve_bytes),
        TEST(test_user_comm),
        TEST(test_user_comm_wrong),
    };
    return cmocka_run_group_tests_name("nccl", tests, NULL, NULL);
}
