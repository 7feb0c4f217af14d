/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_runtime.h: the language of CUDA kernels as ordinary C++ for the CPU.
 *
 * A kernel compiled against this header runs thread by thread (test/stand_in/stand_in_launch.c). Launch it
 * with cudaLaunchKernel(kernel, grid, block, args, shared, stream), which the toolkit's C++ header also
 * offers. */
#ifndef ZR_TEST_STAND_IN_CUDA_RUNTIME_H
#define ZR_TEST_STAND_IN_CUDA_RUNTIME_H

#include <cuda_runtime_api.h>

#ifdef __cplusplus

#include "test/stand_in/stand_in.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <tuple>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
/* A stream's thread runs one block at a time. */
#define __shared__ static __thread

struct uint3 {
    unsigned int x, y, z;
};

extern "C" {
extern __thread struct uint3 threadIdx, blockIdx;
extern __thread struct stand_in_extent {
    unsigned int x, y, z;
} blockDim, gridDim;

void __syncthreads(void);
void __syncwarp(unsigned int mask = 0xffffffffu);
/* Returns the value that lane src of the calling thread's warp passed. All lanes of mask must call. */
uint64_t stand_in_exchange(unsigned int mask, uint64_t value, int src);
/* Bit i is the predicate of lane i, for the lanes of mask. */
unsigned int __ballot_sync(unsigned int mask, int predicate);
}
static const int warpSize = 32;

/* --- launching --- */

template <class... A> struct stand_in_call {
    void (*kernel)(A...);
    std::tuple<A...> args;

    static void run(void *closure)
    {
        auto *call = static_cast<stand_in_call *>(closure);
        std::apply(call->kernel, call->args);
    }
    static void drop(void *closure)
    {
        delete static_cast<stand_in_call *>(closure);
    }
    template <size_t... I>
    static stand_in_call *make(void (*kernel)(A...), void **args, std::index_sequence<I...>)
    {
        (void)args;
        return new stand_in_call{kernel, std::tuple<A...>(*static_cast<A *>(args[I])...)};
    }
};

template <class... A>
cudaError_t cudaLaunchKernel(void (*kernel)(A...), dim3 grid, dim3 block, void **args, size_t shared = 0,
                             cudaStream_t stream = 0)
{
    using call = stand_in_call<A...>;
    return stand_in_launch(call::run, call::make(kernel, args, std::index_sequence_for<A...>()), sizeof(call),
                           call::drop, grid, block, shared, stream);
}

template <class T> cudaError_t cudaMalloc(T **p, size_t bytes)
{
    return cudaMalloc(reinterpret_cast<void **>(p), bytes);
}

/* --- warps --- */

