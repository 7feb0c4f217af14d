/* SPDX-License-Identifier: Apache-2.0 */
/* device_suite_agree.c: tests a step's agreement. What agree_begin writes is added up over ranks in any
 * order, and the result of agree_end is compared with the exact sum of all ranks' numbers. */
#include "kernels/agreement.h"
#include "test/cmocka.h"
#include "test/kernels/device_suite_parts.h"
#include "test/kernels/exact_merge.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MAX_RANKS 1000

/* The ranks' inputs, and the expected result. */
struct given {
    int n_ranks, n_carried;
    double scale;
    float clip;
    struct zr_exact_sum norm[MAX_RANKS];
    uint64_t largest[MAX_RANKS];
    uint64_t words[MAX_RANKS][ZR_AGREE_WORDS];
    double carried[MAX_RANKS][ZR_MAX_CARRIED];
};

static void *host_memory(struct zr_device *dev, int64_t bytes)
{
    void *p;
    assert_int_equal(dev->ops->host_alloc(dev, bytes, &p), 0);
    memset(p, 0xa5, (size_t)bytes);
    return p;
}

static void *poisoned(struct zr_device *dev, struct zr_stream *s, int64_t bytes)
{
    void *p, *poison = malloc((size_t)bytes);
    assert_int_equal(dev->ops->alloc(dev, bytes, &p), 0);
    memset(poison, 0xa5, (size_t)bytes);
    assert_int_equal(dev->ops->copy(s, p, poison, bytes), 0);
    assert_int_equal(dev->ops->stream_sync(s), 0);
    free(poison);
    return p;
}

/* Adds one rank's part to the sum, as the all-reduce does. */
static void add_rank(struct zr_agreement *all, const struct zr_agreement *one)
{
    for (int i = 0; i < ZR_AGREE_SUMS; i++)
        assert_false(__builtin_add_overflow(all->sum[i], one->sum[i], &all->sum[i]));
    for (int i = 0; i < ZR_AGREE_MAXES; i++)
        all->max[i] = all->max[i] > one->max[i] ? all->max[i] : one->max[i];
}

/* Makes each rank's part on the device and adds them up, in the order that the caller gives. */
static struct zr_agreement all_parts(struct zr_device *dev, const struct given *g, int first, int step)
{
    const struct zr_device_ops *ops = dev->ops;
    struct zr_stream *s = suite_stream(dev, ZR_STREAM_QUEUE);
    struct zr_own_squares *own = poisoned(dev, s, sizeof *own);
    struct zr_agreement *out = poisoned(dev, s, sizeof *out), part, all;
    memset(&all, 0, sizeof all);
    for (int k = 0, r = first; k < g->n_ranks; k++, r = (r + step) % g->n_ranks) {
        struct zr_agree_begin b = {.own = own, .rank = r, .out = out, .n_carried = g->n_carried};
        memcpy(b.words, g->words[r], sizeof b.words);
        memcpy(b.carried, g->carried[r], sizeof b.carried);
        assert_int_equal(ops->copy(s, &own->sum, &g->norm[r], sizeof own->sum), 0);
        assert_int_equal(ops->copy(s, &own->largest, &g->largest[r], sizeof own->largest), 0);
        assert_int_equal(ops->agree_begin(s, &b), 0);
        memset(&b, 0xff, sizeof b); /* the argument was copied */
        assert_int_equal(ops->copy(s, &part, out, sizeof part), 0);
        assert_int_equal(ops->stream_sync(s), 0);
        for (int i = ZR_AGREE_LIMBS * (1 + g->n_carried); i < ZR_AGREE_RANKS; i++)
            assert_int_equal(part.sum[i], 0);
        assert_int_equal(part.sum[ZR_AGREE_RANKS], 1);
        add_rank(&all, &part);
    }
    ops->free(dev, out, sizeof *out);
    ops->free(dev, own, sizeof *own);
    ops->stream_close(s);
    return all;
}

