/* SPDX-License-Identifier: Apache-2.0 */
/* collectives.c: the calls that combine a program's memory over an axis of the mesh. It checks arguments and
 * records what ranks compare; the engine moves the data. On an axis of one rank the calls copy, so that one
 * program serves every mesh. */
#include "zero/context.h"

#include <xxhash.h>

/* A call's name and arguments. */
struct asked {
    enum zr_call_name name;
    enum zero_axis axis;
    const void *dst, *src;
    int64_t n;
    enum zero_dtype dtype;
};

static int32_t axis_size(const struct zero_ctx *z, enum zero_axis axis)
{
    return axis == ZERO_AXIS_TP ? z->mesh.tp : axis == ZERO_AXIS_PP ? z->mesh.pp : z->mesh.cp;
}

static int32_t axis_rank(const struct zero_ctx *z, enum zero_axis axis)
{
    return axis == ZERO_AXIS_TP ? z->mesh.tp_rank : z->mesh.cp_rank;
}

static int64_t bytes_of(const struct asked *a)
{
    return a->n * zr_dtype_bytes((enum zero_dtype)a->dtype);
}

static int check_dtype(const struct asked *a, bool computes)
{
    if (computes && a->dtype != ZERO_F32 && a->dtype != ZERO_BF16)
        return zr_fail(ZERO_ERR_ARG, "%s: dtype is %d; allowed: ZERO_F32, ZERO_BF16",
                       zr_call_function(a->name), (int)a->dtype);
    if (a->dtype < ZERO_F32 || a->dtype > ZERO_I64)
        return zr_fail(ZERO_ERR_ARG,
                       "%s: dtype is %d; allowed: ZERO_F32, ZERO_BF16, ZERO_F16, ZERO_I32, ZERO_I64",
                       zr_call_function(a->name), (int)a->dtype);
    return 0;
}

/* Kernels access whole elements. */
static int check_alignment(const struct zero_ctx *z, const struct asked *a)
{
    const uintptr_t size = (uintptr_t)zr_dtype_bytes(a->dtype);
    if (z->config.user.device != ZERO_DEVICE_CUDA || ((uintptr_t)a->dst | (uintptr_t)a->src) % size == 0)
        return 0;
    return zr_fail(ZERO_ERR_ARG, "%s: dst is %p, src is %p; allowed: multiples of %d, the size of an element",
                   zr_call_function(a->name), a->dst, a->src, (int)size);
}

/* computes: the call adds or compares elements. */
static int check_call(struct zero_ctx *z, const struct asked *a, bool computes)
{
    ZR_TRY(zr_need_healthy(z, zr_call_function(a->name)));
    if (a->axis != ZERO_AXIS_TP && a->axis != ZERO_AXIS_CP)
        return zr_fail(ZERO_ERR_ARG, "%s: axis is %d; allowed: ZERO_AXIS_TP, ZERO_AXIS_CP",
                       zr_call_function(a->name), (int)a->axis);
    ZR_TRY(check_dtype(a, computes));
    const int64_t most = INT64_MAX / (int64_t)sizeof(int64_t) / axis_size(z, a->axis);
    if (a->n < 0 || a->n > most)
        return zr_fail(ZERO_ERR_ARG, "%s: n is %lld; allowed: 0 to %lld", zr_call_function(a->name),
                       (long long)a->n, (long long)most);
    if (a->n && (!a->src || !a->dst))
        return zr_fail(ZERO_ERR_ARG, "%s: %s is NULL", zr_call_function(a->name), a->src ? "dst" : "src");
    return computes ? check_alignment(z, a) : 0;
}

/* Checks that dst and src do not overlap, or that the part lies exactly where this rank has it in the whole.
 */
