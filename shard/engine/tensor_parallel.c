/* SPDX-License-Identifier: Apache-2.0 */
/* tensor_parallel.c: gradients that are partial on each tp rank (ZERO_TP_PARTIAL). zero_end sums them over
 * tp, in pieces through the axis's arena, before they are reduced over data-parallel ranks. In the steps that
 * compare, the ranks also compare digests of them. */
#include "shard/engine/issue.h"
#include "shard/engine/mesh_axis.h"

enum {
    /* a struct zr_shard_digest, and behind it the digests of partial gradients */
    DIGESTS_AT = ZR_AXIS_END,
    MAX_PARTIAL = (ZR_AXIS_BYTES - DIGESTS_AT - (int)sizeof(struct zr_shard_digest)) / (int)sizeof(uint64_t),
    FEW_ELEMS = 8, /* with fewer elements, equal gradients prove nothing */
};
_Static_assert(MAX_PARTIAL >= 8192 && ZR_AXIS_BYTES % 4096 == 0, "in, out twice, and digests");

struct zr_tp {
    /* (n_pieces) number of the piece's digest among those of n_partial partial gradients, -1: none */
    int32_t *partial;
    int32_t n_partial;
    /* contributions to digests so far */
    uint64_t n_digested;
    /* the digests have contributions that were not compared yet */
    bool digested;
    /* warned that a partial gradient was the same on all tp ranks */
    bool said_partial;
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

struct zr_shard_digest *zr_tp_shard_digest(const struct zr_engine *e)
{
    return (struct zr_shard_digest *)(e->m.tp_axis->base + DIGESTS_AT);
}

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
            ZR_TRY(d->copy(e->compute, e->m.tp_axis->base + ZR_AXIS_IN_AT + (from - at) * size, x,
                           (end - from) * size));
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
        const struct zr_tag tag = zr_axis_tag(e, e->m.tp_axis, ZR_CALL_STEP, n, at);
        const void *words;
        ZR_TRY(zr_axis_exchange(e, e->m.tp_axis, partial_digests(e) + at, n * (int64_t)sizeof(uint64_t), &tag,
                                &words));
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
    zr_do_not_count_axis(e, ZR_ROLE_TP, e->m.tp->n_partial * (int64_t)sizeof(uint64_t));
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
        const struct zr_tag tag = zr_axis_tag(e, e->m.tp_axis, ZR_CALL_END, n, unit);
        if (n && compares)
            ZR_TRY(digest_partial(e, f, full));
        for (int64_t at = 0, k; at < n; at += k) {
            k = zr_min(n - at, ZR_AXIS_ELEMS);
            int out = e->m.tp_axis->out ^= 1;
            ZR_TRY(move_partial_grads(e, f, full, at, k, NULL));
            ZR_TRY(zr_axis_sum_piece(e, e->m.tp_axis, k, f->dtype, out, &tag));
            ZR_TRY(move_partial_grads(e, f, full, at, k, e->m.tp_axis->base + zr_axis_out_at(out)));
        }
        *any |= n > 0;
    }
    return *any ? zr_engine_status(e) : 0;
}
