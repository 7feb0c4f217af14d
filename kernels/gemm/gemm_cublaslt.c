/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_cublaslt.c: matrix products through cuBLASLt.
 *
 * cuBLASLt multiplies column-major matrices. A row-major (r, c) matrix has the memory of a column-major (c,
 * r) one. So C = A * B is requested as C^T = B^T * A^T: cuBLASLt's A is our B, and its rows of D are our
 * columns of C.
 *
 * Each product's algorithm is the first answer of cuBLASLt's heuristic. It is requested once and kept. Its
 * terms are fixed: the size of our workspace, no alignment above 16 bytes, and splits of k that are added in
 * fp32 in a fixed order. The splits are not added in place, and not rounded to C's type in between. So the
 * algorithm depends on the shape, the kind of GPU and cuBLASLt's version, and on nothing that differs between
 * ranks or runs. */
#include "kernels/alloc.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/gemm/cublaslt_api.h"
#include "kernels/gemm/gemm.h"
#include "kernels/gemm/gemm_cache.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_ALIGN 16 /* bytes; no algorithm needs a larger alignment of a matrix */

struct product {
    struct zr_gemm_prepared base;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, c; /* as cuBLASLt counts: a is our B, b is our A */
    cublasLtMatmulAlgo_t algo;
    size_t workspace_bytes; /* bytes that algo uses */
    bool none;              /* cuBLASLt has no algorithm for this product */
};

struct cuda_gemm {
    struct zr_gemm base;
    struct zr_device *dev;
    struct zr_stream *stream;
    cudaStream_t native;
    cublasLtHandle_t handle;
    cublasLtMatmulPreference_t preference;
    struct zr_gemm_cache cache;
    void *workspace;
    int64_t workspace_bytes;
    cublasComputeType_t f32_compute;
};

static int status_error(cublasStatus_t status, const char *what)
{
    if (status == CUBLAS_STATUS_SUCCESS)
        return 0;
    int code = status == CUBLAS_STATUS_ALLOC_FAILED    ? ZERO_ERR_NOMEM
               : status == CUBLAS_STATUS_NOT_SUPPORTED ? ZERO_ERR_NOTSUP
               : status == CUBLAS_STATUS_INVALID_VALUE ? ZERO_ERR_ARG
                                                       : ZERO_ERR_SYSTEM;
    return zr_fail(code, "gemm: cuBLASLt %zu gives %s at %s", lt.GetVersion(), lt.GetStatusName(status),
                   what);
}

/* A text such as "NT 1024x3072x768, batch 1, bf16 -> bf16, bias 0, epilogue 1". */
struct product_text {
    char text[128];
};

static struct product_text describe(const struct zr_gemm_key *k)
{
    struct product_text t;
    snprintf(t.text, sizeof t.text, "%c%c %lldx%lldx%lld, batch %lld, %s -> %s, bias %d, epilogue %d",
             k->trans_a ? 'T' : 'N', k->trans_b ? 'T' : 'N', (long long)k->m, (long long)k->n,
             (long long)k->k, (long long)k->n_batch, zr_dtype_name((enum zero_dtype)k->ab_dtype),
             zr_dtype_name((enum zero_dtype)k->c_dtype), k->has_bias, k->epilogue);
    return t;
}

static cudaDataType_t data_type(int32_t t)
{
    return t == ZERO_F32 ? CUDA_R_32F : t == ZERO_BF16 ? CUDA_R_16BF : CUDA_R_16F;
}

/* --- preparing --- */

static void product_free(struct zr_gemm_prepared *base)
{
    struct product *p = (struct product *)base;
    if (p->desc)
        lt.MatmulDescDestroy(p->desc);
    if (p->a)
        lt.MatrixLayoutDestroy(p->a);
    if (p->b)
        lt.MatrixLayoutDestroy(p->b);
    if (p->c)
        lt.MatrixLayoutDestroy(p->c);
    free(p);
}

/* Describes a row-major matrix of rows x columns. */
static cublasStatus_t make_layout(cublasLtMatrixLayout_t *out, int32_t dtype, int64_t rows, int64_t columns,
                                  int64_t ld, const struct zr_gemm_key *k, int64_t stride)
{
    cublasStatus_t s = lt.MatrixLayoutCreate(out, data_type(dtype), (uint64_t)columns, (uint64_t)rows, ld);
    if (s != CUBLAS_STATUS_SUCCESS || k->n_batch == 1)
        return s;
    int32_t n_batch = (int32_t)k->n_batch;
    s = lt.MatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &n_batch, sizeof n_batch);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = lt.MatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
                                        sizeof stride);
    return s;
}

static cublasStatus_t set_pointer(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t which,
                                  const void *p)
{
    return lt.MatmulDescSetAttribute(desc, which, &p, sizeof p);
}

