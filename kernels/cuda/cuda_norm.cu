/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_norm.cu: the kernels whose threads need each other: the exact sum of squares, the digest, and begin
 * and end of a step's agreement.
 *
 * It is compiled like cuda_kernels.cu. */
#include "kernels/cuda/cuda_kernels.h"

#include "kernels/agreement.h"
#include "kernels/exact_sum.h"
#include "kernels/raw_bits.h"

#include <cuda_runtime.h>

#include "kernels/cuda/cuda_elements.h"

namespace
{

/* --- sum of squares ---
 *
 * A block of threads works on tiles of 256 canonical blocks of 32 elements. The threads read a tile side by
 * side into shared memory, and then each takes one row. Rows are 33 words apart, so that 32 threads use 32
 * banks. A thread sums its rows exactly in registers, like struct zr_exact_run, and adds the sums to limbs in
 * shared memory. The limbs go to the accumulator once. Integer additions are exact, so their order does not
 * matter. */

constexpr int ROW = 32, PITCH = ROW + 1, TILE = THREADS * ROW;
static_assert(ZR_EXACT_LIMBS <= THREADS, "a thread for each limb");

__device__ __forceinline__ void add_limb(int64_t *limb, int64_t value)
{
    atomicAdd(reinterpret_cast<unsigned long long *>(limb), static_cast<unsigned long long>(value));
}

__device__ __forceinline__ int64_t read_limb(int64_t *limb)
{
    return static_cast<int64_t>(atomicAdd(reinterpret_cast<unsigned long long *>(limb), 0ull));
}

/* Changes each of four limbs by less than 2^32, like zr_exact_add_wide. */
__device__ void add_wide(int64_t *limbs, uint32_t limb, __int128 sum)
{
    add_limb(limbs + limb, (int64_t)(uint32_t)sum);
    add_limb(limbs + limb + 1, (int64_t)(uint32_t)(sum >> 32));
    add_limb(limbs + limb + 2, (int64_t)(uint32_t)(sum >> 64));
    add_limb(limbs + limb + 3, (int64_t)(sum >> 96));
}

/* Does add_wide for the sum and the limb of every lane; all lanes must call it. Sums of one limb are added up
 * first, because atomics of many lanes on one word take turns. */
__device__ void add_warp(int64_t *limbs, uint32_t limb, __int128 sum)
{
    constexpr unsigned ALL = 0xffffffffu;
    for (unsigned left = __ballot_sync(ALL, sum != 0); left;) {
        const uint32_t of = __shfl_sync(ALL, limb, __ffs((int)left) - 1);
        const bool mine = sum != 0 && limb == of;
        unsigned __int128 total = mine ? (unsigned __int128)sum : 0;
        for (int step = 16; step > 0; step /= 2) {
            const uint64_t low = __shfl_xor_sync(ALL, (uint64_t)total, step);
            const uint64_t high = __shfl_xor_sync(ALL, (uint64_t)(total >> 64), step);
            total += (unsigned __int128)high << 64 | low;
        }
        if (threadIdx.x % 32 == 0)
            add_wide(limbs, of, (__int128)total);
        left &= ~__ballot_sync(ALL, mine);
    }
}

/* Propagates carries in an accumulator to which others may be adding. What leaves a limb is added to the next
 * one. */
__device__ void carry_while_adding(struct zr_exact_sum *acc, uint32_t n_counted)
{
    for (int i = 0; i < ZR_EXACT_TOP; i++) {
        int64_t carry = read_limb(&acc->limb[i]) >> 32;
        add_limb(&acc->limb[i], (int64_t)((uint64_t)-carry << 32));
        add_limb(&acc->limb[i + 1], carry);
    }
    atomicAdd(&acc->n_added, 1 - n_counted);
}

/* T: float, or uint16_t for bf16. */
template <class T>
__global__ void __launch_bounds__(THREADS)
    squares(struct zr_exact_sum *acc, const T *x, int64_t n, struct zr_largest largest)
{
    __shared__ float tile[THREADS * PITCH];
    __shared__ int64_t limbs[ZR_EXACT_LIMBS];
    const int t = (int)threadIdx.x;
    const bool aligned = (uintptr_t)x % (WIDTH * sizeof(T)) == 0;
    __int128 sum = 0;
    uint32_t sum_limb = 0;

    if (t < ZR_EXACT_LIMBS)
        limbs[t] = 0;
    for (int64_t base = (int64_t)blockIdx.x * TILE; base < n; base += (int64_t)gridDim.x * TILE) {
        __syncthreads(); /* the previous tile is read, and limbs are zero */
        for (int i = t * WIDTH; i < TILE; i += THREADS * WIDTH) {
            floats<WIDTH> part = {};
            if (aligned && base + i + WIDTH <= n)
                part.load(x + base + i);
            else
                for (int j = 0; j < WIDTH && base + i + j < n; j++) {
                    floats<1> one = {};
                    one.load(x + base + i + j);
                    part.v[j] = one.v[0];
                }
            for (int j = 0; j < WIDTH; j++)
                tile[i / ROW * PITCH + i % ROW + j] = part.v[j];
        }
        __syncthreads();
        int64_t m;
        uint32_t place;
        if (base + t * ROW >= n)
            continue;
        const double block = vec_block_squares(&tile[t * PITCH]);
        if (largest.word && zr_is_large(block, largest.from))
            atomicMax(reinterpret_cast<unsigned long long *>(largest.word),
                      (unsigned long long)zr_largest_of(block, largest.at + (base + t * ROW) *
                                                                                (int64_t)(sizeof(T) / 2)));
        if (!zr_exact_split(block, &m, &place)) {
            atomicOr(&acc->nonfinite, 1u);
            continue;
        }
        if (place / 32 != sum_limb) {
            add_wide(limbs, sum_limb, sum);
            sum = 0;
            sum_limb = place / 32;
        }
        sum += (__int128)((unsigned __int128)(__int128)m << place % 32);
    }
    __syncthreads();
    add_warp(limbs, sum_limb, sum);
    __syncthreads();

    /* A limb adds its lower half, and its upper half to the next one. The change is less than 2 * 2^32. */
    if (t < ZR_EXACT_LIMBS) {
        int64_t change = t < ZR_EXACT_TOP ? (int64_t)(uint32_t)limbs[t] : limbs[t];
        if (t > 0)
            change += limbs[t - 1] >> 32;
        if (change)
            add_limb(&acc->limb[t], change);
        __threadfence(); /* a thread that sees it counted sees it added */
    }
    __syncthreads();
    if (t == 0) {
        uint32_t was = atomicAdd(&acc->n_added, 2u), often = ZR_EXACT_MAX_ADDED / 4;
        if (was / often != (was + 2) / often)
            carry_while_adding(acc, was);
    }
}

/* --- digest --- */

constexpr unsigned ALL_LANES = 0xffffffffu;

/* Reads 8 bytes that are aligned for T. */
template <class T> __device__ __forceinline__ uint64_t load_word(const char *at)
{
    uint64_t word = 0;
    for (int i = 0; i < (int)(8 / sizeof(T)); i++)
        word |= (uint64_t) reinterpret_cast<const T *>(at)[i] << (8 * sizeof(T) * i);
    return word;
}

template <class T>
__global__ void __launch_bounds__(THREADS)
    digest(uint64_t *sum, const char *at, int64_t bytes, uint64_t first)
{
    __shared__ unsigned long long total;
    const int64_t whole = bytes / 8;
    uint64_t own = 0;
    if (threadIdx.x == 0)
        total = 0;
    for (int64_t i = thread_index(); i < whole; i += (int64_t)gridDim.x * THREADS)
        own += zr_digest_word(load_word<T>(at + 8 * i), first + (uint64_t)i);
    if (thread_index() == 0) {
        uint64_t last = 0;
        for (int64_t i = 8 * whole; i < bytes; i++)
            last |= (uint64_t)(unsigned char)at[i] << (8 * (i - 8 * whole));
        own += zr_digest_word(last, first + (uint64_t)whole);
    }
    for (int step = 16; step > 0; step /= 2)
        own += __shfl_xor_sync(ALL_LANES, own, step);
    __syncthreads(); /* total is zero */
    if (threadIdx.x % 32 == 0)
        atomicAdd(&total, (unsigned long long)own);
    __syncthreads();
    if (threadIdx.x == 0)
        atomicAdd(reinterpret_cast<unsigned long long *>(sum), total);
}

/* --- a step's agreement: one sum or one word per thread --- */

static_assert(1 + ZR_MAX_CARRIED <= 32 && ZR_AGREE_WORDS <= 32, "a warp is enough");

__global__ void __launch_bounds__(THREADS) agree_write(struct zr_agree_begin b)
{
    const int t = (int)threadIdx.x;
    if (t <= ZR_MAX_CARRIED)
        zr_agree_write_sum(&b, t);
    if (t < ZR_AGREE_WORDS)
        zr_agree_write_word(&b, t);
}

__global__ void __launch_bounds__(THREADS) agree_read(struct zr_agree_end e)
{
    __shared__ double sums[1 + ZR_MAX_CARRIED];
    const int t = (int)threadIdx.x;
    if (t <= ZR_MAX_CARRIED)
        sums[t] = t <= e.n_carried ? zr_agree_sum(e.all, t) : 0;
    __syncthreads();
    if (t == 0)
        zr_agree_conclude(&e, sums);
}

} // namespace

