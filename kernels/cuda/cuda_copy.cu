/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_copy.cu: a table of copies as one kernel.
 *
 * Slices of many small tensors are packed for one collective and unpacked after it. One launch per slice
 * would take longer than the copying. A block of threads works on one copy of the table. The table is a
 * kernel argument, so no host memory has to outlive the call. */
#include "kernels/cuda/cuda_kernels.h"

#include <cuda_runtime.h>

namespace
{

constexpr int THREADS = 256, EACH = 4; /* accesses per thread */

struct rows {
    struct zr_copy_rows c;
    int32_t first_block;
    int32_t width; /* bytes per access: up to 16, a divisor of addresses, strides and rows */
};

struct table {
    struct rows copy[ZR_MAX_COPIES];
    int n;
};
static_assert(sizeof(struct table) <= 4096, "all that a kernel takes as arguments on every GPU and toolkit");

template <class T> __device__ __forceinline__ void move(char *to, const char *from)
{
    *reinterpret_cast<T *>(to) = *reinterpret_cast<const T *>(from);
}

/* Moves bytes [at, at + width) of the copy, which are in one row, or as many of them as there are. */
__device__ __forceinline__ void move_item(const struct rows &r, int64_t at)
{
    const int64_t row = at / r.c.row_bytes, in_row = at - row * r.c.row_bytes, left = r.c.bytes - at;
    char *to = static_cast<char *>(r.c.dst) + row * r.c.dst_stride + in_row;
    const char *from = static_cast<const char *>(r.c.src) + row * r.c.src_stride + in_row;
    if (left < r.width) {
        for (int64_t i = 0; i < left; i++)
            to[i] = from[i];
        return;
    }
    switch (r.width) {
    case 16:
        return move<uint4>(to, from);
    case 8:
        return move<uint2>(to, from);
    case 4:
        return move<uint32_t>(to, from);
    case 2:
        return move<uint16_t>(to, from);
    default:
        return move<char>(to, from);
    }
}

__global__ void __launch_bounds__(THREADS) copy_rows(const __grid_constant__ struct table t)
{
    int k = 0;
    while (k + 1 < t.n && (int)blockIdx.x >= t.copy[k + 1].first_block)
        k++;
    const struct rows &r = t.copy[k];
    const int64_t first = ((int64_t)blockIdx.x - r.first_block) * (THREADS * EACH) + threadIdx.x;
    for (int i = 0; i < EACH; i++) {
        int64_t at = (first + i * THREADS) * r.width;
        if (at < r.c.bytes)
            move_item(r, at);
    }
}

int width_of(const struct zr_copy_rows *c)
{
    uintptr_t all = (uintptr_t)c->dst | (uintptr_t)c->src | 16;
    if (c->bytes > c->row_bytes)
        all |= (uintptr_t)c->row_bytes | (uintptr_t)c->dst_stride | (uintptr_t)c->src_stride;
    return (int)(all & -all);
}

} // namespace

cudaError_t zr_cuda_copy_rows(cudaStream_t s, const struct zr_copy_rows *table, int n)
{
    struct table t = {};
    int64_t n_blocks = 0;
    for (int i = 0; i < n; i++) {
        if (table[i].bytes <= 0)
            continue;
        int width = width_of(&table[i]);
        int64_t span = (int64_t)THREADS * EACH * width;
        t.copy[t.n++] = {table[i], (int32_t)n_blocks, width};
        n_blocks += (table[i].bytes + span - 1) / span;
        if (n_blocks > INT32_MAX) /* 2 TB of single bytes */
            return cudaErrorInvalidValue;
    }
    void *arguments[] = {&t};
    return n_blocks ? cudaLaunchKernel(copy_rows, dim3((unsigned)n_blocks), dim3(THREADS), arguments, 0, s)
                    : cudaSuccess;
}
