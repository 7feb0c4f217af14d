/* SPDX-License-Identifier: Apache-2.0 */
/* test_cuda_context.c: a context on the GPU stand-in. Tests refused configurations, each CUDA call failing
 * once, a lost GPU, and how often the host waits. Also tests a custom optimizer, communicators of the
 * program, and checkpoints that move between GPU and host. */
#include "test/cmocka.h"
#include "test/stand_in/nccl_stand_in.h"
#include "test/stand_in/stand_in.h"
#include "test/zero/sample.h"
#include "test/zero/toy_net.h"

#include <cuda_runtime_api.h>

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct zero_config config(int stage)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    cfg.device = ZERO_DEVICE_CUDA;
    cfg.stage = stage;
    return cfg;
}

static void wait_for_default_stream(void)
{
    if (cudaStreamSynchronize(NULL)) /* this call may be the one that fails */
        cudaStreamSynchronize(NULL);
    stand_in_touch();
}

/* A forward and a backward whose only kernel sets some elements of one gradient. */
static int bare_pass(struct toy *m, zero_ctx *z)
{
    int err = 0;
    for (int u = 0; !err && u < TOY_UNITS; u++) {
        err = zero_begin(z, u, ZERO_FORWARD);
        if (!err)
            err = zero_end(z, u, ZERO_FORWARD);
    }
    for (int u = TOY_UNITS; !err && u-- > 0;) {
        err = zero_begin(z, u, ZERO_BACKWARD);
        if (!err && u == 0 && cudaMemsetAsync(m->grad[0], 0x3c, 32, NULL))
            return ZERO_ERR_SYSTEM;
        if (!err)
            err = zero_end(z, u, ZERO_BACKWARD);
    }
    return err;
}

static void nothing_wrong(void)
{
    const char *text;
    if (stand_in_end(&text))
        fail_msg("%s", text);
}

/* --- what is refused --- */

static void refused(const struct zero_config *cfg, int code, const char *const *parts)
{
    struct toy m;
    zero_ctx *z = (zero_ctx *)&m;
    toy_make(&m);
    assert_int_equal(zero_wrap(&z, m.table, TOY_TENSORS, cfg), code);
    assert_null(z);
    assert_true(toy_untouched(&m));
    for (; *parts; parts++)
        if (!strstr(zero_last_error(), *parts))
            fail_msg("\"%s\" lacks \"%s\"", zero_last_error(), *parts);
    toy_free(&m);
    nothing_wrong();
}
#define REFUSED(cfg, code, ...) refused(cfg, code, (const char *const[]){__VA_ARGS__, NULL})

static void test_what_is_refused(void **state)
{
    struct stand_in_machine *m = stand_in_the_machine(), was = *m;
    struct zero_config cfg = config(3);
    m->driver_version = 0;
    REFUSED(&cfg, ZERO_ERR_NOTSUP, "zero_wrap", "no usable GPU", "no NVIDIA driver");
    m->driver_version = 12040;
    REFUSED(&cfg, ZERO_ERR_NOTSUP, "the driver is for CUDA 12.4");
    *m = was;
    m->major = 7, m->minor = 5;
    REFUSED(&cfg, ZERO_ERR_NOTSUP, "compute capability 7.5", "bf16");
    *m = was;
    m->device_bytes = 20000;
    REFUSED(&cfg, ZERO_ERR_NOMEM, "the plan needs", "for each rank on its GPU, which has 20000 free", "param",
            "moments");
    *m = was;
    m->n_devices = 2;
    assert_int_equal(cudaSetDevice(1), cudaSuccess);
    assert_int_equal(cudaStreamCreate((cudaStream_t *)&cfg.stream), cudaSuccess);
    assert_int_equal(cudaSetDevice(0), cudaSuccess);
    struct toy t;
    zero_ctx *z;
    toy_make(&t);
    assert_int_equal(zero_wrap(&z, t.table, TOY_TENSORS, &cfg), ZERO_ERR_ARG);
    assert_non_null(strstr(zero_last_error(), "the stream is of GPU 1, the device is GPU 0"));
    assert_true(toy_untouched(&t));
    toy_free(&t);
    assert_int_equal(cudaStreamDestroy((cudaStream_t)cfg.stream), cudaSuccess);
    nothing_wrong();
    *m = was;
}