static struct zr_agreed conclude(struct zr_device *dev, const struct given *g, const struct zr_agreement *all,
                                 struct zr_step_scalars *scalars)
{
    const struct zr_device_ops *ops = dev->ops;
    struct zr_stream *s = suite_stream(dev, ZR_STREAM_QUEUE);
    struct zr_agreement *on_device = poisoned(dev, s, sizeof *on_device);
    struct zr_step_scalars *written = poisoned(dev, s, sizeof *written);
    struct zr_agreed *agreed = host_memory(dev, sizeof *agreed);
    struct zr_agree_end e = {.all = on_device,
                             .scale = g->scale,
                             .clip = g->clip,
                             .n_carried = g->n_carried,
                             .n_ranks = g->n_ranks,
                             .n_averaged = g->n_ranks,
                             .scalars = written,
                             .agreed = agreed};
    assert_int_equal(ops->copy(s, on_device, all, sizeof *all), 0);
    assert_int_equal(ops->agree_end(s, &e), 0);
    memset(&e, 0xff, sizeof e); /* the argument was copied */
    assert_int_equal(ops->copy(s, scalars, written, sizeof *scalars), 0);
    assert_int_equal(ops->stream_sync(s), 0);
    struct zr_agreed out = *agreed;
    ops->host_free(dev, agreed, sizeof *agreed);
    ops->free(dev, written, sizeof *written);
    ops->free(dev, on_device, sizeof *on_device);
    ops->stream_close(s);
    return out;
}

static struct zr_agreed agree(struct zr_device *dev, const struct given *g, struct zr_step_scalars *scalars)
{
    int n = g->n_ranks, first = (int)random_below(&suite_rng, (uint32_t)n);
    struct zr_agreement all = all_parts(dev, g, first, 1),
                        other = all_parts(dev, g, n - 1, n > 1 ? n - 1 : 1);
    assert_memory_equal(&all, &other, sizeof all); /* the same forwards and backwards */
    return conclude(dev, g, &all, scalars);
}

static double wide(void)
{
    return exp(20 * (double)random_normal(&suite_rng));
}

static struct given *some_ranks(int n)
{
    struct given *g = calloc(1, sizeof *g);
    g->n_ranks = n;
    g->n_carried = (int)random_below(&suite_rng, ZR_MAX_CARRIED + 1);
    g->scale = -0.125;
    for (int r = 0; r < n; r++) {
        const uint64_t words[ZR_AGREE_WORDS] = {UINT64_MAX - 77, zr_agree_lr_word(0.1f, r),
                                                (uint64_t)(1000 + (n - r) % 7)};
        memcpy(g->words[r], words, sizeof words);
        for (int i = 0; i < 20; i++)
            zr_exact_add(&g->norm[r], wide());
        for (int k = 0; k < ZR_MAX_CARRIED; k++)
            g->carried[r][k] = (random_below(&suite_rng, 2) ? 1 : -1) * wide();
    }
    return g;
}

/* The norm from sums added in rank order, by the definition in exact_sum.h. */
static double merged_norm(const struct given *g)
{
    struct zr_exact_sum all;
    zr_exact_reset(&all);
    for (int r = 0; r < g->n_ranks; r++)
        exact_merge(&all, &g->norm[r]);
    return sqrt(zr_exact_value(&all)) * fabs(g->scale);
}

static double merged_mean(const struct given *g, int k)
{
    struct zr_exact_sum all;
    zr_exact_reset(&all);
    for (int r = 0; r < g->n_ranks; r++)
        zr_exact_add(&all, g->carried[r][k]);
    return zr_exact_value(&all) / g->n_ranks;
}

static void test_sums(void **state)
{
    static const int worlds[] = {1, 2, 3, 5, 8, 64, MAX_RANKS};
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++) {
        struct given *g = some_ranks(worlds[i]);
        struct zr_step_scalars scalars;
        double norm = merged_norm(g);
        struct zr_agreed a = agree(*state, g, &scalars);
        assert_true(a.grad_norm == norm && !a.clipped && !a.skipped && a.differs == 0);
        assert_int_equal(a.least, worlds[i] >= 7 ? 1000 : 1001);
        assert_true(scalars.grad_scale == -0.125f && scalars.skip == 0);
        for (int k = 0; k < ZR_MAX_CARRIED; k++)
            assert_true(a.carried[k] == (k < g->n_carried ? merged_mean(g, k) : 0));
        g->clip = (float)(norm / 3);
        a = agree(*state, g, &scalars);
        assert_true(a.grad_norm == norm && a.clipped && !a.skipped);
        assert_true(scalars.grad_scale == (float)(-0.125 * ((double)g->clip / norm)) && scalars.skip == 0);
        free(g);
    }
}

