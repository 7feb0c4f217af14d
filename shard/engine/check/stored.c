/* SPDX-License-Identifier: Apache-2.0 */
/* stored.c: checks what the model writes into its gradients (cfg.debug.check), on the host.
 *
 * A tensor with ZERO_GRAD_OVERWRITE is filled with one NaN, all bits ones, before backward gets it. An
 * element that is still that NaN at zero_end was not written, or was added to. The NaN of a loss that
 * overflowed has other bits (x86 makes 0xffc00000, NAN is 0x7fc00000), and is not the model's fault.
 *
 * At stages 0 and 1 a tensor's gradient is followed by at least ZR_GAP_BYTES that are zero and unused. If
 * they are not zero at zero_end, backward wrote beyond the end of the tensor. At stages 2 and 3 the memory
 * behind it is closed. */
#include "shard/engine/check/observers.h"
#include "shard/engine/internal.h"
#include "shard/engine/issue.h"

#include <string.h>

/* ---- ZERO_GRAD_OVERWRITE ---- */

static int fill(struct zr_observer *o, const struct zr_flat *f, const struct zr_piece *p, char *full)
{
    int64_t size = zr_dtype_bytes(f->dtype);
    if (o->e->layout->tensors[p->tensor].overwrite)
        memset(full + p->first * size, 0xff, (size_t)(p->n * size));
    return 0;
}

/* Says what an element holds. THE_NAN: the one that it was filled with. */
enum seen { A_NUMBER, A_NAN, THE_NAN };

/* Tells what an element holds. Ignores the sign, which may have changed. */
static enum seen look_at_stored(enum zero_dtype dtype, const char *at)
{
    uint32_t word;
    uint16_t bits16;
    if (dtype == ZERO_F32) {
        memcpy(&word, at, sizeof word);
        word &= 0x7fffffff;
        return word == 0x7fffffff ? THE_NAN : word > 0x7f800000 ? A_NAN : A_NUMBER;
    }
    memcpy(&bits16, at, sizeof bits16);
    bits16 &= 0x7fff;
    return bits16 == 0x7fff ? THE_NAN : bits16 > (dtype == ZERO_BF16 ? 0x7f80 : 0x7c00) ? A_NAN : A_NUMBER;
}

/* Checks that backward wrote each element of a tensor with ZERO_GRAD_OVERWRITE. */
static int look_at_piece(struct zr_observer *o, const struct zr_flat *f, const struct zr_piece *p, char *full)
{
    const struct zr_tensor *t = &o->e->layout->tensors[p->tensor];
    int64_t size = zr_dtype_bytes(f->dtype), n_nan = 0;
    for (int64_t i = 0; t->overwrite && i < p->n; i++) {
        enum seen seen = look_at_stored(f->dtype, full + (p->first + i) * size);
        n_nan += seen != A_NUMBER;
        if (seen == THE_NAN)
            return zr_fail(
                ZERO_ERR_ORDER,
                "check: the model's fault: tensor %s has ZERO_GRAD_OVERWRITE, but between "
                "zero_begin and zero_end of unit %d in backward it adds to its gradient, or leaves "
                "element %lld unwritten: store every element, or drop the flag",
                t->name, f->unit, (long long)(p->layer * p->n + i));
    }
    /* A conversion to 16 bits may have made it the usual NaN, which an overflow also makes. */
    if (t->overwrite && size == 2 && n_nan == p->n)
        zr_warn(o->e->opt.log,
                "check: every element of the gradient of tensor %s (unit %d) is NaN: either the model's "
                "values are NaN, or it adds to this gradient in spite of ZERO_GRAD_OVERWRITE (with check 1 "
                "the gradient is NaN before backward)",
                t->name, f->unit);
    return 0;
}

/* ---- the gaps of stages 0 and 1 ---- */

/* Returns the first byte, in its flat, of the gap behind the piece; *end is the end. There is no gap between
 * layers. */
static int64_t gap_of(const struct zr_layout *l, const struct zr_flat *f, const struct zr_piece *p,
                      int64_t *end)
{
    int64_t size = zr_dtype_bytes(f->dtype), first = (p->first + p->n) * size;
    if (!f->in_place)
        *end = p + 1 < l->pieces + f->first_piece + f->n_pieces ? p[1].first * size : f->inner.total;
    else
        *end = first + (p->layer == l->tensors[p->tensor].n_layers - 1 ? ZR_GAP_BYTES : 0);
    return first;
}

/* Clears the gap. If the gradient was sent as bf16, it was narrowed in place, which moved the pieces
 * together, and a gradient that backward overwrites has not been zeroed since. */
static int clear_behind(struct zr_observer *o, const struct zr_flat *f, const struct zr_piece *p, char *full)
{
    int64_t end, first = gap_of(o->e->layout, f, p, &end);
    memset(full + first, 0, (size_t)(end - first));
    return 0;
}

/* Checks that the gap is still zero. */
static int look_behind(struct zr_observer *o, const struct zr_flat *f, const struct zr_piece *p, char *full)
{
    int64_t end, first = gap_of(o->e->layout, f, p, &end);
    for (int64_t i = first; i < end; i++)
        if (full[i])
            return zr_fail(ZERO_ERR_ORDER,
                           "check: the model's fault: it wrote beyond the end of the gradient of tensor %s "
                           "(unit %d), %lld bytes after it: its shape in zero_wrap's table is smaller than "
                           "what the model uses, or an index is too large",
                           o->e->layout->tensors[p->tensor].name, f->unit, (long long)(i - first));
    return 0;
}

/* ---- the observer ---- */

static int stored_begin(struct zr_observer *o, const struct zr_grant *g)
{
    if (g->kind != ZR_GRANT_GRAD || !g->ready)
        return 0;
    if (g->bracket)
        ZR_TRY(zr_for_grad_pieces(o, g->unit, g->slot, fill));
    return o->e->layout->gaps && g->fill ? zr_for_grad_pieces(o, g->unit, g->slot, clear_behind) : 0;
}

static int stored_end(struct zr_observer *o, const struct zr_grant *g)
{
    if (g->kind != ZR_GRANT_GRAD)
        return 0;
    if (o->e->layout->gaps)
        ZR_TRY(zr_for_grad_pieces(o, g->unit, g->slot, look_behind));
    return g->bracket ? zr_for_grad_pieces(o, g->unit, g->slot, look_at_piece) : 0;
}

int zr_stored_open(struct zr_engine *e, const struct zr_engine_parts *parts)
{
    struct zr_observer *o;
    static const struct zr_observer_ops ops = {.on_begin = stored_begin, .on_end = stored_end};
    if (!parts->check || !e->dev->ops->compute_on_caller)
        return 0;
    return zr_observer_new(e, &ops, sizeof(struct zr_observer), 0, 0, &o);
}
