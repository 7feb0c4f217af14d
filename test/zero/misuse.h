/* SPDX-License-Identifier: Apache-2.0 */
/* misuse.h: a way to use the library wrongly, as a row of a table, and what has to come out: the right
 * weights all the same, an error that names what was done, or a line. Nothing else counts as handled: a row
 * whose outcome is silent fails.
 *
 * Ranks are threads, each with a toy model. Every row runs at the stages and worlds that it names; hybrids
 * are stages behind the others, for worlds of 4 ranks in groups of 2. */
#ifndef ZR_TEST_ZERO_MISUSE_H
#define ZR_TEST_ZERO_MISUSE_H

#include "test/zero/toy_net.h"

#include <pthread.h>

enum { STEPS = 3, MOST_LINES = 8192, MOST_WORLD = TOY_HYBRID_WORLD };

/* One rank of one row. */
struct program {
    struct toy_rank *rank;
    struct toy model;
    struct zero_config cfg;
    /* of cfg.optim_groups */
    struct zero_optim group;
    zero_ctx *z;
    int32_t n_tensors;
    /* the model's table, unless a row of misuses gives a wider one */
    struct zero_tensor *table;
    /* the model's table, and a counter that is a buffer */
    struct zero_tensor wider[TOY_TENSORS + 1];
    int64_t counter;
    void *counter_at;
    /* this is the last rank, which differs where ranks have to differ */
    bool odd;
    /* with groups of 2: this is a rank of the last group */
    bool odd_group;
    pthread_mutex_t lock;
    char lines[MOST_LINES];
    /* memory of the model's own, for pointers that go wrong */
    void *spare[TOY_TENSORS];
};

enum { S0 = 1, S1 = 2, S2 = 4, S3 = 8, IN_PLACE = S0 | S1, SHARDED = S2 | S3, ALL = 15 };

enum { HSDP = 1 << TOY_HSDP, HFSDP = 1 << TOY_HFSDP, HYBRIDS = HSDP | HFSDP };

enum { W1 = 1, W2 = 2, BOTH = 3, W4 = 8 };

enum outcome { RIGHT = 1, ERROR, LINE };

struct misuse {
    const char *name;
    int stages, worlds;
    /* called before zero_wrap; NULL: nothing is */
    void (*configure)(struct program *p);
    /* called after it, returns the first error; NULL: the model trains as it should */
    int (*run)(struct program *p);
    enum outcome outcome;
    /* of outcome ERROR */
    int code;
    /* parts of the error's or the line's text */
    const char *says[3];
    /* set in the environment; NULL: none is */
    const char *variable, *value;
    /* the line is of what all ranks have alike, and logged once */
    bool only_rank_0;
};

/* A row that ends in an error, and one that trains as it should. */
#define WRONG(name, stages, worlds, configure, run, code, ...)                                               \
    {                                                                                                        \
        name, stages, worlds, configure, run, ERROR, ZERO_ERR_##code,                                        \
        {                                                                                                    \
            __VA_ARGS__                                                                                      \
        }                                                                                                    \
    }
#define GOOD(name, stages, worlds, configure, run)                                                           \
    {                                                                                                        \
        name, stages, worlds, configure, run, RIGHT                                                          \
    }

/* A call that goes wrong after others that go well. */
#define AFTER(name, before, then)                                                                            \
    static int name(struct program *p)                                                                       \
    {                                                                                                        \
        (void)p;                                                                                             \
        int err = (before);                                                                                  \
        return err ? err : (then);                                                                           \
    }

/* Tries every row; fails the test when one came out otherwise, and prints which. */
void misuse_try(const struct misuse *rows, int n_rows);

/* ---- what the models of several tables do ---- */

int micro_batch(struct program *p, int step, int k);
/* between: what the model does at the start of a micro-batch; NULL: nothing. */
int train_with(struct program *p, void (*between)(struct program *p));
int train(struct program *p);
int train_unbracketed(struct program *p, void (*between)(struct program *p));
int64_t bytes_of(int tensor);
int no_brackets_at_all(struct program *p);
void accumulate_four(struct program *p);
int refuses(void *arg, const struct zero_update *u);
void update_that_refuses(struct program *p);
int trains_and_settles(struct program *p);
int norm(struct program *p);
int fails(struct program *p);

#endif
