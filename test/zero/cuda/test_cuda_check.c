/* SPDX-License-Identifier: Apache-2.0 */
/* test_cuda_check.c: check mode (cfg.debug.check) on the GPU stand-in: a model that reads or writes by a
 * pointer from an earlier bracket, and groups whose copies drift apart. */
#include "test/cmocka.h"
#include "test/stand_in/nccl_stand_in.h"
#include "test/stand_in/stand_in.h"
#include "test/zero/toy_net.h"

#include <cuda_runtime_api.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

static char lines[8192];

static void keep(void *arg, const char *line)
{
    size_t n = strlen(lines);
    snprintf(lines + n, sizeof lines - n, "%s\n", line);
}

static void wait_for_default_stream(void)
{
    assert_int_equal(cudaStreamSynchronize(NULL), cudaSuccess);
    stand_in_touch();
}

static zero_ctx *wrap(struct toy *m, int stage, int check)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    zero_ctx *z;
    cfg.device = ZERO_DEVICE_CUDA;
    cfg.stage = stage;
    cfg.debug.check = check;
    cfg.debug.log = keep;
    lines[0] = 0;
    toy_make(m);
    m->table[TOY_STACKED].flags |= ZERO_POINTER_PER_BEGIN; /* both layers are open at once below */
    if (zero_wrap(&z, m->table, TOY_TENSORS, &cfg))
        fail_msg("%s", zero_last_error());
    return z;
}

static void unwrap(struct toy *m, zero_ctx *z, int code)
{
    const char *text;
    assert_int_equal(zero_unwrap(&z), code);
    toy_free(m);
    if (stand_in_end(&text))
        fail_msg("%s", text);
}

static void bracket(zero_ctx *z, int unit, enum zero_phase phase, bool is_end)
{
    int err = is_end ? zero_end(z, unit, phase) : zero_begin(z, unit, phase);
    if (err)
        fail_msg("%s", zero_last_error());
    wait_for_default_stream();
}

static int step(struct toy *m, zero_ctx *z, int number, struct zero_step_info *info)
{
    int err = toy_forward(m, z, true);
    if (!err)
        err = toy_backward(m, z, true, number, 0);
    return err ? err : zero_step(z, 1e-2f, info);
}

/* Check mode does not change what a correct model computes. */
static void test_same_values(void **state)
{
    for (int stage = 0; stage <= 3; stage++) {
        uint64_t hash[2];
        for (int check = 0; check < 2; check++) {
            struct toy m;
            zero_ctx *z = wrap(&m, stage, check);
            for (int s = 0; s < 3; s++)
                assert_int_equal(step(&m, z, s, NULL), 0);
            assert_int_equal(toy_hash(z, 2, &hash[check]), 0);
            unwrap(&m, z, 0);
        }
        assert_true(hash[0] == hash[1]);
    }
}

/* In stream order, a pointer from an earlier bracket reads NaN, and never another unit's values, also while
 * other units are open. By then its own unit is elsewhere. */
static void test_stale_parameter(void **state)
{
    for (int stage = 2; stage <= 3; stage++) {
        struct toy m;
        struct zero_step_info info;
        zero_ctx *z = wrap(&m, stage, 1);
        bracket(z, 0, ZERO_FORWARD, false);
        const float *kept = m.param[0];
        assert_false(isnan(kept[0]));
        bracket(z, 0, ZERO_FORWARD, true);
        assert_true(isnan(kept[0]));
        for (int u = 1; u < TOY_UNITS; u++) {
            bracket(z, u, ZERO_FORWARD, false);
            assert_true(isnan(kept[0]));
            bracket(z, u, ZERO_FORWARD, true);
        }
        for (int u = TOY_UNITS; u-- > 0;) {
            bracket(z, u, ZERO_BACKWARD, false);
            toy_add_gradient(&m, u, 0, 0);
            if (u == 0) {
                assert_ptr_not_equal(kept, m.param[0]);
                ((float *)m.grad[0])[5] = kept[5]; /* as in a backward that kept the forward's pointer */
            }
            bracket(z, u, ZERO_BACKWARD, true);
        }
        assert_int_equal(zero_step(z, 1e-2f, &info), 0);
        assert_int_equal(info.skipped, 1);
        assert_non_null(strstr(lines, "check: step 1 was skipped, its gradient is not finite"));
        assert_non_null(strstr(lines, "a pointer that the model kept from an earlier bracket reads NaN"));
        unwrap(&m, z, 0);
    }
}

