/* SPDX-License-Identifier: Apache-2.0 */
/* test_scale_fit.c: tests that models have their published numbers of parameters. Also tests the fit of
 * measurements: values that a projection was made with are found again. */
#include "bench/scale.h"

#include "kernels/device.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

/* From the checkpoints. MPT's is from llm-foundry's table of benchmarks, with sequences of 2,048 tokens. */
static void models_have_published_sizes(void **state)
{
    (void)state;
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

/* Asking twice gives the list once. */
static void names_are_listed_once(void **state)
{
    (void)state;
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
    (void)state;
    const struct scale_model *m = scale_model_of("llama-3-8B");
    double matrices = 8030261248.0 - 128256.0 * 4096 - 65 * 4096.0; /* without the embedding and the norms */
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
                              .bf16 = true,
                              .compute_fraction = 1,
                              .link_fraction = 1};
}

/* Lower bounds of each part of a step. */
static void a_step_is_no_shorter_than_its_parts(void **state)
{
    (void)state;
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
    /* A third more for everything but the head; the optimizer as before. */
    double blocks = flop - 6.0 * 50257 * 1024 * (double)j.context;
    double more = 8 * blocks / 3 / j.machine->flop_per_s;
    assert_true(again.step_s - plain.step_s > more * 0.999 && again.step_s - plain.step_s < more * 1.001);
}

/* Time grows with the tokens as long as the clock can count its nanoseconds. Beyond that there is no
 * answer. */
static void too_much_compute_is_refused(void **state)
{
    (void)state;
    struct scale_job j = a_job("gpt2-124M", 8);
    struct scale_result r, fewer;
    j.context = 1000000;
    j.batch = 10000;
    assert_int_equal(scale_run(&j, &fewer), 0);
    j.batch = 300000;
    assert_int_equal(scale_run(&j, &r), 0);
    assert_true(r.step_s > 1e8 && r.step_s > 29 * fewer.step_s && r.step_s < 31 * fewer.step_s && r.mfu <= 1);
    j.compute_fraction = 0.1;
    double step_s;
    assert_int_equal(scale_run(&j, &r), ZR_ERR_ARG);
    assert_int_equal(scale_step(&j, &step_s), ZR_ERR_ARG);
    for (const char *const *name = (const char *const[]){"--batch", "--context", "--compute", NULL}; *name;
         name++)
        assert_non_null(strstr(zr_error_text(), *name));
}

/* ---- measurements ---- */

static char *written(const char *text)
{
    static char path[] = "/tmp/zero-test-scale-XXXXXX";
    strcpy(path + sizeof path - 7, "XXXXXX");
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    close(fd);
    return path;
}

static int read_text(const char *text, struct scale_rows *out, char *why, size_t n)
{
    struct scale_job like = a_job("gpt2-124M", 1);
    const char *path = written(text);
    int err = scale_rows_read(path, &like, out, why, n);
    unlink(path);
    return err;
}

static void rows_are_read(void **state)
{
    (void)state;
    struct scale_rows r;
    char why[SCALE_TEXT_BYTES];
    assert_int_equal(
        read_text("{\"rows\": [{\"world\": 8, \"tokens_per_s\": 800},"
                  " {\"world\": 16, \"model\": \"llama-3-8B\", \"machine\": \"h100\", \"batch\": 3,"
                  "  \"context\": 512, \"accum\": 2, \"recompute\": true, \"mfu_percent\": 50,"
                  "  \"held_out\": true, \"n_params\": 8030261248}]}",
                  &r, why, sizeof why),
        0);
    assert_int_equal(r.n, 2);
    assert_true(r.row[0].tokens_per_s_per_gpu == 100 && !r.row[0].held_out);
    assert_string_equal(r.row[0].job.model->name, "gpt2-124M");
    const struct scale_job *j = &r.row[1].job;
    assert_true(j->world == 16 && j->batch == 3 && j->context == 512 && j->accum == 2 && j->recompute);
    assert_string_equal(j->machine->name, "h100");
    assert_true(r.row[1].held_out &&
                r.row[1].tokens_per_s_per_gpu == 0.5 * 989.5e12 / scale_flop_per_token(j->model, 512));
    scale_rows_free(&r);
}