static int check_memory(const struct zero_ctx *z, const struct asked *a, const void *whole, const void *part)
{
    const int64_t bytes = bytes_of(a);
    const int32_t rank = axis_rank(z, a->axis);
    const uintptr_t first = (uintptr_t)whole, at = (uintptr_t)part,
                    end = first + (uintptr_t)(bytes * axis_size(z, a->axis));
    if (at == first + (uintptr_t)(bytes * rank) || at >= end || at + (uintptr_t)bytes <= first)
        return 0;
    return zr_fail(ZERO_ERR_ARG,
                   "%s: dst and src overlap; allowed: no overlap, or the smaller one at the place of rank "
                   "%d's part in the larger one",
                   zr_call_function(a->name), rank);
}

/* Checks that dst and src, of so many elements each, do not overlap. */
static int check_apart(const struct asked *a, int64_t n)
{
    const uintptr_t dst = (uintptr_t)a->dst, src = (uintptr_t)a->src,
                    bytes = (uintptr_t)(n * zr_dtype_bytes(a->dtype));
    if (dst >= src + bytes || src >= dst + bytes)
        return 0;
    return zr_fail(ZERO_ERR_ARG, "%s: dst and src overlap; allowed: no overlap", zr_call_function(a->name));
}

/* Records the call for comparison over its axis, even if it moves nothing. what: the dtype, or the root. */
static void say(struct zero_ctx *z, const struct asked *a, int32_t what)
{
    const int64_t said[] = {a->name, a->n, what};
    uint64_t hash = XXH3_64bits(said, sizeof said);
    zr_engine_axis_called(z->engine, a->axis, hash);
}

void zr_collectives_step(struct zero_ctx *z)
{
    if (z->mesh.cp == 1 || z->has_used_cp || z->reported_unused_cp)
        return;
    z->reported_unused_cp = true;
    if (z->world.rank == 0)
        zr_warn(
            z->config.options.log,
            "cp is %d, but the first step made no collective over it: ranks along cp compute as if each had "
            "a whole sequence",
            z->mesh.cp);
}

static struct zr_arrays arrays_of(const struct asked *a)
{
    return (struct zr_arrays){
        .dst = (void *)(uintptr_t)a->dst, .src = a->src, .n = a->n, .dtype = a->dtype, .stride = a->n};
}

/* With cfg.debug.check, compares the bits of n elements over the axis. A whole activation must be equal on
 * all ranks. A partial sum most likely is not. */
static int compare(struct zero_ctx *z, const struct asked *a, int64_t n, bool whole)
{
    struct zr_arrays x = arrays_of(a);
    x.n = n;
    return zr_engine_compare_activation(z->engine, a->axis, a->name, &x, whole);
}

/* Combines what was checked. On an axis of one rank it copies. */
static int combine(struct zero_ctx *z, const struct asked *a, enum zr_op op)
{
    const struct zr_arrays x = arrays_of(a);
    if (axis_size(z, a->axis) == 1)
        return zr_engine_copy(z->engine, x.dst, x.src, bytes_of(a));
    say(z, a, (int32_t)a->dtype);
    z->has_used_cp |= a->axis == ZERO_AXIS_CP;
    if (a->name == ZR_CALL_ALL_REDUCE_MAX)
        return zr_engine_axis_max(z->engine, a->axis, a->name, &x);
    if (op == ZR_OP_ALL_REDUCE || op == ZR_OP_REDUCE_SCATTER)
        ZR_TRY(compare(z, a, op == ZR_OP_ALL_REDUCE ? a->n : a->n * axis_size(z, a->axis), false));
    else if (a->axis == ZERO_AXIS_CP)
        ZR_TRY(zr_engine_compare_rows(z->engine, a->axis, a->name, &x));
    return zr_engine_combine(z->engine, a->axis, a->name, op, &x);
}

