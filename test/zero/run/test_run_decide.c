/* SPDX-License-Identifier: Apache-2.0 */
/* test_run_decide.c: what zero-run decides after an attempt of a job has ended, row by row. */
#include "test/cmocka.h"
#include "zero/run/run_decide.h"

#include <stdio.h>
#include <string.h>

/* A row sets only the fields that differ from the macros below. */
#pragma GCC diagnostic ignored "-Woverride-init"

/* clang-format off */
#define EVENLY  " ranks cannot share evenly; --allow-batch-change goes on with "
#define UNKNOWN ", and no rank's record says how many micro-batches a step has; --allow-batch-change goes on with the program's number for "

/* Three restarts, none used; four ranks that reached step 12. Arguments add fields. */
#define AGAIN(...)    {.restarts = 3}, {.n_attempts = 1, .world = 4, .n_available = 4, .max_step = 12, .first_world = 4, .first_accum = 1, __VA_ARGS__}
#define LEFT(n, ...)  {.restarts = 3, __VA_ARGS__}, {.n_attempts = 1, .world = 4, .n_available = n, .max_step = 12, .first_world = 4, .first_accum = 1}
#define LEFT3(n, ...) {.restarts = 3, __VA_ARGS__}, {.n_attempts = 1, .world = 4, .n_available = n, .max_step = 12, .first_world = 4, .first_accum = 3}
/* Four ranks without any record. n: restarts allowed. */
#define DARK(n, ...)  {.restarts = n}, {.world = 4, .n_available = 4, .max_step = -1, __VA_ARGS__}
#define DARK2(...)    {.restarts = 3, __VA_ARGS__}, {.n_attempts = 1, .world = 4, .n_available = 2, .max_step = -1}

/* The expected result: no restart, or this many ranks and micro-batches per rank (0: the program's
 * number). */
#define NONE      false, 0, 0
#define OF(w, a)  true, w, a

