/* SPDX-License-Identifier: Apache-2.0 */
/* lora.h: adapters of low rank (LoRA, Hu et al., arXiv:2106.09685). A frozen matrix W (outputs, inputs) is
 * used as W + s * b * a, with trained matrices a (LR, inputs) and b (outputs, LR) and s = alpha / LR.
 *
 * Tensor parallelism needs no sums that the model has not. Where it cuts W by outputs, it cuts b, and each
 * rank's gradient of the whole a is a term of a sum. Where it cuts W by inputs, it cuts a, each rank's
 * product with the whole b is part of the term that it has of the output anyway, and the gradient of b is a
 * term of a sum. */
#ifndef ZERO_BENCH_LORA_H
#define ZERO_BENCH_LORA_H

#include "bench/model/model.h"

/* One layer's adapter of one matrix. All zero: there is none, and the functions below do nothing. Parameters
 * or gradients are NULL where a part of backward does not use them. */
struct lora {
    const real *a, *b;
    real *da, *db;
    /* (B*T, LR) s times the input times a^T, which forward keeps, and its gradient. */
    real *h, *dh;
};

/* h = s * inp (B*T, C) * a^T. */
void lora_hidden(struct model *m, const struct lora *x, const real *inp, int64_t C);
/* The same, and out (B*T, OC) += h * b^T. Rows of out are ld elements apart. */
void lora_forward(struct model *m, const struct lora *x, real *out, int64_t ld, const real *inp, int64_t C,
                  int64_t OC);
/* dinp (B*T, C) += the gradient of inp, unless this part of backward computes gradients of weights only. */
void lora_backward_input(struct model *m, const struct lora *x, real *dinp, const real *dout, int64_t ld,
                         int64_t C, int64_t OC);
/* Adds to da and db, or stores them, unless this part of backward computes gradients of inputs only. It comes
 * after lora_backward_input. */
void lora_backward_weight(struct model *m, const struct lora *x, const real *dout, int64_t ld,
                          const real *inp, int64_t C, int64_t OC);

#endif
