/* SPDX-License-Identifier: Apache-2.0 */
/* check_states.c: checks masters and states in fewer bytes: the noise, each way of rounding, and updates of
 * every optimizer in every precision against one element at a time in plain float.
 *
 * N_PATTERNS is the number of fp32 bit patterns whose master is split and joined; 4294967296 are all. */
#include "kernels/op_check.h"
#include "test/kernels/check.h"
#include "test/kernels/optimizer_references.h"

static struct random_source rng;

/* --- the functions of state_codes.h --- */

static struct zr_rounding some_rounding(void)
{
    struct zr_rounding r = {.first = 32 * random_below(&rng, INT64_C(1) << 35)};
    zr_rounding_key(r.key, random_bits(&rng), random_bits(&rng), random_bits(&rng));
    return r;
}

/* Returns the number in [0, 1) with which an element is rounded. */
static double uniform(const struct zr_rounding *r, enum zr_noise_kind kind, int64_t element)
{
    return zr_noise_bits(zr_noise_of(r, kind, element), (uint32_t)element) * 0x1p-32;
}

/* Fails if the correlation of n pairs of independent uniform numbers is outside six standard deviations. */
static void assert_uncorrelated(const char *what, double sum, double n)
{
    if (fabs(sum) > 6 * sqrt(n) / 12)
        fail_msg("%s: the correlation is %g", what, 12 * sum / n);
}

static void check_noise(void **state)
{
    enum { N = 1 << 18 };
    static const int64_t lags[] = {1, 2, 3, 16, 32, 1024, 65536, INT64_C(1) << 32, INT64_C(3) << 40};
    struct zr_rounding r = {.first = 0}, next = r, other = r;
    double mean = 0, square = 0, steps = 0, tensors = 0, kinds = 0, lagged[sizeof lags / sizeof *lags] = {0};
    int bits[32] = {0};
    const uint64_t seed = random_bits(&rng), step = random_bits(&rng), tensor = random_bits(&rng);
    (void)state;
    zr_rounding_key(r.key, seed, step, tensor);
    zr_rounding_key(next.key, seed, step + 1, tensor);
    zr_rounding_key(other.key, seed, step, tensor ^ 1);
    for (int64_t i = 0; i < N; i++) {
        const double x = uniform(&r, ZR_NOISE_STATE_1, i) - 0.5;
        for (int b = 0; b < 32; b++)
            bits[b] += zr_noise_bits(zr_noise_of(&r, ZR_NOISE_STATE_1, i), (uint32_t)i) >> b & 1;
        mean += x;
        square += x * x;
        steps += x * (uniform(&next, ZR_NOISE_STATE_1, i) - 0.5);
        tensors += x * (uniform(&other, ZR_NOISE_STATE_1, i) - 0.5);
        kinds += x * (uniform(&r, ZR_NOISE_STATE_0, i) - 0.5);
        for (size_t k = 0; k < sizeof lags / sizeof *lags; k++)
            lagged[k] += x * (uniform(&r, ZR_NOISE_STATE_1, i + lags[k]) - 0.5);
    }
    assert_true(fabs(mean) < 6 * sqrt(N / 12.0));
    assert_true(fabs(square - N / 12.0) < 6 * sqrt(N / 180.0));
    for (int b = 0; b < 32; b++)
        assert_true(abs(bits[b] - N / 2) < 6 * sqrt(N / 4.0));
    assert_uncorrelated("steps", steps, N);
    assert_uncorrelated("tensors", tensors, N);
    assert_uncorrelated("kinds", kinds, N);
    for (size_t k = 0; k < sizeof lags / sizeof *lags; k++)
        assert_uncorrelated("neighbours", lagged[k], N);
}

/* The nearest bf16, ties away from zero, found by comparing both neighbours. */
static uint16_t nearest_away(float x)
{
    const uint32_t bits = zr_float_bits(x);
    const uint16_t low = (uint16_t)(bits >> 16), high = (uint16_t)(low + 1);
    if (isnan(x))
        return low | 0x40;
    if (isinf(x))
        return low;
    const double up = (high & 0x7fff) == 0x7f80 ? copysign(0x1p128, x) : bf16_to_float(high);
    return fabs((double)x - bf16_to_float(low)) < fabs(up - x) ? low : high;
}

