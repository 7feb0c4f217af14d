/* SPDX-License-Identifier: Apache-2.0 */
/* optimizer_sgd.h: stochastic gradient descent with momentum, as in PyTorch's SGD (dampening 0).
 *
 *     g = g + decay*w
 *     m = b1*m + g
 *     w = w - lr*m
 *
 * In the unit's first update m = g, if no state was loaded. b1 is the momentum. If it is 0, there is no
 * state, and w = w - lr*g. */
#ifndef ZR_KERNELS_OPTIMIZER_SGD_H
#define ZR_KERNELS_OPTIMIZER_SGD_H

/* States per weight; whether b1 0 needs none; whether the first update differs; the state of squares, -1 for
 * none. See update_element.h. */
enum { SGD_STATES = 1, SGD_MOMENTUM_ONLY = 1, SGD_FIRST_STEP = 1, SGD_SQUARES = -1 };

/* beta2 and eps have no effect, but a default is given for each hyperparameter (optimizers.h). */
#define SGD_ROW                                                                                              \
    .source = "PyTorch's SGD", .state = {"momentum"}, .granule = 1, .beta1 = 0, .beta2 = 0.999f,             \
    .eps = 1e-8f, .no_beta2 = true

ALWAYS_INLINE vec sgd_direction(const struct update_constants *k, enum update_variant variant, vec w, vec g,
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
