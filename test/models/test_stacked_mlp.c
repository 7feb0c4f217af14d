/* SPDX-License-Identifier: Apache-2.0 */
/* test_stacked_mlp.c: trains the model of stacked_mlp.h plain and wrapped, at stages 0 to 3 and worlds 1
 * to 3, to the same losses, in every way such a model is used. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "test/cmocka.h"
#include "test/models/stacked_mlp_wrap.h"

#define WORLDS 3

static const struct run_setup bracketed = {.brackets = true};
static const struct run_setup unbracketed = {.brackets = false};

/* This model learns its data, so the comparison is meaningful. */
static void plain_model_learns(void **state)
{
    struct mlp_options o = {.steps = 24};
    struct run_log log = run_plain(&mlp_run_model, &o);
    run_assert_learned(&log, 0.6);
    run_log_free(&log);
}

static void brackets_around_each_layer(void **state)
{
    struct mlp_options o = {.steps = 8};
    run_compare(&mlp_run_model, &o, &bracketed, WORLDS, true);
}

static void not_a_line_inside(void **state)
{
    struct mlp_options o = {.steps = 8};
    run_compare(&mlp_run_model, &o, &unbracketed, WORLDS, true);
}

/* With and without brackets, the reduction is the same. */
static void brackets_change_no_bit(void **state)
{
    struct mlp_options o = {.steps = 5, .clip = 0.5f};
    for (int world = 1; world <= WORLDS; world++)
        for (int stage = 0; stage <= 1; stage++) {
            struct run_setup with = {.stage = stage, .world = world, .brackets = true};
            struct run_setup without = {.stage = stage, .world = world, .brackets = false};
            struct run_log a = run_ranks(&mlp_run_model, &o, &with),
                           b = run_ranks(&mlp_run_model, &o, &without);
            run_assert_same(&a, &b, run_setup_text(&without));
            run_log_free(&a);
            run_log_free(&b);
        }
}

static void clipped(void **state)
{
    struct mlp_options o = {.steps = 8, .clip = 0.25f};
    struct run_log plain = run_plain(&mlp_run_model, &o);
    assert_true(plain.norm[0] > 0.25);
    run_log_free(&plain);
    run_compare(&mlp_run_model, &o, &bracketed, WORLDS, false);
    run_compare(&mlp_run_model, &o, &unbracketed, WORLDS, false);
}

/* Prefetch and budget change when things happen, but no number. */
static void any_prefetch_and_budget(void **state)
{
    static const int prefetches[] = {-1, 1, 2, 9};
    static const int64_t budgets[] = {0, 10 << 10, 15 << 10, 1 << 20};
    struct mlp_options o = {.steps = 4};
    for (int world = 1; world <= WORLDS; world++) {
        struct run_setup base = {.stage = 0, .world = world, .brackets = true};
        struct run_log expected = run_ranks(&mlp_run_model, &o, &base);
        for (size_t p = 0; p < sizeof prefetches / sizeof *prefetches; p++)
            for (size_t b = 0; b < sizeof budgets / sizeof *budgets; b++)
                for (int order = 0; order < 2; order++) {
                    struct run_setup setup = {.stage = 3,
                                              .world = world,
                                              .prefetch = prefetches[p],
                                              .budget = budgets[b],
                                              .brackets = true,
                                              .order = order};
                    if (prefetches[p] < 0 && !order)
                        continue; /* see nesting_without_room */
                    struct run_log log = run_ranks(&mlp_run_model, &o, &setup);
                    run_assert_same(&expected, &log, run_setup_text(&setup));
                    run_log_free(&log);
                }
        run_log_free(&expected);
    }
}

/* With room for a single unit, a nested bracket cannot get its parameters unless the order declared it.
 * The same call is refused on every rank. At world 1 every unit has its own memory. */
static void nesting_without_room(void **state)
{
    struct mlp_options o = {.steps = 4};
    for (int world = 1; world <= WORLDS; world++)
        for (int stage = 2; stage <= 3; stage++) {
            struct run_setup setup = {.stage = stage, .world = world, .prefetch = -1, .brackets = true};
            struct run_log logs[RUN_MAX_WORLD];
            run_ranks_raw(mlp_run_model.rank, &o, &setup, logs);
            for (int r = 0; r < world; r++) {
                if (logs[r].err != (world == 1 ? 0 : ZERO_ERR_BUDGET))
                    fail_msg("%s: rank %d: %s", run_setup_text(&setup), r,
                             logs[r].err ? logs[r].error : "no error");
                assert_true(world == 1 || strstr(logs[r].error, "cfg.memory.order"));
                run_log_free(&logs[r]);
            }
        }
}