static void check_remainder(void **state)
{
    const char *text = getenv("N_PATTERNS");
    const int64_t n = text ? atoll(text) : 1 << 20, all = INT64_C(1) << 32;
    const uint32_t offset = (uint32_t)random_bits(&rng);
    (void)state;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = n == all ? (uint32_t)i : offset + (uint32_t)((uint64_t)i * (uint64_t)(all / n));
        if (n < all && i % 2) /* near a tie */
            bits = (bits & 0xffff0000u) | (0x7ffeu + bits % 5);
        const float x = zr_bits_float(bits), back = zr_join_master(zr_round_away(x), zr_remainder_of(x));
        if (zr_float_bits(back) != (isnan(x) ? bits | 0x400000 : bits) || zr_round_away(x) != nearest_away(x))
            fail_msg("%08x becomes %04x and %04x, which are %08x", bits, zr_round_away(x), zr_remainder_of(x),
                     zr_float_bits(back));
    }
}

/* Over all noise, the mean is the number itself. */
static void check_random_bf16(void **state)
{
    (void)state;
    for (int i = 0; i < 300; i++) {
        static const uint32_t ends[] = {0x7fffffff, 0xffffffff, 0xff7fffff, 0xff800000};
        const float x = zr_bits_float(i < 4 ? ends[i] : (uint32_t)random_bits(&rng));
        const bool top = isfinite(x) && fabsf(x) > bf16_to_float(0x7f7f);
        int64_t ups = 0;
        for (uint32_t noise = 0; noise < 0x10000; noise++) {
            const uint16_t half = zr_round_random(x, noise << 16 | noise);
            ups += half - (zr_float_bits(x) >> 16);
            if (isnan(x))
                assert_int_equal(half, zr_float_bits(x) >> 16 | 0x40);
        }
        if (!isnan(x))
            assert_int_equal(ups, top ? 0 : zr_float_bits(x) & 0xffff);
    }
    for (uint32_t sign = 0; sign < 2; sign++) {
        assert_int_equal(zr_round_random(zr_bits_float(sign << 31 | 0x7f7fffff), 0xffffffff),
                         sign << 15 | 0x7f7f);
        assert_int_equal(zr_round_random(zr_bits_float(sign << 31 | 0x7f800000), 0xffffffff),
                         sign << 15 | 0x7f80);
    }
}

/* The value of a code is at most one step from the number, the mean over noise is the number, and only 0 has
 * the code 0. */
static void check_codes(void **state)
{
    enum { N_NOISE = 4096 };
    (void)state;
    for (int i = 0; i < 4000; i++) {
        const bool squares = i % 2;
        const double levels = zr_q8_levels(squares), step = 1 / (levels * levels);
        const float largest = ldexpf(1 + fabsf(random_normal(&rng)), (int)random_below(&rng, 160) - 80);
        const float scale = bf16_to_float(zr_q8_scale(zr_q8_size(largest, squares)));
        float x = i % 5 ? largest * (float)random_below(&rng, 1 << 20) * 0x1p-20f : i % 3 ? largest : 0.0f;
        x = !squares && random_below(&rng, 2) ? -x : x;
        const double share = fabs((double)x) / scale, root = sqrt(share),
                     gap = (2 * root * levels + 2) * step;
        double sum = 0;
        assert_true(scale >= largest && scale <= largest * (1 + 0x1p-7f));
        for (uint32_t k = 0; k < N_NOISE; k++) {
            const uint8_t code =
                zr_q8_code(x, scale, squares, k << 20 | (uint32_t)random_below(&rng, 1 << 20));
            const double value = zr_q8_value(code, scale, squares);
            sum += value;
            if ((code == 0) != (x == 0) || fabs(value - x) > scale * (gap + 1e-5) || value * x < 0)
                fail_msg("%a of %a has the code %d, which is %a", (double)x, (double)scale, code, value);
        }
        if (share > step) /* smaller ones have the code 1 */
            assert_true(fabs(sum / N_NOISE - x) < scale * (gap * 2 / N_NOISE + 1e-5));
    }
    assert_int_equal(zr_q8_scale(zr_q8_size(NAN, false)), 0x7fc0);
    assert_int_equal(zr_q8_scale(zr_q8_size(-INFINITY, false)), 0x7fc0);
    assert_int_equal(zr_q8_scale(zr_q8_size(-1, true)), 0x7fc0);
    assert_int_equal(zr_q8_scale(zr_q8_size(-0.0f, true)), 0);
    assert_int_equal(zr_q8_scale(0x7f7fffff), 0x7f7f);
    assert_true(isnan(zr_q8_value(zr_q8_code(NAN, NAN, false, 7), NAN, false)));
}

/* --- updates --- */

/* The arrays of one update. */
struct arrays {
    struct guarded master, remainder, param, grad, state[2], scale[2];
    struct zr_update u;
    struct zr_step_scalars scalars;
};

enum { N_ARRAYS = 8 };

static struct guarded *array_of(struct arrays *a, int i)
{
    struct guarded *all[N_ARRAYS] = {&a->master,   &a->remainder, &a->param,    &a->grad,
                                     &a->state[0], &a->state[1],  &a->scale[0], &a->scale[1]};
    return all[i];
}

