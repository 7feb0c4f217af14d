/* SPDX-License-Identifier: Apache-2.0 */
/* engine_late.c: gradients written after zero_norm, by a model without brackets (stages 0 and 1), or where
 * the sum lies in them.
 *
 * zero_norm has reduced what was there: what such a model adds to its gradients before zero_step would be
 * lost, or spoil the sum, and no call tells of it. A little of every gradient is kept as a hash, and compared
 * at the step. */
#include "shard/engine/engine_inside.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

enum { LOOKED_AT_BYTES = 4096 };

static uint64_t hash_piece(const struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p)
{
    int64_t size = zr_dtype_bytes(f->dtype);
    const char *at = e->reduce_base + zr_plan_grad_full(e->plan, f, -1) + p->first * size;
    return XXH3_64bits(at, (size_t)zr_min(p->n * size, LOOKED_AT_BYTES));
}

/* Whose gradients no call speaks of, or are the sum itself. */
static bool is_unseen(const struct zr_engine *e, const struct zr_flat *f)
{
    return f->trainable && (!e->m.bracketed[f->unit] || e->plan->sum_in_place[f->unit]);
}

void zr_late_keep(struct zr_engine *e)
{
    for (int32_t i = 0; e->m.late_grad && i < e->layout->n_pieces; i++) {
        const struct zr_flat *f = zr_piece_flat(e->layout, i);
        if (is_unseen(e, f))
            e->m.late_grad[i] = hash_piece(e, f, &e->layout->pieces[i]);
    }
}

int zr_late_check(const struct zr_engine *e)
{
    if (!e->m.late_grad || !zr_core_complete(e->m.core))
        return 0;
    for (int32_t i = 0; i < e->layout->n_pieces; i++) {
        const struct zr_flat *f = zr_piece_flat(e->layout, i);
        const struct zr_piece *p = &e->layout->pieces[i];
        if (is_unseen(e, f) && hash_piece(e, f, p) != e->m.late_grad[i])
            return zr_fail(
                ZR_ERR_ORDER,
                "zero_step: the gradient of tensor %s (unit %d) was written after zero_norm, which "
                "ended the gradients of this step. Run backward, and zero gradients, after "
                "zero_step or zero_drop",
                e->layout->tensors[p->tensor].name, f->unit);
    }
    return 0;
}