int zero_all_reduce(zero_ctx *z, enum zero_axis axis, void *dst, const void *src, int64_t n,
                    enum zero_dtype dtype, enum zero_reduce op)
{
    enum zr_call_name name = op == ZERO_MAX ? ZR_CALL_ALL_REDUCE_MAX : ZR_CALL_ALL_REDUCE_SUM;
    ZR_IN_CALL(z, name, 0, -1);
    const struct asked a = {name, axis, dst, src, n, dtype};
    ZR_TRY(check_call(z, &a, true));
    if (op != ZERO_SUM && op != ZERO_MAX)
        return zr_fail(ZERO_ERR_ARG, "zero_all_reduce: op is %d; allowed: ZERO_SUM, ZERO_MAX", (int)op);
    const uintptr_t to = (uintptr_t)dst, from = (uintptr_t)src, bytes = (uintptr_t)bytes_of(&a);
    if (to != from && to < from + bytes && from < to + bytes)
        return zr_fail(
            ZERO_ERR_ARG,
            "zero_all_reduce: dst and src overlap in part; allowed: equal pointers, or no overlap");
    return combine(z, &a, ZR_OP_ALL_REDUCE);
}

int zero_all_gather(zero_ctx *z, enum zero_axis axis, void *dst, const void *src, int64_t n,
                    enum zero_dtype dtype)
{
    ZR_IN_CALL(z, ZR_CALL_ALL_GATHER, 0, -1);
    const struct asked a = {ZR_CALL_ALL_GATHER, axis, dst, src, n, dtype};
    ZR_TRY(check_call(z, &a, false));
    ZR_TRY(check_memory(z, &a, dst, src));
    return combine(z, &a, ZR_OP_ALL_GATHER);
}

int zero_reduce_scatter(zero_ctx *z, enum zero_axis axis, void *dst, const void *src, int64_t n,
                        enum zero_dtype dtype)
{
    ZR_IN_CALL(z, ZR_CALL_REDUCE_SCATTER, 0, -1);
    const struct asked a = {ZR_CALL_REDUCE_SCATTER, axis, dst, src, n, dtype};
    ZR_TRY(check_call(z, &a, true));
    ZR_TRY(check_memory(z, &a, src, dst));
    return combine(z, &a, ZR_OP_REDUCE_SCATTER);
}

int zero_all_to_all(zero_ctx *z, enum zero_axis axis, void *dst, const void *src, int64_t n,
                    enum zero_dtype dtype)
{
    ZR_IN_CALL(z, ZR_CALL_ALL_TO_ALL, 0, -1);
    const struct asked a = {ZR_CALL_ALL_TO_ALL, axis, dst, src, n, dtype};
    ZR_TRY(check_call(z, &a, false));
    ZR_TRY(check_apart(&a, n * axis_size(z, axis)));
    return combine(z, &a, ZR_OP_ALL_TO_ALL);
}

/* Whether a shift is open on an axis. On an axis of one rank the context remembers it. */
static bool *shift_is_open(struct zero_ctx *z, enum zero_axis axis)
{
    return &z->is_shifting[axis == ZERO_AXIS_CP];
}

static int begin_shift(struct zero_ctx *z, const struct asked *a, const struct zr_arrays *x)
{
    const int64_t words[] = {x->by, a->dtype};
    say(z, a, (int32_t)XXH3_64bits(words, sizeof words));
    z->has_used_cp |= a->axis == ZERO_AXIS_CP;
    if (a->axis == ZERO_AXIS_CP)
        ZR_TRY(zr_engine_compare_rows(z->engine, a->axis, a->name, x));
    return zr_engine_shift_begin(z->engine, a->axis, x);
}

int zero_shift_begin(zero_ctx *z, enum zero_axis axis, int32_t by, void *dst, const void *src, int64_t n,
                     enum zero_dtype dtype)
{
    ZR_IN_CALL(z, ZR_CALL_SHIFT_BEGIN, 0, -1);
    const struct asked a = {ZR_CALL_SHIFT_BEGIN, axis, dst, src, n, dtype};
    ZR_TRY(check_call(z, &a, false));
    ZR_TRY(check_apart(&a, n));
    if (*shift_is_open(z, axis))
        return zr_fail(ZERO_ERR_ORDER,
                       "zero_shift_begin: a shift is open on this axis; zero_shift_end comes first");
    struct zr_arrays x = arrays_of(&a);
    x.by = by;
    ZR_TRY(axis_size(z, axis) > 1 ? begin_shift(z, &a, &x)
                                  : zr_engine_copy(z->engine, dst, src, bytes_of(&a)));
    *shift_is_open(z, axis) = true;
    return 0;
}

