/* SPDX-License-Identifier: Apache-2.0 */
/* test_tokenizer.c: ids of texts, and bytes of ids, are those of the tokenizers library (make_tokenizers.py).
 * Configurations that are not implemented are refused by name, and long pieces do not take quadratic time. */
#include "bench/tokenizer/tokenizer.h"
#include "kernels/error.h"
#include "test/cmocka.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

static const char *folder, *const names[] = {"gpt2", "llama3", "qwen2", "tekken", "stages"};
enum { N_NAMES = sizeof names / sizeof *names };
/* Whether this build has PCRE2 and utf8proc. */
static bool cuts, normalizes;

static json_t *load(const char *name)
{
    char path[1100];
    snprintf(path, sizeof path, "%s/%s.json", folder, name);
    json_t *root = json_load_file(path, JSON_ALLOW_NUL, NULL);
    if (!root)
        fail_msg("%s cannot be read", path);
    return root;
}

static struct tokenizer *open_tokenizer(const char *name)
{
    char path[1100];
    struct tokenizer *t;
    snprintf(path, sizeof path, "%s/%s.json", folder, name);
    if (tokenizer_open(&t, path))
        fail_msg("%s", zr_error_text());
    return t;
}

static bool is_ascii(const char *text, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)text[i] >= 0x80)
            return false;
    return true;
}

/* ---- references ---- */

static void expect_ids(const char *name, size_t number, const json_t *want, const struct token_ids *got)
{
    size_t i;
    json_t *id;
    json_array_foreach((json_t *)(uintptr_t)want, i,
                       id) if ((int64_t)i >= got->n || got->ids[i] != json_integer_value(id))
        fail_msg("%s, text %zu: id %zu is %d, not %lld", name, number, i,
                 (int64_t)i < got->n ? got->ids[i] : -1, (long long)json_integer_value(id));
    assert_int_equal(json_array_size(want), got->n);
}

/* The caller frees the result. */
static char *bytes_of(const struct tokenizer *t, const int32_t *ids, int64_t n_ids, bool special, size_t *n)
{
    char *all = calloc(1, 1);
    *n = 0;
    for (int64_t i = 0; i < n_ids; i++) {
        size_t k;
        const char *bytes = tokenizer_bytes(t, ids[i], &k);
        if (!special && tokenizer_is_special(t, ids[i]))
            continue;
        all = realloc(all, *n + k + 1);
        memcpy(all + *n, bytes, k);
        *n += k;
    }
    return all;
}

static void check_text(const char *name, const struct tokenizer *t, const json_t *reference, size_t i,
                       const json_t *text)
{
    const char *s = json_string_value(text);
    size_t n = json_string_length(text), n_again;
    struct token_ids ids = {0}, whole = {0};
    if (tokenizer_encode(t, s, n, false, token_ids_take, &ids))
        fail_msg("%s, text %zu: %s", name, i, zr_error_text());
    expect_ids(name, i, json_array_get(json_object_get(reference, "ids"), i), &ids);
    if (i < json_array_size(json_object_get(reference, "whole"))) {
        assert_int_equal(tokenizer_encode(t, s, n, true, token_ids_take, &whole), 0);
        expect_ids(name, i, json_array_get(json_object_get(reference, "whole"), i), &whole);
    }
    if (json_is_true(json_object_get(reference, "exact"))) {
        char *again = bytes_of(t, ids.ids, ids.n, true, &n_again);
        assert_int_equal(n, n_again);
        assert_memory_equal(s, again, n);
        free(again);
    }
    free(ids.ids);
    free(whole.ids);
}

static void test_encodes(void **state)
{
    (void)state;
    if (!cuts)
        skip();
    json_t *references = load("references"), *text;
    for (int k = 0; k < N_NAMES; k++) {
        struct tokenizer *t = open_tokenizer(names[k]);
        bool nfc = !strcmp(names[k], "qwen2") || !strcmp(names[k], "stages");
        size_t i;
        json_array_foreach(json_object_get(references, "texts"), i,
                           text) if (!nfc || normalizes ||
                                     is_ascii(json_string_value(text), json_string_length(text)))
            check_text(names[k], t, json_object_get(references, names[k]), i, text);
        tokenizer_close(t);
    }
    json_decref(references);
}

static void expect_bytes(const struct tokenizer *t, const json_t *ids, bool special, const char *hex)
{
    int32_t list[64];
    size_t n;
    for (size_t i = 0; i < json_array_size(ids); i++)
        list[i] = (int32_t)json_integer_value(json_array_get(ids, i));
    char *got = bytes_of(t, list, (int64_t)json_array_size(ids), special, &n);
    assert_int_equal(2 * n, strlen(hex));
    for (size_t i = 0; i < n; i++) {
        char two[3];
        snprintf(two, sizeof two, "%02x", (unsigned char)got[i]);
        assert_memory_equal(two, hex + 2 * i, 2);
    }
    free(got);
}

