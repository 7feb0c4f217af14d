/* SPDX-License-Identifier: Apache-2.0 */
/* test_dtype.c: tests the table of dtypes: each dtype has its size and name, and other values have
 * neither. */
#include "kernels/dtype.h"
#include "test/cmocka.h"
#include "test/ends_by_assert.h"

static void sizes_and_names(void **state)
{
    const struct {
        enum zero_dtype t;
        int64_t bytes;
        const char *name;
    } want[] = {{ZERO_F32, 4, "f32"},
                {ZERO_BF16, 2, "bf16"},
                {ZERO_F16, 2, "f16"},
                {ZERO_I32, 4, "i32"},
                {ZERO_I64, 8, "i64"}};
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        assert_int_equal(zr_dtype_bytes(want[i].t), want[i].bytes);
        assert_string_equal(zr_dtype_name(want[i].t), want[i].name);
    }
}

static bool is_one(int t)
{
    return t >= ZERO_F32 && t <= ZERO_I64;
}

static void what_is_none(void **state)
{
    for (int t = -3; t < 100; t++)
        if (!is_one(t))
            assert_string_equal(zr_dtype_name((enum zero_dtype)t), "unknown");
}

static void ask_for_size(void *arg)
{
    zr_dtype_bytes((enum zero_dtype)9);
}

/* Asking for the size of an invalid dtype is a bug of the library. The answer must not be 2. */
static void size_of_none(void **state)
{
#ifdef ZR_ASSERTS
    assert_true(ends_by_assert(ask_for_size, NULL, "a dtype"));
#else
    assert_false(ends_by_assert(ask_for_size, NULL, ""));
    for (int t = -3; t < 100; t++)
        if (!is_one(t))
            assert_int_equal(zr_dtype_bytes((enum zero_dtype)t), 0);
#endif
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(sizes_and_names), cmocka_unit_test(what_is_none),
                                       cmocka_unit_test(size_of_none)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
