/* SPDX-License-Identifier: Apache-2.0 */
/* body_elements.h: zero, copy, cast, sums, scale, maximum, digest and sum of squares, written once with the
 * vector functions of a vec_*.h.
 *
 * host_portable.c, host_avx2.c and host_avx512.c include it after their vec_*.h. Elements after the last
 * whole vector go to the portable kernels, except in host_sum_squares, which pads its last block. Every
 * struct zr_host_kernels gives the same bits, so they may be mixed. */

static void host_zero(void *dst, int64_t bytes)
{
    if (bytes > 0)
        memset(dst, 0, (size_t)bytes);
}

static void host_copy(void *dst, const void *src, int64_t bytes)
{
    if (bytes > 0)
        vec_copy(dst, src, bytes);
}

static void host_cast(void *dst, enum zero_dtype dst_dtype, const void *src, enum zero_dtype src_dtype,
                      int64_t n)
{
    unsigned char *to = dst;
    const unsigned char *from = src;
    int64_t i = 0;
    if (n <= 0)
        return;
    if (dst_dtype == src_dtype) {
        if (dst != src)
            memmove(dst, src, (size_t)(n * zr_dtype_bytes(dst_dtype)));
        return;
    }
    /* In place to the smaller type, element i of the source is read before the destination reaches its bytes.
     * In place to the larger type is not allowed (device.h). */
    if (dst_dtype == ZERO_BF16)
        for (; i + VEC_LANES <= n; i += VEC_LANES)
            vec_store_bf16(to + 2 * i, vec_load_f32_bytes(from + 4 * i));
    else
        for (; i + VEC_LANES <= n; i += VEC_LANES)
            vec_store_f32_bytes(to + 4 * i, vec_load_bf16(from + 2 * i));
#if VEC_LANES > 1
    if (i < n)
        zr_host_portable.cast(to + i * zr_dtype_bytes(dst_dtype), dst_dtype,
                              from + i * zr_dtype_bytes(src_dtype), src_dtype, n - i);
#endif
}

static void host_add(float *dst, const float *src, int64_t n)
{
    int64_t i = 0;
    for (; i + VEC_LANES <= n; i += VEC_LANES)
        vec_store(dst + i, vec_add(vec_load(dst + i), vec_load(src + i)));
#if VEC_LANES > 1
    if (i < n)
        zr_host_portable.add(dst + i, src + i, n - i);
#endif
}

static void host_scale(float *x, int64_t n, float factor)
{
    const vec f = vec_set(factor);
    int64_t i = 0;
    if (factor == 1)
        return;
    for (; i + VEC_LANES <= n; i += VEC_LANES)
        vec_store(x + i, vec_mul(vec_load(x + i), f));
#if VEC_LANES > 1
    if (i < n)
        zr_host_portable.scale(x + i, n - i, factor);
#endif
}

static void host_sum_squares(struct zr_exact_sum *acc, const void *x, enum zero_dtype dtype, int64_t n)
{
    struct zr_exact_run run = {.to = acc};
    const unsigned char *at = x;
    for (int64_t i = 0; i < n; i += ZR_NORM_BLOCK, at += ZR_NORM_BLOCK * zr_dtype_bytes(dtype)) {
        float block[ZR_NORM_BLOCK] = {0};
        const int64_t left = n - i < ZR_NORM_BLOCK ? n - i : ZR_NORM_BLOCK;
        if (dtype == ZERO_F32 && left == ZR_NORM_BLOCK) {
            zr_exact_run_add(&run, vec_block_squares((const float *)(const void *)at));
            continue;
        }
        if (dtype == ZERO_F32)
            memcpy(block, at, (size_t)left * sizeof *block);
        else if (left == ZR_NORM_BLOCK)
            for (int j = 0; j < ZR_NORM_BLOCK; j += VEC_LANES)
                vec_store(block + j, vec_load_bf16(at + 2 * j));
        else
            zr_host_portable.cast(block, ZERO_F32, at, ZERO_BF16, left);
        zr_exact_run_add(&run, vec_block_squares(block));
    }
    zr_exact_run_end(&run);
}

