/* SPDX-License-Identifier: Apache-2.0 */
/* test_failure.c: tests kept failures: one that is saved while other calls fail, and the first of many at
 * the same time. */
#include "kernels/first_failure.h"
#include "test/cmocka.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

static void put_aside(void **state)
{
    struct zr_saved_error k, none;
    zr_fail(0, "%s", "");
    assert_int_equal(zr_error_save(&none, 0), 0);
    assert_int_equal(zr_error_save(&k, zr_fail(ZERO_ERR_IO, "100%% of %s", "the disk")), ZERO_ERR_IO);
    zr_fail(ZERO_ERR_ARG, "another");
    assert_int_equal(zr_error_restore(&k), ZERO_ERR_IO);
    assert_string_equal(zr_error_text(), "100% of the disk");
    assert_int_equal(zr_error_restore(&none), 0);
    assert_string_equal(zr_error_text(), "");
}

/* The longest text is kept whole. */
static void whole_text(void **state)
{
    char text[ZR_ERROR_BYTES + 100];
    struct zr_saved_error k;
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = 0;
    zr_error_save(&k, zr_fail(ZERO_ERR_IO, "%s", text));
    zr_fail(ZERO_ERR_ARG, "another");
    zr_error_restore(&k);
    assert_int_equal(strlen(zr_error_text()), ZR_ERROR_BYTES - 1);
}

static void the_first(void **state)
{
    struct zr_first f = {.code = 0};
    char text[16] = "?";
    assert_int_equal(zr_first_report(&f, text, sizeof text), 0);
    assert_string_equal(text, "");
    assert_true(zr_first_keep(&f, ZERO_ERR_IO, "the first of all failures"));
    assert_false(zr_first_keep(&f, ZERO_ERR_ARG, "the second"));
    assert_int_equal(zr_first_report(&f, text, sizeof text), ZERO_ERR_IO);
    assert_string_equal(text, "the first of al");
    assert_int_equal(zr_first_report(&f, NULL, 0), ZERO_ERR_IO);
}

/* A code without a text gets its name, and a failure is never 0. */
static void without_words(void **state)
{
    struct zr_first f = {.code = 0};
    assert_true(zr_first_keep(&f, 0, NULL));
    assert_int_equal(zr_first_code(&f), ZERO_ERR_FAILED);
    assert_string_equal(f.text, zr_err_name(ZERO_ERR_FAILED));
}

enum { N_THREADS = 8, N_ROUNDS = 300 };

struct race {
    struct zr_first f[N_ROUNDS];
    pthread_barrier_t start;
    _Atomic int n_first[N_ROUNDS], n_torn;
};

struct racer {
    struct race *race;
    int number;
};

static void *fail_together(void *arg)
{
    const struct racer *r = arg;
    for (int i = 0; i < N_ROUNDS; i++) {
        char mine[64], all[ZR_ERROR_BYTES], of_code[64];
        snprintf(mine, sizeof mine, "found by %d", r->number);
        pthread_barrier_wait(&r->race->start);
        r->race->n_first[i] += zr_first_keep(&r->race->f[i], -1 - r->number, mine);
        int code = zr_first_report(&r->race->f[i], all, sizeof all); /* there is one, of any thread */
        snprintf(of_code, sizeof of_code, "found by %d", -1 - code);
        r->race->n_torn += code >= 0 || strcmp(all, of_code) != 0;
    }
    return NULL;
}

/* Many threads fail at once. Each sees one complete failure as soon as it has reported its own. */
static void many_at_once(void **state)
{
    static struct race race;
    struct racer racers[N_THREADS];
    pthread_t id[N_THREADS];
    assert_int_equal(pthread_barrier_init(&race.start, NULL, N_THREADS), 0);
    for (int i = 0; i < N_THREADS; i++) {
        racers[i] = (struct racer){&race, i};
        assert_int_equal(pthread_create(&id[i], NULL, fail_together, &racers[i]), 0);
    }
    for (int i = 0; i < N_THREADS; i++)
        pthread_join(id[i], NULL);
    pthread_barrier_destroy(&race.start);
    assert_int_equal(race.n_torn, 0);
    for (int i = 0; i < N_ROUNDS; i++)
        assert_int_equal(race.n_first[i], 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(put_aside),     cmocka_unit_test(whole_text),   cmocka_unit_test(the_first),
        cmocka_unit_test(without_words), cmocka_unit_test(many_at_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
