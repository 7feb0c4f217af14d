/* SPDX-License-Identifier: Apache-2.0 */
/* cublaslt_stand_in.c: objects and attributes of the cuBLASLt stand-in. Products are in
 * cublaslt_stand_in_run.c. */
#include "test/stand_in/cublaslt_stand_in_inside.h"

#include <stdlib.h>
#include <string.h>

struct csi_state csi = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* --- objects --- */

static void *object_new(enum csi_kind kind, size_t bytes)
{
    struct csi_object *o = calloc(1, bytes);
    if (o) {
        o->kind = kind;
        pthread_mutex_lock(&csi.lock);
        csi.n_open++;
        pthread_mutex_unlock(&csi.lock);
    }
    return o;
}

bool csi_is(const char *call, const void *object, enum csi_kind kind)
{
    const struct csi_object *o = object;
    if (o && o->kind == kind)
        return true;
    stand_in_misuse("%s: %s", call,
                    !o                         ? "an object is NULL"
                    : o->kind == CSI_DESTROYED ? "an object was destroyed before"
                                               : "an object is of another kind");
    return false;
}

static cublasStatus_t destroy(const char *call, void *object, enum csi_kind kind)
{
    if (!csi_is(call, object, kind))
        return CUBLAS_STATUS_INVALID_VALUE;
    struct csi_object *o = object;
    pthread_mutex_lock(&csi.lock);
    o->kind = CSI_DESTROYED;
    o->next = csi.destroyed;
    csi.destroyed = o;
    csi.n_open--;
    pthread_mutex_unlock(&csi.lock);
    return CUBLAS_STATUS_SUCCESS;
}

void cublaslt_stand_in_refuse(uint32_t epilogues)
{
    csi.refused = epilogues;
}

int cublaslt_stand_in_n_open(void)
{
    return csi.n_open;
}

int64_t cublaslt_stand_in_n_products(void)
{
    return csi.n_products;
}

int64_t cublaslt_stand_in_n_epilogues(void)
{
    return csi.n_epilogues;
}

const char *cublasLtGetStatusName(cublasStatus_t status)
{
    switch (status) {
    case CUBLAS_STATUS_SUCCESS:
        return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED:
        return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED:
        return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE:
        return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_EXECUTION_FAILED:
        return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_INTERNAL_ERROR:
        return "CUBLAS_STATUS_INTERNAL_ERROR";
    case CUBLAS_STATUS_NOT_SUPPORTED:
        return "CUBLAS_STATUS_NOT_SUPPORTED";
    }
    return "unknown";
}

size_t cublasLtGetVersion(void)
{
    return 130000;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
    int device;
    *handle = NULL;
    if (stand_in_begin("cublasLtCreate") || cudaGetDevice(&device))
        return CUBLAS_STATUS_NOT_INITIALIZED;
    *handle = object_new(CSI_HANDLE, sizeof **handle);
    if (!*handle)
        return CUBLAS_STATUS_ALLOC_FAILED;
    (*handle)->device = device;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle)
{
    return destroy("cublasLtDestroy", handle, CSI_HANDLE);
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *out, cudaDataType type, uint64_t rows,
                                          uint64_t columns, int64_t ld)
{
    *out = NULL;
    if (stand_in_begin("cublasLtMatrixLayoutCreate"))
        return CUBLAS_STATUS_ALLOC_FAILED;
    *out = object_new(CSI_LAYOUT, sizeof **out);
    if (!*out)
        return CUBLAS_STATUS_ALLOC_FAILED;
    (*out)->is = (struct csi_layout){type, 1, (int64_t)rows, (int64_t)columns, ld, 0};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout)
{
    return destroy("cublasLtMatrixLayoutDestroy", layout, CSI_LAYOUT);
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *out, cublasComputeType_t compute,
                                        cudaDataType_t scale)
{
    *out = NULL;
    if (stand_in_begin("cublasLtMatmulDescCreate"))
        return CUBLAS_STATUS_ALLOC_FAILED;
    *out = object_new(CSI_DESC, sizeof **out);
    if (!*out)
        return CUBLAS_STATUS_ALLOC_FAILED;
    (*out)->is =
        (struct csi_operation){.compute = compute, .scale = scale, .epilogue = CUBLASLT_EPILOGUE_DEFAULT};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc)
{
    return destroy("cublasLtMatmulDescDestroy", desc, CSI_DESC);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *out)
{
    *out = NULL;
    if (stand_in_begin("cublasLtMatmulPreferenceCreate"))
        return CUBLAS_STATUS_ALLOC_FAILED;
    *out = object_new(CSI_PREFERENCE, sizeof **out);
    if (!*out)
        return CUBLAS_STATUS_ALLOC_FAILED;
    (*out)->splits = 7;
    for (int i = 0; i < 4; i++)
        (*out)->align[i] = 256;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference)
{
    return destroy("cublasLtMatmulPreferenceDestroy", preference, CSI_PREFERENCE);
}

/* --- attributes --- */

static cublasStatus_t set(const char *call, int attr, void *to, size_t to_bytes, const void *from,
                          size_t bytes)
{
    if (!to || bytes != to_bytes || !from) {
        stand_in_misuse("%s: attribute %d of %zu bytes %s", call, attr, bytes,
                        to ? "has another size" : "is not known here");
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    memcpy(to, from, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

#define FIELD(x) (to = &(x), to_bytes = sizeof(x))

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attr, const void *from,
                                                size_t bytes)
{
    static const char call[] = "cublasLtMatrixLayoutSetAttribute";
    void *to = NULL;
    size_t to_bytes = 0;
    if (!csi_is(call, layout, CSI_LAYOUT))
        return CUBLAS_STATUS_INVALID_VALUE;
    switch (attr) {
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT:
        FIELD(layout->is.n_batch);
        break;
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET:
        FIELD(layout->is.stride);
        break;
    }
    return set(call, (int)attr, to, to_bytes, from, bytes);
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attr,
                                              const void *from, size_t bytes)
{
    static const char call[] = "cublasLtMatmulDescSetAttribute";
    void *to = NULL;
    size_t to_bytes = 0;
    if (!csi_is(call, desc, CSI_DESC))
        return CUBLAS_STATUS_INVALID_VALUE;
    switch (attr) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
        FIELD(desc->is.trans_a);
        break;
    case CUBLASLT_MATMUL_DESC_TRANSB:
        FIELD(desc->is.trans_b);
        break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
        FIELD(desc->is.epilogue);
        break;
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
        FIELD(desc->bias);
        break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
        FIELD(desc->aux);
        break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
        FIELD(desc->is.ld_aux);
        break;
    }
    return set(call, (int)attr, to, to_bytes, from, bytes);
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
                                                    cublasLtMatmulPreferenceAttributes_t attr,
                                                    const void *from, size_t bytes)
{
    static const char call[] = "cublasLtMatmulPreferenceSetAttribute";
    void *to = NULL;
    size_t to_bytes = 0;
    if (!csi_is(call, p, CSI_PREFERENCE))
        return CUBLAS_STATUS_INVALID_VALUE;
    switch (attr) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
        FIELD(p->workspace_bytes);
        break;
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
        FIELD(p->splits);
        break;
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
        FIELD(p->align[attr - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES]);
        break;
    }
    return set(call, (int)attr, to, to_bytes, from, bytes);
}
