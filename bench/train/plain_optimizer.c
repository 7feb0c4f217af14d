/* SPDX-License-Identifier: Apache-2.0 */
/* plain_optimizer.c: AdamW (Loshchilov and Hutter, arXiv:1711.05101) on the host, as plain_optimizer.h
 * declares it. plain_optimizer_device.c does the same on a GPU. */
#include "bench/train/plain_optimizer.h"
#include "bench/threads.h"
#include "bench/train/state_hash.h"

#include <math.h>
#include <stdlib.h>

/* Elements that are summed or updated at a time. They fit into a cache, and their number does not depend
 * on the number of threads, so neither do the bits. */
enum { BLOCK = 1 << 14 };

static int64_t n_blocks(int64_t n)
{
    return (n + BLOCK - 1) / BLOCK;
}

static int64_t block_elements(int64_t n, int64_t block)
{
    return n - block * BLOCK < BLOCK ? n - block * BLOCK : BLOCK;
}

static bool on_host(const struct plain *p)
{
    return p->compute->dev->ops->host_memory;
}

static float *fp32_array(struct plain *p)
{
    void *at = NULL;
    struct zr_device *dev = p->compute->dev;
    return dev->ops->alloc(dev, p->n_params * (int64_t)sizeof(float), &at) ? NULL : at;
}

static void free_array(struct plain *p, float *at)
{
    struct zr_device *dev = p->compute->dev;
    if (at)
        dev->ops->free(dev, at, p->n_params * (int64_t)sizeof(float));
}

static void set_up_state(struct plain *p)
{
    const struct compute *on = p->compute;
    IN_PARTS(on)
    {
        int64_t from = part_at(on, p->n_params, part), n = part_at(on, p->n_params, part + 1) - from;
        memset(p->m + from, 0, (size_t)n * sizeof *p->m);
        memset(p->v + from, 0, (size_t)n * sizeof *p->v);
    }
    float *master = p->master;
    for (int32_t t = 0; master && t < p->n_tensors; t++) {
        const real *param = *p->tensors[t].param;
        int64_t n = tensor_elements(&p->tensors[t]);
        for (int64_t i = 0; i < n; i++)
            *master++ = to_float(param[i]);
    }
}

static int open_host(struct plain *p)
{
    bool has_master = sizeof(real) != sizeof(float);
    int64_t most = 0;
    for (int32_t t = 0; t < p->n_tensors; t++)
        most = tensor_elements(&p->tensors[t]) > most ? tensor_elements(&p->tensors[t]) : most;
    p->sums = malloc((size_t)n_blocks(most) * sizeof *p->sums);
    p->m = fp32_array(p);
    p->v = fp32_array(p);
    p->master = has_master ? fp32_array(p) : NULL;
    if (!p->m || !p->v || !p->sums || (has_master && !p->master)) {
        return zr_fail(ZERO_ERR_NOMEM, "no memory for the optimizer state of %lld parameters",
                       (long long)p->n_params);
    }
    set_up_state(p);
    return 0;
}

int plain_open(struct plain *p, const struct compute *compute, const struct zero_tensor *tensors,
               int32_t n_tensors)
{
    *p = (struct plain){.compute = compute, .tensors = tensors, .n_tensors = n_tensors};
    for (int32_t t = 0; t < n_tensors; t++)
        p->n_params += tensor_elements(&tensors[t]);
    int err = on_host(p) ? open_host(p) : plain_device_open(p);
    if (err)
        plain_close(p);
    return err;
}

