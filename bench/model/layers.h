/* SPDX-License-Identifier: Apache-2.0 */
/* layers.h: the parts of the model that are not matrix products, forward and backward, as a table of
 * functions. There is one table for the host and one for CUDA.
 *
 * N is the number of rows (B*T), C the number of channels. Backward functions ADD to gradients of weights.
 * All functions are deterministic: additions have a fixed order and are never atomic. On the host they
 * use no fused multiply-adds, so every instruction set gives the same bits.
 *
 * All pointers are to memory of the device of `on`. On the host, the work is done when a function returns. On
 * a GPU, it is queued on the stream of `on`. The buffer scratch has n_scratch() floats, and is in use until
 * the stream has completed the work. Each function returns 0 or a zero_err. */
#ifndef ZERO_BENCH_MODEL_LAYERS_H
#define ZERO_BENCH_MODEL_LAYERS_H

#include "bench/model/attention.h"

/* Rows grouped by token id or by position, for the backward pass of the embedding. The id or position
 * distinct[i] occurs in rows order[first[i]] to order[first[i + 1] - 1]. */
struct model_groups {
    /* (B*T) Rows, sorted by id or position, and then by row. */
    int32_t *order;
    /* (B*T) and (B*T + 1); n_distinct and n_distinct + 1 elements are used. */
    int32_t *distinct, *first;
    int32_t n_distinct;
};

/* A batch: the tokens of this rank, the next token of each, and their positions. */
struct model_batch {
    /* (B, T) each. A position counts from the beginning of the row, or of its document. */
    int32_t *tokens, *targets, *positions;
    struct model_groups by_token, by_position;
    /* (B, context) With config.documents: the position at which each token's document begins, for all tokens
     * of the whole row. Otherwise NULL. */
    int32_t *document_start;
};

/* A target that does not count in the loss. It belongs to no tensor-parallel rank. */
enum { MODEL_LEFT_OUT = -2 };

/* The distribution that the loss compares with: probability `each` for all V tokens, and `target` in addition
 * for the row's target. Without label smoothing (Szegedy et al., arXiv:1512.00567) these are 0 and 1. */
struct model_label {
    float each, target;
};

/* Fused attention kernels, for head sizes that fits() accepts. The functions compute what those of
 * attention.h do. They need no scratch, and they are deterministic too. */
struct model_attention {
    bool (*fits)(int64_t HS);
    int (*forward)(const struct compute *on, const struct model_attention_args *args, real *y, float *y32,
                   float *logsum);
    int (*backward)(const struct compute *on, const struct model_attention_args *args, const real *dy,
                    const real *y, const float *logsum, float *dots,
                    const struct model_attention_grads *grads);
};

/* The place of n heads of a batch in an array, from head number `first` on. Heads are counted over the batch.
 * Head h has rows of `width` elements, which begin at h / NH * batch + h % NH * head and are `row` elements
 * apart. */
struct model_heads {
    int64_t first, n, NH, width;
    int64_t batch, head, row;
};

/* A tile of scores (n_heads, n_queries, n_keys). first_head is its first head, `query` the position of its
 * first query, and `key` the position of its first key. A query that is not among `queries` sees no key. */
struct model_tile {
    int64_t first_head, n_heads, NH, T;
    int64_t query, n_queries, key, n_keys;
    struct model_rows queries;
    const int32_t *document_start;
    float scale;
};

/* The keys that a query sees: `from` to `to` - 1, counted from the tile's first key. */
struct model_seen {
    int64_t from, to;
};

MODEL_HOST_DEVICE struct model_seen model_seen_keys(const struct model_tile *t, int64_t head, int64_t query)
{
    struct model_seen seen = {0, 0};
    int64_t p = t->query + query, to = p + 1 - t->key;
    int64_t from = t->document_start ? t->document_start[head / t->NH * t->T + p] - t->key : 0;
    if (model_row_at(&t->queries, p) < 0)
        return seen;
    from = from > 0 ? from : 0;
    to = to < t->n_keys ? to : t->n_keys;
    if (from < to) {
        seen.from = from;
        seen.to = to;
    }
    return seen;
}

