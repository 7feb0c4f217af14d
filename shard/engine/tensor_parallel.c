/* SPDX-License-Identifier: Apache-2.0 */
/* tensor_parallel.c: sums, reduce-scatters, gathers, maxima and broadcasts over the tp ranks of one copy of
 * the model, on the model's stream.
 *
 * Activations are anywhere in the program's memory and of any size. NCCL gathers them there, and adds them up
 * there if `deterministic` is off (zr_comm_arrays). If it is on, it adds up small ones after a gather.
 * Otherwise peers read arenas, so activations go through an arena in pieces. For a sum, a piece is copied to
 * `in`, its sum is scattered to one of two `out`, gathered there in place, and copied back. The next sum uses
 * the other `out`, because peers may still be gathering from this one until each has reached the next sum
 * (comm/comm.h). A reduce-scatter, which sequence parallelism uses, leaves out the gather, and copies only
 * this rank's part back. Gathers, maxima and broadcasts stay in `in`. */
#include "shard/engine/internal.h"
#include "shard/engine/issue.h"

#include <stdio.h>
#include <string.h>
#include <xxhash.h>

/* A piece is cut into a slice for each rank. All slices have room for the same number of bytes; the last may
 * be partly or wholly empty. */
enum {
    CUT_BYTES = 128,
    IN_AT = 0,
    IN_BYTES = ZR_TP_ELEMS * (int)sizeof(float),
    /* A slice has a multiple of CUT_BYTES. So tp slices take at most tp * CUT_BYTES more than their elements,
     * which are IN_BYTES of f32, or half of that of bf16. For bf16, one slice is also stored as fp32, in
     * IN_BYTES / tp + 2 * CUT_BYTES. As tp is at least 2, all fit into IN_BYTES + tp * CUT_BYTES * 2. */
    OUT_BYTES = IN_BYTES + ZR_TP_RANKS * CUT_BYTES * 2,
    /* a struct zr_shard_digest, and behind it the digests of partial gradients */
    DIGESTS_AT = IN_BYTES + 2 * OUT_BYTES,
    MAX_PARTIAL = (ZR_TP_BYTES - DIGESTS_AT - (int)sizeof(struct zr_shard_digest)) / (int)sizeof(uint64_t),
    MAX_GATHERED_BYTES = 512 << 10, /* largest array that sum_gathered adds up */
    FEW_ELEMS = 8,                  /* with fewer elements, equal gradients or activations prove nothing */
    COMPARED = -2,                  /* kind of a comparison's tag, in place of a dtype */
};
_Static_assert(MAX_PARTIAL >= 8192 && ZR_TP_BYTES % 4096 == 0, "in, out twice, and digests");
_Static_assert(ZR_TP_RANKS <= ZR_MAX_SOURCES, "a maximum has a source for each rank");

struct zr_tp {
    char *base;
    /* number of the `out` that the last sum went through */
    int out;
    /* hash of all collectives over tp so far, even those that move nothing */
    uint64_t calls;
    /* (n_pieces) number of the piece's digest among those of n_partial partial gradients, -1: none */
    int32_t *partial;
    int32_t n_partial;
    /* contributions to digests so far */
    uint64_t n_digested;
    /* the digests have contributions that were not compared yet */
    bool digested;
    /* warned that a partial gradient, or the contributions to a sum, were the same on all tp ranks */
    bool said_partial, said_sum;
};

/* Numbers the partial gradients that are compared. */
static int number_partial(struct zr_engine *e)
{
    const struct zr_layout *l = e->layout;
    ZR_TABLE(e, e->m.tp->partial, l->n_pieces);
    for (int32_t k = 0; k < l->n_pieces; k++) {
        bool compared = l->tensors[l->pieces[k].tensor].partial && l->pieces[k].n >= FEW_ELEMS &&
                        zr_piece_flat(l, k)->trainable && e->m.tp->n_partial < MAX_PARTIAL;
        e->m.tp->partial[k] = compared ? e->m.tp->n_partial++ : -1;
    }
    return 0;
}

