/* SPDX-License-Identifier: Apache-2.0 */
/* cublaslt_stand_in_run.c: describes a product, finds the algorithms for it, and runs one. Matrices are
 * column-major, as in the library. */
#include "test/stand_in/cublaslt_stand_in_inside.h"
#include "test/stand_in/half.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* --- the description of a product --- */

/* Everything about a product except the addresses of its matrices. */
struct product {
    struct csi_operation op;
    struct csi_layout a, b, c, d;
};

static bool has_bias(const struct csi_operation *op)
{
    return op->epilogue & CUBLASLT_EPILOGUE_BIAS;
}

static bool has_bias_gradient(const struct csi_operation *op)
{
    return op->epilogue == CUBLASLT_EPILOGUE_BGRADB;
}

static bool has_aux(const struct csi_operation *op)
{
    return op->epilogue & 128;
}

static bool writes_aux(const struct csi_operation *op)
{
    return (op->epilogue & CUBLASLT_EPILOGUE_GELU_AUX) == CUBLASLT_EPILOGUE_GELU_AUX;
}

static int64_t element_bytes(cudaDataType t)
{
    return t == CUDA_R_32F ? 4 : 2;
}

static bool same_layout(const struct csi_layout *x, const struct csi_layout *y)
{
    return x->type == y->type && x->n_batch == y->n_batch && x->rows == y->rows && x->columns == y->columns &&
           x->ld == y->ld && x->stride == y->stride;
}

static bool layout_holds(const struct csi_layout *l)
{
    return l->rows > 0 && l->columns > 0 && l->ld >= l->rows && l->n_batch > 0;
}

static const char *product_fault(const struct product *p)
{
    const struct csi_operation *op = &p->op;
    int64_t m = op->trans_a ? p->a.columns : p->a.rows, k = op->trans_a ? p->a.rows : p->a.columns;
    int64_t n = op->trans_b ? p->b.rows : p->b.columns, k_b = op->trans_b ? p->b.columns : p->b.rows;
    if (!layout_holds(&p->a) || !layout_holds(&p->b) || !layout_holds(&p->d))
        return "a layout with no elements, or ld below its rows";
    if (!same_layout(&p->c, &p->d))
        return "layouts of C and D differ";
    if (k != k_b || m != p->d.rows || n != p->d.columns)
        return "layouts do not fit each other";
    if (p->a.n_batch != p->d.n_batch || p->b.n_batch != p->d.n_batch)
        return "batch counts differ";
    if (p->d.n_batch > 1 && p->d.stride == 0)
        return "the batch's results lie on each other";
    if (op->scale != CUDA_R_32F)
        return "scale type is not fp32";
    if (has_aux(op) && op->ld_aux < p->d.rows)
        return "ld of aux is below the rows of D, or was not set";
    return NULL;
}

static bool product_supported(const struct product *p, const struct cublaslt_matmul_desc *desc)
{
    const struct csi_operation *op = &p->op;
    if (p->a.type != p->b.type || (p->d.type != p->a.type && p->d.type != CUDA_R_32F) ||
        (op->compute != CUBLAS_COMPUTE_32F && p->a.type != CUDA_R_32F))
        return false;
    if (has_aux(op) && (op->ld_aux % 8 || (uintptr_t)desc->aux % 16))
        return false;
    if (p->d.n_batch > 1 && op->epilogue != CUBLASLT_EPILOGUE_DEFAULT &&
        op->epilogue != CUBLASLT_EPILOGUE_BIAS)
        return false;
    return !(csi.refused & op->epilogue);
}

static bool product_of(const char *call, struct product *out, cublasLtHandle_t handle,
                       cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                       cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d)
{
    int device = -1;
    if (!csi_is(call, handle, CSI_HANDLE) || !csi_is(call, desc, CSI_DESC) || !csi_is(call, a, CSI_LAYOUT) ||
        !csi_is(call, b, CSI_LAYOUT) || !csi_is(call, c, CSI_LAYOUT) || !csi_is(call, d, CSI_LAYOUT))
        return false;
    if (cudaGetDevice(&device) || device != handle->device) {
        stand_in_misuse("%s: the handle is of device %d, the current one is %d", call, handle->device,
                        device);
        return false;
    }
    memset(out, 0, sizeof *out); /* padding too, since products are hashed as bytes */
    out->op = desc->is;
    out->a = a->is;
    out->b = b->is;
    out->c = c->is;
    out->d = d->is;
    const char *fault = product_fault(out);
    if (fault)
        stand_in_misuse("%s: %s", call, fault);
    return !fault;
}

