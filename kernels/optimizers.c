/* SPDX-License-Identifier: Apache-2.0 */
/* optimizers.c: builds the table of optimizers.h from the rows in optimizer_*.h. */
#include "kernels/device.h"
#include "kernels/host/vec_portable.h"

#include "kernels/host/update_element.h"

#include <stdio.h>

#define NUMBERED(NAME, number, name, source)                                                                 \
    _Static_assert(number >= 1 && number < ZR_OPTIMIZER_COUNT, "optimizers are numbered without gaps");      \
    _Static_assert(NAME##_STATES <= ZR_OPTIMIZER_STATES, "more states than kernels have places for");
ZERO_OPTIMIZER_MAP(NUMBERED)
#undef NUMBERED

static const struct zr_optimizer_kind kinds[ZR_OPTIMIZER_COUNT] = {
#define ROW(NAME, number, name_, source_)                                                                    \
    [number] = {.name = #name_,                                                                              \
                .n_states = NAME##_STATES,                                                                   \
                .momentum_only = NAME##_MOMENTUM_ONLY,                                                       \
                .squares = NAME##_SQUARES,                                                                   \
                NAME##_ROW},
    ZERO_OPTIMIZER_MAP(ROW)
#undef ROW
};

const struct zr_optimizer_kind *zr_optimizer_kind(enum zero_optimizer kind)
{
    return (int)kind > 0 && (int)kind < ZR_OPTIMIZER_COUNT ? &kinds[kind] : NULL;
}

int zr_optimizer_states(enum zero_optimizer kind, float beta1)
{
    return kinds[kind].momentum_only && beta1 == 0 ? 0 : kinds[kind].n_states;
}

void zr_optimizer_list_states(enum zero_optimizer kind, int n, char *text, size_t text_bytes)
{
    int at = snprintf(text, text_bytes, "%d state%s per weight", n, n == 1 ? "" : "s");
    for (int i = 0; i < n && at >= 0 && (size_t)at < text_bytes; i++)
        at += snprintf(text + at, text_bytes - (size_t)at, "%s%s", i ? ", " : ": ", kinds[kind].state[i]);
}
