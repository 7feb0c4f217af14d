/* SPDX-License-Identifier: Apache-2.0 */
/* stored.c: what a model writes into its gradients, watched (cfg.debug.check) on the host.
 *
 * A tensor with ZERO_GRAD_OVERWRITE is filled with one NaN, all bits ones, before backward gets it: what is
 * still that NaN at zero_end was not written, or added to, as a sum keeps the NaN it began with. The NaN of a
 * loss that overflowed is another (x86 makes 0xffc00000, NAN is 0x7fc00000), and is not the model's fault.
 *
 * At stages 0 and 1 a tensor's gradient is followed by bytes that nobody uses (ZR_GAP_BYTES at least) and
 * that are zero: where they are not, backward wrote beyond the end of the tensor. At stages 2 and 3 the
 * memory behind it is closed. */
#include "shard/engine/internal.h"

#include <string.h>

static bool is_watched(const struct zr_engine *e)
{
    return e->watch && e->dev->ops->compute_on_caller;
}

typedef int (*piece_fn)(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p, char *full);

static int for_stored_pieces(struct zr_engine *e, int32_t unit, int32_t slot, piece_fn fn)
{
    const struct zr_layout *l = e->layout;
    const struct zr_unit *u = &l->units[unit];
    int err = 0;
    for (int32_t i = 0; i < u->n_flats; i++) {
        const struct zr_flat *f = &l->flats[u->first_flat + i];
        char *full = f->trainable ? e->reduce_base + zr_plan_grad_full(e->plan, f, slot) : NULL;
        for (int32_t k = 0; !err && full && k < f->n_pieces; k++)
            err = fn(e, f, &l->pieces[f->first_piece + k], full);
    }
    return err;
}

/* ---- ZERO_GRAD_OVERWRITE ---- */

static int fill(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p, char *full)
{
    int64_t size = zr_dtype_bytes(f->dtype);
    if (e->layout->tensors[p->tensor].overwrite)
        memset(full + p->first * size, 0xff, (size_t)(p->n * size));
    return 0;
}

enum seen { A_NUMBER, A_NAN, THE_NAN };

/* The sign may have changed. */
static enum seen look_at_stored(enum zr_dtype dtype, const char *at)
{
    uint32_t word;
    uint16_t half;
    if (dtype == ZR_F32) {
        memcpy(&word, at, sizeof word);
        word &= 0x7fffffff;
        return word == 0x7fffffff ? THE_NAN : word > 0x7f800000 ? A_NAN : A_NUMBER;
    }
    memcpy(&half, at, sizeof half);
    half &= 0x7fff;
    return half == 0x7fff ? THE_NAN : half > (dtype == ZR_BF16 ? 0x7f80 : 0x7c00) ? A_NAN : A_NUMBER;
}

static int look_at_piece(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p, char *full)
{
    const struct zr_tensor *t = &e->layout->tensors[p->tensor];
    int64_t size = zr_dtype_bytes(f->dtype), n_nan = 0;
    for (int64_t i = 0; t->overwrite && i < p->n; i++) {
        enum seen seen = look_at_stored(f->dtype, full + (p->first + i) * size);
        n_nan += seen != A_NUMBER;
        if (seen == THE_NAN)
            return zr_fail(
                ZR_ERR_ORDER,
                "check: the model's fault: tensor %s has ZERO_GRAD_OVERWRITE, but between "
                "zero_begin and zero_end of unit %d in backward it adds to its gradient, or leaves "
                "element %lld unwritten: store every element, or drop the flag",
                t->name, f->unit, (long long)(p->slice * p->n + i));
    }
    /* A conversion to 16 bits may have made it the usual NaN, which overflow makes, too. */
    if (t->overwrite && size == 2 && n_nan == p->n)
        zr_warn(e->opt.log,
                "check: every element of the gradient of tensor %s (unit %d) is NaN: either the model's "
                "values are NaN, or it adds to this gradient in spite of ZERO_GRAD_OVERWRITE (with check 1 "
                "the gradient is NaN before backward)",
                t->name, f->unit);
    return 0;
}

/* ---- the gaps of stages 0 and 1 ---- */

/* Bytes [first, end) of its flat, none behind a layer that another one follows. */
static int64_t gap_of(const struct zr_layout *l, const struct zr_flat *f, const struct zr_piece *p,
                      int64_t *end)
{
    int64_t size = zr_dtype_bytes(f->dtype), first = (p->first + p->n) * size;
    if (!f->in_place)
        *end = p + 1 < l->pieces + f->first_piece + f->n_pieces ? p[1].first * size : f->inner.total;
    else
        *end = first + (p->slice == l->tensors[p->tensor].n_slices - 1 ? ZR_GAP_BYTES : 0);
    return first;
}

/* A gradient that went out as bf16 was narrowed where it lies, which moves the pieces together, and one that
 * is overwritten is not zeroed since. */
static int clear_behind(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p, char *full)
{
    int64_t end, first = gap_of(e->layout, f, p, &end);
    memset(full + first, 0, (size_t)(end - first));
    return 0;
}

static int look_behind(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p, char *full)
{
    int64_t end, first = gap_of(e->layout, f, p, &end);
    for (int64_t i = first; i < end; i++)
        if (full[i])
            return zr_fail(ZR_ERR_ORDER,
                           "check: the model's fault: it wrote beyond the end of the gradient of tensor %s "
                           "(unit %d), %lld bytes after it: its shape in zero_wrap's table is smaller than "
                           "what the model uses, or an index is too large",
                           e->layout->tensors[p->tensor].name, f->unit, (long long)(i - first));
    return 0;
}

/* ---- */

void zr_stored_begin(struct zr_engine *e, const struct zr_action *a)
{
    if (!is_watched(e))
        return;
    if (a->bracket)
        for_stored_pieces(e, a->unit, a->slot, fill);
    if (e->layout->gaps && a->fill)
        for_stored_pieces(e, a->unit, a->slot, clear_behind);
}

int zr_stored_end(struct zr_engine *e, int32_t unit, int32_t slot, bool bracket)
{
    if (!is_watched(e))
        return 0;
    int err = e->layout->gaps ? for_stored_pieces(e, unit, slot, look_behind) : 0;
    return !err && bracket ? for_stored_pieces(e, unit, slot, look_at_piece) : err;
}
