/* SPDX-License-Identifier: Apache-2.0 */
/* test_checkpoint_parts.c: tests where the elements of a tensor-parallel part are in the whole tensor,
 * against counting them one by one. Also tests what a manifest records of a part.
 * zero/test_tp_checkpoints.c tests that checkpoints of any mesh load on any other. */
#include "kernels/error.h"
#include "shard/tp_cut.h"
#include "test/cmocka.h"
#include "test/kernels/random.h"
#include "zero/checkpoint/manifest.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_DIMS = 4, MAX_ELEMS = 1 << 16 };

/* The shape of a whole tensor, ended by 0, and how it is cut. */
struct drawn {
    int64_t whole[8], part[8];
    int32_t n_dims, dim, blocks, parts;
    bool padded;
};

static int64_t random_in(uint64_t *seed, int64_t lo, int64_t hi)
{
    return lo + (int64_t)(random_next(seed) % (uint64_t)(hi - lo + 1));
}

static void draw(uint64_t *seed, struct drawn *d)
{
    *d = (struct drawn){.n_dims = (int32_t)random_in(seed, 1, MAX_DIMS),
                        .parts = (int32_t)random_in(seed, 2, 6)};
    d->dim = (int32_t)random_in(seed, 0, d->n_dims - 1);
    d->padded = d->dim == 0 && random_in(seed, 0, 1);
    d->blocks = d->padded ? 1 : (int32_t)random_in(seed, 1, 3);
    for (int32_t k = 0; k < d->n_dims; k++)
        d->whole[k] = d->part[k] = random_in(seed, 1, 5);
    d->part[d->dim] *= d->blocks;
    d->whole[d->dim] = d->part[d->dim] * d->parts;
    if (d->padded)
        d->whole[d->dim] -= random_in(seed, 0, d->whole[d->dim] - 1);
}

static int64_t count(const int64_t shape[8])
{
    int64_t n = 1;
    for (int k = 0; k < 8 && shape[k]; k++)
        n *= shape[k];
    return n;
}

/* Returns the index of a part's element i in the whole; -1: padding. */
static int64_t place_of(const struct drawn *d, int32_t part, int64_t i)
{
    int64_t at[MAX_DIMS], whole = 0;
    for (int32_t k = d->n_dims; k-- > 0; i /= d->part[k])
        at[k] = i % d->part[k];
    int64_t in_block = d->part[d->dim] / d->blocks, row = at[d->dim];
    at[d->dim] = row / in_block * in_block * d->parts + part * in_block + row % in_block;
    if (at[d->dim] >= d->whole[d->dim])
        return -1;
    for (int32_t k = 0; k < d->n_dims; k++)
        whole = whole * d->whole[k] + at[k];
    return whole;
}

static void check_drawn(const struct drawn *d)
{
    static int owners[MAX_ELEMS * 4];
    const struct zr_tp_cut c = zr_tp_along(d->part, d->dim, d->blocks, d->padded ? d->whole[0] : 0, d->parts);
    int64_t n_whole = count(d->whole), n_part = count(d->part), total = 0;
    assert_int_equal(zr_tp_whole_elems(&c), n_whole);
    memset(owners, 0, (size_t)n_whole * sizeof *owners);
    for (int32_t part = 0; part < d->parts; part++) {
        for (int64_t i = 0; i < n_part; i++) {
            struct zr_tp_run run = zr_tp_run_of_part(&c, part, i), back;
            int64_t want = place_of(d, part, i);
            assert_true(run.whole == want && run.at == i && run.part == part && run.n >= 1);
            for (int64_t k = 0; k < run.n; k++)
                assert_int_equal(place_of(d, part, i + k), want < 0 ? -1 : want + k);
            assert_true((want >= 0) == (i < zr_tp_elems(&c, part)));
            if (want < 0)
                continue;
            owners[want]++;
            back = zr_tp_run_of_whole(&c, want);
            assert_true(back.part == part && back.at == i && back.n == run.n);
        }
        int64_t from = zr_tp_elems(&c, part);
        assert_int_equal(zr_tp_from(&c, part, n_whole), n_part);
        for (int64_t whole = n_whole; whole-- > 0;) {
            from -= from > 0 && place_of(d, part, from - 1) == whole;
            assert_int_equal(zr_tp_from(&c, part, whole), from);
        }
        total += zr_tp_elems(&c, part);
    }
    assert_int_equal(total, n_whole);
    for (int64_t i = 0; i < n_whole; i++)
        assert_int_equal(owners[i], 1);
}