/* Limbs that hold as much as they may before carries. If agree_begin did not carry, the sum of two ranks
 * would overflow. */
static void test_full_limbs(void **state)
{
    struct given *g = some_ranks(8);
    struct zr_step_scalars scalars;
    for (int r = 0; r < g->n_ranks; r++) {
        zr_exact_reset(&g->norm[r]);
        for (int i = 0; i < ZR_EXACT_LIMBS - 3; i++)
            g->norm[r].limb[i] = (INT64_C(1) << 62) - (int64_t)random_below(&suite_rng, 1000);
        g->norm[r].n_added = ZR_EXACT_MAX_ADDED - 1;
    }
    assert_true(agree(*state, g, &scalars).grad_norm == merged_norm(g));
    free(g);
}

/* A sum of zero, sums that cancel, and non-finite values, which affect their own sum only. */
static void test_special_values(void **state)
{
    struct given *g = some_ranks(4);
    struct zr_step_scalars scalars;
    g->n_carried = 4;
    for (int r = 0; r < 4; r++) {
        zr_exact_reset(&g->norm[r]);
        g->carried[r][0] = r % 2 ? 0x1p1000 : -0x1p1000; /* cancels, except for the smallest bit */
        g->carried[r][1] = r == 2 ? NAN : 1;
        g->carried[r][2] = r == 1 ? -INFINITY : 1;
        g->carried[r][3] = -0x1p-1074;
    }
    g->carried[0][0] = 0, g->carried[1][0] = 0x1p-1074;
    g->carried[2][0] = -0x1p1000, g->carried[3][0] = 0x1p1000;
    struct zr_agreed a = agree(*state, g, &scalars);
    assert_true(a.grad_norm == 0 && !a.skipped && a.carried[0] == 0x1p-1074 / 4);
    assert_true(isnan(a.carried[1]) && isnan(a.carried[2]) && a.carried[3] == -0x1p-1074);
    zr_exact_add(&g->norm[3], NAN);
    a = agree(*state, g, &scalars);
    assert_true(isnan(a.grad_norm) && a.skipped && !a.clipped && scalars.skip == 1 && a.differs == 0);
    free(g);
}

static void test_words(void **state)
{
    for (int w = 0; w <= ZR_AGREE_LEAST; w++) {
        struct given *g = some_ranks(5);
        struct zr_step_scalars scalars;
        int chosen = (int)random_below(&suite_rng, 5);
        g->words[chosen][w] = w == ZR_AGREE_LR ? zr_agree_lr_word(0.05f, chosen) : g->words[chosen][w] - 1;
        struct zr_agreed a = agree(*state, g, &scalars);
        assert_true(a.lr[0].lr == 0.1f && a.lr[0].rank == (w == ZR_AGREE_LR && chosen == 4 ? 3 : 4));
        assert_true(a.lr[1].lr == (w == ZR_AGREE_LR ? 0.05f : 0.1f) &&
                    a.lr[1].rank == (w == ZR_AGREE_LR ? chosen : 0));
        assert_int_equal(a.differs, w == ZR_AGREE_LEAST ? 0 : 1 << w);
        assert_int_equal(scalars.skip, w != ZR_AGREE_LEAST);
        assert_true(!a.skipped);
        free(g);
    }
}

/* The largest norm with which a step is still taken. It counts as the update sees it, after clipping. The
 * limit depends on what any rank's optimizers keep. */