/* A write by a kept pointer is lost, and reported at the step or when the memory is used again. */
static void test_stale_write(void **state)
{
    for (int how = 0; how < 4; how++) {
        struct toy m;
        zero_ctx *z = wrap(&m, 2 + how % 2, 1);
        bool grad = how < 2;
        int err = toy_forward(&m, z, true);
        assert_int_equal(err, 0);
        for (int u = TOY_UNITS; u-- > 0;) {
            bracket(z, u, ZERO_BACKWARD, false);
            toy_add_gradient(&m, u, 0, 0);
            float *kept = grad ? m.grad[0] : m.param[0];
            bracket(z, u, ZERO_BACKWARD, true);
            if (u == 0)
                kept[7] = 1;
        }
        err = zero_step(z, 1e-2f, NULL);
        assert_int_equal(err, ZERO_ERR_ORDER);
        const char *says = grad ? "it wrote the gradient of tensor embedding (element 7) outside its bracket"
                                : "it wrote tensor embedding (element 7) outside its bracket";
        if (!strstr(zero_last_error(), says) || !strstr(zero_last_error(), "after zero_end of unit 0"))
            fail_msg("%s", zero_last_error());
        assert_non_null(strstr(lines, says));
        unwrap(&m, z, ZERO_ERR_ORDER);
    }
}

/* Each GPU allocation fails once. zero_wrap fails, and nothing is left. */
static void test_no_memory(void **state)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    cfg.device = ZERO_DEVICE_CUDA;
    cfg.stage = 3;
    cfg.debug.check = 1;
    cfg.stream = cudaStreamLegacy;
    int err = ZERO_ERR_NOMEM, k = 0;
    while (err) {
        struct toy m;
        zero_ctx *z;
        const char *text;
        toy_make(&m);
        stand_in_fail("cudaMalloc", ++k, cudaErrorMemoryAllocation, false);
        err = zero_wrap(&z, m.table, TOY_TENSORS, &cfg);
        assert_true(err == 0 || err == ZERO_ERR_NOMEM);
        assert_int_equal(zero_unwrap(&z), 0);
        toy_free(&m);
        if (stand_in_end(&text))
            fail_msg("allocation %d: %s", k, text);
    }
    assert_true(k > 15);
}

/* A NULL cfg.stream may be a mistake and is logged. A stream that is named is not. */
static void test_default_stream_is_reported(void **state)
{
    for (int named = 0; named < 2; named++) {
        struct toy m;
        struct zero_config cfg = ZERO_CONFIG_INIT;
        zero_ctx *z;
        cfg.device = ZERO_DEVICE_CUDA;
        cfg.debug.log = keep;
        cfg.stream = named ? cudaStreamLegacy : NULL;
        lines[0] = 0;
        toy_make(&m);
        assert_int_equal(zero_wrap(&z, m.table, TOY_TENSORS, &cfg), 0);
        assert_int_equal(step(&m, z, 0, NULL), 0);
        assert_int_equal(
            strstr(lines, "cfg.stream is NULL: the library works with CUDA's legacy default stream") != NULL,
            !named);
        unwrap(&m, z, 0);
    }
}

/* All units may be open at once. Each then has separate memory. */
static void test_all_open(void **state)
{
    struct toy m;
    zero_ctx *z = wrap(&m, 3, 1);
    for (int round = 0; round < 3; round++) {
        for (int u = 0; u < TOY_UNITS; u++)
            bracket(z, u, ZERO_FORWARD, false);
        for (int t = 0; t < TOY_TENSORS; t++)
            for (int s = 0; s < t; s++)
                assert_ptr_not_equal(m.param[t], m.param[s]);
        for (int u = TOY_UNITS; u-- > 0;)
            bracket(z, u, ZERO_FORWARD, true);
    }
    unwrap(&m, z, 0);
}