static void test_decodes(void **state)
{
    (void)state;
    json_t *references = load("references"), *one;
    for (int k = 0; k < N_NAMES; k++) {
        struct tokenizer *t = open_tokenizer(names[k]);
        size_t i;
        json_array_foreach(json_object_get(json_object_get(references, names[k]), "decoded"), i, one)
        {
            expect_bytes(t, json_array_get(one, 0), true, json_string_value(json_array_get(one, 1)));
            expect_bytes(t, json_array_get(one, 0), false, json_string_value(json_array_get(one, 2)));
        }
        tokenizer_close(t);
    }
    json_decref(references);
}

static void test_any_id_has_bytes(void **state)
{
    (void)state;
    struct tokenizer *t = open_tokenizer("llama3");
    const int64_t ids[] = {-1, tokenizer_n_ids(t), INT32_MAX, INT64_MIN, INT64_MAX};
    size_t n;
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++) {
        assert_string_equal(tokenizer_bytes(t, ids[i], &n), "\xEF\xBF\xBD");
        assert_int_equal(n, 3);
        assert_false(tokenizer_is_special(t, ids[i]));
    }
    int64_t end = tokenizer_added_id(t, "<|end_of_text|>");
    assert_true(end > 0 && tokenizer_is_special(t, end));
    assert_int_equal(tokenizer_added_id(t, "the"), -1);
    tokenizer_close(t);
}

/* ---- texts ---- */

static int count(void *to, const int32_t *ids, int64_t n)
{
    (void)ids;
    *(int64_t *)to += n;
    return 0;
}

static int stop(void *to, const int32_t *ids, int64_t n)
{
    (void)ids;
    return ++*(int64_t *)to == 2 ? 77 : n < 0;
}

static void test_long_pieces(void **state)
{
    (void)state;
    if (!cuts)
        skip();
    enum { N = 1 << 18 };
    char *text = malloc(N);
    const char *const units[] = {"a", " ", "\n", "!", "ab", " \n ", "the", "1", "A", "aB", "<", "<|eot_id|"};
    for (int k = 0; k < N_NAMES; k++) {
        struct tokenizer *t = open_tokenizer(names[k]);
        for (size_t u = 0; u < sizeof units / sizeof *units; u++) {
            int64_t n = 0;
            for (size_t i = 0; i < N; i++)
                text[i] = units[u][i % strlen(units[u])];
            if (tokenizer_encode(t, text, N, false, count, &n))
                fail_msg("%s, unit %zu: %s", names[k], u, zr_error_text());
            assert_true(n > 0 && n <= 2 * N); /* stages puts a space before each digit */
        }
        tokenizer_close(t);
    }
    free(text);
}

static void test_refused_texts(void **state)
{
    static const char *const broken[] = {"a\x80",        "\xC0\xAF",     "\xC3",
                                         "\xE0\x80\x80", "\xED\xA0\x80", "\xF4\x90\x80\x80",
                                         "\xF8\x88\x80", "abc\xFF",      "\xE2\x82"};
    (void)state;
    int64_t n = 0;
    if (!cuts)
        skip();
    struct tokenizer *t = open_tokenizer("qwen2");
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
        assert_int_equal(tokenizer_encode(t, broken[i], strlen(broken[i]), false, count, &n), ZERO_ERR_ARG);
        assert_non_null(strstr(zr_error_text(), "not UTF-8: byte "));
    }
    assert_int_equal(n, 0);
    assert_int_equal(tokenizer_encode(t, "a b c", 5, false, stop, &n), 77);
    assert_int_equal(n, 2);
    if (normalizes) {
        char marks[4000];
        for (int i = 0; i < 4000; i++)
            marks[i] = "\xCC\x81\xCC\xA7"[i % 4];
        assert_int_equal(tokenizer_encode(t, marks, 4000, false, count, &n), ZERO_ERR_NOTSUP);
        assert_non_null(strstr(zr_error_text(), "combining marks"));
    }
    tokenizer_close(t);
}

/* ---- configurations ---- */

/* Parses the tokenizer of GPT-2 with another value of a field. path: names, divided by dots. json NULL:
 * without the field. */
static int parse_with(struct tokenizer **t, const char *path, const char *json)
{
    char copy[100], *rest = copy;
    json_t *root = load("gpt2"), *at = root;
    snprintf(copy, sizeof copy, "%s", path);
    for (char *name; (name = strsep(&rest, "."));) {
        if (rest)
            at = json_object_get(at, name);
        else if (json)
            json_object_set_new(at, name, json_loads(json, JSON_DECODE_ANY, NULL));
        else
            json_object_del(at, name);
    }
    char *text = json_dumps(root, 0);
    int err = tokenizer_parse(t, "x.json", text, strlen(text));
    free(text);
    json_decref(root);
    return err;
}

