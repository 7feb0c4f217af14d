/* SPDX-License-Identifier: Apache-2.0 */
/* gpt2_reference.c: the loss of gpt2_reference.h. */
#include "test/bench/gpt2/gpt2_reference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    WTE,
    WPE,
    LN1W,
    LN1B,
    QKVW,
    QKVB,
    ATTPROJW,
    ATTPROJB,
    LN2W,
    LN2B,
    FCW,
    FCB,
    FCPROJW,
    FCPROJB,
    LNFW,
    LNFB
};

static void norm(double *out, const double *x, const double *weight, const double *bias, int64_t C)
{
    double mean = 0, variance = 0;
    for (int64_t i = 0; i < C; i++)
        mean += x[i] / (double)C;
    for (int64_t i = 0; i < C; i++)
        variance += (x[i] - mean) * (x[i] - mean) / (double)C;
    for (int64_t i = 0; i < C; i++)
        out[i] = (x[i] - mean) / sqrt(variance + 1e-5) * weight[i] + bias[i];
}

/* out (O) = weight (O, I) * x (I) + bias (O) */
static void linear(double *out, const double *x, const double *weight, const double *bias, int64_t I,
                   int64_t O)
{
    for (int64_t o = 0; o < O; o++) {
        out[o] = bias[o];
        for (int64_t i = 0; i < I; i++)
            out[o] += weight[o * I + i] * x[i];
    }
}

static double gelu(double x)
{
    return 0.5 * x * (1 + tanh(sqrt(2 / acos(-1.0)) * (x + 0.044715 * x * x * x)));
}

/* y (C) = the attention of the token at t; qkv (T, 3*C) */
static void attend(double *y, const double *qkv, int64_t t, int64_t C, int64_t NH)
{
    int64_t HS = C / NH;
    memset(y, 0, (size_t)C * sizeof *y);
    for (int64_t h = 0; h < NH; h++) {
        double total = 0;
        for (int64_t s = 0; s <= t; s++) {
            const double *q = qkv + t * 3 * C + h * HS, *k = qkv + s * 3 * C + C + h * HS, *v = k + C;
            double score = 0;
            for (int64_t i = 0; i < HS; i++)
                score += q[i] * k[i];
            double e = exp(score / sqrt((double)HS));
            total += e;
            for (int64_t i = 0; i < HS; i++)
                y[h * HS + i] += e * v[i];
        }
        for (int64_t i = 0; i < HS; i++)
            y[h * HS + i] /= total;
    }
}

/* Applies one layer to x (T, C), in place. */
static void layer(double *x, const struct model_config *c, double *const p[16], int64_t l, double *scratch)
{
    int64_t C = c->channels, T = c->context;
    double *normed = scratch, *y = scratch + C, *wide = y + C,
           *qkv = wide + 4 * C; /* (C), (C), (4*C), (T, 3*C) */
    for (int64_t t = 0; t < T; t++) {
        norm(normed, x + t * C, p[LN1W] + l * C, p[LN1B] + l * C, C);
        linear(qkv + t * 3 * C, normed, p[QKVW] + l * 3 * C * C, p[QKVB] + l * 3 * C, C, 3 * C);
    }
    for (int64_t t = 0; t < T; t++) {
        attend(y, qkv, t, C, c->heads);
        linear(normed, y, p[ATTPROJW] + l * C * C, p[ATTPROJB] + l * C, C, C);
        for (int64_t i = 0; i < C; i++)
            x[t * C + i] += normed[i];
        norm(normed, x + t * C, p[LN2W] + l * C, p[LN2B] + l * C, C);
        linear(wide, normed, p[FCW] + l * 4 * C * C, p[FCB] + l * 4 * C, C, 4 * C);
        for (int64_t i = 0; i < 4 * C; i++)
            wide[i] = gelu(wide[i]);
        linear(y, wide, p[FCPROJW] + l * C * 4 * C, p[FCPROJB] + l * C, 4 * C, C);
        for (int64_t i = 0; i < C; i++)
            x[t * C + i] += y[i];
    }
}

static double token_loss(const double *x, const struct model_config *c, double *const p[16], int32_t target,
                         double *normed)
{
    int64_t C = c->channels;
    double total = 0, at_target = 0, of_all = 0, s = c->label_smoothing;
    norm(normed, x, p[LNFW], p[LNFB], C);
    for (int64_t v = 0; v < c->vocab; v++) {
        double logit = 0;
        for (int64_t i = 0; i < C; i++)
            logit += p[WTE][v * C + i] * normed[i];
        total += exp(logit);
        of_all += logit / (double)c->vocab;
        at_target = v == target ? logit : at_target;
    }
    return log(total) - (1 - s) * at_target - s * of_all;
}

double reference_loss(const struct model_config *c, double *const params[16], const int32_t *tokens,
                      const int32_t *targets, int64_t B)
{
    int64_t C = c->channels, T = c->context;
    double *x = malloc((size_t)(T * C) * sizeof *x),
           *scratch = malloc((size_t)(6 * C + 3 * T * C) * sizeof *scratch);
    double loss = 0;
    for (int64_t b = 0; b < B; b++, tokens += T, targets += T) {
        for (int64_t i = 0; i < T * C; i++)
            x[i] = params[WTE][tokens[i / C] * C + i % C] + params[WPE][i];
        for (int64_t l = 0; l < c->layers; l++)
            layer(x, c, params, l, scratch);
        for (int64_t t = 0; t < T; t++)
            loss +=
                targets[t] < 0 ? 0 : token_loss(x + t * C, c, params, targets[t], scratch) / (double)(B * T);
    }
    free(x);
    free(scratch);
    return loss;
}