static uint64_t hash_of(const struct product *p)
{
    const int64_t words[] = {
        p->op.compute, p->op.trans_a, p->op.trans_b, p->op.epilogue, p->op.ld_aux, p->a.type, p->a.n_batch,
        p->a.rows,     p->a.columns,  p->a.ld,       p->a.stride,    p->b.type,    p->b.rows, p->b.columns,
        p->b.ld,       p->b.stride,   p->d.type,     p->d.rows,      p->d.columns, p->d.ld,   p->d.stride};
    uint64_t h = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        h = (h ^ (uint64_t)words[i]) * UINT64_C(0x100000001b3);
        h ^= h >> 29;
    }
    return h;
}

static uint32_t align_of(const void *p)
{
    uintptr_t bits = (uintptr_t)p | 256;
    return (uint32_t)(bits & -bits);
}

/* The question for which an algorithm was returned. */
struct algo {
    uint64_t product;
    uint64_t workspace_bytes;
    uint32_t align[4], align_bias, align_aux;
};
_Static_assert(sizeof(struct algo) <= sizeof(cublasLtMatmulAlgo_t), "an algorithm holds it");

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int n_wanted,
                                              cublasLtMatmulHeuristicResult_t *results, int *n_results)
{
    static const char call[] = "cublasLtMatmulAlgoGetHeuristic";
    struct product product;
    *n_results = 0;
    if (stand_in_begin(call))
        return CUBLAS_STATUS_INTERNAL_ERROR;
    if (!product_of(call, &product, handle, desc, a, b, c, d) || !csi_is(call, preference, CSI_PREFERENCE) ||
        n_wanted < 1)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (!product_supported(&product, desc))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    struct algo algo = {.product = hash_of(&product)};
    algo.workspace_bytes = algo.product % 3 * 4096; /* some need none */
    if (algo.workspace_bytes > preference->workspace_bytes)
        algo.workspace_bytes = 0;
    memcpy(algo.align, preference->align, sizeof algo.align);
    algo.align_bias = align_of(desc->bias);
    algo.align_aux = align_of(desc->aux);
    memset(&results[0], 0, sizeof results[0]);
    memcpy(&results[0].algo, &algo, sizeof algo);
    results[0].workspaceSize = algo.workspace_bytes;
    results[0].state = CUBLAS_STATUS_SUCCESS;
    results[0].wavesCount = 1;
    *n_results = 1;
    return CUBLAS_STATUS_SUCCESS;
}

/* --- running a product --- */

struct run {
    struct product p;
    const void *a, *b;
    void *d, *aux, *bias, *workspace;
    size_t workspace_bytes;
    float alpha, beta;
    /* For matrices with less than 16 bytes' alignment another algorithm is used, which adds in another
     * order. */
    bool backwards;
};

static float get(const void *x, cudaDataType t, int64_t i)
{
    if (t == CUDA_R_32F)
        return ((const float *)x)[i];
    uint16_t h = ((const uint16_t *)x)[i];
    return t == CUDA_R_16BF ? bf16_to_float(h) : f16_to_float(h);
}

static void put(void *x, cudaDataType t, int64_t i, float value)
{
    if (t == CUDA_R_32F)
        ((float *)x)[i] = value;
    else
        ((uint16_t *)x)[i] = t == CUDA_R_16BF ? bf16_from_float(value) : f16_from_float(value);
}

static float rounded(float x, cudaDataType t)
{
    float place;
    put(&place, t, 0, x);
    return get(&place, t, 0);
}

/* Writes op(matrix) as dense fp32 columns. */
static void unpack(float *out, const void *matrix, const struct csi_layout *l, int64_t batch, bool transpose)
{
    int64_t row = transpose ? l->columns : 1, column = transpose ? 1 : l->rows;
    for (int64_t c = 0; c < l->columns; c++)
        for (int64_t r = 0; r < l->rows; r++)
            out[r * row + c * column] = get(matrix, l->type, batch * l->stride + c * l->ld + r);
}