/* --- training --- */

/* Takes two steps, and returns the first error. */
static int train(struct toy *m, zero_ctx *z, int first_step)
{
    int err = 0;
    for (int s = first_step; !err && s < first_step + 2; s++) {
        err = toy_forward(m, z, true);
        if (!err)
            err = toy_backward(m, z, true, s, 0);
        if (!err)
            err = zero_step(z, 1e-2f, NULL);
    }
    return err;
}

/* Wraps, trains, reads all values and unwraps. */
static int live(const struct zero_config *cfg, uint64_t *hash)
{
    struct toy m;
    zero_ctx *z;
    toy_make(&m);
    int err = zero_wrap(&z, m.table, TOY_TENSORS, cfg);
    if (err) {
        assert_null(z);
        assert_true(toy_untouched(&m));
    } else {
        err = train(&m, z, 0);
        if (!err)
            err = toy_hash(z, 2, hash);
        if (err) { /* later calls give the same cause */
            char text[512];
            snprintf(text, sizeof text, "%s", zero_last_error());
            int again = zero_step(z, 1e-2f, NULL);
            assert_int_equal(again, err);
            const char *cause = strstr(text, "cuda");
            assert_true(!cause || strstr(zero_last_error(), cause));
        }
        int last = zero_unwrap(&z);
        assert_null(z);
        err = err ? err : last;
    }
    toy_free(&m);
    return err;
}

static uint64_t hash_on_host(void)
{
    struct zero_config cfg = config(0);
    uint64_t hash;
    cfg.device = ZERO_DEVICE_HOST;
    assert_int_equal(live(&cfg, &hash), 0);
    return hash;
}

static void test_every_call_fails(void **state)
{
    for (int stage = 0; stage <= 3; stage += 3) {
        struct zero_config cfg = config(stage);
        cfg.debug.trace = 1;
        uint64_t hash, good = hash_on_host();
        stand_in_fail(NULL, 0, cudaSuccess, false);
        assert_int_equal(live(&cfg, &hash), 0);
        assert_true(hash == good);
        int n = (int)stand_in_calls(NULL), n_failed = 0;
        nothing_wrong();
        for (int k = 1; k <= n; k += 1 + k / 60) {
            if (!sample_has())
                continue;
            stand_in_fail(NULL, k, cudaErrorUnknown, false);
            int err = live(&cfg, &hash);
            n_failed += err != 0;
            if (err && !strstr(zero_last_error(), "cudaErrorUnknown") &&
                !strstr(zero_last_error(), "no usable GPU"))
                fail_msg("call %d: code %d \"%s\"", k, err, zero_last_error());
            stand_in_end(NULL);
            assert_int_equal(live(&cfg, &hash), 0); /* the next context works */
            assert_true(hash == good);
            nothing_wrong();
        }
        assert_true(n_failed > 0);
    }
}

enum { MAX_TENSORS = 24 };

