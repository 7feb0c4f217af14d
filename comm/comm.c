/* SPDX-License-Identifier: Apache-2.0 */
/* comm.c: the front end of all communicators. It checks the arguments of an operation, describes the
 * operation in the form that ranks compare, numbers it, passes it to the backend, and counts it when it is
 * done. */
#include "comm/comm.h"
#include "comm/flight.h"
#include "comm/post.h"
#include "comm/segment.h"

#include <limits.h>

/* ---- names ---- */

const char *zr_op_name(enum zr_op op)
{
    static const char *const names[] = {NULL,    "all_gather", "reduce_scatter", "broadcast", "exchange",
                                        "agree", "all_reduce", "all_to_all",     "shift"};
    return op >= ZR_OP_ALL_GATHER && op < ZR_OPS ? names[op] : "unknown operation";
}

const char *zr_role_name(enum zr_role r)
{
    static const char *const names[ZR_ROLES] = {"gather",    "reduce",   "gather outer", "reduce outer",
                                                "control",   "tp",       "cp",           "world",
                                                "even pair", "odd pair", "closing pair", "tied"};
    return (unsigned)r < ZR_ROLES ? names[r] : "unknown role";
}

/* ---- arenas ---- */

void zr_arena_drop(struct zr_arena *a)
{
    if (a && atomic_fetch_sub(&a->n_held, 1) == 1)
        a->free(a);
}

int zr_comm_arena(struct zr_comm *c, int64_t bytes, struct zr_arena **out)
{
    int err = c->ops->arena(c, bytes, out);
    if (!err && c->watch)
        c->watch->made(c->watch, c, *out);
    return err;
}

int zr_comm_check_reserve(const struct zr_comm *c, const struct zr_arena *a)
{
    int64_t taken = a->taken + c->reserve;
    if (a->bytes > taken && (!taken || a->bytes % 256 == 0))
        return 0;
    return zr_fail(ZERO_ERR_ARG,
                   "%s %s: the arena is %lld bytes, but must exceed libzero's own part of it (%lld)%s",
                   c->ops->name, zr_role_name(c->role), (long long)a->bytes, (long long)taken,
                   taken ? ", a multiple of 256," : "");
}

int zr_comm_attach(struct zr_comm *c, struct zr_arena *a)
{
    if (c->held)
        return zr_fail(ZERO_ERR_ORDER, "%s %s: an arena is attached once", c->ops->name,
                       zr_role_name(c->role));
    atomic_fetch_add(&a->n_held, 1);
    c->held = a;
    int err = c->ops->attach ? c->ops->attach(c, a) : 0;
    if (err) {
        c->held = NULL;
        zr_arena_drop(a);
        return err;
    }
    a->taken += c->reserve;
    c->arena = a->base;
    return 0;
}

/* ---- operations ---- */

/* Adds "shm all_gather" to the message of a check. */
static int refuse_op(const struct zr_comm *c, const struct zr_comm_op *op, int err)
{
    return zr_fail_more(err, "%s %s", c->ops->name, zr_op_name((enum zr_op)op->post.op));
}

static int check_ready(const struct zr_comm *c, enum zr_op op, int n_seg)
{
    int most = c->ops->most_segs;
    if (!c->arena && c->ops->attach)
        return zr_fail(ZERO_ERR_ORDER, "%s %s: %s: there is no arena yet", c->ops->name,
                       zr_role_name(c->role), zr_op_name(op));
    if (n_seg < 0 || (most && n_seg > most))
        return zr_fail(ZERO_ERR_ARG, "%s %s: %s: %d segments: 0 to %d are allowed", c->ops->name,
                       zr_role_name(c->role), zr_op_name(op), n_seg, most ? most : INT_MAX);
    return 0;
}

