/* SPDX-License-Identifier: Apache-2.0 */
/* profile.h: where the steps of zero-bench train go: every nanosecond of the model's thread in one part. */
#ifndef ZERO_BENCH_PROFILE_H
#define ZERO_BENCH_PROFILE_H

#include "zero/zero.h"

#include <stdbool.h>
#include <stddef.h>

/* X(NAME, "name"). LIBRARY is what calls of libzero take; profile_finish() deals it to OPTIMIZER, NORM,
 * EXPOSED and what is left of it, the library's own work. */
#define PROFILE_PART_MAP(X)                                                                                  \
    X(PRODUCTS, "products")                                                                                  \
    X(ATTENTION, "attention")                                                                                \
    X(COMPUTE, "other compute")                                                                              \
    X(OPTIMIZER, "optimizer")                                                                                \
    X(NORM, "norm and agreement")                                                                            \
    X(EXPOSED, "exposed communication")                                                                      \
    X(LIBRARY, "runtime")                                                                                    \
    X(REST, "rest")

enum profile_part {
#define PROFILE_ENUM(NAME, name) PROFILE_##NAME,
    PROFILE_PART_MAP(PROFILE_ENUM)
#undef PROFILE_ENUM
        PROFILE_N_PARTS
};
extern const char *const profile_names[PROFILE_N_PARTS];

/* Most steps that are measured; and spans that the timeline keeps of the model's track (cfg.debug.trace). */
enum { PROFILE_MOST_STEPS = 50, PROFILE_MOST_SPANS = 16384 };

struct profile {
    /* measured is from the end of step n_warm to the end of the last one */
    int64_t n_warm, n_steps;
    bool running;
    enum profile_part part;
    int64_t since_ns, start_ns;
    /* their sum is total_ns, to the nanosecond */
    int64_t ns[PROFILE_N_PARTS], total_ns;
    /* when the model's thread was in EXPOSED, on its own clock: zero_mean, where it waits for the other
     * ranks, but for updates too; and when the last step returned */
    int64_t means[PROFILE_MOST_STEPS][2], n_means, last_step_ns;
    /* of matrix products in PRODUCTS and ATTENTION */
    double flop[PROFILE_N_PARTS];
    int32_t rank, world;
    /* weights whose optimizer state this rank has */
    int64_t n_kept;
};

/* Micro-batches, of all measured steps together, whose spans the timeline has room for; layers: of the model,
 * which is wrapped as train.c does it. */
int64_t profile_most_micro_batches(int64_t layers, int64_t steps);
/* What is done from now on belongs to part; returns the part so far. p may be NULL, as of the others. */
enum profile_part profile_enter(struct profile *p, enum profile_part part);
/* A product of the model: of attention if that is the part, else of PRODUCTS. */
enum profile_part profile_enter_product(struct profile *p, double flop);
/* A step has ended; step is 1-based. */
void profile_step(struct profile *p, int64_t step, bool last);
/* After the last step, with cfg.debug.trace: deals LIBRARY by the timeline. z NULL: the model is not wrapped.
 * Takes a file in TMPDIR for a moment. Returns 0 or a zero_err. */
int profile_finish(struct profile *p, zero_ctx *z);

#endif
