/* SPDX-License-Identifier: Apache-2.0 */
/* misuse.h: wrong uses of the library, as rows of a table. Each row names the outcome: correct weights all
 * the same, an error that names the mistake, or a line in the log. Any other outcome fails the test.
 *
 * Ranks are threads, and each has a toy model. A row runs at the stages and world sizes that it names.
 * Hybrids count as stages after stage 3; they run with 4 ranks in groups of 2. misuse.c has main(). */
#ifndef ZR_TEST_ZERO_MISUSE_H
#define ZR_TEST_ZERO_MISUSE_H

#include "test/first_error.h"
#include "test/zero/toy_net.h"

#include <math.h>
#include <pthread.h>
#include <string.h>

enum { STEPS = 3, MAX_LINES = 8192, MAX_WORLD = TOY_HYBRID_WORLD };

/* One rank of one row. */
struct program {
    struct toy_rank *rank;
    struct toy model;
    struct zero_config cfg;
    /* for cfg.optim_groups */
    struct zero_optim group;
    zero_ctx *z;
    int32_t n_tensors;
    /* the model's table, or `wider` */
    struct zero_tensor *table;
    /* the model's table with one more tensor: a counter that is a buffer */
    struct zero_tensor wider[TOY_TENSORS + 1];
    int64_t counter;
    void *counter_at;
    /* whether this is the last rank, which differs from the others in some rows */
    bool odd;
    /* whether this rank is in the last group of 2 */
    bool odd_group;
    pthread_mutex_t lock;
    char lines[MAX_LINES];
    /* memory for pointers that a row spoils */
    void *spare[TOY_TENSORS];
};

enum { S0 = 1, S1 = 2, S2 = 4, S3 = 8, IN_PLACE = S0 | S1, SHARDED = S2 | S3, ALL = 15 };

enum { HSDP = 1 << TOY_HSDP, HFSDP = 1 << TOY_HFSDP, HYBRIDS = HSDP | HFSDP };

enum { W1 = 1, W2 = 2, BOTH = 3, W3 = 4, W4 = 8 };

/* TRAINS: the weights equal those of a run that uses the same configuration correctly. */
enum outcome { TRAINS = 1, ERROR, LINE };

struct misuse {
    const char *name;
    int stages, worlds;
    /* called before zero_wrap */
    void (*configure)(struct program *p);
    /* called after zero_wrap; returns the first error */
    int (*run)(struct program *p);
    enum outcome outcome;
    /* the error's code, if the outcome is ERROR */
    int code;
    /* parts of the text of the error or line */
    const char *says[3];
    /* environment variable to set; NULL: none */
    const char *variable, *value;
    /* only rank 0 logs the line, because it is the same on all ranks */
    bool only_rank_0;
};

/* One row: MISUSE(name, stages, worlds, configure, run, outcome). configure is a statement that runs before
 * zero_wrap. run is an expression that is evaluated after zero_wrap and gives the first error. Both may use
 * p. The row adds itself to the table before main(). */
#define MISUSE(...)                  MISUSE_NUMBERED(__COUNTER__, __VA_ARGS__)
#define MISUSE_NUMBERED(number, ...) MISUSE_ROW(number, __VA_ARGS__)
#define MISUSE_ROW(number, name, stages, worlds, configure, run, ...)                                        \
    static void configure_##number(struct program *p)                                                        \
    {                                                                                                        \
        (void)p;                                                                                             \
        configure;                                                                                           \
    }                                                                                                        \
    static int run_##number(struct program *p)                                                               \
    {                                                                                                        \
        (void)p;                                                                                             \
        return run;                                                                                          \
    }                                                                                                        \
    __attribute__((constructor)) static void add_##number(void)                                              \
    {                                                                                                        \
        static const struct misuse row = {name,         stages,     worlds, configure_##number,              \
                                          run_##number, __VA_ARGS__};                                        \
        misuse_add(&row);                                                                                    \
    }

#define NOTHING (void)0

/* Outcomes other than TRAINS. */
#define FAILS(code, ...)                                                                                     \
    ERROR, ZERO_ERR_##code,                                                                                  \
    {                                                                                                        \
        __VA_ARGS__                                                                                          \
    }
#define LOGS(...)                                                                                            \
    LINE, 0,                                                                                                 \
    {                                                                                                        \
        __VA_ARGS__                                                                                          \
    }

/* The row must stay valid. */
void misuse_add(const struct misuse *row);

/* ---- training loops that several tables share ---- */

int begin(struct program *p, int unit, enum zero_phase phase);
int end(struct program *p, int unit, enum zero_phase phase);
int step(struct program *p);
int forward(struct program *p);
/* Opens and closes the backward bracket of each unit. Calls write() inside each, unless it is NULL. */
int backward_with(struct program *p, void (*write)(struct program *p, int unit));
/* Adds the unit's gradient of the first micro-batch. */
void add_gradient(struct program *p, int unit);
int micro_batch(struct program *p, int step, int k);
/* Runs the first n micro-batches of step 0. */
int micro_batches(struct program *p, int n);
/* Trains with a second backward bracket of unit 1 in each step, which adds nothing. */
int train_with_two_brackets(struct program *p);
/* Calls between() at the start of each micro-batch, unless it is NULL. */
int train_with(struct program *p, void (*between)(struct program *p));
int train(struct program *p);
int train_unbracketed(struct program *p, void (*between)(struct program *p));
int64_t bytes_of(int tensor);
/* A custom optimizer that refuses each update. */
int refuses(void *arg, const struct zero_update *u);
void update_that_refuses(struct program *p);
/* Trains, and waits for the first step by asking for its info. */
int trains_and_settles(struct program *p);
int norm(struct program *p);
/* Returns 0 if training failed. */
int fails(struct program *p);

#endif