int zr_tp_open(struct zr_engine *e)
{
    ZR_TABLE(e, e->m.tp, 1);
    return number_partial(e);
}

int zr_tp_allocate(struct zr_engine *e)
{
    const enum zr_role role = ZR_ROLE_TP;
    if (!e->plan->tp_bytes)
        return 0;
    ZR_TRY(zr_engine_open_arena(e, &role, 1, e->plan->tp_bytes, &e->m.tp->base));
    return e->dev->ops->zero(e->compute, e->m.tp->base + DIGESTS_AT, ZR_TP_BYTES - DIGESTS_AT);
}

/* Returns the byte offset of out number 0 or 1. */
static int64_t out_at(int out)
{
    return IN_BYTES + out * (int64_t)OUT_BYTES;
}

struct zr_tag zr_tp_tag(const struct zr_engine *e, enum zr_call_name call, int64_t n, int32_t kind)
{
    const int64_t words[] = {call, n, kind, (int64_t)e->m.tp->calls};
    return (struct zr_tag){.unit = zr_core_open_unit(e->m.core),
                           .step = zr_step_number(e),
                           .call_hash = XXH3_64bits_withSeed(words, sizeof words, zr_core_hash(e->m.core))};
}

/* Sums the piece in `in` over tp, to out number `out`, in the same dtype. Each rank adds up its slice in
 * fp32. If dtype is not fp32, the fp32 sums lie behind the piece, and are rounded before they are
 * gathered. */
static int sum_piece(struct zr_engine *e, int64_t n, enum zero_dtype dtype, int out, const struct zr_tag *tag)
{
    const bool rounds = dtype != ZERO_F32;
    const int64_t size = zr_dtype_bytes(dtype), each = zr_round_up((n + e->tp - 1) / e->tp * size, CUT_BYTES);
    const struct zr_cut cut = {.each = each, .total = n * size};
    const int64_t at = out_at(out), slice = at + zr_cut_at(&cut, e->tp_rank),
                  sums = rounds ? at + e->tp * each : slice;
    const struct zr_reduce_seg reduce = {.src = IN_AT, .dst = sums, .cut = cut, .dtype = dtype};
    const struct zr_gather_seg gather = {.src = at, .dst = at, .in_place = true, .cut = cut};
    ZR_TRY(zr_role_reduce(e, ZR_ROLE_TP, &reduce, 1, tag));
    if (rounds)
        ZR_TRY(e->dev->ops->cast(e->compute, e->m.tp->base + slice, dtype, e->m.tp->base + sums, ZERO_F32,
                                 zr_cut_bytes(&cut, e->tp_rank) / size));
    return zr_role_gather(e, ZR_ROLE_TP, &gather, 1, tag);
}

static int sum_all(struct zr_engine *e, char *dst, const char *src, int64_t n, enum zero_dtype dtype,
                   const struct zr_tag *tag)
{
    const struct zr_device_ops *d = e->dev->ops;
    const int64_t size = zr_dtype_bytes(dtype);
    for (int64_t at = 0, k; at < n; at += k) {
        k = zr_min(n - at, ZR_TP_ELEMS);
        int out = e->m.tp->out ^= 1;
        ZR_TRY(d->copy(e->compute, e->m.tp->base + IN_AT, src + at * size, k * size));
        ZR_TRY(sum_piece(e, k, dtype, out, tag));
        ZR_TRY(d->copy(e->compute, dst + at * size, e->m.tp->base + out_at(out), k * size));
    }
    return 0;
}

/* Reduce-scatters src, `part` elements for each rank. `in` has a slice for each rank. Bytes behind a slice's
 * elements are added up with them, and not used. */
