/* SPDX-License-Identifier: Apache-2.0 */
/* draw.c: draws the model's initial weights. Each element depends only on its tensor, its number and the
 * seed, so any number of threads, and any CPU, gives the same bits. */
#include "bench/model/model.h"
#include "bench/random_bits.h"

#include <math.h>

#include <uv.h>

/* At most so many threads, with at least so many elements each. */
#define N_DRAWERS  16
#define LEAST_PART ((int64_t)1 << 17)

static inline double as_double(uint64_t bits)
{
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint64_t as_bits(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

#define ONE_BITS      UINT64_C(0x3FF0000000000000) /* 1.0 */
#define FRACTION_BITS UINT64_C(0x000FFFFFFFFFFFFF)

/* log(u) of a normal u > 0, within 1e-13. It uses only arithmetic, so that the compiler can vectorise it and
 * every C library gives the same bits. */
static inline double log_of(double u)
{
    const double whole = 4503599627370496.0; /* 2^52: its low bits can hold any smaller integer */
    uint64_t bits = as_bits(u);
    double exponent = as_double(bits >> 52 | as_bits(whole)) - (whole + 1023.0);
    double m = as_double((bits & FRACTION_BITS) | ONE_BITS);
    bool upper = m > 1.4142135623730951;
    m = upper ? m * 0.5 : m;
    exponent = upper ? exponent + 1.0 : exponent;
    double s = (m - 1.0) / (m + 1.0), q = s * s; /* log(m) = 2 artanh(s), |s| < 0.172 */
    double series = 1.0 / 15;
    series = series * q + 1.0 / 13;
    series = series * q + 1.0 / 11;
    series = series * q + 1.0 / 9;
    series = series * q + 1.0 / 7;
    series = series * q + 1.0 / 5;
    series = series * q + 1.0 / 3;
    return exponent * 0.69314718055994531 + 2.0 * s * (series * q + 1.0);
}

/* Sine and cosine of v turns, for v in [0, 1), within 1e-12. */
static inline void turn(double v, double *sine, double *cosine)
{
    const double to_whole = 6755399441055744.0; /* 1.5 * 2^52: adding it rounds to a whole number */
    double shifted = 4.0 * v + to_whole;
    uint64_t quarter = as_bits(shifted);                                         /* its low bits */
    double x = (v - (shifted - to_whole) * 0.25) * 6.283185307179586, q = x * x; /* |x| <= pi / 4 */
    double s = -1.0 / 39916800, c = 1.0 / 479001600;
    s = s * q + 1.0 / 362880;
    s = s * q - 1.0 / 5040;
    s = s * q + 1.0 / 120;
    s = s * q - 1.0 / 6;
    s = s * q * x + x;
    c = c * q - 1.0 / 3628800;
    c = c * q + 1.0 / 40320;
    c = c * q - 1.0 / 720;
    c = c * q + 1.0 / 24;
    c = c * q - 0.5;
    c = c * q + 1.0;
    bool odd = quarter & 1;
    *sine = as_double(as_bits(odd ? c : s) ^ (quarter & 2) << 62);
    *cosine = as_double(as_bits(odd ? s : c) ^ ((quarter + 1) & 2) << 62);
}

#define PAIRS 128

/* Draws elements 2i and 2i + 1 for i from pair on (Box and Muller 1958). */
MODEL_CLONES static void draw_pairs(double *restrict x, uint64_t stream, int64_t pair, double deviation)
{
    for (int64_t i = 0; i < PAIRS; i++) {
        uint64_t at = stream + (uint64_t)(2 * (pair + i));
        double u = 2.0 - as_double(random_bits(at) >> 12 | ONE_BITS); /* in (0, 1] */
        double v = as_double(random_bits(at + 1) >> 12 | ONE_BITS) - 1.0;
        double r = deviation * sqrt(-2.0 * log_of(u)), sine, cosine;
        turn(v, &sine, &cosine);
        x[2 * i] = r * cosine;
        x[2 * i + 1] = r * sine;
    }
}

/* Some elements of a tensor. The thread that draws them does not matter, since each depends only on its
 * number. */
struct drawing {
    real *x;
    int64_t first, n;
    uint64_t stream; /* of the whole tensor */
    double deviation;
};

static void draw(void *arg)
{
    const struct drawing *d = arg;
    double x[2 * PAIRS];
    int64_t end = d->first + d->n;
    for (int64_t at = d->first & ~(int64_t)1; at < end; at += 2 * PAIRS) {
        draw_pairs(x, d->stream, at / 2, d->deviation);
        int64_t lo = at < d->first ? d->first : at, hi = end < at + 2 * PAIRS ? end : at + 2 * PAIRS;
        for (int64_t i = lo; i < hi; i++)
            d->x[i - d->first] = from_float((float)x[i - at]);
    }
}

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Draws the elements on several threads. */
static void draw_piece(const struct drawing *piece)
{
    struct drawing part[N_DRAWERS];
    uv_thread_t thread[N_DRAWERS];
    bool started[N_DRAWERS] = {false};
    int64_t most = smaller(uv_available_parallelism(), N_DRAWERS);
    int n_parts = (int)smaller((piece->n + LEAST_PART - 1) / LEAST_PART, most);
    int64_t part_elems = (piece->n + n_parts - 1) / n_parts;
    for (int i = 0; i < n_parts; i++) {
        int64_t at = i * part_elems;
        part[i] = *piece;
        part[i].x += at;
        part[i].first += at;
        part[i].n = smaller(part_elems, piece->n - at);
        started[i] = i > 0 && !uv_thread_create(&thread[i], draw, &part[i]);
    }
    for (int i = 0; i < n_parts; i++)
        if (!started[i])
            draw(&part[i]);
    for (int i = 0; i < n_parts; i++)
        if (started[i])
            uv_thread_join(&thread[i]);
}

void model_draw(const struct model_config *config, uint64_t seed, int t, int64_t first, int64_t n, real *x)
{
    struct model_start starts[MODEL_MAX_TENSORS];
    config->ops->starts(config, starts);
    if (starts[t].deviation == 0) {
        for (int64_t i = 0; i < n; i++)
            x[i] = from_float(starts[t].value);
        return;
    }
    uint64_t n_before = 0;
    for (int i = 0; i < t; i++)
        n_before += starts[i].deviation > 0;
    if (n > 0)
        draw_piece(
            &(struct drawing){x, first, n, random_bits(random_bits(seed) + n_before), starts[t].deviation});
}
