/* SPDX-License-Identifier: Apache-2.0 */
/* optimizer_references.h: an independent statement of what each optimizer in the kernels' table should do:
 * each kind's formula for one element, its variants, and bounds of the rounding error. */
#ifndef TEST_KERNELS_OPTIMIZER_REFERENCES_H
#define TEST_KERNELS_OPTIMIZER_REFERENCES_H

#include "test/kernels/check.h"

struct variant {
    const char *name;
    enum zero_optimizer kind;
    float beta1;
    int64_t t;
    int n_states;
    /* its first state is a mean of squares, which is never negative */
    bool squares;
};

static const struct variant variants[] = {
    {"adamw", ZERO_ADAMW, 0.9f, 3, 2},
    {"adamw first step", ZERO_ADAMW, 0.9f, 1, 2},
    {"adam", ZERO_ADAM, 0.9f, 3, 2},
    {"sgd", ZERO_SGD, 0.9f, 3, 1},
    {"sgd first step", ZERO_SGD, 0.9f, 1, 1},
    {"sgd plain", ZERO_SGD, 0, 3, 0},
    {"rmsprop", ZERO_RMSPROP, 0.9f, 3, 1, .squares = true},
    {"lion", ZERO_LION, 0.9f, 3, 1},
    {"lion first step", ZERO_LION, 0.9f, 1, 1},
    {"nesterov", ZERO_NESTEROV, 0.9f, 3, 1},
    {"nesterov first step", ZERO_NESTEROV, 0.9f, 1, 1},
    {"nesterov without momentum", ZERO_NESTEROV, 0, 3, 0},
};

/* Updates one element by the definition. real is float to compare bits, and double to measure the error. */
#define DEFINE_REFERENCE(name, real, root)                                                                   \
    static inline void name(const struct zr_update *u, real scale, real g, real *w, real *s0, real *s1)      \
    {                                                                                                        \
        real b1 = u->beta1, b2 = u->beta2, lr = u->lr, one_minus_b1 = 1.0f - u->beta1,                       \
             one_minus_b2 = 1.0f - u->beta2;                                                                 \
        real eps = u->eps, decay = u->decay, c1 = u->c1, c2 = u->c2;                                         \
        g = g * scale;                                                                                       \
        switch (u->kind) {                                                                                   \
        case ZERO_ADAMW:                                                                                     \
            *s0 = b1 * *s0 + one_minus_b1 * g;                                                               \
            *s1 = b2 * *s1 + one_minus_b2 * (g * g);                                                         \
            *w = *w - lr * ((*s0 / c1) / (root(*s1 / c2) + eps) + decay * *w);                               \
            break;                                                                                           \
        case ZERO_ADAM:                                                                                      \
            g = g + decay * *w;                                                                              \
            *s0 = b1 * *s0 + one_minus_b1 * g;                                                               \
            *s1 = b2 * *s1 + one_minus_b2 * (g * g);                                                         \
            *w = *w - lr * ((*s0 / c1) / (root(*s1 / c2) + eps));                                            \
            break;                                                                                           \
        case ZERO_SGD:                                                                                       \
            g = g + decay * *w;                                                                              \
            if (b1 != 0)                                                                                     \
                g = *s0 = u->t == 1 ? g : b1 * *s0 + g;                                                      \
            *w = *w - lr * g;                                                                                \
            break;                                                                                           \
        case ZERO_RMSPROP:                                                                                   \
            g = g + decay * *w;                                                                              \
            *s0 = b2 * *s0 + one_minus_b2 * (g * g);                                                         \
            *w = *w - lr * (g / (root(*s0) + eps));                                                          \
            break;                                                                                           \
        case ZERO_LION: /* sign as torch.sign: of 0 and NaN itself */                                        \
            c1 = b1 * *s0 + one_minus_b1 * g;                                                                \
            *w = *w - lr * ((c1 > 0 ? 1 : c1 < 0 ? -1 : c1) + decay * *w);                                   \
            *s0 = b2 * *s0 + one_minus_b2 * g;                                                               \
            break;                                                                                           \
        case ZERO_NESTEROV: /* torch.optim.SGD: buf = buf * momentum + grad; grad + buf * momentum */        \
            g = g + decay * *w;                                                                              \
            if (b1 != 0) {                                                                                   \
                *s0 = u->t == 1 ? g : *s0 * b1 + g;                                                          \
                g = g + *s0 * b1;                                                                            \
            }                                                                                                \
            *w = *w - lr * g;                                                                                \
            break;                                                                                           \
        default:                                                                                             \
            fail_msg("no reference for optimizer %d", (int)u->kind);                                         \
        }                                                                                                    \
    }
DEFINE_REFERENCE(element_f32, float, sqrtf)
DEFINE_REFERENCE(element_f64, double, sqrt)

/* Bounds of the difference between w, s0, s1 computed in fp32 and the exact ones, from the values before
 * the update. Each operation rounds once. A difference of nearly equal numbers keeps their rounding
 * errors. */
struct errors {
    double w, s0, s1;
};

static inline struct errors rounding_of(const struct zr_update *u, double scale, double g0, double w0,
                                        double a0, double b0, double w, double s0, double s1)
{
    const double half_ulp = 0x1p-24;
    bool adam = u->kind == ZERO_ADAMW || u->kind == ZERO_ADAM, root = adam || u->kind == ZERO_RMSPROP;
    bool decoupled = u->kind == ZERO_ADAMW || u->kind == ZERO_LION;
    double terms = fabs(g0 * scale) + (decoupled ? 0 : fabs((double)u->decay * w0)); /* of g */
    double g = 3 * half_ulp * terms, square = 8 * half_ulp * terms * terms;
    struct errors e = {.s0 = u->kind == ZERO_RMSPROP ? 4 * half_ulp * fabs(a0) + square
                                                     : 4 * half_ulp * (fabs(a0) + terms) + g,
                       .s1 = adam ? 4 * half_ulp * fabs(b0) + square : 0};
    double below = root ? sqrt(adam ? s1 / (double)u->c2 : s0) + (double)u->eps : 1,
           c1 = adam ? (double)u->c1 : 1;
    double top = u->kind == ZERO_RMSPROP ? g : e.s0 / c1, under = adam ? e.s1 / s1 : root ? e.s0 / s0 : 0;
    if (u->kind == ZERO_NESTEROV) /* the sum of the gradient and the momentum */
        top += g + 4 * half_ulp * (terms + fabs(s0));
    double move = fabs(w - w0) / (double)u->lr + fabs((double)u->decay * w0);
    e.w = half_ulp * fabs(w) + (double)u->lr * (top / below + move * (under + 8 * half_ulp));
    if (u->kind == ZERO_LION) { /* all its steps have one size, but near 0 rounding may change the sign */
        double c = (double)u->beta1 * a0 + (1 - (double)u->beta1) * g0 * scale;
        double flips = fabs(c) <= 8 * half_ulp * (fabs(a0) + terms) ? 2 : 0;
        e.w = half_ulp * fabs(w) + (double)u->lr * (flips + 8 * half_ulp * (1 + fabs((double)u->decay * w0)));
    }
    return e;
}

#endif
