/* SPDX-License-Identifier: Apache-2.0 */
/* changed_gradients.c: finds gradients that the model changes outside brackets (cfg.debug.check), at stages 0
 * and 1. A gradient must not change:
 *
 *   with cfg.memory.grad_in_place   from the unit's zero_end to its next zero_begin in the same step
 *   summed in place, on one rank    from the last zero_end to zero_step
 *   any other                       from its reduction to zero_step, or to the unit's next bracket
 *
 * In the last case the model may zero it, because the next bracket does so. Any other value would be lost.
 * Meanwhile a hash of each piece is kept. On several ranks a gradient that is summed in place is then being
 * reduced, and is not watched. At stages 2 and 3 gradients are closed outside brackets. */
#include "shard/engine/check/observers.h"
#include "shard/engine/internal.h"
#include "shard/engine/issue.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

struct changed_gradients {
    struct zr_observer o;
    /* (n_pieces) 0: the piece is not watched */
    uint64_t hash[];
};

static uint64_t *kept_hash(struct zr_observer *o, const struct zr_piece *p)
{
    return &((struct changed_gradients *)o)->hash[p - o->e->layout->pieces];
}

/* Returns a hash that is never 0. A piece that is not watched must not be read, because it may be in a
 * reduction. */
static uint64_t hash_grad(const struct zr_flat *f, const struct zr_piece *p, char *full)
{
    return XXH3_64bits(zr_grad_of_piece(f, p, full), (size_t)(p->n * zr_dtype_bytes(f->dtype))) | 1;
}

static const struct zr_tensor *tensor_of_piece(const struct zr_observer *o, const struct zr_piece *p)
{
    return &o->e->layout->tensors[p->tensor];
}

/* Begins to watch a piece. */
static int keep(struct zr_observer *o, const struct zr_flat *f, const struct zr_piece *p, char *full)
{
    *kept_hash(o, p) = hash_grad(f, p, full);
    return 0;
}

/* Keeps a new hash if the piece is watched. */
static int keep_again(struct zr_observer *o, const struct zr_flat *f, const struct zr_piece *p, char *full)
{
    return *kept_hash(o, p) ? keep(o, f, p, full) : 0;
}

/* Ends watching a piece. */
static int forget(struct zr_observer *o, const struct zr_flat *f, const struct zr_piece *p, char *full)
{
    (void)f;
    (void)full;
    *kept_hash(o, p) = 0;
    return 0;
}

/* Whether the piece has changed. Forgets the hash. */
static bool is_changed(struct zr_observer *o, const struct zr_flat *f, const struct zr_piece *p, char *full)
{
    uint64_t kept = *kept_hash(o, p);
    forget(o, f, p, full);
    return kept && kept != hash_grad(f, p, full);
}

static int compare_kept(struct zr_observer *o, const struct zr_flat *f, const struct zr_piece *p, char *full)
{
    if (!is_changed(o, f, p, full))
        return 0;
    return zr_fail(ZERO_ERR_ORDER,
                   "check: the model's fault: it changed the gradient of tensor %s (unit %d) between the "
                   "micro-batches of step %u; grad_in_place is 1, so their sum must stay there: zero "
                   "gradients once per step, or leave grad_in_place at 0",
                   tensor_of_piece(o, p)->name, f->unit, zr_step_number(o->e));
}

static int compare_lost(struct zr_observer *o, const struct zr_flat *f, const struct zr_piece *p, char *full)
{
    if (!is_changed(o, f, p, full) || tensor_of_piece(o, p)->overwrite ||
        zr_all_zero(zr_grad_of_piece(f, p, full), p->n, f->dtype))
        return 0;
    return zr_fail(ZERO_ERR_ORDER,
                   "check: the model's fault: in step %u it wrote into the gradient of tensor %s outside of "
                   "the backward brackets of unit %d. The next zero_begin zeroes it, so that contribution "
                   "is lost: write it between zero_begin and zero_end of unit %d",
                   zr_step_number(o->e), tensor_of_piece(o, p)->name, f->unit, f->unit);
}

