/* SPDX-License-Identifier: Apache-2.0 */
/* optimizer_nesterov.h: stochastic gradient descent with Nesterov momentum (Sutskever et al., ICML 2013), in
 * the form of PyTorch's SGD(nesterov=True, dampening=0).
 *
 *     g = g + decay*w
 *     m = t == 1 ? g : b1*m + g
 *     w = w - lr * (g + b1*m)
 *
 * b1 is the momentum. If it is 0, there is no state, and w = w - lr*g. */
#ifndef ZR_KERNELS_OPTIMIZER_NESTEROV_H
#define ZR_KERNELS_OPTIMIZER_NESTEROV_H

enum { NESTEROV_STATES = 1, NESTEROV_MOMENTUM_ONLY = 1, NESTEROV_FIRST_STEP = 1, NESTEROV_SQUARES = -1 };

#define NESTEROV_ROW                                                                                         \
    .source = "Sutskever et al., ICML 2013; PyTorch's SGD", .state = {"momentum"}, .granule = 1,             \
    .beta1 = 0.9f, .beta2 = 0.999f, .eps = 1e-8f, .no_beta2 = true

ALWAYS_INLINE vec nesterov_direction(const struct update_constants *k, enum update_variant variant, vec w,
                                     vec g, vec *m, vec *unused)
{
    (void)unused;
    g = vec_add(g, vec_mul(k->decay, w));
    if (variant == UPDATE_STATELESS)
        return g;
    *m = variant == UPDATE_FIRST ? g : vec_add(vec_mul(k->b1, *m), g);
    return vec_add(g, vec_mul(k->b1, *m));
}

#endif