static cublasLtEpilogue_t epilogue_of(const struct zr_gemm_key *k)
{
    switch ((enum zr_gemm_epilogue)k->epilogue) {
    case ZR_GEMM_GELU:
        return k->has_bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    case ZR_GEMM_DGELU:
        return CUBLASLT_EPILOGUE_DGELU;
    case ZR_GEMM_SUM_A:
        return CUBLASLT_EPILOGUE_BGRADB;
    case ZR_GEMM_PLAIN:
        break;
    }
    return k->has_bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

static cublasStatus_t make_desc(const struct cuda_gemm *g, struct product *p, bool has_vector)
{
    const struct zr_gemm_key *k = &p->base.key;
    cublasComputeType_t compute = k->ab_dtype == ZERO_F32 ? g->f32_compute : CUBLAS_COMPUTE_32F;
    cublasStatus_t s = lt.MatmulDescCreate(&p->desc, compute, CUDA_R_32F);
    cublasOperation_t op_a = k->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t op_b = k->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasLtEpilogue_t epilogue = epilogue_of(k);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = lt.MatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof op_a);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = lt.MatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof op_b);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = lt.MatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue);
    /* The heuristic reads only the alignment of these pointers, so their values are alignments and not
     * addresses. */
    if (s == CUBLAS_STATUS_SUCCESS && has_vector)
        s = set_pointer(p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, (void *)(uintptr_t)(k->align >> 24));
    if (s == CUBLAS_STATUS_SUCCESS && k->ldaux) {
        s = set_pointer(p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, (void *)(uintptr_t)MAX_ALIGN);
        if (s == CUBLAS_STATUS_SUCCESS)
            s = lt.MatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &k->ldaux,
                                          sizeof k->ldaux);
    }
    return s;
}

static cublasStatus_t set_alignments(struct cuda_gemm *g, int32_t align)
{
    static const cublasLtMatmulPreferenceAttributes_t which[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, /* our A */
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
    };
    cublasStatus_t s = CUBLAS_STATUS_SUCCESS;
    for (int i = 0; i < 4 && s == CUBLAS_STATUS_SUCCESS; i++) {
        uint32_t bytes = (uint32_t)align >> 8 * (i < 2 ? i : 2) & 0xff;
        s = lt.MatmulPreferenceSetAttribute(g->preference, which[i], &bytes, sizeof bytes);
    }
    return s;
}

/* On failure p holds what must be freed. */
static cublasStatus_t product_build(struct cuda_gemm *g, struct product *p, bool has_vector)
{
    const struct zr_gemm_key *k = &p->base.key;
    cublasStatus_t s = make_layout(&p->b, k->ab_dtype, k->trans_a ? k->k : k->m, k->trans_a ? k->m : k->k,
                                   k->lda, k, k->stride_a);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = make_layout(&p->a, k->ab_dtype, k->trans_b ? k->n : k->k, k->trans_b ? k->k : k->n, k->ldb, k,
                        k->stride_b);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = make_layout(&p->c, k->c_dtype, k->m, k->n, k->ldc, k, k->stride_c);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = make_desc(g, p, has_vector);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = set_alignments(g, k->align);
    if (s != CUBLAS_STATUS_SUCCESS)
        return s;
    cublasLtMatmulHeuristicResult_t result;
    memset(&result, 0, sizeof result);
    int n_results = 0;
    s = lt.MatmulAlgoGetHeuristic(g->handle, p->desc, p->a, p->b, p->c, p->c, g->preference, 1, &result,
                                  &n_results);
    if (s == CUBLAS_STATUS_NOT_SUPPORTED ||
        (s == CUBLAS_STATUS_SUCCESS && (n_results < 1 || result.state != CUBLAS_STATUS_SUCCESS))) {
        p->none = true;
        return CUBLAS_STATUS_SUCCESS;
    }
    p->algo = result.algo;
    p->workspace_bytes = result.workspaceSize;
    return s;
}

/* Returns the largest power of two up to MAX_ALIGN that divides the address. */
static int32_t align_of(const void *p)
{
    uintptr_t bits = (uintptr_t)p | MAX_ALIGN;
    return (int32_t)(bits & -bits);
}

