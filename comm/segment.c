/* SPDX-License-Identifier: Apache-2.0 */
/* segment.c: names of operations and checks of their arguments, the same for every communicator. */
#include "comm/segment.h"

const char *zr_op_name(enum zr_op op)
{
    switch (op) {
    case ZR_OP_ALL_GATHER:
        return "all_gather";
    case ZR_OP_REDUCE_SCATTER:
        return "reduce_scatter";
    case ZR_OP_BROADCAST:
        return "broadcast";
    case ZR_OP_EXCHANGE:
        return "exchange";
    case ZR_OP_AGREE:
        return "agree";
    }
    return "unknown operation";
}

void zr_arena_drop(struct zr_arena *a)
{
    if (a && atomic_fetch_sub(&a->n_held, 1) == 1)
        a->free(a);
}

const char *zr_role_name(enum zr_role r)
{
    static const char *const names[ZR_ROLES] = {"gather",   "reduce",       "gather outer", "reduce outer",
                                                "control",  "model",        "world",        "even pair",
                                                "odd pair", "closing pair", "tied"};
    return (unsigned)r < ZR_ROLES ? names[r] : "unknown role";
}

int zr_range_check(const char *who, int64_t arena_bytes, int64_t off, int64_t bytes, int64_t n)
{
    int64_t all;
    if (off < 0 || bytes < 0 || __builtin_mul_overflow(bytes, n, &all) || all > arena_bytes ||
        off > arena_bytes - all)
        return zr_fail(ZR_ERR_ARG, "%s: %lld times %lld bytes at offset %lld: the arena has %lld bytes", who,
                       (long long)n, (long long)bytes, (long long)off, (long long)arena_bytes);
    return 0;
}

int zr_agree_check(const char *who, int64_t arena_bytes, int64_t off, int32_t n_sum, int32_t n_max)
{
    if (n_sum < 0 || n_max < 0 || off % (int64_t)sizeof(uint64_t))
        return zr_fail(ZR_ERR_ARG,
                       "%s: %d sums and %d maxima at offset %lld: 0 or more at a multiple of 8 are allowed",
                       who, n_sum, n_max, (long long)off);
    return zr_range_check(who, arena_bytes, off, sizeof(uint64_t), (int64_t)n_sum + n_max);
}

static int check_places(const char *who, int i, int size, const struct zr_cut *c)
{
    if (c->each != 0 || c->at_every < 0 || c->at_bytes < 0)
        return zr_fail(
            ZR_ERR_ARG,
            "%s: segment %d: cut.each is %lld, at_every %d, at_bytes %d: with places each is 0, and 0 "
            "or more are allowed",
            who, i, (long long)c->each, c->at_every, c->at_bytes);
    int64_t most = 0;
    for (int p = 0; p < size; p++) {
        int64_t from = zr_cut_at(c, p), end = zr_cut_at(c, p + 1);
        most = end - from > most ? end - from : most;
        if (end < from || end > c->total || (end % 64 && end != c->total))
            return zr_fail(
                ZR_ERR_ARG,
                "%s: segment %d: place %d ends at byte %lld: a multiple of 64 from %lld, where it begins, "
                "to cut.total, %lld, or that itself, is allowed",
                who, i, p, (long long)end, (long long)from, (long long)c->total);
    }
    if (zr_cut_at(c, size) != c->total)
        return zr_fail(ZR_ERR_ARG,
                       "%s: segment %d: place %d, the last, ends at byte %lld: cut.total, %lld, is allowed",
                       who, i, size - 1, (long long)zr_cut_at(c, size), (long long)c->total);
    ZR_ASSERT(!c->most || c->most == most);
    return 0;
}

/* What both kinds of segment have in common. */
static int check_cut(const char *who, int i, int size, const struct zr_cut *c)
{
    int64_t most;
    if (c->at)
        return check_places(who, i, size, c);
    if (c->each < 0 || c->each % 128 != 0 || __builtin_mul_overflow(c->each, (int64_t)size, &most))
        return zr_fail(ZR_ERR_ARG, "%s: segment %d: cut.each is %lld: a multiple of 128 is allowed", who, i,
                       (long long)c->each);
    if (c->total < 0 || c->total > most)
        return zr_fail(ZR_ERR_ARG,
                       "%s: segment %d: cut.total is %lld: 0 to %lld are allowed (%d slices of %lld)", who, i,
                       (long long)c->total, (long long)most, size, (long long)c->each);
    return 0;
}

static int check_inside(const char *who, int i, const char *field, int64_t off, int64_t bytes,
                        int64_t arena_bytes)
{
    if (off < 0 || bytes > arena_bytes || off > arena_bytes - bytes)
        return zr_fail(ZR_ERR_ARG, "%s: segment %d: %s is %lld with %lld bytes: the arena has %lld bytes",
                       who, i, field, (long long)off, (long long)bytes, (long long)arena_bytes);
    return 0;
}

int zr_gather_check(const char *who, int size, int64_t arena_bytes, const struct zr_gather_seg *seg,
                    int n_seg)
{
    for (int i = 0; i < n_seg; i++) {
        const struct zr_gather_seg *g = &seg[i];
        int err = check_cut(who, i, size, &g->cut);
        if (err)
            return err;
        if (g->in_place && g->src != g->dst)
            return zr_fail(ZR_ERR_ARG,
                           "%s: segment %d: in place, but src is %lld and dst %lld: the same is allowed", who,
                           i, (long long)g->src, (long long)g->dst);
        err = check_inside(who, i, "dst", g->dst, g->cut.total, arena_bytes);
        if (!err && !g->in_place)
            err = check_inside(who, i, "src", g->src, zr_cut_most(&g->cut, size), arena_bytes);
        if (err)
            return err;
    }
    return 0;
}

int zr_reduce_check(const char *who, int size, int place, int64_t arena_bytes,
                    const struct zr_reduce_seg *seg, int n_seg)
{
    for (int i = 0; i < n_seg; i++) {
        const struct zr_reduce_seg *g = &seg[i];
        int err = check_cut(who, i, size, &g->cut);
        if (err)
            return err;
        if (g->dtype != ZR_F32 && g->dtype != ZR_BF16)
            return zr_fail(ZR_ERR_NOTSUP, "%s: segment %d: dtype is %s: f32 and bf16 are allowed", who, i,
                           zr_dtype_name(g->dtype));
        int64_t each = zr_dtype_bytes(g->dtype);
        if (g->cut.total % each || g->src % each || g->dst % 4)
            return zr_fail(
                ZR_ERR_ARG,
                "%s: segment %d: cut.total is %lld, src %lld, dst %lld: whole aligned elements are allowed",
                who, i, (long long)g->cut.total, (long long)g->src, (long long)g->dst);
        err = check_inside(who, i, "src", g->src, g->cut.total, arena_bytes);
        /* Equal slices are refused on all ranks alike. Others lie where only their own rank knows. */
        int64_t own = g->cut.at ? zr_cut_bytes(&g->cut, place) : zr_cut_most(&g->cut, size);
        if (!err)
            err = check_inside(who, i, "dst", g->dst, own / each * 4, arena_bytes);
        if (err)
            return err;
    }
    return 0;
}
