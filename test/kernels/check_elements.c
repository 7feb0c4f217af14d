/* SPDX-License-Identifier: Apache-2.0 */
/* check_elements.c: checks and times zero, copy, cast, add and scale. */
#include "test/kernels/check.h"

static struct random_source rng;

static void fill_random(struct guarded *g)
{
    unsigned char *p = g->p;
    for (int64_t i = 0; i < g->bytes; i++)
        p[i] = (unsigned char)random_bits(&rng);
}

static void check_zero(void **state)
{
    const struct zr_host_kernels *k = *state;
    FOR_EACH(int64_t, n, check_sizes)
    FOR_EACH(int64_t, shift, check_shifts)
    {
        struct guarded g = guarded_open(*n, *shift);
        fill_random(&g);
        k->zero(g.p, *n);
        for (int64_t i = 0; i < *n; i++)
            assert_int_equal(((unsigned char *)g.p)[i], 0);
        guarded_close(&g);
    }
}

static void check_copy(void **state)
{
    const struct zr_host_kernels *k = *state;
    static const int64_t large[] = {(int64_t)9 << 20, ((int64_t)9 << 20) + 77, (int64_t)5 << 20};
    FOR_EACH(int64_t, shift, check_shifts)
    {
        FOR_EACH(int64_t, n, check_sizes)
        {
            struct guarded from = guarded_open(*n, 3), to = guarded_open(*n, *shift);
            fill_random(&from);
            k->copy(to.p, from.p, *n);
            assert_memory_equal(to.p, from.p, (size_t)*n);
            guarded_close(&from), guarded_close(&to);
        }
        FOR_EACH(int64_t, n, large)
        {
            struct guarded from = guarded_open(*n, 3), to = guarded_open(*n, *shift);
            for (int64_t i = 0; i < *n; i++)
                ((unsigned char *)from.p)[i] = (unsigned char)(i * 131 >> 3);
            k->copy(to.p, from.p, *n);
            assert_memory_equal(to.p, from.p, (size_t)*n);
            guarded_close(&from), guarded_close(&to);
        }
    }
}

/* The nearest bf16, found by comparing both neighbours. This does not depend on how the kernels round. */
static uint16_t nearest_bf16(float x)
{
    uint32_t bits = bits_of_float(x);
    if (isnan(x))
        return (uint16_t)(bits >> 16 | 0x40);
    uint16_t low = (uint16_t)(bits >> 16), high = (uint16_t)(low + 1); /* its two neighbours */
    if (isinf(x) || (bits & 0xffff) == 0)
        return low;
    /* The value after the largest bf16 would be 2^128; infinity stands for it. */
    double up = isinf(bf16_to_float(high)) ? copysign(0x1p128, x) : bf16_to_float(high);
    double below = fabs((double)x - bf16_to_float(low)), above = fabs(up - x);
    return below < above ? low : above < below ? high : low & 1 ? high : low;
}

