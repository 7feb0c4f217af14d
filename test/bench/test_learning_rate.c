/* SPDX-License-Identifier: Apache-2.0 */
/* test_learning_rate.c: the learning rate of each step, by hand. */
#include "bench/train/learning_rate.h"
#include "test/cmocka.h"

#include <math.h>

static void near(double got, double want)
{
    if (!(fabs(got - want) <= 1e-15))
        fail_msg("%.17g, not %.17g", got, want);
}

static void it_rises_over_the_warmup(void **state)
{
    (void)state;
    for (int kind = LR_CONSTANT; kind <= LR_LINEAR; kind++) {
        const struct lr_schedule s = {.kind = kind, .lr = 2, .min_lr = 1, .warmup = 4, .steps = 10};
        near(learning_rate(&s, 0), 0.5);
        near(learning_rate(&s, 1), 1);
        near(learning_rate(&s, 3), 2);
        near(learning_rate(&s, 4), 2);
    }
}

static void it_stays_or_falls(void **state)
{
    (void)state;
    struct lr_schedule s = {.kind = LR_CONSTANT, .lr = 3, .warmup = 0, .steps = 8};
    near(learning_rate(&s, 0), 3);
    near(learning_rate(&s, INT64_MAX - 1), 3);
    s.kind = LR_LINEAR;
    s.min_lr = 1;
    const double line[] = {3, 2.75, 2.5, 2.25, 2, 1.75, 1.5, 1.25, 1, 1};
    for (int i = 0; i < 10; i++)
        near(learning_rate(&s, i), line[i]);
    s.kind = LR_COSINE;
    near(learning_rate(&s, 0), 3);
    near(learning_rate(&s, 2), 2 + sqrt(0.5));
    near(learning_rate(&s, 4), 2);
    near(learning_rate(&s, 6), 2 - sqrt(0.5));
    near(learning_rate(&s, 8), 1);
    near(learning_rate(&s, INT64_MAX - 1), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_rises_over_the_warmup),
        cmocka_unit_test(it_stays_or_falls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
