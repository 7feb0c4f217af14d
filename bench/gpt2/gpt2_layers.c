/* SPDX-License-Identifier: Apache-2.0 */
/* gpt2_layers.c: the functions of gpt2_layers.h on the host. They use the threads that multiply, ignore
 * streams, and are done when they return. Each thread takes some of the rows, elements or columns, and one
 * thread computes each number. So the bits do not depend on the number of threads.
 *
 * A compiler can vectorise the loops without reordering floating-point operations: element-wise loops as they
 * are, sums over 16 lanes in a fixed order. */
#include "bench/gpt2/gpt2_vocab.h"
#include "bench/threads.h"

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

/* e^x within 2 units in the last place for x between lowest >= -87 and highest <= 88. Outside, x is replaced
 * by the nearer limit; a NaN stays one. It follows Cephes' expf: 2^n times a polynomial on [-ln2/2, ln2/2].
 * Unlike libm's, it can be vectorised. */
static inline float exp_between(float x, float lowest, float highest)
{
    const float to_whole = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer in the low bits */
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
    bits = (bits + 127u) << 23; /* exponent of 2^n; the constant's own low bits are 0 */
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

static inline float fast_exp(float x)
{
    return exp_between(x, -87.0f, 88.0f);
}

/* Adds n fp32 sums to a gradient, with one rounding for any number of summed rows. */
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

GPT2_CLONES static void normalize_rows(real *restrict out, float *restrict mean, float *restrict rstd,
                                       const real *restrict inp, const real *restrict weight,
                                       const real *restrict bias, float *restrict x, int64_t N, int64_t C)
{
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
}

static int layernorm_forward(const struct compute *on, real *out, float *mean, float *rstd, const real *inp,
                             const real *weight, const real *bias, float *scratch, int64_t N, int64_t C)
{
    IN_PARTS(on)
    {
        int64_t from = part_at(on, N, part), n = part_at(on, N, part + 1) - from;
        normalize_rows(out + from * C, mean + from, rstd + from, inp + from * C, weight, bias,
                       scratch + part * 2 * C, n, C);
    }
    return 0;
}

GPT2_CLONES static void normalize_rows_backward(real *restrict dinp, const real *restrict dout,
                                                const real *restrict inp, const real *restrict weight,
                                                const float *restrict mean, const float *restrict rstd,
                                                float *restrict norm, int64_t N, int64_t C)
{
    float *restrict dnorm = norm + C;
    for (int64_t row = 0; row < N; row++, inp += C, dout += C, dinp += C) {
        float mu = mean[row], scale = rstd[row];
        for (int64_t i = 0; i < C; i++) {
            norm[i] = (to_float(inp[i]) - mu) * scale;
            dnorm[i] = to_float(weight[i]) * to_float(dout[i]);
        }
        float m = sum(dnorm, C) / (float)C, m_norm = dot(dnorm, norm, C) / (float)C;
        for (int64_t i = 0; i < C; i++)
            dinp[i] = from_float(to_float(dinp[i]) + (dnorm[i] - m - norm[i] * m_norm) * scale);
    }
}

/* Computes n columns over all N rows. */
GPT2_CLONES static void normalize_columns_backward(real *restrict dweight, real *restrict dbias,
                                                   const real *restrict dout, const real *restrict inp,
                                                   const float *restrict mean, const float *restrict rstd,
                                                   float *restrict dw, int64_t n, int64_t N, int64_t C)
{
    float *restrict db = dw + n;
    memset(dw, 0, 2 * (size_t)n * sizeof *dw);
    for (int64_t row = 0; row < N; row++, inp += C, dout += C) {
        float mu = mean[row], scale = rstd[row];
        for (int64_t i = 0; i < n; i++) {
            float d = to_float(dout[i]);
            dw[i] += d * ((to_float(inp[i]) - mu) * scale);
            db[i] += d;
        }
    }
    add_columns(dweight, dw, n);
    add_columns(dbias, db, n);
}

static int layernorm_backward(const struct compute *on, real *dinp, real *dweight, real *dbias,
                              const real *dout, const real *inp, const real *weight, const float *mean,
                              const float *rstd, float *scratch, int64_t N, int64_t C)
{
    IN_PARTS(on)
    {
        float *mine = scratch + part * 2 * C;
        int64_t from = part_at(on, N, part), n = part_at(on, N, part + 1) - from;
        if (dinp)
            normalize_rows_backward(dinp + from * C, dout + from * C, inp + from * C, weight, mean + from,
                                    rstd + from, mine, n, C);
        from = part_at(on, C, part), n = part_at(on, C, part + 1) - from;
        if (dweight)
            normalize_columns_backward(dweight + from, dbias + from, dout + from, inp + from, mean, rstd,
                                       mine, n, N, C);
    }
    return 0;
}

/* The limit is e^80, since its reciprocal is not denormal. Vector code computes the value at the limit for
 * every element, and some CPUs take a hundred times as long for denormal numbers. */
static inline float gelu_gate(float x)
{
    return 1.0f / (1.0f + exp_between(-2.0f * gpt2_gelu_u(x), -87.0f, 80.0f));
}

GPT2_CLONES static void gelu(real *restrict out, const real *restrict inp, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float x = to_float(inp[i]);
        out[i] = from_float(x * gelu_gate(x));
    }
}