static int scatter_pieces(struct zr_engine *e, char *dst, const char *src, int64_t part,
                          enum zero_dtype dtype, const struct zr_tag *tag)
{
    const struct zr_device_ops *d = e->dev->ops;
    const int64_t size = zr_dtype_bytes(dtype), most = IN_BYTES / e->tp / CUT_BYTES * CUT_BYTES / size;
    for (int64_t at = 0, k; at < part; at += k) {
        k = zr_min(part - at, most);
        int64_t each = zr_round_up(k * size, CUT_BYTES), sums = out_at(e->m.tp->out ^= 1);
        for (int32_t p = 0; p < e->tp; p++)
            ZR_TRY(d->copy(e->compute, e->m.tp->base + IN_AT + p * each, src + (p * part + at) * size,
                           k * size));
        const struct zr_reduce_seg reduce = {
            .src = IN_AT, .dst = sums, .cut = {.each = each, .total = e->tp * each}, .dtype = dtype};
        ZR_TRY(zr_role_reduce(e, ZR_ROLE_TP, &reduce, 1, tag));
        ZR_TRY(
            d->cast(e->compute, dst + at * size, dtype, (const float *)(e->m.tp->base + sums), ZERO_F32, k));
    }
    return 0;
}

/* Gathers `part` elements of each rank. It uses exchanges, after which no peer reads `in`, so it needs no
 * `out`. */
static int gather_pieces(struct zr_engine *e, char *dst, const char *src, int64_t part, enum zero_dtype dtype,
                         const struct zr_tag *tag)
{
    const struct zr_device_ops *d = e->dev->ops;
    const int64_t size = zr_dtype_bytes(dtype), most = IN_BYTES / e->tp / size;
    for (int64_t at = 0, k; at < part; at += k) {
        k = zr_min(part - at, most);
        const int64_t slot = k * size; /* bytes of one rank's part of `in` */
        ZR_TRY(d->copy(e->compute, e->m.tp->base + IN_AT + e->tp_rank * slot, src + at * size, slot));
        ZR_TRY(zr_role_exchange(e, ZR_ROLE_TP, IN_AT, slot, tag));
        for (int32_t p = 0; p < e->tp; p++)
            ZR_TRY(d->copy(e->compute, dst + (p * part + at) * size, e->m.tp->base + IN_AT + p * slot, slot));
    }
    return 0;
}

/* Every rank goes through the parts in the same order, so that all ranks keep the same bits: 0 and -0 compare
 * as equal. */
static int max_over_tp(struct zr_engine *e, char *dst, const char *src, int64_t n, enum zero_dtype dtype,
                       const struct zr_tag *tag)
{
    const struct zr_device_ops *d = e->dev->ops;
    const int64_t size = zr_dtype_bytes(dtype), most = ZR_TP_ELEMS / e->tp;
    for (int64_t at = 0, k; at < n; at += k) {
        k = zr_min(n - at, most);
        const int64_t slot = k * size; /* bytes of one rank's part of `in` */
        const void *parts[ZR_TP_RANKS];
        for (int32_t p = 0; p < e->tp; p++)
            parts[p] = e->m.tp->base + IN_AT + p * slot;
        ZR_TRY(d->copy(e->compute, e->m.tp->base + IN_AT + e->tp_rank * slot, src + at * size, slot));
        ZR_TRY(zr_role_exchange(e, ZR_ROLE_TP, IN_AT, slot, tag));
        ZR_TRY(d->maximum(e->compute, dst + at * size, parts, e->tp, dtype, k));
    }
    return 0;
}

static int broadcast_pieces(struct zr_engine *e, int32_t root, char *buf, int64_t bytes,
                            const struct zr_tag *tag)
{
    const struct zr_device_ops *d = e->dev->ops;
    char *in = e->m.tp->base + IN_AT;
    for (int64_t at = 0, k; at < bytes; at += k) {
        k = zr_min(bytes - at, IN_BYTES);
        if (e->tp_rank == root)
            ZR_TRY(d->copy(e->compute, in, buf + at, k));
        ZR_TRY(zr_role_broadcast(e, ZR_ROLE_TP, IN_AT, k, root, tag));
        if (e->tp_rank != root)
            ZR_TRY(d->copy(e->compute, buf + at, in, k));
    }
    return 0;
}