static int squares_of(enum zero_optimizer kind)
{
    return kind == ZERO_ADAM || kind == ZERO_ADAMW ? 1 : kind == ZERO_RMSPROP ? 0 : -1;
}

static void point(struct arrays *a, int n_states)
{
    struct zr_update *u = &a->u;
    const bool f32 = u->masters == ZERO_MASTERS_F32;
    u->master = f32 ? a->master.p : NULL;
    u->remainder = u->masters == ZERO_MASTERS_REMAINDER ? a->remainder.p : NULL;
    u->param = a->param.p;
    u->param_dtype = ZERO_BF16;
    u->grad = a->grad.p;
    u->scalars = &a->scalars;
    for (int i = 0; i < n_states; i++) {
        u->state[i] = a->state[i].p;
        u->scale[i] = u->moments == ZERO_MOMENTS_Q8 ? a->scale[i].p : NULL;
    }
}

static uint32_t noise_at(const struct zr_update *u, enum zr_noise_kind kind, int64_t i)
{
    const struct zr_rounding *r = &u->rounding;
    const int64_t element = r->first + i + (r->run ? (r->at + i) / r->run * r->skip : 0);
    return zr_noise_bits(zr_noise_of(r, kind, element), (uint32_t)element);
}

static float read_state(const struct zr_update *u, int s, int64_t i)
{
    if (u->moments == ZERO_MOMENTS_F32)
        return ((float *)u->state[s])[i];
    if (u->moments == ZERO_MOMENTS_BF16)
        return bf16_to_float(((uint16_t *)u->state[s])[i]);
    return zr_q8_value(((uint8_t *)u->state[s])[i], bf16_to_float(u->scale[s][i / 32]),
                       squares_of(u->kind) == s);
}

/* Writes the n elements of a state, which begin a block. */
static void write_state(const struct zr_update *u, int s, const float *x)
{
    const bool squares = squares_of(u->kind) == s;
    for (int64_t i = 0; i < u->n; i++) {
        const uint32_t noise = noise_at(u, (enum zr_noise_kind)(ZR_NOISE_STATE_0 + s), i);
        uint32_t largest = 0;
        for (int64_t k = i / 32 * 32; k < u->n && k < i / 32 * 32 + 32; k++)
            if (zr_q8_size(x[k], squares) > largest)
                largest = zr_q8_size(x[k], squares);
        if (u->moments == ZERO_MOMENTS_F32)
            ((float *)u->state[s])[i] = x[i];
        else if (u->moments == ZERO_MOMENTS_BF16)
            ((uint16_t *)u->state[s])[i] = zr_round_random(x[i], noise);
        else {
            u->scale[s][i / 32] = zr_q8_scale(largest);
            ((uint8_t *)u->state[s])[i] =
                zr_q8_code(x[i], bf16_to_float(zr_q8_scale(largest)), squares, noise);
        }
    }
}

static float read_grad(const struct zr_update *u, int64_t i)
{
    return u->grad_dtype == ZERO_F32 ? ((const float *)u->grad)[i]
                                     : bf16_to_float(((const uint16_t *)u->grad)[i]);
}

static void write_grad(const struct zr_update *u, int64_t i, float g)
{
    if (u->grad_dtype == ZERO_F32)
        ((float *)(uintptr_t)u->grad)[i] = g;
    else
        ((uint16_t *)(uintptr_t)u->grad)[i] = bf16_from_float(g);
}

/* The update by its definition, one element at a time. */
static void reference(const struct zr_update *u, int n_states)
{
    float *x[2] = {malloc((size_t)(4 * u->n) + 1), malloc((size_t)(4 * u->n) + 1)};
    uint16_t *half = u->param;
    for (int64_t i = 0; i < u->n; i++) {
        float w = u->masters == ZERO_MASTERS_F32         ? u->master[i]
                  : u->masters == ZERO_MASTERS_REMAINDER ? zr_join_master(half[i], u->remainder[i])
                                                         : bf16_to_float(half[i]);
        for (int s = 0; s < 2; s++)
            x[s][i] = s < n_states ? read_state(u, s, i) : 0;
        element_f32(u, u->scalars->grad_scale, read_grad(u, i), &w, &x[0][i], &x[1][i]);
        half[i] = u->masters == ZERO_MASTERS_NONE ? zr_round_random(w, noise_at(u, ZR_NOISE_WEIGHT, i))
                                                  : zr_round_away(w);
        if (u->masters == ZERO_MASTERS_F32)
            u->master[i] = w;
        else if (u->masters == ZERO_MASTERS_REMAINDER)
            u->remainder[i] = zr_remainder_of(w);
    }
    for (int s = 0; s < n_states; s++)
        write_state(u, s, x[s]);
    free(x[0]), free(x[1]);
}

