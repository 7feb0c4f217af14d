/* SPDX-License-Identifier: Apache-2.0 */
/* plain_loop.c: what zero/examples/minimal.c does without libzero: one rank, all samples, gradients in the
 * program's own memory, and AdamW as in its paper (arXiv:1711.05101), in double precision. Linked in place
 * of the library, it makes a plain program from the same source. */
#include "zero/zero.h"

#include <math.h>
#include <stdlib.h>

enum { MAX_TENSORS = 8 };

struct plain {
    float **param, **grad;
    double *weight, *m, *v;
    int64_t n;
};

struct zero_ctx {
    struct plain tensors[MAX_TENSORS];
    int32_t n_tensors;
    int64_t t;
};

const char *zero_last_error(void)
{
    return "the plain program failed";
}

int zero_find_place(const struct zero_config *cfg, struct zero_place *out)
{
    (void)cfg;
    *out = (struct zero_place){.world = 1, .n_data = 1};
    return 0;
}

int zero_wrap(zero_ctx **out, const struct zero_tensor *tensors, int32_t n_tensors,
              const struct zero_config *cfg)
{
    zero_ctx *z = calloc(1, sizeof *z);
    (void)cfg;
    if (!z || n_tensors > MAX_TENSORS)
        return ZERO_ERR_NOMEM;
    z->n_tensors = n_tensors;
    for (int32_t i = 0; i < n_tensors; i++) {
        struct plain *p = &z->tensors[i];
        *p = (struct plain){.param = (float **)tensors[i].param, .grad = (float **)tensors[i].grad, .n = 1};
        for (int d = 0; d < 8 && tensors[i].shape[d]; d++)
            p->n *= tensors[i].shape[d];
        *p->grad = calloc((size_t)p->n, sizeof **p->grad);
        p->weight = calloc((size_t)p->n, sizeof *p->weight);
        p->m = calloc((size_t)p->n, sizeof *p->m);
        p->v = calloc((size_t)p->n, sizeof *p->v);
        for (int64_t k = 0; k < p->n; k++)
            p->weight[k] = (*p->param)[k];
    }
    *out = z;
    return 0;
}

int zero_begin(zero_ctx *z, int32_t unit, enum zero_phase phase)
{
    (void)z, (void)unit, (void)phase;
    return 0;
}

int zero_end(zero_ctx *z, int32_t unit, enum zero_phase phase)
{
    (void)z, (void)unit, (void)phase;
    return 0;
}

int zero_step(zero_ctx *z, float lr, struct zero_step_info *info)
{
    const double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
    (void)info;
    z->t++;
    for (int32_t i = 0; i < z->n_tensors; i++) {
        struct plain *p = &z->tensors[i];
        for (int64_t k = 0; k < p->n; k++) {
            double g = (*p->grad)[k];
            p->m[k] = beta1 * p->m[k] + (1 - beta1) * g;
            p->v[k] = beta2 * p->v[k] + (1 - beta2) * g * g;
            double m = p->m[k] / (1 - pow(beta1, (double)z->t)), v = p->v[k] / (1 - pow(beta2, (double)z->t));
            p->weight[k] -= lr * m / (sqrt(v) + eps);
            (*p->param)[k] = (float)p->weight[k];
            (*p->grad)[k] = 0;
        }
    }
    return 0;
}

int zero_mean(zero_ctx *z, double *values, int32_t n)
{
    (void)z, (void)values, (void)n;
    return 0;
}

int zero_unwrap(zero_ctx **z)
{
    for (int32_t i = 0; i < (*z)->n_tensors; i++) {
        struct plain *p = &(*z)->tensors[i];
        free(*p->grad);
        free(p->weight);
        free(p->m);
        free(p->v);
    }
    free(*z);
    *z = NULL;
    return 0;
}