static int check_pointers(const struct zr_gemm_args *a, int32_t *align)
{
    const void *vector = a->bias ? a->bias : a->sum;
    int32_t at_a = align_of(a->a), at_b = align_of(a->b), at_c = align_of(a->c), at_vector = align_of(vector);
    if (a->bias && a->bias_dtype != a->c_dtype)
        return zr_fail(ZERO_ERR_NOTSUP, "gemm: a bias of %s with C of %s; cuBLASLt needs the same dtype",
                       zr_dtype_name(a->bias_dtype), zr_dtype_name(a->c_dtype));
    if (at_a < zr_dtype_bytes(a->ab_dtype) || at_b < zr_dtype_bytes(a->ab_dtype) ||
        at_c < zr_dtype_bytes(a->c_dtype) || at_vector < zr_dtype_bytes(a->c_dtype))
        return zr_fail(ZERO_ERR_ARG,
                       "gemm: A at %p, B at %p, C at %p, bias or sum at %p: all must be aligned "
                       "as their elements are",
                       a->a, a->b, a->c, vector);
    if (a->aux && (align_of(a->aux) < MAX_ALIGN || a->ldaux % 8))
        return zr_fail(ZERO_ERR_NOTSUP,
                       "gemm: aux at %p with ldaux %lld: must be %d-byte aligned, and ldaux a multiple of 8",
                       a->aux, (long long)a->ldaux, MAX_ALIGN);
    if (a->n_batch > INT32_MAX)
        return zr_fail(ZERO_ERR_NOTSUP, "gemm: n_batch is %lld, cuBLASLt takes at most %d",
                       (long long)a->n_batch, INT32_MAX);
    *align = at_a | at_b << 8 | at_c << 16 | (vector ? at_vector : 0) << 24;
    return 0;
}

static int product_get(struct cuda_gemm *g, const struct zr_gemm_args *a, struct product **out)
{
    struct zr_gemm_key k = zr_gemm_key_of(a);
    ZR_TRY(check_pointers(a, &k.align));
    struct product *p = (struct product *)zr_gemm_cache_find(&g->cache, &k);
    if (!p) {
        ZR_TRY(ZR_ZALLOC(p, 1, "a plan of cuBLASLt"));
        p->base.key = k;
        int err = status_error(product_build(g, p, a->bias || a->sum), "making a plan");
        err = err ? zr_fail_more(err, "%s", describe(&k).text) : zr_gemm_cache_add(&g->cache, &p->base);
        if (err) {
            product_free(&p->base);
            return err;
        }
    }
    *out = p;
    if (p->none)
        return zr_fail(ZERO_ERR_NOTSUP, "gemm: cuBLASLt %zu has no algorithm for %s on this GPU",
                       lt.GetVersion(), describe(&k).text);
    return 0;
}

/* --- long sides --- */

#define LONG_SIDE 4096
#define SIDE_STEP 8 /* elements; 16 bytes of a 16-bit type */

/* Returns whether a side must be cut. *whole is its last multiple of SIDE_STEP. */
static bool cut_side(int64_t side, int64_t *whole)
{
    *whole = side / SIDE_STEP * SIDE_STEP;
    return side >= LONG_SIDE && *whole < side;
}

/* Cuts a product with a long side that is no multiple of 16 bytes, such as the 50257 tokens of GPT-2's
 * vocabulary. *most has the whole multiples, and *rest the few rows, columns or terms that are left. For the
 * two together cuBLASLt has only slow algorithms: on an H100 those of GPT-2's head took five times as long.
 * *rest runs first. So if k is cut, the few terms are rounded to C's type, not the many. Returns false if the
 * product stays whole. */
static bool cut_long_side(const struct zr_gemm_args *a, struct zr_gemm_args *rest, struct zr_gemm_args *most)
{
    int64_t whole, ab_bytes = zr_dtype_bytes(a->ab_dtype), c_bytes = zr_dtype_bytes(a->c_dtype);
    *rest = *most = *a;
    if (a->n_batch != 1 || a->epilogue != ZR_GEMM_PLAIN)
        return false;
    if (cut_side(a->n, &whole)) { /* the parts are side by side in C */
        most->n = whole;
        rest->n = a->n - whole;
        rest->b = (const char *)a->b + whole * (a->trans_b ? a->ldb : 1) * ab_bytes;
        rest->c = (char *)a->c + whole * c_bytes;
        rest->bias = a->bias ? (const char *)a->bias + whole * zr_dtype_bytes(a->bias_dtype) : NULL;
        return true;
    }
    if (a->trans_a && cut_side(a->m, &whole)) { /* the parts are side by side in A */
        most->m = whole;
        rest->m = a->m - whole;
        rest->a = (const char *)a->a + whole * ab_bytes;
        rest->c = (char *)a->c + whole * a->ldc * c_bytes;
        return true;
    }
    if ((!a->trans_a || a->trans_b) && cut_side(a->k, &whole)) { /* the parts are side by side in A or B */
        most->k = whole;
        rest->k = a->k - whole;
        rest->a = (const char *)a->a + whole * (a->trans_a ? a->lda : 1) * ab_bytes;
        rest->b = (const char *)a->b + whole * (a->trans_b ? 1 : a->ldb) * ab_bytes;
        most->beta = 1;
        most->bias = NULL;
        return true;
    }
    return false;
}

