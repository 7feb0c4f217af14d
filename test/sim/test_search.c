/* SPDX-License-Identifier: Apache-2.0 */
/* test_search.c: tries every order of the host threads of small models. Also tests that a schedule without
 * its awaits, or with a job that never comes, is found to be wrong. The full search (4 units, 3 ranks) is
 * zero-bench verify --exhaustive. */
#include "shard/verify/verify.h"
#include "test/cmocka.h"

#include <string.h>

static void no_bad_state(void **state)
{
    struct zr_search_result r;
    assert_int_equal(zr_verify_search(3, 2, ZR_SEARCH_SOUND, &r), 0);
    if (r.n_bad)
        fail_msg("%s", r.text);
    assert_true(r.n_configs == 3 * (384 + 192) && r.n_states > 1000000);
    print_message("%lld configurations, %lld states\n", (long long)r.n_configs, (long long)r.n_states);
    assert_int_equal(zr_verify_search(1, 3, ZR_SEARCH_SOUND, &r), 0);
    assert_int_equal(r.n_bad, 0);
}

static void flaws_are_found(void **state)
{
    struct zr_search_result r;
    assert_int_equal(zr_verify_search(2, 2, ZR_SEARCH_NO_AWAIT, &r), 0);
    assert_int_equal(r.n_bad, r.n_configs);
    assert_non_null(strstr(r.text, "depends on the loop's pace"));
    assert_int_equal(zr_verify_search(2, 2, ZR_SEARCH_NO_PUSH, &r), 0);
    assert_true(r.n_bad > 0);
    assert_non_null(strstr(r.text, "deadlock"));
    assert_int_equal(zr_verify_search(0, 2, ZR_SEARCH_SOUND, &r), ZERO_ERR_ARG);
    assert_int_equal(zr_verify_search(2, 4, ZR_SEARCH_SOUND, &r), ZERO_ERR_ARG);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(no_bad_state), cmocka_unit_test(flaws_are_found)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
