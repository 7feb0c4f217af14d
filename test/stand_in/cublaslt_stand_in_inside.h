/* SPDX-License-Identifier: Apache-2.0 */
/* cublaslt_stand_in_inside.h: what the files of the cuBLASLt stand-in share. One lock over its counts. */
#ifndef ZR_TEST_CUBLASLT_STAND_IN_INSIDE_H
#define ZR_TEST_CUBLASLT_STAND_IN_INSIDE_H

#include "test/stand_in/cublaslt_stand_in.h"
#include "test/stand_in/stand_in.h"

#include <cublasLt.h>

#include <pthread.h>

enum csi_kind { CSI_HANDLE = 0x1a11d1e5, CSI_LAYOUT, CSI_DESC, CSI_PREFERENCE, CSI_DESTROYED };

/* The head of each. Destroyed objects are kept, so that their use can be told. */
struct csi_object {
    enum csi_kind kind;
    struct csi_object *next;
};

struct cublasLtContext {
    struct csi_object object;
    int device;
};

struct cublaslt_layout {
    struct csi_object object;
    struct csi_layout {
        cudaDataType type;
        int32_t n_batch;
        int64_t rows, columns, ld, stride;
    } is;
};

struct cublaslt_matmul_desc {
    struct csi_object object;
    struct csi_operation {
        cublasComputeType_t compute;
        cudaDataType_t scale;
        int32_t trans_a, trans_b;
        uint32_t epilogue;
        int64_t ld_aux;
    } is;
    /* aux: written where the epilogue says so */
    const void *bias, *aux;
};

struct cublaslt_preference {
    struct csi_object object;
    uint64_t workspace_bytes;
    /* of A, B, C, D */
    uint32_t splits, align[4];
};

struct csi_state {
    pthread_mutex_t lock;
    /* list of those that were destroyed, to know them when they are used again */
    struct csi_object *destroyed;
    int n_open;
    uint32_t refused;
    int64_t n_products, n_epilogues;
};

extern struct csi_state csi;

/* Whether object is a living one of that kind; else it is misuse by call. */
bool csi_is(const char *call, const void *object, enum csi_kind kind);

#endif
