/* gpt2_layers.h: the parts of the model that are not matrix products, forward and backward.
 *
 * N is the number of rows (B*T), C the channels. Backward functions ADD to gradients of weights. All are
 * deterministic: one thread, a fixed order of additions, no contraction, so every instruction set gives the
 * same bits. */
#ifndef ZERO_BENCH_GPT2_LAYERS_H
#define ZERO_BENCH_GPT2_LAYERS_H

#include "bench/gpt2_real.h"

/* out (N, C) = (inp - mean) * rstd * weight + bias, over each row (Ba et al. 2016); mean, rstd (N) are kept
 * for backward. columns: scratch (C). */
void layernorm_forward(real *out, float *mean, float *rstd, const real *inp, const real *weight,
                       const real *bias, float *columns, int64_t N, int64_t C);
/* dinp (N, C) += gradient of the input. columns: scratch (4*C). */
void layernorm_backward(real *dinp, real *dweight, real *dbias, const real *dout, const real *inp,
                        const real *weight, const float *mean, const float *rstd, float *columns, int64_t N,
                        int64_t C);

/* The tanh form of GELU (Hendrycks and Gimpel 2016), element by element. */
void gelu_forward(real *out, const real *inp, int64_t n);
/* dout becomes the gradient of inp, in place. */
void gelu_backward(real *dout, const real *inp, int64_t n);

/* att (NH, T, T) = softmax of scale * scores (NH, T, T) over each row's first t+1 columns, 0 beyond. scores
 * is used up. */
void causal_softmax_forward(real *att, float *scores, int64_t NH, int64_t T, float scale);
/* dscores (NH, T, T) = gradient of the unscaled scores, from datt (NH, T, T), which is used up. */
void causal_softmax_backward(real *dscores, float *datt, const real *att, int64_t NH, int64_t T, float scale);

/* Returns the sum over N rows of -log softmax(logits)[target]; dlogits (N, V) = scale * its gradient. logits
 * (N, V) is used up. */
double cross_entropy(real *dlogits, float *logits, const int32_t *targets, int64_t N, int64_t V, float scale);

/* dbias (C) += sum of dout (N, C) over rows. columns: scratch (C). */
void bias_backward(real *dbias, const real *dout, float *columns, int64_t N, int64_t C);

/* out (B, T, C) = wte (V, C) at tokens (B, T) + wpe (T, C) */
void embedding_forward(real *out, const int32_t *tokens, const real *wte, const real *wpe, int64_t B,
                       int64_t T, int64_t C);
/* order: scratch (B*T + V + 1). columns: scratch (C). */
void embedding_backward(real *dwte, real *dwpe, const real *dout, const int32_t *tokens, int64_t *order,
                        float *columns, int64_t B, int64_t T, int64_t C, int64_t V);

#endif
