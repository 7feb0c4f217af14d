/* SPDX-License-Identifier: Apache-2.0 */
/* test_state_parts.c: masters and states in a file (shard/engine/state_parts.c), on the simulated device.
 * Flats have several parts. The verifier checks that an update gets the states of the step before, and that
 * no buffer is overwritten while it is used. */
#include "shard/verify/verify.h"
#include "test/cmocka.h"
#include "zero/types.h"

#include <stdio.h>

static void parts_are_read_updated_and_written(void **state)
{
    for (int i = 0; i < 4 * 3 * 3 * 2; i++) {
        char text[256];
        struct zr_verify_case c;
        struct zr_verify_result r;
        snprintf(
            text, sizeof text,
            "seed=%d stage=%d masters=%d moments=%d caller=%d states=%d world=2 n_units=3 accum=1 n_steps=3 "
            "bf16=1 values=1 poison=1 dead=-1",
            i, i % 4, i / 4 % 3, i / 12 % 3, i / 36, ZERO_STATES_FILE);
        assert_int_equal(zr_verify_parse(text, &c), 0);
        assert_int_equal(zr_verify_run(&c, NULL, &r), 0);
        if (r.n_reports)
            fail_msg("%s\n%s", text, r.text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(parts_are_read_updated_and_written)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
