/* SPDX-License-Identifier: Apache-2.0 */
/* attention.h: causal attention of some rows of a sequence, the queries, to other rows, the keys. Rows
 * are known by their global positions, so a context-parallel rank may have any of them.
 *
 * No (T, T) array is kept. Forward keeps one number for each query, the logarithm of the sum of its
 * exponentials, and backward computes the probabilities again (Dao, arXiv:2307.08691). Queries are computed
 * in tiles on a fixed grid of positions, against keys up to the end of the tile. A tile of which the call has
 * only some queries is computed whole. So a query's output has the same bits whatever the other queries are.
 *
 * The bf16 model on a GPU has one kernel for some head sizes (attention.cu). Otherwise
 * attention consists of matrix products and functions of the layer table. Pointers are memory of on's
 * device. */
#ifndef ZERO_BENCH_MODEL_ATTENTION_H
#define ZERO_BENCH_MODEL_ATTENTION_H

#include "bench/compute.h"
#include "bench/model/model_real.h"

struct profile;

/* Rows of a sequence: positions first[i] .. first[i] + n[i] - 1 for both i, one range after the other in
 * memory. The second range lies behind the first. It may be empty; the first may not. */
struct model_rows {
    int64_t first[2], n[2];
};

/* The row of a position, or -1 if it is in neither range. */
MODEL_HOST_DEVICE int64_t model_row_at(const struct model_rows *r, int64_t position)
{
    int64_t in_first = position - r->first[0], in_second = position - r->first[1];
    if (in_first >= 0 && in_first < r->n[0])
        return in_first;
    return in_second >= 0 && in_second < r->n[1] ? r->n[0] + in_second : -1;
}

MODEL_HOST_DEVICE int64_t model_n_rows(const struct model_rows *r)
{
    return r->n[0] + r->n[1];
}

struct model_attention_args {
    /* Batch rows, positions of the whole sequence, heads, and channels of a head. */
    int64_t B, T, NH, HS;
    /* Heads of keys and values, a divisor of NH. Each serves NH / n_kv heads of queries that follow each
     * other (Ainslie et al., arXiv:2305.13245). */
    int64_t n_kv;
    struct model_rows queries, keys;
    /* (B, queries, NH, HS) and (B, keys, n_kv, HS), with q_row and kv_row elements between rows. */
    const real *q, *k, *v;
    int64_t q_row, kv_row;
    /* (B, T) The query at a position p sees the keys at positions document_start[p] to p. It is at most p,
     * and never decreases along a row. NULL: 0 for all. */
    const int32_t *document_start;
    /* A buffer of model_attention_scratch() floats. */
    float *scratch;
    /* Counts operations of products. NULL: none. */
    struct profile *profile;
};

/* Gradients of q, k and v. Where they are real, they are written, with dq_row and dkv_row elements between
 * rows. If dq32 is not NULL, they are instead ADDED to dq32 (B, queries, NH*HS), dk32 and dv32 (B, keys,
 * n_kv*HS). */
struct model_attention_grads {
    real *dq, *dk, *dv;
    int64_t dq_row, dkv_row;
    float *dq32, *dk32, *dv32;
};

/* Floats that the two calls below need in args->scratch, for these sizes. */
int64_t model_attention_scratch(const struct compute *on, const struct model_attention_args *args);

/* y (B, queries, NH*HS) = softmax(q * k^T / sqrt(HS)) * v. If y32 is not NULL, it gets the result in fp32
 * instead. logsum (B, NH, queries) = log of the sum of e^(q * k^T / sqrt(HS)) over the keys that a query
 * sees. A query that sees no key has y = 0 and logsum = -infinity. */
int model_attention_forward(const struct compute *on, const struct model_attention_args *args, real *y,
                            float *y32, float *logsum);

/* Merges the results of n queries for some keys, y_part (B, n, NH*HS) and logsum_part (B, NH, n), into those
 * for other keys, y and logsum. The result is that for all of these keys. */
int model_attention_merge(const struct compute *on, float *y, float *logsum, const float *y_part,
                          const float *logsum_part, int64_t B, int64_t n, int64_t NH, int64_t HS);

/* Computes grads from dy, the gradient of y. If keys come in several calls, as in a ring, y and logsum are
 * the merged ones. dots (B, NH, queries) is a buffer. */
int model_attention_backward(const struct compute *on, const struct model_attention_args *args,
                             const real *dy, const real *y, const float *logsum, float *dots,
                             const struct model_attention_grads *grads);

#endif
