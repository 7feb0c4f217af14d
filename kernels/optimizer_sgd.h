/* SPDX-License-Identifier: Apache-2.0 */
/* optimizer_sgd.h: stochastic gradient descent with momentum, as in PyTorch's SGD (dampening 0).
 *
 *     g = g + decay*w
 *     m = t == 1 ? g : b1*m + g
 *     w = w - lr*m
 *
 * b1 is the momentum. If it is 0, there is no state, and w = w - lr*g. */
#ifndef ZR_KERNELS_OPTIMIZER_SGD_H
#define ZR_KERNELS_OPTIMIZER_SGD_H

enum { SGD_STATES = 1, SGD_MOMENTUM_ONLY = 1, SGD_FIRST_STEP = 1 };

#define SGD_ROW                                                                                              \
    .source = "PyTorch's SGD", .state = {"momentum"}, .granule = 1, .beta1 = 0, .beta2 = 0.999f,             \
    .eps = 1e-8f, .no_beta2 = true

ALWAYS_INLINE vec sgd_direction(const struct update_numbers *k, enum update_variant variant, vec w, vec g,
                                vec *m, vec *unused)
{
    (void)unused;
    g = vec_add(g, vec_mul(k->decay, w));
    if (variant == UPDATE_STATELESS)
        return g;
    *m = variant == UPDATE_FIRST ? g : vec_add(vec_mul(k->b1, *m), g);
    return *m;
}

#endif