void zr_engine_tp_called(struct zr_engine *e, uint64_t call)
{
    e->m.tp->calls = XXH3_64bits_withSeed(&call, sizeof call, e->m.tp->calls);
}

/* Whether sum_gathered may add up the array: the communicator gathers arrays, and the arena has room for all
 * ranks' arrays and their sum in fp32. Large arrays would be sent to more ranks than need them. */
static bool may_sum_gathered(const struct zr_engine *e, int64_t n, enum zero_dtype dtype)
{
    const int64_t bytes = n * zr_dtype_bytes(dtype);
    return zr_comm_has_arrays(e->role[ZR_ROLE_TP].comm, ZR_OP_ALL_GATHER) && bytes <= MAX_GATHERED_BYTES &&
           e->tp * bytes + CUT_BYTES + n * (int64_t)sizeof(float) <= DIGESTS_AT;
}

/* Sums arrays with the bits of sum_all and fewer operations: gathers src of all ranks to the arena, which no
 * other rank reads then, and adds them in the fixed tree. */
static int sum_gathered(struct zr_engine *e, void *dst, const void *src, int64_t n, enum zero_dtype dtype,
                        const struct zr_tag *tag)
{
    const struct zr_device_ops *d = e->dev->ops;
    const int64_t bytes = n * zr_dtype_bytes(dtype);
    char *base = e->m.tp->base;
    const struct zr_arrays gathered = {base, src, n, dtype};
    const void *parts[ZR_TP_RANKS];
    for (int32_t p = 0; p < e->tp; p++)
        parts[p] = base + p * bytes;
    float *sums = dtype == ZERO_F32 ? dst : base + zr_round_up(e->tp * bytes, CUT_BYTES);
    ZR_TRY(zr_role_arrays(e, ZR_ROLE_TP, ZR_OP_ALL_GATHER, &gathered, tag));
    ZR_TRY(d->sum_tree(e->compute, sums, parts, e->tp, dtype, n, false));
    return dtype == ZERO_F32 ? 0 : d->cast(e->compute, dst, dtype, sums, ZERO_F32, n);
}

/* Combines arrays over tp, by one operation if the communicator can, otherwise through the arena. n is the
 * number of elements of the smaller array. */
static int combine(struct zr_engine *e, enum zr_op op, void *dst, const void *src, int64_t n,
                   enum zero_dtype dtype, const struct zr_tag *tag)
{
    const struct zr_arrays arrays = {dst, src, n, dtype};
    if (!n)
        return 0;
    if (zr_comm_has_arrays(e->role[ZR_ROLE_TP].comm, op))
        return zr_role_arrays(e, ZR_ROLE_TP, op, &arrays, tag);
    if (op == ZR_OP_ALL_REDUCE && may_sum_gathered(e, n, dtype))
        return sum_gathered(e, dst, src, n, dtype, tag);
    return (op == ZR_OP_ALL_GATHER       ? gather_pieces
            : op == ZR_OP_REDUCE_SCATTER ? scatter_pieces
                                         : sum_all)(e, dst, src, n, dtype, tag);
}

/* Exchanges what each rank has in its part of `in`, and copies all parts to host memory. */
static int exchange_in(struct zr_engine *e, int64_t bytes, const struct zr_tag *tag, const void **all)
{
    *all = e->words;
    ZR_TRY(zr_role_exchange(e, ZR_ROLE_TP, IN_AT, bytes, tag));
    ZR_TRY(e->dev->ops->copy(e->compute, e->words, e->m.tp->base + IN_AT, e->tp * bytes));
    ZR_TRY(e->dev->ops->event_record(e->ev.drained, e->compute));
    return zr_engine_wait(e, e->ev.drained);
}