static struct arrays open_arrays(const struct variant *v, enum zero_masters masters,
                                 enum zero_moments moments, int64_t n, int64_t shift)
{
    const int64_t size = zr_moments_bytes(moments), blocks = (n + 31) / 32;
    struct arrays a = {
        .master = guarded_open(4 * n, 4 * shift),
        .remainder = guarded_open(2 * n, 2 * shift),
        .param = guarded_open(2 * n, 2 * (shift + 1)),
        .grad = guarded_open(4 * n, 4 * (shift + 2)),
        .state = {guarded_open(size * n, size * shift), guarded_open(size * n, size * (shift + 1))},
        .scale = {guarded_open(2 * blocks, 2 * shift), guarded_open(2 * blocks, 2)},
        .scalars = {.grad_scale = 0.37f}};
    a.u = (struct zr_update){.kind = v->kind,
                             .masters = masters,
                             .moments = moments,
                             .grad_dtype = ZERO_F32,
                             .lr = 1e-3f,
                             .beta1 = v->beta1,
                             .beta2 = 0.99f,
                             .eps = 1e-8f,
                             .decay = 0.1f,
                             .c1 = 0.5f,
                             .c2 = 0.25f,
                             .t = v->t,
                             .n = n,
                             .rounding = some_rounding()};
    return a;
}

static void fill(struct arrays *a, int n_states)
{
    float *x = malloc((size_t)(4 * a->u.n) + 1);
    struct zr_update *u = &a->u;
    for (int64_t i = 0; i < u->n; i++) {
        const float w = random_normal(&rng);
        ((float *)a->master.p)[i] = w;
        ((uint16_t *)a->param.p)[i] = zr_round_away(w);
        ((uint16_t *)a->remainder.p)[i] = zr_remainder_of(w);
        write_grad(u, i, random_below(&rng, 9) ? random_normal(&rng) : check_value(&rng));
    }
    for (int s = 0; s < n_states; s++) {
        for (int64_t i = 0; i < u->n; i++) {
            x[i] = random_below(&rng, 9) ? random_normal(&rng) : 0;
            x[i] = squares_of(u->kind) == s ? x[i] * x[i] : x[i];
        }
        write_state(u, s, x);
    }
    free(x);
}

static void check_coded(const struct zr_host_kernels *k, const struct variant *v, enum zero_masters masters,
                        enum zero_moments moments, enum zero_dtype grad, int64_t n, int64_t shift, int where)
{
    struct arrays a = open_arrays(v, masters, moments, n, shift),
                  b = open_arrays(v, masters, moments, n, shift);
    a.u.grad_dtype = b.u.grad_dtype = grad;
    if (where == 1) /* the upper half of the element's number changes inside */
        a.u.rounding.first = (INT64_C(7) << 32) - 64;
    if (where == 2) {
        a.u.rounding.run = moments == ZERO_MOMENTS_Q8 ? 96 : 37;
        a.u.rounding.at = 32;
        a.u.rounding.skip = 320;
    }
    a.scalars.skip = where == 3;
    b.u.rounding = a.u.rounding;
    point(&a, v->n_states), point(&b, v->n_states);
    fill(&a, v->n_states);
    for (int i = 0; i < N_ARRAYS; i++)
        memcpy(array_of(&b, i)->p, array_of(&a, i)->p, (size_t)array_of(&a, i)->bytes);
    if (!a.scalars.skip)
        reference(&b.u, v->n_states);
    k->update(&a.u);
    for (int i = 0; i < N_ARRAYS; i++) {
        const unsigned char *got = array_of(&a, i)->p, *want = array_of(&b, i)->p;
        for (int64_t at = 0; at < array_of(&a, i)->bytes; at++)
            if (got[at] != want[at])
                fail_msg(
                    "%s %s: masters %d, moments %d, grad %d, %lld elements, place %d: array %d differs at "
                    "byte %lld",
                    k->name, v->name, (int)masters, (int)moments, (int)grad, (long long)n, where, i,
                    (long long)at);
        guarded_close(array_of(&a, i)), guarded_close(array_of(&b, i));
    }
}

static void check_update(void **state)
{
    static const int64_t sizes[] = {0, 1, 31, 32, 33, 256, 1000, 2085};
    int turn = 0;
    FOR_EACH(struct variant, v, variants)
    for (int masters = 0; masters <= ZERO_MASTERS_NONE; masters++)
        for (int moments = 0; moments <= ZERO_MOMENTS_Q8; moments++)
            for (int bf16 = 0; bf16 < 2; bf16++)
                FOR_EACH(int64_t, n, sizes)
    check_coded(*state, v, (enum zero_masters)masters, (enum zero_moments)moments,
                bf16 ? ZERO_BF16 : ZERO_F32, *n, turn * 3 % 8, turn % 4),
        turn++;
}

