/* SPDX-License-Identifier: Apache-2.0 */
/* lost_gradients.c: finds gradients that are written without a bracket, at stages 0 and 1.
 *
 * A step with backward brackets leaves out the units that have none. The library has handed out their
 * gradients zeroed. If one is not zero, the model has written it, and the step would lose it. Gradients that
 * backward overwrites are not checked, because they keep the values of an earlier step. On the host the
 * model's thread looks at the elements. On a GPU the model's stream adds up their squares, and the sum is
 * read with the step's norm. The bytes are read as floats whatever the dtype is, as the sum is zero if they
 * are. If a bf16 tensor has an odd number of elements, its first or last is not checked.
 *
 * zero_norm reduces the gradients that are there. A later write, before zero_step, would be lost in a model
 * without brackets, and would spoil a gradient that is itself the sum. So a hash of the first bytes of each
 * such gradient is kept at zero_norm, and compared at the step. */
#include "shard/engine/check/observers.h"
#include "shard/engine/internal.h"
#include "shard/engine/issue.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

/* Bytes of a gradient that are hashed. */
enum { HASHED_BYTES = 4096 };

struct lost_gradients {
    struct zr_observer o;
    /* the device was asked for the squares of stray gradients, which come with the norm */
    bool due;
    /* a hash of each gradient is kept at zero_norm */
    bool keeps;
    /* (n_units) the step leaves the unit out, so its gradient should be zero */
    bool *stray;
    /* (n_units) the unit was ever in a backward bracket */
    bool *bracketed;
    /* (n_pieces) hashes at zero_norm, followed by the two arrays above */
    uint64_t norm_hash[];
};

static struct lost_gradients *self(struct zr_observer *o)
{
    return (struct lost_gradients *)o;
}

/* ---- gradients that are not zero although the step leaves the unit out ---- */

/* Calls fn for the pieces of units that the step leaves out. If that step is over, skips units that have had
 * a bracket since. */
static int for_pieces_left_out(struct zr_observer *o, zr_grad_piece_fn fn)
{
    struct zr_engine *e = o->e;
    const struct zr_layout *l = e->layout;
    for (int32_t i = 0; i < l->n_pieces; i++) {
        const struct zr_flat *f = zr_piece_flat(l, i);
        const struct zr_piece *p = &l->pieces[i];
        if (!f->trainable || l->tensors[p->tensor].overwrite || !self(o)->stray[f->unit] ||
            zr_core_has_bracket(e->m.core, f->unit))
            continue;
        ZR_TRY(fn(o, f, p, e->reduce_base + zr_plan_grad_full(e->plan, f, -1)));
    }
    return 0;
}

static int refuse_stray(const struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p)
{
    return zr_fail(ZERO_ERR_ORDER,
                   "the gradient of tensor %s is not zero, but its unit %d has had no backward bracket since "
                   "the last step. A step that has backward brackets updates only the units that are in "
                   "them: bracket the backward pass of unit %d, or leave its gradient zero",
                   e->layout->tensors[p->tensor].name, f->unit, f->unit);
}