/* The compiler knows dtype where this is inlined. */
ALWAYS_INLINE float bits_as_float(uint32_t bits, enum zero_dtype dtype)
{
    return zr_bits_float(dtype == ZERO_BF16 ? bits << 16 : bits);
}

#define MAXIMUM(T, dtype)                                                                                    \
    for (int64_t at = 0; at < n * (int64_t)sizeof(T); at += (int64_t)sizeof(T)) {                            \
        T greatest, x;                                                                                       \
        memcpy(&greatest, (const char *)src[0] + at, sizeof(T));                                             \
        for (int s = 1; s < n_src; s++) {                                                                    \
            memcpy(&x, (const char *)src[s] + at, sizeof(T));                                                \
            if (zr_is_greater(bits_as_float(x, dtype), bits_as_float(greatest, dtype)))                      \
                greatest = x;                                                                                \
        }                                                                                                    \
        memcpy((char *)dst + at, &greatest, sizeof(T));                                                      \
    }

static void host_maximum(void *dst, const void *const *src, int n_src, enum zero_dtype dtype, int64_t n)
{
    if (dtype == ZERO_BF16)
        MAXIMUM(uint16_t, ZERO_BF16)
    else
        MAXIMUM(uint32_t, ZERO_F32)
}
#undef MAXIMUM

static void host_digest(uint64_t *sum, const void *at, int64_t bytes, uint64_t first)
{
    const int64_t whole = bytes / 8;
    const char *from = at;
    uint64_t word, total = 0;
    if (bytes <= 0)
        return;
    for (int64_t i = 0; i < whole; i++) {
        memcpy(&word, from + 8 * i, sizeof word);
        total += zr_digest_word(word, first + (uint64_t)i);
    }
    word = 0;
    memcpy(&word, from + 8 * whole, (size_t)(bytes - 8 * whole));
    *sum += total + zr_digest_word(word, first + (uint64_t)whole);
}

/* --- sum_tree ---
 *
 * Up to eight sources are summed in registers. More sources are split at the largest power of two below
 * n_src, as device.h defines the sum. Each half is summed into a block that stays in the first-level
 * cache. */

enum {
    /* most sources that are added directly */
    TREE_DIRECT = 8,
    /* Elements of a block: a multiple of every VEC_LANES. At most four blocks of 2 KiB are on the stack: sum
     * in host_sum_tree, and right in tree_block for 64 (ZR_MAX_SOURCES), 32 and 16 sources. */
    TREE_BLOCK = 512
};

ALWAYS_INLINE vec tree_load(const void *src, enum zero_dtype dtype, int64_t i)
{
    return dtype == ZERO_BF16 ? vec_load_bf16((const unsigned char *)src + 2 * i)
                              : vec_load((const float *)src + i);
}

ALWAYS_INLINE vec tree_2(const void *const *src, int n_src, enum zero_dtype dtype, int64_t i)
{
    vec first = tree_load(src[0], dtype, i);
    return n_src == 1 ? first : vec_add(first, tree_load(src[1], dtype, i));
}

ALWAYS_INLINE vec tree_4(const void *const *src, int n_src, enum zero_dtype dtype, int64_t i)
{
    return n_src <= 2 ? tree_2(src, n_src, dtype, i)
                      : vec_add(tree_2(src, 2, dtype, i), tree_2(src + 2, n_src - 2, dtype, i));
}

ALWAYS_INLINE vec tree_8(const void *const *src, int n_src, enum zero_dtype dtype, int64_t i)
{
    return n_src <= 4 ? tree_4(src, n_src, dtype, i)
                      : vec_add(tree_4(src, 4, dtype, i), tree_4(src + 4, n_src - 4, dtype, i));
}