/* ---- ranks in two groups ---- */

struct drift {
    bool drifts;
    int stage;
};

struct drifting {
    const struct drift *d;
    int rank;
};

/* The result depends on the group, which is not one of the arguments. */
static int write_weights(void *arg, const struct zero_update *u)
{
    const struct drifting *a = arg;
    int byte = a->d->drifts && u->tensor_index == 0 && a->rank >= 2 ? 0x3d : 0x3c;
    return cudaMemsetAsync(u->master, byte, (size_t)u->n * sizeof *u->master, u->stream) ? 1 : 0;
}

static int step_on(struct toy *m, zero_ctx *z, cudaStream_t stream)
{
    int err = 0;
    for (int i = 0; !err && i < 2 * TOY_UNITS; i++) {
        int unit = i < TOY_UNITS ? i : 2 * TOY_UNITS - 1 - i;
        enum zero_phase phase = i < TOY_UNITS ? ZERO_FORWARD : ZERO_BACKWARD;
        err = zero_begin(z, unit, phase);
        if (!err && phase == ZERO_BACKWARD && unit == 0 && cudaMemsetAsync(m->grad[0], 0x3c, 32, stream))
            err = ZERO_ERR_SYSTEM;
        if (!err)
            err = zero_end(z, unit, phase);
    }
    return err ? err : zero_step(z, 1e-2f, NULL);
}

static void drifting_rank(struct toy_rank *r)
{
    const struct drift *d = r->arg;
    struct drifting a = {d, r->rank};
    cudaStream_t stream;
    cudaSetDevice(r->rank + 1); /* no rank uses GPU 0 */
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    struct zero_config cfg = toy_config(r, d->stage);
    cfg.device = ZERO_DEVICE_CUDA;
    cfg.stream = stream;
    cfg.debug.check = 1;
    cfg.optim.update = write_weights;
    cfg.optim.weight_decay = 0;
    cfg.optim.update_arg = &a;
    struct toy m;
    zero_ctx *z;
    int err = toy_open(r, &m, &z, &cfg);
    for (int i = 0; !err && i < 3; i++)
        err = step_on(&m, z, stream);
    toy_note(r, err);
    zero_unwrap(&z);
    cudaStreamDestroy(stream);
    toy_free(&m);
}

static void test_copies_that_drift_apart(void **state)
{
    struct stand_in_machine *machine = stand_in_the_machine(), was = *machine;
    machine->n_devices = TOY_HYBRID_WORLD + 1;
    for (int i = 0; i < 3; i++) {
        struct drift d = {.drifts = i > 0, .stage = i < 2 ? TOY_HSDP : TOY_HFSDP};
        bool found = d.drifts && d.stage == TOY_HSDP; /* HFSDP has only one copy of the masters */
        struct toy_rank r[TOY_HYBRID_WORLD];
        toy_ranks(TOY_HYBRID_WORLD, drifting_rank, &d, r);
        for (int k = 0; k < TOY_HYBRID_WORLD; k++)
            if (r[k].err != (found ? ZERO_ERR_MISMATCH : 0) ||
                (found && !strstr(r[k].text, "check: after step 1 rank 0 and rank 2 hold different copies of "
                                             "the same part of tensor embedding")))
                fail_msg("stage %d, drifts %d, rank %d: %d \"%s\"", d.stage, d.drifts, k, r[k].err,
                         r[k].text);
    }
    const char *text;
    nccl_stand_in_end();
    if (stand_in_end(&text))
        fail_msg("%s", text);
    *machine = was;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_values),
        cmocka_unit_test(test_stale_parameter),
        cmocka_unit_test(test_stale_write),
        cmocka_unit_test(test_all_open),
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_default_stream_is_reported),
        cmocka_unit_test(test_copies_that_drift_apart),
    };
    toy_wait = wait_for_default_stream;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
