/* SPDX-License-Identifier: Apache-2.0 */
/* ended_early.c: a rank that zero-run starts. Rank 1 returns before zero_wrap, and the others call it. With a
 * rank as argument, all call it with cfg.launch.exchange, and that rank ends inside. */
#include "zero/zero.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static int end_or_wait(void *arg, const void *mine, void *all, size_t bytes)
{
    (void)mine, (void)all, (void)bytes;
    if (*(bool *)arg)
        _exit(0);
    for (;;)
        pause();
}

int main(int n_args, char **args)
{
    float values[8] = {0}, *param = values, *grad = NULL;
    const struct zero_tensor tensor = {
        .name = "w", .param = (void **)&param, .grad = (void **)&grad, .shape = {8}, .dtype = ZERO_F32};
    struct zero_config cfg = ZERO_CONFIG_INIT;
    struct zero_place place;
    zero_ctx *z;
    if (zero_find_place(NULL, &place))
        return 2;
    bool ends = place.rank == (n_args > 1 ? atoi(args[1]) : 1);
    if (n_args > 1) {
        cfg.launch.rank = place.rank;
        cfg.launch.world = place.world;
        cfg.launch.exchange = end_or_wait;
        cfg.launch.exchange_arg = &ends;
    } else if (ends) {
        return 0;
    }
    int err = zero_wrap(&z, &tensor, 1, &cfg);
    printf("%s\n", err ? zero_last_error() : "wrapped");
    return err ? 1 : zero_unwrap(&z) != 0;
}
