/* SPDX-License-Identifier: Apache-2.0 */
/* mesh_axis.c: collectives over the ranks of one axis, tp or cp, on the model's stream; and shifts, which go
 * on while the model computes.
 *
 * Arrays are anywhere in the program's memory and of any size. NCCL moves them there, and adds them up there
 * if `deterministic` is off (zr_comm_arrays). If it is on, each rank receives what it adds up in the arena.
 * Otherwise peers read arenas, so arrays go through an arena in pieces. For a sum, a piece is copied to `in`,
 * its sum is scattered to one of two `out`, gathered there in place, and copied back. The next operation uses
 * the other `out`, because peers may still be gathering from this one until each has reached it
 * (comm/comm.h). A reduce-scatter leaves out the gather, and copies only this rank's part back. Gathers,
 * maxima and broadcasts stay in `in`. All-to-all and shift go from `in` to the next `out`, and a shift leaves
 * it to the operation after it. */
#include "shard/engine/mesh_axis.h"
#include "kernels/alloc.h"

#include <stdio.h>
#include <string.h>
#include <xxhash.h>

enum {
    MAX_GATHERED_BYTES = 512 << 10, /* largest array that sum_gathered adds up */
    FEW_ELEMS = 8,                  /* with fewer elements, equal contributions prove nothing */
    COMPARED = -2,                  /* kind of a comparison's tag, in place of a dtype */
    SHIFT_PIECES = 1024,            /* pieces of a shift that the stream takes without a wait */
};
_Static_assert(ZR_AXIS_RANKS <= ZR_MAX_SOURCES, "a maximum has a source for each rank");

/* ---- opening and closing ---- */

struct zr_mesh_axis *zr_axis_of(const struct zr_engine *e, enum zero_axis axis)
{
    return axis == ZERO_AXIS_TP ? e->m.tp_axis : e->m.cp_axis;
}

static void set_axis(const struct zr_engine *e, enum zr_role role, struct zr_mesh_axis *a)
{
    const struct zr_comm *c = e->role[role].comm;
    *a = (struct zr_mesh_axis){.role = role, .name = zr_role_name(role), .size = c ? c->group.size : 1};
    a->rank = c ? c->group.rank : 0;
}

/* Opens the stream of shifts, which is a thread on the host. Over tp shifts are rare, so they have none. */
static int open_shifts(struct zr_engine *e, struct zr_mesh_axis *a)
{
    const struct zr_device_ops *d = e->dev->ops;
    if (a->size == 1)
        return 0;
    ZR_TRY(d->stream_open(e->dev, ZR_STREAM_QUEUE, "zero-shift", NULL, &a->shift_stream));
    ZR_TRY(zr_stream_reserve(e->dev, a->shift_stream, 3 * SHIFT_PIECES));
    ZR_TRY(d->event_open(e->dev, &a->shift_ready));
    return d->event_open(e->dev, &a->shift_done);
}

int zr_axes_open(struct zr_engine *e)
{
    ZR_TABLE(e, e->m.tp_axis, 1);
    ZR_TABLE(e, e->m.cp_axis, 1);
    set_axis(e, ZR_ROLE_TP, e->m.tp_axis);
    set_axis(e, ZR_ROLE_CP, e->m.cp_axis);
    return open_shifts(e, e->m.cp_axis);
}

static int allocate_axis(struct zr_engine *e, struct zr_mesh_axis *a, int64_t bytes)
{
    if (!bytes)
        return 0;
    ZR_TRY(zr_engine_open_arena(e, &a->role, 1, bytes, &a->base));
    return e->dev->ops->zero(e->compute, a->base + ZR_AXIS_END, ZR_AXIS_BYTES - ZR_AXIS_END);
}

int zr_axes_allocate(struct zr_engine *e)
{
    ZR_TRY(allocate_axis(e, e->m.tp_axis, e->plan->tp_bytes));
    return allocate_axis(e, e->m.cp_axis, e->plan->cp_bytes);
}