int zr_tp_exchange(struct zr_engine *e, const void *mine, int64_t bytes, const struct zr_tag *tag,
                   const void **all)
{
    ZR_TRY(e->dev->ops->copy(e->compute, e->m.tp->base + IN_AT + e->tp_rank * bytes, mine, bytes));
    return exchange_in(e, bytes, tag, all);
}

struct zr_shard_digest *zr_tp_shard_digest(const struct zr_engine *e)
{
    return (struct zr_shard_digest *)(e->m.tp->base + DIGESTS_AT);
}

/* A failure of a collective over tp ends the context. */
static int end_collective(struct zr_engine *e, int err)
{
    return err ? zr_engine_fail(e, err, zr_error_text()) : zr_engine_status(e);
}

int zr_engine_tp_sum(struct zr_engine *e, enum zr_call_name call, void *dst, const void *src, int64_t n,
                     enum zero_dtype dtype)
{
    const struct zr_tag tag = zr_tp_tag(e, call, n, dtype);
    return end_collective(e, combine(e, ZR_OP_ALL_REDUCE, dst, src, n, dtype, &tag));
}

int zr_engine_tp_scatter(struct zr_engine *e, enum zr_call_name call, void *dst, const void *src, int64_t n,
                         enum zero_dtype dtype)
{
    const struct zr_tag tag = zr_tp_tag(e, call, n, dtype);
    return end_collective(e, combine(e, ZR_OP_REDUCE_SCATTER, dst, src, n / e->tp, dtype, &tag));
}

int zr_engine_tp_gather(struct zr_engine *e, enum zr_call_name call, void *dst, const void *src, int64_t n,
                        enum zero_dtype dtype)
{
    const struct zr_tag tag = zr_tp_tag(e, call, n, dtype);
    return end_collective(e, combine(e, ZR_OP_ALL_GATHER, dst, src, n / e->tp, dtype, &tag));
}

int zr_engine_tp_max(struct zr_engine *e, enum zr_call_name call, void *dst, const void *src, int64_t n,
                     enum zero_dtype dtype)
{
    const struct zr_tag tag = zr_tp_tag(e, call, n, dtype);
    return end_collective(e, max_over_tp(e, dst, src, n, dtype, &tag));
}

int zr_engine_tp_broadcast(struct zr_engine *e, enum zr_call_name call, int32_t root, void *buf,
                           int64_t bytes)
{
    const struct zr_tag tag = zr_tp_tag(e, call, bytes, root);
    return end_collective(e, broadcast_pieces(e, root, buf, bytes, &tag));
}

int zr_engine_copy(struct zr_engine *e, void *dst, const void *src, int64_t n_bytes)
{
    return dst == src || !n_bytes ? 0 : e->dev->ops->copy(e->compute, dst, src, n_bytes);
}

/* ---- gradients that are partial on each tp rank ---- */

static bool is_partial(const struct zr_engine *e, const struct zr_piece *p)
{
    return e->layout->tensors[p->tensor].partial;
}

static int64_t partial_elems(const struct zr_engine *e, const struct zr_flat *f)
{
    int64_t n = 0;
    for (int32_t k = 0; f->trainable && k < f->n_pieces; k++)
        if (is_partial(e, &e->layout->pieces[f->first_piece + k]))
            n += e->layout->pieces[f->first_piece + k].n;
    return n;
}

/* Moves the flat's partial gradients, whose elements are counted end to end over its pieces. Copies elements
 * [at, at + n) from full to `in`. If sums is not NULL, copies them from there back to full. */
static int move_partial_grads(struct zr_engine *e, const struct zr_flat *f, char *full, int64_t at, int64_t n,
                              const char *sums)
{
    const struct zr_device_ops *d = e->dev->ops;
    const int64_t size = zr_dtype_bytes(f->dtype);
    for (int32_t k = 0; k < f->n_pieces; k++) {
        const struct zr_piece *p = &e->layout->pieces[f->first_piece + k];
        if (!is_partial(e, p))
            continue;
        /* at counts from this piece's first element */
        int64_t from = zr_max(at, 0), end = zr_min(at + n, p->n);
        char *x = full + (p->first + from) * size;
        if (from < end && sums)
            ZR_TRY(d->copy(e->compute, x, sums + (from - at) * size, (end - from) * size));
        else if (from < end)
            ZR_TRY(d->copy(e->compute, e->m.tp->base + IN_AT + (from - at) * size, x, (end - from) * size));
        at -= p->n;
    }
    return 0;
}

