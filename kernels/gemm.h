/* gemm.h: matrix products on the host through oneDNN, for models that bring none of their own (zero-bench
 * train).
 *
 * Not part of libzero: a static library of its own, linked only by programs that multiply matrices.
 * Primitives are made once per shape and kept. Row-major throughout.
 *
 * Bits: one product (shape, strides, types, beta, bias or none, n_threads) gives the same bits at every call,
 * in every process on one kind of CPU, wherever its matrices lie. They may differ between numbers of threads:
 * oneDNN then cuts a long k into parts, mostly where A is transposed. */
#ifndef ZR_KERNELS_GEMM_H
#define ZR_KERNELS_GEMM_H

#include "kernels/device.h"

struct zr_gemm; /* one thread at a time */

/* n_threads: of oneDNN's team for products issued by this thread. */
int zr_gemm_open(int n_threads, struct zr_gemm **out);
void zr_gemm_close(struct zr_gemm *g); /* NULL is allowed */

/* C (m, n) = op(A) (m, k) * op(B) (k, n) + beta * C + bias (n)
 *
 * op(X) = X or its transpose; lda, ldb, ldc: elements between rows as stored. a_dtype == b_dtype; c_dtype the
 * same or ZR_F32; accumulation is fp32. m, n, k, n_batch are at least 1. beta is 0 or 1. bias: (n) of
 * bias_dtype added to each row, or NULL. n_batch independent products whose matrices lie stride_x elements
 * apart (n_batch 1: strides unused). Returns 0 or a zr_err. */
struct zr_gemm_args {
    bool trans_a, trans_b;
    int64_t m, n, k;
    enum zr_dtype ab_dtype, c_dtype, bias_dtype;
    const void *a, *b, *bias;
    void *c;
    int64_t lda, ldb, ldc;
    float beta;
    int64_t n_batch, stride_a, stride_b, stride_c;
};
int zr_gemm_run(struct zr_gemm *g, const struct zr_gemm_args *args);

#endif