void zr_axes_close(struct zr_engine *e)
{
    const struct zr_device_ops *d = e->dev->ops;
    struct zr_mesh_axis *a = e->m.cp_axis;
    if (!a)
        return;
    d->stream_close(a->shift_stream);
    d->event_close(a->shift_ready);
    d->event_close(a->shift_done);
}

enum zr_event_class zr_axis_event_class(const struct zr_engine *e, const struct zr_event *event)
{
    const struct zr_mesh_axis *a = e->m.cp_axis;
    return !a                        ? ZR_EVENT_ANY
           : event == a->shift_ready ? ZR_EVENT_SHIFT_READY
           : event == a->shift_done  ? ZR_EVENT_SHIFT_DONE
                                     : ZR_EVENT_ANY;
}

/* ---- pieces, through the arena ---- */

int64_t zr_axis_out_at(int out)
{
    return ZR_AXIS_IN_BYTES + out * (int64_t)ZR_AXIS_OUT_BYTES;
}

struct zr_tag zr_axis_tag(const struct zr_engine *e, const struct zr_mesh_axis *a, enum zr_call_name call,
                          int64_t n, int32_t kind)
{
    const int64_t words[] = {call, n, kind, (int64_t)a->calls};
    return (struct zr_tag){.unit = zr_core_open_unit(e->m.core),
                           .step = zr_step_number(e),
                           .call_hash = XXH3_64bits_withSeed(words, sizeof words, zr_core_hash(e->m.core))};
}

/* Sums the piece in `in` to `out`, in the same dtype. If dtype is not fp32, the fp32 sums lie behind the
 * piece, and are rounded before they are gathered. */
int zr_axis_sum_piece(struct zr_engine *e, struct zr_mesh_axis *a, int64_t n, enum zero_dtype dtype, int out,
                      const struct zr_tag *tag)
{
    const bool rounds = dtype != ZERO_F32;
    const int64_t size = zr_dtype_bytes(dtype),
                  each = zr_round_up((n + a->size - 1) / a->size * size, ZR_AXIS_CUT_BYTES);
    const struct zr_cut cut = {.each = each, .total = n * size};
    const int64_t at = zr_axis_out_at(out), slice = at + zr_cut_at(&cut, a->rank),
                  sums = rounds ? at + a->size * each : slice;
    const struct zr_reduce_seg reduce = {.src = ZR_AXIS_IN_AT, .dst = sums, .cut = cut, .dtype = dtype};
    const struct zr_gather_seg gather = {.src = at, .dst = at, .in_place = true, .cut = cut};
    ZR_TRY(zr_role_reduce(e, a->role, &reduce, 1, tag));
    if (rounds)
        ZR_TRY(e->dev->ops->cast(e->compute, a->base + slice, dtype, a->base + sums, ZERO_F32,
                                 zr_cut_bytes(&cut, a->rank) / size));
    return zr_role_gather(e, a->role, &gather, 1, tag);
}

static int sum_pieces(struct zr_engine *e, struct zr_mesh_axis *a, const struct zr_arrays *x,
                      const struct zr_tag *tag)
{
    const struct zr_device_ops *d = e->dev->ops;
    const int64_t size = zr_dtype_bytes(x->dtype);
    for (int64_t at = 0, k; at < x->n; at += k) {
        k = zr_min(x->n - at, ZR_AXIS_ELEMS);
        int out = a->out ^= 1;
        ZR_TRY(d->copy(e->compute, a->base + ZR_AXIS_IN_AT, (const char *)x->src + at * size, k * size));
        ZR_TRY(zr_axis_sum_piece(e, a, k, x->dtype, out, tag));
        ZR_TRY(d->copy(e->compute, (char *)x->dst + at * size, a->base + zr_axis_out_at(out), k * size));
    }
    return 0;
}

/* Copies elements [at, at + k) of each rank's part of src to `in`, slot bytes apart. The parts in src are
 * stride elements apart. */
