/* SPDX-License-Identifier: Apache-2.0 */
/* Values of zero-bench comm: what is right passes, and each way to be wrong is counted. */
#include "bench/comm/values.h"
#include "test/cmocka.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { N = 1000, MOST = 9 };

static const struct comm_source source[MOST] = {{7, 0}, {7, 3}, {7, 1}, {7, 2}, {7, 8},
                                                {7, 5}, {7, 4}, {7, 7}, {7, 6}};

static void test_gathered(void **state)
{
    for (int d = 0; d < 2; d++) {
        enum zero_dtype dtype = d ? ZERO_BF16 : ZERO_F32;
        unsigned char at[N * 4], *last = at + (N - 1) * zr_dtype_bytes(dtype);
        comm_values_fill(at, dtype, source[1], 40, N);
        assert_int_equal(comm_values_differ(at, dtype, source[1], 40, N), 0);
        assert_int_equal(comm_values_differ(at + 10 * zr_dtype_bytes(dtype), dtype, source[1], 50, N - 10),
                         0);
        *last ^= 1; /* one bit */
        assert_int_equal(comm_values_differ(at, dtype, source[1], 40, N), 1);
        *last ^= 1;
        /* another rank's, place's or operation's values: nearly all differ */
        const struct comm_source other = {8, 3};
        assert_in_range(comm_values_differ(at, dtype, source[2], 40, N), N * 9 / 10, N);
        assert_in_range(comm_values_differ(at, dtype, source[1], 41, N), N * 9 / 10, N);
        assert_in_range(comm_values_differ(at, dtype, other, 40, N), N * 9 / 10, N);
        memset(at, 0xff, sizeof at);
        assert_int_equal(comm_values_differ(at, dtype, source[1], 40, N), N);
    }
}

/* Sums n sources from element 40 on, with the host's kernels. */
static void sum_up(float *to, const struct comm_source *s, int n, enum zero_dtype dtype)
{
    static float in[MOST][N];
    const void *at[MOST];
    for (int k = 0; k < n; k++) {
        comm_values_fill(in[k], dtype, s[k], 40, N);
        at[k] = in[k];
    }
    zr_host_kernels_best()->sum_tree(to, at, n, dtype, N, false);
}

static void test_sums(void **state)
{
    for (int d = 0; d < 2; d++)
        for (int n = 1; n <= MOST; n++) {
            enum zero_dtype dtype = d ? ZERO_BF16 : ZERO_F32;
            const struct comm_sum exact = {source, n, dtype, true}, near = {source, n, dtype, false};
            float sum[N];
            sum_up(sum, source, n, dtype);
            assert_int_equal(comm_values_sum_differs(sum, &exact, 40, N), 0);
            assert_int_equal(comm_values_sum_differs(sum, &near, 40, N), 0);
            sum[5] += 0.25f; /* more than rounding can change in a sum of 9 numbers below 1 */
            assert_int_equal(comm_values_sum_differs(sum, &exact, 40, N), 1);
            assert_int_equal(comm_values_sum_differs(sum, &near, 40, N), 1);
            memset(sum, 0xff, sizeof sum); /* NaNs */
            assert_int_equal(comm_values_sum_differs(sum, &exact, 40, N), N);
            assert_int_equal(comm_values_sum_differs(sum, &near, 40, N), N);
        }
}

/* The same summands in another order are a sum, but not the fixed tree's. With one summand twice the
 * result is no sum. */
static void test_orders(void **state)
{
    const struct comm_source swapped[] = {source[1], source[2], source[0], source[3]},
                             twice[] = {source[0], source[1], source[2], source[2]};
    for (int d = 0; d < 2; d++) {
        enum zero_dtype dtype = d ? ZERO_BF16 : ZERO_F32;
        const struct comm_sum exact = {source, 4, dtype, true}, near = {source, 4, dtype, false};
        float sum[N];
        sum_up(sum, swapped, 4, dtype);
        assert_in_range(comm_values_sum_differs(sum, &exact, 40, N), 1, N);
        assert_int_equal(comm_values_sum_differs(sum, &near, 40, N), 0);
        sum_up(sum, twice, 4, dtype);
        assert_in_range(comm_values_sum_differs(sum, &near, 40, N), N / 2, N);
    }
}

static void test_words(void **state)
{
    uint64_t in[3][N], out[N];
    for (int k = 0; k < 3; k++)
        comm_words_fill(in[k], source[k], N);
    for (int i = 0; i < N; i++) {
        uint64_t most = in[0][i] > in[1][i] ? in[0][i] : in[1][i];
        out[i] = i < 600 ? in[0][i] + in[1][i] + in[2][i] : most > in[2][i] ? most : in[2][i];
    }
    assert_int_equal(comm_words_differ(out, source, 3, 600, N - 600), 0);
    assert_in_range(comm_words_differ(out, source, 3, 601, N - 601), 1, 1);
    out[3]++;
    out[700]--;
    assert_int_equal(comm_words_differ(out, source, 3, 600, N - 600), 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gathered),
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_orders),
        cmocka_unit_test(test_words),
    };
    return cmocka_run_group_tests_name("values of zero-bench comm", tests, NULL, NULL);
}
