/* SPDX-License-Identifier: Apache-2.0 */
/* saved_model.h: a small model with every kind of tensor, run by ranks that are threads, for tests of
 * checkpoints.
 *
 * Its gradient depends on the weights that it reads, on the step and on the micro-batch. So training
 * continues with the same bits only from the same state at the same step. Each rank changes the buffers in
 * its own way; they are equal again when model_steps returns. */
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
    /* number of the next step; its gradients depend on it */
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
    /* enum zero_hybrid, and ranks of a shard group; both 0: no hybrid sharding */
    int hybrid, group;
    bool async;
    int keep;
    /* begins with other weights; a load must replace all of them */
    bool scrambled;
    void (*log)(void *arg, const char *line);
    void *log_arg;
    /* NULL: the operating system's */
    const struct zr_files *files;
    /* NULL, or changes the model before it is wrapped */
    void (*change)(struct zero_tensor *tensors, struct zero_config *cfg);
};

/* Runs fn on every rank of a new world, each with its own context, and returns when all have returned.
 * Fails the test if wrapping fails. */
void model_run(const struct model_options *o, void (*fn)(struct model_rank *m, void *arg), void *arg);

/* Takes n steps. Returns 0 or the library's error. */
int model_steps(struct model_rank *m, int n);
/* Hash of all weights, masters and states, as zero_read gives them. The same on every rank. */
uint64_t model_hash(struct model_rank *m);
/* Number of steps that were not skipped. */
int64_t model_t(const struct model_rank *m);

/* Checks that report their place. They may be used on threads other than cmocka's. */
void model_check(bool ok, const char *file, int line, const char *what);
#define CHECK_THAT(x)  model_check(x, __FILE__, __LINE__, #x)
#define CHECK_OK(call) model_check((call) == 0, __FILE__, __LINE__, #call)

#endif