template <class T> T __shfl_sync(unsigned int mask, T value, int src, int width = 32)
{
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    uint64_t bits = 0;
    int lane = (int)((threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32);
    std::memcpy(&bits, &value, sizeof value);
    bits = stand_in_exchange(mask, bits, (lane & ~(width - 1)) | (src & (width - 1)));
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

static inline int stand_in_lane(void)
{
    return (int)((threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32);
}

template <class T> T __shfl_xor_sync(unsigned int mask, T value, int with, int width = 32)
{
    int lane = stand_in_lane(), other = lane ^ with;
    return __shfl_sync(mask, value, other / width > lane / width ? lane : other,
                       other / width < lane / width ? 32 : width);
}

template <class T> T __shfl_down_sync(unsigned int mask, T value, unsigned int by, int width = 32)
{
    int lane = stand_in_lane(), other = lane + (int)by;
    return __shfl_sync(mask, value, other / width > lane / width ? lane : other, width);
}

template <class T> T __shfl_up_sync(unsigned int mask, T value, unsigned int by, int width = 32)
{
    int lane = stand_in_lane(), other = lane % width - (int)by;
    return __shfl_sync(mask, value, other < 0 ? lane : other, width);
}

static inline int __any_sync(unsigned int mask, int predicate)
{
    return __ballot_sync(mask, predicate) != 0;
}

static inline int __all_sync(unsigned int mask, int predicate)
{
    return __ballot_sync(mask, !predicate) == 0;
}

/* Returns the lowest set bit, counted from 1, or 0 if no bit is set. */
static inline int __ffs(int x)
{
    return __builtin_ffs(x);
}

/* --- atomics: integers wrap; floats are added by compare and swap --- */

#define STAND_IN_ATOMICS(type)                                                                               \
    static inline type atomicAdd(type *at, type value)                                                       \
    {                                                                                                        \
        return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);                                              \
    }                                                                                                        \
    static inline type atomicOr(type *at, type value)                                                        \
    {                                                                                                        \
        return __atomic_fetch_or(at, value, __ATOMIC_RELAXED);                                               \
    }                                                                                                        \
    static inline type atomicExch(type *at, type value)                                                      \
    {                                                                                                        \
        return __atomic_exchange_n(at, value, __ATOMIC_RELAXED);                                             \
    }                                                                                                        \
    static inline type atomicCAS(type *at, type want, type value)                                            \
    {                                                                                                        \
        __atomic_compare_exchange_n(at, &want, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);            \
        return want;                                                                                         \
    }
#define STAND_IN_EXTREMES(type, name, more)                                                                  \
    static inline type name(type *at, type value)                                                            \
    {                                                                                                        \
        type was = __atomic_load_n(at, __ATOMIC_RELAXED);                                                    \
        while (value more was &&                                                                             \
               !__atomic_compare_exchange_n(at, &was, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))     \
            ;                                                                                                \
        return was;                                                                                          \
    }
STAND_IN_ATOMICS(int)
STAND_IN_ATOMICS(unsigned int)
STAND_IN_ATOMICS(unsigned long long)
STAND_IN_EXTREMES(int, atomicMax, >)
STAND_IN_EXTREMES(int, atomicMin, <)
STAND_IN_EXTREMES(unsigned int, atomicMax, >)
STAND_IN_EXTREMES(unsigned int, atomicMin, <)
STAND_IN_EXTREMES(long long, atomicMax, >)
STAND_IN_EXTREMES(long long, atomicMin, <)
STAND_IN_EXTREMES(unsigned long long, atomicMax, >)
STAND_IN_EXTREMES(unsigned long long, atomicMin, <)
#undef STAND_IN_ATOMICS
#undef STAND_IN_EXTREMES

template <class F, class U> F stand_in_add_float(F *at, F value)
{
    U *word = reinterpret_cast<U *>(at), was = __atomic_load_n(word, __ATOMIC_RELAXED), now;
    F old, sum;
    do {
        std::memcpy(&old, &was, sizeof old);
        sum = old + value;
        std::memcpy(&now, &sum, sizeof now);
    } while (!__atomic_compare_exchange_n(word, &was, now, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
}

static inline float atomicAdd(float *at, float value)
{
    return stand_in_add_float<float, uint32_t>(at, value);
}

static inline double atomicAdd(double *at, double value)
{
    return stand_in_add_float<double, uint64_t>(at, value);
}

/* ThreadSanitizer knows no fences. Here a fence only orders atomics. */
static inline void __threadfence(void)
{
#ifdef __SANITIZE_THREAD__
    __asm__ volatile("" ::: "memory");
#else
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

static inline void __threadfence_system(void)
{
    __threadfence();
}

/* --- numbers --- */

static inline uint32_t __float_as_uint(float x)
{
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float __uint_as_float(uint32_t bits)
{
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float __fadd_rn(float a, float b)
{
    return a + b;
}

static inline float __fmul_rn(float a, float b)
{
    return a * b;
}

static inline float __fmaf_rn(float a, float b, float c)
{
    return std::fma(a, b, c);
}

/* On a GPU these have less precision. The C library has internal functions with these names. */
#define __expf expf
#define __logf logf

static inline float rsqrtf(float x)
{
    return 1.0f / std::sqrt(x);
}

template <class T> static inline T __ldg(const T *at)
{
    return *at;
}

/* --- vectors --- */

struct __attribute__((aligned(8))) float2 {
    float x, y;
};
struct __attribute__((aligned(16))) float4 {
    float x, y, z, w;
};
struct __attribute__((aligned(8))) uint2 {
    unsigned int x, y;
};
struct __attribute__((aligned(16))) uint4 {
    unsigned int x, y, z, w;
};

static inline float2 make_float2(float x, float y)
{
    return float2{x, y};
}

static inline float4 make_float4(float x, float y, float z, float w)
{
    return float4{x, y, z, w};
}

static inline uint2 make_uint2(unsigned int x, unsigned int y)
{
    return uint2{x, y};
}

static inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w)
{
    return uint4{x, y, z, w};
}

#endif
#endif
