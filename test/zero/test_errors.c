/* SPDX-License-Identifier: Apache-2.0 */
/* test_errors.c: error codes, texts and the last error, as programs see them through the shared library. */
#include "test/cmocka.h"
#include "zero/zero.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

static void test_texts(void **state)
{
#define CHECK(name, value, text, help)                                                                       \
    assert_int_equal(ZERO_ERR_##name, value);                                                                \
    assert_string_equal(zero_strerror(value), text);                                                         \
    assert_int_equal(help[strlen(help) - 1], '.');
    ZERO_ERR_MAP(CHECK)
#undef CHECK
    assert_string_equal(zero_strerror(0), "success");
    static const int unknown[] = {1, -12, -1000, 2147483647, -2147483647 - 1};
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++)
        assert_string_equal(zero_strerror(unknown[i]), "unknown error");
}

static void test_codes_are_distinct(void **state)
{
    static const int codes[] = {
#define CODE(name, value, text, help) value,
        ZERO_ERR_MAP(CODE)
#undef CODE
    };
    const int n = sizeof codes / sizeof *codes;
    for (int i = 0; i < n; i++)
        for (int k = 0; k < i; k++) {
            assert_int_not_equal(codes[i], codes[k]);
            assert_string_not_equal(zero_strerror(codes[i]), zero_strerror(codes[k]));
        }
    assert_int_equal(n, 11);
}

static void test_version(void **state)
{
    char text[32];
    snprintf(text, sizeof text, "%d.%d.%d", ZERO_VERSION_MAJOR, ZERO_VERSION_MINOR, ZERO_VERSION_PATCH);
    assert_string_equal(zero_version(), text);
    assert_string_equal(zero_version(), PROJECT_VERSION); /* the version in meson.build */
}

static void *fails_elsewhere(void *arg)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    int *wrong = arg;
    *wrong = strcmp(zero_last_error(), "") != 0;
    zero_config_set(&cfg, "clip", "much");
    *wrong |= !strstr(zero_last_error(), "clip is \"much\"");
    return NULL;
}

static void test_last_error_is_per_thread(void **state)
{
    assert_string_equal(zero_last_error(), "");
    struct zero_config cfg = ZERO_CONFIG_INIT;
    assert_int_equal(zero_config_set(&cfg, "stage", "9"), ZERO_ERR_ARG);
    assert_string_equal(zero_last_error(), "stage is \"9\"; allowed: 0, 1, 2, 3");
    pthread_t thread;
    int wrong = 1;
    assert_int_equal(pthread_create(&thread, NULL, fails_elsewhere, &wrong), 0);
    pthread_join(thread, NULL);
    assert_int_equal(wrong, 0);
    assert_string_equal(zero_last_error(), "stage is \"9\"; allowed: 0, 1, 2, 3");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_last_error_is_per_thread), /* must run before any call has failed */
        cmocka_unit_test(test_texts),
        cmocka_unit_test(test_codes_are_distinct),
        cmocka_unit_test(test_version),
    };
    return cmocka_run_group_tests_name("errors", tests, NULL, NULL);
}
