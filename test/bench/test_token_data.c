/* SPDX-License-Identifier: Apache-2.0 */
/* test_token_data.c: files of tokens are read as their format says, wrong files are refused by name, and a
 * shuffle takes each row once. */
#include "bench/train/token_data.h"
#include "kernels/device.h"
#include "test/cmocka.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { T = 4, VOCAB = 1000 };

static char folder[] = "/tmp/token-data-XXXXXX";

static const char *in_folder(const char *name)
{
    static char paths[6][128];
    static int next;
    char *path = paths[next++ % 6];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

/* Writes a file of llm.c's header, if magic is not 0, and n ids from `from` on. */
static const char *put(const char *name, int32_t magic, int32_t version, int32_t n_said, int n, int id_bytes,
                       uint32_t from)
{
    const char *path = in_folder(name);
    int32_t header[256] = {magic, version, n_said};
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    if (magic)
        assert_int_equal(fwrite(header, sizeof header, 1, f), 1);
    for (int i = 0; i < n; i++) {
        uint32_t id = from + (uint32_t)i; /* its first bytes are the lowest */
        assert_int_equal(fwrite(&id, (size_t)id_bytes, 1, f), 1);
    }
    assert_int_equal(fclose(f), 0);
    return path;
}

static int make_folder(void **state)
{
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state)
{
    (void)state;
    const char *names[] = {"a", "b", "c", "d", "wrong"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        unlink(in_folder(names[i]));
    return rmdir(folder);
}

static int open_paths(struct token_data *d, const char *const *paths, int n, int64_t id_bytes)
{
    *d = (struct token_data){.context = T, .vocab = VOCAB, .end_token = -1};
    return token_data_open(d, paths, n, id_bytes);
}

/* Reads a row, whose ids are consecutive numbers from `first` on. */
static void check_row(const struct token_data *d, int64_t row, int32_t first)
{
    int32_t tokens[T], targets[T], start[T];
    const struct token_rows out = {tokens, targets, start};
    memset(start, 0xFF, sizeof start);
    assert_int_equal(token_data_row(d, row, &out), 0);
    for (int t = 0; t < T; t++) {
        assert_int_equal(tokens[t], first + t);
        assert_int_equal(targets[t], first + t + 1);
        assert_int_equal(start[t], 0);
    }
}

static void files_are_cut_into_rows(void **state)
{
    (void)state;
    /* 9 tokens are two rows, with one token in both; 4 are none; 12 leave 3 over. */
    const char *paths[] = {put("a", 20240520, 1, 9, 9, 2, 10), put("b", 20240520, 1, 4, 4, 2, 100),
                           put("c", 20240801, 7, 12, 12, 4, 200)};
    struct token_data d;
    assert_int_equal(open_paths(&d, paths, 3, 0), 0);
    assert_int_equal(d.n_tokens, 25);
    assert_int_equal(d.n_rows, 4);
    const int32_t first[] = {10, 14, 200, 204};
    for (int64_t row = 0; row < 4; row++)
        check_row(&d, row, first[row]);
    token_data_close(&d);
    token_data_close(&d);
}

static void files_without_a_header(void **state)
{
    (void)state;
    for (int id_bytes = 2; id_bytes <= 4; id_bytes += 2) {
        const char *path = put("a", 0, 0, 0, T + 1, id_bytes, 7);
        struct token_data d;
        assert_int_equal(open_paths(&d, &path, 1, id_bytes), 0);
        assert_int_equal(d.n_rows, 1);
        check_row(&d, 0, 7);
        token_data_close(&d);
    }
}

static void refused(const char *path, int64_t id_bytes, int code, const char *why)
{
    struct token_data d;
    assert_int_equal(open_paths(&d, &path, 1, id_bytes), code);
    assert_non_null(strstr(zr_error_text(), path));
    if (!strstr(zr_error_text(), why))
        fail_msg("\"%s\" is not in \"%s\"", why, zr_error_text());
    assert_null(d.files);
}

static void wrong_files_are_refused(void **state)
{
    (void)state;
    refused(in_folder("none"), 0, ZERO_ERR_IO, "No such file");
    refused(folder, 0, ZERO_ERR_IO, "not a regular file");
    refused(put("wrong", 0, 0, 0, 0, 2, 0), 0, ZERO_ERR_ARG, "empty");
    refused(put("wrong", 0, 0, 0, 0, 2, 0), 2, ZERO_ERR_ARG, "empty");
    refused(put("wrong", 0, 0, 0, 1, 1, 3), 0, ZERO_ERR_ARG, "--token-bytes");
    refused(put("wrong", 0, 0, 0, 300, 4, 5), 0, ZERO_ERR_ARG, "begins with 5, which is no magic number");
    refused(put("wrong", 0, 0, 0, 3, 4, 20240520), 0, ZERO_ERR_ARG,
            "12 bytes are less than a header of 1024");
    refused(put("wrong", 20240520, 2, 9, 9, 2, 0), 0, ZERO_ERR_ARG, "has version 2, but only version 1");
    refused(put("wrong", 20240801, 1, 9, 9, 4, 0), 0, ZERO_ERR_ARG, "has version 1, but only version 7");
    refused(put("wrong", 20240520, 1, 9, 8, 2, 0), 0, ZERO_ERR_ARG,
            "says 9 tokens, which are 1042 bytes, but it has 1040");
    refused(put("wrong", 20240520, 1, 9, 10, 2, 0), 0, ZERO_ERR_ARG, "but it has 1044");
    refused(put("wrong", 20240520, 1, -1, 9, 2, 0), 0, ZERO_ERR_ARG, "says -1 tokens");
    refused(put("wrong", 20240520, 1, 0, 0, 2, 0), 0, ZERO_ERR_ARG, "0 tokens are less than a row");
    refused(put("wrong", 20240520, 1, T, T, 2, 0), 0, ZERO_ERR_ARG,
            "4 tokens are less than a row, which takes 5: --context");
    refused(put("wrong", 20240520, 1, 9, 9, 2, 0), 2, ZERO_ERR_ARG, "begins with a header of llm.c");
    refused(put("wrong", 20240801, 7, 9, 9, 4, 0), 4, ZERO_ERR_ARG, "without --token-bytes");
    refused(put("wrong", 0, 0, 0, 9, 1, 0), 2, ZERO_ERR_ARG, "9 bytes are not a whole number");
    refused(put("wrong", 0, 0, 0, 5, 2, 0), 4, ZERO_ERR_ARG, "10 bytes are not a whole number");
}

static void an_id_out_of_range_is_named(void **state)
{
    (void)state;
    const char *paths[] = {put("a", 20240520, 1, 9, 9, 2, 10), put("b", 0, 0, 0, 9, 4, VOCAB - 7)};
    struct token_data d;
    int32_t room[3 * T];
    const struct token_rows out = {room, room + T, room + 2 * T};
    assert_int_equal(open_paths(&d, paths + 1, 1, 4), 0);
    check_row(&d, 0, VOCAB - 7);
    assert_int_equal(token_data_row(&d, 1, &out), ZERO_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), paths[1]));
    assert_non_null(strstr(zr_error_text(), "token 7 has id 1000, but the model has 1000 ids (--vocab)"));
    token_data_close(&d);
    put("b", 0, 0, 0, 9, 4, 0xFFFFFFF7u); /* no id is taken for a negative number */
    assert_int_equal(open_paths(&d, paths + 1, 1, 4), 0);
    assert_int_equal(token_data_row(&d, 0, &out), ZERO_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), "token 0 has id 4294967287"));
    token_data_close(&d);
}

