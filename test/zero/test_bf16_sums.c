/* SPDX-License-Identifier: Apache-2.0 */
/* test_bf16_sums.c: gradient sums in bf16: their memory, the values that are summed and read, and how sums of
 * several micro-batches are rounded. test_parity.c tests that layouts do not change the bits. */
#include "test/cmocka.h"
#include "test/stand_in/half.h"
#include "test/zero/gpt2_table.h"
#include "test/zero/toy_net.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- memory ---- */

static struct zero_plan_info plan_gpt2(int stage, int world, int32_t sum_dtype, int32_t masters,
                                       int32_t moments)
{
    struct zero_tensor t[N_GPT];
    struct zero_plan_info info;
    struct zero_config cfg = ZERO_CONFIG_INIT;
    cfg.stage = stage;
    cfg.launch.world = world;
    cfg.memory.grad_sum_dtype = sum_dtype;
    cfg.optim.masters = masters;
    cfg.optim.moments = moments;
    for (int32_t i = gpt2_describe(t) - 1; i >= 0; i--)
        t[i].dtype = ZERO_BF16;
    assert_int_equal(zero_plan(t, N_GPT, &cfg, &info), 0);
    assert_int_equal(info.n_params, 124439808);
    return info;
}

/* On one rank that adds up nothing, the gradient is the sum. So AdamW takes as many bytes per parameter as
 * weights, gradients, masters and moments have. fp32 sums are 4 bytes more. */
static void one_rank_has_no_second_copy(void **state)
{
    static const struct {
        int32_t masters, moments;
        double bytes;
    } ways[] = {{ZERO_MASTERS_F32, ZERO_MOMENTS_F32, 16},
                {ZERO_MASTERS_REMAINDER, ZERO_MOMENTS_F32, 14},
                {ZERO_MASTERS_REMAINDER, ZERO_MOMENTS_BF16, 10},
                {ZERO_MASTERS_REMAINDER, ZERO_MOMENTS_Q8, 8.125},
                {ZERO_MASTERS_NONE, ZERO_MOMENTS_BF16, 8}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        struct zero_plan_info narrow = plan_gpt2(0, 1, ZERO_BF16, ways[i].masters, ways[i].moments),
                              wide = plan_gpt2(0, 1, ZERO_F32, ways[i].masters, ways[i].moments);
        double least = ways[i].bytes * (double)narrow.n_params;
        if ((double)narrow.bytes.total < least || (double)narrow.bytes.total > least + 1e6)
            fail_msg("way %d: %lld bytes, not %.0f", (int)i, (long long)narrow.bytes.total, least);
        assert_int_equal(narrow.bytes.grad_shards + narrow.bytes.grad_sums, 0);
        const int64_t less = 4 * narrow.n_params;
        assert_true(llabs(wide.bytes.total - narrow.bytes.total - less) < 4096); /* whole pages */
    }
}

/* On several ranks one unit's fp32 sums have memory too. */
static void shards_have_bf16_sums(void **state)
{
    struct zero_plan_info narrow = plan_gpt2(3, 4, ZERO_BF16, ZERO_MASTERS_F32, ZERO_MOMENTS_F32),
                          wide = plan_gpt2(3, 4, ZERO_F32, ZERO_MASTERS_F32, ZERO_MOMENTS_F32);
    assert_int_equal(2 * narrow.bytes.grad_shards, wide.bytes.grad_shards);
    assert_true(narrow.bytes.grad_sums >= INT64_C(4) * V * C / 4 && wide.bytes.grad_sums == 0);
    assert_true(narrow.bytes.grad_sums <= INT64_C(4) * (V + T + 2) * C / 4 + 4096);
    const int64_t less = narrow.bytes.grad_shards - narrow.bytes.grad_sums;
    assert_true(llabs(wide.bytes.total - narrow.bytes.total - less) < 4096);
}

/* ---- values ---- */

enum { N = 1 << 14, ACCUM = 64 };

struct model {
    void *param, *grad, *own;
    struct zero_tensor table;
};

static int open(struct model *m, int accum, int stage, bool deterministic, zero_ctx **z)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    cfg.stage = stage;
    cfg.launch.world = 1;
    cfg.grad_accum_steps = accum;
    cfg.grad_sum = 1;
    cfg.deterministic = deterministic;
    cfg.memory.grad_sum_dtype = ZERO_BF16;
    m->own = m->param = calloc(N, sizeof(uint16_t));
    assert_non_null(m->own);
    m->table = (struct zero_tensor){
        .name = "w", .param = &m->param, .grad = &m->grad, .shape = {N}, .dtype = ZERO_BF16};
    return zero_wrap(z, &m->table, 1, &cfg);
}

static void micro_batch(struct model *m, zero_ctx *z, float gradient)
{
    assert_int_equal(zero_begin(z, 0, ZERO_FORWARD), 0);
    assert_int_equal(zero_end(z, 0, ZERO_FORWARD), 0);
    assert_int_equal(zero_begin(z, 0, ZERO_BACKWARD), 0);
    for (int i = 0; i < N; i++)
        ((uint16_t *)m->grad)[i] = bf16_from_float(gradient);
    assert_int_equal(zero_end(z, 0, ZERO_BACKWARD), 0);
}

/* Sums 1 and many numbers that are too small to change a bf16 number near 1, were it rounded to nearest. */
static void sum_small_ones(struct model *m, zero_ctx *z, float *sum)
{
    for (int k = 0; k < ACCUM; k++)
        micro_batch(m, z, k ? 0x1p-10f : 1);
    assert_int_equal(zero_read(z, 0, ZERO_VALUE_GRAD, 0, N, sum), 0);
}