static float gelu(float x)
{
    return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
}

static float gelu_slope(float x)
{
    float t = tanhf(0.7978845608f * (x + 0.044715f * x * x * x));
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * 0.7978845608f * (1.0f + 3 * 0.044715f * x * x);
}

/* Finishes one column of D from its products. */
static void finish_column(const struct run *r, int64_t batch, int64_t j, const float *products)
{
    const struct product *p = &r->p;
    const struct csi_operation *op = &p->op;
    for (int64_t i = 0; i < p->d.rows; i++) {
        int64_t at = batch * p->d.stride + j * p->d.ld + i, at_aux = j * op->ld_aux + i;
        float x = r->alpha * products[i];
        if (has_bias(op))
            x += get(r->bias, p->d.type, i);
        if (r->beta != 0) /* CUDA 13.0 also rounds small 16-bit batches in between */
            x = (p->d.n_batch > 1 ? rounded(x, p->d.type) : x) + r->beta * get(r->d, p->d.type, at);
        if (writes_aux(op)) {
            put(r->aux, p->d.type, at_aux, x);
            x = gelu(x);
        } else if (has_aux(op)) {
            x *= gelu_slope(get(r->aux, p->d.type, at_aux));
        }
        put(r->d, p->d.type, at, x);
    }
}

static void run(void *arg)
{
    const struct run *r = arg;
    const struct product *p = &r->p;
    int64_t m = p->d.rows, n = p->d.columns, k = p->op.trans_a ? p->a.rows : p->a.columns;
    float *a = malloc((size_t)(m * k) * sizeof *a), *b = malloc((size_t)(k * n) * sizeof *b);
    float *column = malloc((size_t)m * sizeof *column);
    if (!a || !b || !column)
        abort();
    if (r->workspace)
        memset(r->workspace, 0xff, r->workspace_bytes);
    for (int64_t batch = 0; batch < p->d.n_batch; batch++) {
        unpack(a, r->a, &p->a, batch, p->op.trans_a);
        unpack(b, r->b, &p->b, batch, p->op.trans_b);
        for (int64_t j = 0; j < n; j++) {
            memset(column, 0, (size_t)m * sizeof *column);
            for (int64_t step = 0; step < k; step++) {
                int64_t l = r->backwards ? k - 1 - step : step;
                for (int64_t i = 0; i < m; i++)
                    column[i] += a[l * m + i] * b[j * k + l];
            }
            finish_column(r, batch, j, column);
        }
    }
    if (p->op.epilogue == CUBLASLT_EPILOGUE_BGRADB)
        for (int64_t j = 0; j < n; j++) {
            float sum = 0;
            for (int64_t l = 0; l < k; l++)
                sum += b[j * k + l];
            put(r->bias, p->d.type, j, sum);
        }
    free(a);
    free(b);
    free(column);
}

static size_t matrix_bytes(const struct csi_layout *l)
{
    int64_t elements = (l->n_batch - 1) * l->stride + (l->columns - 1) * l->ld + l->rows;
    return (size_t)(elements * element_bytes(l->type));
}

static bool overlap(const void *x, size_t x_bytes, const void *y, size_t y_bytes)
{
    return (const char *)x < (const char *)y + y_bytes && (const char *)y < (const char *)x + x_bytes;
}

static bool check_aligned(const char *what, const void *p, uint32_t align)
{
    if ((uintptr_t)p % align == 0)
        return true;
    stand_in_misuse("cublasLtMatmul: %s at %p, but the algorithm was asked for %u-byte alignment", what, p,
                    align);
    return false;
}

