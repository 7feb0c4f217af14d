/* SPDX-License-Identifier: Apache-2.0 */
/* update_element.h: an optimizer's arithmetic for one element over the words of a vec_*.h, whatever the kind.
 *
 * Included after one: by body_update.h, where a word is a vector of the instruction set, and by
 * cuda_kernels.cu, where it is one float. Kind and variant are constants where it is called, so no branch is
 * left. */
#include "kernels/device.h"
#include "kernels/host_device_code.h"

enum update_param { PARAM_NONE, PARAM_F32, PARAM_BF16 };

/* FIRST: step 1 of a kind that treats it apart (NAME_FIRST_STEP); states are only written. STATELESS: of a
 * kind with momentum alone (NAME_MOMENTUM_ONLY), without it. */
enum update_variant { UPDATE_USUAL, UPDATE_FIRST, UPDATE_STATELESS };

struct update_numbers {
    vec scale, lr, eps, decay, b1, one_b1, b2, one_b2;
    vec_divisor c1, c2;
};

/* A kind's own file has, besides its row,
 *
 *     enum { NAME_STATES, NAME_MOMENTUM_ONLY, NAME_FIRST_STEP };
 *     ALWAYS_INLINE vec NAME_direction(const struct update_numbers *k, enum update_variant variant, vec w,
 * vec g, vec *state_0, vec *state_1);
 *
 * the direction of weight w and scaled gradient g, along which the weight goes back by lr; the states are
 * updated in place. The order of operations written there is the definition: every instruction set gives the
 * same bits, and none contracts a*b+c. */
#define ZR_OPTIMIZER_ELEMENTS
#include "kernels/optimizers.h"
#undef ZR_OPTIMIZER_ELEMENTS

ALWAYS_INLINE enum update_param update_param_of(const struct zr_update *u)
{
    if (!u->param || u->param == u->master)
        return PARAM_NONE;
    return u->param_dtype == ZR_F32 ? PARAM_F32 : PARAM_BF16;
}

ALWAYS_INLINE struct update_numbers update_numbers_of(const struct zr_update *u, float grad_scale)
{
    struct update_numbers k;
    k.scale = vec_set(grad_scale);
    k.lr = vec_set(u->lr);
    k.eps = vec_set(u->eps);
    k.decay = vec_set(u->decay);
    k.b1 = vec_set(u->beta1);
    k.one_b1 = vec_set(1.0f - u->beta1);
    k.b2 = vec_set(u->beta2);
    k.one_b2 = vec_set(1.0f - u->beta2);
    k.c1 = vec_divisor_of(u->c1);
    k.c2 = vec_divisor_of(u->c2);
    return k;
}

/* How many of state[] are written. */
ALWAYS_INLINE int update_states(enum zr_optimizer kind, enum update_variant variant)
{
    if (variant == UPDATE_STATELESS)
        return 0;
    switch (kind) {
#define STATES(NAME, name, number)                                                                           \
    case ZR_##NAME:                                                                                          \
        return NAME##_STATES;
        ZR_OPTIMIZER_MAP(STATES)
#undef STATES
    default:
        return 0;
    }
}

/* And how many are read. */
ALWAYS_INLINE int update_states_read(enum zr_optimizer kind, enum update_variant variant)
{
    return variant == UPDATE_FIRST ? 0 : update_states(kind, variant);
}

/* The new weight of weight w and gradient g; the states are updated in place. */
ALWAYS_INLINE vec update_element(const struct update_numbers *k, enum zr_optimizer kind,
                                 enum update_variant variant, vec w, vec g, vec *s0, vec *s1)
{
    vec direction = g;
    g = vec_mul(g, k->scale);
    switch (kind) {
#define DIRECTION(NAME, name, number)                                                                        \
    case ZR_##NAME:                                                                                          \
        direction = name##_direction(k, variant, w, g, s0, s1);                                              \
        break;
        ZR_OPTIMIZER_MAP(DIRECTION)
#undef DIRECTION
    default:
        break;
    }
    return vec_sub(w, vec_mul(k->lr, direction));
}