cudaError_t zr_cuda_sum_squares(cudaStream_t s, struct zr_exact_sum *acc, const void *x,
                                enum zero_dtype dtype, int64_t n, const struct zr_largest *largest,
                                int most_blocks)
{
    const int64_t tiles = ceil_div(n, TILE), n_blocks = tiles < most_blocks ? tiles : most_blocks;
    if (n <= 0)
        return cudaSuccess;
    return dtype == ZERO_F32
               ? launch(squares<float>, n_blocks, s, acc, static_cast<const float *>(x), n, *largest)
               : launch(squares<uint16_t>, n_blocks, s, acc, static_cast<const uint16_t *>(x), n, *largest);
}

cudaError_t zr_cuda_digest(cudaStream_t s, uint64_t *sum, const void *at, int64_t bytes, uint64_t first,
                           int most_blocks)
{
    const char *from = static_cast<const char *>(at);
    const int64_t n = ceil_div(bytes, 8 * THREADS), n_blocks = n < most_blocks ? n : most_blocks;
    if (bytes <= 0)
        return cudaSuccess;
    if ((uintptr_t)from % 8 == 0)
        return launch(digest<uint64_t>, n_blocks, s, sum, from, bytes, first);
    if ((uintptr_t)from % 4 == 0)
        return launch(digest<uint32_t>, n_blocks, s, sum, from, bytes, first);
    return launch(digest<unsigned char>, n_blocks, s, sum, from, bytes, first);
}

cudaError_t zr_cuda_agree_begin(cudaStream_t s, const struct zr_agree_begin *b)
{
    return launch(agree_write, 1, s, *b);
}

cudaError_t zr_cuda_agree_end(cudaStream_t s, const struct zr_agree_end *e)
{
    return launch(agree_read, 1, s, *e);
}