static int fill_slots(struct zr_engine *e, struct zr_mesh_axis *a, const struct zr_arrays *x, int64_t stride,
                      int64_t at, int64_t k, int64_t slot)
{
    const int64_t size = zr_dtype_bytes(x->dtype);
    for (int32_t p = 0; p < a->size; p++)
        ZR_TRY(e->dev->ops->copy(e->compute, a->base + ZR_AXIS_IN_AT + p * slot,
                                 (const char *)x->src + (p * stride + at) * size, k * size));
    return 0;
}

/* The reverse: copies from the slots at `from` to elements [at, at + k) of each rank's part of dst. */
static int empty_slots(struct zr_engine *e, struct zr_mesh_axis *a, const struct zr_arrays *x, int64_t at,
                       int64_t k, int64_t slot, int64_t from)
{
    const int64_t size = zr_dtype_bytes(x->dtype);
    for (int32_t p = 0; p < a->size; p++)
        ZR_TRY(e->dev->ops->copy(e->compute, (char *)x->dst + (p * x->n + at) * size,
                                 a->base + from + p * slot, k * size));
    return 0;
}

/* `in` has a slice for each rank. Bytes behind a slice's elements are added up with them, and not used. */
static int scatter_pieces(struct zr_engine *e, struct zr_mesh_axis *a, const struct zr_arrays *x,
                          const struct zr_tag *tag)
{
    const int64_t size = zr_dtype_bytes(x->dtype),
                  most = ZR_AXIS_IN_BYTES / a->size / ZR_AXIS_CUT_BYTES * ZR_AXIS_CUT_BYTES / size;
    for (int64_t at = 0, k; at < x->n; at += k) {
        k = zr_min(x->n - at, most);
        const int64_t each = zr_round_up(k * size, ZR_AXIS_CUT_BYTES), sums = zr_axis_out_at(a->out ^= 1);
        const struct zr_reduce_seg reduce = {.src = ZR_AXIS_IN_AT,
                                             .dst = sums,
                                             .cut = {.each = each, .total = a->size * each},
                                             .dtype = x->dtype};
        ZR_TRY(fill_slots(e, a, x, x->n, at, k, each));
        ZR_TRY(zr_role_reduce(e, a->role, &reduce, 1, tag));
        ZR_TRY(e->dev->ops->cast(e->compute, (char *)x->dst + at * size, x->dtype,
                                 (const float *)(a->base + sums), ZERO_F32, k));
    }
    return 0;
}

/* It uses exchanges, after which no peer reads `in`, so it needs no `out`. */
static int gather_pieces(struct zr_engine *e, struct zr_mesh_axis *a, const struct zr_arrays *x,
                         const struct zr_tag *tag)
{
    const int64_t size = zr_dtype_bytes(x->dtype), most = ZR_AXIS_IN_BYTES / a->size / size;
    for (int64_t at = 0, k; at < x->n; at += k) {
        k = zr_min(x->n - at, most);
        const int64_t slot = k * size;
        ZR_TRY(e->dev->ops->copy(e->compute, a->base + ZR_AXIS_IN_AT + a->rank * slot,
                                 (const char *)x->src + at * size, slot));
        ZR_TRY(zr_role_exchange(e, a->role, ZR_AXIS_IN_AT, slot, tag));
        ZR_TRY(empty_slots(e, a, x, at, k, slot, ZR_AXIS_IN_AT));
    }
    return 0;
}

static int spread_pieces(struct zr_engine *e, struct zr_mesh_axis *a, const struct zr_arrays *x,
                         const struct zr_tag *tag)
{
    const int64_t size = zr_dtype_bytes(x->dtype), most = ZR_AXIS_IN_BYTES / a->size / size;
    for (int64_t at = 0, k; at < x->n; at += k) {
        k = zr_min(x->n - at, most);
        const int64_t slot = k * size, to = zr_axis_out_at(a->out ^= 1);
        ZR_TRY(fill_slots(e, a, x, x->stride, at, k, slot));
        ZR_TRY(zr_role_all_to_all(e, a->role, ZR_AXIS_IN_AT, to, slot, tag));
        ZR_TRY(empty_slots(e, a, x, at, k, slot, to));
    }
    return 0;
}

/* Every rank goes through the parts in the same order, so that all ranks keep the same bits: 0 and -0 compare
 * as equal. */