/* Returns the digests of partial gradients, in the arena. */
static uint64_t *partial_digests(const struct zr_engine *e)
{
    return (uint64_t *)(zr_tp_shard_digest(e) + 1);
}

/* Adds the flat's partial gradients, before they are summed, to their digests. Each contribution has other
 * numbers of words, which are the same on all tp ranks. So ranks differ if they swap two contributions. */
static int digest_partial(struct zr_engine *e, const struct zr_flat *f, const char *full)
{
    const int64_t size = zr_dtype_bytes(f->dtype);
    const int32_t *number = e->m.tp->partial + f->first_piece;
    const struct zr_piece *p = &e->layout->pieces[f->first_piece];
    const uint64_t first_word = ++e->m.tp->n_digested << 40;
    for (int32_t k = 0; k < f->n_pieces; k++)
        if (number[k] >= 0)
            ZR_TRY(e->dev->ops->digest(e->compute, partial_digests(e) + number[k], full + p[k].first * size,
                                       p[k].n * size, first_word));
    e->m.tp->digested = true;
    return 0;
}

static void warn_of_partial(struct zr_engine *e, int32_t number)
{
    int32_t k = 0;
    while (e->m.tp->partial[k] != number)
        k++;
    zr_warn(e->opt.log,
            "the gradient of tensor %s is the same on all %d ranks of tp, but with ZERO_TP_PARTIAL each must "
            "give that of its own rows: if each gives that of all rows, it counts %d times",
            e->layout->tensors[e->layout->pieces[k].tensor].name, e->tp, e->tp);
    e->m.tp->said_partial = true;
}

/* Warns if partial gradients are the same on all tp ranks. With sequence parallelism each rank has other
 * tokens, so gradients differ. Equal ones are most likely gradients of all tokens, and would be counted once
 * per rank. But a loss that is linear in a bias also gives equal ones, so this is no error. */
static int compare_partial(struct zr_engine *e)
{
    const int32_t most = ZR_EXCHANGE_BYTES / (int)sizeof(uint64_t);
    for (int32_t at = 0, n; at < e->m.tp->n_partial; at += n) {
        n = (int32_t)zr_min(e->m.tp->n_partial - at, most);
        const struct zr_tag tag = zr_tp_tag(e, ZR_CALL_STEP, n, at);
        const void *words;
        ZR_TRY(zr_tp_exchange(e, partial_digests(e) + at, n * (int64_t)sizeof(uint64_t), &tag, &words));
        const uint64_t *all = words;
        for (int32_t k = 0; k < n && !e->m.tp->said_partial; k++) {
            bool same = all[k] != 0;
            for (int32_t p = 1; p < e->tp; p++)
                same &= all[p * n + k] == all[k];
            if (same)
                warn_of_partial(e, at + k);
        }
    }
    e->m.tp->digested = false;
    return e->dev->ops->zero(e->compute, partial_digests(e), e->m.tp->n_partial * (int64_t)sizeof(uint64_t));
}

int zr_tp_compare_partial(struct zr_engine *e)
{
    if (!e->m.tp->digested)
        return 0;
    zr_do_not_count_tp(e, e->m.tp->n_partial * (int64_t)sizeof(uint64_t));
    return zr_engine_note(e, compare_partial(e));
}

