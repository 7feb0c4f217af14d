/* SPDX-License-Identifier: Apache-2.0 */
/* profile.h: measures where the time of zero-bench train's steps goes. Every nanosecond of the model's thread
 * belongs to one part. */
#ifndef ZERO_BENCH_PROFILE_H
#define ZERO_BENCH_PROFILE_H

#include "zero/zero.h"

#include <stdbool.h>
#include <stddef.h>

/* X(NAME, "name"). LIBRARY is the time inside calls of libzero. profile_finish() divides it into
 * OPTIMIZER, NORM, EXPOSED and the rest, which is the library's own work. */
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

/* The most steps that are measured, and the spans that the timeline keeps of the model's thread
 * (cfg.debug.trace). */
enum { PROFILE_MAX_STEPS = 50, PROFILE_MAX_SPANS = 16384 };
/* The most ranks of a row whose attention is compared. */
enum { PROFILE_MAX_CP = 64 };

struct profile {
    /* steps are measured from the end of step n_warm to the end of the last one */
    int64_t n_warm, n_steps;
    bool running;
    enum profile_part part;
    int64_t since_ns, start_ns;
    /* their sum is exactly total_ns */
    int64_t ns[PROFILE_N_PARTS], total_ns;
    /* Begin and end of each part EXPOSED of the model's thread. This is zero_mean, which waits for other
     * ranks and for updates. Then the time when the last step returned. Both are in ns of report_now_ns(). */
    int64_t means[PROFILE_MAX_STEPS][2], n_means, last_step_ns;
    /* operations of matrix products in PRODUCTS and ATTENTION */
    double flop[PROFILE_N_PARTS];
    /* CPU time that the model's thread spends in attention. Unlike the part's time it has no waits for a busy
     * CPU. And the same of each rank of a row (cp), in the mean over the data; n_cp 0: not known */
    int64_t attention_cpu_ns, cpu_since_ns;
    double attention_cpu_ms[PROFILE_MAX_CP];
    int32_t n_cp;
    int32_t rank, world;
    /* weights whose optimizer state this rank has */
    int64_t n_kept;
};

/* The number of micro-batches, over all measured steps, for whose spans the timeline has room. The model
 * has so many layers and is wrapped as in train.c. */
int64_t profile_most_micro_batches(int64_t layers, int64_t steps);
/* Assigns the time from now on to part. Returns the part before. p may be NULL in all of these functions. */
enum profile_part profile_enter(struct profile *p, enum profile_part part);
/* Begins a product of the model. It belongs to ATTENTION if that is the current part, else to PRODUCTS. */
enum profile_part profile_enter_product(struct profile *p, double flop);
/* Step number `step`, counted from 1, has ended. */
void profile_step(struct profile *p, int64_t step, bool last);
/* Divides LIBRARY by the timeline, after the last step, with cfg.debug.trace set. z is NULL if the model
 * is not wrapped. Writes a file to TMPDIR and removes it. Returns 0 or a zero_err. */
int profile_finish(struct profile *p, zero_ctx *z);

#endif