static const struct row {
    const char *what;
    struct zr_run_limits l;
    struct zr_run_ended e;
    bool restart;
    int world, accum;
    const char *text;
} rows[] = {
    /* No restart, and no message. */
    {"none wanted", DARK(0, .n_attempts = 1), NONE, ""},
    {"none wanted, cannot start", DARK(0, .n_attempts = 1, .cannot_start = true), NONE, ""},
    {"none wanted, fewer", DARK(0, .n_attempts = 1, .n_available = 2), NONE, ""},
    {"asked to end", AGAIN(.asked = true), NONE, ""},
    {"asked to end, cannot start", AGAIN(.asked = true, .cannot_start = true), NONE, ""},
    {"asked to end, used up", DARK(1, .n_attempts = 2, .asked = true), NONE, ""},

    /* The same ranks again. */
    {"first", AGAIN(), OF(4, 0), "restart 1 of 3: 4 ranks; step 12 was reached"},
    {"second", AGAIN(.n_attempts = 2), OF(4, 0), "restart 2 of 3: 4 ranks; step 12 was reached"},
    {"last", AGAIN(.n_attempts = 3, .max_step = 30), OF(4, 0), "restart 3 of 3: 4 ranks; step 30 was reached"},
    {"before the first step", AGAIN(.max_step = 0), OF(4, 0), "restart 1 of 3: 4 ranks; step 0 was reached"},
    {"one rank", AGAIN(.world = 1, .n_available = 1, .first_world = 1, .first_accum = 8), OF(1, 0), "restart 1 of 3: 1 rank; step 12 was reached"},
    {"nothing known", DARK(3, .n_attempts = 1), OF(4, 0), "restart 1 of 3: 4 ranks; no record tells of a step"},
    {"as many as the least", LEFT(4, .min_ranks = 4), OF(4, 0), "restart 1 of 3: 4 ranks; step 12 was reached"},

    /* No more restarts. */
    {"used up", AGAIN(.n_attempts = 4), NONE, "no restart: all restarts are used up"},
    {"the one", DARK(1, .n_attempts = 2), NONE, "no restart: the one restart is used up"},
    {"used up, fewer", DARK(1, .n_attempts = 2, .n_available = 2), NONE, "no restart: the one restart is used up"},
    {"used up, no step", DARK(2, .n_attempts = 3, .n_without_step = 2), NONE, "no restart: all restarts are used up"},
    {"cannot start", AGAIN(.cannot_start = true), NONE, "no restart: the program cannot be started"},
    {"processes are left", AGAIN(.leftovers = true), NONE, "no restart: processes of the ranks have not ended, and might write to the same files"},

    /* Restarts in a row without a new step. */
    {"one without", AGAIN(.n_without_step = 1), OF(4, 0), "restart 1 of 3: 4 ranks; step 12 was reached"},
    {"two without", AGAIN(.n_without_step = 2), NONE, "no restart: 2 restarts in a row reached no new step (the last one was 12)"},
    {"three without", AGAIN(.n_without_step = 3), NONE, "no restart: 3 restarts in a row reached no new step (the last one was 12)"},
    {"two before the first", AGAIN(.max_step = 0, .n_without_step = 2), NONE, "no restart: 2 restarts in a row reached no new step (the last one was 0)"},
    {"one without any", DARK(9, .n_attempts = 2, .n_without_step = 1), OF(4, 0), "restart 2 of 9: 4 ranks; no record tells of a step"},
    {"two without any", DARK(9, .n_attempts = 3, .n_without_step = 2), NONE,
     "no restart: 2 restarts in a row reached no step, according to the records of libzero"},

    /* Fewer ranks. */
    {"fewer, not allowed", LEFT(2), NONE, "no restart: 2 of 4 ranks are left; --min-ranks M allows fewer"},
    {"one, not allowed", LEFT(1), NONE, "no restart: 1 of 4 ranks is left; --min-ranks M allows fewer"},
    {"too few", LEFT(2, .min_ranks = 3), NONE, "no restart: 2 ranks are left, and --min-ranks is 3"},
    {"too few, one", LEFT(1, .min_ranks = 2), NONE, "no restart: 1 rank is left, and --min-ranks is 2"},
    {"half", LEFT(2, .min_ranks = 2), OF(2, 2), "restart 1 of 3: 2 ranks, grad_accum_steps 2; step 12 was reached"},
    {"half of 12", LEFT3(2, .min_ranks = 2), OF(2, 6), "restart 1 of 3: 2 ranks, grad_accum_steps 6; step 12 was reached"},
    {"three of 12", LEFT3(3, .min_ranks = 1), OF(3, 4), "restart 1 of 3: 3 ranks, grad_accum_steps 4; step 12 was reached"},
    {"a quarter", LEFT(1, .min_ranks = 1), OF(1, 4), "restart 1 of 3: 1 rank, grad_accum_steps 4; step 12 was reached"},
    {"half, again", {.restarts = 3, .min_ranks = 2},
     {.n_attempts = 2, .world = 2, .n_available = 2, .max_step = 12, .n_without_step = 1, .first_world = 4, .first_accum = 1, .accum = 2}, OF(2, 2),
     "restart 2 of 3: 2 ranks; step 12 was reached"},
    {"half, and half of it", {.restarts = 3, .min_ranks = 1},
     {.n_attempts = 2, .world = 2, .n_available = 1, .max_step = 20, .first_world = 4, .first_accum = 1, .accum = 2}, OF(1, 4),
     "restart 2 of 3: 1 rank, grad_accum_steps 4; step 20 was reached"},
    {"half, and no record of the first", {.restarts = 3, .min_ranks = 1}, {.n_attempts = 2, .world = 2, .n_available = 1, .max_step = 20}, NONE,
     "no restart: 1 of 2 ranks is left" UNKNOWN "1"},
    {"more than at first", LEFT3(6, .min_ranks = 1), OF(6, 2), "restart 1 of 3: 6 ranks, grad_accum_steps 2; step 12 was reached"},

    /* Ranks that cannot share the micro-batches evenly. */
    {"12 over 5", LEFT3(5, .min_ranks = 1), NONE, "no restart: a step has 12 micro-batches (4 ranks, grad_accum_steps 3), which 5" EVENLY "10"},
    {"4 over 3", LEFT(3, .min_ranks = 1), NONE, "no restart: a step has 4 micro-batches (4 ranks, grad_accum_steps 1), which 3" EVENLY "3"},
    {"4 over 6", LEFT(6, .min_ranks = 1), NONE, "no restart: a step has 4 micro-batches (4 ranks, grad_accum_steps 1), which 6" EVENLY "6"},
    {"1 over 3", {.restarts = 1, .min_ranks = 1}, {.n_attempts = 1, .world = 1, .n_available = 3, .max_step = 1, .first_world = 1, .first_accum = 1}, NONE,
     "no restart: a step has 1 micro-batch (1 rank, grad_accum_steps 1), which 3" EVENLY "3"},
    {"12 over 5, allowed", LEFT3(5, .min_ranks = 1, .allow_batch_change = true), OF(5, 2),
     "restart 1 of 3: 5 ranks, grad_accum_steps 2: 10 micro-batches in a step instead of 12; step 12 was reached"},
    {"4 over 3, allowed", LEFT(3, .min_ranks = 1, .allow_batch_change = true), OF(3, 1),
     "restart 1 of 3: 3 ranks, grad_accum_steps 1: 3 micro-batches in a step instead of 4; step 12 was reached"},
    {"half, allowed too", LEFT(2, .min_ranks = 1, .allow_batch_change = true), OF(2, 2),
     "restart 1 of 3: 2 ranks, grad_accum_steps 2; step 12 was reached"},
    {"the same, allowed too", LEFT3(4, .min_ranks = 1, .allow_batch_change = true), OF(4, 0), "restart 1 of 3: 4 ranks; step 12 was reached"},
    {"as at first again", {.restarts = 9, .min_ranks = 1, .allow_batch_change = true},
     {.n_attempts = 2, .world = 3, .n_available = 4, .max_step = 12, .first_world = 4, .first_accum = 1, .accum = 1}, OF(4, 0),
     "restart 2 of 9: 4 ranks; step 12 was reached"},

    /* No record tells the number of micro-batches per step. */
    {"not known", DARK2(.min_ranks = 1), NONE, "no restart: 2 of 4 ranks are left" UNKNOWN "2"},
    {"not known, allowed", DARK2(.min_ranks = 1, .allow_batch_change = true), OF(2, 0), "restart 1 of 3: 2 ranks; no record tells of a step"},
    {"not known, too few", DARK2(.min_ranks = 3), NONE, "no restart: 2 ranks are left, and --min-ranks is 3"},

    {"large numbers", {.restarts = 1000000, .min_ranks = 1},
     {.n_attempts = 999999, .world = 4096, .n_available = 2048, .max_step = INT64_MAX, .first_world = 4096, .first_accum = 1000000}, OF(2048, 2000000),
     "restart 999999 of 1000000: 2048 ranks, grad_accum_steps 2000000; step 9223372036854775807 was reached"},
};
/* clang-format on */

static void test_rows(void **state)
{
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const struct row *r = &rows[i];
        struct zr_run_next next;
        memset(&next, 'x', sizeof next);
        zr_run_decide(&r->l, &r->e, &next);
        if (next.restart != r->restart ||
            (next.restart && (next.world != r->world || next.accum != r->accum)))
            fail_msg("%s: restart %d, world %d, accum %d: \"%s\"", r->what, next.restart, next.world,
                     next.accum, next.text);
        if (strcmp(next.text, r->text) != 0)
            fail_msg("%s:\n%s\nexpected:\n%s", r->what, next.text, r->text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_rows)};
    return cmocka_run_group_tests_name("run_decide", tests, NULL, NULL);
}