struct model_layers {
    /* NULL: attention consists of matrix products and the functions below. */
    const struct model_attention *attention;
    /* Rows of logits are padded to a multiple of this many elements. */
    int64_t row_align;
    int64_t (*n_scratch)(const struct compute *on, int64_t N, int64_t C);

    /* out (N, C) = (inp - mean) * rstd * weight + bias, over each row (Ba et al. 2016). mean and rstd (N) are
     * kept for backward. */
    int (*layernorm_forward)(const struct compute *on, real *out, float *mean, float *rstd, const real *inp,
                             const real *weight, const real *bias, float *scratch, int64_t N, int64_t C);
    /* dinp (N, C) += gradient of the input, unless dinp is NULL. dweight and dbias get the gradients of the
     * weight and the bias; both may be NULL. weight is used for dinp only. */
    int (*layernorm_backward)(const struct compute *on, real *dinp, real *dweight, real *dbias,
                              const real *dout, const real *inp, const real *weight, const float *mean,
                              const float *rstd, float *scratch, int64_t N, int64_t C);

    /* The tanh form of GELU (Hendrycks and Gimpel 2016), element by element. */
    int (*gelu_forward)(const struct compute *on, real *out, const real *inp, int64_t n);
    /* dout becomes the gradient of inp, in place. */
    int (*gelu_backward)(const struct compute *on, real *dout, const real *inp, int64_t n);

    /* to (heads, n, width) = the rows of `from` at positions first to first + n - 1, and 0 at positions that
     * are not in rows. */
    int (*attention_load)(const struct compute *on, real *to, const real *from, struct model_heads heads,
                          struct model_rows rows, int64_t first, int64_t n);
    /* The reverse: writes `from` (heads, n, width) to these rows of `to`. If to32 is not NULL, it writes them
     * to to32 instead, or adds them there if `adds` is set. */
    int (*attention_store)(const struct compute *on, real *to, float *to32, bool adds, const float *from,
                           struct model_heads heads, struct model_rows rows, int64_t first, int64_t n);
    /* att = softmax of scale * scores over the keys that a query sees, 0 for the others. logsum (n_heads,
     * n_queries) = log of the sum of their exponentials. Overwrites scores. */
    int (*attention_softmax)(const struct compute *on, real *att, float *logsum, float *scores,
                             struct model_tile tile);
    /* Merges results for different keys as model_attention_merge does. logsum is (heads, n). */
    int (*attention_merge)(const struct compute *on, float *y, float *logsum, const float *y_part,
                           const float *logsum_part, struct model_heads heads, int64_t n);
    /* dots (B, NH, n) = the dot product of dy and y (B, n, NH, HS) for each query and head. It equals the dot
     * product of att and datt. */
    int (*attention_dots)(const struct compute *on, float *dots, const real *dy, const real *y, int64_t B,
                          int64_t n, int64_t NH, int64_t HS);
    /* att = the softmax, computed again from logsum. dscores = gradient of the unscaled scores, computed from
     * datt, the gradient of att. logsum and dots are (B, NH, rows of all queries). Overwrites scores and
     * datt. */
    int (*attention_softmax_backward)(const struct compute *on, real *att, real *dscores, float *scores,
                                      float *datt, const float *logsum, const float *dots,
                                      struct model_tile tile);

