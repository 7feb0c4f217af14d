/* SPDX-License-Identifier: Apache-2.0 */
/* gpt2_table.h: the tensors of GPT-2 124M, for tests of plans. */
#ifndef ZR_TEST_ZERO_GPT2_TABLE_H
#define ZR_TEST_ZERO_GPT2_TABLE_H

#include "zero/zero.h"

enum { V = 50257, T = 1024, C = 768, L = 12, N_GPT = 16 };

/* Returns the number of tensors. All are f32. The layers are stacked. */
static inline int32_t gpt2_describe(struct zero_tensor t[N_GPT])
{
    static void *nowhere;
    static const struct zero_tensor shapes[N_GPT] = {
        {.name = "wte", .shape = {V, C}},
        {.name = "wpe", .shape = {T, C}},
        {.name = "lnfw", .shape = {C}},
        {.name = "lnfb", .shape = {C}},
        {.name = "ln1w", .shape = {L, C}},
        {.name = "ln1b", .shape = {L, C}},
        {.name = "qkvw", .shape = {L, 3 * C, C}},
        {.name = "qkvb", .shape = {L, 3 * C}},
        {.name = "projw", .shape = {L, C, C}},
        {.name = "projb", .shape = {L, C}},
        {.name = "ln2w", .shape = {L, C}},
        {.name = "ln2b", .shape = {L, C}},
        {.name = "fcw", .shape = {L, 4 * C, C}},
        {.name = "fcb", .shape = {L, 4 * C}},
        {.name = "fcprojw", .shape = {L, C, 4 * C}},
        {.name = "fcprojb", .shape = {L, C}},
    };
    for (int i = 0; i < N_GPT; i++) {
        t[i] = shapes[i];
        t[i].param = t[i].grad = &nowhere;
        t[i].dtype = ZERO_F32;
        t[i].unit = i >= 4;
        t[i].flags = i >= 4 ? ZERO_STACKED : 0;
    }
    return N_GPT;
}

#endif
