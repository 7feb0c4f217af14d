/* SPDX-License-Identifier: Apache-2.0 */
/* plain_optimizer_device.c: the optimizer of plain_optimizer.h on a GPU. It enqueues the device's own
 * kernels on the model's stream and waits only for the norm. Norm and AdamW are those of kernels/device.h,
 * so the bits are those of the wrapped program. */
#include "bench/train/plain_optimizer.h"
#include "bench/train/state_hash.h"

#include <math.h>

static uintptr_t take(int64_t *at, int64_t bytes)
{
    int64_t here = *at;
    *at += (bytes + 255) / 256 * 256;
    return (uintptr_t)here;
}

/* Places the state's arrays one after the other in the memory at base. Returns their bytes. */
static int64_t lay_out(struct plain *p, uintptr_t base)
{
    bool narrow = sizeof(real) != sizeof(float);
    int64_t at = 0, n_bytes = p->n_params * (int64_t)sizeof(float);
    p->m = (float *)(base + take(&at, n_bytes));
    p->v = (float *)(base + take(&at, n_bytes));
    if (narrow) {
        p->master = (float *)(base + take(&at, n_bytes));
        p->grad = (float *)(base + take(&at, n_bytes));
    }
    p->norm = (struct zr_own_squares *)(base + take(&at, sizeof *p->norm));
    p->agreement = (struct zr_agreement *)(base + take(&at, sizeof *p->agreement));
    p->scalars = (struct zr_step_scalars *)(base + take(&at, sizeof *p->scalars));
    return at;
}

static int open_state(struct plain *p)
{
    struct zr_device *dev = p->compute->dev;
    void *memory = NULL;
    int64_t n = p->n_params;
    p->memory_bytes = lay_out(p, 0);
    int err = dev->ops->alloc(dev, p->memory_bytes, &memory);
    if (err)
        return err;
    p->memory = memory;
    lay_out(p, (uintptr_t)memory);
    err = dev->ops->host_alloc(dev, sizeof *p->agreed, (void **)&p->agreed);
    err = err ? err : dev->ops->event_open(dev, &p->reported);
    err = err ? err : dev->ops->zero(p->compute->stream, p->m, n * (int64_t)sizeof *p->m);
    return err ? err : dev->ops->zero(p->compute->stream, p->v, n * (int64_t)sizeof *p->v);
}

int plain_device_open(struct plain *p)
{
    const struct zr_device_ops *dev = p->compute->dev->ops;
    int err = open_state(p);
    for (int64_t t = 0, at = 0; t < p->n_tensors && !err && p->master; t++) {
        int64_t n = tensor_elements(&p->tensors[t]);
        err = dev->cast(p->compute->stream, p->master + at, ZERO_F32, *p->tensors[t].param, MODEL_DTYPE, n);
        at += n;
    }
    return err;
}

/* Converts the gradients to fp32 and sums their squares. */
static int collect(struct plain *p)
{
    const struct zr_device_ops *dev = p->compute->dev->ops;
    struct zr_stream *s = p->compute->stream;
    int err = dev->zero(s, p->norm, sizeof *p->norm);
    for (int64_t t = 0, at = 0; t < p->n_tensors && !err; t++) {
        const struct zero_tensor *tensor = &p->tensors[t];
        int64_t n = tensor_elements(tensor);
        const float *grad = *tensor->grad;
        if (p->grad) {
            grad = p->grad + at;
            err = dev->cast(s, p->grad + at, ZERO_F32, *tensor->grad, MODEL_DTYPE, n);
        }
        err = err ? err : dev->sum_squares(s, &p->norm->sum, grad, ZERO_F32, n, NULL);
        at += n;
    }
    return err;
}

int plain_device_step(struct plain *p, const struct train_options *o, float lr, struct zero_step_info *info)
{
    const struct zr_device_ops *dev = p->compute->dev->ops;
    struct zr_stream *s = p->compute->stream;
    const struct zr_agree_begin begin = {.own = p->norm, .out = p->agreement};
    const struct zr_agree_end end = {
        .all = p->agreement,
        .n_ranks = 1,
        .n_averaged = 1,
        .scale = 1.0 / (double)o->accum,
        .clip = (float)o->clip,
        .scalars = p->scalars,
        .agreed = p->agreed,
    };
    struct zr_update u = {
        .kind = ZERO_ADAMW,
        .param_dtype = MODEL_DTYPE,
        .grad_dtype = ZERO_F32,
        .lr = lr,
        .beta1 = (float)o->beta1,
        .beta2 = (float)o->beta2,
        .eps = 1e-8f,
        .t = p->t + 1, /* if the step is skipped, the kernels change nothing */
        .scalars = p->scalars,
    };
    u.c1 = 1.0f - powf(u.beta1, (float)u.t);
    u.c2 = 1.0f - powf(u.beta2, (float)u.t);
    int err = collect(p);
    err = err ? err : dev->agree_begin(s, &begin);
    err = err ? err : dev->agree_end(s, &end);
    err = err ? err : dev->event_record(p->reported, s);
    for (int64_t t = 0, at = 0; t < p->n_tensors && !err; t++) {
        const struct zero_tensor *tensor = &p->tensors[t];
        u.n = tensor_elements(tensor);
        u.decay = tensor->flags & ZERO_NO_DECAY ? 0.0f : (float)o->weight_decay;
        u.master = p->master ? p->master + at : *tensor->param;
        u.param = *tensor->param;
        u.grad = p->grad ? p->grad + at : *tensor->grad;
        u.state[0] = p->m + at;
        u.state[1] = p->v + at;
        err = dev->update(s, &u);
        if (!err && !(tensor->flags & ZERO_GRAD_OVERWRITE))
            err = dev->zero(s, *tensor->grad, u.n * (int64_t)sizeof(real));
        at += u.n;
    }
    err = err ? err : dev->event_sync(p->reported);
    if (err)
        return err;
    p->t += !p->agreed->skipped;
    *info = (struct zero_step_info){.t = p->t,
                                    .grad_norm = p->agreed->grad_norm,
                                    .clipped = p->agreed->clipped,
                                    .skipped = p->agreed->skipped};
    return 0;
}

int plain_device_read(struct plain *p, const float *from, int64_t n, void *dst)
{
    const struct zr_device_ops *dev = p->compute->dev->ops;
    int err = dev->copy(p->compute->stream, dst, from, n * (int64_t)sizeof *from);
    return err ? err : dev->stream_sync(p->compute->stream);
}

void plain_device_close(struct plain *p)
{
    struct zr_device *dev = p->compute->dev;
    if (p->memory) {
        dev->ops->stream_sync(p->compute->stream);
        dev->ops->free(dev, p->memory, p->memory_bytes);
    }
    if (p->agreed)
        dev->ops->host_free(dev, p->agreed, sizeof *p->agreed);
    dev->ops->event_close(p->reported);
}
