/* SPDX-License-Identifier: Apache-2.0 */
/* llama_layers.h: a table of functions, forward and backward, for the parts of a Llama that GPT-2 does not
 * have and that are neither matrix products nor attention. There is one table for the host and one for CUDA.
 * The rules of layers.h hold: arithmetic is fp32, additions have a fixed order, backward functions ADD to
 * gradients of weights, and pointers are to memory of the device of `on`. */
#ifndef ZERO_BENCH_LLAMA_LAYERS_H
#define ZERO_BENCH_LLAMA_LAYERS_H

#include "bench/compute.h"
#include "bench/model/model_real.h"

/* N rows of n consecutive vectors with `width` elements each, such as the heads of q. Rows are `row` elements
 * apart, because they may be some columns of a wider matrix. With n = 1 each row is one vector. */
struct llama_vectors {
    int64_t N, n, width, row;
};

struct llama_layers {
    /* Floats that the functions need in scratch, for vectors of this width. */
    int64_t (*n_scratch)(const struct compute *on, int64_t width);

    /* RMSNorm (Zhang and Sennrich, arXiv:1910.07467): out = inp * rstd * weight for each vector of inp, with
     * rstd = 1 / sqrt(mean(inp^2) + eps). Rows of out are out_row elements apart. rstd (N, n) is kept for
     * backward. All vectors have the same weight (width). */
    int (*rmsnorm_forward)(const struct compute *on, real *out, int64_t out_row, float *rstd, const real *inp,
                           struct llama_vectors inp_is, const real *weight, float eps, float *scratch);
    /* dinp = gradient of inp, or dinp += it if `adds` is set. dweight += gradient of weight. Either may be
     * NULL. Rows of dinp are as far apart as those of inp, and rows of dout are dout_row elements apart. dinp
     * may be dout. */
    int (*rmsnorm_backward)(const struct compute *on, real *dinp, bool adds, real *dweight, const real *dout,
                            int64_t dout_row, const real *inp, struct llama_vectors inp_is,
                            const real *weight, const float *rstd, float *scratch);

    /* Rotates the pairs of each vector of x, in place, by the angles for its row's position. positions (N)
     * selects rows of the table (positions, width) that llama_rotary_table makes. With `back`, it rotates
     * them the other way, which computes the gradient. */
    int (*rotate)(const struct compute *on, real *x, struct llama_vectors x_is, const int32_t *positions,
                  const float *table, bool back);

    /* SwiGLU (Shazeer, arXiv:2002.05202): out (N, F) = silu(gate) * up. gate_up (N, 2*F) has the columns of
     * gate, then those of up. */
    int (*swiglu_forward)(const struct compute *on, real *out, const real *gate_up, int64_t N, int64_t F);
    /* gate_up becomes its gradient, in place, from dout (N, F). */
    int (*swiglu_backward)(const struct compute *on, real *gate_up, const real *dout, int64_t N, int64_t F);

    /* x (n) *= factor. */
    int (*scale)(const struct compute *on, real *x, float factor, int64_t n);
};

/* The table for the device. */
const struct llama_layers *llama_layers_for(const struct compute *on);

extern const struct llama_layers llama_layers_host;
/* Only in builds with CUDA. */
extern const struct llama_layers llama_layers_cuda;

/* The index of the first element of vector i, counted over all rows, if rows are `row` elements apart. */
MODEL_HOST_DEVICE int64_t llama_vector_at(const struct llama_vectors *is, int64_t i, int64_t row)
{
    return i / is->n * row + i % is->n * is->width;
}

/* The derivative of silu(x) = x * gate at x, with gate = 1 / (1 + e^-x). */
MODEL_HOST_DEVICE float llama_silu_slope(float x, float gate)
{
    return gate * (1.0f + x * (1.0f - gate));
}

#endif
