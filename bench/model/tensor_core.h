/* SPDX-License-Identifier: Apache-2.0 */
/* tensor_core.h: bf16 instructions of tensor cores with fp32 sums (PTX ISA: mma.m16n8k16, ldmatrix), and the
 * instructions around them (cp.async, ex2). All 32 lanes of a warp call each function. Needs sm_80.
 *
 * With lane = 4 * g + t, a lane holds these elements. The first of two bf16 is in the lower half.
 *   A (16, 16)  a[0..3]: rows g, g+8, g, g+8; columns 2t, 2t, 2t+8, 2t+8, and the column after each
 *   B (16, 8)   b[0..1]: rows 2t and 2t+8, and the row after each; column g
 *   C (16, 8)   c[0..3]: row g at columns 2t and 2t+1, then row g+8
 * So two neighbouring C, rounded to bf16, form an A.
 *
 * If the code is not compiled for a GPU, the program provides these functions itself, as the tests do. */
#ifndef ZERO_BENCH_TENSOR_CORE_H
#define ZERO_BENCH_TENSOR_CORE_H

#include <stdint.h>

#ifdef __CUDACC__

/* Before a loop: arrays that it indexes can stay in registers. */
#define UNROLL _Pragma("unroll")

/* c += A * B */
__device__ __forceinline__ void mma_bf16(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Loads four matrices (8, 8) from shared memory. Lane 8*j + i passes the address of row i of matrix j, 16
 * bytes. to[j] becomes row g of matrix j at columns 2t and 2t+1. */
__device__ __forceinline__ void load_matrices(uint32_t to[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}

/* Loads the transposed matrices: rows 2t and 2t+1 of matrix j at column g. */
__device__ __forceinline__ void load_transposed(uint32_t to[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}

/* Start to copy 16 or 4 bytes to shared memory. Both addresses are multiples of this size. If `there` is
 * false, they write zeros and read nothing. The copy is complete for the calling thread after
 * wait_for_copies, and for other threads after a following barrier. */
__device__ __forceinline__ void copy_16_bytes(void *to, const void *from, bool there)
{
    asm volatile(
        "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((uint32_t)__cvta_generic_to_shared(to)),
        "l"(__cvta_generic_to_global(from)), "r"(there ? 16 : 0)
        : "memory");
}

__device__ __forceinline__ void copy_4_bytes(void *to, const void *from, bool there)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"((uint32_t)__cvta_generic_to_shared(to)),
                 "l"(__cvta_generic_to_global(from)), "r"(there ? 4 : 0)
                 : "memory");
}

__device__ __forceinline__ void wait_for_copies(void)
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* 2^x to 22 bits, and 0 for a result that is not normal. This is one instruction; exp2f needs four. */
__device__ __forceinline__ float power_of_two(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Rounds both to nearest, ties to even. */
__device__ __forceinline__ uint32_t two_bf16(float first, float second)
{
    uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
}

#else

#define UNROLL

extern "C" {
void mma_bf16(float c[4], const uint32_t a[4], const uint32_t b[2]);
void load_matrices(uint32_t to[4], const void *row);
void load_transposed(uint32_t to[4], const void *row);
void copy_16_bytes(void *to, const void *from, bool there);
void copy_4_bytes(void *to, const void *from, bool there);
void wait_for_copies(void);
float power_of_two(float x);
uint32_t two_bf16(float first, float second);
}

#endif
#endif
