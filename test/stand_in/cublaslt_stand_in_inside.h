/* SPDX-License-Identifier: Apache-2.0 */
/* cublaslt_stand_in_inside.h: declarations that the files of the cuBLASLt stand-in share. One lock
 * protects its counts. */
#ifndef ZR_TEST_CUBLASLT_STAND_IN_INSIDE_H
#define ZR_TEST_CUBLASLT_STAND_IN_INSIDE_H

#include "test/stand_in/cublaslt_stand_in.h"
#include "test/stand_in/stand_in.h"

#include <cublasLt.h>

#include <pthread.h>

enum csi_kind { CSI_HANDLE = 0x1a11d1e5, CSI_LAYOUT, CSI_DESC, CSI_PREFERENCE, CSI_DESTROYED };

/* The head of each object. Destroyed objects are kept, so that their use can be reported. */
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
    /* aux: written if the epilogue says so */
    const void *bias, *aux;
};

struct cublaslt_preference {
    struct csi_object object;
    uint64_t workspace_bytes;
    /* for A, B, C, D */
    uint32_t splits, align[4];
};

struct csi_state {
    pthread_mutex_t lock;
    /* list of destroyed objects, which shows their later use */
    struct csi_object *destroyed;
    int n_open;
    uint32_t refused;
    int64_t n_products, n_epilogues;
};

extern struct csi_state csi;

/* Returns whether object is a living one of that kind. Otherwise reports a misuse by call. */
bool csi_is(const char *call, const void *object, enum csi_kind kind);

#endif