static float read_weight(const struct zr_update *u, int64_t i)
{
    const uint16_t *half = u->param;
    return u->masters == ZERO_MASTERS_F32         ? u->master[i]
           : u->masters == ZERO_MASTERS_REMAINDER ? zr_join_master(half[i], u->remainder[i])
                                                  : bf16_to_float(half[i]);
}

/* Returns the most by which a state may be away from its value in fp64. */
static double state_error(const struct zr_update *u, int s, int64_t i, double value, double rounding)
{
    const double levels = zr_q8_levels(squares_of(u->kind) == s);
    if (u->moments == ZERO_MOMENTS_F32)
        return rounding;
    if (u->moments == ZERO_MOMENTS_BF16)
        return rounding + 0x1p-7 * fabs(value);
    const double scale = bf16_to_float(u->scale[s][i / 32]);
    return rounding + scale * ((2 * sqrt(fabs(value) / scale) * levels + 2) / (levels * levels) + 1e-5);
}

/* Updates agree with the formulas in fp64, up to the rounding of their precision. */
static void check_f64(const struct zr_host_kernels *k, const struct variant *v, enum zero_masters masters,
                      enum zero_moments moments)
{
    enum { N = 77 };
    struct arrays a = open_arrays(v, masters, moments, N, 0);
    float before[3][N] = {{0}};
    point(&a, v->n_states);
    fill(&a, v->n_states);
    for (int64_t i = 0; i < N; i++) {
        write_grad(&a.u, i, random_normal(&rng));
        before[0][i] = read_weight(&a.u, i);
        for (int s = 0; s < v->n_states; s++)
            before[1 + s][i] = read_state(&a.u, s, i);
    }
    k->update(&a.u);
    for (int64_t i = 0; i < N; i++) {
        const float g = read_grad(&a.u, i), scale = a.scalars.grad_scale;
        double x[3] = {before[0][i], before[1][i], before[2][i]};
        element_f64(&a.u, scale, g, &x[0], &x[1], &x[2]);
        const struct errors e =
            rounding_of(&a.u, scale, g, before[0][i], before[1][i], before[2][i], x[0], x[1], x[2]);
        const double most = e.w + (masters == ZERO_MASTERS_NONE ? 0x1p-7 * fabs(x[0]) : 0),
                     rounding[2] = {e.s0, e.s1};
        if (fabs(read_weight(&a.u, i) - x[0]) > most)
            fail_msg("%s: masters %d: %a, not %a", v->name, (int)masters, (double)read_weight(&a.u, i), x[0]);
        for (int s = 0; s < v->n_states; s++)
            if (fabs(read_state(&a.u, s, i) - x[1 + s]) > state_error(&a.u, s, i, x[1 + s], rounding[s]))
                fail_msg("%s: moments %d: state %d is %a, not %a", v->name, (int)moments, s,
                         (double)read_state(&a.u, s, i), x[1 + s]);
    }
    for (int i = 0; i < N_ARRAYS; i++)
        guarded_close(array_of(&a, i));
}

/* A gradient that is not finite reaches its element, and with 8 bits its block, and nothing else. */
static void check_not_finite(const struct zr_host_kernels *k, const struct variant *v,
                             enum zero_masters masters, enum zero_moments moments)
{
    enum { N = 100, AT = 40 };
    struct arrays a = open_arrays(v, masters, moments, N, 0), b = open_arrays(v, masters, moments, N, 0);
    point(&a, v->n_states), point(&b, v->n_states);
    fill(&a, v->n_states);
    for (int i = 0; i < N_ARRAYS; i++)
        memcpy(array_of(&b, i)->p, array_of(&a, i)->p, (size_t)array_of(&a, i)->bytes);
    b.u.rounding = a.u.rounding;
    write_grad(&b.u, AT, random_below(&rng, 2) ? NAN : INFINITY);
    k->update(&a.u), k->update(&b.u);
    for (int64_t i = 0; i < N; i++) {
        const bool reached = moments == ZERO_MOMENTS_Q8 ? i / 32 == AT / 32 : i == AT;
        if (i != AT)
            assert_true(same_float(read_weight(&a.u, i), read_weight(&b.u, i)));
        for (int s = 0; s < v->n_states; s++) {
            if (!reached)
                assert_true(same_float(read_state(&a.u, s, i), read_state(&b.u, s, i)));
            else
                assert_false(isfinite(read_state(&b.u, s, i)));
        }
    }
    for (int i = 0; i < N_ARRAYS; i++)
        guarded_close(array_of(&a, i)), guarded_close(array_of(&b, i));
}

