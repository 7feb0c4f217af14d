/* check_in_place.c: what cfg.grad_in_place declares, watched (cfg.check) where the model brackets backward:
 * what a gradient held at the unit's last zero_end it must hold at the next zero_begin of the same step. */
#include "shard/engine.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

typedef int (*piece_fn)(struct zr_engine *e, int32_t piece, uint64_t hash);

static int for_pieces(struct zr_engine *e, int32_t unit, piece_fn fn)
{
    const struct zr_layout *l = e->layout;
    const struct zr_unit *u = &l->units[unit];
    int err = 0;
    for (int32_t i = 0; i < u->n_flats; i++) {
        const struct zr_flat *f = &l->flats[u->first_flat + i];
        int64_t size = zr_dtype_bytes(f->dtype);
        const char *full = e->reduce_base + zr_plan_grad_full(e->plan, f, -1);
        for (int32_t k = 0; !err && f->trainable && k < f->n_pieces; k++) {
            const struct zr_piece *p = &l->pieces[f->first_piece + k];
            err = fn(e, f->first_piece + k, XXH3_64bits(full + p->first * size, (size_t)(p->n * size)) | 1);
        }
    }
    return err;
}

static int keep(struct zr_engine *e, int32_t piece, uint64_t hash)
{
    e->kept_grad[piece] = hash;
    return 0;
}

static int compare(struct zr_engine *e, int32_t piece, uint64_t hash)
{
    uint64_t kept = e->kept_grad[piece];
    e->kept_grad[piece] = 0;
    if (!kept || kept == hash)
        return 0;
    const struct zr_tensor *t = &e->layout->tensors[e->layout->pieces[piece].tensor];
    return zr_fail(ZR_ERR_ORDER,
                   "check: the model's fault: it changed the gradient of tensor %s (unit %lld) between the "
                   "micro-batches "
                   "of step %u; grad_in_place is 1, which says that their sum stays there: zero gradients "
                   "once per step, "
                   "or leave grad_in_place at 0",
                   t->name, (long long)(t->unit + e->layout->pieces[piece].slice), e->step);
}

void zr_in_place_end(struct zr_engine *e, int32_t unit, bool reduced)
{
    if (e->kept_grad && !reduced)
        for_pieces(e, unit, keep);
}

int zr_in_place_begin(struct zr_engine *e, int32_t unit, bool fill)
{
    return e->kept_grad && !fill ? for_pieces(e, unit, compare) : 0;
}
