/* SPDX-License-Identifier: Apache-2.0 */
/* sample.h: lets a test that has many layouts or many failing calls try only some of them, to save time. */
#ifndef ZR_TEST_ZERO_SAMPLE_H
#define ZR_TEST_ZERO_SAMPLE_H

#include "test/kernels/random.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* Whether to try the next case: about one in LAYOUTS, drawn from SEED, or every one without LAYOUTS. Both are
 * environment variables. Not thread-safe. */
static inline bool sample_has(void)
{
    static uint64_t state;
    static int one_in;
    if (!one_in) {
        const char *layouts = getenv("LAYOUTS"), *seed = getenv("SEED");
        one_in = layouts && atoi(layouts) > 1 ? atoi(layouts) : 1;
        state = seed ? strtoull(seed, NULL, 0) : (uint64_t)time(NULL);
        if (one_in > 1)
            printf("one in %d, seed %llu\n", one_in, (unsigned long long)state);
    }
    return one_in == 1 || random_next(&state) % (uint64_t)one_in == 0;
}

#endif
