/* SPDX-License-Identifier: Apache-2.0 */
/* optimizers.h: the list of optimizer kinds, and one row of facts for each.
 *
 * A kind is a file, optimizer_NAME.h. It has the definition and its source, the row, and the arithmetic for
 * one element. adding_an_optimizer.md says how to add a kind. The kernels of every device, the plan,
 * configurations, checkpoints and zero-bench follow from this list. */
#ifndef ZR_KERNELS_OPTIMIZERS_H
#define ZR_KERNELS_OPTIMIZERS_H

#include "zero/types.h"

#include <stdbool.h>

/* The program updates the weights itself. Kinds of ZERO_OPTIMIZER_MAP have the numbers 1, 2, ... without
 * gaps. */
#define ZR_OPTIMIZER_NONE ((enum zero_optimizer)0)

#define ZR_OPTIMIZER_ONE(NAME, number, name, source) +1
/* One more than the last number. */
enum { ZR_OPTIMIZER_COUNT = 1 ZERO_OPTIMIZER_MAP(ZR_OPTIMIZER_ONE) };
#undef ZR_OPTIMIZER_ONE

#define ZR_OPTIMIZER_STATES 2 /* most states of a kind; struct zr_update has as many pointers */

struct zr_optimizer_kind {
    /* name in configurations and checkpoints */
    const char *name;
    /* publication or program that defines it */
    const char *source;
    /* states per weight */
    int n_states;
    /* Number of the state that is a mean of squared gradients, so a gradient element above 1.8e19 makes it
     * infinite. -1: none is. */
    int squares;
    /* beta1 is the momentum of the only state. With beta1 0 there is no state. */
    bool momentum_only;
    /* Names of the states, for messages: "first moment". */
    const char *state[ZR_OPTIMIZER_STATES];
    /* Elements that must be updated together; ranges are cut at multiples of this number. 1: any range. */
    int granule;
    /* Hyperparameters without effect. eps has an effect only if eps_divides. */
    bool no_beta1, no_beta2;
    /* c1 and c2 of struct zr_update are 1 - beta^t. Otherwise they are 1. */
    bool bias_correction;
    /* eps is added to a denominator that may be 0. */
    bool eps_divides;
    /* Defaults, given also for hyperparameters without effect. */
    float beta1, beta2, eps;
};

/* Returns NULL if there is no such kind. */
const struct zr_optimizer_kind *zr_optimizer_kind(enum zero_optimizer kind);
/* Returns the number of states with this beta1. kind is one of the list. */
int zr_optimizer_states(enum zero_optimizer kind, float beta1);
/* Writes "2 states per weight: first moment, second moment" for the first n states. kind is one of the
 * list. */
void zr_optimizer_list_states(enum zero_optimizer kind, int n, char *text, size_t text_bytes);

#endif

/* Only update_element.h includes these files, because it defines the names that they use. */
#ifdef ZR_OPTIMIZER_ELEMENTS
#include "kernels/optimizer_adam.h"
#include "kernels/optimizer_adamw.h"
#include "kernels/optimizer_lion.h"
#include "kernels/optimizer_nesterov.h"
#include "kernels/optimizer_rmsprop.h"
#include "kernels/optimizer_sgd.h"
#endif
