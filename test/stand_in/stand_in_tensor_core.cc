/* SPDX-License-Identifier: Apache-2.0 */
/* stand_in_tensor_core.cc: bench/model/tensor_core.h on the CPU: the lanes of a warp lay open what each
 * holds, and each takes what is its own, as the PTX manual deals it out. Bytes that are copied come when
 * their thread waits for them, as late as they may; until then what was there is spoilt, as early as it may
 * be. */
#include <cuda_runtime.h>

#include "bench/model/tensor_core.h"

namespace
{

/* What the lanes of each warp of the block have laid open. */
__shared__ struct {
    uint32_t a[32][4], b[32][2];
    const uint16_t *row[32];
} open[32];

int warp(void)
{
    return (int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) / 32;
}

float number(uint32_t two, int which)
{
    return __uint_as_float(which ? two & 0xffff0000u : two << 16);
}

/* A (16, 16) and B (16, 8) from where they are held. */
float of_a(int row, int k)
{
    return number(open[warp()].a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2);
}

float of_b(int k, int col)
{
    return number(open[warp()].b[col * 4 + k % 8 / 2][k / 8], k % 2);
}

uint32_t two(uint16_t first, uint16_t second)
{
    return (uint32_t)first | (uint32_t)second << 16;
}

void lay_open_row(const void *row)
{
    if ((uintptr_t)row % 16)
        stand_in_misuse("a row of a matrix is loaded from %p, which is not a multiple of 16", row);
    open[warp()].row[stand_in_lane()] = (const uint16_t *)row;
    __syncwarp();
}

/* A copy that a thread of the block has begun. */
struct copy {
    void *to;
    const void *from; /* NULL: zeros */
    size_t bytes;
};

const int MAX_THREADS = 256, MAX_COPIES = 16;

/* Of each thread of the block. */
__shared__ struct copies {
    copy list[MAX_COPIES];
    int n;
    uint3 block; /* that the thread is of */
} begun[MAX_THREADS];

copies &copies_of_thread(void)
{
    unsigned int i = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    if (i >= MAX_THREADS)
        stand_in_misuse("copies to shared memory by blocks of more than %d threads are not modelled",
                        MAX_THREADS);
    return begun[i % MAX_THREADS];
}

bool of_another_block(const uint3 &block)
{
    return block.x != blockIdx.x || block.y != blockIdx.y || block.z != blockIdx.z;
}

void begin_copy(void *to, const void *from, size_t bytes, bool there)
{
    copies &mine = copies_of_thread();
    if ((uintptr_t)to % bytes || (there && (uintptr_t)from % bytes))
        stand_in_misuse("%zu bytes are copied from %p to %p, of which one is not a multiple of that", bytes,
                        from, to);
    if (mine.n && of_another_block(mine.block)) {
        stand_in_misuse("a thread ended that had not waited for what it copies");
        mine.n = 0;
    }
    if (mine.n == MAX_COPIES) {
        stand_in_misuse("more than %d copies by a thread that waits for none are not modelled", MAX_COPIES);
        return;
    }
    mine.block = {blockIdx.x, blockIdx.y, blockIdx.z};
    mine.list[mine.n++] = {to, there ? from : nullptr, bytes};
    std::memset(to, 0xff, bytes);
}

} // namespace

void mma_bf16(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    int lane = stand_in_lane(), g = lane / 4, t = lane % 4;
    std::memcpy(open[warp()].a[lane], a, 4 * sizeof *a);
    std::memcpy(open[warp()].b[lane], b, 2 * sizeof *b);
    __syncwarp();
    for (int j = 0; j < 4; j++)
        for (int k = 0; k < 16; k++)
            c[j] += of_a(g + j / 2 * 8, k) * of_b(k, 2 * t + j % 2);
    __syncwarp(); /* before any lane lays open something else */
}

void load_matrices(uint32_t to[4], const void *row)
{
    int g = stand_in_lane() / 4, t = stand_in_lane() % 4;
    lay_open_row(row);
    for (int j = 0; j < 4; j++) {
        const uint16_t *r = open[warp()].row[8 * j + g];
        to[j] = two(r[2 * t], r[2 * t + 1]);
    }
    __syncwarp();
}

void load_transposed(uint32_t to[4], const void *row)
{
    int g = stand_in_lane() / 4, t = stand_in_lane() % 4;
    lay_open_row(row);
    for (int j = 0; j < 4; j++)
        to[j] = two(open[warp()].row[8 * j + 2 * t][g], open[warp()].row[8 * j + 2 * t + 1][g]);
    __syncwarp();
}

void copy_16_bytes(void *to, const void *from, bool there)
{
    begin_copy(to, from, 16, there);
}

void copy_4_bytes(void *to, const void *from, bool there)
{
    begin_copy(to, from, 4, there);
}

void wait_for_copies(void)
{
    copies &mine = copies_of_thread();
    for (int i = 0; i < mine.n; i++) {
        const copy &c = mine.list[i];
        if (c.from)
            std::memcpy(c.to, c.from, c.bytes);
        else
            std::memset(c.to, 0, c.bytes);
    }
    mine.n = 0;
}

float power_of_two(float x)
{
    float y = std::exp2(x);
    return y < 0x1p-126f ? 0 : y;
}

uint32_t two_bf16(float first, float second)
{
    float x[2] = {first, second};
    uint32_t half[2];
    for (int i = 0; i < 2; i++) {
        uint32_t bits = __float_as_uint(x[i]);
        half[i] = x[i] != x[i] ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
    return half[0] | half[1] << 16;
}