static void accumulated(void **state)
{
    struct mlp_options o = {.steps = 5, .clip = 0.5f};
    static const int accums[] = {3, 4};
    for (int i = 0; i < 2; i++) {
        run_compare(&mlp_run_model, &o, &(struct run_setup){.brackets = true, .accum = accums[i]}, WORLDS,
                    false);
        run_compare(&mlp_run_model, &o, &(struct run_setup){.brackets = false, .accum = accums[i]}, WORLDS,
                    false);
    }
}

/* Four micro-batches give the same result as one on each of four ranks or four on one rank. The same holds
 * for eight. */
static void accumulation_and_worlds_agree(void **state)
{
    static const int worlds[] = {1, 2, 4};
    struct mlp_options o = {.steps = 5, .clip = 0.5f};
    for (int n = 4; n <= 8; n *= 2) {
        struct run_log expected = {0};
        for (int stage = 0; stage <= 3; stage++)
            for (int i = 0; i < 3; i++) {
                struct run_setup setup = {
                    .stage = stage, .world = worlds[i], .accum = n / worlds[i], .brackets = true};
                struct run_log log = run_ranks(&mlp_run_model, &o, &setup);
                if (expected.weights == NULL) {
                    expected = log;
                    continue;
                }
                run_assert_same(&expected, &log, run_setup_text(&setup));
                run_log_free(&log);
            }
        run_log_free(&expected);
    }
}

static void frozen_tensor(void **state)
{
    struct mlp_options o = {.steps = 6, .frozen_wpe = true};
    run_compare(&mlp_run_model, &o, &bracketed, WORLDS, true);
    run_compare(&mlp_run_model, &o, &unbracketed, WORLDS, true);
}

/* The embedding is used twice in a pass. With a bracket for each use there are two contributions, which
 * are summed in another order than in one buffer. */
static void tied_weights_in_separate_brackets(void **state)
{
    struct mlp_options o = {.steps = 6, .tie = MLP_TIE_SEPARATE};
    run_compare(&mlp_run_model, &o, &bracketed, WORLDS, false);
    run_compare(&mlp_run_model, &o, &(struct run_setup){.brackets = true, .accum = 3}, WORLDS, false);
}

static void resident_embedding(void **state)
{
    struct mlp_options o = {.steps = 5, .tie = MLP_TIE_SEPARATE, .resident = true};
    run_compare(&mlp_run_model, &o, &bracketed, WORLDS, false);
}

static void stored_gradient(void **state)
{
    struct mlp_options o = {.steps = 5, .overwrite = true};
    run_compare(&mlp_run_model, &o, &bracketed, WORLDS, true);
    run_compare(&mlp_run_model, &o, &unbracketed, WORLDS, true);
    run_compare(&mlp_run_model, &o, &(struct run_setup){.brackets = true, .accum = 3}, WORLDS, false);
    run_compare(&mlp_run_model, &o, &(struct run_setup){.brackets = false, .accum = 3}, WORLDS, false);
}

static void recompute_in_backward(void **state)
{
    for (enum mlp_recompute how = MLP_RECOMPUTE_LAYER; how <= MLP_RECOMPUTE_SEGMENT; how++) {
        struct mlp_options o = {.steps = 6, .recompute = how};
        run_compare(&mlp_run_model, &o, &bracketed, WORLDS, true);
        run_compare(&mlp_run_model, &o, &(struct run_setup){.brackets = true, .prefetch = -1, .order = true},
                    WORLDS, true);
        o.tie = MLP_TIE_SEPARATE;
        run_compare(&mlp_run_model, &o, &bracketed, WORLDS, false);
    }
}

/* Two slices of the stacked tensors are open at once. When the inner one ends, the model's pointer returns
 * to the outer one's. */
static void brackets_inside_the_neighbour(void **state)
{
    struct mlp_options o = {.steps = 5, .early = true};
    run_compare(&mlp_run_model, &o, &bracketed, WORLDS, true);
    o.recompute = MLP_RECOMPUTE_LAYER;
    run_compare(&mlp_run_model, &o, &bracketed, WORLDS, true);
}

static void own_adamw(void **state)
{
    struct mlp_options o = {.steps = 6, .own_update = true, .frozen_wpe = true};
    run_compare(&mlp_run_model, &o, &bracketed, WORLDS, true);
    o.clip = 0.25f;
    run_compare(&mlp_run_model, &o, &unbracketed, WORLDS, false);
}

static void two_forwards_one_backward(void **state)
{
    struct mlp_options o = {.steps = 6, .twice = true};
    run_compare(&mlp_run_model, &o, &bracketed, WORLDS, true);
    run_compare(&mlp_run_model, &o, &unbracketed, WORLDS, true);
    run_compare(&mlp_run_model, &o, &(struct run_setup){.brackets = true, .accum = 3}, WORLDS, false);
}

