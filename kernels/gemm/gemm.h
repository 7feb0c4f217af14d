/* SPDX-License-Identifier: Apache-2.0 */
/* gemm.h: matrix products for models that bring none (zero-bench train), through oneDNN on the host and
 * cuBLASLt on a CUDA device.
 *
 * This is a separate static library, not part of libzero. Only programs that multiply matrices link it. What
 * oneDNN or cuBLASLt needs for a product is prepared once per shape and kept. All matrices are row-major.
 *
 * Bits: a product (shape, strides, types, beta, bias, epilogue) gives the same bits at every call and in
 * every process. This holds for one kind of CPU or GPU and one version of oneDNN or cuBLASLt, wherever the
 * matrices lie. There are two exceptions. On a GPU, an alignment below 16 bytes may change the bits. On the
 * host, the number of threads may change them: oneDNN then cuts a long k into parts, mostly if A is
 * transposed. */
#ifndef ZR_KERNELS_GEMM_H
#define ZR_KERNELS_GEMM_H

#include "kernels/device.h"

/* A handle for matrix products on one device, with what was prepared for them. One thread at a time. */
struct zr_gemm;

/* Opens a handle for products on the host. n_threads: OpenMP threads of each product, whichever thread calls
 * zr_gemm_run. The caller's own setting is restored. Returns ZERO_ERR_NOTSUP if this build has no oneDNN. */
int zr_gemm_open(int n_threads, struct zr_gemm **out);

/* Opens a handle for products on a CUDA device, and loads cuBLASLt. The device becomes the calling thread's
 * current one, and must be current at every product. Products are put on stream s, which must outlive *out.
 * workspace_bytes of device memory are taken (0: ZR_GEMM_WORKSPACE_BYTES). cuBLASLt's choice of algorithms
 * depends on this size. f32 products are full fp32. With tf32, the tensor cores may round operands to 10 bits
 * of fraction. Returns ZERO_ERR_NOTSUP if this build has no cuBLASLt or dev is not a CUDA device, or
 * ZERO_ERR_NOMEM. */
#define ZR_GEMM_WORKSPACE_BYTES ((int64_t)32 << 20) /* NVIDIA's advice for compute capability 9.0 */
int zr_gemm_open_cuda(struct zr_device *dev, struct zr_stream *s, int64_t workspace_bytes, bool tf32,
                      struct zr_gemm **out);

/* g may be NULL. On a GPU it waits for the stream. */
void zr_gemm_close(struct zr_gemm *g);

/* How a product P = op(A) * op(B) + bias becomes C. GELU is the tanh form (Hendrycks and Gimpel 2016). */
enum zr_gemm_epilogue {
    /* C = P + beta * C */
    ZR_GEMM_PLAIN,
    /* aux = P; C = gelu(P) */
    ZR_GEMM_GELU,
    /* C = P * gelu'(aux) */
    ZR_GEMM_DGELU,
    /* C = P + beta * C; sum (m) = op(A) summed over k. If A is the gradient of a layer's output and trans_a
     * is set, sum is the gradient of the layer's bias. */
    ZR_GEMM_SUM_A,
};

/* C (m, n) = op(A) (m, k) * op(B) (k, n) + beta * C + bias (n)
 *
 * op(X) is X or its transpose. lda, ldb and ldc are elements between rows as stored. A and B have ab_dtype,
 * and C has the same or ZERO_F32. Accumulation is fp32. All of m, n, k and n_batch are at least 1. The factor
 * beta is 0 or 1. The bias is (n) of bias_dtype, added to each row, or NULL. The n_batch products are
 * independent. Their matrices lie stride_x elements apart. With n_batch 1 the strides are not used.
 *
 * aux is (m, n) of c_dtype, with ldaux elements between rows. sum has c_dtype, and is written, not added to.
 * An epilogue takes one product (n_batch 1). ZR_GEMM_GELU and ZR_GEMM_DGELU take beta 0. ZR_GEMM_DGELU and
 * ZR_GEMM_SUM_A take no bias.
 *
 * The host has f32 and bf16, and only ZR_GEMM_PLAIN. cuBLASLt also has f16. It takes a bias only of c_dtype,
 * and aux only 16-byte aligned with ldaux a multiple of 8. On a GPU the product is only put on the stream.
 * Returns 0, ZERO_ERR_NOTSUP for what oneDNN, cuBLASLt or the device cannot do, or another zero_err such as
 * ZERO_ERR_ARG. */
struct zr_gemm_args {
    bool trans_a, trans_b;
    int64_t m, n, k;
    enum zero_dtype ab_dtype, c_dtype, bias_dtype;
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

/* Returns whether zr_gemm_run would accept args, if there is memory. Nothing is run. It is for models that do
 * an epilogue's work themselves if oneDNN or cuBLASLt does not. */
bool zr_gemm_can(struct zr_gemm *g, const struct zr_gemm_args *args);

#endif