static int gelu_forward(const struct compute *on, real *out, const real *inp, int64_t n)
{
    IN_PARTS(on)
    {
        int64_t from = part_at(on, n, part);
        gelu(out + from, inp + from, part_at(on, n, part + 1) - from);
    }
    return 0;
}

GPT2_CLONES static void gelu_slope(real *restrict dout, const real *restrict inp, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float x = to_float(inp[i]);
        dout[i] = from_float(to_float(dout[i]) * gpt2_gelu_slope(x, gelu_gate(x)));
    }
}

static int gelu_backward(const struct compute *on, real *dout, const real *inp, int64_t n)
{
    IN_PARTS(on)
    {
        int64_t from = part_at(on, n, part);
        gelu_slope(dout + from, inp + from, part_at(on, n, part + 1) - from);
    }
    return 0;
}

GPT2_CLONES static void causal_softmax_rows(real *restrict att, float *restrict scores, int64_t from,
                                            int64_t to, int64_t T, float scale)
{
    att += from * T;
    scores += from * T;
    for (int64_t row = from; row < to; row++, att += T, scores += T) {
        int64_t n = row % T + 1; /* a token sees itself and the tokens before it */
        float top = largest(scores, n);
        for (int64_t i = 0; i < n; i++)
            scores[i] = fast_exp((scores[i] - top) * scale);
        float inverse = 1.0f / sum(scores, n);
        for (int64_t i = 0; i < n; i++)
            att[i] = from_float(scores[i] * inverse);
        memset(att + n, 0, (size_t)(T - n) * sizeof *att);
    }
}

static int causal_softmax_forward(const struct compute *on, real *att, float *scores, int64_t NH, int64_t T,
                                  float scale)
{
    IN_PARTS(on)
    causal_softmax_rows(att, scores, part_at(on, NH * T, part), part_at(on, NH * T, part + 1), T, scale);
    return 0;
}

GPT2_CLONES static void causal_softmax_rows_backward(real *restrict dscores, float *restrict datt,
                                                     const real *restrict att, int64_t from, int64_t to,
                                                     int64_t T, float scale)
{
    att += from * T;
    datt += from * T;
    dscores += from * T;
    for (int64_t row = from; row < to; row++, att += T, datt += T, dscores += T) {
        int64_t n = row % T + 1;
        for (int64_t i = 0; i < n; i++)
            datt[i] *= to_float(att[i]);
        float total = sum(datt, n);
        for (int64_t i = 0; i < n; i++)
            dscores[i] = from_float((datt[i] - to_float(att[i]) * total) * scale);
        memset(dscores + n, 0, (size_t)(T - n) * sizeof *dscores);
    }
}

static int causal_softmax_backward(const struct compute *on, real *dscores, float *datt, const real *att,
                                   int64_t NH, int64_t T, float scale)
{
    IN_PARTS(on)
    causal_softmax_rows_backward(dscores, datt, att, part_at(on, NH * T, part), part_at(on, NH * T, part + 1),
                                 T, scale);
    return 0;
}

GPT2_CLONES static void cross_entropy_rows(real *restrict dlogits, double *restrict loss,
                                           float *restrict logits, const int32_t *restrict targets, int64_t N,
                                           int64_t V, int64_t ld, struct gpt2_label label, float scale)
{
    const float each = scale * label.each, more = scale * label.target;
    for (int64_t row = 0; row < N; row++, logits += ld, dlogits += ld) {
        int32_t target = targets[row];
        float top = largest(logits, V);
        double wanted = (double)label.target * (double)(logits[target] - top);
        if (label.each > 0)
            wanted += (double)label.each * ((double)sum(logits, V) - (double)V * (double)top);
        for (int64_t i = 0; i < V; i++)
            logits[i] = fast_exp(logits[i] - top);
        float total = sum(logits, V), factor = scale / total;
        for (int64_t i = 0; i < V; i++)
            dlogits[i] = from_float(logits[i] * factor - each);
        dlogits[target] = from_float(logits[target] * factor - each - more);
        loss[row] = log((double)total) - wanted;
    }
}

static int cross_entropy(const struct compute *on, real *dlogits, double *loss, float *logits,
                         const int32_t *targets, int64_t N, int64_t V, int64_t ld, struct gpt2_label label,
                         float scale)
{
    IN_PARTS(on)
    {
        int64_t from = part_at(on, N, part);
        cross_entropy_rows(dlogits + from * ld, loss + from, logits + from * ld, targets + from,
                           part_at(on, N, part + 1) - from, V, ld, label, scale);
    }
    return 0;
}