static int check_piece_left_out(struct zr_observer *o, const struct zr_flat *f, const struct zr_piece *p,
                                char *full)
{
    return zr_all_zero(zr_grad_of_piece(f, p, full), p->n, f->dtype) ? 0 : refuse_stray(o->e, f, p);
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

/* Adds the squares of the whole, aligned floats among the piece's bytes. */
static int add_squares(struct zr_observer *o, const struct zr_flat *f, const struct zr_piece *p, char *full)
{
    struct zr_engine *e = o->e;
    const char *at = zr_grad_of_piece(f, p, full);
    const int64_t size = sizeof(float), bytes = p->n * zr_dtype_bytes(f->dtype),
                  skipped = (int64_t)(-(uintptr_t)at % sizeof(float)), n = (bytes - skipped) / size;
    self(o)->due = true;
    return n > 0 ? e->dev->ops->sum_squares(e->compute, device_sum(e), (const float *)(at + skipped),
                                            ZERO_F32, n, NULL)
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

/* Some piece was not zero. Finds out whether it is this one. */
static int find_piece(struct zr_observer *o, const struct zr_flat *f, const struct zr_piece *p, char *full)
{
    struct zr_engine *e = o->e;
    ZR_TRY(clear_sum(e));
    ZR_TRY(add_squares(o, f, p, full));
    ZR_TRY(take_sum(e));
    ZR_TRY(e->dev->ops->event_record(e->ev.drained, e->compute));
    ZR_TRY(zr_engine_wait(e, e->ev.drained));
    return is_zero(host_sum(e)) ? 0 : refuse_stray(e, f, p);
}

/* Puts the sum of squares on the model's stream. */
static int ask_device(struct zr_observer *o)
{
    ZR_TRY(clear_sum(o->e));
    ZR_TRY(for_pieces_left_out(o, add_squares));
    return self(o)->due ? take_sum(o->e) : 0;
}

/* Looks for gradients that are not zero although their units are left out. */
static int check_stray(struct zr_observer *o, const char *call)
{
    struct zr_engine *e = o->e;
    if (zr_core_open_unit(e->m.core) >= 0) /* the core refuses this call */
        return 0;
    for (int32_t u = 0; u < e->layout->n_units; u++)
        self(o)->stray[u] = zr_core_leaves_out(e->m.core, u);
    if (e->dev->ops->compute_on_caller) {
        int err = for_pieces_left_out(o, check_piece_left_out);
        return err ? zr_fail_more(err, "%s", call) : 0;
    }
    if (e->dev->ops->host_memory) /* a simulated device has no values */
        return 0;
    return zr_engine_note(e, ask_device(o));
}

/* Reads the GPU's answer, once the step's norm is known. */
static int settle_stray(struct zr_observer *o)
{
    struct zr_engine *e = o->e;
    if (!self(o)->due)
        return 0;
    self(o)->due = false;
    if (is_zero(host_sum(e)))
        return 0;
    int err = for_pieces_left_out(o, find_piece);
    self(o)->due = false;
    if (!err)
        err = zr_fail(
            ZERO_ERR_ORDER,
            "step %u: a gradient was not zero though its unit had no backward bracket in the step. The "
            "gradient has changed since, so the unit is not known: call zero_step with info to learn it",
            zr_last_step_number(e));
    zr_engine_fail(e, err, zr_error_text());
    return zr_engine_check(e);
}

/* ---- written after zero_norm ---- */

static uint64_t hash_piece(const struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p)
{
    int64_t size = zr_dtype_bytes(f->dtype);
    const char *at = e->reduce_base + zr_plan_grad_full(e->plan, f, -1) + p->first * size;
    return XXH3_64bits(at, (size_t)zr_min(p->n * size, HASHED_BYTES));
}

/* Whether no call shows a write to this gradient, or it is the sum itself. */
static bool is_unseen(struct zr_observer *o, const struct zr_flat *f)
{
    return f->trainable && (!self(o)->bracketed[f->unit] || o->e->plan->sum_in_place[f->unit]);
}

static void keep_hashes(struct zr_observer *o)
{
    const struct zr_layout *l = o->e->layout;
    for (int32_t i = 0; self(o)->keeps && i < l->n_pieces; i++)
        if (is_unseen(o, zr_piece_flat(l, i)))
            self(o)->norm_hash[i] = hash_piece(o->e, zr_piece_flat(l, i), &l->pieces[i]);
}

/* Compares the gradients with their hashes at zero_norm. */
static int check_late(struct zr_observer *o, const char *call)
{
    const struct zr_layout *l = o->e->layout;
    if (!self(o)->keeps || !zr_core_complete(o->e->m.core))
        return 0;
    for (int32_t i = 0; i < l->n_pieces; i++) {
        const struct zr_flat *f = zr_piece_flat(l, i);
        const struct zr_piece *p = &l->pieces[i];
        if (is_unseen(o, f) && hash_piece(o->e, f, p) != self(o)->norm_hash[i])
            return zr_fail(ZERO_ERR_ORDER,
                           "%s: the gradient of tensor %s (unit %d) was written after zero_norm, which "
                           "ended the gradients of this step. Run backward, and zero gradients, after "
                           "zero_step or zero_drop",
                           call, l->tensors[p->tensor].name, f->unit);
    }
    return 0;
}

/* ---- calls from the engine ---- */

static int lost_gradients_begin(struct zr_observer *o, const struct zr_grant *g)
{
    if (g->kind == ZR_GRANT_GRAD && g->bracket)
        self(o)->bracketed[g->unit] = true;
    return 0;
}

static int lost_gradients_step(struct zr_observer *o, enum zr_step_moment at, const char *call)
{
    if (at == ZR_STEP_CALLED) {
        ZR_TRY(check_late(o, call));
        return check_stray(o, call);
    }
    if (at == ZR_STEP_NORM_KNOWN)
        keep_hashes(o);
    return at == ZR_STEP_AGREED ? settle_stray(o) : 0;
}

int zr_lost_gradients_open(struct zr_engine *e)
{
    struct zr_observer *o;
    static const struct zr_observer_ops ops = {.on_begin = lost_gradients_begin,
                                               .on_step = lost_gradients_step};
    const size_t pieces = (size_t)e->layout->n_pieces, units = (size_t)e->layout->n_units;
    if (!e->plan->placement.model_holds)
        return 0;
    ZR_TRY(zr_observer_new(e, &ops, sizeof(struct lost_gradients) + pieces * sizeof(uint64_t),
                           (int64_t)units * 2, sizeof(bool), &o));
    struct lost_gradients *w = self(o);
    w->keeps = e->dev->ops->compute_on_caller && e->dev->ops->host_memory;
    w->stray = (bool *)&w->norm_hash[pieces];
    w->bracketed = w->stray + units;
    return 0;
}