static int check_range(const struct zr_comm *c, const struct zr_comm_op *op, int64_t bytes, int64_t n)
{
    int64_t all, arena_bytes = zr_comm_usable(c);
    if (op->off < 0 || bytes < 0 || __builtin_mul_overflow(bytes, n, &all) || all > arena_bytes ||
        op->off > arena_bytes - all)
        return refuse_op(c, op,
                         zr_fail(ZERO_ERR_ARG,
                                 "%lld times %lld bytes at offset %lld: the arena has %lld bytes",
                                 (long long)n, (long long)bytes, (long long)op->off, (long long)arena_bytes));
    return 0;
}

/* Numbers a checked operation, and has the backend put it on the stream. */
static int put_op(struct zr_comm *c, struct zr_stream *s, struct zr_comm_op *op, const struct zr_tag *tag)
{
    op->post.unit = tag->unit;
    op->post.step = tag->step;
    op->post.call_hash = tag->call_hash;
    op->mark = tag->mark;
    if (c->watch)
        s = c->watch->puts(c->watch, c, s, op);
    if (!c->ops->runs_failed && zr_first_code(c->failure))
        return 0;
    op->post.seq = ++c->n_issued;
    int err = (op->arrays.src ? c->ops->run_arrays : c->ops->run)(c, s, op);
    if (err)
        c->n_issued--;
    return err;
}

int zr_comm_all_gather(struct zr_comm *c, struct zr_stream *s, const struct zr_gather_seg *seg, int n_seg,
                       const struct zr_tag *tag)
{
    struct zr_comm_op op = {.post = {.op = ZR_OP_ALL_GATHER, .root = -1, .n_seg = (uint32_t)n_seg},
                            .gather = seg};
    int err = check_ready(c, ZR_OP_ALL_GATHER, n_seg);
    if (err)
        return err;
    err = zr_gather_check(c->group.size, zr_comm_usable(c), seg, n_seg);
    if (err)
        return refuse_op(c, &op, err);
    for (int i = 0; i < n_seg; i++) {
        const struct zr_gather_seg *g = &seg[i];
        const int64_t v[] = {g->in_place, g->src, g->dst, g->cut.each, g->cut.total};
        zr_post_numbers(&op.post, v, sizeof v / sizeof *v);
        zr_post_cut(&op.post, &g->cut, c->group.size);
        op.wire_bytes += zr_gather_wire(&g->cut, c->group.size, c->group.rank, c->packs_gathers);
    }
    return put_op(c, s, &op, tag);
}

int zr_comm_reduce_scatter(struct zr_comm *c, struct zr_stream *s, const struct zr_reduce_seg *seg, int n_seg,
                           const struct zr_tag *tag)
{
    struct zr_comm_op op = {.post = {.op = ZR_OP_REDUCE_SCATTER, .root = -1, .n_seg = (uint32_t)n_seg},
                            .reduce = seg};
    int err = check_ready(c, ZR_OP_REDUCE_SCATTER, n_seg);
    if (err)
        return err;
    err = zr_reduce_check(c->group.size, c->group.rank, zr_comm_usable(c), seg, n_seg);
    if (err)
        return refuse_op(c, &op, err);
    for (int i = 0; i < n_seg; i++) {
        const struct zr_reduce_seg *g = &seg[i];
        const int64_t v[] = {g->src, g->cut.each, g->cut.total, g->dtype, g->accumulate};
        zr_post_numbers(&op.post, v, sizeof v / sizeof *v);
        zr_post_cut(&op.post, &g->cut, c->group.size);
        op.wire_bytes += zr_reduce_wire(&g->cut, c->group.size, c->group.rank, c->packs_sums);
    }
    return put_op(c, s, &op, tag);
}

int zr_comm_broadcast(struct zr_comm *c, struct zr_stream *s, int64_t off, int64_t bytes, int root,
                      const struct zr_tag *tag)
{
    struct zr_comm_op op = {.post = {.op = ZR_OP_BROADCAST, .root = root, .bytes = bytes}, .off = off};
    if (root < 0 || root >= c->group.size)
        return refuse_op(c, &op,
                         zr_fail(ZERO_ERR_ARG, "root is %d: 0 to %d are allowed", root, c->group.size - 1));
    int err = check_ready(c, ZR_OP_BROADCAST, 0);
    if (!err)
        err = check_range(c, &op, bytes, 1);
    if (err)
        return err;
    zr_post_numbers(&op.post, &off, 1);
    op.wire_bytes = c->group.rank == root ? 0 : bytes;
    return put_op(c, s, &op, tag);
}

