/* SPDX-License-Identifier: Apache-2.0 */
/* test_first_error.c: tests that all ranks report the error of the first rank that failed, whatever the
 * exchange and the other ranks say. */
#include "comm/first_error.h"
#include "test/cmocka.h"

#include <stdbool.h>
#include <string.h>

enum { N = 4, TEXT = 24 };

struct record {
    int64_t before; /* nothing depends on the alignment of members */
    ZR_FIRST_ERROR(TEXT);
    char after[3];
};

/* The error of each rank; "" for a rank without one. */
struct row {
    int code[N];
    const char *text[N];
    int met; /* the result of the exchange */
    struct {
        int me, err;
        const char *text;
    } want[N];
};

static const struct row rows[] = {
    {.want = {{0, 0, "before"}, {3, 0, "before"}}},
    {.code = {0, ZERO_ERR_IO},
     .text = {"", "the disk"},
     .want = {{0, ZERO_ERR_IO, "rank 1: the disk"},
              {1, ZERO_ERR_IO, "the disk"},
              {2, ZERO_ERR_IO, "rank 1: the disk"}}},
    /* When two ranks have failed, all report the same one. */
    {.code = {0, 0, ZERO_ERR_NOMEM, ZERO_ERR_ARG},
     .text = {"", "", "no memory", "stage is 7"},
     .want = {{0, ZERO_ERR_NOMEM, "rank 2: no memory"},
              {2, ZERO_ERR_NOMEM, "no memory"},
              {3, ZERO_ERR_NOMEM, "rank 2: no memory"}}},
    /* A rank that cannot reach the others reports its own error. */
    {.code = {0, 0, ZERO_ERR_NOMEM, ZERO_ERR_ARG},
     .text = {"", "", "no memory", "stage is 7"},
     .met = ZERO_ERR_PEER,
     .want = {{0, ZERO_ERR_PEER, "before"},
              {2, ZERO_ERR_NOMEM, "no memory"},
              {3, ZERO_ERR_ARG, "stage is 7"}}},
    /* A rank that waited in vain for a failed one does not take precedence over it. Of two such ranks, the
     * first does. */
    {.code = {ZERO_ERR_TIMEOUT, ZERO_ERR_PEER, ZERO_ERR_IO, ZERO_ERR_ARG},
     .text = {"waited", "lost", "the disk", "stage is 7"},
     .want = {{0, ZERO_ERR_IO, "rank 2: the disk"},
              {2, ZERO_ERR_IO, "the disk"},
              {3, ZERO_ERR_IO, "rank 2: the disk"}}},
    {.code = {0, ZERO_ERR_PEER, ZERO_ERR_TIMEOUT},
     .text = {"", "lost", "waited"},
     .want = {{0, ZERO_ERR_PEER, "rank 1: lost"}, {2, ZERO_ERR_PEER, "rank 1: lost"}}},
    /* An unknown code is a failure. */
    {.code = {0, 0x78787878},
     .text = {"", "xxxx"},
     .want = {{0, ZERO_ERR_FAILED, "rank 1: xxxx"}, {2, ZERO_ERR_FAILED, "rank 1: xxxx"}}},
    /* A long text is cut. */
    {.code = {ZERO_ERR_IO},
     .text = {"0123456789012345678901234567890"},
     .want = {{0, ZERO_ERR_IO, "01234567890123456789012"},
              {1, ZERO_ERR_IO, "rank 0: 01234567890123456789012"}}},
};

static void first_that_failed(void **state)
{
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct record all[N];
        memset(all, 0x5a, sizeof all);
        for (int r = 0; r < N; r++) {
            zr_fail(0, "%s", rows[i].text[r] ? rows[i].text[r] : "left over");
            assert_int_equal(zr_first_error_put(&all[r], rows[i].code[r]), rows[i].code[r]);
        }
        for (int k = 0; k < N && rows[i].want[k].text; k++) {
            int me = rows[i].want[k].me;
            zr_fail(0, "before");
            int err = zr_first_error(rows[i].met, &all[me], all, N, me);
            if (err != rows[i].want[k].err || strcmp(zr_error_text(), rows[i].want[k].text) != 0)
                fail_msg("row %zu, rank %d: %d \"%s\"", i, me, err, zr_error_text());
        }
    }
}

/* Another process may send anything, such as a text without an end. */
static void text_without_end(void **state)
{
    struct record all[N] = {0};
    all[1].err = ZERO_ERR_IO;
    memset(all[1].text, 'x', sizeof all[1].text);
    memset(all[1].after, 'y', sizeof all[1].after);
    assert_int_equal(zr_first_error_of(all, N, 0), ZERO_ERR_IO);
    assert_string_equal(zr_error_text(), "rank 1: xxxxxxxxxxxxxxxxxxxxxxx");
}

/* No old bytes of the memory are sent to other ranks. */
static void nothing_else_is_sent(void **state)
{
    struct record mine;
    memset(&mine, 0x5a, sizeof mine);
    zr_fail(0, "abc");
    zr_first_error_put(&mine, ZERO_ERR_IO);
    for (size_t i = 3; i < sizeof mine.text; i++)
        assert_int_equal(mine.text[i], 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(first_that_failed),
        cmocka_unit_test(text_without_end),
        cmocka_unit_test(nothing_else_is_sent),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
