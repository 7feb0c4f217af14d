/* gpt2_layers.c: gpt2_layers.h on the host. The work is done on the calling thread; streams are not looked
 * at.
 *
 * Loops are written so that a compiler vectorises them without being allowed to reorder floating point:
 * element-wise ones as they stand, sums over 16 lanes in one fixed order. */
#include "bench/gpt2/gpt2_layers.h"

#include <math.h>

#define LANES 16

static inline float sum_lanes(float s[LANES])
{
    for (int half = LANES / 2; half; half /= 2)
        for (int j = 0; j < half; j++)
            s[j] += s[j + half];
    return s[0];
}

static inline float sum(const float *x, int64_t n)
{
    float s[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++)
            s[j] += x[i + j];
    for (int j = 0; i < n; i++, j++)
        s[j] += x[i];
    return sum_lanes(s);
}

static inline float dot(const float *x, const float *y, int64_t n)
{
    float s[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++)
            s[j] += x[i + j] * y[i + j];
    for (int j = 0; i < n; i++, j++)
        s[j] += x[i] * y[i];
    return sum_lanes(s);
}

static inline float largest(const float *x, int64_t n)
{
    float s[LANES];
    for (int j = 0; j < LANES; j++)
        s[j] = x[0];
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++)
            s[j] = x[i + j] > s[j] ? x[i + j] : s[j];
    for (int j = 0; i < n; i++, j++)
        s[j] = x[i] > s[j] ? x[i] : s[j];
    for (int j = 1; j < LANES; j++)
        s[0] = s[j] > s[0] ? s[j] : s[0];
    return s[0];
}

/* e^x within 2 units in the last place between lowest >= -87 and highest <= 88, those of the nearer end
 * outside; a NaN stays one. Cephes' expf: 2^n times a polynomial on [-ln2/2, ln2/2], in a form that
 * vectorises, which libm's does not. */
static inline float exp_between(float x, float lowest, float highest)
{
    const float to_whole =
        12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number, kept in the low bits */
    x = x < lowest ? lowest : x;
    x = x > highest ? highest : x;
    float shifted = x * 1.44269504f + to_whole;
    float whole = shifted - to_whole;
    float r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    float p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127u) << 23; /* the exponent of 2^n; the magic number's own low bits are zero */
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

static inline float fast_exp(float x)
{
    return exp_between(x, -87.0f, 88.0f);
}

/* Adds n fp32 sums to a gradient: one rounding, whatever the number of rows they were summed over. */
static inline void add_columns(real *restrict grad, const float *restrict columns, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        grad[i] = from_float(to_float(grad[i]) + columns[i]);
}

static inline void add_row(float *restrict columns, const real *restrict row, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        columns[i] += to_float(row[i]);
}

GPT2_CLONES static int layernorm_forward(const struct place *on, real *restrict out, float *restrict mean,
                                         float *restrict rstd, const real *restrict inp,
                                         const real *restrict weight, const real *restrict bias,
                                         float *restrict columns, int64_t N, int64_t C)
{
    (void)on;
    float *restrict x = columns;
    for (int64_t row = 0; row < N; row++, inp += C, out += C) {
        for (int64_t i = 0; i < C; i++)
            x[i] = to_float(inp[i]);
        float mu = sum(x, C) / (float)C;
        for (int64_t i = 0; i < C; i++)
            x[i] -= mu;
        float scale = 1.0f / sqrtf(dot(x, x, C) / (float)C + GPT2_LAYERNORM_EPS);
        for (int64_t i = 0; i < C; i++)
            out[i] = from_float(x[i] * scale * to_float(weight[i]) + to_float(bias[i]));
        mean[row] = mu;
        rstd[row] = scale;
    }
    return 0;
}

