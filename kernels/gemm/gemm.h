/* SPDX-License-Identifier: Apache-2.0 */
/* gemm.h: matrix products for models that bring none of their own (zero-bench train): on the host through
 * oneDNN, on a CUDA device through cuBLASLt.
 *
 * Not part of libzero: a static library of its own, linked only by programs that multiply matrices. What a
 * product needs (a primitive, a plan) is made once per shape and kept. Row-major throughout.
 *
 * Bits: one product (shape, strides, types, beta, bias, epilogue) gives the same bits at every call, in every
 * process on one kind of CPU or GPU with one version of the library, wherever its matrices lie (but for their
 * alignment below 16 bytes on a GPU). On the host they may differ between numbers of threads: oneDNN then
 * cuts a long k into parts, mostly where A is transposed. */
#ifndef ZR_KERNELS_GEMM_H
#define ZR_KERNELS_GEMM_H

#include "kernels/device.h"

/* For one thread at a time. */
struct zr_gemm;

/* On the host. n_threads: of oneDNN's team for products issued by this thread. ZR_ERR_NOTSUP where this build
 * has no oneDNN. */
int zr_gemm_open(int n_threads, struct zr_gemm **out);

/* On a CUDA device, which becomes the calling thread's current one and must be so whenever products are asked
 * for: they are put on stream s, which must outlive *out. Loads cuBLASLt. Takes workspace_bytes of device
 * memory (0: ZR_GEMM_WORKSPACE_BYTES); what the library chooses depends on its size. f32 products are full
 * fp32 unless tf32 allows the tensor cores' rounding of operands to 10 bits of fraction. ZR_ERR_NOTSUP where
 * this build has no cuBLASLt, or dev is not a CUDA device; ZR_ERR_NOMEM. */
#define ZR_GEMM_WORKSPACE_BYTES ((int64_t)32 << 20) /* what NVIDIA advises for compute capability 9.0 */
int zr_gemm_open_cuda(struct zr_device *dev, struct zr_stream *s, int64_t workspace_bytes, bool tf32,
                      struct zr_gemm **out);

/* NULL is allowed; on a GPU waits for the stream. */
void zr_gemm_close(struct zr_gemm *g);

/* How a product P = op(A) * op(B) + bias becomes C. GELU is the tanh form (Hendrycks and Gimpel 2016). */
enum zr_gemm_epilogue {
    /* C = P + beta * C */
    ZR_GEMM_PLAIN,
    /* aux = P; C = gelu(P) */
    ZR_GEMM_GELU,
    /* C = P * gelu'(aux) */
    ZR_GEMM_DGELU,
    /* C = P + beta * C, and sum (m) = op(A)'s columns added up: a bias's gradient where A is the transposed
     * gradient of a layer's output */
    ZR_GEMM_SUM_A,
};

/* C (m, n) = op(A) (m, k) * op(B) (k, n) + beta * C + bias (n)
 *
 * op(X) = X or its transpose; lda, ldb, ldc: elements between rows as stored. a_dtype == b_dtype; c_dtype the
 * same or ZR_F32; accumulation is fp32. m, n, k, n_batch are at least 1. beta is 0 or 1. bias: (n) of
 * bias_dtype added to each row, or NULL. n_batch independent products whose matrices lie stride_x elements
 * apart (n_batch 1: strides unused).
 *
 * epilogue: aux (m, n) of c_dtype, ldaux elements between rows; sum of c_dtype, written, not added to. An
 * epilogue takes one product (n_batch 1), those with a GELU beta 0, all but ZR_GEMM_GELU no bias.
 *
 * The host has f32 and bf16, and only ZR_GEMM_PLAIN. cuBLASLt has f16 too, takes a bias of c_dtype only, and
 * aux 16-byte aligned with ldaux a multiple of 8. Returns 0 or a zr_err: ZR_ERR_NOTSUP for what this library
 * or device cannot do, ZR_ERR_ARG for what makes no sense. On a GPU the product is only put on the stream. */
struct zr_gemm_args {
    bool trans_a, trans_b;
    int64_t m, n, k;
    enum zr_dtype ab_dtype, c_dtype, bias_dtype;
    const void *a, *b, *bias;
    void *c;
    int64_t lda, ldb, ldc;
    float beta;
    int64_t n_batch, stride_a, stride_b, stride_c;
    enum zr_gemm_epilogue epilogue;
    void *aux, *sum;
    int64_t ldaux;
};
int zr_gemm_run(struct zr_gemm *g, const struct zr_gemm_args *args);

/* Whether zr_gemm_run would take args (if memory lasts); nothing is run. For models that do an epilogue's
 * work themselves where the library does not. */
bool zr_gemm_can(struct zr_gemm *g, const struct zr_gemm_args *args);

#endif