/* Counts the kernels of a run with one unit of n tensors, whose decay and learning rate alternate. */
static int64_t launches_of_life(int n, int64_t elements, int n_steps)
{
    static const char *const names[MAX_TENSORS] = {"a", "b", "c", "d", "e", "f", "g", "h",
                                                   "i", "j", "k", "l", "m", "n", "o", "p",
                                                   "q", "r", "s", "t", "u", "v", "w", "x"};
    struct zero_config cfg = config(3);
    struct zero_tensor t[MAX_TENSORS] = {0};
    struct zero_optim groups[2] = {ZERO_OPTIM_INIT, ZERO_OPTIM_INIT};
    void *param[MAX_TENSORS], *grad[MAX_TENSORS];
    zero_ctx *z;
    groups[0].lr_scale = 2;
    groups[1].weight_decay = 3;
    cfg.optim_groups = groups;
    cfg.n_optim_groups = 2;
    for (int i = 0; i < n; i++) {
        param[i] = calloc((size_t)elements, 2);
        grad[i] = NULL;
        t[i] = (struct zero_tensor){.name = names[i],
                                    .param = &param[i],
                                    .grad = &grad[i],
                                    .shape = {elements},
                                    .dtype = ZERO_BF16,
                                    .flags = i % 2 ? ZERO_NO_DECAY : 0,
                                    .group = i % 3};
    }
    void *own[MAX_TENSORS];
    memcpy(own, param, sizeof own);
    int64_t launches = -stand_in_calls("cudaLaunchKernel");
    assert_int_equal(zero_wrap(&z, t, n, &cfg), 0);
    for (int step = 0; step < n_steps; step++) {
        for (int phase = 0; phase < 2; phase++) {
            assert_int_equal(zero_begin(z, 0, phase ? ZERO_BACKWARD : ZERO_FORWARD), 0);
            if (phase)
                assert_int_equal(cudaMemsetAsync(grad[0], 0x3c, 32, NULL), cudaSuccess);
            assert_int_equal(zero_end(z, 0, phase ? ZERO_BACKWARD : ZERO_FORWARD), 0);
        }
        assert_int_equal(zero_step(z, 1e-2f, NULL), 0);
    }
    assert_int_equal(zero_unwrap(&z), 0);
    launches += stand_in_calls("cudaLaunchKernel");
    for (int i = 0; i < n; i++)
        free(own[i]);
    nothing_wrong();
    return launches;
}

static int64_t launches_of_step(int n, int64_t elements)
{
    return launches_of_life(n, elements, 3) - launches_of_life(n, elements, 2);
}

/* A step launches as many kernels for many tensors as for one, if the tensors lie end to end. Otherwise each
 * further tensor adds one kernel for the norm, because a block of the norm ends with its tensor. */
static void test_kernels_of_a_step(void **state)
{
    int64_t one = launches_of_step(1, 256);
    assert_int_equal(launches_of_step(MAX_TENSORS, 256), one);
    assert_int_equal(launches_of_step(MAX_TENSORS, 200), one + MAX_TENSORS - 1);
}

static void test_lost_gpu(void **state)
{
    struct zero_config cfg = config(3);
    uint64_t hash;
    stand_in_fail(NULL, 0, cudaSuccess, false);
    assert_int_equal(live(&cfg, &hash), 0);
    int n = (int)stand_in_calls(NULL), n_failed = 0;
    for (int k = 1; k <= n; k += 13) {
        stand_in_fail(NULL, k, cudaErrorIllegalAddress, true);
        int err = live(&cfg, &hash);
        n_failed += err != 0; /* a GPU lost during zero_unwrap is no error */
        if (err && !strstr(zero_last_error(), "cudaErrorIllegalAddress") &&
            !strstr(zero_last_error(), "no usable GPU"))
            fail_msg("call %d: code %d \"%s\"", k, err, zero_last_error());
        stand_in_end(NULL);
    }
    assert_true(n_failed > 20);
    assert_int_equal(live(&cfg, &hash), 0);
    nothing_wrong();
}

/* The model's thread enqueues a whole step without waiting for the GPU. The next step waits only for the norm
 * of the one before, which decides its step number. */
