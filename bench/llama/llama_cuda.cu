/* SPDX-License-Identifier: Apache-2.0 */
/* llama_cuda.cu: the functions of llama_layers.h on a GPU. As in layers.cu, a warp computes the sums along
 * a vector. Sums over vectors are made in N_CHUNKS parts, which are added in order. A thread moves 16 bytes
 * at a time where rows and pointers are aligned. */
#include <cuda_runtime.h>

extern "C" {
#include "bench/llama/llama_layers.h"
}
#include "bench/model/kernels.h"

namespace
{

/* ---- RMSNorm: a warp per vector ---- */

template <int W>
__global__ void __launch_bounds__(32 * ROWS)
    rmsnorm_forward_kernel(real *out, int64_t out_row, float *rstd, const real *inp, const llama_vectors is,
                           const real *weight, float eps)
{
    int64_t v = (int64_t)blockIdx.x * ROWS + threadIdx.y;
    int n = (int)is.width;
    if (v >= is.N * is.n)
        return;
    inp += llama_vector_at(&is, v, is.row);
    out += llama_vector_at(&is, v, out_row);
    float x[W], w[W], squares = 0;
    for (int i = (int)threadIdx.x * W; i < n; i += 32 * W) {
        load<W>(x, inp + i);
        for (int j = 0; j < W; j++)
            squares += x[j] * x[j];
    }
    float scale = 1.0f / sqrtf(warp_sum(squares) / (float)n + eps);
    for (int i = (int)threadIdx.x * W; i < n; i += 32 * W) {
        load<W>(x, inp + i);
        load<W>(w, weight + i);
        for (int j = 0; j < W; j++)
            x[j] = x[j] * scale * w[j];
        store<W>(out + i, x);
    }
    if (threadIdx.x == 0)
        rstd[v] = scale;
}

/* dinp may be dout: the sum is complete before anything is written, and then each thread writes only elements
 * that it alone reads. */
template <int W>
__global__ void __launch_bounds__(32 * ROWS)
    rmsnorm_backward_kernel(real *dinp, bool adds, const real *dout, int64_t dout_row, const real *inp,
                            const llama_vectors is, const real *weight, const float *rstd)
{
    int64_t v = (int64_t)blockIdx.x * ROWS + threadIdx.y;
    int n = (int)is.width;
    if (v >= is.N * is.n)
        return;
    dinp += llama_vector_at(&is, v, is.row);
    inp += llama_vector_at(&is, v, is.row);
    dout += llama_vector_at(&is, v, dout_row);
    float scale = rstd[v], x[W], d[W], w[W], g[W], sum = 0;
    for (int i = (int)threadIdx.x * W; i < n; i += 32 * W) {
        load<W>(x, inp + i);
        load<W>(d, dout + i);
        load<W>(w, weight + i);
        for (int j = 0; j < W; j++)
            sum += w[j] * d[j] * (x[j] * scale);
    }
    float mean = warp_sum(sum) / (float)n;
    for (int i = (int)threadIdx.x * W; i < n; i += 32 * W) {
        load<W>(x, inp + i);
        load<W>(d, dout + i);
        load<W>(w, weight + i);
        if (adds)
            load<W>(g, dinp + i);
        for (int j = 0; j < W; j++) {
            float gradient = (w[j] * d[j] - x[j] * scale * mean) * scale;
            g[j] = adds ? g[j] + gradient : gradient;
        }
        store<W>(dinp + i, g);
    }
}

/* parts (N_CHUNKS, width) = sums of dout * inp * rstd over the vectors, in chunks. Blocks have (32, ROWS)
 * threads; a thread adds every ROWS-th vector of one column. */
__global__ void __launch_bounds__(32 * ROWS)
    weight_parts_kernel(float *parts, const real *dout, int64_t dout_row, const real *inp,
                        const llama_vectors is, const float *rstd)
{
    int64_t c = (int64_t)blockIdx.x * 32 + threadIdx.x, n = is.N * is.n;
    int64_t length = (n + N_CHUNKS - 1) / N_CHUNKS, first = (int64_t)blockIdx.y * length;
    int64_t end = first + length < n ? first + length : n;
    float sum = 0;
    if (c < is.width)
        for (int64_t v = first + threadIdx.y; v < end; v += ROWS)
            sum += to_float(dout[llama_vector_at(&is, v, dout_row) + c]) *
                   (to_float(inp[llama_vector_at(&is, v, is.row) + c]) * rstd[v]);
    sum = sum_over_y(sum);
    if (c < is.width && threadIdx.y == 0)
        parts[blockIdx.y * is.width + c] = sum;
}

/* ---- element by element ---- */

/* A thread turns W pairs. */
template <int W>
__global__ void rotate_kernel(real *x, const llama_vectors is, const int32_t *positions, const float *table,
                              float sign)
{
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * W, half = is.width / 2, v = i / half;
    if (v >= is.N * is.n)
        return;
    const float *row = table + positions[v / is.n] * is.width + i % half;
    x += llama_vector_at(&is, v, is.row) + i % half;
    float a[W], b[W], c[W], s[W];
    load<W>(a, x);
    load<W>(b, x + half);
    load_floats<W>(c, row);
    load_floats<W>(s, row + half);
    for (int j = 0; j < W; j++) {
        float from_a = a[j], from_b = b[j], sine = sign * s[j];
        a[j] = from_a * c[j] - from_b * sine;
        b[j] = from_b * c[j] + from_a * sine;
    }
    store<W>(x, a);
    store<W>(x + half, b);
}

__device__ __forceinline__ float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

template <int W> __global__ void swiglu_forward_kernel(real *out, const real *gate_up, int64_t N, int64_t F)
{
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    if (i >= N * F)
        return;
    const real *gate = gate_up + i / F * 2 * F + i % F;
    float x[W], u[W];
    load<W>(x, gate);
    load<W>(u, gate + F);
    for (int j = 0; j < W; j++)
        x[j] = x[j] * sigmoid(x[j]) * u[j];
    store<W>(out + i, x);
}

template <int W> __global__ void swiglu_backward_kernel(real *gate_up, const real *dout, int64_t N, int64_t F)
{
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    if (i >= N * F)
        return;
    real *gate = gate_up + i / F * 2 * F + i % F;
    float x[W], u[W], d[W];
    load<W>(x, gate);
    load<W>(u, gate + F);
    load<W>(d, dout + i);
    for (int j = 0; j < W; j++) {
        float s = sigmoid(x[j]), value = x[j] * s;
        x[j] = d[j] * u[j] * llama_silu_slope(x[j], s);
        u[j] = d[j] * value;
    }
    store<W>(gate, x);
    store<W>(gate + F, u);
}

__global__ void scale_kernel(real *x, float factor, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < n)
        x[i] = from_float(to_float(x[i]) * factor);
}