static void check_values(void **state)
{
    FOR_EACH(struct variant, v, variants)
    for (int masters = 0; masters <= ZERO_MASTERS_NONE; masters++)
        for (int moments = 0; moments <= ZERO_MOMENTS_Q8; moments++) {
            check_f64(*state, v, (enum zero_masters)masters, (enum zero_moments)moments);
            check_not_finite(*state, v, (enum zero_masters)masters, (enum zero_moments)moments);
        }
}

/* Wherever shards are cut at blocks, the bits are the same. */
static void check_pieces(void **state)
{
    const struct zr_host_kernels *k = *state;
    enum { N = 1000 };
    for (int masters = ZERO_MASTERS_REMAINDER; masters <= ZERO_MASTERS_NONE; masters++)
        for (int moments = 0; moments <= ZERO_MOMENTS_Q8; moments++) {
            struct arrays a = open_arrays(&variants[0], (enum zero_masters)masters,
                                          (enum zero_moments)moments, N, 0),
                          b = open_arrays(&variants[0], (enum zero_masters)masters,
                                          (enum zero_moments)moments, N, 0);
            point(&a, 2), point(&b, 2);
            fill(&a, 2);
            for (int i = 0; i < N_ARRAYS; i++)
                memcpy(array_of(&b, i)->p, array_of(&a, i)->p, (size_t)array_of(&a, i)->bytes);
            k->update(&a.u);
            for (int64_t at = 0, step; at < N; at += step) {
                const struct zr_update_span span = {
                    .first = at, .lr = b.u.lr, .decay = b.u.decay, .rounding = a.u.rounding};
                struct zr_update part = zr_update_of_span(&b.u, &span);
                step = 32 * (1 + random_below(&rng, 9));
                part.n = step < N - at ? step : N - at;
                part.rounding.first += at;
                k->update(&part);
            }
            for (int i = 0; i < N_ARRAYS; i++) {
                assert_memory_equal(array_of(&a, i)->p, array_of(&b, i)->p, (size_t)array_of(&a, i)->bytes);
                guarded_close(array_of(&a, i)), guarded_close(array_of(&b, i));
            }
        }
}

/* --- operations without an update --- */

/* Numbers of one magnitude, with zeros, and sometimes with what has no code. */
static void draw(float *x, int64_t n, bool squares, bool finite)
{
    for (int64_t i = 0; i < n; i++) {
        x[i] = random_below(&rng, 9) ? random_normal(&rng) : 0;
        x[i] = squares ? x[i] * x[i] : x[i];
        if (!finite && random_below(&rng, 20) == 0)
            x[i] = zr_bits_float((uint32_t)random_bits(&rng));
    }
}

/* The value of a code is the nearest one, except that only 0 has the code 0. */
static bool is_nearest(uint8_t code, float x, float scale, bool squares)
{
    const double error = fabs((double)zr_q8_value(code, scale, squares) - x) * (1 - 1e-6);
    for (int other = 0; other < 256; other++)
        if ((other == 0) == (x == 0) && (squares || other != 0x80) &&
            fabs((double)zr_q8_value((uint8_t)other, scale, squares) - x) < error - scale * 1e-6)
            return false;
    return (code == 0) == (x == 0);
}

static void check_coding(const struct zr_host_kernels *k, enum zr_coding coding, int64_t n, int64_t shift,
                         bool finite)
{
    const bool squares = coding == ZR_CODING_Q8_SQUARES, q8 = coding >= ZR_CODING_Q8;
    const int64_t size = zr_coding_bytes(coding);
    struct guarded x = guarded_open(4 * n, 4 * shift), back = guarded_open(4 * n, 4 * (shift + 1)),
                   at = guarded_open(size * n, size * (shift + 3)),
                   beside = guarded_open(zr_coding_bytes_beside(coding, n), 2 * shift);
    const struct zr_coded coded = {coding, at.p, coding == ZR_CODING_WEIGHT ? NULL : beside.p};
    const float *from = x.p, *got = back.p;
    const uint16_t *half = at.p, *second = beside.p;
    draw(x.p, n, squares, finite);
    k->encode(&coded, from, n);
    k->decode(back.p, &coded, n);
    for (int64_t i = 0; i < n; i++) {
        if (!q8)
            assert_int_equal(half[i], nearest_away(from[i]));
        if (coding == ZR_CODING_WEIGHT)
            assert_true(same_float(got[i], bf16_to_float(half[i])));
        if (coding == ZR_CODING_REMAINDER)
            assert_true(same_float(got[i], from[i]));
        if (!q8)
            continue;
        const float scale = bf16_to_float(second[i / 32]);
        uint32_t largest = 0;
        for (int64_t j = i / 32 * 32; j < n && j < i / 32 * 32 + 32; j++)
            if (zr_q8_size(from[j], squares) > largest)
                largest = zr_q8_size(from[j], squares);
        assert_int_equal(second[i / 32], zr_q8_scale(largest));
        assert_true(same_float(got[i], zr_q8_value(((uint8_t *)at.p)[i], scale, squares)));
        if (scale > 0 && !is_nearest(((uint8_t *)at.p)[i], from[i], scale, squares))
            fail_msg("%s: %a of %a has the code %d", k->name, (double)from[i], (double)scale,
                     ((uint8_t *)at.p)[i]);
    }
    guarded_close(&x), guarded_close(&back), guarded_close(&at), guarded_close(&beside);
}

