/* plain.h: the optimizer of zero-bench train --plain: the loop that a C model has before it is wrapped. */
#ifndef ZERO_BENCH_PLAIN_H
#define ZERO_BENCH_PLAIN_H

#include "bench/gpt2_real.h"
#include "bench/train.h"

struct plain {
    const struct zero_tensor *tensors; /* borrowed: only pointers, shapes and flags are used */
    int32_t n_tensors;
    int64_t n_params;
    float *master; /* (n_params) fp32 weights, tensor after tensor; NULL when the model's own are fp32 */
    float *m, *v;  /* (n_params) each */
    int64_t t;     /* steps taken */
};

/* Takes memory for the state and reads the model's present weights. Returns 0 or ZR_ERR_NOMEM, holding
 * nothing. */
int plain_open(struct plain *p, const struct zero_tensor *tensors, int32_t n_tensors);
/* Mean over micro-batches, global-norm clip, AdamW with the arithmetic of kernels/device.h; then zeroes the
 * gradients. */
void plain_step(struct plain *p, const struct train_options *o, float lr, struct zero_step_info *info);
/* As zero_read of ZERO_VALUE_MASTER and ZERO_VALUE_STATE (a state_reader). */
int plain_read(void *plain, int32_t tensor, int32_t value, int64_t first, int64_t n, void *dst);
void plain_close(struct plain *p);

#endif
