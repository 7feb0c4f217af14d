/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_versions.h: the features and the known faults of each NCCL version. The table, with the source of each
 * entry, is in nccl_versions.c. */
#ifndef ZR_COMM_NCCL_VERSIONS_H
#define ZR_COMM_NCCL_VERSIONS_H

/* In the format of NCCL_VERSION. */
enum {
    ZR_NCCL_OLDEST = 21400,          /* ncclCommInitRankConfig; older ones are refused */
    ZR_NCCL_HAS_WINDOWS = 22700,     /* ncclCommWindowRegister, symmetric kernels (release 2.27.3) */
    ZR_NCCL_HAS_COPY_ENGINE = 22800, /* copy-engine gathers, NCCL_CTA_POLICY_ZERO (release 2.28.3) */
};

/* A feature that may be faulty, and is then used only on request. */
enum zr_nccl_use {
    ZR_NCCL_USE_WINDOWS = 1, /* symmetric windows, several collectives in a group */
    ZR_NCCL_USE_COPY_ENGINE
};

struct zr_nccl_fault {
    enum zr_nccl_use use;
    /* Faulty versions: from <= v < before. */
    int from, before;
    /* Size of the faulty communicators. 0: any. */
    int world;
    /* Description of the fault, for a message. */
    const char *what;
    const char *source;
};

/* The first fault of this use in this version with so many ranks. NULL: none is known. */
const struct zr_nccl_fault *zr_nccl_fault_of(enum zr_nccl_use use, int version, int world);

#endif