static void check_codings(void **state)
{
    int turn = 0;
    for (int coding = 0; coding <= ZR_CODING_Q8_SQUARES; coding++)
        FOR_EACH(int64_t, n, check_sizes)
    check_coding(*state, (enum zr_coding)coding, *n, turn % 5, turn % 2), turn++;
}

/* Sums are rounded at random once, with the noise of the element in the whole tensor. */
static void check_add_rounded(void **state)
{
    const struct zr_host_kernels *k = *state;
    int turn = 0;
    FOR_EACH(int64_t, n, check_sizes)
    for (int where = 0; where < 3; where++, turn++) {
        struct guarded sum = guarded_open(2 * *n, 2 * (turn % 5)),
                       more = guarded_open(4 * *n, 4 * (turn % 3));
        struct zr_update u = {.rounding = some_rounding()};
        uint16_t *dst = sum.p, *want = malloc((size_t)(2 * *n) + 1);
        if (where == 1) /* the upper half of the element's number changes inside */
            u.rounding.first = (INT64_C(7) << 32) - 64;
        if (where == 2)
            u.rounding.run = 37, u.rounding.at = 3, u.rounding.skip = 99;
        draw(more.p, *n, false, true);
        for (int64_t i = 0; i < *n; i++) {
            dst[i] = bf16_from_float(random_normal(&rng));
            want[i] =
                zr_round_random(bf16_to_float(dst[i]) + ((float *)more.p)[i], noise_at(&u, ZR_NOISE_SUM, i));
        }
        k->add_rounded(dst, more.p, *n, &u.rounding);
        assert_memory_equal(dst, want, (size_t)(2 * *n));
        guarded_close(&sum), guarded_close(&more);
        free(want);
    }
}

/* --- many steps --- */

#ifdef CHECK_GPU
enum { MANY = 64, N_MANY = 64 };
#else
enum { MANY = 2048, N_MANY = 1000 };
#endif

/* Masters as remainders are those in fp32, bit for bit, and the weights are the masters rounded. */
static void check_500_steps(void **state)
{
    const struct zr_host_kernels *k = *state;
    struct arrays a = open_arrays(&variants[0], ZERO_MASTERS_F32, ZERO_MOMENTS_F32, MANY, 0),
                  b = open_arrays(&variants[0], ZERO_MASTERS_REMAINDER, ZERO_MOMENTS_F32, MANY, 0);
    point(&a, 2), point(&b, 2);
    fill(&a, 2);
    for (int i = 0; i < N_ARRAYS; i++)
        memcpy(array_of(&b, i)->p, array_of(&a, i)->p, (size_t)array_of(&a, i)->bytes);
    for (int t = 0; t < N_MANY / 2; t++) {
        for (int i = 0; i < MANY; i++)
            ((float *)a.grad.p)[i] = ((float *)b.grad.p)[i] = random_normal(&rng);
        k->update(&a.u), k->update(&b.u);
    }
    for (int i = 0; i < MANY; i++) {
        const float w = ((float *)a.master.p)[i];
        const uint16_t half = ((uint16_t *)b.param.p)[i], low = ((uint16_t *)b.remainder.p)[i];
        assert_true(zr_float_bits(w) == zr_float_bits(zr_join_master(half, low)));
        assert_int_equal(half, nearest_away(w));
    }
    for (int i = 0; i < N_ARRAYS; i++)
        guarded_close(array_of(&a, i)), guarded_close(array_of(&b, i));
}

/* Returns the mean of v / v in fp32 with beta2 0.999, after Gaussian gradients of log-normal size. Halfway
 * they become ten times smaller, so v must fall, by less than half a step of bf16 at a time. With
 * nearest, v is fp32 in the kernel and rounded to the nearest bf16 here: the mistake that noise avoids. */
