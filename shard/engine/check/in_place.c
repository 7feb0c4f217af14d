/* SPDX-License-Identifier: Apache-2.0 */
/* in_place.c: gradients that must not change outside brackets, watched (cfg.debug.check) at stages 0
 * and 1 where the model brackets backward; at stages 2 and 3 they are closed then. With
 * cfg.memory.grad_in_place, what a gradient held at the unit's last zero_end it must hold at the next
 * zero_begin of the same step. Where a gradient is summed in place, at world 1, what it held at the last
 * zero_end it must hold at zero_step. (At stage 0 among several ranks it is being reduced meanwhile.) Every
 * other gradient is kept when its micro-batch has been reduced. Until zero_step, or the unit's next backward
 * bracket, which zeroes it, the model may do no more than zero it, because anything else would be lost. */
#include "shard/engine/internal.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

typedef int (*piece_fn)(struct zr_engine *e, int32_t piece);

static int for_grad_pieces(struct zr_engine *e, int32_t unit, piece_fn fn)
{
    const struct zr_layout *l = e->layout;
    const struct zr_unit *u = &l->units[unit];
    int err = 0;
    for (int32_t i = 0; i < u->n_flats; i++) {
        const struct zr_flat *f = &l->flats[u->first_flat + i];
        for (int32_t k = 0; !err && f->trainable && k < f->n_pieces; k++)
            err = fn(e, f->first_piece + k);
    }
    return err;
}

/* Returns where the model writes this piece's gradient. */
static const char *grad_of(const struct zr_engine *e, int32_t piece)
{
    const struct zr_flat *f = zr_piece_flat(e->layout, piece);
    return e->reduce_base + zr_plan_grad_full(e->plan, f, -1) +
           e->layout->pieces[piece].first * zr_dtype_bytes(f->dtype);
}

/* Never 0, which stands for a gradient that is not watched. Only what is watched may be read: another one may
 * be being reduced. */
static uint64_t grad_hash(const struct zr_engine *e, int32_t piece)
{
    int64_t size = zr_dtype_bytes(zr_piece_flat(e->layout, piece)->dtype);
    return XXH3_64bits(grad_of(e, piece), (size_t)(e->layout->pieces[piece].n * size)) | 1;
}

static int64_t unit_of(const struct zr_engine *e, int32_t piece)
{
    const struct zr_piece *p = &e->layout->pieces[piece];
    return (int64_t)e->layout->tensors[p->tensor].unit + p->slice;
}

static int keep(struct zr_engine *e, int32_t piece)
{
    e->m.kept_grad[piece] = grad_hash(e, piece);
    return 0;
}

static int forget(struct zr_engine *e, int32_t piece)
{
    e->m.kept_grad[piece] = 0;
    return 0;
}

/* Not as it was kept; what was kept is forgotten. */
static bool is_changed(struct zr_engine *e, int32_t piece)
{
    uint64_t kept = e->m.kept_grad[piece];
    forget(e, piece);
    return kept && kept != grad_hash(e, piece);
}

static int compare_kept(struct zr_engine *e, int32_t piece)
{
    if (!is_changed(e, piece))
        return 0;
    return zr_fail(ZR_ERR_ORDER,
                   "check: the model's fault: it changed the gradient of tensor %s (unit %lld) between the "
                   "micro-batches of step %u; grad_in_place is 1, so their sum must stay there: zero "
                   "gradients once per step, or leave grad_in_place at 0",
                   e->layout->tensors[e->layout->pieces[piece].tensor].name, (long long)unit_of(e, piece),
                   zr_step_number(e));
}

static int compare_lost(struct zr_engine *e, int32_t piece)
{
    const struct zr_piece *p = &e->layout->pieces[piece];
    const struct zr_tensor *t = &e->layout->tensors[p->tensor];
    if (!is_changed(e, piece) || t->overwrite ||
        zr_all_zero(grad_of(e, piece), p->n, zr_piece_flat(e->layout, piece)->dtype))
        return 0;
    long long unit = unit_of(e, piece);
    return zr_fail(ZR_ERR_ORDER,
                   "check: the model's fault: in step %u it wrote into the gradient of tensor %s outside of "
                   "the backward brackets of unit %lld. The next zero_begin zeroes it, so that contribution "
                   "is lost: write it between zero_begin and zero_end of unit %lld",
                   zr_step_number(e), t->name, unit, unit);
}

/* As it is, for what follows. */
static int compare_lost_and_keep(struct zr_engine *e, int32_t piece)
{
    if (!e->m.kept_grad[piece])
        return 0;
    int err = compare_lost(e, piece);
    return err ? err : keep(e, piece);
}

static int compare_sum(struct zr_engine *e, int32_t piece)
{
    if (!is_changed(e, piece))
        return 0;
    return zr_fail(ZR_ERR_ORDER,
                   "check: the model's fault: it changed the gradient of tensor %s (unit %lld) between its "
                   "zero_end in backward and zero_step, step %u: until zero_step it is the only copy",
                   e->layout->tensors[e->layout->pieces[piece].tensor].name, (long long)unit_of(e, piece),
                   zr_step_number(e));
}

/* Nothing of the library's changes it until its UPDATE. */
static bool is_the_sum(const struct zr_engine *e, int32_t unit)
{
    return e->plan->sum_in_place[unit] && e->world == 1;
}

void zr_in_place_end(struct zr_engine *e, int32_t unit, bool reduced)
{
    if (e->m.kept_grad && (reduced ? is_the_sum(e, unit) : e->opt.grad_in_place))
        for_grad_pieces(e, unit, keep);
}

static int keep_again(struct zr_engine *e, int32_t piece)
{
    return e->m.kept_grad[piece] ? keep(e, piece) : 0;
}

void zr_in_place_summed(struct zr_engine *e, int32_t unit)
{
    if (e->m.kept_grad)
        for_grad_pieces(e, unit, keep_again);
}

void zr_in_place_returned(struct zr_engine *e, int32_t unit)
{
    if (e->m.kept_grad && !e->plan->sum_in_place[unit] && !e->opt.grad_in_place)
        for_grad_pieces(e, unit, keep);
}

int zr_in_place_refill(struct zr_engine *e, int32_t unit)
{
    return e->m.kept_grad && !e->opt.grad_in_place ? for_grad_pieces(e, unit, compare_lost) : 0;
}

int zr_in_place_begin(struct zr_engine *e, int32_t unit, bool fill)
{
    return e->m.kept_grad ? for_grad_pieces(e, unit, fill ? forget : compare_kept) : 0;
}

void zr_in_place_drop(struct zr_engine *e)
{
    for (int32_t i = 0; e->m.kept_grad && i < e->layout->n_pieces; i++)
        e->m.kept_grad[i] = 0;
}

int zr_in_place_step(struct zr_engine *e)
{
    int err = 0;
    for (int32_t u = 0; e->m.kept_grad && !err && u < e->layout->n_units; u++)
        if (is_the_sum(e, u) || !e->opt.grad_in_place)
            err = for_grad_pieces(e, u, is_the_sum(e, u) ? compare_sum : compare_lost_and_keep);
    return err ? zr_engine_fail(e, err, zr_error_text()) : 0;
}