/* Sums in double precision, in eight lanes so that the loop can be vectorised. */
MODEL_CLONES static double sum_squares(const real *grad, int64_t n)
{
    double lanes[8] = {0};
    for (int64_t i = 0; i + 8 <= n; i += 8) {
        for (int j = 0; j < 8; j++) {
            double g = (double)to_float(grad[i + j]);
            lanes[j] += g * g;
        }
    }
    for (int64_t i = n - n % 8; i < n; i++) {
        double g = (double)to_float(grad[i]);
        lanes[0] += g * g;
    }
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

struct adamw {
    float lr, beta1, beta2, eps, c1, c2, grad_scale;
};

MODEL_CLONES static void adamw(const struct adamw *a, float decay, float *restrict w,
                               const real *restrict grad, float *restrict m, float *restrict v, int64_t n)
{
    float lr = a->lr, b1 = a->beta1, b2 = a->beta2, eps = a->eps, c1 = a->c1, c2 = a->c2,
          scale = a->grad_scale;
    for (int64_t i = 0; i < n; i++) {
        float g = to_float(grad[i]) * scale;
        m[i] = b1 * m[i] + (1.0f - b1) * g;
        v[i] = b2 * v[i] + (1.0f - b2) * (g * g);
        w[i] = w[i] - lr * ((m[i] / c1) / (sqrtf(v[i] / c2) + eps) + decay * w[i]);
    }
}

/* Ties are rounded away from zero, as in the wrapped program. */
MODEL_CLONES static void round_weights(uint16_t *restrict param, const float *restrict w, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        param[i] = zr_round_away(w[i]);
}

static double sum_squares_of(struct plain *p, const real *grad, int64_t n)
{
    const struct compute *on = p->compute;
    double sum = 0.0;
    IN_PARTS(on)
    {
        int64_t to = part_at(on, n_blocks(n), part + 1);
        for (int64_t b = part_at(on, n_blocks(n), part); b < to; b++)
            p->sums[b] = sum_squares(grad + b * BLOCK, block_elements(n, b));
    }
    for (int64_t b = 0; b < n_blocks(n); b++)
        sum += p->sums[b];
    return sum;
}

/* Updates a tensor whose state begins at element `at`, and zeroes gradients that the model adds to. */
static void update(struct plain *p, const struct adamw *a, float decay, const struct zero_tensor *tensor,
                   int64_t at, int64_t n, bool skip)
{
    const struct compute *on = p->compute;
    IN_PARTS(on)
    {
        int64_t to = part_at(on, n_blocks(n), part + 1);
        for (int64_t b = part_at(on, n_blocks(n), part); b < to; b++) {
            int64_t first = b * BLOCK, size = block_elements(n, b);
            real *param = (real *)*tensor->param + first, *grad = (real *)*tensor->grad + first;
            float *w = p->master ? p->master + at + first : (void *)param;
            if (!skip)
                adamw(a, decay, w, grad, p->m + at + first, p->v + at + first, size);
            if (!skip && p->master)
                round_weights((void *)param, w, size);
            if (!(tensor->flags & ZERO_GRAD_OVERWRITE))
                memset(grad, 0, (size_t)size * sizeof *grad);
        }
    }
}

int plain_step(struct plain *p, const struct train_options *o, float lr, struct zero_step_info *info)
{
    if (!on_host(p))
        return plain_device_step(p, o, lr, info);
    double sum = 0.0, scale = 1.0 / (double)o->accum;
    for (int32_t t = 0; t < p->n_tensors; t++)
        sum += sum_squares_of(p, *p->tensors[t].grad, tensor_elements(&p->tensors[t]));
    double norm = sqrt(sum) * scale, clip = (double)(float)o->clip;
    bool clipped = clip > 0 && norm > clip, finite = isfinite(norm);
    p->t += finite;
    *info = (struct zero_step_info){.t = p->t, .grad_norm = norm, .clipped = clipped, .skipped = !finite};

    struct adamw a = {.lr = lr, .beta1 = (float)o->beta1, .beta2 = (float)o->beta2, .eps = 1e-8f};
    a.c1 = 1.0f - powf(a.beta1, (float)p->t);
    a.c2 = 1.0f - powf(a.beta2, (float)p->t);
    a.grad_scale = (float)(clipped ? scale * (clip / norm) : scale);
    for (int64_t t = 0, at = 0; t < p->n_tensors; t++) {
        const struct zero_tensor *tensor = &p->tensors[t];
        int64_t n = tensor_elements(tensor);
        float decay = tensor->flags & ZERO_NO_DECAY ? 0.0f : (float)o->weight_decay;
        update(p, &a, decay, tensor, at, n, !finite);
        at += n;
    }
    return 0;
}

int plain_read(void *plain, int32_t tensor, int32_t value, int64_t first, int64_t n, void *dst)
{
    struct plain *p = plain;
    const float *from = value == ZERO_VALUE_STATE ? p->m : value == ZERO_VALUE_STATE + 1 ? p->v : p->master;
    if (from)
        for (int32_t t = 0; t < tensor; t++)
            from += tensor_elements(&p->tensors[t]);
    else /* fp32: the weights themselves, which are not contiguous */
        from = *p->tensors[tensor].param;
    if (!on_host(p))
        return plain_device_read(p, from + first, n, dst);
    memcpy(dst, from + first, (size_t)n * sizeof *from);
    return 0;
}

void plain_close(struct plain *p)
{
    if (!p->compute)
        return;
    if (on_host(p)) {
        free_array(p, p->master);
        free_array(p, p->m);
        free_array(p, p->v);
        free(p->sums);
    } else {
        plain_device_close(p);
    }
    *p = (struct plain){0};
}
