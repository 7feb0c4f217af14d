/* SPDX-License-Identifier: Apache-2.0 */
/* test_mutants.c: tests that the checker notices each wait, record, fence, release and barrier that is
 * left out. */
#include "shard/verify/verify.h"
#include "test/cmocka.h"

static void every_mutant_is_caught(void **state)
{
    int n_linked = 0, n_survived = 0, n = zr_mutant_count();
    for (int i = 0; i < n; i++) {
        const struct zr_mutant *m = zr_mutant_at(i);
        struct zr_verify_result r;
        int64_t n_acted;
        n_linked += zr_mutant_link(m) != NULL;
        if (zr_mutant_hunt(m, 1, 1000, &n_acted, &r) >= 0) {
            assert_true(r.text[0]);
            continue;
        }
        print_error("\"%s\" survived 1000 seeds; it acted in %lld\n", zr_mutant_name(m), (long long)n_acted);
        n_survived++;
    }
    print_message("%d of %d mutants caught, %d of them known from elsewhere\n", n - n_survived, n, n_linked);
    assert_int_equal(n_survived, 0);
    assert_true(n_linked >= 32);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_mutant_is_caught)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
