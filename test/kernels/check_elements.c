/* SPDX-License-Identifier: Apache-2.0 */
/* check_elements.c: checks and times zero, copy, cast, add, scale, maximum and digest. */
#include "kernels/raw_bits.h"
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
    uint32_t bits = zr_float_bits(x);
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
            x[i] = zr_bits_float(i << 16 | *l);
        memset(half, 0xff, N * sizeof *half);
        k->cast(half, ZERO_BF16, x, ZERO_F32, N);
        for (uint32_t i = 0; i < N; i++)
            if (half[i] != nearest_bf16(x[i]))
                fail_msg("%s: %a (%08x) becomes %04x, not %04x", k->name, (double)x[i], i << 16 | *l, half[i],
                         nearest_bf16(x[i]));
        k->cast(back, ZERO_F32, half, ZERO_BF16, N);
        for (uint32_t i = 0; i < N; i++)
            assert_int_equal(zr_float_bits(back[i]), (uint32_t)half[i] << 16);
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
            want[i] = nearest_bf16(zr_bits_float(x[i]));
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
            assert_int_equal(zr_float_bits(x[i]), 0xffffffff);
        free(was);
        guarded_close(&a), guarded_close(&b);
    }
}

/* Bits of an element: often a NaN with any payload and sign, an infinity, or a zero of either sign. */
static uint32_t check_bits(bool half)
{
    const uint32_t sign = (uint32_t)random_below(&rng, 2) << 31,
                   payload = (uint32_t)random_bits(&rng) & 0x7fffff;
    const uint32_t of[] = {zr_float_bits(check_value(&rng)), sign, sign | 0x7f800000,
                           sign | 0x7f800000 | payload, sign | 0x3f800000};
    return of[random_below(&rng, 5)] >> (half ? 16 : 0);
}

static bool is_nan_bits(uint32_t bits)
{
    return (bits & 0x7fffffff) > 0x7f800000;
}

/* The maximum by its definition: the last NaN, or else the first of the greatest numbers. */
static uint32_t greatest_bits(const uint32_t *x, int n, bool half)
{
    int best = 0;
    for (int s = 0; s < n; s++) {
        uint32_t wide = x[s] << (half ? 16 : 0), was = x[best] << (half ? 16 : 0);
        if (is_nan_bits(wide) || (!is_nan_bits(was) && zr_bits_float(wide) > zr_bits_float(was)))
            best = s;
    }
    return x[best];
}

static void check_maximum_one(const struct zr_host_kernels *k, int n_src, bool half, int64_t n, int64_t shift,
                              int in_place)
{
    const int64_t size = half ? 2 : 4;
    struct guarded src[ZR_MAX_SOURCES], own = guarded_open(size * n, size * shift);
    const void *p[ZR_MAX_SOURCES];
    uint32_t *want = malloc((size_t)(4 * n) + 1);
    for (int s = 0; s < n_src; s++) {
        src[s] = guarded_open(size * n, size * ((shift + s) % 16));
        p[s] = src[s].p;
    }
    for (int64_t i = 0; i < n; i++) {
        uint32_t x[ZR_MAX_SOURCES];
        for (int s = 0; s < n_src; s++) {
            x[s] = check_bits(half);
            memcpy((char *)src[s].p + size * i, &x[s], (size_t)size);
        }
        want[i] = greatest_bits(x, n_src, half);
    }
    char *dst = in_place < n_src ? src[in_place].p : own.p;
    k->maximum(dst, p, n_src, half ? ZERO_BF16 : ZERO_F32, n);
    for (int64_t i = 0; i < n; i++) {
        uint32_t got = 0;
        memcpy(&got, dst + size * i, (size_t)size);
        if (got != want[i])
            fail_msg("%s: maximum of %d: [%lld] of %lld is %#x, not %#x", k->name, n_src, (long long)i,
                     (long long)n, got, want[i]);
    }
    for (int s = 0; s < n_src; s++)
        guarded_close(&src[s]);
    guarded_close(&own);
    free(want);
}