static int max_pieces(struct zr_engine *e, struct zr_mesh_axis *a, const struct zr_arrays *x,
                      const struct zr_tag *tag)
{
    const struct zr_device_ops *d = e->dev->ops;
    const int64_t size = zr_dtype_bytes(x->dtype), most = ZR_AXIS_ELEMS / a->size;
    for (int64_t at = 0, k; at < x->n; at += k) {
        k = zr_min(x->n - at, most);
        const int64_t slot = k * size; /* bytes of one rank's part of `in` */
        const void *parts[ZR_AXIS_RANKS];
        for (int32_t p = 0; p < a->size; p++)
            parts[p] = a->base + ZR_AXIS_IN_AT + p * slot;
        ZR_TRY(d->copy(e->compute, a->base + ZR_AXIS_IN_AT + a->rank * slot, (const char *)x->src + at * size,
                       slot));
        ZR_TRY(zr_role_exchange(e, a->role, ZR_AXIS_IN_AT, slot, tag));
        ZR_TRY(d->maximum(e->compute, (char *)x->dst + at * size, parts, a->size, x->dtype, k));
    }
    return 0;
}

static int broadcast_pieces(struct zr_engine *e, struct zr_mesh_axis *a, int32_t root, char *buf,
                            int64_t bytes, const struct zr_tag *tag)
{
    const struct zr_device_ops *d = e->dev->ops;
    char *in = a->base + ZR_AXIS_IN_AT;
    for (int64_t at = 0, k; at < bytes; at += k) {
        k = zr_min(bytes - at, ZR_AXIS_IN_BYTES);
        if (a->rank == root)
            ZR_TRY(d->copy(e->compute, in, buf + at, k));
        ZR_TRY(zr_role_broadcast(e, a->role, ZR_AXIS_IN_AT, k, root, tag));
        if (a->rank != root)
            ZR_TRY(d->copy(e->compute, buf + at, in, k));
    }
    return 0;
}

/* It uses the other `out` for all pieces and does not alternate. A shift waits for two ranks only, so the
 * others may still be gathering from the `out` of a sum before it. */
static int shift_pieces(struct zr_engine *e, struct zr_mesh_axis *a, struct zr_stream *s,
                        const struct zr_arrays *x, const struct zr_tag *tag)
{
    const struct zr_device_ops *d = e->dev->ops;
    const int64_t bytes = x->n * zr_dtype_bytes(x->dtype), to = zr_axis_out_at(a->out ^ 1);
    for (int64_t at = 0, k; at < bytes; at += k) {
        k = zr_min(bytes - at, ZR_AXIS_IN_BYTES);
        ZR_TRY(d->copy(s, a->base + ZR_AXIS_IN_AT, (const char *)x->src + at, k));
        ZR_TRY(zr_role_shift(e, a->role, s, ZR_AXIS_IN_AT, to, k, x->by, tag));
        ZR_TRY(d->copy(s, (char *)x->dst + at, a->base + to, k));
    }
    return 0;
}

/* ---- sums of arrays that the communicator moves and does not add up ---- */

/* Whether sum_gathered may add up the array: the arena has room for all ranks' arrays and their sum in fp32.
 * Large arrays would be sent to more ranks than need them. */
static bool may_sum_gathered(const struct zr_mesh_axis *a, const struct zr_arrays *x)
{
    const int64_t bytes = x->n * zr_dtype_bytes(x->dtype);
    return bytes <= MAX_GATHERED_BYTES &&
           a->size * bytes + ZR_AXIS_CUT_BYTES + x->n * (int64_t)sizeof(float) <= ZR_AXIS_END;
}

