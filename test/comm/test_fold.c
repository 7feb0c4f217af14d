/* SPDX-License-Identifier: Apache-2.0 */
/* test_fold.c: tests that sums of consecutive blocks of sources have the bits of one sum over all sources,
 * from whichever block they begin. For more sources than one sum takes, the reference is the fixed tree by
 * its definition. */
#include "comm/fold.h"
#include "test/cmocka.h"
#include "test/kernels/random.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ELEMS = 37, ROOM = 41, MOST = 700, POISON = 0xff };

static float source[MOST][ELEMS];
static uint16_t narrow[MOST][ELEMS];

static void draw(uint64_t seed)
{
    for (int i = 0; i < MOST; i++)
        for (int k = 0; k < ELEMS; k++) {
            uint64_t x = random_next(&seed);
            uint32_t bits = (uint32_t)(x >> 41) | (uint32_t)(x & 1) << 31 | (uint32_t)(119 + x % 17) << 23;
            source[i][k] = zr_bits_float(bits);
            narrow[i][k] = (uint16_t)(bits >> 16);
        }
}

static float element(int i, int k, bool wide)
{
    return wide ? source[i][k] : bf16_to_float(narrow[i][k]);
}

/* The fixed tree by its definition. */
static float tree(int first, int n, int k, bool wide)
{
    if (n == 1)
        return element(first, k, wide);
    int h = 1;
    while (h * 2 < n)
        h *= 2;
    return tree(first, h, k, wide) + tree(first + h, n - h, k, wide);
}

/* Folds all blocks in order, starting with block `from` and wrapping around. */
static void fold_from(int n, int from, bool wide, bool accumulate, float *dst)
{
    const int32_t n_blocks = zr_fold_blocks(n), n_parts = zr_fold_parts(n);
    /* Allocate exactly what it asks for, so that a write beyond it is noticed. */
    float *sums = n_parts ? malloc((size_t)n_parts * ROOM * sizeof *sums) : NULL;
    struct zr_fold f;
    if (sums)
        memset(sums, POISON, (size_t)n_parts * ROOM * sizeof *sums);
    zr_fold_begin(&f, zr_host_kernels_best(), n, dst, accumulate, ELEMS, sums, ROOM);
    for (int32_t i = 0; i < n_blocks; i++) {
        const void *src[ZR_FOLD_BLOCK];
        int32_t block = (from + i) % n_blocks;
        for (int32_t k = 0; k < ZR_FOLD_BLOCK && block * ZR_FOLD_BLOCK + k < n; k++)
            src[k] = wide ? (const void *)source[block * ZR_FOLD_BLOCK + k]
                          : (const void *)narrow[block * ZR_FOLD_BLOCK + k];
        bool last = zr_fold_add(&f, block, src, wide ? ZERO_F32 : ZERO_BF16);
        assert_int_equal(last, i + 1 == n_blocks);
    }
    free(sums);
}

static void compare(int n, int from, bool wide, bool accumulate)
{
    float dst[ELEMS];
    for (int k = 0; k < ELEMS; k++)
        dst[k] = (float)(k - 11);
    fold_from(n, from, wide, accumulate, dst);
    for (int k = 0; k < ELEMS; k++) {
        float expected = tree(0, n, k, wide);
        expected = accumulate ? (float)(k - 11) + expected : expected;
        if (memcmp(&expected, &dst[k], sizeof expected))
            fail_msg("%d sources from block %d on, %s%s: element %d is %a, expected %a", n, from,
                     wide ? "f32" : "bf16", accumulate ? ", added" : "", k, (double)dst[k], (double)expected);
    }
}

static void test_every_order(void **state)
{
    draw(1);
    for (int n = 1; n <= 300; n++)
        for (int from = 0; from < zr_fold_blocks(n); from++)
            compare(n, from, (n + from) % 2, n % 3 == 0);
    for (int from = 0; from < zr_fold_blocks(MOST); from += 7)
        compare(MOST, from, true, false);
}

/* Up to as many sources as one call takes: the result is that of shared memory. */
static void test_as_one_call(void **state)
{
    draw(2);
    for (int n = 1; n <= ZR_MAX_SOURCES; n++) {
        const void *src[ZR_MAX_SOURCES];
        float folded[ELEMS], summed[ELEMS];
        for (int i = 0; i < n; i++)
            src[i] = narrow[i];
        zr_host_kernels_best()->sum_tree(summed, src, n, ZERO_BF16, ELEMS, false);
        fold_from(n, zr_fold_blocks(n) / 2, false, false, folded);
        assert_memory_equal(folded, summed, sizeof summed);
    }
}

/* The partial sums fit for the largest number of sources too. */
static void test_room(void **state)
{
    assert_int_equal(zr_fold_parts(ZR_FOLD_BLOCK), 0);
    assert_int_equal(zr_fold_parts(ZR_FOLD_BLOCK + 1), 3);
    assert_int_equal(zr_fold_parts(ZR_FOLD_SOURCES), ZR_FOLD_PARTS);
    draw(3);
    const int32_t n_blocks = zr_fold_blocks(ZR_FOLD_SOURCES);
    float *sums = malloc((size_t)ZR_FOLD_PARTS * ELEMS * sizeof *sums), dst[ELEMS];
    for (int32_t from = 0; from < n_blocks; from += n_blocks / 3) {
        struct zr_fold f;
        zr_fold_begin(&f, zr_host_kernels_best(), ZR_FOLD_SOURCES, dst, false, ELEMS, sums, ELEMS);
        for (int32_t i = 0; i < n_blocks; i++) {
            const void *src[ZR_FOLD_BLOCK];
            for (int32_t k = 0; k < ZR_FOLD_BLOCK; k++)
                src[k] = source[0];
            assert_int_equal(zr_fold_add(&f, (from + i) % n_blocks, src, ZERO_F32), i + 1 == n_blocks);
        }
        for (int k = 0; k < ELEMS; k++) /* exact, since it is a power of two */
            assert_true(dst[k] == source[0][k] * (float)ZR_FOLD_SOURCES);
    }
    free(sums);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_order),
        cmocka_unit_test(test_as_one_call),
        cmocka_unit_test(test_room),
    };
    return cmocka_run_group_tests_name("fold", tests, NULL, NULL);
}
