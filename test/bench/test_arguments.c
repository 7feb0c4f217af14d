/* SPDX-License-Identifier: Apache-2.0 */
/* test_arguments.c: tests a command line read by a table with every kind of option: the stored values, the
 * text of each refusal, and what a table shared by commands adds. */
#include "bench/arguments.h"
#include "test/cmocka.h"
#include "zero/zero.h"

#include <stdio.h>
#include <string.h>

enum fruit { APPLE = 3, PEAR };

struct shared {
    int64_t depth, twice; /* twice: computed at the end */
};

struct everything {
    int64_t count, none, bytes;
    uint64_t seed;
    double share;
    int sign;
    enum fruit fruit;
    bool flag;
    const char *text;
    struct shared shared;
    int64_t sum; /* computed at the end, from the shared options too */
    int n_words;
    const char *words[4];
};

static const struct option_word signs[] = {{"plus", 1}, {"minus", -1}, {0}};
static const struct option_word fruits[] = {{"apple", APPLE}, {"pear", PEAR}, {"pear-tree", 99}, {0}};

static error_t take_word(struct argp_state *state, const struct option_row *row, char *arg, void *options)
{
    struct everything *e = options;
    if (e->n_words == 4) {
        argp_error(state, "%s%s: one too many", row ? "--" : "", row ? row->name : arg);
        return EINVAL;
    }
    e->words[e->n_words++] = arg;
    return 0;
}

static error_t finish_shared(struct argp_state *state, void *options)
{
    struct shared *s = options;
    if (s->depth == 13) {
        argp_error(state, "--depth: not 13");
        return EINVAL;
    }
    s->twice = 2 * s->depth;
    return 0;
}

static error_t finish(struct argp_state *state, void *options)
{
    struct everything *e = options;
    if (e->flag && e->text) {
        argp_error(state, "--flag: not with --text");
        return EINVAL;
    }
    e->sum = e->count + e->shared.twice;
    return 0;
}

#define OPTION_STRUCT struct shared
static const struct option_row shared_rows[] = {
    {"depth", "N", "How deep", OPTION_INT(depth, 1, 100)},
    {0},
};
#undef OPTION_STRUCT
static const struct option_table shared_table = {
    .rows = shared_rows, .header = "Shared:", .finish = finish_shared};

#define OPTION_STRUCT struct everything
static const struct option_row rows[] = {
    {"count", "N", "A count", OPTION_INT(count, -7, 1000000)},
    {.help = "More:"},
    {"none", "N", "A count or none", OPTION_INT(none, 0, 50)},
    {"bytes", "BYTES", "A size", OPTION_BYTES(bytes, 2)},
    {"seed", "N", "A seed", OPTION_INT(seed, 0, INT64_MAX)},
    {"share", "X", "A share", OPTION_DOUBLE(share, 0.25, 1e6)},
    {"sign", "plus|minus", "A sign", OPTION_WORD(sign, signs)},
    {"fruit", "NAME", "A fruit", OPTION_WORD(fruit, fruits)},
    {"flag", NULL, "A flag", OPTION_FLAG(flag)},
    {"text", "TEXT", "A text", OPTION_TEXT(text)},
    {"word", "WORD", "A word", OPTION_BY(take_word)},
    {0},
};
#undef OPTION_STRUCT
static const struct option_table table = {
    .rows = rows,
    .doc = "Reads everything.",
    .read_word = take_word,
    .finish = finish,
    .shared = &shared_table,
    .shared_at = OPTION_AT(struct everything, shared, struct shared : 0),
};
static const struct option_table only_options = {.rows = rows, .read_word = option_refuse_word};
static const struct option_table bare = {.rows = rows};

/* Reads line, split at spaces. *out gets the values, and the text what came to stderr. */
static int read_line(const struct option_table *t, const char *line, struct everything *out, char **reported)
{
    static char copy[512];
    char *argv[16] = {"test"};
    int argc = 1;
    size_t reported_bytes;
    snprintf(copy, sizeof copy, "%s", line);
    for (char *p = strtok(copy, " "); p && argc < 16; p = strtok(NULL, " "))
        argv[argc++] = p;
    FILE *terminal = stderr;
    stderr = open_memstream(reported, &reported_bytes);
    assert_non_null(stderr);
    int status = options_parse(t, "bench test", argc, argv, out);
    fclose(stderr);
    stderr = terminal;
    assert_string_equal(argv[0], "test");
    return status;
}

static void accept(const char *line, struct everything *out)
{
    char *reported;
    assert_int_equal(read_line(&table, line, out, &reported), 0);
    assert_string_equal(reported, "");
    free(reported);
}

static void refuse(const struct option_table *t, const char *line, const char *words)
{
    char *reported, expected[256];
    struct everything e = {0};
    snprintf(expected, sizeof expected, "bench test: %s\n", words);
    assert_int_equal(read_line(t, line, &e, &reported), EXIT_USAGE);
    assert_string_equal(reported, expected);
    free(reported);
}

static void test_stored(void **state)
{
    struct everything e = {0};
    accept(
        "--count=-7 --none 3 --bytes=1.5Ki --seed=9223372036854775807 --share=0.25 --sign=minus --fruit=pear "
        "--text=a=b --word one two --depth=4 -- --three",
        &e);
    assert_int_equal(e.count, -7);
    assert_int_equal(e.none, 3);
    assert_int_equal(e.bytes, 1536);
    assert_true(e.seed == INT64_MAX);
    assert_true(e.share == 0.25);
    assert_int_equal(e.sign, -1);
    assert_int_equal(e.fruit, PEAR);
    assert_false(e.flag);
    assert_string_equal(e.text, "a=b");
    assert_int_equal(e.n_words, 3);
    assert_string_equal(e.words[0], "one");
    assert_string_equal(e.words[1], "two");
    assert_string_equal(e.words[2], "--three");
    assert_int_equal(e.shared.depth, 4);
    assert_int_equal(e.sum, -7 + 8); /* the shared table is finished first */

    e = (struct everything){0};
    accept("--count=1 --count=1e6 --none=0 --bytes=2Ti --share=1e6 --flag", &e); /* the last one counts */
    assert_int_equal(e.count, 1000000);
    assert_int_equal(e.none, 0);
    assert_int_equal(e.bytes, INT64_C(2) << 40);
    assert_true(e.share == 1e6);
    assert_true(e.flag);
    accept("--bytes=2", &e);
    assert_int_equal(e.bytes, 2);
}

