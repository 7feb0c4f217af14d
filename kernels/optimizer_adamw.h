/* SPDX-License-Identifier: Apache-2.0 */
/* optimizer_adamw.h: AdamW (Loshchilov and Hutter, arXiv:1711.05101; the arithmetic of llm.c).
 *
 *     m = b1*m + (1-b1)*g;  v = b2*v + (1-b2)*(g*g)
 *     w = w - lr * ((m/c1) / (sqrt(v/c2) + eps) + decay*w),   c1 = 1-b1^t, c2 = 1-b2^t */
#ifndef ZR_KERNELS_OPTIMIZER_ADAMW_H
#define ZR_KERNELS_OPTIMIZER_ADAMW_H

#include "kernels/optimizer_adam.h"

enum { ADAMW_STATES = 2, ADAMW_MOMENTUM_ONLY = 0, ADAMW_FIRST_STEP = 0, ADAMW_SQUARES = 1 };

#define ADAMW_ROW                                                                                            \
    .source = "arXiv:1711.05101", .state = {"first moment", "second moment"}, .granule = 1,                  \
    .bias_correction = true, .eps_divides = true, .beta1 = 0.9f, .beta2 = 0.999f, .eps = 1e-8f

ALWAYS_INLINE vec adamw_direction(const struct update_constants *k, enum update_variant variant, vec w, vec g,
                                  vec *m, vec *v)
{
    (void)variant;
    return vec_add(adam_of_moments(k, g, m, v), vec_mul(k->decay, w));
}

#endif