int zr_comm_exchange(struct zr_comm *c, struct zr_stream *s, int64_t off, int64_t slot_bytes,
                     const struct zr_tag *tag)
{
    struct zr_comm_op op = {.post = {.op = ZR_OP_EXCHANGE, .root = -1, .bytes = slot_bytes}, .off = off};
    int err = check_ready(c, ZR_OP_EXCHANGE, 0);
    if (!err)
        err = check_range(c, &op, slot_bytes, c->group.size);
    if (err)
        return err;
    zr_post_numbers(&op.post, &off, 1);
    op.wire_bytes = slot_bytes * (c->group.size - 1);
    return put_op(c, s, &op, tag);
}

int zr_comm_agree(struct zr_comm *c, struct zr_stream *s, int64_t off, int32_t n_sum, int32_t n_max,
                  const struct zr_tag *tag)
{
    const int64_t n = (int64_t)n_sum + n_max, word = sizeof(uint64_t), v[] = {off, n_sum, n_max};
    struct zr_comm_op op = {.post = {.op = ZR_OP_AGREE, .root = -1, .bytes = n * word},
                            .off = off,
                            .n_sum = n_sum,
                            .n_max = n_max};
    int err = check_ready(c, ZR_OP_AGREE, 0);
    if (!err && (n_sum < 0 || n_max < 0 || off % word))
        err = refuse_op(
            c, &op,
            zr_fail(ZERO_ERR_ARG,
                    "%d sums and %d maxima at offset %lld: 0 or more at a multiple of 8 are allowed", n_sum,
                    n_max, (long long)off));
    if (!err)
        err = check_range(c, &op, word, n);
    if (err)
        return err;
    zr_post_numbers(&op.post, v, sizeof v / sizeof *v);
    op.wire_bytes = zr_agree_wire(c->group.size, c->group.rank, n_sum, n_max);
    return put_op(c, s, &op, tag);
}

/* Checks the places of an operation that sends parts: n of them, from op->off to op->to. */
static int check_parts(const struct zr_comm *c, const struct zr_comm_op *op, int64_t bytes, int64_t n)
{
    struct zr_comm_op to = *op;
    to.off = op->to;
    int err = check_ready(c, (enum zr_op)op->post.op, 0);
    err = err ? err : check_range(c, op, bytes, n);
    err = err ? err : check_range(c, &to, bytes, n);
    if (err || op->off + bytes * n <= op->to || op->to + bytes * n <= op->off)
        return err;
    return refuse_op(c, op,
                     zr_fail(ZERO_ERR_ARG, "%lld bytes at offsets %lld and %lld: no overlap is allowed",
                             (long long)(bytes * n), (long long)op->off, (long long)op->to));
}

int zr_comm_all_to_all(struct zr_comm *c, struct zr_stream *s, int64_t src, int64_t dst, int64_t bytes,
                       const struct zr_tag *tag)
{
    const int64_t v[] = {src, dst};
    struct zr_comm_op op = {
        .post = {.op = ZR_OP_ALL_TO_ALL, .root = -1, .bytes = bytes}, .off = src, .to = dst};
    ZR_TRY(check_parts(c, &op, bytes, c->group.size));
    zr_post_numbers(&op.post, v, sizeof v / sizeof *v);
    op.wire_bytes = bytes * (c->group.size - 1);
    return put_op(c, s, &op, tag);
}

int zr_comm_shift(struct zr_comm *c, struct zr_stream *s, int64_t src, int64_t dst, int64_t bytes, int32_t by,
                  const struct zr_tag *tag)
{
    const int64_t v[] = {src, dst, by};
    struct zr_comm_op op = {
        .post = {.op = ZR_OP_SHIFT, .root = -1, .bytes = bytes}, .off = src, .to = dst, .by = by};
    ZR_TRY(check_parts(c, &op, bytes, 1));
    zr_post_numbers(&op.post, v, sizeof v / sizeof *v);
    op.wire_bytes = zr_shift_from(&c->group, by) == c->group.rank ? 0 : bytes;
    return put_op(c, s, &op, tag);
}