/* A refused call changes nothing on any rank. */
static void refused_calls(void **state)
{
    struct mlp_options o = {.steps = 5, .misuse = true};
    run_compare(&mlp_run_model, &o, &bracketed, WORLDS, true);
    run_compare(&mlp_run_model, &o, &(struct run_setup){.brackets = true, .accum = 3}, WORLDS, false);
}

static void evaluation_between_steps(void **state)
{
    struct mlp_options o = {.steps = 6, .evaluate = true};
    run_compare(&mlp_run_model, &o, &bracketed, WORLDS, true);
    run_compare(&mlp_run_model, &o, &unbracketed, WORLDS, true);
}

/* With brackets the layer is not updated. Without, its gradient is zero and its moments decay. */
static void layer_left_out(void **state)
{
    struct mlp_options o = {.steps = 7, .drop = true, .leaves_out = true};
    run_compare(&mlp_run_model, &o, &bracketed, WORLDS, true);
    o.leaves_out = false;
    run_compare(&mlp_run_model, &o, &unbracketed, WORLDS, true);
}

static void order_changed_midway(void **state)
{
    struct mlp_options o = {.steps = 8, .reorder = true};
    run_compare(&mlp_run_model, &o, &bracketed, WORLDS, true);
    o.evaluate = o.drop = o.leaves_out = true;
    run_compare(&mlp_run_model, &o, &bracketed, WORLDS, true);
}

/* The same with the smallest prefetch, where nothing hides a late gather. */
static void order_changed_without_prefetch(void **state)
{
    struct mlp_options o = {.steps = 7, .reorder = true, .drop = true, .leaves_out = true};
    run_compare(&mlp_run_model, &o, &(struct run_setup){.brackets = true, .prefetch = -1, .order = true},
                WORLDS, true);
}

static void row_set_by_zero_write(void **state)
{
    struct mlp_options o = {.steps = 6, .edit = true, .evaluate = true};
    run_compare(&mlp_run_model, &o, &bracketed, WORLDS, true);
    run_compare(&mlp_run_model, &o, &unbracketed, WORLDS, true);
}

/* --- the model's own save, load and sampling --------------------------------------------------------------
 */

enum { SAVED_STEPS = 4, SAMPLED = 24, FILE_BYTES = 1 << 16 };

struct saved {
    size_t n_bytes;
    char bytes[FILE_BYTES];
    int sampled[SAMPLED];
    double eval; /* of a fresh model that loaded the file */
};

static const int prompt[] = {1, 8, 19};
static const float lr = 0.02f;

/* Saves and samples from a model on the host, with the model's own code. */
static void save_and_sample(struct mlp *m, struct saved *s)
{
    FILE *f = fmemopen(s->bytes, sizeof s->bytes, "wb");
    if (f == NULL || mlp_save(m, f) != 0)
        abort();
    s->n_bytes = (size_t)ftell(f);
    fclose(f);
    mlp_sample(m, prompt, s->sampled, SAMPLED, 99);
}

static void load(struct mlp *m, struct saved *s)
{
    FILE *f = fmemopen(s->bytes, s->n_bytes, "rb");
    if (f == NULL || mlp_load(m, f) != 0)
        abort();
    fclose(f);
}

static void saved_plain(struct saved *s)
{
    int tokens[MLP_ROWS * 8], targets[MLP_ROWS];
    struct mlp *m = mlp_new(mlp_test_config, MLP_ROWS, 41);
    for (int step = 0; step < SAVED_STEPS; step++) {
        mlp_data(1, step, 0, MLP_ROWS, tokens, targets);
        mlp_zero_grad(m);
        mlp_forward(m, tokens, targets);
        mlp_backward(m);
        mlp_update(m, (struct mlp_adamw){lr, 0.9f, 0.999f, 1e-8f, 0.0f, step + 1});
    }
    save_and_sample(m, s);
    mlp_free(m);
    m = mlp_new(mlp_test_config, MLP_ROWS, 7);
    load(m, s);
    mlp_data(1, SAVED_STEPS, 0, MLP_ROWS, tokens, targets);
    mlp_forward(m, tokens, targets);
    s->eval = m->mean_loss;
    mlp_free(m);
}

/* Trains at setup->stage, saves on rank 0, and loads into a context of another stage. */
static void saved_rank(const void *options, const struct run_setup *setup, int rank, const char *url,
                       struct run_log *log)
{
    struct saved *s = *(struct saved *const *)options;
    const struct mlp_options none = {0};
    const int B = MLP_ROWS / setup->world;
    int tokens[MLP_ROWS * 8], targets[MLP_ROWS];
    struct zero_tensor table[MLP_N_TENSORS];
    zero_ctx *z = NULL;
    struct mlp *m = mlp_new(mlp_test_config, B, 41), *host = mlp_new(mlp_test_config, B, 3);
    struct zero_config cfg = run_config(setup, rank, url);
    double eval;

