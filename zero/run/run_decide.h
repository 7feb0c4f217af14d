/* SPDX-License-Identifier: Apache-2.0 */
/* run_decide.h: decides whether a job whose attempt has failed gets another attempt or ends. Another attempt
 * has a number of ranks and of micro-batches. The decision depends on the arguments alone. */
#ifndef ZR_ZERO_RUN_DECIDE_H
#define ZR_ZERO_RUN_DECIDE_H

#include <stdbool.h>
#include <stdint.h>

/* Limits from the command line. */
struct zr_run_limits {
    int restarts;
    /* Fewest ranks of a restart. 0: as many as the first attempt had. */
    int min_ranks;
    bool allow_batch_change;
};

struct zr_run_ended {
    /* Number of attempts with this one, ranks of this one, and ranks that could be started now. */
    int n_attempts, world, n_available;
    /* A signal asked zero-run to end, or nobody reads its output. */
    bool asked;
    /* The program, or its ranks' processes, cannot be started. */
    bool cannot_start;
    /* Processes of its ranks are still there, even after SIGKILL. */
    bool leftovers;
    /* The highest step of any attempt (-1: no record has one), and the number of restarts in a row that did
     * not get beyond it. */
    int64_t max_step;
    int n_without_step;
    /* Ranks and grad_accum_steps of the first attempt that recorded them. 0: none did. */
    int first_world, first_accum;
    /* grad_accum_steps that zero-run set for this attempt. 0: the program's own number. */
    int accum;
};

struct zr_run_next {
    bool restart;
    int world;
    /* ZERO_GRAD_ACCUM_STEPS. 0: the program's own number. */
    int accum;
    /* One line, without its end. "": there is nothing to say. */
    char text[320];
};

void zr_run_decide(const struct zr_run_limits *l, const struct zr_run_ended *e, struct zr_run_next *out);

#endif
