/* SPDX-License-Identifier: Apache-2.0 */
/* fold.c: keeps the sums of finished subtrees and merges a subtree with its sibling as soon as both are
 * there. */
#include "comm/fold.h"
#include "kernels/asserts.h"

#include <string.h>

/* The largest power of two below n. */
static int32_t half_of(int32_t n)
{
    int32_t h = 1;
    while (h * 2 < n)
        h *= 2;
    return h;
}

int32_t zr_fold_parts(int32_t n)
{
    int32_t depth = 0, n_blocks = zr_fold_blocks(n);
    while (INT32_C(1) << depth < n_blocks)
        depth++;
    return depth ? 2 * depth + 1 : 0;
}

void zr_fold_begin(struct zr_fold *f, const struct zr_host_kernels *kernels, int32_t n, float *dst,
                   bool accumulate, int64_t n_elems, float *sums, int64_t room)
{
    ZR_ASSERT(n >= 1 && n <= ZR_FOLD_SOURCES && room >= n_elems);
    *f = (struct zr_fold){.kernels = kernels,
                          .n = n,
                          .n_blocks = zr_fold_blocks(n),
                          .dst = dst,
                          .accumulate = accumulate,
                          .n_elems = n_elems,
                          .sums = sums,
                          .room = room};
}

static float *sum_at(const struct zr_fold *f, int32_t i)
{
    return f->sums + i * f->room;
}

static int32_t find_free(const struct zr_fold *f)
{
    int32_t i = 0;
    while (f->part[i].n)
        i++;
    ZR_ASSERT(i < zr_fold_parts(f->n));
    return i;
}

/* Index of a subtree's sum, or -1 if it is not there yet. */
static int32_t find_part(const struct zr_fold *f, struct zr_fold_part p)
{
    for (int32_t i = 0; i < ZR_FOLD_PARTS; i++)
        if (f->part[i].n == p.n && f->part[i].first == p.first)
            return i;
    return -1;
}

/* The two halves of a subtree. */
static void split(struct zr_fold_part p, struct zr_fold_part half[2])
{
    int32_t h = half_of(p.n);
    half[0] = (struct zr_fold_part){p.first, h};
    half[1] = (struct zr_fold_part){p.first + h, p.n - h};
}

/* The subtree that p is a half of. */
static struct zr_fold_part whole_of(const struct zr_fold *f, struct zr_fold_part p)
{
    struct zr_fold_part at = {0, f->n_blocks}, half[2];
    for (;;) {
        split(at, half);
        struct zr_fold_part next = p.first < half[1].first ? half[0] : half[1];
        if (next.first == p.first && next.n == p.n)
            return at;
        at = next;
    }
}

/* Merges p with its sibling if that is there, and then the result with its sibling, and so on. Returns true
 * if the whole tree is complete. */
static bool merge_from(struct zr_fold *f, struct zr_fold_part p)
{
    for (;;) {
        struct zr_fold_part whole = whole_of(f, p), half[2];
        split(whole, half);
        int32_t a = find_part(f, half[0]), b = find_part(f, half[1]);
        if (a < 0 || b < 0)
            return false;
        bool is_all = whole.n == f->n_blocks;
        const void *both[] = {sum_at(f, a), sum_at(f, b)};
        f->kernels->sum_tree(is_all ? f->dst : sum_at(f, a), both, 2, ZERO_F32, f->n_elems,
                             is_all && f->accumulate);
        f->part[b].n = 0;
        f->part[a] = is_all ? (struct zr_fold_part){0, 0} : whole;
        if (is_all)
            return true;
        p = whole;
    }
}

bool zr_fold_add(struct zr_fold *f, int32_t block, const void *const *src, enum zero_dtype dtype)
{
    int32_t left = f->n - block * ZR_FOLD_BLOCK, n = left < ZR_FOLD_BLOCK ? left : ZR_FOLD_BLOCK;
    ZR_ASSERT(block >= 0 && block < f->n_blocks);
    if (f->n_blocks == 1) {
        f->kernels->sum_tree(f->dst, src, n, dtype, f->n_elems, f->accumulate);
        return true;
    }
    int32_t i = find_free(f);
    f->kernels->sum_tree(sum_at(f, i), src, n, dtype, f->n_elems, false);
    f->part[i] = (struct zr_fold_part){block, 1};
    return merge_from(f, f->part[i]);
}
