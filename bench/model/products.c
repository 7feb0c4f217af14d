/* SPDX-License-Identifier: Apache-2.0 */
/* products.c: matrix products of a model's passes, what tensor-parallel ranks add up between them, and the
 * calls of attention (passes.h). */
#include "bench/model/passes.h"

void model_multiply(struct model *m, const struct zr_gemm_args *args)
{
    enum profile_part before = PROFILE_COMPUTE;
    if (m->profile) {
        before = m->profile->part;
        profile_enter_product(m->profile, 2.0 * (double)args->m * (double)args->n * (double)args->k *
                                              (double)args->n_batch);
    }
    RUN(m, zr_gemm_run(m->compute->gemm, args));
    profile_enter(m->profile, before);
}

static void copy(struct model *m, real *dst, const real *src, int64_t n)
{
    RUN(m, m->compute->dev->ops->copy(m->compute->stream, dst, src, n * (int64_t)sizeof(real)));
}

struct zr_gemm_args model_linear_args(const struct model *m, real *out, const real *inp, const real *weight,
                                      const real *bias, int64_t C, int64_t OC)
{
    struct zr_gemm_args args =
        product_of(MODEL_DTYPE, model_own_tokens(m), OC, C, inp, C, weight, C, out, OC);
    args.trans_b = true;
    args.bias = bias;
    args.bias_dtype = MODEL_DTYPE;
    return args;
}

void model_linear_forward(struct model *m, real *out, const real *inp, const real *weight, const real *bias,
                          int64_t C, int64_t OC, bool add)
{
    struct zr_gemm_args args = model_linear_args(m, out, inp, weight, bias, C, OC);
    args.beta = add ? 1.0f : 0.0f;
    model_multiply(m, &args);
}

/* Sums x over the tensor-parallel ranks, if there are several. */
static void sum_parts(struct model *m, real *x)
{
    if (m->config.tp > 1)
        RUN(m, m->sum(m->sum_arg, x, model_own_tokens(m) * m->config.channels));
}

const real *model_all_rows(struct model *m, const real *x)
{
    if (!m->config.sequence)
        return x;
    RUN(m, m->gather(m->sum_arg, m->acts.all, x, model_own_rows(m) * m->config.channels));
    return m->acts.all;
}

const real *model_all_rows_for_weights(struct model *m, const real *x)
{
    return m->computes == MODEL_INPUTS ? NULL : model_all_rows(m, x);
}

const real *model_kept_gradient(struct model *m, int64_t k, const real *x)
{
    const int64_t n = model_own_rows(m) * m->config.channels;
    real *kept = m->config.two_parts ? m->acts.kept_grads + k * model_apart(n) : NULL;
    if (m->computes == MODEL_INPUTS)
        copy(m, kept, x, n);
    return m->computes == MODEL_WEIGHTS ? kept : x;
}

const real *model_own_sum(struct model *m, int64_t k, real *x)
{
    const int64_t n = model_own_rows(m) * m->config.channels;
    real *own = m->config.sequence ? x + m->part * n : x;
    if (m->computes == MODEL_WEIGHTS)
        return model_kept_gradient(m, k, NULL);
    if (m->config.sequence)
        RUN(m, m->scatter(m->sum_arg, own, x, n));
    else
        sum_parts(m, x);
    return model_kept_gradient(m, k, own);
}

/* With sequence parallelism out and x have this rank's rows only: each rank adds its own rows of x to the
 * sum. */
real *model_project_part(struct model *m, real *out, const real *x, const real *inp, const real *weight,
                         const real *bias, int64_t K)
{
    int64_t C = m->config.channels;
    bool first = m->part == 0, adds = first && !m->config.sequence;
    real *part = m->config.sequence ? m->acts.all : out;
    if (adds)
        copy(m, part, x, model_own_tokens(m) * C);
    model_linear_forward(m, part, inp, weight, first ? bias : NULL, K, C, adds);
    return part;
}

void model_project_sum(struct model *m, real *out, const real *x)
{
    int64_t n = model_own_rows(m) * m->config.channels;
    if (!m->config.sequence) {
        sum_parts(m, out);
        return;
    }
    RUN(m, m->scatter(m->sum_arg, out, m->acts.all, n));
    LAYER(m, add, out, x, n);
}

void model_project(struct model *m, real *out, const real *x, const real *inp, const real *weight,
                   const real *bias, int64_t K)
{
    model_project_part(m, out, x, inp, weight, bias, K);
    model_project_sum(m, out, x);
}

struct zr_gemm_args model_linear_input_args(const struct model *m, real *dinp, const real *dout,
                                            int64_t ld_dout, const real *weight, int64_t C, int64_t OC)
{
    return product_of(MODEL_DTYPE, model_own_tokens(m), C, OC, dout, ld_dout, weight, C, dinp, C);
}

void model_linear_backward_input(struct model *m, real *dinp, const real *dout, int64_t ld_dout,
                                 const real *weight, int64_t C, int64_t OC)
{
    if (m->computes == MODEL_WEIGHTS)
        return;
    struct zr_gemm_args args = model_linear_input_args(m, dinp, dout, ld_dout, weight, C, OC);
    model_multiply(m, &args);
}

void model_linear_backward_weight(struct model *m, real *dweight, real *dbias, const real *dout,
                                  int64_t ld_dout, const real *inp, int64_t C, int64_t OC)
{
    if (m->computes == MODEL_INPUTS || !dweight)
        return;
    int64_t BT = model_own_tokens(m);
    struct zr_gemm_args args = product_of(MODEL_DTYPE, OC, C, BT, dout, ld_dout, inp, C, dweight, C);
    args.trans_a = true;
    args.beta = m->stores ? 0.0f : 1.0f;
    struct zr_gemm_args fused = args;
    fused.epilogue = ZR_GEMM_SUM_A;
    fused.sum = m->acts.dbias;
    if (dbias && zr_gemm_can(m->compute->gemm, &fused)) {
        model_multiply(m, &fused);
        LAYER(m, add, dbias, m->acts.dbias, OC);
        return;
    }
    model_multiply(m, &args);
    if (dbias)
        LAYER(m, bias_backward, dbias, dout, m->stats.scratch, BT, OC);
}

void model_attend(struct model *m, int64_t l, real *atty, real *qkv)
{
    enum profile_part before = profile_enter(m->profile, PROFILE_ATTENTION);
    RUN(m, model_context_forward(m, model_first_part_slice(m, l), atty, qkv));
    profile_enter(m->profile, before);
}

void model_attend_backward(struct model *m, int64_t l, real *dqkv, const real *datty, const real *atty,
                           const real *qkv)
{
    if (m->computes == MODEL_WEIGHTS)
        return;
    enum profile_part before = profile_enter(m->profile, PROFILE_ATTENTION);
    RUN(m, model_context_backward(m, model_first_part_slice(m, l), dqkv, datty, atty, qkv));
    profile_enter(m->profile, before);
}
