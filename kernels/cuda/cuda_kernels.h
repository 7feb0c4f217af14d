/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_kernels.h: the GPU's kernels, as functions that put them on a stream.
 *
 * They have the semantics of struct zr_host_kernels, bit for bit. The caller checks the arguments
 * (cuda_ops.c). The stream's device must be current. Each function returns the error of the launch. n <= 0
 * puts nothing. */
#ifndef ZR_KERNELS_CUDA_KERNELS_H
#define ZR_KERNELS_CUDA_KERNELS_H

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "kernels/device.h"

cudaError_t zr_cuda_copy_rows(cudaStream_t s, const struct zr_copy_rows *table, int n);
cudaError_t zr_cuda_put(cudaStream_t s, void *dst, const void *src, int64_t bytes);
/* *out_ns = the GPU's global timer + offset_ns */
cudaError_t zr_cuda_stamp(cudaStream_t s, int64_t *out_ns, int64_t offset_ns);
/* Casts between f32 and bf16. dst may be src if dst is bf16. */
cudaError_t zr_cuda_cast(cudaStream_t s, void *dst, enum zero_dtype dt, const void *src, int64_t n);
cudaError_t zr_cuda_add(cudaStream_t s, float *dst, const void *src, enum zero_dtype st, int64_t n);
cudaError_t zr_cuda_sum_tree(cudaStream_t s, float *dst, const void *const *src, int n_src,
                             enum zero_dtype st, int64_t n, bool accumulate);
cudaError_t zr_cuda_sum_ranges(cudaStream_t s, const struct zr_sum_range *table, int n_sums,
                               const void *const *src, int n_src, enum zero_dtype st);
/* most_blocks: blocks that the GPU runs at once. */
cudaError_t zr_cuda_sum_squares(cudaStream_t s, struct zr_exact_sum *acc, const void *x,
                                enum zero_dtype dtype, int64_t n, const struct zr_largest *largest,
                                int most_blocks);
cudaError_t zr_cuda_maximum(cudaStream_t s, void *dst, const void *const *src, int n_src,
                            enum zero_dtype dtype, int64_t n);
cudaError_t zr_cuda_digest(cudaStream_t s, uint64_t *sum, const void *at, int64_t bytes, uint64_t first,
                           int most_blocks);
cudaError_t zr_cuda_scale(cudaStream_t s, float *x, int64_t n, const struct zr_step_scalars *scalars);
cudaError_t zr_cuda_update_spans(cudaStream_t s, const struct zr_update *u,
                                 const struct zr_update_span *spans, int n_spans);
cudaError_t zr_cuda_add_rounded(cudaStream_t s, uint16_t *dst, const float *src, int64_t n,
                                const struct zr_rounding *rounding);
cudaError_t zr_cuda_encode(cudaStream_t s, const struct zr_coded *to, const float *src, int64_t n);
cudaError_t zr_cuda_decode(cudaStream_t s, float *dst, const struct zr_coded *from, int64_t n);
cudaError_t zr_cuda_agree_begin(cudaStream_t s, const struct zr_agree_begin *b);
cudaError_t zr_cuda_agree_end(cudaStream_t s, const struct zr_agree_end *e);

#ifdef __cplusplus
}
#endif

#endif
