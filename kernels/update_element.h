/* update_element.h: the optimizers' arithmetic for one element, which device.h defines, over the words of a
 * vec_*.h.
 *
 * Included after one: by body_update.h, where a word is a vector of the instruction set, and by
 * cuda_kernels.cu, where it is one float. The rule is a constant where it is called, so no branch is left. */
#include "kernels/anywhere.h"

/* SGD splits in three: without momentum, the first step (the momentum is the gradient), and the others. */
enum update_rule { RULE_ADAMW, RULE_ADAM, RULE_SGD_PLAIN, RULE_SGD_FIRST, RULE_SGD, RULE_RMSPROP };
enum update_param { PARAM_NONE, PARAM_F32, PARAM_BF16 };

ALWAYS_INLINE enum update_rule update_rule_of(const struct zr_update *u)
{
    if (u->kind == ZR_SGD)
        return u->beta1 == 0 ? RULE_SGD_PLAIN : u->t == 1 ? RULE_SGD_FIRST : RULE_SGD;
    return u->kind == ZR_ADAMW ? RULE_ADAMW : u->kind == ZR_ADAM ? RULE_ADAM : RULE_RMSPROP;
}

ALWAYS_INLINE enum update_param update_param_of(const struct zr_update *u)
{
    if (!u->param || u->param == u->master)
        return PARAM_NONE;
    return u->param_dtype == ZR_F32 ? PARAM_F32 : PARAM_BF16;
}

struct update_numbers {
    vec scale, lr, eps, decay, b1, one_b1, b2, one_b2, c1, c2;
};

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
    k.c1 = vec_set(u->c1);
    k.c2 = vec_set(u->c2);
    return k;
}

/* How many of state[] a rule reads and writes; RULE_SGD_FIRST only writes. */
ALWAYS_INLINE int update_states(enum update_rule rule)
{
    return rule == RULE_ADAMW || rule == RULE_ADAM ? 2 : rule == RULE_SGD_PLAIN ? 0 : 1;
}

/* The new weight of weight w and gradient g; the states are updated in place. */
ALWAYS_INLINE vec update_element(const struct update_numbers *k, enum update_rule rule, vec w, vec g, vec *s0,
                                 vec *s1)
{
    vec move;
    g = vec_mul(g, k->scale);
    if (rule != RULE_ADAMW)
        g = vec_add(g, vec_mul(k->decay, w));

    if (rule == RULE_ADAMW || rule == RULE_ADAM) {
        *s0 = vec_add(vec_mul(k->b1, *s0), vec_mul(k->one_b1, g));
        *s1 = vec_add(vec_mul(k->b2, *s1), vec_mul(k->one_b2, vec_mul(g, g)));
        move = vec_div(vec_div(*s0, k->c1), vec_add(vec_sqrt(vec_div(*s1, k->c2)), k->eps));
        if (rule == RULE_ADAMW)
            move = vec_add(move, vec_mul(k->decay, w));
    } else if (rule == RULE_RMSPROP) {
        *s0 = vec_add(vec_mul(k->b2, *s0), vec_mul(k->one_b2, vec_mul(g, g)));
        move = vec_div(g, vec_add(vec_sqrt(*s0), k->eps));
    } else if (rule == RULE_SGD_PLAIN) {
        move = g;
    } else {
        move = rule == RULE_SGD_FIRST ? g : vec_add(vec_mul(k->b1, *s0), g);
        *s0 = move;
    }
    return vec_sub(w, vec_mul(k->lr, move));
}
