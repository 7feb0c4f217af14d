/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_versions.h: what depends on NCCL's version: what a version has, and what is known to be wrong with it.
 * The table, with the source of each entry, is in nccl_versions.c. */
#ifndef ZR_COMM_NCCL_VERSIONS_H
#define ZR_COMM_NCCL_VERSIONS_H

/* As NCCL_VERSION counts. */
enum {
    ZR_NCCL_OLDEST = 21400,          /* the first with ncclCommInitRankConfig: older ones are refused */
    ZR_NCCL_HAS_WINDOWS = 22700,     /* ncclCommWindowRegister, symmetric kernels (release 2.27.3) */
    ZR_NCCL_HAS_COPY_ENGINE = 22800, /* copy-engine gathers, NCCL_CTA_POLICY_ZERO (release 2.28.3) */
};

/* What may be wrong, and is then not used unless asked for. */
enum zr_nccl_use {
    ZR_NCCL_USE_WINDOWS = 1, /* symmetric windows, several collectives in a group */
    ZR_NCCL_USE_COPY_ENGINE
};

struct zr_nccl_fault {
    enum zr_nccl_use use;
    /* versions from <= v < before */
    int from, before;
    /* communicators of that many ranks; 0: any */
    int world;
    /* what goes wrong, as a message says it */
    const char *what;
    const char *source;
};

/* The first entry for that use of that version by so many ranks; NULL: none is known. */
const struct zr_nccl_fault *zr_nccl_fault_of(enum zr_nccl_use use, int version, int world);

#endif