static bool check_places(const struct run *r, const struct algo *algo, int device)
{
    const struct product *p = &r->p;
    const struct csi_operation *op = &p->op;
    int64_t bytes = element_bytes(p->d.type);
    size_t a_bytes = matrix_bytes(&p->a), b_bytes = matrix_bytes(&p->b), d_bytes = matrix_bytes(&p->d);
    bool good = check_aligned("A", r->a, algo->align[0]) && check_aligned("B", r->b, algo->align[1]) &&
                check_aligned("C", r->d, algo->align[2]) && check_aligned("D", r->d, algo->align[3]) &&
                stand_in_check_device_range("cublasLtMatmul: A", r->a, a_bytes, device) &&
                stand_in_check_device_range("cublasLtMatmul: B", r->b, b_bytes, device) &&
                stand_in_check_device_range("cublasLtMatmul: D", r->d, d_bytes, device);
    if (good && (overlap(r->a, a_bytes, r->d, d_bytes) || overlap(r->b, b_bytes, r->d, d_bytes))) {
        stand_in_misuse("cublasLtMatmul: an operand overlaps the result");
        good = false;
    }
    if (good && (has_bias(op) || has_bias_gradient(op))) {
        int64_t n = has_bias_gradient(op) ? p->d.columns : p->d.rows;
        good = check_aligned("bias", r->bias, algo->align_bias) &&
               stand_in_check_device_range("cublasLtMatmul: bias", r->bias, (size_t)(n * bytes), device);
    }
    if (good && has_aux(op))
        good = check_aligned("aux", r->aux, algo->align_aux) &&
               stand_in_check_device_range("cublasLtMatmul: aux", r->aux,
                                           (size_t)(((p->d.columns - 1) * op->ld_aux + p->d.rows) * bytes),
                                           device);
    if (good && r->workspace_bytes)
        good = check_aligned("workspace", r->workspace, 16) &&
               stand_in_check_device_range("cublasLtMatmul: workspace", r->workspace, r->workspace_bytes,
                                           device);
    return good;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                              cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                              cublasLtMatrixLayout_t c_layout, void *d, cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t *chosen, void *workspace, size_t workspace_bytes,
                              cudaStream_t stream)
{
    static const char call[] = "cublasLtMatmul";
    if (stand_in_begin(call))
        return CUBLAS_STATUS_EXECUTION_FAILED;
    struct run *r = calloc(1, sizeof *r);
    if (!r)
        return CUBLAS_STATUS_ALLOC_FAILED;
    bool good = product_of(call, &r->p, handle, desc, a_layout, b_layout, c_layout, d_layout);
    struct algo algo;
    memset(&algo, 0, sizeof algo);
    if (chosen)
        memcpy(&algo, chosen, sizeof algo);
    if (good && algo.product != hash_of(&r->p)) {
        stand_in_misuse("%s: the algorithm %s", call,
                        chosen ? "is another product's" : "is left to the library");
        good = false;
    }
    if (good && (workspace_bytes < algo.workspace_bytes || (algo.workspace_bytes && !workspace))) {
        stand_in_misuse("%s: a workspace of %zu bytes at %p, the algorithm needs %zu", call, workspace_bytes,
                        workspace, (size_t)algo.workspace_bytes);
        good = false;
    }
    if (good && c != d) {
        stand_in_misuse("%s: C and D at different places are not done here", call);
        good = false;
    }
    if (good) {
        r->a = a;
        r->b = b;
        r->d = d;
        r->aux = (void *)(uintptr_t)desc->aux;
        r->bias = (void *)(uintptr_t)desc->bias;
        r->workspace = workspace;
        r->workspace_bytes = (size_t)algo.workspace_bytes;
        memcpy(&r->alpha, alpha, sizeof r->alpha);
        memcpy(&r->beta, beta, sizeof r->beta);
        for (int i = 0; i < 4; i++)
            r->backwards |= algo.align[i] < 16;
        good = check_places(r, &algo, handle->device);
    }
    if (!good) {
        free(r);
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    r->a = stand_in_reach(r->a);
    r->b = stand_in_reach(r->b);
    r->d = stand_in_reach(r->d);
    r->aux = stand_in_reach(r->aux);
    r->bias = stand_in_reach(r->bias);
    r->workspace = stand_in_reach(r->workspace);
    pthread_mutex_lock(&csi.lock);
    csi.n_products++;
    csi.n_epilogues += has_aux(&r->p.op) || has_bias_gradient(&r->p.op);
    pthread_mutex_unlock(&csi.lock);
    if (stand_in_put(stream, call, run, r, free))
        return CUBLAS_STATUS_EXECUTION_FAILED;
    return CUBLAS_STATUS_SUCCESS;
}
