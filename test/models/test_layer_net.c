/* SPDX-License-Identifier: Apache-2.0 */
/* test_layer_net.c: trains the layers of layer_net.h plain and wrapped, at stages 0 to 3 and worlds 1 to
 * 3, to the same losses. Uses libzero's SGD, with the negative sums that such nets keep as gradients, and
 * the net's own momentum arithmetic. */
#include <stdint.h>

#include "test/cmocka.h"
#include "test/models/layer_net_wrap.h"

#define WORLDS 3

static const struct run_setup bracketed = {.brackets = true};
static const struct run_setup unbracketed = {.brackets = false};

static void compare(const struct layer_net_options *o, const struct run_setup *base, bool exact)
{
    run_compare(&layer_net_run_model, o, base, WORLDS, exact);
}

static void plain_net_learns(void **state)
{
    struct layer_net_options o = {.steps = 30};
    struct run_log log = run_plain(&layer_net_run_model, &o);
    run_assert_learned(&log, 0.5);
    run_log_free(&log);
    o.own_update = true;
    log = run_plain(&layer_net_run_model, &o);
    run_assert_learned(&log, 0.5);
    run_log_free(&log);
}

static void library_sgd(void **state)
{
    struct layer_net_options o = {.steps = 10};
    compare(&o, &bracketed, true);
    compare(&o, &unbracketed, true);
}

static void library_sgd_without_momentum(void **state)
{
    struct layer_net_options o = {.steps = 6, .no_momentum = true};
    compare(&o, &bracketed, true);
}

static void own_momentum(void **state)
{
    struct layer_net_options o = {.steps = 10, .own_update = true};
    compare(&o, &bracketed, true);
    compare(&o, &unbracketed, true);
}

static void accumulated(void **state)
{
    static const int accums[] = {3, 4};
    for (int own = 0; own < 2; own++)
        for (int i = 0; i < 2; i++) {
            struct layer_net_options o = {.steps = 5, .own_update = own};
            compare(&o, &(struct run_setup){.brackets = true, .accum = accums[i]}, false);
            compare(&o, &(struct run_setup){.brackets = false, .accum = accums[i]}, false);
        }
}

static void frozen_layer(void **state)
{
    for (int own = 0; own < 2; own++) {
        struct layer_net_options o = {.steps = 6, .own_update = own, .frozen = true};
        compare(&o, &bracketed, true);
        compare(&o, &unbracketed, true);
    }
}

static void evaluation_between_steps(void **state)
{
    struct layer_net_options o = {.steps = 6, .evaluate = true};
    compare(&o, &bracketed, true);
    compare(&o, &(struct run_setup){.brackets = true, .accum = 3}, false);
}

static void any_prefetch_and_budget(void **state)
{
    static const int prefetches[] = {-1, 1, 2, 9};
    static const int64_t budgets[] = {0, 8 << 10, 1 << 20};
    struct layer_net_options o = {.steps = 4};
    for (int world = 1; world <= WORLDS; world++) {
        struct run_setup base = {.stage = 1, .world = world};
        struct run_log expected = run_ranks(&layer_net_run_model, &o, &base);
        for (size_t p = 0; p < sizeof prefetches / sizeof *prefetches; p++)
            for (size_t b = 0; b < sizeof budgets / sizeof *budgets; b++) {
                struct run_setup setup = {.stage = 3,
                                          .world = world,
                                          .prefetch = prefetches[p],
                                          .budget = budgets[b],
                                          .brackets = true};
                struct run_log log = run_ranks(&layer_net_run_model, &o, &setup);
                run_assert_same(&expected, &log, run_setup_text(&setup));
                run_log_free(&log);
            }
        run_log_free(&expected);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_net_learns),
        cmocka_unit_test(library_sgd),
        cmocka_unit_test(library_sgd_without_momentum),
        cmocka_unit_test(own_momentum),
        cmocka_unit_test(accumulated),
        cmocka_unit_test(frozen_layer),
        cmocka_unit_test(evaluation_between_steps),
        cmocka_unit_test(any_prefetch_and_budget),
    };
    return cmocka_run_group_tests_name("layer_net", tests, NULL, NULL);
}