#define BYTE_LEVEL "{\"type\": \"ByteLevel\", \"add_prefix_space\": false}"
#define SPLIT(pattern, more)                                                                                 \
    "{\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": \"Split\", \"pattern\": " pattern ", " more     \
    "}, " BYTE_LEVEL "]}"
#define REGEX(text)  SPLIT("{\"Regex\": \"" text "\"}", "\"behavior\": \"Isolated\", \"invert\": false")
#define ADDED(flags) "[{\"id\": 999, \"content\": \"<x>\"" flags "}]"

static void test_refused_by_name(void **state)
{
    static const struct {
        const char *path, *json, *says;
        bool needs_pcre2;
    } refused[] = {
        {"pre_tokenizer", "null", "pre_tokenizer is null"},
        {"pre_tokenizer", "{\"type\": \"Metaspace\"}", "pre_tokenizer: Metaspace is not implemented"},
        {"pre_tokenizer", "{\"type\": \"ByteLevel\"}", "add_prefix_space is missing"},
        {"pre_tokenizer", "{\"type\": \"Sequence\", \"pretokenizers\": [" BYTE_LEVEL ", " BYTE_LEVEL "]}",
         "2 components ByteLevel"},
        {"pre_tokenizer", "{\"type\": \"Sequence\", \"pretokenizers\": []}", "0 components ByteLevel"},
        {"pre_tokenizer", SPLIT("{\"Regex\": \"a\"}", "\"behavior\": \"Removed\", \"invert\": false"),
         "behavior is \"Removed\""},
        {"pre_tokenizer", SPLIT("{\"Regex\": \"a\"}", "\"behavior\": \"Isolated\", \"invert\": true"),
         "invert is true"},
        {"pre_tokenizer", SPLIT("{}", "\"behavior\": \"Isolated\", \"invert\": false"), "pattern is {}"},
        {"pre_tokenizer", REGEX("a\\\\w"), "at \\w", true},
        {"pre_tokenizer", REGEX("^a"), "at ^a", true},
        {"pre_tokenizer", REGEX("[a[b]]"), "a set in a set", true},
        {"pre_tokenizer", REGEX("[a&&b]"), "a set in a set", true},
        {"pre_tokenizer", REGEX("\\\\d{1,3}+"), "at {1,3}+", true},
        {"pre_tokenizer", REGEX("(?<n>a)"), "at (?<n>a)", true},
        {"pre_tokenizer", REGEX("(*UTF)a"), "at (*UTF)", true},
        {"pre_tokenizer", REGEX("\\\\p{Nothing}"), "Nothing", true},
        {"pre_tokenizer", REGEX("(a"), "regular expression (a", true},
        {"normalizer", "{\"type\": \"Lowercase\"}", "normalizer: Lowercase is not implemented"},
        {"decoder", "{\"type\": \"Fuse\"}", "decoder: Fuse is not implemented"},
        {"decoder", "null", "decoder is null"},
        {"post_processor", "{\"type\": \"BertProcessing\"}", "post_processor: BertProcessing"},
        {"post_processor", "{\"type\": \"TemplateProcessing\", \"single\": []}", "single is []"},
        {"post_processor",
         "{\"type\": \"TemplateProcessing\", \"single\": [{\"SpecialToken\": {\"id\": \"<x>\"}}]}",
         "lacks the ids of \"<x>\""},
        {"model.type", "\"Unigram\"", "model: Unigram is not implemented"},
        {"model.byte_fallback", "true", "byte_fallback is true"},
        {"model.dropout", "0.1", "dropout is 0.1"},
        {"model.end_of_word_suffix", "\"</w>\"", "end_of_word_suffix is \"</w>\""},
        {"model.vocab", "[]", "model.vocab is not an object"},
        {"model.vocab.the", "-3", "the id of \"the\""},
        {"model.vocab.the", "1e9", "the id of \"the\""},
        {"model.vocab.zzz", "5", "id 5 has two tokens"},
        {"model.merges", "[\"a b c\"]", "merges[0]: is not two tokens"},
        {"model.merges", "[[\"a\"]]", "merges[0]: is not two tokens"},
        {"model.merges", "[[\"q\", \"\\u0122\"]]", "merges[0]: model.vocab lacks \"q\""},
        {"added_tokens", ADDED(", \"single_word\": true"), "single_word is {"},
        {"added_tokens", "[{\"id\": 3, \"content\": \"<x>\"}]", "or a free one"},
        {"added_tokens", "[{\"id\": -3, \"content\": \"<x>\"}]", "a possible id"},
        {"added_tokens", "[{\"id\": 99999999, \"content\": \"<x>\"}]", "a possible id"},
        {"added_tokens", "[{\"id\": 999, \"content\": \"\"}]", "objects with content"},
        {"added_tokens", "[{\"id\": 998, \"content\": \"<x>\"}, {\"id\": 999, \"content\": \"<x>\"}]",
         "two are \"<x>\""},
    };
    (void)state;
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        if (refused[i].needs_pcre2 && !cuts)
            continue;
        struct tokenizer *t;
        int err = parse_with(&t, refused[i].path, refused[i].json);
        if (!err || !strstr(zr_error_text(), refused[i].says) || strncmp(zr_error_text(), "x.json: ", 8) != 0)
            fail_msg("%s = %s: %d %s", refused[i].path, refused[i].json, err, zr_error_text());
    }
}

