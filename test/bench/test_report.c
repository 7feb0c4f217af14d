/* SPDX-License-Identifier: Apache-2.0 */
/* test_report.c: tests how zero-bench prints numbers. */
#include "bench/hybrids.h"
#include "bench/report/report.h"
#include "bench/report/stage_table.h"
#include "test/cmocka.h"

#include <math.h>
#include <string.h>
#include <unistd.h>

static void bytes_have_three_digits(void **state)
{
    static const struct {
        int64_t bytes;
        const char *text;
    } cases[] = {
        {0, "0 B"},
        {999, "999 B"},
        {1000, "1.00 kB"},
        {1875000000, "1.88 GB"},
        {16640625000, "16.6 GB"},
        {31406250000, "31.4 GB"},
        {120000000000, "120 GB"},
        {999499, "999 kB"},
        {999500, "1.00 MB"},
        {9995000, "10.0 MB"},
        {99950000, "100 MB"},
        {INT64_MAX, "9.22 EB"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        assert_string_equal(report_bytes(cases[i].bytes).text, cases[i].text);
}

static void the_median_leaves_out_the_first_two(void **state)
{
    struct report r = {.quiet = true};
    assert_true(isnan(report_ms_median(&r)));
    const double ms[] = {900, 800, 5, 1, 3, 100};
    const double median[] = {900, 850, 5, 3, 3, 4};
    for (size_t i = 0; i < sizeof ms / sizeof ms[0]; i++) {
        assert_int_equal(report_step(&r, &(struct report_step){.ms = ms[i]}, false), 0);
        assert_true(report_ms_median(&r) == median[i]);
    }
    for (int i = 0; i < 5000; i++) /* beyond the first allocation */
        assert_int_equal(report_step(&r, &(struct report_step){.ms = 7}, false), 0);
    assert_true(report_ms_median(&r) == 7);
    report_close(&r);
}

/* Writes to text what print writes to stdout. */
static void take_printed(void (*print)(void), char text[4096])
{
    FILE *file = tmpfile();
    int out = dup(STDOUT_FILENO);
    assert_non_null(file);
    fflush(stdout);
    assert_true(out >= 0 && dup2(fileno(file), STDOUT_FILENO) >= 0);
    print();
    fflush(stdout);
    dup2(out, STDOUT_FILENO);
    close(out);
    rewind(file);
    text[fread(text, 1, 4095, file)] = 0;
    fclose(file);
}

static void print_no_step(void)
{
    struct report r = {0};
    const struct report_summary s = {.device = "host", .hybrid = HYBRID_HSDP, .peak_tflops = 1};
    report_summary(&r, &s);
    report_close(&r);
}

/* As when a run ends before its first step does. */
static void no_step_is_no_nan(void **state)
{
    char text[4096];
    take_printed(print_no_step, text);
    assert_non_null(strstr(text, "no step was made"));
    assert_null(strstr(text, "nan"));
}

static void print_numbers(void)
{
    stage_table_numbers("percent", (const double[]){-0.0004, -0.0, 0.0004, -0.0006, -10}, 3, 5);
}

static void zero_has_no_sign(void **state)
{
    char text[4096];
    take_printed(print_numbers, text);
    assert_string_equal(text,
                        "percent                     0.000      0.000      0.000     -0.001    -10.000\n");
}

static void json_has_no_nan(void **state)
{
    json_t *nan = report_number(NAN), *infinite = report_number(INFINITY), *x = report_number(0.1);
    assert_true(json_is_null(nan));
    assert_true(json_is_null(infinite));
    assert_true(json_real_value(x) == 0.1);
    json_decref(nan);
    json_decref(infinite);
    json_decref(x);
}

/* A reader that checks its arguments and gives each element its own value. */
static const struct {
    int32_t tensor;
    int64_t first, n;
} pieces[] = {{0, 0, 600000}, {2, 0, 3}, {3, 0, 5}, {3, 5, 5}};
static void *gradient;
static int64_t next_first;
static int32_t next_piece, next_value = ZERO_VALUE_MASTER;

static int read_numbered(void *from, int32_t tensor, int32_t value, int64_t first, int64_t n, void *dst)
{
    if (next_first == pieces[next_piece].n) {
        next_first = 0;
        next_piece += next_value == ZERO_VALUE_STATE + 1;
        next_value = next_value == ZERO_VALUE_STATE + 1 ? ZERO_VALUE_MASTER : next_value + 1;
    }
    assert_int_equal(tensor, pieces[next_piece].tensor);
    assert_int_equal(value, next_value);
    assert_int_equal(first, pieces[next_piece].first + next_first);
    assert_in_range(n, 1, pieces[next_piece].n - next_first);
    next_first += n;
    for (int64_t i = 0; dst && i < n; i++)
        ((float *)dst)[i] = (float)(first + i) + 0.25f * (float)value + 0.5f * (float)(tensor - (tensor > 0));
    return 0;
}

static void the_state_is_hashed_in_order_and_whole(void **state)
{
    const struct zero_tensor tensors[] = {{.shape = {600, 1000}, .grad = &gradient},
                                          {.shape = {7}}, /* frozen, and left out */
                                          {.shape = {3}, .grad = &gradient},
                                          {.shape = {2, 5}, .grad = &gradient, .flags = ZERO_STACKED}};
    char hex[STATE_HASH_CHARS];
    assert_int_equal(state_hash(hex, true, tensors, 4, 2, read_numbered, NULL), 0);
    assert_int_equal(next_piece, 3);
    assert_int_equal(next_value, ZERO_VALUE_STATE + 1);
    assert_int_equal(next_first, 5);
    /* The hash of the same numbers by Python's hashlib. */
    assert_string_equal(hex, "56ad90a828ce2dddd8e75d8d6f2bf7dc5f3361172ea3a7abcb2139a71263024a");
}

static int read_nothing(void *from, int32_t tensor, int32_t value, int64_t first, int64_t n, void *dst)
{
    assert_null(dst);
    return -6;
}

static void a_failed_read_is_reported(void **state)
{
    const struct zero_tensor tensor = {.shape = {5}, .grad = &gradient};
    char hex[STATE_HASH_CHARS];
    assert_int_equal(state_hash(hex, false, &tensor, 1, 2, read_nothing, NULL), -6);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_have_three_digits),   cmocka_unit_test(the_median_leaves_out_the_first_two),
        cmocka_unit_test(json_has_no_nan),           cmocka_unit_test(no_step_is_no_nan),
        cmocka_unit_test(zero_has_no_sign),          cmocka_unit_test(the_state_is_hashed_in_order_and_whole),
        cmocka_unit_test(a_failed_read_is_reported),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
