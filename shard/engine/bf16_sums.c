/* SPDX-License-Identifier: Apache-2.0 */
/* bf16_sums.c: gradient sums in bf16. A reduction over ranks puts fp32 sums in the plan's reduce slot. If
 * they begin a sum, they are rounded to the nearest bf16. Otherwise they are added to it, and the result is
 * rounded at random, so that small contributions are not lost. The noise is a function of the tensor, the
 * element, the step and the number of the addition. So all layouts with the same contributions give the same
 * bits. */
#include "shard/engine/issue.h"

/* An addition of fp32 sums to bf16 sums, for elements of the flat from `first` on. */
struct adding {
    struct zr_engine *e;
    struct zr_stream *s;
    uint16_t *dst;
    const float *src;
    int64_t first;
    /* number of the step, as for zr_rounding_from, and of this addition in the step */
    int64_t step, addition;
};

static int add_rounded_piece(void *arg, const struct zr_flat *f, const struct zr_piece *p, int64_t first,
                             int64_t n)
{
    const struct adding *a = arg;
    struct zr_rounding r = zr_rounding_from(a->e, p, first - p->first, a->step);
    uint64_t key = zr_mix_64(((uint64_t)r.key[1] << 32 | r.key[0]) ^ (uint64_t)a->addition);
    (void)f;
    r.key[0] = (uint32_t)key;
    r.key[1] = (uint32_t)(key >> 32);
    return a->e->dev->ops->add_rounded(a->s, a->dst + (first - a->first), a->src + (first - a->first), n, &r);
}

static float *reduced_at(const struct zr_engine *e, const struct zr_flat *f)
{
    return (float *)(e->reduce_base + zr_plan_reduced(e->plan, f, e->at, 0));
}

/* Adds the flat's fp32 sums in the reduce slot to its sum k. which: numbers the additions that one
 * contribution to the flat causes. */
static int add_reduced(struct zr_engine *e, struct zr_stream *s, const struct zr_flat *f,
                       const struct zr_job *job, int k, int which)
{
    enum { MOST_WHICH = 64 }; /* more than there are sums */
    const struct zr_span own = zr_engine_fine(e, f);
    struct adding a = {.e = e,
                       .s = s,
                       .dst = (uint16_t *)zr_sum_at(e, f, k),
                       .src = reduced_at(e, f),
                       .first = own.first,
                       .step = job->begun,
                       .addition = (int64_t)job->action.contribution * MOST_WHICH + which};
    return zr_flat_ranges(e->layout, f, own.first, own.first + own.n, add_rounded_piece, &a);
}

bool zr_has_reduce_slot(const struct zr_engine *e, const struct zr_flat *f)
{
    return e->plan->in_reduce_slot[f - e->layout->flats] >= 0;
}

int zr_round_reduced(struct zr_engine *e, struct zr_stream *s, const struct zr_flat *f,
                     const struct zr_job *job)
{
    const struct zr_action *a = &job->action;
    if (a->accumulate)
        return add_reduced(e, s, f, job, a->sum, 0);
    return e->dev->ops->cast(s, zr_sum_at(e, f, a->sum), f->sum_dtype, reduced_at(e, f), ZERO_F32,
                             zr_engine_fine(e, f).n);
}

int zr_fold_rounded(struct zr_engine *e, struct zr_stream *s, const struct zr_flat *f,
                    const struct zr_job *job, int sum)
{
    ZR_TRY(e->dev->ops->cast(s, reduced_at(e, f), ZERO_F32, zr_sum_at(e, f, sum), f->sum_dtype,
                             zr_engine_fine(e, f).n));
    return add_reduced(e, s, f, job, sum - 1, sum);
}

int64_t zr_rounding_ops(const struct zr_engine *e, int32_t unit)
{
    int64_t ops = 0;
    int32_t n;
    const struct zr_flat *f = zr_unit_flats(e, unit, &n);
    for (int32_t i = 0; i < n; i++)
        ops += zr_has_reduce_slot(e, &f[i]) ? 1 + f[i].n_pieces : 0;
    return ops * e->plan->n_sums;
}