int zr_tp_sum_grads(struct zr_engine *e, int32_t unit, int32_t slot, bool *any)
{
    /* Two schedules compare. Check mode has one (zr_compare_is_due). In any mode, steps 1, 2, 4, 8 and 16
     * compare (zr_tp_compares). said_partial is the same on all ranks, which compare the same digests. */
    const bool is_due = zr_compare_is_due(e) || zr_tp_compares(e, zr_step_calls(e) + 1),
               compares = e->tp > 1 && is_due && !e->m.tp->said_partial;
    const struct zr_unit *u = &e->layout->units[unit];
    *any = false;
    for (int32_t i = 0; e->tp > 1 && i < u->n_flats; i++) {
        const struct zr_flat *f = &e->layout->flats[u->first_flat + i];
        const int64_t n = partial_elems(e, f);
        char *full = n ? e->reduce_base + zr_plan_grad_full(e->plan, f, slot) : NULL;
        const struct zr_tag tag = zr_tp_tag(e, ZR_CALL_END, n, unit);
        if (n && compares)
            ZR_TRY(digest_partial(e, f, full));
        for (int64_t at = 0, k; at < n; at += k) {
            k = zr_min(n - at, ZR_TP_ELEMS);
            int out = e->m.tp->out ^= 1;
            ZR_TRY(move_partial_grads(e, f, full, at, k, NULL));
            ZR_TRY(sum_piece(e, k, f->dtype, out, &tag));
            ZR_TRY(move_partial_grads(e, f, full, at, k, e->m.tp->base + out_at(out)));
        }
        *any |= n > 0;
    }
    return *any ? zr_engine_status(e) : 0;
}

/* ---- whole and partial activations ---- */

/* Exchanges digests of each tp rank's x. A digest is 0 if all of x is 0. */
static int exchange_digests(struct zr_engine *e, enum zr_call_name call, const void *x, int64_t n,
                            int64_t n_bytes, const uint64_t **all)
{
    const struct zr_tag tag = zr_tp_tag(e, call, n, COMPARED);
    uint64_t *mine = (uint64_t *)(e->m.tp->base + IN_AT) + e->tp_rank;
    const void *words = NULL;
    int err = e->dev->ops->zero(e->compute, mine, sizeof *mine);
    if (!err)
        err = e->dev->ops->digest(e->compute, mine, x, n_bytes, 0);
    if (!err)
        err = exchange_in(e, sizeof *mine, &tag, &words);
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

static int fail_different(const struct zr_engine *e, const char *call, int32_t p)
{
    const struct zr_comm *c = e->role[ZR_ROLE_TP].comm;
    return zr_fail(ZERO_ERR_MISMATCH,
                   "%s: check: src is not the same on all ranks of tp: rank %d and rank %d differ; allowed: "
                   "equal values on all of them, such as the result of zero_all_reduce or zero_all_gather",
                   call, zr_comm_rank(c, 0), zr_comm_rank(c, p));
}

static void warn_of_sum(struct zr_engine *e, const char *call)
{
    if (!e->m.tp->said_sum)
        zr_warn(e->opt.log,
                "check: %s: src is the same on all %d ranks of tp, and is added up: if each rank has all of "
                "it, it counts %d times",
                call, e->tp, e->tp);
    e->m.tp->said_sum = true;
}

int zr_engine_compare_activation(struct zr_engine *e, enum zr_call_name call, const void *x, int64_t n,
                                 enum zero_dtype dtype, bool whole)
{
    const uint64_t *all;
    char text[ZR_CALL_LOG_CHARS];
    if (e->tp == 1 || !zr_compare_is_due(e) || (!whole && n < FEW_ELEMS))
        return 0;
    int err = exchange_digests(e, call, x, n, n * zr_dtype_bytes(dtype), &all);
    zr_do_not_count_tp(e, sizeof *all);
    int32_t p = 1;
    while (!err && p < e->tp && all[p] == all[0])
        p++;
    describe_call(e, call, text);
    if (!err && whole && p < e->tp)
        err = fail_different(e, text, p);
    if (!err && !whole && p == e->tp && all[0])
        warn_of_sum(e, text);
    return err ? zr_engine_fail(e, err, zr_error_text()) : 0;
}