    /* loss (N) = the cross entropy of each row: -log softmax(logits), weighted over all tokens by label.
     * dlogits = scale * its gradient. Both are 0 if the target is MODEL_LEFT_OUT. Overwrites logits. logits
     * and dlogits are (N, V), with ld elements between rows. */
    int (*cross_entropy)(const struct compute *on, real *dlogits, double *loss, float *logits,
                         const int32_t *targets, int64_t N, int64_t V, int64_t ld, struct model_label label,
                         float scale);
    /* Cross entropy in three steps, if the token ids are split over tensor-parallel ranks. V is the number of
     * this rank's ids. A negative target belongs to another rank. The first two steps write one value per row
     * that covers this rank's ids only. The caller reduces the values over the ranks before the next step:
     *
     *   vocab_top           top (N), the largest logit. Reduce by maximum.
     *   vocab_exponentials  total (N), the sum of exp(logit - top), and wanted (N), the sum of logit - top
     *                       weighted by the label. Reduce both by sum.
     *
     * The exponentials replace logits. vocab_loss computes loss (N) = log(total) - wanted, and dlogits (N,
     * width) = scale * its gradient, or 0 where the target is MODEL_LEFT_OUT. width is the same on all ranks.
     * Columns V to width - 1 belong to no id and become 0: they pad a rank that has fewer ids. */
    int (*vocab_top)(const struct compute *on, float *top, const float *logits, int64_t N, int64_t V,
                     int64_t ld);
    int (*vocab_exponentials)(const struct compute *on, float *logits, float *total, float *wanted,
                              const float *top, const int32_t *targets, int64_t N, int64_t V, int64_t ld,
                              struct model_label label);
    int (*vocab_loss)(const struct compute *on, real *dlogits, double *loss, const float *logits,
                      const float *total, const float *wanted, const int32_t *targets, int64_t N, int64_t V,
                      int64_t width, int64_t ld, struct model_label label, float scale);

    /* *total += the mean of loss (N), rounded to a multiple of 2^-36. So the sum of up to 2^17 means is
     * exact. If the numbers of ranks and micro-batches are powers of two, the mean over all of them does not
     * depend on which rank has which micro-batch. */
    int (*add_loss)(const struct compute *on, double *total, const double *loss, int64_t N);

    /* dbias (C) += sum of dout (N, C) over rows. */
    int (*bias_backward)(const struct compute *on, real *dbias, const real *dout, float *scratch, int64_t N,
                         int64_t C);
    /* grad (n) += x (n) */
    int (*add)(const struct compute *on, real *grad, const real *x, int64_t n);

    /* out (N, C) = wte (V, C) at tokens (N) + wpe (context, C) at positions (N). A negative token, which
     * belongs to another tensor-parallel rank, and a wpe that is NULL count as 0. */
    int (*embedding_forward)(const struct compute *on, real *out, const int32_t *tokens,
                             const int32_t *positions, const real *wte, const real *wpe, int64_t N,
                             int64_t C);
    /* Add the rows of dout (N, C) to the rows of grad that `to` lists. The list may be empty. A token may
     * occur in many rows; a position occurs in few. */
    int (*tokens_backward)(const struct compute *on, real *grad, const real *dout,
                           const struct model_groups *to, float *scratch, int64_t C);
    int (*positions_backward)(const struct compute *on, real *grad, const real *dout,
                              const struct model_groups *to, float *scratch, int64_t C);
};

/* The table for the device. */
const struct model_layers *model_layers_for(const struct compute *compute);

extern const struct model_layers model_layers_host;
/* Only in builds with CUDA. */
extern const struct model_layers model_layers_cuda;
#ifdef MODEL_BF16
extern const struct model_attention model_attention_cuda;
#endif

/* Constants and formulas that both tables use. */

#define MODEL_LAYERNORM_EPS  1e-5f
#define MODEL_SQRT_2_OVER_PI 0.7978845608f
#define MODEL_GELU_CUBIC     0.044715f

/* Returns u = sqrt(2/pi) * (x + 0.044715 x^3), for gelu(x) = x/2 * (1 + tanh(u)) = x * gate with gate = 1 /
 * (1 + e^(-2u)). */
MODEL_HOST_DEVICE float model_gelu_u(float x)
{
    return MODEL_SQRT_2_OVER_PI * (x + MODEL_GELU_CUBIC * x * x * x);
}

/* The derivative of gelu at x. */
MODEL_HOST_DEVICE float model_gelu_slope(float x, float gate)
{
    float du = MODEL_SQRT_2_OVER_PI * (1.0f + 3.0f * MODEL_GELU_CUBIC * x * x);
    return gate + 2.0f * x * gate * (1.0f - gate) * du;
}

#endif