/* Adds up what the arena has of all ranks, n elements each, in the fixed tree. */
static int add_received(struct zr_engine *e, struct zr_mesh_axis *a, char *dst, int64_t n,
                        enum zero_dtype dtype)
{
    const struct zr_device_ops *d = e->dev->ops;
    const int64_t bytes = n * zr_dtype_bytes(dtype);
    const void *parts[ZR_AXIS_RANKS];
    for (int32_t p = 0; p < a->size; p++)
        parts[p] = a->base + p * bytes;
    float *sums =
        (float *)(dtype == ZERO_F32 ? dst : a->base + zr_round_up(a->size * bytes, ZR_AXIS_CUT_BYTES));
    ZR_TRY(d->sum_tree(e->compute, sums, parts, a->size, dtype, n, false));
    return dtype == ZERO_F32 ? 0 : d->cast(e->compute, dst, dtype, sums, ZERO_F32, n);
}

/* Gathers src of all ranks to the arena, which no other rank reads then. It has the bits of sum_pieces, and
 * fewer operations. */
static int sum_gathered(struct zr_engine *e, struct zr_mesh_axis *a, const struct zr_arrays *x,
                        const struct zr_tag *tag)
{
    const struct zr_arrays gathered = {.dst = a->base, .src = x->src, .n = x->n, .dtype = x->dtype};
    ZR_TRY(zr_role_arrays(e, a->role, e->compute, ZR_OP_ALL_GATHER, &gathered, tag));
    return add_received(e, a, x->dst, x->n, x->dtype);
}

/* Each rank receives its part from all others, as much as the arena holds at a time, and adds it up. Writes
 * only what it has received, so dst may be src or this rank's part of it. */
static int sum_own_part(struct zr_engine *e, struct zr_mesh_axis *a, const struct zr_arrays *x,
                        const struct zr_tag *tag)
{
    const int64_t size = zr_dtype_bytes(x->dtype), each = a->size * size + (int64_t)sizeof(float),
                  most = (ZR_AXIS_END - ZR_AXIS_CUT_BYTES) / each;
    for (int64_t at = 0, k; at < x->n; at += k) {
        k = zr_min(x->n - at, most);
        const struct zr_arrays parts = {.dst = a->base,
                                        .src = (const char *)x->src + at * size,
                                        .n = k,
                                        .dtype = x->dtype,
                                        .stride = x->n};
        ZR_TRY(zr_role_arrays(e, a->role, e->compute, ZR_OP_ALL_TO_ALL, &parts, tag));
        ZR_TRY(add_received(e, a, (char *)x->dst + at * size, k, x->dtype));
    }
    return 0;
}

/* A large sum: each rank adds up one part, and gathers the others. The few elements that are left over are
 * gathered first. */
static int sum_by_parts(struct zr_engine *e, struct zr_mesh_axis *a, const struct zr_arrays *x,
                        const struct zr_tag *tag)
{
    const int64_t size = zr_dtype_bytes(x->dtype), part = x->n / a->size, whole = part * a->size;
    char *dst = x->dst, *own = dst + a->rank * part * size;
    const struct zr_arrays rest = {.dst = dst + whole * size,
                                   .src = (const char *)x->src + whole * size,
                                   .n = x->n - whole,
                                   .dtype = x->dtype},
                           scattered = {.dst = own, .src = x->src, .n = part, .dtype = x->dtype},
                           gathered = {.dst = dst, .src = own, .n = part, .dtype = x->dtype};
    if (rest.n)
        ZR_TRY(sum_gathered(e, a, &rest, tag));
    ZR_TRY(sum_own_part(e, a, &scattered, tag));
    return zr_role_arrays(e, a->role, e->compute, ZR_OP_ALL_GATHER, &gathered, tag);
}

/* ---- collectives ---- */

/* Combines arrays by the fewest operations of the communicator. */
static int combine(struct zr_engine *e, struct zr_mesh_axis *a, enum zr_op op, const struct zr_arrays *x,
                   const struct zr_tag *tag)
{
    const struct zr_comm *c = e->role[a->role].comm;
    if (zr_comm_has_arrays(c, op))
        return zr_role_arrays(e, a->role, e->compute, op, x, tag);
    const bool moves = zr_comm_has_arrays(c, ZR_OP_ALL_TO_ALL);
    switch (op) {
    case ZR_OP_ALL_REDUCE:
        return (!moves ? sum_pieces : may_sum_gathered(a, x) ? sum_gathered : sum_by_parts)(e, a, x, tag);
    case ZR_OP_REDUCE_SCATTER:
        return (moves ? sum_own_part : scatter_pieces)(e, a, x, tag);
    case ZR_OP_ALL_GATHER:
        return gather_pieces(e, a, x, tag);
    default:
        return spread_pieces(e, a, x, tag);
    }
}

