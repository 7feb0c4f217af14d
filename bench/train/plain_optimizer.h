/* SPDX-License-Identifier: Apache-2.0 */
/* plain_optimizer.h: the optimizer of zero-bench train --plain: the loop that a C model has before it is wrapped. */
#ifndef ZERO_BENCH_PLAIN_H
#define ZERO_BENCH_PLAIN_H

#include "bench/gpt2/gpt2_real.h"
#include "bench/place.h"
#include "bench/train/train.h"
#include "kernels/agreement.h"

struct plain {
    /* borrowed */
    const struct place *place;
    /* borrowed: only pointers, shapes and flags are used */
    const struct zero_tensor *tensors;
    int32_t n_tensors;
    int64_t n_params;
    /* (n_params) fp32 weights, tensor after tensor; NULL when the model's own are fp32 */
    float *master;
    /* (n_params) moments */
    float *m, *v;
    /* of squares, of each block of a tensor; on the host only */
    double *sums;
    /* steps taken */
    int64_t t;

    /* On a GPU only. */
    /* (n_params) the gradients in fp32; NULL when the model's own are */
    float *grad;
    /* sum of the gradients' squares */
    struct zr_own_squares *norm;
    /* of this one rank */
    struct zr_agreement *agreement;
    struct zr_step_scalars *scalars;
    /* memory of host_alloc */
    struct zr_agreed *agreed;
    /* agreed is there */
    struct zr_event *reported;
    /* of all on the GPU; agreed is not in it */
    void *memory;
    int64_t memory_bytes;
};

/* Takes memory for the state and reads the model's present weights. Returns 0 or a zr_err, holding nothing.
 */
int plain_open(struct plain *p, const struct place *place, const struct zero_tensor *tensors,
               int32_t n_tensors);
/* Mean over micro-batches, global-norm clip, AdamW with the arithmetic of kernels/device.h; then zeroes the
 * gradients, but for those with ZERO_GRAD_OVERWRITE. On a GPU it waits for the norm. Returns 0 or a
 * zr_err. */
int plain_step(struct plain *p, const struct train_options *o, float lr, struct zero_step_info *info);
/* As zero_read of ZERO_VALUE_MASTER and ZERO_VALUE_STATE (a state_reader). */
int plain_read(void *plain, int32_t tensor, int32_t value, int64_t first, int64_t n, void *dst);
void plain_close(struct plain *p);

/* plain_optimizer_device.c: the same for a place whose memory the CPU cannot touch. p has its place, tensors and
 * counts; plain_close() gives back what a failed open has taken. */
int plain_device_open(struct plain *p);
int plain_device_step(struct plain *p, const struct train_options *o, float lr, struct zero_step_info *info);
int plain_device_read(struct plain *p, const float *from, int64_t n, void *dst);
void plain_device_close(struct plain *p);

#endif