static void check_maximum(void **state)
{
    for (int n_src = 1; n_src <= ZR_MAX_SOURCES; n_src += n_src < 9 ? 1 : 11)
        FOR_EACH(int64_t, n, check_sizes)
    FOR_EACH(int64_t, shift, check_shifts)
    if (*n <= 1000 || (n_src <= 4 && *shift == 3))
        check_maximum_one(*state, n_src, (n_src + *n + *shift) % 2, *n, *shift, (int)random_below(&rng, 6));
}

/* --- digest --- */

/* The digest by its definition, byte by byte. */
static uint64_t digest_of(const unsigned char *at, int64_t n, uint64_t first)
{
    uint64_t sum = 0;
    for (int64_t i = 0; i < n; i += 8) {
        uint64_t word = 0;
        for (int64_t k = i; k < n && k < i + 8; k++)
            word |= (uint64_t)at[k] << 8 * (k - i);
        sum += zr_digest_word(word, first + (uint64_t)(i / 8));
    }
    return sum;
}

/* Sizes that end inside a word, at every alignment. All are added to one number. */
static void check_digest(void **state)
{
    const struct zr_host_kernels *k = *state;
    static const int64_t sizes[] = {0, 1, 7, 8, 9, 63, 64, 65, 1000, 8191, 70001};
    uint64_t got = 17, want = 17;
    FOR_EACH(int64_t, n, sizes)
    for (int shift = 0; shift < 9; shift++) {
        struct guarded g = guarded_open(*n, shift);
        unsigned char *x = g.p;
        const uint64_t first = random_bits(&rng);
        fill_random(&g);
        for (int64_t i = 0; i < *n; i++)
            x[i] = random_below(&rng, 3) ? x[i] : 0;
        want += digest_of(x, *n, first);
        k->digest(&got, x, *n, first);
        assert_true(got == want);
        guarded_close(&g);
    }
}

/* Zeros have the digest 0. Changing a byte, or swapping two words, changes the digest. Pieces that continue
 * the numbers of words have the digest of the whole. */
static void check_digest_meaning(void **state)
{
    const struct zr_host_kernels *k = *state;
    enum { BYTES = 4096, CUT = 1032 };
    struct guarded g = guarded_open(BYTES, 0);
    uint64_t *word = g.p, sum = 0, whole = 0;
    memset(g.p, 0, BYTES);
    k->digest(&sum, g.p, BYTES, 5);
    assert_true(sum == 0);
    fill_random(&g);
    k->digest(&whole, g.p, BYTES, 5);
    k->digest(&sum, (char *)g.p + CUT, BYTES - CUT, 5 + CUT / 8);
    k->digest(&sum, g.p, CUT, 5);
    assert_true(sum == whole && whole != 0);
    for (int i = 0; i < 200; i++) {
        const int a = (int)random_below(&rng, BYTES / 8), b = (int)random_below(&rng, BYTES / 8);
        const uint64_t was[] = {word[a], word[b]};
        if (i % 2 || a == b)
            ((unsigned char *)g.p)[8 * a + i / 2 % 8] ^= 1 << (i / 16 % 8);
        else
            word[a] = was[1], word[b] = was[0];
        sum = 0;
        k->digest(&sum, g.p, BYTES, 5);
        assert_true(sum != whole);
        word[a] = was[0], word[b] = was[1];
    }
    guarded_close(&g);
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

static void run_maximum(void *arg)
{
    struct timed *a = arg;
    const void *src[] = {a->x, a->y};
    a->k->maximum(a->x, src, 2, ZERO_F32, a->n);
}

static void run_digest(void *arg)
{
    struct timed *a = arg;
    uint64_t sum = 0;
    a->k->digest(&sum, a->x, 4 * a->n, 0);
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
        bench("maximum", k->name, s->where, 12 * s->n, run_maximum, &a);
        memset(a.x, 1, (size_t)s->n * 4);
        bench("digest", k->name, s->where, 4 * s->n, run_digest, &a);
        free(a.x), free(a.y);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(check_zero),          cmocka_unit_test(check_copy),
        cmocka_unit_test(check_cast_all),      cmocka_unit_test(check_cast),
        cmocka_unit_test(check_cast_in_place), cmocka_unit_test(check_add_scale),
        cmocka_unit_test(check_maximum),       cmocka_unit_test(check_digest),
        cmocka_unit_test(check_digest_meaning)};
    rng = random_open();
    return check_main(argc, argv, tests, sizeof tests / sizeof *tests, time_elements);
}