static int compare_lost_and_keep(struct zr_observer *o, const struct zr_flat *f, const struct zr_piece *p,
                                 char *full)
{
    if (!*kept_hash(o, p))
        return 0;
    ZR_TRY(compare_lost(o, f, p, full));
    return keep(o, f, p, full);
}

static int compare_sum(struct zr_observer *o, const struct zr_flat *f, const struct zr_piece *p, char *full)
{
    if (!is_changed(o, f, p, full))
        return 0;
    return zr_fail(ZERO_ERR_ORDER,
                   "check: the model's fault: it changed the gradient of tensor %s (unit %d) between its "
                   "zero_end in backward and zero_step, step %u: until zero_step it is the only copy",
                   tensor_of_piece(o, p)->name, f->unit, zr_step_number(o->e));
}

/* Whether the gradient is the step's only sum, which the library does not change until its UPDATE. */
static bool is_the_sum(const struct zr_engine *e, int32_t unit)
{
    return e->plan->sum_in_place[unit] && e->dp == 1;
}

static int changed_gradients_begin(struct zr_observer *o, const struct zr_grant *g)
{
    if (g->kind != ZR_GRANT_GRAD || g->ready || !(g->bracket || g->fill))
        return 0;
    if (g->bracket && g->fill && !o->e->opt.grad_in_place)
        ZR_TRY(zr_for_grad_pieces(o, g->unit, -1, compare_lost));
    return zr_for_grad_pieces(o, g->unit, -1, g->fill ? forget : compare_kept);
}

static int changed_gradients_end(struct zr_observer *o, const struct zr_grant *g)
{
    bool watched = g->in_flight ? is_the_sum(o->e, g->unit) : o->e->opt.grad_in_place;
    if (g->kind != ZR_GRANT_GRAD || !g->bracket || !watched)
        return 0;
    return zr_for_grad_pieces(o, g->unit, -1, keep);
}

static int changed_gradients_reduced(struct zr_observer *o, int32_t unit, enum zr_reduce_moment at)
{
    if (at == ZR_REDUCE_SUMMED)
        return zr_for_grad_pieces(o, unit, -1, keep_again);
    if (o->e->plan->sum_in_place[unit] || o->e->opt.grad_in_place)
        return 0;
    return zr_for_grad_pieces(o, unit, -1, keep);
}

static int compare_all(struct zr_observer *o)
{
    struct zr_engine *e = o->e;
    for (int32_t u = 0; u < e->layout->n_units; u++)
        if (is_the_sum(e, u) || !e->opt.grad_in_place)
            ZR_TRY(zr_for_grad_pieces(o, u, -1, is_the_sum(e, u) ? compare_sum : compare_lost_and_keep));
    return 0;
}

static int changed_gradients_step(struct zr_observer *o, enum zr_step_moment at, const char *call)
{
    (void)call;
    if (at == ZR_STEP_BEGUN)
        return zr_engine_note(o->e, compare_all(o));
    for (int32_t i = 0; at == ZR_STEP_DROPPED && i < o->e->layout->n_pieces; i++)
        ((struct changed_gradients *)o)->hash[i] = 0;
    return 0;
}

int zr_changed_gradients_open(struct zr_engine *e)
{
    struct zr_observer *o;
    static const struct zr_observer_ops ops = {.on_begin = changed_gradients_begin,
                                               .on_end = changed_gradients_end,
                                               .on_reduce = changed_gradients_reduced,
                                               .on_step = changed_gradients_step};
    if (!e->opt.check || !e->plan->placement.model_holds || !e->dev->ops->compute_on_caller)
        return 0;
    return zr_observer_new(e, &ops, sizeof(struct changed_gradients), e->layout->n_pieces, sizeof(uint64_t),
                           &o);
}
