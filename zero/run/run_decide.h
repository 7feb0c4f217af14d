/* SPDX-License-Identifier: Apache-2.0 */
/* run_decide.h: what follows when an attempt of a job has ended otherwise than well: another one, with how
 * many ranks and micro-batches, or the end, and what zero-run says of it. Pure. */
#ifndef ZR_ZERO_RUN_DECIDE_H
#define ZR_ZERO_RUN_DECIDE_H

#include <stdbool.h>
#include <stdint.h>

/* From the command line. */
struct zr_run_limits {
    int restarts;
    /* 0: as many as the first attempt had */
    int min_ranks;
    bool allow_batch_change;
};

struct zr_run_ended {
    /* how many attempts there were, this one included; its ranks; those that could be started now */
    int n_attempts, world, n_available;
    /* zero-run was asked to end, or nobody reads its output */
    bool asked;
    /* the program, or its ranks' processes, cannot be started */
    bool cannot_start;
    /* processes of its ranks are still there, whatever signal they got */
    bool leftovers;
    /* the highest step that any attempt reached, and restarts in a row that reached none above those
     * before; -1: no rank's record tells of a step */
    int64_t most_t;
    int n_without_step;
    /* of the first attempt, as its ranks' records say; 0: they do not */
    int first_world, first_accum;
    /* that this attempt ran with */
    int accum;
};

struct zr_run_next {
    bool restart;
    int world;
    /* ZERO_GRAD_ACCUM_STEPS; 0: as the program has it */
    int accum;
    /* one line, without its end; "": there is nothing to say */
    char text[320];
};

void zr_run_decide(const struct zr_run_limits *l, const struct zr_run_ended *e, struct zr_run_next *out);

#endif
