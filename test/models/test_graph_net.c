/* SPDX-License-Identifier: Apache-2.0 */
/* test_graph_net.c: trains the graph of graph_net.h plain and wrapped, at stages 0 to 3 and worlds 1 to 3,
 * to the same losses. Runs it unchanged at stages 0 and 1, and with brackets in the node loop at all
 * stages. The optimizer may be the net's own RMSprop. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "test/cmocka.h"
#include "test/models/graph_net_wrap.h"

#define WORLDS 3

static const struct run_setup bracketed = {.brackets = true};
static const struct run_setup unbracketed = {.brackets = false};

static void plain_net_learns(void **state)
{
    struct graph_net_options o = {.steps = 30};
    struct run_log log = run_plain(&graph_net_run_model, &o);
    run_assert_learned(&log, 0.85);
    run_log_free(&log);
    o.library_rmsprop = true;
    log = run_plain(&graph_net_run_model, &o);
    run_assert_learned(&log, 0.85);
    run_log_free(&log);
}

static void opaque(void **state)
{
    struct graph_net_options o = {.steps = 10};
    run_compare(&graph_net_run_model, &o, &unbracketed, WORLDS, true);
}

/* The shared layer has a bracket at each of its two uses, so its gradients are summed in another order. */
static void brackets_in_the_node_loop(void **state)
{
    struct graph_net_options o = {.steps = 10};
    run_compare(&graph_net_run_model, &o, &bracketed, WORLDS, false);
}

static void library_rmsprop(void **state)
{
    struct graph_net_options o = {.steps = 10, .library_rmsprop = true};
    run_compare(&graph_net_run_model, &o, &unbracketed, WORLDS, true);
    run_compare(&graph_net_run_model, &o, &bracketed, WORLDS, false);
}

static void accumulated(void **state)
{
    static const int accums[] = {3, 4};
    struct graph_net_options o = {.steps = 5};
    for (int i = 0; i < 2; i++) {
        run_compare(&graph_net_run_model, &o, &(struct run_setup){.brackets = true, .accum = accums[i]},
                    WORLDS, false);
        run_compare(&graph_net_run_model, &o, &(struct run_setup){.brackets = false, .accum = accums[i]},
                    WORLDS, false);
    }
}

static void frozen_layer(void **state)
{
    struct graph_net_options o = {.steps = 6, .frozen = true};
    run_compare(&graph_net_run_model, &o, &unbracketed, WORLDS, true);
    run_compare(&graph_net_run_model, &o, &bracketed, WORLDS, false);
}

static void evaluation_between_steps(void **state)
{
    struct graph_net_options o = {.steps = 6, .evaluate = true};
    run_compare(&graph_net_run_model, &o, &unbracketed, WORLDS, true);
    run_compare(&graph_net_run_model, &o, &bracketed, WORLDS, false);
}

static void any_prefetch(void **state)
{
    static const int prefetches[] = {-1, 1, 3, 9};
    struct graph_net_options o = {.steps = 4};
    for (int world = 1; world <= WORLDS; world++) {
        struct run_setup base = {.stage = 1, .world = world, .brackets = true};
        struct run_log expected = run_ranks(&graph_net_run_model, &o, &base);
        for (size_t p = 0; p < sizeof prefetches / sizeof *prefetches; p++)
            for (int stage = 2; stage <= 3; stage++) {
                struct run_setup setup = {
                    .stage = stage, .world = world, .prefetch = prefetches[p], .brackets = true};
                struct run_log log = run_ranks(&graph_net_run_model, &o, &setup);
                run_assert_same(&expected, &log, run_setup_text(&setup));
                run_log_free(&log);
            }
        run_log_free(&expected);
    }
}

/* The callback sees every trained element once: on every rank if state is whole, and on one rank if it is
 * sharded. */
static void own_optimizer_sees_each_element_once(void **state)
{
    enum { STRIDE = 4096 };
    static uint8_t covered[RUN_MAX_WORLD * STRIDE];
    for (int frozen = 0; frozen < 2; frozen++)
        for (int world = 1; world <= RUN_MAX_WORLD; world++)
            for (int stage = 0; stage <= 3; stage++) {
                if (72 % world != 0)
                    continue;
                struct graph_net_options o = {
                    .steps = 2, .frozen = frozen, .covered = covered, .covered_stride = STRIDE};
                struct run_setup setup = {.stage = stage, .world = world, .brackets = true};
                memset(covered, 0, sizeof covered);
                struct run_log log = run_ranks(&graph_net_run_model, &o, &setup);
                int64_t n_seen = 0, n_expected = 0;
                for (int64_t i = 0; i < log.n_weights; i++) {
                    int seen = 0;
                    for (int r = 0; r < world; r++)
                        seen += covered[r * STRIDE + i];
                    if (seen != 0 && seen != (stage == 0 ? world : 1))
                        fail_msg("%s: element %lld updated %d times", run_setup_text(&setup), (long long)i,
                                 seen);
                    n_seen += seen != 0;
                }
                n_expected = log.n_weights - (frozen ? GN_HIDDEN * (GN_HIDDEN + 1) : 0);
                if (n_seen != n_expected)
                    fail_msg("%s: %lld elements updated of %lld", run_setup_text(&setup), (long long)n_seen,
                             (long long)n_expected);
                run_log_free(&log);
            }
}

/* An optimizer that refuses fails the step on every rank, and nothing hangs. */
static void own_optimizer_fails(void **state)
{
    for (int world = 1; world <= WORLDS; world++)
        for (int stage = 0; stage <= 3; stage++) {
            struct graph_net_options o = {.steps = 6, .fail_at = 2};
            struct run_setup setup = {.stage = stage, .world = world, .brackets = true};
            struct run_log logs[RUN_MAX_WORLD];
            run_ranks_raw(graph_net_run_model.rank, &o, &setup, logs);
            for (int r = 0; r < world; r++) {
                if (logs[r].err >= 0)
                    fail_msg("%s: rank %d did not fail", run_setup_text(&setup), r);
                if (strlen(logs[r].error) < 10)
                    fail_msg("%s: rank %d failed without a word", run_setup_text(&setup), r);
                run_log_free(&logs[r]);
            }
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_net_learns),
        cmocka_unit_test(opaque),
        cmocka_unit_test(brackets_in_the_node_loop),
        cmocka_unit_test(library_rmsprop),
        cmocka_unit_test(accumulated),
        cmocka_unit_test(frozen_layer),
        cmocka_unit_test(evaluation_between_steps),
        cmocka_unit_test(any_prefetch),
        cmocka_unit_test(own_optimizer_sees_each_element_once),
        cmocka_unit_test(own_optimizer_fails),
    };
    return cmocka_run_group_tests_name("graph_net", tests, NULL, NULL);
}
