/* SPDX-License-Identifier: Apache-2.0 */
/* ended_early.c: a rank that zero-run starts. Rank 1 returns before zero_wrap, and the others call it. */
#include "zero/zero.h"

#include <stdio.h>

int main(void)
{
    float values[8] = {0}, *param = values, *grad = NULL;
    const struct zero_tensor tensor = {
        .name = "w", .param = (void **)&param, .grad = (void **)&grad, .shape = {8}, .dtype = ZERO_F32};
    struct zero_config cfg = ZERO_CONFIG_INIT;
    struct zero_place place;
    zero_ctx *z;
    if (zero_find_place(NULL, &place))
        return 2;
    if (place.rank == 1)
        return 0;
    int err = zero_wrap(&z, &tensor, 1, &cfg);
    printf("%s\n", err ? zero_last_error() : "wrapped");
    return err ? 1 : zero_unwrap(&z) != 0;
}
