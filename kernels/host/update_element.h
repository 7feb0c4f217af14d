/* SPDX-License-Identifier: Apache-2.0 */
/* update_element.h: an optimizer's arithmetic for one element, for every kind, with the vector functions of a
 * vec_*.h.
 *
 * It is included after a vec_*.h. In body_update.h a vec is a vector of the instruction set, and in
 * cuda_kernels.cu one float. Kind and variant are constants in each call, so no branch is left. */
#include "kernels/device.h"
#include "kernels/host_device_code.h"

enum update_param { PARAM_NOT_WRITTEN, PARAM_F32, PARAM_BF16 };

/* FIRST: step 1 of a kind that treats it separately (NAME_FIRST_STEP); states are only written. STATELESS: a
 * kind with only momentum (NAME_MOMENTUM_ONLY), used without it. */
enum update_variant { UPDATE_USUAL, UPDATE_FIRST, UPDATE_STATELESS };

struct update_constants {
    vec scale, lr, eps, decay, b1, one_minus_b1, b2, one_minus_b2;
    vec_divisor c1, c2;
};

/* kernels/optimizer_NAME.h has NAME_ROW (of struct zr_optimizer_kind), and
 *
 *     enum { NAME_STATES, NAME_MOMENTUM_ONLY, NAME_FIRST_STEP, NAME_SQUARES };
 *     ALWAYS_INLINE vec NAME_direction(const struct update_constants *k, enum update_variant variant,
 *                                      vec w, vec g, vec *state_0, vec *state_1);
 *
 * NAME_direction returns the direction for weight w and scaled gradient g. The weight moves against it by lr.
 * The states are updated in place. The order of operations written there is the definition. Every instruction
 * set gives the same bits, and none contracts a*b+c. */
#define ZR_OPTIMIZER_ELEMENTS
#include "kernels/optimizers.h"
#undef ZR_OPTIMIZER_ELEMENTS

ALWAYS_INLINE enum update_param update_param_of(const struct zr_update *u)
{
    if (!u->param || u->param == u->master)
        return PARAM_NOT_WRITTEN;
    return u->param_dtype == ZERO_F32 ? PARAM_F32 : PARAM_BF16;
}

ALWAYS_INLINE struct update_constants update_constants_of(const struct zr_update *u, float grad_scale)
{
    struct update_constants k;
    k.scale = vec_set(grad_scale);
    k.lr = vec_set(u->lr);
    k.eps = vec_set(u->eps);
    k.decay = vec_set(u->decay);
    k.b1 = vec_set(u->beta1);
    k.one_minus_b1 = vec_set(1.0f - u->beta1);
    k.b2 = vec_set(u->beta2);
    k.one_minus_b2 = vec_set(1.0f - u->beta2);
    k.c1 = vec_divisor_of(u->c1);
    k.c2 = vec_divisor_of(u->c2);
    return k;
}

/* Returns how many of state[] are written. */
ALWAYS_INLINE int update_n_written(enum zero_optimizer kind, enum update_variant variant)
{
    if (variant == UPDATE_STATELESS)
        return 0;
    switch (kind) {
#define STATES(NAME, number, name, source)                                                                   \
    case ZERO_##NAME:                                                                                        \
        return NAME##_STATES;
        ZERO_OPTIMIZER_MAP(STATES)
#undef STATES
    default:
        return 0;
    }
}

/* Returns how many of state[] are read. */
ALWAYS_INLINE int update_n_read(enum zero_optimizer kind, enum update_variant variant)
{
    return variant == UPDATE_FIRST ? 0 : update_n_written(kind, variant);
}

/* Returns the number of the state that is a mean of squares, or -1. */
ALWAYS_INLINE int update_squares(enum zero_optimizer kind)
{
    switch (kind) {
#define SQUARES(NAME, number, name, source)                                                                  \
    case ZERO_##NAME:                                                                                        \
        return NAME##_SQUARES;
        ZERO_OPTIMIZER_MAP(SQUARES)
#undef SQUARES
    default:
        return -1;
    }
}

ALWAYS_INLINE bool update_is_f32(const struct zr_update *u)
{
    return u->masters == ZERO_MASTERS_F32 && u->moments == ZERO_MOMENTS_F32 && u->grad_dtype == ZERO_F32;
}

/* Returns the new weight for weight w and gradient g. The states are updated in place. */
ALWAYS_INLINE vec update_element(const struct update_constants *k, enum zero_optimizer kind,
                                 enum update_variant variant, vec w, vec g, vec *s0, vec *s1)
{
    vec direction = g;
    g = vec_mul(g, k->scale);
    switch (kind) {
#define DIRECTION(NAME, number, name, source)                                                                \
    case ZERO_##NAME:                                                                                        \
        direction = name##_direction(k, variant, w, g, s0, s1);                                              \
        break;
        ZERO_OPTIMIZER_MAP(DIRECTION)
#undef DIRECTION
    default:
        break;
    }
    return vec_sub(w, vec_mul(k->lr, direction));
}