/* --- gemm.h --- */

static int run_one(struct cuda_gemm *g, const struct zr_gemm_args *a)
{
    struct product *p;
    ZR_TRY(product_get(g, a, &p));
    cublasStatus_t s = CUBLAS_STATUS_SUCCESS;
    if (a->bias || a->sum)
        s = set_pointer(p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, a->bias ? a->bias : a->sum);
    if (s == CUBLAS_STATUS_SUCCESS && a->aux)
        s = set_pointer(p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, a->aux);
    float alpha = 1.0f;
    if (s == CUBLAS_STATUS_SUCCESS)
        s = lt.Matmul(g->handle, p->desc, &alpha, a->b, p->a, a->a, p->b, &a->beta, a->c, p->c, a->c, p->c,
                      &p->algo, p->workspace_bytes ? g->workspace : NULL, p->workspace_bytes, g->native);
    int err = status_error(s, "a product");
    return err ? zr_fail_more(err, "%s", describe(&p->base.key).text) : 0;
}

static int cuda_run(struct zr_gemm *base, const struct zr_gemm_args *a)
{
    struct cuda_gemm *g = (struct cuda_gemm *)base;
    struct zr_gemm_args rest, most;
    bool two = cut_long_side(a, &rest, &most);
    ZR_TRY(two ? run_one(g, &rest) : 0);
    return run_one(g, &most);
}

static bool cuda_can(struct zr_gemm *base, const struct zr_gemm_args *a)
{
    struct cuda_gemm *g = (struct cuda_gemm *)base;
    struct zr_gemm_args rest, most;
    struct product *p;
    bool two = cut_long_side(a, &rest, &most);
    return (!two || !product_get(g, &rest, &p)) && !product_get(g, &most, &p);
}

static void cuda_close(struct zr_gemm *base)
{
    struct cuda_gemm *g = (struct cuda_gemm *)base;
    if (g->workspace) {
        g->dev->ops->stream_sync(g->stream);
        g->dev->ops->free(g->dev, g->workspace, g->workspace_bytes);
    }
    zr_gemm_cache_close(&g->cache, product_free);
    if (g->preference)
        lt.MatmulPreferenceDestroy(g->preference);
    if (g->handle)
        lt.Destroy(g->handle);
    free(g);
}

static const struct zr_gemm_ops cuda_ops = {.close = cuda_close, .run = cuda_run, .can = cuda_can};

/* Sets the terms of every heuristic search. */
static cublasStatus_t make_preference(struct cuda_gemm *g)
{
    uint64_t bytes = (uint64_t)g->workspace_bytes;
    uint32_t splits = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    cublasStatus_t s = lt.MatmulPreferenceCreate(&g->preference);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = lt.MatmulPreferenceSetAttribute(g->preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes,
                                            sizeof bytes);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = lt.MatmulPreferenceSetAttribute(g->preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                            &splits, sizeof splits);
    return s;
}

int zr_gemm_open_cuda(struct zr_device *dev, struct zr_stream *s, int64_t workspace_bytes, bool tf32,
                      struct zr_gemm **out)
{
    *out = NULL;
    if (strcmp(dev->ops->name, "cuda") != 0)
        return zr_fail(ZERO_ERR_NOTSUP, "gemm: cuBLASLt needs a cuda device, this one is %s", dev->ops->name);
    if (workspace_bytes < 0)
        return zr_fail(ZERO_ERR_ARG, "gemm: workspace_bytes is %lld, must not be negative",
                       (long long)workspace_bytes);
    struct zr_cuda_device *cuda = (struct zr_cuda_device *)dev;
    ZR_TRY(cublaslt_load());
    ZR_TRY(zr_cuda_check(cuda, "cudaSetDevice", cudaSetDevice(cuda->ordinal)));
    struct cuda_gemm *g;
    ZR_TRY(ZR_ZALLOC(g, 1, "matrix products"));
    g->base.ops = &cuda_ops;
    g->dev = dev;
    g->stream = s;
    g->native = dev->ops->stream_native(s);
    g->workspace_bytes = workspace_bytes ? workspace_bytes : ZR_GEMM_WORKSPACE_BYTES;
    g->f32_compute = tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    int err = zr_gemm_cache_open(&g->cache);
    if (!err)
        err = status_error(lt.Create(&g->handle), "opening");
    if (!err)
        err = status_error(make_preference(g), "opening");
    if (!err)
        err = dev->ops->alloc(dev, g->workspace_bytes, &g->workspace);
    if (err) {
        cuda_close(&g->base);
        return err;
    }
    *out = &g->base;
    return 0;
}
