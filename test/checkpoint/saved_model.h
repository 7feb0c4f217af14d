/* SPDX-License-Identifier: Apache-2.0 */
/* saved_model.h: a small model of every kind of tensor, run by ranks that are threads, for tests of
 * checkpoints.
 *
 * Its gradient depends on the weights that it is shown, on the step and on the micro-batch, so training goes
 * on alike only from the same state, and from the same place in it. It has buffers, which each rank changes
 * in a way of its own, and which agree when model_steps returns. */
#ifndef ZR_TEST_SAVED_MODEL_H
#define ZR_TEST_SAVED_MODEL_H

#include "zero/context.h"

#define MODEL_TENSORS 9
#define MODEL_LAYERS  7

struct model_rank {
    zero_ctx *z;
    int rank, world, stage;
    struct zero_tensor tensors[MODEL_TENSORS];
    struct {
        void *param, *grad;
    } place[MODEL_TENSORS];
    /* number of the next step, of which gradients are made */
    int64_t step;
    /* bit u: unit u has no backward bracket */
    unsigned leaves_out;
};

struct model_options {
    int world, stage;
    /* 0: the default; negative: none */
    int prefetch;
    /* 0: the default */
    int64_t budget;
    /* both 0: no hybrid */
    int hybrid, group;
    bool async;
    int keep;
    /* begins from other weights: a load must replace all of them */
    bool scrambled;
    void (*log)(void *arg, const char *line);
    void *log_arg;
    /* NULL: those of the operating system */
    const struct zr_files *files;
    /* NULL, or makes it another model before it is wrapped */
    void (*change)(struct zero_tensor *tensors, struct zero_config *cfg);
};

/* Runs fn on every rank of a new world, each with its own context, and returns when all are back. Fails the
 * test when wrapping fails. */
void model_run(const struct model_options *o, void (*fn)(struct model_rank *m, void *arg), void *arg);

/* 0 or the library's code. */
int model_steps(struct model_rank *m, int n);
/* Of all weights, masters and states, by zero_read; the same on every rank. */
uint64_t model_hash(struct model_rank *m);
/* Steps that were not skipped. */
int64_t model_t(const struct model_rank *m);

/* Checks that say where; usable on threads other than cmocka's. */
void model_check(bool ok, const char *file, int line, const char *what);
#define CHECK_THAT(x)  model_check(x, __FILE__, __LINE__, #x)
#define CHECK_OK(call) model_check((call) == 0, __FILE__, __LINE__, #call)

#endif