static int add_loss(const struct compute *on, double *total, const double *loss, int64_t N)
{
    (void)on;
    double sum_of_rows = 0.0;
    for (int64_t row = 0; row < N; row++)
        sum_of_rows += loss[row];
    *total += ldexp(rint(ldexp(sum_of_rows / (double)N, 36)), -36);
    return 0;
}

/* Computes n columns over all N rows. */
GPT2_CLONES static void sum_columns(real *restrict dbias, const real *restrict dout, float *restrict columns,
                                    int64_t n, int64_t N, int64_t C)
{
    memset(columns, 0, (size_t)n * sizeof *columns);
    for (int64_t row = 0; row < N; row++, dout += C)
        add_row(columns, dout, n);
    add_columns(dbias, columns, n);
}

static int bias_backward(const struct compute *on, real *dbias, const real *dout, float *scratch, int64_t N,
                         int64_t C)
{
    IN_PARTS(on)
    {
        int64_t from = part_at(on, C, part);
        sum_columns(dbias + from, dout + from, scratch + from, part_at(on, C, part + 1) - from, N, C);
    }
    return 0;
}

GPT2_CLONES static void add_elements(real *restrict grad, const real *restrict x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        grad[i] = from_float(to_float(grad[i]) + to_float(x[i]));
}

static int add(const struct compute *on, real *grad, const real *x, int64_t n)
{
    IN_PARTS(on)
    {
        int64_t from = part_at(on, n, part);
        add_elements(grad + from, x + from, part_at(on, n, part + 1) - from);
    }
    return 0;
}

GPT2_CLONES static void embed_rows(real *restrict out, const int32_t *restrict tokens,
                                   const real *restrict wte, const real *restrict wpe, int64_t from,
                                   int64_t to, int64_t T, int64_t C)
{
    out += from * C;
    for (int64_t bt = from; bt < to; bt++, out += C) {
        const real *token = tokens[bt] < 0 ? NULL : wte + tokens[bt] * C;
        const real *position = wpe ? wpe + bt % T * C : NULL;
        for (int64_t i = 0; i < C; i++)
            out[i] =
                from_float((token ? to_float(token[i]) : 0.0f) + (position ? to_float(position[i]) : 0.0f));
    }
}

static int embedding_forward(const struct compute *on, real *out, const int32_t *tokens, const real *wte,
                             const real *wpe, int64_t B, int64_t T, int64_t C)
{
    IN_PARTS(on)
    embed_rows(out, tokens, wte, wpe, part_at(on, B * T, part), part_at(on, B * T, part + 1), T, C);
    return 0;
}

/* The rows of one token are summed in fp32 and added once. Adding each row to a bf16 gradient would lose the
 * later ones. */
GPT2_CLONES static void add_to_tokens(real *restrict dwte, const real *restrict dout,
                                      const struct gpt2_batch *batch, float *restrict columns, int64_t from,
                                      int64_t to, int64_t C)
{
    for (int64_t d = from; d < to; d++) {
        memset(columns, 0, (size_t)C * sizeof *columns);
        for (int32_t at = batch->first[d]; at < batch->first[d + 1]; at++)
            add_row(columns, dout + batch->order[at] * C, C);
        add_columns(dwte + batch->distinct[d] * C, columns, C);
    }
}

GPT2_CLONES static void add_to_positions(real *restrict dwpe, const real *restrict dout,
                                         float *restrict columns, int64_t from, int64_t to, int64_t B,
                                         int64_t T, int64_t C)
{
    for (int64_t t = from; t < to; t++) {
        memset(columns, 0, (size_t)C * sizeof *columns);
        for (int64_t b = 0; b < B; b++)
            add_row(columns, dout + (b * T + t) * C, C);
        add_columns(dwpe + t * C, columns, C);
    }
}

static int embedding_backward(const struct compute *on, real *dwte, real *dwpe, const real *dout,
                              const struct gpt2_batch *batch, float *scratch, int64_t B, int64_t T, int64_t C)
{
    const int64_t n = batch->n_distinct;
    IN_PARTS(on)
    {
        float *columns = scratch + part * 2 * C;
        add_to_tokens(dwte, dout, batch, columns, part_at(on, n, part), part_at(on, n, part + 1), C);
        add_to_positions(dwpe, dout, columns, part_at(on, T, part), part_at(on, T, part + 1), B, T, C);
    }
    return 0;
}

/* Two rows for each thread, and one row of the widest bias. */
static int64_t n_scratch(const struct compute *on, int64_t N, int64_t C)
{
    (void)N;
    return (on->n_threads > 2 ? 2 * on->n_threads : 4) * C;
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
    .vocab_top = gpt2_vocab_top,
    .vocab_exponentials = gpt2_vocab_exponentials,
    .vocab_loss = gpt2_vocab_loss,
    .add_loss = add_loss,
    .bias_backward = bias_backward,
    .add = add,
    .embedding_forward = embedding_forward,
    .embedding_backward = embedding_backward,
};
