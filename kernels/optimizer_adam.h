/* SPDX-License-Identifier: Apache-2.0 */
/* optimizer_adam.h: Adam (Kingma and Ba, arXiv:1412.6980), with the decay added to the gradient.
 *
 *     g = g + decay*w
 *     m = b1*m + (1-b1)*g;  v = b2*v + (1-b2)*(g*g)
 *     w = w - lr * ((m/c1) / (sqrt(v/c2) + eps)),   c1 = 1-b1^t, c2 = 1-b2^t */
#ifndef ZR_KERNELS_OPTIMIZER_ADAM_H
#define ZR_KERNELS_OPTIMIZER_ADAM_H

enum { ADAM_STATES = 2, ADAM_MOMENTUM_ONLY = 0, ADAM_FIRST_STEP = 0, ADAM_SQUARES = 1 };

#define ADAM_ROW                                                                                             \
    .source = "arXiv:1412.6980", .state = {"first moment", "second moment"}, .granule = 1,                   \
    .bias_correction = true, .eps_divides = true, .beta1 = 0.9f, .beta2 = 0.999f, .eps = 1e-8f

/* Also used by AdamW. */
ALWAYS_INLINE vec adam_of_moments(const struct update_constants *k, vec g, vec *m, vec *v)
{
    *m = vec_add(vec_mul(k->b1, *m), vec_mul(k->one_minus_b1, g));
    *v = vec_add(vec_mul(k->b2, *v), vec_mul(k->one_minus_b2, vec_mul(g, g)));
    return vec_div(vec_div_by(*m, &k->c1), vec_add(vec_sqrt(vec_div_by(*v, &k->c2)), k->eps));
}

ALWAYS_INLINE vec adam_direction(const struct update_constants *k, enum update_variant variant, vec w, vec g,
                                 vec *m, vec *v)
{
    (void)variant;
    return adam_of_moments(k, vec_add(g, vec_mul(k->decay, w)), m, v);
}

#endif
