/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_elements.h: launches a GPU's kernels, and lets them access elements in 16 bytes at a time. It is C++
 * for the .cu files, included after cuda_runtime.h. */
#ifndef ZR_KERNELS_CUDA_ELEMENTS_H
#define ZR_KERNELS_CUDA_ELEMENTS_H

#include "kernels/host/vec_portable.h"

namespace
{

constexpr int THREADS = 256, WIDTH = 4;

/* Launches a kernel with one or more arguments, which it takes by value. */
template <class K, class... A> cudaError_t launch(K kernel, int64_t n_blocks, cudaStream_t s, A... args)
{
    void *pointers[] = {&args...};
    return cudaLaunchKernel(kernel, dim3((unsigned)n_blocks), dim3(THREADS), pointers, 0, s);
}

inline int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

__device__ __forceinline__ int64_t thread_index()
{
    return (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
}

/* --- element-wise work in accesses of 16 bytes ---
 *
 * An operation is a struct with
 *
 *     template <int W> __device__ void run(int64_t i) const;      on W elements from i; W is 1 or WIDTH
 *
 * A thread calls it once: on four elements where all operands are aligned for that, and on one element at the
 * ends. If no element is aligned for all operands, every thread takes one element. */

struct span {
    /* elements; elements before the vectors; vectors */
    int64_t n, head, n_vec;
};

template <class Op> __global__ void __launch_bounds__(THREADS) each(Op op, struct span at)
{
    int64_t i = thread_index(), single = i - at.n_vec;
    if (single < 0)
        op.template run<WIDTH>(at.head + i * WIDTH);
    else if (single < at.n - at.n_vec * WIDTH)
        op.template run<1>(single < at.head ? single : single + at.n_vec * WIDTH);
}

struct operand {
    /* NULL: there is no operand */
    const void *at;
    /* bytes of one element */
    int bytes;
};

inline struct span span_of(int64_t n, const struct operand *operands, int n_operands)
{
    for (int64_t head = 0; head < WIDTH && head <= n; head++) {
        bool aligned = true;
        for (int k = 0; k < n_operands; k++)
            aligned &=
                !operands[k].at || ((uintptr_t)operands[k].at + (uintptr_t)(head * operands[k].bytes)) %
                                           (uintptr_t)(WIDTH * operands[k].bytes) ==
                                       0;
        if (aligned)
            return span{n, head, (n - head) / WIDTH};
    }
    return span{n, 0, 0};
}

template <class Op>
cudaError_t run_each(cudaStream_t s, Op op, int64_t n, const struct operand *operands, int n_operands)
{
    struct span at = span_of(n, operands, n_operands);
    int64_t items = at.n_vec + (n - at.n_vec * WIDTH);
    return n <= 0 ? cudaSuccess : launch(each<Op>, ceil_div(items, THREADS), s, op, at);
}

/* W elements as floats. */
template <int W> struct floats;

template <> struct floats<1> {
    float v[1];
    __device__ __forceinline__ void load(const float *p)
    {
        v[0] = *p;
    }
    __device__ __forceinline__ void load(const uint16_t *p)
    {
        v[0] = vec_load_bf16(p);
    }
    __device__ __forceinline__ void store(float *p) const
    {
        *p = v[0];
    }
    __device__ __forceinline__ void store(uint16_t *p) const
    {
        vec_store_bf16(p, v[0]);
    }
    __device__ __forceinline__ void store_weights(uint16_t *p) const
    {
        vec_store_weight(p, v[0]);
    }
};

template <> struct floats<WIDTH> {
    float v[WIDTH];
    __device__ __forceinline__ void load(const float *p)
    {
        float4 q = *reinterpret_cast<const float4 *>(p);
        v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
    }
    __device__ __forceinline__ void load(const uint16_t *p)
    {
        uint2 q = *reinterpret_cast<const uint2 *>(p);
        v[0] = __uint_as_float(q.x << 16), v[1] = __uint_as_float(q.x & 0xffff0000u);
        v[2] = __uint_as_float(q.y << 16), v[3] = __uint_as_float(q.y & 0xffff0000u);
    }
    __device__ __forceinline__ void store(float *p) const
    {
        *reinterpret_cast<float4 *>(p) = make_float4(v[0], v[1], v[2], v[3]);
    }
    __device__ __forceinline__ void store(uint16_t *p) const
    {
        uint16_t h[WIDTH];
        for (int j = 0; j < WIDTH; j++)
            vec_store_bf16(&h[j], v[j]);
        *reinterpret_cast<uint2 *>(p) = make_uint2(h[0] | (unsigned)h[1] << 16, h[2] | (unsigned)h[3] << 16);
    }
    /* Ties are rounded away from zero. */
    __device__ __forceinline__ void store_weights(uint16_t *p) const
    {
        uint16_t h[WIDTH];
        for (int j = 0; j < WIDTH; j++)
            vec_store_weight(&h[j], v[j]);
        *reinterpret_cast<uint2 *>(p) = make_uint2(h[0] | (unsigned)h[1] << 16, h[2] | (unsigned)h[3] << 16);
    }
};

} // namespace

#endif
