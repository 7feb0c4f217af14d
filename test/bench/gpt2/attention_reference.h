/* SPDX-License-Identifier: Apache-2.0 */
/* attention_reference.h: attention and its gradients in double precision, for inputs in the model's dtype. */
#ifndef ZERO_TEST_ATTENTION_REFERENCE_H
#define ZERO_TEST_ATTENTION_REFERENCE_H

#include "bench/model/model_real.h"

#include <math.h>
#include <stdlib.h>

enum { Q, K, V, N_OF_QKV };

struct attention_reference {
    /* As in struct model_attention_args. */
    int64_t B, T, NH, n_kv, HS;
    /* (B, T, NH*HS + 2*n_kv*HS) A row has queries, keys and values; (B, T, NH*HS). */
    const real *qkv, *dy;
    /* (B, T) The first key that a query sees. NULL: 0. */
    const int32_t *first;
    /* (B, T, NH*HS), (B, NH, T) and (B, T, heads of each, HS). All begin with 0. */
    double *y, *logsum, *grads[N_OF_QKV];
};

/* Computes the results of a query, and adds its part of the gradients. weights (2, T) is a buffer. */
static void reference_query(const struct attention_reference *r, int64_t b, int64_t h, int64_t t,
                            double *weights)
{
    int64_t T = r->T, HS = r->HS, of_q = r->NH * HS, of_k = r->n_kv * HS, row = of_q + 2 * of_k;
    int64_t first = r->first ? r->first[b * T + t] : 0, at = (b * T + t) * of_q + h * HS;
    int64_t head = h / (r->NH / r->n_kv) * HS; /* first channel of the head of keys */
    const real *q = r->qkv + (b * T + t) * row + h * HS, *k = r->qkv + b * T * row + of_q + head,
               *v = k + of_k, *dy = r->dy + at;
    double *p = weights, *dp = p + T, scale = 1 / sqrt((double)HS), top = -INFINITY, total = 0, dot = 0;
    for (int64_t s = first; s <= t; s++) {
        p[s] = dp[s] = 0;
        for (int64_t i = 0; i < HS; i++) {
            p[s] += (double)to_float(q[i]) * (double)to_float(k[s * row + i]) * scale;
            dp[s] += (double)to_float(dy[i]) * (double)to_float(v[s * row + i]);
        }
        top = fmax(top, p[s]);
    }
    for (int64_t s = first; s <= t; s++)
        total += p[s] = exp(p[s] - top);
    r->logsum[(b * r->NH + h) * T + t] = top + log(total);
    for (int64_t s = first; s <= t; s++) {
        p[s] /= total;
        dot += p[s] * dp[s];
    }
    for (int64_t s = first; s <= t; s++) {
        double ds = p[s] * (dp[s] - dot) * scale;
        int64_t to = (b * T + s) * of_k + head;
        for (int64_t i = 0; i < HS; i++) {
            r->y[at + i] += p[s] * (double)to_float(v[s * row + i]);
            r->grads[Q][at + i] += ds * (double)to_float(k[s * row + i]);
            r->grads[K][to + i] += ds * (double)to_float(q[i]);
            r->grads[V][to + i] += p[s] * (double)to_float(dy[i]);
        }
    }
}

/* Allocates the results and computes them. */
static void reference_open(struct attention_reference *r)
{
    int64_t n = r->B * r->T * r->NH * r->HS;
    double *weights = calloc((size_t)(2 * r->T), sizeof *weights);
    r->y = calloc((size_t)n, sizeof *r->y);
    r->logsum = calloc((size_t)n, sizeof *r->logsum);
    for (int i = 0; i < N_OF_QKV; i++)
        r->grads[i] = calloc((size_t)n, sizeof *r->grads[i]);
    for (int64_t b = 0; b < r->B; b++)
        for (int64_t h = 0; h < r->NH; h++)
            for (int64_t t = 0; t < r->T; t++)
                reference_query(r, b, h, t, weights);
    free(weights);
}

static void reference_close(struct attention_reference *r)
{
    free(r->y);
    free(r->logsum);
    for (int i = 0; i < N_OF_QKV; i++)
        free(r->grads[i]);
}

#endif