/* Writes or, with accumulate, adds the tree sum of elements [at, at + n) of n_src sources to dst[0..n). n_src
 * is at most 8, and n a multiple of VEC_LANES. */
ALWAYS_INLINE void tree_unrolled(float *dst, const void *const *sources, int n_src, enum zero_dtype dtype,
                                 int64_t at, int64_t n, bool accumulate)
{
    const void *src[8]; /* copied, so that the compiler knows that dst does not overwrite them */
    for (int s = 0; s < n_src; s++)
        src[s] = sources[s];
    for (int64_t i = 0; i < n; i += VEC_LANES) {
        vec sum = tree_8(src, n_src, dtype, at + i);
        vec_store(dst + i, accumulate ? vec_add(vec_load(dst + i), sum) : sum);
    }
}

static void tree_direct(float *dst, const void *const *src, int n_src, enum zero_dtype dtype, int64_t at,
                        int64_t n, bool accumulate)
{
#define UNROLLED(count)                                                                                      \
    case count:                                                                                              \
        if (dtype == ZERO_BF16 && accumulate)                                                                \
            tree_unrolled(dst, src, count, ZERO_BF16, at, n, true);                                          \
        else if (dtype == ZERO_BF16)                                                                         \
            tree_unrolled(dst, src, count, ZERO_BF16, at, n, false);                                         \
        else if (accumulate)                                                                                 \
            tree_unrolled(dst, src, count, ZERO_F32, at, n, true);                                           \
        else                                                                                                 \
            tree_unrolled(dst, src, count, ZERO_F32, at, n, false);                                          \
        break
    switch (n_src) {
        UNROLLED(1);
        UNROLLED(2);
        UNROLLED(3);
        UNROLLED(4);
        UNROLLED(5);
        UNROLLED(6);
        UNROLLED(7);
        UNROLLED(8);
    }
#undef UNROLLED
}

/* out[0..n) = the tree sum of elements [at, at + n). n is at most TREE_BLOCK and a multiple of VEC_LANES. */
static void tree_block(float *out, const void *const *src, int n_src, enum zero_dtype dtype, int64_t at,
                       int64_t n)
{
    if (n_src <= TREE_DIRECT) {
        tree_direct(out, src, n_src, dtype, at, n, false);
        return;
    }
    int half = 1;
    while (2 * half < n_src)
        half *= 2;
    float right[TREE_BLOCK];
    tree_block(out, src, half, dtype, at, n);
    tree_block(right, src + half, n_src - half, dtype, at, n);
    for (int64_t i = 0; i < n; i += VEC_LANES)
        vec_store(out + i, vec_add(vec_load(out + i), vec_load(right + i)));
}

static void host_sum_tree(float *dst, const void *const *src, int n_src, enum zero_dtype src_dtype, int64_t n,
                          bool accumulate)
{
    int64_t whole = n - n % VEC_LANES;
    if (n <= 0)
        return;
    if (n_src <= TREE_DIRECT) {
        tree_direct(dst, src, n_src, src_dtype, 0, whole, accumulate);
    } else {
        for (int64_t at = 0; at < whole; at += TREE_BLOCK) {
            float sum[TREE_BLOCK]; /* not dst, which may be a source still to be read */
            int64_t count = whole - at < TREE_BLOCK ? whole - at : TREE_BLOCK;
            const void *done = sum;
            tree_block(sum, src, n_src, src_dtype, at, count);
            tree_direct(dst + at, &done, 1, ZERO_F32, 0, count, accumulate);
        }
    }
#if VEC_LANES > 1
    if (whole < n) {
        const void *tail[ZR_MAX_SOURCES];
        for (int s = 0; s < n_src; s++)
            tail[s] = (const char *)src[s] + whole * zr_dtype_bytes(src_dtype);
        zr_host_portable.sum_tree(dst + whole, tail, n_src, src_dtype, n - whole, accumulate);
    }
#endif
}