/* After a failure, too, a shift that is open is waited for: until then it may use the program's memory. */
int zero_shift_end(zero_ctx *z, enum zero_axis axis)
{
    ZR_IN_CALL(z, ZR_CALL_SHIFT_END, 0, -1);
    const struct asked a = {ZR_CALL_SHIFT_END, axis, NULL, NULL, 0, ZERO_F32};
    int err = check_call(z, &a, false);
    const bool known = z && (axis == ZERO_AXIS_TP || axis == ZERO_AXIS_CP);
    if (!known || (err && !*shift_is_open(z, axis)))
        return err;
    if (!*shift_is_open(z, axis))
        return zr_fail(ZERO_ERR_ORDER, "zero_shift_end: no shift is open on this axis");
    *shift_is_open(z, axis) = false;
    if (axis_size(z, axis) == 1)
        return err;
    if (!err)
        say(z, &a, 0);
    int ended = zr_engine_shift_end(z->engine, axis);
    return err ? err : ended;
}

int zero_expect_equal(zero_ctx *z, enum zero_axis axis, const void *src, int64_t n, enum zero_dtype dtype)
{
    ZR_IN_CALL(z, ZR_CALL_EXPECT_EQUAL, 0, -1);
    const struct asked a = {ZR_CALL_EXPECT_EQUAL, axis, src, src, n, dtype};
    int err = check_call(z, &a, false);
    if (err || axis_size(z, axis) == 1)
        return err;
    say(z, &a, (int32_t)dtype);
    return compare(z, &a, n, true);
}

/* Ranges of rows of every rank along cp: first[2] and n[2] of each. */
struct ranges {
    const int64_t *at;
    int32_t n_ranks;
};

/* Returns how many ranks have the row, and two of them, as numbers along cp. *next: the first row behind it
 * where this may change. */
static int owners_of(const struct ranges *r, int64_t row, int32_t owner[2], int64_t *next)
{
    int n = 0;
    for (int32_t k = 0; k < 2 * r->n_ranks; k++) {
        const int64_t *of_rank = r->at + k / 2 * 4, first = of_rank[k % 2], end = first + of_rank[2 + k % 2];
        if (first > row && end > first)
            *next = first < *next ? first : *next;
        if (first > row || end <= row)
            continue;
        *next = end < *next ? end : *next;
        owner[n < 2 ? n : 1] = k / 2;
        n++;
    }
    return n;
}

static int check_ranges(struct zero_ctx *z, const struct ranges *r, int64_t rows)
{
    int32_t owner[2] = {0};
    for (int64_t row = 0, next; row < rows; row = next) {
        next = rows;
        int n = owners_of(r, row, owner, &next);
        if (n == 0)
            return zr_fail(ZERO_ERR_MISMATCH, "zero_expect_rows: check: no rank of cp has row %lld",
                           (long long)row);
        if (n > 1)
            return zr_fail(
                ZERO_ERR_MISMATCH,
                "zero_expect_rows: check: row %lld belongs to two ranks of cp, rank %d and rank %d",
                (long long)row, zr_group_member(&z->mesh.cp_group, owner[0]),
                zr_group_member(&z->mesh.cp_group, owner[1]));
    }
    return 0;
}

