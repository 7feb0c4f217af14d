/* SPDX-License-Identifier: Apache-2.0 */
/* missing_brackets.c: gradients that are written outside of brackets, at stages 0 and 1.
 *
 * A step with backward brackets leaves out the units that have none. Their gradients are zero, as the library
 * handed them out. Where one is not, the model has written it, and the step would lose it. What backward
 * overwrites is not looked at, because it keeps the values of an earlier step.
 *
 * On the host the model's thread looks at the elements. On a GPU the model's stream adds up their squares,
 * and the sum is read with the step's norm. The bytes are read as floats whatever the dtype is: the sum is
 * zero if they are. If a bf16 tensor has an odd number of elements, its first or last is not looked at. */
#include "shard/engine/issue.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

typedef int (*piece_fn)(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p, char *at);

/* The pieces of units that the step leaves out; of a step that is over, of units without a bracket since. */
static int for_pieces_left_out(struct zr_engine *e, piece_fn fn)
{
    const struct zr_layout *l = e->layout;
    for (int32_t i = 0; i < l->n_pieces; i++) {
        const struct zr_flat *f = zr_piece_flat(l, i);
        const struct zr_piece *p = &l->pieces[i];
        if (!f->trainable || l->tensors[p->tensor].overwrite || !e->m.stray[f->unit] ||
            zr_core_has_bracket(e->m.core, f->unit))
            continue;
        ZR_TRY(fn(e, f, p,
                  e->reduce_base + zr_plan_grad_full(e->plan, f, -1) + p->first * zr_dtype_bytes(f->dtype)));
    }
    return 0;
}

static int refuse_stray(const struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p)
{
    return zr_fail(ZR_ERR_ORDER,
                   "the gradient of tensor %s is not zero, but its unit %d has had no backward bracket since "
                   "the last step. A step that has backward brackets updates only the units that are in "
                   "them: bracket the backward pass of unit %d, or leave its gradient zero",
                   e->layout->tensors[p->tensor].name, f->unit, f->unit);
}

static int check_piece_left_out(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p,
                                char *at)
{
    return zr_all_zero(at, p->n, f->dtype) ? 0 : refuse_stray(e, f, p);
}

/* ---- on a GPU ---- */

static struct zr_exact_sum *device_sum(const struct zr_engine *e)
{
    return (struct zr_exact_sum *)(e->reduce_base + e->plan->control_at + ZR_STRAY_AT);
}

static struct zr_exact_sum *host_sum(const struct zr_engine *e)
{
    return (struct zr_exact_sum *)((char *)e->agreed + ZR_STRAY_AT);
}

/* Adds the squares of the aligned and whole floats among the piece's bytes. */
static int add_squares(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p, char *at)
{
    const int64_t size = sizeof(float), bytes = p->n * zr_dtype_bytes(f->dtype),
                  skipped = (int64_t)(-(uintptr_t)at % sizeof(float)), n = (bytes - skipped) / size;
    e->m.stray_due = true;
    return n > 0 ? e->dev->ops->sum_squares(e->compute, device_sum(e), (const float *)(at + skipped), n, NULL)
                 : 0;
}

static int clear_sum(struct zr_engine *e)
{
    return e->dev->ops->zero(e->compute, device_sum(e), sizeof(struct zr_exact_sum));
}

static int take_sum(struct zr_engine *e)
{
    return e->dev->ops->copy(e->compute, host_sum(e), device_sum(e), sizeof(struct zr_exact_sum));
}

static bool is_zero(const struct zr_exact_sum *s)
{
    bool zero = !s->nonfinite;
    for (int i = 0; zero && i < ZR_EXACT_LIMBS; i++)
        zero = s->limb[i] == 0;
    return zero;
}

/* Some piece was not zero: is it this one? */
static int find_piece(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p, char *at)
{
    ZR_TRY(clear_sum(e));
    ZR_TRY(add_squares(e, f, p, at));
    ZR_TRY(take_sum(e));
    ZR_TRY(e->dev->ops->event_record(e->ev.drained, e->compute));
    ZR_TRY(zr_engine_wait(e, e->ev.drained));
    return is_zero(host_sum(e)) ? 0 : refuse_stray(e, f, p);
}

/* ---- */

int zr_stray_check(struct zr_engine *e, const char *call)
{
    if (!e->plan->place.model_holds || zr_core_open_unit(e->m.core) >= 0) /* the core refuses that */
        return 0;
    for (int32_t u = 0; u < e->layout->n_units; u++)
        e->m.stray[u] = zr_core_leaves_out(e->m.core, u);
    if (e->dev->ops->compute_on_caller) {
        int err = for_pieces_left_out(e, check_piece_left_out);
        return err ? zr_fail_more(err, "%s", call) : 0;
    }
    if (e->dev->ops->host_memory) /* a simulated device has no values */
        return 0;
    int err = clear_sum(e);
    if (!err)
        err = for_pieces_left_out(e, add_squares);
    if (!err && e->m.stray_due)
        err = take_sum(e);
    return err ? zr_engine_fail(e, err, zr_error_text()) : 0;
}

int zr_stray_settle(struct zr_engine *e)
{
    if (!e->m.stray_due)
        return 0;
    e->m.stray_due = false;
    if (is_zero(host_sum(e)))
        return 0;
    int err = for_pieces_left_out(e, find_piece);
    e->m.stray_due = false;
    if (!err)
        err = zr_fail(
            ZR_ERR_ORDER,
            "step %u: a gradient was not zero though its unit had no backward bracket in the step. The "
            "gradient has changed since, so the unit is not known: call zero_step with info to learn it",
            zr_last_step_number(e));
    zr_engine_fail(e, err, zr_error_text());
    return zr_engine_check(e);
}

/* ---- written after zero_norm ---- */

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