/* Lets the next operation on the axis follow an open shift, which is on another stream. */
static int follow_shift(struct zr_engine *e, struct zr_mesh_axis *a)
{
    return a->is_shifting && a->shift_stream ? zr_model_wait_for(e, a->shift_done) : 0;
}

/* A failure of a collective ends the context. */
static int end_collective(struct zr_engine *e, int err)
{
    return err ? zr_engine_fail(e, err, zr_error_text()) : zr_engine_status(e);
}

int zr_engine_combine(struct zr_engine *e, enum zero_axis axis, enum zr_call_name call, enum zr_op op,
                      const struct zr_arrays *x)
{
    struct zr_mesh_axis *a = zr_axis_of(e, axis);
    const struct zr_tag tag = zr_axis_tag(e, a, call, x->n, (int32_t)x->dtype);
    int err = follow_shift(e, a);
    if (!err && x->n)
        err = combine(e, a, op, x, &tag);
    return end_collective(e, err);
}

int zr_engine_axis_max(struct zr_engine *e, enum zero_axis axis, enum zr_call_name call,
                       const struct zr_arrays *x)
{
    struct zr_mesh_axis *a = zr_axis_of(e, axis);
    const struct zr_tag tag = zr_axis_tag(e, a, call, x->n, (int32_t)x->dtype);
    int err = follow_shift(e, a);
    return end_collective(e, err ? err : max_pieces(e, a, x, &tag));
}

int zr_engine_axis_broadcast(struct zr_engine *e, enum zero_axis axis, enum zr_call_name call, int32_t root,
                             void *buf, int64_t bytes)
{
    struct zr_mesh_axis *a = zr_axis_of(e, axis);
    const struct zr_tag tag = zr_axis_tag(e, a, call, bytes, root);
    int err = follow_shift(e, a);
    return end_collective(e, err ? err : broadcast_pieces(e, a, root, buf, bytes, &tag));
}

static int put_shift(struct zr_engine *e, struct zr_mesh_axis *a, struct zr_stream *s,
                     const struct zr_arrays *x)
{
    const struct zr_tag tag = zr_axis_tag(e, a, ZR_CALL_SHIFT_BEGIN, x->n, (int32_t)x->dtype);
    if (!x->n)
        return 0;
    return zr_comm_has_arrays(e->role[a->role].comm, ZR_OP_SHIFT)
               ? zr_role_arrays(e, a->role, s, ZR_OP_SHIFT, x, &tag)
               : shift_pieces(e, a, s, x, &tag);
}

int zr_engine_shift_begin(struct zr_engine *e, enum zero_axis axis, const struct zr_arrays *x)
{
    struct zr_mesh_axis *a = zr_axis_of(e, axis);
    const struct zr_device_ops *d = e->dev->ops;
    struct zr_stream *s = a->shift_stream ? a->shift_stream : e->compute;
    int err = 0;
    if (a->shift_stream)
        err = d->event_record(a->shift_ready, e->compute);
    if (!err && a->shift_stream)
        err = d->stream_wait(s, a->shift_ready);
    if (!err)
        err = put_shift(e, a, s, x);
    if (!err && a->shift_stream)
        err = d->event_record(a->shift_done, s);
    a->is_shifting = !err;
    if (err && d->compute_on_caller) /* what is on the stream may use the program's memory */
        d->stream_sync(s);
    return end_collective(e, err);
}

/* After a failure the host waits, too, until the stream no longer uses the program's memory. */
int zr_engine_shift_end(struct zr_engine *e, enum zero_axis axis)
{
    struct zr_mesh_axis *a = zr_axis_of(e, axis);
    const struct zr_device_ops *d = e->dev->ops;
    int err = follow_shift(e, a);
    if (err && a->shift_stream && d->compute_on_caller)
        d->stream_wait(e->compute, a->shift_done);
    a->is_shifting = false;
    return end_collective(e, err);
}