/* --- the table of functions --- */

int64_t n_scratch(const struct compute *, int64_t width)
{
    return N_CHUNKS * width;
}

int rmsnorm_forward(const struct compute *on, real *out, int64_t out_row, float *rstd, const real *inp,
                    llama_vectors is, const real *weight, float eps, float *)
{
    bool w = wide(is.width, out, inp, weight) && is.row % WIDE == 0 && out_row % WIDE == 0;
    return launch(on, "RMSNorm", BY_WIDTH(w, rmsnorm_forward_kernel), ceil_div(is.N * is.n, ROWS), warps, out,
                  out_row, rstd, inp, is, weight, eps);
}

/* The weight comes first: dinp may overwrite dout. */
int rmsnorm_backward(const struct compute *on, real *dinp, bool adds, real *dweight, const real *dout,
                     int64_t dout_row, const real *inp, llama_vectors is, const real *weight,
                     const float *rstd, float *scratch)
{
    const dim3 chunks(ceil_div(is.width, 32), N_CHUNKS);
    int err = 0;
    if (dweight)
        err = launch(on, "RMSNorm backward", weight_parts_kernel, chunks, warps, scratch, dout, dout_row, inp,
                     is, rstd);
    if (!err && dweight)
        err = launch(on, "RMSNorm backward", add_parts_kernel, ceil_div(is.width, THREADS), THREADS, dweight,
                     scratch, (int)is.width);
    if (err || !dinp)
        return err;
    bool w = wide(is.width, dinp, dout, inp, weight) && is.row % WIDE == 0 && dout_row % WIDE == 0;
    return launch(on, "RMSNorm backward", BY_WIDTH(w, rmsnorm_backward_kernel), ceil_div(is.N * is.n, ROWS),
                  warps, dinp, adds, dout, dout_row, inp, is, weight, rstd);
}

int rotate(const struct compute *on, real *x, llama_vectors is, const int32_t *positions, const float *table,
           bool back)
{
    bool w = wide(is.width / 2, x, table) && is.row % WIDE == 0;
    return launch(on, "rotary positions", BY_WIDTH(w, rotate_kernel),
                  ceil_div(is.N * is.n * (is.width / 2), THREADS * (w ? WIDE : 1)), THREADS, x, is, positions,
                  table, back ? -1.0f : 1.0f);
}

int swiglu_forward(const struct compute *on, real *out, const real *gate_up, int64_t N, int64_t F)
{
    bool w = wide(F, out, gate_up);
    return launch(on, "SwiGLU", BY_WIDTH(w, swiglu_forward_kernel), ceil_div(N * F, THREADS * (w ? WIDE : 1)),
                  THREADS, out, gate_up, N, F);
}

int swiglu_backward(const struct compute *on, real *gate_up, const real *dout, int64_t N, int64_t F)
{
    bool w = wide(F, gate_up, dout);
    return launch(on, "SwiGLU backward", BY_WIDTH(w, swiglu_backward_kernel),
                  ceil_div(N * F, THREADS * (w ? WIDE : 1)), THREADS, gate_up, dout, N, F);
}

int scale(const struct compute *on, real *x, float factor, int64_t n)
{
    return launch(on, "scale", scale_kernel, ceil_div(n, THREADS), THREADS, x, factor, n);
}

} // namespace

const struct llama_layers llama_layers_cuda = {
    n_scratch, rmsnorm_forward, rmsnorm_backward, rotate, swiglu_forward, swiglu_backward, scale,
};
