/* SPDX-License-Identifier: Apache-2.0 */
/* learning_rate.c: warm-up, and three ways to go on from there. */
#include "bench/train/learning_rate.h"

#include <math.h>

double learning_rate(const struct lr_schedule *s, int64_t n_steps)
{
    if (n_steps < s->warmup)
        return s->lr * ((double)(n_steps + 1) / (double)s->warmup);
    if (s->kind == LR_CONSTANT)
        return s->lr;
    if (n_steps >= s->steps)
        return s->min_lr;
    double done = (double)(n_steps - s->warmup) / (double)(s->steps - s->warmup);
    double left = s->kind == LR_COSINE ? 0.5 * (1.0 + cos(M_PI * done)) : 1.0 - done;
    return s->min_lr + (s->lr - s->min_lr) * left;
}
