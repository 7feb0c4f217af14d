/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_cache.c: a hash table of prepared matrix products, by their arguments. */
#include "kernels/gemm/gemm_cache.h"
#include "kernels/alloc.h"

#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(struct zr_gemm_key) == 11 * 8 + 8 * 4, "a key has no padding to compare");

struct zr_gemm_key zr_gemm_key_of(const struct zr_gemm_args *a)
{
    bool batch = a->n_batch > 1;
    return (struct zr_gemm_key){
        .m = a->m,
        .n = a->n,
        .k = a->k,
        .lda = a->lda,
        .ldb = a->ldb,
        .ldc = a->ldc,
        .n_batch = a->n_batch,
        .stride_a = batch ? a->stride_a : 0,
        .stride_b = batch ? a->stride_b : 0,
        .stride_c = batch ? a->stride_c : 0,
        .ldaux = a->aux ? a->ldaux : 0,
        .trans_a = a->trans_a,
        .trans_b = a->trans_b,
        .ab_dtype = (int32_t)a->ab_dtype,
        .c_dtype = (int32_t)a->c_dtype,
        .has_bias = a->bias != NULL,
        .beta = a->beta != 0,
        .epilogue = (int32_t)a->epilogue,
    };
}

static uint64_t hash_key(const struct zr_gemm_key *k)
{
    /* FNV-1a over the words: keys are few and read once per product. */
    const unsigned char *bytes = (const unsigned char *)k;
    uint64_t h = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < sizeof *k; i += 8) {
        uint64_t word;
        memcpy(&word, bytes + i, 8);
        h = (h ^ word) * UINT64_C(0x100000001b3);
        h ^= h >> 29;
    }
    return h;
}

static struct zr_gemm_prepared **bucket_of(const struct zr_gemm_cache *p, const struct zr_gemm_key *k,
                                           uint64_t hash)
{
    size_t i = hash & (p->n_buckets - 1);
    while (p->table[i] && (p->table[i]->hash != hash || memcmp(&p->table[i]->key, k, sizeof *k) != 0))
        i = (i + 1) & (p->n_buckets - 1);
    return &p->table[i];
}

int zr_gemm_cache_open(struct zr_gemm_cache *p)
{
    *p = (struct zr_gemm_cache){.n_buckets = 64};
    return ZR_ZALLOC(p->table, p->n_buckets, "a table of %zu products", p->n_buckets);
}

void zr_gemm_cache_close(struct zr_gemm_cache *p, void (*free_one)(struct zr_gemm_prepared *prepared))
{
    for (size_t i = 0; p->table && i < p->n_buckets; i++)
        if (p->table[i])
            free_one(p->table[i]);
    free(p->table);
    *p = (struct zr_gemm_cache){0};
}

struct zr_gemm_prepared *zr_gemm_cache_find(const struct zr_gemm_cache *p, const struct zr_gemm_key *key)
{
    return *bucket_of(p, key, hash_key(key));
}

static int grow(struct zr_gemm_cache *p)
{
    struct zr_gemm_prepared **old = p->table;
    size_t n_old = p->n_buckets;
    struct zr_gemm_prepared **table;
    ZR_TRY(ZR_ZALLOC(table, 2 * n_old, "a table of %zu products", 2 * n_old));
    p->table = table;
    p->n_buckets = 2 * n_old;
    for (size_t i = 0; i < n_old; i++)
        if (old[i])
            *bucket_of(p, &old[i]->key, old[i]->hash) = old[i];
    free(old);
    return 0;
}

int zr_gemm_cache_add(struct zr_gemm_cache *p, struct zr_gemm_prepared *prepared)
{
    if (2 * (p->n_used + 1) > p->n_buckets)
        ZR_TRY(grow(p));
    prepared->hash = hash_key(&prepared->key);
    *bucket_of(p, &prepared->key, prepared->hash) = prepared;
    p->n_used++;
    return 0;
}