int zero_expect_rows(zero_ctx *z, int64_t rows, const int64_t first[2], const int64_t n[2])
{
    ZR_IN_CALL(z, ZR_CALL_EXPECT_ROWS, 0, -1);
    const struct asked a = {.name = ZR_CALL_EXPECT_ROWS, .axis = ZERO_AXIS_CP, .n = rows, .dtype = ZERO_I64};
    ZR_TRY(zr_need_healthy(z, "zero_expect_rows"));
    if (rows < 0 || !first || !n)
        return zr_fail(ZERO_ERR_ARG,
                       "zero_expect_rows: rows is %lld, first and n are %s; allowed: 0 and more, set",
                       (long long)rows, first && n ? "set" : "NULL");
    for (int k = 0; k < 2; k++)
        if (n[k] < 0 || n[k] > rows || (n[k] && (first[k] < 0 || first[k] > rows - n[k])))
            return zr_fail(ZERO_ERR_ARG, "zero_expect_rows: rows %lld to %lld; allowed: rows 0 to %lld",
                           (long long)first[k], (long long)first[k] + n[k] - 1, (long long)rows - 1);
    const int64_t mine[] = {first[0], first[1], n[0], n[1]}, *all = z->config.options.check ? mine : NULL;
    if (axis_size(z, a.axis) > 1) {
        say(z, &a, 0);
        ZR_TRY(zr_engine_exchange_words(z->engine, a.axis, a.name, mine, 4, &all));
    }
    const struct ranges r = {all, axis_size(z, a.axis)};
    int err = all ? check_ranges(z, &r, rows) : 0;
    return err ? zr_engine_fail(z->engine, err, zr_error_text()) : 0;
}

static int broadcast_over(struct zero_ctx *z, const struct asked *a, int32_t root, void *buf)
{
    say(z, a, root);
    return zr_engine_axis_broadcast(z->engine, a->axis, a->name, root, buf, a->n);
}

/* No communicator joins the ranks of pp alone: all ranks of the world take part. */
static int broadcast_over_pp(struct zero_ctx *z, int32_t root, void *buf, int64_t bytes)
{
    const int64_t said[] = {root, bytes};
    zr_engine_called(z->engine, XXH3_64bits(said, sizeof said));
    return zr_engine_broadcast_stages(z->engine, root, buf, bytes);
}

int zero_broadcast(zero_ctx *z, enum zero_axis axis, int32_t root, void *buf, int64_t bytes)
{
    const enum zr_call_name name = axis == ZERO_AXIS_PP   ? ZR_CALL_BROADCAST_PP
                                   : axis == ZERO_AXIS_CP ? ZR_CALL_BROADCAST_CP
                                                          : ZR_CALL_BROADCAST_TP;
    const struct asked a = {.name = name, .axis = axis, .n = bytes};
    ZR_IN_CALL(z, name, 0, -1);
    ZR_TRY(zr_need_healthy(z, "zero_broadcast"));
    if (axis < ZERO_AXIS_TP || axis > ZERO_AXIS_PP)
        return zr_fail(ZERO_ERR_ARG,
                       "zero_broadcast: axis is %d; allowed: ZERO_AXIS_TP, ZERO_AXIS_CP, ZERO_AXIS_PP",
                       (int)axis);
    if (root < 0 || root >= axis_size(z, axis))
        return zr_fail(ZERO_ERR_ARG, "zero_broadcast: root is %d; allowed: 0..%d on this axis", root,
                       axis_size(z, axis) - 1);
    if (bytes < 0 || (bytes && !buf))
        return zr_fail(ZERO_ERR_ARG,
                       "zero_broadcast: bytes is %lld, buf is %s; allowed: 0 and more, not NULL",
                       (long long)bytes, buf ? "set" : "NULL");
    if (axis == ZERO_AXIS_PP)
        ZR_TRY(zr_call_check(z, ZR_CALL_BROADCAST_PP));
    if (axis_size(z, axis) == 1)
        return 0;
    return axis == ZERO_AXIS_PP ? broadcast_over_pp(z, root, buf, bytes) : broadcast_over(z, &a, root, buf);
}
