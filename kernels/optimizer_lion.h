/* SPDX-License-Identifier: Apache-2.0 */
/* optimizer_lion.h: Lion (Chen et al., arXiv:2302.06675, program 1), with decoupled decay.
 *
 *     u = sign(b1*m + (1-b1)*g)
 *     w = w - lr * (u + decay*w)
 *     m = b2*m + (1-b2)*g
 *
 * sign(0) is 0, and sign(NaN) is NaN, as in torch.sign. Steps have the size of lr. The paper advises a
 * learning rate 3 to 10 times smaller than AdamW's, and a decay larger by the same factor. */
#ifndef ZR_KERNELS_OPTIMIZER_LION_H
#define ZR_KERNELS_OPTIMIZER_LION_H

enum { LION_STATES = 1, LION_MOMENTUM_ONLY = 0, LION_FIRST_STEP = 0, LION_SQUARES = -1 };

#define LION_ROW                                                                                             \
    .source = "arXiv:2302.06675", .state = {"momentum"}, .granule = 1, .beta1 = 0.9f, .beta2 = 0.99f,        \
    .eps = 1e-8f

/* Works lane by lane, because no vec_*.h has a sign function. Compilers vectorize the loop. */
ALWAYS_INLINE vec lion_sign(vec x)
{
    float lane[VEC_LANES];
    vec_store(lane, x);
    for (int i = 0; i < VEC_LANES; i++)
        lane[i] = lane[i] > 0 ? 1.0f : lane[i] < 0 ? -1.0f : lane[i];
    return vec_load(lane);
}

ALWAYS_INLINE vec lion_direction(const struct update_constants *k, enum update_variant variant, vec w, vec g,
                                 vec *m, vec *unused)
{
    (void)variant, (void)unused;
    vec u = lion_sign(vec_add(vec_mul(k->b1, *m), vec_mul(k->one_minus_b1, g)));
    *m = vec_add(vec_mul(k->b2, *m), vec_mul(k->one_minus_b2, g));
    return vec_add(u, vec_mul(k->decay, w));
}

#endif
