/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_plans.h: what the libraries behind gemm.h share: a table of operations, and a table of plans, one per
 * requested product. */
#ifndef ZR_KERNELS_GEMM_PLANS_H
#define ZR_KERNELS_GEMM_PLANS_H

#include "kernels/gemm/gemm.h"

struct zr_gemm_ops {
    void (*close)(struct zr_gemm *g);
    /* args have passed the checks that hold everywhere (gemm.c). */
    int (*run)(struct zr_gemm *g, const struct zr_gemm_args *args);
    bool (*can)(struct zr_gemm *g, const struct zr_gemm_args *args);
};

struct zr_gemm {
    const struct zr_gemm_ops *ops;
};

/* Everything that a plan depends on. It consists of plain numbers without padding, compared and hashed as
 * bytes. */
struct zr_gemm_key {
    int64_t m, n, k, lda, ldb, ldc, n_batch, stride_a, stride_b, stride_c, ldaux;
    int32_t trans_a, trans_b, ab_dtype, c_dtype, has_bias, beta, epilogue;
    /* alignment of the pointers, in the library's encoding */
    int32_t align;
};

/* The first member of each library's plan. */
struct zr_gemm_plan {
    struct zr_gemm_key key;
    uint64_t hash;
};

struct zr_gemm_plans {
    /* hash table with open addressing, at most half full */
    struct zr_gemm_plan **table;
    size_t n_places, n_used;
};

/* Makes a key. Fields without a meaning, such as the strides of a single product, are 0; so is align. */
struct zr_gemm_key zr_gemm_key_of(const struct zr_gemm_args *args);

int zr_gemm_plans_open(struct zr_gemm_plans *plans);
/* Frees the table, and each plan by free_plan. */
void zr_gemm_plans_close(struct zr_gemm_plans *plans, void (*free_plan)(struct zr_gemm_plan *plan));
struct zr_gemm_plan *zr_gemm_plans_find(const struct zr_gemm_plans *plans, const struct zr_gemm_key *key);
/* Adds a plan whose key is not in the table yet, and takes it over. On failure (ZERO_ERR_NOMEM) it stays the
 * caller's. */
int zr_gemm_plans_add(struct zr_gemm_plans *plans, struct zr_gemm_plan *plan);

#endif
