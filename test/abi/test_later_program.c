/* SPDX-License-Identifier: Apache-2.0 */
/* test_later_program.c: a program compiled with a later zero.h. Over the library of that version it works;
 * over today's it is refused, in words, by whatever it begins with (REFUSED). */
#include "test/zero/toy_net.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#ifdef REFUSED
enum { refused = 1 };
#else
enum { refused = 0 };
#endif

static void outcome(const char *call, int err)
{
    if (err != (refused ? ZERO_ERR_ARG : 0))
        fail_msg("%s: %d \"%s\"", call, err, err ? zero_last_error() : "");
    if (refused &&
        (!strstr(zero_last_error(), call) || !strstr(zero_last_error(), "built with a later zero.h")))
        fail_msg("%s says \"%s\"", call, zero_last_error());
}

static void begins(void **state)
{
    (void)state;
    struct zero_config cfg = ZERO_CONFIG_INIT, begun, was;
    assert_int_equal(cfg.added, 77);
    outcome("zero_config_set", zero_config_set(&cfg, "stage", "2"));
    memset(&begun, 0x5a, sizeof begun);
    was = begun;
    outcome("zero_config_init", zero_config_init(&begun, sizeof begun));
    if (refused)
        assert_memory_equal(&begun, &was, sizeof was);
    else
        assert_int_equal(begun.added, 77);
    struct zero_place p;
    outcome("zero_find_place", zero_find_place(&cfg, &p));
}

static void wraps(void **state)
{
    (void)state;
    for (int only_tables = 0; only_tables < 2; only_tables++) {
        struct toy_rank r = {.world = 1};
        struct zero_config cfg = toy_config(&r, 1);
        struct zero_step_info info = {.added = 5};
        struct zero_plan_info plan = {.added = 5};
        struct zero_stats stats = {.added = 5};
        struct toy m;
        zero_ctx *z = NULL;
        /* zero_config may be the one that did not grow. */
        if (refused && only_tables)
            cfg.size -= sizeof cfg.added;
        toy_make(&m);
        outcome("zero_plan", zero_plan(m.table, TOY_TENSORS, &cfg, &plan));
        outcome("zero_wrap", zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
        if (refused) {
            assert_null(z);
            assert_true(toy_untouched(&m));
            assert_int_equal(plan.added, 5);
        } else {
            assert_int_equal(toy_forward(&m, z, true), 0);
            assert_int_equal(toy_backward(&m, z, true, 0, 0), 0);
            assert_int_equal(zero_step(z, 1e-2f, &info), 0);
            assert_int_equal(zero_get_stats(z, &stats), 0);
            assert_int_equal(info.added + plan.added + stats.added, 0); /* all of its structs is written */
            assert_int_equal(zero_unwrap(&z), 0);
        }
        toy_free(&m);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(begins), cmocka_unit_test(wraps)};
    return cmocka_run_group_tests_name("a program of a later zero.h", tests, NULL, NULL);
}
