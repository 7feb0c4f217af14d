/* SPDX-License-Identifier: Apache-2.0 */
/* optimizer_rmsprop.h: RMSprop (Tieleman and Hinton, lecture 6.5 of "Neural Networks for Machine Learning",
 * 2012; PyTorch's form).
 *
 *     g = g + decay*w
 *     v = b2*v + (1-b2)*(g*g)
 *     w = w - lr * (g / (sqrt(v) + eps)) */
#ifndef ZR_KERNELS_OPTIMIZER_RMSPROP_H
#define ZR_KERNELS_OPTIMIZER_RMSPROP_H

enum { RMSPROP_STATES = 1, RMSPROP_MOMENTUM_ONLY = 0, RMSPROP_FIRST_STEP = 0, RMSPROP_SQUARES = 0 };

#define RMSPROP_ROW                                                                                          \
    .source = "Tieleman and Hinton, 2012", .state = {"mean square"}, .granule = 1, .beta1 = 0.9f,            \
    .beta2 = 0.99f, .eps_divides = true, .eps = 1e-8f, .no_beta1 = true

ALWAYS_INLINE vec rmsprop_direction(const struct update_constants *k, enum update_variant variant, vec w,
                                    vec g, vec *v, vec *unused)
{
    (void)variant, (void)unused;
    g = vec_add(g, vec_mul(k->decay, w));
    *v = vec_add(vec_mul(k->b2, *v), vec_mul(k->one_minus_b2, vec_mul(g, g)));
    return vec_div(g, vec_add(vec_sqrt(*v), k->eps));
}

#endif
