/* SPDX-License-Identifier: Apache-2.0 */
/* test_sample_choose.c: the choice of a token from logits, by hand and by its frequencies. */
#include "bench/sample/sample.h"
#include "test/cmocka.h"

#include <math.h>
#include <stdio.h>

enum { V = 6, N = 20000 };
static const float logits[V] = {1, 3, -2, 3, 0, 2.5f};

static int32_t choose(const struct sample_options *o, int64_t i, const float *x)
{
    struct sample_token room[V];
    return sample_choose(o, i, x, V, room);
}

/* The shares of N choices. */
static void shares(const struct sample_options *o, double share[V])
{
    for (int v = 0; v < V; v++)
        share[v] = 0;
    for (int64_t i = 0; i < N; i++)
        share[choose(o, i, logits)] += 1.0 / N;
}

static void zero_temperature_takes_the_likeliest(void **state)
{
    (void)state;
    const struct sample_options o = {.top_p = 1};
    for (int64_t i = 0; i < 100; i++)
        assert_int_equal(choose(&o, i, logits), 1); /* of equal ones the first */
}

static void frequencies_are_the_softmax(void **state)
{
    (void)state;
    for (double temperature = 0.5; temperature < 5; temperature *= 2) {
        const struct sample_options o = {.temperature = temperature, .top_p = 1, .seed = 3};
        double share[V], all = 0;
        shares(&o, share);
        for (int v = 0; v < V; v++)
            all += exp((double)logits[v] / temperature);
        for (int v = 0; v < V; v++) {
            double p = exp((double)logits[v] / temperature) / all;
            if (!(fabs(share[v] - p) <= 5 * sqrt(p / N)))
                fail_msg("temperature %g, id %d: %g, not %g", temperature, v, share[v], p);
        }
    }
}

static void only_the_likeliest_are_chosen(void **state)
{
    (void)state;
    static const struct {
        int64_t top_k;
        double top_p;
        int n; /* of 1, 3, 5, 0, 4, 2 in this order */
    } cases[] = {{1, 1, 1},    {2, 1, 2},   {5, 1, 5},   {9, 1, 6},    {0, 0, 1},     {0, 0.35, 1},
                 {0, 0.40, 2}, {0, 0.7, 2}, {0, 0.8, 3}, {2, 0.45, 1}, {2, 0.999, 2}, {0, 0.999, 6}};
    static const int order[V] = {1, 3, 5, 0, 4, 2};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const struct sample_options o = {
            .temperature = 1, .top_k = cases[c].top_k, .top_p = cases[c].top_p, .seed = 5};
        double share[V];
        shares(&o, share);
        for (int i = 0; i < V; i++)
            if ((share[order[i]] > 0) != (i < cases[c].n))
                fail_msg("top_k %lld, top_p %g: id %d has %g", (long long)o.top_k, o.top_p, order[i],
                         share[order[i]]);
    }
}

/* A choice follows from the seed and its number alone, on every machine. */
static void choices_are_reproduced(void **state)
{
    (void)state;
    const struct sample_options one = {.temperature = 2, .top_p = 1, .seed = 1};
    const struct sample_options two = {.temperature = 2, .top_p = 1, .seed = 2};
    int differ = 0;
    char text[2 * V + 1] = "";
    for (int64_t i = 0; i < 2 * V; i++) {
        text[i] = (char)('0' + choose(&one, i, logits));
        assert_int_equal(choose(&one, i, logits), text[i] - '0');
        differ += choose(&two, i, logits) != text[i] - '0';
    }
    assert_string_equal(text, "335503111154"); /* computed by Python */
    assert_true(differ > 3);
}

static void a_logit_that_is_not_finite_is_named(void **state)
{
    (void)state;
    const struct sample_options greedy = {.top_p = 1}, warm = {.temperature = 1, .top_p = 1};
    const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int b = 0; b < 3; b++)
        for (int v = 0; v < V; v++) {
            float x[V];
            for (int i = 0; i < V; i++)
                x[i] = i == v ? bad[b] : logits[i];
            assert_int_equal(choose(&greedy, 0, x), -1 - v);
            assert_int_equal(choose(&warm, 0, x), -1 - v);
        }
}

/* Weights that vanish, and a range that overflows exp() without the subtraction of the largest. */
static void logits_far_apart(void **state)
{
    (void)state;
    const float far[V] = {-3e38f, 3e38f, -3e38f, 0, 1e30f, 3.1e38f};
    const struct sample_options o = {.temperature = 0.001, .top_p = 0.5, .seed = 1};
    for (int64_t i = 0; i < 100; i++)
        assert_int_equal(choose(&o, i, far), 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(zero_temperature_takes_the_likeliest), cmocka_unit_test(frequencies_are_the_softmax),
        cmocka_unit_test(only_the_likeliest_are_chosen),        cmocka_unit_test(choices_are_reproduced),
        cmocka_unit_test(a_logit_that_is_not_finite_is_named),  cmocka_unit_test(logits_far_apart),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