static void test_too_large(void **state)
{
    static const struct {
        double norm;
        float clip;
        bool keeps, too_large;
    } rows[] = {{1.79e19, 0, true, false},   {1.81e19, 0, true, true},  {1.81e19, 0, false, false},
                {1e22, 1, true, false},      {1e22, 1e20f, true, true}, {3.4e38, 0, false, false},
                {3.5e38, 0, false, true},    {1e100, 0, true, true},    {1e100, 2, false, false},
                {1e22, 1.7e19f, true, false}};
    struct given *g = some_ranks(5);
    struct zr_step_scalars scalars;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        int chosen = (int)random_below(&suite_rng, 5);
        for (int r = 0; r < 5; r++) {
            zr_exact_reset(&g->norm[r]);
            g->words[r][ZR_AGREE_SQUARES] = rows[i].keeps && r == chosen;
        }
        g->clip = rows[i].clip;
        zr_exact_add(&g->norm[chosen], 64 * rows[i].norm * rows[i].norm); /* the scale is 1/8 */
        struct zr_agreed a = agree(*state, g, &scalars);
        assert_true(a.too_large == rows[i].too_large && a.skipped == rows[i].too_large);
        assert_true(scalars.skip == (uint32_t)rows[i].too_large && isfinite(a.grad_norm));
    }
    zr_exact_add(&g->norm[3], NAN);
    assert_true(agree(*state, g, &scalars).skipped && !agree(*state, g, &scalars).too_large);
    free(g);
}

/* The largest block of all ranks: by exponent, then the lowest position, then the lowest rank. */
static void test_largest(void **state)
{
    struct given *g = some_ranks(5);
    struct zr_step_scalars scalars;
    assert_int_equal(agree(*state, g, &scalars).largest, 0);
    g->largest[3] = zr_largest_of(1e30, 77);
    g->largest[1] = zr_largest_of(1e29, 5);
    uint64_t word = agree(*state, g, &scalars).largest;
    assert_true(zr_largest_rank(word) == 3 && zr_largest_at(word) == 77);
    g->largest[4] = zr_largest_of(INFINITY, (INT64_C(1) << ZR_LARGEST_AT_BITS) - 1);
    word = agree(*state, g, &scalars).largest;
    assert_true(zr_largest_rank(word) == 4 && zr_largest_at(word) == (INT64_C(1) << ZR_LARGEST_AT_BITS) - 1);
    g->largest[2] = zr_largest_of(NAN, 100);
    g->largest[1] = zr_largest_of(-NAN, 100);
    g->largest[0] = zr_largest_of(NAN, 101);
    word = agree(*state, g, &scalars).largest;
    assert_true(zr_largest_rank(word) == 1 && zr_largest_at(word) == 100);
    free(g);
}

/* If the all-reduce fails, the parts were not added up. A rank's own part then agrees with itself. */
static void test_incomplete(void **state)
{
    for (int missing = 1; missing < 4; missing++) {
        struct given *g = some_ranks(4 - missing);
        struct zr_step_scalars scalars;
        struct zr_agreement all = all_parts(*state, g, 0, 1);
        g->n_ranks = 4;
        struct zr_agreed a = conclude(*state, g, &all, &scalars);
        assert_int_equal(a.differs, ZR_AGREE_INCOMPLETE);
        assert_int_equal(scalars.skip, 1);
        free(g);
    }
}

static void test_refused(void **state)
{
    struct zr_device *dev = *state;
    struct zr_stream *s = suite_stream(dev, ZR_STREAM_QUEUE);
    const struct zr_agree_begin b = {.n_carried = ZR_MAX_CARRIED + 1};
    const struct zr_agree_end e = {.n_ranks = 1, .n_averaged = 0},
                              f = {.n_ranks = 1, .n_averaged = 1, .n_carried = -1};
    assert_int_equal(dev->ops->agree_begin(s, &b), ZERO_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), "agree_begin: 9 carried values; 0 to 8 are allowed"));
    assert_int_equal(dev->ops->agree_end(s, &e), ZERO_ERR_ARG);
    assert_int_equal(dev->ops->agree_end(s, &f), ZERO_ERR_ARG);
    assert_int_equal(dev->ops->stream_sync(s), 0);
    dev->ops->stream_close(s);
}

int suite_of_agreement(struct zr_device *dev)
{
    struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sums),           cmocka_unit_test(test_full_limbs),
        cmocka_unit_test(test_special_values), cmocka_unit_test(test_words),
        cmocka_unit_test(test_incomplete),     cmocka_unit_test(test_refused),
        cmocka_unit_test(test_too_large),      cmocka_unit_test(test_largest),
    };
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++)
        tests[i].initial_state = dev;
    return cmocka_run_group_tests_name("agreement", tests, NULL, NULL);
}