static double mean_of_squares(const struct zr_host_kernels *k, enum zero_moments moments, bool nearest)
{
    struct arrays a = open_arrays(&variants[0], ZERO_MASTERS_F32, ZERO_MOMENTS_F32, MANY, 0),
                  b = open_arrays(&variants[0], ZERO_MASTERS_F32, nearest ? ZERO_MOMENTS_F32 : moments, MANY,
                                  0);
    static float size[MANY];
    double sum = 0;
    point(&a, 2), point(&b, 2);
    for (int i = 0; i < N_ARRAYS; i++)
        memset(array_of(&a, i)->p, 0, (size_t)array_of(&a, i)->bytes),
            memset(array_of(&b, i)->p, 0, (size_t)array_of(&b, i)->bytes);
    for (int i = 0; i < MANY; i++)
        size[i] = expf(random_normal(&rng));
    a.u.beta2 = b.u.beta2 = 0.999f;
    a.u.lr = b.u.lr = 0;
    for (int t = 0; t < N_MANY; t++) {
        for (int i = 0; i < MANY; i++)
            ((float *)a.grad.p)[i] = ((float *)b.grad.p)[i] =
                size[i] * random_normal(&rng) * (t < N_MANY / 2 ? 1 : 0.1f);
        zr_rounding_key(b.u.rounding.key, 1, (uint64_t)t, 2);
        k->update(&a.u), k->update(&b.u);
        for (int i = 0; nearest && i < MANY; i++)
            ((float *)b.state[1].p)[i] = bf16_to_float(nearest_away(((float *)b.state[1].p)[i]));
    }
    for (int i = 0; i < MANY; i++)
        sum += read_state(&b.u, 1, i) / read_state(&a.u, 1, i);
    for (int i = 0; i < N_ARRAYS; i++)
        guarded_close(array_of(&a, i)), guarded_close(array_of(&b, i));
    return sum / MANY;
}

static void check_squares(void **state)
{
    const double random = mean_of_squares(*state, ZERO_MOMENTS_BF16, false),
                 q8 = mean_of_squares(*state, ZERO_MOMENTS_Q8, false),
                 nearest = mean_of_squares(*state, ZERO_MOMENTS_BF16, true);
    printf("mean of v / v in fp32: bf16 at random %.4f, 8 bits %.4f, bf16 to nearest %.4f\n", random, q8,
           nearest);
#ifndef CHECK_GPU
    assert_true(fabs(random - 1) < 0.01);
    assert_true(fabs(q8 - 1) < 0.05);
    assert_true(nearest > 1.3);
#endif
}

static void time_states(const struct zr_host_kernels *k)
{
    static const char *const masters_names[] = {"f32", "remainder", "none"}, *const moments_names[] = {
                                                                                 "f32", "bf16", "q8"};
    FOR_EACH(struct bench_size, s, bench_sizes)
    for (int masters = 0; masters <= ZERO_MASTERS_NONE; masters++)
        for (int moments = 0; moments <= ZERO_MOMENTS_Q8; moments++) {
            struct arrays a =
                open_arrays(&variants[0], (enum zero_masters)masters, (enum zero_moments)moments, s->n, 0);
            struct timed_update timed = {.k = k};
            char name[64];
            const int64_t weight = masters == ZERO_MASTERS_F32         ? 10
                                   : masters == ZERO_MASTERS_REMAINDER ? 8
                                                                       : 4;
            point(&a, 2);
            for (int i = 0; i < N_ARRAYS; i++)
                memset(array_of(&a, i)->p, 0, (size_t)array_of(&a, i)->bytes);
            for (int64_t i = 0; i < s->n; i++)
                ((float *)a.grad.p)[i] = random_unit(random_bits(&rng));
            timed.u = a.u;
            snprintf(name, sizeof name, "adamw %s, %s", masters_names[masters], moments_names[moments]);
            bench(name, k->name, s->where, s->n * (4 + weight + 4 * zr_moments_bytes(a.u.moments)),
                  run_update, &timed);
            for (int i = 0; i < N_ARRAYS; i++)
                guarded_close(array_of(&a, i));
        }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(check_noise),       cmocka_unit_test(check_remainder),
                                       cmocka_unit_test(check_random_bf16), cmocka_unit_test(check_codes),
                                       cmocka_unit_test(check_update),      cmocka_unit_test(check_values),
                                       cmocka_unit_test(check_pieces),      cmocka_unit_test(check_codings),
                                       cmocka_unit_test(check_add_rounded), cmocka_unit_test(check_500_steps),
                                       cmocka_unit_test(check_squares)};
    rng = random_open();
    return check_main(argc, argv, tests, sizeof tests / sizeof *tests, time_states);
}
