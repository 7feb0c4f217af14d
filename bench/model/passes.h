/* SPDX-License-Identifier: Apache-2.0 */
/* passes.h: building blocks of a model's forward and backward passes: products, sums over tensor-parallel
 * ranks, attention, the embedding and the loss. The files of a kind of model include it; users of a model do
 * not.
 *
 * The first failure is kept in m->err, and functions without a result do nothing after it. With
 * config.two_parts, m->computes tells a function which part of a backward pass is running.
 *
 * For config.recompute, a kind of model does three things. Its layer_forward and layer_backward find a
 * layer's arrays by model_slice and the functions after it. Its layer_forward leaves out the product of the
 * layer's output if m->recomputes. Its sizes() follows struct model_counts. */
#ifndef ZERO_BENCH_MODEL_PASSES_H
#define ZERO_BENCH_MODEL_PASSES_H

#include "bench/model/model.h"

/* After the first failure all work is skipped, and the caller finds m->err at the end of the pass. */
#define RUN(m, call)                                                                                         \
    do {                                                                                                     \
        if (!(m)->err) {                                                                                     \
            (m)->err = (call);                                                                               \
        }                                                                                                    \
    } while (0)

/* Calls a function of the layer table on m's device. */
#define LAYER(m, name, ...) RUN(m, (m)->layers->name((m)->compute, __VA_ARGS__))

/* ---- products ---- */

/* Runs a product, and records its time and operations in the profile. */
void model_multiply(struct model *m, const struct zr_gemm_args *args);

/* The product out (B*T, OC) = inp (B*T, C) * weight (OC, C)^T + bias (OC). bias may be NULL. */
struct zr_gemm_args model_linear_args(const struct model *m, real *out, const real *inp, const real *weight,
                                      const real *bias, int64_t C, int64_t OC);
/* Runs it. If `add`, the product is added to out. */
void model_linear_forward(struct model *m, real *out, const real *inp, const real *weight, const real *bias,
                          int64_t C, int64_t OC, bool add);
/* The product dinp (B*T, C) = dout (B*T, OC) * weight (OC, C), for gradients of inputs. */
struct zr_gemm_args model_linear_input_args(const struct model *m, real *dinp, const real *dout,
                                            int64_t ld_dout, const real *weight, int64_t C, int64_t OC);
/* Runs it, unless this part of backward computes gradients of weights only. */
void model_linear_backward_input(struct model *m, real *dinp, const real *dout, int64_t ld_dout,
                                 const real *weight, int64_t C, int64_t OC);
/* dweight (OC, C) += dout^T * inp, or = if the model stores it. dbias (OC) += sum of dout's rows, if there is
 * a bias. Does nothing without a dweight: the weight is frozen. */
void model_linear_backward_weight(struct model *m, real *dweight, real *dbias, const real *dout,
                                  int64_t ld_dout, const real *inp, int64_t C, int64_t OC);
/* out (R, C) = x (R, C) + inp (B*T, K) * weight (C, K)^T + bias (C), summed over the tensor-parallel ranks. K
 * is this rank's share. Only the first rank adds x and bias. */
void model_project(struct model *m, real *out, const real *x, const real *inp, const real *weight,
                   const real *bias, int64_t K);
/* The same in two steps. The first returns this rank's term of the sum (B*T, C), to which the caller may add
 * before the second adds up all ranks' terms. */
real *model_project_part(struct model *m, real *out, const real *x, const real *inp, const real *weight,
                         const real *bias, int64_t K);
void model_project_sum(struct model *m, real *out, const real *x);

/* ---- rows of tensor-parallel ranks ---- */

/* Collects the rows x (R, C) of all ranks. The result is valid until the next call. */
const real *model_all_rows(struct model *m, const real *x);
/* The same for an input of the gradients of weights, if they are computed now. */
const real *model_all_rows_for_weights(struct model *m, const real *x);
/* Returns a gradient x (R, C) that both parts of a backward pass use. The first part keeps it as number k of
 * kept_grads. The second part returns the kept one. */
const real *model_kept_gradient(struct model *m, int64_t k, const real *x);
/* Sums x (B*T, C) over the ranks in place, and returns this rank's rows (R, C) of the sum, which is kept as
 * number k. */
const real *model_own_sum(struct model *m, int64_t k, real *x);

/* A layer's slice of a stacked tensor, with n elements for each layer. The tensor is NULL where a part of
 * backward does not use it. */
static inline real *model_of_layer(real *tensor, int64_t l, int64_t n)
{
    return tensor ? tensor + l * n : NULL;
}

/* The index of layer l in the arrays of activations and statistics inside layers. With config.recompute the
 * arrays have a single layer, except between the two parts of a backward pass. */
static inline int64_t model_slice(const struct model *m, int64_t l)
{
    return m->config.recompute && !m->kept[m->current].between ? 0 : l;
}
/* The same for arrays that the part of backward for gradients of weights does not read. */
static inline int64_t model_first_part_slice(const struct model *m, int64_t l)
{
    return m->config.recompute ? 0 : l;
}
/* The same for the arrays of gradients inside layers, which are backward's buffers. */
static inline int64_t model_gradient_slice(const struct model *m, int64_t l)
{
    return m->config.two_parts ? model_slice(m, l) : 0;
}

/* Slice i of such an array, with n elements in each. */
static inline real *model_slice_of(real *array, int64_t i, int64_t n)
{
    return array + i * model_apart(n);
}

/* ---- attention, embedding and head ---- */

/* Attention of layer l (context.h). */
void model_attend(struct model *m, int64_t l, real *atty, real *qkv);
void model_attend_backward(struct model *m, int64_t l, real *dqkv, const real *datty, const real *atty,
                           const real *qkv);

/* acts.embedded = rows of wte (U, C) by token, plus those of wpe (context, C) by position if it is not
 * NULL. */
void model_embed(struct model *m, const real *wte, const real *wpe);
/* Adds acts.dresidual to the gradients of the rows of wte, and of wpe if it is not NULL. Does nothing if
 * there are none, because wte is frozen. */
void model_embed_gradients(struct model *m, real *dwte, real *dwpe);

/* The loss of logits = x (R, C) * weight (U, C)^T, and its gradient by the logits, which backward uses. */
void model_loss_forward(struct model *m, const real *x, const real *weight);
/* Returns the gradient (R, C) of x. The gradient of weight is added to dweight or stored there, unless
 * dweight is NULL: then the weight is frozen, or this part of backward does not compute it. */
const real *model_loss_backward(struct model *m, const real *x, const real *weight, real *dweight);

/* The first token id that this rank has, and the number of its ids. */
int64_t model_first_id(const struct model *m);
int64_t model_n_ids(const struct model *m);

#endif