static void test_host_does_not_wait(void **state)
{
    for (int stage = 0; stage <= 3; stage++) {
        struct zero_config cfg = config(stage);
        struct toy m;
        zero_ctx *z;
        toy_make(&m);
        assert_int_equal(zero_wrap(&z, m.table, TOY_TENSORS, &cfg), 0);
        for (int step = 0; step < 4; step++) {
            int64_t before = stand_in_host_waits();
            assert_int_equal(bare_pass(&m, z), 0);
            assert_int_equal(stand_in_host_waits(), before);
            assert_int_equal(zero_step(z, 1e-2f, NULL), 0);
            if (stand_in_host_waits() - before > (step > 0))
                fail_msg("stage %d, step %d: the host waited %d times", stage, step,
                         (int)(stand_in_host_waits() - before));
        }
        assert_int_equal(zero_unwrap(&z), 0);
        toy_free(&m);
        nothing_wrong();
    }
}

/* --- gradients read, numbers changed --- */

/* Runs steps with numbers that change. Returns the gradients of the last one, and a hash of the result. */
static void read_gradients(const struct zero_config *cfg, float grad[TOY_TENSORS][2048], uint64_t *hash)
{
    struct toy m;
    zero_ctx *z;
    toy_make(&m);
    assert_int_equal(zero_wrap(&z, m.table, TOY_TENSORS, cfg), 0);
    for (int s = 0; s < 4; s++) {
        assert_int_equal(zero_tune(z, ZERO_ALL, "clip", 0.01 * (s + 1)), 0);
        assert_int_equal(zero_tune(z, 0, "beta1", 0.9 - 0.2 * s), 0);
        assert_int_equal(toy_forward(&m, z, true), 0);
        assert_int_equal(toy_backward(&m, z, true, s, 0), 0);
        for (int t = 0; s == 3 && t < TOY_TENSORS; t++) {
            memset(grad[t], 0xff, sizeof grad[t]);
            if (t != TOY_FROZEN)
                assert_int_equal(zero_read(z, t, ZERO_VALUE_GRAD, 0, toy_elems(t), grad[t]), 0);
        }
        assert_int_equal(zero_step(z, 1e-2f, NULL), 0);
    }
    assert_int_equal(toy_hash(z, 2, hash), 0);
    assert_int_equal(zero_unwrap(&z), 0);
    toy_free(&m);
}

static void test_gradients_and_numbers(void **state)
{
    for (int stage = 0; stage <= 3; stage++) {
        static float there[TOY_TENSORS][2048], here[TOY_TENSORS][2048];
        uint64_t hash[2];
        struct zero_config cfg = config(stage);
        cfg.deterministic = 1;
        read_gradients(&cfg, there, &hash[0]);
        cfg.device = ZERO_DEVICE_HOST;
        read_gradients(&cfg, here, &hash[1]);
        assert_memory_equal(there, here, sizeof here);
        assert_true(hash[0] == hash[1]);
        nothing_wrong();
    }
}

/* --- a custom optimizer --- */

static int n_updates;

/* Plain SGD on the CPU, which the stand-in allows. A real GPU would need a kernel. */
static int own_sgd(void *arg, const struct zero_update *u)
{
    struct stand_in_range range;
    if (!u->stream || !stand_in_find(u->master, &range) || range.type != cudaMemoryTypeDevice)
        return 1;
    if (cudaStreamSynchronize((cudaStream_t)u->stream))
        return 2;
    stand_in_touch();
    for (int64_t i = 0; i < u->n; i++)
        u->master[i] = u->master[i] - u->lr * u->grad[i];
    n_updates++;
    return 0;
}

