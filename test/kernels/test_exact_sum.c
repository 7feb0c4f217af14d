/* SPDX-License-Identifier: Apache-2.0 */
/* test_exact_sum.c: tests the exact sum against known values, against sums in any order, and against
 * integer arithmetic. */
#include "kernels/exact_sum.h"
#include "test/cmocka.h"
#include "test/kernels/random.h"

#include <float.h>
#include <math.h>

static struct random_source rng;

static double sum_of(const double *x, int n)
{
    struct zr_exact_sum a;
    zr_exact_reset(&a);
    for (int i = 0; i < n; i++)
        zr_exact_add(&a, x[i]);
    return zr_exact_value(&a);
}

static uint64_t bits_of(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static void assert_same_double(double got, double want)
{
    if (bits_of(got) != bits_of(want))
        fail_msg("%a, not %a", got, want);
}

static void test_known(void **state)
{
    static const struct {
        double x[6], sum; /* a zero ends x */
    } known[] = {
        {{0}, 0},
        {{-0.0}, 0},
        {{1}, 1},
        {{-1.5}, -1.5},
        {{1e300, 1, -1e300}, 1},
        {{1e308, 1e-308, -1e308}, 1e-308},
        {{1, 0x1p-53}, 1},                      /* a tie rounds to even: down */
        {{1, 0x1p-52, 0x1p-53}, 1 + 0x1p-51},   /* a tie rounds to even: up */
        {{1, 0x1p-53, 0x1p-1074}, 1 + 0x1p-52}, /* a tiny term breaks the tie */
        {{1, 0x1p-53, -0x1p-1074}, 1},
        {{-1, -0x1p-53, -0x1p-1074}, -1 - 0x1p-52},
        {{0x1p-1074}, 0x1p-1074}, /* subnormals */
        {{0x1p-1074, 0x1p-1074}, 0x1p-1073},
        {{DBL_MIN, -0x1p-1074}, DBL_MIN - 0x1p-1074},
        {{0x1.fffffffffffffp-1023, 0x1p-1074}, 0x1.fffffffffffffp-1023 + 0x1p-1074},
        {{-0x1.8p-1073, 0x1p-1074}, -0x1p-1073 + 0},
        {{DBL_MAX}, DBL_MAX},
        {{DBL_MAX, 0x1p969}, DBL_MAX},  /* less than half of the last place */
        {{DBL_MAX, 0x1p970}, INFINITY}, /* half of it: rounds to 2^1024 */
        {{DBL_MAX, DBL_MAX}, INFINITY},
        {{-DBL_MAX, -DBL_MAX}, -INFINITY},
        {{DBL_MAX, DBL_MAX, -DBL_MAX}, DBL_MAX}, /* exceeds the doubles only on the way */
        {{0.1, 0.2, 0.3, -0.6}, 2.7755575615628914e-17},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        double x[6], negative[6];
        int n = 0;
        while (n < 6 && (known[i].x[n] != 0 || n == 0)) {
            x[n] = known[i].x[n];
            negative[n] = -x[n];
            n++;
        }
        assert_same_double(sum_of(x, n), known[i].sum);
        assert_same_double(sum_of(negative, n), known[i].sum == 0 ? 0 : -known[i].sum);
    }
}

static void test_single_values(void **state)
{
    for (int i = 0; i < 100000; i++) {
        uint64_t bits = random_bits(&rng);
        double x;
        if (i % 4 == 0)
            bits &= ~(UINT64_C(0x7ff) << 52); /* subnormal */
        memcpy(&x, &bits, sizeof x);
        if (isfinite(x) && x != 0)
            assert_same_double(sum_of(&x, 1), x);
    }
}

/* Any finite double; all exponents are equally likely. */
static double any_double(void)
{
    for (;;) {
        uint64_t bits = random_bits(&rng);
        double x;
        memcpy(&x, &bits, sizeof x);
        if (isfinite(x))
            return x;
    }
}

/* Doubles within 2^-30 to 2^30 are integers times 2^-82, and 128-bit integers sum these exactly. */
static void test_against_integers(void **state)
{
    for (int round = 0; round < 2000; round++) {
        struct zr_exact_sum a;
        __int128 exact = 0;
        int n = 1 + (int)random_below(&rng, 100);
        zr_exact_reset(&a);
        for (int i = 0; i < n; i++) {
            int64_t m = (int64_t)(random_bits(&rng) >> 11) - (INT64_C(1) << 52);
            int e = (int)random_below(&rng, 60);
            exact += m * ((__int128)1 << e);
            zr_exact_add(&a, ldexp((double)m, e - 82));
        }
        /* Converting a 128-bit integer to double rounds once, to nearest even. */
        assert_same_double(zr_exact_value(&a), ldexp((double)exact, -82));
    }
}

static void shuffle(double *x, int n)
{
    for (int i = n - 1; i > 0; i--) {
        int j = (int)random_below(&rng, i + 1);
        double t = x[i];
        x[i] = x[j], x[j] = t;
    }
}

static void test_any_order(void **state)
{
    enum { N = 500 };
    double x[N];
    for (int round = 0; round < 50; round++) {
        for (int i = 0; i < N; i++)
            x[i] = any_double();
        double first = sum_of(x, N);
        for (int again = 0; again < 3; again++) {
            shuffle(x, N);
            assert_same_double(sum_of(x, N), first);
        }
    }
}

/* All terms but one cancel, in a random order. That term is left, however small it is. */
static void test_cancellation(void **state)
{
    enum { N = 401 };
    double x[N];
    for (int round = 0; round < 200; round++) {
        for (int i = 0; i < N - 1; i += 2) {
            x[i] = any_double();
            x[i + 1] = -x[i];
        }
        double left = x[N - 1] = round % 3 == 0 ? 0x1p-1074 : any_double();
        shuffle(x, N);
        assert_same_double(sum_of(x, N), left);
    }
}

/* Carries wait until the counter is full. A counter set near its end stands for a billion additions. */
static void test_carries(void **state)
{
    for (int sign = -1; sign <= 1; sign += 2) {
        struct zr_exact_sum a;
        zr_exact_reset(&a);
        for (int i = 0; i < ZR_EXACT_LIMBS - 6; i++)
            a.limb[i] = sign * (int64_t)(ZR_EXACT_MAX_ADDED - 3) * UINT32_MAX;
        a.n_added = ZR_EXACT_MAX_ADDED - 3;
        struct zr_exact_sum carried = a;
        zr_exact_carry(&carried);
        for (int i = 0; i < 1000; i++) {
            zr_exact_add(&a, sign * DBL_MAX);
            zr_exact_add(&carried, sign * DBL_MAX);
            assert_true(a.n_added < ZR_EXACT_MAX_ADDED);
        }
        for (int i = 0; i < 1000; i++) {
            zr_exact_add(&a, sign * -DBL_MAX);
            zr_exact_add(&carried, sign * -DBL_MAX);
        }
        assert_same_double(zr_exact_value(&a), zr_exact_value(&carried));
    }
}

static void test_nonfinite(void **state)
{
    static const double bad[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 3; i++) {
        struct zr_exact_sum a, b;
        zr_exact_reset(&a);
        zr_exact_reset(&b);
        zr_exact_add(&a, 2);
        assert_int_equal(a.nonfinite, 0);
        zr_exact_add(&a, bad[i]);
        zr_exact_add(&a, 3);
        assert_int_equal(a.nonfinite, 1);
        assert_true(isnan(zr_exact_value(&a)));
        assert_same_double(zr_exact_value(&b), 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_known),
        cmocka_unit_test(test_single_values),
        cmocka_unit_test(test_against_integers),
        cmocka_unit_test(test_any_order),
        cmocka_unit_test(test_cancellation),
        cmocka_unit_test(test_carries),
        cmocka_unit_test(test_nonfinite),
    };
    rng = random_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
