/* SPDX-License-Identifier: Apache-2.0 */
/* segment.c: checks of the segments that a program passes to a gather or a sum, and copies of them. */
#include "comm/segment.h"

#include <string.h>

int zr_op_lists(const struct zr_comm_op *op)
{
    int n = 0;
    for (int i = 0; i < (int)op->post.n_seg; i++)
        n += zr_op_cut(op, i)->at != NULL;
    return n;
}

void zr_op_keep(struct zr_comm_op *op, int size, void *segs, int64_t *lists)
{
    size_t each = op->post.op == ZR_OP_ALL_GATHER ? sizeof *op->gather : sizeof *op->reduce;
    memcpy(segs, op->seg, op->post.n_seg * each);
    op->seg = segs;
    for (int i = 0; i < (int)op->post.n_seg; i++)
        lists += zr_cut_keep((struct zr_cut *)zr_op_cut(op, i), size, lists);
}

static int check_places(int i, int size, const struct zr_cut *c)
{
    if (c->each != 0 || c->at_every < 0 || c->at_bytes < 0)
        return zr_fail(ZERO_ERR_ARG,
                       "segment %d: cut.each is %lld, at_every %d, at_bytes %d: with places each is 0, and 0 "
                       "or more are allowed",
                       i, (long long)c->each, c->at_every, c->at_bytes);
    int64_t most = 0;
    for (int p = 0; p < size; p++) {
        int64_t from = zr_cut_at(c, p), end = zr_cut_at(c, p + 1);
        most = end - from > most ? end - from : most;
        if (end < from || end > c->total || (end % 64 && end != c->total))
            return zr_fail(
                ZERO_ERR_ARG,
                "segment %d: place %d ends at byte %lld: a multiple of 64 from %lld, where it begins, "
                "to cut.total, %lld, or that itself, is allowed",
                i, p, (long long)end, (long long)from, (long long)c->total);
    }
    if (zr_cut_at(c, size) != c->total)
        return zr_fail(ZERO_ERR_ARG,
                       "segment %d: place %d, the last, ends at byte %lld: cut.total, %lld, is allowed", i,
                       size - 1, (long long)zr_cut_at(c, size), (long long)c->total);
    ZR_ASSERT(!c->most || c->most == most);
    return 0;
}

/* Checks the cut, which gathers and sums have in common. */
static int check_cut(int i, int size, const struct zr_cut *c)
{
    int64_t most;
    if (c->at)
        return check_places(i, size, c);
    if (c->each < 0 || c->each % 128 != 0 || __builtin_mul_overflow(c->each, (int64_t)size, &most))
        return zr_fail(ZERO_ERR_ARG, "segment %d: cut.each is %lld: a multiple of 128 is allowed", i,
                       (long long)c->each);
    if (c->total < 0 || c->total > most)
        return zr_fail(ZERO_ERR_ARG,
                       "segment %d: cut.total is %lld: 0 to %lld are allowed (%d slices of %lld)", i,
                       (long long)c->total, (long long)most, size, (long long)c->each);
    return 0;
}

static int check_inside(int i, const char *field, int64_t off, int64_t bytes, int64_t arena_bytes)
{
    if (off < 0 || bytes > arena_bytes || off > arena_bytes - bytes)
        return zr_fail(ZERO_ERR_ARG, "segment %d: %s is %lld with %lld bytes: the arena has %lld bytes", i,
                       field, (long long)off, (long long)bytes, (long long)arena_bytes);
    return 0;
}

int zr_gather_check(int size, int64_t arena_bytes, const struct zr_gather_seg *seg, int n_seg)
{
    for (int i = 0; i < n_seg; i++) {
        const struct zr_gather_seg *g = &seg[i];
        int err = check_cut(i, size, &g->cut);
        if (err)
            return err;
        if (g->in_place && g->src != g->dst)
            return zr_fail(ZERO_ERR_ARG,
                           "segment %d: in place, but src is %lld and dst %lld: the same is allowed", i,
                           (long long)g->src, (long long)g->dst);
        err = check_inside(i, "dst", g->dst, g->cut.total, arena_bytes);
        if (!err && !g->in_place)
            err = check_inside(i, "src", g->src, zr_cut_most(&g->cut, size), arena_bytes);
        if (err)
            return err;
    }
    return 0;
}

int zr_reduce_check(int size, int place, int64_t arena_bytes, const struct zr_reduce_seg *seg, int n_seg)
{
    for (int i = 0; i < n_seg; i++) {
        const struct zr_reduce_seg *g = &seg[i];
        int err = check_cut(i, size, &g->cut);
        if (err)
            return err;
        if (g->dtype != ZERO_F32 && g->dtype != ZERO_BF16)
            return zr_fail(ZERO_ERR_NOTSUP, "segment %d: dtype is %s: f32 and bf16 are allowed", i,
                           zr_dtype_name(g->dtype));
        int64_t each = zr_dtype_bytes(g->dtype);
        if (g->cut.total % each || g->src % each || g->dst % 4)
            return zr_fail(
                ZERO_ERR_ARG,
                "segment %d: cut.total is %lld, src %lld, dst %lld: whole aligned elements are allowed", i,
                (long long)g->cut.total, (long long)g->src, (long long)g->dst);
        err = check_inside(i, "src", g->src, g->cut.total, arena_bytes);
        /* Equal slices are refused on all ranks. With a list, only the rank itself knows where its slice
         * lies. */
        int64_t own = g->cut.at ? zr_cut_bytes(&g->cut, place) : zr_cut_most(&g->cut, size);
        if (!err)
            err = check_inside(i, "dst", g->dst, own / each * 4, arena_bytes);
        if (err)
            return err;
    }
    return 0;
}