/* Bytes that this rank takes from others for an operation of arrays. For an all_reduce it adds up its share
 * of the elements, and gathers the others' shares. */
static int64_t arrays_wire(const struct zr_group *g, enum zr_op op, const struct zr_arrays *a)
{
    const int64_t size = zr_dtype_bytes(a->dtype), others = g->size - 1;
    if (op == ZR_OP_SHIFT)
        return zr_shift_from(g, a->by) == g->rank ? 0 : a->n * size;
    if (op != ZR_OP_ALL_REDUCE)
        return a->n * size * others;
    const int64_t own = zr_agree_part(g->size, g->rank + 1, a->n) - zr_agree_part(g->size, g->rank, a->n);
    return (own * others + a->n - own) * size;
}

static int check_arrays(const struct zr_comm *c, const struct zr_comm_op *op)
{
    const struct zr_arrays *a = &op->arrays;
    const bool overlaps = op->post.op == ZR_OP_ALL_TO_ALL && a->stride < a->n;
    if (!zr_comm_has_arrays(c, (enum zr_op)op->post.op) || !a->dst || !a->src || a->n < 1 || overlaps)
        return refuse_op(
            c, op,
            zr_fail(
                ZERO_ERR_ARG,
                "%lld elements at %p and %p: 1 and more, on a communicator that combines arrays, are allowed",
                (long long)a->n, a->dst, a->src));
    return 0;
}

int zr_comm_arrays(struct zr_comm *c, struct zr_stream *s, enum zr_op op, const struct zr_arrays *arrays,
                   const struct zr_tag *tag)
{
    const int64_t v[] = {arrays->dtype, arrays->by};
    struct zr_comm_op o = {.post = {.op = op, .root = -1, .bytes = arrays->n * zr_dtype_bytes(arrays->dtype)},
                           .arrays = *arrays,
                           .wire_bytes = arrays_wire(&c->group, op, arrays)};
    ZR_TRY(check_arrays(c, &o));
    zr_post_numbers(&o.post, v, sizeof v / sizeof *v);
    return put_op(c, s, &o, tag);
}

void zr_comm_done(struct zr_comm *c, const struct zr_comm_op *op)
{
    zr_flight_finish(&op->mark);
    atomic_fetch_add(&c->wire_bytes, op->wire_bytes);
    atomic_fetch_add(&c->n_done[op->post.op], 1);
}

/* ---- status and closing ---- */

int zr_comm_status(struct zr_comm *c, char *why, size_t why_bytes)
{
    return c->ops->status ? c->ops->status(c, why, why_bytes) : zr_first_report(c->failure, why, why_bytes);
}

void zr_comm_stats(struct zr_comm *c, struct zr_comm_stats *out)
{
    if (c->ops->catch_up)
        c->ops->catch_up(c);
    *out = (struct zr_comm_stats){.n_all_gather = c->n_done[ZR_OP_ALL_GATHER],
                                  .n_reduce_scatter = c->n_done[ZR_OP_REDUCE_SCATTER],
                                  .n_broadcast = c->n_done[ZR_OP_BROADCAST],
                                  .n_exchange = c->n_done[ZR_OP_EXCHANGE],
                                  .n_agree = c->n_done[ZR_OP_AGREE],
                                  .n_all_reduce = c->n_done[ZR_OP_ALL_REDUCE],
                                  .n_all_to_all = c->n_done[ZR_OP_ALL_TO_ALL],
                                  .n_shift = c->n_done[ZR_OP_SHIFT],
                                  .wire_bytes = c->wire_bytes,
                                  .library_bytes = c->library_bytes};
}

void zr_comm_close(struct zr_comm *c)
{
    if (!c)
        return;
    if (c->watch)
        c->watch->closes(c->watch, c);
    c->ops->close(c);
}