static void check_starts(const struct token_data *d, int64_t row, const int32_t want[T])
{
    int32_t room[2 * T], start[T];
    const struct token_rows out = {room, room + T, start};
    assert_int_equal(token_data_row(d, row, &out), 0);
    assert_memory_equal(start, want, sizeof start);
    for (int t = 0; t < T - 1; t++) /* a document's last target is what follows, as in a row */
        assert_int_equal(room[T + t], room[t + 1]);
}

/* Writes a file of these ids, with llm.c's header or without. */
static const char *put_ids(bool with_header, const uint16_t ids[9])
{
    const char *path = put("a", with_header ? 20240520 : 0, 1, 9, 0, 2, 0);
    FILE *f = fopen(path, "ab");
    assert_non_null(f);
    assert_int_equal(fwrite(ids, 9 * sizeof *ids, 1, f), 1);
    assert_int_equal(fclose(f), 0);
    return path;
}

static void documents_are_divided_at_end_tokens(void **state)
{
    (void)state;
    const uint16_t ids[] = {5, 9, 6, 9, 9, 9, 7, 8, 3};
    const char *path = put_ids(true, ids);
    struct token_data d = {.context = T, .vocab = VOCAB, .documents = true, .end_token = 9};
    assert_int_equal(token_data_open(&d, &path, 1, 0), 0);
    check_starts(&d, 0, (const int32_t[]){0, 1, 1, 3});
    check_starts(&d, 1, (const int32_t[]){0, 1, 1, 1}); /* the second row begins with an end token */
    token_data_close(&d);
    path = put_ids(false, ids);
    d = (struct token_data){.context = T, .vocab = VOCAB, .documents = true, .end_token = 9};
    assert_int_equal(token_data_open(&d, &path, 1, 2), 0);
    check_starts(&d, 0, (const int32_t[]){0, 0, 2, 2});
    check_starts(&d, 1, (const int32_t[]){0, 1, 2, 2});
    token_data_close(&d);
    d = (struct token_data){.context = T, .vocab = VOCAB, .documents = false, .end_token = 9};
    assert_int_equal(token_data_open(&d, &path, 1, 2), 0);
    check_starts(&d, 0, (const int32_t[]){0, 0, 0, 0});
    token_data_close(&d);
}