/* Without a bias, the mean of many elements is that of the exact sum. Their spread is that of independent
 * roundings, of one contribution after the other. If a step used the same noise for each contribution, some
 * elements would go up each time. */
static void random_sums_have_no_bias(void **state)
{
    static float sum[N], last[N];
    struct model m;
    zero_ctx *z = NULL;
    assert_int_equal(open(&m, ACCUM, 0, false, &z), 0);
    for (int step = 0; step < 3; step++) {
        double mean = 0, square = 0, n = 0;
        const double exact = 1 + (ACCUM - 1) * 0x1p-10, spread = 0x1p-7 * sqrt((ACCUM - 1) * 0.125 * 0.875);
        sum_small_ones(&m, z, sum);
        for (int i = 0; i < N; i++) {
            mean += (double)sum[i] / N;
            square += ((double)sum[i] - exact) * ((double)sum[i] - exact) / N;
            n += sum[i] != last[i];
        }
        if (fabs(mean - exact) > 5 * spread / sqrt(N) || fabs(sqrt(square) - spread) > 0.1 * spread)
            fail_msg("step %d: mean %.9g of %.9g, spread %.9g of %.9g", step, mean, exact, sqrt(square),
                     spread);
        assert_true(n > N / 2); /* each step has other noise */
        memcpy(last, sum, sizeof last);
        assert_int_equal(zero_step(z, 1e-3f, NULL), 0);
    }
    zero_unwrap(&z);
    free(m.own);
}

/* Sums of a tree that are still apart at the end of a step are folded. Here the last fold adds x to 2x, and
 * the result to 4x. Both sums lie in the middle between two bf16 numbers, and the second one does so only if
 * the first was rounded down. If both had the same noise, 7x would be too small in the mean. */
static void folds_have_different_noise(void **state)
{
    static float sum[N];
    struct model m;
    zero_ctx *z = NULL;
    double mean = 0, norm;
    const double x = 1 + 0x1p-7, spread = 0x1p-5 * sqrt(3.0 / 16);
    assert_int_equal(open(&m, 7, 0, true, &z), 0);
    for (int k = 0; k < 7; k++)
        micro_batch(&m, z, (float)x);
    assert_int_equal(zero_norm(z, &norm), 0);
    assert_int_equal(zero_read(z, 0, ZERO_VALUE_GRAD, 0, N, sum), 0);
    for (int i = 0; i < N; i++)
        mean += (double)sum[i] / N;
    if (fabs(mean - 7 * x) > 5 * spread / sqrt(N))
        fail_msg("mean %.9g of %.9g", mean, 7 * x);
    assert_int_equal(zero_drop(z), 0);
    zero_unwrap(&z);
    free(m.own);
}

/* Sums that are exact in bf16 are not changed. A step that is dropped and made again has the same bits. */
static void a_sum_is_what_was_added(void **state)
{
    static float sum[N], again[N];
    for (int accum = 1; accum <= 8; accum *= 2)
        for (int stage = 0; stage <= 3; stage++) {
            struct model m;
            zero_ctx *z = NULL;
            double norm;
            assert_int_equal(open(&m, accum, stage, true, &z), 0);
            for (int k = 0; k < accum; k++)
                micro_batch(&m, z, ldexpf(1, -k));
            assert_int_equal(zero_norm(z, &norm), 0);
            assert_int_equal(zero_read(z, 0, ZERO_VALUE_GRAD, 0, N, sum), 0);
            const float all = 2 - ldexpf(1, 1 - accum); /* has 8 bits, so it is exact in any order */
            for (int i = 0; i < N; i++)
                assert_true(sum[i] == all);
            assert_true(fabs(norm - (double)all * sqrt(N)) < 1e-6 * norm);
            assert_int_equal(zero_drop(z), 0);
            for (int k = 0; k < accum; k++)
                micro_batch(&m, z, k ? 0x1p-10f : 1);
            assert_int_equal(zero_read(z, 0, ZERO_VALUE_GRAD, 0, N, sum), 0);
            assert_int_equal(zero_drop(z), 0);
            for (int k = 0; k < accum; k++)
                micro_batch(&m, z, k ? 0x1p-10f : 1);
            assert_int_equal(zero_read(z, 0, ZERO_VALUE_GRAD, 0, N, again), 0);
            assert_memory_equal(sum, again, sizeof sum);
            zero_unwrap(&z);
            free(m.own);
        }
}

/* ---- what is refused ---- */

static int keep(void *arg, const struct zero_update *u)
{
    return 0;
}

/* optim.update takes fp32 gradients. So bf16 sums of bf16 tensors are refused with it. */
static void own_updates_take_fp32(void **state)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    struct zero_plan_info info;
    static void *nowhere;
    struct zero_tensor t = {
        .name = "w", .param = &nowhere, .grad = &nowhere, .shape = {N}, .dtype = ZERO_BF16};
    cfg.launch.world = 1;
    cfg.optim.update = keep;
    cfg.optim.weight_decay = 0;
    cfg.memory.grad_sum_dtype = ZERO_BF16;
    assert_int_equal(zero_plan(&t, 1, &cfg, &info), ZERO_ERR_ARG);
    assert_non_null(strstr(zero_last_error(), "tensors[0] (w): grad_sum_dtype is bf16"));
    t.dtype = ZERO_F32; /* its sums are fp32 */
    assert_int_equal(zero_plan(&t, 1, &cfg, &info), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_rank_has_no_second_copy), cmocka_unit_test(shards_have_bf16_sums),
        cmocka_unit_test(random_sums_have_no_bias),    cmocka_unit_test(folds_have_different_noise),
        cmocka_unit_test(a_sum_is_what_was_added),     cmocka_unit_test(own_updates_take_fp32),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
