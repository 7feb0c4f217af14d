/* SPDX-License-Identifier: Apache-2.0 */
/* tensor_parallel.c: see tensor_parallel.h. */
#include "bench/train/tensor_parallel.h"
#include "bench/failed.h"

#include <stdlib.h>

static int sum(void *arg, real *x, int64_t n)
{
    zero_ctx **z = arg;
    return zero_all_reduce(*z, ZERO_AXIS_TP, x, x, n, GPT2_ZERO_DTYPE, ZERO_SUM);
}

static int reduce(void *arg, float *x, int64_t n, bool largest)
{
    zero_ctx **z = arg;
    return zero_all_reduce(*z, ZERO_AXIS_TP, x, x, n, ZERO_F32, largest ? ZERO_MAX : ZERO_SUM);
}

static int gather(void *arg, real *dst, const real *src, int64_t n)
{
    zero_ctx **z = arg;
    return zero_all_gather(*z, ZERO_AXIS_TP, dst, src, n, GPT2_ZERO_DTYPE);
}

static int scatter(void *arg, real *dst, const real *src, int64_t n)
{
    zero_ctx **z = arg;
    return zero_reduce_scatter(*z, ZERO_AXIS_TP, dst, src, n, GPT2_ZERO_DTYPE);
}

static int take_place(struct train_place *to, const struct zero_place *p, int64_t pp, int64_t tp)
{
    *to = (struct train_place){
        .dp = p->data, .n_dp = p->n_data, .part = p->tp, .stage = p->pp, .n_stages = p->n_pp};
    if (p->n_pp == (pp > 1 ? pp : 1) && p->n_tp == (tp > 1 ? tp : 1))
        return 0;
    return failed(ZERO_ERR_ARG,
                  "pp is %d and tp %d by ZERO_PP and ZERO_TP, which this program wants as --pp and --tp",
                  p->n_pp, p->n_tp);
}

int train_place_open(struct train_place *p, int64_t pp, int64_t tp, struct zero_config *cfg)
{
    struct zero_place place;
    *p = (struct train_place){.n_dp = 1, .n_stages = 1};
    if (tp <= 1 && pp <= 1)
        return 0;
    cfg->mesh.pp = pp > 1 ? (int32_t)pp : 1;
    cfg->mesh.tp = tp > 1 ? (int32_t)tp : 1;
    int err = reported(zero_find_place(cfg, &place));
    return err ? err : take_place(p, &place, pp, tp);
}

int train_place_wrapped(struct train_place *p, int64_t pp, int64_t tp, const struct zero_stats *stats)
{
    return take_place(p, &stats->place, pp, tp);
}

void train_parts_join(const struct train_place *p, struct gpt2 *model, zero_ctx **z)
{
    model->part = p->part;
    model->sum = sum;
    model->reduce = reduce;
    model->gather = gather;
    model->scatter = scatter;
    model->sum_arg = z;
}

/* Each rank puts its digits in its own place, and all are added up. */
int train_parts_hash(zero_ctx *z, int32_t part, int64_t n_parts, char hash[STATE_HASH_CHARS])
{
    enum { DIGITS = STATE_HASH_CHARS - 1 };
    float *digits = calloc((size_t)n_parts * DIGITS, sizeof *digits);
    char *all = malloc((size_t)n_parts * DIGITS + 1);
    int err = digits && all
                  ? 0
                  : zr_fail(ZR_ERR_NOMEM, "no memory for the hashes of %lld parts", (long long)n_parts);
    for (int i = 0; !err && i < DIGITS; i++)
        digits[part * DIGITS + i] = (float)hash[i];
    if (!err)
        err = zero_all_reduce(z, ZERO_AXIS_TP, digits, digits, n_parts * DIGITS, ZERO_F32, ZERO_SUM);
    for (int64_t i = 0; !err && i < n_parts * DIGITS; i++)
        all[i] = (char)digits[i];
    if (!err)
        state_hash_text(hash, all, (size_t)n_parts * DIGITS);
    free(digits);
    free(all);
    return err;
}
