/* SPDX-License-Identifier: Apache-2.0 */
/* kernels.h: helpers for the models' CUDA kernels that work on rows of elements: loads and stores of several
 * elements at once, sums along a row and over rows, and the shapes of blocks. It is C++ for the .cu files;
 * include cuda_runtime.h before it. */
#ifndef ZERO_BENCH_MODEL_KERNELS_H
#define ZERO_BENCH_MODEL_KERNELS_H

#include <math.h>

extern "C" {
#include "bench/model/model_real.h"
}
#include "bench/model/launch.h"

namespace
{

/* Warps per block. Each works on one row, or adds up columns. */
const int ROWS = 8;
/* The number of partial sums in a sum over rows. */
const int N_CHUNKS = 64;
/* Elements that one instruction loads or stores: 16 bytes. */
const int WIDE = 16 / (int)sizeof(real);

/* ---- loads and stores of W elements at once ---- */

template <class T, int W> struct alignas(W == 1 ? sizeof(T) : 16) pack {
    T x[W];
};

template <int W> __device__ __forceinline__ void load(float x[W], const real *from)
{
    pack<real, W> p = *reinterpret_cast<const pack<real, W> *>(from);
    for (int j = 0; j < W; j++)
        x[j] = to_float(p.x[j]);
}

template <int W> __device__ __forceinline__ void store_floats(float *to, const float x[W])
{
    const int N = W < 4 ? W : 4;
    for (int j = 0; j < W; j += N) {
        pack<float, N> p;
        for (int k = 0; k < N; k++)
            p.x[k] = x[j + k];
        *reinterpret_cast<pack<float, N> *>(to + j) = p;
    }
}

template <int W> __device__ __forceinline__ void store(real *to, const float x[W])
{
    pack<real, W> p;
    for (int j = 0; j < W; j++)
        p.x[j] = from_float(x[j]);
    *reinterpret_cast<pack<real, W> *>(to) = p;
}

/* Loads floats, whatever the type of real is. */
template <int W> __device__ __forceinline__ void load_floats(float x[W], const float *from)
{
    const int N = W < 4 ? W : 4;
    for (int j = 0; j < W; j += N) {
        pack<float, N> p = *reinterpret_cast<const pack<float, N> *>(from + j);
        for (int k = 0; k < N; k++)
            x[j + k] = p.x[k];
    }
}

/* ---- sums ---- */

__device__ __forceinline__ float warp_sum(float x)
{
    for (int step = 16; step > 0; step /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

__device__ __forceinline__ float warp_max(float x)
{
    for (int step = 16; step > 0; step /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

/* In a block of (32, ROWS) threads: the sum over threadIdx.y, in order. Threads with y = 0 get the result. */
__device__ __forceinline__ float sum_over_y(float x)
{
    __shared__ float parts[ROWS][32];
    parts[threadIdx.y][threadIdx.x] = x;
    __syncthreads();
    float sum = 0;
    if (threadIdx.y == 0)
        for (int y = 0; y < ROWS; y++)
            sum += parts[y][threadIdx.x];
    __syncthreads(); /* parts may be written again after this */
    return sum;
}

/* grad (C) += sum of parts (N_CHUNKS, C) */
__global__ void add_parts_kernel(real *grad, const float *parts, int C)
{
    int c = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (c >= C)
        return;
    float sum = 0;
    for (int chunk = 0; chunk < N_CHUNKS; chunk++)
        sum += parts[(int64_t)chunk * C + c];
    grad[c] = from_float(to_float(grad[c]) + sum);
}

/* ---- launching ---- */

/* Whether rows of n elements, and rows of n floats, can be loaded and stored WIDE elements at a time. */
template <class... P> bool wide(int64_t n, P... pointers)
{
    uintptr_t bits = 0;
    const void *list[] = {pointers...};
    for (const void *p : list)
        bits |= (uintptr_t)p;
    return bits % 16 == 0 && n % WIDE == 0;
}

/* Selects the kernel by the result of wide(). */
#define BY_WIDTH(is_wide, kernel) ((is_wide) ? kernel<WIDE> : kernel<1>)

const dim3 warps(32, ROWS);
const unsigned THREADS = 256;

} // namespace

#endif