static void end_tokens_of_formats(void **state)
{
    (void)state;
    const char *gpt2 = put("a", 20240520, 1, 9, 9, 2, 50251), *llama = put("b", 20240801, 7, 9, 9, 4, 0);
    struct token_data d = {.context = T, .vocab = 60000, .documents = true, .end_token = -1};
    assert_int_equal(token_data_open(&d, &gpt2, 1, 0), 0);
    check_starts(&d, 1, (const int32_t[]){0, 1, 1, 1}); /* 50255, 50256 and so on */
    token_data_close(&d);
    d = (struct token_data){.context = T, .vocab = 60000, .documents = true, .end_token = -1};
    assert_int_equal(token_data_open(&d, &llama, 1, 0), ZERO_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), llama));
    assert_non_null(strstr(zr_error_text(), "--end-token"));
    d = (struct token_data){.context = T, .vocab = 50256, .documents = true, .end_token = -1};
    assert_int_equal(token_data_open(&d, &gpt2, 1, 0), ZERO_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), "documents end at token 50256, but the model has 50256 ids"));
}

/* Writes a file of n bytes. Byte i is 0 if bit i of `bits` is 0. */
static const char *put_mask(const char *name, int n, uint32_t bits)
{
    const char *path = in_folder(name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    for (int i = 0; i < n; i++)
        assert_int_not_equal(fputc(bits >> i & 1 ? 1 + i : 0, f), EOF);
    assert_int_equal(fclose(f), 0);
    return path;
}

static void a_mask_leaves_targets_out(void **state)
{
    (void)state;
    char a[128], b[128];
    snprintf(a, sizeof a, "%s", put("a", 20240520, 1, 9, 9, 2, 10));
    snprintf(b, sizeof b, "%s", put("b", 20240520, 1, 5, 5, 2, 100));
    const char *paths[] = {a, b}, *masks[] = {put_mask("c", 9, 0x1A9), put_mask("d", 5, 1)};
    int32_t tokens[T], targets[T], start[T];
    const struct token_rows out = {tokens, targets, start};
    struct token_data d;
    assert_int_equal(open_paths(&d, paths, 2, 0), 0);
    assert_int_equal(token_data_count(&d, 1, 0, T), T); /* without masks all count */
    assert_int_equal(token_data_open_masks(&d, masks, 2), 0);
    /* The masks say that tokens 0, 3, 5, 7 and 8 of the first file count, and the first one of the second,
     * which is no target. */
    const int32_t want[3][T] = {{-2, -2, 13, -2}, {15, -2, 17, 18}, {-2, -2, -2, -2}};
    for (int row = 0; row < 3; row++) {
        assert_int_equal(token_data_row(&d, row, &out), 0);
        assert_memory_equal(targets, want[row], sizeof targets);
        assert_int_equal(tokens[0], row == 2 ? 100 : 10 + T * row);
    }
    assert_int_equal(token_data_count(&d, 0, 0, T), 1);
    assert_int_equal(token_data_count(&d, 0, 2, 1), 1);
    assert_int_equal(token_data_count(&d, 0, 3, 1), 0);
    assert_int_equal(token_data_count(&d, 1, 0, T), 3);
    assert_int_equal(token_data_count(&d, 1, 1, 2), 1);
    assert_int_equal(token_data_count(&d, 2, 0, T), 0);
    token_data_close(&d);
}

static void wrong_masks_are_refused(void **state)
{
    (void)state;
    const char *path = put("a", 20240520, 1, 9, 9, 2, 10), *short_one = put_mask("c", 8, 7), *two[2];
    struct token_data d;
    assert_int_equal(open_paths(&d, &path, 1, 0), 0);
    two[0] = two[1] = short_one;
    assert_int_equal(token_data_open_masks(&d, two, 2), ZERO_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), "2 masks are given for 1 files"));
    assert_int_equal(token_data_open_masks(&d, &short_one, 1), ZERO_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), "a mask of 8 bytes"));
    assert_non_null(strstr(zr_error_text(), short_one));
    assert_non_null(strstr(zr_error_text(), path));
    put_mask("c", 0, 0);
    assert_int_equal(token_data_open_masks(&d, &short_one, 1), ZERO_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), "the file is empty"));
    token_data_close(&d);
}

