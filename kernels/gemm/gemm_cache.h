/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_cache.h: what gemm_onednn.c and gemm_cublaslt.c share: a table of operations, and a cache of prepared
 * products. */
#ifndef ZR_KERNELS_GEMM_CACHE_H
#define ZR_KERNELS_GEMM_CACHE_H

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

/* Everything that a prepared product depends on. It consists of plain numbers without padding, compared and
 * hashed as bytes. bias_dtype is not in it: oneDNN gets the bias as f32, and cuBLASLt takes only c_dtype. */
struct zr_gemm_key {
    int64_t m, n, k, lda, ldb, ldc, n_batch, stride_a, stride_b, stride_c, ldaux;
    int32_t trans_a, trans_b, ab_dtype, c_dtype, has_bias, beta, epilogue;
    /* Alignments of A, B, C and the bias or sum, 8 bits each (gemm_cublaslt.c). 0 with oneDNN. */
    int32_t align;
};

/* The first member of struct product in gemm_onednn.c and gemm_cublaslt.c: what was prepared for one key. */
struct zr_gemm_prepared {
    struct zr_gemm_key key;
    uint64_t hash;
};

struct zr_gemm_cache {
    /* hash table with open addressing, at most half full */
    struct zr_gemm_prepared **table;
    size_t n_buckets, n_used;
};

/* Makes a key. Fields without a meaning, such as the strides of a single product, are 0. So is align, which
 * gemm_cublaslt.c fills in. */
struct zr_gemm_key zr_gemm_key_of(const struct zr_gemm_args *args);

int zr_gemm_cache_open(struct zr_gemm_cache *cache);
/* Frees the table, and each prepared product by free_one. */
void zr_gemm_cache_close(struct zr_gemm_cache *cache, void (*free_one)(struct zr_gemm_prepared *prepared));
struct zr_gemm_prepared *zr_gemm_cache_find(const struct zr_gemm_cache *cache, const struct zr_gemm_key *key);
/* Adds a prepared product whose key is not in the table yet, and takes it over. On failure (ZERO_ERR_NOMEM)
 * it stays the caller's. */
int zr_gemm_cache_add(struct zr_gemm_cache *cache, struct zr_gemm_prepared *prepared);

#endif
