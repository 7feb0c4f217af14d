/* SPDX-License-Identifier: Apache-2.0 */
/* test_hostlist.c: tests lists of hosts in Slurm's form: the first name, the number of hosts, and the
 * character at which a malformed list is refused. */
#include "comm/meet/meeting_point.h"
#include "test/cmocka.h"

#include <stdio.h>
#include <string.h>

static void test_lists(void **state)
{
    static const struct {
        const char *list, *first;
        int64_t n;
    } rows[] = {
        {"login", "login", 1},
        {"node[01-03,07],login", "node01", 5},
        {"rack[1-2]n[01-10]-ib,login", "rack1n01-ib", 21},
        {"a,b,c", "a", 3},
        {"a,a", "a", 2},
        {"n[7]", "n7", 1},
        {"n[0]", "n0", 1},
        {"n[007-010]", "n007", 4},
        {"n[8-10]", "n8", 3},
        {"n[3,1-2]", "n3", 3},
        {"[1-2]x", "1x", 2},
        {"[5]", "5", 1},
        {"10", "10", 1},
        {"a.b_c-d[9-9]", "a.b_c-d9", 1},
        {"-a", "-a", 1},
        {"n[1-65536]", "n1", 65536},
        {"n[1-256][1-256]", "n11", 65536},
        {"gpu[0-3][0-3]", "gpu00", 16},
        {"gpu[0-3][0-3],cpu[00-99]", "gpu00", 116},
        {"n[999999999999999998-999999999999999999]", "n999999999999999998", 2},
        {"ip-10-0-0-[12,17-19].eu-west-1.compute.internal", "ip-10-0-0-12.eu-west-1.compute.internal", 4},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char first[ZR_HOSTLIST_NAME];
        int64_t n = -1;
        int err = zr_hostlist_first("LIST", rows[i].list, first, &n);
        if (err || strcmp(first, rows[i].first) || n != rows[i].n)
            fail_msg("%s: code %d, %lld names, first %s: %s", rows[i].list, err, (long long)n, first,
                     err ? zr_error_text() : "");
    }
}

static void refuse_at(const char *list, int at, const char *what)
{
    char first[ZR_HOSTLIST_NAME] = "x", want[96];
    int64_t n = 5;
    int err = zr_hostlist_first("SLURM_STEP_NODELIST", list, first, &n);
    snprintf(want, sizeof want, "\": %s at character %d;", what, at);
    if (err != ZERO_ERR_ARG || strcmp(first, "x") || n != 5)
        fail_msg("%.80s: code %d, %lld names, first %s", list, err, (long long)n, first);
    if (!strstr(zr_error_text(), want) || strncmp(zr_error_text(), "SLURM_STEP_NODELIST is \"", 24))
        fail_msg("%.80s: %s, expected %s", list, zr_error_text(), want);
}

static void test_refused(void **state)
{
    static const struct {
        const char *list;
        int at;
        const char *what;
    } rows[] = {
        {"", 1, "the end"},
        {",a", 1, "no name"},
        {"a,", 3, "the end"},
        {"a,,b", 3, "no name"},
        {"n[", 3, "no number"},
        {"n[]", 3, "no number"},
        {"n[a]", 3, "no number"},
        {"n[1", 4, "no ]"},
        {"n[1-2", 6, "no ]"},
        {"n[1x]", 4, "no ]"},
        {"n[1-", 5, "no number"},
        {"n[1--2]", 5, "no number"},
        {"n[1,]", 5, "no number"},
        {"n[,1]", 3, "no number"},
        {"n[3-1]", 6, "a range that goes down"},
        {"n]", 2, "what no name has"},
        {"a b", 2, "what no name has"},
        {"a\n", 2, "what no name has"},
        {"a/b", 2, "what no name has"},
        {"(null)", 1, "no name"},
        {"n[[1]]", 3, "no number"},
        {"n[1-65537]", 10, "more than 65536 names"},
        {"n[1-300][1-300]", 16, "more than 65536 names"},
        {"n[1-65536],m", 13, "more than 65536 names"},
        {"n[1234567890123456789]", 21, "a number of more than 18 digits"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        refuse_at(rows[i].list, rows[i].at, rows[i].what);
}

static void test_long_names(void **state)
{
    char list[400], first[ZR_HOSTLIST_NAME];
    int64_t n;
    memset(list, 'a', sizeof list);
    list[255] = 0;
    assert_int_equal(zr_hostlist_first("LIST", list, first, &n), 0);
    assert_string_equal(first, list);
    list[255] = 'a';
    list[256] = 0;
    refuse_at(list, 257, "a name of more than 255 characters");
    strcpy(list + 250, "[123456-123457]"); /* 256 characters in all */
    refuse_at(list, 258, "a name of more than 255 characters");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lists),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_long_names),
    };
    return cmocka_run_group_tests_name("hostlist", tests, NULL, NULL);
}
