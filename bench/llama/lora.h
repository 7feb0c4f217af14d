/* SPDX-License-Identifier: Apache-2.0 */
/* lora.h: adapters of low rank (LoRA, Hu et al., arXiv:2106.09685). A frozen matrix W (outputs, inputs) is
 * used as W + s * b * a, with trained matrices a (LR, inputs) and b (outputs, LR) and s = alpha / LR.
 *
 * With tensor parallelism, an adapter needs no collectives of its own in the model. W may be cut by its
 * outputs or by its inputs. One matrix of the adapter is cut in the same way, and every rank has the whole of
 * the other one:
 *
 * W is cut by cut whole the adapter's output outputs b a belongs to this rank, like the output of W inputs a
 * b is added to this rank's term of the output of W, before the terms are summed
 *
 * Each rank computes one term of the gradient of the whole matrix. libzero sums the terms
 * (ZERO_TP_PARTIAL). */
#ifndef ZERO_BENCH_LORA_H
#define ZERO_BENCH_LORA_H

#include "bench/model/model.h"

/* One layer's adapter of one matrix. All zero: there is none, and the functions below do nothing. Parameters
 * or gradients are NULL where a part of backward does not use them. */
struct lora {
    const real *a, *b;
    real *da, *db;
    /* (B*T, LR) h = s * input * a^T, which forward keeps; dh = s * dout * b, which backward computes
     * first. */
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
/* Adds the gradients of a and b to da and db, or stores them, unless this part of backward computes gradients
 * of inputs only. Call it after lora_backward_input. */
void lora_backward_weight(struct model *m, const struct lora *x, const real *dout, int64_t ld,
                          const real *inp, int64_t C, int64_t OC);

#endif
