/* SPDX-License-Identifier: Apache-2.0 */
/* fit.h: estimates whether this machine has the memory for a model, and chooses a smaller one if not. The
 * smallest choice may not fit either. */
#ifndef ZERO_BENCH_MEMORY_FIT_H
#define ZERO_BENCH_MEMORY_FIT_H

#include "bench/model/model_config.h"
#include "zero/zero.h"

struct memory_fit {
    /* the run: its ranks, and the rows of each micro-batch */
    int64_t ranks, batch;
    enum zero_dtype dtype;
    /* bytes that the run may take; 0: what the host and the memory control groups around this process have
     * free, without swap */
    int64_t limit;
    /* "", or a folder that has proc and sys in it */
    const char *root;
};

/* Estimates the bytes that zero-bench train takes at stage 0, all ranks together. The estimate is rather too
 * high. Returns 0 or a zero_err with its text. */
int memory_fit_needed(const struct memory_fit *f, const struct model_config *config, int64_t *out_bytes);
/* Replaces *model by a smaller one if it needs too much: with fewer layers, or gpt2-nano if one layer needs
 * too much and gpt2-nano is smaller. The result may still need too much. A line on stderr says what was
 * chosen. It begins with prefix ("zero-bench memory"). Returns 0, or an exit code after one line on stderr,
 * which begins with prefix too. */
int memory_fit_choose(const struct memory_fit *f, struct model_options *model, const char *prefix);

#endif