GPT2_CLONES static int layernorm_backward(const struct place *on, real *restrict dinp, real *restrict dweight,
                                          real *restrict dbias, const real *restrict dout,
                                          const real *restrict inp, const real *restrict weight,
                                          const float *restrict mean, const float *restrict rstd,
                                          float *restrict columns, int64_t N, int64_t C)
{
    (void)on;
    float *restrict dw = columns, *restrict db = columns + C;
    float *restrict norm = columns + 2 * C, *restrict dnorm = columns + 3 * C;
    memset(columns, 0, 2 * (size_t)C * sizeof *columns);
    for (int64_t row = 0; row < N; row++, inp += C, dout += C, dinp += C) {
        float mu = mean[row], scale = rstd[row];
        for (int64_t i = 0; i < C; i++) {
            float d = to_float(dout[i]);
            norm[i] = (to_float(inp[i]) - mu) * scale;
            dnorm[i] = to_float(weight[i]) * d;
            dw[i] += d * norm[i];
            db[i] += d;
        }
        float m = sum(dnorm, C) / (float)C, m_norm = dot(dnorm, norm, C) / (float)C;
        for (int64_t i = 0; i < C; i++)
            dinp[i] = from_float(to_float(dinp[i]) + (dnorm[i] - m - norm[i] * m_norm) * scale);
    }
    add_columns(dweight, dw, C);
    add_columns(dbias, db, C);
    return 0;
}

/* Up to e^80, of which the reciprocal is no denormal number: gcc computes what is beyond the end for all
 * elements, and some CPUs take a hundred times as long for those. */
static inline float gelu_gate(float x)
{
    return 1.0f / (1.0f + exp_between(-2.0f * gpt2_gelu_u(x), -87.0f, 80.0f));
}

GPT2_CLONES static int gelu_forward(const struct place *on, real *restrict out, const real *restrict inp,
                                    int64_t n)
{
    (void)on;
    for (int64_t i = 0; i < n; i++) {
        float x = to_float(inp[i]);
        out[i] = from_float(x * gelu_gate(x));
    }
    return 0;
}

GPT2_CLONES static int gelu_backward(const struct place *on, real *restrict dout, const real *restrict inp,
                                     int64_t n)
{
    (void)on;
    for (int64_t i = 0; i < n; i++) {
        float x = to_float(inp[i]);
        dout[i] = from_float(to_float(dout[i]) * gpt2_gelu_slope(x, gelu_gate(x)));
    }
    return 0;
}

GPT2_CLONES static int causal_softmax_forward(const struct place *on, real *restrict att,
                                              float *restrict scores, int64_t NH, int64_t T, float scale)
{
    (void)on;
    for (int64_t row = 0; row < NH * T; row++, att += T, scores += T) {
        int64_t n = row % T + 1; /* a token sees itself and those before it */
        float top = largest(scores, n);
        for (int64_t i = 0; i < n; i++)
            scores[i] = fast_exp((scores[i] - top) * scale);
        float inverse = 1.0f / sum(scores, n);
        for (int64_t i = 0; i < n; i++)
            att[i] = from_float(scores[i] * inverse);
        memset(att + n, 0, (size_t)(T - n) * sizeof *att);
    }
    return 0;
}

GPT2_CLONES static int causal_softmax_backward(const struct place *on, real *restrict dscores,
                                               float *restrict datt, const real *restrict att, int64_t NH,
                                               int64_t T, float scale)
{
    (void)on;
    for (int64_t row = 0; row < NH * T; row++, att += T, datt += T, dscores += T) {
        int64_t n = row % T + 1;
        for (int64_t i = 0; i < n; i++)
            datt[i] *= to_float(att[i]);
        float total = sum(datt, n);
        for (int64_t i = 0; i < n; i++)
            dscores[i] = from_float((datt[i] - to_float(att[i]) * total) * scale);
        memset(dscores + n, 0, (size_t)(T - n) * sizeof *dscores);
    }
    return 0;
}

