/* SPDX-License-Identifier: Apache-2.0 */
/* test_own_zeroing.c: tests programs that zero their own gradients, at the start of a step, of a
 * micro-batch or of backward. Covers stacked buffers, layer structs and graph nodes at every stage, world
 * and accumulation, with and without brackets, deterministic sums and cfg.memory.grad_in_place.
 *
 * Each run gives the plain program's losses, or an error that says what to do, and never other numbers.
 * One rank is late, so that a reduce of the others still reads gradients that are zeroed too early. */
#include <stdint.h>

#include "test/cmocka.h"
#include "test/models/graph_net_wrap.h"
#include "test/models/layer_net_wrap.h"
#include "test/models/stacked_mlp_wrap.h"

#include <stdlib.h>
#include <string.h>

enum { STEPS = 3 };

struct shape {
    const struct run_model *model;
    const void *options;
};

static const struct mlp_options mlp = {.steps = STEPS},
                                mlp_separate = {.steps = STEPS, .tie = MLP_TIE_SEPARATE},
                                mlp_segment = {.steps = STEPS, .recompute = MLP_RECOMPUTE_SEGMENT},
                                mlp_drop = {.steps = STEPS, .drop = true, .leaves_out = true};
static const struct layer_net_options layers = {.steps = STEPS};
static const struct graph_net_options graph = {.steps = STEPS, .library_rmsprop = true};

static const struct shape shapes[] = {{&mlp_run_model, &mlp},         {&layer_net_run_model, &layers},
                                      {&graph_net_run_model, &graph}, {&mlp_run_model, &mlp_separate},
                                      {&mlp_run_model, &mlp_segment}, {&mlp_run_model, &mlp_drop}};
enum { SHAPES = 3, MORE_SHAPES = sizeof shapes / sizeof *shapes };

static int64_t n_right, n_refused;

/* Expects the losses of the plain program. */
static void right(const struct shape *s, const struct run_log *plain, const struct run_setup *setup)
{
    struct run_log log = run_ranks(s->model, s->options, setup), expected = *plain;
    if (setup->no_info)
        memset(expected.norm, 0, sizeof expected.norm);
    run_assert_near(s->model, &expected, &log, run_setup_text(setup));
    run_log_free(&log);
    n_right++;
}

/* Expects the same error on all ranks, with this text. */
static void refused(const struct shape *s, const struct run_setup *setup, const char *words)
{
    struct run_log logs[RUN_MAX_WORLD];
    run_ranks_raw(s->model->rank, s->options, setup, logs);
    for (int r = 0; r < setup->world; r++) {
        if (logs[r].err >= 0 || !strstr(logs[r].error, words))
            fail_msg("%s: rank %d: \"%s\" where \"%s\" was due", run_setup_text(setup), r, logs[r].error,
                     words);
        run_log_free(&logs[r]);
    }
    n_refused++;
}

/* Checks the result of one setup. */
static void run(const struct shape *s, const struct run_log *plain, const struct run_setup *setup)
{
    const char *check = getenv("ZERO_CHECK");
    bool checked = check && !strcmp(check, "1"), in_place = setup->in_place && setup->accum > 1;
    if (in_place && setup->deterministic > 0)
        refused(s, setup, "grad_in_place is 1 and deterministic is 1");
    else if (checked && setup->stage >= 2) /* there no pointer is NULL, but its memory is protected */
        refused(s, setup, "outside its bracket");
    else if (setup->no_micro && !in_place)
        refused(s, setup, "set grad_in_place to 1");
    else
        right(s, plain, setup);
}

