/* SPDX-License-Identifier: Apache-2.0 */
/* attention.h: causal attention between two sets of rows of a sequence: each query attends to keys at its own
 * position and before. Rows are identified by their positions in the whole sequence, so a context-parallel
 * rank may have any of them.
 *
 * No (T, T) array is kept. Forward keeps one number for each query, the logarithm of the sum of its
 * exponentials, and backward computes the probabilities again (Dao, arXiv:2307.08691). Queries are computed
 * in tiles on a fixed grid of positions, against keys up to the end of the tile. A tile is always computed
 * whole, even if the call has only some of its queries. So a query's output has the same bits whatever the
 * other queries are.
 *
 * For some head sizes, the bf16 model on a GPU uses a fused kernel (attention.cu). Otherwise attention
 * consists of matrix products and functions of the layer table (layers.h). All pointers are to memory of the
 * device of `on`. */
#ifndef ZERO_BENCH_MODEL_ATTENTION_H
#define ZERO_BENCH_MODEL_ATTENTION_H

#include "bench/compute.h"
#include "bench/model/model_real.h"

struct profile;

/* Rows of a sequence: two ranges of positions, first[i] to first[i] + n[i] - 1. In memory, the rows of the
 * second range follow those of the first. The positions of the second range are higher. The second range may
 * be empty; the first may not. */
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
    /* Key and value heads, a divisor of NH. Each serves NH / n_kv consecutive query heads (grouped-query
     * attention, Ainslie et al., arXiv:2305.13245). */
    int64_t n_kv;
    struct model_rows queries, keys;
    /* (B, queries, NH, HS) and (B, keys, n_kv, HS), with q_row and kv_row elements between rows. */
    const real *q, *k, *v;
    int64_t q_row, kv_row;
    /* (B, T) The query at position p sees the keys at positions document_start[p] to p. document_start[p] is
     * at most p, and never decreases along a row. NULL: 0 for all. */
    const int32_t *document_start;
    /* A buffer of model_attention_scratch() floats. */
    float *scratch;
    /* Records the operations of matrix products. NULL: no profile. */
    struct profile *profile;
};

/* Gradients of q, k and v. If dq32 is NULL, they are written to dq, dk and dv, with dq_row and dkv_row
 * elements between rows. Otherwise they are ADDED to dq32 (B, queries, NH*HS), dk32 and dv32 (B, keys,
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

/* Merges the results of n queries for two sets of keys. y_part (B, n, NH*HS) and logsum_part (B, NH, n) are
 * those of one set, y and logsum those of the other. Afterwards y and logsum are the results for all keys of
 * both sets. */
int model_attention_merge(const struct compute *on, float *y, float *logsum, const float *y_part,
                          const float *logsum_part, int64_t B, int64_t n, int64_t NH, int64_t HS);

/* Computes grads from dy, the gradient of y. If the keys are divided over several calls, as in a ring, y and
 * logsum are the merged results of all calls. dots (B, NH, queries) is a buffer. */
int model_attention_backward(const struct compute *on, const struct model_attention_args *args,
                             const real *dy, const real *y, const float *logsum, float *dots,
                             const struct model_attention_grads *grads);

#endif