/* Units mean what they mean in libzero's own configuration: 1 G is 10^9 bytes. */
static void test_units(void **state)
{
    static const char *const units[] = {"",   "k",  "K",  "M",  "G",  "T",  "Ki",
                                        "Mi", "Gi", "Ti", "kB", "MB", "GiB"};
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        char line[32];
        struct everything e = {0};
        struct zero_config cfg = ZERO_CONFIG_INIT;
        snprintf(line, sizeof line, "--bytes=3%s", units[i]);
        accept(line, &e);
        assert_int_equal(zero_config_set(&cfg, "param_budget_bytes", strchr(line, '3')), 0);
        assert_int_equal(e.bytes, cfg.memory.param_budget_bytes);
    }
    struct everything e = {0};
    accept("--bytes=20G", &e);
    assert_int_equal(e.bytes, INT64_C(20000000000));
    accept("--bytes=1.5G", &e);
    assert_int_equal(e.bytes, 1500000000);
    accept("--bytes=4e6", &e);
    assert_int_equal(e.bytes, 4000000);
}

static void test_what_is_not_given_stays(void **state)
{
    struct everything e, before;
    memset(&before, 0x35, sizeof before);
    before.flag = true;
    before.text = NULL;
    before.shared.depth = 1;
    memcpy(&e, &before, sizeof e);
    accept("", &e);
    before.shared.twice = 2;
    before.sum = before.count + 2;
    assert_memory_equal(&e, &before, sizeof e);
    accept("--fruit=apple", &e);
    before.fruit = APPLE; /* and nothing else changes */
    assert_memory_equal(&e, &before, sizeof e);
    accept("--flag", &e);
    assert_memory_equal(&e, &before, sizeof e);
}

static void test_refused(void **state)
{
    for (const char *const *v = (const char *const[]){"-8", "1000001", "1.5", "1e7", "x", "7x", "nan",
                                                      "99999999999999999999", NULL};
         *v; v++) {
        char line[64], words[128];
        snprintf(line, sizeof line, "--count=%s", *v);
        snprintf(words, sizeof words, "--count: '%s' is not a whole number from -7 to 1000000", *v);
        refuse(&table, line, words);
    }
    refuse(&table, "--count=", "--count: '' is not a whole number from -7 to 1000000");
    refuse(&table, "--none=-1", "--none: '-1' is not a whole number from 0 to 50");
    refuse(&table, "--none=51", "--none: '51' is not a whole number from 0 to 50");
    refuse(&table, "--seed=-1", "--seed: '-1' is not a whole number from 0 to 9223372036854775807");
    for (const char *const *v = (const char *const[]){"1", "2KK", "K", "1e30", "2Q", "2B", "2g", "2auto",
                                                      "inf", "nan", "0.0019K", "2KiBKiBKiBKiBKiB", NULL};
         *v; v++) {
        char line[64], words[160];
        snprintf(line, sizeof line, "--bytes=%s", *v);
        snprintf(words, sizeof words,
                 "--bytes: '%s' is not a number of bytes of at least 2 (k, M, G, T or Ki, Mi, Gi, Ti may "
                 "follow)",
                 *v);
        refuse(&table, line, words);
    }
    refuse(&table, "--share=0.2", "--share: '0.2' is not a number from 0.25 to 1e+06");
    refuse(&table, "--share=1e7", "--share: '1e7' is not a number from 0.25 to 1e+06");
    refuse(&table, "--share=nan", "--share: 'nan' is not a number from 0.25 to 1e+06");
    refuse(&table, "--sign=plu", "--sign: 'plu' is not plus or minus");
    refuse(&table, "--fruit=Pear", "--fruit: 'Pear' is not apple, pear or pear-tree");
    refuse(&table, "--flag=1", "option '--flag' doesn't allow an argument");
    refuse(&table, "--text", "option '--text' requires an argument");
    refuse(&table, "--no-such", "unrecognized option '--no-such'");
    refuse(&table, "--depth=0", "--depth: '0' is not a whole number from 1 to 100");
    refuse(&table, "--word=1 --word=2 --word=3 --word=4 --word=5", "--word: one too many");
}

static void test_words(void **state)
{
    refuse(&table, "1 2 3 4 5", "5: one too many");
    refuse(&only_options, "--count=1 one", "'one' is not an option");
    refuse(&bare, "--count=1 one", "Too many arguments");
}

static void test_what_does_not_go_together(void **state)
{
    refuse(&table, "--text=x --flag", "--flag: not with --text");
    refuse(&table, "--text=x --depth=13 --flag", "--depth: not 13");
}

static void test_word_of(void **state)
{
    assert_string_equal(option_word_of(fruits, PEAR), "pear");
    assert_string_equal(option_word_of(fruits, 5), "unknown");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stored),
        cmocka_unit_test(test_units),
        cmocka_unit_test(test_what_is_not_given_stays),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_words),
        cmocka_unit_test(test_what_does_not_go_together),
        cmocka_unit_test(test_word_of),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
