/* plain.c: see plain.h. AdamW: Loshchilov and Hutter, arXiv:1711.05101. */
#include "bench/plain.h"
#include "bench/state_hash.h"

#include <math.h>
#include <stdlib.h>

int plain_open(struct plain *p, const struct zero_tensor *tensors, int32_t n_tensors)
{
    *p = (struct plain){.tensors = tensors, .n_tensors = n_tensors};
    for (int32_t t = 0; t < n_tensors; t++) {
        p->n_params += tensor_elements(&tensors[t]);
    }
    bool has_master = sizeof(real) != sizeof(float);
    p->m = calloc((size_t)p->n_params, sizeof *p->m);
    p->v = calloc((size_t)p->n_params, sizeof *p->v);
    p->master = has_master ? malloc((size_t)p->n_params * sizeof *p->master) : NULL;
    if (!p->m || !p->v || (has_master && !p->master)) {
        int64_t n = p->n_params;
        plain_close(p);
        return zr_fail(ZR_ERR_NOMEM, "no memory for the optimizer state of %lld parameters", (long long)n);
    }
    float *master = p->master;
    for (int32_t t = 0; has_master && t < n_tensors; t++) {
        const real *param = *tensors[t].param;
        int64_t n = tensor_elements(&tensors[t]);
        for (int64_t i = 0; i < n; i++) {
            *master++ = to_float(param[i]);
        }
    }
    return 0;
}

static double grad_norm(const struct plain *p, double scale)
{
    double sum = 0.0;
    for (int32_t t = 0; t < p->n_tensors; t++) {
        const real *grad = *p->tensors[t].grad;
        int64_t n = tensor_elements(&p->tensors[t]);
        for (int64_t i = 0; i < n; i++) {
            double g = (double)to_float(grad[i]);
            sum += g * g;
        }
    }
    return sqrt(sum) * scale;
}

void plain_step(struct plain *p, const struct train_options *o, float lr, struct zero_step_info *info)
{
    double scale = 1.0 / (double)o->accum, norm = grad_norm(p, scale);
    float clip = (float)o->clip;
    bool clipped = clip > 0 && norm > (double)clip, finite = isfinite(norm);
    p->t += finite;
    *info = (struct zero_step_info){.t = p->t, .grad_norm = norm, .clipped = clipped, .skipped = !finite};

    float grad_scale = (float)(clipped ? scale * ((double)clip / norm) : scale);
    float b1 = (float)o->beta1, b2 = (float)o->beta2, eps = 1e-8f;
    float c1 = 1.0f - powf(b1, (float)p->t), c2 = 1.0f - powf(b2, (float)p->t);
    float *m = p->m, *v = p->v, *master = p->master;
    for (int32_t t = 0; t < p->n_tensors; t++) {
        const struct zero_tensor *tensor = &p->tensors[t];
        real *param = *tensor->param, *grad = *tensor->grad;
        int64_t n = tensor_elements(tensor);
        float decay = tensor->flags & ZERO_NO_DECAY ? 0.0f : (float)o->weight_decay;
        for (int64_t i = 0; finite && i < n; i++) {
            float g = to_float(grad[i]) * grad_scale, w = master ? master[i] : to_float(param[i]);
            m[i] = b1 * m[i] + (1.0f - b1) * g;
            v[i] = b2 * v[i] + (1.0f - b2) * (g * g);
            w = w - lr * ((m[i] / c1) / (sqrtf(v[i] / c2) + eps) + decay * w);
            param[i] = from_float(w);
            if (master) {
                master[i] = w;
            }
        }
        memset(grad, 0, (size_t)n * sizeof *grad);
        m += n;
        v += n;
        master = master ? master + n : NULL;
    }
}

int plain_read(void *plain, int32_t tensor, int32_t value, int64_t first, int64_t n, void *dst)
{
    const struct plain *p = plain;
    for (int32_t t = 0; t < tensor; t++) {
        first += tensor_elements(&p->tensors[t]);
    }
    const float *from = value == ZERO_VALUE_STATE ? p->m : value == ZERO_VALUE_STATE + 1 ? p->v : p->master;
    if (value == ZERO_VALUE_MASTER && !from) { /* fp32: the weights themselves, which are not side by side */
        for (int32_t t = 0; t < tensor; t++) {
            first -= tensor_elements(&p->tensors[t]);
        }
        from = *p->tensors[tensor].param;
    }
    memcpy(dst, from + first, (size_t)n * sizeof *from);
    return 0;
}

void plain_close(struct plain *p)
{
    free(p->master);
    free(p->m);
    free(p->v);
    *p = (struct plain){0};
}
