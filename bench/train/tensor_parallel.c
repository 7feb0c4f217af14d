/* SPDX-License-Identifier: Apache-2.0 */
/* tensor_parallel.c: the collectives of a model that is cut over tp. They run through libzero. */
#include "bench/train/tensor_parallel.h"
#include "kernels/error.h"

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

void train_join_tp(struct gpt2 *model, int32_t tp, zero_ctx **z)
{
    model->part = tp;
    model->sum = sum;
    model->reduce = reduce;
    model->gather = gather;
    model->scatter = scatter;
    model->sum_arg = z;
}

/* Each rank writes its digits to its own place among zeros, and an all-reduce adds them up. */
int train_hash_tp(zero_ctx *z, int32_t tp, int64_t n_tp, char hash[STATE_HASH_CHARS])
{
    enum { DIGITS = STATE_HASH_CHARS - 1 };
    float *digits = calloc((size_t)n_tp * DIGITS, sizeof *digits);
    char *all = malloc((size_t)n_tp * DIGITS + 1);
    int err = digits && all
                  ? 0
                  : zr_fail(ZERO_ERR_NOMEM, "no memory for the hashes of %lld parts", (long long)n_tp);
    for (int i = 0; !err && i < DIGITS; i++)
        digits[tp * DIGITS + i] = (float)hash[i];
    if (!err)
        err = zero_all_reduce(z, ZERO_AXIS_TP, digits, digits, n_tp * DIGITS, ZERO_F32, ZERO_SUM);
    for (int64_t i = 0; !err && i < n_tp * DIGITS; i++)
        all[i] = (char)digits[i];
    if (!err)
        state_hash_text(hash, all, (size_t)n_tp * DIGITS);
    free(digits);
    free(all);
    return err;
}