static void test_own_optimizer(void **state)
{
    for (int stage = 0; stage <= 3; stage++) {
        uint64_t hash[2];
        for (int own = 0; own < 2; own++) {
            struct zero_config cfg = config(stage);
            struct toy m;
            zero_ctx *z;
            struct zero_step_info info;
            if (own)
                cfg.optim.update = own_sgd;
            else
                cfg.optim.optimizer = ZERO_SGD;
            toy_make(&m);
            assert_int_equal(zero_wrap(&z, m.table, TOY_TENSORS, &cfg), 0);
            assert_int_equal(train(&m, z, 0), 0);
            assert_true(!own || n_updates > 0);
            /* If a gradient is not finite, the custom optimizer is not called. */
            int before = n_updates;
            assert_int_equal(toy_forward(&m, z, true), 0);
            for (int u = TOY_UNITS; u-- > 0;) {
                assert_int_equal(zero_begin(z, u, ZERO_BACKWARD), 0);
                toy_wait();
                toy_add_gradient(&m, u, 2, 0);
                if (u == 0)
                    toy_poison_gradient(&m, 0, INFINITY);
                assert_int_equal(zero_end(z, u, ZERO_BACKWARD), 0);
            }
            assert_int_equal(zero_step(z, 1e-2f, &info), 0);
            assert_true(info.skipped == 1 && info.t == 2);
            assert_int_equal(train(&m, z, 3), 0);
            assert_true(!own || n_updates > before);
            assert_int_equal(toy_hash(z, 0, &hash[own]), 0);
            assert_int_equal(zero_unwrap(&z), 0);
            toy_free(&m);
        }
        assert_true(hash[0] == hash[1]);
        nothing_wrong();
    }
}

/* --- a peer that does not come, and an abort that does not return --- */

static atomic_int n_late; /* ranks that waited until the timeout, or gave up */

extern void __lsan_disable(void) __attribute__((weak));
extern void __lsan_enable(void) __attribute__((weak));

