/* SPDX-License-Identifier: Apache-2.0 */
/* test_scale_models.c: models have their published numbers of parameters, and a projected step is no shorter
 * than its parts. */
#include "bench/scale/scale.h"

#include "kernels/device.h"
#include "test/cmocka.h"

#include <stdlib.h>
#include <string.h>

/* Sizes are those of the checkpoints. MPT's are in llm-foundry's table of benchmarks, for rows of 2,048
 * tokens. */
static void models_have_published_sizes(void **state)
{
    static const struct {
        const char *name;
        int64_t n;
    } published[] = {
        {"gpt2-124M", 124439808},       {"gpt2-355M", 354823168},    {"gpt2-774M", 774030080},
        {"gpt2-1.5B", 1557611200},      {"llama-2-7B", 6738415616},  {"llama-2-13B", 13015864320},
        {"llama-2-70B", 68976648192},   {"llama-3-8B", 8030261248},  {"llama-3-70B", 70553706496},
        {"llama-3-405B", 405853388800}, {"mpt-125m", 125311488},     {"mpt-350m", 355985408},
        {"mpt-760m", 760470528},        {"mpt-1b", 1315950592},      {"mpt-3b", 2651837440},
        {"mpt-7b", 6658859008},         {"mpt-13b", 12853954560},    {"mpt-30b", 29975214080},
        {"mpt-70b", 64862437376},       {"qwen2.5-0.5B", 494032768}, {"qwen2.5-1.5B", 1543714304},
        {"qwen2.5-3B", 3085938688},     {"qwen2.5-7B", 7615616512},  {"qwen2.5-14B", 14770033664},
    };
    size_t n = 0;
    for (const char *p = scale_model_names(); p; p = strchr(p + 1, ','))
        n++;
    assert_int_equal(n, sizeof published / sizeof *published);
    for (size_t i = 0; i < n; i++) {
        const struct scale_model *m = scale_model_of(published[i].name);
        assert_non_null(m);
        int64_t is = scale_n_params(m, m->context);
        if (is != published[i].n)
            fail_msg("%s has %lld parameters", m->name, (long long)is);
    }
    assert_null(scale_model_of("llama"));
}

/* Whoever asks again gets the list, not two of them. */
static void names_are_listed_once(void **state)
{
    for (int i = 0; i < 2; i++) {
        assert_string_equal(scale_machine_names(), "a100-40, a100-80, h100, h200, b200");
        const char *models = scale_model_names(), *last = strstr(models, "mpt-70b");
        assert_true(last && strlen(last) == strlen("mpt-70b"));
        assert_ptr_equal(strstr(models, "gpt2-124M"), models);
    }
}

/* 6 for each weight that a token is multiplied by, and 12 L C T for attention. */
static void operations_are_those_of_mfu(void **state)
{
    const struct scale_model *m = scale_model_of("llama-3-8B");
    double matrices = 8030261248.0 - 128256.0 * 4096 - 65 * 4096.0; /* less the embedding and the norms */
    assert_true(scale_flop_per_token(m, 1000) == 6 * matrices + 12 * 32 * 4096 * 1000.0);
    m = scale_model_of("gpt2-124M");
    matrices = 12.0 * 12 * 768 * 768 + 50257 * 768.0; /* the head is the embedding, and counts once */
    assert_true(scale_flop_per_token(m, 1024) == 6 * matrices + 12 * 12 * 768 * 1024.0);
}

static struct scale_job a_job(const char *model, int64_t world)
{
    const struct scale_model *m = scale_model_of(model);
    return (struct scale_job){.model = m,
                              .machine = scale_machine_of("a100-80"),
                              .world = world,
                              .batch = 1,
                              .context = m->context,
                              .accum = 1,
                              .stage = 3,
                              .prefetch = 2,
                              .dtype = ZERO_BF16,
                              .compute_fraction = 1,
                              .link_fraction = 1};
}

/* Compares a step with the lower bounds of its compute, its communication and its recomputation. */
static void a_step_is_no_shorter_than_its_parts(void **state)
{
    struct scale_job j = a_job("gpt2-355M", 64);
    struct scale_result r, alone, plain, again;
    double flop = scale_flop_per_token(j.model, j.context) * (double)j.context;
    assert_int_equal(scale_run(&j, &r), 0);
    assert_true(r.step_s > flop / j.machine->flop_per_s && r.mfu < 1 && r.exposed_s > 0);
    assert_true(r.step_s > (double)r.received_bytes / j.machine->near_bytes_per_s);
    j.world = 1;
    assert_int_equal(scale_run(&j, &alone), 0);
    assert_true(alone.exposed_s == 0 && alone.received_bytes == 0 && alone.memory_bytes > r.memory_bytes);
    j.batch = 8;
    assert_int_equal(scale_run(&j, &plain), 0);
    j.recompute = true;
    assert_int_equal(scale_run(&j, &again), 0);
    /* Recomputing adds a third to all compute but the head's. The optimizer's time stays the same. */
    double blocks = flop - 6.0 * 50257 * 1024 * (double)j.context;
    double more = 8 * blocks / 3 / j.machine->flop_per_s;
    assert_true(again.step_s - plain.step_s > more * 0.999 && again.step_s - plain.step_s < more * 1.001);
}

/* Up to where the clock's nanoseconds are counted, time grows with the tokens; beyond, nothing is said. */
static void too_much_compute_is_refused(void **state)
{
    struct scale_job j = a_job("gpt2-124M", 8);
    struct scale_result r, fewer;
    j.context = 1000000;
    j.batch = 10000;
    assert_int_equal(scale_run(&j, &fewer), 0);
    j.batch = 300000;
    assert_int_equal(scale_run(&j, &r), 0);
    assert_true(r.step_s > 1e8 && r.step_s > 29 * fewer.step_s && r.step_s < 31 * fewer.step_s && r.mfu <= 1);
    j.compute_fraction = 0.1;
    assert_int_equal(scale_run(&j, &r), ZERO_ERR_ARG);
    for (const char *const *name = (const char *const[]){"--batch", "--context", "--compute", NULL}; *name;
         name++)
        assert_non_null(strstr(zr_error_text(), *name));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(models_have_published_sizes), cmocka_unit_test(names_are_listed_once),
        cmocka_unit_test(operations_are_those_of_mfu), cmocka_unit_test(a_step_is_no_shorter_than_its_parts),
        cmocka_unit_test(too_much_compute_is_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
