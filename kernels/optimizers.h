/* SPDX-License-Identifier: Apache-2.0 */
/* optimizers.h: the kinds of optimizer: the list, and one row of facts for each.
 *
 * A kind is a file, optimizer_NAME.h: its definition and source, its row, and its arithmetic for one element.
 * To add one, write that file, name it in the two lists below, and in ZERO_OPTIMIZER_MAP of
 * zero/zero_config.h: the kernels of every device, the plan, configurations, checkpoints and zero-bench
 * follow. Its reference for the tests is in test/kernels/optimizer_references.h. */
#ifndef ZR_KERNELS_OPTIMIZERS_H
#define ZR_KERNELS_OPTIMIZERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* X(NAME, name, number). Numbers are 1, 2, ... without gaps, and those of zero/zero_config.h. */
#define ZR_OPTIMIZER_MAP(X)                                                                                  \
    X(ADAMW, adamw, 1)                                                                                       \
    X(ADAM, adam, 2)                                                                                         \
    X(SGD, sgd, 3)                                                                                           \
    X(RMSPROP, rmsprop, 4)                                                                                   \
    X(LION, lion, 5)                                                                                         \
    X(NESTEROV, nesterov, 6)

enum zr_optimizer {
    /* none of these: the model's own */
    ZR_OPTIMIZER_NONE = 0,
#define ZR_OPTIMIZER_ENUM(NAME, name, number) ZR_##NAME = number,
    ZR_OPTIMIZER_MAP(ZR_OPTIMIZER_ENUM)
#undef ZR_OPTIMIZER_ENUM
#define ZR_OPTIMIZER_ONE(NAME, name, number) +1
    /* one more than the last */
    ZR_OPTIMIZER_COUNT = 1 ZR_OPTIMIZER_MAP(ZR_OPTIMIZER_ONE)
#undef ZR_OPTIMIZER_ONE
};

#define ZR_OPTIMIZER_STATES 2 /* at most, of a kind: struct zr_update has places for so many */

struct zr_optimizer_kind {
    /* in configurations and checkpoints */
    const char *name;
    /* where it is defined */
    const char *source;
    /* fp32 arrays kept per weight */
    int n_states;
    /* a state is a mean of the gradient's squares: an element above 1.8e19 makes it infinite */
    bool keeps_squares;
    /* beta1 is the momentum of its one state: with beta1 0 it keeps none */
    bool momentum_only;
    /* Names of the states, for messages: "first moment". */
    const char *state[ZR_OPTIMIZER_STATES];
    /* Elements whose update needs nothing of other elements: ranges are cut at multiples of it. 1 where
     * every element is on its own. */
    int granule;
    /* what it does not use; eps it uses where eps_divides */
    bool no_beta1, no_beta2;
    /* c1 and c2 of struct zr_update are 1 - beta^t; else 1 */
    bool bias_correction;
    /* eps is added to a denominator that may be 0 */
    bool eps_divides;
    /* defaults, also of those that it does not use */
    float beta1, beta2, eps;
};

/* NULL: no such kind. */
const struct zr_optimizer_kind *zr_optimizer_kind(enum zr_optimizer kind);
/* States that it keeps with this beta1; kind is one of the list. */
int zr_optimizer_states(enum zr_optimizer kind, float beta1);
/* "2 states per weight: first moment, second moment", of its first n; n as above. kind is one of the list. */
void zr_optimizer_list_states(enum zr_optimizer kind, int n, char *text, size_t text_bytes);

#endif

/* For update_element.h, which defines what these files build on. */
#ifdef ZR_OPTIMIZER_ELEMENTS
#include "kernels/optimizer_adam.h"
#include "kernels/optimizer_adamw.h"
#include "kernels/optimizer_lion.h"
#include "kernels/optimizer_nesterov.h"
#include "kernels/optimizer_rmsprop.h"
#include "kernels/optimizer_sgd.h"
#endif
