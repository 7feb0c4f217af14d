/* SPDX-License-Identifier: Apache-2.0 */
/* learning_rate.h: the learning rate of each step. It depends on the number of steps made alone, so a run
 * that goes on from a checkpoint continues it. */
#ifndef ZERO_BENCH_TRAIN_LEARNING_RATE_H
#define ZERO_BENCH_TRAIN_LEARNING_RATE_H

#include <stdint.h>

/* How the rate goes from lr to min_lr between warm-up and the last step: not at all, along half a cosine
 * (Loshchilov and Hutter, arXiv:1608.03983), or along a line. */
enum lr_kind { LR_CONSTANT, LR_COSINE, LR_LINEAR };

struct lr_schedule {
    /* enum lr_kind */
    int kind;
    double lr, min_lr;
    /* steps over which the rate rises to lr, and after which it has come down; from there on it is min_lr */
    int64_t warmup, steps;
};

/* The rate of the step that follows n_steps steps. */
double learning_rate(const struct lr_schedule *s, int64_t n_steps);

#endif
