/* test_verify.c: the engine on the simulated world: cases that once failed, many seeds, and that nothing the
 * device answers changes what is done. */
#include "shard/verify.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void passes(const struct zr_verify_case *c, struct zr_verify_result *r)
{
    char text[1024];
    assert_int_equal(zr_verify_run(c, NULL, r), 0);
    if (r->n_reports) {
        zr_verify_describe(c, text, sizeof text);
        print_error("%s\n%s\n", text, r->text);
        fail();
    }
}

/* Each of these was a fault of the engine. */
static void once_failed(void **state)
{
    static const char *const cases[] = {
        /* Gradients stored instead of added, without a reduce for every micro-batch: the first micro-batch
           was lost. */
        "seed=499 stage=0 world=2 n_units=1 accum=2 n_steps=1 overwrite=1 poison=-1 dead=-1",
        "seed=499 stage=1 world=2 n_units=1 accum=2 n_steps=1 overwrite=1 poison=-1 dead=-1",
        /* A step without any gradient zeroed a sum that a slower peer was still gathering for the step
           before. */
        "seed=1814 stage=0 world=2 n_units=5 accum=1 n_steps=2 frozen=63 skipped=3 overwrite=1 poison=-1 "
        "dead=-1",
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct zr_verify_case c;
        struct zr_verify_result r;
        assert_int_equal(zr_verify_parse(cases[i], &c), 0);
        passes(&c, &r);
        assert_true(r.n_ops > 0 && !r.refused);
    }
}

static void seeds(void **state)
{
    (void)state;
    const char *given = getenv("SEED");
    uint64_t first = given ? strtoull(given, NULL, 0) : 1;
    int64_t n_ops = 0;
    for (uint64_t s = first; s < first + 1000; s++) {
        struct zr_verify_case c;
        struct zr_verify_result r;
        zr_verify_case_random(s, &c);
        passes(&c, &r);
        n_ops += r.n_ops;
    }
    assert_true(n_ops > 100000);
}

/* The text of a case replays it exactly. */
static void replays(void **state)
{
    (void)state;
    for (uint64_t s = 1; s < 60; s++) {
        struct zr_verify_case c, again;
        struct zr_verify_result r, same;
        char text[1024];
        zr_verify_case_random(s, &c);
        zr_verify_describe(&c, text, sizeof text);
        assert_int_equal(zr_verify_parse(text, &again), 0);
        passes(&c, &r);
        passes(&again, &same);
        assert_true(r.action_hash == same.action_hash && r.n_ops == same.n_ops &&
                    r.n_accesses == same.n_accesses);
    }
    struct zr_verify_case c;
    assert_int_equal(zr_verify_parse("stage=3 world=65 n_units=1 accum=1 n_steps=1", &c), ZR_ERR_ARG);
    assert_int_equal(zr_verify_parse("stage=3 wold=2", &c), ZR_ERR_ARG);
    assert_int_equal(zr_verify_parse("stage=3 world", &c), ZR_ERR_ARG);
}

/* One run of a configuration speaks for all orders of the device, since no answer of the device reaches the
 * core: whatever it says about events, and whenever the loop gets to its work, the same actions are taken. */
static void decisions_depend_on_calls_only(void **state)
{
    (void)state;
    for (uint64_t s = 1; s < 200; s++) {
        struct zr_verify_case c;
        struct zr_verify_result first, r;
        zr_verify_case_random(s, &c);
        c.dead = -1;
        c.fail_alloc = 0;
        c.pace = ZR_PACE_AT_ONCE;
        passes(&c, &first);
        for (int k = 0; k < 6; k++) {
            c.event_done = k % 3;
            c.pace = k < 3 ? ZR_PACE_LATE : ZR_PACE_RANDOM;
            passes(&c, &r);
            assert_true(r.action_hash == first.action_hash);
        }
    }
}

/* A model that leaves a zero_begin out, on one rank, is told what it uses, and where. */
static void outside_a_bracket(void **state)
{
    (void)state;
    struct zr_verify_case c;
    struct zr_verify_result r;
    const struct zr_mutant *m = NULL;
    assert_int_equal(
        zr_verify_parse("seed=1 stage=3 world=2 n_units=4 accum=1 n_steps=2 poison=-1 dead=-1", &c), 0);
    for (int i = 0; i < zr_mutant_count(); i++)
        if (!strcmp(zr_mutant_name(zr_mutant_at(i)), "one rank does not use a unit"))
            m = zr_mutant_at(i);
    assert_non_null(m);
    assert_int_equal(zr_verify_run(&c, m, &r), 0);
    assert_true(r.n_reports > 0);
    assert_non_null(strstr(r.text, "the model's fault: rank 1 uses t"));
    assert_non_null(strstr(r.text, "of unit 0 in forward, step 1, outside its bracket"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(once_failed),       cmocka_unit_test(seeds),
        cmocka_unit_test(replays),           cmocka_unit_test(decisions_depend_on_calls_only),
        cmocka_unit_test(outside_a_bracket),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