/* For rows that name their model and rows that do not. */
static void context_is_the_rows_or_given_or_the_models(void **state)
{
    (void)state;
    const char *path =
        written("{\"rows\": [{\"world\": 8, \"tokens_per_s\": 1},"
                " {\"world\": 8, \"model\": \"llama-3-8B\", \"tokens_per_s\": 1},"
                " {\"world\": 8, \"model\": \"llama-3-8B\", \"context\": 100, \"tokens_per_s\": 1}]}");
    static const int64_t given[] = {0, 512}, is[2][3] = {{1024, 8192, 100}, {512, 512, 100}};
    for (int k = 0; k < 2; k++) {
        struct scale_job like = a_job("gpt2-124M", 1);
        struct scale_rows r;
        char why[SCALE_TEXT_BYTES];
        like.context = given[k];
        assert_int_equal(scale_rows_read(path, &like, &r, why, sizeof why), 0);
        for (int i = 0; i < 3; i++)
            assert_int_equal(r.row[i].job.context, is[k][i]);
        scale_rows_free(&r);
    }
    unlink(path);
}

static void bad_rows_are_named(void **state)
{
    (void)state;
    static const char *const bad[][2] = {
        {"", "line 1"},
        {"{}", "it has no rows"},
        {"{\"rows\": []}", "it has no rows"},
        {"{\"rows\": [1]}", "row 1: it is not an object"},
        {"{\"rows\": [{\"tokens_per_s\": 1}]}", "row 1: it has no \"world\""},
        {"{\"rows\": [{\"world\": 0, \"tokens_per_s\": 1}]}", "row 1: \"world\" is not a whole number"},
        /* an int cuts this to 8 */
        {"{\"rows\": [{\"world\": 4294967304, \"tokens_per_s\": 1}]}",
         "row 1: \"world\" is not a whole number from 1 to 16384"},
        {"{\"rows\": [{\"world\": 8, \"batch\": 1000001, \"tokens_per_s\": 1}]}",
         "\"batch\" is not a whole number from 1 to 1000000"},
        {"{\"rows\": [{\"world\": 8, \"context\": 10000001, \"tokens_per_s\": 1}]}",
         "\"context\" is not a whole number from 1 to 10000000"},
        {"{\"rows\": [{\"world\": 8, \"accum\": 257, \"tokens_per_s\": 1}]}",
         "\"accum\" is not a whole number from 1 to 256"},
        {"{\"rows\": [{\"world\": 1, \"tokens_per_s\": 1}, {\"world\": 1}]}",
         "row 2: it has no \"tokens_per_s_per_gpu\""},
        {"{\"rows\": [{\"world\": 1, \"tokens_per_s\": -1}]}",
         "row 1: \"tokens_per_s\" is not a number above 0"},
        {"{\"rows\": [{\"world\": 1, \"tokens_per_s\": 1, \"mfu_percent\": \"50\"}]}",
         "row 1: \"mfu_percent\" is not a number above 0"},
        {"{\"rows\": [{\"world\": 1, \"model\": \"gpt5\", \"tokens_per_s\": 1}]}", "mpt-30b, mpt-70b"},
        {"{\"rows\": [{\"world\": 1, \"model\": null, \"tokens_per_s\": 1}]}",
         "row 1: \"model\" is not gpt2-124M,"},
        {"{\"rows\": [{\"world\": 1, \"machine\": 7, \"tokens_per_s\": 1}]}",
         "row 1: \"machine\" is not a100-40,"},
        {"{\"rows\": [{\"world\": 1, \"recompute\": 1, \"tokens_per_s\": 1}]}",
         "\"recompute\" is neither true nor false"},
        {"{\"rows\": [{\"world\": 1, \"recompte\": true, \"tokens_per_s\": 1}]}",
         "row 1: \"recompte\" is no field of a row"},
        {"{\"rows\": [{\"world\": 1, \"heldout\": true, \"tokens_per_s\": 1}]}",
         "row 1: \"heldout\" is no field of a row"},
        {"{\"rows\": [{\"world\": 1, \"n_params\": 5, \"tokens_per_s\": 1}]}", "gpt2-124M has 124439808"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct scale_rows r;
        char why[SCALE_TEXT_BYTES] = "";
        assert_int_equal(read_text(bad[i][0], &r, why, sizeof why), -1);
        assert_null(r.row);
        if (!strstr(why, bad[i][1]))
            fail_msg("%s: %s", bad[i][0], why);
    }
    struct scale_job like = a_job("gpt2-124M", 1);
    struct scale_rows r;
    char why[SCALE_TEXT_BYTES];
    assert_int_equal(scale_rows_read("/nonexistent/rows", &like, &r, why, sizeof why), -1);
    assert_non_null(strstr(why, "/nonexistent/rows"));
}

/* Two models with a fraction each, on links that are exposed. */
static void what_was_projected_is_found_again(void **state)
{
    (void)state;
    static const struct {
        const char *model;
        int64_t world;
        double compute;
    } jobs[] = {
        {"gpt2-124M", 8, 0.5}, {"gpt2-124M", 128, 0.5}, {"gpt2-355M", 64, 0.4}, {"gpt2-355M", 512, 0.4}};
    enum { N = 4 };
    const double links = 0.3;
    struct scale_row row[N];
    struct scale_rows r = {.row = row, .n = N};
    for (int i = 0; i < N; i++) {
        double step_s;
        row[i] = (struct scale_row){.job = a_job(jobs[i].model, jobs[i].world), .held_out = i == N - 1};
        row[i].job.compute_fraction = jobs[i].compute;
        row[i].job.link_fraction = links;
        assert_int_equal(scale_step(&row[i].job, &step_s), 0);
        row[i].tokens_per_s_per_gpu = (double)row[i].job.context / step_s;
        row[i].job.compute_fraction = row[i].job.link_fraction = 1;
    }
    assert_int_equal(scale_fit(&r), 0);
    assert_int_equal(r.n_fitted, 3);
    for (int i = 0; i < N; i++) {
        double off = row[i].predicted / row[i].tokens_per_s_per_gpu - 1;
        if (off < -0.03 || off > 0.03)
            fail_msg("row %d is predicted %+.1f %% off, with %g of compute and %g of links", i, off * 100,
                     row[i].job.compute_fraction, row[i].job.link_fraction);
        assert_true(row[i].job.link_fraction > 0.25 && row[i].job.link_fraction < 0.35);
    }
    for (int i = 0; i < N; i++)
        row[i].held_out = true;
    assert_int_equal(scale_fit(&r), ZR_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), "held out"));
}

