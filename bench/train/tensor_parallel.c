/* SPDX-License-Identifier: Apache-2.0 */
/* tensor_parallel.c: the collectives of a model that is cut over tp or cp. They run through libzero. */
#include "bench/train/tensor_parallel.h"
#include "kernels/alloc.h"

#include <stdlib.h>

static int sum(void *arg, real *x, int64_t n)
{
    zero_ctx **z = arg;
    return zero_all_reduce(*z, ZERO_AXIS_TP, x, x, n, MODEL_DTYPE, ZERO_SUM);
}

static int reduce(void *arg, float *x, int64_t n, bool largest)
{
    zero_ctx **z = arg;
    return zero_all_reduce(*z, ZERO_AXIS_TP, x, x, n, ZERO_F32, largest ? ZERO_MAX : ZERO_SUM);
}

static int gather(void *arg, real *dst, const real *src, int64_t n)
{
    zero_ctx **z = arg;
    return zero_all_gather(*z, ZERO_AXIS_TP, dst, src, n, MODEL_DTYPE);
}

static int scatter(void *arg, real *dst, const real *src, int64_t n)
{
    zero_ctx **z = arg;
    return zero_reduce_scatter(*z, ZERO_AXIS_TP, dst, src, n, MODEL_DTYPE);
}

void train_join_tp(struct model *model, int32_t tp, zero_ctx **z)
{
    model->part = tp;
    model->sum = sum;
    model->reduce = reduce;
    model->gather = gather;
    model->scatter = scatter;
    model->sum_arg = z;
}

static int gather_rows(void *arg, real *dst, const real *src, int64_t n)
{
    zero_ctx **z = arg;
    return zero_all_gather(*z, ZERO_AXIS_CP, dst, src, n, MODEL_DTYPE);
}

static int scatter_rows(void *arg, float *dst, const float *src, int64_t n)
{
    zero_ctx **z = arg;
    return zero_reduce_scatter(*z, ZERO_AXIS_CP, dst, src, n, ZERO_F32);
}

static int exchange(void *arg, real *dst, const real *src, int64_t n)
{
    zero_ctx **z = arg;
    return zero_all_to_all(*z, ZERO_AXIS_CP, dst, src, n, MODEL_DTYPE);
}

static int shift_begin(void *arg, float *dst, const float *src, int64_t n)
{
    zero_ctx **z = arg;
    return zero_shift_begin(*z, ZERO_AXIS_CP, 1, dst, src, n, ZERO_F32);
}

static int shift_end(void *arg)
{
    zero_ctx **z = arg;
    return zero_shift_end(*z, ZERO_AXIS_CP);
}

void train_join_cp(struct model *model, int32_t cp, const struct model_rows *rows, zero_ctx **z)
{
    model->cp = (struct model_cp){.part = cp,
                                  .rows = rows,
                                  .gather = gather_rows,
                                  .scatter = scatter_rows,
                                  .exchange = exchange,
                                  .shift_begin = shift_begin,
                                  .shift_end = shift_end,
                                  .arg = z};
}

int train_cp_rows(struct model_rows **out, const struct model_config *config)
{
    const enum zero_cp_order order =
        config->cp_order == MODEL_CP_CONTIGUOUS ? ZERO_CP_CONTIGUOUS : ZERO_CP_ZIGZAG;
    struct zero_place place = {.n_cp = config->cp > 1 ? (int32_t)config->cp : 1};
    struct model_rows *rows;
    int err = ZR_ALLOC(rows, place.n_cp, "the rows of %d ranks", place.n_cp);
    *out = rows;
    for (; !err && place.cp < place.n_cp; place.cp++, rows++)
        err = zero_cp_rows(&place, config->context, order, rows->first, rows->n);
    return err;
}

/* Collectives take memory of the model's device. The model does not use stats.rows between its passes. */
int train_reduce_tp(struct model *model, float *x, int64_t n, bool largest)
{
    const struct compute *on = model->compute;
    const int64_t room = 3 * model_own_context(&model->config);
    float *there = model->stats.rows;
    for (int64_t at = 0, k; at < n && model->config.tp > 1; at += k) {
        k = n - at < room ? n - at : room;
        ZR_TRY(on->dev->ops->copy(on->stream, there, x + at, k * (int64_t)sizeof *x));
        ZR_TRY(model->reduce(model->sum_arg, there, k, largest));
        ZR_TRY(on->dev->ops->copy(on->stream, x + at, there, k * (int64_t)sizeof *x));
        ZR_TRY(on->dev->ops->stream_sync(on->stream));
    }
    return 0;
}

/* Each rank writes its digits to its own place among zeros, and an all-reduce adds them up. */
int train_hash_tp(struct model *model, char hash[STATE_HASH_CHARS])
{
    enum { DIGITS = STATE_HASH_CHARS - 1 };
    const int64_t n = model->config.tp * DIGITS;
    float *digits;
    char *all;
    int err = ZR_ZALLOC(digits, n, "the hashes of %lld parts", (long long)model->config.tp);
    if (err)
        return err;
    err = ZR_ALLOC(all, n, "the hashes of %lld parts", (long long)model->config.tp);
    for (int i = 0; !err && i < DIGITS; i++)
        digits[model->part * DIGITS + i] = (float)hash[i];
    err = err ? err : train_reduce_tp(model, digits, n, false);
    for (int64_t i = 0; !err && i < n; i++)
        all[i] = (char)digits[i];
    if (!err)
        state_hash_text(hash, all, (size_t)n);
    free(digits);
    free(all);
    return err;
}
