/* SPDX-License-Identifier: Apache-2.0 */
/* phase.h: what a bracket of a phase has. A phase of 0 stands for a call that is no bracket. */
#ifndef ZR_KERNELS_PHASE_H
#define ZR_KERNELS_PHASE_H

#include "zero/types.h"

#include <stdbool.h>

/* Whether the bracket has the unit's parameters. */
static inline bool zr_phase_has_params(enum zero_phase phase)
{
    return phase != ZERO_BACKWARD_WEIGHT;
}

/* Whether the bracket has the unit's gradient, and ends with a contribution to it. */
static inline bool zr_phase_has_grads(enum zero_phase phase)
{
    return phase == ZERO_BACKWARD || phase == ZERO_BACKWARD_WEIGHT;
}

/* Whether the phase is backward, or one of its two parts. */
static inline bool zr_phase_is_backward(enum zero_phase phase)
{
    return phase > ZERO_FORWARD;
}

/* Whether the phase is one of the two parts of a backward. */
static inline bool zr_phase_is_part(enum zero_phase phase)
{
    return phase == ZERO_BACKWARD_INPUT || phase == ZERO_BACKWARD_WEIGHT;
}

static inline const char *zr_phase_name(enum zero_phase phase)
{
    return phase == ZERO_BACKWARD          ? "backward"
           : phase == ZERO_BACKWARD_INPUT  ? "backward of inputs"
           : phase == ZERO_BACKWARD_WEIGHT ? "backward of weights"
                                           : "forward";
}

#endif