static void test_accepted(void **state)
{
    static const char *const accepted[][2] = {
        {"normalizer", "null"},
        {"normalizer", "{\"type\": \"Sequence\", \"normalizers\": []}"},
        {"model.type", "\"BPE\""},
        {"model.unk_token", "\"<|endoftext|>\""}, /* without effect: all bytes have tokens */
        {"model.dropout", "0.0"},
        {"added_tokens", ADDED("")},
        {"added_tokens", NULL},
        {"post_processor", NULL},
        {"truncation", "{\"max_length\": 3}"},
        {"pre_tokenizer",
         REGEX("[!\\\"#$%&'()*+,\\\\-./:;<=>?@\\\\[\\\\\\\\\\\\]^_`{|}~]|\\\\p{Han}+|a{2,}")},
    };
    (void)state;
    for (size_t i = 0; i < sizeof accepted / sizeof *accepted; i++) {
        struct tokenizer *t;
        if (parse_with(&t, accepted[i][0], accepted[i][1]))
            fail_msg("%s = %s: %s", accepted[i][0], accepted[i][1], zr_error_text());
        tokenizer_close(t);
    }
}

/* The tokenizers library leaves out a byte without a token. Here it is an error. */
static void test_missing_byte(void **state)
{
    struct tokenizer *t;
    int64_t n = 0;
    (void)state;
    if (!cuts)
        skip();
    assert_int_equal(parse_with(&t, "model.vocab.\xC3\xB3", NULL), 0); /* the token of byte 0xf3 */
    assert_int_equal(tokenizer_encode(t, "a", 1, false, count, &n), 0);
    assert_int_equal(tokenizer_encode(t, "a \xF3\xA0\x80\x81", 6, false, count, &n), ZERO_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), "no token for byte 0xf3"));
    tokenizer_close(t);
}

static void test_files(void **state)
{
    struct tokenizer *t;
    (void)state;
    assert_int_equal(tokenizer_open(&t, "/nowhere"), ZERO_ERR_IO);
    assert_null(t);
    assert_int_equal(tokenizer_open(&t, folder), ZERO_ERR_IO); /* the folder has no tokenizer.json */
    assert_non_null(strstr(zr_error_text(), "/tokenizer.json: cannot be opened"));
    assert_int_equal(tokenizer_parse(&t, "x.json", "{", 1), ZERO_ERR_IO);
    assert_int_equal(tokenizer_parse(&t, "x.json", "[]", 2), ZERO_ERR_IO);
    assert_int_equal(tokenizer_parse(&t, "x.json", "{\"a\": 1, \"a\": 2}", 16), ZERO_ERR_IO);
    assert_null(t);
}

/* Finds out what this build can do. What it cannot do must have an error that names the library. */
static int find_out(void **state)
{
    int64_t n = 0;
    (void)state;
    struct tokenizer *t = open_tokenizer("qwen2");
    cuts = !tokenizer_encode(t, "a", 1, false, count, &n);
    assert_true(cuts || strstr(zr_error_text(), "PCRE2"));
    normalizes = !tokenizer_encode(t, "\xC3\xA9", 2, false, count, &n);
    assert_true(!cuts || normalizes || strstr(zr_error_text(), "utf8proc"));
    tokenizer_close(t);
    if (getenv("CHECKS_MUST_RUN"))
        assert_true(cuts && normalizes);
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_encodes),          cmocka_unit_test(test_decodes),
        cmocka_unit_test(test_any_id_has_bytes), cmocka_unit_test(test_long_pieces),
        cmocka_unit_test(test_refused_texts),    cmocka_unit_test(test_refused_by_name),
        cmocka_unit_test(test_accepted),         cmocka_unit_test(test_files),
        cmocka_unit_test(test_missing_byte),
    };
    if (argc != 2)
        return 2;
    folder = argv[1];
    return cmocka_run_group_tests(tests, find_out, NULL);
}