    RUN_TRY(log, zero_wrap(&z, table, mlp_zero_tensors(m, &none, table), &cfg));
    for (int step = 0; step < SAVED_STEPS; step++) {
        mlp_data(1, step, rank * B, B, tokens, targets);
        RUN_TRY(log, mlp_zero_micro_batch(z, m, &none, tokens, targets));
        RUN_TRY(log, zero_step(z, lr, NULL));
    }
    RUN_TRY(log, mlp_zero_read_all(z, m, ZERO_VALUE_PARAM, rank == 0 ? host->params_memory : NULL));
    if (rank == 0)
        save_and_sample(host, s);
    /* A range inside a tensor reads the same numbers as the whole, even on a rank that did not read the
     * whole. */
    float part[7];
    RUN_TRY(log, zero_read(z, 4, ZERO_VALUE_MASTER, 401, 7, part));
    if (rank == 0 &&
        memcmp(part, host->params_memory + m->sizes[0] + m->sizes[1] + m->sizes[2] + m->sizes[3] + 401,
               sizeof part) != 0)
        run_failed(log, ZERO_ERR_FAILED, "zero_read of a range differs from that of the whole tensor");
    RUN_TRY(log, zero_unwrap(&z));
    mlp_free(m);

    cfg.stage = 3 - cfg.stage;
    m = mlp_new(mlp_test_config, B, 7);
    RUN_TRY(log, zero_wrap(&z, table, mlp_zero_tensors(m, &none, table), &cfg));
    if (rank == 0)
        load(host, s);
    RUN_TRY(log, mlp_zero_write_all(z, m, rank == 0 ? host->params_memory : NULL));
    mlp_data(1, SAVED_STEPS, rank * B, B, tokens, targets);
    RUN_TRY(log, mlp_zero_micro_batch(z, m, &none, tokens, targets));
    eval = m->mean_loss;
    RUN_TRY(log, zero_mean(z, &eval, 1));
    if (rank == 0)
        s->eval = eval;
    RUN_TRY(log, zero_step(z, lr, NULL));
out:
    run_unwrap(log, &z);
    mlp_free(m);
    mlp_free(host);
}

static const struct run_model saved_model = {.rank = saved_rank, .tolerance = 2e-4};

static void own_save_load_and_sampling(void **state)
{
    static struct saved expected, first, now;
    saved_plain(&expected);
    for (int world = 1; world <= WORLDS; world++)
        for (int stage = 0; stage <= 3; stage++) {
            struct run_setup setup = {.stage = stage, .world = world, .brackets = true};
            struct saved *s = stage == 0 ? &first : &now;
            memset(s, 0xff, sizeof *s);
            struct run_log log = run_ranks(&saved_model, &s, &setup);
            run_log_free(&log);
            const struct saved *same = world == 1 ? &expected : &first;
            assert_int_equal(s->n_bytes, same->n_bytes);
            assert_memory_equal(s->bytes, same->bytes, s->n_bytes);
            assert_memory_equal(s->sampled, same->sampled, sizeof s->sampled);
            if (!(s->eval > 0.9999 * expected.eval && s->eval < 1.0001 * expected.eval))
                fail_msg("%s: loss %.9g after loading, expected %.9g", run_setup_text(&setup), s->eval,
                         expected.eval);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_model_learns),
        cmocka_unit_test(brackets_around_each_layer),
        cmocka_unit_test(not_a_line_inside),
        cmocka_unit_test(brackets_change_no_bit),
        cmocka_unit_test(clipped),
        cmocka_unit_test(any_prefetch_and_budget),
        cmocka_unit_test(nesting_without_room),
        cmocka_unit_test(accumulated),
        cmocka_unit_test(accumulation_and_worlds_agree),
        cmocka_unit_test(frozen_tensor),
        cmocka_unit_test(tied_weights_in_separate_brackets),
        cmocka_unit_test(resident_embedding),
        cmocka_unit_test(stored_gradient),
        cmocka_unit_test(recompute_in_backward),
        cmocka_unit_test(brackets_inside_the_neighbour),
        cmocka_unit_test(own_adamw),
        cmocka_unit_test(two_forwards_one_backward),
        cmocka_unit_test(refused_calls),
        cmocka_unit_test(evaluation_between_steps),
        cmocka_unit_test(layer_left_out),
        cmocka_unit_test(order_changed_midway),
        cmocka_unit_test(order_changed_without_prefetch),
        cmocka_unit_test(row_set_by_zero_write),
        cmocka_unit_test(own_save_load_and_sampling),
    };
    return cmocka_run_group_tests_name("stacked_mlp", tests, NULL, NULL);
}
