/* SPDX-License-Identifier: Apache-2.0 */
/* model_ranks.h: runs a model on W ranks, each a thread of this process, and compares the results of runs.
 *
 * Each model of this folder is trained as its author wrote it ("plain"), and wrapped by libzero at every
 * stage and several worlds ("wrapped"). A run's log has its losses, gradient norms and final weights.
 * - Within one world, every stage must give the same bits.
 * - World 1 must give the plain run's bits, where the arithmetic is the same.
 * - Other worlds must give the plain run's numbers, up to the order of sums. */
#ifndef TEST_MODEL_RANKS_H
#define TEST_MODEL_RANKS_H

#include "zero/zero.h"

#include <stdbool.h>

#define RUN_MAX_STEPS 32
#define RUN_MAX_WORLD 4

struct run_log {
    /* error of the first call that failed, and its text */
    int err;
    char error[2048];
    int n_steps;
    /* of each step, averaged over the global batch */
    double loss[RUN_MAX_STEPS];
    /* of the gradient, before clipping */
    double norm[RUN_MAX_STEPS];
    /* of the evaluation after each step; 0: none */
    double eval[RUN_MAX_STEPS];
    int64_t n_weights, n_states;
    /* (n_weights) at the end, in the model's own order */
    float *weights;
    /* (n_states) of the optimizer; in wrapped runs only */
    float *states;
};

/* When a model zeroes its own gradients, as programs do that were not written for this library. It zeroes
 * those whose pointer is not NULL. */
enum run_zeroing {
    RUN_ZEROES_NEVER,
    RUN_ZEROES_STEP,    /* at the start of a step */
    RUN_ZEROES_MICRO,   /* at the start of each micro-batch */
    RUN_ZEROES_BACKWARD /* between forward and backward */
};

/* How a wrapped run is laid out over ranks. */
struct run_setup {
    int stage, world;
    /* micro-batches per step; 0: 1 */
    int accum;
    /* 0: the default; negative: none */
    int prefetch;
    /* bytes; 0: the default */
    int64_t budget;
    /* false: forward and backward make no calls of libzero (stages 0 and 1) */
    bool brackets;
    /* cfg.memory.order, the calls of a micro-batch, is declared */
    bool order;
    enum run_zeroing zeroing;
    /* like cfg.memory.grad_in_place */
    bool in_place;
    /* 0: the default; negative: off */
    int deterministic;
    /* without brackets: zero_micro is not called */
    bool no_micro;
    /* zero_step gets no info, so it need not wait; the log has no norms */
    bool no_info;
    /* the last rank is late at each backward, and delays what the others reduce */
    bool lags;
};

/* Runs one rank of a wrapped run on its own thread. Fills the log, including err. */
typedef void run_rank_fn(const void *options, const struct run_setup *setup, int rank, const char *url,
                         struct run_log *log);
/* Runs the plain model. */
typedef void run_plain_fn(const void *options, struct run_log *log);

struct run_model {
    run_plain_fn *plain;
    run_rank_fn *rank;
    /* how far losses and norms with different orders of sums may differ, relatively */
    double tolerance;
};

/* Returns a configuration with the setup's fields. url is NULL at world 1. */
struct zero_config run_config(const struct run_setup *setup, int rank, const char *url);

/* Notes the failure of a zero_ call in the log. Returns err. */
int run_failed(struct run_log *log, int err, const char *call);
#define RUN_TRY(log, call)                                                                                   \
    do {                                                                                                     \
        int run_err_ = (call);                                                                               \
        if (run_err_ != 0) {                                                                                 \
            run_failed(log, run_err_, #call);                                                                \
            goto out;                                                                                        \
        }                                                                                                    \
    } while (0)

/* Calls zero_unwrap(), and notes its failure like the others'. */
void run_unwrap(struct run_log *log, zero_ctx **z);

/* Returns whether to zero the gradients now: before the a-th micro-batch's forward, or with backward
 * before its backward. */
bool run_zeroes(const struct run_setup *setup, int a, bool backward);
/* Called before a backward: makes the last rank late. */
void run_lag(const struct run_setup *setup, int rank);

/* Returns the number of a rank's a-th micro-batch among those of all ranks. */
int run_micro(const struct run_setup *setup, int rank, int a);

/* Starts setup->world ranks and waits for all; logs[world]. Does not check their errors. */
void run_ranks_raw(run_rank_fn *fn, const void *options, const struct run_setup *setup, struct run_log *logs);

/* Does the same. Fails the test with every rank's message if a rank failed, or if ranks ended with
 * different numbers. */
struct run_log run_ranks(const struct run_model *model, const void *options, const struct run_setup *setup);
struct run_log run_plain(const struct run_model *model, const void *options);
void run_log_free(struct run_log *log);

/* Fail the test unless the runs agree to the last bit, or within the tolerance. what describes the second
 * run, as for printf. */
void run_assert_same(const struct run_log *a, const struct run_log *b, const char *what);
void run_assert_near(const struct run_model *model, const struct run_log *a, const struct run_log *b,
                     const char *what);
/* Checks that the loss fell below this part of the first one. */
void run_assert_learned(const struct run_log *log, double part);

/* Returns the text of a setup, in a static buffer of the calling thread. */
const char *run_setup_text(const struct run_setup *setup);

/* Makes the whole comparison: the plain run, then worlds 1..max_world at stages first..3, with base's
 * other fields. With exact, world 1 gives the plain run's bits, otherwise its numbers within the
 * tolerance. If base->brackets is false, stages 2 and 3 are left out, since code without brackets cannot
 * run there. */
void run_compare(const struct run_model *model, const void *options, const struct run_setup *base,
                 int max_world, bool exact);

#endif