static void waits_in_vain(struct toy_rank *r)
{
    struct toy m;
    zero_ctx *z;
    if (__lsan_disable)
        __lsan_disable(); /* memory that a GPU may still use is leaked on purpose */
    cudaSetDevice(r->rank);
    struct zero_config cfg = toy_config(r, 3);
    cfg.device = ZERO_DEVICE_CUDA;
    cfg.launch.timeout_ms = 3000;
    toy_make(&m);
    toy_note(r, zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
    if (r->err) {
        toy_wrong(r, "zero_wrap: %s", r->text);
        n_late++;
    } else if (r->rank == 0) {
        struct zero_step_info info;
        int err = bare_pass(&m, z);
        toy_note(r, err ? err : zero_step(z, 1e-2f, &info));
        n_late++;
        /* zero_unwrap does not wait for a GPU that hangs. */
        zero_unwrap(&z);
    } else {
        while (!n_late)
            usleep(1000);
        zero_unwrap(&z);
    }
    toy_free(&m);
    if (__lsan_enable)
        __lsan_enable();
}

static void test_abort_that_sticks(void **state)
{
    struct stand_in_machine *m = stand_in_the_machine(), was = *m;
    struct toy_rank r[2];
    m->n_devices = 2;
    nccl_stand_in_the_machine()->abort_sticks = true;
    n_late = 0;
    toy_ranks(2, waits_in_vain, NULL, r);
    nccl_stand_in_end(); /* lets the aborts return */
    stand_in_end(NULL);  /* ignores what the hung rank left behind */
    *m = was;
    for (int i = 0; i < 2; i++)
        if (r[i].wrong[0])
            fail_msg("rank %d: %s", i, r[i].wrong);
    if (r[0].err != ZERO_ERR_TIMEOUT || !strstr(r[0].text, "waited 3000 ms (timeout_ms) for the other ranks"))
        fail_msg("code %d \"%s\"", r[0].err, r[0].text);
}

/* --- memory of NCCL --- */

enum { NCCL_HOLDS = 8 << 20 };

static void asks_what_nccl_holds(struct toy_rank *r)
{
    struct toy m;
    zero_ctx *z;
    struct zero_stats stats = {0};
    cudaSetDevice(r->rank);
    struct zero_config cfg = toy_config(r, 3);
    cfg.device = ZERO_DEVICE_CUDA;
    toy_make(&m);
    toy_note(r, zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
    if (!r->err) {
        toy_note(r, train(&m, z, 0));
        toy_note(r, r->err ? r->err : zero_get_stats(z, &stats));
        zero_unwrap(&z);
    }
    r->hash = (uint64_t)stats.library_bytes;
    toy_free(&m);
}

/* zero_stats counts the memory of both communicators, if NCCL's version can tell. It is no part of the
 * plan. */
static void test_what_nccl_holds(void **state)
{
    static const int versions[] = {22809, 22907};
    struct stand_in_machine *m = stand_in_the_machine(), was = *m;
    struct toy_rank r[3];
    m->n_devices = 3;
    for (int v = 0; v < 2; v++) {
        nccl_stand_in_the_machine()->version = versions[v];
        nccl_stand_in_the_machine()->comm_bytes = NCCL_HOLDS;
        toy_ranks(3, asks_what_nccl_holds, NULL, r);
        for (int i = 0; i < 3; i++)
            if (r[i].err || r[i].wrong[0] || r[i].hash != (v ? 2 * NCCL_HOLDS : 0))
                fail_msg("rank %d: %llu bytes, code %d \"%s\" %s", i, (unsigned long long)r[i].hash, r[i].err,
                         r[i].text, r[i].wrong);
        nccl_stand_in_end();
        nothing_wrong();
    }
    *m = was;
}

/* --- a communicator of the program --- */

struct lending {
    ncclUniqueId id;
    bool blocks; /* the communicator is blocking */
    bool knows;  /* the configuration also has rank, world and rendezvous */
    int start_timeout_ms, absent,
        bad; /* absent: the rank that never calls zero_wrap; bad: the rank with a wrong table; -1: none */
};

static void trains_over_user_comm(struct toy_rank *r)
{
    const struct lending *l = r->arg;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm;
    struct toy m;
    zero_ctx *z;
    struct zero_stats stats;
    if (__lsan_disable)
        __lsan_disable(); /* a rank that does not come leaves memory behind */
    cudaSetDevice(r->rank);
    config.blocking = l->blocks;
    ncclResult_t res = ncclCommInitRankConfig(&comm, r->world, l->id, r->rank, &config), state = res;
    while (state == ncclInProgress)
        ncclCommGetAsyncError(comm, &state);
    struct zero_config cfg = ZERO_CONFIG_INIT;
    if (l->knows)
        cfg = toy_config(r, 2);
    cfg.stage = 2;
    cfg.device = ZERO_DEVICE_CUDA;
    cfg.optim.weight_decay = 0.1f;
    cfg.deterministic = 1;
    cfg.launch.nccl_comm = comm;
    cfg.launch.timeout_ms = 60000;
    cfg.launch.start_timeout_ms = l->start_timeout_ms;
    toy_make(&m);
    if (r->rank == l->bad)
        m.table[1].name = NULL;
    struct zero_place p = {.rank = -1};
    if (zero_find_place(&cfg, &p) || p.rank != r->rank || p.world != r->world || p.local_rank != r->rank)
        toy_wrong(r, "found: rank %d of %d, local %d", p.rank, p.world, p.local_rank);
    if (r->rank != l->absent) {
        int64_t began = toy_now_ms();
        toy_note(r, zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
        r->ms = toy_now_ms() - began;
    }
    if (!r->err && r->rank != l->absent) {
        toy_note(r, zero_get_stats(z, &stats));
        if (stats.place.rank != r->rank || stats.place.world != r->world || strcmp(stats.backend, "nccl"))
            toy_wrong(r, "rank %d of %d, backend %s", stats.place.rank, stats.place.world, stats.backend);
        toy_note(r, train(&m, z, 0));
        toy_note(r, r->err ? r->err : toy_hash(z, 2, &r->hash));
        zero_unwrap(&z);
    }
    toy_free(&m);
    if (l->absent < 0)
        ncclCommDestroy(comm);
    if (__lsan_enable)
        __lsan_enable();
}

static void over_user_comm(int world, struct lending l, struct toy_rank *r)
{
    assert_int_equal(ncclGetUniqueId(&l.id), 0);
    toy_ranks(world, trains_over_user_comm, &l, r);
    for (int i = 0; i < world; i++)
        if (r[i].wrong[0])
            fail_msg("rank %d: %s", i, r[i].wrong);
}

/* The communicator alone gives rank and world. */
static void test_user_comm(void **state)
{
    struct stand_in_machine *m = stand_in_the_machine(), was = *m;
    struct toy_rank r[4];
    m->n_devices = 4;
    for (int world = 1; world <= 4; world++) {
        uint64_t hash = 0;
        for (int k = 0; k < 3; k++) {
            over_user_comm(
                world,
                (struct lending){
                    .blocks = k != 1, .knows = k == 2, .start_timeout_ms = 60000, .absent = -1, .bad = -1},
                r);
            for (int i = 0; i < world; i++) {
                if (r[i].err)
                    fail_msg("world %d, rank %d: %d \"%s\"", world, i, r[i].err, r[i].text);
                hash = k || i ? hash : r[i].hash;
                assert_true(r[i].hash == hash);
            }
            nccl_stand_in_end();
            nothing_wrong();
        }
    }
    /* An error that only one rank finds is returned on all, with its message. */
    over_user_comm(3, (struct lending){.blocks = true, .start_timeout_ms = 60000, .absent = -1, .bad = 1}, r);
    for (int i = 0; i < 3; i++)
        if (r[i].err != ZERO_ERR_ARG || !strstr(r[i].text, "tensors[1]"))
            fail_msg("rank %d: %d \"%s\"", i, r[i].err, r[i].text);
    nccl_stand_in_end();
    nothing_wrong();
    /* A rank that does not come is named after the timeout. */
    over_user_comm(3, (struct lending){.blocks = true, .start_timeout_ms = 1500, .absent = 2, .bad = -1}, r);
    for (int i = 0; i < 2; i++)
        if (r[i].err != ZERO_ERR_TIMEOUT || !strstr(r[i].text, "came to zero_wrap"))
            fail_msg("rank %d: %d \"%s\"", i, r[i].err, r[i].text);
    nccl_stand_in_end();
    stand_in_end(NULL); /* ignores what the absent rank left behind */
    *m = was;
}

static void test_user_comm_wrongly(void **state)
{
    ncclConfig_t one = NCCL_CONFIG_INITIALIZER;
    struct zero_config cfg = config(1);
    ncclUniqueId id;
    ncclComm_t comm;
    assert_int_equal(ncclGetUniqueId(&id) || ncclCommInitRankConfig(&comm, 1, id, 0, &one), 0);
    struct {
        int device, backend, rank, world;
        const char *env, *part[2];
    } cases[] = {
        {ZERO_DEVICE_HOST, 0, 0, 0, NULL, {"nccl_comm is set but device is host", ""}},
        {ZERO_DEVICE_CUDA, ZERO_BACKEND_SELF, 0, 0, NULL, {"backend is self, but nccl_comm is set", ""}},
        {ZERO_DEVICE_CUDA,
         0,
         1,
         4,
         NULL,
         {"nccl_comm is rank 0 of 1, but", "the configuration say: rank 1 of 4"}},
        {ZERO_DEVICE_CUDA, 0, 0, 0, "2", {"nccl_comm is rank 0 of 1, but", "RANK is 0 and WORLD_SIZE is 2"}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct toy m;
        zero_ctx *z;
        cfg.launch.nccl_comm = comm;
        cfg.device = cases[i].device;
        cfg.launch.backend = cases[i].backend;
        cfg.launch.rank = cases[i].rank;
        cfg.launch.world = cases[i].world;
        if (cases[i].env)
            setenv("RANK", "0", 1), setenv("WORLD_SIZE", cases[i].env, 1);
        toy_make(&m);
        assert_int_equal(zero_wrap(&z, m.table, TOY_TENSORS, &cfg), ZERO_ERR_ARG);
        assert_true(!z && toy_untouched(&m));
        for (int k = 0; k < 2; k++)
            if (!strstr(zero_last_error(), cases[i].part[k]))
                fail_msg("\"%s\" lacks \"%s\"", zero_last_error(), cases[i].part[k]);
        /* zero_find_place does not check the backend. */
        int want = cases[i].backend ? 0 : ZERO_ERR_ARG;
        struct zero_place p;
        assert_int_equal(zero_find_place(&cfg, &p), want);
        assert_true(!want || strstr(zero_last_error(), cases[i].part[1]));
        toy_free(&m);
        unsetenv("RANK"), unsetenv("WORLD_SIZE");
    }
    ncclCommDestroy(comm);
    nccl_stand_in_end();
    nothing_wrong();
}

/* --- checkpoints --- */

/* Makes data of the program, which stays on the host. */
static void note_of(int step, uint32_t note[50000])
{
    for (uint32_t i = 0; i < 50000; i++)
        note[i] = i * 2654435761u + (uint32_t)step;
}

/* Trains for two steps, from the start (from is NULL) or from a checkpoint. Then saves to `to`, unless it is
 * NULL. */
static uint64_t stretch(int device, int stage, bool async, const char *from, const char *to, int first_step)
{
    struct zero_config cfg = config(stage);
    struct toy m;
    zero_ctx *z;
    uint64_t hash;
    cfg.device = device;
    cfg.checkpoint.save_async = async;
    toy_make(&m);
    assert_int_equal(zero_wrap(&z, m.table, TOY_TENSORS, &cfg), 0);
    if (from && zero_load(z, from))
        fail_msg("load on device %d: %s", device, zero_last_error());
    static uint32_t note[50000], found[50000];
    note_of(0, note);
    if (from && zero_read_data(z, 0, 0, sizeof found, found, NULL))
        fail_msg("read on device %d: %s", device, zero_last_error());
    if (from)
        assert_memory_equal(note, found, sizeof note);
    assert_int_equal(zero_set_data(z, ZERO_DATA_RANK, note, sizeof note), 0);
    assert_int_equal(train(&m, z, first_step), 0);
    if (to && (zero_save(z, to, NULL) || zero_save_wait(z, NULL)))
        fail_msg("save on device %d: %s", device, zero_last_error());
    assert_int_equal(toy_hash(z, 2, &hash), 0);
    assert_int_equal(zero_unwrap(&z), 0);
    toy_free(&m);
    return hash;
}

static void test_checkpoints_move(void **state)
{
    uint64_t half = stretch(ZERO_DEVICE_HOST, 0, false, NULL, NULL, 0), whole = 0;
    for (int k = 0; k < 8; k++) {
        char dir[] = "/tmp/zero-cuda-XXXXXX", remove[64];
        int from = k & 1 ? ZERO_DEVICE_CUDA : ZERO_DEVICE_HOST,
            to = k & 2 ? ZERO_DEVICE_CUDA : ZERO_DEVICE_HOST;
        assert_non_null(mkdtemp(dir));
        assert_true(stretch(from, k % 4, k & 4, NULL, dir, 0) == half);
        uint64_t end = stretch(to, 3 - k % 4, false, dir, NULL, 2);
        assert_true(k == 0 || end == whole);
        whole = end;
        snprintf(remove, sizeof remove, "rm -r %s", dir);
        assert_int_equal(system(remove), 0);
        nothing_wrong();
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_is_refused),    cmocka_unit_test(test_every_call_fails),
        cmocka_unit_test(test_kernels_of_a_step),  cmocka_unit_test(test_lost_gpu),
        cmocka_unit_test(test_host_does_not_wait), cmocka_unit_test(test_gradients_and_numbers),
        cmocka_unit_test(test_own_optimizer),      cmocka_unit_test(test_abort_that_sticks),
        cmocka_unit_test(test_what_nccl_holds),    cmocka_unit_test(test_user_comm),
        cmocka_unit_test(test_user_comm_wrongly),  cmocka_unit_test(test_checkpoints_move),
    };
    toy_wait = wait_for_default_stream;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
