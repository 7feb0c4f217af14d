/* SPDX-License-Identifier: Apache-2.0 */
/* compute.h: what a model computes with: a device, which is the host or a GPU, a stream on it, and matrix
 * products. The device also has the memory of the model. */
#ifndef ZERO_BENCH_COMPUTE_H
#define ZERO_BENCH_COMPUTE_H

#include "kernels/gemm/gemm.h"
#include "zero/zero.h"

struct compute {
    struct zr_device *dev;
    /* all of the model's work, in order */
    struct zr_stream *stream;
    struct zr_gemm *gemm;
    /* on the host, threads of one layer function or matrix product; 1 on a GPU */
    int n_threads;
    bool cuda;
};

#define GPU_OF_LOCAL_RANK (-1)

/* c (m, n) = a (m, k) * b (k, n), with the distances between rows in elements. The caller may change or add
 * fields. */
struct zr_gemm_args product_of(enum zero_dtype dtype, int64_t m, int64_t n, int64_t k, const void *a,
                               int64_t lda, const void *b, int64_t ldb, void *c, int64_t ldc);

/* Opens the host with n_threads. With cuda it opens GPU number `gpu` instead, which becomes this thread's
 * current device (GPU_OF_LOCAL_RANK: the local rank's, by zero_find_place). Returns 0 or a zero_err. On
 * failure *p holds nothing. ZERO_ERR_NOTSUP: there is no usable GPU, and the message says why. */
int compute_open(struct compute *p, bool cuda, int gpu, int n_threads);
/* The stream for libzero; NULL on the host. */
zero_stream compute_stream(const struct compute *p);
/* "host" or "cuda". */
const char *compute_name(const struct compute *p);
/* The GPU memory that is in use, by other processes too; 0 on the host. */
int64_t compute_used_bytes(const struct compute *p);
/* Waits for the stream and closes everything. A zeroed struct is allowed. */
void compute_close(struct compute *p);

#endif
