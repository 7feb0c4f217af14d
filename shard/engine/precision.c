/* SPDX-License-Identifier: Apache-2.0 */
/* precision.c: converts masters and states between the form in which a rank keeps them and fp32. All calls
 * put work on the reduce stream, for elements that this rank keeps. */
#include "shard/engine/internal.h"

static struct zr_coded coded_masters(const struct zr_engine *e, const struct zr_flat *f, int64_t first)
{
    return (struct zr_coded){ZR_CODING_REMAINDER, zr_engine_param_at(e, f, first),
                             (uint16_t *)zr_engine_master_at(e, f, first)};
}

static struct zr_coded coded_state(const struct zr_engine *e, const struct zr_flat *f, int i, int64_t first)
{
    const bool squares = zr_optimizer_kind(f->optimizer)->squares == i;
    return (struct zr_coded){squares ? ZR_CODING_Q8_SQUARES : ZR_CODING_Q8,
                             zr_engine_state_at(e, f, i, first), zr_engine_scales_at(e, f, i, first)};
}

int zr_masters_from_params(struct zr_engine *e, const struct zr_flat *f, int64_t first, int64_t n)
{
    char *at = zr_engine_master_at(e, f, first);
    const int64_t size = zr_plan_master_size(f);
    if (!size)
        return 0;
    if (f->masters == ZERO_MASTERS_REMAINDER)
        return e->dev->ops->zero(e->reduce_stream, at, n * size);
    return e->dev->ops->cast(e->reduce_stream, at, ZERO_F32, zr_engine_param_at(e, f, first), f->dtype, n);
}

int zr_params_from_masters(struct zr_engine *e, const struct zr_flat *f, int64_t first, int64_t n,
                           const float *src)
{
    char *at = zr_engine_param_at(e, f, first);
    const struct zr_coded weights = {ZR_CODING_WEIGHT, at, NULL};
    return f->dtype == ZERO_BF16 ? e->dev->ops->encode(e->reduce_stream, &weights, src, n)
                                 : e->dev->ops->cast(e->reduce_stream, at, f->dtype, src, ZERO_F32, n);
}

int zr_masters_write(struct zr_engine *e, const struct zr_flat *f, int64_t first, int64_t n, const float *src)
{
    const struct zr_coded coded = coded_masters(e, f, first);
    if (!zr_plan_master_size(f))
        return 0;
    return f->masters == ZERO_MASTERS_REMAINDER
               ? e->dev->ops->encode(e->reduce_stream, &coded, src, n)
               : e->dev->ops->copy(e->reduce_stream, zr_engine_master_at(e, f, first), src,
                                   n * (int64_t)sizeof *src);
}

int zr_masters_read(struct zr_engine *e, const struct zr_flat *f, int64_t first, int64_t n, float *dst)
{
    const struct zr_coded coded = coded_masters(e, f, first);
    const char *at = zr_engine_master_at(e, f, first);
    if (f->masters == ZERO_MASTERS_REMAINDER)
        return e->dev->ops->decode(e->reduce_stream, dst, &coded, n);
    if (f->masters == ZERO_MASTERS_NONE)
        return e->dev->ops->cast(e->reduce_stream, dst, ZERO_F32, at, f->dtype, n);
    return e->dev->ops->copy(e->reduce_stream, dst, at, n * (int64_t)sizeof *dst);
}

int zr_state_write(struct zr_engine *e, const struct zr_flat *f, int i, int64_t first, int64_t n,
                   const float *src)
{
    char *at = zr_engine_state_at(e, f, i, first);
    if (f->moments == ZERO_MOMENTS_F32)
        return e->dev->ops->copy(e->reduce_stream, at, src, n * (int64_t)sizeof *src);
    if (f->moments == ZERO_MOMENTS_BF16)
        return e->dev->ops->cast(e->reduce_stream, at, ZERO_BF16, src, ZERO_F32, n);
    const struct zr_coded coded = coded_state(e, f, i, first);
    return e->dev->ops->encode(e->reduce_stream, &coded, src, n);
}

int zr_state_read(struct zr_engine *e, const struct zr_flat *f, int i, int64_t first, int64_t n, float *dst)
{
    const char *at = zr_engine_state_at(e, f, i, first);
    if (f->moments == ZERO_MOMENTS_F32)
        return e->dev->ops->copy(e->reduce_stream, dst, at, n * (int64_t)sizeof *dst);
    if (f->moments == ZERO_MOMENTS_BF16)
        return e->dev->ops->cast(e->reduce_stream, dst, ZERO_F32, at, ZERO_BF16, n);
    const int64_t before = first % ZR_Q8_BLOCK;
    const struct zr_coded coded = coded_state(e, f, i, first - before);
    return e->dev->ops->decode(e->reduce_stream, dst - before, &coded, n + before);
}