/* Every bf16, its successor, the middle between them, and the floats next to each. */
static void check_cast_all(void **state)
{
    const struct zr_host_kernels *k = *state;
    static const uint32_t low[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
    enum { N = 65536 };
    float *x = malloc(N * sizeof *x), *back = malloc(N * sizeof *back);
    uint16_t *half = malloc(N * sizeof *half);
    FOR_EACH(uint32_t, l, low)
    {
        for (uint32_t i = 0; i < N; i++)
            x[i] = float_of_bits(i << 16 | *l);
        memset(half, 0xff, N * sizeof *half);
        k->cast(half, ZERO_BF16, x, ZERO_F32, N);
        for (uint32_t i = 0; i < N; i++)
            if (half[i] != nearest_bf16(x[i]))
                fail_msg("%s: %a (%08x) becomes %04x, not %04x", k->name, (double)x[i], i << 16 | *l, half[i],
                         nearest_bf16(x[i]));
        k->cast(back, ZERO_F32, half, ZERO_BF16, N);
        for (uint32_t i = 0; i < N; i++)
            assert_int_equal(bits_of_float(back[i]), (uint32_t)half[i] << 16);
    }
    free(x), free(back), free(half);
}

static void check_cast(void **state)
{
    const struct zr_host_kernels *k = *state;
    FOR_EACH(int64_t, n, check_sizes)
    FOR_EACH(int64_t, shift, check_shifts)
    {
        struct guarded f = guarded_open(4 * *n, 4 * *shift), h = guarded_open(2 * *n, 2 * *shift),
                       same = guarded_open(4 * *n, 4), half = guarded_open(2 * *n, 2),
                       place = guarded_open(4 * *n, 4 * *shift);
        fill_random(&f);
        k->cast(h.p, ZERO_BF16, f.p, ZERO_F32, *n);
        for (int64_t i = 0; i < *n; i++)
            assert_int_equal(((uint16_t *)h.p)[i], nearest_bf16(((float *)f.p)[i]));
        k->cast(same.p, ZERO_F32, f.p, ZERO_F32, *n);
        assert_memory_equal(same.p, f.p, (size_t)(4 * *n));
        k->cast(half.p, ZERO_BF16, h.p, ZERO_BF16, *n);
        assert_memory_equal(half.p, h.p, (size_t)(2 * *n));
        k->cast(same.p, ZERO_F32, h.p, ZERO_BF16, *n);
        for (int64_t i = 0; i < *n; i++)
            assert_int_equal(((uint32_t *)same.p)[i], (uint32_t)((uint16_t *)h.p)[i] << 16);
        /* In place. */
        memcpy(place.p, f.p, (size_t)(4 * *n));
        k->cast(place.p, ZERO_BF16, place.p, ZERO_F32, *n);
        assert_memory_equal(place.p, h.p, (size_t)(2 * *n));
        memcpy(place.p, f.p, (size_t)(4 * *n));
        k->cast(place.p, ZERO_F32, place.p, ZERO_F32, *n);
        assert_memory_equal(place.p, f.p, (size_t)(4 * *n));
        guarded_close(&f), guarded_close(&h), guarded_close(&same), guarded_close(&half),
            guarded_close(&place);
    }
}

/* In place, and long enough for every way to divide the work. */
static void check_cast_in_place(void **state)
{
    const struct zr_host_kernels *k = *state;
    static const int64_t sizes[] = {8191, 8192, 8193, 16384, 16387, 100003};
    FOR_EACH(int64_t, n, sizes)
    FOR_EACH(int64_t, shift, check_shifts)
    {
        struct guarded g = guarded_open(4 * *n, 4 * *shift);
        uint32_t *x = g.p;
        uint16_t *half = g.p, *want = malloc((size_t)(2 * *n));
        for (int64_t i = 0; i < *n; i++) {
            x[i] = (uint32_t)random_bits(&rng);
            want[i] = nearest_bf16(float_of_bits(x[i]));
        }
        k->cast(g.p, ZERO_BF16, g.p, ZERO_F32, *n);
        assert_memory_equal(half, want, (size_t)(2 * *n));
        free(want);
        guarded_close(&g);
    }
}

static void check_add_scale(void **state)
{
    const struct zr_host_kernels *k = *state;
    FOR_EACH(int64_t, n, check_sizes)
    FOR_EACH(int64_t, shift, check_shifts)
    {
        struct guarded a = guarded_open(4 * *n, 4 * *shift), b = guarded_open(4 * *n, 4);
        float *x = a.p, *y = b.p, *was = malloc((size_t)(4 * *n) + 1);
        for (int64_t i = 0; i < *n; i++)
            x[i] = was[i] = check_value(&rng), y[i] = check_value(&rng);
        k->add(x, y, *n);
        for (int64_t i = 0; i < *n; i++)
            assert_true(same_float(x[i], was[i] + y[i]));
        memcpy(was, x, (size_t)(4 * *n));
        k->scale(x, *n, 0.3f);
        for (int64_t i = 0; i < *n; i++)
            assert_true(same_float(x[i], was[i] * 0.3f));
        memset(x, 0xff, (size_t)(4 * *n)); /* a factor of 1 keeps every bit */
        k->scale(x, *n, 1);
        for (int64_t i = 0; i < *n; i++)
            assert_int_equal(bits_of_float(x[i]), 0xffffffff);
        free(was);
        guarded_close(&a), guarded_close(&b);
    }
}

struct timed {
    const struct zr_host_kernels *k;
    float *x, *y;
    int64_t n;
};

static void run_zero(void *arg)
{
    struct timed *a = arg;
    a->k->zero(a->x, 4 * a->n);
}

static void run_copy(void *arg)
{
    struct timed *a = arg;
    a->k->copy(a->x, a->y, 4 * a->n);
}

static void run_narrow(void *arg)
{
    struct timed *a = arg;
    a->k->cast(a->x, ZERO_BF16, a->y, ZERO_F32, a->n);
}

static void run_widen(void *arg)
{
    struct timed *a = arg;
    a->k->cast(a->x, ZERO_F32, a->y, ZERO_BF16, a->n);
}

static void run_add(void *arg)
{
    struct timed *a = arg;
    a->k->add(a->x, a->y, a->n);
}

static void run_scale(void *arg)
{
    struct timed *a = arg;
    a->k->scale(a->x, a->n, -1);
}

static void time_elements(const struct zr_host_kernels *k)
{
    FOR_EACH(struct bench_size, s, bench_sizes)
    {
        struct timed a = {k, aligned_alloc(4096, (size_t)s->n * 4), aligned_alloc(4096, (size_t)s->n * 4),
                          s->n};
        memset(a.x, 0, (size_t)s->n * 4);
        memset(a.y, 0, (size_t)s->n * 4);
        bench("zero", k->name, s->where, 4 * s->n, run_zero, &a);
        bench("copy", k->name, s->where, 8 * s->n, run_copy, &a);
        bench("cast f32 -> bf16", k->name, s->where, 6 * s->n, run_narrow, &a);
        bench("cast bf16 -> f32", k->name, s->where, 6 * s->n, run_widen, &a);
        bench("add", k->name, s->where, 12 * s->n, run_add, &a);
        bench("scale", k->name, s->where, 8 * s->n, run_scale, &a);
        free(a.x), free(a.y);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(check_zero),          cmocka_unit_test(check_copy),
        cmocka_unit_test(check_cast_all),      cmocka_unit_test(check_cast),
        cmocka_unit_test(check_cast_in_place), cmocka_unit_test(check_add_scale)};
    rng = random_open();
    return check_main(argc, argv, tests, sizeof tests / sizeof *tests, time_elements);
}