static void a_shuffle_takes_each_row_once(void **state)
{
    (void)state;
    static uint8_t taken[5000];
    static const int64_t sizes[] = {1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000, 4096, 4097, 5000};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++)
        for (int64_t epoch = 0; epoch < 3; epoch++) {
            int64_t n = sizes[s];
            memset(taken, 0, sizeof taken);
            for (int64_t i = 0; i < n; i++) {
                int64_t row = token_data_shuffled(i, n, 7, epoch);
                assert_in_range(row, 0, n - 1);
                assert_false(taken[row]);
                taken[row] = 1;
            }
        }
    int64_t huge = (int64_t)1 << 61;
    assert_in_range(token_data_shuffled(huge - 1, huge, 7, 0), 0, huge - 1);
}

/* How many of n rows follow their predecessor as in the file. Of a random order it is about 1. */
static int64_t in_order(int64_t n, uint64_t seed, int64_t epoch)
{
    int64_t count = 0;
    for (int64_t i = 1; i < n; i++)
        count += token_data_shuffled(i, n, seed, epoch) == token_data_shuffled(i - 1, n, seed, epoch) + 1;
    return count;
}

static void orders_look_random(void **state)
{
    (void)state;
    enum { N = 1000 };
    int64_t same_epoch = 0, same_seed = 0, first_half = 0;
    for (int64_t i = 0; i < N; i++) {
        int64_t row = token_data_shuffled(i, N, 1, 0);
        same_epoch += row == token_data_shuffled(i, N, 1, 1);
        same_seed += row == token_data_shuffled(i, N, 2, 0);
        first_half += i < N / 2 && row < N / 2;
    }
    assert_in_range(same_epoch, 0, 8);
    assert_in_range(same_seed, 0, 8);
    assert_in_range(first_half, N / 4 - 50, N / 4 + 50); /* six standard deviations of 8 */
    for (int64_t epoch = 0; epoch < 4; epoch++)
        assert_in_range(in_order(N, 1, epoch), 0, 8);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(files_are_cut_into_rows),
        cmocka_unit_test(files_without_a_header),
        cmocka_unit_test(wrong_files_are_refused),
        cmocka_unit_test(an_id_out_of_range_is_named),
        cmocka_unit_test(documents_are_divided_at_end_tokens),
        cmocka_unit_test(end_tokens_of_formats),
        cmocka_unit_test(a_mask_leaves_targets_out),
        cmocka_unit_test(wrong_masks_are_refused),
        cmocka_unit_test(a_shuffle_takes_each_row_once),
        cmocka_unit_test(orders_look_random),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