static void every_way(const struct shape *s, int n_worlds)
{
    struct run_log plain = run_plain(s->model, s->options);
    for (int world = 1; world <= n_worlds; world++)
        for (int stage = 0; stage <= 3; stage++)
            for (int accum = 1; accum <= 4; accum += 3)
                for (int brackets = stage >= 2; brackets <= 1; brackets++)
                    for (int deterministic = -1; deterministic <= 1; deterministic++)
                        for (int zeroing = RUN_ZEROES_STEP; zeroing <= RUN_ZEROES_BACKWARD; zeroing++)
                            for (int in_place = 0; in_place <= (zeroing == RUN_ZEROES_STEP || accum == 1);
                                 in_place++)
                                for (int no_micro = 0; no_micro <= (!brackets && accum > 1); no_micro++) {
                                    struct run_setup setup = {.stage = stage,
                                                              .world = world,
                                                              .accum = accum,
                                                              .brackets = brackets,
                                                              .deterministic = deterministic,
                                                              .zeroing = (enum run_zeroing)zeroing,
                                                              .in_place = in_place,
                                                              .no_micro = no_micro,
                                                              .no_info =
                                                                  world > 1 && zeroing != RUN_ZEROES_STEP,
                                                              .lags = world > 1};
                                    run(s, &plain, &setup);
                                }
    run_log_free(&plain);
}

static void stacked_buffers(void **state)
{
    every_way(&shapes[0], 2);
}

static void layer_structs(void **state)
{
    every_way(&shapes[1], 2);
}

static void graph_nodes(void **state)
{
    every_way(&shapes[2], 2);
}

/* Brackets at stages 0 and 1, where a race is possible: other patterns of use, three ranks, and a repeated
 * run, to the bit. */
static void the_same_each_time(void **state)
{
    for (int i = 0; i < MORE_SHAPES; i++) {
        const struct shape *s = &shapes[i];
        struct run_log plain = run_plain(s->model, s->options);
        for (int stage = 0; stage <= 1; stage++)
            for (int zeroing = RUN_ZEROES_MICRO; zeroing <= RUN_ZEROES_BACKWARD; zeroing++) {
                struct run_log first = {0};
                struct run_setup setup = {.stage = stage,
                                          .world = 3,
                                          .accum = 4,
                                          .brackets = true,
                                          .zeroing = (enum run_zeroing)zeroing,
                                          .lags = true};
                for (int again = 0; again < 3; again++) {
                    struct run_log log = run_ranks(s->model, s->options, &setup);
                    run_assert_near(s->model, &plain, &log, run_setup_text(&setup));
                    if (again)
                        run_assert_same(&first, &log, run_setup_text(&setup));
                    else
                        first = log;
                    if (again)
                        run_log_free(&log);
                }
                run_log_free(&first);
            }
        run_log_free(&plain);
    }
}

/* A program sets grad_in_place and still zeroes in each micro-batch. If it has brackets, check mode finds
 * that. */
static void a_false_declaration(void **state)
{
    const char *was = getenv("ZERO_CHECK");
    bool checked = was && !strcmp(was, "1");
    setenv("ZERO_CHECK", "1", 1);
    for (int i = 0; i < SHAPES; i++)
        for (int world = 1; world <= 2; world++)
            for (int stage = 0; stage <= 1; stage++)
                for (int zeroing = RUN_ZEROES_MICRO; zeroing <= RUN_ZEROES_BACKWARD; zeroing++) {
                    struct run_setup setup = {.stage = stage,
                                              .world = world,
                                              .accum = 4,
                                              .brackets = true,
                                              .zeroing = (enum run_zeroing)zeroing,
                                              .in_place = true};
                    refused(&shapes[i], &setup, "grad_in_place is 1, so their sum must stay there");
                }
    if (!checked)
        unsetenv("ZERO_CHECK");
}

static void both_were_seen(void **state)
{
    print_message("%lld runs were right, %lld refused\n", (long long)n_right, (long long)n_refused);
    assert_true(n_right > 300 && n_refused > 100);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stacked_buffers),     cmocka_unit_test(layer_structs),
        cmocka_unit_test(graph_nodes),         cmocka_unit_test(the_same_each_time),
        cmocka_unit_test(a_false_declaration), cmocka_unit_test(both_were_seen),
    };
    return cmocka_run_group_tests_name("own_zeroing", tests, NULL, NULL);
}