/* A pair counts once in the mean, however many rows it has. */
static void a_pair_without_rows_gets_the_mean_of_pairs(void **state)
{
    (void)state;
    static const struct {
        const char *model;
        double mfu;
        bool held_out;
    } of[] = {{"gpt2-124M", 0.2, false},
              {"gpt2-124M", 0.2, false},
              {"gpt2-355M", 0.6, false},
              {"gpt2-774M", 0.4, true}};
    enum { N = 4 };
    struct scale_row row[N];
    struct scale_rows r = {.row = row, .n = N};
    for (int i = 0; i < N; i++) {
        row[i] = (struct scale_row){.job = a_job(of[i].model, 1), .held_out = of[i].held_out};
        const struct scale_job *j = &row[i].job;
        row[i].tokens_per_s_per_gpu =
            of[i].mfu * j->machine->flop_per_s / scale_flop_per_token(j->model, j->context);
    }
    assert_int_equal(scale_fit(&r), 0);
    double first = row[0].job.compute_fraction, other = row[2].job.compute_fraction;
    assert_true(row[1].job.compute_fraction == first && first < other / 2);
    assert_true(row[3].job.compute_fraction == (first + other) / 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(models_have_published_sizes),
                                       cmocka_unit_test(names_are_listed_once),
                                       cmocka_unit_test(operations_are_those_of_mfu),
                                       cmocka_unit_test(a_step_is_no_shorter_than_its_parts),
                                       cmocka_unit_test(too_much_compute_is_refused),
                                       cmocka_unit_test(rows_are_read),
                                       cmocka_unit_test(context_is_the_rows_or_given_or_the_models),
                                       cmocka_unit_test(bad_rows_are_named),
                                       cmocka_unit_test(what_was_projected_is_found_again),
                                       cmocka_unit_test(a_pair_without_rows_gets_the_mean_of_pairs)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
