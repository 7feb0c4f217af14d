/* SPDX-License-Identifier: Apache-2.0 */
/* test_bytes_data.c: what text is read, in which order, and which pieces of it a step sees. */
#include "bench/train/bytes_data.h"
#include "kernels/device.h"
#include "test/cmocka.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[] = "/tmp/bytes-data-XXXXXX";

static const char *in_folder(const char *name)
{
    static char paths[4][128];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static void put(const char *name, const char *text, size_t n)
{
    FILE *f = fopen(in_folder(name), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

static int make_folder(void **state)
{
    assert_non_null(mkdtemp(folder));
    assert_int_equal(mkdir(in_folder("b"), 0700), 0);
    put("c.txt", "CCC", 3);
    put("a.txt", "AA", 2);
    put("b/z.h", "ZZ", 2);
    put("b/y.h", "Y", 1);
    put("object.o", "x\0y", 3);
    assert_int_equal(symlink(in_folder("c.txt"), in_folder("link.txt")), 0);
    return 0;
}

static int remove_folder(void **state)
{
    const char *names[] = {"c.txt", "a.txt", "b/z.h", "b/y.h", "object.o", "link.txt"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        unlink(in_folder(names[i]));
    rmdir(in_folder("b"));
    return rmdir(folder);
}

static void check_text(const char *const *paths, int n_paths, const char *text, int64_t n_files)
{
    struct bytes_data d;
    assert_int_equal(bytes_data_open(&d, paths, n_paths), 0);
    assert_int_equal(d.n_bytes, strlen(text));
    assert_memory_equal(d.bytes, text, strlen(text));
    assert_int_equal(d.n_files, n_files);
    bytes_data_close(&d);
}

static void folders_are_read_in_the_order_of_names(void **state)
{
    check_text((const char *const[]){folder}, 1, "AAYZZCCC", 4); /* no binary, no link */
}

static void paths_are_read_in_the_order_given(void **state)
{
    char first[128], second[128];
    snprintf(first, sizeof first, "%s", in_folder("link.txt")); /* a link given by name is followed */
    snprintf(second, sizeof second, "%s", in_folder("b"));
    check_text((const char *const[]){first, second, first}, 3, "CCCYZZCCC", 4);
}

static void a_missing_path_is_named(void **state)
{
    struct bytes_data d;
    const char *path = in_folder("none.txt");
    assert_int_equal(bytes_data_open(&d, &path, 1), ZERO_ERR_IO);
    assert_non_null(strstr(zr_error_text(), path));
    assert_null(d.bytes);
}

static void the_default_is_c_headers(void **state)
{
    struct bytes_data d;
    assert_int_equal(bytes_data_open(&d, NULL, 0), 0);
    assert_true(d.n_bytes > 100000 && d.n_bytes <= BYTES_DATA_MAX);
    bytes_data_close(&d);
}

#define B 3
#define T 5

static void pieces_depend_on_their_place_alone(void **state)
{
    uint8_t text[256];
    for (int i = 0; i < 256; i++)
        text[i] = (uint8_t)i;
    struct bytes_data d = {.bytes = text, .n_bytes = sizeof text};
    int32_t tokens[B * T], targets[B * T], again[B * T], after[B * T], start[B * T];
    const struct token_rows rows = {tokens, targets, start}, other = {again, after, start};
    int changed_by[4] = {0}; /* seed, step, micro-batch, row */
    for (int64_t step = 0; step < 20; step++) {
        memset(tokens, 0xFF, sizeof tokens);
        memset(targets, 0xFF, sizeof targets);
        bytes_data_sample(&d, &rows, B, T, 0, 1, step, 3);
        for (int i = 0; i < B * T; i++) {
            assert_in_range(tokens[i], 0, 254);
            assert_int_equal(targets[i], tokens[i] + 1); /* the next byte is the next number */
            assert_int_equal(tokens[i], tokens[i / T * T] + i % T);
            assert_int_equal(start[i], 0);
        }
        bytes_data_sample(&d, &other, B, T, 0, 1, step, 3);
        assert_memory_equal(again, tokens, sizeof tokens);
        bytes_data_sample(&d, &other, B, T, 0, 2, step, 3);
        changed_by[0] += again[0] != tokens[0];
        bytes_data_sample(&d, &other, B, T, 0, 1, step + 1, 3);
        changed_by[1] += again[0] != tokens[0];
        bytes_data_sample(&d, &other, B, T, 0, 1, step, 4);
        changed_by[2] += again[0] != tokens[0];
        changed_by[3] += tokens[T] != tokens[0];
    }
    for (int i = 0; i < 4; i++)
        assert_true(changed_by[i] > 10);
}

/* Each document is a piece of the text of its own. Its last target is the byte that follows there. */
static void documents_are_pieces(void **state)
{
    enum { N = 400, MEAN = 5 };
    uint8_t text[256];
    for (int i = 0; i < 256; i++)
        text[i] = (uint8_t)i;
    struct bytes_data d = {.bytes = malloc(N + 256), .n_bytes = N + 256};
    int32_t tokens[2 * N], targets[2 * N], start[2 * N], n_documents = 0;
    const struct token_rows rows = {tokens, targets, start};
    for (int i = 0; i < N + 256; i++)
        d.bytes[i] = text[i % 256];
    bytes_data_sample(&d, &rows, 2, N, MEAN, 1, 0, 0);
    for (int i = 0; i < 2 * N; i++) {
        bool begins = start[i] == i % N;
        n_documents += begins;
        assert_int_equal(targets[i], (tokens[i] + 1) % 256);
        if (!begins) {
            assert_int_equal(start[i], start[i - 1]);
            assert_int_equal(tokens[i], targets[i - 1]);
            assert_in_range(i % N - start[i], 1, 2 * MEAN - 2);
        }
    }
    assert_int_equal(start[N], 0);
    assert_in_range(n_documents, 2 * N / MEAN / 2, 2 * N / MEAN * 2);
    free(d.bytes);
}

/* The shortest allowed text has one piece, and reading it must not go beyond the end. */
static void the_shortest_text_is_one_piece(void **state)
{
    uint8_t *text = malloc(T + 1); /* so that a sanitizer sees one byte too many */
    memcpy(text, "abcdef", T + 1);
    struct bytes_data d = {.bytes = text, .n_bytes = T + 1};
    int32_t tokens[T], targets[T], start[T];
    const struct token_rows rows = {tokens, targets, start};
    for (int64_t step = 0; step < 50; step++) {
        bytes_data_sample(&d, &rows, 1, T, 0, 1, step, 0);
        assert_int_equal(tokens[0], 'a');
        assert_int_equal(targets[T - 1], 'f');
    }
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(folders_are_read_in_the_order_of_names),
        cmocka_unit_test(paths_are_read_in_the_order_given),
        cmocka_unit_test(a_missing_path_is_named),
        cmocka_unit_test(the_default_is_c_headers),
        cmocka_unit_test(pieces_depend_on_their_place_alone),
        cmocka_unit_test(documents_are_pieces),
        cmocka_unit_test(the_shortest_text_is_one_piece),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