static void every_element_has_one_place(void **state)
{
    const char *given = getenv("SEED");
    uint64_t seed = given ? strtoull(given, NULL, 10) : (uint64_t)time(NULL);
    printf("SEED=%llu\n", (unsigned long long)seed);
    for (int i = 0; i < 2000; i++) {
        struct drawn d;
        draw(&seed, &d);
        check_drawn(&d);
    }
}

static void what_is_not_cut_is_one_run(void **state)
{
    const struct zr_tp_cut c = zr_tp_none(77);
    for (int64_t i = 0; i < 77; i++) {
        struct zr_tp_run a = zr_tp_run_of_part(&c, 0, i), b = zr_tp_run_of_whole(&c, i);
        assert_true(a.whole == i && a.n == 77 - i && b.part == 0 && b.at == i && b.n == 77 - i);
    }
    assert_int_equal(zr_tp_elems(&c, 0), 77);
}

/* ---- manifests ---- */

/* Prints a manifest and reads it again. */
static int print_and_parse(int32_t parts, int32_t dim, int64_t rows, int32_t blocks,
                           struct zr_manifest *again)
{
    struct zr_manifest_tensor t = {.name = strdup("w"),
                                   .dtype = "F32",
                                   .n_dims = 2,
                                   .shape = {12, 7},
                                   .parts = parts,
                                   .dim = dim,
                                   .rows = rows,
                                   .blocks = blocks};
    struct zr_manifest_file f = {.name = "shard-00001-of-00001.safetensors", .bytes = 8};
    struct zr_manifest m = {
        .version = "1", .world = 1, .n_tensors = 1, .n_files = 1, .tensors = &t, .files = &f};
    char *text;
    int64_t n;
    assert_int_equal(zr_manifest_print(&m, &text, &n), 0);
    assert_in_range(zr_manifest_bytes(&m) - n, 0, 1200);
    int err = zr_manifest_parse("m", text, n, again);
    free(text);
    free(t.name);
    return err;
}

static void a_cut_is_read_again(void **state)
{
    static const struct {
        int32_t parts, dim;
        int64_t rows;
        int32_t blocks;
    } good[] = {{2, 0, 6, 1}, {2, 0, 6, 3}, {7, 1, 1, 1}, {3, 0, 5, 1}, {12, 0, 1, 1}, {100, 0, 12, 1}};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        struct zr_manifest again;
        assert_int_equal(print_and_parse(good[i].parts, good[i].dim, good[i].rows, good[i].blocks, &again),
                         0);
        const struct zr_manifest_tensor *t = &again.tensors[0];
        assert_true(t->parts == good[i].parts && t->dim == good[i].dim && t->rows == good[i].rows &&
                    t->blocks == good[i].blocks);
        zr_manifest_free(&again);
    }
}

static void a_cut_that_cannot_be_is_refused(void **state)
{
    static const struct {
        int32_t parts, dim;
        int64_t rows;
        int32_t blocks;
        const char *says;
    } bad[] = {
        {1, 0, 12, 1, "parts is not a whole number in 2.."},
        {-2, 0, 6, 1, "parts is not"},
        {2, 2, 6, 1, "dim is not a whole number in 0..1"},
        {2, 0, 0, 1, "rows is not a whole number in 1..12"},
        {2, 0, 13, 1, "rows is not"},
        {2, 0, 6, 0, "blocks is not"},
        {2, 0, 5, 1, "tensor w: 2 parts of 5 rows in 1 blocks do not fit its shape"},
        {2, 0, 6, 4, "tensor w: 2 parts of 6 rows in 4 blocks do not"},
        {3, 1, 3, 1, "tensor w: 3 parts of 3 rows in 1 blocks do not"},
        {2, 0, 8, 2, "tensor w: 2 parts of 8 rows in 2 blocks do not"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct zr_manifest again;
        assert_int_equal(print_and_parse(bad[i].parts, bad[i].dim, bad[i].rows, bad[i].blocks, &again),
                         ZERO_ERR_IO);
        if (!strstr(zr_error_text(), bad[i].says))
            fail_msg("\"%s\" instead of \"%s\"", zr_error_text(), bad[i].says);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_element_has_one_place),
        cmocka_unit_test(what_is_not_cut_is_one_run),
        cmocka_unit_test(a_cut_is_read_again),
        cmocka_unit_test(a_cut_that_cannot_be_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
