/* SPDX-License-Identifier: Apache-2.0 */
/* test_log.c: tests who receives a log line and a warning, for every kind of receiver. */
#include "kernels/error.h"
#include "kernels/log.h"
#include "test/cmocka.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct received {
    char text[1024];
};

static void keep(void *arg, const char *line)
{
    struct received *r = arg;
    assert_null(strchr(line, '\n'));
    strncat(r->text, line, sizeof r->text - strlen(r->text) - 1);
    strncat(r->text, "|", sizeof r->text - strlen(r->text) - 1);
}

static void read_file(const char *path, struct received *r)
{
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    r->text[fread(r->text, 1, sizeof r->text - 1, f)] = 0;
    fclose(f);
}

static const char *context = "";

/* Uses a log and collects its output on standard error. ZERO_LOG is `where`, and the program may have a
 * log function. */
static void use(const char *where, struct received *program, struct received *on_stderr)
{
    struct zr_log *log;
    char path[] = "/tmp/zero-log-XXXXXX";
    int file = mkstemp(path), old = dup(STDERR_FILENO);
    assert_true(file >= 0 && old >= 0);
    assert_true(dup2(file, STDERR_FILENO) >= 0);
    int err = zr_log_open(program ? keep : NULL, program, where, &log);
    if (!err) {
        zr_info(log, "line %d", 1);
        zr_warn(log, "first %d", 2);
        zr_log_set_rank(log, 3, context);
        zr_warn(log, "first %d", 2);
        zr_warn(log, "second");
        zr_info(log, "line %d", 1);
    }
    zr_log_close(log);
    assert_true(dup2(old, STDERR_FILENO) >= 0);
    close(old);
    close(file);
    read_file(path, on_stderr);
    unlink(path);
    assert_int_equal(err, 0);
}

#define PROGRAM "line 1|warning: first 2|warning: second|line 1|"
#define ALL                                                                                                  \
    "libzero: line 1\nlibzero: warning: first 2\nlibzero: rank 3: warning: second\n"                         \
    "libzero: rank 3: line 1\n"
#define WARNINGS "libzero: warning: first 2\nlibzero: rank 3: warning: second\n"

/* Log lines of a context with a name start with it. */
static void test_name(void **state)
{
    struct received r;
    context = "gen";
    use("", NULL, &r);
    context = "";
    assert_string_equal(r.text, "libzero: warning: first 2\nlibzero: rank 3 of \"gen\": warning: second\n");
}

static void test_nobody_listens(void **state)
{
    struct received r;
    use(NULL, NULL, &r);
    assert_string_equal(r.text, WARNINGS);
    use("", NULL, &r);
    assert_string_equal(r.text, WARNINGS);
    use("off", NULL, &r);
    assert_string_equal(r.text, "");
    use("stderr", NULL, &r);
    assert_string_equal(r.text, ALL);
}

static void test_program_listens(void **state)
{
    static const char *const where[] = {NULL, "off", "stderr"};
    for (int i = 0; i < 3; i++) {
        struct received program = {""}, r;
        use(where[i], &program, &r);
        assert_string_equal(program.text, PROGRAM);
        assert_string_equal(r.text, i == 2 ? ALL : "");
    }
}

static void test_file(void **state)
{
    struct received r, on_stderr;
    char path[] = "/tmp/zero-log-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, "before\n", 7), 7);
    close(fd);
    use(path, NULL, &on_stderr);
    assert_string_equal(on_stderr.text, "");
    read_file(path, &r);
    assert_string_equal(r.text, "before\n" ALL);
    unlink(path);
}

static void test_no_file(void **state)
{
    struct zr_log *log;
    assert_int_equal(zr_log_open(NULL, NULL, "/tmp/there is/no such folder", &log), ZERO_ERR_ARG);
    assert_null(log);
    assert_non_null(strstr(zr_error_text(), "ZERO_LOG is \"/tmp/there is/no such folder\""));
    zr_info(NULL, "nobody");
    zr_warn(NULL, "nobody");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_nobody_listens), cmocka_unit_test(test_name),
                                       cmocka_unit_test(test_program_listens), cmocka_unit_test(test_file),
                                       cmocka_unit_test(test_no_file)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
