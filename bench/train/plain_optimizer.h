/* SPDX-License-Identifier: Apache-2.0 */
/* plain_optimizer.h: the optimizer of zero-bench train --plain, as a C program has it before it is
 * wrapped. */
#ifndef ZERO_BENCH_PLAIN_H
#define ZERO_BENCH_PLAIN_H

#include "bench/compute.h"
#include "bench/model/model_real.h"
#include "bench/train/train.h"
#include "kernels/agreement.h"

struct plain {
    /* borrowed */
    const struct compute *compute;
    /* borrowed; pointers, shapes and flags are used */
    const struct zero_tensor *tensors;
    int32_t n_tensors;
    int64_t n_params;
    /* (n_params) fp32 weights, tensor after tensor; NULL if the model's own are fp32 */
    float *master;
    /* (n_params) moments */
    float *m, *v;
    /* sums of squares of a tensor's blocks; on the host only */
    double *sums;
    /* number of steps taken */
    int64_t t;

    /* On a GPU only. */
    /* (n_params) gradients in fp32; NULL if the model's own are fp32 */
    float *grad;
    /* sum of the gradients' squares */
    struct zr_own_squares *norm;
    /* the agreement of a world of one rank */
    struct zr_agreement *agreement;
    struct zr_step_scalars *scalars;
    /* memory from host_alloc */
    struct zr_agreed *agreed;
    /* recorded when agreed is written */
    struct zr_event *reported;
    /* all of the above on the GPU, except agreed */
    void *memory;
    int64_t memory_bytes;
};

/* Takes memory for the state and copies the model's weights. Returns 0 or a zero_err, and then holds
 * nothing. */
int plain_open(struct plain *p, const struct compute *compute, const struct zero_tensor *tensors,
               int32_t n_tensors);
/* Takes the mean over micro-batches, clips by the global norm, and applies AdamW with the arithmetic of
 * kernels/device.h. Then zeroes gradients without ZERO_GRAD_OVERWRITE. On a GPU it waits for the norm.
 * Returns 0 or a zero_err. */
int plain_step(struct plain *p, const struct train_options *o, float lr, struct zero_step_info *info);
/* A state_reader: reads what zero_read does for ZERO_VALUE_MASTER and ZERO_VALUE_STATE. */
int plain_read(void *plain, int32_t tensor, int32_t value, int64_t first, int64_t n, void *dst);
void plain_close(struct plain *p);

/* plain_optimizer_device.c: the same on a GPU. p has its device, tensors and counts. plain_close() frees
 * what a failed open has taken. */
int plain_device_open(struct plain *p);
int plain_device_step(struct plain *p, const struct train_options *o, float lr, struct zero_step_info *info);
int plain_device_read(struct plain *p, const float *from, int64_t n, void *dst);
void plain_device_close(struct plain *p);

#endif