GPT2_CLONES static int cross_entropy(const struct place *on, real *restrict dlogits, double *restrict loss,
                                     float *restrict logits, const int32_t *restrict targets, int64_t N,
                                     int64_t V, int64_t ld, float scale)
{
    (void)on;
    for (int64_t row = 0; row < N; row++, logits += ld, dlogits += ld) {
        int32_t target = targets[row];
        float top = largest(logits, V), at_target = logits[target] - top;
        for (int64_t i = 0; i < V; i++)
            logits[i] = fast_exp(logits[i] - top);
        float total = sum(logits, V), factor = scale / total;
        for (int64_t i = 0; i < V; i++)
            dlogits[i] = from_float(logits[i] * factor);
        dlogits[target] = from_float(logits[target] * factor - scale);
        loss[row] = log((double)total) - (double)at_target;
    }
    return 0;
}

static int add_loss(const struct place *on, double *total, const double *loss, int64_t N)
{
    (void)on;
    double sum_of_rows = 0.0;
    for (int64_t row = 0; row < N; row++)
        sum_of_rows += loss[row];
    *total += ldexp(rint(ldexp(sum_of_rows / (double)N, 36)), -36);
    return 0;
}

GPT2_CLONES static int bias_backward(const struct place *on, real *restrict dbias, const real *restrict dout,
                                     float *restrict columns, int64_t N, int64_t C)
{
    (void)on;
    memset(columns, 0, (size_t)C * sizeof *columns);
    for (int64_t row = 0; row < N; row++, dout += C)
        add_row(columns, dout, C);
    add_columns(dbias, columns, C);
    return 0;
}

GPT2_CLONES static int add(const struct place *on, real *restrict grad, const real *restrict x, int64_t n)
{
    (void)on;
    for (int64_t i = 0; i < n; i++)
        grad[i] = from_float(to_float(grad[i]) + to_float(x[i]));
    return 0;
}

GPT2_CLONES static int embedding_forward(const struct place *on, real *restrict out,
                                         const int32_t *restrict tokens, const real *restrict wte,
                                         const real *restrict wpe, int64_t B, int64_t T, int64_t C)
{
    (void)on;
    for (int64_t bt = 0; bt < B * T; bt++, out += C) {
        const real *token = wte + tokens[bt] * C, *position = wpe + bt % T * C;
        for (int64_t i = 0; i < C; i++)
            out[i] = from_float(to_float(token[i]) + to_float(position[i]));
    }
    return 0;
}

/* Rows of one token are summed in fp32 and added once: with bf16 gradients, adding each row to the sum so far
 * would lose the later ones. */
GPT2_CLONES static int embedding_backward(const struct place *on, real *restrict dwte, real *restrict dwpe,
                                          const real *restrict dout, const struct gpt2_batch *batch,
                                          float *restrict columns, int64_t B, int64_t T, int64_t C)
{
    (void)on;
    for (int64_t d = 0; d < batch->n_distinct; d++) {
        memset(columns, 0, (size_t)C * sizeof *columns);
        for (int32_t at = batch->first[d]; at < batch->first[d + 1]; at++)
            add_row(columns, dout + batch->order[at] * C, C);
        add_columns(dwte + batch->distinct[d] * C, columns, C);
    }
    for (int64_t t = 0; t < T; t++) {
        memset(columns, 0, (size_t)C * sizeof *columns);
        for (int64_t b = 0; b < B; b++)
            add_row(columns, dout + (b * T + t) * C, C);
        add_columns(dwpe + t * C, columns, C);
    }
    return 0;
}

static int64_t n_scratch(int64_t N, int64_t C)
{
    (void)N;
    return 4 * C;
}

const struct gpt2_layers gpt2_layers_host = {
    .row_align = 1,
    .n_scratch = n_scratch,
    .layernorm_forward = layernorm_forward,
    .layernorm_backward = layernorm_backward,
    .gelu_forward = gelu_forward,
    .gelu_backward = gelu_backward,
    .causal_softmax_forward = causal_softmax_forward,
    .causal_softmax_backward = causal_softmax_backward,
    .cross_entropy = cross_entropy,
    .add_loss = add_loss,
    .bias_backward = bias_backward,
    .add = add,
    .embedding_forward = embedding_forward,
    .embedding_backward = embedding_backward,
};