int zr_engine_copy(struct zr_engine *e, void *dst, const void *src, int64_t n_bytes)
{
    return dst == src || !n_bytes ? 0 : e->dev->ops->copy(e->compute, dst, src, n_bytes);
}

int zr_axis_exchange_in(struct zr_engine *e, struct zr_mesh_axis *a, int64_t bytes, const struct zr_tag *tag,
                        const void **all)
{
    *all = e->words;
    ZR_TRY(zr_role_exchange(e, a->role, ZR_AXIS_IN_AT, bytes, tag));
    ZR_TRY(e->dev->ops->copy(e->compute, e->words, a->base + ZR_AXIS_IN_AT, a->size * bytes));
    ZR_TRY(e->dev->ops->event_record(e->ev.drained, e->compute));
    return zr_engine_wait(e, e->ev.drained);
}

int zr_axis_exchange(struct zr_engine *e, struct zr_mesh_axis *a, const void *mine, int64_t bytes,
                     const struct zr_tag *tag, const void **all)
{
    ZR_TRY(e->dev->ops->copy(e->compute, a->base + ZR_AXIS_IN_AT + a->rank * bytes, mine, bytes));
    return zr_axis_exchange_in(e, a, bytes, tag, all);
}

/* ---- whole and partial activations ---- */

/* What ranks compare of an array: a digest, which is 0 if all of it is 0, and its distance from the array of
 * the last gather or all-to-all. */
struct seen {
    uint64_t digest;
    int64_t distance;
};

/* Exchanges what each rank has in x. */
static int exchange_seen(struct zr_engine *e, struct zr_mesh_axis *a, enum zr_call_name call,
                         const struct zr_arrays *x, const struct seen **all)
{
    const struct zr_tag tag = zr_axis_tag(e, a, call, x->n, COMPARED);
    const struct zr_device_ops *d = e->dev->ops;
    struct seen *mine = (struct seen *)(a->base + ZR_AXIS_IN_AT) + a->rank;
    const struct seen none = {.distance = a->last_src ? (const char *)x->src - a->last_src : 0};
    const void *words = NULL;
    int err = follow_shift(e, a);
    if (!err)
        err = d->put(e->compute, mine, &none, sizeof none);
    if (!err)
        err = d->digest(e->compute, &mine->digest, x->src, x->n * zr_dtype_bytes(x->dtype), 0);
    if (!err)
        err = zr_axis_exchange_in(e, a, sizeof *mine, &tag, &words);
    zr_do_not_count_axis(e, a->role, sizeof *mine);
    *all = words;
    return err;
}

/* Describes the call, with the unit, because a model makes the same call in each layer. */
static void describe_call(const struct zr_engine *e, enum zr_call_name call, char text[ZR_CALL_LOG_CHARS])
{
    int32_t unit = zr_core_open_unit(e->m.core);
    zr_call_log_describe(&(struct zr_logged_call){.name = call, .subject = -1, .step = zr_step_number(e)},
                         text);
    if (unit >= 0)
        snprintf(text + strlen(text), ZR_CALL_LOG_CHARS - strlen(text), ", inside unit %d", unit);
}

static int fail_different(const struct zr_engine *e, const struct zr_mesh_axis *a, const char *call,
                          int32_t p)
{
    const struct zr_comm *c = e->role[a->role].comm;
    return zr_fail(ZERO_ERR_MISMATCH,
                   "%s: check: src is not the same on all ranks of %s: rank %d and rank %d differ; allowed: "
                   "equal values on all of them, such as data read by place.data, or the result of "
                   "zero_all_reduce or zero_all_gather",
                   call, a->name, zr_comm_rank(c, 0), zr_comm_rank(c, p));
}

static void warn_of_sum(struct zr_engine *e, struct zr_mesh_axis *a, const char *call)
{
    if (!a->said_sum)
        zr_warn(e->opt.log,
                "check: %s: src is the same on all %d ranks of %s, and is added up: if each rank has all of "
                "it, it counts %d times",
                call, a->size, a->name, a->size);
    a->said_sum = true;
}

int zr_engine_compare_activation(struct zr_engine *e, enum zero_axis axis, enum zr_call_name call,
                                 const struct zr_arrays *x, bool whole)
{
    struct zr_mesh_axis *a = zr_axis_of(e, axis);
    const struct seen *all;
    char text[ZR_CALL_LOG_CHARS];
    if (a->size == 1 || !zr_compare_is_due(e) || (!whole && x->n < FEW_ELEMS))
        return 0;
    int err = exchange_seen(e, a, call, x, &all);
    int32_t p = 1;
    while (!err && p < a->size && all[p].digest == all[0].digest)
        p++;
    describe_call(e, call, text);
    if (!err && whole && p < a->size)
        err = fail_different(e, a, text, p);
    if (!err && !whole && p == a->size && all[0].digest)
        warn_of_sum(e, a, text);
    return err ? zr_engine_fail(e, err, zr_error_text()) : 0;
}

/* Warns, on the first of them, of two ranks whose arrays are the same, or that have given this array and the
 * one before in opposite orders. Either may be on purpose, so neither is an error. */
static void warn_of_rows(struct zr_engine *e, struct zr_mesh_axis *a, const struct seen *all, int32_t p,
                         int32_t q, const char *call)
{
    const struct zr_comm *c = e->role[a->role].comm;
    const bool same = all[p].digest && all[p].digest == all[q].digest,
               turned = all[p].distance && all[p].distance == -all[q].distance;
    if (same && !a->said_rows && p == a->rank)
        zr_warn(e->opt.log,
                "check: %s: src is the same on rank %d and rank %d of %s: each must have rows of its own",
                call, zr_comm_rank(c, p), zr_comm_rank(c, q), a->name);
    if (turned && !a->said_order && p == a->rank)
        zr_warn(e->opt.log,
                "check: %s: rank %d and rank %d of %s have given this array and the one before in opposite "
                "orders",
                call, zr_comm_rank(c, p), zr_comm_rank(c, q), a->name);
    a->said_rows |= same;
    a->said_order |= turned;
}

/* In steps that compare: exchanges what the ranks have, and warns. */
static int compare_rows(struct zr_engine *e, struct zr_mesh_axis *a, enum zr_call_name call,
                        const struct zr_arrays *x)
{
    const struct seen *all;
    char text[ZR_CALL_LOG_CHARS];
    ZR_TRY(exchange_seen(e, a, call, x, &all));
    describe_call(e, call, text);
    for (int32_t p = 0; p < a->size; p++)
        for (int32_t q = p + 1; q < a->size; q++)
            warn_of_rows(e, a, all, p, q, text);
    return 0;
}

int zr_engine_compare_rows(struct zr_engine *e, enum zero_axis axis, enum zr_call_name call,
                           const struct zr_arrays *x)
{
    struct zr_mesh_axis *a = zr_axis_of(e, axis);
    const bool compares = zr_compare_is_due(e) && x->n >= FEW_ELEMS;
    int err = compares ? compare_rows(e, a, call, x) : 0;
    a->last_src = x->src;
    return err ? zr_engine_fail(e, err, zr_error_text()) : 0;
}

int zr_engine_exchange_words(struct zr_engine *e, enum zero_axis axis, enum zr_call_name call,
                             const int64_t *mine, int32_t n, const int64_t **all)
{
    struct zr_mesh_axis *a = zr_axis_of(e, axis);
    const int64_t bytes = n * (int64_t)sizeof *mine;
    const struct zr_tag tag = zr_axis_tag(e, a, call, n, COMPARED);
    const void *words;
    *all = NULL;
    if (!zr_compare_is_due(e))
        return 0;
    int err = follow_shift(e, a);
    err = err ? err : zr_axis_exchange(e, a, mine, bytes, &tag, &words);
    zr_do_not_count_axis(e, a->role, bytes);
    if (err)
        return zr_engine_fail(e, err, zr_error_text());
    *all = words;
    return 0;
}
